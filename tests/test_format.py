"""Manifest, writer and reader: whole folders and interrupted runs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_folders import CONFIG, FINGERPRINT, HIDDEN, KEYS, WIDE, contents, finish, make, step
from safetensors import safe_open
from test_layout import assert_same, random_matrix

from twobit.errors import FormatError
from twobit.format import layout, writer
from twobit.format.reader import open_model
from twobit.format.safetensors_file import read_header
from twobit.format.writer import ModelWriter, PackedTensor, check_output, check_space, staging_path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("built") / "model")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("split") / "model", shard_bytes=30_000)


# -- what is written ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["built", "split"])
def test_round_trip(which: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which)
    model = open_model(folder, check=True)
    for key in KEYS:
        for name, tensor in step(key).items():
            entry = model.manifest.tensors[name]
            assert (entry.kind, entry.shape, entry.range) == (tensor.entry.kind, tensor.entry.shape, tensor.entry.range)
            for full, stored in entry.stored(name).items():
                data = model.plain[full] if entry.kind == "plain" else model.planes[full]
                assert np.array_equal(data, tensor.planes[stored.plane])
                assert not data.flags.writeable
                assert entry.kind == "plain" or (data.ctypes.data % 64 == 0 and data.size % 64 == 0)
    assert_same(model.matrix("model.layers.1.mlp.down_proj"), random_matrix(HIDDEN, WIDE, (3, 8, 16)))
    assert np.array_equal(model.tensor("model.layers.0.self_attn.q_proj.bias"), np.full(17, 0.5, np.float32))
    norm = np.random.default_rng([0, 3]).standard_normal(HIDDEN).astype(np.float32)
    assert np.allclose(model.tensor("model.norm.weight"), norm, rtol=2**-7)
    assert {k: v for k, v in model.config.items() if k != "quantization_config"} == CONFIG
    assert model.manifest.recipe == {"damping": 0.1, "residual": 6}
    assert (folder / "tokenizer.json").read_bytes() == b"{}"
    assert not staging_path(folder).exists()


@pytest.mark.parametrize("which", ["built", "split"])
def test_stock_reader_sees_the_same_bytes(which: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which)
    model = open_model(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    seen = set()
    for part, id_key in (("draft", "build_id"), ("residual", "build_id")):
        for file in folder.glob(f"twobit-{part}-*.safetensors"):
            with safe_open(file, "numpy") as opened:
                assert opened.metadata()[id_key] == model.manifest.build_id
                assert opened.metadata()["part"] == part
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    assert index["weight_map"][name] == file.name
                    seen.add(name)
                    if name in model.planes:
                        assert np.array_equal(opened.get_tensor(name), model.planes[name])
                    elif model.manifest.tensors[name].dtype != "BF16":  # numpy has none
                        assert np.array_equal(opened.get_tensor(name), model.tensor(name))
    assert seen == set(model.manifest.stored())
    assert index["metadata"]["total_size"] == sum(s.bytes for _, s in model.manifest.stored().values())


def test_splits_stay_below_the_limit(split: Path) -> None:
    files = sorted(split.glob("twobit-*.safetensors"))
    assert len(files) > 4
    planes = open_model(split).planes
    for file in files:
        names = list(read_header(file).tensors)
        assert file.stat().st_size <= 30_000 or len(names) == 1
        assert [n in planes for n in names] == sorted((n in planes for n in names), reverse=True)
    assert open_model(split).manifest.build_id == open_model(split, parts="draft").manifest.build_id


def test_small_tensors_come_last_in_the_draft_shard(built: Path) -> None:
    raw = (built / "twobit-draft-00001-of-00001.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    kinds = [info["dtype"] for info in header.values()]
    assert kinds == sorted(kinds, key=["U8", "F32", "F16", "BF16"].index)
    assert (8 + length) % 64 == 0


def test_bytes_are_deterministic(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere" / "other name"
    with ModelWriter(out, FINGERPRINT | {"threads": 2}) as made:
        for key in reversed(KEYS):
            made.store(key, step(key))
        finish(made)
    assert contents(out) == contents(built)


def test_bits_per_weight(built: Path) -> None:
    bits = open_model(built).manifest.bits()
    assert bits["parameters"] == 1234567
    assert bits["draft_bytes"] + bits["residual_bytes"] == sum(
        s.bytes for _, s in open_model(built).manifest.stored().values()
    )
    one = layout.plane_sizes(96, 96, 2, 6, 16)
    two = layout.plane_sizes(96, 172, 3, 8, 16)
    expected = 8 * sum(size[p] for size in (one, two) for p in layout.RESIDUAL_PLANES) / (96 * 96 + 96 * 172)
    assert bits["residual_bpw"] == pytest.approx(expected)


# -- interrupted runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", range(len(KEYS) + 1))
def test_resume_gives_the_same_bytes(built: Path, tmp_path: Path, done: int) -> None:
    out = tmp_path / "model"
    with ModelWriter(out, FINGERPRINT) as made:
        for key in KEYS[:done]:
            made.store(key, step(key), notes={"key": key})
    assert not out.exists()
    with pytest.raises(FormatError, match="unfinished"):
        open_model(staging_path(out))
    with ModelWriter(out, FINGERPRINT) as made:
        assert [made.has(key) for key in KEYS] == [i < done for i in range(len(KEYS))]
        for key in KEYS[:done]:
            assert made.notes(key) == {"key": key}
            assert set(made.load(key)) == set(step(key))
        for key in KEYS[done:]:
            made.store(key, step(key))
        finish(made)
    assert contents(out) == contents(built)


def in_a_child(work: Callable[[], object]) -> int:
    """Runs `work` in a forked process; its exit status, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_after(calls: int, log: list[str]) -> None:
    """Makes this process kill itself before its next rename or sync after `calls` of them."""

    def call(real: Callable, *args: object, **more: object) -> object:
        if len(log) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        log.append(real.__name__)
        return real(*args, **more)

    for name in ("replace", "rename", "fsync"):
        setattr(os, name, partial(call, getattr(os, name)))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("replacing", [False, True])
