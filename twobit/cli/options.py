"""Options that commands share, and checks of their values: one that makes no sense is a UsageError."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from twobit.cli.command import Argument, Option
from twobit.errors import UsageError, impossible

if TYPE_CHECKING:
    from twobit.runtime.model import Model
    from twobit.runtime.sampling import Sampling
    from twobit.runtime.session import Session

DEVICES = ("auto", "cpu", "opencl", "cuda")
DEFAULT_CONTEXT = 8192  # positions; the cache grows with use, this only bounds it
DEFAULT_ROOM = 1024  # tokens of answer that a long prompt leaves room for
MAX_THREADS = 1024
MAX_DRAFT = 63
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1
MAX_VALUE = 1e6  # of temperatures, penalties and biases: far beyond use, far from overflow

ModelName = Annotated[str, Argument(metavar="MODEL", help="Model folder, or a Hub id: user/model[@revision]")]
SystemMessage = Annotated[str | None, Option("-s", "--system", metavar="SYSTEM", help="System message")]
Temperature = Annotated[
    float | None,
    Option("--temp", metavar="T", help="Temperature; 0 is greedy [0, or 1 with --top-k, --top-p or --min-p]"),
]
TopK = Annotated[int | None, Option("--top-k", metavar="K", help="Keep the K likeliest [0: all]")]
TopP = Annotated[float | None, Option("--top-p", metavar="P", help="Keep the likeliest that sum to P [1: all]")]
MinP = Annotated[
    float | None, Option("--min-p", metavar="P", help="Keep those at least P times the likeliest [0: all]")
]
Threads = Annotated[int | None, Option("-t", "--threads", metavar="THREADS", help="Threads [one per usable core]")]
Device = Annotated[str, Option("--device", metavar="|".join(DEVICES), help="Where to run [auto: a GPU, else the CPU]")]
Vram = Annotated[str | None, Option("--vram", metavar="SIZE", help="Most GPU memory to take [all of it]")]
GpuResidualLayers = Annotated[
    str,
    Option("--gpu-residual-layers", metavar="N|auto", help="Layers whose residual is in GPU memory too [auto]"),
]
Mlock = Annotated[bool, Option("--mlock", help="Keep the weights in RAM")]

_HUB_ID = re.compile(r"([\w][\w.-]*/[\w][\w.-]*)(?:@([\w./-]+))?", re.ASCII)


def model_folder(model: str, *, quiet: bool = False, draft_only: bool = False) -> Path:
    """The folder of MODEL: a local one, or a Hub id `user/model[@revision]`, downloaded into the Hub's cache where it
    is not there yet; of a download with `draft_only` just the 2-bit part."""
    found = local_or_hub(model)
    if isinstance(found, Path):
        return found

    from twobit import hub
    from twobit.cli.progress import Bars, quiet_libraries

    bars = Bars(quiet=quiet, unit="B")
    quiet_libraries(quiet)
    try:
        return hub.download(*found, draft_only=draft_only, progress=bars)
    finally:
        bars.close()


def text_files(name: str, files: Sequence[str] | None) -> tuple[Path, ...]:
    """The files of an option that may repeat, there and readable: told before any work, not after minutes."""
    paths = tuple(local(file, name) for file in files or ())
    for path in paths:
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "no such file"
            raise UsageError(f"{name} {path}: {what}", "give a file of UTF-8 text")
        path.open("rb").close()
    return paths


def checkpoint_folder(source: str, *, quiet: bool = False) -> Path:
    """The folder of a full-precision checkpoint; one that is named by a Hub id is downloaded into the Hub's cache."""
    path = local(source, "SRC")
    found = None if os.path.lexists(path) else hub_id(source)
    if found is None:
        return path

    from twobit import hub
    from twobit.cli.progress import quiet_libraries

    quiet_libraries(quiet)
    return hub.checkpoint(*found)


def local_or_hub(model: str) -> Path | tuple[str, str | None]:
    """MODEL: a folder, or (repository, revision) of a Hub id `user/model[@revision]`."""
    path = local(model, "MODEL")
    if path.is_dir():
        return path
    if path.exists():
        raise UsageError(f"{model} is a file", "give the folder that holds the model")
    found = hub_id(model)
    if found is None:
        raise UsageError(f"{model}: no such folder", "give a model folder, or a Hub id such as user/model")
    return found


