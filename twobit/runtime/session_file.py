"""A session on disk: the tokens that were evaluated and their keys and values.

    bytes 0-15     b"twobit session\\n\\0"
    bytes 16-79    build id of the model, hexadecimal
    bytes 80-111   version of twobit, padded with zeros
    bytes 112-127  little-endian: tokens n, past the last position written h, bytes of the state (8 bytes)
    then           n token ids of 4 bytes, the state, SHA-256 of everything before it

A model gives the same bits only to the twobit that wrote them, hence the version. Keys and values are data: nothing in
the file steers anything, and its size follows from n and h alone.
"""

from __future__ import annotations

import hashlib
import os
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import twobit
from twobit.errors import FormatError, TwobitError, UsageError

MAGIC = b"twobit session\n\0"
_HEADER = struct.Struct("<16s64s32sIIQ")


@dataclass(frozen=True)
class State:
    """build: id of the model; high: past the highest position ever written; state: uint8 [bytes]."""

    build: str
    high: int
    tokens: list[int]
    state: np.ndarray


def write(path: Path, saved: State) -> None:
    """Write `saved`, by way of a temporary file beside `path`. Only its owner may read it: it holds a conversation."""
    build, version = saved.build.encode("ascii"), twobit.__version__.encode("ascii")
    header = _HEADER.pack(MAGIC, build, version, len(saved.tokens), saved.high, saved.state.size)
    digest = hashlib.sha256()
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
        with os.fdopen(handle, "wb") as file:
            for part in (header, np.asarray(saved.tokens, "<i4").tobytes(), saved.state.data):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise TwobitError(f"{path} cannot be written: {error.strerror or error}") from error
        raise


def read(path: Path, build: str, context: int, state_bytes: Callable[[int, int], int]) -> State:
    """The session in `path`, checked: of this `build` and this twobit, at most `context` tokens, undamaged.

    `state_bytes(n, h)` is the size that a state of n tokens and h positions written must have; 0: impossible.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or header[:16] != MAGIC:
                raise FormatError(f"{path} is no saved session of twobit")
            _, found, version, n, high, n_state = _HEADER.unpack(header)
            if found != build.encode("ascii"):
                raise FormatError(
                    f"{path} is a session of another model: build {ascii(found[:12])[2:-1]}, this is {build[:12]}",
                    "use it with the model that it was saved with",
                )
            if version != twobit.__version__.encode("ascii").ljust(32, b"\0"):
                theirs = ascii(version.rstrip(b"\0"))[2:-1]
                raise FormatError(
                    f"{path} was saved by twobit {theirs}, this is {twobit.__version__}", "start a new session"
                )
            if n > context:
                raise UsageError(
                    f"{path} holds {n} tokens, but the context holds {context}", "raise --ctx where the model allows it"
                )
            if size != _HEADER.size + 4 * n + n_state + 32 or n_state != state_bytes(n, min(high, 2**31 - 1)):
                raise FormatError(f"{path} is damaged: its size is not that of {n} tokens", "start a new session")
            tokens, state = file.read(4 * n), np.empty(n_state, np.uint8)
            complete = file.readinto(state.data) == n_state
            digest = hashlib.sha256(header + tokens)
            digest.update(state.data)
            if not complete or file.read(33) != digest.digest():
                raise FormatError(f"{path} is damaged: its checksum does not match", "start a new session")
    except OSError as error:
        raise TwobitError(f"{path} cannot be read: {error.strerror or error}") from error
    return State(build, high, np.frombuffer(tokens, "<i4").tolist(), state)
