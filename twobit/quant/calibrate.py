"""Calibration: text to token sequences, and the Hessian X^T X of every linear's inputs, one layer in memory at a time.

Inputs of a layer are the outputs of the unquantized layers before it, in fp32. Every sum has one order whatever the
number of threads: torch works on one thread, threads take tasks of a fixed list (a sequence through a layer, a panel of
a Hessian), and panels add token chunks in order.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twobit.architecture import Architecture
from twobit.errors import CalibrationError, TemplateStopped, TokenizerError
from twobit.format.writer import writing

if TYPE_CHECKING:
    import torch

    from twobit.quant.decoder import Decoder
    from twobit.quant.source import Checkpoint
    from twobit.quant.states import States

SEQUENCE = 512  # tokens
DEFAULT_TOKENS = 32_768
MIN_SEQUENCE = 16  # tokens; a shorter rest of a document is left out
CHUNK_TOKENS = 2048  # tokens whose inputs are kept until they are added to the Hessians
SCRATCH_MEMORY = 512 << 20  # bytes; what the sequences keep between the steps of a layer lies in files beyond it
PULL = 0.5  # how much of the draft's distance from the verifier's stream o and down are asked to make good
PANEL = 256  # rows of a Hessian that one task sums
SHARED = {"q": "q", "k": "q", "v": "q", "o": "o", "gate": "gate", "up": "gate", "down": "down"}
"""Part of a layer -> the part whose Hessian it shares, having the same input."""

Render = Callable[[Sequence[Mapping[str, str]]], str]


@dataclass(frozen=True)
class Document:
    """A text or a chat. kind: "code", "prose" or "dialogue"; source says where it came from."""

    kind: str
    source: str
    text: str | None = None
    messages: tuple[dict[str, str], ...] = ()


@dataclass(frozen=True)
class Calibration:
    """The token sequences to calibrate on, and what is recorded of them. `requested`: sequences asked for."""

    sequences: tuple[tuple[int, ...], ...]
    requested: int
    source: str
    seed: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    def digest(self) -> str:
        """SHA-256 of the token ids: what a resumed run compares."""
        text = json.dumps(self.sequences, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """What the manifest records."""
        return {
            "tokens": self.tokens,
            "sequences": len(self.sequences),
            "requested_sequences": self.requested,
            "source": self.source,
            "seed": self.seed,
            "sha256": self.digest(),
        }


def load_default() -> list[Document]:
    """The package's own text (text/README.md), mixed so that any prefix is representative."""
    data = lzma.decompress((resources.files("twobit.quant") / "text" / "default.jsonl.xz").read_bytes())
    documents = []
    for line in data.decode().splitlines():
        entry = json.loads(line)
        messages = tuple(entry.get("messages", ()))
        documents.append(Document(entry["kind"], entry["source"], entry.get("text"), messages))
    return documents


def load_files(paths: Iterable[Path]) -> list[Document]:
    """One document per UTF-8 text file. CalibrationError names a file that is unreadable, no text or empty."""
    documents = []
    for path in paths:
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except OSError as error:
            raise CalibrationError(f"{path}: cannot be read: {error.strerror or error}", "give another file") from error
        except UnicodeDecodeError as error:
            raise CalibrationError(f"{path}: not UTF-8 at byte {error.start}", "convert it to UTF-8 text") from error
        if not text.strip():
            raise CalibrationError(f"{path}: no text in it", "give a file with text, or leave it out")
        documents.append(Document("file", path.name, text))
    return documents


def plain_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """A chat for models without a template."""
    return "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in messages) + "\n"


