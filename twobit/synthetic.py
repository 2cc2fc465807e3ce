"""Packed matrices of random bits: for measuring speed where the text does not matter."""

from __future__ import annotations

import numpy as np

from twobit.format import layout
from twobit.format.manifest import TensorEntry


def matrix_planes(entry: TensorEntry, rng: np.random.Generator) -> dict[str, layout.U8]:
    """Planes of a matrix, by name. Every bit of the codes is random; q takes about two thirds of its range, which the
    rows' scales bring to a square mean of 1 / columns: activations stay where a trained model has them."""
    rows, cols, draft_bits, residual_bits, group = entry.layout_args
    planes = {
        name: rng.integers(0, 256, size, dtype=np.uint8)
        for name, size in layout.plane_sizes(rows, cols, draft_bits, residual_bits, group).items()
    }
    kind = layout.KINDS[draft_bits, residual_bits]
    limit = layout.Q_WIDE if kind.wide else layout.Q_NARROW
    left = limit - 15 * (1 << (residual_bits - 1))
    a = min((2 * left // 3) // (15 * ((1 << draft_bits) - 1)) >> kind.shift, layout.MAX_A) << kind.shift
    scale = np.zeros(planes["row_scale"].size // 4, np.float32)
    scale[:rows] = 2.0 / limit / np.sqrt(cols)
    planes["row_scale"] = scale.view(np.uint8)
    used = np.arange(planes["row_a"].size) < rows
    planes["row_a"] = np.where(used, a, 0).astype(np.uint8)
    planes["row_b"] = np.where(used, left // 24, 0).astype(np.uint8)
    return planes
