"""What a run of the quantizer would make and take, told before it starts: bits, bytes, memory, time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twobit.architecture import Architecture, TensorSpec
from twobit.errors import FormatError, RuntimeFailure, UsageError, impossible
from twobit.format.writer import check_config, check_output, check_replaceable, required_bytes, staging_path
from twobit.memory import address_space, cgroup_limit
from twobit.quant import allocate, calibrate
from twobit.quant.recipe import Recipe, entries
from twobit.quant.states import spill_bytes

if TYPE_CHECKING:
    from twobit.format.manifest import Manifest
    from twobit.quant.source import Checkpoint

DEVICES = ("cpu", "cuda")
BASE_MEMORY = 800_000_000  # bytes: interpreter, torch, tokenizer, read buffers
CHUNK_WEIGHTS = 1 << 22  # weights of a head or an embedding that are worked on at a time


@dataclass(frozen=True)
class Options:
    """What `twobit quantize` takes.

    draft_bpw: draft bits per weight of the linears that 3-bit codes may bring them to, None: no budget; calib: text
    files, empty for the package's own text; device: where torch computes, "cpu" or "cuda"; spill: folder for the hidden
    states, None for the unfinished output.
    """

    recipe: Recipe = field(default_factory=Recipe)
    draft_bpw: float | None = None
    calib: tuple[Path, ...] = ()
    calib_tokens: int = calibrate.DEFAULT_TOKENS
    seed: int = 0
    threads: int = 1
    device: str = "cpu"
    spill: Path | None = None
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
        if self.device not in DEVICES:
            raise impossible("--device", self.device, " or ".join(DEVICES))


@dataclass(frozen=True)
class Plan:
    """What a run would make and take: `quantize --dry-run`. seconds: by what takes them."""

    source: Path
    output: Path
    family: str
    bits: Mapping[str, Any]
    recipe: Mapping[str, Any]
    memory_bytes: int
    disk_bytes: int
    seconds: Mapping[str, float]
    calibration_tokens: int
    threads: int

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
            "threads": self.threads,
            "estimated_seconds": round(sum(self.seconds.values()), 1),
            "estimated_seconds_by_part": {part: round(value, 1) for part, value in self.seconds.items()},
        }


def plan(source: Path, output: Path, options: Options) -> Plan:
    """Bits, bytes, time and memory of a run, from headers alone. Raises what the run would refuse at once.

    The time comes from probes of a second or so on this machine (`twobit.quant.cost`).
    """
    from twobit.quant.cost import estimate
    from twobit.quant.source import check_tokenizer_ids

    if options.calib:
        calibrate.load_files(options.calib)
    checkpoint = open_source(source, output, options)
    architecture, bits = checkpoint.architecture, sizes(checkpoint, options)
    check_tokenizer_ids(checkpoint.folder, architecture.vocab)
    calibrate.Encoder(checkpoint.folder, architecture.vocab)
    return Plan(
        source=checkpoint.folder,
        output=output,
        family=architecture.family,
        bits=bits,
        recipe=recipe_json(options, options.recipe),
        memory_bytes=memory_bytes(architecture, options.calib_tokens, options.threads),
        disk_bytes=model_bytes(bits) + spilled_bytes(architecture, options.calib_tokens),
        seconds=estimate(checkpoint, options),
        calibration_tokens=options.calib_tokens,
        threads=options.threads,
    )


def open_source(source: Path, output: Path, options: Options) -> Checkpoint:
    """The checkpoint, with all checked that needs no weights: paths, headers, rules, device."""
    from twobit.quant.source import Checkpoint

    check_output(source, output)
    if options.spill is not None:
        check_output(source, options.spill / "x")
        for place in (output, staging_path(output)):
            if Path(os.path.realpath(options.spill)).is_relative_to(os.path.realpath(place)):
                raise UsageError(f"--spill-dir {options.spill} lies in the output {place}", "choose a folder beside it")
    checkpoint = Checkpoint.open(source)
    check_config(checkpoint.config, str(checkpoint.folder / "config.json"))
    options.recipe.check(spec.module for spec in matrices(checkpoint.architecture))
    if options.draft_bpw is not None:
        allocate.check(checkpoint.architecture, options.recipe, options.draft_bpw)
    if os.path.lexists(output):
        if not options.overwrite:
            way = "choose another output folder" + (", or pass --overwrite" if output.is_dir() else "")
            raise FormatError(f"{output} exists", way)
        check_replaceable(output)
    if options.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise RuntimeFailure(
                f"--device cuda: torch {torch.__version__} has no CUDA device here",
                "install a torch built for CUDA and its driver, or leave out --device cuda",
            )
    return checkpoint


def matrices(architecture: Architecture) -> Iterator[TensorSpec]:
    return (spec for spec in architecture.tensors() if spec.role in ("linear", "head"))


def manifest(checkpoint: Checkpoint, recipe: Recipe) -> Manifest:
    """What the model will hold, without checksums."""
    from twobit.format.manifest import Manifest

    architecture = checkpoint.architecture
    found = entries(architecture, recipe, checkpoint.dtype)
    specs = [s for s in architecture.tensors() if not (architecture.tied and s.role == "head")]
    return Manifest(architecture.family, sum(math.prod(s.shape) for s in specs), found)


def spilled_bytes(architecture: Architecture, tokens: int) -> int:
    """Scratch on disk: the states of verifier and draft, and a layer's scratch where it does not stay in memory."""
    scratch = calibrate.scratch_bytes(architecture, tokens)
    return spill_bytes(tokens, 2 * architecture.hidden) + (scratch if scratch > calibrate.SCRATCH_MEMORY else 0)