class Encoder:
    """The source's tokenizer.json. Special tokens that it puts first (BOS) start every sequence."""

    def __init__(self, folder: Path, vocab: int, render: Render | None = None) -> None:
        """`render` is the model's chat template; None: it has none. CalibrationError without a usable tokenizer."""
        from tokenizers import Tokenizer

        from twobit.runtime.tokenizer import refusing, unreadable

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CalibrationError(f"{folder}: no tokenizer.json, which calibration needs", "add the model's tokenizer")
        with refusing(lambda error: CalibrationError(unreadable(file, error), "add the model's tokenizer")):
            self._tokenizer = Tokenizer.from_buffer(file.read_bytes())  # from_file takes no path that is not UTF-8
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._file, self._vocab, self._render = file, vocab, render
        probe, inner = self._ids("a", add=True), self._ids("a")
        self.prefix = tuple(probe[: probe.index(inner[0])]) if inner and inner[0] in probe else ()
        if outside := [i for i in self.prefix if i >= vocab]:
            raise CalibrationError(
                f"{file}: every text starts with token {outside[0]}, but the embedding has {vocab} rows",
                "tokenizer and weights do not belong together",
            )

    def __call__(self, document: Document) -> list[int]:
        """Token ids without the leading special tokens; ids beyond the embedding (added tokens) are left out."""
        if document.text is not None:
            text = document.text
        else:
            text = plain_chat(document.messages)
            if self._render is not None:
                try:
                    text = self._render(document.messages)
                except TemplateStopped as error:  # no reason to calibrate on another text than the next time
                    raise CalibrationError(str(error), "run it again; files of --calib need no template") from error
                except TokenizerError:  # a template may refuse system messages
                    self._render = self._render if len(document.messages) > 2 else None
        ids = self._ids(text)
        start = len(self.prefix)
        if start and tuple(ids[:start]) == self.prefix:  # a template that writes BOS itself
            ids = ids[start:]
        return [i for i in ids if i < self._vocab]

    def _ids(self, text: str, add: bool = False) -> list[int]:
        from twobit.runtime.tokenizer import refusing

        def refusal(error: BaseException) -> CalibrationError:
            if isinstance(error, TypeError | UnicodeEncodeError):  # lone surrogates, which a template can write
                return CalibrationError(
                    f"{self._file.parent}: the chat template writes text that is not valid Unicode",
                    "correct the template; files of --calib need none",
                )
            return CalibrationError(
                f"{self._file}: the tokenizer cannot take the calibration text: {error}",
                "save the tokenizer again with a current transformers, or calibrate on other text with --calib",
            )

        with refusing(refusal):
            return list(self._tokenizer.encode(text, add_special_tokens=add).ids)


