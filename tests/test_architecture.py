"""config.json -> Architecture: every spelling, every default, every refusal; and the tensors it asks for."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import FAMILIES, load_reference, make_checkpoint
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from twobit import families
from twobit.architecture import SUPPORTED_FAMILIES, Architecture
from twobit.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("families")
    return cache(lambda variant: make_checkpoint(variant, root / variant))


def config_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


BASE = {
    "hidden_size": 96,
    "intermediate_size": 172,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 331,
}


def config(family: str, **keys: Any) -> dict[str, Any]:
    """A minimal config of `family`; a value of ... leaves the key out."""
    result = {"model_type": family, **BASE, "num_key_value_heads": 2, "max_position_embeddings": 512}
    if family == "gemma4_text":
        result |= {"hidden_size_per_layer_input": 0, "head_dim": 16, "global_head_dim": 40}
    return {key: value for key, value in {**result, **keys}.items() if value is not ...}


def nested(family: str, text: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"model_type": family, "text_config": text, **keys}


def read(family: str, **keys: Any) -> Architecture:
    return Architecture.from_config(config(family, **keys))


def windows(arch: Architecture) -> list[int | None]:
    return [layer.window for layer in arch.layers]


# -- against transformers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", FAMILIES)
def test_tensors_are_those_of_the_checkpoint(checkpoints: Any, variant: str) -> None:
    path = checkpoints(variant)
    shapes = shapes_of(path)
    arch = Architecture.from_config(config_of(path))
    covered: dict[str, int] = {}
    for spec in arch.tensors(shapes):
        shape = shapes[spec.source]
        if spec.rows is None:
            assert shape == spec.shape
        else:
            assert shape == (spec.source_rows, *spec.shape[1:])
            assert spec.rows[1] - spec.rows[0] == spec.shape[0]
            assert covered.get(spec.source, 0) == spec.rows[0]  # slices follow each other
            covered[spec.source] = spec.rows[1]
        assert spec.name.startswith(f"model.layers.{spec.layer}." if spec.layer is not None else ("model.", "lm_head."))
    for source, rows in covered.items():
        assert rows == shapes[source][0]
    used = {spec.source for spec in arch.tensors(shapes)}
    rest = [name for name in shapes if name not in used]
    assert all(arch.known_extra(name) for name in rest)
    assert bool(rest) == (variant == "gemma3")
    assert not any(arch.known_extra(name) for name in used)
    names = [spec.name for spec in arch.tensors()]
    assert len(set(names)) == len(names)
    assert [spec.name for spec in arch.tensors(shapes)] == names


@pytest.mark.parametrize("variant", FAMILIES)
def test_rotary_frequencies_equal_transformers(checkpoints: Any, variant: str) -> None:
    path = checkpoints(variant)
    arch = Architecture.from_config(config_of(path))
    buffers = {
        name.rpartition(".")[2]: value.numpy()
        for name, value in load_reference(path).named_buffers()
        if name.endswith("inv_freq") and "original" not in name and "vision" not in name
    }
    types = config_of(path).get("text_config", config_of(path)).get("layer_types") or ["full_attention"] * 4
    checked = 0
    for layer in arch.layers:
        if layer.rope is None:
            continue
        rope = arch.ropes[layer.rope]
        kind = types[layer.index]
        expected = buffers["inv_freq"] if "inv_freq" in buffers else buffers[f"{kind}_inv_freq"]
        ours = np.array(rope.inv_freq, np.float32)
        assert np.array_equal(ours.astype(np.float64), np.array(rope.inv_freq))  # fp32 values already
        assert len(ours) == rope.dim // 2 == len(expected)
        np.testing.assert_array_max_ulp(ours, expected, 2)
        checked += 1
    assert checked >= 2


@pytest.mark.parametrize(
    "settings_",
    [
        {"rope_type": "linear", "factor": 3.7, "rope_theta": 1e6},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 500000.0,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6},
        {
            "rope_type": "yarn",
            "factor": 40,
            "rope_theta": 10000,
            "mscale": 0.707,
            "mscale_all_dim": 1.0,
            "beta_fast": 16,
        },
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000, "truncate": False, "beta_slow": 2},
        {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096, "rope_theta": 10000},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 1e4, "original_max_position_embeddings": 1, "rope_theta": 1.5},
    ],
)
def test_scaled_frequencies_of_real_sizes_equal_transformers(settings_: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
    theirs = LlamaConfig(**sizes, rope_parameters=dict(settings_))
    expected, factor = ROPE_INIT_FUNCTIONS[settings_["rope_type"]](theirs, None)
    rope = read("llama", **sizes, rope_parameters=settings_).ropes[0]
    np.testing.assert_allclose(rope.inv_freq, expected.numpy(), rtol=4e-7, atol=0)
    assert rope.factor == pytest.approx(factor, rel=1e-12)
    assert rope.dim == 128


@pytest.mark.parametrize("family", [f for f in SUPPORTED_FAMILIES if f not in ("gemma3", "gemma4")])
def test_defaults_of_absent_keys_equal_transformers(family: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(family)
    compared = set()
    for key, value in families.FAMILIES[family].defaults.items():
        if key in ("rope_theta", "rope_local_base_freq", "no_rope_layers", "head_dim", "num_key_value_heads"):
            continue  # filled in or moved by transformers; compared below
        if key == "sliding_window" and getattr(theirs, "use_sliding_window", True) is False:
            continue  # dropped by transformers when off
        if hasattr(theirs, key):
            assert (getattr(theirs, key) or None) == (value or None), key  # null and false say the same
            compared.add(key)
    assert {"tie_word_embeddings", "rms_norm_eps", "max_position_embeddings"} <= compared
    sizes = {**BASE, "hidden_size": 2048, "num_attention_heads": 32}
    arch = Architecture.from_config({"model_type": family, **sizes, "hidden_size_per_layer_input": 0})
    model = AutoConfig.for_model(family, **sizes)
    first = arch.layers[0]
    assert arch.tied == theirs.tie_word_embeddings
    first_of_theirs = model.per_layer_config[0] if family == "gemma4_text" else model
    assert first.n_kv_heads == first_of_theirs.num_key_value_heads
    assert first.head_dim == (getattr(first_of_theirs, "head_dim", None) or 2048 // 32)
    ours, given = arch.ropes[first.rope or 0], model.rope_parameters
    theta = given.get("sliding_attention", given)["rope_theta"]
    assert ours.inv_freq[1] == pytest.approx(theta ** (-2 / ours.dim), rel=1e-6)
    if family.startswith("gemma"):
        assert [w is not None for w in windows(arch)] == [kind == "sliding_attention" for kind in model.layer_types]
    if family == "smollm3":
        assert [layer.rope is not None for layer in arch.layers] == [bool(x) for x in model.no_rope_layers]


# -- spellings -----------------------------------------------------------------------------------------------

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 8.0, "original_max_position_embeddings": 64}
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA3_NEW = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
}
GEMMA3_OLD = {
    "rope_theta": 50000.0,
    "rope_local_base_freq": 1000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (config("llama", rope_theta=5e5), config("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})),
        (config("llama", rope_scaling=None), config("llama", rope_parameters={"rope_theta": 10000.0})),
        (
            config("llama", rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}),
            config("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}),
        ),
        (
            config("llama", rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}),
            config("llama", rope_parameters={FULL: {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}),
        ),
        (
            config("qwen2", rope_theta=1e6, rope_scaling={"type": "yarn", **YARN}),
            config("qwen2", rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, **YARN}),
        ),
        (
            config("llama", rope_scaling={"type": "yarn", "factor": 8.0}, original_max_position_embeddings=64),
            config("llama", rope_parameters={"rope_type": "yarn", **YARN}),
        ),
        (
            config("llama", rope_scaling={"rope_type": "linear", "type": "linear", "factor": 2}),
            config("llama", rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        ),
        (
            config("phi3", partial_rotary_factor=0.75, rope_theta=1e5),
            config("phi3", rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.75, "rope_theta": 1e5}),
        ),
        (config("gemma3_text", **GEMMA3_OLD), config("gemma3_text", rope_parameters=GEMMA3_NEW)),
        (
            config("gemma3_text", sliding_window=8, sliding_window_pattern=3),
            config("gemma3_text", sliding_window=8, layer_types=[SLIDING, SLIDING, FULL, SLIDING]),
        ),
        (
            config("gemma2", sliding_window=8),
            config("gemma2", sliding_window=8, layer_types=[SLIDING, FULL, SLIDING, FULL]),
        ),
        (
            config("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1),
            config("qwen2", sliding_window=8, use_sliding_window=True, layer_types=[FULL, SLIDING, SLIDING, SLIDING]),
        ),
        (config("qwen2", sliding_window=8, use_sliding_window=False), config("qwen2", layer_types=[FULL] * 4)),
        (config("mistral", sliding_window=None), config("mistral", sliding_window=None, layer_types=[FULL] * 4)),
        (config("mistral", sliding_window=8), config("mistral", sliding_window=8, layer_types=[SLIDING] * 4)),
        (config("smollm3", no_rope_layer_interval=2), config("smollm3", no_rope_layers=[1, 0, 1, 0, 1])),
        (config("llama", head_dim=24), config("llama", head_dim=None)),
        (config("llama", num_key_value_heads=4), config("llama", num_key_value_heads=None)),
        (config("llama", hidden_act="swish"), config("llama")),
        (
            config("gemma4_text", attention_k_eq_v=True, num_global_key_value_heads=1, layer_types=[SLIDING, FULL] * 2),
            config(
                "gemma4_text",
                global_head_dim=...,
                attention_k_eq_v=True,
                layer_types=[SLIDING, FULL, SLIDING, SLIDING],
                per_layer_config={str(i): {"head_dim": 40, "num_key_value_heads": 1} for i in (1, 3)},
            ),
        ),
        (nested("gemma3", config("gemma3_text")), config("gemma3_text")),
        (nested("gemma3", config("gemma3_text", vocab_size=...), vocab_size=331), config("gemma3_text")),
        (nested("gemma3", config("gemma3_text", model_type=...)), config("gemma3_text")),
        (nested("gemma4", config("gemma4_text"), tie_word_embeddings=True), config("gemma4_text")),
        (
            nested("gemma3", config("gemma3_text"), tie_word_embeddings=False),
            config("gemma3_text", tie_word_embeddings=False),
        ),
        (config("llama", auto_map={"AutoModel": "modeling.X"}, trust_remote_code=True), config("llama")),
        (config("llama", quantization_config={"quant_method": "twobit"}), config("llama")),
    ],
)
def test_two_spellings_of_one_model(old: dict[str, Any], new: dict[str, Any]) -> None:
    before = copy.deepcopy((old, new))
    assert Architecture.from_config(old) == Architecture.from_config(new)
    assert (old, new) == before
    hash(Architecture.from_config(new))


def test_rope_scaling_is_used_not_only_read() -> None:
    plain, scaled = read("llama"), read("llama", rope_scaling={"type": "llama3", **LLAMA3})
    assert plain.ropes[0].inv_freq[0] == scaled.ropes[0].inv_freq[0] == 1.0
    assert plain.ropes[0].inv_freq[-1] == pytest.approx(8 * scaled.ropes[0].inv_freq[-1], rel=1e-6)


def test_yarn_attention_factor() -> None:
    def factor(**keys: Any) -> float:
        return read("llama", rope_scaling={"type": "yarn", **YARN, **keys}).ropes[0].factor

    assert factor() == pytest.approx(0.1 * math.log(8) + 1)
    assert factor(attention_factor=1.0) == 1.0
    assert factor(mscale=2.0, mscale_all_dim=1.0) == pytest.approx((0.2 * math.log(8) + 1) / (0.1 * math.log(8) + 1))
    assert factor(mscale=2.0) == factor()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}, [None] * 4),
        ({"sliding_window": 8, "max_window_layers": 0}, [None] * 4),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [None, 8, 8, 8]),
        ({"sliding_window": 8, "use_sliding_window": True}, [None] * 4),
        ({"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, [None] * 4),
        ({"sliding_window": 8, "use_sliding_window": True, "layer_types": [FULL, SLIDING] * 2}, [None, 8, None, 8]),
    ],
)
def test_qwen2_windows(keys: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(read("qwen2", **keys)) == expected
    assert windows(read("qwen3", **keys)) == expected


def test_windows_of_other_families() -> None:
    assert windows(read("mistral")) == [4096] * 4  # the class default, as for every absent key
    assert windows(read("mistral", sliding_window=None)) == [None] * 4
    assert windows(read("phi3")) == [None] * 4
    assert windows(read("phi3", sliding_window=5)) == [5] * 4
    assert windows(read("llama", sliding_window=5)) == [None] * 4  # transformers' llama has none
    smollm3 = read("smollm3", sliding_window=5, use_sliding_window=True, no_rope_layers=[1, 0, 1, 0])
    assert windows(smollm3) == [None, 5, None, 5]
    assert windows(read("gemma4_text", layer_types=[SLIDING] * 4)) == [512, 512, 512, None]


def test_what_differs_by_layer_in_gemma4() -> None:
    arch = read("gemma4_text", attention_k_eq_v=True, num_global_key_value_heads=1, layer_types=[SLIDING, FULL] * 2)
    sliding, full = arch.layers[0], arch.layers[1]
    assert (sliding.head_dim, sliding.n_kv_heads, sliding.value_is_key) == (16, 2, False)
    assert (full.head_dim, full.n_kv_heads, full.value_is_key) == (40, 1, True)
    assert [rope.kind for rope in arch.ropes] == ["default", "proportional"]
    assert arch.ropes[1].inv_freq[5:] == (0.0,) * 15  # a quarter of 20 pairs turns
    parts = {spec.part for spec in arch.tensors() if spec.layer == 1}
    assert "v" not in parts and "output_scale" in parts


def test_biases() -> None:
    def biased(**keys: Any) -> set[str]:
        return {s.part for s in read(**keys).tensors() if s.role == "bias"}

    assert biased(family="llama") == set()
    assert biased(family="llama", attention_bias=True) == {"q", "k", "v", "o"}
    assert biased(family="llama", mlp_bias=True) == {"gate", "up", "down"}
    assert biased(family="qwen2") == {"q", "k", "v"}
    assert biased(family="mistral", attention_bias=True) == set()


def test_head_dim_is_its_own_setting() -> None:
    arch = read("llama", hidden_size=64, head_dim=32)
    assert arch.ropes[0].dim == 32
    shapes = {spec.part: spec.shape for spec in arch.tensors() if spec.layer == 0 and spec.role == "linear"}
    assert shapes["q"] == (128, 64) and shapes["k"] == (64, 64) and shapes["o"] == (64, 128)


# -- names in the checkpoint ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "prefix", "head"),
    [
        ("llama", "model.", "lm_head.weight"),
        ("llama", "", "lm_head.weight"),
        ("gemma3", "language_model.model.", "language_model.lm_head.weight"),
        ("gemma3", "model.language_model.", "lm_head.weight"),
        ("gemma4", "model.language_model.", "lm_head.weight"),
    ],
)
def test_prefixes(family: str, prefix: str, head: str) -> None:
    inner = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}.get(family)
    keys = config(inner or family, tie_word_embeddings=False)
    arch = Architecture.from_config(nested(family, keys) if inner else keys)
    names = {spec.name: prefix + spec.name.removeprefix("model.") for spec in arch.tensors()} | {"lm_head.weight": head}
    assert {spec.name: spec.source for spec in arch.tensors(names.values())} == names
    assert not any(arch.known_extra(name) for name in names.values())


def test_a_tied_checkpoint_may_hold_either_tensor() -> None:
    arch = read("llama", tie_word_embeddings=True)
    names = {spec.source for spec in arch.tensors()}
    assert "lm_head.weight" not in names
    assert len([s for s in arch.tensors() if s.source == "model.embed_tokens.weight"]) == 2
    swapped = (names - {"model.embed_tokens.weight"}) | {"lm_head.weight"}
    assert {s.source for s in arch.tensors(swapped)} == swapped
    untied = read("llama", tie_word_embeddings=False)
    assert [s.source for s in untied.tensors(names) if s.role == "head"] == ["lm_head.weight"]


def test_the_same_model_twice_is_refused() -> None:
    arch = Architecture.from_config(nested("gemma3", config("gemma3_text")))
    names = ["model.language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight"]
    with pytest.raises(
        CheckpointError, match=r"input embedding twice: language_model\.model\.embed_tokens\.weight and"
    ):
        arch.tensors(names)


def test_known_extras() -> None:
    arch = read("llama")
    for name in (
        "model.layers.3.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        "model.vision_tower.patch_embedder.weight",
        "model.audio_tower.layers.0.weight",
        "multi_modal_projector.mm_input_projection_weight",
        "model.embed_vision.embedding_projection.weight",
        "mtp.layers.0.mlp.up_proj.weight",
        "model.mtp_layers.0.weight",
    ):
        assert arch.known_extra(name), name
    for name in ("foo.bar", "lm_head.weight", "model.layers.9.mlp.up_proj.weight", "model.layers.0.mlp.vision.weight"):
        assert not arch.known_extra(name), name


# -- refusals ------------------------------------------------------------------------------------------------


def refused(config_: Any, *words: str) -> ConfigError:
    with pytest.raises(ConfigError) as info:
        Architecture.from_config(config_, "dir/config.json")
    line = str(info.value)
    assert line.startswith("dir/config.json: ") and "\n" not in line and len(line) < 250
    for word in words:
        assert word in line, line
    return info.value


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "llava", "mistral3", "gpt2", "olmo3", "gemma3n", ""])
def test_other_families_are_refused_by_name(name: str) -> None:
    error = refused(config("llama", model_type=name), repr(name), "not supported")
    assert all(family in (error.hint or "") for family in SUPPORTED_FAMILIES)


def test_custom_code_is_refused() -> None:
    refused(config("my_model", auto_map={"AutoConfig": "configuration_x.X"}), "'my_model'", "needs custom code")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8"])
def test_quantized_sources_are_refused(method: str) -> None:
    quantized = {"quantization_config": {"quant_method": method}}
    error = refused(config("llama", **quantized), "quantization_config", f"already quantized ({method})")
    assert "full-precision" in (error.hint or "")
    refused(nested("gemma3", config("gemma3_text", **quantized)), "text_config.quantization_config", method)
    refused(config("llama", quantization_config=[]), "already quantized")
    refused(config("unknown", **quantized), f"already quantized ({method})")
    refused(
        nested("gemma3", config("gemma3_text", quantization_config={"quant_method": "twobit"})), "already quantized"
    )


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "ntk", "proportional", "", 3, None, ["linear"]])
def test_other_rope_kinds_are_refused_by_name(kind: Any) -> None:
    settings_ = {"rope_type": kind, "factor": 2.0, "long_factor": [1.0], "short_factor": [1.0]}
    if kind is None:
        settings_ = {"type": "dynamic", "factor": 2.0}
    error = refused(config("llama", rope_scaling=settings_), "rope_scaling.rope_type")
    if isinstance(kind, str):
        assert repr(kind) in str(error) and "yarn" in (error.hint or "")


@pytest.mark.parametrize(
    ("config_", "words"),
    [
        ([], ["must be a JSON object"]),
        ({}, ["model_type", "missing"]),
        (config("llama", model_type=7), ["model_type", "text"]),
        (config("llama", hidden_size=...), ["hidden_size", "missing"]),
        (config("llama", hidden_size=True), ["hidden_size", "whole number", "True"]),
        (config("llama", hidden_size=96.0), ["hidden_size", "96.0"]),
        (config("llama", hidden_size="96"), ["hidden_size", "'96'"]),
        (config("llama", hidden_size=-96), ["hidden_size", "-96"]),
        (config("llama", hidden_size=10**400), ["hidden_size", "huge"]),
        (config("llama", num_hidden_layers=10**6), ["num_hidden_layers", "1000000"]),
        (config("llama", vocab_size=0), ["vocab_size"]),
        (config("llama", num_key_value_heads=3), ["num_key_value_heads", "3", "4"]),
        (config("llama", num_attention_heads=5, num_key_value_heads=1), ["hidden_size", "96", "5"]),
        (config("llama", head_dim=23), ["head_dim", "even", "23"]),
        (config("llama", rms_norm_eps=math.nan), ["rms_norm_eps", "nan"]),
        (config("llama", rms_norm_eps=0), ["rms_norm_eps"]),
        (config("llama", rope_theta=math.inf), ["rope_theta", "inf"]),
        (config("llama", rope_theta=-5), ["rope_theta", "-5"]),
        (config("llama", rope_scaling=[]), ["rope_scaling", "object"]),
        (config("llama", rope_scaling={"type": "linear"}), ["rope_scaling.factor", "missing"]),
        (config("llama", rope_scaling={"type": "linear", "factor": 0}), ["rope_scaling.factor"]),
        (config("llama", rope_scaling={"rope_type": "llama3", "factor": 8}), ["low_freq_factor", "missing"]),
        (config("llama", rope_scaling={"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1}), ["high_freq_factor"]),
        (config("llama", partial_rotary_factor=0.5), ["partial_rotary_factor", "llama"]),
        (config("llama", hidden_act="relu2"), ["hidden_act", "relu2"]),
        (config("llama", attention_bias=1), ["attention_bias", "true or false"]),
        (config("llama", tie_word_embeddings="yes"), ["tie_word_embeddings"]),
        (config("llama", num_local_experts=8), ["num_local_experts", "experts"]),
        (config("llama", layer_types=[FULL] * 3), ["layer_types", "4"]),
        (config("llama", layer_types=[SLIDING] * 4), ["layer_types"]),
        (config("qwen3", layer_types=["linear_attention"] * 4), ["layer_types", "linear_attention"]),
        (config("qwen2", layer_types=[SLIDING] * 4), ["layer_types", "use_sliding_window"]),
        (config("qwen2", sliding_window=0, use_sliding_window=True, max_window_layers=0), ["sliding_window", "0"]),
        (config("gemma2", sliding_window=None), ["sliding_window", "null"]),
        (config("gemma2", attn_logit_softcapping=0), ["attn_logit_softcapping"]),
        (config("gemma2", query_pre_attn_scalar=0), ["query_pre_attn_scalar"]),
        (config("gemma2", use_bidirectional_attention=True), ["use_bidirectional_attention"]),
        (config("gemma3_text", attn_logit_softcapping=5.0), ["attn_logit_softcapping"]),
        (
            config("gemma3_text", rope_parameters={"rope_type": "linear", "factor": 2}),
            ["rope_parameters", "layer type"],
        ),
        (config("gemma4_text", hidden_size_per_layer_input=...), ["hidden_size_per_layer_input"]),
        (config("gemma4_text", num_kv_shared_layers=2), ["num_kv_shared_layers"]),
        (config("gemma4_text", enable_moe_block=True), ["enable_moe_block"]),
        (config("gemma4_text", per_layer_config={"9": {}}), ["per_layer_config", "'9'"]),
        (config("gemma4_text", per_layer_config={"1": {"sliding_window": 4}}), ["per_layer_config.1.sliding_window"]),
        (config("qwen3", per_layer_config={"1": {"head_dim": 4}}), ["per_layer_config"]),
        (config("phi3", rope_scaling={"type": "longrope"}), ["longrope"]),
        (config("phi3", rope_scaling={"type": "yarn", "factor": 2}), ["yarn", "phi3"]),
        (config("smollm3", no_rope_layers=[1]), ["no_rope_layers"]),
        (config("smollm3", no_rope_layer_interval=0), ["no_rope_layer_interval"]),
        ({"model_type": "gemma3"}, ["text_config", "missing"]),
        (nested("gemma3", config("llama")), ["text_config.model_type", "gemma3_text", "'llama'"]),
        (nested("gemma3", config("gemma3_text", hidden_size=...)), ["text_config.hidden_size", "missing"]),
    ],
)
def test_bad_settings_are_refused_with_their_key(config_: Any, words: list[str]) -> None:
    assert refused(config_, *words).hint is not None or not config_


# -- fuzz ----------------------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 64)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([FULL, SLIDING, "default", "linear", "yarn", "llama3", "proportional", 10**400, 1e308, 1e-320]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["rope_type", "factor", "rope_theta", FULL, "1", "quant_method"]), inner, max_size=4
        )
    ),
    max_leaves=6,
)
_STARTS = [
    config("llama", rope_scaling={"rope_type": "llama3", **LLAMA3}),
    config(
        "llama", rope_parameters={"rope_type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": True}
    ),
    config("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1, layer_types=[FULL] + [SLIDING] * 3),
    config("phi3", partial_rotary_factor=0.75),
    config("smollm3", no_rope_layers=[1, 0, 1, 0]),
    nested("gemma3", config("gemma3_text", **GEMMA3_OLD), vocab_size=331, tie_word_embeddings=True),
    config("gemma2", attn_logit_softcapping=5.0, final_logit_softcapping=3.0, query_pre_attn_scalar=29),
    config(
        "gemma4_text",
        layer_types=[SLIDING, FULL] * 2,
        rope_parameters={SLIDING: {"rope_theta": 1e4}, FULL: {"rope_type": "proportional", "rope_theta": 1e6}},
        per_layer_config={"1": {"head_dim": 40}, "3": {"num_key_value_heads": 1}},
    ),
]
_KEYS = sorted({key for start in _STARTS for key in start} | {"rope_theta", "head_dim", "rope_local_base_freq"})


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
@example(None)
def test_any_config_gives_an_architecture_or_a_config_error(data: Any) -> None:
    if data is None:  # the starting points themselves are good
        for start in _STARTS:
            assert Architecture.from_config(start).tensors()
        return
    value = copy.deepcopy(data.draw(st.sampled_from(_STARTS)))
    for _ in range(data.draw(st.integers(1, 3))):
        place = value
        if "text_config" in place and isinstance(place["text_config"], dict) and data.draw(st.booleans()):
            place = place["text_config"]
        inner = [key for key, entry in place.items() if isinstance(entry, dict) and key != "text_config"]
        if inner and data.draw(st.booleans()):
            place = place[data.draw(st.sampled_from(inner))]
            key = data.draw(st.sampled_from(sorted(place)) if place else st.just("factor"))
        else:
            key = data.draw(st.sampled_from(_KEYS))
        if data.draw(st.integers(0, 4)) == 0:
            place.pop(key, None)
        else:
            place[key] = data.draw(_JSON)
    try:
        arch = Architecture.from_config(value)
    except ConfigError as error:
        assert "\n" not in str(error) and str(error).startswith("config.json: ")
        return
    assert len(arch.layers) <= 1024
    for rope in arch.ropes:
        assert len(rope.inv_freq) == rope.dim // 2 and all(0 <= f <= 1e6 for f in rope.inv_freq)
        assert math.isfinite(rope.factor) and rope.factor > 0
    for layer in arch.layers:
        assert layer.n_heads % layer.n_kv_heads == 0 and math.isfinite(layer.attention_scale)
        assert layer.rope is None or arch.ropes[layer.rope].dim <= layer.head_dim
    assert all(min(spec.shape) >= 1 for spec in arch.tensors())
