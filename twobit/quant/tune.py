"""The draft as it is used: its tokens attend to the verifier's keys and values, and to each other inside a block.

`drafting` gives the attention for `Decoder.layer`; everything here is differentiable.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from twobit.architecture import Layer
from twobit.quant.decoder import Attend

BLOCK = 8  # tokens that are drafted before the verifier looks


def drafting(keys: torch.Tensor, values: torch.Tensor, block: int = BLOCK, first: int = 0) -> Attend:
    """Attention of a draft over the verifier's keys and values [..., kv heads, n, d] (after norm and rope).

    Blocks of `block` tokens begin at position `first`, `first` + block, ...; a token sees the verifier's keys of all
    positions before its block and the draft's own inside it.
    """

    def attend(layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        n = q.shape[-2]
        repeat = layer.n_heads // layer.n_kv_heads
        lead = -first % block  # padding, so that blocks start at multiples of `block`
        tail = -(n + lead) % block
        total = n + lead + tail
        at = torch.arange(total) - lead
        query, start = at[:, None], (at + lead)[:, None] // block * block - lead
        past = torch.arange(n)[None]
        hidden = past >= start
        own_key = start + torch.arange(block)
        own_hidden = own_key > query
        if layer.window is not None:
            hidden = hidden | (past <= query - layer.window)
            own_hidden = own_hidden | (own_key <= query - layer.window)
        own_hidden = own_hidden | ((own_key < 0) & (own_key != query))  # padding sees itself

        def padded(x: torch.Tensor) -> torch.Tensor:
            return F.pad(x, (0, 0, lead, tail))

        def blocks(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(-2, (-1, block))

        q, k, v = padded(q).unflatten(-3, (-1, repeat)), padded(k).unsqueeze(-3), padded(v).unsqueeze(-3)
        theirs = q @ keys.unsqueeze(-3).transpose(-1, -2) * layer.attention_scale
        own = (blocks(q) @ blocks(k).transpose(-1, -2)).flatten(-3, -2) * layer.attention_scale
        scores = torch.cat((theirs, own), -1)
        if layer.attention_softcap is not None:
            scores = layer.attention_softcap * torch.tanh(scores / layer.attention_softcap)
        weights = scores.masked_fill(torch.cat((hidden, own_hidden), -1), -torch.inf).softmax(-1)
        out = weights[..., :n] @ values.unsqueeze(-3)
        out = out + (blocks(weights[..., n:]) @ blocks(v)).flatten(-3, -2)
        return out[..., lead : lead + n, :].flatten(-4, -3)

    return attend
