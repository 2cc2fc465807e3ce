"""Whole models: the same bytes every time, resumed or not, and right when read back."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import CHAT_TEMPLATE, make_checkpoint, make_tokenizer
from safetensors.torch import load_file, save_file

from twobit.errors import CalibrationError, CheckpointError, FormatError, UsageError
from twobit.format import layout
from twobit.format.reader import open_model
from twobit.format.writer import staging_path
from twobit.memory import cgroup_limit
from twobit.quant import pipeline
from twobit.quant import plan as plan_module
from twobit.quant.decoder import Decoder
from twobit.quant.pipeline import Options, Progress, quantize
from twobit.quant.plan import memory_bytes, plan
from twobit.quant.recipe import Recipe, Rule
from twobit.quant.source import Checkpoint

TOKENS = 192


class Recorder(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def options(**changes: Any) -> Options:
    return Options(**{"calib_tokens": TOKENS, **changes})


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    """Untied, two layers, bf16."""
    path = make_checkpoint("llama", folder / "llama", dtype=torch.bfloat16, num_hidden_layers=2)
    return make_tokenizer(path)


@pytest.fixture(scope="module")
def made(source: Path, folder: Path) -> tuple[Path, dict[str, Any]]:
    before = {path: path.stat().st_mtime_ns for path in source.iterdir()}
    out = folder / "made"
    summary = quantize(source, out, options(threads=1))
    assert {path: path.stat().st_mtime_ns for path in source.iterdir()} == before  # inputs are never touched
    assert not staging_path(out).exists()
    return out, summary


def test_siblings_have_the_bytes_of_runs_of_their_own(
    made: tuple[Path, dict[str, Any]], source: Path, folder: Path
) -> None:
    recipes = {"eight": Recipe(residual=8), "wider": Recipe(residual_group=32)}
    together = [(folder / f"{name}-together", recipe) for name, recipe in recipes.items()]
    summary = quantize(source, folder / "six-together", options(threads=2), siblings=together)
    assert content(folder / "six-together") == content(made[0])
    assert summary["build_id"] == made[1]["build_id"]
    six = open_model(made[0])
    for (out, recipe), name in zip(together, recipes, strict=True):
        quantize(source, folder / name, options(recipe=recipe))
        assert content(out) == content(folder / name)
        assert not staging_path(out).exists()
        model = open_model(out, check=True)
        for module, entry in model.manifest.tensors.items():
            if entry.kind == "matrix":
                ours, theirs = model.matrix(module), six.matrix(module)  # the same draft whatever the residual
                assert np.array_equal(ours.codes, theirs.codes), module
                assert np.allclose(layout.dequantize(ours)[0], layout.dequantize(theirs)[0], rtol=1e-6, atol=0), module
    for other in (folder / "x", folder / "x" / "y", folder / "x.partial"):
        with pytest.raises(UsageError, match="lies in"):
            quantize(source, folder / "x", options(), siblings=[(other, Recipe(residual=8))])
        assert not (folder / "x").exists() and not staging_path(folder / "x").exists()
    with pytest.raises(ValueError, match="other rules"):
        more = Recipe(rules=(Rule("down_proj", 3, 6),))
        quantize(source, folder / "x", options(), siblings=[(folder / "y", more)])


def test_summary(made: tuple[Path, dict[str, Any]]) -> None:
    out, summary = made
    keys = (
        "output build_id parameters draft_bpw residual_bpw head_bpw draft_bytes residual_bytes seconds peak_ram_bytes"
    )
    assert {*keys.split(), "calibration"} <= set(summary)
    assert json.loads(json.dumps(summary)) == summary
    checkpoint = Checkpoint.open(out.parent / "llama")
    assert summary["parameters"] == sum(np.prod(s.shape) for s in checkpoint.architecture.tensors())
    assert summary["calibration"]["tokens"] == TOKENS
    assert summary["output"] == str(out)
    assert summary["build_id"] == open_model(out, check=True).manifest.build_id
    assert summary["expected_ram_bytes"] == memory_bytes(checkpoint.architecture, TOKENS, 1)


def test_threads_do_not_change_a_byte(source: Path, made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    quantize(source, tmp_path / "two", options(threads=2))
    assert content(tmp_path / "two") == content(made[0])


def test_weights_come_back(source: Path, made: tuple[Path, dict[str, Any]]) -> None:
    checkpoint, model = Checkpoint.open(source), open_model(made[0], check=True)
    for spec in checkpoint.architecture.tensors():
        weight = checkpoint.read(spec).numpy()
        if spec.role in ("linear", "head"):
            entry = model.manifest.tensors[spec.module]
            head = spec.role == "head"
            assert (entry.draft_bits, entry.residual_bits) == ((4, 4) if head else (2, 6))
            draft, full = layout.dequantize(model.matrix(spec.module))
            assert np.linalg.norm(full - weight) < 0.02 * np.linalg.norm(weight), spec.name
            assert np.linalg.norm(draft - weight) < (0.15 if head else 0.6) * np.linalg.norm(weight), spec.name
            tail = weight.shape[1] // 16 * 16  # a last group that is not whole is as good as the others
            assert np.linalg.norm((full - weight)[:, tail:]) <= 0.03 * max(np.linalg.norm(weight[:, tail:]), 1e-9)
        elif spec.role == "embedding":
            codes, scales = model.embedding(spec.module)
            back = codes * np.repeat(scales.astype(np.float32), 32, axis=1)[:, : codes.shape[1]]
            assert np.linalg.norm(back - weight) < 0.01 * np.linalg.norm(weight)
        else:
            assert np.array_equal(model.tensor(spec.name), weight)


KILLED = """
import os, signal, sys
from pathlib import Path
from twobit.memory import cgroup_limit
from twobit.quant import pipeline
from twobit.quant import plan as plan_module
from twobit.quant.decoder import Decoder
from twobit.quant.pipeline import Options, Progress, quantize

