"""Speeds of a model on this machine, and how near its kernels come to what the machine can do.

Nothing here times loading or tokenizing. Everything is warmed up; what is compared alternates within every round, so
that whatever else runs slows all of it; results are medians over rounds.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from twobit import __version__
from twobit.errors import RuntimeFailure, TokenizerError, UsageError
from twobit.format.manifest import TensorEntry
from twobit.runtime.lib import call, default_threads, ffi, lib
from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling
from twobit.runtime.session import Session, StepOptions
from twobit.runtime.tokenizer import Tokenizer

# How much a draft helps depends on the text: each round decodes after all of these.
PROMPTS = {
    "code": "Write a Python class for a priority queue that supports changing priorities, with a short usage example.",
    "prose": "Write a short story about a cartographer who discovers that one of the rivers on her map has moved.",
    "chat": "I have three free days in autumn and like walking, old towns and good bread. Where should I go, and why?",
}
OPS = ("draft", "verify", "residual")
TOKENS = (1, 2, 4, 8, 16, 64)  # M of the roofline table
PREFILL_TOKENS = 32  # of one round, at least
ROUNDS = 8  # of the kernels, per repeat of everything else
READ_BYTES = 12 << 20  # one read of the bandwidth probe
SAMPLE_S = 1e-3  # what one sample of a kernel should take: short enough to be left alone on a busy machine

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Probe:
    """What the machine gives to `threads` threads: the best of 1, 2 and 4 streams, multiply peaks per op, and the
    microseconds that a parallel section costs."""

    threads: int
    read_gb_s: float
    streams: int
    gmac_s: dict[str, float]
    section_us: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "threads": self.threads,
            "read_gb_s": self.read_gb_s,
            "streams": self.streams,
            "gmac_s": self.gmac_s["verify"],
            "draft_gmac_s": self.gmac_s["draft"],
            "section_us": self.section_us,
        }


@dataclass
class Report:
    """What `twobit bench` shows. `results` and `kernels` hold rows as the JSON has them."""

    machine: dict[str, Any]
    probes: list[Probe]
    results: list[dict[str, Any]] = field(default_factory=list)
    kernels: list[dict[str, Any]] = field(default_factory=list)

    @property
    def invalid(self) -> list[str]:
        """Why the run cannot be right: kernels that were faster than the probes allow."""
        return [
            f"{row['op']} {row['rows']}x{row['cols']}, m = {row['m']}, {row['threads']} threads: "
            f"{row['roofline_fraction']:.2f} of the roofline"
            for row in self.kernels
            if row["roofline_fraction"] > 1
        ]

    def to_json(self) -> dict[str, Any]:
        probe = max(self.probes, key=lambda p: p.threads)
        return {
            "machine": self.machine,
            "probe": probe.to_json(),
            "probes": [p.to_json() for p in self.probes],
            "results": self.results,
            "kernels": self.kernels,
            "valid": not self.invalid,
        }


def machine(level: str) -> dict[str, Any]:
    """Names and sizes that speeds depend on. `cores`: usable ones."""
    return {
        "cpu": _cpu_name(),
        "cores": default_threads(),
        "kernel": level,
        "last_cache_bytes": _last_cache(),
        "system": f"{platform.system()} {platform.machine()}",
        "version": __version__,
    }


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _last_cache() -> int:
    """Bytes of the first core's largest cache; 0 where the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 0)
        if unit and text[:-1].isdigit():
            sizes.append(int(text[:-1]) * unit)
    return max(sizes)


# -- whole model --


