"""The C runtime against the torch decoder, and against itself: a token's logits never depend on what came with it."""

from __future__ import annotations

import gc
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCAB
from packed import dequantized, packed_model

from twobit.errors import RuntimeFailure
from twobit.quant.decoder import Decoder, RuntimeRounding
from twobit.runtime.model import Model
from twobit.runtime.session import Session

TOKENS = 150  # past every window (8) and every original RoPE length (64)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Model:
    return Model.open(packed_model(request.param))


def ids(n: int = TOKENS, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(5, VOCAB, n).tolist()


def reference(model: Model, tokens: list[int], *, draft: bool) -> np.ndarray:
    """Logits of the torch decoder on the dequantized weights, with the runtime's activation rounding and fp16 cache."""
    entries = model.packed.manifest.tensors
    wide = {name: (4095, 64) for name, entry in entries.items() if entry.wide}
    rounding = RuntimeRounding((127, 128)) if draft else RuntimeRounding((8191, 128), wide)
    decoder = Decoder(model.architecture, dequantized(model.packed, draft=draft), rounding)
    return decoder.forward(torch.tensor(tokens)).numpy()


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Largest error over all positions, against the range of the logits.

    What remains between the two is activations and keys on the border between two codes: where none is, it is 1e-7.
    """
    assert np.isfinite(found).all()
    error = np.abs(found - expected).max(-1) / (expected.max() - expected.min())
    assert error.max() <= tolerance, f"worst error {error.max():.2e} of the range at position {error.argmax()}"


def test_logits_equal_the_decoder(model: Model) -> None:
    tokens = ids()
    found = Session(model, 256).eval(tokens, every=True)
    assert found is not None
    assert_close(found, reference(model, tokens, draft=False), 5e-4)


def test_draft_logits_equal_the_decoder(model: Model) -> None:
    """int8 activations may round the other way where the two disagree in the last bit, hence the wider bound."""
    tokens = ids()
    found = Session(model, 256).eval(tokens, every=True, draft=True)
    assert found is not None
    assert_close(found, reference(model, tokens, draft=True), 3e-2)


def test_logits_do_not_depend_on_the_batch(model: Model) -> None:
    tokens = ids(96)
    whole = Session(model, 128, threads=1).eval(tokens, every=True)
    assert whole is not None
    for threads in (1, 2):
        for chunk in (1, 2, 7, 16, 64):
            part = Session(model, 128, threads=threads).eval(tokens, chunk=chunk, every=True)
            assert part is not None
            assert part.tobytes() == whole.tobytes(), f"chunk {chunk}, {threads} threads"


def test_draft_logits_do_not_depend_on_the_batch(model: Model) -> None:
    tokens = ids(40)
    whole = Session(model, 64).eval(tokens, every=True, draft=True)
    assert whole is not None
    session = Session(model, 64, threads=1)
    for i, token in enumerate(tokens):
        row = session.eval([token], draft=True)
        assert row is not None
        assert row.tobytes() == whole[i].tobytes()


def test_rewind_and_evaluate_again(model: Model) -> None:
    tokens = ids(60)
    whole = Session(model, 64).eval(tokens, every=True)
    assert whole is not None
    session = Session(model, 64)
    session.eval(tokens[:50])
    session.eval(ids(9, seed=2))
    session.rewind(50)
    assert session.length == 50
    rest = session.eval(tokens[50:], every=True)
    assert rest is not None
    assert rest.tobytes() == whole[50:].tobytes()


@pytest.mark.parametrize("variant", ["mistral", "gemma3_text"])
def test_a_ring_that_has_turned_over(variant: str) -> None:
    """A context far beyond window + slack, so that the ring is in use, equals one computed without a ring."""
    model = Model.open(packed_model(variant))
    tokens = ids(1500)
    ring = Session(model, 4096).eval(tokens, every=True, chunk=512)
    assert ring is not None
    small = Session(model, 4096).eval(tokens, every=True, chunk=3)
    assert small is not None
    assert small.tobytes() == ring.tobytes()
    session = Session(model, 4096)
    session.eval(tokens)
    with pytest.raises(RuntimeFailure, match="sliding window"):
        session.rewind(100)
    session.rewind(1490)
    again = session.eval(tokens[1490:], every=True)
    assert again is not None
    assert again.tobytes() == ring[1490:].tobytes()


def test_errors_name_what_is_wrong() -> None:
    model = Model.open(packed_model("llama"))
    session = Session(model, 16)
    with pytest.raises(RuntimeFailure, match=r"16 tokens.*17 more do not fit"):
        session.eval(ids(17))
    with pytest.raises(RuntimeFailure, match=r"token id 999 .* vocabulary of 331"):
        session.eval([5, 999])
    session.abort()
    with pytest.raises(KeyboardInterrupt):
        session.eval(ids(4))
    session.abort(False)
    assert session.eval(ids(4)) is not None


def test_more_threads_than_cores_end_with_the_same_bits() -> None:
    model = Model.open(packed_model("qwen2"))
    tokens = ids(20)
    one = Session(model, 32, threads=1).eval(tokens, every=True)
    many = Session(model, 32, threads=64).eval(tokens, every=True)
    assert one is not None and many is not None
    assert one.tobytes() == many.tobytes()


def test_a_model_may_go_before_its_sessions() -> None:
    """In a cycle of garbage the collector frees in any order."""
    for order in (0, 1):
        model = Model.open(packed_model("llama"))
        session = Session(model, 32)
        session.eval(ids(4), logits=False)
        pair = [session, model]
        del session, model
        pair.pop(order)
        pair.clear()
        cycle: list[object] = []
        owner = Session(Model.open(packed_model("llama")), 32)
        cycle += [owner.model, owner, cycle]
        del owner, cycle
        assert gc.collect() > 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to ask how much is locked")
def test_weights_can_be_kept_in_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked() -> int:
        (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmLck"))
        return int(line.split()[1]) * 1024

    model = Model.open(packed_model("llama"))
    before = locked()
    model.lock()
    assert locked() - before >= sum(plane.size for plane in model.packed.planes.values())
    refusing = types.SimpleNamespace(tb_lock_memory=lambda pointer, size: -1)
    monkeypatch.setattr("twobit.runtime.model.lib", refusing)
    with pytest.raises(RuntimeFailure, match="RAM") as caught:
        model.lock()
    assert "ulimit -l" in str(caught.value.hint)
