"""The model card: README.md of a model on the Hub, its metadata in front.

A card that twobit wrote carries `MARK` and is written anew by every push; a README without it is someone's own and is
left as it is. License and language come from the source's README, what is absent there stays absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twobit.format.manifest import Manifest

MARK = "<!-- written by twobit; a README without this line is left as it is -->"
README = "README.md"
_MOST = 1 << 20  # bytes of a README that is looked at
_KEPT = ("license", "license_name", "license_link", "language", "base_model")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def is_ours(text: str) -> bool:
    """Whether twobit wrote this README."""
    return MARK in text


def metadata(text: str) -> dict[str, Any]:
    """What a README's metadata says of license, language and base model; {} where it says nothing readable."""
    found = re.match(r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", text, re.DOTALL)
    if not found:
        return {}
    import yaml

    try:
        data = yaml.safe_load(found[1])
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    kept = {key: _plain(data.get(key)) for key in _KEPT}
    return {key: value for key, value in kept.items() if value}


def _plain(value: Any) -> str | list[str] | None:
    """Text, or a list of texts; anything else, and what is empty, is None. A bare `no` (Norwegian) is False in YAML."""
    if value is False:
        return "no"
    if isinstance(value, str):
        return _CONTROL.sub("", value).strip() or None
    if isinstance(value, list):
        items = [item for item in map(_plain, value) if isinstance(item, str)]
        return (items[0] if len(items) == 1 else items) or None
    return None


def of_source(folder: Path) -> str | None:
    """The README that `twobit quantize` leaves for a later push: license and language of the source, and the source's
    own name where the folder is a snapshot of the Hub's cache. None where nothing is known."""
    data = {}
    if (path := folder / README).is_file():  # a pipe would never end
        try:
            with open(path, "rb") as file:
                data = metadata(file.read(_MOST).decode("utf-8", "replace"))
        except OSError:
            pass
    data.pop("base_model", None)  # what the source was made from
    cached = _CACHED.fullmatch(folder.resolve().parent.parent.name)
    if cached:
        data["base_model"] = f"{cached[1]}/{cached[2]}"
    return _front(data) + f"\n{MARK}\n" if data else None


def model_card(
    manifest: Manifest,
    repository: str,
    known: Mapping[str, Any],
    evaluation: Mapping[str, Any] | None = None,
    *,
    chat: bool = True,
) -> str:
    """The card. known: metadata as `metadata` gives it; evaluation: the object of `twobit eval --json`; chat: whether
    the model has a chat template."""
    base = known.get("base_model")
    front = {key: known[key] for key in ("license", "license_name", "license_link", "language") if key in known}
    if base:
        front |= {"base_model": base, "base_model_relation": "quantized"}
    front |= {
        "library_name": "twobit",
        "pipeline_tag": "text-generation",
        "tags": ["twobit", "2-bit", "speculative-decoding", manifest.family, *(["conversational"] if chat else [])],
    }
    name = repository.split("/")[-1]
    source = f"[{base}](https://huggingface.co/{base})" if isinstance(base, str) else "The source model"
    bits = manifest.bits()
    head = bits["head_bpw"]
    lines = [
        f"# {name}",
        "",
        f"{source}, split by bits with twobit {_version(manifest)}: a 2-bit part drafts, 2-bit part and residual",
        "verify. Drafting never changes the text.",
        "",
        "```sh",
        f'twobit run {repository} "Why is the sky blue?"' if chat else f'twobit run {repository} "Once" --raw -n 100',
        *([f"twobit chat {repository}"] if chat else []),
        f"twobit info {repository}",
        "```",
        "",
        "| | draft | residual |",
        "|---|---:|---:|",
        f"| bits per weight, decoder linears | {bits['draft_bpw']:.3f} | {bits['residual_bpw']:.3f} |",
        f"| bits per weight, head and embedding | {head['draft']:.3f} | {head['residual']:.3f} |",
        f"| bytes | {bits['draft_bytes']:,} | {bits['residual_bytes']:,} |",
        "",
        f"{manifest.parameters:,} parameters, family `{manifest.family}`, format {manifest.version}, "
        f"build `{manifest.build_id}`.",
        "",
        *_recipe(manifest),
        *_measured(evaluation),
        MARK,
    ]
    return _front(front) + "\n" + "\n".join(lines) + "\n"


def _front(data: Mapping[str, Any]) -> str:
    """Metadata as YAML between its marks."""
    import yaml

    return f"---\n{yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)}---\n"


def _version(manifest: Manifest) -> str:
    return manifest.producer.removeprefix("twobit ")


def _recipe(manifest: Manifest) -> list[str]:
    """Recipe and calibration, as far as they are single values."""
    rows = [
        f"| {of}, {_cell(key)} | {_cell(value)} |"
        for of, values in (("recipe", manifest.recipe), ("calibration", manifest.calibration))
        for key, value in values.items()
        if isinstance(value, str | int | float)
    ]
    return ["## How it was made", "", "| | |", "|---|---|", *rows, ""] if rows else []


def _measured(evaluation: Mapping[str, Any] | None) -> list[str]:
    if evaluation is None:
        return []
    lines = [
        "## Measured",
        "",
        f"KL divergence to the source's next-token distribution, nats per token, over {evaluation['tokens']:,} tokens "
        "(`twobit eval`).",
        "",
        "| | mean | standard error | same top token |",
        "|---|---:|---:|---:|",
        *(
            f"| {_cell(name)} | {kl['mean']:.6f} | {kl['stderr']:.6f} | {kl['top1']:.4f} |"
            for name, kl in evaluation["kl"].items()
        ),
        "",
    ]
    if "acceptance" in evaluation:
        greedy = evaluation["acceptance"]
        lines += [
            f"Greedy decoding with {greedy.get('drafted', 8)} drafted tokens yields {greedy['tokens_per_step']:.2f} "
            f"tokens per step (standard error {greedy['stderr']:.2f}, {greedy['blocks']:,} steps).",
            "",
        ]
    return lines


def _cell(value: object) -> str:
    """A value inside a Markdown table: nothing of it may end the cell or become markup."""
    return re.sub(r"([\\`|<>\[\]*])", r"\\\1", _CONTROL.sub("", str(value)).replace("\n", " "))[:200]
