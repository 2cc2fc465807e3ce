#!/usr/bin/env python3
"""Variants of the draft's quantization side by side on the first layers of a checkpoint; see docs/quantizer.md."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from draft_lab import Lab, show

from twobit.format import layout
from twobit.quant import calibrate, pipeline
from twobit.quant.calibrate import SHARED
from twobit.quant.decoder import Cache
from twobit.quant.rounding import prepare, round_draft
from twobit.quant.tune import drafting

PARTS = ("q", "o", "gate", "down")


class Stop(Exception):
    pass


def stop_at(decoder, index, x, weights, attend, module):
    """The input of a linear of the layer; the stream before its sublayer is left in stop_at.mid."""
    found = []
    real = decoder.norm
    layer = decoder.architecture.layers[index]
    calls = []

    def norm(y, w):
        calls.append(y)
        return real(y, w)

    def hook(name, v):
        if name == module:
            found.append(v)
            raise Stop

    decoder.norm = norm
    try:
        decoder.layer(index, x, weights, attend=attend, hook=hook)
    except Stop:
        pass
    finally:
        decoder.norm = real
    # streams are what the layer's norms of width hidden see: [x] for attention, [x, mid] after it
    stop_at.mid = calls[0] if module.endswith(("q_proj", "k_proj", "v_proj", "o_proj")) else calls[-1]
    return found[0]


def own_text(lab, count, length):
    """Chats that the demo model wrote, from the end of the calibration text: what stands in for its own text."""
    encode = calibrate.Encoder(lab.checkpoint.folder, lab.architecture.vocab, pipeline._render(lab.checkpoint))
    docs = [d for d in calibrate.load_default() if d.source.startswith("generated/")]
    return [encode.prefix + tuple(encode(d)[:length]) for d in docs[-count:]]


class Variant:
    def __init__(
        self,
        name,
        lab,
        states,
        *,
        seq=False,
        alpha=0.0,
        damping=0.1,
        norm=False,
        tune=None,
        refh=False,
        groups=None,
        stream=0.0,
        lam=None,
    ):
        self.stream = stream
        self.name, self.lab, self.lam = name, lab, lam or damping
        self.seq, self.alpha, self.damping, self.norm, self.tune, self.refh = seq, alpha, damping, norm, tune, refh
        self.states = [s.clone() for s in states]
        self.draft = {}
        self.seconds = 0.0

    def layer(self, index, weights, ref_inputs, caches, ref_out, specs):
        t0 = time.process_time()
        lab = self.lab
        mix = dict(weights)
        linear = [s for s in specs if s.role == "linear"]
        rounded = {}
        attends = [drafting(*caches[i]._layers[index], first=i % 8) for i in range(len(self.states))]
        for part in PARTS:
            group = [s for s in linear if SHARED[s.part] == part]
            if self.seq:
                mine, mids = [], []
                for i, x in enumerate(self.states):
                    mine.append(stop_at(lab.decoder, index, x, mix, attends[i], group[0].module))
                    mids.append(stop_at.mid)
            else:
                mine = [r[part] for r in ref_inputs]
            xd = torch.cat(mine)
            xr = torch.cat([r[part] for r in ref_inputs])
            if self.norm:
                w = xr.square().mean(-1, keepdim=True).clamp_min(1e-20).rsqrt()
                w = w.clamp_max(w.median() * 4)
                xd, xr = xd * w, xr * w
            h = xd.T @ xd
            factor = prepare(h, self.damping)
            for s in group:
                w = weights[s.name]
                target = w
                if self.seq and self.alpha:
                    dy = (xr - xd) @ w.T
                    if self.stream and part in ("o", "down"):
                        mid = torch.cat(mids)  # the draft's stream before this is added
                        ref_mid = torch.cat(
                            [r["mid"] for r in ref_inputs] if part == "down" else [r["in"] for r in ref_inputs]
                        )
                        extra = ref_mid - mid
                        scale = 1.0
                        dy = dy + self.stream * extra
                        if self.norm:
                            raise SystemExit("norm and stream")
                    damped = h + torch.eye(len(h)) * (self.lam * h.diagonal().mean())
                    target = w + self.alpha * torch.cholesky_solve((dy.T @ xd).T, torch.linalg.cholesky(damped)).T
                r = round_draft(target, factor, threads=2)
                rounded[s.name] = r
                mix[s.name] = dq(r)
        if self.tune:
            self.tuned(index, mix, rounded, attends, ref_out, specs)
        for i, x in enumerate(self.states):
            self.states[i] = lab.decoder.layer(index, x, mix, attend=attends[i])
        for s in linear:
            self.draft[s.name] = mix[s.name]
        self.seconds += time.process_time() - t0
        err = sum(
            float(((a - b).square().sum(-1) / b.square().sum(-1)).mean()) for a, b in zip(self.states, ref_out)
        ) / len(ref_out)
        return err

    def tuned(self, index, mix, rounded, attends, ref_out, specs):
        o = self.tune
        lat = {}
        for name, r in rounded.items():
            g = -(-r.codes.shape[1] // 16)
            lat[name] = [
                torch.from_numpy(r.codes.copy()).float(),
                torch.from_numpy(r.s.copy()).float(),
                torch.from_numpy(r.m.copy()).float(),
                torch.zeros(len(r.s)),
            ]
        for l in lat.values():
            for j, t in enumerate(l):
                t.requires_grad_(o["lr"][j] > 0)
        opt = torch.optim.Adam(
            [{"params": [l[j] for l in lat.values()], "lr": o["lr"][j]} for j in range(4) if o["lr"][j] > 0],
            betas=o.get("betas", (0.9, 0.95)),
            foreach=True,
        )
        steps = o["epochs"] * len(self.states) // o["batch"]
        sched = (
            torch.optim.lr_scheduler.OneCycleLR(
                opt, max_lr=[g["lr"] for g in opt.param_groups], total_steps=steps, pct_start=0.2
            )
            if steps > 4
            else None
        )
        rd = lambda t, a, b: (t.round().clamp(a, b) - t).detach() + t
        consts = {
            n: (
                torch.from_numpy(r.row_scale.copy()),
                torch.from_numpy(r.row_a.astype("f4")),
                torch.from_numpy(r.row_b.astype("f4")),
            )
            for n, r in rounded.items()
        }

        def weight(name):
            z, s, m, u = lat[name]
            U, A, B = consts[name]
            rows, cols = z.shape
            q = (2 * rd(z, 0, 3) - 3).view(rows, -1, 16) * (rd(s, 0, 15) * A[:, None])[..., None] + (
                rd(m, -8, 7) * B[:, None]
            )[..., None]
            return q.view(rows, -1)[:, :cols] * (U * (1 + u))[:, None]

        losses = []
        order = []
        for e in range(o["epochs"]):
            order += torch.randperm(len(self.states), generator=torch.Generator().manual_seed(e)).tolist()
        for step in range(steps):
            with torch.enable_grad():
                w = dict(mix)
                for name in lat:
                    w[name] = weight(name)
                loss = 0
                for i in order[step * o["batch"] : (step + 1) * o["batch"]]:
                    out = self.lab.decoder.layer(index, self.states[i], w, attend=attends[i])
                    loss = (
                        loss + ((out - ref_out[i]).square().sum(-1) / ref_out[i].square().sum(-1)).mean() / o["batch"]
                    )
                opt.zero_grad()
                loss.backward()
            opt.step()
            if sched:
                sched.step()
            losses.append(float(loss))
        for name in lat:
            mix[name] = weight(name).detach()
        n = max(1, len(losses) // 4)
        if index % 4 == 0:
            print("   tune", index, f"{sum(losses[:n]) / n:.5f} -> {sum(losses[-n:]) / n:.5f}", flush=True)


def dq(r):
    rows, cols = r.codes.shape
    q = (2 * torch.from_numpy(r.codes).float() - 3).view(rows, -1, 16) * (
        torch.from_numpy(r.s).float() * torch.from_numpy(r.row_a).float()[:, None]
    )[..., None]
    q = q + (torch.from_numpy(r.m).float() * torch.from_numpy(r.row_b).float()[:, None])[..., None]
    return q.view(rows, -1)[:, :cols] * torch.from_numpy(r.row_scale)[:, None]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--lab", type=Path)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--own", type=int, default=0)
    parser.add_argument("variants", nargs="+", help="name:key=value,key=value")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("T", "1")))
    torch.set_grad_enabled(False)
    lab = Lab(args.checkpoint, args.lab)
    encode = calibrate.Encoder(lab.checkpoint.folder, lab.architecture.vocab, pipeline._render(lab.checkpoint))
    docs = calibrate.load_default()
    if args.own:
        docs = [d for d in docs if d.source.startswith("generated/")] + [
            d for d in docs if not d.source.startswith("generated/")
        ]
    seqs = calibrate.sequences(docs, encode, tokens=args.tokens, source="").sequences
    print("sequences", len(seqs), "tokens", sum(map(len, seqs)), flush=True)
    states = [lab.decoder.embed(s, lab.weights) for s in seqs]
    variants = []
    for v in args.variants:
        name, _, settings = v.partition(":")
        variants.append(Variant(name, lab, states, **(eval(f"dict({settings})"))))
    n = min(args.layers, lab.n_layers)
    for index in range(n):
        specs = [s for s in lab.specs if s.layer == index]
        weights = {s.name: lab.weights[s.name] for s in specs}
        inputs, caches, outs = [], [], []
        for x in states:
            got, cache = {}, Cache()
            by = {s.module: SHARED[s.part] for s in specs if s.role == "linear"}
            outs.append(
                lab.decoder.layer(index, x, weights, cache=cache, hook=lambda m, v, got=got: got.setdefault(by[m], v))
            )
            got["in"] = x
            stop_at(lab.decoder, index, x, weights, None, [s.module for s in specs if s.part == "down"][0])
            got["mid"] = stop_at.mid
            inputs.append(got), caches.append(cache)
        errs = [v.layer(index, weights, inputs, caches, outs, specs) for v in variants]
        states = outs
        if index % 3 == 0 or index == n - 1:
            print(
                index,
                " ".join(f"{v.name}={e:.5f}" for v, e in zip(variants, errs)),
                time.strftime("%H:%M:%S"),
                flush=True,
            )
    base = None
    for v in variants:
        r = lab.score(v.draft)
        show(f"{v.name} ({v.seconds:.0f} cpu-s)", r, base)
        base = base or r


if __name__ == "__main__":
    main()
