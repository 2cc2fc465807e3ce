"""Distillation of the draft: the gradient is the whole model's, and the draft comes closer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from families import make_checkpoint, make_tokenizer

from twobit.quant import calibrate
from twobit.quant.decoder import Cache, Decoder
from twobit.quant.rounding import Rounded, draft_weights, identity, round_draft
from twobit.quant.source import Checkpoint
from twobit.quant.tune import BLOCK, drafting

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))
import distill
from distill import Distillation

LENGTH = 64  # of a sequence


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distill") / "model"
    return make_tokenizer(make_checkpoint("gemma3_text", path, dtype=torch.bfloat16))


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SEQUENCE", LENGTH)
    monkeypatch.setattr(distill, "STEP_TOKENS", 2 * LENGTH)


@pytest.fixture(scope="module")
def checkpoint(source: Path) -> Checkpoint:
    return Checkpoint.open(source)


@pytest.fixture(scope="module")
def drafts(checkpoint: Checkpoint) -> list[dict[str, Rounded]]:
    found: list[dict[str, Rounded]] = [{} for _ in checkpoint.architecture.layers]
    for spec in checkpoint.architecture.tensors():
        if spec.role == "linear" and spec.layer is not None:
            found[spec.layer][spec.name] = round_draft(checkpoint.read(spec), identity(spec.shape[1]))
    return found


def sequences(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(5, 300, (count, LENGTH - 3), generator=generator).tolist()


def divergence(
    checkpoint: Checkpoint, tokens: list[list[int]], weights: dict[str, torch.Tensor], firsts: list[int]
) -> torch.Tensor:
    """Mean KL(reference || draft) of whole models, all at once."""
    architecture = checkpoint.architecture
    true = {s.name: checkpoint.read(s) for s in architecture.tensors()}
    decoder, parts = Decoder(architecture), []
    for ids, first in zip(tokens, firsts, strict=True):
        cache, reference = Cache(), decoder.embed(ids, true)
        draft = reference
        for i in range(len(architecture.layers)):
            reference = decoder.layer(i, reference, true, cache)
            draft = decoder.layer(i, draft, true | weights, attend=drafting(*cache.of(i), first=first))
        exact, mine = (decoder.head(x, true).log_softmax(-1) for x in (reference, draft))
        parts.append((exact.exp() * (exact - mine)).sum(-1))
    return torch.cat(parts).mean()


def test_gradients_are_those_of_the_whole_model(checkpoint: Checkpoint, drafts: list[dict[str, Rounded]]) -> None:
    tokens = sequences(2)
    embed = calibrate.embedder(checkpoint, tokens)
    with calibrate.one_torch_thread(2) as pool:
        tuned = Distillation(checkpoint, embed, [len(ids) for ids in tokens], lambda i: drafts[i], pool)
        assert len(tuned.batches) == 1
        loss = tuned.step(0)
    made = {name: draft_weights(draft) for layer in drafts for name, draft in layer.items()}
    leaves = {name: torch.ones(len(weight), requires_grad=True) for name, weight in made.items()}
    weights = {name: made[name] * leaves[name][:, None] for name in made}
    order = tuned.batches[0]
    expected = divergence(checkpoint, [tokens[i] for i in order], weights, [i % BLOCK for i in order])
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    expected.backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([leaves[name].grad for layer in drafts for name in layer])  # type: ignore[misc]
    assert float(gradient.abs().max()) > 1e-5
    torch.testing.assert_close(tuned.state[1] / (1 - distill.DECAY[0]), gradient, rtol=1e-3, atol=1e-6)
    moved = tuned.state[0][gradient.abs() > 1e-6]
    assert bool((moved.sign() == -gradient[gradient.abs() > 1e-6].sign()).all())  # downhill


def test_steps_bring_the_draft_closer_and_threads_change_nothing(
    checkpoint: Checkpoint, drafts: list[dict[str, Rounded]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "RATE", 0.01)
    tokens = sequences(2)
    repeated = tokens * 6
    embed = calibrate.embedder(checkpoint, repeated)
    states = []
    for threads in (1, 3):
        with calibrate.one_torch_thread(threads) as pool:
            tuned = Distillation(checkpoint, embed, [len(ids) for ids in repeated], lambda i: drafts[i], pool)
            for turn in range(len(tuned.batches)):
                tuned.step(turn)
        states.append(tuned.state)
    assert torch.equal(*states)
    before, after = (
        float(
            divergence(checkpoint, tokens, {n: draft_weights(d) for layer in found for n, d in layer.items()}, [0, 5])
        )
        for found in (drafts, [tuned.drafts(i) for i in range(len(drafts))])
    )
    assert after < 0.98 * before
