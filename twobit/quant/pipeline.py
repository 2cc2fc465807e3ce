"""From a checkpoint to a twobit model: layer by layer, resumable, the same bytes whatever the number of threads.

Peak memory (`Plan.memory_bytes`) is the input embedding (or a tied head) in fp32, one layer in fp32 with its Hessians,
the hidden states of the calibration tokens, and 800 MB for the interpreter, torch and buffers.
"""

from __future__ import annotations

import json
import math
import os
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twobit.architecture import Architecture, TensorSpec
from twobit.errors import CalibrationError, CheckpointError, FormatError, RuntimeFailure, TwobitError, UsageError
from twobit.format import layout
from twobit.format.writer import (
    ModelWriter,
    PackedTensor,
    check_output,
    check_replaceable,
    check_space,
    required_bytes,
)
from twobit.quant import calibrate
from twobit.quant.recipe import Bits, Recipe

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from twobit.quant.rounding import Factor, Rounded
    from twobit.quant.source import Checkpoint

DAMPING = 0.1  # of the Hessian's mean diagonal
BASE_MEMORY = 800_000_000  # bytes: interpreter, torch, buffers
CHUNK_WEIGHTS = 1 << 22  # weights of a head that are rounded at a time
ROW_STEP = 64  # planes of row chunks concatenate at multiples of this
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY.md")
# For the time estimate only: what one 2020s core does, per second.
_MACS_PER_CORE = 2.0e10
_WEIGHTS_PER_CORE = 4.0e6


@dataclass(frozen=True)
class Options:
    """What `twobit quantize` takes. `calib`: text files, empty for the package's own text."""

    recipe: Recipe = field(default_factory=Recipe)
    calib: tuple[Path, ...] = ()
    calib_tokens: int = calibrate.DEFAULT_TOKENS
    seed: int = 0
    threads: int = 1
    restart: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        for flag, value, low in (
            ("-t", self.threads, 1),
            ("--calib-tokens", self.calib_tokens, 1),
            ("--seed", self.seed, 0),
        ):
            if value < low:
                raise UsageError(f"{flag} {value} is less than {low}")
        if self.seed >= 1 << 64:
            raise UsageError(f"--seed {self.seed} is more than 64 bits")


class Progress:
    """What a run tells while it works; this one keeps silent."""

    def stage(self, name: str, total: int) -> None:
        """A stage of `total` steps begins; the stage before it is over."""

    def advance(self, steps: int) -> None:
        """Steps of the current stage are done. May come from any thread."""

    def line(self, text: str) -> None:
        """Something to keep on the screen."""

    def warning(self, text: str) -> None:
        """Something that the user should look at."""


@dataclass(frozen=True)
class Plan:
    """What a run would make and take: `quantize --dry-run`."""

    source: Path
    output: Path
    family: str
    parameters: int
    bits: Mapping[str, Any]
    recipe: Mapping[str, Any]
    memory_bytes: int
    disk_bytes: int
    seconds: float
    calibration_tokens: int

    def to_json(self) -> dict[str, Any]:
        return {
            "dry_run": True,
            "source": str(self.source),
            "output": str(self.output),
            "family": self.family,
            **self.bits,
            "recipe": dict(self.recipe),
            "calibration": {"tokens": self.calibration_tokens},
            "memory_bytes": self.memory_bytes,
            "disk_bytes": self.disk_bytes,
            "estimated_seconds": self.seconds,
        }


def plan(source: Path, output: Path, options: Options) -> Plan:
    """Bits, bytes, time and memory of a run, from headers alone. Raises what the run would refuse at once."""
    if options.calib:
        calibrate.load_files(options.calib)
    return _plan(_open(source, output, options), output, options)


