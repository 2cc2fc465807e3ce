"""Manifest, writer and reader: whole folders, interrupted runs, damaged and hostile ones."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from test_layout import assert_same, random_matrix

from twobit.errors import FormatError
from twobit.format import layout, writer
from twobit.format.manifest import Manifest, canonical_json, compute_build_id, parse_json
from twobit.format.reader import PackedModel, open_model
from twobit.format.safetensors_file import read_header
from twobit.format.writer import ModelWriter, PackedTensor, check_output, check_space, staging_path

CONFIG = {"model_type": "llama", "hidden_size": 96, "rope_theta": 10000.0, "note": "Željko"}
FINGERPRINT = {"source": "abc", "options": {"residual": 6, "rules": []}, "calibration": {"tokens": 7}}
KEYS = ["embed", "layer-0000", "layer-0001", "head"]
HIDDEN, WIDE, VOCAB = 96, 172, 331


def bf16(values: np.ndarray) -> bytes:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def step(key: str, seed: int = 0) -> dict[str, PackedTensor]:
    """The tensors of one key of a tiny model."""
    rng = np.random.default_rng([seed, KEYS.index(key)])
    if key == "embed":
        return {"model.embed_tokens": PackedTensor.embedding(rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32))}
    if key == "head":
        norm = PackedTensor.plain(bf16(rng.standard_normal(HIDDEN)), "BF16", (HIDDEN,))
        matrix = random_matrix(VOCAB, HIDDEN, (4, 4, 32), seed)
        return {"model.norm.weight": norm, "lm_head": PackedTensor.matrix(matrix, wide=False)}
    prefix = f"model.layers.{int(key[-4:])}"
    return {
        f"{prefix}.input_layernorm.weight": PackedTensor.plain(np.ones(17, "<f4"), "F32", (17,)),
        f"{prefix}.self_attn.q_proj": PackedTensor.matrix(random_matrix(HIDDEN, HIDDEN, (2, 6, 16), seed), wide=False),
        f"{prefix}.self_attn.q_proj.bias": PackedTensor.plain(np.full(17, 0.5, "<f2"), "F16", (17,)),
        f"{prefix}.mlp.down_proj": PackedTensor.matrix(random_matrix(HIDDEN, WIDE, (3, 8, 16), seed), wide=True),
    }


def finish(made: ModelWriter, keys: list[str] = KEYS) -> Manifest:
    return made.finish(
        keys,
        config=CONFIG,
        family="llama",
        parameters=1234567,
        recipe={"damping": 0.1, "residual": 6},
        calibration={"tokens": 7, "sequences": 1, "source": "built in"},
        producer="twobit 0.1.0",
        files={"tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}"},
    )


def make(out: Path, seed: int = 0, shard_bytes: int = writer.SHARD_BYTES, **options: bool) -> Path:
    with ModelWriter(out, FINGERPRINT, shard_bytes=shard_bytes, **options) as made:
        for key in KEYS:
            made.store(key, step(key, seed))
        finish(made)
    return out


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("built") / "model")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("split") / "model", shard_bytes=30_000)


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def edit_json(file: Path, change: Callable[[dict], object], rehash: bool = False) -> None:
    value = json.loads(file.read_bytes())
    change(value)
    if rehash:
        value["quantization_config"]["build_id"] = compute_build_id(value["quantization_config"])
    file.write_text(json.dumps(value))


# -- what is written ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["built", "split"])
def test_round_trip(which: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which)
    model = open_model(folder, check=True)
    for key in KEYS:
        for name, tensor in step(key).items():
            entry = model.manifest.tensors[name]
            assert (entry.kind, entry.shape, entry.range) == (tensor.entry.kind, tensor.entry.shape, tensor.entry.range)
            for full, stored in entry.stored(name).items():
                data = model.plain[full] if entry.kind == "plain" else model.planes[full]
                assert np.array_equal(data, tensor.planes[stored.plane])
                assert not data.flags.writeable
                assert entry.kind == "plain" or (data.ctypes.data % 64 == 0 and data.size % 64 == 0)
    assert_same(model.matrix("model.layers.1.mlp.down_proj"), random_matrix(HIDDEN, WIDE, (3, 8, 16)))
    assert np.array_equal(model.tensor("model.layers.0.self_attn.q_proj.bias"), np.full(17, 0.5, np.float32))
    norm = np.random.default_rng([0, 3]).standard_normal(HIDDEN).astype(np.float32)
    assert np.allclose(model.tensor("model.norm.weight"), norm, rtol=2**-7)
    assert {k: v for k, v in model.config.items() if k != "quantization_config"} == CONFIG
    assert model.manifest.recipe == {"damping": 0.1, "residual": 6}
    assert (folder / "tokenizer.json").read_bytes() == b"{}"
    assert not staging_path(folder).exists()


@pytest.mark.parametrize("which", ["built", "split"])
def test_stock_reader_sees_the_same_bytes(which: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(which)
    model = open_model(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    seen = set()
    for part, id_key in (("draft", "build_id"), ("residual", "build_id")):
        for file in folder.glob(f"twobit-{part}-*.safetensors"):
            with safe_open(file, "numpy") as opened:
                assert opened.metadata()[id_key] == model.manifest.build_id
                assert opened.metadata()["part"] == part
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    assert index["weight_map"][name] == file.name
                    seen.add(name)
                    if name in model.planes:
                        assert np.array_equal(opened.get_tensor(name), model.planes[name])
                    elif model.manifest.tensors[name].dtype != "BF16":  # numpy has none
                        assert np.array_equal(opened.get_tensor(name), model.tensor(name))
    assert seen == set(model.manifest.stored())
    assert index["metadata"]["total_size"] == sum(s.bytes for _, s in model.manifest.stored().values())


def test_splits_stay_below_the_limit(split: Path) -> None:
    files = sorted(split.glob("twobit-*.safetensors"))
    assert len(files) > 4
    planes = open_model(split).planes
    for file in files:
        names = list(read_header(file).tensors)
        assert file.stat().st_size <= 30_000 or len(names) == 1
        assert [n in planes for n in names] == sorted((n in planes for n in names), reverse=True)
    assert open_model(split).manifest.build_id == open_model(split, parts="draft").manifest.build_id


def test_small_tensors_come_last_in_the_draft_shard(built: Path) -> None:
    raw = (built / "twobit-draft-00001-of-00001.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    kinds = [info["dtype"] for info in header.values()]
    assert kinds == sorted(kinds, key=["U8", "F32", "F16", "BF16"].index)
    assert (8 + length) % 64 == 0


def test_bytes_are_deterministic(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere" / "other name"
    with ModelWriter(out, FINGERPRINT | {"threads": 2}) as made:
        for key in reversed(KEYS):
            made.store(key, step(key))
        finish(made)
    assert contents(out) == contents(built)


def test_bits_per_weight(built: Path) -> None:
    bits = open_model(built).manifest.bits()
    assert bits["parameters"] == 1234567
    assert bits["draft_bytes"] + bits["residual_bytes"] == sum(
        s.bytes for _, s in open_model(built).manifest.stored().values()
    )
    one = layout.plane_sizes(96, 96, 2, 6, 16)
    two = layout.plane_sizes(96, 172, 3, 8, 16)
    expected = 8 * sum(size[p] for size in (one, two) for p in layout.RESIDUAL_PLANES) / (96 * 96 + 96 * 172)
    assert bits["residual_bpw"] == pytest.approx(expected)


# -- interrupted runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", range(len(KEYS) + 1))
def test_resume_gives_the_same_bytes(built: Path, tmp_path: Path, done: int) -> None:
    out = tmp_path / "model"
    with ModelWriter(out, FINGERPRINT) as made:
        for key in KEYS[:done]:
            made.store(key, step(key), notes={"key": key})
    assert not out.exists()
    with pytest.raises(FormatError, match="unfinished"):
        open_model(staging_path(out))
    with ModelWriter(out, FINGERPRINT) as made:
        assert [made.has(key) for key in KEYS] == [i < done for i in range(len(KEYS))]
        for key in KEYS[:done]:
            assert made.notes(key) == {"key": key}
            assert set(made.load(key)) == set(step(key))
        for key in KEYS[done:]:
            made.store(key, step(key))
        finish(made)
    assert contents(out) == contents(built)


def in_a_child(work: Callable[[], object]) -> int:
    """Runs `work` in a forked process; its exit status, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_after(calls: int, log: list[str]) -> None:
    """Makes this process kill itself before its next rename or sync after `calls` of them."""

    def call(real: Callable, *args: object, **more: object) -> object:
        if len(log) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        log.append(real.__name__)
        return real(*args, **more)

    for name in ("replace", "rename", "fsync"):
        setattr(os, name, partial(call, getattr(os, name)))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("replacing", [False, True])
