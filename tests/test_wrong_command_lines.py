"""Command lines that make no sense: one clear line that names option and value, what to do instead, and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_chat_template import CHATML
from tiny_tokenizers import byte_level, folder

from twobit.cli.main import main

WHOLE, NUMBER, LIST = "it must be a whole number", "it must be a number", "with commas, as in 1,2"
EMPTY = "'' is not possible: it must be a path that is not empty"


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a chat model without weights, and files and folders that are not what a command wants."""
    here = tmp_path_factory.mktemp("place")
    (here / "model").mkdir()
    folder(here / "model", byte_level(), settings={"eos_token": "<|im_end|>"}, jinja=CHATML)
    (here / "empty").mkdir()
    (here / "text").write_text("no JSON")
    (here / "odd" / "config.json").mkdir(parents=True)
    return here


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # bench
        ("bench model -p 0,512", "-p 0,512 is not possible: it must be numbers from 1 to 1048576"),
        ("bench model -p 0,512", "0, for none, stands alone"),
        ("bench model -p abc", "-p abc is not possible"),
        ("bench model -p ''", f"-p '' is not possible: it must be numbers from 1 to 1048576 {LIST}"),
        ("bench model -p -5", LIST),
        ("bench model -p 1,,2", LIST),
        ("bench model -p \u0663", LIST),
        ("bench model -p 99999999999999999999999", LIST),
        ("bench model -t ''", f"-t '' is not possible: it must be numbers from 1 to 1024 {LIST}"),
        ("bench model -t 0", "-t 0 is not possible: it must be numbers from 1 to 1024"),
        ("bench model -t x", f"-t x is not possible: it must be numbers from 1 to 1024 {LIST}"),
        ("bench model -t 1,1", "-t 1,1 names a number twice"),
        ("bench model -n -1", "-n -1 is not possible: it must be from 0 to"),
        ("bench model -n abc", f"-n abc is not possible: {WHOLE}"),
        ("bench model -n ''", f"-n '' is not possible: {WHOLE}"),
        ("bench model -r 0", "-r 0 is not possible: it must be from 1 to 1000"),
        ("bench model -r 1.5", f"-r 1.5 is not possible: {WHOLE}"),
        ("bench model -d 5 -n 0", "leaves nothing to decode"),
        ("bench model -p 0 -n 0", "add --kernels"),
        ("bench model --format ''", "--format '' is not possible: it must be md, csv or json"),
        ("bench model --json --format csv", "contradict each other"),
        ("bench ''", f"MODEL {EMPTY}"),
        ("bench text", "give the folder that holds the model"),
        # run and chat
        ("run model hi -n x", f"-n x is not possible: {WHOLE}"),
        ("run model hi -nx", f"-n x is not possible: {WHOLE}"),
        ("run model hi --ctx=1e3", f"--ctx 1e3 is not possible: {WHOLE}"),
        ("run model hi --threads=abc", f"-t abc is not possible: {WHOLE}"),
        ("run model hi -t ''", f"-t '' is not possible: {WHOLE}"),
        ("run model hi --temp x", f"--temp x is not possible: {NUMBER}"),
        ("run model hi --temp ''", f"--temp '' is not possible: {NUMBER}"),
        ("run model hi --top-k 1.5", f"--top-k 1.5 is not possible: {WHOLE}"),
        ("run model hi --seed x", f"--seed x is not possible: {WHOLE}"),
        ("run model hi --logit-bias ''", "--logit-bias '' is not possible: it must be ID=X"),
        ("run model hi --device gpu", "--device gpu is not possible: it must be auto, cpu, opencl or cuda"),
        ("run model hi --device ''", "--device '' is not possible"),
        ("run model hi --vram ''", "--vram '' is not possible: it must be a size"),
        ("run model hi --gpu-residual-layers \u00b2", "it must be a number of layers, or auto"),
        ("run model hi --gpu-residual-layers ''", "--gpu-residual-layers '' is not possible"),
        ("run model why is the sky", "a prompt of several words needs quotes"),
        ("run '' hi", f"MODEL {EMPTY}"),
        ("run ~nobody_at_all/x hi", "MODEL ~nobody_at_all/x: "),
        ("run model/tokenizer.json hi", "give the folder that holds the model"),
        ("chat model hello", "a single prompt is for run"),
        ("chat model --seed x", f"--seed x is not possible: {WHOLE}"),
        ("chat model --device x", "it must be auto, cpu, opencl or cuda"),
        # plan and info
        ("plan model --cores x", f"--cores x is not possible: {WHOLE}"),
        ("plan model --ram-gbs x", f"--ram-gbs x is not possible: {NUMBER}"),
        ("plan model --cores 2 --gpu-residual-layers 3", "are about a GPU: give its --vram too"),
        ("plan model --vram ''", "--vram '' is not possible"),
        ("plan ''", f"MODEL {EMPTY}"),
        ("info ''", f"MODEL {EMPTY}"),
        ("info model extra", "extra argument"),
        # push
        ("push '' user/name", f"DIR {EMPTY}"),
        ("push text user/name", "text: is a file"),
        ("push model ''", "REPO '' is not possible: it must be a Hub id"),
        ("push model user/name --revision ''", "--revision '' is not possible: it must be the name of a branch"),
        ("push model user/name --revision 'a b'", "--revision a b is not possible"),
        ("push model user/name --message ''", "--message '' is not possible"),
        ("push model user/name --message \udcff", "--message is not valid UTF-8"),
        ("push model user/name --eval none", "--eval none: no such file"),
        ("push model user/name --eval empty", "--eval empty: is a folder"),
        ("push model user/name --eval ''", f"--eval {EMPTY}"),
        ("push model user/name --eval text", "make it with `twobit eval --json >FILE`"),
        # eval
        ("eval model --reference ''", f"--reference {EMPTY}"),
        ("eval '' --reference model", f"MODEL {EMPTY}"),
        ("eval model --reference model --text none", "--text none: no such file"),
        ("eval model --reference model --text empty", "--text empty: is a folder"),
        ("eval model --reference model --tokens x", f"--tokens x is not possible: {WHOLE}"),
        # quantize
        ("quantize model -o ''", f"-o {EMPTY}"),
        ("quantize '' -o out", f"SRC {EMPTY}"),
        ("quantize model -o text/out", "-o: text is a file, not a folder"),
        ("quantize model -o out --spill-dir text", "--spill-dir: text is a file, not a folder"),
        ("quantize model -o out --spill-dir ''", f"--spill-dir {EMPTY}"),
        ("quantize model -o out --calib none", "--calib none: no such file"),
        ("quantize model -o out --calib empty", "--calib empty: is a folder"),
        ("quantize model -o out --calib ''", f"--calib {EMPTY}"),
        ("quantize model -o out --residual x", f"--residual x is not possible: {WHOLE}"),
        ("quantize model -o out --draft-bpw x", f"--draft-bpw x is not possible: {NUMBER}"),
        ("quantize model -o out --device ''", "--device '' is not possible: it must be cpu or cuda"),
        # none
        ("''", "there is no command ''"),
        ("completion ''", "there is no completion for ''"),
    ],
)
def test_one_line_that_says_what_to_do(
    line: str, message: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    import shlex

    code = main(shlex.split(line))
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert code == 2 and captured.err.startswith("error: ")
    assert len(captured.err.splitlines()) <= 2
    for word in ("Traceback", "bug in twobit", "unable to parse", "Invalid value"):
        assert word not in captured.err


@pytest.mark.parametrize("command", ["info", "bench", "push", "run", "chat"])
def test_a_folder_without_a_model_is_not_called_a_broken_download(
    command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    more = {"push": ["user/name", "--dry-run"], "run": ["hi"]}.get(command, [])
    assert main([command, "empty", *more]) == 1
    err = capsys.readouterr().err
    assert "config.json is missing" in err and "that `twobit quantize` made" in err


def test_config_that_is_a_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(place / "odd")]) == 1
    assert "config.json is not a regular file" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["completion", "bash"]])
def test_output_that_cannot_be_written(args: list[str]) -> None:
    with open(os.devnull if os.name == "nt" else "/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "twobit", *args], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "No space left" in done.stderr and "Traceback" not in done.stderr