class Dying(Progress):
    def line(self, text):
        if text.startswith("layer 1/"):
            os.kill(os.getpid(), signal.SIGKILL)

quantize(Path(sys.argv[1]), Path(sys.argv[2]), Options(calib_tokens=int(sys.argv[3])), Dying())
"""


@pytest.fixture(scope="module")
def killed(source: Path, folder: Path) -> Path:
    """An output whose making was ended by the system after the first layer."""
    out = folder / "killed"
    done = subprocess.run([sys.executable, "-c", KILLED, str(source), str(out), str(TOKENS)], timeout=200)
    assert done.returncode == -signal.SIGKILL
    assert staging_path(out).is_dir()
    return out


def copied(killed: Path, tmp_path: Path) -> Path:
    """The same unfinished run under another name."""
    shutil.copytree(staging_path(killed), staging_path(tmp_path / "out"))
    return tmp_path / "out"


def test_half_made_outputs_do_not_open(killed: Path) -> None:
    assert not killed.exists()
    with pytest.raises(FormatError):
        open_model(killed)
    with pytest.raises(FormatError):
        open_model(staging_path(killed))


def test_killed_runs_go_on(
    source: Path, made: tuple[Path, dict[str, Any]], killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, told = copied(killed, tmp_path), Recorder()
    passed: list[int] = []
    gated = Decoder.gated
    monkeypatch.setattr(
        Decoder, "gated", lambda self, index, *a, **k: passed.append(index) or gated(self, index, *a, **k)
    )
    quantize(source, out, options(threads=2), told)
    assert set(passed) == {1}  # what is done is not gone through again
    assert any("3 of 5 parts are done" in line for line in told.lines)  # embedding, norm and the first layer
    assert not any(line.startswith("layer 1/") for line in told.lines)
    assert content(out) == content(made[0])


def test_lost_states_are_made_again(
    source: Path, made: tuple[Path, dict[str, Any]], killed: Path, tmp_path: Path
) -> None:
    out = copied(killed, tmp_path)
    for states in (staging_path(out) / "spill").glob("*.bin"):
        states.write_bytes(states.read_bytes()[:-1] + b"\1")
    quantize(source, out, options())
    assert content(out) == content(made[0])


def test_states_may_lie_elsewhere(
    source: Path, made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    seen = []
    monkeypatch.setattr(pipeline._Run, "_head", lambda self, inputs: seen.extend(elsewhere.rglob("*.bin")) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quantize(source, tmp_path / "out", options(spill=elsewhere))
    assert len(seen) == 2
    assert sum(path.stat().st_size for path in seen) <= 2 * 4 * (2 * 96) * TOKENS  # of verifier and draft
    assert not list(staging_path(tmp_path / "out").rglob("states*"))
    monkeypatch.undo()
    quantize(source, tmp_path / "out", options(spill=elsewhere))
    assert content(tmp_path / "out") == content(made[0])
    assert list(elsewhere.iterdir()) == []  # deleted at the end
    with pytest.raises(FormatError, match="inside the source"):
        quantize(source, tmp_path / "out2", options(spill=source))


def test_other_options_do_not_resume(source: Path, killed: Path, tmp_path: Path) -> None:
    out = copied(killed, tmp_path)
    text = tmp_path / "other.txt"
    text.write_text("Other words, but as good as these. " * 30)
    for changed, what in (
        (options(recipe=Recipe(8)), r"options\.residual was 6, is now 8"),
        (
            options(recipe=Recipe(rules=(Rule.parse("down_proj=3+6"),))),
            r'options\.rules was \[\], is now \["down_proj=3\+6"\]',
        ),
        (options(calib_tokens=TOKENS + 64), rf"options\.calib_tokens was {TOKENS}, is now {TOKENS + 64}"),
        (options(calib=(text,)), r'calibration\.source was "the package\'s text", is now "other\.txt"'),
    ):
        with pytest.raises(FormatError, match=what) as caught:
            quantize(source, out, changed)
        assert "--restart" in (caught.value.hint or "")
    assert not out.exists()
    summary = quantize(source, out, options(recipe=Recipe(8, 32), restart=True))
    recorded = open_model(out, check=True).manifest
    assert recorded.recipe["linear"] == "2+8"
    assert recorded.recipe["residual_group"] == 32
    assert recorded.recipe["head"] == "4+6"
    assert {e.range for e in recorded.tensors.values() if e.kind == "matrix"} == {"wide"}
    assert summary["residual_bpw"] > 8


def test_another_weight_does_not_resume(source: Path, killed: Path, tmp_path: Path) -> None:
    out, other = copied(killed, tmp_path), tmp_path / "other"
    shutil.copytree(source, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match="source was"):
        quantize(other, out, options())


def test_weights_that_change_meanwhile(
    source: Path, made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After they were checked, while layers are made of them; a file that is only touched does no harm."""
    path, head = tmp_path / "source", pipeline._Run._head
    shutil.copytree(source, path)
    file = path / "model.safetensors"

    def touched(run: pipeline._Run, inputs: Any) -> None:
        head(run, inputs)
        os.utime(file)

    def changed(run: pipeline._Run, inputs: Any) -> None:
        head(run, inputs)
        tensors = load_file(file)
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
        save_file(tensors, file, {"format": "pt"})

    monkeypatch.setattr(pipeline._Run, "_head", changed)
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed while the model was made"):
        quantize(path, tmp_path / "changed", options())
    assert not (tmp_path / "changed").exists()
    shutil.copy(source / "model.safetensors", file)
    monkeypatch.setattr(pipeline._Run, "_head", touched)
    quantize(path, tmp_path / "touched", options())
    assert content(tmp_path / "touched") == content(made[0])


