"""A strict reader of safetensors headers: what a file says it holds, believed only where the file can hold it.

A safetensors file is a little-endian u64 (the length of the header), the header (a JSON object that gives dtype, shape
and byte range of each tensor) and the data. Files come from strangers, so every number is checked against the bytes
that are there before it is used.

The verdict is that of the stock `safetensors` reader, but stricter in these points:

- the header must start with `{` (the format's own rule, which the stock reader does not check);
- duplicate keys are refused at any level, JSON nested deeper than `MAX_DEPTH` likewise;
- `__metadata__` must be an object of strings (not null) and a tensor's entry an object (not an array of its fields);
- sizes and offsets must be below `MAX_BYTES`, also beside a dimension of zero.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from twobit.errors import FormatError

MAX_HEADER = 100_000_000  # bytes; the stock reader's cap
MAX_DEPTH = 16  # a valid header needs 3
MAX_BYTES = 1 << 62  # no file is larger; keeps every product and sum inside 64 bits

DOWNLOAD_AGAIN = "the file is damaged: download it again"

# Bits per element. F4 and F6 pack several elements into a byte.
DTYPE_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip

# What numpy calls them. It has no bfloat16: the bits come as uint16. Other dtypes come as bytes.
NUMPY_DTYPES = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "BF16": "<u2", "I32": "<i4",
    "U32": "<u4", "F32": "<f4", "C64": "<c8", "F64": "<f8", "I64": "<i8", "U64": "<u8",
}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: bytes `begin` to `end` of the data section, which starts at `Header.data_start`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A checked header. Tensors are in the header's order; `size` is the whole file's, in bytes."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    size: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of a safetensors file; no tensor data is read.

    Raises FormatError, naming file and tensor, where the file is missing, truncated, damaged or hostile.
    """
    path = Path(path)
    with _open(path) as (file, size):
        return header_from(path, file.read, size)


def header_from(path: Path, read: Callable[[int], bytes], size: int) -> Header:
    """The checked header of a file of `size` bytes that `read(n)` gives from its start; `path` names it in errors."""
    start = read(8)
    if len(start) < 8:
        raise FormatError(f"{path}: truncated: {size} bytes are too few for a safetensors file", DOWNLOAD_AGAIN)
    length = int.from_bytes(start, "little")
    if length > size - 8 or length > MAX_HEADER:
        _refuse_other_kinds(path, start)
        if length > MAX_HEADER:
            raise FormatError(f"{path}: header of {length} bytes, more than the {MAX_HEADER} allowed", DOWNLOAD_AGAIN)
        raise FormatError(
            f"{path}: truncated: header of {length} bytes, {size - 8} bytes left in the file", DOWNLOAD_AGAIN
        )
    text = read(length)
    if len(text) != length:
        raise FormatError(f"{path}: truncated while it was read", DOWNLOAD_AGAIN)
    entries = _parse(path, text)
    metadata = _metadata(path, entries.pop("__metadata__", {}))
    tensors = {name: _tensor_info(path, name, entry) for name, entry in entries.items()}
    _check_layout(path, tensors, size - 8 - length)
    return Header(tensors, metadata, 8 + length, size)


def map_file(path: str | os.PathLike[str], header: Header) -> np.ndarray:
    """Map the whole file read-only as uint8; refuses a file whose size is not the header's."""
    path = Path(path)
    with _open(path) as (file, size):
        if size != header.size:
            raise FormatError(f"{path}: changed while in use: {header.size} bytes before, {size} now", DOWNLOAD_AGAIN)
        return np.memmap(file, dtype=np.uint8, mode="r")


def tensor_view(mapped: np.ndarray, header: Header, name: str) -> np.ndarray:
    """The tensor as a read-only view of `map_file`'s array.

    It has the tensor's shape and the type in `NUMPY_DTYPES`, or is flat uint8 where numpy has no such type. It is
    aligned to its item size only if the file is. Raises FormatError where the file has no such tensor.
    """
    info = header.tensors.get(name)
    if info is None:
        raise FormatError(f"no tensor {name!r} in the file")
    raw = mapped[header.data_start + info.begin : header.data_start + info.end]
    dtype = NUMPY_DTYPES.get(info.dtype)
    view = raw if dtype is None else raw.view(dtype).reshape(info.shape)
    view.flags.writeable = False
    return view


def map_tensor(path: str | os.PathLike[str], header: Header, name: str) -> np.ndarray:
    """`tensor_view` of a mapping of its own."""
    return tensor_view(map_file(path, header), header, name)


