"""Push, download and remote headers, against a Hub on loopback that speaks real HTTP."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_stub import USER, Hub, Reply, serve
from packed import packed_model, source_checkpoint

from twobit import card, hub
from twobit.cli.main import main
from twobit.errors import FormatError, HubError
from twobit.format.writer import INDEX_NAME

REPO = f"{USER}/tiny-2bit"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own LFS uploads


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A running stub that this process's huggingface_hub talks to, with an empty cache and a good token."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    with serve() as server:
        for name, value in {
            "ENDPOINT": server.url,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        monkeypatch.setenv("TWOBIT_HOME", str(tmp_path / "state"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.chdir(tmp_path)
        close_session()
        yield server
        close_session()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits that were asked for, none of which is made."""
    asked: list[float] = []
    monkeypatch.setattr(time, "sleep", asked.append)
    return asked


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder of one's own."""
    return shutil.copytree(packed_model("llama"), tmp_path / "model")


def own_names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} | {card.README}


def many(folder: Path, count: int) -> Path:
    """The same model with its draft planes in `count` shards, as a very large one would be."""
    from safetensors.numpy import load_file

    from twobit.format.safetensors_file import read_header

    (draft,) = folder.glob("twobit-draft-*")
    tensors = load_file(draft)
    metadata = read_header(draft).metadata
    index = json.loads((folder / INDEX_NAME).read_text())
    names = list(tensors)
    assert count <= len(names), len(names)
    groups = [names[i::count] for i in range(count)]
    draft.unlink()
    for i, group in enumerate(groups):
        name = f"twobit-draft-{i + 1:05}-of-{count:05}.safetensors"
        header: dict[str, Any] = {"__metadata__": metadata}
        body, at = b"", 0
        for key in sorted(group, key=lambda key: tensors[key].dtype.name != "uint8"):
            data = tensors[key].tobytes()
            dtype = {"uint8": "U8", "float32": "F32", "float16": "F16"}[tensors[key].dtype.name]
            header[key] = {"dtype": dtype, "shape": list(tensors[key].shape), "data_offsets": [at, at + len(data)]}
            index["weight_map"][key] = name
            body, at = body + data, at + len(data)
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 64)
        (folder / name).write_bytes(len(text).to_bytes(8, "little") + text + body)
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return folder


# -- push --


def test_a_fresh_push_is_one_commit_of_exactly_the_model(stub: Hub, model: Path, capfd: Any) -> None:
    expected = own_names(model)
    for junk in (".env", "x.tmp", "core", "state.json", "training_args.bin", "twobit-draft-00009-of-00009.safetensors"):
        (model / junk).write_text("secret")
    for folder in (".git", ".cache"):
        (model / folder).mkdir()
        (model / folder / "config.json").write_text("{}")
    (model / "link").symlink_to("/etc/hostname")
    assert main(["push", str(model), REPO, "--message", "first", "--base-model", "some/base"]) == 0
    out, err = capfd.readouterr()
    assert out == f"{stub.url}/{REPO}\n"
    repo = stub.repos[REPO]
    assert set(repo.files) == expected
    assert all(repo.files[name] == (model / name).read_bytes() for name in expected - {card.README})
    ((message, added, deleted),) = repo.commits
    assert (message, deleted) == ("first", []) and set(added) == expected
    assert all(name in err for name in expected)
    assert stub.requests[0].path == "/api/whoami-v2"
    text = repo.files[card.README].decode()
    assert "base_model: some/base" in text and "base_model_relation: quantized" in text
    assert "library_name: twobit" in text and f"twobit run {REPO}" in text
    assert "license" not in text
    assert "hf_good" not in out + err


