"""How long a run of the quantizer will take: this machine's rates, probed in a second or so, times the model's counts.

Each rate is measured with the code that the run itself calls, on matrices as wide as the model's, up to PROBE_WIDTH;
what is larger is extrapolated by its count of operations. Probes use as many threads as the run will, up to the cores
there are; more threads than that are taken to be as many cores more of the same kind.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from twobit.architecture import Architecture
from twobit.quant import allocate, calibrate
from twobit.runtime.lib import default_threads

if TYPE_CHECKING:
    import torch

    from twobit.quant.plan import Options
    from twobit.quant.recipe import Bits
    from twobit.quant.source import Checkpoint

PROBE_WIDTH = 2048
_ROUNDS = 2  # of every probe; the faster one counts
_PROBE_ROWS = 32  # of a matrix that is rounded, per thread


def estimate(checkpoint: Checkpoint, options: Options) -> dict[str, float]:
    """Seconds by what takes them: reading, forward, hessians, factors, rounding, writing."""
    import torch

    from twobit.quant.rounding import BLOCK, DOUBLE_COLUMNS

    architecture, tokens = checkpoint.architecture, options.calib_tokens
    measured = min(options.threads, default_threads())
    more = options.threads / measured
    layers = [_layer_counts(architecture, layer.index) for layer in architecture.layers]
    weights = sum(count for count, _, _ in layers)
    head = architecture.vocab * architecture.hidden
    stored = sum(header.size for header in checkpoint.shards.values())
    bits = {role: options.recipe.bits("", role) for role in ("linear", "head")}
    with calibrate.one_torch_thread(measured) as pool:
        hashing, widening, packing = _byte_rates()
        forward = _forward(architecture, pool, measured)
        panel = _panel(pool, architecture)
        double, single = _cholesky(1024, torch.float64), _cholesky(2048, torch.float32)
        rounding = _rounding(architecture, bits["linear"], measured)
        head_rounding = _rounding(architecture, bits["head"], measured)
    solving = sum(_solving(architecture, layer.index) for layer in architecture.layers) + architecture.hidden**2 * (
        architecture.hidden + architecture.vocab
    )
    widths = [width for _, _, found in layers for width in found] + [architecture.hidden]
    measuring = 0 if options.draft_bpw is None else 8 * min(tokens, allocate.TOKENS)
    return {
        "reading": stored * (hashing + 2 * widening),
        # verifier and draft
        "forward": (2 * tokens + measuring) * sum(macs for _, macs, _ in layers) * forward / more,
        # half of X^T X and all of V^T X
        "hessians": tokens * sum(w * w / 2 + w * min(w, architecture.hidden) for w in widths) * panel / more,
        # one to round by, and one in fp32 to fit targets by, which is solved with; on all threads where it is wide
        "factors": sum(
            w**3 * (double + single) if w <= DOUBLE_COLUMNS else 2 * (w * BLOCK**2 * single + w**3 / 6 * panel / more)
            for w in widths
        )
        + solving * panel / more,
        "rounding": (
            sum(rounding(rows * cols, cols) for rows, cols in _shapes(architecture))
            + head_rounding(head, architecture.hidden)
        )
        / more,
        "writing": (weights + head) * packing,
    }


def _shapes(architecture: Architecture) -> list[tuple[int, int]]:
    return [(s.shape[0], s.shape[1]) for s in architecture.tensors() if s.role == "linear"]


def _layer_counts(architecture: Architecture, index: int) -> tuple[int, int, list[int]]:
    """Weights of a layer's linears, multiply-adds per token, and the widths of its Hessians."""
    specs = [s for s in architecture.tensors() if s.layer == index and s.role == "linear"]
    weights = sum(math.prod(s.shape) for s in specs)
    layer = architecture.layers[index]
    # scores and values of the causal half of a sequence
    attention = calibrate.SEQUENCE * layer.n_heads * layer.head_dim
    return weights, weights + attention, [s.shape[1] for s in specs if s.part in calibrate.SHARED.values()]


def _solving(architecture: Architecture, index: int) -> int:
    """Multiply-adds of a layer's targets: solving with a factor, and the product before or after it."""
    specs = [s for s in architecture.tensors() if s.layer == index and s.role == "linear"]
    products = sum(s.shape[0] * s.shape[1] ** 2 for s in specs)
    solved = sum(s.shape[0] * s.shape[1] ** 2 for s in specs if s.part in ("o", "down"))
    return products + solved + sum(s.shape[1] ** 3 for s in specs if s.part in ("q", "gate"))


def _best(run: Callable[[], object]) -> float:
    found = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        run()
        found.append(time.perf_counter() - started)
    return min(found)


