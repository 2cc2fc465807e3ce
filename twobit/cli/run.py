"""`twobit run`: answer or continue a prompt."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from twobit.cli import options, output
from twobit.cli.command import Argument, Option
from twobit.errors import UsageError
from twobit.memory import peak_memory
from twobit.runtime.chat_template import start_ahead

if TYPE_CHECKING:  # what takes long to import is imported when a template's process has started
    from twobit.runtime.generate import Result
    from twobit.runtime.tokenizer import Tokenizer


def run(
    model: options.ModelName,
    prompt: Annotated[str, Argument(metavar="PROMPT|-", help="The prompt; - reads standard input")],
    n: Annotated[int | None, Option("-n", metavar="N", help="Most new tokens [all the context holds]")] = None,
    ctx: Annotated[
        int | None, Option("--ctx", metavar="N", help="Context in tokens [8192, more for a longer prompt]")
    ] = None,
    system: options.SystemMessage = None,
    raw: Annotated[bool, Option("--raw", help="Continue the prompt as it is, without chat template")] = False,
    temp: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: Annotated[float, Option("--repeat-penalty", metavar="R", help="1 is none")] = 1.0,
    presence_penalty: Annotated[float, Option("--presence-penalty", metavar="R", help="0 is none")] = 0.0,
    frequency_penalty: Annotated[float, Option("--frequency-penalty", metavar="R", help="0 is none")] = 0.0,
    repeat_last_n: Annotated[
        int, Option("--repeat-last-n", metavar="N", help="Tokens that penalties look at; -1: all")
    ] = 64,
    logit_bias: Annotated[
        list[str] | None, Option("--logit-bias", metavar="ID=X", help="Add X to a token's logit; may repeat")
    ] = None,
    logprobs: Annotated[
        int | None,
        Option("--logprobs", metavar="N", help="Log probability of each token, and the N likeliest with theirs"),
    ] = None,
    seed: Annotated[int, Option("--seed", metavar="N", help="Same seed, same text; another, another")] = 0,
    stop: Annotated[list[str] | None, Option("--stop", metavar="S", help="End before this text; may repeat")] = None,
    no_draft: Annotated[bool, Option("--no-draft", help="Decode without drafting: the same text")] = False,
    draft_max: Annotated[
        int | None, Option("--draft-max", metavar="N", help="Most tokens proposed per step [16]")
    ] = None,
    draft_only: Annotated[bool, Option("--draft-only", help="The 2-bit part alone: another, worse text")] = False,
    device: options.Device = "auto",
    vram: options.Vram = None,
    gpu_residual_layers: options.GpuResidualLayers = "auto",
    threads: options.Threads = None,
    mlock: options.Mlock = False,
    stats: Annotated[bool, Option("--stats", help="Say more about speed on stderr")] = False,
    ids: Annotated[bool, Option("--ids", help="Show token ids of prompt and answer")] = False,
    as_json: Annotated[bool, Option("--json", help="One JSON object on stdout")] = False,
) -> int:
    """Continue a prompt, or answer it where the model has a chat template.

    The text goes to stdout and nothing else does; a line of statistics goes to stderr. The text is the same with and
    without drafting, for any number of threads.

    \b
    twobit run ./model "Why is the sky blue?"
    twobit run ./model - --temp 0.7 --top-p 0.9 --seed 1 <question.txt
    twobit run ./model "Once upon a time" --raw -n 100 --no-draft
    """
    started = time.perf_counter()
    gc.disable()  # the many objects of a manifest stay: looking for garbage among them only takes time
    if not raw:
        start_ahead()
    if logprobs is not None:
        options.integer("--logprobs", logprobs, 0, options.MAX_LOGPROBS)
    sampling = options.sampling(
        temp=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repeat_last_n=repeat_last_n,
        seed=seed,
        bias=logit_bias or (),
    )
    asked = options.where(device, vram, gpu_residual_layers, threads, mlock)
    if n is not None:
        options.integer("-n", n, 0)
    if ctx is not None:
        options.integer("--ctx", ctx, 1)
    if draft_max is not None:
        options.integer("--draft-max", draft_max, 0, options.MAX_DRAFT)
    if no_draft and (draft_only or draft_max):
        raise UsageError(f"--no-draft and {'--draft-only' if draft_only else '--draft-max'} contradict each other")
    if raw and system is not None:
        raise UsageError("--raw has no system message: -s needs the chat template")
    stops = [options.unicode_text("--stop", s) for s in stop or ()]
    if not all(stops):
        raise UsageError("--stop needs a text that is not empty")

    folder = options.model_folder(model, quiet=as_json, draft_only=draft_only)
    text = options.prompt_text(prompt, raw=raw)
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": options.unicode_text("-s", system)})

    from twobit.runtime import tokenizer_cache
    from twobit.runtime.generate import Result, generate
    from twobit.runtime.model import Model
    from twobit.runtime.session import StepOptions
    from twobit.runtime.tokenizer import Tokenizer

    opened = Model.open(folder, draft_only=draft_only)
    tokenizer = Tokenizer.load(folder, config=opened.config, rows=opened.vocab)
    prompt_ids = tokenizer.encode_prompt(text) if raw else tokenizer.chat_ids(messages)
    eos = tokenizer.eos_ids
    tokenizer.close()
    for token in sampling.logit_bias:
        options.integer("--logit-bias ID", token, 0, opened.vocab - 1)
    limit = options.context(ctx, opened.architecture.max_context, len(prompt_ids), n)
    session, where = options.session(opened, asked, limit)
    step = StepOptions(draft_only=draft_only, eos=eos, logprobs=logprobs)
    if no_draft or draft_max is not None:
        step = replace(step, draft_max=0 if no_draft else draft_max or 0)
    gc.enable()
    load_s = time.perf_counter() - started

    if ids and not as_json:
        output.note("prompt ids: " + " ".join(map(str, prompt_ids)))
    done: Result | None = None
    for event in generate(session, tokenizer, prompt_ids, sampling, step, stop=stops, max_tokens=n):
        if isinstance(event, Result):
            done = event
        elif not as_json and event.text:
            output.text(event.text)
    assert done is not None

    if as_json:
        output.result(_json(done, opened, session, sampling.seed, where, load_s, ids, draft_only))
    else:
        output.end_text(done.text)
        if draft_only:
            output.warn("--draft-only is lossy: this is the text of the 2-bit part alone, not the model's")
        if ids:
            output.note("ids: " + " ".join(map(str, done.token_ids)))
        for line in _logprobs(done, tokenizer):
            output.note(line)
        output.note(_summary(done))
        if stats:
            for line in _details(done, opened, session, where, load_s):
                output.note(line)
    if done.finish_reason == "interrupted":
        raise KeyboardInterrupt
    tokenizer_cache.keep(folder / "tokenizer.json")  # all is said: the next start is quicker
    return 0


def _json(
    done: Result, model: Any, session: Any, seed: int, device: str, load_s: float, with_prompt: bool, lossy: bool
) -> dict[str, Any]:
    known = done.to_json()
    data = {
        **{key: known[key] for key in ("text", "token_ids", "prompt_tokens", "finish_reason")},
        "seed": seed,
        "lossy": lossy,
        "device": device,
        "kernel": model.level,
        "threads": session.threads,
        "timing": {"load_s": load_s, **known["timing"]},
        "speculation": known["speculation"],
        **({"logprobs": known["logprobs"]} if "logprobs" in known else {}),
        **_hybrid(model, session),
        "peak_ram_bytes": peak_memory(),
    }
    return data | ({"prompt_token_ids": done.prompt_ids} if with_prompt else {})


def _hybrid(model: Any, session: Any) -> dict[str, Any]:
    """Of a run on a device: what lies there, and the bytes that crossed the bus."""
    if model.placed is None:
        return {}
    placed = model.placed
    return {
        "placement": {
            "device": placed.device.name,
            "gpu_residual_layers": placed.residual_layers,
            "residual_head": placed.residual_head,
            "vram_bytes": placed.device.used,
            "pass_tokens": placed.pass_tokens,
        },
        "bus": session.bus,
    }


def _summary(done: Result) -> str:
    speed = (
        f"{len(done.token_ids)} tokens, {done.decode_tokens_per_s:.1f} tokens/s, {done.tokens_per_step:.2f} per step"
    )
    prompt = f"prompt {len(done.prompt_ids)} tokens"
    if done.prefill_tokens:
        prompt += f", {done.prefill_tokens_per_s:.1f} tokens/s"
    return f"{speed}; {prompt}; {done.finish_reason}"


def _logprobs(done: Result, tokenizer: Tokenizer) -> list[str]:
    """A line per token: its log probability, and after it the likeliest with theirs."""
    lines = []
    for i, (token, logprob) in enumerate(zip(done.token_ids, done.logprobs, strict=False)):
        top = done.top_logprobs[i] if done.top_logprobs else []
        others = "".join(f"  {tokenizer.decode([t])!r} {value:.3f}" for t, value in top)
        lines.append(f"{logprob:8.3f} {tokenizer.decode([token])!r}" + (f" |{others}" if others else ""))
    return lines


def _hybrid_rows(model: Any, session: Any) -> list[tuple[str, str]]:
    if model.placed is None:
        return []
    placed, bus = model.placed, session.bus
    crossed = ", ".join(f"{name} {(of['to'] + of['back']) / 1e6:.1f}" for name, of in bus.items())
    layers = f"residual of {placed.residual_layers} layers{' and the head' if placed.residual_head else ''}"
    return [
        ("device", f"{placed.device.name}: {placed.device.used / 1e6:.0f} MB, {layers}"),
        ("bus", f"MB in {crossed}; weights {sum(of['weights'] for of in bus.values()) / 1e6:.1f}"),
    ]


def _shares(accepted: list[int], drafted: list[int]) -> str:
    padded = accepted + [0] * (len(drafted) - len(accepted))
    return " ".join(f"{a / d:.0%}" for a, d in zip(padded, drafted, strict=True) if d)


def _details(done: Result, model: Any, session: Any, device: str, load_s: float) -> list[str]:
    """The table of --stats."""
    tokens = max(len(done.token_ids), 1)
    chained = f", {done.chained} of them chained on the device" if done.chained else ""
    rows = [
        ("machine", f"{device}, kernels {model.level}, {session.threads} threads"),
        ("memory", f"{peak_memory() / 1e6:.0f} MB at most"),
        *_hybrid_rows(model, session),
        (
            "seconds",
            f"load {load_s:.2f}, prompt {done.prefill_s:.2f}, decode {done.decode_s:.2f} "
            f"(draft {done.draft_s:.2f}, verify {done.verify_s:.2f}, sample {done.sample_s:.2f})",
        ),
        ("steps", f"{done.steps}, {done.tokens_per_step:.2f} tokens each; {done.draft_passes} draft passes{chained}"),
        ("proposed", f"{done.drafted} tokens, {done.accepted} accepted"),
        ("weights", f"{done.weight_bytes / tokens / 1e6:.1f} MB read per token, {done.read_gb_s:.1f} GB/s"),
    ]
    rows += [
        (f"  {kind}", f"{accepted} of {drafted} accepted, {accepted / drafted:.0%}")
        for kind, (drafted, accepted) in done.by_kind.items()
        if drafted
    ]
    if done.overlapped[0]:
        passes, early, good = done.overlapped
        rows.append(("  meanwhile", f"{passes} passes drafted during verifications: {early} proposed, {good} accepted"))
    if done.full_steps:
        rows.append(("  precision", f"{done.full_steps} steps drafted with the residual that the GPU has"))
    if done.drafted:
        rows.append(("  by depth", _shares(done.accepted_by_depth, done.drafted_by_depth)))
    belief = done.belief
    if belief is not None and belief.plain_s > 0:
        verify = ", ".join(f"{m}: {belief.verify[m]:.2f}" for m in sorted(belief.verify) if m in (2, 4, 8, 16, 32))
        rows.append(("believed", f"plain step {belief.plain_s * 1e3:.1f} ms; in plain steps:"))
        rows.append(("  draft", f"{belief.draft.get(1, 0):.2f} over {belief.head_rows} rows of the vocabulary"))
        if verify:
            rows.append(("  verify", f"tokens at once {verify}"))
        rows.append(("  rate", f"{belief.rate:.2f} tokens per plain step as of late"))
    return [f"{name:<12}{value}" for name, value in rows]
