"""`twobit quantize` as a user sees it: one line and nothing written where something is wrong, a way on after Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import make_checkpoint, make_tokenizer
from safetensors.torch import load_file, save_file

from twobit.cli.main import main
from twobit.format.reader import open_model
from twobit.format.writer import staging_path
from twobit.quant import pipeline


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, two layers, in two shards with an index."""
    path = make_checkpoint("llama-tied", tmp_path_factory.mktemp("cli") / "model", num_hidden_layers=2)
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, path / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return make_tokenizer(path)


def listing(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def shard(path: Path, number: int) -> Path:
    return path / f"model-0000{number}-of-00002.safetensors"


def changed_tensor(path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for number in (1, 2):
        tensors = load_file(shard(path, number))
        if "model.layers.0.mlp.up_proj.weight" in tensors:
            tensors["model.layers.0.mlp.up_proj.weight"] = change(tensors["model.layers.0.mlp.up_proj.weight"])
            save_file(tensors, shard(path, number), {"format": "pt"})


def changed_config(path: Path, **values: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def with_nan(weight: torch.Tensor) -> torch.Tensor:
    weight[7, 3] = torch.nan
    return weight


def truncate(path: Path) -> None:
    data = shard(path, 2).read_bytes()
    shard(path, 2).write_bytes(data[:-1])


def changed_tokenizer(path: Path, **values: object) -> None:
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").write_text(json.dumps(tokenizer | values))


def starting_with(ids: list[int]) -> dict[str, object]:
    """A post-processor that puts `ids` before every text."""
    text: dict[str, object] = {"Sequence": {"id": "A", "type_id": 0}}
    start = {"id": "<s>", "ids": ids, "tokens": ["<s>"] * len(ids)}
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": start},
    }


def only_pickle(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()
    # a pickle that leaves a file behind where it is opened
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch canary'\ntR.")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (lambda p: shard(p, 2).unlink(), "model-00002-of-00002.safetensors"),
    "truncated shard": (truncate, "model-00002-of-00002.safetensors"),
    "empty shard": (lambda p: shard(p, 1).write_bytes(b""), "model-00001-of-00002.safetensors"),
    "NaN weight": (lambda p: changed_tensor(p, with_nan), "model.layers.0.mlp.up_proj.weight holds NaN in row 7"),
    "wrong shape": (lambda p: changed_tensor(p, lambda w: w[:-1].clone()), "model.layers.0.mlp.up_proj.weight"),
    "unknown family": (lambda p: changed_config(p, model_type="mamba"), "mamba"),
    "already quantized": (
        lambda p: changed_config(p, quantization_config={"quant_method": "gptq", "bits": 4}),
        "already quantized (gptq)",
    ),
    "pickle only": (only_pickle, "pytorch_model.bin"),
    "no tokenizer": (lambda p: (p / "tokenizer.json").unlink(), "tokenizer.json"),
    "unknown tokenizer": (
        lambda p: (p / "tokenizer.json").write_text('{"model": {"type": "Strange", "vocab": {"a": 0}}}'),
        "tokenizer.json: a tokenizer of type 'Strange'",
    ),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json"),
    "setting that is no JSON": (
        lambda p: changed_config(p, time_step_limit=[0.0, float("inf")]),
        "config.json: time_step_limit: cannot be written into a model",
    ),
    "setting that is no Unicode": (lambda p: changed_config(p, note="\ud800"), "config.json: note: cannot be written"),
    "endless setting": (lambda p: changed_config(p, note="x" * (33 << 20)), "config.json: 346"),
    "tokenizer without an unknown token": (
        lambda p: changed_tokenizer(p, model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}),
        "tokenizer.json: the tokenizer cannot take the calibration text",
    ),
    "tokenizer that panics": (
        lambda p: changed_tokenizer(p, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "tokenizer.json cannot be read: Precompiled",
    ),
    "tokenizer that panics at work": (
        lambda p: changed_tokenizer(p, normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "ab"}),
        "tokenizer.json: the tokenizer cannot take the calibration text: index out of bounds",
    ),
    "first token without a row": (
        lambda p: changed_tokenizer(p, post_processor=starting_with([331])),
        "tokenizer.json: every text starts with token 331, but the embedding has 331 rows",
    ),
    "first tokens that fill the context": (
        lambda p: changed_tokenizer(p, post_processor=starting_with([0] * 512)),
        "sequences of 512 tokens, the model's context, have no room for text",
    ),
    "template that writes no Unicode": (
        lambda p: (p / "tokenizer_config.json").write_text(json.dumps({"chat_template": "\ud800"})),
        "the chat template writes text that is not valid Unicode",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_sources(
    what: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "source"
    shutil.copytree(source, path)
    breaks, named = BROKEN[what]
    breaks(path)
    before = listing(tmp_path)
    assert main(["quantize", str(path), "-o", str(tmp_path / "out"), "--calib-tokens", "64"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    (error,) = [line for line in told.err.splitlines() if line.startswith("error: ")]
    assert named in error
    assert "Traceback" not in told.err
    assert listing(tmp_path) == before  # nothing written, no pickle opened


@pytest.mark.parametrize("where", ["equal", "inside", "around", "linked", "root"])
def test_outputs_that_touch_the_source(
    where: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "source"
    shutil.copytree(source, path)
    os.symlink(path, tmp_path / "link")
    out = {"equal": path, "inside": path / "out", "around": tmp_path / "deep", "linked": tmp_path / "link" / "out"}
    out["root"] = Path("/")
    before = listing(tmp_path)
    assert main(["quantize", str(path), "-o", str(out[where]), "--overwrite"]) == 1
    told = capsys.readouterr()
    assert len(told.err.splitlines()) == 2  # the error and a hint
    assert ("/ exists" if where == "root" else "the output") in told.err
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "no text in it"),
        (b" \n\n", "no text in it"),
        (b"caf\xe9", "not UTF-8 at byte 3"),
        (None, "no such file"),
    ],
)
def test_calibration_files(
    content: bytes | None, what: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    before = listing(tmp_path)
    arguments = ["quantize", str(source), "-o", str(tmp_path / "out"), "--calib", str(tmp_path / "text.txt")]
    assert main(arguments) == (2 if content is None else 1)
    assert f"text.txt: {what}" in capsys.readouterr().err
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["--residual", "7"],
        ["--residual-group", "8"],
        ["--rule", "down_proj"],
        ["--rule", "down_proj=9+9"],
        ["--rule", f"down_proj={'3' * 5000}+6"],
        ["--seed", "-1"],
        ["-t", "0"],
        ["--calib-tokens", "0"],
        ["--calib-tokens", "many"],
        ["--no-such-option"],
    ],
)
def test_usage_errors(arguments: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(source), "-o", str(tmp_path / "out"), *arguments]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


def test_dry_run(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["quantize", str(source), "-o", str(tmp_path / "out"), "--dry-run"]
    assert main([*arguments, "--json"]) == 0
    told = capsys.readouterr()
    data = json.loads(told.out)
    assert data["dry_run"] is True
    assert data["recipe"]["linear"] == "2+6"
    assert main([*arguments, "--residual", "8"]) == 0
    told = capsys.readouterr()
    assert "bits per weight" in told.out
    assert "one layer with its Hessians" in told.out
    assert list(tmp_path.iterdir()) == []


def test_json_and_resume_after_an_interrupt(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    arguments = ["quantize", str(source), "-o", str(out), "--calib-tokens", "64", "--rule", "down_proj=3+6"]
    layer = pipeline._Run._layer
    calls: list[str] = []

    def interrupted(run: pipeline._Run, key: str, *rest: object) -> None:
        calls.append(key)
        if key == "layer-00001" and calls.count(key) == 1:
            raise KeyboardInterrupt
        layer(run, key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeline._Run, "_layer", interrupted)
    assert main(arguments) == 130
    told = capsys.readouterr()
    assert told.out == ""
    assert "the same command goes on where it was" in told.err
    assert not out.exists()
    assert staging_path(out).exists()

    assert main([*arguments, "--rule", "up_proj=3+6"]) == 1
    assert "options.rules was" in capsys.readouterr().err

    assert main([*arguments, "--json"]) == 0
    assert calls == ["layer-00000", "layer-00001", "layer-00001"]
    told = capsys.readouterr()
    data = json.loads(told.out)
    (warning,) = told.err.splitlines()
    assert warning.startswith("warning: 64 tokens to calibrate on, and the widest matrix has 172 columns: ")
    assert data["output"] == str(out)
    assert data["build_id"] == open_model(out, check=True).manifest.build_id
    assert not staging_path(out).exists()

    assert main(arguments) == 1
    assert "exists" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    told = capsys.readouterr()
    assert "calibration: " in told.err
    assert "layer 2/2" in told.err
    assert "2+6, 3+6" in told.err
    assert "peak memory" in told.out


def test_files_of_the_source_that_are_odd(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Licences come along, of any kind; what cannot is told before the work; pipes are not waited for."""
    path = tmp_path / "source"
    shutil.copytree(source, path)
    for name in ("LICENSE", "license.MD", "Notice", "USE_POLICY.md", "LICENSE (1).txt", "NOTICE\n2", "LICENSE\udcff"):
        (path / name).write_text(name.encode(errors="replace").decode())
    (path / "LICENCE").mkdir()
    for name in ("README.md", "tokenizer_config.json", "NOTICE.pipe"):
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)
    out = tmp_path / "out"
    assert main(["quantize", str(path), "-o", str(out), "--calib-tokens", "64"]) == 0
    kept = {file.name for file in out.iterdir() if file.name.upper().startswith(("LICEN", "NOTICE", "USE"))}
    assert kept == {"LICENSE", "license.MD", "Notice", "USE_POLICY.md"}
    assert not (out / "README.md").exists()
    told = capsys.readouterr().err
    for name in ("LICENSE (1).txt", "NOTICE\\n2", "LICENSE\\udcff"):
        assert f"left out '{name}'" in told
    open_model(out, check=True)


@pytest.mark.parametrize("settings", ["[]", "[" * 100_000])
def test_odd_tokenizer_settings_mean_no_template(settings: str, source: Path, tmp_path: Path) -> None:
    path = tmp_path / "source"
    shutil.copytree(source, path)
    (path / "tokenizer_config.json").write_text(settings)
    assert pipeline._render(pipeline.plan.open_source(path, tmp_path / "out", pipeline.Options())) is None


def test_weights_of_every_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_tokenizer(make_checkpoint("llama", tmp_path / "source", num_hidden_layers=1))
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] *= 1e30
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj"):  # no error at all, but for roundings
        tensors[f"model.layers.0.{name}.weight"].fill_(0.5)
    arguments = ["quantize", str(path), "--calib-tokens", "64", "-o"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    assert main([*arguments, str(tmp_path / "out")]) == 0
    errors = open_model(tmp_path / "out", check=True).manifest.recipe["errors"]
    assert 0 < errors["head"]["full"] < errors["head"]["draft"] < 0.5
    assert 0 <= errors["linear"]["full"] < errors["linear"]["draft"] < 0.5
    tensors["model.embed_tokens.weight"][300, 7] = 1e9  # more than an fp16 scale holds
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    assert main([*arguments, str(tmp_path / "large")]) == 1
    assert "error: model.embed_tokens.weight: row 300 holds a value of 1e+09, more than" in capsys.readouterr().err


def test_a_folder_whose_name_is_not_utf8(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "caf\udce9"
    shutil.copytree(source, path)
    assert main(["quantize", str(path), "-o", str(tmp_path / "out"), "--calib-tokens", "64"]) == 0