def speeds(
    model: Model,
    tokenizer: Tokenizer,
    *,
    prompts: Sequence[int],
    new: int,
    repeats: int,
    threads: Sequence[int],
    depth: int = 0,
    warm: bool = True,
    progress: Progress = lambda text: None,
) -> Report:
    """Prefill of each of `prompts` tokens at once; decoding of `new` after PROMPTS (0: not), with drafting and without,
    behind `depth` tokens of context.

    Raises UsageError where the context is too short, RuntimeFailure where drafting changed the text.
    """
    filler = np.random.default_rng(1).integers(0, model.vocab, depth).tolist()
    questions = {kind: filler + ids for kind, ids in _prompts(tokenizer).items()} if new else {}
    decode = f"tg{new}" + (f" @ d{depth}" if depth else "")
    need = max([*prompts, *(len(ids) + new for ids in questions.values()), 1])
    if need > model.architecture.max_context:
        longest = model.architecture.max_context
        raise UsageError(f"{need} tokens do not fit: this model has {longest} positions", "give less with -p, -n or -d")
    text = np.random.default_rng(0).integers(0, model.vocab, max([*prompts, 1])).tolist()
    sessions = {n: Session(model, need, n) for n in threads}
    bandwidth = _Bandwidth(threads)
    times: dict[tuple[str, bool, int], list[float]] = {}
    steps: dict[int, list[int]] = {n: [0, 0] for n in threads}
    other: dict[int, list[float]] = {n: [] for n in threads}
    for number in range(-warm, repeats):  # round -1 warms up
        progress("warming up" if number < 0 else f"round {number + 1} of {repeats}")
        for n, session in sessions.items():
            if number >= 0:
                bandwidth.sample(n)
            for size in prompts:
                times.setdefault((f"pp{size}", False, n), []).append(_prefill(session, text[:size]))
            seconds = [0.0, 0.0]
            for kind, ids in questions.items():
                texts = []
                for draft in (False, True):
                    spent, products, tokens, count = _decode(session, ids, new, draft)
                    seconds[draft] += spent
                    if not draft and number >= 0:
                        other[n].append(spent - products)
                    texts.append(tokens)
                    if draft and number >= 0:
                        steps[n][0] += len(tokens)
                        steps[n][1] += count
                if texts[0] != texts[1]:
                    raise RuntimeFailure(f"{kind}: the tokens with drafting differ from those without")
            if questions:
                for draft in (False, True):
                    times.setdefault((decode, draft, n), []).append(seconds[draft])
    report = Report(machine(model.level), bandwidth.probes())
    read = read_bytes(model)
    for (test, draft, n), taken in times.items():
        rates = [(int(test[2:]) if test.startswith("pp") else new * len(questions)) / s for s in taken[int(warm) :]]
        row: dict[str, Any] = {"test": test, "draft": draft, "threads": n, **_spread(rates)}
        if test.startswith("tg"):
            row["tokens_per_step"] = steps[n][0] / steps[n][1] if draft else 1.0
            if not draft:
                row["read_gb_s"] = read * row["tokens_per_s"] * 1e-9
                row["other_ms"] = statistics.median(other[n]) / new * 1e3
        report.results.append(row)
    report.results.sort(key=lambda row: (row["threads"], row["test"], row["draft"]))
    return report


def read_bytes(model: Model) -> float:
    """Bytes of weights that a token reads when it is decoded alone."""
    return sum(_bytes(entry, "verify", entry.shape[0]) for entry in model.packed.manifest.tensors.values())


def _prompts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    try:
        return {kind: tokenizer.chat_ids([{"role": "user", "content": text}]) for kind, text in PROMPTS.items()}
    except TokenizerError:  # a base model
        return {kind: tokenizer.encode_prompt(text) for kind, text in PROMPTS.items()}


