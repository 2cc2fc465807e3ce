"""Distillation of the draft's scales, for `draft_experiments.py distill`: one factor for each row of a linear,
trained on KL(reference || draft) of the whole model, the draft attending to the reference's keys and values in blocks.

The codes stay as they are, and the factor goes into the row's step U, which is fp32: nothing is rounded again but the
residual. A step takes a few sequences through all layers and back, a layer at a time; inside a layer everything is
computed once more on the way back. Both heads are the true one. Sequences are the tasks of the pool, and their
gradients are added in order: the result does not depend on the number of threads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from twobit.architecture import Architecture
from twobit.errors import CalibrationError
from twobit.quant.decoder import Cache, Decoder
from twobit.quant.rounding import Rounded, draft_weights
from twobit.quant.tune import BLOCK, drafting

if TYPE_CHECKING:
    from twobit.quant.source import Checkpoint

STEP_TOKENS = 1024  # at least, in whole sequences
RATE = 0.003  # Adam's, at its height
DECAY = (0.9, 0.95)  # of Adam's two means
WARM = 2  # steps until the rate is at its height
LEAST = 0.1  # of the rate, at the end
LOGITS = 64  # tokens whose logits are in memory at once, per thread

Drafts = Callable[[int], Mapping[str, Rounded]]
"""Layer -> {tensor name: its draft} of the linears."""


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of sequences for every step: each sequence once, in an order of chance that is always the same."""
    order = list(range(len(lengths)))
    random.Random(0).shuffle(order)
    found: list[list[int]] = [[]]
    for i in order:
        if sum(lengths[j] for j in found[-1]) >= STEP_TOKENS:
            found.append([])
        found[-1].append(i)
    return found


def rows(architecture: Architecture) -> int:
    """Rows of all linears: what is trained."""
    return sum(spec.shape[0] for spec in architecture.tensors() if spec.role == "linear")


