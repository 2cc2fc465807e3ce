#!/usr/bin/env python3
"""What drafting brings, in pairs: every prompt with and without it, in turns, on the same machine in the same minutes.

    python bench/speculation.py run --model build/demo/smollm2-2bit [--set plain,auto,fixed,without] [--seconds 100]
    python bench/speculation.py llama --checkpoint build/demo/smollm2 [--seconds 100]
    python bench/speculation.py table

Prompts are in bench/prompts.json, twelve of each kind; greedy on all, temperature 0.8 on the first four of each kind.
`run` does one prompt after the other: every setting once per round, in an order that turns from round to round, on a
fresh session each. A finished prompt is a file below --out and is not run again; --seconds ends the run after the
prompt that passes it, so that a long set can be done in parts. Token ids of every setting must equal those without
drafting, else the run stops. End tokens do not end a text.

Settings: plain; auto (the default); chain1 .. chain8, tree8 (fixed, for hindsight); without-X (auto, less one
mechanism). `llama` runs llama.cpp on the same prompts: plain decoding in its own time per token, and its speculative
modes, for the models converted by scripts/peers.py, and twobit on the same prompt in the same round. `equality`
counts tokens that are the same with and without drafting, greedy and at temperature 0.8 on every prompt, and times
nothing. `table` prints Markdown from what is there, and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
PROMPTS: dict[str, list[str]] = json.loads((ROOT / "bench" / "prompts.json").read_text(encoding="utf-8"))
MECHANISMS = ("LOOKUP", "DRAFT", "RECYCLED", "TREE", "SHORT_HEAD")
FIXED = ("chain1", "chain2", "chain4", "chain8", "tree8")
SETS = {
    "plain": ("plain",),
    "auto": ("auto",),
    "fixed": FIXED,
    "without": tuple(f"without-{name}" for name in MECHANISMS),
}
TEMPERATURES = {"greedy": 12, "0.8": 4}  # how many prompts of each kind
SPECULATIVE = {"ngram-simple": ("--spec-type", "ngram-simple"), "ngram-mod": ("--spec-type", "ngram-mod")}
MODES = (*SPECULATIVE, "draft Q2_K")
# Two-sided 95 % points of Student's t for 1 .. 10 degrees of freedom.
T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write(path: Path, data: dict[str, Any]) -> None:
    """Complete or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def cases(args: argparse.Namespace) -> Iterator[tuple[str, int, str]]:
    """(kind, number of the prompt, "greedy" or a temperature), the first prompts of all kinds first."""
    for number in range(args.prompts):
        for kind in args.kinds.split(","):
            for heat in args.heats.split(","):
                if number < TEMPERATURES[heat]:
                    yield kind, number, heat


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """As a user's message; as plain text where the model has no chat template."""
    if tokenizer.template is None:
        return list(tokenizer.encode_prompt(text + "\n\n"))
    return list(tokenizer.chat_ids([{"role": "user", "content": text}]))


def options_of(setting: str) -> Any:
    """StepOptions of a setting by its name."""
    from twobit.runtime.session import StepOptions, Use

    if setting == "plain":
        return StepOptions(draft_max=0)
    if setting == "auto":
        return StepOptions()
    if setting.startswith("chain"):
        return StepOptions(draft_max=int(setting.removeprefix("chain")), draft_fixed=True)
    if setting.startswith("tree"):
        return StepOptions(draft_max=int(setting.removeprefix("tree")), draft_tree=True)
    return StepOptions(use=Use.ALL & ~Use[setting.removeprefix("without-")])


def once(model: Any, tokenizer: Any, prompt: list[int], sampling: Any, setting: str, args: argparse.Namespace) -> Any:
    """The Result of one text of `args.tokens` tokens on a fresh session."""
    from twobit.runtime.generate import generate
    from twobit.runtime.session import Session

    session = Session(model, len(prompt) + args.tokens, args.threads)
    *_, last = generate(session, tokenizer, prompt, sampling, options_of(setting), max_tokens=args.tokens)
    assert len(last.token_ids) == args.tokens
    return last


