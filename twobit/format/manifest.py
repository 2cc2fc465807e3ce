"""The manifest: `quantization_config` in config.json says what every byte of the shards is.

It names each tensor's kind, shape and bits, the SHA-256 of each stored plane, the recipe and the calibration, and ends
in the build id: the SHA-256 of the manifest without it. Both kinds of shard carry that id, so that planes of two builds
never meet. `from_config` reads the manifest of a stranger: every field has a type and a bound.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

from twobit.errors import FormatError
from twobit.format import layout

Json = Any  # dict, list, str, int, float, bool or None

QUANT_METHOD = "twobit"
FORMAT_VERSION = 1
DRAFT_KIND = "affine16"  # a 4-bit scale and a 4-bit centre per 16 columns
RESIDUAL_PACKING = "single"  # one plane of R-bit codes
RANGES = ("narrow", "wide")
PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # dtypes of tensors that are stored as they came
DRAFT, RESIDUAL = PARTS = ("draft", "residual")

MAX_CONFIG_BYTES = 64 << 20
_MAX_DIM = 1 << 31
_MAX_WEIGHTS = 1 << 40
_MAX_COUNT = 1 << 62
_NAME = re.compile(r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)

QUANTIZE_AGAIN = "quantize again with this version of twobit"
DOWNLOAD_AGAIN = "the model was damaged or edited: download it again"


class Stored(NamedTuple):
    """One tensor of a shard file."""

    part: str  # "draft" or "residual"
    plane: str  # key of TensorEntry.checksums
    dtype: str  # safetensors dtype
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class TensorEntry:
    """What one tensor of the model is and how it is stored.

    kind: "matrix" (planes of FORMAT.md), "embedding" (int8 rows) or "plain" (as it came, `dtype`). shape: logical.
    checksums: SHA-256 (hex) of the stored bytes, padding included, by plane; a plain tensor has one, "data".
    The bit fields belong to matrices.
    """

    kind: Literal["matrix", "embedding", "plain"]
    shape: tuple[int, ...]
    checksums: Mapping[str, str]
    draft_bits: int = 0
    residual_bits: int = 0
    residual_group: int = 0
    range: str = ""
    dtype: str = ""

    @property
    def wide(self) -> bool:
        """Whether |q| may reach 8191 instead of 2047."""
        return self.range == "wide"

    @property
    def layout_args(self) -> tuple[int, int, int, int, int]:
        """(rows, cols, draft_bits, residual_bits, residual_group), as layout.unpack and plane_sizes take them."""
        return (self.shape[0], self.shape[1], self.draft_bits, self.residual_bits, self.residual_group)

    def stored(self, name: str) -> dict[str, Stored]:
        """The tensors in the shard files that hold this one, by their names there."""
        if self.kind == "plain":
            size = math.prod(self.shape) * PLAIN_BYTES[self.dtype]
            return {name: Stored(DRAFT, "data", self.dtype, self.shape, size)}
        sizes = (
            layout.embedding_sizes(self.shape[0], self.shape[1])
            if self.kind == "embedding"
            else layout.plane_sizes(*self.layout_args)
        )
        return {
            f"{name}.{plane}": Stored(RESIDUAL if plane in layout.RESIDUAL_PLANES else DRAFT, plane, "U8", (n,), n)
            for plane, n in sizes.items()
        }

    def to_json(self) -> dict[str, Json]:
        """This entry as it stands in the manifest."""
        entry: dict[str, Json] = {"kind": self.kind, "shape": list(self.shape)}
        if self.kind == "matrix":
            entry |= {
                "draft_bits": self.draft_bits,
                "residual_bits": self.residual_bits,
                "residual_group": self.residual_group,
                "range": self.range,
                "draft_kind": DRAFT_KIND,
                "residual_packing": RESIDUAL_PACKING,
                "leading_axis": None,
            }
        if self.kind == "plain":
            entry["dtype"] = self.dtype
        return entry | {"sha256": dict(self.checksums)}


@dataclass(frozen=True)
class Manifest:
    """The parsed `quantization_config`. `tensors` keeps the order of the model; `parameters` counts the source's;
    `config_sha256` is that of the rest of config.json (`config_digest`)."""

    family: str
    parameters: int
    tensors: Mapping[str, TensorEntry]
    recipe: Mapping[str, Json] = field(default_factory=dict)
    calibration: Mapping[str, Json] = field(default_factory=dict)
    producer: str = QUANT_METHOD
    version: int = FORMAT_VERSION
    build_id: str = ""
    config_sha256: str = ""

    def stored(self) -> dict[str, tuple[str, Stored]]:
        """Every tensor of the shard files: its name there -> (tensor, Stored). FormatError where two names collide."""
        found: dict[str, tuple[str, Stored]] = {}
        for name, entry in self.tensors.items():
            for key, stored in entry.stored(name).items():
                if key in found:
                    raise FormatError(f"tensors {found[key][0]} and {name} both store {key}")
                found[key] = (name, stored)
        return found

    def bits(self) -> dict[str, Json]:
        """Sizes for `info` and `quantize`: bits per weight over decoder linears and over head and embeddings apart
        (all planes counted, padding included), and bytes of tensor data per part."""
        weights = {"linear": 0, "head": 0}
        size = {(of, part): 0 for of in ("linear", "head", "plain") for part in PARTS}
        for name, entry in self.tensors.items():
            of = "plain" if entry.kind == "plain" else "linear" if ".layers." in name else "head"
            if of != "plain":
                weights[of] += math.prod(entry.shape)
            for stored in entry.stored(name).values():
                size[of, stored.part] += stored.bytes

        def per_weight(of: str, part: str) -> float:
            return 8 * size[of, part] / weights[of] if weights[of] else 0.0

        return {
            "parameters": self.parameters,
            "draft_bpw": per_weight("linear", DRAFT),
            "residual_bpw": per_weight("linear", RESIDUAL),
            "head_bpw": {part: per_weight("head", part) for part in PARTS},
            "draft_bytes": sum(size[of, DRAFT] for of in ("linear", "head", "plain")),
            "residual_bytes": sum(size[of, RESIDUAL] for of in ("linear", "head", "plain")),
        }

    def to_json(self) -> dict[str, Json]:
        """The value of `quantization_config`, its build id computed from the rest."""
        body = {
            "quant_method": QUANT_METHOD,
            "format_version": self.version,
            "producer": self.producer,
            "family": self.family,
            "parameters": self.parameters,
            "recipe": dict(self.recipe),
            "calibration": dict(self.calibration),
            "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
            "config_sha256": self.config_sha256,
        }
        return body | {"build_id": compute_build_id(body)}

    @classmethod
    def from_config(cls, config: Json, file: str = "config.json") -> Manifest:
        """The manifest inside a parsed config.json.

        Raises FormatError, naming `file` and the field, where it is absent, of another method or version, malformed,
        or not what its own build id says.
        """
        return _Parser(file).manifest(config)


def canonical_json(value: Json) -> bytes:
    """The one spelling of a JSON value that hashes are taken of: sorted keys, no spaces, ASCII."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"not a JSON value: {error}") from error
    return text.encode("ascii")


