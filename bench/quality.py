#!/usr/bin/env python3
"""Quality on the reference checkpoints: quantize, measure, page. What is done is kept; the same command goes on.

    python bench/quality.py run [--checkpoint smollm2]... [--recipe 2+6]... [--part kl]... [--tokens N]
    python bench/quality.py compare build/quality/smollm2/2+6 build/quality/smollm2/2+8
    python bench/quality.py collect > bench/results/quality.json
    python bench/quality.py page > docs/quality.md

Parts, each a file in the folder of its checkpoint and recipe below --out; delete one to measure it again:

    quantize    model/ and quantize.json: bits, errors, calibration, and which recipes shared the pass (all that were
                asked for and not made yet; the models are those that `twobit quantize` makes)
    kl          kl.json, tokens.npz: divergences from the checkpoint and from Q8_0's, weights alone and as they run
    acceptance  acceptance.json, texts.json: the model's own greedy texts, and what its draft yields along them
    peer        peer.json: drafted tokens accepted of 8 beside llama.cpp's Q2_K with importance matrix under the same
                head, both in torch on the texts of `acceptance`, over the checkpoint's keys and values, blocks of 8
                that begin every 4 tokens; needs `make peers`
    crosscheck  crosscheck.json: KL(f32 || Q8_0) by llama.cpp's own perplexity tool beside what `kl` takes for it, on
                the texts of `acceptance` in chunks of 512; needs `make peers`
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twobit.errors import FormatError, TwobitError
from twobit.quant.recipe import Recipe

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "quality.json"
CHECKPOINTS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma-3-270M", "qwen": "Qwen2.5-Coder-1.5B-Instruct"}
RECIPES = {"2+6": Recipe(), "2+6-g32": Recipe(residual_group=32), "2+8": Recipe(residual=8)}
PARTS = ("quantize", "kl", "acceptance", "peer", "crosscheck")
OF_DEFAULT = ("acceptance", "peer", "crosscheck")  # measured of 2+6 alone: the other recipes' drafts differ little
AIMS = {"smollm2": (4.0, 1.3), "gemma3": (4.4, 1.3), "qwen": (5.2, 1.15)}  # accepted of 8, and as a multiple of Q2_K's
MOST_ERROR = 0.08  # standard error of the accepted of 8
IMPORTANCE_TOKENS = 8192
Q2_K_BITS = 84 * 8 / 256
CHUNK = 512  # tokens that llama-perplexity evaluates at once; it scores the second half


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write(path: Path, data: Any) -> None:
    """JSON, complete or absent."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path}: not JSON: {error}", "delete it: `run` measures it again") from error