def test_killed_anywhere(built: Path, tmp_path: Path, replacing: bool) -> None:
    """Killed before its n-th rename or sync, a run leaves the old model, the new one or none; the next ends equal."""
    out, old = tmp_path / "model", make(tmp_path / "old", seed=1)
    before, after = contents(old), contents(built)

    def run() -> None:
        with ModelWriter(out, FINGERPRINT, overwrite=True) as made:
            for key in KEYS:
                if not made.has(key):
                    made.store(key, step(key))
            finish(made)

    def run_and_die(calls: int) -> None:
        die_after(calls, [])
        run()

    outcomes = []
    for calls in (0, 1, 2, 9, 27, 30, 39, *range(43, 50)):
        for folder in (out, staging_path(out)):
            shutil.rmtree(folder, ignore_errors=True)
        if replacing:
            shutil.copytree(old, out)
        status = in_a_child(lambda calls=calls: run_and_die(calls))
        outcomes.append(status)
        if out.exists():
            assert contents(out) in ((before, after) if replacing else (after,))
        if status == 0:
            break
        assert status == -signal.SIGKILL
        run()
        assert contents(out) == after
        assert not staging_path(out).exists()
    assert outcomes[-1] == 0 and len(outcomes) > 9


def test_resume_refuses_other_options(tmp_path: Path) -> None:
    out = tmp_path / "model"
    with ModelWriter(out, FINGERPRINT) as made:
        made.store("embed", step("embed"))
    other = {**FINGERPRINT, "options": {"residual": 8, "rules": []}}
    with pytest.raises(FormatError, match=r"options\.residual was 6, is now 8") as caught:
        ModelWriter(out, other)
    assert "--restart" in (caught.value.hint or "")
    with ModelWriter(out, other, restart=True) as made:
        assert not made.has("embed")
        made.discard()
    assert not staging_path(out).exists()


