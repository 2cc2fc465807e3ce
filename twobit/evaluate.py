"""How close a model is to its reference, and how much of its draft is accepted: `twobit eval`.

Every variant is the same torch decoder in fp32 with other weights, on the same tokens. All variants go through a layer
together, one layer's weights in memory at a time, and the vocabulary is compared block by block, so the models may be
bigger than the memory: what is kept is a hidden state per token and variant, and the C runtime's logits in a temporary
file.

Variants: `full` and `draft` are the packed model's weights (the draft with the full model's embedding rows, as it
runs); `q8_0` and `q4_0` are llama.cpp's roundings of linears, head and embeddings; `..._int8` rounds the input of every
linear too, as its CPU path does; `floor` is the reference with its hidden and intermediate dimensions permuted: the
same model with its sums in another order.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from twobit.acceptance import (
    DRAFTED,
    TEMPERATURE,
    TREE,
    Block,
    Sample,
    acceptance,
    continued,
    summarize_blocks,
)
from twobit.errors import CheckpointError, RuntimeFailure, TokenizerError, UsageError, impossible
from twobit.progress import Progress
from twobit.quant import calibrate
from twobit.quant.source import Checkpoint
from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling
from twobit.runtime.session import Session
from twobit.runtime.tokenizer import COPY_AGAIN, Tokenizer
from twobit.variants import BASELINES, CHUNK_WEIGHTS, Variants, Weights, last_states

if TYPE_CHECKING:
    Array = NDArray[Any]

DEFAULT_TOKENS = 4096
KINDS = ("code", "prose", "chat")
_CLUSTER = 64  # consecutive tokens of a sequence that count as one draw where errors are estimated
_SEQUENCE = 512  # tokens of a piece of text
_TOKENS_PER_PROMPT = 96  # fewer prompts are used where --tokens would leave each less
_CHUNK_LOGITS = 1 << 21  # logits compared at a time
_HELD_LOGITS = 1 << 25  # reference logits in memory: all positions, a block of the vocabulary


@dataclass(frozen=True)
class Options:
    """text: UTF-8 files beside the bundled prompts. tokens: of continuations, and at most as many of `text`.
    acceptance: measure it too. threads: of torch and of the runtime."""

    text: tuple[Path, ...] = ()
    tokens: int = DEFAULT_TOKENS
    baselines: tuple[str, ...] = ("q8_0",)
    acceptance: bool = True
    threads: int = 1

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise impossible("--tokens", self.tokens, "1 or more")
        for name in self.baselines:
            if name not in BASELINES:
                raise impossible("--baseline", name, " or ".join(BASELINES))


# -- text ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """kind: one of KINDS. opening: what a model without a chat template continues; chats have none."""

    kind: str
    prompt: str
    opening: str | None = None

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt as the model is used: a chat turn where it has a template."""
        messages = [{"role": "user", "content": self.prompt}]
        if tokenizer.template is not None:
            return tokenizer.chat_ids(messages)
        return tokenizer.encode_prompt(self.opening or calibrate.plain_chat(messages) + "\nAssistant:")


def bundled_prompts() -> list[Prompt]:
    """The package's prompts (eval_text/README.md): code, prose and chat in turn."""
    text = (resources.files("twobit") / "eval_text" / "prompts.jsonl").read_text(encoding="utf-8")
    return [Prompt(**json.loads(line)) for line in text.splitlines()]


def text_samples(paths: Iterable[Path], tokenizer: Tokenizer, tokens: int, longest: int) -> list[Sample]:
    """The first `tokens` tokens of the texts, in sequences of at most `longest` that begin as the tokenizer begins
    a text."""
    samples: list[Sample] = []
    probe, inner = tokenizer.encode_prompt("a"), tokenizer.encode("a")
    start = probe[: probe.index(inner[0])] if inner and inner[0] in probe else []
    room = longest - len(start)
    if room < 2:
        raise UsageError(
            f"--text: sequences of {longest} tokens, {len(start)} of them set by the tokenizer, have no room",
            "leave out --text, or give the model its own tokenizer.json",
        )
    for document in calibrate.load_files(paths):
        ids = tokenizer.encode(document.text or "")
        tokenizer.check_ids((*start, *ids))
        for first in range(0, len(ids), room):
            piece = (*start, *ids[first : first + min(room, tokens + (not start))])
            if len(piece) >= len(start) + 2:
                samples.append(Sample("text", piece, max(len(start), 1)))
                tokens -= len(samples[-1].targets)
        if tokens < 1:
            break
    return samples


