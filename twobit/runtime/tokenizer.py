"""Text to token ids and back, with the ids that transformers would give.

Three things go beyond wrapping `tokenizers`: control tokens that a user types into a chat stay text while the
template's own are control tokens (`Tokenizer.chat_ids`); the set of tokens that end an answer is gathered from
everywhere a checkpoint may name one (`Tokenizer.eos_ids`); and decoding is a stream that gives every character as soon
as its bytes are complete (`Utf8Stream`).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from twobit.errors import TokenizerError, TwobitError
from twobit.runtime import tokenizer_cache
from twobit.runtime.chat_template import ChatTemplate, Message, find_template

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
COPY_AGAIN = "copy the tokenizer files of the model into its folder again"
_KINDS = ("BPE", "Unigram", "WordLevel", "WordPiece")
_USER_BASE, _CONTROL_BASE = 0xF0000, 0x100000  # private-use planes 15 and 16
_WINDOW = 4  # units of context when a token is decoded; a decoder looks back one token at most
_PROBE_USER, _PROBE_ANSWER = "Kuvoqe", "Zimtaru"  # words that no template contains


class Tokenizer:
    """The tokenizer of a model folder. `load` reads it; ids are plain ints."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,
        eos: Iterable[int] = (),
        template: ChatTemplate | None = None,
        rows: int | None = None,
        name: str = "tokenizer.json",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special = dict(special or {})
        self.template = template
        self.rows = rows
        self.name = name
        self._eos = frozenset(eos)
        self._tables: dict[str, Any] = {}

    @classmethod
    def load(cls, folder: str | Path, *, config: Mapping[str, Any] | None = None, rows: int | None = None) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, generation_config.json and the chat template of a model folder.

        config: the model's config.json, read from the folder if not given; rows: rows of the model's vocabulary
        matrix, to check ids against. Raises TokenizerError naming the file.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            if (folder / "tokenizer.model").exists() or (folder / "vocab.json").exists():
                raise TokenizerError(
                    f"{path} is missing: only the older tokenizer files are there",
                    "make it with transformers: AutoTokenizer.from_pretrained(SRC).save_pretrained(SRC)",
                )
            raise TokenizerError(f"{path} is missing", "copy the tokenizer files of the model into its folder")
        backend = _backend(path)

        settings = _read_json(folder / "tokenizer_config.json")
        if config is None:
            config = _read_json(folder / "config.json")
        named = settings if "added_tokens_decoder" in settings else _read_json(folder / "special_tokens_map.json")
        special = {key: text for key in _NAMED if (text := _content(named.get(key, settings.get(key)))) is not None}
        _add_tokens(backend, settings, special)

        text_config = config.get("text_config")
        eos: set[int] = set()
        for source in (
            _read_json(folder / "generation_config.json"),
            config,
            text_config if isinstance(text_config, Mapping) else {},
        ):
            eos |= _ids(source.get("eos_token_id"))
        eos |= _ids(backend.token_to_id(special["eos_token"]) if "eos_token" in special else None)

        text = find_template(folder, settings)
        template = None if text is None else ChatTemplate(text, special)
        return cls(
            backend,
            special=special,
            eos=eos,
            template=template,
            rows=rows,
            name=str(path),
        )

    def close(self) -> None:
        """End the process that renders the chat template; it starts again if needed."""
        if self.template is not None:
            self.template.close()

    # -- what is known about tokens --

    @property
    def size(self) -> int:
        """Tokens, added ones included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def bos_id(self) -> int | None:
        """The token that starts a text, None where the tokenizer has none."""
        return self._id(self.special.get("bos_token"))

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends an answer: named by generation_config, config or tokenizer_config, or written by the
        chat template right after an assistant message."""
        ids = set(self._eos)
        end = self._end_of_turn()
        if end is not None:
            ids.add(end)
        return frozenset(i for i in ids if i >= 0 and (self.rows is None or i < self.rows))

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return dict(self.backend.get_added_tokens_decoder())

    def _end_of_turn(self) -> int | None:
        if self.template is None:
            return None
        messages = [{"role": "user", "content": _PROBE_USER}, {"role": "assistant", "content": _PROBE_ANSWER}]
        try:
            text = self.template.render(messages, add_generation_prompt=False)
        except TokenizerError:  # a template that refuses these will speak up when it is used
            return None
        _, found, after = text.rpartition(_PROBE_ANSWER)
        after = after.lstrip()
        tokens = {t.content: i for i, t in self._added.items() if t.content.strip() and after.startswith(t.content)}
        return tokens[max(tokens, key=len)] if found and tokens else None

    # -- text to ids --

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of `text` alone, no BOS or EOS added. special: control tokens spelled out in it become control tokens;
        otherwise they stay text."""
        if special or not self._control(None).search(text):
            return self._encode(self.backend, text)
        return self._encode_marked(None, text.translate(self._erase(None)))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt, as transformers' `tokenizer(text)`: what the tokenizer's own post-processor adds (often
        a BOS) is added. An empty text with nothing to add starts from BOS; without one there are no ids."""
        ids = self._encode(self.backend, text, add=True)
        if not ids and self.bos_id is not None:
            ids = [self.bos_id]
        return ids

    def chat_text(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt text, as transformers' `apply_chat_template(tokenize=False)`."""
        return self._template().render(messages, add_generation_prompt=add_generation_prompt)

    def chat_ids(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """The prompt ids, as transformers' `apply_chat_template(tokenize=True)`, but control tokens that a message
        spells out are encoded as text.

        How: the first and last characters of control tokens are replaced in the messages by private-use characters,
        one for one, before the template runs. In its output a control token is then whole only where the template
        wrote it. Those become private-use tokens, the replaced characters come back, and a copy of the tokenizer that
        knows its control tokens by the private characters only encodes the text in one piece.
        """
        template = self._template()
        control = self._control(template.text)
        plain = template.render(messages, add_generation_prompt=add_generation_prompt)
        hide, show = self._disguise(template.text)
        hidden = [{k: v if k == "role" else self._hide(v, m.get("role"), hide) for k, v in m.items()} for m in messages]
        if hidden == [dict(m) for m in messages]:
            return self._encode(self.backend, plain)
        text = template.render(hidden, add_generation_prompt=add_generation_prompt)

        private = self._literal(template.text).private

        def mark(s: str) -> str:
            return control.sub(lambda match: private[match[0]], s)

        shown, marked = text.translate(show), mark(text).translate(show)
        spelled = any(control.search(s) for m in messages for k, v in m.items() if k != "role" for s in _strings(v))
        if marked == mark(shown) and (shown == plain or not spelled):
            return self._encode(self.backend, plain)
        return self._encode_marked(template.text, marked)

    def _encode_marked(self, template: str | None, text: str) -> list[int]:
        """Ids of text whose control tokens are private characters, everything else being text."""
        literal = self._literal(template)
        ids = [literal.back.get(i, i) for i in self._encode(literal.backend, text)]
        tokens = [token for token in literal.private if token != literal.unknown]
        control = {self.backend.token_to_id(token) for token in tokens}
        codes = {literal.private[token] for token in tokens}
        if sum(i in control for i in ids) != sum(c in codes for c in text):
            raise TokenizerError(
                f"{self.name}: text that spells out a control token cannot be told from the token itself"
            )
        return ids

    def check_ids(self, ids: Iterable[int]) -> None:
        """Raise TokenizerError, naming the token, where one has no row in the model's vocabulary matrix."""
        for i in ids:
            if self.rows is not None and not 0 <= i < self.rows:
                token = self.backend.id_to_token(i)
                raise TokenizerError(
                    f"{self.name}: token {token!r} has id {i}, but the model has {self.rows} vocabulary rows",
                    COPY_AGAIN,
                )

    def _template(self) -> ChatTemplate:
        if self.template is None:
            raise TokenizerError(
                "this model has no chat template (a base model?)", "give --raw to continue the text as it is"
            )
        return self.template

    def _encode(self, backend: tokenizers.Tokenizer, text: str, add: bool = False) -> list[int]:
        def refusal(error: BaseException) -> TokenizerError:
            if isinstance(error, TypeError | UnicodeEncodeError):  # lone surrogates: bytes that were not UTF-8
                return TokenizerError("the text is not valid Unicode")
            return TokenizerError(f"{self.name} cannot take the text: {error}", "do not trust this model's files")

        with refusing(refusal):
            return list(backend.encode(text, add_special_tokens=add).ids)

    # -- control tokens in other people's text --

    def _controls(self, template: str | None) -> list[str]:
        """Special tokens, and added tokens that the template writes; longest first. template None: all added tokens."""
        found = {
            t.content
            for t in self._added.values()
            if t.content.strip() and (t.special or template is None or t.content in template)
        }
        return sorted(found, key=lambda content: (-len(content), content))

    def _control(self, template: str | None) -> re.Pattern[str]:
        return self._cached("control", template, lambda: _any_of(self._controls(template)))

    def _disguise(self, template: str) -> tuple[dict[int, str | None], dict[int, str]]:
        """Tables for str.translate: characters at the edges of control tokens to private ones, and back."""

        def build() -> tuple[dict[int, str | None], dict[int, str]]:
            edges = sorted({c for token in self._controls(template) for c in (token[0], token[-1])})
            hide: dict[int, str | None] = dict(self._erase(template))
            hide |= {_USER_BASE + i: None for i in range(len(edges))}
            hide |= {ord(c): chr(_USER_BASE + i) for i, c in enumerate(edges)}
            return hide, {_USER_BASE + i: c for i, c in enumerate(edges)}

        return self._cached("disguise", template, build)

    def _hide(self, value: Any, role: Any, table: dict[int, str | None]) -> Any:
        if isinstance(value, str):
            if role == "assistant":  # templates look for tags like </think> in answers, which are the model's own
                special = self._cached(
                    "special", None, lambda: _any_of(t.content for t in self._added.values() if t.special)
                )
                return special.sub(lambda match: match[0].translate(table), value)
            return value.translate(table)
        if isinstance(value, Mapping):
            return {key: self._hide(item, role, table) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._hide(item, role, table) for item in value]
        return value

    def _erase(self, template: str | None) -> dict[int, str | None]:
        return {_CONTROL_BASE + i: None for i in range(len(self._controls(template)))}

    def _literal(self, template: str | None) -> _Literal:
        return self._cached("literal", template, lambda: _Literal.of(self.backend, self._controls(template)))

    def _cached(self, kind: str, template: str | None, build: Any) -> Any:
        key = kind if template is None else f"{kind} of the template"
        if key not in self._tables:
            self._tables[key] = build()
        return self._tables[key]

    # -- ids to text --

    def stream(self) -> Utf8Stream:
        """A decoder that takes one token at a time."""
        return Utf8Stream(self)

    def spell(self, ids: Sequence[int]) -> str:
        """The text of `ids` with special tokens as they are written."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out; equal to what a stream gives in pieces.

        Equal to `tokenizers`' decode but for one thing: where a run of byte-fallback tokens holds both whole characters
        and invalid bytes, the characters are kept, since a stream has shown them already.
        """
        stream = self.stream()
        return "".join([*(stream.push(i) for i in ids), stream.flush()])


@dataclass(frozen=True)
class _Literal:
    """A copy of a tokenizer that knows its control tokens by private-use characters only.

    private: control token to private character; back: the copy's ids of added tokens to the true ones; unknown: the
    token that stands for what the vocabulary lacks, which ordinary text may give.
    """

    backend: tokenizers.Tokenizer
    private: dict[str, str]
    back: dict[int, int]
    unknown: str | None

    @classmethod
    def of(cls, original: tokenizers.Tokenizer, control: Sequence[str]) -> _Literal:
        private = {token: chr(_CONTROL_BASE + i) for i, token in enumerate(control)}
        data = json.loads(original.to_str())
        data["post_processor"] = None
        ids = {token["content"]: token["id"] for token in data["added_tokens"]}
        for token in data["added_tokens"]:
            token["content"] = private.get(token["content"], token["content"])
        unknown = _rename(data["model"], private)
        backend = tokenizers.Tokenizer.from_str(json.dumps(data))
        now = {content: backend.token_to_id(private.get(content, content)) for content in ids}
        return cls(backend, private, {n: ids[content] for content, n in now.items() if n is not None}, unknown)


def _rename(model: dict[str, Any], private: Mapping[str, str]) -> str | None:
    """Rename control tokens in a serialized model's vocabulary, where nothing else refers to them, so that ordinary
    text cannot reach them through it. Returns the unknown token, which keeps its name."""
    vocab, unknown = model.get("vocab"), model.get("unk_token")
    if isinstance(vocab, dict):
        merged = {"".join(m) if isinstance(m, list) else m.replace(" ", "") for m in model.get("merges") or ()}
        for token, mark in private.items():
            if token in vocab and token not in merged and token != unknown:
                vocab[mark] = vocab.pop(token)
    elif isinstance(vocab, list):  # Unigram: [token, score], the unknown one given by its index
        index = model.get("unk_id")
        unknown = vocab[index][0] if index is not None else None
        for entry in vocab:
            if entry[0] in private and entry[0] != unknown:
                entry[0] = private[entry[0]]
    return unknown


class Utf8Stream:
    """Decodes token by token in linear time: `push` returns what became certain, `flush` the rest.

    Complete characters come at once. Bytes that may still become a character are held, at most 3; bytes that cannot
    come out as U+FFFD, unfinished ones at `flush`. The pieces joined are `Tokenizer.decode` of the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._special = frozenset(i for i, t in tokenizer._added.items() if t.special)
        kinds = _decoder_kinds(self._backend)
        self._byte_level = bool(kinds) and kinds <= {"ByteLevel", "Fuse"}
        self._hold = "ByteLevel" in kinds  # among other decoders: characters are whole when no U+FFFD ends them
        self._fallback = "ByteFallback" in kinds
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace" if self._byte_level else _PER_BYTE)
        self._context: list[list[int]] = []  # last tokens that were decoded and emitted, a character's bytes together
        self._pending: list[int] = []  # tokens of a character that is not complete

    def push(self, token: int) -> str:
        """Text that `token` completes, often empty."""
        text = None if token in self._special else self._backend.id_to_token(token)
        if text is None:
            return ""
        if self._byte_level:
            return self._utf8.decode(_token_bytes(text))
        if not self._fallback:
            self._pending.append(token)
            piece = self._decode(self._pending)
            if self._hold and piece.endswith("\ufffd") and len(self._pending) < _WINDOW:
                return ""
            return self._emit(piece)
        byte = _BYTE.fullmatch(text)
        if byte is None:
            return self.flush() + self._emit(self._decode([token]), token)
        self._pending.append(token)
        piece = self._utf8.decode(bytes([int(byte[1], 16)]))
        if not piece:
            return ""
        if "\ufffd" in piece and not self._is_replacement_character():
            return self._invalid(piece)
        return self._emit(self._decode(self._pending))

    def flush(self) -> str:
        """What was held, at the end of the text; the stream can go on after it."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        if self._byte_level or not self._pending:
            return rest
        if self._fallback:
            return self._invalid(rest)
        return self._emit(self._decode(self._pending))

    def _decode(self, tokens: list[int]) -> str:
        """The text that `tokens` add to the context (decoders strip a space at the start of a text only)."""
        if not self._context:
            return self._backend.decode(tokens, skip_special_tokens=False)
        context = [token for unit in self._context for token in unit]
        before = self._backend.decode(context, skip_special_tokens=False)
        return self._backend.decode(context + tokens, skip_special_tokens=False)[len(before) :]

    def _emit(self, piece: str, *tokens: int) -> str:
        self._context = [*self._context, [*self._pending, *tokens]][-_WINDOW:]
        self._pending = []
        return piece

    def _is_replacement_character(self) -> bool:
        names = [self._backend.id_to_token(i) for i in self._pending]
        return [n.upper() for n in names if n] == ["<0XEF>", "<0XBF>", "<0XBD>"]

    def _invalid(self, piece: str) -> str:
        """`piece` ends a run of bytes that were not a character; those that may start the next one stay pending."""
        held = len(self._utf8.getstate()[0])
        self._pending = self._pending[-held:] if held else []
        if not self._context:  # the text has begun, though with nothing that may be decoded beside what follows
            anchor = self._backend.token_to_id("<0x41>")
            self._context = [] if anchor is None else [[anchor]]
        return piece


_BYTE = re.compile(r"<0[xX]([0-9A-Fa-f]{2})>")
_PER_BYTE = "twobit-per-byte"
codecs.register_error(_PER_BYTE, lambda e: ("\ufffd" * (e.end - e.start), e.end))  # type: ignore[attr-defined]


def _byte_alphabet() -> dict[str, int]:
    """Characters by which byte-level BPE names the 256 bytes (GPT-2): printable ones themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a token with a character outside the alphabet is its own text (added tokens)."""
    try:
        return bytes([_BYTES[c] for c in token])
    except KeyError:
        return token.encode()


def _decoder_kinds(backend: tokenizers.Tokenizer) -> set[str]:
    if backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    if isinstance(state, dict) and state.get("type") == "Sequence":
        return {str(d.get("type")) for d in state.get("decoders", [])}
    return {str(state.get("type"))} if isinstance(state, dict) else set()


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    ordered = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _backend(path: Path) -> tokenizers.Tokenizer:
    def refusal(error: BaseException) -> TokenizerError:
        return TokenizerError(unreadable(path, error), COPY_AGAIN)

    if (short := tokenizer_cache.read(path)) is not None:
        with suppress(TokenizerError), refusing(refusal):  # damaged: the file itself will do
            return tokenizers.Tokenizer.from_buffer(short)
    with refusing(refusal):
        return tokenizers.Tokenizer.from_buffer(path.read_bytes())  # from_file takes no path that is not UTF-8


@contextmanager
def refusing(refusal: Callable[[BaseException], TwobitError]) -> Iterator[None]:
    """Turns what the tokenizers library raises into `refusal` of it: plain Exception, and where it panics over a
    hostile file an exception that is no Exception."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise refusal(error) from error
        raise


def unreadable(path: Path, error: BaseException) -> str:
    """What is wrong with a tokenizer.json that the tokenizers library does not read."""
    try:
        kind = json.loads(path.read_bytes())["model"]["type"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        kind = None
    if isinstance(kind, str) and kind not in _KINDS:
        return f"{path}: a tokenizer of type {kind[:40]!r} is none of {', '.join(_KINDS)}"
    return f"{path} cannot be read: {error}"


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} where there is no such file."""
    if path.exists() and not path.is_file():  # a pipe would never end
        raise TokenizerError(f"{path} is not a regular file", COPY_AGAIN)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}", COPY_AGAIN) from error
    if not isinstance(data, dict):
        raise TokenizerError(f"{path} does not hold a JSON object", COPY_AGAIN)
    return data


def _content(token: Any) -> str | None:
    """A special token of tokenizer_config.json: text, or an object with its text as `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _ids(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0}


def _add_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Tokens that only tokenizer_config.json knows, added as transformers adds them."""
    present = {repr(t) for t in backend.get_added_tokens_decoder().values()}
    decoder = settings.get("added_tokens_decoder")
    entries = decoder if isinstance(decoder, Mapping) else {}
    new: list[tokenizers.AddedToken] = []
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for _, entry in sorted(entries.items(), key=lambda item: int(item[0]) if str(item[0]).isdecimal() else -1):
        content = _content(entry)
        if content is None:
            raise TokenizerError("tokenizer_config.json: added_tokens_decoder holds something that is not a token")
        token = tokenizers.AddedToken(content, **{f: bool(entry[f]) for f in flags if f in entry})
        if repr(token) not in present:
            new.append(token)
    known = {t.content for t in [*backend.get_added_tokens_decoder().values(), *new]}
    new += [tokenizers.AddedToken(t, special=True) for t in dict.fromkeys(special.values()) if t not in known]
    backend.add_tokens(new)
