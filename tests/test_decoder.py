"""The torch decoder against `transformers`: every family, past windows and original RoPE lengths, cached and whole."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB, make_checkpoint, reference_logits
from safetensors.torch import load_file, save_file

from twobit.architecture import Architecture
from twobit.quant import decoder
from twobit.quant.decoder import Cache, Decoder, RuntimeRounding, round_activations
from twobit.quant.tune import drafting

TOKENS = torch.randint(0, VOCAB, (150,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("families")
    return cache(lambda variant: make_checkpoint(variant, root / variant))


def load(path: Path, rounding: RuntimeRounding | None = None) -> Decoder:
    arch = Architecture.from_config(json.loads((path / "config.json").read_text()))
    stored = load_file(path / "model.safetensors")
    weights = {}
    for spec in arch.tensors(stored):
        value = stored[spec.source].float()
        weights[spec.name] = value if spec.rows is None else value[spec.rows[0] : spec.rows[1]]
    return Decoder(arch, weights, rounding)


def assert_equal_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    assert 0.5 < theirs.std() < 4  # not degenerate
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("variant", FAMILIES)
def test_logits_equal_transformers(checkpoints: Any, variant: str) -> None:
    """150 tokens: past windows of 8 and past an original context of 64; then the same through the cache, in pieces."""
    path = checkpoints(variant)
    model = load(path)
    whole = model.forward(TOKENS)
    assert_equal_logits(whole, reference_logits(path, TOKENS))
    kept = Cache()
    pieces = [model.forward(TOKENS[a:b], kept) for a, b in ((0, 60), (60, 61), (61, 69), (69, 150))]
    assert (torch.cat(pieces) - whole).abs().max() < 1e-4
    kept.truncate(100)
    assert (model.forward(TOKENS[100:120], kept) - whole[100:120]).abs().max() < 1e-4
    assert kept.length(0) == kept.length(len(model.architecture.layers) - 1) == 120


@pytest.mark.parametrize(
    ("variant", "keys"),
    [
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1}),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 1}),
        ("mistral", {"sliding_window": None}),
        ("smollm3", {"sliding_window": 8, "use_sliding_window": True}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("llama", {"hidden_act": "gelu_new", "hidden_size": 128, "intermediate_size": 17, "vocab_size": 7}),
        ("llama", {"max_position_embeddings": 64}),
    ],
)
def test_settings_change_what_they_change_in_transformers(tmp_path: Path, variant: str, keys: dict[str, Any]) -> None:
    path = make_checkpoint(variant, tmp_path, **keys)
    tokens = [token % keys.get("vocab_size", VOCAB) for token in TOKENS]
    assert_equal_logits(load(path).forward(tokens), reference_logits(path, tokens))


OLD = {
    "llama": {"rope_theta": 500000.0},
    "llama-linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 8.0}},
    "llama-llama3": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama-yarn": {"rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    "qwen2-window": {"rope_theta": 1e6, "layer_types": ...},
    "gemma2": {"layer_types": ...},
    "gemma3_text": {
        "rope_theta": 1e5,
        "rope_local_base_freq": 1e3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "layer_types": ...,
        "sliding_window_pattern": 2,
    },
    "phi3": {"rope_theta": 10000.0, "rope_scaling": None, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("variant", OLD)
def test_old_spellings_equal_transformers(tmp_path: Path, variant: str) -> None:
    path = make_checkpoint(variant, tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["rope_parameters"]
    config = {key: value for key, value in (config | OLD[variant]).items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))
    assert_equal_logits(load(path).forward(TOKENS), reference_logits(path, TOKENS))


def test_bf16_weights_in_an_fp32_model(tmp_path: Path) -> None:
    """gemma's embedding scale is the fp32 square root, as transformers has it in an fp32 model."""
    path = make_checkpoint("gemma3_text", tmp_path, dtype=torch.bfloat16)
    assert_equal_logits(load(path).forward(TOKENS), reference_logits(path, TOKENS))


