"""Predicted speed: bytes over bandwidths, multiplications over peaks. Nothing here is measured but what is said to be.

Seconds of one pass over M tokens:

    CPU    (reading^4 + multiplying^4)^(1/4), which is nearly the larger of bytes / read and (M + U) weights / multiply;
           U: what unpacking a weight costs, in multiplications; without a GPU a fixed time per layer, too
    GPU    bytes / read, whatever M: a block is far below its multiply peak; and a fixed time per layer
    bus    (inputs + outputs) * M / bus, and a fixed time per product that both take part in

read and multiply are what kernels get out of a device, not what it could: see SHARE_*. In a product that both take part
in, the slower of CPU and GPU counts. A step drafts k tokens, one pass of the 2-bit part each, and verifies k + 1 at
once; where each is accepted with chance a it yields (1 - a^(k+1)) / (1 - a) tokens, and k is the one that pays most.

With a GPU the draft goes on while the CPU multiplies, behind the last token and behind BRANCHES - 1 second choices.
Where the text goes on at one of these, with chance `prepared`, the next step spares the passes that it needs no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from twobit.architecture import Architecture
from twobit.format.manifest import TensorEntry
from twobit.runtime.placement import MARGIN, MAX_DRAFT, Placement, Sizes, cache_bytes, place

# Fitted to `twobit bench --kernels` (docs/cpu.md) and to whole steps on the same machine.
SHARE_READ = 0.85  # of the CPU's read bandwidth
SHARE_MULTIPLY = 0.65  # of its multiply peak
SHARE_DRAFT = 0.73  # the same of products with the 2-bit part alone, of the peak of full ones
UNPACK, UNPACK_DRAFT = 2.5, 0.6  # multiplications per weight
CPU_LAYER_S = 100e-6  # per layer and pass without a GPU: norms, attention, waiting for threads
SHARE_GPU = 0.85  # of the GPU's bandwidth: an aim, not measured
CORE_GMACS = 110.0  # GMAC/s of a core: AVX2, 25 per cycle at 4.4 GHz
LAYER_S = 20e-6  # of a GPU per layer and pass: ten kernels are started
PRODUCT_S = 20e-6  # per product of both: two copies are started and waited for
BRANCHES = 8  # nodes of a draft pass that goes on in a verification, as TB_LEVEL
SECOND = 0.5  # chance that a token is the draft's second choice where it is not the first: bench/second_choice.py
DRIVER = 600 << 20  # bytes of VRAM that driver and screen take
POSITIONS = 512  # of context that a step attends to
RAM_KEPT = 2 << 30  # bytes of RAM for everything else
Q8_0 = 8.5 / 8  # bytes per weight
ACCEPTANCE = 0.8  # chance that a drafted token is accepted, where nothing was measured


@dataclass(frozen=True)
class Hardware:
    """Memories in bytes, bandwidths in GB/s, multiply peak in GMAC/s of all cores together; vram 0: no GPU.

    sources: where each value comes from, "given", "measured" or "assumed".
    """

    ram: int
    ram_gbs: float
    gmacs: float
    vram: int = 0
    vram_gbs: float = 0.0
    bus_gbs: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cpu:
    """What kernels get out of the processor: bytes per second, multiplications per second of full and of 2-bit
    products."""

    read: float
    multiply: float
    draft: float

    @classmethod
    def of(cls, hardware: Hardware) -> Cpu:
        peak = hardware.gmacs * 1e9
        return cls(SHARE_READ * hardware.ram_gbs * 1e9, SHARE_MULTIPLY * peak, SHARE_DRAFT * peak)

    @classmethod
    def measured(cls, size: float, weights: float, plain_s: float, per_token_s: float) -> Cpu:
        """From the seconds of a pass over one token, and of each token more."""
        multiplying = min((1 + UNPACK) * per_token_s, 0.9 * plain_s)
        reading = (plain_s**4 - multiplying**4) ** 0.25
        multiply = weights / per_token_s
        return cls(size / reading, multiply, SHARE_DRAFT / SHARE_MULTIPLY * multiply)

    def seconds(self, size: float, weights: float, m: int, unpack: float = UNPACK) -> float:
        """A pass of m tokens over `weights` weights in `size` bytes."""
        return _both(size / self.read, (m + unpack) * weights / self.multiply)

    def draft_seconds(self, size: float, weights: float) -> float:
        """A pass of one token over the 2-bit part."""
        return _both(size / self.read, (1 + UNPACK_DRAFT) * weights / self.draft)


def _both(reading: float, multiplying: float) -> float:
    return float((reading**4 + multiplying**4) ** 0.25)


@dataclass(frozen=True)
class Speed:
    """Tokens per second, plain and with drafts of `depth` tokens, that yield `tokens_per_step` at the acceptance.
    overlapped: draft passes that go on in a verification."""

    plain: float
    drafted: float
    depth: int
    tokens_per_step: float
    draft_s: float
    verify_s: float
    overlapped: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """What `twobit plan` says. llama: tokens per second of llama.cpp's Q8_0, plain, with as much in VRAM as fits."""

    fits: bool
    placement: Placement
    step_bytes: Mapping[str, int]
    speed: Speed
    q8_bytes: int
    q8_fits_vram: bool
    llama: float | None
    advice: str
    assumptions: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "fits": self.fits,
            "placement": {
                "vram_bytes": self.placement.vram_bytes,
                "ram_bytes": self.placement.ram,
                "gpu_residual_layers": self.placement.residual_layers,
                "gpu_residual_head": self.placement.residual_head,
                "vram_by_use": dict(self.placement.vram),
                "vram_missing_bytes": self.placement.missing,
            },
            "bytes_per_step": dict(self.step_bytes),
            "tokens_per_s": {"plain": self.speed.plain, "drafted": self.speed.drafted},
            "draft": {
                "depth": self.speed.depth,
                "tokens_per_step": self.speed.tokens_per_step,
                "draft_s": self.speed.draft_s,
                "verify_s": self.speed.verify_s,
                "overlapped_passes": self.speed.overlapped,
            },
            "llama_cpp_q8_0": {
                "bytes": self.q8_bytes,
                "fits_vram": self.q8_fits_vram,
                "tokens_per_s": self.llama,
            },
            "advice": self.advice,
            "predicted": True,
            "assumptions": dict(self.assumptions),
        }


