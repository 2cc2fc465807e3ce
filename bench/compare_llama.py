#!/usr/bin/env python3
"""Speed of twobit and of llama.cpp's Q8_0 on the same model, alternated in one run.

    python scripts/peers.py
    python bench/compare_llama.py --checkpoint build/demo/smollm2 --model build/demo/smollm2-2bit [-r 5] [-n 64]

Tests, named as llama-bench names them: tgN, decoding N tokens one by one; pp4 and pp16, batches of so many tokens as
verifying a draft has them; pp512, prefill. Every round takes, for each number of threads, llama-bench, the bandwidth
probe, and twobit; then comes the next round, so that whatever else runs slows all of them. twobit decodes after three
unrepetitive prompts (code, prose, chat), with drafting and without; the text must be the same. End tokens do not end a
run. Shown are medians over the rounds, the lowest and highest, and the ratio of medians to llama.cpp's.
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
import show  # noqa: E402

from twobit import benchmark  # noqa: E402
from twobit.runtime.model import Model  # noqa: E402
from twobit.runtime.tokenizer import Tokenizer  # noqa: E402

BATCHES = (4, 16)
PREFILL = 512


def llama_bench(model: Path, threads: int, *arguments: str) -> dict[str, float]:
    """Tokens/s by test of one `llama-bench` run."""
    command = [peers.BINARIES / "llama-bench", "-m", model, "-t", threads, "-r", 1, "-o", "json", *arguments]
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    return {
        f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}": float(row["avg_ts"])
        for row in json.loads(done.stdout)
    }


def llama(model: Path, threads: int, tokens: int) -> dict[str, float]:
    """A batch is short, so it is taken three times; a long prompt needs no warming up."""
    batches = ",".join(map(str, BATCHES))
    return llama_bench(model, threads, "-p", batches, "-n", str(tokens), "-r", "3") | llama_bench(
        model, threads, "-p", str(PREFILL), "-n", "0", "--no-warmup"
    )


def measure(model: Path, gguf: Path, rounds: int, tokens: int, threads: list[int]) -> dict[str, Any]:
    """Runs all rounds; one row per test, engine and number of threads."""
    opened = Model.open(model)
    tokenizer = Tokenizer.load(model, config=opened.config, rows=opened.vocab)
    rates: dict[tuple[int, str, str], list[float]] = {}
    reads: dict[int, float] = {}
    for number in range(rounds):
        for n in threads:
            peer = llama(gguf, n, tokens)
            report = benchmark.speeds(
                opened, tokenizer, prompts=[*BATCHES, PREFILL], new=tokens, repeats=1, threads=[n], warm=number == 0
            )
            for test, rate in peer.items():
                rates.setdefault((n, test, "llama.cpp Q8_0"), []).append(rate)
            for row in report.results:
                engine = "twobit, drafting" if row["draft"] else "twobit"
                rates.setdefault((n, row["test"], engine), []).append(row["tokens_per_s"])
            reads[n] = max(reads.get(n, 0), report.probes[0].read_gb_s)
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    size = {"llama.cpp Q8_0": gguf_read_bytes(gguf, opened), "twobit": benchmark.read_bytes(opened)}
    rows = []
    for (n, test, engine), values in sorted(rates.items()):
        median, base = statistics.median(values), statistics.median(rates[n, test, "llama.cpp Q8_0"])
        row = {"threads": n, "test": test, "engine": engine, "tokens_per_s": median, "low": min(values)}
        row |= {"high": max(values), "ratio": median / base}
        if test.startswith("tg") and engine in size:
            row["gb_s"] = size[engine] * median * 1e-9
        rows.append(row)
    return {
        "model": model.name,
        "machine": benchmark.machine(opened.level),
        "rounds": rounds,
        "probe_gb_s": {str(n): value for n, value in reads.items()},
        "results": rows,
    }


def gguf_read_bytes(gguf: Path, model: Model) -> float:
    """Bytes that one token reads there: the file, less an input embedding apart from the head (8.5 bits)."""
    own = 0 if model.architecture.tied else model.vocab * model.architecture.hidden * 8.5 / 8
    return gguf.stat().st_size - own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "demo" / "smollm2")
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "demo" / "smollm2-2bit")
    parser.add_argument("-r", "--rounds", type=int, default=5)
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("-t", "--threads", default="1,2")
    parser.add_argument("--json", type=Path, help="also write the results here")
    args = parser.parse_args()
    gguf = peers.convert(args.checkpoint.resolve())
    data = measure(args.model, gguf, args.rounds, args.tokens, [int(n) for n in args.threads.split(",")])
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(data, indent=2) + "\n")
    show.show_llama(data)


if __name__ == "__main__":
    main()
