"""The short form of a tokenizer.json: the same tokenizer, of this very file, and never more than a help."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from families import make_tokenizer
from tokenizers import Tokenizer as Backend

from twobit.runtime import tokenizer_cache
from twobit.runtime.tokenizer import Tokenizer

TEXT = "The quick brown fox, 12345 naïve\n\n日本 <|im_start|> don't"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOBIT_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(tokenizer_cache, "LEAST", 0)
    return make_tokenizer(tmp_path / "model")


def ids(folder: Path) -> list[int]:
    tokenizer = Tokenizer.load(folder, config={})
    tokenizer.close()
    return tokenizer.encode(TEXT)


def test_the_same_ids_from_the_short_form(folder: Path) -> None:
    path = folder / "tokenizer.json"
    before = ids(folder)
    assert tokenizer_cache.read(path) is None
    assert tokenizer_cache.keep(path) and not tokenizer_cache.keep(path)
    short = tokenizer_cache.read(path)
    assert short is not None and len(short) < path.stat().st_size / 1.3
    assert Backend.from_buffer(short).to_str() == Backend.from_file(str(path)).to_str()
    assert ids(folder) == before


def test_another_file_has_another_form(folder: Path) -> None:
    path = folder / "tokenizer.json"
    assert tokenizer_cache.keep(path)
    about = path.stat()
    path.write_bytes(path.read_bytes() + b"\n")
    assert tokenizer_cache.read(path) is None
    path.write_bytes(path.read_bytes()[:-1])
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert tokenizer_cache.read(path) is None


def test_a_merge_with_a_space_stays_a_pair() -> None:
    whole = {"model": {"type": "BPE", "vocab": {"a": 0, " b": 1}, "merges": [["a", " b"]]}}
    short = tokenizer_cache.shorter(json.dumps(whole).encode())
    assert short is not None and json.loads(short) == whole
    assert tokenizer_cache.shorter(b'{"model": {"type": "Unigram", "vocab": []}}') is None


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe", b"[" * 10000])
def test_a_damaged_form_is_left_alone(folder: Path, tmp_path: Path, damage: bytes) -> None:
    path = folder / "tokenizer.json"
    before = ids(folder)
    assert tokenizer_cache.keep(path)
    (file,) = (tmp_path / "state" / "tokenizers").iterdir()
    file.write_bytes(file.read_bytes().partition(b"\n")[0] + b"\n" + damage)
    assert ids(folder) == before


def test_where_nothing_can_be_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWOBIT_HOME", str(tmp_path / "file" / "below"))
    assert not tokenizer_cache.keep(folder / "tokenizer.json")
    (folder / "tokenizer.json").write_text("not json")
    assert not tokenizer_cache.keep(folder / "tokenizer.json")