class Shape:
    """Counts of one model: weights and bytes, by layer."""

    def __init__(self, architecture: Architecture, tensors: Mapping[str, TensorEntry], context: int) -> None:
        self.architecture, self.context = architecture, min(context, architecture.max_context)
        self.sizes = Sizes.of(architecture, tensors)
        self.weights = [0] * len(architecture.layers)
        self.crossing = [0] * len(architecture.layers)
        for spec in architecture.tensors():
            if spec.role == "linear" and spec.layer is not None:
                self.weights[spec.layer] += math.prod(spec.shape)
                # products come back as fp32; inputs go out as int16, those of q, k, v and of gate, up once
                self.crossing[spec.layer] += 4 * spec.shape[0]
                self.crossing[spec.layer] += 2 * spec.shape[1] if spec.part in ("q", "o", "gate", "down") else 0
        self.head = architecture.vocab * architecture.hidden
        self.head_crossing = 4 * architecture.vocab + 2 * architecture.hidden
        self.cache = cache_bytes(architecture, self.context)
        self.read_cache = min(self.cache, cache_bytes(architecture, POSITIONS))

    @property
    def draft_bytes(self) -> int:
        return sum(self.sizes.draft) + self.sizes.head_draft

    @property
    def residual_bytes(self) -> int:
        return sum(self.sizes.residual) + self.sizes.head_residual

    @property
    def matrix_weights(self) -> int:
        return sum(self.weights) + self.head


def tokens_per_step(acceptance: float, depth: int) -> float:
    """Expected tokens of a step that drafts a chain of `depth`, its own token included."""
    return float(depth + 1) if acceptance >= 1 else (1 - acceptance ** (depth + 1)) / (1 - acceptance)


@dataclass(frozen=True)
class Passes:
    """Seconds of a draft pass and of a verification by its tokens. idle_s: in these the GPU has nothing to do; each_s:
    what a draft pass that runs in them adds to the verification."""

    draft_s: float
    verify_s: Callable[[int], float]
    idle_s: Callable[[int], float] = lambda m: 0.0
    each_s: float = 0.0


def prepared(acceptance: float, depth: int) -> float:
    """The chance that a step ends where the draft has gone on: behind all its tokens, or at a second choice."""
    others = sum(acceptance**i * (1 - acceptance) * SECOND for i in range(min(depth, BRANCHES - 1)))
    return float(acceptance ** (depth + 1) + others)


def step_s(passes: Passes, acceptance: float, depth: int) -> tuple[float, float]:
    """(seconds of a step that drafts `depth` tokens, draft passes that go on in its verification on average)."""
    alone = depth * passes.draft_s + passes.verify_s(depth + 1)
    # the pass that finds the first token behind the step's own is one more
    room = int(min(passes.idle_s(depth + 1) / passes.draft_s, depth + 1)) if depth else 0
    spared = prepared(acceptance, depth) * max(0, room - 1) * passes.draft_s - room * passes.each_s
    return (alone - spared, room) if spared > 0 else (alone, 0.0)