def test_killed_anywhere(built: Path, tmp_path: Path, replacing: bool) -> None:
    """Killed before its n-th rename or sync, a run leaves the old model, the new one or none; the next ends equal."""
    out, old = tmp_path / "model", make(tmp_path / "old", seed=1)
    before, after = contents(old), contents(built)

    def run() -> None:
        with ModelWriter(out, FINGERPRINT, overwrite=True) as made:
            for key in KEYS:
                if not made.has(key):
                    made.store(key, step(key))
            finish(made)

    def run_and_die(calls: int) -> None:
        die_after(calls, [])
        run()

    outcomes = []
    for calls in (0, 1, 2, 9, 27, 30, 39, *range(43, 50)):
        for folder in (out, staging_path(out)):
            shutil.rmtree(folder, ignore_errors=True)
        if replacing:
            shutil.copytree(old, out)
        status = in_a_child(lambda calls=calls: run_and_die(calls))
        outcomes.append(status)
        if out.exists():
            assert contents(out) in ((before, after) if replacing else (after,))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        run()
        assert contents(out) == after
        assert not staging_path(out).exists()
    assert outcomes[-1] == 0 and len(outcomes) > 9


def test_stopped_while_the_staging_folder_is_removed(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is left is known for ours by the next run into the same output."""
    unlink, left = os.unlink, [0]

    def stopped(path: str, **options: Any) -> None:
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        unlink(path, **options)

    for count in range(10):
        out = tmp_path / f"model{count}"
        with ModelWriter(out, FINGERPRINT) as made:
            for key in KEYS:
                made.store(key, step(key))
            (made.staging / "spill").mkdir()
            (made.staging / "spill" / "states.bin").touch()
            left[0] = count
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(os, "unlink", stopped)
                made.discard()
        assert contents(make(out)) == contents(built)
        assert not staging_path(out).exists()


def test_resume_refuses_other_options(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with ModelWriter(out, FINGERPRINT) as made:
        made.store("embed", step("embed"))
    other = {**FINGERPRINT, "options": {"residual": 8, "rules": []}}
    with pytest.raises(FormatError, match=r"options\.residual was 6, is now 8") as caught:
        ModelWriter(out, other)
    assert "--restart" in (caught.value.hint or "")
    with ModelWriter(out, other, restart=True) as made:
        assert not made.has("embed")
        made.discard()
    assert not staging_path(out).exists()


def test_two_runs_at_once(tmp_path: Path) -> None:
    with ModelWriter(tmp_path / "model", FINGERPRINT), pytest.raises(FormatError, match="in use by another run"):
        ModelWriter(tmp_path / "model", FINGERPRINT)


def test_damaged_step_is_made_anew(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    with ModelWriter(out, FINGERPRINT) as made:
        for key in KEYS:
            made.store(key, step(key))
    stored = staging_path(out) / "work" / "layer-0001.bin"
    data = bytearray(stored.read_bytes())
    data[1000] ^= 1
    stored.write_bytes(data)
    with ModelWriter(out, FINGERPRINT) as made:
        with pytest.raises(FormatError, match=r"layer-0001\.bin.*damaged"):
            finish(made)
        assert not out.exists() and not (staging_path(out) / "model").exists()
        assert [made.has(key) for key in KEYS] == [True, True, False, True]
        made.store("layer-0001", step("layer-0001"))
        finish(made)
    assert contents(out) == contents(built)


# -- the disk -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("limit", [50, 20_000, 60_000])
def test_disk_full(built: Path, tmp_path: Path, limit: int) -> None:
    assert limit < max(p.stat().st_size for p in built.iterdir())
    out = tmp_path / "model"
    incoming, message = os.pipe()

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            make(out)
        except FormatError as error:
            os.write(message, f"{error}|{error.hint}".encode())

    assert in_a_child(run) == 0
    os.close(message)
    with open(incoming, "rb") as file:
        text = file.read().decode()
    assert text.startswith(f"disk full: cannot write {staging_path(out)}/")
    assert text.endswith("run the same command again: finished layers are kept")
    assert not out.exists() and not (staging_path(out) / "model").exists()
    assert not list(staging_path(out).rglob("*.tmp"))
    make(out)
    assert contents(out) == contents(built)


def test_space_is_checked_up_front(tmp_path: Path) -> None:
    check_space(tmp_path / "a" / "model", 1000)
    with pytest.raises(FormatError, match=r"disk full: writing .* takes .* GB"):
        check_space(tmp_path / "model", 1 << 60)
    assert list(tmp_path.iterdir()) == []


# -- where it may write -------------------------------------------------------------------------------------


def test_output_must_not_touch_the_source(tmp_path: Path) -> None:
    source = tmp_path / "deep" / "source"
    source.mkdir(parents=True)
    (tmp_path / "link").symlink_to(source)
    for out in (source, tmp_path / "link", source / ".." / "source"):
        with pytest.raises(FormatError, match="is the source"):
            check_output(source, out)
    for out in (source / "out", tmp_path / "link" / "a" / "b"):
        with pytest.raises(FormatError, match="inside the source"):
            check_output(source, out)
    with pytest.raises(FormatError, match="contains the source"):
        check_output(tmp_path / "link", tmp_path / "deep")
    (tmp_path / "x.partial").mkdir()
    with pytest.raises(FormatError, match="is the source"):
        check_output(tmp_path / "x.partial", tmp_path / "x")
    check_output(source, tmp_path / "deep" / "source2")
    check_output(source, tmp_path / "out")


def test_overwrite_replaces_only_twobit_models(built: Path, tmp_path: Path) -> None:
    out = make(tmp_path / "model", seed=1)
    before = contents(out)
    with pytest.raises(FormatError, match="exists"):
        ModelWriter(out, FINGERPRINT)
    (out / "thesis.txt").write_text("x")
    with pytest.raises(FormatError, match=r"thesis\.txt"):
        ModelWriter(out, FINGERPRINT, overwrite=True)
    (out / "thesis.txt").unlink()
    assert contents(out) == before
    make(out, overwrite=True)
    assert contents(out) == contents(built)
    other = tmp_path / "other"
    other.mkdir()
    for prepare in (lambda: None, lambda: (other / "config.json").write_text('{"quantization_config": null}')):
        prepare()
        with pytest.raises(FormatError, match="not a twobit model"):
            ModelWriter(other, FINGERPRINT, overwrite=True)
    assert not staging_path(other).exists()


def test_staging_folder_of_someone_else(tmp_path: Path) -> None:
    (tmp_path / "model.partial" / "work").mkdir(parents=True)
    with pytest.raises(FormatError, match="not ours"):
        ModelWriter(tmp_path / "model", FINGERPRINT, restart=True)
    assert (tmp_path / "model.partial" / "work").is_dir()


@pytest.mark.parametrize(
    "name", ["../evil", "model.safetensors", "config.json", "a/b.json", "tokenizer.json\n", "x.py"]
)
def test_only_known_files_are_added(tmp_path: Path, name: str) -> None:
    with ModelWriter(tmp_path / "model", FINGERPRINT) as made, pytest.raises(FormatError, match="cannot be put"):
        made.finish([], config={}, family="x", parameters=1, recipe={}, calibration={}, producer="x", files={name: b""})


def test_writer_refuses_what_no_reader_takes(tmp_path: Path) -> None:
    too_wide = random_matrix(16, 16)
    too_wide.row_a[3] = 200
    with pytest.raises(FormatError, match=r"q_proj: row 3 may reach"):
        PackedTensor.matrix(too_wide, wide=False, name="q_proj")
    with ModelWriter(tmp_path / "model", FINGERPRINT) as made:
        with pytest.raises(FormatError, match="cannot be a key"):
            made.store("../up", {})
        with pytest.raises(FormatError, match=r"x\.weight: data has 3 bytes, expected 4"):
            made.store("a", {"x.weight": PackedTensor.plain(b"abc", "F32", (1,))})
        with pytest.raises(FormatError, match="is not stored"):
            finish(made)
        made.store("a", {"x y": PackedTensor.plain(b"abcd", "F32", (1,))})
        with pytest.raises(FormatError, match="not a module name"):
            finish(made, ["a"])
        made.store("a", {"x": PackedTensor.plain(b"abcd", "F32", (1,))})
        made.store("b", {"x": PackedTensor.plain(b"abcd", "F32", (1,))})
        with pytest.raises(FormatError, match="x is stored twice"):
            finish(made, ["a", "b"])


def test_memory_stays_small_while_assembling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes much larger than the copy buffer go through in pieces."""
    monkeypatch.setattr(writer, "_COPY_BYTES", 1 << 16)
    rows, cols = 2048, 2048
    planes = {name: np.zeros(n, np.uint8) for name, n in layout.plane_sizes(rows, cols, 2, 8, 16).items()}
    with ModelWriter(tmp_path / "model", FINGERPRINT) as made:
        made.store("a", {"x": PackedTensor.from_planes(planes, (rows, cols), 2, 8, 16, wide=True)})
        tracemalloc.start()
        made.finish(["a"], config={}, family="x", parameters=1, recipe={}, calibration={}, producer="x")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20 < sum(plane.size for plane in planes.values()) // 5
    assert len(open_model(tmp_path / "model", check=True).files) == 2