def test_two_runs_at_once(tmp_path: Path) -> None:
    with ModelWriter(tmp_path / "model", FINGERPRINT), pytest.raises(FormatError, match="in use by another run"):
        ModelWriter(tmp_path / "model", FINGERPRINT)


def test_damaged_step_is_made_anew(built: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    with ModelWriter(out, FINGERPRINT) as made:
        for key in KEYS:
            made.store(key, step(key))
    stored = staging_path(out) / "work" / "layer-0001.bin"
    data = bytearray(stored.read_bytes())
    data[1000] ^= 1
    stored.write_bytes(data)
    with ModelWriter(out, FINGERPRINT) as made:
        with pytest.raises(FormatError, match=r"layer-0001\.bin.*damaged"):
            finish(made)
        assert not out.exists() and not (staging_path(out) / "model").exists()
        assert [made.has(key) for key in KEYS] == [True, True, False, True]
        made.store("layer-0001", step("layer-0001"))
        finish(made)
    assert contents(out) == contents(built)


# -- the disk -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("limit", [50, 20_000, 60_000])
def test_disk_full(built: Path, tmp_path: Path, limit: int) -> None:
    assert limit < max(p.stat().st_size for p in built.iterdir())
    out = tmp_path / "model"
    incoming, message = os.pipe()

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            make(out)
        except FormatError as error:
            os.write(message, f"{error}|{error.hint}".encode())

    assert in_a_child(run) == 0
    os.close(message)
    with open(incoming, "rb") as file:
        text = file.read().decode()
    assert text.startswith(f"disk full: cannot write {staging_path(out)}/")
    assert text.endswith("run the same command again: finished layers are kept")
    assert not out.exists() and not (staging_path(out) / "model").exists()
    assert not list(staging_path(out).rglob("*.tmp"))
    make(out)
    assert contents(out) == contents(built)


def test_space_is_checked_up_front(tmp_path: Path) -> None:
    check_space(tmp_path / "a" / "model", 1000)
    with pytest.raises(FormatError, match=r"disk full: writing .* takes .* GB"):
        check_space(tmp_path / "model", 1 << 60)
    assert list(tmp_path.iterdir()) == []


# -- where it may write -------------------------------------------------------------------------------------


def test_output_must_not_touch_the_source(tmp_path: Path) -> None:
    source = tmp_path / "deep" / "source"
    source.mkdir(parents=True)
    (tmp_path / "link").symlink_to(source)
    for out in (source, tmp_path / "link", source / ".." / "source"):
        with pytest.raises(FormatError, match="is the source"):
            check_output(source, out)
    for out in (source / "out", tmp_path / "link" / "a" / "b"):
        with pytest.raises(FormatError, match="inside the source"):
            check_output(source, out)
    with pytest.raises(FormatError, match="contains the source"):
        check_output(tmp_path / "link", tmp_path / "deep")
    (tmp_path / "x.partial").mkdir()
    with pytest.raises(FormatError, match="is the source"):
        check_output(tmp_path / "x.partial", tmp_path / "x")
    check_output(source, tmp_path / "deep" / "source2")
    check_output(source, tmp_path / "out")


def test_overwrite_replaces_only_twobit_models(built: Path, tmp_path: Path) -> None:
    out = make(tmp_path / "model", seed=1)
    before = contents(out)
    with pytest.raises(FormatError, match="exists"):
        ModelWriter(out, FINGERPRINT)
    (out / "thesis.txt").write_text("x")
    with pytest.raises(FormatError, match=r"thesis\.txt"):
        ModelWriter(out, FINGERPRINT, overwrite=True)
    (out / "thesis.txt").unlink()
    assert contents(out) == before
    make(out, overwrite=True)
    assert contents(out) == contents(built)
    other = tmp_path / "other"
    other.mkdir()
    for prepare in (lambda: None, lambda: (other / "config.json").write_text('{"quantization_config": null}')):
        prepare()
        with pytest.raises(FormatError, match="not a twobit model"):
            ModelWriter(other, FINGERPRINT, overwrite=True)
    assert not staging_path(other).exists()


def test_staging_folder_of_someone_else(tmp_path: Path) -> None:
    (tmp_path / "model.partial" / "work").mkdir(parents=True)
    with pytest.raises(FormatError, match="not ours"):
        ModelWriter(tmp_path / "model", FINGERPRINT, restart=True)
    assert (tmp_path / "model.partial" / "work").is_dir()


@pytest.mark.parametrize(
    "name", ["../evil", "model.safetensors", "config.json", "a/b.json", "tokenizer.json\n", "x.py"]
)
def test_only_known_files_are_added(tmp_path: Path, name: str) -> None:
    with ModelWriter(tmp_path / "model", FINGERPRINT) as made, pytest.raises(FormatError, match="cannot be put"):
        made.finish([], config={}, family="x", parameters=1, recipe={}, calibration={}, producer="x", files={name: b""})


def test_writer_refuses_what_no_reader_takes(tmp_path: Path) -> None:
    too_wide = random_matrix(16, 16)
    too_wide.row_a[3] = 200
    with pytest.raises(FormatError, match=r"q_proj: row 3 may reach"):
        PackedTensor.matrix(too_wide, wide=False, name="q_proj")
    with ModelWriter(tmp_path / "model", FINGERPRINT) as made:
        with pytest.raises(FormatError, match="cannot be a key"):
            made.store("../up", {})
        with pytest.raises(FormatError, match=r"x\.weight: data has 3 bytes, expected 4"):
            made.store("a", {"x.weight": PackedTensor.plain(b"abc", "F32", (1,))})
        with pytest.raises(FormatError, match="is not stored"):
            finish(made)
        made.store("a", {"x y": PackedTensor.plain(b"abcd", "F32", (1,))})
        with pytest.raises(FormatError, match="not a module name"):
            finish(made, ["a"])
        made.store("a", {"x": PackedTensor.plain(b"abcd", "F32", (1,))})
        made.store("b", {"x": PackedTensor.plain(b"abcd", "F32", (1,))})
        with pytest.raises(FormatError, match="x is stored twice"):
            finish(made, ["a", "b"])


# -- what the reader refuses --------------------------------------------------------------------------------


def test_shard_of_another_build(copy: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", seed=1)
    ids = [open_model(folder).manifest.build_id for folder in (copy, other)]
    name = "twobit-residual-00001-of-00001.safetensors"
    assert (copy / name).stat().st_size == (other / name).stat().st_size
    shutil.copy(other / name, copy / name)
    with pytest.raises(FormatError, match=f"{name}: belongs to another build: '{ids[1]}', config.json is of {ids[0]}"):
        open_model(copy)
    assert open_model(copy, parts="draft").manifest.build_id == ids[0]


def test_draft_alone(copy: Path) -> None:
    (copy / "twobit-residual-00001-of-00001.safetensors").unlink()
    with pytest.raises(FormatError, match=r"missing twobit-residual-00001-of-00001\.safetensors"):
        open_model(copy)
    model = open_model(copy, parts="draft", check=True)
    assert model.planes and not any("residual" in name for name in model.planes)
    assert [*model.files] == ["twobit-draft-00001-of-00001.safetensors"]


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_truncated_shard_is_named(copy: Path, size: int) -> None:
    file = copy / "twobit-residual-00001-of-00001.safetensors"
    os.truncate(file, size if size >= 0 else file.stat().st_size + size)
    with pytest.raises(FormatError, match=file.name):
        open_model(copy)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_missing_json_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(FormatError, match=f"{name} is missing"):
        open_model(copy)


def test_paths_that_hold_no_model(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, what in (
        ("none", "no such folder"),
        ("file", "not a folder"),
        (".", "config.json is missing"),
        ("\0", "cannot"),
    ):
        with pytest.raises(FormatError, match=what):
            open_model(tmp_path / path)


@pytest.mark.parametrize(
    "target",
    ["../copy2/x.safetensors", "/etc/passwd", "a/../../x", "", "x\0y", ".", "twobit-draft-00001-of-00001.safetensors/",
     7, None, ["a"], "twobit-draft-00001-of-00002.safetensors", "twobit-residual-00001-of-00001.safetensors",
     "twobit-draft-00001-of-00001.safetensors\n", "twobit-draft-0000\u0661-of-00001.safetensors"],
)  # fmt: skip
def test_index_entries_are_plain_names_of_shards(copy: Path, target: object) -> None:
    def change(index: dict) -> None:
        index["weight_map"]["lm_head.row_a"] = target

    edit_json(copy / "model.safetensors.index.json", change)
    with pytest.raises(FormatError, match=r"index\.json"):
        open_model(copy)


def test_index_must_list_exactly_the_manifest(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    shard = "twobit-draft-00001-of-00001.safetensors"
    edit_json(index, lambda i: i["weight_map"].update({"evil.weight": shard}))
    with pytest.raises(FormatError, match=r"'evil\.weight' is no tensor"):
        open_model(copy)
    edit_json(index, lambda i: [i["weight_map"].pop(k) for k in ("evil.weight", "lm_head.row_a")])
    with pytest.raises(FormatError, match=r"lm_head\.row_a is missing"):
        open_model(copy)


def test_links_only_inside_a_hub_cache(built: Path, tmp_path: Path) -> None:
    repo = tmp_path / "hub Загрузки" / "models--a--b"
    snapshot = repo / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for number, file in enumerate(sorted(built.iterdir())):
        shutil.copy(file, repo / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert open_model(snapshot, check=True).manifest == open_model(built).manifest
    (tmp_path / "short").symlink_to(snapshot)
    assert open_model(tmp_path / "short").files == open_model(built).files
    shard = snapshot / "twobit-draft-00001-of-00001.safetensors"
    blob = shard.resolve()
    blob.rename(tmp_path / "moved")
    with pytest.raises(FormatError, match=f"{shard.name} is a link to a file that is not there"):
        open_model(snapshot)
    shard.unlink()
    shard.symlink_to(tmp_path / "moved")
    with pytest.raises(FormatError, match=f"{shard.name} is a link that leaves the model"):
        open_model(snapshot)


def test_a_link_in_an_ordinary_folder_is_refused(copy: Path, tmp_path: Path) -> None:
    (copy / "config.json").rename(tmp_path / "config.json")
    (copy / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(FormatError, match=r"config\.json is a link"):
        open_model(copy)


def test_special_files_are_refused(copy: Path) -> None:
    shard = copy / "twobit-draft-00001-of-00001.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(FormatError, match="not a regular file"):
        open_model(copy)


def patch_shard(folder: Path, part: str, name: str, at: int, data: bytes, rehash: bool) -> None:
    """Overwrites bytes of a stored tensor; rehash: makes manifest and build ids agree again."""
    for file in folder.glob(f"twobit-{part}-*.safetensors"):
        raw = bytearray(file.read_bytes())
        length = int.from_bytes(raw[:8], "little")
        begin, end = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
        raw[8 + length + begin + at : 8 + length + begin + at + len(data)] = data
        file.write_bytes(raw)
        digest = hashlib.sha256(raw[8 + length + begin : 8 + length + end]).hexdigest()
    if rehash:
        old = open_id(folder)
        tensor, plane = name.rsplit(".", 1)
        edit_json(
            folder / "config.json",
            lambda c: c["quantization_config"]["tensors"][tensor]["sha256"].update({plane: digest}),
            rehash=True,
        )
        for file in folder.glob("twobit-*.safetensors"):
            file.write_bytes(file.read_bytes().replace(old.encode(), open_id(folder).encode()))


def open_id(folder: Path) -> str:
    return json.loads((folder / "config.json").read_bytes())["quantization_config"]["build_id"]


def test_one_flipped_bit_is_found_by_check(copy: Path) -> None:
    patch_shard(copy, "residual", "model.layers.1.mlp.down_proj.residual_codes", 99, b"\x00\x01\x02\x03", False)
    open_model(copy)
    with pytest.raises(FormatError, match=r"model\.layers\.1\.mlp\.down_proj\.residual_codes is damaged"):
        open_model(copy, check=True)


@pytest.mark.parametrize(
    ("name", "at", "data", "message"),
    [
        ("lm_head.row_scale", 8, np.float32(np.nan).tobytes(), "lm_head: row 2 has scale nan"),
        ("lm_head.row_scale", 0, np.float32(-1).tobytes(), "lm_head: row 0 has scale -1"),
        ("lm_head.row_scale", 4 * 331, np.float32(1).tobytes(), "padding rows after row 330"),
        ("lm_head.row_a", 5, b"\xff", r"lm_head: row 5 may reach \|q\| = "),
        ("model.embed_tokens.embedding_scales", 6 * 4, np.float16(np.inf).tobytes(), "model.embed_tokens: row 4 has"),
    ],
)
def test_numbers_are_checked_even_if_hashes_agree(copy: Path, name: str, at: int, data: bytes, message: str) -> None:
    patch_shard(copy, "draft", name, at, data, True)
    with pytest.raises(FormatError, match=message):
        open_model(copy, check=True)


def test_a_norm_that_is_not_finite(copy: Path) -> None:
    patch_shard(copy, "draft", "model.norm.weight", 4, b"\x80\x7f", False)
    with pytest.raises(FormatError, match=r"model\.norm\.weight holds a value that is not finite"):
        open_model(copy).tensor("model.norm.weight")


def test_planes_must_be_aligned(copy: Path) -> None:
    """A valid safetensors file whose data starts off a multiple of 64 is refused, not copied."""
    file = copy / "twobit-residual-00001-of-00001.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    file.write_bytes((length + 8).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * 8 + raw[8 + length :])
    with safe_open(file, "numpy") as opened:
        assert opened.keys()
    with pytest.raises(FormatError, match="multiple of 64"):
        open_model(copy)


# -- the manifest as an enemy would write it ----------------------------------------------------------------

Q_PROJ = ("quantization_config", "tensors", "model.layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("quantization_config",), None, "not a twobit model"),
        (("quantization_config", "quant_method"), "gptq", "quantized by gptq"),
        (("quantization_config", "format_version"), 2, "format version 2"),
        (("quantization_config", "format_version"), True, "format version True"),
        (("quantization_config", "parameters"), -1, "parameters"),
        (("quantization_config", "parameters"), 1.0, "parameters"),
        (("quantization_config", "producer"), "\x1b[2J", "producer"),
        (("quantization_config", "family"), 5, "family"),
        (("quantization_config", "recipe"), [], "recipe"),
        (("quantization_config", "tensors"), {}, "no tensors"),
        (("quantization_config", "tensors", "../x"), {}, "not a module name"),
        (Q_PROJ, [], "not a JSON object"),
        ((*Q_PROJ, "kind"), "tree", "kind"),
        ((*Q_PROJ, "kind"), [], "kind"),
        ((*Q_PROJ, "shape"), [96], "shape"),
        ((*Q_PROJ, "shape"), [96, 0], "shape"),
        ((*Q_PROJ, "shape"), [-96, 96], "shape"),
        ((*Q_PROJ, "shape"), [96.0, 96], "shape"),
        ((*Q_PROJ, "shape"), [True, 96], "shape"),
        ((*Q_PROJ, "shape"), [2**31 - 1, 2**31 - 1], "too large"),
        ((*Q_PROJ, "shape"), [2**80, 1], "shape"),
        ((*Q_PROJ, "draft_bits"), 5, "draft_bits"),
        ((*Q_PROJ, "draft_bits"), "2", "draft_bits"),
        ((*Q_PROJ, "residual_bits"), 7, "residual_bits"),
        ((*Q_PROJ, "residual_group"), 64, "residual_group"),
        ((*Q_PROJ, "range"), "huge", "range"),
        ((*Q_PROJ, "draft_kind"), "trellis", "draft_kind"),
        ((*Q_PROJ, "residual_packing"), "split", "residual_packing"),
        ((*Q_PROJ, "leading_axis"), 8, "leading_axis"),
        ((*Q_PROJ, "experts"), 8, "unknown field experts"),
        ((*Q_PROJ, "sha256"), {}, "sha256"),
        ((*Q_PROJ, "sha256", "row_a"), "A" * 64, "sha256"),
        ((*Q_PROJ, "sha256", "row_a"), 3, "sha256"),
        (("quantization_config", "tensors", "model.norm.weight", "dtype"), "F64", "dtype"),
    ],
)
def test_manifest_fields_are_checked(built: Path, path: tuple[str, ...], value: object, message: str) -> None:
    config = json.loads((built / "config.json").read_bytes())
    at = config
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    if config["quantization_config"] is not None:
        config["quantization_config"]["build_id"] = compute_build_id(config["quantization_config"])
    with pytest.raises(FormatError, match=f"config.json: .*{re.escape(message)}") as caught:
        Manifest.from_config(config)
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


def test_other_versions_are_told_to_quantize_again(copy: Path) -> None:
    edit_json(copy / "config.json", lambda c: c["quantization_config"].update(format_version=2), rehash=True)
    with pytest.raises(FormatError, match="format version 2") as caught:
        open_model(copy)
    assert caught.value.hint == "quantize again with this version of twobit"


def test_an_edited_manifest_is_refused(copy: Path) -> None:
    edit_json(copy / "config.json", lambda c: c["quantization_config"]["recipe"].update(damping=0.2))
    with pytest.raises(FormatError, match="was changed after the build"):
        open_model(copy)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 10001.0},
        {"rope_theta": "10000.0"},
        {"attention_bias": True},
        {"model_type": "qwen2"},
        {"note": None},
    ],
)
def test_edited_settings_are_refused(copy: Path, change: dict) -> None:
    edit_json(copy / "config.json", lambda c: c.update(change))
    with pytest.raises(FormatError, match=r"config\.json: settings outside quantization_config were changed"):
        open_model(copy)


def test_settings_may_be_spelled_in_another_way(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_bytes())
    text = json.dumps(dict(reversed(config.items()))).replace("10000.0", "1e4")
    (copy / "config.json").write_text(text)
    open_model(copy, check=True)


def test_settings_belong_to_the_build(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIG, "rope_theta", 5e5)
    other = open_model(make(tmp_path / "other")).manifest
    assert other.build_id != open_model(built).manifest.build_id
    assert other.tensors == open_model(built).manifest.tensors


def test_shapes_of_the_manifest_must_fit_the_shards(copy: Path) -> None:
    old = open_id(copy)
    edit_json(
        copy / "config.json", lambda c: c["quantization_config"]["tensors"]["lm_head"].update(shape=[347, 96]), True
    )
    for file in copy.glob("twobit-*.safetensors"):
        file.write_bytes(file.read_bytes().replace(old.encode(), open_id(copy).encode()))
    with pytest.raises(FormatError, match=r"lm_head\.draft_codes is U8 \[\d+\], expected U8 \[\d+\]"):
        open_model(copy)


def test_two_tensors_cannot_share_a_stored_name(built: Path) -> None:
    config = json.loads((built / "config.json").read_bytes())
    q = config["quantization_config"]
    q["tensors"]["lm_head.row_a"] = q["tensors"]["model.norm.weight"]
    q["build_id"] = compute_build_id(q)
    with pytest.raises(FormatError, match=r"lm_head and lm_head\.row_a both store lm_head\.row_a"):
        Manifest.from_config(config)


def test_unknown_top_level_fields_are_kept_by_the_build_id(built: Path) -> None:
    config = json.loads((built / "config.json").read_bytes())
    config["quantization_config"]["later"] = {"x": 1}
    config["quantization_config"]["build_id"] = compute_build_id(config["quantization_config"])
    assert Manifest.from_config(config).tensors == open_model(built).manifest.tensors


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff{}", b'{"a": 1, "a": 2}', b'{"a": NaN}', b'{"a": 1e999}', b"[" * 100_000, b'{"a":' * 100_000,
     b'{"a": ' + b"9" * 5000 + b"}", b'{"a": Infinity}', b"{}}"],
)  # fmt: skip
def test_json_of_strangers(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"config\.json: not valid JSON"):
        parse_json(data, "config.json")


def test_canonical_json_is_one_spelling() -> None:
    assert canonical_json({"b": [1, 0.5], "a": "é"}) == b'{"a":"\\u00e9","b":[1,0.5]}'
    with pytest.raises(FormatError):
        canonical_json({"a": float("nan")})


def mutate(raw: bytes, rng: random.Random) -> bytes:
    """A few random edits: bit flips, cuts, doubled or swapped slices, hostile literals."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        other = rng.randrange(len(data) + 1)
        low, high = min(at, other), min(max(at, other), min(at, other) + 200)
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[low:high]
        elif kind == 2:
            data[at:at] = data[low:high]
        elif kind == 3:
            literals = (
                b"-1",
                b"null",
                b"{}",
                b"[]",
                b'""',
                b"1e400",
                b"18446744073709551615",
                b"true",
                b'"\\ud800"',
                b"[" * 2000,
            )
            data[at : at + rng.randrange(8)] = rng.choice(literals)
        elif kind == 4:
            numbers = list(re.finditer(rb"\d+", data))
            if numbers:
                match = rng.choice(numbers)
                data[match.start() : match.end()] = str(rng.choice((0, 1, 63, 2**31, 2**63, 2**64, 10**30))).encode()
        else:
            data[low:high] = rng.randbytes(high - low)
    return bytes(data)


@pytest.mark.parametrize("target", ["config.json", "model.safetensors.index.json", "draft", "residual", "length"])
def test_fuzz(copy: Path, target: str) -> None:
    """Whatever the bytes, opening ends in a model or in a FormatError."""
    rng = random.Random(f"twobit {target}")
    part = "draft" if target == "length" else target
    file = copy / (target if "json" in target else f"twobit-{part}-00001-of-00001.safetensors")
    raw = file.read_bytes()
    start = 0 if "json" in target else 8 + int.from_bytes(raw[:8], "little")
    opened = 0
    for _ in range(150):
        if target == "length":
            length = rng.choice((0, 1, 2**63, 2**64 - 1, len(raw), len(raw) - 7, rng.randrange(len(raw)), start - 8))
            new = length.to_bytes(8, "little") + raw[8:]
        elif start:
            header = mutate(raw[8:start], rng)
            new = len(header).to_bytes(8, "little") + header + raw[start:]
        else:
            value = mutate(raw, rng)
            new = value
            if target == "config.json" and rng.random() < 0.7:  # past the build id, to the fields behind it
                try:
                    config = parse_json(value, "config.json")
                    config["quantization_config"]["build_id"] = compute_build_id(config["quantization_config"])
                    new = json.dumps(config).encode()
                except (FormatError, TypeError, KeyError, AttributeError):
                    pass
        file.write_bytes(new)
        try:
            model = open_model(copy)
        except FormatError as error:
            assert len(str(error)) < 1000
        else:
            assert isinstance(model, PackedModel)
            opened += 1
    assert opened < 120
    file.write_bytes(raw)
    open_model(copy, check=True)


def test_memory_stays_small_while_assembling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes much larger than the copy buffer go through in pieces."""
    monkeypatch.setattr(writer, "_COPY_BYTES", 1 << 16)
    rows, cols = 2048, 2048
    planes = {name: np.zeros(n, np.uint8) for name, n in layout.plane_sizes(rows, cols, 2, 8, 16).items()}
    with ModelWriter(tmp_path / "model", FINGERPRINT) as made:
        made.store("a", {"x": PackedTensor.from_planes(planes, (rows, cols), 2, 8, 16, wide=True)})
        tracemalloc.start()
        made.finish(["a"], config={}, family="x", parameters=1, recipe={}, calibration={}, producer="x")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20 < sum(plane.size for plane in planes.values()) // 5
    assert len(open_model(tmp_path / "model", check=True).files) == 2