def local(text: str, name: str) -> Path:
    """The path that `text`, the value of `name`, says; an empty one, of a variable that is not set, is none."""
    if not text:
        raise impossible(name, text, "a path that is not empty")
    try:
        path = Path(text).expanduser()
        if "\0" in text:
            raise ValueError("a path holds no NUL")
    except (RuntimeError, ValueError) as error:  # no such user's home; a NUL
        raise UsageError(f"{name} {text}: {error}") from error
    return path


def hub_id(name: str) -> tuple[str, str | None] | None:
    """(repository, revision) of a Hub id `user/model[@revision]`; None for what looks like a path."""
    match = _HUB_ID.fullmatch(name)
    parent = Path(name).parent
    return None if match is None or (parent.is_dir() and str(parent) != ".") else (match[1], match[2])


def hub_name(name: str, value: str) -> str:
    """A repository's name: user/name, or name alone."""
    if not re.fullmatch(r"([\w][\w.-]*/)?[\w][\w.-]*", value, re.ASCII) or ".." in value or "--" in value:
        raise impossible(name, value, "a Hub id such as user/model")
    return value


def prompt_text(prompt: str, *, raw: bool) -> str:
    """PROMPT, or all of standard input for "-". Of a chat's standard input one newline at the end is left out, as a
    shell does with $(...); --raw takes every byte."""
    if prompt != "-":
        text = prompt
    else:
        if sys.stdin is None:
            raise UsageError("standard input is closed", "give PROMPT as an argument")
        try:
            data = sys.stdin.buffer.read()
        except OSError as error:
            raise UsageError(f"standard input cannot be read: {error.strerror}") from error
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not UTF-8 (byte {error.start})") from error
        if not raw:
            text = text.removesuffix("\n").removesuffix("\r")
    return unicode_text("PROMPT", text)