def checkpoint(name: str) -> Path:
    """The folder of a reference checkpoint, made if it is not there."""
    command = [sys.executable, str(ROOT / "scripts" / "reference_checkpoints.py"), name]
    return Path(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


def run(args: argparse.Namespace) -> None:
    for name in args.checkpoint or CHECKPOINTS:
        for recipe in args.recipe or RECIPES:
            folder = args.out / name / recipe
            folder.mkdir(parents=True, exist_ok=True)
            for part in args.part or PARTS:
                if (folder / f"{part}.json").exists() or (part in OF_DEFAULT and recipe != "2+6"):
                    continue
                say(f"{name}, {recipe}: {part}")
                started, source = time.monotonic(), checkpoint(name)
                found = MEASURE[part](folder, source, args)
                write(folder / f"{part}.json", found | {"wall_seconds": round(time.monotonic() - started, 1)})


def quantize(folder: Path, source: Path, args: argparse.Namespace) -> dict[str, Any]:
    """This recipe's model, and by the same pass those of the others that are asked for and not made yet."""
    from twobit.cli.progress import Bars
    from twobit.quant.calibrate import DEFAULT_TOKENS
    from twobit.quant.pipeline import Options
    from twobit.quant.pipeline import quantize as make

    together = []
    if not (folder / "model").exists():
        asked = args.recipe or RECIPES
        together = [folder, *(folder.parent / r for r in asked if not (folder.parent / r / "model").exists())]
        together = list(dict.fromkeys(together))
        for other in together:
            other.mkdir(parents=True, exist_ok=True)
        options = Options(RECIPES[folder.name], calib_tokens=args.calib_tokens or DEFAULT_TOKENS, threads=args.threads)
        siblings = [(other / "model", RECIPES[other.name]) for other in together[1:]]
        progress = Bars(quiet=False)
        try:
            make(source, folder / "model", options, progress, siblings)
        finally:
            progress.close()
    names = [other.name for other in together]
    for other in together[1:]:  # the first is written by `run`, with the seconds of the pass
        write(other / "quantize.json", _made(other) | {"together": names})
    return _made(folder) | {"together": names}


def _made(folder: Path) -> dict[str, Any]:
    from twobit.format.reader import open_model

    made = open_model(folder / "model").manifest
    return {**made.bits(), "errors": made.recipe["errors"], "calibration": made.calibration}


def kl(folder: Path, source: Path, args: argparse.Namespace) -> dict[str, Any]:
    from twobit.evaluate import Options, evaluate
    from twobit.format.reader import open_model

    options = Options(tokens=args.tokens, threads=args.threads, acceptance=False)
    measured = evaluate(folder / "model", source, options)
    measured.save(folder / "tokens.npz")
    return measured.to_json() | {"bits": open_model(folder / "model").manifest.bits()}


def acceptance(folder: Path, source: Path, args: argparse.Namespace) -> dict[str, Any]:
    from twobit.acceptance import Sample, blocks, continued, summarize_blocks
    from twobit.evaluate import bundled_prompts
    from twobit.runtime.model import Model
    from twobit.runtime.sampling import Sampling
    from twobit.runtime.session import Session
    from twobit.runtime.tokenizer import Tokenizer

    opened = Model.open(folder / "model")
    tokenizer = Tokenizer.load(folder / "model", config=opened.config, rows=opened.vocab)
    prompts = [(prompt.kind, prompt.ids(tokenizer)) for prompt in bundled_prompts()]
    length = -(-args.tokens // len(prompts))
    session = Session(opened, max(len(ids) for _, ids in prompts) + length, args.threads)
    made, texts = [], []
    for kind, ids in prompts:
        text = tuple(continued(session, ids, Sampling(), len(ids) + length, tokenizer.eos_ids))
        texts.append({"kind": kind, "ids": text, "first": len(ids)})
        made += blocks(session, Sample(kind, text, len(ids)), Sampling())
    tokenizer.close()
    write(folder / "texts.json", texts)
    return summarize_blocks(made)


# -- llama.cpp's Q2_K ---------------------------------------------------------------------------------------


def peer(folder: Path, source: Path, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from twobit.format import layout
    from twobit.format.reader import open_model
    from twobit.quant import calibrate, pipeline
    from twobit.quant.decoder import Cache, Decoder
    from twobit.quant.source import Checkpoint
    from twobit.quant.tune import BLOCK, drafting

    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    opened, packed = Checkpoint.open(source), open_model(folder / "model")
    architecture, specs = opened.architecture, opened.architecture.tensors()
    decoder, program = Decoder(architecture), q2_k_program()
    texts = [t for t in read(folder / "texts.json") if len(t["ids"]) >= t["first"] + BLOCK + 1]
    encode = calibrate.Encoder(opened.folder, architecture.vocab, pipeline._render(opened))
    made = calibrate.sequences(calibrate.load_default(), encode, tokens=IMPORTANCE_TOKENS, source="the package's text")
    embed = calibrate.embedder(opened, [*made.sequences, *(t["ids"][:-1] for t in texts)])
    calibration = [embed(i) for i in range(len(made.sequences))]
    reference = [embed(len(calibration) + i) for i in range(len(texts))]
    ways = [(name, shift) for name in ("twobit", "q2_k") for shift in (0, BLOCK // 2)]
    states = {way: list(reference) for way in ways}
    for index in range(len(architecture.layers)):  # one layer in memory at a time
        weights = {s.name: opened.read(s) for s in specs if s.layer == index}
        linears = [s for s in specs if s.layer == index and s.role == "linear"]
        sums: dict[str, Any] = {}  # of squares of every input: what llama.cpp's imatrix tool collects

        def hook(module: str, inputs: Any, sums: dict[str, Any] = sums) -> None:
            sums[module] = sums.get(module, 0) + inputs.square().sum(0)

        calibration = [decoder.layer(index, x, weights, hook=hook) for x in calibration]
        drafts = {
            "twobit": {s.name: torch.from_numpy(layout.dequantize(packed.matrix(s.module))[0]) for s in linears},
            "q2_k": {s.name: q2_k(program, weights[s.name], sums[s.module] / made.tokens) for s in linears},
        }
        for number, text in enumerate(texts):
            cache = Cache()
            reference[number] = decoder.layer(index, reference[number], weights, cache=cache)
            for name, shift in ways:
                attend = drafting(*cache.of(index), first=(text["first"] - 1 + shift) % BLOCK)
                own = states[name, shift]
                own[number] = decoder.layer(index, own[number], weights | drafts[name], attend=attend)
        say(f"layer {index + 1} of {len(architecture.layers)}")
    last = {s.name: opened.read(s) for s in specs if s.layer is None and s.role != "embedding"}
    last["model.embed_tokens.weight"] = last["lm_head.weight"]  # of a tied model the same
    head = last | {"lm_head.weight": torch.from_numpy(layout.dequantize(packed.matrix("lm_head"))[0])}
    accepted: dict[str, list[int]] = {"twobit": [], "q2_k": []}
    divergence: dict[str, list[float]] = {"twobit": [], "q2_k": []}
    clusters, kinds = [], []
    for number, text in enumerate(texts):
        first, targets = text["first"], torch.tensor(text["ids"][text["first"] :])
        log_p = decoder.head(reference[number][first - 1 :], last).log_softmax(-1)
        for name, shift in ways:
            logits = decoder.head(states[name, shift][number][first - 1 :], head)[shift:].log_softmax(-1)
            hits = logits.argmax(-1) == targets[shift:]
            found = [int(run.long().cumprod(0).sum()) for run in hits.split(BLOCK) if len(run) == BLOCK]
            accepted[name] += found
            exact = log_p[shift : shift + len(found) * BLOCK]
            each = (exact.exp() * (exact - logits[: len(exact)])).sum(-1)
            divergence[name] += each.unflatten(0, (-1, BLOCK)).mean(1).tolist()
            if name == "twobit":
                clusters += [number] * len(found)
                kinds += [text["kind"]] * len(found)
    groups, labels = np.array(clusters), np.array(kinds)
    pair = {name: np.array(values, float) for name, values in accepted.items()}
    return {
        "blocks": len(groups),
        "texts": len(set(clusters)),
        "bits": {"twobit": packed.manifest.bits()["draft_bpw"], "q2_k": Q2_K_BITS},
        "accepted": {name: by_kind(values, groups, labels) for name, values in pair.items()},
        "difference": by_kind(pair["twobit"] - pair["q2_k"], groups, labels),
        "kl": {name: by_kind(np.array(values), groups, labels) for name, values in divergence.items()},
        "importance_tokens": IMPORTANCE_TOKENS,
    }


def by_kind(values: Any, groups: Any, labels: Any) -> dict[str, Any]:
    """Mean over kinds of text of the mean over blocks; standard error with texts as the independent draws."""
    from twobit.evaluate import clustered_stderr

    means, variance = {}, 0.0
    for kind in dict.fromkeys(labels.tolist()):
        own = labels == kind
        _, numbers = np.unique(groups[own], return_inverse=True)
        means[kind] = float(values[own].mean())
        variance += clustered_stderr(values[own], numbers) ** 2
    return {"mean": float(np.mean(list(means.values()))), "stderr": variance**0.5 / len(means), "by_kind": means}


def q2_k_program() -> Path:
    """bench/q2k.c, built against llama.cpp's own library."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from peers import BUILD, PEERS, SOURCE

    program = PEERS / "q2k"
    library = BUILD / "ggml" / "src" / "libggml-base.a"
    if not library.exists():
        raise SystemExit(f"{library} is not there: run `make peers` first")
    if not program.exists():
        flags = ["-O2", f"-I{SOURCE / 'ggml' / 'include'}", "-o", str(program)]
        libraries = [str(library), "-lstdc++", "-lm", "-lpthread", "-fopenmp"]
        subprocess.run(["cc", *flags, str(ROOT / "bench" / "q2k.c"), *libraries], check=True)
    return program


def q2_k(program: Path, weight: Any, importance: Any) -> Any:
    """A matrix through Q2_K. Its super-blocks of 256 run over the ends of rows whose length is no multiple of 256, so
    that every matrix takes 2.625 bits per weight; its groups of 16 never do. (llama.cpp itself would take a format of
    more bits for such a matrix.)"""
    import torch
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    rows, cols = weight.shape
    joined = 256 // np.gcd(256, cols)
    pad = -rows % joined
    padded = torch.nn.functional.pad(weight, (0, 0, 0, pad)).reshape(-1, joined * cols).numpy()
    data = importance.repeat(int(joined)).numpy().astype("<f4").tobytes() + padded.astype("<f4").tobytes()
    command = [str(program), str(len(padded)), str(padded.shape[1])]
    made = subprocess.run(command, check=True, input=data, stdout=subprocess.PIPE).stdout
    blocks = np.frombuffer(made, np.uint8).reshape(len(padded), -1)
    values = dequantize(blocks, GGMLQuantizationType.Q2_K).reshape(-1, cols)
    return torch.from_numpy(np.ascontiguousarray(values[:rows], np.float32))


# -- llama.cpp's Q8_0 ---------------------------------------------------------------------------------------


def crosscheck(folder: Path, source: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Both on the tokens that llama.cpp makes of the text; the reference's perplexity is compared as well."""
    import torch

    from twobit.acceptance import Sample
    from twobit.evaluate import _compare, clustered_stderr
    from twobit.format.reader import open_model
    from twobit.progress import Progress
    from twobit.quant.calibrate import one_torch_thread
    from twobit.quant.source import Checkpoint
    from twobit.runtime.model import Model
    from twobit.runtime.tokenizer import Tokenizer
    from twobit.variants import Variants, last_states

    opened = Model.open(folder / "model")
    tokenizer = Tokenizer.load(folder / "model", config=opened.config, rows=opened.vocab)
    text = "\n\n".join(tokenizer.decode(text["ids"][text["first"] :]) for text in read(folder / "texts.json"))
    begin = tokenizer.encode_prompt("")[:1]
    tokenizer.close()
    theirs, chunks = llama_kl(source, text, args.threads, args.chunks)
    if [int(chunks[0, 0])] == begin:
        chunks[:, 0] = begin  # llama.cpp puts it over the first token of every chunk
    samples = [Sample("", tuple(chunk.tolist()), CHUNK // 2 + 1) for chunk in chunks]
    with one_torch_thread(args.threads) as pool:
        variants = Variants(Checkpoint.open(source), open_model(folder / "model"), ("q8_0",), pool)
        states = last_states(variants, samples, ["reference", "full", "q8_0", "q8_0_int8"], Progress())
        targets = torch.tensor([token for sample in samples for token in sample.targets])
        compared = _compare(variants, states, targets, None, Progress())
    clusters = np.repeat(np.arange(len(samples)), CHUNK // 2 - 1)
    perplexity = float(np.exp(compared["reference"].loss.mean()))
    if abs(theirs["perplexity"] / perplexity - 1) > 1e-3:
        raise SystemExit(f"the perplexities differ: {theirs['perplexity']} and {perplexity}: another model?")
    kl = {name: one.kl for name, one in compared.items() if name != "reference"}
    ours = {name: {"mean": float(x.mean()), "stderr": clustered_stderr(x, clusters)} for name, x in kl.items()}
    return {"tokens": len(targets), "kl": ours, "perplexity": perplexity, "llama.cpp": theirs}


def llama_kl(source: Path, text: str, threads: int, most: int | None) -> tuple[dict[str, float], Any]:
    """KL(f32 || Q8_0) and its standard error over tokens, and the perplexity of f32, by llama-perplexity; and the token
    ids [chunks, CHUNK] that it made of the text."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import peers

    eight = peers.convert(source)
    exact = eight.with_name(eight.name.replace("q8_0", "f32"))
    if not exact.exists():
        part = exact.with_suffix(".part")
        script = peers.SOURCE / "convert_hf_to_gguf.py"
        peers.run(sys.executable, script, source, "--outtype", "f32", "--outfile", part, cwd=peers.SOURCE)
        os.replace(part, exact)
    base = None
    with tempfile.TemporaryDirectory() as folder:
        file, logits = Path(folder) / "text", Path(folder) / "logits"
        file.write_text(text, encoding="utf-8")
        tool: list[Any] = [peers.BINARIES / "llama-perplexity", "-c", CHUNK, "-b", CHUNK, "-t", threads]
        if most is not None:
            tool += ["--chunks", most]
        for command in (
            [*tool, "-m", exact, "-f", file, "--kl-divergence-base", logits],
            [*tool, "-m", eight, "--kl-divergence-base", logits, "--kl-divergence"],
        ):
            done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"llama-perplexity failed:\n{done.stderr[-2000:]}")
            # the file of logits holds none below the largest less 16: its "PPL(base)" is too small
            base = base or re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
        # "_logits_", then as int32: tokens of a chunk, size of the vocabulary, chunks, the tokens of all chunks
        count = int(np.fromfile(logits, "<i4", 1, offset=16)[0])
        chunks = np.fromfile(logits, "<i4", count * CHUNK, offset=20).reshape(count, CHUNK)
    kl = re.search(r"Mean +KLD: +([-0-9.e]+) ± +([0-9.e]+)", done.stdout)
    if not kl or not base:
        raise SystemExit(f"llama-perplexity printed no divergence:\n{done.stdout[-2000:]}")
    return {"mean": float(kl[1]), "stderr": float(kl[2]), "perplexity": float(base[1])}, chunks


MEASURE: dict[str, Callable[[Path, Path, argparse.Namespace], dict[str, Any]]] = {
    "quantize": quantize,
    "kl": kl,
    "acceptance": acceptance,
    "peer": peer,
    "crosscheck": crosscheck,
}


# -- showing ------------------------------------------------------------------------------------------------


def collect(out: Path) -> dict[str, Any]:
    """All parts that are done, by checkpoint and recipe; of the texts of `acceptance` the tokens of the longest."""
    found: dict[str, Any] = {}
    for name in CHECKPOINTS:
        for recipe in RECIPES:
            folder = out / name / recipe
            parts = {part: read(folder / f"{part}.json") for part in PARTS if (folder / f"{part}.json").exists()}
            if "acceptance" in parts:
                texts = read(folder / "texts.json")
                parts["acceptance"]["longest_text"] = max(len(text["ids"]) - text["first"] for text in texts)
            if parts:
                found.setdefault(name, {})[recipe] = parts
    return found


def page(results: Mapping[str, Any]) -> str:
    """docs/quality.md. A recipe may have a remark behind a comma: results of an earlier form of it, kept by hand."""
    rows = [(name, recipe, parts) for name, recipes in results.items() for recipe, parts in recipes.items()]

    def table(head: str, lines: Sequence[str]) -> str:
        titles = head.split(" | ")
        marks = "|".join("---" if i < 2 else "---:" for i in range(len(titles)))
        return "\n".join([f"| {head} |", f"|{marks}|", *lines])

    def cells(name: str, recipe: str, *values: str) -> str:
        return "| " + " | ".join((CHECKPOINTS[name], recipe, *values)) + " |"

    def verdict(value: float, limit: float, least: bool = False) -> str:
        return "met" if (value >= limit if least else value <= limit) else "**missed**"

    weights, runtime, drafts, beside, checked, made = [], [], [], [], [], []
    for name, recipe, parts in rows:
        if "kl" in parts:
            data = parts["kl"]
            divergence, pairs, bits = data["kl"], data["paired"], data["bits"]
            limit, limit_run = {"2+6": (0.8, 0.25), "2+6-g32": (1.0, None), "2+8": (0.1, 0.05)}[recipe.split(",")[0]]
            most = {"2+6": 6.3, "2+6-g32": 6.17, "2+8": 8.3}[recipe.split(",")[0]]
            for lines, own, base, most_ratio in (
                (weights, "full", "q8_0", limit),
                (runtime, "full_runtime", "q8_0_int8", limit_run),
            ):
                pair = pairs[f"{own}/{base}"]
                extra = [f"{bits['residual_bpw']:.3f} (≤ {most:g})"] if own == "full" else []
                lines.append(
                    cells(
                        name,
                        recipe,
                        *extra,
                        f"{divergence[own]['mean']:.6f} ± {divergence[own]['stderr']:.6f}",
                        f"{divergence[base]['mean']:.6f}",
                        f"{pair['ratio']:.3f} ± {pair['ratio_stderr']:.3f}",
                        f"≤ {most_ratio:g}: {verdict(pair['ratio'], most_ratio)}" if most_ratio else "none",
                        f"{divergence[own]['top1']:.4f}",
                        f"{divergence['floor']['mean']:.1e}",
                        f"{data['tokens']:,}",
                    )
                )
        if "acceptance" in parts:
            data = parts["acceptance"]
            kinds = ", ".join(f"{kind} {value - 1:.2f}" for kind, value in data["by_kind"].items())
            chain = data["tokens_per_step"] - 1
            drafts.append(
                cells(
                    name,
                    recipe,
                    f"{chain:.2f} ± {data['stderr']:.3f}",
                    f"≥ {AIMS[name][0]:g}: {verdict(chain, AIMS[name][0], True)}",
                    f"≤ {MOST_ERROR:g}: {verdict(data['stderr'], MOST_ERROR)}",
                    f"{data['tree16_tokens_per_step'] - 1:.2f} ± {data['tree16_stderr']:.3f}",
                    kinds,
                    f"{data['longest_text']:,}",
                    f"{data['blocks']:,}",
                )
            )
        if "peer" in parts:
            data = parts["peer"]
            own, base, less = data["accepted"]["twobit"], data["accepted"]["q2_k"], data["difference"]
            ratio, wanted = own["mean"] / base["mean"], AIMS[name][1]
            beside.append(
                cells(
                    name,
                    recipe,
                    f"{data['bits']['twobit']:.3f} / {data['bits']['q2_k']:.3f}",
                    f"{own['mean']:.2f} ± {own['stderr']:.2f}",
                    f"{base['mean']:.2f} ± {base['stderr']:.2f}",
                    f"{less['mean']:+.2f} ± {less['stderr']:.2f}",
                    f"{ratio:.2f} (≥ {wanted:g}: {verdict(ratio, wanted, True)})",
                    f"{data['kl']['twobit']['mean']:.3f} / {data['kl']['q2_k']['mean']:.3f}",
                    f"{data['blocks']:,}",
                )
            )
        if "crosscheck" in parts:
            data, values = parts["crosscheck"], parts["crosscheck"]["kl"]
            checked.append(
                cells(
                    name,
                    recipe,
                    *(f"{values[own]['mean']:.6f} ± {values[own]['stderr']:.6f}" for own in ("q8_0", "q8_0_int8")),
                    f"{data['llama.cpp']['mean']:.6f} ± {data['llama.cpp']['stderr']:.6f}",
                    f"{values['full']['mean']:.6f} ± {values['full']['stderr']:.6f}",
                    f"{data['perplexity']:.4f} / {data['llama.cpp']['perplexity']:.4f}",
                    f"{data['tokens']:,}",
                )
            )
        if "quantize" in parts:
            data = parts["quantize"]
            made.append(
                cells(
                    name,
                    recipe,
                    f"{data['calibration']['tokens']:,}",
                    f"{data['draft_bpw']:.3f} + {data['residual_bpw']:.3f}",
                    f"{data['head_bpw']['draft']:.3f} + {data['head_bpw']['residual']:.3f}",
                    f"{data['errors']['linear']['draft']:.3f} / {data['errors']['linear']['full']:.5f}",
                )
            )
    missing = []
    for name, title in CHECKPOINTS.items():
        for recipe in RECIPES:
            wanted = [part for part in PARTS if part not in OF_DEFAULT or recipe == "2+6"]
            left = [part for part in wanted if part not in results.get(name, {}).get(recipe, {})]
            if left:
                missing.append(f"{title} {recipe}: {', '.join(left)}")
    model_table = table("checkpoint | recipe | calibration tokens | bits, linears | bits, head | errors", made)
    head = "KL | {} | ratio | aim | same top token | floor | tokens"
    weights_table = table("checkpoint | recipe | residual bits | " + head.format("KL of Q8_0"), weights)
    runtime_table = table("checkpoint | recipe | " + head.format("KL of Q8_0, int8"), runtime)
    head = "checkpoint | recipe | of 8 | aim | aim for ± | tree of 16 | of 8 by kind | longest text | blocks"
    draft_table = table(head, drafts)
    head = "checkpoint | recipe | bits | twobit, of 8 | Q2_K, of 8 | difference | ratio | KL, twobit / Q2_K | blocks"
    peer_table = table(head, beside)
    head = "checkpoint | recipe | Q8_0, weights | Q8_0, int8 | llama.cpp's Q8_0 | twobit, weights | perplexity | tokens"
    check_table = table(head, checked)
    return f"""# Quality, measured

Written by `python bench/quality.py page > docs/quality.md` from `bench/results/quality.json`, which
`python bench/quality.py collect` makes of what `make bench-quality` (`bench/quality.py run`) measured, some of it with
another `--tokens` than its default: the tables say how many came of it. ± are standard errors. The checkpoints
are those of `scripts/reference_checkpoints.py`: real models, with noise of one step of their source's grid.

## Models

Bits per weight are of the decoder's linears, and of head and embedding, everything counted, draft + residual. Errors
are relative, of draft and full weights, in the metric of the calibration inputs.

{model_table}

## The verifier's weights beside Q8_0

KL(reference || model) in nats per token, fp32 logits, weights alone, on the reference's own greedy continuations of
bundled prompts. Q8_0 is llama.cpp's rounding of linears, head and embeddings, at 8.5 bits; the full weights take draft
and residual, of which the aims limit the residual. Ratios are paired. Floor: the reference against itself with its sums
in another order.

{weights_table}

## As it runs

The C runtime's own logits (activations rounded to 13 or 14 bits, fp16 cache) beside Q8_0 with activations rounded to
int8 per 32, as llama.cpp's CPU path does.

{runtime_table}

## Q8_0 by llama.cpp itself

KL(f32 || Q8_0) by `llama-perplexity --kl-divergence` of llama.cpp, and by this project's emulation of it (weights
alone, and with int8 activations), on the texts of the next section in chunks of {CHUNK} tokens of which the second half
counts. Perplexities are those of the reference, by both.

{check_table}

## What the draft yields

Drafted tokens that the verifier accepts of a chain of 8 and of a tree of 16, the step's own token not counted, greedy,
by the C runtime along the model's own continuations of the bundled prompts; a step begins where the last one ended.
Means over code, prose and chat; standard errors over blocks, as if those of one text were independent draws (the next
section takes texts as the draws). Long continuations repeat themselves and are easier to draft: results of texts of
other lengths do not compare ("longest text" is in tokens).

{draft_table}

## Beside llama.cpp's Q2_K

The same texts, the checkpoint's keys and values, twobit's draft head for both, blocks of 8 that begin every 4 tokens
whatever was accepted (so the numbers differ from those above). Q2_K is llama.cpp's own code with an importance matrix
from {IMPORTANCE_TOKENS:,} tokens of the calibration text, at 2.625 bits for every linear: super-blocks run over the
ends of rows that are no multiple of 256 (llama.cpp itself would use more bits there). Standard errors take texts as
the independent draws.

{peer_table}

## Not measured

{_lines(missing) or "Nothing is missing."}
"""


def _lines(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="measure what is not measured yet")
    one.add_argument("--checkpoint", action="append", choices=CHECKPOINTS)
    one.add_argument("--recipe", action="append", choices=RECIPES)
    one.add_argument("--part", action="append", choices=PARTS)
    one.add_argument("--tokens", type=int, default=4704, help="tokens of text [4704]")
    one.add_argument("--calib-tokens", type=int, help="tokens to calibrate on [the default of twobit quantize]")
    one.add_argument("--chunks", type=int, help="chunks of `crosscheck` at most [all of the text]")
    one.add_argument("-t", "--threads", type=int, default=os.cpu_count() or 1)
    two = commands.add_parser("compare", help="two results on the same tokens")
    two.add_argument("first", type=Path)
    two.add_argument("second", type=Path)
    three = commands.add_parser("collect", help="all results in one")
    for command in (one, three):
        command.add_argument("--out", type=Path, default=ROOT / "build" / "quality")
    four = commands.add_parser("page", help="results as a page")
    four.add_argument("results", type=Path, nargs="?", default=RESULTS)
    args = parser.parse_args()
    try:
        if args.command == "run":
            run(args)
        elif args.command == "compare":
            compare(args.first, args.second)
        elif args.command == "collect":
            print(json.dumps(collect(args.out), indent=1))
        else:
            print(page(read(args.results)), end="")
    except (TwobitError, OSError) as error:
        raise SystemExit(
            f"error: {error}" + (f"\n  {hint}" if (hint := getattr(error, "hint", None)) else "")
        ) from error


if __name__ == "__main__":
    main()