def run(args: argparse.Namespace) -> None:
    from twobit.runtime.model import Model
    from twobit.runtime.sampling import Sampling
    from twobit.runtime.tokenizer import Tokenizer

    started = time.monotonic()
    model = Model.open(args.model)
    tokenizer = Tokenizer.load(args.model, config=model.config, rows=model.vocab)
    settings = list(dict.fromkeys(["plain", *(s for name in args.set.split(",") for s in SETS[name])]))
    name = args.name or args.model.name.removesuffix("-2bit")

    for kind, number, heat in cases(args):
        path = args.out / name / f"{kind}-{number:02d}-{heat}.json"
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if set(settings) <= set(kept.get("runs", {})):
            continue
        prompt = prompt_ids(tokenizer, PROMPTS[kind][number])
        sampling = Sampling() if heat == "greedy" else Sampling(temperature=float(heat), seed=1 + number)
        runs: dict[str, dict[str, Any]] = {setting: {"tokens_per_s": []} for setting in settings}
        ids: list[int] = []
        for round_ in range(args.rounds):
            for at in range(len(settings)):
                setting = settings[(at + round_) % len(settings)]
                result = once(model, tokenizer, prompt, sampling, setting, args)
                ids = ids or result.token_ids
                if result.token_ids != ids:
                    raise SystemExit(f"{path.stem}, {setting}: the tokens differ from those of another setting")
                runs[setting]["tokens_per_s"].append(result.decode_tokens_per_s)
                runs[setting] |= {
                    "tokens_per_step": result.tokens_per_step,
                    "by_kind": result.by_kind,
                    "draft_passes": result.draft_passes,
                    "bytes_per_token": result.bytes_per_token,
                }
        data = {
            "model": name,
            "build_id": model.packed.manifest.build_id,
            "kernel": model.level,
            "threads": args.threads,
            "tokens": args.tokens,
            "rounds": args.rounds,
            "runs": runs,
        }
        write(path, data)
        if "auto" in runs:
            say(f"{path.stem}: {ratio(runs, 'auto')[0]:.2f}, {runs['auto']['tokens_per_step']:.2f} tokens per step")
        if time.monotonic() - started > args.seconds:
            say("more to do: run this again")
            return


def equality(args: argparse.Namespace) -> None:
    """As many texts as there are prompts and temperatures, each with and without drafting, until --seconds."""
    from twobit.runtime.model import Model
    from twobit.runtime.sampling import Sampling
    from twobit.runtime.session import Session
    from twobit.runtime.tokenizer import Tokenizer

    started = time.monotonic()
    model = Model.open(args.model)
    tokenizer = Tokenizer.load(args.model, config=model.config, rows=model.vocab)
    name = args.name or args.model.name.removesuffix("-2bit")
    for number, kind, heat in itertools.product(range(args.prompts), args.kinds.split(","), args.heats.split(",")):
        path = args.out / name / f"{kind}-{number:02d}-{heat}-equality.json"
        if path.exists():
            continue
        prompt = prompt_ids(tokenizer, PROMPTS[kind][number])
        sampling = Sampling() if heat == "greedy" else Sampling(temperature=float(heat), seed=1 + number)
        texts, accepted = [], 0
        for setting in ("plain", "auto"):
            session, history = Session(model, len(prompt) + args.tokens, args.threads), array("i", prompt)
            session.sync(prompt[:-1])
            while (left := len(prompt) + args.tokens - len(history)) > 0:
                step = session.step(history, sampling, replace(options_of(setting), budget=left))
                history.extend(step.tokens)
                accepted += step.accepted
            texts.append(history)
        if texts[0] != texts[1]:
            at = next(i for i, (a, b) in enumerate(zip(*texts, strict=True)) if a != b) - len(prompt)
            raise SystemExit(f"{path.stem}: token {at} differs with drafting")
        found = {"equal": args.tokens, "from_drafts": accepted, "threads": args.threads, "kernel": model.level}
        write(path, {"model": name, "build_id": model.packed.manifest.build_id, **found})
        say(f"{path.stem}: {args.tokens} tokens equal, {accepted} of them proposed")
        if time.monotonic() - started > args.seconds:
            say("more to do: run this again")
            return


