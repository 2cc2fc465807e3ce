#!/usr/bin/env python3
"""Experiments on the draft's codes: other grids, orders and corrections, on matrices of one layer, in torch.

    python bench/code_experiments.py CHECKPOINT --layers 15 --tokens 32768

Rounds the first rows of the matrices of layer `layers` - 1 towards the weights as they are, in every way below, and
prints relative errors: plain, and of the answers to tokens of held-out chats. The ways named `torch` share one plain
implementation of the quantizer's search (no second choice of groups), so that they compare with each other:

    shipped         twobit.quant.rounding, as `twobit quantize` uses it; once: without its second choice of groups
    descent         `shipped`, then coordinate descent over the codes, parameters fixed
    rank 8          `shipped`, and a correction of rank 8, best in the metric of the inputs, in fp16 (with its bits, of
                    the rows that were rounded), and once more around: codes of what the correction leaves
    torch           natural order, levels -3, -1, 1, 3
    order           columns in falling order of their energy, groups of 16 in that order
    hadamard        inputs rotated in blocks of 64
    levels L        levels -3, -L, L, 3; best: of five L the best of each row, in the metric of the inputs
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
from draft_experiments import matrices

from twobit.format import layout
from twobit.quant import pipeline
from twobit.quant.rounding import draft_weights, prepare, round_draft

GROUP = layout.COLS
LEVELS = (0.8, 0.9, 1.0, 1.1, 1.2)
RANK = 8
BLOCK = 64  # of the Hadamard rotation


def damped(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """The metric of the rounding, in units of the mean diagonal, fp64."""
    metric = hessian.double() / float(hessian.diagonal().double().mean())
    metric.diagonal().add_(damping)
    return metric


def search(weight: torch.Tensor, hessian: torch.Tensor, damping: float, level: float = 1.0) -> torch.Tensor:
    """GPTQ on levels a s (-3, -level, level, 3) + b m, s in 0..15 and m in -8..7 per group by trying all 256 with the
    feedback inside the group; a and b of a row from the spread and the middle of its groups. Returns fp32 weights."""
    cols = weight.shape[1]
    factor = prepare(hessian, damping)
    assert factor.factor is not None
    feedback = torch.from_numpy(factor.factor)[:cols, :cols]
    energy = torch.from_numpy(factor.energy)[:cols]
    groups = weight.unflatten(1, (-1, GROUP))
    high, low = groups.amax(2), groups.amin(2)
    # the largest group spread over s = 15, the largest middle over m = 8; clipped, as extremes are rare
    a = ((high - low) / 6).quantile(0.99, 1, keepdim=True) / 13
    b = ((high + low) / 2).abs().quantile(0.99, 1, keepdim=True) / 7
    s, m = torch.meshgrid(torch.arange(16.0), torch.arange(-8.0, 8.0), indexing="ij")
    step, centre = a * s.flatten(), b * m.flatten()  # [rows, 256]
    x, out = weight.clone(), torch.empty_like(weight)
    for first in range(0, cols, GROUP):
        here = slice(first, first + GROUP)
        inside, weights = feedback[here, here], energy[here]
        errors: list[torch.Tensor] = []  # [rows, 256] of each column
        values: list[torch.Tensor] = []
        cost = torch.zeros_like(step)
        for j in range(GROUP):
            want = x[:, first + j, None].repeat(1, step.shape[1])
            for i, error in enumerate(errors):
                want.add_(error, alpha=float(inside[i, j]))
            y = want - centre
            size = torch.where(y.abs() < step * (3 + level) / 2, step * level, step * 3)
            values.append(centre + torch.copysign(size, y))
            # what is fed on is the error of the weight itself, not of what it was rounded towards
            errors.append(weight[:, first + j, None] - values[j])
            cost += weights[j] * (want - values[j]).square()
        best = cost.argmin(1, keepdim=True)
        out[:, here] = torch.cat([v.gather(1, best) for v in values], 1)
        x[:, here.stop :] += (weight[:, here] - out[:, here]) @ feedback[here, here.stop :]
    return out


def best_levels(weight: torch.Tensor, hessian: torch.Tensor, damping: float) -> torch.Tensor:
    metric = damped(hessian, damping).float()
    found = torch.stack([search(weight, hessian, damping, level) for level in LEVELS])
    lost = torch.stack([((f - weight) @ metric * (f - weight)).sum(1) for f in found])
    return found[lost.argmin(0), torch.arange(len(weight))]


def ordered(weight: torch.Tensor, hessian: torch.Tensor, damping: float) -> torch.Tensor:
    order = hessian.diagonal().argsort(descending=True)
    out = torch.empty_like(weight)
    out[:, order] = search(weight[:, order].contiguous(), hessian[order][:, order].contiguous(), damping)
    return out


def rotated(weight: torch.Tensor, hessian: torch.Tensor, damping: float) -> torch.Tensor:
    turn = torch.ones(1, 1)
    while len(turn) < BLOCK:
        turn = torch.cat((torch.cat((turn, turn), 1), torch.cat((turn, -turn), 1))) / 2**0.5

    def by_columns(x: torch.Tensor) -> torch.Tensor:
        return (x.unflatten(1, (-1, BLOCK)) @ turn).flatten(1)

    return by_columns(search(by_columns(weight), by_columns(by_columns(hessian).T.contiguous()), damping))


def descended(draft: layout.Matrix, weight: torch.Tensor, hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """Coordinate descent over the codes, one column after the other, until a pass changes few."""
    metric = damped(hessian, damping).float()
    value = draft_weights(draft)
    scale = torch.from_numpy(draft.row_scale)[:, None]
    step = scale * torch.from_numpy(draft.row_a.astype("f4"))[:, None] * torch.from_numpy(draft.s.astype("f4"))
    centre = scale * torch.from_numpy(draft.row_b.astype("f4"))[:, None] * torch.from_numpy(draft.m.astype("f4"))
    slope = (weight - value) @ metric
    for _ in range(4):
        changed = 0
        for j in range(weight.shape[1]):
            s, c = step[:, j // GROUP], centre[:, j // GROUP]
            want = value[:, j] + slope[:, j] / metric[j, j]
            y = (want - c) / s.clamp_min(1e-30)
            new = c + s * (2 * ((y + 3) / 2).round().clamp(0, 3) - 3)
            move = new - value[:, j]
            changed += int((move != 0).sum())
            slope -= move[:, None] * metric[j]
            value[:, j] = new
        if changed < weight.numel() // 1000:
            break
    return value


def corrected(
    weight: torch.Tensor, hessian: torch.Tensor, damping: float, rounded: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Codes and a correction of rank RANK; then the codes of what the correction leaves, and its correction."""
    root = torch.linalg.cholesky(damped(hessian, damping))
    low, found = torch.zeros_like(weight), []
    for _ in range(2):
        codes = rounded(weight - low)
        lost = (weight - codes).double() @ root
        u, sizes, v = torch.linalg.svd(lost, full_matrices=False)
        right = torch.linalg.solve_triangular(root, v[:RANK], upper=False, left=False)
        low = ((u[:, :RANK] * sizes[:RANK]).half().float() @ right.half().float()).contiguous()
        found.append(codes + low)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    for name, weight, hessian, held in matrices(args.checkpoint, args.layers, args.tokens):
        rows, cols = weight.shape
        damping = pipeline.damping(cols, args.tokens)
        answers = held @ weight.T
        factor = prepare(hessian, damping)

        def show(
            way: str,
            value: torch.Tensor,
            note: str = "",
            w: torch.Tensor = weight,
            x: torch.Tensor = held,
            y: torch.Tensor = answers,
        ) -> None:
            plain = float((value - w).norm() / w.norm())
            print(f"  {way:<16} {plain:.4f} {float((x @ (value - w).T).norm() / y.norm()):.4f}{note}", flush=True)

        def codes(w: torch.Tensor, factor: object = factor) -> torch.Tensor:
            return draft_weights(round_draft(w, factor, threads=args.threads))  # type: ignore[arg-type]

        print(f"{name} [{rows}, {cols}], damping {damping:.2f}", flush=True)
        draft = round_draft(weight, factor, threads=args.threads)
        show("once", draft_weights(round_draft(weight, factor, threads=args.threads, refine=False)))
        show("shipped", draft_weights(draft))
        show("descent", descended(draft, weight, hessian, damping))
        bits = RANK * 16 * (rows + cols) / (rows * cols)
        for turn, value in enumerate(corrected(weight, hessian, damping, codes), 1):
            show(f"rank {RANK}, {turn}", value, f", {bits:.3f} bits more")
        show("torch", search(weight, hessian, damping))
        show("order", ordered(weight, hessian, damping))
        show("hadamard", rotated(weight, hessian, damping))
        for level in LEVELS:
            show(f"levels {level:g}", search(weight, hessian, damping, level))
        show("levels best", best_levels(weight, hessian, damping))


if __name__ == "__main__":
    main()
