"""From a checkpoint to a twobit model: layer by layer, resumable, the same bytes whatever the number of threads.

One layer is in memory at a time (`twobit.quant.plan.memory_bytes` is the bound); the hidden states of the calibration
tokens lie in files (`twobit.quant.states`), from which a killed run goes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twobit import card
from twobit.architecture import TensorSpec
from twobit.errors import CalibrationError, CheckpointError, RuntimeFailure, TwobitError, UsageError
from twobit.format import layout
from twobit.format.manifest import TensorEntry, canonical_json
from twobit.format.writer import OUTPUT_NAME, SPILL_NAME, ModelWriter, PackedTensor, check_space, staging_path
from twobit.memory import peak_memory
from twobit.progress import Progress
from twobit.quant import allocate, calibrate, plan
from twobit.quant.plan import Options
from twobit.quant.recipe import Bits, Recipe
from twobit.quant.states import States

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from twobit.format.manifest import Manifest
    from twobit.quant.rounding import Factor, Rounded
    from twobit.quant.source import Checkpoint

DAMPING = 0.3  # of the Hessian's mean diagonal, and
SPARSE_DAMPING = 2.0  # times columns over tokens: what a sum over few tokens says of many columns is mostly chance
ALGORITHM = 3  # counts what changes codes and is not an option: an unfinished run of another one does not go on
PULL_DAMPING = 1.0  # of the mean diagonal, where the draft's targets are fitted
ROW_STEP = 64  # planes of row chunks concatenate at multiples of this
TEMPLATE_SECONDS = 60.0  # by the clock, per chat of the calibration text: a busy machine is no reason to stop
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
Targets = Callable[["torch.Tensor"], "torch.Tensor"]


def quantize(
    source: Path,
    output: Path,
    options: Options | None = None,
    progress: Progress | None = None,
    siblings: Sequence[tuple[Path, Recipe]] = (),
) -> dict[str, Any]:
    """Makes a twobit model at `output` from the checkpoint at `source`; returns the object of `quantize --json`.

    A run that stopped goes on where it was when called again with the same source and options. TwobitError where
    anything is refused; then nothing is written. The source is only read.

    siblings: further models of the same source, with the same draft and another residual, made by the same pass over
    the calibration text; each has the bytes that a run of its own would give it. Memory and room are foretold as for
    one; after a stop between the publishing of one and the next, those that are there must be left out.
    """
    options, progress = options or Options(), progress or Progress()
    started = time.monotonic()
    if siblings and (options.draft_bpw is not None or any(r.rules != options.recipe.rules for _, r in siblings)):
        raise ValueError("siblings with other rules, or with a budget for the draft")
    asked = [(output, options), *((path, replace(options, recipe=recipe)) for path, recipe in siblings)]
    checkpoint = plan.open_source(source, output, options)
    taken = [output, staging_path(output)]
    for path, other in asked[1:]:
        plan.open_source(source, path, other)
        for mine in (path, staging_path(path)):
            if (both := next((t for t in taken if _one_in_the_other(mine, t)), None)) is not None:
                raise UsageError(f"{mine} lies in {both}, or the other way round", "choose folders beside each other")
        taken += [path, staging_path(path)]
    architecture, files = checkpoint.architecture, _files(checkpoint)
    for note in checkpoint.notes:
        progress.line(note)
    for warning in [*checkpoint.warnings, *_tokenizer_warnings(checkpoint)]:
        progress.warning(warning)
    expected_ram = plan.memory_bytes(architecture, options.calib_tokens, options.threads)
    if expected_ram > (free := plan.available_memory()):
        progress.warning(
            f"this needs about {expected_ram / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are available: "
            "the system may end it"
        )
    size, spill = plan.sizes(checkpoint, options), _spill_folder(output, options)
    scratch = plan.spilled_bytes(architecture, options.calib_tokens)
    needed = [plan.sizes(checkpoint, other) for _, other in asked]
    check_space(output, sum(each["draft_bytes"] + each["residual_bytes"] for each in needed), scratch, spill)
    calibration = _calibration(checkpoint, options)
    progress.line(
        f"calibration: {len(calibration.sequences)} of {calibration.requested} sequences, "
        f"{calibration.tokens:,} tokens ({calibration.source})"
    )
    widest = max(spec.shape[1] for spec in architecture.tensors() if spec.role == "linear")
    if calibration.tokens < widest:
        progress.warning(
            f"{calibration.tokens:,} tokens to calibrate on, and the widest matrix has {widest:,} columns: "
            "the model will be worse than it could be; give more text"
        )
    progress.stage("checking the weights", sum(header.size for header in checkpoint.shards.values()))
    weights = checkpoint.fingerprint(progress.advance)
    fingerprints = [_fingerprint(weights, calibration, other) for _, other in asked]
    with (
        _memory_errors(expected_ram),
        ExitStack() as writers,
        calibrate.one_torch_thread(options.threads) as pool,
    ):
        outputs = [
            _Output(ModelWriter(path, of, restart=options.restart, overwrite=options.overwrite), other)
            for (path, other), of in zip(asked, fingerprints, strict=True)
        ]
        for made in outputs:
            writers.enter_context(made.writer)
        owner = hashlib.sha256(canonical_json(fingerprints[0])).hexdigest()
        lengths = [len(sequence) for sequence in calibration.sequences]
        states = States(spill, owner, lengths, 2 * architecture.hidden)
        keys = _Run(checkpoint, calibration, options, progress, outputs, pool, states).all_steps()
        checkpoint.check_unchanged()
        progress.stage("writing", len(outputs))
        for made in outputs:
            recipe = plan.recipe_json(made.options, made.recipe)
            recipe |= {"damping": DAMPING, "sparse_damping": SPARSE_DAMPING}
            recipe |= {"pull_damping": PULL_DAMPING, "pull": calibrate.PULL, "errors": made.mean_errors()}
            made.manifest = made.writer.finish(
                keys,
                config=checkpoint.config,
                family=architecture.family,
                parameters=size["parameters"],
                recipe=recipe,
                calibration=calibration.to_json(),
                producer=_producer(),
                files=files,
            )
            progress.advance(1)
        manifest = outputs[0].manifest
        assert manifest is not None
    return {
        "output": str(output),
        "build_id": manifest.build_id,
        **manifest.bits(),
        "seconds": round(time.monotonic() - started, 3),
        "peak_ram_bytes": peak_memory(),
        "expected_ram_bytes": expected_ram,
        "calibration": calibration.to_json(),
        "errors": outputs[0].mean_errors(),
    }


def _one_in_the_other(a: Path, b: Path) -> bool:
    a, b = Path(os.path.abspath(a)), Path(os.path.abspath(b))
    return a.is_relative_to(b) or b.is_relative_to(a)


# -- before the work ----------------------------------------------------------------------------------------


def _spill_folder(output: Path, options: Options) -> Path:
    """Where the hidden states lie: in the unfinished output, or in a folder of their own under --spill-dir."""
    if options.spill is None:
        return staging_path(output) / SPILL_NAME
    mark = hashlib.sha256(os.path.abspath(output).encode()).hexdigest()[:16]
    return options.spill / f"twobit-{mark}"


def _tokenizer_warnings(checkpoint: Checkpoint) -> list[str]:
    from twobit.quant.source import check_tokenizer_ids

    return check_tokenizer_ids(checkpoint.folder, checkpoint.architecture.vocab)


def _render(checkpoint: Checkpoint) -> calibrate.Render | None:
    """The source's chat template; None where it has none that works."""
    from twobit.runtime.chat_template import ChatTemplate, find_template

    file = checkpoint.folder / "tokenizer_config.json"
    try:
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None  # a pipe would never end
        text = find_template(checkpoint.folder, settings) if isinstance(settings, dict) else None
    except (OSError, ValueError, RecursionError, TwobitError):
        return None
    if text is None or not isinstance(settings, dict):
        return None
    names = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            names[key] = value
    template = ChatTemplate(text, names, seconds=TEMPLATE_SECONDS)
    return lambda messages: template.render(messages, add_generation_prompt=False)


