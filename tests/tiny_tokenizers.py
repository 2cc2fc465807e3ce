"""Small tokenizers of the common kinds, and model folders around them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. What is the answer? The answer is 42.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
    "user assistant system <s> </s> <|im_start|> <|im_end|> [INST] [/INST] hello there",
    "日本語 のテキスト, é à ü ñ, Žluťoučký kůň, emoji 😸 🎉.",
] * 3


def byte_level(special: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")) -> Tokenizer:
    """Byte-level BPE, as in GPT-2, Llama 3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def byte_fallback(
    legacy: bool = True, bos: bool = True, extra: tuple[str, ...] = ("<|user|>", "<|end|>", "<|assistant|>")
) -> Tokenizer:
    """SentencePiece-style BPE with byte fallback, as in Llama 2, Mistral, Phi 3. legacy: a space is put before every
    piece of text by the normalizer; otherwise by Metaspace before the first."""
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    trainer = trainers.BpeTrainer(vocab_size=220, show_progress=False)
    base.train_from_iterator([t.replace(" ", " ") for t in TEXT[:2]], trainer)
    learned = json.loads(base.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    names += [t for t in learned["vocab"] if t not in names]
    vocab = {t: i for i, t in enumerate(names)}
    merges = [tuple(m) for m in learned["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True, rstrip=t == "<|end|>") for t in extra])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def unigram() -> Tokenizer:
    """Unigram with a Metaspace decoder, as in T5-like and some multilingual models."""
    words = ["▁hello", "▁the", "▁answer", "▁", "<", ">", "s", *"abcdefghijklmnopqrtuvwxyz|_", *"ABC123.,!?"]
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((w, -float(len(w) < 2) * 9 - 1) for w in words)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def with_split(pattern: Any) -> Tokenizer:
    """Byte-level BPE behind another pre-tokenizer."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pattern, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


SPLITS = {
    "digits": pre_tokenizers.Digits(individual_digits=True),
    "regex": pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
    "string": pre_tokenizers.Split("1", "isolated"),
}


def folder(
    path: Path,
    tokenizer: Tokenizer,
    *,
    config: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    jinja: str | None = None,
) -> Path:
    """Write the tokenizer's share of a model folder."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **(settings or {})}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps(config or {}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    return path
