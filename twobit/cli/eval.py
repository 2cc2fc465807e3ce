"""`twobit eval`: how close a model is to its reference, and how much of its draft is accepted."""

from __future__ import annotations

from typing import Annotated, Any

from twobit.cli import options, output
from twobit.cli.command import Option
from twobit.errors import UsageError


def eval(
    model: options.ModelName,
    reference: Annotated[
        str, Option("--reference", metavar="SRC", help="The checkpoint that MODEL was made from, a folder or a Hub id")
    ],
    text: Annotated[
        list[str] | None, Option("--text", metavar="FILE", help="Measure on this UTF-8 text too; may repeat")
    ] = None,
    tokens: Annotated[
        int | None,
        Option("--tokens", metavar="N", help="Tokens of continuations, and at most as many of text [4096]"),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        Option("--baseline", metavar="q8_0|q4_0", help="Compare with this format; may repeat [q8_0]"),
    ] = None,
    no_acceptance: Annotated[bool, Option("--no-acceptance", help="Leave out what the draft yields")] = False,
    threads: Annotated[int | None, Option("-t", metavar="THREADS", help="Threads [one per usable core]")] = None,
    as_json: Annotated[bool, Option("--json", help="One JSON object on stdout, no progress")] = False,
) -> int:
    """Measure a model against the checkpoint it was made from.

    KL divergence to the checkpoint's own next-token distribution, on the checkpoint's own continuations of bundled
    prompts, of the model and of llama.cpp's Q8_0; and how many drafted tokens a step accepts. Layers are read one at
    a time, so the checkpoint may be bigger than the memory. Needs the extra: pip install "twobit[quantize]".

    \b
    twobit eval ./smollm2-2bit --reference ./SmolLM2-135M-Instruct
    twobit eval ./model --reference ./source --text book.txt --baseline q8_0 --baseline q4_0 --json
    """
    texts = options.text_files("--text", text)
    options.local_or_hub(model)
    options.local(reference, "--reference")
    import torch  # noqa: F401 - a missing extra is told before any work

    from twobit.evaluate import DEFAULT_TOKENS, Options, evaluate
    from twobit.runtime.lib import default_threads

    settings = Options(
        text=texts,
        tokens=DEFAULT_TOKENS if tokens is None else tokens,
        baselines=tuple(dict.fromkeys(baseline or ("q8_0",))),
        acceptance=not no_acceptance,
        threads=options.threads(threads) or default_threads(),
    )
    source = options.checkpoint_folder(reference, quiet=as_json)
    if not source.is_dir():
        raise UsageError(f"--reference {reference}: no such folder", "give the checkpoint's folder, or its Hub id")
    folder = options.model_folder(model, quiet=as_json)
    from twobit.cli.progress import Bars

    progress = Bars(quiet=as_json)
    try:
        data = evaluate(folder, source, settings, progress).to_json()
    finally:
        progress.close()
    if as_json:
        output.result(data)
    else:
        show(data)
    return 0


def _perplexity(value: float | None) -> str:
    return "over 1e308" if value is None else f"{value:.3f}" if value < 1e6 else f"{value:.3g}"


def show(data: dict[str, Any]) -> None:
    """The tables for people."""
    output.line(f"KL(reference || x) over {data['tokens']:,} tokens, nats per token")
    output.table(
        [
            ("", "mean", "+-", "median", "p99", "same top token", "perplexity"),
            ("reference", "", "", "", "", "", _perplexity(data["perplexity"]["reference"])),
            *(
                (
                    name,
                    *(f"{kl[key]:.6f}" for key in ("mean", "stderr", "median", "p99")),
                    f"{100 * kl['top1']:.2f} %",
                    _perplexity(data["perplexity"][name]),
                )
                for name, kl in data["kl"].items()
            ),
        ]
    )
    if data["paired"]:
        output.line()
        ratios = [
            (names.replace("/", " / "), f"{pair['ratio']:.3f}", f"{pair['ratio_stderr']:.3f}")
            for names, pair in data["paired"].items()
        ]
        output.table([("ratio of the means", "", "+-"), *ratios])
    if "acceptance" not in data:
        return
    greedy = data["acceptance"]
    if not greedy["blocks"]:
        output.note("too few tokens to measure what the draft yields: give a larger --tokens")
        return
    output.line()
    output.line("Tokens per step, the step's own token included")
    rows: list[tuple[str, ...]] = []
    for name, one in (("greedy", greedy), (f"temperature {greedy['sampled']['temperature']}", greedy["sampled"])):
        if not one["blocks"]:
            continue
        for policy, prefix in ((f"chain of {greedy['drafted']}", ""), ("tree of 16", "tree16_")):
            mean, kinds = one["tree16_tokens_per_step" if prefix else "tokens_per_step"], one[f"{prefix}by_kind"]
            cells = [f"{mean:.2f}", f"{one[f'{prefix}stderr']:.2f}", *(f"{value:.2f}" for value in kinds.values())]
            rows.append((f"{name}, {policy}", *cells, f"{one[f'{prefix}blocks']:,}"))
    output.table([("", "mean", "+-", *greedy["by_kind"], "blocks"), *rows])
    output.line()
    depths = [str(depth) for depth in range(1, greedy["drafted"] + 1)]
    output.table(
        [
            ("depth of a greedy chain", *depths),
            ("accepted", *(f"{value:.2f}" for value in greedy["accepted_by_depth"])),
            ("KL(verifier || draft)", *(f"{value:.3f}" for value in greedy["kl_by_depth"])),
        ]
    )