def _calibration(checkpoint: Checkpoint, options: Options) -> calibrate.Calibration:
    documents = calibrate.load_files(options.calib) if options.calib else calibrate.load_default()
    names = (path.name.encode("utf-8", "backslashreplace").decode() for path in options.calib)
    source = ", ".join(names) or "the package's text"
    encode = calibrate.Encoder(
        checkpoint.folder, checkpoint.architecture.vocab, None if options.calib else _render(checkpoint)
    )
    length = min(calibrate.SEQUENCE, checkpoint.architecture.max_context)
    return calibrate.sequences(
        documents, encode, tokens=options.calib_tokens, source=source, seed=options.seed, length=length
    )


def _fingerprint(weights: str, calibration: calibrate.Calibration, options: Options) -> dict[str, Any]:
    """All that decides the bytes of the model, apart from the files that are copied."""
    return {
        "producer": _producer(),
        "source": weights,
        "algorithm": {
            "version": ALGORITHM,
            "damping": DAMPING,
            "sparse_damping": SPARSE_DAMPING,
            "pull_damping": PULL_DAMPING,
            "pull": calibrate.PULL,
        },
        "options": {
            "residual": options.recipe.residual,
            "residual_group": options.recipe.residual_group,
            "rules": [str(rule) for rule in options.recipe.rules],
            "draft_bpw": options.draft_bpw,
            "calib_tokens": options.calib_tokens,
            "seed": options.seed,
            "device": options.device,
        },
        "calibration": calibration.to_json(),
    }


