"""The safetensors header reader: classes E2 and E3, and the stock reader's verdict where we are not stricter."""

from __future__ import annotations

import json
import os
import random
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from twobit.errors import FormatError
from twobit.format.safetensors_file import (
    DTYPE_BITS,
    MAX_DEPTH,
    MAX_HEADER,
    TensorInfo,
    map_file,
    map_tensor,
    read_header,
    tensor_view,
)

F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def encode(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def verdict(content: bytes, path: Path) -> str | None:
    """None where the file is accepted, else the message."""
    path.write_bytes(content)
    try:
        read_header(path)
    except FormatError as error:
        assert str(path) in str(error)
        return str(error)
    return None


def stock_accepts(content: bytes) -> bool:
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_reads_what_the_stock_writer_writes(path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.integers(-9, 9, (7,)).astype(np.int8),
        "scalar": np.array(2.5, np.float16),
        "empty": np.zeros((0, 4), np.float64),
        "ключ": np.arange(6, dtype=np.int64).reshape(2, 3),
    }
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert header.size == path.stat().st_size
    assert set(header.tensors) == set(tensors)
    mapped = map_file(path, header)
    for name, value in tensors.items():
        for view in (tensor_view(mapped, header, name), map_tensor(path, header, name)):
            assert view.dtype == value.dtype
            assert view.shape == value.shape
            np.testing.assert_array_equal(view, value)
            assert not view.flags.writeable
    with pytest.raises(FormatError, match="no tensor 'z'"):
        tensor_view(mapped, header, "z")


def test_bfloat16_is_seen_as_its_bits(path: Path) -> None:
    path.write_bytes(encode({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}, b"\x01\x00\x80\x3f"))
    header = read_header(path)
    assert header.tensors["a"] == TensorInfo("BF16", (2,), 0, 4)
    assert map_tensor(path, header, "a").tolist() == [0x0001, 0x3F80]


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_has_the_stock_readers_size(path: Path, dtype: str) -> None:
    for size in (0, 1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64):
        content = encode({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}}, bytes(size))
        assert stock_accepts(content) == (size == DTYPE_BITS[dtype])
        assert (verdict(content, path) is None) == (size == DTYPE_BITS[dtype])


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1])
def test_header_length_is_not_trusted(path: Path, length: int) -> None:
    content = struct.pack("<Q", length) + encode({"a": F32}, b"1234")[8:]
    assert not stock_accepts(content)
    message = verdict(content, path)
    assert message and (
        "truncated" in message or "more than" in message or "start with" in message or "JSON" in message
    )


def test_header_length_is_capped(path: Path) -> None:
    # A sparse file that really is that long.
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER + 1))
        file.truncate(MAX_HEADER + 100)
    with pytest.raises(FormatError, match=f"header of {MAX_HEADER + 1} bytes, more than"):
        read_header(path)


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 30, -1])
def test_truncated_file_says_so(path: Path, keep: int) -> None:
    message = verdict(encode({"a": F32}, b"1234")[:keep], path)
    assert message and "truncated" in message
    with pytest.raises(FormatError) as caught:
        read_header(path)
    assert caught.value.hint and "download" in caught.value.hint


