"""Folders of tiny twobit models from the writer alone, without checkpoint and torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from test_layout import random_matrix

from twobit.format import writer
from twobit.format.manifest import Manifest, compute_build_id
from twobit.format.writer import ModelWriter, PackedTensor

CONFIG = {"model_type": "llama", "hidden_size": 96, "rope_theta": 10000.0, "note": "Željko"}
FINGERPRINT = {"source": "abc", "options": {"residual": 6, "rules": []}, "calibration": {"tokens": 7}}
KEYS = ["embed", "layer-0000", "layer-0001", "head"]
HIDDEN, WIDE, VOCAB = 96, 172, 331


def bf16(values: np.ndarray) -> bytes:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def step(key: str, seed: int = 0) -> dict[str, PackedTensor]:
    """The tensors of one key of a tiny model."""
    rng = np.random.default_rng([seed, KEYS.index(key)])
    if key == "embed":
        return {"model.embed_tokens": PackedTensor.embedding(rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32))}
    if key == "head":
        norm = PackedTensor.plain(bf16(rng.standard_normal(HIDDEN)), "BF16", (HIDDEN,))
        matrix = random_matrix(VOCAB, HIDDEN, (4, 4, 32), seed)
        return {"model.norm.weight": norm, "lm_head": PackedTensor.matrix(matrix, wide=False)}
    prefix = f"model.layers.{int(key[-4:])}"
    return {
        f"{prefix}.input_layernorm.weight": PackedTensor.plain(np.ones(17, "<f4"), "F32", (17,)),
        f"{prefix}.self_attn.q_proj": PackedTensor.matrix(random_matrix(HIDDEN, HIDDEN, (2, 6, 16), seed), wide=False),
        f"{prefix}.self_attn.q_proj.bias": PackedTensor.plain(np.full(17, 0.5, "<f2"), "F16", (17,)),
        f"{prefix}.mlp.down_proj": PackedTensor.matrix(random_matrix(HIDDEN, WIDE, (3, 8, 16), seed), wide=True),
    }


def finish(made: ModelWriter, keys: list[str] = KEYS) -> Manifest:
    return made.finish(
        keys,
        config=CONFIG,
        family="llama",
        parameters=1234567,
        recipe={"damping": 0.1, "residual": 6},
        calibration={"tokens": 7, "sequences": 1, "source": "built in"},
        producer="twobit 0.1.0",
        files={"tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}"},
    )


def make(out: Path, seed: int = 0, shard_bytes: int = writer.SHARD_BYTES, **options: bool) -> Path:
    with ModelWriter(out, FINGERPRINT, shard_bytes=shard_bytes, **options) as made:
        for key in KEYS:
            made.store(key, step(key, seed))
        finish(made)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def edit_json(file: Path, change: Callable[[dict], object], rehash: bool = False) -> None:
    value = json.loads(file.read_bytes())
    change(value)
    if rehash:
        value["quantization_config"]["build_id"] = compute_build_id(value["quantization_config"])
    file.write_text(json.dumps(value))