def sizes(checkpoint: Checkpoint, options: Options) -> dict[str, Any]:
    """Manifest.bits of the model; with a budget for the draft as if it were spent to the last bit."""
    architecture, bits = checkpoint.architecture, manifest(checkpoint, options.recipe).bits()
    if options.draft_bpw is not None:
        weights = sum(math.prod(s.shape) for s in architecture.tensors() if s.role == "linear")
        bits["draft_bytes"] += math.ceil((options.draft_bpw - bits["draft_bpw"]) * weights / 8)
        bits["draft_bpw"] = options.draft_bpw
    return bits


def model_bytes(bits: Mapping[str, Any]) -> int:
    """Free space that a run takes at its peak for a model of these sizes, hidden states apart."""
    return required_bytes(bits["draft_bytes"] + bits["residual_bytes"])


def recipe_json(options: Options, recipe: Recipe) -> dict[str, Any]:
    """What the manifest records of the recipe; `recipe` has the rules that the budget added."""
    return recipe.to_json() | ({} if options.draft_bpw is None else {"draft_bpw": options.draft_bpw})


def memory_bytes(architecture: Architecture, tokens: int, threads: int) -> int:
    """The bound on peak memory: BASE_MEMORY and the largest of these, whatever the depth of the model.

    - the first states: the embedding's rows in use, fp32;
    - a layer's pass: its weights in fp32 and those of the draft, the scratch of all tokens (in files past
      calibrate.SCRATCH_MEMORY), the sums of one group of its linears, the inputs of two chunks of tokens;
    - or, in the place of the inputs, a group's rounding: its targets, a factor of the Hessian and its root, the codes;
    - the head, or an untied embedding: its planes, twice while they are put together, and its Hessian's factor.
    """
    stages = [4 * min(tokens, architecture.vocab) * architecture.hidden]
    linears = [s for s in architecture.tensors() if s.role == "linear"]
    for layer in architecture.layers:
        groups: dict[str, list[TensorSpec]] = {}
        for spec in (s for s in linears if s.layer == layer.index):
            groups.setdefault(calibrate.SHARED[spec.part], []).append(spec)
        width = {part: group[0].shape[1] for part, group in groups.items()}
        weights = {part: sum(math.prod(s.shape) for s in group) for part, group in groups.items()}
        widest = max(architecture.hidden, layer.intermediate, layer.n_heads * layer.head_dim)
        passing = 4 * min(threads, calibrate.CHUNK_TOKENS // calibrate.SEQUENCE) * calibrate.SEQUENCE * 6 * widest
        scratch = calibrate.scratch_bytes(architecture, tokens)
        # true and draft weights, and the scratch; then what is packed
        kept = 8 * sum(weights.values()) + (scratch if scratch <= calibrate.SCRATCH_MEMORY else 0)
        packed = 0.0
        for part, group in groups.items():
            w = width[part]
            outputs = architecture.hidden if part in ("o", "down") else w
            sums = 4 * w * (w + outputs)
            chunk = 4 * (calibrate.CHUNK_TOKENS + calibrate.SEQUENCE) * 3 * (w + outputs)
            # what targets are fitted with is gone by then, and smaller: a root, and what is solved with it
            rounding = _factor_bytes(w) + 4 * weights[part] + 5 * max(math.prod(s.shape) for s in group)
            stages.append(int(kept + packed) + sums + max(chunk + passing, rounding))
            packed += 1.5 * weights[part]
    table = architecture.vocab * architecture.hidden
    stages.append(
        int(2.5 * table) + 4 * architecture.hidden**2 + _factor_bytes(architecture.hidden) + 12 * CHUNK_WEIGHTS
    )
    return BASE_MEMORY + max(stages)


def _factor_bytes(width: int) -> int:
    """The root of a Hessian (fp64 up to rounding.DOUBLE_COLUMNS), what LAPACK copies of it, and the factor in fp32."""
    from twobit.quant.rounding import DOUBLE_COLUMNS

    return (20 if width <= DOUBLE_COLUMNS else 12) * width * width


def available_memory() -> float:
    """Bytes that this process may still take, as far as the system says."""
    found = [math.inf]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found += [1024.0 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:")]
    except OSError:
        pass
    found += [float(limit) for limit in (cgroup_limit(), address_space()) if limit]
    return min(found)
