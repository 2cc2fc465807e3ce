"""Open a twobit model: everything checked that the runtime relies on, then mapped read-only.

The folder may come from a stranger or from half a download. Nothing outside it is opened (links only as the Hub's
cache makes them), every length is compared with the manifest before a byte is used, and every shard must carry the
build id of config.json. What can go wrong ends in a FormatError that names the file or the tensor.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from twobit.errors import FormatError
from twobit.format import layout
from twobit.format.manifest import (
    DRAFT,
    MAX_CONFIG_BYTES,
    PARTS,
    Json,
    Manifest,
    Stored,
    TensorEntry,
    parse_json,
)
from twobit.format.safetensors_file import Header, map_file, read_header
from twobit.format.writer import INDEX_NAME, STAGING_SUFFIX

U8 = NDArray[np.uint8]
_SHARD = re.compile(r"twobit-(draft|residual)-(\d{5})-of-(\d{5})\.safetensors", re.ASCII)
_SHARED_BLOB = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SHARED_MARKER = ".huggingface-shared-blobs"
CONFIG_NAME = "config.json"
_DOWNLOAD = "the download is incomplete or damaged: download the model again"
_NO_MODEL = "give the folder of a model that `twobit quantize` made; if it is one from the Hub, download it again"


@dataclass(frozen=True, eq=False)
class PackedModel:
    """An open model. Arrays are views of read-only mappings that live as long as the arrays do.

    path: the folder; config: config.json; planes: stored name ("<tensor>.<plane>") -> u8 vector at a 64-byte aligned
    address; plain: small tensors as stored u8; files: the shard files that are mapped, with their sizes in bytes.
    """

    path: Path
    config: dict[str, Json]
    manifest: Manifest
    planes: Mapping[str, U8]
    plain: Mapping[str, U8]
    files: Mapping[str, int]

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A small tensor as fp32 in its shape; FormatError where it is absent or not finite."""
        entry = self._entry(name, "plain")
        raw = self.plain[name]
        if entry.dtype == "BF16":
            values = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = raw.view("<f2" if entry.dtype == "F16" else "<f4").astype(np.float32)
        if not np.isfinite(values).all():
            raise FormatError(f"{self.path}: {name} holds a value that is not finite", _DOWNLOAD)
        return values.reshape(entry.shape)

    def matrix(self, name: str, row_range: tuple[int, int] | None = None) -> layout.Matrix:
        """The unpacked integers of a matrix, or of some of its rows; needs both parts."""
        return layout.unpack(self.planes_of(name, "matrix"), *self._entry(name, "matrix").layout_args, row_range)

    def embedding(self, name: str) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
        """(codes [rows, cols], scales [rows, ceil(cols / 32)]) of an input embedding."""
        rows, cols = self._entry(name, "embedding").shape
        return layout.unpack_embedding(self.planes_of(name, "embedding"), rows, cols)

    def planes_of(self, name: str, kind: str) -> dict[str, U8]:
        """The open planes of one matrix or embedding, by plane."""
        stored = self._entry(name, kind).stored(name)
        return {s.plane: self.planes[key] for key, s in stored.items() if key in self.planes}

    def _entry(self, name: str, kind: str) -> TensorEntry:
        entry = self.manifest.tensors.get(name)
        if entry is None or entry.kind != kind:
            raise FormatError(f"{self.path}: there is no {kind} tensor {name}")
        return entry


def open_model(path: Path, *, check: bool = False, parts: Literal["all", "draft"] = "all") -> PackedModel:
    """Opens and validates the model folder `path`.

    check: verify every checksum too (reads all bytes). parts: "draft" opens the draft shard alone; the residual shard
    need not be there. Raises FormatError, naming what is missing or wrong.
    """
    path = Path(path)
    folder = _folder(path)
    config, manifest = read_config(folder)
    stored = manifest.stored()
    planes: dict[str, U8] = {}
    plain: dict[str, U8] = {}
    files: dict[str, int] = {}
    by_file = _shards(folder, manifest, parts)
    if missing := [file for file in by_file if not os.path.lexists(folder / file)]:
        raise FormatError(f"{folder}: missing {', '.join(missing)}", _DOWNLOAD)
    for file, names in by_file.items():
        real = _inside(folder, file)
        header = read_header(real)
        _check_header(file, header, manifest, {name: stored[name][1] for name in names})
        mapped = map_file(real, header)
        files[file] = header.size
        for name in names:
            info = header.tensors[name]
            data: U8 = mapped[header.data_start + info.begin : header.data_start + info.end]
            (plain if info.dtype != "U8" else planes)[name] = np.asarray(data)
    model = PackedModel(path, config, manifest, planes, plain, files)
    _check_numbers(model)
    if check:
        verify_checksums(model)
    return model


