"""The source checkpoint: a Hugging Face folder, checked before any work starts, then read one tensor at a time.

Everything in the folder is a stranger's. Shard names must be plain file names, links may not lead out of the folder
(or of its Hub cache repository), nothing is unpickled and no code that comes with the model is run.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twobit.architecture import Architecture, TensorSpec
from twobit.errors import CheckpointError, ConfigError, TwobitError
from twobit.format.reader import is_blob
from twobit.format.safetensors_file import Header, TensorInfo, read_header

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

FULL_PRECISION = "give the original full-precision checkpoint (bf16, fp16 or fp32)"
DOWNLOAD_AGAIN = "the download is incomplete: run `hf download` again"
CONVERT = (
    'if you trust its author, convert it first: python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('SOURCE').save_pretrained('CONVERTED')\""
)

_MAX_JSON = 128 << 20  # bytes; the largest in use, tokenizer.json of Gemma, has 33 MB
_CHUNK = 1 << 19  # bytes read at a time; hashed, checked and widened while they are in the cache
_ITEM_SIZE = {"BF16": 2, "F16": 2, "F32": 4}
# Exponent bits: all set means infinity or NaN.
_EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# The parts that quantized formats store a matrix in (GPTQ, AWQ, compressed-tensors, fp8, bitsandbytes).
_QUANTIZED_PART = re.compile(
    r"\.(qweight|qzeros|g_idx|weight_packed|weight_scale|weight_scale_inv|weight_zero_point|weight_format|SCB)$"
    r"|\.weight\.(absmax|quant_map|quant_state\..+|nested_absmax|nested_quant_map)$"
)
_SHARD_NAME = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})\.safetensors")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


@dataclass(frozen=True)
class _Place:
    """Where a source tensor lies."""

    shard: str
    info: TensorInfo


@dataclass
class Checkpoint:
    """A checked source checkpoint; make one with `Checkpoint.open`.

    `tensors` is what the model needs, in model order. `notes` are lines for the user on what was left out or decided,
    `warnings` on what deserves a look; nothing is printed. `extras` are the names in the files that the model does not
    use.
    """

    folder: Path
    config: dict[str, Any]
    architecture: Architecture
    tensors: tuple[TensorSpec, ...] = ()
    shards: dict[str, Header] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    extras: list[str] = field(default_factory=list)
    _places: dict[str, _Place] = field(default_factory=dict)
    _sources: dict[str, str] = field(default_factory=dict)  # canonical name -> name in the files
    _paths: dict[str, Path] = field(default_factory=dict)
    _fingerprint: str | None = None
    _seen: dict[str, tuple[int, int, int]] = field(default_factory=dict)  # how the shards were when that was taken

    @classmethod
    def open(cls, path: str | os.PathLike[str], architecture: Architecture | None = None) -> Checkpoint:
        """Open a folder in Hugging Face layout and check everything that can be checked without reading the weights.

        That is: config.json, the family, that all shards are there and whole, that every tensor the model needs is
        there once, in bf16, fp16 or fp32 and in the right shape. NaN and infinity are found when a tensor is read, or
        by `fingerprint`.

        Raises ConfigError, CheckpointError or FormatError, with a line that names the file or tensor.
        """
        folder = _folder(path)
        config = _read_json(folder, CONFIG, ConfigError)
        quantization = config.get("quantization_config")
        if isinstance(quantization, dict) and quantization.get("quant_method") == "twobit":
            raise CheckpointError(f"{folder}: already quantized: a twobit model", FULL_PRECISION)
        if architecture is None:
            architecture = Architecture.from_config(config, str(folder / CONFIG))
        self = cls(folder, config, architecture)
        if config.get("auto_map") or config.get("trust_remote_code"):
            self.notes.append(
                f"{CONFIG} names Python code (auto_map), which is not run: {architecture.family} is built in"
            )
        self._open_shards()
        self._resolve()
        return self

    # Checks

    def _open_shards(self) -> None:
        """Read the headers of all shards, and refuse sets of files that are not exactly one whole checkpoint."""
        names, weight_map = self._shard_names()
        self._paths = {name: _plain_path(self.folder, name) for name in names}
        for name, path in self._paths.items():
            header = self.shards[name] = read_header(path)
            for tensor, info in header.tensors.items():
                if tensor in self._places:
                    raise CheckpointError(
                        f"tensor {_shown(tensor)} is in two shards: {self._places[tensor].shard} and {name}",
                        "the folder holds a mixture of two checkpoints: download it again into an empty folder",
                    )
                self._places[tensor] = _Place(name, info)
        if weight_map is None:
            return
        for tensor, shard in weight_map.items():
            place = self._places.get(tensor)
            if place is None or place.shard != shard:
                where = f"it is in {place.shard}" if place else "no shard has it"
                raise CheckpointError(
                    f"{INDEX} describes another build: it says that tensor {_shown(tensor)} is in {shard}, but {where}",
                    "index and shards do not belong together: download the checkpoint again into an empty folder",
                )
        unlisted = [tensor for tensor in self._places if tensor not in weight_map]
        if unlisted:
            self.warnings.append(f"{INDEX} does not list {_listed(unlisted)}")

    def _shard_names(self) -> tuple[list[str], dict[str, str] | None]:
        """The names of the files to read, and the index's map of tensors to files where it is to be believed."""
        present = self._weight_files()
        weight_map = self._read_index()
        if weight_map is None:
            return self._names_without_index(present), None
        named = sorted(set(weight_map.values()))
        missing = [name for name in named if not os.path.lexists(self.folder / name)]
        if missing:
            if len(missing) == len(named) and (names := _whole_set(present)):
                self.warnings.append(
                    f"{INDEX} describes another build (none of its {len(named)} files is here); "
                    f"it is ignored and {_listed(names)} read instead"
                )
                return names, None
            if present and len(missing) == len(named):
                raise CheckpointError(
                    f"{self.folder}: {INDEX} describes another build: missing all of its {len(named)} files "
                    f"({_listed(missing)}); what is here ({_listed(present)}) is no whole set",
                    DOWNLOAD_AGAIN,
                )
            raise CheckpointError(f"{self.folder}: missing {_listed(missing)}, which {INDEX} names", DOWNLOAD_AGAIN)
        unnamed = [name for name in present if name not in named]
        if SINGLE in unnamed:
            raise CheckpointError(
                f"{self.folder}: two sets of weights: {SINGLE} and the {len(named)} files that {INDEX} names",
                "remove the one that is not wanted",
            )
        if unnamed:
            self.warnings.append(f"left out {_listed(unnamed)}: {INDEX} does not name them")
        return named, weight_map

    def _names_without_index(self, present: list[str]) -> list[str]:
        if names := _whole_set(present):
            if names != [SINGLE]:
                self.notes.append(f"no {INDEX}: read {len(names)} shards by their names")
            elif len(present) > 1:
                others = [name for name in present if name != SINGLE]
                self.warnings.append(f"left out {_listed(others)}: {SINGLE} alone is the model")
            return names
        if present:
            missing = _missing_shards(present)
            if missing:
                raise CheckpointError(f"{self.folder}: missing {_listed(missing)}", DOWNLOAD_AGAIN)
            raise CheckpointError(
                f"{self.folder}: no {SINGLE} and no {INDEX}; found {_listed(present)}",
                f"name a single file {SINGLE}; shards need the index",
            )
        self._refuse_without_safetensors()
        return []

    def _weight_files(self) -> list[str]:
        """Names of the safetensors files that may be shards, links included."""
        try:
            found = sorted(entry for entry in os.listdir(self.folder) if entry.endswith(".safetensors"))
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be read: {error.strerror}") from error
        # Mistral ships its weights a second time, under names of its own; adapters are not the model.
        other = [name for name in found if name.startswith(("consolidated", "adapter_"))]
        if other and len(other) < len(found):
            self.notes.append(f"left out {_listed(other)}: not part of the model")
            return [name for name in found if name not in other]
        return found

    def _refuse_without_safetensors(self) -> None:
        files = sorted(os.listdir(self.folder))
        pickles = [name for name in files if name.endswith(_PICKLES) and "training_args" not in name]
        pickles += [name for name in files if name.endswith(".bin.index.json")]
        if pickles:
            raise CheckpointError(
                f"{self.folder}: only pickled weights ({_listed(pickles)}), which can run code and are never opened",
                CONVERT,
            )
        if ggufs := [name for name in files if name.lower().endswith(".gguf")]:
            raise CheckpointError(
                f"{self.folder}: holds GGUF ({_listed(ggufs)}), which is already quantized", FULL_PRECISION
            )
        raise CheckpointError(f"{self.folder}: no weights: neither {SINGLE} nor {INDEX}", DOWNLOAD_AGAIN)

    def _read_index(self) -> dict[str, str] | None:
        if not os.path.lexists(self.folder / INDEX):
            return None
        file = self.folder / INDEX
        weight_map = _read_json(self.folder, INDEX, CheckpointError).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{file}: no weight_map", DOWNLOAD_AGAIN)
        for tensor, name in weight_map.items():
            if not _is_plain_name(name) or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{file}: weight_map sends tensor {_shown(tensor)} to {_shown(name)}, "
                    "which is no plain name of a safetensors file",
                    "the index is damaged or hostile: get the checkpoint from a source you trust",
                )
        return weight_map

    def _resolve(self) -> None:
        """Find every tensor of the model in the files, check dtypes and shapes, and account for the rest."""
        if parts := [name for name in self._places if _QUANTIZED_PART.search(name)]:
            raise CheckpointError(f"{self.folder}: already quantized: it holds {_listed(parts, 3)}", FULL_PRECISION)
        self.tensors = self.architecture.tensors(self._places)
        self._sources = {spec.name: spec.source for spec in self.tensors}
        if missing := [spec for spec in self.tensors if spec.source not in self._places]:
            self._refuse_missing(missing)
        for spec in self.tensors:
            rows = spec.shape[:1] if spec.source_rows is None else (spec.source_rows,)
            self._check_tensor(spec.source, (*rows, *spec.shape[1:]))
        used = set(self._sources.values())
        self._account_for([name for name in self._places if name not in used])

    def _refuse_missing(self, missing: list[TensorSpec]) -> None:
        names = list(dict.fromkeys(spec.source for spec in missing))
        if [spec.role for spec in missing] == ["head"] and not self.architecture.tied:
            raise CheckpointError(
                f"{self.folder}: no tensor {_shown(names[0])}, but config.json has the head apart from the embedding "
                "(tie_word_embeddings is false)",
                "the checkpoint is incomplete, or config.json should say tie_word_embeddings: true",
            )
        raise CheckpointError(f"{self.folder}: missing tensor{'s' * (len(names) > 1)} {_listed(names)}", DOWNLOAD_AGAIN)

    def _check_tensor(self, name: str, expected: tuple[int, ...]) -> None:
        place = self._places[name]
        if place.info.dtype not in _ITEM_SIZE:
            kind = place.info.dtype
            if kind == "F64":
                raise CheckpointError(
                    f"{place.shard}: tensor {_shown(name)} is F64, which is not supported",
                    "convert the checkpoint to fp32 or bf16",
                )
            raise CheckpointError(f"{place.shard}: tensor {_shown(name)} is {kind}: already quantized", FULL_PRECISION)
        if place.info.shape != expected:
            raise CheckpointError(
                f"{place.shard}: tensor {_shown(name)} has shape {list(place.info.shape)}, "
                f"but config.json asks for {list(expected)}",
                "config.json and weights do not belong together",
            )

    def _account_for(self, unused: list[str]) -> None:
        """Every tensor that the model does not use is left out with a line that says so."""
        self.extras = unused
        heads = [name for name in unused if self.architecture.tied and name.endswith("lm_head.weight")]
        for name in heads:
            self._check_tied_head(name)
        unused = [name for name in unused if name not in heads]
        known = [name for name in unused if self.architecture.known_extra(name)]
        unknown = [name for name in unused if not self.architecture.known_extra(name)]
        if known:
            groups = dict.fromkeys(_group(name) for name in known)
            self.notes.append(f"left out {_count(known)} that the text model does not use: {_listed(groups)}")
        if unknown:
            self.warnings.append(f"left out {_count(unknown)} of unknown purpose: {_listed(unknown, 50)}")

    def _check_tied_head(self, name: str) -> None:
        """A tied checkpoint may carry a head, but only the embedding itself."""
        source = next(spec.source for spec in self.tensors if spec.role == "head")
        shard, head = self._places[name].shard, self._places[name].info
        other, size = self._places[source].info, head.end - head.begin
        same = (head.dtype, head.shape) == (other.dtype, other.shape) and all(
            a == b for a, b in zip(self._chunks(name, 0, size), self._chunks(source, 0, size), strict=True)
        )
        if not same:
            raise CheckpointError(
                f"{shard}: tensor {_shown(name)} differs from {_shown(source)}, "
                "but config.json ties them (tie_word_embeddings)",
                "if the head is really separate, config.json should say tie_word_embeddings: false",
            )
        self.notes.append(f"left out {name}: it repeats {source}, to which it is tied")

    # Reading

    def source_name(self, spec: TensorSpec) -> str:
        """The name in the files of the tensor (or fused tensor) that `spec` is read from."""
        return self._sources[spec.name]

    def dtype(self, spec: TensorSpec) -> str:
        """BF16, F16 or F32: what the file stores."""
        return self._places[self._sources[spec.name]].info.dtype

    def read(self, spec: TensorSpec, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor as fp32, exactly (subnormals too), shape `spec.shape`; or only its rows `rows[0]` to `rows[1]`.

        Raises CheckpointError naming tensor and row where a value is NaN or infinite, or the file where it has become
        shorter.
        """
        import torch

        name, begin, end = self._extent(spec, rows)
        dtype = self._places[name].info.dtype
        out = np.empty((end - begin) // _ITEM_SIZE[dtype], np.float32)
        position = 0
        for chunk in self._finite_chunks(name, begin, end):
            count = len(chunk) // _ITEM_SIZE[dtype]
            _widen(dtype, chunk, out[position : position + count])
            position += count
        return torch.from_numpy(out.reshape(spec.shape if rows is None else (rows[1] - rows[0], *spec.shape[1:])))

    def read_raw(self, spec: TensorSpec) -> tuple[str, bytes]:
        """The stored dtype (BF16, F16 or F32) and the tensor's bytes as they are; refuses NaN like `read`."""
        name, begin, end = self._extent(spec, None)
        return self._places[name].info.dtype, b"".join(self._finite_chunks(name, begin, end))

    def _extent(self, spec: TensorSpec, rows: tuple[int, int] | None) -> tuple[str, int, int]:
        """The source tensor, and the bytes of it that hold `rows` of `spec`."""
        name = self._sources[spec.name]
        info = self._places[name].info
        row = (info.end - info.begin) // info.shape[0]
        first, last = spec.rows or (0, info.shape[0])
        if rows is not None:
            if not 0 <= rows[0] <= rows[1] <= last - first:
                raise ValueError(f"{spec.name} has no rows {rows[0]} to {rows[1]}")
            first, last = first + rows[0], first + rows[1]
        return name, first * row, last * row

    def _finite_chunks(self, name: str, begin: int, end: int) -> Iterator[bytes]:
        for chunk in self._chunks(name, begin, end):
            self._check_finite(name, chunk, begin)
            begin += len(chunk)
            yield chunk

    def _chunks(self, name: str, begin: int, end: int) -> Iterator[bytes]:
        """The bytes `begin` to `end` of a tensor, in pieces of whole elements.

        Read, not mapped: a file cut short while in use is then an error and not a signal, and no page of it counts as
        memory of this process.
        """
        place = self._places[name]
        start = self.shards[place.shard].data_start + place.info.begin
        yield from _read_range(self._paths[place.shard], start + begin, start + end)

    def _check_finite(self, name: str, chunk: bytes, begin: int) -> None:
        """`chunk` starts `begin` bytes into the tensor, at a whole element."""
        info = self._places[name].info
        size, mask = _ITEM_SIZE[info.dtype], _EXPONENT[info.dtype]
        bits = np.frombuffer(chunk, f"<u{size}")
        exponents = bits & mask
        if exponents.max(initial=0) != mask:
            return
        index = int(exponents.argmax())
        mantissa = int(bits[index]) & (mask & -mask) - 1
        columns = int(np.prod(info.shape[1:], dtype=np.int64)) if info.shape else 1
        what, row = "NaN" if mantissa else "infinity", (begin // size + index) // columns
        raise CheckpointError(
            f"{self._places[name].shard}: tensor {_shown(name)} holds {what} in row {row}",
            "the weights are damaged: download them again",
        )

    def fingerprint(self, progress: Callable[[int], None] | None = None) -> str:
        """SHA-256 over config.json and the whole content of every shard, by name: what a resumed run compares.

        Reads everything once (about 1 GB/s, more than most disks give) and refuses NaN and infinity on the way, in the
        tensors that the model uses, so that damage shows before hours of work. `progress` is told the bytes read.
        """
        if self._fingerprint is not None:
            return self._fingerprint
        self._seen = self._stamps()
        used = set(self._sources.values())
        digest = hashlib.sha256()

        def add(chunk: bytes) -> None:
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))

        config = json.dumps(self.config, sort_keys=True).encode()
        digest.update(len(config).to_bytes(8, "little") + config)
        for shard, header in sorted(self.shards.items()):
            digest.update(shard.encode() + b"\0" + header.size.to_bytes(8, "little"))
            for chunk in _read_range(self._paths[shard], 0, header.data_start):
                add(chunk)
            # Tensors follow one another without holes (the header was checked), so this is the rest of the file.
            for name, info in sorted(header.tensors.items(), key=lambda item: item[1].begin):
                size = info.end - info.begin
                for chunk in self._finite_chunks(name, 0, size) if name in used else self._chunks(name, 0, size):
                    add(chunk)
        self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def check_unchanged(self) -> None:
        """CheckpointError where a shard has another content than when `fingerprint` read it. One that was written to
        is read again."""
        seen, now, before = self._seen, self._stamps(), self._fingerprint
        written = [name for name in now if now[name] != seen[name]]
        if written:
            self._fingerprint = None
            if self.fingerprint() != before:
                raise CheckpointError(
                    f"{self.folder}: {_listed(written)} changed while the model was made",
                    "let the files be, and run the same command again with --restart",
                )

    def _stamps(self) -> dict[str, tuple[int, int, int]]:
        found = {}
        for name, path in self._paths.items():
            try:
                stat = os.stat(path)
            except OSError:  # gone, but all of it was read
                continue
            found[name] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        return found


