"""What the reader refuses: damaged folders, and those that an enemy would write."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from packed_folders import CONFIG, edit_json, make
from safetensors import safe_open

from twobit.errors import FormatError
from twobit.format.manifest import Manifest, canonical_json, compute_build_id, parse_json
from twobit.format.reader import PackedModel, open_model


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("built") / "model")


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "copy"))


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
