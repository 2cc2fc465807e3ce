"""Sampling parameters and the keyed sampler: a pure function of (logits, history, parameters, position)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twobit.runtime.lib import call, ffi, lib


@dataclass(frozen=True)
class Sampling:
    """In this order: logit bias, penalties over the last `repeat_last_n` tokens, temperature, top-k, top-p, min-p.

    temperature 0 takes the likeliest token; top_k 0, top_p 1 and min_p 0 are off; repeat_last_n -1 is all history.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: int = 64
    seed: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)

    def to_c(self) -> tuple[Any, list[Any]]:
        """The C struct, and what must stay alive as long as it is used."""
        ids = ffi.new("int32_t[]", list(self.logit_bias) or [0])
        values = ffi.new("float[]", list(self.logit_bias.values()) or [0.0])
        struct = ffi.new(
            "tb_sampling *",
            {
                "temperature": self.temperature,
                "top_p": self.top_p,
                "min_p": self.min_p,
                "repeat_penalty": self.repeat_penalty,
                "presence_penalty": self.presence_penalty,
                "frequency_penalty": self.frequency_penalty,
                "top_k": min(self.top_k, 2**31 - 1),
                "repeat_last_n": self.repeat_last_n,
                "seed": self.seed,
                "n_bias": len(self.logit_bias),
                "bias_ids": ids,
                "bias_values": values,
            },
        )
        return struct, [ids, values]


def sample(logits: np.ndarray, history: Sequence[int], sampling: Sampling, position: int) -> int:
    """The token for `position` given fp32 logits [vocab] and the tokens before it."""
    logits = np.ascontiguousarray(logits, dtype=np.float32)
    struct, keep = sampling.to_c()
    token = ffi.new("int32_t *")
    ids = ffi.new("int32_t[]", list(history) or [0])
    call(lib.tb_sample, ffi.from_buffer("float[]", logits), logits.size, ids, len(history), struct, position, token)
    del keep
    return int(token[0])