def check_tokenizer_ids(folder: Path, vocab: int) -> list[str]:
    """Compare the ids of tokenizer.json with the rows of the embedding; more rows than tokens are normal.

    Returns warnings for added tokens without a row: some text models carry an image token like that, of no use to them.
    Raises CheckpointError for ordinary tokens without a row, and for a tokenizer.json that cannot be read.
    """
    if not os.path.lexists(folder / "tokenizer.json"):
        return ["no tokenizer.json: the model will take token ids only"]
    file = folder / "tokenizer.json"
    tokenizer = _read_json(folder, "tokenizer.json", CheckpointError)
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    words = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(words, list):  # Unigram: [token, score] in order of ids
        ids = {str(entry[0]) if isinstance(entry, list) and entry else str(entry): i for i, entry in enumerate(words)}
    elif isinstance(words, dict) and all(type(i) is int for i in words.values()):
        ids = words
    else:
        raise CheckpointError(f"{file}: no model.vocab", "save the tokenizer again with a current transformers")
    if not isinstance(added, list) or not all(isinstance(t, dict) and type(t.get("id")) is int for t in added):
        raise CheckpointError(f"{file}: added_tokens is not a list of tokens with ids")
    extra = {str(token.get("content")): token["id"] for token in added}
    outside = {token: i for token, i in ids.items() if not 0 <= i < vocab and token not in extra}
    if outside:
        token, i = min(outside.items(), key=lambda item: item[1])
        raise CheckpointError(
            f"{file}: token {_shown(repr(token))} has id {i}, but the embedding has {vocab} rows "
            f"({len(outside)} tokens like that)",
            "tokenizer and weights do not belong together",
        )
    return [
        f"token {_shown(repr(token))} has id {i}, but the embedding has {vocab} rows: "
        "a prompt that uses it will be refused"
        for token, i in extra.items()
        if not 0 <= i < vocab
    ]