def test_a_second_push_has_nothing_to_do(stub: Hub, model: Path, capfd: Any) -> None:
    for private in ([], ["--private"]):
        stub.repos.clear()
        assert main(["push", str(model), REPO, *private]) == 0
        before = len(stub.requests)
        assert main(["push", str(model), REPO, *private]) == 0
        out, err = capfd.readouterr()
        assert "nothing to do" in err and out.endswith(f"{stub.url}/{REPO}\n")
        assert len(stub.repos[REPO].commits) == 1
        again = stub.requests[before:]
        assert not [r for r in again if r.method == "PUT" or "commit/" in r.path]
        assert all(r.headers.get("authorization") == "Bearer hf_good" for r in again)


def test_a_changed_file_is_the_only_one_that_goes(stub: Hub, model: Path, capfd: Any) -> None:
    assert main(["push", str(model), "tiny-2bit", "--json"]) == 0  # a name alone is one's own
    first = json.loads(capfd.readouterr().out)
    assert first["repository"] == REPO and set(first["uploaded"]) == own_names(model)
    (model / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
    assert main(["push", str(model), REPO, "--json"]) == 0
    second = json.loads(capfd.readouterr().out)
    assert second["uploaded"] == ["generation_config.json"] and not second["unchanged"]


def test_shards_of_an_older_build_go(stub: Hub, model: Path) -> None:
    assert main(["push", str(model), REPO]) == 0
    old = {name for name in stub.repos[REPO].files if name.startswith("twobit-draft")}
    many(model, 3)
    assert main(["push", str(model), REPO]) == 0
    repo = stub.repos[REPO]
    assert set(repo.commits[-1][2]) == old and not old & set(repo.files)


def test_dry_run_asks_the_hub_nothing(stub: Hub, model: Path, capfd: Any) -> None:
    assert main(["push", str(model), REPO, "--dry-run", "--json"]) == 0
    data = json.loads(capfd.readouterr().out)
    assert set(data["files"]) == own_names(model) and data["bytes"] == sum(data["files"].values())
    assert not stub.requests


def test_private_means_private(stub: Hub, model: Path, capfd: Any) -> None:
    assert main(["push", str(model), f"{USER}/new", "--private"]) == 0
    assert stub.repos[f"{USER}/new"].private
    assert main(["push", str(model), f"{USER}/old"]) == 0
    assert not stub.repos[f"{USER}/old"].private
    (model / "merges.txt").write_text("#\n")
    assert main(["push", str(model), f"{USER}/old", "--private"]) == 0
    assert stub.repos[f"{USER}/old"].private
    private = next(i for i, r in enumerate(stub.requests) if r.call.endswith("/old/settings"))
    assert "merges.txt" in stub.repos[f"{USER}/old"].commits[-1][1]
    assert private < max(i for i, r in enumerate(stub.requests) if "/old/commit/" in r.path)


def test_a_repository_that_stays_public_gets_nothing(stub: Hub, model: Path, capfd: Any) -> None:
    assert main(["push", str(model), REPO]) == 0
    (model / "merges.txt").write_text("#\n")
    for reply in (Reply(403, {"error": "visibility is locked"}), Reply(200, {})):
        stub.rules.clear()
        stub.answer("PUT .*/settings", reply)
        assert main(["push", str(model), REPO, "--private"]) == 1
        assert "public" in capfd.readouterr().err
    assert len(stub.repos[REPO].commits) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 413])
@pytest.mark.parametrize("where", ["POST .*/preupload/", "POST .*objects/batch", "PUT /lfs/", "POST .*/commit/"])
def test_permanent_refusals_stop_at_once(
    stub: Hub, model: Path, waits: list[float], capfd: Any, where: str, status: int
) -> None:
    stub.answer(where, Reply(status, {"error": "storage quota exceeded"}))
    assert main(["push", str(model), REPO]) == 1
    error = capfd.readouterr().err
    assert f"{status}: storage quota exceeded" in error or (status == 401 and "401" in error), error
    assert len(stub.calls(where)) <= 5 and not waits  # files are sent by five threads
    assert not stub.repos[REPO].commits


