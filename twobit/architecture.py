"""`Architecture`: what config.json says, as one validated dataclass. The only place that knows model families.

The reading follows `transformers` (configuration_*.py, modeling_*.py, modeling_rope_utils.py): same defaults for absent
keys, same precedence between old and new spellings, same fp32 steps for the rotary frequencies. Where `transformers`
would guess or fail late, this refuses with the key and the file. Input is hostile: nothing but ConfigError escapes.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from twobit.errors import CheckpointError, ConfigError

Activation = Literal["silu", "gelu_tanh", "gelu"]
Role = Literal["linear", "head", "embedding", "norm", "bias", "scalar"]

MAX_LAYERS = 1024
MAX_HIDDEN = 1 << 17
MAX_INTERMEDIATE = 1 << 20
MAX_VOCAB = 1 << 22
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_CONTEXT = 1 << 27


@dataclass(frozen=True)
class Rope:
    """One rotary embedding: dimension i < dim / 2 of a head turns with i + dim / 2 by position * inv_freq[i]."""

    kind: str
    dim: int
    inv_freq: tuple[float, ...]
    """fp32 values, dim / 2 of them; 0 where a dimension does not turn."""
    factor: float
    """Multiplies cos and sin (yarn's attention factor)."""


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Every field may differ from layer to layer.

    a = x [input_norm]; q, k, v = W a; q/k/v norms; rope; h = o(attention) [post_attention_norm]; x += h
    a = x [pre_ffn_norm]; h = down(act(gate a) * up a) [post_ffn_norm]; x += h; x *= layer_scalar [output_scale]
    """

    index: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate: int
    window: int | None
    """Visible positions, the query's own included; None: all before it."""
    rope: int | None
    """Index into `Architecture.ropes`; None: no position encoding."""
    attention_scale: float
    attention_softcap: float | None
    qk_norm: Literal["head", "whole"] | None
    v_norm: bool
    """RMS norm without weight on every value head."""
    value_is_key: bool
    """No v_proj: values are the keys as projected, before norm and rope."""
    input_norm: bool
    post_attention_norm: bool
    pre_ffn_norm: bool
    post_ffn_norm: bool
    output_scale: bool
    """The tensor layer_scalar [1] exists and multiplies the layer's output."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that the forward pass consumes."""

    name: str
    """Canonical name, e.g. model.layers.0.self_attn.q_proj.weight."""
    source: str
    """Name in the checkpoint (possibly of a fused tensor)."""
    shape: tuple[int, ...]
    rows: tuple[int, int] | None
    """Rows [first, end) of the fused source tensor; None: all of it."""
    role: Role
    layer: int | None
    part: str
    """Where it goes: embedding, head, final_norm, or in a layer q, k, v, o, gate, up, down (weight and bias),
    input_norm, q_norm, k_norm, post_attention_norm, pre_ffn_norm, post_ffn_norm, output_scale."""
    source_rows: int | None = None
    """Rows of the whole fused source tensor; None where `rows` is None."""

    @property
    def module(self) -> str:
        """Canonical name without its last part, e.g. model.layers.0.self_attn.q_proj."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True)
class _Family:
    summary: str
    defaults: Mapping[str, Any]
    """What transformers' config class gives for keys that are absent."""
    windows: Literal["none", "all", "types"] = "none"
    norms: Literal["pre", "post", "sandwich"] = "pre"
    qk_norm: Literal["head", "whole"] | None = None
    text: str | None = None
    """Set for a multimodal wrapper: family of its `text_config`."""
    prefixes: tuple[str, ...] = ("model.", "")
    fused: bool = False
    activation_key: str = "hidden_act"
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    qkv_bias: bool | None = None
    """None: as `attention_bias` says."""


_COMMON: dict[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_GEMMA: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "max_position_embeddings": 131072,
}
_WRAPPED = ("language_model.model.", "model.language_model.", "model.language_model.model.", "model.", "")

_FAMILIES: dict[str, _Family] = {
    "llama": _Family("default, linear, llama3 and yarn RoPE", {"max_position_embeddings": 2048}),
    "mistral": _Family(
        "sliding windows",
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        windows="all",
        qkv_bias=False,
    ),
    "qwen2": _Family(
        "Qwen2, Qwen2.5",
        {
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "max_position_embeddings": 32768,
        },
        windows="types",
        qkv_bias=True,
    ),
    "qwen3": _Family(
        "dense",
        {
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "max_window_layers": 28,
            "max_position_embeddings": 32768,
        },
        windows="types",
        qk_norm="head",
    ),
    "gemma2": _Family(
        "soft-caps, alternating windows",
        {
            **_GEMMA,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "max_position_embeddings": 8192,
        },
        windows="types",
        norms="sandwich",
        activation_key="hidden_activation",
        norm_offset=1.0,
        scaled_embedding=True,
    ),
    "gemma3_text": _Family(
        "text only",
        {
            **_GEMMA,
            "sliding_window": 4096,
            "vocab_size": 262208,
            "sliding_window_pattern": 6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        },
        windows="types",
        norms="sandwich",
        qk_norm="head",
        activation_key="hidden_activation",
        norm_offset=1.0,
        scaled_embedding=True,
    ),
    "gemma3": _Family("its text part", {}, text="gemma3_text", prefixes=_WRAPPED),
    "gemma4_text": _Family(
        "dense, without per-layer embeddings or shared KV",
        {
            **_GEMMA,
            "sliding_window": 512,
            "vocab_size": 262144,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            "attention_k_eq_v": False,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
        },
        windows="types",
        norms="sandwich",
        qk_norm="head",
        activation_key="hidden_activation",
        scaled_embedding=True,
    ),
    "gemma4": _Family("its dense text part", {}, text="gemma4_text", prefixes=_WRAPPED),
    "phi3": _Family(
        "default RoPE",
        {"rms_norm_eps": 1e-5, "sliding_window": None, "max_position_embeddings": 4096},
        windows="all",
        fused=True,
        qkv_bias=False,
    ),
    "smollm3": _Family(
        "layers without RoPE",
        {
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "rope_theta": 2000000.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "max_position_embeddings": 32768,
        },
        windows="types",
    ),
    "olmo2": _Family(
        "norms after blocks", {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}, norms="post", qk_norm="whole"
    ),
}
_FAMILIES = {
    name: family if family.text else replace(family, defaults={**_COMMON, **family.defaults})
    for name, family in _FAMILIES.items()
}
SUPPORTED_FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
_SUPPORTED_LINE = "supported families: " + ", ".join(f"{k} ({v.summary})" for k, v in _FAMILIES.items())

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional")
_LAYER_TYPES = ("full_attention", "sliding_attention")

# Tensors that a checkpoint may hold and that the forward pass of the text model never reads.
_EXTRA = re.compile(
    r"""(^|\.)rotary_emb\.                                      # frequencies are always computed from the config
      | (^|\.)attn\.(masked_)?bias$ | (^|\.)self_attn\.masked_bias$
      | ^(model\.)?(vision_tower|vision_model|vision_encoder|visual|vision_embed_tokens|embed_vision)\.
      | ^(model\.)?image_newline$
      | ^(model\.)?(audio_tower|audio_model|embed_audio)\.
      | ^(model\.)?(multi_modal_projector|mm_projector|vision_projector|audio_projector)\.
      | ^(model\.|language_model\.|language_model\.model\.|model\.language_model\.)?mtp(_\w+)?\.
    """,
    re.VERBOSE,
)


class _Keys:
    """Typed, bounded access to one JSON object; every failure is a ConfigError that names file and key."""

    def __init__(self, values: Mapping[str, Any], file: str, where: str = "") -> None:
        self.values, self.file, self.where = values, file, where

    def error(self, key: str, problem: str, hint: str | None = None) -> ConfigError:
        return ConfigError(f"{self.file}: {self.where}{key}: {problem}", hint)

    def raw(self, key: str) -> Any:
        return self.values.get(key)

    def _required(self, key: str) -> Any:
        value = self.values.get(key)
        if value is None:
            problem = "is null" if key in self.values else "is missing"
            raise self.error(key, problem, "download the model's own config.json again, or add the key")
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        value = self._required(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.error(key, f"must be a whole number, is {_show(value)}", "correct the value")
        if not low <= value <= high:
            raise self.error(key, f"must lie in {low}..{high}, is {_show(value)}", "correct the value")
        return value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        return None if self.raw(key) is None else self.integer(key, low, high)

    def number(self, key: str, low: float, high: float, *, above: bool = False) -> float:
        """A finite number in low..high; with `above`, greater than low."""
        value = self._required(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, f"must be a number, is {_show(value)}", "correct the value")
        # NaN fails both comparisons; whole numbers too large for a float are compared exactly
        if not low <= value <= high or (above and not value > low):
            bounds = f"greater than {low:g} and at most {high:g}" if above else f"in {low:g}..{high:g}"
            raise self.error(key, f"must be {bounds}, is {_show(value)}", "correct the value")
        return float(value)

    def optional_number(self, key: str, low: float, high: float, *, above: bool = False) -> float | None:
        return None if self.raw(key) is None else self.number(key, low, high, above=above)

    def flag(self, key: str) -> bool:
        value = self._required(key)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {_show(value)}", "correct the value")
        return value

    def text(self, key: str) -> str:
        value = self._required(key)
        if not isinstance(value, str):
            raise self.error(key, f"must be a text, is {_show(value)}", "correct the value")
        return value

    def group(self, key: str) -> _Keys:
        value = self._required(key)
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, is {_show(value)}", "correct the value")
        return _Keys(value, self.file, f"{self.where}{key}.")


def _show(value: Any) -> str:
    """A short form of any JSON value for an error line."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True)
class Architecture:
    """A decoder-only language model, as far as its maths goes. Hashable and comparable."""

    family: str
    hidden: int
    vocab: int
    max_context: int
    layers: tuple[Layer, ...]
    ropes: tuple[Rope, ...]
    activation: Activation
    norm_eps: float
    norm_offset: float
    """1.0 where the family multiplies by (1 + w)."""
    embedding_scale: float
    """fp32 sqrt(hidden) in the gemma families, as `transformers` has it in an fp32 model; else 1."""
    final_softcap: float | None
    tied: bool
    """The head is the input embedding."""
    _prefixes: tuple[str, ...] = field(default=("model.", ""), repr=False, compare=False)
    _fused: bool = field(default=False, repr=False, compare=False)

    @classmethod
    def from_config(cls, config: Any, file: str = "config.json") -> Architecture:
        """Reads a parsed config.json; `file` is the name that errors show.

        ConfigError for anything malformed, inconsistent, already quantized (a `quantization_config` of twobit itself is
        let through) or of a family that is not supported.
        """
        if not isinstance(config, dict):
            raise ConfigError(f"{file}: must be a JSON object, is {_show(config)}")
        top = _Keys(config, file)
        _refuse_quantized(top)
        name = top.text("model_type")
        family = _FAMILIES.get(name)
        if family is None:
            custom = " and needs custom code (auto_map)" if config.get("auto_map") is not None else ""
            raise ConfigError(f"{file}: model_type {_show(name)} is not supported{custom}", _SUPPORTED_LINE)
        prefixes = family.prefixes
        values: dict[str, Any] = config
        where = ""
        if family.text is not None:
            nested = top.group("text_config")
            _refuse_quantized(nested)
            kind = nested.raw("model_type")
            if kind is not None and kind != family.text:
                raise nested.error(
                    "model_type", f"must be {family.text!r} inside {name}, is {_show(kind)}", _SUPPORTED_LINE
                )
            values, where, text = dict(nested.values), "text_config.", family.text
            if values.get("vocab_size") is None and config.get("vocab_size") is not None:
                values["vocab_size"] = config["vocab_size"]
            if config.get("tie_word_embeddings") is not None:
                values["tie_word_embeddings"] = config["tie_word_embeddings"]
            family, name = _FAMILIES[text], text
        present = {key: value for key, value in values.items() if isinstance(key, str)}
        return _read(name, family, _Keys({**family.defaults, **present}, file, where), present, prefixes)

    def tensors(self, names: Collection[str] | None = None) -> tuple[TensorSpec, ...]:
        """Every tensor that the forward pass consumes, in model order: embedding, layers, final norm, head.

        In a tied model, embedding and head have the same source. `names`, the tensor names of a checkpoint, settle
        where the sources lie (families are wrapped in several prefixes; a tied file may hold the head alone); without
        them it is the family's usual place. CheckpointError where the checkpoint holds embedding, head or norm twice.
        """
        prefix, embedding, head = self._find_sources(names)
        table = (self.vocab, self.hidden)
        specs = [TensorSpec("model.embed_tokens.weight", embedding, table, None, "embedding", None, "embedding")]
        for layer in self.layers:
            specs.extend(self._layer_tensors(layer, prefix))
        norm = f"{prefix}norm.weight"
        specs.append(TensorSpec("model.norm.weight", norm, (self.hidden,), None, "norm", None, "final_norm"))
        source = embedding if self.tied else head
        specs.append(TensorSpec("lm_head.weight", source, table, None, "head", None, "head"))
        return tuple(specs)

    def known_extra(self, name: str) -> bool:
        """Is `name` a tensor that the text model never reads: rotary buffers, vision and audio parts, MTP layers?"""
        return _EXTRA.search(name) is not None

    def _find_sources(self, names: Collection[str] | None) -> tuple[str, str, str]:
        """Prefix of the decoder's tensors, name of the embedding, name of the head."""
        prefix = self._prefixes[0]
        heads = ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight"]
        if prefix == "language_model.model.":
            heads[:2] = heads[1::-1]
        if names is None:
            return prefix, f"{prefix}embed_tokens.weight", heads[0]

        def only(candidates: list[str], what: str) -> str | None:
            found = [name for name in candidates if name in names]
            if len(found) > 1:
                raise CheckpointError(
                    f"the checkpoint holds the {what} twice: {found[0]} and {found[1]}",
                    "keep the tensors of one model only",
                )
            return found[0] if found else None

        # the final norm is always there; a tied checkpoint may hold only the head of the two equal tensors
        norm = only([f"{p}norm.weight" for p in self._prefixes], "final norm")
        if norm is not None:
            prefix = norm.removesuffix("norm.weight")
        embedding = only([f"{p}embed_tokens.weight" for p in self._prefixes], "input embedding")
        head = only(heads, "head")
        if embedding is None:
            embedding = head if self.tied and head is not None else f"{prefix}embed_tokens.weight"
        return prefix, embedding, head or heads[0]

    def _layer_tensors(self, layer: Layer, prefix: str) -> list[TensorSpec]:
        own, there = f"model.layers.{layer.index}.", f"{prefix}layers.{layer.index}."
        q, kv = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
        specs: list[TensorSpec] = []

        def add(module: str, shape: tuple[int, ...], role: Role, part: str, kind: str = ".weight") -> None:
            specs.append(
                TensorSpec(f"{own}{module}{kind}", f"{there}{module}{kind}", shape, None, role, layer.index, part)
            )

        def norm(present: bool, module: str, part: str, size: int = self.hidden) -> None:
            if present:
                add(module, (size,), "norm", part)

        def linear(module: str, rows: int, cols: int, part: str, bias: bool, fused: str | None = None) -> None:
            if fused is None or not self._fused:
                add(module, (rows, cols), "linear", part)
            else:
                first, total = {"q": (0, q + 2 * kv), "k": (q, q + 2 * kv), "v": (q + kv, q + 2 * kv)}.get(
                    part, (0 if part == "gate" else rows, 2 * rows)
                )
                specs.append(
                    TensorSpec(
                        f"{own}{module}.weight",
                        f"{there}{fused}.weight",
                        (rows, cols),
                        (first, first + rows),
                        "linear",
                        layer.index,
                        part,
                        total,
                    )
                )
            if bias:
                add(module, (rows,), "bias", part, ".bias")

        norm(layer.input_norm, "input_layernorm", "input_norm")
        linear("self_attn.q_proj", q, self.hidden, "q", layer.qkv_bias, "self_attn.qkv_proj")
        linear("self_attn.k_proj", kv, self.hidden, "k", layer.qkv_bias, "self_attn.qkv_proj")
        if not layer.value_is_key:
            linear("self_attn.v_proj", kv, self.hidden, "v", layer.qkv_bias, "self_attn.qkv_proj")
        norm(layer.qk_norm is not None, "self_attn.q_norm", "q_norm", q if layer.qk_norm == "whole" else layer.head_dim)
        norm(
            layer.qk_norm is not None, "self_attn.k_norm", "k_norm", kv if layer.qk_norm == "whole" else layer.head_dim
        )
        linear("self_attn.o_proj", self.hidden, q, "o", layer.o_bias)
        norm(layer.post_attention_norm, "post_attention_layernorm", "post_attention_norm")
        # where a norm follows attention, the one before the MLP has the longer name
        before_ffn = "pre_feedforward_layernorm" if layer.post_attention_norm else "post_attention_layernorm"
        norm(layer.pre_ffn_norm, before_ffn, "pre_ffn_norm")
        linear("mlp.gate_proj", layer.intermediate, self.hidden, "gate", layer.mlp_bias, "mlp.gate_up_proj")
        linear("mlp.up_proj", layer.intermediate, self.hidden, "up", layer.mlp_bias, "mlp.gate_up_proj")
        linear("mlp.down_proj", self.hidden, layer.intermediate, "down", layer.mlp_bias)
        norm(layer.post_ffn_norm, "post_feedforward_layernorm", "post_ffn_norm")
        if layer.output_scale:
            add("layer_scalar", (1,), "scalar", "output_scale", "")
        return specs


def _refuse_quantized(keys: _Keys) -> None:
    for key in ("quantization_config", "compression_config"):
        value = keys.raw(key)
        if value is None:
            continue
        method = value.get("quant_method") if isinstance(value, dict) else None
        if method == "twobit" and key == "quantization_config" and not keys.where:
            continue
        known = method if isinstance(method, str) else "unknown method"
        raise keys.error(
            key,
            f"already quantized ({known if len(known) <= 40 else known[:37] + '...'})",
            "give the full-precision checkpoint",
        )


def _read(
    name: str, family: _Family, keys: _Keys, present: Mapping[str, Any], prefixes: tuple[str, ...]
) -> Architecture:
    hidden = keys.integer("hidden_size", 1, MAX_HIDDEN)
    vocab = keys.integer("vocab_size", 1, MAX_VOCAB)
    n_layers = keys.integer("num_hidden_layers", 1, MAX_LAYERS)
    intermediate = keys.integer("intermediate_size", 1, MAX_INTERMEDIATE)
    max_context = keys.integer("max_position_embeddings", 1, MAX_CONTEXT)
    activation_name = keys.text(family.activation_key)
    activation = _ACTIVATIONS.get(activation_name)
    if activation is None:
        raise keys.error(
            family.activation_key, f"{_show(activation_name)} is not supported", "supported: " + ", ".join(_ACTIVATIONS)
        )
    _refuse_variants(name, family, keys, present)
    types = _layer_types(name, family, keys, n_layers)
    windows = _windows(family, keys, types)
    heads = _heads(name, keys, hidden, types)
    use_rope = _rope_layers(name, keys, n_layers)
    ropes: list[Rope] = []
    made: dict[tuple[str, int], int] = {}
    layers = []
    attention_bias = keys.flag("attention_bias") if family.qkv_bias is None else False
    for i, (kind, (n_heads, n_kv_heads, head_dim)) in enumerate(zip(types, heads, strict=True)):
        rope = None
        if use_rope[i]:
            if (kind, head_dim) not in made:
                made_rope = _rope(name, family, keys, kind, head_dim, max_context)
                if made_rope not in ropes:
                    ropes.append(made_rope)
                made[kind, head_dim] = ropes.index(made_rope)
            rope = made[kind, head_dim]
        if name == "gemma4_text":
            scale = 1.0
        elif name in ("gemma2", "gemma3_text"):
            scale = keys.number("query_pre_attn_scalar", 0, 1e9, above=True) ** -0.5
        else:
            scale = head_dim**-0.5
        layers.append(
            Layer(
                index=i,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                head_dim=head_dim,
                intermediate=intermediate,
                window=windows[i],
                rope=rope,
                attention_scale=scale,
                attention_softcap=_softcap(keys, "attn_logit_softcapping") if name == "gemma2" else None,
                qk_norm=family.qk_norm,
                v_norm=name == "gemma4_text",
                value_is_key=name == "gemma4_text" and kind == "full_attention" and keys.flag("attention_k_eq_v"),
                input_norm=family.norms != "post",
                post_attention_norm=family.norms != "pre",
                pre_ffn_norm=family.norms != "post",
                post_ffn_norm=family.norms != "pre",
                output_scale=name == "gemma4_text",
                qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
                o_bias=attention_bias,
                mlp_bias=name in ("llama", "smollm3") and keys.flag("mlp_bias"),
            )
        )
    return Architecture(
        family=name,
        hidden=hidden,
        vocab=vocab,
        max_context=max_context,
        layers=tuple(layers),
        ropes=tuple(ropes),
        activation=activation,
        norm_eps=keys.number("rms_norm_eps", 0, 1, above=True),
        norm_offset=family.norm_offset,
        embedding_scale=_f32(hidden**0.5) if family.scaled_embedding else 1.0,
        final_softcap=_softcap(keys, "final_logit_softcapping") if name.startswith("gemma") else None,
        tied=bool(family.defaults["tie_word_embeddings"])
        if keys.raw("tie_word_embeddings") is None
        else keys.flag("tie_word_embeddings"),
        _prefixes=prefixes,
        _fused=family.fused,
    )


def _softcap(keys: _Keys, key: str) -> float | None:
    return keys.optional_number(key, 1e-3, 1e6)


def _refuse_variants(name: str, family: _Family, keys: _Keys, present: Mapping[str, Any]) -> None:
    """Settings of a supported family that change the maths in ways that are not supported."""

    def refuse(key: str, problem: str) -> None:
        raise keys.error(key, problem, _SUPPORTED_LINE)

    for key in ("num_experts", "num_local_experts"):
        if present.get(key) not in (None, 0):
            refuse(key, f"mixture-of-experts models are not supported ({name})")
    if name != "gemma4_text" and present.get("per_layer_config"):
        refuse("per_layer_config", f"settings that differ by layer are not supported for {name}")
    bidirectional = keys.raw("use_bidirectional_attention")
    if bidirectional not in (None, False) and not (name == "gemma4_text" and bidirectional == "vision"):
        refuse("use_bidirectional_attention", "attention to later tokens is not supported")
    if name == "gemma3_text" and keys.raw("attn_logit_softcapping") is not None:
        refuse("attn_logit_softcapping", "is not part of gemma3's attention")
    if name == "gemma3_text" and keys.where and keys.raw("final_logit_softcapping") is not None:
        refuse("final_logit_softcapping", "is not part of multimodal gemma3")
    if name == "gemma4_text":
        if keys.raw("hidden_size_per_layer_input") not in (None, 0):
            refuse("hidden_size_per_layer_input", "gemma4 with per-layer embeddings is not supported")
        if keys.raw("num_kv_shared_layers") not in (None, 0):
            refuse("num_kv_shared_layers", "gemma4 with shared keys and values is not supported")
        if keys.raw("enable_moe_block") not in (None, False):
            refuse("enable_moe_block", "gemma4 with mixture of experts is not supported")


def _layer_types(name: str, family: _Family, keys: _Keys, n_layers: int) -> list[str]:
    """full_attention or sliding_attention for every layer."""
    given = keys.raw("layer_types")
    types: list[str] | None = None
    if given is not None:
        if not isinstance(given, list) or len(given) != n_layers:
            raise keys.error(
                "layer_types", f"must be a list of {n_layers} layer types", "it and num_hidden_layers must agree"
            )
        for kind in given:
            if not isinstance(kind, str) or kind not in _LAYER_TYPES:
                raise keys.error(
                    "layer_types", f"{_show(kind)} is not supported", "supported: " + ", ".join(_LAYER_TYPES)
                )
        types = list(given)
    if family.windows == "types":
        if types is None:
            types = _implied_types(name, keys, n_layers)
        if name == "gemma4_text":
            types[-1] = "full_attention"  # as transformers forces it
        return types
    sliding = family.windows == "all" and keys.optional_integer("sliding_window", 1, MAX_CONTEXT) is not None
    implied = ["sliding_attention" if sliding else "full_attention"] * n_layers
    if types is not None and types != implied:
        raise keys.error(
            "layer_types",
            f"{name} has one kind of attention, here {implied[0]}, but the list says otherwise",
            _SUPPORTED_LINE,
        )
    return implied


def _implied_types(name: str, keys: _Keys, n_layers: int) -> list[str]:
    """Layer types of a config without `layer_types`."""
    if name in ("gemma2", "gemma3_text", "gemma4_text"):
        # gemma4 never had the key, gemma2's every second layer is fixed
        pattern = {"gemma2": 2, "gemma4_text": 6}.get(name) or keys.integer("sliding_window_pattern", 1, MAX_LAYERS)
        sliding = [(i + 1) % pattern != 0 for i in range(n_layers)]
    elif not keys.flag("use_sliding_window") or keys.raw("sliding_window") is None:
        sliding = [False] * n_layers
    elif name == "smollm3":
        sliding = [not rope for rope in _rope_layers(name, keys, n_layers)]
    else:
        first = keys.integer("max_window_layers", 0, MAX_CONTEXT)
        sliding = [i >= first for i in range(n_layers)]
    return ["sliding_attention" if s else "full_attention" for s in sliding]


def _windows(family: _Family, keys: _Keys, types: list[str]) -> list[int | None]:
    if "sliding_attention" not in types:
        return [None] * len(types)
    if "use_sliding_window" in family.defaults and not keys.flag("use_sliding_window"):
        raise keys.error(
            "layer_types", "lists sliding_attention, but use_sliding_window is false", "make the two agree"
        )
    if keys.raw("sliding_window") is None:
        raise keys.error("sliding_window", "is null, but layer_types lists sliding_attention", "make the two agree")
    window = keys.integer("sliding_window", 1, MAX_CONTEXT)
    return [window if kind == "sliding_attention" else None for kind in types]


def _rope_layers(name: str, keys: _Keys, n_layers: int) -> list[bool]:
    """Which layers have a position encoding."""
    if name != "smollm3":
        return [True] * n_layers
    given = keys.raw("no_rope_layers")
    if given is None:
        interval = keys.integer("no_rope_layer_interval", 1, MAX_LAYERS)
        return [(i + 1) % interval != 0 for i in range(n_layers)]
    if not isinstance(given, list) or len(given) < n_layers:
        raise keys.error("no_rope_layers", f"must be a list of at least {n_layers} zeros and ones", "correct the value")
    if any(not isinstance(value, int) or value not in (0, 1) for value in given):
        raise keys.error("no_rope_layers", "must hold zeros (no RoPE) and ones only", "correct the value")
    return [bool(value) for value in given[:n_layers]]


def _heads(name: str, keys: _Keys, hidden: int, types: list[str]) -> list[tuple[int, int, int]]:
    """(heads, kv heads, head size) of every layer."""
    n_heads = keys.integer("num_attention_heads", 1, MAX_HEADS)
    n_kv_heads = keys.optional_integer("num_key_value_heads", 1, MAX_HEADS) or n_heads
    head_dim = keys.optional_integer("head_dim", 1, MAX_HEAD_DIM)
    if head_dim is None:
        if hidden % n_heads:
            raise keys.error(
                "hidden_size",
                f"{hidden} is no multiple of num_attention_heads {n_heads}",
                "add head_dim, or correct one",
            )
        head_dim = hidden // n_heads
    heads = [(n_heads, n_kv_heads, head_dim)] * len(types)
    if name == "gemma4_text":
        overrides = _gemma4_overrides(keys, types)
        heads = [
            (n_heads, kv if kv is not None else n_kv_heads, dim if dim is not None else head_dim)
            for kv, dim in overrides
        ]
    for _, kv, dim in heads:
        if n_heads % kv:
            raise keys.error(
                "num_key_value_heads", f"{kv} does not divide num_attention_heads {n_heads}", "correct one"
            )
        if dim > MAX_HEAD_DIM or n_heads * dim > MAX_INTERMEDIATE:
            raise keys.error("head_dim", f"{dim} is too large", "correct the value")
    return heads


def _gemma4_overrides(keys: _Keys, types: list[str]) -> list[tuple[int | None, int | None]]:
    """(kv heads, head size) where a layer departs from the model's: full attention, or as per_layer_config says."""
    result: list[tuple[int | None, int | None]] = [(None, None)] * len(types)
    if keys.raw("per_layer_config") is None:
        dim = keys.integer("global_head_dim", 1, MAX_HEAD_DIM)
        kv = keys.optional_integer("num_global_key_value_heads", 1, MAX_HEADS)
        if not keys.flag("attention_k_eq_v"):
            kv = None
        return [(kv, dim) if kind == "full_attention" else (None, None) for kind in types]
    group = keys.group("per_layer_config")
    for key in group.values:
        if not isinstance(key, str) or not re.fullmatch(r"[0-9]{1,4}", key) or int(key) >= len(types):
            raise group.error(_show(key), f"is not the number of one of the {len(types)} layers", "correct the key")
        entry = group.group(key)
        other = sorted(str(k) for k in entry.values if k not in ("head_dim", "num_key_value_heads"))
        if other:
            raise entry.error(other[0][:40], "cannot differ by layer", _SUPPORTED_LINE)
        result[int(key)] = (
            entry.optional_integer("num_key_value_heads", 1, MAX_HEADS),
            entry.optional_integer("head_dim", 1, MAX_HEAD_DIM),
        )
    return result


def _rope_settings(name: str, family: _Family, keys: _Keys, kind: str) -> _Keys:
    """The rotary settings of layers of type `kind`, in transformers 5's spelling, `rope_theta` included.

    Old spelling: rope_theta, rope_scaling (type or rope_type), partial_rotary_factor, gemma3's rope_local_base_freq.
    New: rope_parameters, flat or one object per layer type. A non-empty rope_scaling wins over a flat rope_parameters.
    """
    parameters, scaling = keys.raw("rope_parameters"), keys.raw("rope_scaling")
    if parameters is not None:
        keys.group("rope_parameters")
    if scaling is not None:
        keys.group("rope_scaling")
    per_type = isinstance(parameters, dict) and any(t in parameters for t in _LAYER_TYPES)
    where = f"{keys.where}rope_parameters."
    settings: dict[str, Any]
    if name == "gemma3_text":
        if parameters and not per_type:
            raise keys.error(
                "rope_parameters", "must have an object per layer type", "add full_attention and sliding_attention"
            )
        entry = parameters.get(kind) if parameters else None
        if entry is not None:
            entry = keys.group("rope_parameters").group(kind).values
        settings = dict(entry or {})
        if kind == "full_attention":
            settings.update(scaling or {})
        theta = keys.raw("rope_theta" if kind == "full_attention" else "rope_local_base_freq")
        settings.setdefault("rope_theta", theta)
        where = f"{where}{kind}."
    elif name == "gemma4_text":
        if scaling:
            raise keys.error("rope_scaling", "gemma4 has rope_parameters instead", "remove the key")
        if parameters is None:
            settings = (
                {"rope_type": "default", "rope_theta": 10000.0}
                if kind == "sliding_attention"
                else {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
            )
        else:
            settings = dict(keys.group("rope_parameters").group(kind).values)
        where = f"{where}{kind}."
    else:
        if scaling:
            settings, where = dict(scaling), f"{keys.where}rope_scaling."
        elif per_type:
            settings, where = dict(keys.group("rope_parameters").group(kind).values), f"{where}{kind}."
        else:
            settings = dict(parameters or {})
        settings.setdefault("rope_theta", keys.raw("rope_theta"))
        if keys.raw("partial_rotary_factor") is not None:
            settings.setdefault("partial_rotary_factor", keys.raw("partial_rotary_factor"))
        if keys.raw("original_max_position_embeddings") is not None:
            settings["original_max_position_embeddings"] = keys.raw("original_max_position_embeddings")
    if settings.get("rope_type") is None:
        settings["rope_type"] = settings.get("type", "default")
    return _Keys(settings, keys.file, where)


def _f32(value: float) -> float:
    """Rounds to the nearest fp32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _rope(name: str, family: _Family, keys: _Keys, layer_type: str, head_dim: int, max_context: int) -> Rope:
    """Frequencies as modeling_rope_utils computes them, every step rounded to fp32."""
    settings = _rope_settings(name, family, keys, layer_type)
    kind = settings.text("rope_type")
    allowed = ("default",) if name == "phi3" else _ROPE_KINDS if name == "gemma4_text" else _ROPE_KINDS[:4]
    if kind not in allowed:
        raise settings.error(
            "rope_type", f"{_show(kind)} is not supported for {name}", "supported: " + ", ".join(allowed)
        )
    base = settings.number("rope_theta", 1, 1e18, above=True)
    partial = settings.optional_number("partial_rotary_factor", 0, 1, above=True)
    partial = 1.0 if partial is None else partial
    dim = head_dim
    if name == "phi3":
        dim = int(head_dim * partial)
    elif partial != 1.0 and kind != "proportional":
        raise settings.error("partial_rotary_factor", f"is not supported for {name} with {kind} RoPE", _SUPPORTED_LINE)
    if dim % 2 or dim == 0:
        raise settings.error("head_dim", f"the rotary part must be even and not empty, is {dim}", "correct head_dim")

    powers = [_f32(_f32(base) ** _f32(i / dim)) for i in range(0, dim, 2)]
    frequencies = [_f32(1 / p) for p in powers]
    factor = 1.0
    if kind == "linear":
        by = _f32(settings.number("factor", 0, 1e6, above=True))
        frequencies = [_f32(f / by) for f in frequencies]
    elif kind == "proportional":
        by = _f32(1.0 if settings.raw("factor") is None else settings.number("factor", 0, 1e6, above=True))
        turning = int(partial * head_dim // 2)
        frequencies = [_f32(f / by) if i < turning else 0.0 for i, f in enumerate(frequencies)]
    elif kind == "llama3":
        frequencies = _llama3(settings, frequencies, max_context)
    elif kind == "yarn":
        frequencies, factor = _yarn(settings, powers, base, dim, max_context)
    return Rope(kind, dim, tuple(frequencies), factor)


def _original_context(settings: _Keys, max_context: int) -> int:
    value = settings.optional_integer("original_max_position_embeddings", 1, MAX_CONTEXT)
    return max_context if value is None else value


def _llama3(settings: _Keys, frequencies: list[float], max_context: int) -> list[float]:
    factor = settings.number("factor", 1e-3, 1e6)
    low = settings.number("low_freq_factor", 1e-3, 1e6)
    high = settings.number("high_freq_factor", 1e-3, 1e6)
    original = _original_context(settings, max_context)
    if high <= low:
        raise settings.error("high_freq_factor", "must be greater than low_freq_factor", "correct the value")
    low_wavelength, high_wavelength = _f32(original / low), _f32(original / high)
    span, by = _f32(high - low), _f32(factor)
    result = []
    for f in frequencies:
        wavelength = _f32(_f32(1 / f) * _f32(2 * math.pi))
        if wavelength > low_wavelength:
            result.append(_f32(f / by))
        elif wavelength < high_wavelength:
            result.append(f)
        else:
            smooth = _f32(_f32(_f32(_f32(1 / wavelength) * original) - _f32(low)) / span)
            result.append(_f32(_f32(_f32(_f32(1 - smooth) * f) / by) + _f32(smooth * f)))
    return result


def _yarn(settings: _Keys, powers: list[float], base: float, dim: int, max_context: int) -> tuple[list[float], float]:
    original = _original_context(settings, max_context)
    factor = settings.optional_number("factor", 1e-3, 1e6)
    if factor is None:
        factor = max_context / original
    mscale = settings.optional_number("mscale", 0, 1e3)
    mscale_all_dim = settings.optional_number("mscale_all_dim", 0, 1e3)
    attention_factor = settings.optional_number("attention_factor", 0, 1e3, above=True)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if attention_factor is None:
        if mscale and mscale_all_dim:
            attention_factor = magnitude(mscale) / magnitude(mscale_all_dim)
        else:
            attention_factor = magnitude(1.0)
    fast = settings.optional_number("beta_fast", 0, 1e6) or 32.0
    slow = settings.optional_number("beta_slow", 0, 1e6) or 1.0
    truncate = True if settings.raw("truncate") is None else settings.flag("truncate")

    def correction(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = correction(fast), correction(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = _f32(high - low if high != low else high + 0.001 - low)
    result = []
    for i, power in enumerate(powers):
        extrapolation, interpolation = _f32(1 / power), _f32(1 / _f32(_f32(factor) * power))
        ramp = min(max(_f32(_f32(i - _f32(low)) / span), 0.0), 1.0)
        keep = _f32(1 - ramp)
        result.append(_f32(_f32(interpolation * _f32(1 - keep)) + _f32(extrapolation * keep)))
    return result, float(attention_factor)
