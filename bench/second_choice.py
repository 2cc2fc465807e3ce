#!/usr/bin/env python3
"""How often the token that the draft did not expect is its second choice: what `SECOND` in twobit/predict.py rests on.

    python bench/second_choice.py MODEL [--kind code] [--prompts 7] [--tokens 64]

Greedy text of the full model, and the draft's logits over it in blocks of four, as a step drafts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling
from twobit.runtime.session import Session, StepOptions
from twobit.runtime.tokenizer import Tokenizer

BLOCK = 4


def choices(model: Model, prompt: list[int], n: int) -> list[int]:
    """For each of n tokens behind the prompt its place in the draft's order, 0 the first."""
    session, text = Session(model, len(prompt) + n + 64), list(prompt)
    session.sync(text[:-1])
    while len(text) < len(prompt) + n:
        text += session.step(text, Sampling(), StepOptions()).tokens
    session.rewind(0)
    session.sync(text[: len(prompt) - 1])
    found = []
    for at in range(len(prompt) - 1, len(prompt) + n - 1, BLOCK):
        block = text[at : at + BLOCK]
        logits = session.eval(block, every=True, draft=True)
        assert logits is not None
        for row, token in zip(logits, text[at + 1 : at + 1 + BLOCK], strict=False):
            found.append(int((row > row[token]).sum()))
        session.sync(text[: at + BLOCK])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="how often a miss is the draft's second choice")
    parser.add_argument("model")
    parser.add_argument("--kind", default="code")
    parser.add_argument("--prompts", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    model, tokenizer = Model.open(args.model), Tokenizer.load(args.model)
    prompts = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))[args.kind]
    places: list[int] = []
    for prompt in prompts[: args.prompts]:
        places += choices(model, tokenizer.encode(prompt), args.tokens)
    first, second = (int(np.sum(np.array(places) == k)) for k in (0, 1))
    missed = len(places) - first
    print(f"{len(places)} tokens: first choice {first}, of {missed} others {second} the second, {second / missed:.2f}")


if __name__ == "__main__":
    main()