def read_config(folder: Path) -> tuple[dict[str, Json], Manifest]:
    """config.json of a model folder, and the manifest in it."""
    config = parse_json(_read(folder, CONFIG_NAME), CONFIG_NAME)
    return config, Manifest.from_config(config)


def shard_files(folder: Path, parts: Literal["all", "draft"] = "all") -> dict[str, list[str]]:
    """Shard file -> the stored tensors in it, as config.json and the index say; the shards need not be there."""
    return _shards(folder, read_config(folder)[1], parts)


def check_headers(folder: Path, header_of: Callable[[str], Header]) -> tuple[Manifest, dict[str, int]]:
    """The manifest and the shards' sizes in bytes of a model whose shards are elsewhere: `folder` holds config.json and
    the index, `header_of` gives a shard's header. FormatError where they do not belong together."""
    _, manifest = read_config(folder)
    stored = manifest.stored()
    files: dict[str, int] = {}
    for file, names in _shards(folder, manifest, "all").items():
        header = header_of(file)
        _check_header(file, header, manifest, {name: stored[name][1] for name in names})
        files[file] = header.size
    return manifest, files


def verify_checksums(
    model: PackedModel, names: Iterable[str] | None = None, advance: Callable[[int], None] = lambda done: None
) -> None:
    """FormatError naming the first stored tensor whose bytes are not those that the manifest was made of.

    names: stored tensors to look at, all open ones if not given; `advance` gets the bytes done since its last call.
    """
    stored = model.manifest.stored()
    for name in stored if names is None else names:
        data = model.planes.get(name, model.plain.get(name))
        if data is None:
            continue
        tensor, one = stored[name]
        if hashlib.sha256(data.data).hexdigest() != model.manifest.tensors[tensor].checksums[one.plane]:
            raise FormatError(f"{model.path}: {name} is damaged: its checksum differs from config.json's", _DOWNLOAD)
        advance(data.nbytes)


def model_file(folder: Path, name: str) -> Path:
    """The real path of a file of the model folder; FormatError where it is absent, or a link that leaves the model."""
    return _inside(_folder(folder), name)


# -- files --------------------------------------------------------------------------------------------------


def _folder(path: Path) -> Path:
    """The model folder with links resolved; refuses what is not one, or one that is still being made."""
    try:
        real = Path(os.path.realpath(path))
        is_dir = real.is_dir()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise FormatError(f"{str(path)!r} cannot be opened: {getattr(error, 'strerror', None) or error}") from error
    if not is_dir:
        raise FormatError(f"{path}: no such folder" if not real.exists() else f"{path}: not a folder")
    if any(p.name.endswith(STAGING_SUFFIX) and (p / "state.json").exists() for p in (real, real.parent)):
        raise FormatError(f"{path}: an unfinished model", "run the same `twobit quantize` again to finish it")
    return real


def _inside(folder: Path, name: str) -> Path:
    """The real path of a file of the model. Only plain files, or links as the Hub's cache makes them:
    snapshots/<revision>/<name> -> blobs/<hash> of the same repository, which may be a link to a blob that the cache's
    repositories share."""
    file = folder / name
    if not os.path.lexists(file):
        raise FormatError(f"{folder}: {name} is missing", _NO_MODEL if name == CONFIG_NAME else _DOWNLOAD)
    real = Path(os.path.realpath(file))
    if file.is_symlink():
        repo = folder.parent.parent
        if folder.parent.name != "snapshots" or not is_blob(real, repo):
            raise FormatError(f"{folder}: {name} is a link that leaves the model", "copy the file itself")
        if not real.exists():
            raise FormatError(f"{folder}: {name} is a link to a file that is not there", _DOWNLOAD)
    if not stat.S_ISREG(os.stat(real).st_mode):
        raise FormatError(f"{folder}: {name} is not a regular file", _DOWNLOAD)
    return real


def is_blob(real: Path, repository: Path) -> bool:
    """Whether `real`, all links resolved, is where a Hub cache keeps the files of `repository`: its own blobs, or those
    that repositories share (huggingface_hub 2: blobs/<first two digits>/<hash>, in a folder marked as such)."""
    if real.parent == repository / "blobs":
        return True
    shared = repository.parent / "blobs"
    return (
        _SHARED_BLOB.fullmatch(real.name) is not None
        and real.parent == shared / real.name[:2]
        and (shared / _SHARED_MARKER).is_file()
    )


