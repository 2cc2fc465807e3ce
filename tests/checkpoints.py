"""Tiny checkpoints on disk, whole or in shards, and what opening them must give."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from twobit.architecture import Architecture
from twobit.errors import CheckpointError, TwobitError
from twobit.quant.source import Checkpoint

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 20,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
Weights = dict[str, torch.Tensor]


def weights(dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Weights:
    generator = torch.Generator().manual_seed(0)
    specs = Architecture.from_config({**CONFIG, **overrides}).tensors()
    return {spec.source: torch.randn(spec.shape, generator=generator).to(dtype) for spec in specs}


def write_config(folder: Path, **overrides: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **overrides}))


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def shard_name(i: int, count: int) -> str:
    return f"model-{i:05d}-of-{count:05d}.safetensors"


def single(folder: Path, tensors: Weights | None = None, **overrides: Any) -> Path:
    write_config(folder, **overrides)
    save_file(weights() if tensors is None else tensors, folder / SINGLE)
    return folder


def sharded(folder: Path, count: int = 3, tensors: Weights | None = None) -> Path:
    write_config(folder)
    tensors = weights() if tensors is None else tensors
    names = list(tensors)
    weight_map = {}
    for i in range(count):
        mine = names[i::count]
        save_file({name: tensors[name] for name in mine}, folder / shard_name(i + 1, count))
        weight_map |= dict.fromkeys(mine, shard_name(i + 1, count))
    write_index(folder, weight_map)
    return folder


def contents(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


def refusal(folder: Path) -> Callable[..., TwobitError]:
    """A check: opening must fail with a line that holds all of the words, have a hint, and write nothing
    in `folder`."""

    def check(path: Path | str, *words: str, error: type[TwobitError] = CheckpointError) -> TwobitError:
        before = contents(folder)
        with pytest.raises(error) as caught:
            Checkpoint.open(path)
        message = str(caught.value)
        for word in words:
            assert word in message, message
        assert "\n" not in message
        assert contents(folder) == before
        return caught.value

    return check


def assert_reads(checkpoint: Checkpoint, tensors: Weights) -> None:
    for spec in checkpoint.tensors:
        expected = tensors[spec.source].float()
        if spec.rows is not None:
            expected = expected[spec.rows[0] : spec.rows[1]]
        value = checkpoint.read(spec)
        assert value.dtype == torch.float32
        assert value.shape == spec.shape
        assert torch.equal(value, expected)


def find(checkpoint: Checkpoint, name: str) -> Any:
    return next(spec for spec in checkpoint.tensors if spec.name == name)
