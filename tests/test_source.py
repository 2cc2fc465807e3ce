"""The checkpoint reader: right values, and for every kind of damage one clear line with nothing written."""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import make_checkpoint
from safetensors.torch import load_file, save_file

from twobit.architecture import Architecture
from twobit.errors import CheckpointError, ConfigError, FormatError, TwobitError
from twobit.quant.source import Checkpoint, check_tokenizer_ids, plain_file

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 20,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
Weights = dict[str, torch.Tensor]


def weights(dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Weights:
    generator = torch.Generator().manual_seed(0)
    specs = Architecture.from_config({**CONFIG, **overrides}).tensors()
    return {spec.source: torch.randn(spec.shape, generator=generator).to(dtype) for spec in specs}


def write_config(folder: Path, **overrides: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **overrides}))


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def shard_name(i: int, count: int) -> str:
    return f"model-{i:05d}-of-{count:05d}.safetensors"


def single(folder: Path, tensors: Weights | None = None, **overrides: Any) -> Path:
    write_config(folder, **overrides)
    save_file(weights() if tensors is None else tensors, folder / SINGLE)
    return folder


def sharded(folder: Path, count: int = 3, tensors: Weights | None = None) -> Path:
    write_config(folder)
    tensors = weights() if tensors is None else tensors
    names = list(tensors)
    weight_map = {}
    for i in range(count):
        mine = names[i::count]
        save_file({name: tensors[name] for name in mine}, folder / shard_name(i + 1, count))
        weight_map |= dict.fromkeys(mine, shard_name(i + 1, count))
    write_index(folder, weight_map)
    return folder


def contents(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


@pytest.fixture
def refuses(tmp_path: Path) -> Callable[..., TwobitError]:
    """Opening must fail with a line that holds all of the words, have a hint, and write nothing."""

    def check(path: Path | str, *words: str, error: type[TwobitError] = CheckpointError) -> TwobitError:
        before = contents(tmp_path)
        with pytest.raises(error) as caught:
            Checkpoint.open(path)
        message = str(caught.value)
        for word in words:
            assert word in message, message
        assert "\n" not in message
        assert contents(tmp_path) == before
        return caught.value

    return check


def assert_reads(checkpoint: Checkpoint, tensors: Weights) -> None:
    for spec in checkpoint.tensors:
        expected = tensors[spec.source].float()
        if spec.rows is not None:
            expected = expected[spec.rows[0] : spec.rows[1]]
        value = checkpoint.read(spec)
        assert value.dtype == torch.float32
        assert value.shape == spec.shape
        assert torch.equal(value, expected)


def find(checkpoint: Checkpoint, name: str) -> Any:
    return next(spec for spec in checkpoint.tensors if spec.name == name)


# Right values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_reads_every_tensor_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = weights(dtype)
    checkpoint = Checkpoint.open(single(tmp_path, tensors))
    assert_reads(checkpoint, tensors)
    assert checkpoint.notes == checkpoint.warnings == checkpoint.extras == []
    spec = find(checkpoint, Q_PROJ)
    assert torch.equal(checkpoint.read(spec, (3, 7)), tensors[Q_PROJ].float()[3:7])
    stored, raw = checkpoint.read_raw(spec)
    names = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
    assert stored == checkpoint.dtype(spec) == names[dtype]
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=dtype).reshape(spec.shape), tensors[Q_PROJ])
    with pytest.raises(ValueError, match="no rows"):
        checkpoint.read(spec, (0, 17))


def test_reads_shards_like_a_single_file(tmp_path: Path) -> None:
    tensors = weights()
    checkpoint = Checkpoint.open(sharded(tmp_path / "a", 3, tensors))
    assert_reads(checkpoint, tensors)
    assert len(checkpoint.shards) == 3
    assert checkpoint.notes == checkpoint.warnings == []


