"""Hidden states in files: whole or not there, and only those of the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from twobit.errors import FormatError
from twobit.format import writer
from twobit.quant.states import States, spill_bytes

LENGTHS = [3, 5, 1]


def value(layer: int, i: int) -> torch.Tensor:
    return torch.full((LENGTHS[i], 4), 10.0 * layer + i)


def fill(states: States, layer: int) -> None:
    states.begin()
    for i in (2, 0, 1):
        states.write(i, value(layer, i))


@pytest.fixture
def states(tmp_path: Path) -> States:
    made = States(tmp_path / "spill", "me", LENGTHS, 4)
    assert not made.resume(9)
    for layer in range(3):
        fill(made, layer)
        made.commit()
    return made


def again(tmp_path: Path, at_most: int = 9, owner: str = "me", lengths: list[int] = LENGTHS) -> States:
    made = States(tmp_path / "spill", owner, lengths, 4)
    made.resume(at_most)
    return made


def test_read_what_was_written(states: States, tmp_path: Path) -> None:
    for found in (states, again(tmp_path)):
        assert found.layer == 2
        assert all(torch.equal(found.read(i), value(2, i)) for i in range(3))
    fill(states, 3)
    assert torch.equal(states.read(1), value(2, 1))  # the next layer's input is not read before it is whole
    states.remove()
    assert not (tmp_path / "spill").exists()


def test_two_files_at_most(states: States, tmp_path: Path) -> None:
    fill(states, 3)
    size = sum(file.stat().st_size for file in (tmp_path / "spill").glob("*.bin"))
    assert size <= spill_bytes(sum(LENGTHS), 4)
    states.commit()
    assert again(tmp_path, at_most=2).layer == 2  # the layer before was not finished: its input is still there
    assert again(tmp_path).layer == 2


def test_an_unfinished_file_does_not_count(states: States, tmp_path: Path) -> None:
    fill(states, 3)
    found = again(tmp_path)
    assert found.layer == 2
    assert [file.name for file in sorted((tmp_path / "spill").iterdir())] == ["states-00002.bin", "states-00002.json"]


@pytest.mark.parametrize("damage", ["flip", "cut", "longer record", "owner", "lengths", "no record", "not JSON"])
def test_damaged_and_foreign_states_are_left_out(states: States, tmp_path: Path, damage: str) -> None:
    assert states.layer == 2
    file, record = tmp_path / "spill" / "states-00002.bin", tmp_path / "spill" / "states-00002.json"
    for old in (tmp_path / "spill").glob("states-00001.*"):
        old.unlink()
    data = file.read_bytes()
    if damage == "flip":
        file.write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])
    elif damage == "cut":
        file.write_bytes(data[:-1])
    elif damage == "longer record":
        values = json.loads(record.read_text())
        record.write_text(json.dumps(values | {"crc32": values["crc32"] * 2}))
    elif damage == "no record":
        record.unlink()
    elif damage == "not JSON":
        record.write_text("[1")
    owner, lengths = ("you" if damage == "owner" else "me"), ([5, 3, 1] if damage == "lengths" else LENGTHS)
    assert again(tmp_path, owner=owner, lengths=lengths).layer == -1
    assert not list((tmp_path / "spill").iterdir())


def test_wrong_shapes_are_refused(states: States) -> None:
    states.begin()
    with pytest.raises(ValueError, match="shape"):
        states.write(0, value(3, 1))


def test_space_is_checked_where_the_states_will_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.check_space(tmp_path / "out", 1000, 1000, tmp_path / "spill")
    free = writer.shutil.disk_usage(tmp_path).free
    with pytest.raises(FormatError, match="disk full"):
        writer.check_space(tmp_path / "out", 1000, free)
    (tmp_path / "spill").mkdir()
    with open(tmp_path / "spill" / "states-00000.bin", "wb") as file:
        file.truncate(2 * free)  # what is there already counts
    writer.check_space(tmp_path / "out", 1000, 2 * free, tmp_path / "spill")
