"""`twobit info`: what a model holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from twobit.cli import options, output
from twobit.cli.command import Option
from twobit.errors import TwobitError
from twobit.format.manifest import Manifest, TensorEntry

_LAYER = re.compile(r"\.layers\.\d+\.")


def info(
    model: options.ModelName,
    check: Annotated[bool, Option("--check", help="Read every byte and compare it with its checksum")] = False,
    as_json: Annotated[bool, Option("--json", help="One JSON object on stdout")] = False,
) -> int:
    """Show what a twobit model holds: bits per weight, bytes per shard, tensors, recipe.

    Of a model on the Hub only the headers are fetched.

    \b
    twobit info ./model
    twobit info user/model
    twobit info ./model --check --json
    """
    manifest, files = _look(model, check, as_json)
    level, kernels = _level()
    if as_json:
        output.result(
            {
                "build_id": manifest.build_id,
                "format_version": manifest.version,
                "family": manifest.family,
                **manifest.bits(),
                "recipe": dict(manifest.recipe),
                "calibration": dict(manifest.calibration),
                "kernel": level,
                "producer": manifest.producer,
                "files": files,
                "tensors": _groups(manifest),
                "checked": check,
            }
        )
        return 0

    bits = manifest.bits()
    head = bits["head_bpw"]
    output.table(
        [
            ("family", manifest.family),
            ("parameters", f"{manifest.parameters:,}"),
            (
                "bits per weight",
                f"{bits['draft_bpw']:.3f} draft + {bits['residual_bpw']:.3f} residual"
                f" = {bits['draft_bpw'] + bits['residual_bpw']:.3f}",
            ),
            ("  head, embeddings", f"{head['draft']:.3f} draft + {head['residual']:.3f} residual"),
            ("bytes", f"{bits['draft_bytes']:,} draft + {bits['residual_bytes']:,} residual"),
            ("format", f"{manifest.version}, by {manifest.producer}"),
            ("build", manifest.build_id),
            ("kernels here", kernels),
        ]
    )
    output.line()
    output.table([("file", "bytes"), *((name, f"{size:,}") for name, size in files.items())])
    output.line()
    output.table(
        [
            ("tensors", "count", "shape", "bits", "bytes"),
            *(
                (g["name"], str(g["count"]), "x".join(map(str, g["shape"])), g["bits"], f"{g['bytes']:,}")
                for g in _groups(manifest)
            ),
        ]
    )
    for title, values in (("recipe", manifest.recipe), ("calibration", manifest.calibration)):
        if values:
            output.line()
            output.table([(title, ""), *((output.clean(k), _short(v)) for k, v in _flat(values))])
    if check:
        output.note("every checksum is right")
    return 0


def _look(model: str, check: bool, quiet: bool) -> tuple[Manifest, dict[str, int]]:
    """Manifest and shard sizes. Of a model on the Hub only headers are fetched, but for --check, which needs all."""
    found = options.local_or_hub(model)
    if isinstance(found, Path) or check:
        from twobit.format.reader import open_model

        packed = open_model(options.model_folder(model, quiet=quiet), check=check)
        return packed.manifest, dict(packed.files)
    from twobit import hub
    from twobit.cli.progress import quiet_libraries

    quiet_libraries(True)
    return hub.describe(*found)


def _level() -> tuple[str | None, str]:
    """(name of the kernels that `run` would use here, or None; what to show: the name, or why there is none)."""
    try:
        from twobit.runtime.lib import cpu_level

        level = cpu_level()
    except TwobitError as error:
        return None, f"none: {error}"
    return level, level


def _groups(manifest: Manifest) -> list[dict[str, Any]]:
    """Tensors of the same role, shape and bits over all layers, in the model's order."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, entry in manifest.tensors.items():
        role, bits = _LAYER.sub(".layers.*.", name), _bits(entry)
        group = groups.setdefault(
            (role, entry.shape, bits),
            {"name": role, "count": 0, "shape": list(entry.shape), "bits": bits, "bytes": 0},
        )
        group["count"] += 1
        group["bytes"] += sum(stored.bytes for stored in entry.stored(name).values())
    return list(groups.values())


def _bits(entry: TensorEntry) -> str:
    if entry.kind == "matrix":
        return f"{entry.draft_bits}+{entry.residual_bits} {entry.range}"
    return "int8" if entry.kind == "embedding" else entry.dtype


def _flat(values: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Objects inside objects as rows of their own, up to the last level: `errors, linear` is one row."""
    for key, value in values.items():
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            yield from _flat(value, f"{before}{key}, ")
        else:
            yield f"{before}{key}", value


def _short(value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{k} {_short(v)}" for k, v in value.items()) or "none"
    elif isinstance(value, float):
        value = f"{value:.6g}"
    text = output.clean(value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= 5000 else text[:4997] + "..."  # a stranger's may be endless
