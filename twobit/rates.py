"""What this machine's processor makes of a model's shapes, measured in a few seconds without the model.

A model of the same widths is made up of random bits, as many layers as no cache holds and a head in proportion. It runs
through the runtime as a real one does, so that rounding, attention, sampling and waiting count too. What it takes is
proportional to the number of layers.
"""

from __future__ import annotations

import math
import mmap
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from twobit.architecture import Architecture
from twobit.benchmark import _Bandwidth, _beyond_cache
from twobit.format.manifest import Manifest, TensorEntry
from twobit.format.reader import PackedModel
from twobit.runtime.lib import default_threads
from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling
from twobit.runtime.session import Session, StepOptions
from twobit.synthetic import matrix_planes

TOKENS = (2, 4, 8, 16)  # tokens of the verifications that are timed
POSITION = 64  # where in the context
ROUNDS = 9


@dataclass(frozen=True)
class Measured:
    """Seconds per pass of the whole model: plain (one token, sampled), draft (one token), verify (by tokens). read_gb_s
    and gmac_s: the probes of `twobit bench` in the same rounds."""

    plain_s: float
    draft_s: float
    verify_s: Mapping[int, float]
    read_gb_s: float
    gmac_s: float
    threads: int
    layers: int


def measure(
    architecture: Architecture, tensors: Mapping[str, TensorEntry], *, threads: int | None = None, rounds: int = ROUNDS
) -> Measured:
    """`tensors`: the manifest's. Takes seconds, and memory of a few times the last cache or of one layer."""
    model, count = _model(architecture, tensors)
    threads = threads or default_threads()
    factor = len(architecture.layers) / count
    session = Session(model, POSITION + max(TOKENS) + 8, threads)
    ids = np.random.default_rng(2).integers(0, model.vocab, POSITION + max(TOKENS)).tolist()
    session.eval(ids[:POSITION], logits=False)
    bandwidth = _Bandwidth([threads], np.concatenate([p[: 32 << 20] for p in model.packed.planes.values()]))
    taken: dict[str, list[float]] = {name: [] for name in ("plain", "draft", *map(str, TOKENS))}
    for number in range(-1, rounds):  # round -1 warms up
        bandwidth.sample(threads)
        for name, times in taken.items():
            seconds = _pass(session, ids, name)
            if number >= 0:
                times.append(seconds)
    probe = bandwidth.probe(threads)
    found = {name: factor * statistics.median(times) for name, times in taken.items()}
    verify = {m: found[str(m)] for m in TOKENS}
    return Measured(found["plain"], found["draft"], verify, probe.read_gb_s, probe.gmac_s["verify"], threads, count)


def _pass(session: Session, ids: list[int], name: str) -> float:
    start = time.perf_counter()
    if name == "plain":
        session.step(ids[: POSITION + 1], Sampling(), StepOptions(draft_max=0))
    elif name == "draft":
        session.eval(ids[POSITION : POSITION + 1], draft=True)
    else:
        session.eval(ids[POSITION : POSITION + int(name)], every=True)
    seconds = time.perf_counter() - start
    session.rewind(POSITION)
    return seconds


def _pages(size: int) -> np.ndarray:
    """Memory in small pages, as a mapped file is; numpy would ask for huge ones, which are faster to read."""
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]


def _model(architecture: Architecture, tensors: Mapping[str, TensorEntry]) -> tuple[Model, int]:
    """A model of the first layers, as many as no cache holds, and their number."""
    size = [0] * len(architecture.layers)
    for spec in architecture.tensors():
        if spec.role == "linear" and spec.layer is not None:
            size[spec.layer] += sum(s.bytes for s in tensors[spec.module].stored("").values())
    total, count = 0, 0
    while count < len(size) and total < _beyond_cache():
        total += size[count]
        count += 1
    vocab = max(64, architecture.vocab * count // len(size) // 16 * 16) if count < len(size) else architecture.vocab
    small = replace(architecture, layers=architecture.layers[:count], vocab=vocab)

    rng = np.random.default_rng(0)
    entries: dict[str, TensorEntry] = {}
    planes: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    made: dict[Any, dict[str, np.ndarray]] = {}
    for spec in small.tensors():
        if spec.role in ("linear", "head"):
            entry = entries[spec.module] = replace(tensors[spec.module], shape=spec.shape)
            if entry.layout_args not in made:
                made[entry.layout_args] = matrix_planes(entry, rng)
            stored = made[entry.layout_args]
        elif spec.role == "embedding":
            if small.tied:
                continue
            entry = entries[spec.module] = replace(tensors[spec.module], shape=spec.shape)
            stored = {s.plane: np.ones(s.bytes, np.uint8) for s in entry.stored("").values()}
        else:
            entries[spec.name] = TensorEntry("plain", spec.shape, {}, dtype="F32")
            fill = 0.0 if spec.role == "bias" else 1.0
            plain[spec.name] = np.full(math.prod(spec.shape), fill, np.float32).view(np.uint8)
            continue
        for plane, data in stored.items():
            copy = _pages(data.size)  # each matrix in memory of its own, as it would be
            copy[:] = data
            planes[f"{spec.module}.{plane}"] = copy
    manifest = Manifest(architecture.family, 1, entries)
    return Model(PackedModel(Path("synthetic"), {}, manifest, planes, plain, {}), small), count
