"""What is special about each model family; the defaults are those of `transformers` (configuration_*.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh", "gelu"]


@dataclass(frozen=True)
class Family:
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

FAMILIES: dict[str, Family] = {
    "llama": Family("default, linear, llama3 and yarn RoPE", {"max_position_embeddings": 2048}),
    "mistral": Family(
        "sliding windows",
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        windows="all",
        qkv_bias=False,
    ),
    "qwen2": Family(
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
    "qwen3": Family(
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
    "gemma2": Family(
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
    "gemma3_text": Family(
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
    "gemma3": Family("its text part", {}, text="gemma3_text", prefixes=_WRAPPED),
    "gemma4_text": Family(
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
    "gemma4": Family("its dense text part", {}, text="gemma4_text", prefixes=_WRAPPED),
    "phi3": Family(
        "default RoPE",
        {"rms_norm_eps": 1e-5, "sliding_window": None, "max_position_embeddings": 4096},
        windows="all",
        fused=True,
        qkv_bias=False,
    ),
    "smollm3": Family(
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
    "olmo2": Family(
        "norms after blocks", {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}, norms="post", qk_norm="whole"
    ),
}
FAMILIES = {
    name: family if family.text else replace(family, defaults={**_COMMON, **family.defaults})
    for name, family in FAMILIES.items()
}
SUPPORTED_FAMILIES: tuple[str, ...] = tuple(FAMILIES)
SUPPORTED_LINE = "supported families: " + ", ".join(f"{k} ({v.summary})" for k, v in FAMILIES.items())

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "proportional")
LAYER_TYPES = ("full_attention", "sliding_attention")

# Tensors that a checkpoint may hold and that the forward pass of the text model never reads.
EXTRA = re.compile(
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