def damping(columns: int, tokens: int) -> float:
    """Damping of the rounding, in mean diagonals of a Hessian [columns, columns] of so many tokens."""
    return DAMPING + SPARSE_DAMPING * columns / tokens


def _producer() -> str:
    try:
        return f"twobit {metadata.version('twobit')}"
    except metadata.PackageNotFoundError:
        return "twobit"


def _files(checkpoint: Checkpoint) -> dict[str, bytes | Path]:
    """Tokenizer, chat template, generation settings and licence, as they are; and what a model card takes from the
    source's. A licence under a name that a model cannot hold is left out, with a warning."""
    from twobit.quant.source import plain_file

    kinds = tuple(kind.upper() for kind in LICENCES)
    names = [name for name in os.listdir(checkpoint.folder) if name.upper().startswith(kinds)]
    for name in [name for name in names if not OUTPUT_NAME.fullmatch(name)]:
        names.remove(name)
        checkpoint.warnings.append(f"left out {name!a}: a model holds no file of such a name; copy it yourself")
    found = {name: plain_file(checkpoint.folder, name) for name in (*COPIED, *sorted(names))}
    files: dict[str, bytes | Path] = {n: path for n, path in found.items() if path is not None and path.is_file()}
    if readme := card.of_source(checkpoint.folder):
        files[card.README] = readme.encode()
    return files