def plain_file(folder: Path, name: str) -> Path | None:
    """The path of file `name` of a checkpoint folder with links resolved, or None where it is absent.

    Raises CheckpointError for a dangling link and for one that leads out of the folder or of its Hub cache repository.
    """
    return _plain_path(folder, name).resolve() if os.path.lexists(folder / name) else None


def _folder(path: str | os.PathLike[str]) -> Path:
    """The checkpoint's folder with links resolved, or an error that says what was given instead."""
    text = os.fspath(path)
    folder = Path(path)
    try:
        if folder.is_dir():
            folder = folder.resolve()
        elif folder.is_symlink() and not folder.exists():
            raise CheckpointError(f"{text}: dangling link (points to {_link(folder)})", DOWNLOAD_AGAIN)
        elif folder.is_file():
            raise _instead_of_folder(folder)
        else:
            hint = "give the folder that holds config.json and the weights, or a Hub id such as user/model"
            if _HUB_ID.fullmatch(text):
                name, _, revision = text.partition("@")
                option = f" --revision {revision}" if revision else ""
                command = f"hf download {name}{option} --local-dir {name.split('/')[1]}"
                hint = f"if this is a Hub id, download it first: {command}"
            raise CheckpointError(f"{text}: no such folder", hint)
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{text!r}: cannot be read: {error}") from error
    if not os.path.lexists(folder / CONFIG):
        if (folder / "snapshots").is_dir():
            raise CheckpointError(
                f"{text}: a Hub cache repository, not a checkpoint", f"give {text}/snapshots/<revision>"
            )
        if any(name.lower().endswith(".gguf") for name in os.listdir(folder)):
            raise CheckpointError(f"{text}: holds GGUF, which is already quantized, and no {CONFIG}", FULL_PRECISION)
        if (folder / "adapter_config.json").exists():
            raise CheckpointError(f"{text}: a LoRA adapter, not a model", "merge it into its base model first")
        raise CheckpointError(f"{text}: no {CONFIG}", "give a folder in Hugging Face layout")
    return folder