def _byte_rates() -> tuple[float, float, float]:
    """Seconds per byte hashed, per byte checked and widened, and per weight packed and hashed again."""
    import numpy as np

    from twobit.format import layout
    from twobit.quant.source import _widen

    data = np.zeros(8 << 20, np.uint8)
    hashing = _best(lambda: hashlib.sha256(data.data).digest()) / data.size

    def widen() -> None:
        values = data.view("<u2")
        (values & 0x7F80).max()
        _widen("BF16", data.tobytes(), np.empty(values.size, np.float32))

    rows, cols = 64, 1024
    matrix = layout.Matrix(
        draft_bits=2,
        residual_bits=6,
        residual_group=16,
        codes=np.zeros((rows, cols), np.uint8),
        s=np.zeros((rows, cols // 16), np.uint8),
        m=np.zeros((rows, cols // 16), np.int8),
        row_scale=np.zeros(rows, np.float32),
        row_a=np.zeros(rows, np.uint8),
        row_b=np.zeros(rows, np.int8),
        residual=np.zeros((rows, cols), np.int16),
        f=np.zeros((rows, cols // 16), np.uint8),
    )
    pack = _best(lambda: layout.pack(matrix)) / (rows * cols)
    return hashing, _best(widen) / data.size, pack + 2.2 * hashing


def _small(architecture: Architecture) -> Architecture:
    """The first layer alone, no wider than PROBE_WIDTH, its parts in proportion."""
    layer = architecture.layers[0]
    scale = min(1.0, PROBE_WIDTH / max(architecture.hidden, layer.intermediate, layer.n_heads * layer.head_dim))
    kv = max(1, round(layer.n_kv_heads * scale))
    small = replace(
        layer,
        n_heads=kv * (layer.n_heads // layer.n_kv_heads),
        n_kv_heads=kv,
        intermediate=max(16, round(layer.intermediate * scale)),
    )
    return replace(architecture, hidden=max(16, round(architecture.hidden * scale)), layers=(small,))


def _forward(architecture: Architecture, pool: ThreadPoolExecutor, threads: int) -> float:
    """Seconds per token and multiply-add of a layer, with all threads at work."""
    import torch

    from twobit.quant.decoder import Decoder

    small = _small(architecture)
    generator = torch.Generator().manual_seed(0)
    weights = {
        s.name: torch.randn(s.shape, generator=generator) * (s.shape[-1] ** -0.5)
        for s in small.tensors()
        if s.layer == 0
    }
    decoder = Decoder(small)
    n = min(calibrate.SEQUENCE, small.max_context)
    states = [torch.randn(n, small.hidden, generator=generator) for _ in range(2 * threads)]

    def one(state: torch.Tensor) -> None:
        with torch.no_grad():
            decoder.layer(0, state, weights)

    _, macs, _ = _layer_counts(small, 0)
    return _best(lambda: list(pool.map(one, states))) / (len(states) * n * macs)


def _panel(pool: ThreadPoolExecutor, architecture: Architecture) -> float:
    """Seconds per token and entry of half a Hessian, with all threads at work."""
    import torch

    width = min(PROBE_WIDTH, max(layer.intermediate for layer in architecture.layers))
    x, total = torch.ones(calibrate.CHUNK_TOKENS, width), torch.zeros(width, width)

    def run() -> None:
        jobs = [pool.submit(calibrate._add_panel, total, x, x, rows, True) for rows in calibrate._panels(width)]
        for job in jobs:
            job.result()

    return _best(run) / (len(x) * width * width / 2)


def _cholesky(width: int, dtype: torch.dtype) -> float:
    """Seconds per cubed column, on one thread as in `rounding.prepare`."""
    import torch

    matrix = torch.eye(width, dtype=dtype)
    return _best(lambda: torch.linalg.cholesky_ex(matrix)) / width**3


def _rounding(architecture: Architecture, bits: Bits, threads: int) -> Callable[[int, int], float]:
    """A function that gives the seconds to round some weights in rows of so many columns, with all threads at work.

    A weight costs a constant and a part that grows with the columns before it, through which its error is fed.
    """
    import torch

    from twobit.quant.rounding import prepare, round_matrix

    def measure(cols: int) -> float:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(256, cols, generator=generator)
        factor = prepare(x.T @ x)
        weight = torch.randn(_PROBE_ROWS * threads, cols, generator=generator) * 0.02
        seconds = _best(
            lambda: round_matrix(
                weight,
                factor,
                draft_bits=bits.draft,
                residual_bits=bits.residual,
                residual_group=bits.group,
                threads=threads,
            )
        )
        return seconds / weight.numel()

    narrow, wide = 256, min(PROBE_WIDTH, max(max(cols for _, cols in _shapes(architecture)), 512))
    low, high = measure(narrow), measure(wide)
    slope = max(0.0, (high - low) / (wide - narrow))
    return lambda weights, cols: weights * (low + slope * (cols - narrow) if cols > narrow else low)
