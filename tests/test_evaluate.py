"""`twobit eval`: every number against one that was computed another way."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from families import FAMILIES, VOCAB, load_reference
from packed import dequantized, packed_model, source_checkpoint
from safetensors.torch import load_file, save_file

from twobit import acceptance as a
from twobit import evaluate as e
from twobit import variants as v
from twobit.architecture import Architecture
from twobit.cli.main import main
from twobit.errors import TokenizerError, UsageError
from twobit.progress import Progress
from twobit.quant.calibrate import load_default
from twobit.quant.decoder import Decoder
from twobit.quant.recipe import Recipe
from twobit.quant.source import Checkpoint
from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling, sample
from twobit.runtime.session import Session, StepOptions
from twobit.runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
GREEDY, SAMPLED = Sampling(), Sampling(temperature=a.TEMPERATURE, seed=5)
SMALL = e.Options(tokens=60, baselines=("q8_0", "q4_0"))


@pytest.fixture(scope="module")
def measured() -> e.Evaluation:
    return e.evaluate(packed_model("llama-tied"), source_checkpoint("llama-tied"), SMALL)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of logits [n, vocab]."""
    a, b = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return (a.exp() * (a - b)).sum(-1)


# -- llama.cpp's roundings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", v.BASELINES)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 30.0])
def test_baselines_equal_ggml(name: str, scale: float) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    x = torch.randn(50, 96, generator=torch.Generator().manual_seed(1)) * scale
    x[3], x[4, :32], x[5, 40] = 0.0, 0.25 * scale, -7.0 * scale
    x[6] = torch.arange(96.0) - 40.5  # ties
    kind = GGMLQuantizationType[name.upper()]
    expected = dequantize(quantize(x.numpy(), kind), kind)
    assert np.array_equal(v.ROUND[name](x).numpy(), expected)
    assert np.array_equal(v.rounded(x, name).numpy(), expected)


@pytest.mark.parametrize("name", v.BASELINES)
def test_a_last_block_that_is_shorter_has_its_own_scale(name: str) -> None:
    x = torch.randn(7, 44, generator=torch.Generator().manual_seed(2))
    padded = torch.cat((x, torch.zeros(7, 20)), 1)
    assert torch.equal(v.ROUND[name](x), v.ROUND[name](padded)[:, :44])
    assert torch.equal(v.ROUND[name](x)[:, :32], v.ROUND[name](x[:, :32]))


@pytest.mark.parametrize("name", v.BASELINES)
def test_blocks_that_fp16_has_no_scale_for_are_zero(name: str) -> None:
    """1 / scale is infinite for the smallest of them; a trained model may hold rows that decayed so far."""
    sizes = torch.tensor([1e-45, 1e-40, 1.2e-38, 1e-30, 1e-8])
    x = sizes[:, None] * torch.linspace(-1, 1, 64)
    assert torch.equal(v.ROUND[name](x), torch.zeros_like(x))
    assert torch.equal(v.ROUND[name](x + 1.0), v.ROUND[name](torch.ones_like(x) + x))


# -- divergences --------------------------------------------------------------------------------------------


def _samples(vocab: int, seed: int = 0) -> list[a.Sample]:
    random = np.random.default_rng(seed)
    return [a.Sample("text", tuple(random.integers(5, vocab, n).tolist()), first) for n, first in ((30, 1), (21, 9))]


@pytest.mark.parametrize("variant", FAMILIES)
def test_the_floor_is_the_same_model(variant: str) -> None:
    checkpoint = Checkpoint.open(source_checkpoint(variant))
    variants = v.Variants(checkpoint, cast(Any, None), ())  # neither needs the packed model
    samples = _samples(VOCAB)
    states = v.last_states(variants, samples, ["reference", "floor"], Progress())
    targets = torch.tensor([t for s in samples for t in s.targets])
    floor = e._compare(variants, states, targets, None, Progress())["floor"]
    assert not torch.equal(states["reference"], states["floor"])
    assert np.abs(floor.kl).max() < 1e-8
    assert floor.top1.all()