def config_digest(config: Mapping[str, Json]) -> str:
    """SHA-256 (hex) of config.json without `quantization_config`: the settings that the weights were made for."""
    return hashlib.sha256(canonical_json({k: v for k, v in config.items() if k != "quantization_config"})).hexdigest()


def compute_build_id(quantization_config: Mapping[str, Json]) -> str:
    """SHA-256 (hex) of the manifest without its build id."""
    return hashlib.sha256(canonical_json({k: v for k, v in quantization_config.items() if k != "build_id"})).hexdigest()


def parse_json(data: bytes, file: str) -> Json:
    """JSON from a stranger: FormatError (naming `file`) on bad UTF-8, syntax, duplicate keys, NaN and deep nesting."""

    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"key {_short(next(n for n in names if names.count(n) > 1))} stands twice")
        return result

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a JSON number")

    def number(text: str) -> float:
        value = float(text)
        if math.isinf(value):
            raise ValueError(f"{_short(text)} is too large")
        return value

    try:
        return json.loads(data.decode(), object_pairs_hook=unique, parse_constant=constant, parse_float=number)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file}: not valid JSON: {_short(str(error))}", DOWNLOAD_AGAIN) from error


def _short(value: object) -> str:
    text = value if isinstance(value, str) and value.isascii() and value.isprintable() else ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."


