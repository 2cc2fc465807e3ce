#!/usr/bin/env python3
"""Experiments on the draft: variants of the quantizer side by side, on the first layers of a checkpoint, in torch.

    python bench/draft_experiments.py score CHECKPOINT --model MODEL...
    python bench/draft_experiments.py gaussian
    python bench/draft_experiments.py distill CHECKPOINT --model MODEL --tokens 32768 --rate 0.003
    python bench/draft_experiments.py damping CHECKPOINT --layers 13 --tokens 16384
    python bench/draft_experiments.py variants CHECKPOINT --layers 4 --tokens 12288 A: "S:seq=True,alpha=1,lam=1"

Text: chats that the demo model wrote, from the end of the calibration text (held out as long as --tokens stays below
50,000). KL is KL(reference || draft) in nats per token, the draft attending to the reference's keys and values in
blocks of 8; a8 the tokens of such a block before the first that differs from the text. `variants` quantizes linears
only and shows paired differences to the first variant. `distill` trains the row scales of a packed model's draft and
shows paired differences to the model as it is. `damping` rounds rows of the last of --layers with more and less of it,
towards the weights as they are. `gaussian` compares the lattice on independent Gaussian
weights with the rate-distortion bound and with what QTIP (Tseng et al. 2024) publishes for its trellis code.
Settings of a variant:

    seq      inputs of the draft's own layers, not of the reference's
    alpha    how far targets move from the weights to the regression of the reference's outputs on these inputs
    stream   the part of the draft's distance from the reference's residual stream that o and down make good
    lam      damping of that regression; damping: of the rounding, both in mean diagonals
    tune     straight-through training of codes, scales, centres and row scales on the layer's output: dict(lr=(codes,
             scales, centres, rows), epochs=, batch=sequences)
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import distill as distillation
import numpy as np
import torch
from distill import Distillation

from twobit.format import layout
from twobit.format.reader import open_model
from twobit.quant import calibrate, pipeline
from twobit.quant.calibrate import SHARED
from twobit.quant.decoder import Cache, Decoder
from twobit.quant.rounding import Rounded, draft_weights, prepare, round_draft, round_matrix
from twobit.quant.source import Checkpoint
from twobit.quant.tune import BLOCK, drafting
from twobit.variants import rounded

Tensors = dict[str, torch.Tensor]
PARTS = ("q", "o", "gate", "down")
ROWS = 384  # of a matrix, rounded by `damping`
FIRST = 20  # tokens of a text that are not predicted


class Lab:
    """A checkpoint in memory, the text, and the reference's keys, values and logits on it."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = Checkpoint.open(folder)
        self.architecture = self.checkpoint.architecture
        self.decoder = Decoder(self.architecture)
        self.specs = self.architecture.tensors()
        tied = self.architecture.tied
        self.weights = {s.name: self.checkpoint.read(s) for s in self.specs if not (tied and s.role == "head")}
        render = pipeline._render(self.checkpoint)
        self.encode = calibrate.Encoder(self.checkpoint.folder, self.architecture.vocab, render)
        own = [d for d in calibrate.load_default() if d.source.startswith("generated/")][-14:]
        self.texts = [ids for d in own if len(ids := [*self.encode.prefix, *self.encode(d)][:300]) > 3 * FIRST]
        self.reference = [self._reference(ids) for ids in self.texts]

    def _reference(self, ids: Sequence[int]) -> tuple[Cache, torch.Tensor]:
        cache = Cache()
        x = self.decoder.embed(ids[:-1], self.weights)
        for i in range(len(self.architecture.layers)):
            x = self.decoder.layer(i, x, self.weights, cache=cache)
        return cache, self.decoder.head(x[FIRST - 1 :], self.weights).log_softmax(-1).half()

    def score(self, draft: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """draft: the matrices that differ from the reference's."""
        weights = self.weights | draft
        head = {"model.norm.weight": weights["model.norm.weight"]}
        head["lm_head.weight"] = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        kls, accepted, same = [], [], []
        for ids, (cache, reference) in zip(self.texts, self.reference, strict=True):
            x = self.decoder.embed(ids[:-1], self.weights)
            for i in range(len(self.architecture.layers)):
                x = self.decoder.layer(i, x, weights, attend=drafting(*cache.of(i), first=(FIRST - 1) % BLOCK))
            logits = self.decoder.head(x[FIRST - 1 :], head).log_softmax(-1)
            exact = reference.float()
            kls.append((exact.exp() * (exact - logits)).sum(-1).numpy())
            best = logits.argmax(-1)
            same.append((best == exact.argmax(-1)).float().numpy())
            hits = best == torch.tensor(ids[FIRST:])
            accepted += [int(run.long().cumprod(0).sum()) for run in hits.split(BLOCK) if len(run) == BLOCK]
        kl = np.concatenate(kls)
        return {"kl": kl, "a8": np.array(accepted, float), "top1": float(np.concatenate(same).mean())}


def show(name: str, result: Mapping[str, Any], base: Mapping[str, Any] | None, seconds: float) -> None:
    """One line; paired differences to `base` with standard errors over tokens and blocks."""
    line = {"kl": f"{result['kl'].mean():.4f}", "a8": f"{result['a8'].mean():.2f}", "top1": f"{result['top1']:.4f}"}
    for key in ("kl", "a8") if base is not None else ():
        difference = result[key] - base[key]  # type: ignore[index]
        line[f"{key} - first"] = f"{difference.mean():+.4f} +- {difference.std(ddof=1) / len(difference) ** 0.5:.4f}"
    print(name, json.dumps(line), f"tokens {len(result['kl'])}, {seconds:.0f} CPU seconds", flush=True)


class Variant:
    """One way to quantize, and its draft's states."""

    def __init__(self, name: str, lab: Lab, states: Sequence[torch.Tensor], settings: Mapping[str, Any]) -> None:
        self.name, self.lab = name, lab
        self.o = {"seq": False, "alpha": 0.0, "stream": 0.0, "damping": 0.1, "lam": None, "tune": None} | dict(settings)
        self.states = list(states)
        self.draft: Tensors = {}
        self.seconds = 0.0

    def layer(self, index: int, true: Tensors, reference: Sequence[Tensors], caches: Sequence[Cache]) -> float:
        """Quantizes a layer and goes through it; returns its outputs' squared error relative to the reference's."""
        started, decoder = time.process_time(), self.lab.decoder
        attends = [drafting(*cache.of(index), first=i % BLOCK) for i, cache in enumerate(caches)]
        mixed, rounded, inputs = dict(true), {}, list[torch.Tensor]()
        specs = [s for s in self.lab.specs if s.layer == index and s.role == "linear"]
        stream = self.states
        for part in PARTS:
            group = [s for s in specs if SHARED[s.part] == part]
            if part == "q":
                inputs = [decoder.normed(index, x, "input_norm", true) for x in stream]
            elif part == "o":
                inputs = [decoder.mixed(index, x, mixed, attend=a) for x, a in zip(stream, attends, strict=True)]
            elif part == "gate":
                stream = [decoder.after_attention(index, x, y, mixed) for x, y in zip(stream, inputs, strict=True)]
                inputs = [decoder.normed(index, x, "pre_ffn_norm", true) for x in stream]
            else:
                inputs = [decoder.gated(index, x, mixed) for x in stream]
            theirs = torch.cat([r[part] for r in reference])
            mine = torch.cat(inputs) if self.o["seq"] else theirs
            hessian = mine.T @ mine
            factor = prepare(hessian, self.o["damping"])
            for spec in group:
                target = true[spec.name]
                if self.o["seq"] and self.o["alpha"]:
                    missing = (theirs - mine) @ target.T
                    if self.o["stream"] and part in ("o", "down"):
                        there = torch.cat([r["x" if part == "o" else "middle"] for r in reference])
                        missing = missing + self.o["stream"] * (there - torch.cat(stream))
                    damped = hessian.double()
                    damped.diagonal().add_((self.o["lam"] or self.o["damping"]) * damped.diagonal().mean())
                    pull = torch.linalg.solve(damped, (mine.T @ missing).double()).T.float()
                    target = target + self.o["alpha"] * pull
                rounded[spec.name] = round_draft(target, factor, threads=torch.get_num_threads())
                mixed[spec.name] = draft_weights(rounded[spec.name])
        if self.o["tune"]:
            mixed |= self._tuned(index, mixed, rounded, attends, [r["out"] for r in reference])
        self.states = [decoder.layer(index, x, mixed, attend=a) for x, a in zip(self.states, attends, strict=True)]
        self.draft |= {s.name: mixed[s.name] for s in specs}
        self.seconds += time.process_time() - started
        return float(np.mean([_miss(x, r["out"]) for x, r in zip(self.states, reference, strict=True)]))

    def _tuned(
        self,
        index: int,
        mixed: Tensors,
        rounded: Mapping[str, Rounded],
        attends: Sequence[Any],
        outputs: Sequence[torch.Tensor],
    ) -> Tensors:
        o = self.o["tune"]
        latent = {
            name: [torch.from_numpy(a.astype("f4")) for a in (r.codes, r.s, r.m)] + [torch.zeros(len(r.s))]
            for name, r in rounded.items()
        }
        groups = [
            {"params": [values[j].requires_grad_() for values in latent.values()], "lr": o["lr"][j]}
            for j in range(4)
            if o["lr"][j] > 0
        ]
        optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))

        def through(t: torch.Tensor, low: int, high: int) -> torch.Tensor:
            return (t.round().clamp(low, high) - t).detach() + t

        def weight(name: str) -> torch.Tensor:
            r, (codes, s, m, row) = rounded[name], latent[name]
            step = through(s, 0, 15) * torch.from_numpy(r.row_a.astype("f4"))[:, None]
            centre = through(m, -8, 7) * torch.from_numpy(r.row_b.astype("f4"))[:, None]
            q2 = (2 * through(codes, 0, 3) - 3).unflatten(1, (-1, layout.COLS)) * step[..., None] + centre[..., None]
            return q2.flatten(1) * (torch.from_numpy(r.row_scale) * (1 + row))[:, None]

        losses = []
        for epoch in range(o["epochs"]):
            order = torch.randperm(len(outputs), generator=torch.Generator().manual_seed(epoch)).split(o["batch"])
            for batch in order:
                with torch.enable_grad():
                    weights = mixed | {name: weight(name) for name in latent}
                    out = [
                        (i, self.lab.decoder.layer(index, self.states[i], weights, attend=attends[i]))
                        for i in batch.tolist()
                    ]
                    loss = torch.stack(
                        [((y - outputs[i]).square().sum(-1) / outputs[i].square().sum(-1)).mean() for i, y in out]
                    ).mean()
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(float(loss))
        print(f"  tuned layer {index}: {losses[0]:.5f} -> {losses[-1]:.5f}", flush=True)
        return {name: weight(name).detach() for name in latent}