def _instead_of_folder(file: Path) -> CheckpointError:
    with open(file, "rb") as stream:
        start = stream.read(4)
    if start == b"GGUF" or file.suffix.lower() == ".gguf":
        return CheckpointError(f"{file}: a GGUF file, which is already quantized", FULL_PRECISION + " as a folder")
    return CheckpointError(f"{file}: a file, not a folder", f"give the folder that holds {CONFIG} and the weights")


def _plain_path(folder: Path, name: str) -> Path:
    """The file behind `folder`/`name`, which may be a link only inside the folder or its Hub cache repository."""
    path = folder / name
    try:
        target = path.resolve(strict=True)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise CheckpointError(f"{path}: dangling link (points to {_link(path)})", DOWNLOAD_AGAIN) from error
        raise CheckpointError(f"{path}: missing", DOWNLOAD_AGAIN) from error
    except (OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    root = _link_root(folder.resolve())
    if not (target.is_relative_to(root) or is_blob(target, root)):
        raise CheckpointError(
            f"{path}: a link that leaves the checkpoint (points to {_link(path)})",
            "copy the file into the folder if it is meant to be there",
        )
    return path


def _link_root(folder: Path) -> Path:
    """Where links may point: the repository of a Hub cache (`<repository>/snapshots/<revision>`), else the folder."""
    for snapshot in (folder, *folder.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and (repository / "blobs").is_dir():
            return repository
    return folder


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return str(path.resolve())


def _is_plain_name(name: Any) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not any(c in name for c in "/\\\0")


def _whole_set(present: list[str]) -> list[str] | None:
    """The files to read where their names alone show that they are one whole checkpoint."""
    if SINGLE in present:
        return [SINGLE]
    matches = [_SHARD_NAME.fullmatch(name) for name in present]
    if not present or not all(matches):
        return None
    sets = {(match[1], match[3]) for match in matches if match}
    whole = len(sets) == 1 and not _missing_shards(present) and len(present) == int(next(iter(sets))[1])
    return present if whole else None


def _missing_shards(present: list[str]) -> list[str]:
    """Shards that the names of the others promise (`-of-00003`); no more than a few hundred are listed."""
    missing = []
    for stem, count in {(m[1], m[3]) for m in map(_SHARD_NAME.fullmatch, present) if m}:
        for i in range(1, min(int(count), 1000) + 1):
            name = f"{stem}-{i:0{len(count)}d}-of-{count}.safetensors"
            if name not in present:
                missing.append(name)
    return sorted(missing)


def _group(name: str) -> str:
    """What a left-out tensor belongs to, for the line that names it: a tower, or a buffer that every layer has."""
    parts = [part for part in name.split(".") if part not in ("model", "language_model")]
    return ".".join(parts[2:]) if parts[:1] == ["layers"] and len(parts) > 2 else parts[0]


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) > 1)}"


