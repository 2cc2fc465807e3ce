"""`Architecture`: what config.json says, as one validated dataclass. It and `families` alone know model families.

The reading follows `transformers` (configuration_*.py, modeling_*.py, modeling_rope_utils.py): same defaults for absent
keys, same precedence between old and new spellings, same fp32 steps for the rotary frequencies. Where `transformers`
would guess or fail late, this refuses with the key and the file. Input is hostile: nothing but ConfigError escapes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from twobit.config_keys import (
    MAX_CONTEXT,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTERMEDIATE,
    MAX_LAYERS,
    MAX_VOCAB,
    Keys,
    show,
)
from twobit.errors import CheckpointError, ConfigError
from twobit.families import (
    ACTIVATIONS,
    EXTRA,
    FAMILIES,
    LAYER_TYPES,
    SUPPORTED_FAMILIES,
    SUPPORTED_LINE,
    Activation,
    Family,
)
from twobit.rope import Rope, f32, make_rope

__all__ = ["SUPPORTED_FAMILIES", "Activation", "Architecture", "Layer", "Role", "Rope", "TensorSpec"]

Role = Literal["linear", "head", "embedding", "norm", "bias", "scalar"]


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
            raise ConfigError(f"{file}: must be a JSON object, is {show(config)}")
        top = Keys(config, file)
        _refuse_quantized(top)
        name = top.text("model_type")
        family = FAMILIES.get(name)
        if family is None:
            custom = " and needs custom code (auto_map)" if config.get("auto_map") is not None else ""
            raise ConfigError(f"{file}: model_type {show(name)} is not supported{custom}", SUPPORTED_LINE)
        prefixes = family.prefixes
        values: dict[str, Any] = config
        where = ""
        if family.text is not None:
            nested = top.group("text_config")
            _refuse_quantized(nested)
            kind = nested.raw("model_type")
            if kind is not None and kind != family.text:
                raise nested.error(
                    "model_type", f"must be {family.text!r} inside {name}, is {show(kind)}", SUPPORTED_LINE
                )
            values, where, text = dict(nested.values), "text_config.", family.text
            if values.get("vocab_size") is None and config.get("vocab_size") is not None:
                values["vocab_size"] = config["vocab_size"]
            if config.get("tie_word_embeddings") is not None:
                values["tie_word_embeddings"] = config["tie_word_embeddings"]
            family, name = FAMILIES[text], text
        present = {key: value for key, value in values.items() if isinstance(key, str)}
        return _read(name, family, Keys({**family.defaults, **present}, file, where), present, prefixes)

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
        return EXTRA.search(name) is not None

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


def _refuse_quantized(keys: Keys) -> None:
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


def _read(name: str, family: Family, keys: Keys, present: Mapping[str, Any], prefixes: tuple[str, ...]) -> Architecture:
    hidden = keys.integer("hidden_size", 1, MAX_HIDDEN)
    vocab = keys.integer("vocab_size", 1, MAX_VOCAB)
    n_layers = keys.integer("num_hidden_layers", 1, MAX_LAYERS)
    intermediate = keys.integer("intermediate_size", 1, MAX_INTERMEDIATE)
    max_context = keys.integer("max_position_embeddings", 1, MAX_CONTEXT)
    activation_name = keys.text(family.activation_key)
    activation = ACTIVATIONS.get(activation_name)
    if activation is None:
        raise keys.error(
            family.activation_key, f"{show(activation_name)} is not supported", "supported: " + ", ".join(ACTIVATIONS)
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
                made_rope = make_rope(name, family, keys, kind, head_dim, max_context)
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
        embedding_scale=f32(hidden**0.5) if family.scaled_embedding else 1.0,
        final_softcap=_softcap(keys, "final_logit_softcapping") if name.startswith("gemma") else None,
        tied=bool(family.defaults["tie_word_embeddings"])
        if keys.raw("tie_word_embeddings") is None
        else keys.flag("tie_word_embeddings"),
        _prefixes=prefixes,
        _fused=family.fused,
    )


def _softcap(keys: Keys, key: str) -> float | None:
    return keys.optional_number(key, 1e-3, 1e6)


def _refuse_variants(name: str, family: Family, keys: Keys, present: Mapping[str, Any]) -> None:
    """Settings of a supported family that change the maths in ways that are not supported."""

    def refuse(key: str, problem: str) -> None:
        raise keys.error(key, problem, SUPPORTED_LINE)

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


def _layer_types(name: str, family: Family, keys: Keys, n_layers: int) -> list[str]:
    """full_attention or sliding_attention for every layer."""
    given = keys.raw("layer_types")
    types: list[str] | None = None
    if given is not None:
        if not isinstance(given, list) or len(given) != n_layers:
            raise keys.error(
                "layer_types", f"must be a list of {n_layers} layer types", "it and num_hidden_layers must agree"
            )
        for kind in given:
            if not isinstance(kind, str) or kind not in LAYER_TYPES:
                raise keys.error(
                    "layer_types", f"{show(kind)} is not supported", "supported: " + ", ".join(LAYER_TYPES)
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
            SUPPORTED_LINE,
        )
    return implied


def _implied_types(name: str, keys: Keys, n_layers: int) -> list[str]:
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


def _windows(family: Family, keys: Keys, types: list[str]) -> list[int | None]:
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


def _rope_layers(name: str, keys: Keys, n_layers: int) -> list[bool]:
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


def _heads(name: str, keys: Keys, hidden: int, types: list[str]) -> list[tuple[int, int, int]]:
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


def _gemma4_overrides(keys: Keys, types: list[str]) -> list[tuple[int | None, int | None]]:
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
            raise group.error(show(key), f"is not the number of one of the {len(types)} layers", "correct the key")
        entry = group.group(key)
        other = sorted(str(k) for k in entry.values if k not in ("head_dim", "num_key_value_heads"))
        if other:
            raise entry.error(other[0][:40], "cannot differ by layer", SUPPORTED_LINE)
        result[int(key)] = (
            entry.optional_integer("num_key_value_heads", 1, MAX_HEADS),
            entry.optional_integer("head_dim", 1, MAX_HEAD_DIM),
        )
    return result