class Distillation:
    """The factors while they are trained, with Adam's means: `state`, fp32 [3, rows]; row 0: factor - 1.

    inputs: of the first layer, fp32 [n, hidden] of every sequence; drafts: as they were rounded; advance: told the
    tokens that passed a layer, once forward and twice back.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        inputs: Callable[[int], torch.Tensor],
        lengths: Sequence[int],
        drafts: Drafts,
        pool: ThreadPoolExecutor,
        device: str = "cpu",
        advance: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self._checkpoint, self._inputs, self._drafts, self._pool = checkpoint, inputs, drafts, pool
        self._device, self._advance = device, advance
        self.architecture = checkpoint.architecture
        self._decoder = Decoder(self.architecture)
        self.batches = batches(lengths)
        self.state = torch.zeros(3, rows(self.architecture))
        self._place: dict[str, slice] = {}
        at = 0
        for spec in self.architecture.tensors():
            if spec.role == "linear":
                self._place[spec.name] = slice(at, at + spec.shape[0])
                at += spec.shape[0]
        (norm,) = (s for s in self.architecture.tensors() if s.part == "final_norm")
        (head,) = (s for s in self.architecture.tensors() if s.role == "head")
        self._head = {s.name: checkpoint.read(s).to(device) for s in (norm, head)}

    def factors(self, name: str) -> torch.Tensor:
        """fp32 [rows] of the linear `name`."""
        return 1 + self.state[0, self._place[name]]

    def drafts(self, index: int) -> dict[str, Rounded]:
        """The linears of a layer, with their rows' steps times the factors."""
        return {
            name: replace(draft, row_scale=draft.row_scale * self.factors(name).numpy())
            for name, draft in self._drafts(index).items()
        }

    def step(self, turn: int) -> float:
        """Step `turn`, counted from 0; returns the mean KL of its tokens before it. CalibrationError: not finite."""
        batch = self.batches[turn]
        firsts = [(i + turn) % BLOCK for i in batch]
        draft = [self._inputs(i).to(self._device) for i in batch]
        reference, tokens = draft, sum(map(len, draft))
        kept: list[list[torch.Tensor]] = []  # of every layer: the draft's input of every sequence
        caches = [Cache() for _ in batch]
        for layer in self.architecture.layers:
            weights = self._weights(layer.index, linears=True)
            theirs = weights | {name: w * f[:, None] for name, w, f in self._tuned(layer.index)}
            kept.append(draft)

            def forward(
                j: int,
                index: int = layer.index,
                weights: Mapping[str, torch.Tensor] = weights,
                theirs: Mapping[str, torch.Tensor] = theirs,
                reference: Sequence[torch.Tensor] = reference,
                draft: Sequence[torch.Tensor] = draft,
            ) -> tuple[torch.Tensor, torch.Tensor]:
                with torch.no_grad():
                    x = self._decoder.layer(index, reference[j], weights, caches[j])
                    attend = drafting(*caches[j].of(index), first=firsts[j])
                    return x, self._decoder.layer(index, draft[j], theirs, attend=attend)

            found = list(self._pool.map(forward, range(len(batch))))
            reference, draft = [x for x, _ in found], [x for _, x in found]
            self._advance(tokens)
        ends = list(self._pool.map(self._divergence, reference, draft))
        loss = sum(value for value, _ in ends) / tokens
        if not math.isfinite(loss):
            raise CalibrationError(f"the draft's divergence is not finite in step {turn + 1} of its tuning")
        slopes = [slope / tokens for _, slope in ends]
        gradient = torch.zeros(self.state.shape[1])
        for layer in reversed(self.architecture.layers):
            weights = self._weights(layer.index, linears=False)
            tuned = list(self._tuned(layer.index))

            def backward(
                j: int,
                index: int = layer.index,
                weights: Mapping[str, torch.Tensor] = weights,
                tuned: Sequence[tuple[str, torch.Tensor, torch.Tensor]] = tuned,
                slopes: Sequence[torch.Tensor] = slopes,
            ) -> tuple[torch.Tensor, ...]:
                attend = drafting(*caches[j].of(index), first=firsts[j])
                with torch.enable_grad():
                    x = kept[index][j].detach().requires_grad_()
                    leaves = [f.clone().requires_grad_() for _, _, f in tuned]
                    theirs = {name: w * f[:, None] for (name, w, _), f in zip(tuned, leaves, strict=True)}
                    y = self._decoder.layer(index, x, {**weights, **theirs}, attend=attend)
                return torch.autograd.grad(y, (x, *leaves), slopes[j])

            parts = list(self._pool.map(backward, range(len(batch))))
            slopes = [part[0] for part in parts]
            for j, (name, _, _) in enumerate(tuned):
                for part in parts:
                    gradient[self._place[name]] += part[1 + j].cpu()
            self._advance(2 * tokens)
        self._adam(gradient, turn)
        return loss

    def _weights(self, index: int, linears: bool) -> dict[str, torch.Tensor]:
        specs = [s for s in self.architecture.tensors() if s.layer == index and (linears or s.role != "linear")]
        return {s.name: self._checkpoint.read(s).to(self._device) for s in specs}

    def _tuned(self, index: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, draft's weights without their factors, and factors of a layer's linears."""
        for name, draft in self._drafts(index).items():
            yield name, draft_weights(draft).to(self._device), self.factors(name).to(self._device)

    def _divergence(self, reference: torch.Tensor, draft: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Sum of KL(reference || draft) over a sequence's tokens, and its gradient to the draft's last states."""
        total, slopes = 0.0, []
        for theirs, mine in zip(reference.split(LOGITS), draft.split(LOGITS), strict=True):
            with torch.no_grad():
                exact = self._decoder.head(theirs, self._head).log_softmax(-1)
            with torch.enable_grad():
                x = mine.detach().requires_grad_()
                loss = torch.nn.functional.kl_div(
                    self._decoder.head(x, self._head).log_softmax(-1), exact, reduction="sum", log_target=True
                )
            slopes += torch.autograd.grad(loss, x)
            total += float(loss.detach())
        return total, torch.cat(slopes)

    def _adam(self, gradient: torch.Tensor, turn: int) -> None:
        value, mean, square = self.state
        rate = RATE * min(1.0, (turn + 1) / WARM)
        rate *= LEAST + (1 - LEAST) * (1 + math.cos(math.pi * turn / len(self.batches))) / 2
        mean.mul_(DECAY[0]).add_(gradient, alpha=1 - DECAY[0])
        square.mul_(DECAY[1]).addcmul_(gradient, gradient, value=1 - DECAY[1])
        size = (square / (1 - DECAY[1] ** (turn + 1))).sqrt_().add_(1e-12)
        value.addcdiv_(mean / (1 - DECAY[0] ** (turn + 1)), size, value=-rate)