def llama(args: argparse.Namespace) -> None:
    import peers

    started = time.monotonic()
    eight = peers.convert(args.checkpoint.resolve())
    half = eight.with_name(eight.name.replace("q8_0", "f16"))
    small = eight.with_name(eight.name.replace("q8_0", "q2_k"))
    if not small.exists():
        part = small.with_suffix(".part")
        peers.run(peers.BINARIES / "llama-quantize", half, part, "Q2_K")
        os.replace(part, small)
    modes = SPECULATIVE | {"draft Q2_K": ("--spec-type", "draft-simple", "-md", str(small))}
    from twobit.runtime.model import Model
    from twobit.runtime.sampling import Sampling
    from twobit.runtime.tokenizer import Tokenizer

    model = Model.open(args.model)
    tokenizer = Tokenizer.load(args.model, config=model.config, rows=model.vocab)
    for kind, number, heat in cases(args):
        path = args.out / args.checkpoint.name / f"{kind}-{number:02d}-llama.json"
        if heat != "greedy" or path.exists():
            continue
        ids = prompt_ids(tokenizer, PROMPTS[kind][number])
        prompt = tokenizer.decode(ids)
        speeds: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for setting in ("plain", "auto"):
                found = once(model, tokenizer, ids, Sampling(), setting, args).decode_tokens_per_s
                speeds.setdefault(f"twobit {setting}", []).append(found)
            speeds.setdefault("plain", []).append(llama_plain(peers.BINARIES, eight, args.tokens, args.threads))
            for mode, flags in modes.items():
                found = llama_speculative(peers.BINARIES, eight, prompt, flags, args.tokens, args.threads)
                speeds.setdefault(mode, []).append(found)
        write(path, {"model": args.checkpoint.name, "threads": args.threads, "tokens": args.tokens, "speeds": speeds})
        say(path.stem + ": " + ", ".join(f"{mode} {statistics.median(s):.1f}" for mode, s in speeds.items()))
        if time.monotonic() - started > args.seconds:
            say("more to do: run this again")
            return


def llama_plain(binaries: Path, model: Path, tokens: int, threads: int) -> float:
    command = [binaries / "llama-bench", "-m", model, "-t", threads, "-p", 0, "-n", tokens, "-r", 1, "-o", "json"]
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)[0]["avg_ts"])


