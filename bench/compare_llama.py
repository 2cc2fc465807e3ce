#!/usr/bin/env python3
"""Decoding speed of twobit and of llama.cpp's Q8_0 on the same model, alternated in one run.

    python scripts/peers.py
    python bench/compare_llama.py --checkpoint build/demo/smollm2 --model build/demo/smollm2-2bit [-r 5] [-n 128] [-t 2]

Every round runs `llama-bench` (tg of n tokens), then twobit without drafting and with drafting on each of three
unrepetitive prompts (code, prose, chat); then comes the next round, so that whatever else runs slows all of them.
Shown are medians over the rounds, the lowest and highest, and the ratio of medians to llama.cpp's. End tokens do not
end a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import peers  # noqa: E402

from twobit.runtime.generate import Result, generate  # noqa: E402
from twobit.runtime.model import Model  # noqa: E402
from twobit.runtime.sampling import Sampling  # noqa: E402
from twobit.runtime.session import Session, StepOptions  # noqa: E402
from twobit.runtime.tokenizer import Tokenizer  # noqa: E402

PROMPTS = {
    "code": "Write a Python class for a priority queue that supports changing priorities, with a short usage example.",
    "prose": "Write a short story about a cartographer who discovers that one of the rivers on her map has moved.",
    "chat": "I have three free days in autumn and like walking, old towns and good bread. Where should I go, and why?",
}


def llama_bench(model: Path, tokens: int, threads: int) -> float:
    """Tokens/s of one `llama-bench` tg run (which warms up by itself)."""
    command = [peers.BINARIES / "llama-bench", "-m", model, "-t", threads, "-p", 0, "-n", tokens, "-r", 1, "-o", "json"]
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)[0]["avg_ts"])


def twobit_run(session: Session, tokenizer: Tokenizer, prompt: list[int], tokens: int, draft: bool) -> Result:
    """One greedy generation of exactly `tokens` tokens from an empty cache."""
    session.rewind(0)
    step = StepOptions(eos=frozenset()) if draft else StepOptions(eos=frozenset(), draft_max=0)
    result = None
    for event in generate(session, tokenizer, prompt, Sampling(), step, max_tokens=tokens):
        if isinstance(event, Result):
            result = event
    assert result is not None
    assert len(result.token_ids) == tokens
    return result


def measure(model: Path, gguf: Path, rounds: int, tokens: int, threads: int) -> dict[str, Any]:
    """Runs all rounds; speeds in tokens/s by test, tokens per step by prompt."""
    opened = Model.open(model)
    tokenizer = Tokenizer.load(model, config=opened.config, rows=opened.vocab)
    session = Session(opened, 1024 + tokens, threads)
    prompts = {kind: tokenizer.chat_ids([{"role": "user", "content": text}]) for kind, text in PROMPTS.items()}
    speeds: dict[str, list[float]] = {}
    steps: dict[str, float] = {}
    for number in range(rounds):
        speeds.setdefault("llama.cpp Q8_0", []).append(llama_bench(gguf, tokens, threads))
        means: dict[str, list[float]] = {"plain": [], "drafted": []}
        for kind, prompt in prompts.items():
            plain = twobit_run(session, tokenizer, prompt, tokens, draft=False)
            drafted = twobit_run(session, tokenizer, prompt, tokens, draft=True)
            if plain.token_ids != drafted.token_ids:
                raise SystemExit(f"{kind}: tokens with drafting differ from those without")
            for mode, result in (("plain", plain), ("drafted", drafted)):
                speeds.setdefault(f"twobit {mode}, {kind}", []).append(result.decode_tokens_per_s)
                means[mode].append(result.decode_tokens_per_s)
            steps[kind] = drafted.tokens_per_step
        for mode, values in means.items():
            speeds.setdefault(f"twobit {mode}, mean", []).append(statistics.mean(values))
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    base = statistics.median(speeds["llama.cpp Q8_0"])
    return {
        "model": model.name,
        "kernel": opened.level,
        "threads": threads,
        "tokens": tokens,
        "rounds": rounds,
        "results": [
            {
                "test": test,
                "tokens_per_s": statistics.median(values),
                "low": min(values),
                "high": max(values),
                "ratio": statistics.median(values) / base,
            }
            for test, values in speeds.items()
        ],
        "drafted_to_plain": statistics.median(speeds["twobit drafted, mean"])
        / statistics.median(speeds["twobit plain, mean"]),
        "tokens_per_step": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "demo" / "smollm2")
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "demo" / "smollm2-2bit")
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("-n", "--tokens", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args()
    gguf = peers.convert(args.checkpoint.resolve())
    data = measure(args.model, gguf, args.rounds, args.tokens, args.threads)
    if args.json:
        print(json.dumps(data, indent=2))
        return
    print(
        f"{data['model']}, {data['threads']} threads, {data['kernel']}, medians of {data['rounds']} alternated rounds\n"
    )
    print("| test | tokens/s | lowest-highest | to llama.cpp Q8_0 |\n|---|---:|---:|---:|")
    for row in data["results"]:
        spread = f"{row['low']:.1f}-{row['high']:.1f}"
        print(f"| {row['test']} | {row['tokens_per_s']:.1f} | {spread} | {row['ratio']:.2f} |")
    print(f"\ndrafted to plain: {data['drafted_to_plain']:.2f}; tokens per step: ", end="")
    print(", ".join(f"{kind} {value:.2f}" for kind, value in data["tokens_per_step"].items()))


if __name__ == "__main__":
    main()