@pytest.mark.parametrize("where", ["GET /api/whoami", "POST .*objects/batch", "PUT /lfs/", "POST .*/commit/"])
def test_429_is_waited_for(stub: Hub, model: Path, waits: list[float], where: str, capfd: Any) -> None:
    stub.answer(where, Reply(429, {"error": "slow down"}, {"Retry-After": "3"}), times=1)
    assert main(["push", str(model), REPO]) == 0
    assert len(waits) == 1 and 3 <= waits[0] <= 4
    assert len(stub.repos[REPO].commits) == 1


def test_waits_have_a_limit(stub: Hub, model: Path, waits: list[float], capfd: Any) -> None:
    stub.answer("POST .*/commit/", Reply(429, {"error": "hourly quota"}, {"Retry-After": "3000"}))
    assert main(["push", str(model), REPO]) == 1
    error = capfd.readouterr().err
    assert "hourly quota" in error and "3000 s" in error and not waits


def test_server_errors_are_tried_again_within_limits(stub: Hub, model: Path, waits: list[float], capfd: Any) -> None:
    stub.answer("POST .*/commit/", Reply(503, {"error": "maintenance"}), times=2)
    assert main(["push", str(model), REPO]) == 0
    assert len(stub.calls("commit/")) == 3 and len(waits) == 2
    stub.answer("POST .*/commit/", Reply(503, {"error": "maintenance"}))
    (model / "merges.txt").write_text("#\n")
    assert main(["push", str(model), REPO]) == 1
    assert len(stub.calls("commit/")) == 3 + hub.TRIES
    assert "maintenance" in capfd.readouterr().err


def test_a_commit_whose_answer_was_lost_is_not_made_twice(stub: Hub, model: Path, waits: list[float]) -> None:
    stub.answer("POST .*/commit/", Reply(504, {"error": "timeout"}, done=True), times=1)
    assert main(["push", str(model), REPO]) == 0
    assert len(stub.calls("commit/")) == 1 and len(stub.repos[REPO].commits) == 1


def test_a_broken_connection_resumes(stub: Hub, model: Path, waits: list[float], capfd: Any) -> None:
    many(model, 8)
    shards = sorted(model.glob("twobit-draft-*"))
    second = hashlib.sha256(shards[1].read_bytes()).hexdigest()
    stub.answer(f"PUT /lfs/{second}", Reply(cut=0.6))
    assert main(["push", str(model), REPO]) == 1
    assert not stub.repos[REPO].commits
    sent = set(stub.objects)
    assert hashlib.sha256(shards[0].read_bytes()).hexdigest() in sent and second not in sent
    stub.rules.clear()
    before = len(stub.requests)
    assert main(["push", str(model), REPO]) == 0
    again = {r.path.removeprefix("/lfs/") for r in stub.requests[before:] if r.method == "PUT"}
    assert second in again and not again & sent
    assert len(stub.repos[REPO].commits) == 1


def test_one_dropped_connection_is_no_failure(stub: Hub, model: Path, waits: list[float]) -> None:
    stub.answer("PUT /lfs/", Reply(cut=0.6), times=1)
    assert main(["push", str(model), REPO]) == 0
    assert len(stub.repos[REPO].commits) == 1