# -- comparing logits ---------------------------------------------------------------------------------------


class _Running:
    """Log-sum-exp, likeliest token and target logit of one model, [positions], over blocks of the vocabulary."""

    def __init__(self, targets: torch.Tensor) -> None:
        n = len(targets)
        self._targets = targets
        self._max = torch.full((n,), -torch.inf, dtype=torch.float64)
        self._sum = torch.zeros(n, dtype=torch.float64)
        self._target = torch.zeros(n, dtype=torch.float64)
        self.best = torch.zeros(n, dtype=torch.long)

    @property
    def log_sum(self) -> torch.Tensor:
        return self._max + self._sum.log()

    @property
    def sum(self) -> torch.Tensor:
        return self._sum

    @property
    def loss(self) -> torch.Tensor:
        """-log p of the targets."""
        return self.log_sum - self._target

    def add(self, at: slice, first: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits fp64 [n, rows] of tokens first... at positions `at`. Returns exp(logits - max so far), and what the
        sums of earlier blocks were multiplied with."""
        top, where = logits.max(-1)
        larger = top > self._max[at]
        self.best[at] = torch.where(larger, where + first, self.best[at])
        new = torch.where(larger, top, self._max[at])
        factor = (self._max[at] - new).exp()
        weights = (logits - new[:, None]).exp()
        self._sum[at] = self._sum[at] * factor + weights.sum(-1)
        self._max[at] = new
        inside = self._targets[at] - first
        rows = ((inside >= 0) & (inside < logits.shape[1])).nonzero()[:, 0]
        self._target[at][rows] = logits[rows, inside[rows]]
        return weights, factor


@dataclass
class _Divergence:
    """One variant beside the reference: sum of p (a - b), p not normalized yet, [positions]."""

    own: _Running
    cross: torch.Tensor


@dataclass(frozen=True)
class Compared:
    """A variant's numbers, [positions]: KL(reference || x) in nats, same likeliest token, -log p of the text."""

    kl: NDArray[np.float64]
    top1: NDArray[np.bool_]
    loss: NDArray[np.float64]


def _compare(
    variants: Variants,
    states: Mapping[str, torch.Tensor],
    targets: torch.Tensor,
    runtime: Array | None,
    progress: Progress,
) -> dict[str, Compared]:
    """Every variant against the reference, and `runtime` logits fp32 [positions, vocab] as `full_runtime`."""
    n, vocab = len(targets), variants.architecture.vocab
    step = min(vocab, max(256, min(8192, _HELD_LOGITS // n // 16 * 16)))
    chunk = max(16, _CHUNK_LOGITS // step)
    chunks = [slice(i, min(i + chunk, n)) for i in range(0, n, chunk)]
    reference = _Running(targets)
    others = [name for name in states if name != "reference"] + ["full_runtime"] * (runtime is not None)
    found = {name: _Divergence(_Running(targets), torch.zeros(n, dtype=torch.float64)) for name in others}
    progress.stage("comparing logits", n * -(-vocab // step) * (len(others) + 1))
    for first in range(0, vocab, step):
        rows = (first, min(first + step, vocab))
        held: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}  # chunk: logits, weights, factor

        def add(i: int, name: str, weights: Weights | None, rows: tuple[int, int] = rows, held: Any = held) -> None:
            at = chunks[i]
            if weights is None:
                logits = torch.from_numpy(np.array(cast("Array", runtime)[at, rows[0] : rows[1]]))
            else:
                logits = variants.decoders[name].head(states[name][at], weights)
            if not torch.isfinite(logits).all():
                raise CheckpointError(f"{name}: the logits are not finite in fp32")
            theirs = logits.double()
            if name == "reference":
                held[i] = (logits, *reference.add(at, rows[0], theirs))
            else:
                mine, probability, factor = held[i]
                one = found[name]
                one.own.add(at, rows[0], theirs)
                one.cross[at] = one.cross[at] * factor + (probability * (mine.double() - theirs)).sum(-1)
            progress.advance(len(logits))

        for name, weights in variants.head(rows, list(states)):
            variants.each(partial(add, name=name, weights=weights), len(chunks))
        if runtime is not None:
            variants.each(partial(add, name="full_runtime", weights=None), len(chunks))
    result = {"reference": Compared(np.zeros(n), np.ones(n, bool), reference.loss.numpy())}
    for name, one in found.items():
        kl = one.cross / reference.sum - reference.log_sum + one.own.log_sum
        result[name] = Compared(kl.numpy(), (one.own.best == reference.best).numpy(), one.own.loss.numpy())
    return result


def _likeliest(variants: Variants, states: torch.Tensor) -> list[int]:
    """The reference's greedy token after each of its last hidden states [n, hidden]."""
    vocab = variants.architecture.vocab
    step = max(16, CHUNK_WEIGHTS // variants.architecture.hidden)
    chunk = max(16, _CHUNK_LOGITS // step)
    best = torch.full((len(states),), -torch.inf)
    token = torch.zeros(len(states), dtype=torch.long)
    for first in range(0, vocab, step):
        ((_, weights),) = variants.head((first, min(first + step, vocab)), ["reference"])

        def add(i: int, first: int = first, weights: Weights = weights) -> None:
            at = slice(i * chunk, (i + 1) * chunk)
            top, where = variants.decoders["reference"].head(states[at], weights).max(-1)
            larger = top > best[at]
            best[at] = torch.where(larger, top, best[at])
            token[at] = torch.where(larger, where + first, token[at])

        variants.each(add, -(-len(states) // chunk))
    return token.tolist()


# -- the runtime --------------------------------------------------------------------------------------------


@contextmanager
def _runtime_logits(session: Session, samples: Sequence[Sample], progress: Progress) -> Iterator[Array]:
    """Logits fp32 [predicted tokens, vocab] of the runtime, in a temporary file."""
    n, vocab = sum(len(s.targets) for s in samples), session.model.vocab
    with tempfile.TemporaryFile(prefix="twobit-logits-") as file:
        for sample_ in samples:
            session.rewind(0)
            if sample_.first > 1:
                session.eval(sample_.ids[: sample_.first - 1], logits=False)
            inputs = sample_.inputs[sample_.first - 1 :]
            for start in range(0, len(inputs), 64):
                piece = inputs[start : start + 64]
                _write(file, cast("Array", session.eval(piece, every=True)), 4 * n * vocab)
                progress.advance(len(piece))
        yield np.memmap(file, np.float32, "r", shape=(n, vocab))


def _write(file: IO[bytes], values: Array, total: int) -> None:
    """Written, not mapped, so that a full disk is an error and not a signal."""
    try:
        file.write(values.data)
        file.flush()
    except OSError as error:
        raise RuntimeFailure(
            f"{tempfile.gettempdir()}: the runtime's logits cannot be kept: {error.strerror or error}",
            f"they take {total / 1e9:.1f} GB: set TMPDIR to another place, or give a smaller --tokens",
        ) from error


def reference_continuations(
    variants: Variants,
    session: Session,
    prompts: Sequence[tuple[str, list[int]]],
    length: int,
    eos: frozenset[int],
    progress: Progress,
) -> list[Sample]:
    """The reference's own greedy continuations of (kind, prompt ids) by up to `length` tokens.

    Found by speculation: the packed model writes on, the reference checks all texts in one pass through its layers,
    and each text is cut at the first token that the reference would not have written, until none is left.
    """
    texts = [list(ids) for _, ids in prompts]
    checked = [len(ids) for ids in texts]
    waiting, turn = list(range(len(texts))), 0
    while waiting:
        turn += 1
        progress.stage(f"the reference's continuations, turn {turn}: drafting", len(waiting))
        for i in waiting:
            texts[i] = continued(session, texts[i], Sampling(), len(prompts[i][1]) + length, eos)
            progress.advance(1)
        samples = [Sample("", tuple(texts[i]), checked[i]) for i in waiting]
        layers = len(variants.architecture.layers)
        progress.stage(
            f"the reference's continuations, turn {turn}: checking", layers * sum(len(s.inputs) for s in samples)
        )
        tokens = iter(_likeliest(variants, last_states(variants, samples, ["reference"], progress)["reference"]))
        still = []
        for i, sample_ in zip(waiting, samples, strict=True):
            greedy = [next(tokens) for _ in sample_.targets]
            agreed = _common(greedy, sample_.targets)
            checked[i] += agreed
            if agreed < len(greedy):
                texts[i][checked[i] :] = [greedy[agreed]]
                checked[i] += 1
                if texts[i][-1] not in eos and len(texts[i]) < len(prompts[i][1]) + length:
                    still.append(i)
        waiting = still
    return [Sample(kind, tuple(text), len(ids)) for (kind, ids), text in zip(prompts, texts, strict=True)]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# -- the result ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """Everything that was measured. `compared` and the arrays below are [predicted tokens].

    kinds: of text; targets: the tokens; clusters: runs of tokens that count as one draw; greedy, sampled:
    drafted blocks, None where they were not asked for.
    """

    build_id: str
    kinds: NDArray[np.str_]
    targets: NDArray[np.int64]
    clusters: NDArray[np.int64]
    compared: Mapping[str, Compared]
    greedy: Sequence[Block] | None = None
    sampled: Sequence[Block] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The object of `twobit eval --json`."""
        kls = {name: one.kl for name, one in self.compared.items() if name != "reference"}
        kinds = list(dict.fromkeys(self.kinds.tolist()))
        pairs = [(name, other) for name, other in (("full", "q8_0"), ("full_runtime", "q8_0_int8")) if other in kls]
        result = {
            "tokens": len(self.kinds),
            "kl": {
                name: {
                    "mean": float(kl.mean()),
                    "stderr": clustered_stderr(kl, self.clusters),
                    "median": float(np.median(kl)),
                    "p99": float(np.quantile(kl, 0.99)),
                    "top1": float(self.compared[name].top1.mean()),
                }
                for name, kl in kls.items()
            },
            "perplexity": {name: perplexity(one.loss) for name, one in self.compared.items()},
            "paired": {f"{a}/{b}": paired(kls[a], kls[b], self.clusters) for a, b in pairs},
            "kl_by_kind": {
                kind: {name: float(kl[self.kinds == kind].mean()) for name, kl in kls.items()} for kind in kinds
            },
            "perplexity_by_kind": {
                kind: {name: perplexity(one.loss[self.kinds == kind]) for name, one in self.compared.items()}
                for kind in kinds
            },
            "build_id": self.build_id,
            "settings": dict(self.settings),
        }
        if self.greedy is not None and self.sampled is not None:
            result["acceptance"] = summarize_blocks(self.greedy) | {
                "sampled": {"temperature": TEMPERATURE, **summarize_blocks(self.sampled)},
                "drafted": DRAFTED,
                "tree16": sorted("".join(map(str, path)) for path in TREE),
            }
        return result

    def save(self, path: Path) -> None:
        """Numbers per token as .npz: targets, clusters, kinds, and kl_<variant>, what two evaluations are paired by."""
        arrays: dict[str, Any] = {"kinds": self.kinds, "targets": self.targets, "clusters": self.clusters}
        arrays |= {f"kl_{name}": one.kl for name, one in self.compared.items() if name != "reference"}
        part = path.with_name(path.name + ".part")
        with open(part, "wb") as file:
            np.savez_compressed(file, **arrays)
        part.replace(path)


def perplexity(loss: Array) -> float | None:
    """exp of the mean loss, None where that is more than a float holds."""
    mean = float(loss.mean())
    return float(np.exp(mean)) if mean < math.log(sys.float_info.max) else None


def clustered_stderr(values: Array, clusters: Array) -> float:
    """Standard error of the mean, clusters of values being drawn independently; 0 for a single one."""
    sums = np.bincount(clusters, values - values.mean())
    n = len(sums)
    return float(math.sqrt(n / (n - 1) * (sums**2).sum()) / len(values)) if n > 1 else 0.0


def paired(a: Array, b: Array, clusters: Array) -> dict[str, float]:
    """Ratio of the means of a and b and their difference, on the same tokens, with standard errors (delta method)."""
    ratio = float(a.mean() / b.mean()) if b.mean() else math.inf
    finite = math.isfinite(ratio)
    return {
        "ratio": ratio if finite else 0.0,
        "ratio_stderr": clustered_stderr(a - ratio * b, clusters) / float(b.mean()) if finite else 0.0,
        "difference": float((a - b).mean()),
        "difference_stderr": clustered_stderr(a - b, clusters),
    }


def evaluate(
    model: Path, reference: Path, options: Options | None = None, progress: Progress | None = None
) -> Evaluation:
    """Measures the twobit model at `model` against the checkpoint at `reference` it was made from.

    TwobitError where one cannot be used, or they do not belong together.
    """
    options, progress = options or Options(), progress or Progress()
    checkpoint = Checkpoint.open(reference)
    opened = Model.open(model)
    if opened.architecture != checkpoint.architecture:
        raise UsageError(
            f"{model} was not made from {reference}: their architectures differ",
            "--reference takes the checkpoint that was quantized",
        )
    for spec in checkpoint.tensors:
        kept = spec.role not in ("linear", "head", "embedding")  # stored as it came
        if kept and not np.array_equal(opened.packed.tensor(spec.name), checkpoint.read(spec).numpy()):
            raise UsageError(
                f"{model} was not made from {reference}: {spec.name} differs",
                "--reference takes the checkpoint that was quantized",
            )
    for warning in checkpoint.warnings:
        progress.warning(warning)
    tokenizer = Tokenizer.load(model, config=opened.config, rows=opened.vocab)
    with calibrate.one_torch_thread(options.threads) as pool:
        variants = Variants(checkpoint, opened.packed, options.baselines, pool)
        return _evaluate(variants, opened, tokenizer, options, progress)


def _prompts(tokenizer: Tokenizer, tokens: int) -> list[tuple[str, list[int]]]:
    """As many of the bundled prompts as `tokens` are worth, the same number of each kind."""
    found = bundled_prompts()
    count = max(1, tokens // _TOKENS_PER_PROMPT // len(KINDS)) * len(KINDS)
    made = [(prompt.kind, prompt.ids(tokenizer)) for prompt in found[:count]]
    tokenizer.close()
    for _, ids in made:
        tokenizer.check_ids(ids)
        if not ids:
            raise TokenizerError(
                f"{tokenizer.name}: a prompt has no tokens: the chat template, or the tokenizer, leaves nothing of it",
                COPY_AGAIN,
            )
    return made


def _evaluate(
    variants: Variants, opened: Model, tokenizer: Tokenizer, options: Options, progress: Progress
) -> Evaluation:
    architecture = opened.architecture
    samples = []
    if options.text:
        longest = min(_SEQUENCE, architecture.max_context)
        samples = text_samples(options.text, tokenizer, options.tokens, longest)
    prompts = _prompts(tokenizer, options.tokens)
    length = -(-options.tokens // len(prompts))
    length = min(length, architecture.max_context - max(len(ids) for _, ids in prompts))
    if length < 1:
        raise RuntimeFailure(
            f"the bundled prompts do not fit the model's context of {architecture.max_context} tokens",
            "a model of so short a context, or with so long a chat template, cannot be measured",
        )
    context = max([len(s.ids) for s in samples] + [len(ids) + length for _, ids in prompts])
    session = Session(opened, context, options.threads)
    eos = tokenizer.eos_ids
    samples = [*reference_continuations(variants, session, prompts, length, eos, progress), *samples]

    layers, inputs = len(architecture.layers), sum(len(s.inputs) for s in samples)
    progress.stage(f"{len(variants.names)} models, layer by layer", layers * inputs * len(variants.names))
    states = last_states(variants, samples, variants.names, progress)
    targets = torch.tensor([token for s in samples for token in s.targets])
    progress.stage("the runtime's logits", len(targets))
    with _runtime_logits(session, samples, progress) as runtime:
        compared = _compare(variants, states, targets, runtime, progress)
    del states

    drafted: list[list[Block] | None] = [None, None]
    if options.acceptance:
        drafted = [
            acceptance(session, prompts, temperature, length, eos, progress) for temperature in (0.0, TEMPERATURE)
        ]
    lengths = [len(s.targets) for s in samples]
    return Evaluation(
        build_id=opened.packed.manifest.build_id,
        kinds=np.repeat([s.kind for s in samples], lengths),
        targets=targets.numpy(),
        clusters=_clusters(lengths),
        compared=compared,
        greedy=drafted[0],
        sampled=drafted[1],
        settings={
            "tokens": options.tokens,
            "prompts": len(prompts),
            "text": [path.name for path in options.text],
            "kernel": opened.level,
        },
    )


def _clusters(lengths: Sequence[int]) -> NDArray[np.int64]:
    """Numbers the runs of at most _CLUSTER tokens of one sequence."""
    sizes = [min(_CLUSTER, n - start) for n in lengths for start in range(0, n, _CLUSTER)]
    return np.repeat(np.arange(len(sizes)), sizes)