# name: (header, data, what the message must say, stricter than the stock reader)
REFUSED: dict[str, tuple[Any, bytes, str, bool]] = {
    "shape larger than offsets": (
        {"a": {"dtype": "F32", "shape": [32, 8], "data_offsets": [0, 4]}},
        b"1234",
        "'a'",
        False,
    ),
    "offsets larger than shape": (
        {"a": {"dtype": "F32", "shape": [32, 8], "data_offsets": [0, 65536]}},
        bytes(65536),
        r"'a': F32 \[32, 8\] needs 1024 bytes, its data_offsets give 65536",
        False,
    ),
    "reversed offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, b"1234", "'a'.*before", False),
    "reversed offsets, negative size": ({"a": {**F32, "shape": [0], "data_offsets": [4, 0]}}, b"1234", "'a'", False),
    "size overflows 64 bits": ({"a": {**F32, "shape": [2**33, 2**31]}}, b"1234", "too large", False),
    "size overflows to the right number": ({"a": {**F32, "shape": [2**62 + 1]}}, b"1234", "'a'", False),
    "shape beyond 64 bits": ({"a": {**F32, "shape": [10**30]}}, b"1234", "'a'.*shape", False),
    "negative shape": ({"a": {**F32, "shape": [-1]}}, b"1234", "'a'.*shape", False),
    "bool for a size": ({"a": {**F32, "shape": [True]}}, b"1234", "'a'.*shape", False),
    "bool for an offset": ({"a": {**F32, "data_offsets": [False, 4]}}, b"1234", "'a'.*data_offsets", False),
    "float for a size": ({"a": {**F32, "shape": [1.0]}}, b"1234", "'a'.*shape", False),
    "string for a size": ({"a": {**F32, "shape": ["1"]}}, b"1234", "'a'.*shape", False),
    "minus zero": (b'{"a":{"dtype":"F32","shape":[-0],"data_offsets":[0,0]}}', b"", "'a'.*shape", False),
    "three offsets": ({"a": {**F32, "data_offsets": [0, 4, 8]}}, b"1234", "'a'.*data_offsets", False),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234", "'a'.*shape", False),
    "no dtype": ({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"1234", "'a'.*dtype", False),
    "no offsets": ({"a": {"dtype": "F32", "shape": [1]}}, b"1234", "'a'.*data_offsets", False),
    "unknown dtype": ({"a": {**F32, "dtype": "F31"}}, b"1234", "'a'.*unknown dtype 'F31'", False),
    "dtype no string": ({"a": {**F32, "dtype": 4}}, b"1234", "'a'.*dtype", False),
    "half a byte": ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}, b"1", "'a'.*1.5 bytes", False),
    "entry null": ({"a": None}, b"", "'a'", False),
    "overlap": ({"a": F32, "b": F32}, b"1234", "overlaps", False),
    "partial overlap": (
        {"a": {**F32, "shape": [2], "data_offsets": [0, 8]}, "b": {**F32, "data_offsets": [4, 8]}},
        bytes(8),
        "'b' overlaps",
        False,
    ),
    "hole": ({"a": F32, "b": {**F32, "data_offsets": [5, 9]}}, bytes(9), "'b' leaves a hole", False),
    "hole at the start": ({"a": {**F32, "data_offsets": [4, 8]}}, bytes(8), "'a' leaves a hole", False),
    "trailing bytes": ({"a": F32}, bytes(5), "1 bytes after the last tensor", False),
    "trailing bytes, no tensor": ({}, bytes(1), "1 bytes after", False),
    "metadata not strings": ({"__metadata__": {"a": 1}}, b"", "__metadata__", False),
    "metadata no object": ({"__metadata__": ["a"]}, b"", "__metadata__", False),
    "metadata null": ({"__metadata__": None}, b"", "__metadata__", True),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{}}', b"", "'__metadata__' stands twice", False),
    "metadata key twice": (b'{"__metadata__":{"k":"1","k":"2"}}', b"", "'k' stands twice", True),
    "tensor twice": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}',
        b"1234",
        "'a' stands twice",
        True,
    ),
    "tensor twice, spelled differently": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"\\u0061":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b"1234",
        "'a' stands twice",
        True,
    ),
    "dtype twice": (
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"dtype":"I32"}}',
        b"1234",
        "'dtype' stands twice",
        False,
    ),
    "entry as a list": ({"a": ["F32", [1], [0, 4]]}, b"1234", "'a'.*not an object", True),
    "array": (b"[]", b"", "start with", False),
    "leading space": (b" {}", b"", "start with", True),
    "byte order mark": (b"\xef\xbb\xbf{}", b"", "start with", False),
    "empty": (b"", b"", "start with", False),
    "not UTF-8": (b'{"\xff":{}}', b"", "JSON", False),
    "overlong UTF-8": (b'{"\xc0\x80":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', b"", "JSON", False),
    "lone surrogate": (b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}', b"", "JSON", False),
    "trailing comma": (b'{"__metadata__":{},}', b"", "JSON", False),
    "NaN": (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":NaN}}', b"1234", "JSON", False),
    "huge float": (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1e999}}', b"1234", "JSON", False),
    "a million digits": (
        b'{"a":{"dtype":"F32","shape":[' + b"1" * 1000000 + b'],"data_offsets":[0,4]}}',
        b"1234",
        "JSON",
        False,
    ),
    "padded with NUL": (b"{}\0\0", b"", "JSON", False),
    "a dimension beyond any file, beside zero": (
        {"a": {**F32, "shape": [0, 2**63], "data_offsets": [0, 0]}},
        b"",
        "'a'",
        True,
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_refused(path: Path, case: str) -> None:
    header, data, expected, stricter = REFUSED[case]
    content = encode(header, data)
    path.write_bytes(content)
    with pytest.raises(FormatError, match=expected) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert caught.value.hint
    assert len(str(caught.value)) < len(str(path)) + 500
    assert stock_accepts(content) == stricter


# What is odd but right: the stock reader takes it, and so do we.
ACCEPTED: dict[str, tuple[Any, bytes]] = {
    "no tensor": ({}, b""),
    "only metadata": ({"__metadata__": {"a": "b"}}, b""),
    "padded with spaces": (json.dumps({"a": F32}).encode() + b"  \n\t ", b"1234"),
    "scalar": ({"a": {**F32, "shape": []}}, b"1234"),
    "empty tensors share an offset": (
        {
            "a": F32,
            "b": {**F32, "shape": [0], "data_offsets": [4, 4]},
            "c": {**F32, "shape": [0, 9], "data_offsets": [0, 0]},
        },
        b"1234",
    ),
    "order of the header is not order of the data": ({"a": {**F32, "data_offsets": [4, 8]}, "b": F32}, bytes(8)),
    "unknown field": ({"a": {**F32, "x": {"y": [1, 2]}}}, b"1234"),
    "brackets in a name": ({"[" * 1000 + '\\"{': F32}, b"1234"),
    "empty name": ({"": F32}, b"1234"),
}


@pytest.mark.parametrize("case", sorted(ACCEPTED))
def test_accepted(path: Path, case: str) -> None:
    content = encode(*ACCEPTED[case])
    assert stock_accepts(content)
    assert verdict(content, path) is None


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":' + b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}",
        b'{"a":"' + b'\\"' * 2_000_000 + b"[" * 100_000,
        b'{"' + b"\\" * 4_000_001,
    ],
)
def test_deep_or_endless_headers_are_refused_quickly(path: Path, text: bytes) -> None:
    start = time.monotonic()
    message = verdict(encode(text), path)
    assert message and ("deep" in message or "JSON" in message)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (b"GGUF\x03\0\0\0", "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (b"PK\x03\x04" + bytes(40), "pickle"),
        (b"<!doctype html>", "web page"),
    ],
)
def test_other_kinds_of_file_are_named(path: Path, start: bytes, expected: str) -> None:
    message = verdict(start + bytes(10), path)
    assert message and expected in message


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "missing", tmp_path / "fifo", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(FormatError):
            read_header(path)