def test_a_tied_head_absent_or_present_or_alone(tmp_path: Path) -> None:
    path = make_checkpoint("llama-tied", tmp_path)
    expected = reference_logits(path, TOKENS)
    stored = load_file(path / "model.safetensors")
    assert "lm_head.weight" not in stored
    config = json.loads((path / "config.json").read_text())
    assert_equal_logits(load(path).forward(TOKENS), expected)
    embedding = stored.pop("model.embed_tokens.weight")
    save_file({**stored, "lm_head.weight": embedding}, path / "model.safetensors", {"format": "pt"})
    assert_equal_logits(load(path).forward(TOKENS), expected)
    arch = Architecture.from_config(config)
    short = {"lm_head.weight": embedding}  # one of the two names is enough
    assert torch.equal(Decoder(arch, short).embed(TOKENS), embedding[TOKENS])


def test_family_default_decides_where_the_tie_is_not_said(tmp_path: Path) -> None:
    path = make_checkpoint("smollm3", tmp_path)
    expected = reference_logits(path, TOKENS)
    config = json.loads((path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (path / "config.json").write_text(json.dumps(config))
    assert load(path).architecture.tied
    assert_equal_logits(load(path).forward(TOKENS), expected)


@pytest.mark.parametrize("variant", ["llama-bias", "gemma2", "gemma4", "phi3", "olmo2"])
def test_layer_at_a_time_with_hooks(checkpoints: Any, variant: str) -> None:
    """Batches of sequences, one layer's weights at a time; the hook sees every linear once, with its own input."""
    model = load(checkpoints(variant))
    arch, weights = model.architecture, dict(model._weights)
    batch = torch.tensor([TOKENS[:40], TOKENS[40:80]])
    bare = Decoder(arch)
    inputs: dict[str, torch.Tensor] = {}

    def hook(name: str, x: torch.Tensor) -> None:
        assert name not in inputs
        inputs[name] = x

    x = bare.embed(batch, weights)
    for layer in arch.layers:
        own = {name: value for name, value in weights.items() if name.startswith(f"model.layers.{layer.index}.")}
        before = x.clone()
        x, previous = bare.layer(layer.index, x, own, hook=hook), x
        assert torch.equal(previous, before)
    logits = bare.head(x, weights, hook=hook)
    for row in range(2):
        assert (logits[row] - model.forward(batch[row])).abs().max() < 1e-4
    linears = {spec.module: spec for spec in arch.tensors() if spec.role in ("linear", "head")}
    assert inputs.keys() == linears.keys()
    for name, spec in linears.items():
        assert inputs[name].shape == (2, 40, spec.shape[1]) and inputs[name].isfinite().all()
    first = "model.layers.0.self_attn."
    assert inputs[first + "q_proj"] is inputs[first + "k_proj"]
    assert inputs["model.layers.0.mlp.gate_proj"] is inputs["model.layers.0.mlp.up_proj"]
    down = model.architecture.layers[0].intermediate
    assert inputs["model.layers.0.mlp.down_proj"].shape[-1] == down


@pytest.mark.parametrize("variant", ["mistral", "gemma2"])
def test_chunks_of_queries_change_nothing(checkpoints: Any, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(checkpoints(variant))
    whole = model.forward(TOKENS)
    monkeypatch.setattr(decoder, "QUERY_CHUNK", 7)
    assert (model.forward(TOKENS) - whole).abs().max() < 1e-5


# -- rounding as the runtime does it -------------------------------------------------------------------------


def rounded_by_hand(row: list[float], limit: int, group: int) -> list[float]:
    out: list[float] = []
    for first in range(0, len(row), group):
        part = torch.tensor(row[first : first + group], dtype=torch.float32)
        amax = part.abs().max()
        if amax < 1e-30:
            out += [0.0] * len(part)
            continue
        inverse, step = torch.tensor(float(limit)) / amax, amax / torch.tensor(float(limit))
        out += [float(torch.clamp((v * inverse).round(), -limit, limit) * step) for v in part]
    return out


@pytest.mark.parametrize(("limit", "group"), [(127, 128), (8191, 128), (4095, 64)])
@pytest.mark.parametrize("cols", [17, 64, 96, 172, 256])
def test_round_activations(limit: int, group: int, cols: int) -> None:
    x = torch.randn(3, cols, generator=torch.Generator().manual_seed(cols)) * 10.0 ** torch.arange(3)[:, None]
    x[1, :group] = 0
    x[2, :group] = 1e-31
    ours = round_activations(x, limit, group)
    assert ours.shape == x.shape
    assert ours.tolist() == [rounded_by_hand(row, limit, group) for row in x.tolist()]
    assert not ours[1:, :group].any()
    step = x[0].abs().max() / limit
    assert (ours[0] - x[0]).abs().max() <= step * 0.5001
    kept = round_activations(ours, limit, group)
    assert (kept - ours).abs().max() <= 1e-6 * ours.abs().max()


def test_rounding_ties_go_to_even_and_subnormals_are_zero() -> None:
    x = torch.tensor([[4.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert round_activations(x, 4, 8).tolist() == [[4.0, 0.0, 2.0, 2.0, 0.0, -2.0]]
    assert round_activations(torch.tensor([[1e-40, -1e-31]]), 8191, 128).tolist() == [[0.0, 0.0]]
    assert round_activations(torch.tensor([[1e-29, 0.0]]), 8191, 128)[0, 0] == pytest.approx(1e-29)


def test_runtime_rounding_is_per_matrix(checkpoints: Any) -> None:
    path = checkpoints("qwen2")
    plain = load(path).forward(TOKENS)

    def difference(rounding: RuntimeRounding) -> float:
        return float((load(path, rounding).forward(TOKENS) - plain).abs().max())

    none = RuntimeRounding(activations=None, fp16_cache=False)
    assert difference(none) == 0
    cache_only = difference(RuntimeRounding(activations=None))
    head_only = difference(RuntimeRounding(None, {"lm_head": (4095, 64)}, fp16_cache=False))
    one_linear = difference(RuntimeRounding(None, {"model.layers.1.mlp.down_proj": (127, 128)}, fp16_cache=False))
    fine, coarse = difference(RuntimeRounding()), difference(RuntimeRounding((127, 128)))
    assert 0 < cache_only < 0.02 and 0 < head_only < 0.005 and 0 < one_linear < 0.2
    assert 0 < fine < 0.03 < coarse < 2
    assert difference(RuntimeRounding((127, 128), {"lm_head": None})) < coarse + 0.1


def test_rounded_cache_holds_fp16_values(checkpoints: Any) -> None:
    for rounding, exact in ((RuntimeRounding(None), True), (None, False)):
        kept = Cache()
        model = load(checkpoints("gemma4"), rounding)
        model.forward(TOKENS, kept)
        for layer in range(len(model.architecture.layers)):
            for held in kept._layers[layer]:
                assert torch.equal(held.half().float(), held) == exact


@pytest.mark.parametrize(("variant", "first"), [("llama", 0), ("gemma2", 3), ("gemma3_text", 5), ("qwen3", 7)])
def test_drafting_attends_to_the_verifiers_cache(checkpoints: Any, variant: str, first: int) -> None:
    """All blocks at once, against one block after another on a copy of the verifier's cache, with other weights."""
    model = load(checkpoints(variant))
    generator = torch.Generator().manual_seed(2)
    draft = Decoder(
        model.architecture,
        {name: w + 0.05 * w.std() * torch.randn(w.shape, generator=generator) for name, w in model._weights.items()},
    )
    tokens, cache = TOKENS[:60], Cache()
    model.forward(tokens, cache)
    x = draft.embed(tokens)
    for layer in model.architecture.layers:
        x = draft.layer(layer.index, x, attend=drafting(*cache.of(layer.index), block=8, first=first))
    logits = draft.head(x)
    starts = [*range(first - 8 if first else 0, len(tokens), 8)]
    for start in starts:
        block, end = max(start, 0), min(start + 8, len(tokens))
        kept = Cache()
        model.forward(tokens, kept)
        kept.truncate(block)
        assert (draft.forward(tokens[block:end], kept) - logits[block:end]).abs().max() < 1e-4, start
