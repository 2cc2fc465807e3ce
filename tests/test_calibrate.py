"""Calibration: text to sequences, Hessians, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from families import BOS, make_checkpoint, make_tokenizer

from twobit.errors import CalibrationError, TemplateStopped, TokenizerError
from twobit.quant import calibrate
from twobit.quant.calibrate import Document, Encoder
from twobit.quant.decoder import Decoder
from twobit.quant.rounding import targets
from twobit.quant.source import Checkpoint
from twobit.quant.states import States

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind. " * 40


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "llama"
    make_checkpoint("llama", path, num_hidden_layers=2)
    return make_tokenizer(path)


@pytest.fixture(scope="module")
def encode(source: Path) -> Encoder:
    return Encoder(source, 331)


def documents(*texts: str) -> list[Document]:
    return [Document("prose", f"text {i}", text) for i, text in enumerate(texts)]


def test_the_package_text_is_large_and_mixed_from_the_start() -> None:
    found = calibrate.load_default()
    size = sum(len(d.text or "".join(m["content"] for m in d.messages)) for d in found)
    assert size > 600_000  # over 200,000 tokens of SmolLM2's tokenizer
    assert set(Counter(d.kind for d in found)) == {"code", "prose", "dialogue"}
    assert set(Counter(d.kind for d in found[:8])) == {"code", "prose", "dialogue"}
    for document in found:
        assert bool(document.text) != bool(document.messages)
        assert all(set(m) == {"role", "content"} and m["content"] for m in document.messages)


def test_files_that_cannot_calibrate_are_named(tmp_path: Path) -> None:
    for name, content, what in (
        ("empty.txt", b"", "no text"),
        ("blank.txt", b"\n \n\t\n", "no text"),
        ("latin.txt", b"caf\xe9 au lait", "not UTF-8 at byte 3"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CalibrationError, match=f"{name}: {what}"):
            calibrate.load_files([tmp_path / name])
    with pytest.raises(CalibrationError, match=r"gone\.txt: cannot be read"):
        calibrate.load_files([tmp_path / "gone.txt"])


def test_files_are_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffnaïve 日本".encode())
    (found,) = calibrate.load_files([tmp_path / "a.txt"])
    assert (found.source, found.text) == ("a.txt", "naïve 日本")


def test_sequences_take_what_was_asked(encode: Encoder) -> None:
    made = calibrate.sequences(documents(TEXT, TEXT[:900]), encode, tokens=200, source="x", length=64)
    assert made.tokens == 208  # the last one is not cut below MIN_SEQUENCE
    assert [len(s) for s in made.sequences] == [64, 64, 64, 16]
    assert made.requested == 4
    first = encode(documents(TEXT)[0])
    assert list(made.sequences[0]) == first[:64]  # first pieces of all documents, then the second ones
    assert list(made.sequences[2]) == first[64:128]


def test_too_little_text_is_counted(encode: Encoder) -> None:
    made = calibrate.sequences(documents("one\ntwo\nthree"), encode, tokens=128 * 512, source="x")
    assert len(made.sequences) == 1
    assert made.requested == 129
    assert made.to_json()["requested_sequences"] == 129
    assert made.to_json()["tokens"] == made.tokens < 20


def test_seeds_choose_other_text(encode: Encoder) -> None:
    texts = documents(*(f"{word} {TEXT}" for word in ("ein", "zwei", "drei", "vier", "the fox")))
    made = [calibrate.sequences(texts, encode, tokens=128, source="x", seed=s, length=64) for s in (0, 0, 1, 1, 2)]
    assert made[0] == made[1]
    assert made[2] == made[3]
    assert len({m.digest() for m in made}) > 1


def test_no_tokens_is_an_error(encode: Encoder) -> None:
    with pytest.raises(CalibrationError, match="gives no tokens"):
        calibrate.sequences([], encode, tokens=10, source="nothing")
    with pytest.raises(CalibrationError, match="--calib-tokens 0"):
        calibrate.sequences(documents(TEXT), encode, tokens=0, source="x")


def test_beginning_of_text_starts_every_sequence(source: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", 1)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encode = Encoder(tmp_path, 331, lambda messages: "<s>" + messages[0]["content"])
    assert encode.prefix == (BOS,)
    chat = Document("dialogue", "chat", None, ({"role": "user", "content": TEXT},))  # its template writes BOS itself
    made = calibrate.sequences([*documents(TEXT), chat], encode, tokens=256, source="x", length=64)
    assert all(s[0] == BOS and BOS not in s[1:] and len(s) == 64 for s in made.sequences)
    assert made.sequences[0] == made.sequences[1]


def test_a_template_that_refuses_is_replaced(source: Path) -> None:
    def refuse(messages: object) -> str:
        raise TokenizerError("roles must alternate")

    chat = Document("dialogue", "chat", None, ({"role": "user", "content": "hello"},))
    plain = Encoder(source, 331)(chat)
    assert Encoder(source, 331, refuse)(chat) == plain
    assert len(plain) > 3


def test_a_template_that_was_stopped_is_not_replaced(source: Path) -> None:
    """A slow machine must not calibrate on another text."""

    def slow(messages: object) -> str:
        raise TemplateStopped("the model's chat template was stopped: it took longer than 60 s")

    chat = Document("dialogue", "chat", messages=({"role": "user", "content": "Hello there."},))
    with pytest.raises(CalibrationError, match="longer than 60 s"):
        Encoder(source, 331, slow)(chat)


def test_tokens_beyond_the_embedding_are_left_out(source: Path) -> None:
    assert max(Encoder(source, 270)(documents(TEXT)[0])) < 270


def test_missing_and_broken_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"no tokenizer\.json"):
        Encoder(tmp_path, 10)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CalibrationError, match=r"tokenizer\.json"):
        Encoder(tmp_path, 10)


def states_of(checkpoint: Checkpoint, made: calibrate.Calibration, folder: Path) -> States:
    states = States(folder, "me", [len(sequence) for sequence in made.sequences], 2 * checkpoint.architecture.hidden)
    assert not states.resume(0)
    return states


def statistics(
    source: Path, threads: int, made: calibrate.Calibration, folder: Path
) -> dict[str, calibrate.Statistics]:
    """Of a draft whose weights are the verifier's."""
    checkpoint = Checkpoint.open(source)
    specs = checkpoint.architecture.tensors()
    weights = {s.name: checkpoint.read(s) for s in specs}
    found: dict[str, calibrate.Statistics] = {}
    with calibrate.one_torch_thread(threads) as pool:
        assert pool.submit(torch.get_num_threads).result() == 1
        states = calibrate.Activations(checkpoint, made, pool, states_of(checkpoint, made, folder))
        for layer in checkpoint.architecture.layers:

            def choose(
                part: str, statistics: calibrate.Statistics, index: int = layer.index
            ) -> dict[str, torch.Tensor]:
                found[f"{index}.{part}"] = statistics
                return {}

            states.layer(layer.index, weights, choose)
        found["head"] = states.head(weights["model.norm.weight"])
    return found


