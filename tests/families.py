"""Tiny random Hugging Face checkpoints of every supported family, and a tiny real tokenizer that fits them.

Sizes are awkward on purpose: hidden sizes that are no multiple of 64, 172 intermediate columns, 331 vocabulary rows,
fewer kv heads than heads, head sizes other than hidden / heads, windows of 8 positions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB = 331
BOS, EOS, PAD = 0, 1, 2
SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
_GEMMA = {
    "tie_word_embeddings": True,
    "head_dim": 32,
    "query_pre_attn_scalar": 29,
    "sliding_window": 8,
    "num_hidden_layers": 4,
}
_GEMMA3 = {
    **_GEMMA,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
    },
}
_GEMMA4 = {
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 40,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 8,
    "final_logit_softcapping": 5.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "vision_use_head": False,
}
_QWEN = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}

# variant: (family, settings on top of the common ones)
_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "hidden_size": 64}),
    "llama-head-dim": ("llama", {"hidden_size": 64, "head_dim": 32}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}}),
    "llama-llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": _YARN}),
    "llama-yarn-factor": ("llama", {"rope_parameters": {**_YARN, "attention_factor": 1.0, "truncate": False}}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": {**_YARN, "mscale": 1.3, "mscale_all_dim": 0.7}}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 32}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {**_QWEN, "sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}),
    "qwen2-window": ("qwen2", {**_QWEN, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen2-tied": ("qwen2", {**_QWEN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 40, "attention_bias": True}),
    "qwen3-window": (
        "qwen3",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": (
        "gemma2",
        {**_GEMMA, "num_hidden_layers": 3, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": ("gemma3_text", _GEMMA3),
    "gemma3": ("gemma3", _GEMMA3),
    "gemma4_text": ("gemma4_text", _GEMMA4),
    "gemma4_text-values": ("gemma4_text", {**_GEMMA4, "attention_k_eq_v": False, "final_logit_softcapping": None}),
    "gemma4": ("gemma4", _GEMMA4),
    "phi3": ("phi3", {"hidden_size": 128, "sliding_window": 8, "partial_rotary_factor": 0.75}),
    "smollm3": ("smollm3", {"tie_word_embeddings": True, "no_rope_layers": [1, 0, 1]}),
    "olmo2": ("olmo2", {"num_key_value_heads": 1}),
}
FAMILIES: tuple[str, ...] = tuple(_VARIANTS)


def _build(family: str, settings: dict[str, Any]) -> torch.nn.Module:
    import transformers as t

    if family == "gemma3":
        text = t.Gemma3TextConfig(**settings)
        config = t.Gemma3Config(text_config=text, vision_config=t.SiglipVisionConfig(**_SIGLIP), mm_tokens_per_image=4)
        return t.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")
    if family == "gemma4":
        config = t.Gemma4Config(text_config=t.Gemma4TextConfig(**settings), vision_config=None, audio_config=None)
        return t.Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager")
    config = t.AutoConfig.for_model(family, **settings)
    return t.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def _randomize(model: torch.nn.Module, family: str, seed: int) -> None:
    """Weights that make every part of the maths visible: logits of deviation about 1, no trivial norm or bias."""
    generator = torch.Generator().manual_seed(seed)
    offset = 0.0 if family in ("gemma2", "gemma3", "gemma3_text") else 1.0
    with torch.no_grad():
        for name, value in model.state_dict().items():
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
            if name.endswith("layer_scalar"):
                value.copy_(0.8 + 0.1 * noise)
            elif value.dim() >= 2:
                value.copy_(noise * (1.5 if "embed" in name or "lm_head" in name else 1.0) / value.shape[-1] ** 0.5)
            elif name.endswith("bias"):
                value.copy_(0.3 * noise)
            elif "norm" in name:
                value.copy_(offset + 0.2 * noise)
                if family.startswith("gemma4") and ("q_norm" in name or "k_norm" in name):
                    value.mul_(0.4)  # its scores have no scale of their own


def make_checkpoint(
    variant: str, path: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **config_overrides: Any
) -> Path:
    """Writes config.json and model.safetensors of a random model of `variant` (one of FAMILIES) under `path`.

    `config_overrides` replace settings of the text model's config. Returns `path`.
    """
    family, settings = _VARIANTS[variant]
    model = _build(family, {**_COMMON, **settings, **config_overrides})
    _randomize(model, family, seed)
    path.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(path)
    return path


def load_reference(path: Path) -> torch.nn.Module:
    """The checkpoint in `transformers`, fp32 with eager attention: what every other implementation is compared with."""
    import transformers as t

    model_type = json.loads((path / "config.json").read_text())["model_type"]
    nested = {"gemma3": "Gemma3ForConditionalGeneration", "gemma4": "Gemma4ForConditionalGeneration"}
    cls = getattr(t, nested[model_type]) if model_type in nested else t.AutoModelForCausalLM
    return cls.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def reference_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """Teacher-forced logits [len(tokens), vocab] of `transformers`."""
    model = load_reference(path)
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].float()


_TRAINING = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "def main():\n    for i in range(10):\n        print(i)\n",
    "Was ist das? Das ist ein Haus. C'est la vie, n'est-ce pas?",
    "user: hello there\nassistant: hello, how can I help you with that?",
]


def make_tokenizer(path: Path) -> Path:
    """Writes tokenizer.json (byte-level BPE, fewer tokens than VOCAB), its config and generation_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 11,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[PAD],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (path / "generation_config.json").write_text(
        json.dumps({"bos_token_id": BOS, "eos_token_id": [EOS, SPECIAL.index("<|im_end|>")]}, indent=2) + "\n"
    )
    return path
