"""`twobit bench`: how fast a model runs here, and how near its kernels come to the machine's limits."""

from __future__ import annotations

import csv
import io
from typing import Annotated, Any

from twobit.cli import options, output
from twobit.cli.command import Option
from twobit.errors import UsageError, impossible

FORMATS = ("md", "csv", "json")
MOST_TOKENS = 1 << 20
MOST_REPEATS = 1000

RESULTS = ("test", "draft", "threads", "tokens_per_s", "spread", "tokens_per_step", "read_gb_s", "other_ms")
KERNELS = (
    "op", "threads", "rows", "cols", "bits", "m", "seconds", "spread", "ratio_to_m1", "gb_s", "gmac_s", "limit",
    "roofline_fraction",
)  # fmt: skip


def bench(
    model: options.ModelName,
    prompt: Annotated[
        str, Option("-p", metavar="N,...", help="Prompts of so many tokens to evaluate; 0: none")
    ] = "512",
    new: Annotated[int, Option("-n", metavar="N", help="New tokens to decode; 0: none")] = 128,
    depth: Annotated[int, Option("-d", metavar="N", help="Tokens of context before what is decoded")] = 0,
    repeats: Annotated[int, Option("-r", metavar="N", help="Rounds; the first, to warm up, comes extra")] = 5,
    threads: Annotated[
        str | None, Option("-t", metavar="N,...", help="Numbers of threads [one per usable core]")
    ] = None,
    kernels: Annotated[bool, Option("--kernels", help="Add the roofline table of the matrix kernels")] = False,
    form: Annotated[str, Option("--format", metavar="|".join(FORMATS), help="How to show it")] = "md",
    as_json: Annotated[bool, Option("--json", help="One JSON object on stdout; as --format json")] = False,
) -> int:
    """Measure prefill (pp) and decoding (tg), with and without drafting, without loading and tokenizing.

    Rounds alternate what is compared. Shown are medians, and the spread: highest minus lowest, as a share of the
    median. Decoding is greedy after three fixed prompts (code, prose, chat); "other ms" is its time per token outside
    of matrix products. With --kernels: every matrix shape of the model times M tokens, against the read bandwidth and
    the multiply peak that are probed in the same rounds; there the spread is from the 10th to the 90th percentile. A
    fraction above 1 means that the run is not valid: the exit code is then 1.

    \b
    twobit bench ./model
    twobit bench ./model -p 4,16,512 -n 128 -r 5 -t 1,2 --format json
    twobit bench ./model --kernels -p 0 -n 0
    """
    if form not in FORMATS:
        raise impossible("--format", form, f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    prompts = [] if prompt.strip() == "0" else numbers("-p", prompt, MOST_TOKENS, "; 0, for none, stands alone")
    options.integer("-n", new, 0, MOST_TOKENS)
    options.integer("-d", depth, 0, MOST_TOKENS)
    options.integer("-r", repeats, 1, MOST_REPEATS)
    counts = None if threads is None else numbers("-t", threads, options.MAX_THREADS)
    if not (prompts or new or kernels):
        raise UsageError("-p 0 and -n 0 leave nothing to measure", "add --kernels, or give tokens")
    if depth and not new:
        raise UsageError("-d is about what is decoded: -n 0 leaves nothing to decode")
    if as_json and form not in ("md", "json"):
        raise UsageError(f"--json and --format {form} contradict each other")
    form = "json" if as_json else form
    folder = options.model_folder(model, quiet=form != "md")

    from twobit import benchmark

    quiet = as_json or form == "json"
    report = benchmark.bench(
        folder,
        prompts=prompts,
        new=new,
        depth=depth,
        repeats=repeats,
        threads=counts,
        roofline=kernels,
        progress=(lambda text: None) if quiet else output.note,
    )
    data = report.to_json()
    {"json": output.result, "csv": _csv, "md": _markdown}[form](data)
    for problem in report.invalid:
        output.warn(f"this run is not valid: {problem}")
    return 1 if report.invalid else 0


def numbers(option: str, text: str, most: int, more: str = "") -> list[int]:
    """-t 1,2: each from 1 to `most`, none twice. `more` ends the message of what is possible."""
    parts = [part.strip() for part in text.split(",")]
    found = [int(part) for part in parts if part.isascii() and part.isdecimal() and len(part) < 20]
    if len(found) < len(parts) or not all(1 <= number <= most for number in found):
        raise impossible(option, text, f"numbers from 1 to {most} with commas, as in 1,2{more}")
    if len(set(found)) < len(found):
        raise UsageError(f"{option} {text} names a number twice", "each is measured once")
    return found


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        f"{value:.4g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )


def _csv(data: dict[str, Any]) -> None:
    """The tables, each with its line of names, apart by an empty line."""
    first = True
    for name, columns in (("results", RESULTS), ("kernels", KERNELS)):
        if not data[name]:
            continue
        if not first:
            output.line()
        first = False
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([row.get(column) for column in columns] for row in data[name])
        output.text(text.getvalue())


def _markdown(data: dict[str, Any]) -> None:
    here = data["machine"]
    output.line(f"{here['cpu']}, {here['cores']} usable cores, {here['system']}")
    output.line(f"kernels {here['kernel']}, twobit {here['version']}")
    for probe in data["probes"]:
        many = "s" if probe["threads"] > 1 else ""
        output.line(
            f"probe, {probe['threads']} thread{many}: reads {probe['read_gb_s']:.1f} GB/s, {probe['streams']} streams; "
            f"multiplies {probe['gmac_s']:.0f} GMAC/s (draft: {probe['draft_gmac_s']:.0f}); "
            f"a parallel section takes {probe['section_us']:.2f} us"
        )
    if data["results"]:
        _table(
            ("test", "draft", "threads", "tokens/s", "spread", "tokens/step", "GB/s", "other ms"),
            RESULTS,
            data["results"],
        )
    if data["kernels"]:
        titles = (
            "op",
            "threads",
            "rows",
            "cols",
            "bits",
            "M",
            "ms",
            "spread",
            "to M = 1",
            "GB/s",
            "GMAC/s",
            "limit",
            "of the limit",
        )
        rows = [row | {"seconds": row["seconds"] * 1e3} for row in data["kernels"]]
        _table(titles, KERNELS, rows)


def _table(titles: tuple[str, ...], columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    output.line()
    output.line("| " + " | ".join(titles) + " |")
    output.line("|" + "---|" + "---:|" * (len(titles) - 1))
    for row in rows:
        cells = (f"{row[c]:.0%}" if c in ("spread", "roofline_fraction") else _cell(row.get(c)) for c in columns)
        output.line("| " + " | ".join(cells) + " |")