def _listed(names: Iterable[str], limit: int = 8) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(_shown, names[:limit])) + more


def _shown(name: Any) -> str:
    """A name from a file as part of one line: no control characters, no endless names."""
    text = name if isinstance(name, str) and name.isprintable() and name else repr(name)
    return text if len(text) <= 150 else text[:147] + "..."


def _read_json(folder: Path, name: str, error_type: type[TwobitError]) -> dict[str, Any]:
    """A JSON object out of the folder. Keys given twice are refused: readers disagree on which one counts."""
    file = _plain_path(folder, name)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            key = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ValueError(f"{_shown(key)} stands twice")
        return result

    try:
        if not file.is_file():
            raise error_type(f"{file}: not a regular file", "put the file itself there, or download it again")
        if file.stat().st_size > _MAX_JSON:
            raise error_type(
                f"{file}: {file.stat().st_size} bytes, more than the {_MAX_JSON} allowed", "download it again"
            )
        value = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=pairs)
    except (OSError, ValueError, RecursionError) as error:
        raise error_type(f"{file}: not valid JSON: {str(error)[:200]}", "download it again") from error
    if not isinstance(value, dict):
        raise error_type(f"{file}: not a JSON object", "download it again")
    return value


def _read_range(path: Path, begin: int, end: int) -> Iterator[bytes]:
    """The bytes `begin` to `end` of a file, in pieces of whole elements counted from `begin`."""
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            while begin < end:
                chunk = file.read(min(_CHUNK, end - begin))
                if len(chunk) < min(_CHUNK, end - begin):
                    raise CheckpointError(f"{path}: became shorter while it was read", "download it again")
                begin += len(chunk)
                yield chunk
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _widen(dtype: str, stored: bytes, out: np.ndarray) -> None:
    """Stored values to fp32. bf16 goes by integer shift: arithmetic may flush subnormals to zero."""
    if dtype == "BF16":
        np.left_shift(np.frombuffer(stored, "<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        out[:] = np.frombuffer(stored, "<f2" if dtype == "F16" else "<f4")