def sequences(
    documents: Sequence[Document], encode: Encoder, *, tokens: int, source: str, seed: int = 0, length: int = SEQUENCE
) -> Calibration:
    """Cuts documents into sequences of at most `length` tokens until there are `tokens`; none spans two documents.

    Seed 0 takes documents in their order; another shuffles them. CalibrationError where nothing is long enough.
    """
    if tokens < 1:
        raise CalibrationError(f"--calib-tokens {tokens} is not positive")
    order = list(documents)
    if seed:
        random.Random(seed).shuffle(order)
    prefix, room = encode.prefix, length - len(encode.prefix)
    if room < 1:
        raise CalibrationError(
            f"sequences of {length} tokens, the model's context, have no room for text: "
            f"the tokenizer starts every one with {len(prefix)} tokens",
            "tokenizer.json and max_position_embeddings of config.json do not belong together",
        )

    def cut(document: Document) -> Iterator[tuple[int, ...]]:
        ids = encode(document)
        for start in range(0, len(ids), room):
            piece = ids[start : start + room]
            if start == 0 or len(piece) >= MIN_SEQUENCE:
                yield prefix + tuple(piece)

    found: list[tuple[int, ...]] = []
    left = tokens
    waiting = [cut(document) for document in order]
    while waiting and left > 0:  # the first piece of each document, then the second of each, ...
        remaining = []
        for pieces in waiting:
            piece = next(pieces, None)
            if piece is None:
                continue
            piece = piece[: max(left, MIN_SEQUENCE)]
            found.append(piece)
            left -= len(piece)
            if left <= 0:
                break
            remaining.append(pieces)
        waiting = remaining
    if not found:
        raise CalibrationError(f"{source}: the calibration text gives no tokens", "give a longer text with --calib")
    requested = len(found) if left <= 0 else len(found) + -(-left // length)
    return Calibration(tuple(found), requested, source, seed)


# -- one layer at a time ------------------------------------------------------------------------------------


@contextmanager
def one_torch_thread(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of `threads` workers, in each of which torch computes on one thread and keeps subnormals."""
    import torch

    def prepare() -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(False)

    before = torch.get_num_threads()
    prepare()
    try:
        with ThreadPoolExecutor(threads, initializer=prepare) as pool:
            try:
                yield pool
            except BaseException:  # Ctrl-C too: do not work off what is queued
                pool.shutdown(cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Statistics:
    """What one group of linears that share an input is rounded by.

    hessian: X^T X [cols, cols] fp32 of the draft's inputs X. cross: V^T X [n, cols], where V is the verifier's inputs
    less the draft's (n = cols), or with `outputs` what the linear should answer to X (n = rows): the verifier's outputs
    and what the draft's stream lacks of the verifier's.
    """

    hessian: torch.Tensor
    cross: torch.Tensor
    outputs: bool


Choose = Callable[[str, Statistics], Mapping[str, Any]]
"""part, statistics -> {tensor name: draft's weights fp32} of the linears that share the part's input."""


class Activations:
    """Every sequence's hidden state on its way through the layers: the verifier's and the draft's, [n, 2, hidden] fp32.

    The draft's comes from draft weights all the way, attending to the verifier's keys and values in blocks, as it is
    used. So every linear of the draft is calibrated on the inputs that it will have, and told the outputs that it
    should give for them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        calibration: Calibration,
        pool: ThreadPoolExecutor,
        states: States,
        advance: Callable[[int], None] = lambda tokens: None,
        device: str = "cpu",
    ) -> None:
        """`states` may hold the input of a later layer than the first; `advance` is told the tokens that passed a
        layer; device: where torch computes, "cpu" or "cuda".
        """
        import torch

        from twobit.quant.decoder import Decoder

        self.architecture: Architecture = checkpoint.architecture
        self.device = device
        self._decoder = Decoder(self.architecture)
        self._pool = pool
        self._advance = advance
        self._states = states
        specs = self.architecture.tensors()
        self._biases = {(spec.layer, spec.part): spec.name for spec in specs if spec.role == "bias"}
        self._norms = {(spec.layer, spec.part) for spec in specs if spec.role == "norm"}
        if states.layer < 0:
            embed = embedder(checkpoint, calibration.sequences)
            states.begin()
            for i in range(len(calibration.sequences)):
                state = embed(i)
                states.write(i, torch.cat((state, state), 1))
            states.commit()
        self._lengths = [len(sequence) for sequence in calibration.sequences]
        self._chunks = _chunks(self._lengths)
        files = scratch_bytes(self.architecture, calibration.tokens) > SCRATCH_MEMORY
        self._scratch = states.folder if files else None

    def layer(self, index: int, weights: Mapping[str, torch.Tensor], choose: Choose) -> None:
        """Sends everything through layer `index`: the verifier with `weights`, the draft with what `choose` makes of
        them, called for "q", "o", "gate" and "down" in this order. CalibrationError where a value is not finite."""
        steps = _LayerSteps(self._decoder, index, weights, self._biases, self._norms)
        where = f"layer {index}"
        scratch = [_Scratch(self._scratch, i, self.device) for i in range(len(self._lengths))]

        if index != self._states.layer:
            raise ValueError(f"layer {index} cannot follow layer {self._states.layer - 1}")
        self._states.begin()

        def verifier(i: int) -> None:
            found = steps.verifier(self._read(i)[:, 0])
            self._check([found], where)
            for name, value in found.items():
                scratch[i].put(name, value)

        list(self._pool.map(verifier, range(len(self._lengths))))
        for part in ("q", "o", "gate", "down"):

            def inputs(i: int, part: str = part) -> tuple[torch.Tensor, torch.Tensor]:
                return steps.inputs(part, lambda: self._read(i), scratch[i], i)

            chosen = choose(part, self._statistics(inputs, part, where))
            steps.draft |= {name: weight.to(self.device) for name, weight in chosen.items()}

        def finish(i: int) -> None:
            out = steps.finish(scratch[i])
            self._check([{"output": out}], where)
            self._states.write(i, out.flatten(1))
            self._advance(len(out))

        list(self._pool.map(finish, range(len(self._lengths))))
        self._states.commit()

    def head(self, norm: torch.Tensor) -> Statistics:
        """The statistics of the head's input, after the final norm."""

        def inputs(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            verifier, draft = (self._decoder.norm(self._read(i)[:, j], norm) for j in range(2))
            return draft, verifier - draft

        return self._statistics(inputs, "head", "the final norm")

    def _read(self, i: int) -> torch.Tensor:
        return self._states.read(i).to(self.device).unflatten(1, (2, -1))

    def _statistics(
        self, inputs: Callable[[int], tuple[torch.Tensor, torch.Tensor]], part: str, where: str
    ) -> Statistics:
        """Sums over all sequences; inputs: sequence -> (X, V)."""
        import torch

        hessian, cross = torch.empty(0), torch.empty(0)
        waiting = [self._pool.submit(inputs, i) for i in self._chunks[0]]
        for following in [*self._chunks[1:], []]:
            pairs = [job.result() for job in waiting]
            waiting = [self._pool.submit(inputs, i) for i in following]  # while this chunk is summed
            self._check([{part: x} for x, _ in pairs], where)
            x, v = (torch.cat([pair[j] for pair in pairs]) for j in range(2))
            del pairs
            if not len(hessian):
                hessian, cross = (x.new_zeros(n, x.shape[1]) for n in (x.shape[1], v.shape[1]))
            jobs = [self._pool.submit(_add_panel, hessian, x, x, rows, True) for rows in _panels(x.shape[1])]
            jobs += [self._pool.submit(_add_panel, cross, v, x, rows, False) for rows in _panels(v.shape[1])]
            for job in jobs:
                job.result()
        _mirror(hessian)
        return Statistics(hessian, cross, part in ("o", "down"))

    def _check(self, inputs: Iterable[Mapping[str, torch.Tensor]], where: str) -> None:
        for values in inputs:
            for part, value in values.items():
                # the sum of squares overflows little before the Hessian would
                flat = value.reshape(-1)
                if not math.isfinite(float(flat.dot(flat))):
                    raise CalibrationError(
                        f"{where}: {part} activations are not finite in fp32 during calibration",
                        "the checkpoint is damaged, or its weights overflow; try `--calib` with other text",
                    )


def embedder(checkpoint: Checkpoint, tokens: Sequence[Sequence[int]]) -> Callable[[int], torch.Tensor]:
    """Sequence -> input of the first layer, fp32 [n, hidden]; only the rows in use are kept of the embedding, which is
    read piece by piece."""
    import torch

    from twobit.quant.decoder import Decoder

    spec = next(spec for spec in checkpoint.architecture.tensors() if spec.role == "embedding")
    used = torch.tensor(sorted({i for sequence in tokens for i in sequence}))
    rows, cols = spec.shape
    step = max(1, (1 << 22) // cols)
    parts = []
    for first in range(0, rows, step):
        inside = used[(used >= first) & (used < first + step)]
        if len(inside):
            parts.append(checkpoint.read(spec, (first, min(first + step, rows)))[inside - first])
    table = {spec.name: torch.cat(parts)}
    place = torch.zeros(rows, dtype=torch.long)
    place[used] = torch.arange(len(used))
    decoder = Decoder(checkpoint.architecture)
    return lambda i: decoder.embed(place[torch.tensor(tokens[i])], table)


class _LayerSteps:
    """One layer for verifier and draft, step by step; `scratch` keeps a sequence's values between steps."""

    def __init__(
        self,
        decoder: Decoder,
        index: int,
        weights: Mapping[str, torch.Tensor],
        biases: Mapping[tuple[int | None, str], str],
        norms: set[tuple[int | None, str]],
    ) -> None:
        self._decoder, self._index, self._weights = decoder, index, weights
        self._bias = {part: biases.get((index, part)) for part in ("o", "down")}
        self._pulled = {
            "o": (index, "post_attention_norm") not in norms,
            "down": (index, "post_ffn_norm") not in norms,
        }
        self.draft: dict[str, torch.Tensor] = dict(weights)

    def verifier(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scratch of a sequence, with all that the draft needs of the verifier; x: its state [n, hidden]."""
        from twobit.quant.decoder import Cache

        decoder, index, weights = self._decoder, self._index, self._weights
        cache = Cache()
        mixed = decoder.mixed(index, x, weights, cache)
        answer = decoder.answer(index, "o", mixed, weights)
        middle = decoder.joined_attention(index, x, answer, weights)
        keys, values = cache.of(index)
        found = {"keys": keys, "values": values, "middle": middle, "o": self._asked("o", answer, x)}
        answer = decoder.answer(index, "down", decoder.gated(index, middle, weights), weights)
        found["output"] = decoder.joined_ffn(index, middle, answer, weights)
        found["down"] = self._asked("down", answer, middle)
        return found

    def _asked(self, part: str, answer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What o or down should answer, without its bias: what it answered, and for a draft that adds to its own
        stream part of the verifier's stream x, of which the draft's is taken later. `answer` is used up."""
        if (bias := self._bias[part]) is not None:
            answer -= self._weights[bias]
        return answer.add_(x, alpha=PULL) if self._pulled[part] else answer

    def inputs(
        self, part: str, read: Callable[[], torch.Tensor], scratch: _Scratch, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The draft's inputs of `part`, and V of `Statistics`. read: gives the state [n, 2, hidden] that the sequence
        entered with; first: where blocks begin."""
        decoder, index = self._decoder, self._index
        if part == "q":
            x, draft = read().unbind(1)
            mine = decoder.normed(index, draft, "input_norm", self._weights)
            return mine, decoder.normed(index, x, "input_norm", self._weights) - mine
        if part == "o":
            from twobit.quant.tune import BLOCK, drafting

            draft = read()[:, 1]
            attend = drafting(scratch.take("keys"), scratch.take("values"), first=first % BLOCK)
            mixed = decoder.mixed(index, draft, self.draft, attend=attend)
            scratch.put("mixed", mixed)
            return mixed, self._wanted(part, draft, scratch)
        if part == "gate":
            draft = decoder.after_attention(index, read()[:, 1], scratch.take("mixed"), self.draft)
            scratch.put("draft", draft)
            mine = decoder.normed(index, draft, "pre_ffn_norm", self._weights)
            return mine, decoder.normed(index, scratch.take("middle"), "pre_ffn_norm", self._weights) - mine
        draft = scratch.get("draft")
        gated = decoder.gated(index, draft, self.draft)
        scratch.put("gated", gated)
        return gated, self._wanted(part, draft, scratch)

    def _wanted(self, part: str, draft: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
        wanted = scratch.take(part)
        return wanted - PULL * draft if self._pulled[part] else wanted

    def finish(self, scratch: _Scratch) -> torch.Tensor:
        """Both outputs [n, 2, hidden]."""
        import torch

        draft = self._decoder.after_ffn(self._index, scratch.take("draft"), scratch.take("gated"), self.draft)
        return torch.stack((scratch.take("output"), draft), 1)


class _Scratch:
    """Values of one sequence between the steps of a layer, in memory or (`folder`) in files."""

    def __init__(self, folder: Path | None, i: int, device: str) -> None:
        self._folder, self._i, self._device = folder, i, device
        self._kept: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def put(self, name: str, value: torch.Tensor) -> None:
        if self._folder is None:
            self._kept[name] = value
            return
        self._shapes[name] = tuple(value.shape)
        path = self._path(name)
        with writing(path), open(path, "wb") as file:
            file.write(value.contiguous().cpu().numpy().data)

    def get(self, name: str) -> torch.Tensor:
        import torch

        if self._folder is None:
            return self._kept[name]
        return (
            torch.from_file(str(self._path(name)), False, math.prod(self._shapes[name]))
            .view(self._shapes[name])
            .clone()
            .to(self._device)
        )

    def take(self, name: str) -> torch.Tensor:
        """The value, which is not needed again."""
        value = self.get(name)
        if self._folder is None:
            del self._kept[name]
        else:
            self._path(name).unlink()
        return value

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"scratch-{self._i:06d}-{name}.bin"


def scratch_bytes(architecture: Architecture, tokens: int) -> int:
    """What the sequences of a layer keep between its steps at most."""
    widths = [
        5 * architecture.hidden
        + 2 * layer.n_kv_heads * layer.head_dim
        + max(layer.n_heads * layer.head_dim, layer.intermediate)
        for layer in architecture.layers
    ]
    return 4 * tokens * max(widths)


def _panels(rows: int) -> list[slice]:
    """Rows of a sum, in as few panels of equal height as PANEL allows."""
    height = -(-rows // -(-rows // PANEL))
    return [slice(first, min(first + height, rows)) for first in range(0, rows, height)]


def _add_panel(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, rows: slice, upper: bool) -> None:
    """Rows `rows` of total += a^T b, of the upper triangle alone where that is enough."""
    start = rows.start if upper else 0
    total[rows, start:].addmm_(a[:, rows].T, b[:, start:])


def _mirror(total: torch.Tensor) -> None:
    """Fills the lower triangle from the upper one."""
    for rows in _panels(total.shape[0]):
        total[rows.stop :, rows] = total[rows, rows.stop :].T
        block = total[rows, rows]
        block.copy_(block.triu() + block.triu(1).T)


def _chunks(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of consecutive sequences, at most CHUNK_TOKENS tokens together (one longer sequence stands alone)."""
    chunks: list[list[int]] = []
    size = CHUNK_TOKENS
    for i, length in enumerate(lengths):
        if size + length > CHUNK_TOKENS:
            chunks.append([])
            size = 0
        chunks[-1].append(i)
        size += length
    return chunks