def test_tokens(stub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    for token, message in [(None, "no Hugging Face token"), ("hf_wrong", "token"), ("hf_readonly", "may only read")]:
        if token is None:
            monkeypatch.delenv("HF_TOKEN")
        else:
            monkeypatch.setenv("HF_TOKEN", token)
        stub.requests.clear()
        assert main(["push", str(model), REPO]) == 1
        error = capfd.readouterr().err
        assert message in error and "hf auth login" in error
        assert token is None or token not in error
        assert len(stub.requests) <= 1


def test_narrow_tokens(stub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """One that may write to a repository, but not create any."""
    monkeypatch.setenv("HF_TOKEN", "hf_narrow")
    assert main(["push", str(model), REPO]) == 1
    error = capfd.readouterr().err
    assert "may not create it" in error and "rights to create" in error and "huggingface.co/new" in error
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert main(["push", str(model), REPO]) == 0
    monkeypatch.setenv("HF_TOKEN", "hf_narrow")
    (model / "merges.txt").write_text("#\n")
    assert main(["push", str(model), REPO]) == 0
    assert len(stub.calls("repos/create")) == 2
    stub.answer("auth-check/write", Reply(403, {"error": "read only"}))
    (model / "merges.txt").write_text("##\n")
    assert main(["push", str(model), REPO]) == 1
    assert f"may not write to {REPO}" in capfd.readouterr().err


def test_three_hundred_files(stub: Hub, tmp_path: Path, waits: list[float]) -> None:
    model = shutil.copytree(packed_model("llama"), tmp_path / "m")
    many(model, 100)
    for i in range(200):
        (model / f"LICENSE-{i:03}").write_text(f"text {i}")
    stub.answer("POST .*/commit/", Reply(429, {"error": "too many"}, {"Retry-After": "3"}), times=1)
    assert main(["push", str(model), REPO]) == 0
    assert len(stub.repos[REPO].files) >= 300
    assert len(stub.repos[REPO].commits) == 1 and len(stub.calls("commit/")) == 2
    assert max(waits) <= 4


def test_damage_is_found_before_anything_is_sent(stub: Hub, model: Path, capfd: Any) -> None:
    (shard,) = model.glob("twobit-residual-*")
    data = bytearray(shard.read_bytes())
    data[-100] ^= 1
    shard.write_bytes(data)
    assert main(["push", str(model), REPO]) == 1
    assert "checksum" in capfd.readouterr().err and REPO not in stub.repos


def test_files_that_the_hub_cannot_take(stub: Hub, model: Path, capfd: Any) -> None:
    (shard,) = model.glob("twobit-residual-*")
    os.truncate(shard, 51_000_000_000)  # a hole
    assert main(["push", str(model), REPO]) == 1
    error = capfd.readouterr().err
    assert "51,000,000,000 bytes" in error and "50,000,000,000" in error
    assert not stub.calls("PUT")


def test_unfinished_models_are_refused(stub: Hub, model: Path, capfd: Any) -> None:
    (shard,) = model.glob("twobit-residual-*")
    shard.unlink()
    assert main(["push", str(model), REPO]) == 1
    assert shard.name in capfd.readouterr().err and not stub.calls("PUT")
    assert main(["push", str(model / "none"), REPO]) == 2
    for name in ("a/b/c", "a b", "..", "a//b", ""):
        assert main(["push", str(model), name]) == 2


# -- the card --


def test_a_readme_of_ones_own_is_kept(stub: Hub, model: Path) -> None:
    (model / card.README).write_text("---\nlicense: mit\n---\nMine.\n")
    assert main(["push", str(model), REPO]) == 0
    assert stub.repos[REPO].files[card.README] == b"---\nlicense: mit\n---\nMine.\n"
    (model / card.README).unlink()
    stub.repos[REPO].files[card.README] = b"Written on the Hub."
    assert main(["push", str(model), REPO]) == 0
    assert stub.repos[REPO].files[card.README] == b"Written on the Hub."


def test_a_card_that_the_hub_refuses(stub: Hub, model: Path, capfd: Any) -> None:
    (model / card.README).write_text("---\nlicense: [mit\n---\nMine.\n")
    assert main(["push", str(model), REPO]) == 1
    assert "bad YAML" in capfd.readouterr().err
    assert not stub.calls("PUT|repos/create|preupload")


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        (
            "---\nlicense: apache-2.0\nlanguage:\n- en\n- no\ntags: [x]\n---\n# M",
            {"license": "apache-2.0", "language": ["en", "no"]},
        ),
        ("---\nlicense: [mit]\n---\n", {"license": "mit"}),
        ("---\nlicense: [mit, null, bsd]\n---\n", {"license": ["mit", "bsd"]}),
        ("---\nlicense: other\nlicense_name: x\n---\n", {"license": "other", "license_name": "x"}),
        ("---\nlicense: [mit\n---\n", {}),
        ("---\n- a\n---\n", {}),
        ("---\nlicense:\n---\n", {}),
        ("no metadata", {}),
        ("---\r\nlicense: mit\r\n---\r\n", {"license": "mit"}),
        ("---\nlicense: !!python/object/apply:os.system ['true']\n---\n", {}),
    ],
)  # fmt: skip
def test_metadata_of_a_source(readme: str, expected: dict[str, Any], tmp_path: Path) -> None:
    assert card.metadata(readme) == expected
    (tmp_path / card.README).write_text(readme, newline="")
    made = card.of_source(tmp_path)
    assert (made is None) == (not expected)
    if made is not None:
        assert card.is_ours(made) and card.metadata(made) == expected


