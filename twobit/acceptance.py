"""What the draft yields: tokens that are accepted per step along the model's own text, of a chain and of a tree.

As in use, the draft attends to the verifier's keys and values and a step begins where the last one ended; the sampler
draws for draft and verifier with the same noise, so that what is accepted is decided by the tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from twobit.progress import Progress
from twobit.runtime.sampling import Sampling, sample
from twobit.runtime.session import Session, StepOptions

if TYPE_CHECKING:
    Array = NDArray[Any]

DRAFTED = 8  # tokens of a chain
TEMPERATURE = 0.8
_PATHS = """
1 11 111 1111 11111 111111 1111111 11111111
2 21 211 12 121 112 1112 3
"""
TREE = frozenset(tuple(map(int, path)) for path in _PATHS.split())
"""The static tree of 16 nodes. A node is the path to it: 12 is the second choice of the draft after its first choice.
It is the best one for a draft whose first three choices are right 70, 13 and 6 % of the time."""
_RANKS = 3  # choices that the tree asks for


@dataclass(frozen=True)
class Sample:
    """Token ids of which those from index `first` on are predicted, each from all before it."""

    kind: str
    ids: tuple[int, ...]
    first: int

    @property
    def inputs(self) -> tuple[int, ...]:
        """What the models read: all but the last token."""
        return self.ids[:-1]

    @property
    def targets(self) -> tuple[int, ...]:
        """The predicted tokens."""
        return self.ids[self.first :]

    @property
    def positions(self) -> slice:
        """The inputs after which a token is predicted."""
        return slice(self.first - 1, len(self.ids) - 1)


def continued(session: Session, ids: Sequence[int], sampling: Sampling, length: int, eos: frozenset[int]) -> list[int]:
    """`ids` and what the model says after them, up to `length` tokens in all or an end token (which is included)."""
    history = list(ids)
    session.rewind(0)
    if len(history) > 1:
        session.eval(history[:-1], logits=False)
    while len(history) < length:
        step = session.step(history, sampling, StepOptions(budget=length - len(history), eos=eos))
        history += step.tokens
        if step.hit_eos:
            break
    return history


@dataclass(frozen=True)
class Block:
    """One drafted block: kind of text, which policy took the step, and accepted tokens. kl: per depth, in nats,
    KL(verifier || draft) given the text so far."""

    kind: str
    policy: str
    accepted: int
    kl: tuple[float, ...]


def draft_ranks(logits: Array, truth: Sequence[int], sampling: Sampling, position: int) -> list[int]:
    """Which choice of the draft the true token is at each depth: 1, 2, 3, or 0 for none of them.

    logits: fp32 [n, vocab] of the draft for positions from `position` on. A choice is the token that the keyed sampler
    draws after the better choices were taken away; so 1 is what a chain drafts.
    """
    ranks = []
    for depth, token in enumerate(truth):
        row, found = logits[depth].copy(), 0
        for rank in range(1, _RANKS + 1):
            choice = sample(row, (), sampling, position + depth)
            if choice == token:
                found = rank
                break
            row[choice] = -np.inf
        ranks.append(found)
        if not found:  # no path goes on from here
            break
    return ranks + [0] * (len(truth) - len(ranks))


def accepted_chain(ranks: Sequence[int]) -> int:
    """Tokens of a drafted chain that the verifier accepts."""
    return next((i for i, rank in enumerate(ranks) if rank != 1), len(ranks))


def accepted_tree(ranks: Sequence[int]) -> int:
    """Tokens on the longest path of TREE that the verifier accepts."""
    return max(depth for depth in range(len(ranks) + 1) if depth == 0 or tuple(ranks[:depth]) in TREE)


def blocks(session: Session, text: Sample, sampling: Sampling) -> list[Block]:
    """Drafts along the model's own text as speculative decoding would: a step begins after the last step's accepted
    tokens and its own one. Steps that have fewer than DRAFTED tokens of text before them are left out.

    The cache holds the verifier's keys and values. Drafting the true tokens in one pass gives what drafting one by one
    would, as far as drafts are accepted: a draft's logits depend on the tokens before it, never on the batch.
    """
    ids, made = text.ids, []
    session.rewind(0)
    if text.first > 1:
        session.eval(ids[: text.first - 1], logits=False)
    last = len(ids) - 1 - DRAFTED
    if last < text.first - 1:
        return []
    verifier = cast("Array", session.eval(ids[text.first - 1 : -1], every=True))
    session.rewind(0)
    if text.first > 1:
        session.eval(ids[: text.first - 1], logits=False)
    following = {"chain": text.first - 1, "tree": text.first - 1}
    for at in range(text.first - 1, last + 1):  # ids[at] is the newest token, not in the cache yet
        policies = [policy for policy, start in following.items() if start == at]
        if not policies:
            continue
        if at > session.length:
            session.eval(ids[session.length : at], logits=False)
        logits = cast("Array", session.eval(ids[at : at + DRAFTED], every=True, draft=True))
        session.rewind(at)
        ranks = draft_ranks(logits, ids[at + 1 : at + 1 + DRAFTED], sampling, at + 1)
        start = at - text.first + 1
        kl = _kl(verifier[start : start + DRAFTED], logits)
        for policy in policies:
            accepted = (accepted_chain if policy == "chain" else accepted_tree)(ranks)
            made.append(Block(text.kind, policy, accepted, kl))
            following[policy] = at + accepted + 1
    return made


def acceptance(
    session: Session,
    prompts: Sequence[tuple[str, list[int]]],
    temperature: float,
    length: int,
    eos: frozenset[int],
    progress: Progress,
) -> list[Block]:
    """Blocks along the packed model's own continuations of (kind, prompt ids) by up to `length` tokens."""
    made: list[Block] = []
    progress.stage(f"acceptance at temperature {temperature:g}", len(prompts))
    for seed, (kind, ids) in enumerate(prompts):
        sampling = Sampling(temperature=temperature, seed=seed)
        text = continued(session, ids, sampling, len(ids) + length, eos)
        made += blocks(session, Sample(kind, tuple(text), len(ids)), sampling)
        progress.advance(1)
    return made


