"""Calibration: text to token sequences, and the Hessian X^T X of every linear's inputs, one layer in memory at a time.

Inputs of a layer are the outputs of the unquantized layers before it, in fp32. Every sum has one order whatever the
number of threads: torch works on one thread, threads take tasks of a fixed list (a sequence through a layer, a panel of
a Hessian), and panels add token chunks in order.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twobit.architecture import Architecture, TensorSpec
from twobit.errors import CalibrationError, TokenizerError

if TYPE_CHECKING:
    import torch

    from twobit.quant.source import Checkpoint
    from twobit.quant.states import States

SEQUENCE = 512  # tokens
DEFAULT_TOKENS = 24_576
MIN_SEQUENCE = 16  # tokens; a shorter rest of a document is left out
CHUNK_TOKENS = 2048  # tokens whose inputs are kept until they are added to the Hessians
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
            raise CalibrationError(f"{path}: cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise CalibrationError(f"{path}: not UTF-8 at byte {error.start}", "convert it to UTF-8 text") from error
        if not text.strip():
            raise CalibrationError(f"{path}: no text in it")
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

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CalibrationError(f"{folder}: no tokenizer.json, which calibration needs", "add the model's tokenizer")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises Exception itself
            raise CalibrationError(f"{file}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._vocab = vocab
        self._render = render
        probe = self._tokenizer.encode("a").ids
        inner = self._tokenizer.encode("a", add_special_tokens=False).ids
        self.prefix = tuple(probe[: probe.index(inner[0])]) if inner and inner[0] in probe else ()

    def __call__(self, document: Document) -> list[int]:
        """Token ids without the leading special tokens; ids beyond the embedding (added tokens) are left out."""
        if document.text is not None:
            text = document.text
        else:
            text = plain_chat(document.messages)
            if self._render is not None:
                try:
                    text = self._render(document.messages)
                except TokenizerError:  # a template may refuse system messages
                    self._render = self._render if len(document.messages) > 2 else None
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        start = len(self.prefix)
        if start and tuple(ids[:start]) == self.prefix:  # a template that writes BOS itself
            ids = ids[start:]
        return [i for i in ids if i < self._vocab]


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


class Activations:
    """Every sequence's hidden state [n, hidden] fp32 on its way through the layers."""

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
        from twobit.quant.decoder import Decoder

        self.architecture: Architecture = checkpoint.architecture
        self.device = device
        self._decoder = Decoder(self.architecture)
        self._pool = pool
        self._advance = advance
        self._states = states
        specs = self.architecture.tensors()
        self._parts = {spec.module: spec.part for spec in specs if spec.role == "linear"}
        if states.layer < 0:
            embedding = next(spec for spec in specs if spec.role == "embedding")
            states.begin()
            self._embed(checkpoint, embedding, calibration.sequences)
            states.commit()
        self._chunks = _chunks([len(sequence) for sequence in calibration.sequences])

    def layer(
        self, index: int, weights: Mapping[str, torch.Tensor], *, hessians: bool = True
    ) -> dict[str, torch.Tensor]:
        """Sends everything through layer `index`; returns {part: Hessian [cols, cols] fp32} for the parts of SHARED.

        `weights` and Hessians lie on the device. CalibrationError names the layer where a value is not finite.
        """
        if index != self._states.layer:
            raise ValueError(f"layer {index} cannot follow layer {self._states.layer - 1}")
        self._states.begin()
        sums: dict[str, torch.Tensor] = {}
        for chunk in self._chunks:
            inputs: list[dict[str, torch.Tensor]] = [{} for _ in chunk]
            jobs = [
                self._pool.submit(self._one, index, weights, i, inputs[at] if hessians else None)
                for at, i in enumerate(chunk)
            ]
            for job in jobs:
                job.result()
            if hessians:
                self._add(sums, inputs)
        self._states.commit()
        for total in sums.values():
            _mirror(total)
        return sums

    def head(self, norm: torch.Tensor) -> torch.Tensor:
        """The Hessian of the head's input, after the final norm."""
        sums: dict[str, torch.Tensor] = {}
        for chunk in self._chunks:
            inputs = [{"head": self._decoder.norm(self._read(i), norm)} for i in chunk]
            self._check(inputs, "the final norm")
            self._add(sums, inputs)
        _mirror(sums["head"])
        return sums["head"]

    def _read(self, i: int) -> torch.Tensor:
        return self._states.read(i).to(self.device)

    def _one(
        self, index: int, weights: Mapping[str, torch.Tensor], i: int, inputs: dict[str, torch.Tensor] | None
    ) -> None:
        def hook(module: str, x: torch.Tensor) -> None:
            if inputs is not None:
                inputs.setdefault(SHARED[self._parts[module]], x)

        state = self._decoder.layer(index, self._read(i), weights, hook=hook)
        self._check([{"output": state}, inputs or {}], f"layer {index}")
        self._states.write(i, state)
        self._advance(len(state))

    def _check(self, inputs: Iterable[Mapping[str, torch.Tensor]], where: str) -> None:
        import math

        import torch

        for values in inputs:
            for part, value in values.items():
                # the sum of squares overflows only where the Hessian would
                if not math.isfinite(float(value.square().sum(dtype=torch.float64))):
                    raise CalibrationError(
                        f"{where}: {part} activations are not finite in fp32 during calibration",
                        "the checkpoint is damaged, or its weights overflow; try `--calib` with other text",
                    )

    def _add(self, sums: dict[str, torch.Tensor], inputs: Sequence[Mapping[str, torch.Tensor]]) -> None:
        import torch

        jobs = []
        for part in inputs[0]:
            x = torch.cat([values[part] for values in inputs])
            cols = x.shape[1]
            if part not in sums:
                sums[part] = torch.zeros(cols, cols, device=self.device)
            for first in range(0, cols, PANEL):
                jobs.append(self._pool.submit(_add_panel, sums[part], x, first))
        for job in jobs:
            job.result()

    def _embed(self, checkpoint: Checkpoint, spec: TensorSpec, tokens: Sequence[Sequence[int]]) -> None:
        """First states; only the rows in use are kept of the embedding, which is read piece by piece."""
        import torch

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
        for i, sequence in enumerate(tokens):
            self._states.write(i, self._decoder.embed(place[torch.tensor(sequence)], table))


def _add_panel(total: torch.Tensor, x: torch.Tensor, first: int) -> None:
    """Rows [first, first + PANEL) of the upper triangle of total += x^T x."""
    end = min(first + PANEL, total.shape[0])
    total[first:end, first:].addmm_(x[:, first:end].T, x[:, first:])


def _mirror(total: torch.Tensor) -> None:
    """Fills the lower triangle from the upper one."""
    for first in range(0, total.shape[0], PANEL):
        end = min(first + PANEL, total.shape[0])
        total[end:, first:end] = total[first:end, end:].T
        block = total[first:end, first:end]
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
