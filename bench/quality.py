#!/usr/bin/env python3
"""Quality of the default recipes on the reference checkpoints: quantize, evaluate, table. Goes on where it stopped.

    python bench/quality.py [--checkpoint smollm2]... [--recipe 2+6]... [--tokens 8192] [--out build/quality]
    python bench/quality.py compare build/quality/smollm2/2+6 build/quality/smollm2/2+8

Every checkpoint and recipe has a folder below --out: model/ (resumable like any `twobit quantize`), result.json
(`twobit eval --json`) and tokens.npz (numbers per token). What is there is not made again; delete a folder to repeat
it. `compare` gives the difference of two results on the same tokens, with its standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINTS = ("smollm2", "gemma3", "qwen")
RECIPES = {"2+6": [], "2+6 g32": ["--residual-group", "32"], "2+8": ["--residual", "8"]}
TWOBIT = [sys.executable, "-m", "twobit"]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def checkpoint(name: str) -> Path:
    """The folder of a reference checkpoint, made if it is not there."""
    command = [sys.executable, str(ROOT / "scripts" / "reference_checkpoints.py"), name]
    return Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


def write(path: Path, data: bytes) -> None:
    """Complete or absent."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)


def result(name: str, recipe: str, out: Path, tokens: int, threads: int) -> dict[str, Any]:
    """The evaluation of one checkpoint and recipe, made or read."""
    folder = out / name / recipe.replace(" ", "-")
    done = folder / "result.json"
    if done.exists():
        kept: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
        if kept["settings"]["tokens"] == tokens:
            return kept
    folder.mkdir(parents=True, exist_ok=True)
    source = checkpoint(name)
    if not (folder / "model").exists():
        say(f"{name}, {recipe}: quantizing")
        command = [*TWOBIT, "quantize", str(source), "-o", str(folder / "model"), "-t", str(threads), "--json"]
        made = subprocess.run([*command, *RECIPES[recipe]], check=True, stdout=subprocess.PIPE)
        write(folder / "quantize.json", made.stdout)
    say(f"{name}, {recipe}: evaluating")
    from twobit.evaluate import Options, evaluate

    started = time.monotonic()
    measured = evaluate(folder / "model", source, Options(tokens=tokens, threads=threads))
    measured.save(folder / "tokens.npz")
    about = subprocess.run([*TWOBIT, "info", str(folder / "model"), "--json"], check=True, stdout=subprocess.PIPE)
    bits = {key: json.loads(about.stdout)[key] for key in ("draft_bpw", "residual_bpw", "head_bpw")}
    data = measured.to_json() | {"bits": bits, "seconds": round(time.monotonic() - started, 1)}
    write(done, json.dumps(data, indent=2).encode() + b"\n")
    return data


def table(results: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Markdown on stdout."""
    print(
        "| checkpoint | recipe | draft + residual bits | KL full | / Q8_0 | KL runtime | / Q8_0, int8 | KL draft |",
        end="",
    )
    print(" accepted of 8 | tree of 16 |\n|---|---|---|---|---|---|---|---|---|---|")
    for (name, recipe), data in results.items():
        kl, pair, drafts = data["kl"], data["paired"], data["acceptance"]
        cells = [
            f"{data['bits']['draft_bpw']:.3f} + {data['bits']['residual_bpw']:.3f}",
            f"{kl['full']['mean']:.6f} ± {kl['full']['stderr']:.6f}",
            f"{pair['full/q8_0']['ratio']:.3f} ± {pair['full/q8_0']['ratio_stderr']:.3f}",
            f"{kl['full_runtime']['mean']:.6f}",
            f"{pair['full_runtime/q8_0_int8']['ratio']:.3f} ± {pair['full_runtime/q8_0_int8']['ratio_stderr']:.3f}",
            f"{kl['draft']['mean']:.3f} ± {kl['draft']['stderr']:.3f}",
            f"{drafts['tokens_per_step'] - 1:.2f} ± {drafts['stderr']:.2f}",
            f"{drafts['tree16_tokens_per_step'] - 1:.2f} ± {drafts['tree16_stderr']:.2f}",
        ]
        print(f"| {name} | {recipe} | " + " | ".join(cells) + " |")


def compare(first: Path, second: Path) -> None:
    """Paired differences of two results, second minus first."""
    from twobit.evaluate import paired

    with np.load(first / "tokens.npz") as a, np.load(second / "tokens.npz") as b:
        if not np.array_equal(a["targets"], b["targets"]):
            raise SystemExit("the two results are of different tokens: they cannot be paired")
        print("| KL | first | second | ratio | difference |\n|---|---|---|---|---|")
        for key in sorted(set(a.files) & set(b.files)):
            if key.startswith("kl_"):
                x, y = a[key], b[key]
                pair = paired(y, x, a["clusters"])
                ratio = f"{pair['ratio']:.3f} ± {pair['ratio_stderr']:.3f}"
                difference = f"{pair['difference']:+.6f} ± {pair['difference_stderr']:.6f}"
                print(f"| {key[3:]} | {x.mean():.6f} | {y.mean():.6f} | {ratio} | {difference} |")


def main() -> None:
    if sys.argv[1:2] == ["compare"]:
        parser = argparse.ArgumentParser(prog="quality.py compare")
        parser.add_argument("first", type=Path)
        parser.add_argument("second", type=Path)
        args = parser.parse_args(sys.argv[2:])
        return compare(args.first, args.second)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", action="append", choices=CHECKPOINTS)
    parser.add_argument("--recipe", action="append", choices=RECIPES)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "quality")
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    results = {
        (name, recipe): result(name, recipe, args.out, args.tokens, args.threads)
        for name in args.checkpoint or CHECKPOINTS
        for recipe in args.recipe or RECIPES
    }
    table(results)


if __name__ == "__main__":
    main()