def test_license_and_language_travel_from_the_source(stub: Hub, tmp_path: Path) -> None:
    from twobit.quant.pipeline import Options, quantize

    repo = tmp_path / "models--some--base"
    source = shutil.copytree(source_checkpoint("llama"), repo / "snapshots" / "abc")
    (source / card.README).write_text(
        "---\nlicense: apache-2.0\nlanguage: [en, fr]\nbase_model: other/thing\n---\n# Base\n"
    )
    quantize(source, tmp_path / "out", Options(calib_tokens=512))
    assert main(["push", str(tmp_path / "out"), REPO]) == 0
    data = card.metadata(stub.repos[REPO].files[card.README].decode())
    assert data == {"license": "apache-2.0", "language": ["en", "fr"], "base_model": "some/base"}


@pytest.mark.parametrize("name", ['we: "ird', "a'b", "- x", "!!str", "{a}", "x\ny"])
def test_names_cannot_break_the_card(name: str) -> None:
    import yaml

    from twobit.format.reader import open_model

    manifest = open_model(packed_model("llama")).manifest
    text = card.model_card(manifest, "u/m", {"base_model": name, "license": name})
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["base_model"] == name and front["license"] == name


def test_measurements_on_the_card(stub: Hub, model: Path, tmp_path: Path, capfd: Any) -> None:
    build = json.loads((model / "config.json").read_text())["quantization_config"]["build_id"]
    row = {"mean": 0.0125, "stderr": 0.0003, "median": 0.001, "p99": 0.2, "top1": 0.97}
    data = {
        "build_id": build,
        "tokens": 4096,
        "kl": {"full": row, "q8_0": row},
        "acceptance": {"tokens_per_step": 3.21, "stderr": 0.04, "blocks": 500, "drafted": 8},
    }
    file = tmp_path / "eval.json"
    file.write_text(json.dumps(data))
    assert main(["push", str(model), REPO, "--eval", str(file)]) == 0
    text = stub.repos[REPO].files[card.README].decode()
    assert "| full | 0.012500 | 0.000300 | 0.9700 |" in text and "3.21 tokens per step" in text
    file.write_text(json.dumps(data | {"build_id": "0" * 64}))
    assert main(["push", str(model), REPO, "--eval", str(file)]) == 2
    file.write_text("[]")
    assert main(["push", str(model), REPO, "--eval", str(file)]) == 2
    assert "--eval" in capfd.readouterr().err


# -- download --


def push_to(stub: Hub, model: Path) -> None:
    assert main(["push", str(model), REPO]) == 0
    stub.requests.clear()


def fetched(stub: Hub) -> list[str]:
    return list(
        dict.fromkeys(r.path.rpartition("/")[2] for r in stub.requests if r.method == "GET" and "resolve" in r.path)
    )