def test_hessians_are_sums_of_squares_of_the_inputs(source: Path, encode: Encoder, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(calibrate, "CHUNK_TOKENS", 100)
    monkeypatch.setattr(calibrate, "PANEL", 40)
    made = calibrate.sequences(documents(TEXT, TEXT[5:], TEXT[9:]), encode, tokens=300, source="x", length=70)
    found = statistics(source, 2, made, tmp_path / "x")
    checkpoint = Checkpoint.open(source)
    decoder = Decoder(checkpoint.architecture, {s.name: checkpoint.read(s) for s in checkpoint.architecture.tensors()})
    parts = {s.module: f"{s.layer}.{s.part}" for s in checkpoint.architecture.tensors() if s.role == "linear"}
    expected: dict[str, torch.Tensor] = {}

    def hook(module: str, x: torch.Tensor) -> None:
        key, x = parts.get(module, "head"), x.double()
        expected[key] = expected.get(key, torch.zeros(())) + x.T @ x

    for sequence in made.sequences:
        decoder.forward(sequence, hook=hook)
    assert set(found) == {"0.q", "0.o", "0.gate", "0.down", "1.q", "1.o", "1.gate", "1.down", "head"}
    names = {f"{s.layer}.{s.part}": s for s in checkpoint.architecture.tensors() if s.role == "linear"}
    for key, one in found.items():
        assert torch.equal(one.hessian, one.hessian.T)
        assert (one.hessian - expected[key]).abs().max() < 1e-5 * expected[key].abs().max(), key
        # a draft that is the verifier has nothing to make good
        weight = checkpoint.read(names[key]) if key in names else torch.eye(len(one.hessian))
        target = targets(one.hessian, one.cross, one.outputs, 0.1)(weight)
        assert (target - weight).abs().max() < 1e-4 * weight.abs().max(), key


def test_threads_and_files_do_not_change_a_bit(source: Path, encode: Encoder, tmp_path: Path, monkeypatch) -> None:
    made = calibrate.sequences(documents(TEXT, TEXT[5:], TEXT[9:]), encode, tokens=300, source="x", length=70)
    one, three = statistics(source, 1, made, tmp_path / "1"), statistics(source, 3, made, tmp_path / "3")
    assert all(torch.equal(one[key].hessian, three[key].hessian) for key in one)
    assert all(torch.equal(one[key].cross, three[key].cross) for key in one)
    monkeypatch.setattr(calibrate, "SCRATCH_MEMORY", 0)
    files = statistics(source, 2, made, tmp_path / "2")
    assert all(torch.equal(one[key].cross, files[key].cross) for key in one)
    assert not list((tmp_path / "2").glob("scratch*"))


@pytest.mark.parametrize(("scale", "fits"), [(1e6, True), (1e38, False)])
def test_large_activations(source: Path, encode: Encoder, scale: float, fits: bool, tmp_path: Path) -> None:
    """Past fp16's range all is well; past fp32's the layer is named."""
    made = calibrate.sequences(documents(TEXT), encode, tokens=64, source="x")
    checkpoint = Checkpoint.open(source)
    weights = {s.name: checkpoint.read(s) for s in checkpoint.architecture.tensors()}
    weights["model.layers.1.mlp.down_proj.weight"] *= scale
    with calibrate.one_torch_thread(1) as pool:
        states = calibrate.Activations(checkpoint, made, pool, states_of(checkpoint, made, tmp_path / "x"))
        states.layer(0, weights, lambda part, statistics: {})
        found = []
        if fits:
            states.layer(1, weights, lambda part, statistics: found.append(statistics) or {})
            assert all(bool(s.hessian.isfinite().all() and s.cross.isfinite().all()) for s in found)
        else:
            with pytest.raises(CalibrationError, match="layer 1: output activations are not finite"):
                states.layer(1, weights, lambda part, statistics: {})


def test_targets_bring_the_draft_back_to_the_verifiers_outputs() -> None:
    """Against least squares in double precision."""
    generator = torch.Generator().manual_seed(0)
    weight, x, missing = (torch.randn(n, 24, generator=generator) for n in (8, 200, 200))
    missing *= 0.1
    for outputs in (False, True):
        wanted = (x + missing) @ weight.T
        cross = wanted.T @ x if outputs else missing.T @ x
        target = targets(x.T @ x, cross, outputs, 1e-9)(weight)
        best = torch.linalg.lstsq(x.double(), wanted.double()).solution.T
        assert (target - best).abs().max() < 1e-5


def test_chunks_hold_whole_sequences() -> None:
    assert calibrate._chunks([1000, 1000, 100, 5000, 5]) == [[0, 1], [2], [3], [4]]