def test_plan_is_what_comes_out(source: Path, made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    about = plan(source, tmp_path / "out", options()).to_json()
    assert set(tmp_path.iterdir()) == before
    _, summary = made
    for key in ("parameters", "draft_bpw", "residual_bpw", "head_bpw", "draft_bytes", "residual_bytes"):
        assert about[key] == summary[key]
    assert about["memory_bytes"] == summary["expected_ram_bytes"]
    assert about["disk_bytes"] > summary["draft_bytes"] + summary["residual_bytes"]


def test_a_plan_refuses_what_the_run_would(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "source"
    shutil.copytree(source, path)
    (path / "tokenizer.json").unlink()
    for refuses in (plan, quantize):
        with pytest.raises(CalibrationError, match=r"no tokenizer\.json"):
            refuses(path, tmp_path / "out", options())


def test_rules_and_fused_tensors(folder: Path, tmp_path: Path) -> None:
    path = make_tokenizer(make_checkpoint("phi3", folder / "phi3", num_hidden_layers=1))
    rules = (Rule.parse("mlp.*=3+6"), Rule.parse("layers.[0-9].mlp.down_proj=4+4"), Rule.parse("lm_head=4+6"))
    quantize(path, tmp_path / "out", options(recipe=Recipe(rules=rules)))
    model = open_model(tmp_path / "out", check=True)
    bits = {
        name.rpartition(".")[2]: (entry.draft_bits, entry.residual_bits, entry.range)
        for name, entry in model.manifest.tensors.items()
        if entry.kind == "matrix"
    }
    narrow, three = (2, 6, "narrow"), (3, 6, "narrow")
    assert bits == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), narrow),
        **dict.fromkeys(("gate_proj", "up_proj"), three),
        "down_proj": (4, 4, "narrow"),
        "lm_head": (4, 6, "wide"),
    }
    assert model.manifest.recipe["rules"] == [str(rule) for rule in rules]
    checkpoint = Checkpoint.open(path)
    up = next(s for s in checkpoint.architecture.tensors() if s.part == "up")
    _, full = layout.dequantize(model.matrix(up.module))
    assert np.linalg.norm(full - checkpoint.read(up).numpy()) < 0.02 * np.linalg.norm(full)