def _miss(x: torch.Tensor, there: torch.Tensor) -> float:
    return float(((x - there).square().sum(-1) / there.square().sum(-1)).mean())


def variants(lab: Lab, layers: int, tokens: int, named: Sequence[str]) -> None:
    """Quantizes the first layers in every way and scores them."""
    made = calibrate.sequences(calibrate.load_default(), lab.encode, tokens=tokens, source="the package's text")
    states = [lab.decoder.embed(s, lab.weights) for s in made.sequences]
    print(f"{len(states)} sequences, {made.tokens} tokens, {layers} layers", flush=True)
    ways = []
    for text in named:
        name, _, settings = text.partition(":")
        ways.append(Variant(name, lab, states, eval(f"dict({settings})")))
    for index in range(layers):
        true = {s.name: lab.weights[s.name] for s in lab.specs if s.layer == index}
        reference: list[Tensors] = []
        caches = [Cache() for _ in states]
        for x, cache in zip(states, caches, strict=True):
            found = {"x": x, "q": lab.decoder.normed(index, x, "input_norm", true)}
            found["o"] = lab.decoder.mixed(index, x, true, cache)
            found["middle"] = lab.decoder.after_attention(index, x, found["o"], true)
            found["gate"] = lab.decoder.normed(index, found["middle"], "pre_ffn_norm", true)
            found["down"] = lab.decoder.gated(index, found["middle"], true)
            found["out"] = lab.decoder.after_ffn(index, found["middle"], found["down"], true)
            reference.append(found)
        misses = [way.layer(index, true, reference, caches) for way in ways]
        print(f"layer {index}:", " ".join(f"{w.name} {m:.5f}" for w, m in zip(ways, misses, strict=True)), flush=True)
        states = [found["out"] for found in reference]
    base = None
    for way in ways:
        result = lab.score(way.draft)
        show(way.name, result, base, way.seconds)
        base = base or result