def quantize(
    source: Path, output: Path, options: Options | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Makes a twobit model at `output` from the checkpoint at `source`; returns the object of `quantize --json`.

    A run that stopped goes on where it was when called again with the same source and options. TwobitError where
    anything is refused; then nothing is written. The source is only read.
    """
    options, progress = options or Options(), progress or Progress()
    started = time.monotonic()
    checkpoint = _open(source, output, options)
    for note in checkpoint.notes:
        progress.line(note)
    for warning in [*checkpoint.warnings, *_tokenizer_warnings(checkpoint)]:
        progress.warning(warning)
    about = _plan(checkpoint, output, options)
    if about.memory_bytes > (free := _available_memory()):
        progress.warning(
            f"this needs about {about.memory_bytes / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are available: "
            "the system may end it"
        )
    check_space(output, about.bits["draft_bytes"] + about.bits["residual_bytes"])
    calibration = _calibration(checkpoint, options)
    progress.line(
        f"calibration: {len(calibration.sequences)} of {calibration.requested} sequences, "
        f"{calibration.tokens:,} tokens ({calibration.source})"
    )
    progress.stage("checking the weights", sum(header.size for header in checkpoint.shards.values()))
    fingerprint = _fingerprint(checkpoint, calibration, options, progress)
    files = _files(checkpoint)
    with (
        _memory_errors(about),
        ModelWriter(output, fingerprint, restart=options.restart, overwrite=options.overwrite) as writer,
        calibrate.one_torch_thread(options.threads) as pool,
    ):
        run = _Run(checkpoint, calibration, options, progress, writer, pool)
        keys = run.all_steps()
        progress.stage("writing", 1)
        recipe = options.recipe.to_json() | {"damping": DAMPING, "errors": run.errors()}
        manifest = writer.finish(
            keys,
            config=checkpoint.config,
            family=checkpoint.architecture.family,
            parameters=about.parameters,
            recipe=recipe,
            calibration=calibration.to_json(),
            producer=_producer(),
            files=files,
        )
        progress.advance(1)
    return {
        "output": str(output),
        "build_id": manifest.build_id,
        **manifest.bits(),
        "seconds": round(time.monotonic() - started, 3),
        "peak_ram_bytes": peak_memory(),
        "expected_ram_bytes": about.memory_bytes,
        "calibration": calibration.to_json(),
        "errors": run.errors(),
    }


def peak_memory() -> int:
    """The most memory that this process has had in RAM, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024


# -- before the work ----------------------------------------------------------------------------------------


def _open(source: Path, output: Path, options: Options) -> Checkpoint:
    from twobit.quant.source import Checkpoint

    check_output(source, output)
    checkpoint = Checkpoint.open(source)
    options.recipe.check(spec.module for spec in checkpoint.architecture.tensors() if spec.role in ("linear", "head"))
    if os.path.lexists(output):
        if not options.overwrite:
            way = "choose another output folder" + (", or pass --overwrite" if output.is_dir() else "")
            raise FormatError(f"{output} exists", way)
        check_replaceable(output)
    return checkpoint


def _tokenizer_warnings(checkpoint: Checkpoint) -> list[str]:
    from twobit.quant.source import check_tokenizer_ids

    return check_tokenizer_ids(checkpoint.folder, checkpoint.architecture.vocab)


def _matrices(architecture: Architecture) -> Iterator[TensorSpec]:
    return (spec for spec in architecture.tensors() if spec.role in ("linear", "head"))


def _parameters(architecture: Architecture) -> int:
    specs = architecture.tensors()
    return sum(math.prod(s.shape) for s in specs if not (architecture.tied and s.role == "head"))


def _plan(checkpoint: Checkpoint, output: Path, options: Options) -> Plan:
    from twobit.format.manifest import Manifest, TensorEntry

    architecture, recipe = checkpoint.architecture, options.recipe
    entries: dict[str, TensorEntry] = {}
    for spec in architecture.tensors():
        if spec.role in ("linear", "head"):
            bits = recipe.bits(spec.module, spec.role)
            which = "wide" if bits.wide else "narrow"
            entries[spec.module] = TensorEntry("matrix", spec.shape, {}, bits.draft, bits.residual, bits.group, which)
        elif spec.role == "embedding":
            if not architecture.tied:
                entries[spec.module] = TensorEntry("embedding", spec.shape, {})
        else:
            entries[spec.name] = TensorEntry("plain", spec.shape, {}, dtype=checkpoint.dtype(spec))
    parameters = _parameters(architecture)
    bits_json = Manifest(architecture.family, parameters, entries).bits()
    model_bytes = bits_json["draft_bytes"] + bits_json["residual_bytes"]
    return Plan(
        source=checkpoint.folder,
        output=output,
        family=architecture.family,
        parameters=parameters,
        bits=bits_json,
        recipe=recipe.to_json(),
        memory_bytes=memory_bytes(architecture, options.calib_tokens),
        disk_bytes=required_bytes(model_bytes),
        seconds=_seconds(architecture, options),
        calibration_tokens=options.calib_tokens,
    )


def memory_bytes(architecture: Architecture, tokens: int) -> int:
    """The bound on peak memory: embeddings + one layer with its Hessians + hidden states + BASE_MEMORY."""
    layers = []
    for layer in architecture.layers:
        linears = [s for s in architecture.tensors() if s.layer == layer.index and s.role == "linear"]
        widths = {calibrate.SHARED[s.part]: s.shape[1] for s in linears}
        layers.append(sum(math.prod(s.shape) for s in linears) + sum(w * w for w in widths.values()))
    embedding = architecture.vocab * architecture.hidden
    return 4 * (embedding + max(layers) + tokens * architecture.hidden) + BASE_MEMORY


def _seconds(architecture: Architecture, options: Options) -> float:
    macs = weights = 0
    for spec in _matrices(architecture):
        rows, cols = spec.shape
        weights += rows * cols
        if spec.role == "linear":
            shared = 1 if spec.part in calibrate.SHARED.values() else 0
            macs += options.calib_tokens * (rows * cols + shared * cols * cols // 2)
    return round((macs / _MACS_PER_CORE + weights / _WEIGHTS_PER_CORE) / options.threads, 1)


def _available_memory() -> float:
    """Bytes that this process may still take, as far as the system says."""
    found = [math.inf]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found += [1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:")]
    except OSError:
        pass
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            found.append(float(Path("/sys/fs/cgroup", name).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        found.append(float(limit))
    return min(found)


def _render(checkpoint: Checkpoint) -> calibrate.Render | None:
    """The source's chat template; None where it has none that works."""
    from twobit.runtime.chat_template import ChatTemplate, find_template

    try:
        settings = json.loads((checkpoint.folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        text = find_template(checkpoint.folder, settings)
    except (OSError, ValueError, TwobitError):
        return None
    if text is None:
        return None
    names = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            names[key] = value
    template = ChatTemplate(text, names)
    return lambda messages: template.render(messages, add_generation_prompt=False)


def _calibration(checkpoint: Checkpoint, options: Options) -> calibrate.Calibration:
    documents = calibrate.load_files(options.calib) if options.calib else calibrate.load_default()
    source = ", ".join(path.name for path in options.calib) or "the package's text"
    encode = calibrate.Encoder(
        checkpoint.folder, checkpoint.architecture.vocab, None if options.calib else _render(checkpoint)
    )
    length = min(calibrate.SEQUENCE, checkpoint.architecture.max_context)
    return calibrate.sequences(
        documents, encode, tokens=options.calib_tokens, source=source, seed=options.seed, length=length
    )


def _fingerprint(
    checkpoint: Checkpoint, calibration: calibrate.Calibration, options: Options, progress: Progress
) -> dict[str, Any]:
    """All that decides the bytes of the model, apart from the files that are copied."""
    return {
        "producer": _producer(),
        "source": checkpoint.fingerprint(progress.advance),
        "options": {
            "residual": options.recipe.residual,
            "residual_group": options.recipe.residual_group,
            "rules": [str(rule) for rule in options.recipe.rules],
            "calib_tokens": options.calib_tokens,
            "seed": options.seed,
        },
        "calibration": calibration.to_json(),
    }


def _producer() -> str:
    try:
        return f"twobit {metadata.version('twobit')}"
    except metadata.PackageNotFoundError:
        return "twobit"


def _files(checkpoint: Checkpoint) -> dict[str, bytes | Path]:
    """Tokenizer, chat template, generation settings and licence, as they are."""
    from twobit.quant.source import plain_file

    names = [name for name in os.listdir(checkpoint.folder) if name.upper().startswith(LICENCES)]
    found = {name: plain_file(checkpoint.folder, name) for name in (*COPIED, *sorted(names))}
    return {name: path for name, path in found.items() if path is not None and path.is_file()}


@contextmanager
def _memory_errors(about: Plan) -> Iterator[None]:
    """Turns a failed allocation, of Python or of torch, into one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise RuntimeFailure(
            f"out of memory: this model needs about {about.memory_bytes / 1e9:.1f} GB",
            "close other programs or use a larger machine; run the same command again to go on",
        ) from error


# -- the work -----------------------------------------------------------------------------------------------


class _Run:
    """The steps of one run, each stored under its key as soon as it is done."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        calibration: calibrate.Calibration,
        options: Options,
        progress: Progress,
        writer: ModelWriter,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.checkpoint = checkpoint
        self.calibration = calibration
        self.options = options
        self.progress = progress
        self.writer = writer
        self.pool = pool
        self.architecture = checkpoint.architecture
        self.specs = self.architecture.tensors()
        self._errors: dict[str, dict[str, list[float]]] = {}

    def all_steps(self) -> list[str]:
        """Does what is not stored yet; returns the keys in model order."""
        layers = [f"layer-{layer.index:05d}" for layer in self.architecture.layers]
        keys = ["embedding"] * (not self.architecture.tied) + [*layers, "norm", "head"]
        done = sum(map(self.writer.has, keys))
        if done:
            self.progress.line(f"going on with an unfinished run: {done} of {len(keys)} parts are done")
        if not self.architecture.tied and not self.writer.has("embedding"):
            self._embedding()
        if not self.writer.has("norm"):
            (norm,) = (s for s in self.specs if s.part == "final_norm")
            self.writer.store("norm", {norm.name: self._plain(norm)})
        missing = [key for key in (*layers, "head") if not self.writer.has(key)]
        if missing:
            self._layers(layers)
        for key in keys:
            notes = self.writer.notes(key)
            if notes:
                self._errors[key] = notes["errors"]
        return keys

    def errors(self) -> dict[str, Any]:
        """Mean relative errors in the metric of the calibration inputs, for linears and head."""
        groups: dict[str, list[list[float]]] = {"linear": [], "head": []}
        for key, errors in self._errors.items():
            groups["head" if key == "head" else "linear"] += errors.values()
        return {
            name: {
                "draft": round(sum(d for d, _ in values) / len(values), 6),
                "full": round(sum(f for _, f in values) / len(values), 8),
            }
            for name, values in groups.items()
            if values
        }

    def _plain(self, spec: TensorSpec) -> PackedTensor:
        dtype, raw = self.checkpoint.read_raw(spec)
        return PackedTensor.plain(raw, dtype, spec.shape)

    def _embedding(self) -> None:
        (spec,) = (s for s in self.specs if s.role == "embedding")
        weight = self.checkpoint.read(spec).numpy()
        self.writer.store("embedding", {spec.module: PackedTensor.embedding(weight)})

    def _layers(self, keys: Sequence[str]) -> None:
        tokens = self.calibration.tokens
        total = len(keys) + 1
        self.progress.stage("quantizing", tokens * total)
        states = calibrate.Activations(self.checkpoint, self.calibration, self.pool, self.progress.advance)
        last = max((i for i, key in enumerate(keys) if not self.writer.has(key)), default=-1)
        head = not self.writer.has("head")
        for index, key in enumerate(keys):
            if index > last and not head:
                break
            started = time.monotonic()
            specs = [s for s in self.specs if s.layer == index]
            weights = {s.name: self.checkpoint.read(s) for s in specs}
            stored = self.writer.has(key)
            hessians = states.layer(index, weights, hessians=not stored)
            if not stored:
                self._layer(key, index, specs, weights, hessians, started)
        if head:
            self._head(states)
        self.progress.advance(tokens)

    def _layer(
        self,
        key: str,
        index: int,
        specs: Sequence[TensorSpec],
        weights: dict[str, torch.Tensor],
        hessians: dict[str, torch.Tensor],
        started: float,
    ) -> None:
        packed: dict[str, PackedTensor] = {}
        errors: dict[str, list[float]] = {}
        for part in list(hessians):
            group = [s for s in specs if s.role == "linear" and calibrate.SHARED[s.part] == part]
            factor = self._factor(hessians.pop(part), group)
            for spec in group:
                bits = self.options.recipe.bits(spec.module, spec.role)
                rounded = self._round(spec, weights.pop(spec.name), factor, bits)
                packed[spec.module] = _pack(rounded, bits, spec.module)
                errors[spec.module] = [rounded.draft_error, rounded.full_error]
        for spec in specs:
            if spec.role != "linear":
                packed[spec.name] = self._plain(spec)
        order = {s.module if s.role == "linear" else s.name: i for i, s in enumerate(specs)}
        packed = dict(sorted(packed.items(), key=lambda item: order[item[0]]))
        self.writer.store(key, packed, {"errors": errors})
        kinds = ", ".join(sorted({str(self.options.recipe.bits(name, "linear")) for name in errors}))
        self._report(f"layer {index + 1}/{len(self.architecture.layers)}", kinds, errors, started)

    def _head(self, states: calibrate.Activations) -> None:
        started = time.monotonic()
        (norm,) = (s for s in self.specs if s.part == "final_norm")
        (spec,) = (s for s in self.specs if s.role == "head")
        factor = self._factor(states.head(self.checkpoint.read(norm)), [spec])
        bits = self.options.recipe.bits(spec.module, spec.role)
        rows, cols = spec.shape
        step = max(1, CHUNK_WEIGHTS // (ROW_STEP * cols)) * ROW_STEP
        parts: dict[str, list[np.ndarray]] = {}
        energy = np.zeros(3)
        for first in range(0, rows, step):
            weight = self.checkpoint.read(spec, (first, min(first + step, rows)))
            rounded = self._round(spec, weight, factor, bits)
            own = float(weight.square().sum(dtype=_float64()))
            energy += own * np.array([rounded.draft_error**2, rounded.full_error**2, 1.0])
            layout.check_rows(
                spec.module, rounded.row_scale, rounded.row_a, rounded.row_b, bits.draft, bits.residual, bits.wide
            )
            for name, plane in layout.pack(rounded).items():
                parts.setdefault(name, []).append(plane)
        planes = {name: np.concatenate(parts.pop(name)) for name in list(parts)}
        packed = PackedTensor.from_planes(planes, (rows, cols), bits.draft, bits.residual, bits.group, wide=bits.wide)
        draft, full = np.sqrt(energy[:2] / max(energy[2], 1e-300))
        errors = {spec.module: [float(draft), float(full)]}
        self.writer.store("head", {spec.module: packed}, {"errors": errors})
        self._report("head", str(bits), errors, started)

    def _factor(self, hessian: torch.Tensor, group: Sequence[TensorSpec]) -> Factor:
        from twobit.quant.rounding import prepare

        names = ", ".join(spec.module for spec in group)
        try:
            factor = prepare(hessian, DAMPING)
        except CalibrationError as error:
            raise CalibrationError(f"{names}: {error}", error.hint) from error
        if factor.note:
            self.progress.warning(f"{names}: {factor.note}")
        return factor

    def _round(self, spec: TensorSpec, weight: torch.Tensor, factor: Factor, bits: Bits) -> Rounded:
        from twobit.quant.rounding import round_matrix

        try:
            return round_matrix(
                weight,
                factor,
                draft_bits=bits.draft,
                residual_bits=bits.residual,
                residual_group=bits.group,
                threads=self.options.threads,
            )
        except CheckpointError as error:
            raise CheckpointError(f"{spec.name}: {error}", error.hint) from error

    def _report(self, what: str, bits: str, errors: Mapping[str, list[float]], started: float) -> None:
        draft = math.sqrt(sum(d * d for d, _ in errors.values()) / len(errors))
        full = math.sqrt(sum(f * f for _, f in errors.values()) / len(errors))
        seconds = time.monotonic() - started
        self.progress.line(f"{what:<12} {bits:<8} error: draft {draft:.3f}, full {full:.5f}   {seconds:.1f} s")


def _float64() -> Any:
    import torch

    return torch.float64


def _pack(rounded: Rounded, bits: Bits, name: str) -> PackedTensor:
    return PackedTensor.matrix(rounded, wide=bits.wide, name=name)
