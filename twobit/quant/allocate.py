"""Draft bits under a budget: which linears get 3-bit codes, by how much each one's rounding moves its layer's output.

Every linear in turn is replaced by a plain 2-bit rounding of itself, a few sequences go through its layer, and the
change of the layer's output, relative to the output, is what more bits would save. 3 bits go where they save most per
bit that they cost, until the budget is spent. What later layers make of the change is not followed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from twobit.architecture import Architecture, TensorSpec
from twobit.errors import CalibrationError, UsageError
from twobit.format import layout
from twobit.quant.recipe import Recipe, Rule

if TYPE_CHECKING:
    import torch

    from twobit.quant.source import Checkpoint

TOKENS = 1024  # that measure a layer, in whole sequences
_LEVEL = 0.9957  # step of the best 4 even levels for normal weights, in standard deviations (Max 1960)


def round_plainly(weight: torch.Tensor) -> torch.Tensor:
    """fp32 [rows, cols] at 4 even levels around the mean of every 16 columns: what 2-bit codes cost, near enough."""
    import torch.nn.functional as F

    cols = weight.shape[1]
    groups = F.pad(weight, (0, -cols % layout.COLS)).unflatten(1, (-1, layout.COLS))
    mean = groups.mean(-1, keepdim=True)
    step = _LEVEL * (groups - mean).square().mean(-1, keepdim=True).sqrt()
    level = ((groups - mean) / step.clamp_min(1e-30)).floor().clamp(-2, 1) + 0.5
    return (mean + step * level).flatten(1)[:, :cols]


def measure(
    checkpoint: Checkpoint,
    states: list[torch.Tensor],
    pool: ThreadPoolExecutor,
    device: str = "cpu",
    advance: Callable[[int], None] = lambda layers: None,
) -> dict[str, float]:
    """By module name of every linear: squared change of its layer's output over the output's square.

    states: inputs of the first layer, [n, hidden] fp32. The result does not depend on the threads of `pool`.
    """
    import torch

    from twobit.quant.decoder import Decoder

    decoder = Decoder(checkpoint.architecture)
    states = [state.to(device) for state in states]
    found: dict[str, float] = {}

    @torch.no_grad()
    def run(index: int, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        return [decoder.layer(index, state, weights) for state in states]

    def square(values: list[torch.Tensor]) -> float:
        return sum(float(value.square().sum(dtype=torch.float64)) for value in values)

    for layer in checkpoint.architecture.layers:
        specs = [s for s in checkpoint.architecture.tensors() if s.layer == layer.index]
        weights = {s.name: checkpoint.read(s).to(device) for s in specs}
        outputs = run(layer.index, weights)
        size = square(outputs)

        def moved(
            spec: TensorSpec,
            index: int = layer.index,
            weights: dict[str, torch.Tensor] = weights,
            outputs: list[torch.Tensor] = outputs,
        ) -> float:
            others = run(index, weights | {spec.name: round_plainly(weights[spec.name])})
            return square([a - b for a, b in zip(others, outputs, strict=True)])

        linears = [s for s in specs if s.role == "linear"]
        for spec, value in zip(linears, pool.map(moved, linears), strict=True):
            found[spec.module] = value / max(size, 1e-300)
        states = outputs
        advance(1)
    if not all(map(math.isfinite, found.values())):
        worst = next(name for name, value in found.items() if not math.isfinite(value))
        raise CalibrationError(f"{worst}: activations are not finite in fp32 while bits are allocated")
    return found


def draft_bits(architecture: Architecture, recipe: Recipe) -> tuple[float, dict[str, tuple[int, int]]]:
    """(draft bits of all linears without a budget, {linear that may get 3: (its weights, bits that it would add)}).

    Everything counted, as `twobit info` does. A rule that names a linear decides for it.
    """
    total, free = 0, {}
    for spec in (s for s in architecture.tensors() if s.role == "linear"):
        bits = recipe.bits(spec.module, spec.role)
        rows, cols = spec.shape
        two = _draft_size(rows, cols, bits.draft, bits.residual, bits.group)
        total += two
        if bits.draft == 2 and not any(rule.matches(spec.module) for rule in recipe.rules):
            free[spec.module] = (rows * cols, _draft_size(rows, cols, 3, bits.residual, bits.group) - two)
    return total, free


def check(architecture: Architecture, recipe: Recipe, budget: float) -> None:
    """UsageError where no choice of 3-bit linears comes near `budget` draft bits per weight."""
    total, free = draft_bits(architecture, recipe)
    weights = sum(math.prod(s.shape) for s in architecture.tensors() if s.role == "linear")
    low, high = total / weights, (total + sum(more for _, more in free.values())) / weights
    if not low <= budget <= high:
        raise UsageError(
            f"--draft-bpw {budget:g} is out of reach: with these rules the linears take {low:.3f} to {high:.3f} bits",
            "give a number between them; --rule gives single matrices 4 bits",
        )


def choose(architecture: Architecture, recipe: Recipe, budget: float, sensitivity: Mapping[str, float]) -> Recipe:
    """The recipe with rules for the linears that get 3-bit codes, put before its own."""
    total, free = draft_bits(architecture, recipe)
    weights = sum(math.prod(s.shape) for s in architecture.tensors() if s.role == "linear")
    left = budget * weights - total
    chosen = []
    for name in sorted(free, key=lambda name: (-sensitivity[name] / free[name][1], name)):
        if free[name][1] <= left:
            left -= free[name][1]
            chosen.append(name)
    order = {spec.module: i for i, spec in enumerate(architecture.tensors())}
    rules = [Rule(name, 3, recipe.bits(name, "linear").residual) for name in sorted(chosen, key=order.__getitem__)]
    return replace(recipe, rules=(*rules, *recipe.rules))


def _draft_size(rows: int, cols: int, draft: int, residual: int, group: int) -> int:
    sizes = layout.plane_sizes(rows, cols, draft, residual, group)
    return 8 * sum(sizes[name] for name in layout.DRAFT_PLANES)
