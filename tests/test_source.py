"""The checkpoint reader: right values, and for every kind of damage one clear line with nothing written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    CONFIG,
    INDEX,
    Q_PROJ,
    SINGLE,
    assert_reads,
    find,
    refusal,
    shard_name,
    sharded,
    single,
    weights,
    write_config,
    write_index,
)
from families import make_checkpoint
from safetensors.torch import load_file, save_file

from twobit.errors import CheckpointError, FormatError, TwobitError
from twobit.quant.source import Checkpoint, check_tokenizer_ids


@pytest.fixture
def refuses(tmp_path: Path) -> Callable[..., TwobitError]:
    return refusal(tmp_path)


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


@pytest.mark.parametrize(
    "name",
    ["vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers", "intermediate_size"],
)
def test_sizes_that_a_nested_config_leaves_out_are_never_made_up(tmp_path: Path, name: str) -> None:
    make_checkpoint("gemma3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["text_config"][name]
    config.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TwobitError) as raised:
        Checkpoint.open(tmp_path)
    told = str(raised.value)
    if name in ("num_hidden_layers", "intermediate_size"):
        assert "config.json" in told and name in told and "missing" in told
    else:  # the class's default, which the tensors contradict
        assert re.search(r"[a-z_]+\.(weight|proj)", told), told
        assert len(re.findall(r"\[[0-9, ]+\]", told)) == 2, told


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
