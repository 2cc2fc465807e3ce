"""`twobit quantize`: a Hugging Face checkpoint becomes a twobit model."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

from twobit.cli import options, output
from twobit.cli.command import Argument, Option
from twobit.errors import UsageError

if TYPE_CHECKING:
    from twobit.quant.plan import Plan


def quantize(
    source: Annotated[str, Argument(metavar="SRC", help="Folder of the full-precision checkpoint, or a Hub id")],
    out: Annotated[str, Option("-o", "--output", metavar="OUT", help="Folder to make")],
    residual: Annotated[int, Option("--residual", metavar="6|8", help="Residual bits of the linears")] = 6,
    residual_group: Annotated[
        int, Option("--residual-group", metavar="16|32", help="Columns per residual factor")
    ] = 16,
    draft_bpw: Annotated[
        float | None,
        Option("--draft-bpw", metavar="X", help="Draft bits per weight: 3-bit codes where they pay most"),
    ] = None,
    rule: Annotated[
        list[str] | None,
        Option(
            "--rule",
            metavar="PATTERN=b+R",
            help="Bits of the matrices with such names; may repeat, the last match counts",
        ),
    ] = None,
    calib: Annotated[
        list[str] | None,
        Option("--calib", metavar="FILE", help="Calibrate on this UTF-8 text instead of ours; may repeat"),
    ] = None,
    calib_tokens: Annotated[
        int | None, Option("--calib-tokens", metavar="N", help="Tokens to calibrate on [32768]")
    ] = None,
    seed: Annotated[int, Option("--seed", metavar="N", help="Another choice of calibration text")] = 0,
    threads: options.Threads = None,
    device: Annotated[str, Option("--device", metavar="cpu|cuda", help="Where torch computes")] = "cpu",
    spill_dir: Annotated[
        str | None,
        Option("--spill-dir", metavar="DIR", help="Folder for the hidden states [the unfinished output]"),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Say what would be made and taken, make nothing")] = False,
    restart: Annotated[bool, Option("--restart", help="Discard what an unfinished run left")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the twobit model at OUT")] = False,
    as_json: Annotated[bool, Option("--json", help="One JSON object on stdout, no progress")] = False,
) -> int:
    """Split a checkpoint into a 2-bit draft and its residual.

    The same source and options give the same bytes, whatever the number of threads. A run that stopped goes on where it
    was when started again. Needs the extra: pip install "twobit[quantize]".

    \b
    twobit quantize ./SmolLM2-135M-Instruct -o ./smollm2-2bit
    twobit quantize HuggingFaceTB/SmolLM2-135M-Instruct -o ./smollm2-2bit
    twobit quantize ./model -o ./out --residual 8 --rule 'down_proj=3+8'
    twobit quantize ./model -o ./out --dry-run
    """
    target, texts = options.local(out, "-o"), options.text_files("--calib", calib)
    spill = None if spill_dir is None else options.local(spill_dir, "--spill-dir")
    for name, folder in (("-o", target.parent), ("--spill-dir", spill)):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise UsageError(f"{name}: {folder} is a file, not a folder", "choose another folder")
    options.local(source, "SRC")

    from twobit.quant import calibrate
    from twobit.quant.pipeline import quantize as make
    from twobit.quant.plan import Options, plan
    from twobit.quant.recipe import Recipe, Rule
    from twobit.runtime.lib import default_threads

    settings = Options(
        recipe=Recipe(residual, residual_group, tuple(Rule.parse(text) for text in rule or ())),
        draft_bpw=draft_bpw,
        calib=texts,
        calib_tokens=calibrate.DEFAULT_TOKENS if calib_tokens is None else calib_tokens,
        seed=options.integer("--seed", seed, 0, options.MAX_SEED),
        threads=options.threads(threads) or default_threads(),
        device=device,
        spill=spill,
        restart=restart,
        overwrite=overwrite,
    )
    if find_spec("torch") is None:  # a missing extra is told before any work
        raise ModuleNotFoundError("torch", name="torch")
    checkpoint = options.checkpoint_folder(source, quiet=as_json)
    if dry_run:
        _show_plan(plan(checkpoint, target, settings), as_json)
        return 0
    from twobit.cli.progress import Bars

    progress = Bars(quiet=as_json)
    try:
        summary = make(checkpoint, target, settings, progress)
    except KeyboardInterrupt:
        progress.close()
        output.note("stopped: the same command goes on where it was, with --restart it begins again")
        raise
    finally:
        progress.close()
    if as_json:
        output.result(summary)
    else:
        _show_summary(summary)
    return 0


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _bits(data: Any) -> list[tuple[str, str]]:
    head = data["head_bpw"]
    return [
        ("parameters", f"{data['parameters']:,}"),
        ("bits per weight", f"{data['draft_bpw']:.3f} draft + {data['residual_bpw']:.3f} residual"),
        ("  head, embeddings", f"{head['draft']:.3f} draft + {head['residual']:.3f} residual"),
        ("size", f"{_gb(data['draft_bytes'])} draft + {_gb(data['residual_bytes'])} residual"),
    ]


def _show_plan(made: Plan, as_json: bool) -> None:
    data = made.to_json()
    if as_json:
        output.result(data)
        return
    output.table(
        [
            ("family", made.family),
            *_bits(data),
            ("disk while it runs", _gb(made.disk_bytes)),
            ("memory at most", f"{_gb(made.memory_bytes)} (one layer with its Hessians, or the head)"),
            (
                "time, roughly",
                f"{_duration(data['estimated_seconds'])} on {made.threads} threads, from probes just now",
            ),
            *((f"  {part}", _duration(seconds)) for part, seconds in made.seconds.items()),
            ("calibration", f"{made.calibration_tokens:,} tokens"),
        ]
    )


def _show_summary(summary: dict[str, Any]) -> None:
    errors = summary["errors"]
    output.table(
        [
            ("output", output.clean(summary["output"])),
            *_bits(summary),
            *((f"relative error, {of}", f"{e['draft']:.3f} draft, {e['full']:.5f} full") for of, e in errors.items()),
            (
                "peak memory",
                f"{_gb(summary['peak_ram_bytes'])} (at most {_gb(summary['expected_ram_bytes'])})",
            ),
            ("time", f"{summary['seconds']:.1f} s"),
            ("build", summary["build_id"]),
        ]
    )