def packed_draft(lab: Lab, model: Path, head: bool) -> Tensors:
    """The draft's matrices of a packed model."""
    packed = open_model(model)
    names = {s.module: s.name for s in lab.specs if s.role == "linear"} | (
        {"lm_head": "lm_head.weight"} if head else {}
    )
    return {name: torch.from_numpy(layout.dequantize(packed.matrix(module))[0]) for module, name in names.items()}


def distill(lab: Lab, model: Path, tokens: int, threads: int, rate: float, passes: int) -> None:
    """Trains the row scales of a packed model, and scores it before, halfway and after."""
    packed = open_model(model)
    made = calibrate.sequences(calibrate.load_default(), lab.encode, tokens=tokens, source="the package's text")
    head = {"lm_head.weight": torch.from_numpy(layout.dequantize(packed.matrix("lm_head"))[0])}
    count = len(made.sequences)

    def drafts(index: int) -> dict[str, Any]:
        return {s.name: packed.matrix(s.module) for s in lab.specs if s.layer == index and s.role == "linear"}

    with calibrate.one_torch_thread(threads) as pool:
        distillation.RATE = rate
        trained = Distillation(
            lab.checkpoint,
            lambda i: lab.decoder.embed(made.sequences[i % count], lab.weights),
            [len(sequence) for sequence in made.sequences] * passes,
            drafts,
            pool,
        )

        def score() -> dict[str, Any]:
            linears = [s for s in lab.specs if s.role == "linear"]
            drafts = {
                s.name: draft_weights(packed.matrix(s.module)) * trained.factors(s.name)[:, None] for s in linears
            }
            return lab.score(drafts | head)

        base = score()
        steps = len(trained.batches)
        show("as it is", base, None, time.process_time())
        print(f"{steps} steps of {made.tokens * passes / steps:.0f} tokens", flush=True)
        for turn in range(steps):
            loss = trained.step(turn)
            change = trained.state[0]
            print(f"step {turn + 1}: KL {loss:.4f}, factors +- {float(change.square().mean().sqrt()):.4f}", flush=True)
            if turn + 1 in (steps // 2, steps):
                show(f"after {turn + 1} steps", score(), base, time.process_time())


def matrices(folder: Path, layers: int, tokens: int) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of q, o, gate and down of layer `layers` - 1: part, the first ROWS rows, X^T X of the calibration's inputs, and
    inputs of held-out chats [tokens, columns], all fp32."""
    checkpoint = Checkpoint.open(folder)
    decoder, specs = Decoder(checkpoint.architecture), checkpoint.architecture.tensors()
    encode = calibrate.Encoder(checkpoint.folder, checkpoint.architecture.vocab, pipeline._render(checkpoint))
    made = calibrate.sequences(calibrate.load_default(), encode, tokens=tokens, source="the package's text")
    own = [d for d in calibrate.load_default() if d.source.startswith("generated/")][-14:]
    texts = [ids for d in own if len(ids := [*encode.prefix, *encode(d)][:300]) > 3 * FIRST]
    embed = calibrate.embedder(checkpoint, [*made.sequences, *texts])
    states = [embed(i) for i in range(len(made.sequences) + len(texts))]
    inputs: dict[str, list[torch.Tensor]] = {}
    for index in range(layers):
        weights = {s.name: checkpoint.read(s) for s in specs if s.layer == index}
        last = index == layers - 1

        def hook(module: str, x: torch.Tensor, last: bool = last) -> None:
            if last:
                inputs.setdefault(module, []).append(x)

        states = [decoder.layer(index, x, weights, hook=hook) for x in states]
    print(f"layer {layers - 1}, {made.tokens} tokens; errors: plain, of the answers to {sum(map(len, texts))} others")
    for spec in (s for s in specs if s.layer == layers - 1 and s.role == "linear" and s.part in PARTS):
        found = inputs[spec.module]
        x, held = torch.cat(found[: len(made.sequences)]), torch.cat([t[1:] for t in found[len(made.sequences) :]])
        yield spec.part, weights[spec.name][:ROWS].contiguous(), x.T @ x, held


def damping(folder: Path, layers: int, tokens: int) -> None:
    """Relative errors of draft and full weights, plain and of their answers to held-out text, by the damping of the
    Hessian."""
    for part, weight, hessian, held in matrices(folder, layers, tokens):
        answers = held @ weight.T

        def errors(other: torch.Tensor, w: Any = weight, held: Any = held, answers: Any = answers) -> str:
            answered = float((held @ (other - w).T).norm() / answers.norm())
            return f"{float((other - w).norm() / w.norm()):.5f} {answered:.5f}"

        print(f"{part} {tuple(weight.shape)}: Q8_0 {errors(rounded(weight, 'q8_0'))}", flush=True)
        for amount in (0.1, 0.3, 1.0, 3.0):
            factor = prepare(hessian, amount)
            draft = round_draft(weight, factor, threads=torch.get_num_threads())
            whole = round_matrix(weight, factor, draft=draft, threads=torch.get_num_threads())
            full = torch.from_numpy(layout.dequantize(whole)[1])
            print(f"  damping {amount:<4g} draft {errors(draft_weights(draft))}  full {errors(full)}", flush=True)


def gaussian() -> None:
    """Mean squared error of the draft's codes on independent N(0, 1), beside the bound and a trellis code."""
    from twobit.quant.rounding import identity

    weights = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0))
    bits = 2 + 8 / layout.COLS
    ours = round_draft(weights, identity(weights.shape[1])).draft_error ** 2
    bound, claimed = 2.0 ** (-2 * bits), 0.0693 / 2.0**-4  # QTIP: 0.0693 at 2 bits, where the bound is 1 / 16
    print(
        f"{bits:g} bits: ours {ours:.4f}, bound {bound:.4f}, a trellis as far above it as QTIP's {bound * claimed:.4f}"
    )
    print(f"predicted error energy of a trellis to ours at the same bits: {bound * claimed / ours:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("score", "distill", "damping", "variants", "gaussian"))
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("variants", nargs="*", metavar="NAME:SETTINGS")
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rate", type=float, default=distillation.RATE)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("-t", "--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_intermixed_args()  # variants may stand behind options
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    if args.what == "gaussian":
        return gaussian()
    if args.checkpoint is None:
        parser.error("CHECKPOINT is missing")
    if args.what == "damping":
        return damping(args.checkpoint, args.layers, args.tokens)
    lab = Lab(args.checkpoint)
    if args.what == "variants":
        return variants(lab, args.layers, args.tokens, args.variants)
    if args.what == "distill":
        return distill(lab, args.model[0], args.tokens, args.threads, args.rate, args.passes)
    base = None
    for model in args.model:
        for head in (False, True):
            result = lab.score(packed_draft(lab, model, head))
            show(f"{model}{', head too' if head else ', linears'}", result, base, 0)
            base = base or result


if __name__ == "__main__":
    main()