def best_depth(passes: Passes, acceptance: float, most: int = MAX_DRAFT) -> tuple[float, int]:
    """(tokens per second, depth) of the chain that pays most; depth 0 is plain decoding."""
    rates = [(tokens_per_step(acceptance, k) / step_s(passes, acceptance, k)[0], k) for k in range(most + 1)]
    return max(rates, key=lambda rate: (rate[0], -rate[1]))


def speed(passes: Passes, acceptance: float) -> Speed:
    rate, depth = best_depth(passes, acceptance)
    tokens, verify_s = tokens_per_step(acceptance, depth), passes.verify_s(depth + 1)
    return Speed(
        1 / passes.verify_s(1), rate, depth, tokens, passes.draft_s, verify_s, step_s(passes, acceptance, depth)[1]
    )


def cpu_passes(shape: Shape, cpu: Cpu) -> Passes:
    """Of a run without a GPU."""
    everything = shape.draft_bytes + shape.residual_bytes
    rest = CPU_LAYER_S * len(shape.weights)
    draft_s = rest + cpu.draft_seconds(shape.draft_bytes + shape.read_cache, shape.matrix_weights)
    return Passes(draft_s, lambda m: rest + cpu.seconds(everything + shape.read_cache, shape.matrix_weights, m))


def _short_head(vocab: int) -> float:
    """The share of the vocabulary's rows that a draft computes; the text's own tokens, a few more, are not counted."""
    rows = max(vocab // 6, 8192)
    return rows / vocab if rows <= vocab // 2 else 1.0


def hybrid_passes(shape: Shape, placed: Placement, cpu: Cpu, hardware: Hardware) -> Passes:
    """Of a run whose 2-bit part is in VRAM."""
    gpu, bus = SHARE_GPU * hardware.vram_gbs * 1e9, hardware.bus_gbs * 1e9
    sizes, layers = shape.sizes, len(shape.weights)
    head = sizes.head_draft * _short_head(shape.architecture.vocab)
    draft_s = (sum(sizes.draft) + head + shape.read_cache) / gpu + LAYER_S * layers
    split = layers - placed.residual_layers

    def both_s(m: int) -> list[tuple[float, float]]:
        """Of the products that both take part in: the CPU's time and the GPU's."""
        parts = [
            (cpu.seconds(sizes.residual[i], shape.weights[i], m), sizes.draft[i] / gpu)
            for i in range(placed.residual_layers, layers)
        ]
        if not placed.residual_head:
            parts.append((cpu.seconds(sizes.head_residual, shape.head, m), sizes.head_draft / gpu))
        return parts

    def verify_s(m: int) -> float:
        total = (shape.read_cache + sum(sizes.residual[: placed.residual_layers])) / gpu + LAYER_S * layers
        total += sum(sizes.draft[: placed.residual_layers]) / gpu
        total += sum(max(both) for both in both_s(m))
        total += sum(shape.crossing[placed.residual_layers :]) * m / bus + 4 * PRODUCT_S * split
        if placed.residual_head:
            return total + (sizes.head_draft + sizes.head_residual) / gpu
        return total + shape.head_crossing * m / bus + PRODUCT_S

    def idle_s(m: int) -> float:
        return sum(max(0.0, of_cpu - of_gpu) for of_cpu, of_gpu in both_s(m))

    return Passes(draft_s, verify_s, idle_s, LAYER_S * layers)  # the CPU starts its kernels


def q8_bytes(shape: Shape) -> int:
    """Bytes of the same model in Q8_0: matrices, and an input embedding of its own."""
    table = 0 if shape.architecture.tied else shape.head
    return int(Q8_0 * (shape.matrix_weights + table)) + shape.sizes.small


def llama_split(shape: Shape, vram: int) -> tuple[int, int]:
    """Bytes of Q8_0 that a pass reads from VRAM and from RAM, with whole layers in VRAM as they fit, the head first.

    The input embedding stays in RAM, as llama.cpp has it; of it a pass reads single rows.
    """
    parts = [Q8_0 * shape.head, *(Q8_0 * weights for weights in shape.weights)]
    left = vram - DRIVER - MARGIN - shape.cache - _llama_work(shape)
    inside = 0.0
    for part in parts:
        if inside + part > left:
            break
        inside += part
    return int(inside), int(sum(parts) - inside)


def _llama_work(shape: Shape) -> int:
    """Its compute buffer at batches of 512: logits and the widest activations, in fp32."""
    widest = max(layer.intermediate for layer in shape.architecture.layers)
    return 512 * 4 * (shape.architecture.vocab + 2 * widest)


def llama_pass(shape: Shape, cpu: Cpu, hardware: Hardware) -> Callable[[int], float]:
    """Seconds of llama.cpp's passes over Q8_0 by tokens; its kernels get as much out of both devices as ours."""
    inside, outside = llama_split(shape, hardware.vram) if hardware.vram else (0, int(Q8_0 * shape.matrix_weights))
    layers = len(shape.weights)

    def seconds(m: int) -> float:
        total = cpu.seconds(outside, outside / Q8_0, m, unpack=0) if outside else 0.0
        cache = shape.read_cache / (cpu.read if not inside else SHARE_GPU * hardware.vram_gbs * 1e9)
        gpu = inside / (SHARE_GPU * hardware.vram_gbs * 1e9) + LAYER_S * layers if inside else 0.0
        return total + cache + gpu

    return seconds


def predict(
    architecture: Architecture,
    tensors: Mapping[str, TensorEntry],
    hardware: Hardware,
    *,
    context: int,
    cpu: Cpu | None = None,
    acceptance: float = ACCEPTANCE,
    residual_layers: int | None = None,
    passes: Passes | None = None,
) -> Prediction:
    """Placement and speed of a model on `hardware`. cpu: what its processor was measured to do; passes: the seconds of
    a run without GPU, where they were measured as well."""
    shape = Shape(architecture, tensors, context)
    known = cpu or Cpu.of(hardware)
    placed = place(
        architecture,
        shape.sizes,
        max(0, hardware.vram - DRIVER),
        context=shape.context,
        residual_layers=residual_layers if hardware.vram else None,
    )
    everything = shape.draft_bytes + shape.residual_bytes + shape.sizes.small + shape.sizes.embedding
    on_gpu = hardware.vram > 0 and placed.hybrid
    if on_gpu:
        passes = hybrid_passes(shape, placed, known, hardware)
    else:
        placed = replace(placed, ram=everything, missing=placed.missing if hardware.vram else 0)
        passes = passes or cpu_passes(shape, known)
    rival = llama_pass(shape, known, hardware)
    q8 = q8_bytes(shape)
    q8_fits = hardware.vram > 0 and llama_split(shape, hardware.vram)[1] == 0
    in_ram = placed.ram + (0 if on_gpu else shape.cache) + RAM_KEPT
    fits = in_ram <= hardware.ram
    found = speed(passes, acceptance)
    assumed = {
        "hardware": {k: v for k, v in asdict(hardware).items() if k != "sources"},
        "sources": dict(hardware.sources),
        "context": shape.context,
        "positions": POSITIONS,
        "acceptance": acceptance,
        "second_choice": SECOND,
        "cpu_read_gbs": known.read * 1e-9,
        "cpu_gmacs": known.multiply * 1e-9,
        "gpu_share_of_bandwidth": SHARE_GPU,
        "vram_driver_bytes": DRIVER,
        "vram_margin_bytes": MARGIN,
    }
    return Prediction(
        fits,
        placed,
        _step_bytes(shape, placed, on_gpu),
        found,
        q8,
        q8_fits,
        1 / rival(1),
        _advice(shape, hardware, placed, found, q8, q8_fits, fits, in_ram),
        assumed,
    )


def _step_bytes(shape: Shape, placed: Placement, on_gpu: bool) -> dict[str, int]:
    """Bytes that a plain step reads from each memory and sends over the bus; draft: of one draft pass."""
    draft = shape.draft_bytes + shape.read_cache
    if not on_gpu:
        return {"vram": 0, "ram": draft + shape.residual_bytes, "bus": 0, "draft": draft}
    held = placed.vram["residual"]
    bus = sum(shape.crossing[placed.residual_layers :]) + (0 if placed.residual_head else shape.head_crossing)
    return {"vram": draft + held, "ram": shape.residual_bytes - held, "bus": bus, "draft": draft}


def _advice(
    shape: Shape,
    hardware: Hardware,
    placed: Placement,
    found: Speed,
    q8: int,
    q8_fits: bool,
    fits: bool,
    in_ram: int,
) -> str:
    said = []
    if q8_fits:
        said.append(
            f"at Q8_0 this model has {q8 / 1e9:.1f} GB and fits the VRAM: llama.cpp, with everything on the GPU, is "
            "the better choice"
        )
    if not fits:
        said.append(f"it does not fit: {in_ram / 1e9:.1f} GB of RAM are needed, {hardware.ram / 1e9:.1f} are there")
    if hardware.vram and not placed.hybrid:
        said.append(
            f"the 2-bit part with its cache lacks {placed.missing / 1e9:.1f} GB of VRAM: the CPU computes everything; "
            "a smaller --ctx needs less"
        )
    if found.depth == 0:
        said.append("drafting by the 2-bit part does not pay here")
    if not said:
        said.append("the 2-bit part drafts, and both verify" if hardware.vram else "the CPU drafts and verifies")
    return "; ".join(said)
