"""Checkpoints that a stranger made: links and paths, indexes, pickles, code. Refused with nothing opened or written."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import (
    INDEX,
    Q_PROJ,
    SINGLE,
    Weights,
    assert_reads,
    refusal,
    shard_name,
    sharded,
    single,
    weights,
    write_config,
    write_index,
)

from twobit.errors import CheckpointError, ConfigError, FormatError, TwobitError
from twobit.quant.source import Checkpoint, plain_file


@pytest.fixture
def refuses(tmp_path: Path) -> Callable[..., TwobitError]:
    return refusal(tmp_path)


# A15, E1: links and paths


def hub_cache(root: Path, tensors: Weights) -> Path:
    """A Hub cache repository as `hf download` lays it out; returns the snapshot."""
    repository = root / "models--someone--tiny"
    sharded(repository / "plain", 2, tensors)
    (repository / "blobs").mkdir()
    snapshot = repository / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted((repository / "plain").iterdir())):
        file.rename(repository / "blobs" / f"{i:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i:064x}")
    (repository / "plain").rmdir()
    return snapshot


def test_hub_cache_links_are_followed(tmp_path: Path) -> None:
    tensors = weights()
    snapshot = hub_cache(tmp_path / "cache dir", tensors)
    checkpoint = Checkpoint.open(snapshot)
    assert_reads(checkpoint, tensors)
    assert sorted(checkpoint.shards) == [shard_name(1, 2), shard_name(2, 2)]
    (tmp_path / "link").symlink_to(snapshot)
    assert_reads(Checkpoint.open(tmp_path / "link"), tensors)


def test_dangling_links_are_named_as_such(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    snapshot = hub_cache(tmp_path, weights())
    link = snapshot / shard_name(2, 2)
    link.resolve().unlink()
    refuses(snapshot, "dangling link", shard_name(2, 2), os.readlink(link))
    (snapshot / INDEX).unlink()
    refuses(snapshot, "dangling link", shard_name(2, 2))
    (snapshot / "config.json").resolve().unlink()
    refuses(snapshot, "dangling link", "config.json")
    (tmp_path / "gone").symlink_to("nowhere")
    refuses(tmp_path / "gone", "dangling link", "nowhere")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("config.json")
    refuses(snapshot, "config.json")


def test_a_cache_repository_is_no_checkpoint(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    snapshot = hub_cache(tmp_path, weights())
    assert "snapshots" in (refuses(snapshot.parent.parent, "Hub cache").hint or "")


@pytest.mark.parametrize("file", [SINGLE, "config.json", INDEX])
def test_links_that_leave_the_folder_are_refused(
    tmp_path: Path, refuses: Callable[..., TwobitError], file: str
) -> None:
    folder = single(tmp_path / "m")
    write_index(folder, dict.fromkeys(weights(), SINGLE))
    (folder / file).rename(tmp_path / "elsewhere")
    (folder / file).symlink_to("../elsewhere")
    refuses(folder, file, "leaves the checkpoint", error=TwobitError)


def test_cache_links_into_another_repository_are_refused(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    snapshot = hub_cache(tmp_path / "a", weights())
    other = hub_cache(tmp_path / "b", weights())
    link = snapshot / shard_name(1, 2)
    link.unlink()
    link.symlink_to((other / shard_name(1, 2)).resolve())
    refuses(snapshot, shard_name(1, 2), "leaves the checkpoint")


def test_links_inside_the_folder_are_followed(tmp_path: Path) -> None:
    tensors = weights()
    folder = single(tmp_path / "m", tensors)
    (folder / SINGLE).rename(folder / "stored")
    (folder / SINGLE).symlink_to("stored")
    assert_reads(Checkpoint.open(folder), tensors)


@pytest.mark.parametrize(
    "name",
    [
        "../other/model.safetensors",
        "/etc/model.safetensors",
        "a/../../x.safetensors",
        "sub/x.safetensors",
        "",
        ".",
        "..",
        "a\0.safetensors",
        "..\\x.safetensors",
        "pytorch_model.bin",
        None,
        3,
        ["x"],
    ],
)
def test_index_may_name_plain_files_only(tmp_path: Path, refuses: Callable[..., TwobitError], name: Any) -> None:
    single(tmp_path / "other")
    folder = single(tmp_path / "m")
    write_index(folder, {Q_PROJ: name})
    refuses(folder, INDEX, Q_PROJ, "plain")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b"[" * 100_000,
        b"\xff",
        b'{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}',
    ],
)
def test_malformed_index_is_refused(tmp_path: Path, refuses: Callable[..., TwobitError], text: bytes) -> None:
    folder = single(tmp_path / "m")
    (folder / INDEX).write_bytes(text)
    refuses(folder, INDEX)


@pytest.mark.parametrize("text", [b"", b"[]", b'"x"', b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"{}"])
def test_malformed_config_is_refused(tmp_path: Path, refuses: Callable[..., TwobitError], text: bytes) -> None:
    folder = single(tmp_path / "m")
    (folder / "config.json").write_bytes(text)
    refuses(folder, "config.json", error=ConfigError)


def test_mutated_json_is_refused_or_read(tmp_path: Path) -> None:
    """Whatever config.json and the index say: a model, or one of our errors."""
    folder = sharded(tmp_path, 2)
    rng = random.Random(0)
    tokens = [b"0", b"-1", b"1e999", b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"9" * 30, b'"../x"', b'"\\ud800"']
    opened = 0
    for name in ("config.json", INDEX):
        original = (folder / name).read_bytes()
        for _ in range(250):
            content = bytearray(original)
            at = rng.randrange(len(content))
            colon = content.find(b": ", at)
            if rng.random() < 0.7 and colon >= 0:  # another value for a key
                end = min(e for e in (content.find(b",", colon), content.find(b"}", colon)) if e >= 0)
                content[colon + 2 : end] = rng.choice(tokens)
            else:
                content[at : at + rng.randint(0, 2)] = bytes([rng.randrange(256)])
            (folder / name).write_bytes(content)
            try:
                Checkpoint.open(folder)
                opened += 1
            except TwobitError as error:
                assert str(error).isprintable(), content
        (folder / name).write_bytes(original)
    assert 0 < opened < 250


def test_plain_file_gives_only_files_of_the_checkpoint(tmp_path: Path) -> None:
    folder = single(tmp_path / "m")
    (tmp_path / "secret").write_text("x")
    (folder / "tokenizer.json").symlink_to("../secret")
    assert plain_file(folder, "config.json") == folder.resolve() / "config.json"
    assert plain_file(folder, "vocab.json") is None
    assert plain_file(Path(os.path.relpath(folder)), "config.json") == folder.resolve() / "config.json"
    with pytest.raises(CheckpointError, match="leaves the checkpoint"):
        plain_file(folder, "tokenizer.json")


# A16, E6, E7: code that comes with the model


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("index", [False, True])
def test_pickles_are_refused_and_never_opened(tmp_path: Path, refuses: Callable[..., TwobitError], index: bool) -> None:
    folder = tmp_path / "m"
    write_config(folder)
    canary = tmp_path / "canary"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(canary)))
    (folder / "training_args.bin").write_bytes(pickle.dumps(Canary(canary)))
    if index:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    error = refuses(folder, "pickled", "pytorch_model.bin")
    assert error.hint and "save_pretrained" in error.hint
    assert not canary.exists()
    (folder / SINGLE).write_bytes(pickle.dumps(Canary(canary)))
    refuses(folder, SINGLE, error=FormatError)
    assert not canary.exists()


def test_pickles_beside_safetensors_are_ignored(tmp_path: Path) -> None:
    tensors = weights()
    folder = single(tmp_path / "m", tensors)
    for name in ("pytorch_model.bin", "training_args.bin", "tokenizer.pkl", "imatrix.pt"):
        (folder / name).write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
    checkpoint = Checkpoint.open(folder)
    assert_reads(checkpoint, tensors)
    checkpoint.fingerprint()
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("model_type", ["llama", "custom"])
def test_remote_code_is_never_run(tmp_path: Path, refuses: Callable[..., TwobitError], model_type: str) -> None:
    auto_map = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    folder = single(tmp_path / "m", model_type=model_type, auto_map=auto_map, trust_remote_code=True)
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py"):
        (folder / name).write_text(f"import os; os.mkdir({str(tmp_path / 'canary')!r})")
    if model_type == "custom":
        refuses(folder, "'custom' is not supported", "custom code", error=ConfigError)
    else:
        checkpoint = Checkpoint.open(folder)
        assert_reads(checkpoint, weights())
        assert "auto_map" in checkpoint.notes[0] and "not run" in checkpoint.notes[0]
    assert not (tmp_path / "canary").exists()


# What was given instead of a checkpoint


def test_what_is_no_checkpoint_folder_is_named(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF" + struct.pack("<I", 3))
    refuses(gguf, "GGUF", "already quantized")
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "m.gguf").write_bytes(b"GGUF")
    refuses(tmp_path / "ggufs", "GGUF", "config.json")
    write_config(tmp_path / "ggufs")
    refuses(tmp_path / "ggufs", "GGUF", "m.gguf")
    assert "folder" in (refuses(single(tmp_path / "m") / SINGLE, "a file, not a folder").hint or "")
    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", "no config.json")
    write_config(tmp_path / "config only")
    refuses(tmp_path / "config only", "no weights", SINGLE)
    refuses(tmp_path / "nowhere", "no such folder")
    refuses("a\0b", "no such folder")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    refuses(tmp_path / "lora", "LoRA adapter")
    (tmp_path / "m" / SINGLE).rename(tmp_path / "m" / "other.safetensors")
    refuses(tmp_path / "m", "other.safetensors", f"no {SINGLE}")


def test_hub_id_gets_a_download_hint(refuses: Callable[..., TwobitError]) -> None:
    error = refuses("someone/tiny-model", "no such folder")
    assert error.hint and "hf download someone/tiny-model --local-dir tiny-model" in error.hint
    error = refuses("someone/tiny-model@v2", "no such folder")
    assert error.hint and "--revision v2" in error.hint


def test_config_that_is_no_file_is_refused(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    (tmp_path / "m").mkdir()
    os.mkfifo(tmp_path / "m" / "config.json")
    refuses(tmp_path / "m", "config.json", error=ConfigError)
