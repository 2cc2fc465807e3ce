"""The draft as it is used: its tokens attend to the verifier's keys and values, and to each other inside a block.

`drafting` gives the attention for `Decoder.layer`; everything here is differentiable.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from twobit.architecture import Layer
from twobit.quant.decoder import Attend, never

BLOCK = 8  # tokens that are drafted before the verifier looks
QUERY_CHUNK = 64  # queries whose attention scores are in memory at once, about


def drafting(keys: torch.Tensor, values: torch.Tensor, block: int = BLOCK, first: int = 0) -> Attend:
    """Attention of a draft over the verifier's keys and values [..., kv heads, n, d] (after norm and rope).

    Blocks of `block` tokens begin at position `first`, `first` + block, ...; a token sees the verifier's keys of all
    positions before its block and the draft's own inside it.
    """
    chunk = max(1, QUERY_CHUNK // block) * block

    def attend(layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n = q.shape[-2]
        repeat = layer.n_heads // layer.n_kv_heads
        lead = -first % block  # padding, so that blocks start at multiples of `block`
        tail = -(n + lead) % block

        def padded(x: torch.Tensor) -> torch.Tensor:
            return F.pad(x, (0, 0, lead, tail))

        def blocks(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-2, (-1, block))

        def folded(x: torch.Tensor) -> torch.Tensor:  # [..., kv heads, repeat, queries, d] -> [..., kv heads, -1, d]
            return x.flatten(-3, -2)

        q = padded(q).unflatten(-3, (-1, repeat)) * layer.attention_scale
        k, v, theirs = padded(k).unsqueeze(-3), padded(v).unsqueeze(-3), keys.transpose(-1, -2)
        out = []
        for start in range(0, n + lead + tail, chunk):
            end = min(start + chunk, n + lead + tail)
            at = torch.arange(start - lead, end - lead, device=q.device)[:, None]  # positions of the queries
            begin = (at + lead) // block * block - lead
            low = 0 if layer.window is None else max(0, start - lead - layer.window + 1)
            high = max(low, min(n, end - lead - block))  # the last block of the chunk sees no more of theirs
            past = torch.arange(low, high, device=q.device)[None]
            own = begin + torch.arange(block, device=q.device)
            hidden, own_hidden = past >= begin, own > at
            if layer.window is not None:
                hidden, own_hidden = hidden | (past <= at - layer.window), own_hidden | (own <= at - layer.window)
            own_hidden = own_hidden | ((own < 0) & (own != at))  # padding sees itself
            query, rows = q[..., start:end, :], slice(start, end)
            own_scores = (blocks(query) @ blocks(k[..., rows, :]).transpose(-1, -2)).flatten(-3, -2)
            scores = (folded(query) @ theirs[..., low:high]).unflatten(-2, (repeat, -1))
            scores = torch.cat((scores, own_scores), -1)
            if layer.attention_softcap is not None:
                scores = layer.attention_softcap * torch.tanh(scores / layer.attention_softcap)
            weights = scores.add_(never(torch.cat((hidden, own_hidden), -1))).softmax(-1)
            mixed = folded(weights[..., : high - low]) @ values[..., low:high, :]
            own_mixed = blocks(weights[..., high - low :]) @ blocks(v[..., rows, :])
            out.append(mixed.unflatten(-2, (repeat, -1)) + own_mixed.flatten(-3, -2))
        return torch.cat(out, -2)[..., lead : lead + n, :].flatten(-4, -3)

    return attend