def unicode_text(name: str, text: str) -> str:
    """`text`, refused where it came from bytes that were not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} is not valid UTF-8 (character {error.start})") from error
    return text


def number(name: str, value: float, low: float, high: float, *, above: bool = False) -> float:
    """`value`, if it is a number from low (above: greater than low) to high; NaN and infinities never are."""
    if math.isfinite(value) and (low < value if above else low <= value) and value <= high:
        return value
    bounds = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
    raise impossible(name, f"{value:g}", bounds)


def integer(name: str, value: int, low: int, high: int | None = None) -> int:
    """`value`, if it lies from low to high."""
    if value >= low and (high is None or value <= high):
        return value
    bounds = f"{low} or more" if high is None else f"from {low} to {high}"
    raise impossible(name, value, bounds)


def size(name: str, text: str) -> int:
    """Bytes of `24GB`, `24GiB`, `500MB` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?", text.strip().lower(), re.ASCII)
    unit = "" if match is None else match[2]
    if match is None or (match[3] and not unit) or float(match[1]) > 1e15:
        raise impossible(name, text, "a size such as 24GB or 24GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index(unit or " "))


@dataclass(frozen=True)
class Where:
    """--device, --vram in bytes, --gpu-residual-layers, -t and --mlock, checked; None: all there is."""

    device: str
    vram: int | None
    residual_layers: int | None
    threads: int | None
    mlock: bool


def where(name: str, vram: str | None, layers: str, count: int | None, mlock: bool) -> Where:
    """Where a model shall run; UsageError where that makes no sense."""
    if name not in DEVICES:
        raise impossible("--device", name, f"{', '.join(DEVICES[:-1])} or {DEVICES[-1]}")
    if name == "cpu" and (vram is not None or layers != "auto"):
        raise UsageError("--device cpu has no use for --vram and --gpu-residual-layers")
    most = None if vram is None else size("--vram", vram)
    return Where(name, most, residual_layers(layers), threads(count), mlock)


def residual_layers(text: str) -> int | None:
    """--gpu-residual-layers; None for auto."""
    if text == "auto":
        return None
    if not (text.isascii() and text.isdecimal()):
        raise impossible("--gpu-residual-layers", text, "a number of layers, or auto")
    return min(int(text[:20]), 2**31 - 1)


def session(model: Model, where: Where, context: int) -> tuple[Session, str]:
    """The model put where it shall run, and a session of `context` positions on it; and the kind of device that is."""
    from twobit.runtime.session import Session

    kind = place(model, where, context)
    if where.mlock:
        model.lock()
    return Session(model, context, where.threads), kind


def place(model: Model, where: Where, context: int) -> str:
    """Puts the model where it shall run, for sessions of `context` positions; the kind of device that is. With auto
    anything that is in the way means the CPU, and a warning unless there simply is no GPU."""
    from twobit.cli import output
    from twobit.errors import RuntimeFailure
    from twobit.runtime import device as devices

    try:
        found, trouble = devices.find(where.device)
        if found is not None:
            devices.place(model, found, context, vram=where.vram, residual_layers=where.residual_layers)
            return found.kind
    except RuntimeFailure as error:
        if where.device != "auto":
            raise
        trouble = str(error)
    if trouble:
        output.warn(f"running on the CPU alone: {trouble}")
    return "cpu"


def threads(count: int | None) -> int | None:
    """-t; None: one per usable core, and never more: that would only be slower."""
    from twobit.runtime.lib import default_threads

    return None if count is None else min(integer("-t", count, 1, MAX_THREADS), default_threads())


def logit_bias(items: Sequence[str]) -> dict[int, float]:
    """--logit-bias ID=X, several times."""
    biases: dict[int, float] = {}
    for item in items:
        token, found, value = item.partition("=")
        try:
            key, bias = int(token), float(value)
        except ValueError:
            found = ""
        if not found:
            raise impossible("--logit-bias", item, "ID=X, as in 13=-5")
        biases[integer("--logit-bias ID", key, 0, 2**31 - 1)] = number("--logit-bias X", bias, -MAX_VALUE, MAX_VALUE)
    return biases


def sampling(
    *,
    temp: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    repeat_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    repeat_last_n: int,
    seed: int,
    bias: Sequence[str],
) -> Sampling:
    """The sampler's parameters, checked. Without --temp a model decodes greedily, unless one of --top-k, --top-p and
    --min-p asks for sampling: then the temperature is 1."""
    if temp is not None:
        number("--temp", temp, 0, MAX_VALUE)
    if top_k is not None:
        integer("--top-k", top_k, 0)
    if top_p is not None:
        number("--top-p", top_p, 0, 1, above=True)
    if min_p is not None:
        number("--min-p", min_p, 0, 1)
    number("--repeat-penalty", repeat_penalty, 1e-3, 1e3)
    number("--presence-penalty", presence_penalty, -MAX_VALUE, MAX_VALUE)
    number("--frequency-penalty", frequency_penalty, -MAX_VALUE, MAX_VALUE)
    integer("--repeat-last-n", repeat_last_n, -1, 2**31 - 1)
    integer("--seed", seed, 0, MAX_SEED)
    biases = logit_bias(bias)

    from twobit.runtime.sampling import Sampling

    filtered = any(value is not None for value in (top_k, top_p, min_p))
    return Sampling(
        temperature=temp if temp is not None else 1.0 if filtered else 0.0,
        top_k=min(top_k or 0, 2**31 - 1),
        top_p=1.0 if top_p is None else top_p,
        min_p=min_p or 0.0,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repeat_last_n=repeat_last_n,
        seed=seed,
        logit_bias=biases,
    )


def context(asked: int | None, longest: int, prompt: int, new: int | None) -> int:
    """Positions of the context: --ctx where given; else what the prompt and -n need, at least DEFAULT_CONTEXT and at
    most what the model was made for. Memory follows what is used."""
    if asked is not None:
        integer("--ctx", asked, 1)
        if asked > longest:
            raise UsageError(f"--ctx {asked} is not possible: this model has {longest} positions")
        return asked
    return min(longest, max(DEFAULT_CONTEXT, prompt + (DEFAULT_ROOM if new is None else new)))