@contextmanager
def _memory_errors(expected: int) -> Iterator[None]:
    """Turns a failed allocation, of Python or of torch, into one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise RuntimeFailure(
            f"out of memory: this model needs about {expected / 1e9:.1f} GB",
            "close other programs or use a larger machine; run the same command again to go on",
        ) from error


# -- the work -----------------------------------------------------------------------------------------------


@dataclass
class _Output:
    """A model that a run makes."""

    writer: ModelWriter
    options: Options
    recipe: Recipe = field(init=False)
    errors: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # by key and module: draft, full
    manifest: Manifest | None = None

    def __post_init__(self) -> None:
        self.recipe = self.options.recipe

    def mean_errors(self) -> dict[str, Any]:
        """Mean relative errors in the metric of the calibration inputs, for linears and head."""
        groups: dict[str, list[list[float]]] = {"linear": [], "head": []}
        for key, errors in self.errors.items():
            groups["head" if key == "head" else "linear"] += errors.values()
        return {
            name: {
                "draft": round(sum(d for d, _ in values) / len(values), 6),
                "full": round(sum(f for _, f in values) / len(values), 8),
            }
            for name, values in groups.items()
            if values
        }


class _Run:
    """The steps of one run, each stored under its key as soon as it is done."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        calibration: calibrate.Calibration,
        options: Options,
        progress: Progress,
        outputs: Sequence[_Output],
        pool: ThreadPoolExecutor,
        states: States,
    ) -> None:
        """outputs: that of `options` first; all have its draft."""
        self.checkpoint = checkpoint
        self.calibration = calibration
        self.options = options
        self.progress = progress
        self.outputs = outputs
        self.pool = pool
        self.states = states
        self.architecture = checkpoint.architecture
        self.specs = self.architecture.tensors()

    def all_steps(self) -> list[str]:
        """Does what is not stored yet; returns the keys in model order."""
        layers = [f"layer-{layer.index:05d}" for layer in self.architecture.layers]
        keys = ["embedding"] * (not self.architecture.tied) + [*layers, "norm", "head"]
        done = sum(map(self._has, keys))
        if done:
            self.progress.line(f"going on with an unfinished run: {done} of {len(keys)} parts are done")
        if self.options.draft_bpw is not None:
            self._allocate(self.options.draft_bpw)
        if not self.architecture.tied and not self._has("embedding"):
            self._embedding()
        if not self._has("norm"):
            (norm,) = (s for s in self.specs if s.part == "final_norm")
            self._store("norm", {norm.name: self._plain(norm)})
        if not all(map(self._has, (*layers, "head"))):
            self._layers(layers)
        self.states.remove()
        for output in self.outputs:
            notes = {key: output.writer.notes(key) for key in keys}
            output.errors = {key: note["errors"] for key, note in notes.items() if note}
        return keys

    def _has(self, key: str) -> bool:
        return all(output.writer.has(key) for output in self.outputs)

    def _store(self, key: str, tensors: dict[str, PackedTensor]) -> None:
        """What is the same in all outputs."""
        for output in self.outputs:
            if not output.writer.has(key):
                output.writer.store(key, tensors)

    def _allocate(self, budget: float) -> None:
        """Chooses the linears that get 3-bit codes; what was measured is stored: a resumed run chooses the same."""
        (output,) = self.outputs
        if not output.writer.has("sensitivity"):
            self.progress.stage("allocating bits", len(self.architecture.layers))
            sample, left = [], allocate.TOKENS
            for sequence in self.calibration.sequences:
                if left > 0:
                    sample.append(sequence)
                    left -= len(sequence)
            part = replace(self.calibration, sequences=tuple(sample))
            states = self.states.of("sample", [len(sequence) for sequence in sample])
            states.resume(0)
            calibrate.Activations(self.checkpoint, part, self.pool, states)
            inputs = [states.read(i)[:, : self.architecture.hidden].clone() for i in range(len(sample))]
            found = allocate.measure(self.checkpoint, inputs, self.pool, self.options.device, self.progress.advance)
            output.writer.store("sensitivity", {}, found)
        output.recipe = allocate.choose(self.architecture, output.recipe, budget, output.writer.notes("sensitivity"))
        count = len(output.recipe.rules) - len(self.options.recipe.rules)
        linears = sum(spec.role == "linear" for spec in self.specs)
        self.progress.line(f"3-bit codes in {count} of {linears} linears: at most {budget:g} draft bits per weight")

    def _plain(self, spec: TensorSpec) -> PackedTensor:
        dtype, raw = self.checkpoint.read_raw(spec)
        return PackedTensor.plain(raw, dtype, spec.shape)

    def _row_chunks(self, spec: TensorSpec) -> Iterator[torch.Tensor]:
        rows, cols = spec.shape
        step = max(1, plan.CHUNK_WEIGHTS // (ROW_STEP * cols)) * ROW_STEP
        for first in range(0, rows, step):
            yield self.checkpoint.read(spec, (first, min(first + step, rows)))

    def _embedding(self) -> None:
        (spec,) = (s for s in self.specs if s.role == "embedding")
        rows, cols = spec.shape

        def packed(first: int = 0) -> Iterator[dict[str, np.ndarray]]:
            for weight in self._row_chunks(spec):
                most = weight.abs().amax(1)
                if float(most.max()) > layout.EMBEDDING_MOST:
                    raise CheckpointError(
                        f"{spec.name}: row {first + int(most.argmax())} holds a value of {float(most.max()):.2g}, "
                        f"more than the {layout.EMBEDDING_MOST:.2g} of an embedding",
                        "the weights are damaged: download them again",
                    )
                yield layout.pack_embedding(weight.numpy())
                first += len(weight)

        planes = _joined(packed())
        self._store("embedding", {spec.module: PackedTensor(TensorEntry("embedding", (rows, cols), {}), planes)})

    def _layers(self, keys: Sequence[str]) -> None:
        missing = [i for i, key in enumerate((*keys, "head")) if not self._has(key)]
        tokens, end = self.calibration.tokens, len(keys)
        self.progress.stage("quantizing", tokens * (end + 1))
        if self.states.resume(missing[0]):
            self.progress.advance(tokens * self.states.layer)
        inputs = calibrate.Activations(
            self.checkpoint, self.calibration, self.pool, self.states, self.progress.advance, self.options.device
        )
        for index in range(self.states.layer, min(end, missing[-1] + 1)):
            started = time.monotonic()
            specs = [s for s in self.specs if s.layer == index]
            weights = {s.name: self.checkpoint.read(s) for s in specs}
            on_device = {name: weight.to(self.options.device) for name, weight in weights.items()}
            self._layer(keys[index], index, specs, weights, on_device, inputs, started)
        if end in missing:
            self._head(inputs)
        self.progress.advance(tokens)

    def _layer(
        self,
        key: str,
        index: int,
        specs: Sequence[TensorSpec],
        weights: dict[str, torch.Tensor],
        on_device: dict[str, torch.Tensor],
        inputs: calibrate.Activations,
        started: float,
    ) -> None:
        """Sends the states through a layer and stores it where it is not stored already."""
        missing = [output for output in self.outputs if not output.writer.has(key)]
        packed: list[dict[str, PackedTensor]] = [{} for _ in missing]
        errors: list[dict[str, list[float]]] = [{} for _ in missing]

        def choose(part: str, statistics: calibrate.Statistics) -> dict[str, torch.Tensor]:
            from twobit.quant.rounding import draft_weights

            group = [s for s in specs if s.role == "linear" and calibrate.SHARED[s.part] == part]
            hessian, drafts = statistics.hessian, {}
            target = self._target(statistics)
            wanted = {spec.name: target(weights[spec.name]) for spec in group}
            del target  # as large as a Hessian
            factor = self._factor(hessian, group)
            for spec in group:
                draft = self._draft(spec, wanted.pop(spec.name), factor)
                drafts[spec.name] = draft_weights(draft)
                for output, tensors, wrong in zip(missing, packed, errors, strict=True):
                    bits = output.recipe.bits(spec.module, spec.role)
                    rounded = self._residual(spec, weights[spec.name], factor, draft, bits)
                    tensors[spec.module] = PackedTensor.matrix(rounded, wide=bits.wide, name=spec.module)
                    wrong[spec.module] = [rounded.draft_error, rounded.full_error]
            return drafts

        inputs.layer(index, on_device, choose)
        order = {s.module if s.role == "linear" else s.name: i for i, s in enumerate(specs)}
        for output, tensors, wrong in zip(missing, packed, errors, strict=True):
            tensors |= {spec.name: self._plain(spec) for spec in specs if spec.role != "linear"}
            tensors = dict(sorted(tensors.items(), key=lambda item: order[item[0]]))
            output.writer.store(key, tensors, {"errors": wrong})
            kinds = ", ".join(sorted({str(output.recipe.bits(name, "linear")) for name in wrong}))
            self._report(f"layer {index + 1}/{len(self.architecture.layers)}", kinds, wrong, started)

    def _head(self, inputs: calibrate.Activations) -> None:
        started = time.monotonic()
        (norm,) = (s for s in self.specs if s.part == "final_norm")
        (spec,) = (s for s in self.specs if s.role == "head")
        statistics = inputs.head(self.checkpoint.read(norm).to(self.options.device))
        target, factor = self._target(statistics), self._factor(statistics.hessian, [spec])
        missing = [output for output in self.outputs if not output.writer.has("head")]
        kinds = [output.recipe.bits(spec.module, spec.role) for output in missing]
        energy = np.zeros((len(missing), 3))
        parts: list[list[dict[str, np.ndarray]]] = [[] for _ in missing]
        for weight in self._row_chunks(spec):
            own, draft = _energy(weight), self._draft(spec, target(weight), factor)
            for i, bits in enumerate(kinds):
                rounded = self._residual(spec, weight, factor, draft, bits)
                energy[i] += own * np.array([rounded.draft_error**2, rounded.full_error**2, 1.0])
                layout.check_rows(
                    spec.module, rounded.row_scale, rounded.row_a, rounded.row_b, bits.draft, bits.residual, bits.wide
                )
                parts[i].append(layout.pack(rounded))
        rows, cols = spec.shape
        for i, (output, bits) in enumerate(zip(missing, kinds, strict=True)):
            planes, parts[i] = _joined(iter(parts[i])), []
            packed = PackedTensor.from_planes(
                planes, (rows, cols), bits.draft, bits.residual, bits.group, wide=bits.wide
            )
            draft_error, full = np.sqrt(energy[i, :2] / max(energy[i, 2], 1e-300))
            errors = {spec.module: [float(draft_error), float(full)]}
            output.writer.store("head", {spec.module: packed}, {"errors": errors})
            self._report("head", str(bits), errors, started)

    def _factor(self, hessian: torch.Tensor, group: Sequence[TensorSpec]) -> Factor:
        from twobit.quant.rounding import prepare

        names = ", ".join(spec.module for spec in group)
        try:
            factor = prepare(hessian, damping(len(hessian), self.calibration.tokens), self.pool)
        except CalibrationError as error:
            raise CalibrationError(f"{names}: {error}", error.hint) from error
        if factor.note:
            self.progress.warning(f"{names}: {factor.note}")
        return factor

    def _target(self, statistics: calibrate.Statistics) -> Targets:
        """What a weight's draft should come close to."""
        from twobit.quant.rounding import targets

        return targets(statistics.hessian, statistics.cross, statistics.outputs, PULL_DAMPING, self.pool)

    def _draft(self, spec: TensorSpec, target: torch.Tensor, factor: Factor) -> Rounded:
        from twobit.quant.rounding import round_draft

        bits = self.outputs[0].recipe.bits(spec.module, spec.role)
        try:
            return round_draft(target, factor, draft_bits=bits.draft, threads=self.options.threads)
        except CheckpointError as error:
            raise CheckpointError(f"{spec.name}: {error}", error.hint) from error

    def _residual(self, spec: TensorSpec, weight: torch.Tensor, factor: Factor, draft: Rounded, bits: Bits) -> Rounded:
        """From the draft to the weight."""
        from twobit.quant.rounding import round_matrix

        return round_matrix(
            weight,
            factor,
            draft_bits=bits.draft,
            residual_bits=bits.residual,
            residual_group=bits.group,
            threads=self.options.threads,
            draft=draft,
        )

    def _report(self, what: str, bits: str, errors: Mapping[str, list[float]], started: float) -> None:
        draft = math.sqrt(sum(d * d for d, _ in errors.values()) / len(errors))
        full = math.sqrt(sum(f * f for _, f in errors.values()) / len(errors))
        seconds = time.monotonic() - started
        self.progress.line(f"{what:<12} {bits:<8} error: draft {draft:.3f}, full {full:.5f}   {seconds:.1f} s")


def _joined(chunks: Iterator[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Planes that were made by chunks of ROW_STEP rows, put together one at a time."""
    parts: dict[str, list[np.ndarray]] = {}
    for planes in chunks:
        for name, plane in planes.items():
            parts.setdefault(name, []).append(plane)
    return {name: np.concatenate(parts.pop(name)) for name in list(parts)}


def _energy(weight: torch.Tensor) -> float:
    """Sum of squares, of weights whose square is beyond fp32 too."""
    import torch

    found = float(weight.square().sum(dtype=torch.float64))
    return found if math.isfinite(found) else float(weight.double().square().sum())