class _Parser:
    def __init__(self, file: str) -> None:
        self.file = file

    def fail(self, what: str, hint: str | None = DOWNLOAD_AGAIN) -> NoReturn:
        raise FormatError(f"{self.file}: {what}", hint)

    def get(self, where: str, of: dict[str, Json], key: str, kind: type) -> Json:
        if key not in of:
            self.fail(f"{where} has no {key}")
        value = of[key]
        if type(value) is not kind:  # bool is an int, and must not be one here
            self.fail(f"{where}: {key} is {_short(value)}, expected {kind.__name__}")
        return value

    def integer(self, where: str, of: dict[str, Json], key: str, low: int, high: int) -> int:
        value: int = self.get(where, of, key, int)
        if not low <= value <= high:
            self.fail(f"{where}: {key} is {_short(value)}, expected {low} to {high}")
        return value

    def one_of(self, where: str, of: dict[str, Json], key: str, allowed: tuple[Json, ...]) -> Json:
        if key not in of:
            self.fail(f"{where} has no {key}")
        value = of[key]
        if not any(value == a and type(value) is type(a) for a in allowed):
            self.fail(f"{where}: {key} is {_short(value)}, expected {' or '.join(map(str, allowed))}", QUANTIZE_AGAIN)
        return value

    def manifest(self, config: Json) -> Manifest:
        if type(config) is not dict:
            self.fail("not a JSON object")
        q = config.get("quantization_config")
        if type(q) is not dict or q.get("quant_method") != QUANT_METHOD:
            method = q.get("quant_method") if type(q) is dict else None
            other = f"quantized by {_short(method)}" if method is not None else "not quantized by twobit"
            self.fail(f"not a twobit model ({other})", "make one with `twobit quantize` from the original checkpoint")
        where = "quantization_config"
        version = q.get("format_version")
        if type(version) is not int or version != FORMAT_VERSION:
            self.fail(
                f"format version {_short(version)}; this version of twobit reads version {FORMAT_VERSION}",
                QUANTIZE_AGAIN,
            )
        build_id = self.get(where, q, "build_id", str)
        entries = self.get(where, q, "tensors", dict)
        if not entries:
            self.fail(f"{where}: no tensors")
        for key in ("producer", "family"):
            text = self.get(where, q, key, str)
            if not (0 < len(text) <= 200 and text.isascii() and text.isprintable()):
                self.fail(f"{where}: {key} is {_short(text)}, expected up to 200 printable ASCII characters")
        manifest = Manifest(
            family=q["family"],
            parameters=self.integer(where, q, "parameters", 1, _MAX_COUNT),
            tensors={name: self.entry(name, entry) for name, entry in entries.items()},
            recipe=self.get(where, q, "recipe", dict),
            calibration=self.get(where, q, "calibration", dict),
            producer=q["producer"],
            version=version,
            build_id=build_id,
            config_sha256=self.get(where, q, "config_sha256", str) if "config_sha256" in q else "",
        )
        try:
            actual, settings = compute_build_id(q), config_digest(config)
            manifest.stored()
        except FormatError as error:
            self.fail(f"{where}: {error}")
        if build_id != actual:
            self.fail(f"{where} was changed after the build: its build_id is {_short(build_id)}, its contents {actual}")
        if manifest.config_sha256 not in ("", settings):
            self.fail(
                f"settings outside {where} were changed after the build: their SHA-256 is {settings}, "
                f"config_sha256 {_short(manifest.config_sha256)}"
            )
        return manifest

    def entry(self, name: str, value: Json) -> TensorEntry:
        where = f"tensor {_short(name)}"
        if len(name) > 200 or not _NAME.fullmatch(name):
            self.fail(f"{where}: not a module name")
        if type(value) is not dict:
            self.fail(f"{where}: not a JSON object")
        kind = self.one_of(where, value, "kind", ("matrix", "embedding", "plain"))
        keys = {"kind", "shape", "sha256"}
        shape = self.get(where, value, "shape", list)
        ranks = (0, 1, 2, 3) if kind == "plain" else (2,)
        if len(shape) not in ranks or not all(type(n) is int and 1 <= n < _MAX_DIM for n in shape):
            self.fail(f"{where}: shape {_short(shape)} is not a list of {ranks[-1]} sizes of 1 to {_MAX_DIM - 1}")
        if math.prod(shape) > _MAX_WEIGHTS:
            self.fail(f"{where}: shape {_short(shape)} is too large")
        bits: dict[str, Json] = {}
        if kind == "matrix":
            for key, allowed in (
                ("draft_bits", tuple(sorted({b for b, _ in layout.KINDS}))),
                ("residual_bits", tuple(sorted({r for _, r in layout.KINDS}))),
                ("residual_group", layout.RESIDUAL_GROUPS),
                ("range", RANGES),
            ):
                bits[key] = self.one_of(where, value, key, allowed)
            known = layout.KINDS.get((bits["draft_bits"], bits["residual_bits"]))
            if known is None or bits["range"] != RANGES[known.wide]:
                which = f"{bits['draft_bits']}+{bits['residual_bits']} {bits['range']}"
                self.fail(f"{where}: there are no {which} matrices", QUANTIZE_AGAIN)
            self.one_of(where, value, "draft_kind", (DRAFT_KIND,))
            self.one_of(where, value, "residual_packing", (RESIDUAL_PACKING,))
            self.one_of(where, value, "leading_axis", (None,))
            keys |= {*bits, "draft_kind", "residual_packing", "leading_axis"}
        if kind == "plain":
            bits["dtype"] = self.one_of(where, value, "dtype", tuple(PLAIN_BYTES))
            keys.add("dtype")
        if unknown := sorted(value.keys() - keys):
            # a field that this version does not know may change what the bytes mean
            self.fail(f"{where}: unknown field {_short(unknown[0])}", QUANTIZE_AGAIN)
        checksums = self.get(where, value, "sha256", dict)
        entry = TensorEntry(kind, tuple(shape), checksums, **bits)
        planes = {stored.plane for stored in entry.stored(name).values()}
        if checksums.keys() != planes:
            self.fail(f"{where}: sha256 is given for {_short(sorted(checksums))}, expected {sorted(planes)}")
        if not all(type(digest) is str and _SHA256.fullmatch(digest) for digest in checksums.values()):
            self.fail(f"{where}: a sha256 is not 64 lower-case hex digits")
        return entry