def _kl(p: Array, q: Array) -> tuple[float, ...]:
    """KL(p || q) of logits [n, vocab], row by row."""
    a = torch.from_numpy(np.ascontiguousarray(p)).double().log_softmax(-1)
    b = torch.from_numpy(np.ascontiguousarray(q)).double().log_softmax(-1)
    return tuple((a.exp() * (a - b)).sum(-1).tolist())


def summarize_blocks(made: Sequence[Block]) -> dict[str, Any]:
    """Tokens per step (the step's own included), means over kinds of text with standard errors over blocks."""
    kinds = list(dict.fromkeys(block.kind for block in made))

    def of(policy: str, value: Callable[[Block], float]) -> tuple[float, float, dict[str, float]]:
        means, variance = {}, 0.0
        for kind in kinds:
            values = np.array([value(b) for b in made if b.kind == kind and b.policy == policy])
            means[kind] = float(values.mean())
            variance += float(values.var(ddof=1)) / len(values) if len(values) > 1 else 0.0
        return float(np.mean(list(means.values()))), math.sqrt(variance) / len(kinds), means

    if not kinds:
        return {"tokens_per_step": None, "stderr": None, "blocks": 0, "tree16_tokens_per_step": None, "by_kind": {}}
    chain, chain_stderr, by_kind = of("chain", lambda b: b.accepted + 1)
    tree, tree_stderr, tree_by_kind = of("tree", lambda b: b.accepted + 1)
    return {
        "tokens_per_step": chain,
        "stderr": chain_stderr,
        "blocks": sum(b.policy == "chain" for b in made),
        "tree16_tokens_per_step": tree,
        "tree16_stderr": tree_stderr,
        "tree16_blocks": sum(b.policy == "tree" for b in made),
        "by_kind": by_kind,
        "tree16_by_kind": tree_by_kind,
        "accepted_by_depth": [
            of("chain", lambda b, d=depth: float(b.accepted > d))[0]  # type: ignore[misc]
            for depth in range(DRAFTED)
        ],
        "kl_by_depth": [of("chain", lambda b, d=depth: b.kl[d])[0] for depth in range(DRAFTED)],  # type: ignore[misc]
    }
