"""Tiny packed models of every family, quantized once per test run by the real pipeline, and their weights in torch."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
from families import make_checkpoint, make_tokenizer

from twobit.format import layout
from twobit.format.reader import PackedModel
from twobit.quant.pipeline import Options, quantize
from twobit.quant.recipe import Recipe

_folder = tempfile.TemporaryDirectory(prefix="twobit-tests-")


@cache
def source_checkpoint(variant: str) -> Path:
    """A tiny checkpoint with its tokenizer; shared, so only to be read."""
    path = make_checkpoint(variant, Path(_folder.name) / f"{variant}-source")
    make_tokenizer(path)
    return path


@cache
def packed_model(variant: str, recipe: Recipe | None = None) -> Path:
    """The twobit model of a tiny checkpoint; shared, so only to be read."""
    out = Path(tempfile.mkdtemp(dir=_folder.name)) / variant
    quantize(source_checkpoint(variant), out, Options(recipe=recipe or Recipe(), calib_tokens=512))
    return out


def dequantized(model: PackedModel, *, draft: bool) -> dict[str, torch.Tensor]:
    """Canonical tensor name -> fp32, as the runtime sees the weights: 2-bit part alone with `draft`, else in full.

    Embedding rows come from the full model in both cases.
    """
    weights: dict[str, torch.Tensor] = {}
    for name, entry in model.manifest.tensors.items():
        if entry.kind == "matrix":
            two, full = layout.dequantize(model.matrix(name))
            weights[f"{name}.weight"] = torch.from_numpy(two if draft else full)
            if name == "lm_head":
                weights.setdefault("model.embed_tokens.weight", torch.from_numpy(full))
        elif entry.kind == "embedding":
            table = layout.dequantize_embedding(model.planes_of(name, "embedding"), *entry.shape)
            weights[f"{name}.weight"] = torch.from_numpy(table)
        else:
            weights[name] = torch.from_numpy(model.tensor(name).copy())
    return weights