def _prefill(session: Session, ids: list[int]) -> float:
    """Seconds, of a few tokens the median of several times."""
    taken = []
    for _ in range(max(1, PREFILL_TOKENS // len(ids))):
        session.rewind(0)
        start = time.perf_counter()
        session.eval(ids)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _decode(session: Session, prompt: list[int], new: int, draft: bool) -> tuple[float, float, list[int], int]:
    """(seconds, those of them in matrix products, tokens, steps) of `new` greedy tokens, end tokens or not.

    The prompt's evaluation is not timed.
    """
    session.sync(prompt[:-1])
    history, end, steps = list(prompt), len(prompt) + new, 0
    products, start = session.product_seconds, time.perf_counter()
    while len(history) < end:
        options = StepOptions(budget=end - len(history))
        if not draft:
            options = StepOptions(budget=end - len(history), draft_max=0)
        history += session.step(history, Sampling(), options).tokens
        steps += 1
    spent = time.perf_counter() - start
    return spent, session.product_seconds - products, history[len(prompt) :], steps


def _spread(rates: Sequence[float]) -> dict[str, float]:
    """Median; spread: highest minus lowest, as a share of the median."""
    median = statistics.median(rates)
    return {"tokens_per_s": median, "spread": (max(rates) - min(rates)) / median}


# -- probes and kernels --


class _Threads:
    """Threads for measurements of the C runtime, kept from call to call."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        buffer = ffi.new("char[512]")
        pointer = lib.tb_probe_new(threads, buffer, 512)
        if pointer == ffi.NULL:
            raise RuntimeFailure(ffi.string(buffer).decode())
        self.pointer = ffi.gc(pointer, lib.tb_probe_free)

    @property
    def undisturbed(self) -> bool:
        return not lib.tb_probe_disturbed(self.pointer)


class _Samples:
    """Times; those during which no thread lost its processor count, unless there are none."""

    def __init__(self) -> None:
        self._good: list[float] = []
        self._bad: list[float] = []

    def add(self, value: float, undisturbed: bool) -> None:
        (self._good if undisturbed else self._bad).append(value)

    @property
    def values(self) -> list[float]:
        return self._good or self._bad

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class _Bandwidth:
    """The probes of one run: reads of `memory` piece after piece, multiplications on registers."""

    STREAMS = (1, 2, 4)

    def __init__(self, threads: Sequence[int], memory: np.ndarray | None = None) -> None:
        self.workers = {n: _Threads(n) for n in threads}
        self._memory = np.ones(_beyond_cache(), np.uint8) if memory is None else memory
        self._pointer = ffi.from_buffer("uint8_t[]", self._memory)
        self._at = 0
        self._read = {(n, s): _Samples() for n in threads for s in self.STREAMS}
        self._multiply = {(n, op): _Samples() for n in threads for op in OPS}
        self._section = {n: _Samples() for n in threads}

    def sample(self, threads: int) -> None:
        """One sample of everything at this number of threads."""
        worker = self.workers[threads]
        size = min(READ_BYTES, self._memory.size)
        for streams in self.STREAMS:
            seconds = lib.tb_probe_read(worker.pointer, self._pointer + self._at, size, streams)
            self._read[threads, streams].add(seconds / size, worker.undisturbed)
            self._at = self._at + size if self._at + 2 * size <= self._memory.size else 0
        self._section[threads].add(lib.tb_probe_section(worker.pointer) * 1e6, worker.undisturbed)
        for number, op in enumerate(OPS):
            rate = lib.tb_probe_multiply(worker.pointer, number)
            self._multiply[threads, op].add(rate, worker.undisturbed)

    def probe(self, threads: int) -> Probe:
        """Medians, like those of the kernels: what else runs lowers both."""
        reads = {s: 1e-9 / self._read[threads, s].median for s in self.STREAMS}
        best = max(reads, key=lambda s: reads[s])
        peaks = {op: self._multiply[threads, op].median * 1e-9 for op in OPS}
        return Probe(threads, reads[best], best, peaks, self._section[threads].median)

    def probes(self) -> list[Probe]:
        return [self.probe(n) for n in self.workers]


def _beyond_cache() -> int:
    """Bytes that no cache holds."""
    return min(max(128 << 20, 4 * _last_cache()), 1 << 30)


PLANES: dict[str, tuple[str, ...]] = {
    "draft": ("draft_codes", "draft_scales"),
    "residual": ("residual_codes", "residual_scales"),
}
PLANES["verify"] = PLANES["draft"] + PLANES["residual"]


def _bytes(entry: TensorEntry, op: str, rows: int) -> float:
    """Bytes of weights that a product with `rows` of the matrix's rows reads; 0 for what is no matrix."""
    if entry.kind != "matrix":
        return 0
    stored = entry.stored("")
    planes = (*PLANES[op], "row_scale", *(("row_a", "row_b") if op != "residual" else ()))
    return sum(stored[f".{name}"].bytes for name in planes if f".{name}" in stored) * rows / entry.shape[0]


class _Rotation:
    """Matrices of one shape, as many as no cache holds: the model's own, copied and repeated as needed."""

    def __init__(self, model: Model, names: Sequence[str]) -> None:
        planes = model.packed.planes
        self.entry = model.packed.manifest.tensors[names[0]]
        self._keep: list[Any] = []
        pointers: dict[str, list[Any]] = {}
        for kind in (PLANES["draft"], PLANES["residual"]):
            whole = sum(planes[f"{names[0]}.{plane}"].size for plane in kind)
            copies = math.ceil(_beyond_cache() / whole)
            for plane in kind:
                size = planes[f"{names[0]}.{plane}"].size
                memory = _aligned(copies * size)
                for i in range(copies):
                    memory[i * size : (i + 1) * size] = planes[f"{names[i % len(names)]}.{plane}"]
                start = self._pointer("uint8_t[]", memory)
                pointers[plane] = [start + i * size for i in range(copies)]
                if plane == "residual_codes":
                    self.memory = memory  # the longest: what the probe reads
        rows, cols = self.entry.shape
        common = {
            "rows": rows,
            "cols": cols,
            "draft_bits": self.entry.draft_bits,
            "residual_bits": self.entry.residual_bits,
            "residual_group": self.entry.residual_group,
            "wide": int(self.entry.wide),
            "row_scale": self._pointer("float[]", planes[f"{names[0]}.row_scale"]),
            "row_a": self._pointer("uint8_t[]", planes[f"{names[0]}.row_a"]),
            "row_b": self._pointer("int8_t[]", planes[f"{names[0]}.row_b"]),
            "bias": ffi.NULL,
        }
        self.count = len(pointers["draft_codes"])
        self.matrices = ffi.new(
            "tb_matrix[]",
            [common | {plane: of[i % len(of)] for plane, of in pointers.items()} for i in range(self.count)],
        )
        self._at = 0

    def _pointer(self, kind: str, array: np.ndarray) -> Any:
        pointer = ffi.from_buffer(kind, array)
        self._keep += [array, pointer]
        return pointer

    def seconds(self, worker: _Threads, op: int, m: int, rows: int, count: int) -> float:
        """Seconds of one product of `rows` rows with m tokens, the mean of the next `count` matrices."""
        count = min(count, self.count)
        if self._at + count > self.count:
            self._at = 0
        for i in range(self._at, self._at + count):
            self.matrices[i].rows = rows
        out = ffi.new("double *")
        call(lib.tb_probe_matmul, worker.pointer, self.matrices + self._at, count, op, m, out)
        self._at += count
        return float(out[0]) / count


def _aligned(size: int) -> np.ndarray:
    raw = np.empty(size + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:size]


def shapes(model: Model) -> Iterator[list[str]]:
    """The model's matrices, those of the same shape and bits together, in the model's order."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, entry in model.packed.manifest.tensors.items():
        if entry.kind == "matrix":
            groups.setdefault((entry.layout_args, entry.wide), []).append(name)
    yield from groups.values()


def kernels(
    model: Model, *, repeats: int, threads: Sequence[int], progress: Progress = lambda text: None
) -> tuple[list[dict[str, Any]], list[Probe]]:
    """(rows of the roofline table, the probes over the whole run), one row per shape, threads, op and M.

    A fraction is the time that the nearer limit allows, the larger of bytes / read bandwidth and multiplications /
    peak, over the time measured; both limits are probed in the same rounds.
    """
    table: list[dict[str, Any]] = []
    found: list[list[Probe]] = []
    groups = list(shapes(model))
    for number, names in enumerate(groups):
        entry = model.packed.manifest.tensors[names[0]]
        progress(f"kernels: {entry.shape[0]}x{entry.shape[1]}, shape {number + 1} of {len(groups)}")
        rows, probes = _roofline(_Rotation(model, names), repeats * ROUNDS, threads)
        table += rows
        found.append(probes)
    summary = [
        Probe(
            of[0].threads,
            statistics.median(p.read_gb_s for p in of),
            statistics.mode(p.streams for p in of),
            {op: statistics.median(p.gmac_s[op] for p in of) for op in OPS},
            statistics.median(p.section_us for p in of),
        )
        for of in zip(*found, strict=True)
    ]
    return table, summary


def _roofline(weights: _Rotation, rounds: int, threads: Sequence[int]) -> tuple[list[dict[str, Any]], list[Probe]]:
    entry = weights.entry
    rows, cols = entry.shape
    bandwidth = _Bandwidth(threads, weights.memory)
    plans: dict[tuple[int, int, int], tuple[int, int]] = {}  # (threads, op, m) -> rows and matrices of a sample
    samples: dict[tuple[int, int, int], _Samples] = {}
    for n, worker in bandwidth.workers.items():
        for op in range(len(OPS)):
            for m in TOKENS:
                once = min(weights.seconds(worker, op, m, rows, 1) for _ in range(3))
                share = min(rows, max(16 * n, round(rows * 2 * SAMPLE_S / once / 16) * 16))
                plans[n, op, m] = (share, max(1, round(SAMPLE_S / once)))
                samples[n, op, m] = _Samples()
    for _ in range(rounds):
        for n, worker in bandwidth.workers.items():
            bandwidth.sample(n)
            for op in range(len(OPS)):
                for m in TOKENS:
                    share, count = plans[n, op, m]
                    seconds = weights.seconds(worker, op, m, share, count)
                    samples[n, op, m].add(seconds * rows / share, worker.undisturbed)
    table: list[dict[str, Any]] = []
    for (n, op, m), taken in samples.items():
        probe, seconds = bandwidth.probe(n), taken.median
        size, macs = _bytes(entry, OPS[op], rows), float(m * rows * cols)
        read, multiply = size / probe.read_gb_s * 1e-9, macs / probe.gmac_s[OPS[op]] * 1e-9
        low, high = np.quantile(taken.values, (0.1, 0.9))
        table.append(
            {
                "op": OPS[op],
                "threads": n,
                "rows": rows,
                "cols": cols,
                "bits": f"{entry.draft_bits}+{entry.residual_bits}",
                "m": m,
                "seconds": seconds,
                "spread": float(high - low) / seconds,
                "samples": len(taken.values),
                "ratio_to_m1": seconds / samples[n, op, 1].median,
                "gb_s": size / seconds * 1e-9,
                "gmac_s": macs / seconds * 1e-9,
                "limit": "read" if read > multiply else "multiply",
                "roofline_fraction": max(read, multiply) / seconds,
            }
        )
    return table, bandwidth.probes()


def bench(
    folder: Path,
    *,
    prompts: Sequence[int],
    new: int,
    repeats: int,
    threads: Sequence[int] | None,
    roofline: bool,
    depth: int = 0,
    progress: Progress = lambda text: None,
) -> Report:
    """Everything that `twobit bench` measures of the model in `folder`."""
    model = Model.open(folder)
    counts = list(threads or [default_threads()])
    if prompts or new:
        tokenizer = Tokenizer.load(folder, config=model.config, rows=model.vocab)
        try:
            report = speeds(
                model,
                tokenizer,
                prompts=prompts,
                new=new,
                depth=depth,
                repeats=repeats,
                threads=counts,
                progress=progress,
            )
        finally:
            tokenizer.close()
    else:
        report = Report(machine(model.level), [])
    if roofline:
        rows, probes = kernels(model, repeats=repeats, threads=counts, progress=progress)
        report.kernels = rows
        report.probes = probes
    return report
