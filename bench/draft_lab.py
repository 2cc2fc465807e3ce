#!/usr/bin/env python3
"""Experiments on the draft: quantize with variants of the recipe, in torch, and compare on the same tokens.

    python bench/draft_lab.py text CHECKPOINT --model MODEL --out LAB        # the model's own continuations, once
    python bench/draft_lab.py score CHECKPOINT --lab LAB --model MODEL       # a packed model as it is

KL is KL(reference || draft) in nats per token, the draft attending to the reference's keys and values in blocks of 8;
a8 the accepted tokens of such a block. Blocks start every 8 tokens here, so that all variants see the same ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from twobit.format import layout
from twobit.format.reader import open_model
from twobit.quant.decoder import Cache, Decoder
from twobit.quant.source import Checkpoint
from twobit.quant.tune import BLOCK, drafting


def make_text(checkpoint: Path, model: Path, out: Path, prompts: int, length: int) -> None:
    """Greedy continuations of the first bundled prompts by the packed model (2+6 is the reference but for 0.001 nats)."""
    from twobit.acceptance import continued
    from twobit.evaluate import bundled_prompts
    from twobit.runtime.model import Model
    from twobit.runtime.sampling import Sampling
    from twobit.runtime.session import Session
    from twobit.runtime.tokenizer import Tokenizer

    opened = Model.open(model)
    tokenizer = Tokenizer.load(model, config=opened.config, rows=opened.vocab)
    texts = []
    for prompt in bundled_prompts()[:prompts]:
        ids = prompt.ids(tokenizer)
        session = Session(opened, len(ids) + length, 2)
        texts.append(
            {
                "kind": prompt.kind,
                "first": len(ids),
                "ids": continued(session, ids, Sampling(), len(ids) + length, tokenizer.eos_ids),
            }
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / "text.json").write_text(json.dumps(texts))
    print("tokens", sum(len(t["ids"]) - t["first"] for t in texts), file=sys.stderr)


class Lab:
    def __init__(self, checkpoint: Path, lab: Path, limit: int | None = None) -> None:
        self.checkpoint = Checkpoint.open(checkpoint)
        self.architecture = self.checkpoint.architecture
        self.decoder = Decoder(self.architecture)
        self.specs = self.architecture.tensors()
        self.weights = {}
        for spec in self.specs:
            if spec.role == "head" and self.architecture.tied:
                continue
            self.weights[spec.name] = self.checkpoint.read(spec)
        self.texts = json.loads((lab / "text.json").read_text())[:limit]
        self.lab = lab
        self.n_layers = len(self.architecture.layers)
        self.cached = []
        self.reference()

    @torch.no_grad()
    def reference(self) -> None:
        """Keys, values and logits of every text."""
        for text in self.texts:
            cache = Cache()
            x = self.decoder.embed(text["ids"][:-1], self.weights)
            for i in range(self.n_layers):
                x = self.decoder.layer(i, x, self.weights, cache=cache)
            logits = self.decoder.head(x[text["first"] - 1 :], self.weights)
            logp = logits.log_softmax(-1)
            self.cached.append((cache, logp.half()))

    @torch.no_grad()
    def score(self, draft: dict[str, torch.Tensor]) -> dict:
        """draft: linears (and lm_head.weight where the head is quantized) that replace the reference's."""
        weights = self.weights | draft
        head = {"model.norm.weight": weights["model.norm.weight"]}
        head["lm_head.weight"] = draft.get(
            "lm_head.weight", self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        )
        kls, tops, a8, kinds, bk = [], [], [], [], []
        for text, (cache, reference) in zip(self.texts, self.cached, strict=True):
            ids, first = text["ids"], text["first"]
            x = self.decoder.embed(ids[:-1], self.weights)
            for i in range(self.n_layers):
                x = self.decoder.layer(i, x, weights, attend=drafting(*cache._layers[i], first=(first - 1) % BLOCK))
            logp = self.decoder.head(x[first - 1 :], head).log_softmax(-1)
            r = reference.float()
            kl = (r.exp() * (r - logp)).sum(-1)
            hit = logp.argmax(-1) == torch.tensor(ids[first:])
            kls.append(kl.numpy()), tops.append((logp.argmax(-1) == r.argmax(-1)).numpy())
            kinds += [text["kind"]] * len(kl)
            for at in range(0, len(hit) - BLOCK + 1, BLOCK):
                run = hit[at : at + BLOCK].long().cumprod(0).sum()
                a8.append(int(run)), bk.append(text["kind"])
        kl, top, a8, bk, kinds = np.concatenate(kls), np.concatenate(tops), np.array(a8), np.array(bk), np.array(kinds)
        by = {k: round(float(a8[bk == k].mean()), 2) for k in dict.fromkeys(bk)}
        n = len(kl) // 32
        se = kl[: n * 32].reshape(n, 32).mean(1).std(ddof=1) / n**0.5
        return {
            "kl": round(float(kl.mean()), 4),
            "se": round(float(se), 4),
            "a8": round(float(np.mean(list(by.values()))), 3),
            "by": by,
            "top1": round(float(top.mean()), 4),
            "tokens": len(kl),
            "_kl": kl,
            "_a8": a8,
        }


def packed_draft(model: Path, architecture, head: bool = True) -> dict[str, torch.Tensor]:
    packed = open_model(model)
    draft = {}
    for spec in architecture.tensors():
        if spec.role == "linear":
            draft[spec.name] = torch.from_numpy(layout.dequantize(packed.matrix(spec.module))[0])
    if head:
        draft["lm_head.weight"] = torch.from_numpy(layout.dequantize(packed.matrix("lm_head"))[0])
    return draft


def show(name: str, result: dict, base: dict | None = None) -> None:
    line = {k: v for k, v in result.items() if not k.startswith("_")}
    if base is not None:
        d = result["_kl"] - base["_kl"]
        line["dkl"] = f"{d.mean():+.4f}+-{d.std() / len(d) ** 0.5:.4f}"
        e = result["_a8"] - base["_a8"]
        line["da8"] = f"{e.mean():+.3f}+-{e.std() / len(e) ** 0.5:.3f}"
    print(name, json.dumps(line), time.strftime("%H:%M:%S"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("text", "score"))
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--lab", type=Path)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--length", type=int, default=240)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "text":
        return make_text(args.checkpoint, args.model, args.lab, args.prompts, args.length)
    lab = Lab(args.checkpoint, args.lab)
    base = lab.score({})
    show("reference", base)
    show("linears", lab.score(packed_draft(args.model, lab.architecture, head=False)))
    show("linears+head", lab.score(packed_draft(args.model, lab.architecture)))


if __name__ == "__main__":
    main()