def test_a_run_from_the_hub_equals_the_local_run(stub: Hub, model: Path, capfd: Any) -> None:
    push_to(stub, model)
    args = ["hello there", "--raw", "-n", "20", "--json", "--top-k", "20"]
    capfd.readouterr()
    assert main(["run", str(model), *args]) == 0
    local = json.loads(capfd.readouterr().out)
    assert main(["run", REPO, *args]) == 0
    remote = json.loads(capfd.readouterr().out)
    assert remote["token_ids"] == local["token_ids"] and remote["text"] == local["text"]
    names = fetched(stub)
    draft = [i for i, n in enumerate(names) if n.startswith("twobit-draft")]
    residual = [i for i, n in enumerate(names) if n.startswith("twobit-residual")]
    assert max(draft) < min(residual) and names.index("config.json") < min(draft)
    assert card.README not in names
    stub.requests.clear()
    assert main(["run", REPO, *args]) == 0
    assert json.loads(capfd.readouterr().out)["token_ids"] == local["token_ids"]
    assert not fetched(stub)


def test_draft_only_downloads_the_draft_alone(stub: Hub, model: Path, capfd: Any) -> None:
    push_to(stub, model)
    args = ["hello there", "--raw", "-n", "20", "--draft-only"]
    capfd.readouterr()
    assert main(["run", REPO, *args]) == 0
    out, err = capfd.readouterr()
    assert "lossy" in err and not [name for name in fetched(stub) if "residual" in name]
    assert main(["run", str(model), *args, "--json"]) == 0
    local = json.loads(capfd.readouterr().out)
    assert local["text"] == out and local["lossy"] is True


def test_damaged_downloads(stub: Hub, model: Path, capfd: Any) -> None:
    push_to(stub, model)
    repo = stub.repos[REPO]
    name = next(n for n in repo.files if n.startswith("twobit-residual"))
    good = repo.files[name]
    bad = bytearray(good)
    bad[-100] ^= 1
    repo.files[name] = bytes(bad)
    assert main(["run", REPO, "hi", "--raw", "-n", "1"]) == 1
    error = capfd.readouterr().err
    assert "checksum" in error and f"{name} was removed from the cache" in error and "again" in error
    repo.files[name] = good
    assert main(["run", REPO, "hi", "--raw", "-n", "1"]) == 0


def test_repositories_that_are_not_ours(stub: Hub, model: Path, capfd: Any) -> None:
    from hub_stub import Repo

    stub.repos["some/full"] = Repo(files={"config.json": b'{"model_type": "llama"}', "model.safetensors": b"x" * 99})
    stub.repos["some/gptq"] = Repo(files={"config.json": b'{"quantization_config": {"quant_method": "gptq"}}'})
    stub.repos["some/data"] = Repo(files={"data.csv": b"1"})
    for command in (["run", "some/full", "hi"], ["info", "some/full"]):
        assert main(command) == 1
        error = capfd.readouterr().err
        assert "not quantized yet" in error and "twobit quantize some/full -o full-2bit" in error
    assert main(["run", "some/gptq", "hi"]) == 1
    assert "gptq" in capfd.readouterr().err
    assert main(["run", "some/data", "hi"]) == 1
    assert "no config.json" in capfd.readouterr().err
    assert main(["run", "some/none", "hi"]) == 1
    assert "no such repository" in capfd.readouterr().err
    assert not [name for name in fetched(stub) if name.endswith("safetensors")]
    push_to(stub, model)
    assert main(["run", f"{REPO}@nothere", "hi"]) == 1
    assert "revision" in capfd.readouterr().err
    assert main(["quantize", REPO, "-o", "out"]) == 2
    assert "is a twobit model already" in capfd.readouterr().err