def test_a_file_that_changed_is_not_mapped(path: Path) -> None:
    path.write_bytes(encode({"a": F32}, b"1234"))
    header = read_header(path)
    os.truncate(path, header.size - 1)
    with pytest.raises(FormatError, match="changed while in use"):
        map_file(path, header)


def test_paths_with_spaces_and_other_alphabets(tmp_path: Path) -> None:
    path = tmp_path / "Загрузки Željko" / "my model.safetensors"
    path.parent.mkdir()
    path.write_bytes(encode({"a": F32}, b"1234"))
    assert map_tensor(path, read_header(path), "a").nbytes == 4


def _strict_only(message: str) -> bool:
    """Whether the message is one of the documented points in which we are stricter than the stock reader."""
    return any(
        part in message
        for part in (
            "stands twice",
            "does not start with",
            "deep",
            "__metadata__ is not",
            "not an object",
            "not a list of sizes",
        )
    )


def _assert_agrees(content: bytes, path: Path) -> None:
    message = verdict(content, path)
    if message is None:
        assert stock_accepts(content), content
    elif stock_accepts(content):
        assert _strict_only(message), (content, message)


SEEDS = [
    encode(
        {
            "__metadata__": {"format": "pt"},
            "a": F32,
            "b.weight": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [4, 16]},
        },
        bytes(16),
    ),
    encode(
        {
            "x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]},
            "y": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
        },
        bytes(8),
    ),
]


