"""The variants of a model that `twobit eval` compares: their weights, a layer or a block of rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F

from twobit.acceptance import Sample
from twobit.architecture import Architecture, TensorSpec
from twobit.errors import CheckpointError
from twobit.format import layout
from twobit.format.reader import PackedModel
from twobit.progress import Progress
from twobit.quant.decoder import Decoder
from twobit.quant.source import Checkpoint

BASELINES = ("q8_0", "q4_0")
_BLOCK = 32  # weights per scale of q8_0 and q4_0
CHUNK_WEIGHTS = 1 << 22  # weights rounded at a time


# -- llama.cpp's roundings ----------------------------------------------------------------------------------


def q8_0(x: torch.Tensor) -> torch.Tensor:
    """fp32 [..., cols] as ggml's Q8_0 gives it back: blocks of 32, scale fp16(amax / 127), 8-bit integers.

    Where cols is no multiple of 32 the last block is shorter (llama.cpp would keep such a matrix in fp16).
    """
    blocks, cols = _blocks(x)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    steps = blocks * _inverse(scale)
    size = steps.abs()
    whole = size.floor()
    codes = (whole + (2 * (size - whole)).floor()).copysign(steps)  # halves away from zero, as roundf
    return (codes * scale.half().float()).flatten(-2)[..., :cols]


def q4_0(x: torch.Tensor) -> torch.Tensor:
    """fp32 [..., cols] as ggml's Q4_0 gives it back: the largest magnitude of 32 becomes -8 of 16 steps."""
    blocks, cols = _blocks(x)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    codes = (blocks * _inverse(scale) + 8.5).trunc().clamp(0, 15) - 8
    return (codes * scale.half().float()).flatten(-2)[..., :cols]


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, 0 where fp16 has no such scale: the block is zero then, and 1 / scale might be infinite."""
    return torch.where(scale.half() == 0, 0.0, 1 / scale)


def _blocks(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    cols = x.shape[-1]
    return F.pad(x, (0, -cols % _BLOCK)).unflatten(-1, (-1, _BLOCK)), cols


ROUND: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"q8_0": q8_0, "q4_0": q4_0}


def rounded(weight: torch.Tensor, name: str) -> torch.Tensor:
    """A matrix through a baseline's rounding, some rows at a time."""
    step = max(1, CHUNK_WEIGHTS // weight.shape[1])
    out = torch.empty_like(weight)
    for first in range(0, len(weight), step):
        out[first : first + step] = ROUND[name](weight[first : first + step])
    return out


class _Int8Decoder(Decoder):
    """Rounds the input of every linear as ggml's CPU path does for Q8_0 and Q4_0 weights: to Q8_0."""

    def round(self, x: torch.Tensor, module: str) -> torch.Tensor:
        return q8_0(x)


# -- weights of all variants, a layer or a block of rows at a time ------------------------------------------

Weights = dict[str, torch.Tensor]


class Variants:
    """What the variants' decoders need, read and made when it is needed. `names`: reference first.

    pool: works on sequences and chunks, torch computing on one thread in each worker (its own threads wait for each
    other, which is slow on a machine that has other work).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        packed: PackedModel,
        baselines: Sequence[str],
        pool: ThreadPoolExecutor | None = None,
    ) -> None:
        self._pool = pool
        self.architecture: Architecture = checkpoint.architecture
        self._checkpoint = checkpoint
        self._packed = packed
        self._baselines = baselines
        self.names = ["reference", "full", "draft", *(n for b in baselines for n in (b, f"{b}_int8")), "floor"]
        plain = Decoder(self.architecture)
        self.decoders = {n: _Int8Decoder(self.architecture) if n.endswith("_int8") else plain for n in self.names}
        self._layers: list[list[TensorSpec]] = [[] for _ in self.architecture.layers]
        for spec in checkpoint.tensors:
            if spec.layer is not None:
                self._layers[spec.layer].append(spec)
        by_part = {spec.part: spec for spec in checkpoint.tensors if spec.layer is None}
        self._embedding, self._norm = by_part["embedding"], by_part["final_norm"]
        self._head = by_part.get("head", self._embedding)
        sizes = {self.architecture.hidden, *(layer.intermediate for layer in self.architecture.layers)}
        generator = torch.Generator().manual_seed(0)
        self._order = {size: torch.randperm(size, generator=generator) for size in sorted(sizes)}
        self._hidden = self._order[self.architecture.hidden]

    def each(self, function: Callable[[int], None], count: int) -> None:
        """function(0) ... function(count - 1), at the same time where there is a pool."""
        list((map if self._pool is None else self._pool.map)(function, range(count)))

    def layer(self, index: int, wanted: Sequence[str]) -> Iterator[tuple[str, Weights]]:
        """(variant, weights of layer `index`) for each of `wanted`, in an order that reads everything once."""
        specs = self._layers[index]
        linear = [spec for spec in specs if spec.role == "linear"]
        if any(name not in ("full", "draft") for name in wanted):
            own = {spec.name: self._checkpoint.read(spec) for spec in specs}
            if "reference" in wanted:
                yield "reference", own
            if "floor" in wanted:
                order = self._order[self.architecture.layers[index].intermediate]
                yield "floor", {spec.name: self._permuted(spec, own[spec.name], order) for spec in specs}
            for baseline in self._baselines:
                names = [name for name in (baseline, f"{baseline}_int8") if name in wanted]
                if names:
                    made = own | {spec.name: rounded(own[spec.name], baseline) for spec in linear}
                    yield from ((name, made) for name in names)
            del own
        if "full" in wanted or "draft" in wanted:
            rest = {
                spec.name: torch.from_numpy(self._packed.tensor(spec.name)) for spec in specs if spec.role != "linear"
            }
            draft, full = dict(rest), dict(rest)
            for spec in linear:
                two, whole = layout.dequantize(self._packed.matrix(spec.module))
                draft[spec.name], full[spec.name] = torch.from_numpy(two), torch.from_numpy(whole)
            if "full" in wanted:
                yield "full", full
            del full
            if "draft" in wanted:
                yield "draft", draft

    def head(self, rows: tuple[int, int], wanted: Sequence[str]) -> Iterator[tuple[str, Weights]]:
        """(variant, final norm and rows of the head)."""

        def made(head: torch.Tensor, norm: torch.Tensor) -> Weights:
            return {"lm_head.weight": head, "model.norm.weight": norm}

        if any(name not in ("full", "draft") for name in wanted):
            own, norm = self._checkpoint.read(self._head, rows), self._checkpoint.read(self._norm)
            if "reference" in wanted:
                yield "reference", made(own, norm)
            if "floor" in wanted:
                yield "floor", made(own[:, self._hidden], norm[self._hidden])
            for baseline in self._baselines:
                names = [name for name in (baseline, f"{baseline}_int8") if name in wanted]
                if names:
                    weights = made(rounded(own, baseline), norm)
                    yield from ((name, weights) for name in names)
        if "full" in wanted or "draft" in wanted:
            draft, full = layout.dequantize(self._packed.matrix("lm_head", rows))
            norm = torch.from_numpy(self._packed.tensor("model.norm.weight"))
            if "full" in wanted:
                yield "full", made(torch.from_numpy(full), norm)
            if "draft" in wanted:
                yield "draft", made(torch.from_numpy(draft), norm)

    def embed(self, sequences: Sequence[Sequence[int]], wanted: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        """First hidden states [n, hidden] of every sequence for each variant; only the rows in use are read."""
        used = torch.tensor(sorted({i for sequence in sequences for i in sequence}))
        place = torch.zeros(self.architecture.vocab, dtype=torch.long)
        place[used] = torch.arange(len(used))
        own = self._rows(used, lambda rows: self._checkpoint.read(self._embedding, rows))
        states = {}
        for name in wanted:
            if name in ("full", "draft"):
                table = self._packed_rows(used)
            elif name == "floor":
                table = own[:, self._hidden]
            elif name == "reference":
                table = own
            else:
                table = rounded(own, name.removesuffix("_int8"))
            weights = {"model.embed_tokens.weight": table}
            states[name] = [self.decoders[name].embed(place[torch.tensor(s)], weights) for s in sequences]
        return states

    def _packed_rows(self, used: torch.Tensor) -> torch.Tensor:
        if self.architecture.tied:
            packed = self._packed
            return self._rows(used, lambda r: torch.from_numpy(layout.dequantize(packed.matrix("lm_head", r))[1]))
        codes, scales = self._packed.embedding("model.embed_tokens")
        spread = np.repeat(scales[used].astype(np.float32), layout.EMBEDDING_GROUP, axis=1)
        return torch.from_numpy(spread[:, : codes.shape[1]] * codes[used])

    def _rows(self, used: torch.Tensor, read: Callable[[tuple[int, int]], torch.Tensor]) -> torch.Tensor:
        """Rows `used` (ascending) of a table that is read some rows at a time."""
        rows = self.architecture.vocab
        step = max(16, CHUNK_WEIGHTS // self.architecture.hidden // 16 * 16)
        parts = []
        for first in range(0, rows, step):
            inside = used[(used >= first) & (used < first + step)]
            if len(inside):
                parts.append(read((first, min(first + step, rows)))[inside - first])
        return torch.cat(parts)

    def _permuted(self, spec: TensorSpec, value: torch.Tensor, intermediate: torch.Tensor) -> torch.Tensor:
        """The tensor for permuted hidden and intermediate dimensions; heads keep their order."""
        if spec.part in ("o", "down") or (spec.part.endswith("norm") and spec.part not in ("q_norm", "k_norm")):
            value = value[self._hidden]
        elif spec.part in ("gate", "up"):
            value = value[intermediate]
        if spec.role == "linear" and spec.part != "o":
            value = value[:, intermediate if spec.part == "down" else self._hidden]
        return value


def last_states(
    variants: Variants, samples: Sequence[Sample], wanted: Sequence[str], progress: Progress
) -> dict[str, torch.Tensor]:
    """Last hidden states [predicted tokens, hidden] of every variant, in the order of the samples.

    `progress` advances by tokens times variants and layers. CheckpointError names a layer that overflows.
    """
    states = variants.embed([s.inputs for s in samples], wanted)
    for index in range(len(variants.architecture.layers)):
        for name, weights in variants.layer(index, wanted):

            def through(i: int, index: int = index, name: str = name, weights: Weights = weights) -> None:
                state = variants.decoders[name].layer(index, states[name][i], weights)
                if not math.isfinite(float(state.square().sum(dtype=torch.float64))):
                    raise CheckpointError(f"{name}: the output of layer {index} is not finite in fp32")
                states[name][i] = state
                progress.advance(len(state))

            variants.each(through, len(samples))
            del weights, through  # before the next variant's are made
    return {name: torch.cat([x[s.positions] for s, x in zip(samples, states[name], strict=True)]) for name in wanted}