@pytest.mark.parametrize("variant", ["llama-tied", "gemma3_text", "qwen2", "phi3"])
def test_divergences_equal_whole_models_in_one_piece(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming by layers, blocks of the vocabulary and chunks of positions changes nothing."""
    monkeypatch.setattr(e, "_HELD_LOGITS", 0)  # blocks of 256 rows
    monkeypatch.setattr(e, "_CHUNK_LOGITS", 16 * 256)
    source, model = source_checkpoint(variant), Model.open(packed_model(variant))
    samples = _samples(VOCAB)
    variants = v.Variants(Checkpoint.open(source), model.packed, ("q8_0",))
    states = v.last_states(variants, samples, variants.names, Progress())
    targets = torch.tensor([t for s in samples for t in s.targets])
    session = Session(model, 64, 1)
    with e._runtime_logits(session, samples, Progress()) as logits:
        found = e._compare(variants, states, targets, logits, Progress())

    theirs = load_reference(source)
    with torch.no_grad():
        expected = [theirs(input_ids=torch.tensor([s.inputs])).logits[0, s.positions].float() for s in samples]
    reference = torch.cat(expected)
    others = {}
    for name in ("full", "draft"):
        own = dequantized(model.packed, draft=name == "draft")
        own["model.embed_tokens.weight"] = dequantized(model.packed, draft=False)["model.embed_tokens.weight"]
        decoder = Decoder(model.architecture, own)
        others[name] = torch.cat([decoder.forward(s.inputs)[s.positions] for s in samples])
    whole = []
    for s in samples:
        session.rewind(0)
        whole.append(torch.from_numpy(session.eval(s.inputs, every=True))[s.positions])
    others["full_runtime"] = torch.cat(whole)
    with torch.no_grad():
        for value in theirs.parameters():
            if value.dim() == 2:
                value.copy_(v.q8_0(value))
        rounded = [theirs(input_ids=torch.tensor([s.inputs])).logits[0, s.positions].float() for s in samples]
    others["q8_0"] = torch.cat(rounded)

    assert set(found) == {"reference", "full", "draft", "q8_0", "q8_0_int8", "floor", "full_runtime"}
    for name, logits in others.items():
        mine = kl(reference, logits).numpy()
        assert found[name].kl == pytest.approx(mine, rel=2e-3, abs=2e-7), name
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        assert found[name].loss == pytest.approx(loss.numpy(), abs=2e-4)
        agree = (logits.argmax(-1) == reference.argmax(-1)).numpy()
        assert (found[name].top1 == agree).mean() > 0.95  # near ties may fall either way
    assert found["q8_0_int8"].kl.mean() > found["q8_0"].kl.mean()


def test_a_model_against_itself() -> None:
    """A checkpoint made of the full model's own weights has KL(reference || full) = 0 up to the floor."""
    model = Model.open(packed_model("llama-tied"))
    variants = v.Variants(Checkpoint.open(source_checkpoint("llama-tied")), model.packed, ())
    samples = _samples(VOCAB)
    states = v.last_states(variants, samples, ["full"], Progress())
    states["reference"] = states["full"]

    def head(rows: tuple[int, int], wanted: Sequence[str]) -> list[tuple[str, v.Weights]]:
        ((_, weights),) = v.Variants.head(variants, rows, ["full"])
        return [("reference", weights), ("full", weights)]

    variants.head = head  # type: ignore[method-assign,assignment]
    targets = torch.tensor([t for s in samples for t in s.targets])
    same = e._compare(variants, {k: states[k] for k in ("reference", "full")}, targets, None, Progress())["full"]
    assert np.abs(same.kl).max() < 1e-13
    assert same.top1.all()


def test_continuations_are_the_references_own(measured: e.Evaluation) -> None:
    source, model = source_checkpoint("llama-tied"), Model.open(packed_model("llama-tied"))
    variants = v.Variants(Checkpoint.open(source), model.packed, ())
    random = np.random.default_rng(4)
    prompts = [("code", random.integers(5, VOCAB, n).tolist()) for n in (1, 12, 20)]
    found = e.reference_continuations(variants, Session(model, 80, 1), prompts, 30, frozenset({1}), Progress())
    theirs = load_reference(source)
    for (_, ids), text in zip(prompts, found, strict=True):
        assert list(text.ids[: text.first]) == ids
        with torch.no_grad():
            logits = theirs(input_ids=torch.tensor([text.inputs])).logits[0, text.positions]
        margin = logits.max(-1).values - logits.gather(-1, torch.tensor(text.targets)[:, None])[:, 0]
        assert float(margin.max()) < 1e-4
        assert len(text.targets) == 30 or text.ids[-1] == 1
        assert 1 not in text.targets[:-1]


# -- acceptance ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama", "gemma3_text", "qwen3"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_chains_equal_speculative_steps(variant: str, sampling: Sampling) -> None:
    model = Model.open(packed_model(variant))
    session = Session(model, 160, 1)
    prompt = np.random.default_rng(8).integers(5, VOCAB, 10).tolist()
    text = a.continued(session, prompt, sampling, 130, frozenset())
    made = [b.accepted for b in a.blocks(session, a.Sample("code", tuple(text), 10), sampling) if b.policy == "chain"]

    history, steps = list(prompt), []
    session.rewind(0)
    session.eval(history[:-1], logits=False)
    options = StepOptions(draft_max=a.DRAFTED, draft_fixed=True)
    while len(history) + a.DRAFTED <= len(text):
        result = session.step(history, sampling, options)
        history += result.tokens
        steps.append(result.accepted)
    assert history == text[: len(history)] or history[: len(text)] == text
    assert made == steps
    assert sum(made) > 0


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trees_equal_enumeration(sampling: Sampling) -> None:
    """Every node of the tree is drafted for itself, from its parent's path, then compared with the text."""
    model = Model.open(packed_model("llama"))
    session = Session(model, 160, 1)
    prompt = np.random.default_rng(9).integers(5, VOCAB, 10).tolist()
    text = a.continued(session, prompt, sampling, 90, frozenset())
    made = [b for b in a.blocks(session, a.Sample("code", tuple(text), 10), sampling) if b.policy == "tree"]

    def choices(path: list[int], at: int, count: int) -> list[int]:
        """The draft's `count` choices behind text[: at + 1] + path."""
        logits = None
        for token in [text[at], *path]:
            logits = session.eval([token], draft=True)
        session.rewind(at)
        assert logits is not None
        found = []
        for _ in range(count):
            found.append(sample(logits, (), sampling, at + 1 + len(path)))
            logits[found[-1]] = -np.inf
        return found

    at, seen = 9, []
    while at + a.DRAFTED < len(text):
        session.rewind(0)
        session.eval(text[:at], logits=False)
        tokens: dict[tuple[int, ...], list[int]] = {(): []}
        for node in sorted(a.TREE, key=len):
            parent = tokens[node[:-1]]
            tokens[node] = [*parent, choices(parent, at, node[-1])[-1]]
        accepted = max(len(n) for n, path in tokens.items() if path == text[at + 1 : at + 1 + len(path)])
        seen.append(accepted)
        at += accepted + 1
    assert [b.accepted for b in made] == seen
    assert sum(seen) > 0


def test_the_tree() -> None:
    assert len(a.TREE) == 16
    assert all(len(node) == 1 or node[:-1] in a.TREE for node in a.TREE)
    assert {(1,) * n for n in range(1, a.DRAFTED + 1)} <= a.TREE
    assert a.accepted_chain([1, 1, 2, 1, 1, 1, 1, 1]) == 2
    assert a.accepted_tree([1, 1, 2, 1, 1, 1, 1, 1]) == 3
    assert a.accepted_tree([3, 1, 1, 1, 1, 1, 1, 1]) == 1
    assert a.accepted_tree([0] * 8) == a.accepted_chain([0] * 8) == 0
    assert a.accepted_tree([1] * 8) == a.accepted_chain([1] * 8) == 8


def test_block_divergence_is_that_of_the_draft() -> None:
    model = Model.open(packed_model("llama"))
    session = Session(model, 64, 1)
    text = tuple(np.random.default_rng(3).integers(5, VOCAB, 40).tolist())
    first = next(iter(a.blocks(session, a.Sample("code", text, 12), GREEDY)))
    session.rewind(0)
    verifier = session.eval(text[:20], every=True)
    session.rewind(11)
    draft = session.eval(text[11:19], every=True, draft=True)
    assert verifier is not None and draft is not None
    expected = kl(torch.from_numpy(verifier[11:19]), torch.from_numpy(draft))
    assert first.kl == pytest.approx(expected.tolist())


def test_summary_of_blocks() -> None:
    made = [a.Block("code", "chain", n, (0.5,) * 8) for n in (8, 2, 5)]
    made += [a.Block("chat", "chain", n, (0.1,) * 8) for n in (0, 4)]
    made += [a.Block(kind, "tree", 3, (0.0,) * 8) for kind in ("code", "chat")]
    found = a.summarize_blocks(made)
    assert found["by_kind"] == {"code": 6.0, "chat": 3.0}
    assert found["tokens_per_step"] == 4.5
    assert found["stderr"] == pytest.approx(math.sqrt(9 / 3 + 8 / 2) / 2)
    assert found["tree16_tokens_per_step"] == 4.0
    assert found["blocks"] == 5
    assert found["accepted_by_depth"][:4] == pytest.approx([0.75, 0.75, (2 / 3 + 0.5) / 2, (2 / 3 + 0.5) / 2])
    assert found["kl_by_depth"] == pytest.approx([0.3] * 8)


# -- errors and their estimates -----------------------------------------------------------------------------


def test_standard_errors() -> None:
    random = np.random.default_rng(0)
    values, clusters = random.normal(size=4000), np.repeat(np.arange(400), 10)
    assert e.clustered_stderr(values, clusters) == pytest.approx(1 / math.sqrt(4000), rel=0.15)
    shared = values + 3 * np.repeat(random.normal(size=400), 10)  # correlated inside a cluster
    assert e.clustered_stderr(shared, clusters) == pytest.approx(math.sqrt(9.1 / 400), rel=0.15)
    assert e.clustered_stderr(values[:10], clusters[:10]) == 0.0
    assert e._clusters([130, 5]).tolist() == [0] * 64 + [1] * 64 + [2] * 2 + [3] * 5
    twice = e.paired(2 * shared, shared, clusters)
    assert twice["ratio"] == pytest.approx(2)
    assert twice["ratio_stderr"] == pytest.approx(0, abs=1e-6)


# -- the command --------------------------------------------------------------------------------------------


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 6)
    arguments = ["eval", str(packed_model("qwen3")), "--reference", str(source_checkpoint("qwen3")), "-t", "1"]
    capsys.readouterr()  # making the checkpoint shows progress
    assert main([*arguments, "--tokens", "48", "--text", str(text), "--baseline", "q4_0", "--json"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    data = json.loads(told.out)
    assert set(data["kl"]) == {"full", "full_runtime", "draft", "q4_0", "q4_0_int8", "floor"}
    for one in data["kl"].values():
        assert set(one) == {"mean", "stderr", "median", "p99", "top1"}
    assert data["kl"]["full"]["mean"] < data["kl"]["q4_0"]["mean"] < data["kl"]["draft"]["mean"]
    assert data["kl"]["floor"]["mean"] < 1e-7
    assert {"reference", "full", "draft"} <= set(data["perplexity"])
    assert data["tokens"] == 96
    assert set(data["kl_by_kind"]) == set(data["perplexity_by_kind"]) == {"code", "prose", "chat", "text"}
    assert {"tokens_per_step", "stderr", "blocks", "tree16_tokens_per_step", "by_kind"} <= set(data["acceptance"])
    assert set(data["acceptance"]["by_kind"]) == {"code", "prose", "chat"}
    assert 1 <= data["acceptance"]["tokens_per_step"] <= 9


def test_table(measured: e.Evaluation, capsys: pytest.CaptureFixture[str]) -> None:
    from twobit.cli.eval import show

    data = measured.to_json()
    show(data)
    out = capsys.readouterr().out
    for name in ("full_runtime", "q8_0_int8", "q4_0", "floor", "full / q8_0", "greedy, tree of 16", "temperature 0.8"):
        assert name in out
    assert data["acceptance"]["sampled"]["blocks"] > 0


def test_a_perplexity_beyond_all_floats(measured: e.Evaluation, capsys: pytest.CaptureFixture[str]) -> None:
    from twobit.cli.eval import show

    draft = replace(measured.compared["draft"], loss=measured.compared["draft"].loss + 1000)
    data = replace(measured, compared={**measured.compared, "draft": draft}).to_json()
    assert data["perplexity"]["draft"] is None
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["perplexity"]["full"] == measured.to_json()["perplexity"]["full"]
    show(data)
    assert "over 1e308" in capsys.readouterr().out


def test_results_do_not_depend_on_threads(measured: e.Evaluation) -> None:
    again = e.evaluate(
        packed_model("llama-tied"), source_checkpoint("llama-tied"), e.Options(tokens=60, baselines=(), threads=2)
    )
    assert again.greedy == measured.greedy
    assert again.sampled == measured.sampled
    assert again.compared["full"].kl == pytest.approx(measured.compared["full"].kl, abs=1e-7)


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, source = str(packed_model("llama-tied")), str(source_checkpoint("llama-tied"))
    other = str(source_checkpoint("qwen3"))
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for arguments, code, said in (
        ([model, "--reference", other], 2, "was not made from"),
        ([model, "--reference", str(tmp_path / "none")], 2, "no such folder"),
        ([model, "--reference", model], 1, "already quantized"),
        ([source, "--reference", source], 1, "not a twobit model"),
        ([model, "--reference", source, "--tokens", "0"], 2, "--tokens 0"),
        ([model, "--reference", source, "--baseline", "q2_k"], 2, "--baseline q2_k"),
        ([model, "--reference", source, "--text", str(empty)], 1, "no text"),
    ):
        assert main(["eval", *arguments]) == code, arguments
        told = capsys.readouterr()
        assert told.out == ""
        assert said in told.err
    with pytest.raises(UsageError):
        e.Options(tokens=0)
    tuned = tmp_path / "tuned"  # the same architecture with other weights
    shutil.copytree(source, tuned)
    tensors = load_file(tuned / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][3] += 1
    save_file(tensors, tuned / "model.safetensors", {"format": "pt"})
    assert main(["eval", model, "--reference", str(tuned), "--json"]) == 2
    said = f"{model} was not made from {tuned}: model.layers.1.input_layernorm.weight differs"
    assert said in capsys.readouterr().err


# -- the text -----------------------------------------------------------------------------------------------


def _evaluation_texts() -> list[str]:
    texts = [text for p in e.bundled_prompts() for text in (p.prompt, p.opening) if text]
    return [*texts, (ROOT / "twobit" / "eval_text" / "text.txt").read_text(encoding="utf-8")]


def _runs(text: str, n: int) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def test_prompts() -> None:
    prompts = e.bundled_prompts()
    assert [p.kind for p in prompts] == list(e.KINDS) * (len(prompts) // 3)
    assert len(prompts) >= 36
    assert len({p.prompt for p in prompts}) == len(prompts)
    assert all((p.opening is None) == (p.kind == "chat") for p in prompts)


def test_evaluation_and_calibration_texts_are_disjoint() -> None:
    """No run of 7 words of the evaluation text occurs in the calibration text or in what it was made from."""
    calibration = [d.text or " ".join(m["content"] for m in d.messages) for d in load_default()]
    calibration += [p.read_text(encoding="utf-8") for p in (ROOT / "scripts" / "calibration").iterdir()]
    evaluation = set().union(*(_runs(text, 7) for text in _evaluation_texts()))
    shared = evaluation & set().union(*(_runs(text, 7) for text in calibration))
    assert not shared, sorted(shared)[:5]


def test_prompts_of_models_without_a_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(source_checkpoint("llama"))
    tokenizer.close()
    tokenizer.template = None
    code, _, chat = e.bundled_prompts()[:3]
    assert tokenizer.backend.decode(code.ids(tokenizer)) == code.opening
    assert tokenizer.backend.decode(chat.ids(tokenizer)) == f"User: {chat.prompt}\n\nAssistant:"


def test_texts_are_cut() -> None:
    tokenizer = Tokenizer.load(source_checkpoint("llama"))
    tokenizer.close()
    path = ROOT / "twobit" / "eval_text" / "text.txt"
    ids = tokenizer.encode(path.read_text(encoding="utf-8"))
    samples = e.text_samples([path], tokenizer, 150, 64)
    assert [i for s in samples for i in s.ids][:120] == ids[:120]
    assert all(len(s.ids) <= 64 for s in samples)
    assert sum(len(s.targets) for s in samples) == 150


def test_texts_that_cannot_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(source_checkpoint("llama"), rows=VOCAB)
    tokenizer.close()
    path = ROOT / "twobit" / "eval_text" / "text.txt"
    with pytest.raises(UsageError, match="have no room"):
        e.text_samples([path], tokenizer, 150, 1)
    tokenizer.rows = 100
    with pytest.raises(TokenizerError, match="the model has 100 vocabulary rows"):
        e.text_samples([path], tokenizer, 150, 64)
    monkeypatch.setattr(e.Prompt, "ids", lambda prompt, tokenizer: [])
    with pytest.raises(TokenizerError, match="a prompt has no tokens"):
        e._prompts(tokenizer, 60)


def test_recipes_and_architecture_are_compared(tmp_path: Path) -> None:
    packed = Model.open(packed_model("llama-tied", Recipe(residual=8))).architecture
    assert packed == Architecture.from_config(json.loads((source_checkpoint("llama-tied") / "config.json").read_text()))
