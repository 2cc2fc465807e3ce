"""Sessions that are kept: the common prefix, saving and loading, and files that are not to be trusted."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
from families import VOCAB
from packed import packed_model

from twobit.errors import FormatError, TwobitError, UsageError
from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling
from twobit.runtime.session import Session, StepOptions


def ids(n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(5, VOCAB, n).tolist()


def rest_of(session: Session, tokens: list[int]) -> bytes:
    logits = session.eval(tokens, every=True)
    assert logits is not None
    return logits.tobytes()


def fresh(model: Model, tokens: list[int], more: list[int]) -> bytes:
    session = Session(model, 4096, 1)
    session.eval(tokens, logits=False)
    return rest_of(session, more)


@pytest.mark.parametrize("variant", ["llama", "mistral", "gemma4_text"])
def test_sync_keeps_the_common_prefix(variant: str) -> None:
    model = Model.open(packed_model(variant))
    session = Session(model, 4096, 1)
    first, more = ids(60), ids(4, seed=9)
    assert session.sync(first) == 60
    assert session.sync(first) == 0
    assert session.sync(first[:50] + ids(7, seed=2)) == 7
    assert session.tokens == first[:50] + ids(7, seed=2)
    assert rest_of(session, more) == fresh(model, first[:50] + ids(7, seed=2), more)
    assert session.sync(first[:20]) == 0
    assert session.sync([]) == 0
    assert session.length == 0


def test_sync_after_steps_keeps_what_they_emitted() -> None:
    model = Model.open(packed_model("llama"))
    session = Session(model, 512, 1)
    history = ids(12)
    session.sync(history[:-1])
    while len(history) < 60:
        history += session.step(history, Sampling(), StepOptions(draft_max=5, draft_fixed=True)).tokens
    assert session.tokens == history[:-1]
    assert session.sync([*history, 7]) == 2
    assert rest_of(session, ids(3)) == fresh(model, [*history, 7], ids(3))


def test_sync_never_keeps_what_the_draft_evaluated() -> None:
    session = Session(Model.open(packed_model("llama")), 512, 1)
    tokens = ids(30)
    session.sync(tokens[:10])
    session.eval(tokens[10:20], draft=True)
    session.eval(tokens[20:])
    assert session.sync(tokens) == 20


def test_sync_starts_again_where_a_window_forgot() -> None:
    model = Model.open(packed_model("mistral"))
    session = Session(model, 4096, 1)
    tokens = ids(1500)
    session.sync(tokens)
    assert session.sync([*tokens[:100], 9]) == 101
    assert session.sync([*tokens[:100], 9, 8]) == 1


@pytest.mark.parametrize(("variant", "n"), [("llama", 61), ("mistral", 1500), ("gemma3_text", 24), ("gemma4_text", 40)])
def test_a_saved_session_goes_on_with_the_same_bits(variant: str, n: int, tmp_path: Path) -> None:
    model = Model.open(packed_model(variant))
    session = Session(model, 4096, 1)
    tokens, more = ids(n), ids(20, seed=5)
    session.sync([*tokens[: n // 2], 7, 7])
    session.sync(tokens)
    session.save(tmp_path / "a")
    expected = rest_of(session, more)

    other = Session(model, 4096, 1)
    other.sync(ids(33, seed=3))
    assert other.load(tmp_path / "a") == n
    assert other.tokens == tokens
    other.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert rest_of(other, more) == expected
    other.rewind(n - 1)
    assert other.length == n - 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_an_empty_session_and_one_token(tmp_path: Path) -> None:
    model = Model.open(packed_model("llama"))
    for tokens in ([], [5]):
        session = Session(model, 64, 1)
        session.sync(tokens)
        session.save(tmp_path / "a")
        assert Session(model, 64, 1).load(tmp_path / "a") == len(tokens)


def test_a_session_of_another_model_or_too_long_is_refused(tmp_path: Path) -> None:
    session = Session(Model.open(packed_model("llama")), 64, 1)
    session.sync(ids(20))
    session.save(tmp_path / "a")
    with pytest.raises(FormatError, match="another model"):
        Session(Model.open(packed_model("llama-bias")), 64, 1).load(tmp_path / "a")
    with pytest.raises(UsageError, match="20 tokens, but the context holds 16"):
        Session(session.model, 16, 1).load(tmp_path / "a")
    session.eval([5], draft=True)
    with pytest.raises(TwobitError, match="2-bit part alone"):
        session.save(tmp_path / "b")
    session.sync(ids(20))
    with pytest.raises(TwobitError, match="cannot be written"):
        session.save(tmp_path / "no" / "b")
    with pytest.raises(TwobitError, match="cannot be read"):
        session.load(tmp_path / "no")
    with pytest.raises(TwobitError, match="cannot be read"):
        session.load(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_hostile_files_are_refused_and_change_nothing(tmp_path: Path) -> None:
    model = Model.open(packed_model("mistral"))
    session = Session(model, 64, 1)
    tokens = ids(20)
    session.sync(tokens)
    session.save(tmp_path / "a")
    good = (tmp_path / "a").read_bytes()

    def signed(body: bytes) -> bytes:
        return body + hashlib.sha256(body).digest()

    def header(at: int, form: str, value: int) -> bytes:
        return signed(good[:at] + struct.pack(form, value) + good[at + struct.calcsize(form) : -32])

    bad = [good[:n] for n in (0, 5, 127, 128, 200, len(good) - 1)]
    bad += [good + b"x", b"x" + good[1:], signed(good[:80] + b"9" + good[81:-32])]
    bad += [header(112, "<I", n) for n in (0, 19, 21, 2**31, 2**32 - 1)]
    bad += [header(116, "<I", n) for n in (0, 19, 2**31 - 1, 2**32 - 1)]
    bad += [header(120, "<Q", n) for n in (0, 1, 2**40, 2**63, 2**64 - 1)]
    bad += [header(128, "<I", n) for n in (VOCAB, 2**31, 2**32 - 1)]
    bad += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in (130, 300, len(good) - 40, len(good) - 1)]
    for content in bad:
        (tmp_path / "b").write_bytes(content)
        with pytest.raises(TwobitError):
            session.load(tmp_path / "b")
        assert session.tokens == tokens
    assert rest_of(session, ids(4)) == fresh(model, tokens, ids(4))
    session.load(tmp_path / "a")
    assert rest_of(session, ids(4)) == fresh(model, tokens, ids(4))