@pytest.mark.parametrize("text", ["down_proj", "=3+6", "x=5+5", "x=2+4", "x=2+6+1"])
def test_rules_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError):
        Rule.parse(text)


def test_a_rule_for_nothing_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'expert=3\+6' matches no matrix") as caught:
        quantize(source, tmp_path / "out", options(recipe=Recipe(rules=(Rule.parse("expert=3+6"),))))
    assert "one of model.layers.N.self_attn.q_proj, " in (caught.value.hint or "")
    assert (caught.value.hint or "").endswith("model.layers.N.mlp.down_proj, lm_head")


@pytest.fixture(scope="module")
def tied(folder: Path) -> Path:
    """Tied, one layer, some columns of the embedding dead."""
    path = make_tokenizer(make_checkpoint("llama-tied", folder / "tied", num_hidden_layers=1))
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][:, 5:9] = 0
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_tied_models_hold_one_table_and_poor_text_will_do(tied: Path, tmp_path: Path) -> None:
    """A rank-deficient Hessian (a short line many times, dead columns) needs no more than the damping."""
    text = tmp_path / "poor.txt"
    text.write_text("abc abc\n" * 500)
    told = Recorder()
    summary = quantize(tied, tmp_path / "out", options(calib=(text,)), told)
    model = open_model(tmp_path / "out", check=True)
    assert model.manifest.tensors["lm_head"].kind == "matrix"
    assert not any("embed_tokens" in name for name in model.planes)
    assert not any(entry.kind == "embedding" for entry in model.manifest.tensors.values())
    parameters = sum(np.prod(s.shape) for s in Checkpoint.open(tied).architecture.tensors() if s.role != "head")
    assert summary["parameters"] == parameters
    _, full = layout.dequantize(model.matrix("lm_head"))
    weight = Checkpoint.open(tied).read(Checkpoint.open(tied).architecture.tensors()[-1]).numpy()
    assert np.isfinite(full).all()
    assert np.linalg.norm(full - weight) < 0.03 * np.linalg.norm(weight)