def _read(folder: Path, name: str) -> bytes:
    try:
        with open(_inside(folder, name), "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise FormatError(f"{folder}: cannot read {name}: {error.strerror}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise FormatError(f"{folder}: {name} is larger than {MAX_CONFIG_BYTES} bytes")
    return data


def _shards(folder: Path, manifest: Manifest, which: Literal["all", "draft"]) -> dict[str, list[str]]:
    """Shard file -> the stored tensors that it must hold, from the index."""
    index = parse_json(_read(folder, INDEX_NAME), INDEX_NAME)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError(f"{INDEX_NAME}: no weight_map", _DOWNLOAD)
    counts: dict[str, set[int]] = {part: set() for part in PARTS}
    numbers: dict[str, set[int]] = {part: set() for part in PARTS}
    stored = manifest.stored()
    for name, file in weight_map.items():
        match = _SHARD.fullmatch(file) if isinstance(file, str) else None
        if match is None:
            raise FormatError(
                f"{INDEX_NAME}: {ascii(name)[:120]} is in {ascii(file)[:120]}, no shard's name", _DOWNLOAD
            )
        if name not in stored:
            raise FormatError(f"{INDEX_NAME}: {ascii(name)[:120]} is no tensor of config.json", _DOWNLOAD)
        part = match[1]
        if part != stored[name][1].part:
            raise FormatError(f"{INDEX_NAME}: {name} is in {file}, but belongs to the {stored[name][1].part} part")
        numbers[part].add(int(match[2]))
        counts[part].add(int(match[3]))
    if absent := next((name for name in stored if name not in weight_map), None):
        raise FormatError(f"{INDEX_NAME}: {absent} is missing", _DOWNLOAD)
    for part in PARTS:
        total = len(numbers[part])
        if numbers[part] != set(range(1, total + 1)) or counts[part] - {total}:
            raise FormatError(f"{INDEX_NAME}: the {part} files are not numbered 1 to {total} of {total}", _DOWNLOAD)
    files: dict[str, list[str]] = {}
    for name, (_, one) in stored.items():
        if which == "all" or one.part == DRAFT:
            files.setdefault(weight_map[name], []).append(name)
    return dict(sorted(files.items()))


def _check_header(file: str, header: Header, manifest: Manifest, expected: Mapping[str, Stored]) -> None:
    build_id, part = header.metadata.get("build_id"), header.metadata.get("part")
    if build_id != manifest.build_id:
        raise FormatError(
            f"{file}: belongs to another build: {ascii(build_id)[:80]}, config.json is of {manifest.build_id}",
            "draft, residual and config.json must come from one `twobit quantize` run",
        )
    if any(stored.part != part for stored in expected.values()):
        raise FormatError(f"{file}: says that it is part {ascii(part)[:80]}", _DOWNLOAD)
    if header.tensors.keys() != expected.keys():
        odd = min(header.tensors.keys() ^ expected.keys())
        what = "holds" if odd in header.tensors else "lacks"
        raise FormatError(f"{file}: {what} {ascii(odd)[:120]}, which the index says otherwise", _DOWNLOAD)
    for name, stored in expected.items():
        info = header.tensors[name]
        if (info.dtype, info.shape) != (stored.dtype, stored.shape):
            raise FormatError(
                f"{file}: {name} is {info.dtype} {ascii(list(info.shape))[:80]}, "
                f"expected {stored.dtype} {list(stored.shape)}",
                _DOWNLOAD,
            )
        if stored.dtype == "U8" and (header.data_start + info.begin) % layout.ALIGN:
            raise FormatError(f"{file}: {name} does not start at a multiple of {layout.ALIGN} bytes", _DOWNLOAD)


# -- numbers ------------------------------------------------------------------------------------------------


def _matrices(manifest: Manifest) -> Iterator[tuple[str, TensorEntry]]:
    return ((name, entry) for name, entry in manifest.tensors.items() if entry.kind == "matrix")


def _check_numbers(model: PackedModel) -> None:
    """Row scales finite, every row inside its integer range, padding rows zero, embedding scales finite."""
    for name, entry in _matrices(model.manifest):
        rows = entry.shape[0]
        padded_rows = layout.ceil_div(rows, layout.ROWS) * layout.ROWS
        u = model.planes[f"{name}.row_scale"].view("<f4")[:padded_rows]
        a = model.planes[f"{name}.row_a"][:padded_rows]
        b = model.planes[f"{name}.row_b"].view(np.int8)[:padded_rows]
        layout.check_rows(name, u, a, b, entry.draft_bits, entry.residual_bits, entry.wide)
        if u[rows:].any() or a[rows:].any() or b[rows:].any():
            raise FormatError(f"{model.path}: {name}: the padding rows after row {rows - 1} are not zero", _DOWNLOAD)
    for name, entry in model.manifest.tensors.items():
        if entry.kind == "embedding":
            _, scales = model.embedding(name)
            if not np.isfinite(scales).all():
                row = int((~np.isfinite(scales)).any(axis=1).argmax())
                raise FormatError(f"{model.path}: {name}: row {row} has a scale that is not finite", _DOWNLOAD)