@pytest.mark.parametrize("variant", ["phi3", "gemma3", "gemma4", "qwen2", "llama-bias", "llama-tied", "llama-head-dim"])
def test_reads_families(tmp_path: Path, variant: str) -> None:
    """Fused tensors by row slices (phi3), wrapped names and a vision tower left out (gemma3), biases (qwen2)."""
    make_checkpoint(variant, tmp_path, dtype=torch.bfloat16)
    checkpoint = Checkpoint.open(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    assert_reads(checkpoint, tensors)
    assert checkpoint.warnings == []
    used = {checkpoint.source_name(spec) for spec in checkpoint.tensors}
    assert sorted(set(tensors) - used) == sorted(checkpoint.extras)
    if variant == "gemma3":
        (note,) = checkpoint.notes
        assert "vision_tower" in note and "multi_modal_projector" in note
        assert any(name.startswith(("vision_tower", "model.vision_tower")) for name in checkpoint.extras)
    else:
        assert checkpoint.extras == []


def test_bf16_and_fp16_subnormals_are_exact_even_where_arithmetic_flushes_them(tmp_path: Path) -> None:
    bits = torch.arange(1, 0x80, dtype=torch.int16).repeat(3)[: 16 * 16].reshape(16, 16)
    bits[1::2] |= 0x3F80  # every other row is normal
    bits[2] |= -0x8000  # and one negative
    for dtype in (torch.bfloat16, torch.float16):
        tensors = weights(dtype)
        tensors[Q_PROJ] = bits.view(dtype).clone()
        folder = single(tmp_path / str(dtype), tensors)
        flushes = torch.set_flush_denormal(True)
        try:
            checkpoint = Checkpoint.open(folder)
            value = checkpoint.read(find(checkpoint, Q_PROJ))
        finally:
            torch.set_flush_denormal(False)
        assert flushes
        if dtype == torch.bfloat16:
            assert torch.equal(value.view(torch.int32), bits.to(torch.int32) << 16)
        else:
            assert torch.equal(value.double(), tensors[Q_PROJ].double())
        assert (value != 0).all()


def test_paths_with_spaces_and_other_alphabets(tmp_path: Path) -> None:
    tensors = weights()
    assert_reads(Checkpoint.open(sharded(tmp_path / "Загрузки Željko" / "日本 model", 2, tensors)), tensors)


def test_neither_torch_nor_transformers_is_imported_with_the_module() -> None:
    code = "import sys, twobit.quant.source; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


# A1, A2, A14: incomplete and mixed sets of shards


def test_missing_shard_is_named(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    folder = sharded(tmp_path / "m")
    (folder / shard_name(2, 3)).unlink()
    error = refuses(folder, "missing", shard_name(2, 3))
    assert error.hint and "hf download" in error.hint
    (folder / INDEX).unlink()
    refuses(folder, "missing", shard_name(2, 3))


def test_index_without_any_of_its_shards(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    write_config(tmp_path / "m")
    write_index(tmp_path / "m", {Q_PROJ: shard_name(1, 1)})
    refuses(tmp_path / "m", "missing", shard_name(1, 1))


@pytest.mark.parametrize("shards", [1, 2])
def test_index_of_another_build_is_ignored_loudly_where_the_files_are_whole(tmp_path: Path, shards: int) -> None:
    tensors = weights()
    folder = single(tmp_path / "m", tensors) if shards == 1 else sharded(tmp_path / "m", shards, tensors)
    write_index(folder, {name: shard_name(1 + i % 13, 13) for i, name in enumerate(tensors)})
    checkpoint = Checkpoint.open(folder)
    assert_reads(checkpoint, tensors)
    assert len(checkpoint.warnings) == 1
    assert "describes another build" in checkpoint.warnings[0]


def test_index_of_another_build_with_overlap_is_refused(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    tensors = weights()
    folder = sharded(tmp_path / "m", 3, tensors)
    write_index(
        folder, {name: shard_name(1 + i % 3, 3) if i % 3 else "other.safetensors" for i, name in enumerate(tensors)}
    )
    refuses(folder, "missing", "other.safetensors")
    # All files are there, but the tensors lie elsewhere.
    names = list(tensors)
    write_index(folder, {name: shard_name(1 + (i + 1) % 3, 3) for i, name in enumerate(names)})
    refuses(folder, "describes another build", names[0], shard_name(2, 3))
    (folder / INDEX).unlink()
    (folder / shard_name(1, 3)).unlink()
    write_index(folder, {name: shard_name(1 + i % 13, 13) for i, name in enumerate(names)})
    refuses(folder, "describes another build", shard_name(1, 13), shard_name(2, 3))
    sharded(folder, 3, tensors)
    write_index(folder, {**{name: shard_name(1 + i % 3, 3) for i, name in enumerate(names)}, "extra": shard_name(1, 3)})
    refuses(folder, "describes another build", "extra", "no shard has it")


def test_shards_that_the_index_does_not_name_are_mentioned(tmp_path: Path) -> None:
    tensors = weights()
    folder = sharded(tmp_path / "m", 2, tensors)
    save_file({"x": torch.zeros(1)}, folder / shard_name(7, 9))
    checkpoint = Checkpoint.open(folder)
    assert_reads(checkpoint, tensors)
    assert shard_name(7, 9) in checkpoint.warnings[0]


def test_two_sets_of_weights_are_refused(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    folder = sharded(tmp_path / "m")
    save_file(weights(), folder / SINGLE)
    refuses(folder, "two sets of weights", SINGLE)


def test_mistrals_second_copy_is_left_out(tmp_path: Path) -> None:
    folder = single(tmp_path / "m")
    save_file({"x": torch.zeros(1)}, folder / "consolidated.safetensors")
    checkpoint = Checkpoint.open(folder)
    assert "consolidated.safetensors" in checkpoint.notes[0]
    assert checkpoint.warnings == []


def test_tensor_in_two_shards_is_refused(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    tensors = weights()
    folder = sharded(tmp_path / "m", 2, tensors)
    second = load_file(folder / shard_name(2, 2))
    save_file({**second, next(iter(tensors)): torch.zeros(1)}, folder / shard_name(2, 2))
    refuses(folder, next(iter(tensors)), "two shards", shard_name(1, 2), shard_name(2, 2))


@pytest.mark.parametrize("cut", ["0", "7", "half", "1 short"])
def test_truncated_shard_is_found_before_any_work(
    tmp_path: Path, refuses: Callable[..., TwobitError], cut: str
) -> None:
    folder = sharded(tmp_path / "m")
    file = folder / shard_name(3, 3)
    size = file.stat().st_size
    os.truncate(file, {"0": 0, "7": 7, "half": 8 + size // 2, "1 short": size - 1}[cut])
    error = refuses(folder, "truncated", str(file), error=FormatError)
    assert error.hint and "download" in error.hint


def test_file_cut_short_after_opening_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(single(tmp_path))
    os.truncate(tmp_path / SINGLE, 3000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: became shorter"):
        for spec in checkpoint.tensors:
            checkpoint.read(spec)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity"), (-float("inf"), "infinity")]
)
def test_nan_and_infinity_are_named_by_tensor_and_row(
    tmp_path: Path, dtype: torch.dtype, value: float, word: str
) -> None:
    tensors = weights(dtype)
    tensors[Q_PROJ][5, 3] = value
    checkpoint = Checkpoint.open(single(tmp_path, tensors))
    spec = find(checkpoint, Q_PROJ)
    for work in (lambda: checkpoint.read(spec), lambda: checkpoint.read_raw(spec), checkpoint.fingerprint):
        with pytest.raises(CheckpointError) as caught:
            work()
        assert str(caught.value) == f"model.safetensors: tensor {Q_PROJ} holds {word} in row 5"
        assert caught.value.hint
    with pytest.raises(CheckpointError, match="row 5"):
        checkpoint.read(spec, (4, 6))
    assert torch.equal(checkpoint.read(spec, (0, 5)), tensors[Q_PROJ].float()[:5])


def test_row_of_a_nan_far_into_a_large_tensor(tmp_path: Path) -> None:
    tensors = weights(torch.float32, vocab_size=90_000)
    tensors["lm_head.weight"][87_654, 15] = float("nan")
    checkpoint = Checkpoint.open(single(tmp_path, tensors, vocab_size=90_000))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds NaN in row 87654$"):
        checkpoint.read(find(checkpoint, "lm_head.weight"))


def test_nan_in_what_is_left_out_does_not_matter(tmp_path: Path) -> None:
    tensors = {**weights(), "vision_tower.x": torch.tensor([float("nan")])}
    assert len(Checkpoint.open(single(tmp_path, tensors)).fingerprint()) == 64


# A3: tied and untied heads


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_head_is_the_embedding(tmp_path: Path, name: str) -> None:
    tensors = weights(tie_word_embeddings=True)
    table = tensors.pop("model.embed_tokens.weight")
    checkpoint = Checkpoint.open(single(tmp_path, {**tensors, name: table}, tie_word_embeddings=True))
    for canonical in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(checkpoint.read(find(checkpoint, canonical)), table.float())


def test_family_default_ties(tmp_path: Path) -> None:
    make_checkpoint("smollm3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.architecture.tied
    assert checkpoint.source_name(find(checkpoint, "lm_head.weight")) == "model.embed_tokens.weight"


def test_untied_head_that_is_absent_is_refused(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    tensors = weights()
    del tensors["lm_head.weight"]
    refuses(single(tmp_path / "m", tensors), "lm_head.weight", "tie_word_embeddings")


def test_tied_head_stored_again(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    tensors = weights(tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    checkpoint = Checkpoint.open(single(tmp_path / "same", tensors, tie_word_embeddings=True))
    assert "lm_head.weight" in checkpoint.notes[0]
    assert checkpoint.warnings == []
    tensors["lm_head.weight"][-1, -1] += 1
    refuses(
        single(tmp_path / "other", tensors, tie_word_embeddings=True), "lm_head.weight differs", "tie_word_embeddings"
    )


# A6, A7, A8: names and shapes


def test_known_extras_in_one_line_and_unknown_ones_by_name(tmp_path: Path) -> None:
    tensors = weights()
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(7),
        "mtp.layers.0.x": torch.zeros(1, dtype=torch.int32),
        "foo.bar": torch.zeros(3),
        "model.layers.1.self_attn.q_proj.bias": torch.zeros(16),
    }
    checkpoint = Checkpoint.open(single(tmp_path, {**tensors, **extra}))
    assert_reads(checkpoint, tensors)
    assert sorted(checkpoint.extras) == sorted(extra)
    (note,) = checkpoint.notes
    assert note.startswith("left out 3 tensors") and "rotary_emb.inv_freq" in note and "mtp" in note
    (warning,) = checkpoint.warnings
    assert "foo.bar" in warning and "model.layers.1.self_attn.q_proj.bias" in warning and "inv_freq" not in warning


def test_missing_tensors_are_named(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    tensors = weights()
    del tensors[Q_PROJ], tensors["model.norm.weight"]
    refuses(single(tmp_path / "m", tensors), "missing tensors", Q_PROJ, "model.norm.weight")
    tensors = weights()
    refuses(
        single(tmp_path / "bias", tensors, attention_bias=True),
        "missing tensors",
        "model.layers.0.self_attn.q_proj.bias",
    )


def test_misshapen_tensor_gives_both_shapes(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    tensors = weights()
    tensors[Q_PROJ] = torch.zeros(16, 17, dtype=torch.bfloat16)
    refuses(single(tmp_path / "m", tensors), SINGLE, Q_PROJ, "[16, 17]", "[16, 16]")
    refuses(single(tmp_path / "head_dim", head_dim=4), Q_PROJ, "[16, 16]", "[8, 16]")
    refuses(single(tmp_path / "vocab", vocab_size=21), "model.embed_tokens.weight", "[20, 16]", "[21, 16]")


def test_fused_tensor_with_too_many_rows_is_refused(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    make_checkpoint("phi3", tmp_path / "m")
    tensors = load_file(tmp_path / "m" / SINGLE)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    rows = tensors[name].shape[0]
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    save_file(tensors, tmp_path / "m" / SINGLE)
    refuses(tmp_path / "m", name, f"[{rows + 1}, 128]", f"[{rows}, 128]")


# A9: already quantized


def test_quantized_config_is_refused(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    gptq = {"quant_method": "gptq", "bits": 4}
    error = refuses(single(tmp_path / "a", quantization_config=gptq), "already quantized", "gptq", error=TwobitError)
    assert error.hint and "full-precision" in error.hint
    text = {key: value for key, value in CONFIG.items() if key != "model_type"}
    single(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": {**text, "quantization_config": gptq}})
    )
    refuses(tmp_path / "b", "already quantized", "gptq", error=TwobitError)
    refuses(single(tmp_path / "c", quantization_config={"quant_method": "twobit"}), "already quantized", "twobit")


def test_quantized_tensors_without_a_config_are_refused(tmp_path: Path, refuses: Callable[..., TwobitError]) -> None:
    stem = Q_PROJ.removesuffix(".weight")
    tensors = weights()
    del tensors[Q_PROJ]
    for part in ("qweight", "qzeros", "scales"):
        tensors[f"{stem}.{part}"] = torch.zeros(2, 16, dtype=torch.int32)
    refuses(single(tmp_path / "gptq", tensors), "already quantized", f"{stem}.qweight")
    refuses(
        single(tmp_path / "fp8", {**weights(), f"{stem}.weight_scale_inv": torch.ones(1)}),
        "already quantized",
        f"{stem}.weight_scale_inv",
    )


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (torch.float8_e4m3fn, ("F8_E4M3", "already quantized")),
        (torch.int8, ("I8", "already quantized")),
        (torch.uint8, ("U8", "already quantized")),
        (torch.float64, ("F64", "not supported")),
    ],
)
def test_other_dtypes_are_refused_by_name(
    tmp_path: Path, refuses: Callable[..., TwobitError], dtype: torch.dtype, words: tuple[str, ...]
) -> None:
    tensors = weights()
    tensors[Q_PROJ] = torch.zeros(16, 16).to(dtype)
    assert refuses(single(tmp_path / "m", tensors), SINGLE, Q_PROJ, *words).hint


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


# Fingerprint


def test_fingerprint_sees_every_change_of_content(tmp_path: Path) -> None:
    tensors = weights()
    original = Checkpoint.open(sharded(tmp_path / "a", 2, tensors)).fingerprint()
    assert Checkpoint.open(sharded(tmp_path / "b", 2, tensors)).fingerprint() == original
    seen = {original}
    for key in (Q_PROJ, "lm_head.weight", "model.norm.weight"):
        changed = {**tensors, key: tensors[key].clone()}
        changed[key].view(-1)[-1] += 1
        seen.add(Checkpoint.open(sharded(tmp_path / key, 2, changed)).fingerprint())
    folder = sharded(tmp_path / "c", 2, tensors)
    write_config(folder, rms_norm_eps=1e-6)
    seen.add(Checkpoint.open(folder).fingerprint())
    assert len(seen) == 5


def test_fingerprint_reads_everything_once(tmp_path: Path) -> None:
    folder = sharded(tmp_path, 3)
    checkpoint = Checkpoint.open(folder)
    told: list[int] = []
    first = checkpoint.fingerprint(told.append)
    assert sum(told) == sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert checkpoint.fingerprint(told.append) == first
    assert sum(told) == sum(file.stat().st_size for file in folder.glob("*.safetensors"))


# A13: tokenizer ids


def write_tokenizer(folder: Path, vocab: Any, added: Any = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"model": {"type": "BPE", "vocab": vocab}, "added_tokens": list(added)})
    (folder / "tokenizer.json").write_text(text)
    return folder


def test_tokenizer_ids_within_the_embedding(tmp_path: Path) -> None:
    ids = {f"t{i}": i for i in range(18)}
    added = [{"content": "<s>", "id": 18}, {"content": "</s>", "id": 19}]
    folder = write_tokenizer(tmp_path, ids, added)
    assert check_tokenizer_ids(folder, 20) == []
    assert check_tokenizer_ids(folder, 84) == []
    assert check_tokenizer_ids(write_tokenizer(tmp_path / "unigram", [[f"t{i}", -1.0] for i in range(20)]), 20) == []
    assert "tokenizer.json" in check_tokenizer_ids(tmp_path / "none", 20)[0]


def test_added_token_without_a_row_is_named(tmp_path: Path) -> None:
    ids = {f"t{i}": i for i in range(20)}
    (warning,) = check_tokenizer_ids(write_tokenizer(tmp_path, ids, [{"content": "<image>", "id": 20}]), 20)
    assert "'<image>'" in warning and "20" in warning


@pytest.mark.parametrize(
    ("vocab", "added", "words"),
    [
        ({"a": 0, "b": 20, "c": 33}, (), ("'b'", "id 20", "20 rows", "2 tokens")),
        ({"a": -1}, (), ("'a'", "id -1")),
        ([[f"t{i}", 0.0] for i in range(21)], (), ("'t20'", "id 20")),
        (None, (), ("no model.vocab",)),
        ({"a": "0"}, (), ("no model.vocab",)),
        ({"a": True}, (), ("no model.vocab",)),
        ({"a": 0}, ("x",), ("added_tokens",)),
        ({"a": 0}, ({"content": "x"},), ("added_tokens",)),
    ],
)
def test_tokenizer_of_another_model_is_refused(
    tmp_path: Path, vocab: Any, added: tuple[Any, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_tokenizer_ids(write_tokenizer(tmp_path, vocab, added), 20)
    for word in ("tokenizer.json", *words):
        assert word in str(caught.value)