def llama_speculative(
    binaries: Path, model: Path, prompt: str, flags: tuple[str, ...], tokens: int, threads: int
) -> float:
    """Greedy; the speed that the tool reports for decoding."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(prompt)
        file.flush()
        command = [binaries / "llama-speculative-simple", "-m", model, "-f", file.name, "-n", tokens, "-t", threads]
        command += ["--temp", 0, "-c", 2048, *flags]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    match = re.search(r"decoded .* speed: +([0-9.]+) t/s", done.stdout + done.stderr)
    if done.returncode or match is None:
        raise SystemExit(f"llama-speculative-simple failed:\n{done.stderr[-2000:]}")
    return float(match[1])


# --- tables ---


def ratio(runs: dict[str, Any], setting: str) -> tuple[float, float, float]:
    """(geometric mean of the paired ratios to plain, lower and upper end of its 95 % interval)."""
    pairs = zip(runs[setting]["tokens_per_s"], runs["plain"]["tokens_per_s"], strict=True)
    logs = [math.log(a / b) for a, b in pairs]
    mean = statistics.mean(logs)
    if len(logs) < 2:
        return math.exp(mean), 0.0, math.inf
    half = T95[min(len(logs) - 2, len(T95) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def geometric(values: list[float]) -> float:
    return math.exp(statistics.mean(map(math.log, values)))


def table(args: argparse.Namespace) -> None:
    if not args.out.is_dir():
        raise SystemExit(f"{args.out} is not there: `run` makes it; --out takes another folder of bench/results")
    for folder in sorted(path for path in args.out.iterdir() if path.is_dir()):
        parts = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json"))}
        ours = {stem: part for stem, part in parts.items() if "runs" in part}
        theirs = {stem: part for stem, part in parts.items() if "speeds" in part}
        equal = [part for part in parts.values() if "equal" in part]
        if ours:
            _table_ours(folder.name, ours)
        if equal:
            tokens, accepted = (sum(part[key] for part in equal) for key in ("equal", "from_drafts"))
            print(f"\n{folder.name}: {tokens:,} tokens of {len(equal)} texts equal with and without drafting,")
            print(f"{accepted:,} of them proposed.")
        if theirs:
            _table_theirs(theirs)


def _table_ours(name: str, ours: dict[str, Any]) -> None:
    first = next(iter(ours.values()))
    rounds = sorted({part["rounds"] for part in ours.values()})
    tokens = sorted({part["tokens"] for part in ours.values()})
    print(f"\n{name}: {first['kernel']}, {first['threads']} threads, {tokens} tokens, {rounds} rounds\n")
    print("| kind | prompts | plain, tokens/s | auto to plain | worst (95 %) | tokens per step | best fixed setting |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    groups: dict[str, list[dict[str, Any]]] = {}
    for stem, part in ours.items():
        kind, _, heat = stem.split("-")
        groups.setdefault(kind if heat == "greedy" else f"{kind}, T {heat}", []).append(part)
    means: dict[str, float] = {}
    for kind, members in groups.items():
        done = [m["runs"] for m in members if "auto" in m["runs"]]
        if not done:
            continue
        speed = statistics.median(statistics.median(r["plain"]["tokens_per_s"]) for r in done)
        ratios = [ratio(r, "auto") for r in done]
        worst = min(ratios)
        steps = statistics.mean(r["auto"]["tokens_per_step"] for r in done)
        some = [r for r in done if set(FIXED) <= set(r)]
        best = "-"
        if some:
            value, which = max((geometric([ratio(r, setting)[0] for r in some]), setting) for setting in FIXED)
            auto = geometric([ratio(r, "auto")[0] for r in some])
            best = f"{which} {value:.2f}, auto {auto:.2f}: {auto / value:.2f} ({len(some)} texts)"
        means[kind] = geometric([r[0] for r in ratios])
        print(
            f"| {kind} | {len(done)} | {speed:.1f} | {means[kind]:.2f} "
            f"| {worst[0]:.2f} ({worst[1]:.2f}-{worst[2]:.2f}) | {steps:.2f} | {best} |"
        )
    print(over_kinds("auto to plain", means))
    slow = [stem for stem, part in ours.items() if "auto" in part["runs"] and ratio(part["runs"], "auto")[2] < 0.97]
    below = [stem for stem, part in ours.items() if "auto" in part["runs"] and ratio(part["runs"], "auto")[0] < 1]
    print(f"Prompts whose 95 % interval lies wholly below 0.97: {', '.join(slow) or 'none'}; below 1: {len(below)}.")
    distinct = sum(part["tokens"] for part in ours.values())
    print(f"Tokens of {len(ours)} texts equal in every setting and round: {distinct:,}.")
    without = [s for s in SETS["without"] if any(s in part["runs"] for part in ours.values())]
    if without:
        print("\n| auto without | tokens/s to auto |\n|---|---:|")
    for setting in without:
        runs = [part["runs"] for part in ours.values() if setting in part["runs"] and "auto" in part["runs"]]
        loss = geometric([ratio(r, setting)[0] / ratio(r, "auto")[0] for r in runs])
        print(f"| {setting.removeprefix('without-')} ({len(runs)} texts) | {loss:.2f} |")


def _table_theirs(theirs: dict[str, Any]) -> None:
    print("\n| kind | prompts | llama.cpp Q8_0 plain | its best mode | twobit auto | to plain | to best |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    groups: dict[str, list[dict[str, float]]] = {}
    ratios: dict[str, float] = {}
    for stem, part in theirs.items():
        if "twobit auto" in part["speeds"]:
            speeds = {mode: statistics.median(values) for mode, values in part["speeds"].items()}
            groups.setdefault(stem.split("-")[0], []).append(speeds)
    for kind, members in groups.items():
        means = {mode: geometric([speeds[mode] for speeds in members]) for mode in members[0]}
        auto = means["twobit auto"]
        ratios[kind] = auto / means["plain"]
        best = max((mode for mode in means if mode in MODES), key=lambda mode: means[mode])
        print(
            f"| {kind} | {len(members)} | {means['plain']:.1f} | {best} {means[best]:.1f} | {auto:.1f} "
            f"| {auto / means['plain']:.2f} | {auto / means[best]:.2f} |"
        )

    print(over_kinds("twobit to llama.cpp's plain decoding", ratios))


def over_kinds(what: str, means: dict[str, float]) -> str:
    kinds = [means[kind] for kind in ("code", "prose", "chat") if kind in means]
    return f"\nGeometric mean of code, prose and chat, greedy, {what}: {geometric(kinds):.2f}." if kinds else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("run", run), ("equality", equality), ("llama", llama), ("table", table)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "speculation")
        if name == "table":
            continue
        command.add_argument("--model", type=Path, default=ROOT / "build" / "demo" / "smollm2-2bit")
        command.add_argument("--name", help="what the model is called [its folder]")
        if name == "llama":
            command.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "demo" / "smollm2")
        command.add_argument("--kinds", default=",".join(PROMPTS))
        command.add_argument("--prompts", type=int, default=12, help="the first so many of each kind")
        command.add_argument("--heats", default=",".join(TEMPERATURES))
        command.add_argument("-n", "--tokens", type=int, default=96)
        command.add_argument("-r", "--rounds", type=int, default=3)
        command.add_argument("-t", "--threads", type=int, default=2)
        command.add_argument("--seconds", type=float, default=math.inf)
        if name == "run":
            command.add_argument("--set", default="plain,auto", help="of " + ", ".join(SETS))
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
