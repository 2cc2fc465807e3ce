"""Write a twobit model: resumable while it is made, whole or not there at the end.

Everything is built in `<out>.partial`, beside the output:

    lock              held while a writer is open
    state.json        what is being made: source, options, calibration; a resumed run must be making the same
    work/<key>.bin    finished tensors of one step (a decoder layer, the head), planes at multiples of 64 bytes
    work/<key>.json   their entries, written last: a key is finished when this file exists
    spill/            scratch of the steps
    model/            the output; built by `finish`, then renamed to `<out>`

Bytes depend on the tensors and the arguments only: no times, no paths, no order of completion.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
from numpy.typing import NDArray

from twobit.errors import ConfigError, FormatError
from twobit.format import layout
from twobit.format.manifest import (
    MAX_CONFIG_BYTES,
    PARTS,
    PLAIN_BYTES,
    QUANT_METHOD,
    Json,
    Manifest,
    Stored,
    TensorEntry,
    canonical_json,
    config_digest,
    parse_json,
)

SHARD_BYTES = 5_000_000_000  # a file stays below this unless a single plane is larger
INDEX_NAME = "model.safetensors.index.json"
STAGING_SUFFIX = ".partial"
SPILL_NAME = "spill"
_COPY_BYTES = 8 << 20
_KEY = re.compile(r"[a-z0-9_-]{1,100}", re.ASCII)
# What a twobit folder may hold. Another file in a folder means that it is not ours to replace.
OUTPUT_NAME = re.compile(
    r"twobit-(draft|residual)-\d{5}-of-\d{5}\.safetensors|model\.safetensors\.index\.json|config\.json"
    r"|generation_config\.json|tokenizer[\w.-]*\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)"
    r"|merges\.txt|chat_template\.(jinja|json)|(pre)?processor_config\.json|README\.md|(?i:LICEN[SC]E|NOTICE)[\w.-]*"
    r"|USE_POLICY\.md|\.gitattributes",
    re.ASCII,
)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

U8 = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """One tensor ready to be stored: its entry (checksums still empty) and its bytes by plane."""

    entry: TensorEntry
    planes: Mapping[str, U8]

    @classmethod
    def matrix(cls, matrix: layout.Matrix, *, wide: bool, name: str = "matrix") -> PackedTensor:
        """Packs a quantized matrix. FormatError, naming `name`, on values out of bounds or out of the row range."""
        b, r = matrix.draft_bits, matrix.residual_bits
        try:
            planes = layout.pack(matrix)
        except FormatError as error:
            raise FormatError(f"{name}: {error}") from error
        layout.check_rows(name, matrix.row_scale, matrix.row_a, matrix.row_b, b, r, wide)
        return cls.from_planes(planes, matrix.shape, b, r, matrix.residual_group, wide=wide)

    @classmethod
    def from_planes(
        cls,
        planes: Mapping[str, U8],
        shape: tuple[int, int],
        draft_bits: int,
        residual_bits: int,
        residual_group: int,
        *,
        wide: bool,
    ) -> PackedTensor:
        """A matrix whose planes are packed already, e.g. by chunks of rows."""
        which = "wide" if wide else "narrow"
        return cls(TensorEntry("matrix", shape, {}, draft_bits, residual_bits, residual_group, which), planes)

    @classmethod
    def embedding(cls, weight: NDArray[np.float32]) -> PackedTensor:
        """An input embedding fp32 [vocab, hidden] as int8 with an fp16 scale per 32 columns."""
        return cls(TensorEntry("embedding", weight.shape, {}), layout.pack_embedding(weight))

    @classmethod
    def plain(cls, data: bytes | NDArray, dtype: str, shape: tuple[int, ...]) -> PackedTensor:
        """A small tensor as it came: little-endian bytes of safetensors dtype F32, F16 or BF16."""
        raw = np.frombuffer(data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes(), np.uint8)
        return cls(TensorEntry("plain", tuple(shape), {}, dtype=dtype), {"data": raw})


# -- paths and space ----------------------------------------------------------------------------------------


def staging_path(out: Path) -> Path:
    """Where `out` is built."""
    out = Path(os.path.abspath(out))
    if not out.name:
        raise FormatError(f"{out} exists", "choose another output folder")
    return out.with_name(out.name + STAGING_SUFFIX)


def check_output(source: Path, out: Path) -> None:
    """FormatError where writing `out` (or its staging folder) could touch `source`: equal, inside, or around it.

    Symbolic links are resolved, and existing folders are compared by identity, not by spelling.
    """
    real_source = Path(os.path.realpath(source))
    for path in (out, staging_path(out)):
        real = Path(os.path.realpath(path))
        if _same(real, real_source):
            raise FormatError(f"{out}: the output is the source folder", "choose another output folder")
        if any(_same(parent, real_source) for parent in real.parents):
            raise FormatError(f"{out}: the output lies inside the source folder", "choose another output folder")
        if any(_same(parent, real) for parent in real_source.parents):
            raise FormatError(f"{out}: the output contains the source folder", "choose another output folder")


def _same(a: Path, b: Path) -> bool:
    if a == b:
        return True
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def check_replaceable(out: Path) -> None:
    """FormatError unless `out` is a folder that holds a twobit model and nothing else."""
    hint = "choose another output folder, or remove this one yourself"
    if out.is_symlink() or not out.is_dir():
        raise FormatError(f"{out} exists and is not a folder", hint)
    try:
        with open(out / "config.json", "rb") as file:
            config = parse_json(file.read(MAX_CONFIG_BYTES), "config.json")
        ours = config["quantization_config"]["quant_method"] == QUANT_METHOD
    except (OSError, FormatError, TypeError, KeyError):
        ours = False
    if not ours:
        raise FormatError(f"{out} exists and is not a twobit model: it will not be replaced", hint)
    for entry in sorted(os.scandir(out), key=lambda e: e.name):
        if not OUTPUT_NAME.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
            raise FormatError(
                f"{out} also holds {entry.name}, no part of a twobit model: it will not be replaced", hint
            )


def required_bytes(model_bytes: int) -> int:
    """Free space that making a model of `model_bytes` takes at its peak: finished layers, and the shards."""
    return 2 * model_bytes + (64 << 20)


def check_space(out: Path, model_bytes: int, spill_bytes: int = 0, spill: Path | None = None) -> None:
    """FormatError where a disk has less free space than making `out` takes: `required_bytes` and scratch of
    `spill_bytes`, under `spill` or with the rest. What is there already counts."""
    staging = staging_path(out)
    place, scratch = _existing(staging), _existing(spill or staging)
    needs = {place: max(required_bytes(model_bytes) - _size(staging / "work"), 0)}
    if os.stat(scratch).st_dev == os.stat(place).st_dev:
        scratch = place
    needs[scratch] = needs.get(scratch, 0) + max(spill_bytes - _size(spill or staging / SPILL_NAME), 0)
    for folder, need in needs.items():
        if not os.access(folder, os.W_OK | os.X_OK) or os.statvfs(folder).f_blocks == 0:
            raise FormatError(f"{out}: {folder} cannot be written to", "choose another folder")
        if (free := shutil.disk_usage(folder).free) < need:
            raise FormatError(
                f"disk full: writing {out} takes {need / 1e9:.2f} GB in {folder}, {free / 1e9:.2f} GB are free",
                "free some space, or choose another disk with -o or --spill-dir",
            )


def _existing(path: Path) -> Path:
    """`path`, or the next folder above it that is there."""
    found = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
    if not found.is_dir():
        raise FormatError(f"{found} is in the way: it is not a folder", "remove it, or choose another folder")
    return found


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.glob("*") if p.is_file())


# -- files --------------------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns what the system says about a failed write into one line with a way on."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise FormatError(
                f"disk full: cannot write {path} ({error.strerror})",
                "free some space and run the same command again: finished layers are kept",
            ) from error
        raise FormatError(f"cannot write {error.filename or path}: {error.strerror or error}") from error


def _sync_dir(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that cannot sync folders
            raise
    finally:
        os.close(descriptor)


def write_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Creates `path` with what `write` writes, durably, and under its name only when it is complete."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_dir(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _write_bytes(path: Path, data: bytes) -> None:
    write_file(path, lambda file: file.write(data))


def _json_bytes(value: Json, file: str) -> bytes:
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{file} cannot be written: {error}") from error


def check_config(config: Mapping[str, Json], file: str) -> None:
    """ConfigError where the config.json of a source could not be that of a model, for `finish` says so too late."""
    hint = f"remove this setting from {file} or correct it: it is copied into the model"
    size = 0
    for key, value in config.items():
        try:
            text = _json_bytes({key: value}, file)
            parse_json(text, file)
        except FormatError as error:
            what = error.__cause__ or error
            raise ConfigError(
                f"{file}: {ascii(key)[1:-1][:60]}: cannot be written into a model: {what}", hint
            ) from error
        size += len(text)
    if size > MAX_CONFIG_BYTES // 2:  # the rest is for the manifest
        raise ConfigError(
            f"{file}: {size} bytes, more than the {MAX_CONFIG_BYTES // 2} that a model has room for", hint
        )


def _flatten(value: Json, prefix: str = "") -> dict[str, Json]:
    if isinstance(value, dict) and value:
        return {k: v for key, inner in value.items() for k, v in _flatten(inner, f"{prefix}{key}.").items()}
    return {prefix.rstrip("."): value}


@dataclass(frozen=True)
class _Piece:
    """One stored tensor on its way into a shard: `size` bytes at `offset` of `source`."""

    name: str
    stored: Stored
    checksum: str
    key: str
    offset: int


class ModelWriter:
    """Makes one model. Use as a context manager; `store` every key, in any order, then `finish`.

    out: the output folder; fingerprint: JSON of all that decides the bytes (source, options, calibration, producer);
    restart: discard what an earlier run left; overwrite: replace an existing twobit model at the end.
    FormatError where the output exists, another run is making it, or an earlier run was making something else.
    """

    def __init__(
        self,
        out: Path,
        fingerprint: Mapping[str, Json],
        *,
        restart: bool = False,
        overwrite: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.out = Path(os.path.abspath(out))
        self.staging = staging_path(self.out)
        self._work = self.staging / "work"
        self._model = self.staging / "model"
        self._replaced = self.staging / "replaced"
        self._shard_bytes = shard_bytes
        self._overwrite = overwrite
        self._lock: IO[bytes] | None = None
        self._check_out()
        state = {"twobit_state": 1, "fingerprint": dict(fingerprint)}
        self._open_staging(json.loads(canonical_json(state)), restart)

    def __enter__(self) -> ModelWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the staging folder; what is stored stays for the next run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def discard(self) -> None:
        """Removes the staging folder and all that is stored in it; last what says that it is ours."""
        for folder in (self._work, self._model, self._replaced, self.staging / SPILL_NAME, self.staging):
            shutil.rmtree(folder, ignore_errors=True)
        self.close()

    def _open_staging(self, state: dict[str, Json], restart: bool) -> None:
        file = self.staging / "state.json"
        if self.staging.is_symlink() or (os.path.lexists(self.staging) and not self.staging.is_dir()):
            raise FormatError(f"{self.staging} is in the way: it is not a folder", "remove it")
        with writing(self.staging):
            self.staging.mkdir(parents=True, exist_ok=True)
            foreign = {p.name for p in self.staging.iterdir()} - {"lock", "state.json", "state.json.tmp"}
            if file.exists():
                foreign -= {"work", "model", "replaced", SPILL_NAME}
            if foreign:
                raise FormatError(f"{self.staging} holds {min(foreign)}, which is not ours", "move it away")
            self._lock = _take_lock(self.staging)
        try:
            with writing(self.staging):
                self._restore()
                self._check_out()
                if restart:
                    for folder in (self._work, self._model, self._replaced, self.staging / SPILL_NAME):
                        if os.path.lexists(folder):
                            shutil.rmtree(folder)
                    file.unlink(missing_ok=True)
                elif file.exists():
                    self._compare(parse_json(file.read_bytes(), str(file)), state)
            if not file.exists():
                _write_bytes(file, _json_bytes(state, "state.json"))
            with writing(self.staging):
                self._work.mkdir(exist_ok=True)
        except BaseException:
            self.close()
            raise

    def _check_out(self) -> bool:
        """Whether the output exists; FormatError where it may not be replaced."""
        if not os.path.lexists(self.out):
            return False
        if not self._overwrite:
            raise FormatError(f"{self.out} exists", "choose another output folder, or pass --overwrite")
        check_replaceable(self.out)
        return True

    def _restore(self) -> None:
        """Puts back the old output where a run stopped between moving it aside and renaming the new one."""
        if self._replaced.exists() and not os.path.lexists(self.out):
            os.rename(self._replaced, self.out)

    def _compare(self, before: Json, now: dict[str, Json]) -> None:
        if not isinstance(before, dict) or before.get("twobit_state") != 1:
            raise FormatError(f"{self.staging} was left by another version", "pass --restart to begin again")
        a, b = _flatten(before.get("fingerprint", {})), _flatten(now["fingerprint"])
        different = [key for key in dict.fromkeys((*a, *b)) if a.get(key) != b.get(key)]
        if different:
            what = "; ".join(
                f"{key} was {json.dumps(a.get(key))}, is now {json.dumps(b.get(key))}" for key in different
            )
            raise FormatError(
                f"{self.staging} holds an unfinished run of something else: {what}",
                "give the same source and options to resume it, or pass --restart to discard it",
            )

    # -- steps --

    def store(self, key: str, tensors: Mapping[str, PackedTensor], notes: Json = None) -> None:
        """Stores the finished tensors of one step under `key` (lower-case letters, digits, - and _), atomically.

        notes: any JSON to find again after a resume. Safe to call from several threads with different keys.
        """
        if not _KEY.fullmatch(key):
            raise FormatError(f"{key!r} cannot be a key")
        entries, layout_of, pieces, at = {}, {}, [], 0
        for name, tensor in tensors.items():
            sums, offsets = {}, {}
            for stored in tensor.entry.stored(name).values():
                data = np.ascontiguousarray(tensor.planes[stored.plane])
                if data.dtype != np.uint8 or data.size != stored.bytes:
                    raise FormatError(f"{name}: {stored.plane} has {data.nbytes} bytes, expected {stored.bytes}")
                sums[stored.plane] = hashlib.sha256(data.data).hexdigest()
                offsets[stored.plane] = at
                pieces.append(data)
                at += layout.padded(data.size)
            entries[name] = replace(tensor.entry, checksums=sums).to_json()
            layout_of[name] = offsets

        def write(file: IO[bytes]) -> None:
            for data in pieces:
                file.write(data.data)
                file.write(bytes(-data.size % layout.ALIGN))

        record = {"entries": entries, "offsets": layout_of, "bytes": at, "notes": notes}
        text = _json_bytes(record, f"{key}.json")
        write_file(self._work / f"{key}.bin", write)
        _write_bytes(self._work / f"{key}.json", text)

    def has(self, key: str) -> bool:
        """Whether `key` is stored in full."""
        return self._record(key) is not None

    def notes(self, key: str) -> Json:
        """The notes stored with `key`."""
        return self._need(key)["notes"]

    def load(self, key: str) -> dict[str, PackedTensor]:
        """The tensors stored under `key`, their checksums verified; FormatError where one is damaged."""
        record = self._need(key)
        data = np.fromfile(self._work / f"{key}.bin", np.uint8)
        result = {}
        for name, entry in self._entries(record).items():
            planes = {}
            for stored in entry.stored(name).values():
                at = record["offsets"][name][stored.plane]
                plane = data[at : at + stored.bytes]
                if hashlib.sha256(plane.data).hexdigest() != entry.checksums[stored.plane]:
                    self._damaged(key, name)
                planes[stored.plane] = plane
            result[name] = PackedTensor(entry, planes)
        return result

    def _record(self, key: str) -> dict[str, Json] | None:
        try:
            record: dict[str, Json] = json.loads((self._work / f"{key}.json").read_bytes())
            complete = (self._work / f"{key}.bin").stat().st_size == record["bytes"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record if complete else None

    def _need(self, key: str) -> dict[str, Json]:
        record = self._record(key)
        if record is None:
            raise FormatError(f"{self._work / key} is not stored")
        return record

    def _entries(self, record: dict[str, Json]) -> dict[str, TensorEntry]:
        fields = ("draft_bits", "residual_bits", "residual_group", "range", "dtype")
        return {
            name: TensorEntry(e["kind"], tuple(e["shape"]), e["sha256"], **{f: e[f] for f in fields if f in e})
            for name, e in record["entries"].items()
        }

    def _damaged(self, key: str, name: str) -> None:
        (self._work / f"{key}.json").unlink(missing_ok=True)
        raise FormatError(
            f"{self._work / key}.bin: the stored bytes of {name} were damaged on disk",
            "run the same command again: only this part is made anew",
        )

    # -- the end --

    def finish(
        self,
        keys: Sequence[str],
        *,
        config: Mapping[str, Json],
        family: str,
        parameters: int,
        recipe: Mapping[str, Json],
        calibration: Mapping[str, Json],
        producer: str,
        files: Mapping[str, bytes | Path] | None = None,
    ) -> Manifest:
        """Assembles the model from `keys`, in this order (the order of the model), and renames it to the output.

        config: the source's config.json; files: tokenizer files and the like, by name. Memory stays at a few MB
        whatever the size. Returns the manifest. On failure nothing is under the output's name and all keys are kept.
        """
        files = dict(files or {})
        for name in files:
            if not OUTPUT_NAME.fullmatch(name) or name in ("config.json", INDEX_NAME) or name.startswith("twobit-"):
                raise FormatError(f"{name} cannot be put into a twobit model")
        records = {key: self._need(key) for key in keys}
        entries: dict[str, TensorEntry] = {}
        pieces: list[_Piece] = []
        for key, record in records.items():
            for name, entry in self._entries(record).items():
                if name in entries:
                    raise FormatError(f"{name} is stored twice, the second time under {key}")
                entries[name] = entry
                for full, stored in entry.stored(name).items():
                    offset = record["offsets"][name][stored.plane]
                    pieces.append(_Piece(full, stored, entry.checksums[stored.plane], key, offset))
        manifest = Manifest(
            family,
            parameters,
            entries,
            dict(recipe),
            dict(calibration),
            producer,
            config_sha256=config_digest(config),
        )
        final_config = {**config, "quantization_config": manifest.to_json()}
        text = _json_bytes(final_config, "config.json")
        manifest = Manifest.from_config(parse_json(text, "config.json"))  # never write what no reader would take
        if os.path.lexists(self._model):
            shutil.rmtree(self._model)
        try:
            with writing(self._model):
                self._model.mkdir()
            self._assemble(pieces, manifest, text, files)
        except BaseException:
            shutil.rmtree(self._model, ignore_errors=True)
            raise
        self._publish()
        return manifest

    def _assemble(
        self, pieces: list[_Piece], manifest: Manifest, config: bytes, files: Mapping[str, bytes | Path]
    ) -> None:
        weight_map: dict[str, str] = {}
        for part in PARTS:
            shards = self._split([p for p in pieces if p.stored.part == part])
            for number, shard in enumerate(shards, 1):
                name = f"twobit-{part}-{number:05d}-of-{len(shards):05d}.safetensors"
                header = shard_header(
                    {p.name: p.stored for p in shard},
                    {"build_id": manifest.build_id, "format_version": str(manifest.version), "part": part},
                )
                self._write_shard(self._model / name, header, shard)
                weight_map |= {p.name: name for p in shard}
        for name, content in files.items():
            if isinstance(content, bytes):
                _write_bytes(self._model / name, content)
            else:
                write_file(self._model / name, partial(_copy_in, content=content))
        index = {
            "metadata": {"build_id": manifest.build_id, "total_size": sum(p.stored.bytes for p in pieces)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        _write_bytes(self._model / INDEX_NAME, _json_bytes(index, INDEX_NAME))
        _write_bytes(self._model / "config.json", config)

    def _split(self, pieces: list[_Piece]) -> list[list[_Piece]]:
        """Files of at most shard_bytes, each in file order: planes first, then small tensors, the widest type first."""
        planes = [p for p in pieces if p.stored.dtype == "U8"]
        small = sorted((p for p in pieces if p.stored.dtype != "U8"), key=lambda p: -PLAIN_BYTES[p.stored.dtype])
        shards: list[list[_Piece]] = [[]]
        size = 0
        for piece in (*planes, *small):
            cost = piece.stored.bytes + len(piece.name) + 160  # with room for its header entry
            if shards[-1] and size + cost > self._shard_bytes - 1024:
                shards.append([])
                size = 0
            shards[-1].append(piece)
            size += cost
        return shards

    def _write_shard(self, path: Path, header: bytes, shard: list[_Piece]) -> None:
        def write(file: IO[bytes]) -> None:
            file.write(header)
            for piece in shard:
                digest = hashlib.sha256()
                with open(self._work / f"{piece.key}.bin", "rb") as source:
                    source.seek(piece.offset)
                    left = piece.stored.bytes
                    while left:
                        data = source.read(min(left, _COPY_BYTES))
                        if not data:
                            self._damaged(piece.key, piece.name)
                        digest.update(data)
                        file.write(data)
                        left -= len(data)
                if digest.hexdigest() != piece.checksum:
                    self._damaged(piece.key, piece.name)

        write_file(path, write)

    def _publish(self) -> None:
        """Renames the finished folder to the output; an old output is moved aside first and removed last."""
        with writing(self.out):
            if self._check_out():
                shutil.rmtree(self._replaced, ignore_errors=True)
                os.rename(self.out, self._replaced)
            try:
                os.rename(self._model, self.out)
            except OSError:
                self._restore()
                raise
            _sync_dir(self.out.parent)
        self.discard()


def shard_header(tensors: Mapping[str, Stored], metadata: Mapping[str, str]) -> bytes:
    """Length and header of a safetensors file whose tensors lie one after another, in this order.

    Padded with spaces so that the data starts at a multiple of 64 bytes; then so does every plane.
    """
    header: dict[str, Json] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, stored in tensors.items():
        end = at + stored.bytes
        header[name] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    text += b" " * (-(8 + len(text)) % layout.ALIGN)
    return len(text).to_bytes(8, "little") + text


def _copy_in(file: IO[bytes], content: Path) -> None:
    try:
        source = open(content, "rb")  # noqa: SIM115 - closed below
    except OSError as error:
        raise FormatError(f"cannot read {content}: {error.strerror}") from error
    with source:
        shutil.copyfileobj(source, file, _COPY_BYTES)


def _take_lock(staging: Path) -> IO[bytes]:
    file = open(staging / "lock", "ab")  # noqa: SIM115 - held until close
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):  # others: a file system without locks
            file.close()
            raise FormatError(f"{staging} is in use by another run", "wait for it, or stop it") from error
    return file
