"""What of a model lies in which memory of a hybrid run, from headers alone. Runtime and `twobit plan` both ask here.

The GPU's memory holds the 2-bit shard with its head, norms and biases, the cache, and what a pass works in; what is
left is filled with the residual of whole layers, from the first on, and last with the head's. The rest of the residual
and the input embedding stay in RAM. Where not even the first part fits, there is no hybrid run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from twobit.architecture import Architecture
from twobit.errors import RuntimeFailure, UsageError
from twobit.format import layout
from twobit.format.manifest import DRAFT, TensorEntry

CHUNK = 512  # tokens that a pass takes at most, as TB_CHUNK_MAX
MAX_DRAFT = 63  # proposed tokens of a step, as TB_MAX_DRAFT
AHEAD = 2 * (MAX_DRAFT + 1)  # scratch slots: a block that is verified, and the one drafted behind it meanwhile
SLACK = CHUNK + AHEAD  # slots that a ring has beside its window
MARGIN = 256 << 20  # bytes of VRAM that stay free: allocations round up, and a desktop wants some now and then


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parts.

    draft, residual: of every layer's matrices; the two of the head; small: norms and biases in fp32; embedding: an
    input embedding of its own, 0 where the head serves; group: the largest residual of what is multiplied at once
    (q, k and v; gate and up; a single matrix).
    """

    draft: tuple[int, ...]
    residual: tuple[int, ...]
    head_draft: int
    head_residual: int
    small: int
    embedding: int
    group: int

    @classmethod
    def of(cls, architecture: Architecture, tensors: Mapping[str, TensorEntry]) -> Sizes:
        """`tensors`: the manifest's, by name."""
        draft, residual = [0] * len(architecture.layers), [0] * len(architecture.layers)
        groups: dict[tuple[int, str], int] = {}
        head_draft = head_residual = small = embedding = 0
        for spec in architecture.tensors():
            if spec.role == "embedding":
                if not architecture.tied:
                    embedding = sum(s.bytes for s in tensors[spec.module].stored("").values())
            elif spec.role in ("linear", "head"):
                stored = tensors[spec.module].stored("").values()
                low = sum(s.bytes for s in stored if s.part == DRAFT)
                high = sum(s.bytes for s in stored) - low
                if spec.layer is None:
                    head_draft, head_residual = low, high
                    continue
                draft[spec.layer] += low
                residual[spec.layer] += high
                together = {"k": "q", "v": "q", "up": "gate"}.get(spec.part, spec.part)
                groups[spec.layer, together] = groups.get((spec.layer, together), 0) + high
            else:
                small += 4 * math.prod(spec.shape)
        largest = max((head_residual, *groups.values()))
        return cls(tuple(draft), tuple(residual), head_draft, head_residual, small, embedding, largest)


@dataclass(frozen=True)
class Placement:
    """Where things lie. The residual of layers 0 .. residual_layers - 1 is in VRAM, the head's if residual_head.

    vram: bytes by what they are for (draft, small, cache, work, residual); ram: bytes of weights that RAM holds.
    missing: bytes of VRAM that a hybrid run lacks; where it is not 0 nothing goes there.
    """

    residual_layers: int
    residual_head: bool
    vram: Mapping[str, int]
    ram: int
    missing: int = 0

    @property
    def hybrid(self) -> bool:
        """Whether the GPU takes part."""
        return self.missing == 0

    @property
    def vram_bytes(self) -> int:
        return sum(self.vram.values())


def cache_bytes(architecture: Architecture, context: int) -> int:
    """Keys and values in fp16 of `context` positions and of the scratch slots; a layer with a window keeps a ring."""
    most = _round8(context + AHEAD)
    total = 0
    for layer in architecture.layers:
        slots = most if layer.window is None else min(most, _round8(layer.window + SLACK))
        total += 2 * 2 * slots * layer.n_kv_heads * layer.head_dim
    return total


def work_bytes(architecture: Architecture, sizes: Sizes, *, tokens: int = CHUNK, stream: bool = True) -> int:
    """What passes of up to `tokens` tokens work in: activations, logits of a step, and with `stream` two buffers
    through which the residual of long prompts goes."""
    hidden = architecture.hidden
    q = max(layer.n_heads * layer.head_dim for layer in architecture.layers)
    kv = max(layer.n_kv_heads * layer.head_dim for layer in architecture.layers)
    inter = max(layer.intermediate for layer in architecture.layers)
    # fp32: stream, normed input and product; q, k, v and attention; gate and up; then rounded inputs, int16
    per_token = 4 * (3 * hidden + 2 * q + 2 * kv + 2 * inter) + 2 * max(hidden, q, inter)
    logits = 4 * (MAX_DRAFT + 1) * architecture.vocab
    return tokens * per_token + logits + (2 * layout.padded(sizes.group) if stream else 0)


def place(
    architecture: Architecture,
    sizes: Sizes,
    vram: int,
    *,
    context: int,
    work: int | None = None,
    margin: int = MARGIN,
    residual_layers: int | None = None,
) -> Placement:
    """The placement for `vram` bytes of free GPU memory, `margin` of which stay free.

    work: bytes that passes work in, where the caller knows them better than `work_bytes`. residual_layers: so many
    layers have their residual in VRAM, None for as many as fit. UsageError where the model has fewer layers,
    RuntimeFailure where so many do not fit.
    """
    if residual_layers is not None and not 0 <= residual_layers <= len(sizes.residual):
        raise UsageError(
            f"--gpu-residual-layers {residual_layers} is not possible: this model has {len(sizes.residual)} layers"
        )
    used = {
        "draft": sum(sizes.draft) + sizes.head_draft,
        "small": sizes.small,
        "cache": cache_bytes(architecture, context),
        "work": work_bytes(architecture, sizes) if work is None else work,
    }
    # the embedding's rows are read in RAM; where it is the head's, so are both of its parts
    rows = sizes.head_draft + sizes.head_residual if architecture.tied else sizes.embedding
    left = vram - margin - sum(used.values())
    if left < 0:
        everything = sum(sizes.draft) + sum(sizes.residual) + sizes.small + sizes.embedding
        return Placement(0, False, {}, everything + sizes.head_draft + sizes.head_residual, -left)
    count = held = 0
    for size in sizes.residual[:residual_layers]:
        if held + size > left:
            break
        held += size
        count += 1
    if residual_layers is not None and count < residual_layers:
        need = sum(sizes.residual[:residual_layers])
        raise RuntimeFailure(
            f"--gpu-residual-layers {residual_layers}: they take {need:,} bytes of VRAM, {left:,} are left",
            f"{count} layers fit; a smaller --ctx leaves more",
        )
    head = residual_layers is None and count == len(sizes.residual) and held + sizes.head_residual <= left
    if head:
        held += sizes.head_residual
    ram = rows + sum(sizes.residual[count:])
    if not head and not architecture.tied:
        ram += sizes.head_residual
    return Placement(count, head, used | {"residual": held}, ram)


def _round8(n: int) -> int:
    return (n + 7) // 8 * 8