def test_three_tokens_are_enough(tied: Path, tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("abc")
    told = Recorder()
    summary = quantize(tied, tmp_path / "out", options(calib=(text,)), told)
    tokens = summary["calibration"]["tokens"]
    assert 0 < tokens <= 3
    assert any(f"calibration: 1 of 2 sequences, {tokens} tokens (short.txt)" in line for line in told.lines)
    recorded = open_model(tmp_path / "out", check=True).manifest.calibration
    assert recorded["tokens"] == tokens
    assert recorded["requested_sequences"] == 2


def test_chat_templates_and_tokenizer_files_come_along(tied: Path, tmp_path: Path) -> None:
    path = tmp_path / "source"
    shutil.copytree(tied, path)
    (path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    (path / "LICENSE").write_text("as you like")
    (path / "training_args.bin").write_bytes(b"\x80pickle")
    (path / "modeling_x.py").write_text("raise SystemExit")
    quantize(path, tmp_path / "out", options(calib_tokens=32))
    names = {p.name for p in (tmp_path / "out").iterdir()}
    copies = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "LICENSE"}
    assert {name for name in names if not name.startswith("twobit-")} == {
        *copies,
        "config.json",
        "model.safetensors.index.json",
    }
    for name in copies:
        assert (tmp_path / "out" / name).read_bytes() == (path / name).read_bytes()
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    assert str(tmp_path).encode() not in (tmp_path / "out" / "config.json").read_bytes()  # no paths inside


def test_outputs_are_replaced_only_when_asked(tied: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(tied, out, options(calib_tokens=32))
    before = content(out)
    with pytest.raises(FormatError, match="exists"):
        quantize(tied, out, options(calib_tokens=48))
    assert content(out) == before
    quantize(tied, out, options(calib_tokens=48, overwrite=True))
    assert open_model(out, check=True).manifest.calibration["tokens"] == 48
    (out / "precious.txt").write_text("keep me")
    with pytest.raises(FormatError, match=r"precious\.txt"):
        quantize(tied, out, options(calib_tokens=32, overwrite=True))
    assert (out / "precious.txt").read_text() == "keep me"


def test_a_changed_recipe_of_the_package_does_not_resume(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the codes depend on beside the options: two halves by two recipes are no model."""
    with monkeypatch.context() as context:
        context.setattr(pipeline, "DAMPING", 0.1)
        context.setattr(pipeline._Run, "_head", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quantize(source, tmp_path / "out", options())
    with pytest.raises(FormatError, match="damping") as raised:
        quantize(source, tmp_path / "out", options())
    assert "0.1" in str(raised.value) and str(pipeline.DAMPING) in str(raised.value)


def test_a_spill_folder_in_the_output_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    staging = staging_path(tmp_path / "out")
    for spill in (tmp_path / "out", tmp_path / "out" / "deep", staging, staging / "work", tmp_path / "link" / "out"):
        with pytest.raises(UsageError, match="spill"):
            quantize(source, tmp_path / "out", options(spill=spill))
        assert [path.name for path in tmp_path.iterdir()] == ["link"]
    (tmp_path / "file").touch()
    with pytest.raises(FormatError, match="file is in the way"):
        quantize(source, tmp_path / "out", options(spill=tmp_path / "file" / "deep"))
    assert not staging.exists()


def test_memory_limits_of_control_groups_are_seen(tmp_path: Path) -> None:
    """That of systemd-run -p MemoryMax= lies in a folder of its own, or in one around it."""
    process, root = tmp_path / "cgroup", tmp_path / "fs"
    service = root / "user.slice" / "run-1.service"
    service.mkdir(parents=True)
    process.write_text("0::/user.slice/run-1.service\n")
    assert cgroup_limit(process, root) is None
    (service / "memory.max").write_text("max\n")
    assert cgroup_limit(process, root) is None
    (service.parent / "memory.max").write_text("300000000\n")
    assert cgroup_limit(process, root) == 300_000_000
    (service / "memory.max").write_text("100000000\n")
    assert cgroup_limit(process, root) == 100_000_000
    old = root / "memory" / "job"
    old.mkdir(parents=True)
    process.write_text("5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")
    (old / "memory.limit_in_bytes").write_text("200000000\n")
    assert cgroup_limit(process, root) == 200_000_000
    (root / "memory.max").write_text("50000000\n")  # a container: the root is its own group
    assert cgroup_limit(tmp_path / "absent", root) == 50_000_000
    odd = root / os.fsdecode(b"\xff\xe2\x80\xa8")  # no UTF-8, and what Unicode takes for the end of a line
    odd.mkdir()
    (odd / "memory.max").write_text("40000000\n")
    process.write_bytes(b"\nnothing\n0:x\n0::/\xff\xe2\x80\xa8\n")
    assert cgroup_limit(process, root) == 40_000_000
    (odd / "memory.max").write_text("-1\n")
    assert cgroup_limit(process, root) == 50_000_000


def test_the_memory_of_a_limited_process_is_what_it_is_told() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "from twobit.quant.plan import available_memory; assert available_memory() <= 4 << 30"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})


def test_one_layer_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_tokenizer(make_checkpoint("llama", tmp_path / "deep", num_hidden_layers=6))
    layer, seen = pipeline._Run._layer, list[list[weakref.ref[torch.Tensor]]]()

    def watched(run: Any, key: str, index: int, specs: Any, weights: Any, *rest: Any) -> None:
        gc.collect()
        assert not any(kept() is not None for kept in itertools.chain(*seen[: index - 1]))  # two layers and more before
        seen.append([weakref.ref(weight) for weight in weights.values()])
        layer(run, key, index, specs, weights, *rest)

    monkeypatch.setattr(pipeline._Run, "_layer", watched)
    quantize(source, tmp_path / "out", options(calib_tokens=64))
    assert len(seen) == 6 and all(seen)
    gc.collect()
    assert not any(kept() is not None for kept in itertools.chain(*seen))


@pytest.mark.parametrize("variant", ["llama", "llama-tied"])
def test_heads_that_are_made_in_chunks_are_the_same(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_tokenizer(make_checkpoint(variant, tmp_path / "source"))
    quantize(source, tmp_path / "whole", options())
    monkeypatch.setattr(plan_module, "CHUNK_WEIGHTS", 1)  # ROW_STEP rows at a time
    quantize(source, tmp_path / "chunks", options())
    whole, chunks = open_model(tmp_path / "whole", check=True), open_model(tmp_path / "chunks", check=True)
    ours, theirs = chunks.matrix("lm_head"), whole.matrix("lm_head")
    assert ours.shape[0] > 3 * pipeline.ROW_STEP and ours.shape[0] % pipeline.ROW_STEP
    for name in ("codes", "s", "m", "row_scale", "row_a", "row_b", "residual", "f"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    checkpoint = Checkpoint.open(source)
    weight = checkpoint.read(checkpoint.architecture.tensors()[-1]).numpy()
    assert np.linalg.norm(layout.dequantize(ours)[1] - weight) < 0.03 * np.linalg.norm(weight)
    if not checkpoint.architecture.tied:
        for mine, other in zip(
            chunks.embedding("model.embed_tokens"), whole.embedding("model.embed_tokens"), strict=True
        ):
            assert np.array_equal(mine, other)
    assert {name: entry.shape for name, entry in chunks.manifest.tensors.items()} == {
        name: entry.shape for name, entry in whole.manifest.tensors.items()
    }


def test_peak_memory_stays_within_the_formula(source: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from twobit.quant.pipeline import *\n"
        f"s = quantize(Path(sys.argv[1]), Path(sys.argv[2]), Options(calib_tokens={TOKENS}))\n"
        "assert s['peak_ram_bytes'] < s['expected_ram_bytes'], s"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    subprocess.run(command, check=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