def test_a_checkpoint_is_quantized_by_its_hub_id(stub: Hub, tmp_path: Path, capfd: Any) -> None:
    from hub_stub import Repo

    source = source_checkpoint("llama")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    stub.repos["some/base"] = Repo(files=files | {"onnx/model.bin": b"x", "pytorch_model.bin": b"pickle"})
    assert main(["quantize", "some/base", "-o", "out", "--calib-tokens", "512", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["build_id"]
    assert not {"model.bin", "pytorch_model.bin"} & set(fetched(stub))
    assert card.metadata((tmp_path / "out" / card.README).read_text()) == {"base_model": "some/base"}


def test_a_reference_is_named_by_its_hub_id(stub: Hub, model: Path, capfd: Any) -> None:
    from hub_stub import Repo

    source = source_checkpoint("llama")
    stub.repos["some/base"] = Repo(files={path.name: path.read_bytes() for path in source.iterdir()})
    capfd.readouterr()
    found = []
    for reference in (str(source), "some/base"):
        args = ["eval", str(model), "--reference", reference, "--tokens", "64", "--no-acceptance", "--json"]
        assert main(args) == 0
        found.append(json.loads(capfd.readouterr().out))
    assert found[0]["kl"] == found[1]["kl"] and found[0]["tokens"] > 0
    assert main(["eval", str(model), "--reference", "no/such/folder"]) == 2


# -- from afar --


def test_info_reads_headers_only(stub: Hub, model: Path, capfd: Any) -> None:
    push_to(stub, many(model, 4))
    capfd.readouterr()
    assert main(["info", REPO, "--json"]) == 0
    remote = json.loads(capfd.readouterr().out)
    ranges = [r.headers.get("range") for r in stub.requests if r.method == "GET" and "twobit-" in r.path]
    assert len(ranges) >= 5 and all(ranges)
    assert main(["info", str(model), "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == remote


def test_info_refuses_shards_of_another_build(stub: Hub, model: Path, capfd: Any) -> None:
    push_to(stub, model)
    name = next(n for n in stub.repos[REPO].files if n.startswith("twobit-residual"))
    data = stub.repos[REPO].files[name]
    found = re.search(rb'"build_id":\s*"([0-9a-f]{64})"', data)
    assert found
    stub.repos[REPO].files[name] = data.replace(found[1], b"0" * 64)
    assert main(["info", REPO]) == 1
    assert "another build" in capfd.readouterr().err


# -- in a process of its own, by HF_ENDPOINT alone --


def test_by_environment_variables_alone_then_offline(model: Path, tmp_path: Path) -> None:
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("HF_")},
        "HOME": str(tmp_path / "home"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    args = ["hello there", "--raw", "-n", "12", "--json"]

    def twobit(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "twobit", *command],
            env=environment | more,
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )

    with serve() as server:
        environment["HF_ENDPOINT"] = server.url
        assert "no Hugging Face token" in twobit("push", str(model), REPO).stderr
        done = twobit("push", str(model), REPO, HF_TOKEN="hf_good")
        assert (done.returncode, done.stdout) == (0, f"{server.url}/{REPO}\n"), done.stderr
        online = twobit("run", REPO, *args)
        assert online.returncode == 0, online.stderr
        before = len(server.requests)
        offline = twobit("run", REPO, *args, HF_HUB_OFFLINE="1")
        assert len(server.requests) == before
    gone = twobit("run", REPO, *args)  # nobody answers any more
    ids = [json.loads(run.stdout)["token_ids"] for run in (online, offline, gone)]
    assert ids[0] == ids[1] == ids[2] and len(ids[0]) == 12
    assert twobit("info", "some/other", HF_HUB_OFFLINE="1").returncode == 1


def test_a_cache_with_shared_blobs(model: Path, tmp_path: Path) -> None:
    """huggingface_hub 2 keeps files that several repositories have once: blobs/<etag> is then a link itself."""
    from twobit.format.reader import open_model

    cache = tmp_path / "hub"
    repo = cache / "models--a--b"
    snapshot = repo / "snapshots" / ("0" * 40)
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in model.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        shared = cache / "blobs" / digest[:2] / digest
        shared.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, shared)
        (repo / "blobs" / digest).symlink_to(f"../../blobs/{digest[:2]}/{digest}")
        (snapshot / file.name).symlink_to(f"../../blobs/{digest}")
    with pytest.raises(FormatError, match="leaves the model"):
        open_model(snapshot)
    (cache / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
    open_model(snapshot, check=True)


def test_errors_are_told_in_the_hubs_words() -> None:
    assert str(hub.explain(ValueError("a\nb"))) == "a"
    assert isinstance(hub.explain(OSError("x")), HubError)