def test_mutated_files_agree_with_the_stock_reader(path: Path) -> None:
    """Bytes flipped, inserted, deleted and tokens swapped: nothing but FormatError, and the stock reader's verdict."""
    rng = random.Random(0)
    tokens = [
        b"0",
        b"1",
        b"4",
        b"-1",
        b"18446744073709551615",
        b"9223372036854775808",
        b"null",
        b"true",
        b"[]",
        b"{}",
        b'"F32"',
        b'"a"',
        b",",
        b":",
        b"[",
        b"]",
        b"{",
        b"}",
        b'"',
        b"\\",
        b"1e3",
        b"0.0",
        b" ",
        b"\xff",
    ]
    accepted = 0
    for i in range(3000):
        content = bytearray(SEEDS[i % len(SEEDS)])
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(content))
            kind = rng.randrange(5)
            if kind == 0:
                content[at] = rng.randrange(256)
            elif kind == 1:
                content[at] = rng.choice(b'0123456789[]{},:"')
            elif kind == 2:
                del content[at : at + rng.randint(1, 4)]
            else:
                content[at : at + rng.randint(0, 2)] = rng.choice(tokens)
            if not content:
                break
        if rng.random() < 0.7 and len(content) > 8:  # keep the header's length right, so that the parser is reached
            end = content.rfind(b"}") + 1
            content[:8] = struct.pack("<Q", max(end - 8, 0))
        _assert_agrees(bytes(content), path)
        accepted += stock_accepts(bytes(content))
    assert accepted > 100  # the mutations are not all rejected at the door


_SIZES = st.sampled_from([0, 1, 2, 3, 4, 8, 2**31, 2**32, 2**61, 2**63, 2**64 - 1, 2**64, -1, True, 1.0, None, "1"])
_INFO = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "F99", None, 1]),
        "shape": st.one_of(st.lists(_SIZES, max_size=4), st.none()),
        "data_offsets": st.one_of(st.lists(st.integers(0, 16), min_size=2, max_size=2), st.lists(_SIZES, max_size=3)),
    }
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.dictionaries(st.text(max_size=4), _INFO, max_size=3), st.integers(0, 24))
def test_generated_headers_agree_with_the_stock_reader(header: dict[str, Any], data: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _assert_agrees(encode(header, bytes(data)), Path(folder) / "model.safetensors")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPE_BITS)), st.lists(st.sampled_from([0, 1, 2, 8, 24]), max_size=3)),
        max_size=4,
    ),
    st.randoms(use_true_random=False),
)
def test_valid_files_are_accepted(tensors: list[tuple[str, list[int]]], rng: random.Random) -> None:
    """Any tensors laid out one after another, in any order of the header, unless they end inside a byte."""
    position, entries = 0, []
    for i, (dtype, shape) in enumerate(tensors):
        bits = DTYPE_BITS[dtype] * int(np.prod(shape, dtype=np.int64))
        if bits % 8 == 0:
            entries.append(
                (f"t{i}", {"dtype": dtype, "shape": shape, "data_offsets": [position, position + bits // 8]})
            )
            position += bits // 8
    rng.shuffle(entries)
    content = encode(dict(entries), bytes(position))
    assert stock_accepts(content)
    with tempfile.TemporaryDirectory() as folder:
        assert verdict(content, Path(folder) / "model.safetensors") is None