@contextmanager
def _open(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file opened for reading, and its size; FormatError for everything else."""
    try:
        # Looked at before it is opened, because opening a FIFO waits for a writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FormatError(f"{path}: not a regular file")
        with open(path, "rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _refuse_other_kinds(path: Path, start: bytes) -> None:
    """Say so where an impossible header length is really the first bytes of something else."""
    if start.startswith(b"GGUF"):
        raise FormatError(f"{path}: a GGUF file, not safetensors", "give the original full-precision checkpoint")
    if start.startswith(b"version "):
        raise FormatError(f"{path}: a Git LFS pointer, not the file itself", "run `git lfs pull`, or download it again")
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):
        raise FormatError(f"{path}: a pickle, not safetensors; it was not opened", "convert it to safetensors first")
    if start.lstrip()[:1] == b"<":
        raise FormatError(f"{path}: a web page, not safetensors", "download it again")


# A JSON string, to its end or to the end of the text; possessive, so that no text takes more than linear time.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def _depth(text: bytes) -> int:
    """The deepest nesting of brackets outside strings."""
    bare = np.frombuffer(_STRING.sub(b"", text), np.uint8)
    step = np.zeros(len(bare), np.int8)
    step[(bare == ord("[")) | (bare == ord("{"))] = 1
    step[(bare == ord("]")) | (bare == ord("}"))] = -1
    return int(np.cumsum(step, dtype=np.int32).max(initial=0))


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """The header as JSON, by the JSON standard: no duplicates, no NaN, no lone surrogates, no deep nesting."""
    if not text.startswith(b"{"):
        raise FormatError(f"{path}: the header does not start with '{{'", DOWNLOAD_AGAIN)
    # json recurses in C: depth is checked first.
    depth = _depth(text)
    if depth > MAX_DEPTH:
        raise FormatError(f"{path}: header nested {depth} deep, more than the {MAX_DEPTH} allowed", DOWNLOAD_AGAIN)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    raise FormatError(f"{path}: {_short(repr(key))} stands twice in the header", DOWNLOAD_AGAIN)
                seen.add(key)
        for key, value in items:
            key.encode()  # a lone surrogate, which JSON may spell but UTF-8 may not, raises
            if isinstance(value, str):
                value.encode()
        return result

    def fraction(digits: str) -> float:
        value = float(digits)
        if value in (math.inf, -math.inf):
            raise ValueError("a number is out of range")
        return value

    def integer(digits: str) -> int | float:
        # As in the stock reader, -0 and what passes 64 bits are no integers. A million digits never reach int().
        return int(digits) if len(digits) <= 20 and digits != "-0" else fraction(digits)

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is no JSON")

    try:
        result = json.loads(
            text.decode(), object_pairs_hook=pairs, parse_int=integer, parse_float=fraction, parse_constant=constant
        )
    except ValueError as error:  # UnicodeDecodeError, UnicodeEncodeError and JSONDecodeError are ValueErrors
        raise FormatError(f"{path}: the header is not valid JSON: {_short(str(error))}", DOWNLOAD_AGAIN) from error
    entries: dict[str, Any] = result  # an object, since it starts with '{'
    return entries


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise FormatError(f"{path}: __metadata__ is not an object of strings", DOWNLOAD_AGAIN)
    return value


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_BYTES


def _tensor_info(path: Path, name: str, entry: Any) -> TensorInfo:
    """One entry of the header, its byte range equal to what dtype and shape ask for."""

    def refuse(what: str) -> NoReturn:
        raise FormatError(f"{path}: tensor {_short(repr(name))}: {what}", DOWNLOAD_AGAIN)

    if not isinstance(entry, dict):
        refuse("its header entry is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        refuse(f"unknown dtype {_short(repr(dtype))}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        refuse(f"shape {_short(repr(shape))} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        refuse(f"data_offsets {_short(repr(offsets))} are not two sizes")
    begin, end = offsets
    if end < begin:
        refuse(f"data_offsets end before they begin: {begin}, {end}")
    elements = 1
    for size in shape:  # in order and without a look ahead for zeros, as the stock reader multiplies
        elements *= size
        if elements > MAX_BYTES:
            refuse(f"shape {_short(repr(shape))} is too large for any file")
    bits = elements * DTYPE_BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        refuse(f"{dtype} {_short(repr(shape))} needs {bits / 8:.15g} bytes, its data_offsets give {end - begin}")
    return TensorInfo(dtype, tuple(shape), begin, end)


def _check_layout(path: Path, tensors: dict[str, TensorInfo], data: int) -> None:
    """Tensors lie one after another, from the first byte of the data section (`data` bytes long) to its last."""
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            what = "overlaps the tensor before it" if info.begin < position else "leaves a hole before it"
            raise FormatError(
                f"{path}: tensor {_short(repr(name))} {what}: begins at byte {info.begin}, expected {position}",
                DOWNLOAD_AGAIN,
            )
        if info.end > data:
            raise FormatError(
                f"{path}: truncated: tensor {_short(repr(name))} ends at byte {info.end} of {data} bytes of data",
                DOWNLOAD_AGAIN,
            )
        position = info.end
    if position != data:
        raise FormatError(f"{path}: {data - position} bytes after the last tensor", DOWNLOAD_AGAIN)


def _short(text: str, limit: int = 120) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
