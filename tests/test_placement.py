"""Which part of a model lies where: sums that add up, budgets that are kept, constants that C has too."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twobit.architecture import Architecture
from twobit.errors import RuntimeFailure, UsageError
from twobit.format.manifest import TensorEntry
from twobit.quant.recipe import Recipe, entries
from twobit.runtime import placement
from twobit.runtime.placement import Sizes, place

CSRC = Path(__file__).parents[1] / "csrc"
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def model(**changes: Any) -> tuple[Architecture, dict[str, TensorEntry], Sizes]:
    architecture = Architecture.from_config(CONFIG | changes)
    tensors = entries(architecture, Recipe())
    return architecture, tensors, Sizes.of(architecture, tensors)


def constant(file: str, name: str) -> str:
    found = re.search(rf"{name} = ([^,}}]+)", (CSRC / file).read_text())
    assert found is not None
    return found[1].strip()


def test_constants_are_those_of_the_runtime() -> None:
    assert int(constant("engine.h", "TB_CHUNK_MAX")) == placement.CHUNK
    assert int(constant("tb.h", "TB_MAX_DRAFT")) == placement.MAX_DRAFT
    assert constant("engine.h", "TB_ASIDE") == "TB_MAX_DRAFT + 1"


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_are_all_that_the_manifest_stores(tied: bool) -> None:
    _, tensors, sizes = model(tie_word_embeddings=tied)
    stored = sum(s.bytes for name, entry in tensors.items() for s in entry.stored(name).values())
    ours = sum(sizes.draft) + sum(sizes.residual) + sizes.head_draft + sizes.head_residual
    assert ours + sizes.small + sizes.embedding == stored  # norms are fp32 in these entries
    assert (sizes.embedding == 0) == tied


def test_the_group_is_the_largest_product() -> None:
    _, tensors, sizes = model()
    gate_up = sum(
        s.bytes
        for name in ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
        for s in tensors[name].stored(name).values()
        if s.part == "residual"
    )
    assert sizes.group == gate_up


def test_the_cache_by_hand() -> None:
    architecture, _, _ = model()
    slots = 1000 + placement.AHEAD
    assert placement.cache_bytes(architecture, 1000) == 6 * 2 * 2 * slots * 2 * 64
    windowed = replace(architecture, layers=tuple(replace(layer, window=64) for layer in architecture.layers))
    assert placement.cache_bytes(windowed, 100_000) == 6 * 2 * 2 * (64 + placement.SLACK) * 2 * 64


@settings(max_examples=200, deadline=None)
@given(vram=st.integers(0, 60_000_000), context=st.integers(1, 4096), tied=st.booleans())
def test_a_budget_is_kept_and_filled(vram: int, context: int, tied: bool) -> None:
    architecture, _, sizes = model(tie_word_embeddings=tied)
    margin = 1_000_000
    placed = place(architecture, sizes, vram, context=context, margin=margin)
    everything = sum(sizes.draft) + sum(sizes.residual) + sizes.head_draft + sizes.head_residual
    if not placed.hybrid:
        assert placed.vram_bytes == placed.residual_layers == 0
        assert placed.ram == everything + sizes.small + sizes.embedding
        again = place(architecture, sizes, vram + placed.missing, context=context, margin=margin)
        assert again.hybrid and again.residual_layers == 0
        return
    left = vram - margin - placed.vram_bytes
    assert left >= 0
    if placed.residual_layers < 6:
        assert left < sizes.residual[placed.residual_layers] and not placed.residual_head
    elif not placed.residual_head:
        assert left < sizes.head_residual
    head = 0 if placed.residual_head else sizes.head_residual
    rows = sizes.head_draft + sizes.head_residual - head if tied else sizes.embedding
    assert placed.ram == sum(sizes.residual[placed.residual_layers :]) + head + rows


def test_as_many_layers_as_are_asked_for() -> None:
    architecture, _, sizes = model()
    placed = place(architecture, sizes, 1 << 40, context=64, residual_layers=2)
    assert placed.residual_layers == 2 and not placed.residual_head
    assert placed.vram["residual"] == sum(sizes.residual[:2])
    with pytest.raises(UsageError, match="has 6 layers"):
        place(architecture, sizes, 1 << 40, context=64, residual_layers=7)
    tight = placement.MARGIN + placed.vram_bytes
    assert place(architecture, sizes, tight, context=64, residual_layers=2).residual_layers == 2
    with pytest.raises(RuntimeFailure, match="are left"):
        place(architecture, sizes, tight, context=64, residual_layers=3)
