"""A plain fp32 decoder in torch, driven by `Architecture`: the executable version of the model maths.

It serves calibration (one layer at a time, with the input of every linear), evaluation, and the tests that compare the
C runtime with it (activations rounded as the kernels round them, keys and values through fp16). The order of operations
is that of `transformers` in fp32 with eager attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from twobit.architecture import Architecture, Layer, Rope

Weights = Mapping[str, torch.Tensor]
"""Canonical tensor name (as in `Architecture.tensors`) -> fp32 tensor."""

Hook = Callable[[str, torch.Tensor], None]
"""Called with a linear's module name, e.g. model.layers.0.self_attn.q_proj, and its input [..., n, cols], not rounded.
Linears that share an input (q/k/v, gate/up) get the same tensor object."""

QUERY_CHUNK = 128
"""Queries whose attention scores are in memory at once."""

Attend = Callable[[Layer, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of another kind: layer, queries [..., heads, n, d], keys and values [..., kv heads, n, d] -> as queries."""


@dataclass(frozen=True)
class RuntimeRounding:
    """What the C runtime rounds: the input of every linear, and keys and values.

    (L, group) is per matrix: each token's group of columns becomes clamp(rint(v * (L / amax)), -L, L) * (amax / L).
    """

    activations: tuple[int, int] | None = (8191, 128)
    """(L, group) of matrices that `matrices` does not name; None: not rounded."""
    matrices: Mapping[str, tuple[int, int] | None] = field(default_factory=dict)
    """Module name -> (L, group); the head is lm_head."""
    fp16_cache: bool = True

    def of(self, module: str) -> tuple[int, int] | None:
        return self.matrices.get(module, self.activations)


def round_activations(x: torch.Tensor, limit: int, group: int) -> torch.Tensor:
    """fp32 [..., cols] rounded per token and group of columns (the last may be short) to at most `limit` steps.

    A group whose largest magnitude is below 1e-30 becomes zeros.
    """
    cols = x.shape[-1]
    padded = F.pad(x, (0, -cols % group)).unflatten(-1, (-1, group))
    amax = padded.abs().amax(-1, keepdim=True)
    live = amax >= 1e-30
    safe = torch.where(live, amax, 1.0)
    steps = torch.clamp(torch.round(padded * (limit / safe)), -limit, limit)
    return torch.where(live, steps * (safe / limit), 0.0).flatten(-2)[..., :cols]


class Cache:
    """Keys (after norm and rope) and values of every layer, [..., kv heads, positions, head_dim], none dropped."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def length(self, layer: int) -> int:
        """Positions that layer holds."""
        return self._layers[layer][0].shape[-2] if layer in self._layers else 0

    def of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all positions of a layer."""
        return self._layers[layer]

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds positions and returns all of them."""
        if layer in self._layers:
            old_keys, old_values = self._layers[layer]
            keys, values = torch.cat((old_keys, keys), -2), torch.cat((old_values, values), -2)
        self._layers[layer] = keys, values
        return keys, values

    def truncate(self, length: int) -> None:
        """Forgets the positions from `length` on."""
        self._layers = {i: (k[..., :length, :], v[..., :length, :]) for i, (k, v) in self._layers.items()}


class Decoder:
    """Runs a model of `architecture`; `weights` may be left out where every call brings its own."""

    def __init__(
        self, architecture: Architecture, weights: Weights | None = None, rounding: RuntimeRounding | None = None
    ) -> None:
        self.architecture = architecture
        self.rounding = rounding
        self._weights: Weights = {} if weights is None else weights
        self._names: list[dict[tuple[str, str], str]] = [{} for _ in architecture.layers]
        for spec in architecture.tensors():
            if spec.layer is not None:
                self._names[spec.layer][spec.part, spec.role] = spec.name

    @torch.no_grad()
    def forward(
        self, tokens: Sequence[int] | torch.Tensor, cache: Cache | None = None, hook: Hook | None = None
    ) -> torch.Tensor:
        """Logits fp32 [..., n, vocab] after every token of ids [..., n].

        With a cache the tokens continue what it holds, and are added to it.
        """
        x = self.embed(tokens)
        for i in range(len(self.architecture.layers)):
            x = self.layer(i, x, cache=cache, hook=hook)
        return self.head(x, hook=hook)

    def embed(self, tokens: Sequence[int] | torch.Tensor, weights: Weights | None = None) -> torch.Tensor:
        """Input of the first layer, fp32 [..., n, hidden], for token ids [..., n]."""
        table = self._table(weights, "model.embed_tokens.weight", "lm_head.weight")
        ids = torch.as_tensor(tokens, dtype=torch.long, device=table.device)
        x = F.embedding(ids, table).float()
        scale = self.architecture.embedding_scale
        return x if scale == 1.0 else x * scale

    def layer(
        self,
        index: int,
        x: torch.Tensor,
        weights: Weights | None = None,
        cache: Cache | None = None,
        hook: Hook | None = None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """Output of layer `index`, [..., n, hidden], for its input x of the same shape (x is not changed).

        The first of the n positions is 0, or as many as the cache holds for this layer. `attend` replaces the causal
        attention over these positions. Gradients are recorded where a weight or x asks for them.
        """
        mixed = self.mixed(index, x, weights, cache, hook, attend)
        middle = self.after_attention(index, x, mixed, weights, hook)
        return self.after_ffn(index, middle, self.gated(index, middle, weights, hook), weights, hook)

    # The four steps of a layer, each up to the input of a linear.

    def normed(self, index: int, x: torch.Tensor, norm: str, weights: Weights | None = None) -> torch.Tensor:
        """Input of q, k and v (norm "input_norm", of the layer's input) or of gate and up ("pre_ffn_norm")."""
        return self._part(index, weights, None).norm(x, norm)

    def mixed(
        self,
        index: int,
        x: torch.Tensor,
        weights: Weights | None = None,
        cache: Cache | None = None,
        hook: Hook | None = None,
        attend: Attend | None = None,
    ) -> torch.Tensor:
        """What attention gives for the layer's input: the input of o."""
        part = self._part(index, weights, hook)
        return self._attention(self.architecture.layers[index], part, part.norm(x, "input_norm"), cache, attend)

    def after_attention(
        self, index: int, x: torch.Tensor, mixed: torch.Tensor, weights: Weights | None = None, hook: Hook | None = None
    ) -> torch.Tensor:
        """The layer's input with what o adds to it."""
        return self.joined_attention(index, x, self._part(index, weights, hook).linear(mixed, "o"), weights)

    def joined_attention(
        self, index: int, x: torch.Tensor, answer: torch.Tensor, weights: Weights | None = None
    ) -> torch.Tensor:
        """`after_attention`, given what o answers."""
        return x + self._part(index, weights, None).norm(answer, "post_attention_norm")

    def gated(
        self, index: int, x: torch.Tensor, weights: Weights | None = None, hook: Hook | None = None
    ) -> torch.Tensor:
        """The input of down, for what `after_attention` gave."""
        part = self._part(index, weights, hook)
        a = part.norm(x, "pre_ffn_norm")
        gate, up = part.linear(a, "gate"), part.linear(a, "up")
        return self._activate(gate) * up

    def after_ffn(
        self, index: int, x: torch.Tensor, gated: torch.Tensor, weights: Weights | None = None, hook: Hook | None = None
    ) -> torch.Tensor:
        """The layer's output, for what `after_attention` and `gated` gave."""
        return self.joined_ffn(index, x, self._part(index, weights, hook).linear(gated, "down"), weights)

    def joined_ffn(
        self, index: int, x: torch.Tensor, answer: torch.Tensor, weights: Weights | None = None
    ) -> torch.Tensor:
        """`after_ffn`, given what down answers."""
        part = self._part(index, weights, None)
        x = x + part.norm(answer, "post_ffn_norm")
        if self.architecture.layers[index].output_scale:
            x = x * part.weights[part.names["output_scale", "scalar"]]
        return x

    def answer(self, index: int, part: str, inputs: torch.Tensor, weights: Weights | None = None) -> torch.Tensor:
        """What the layer's linear `part` ("q" ... "down") gives for its inputs, bias included."""
        return self._part(index, weights, None).linear(inputs, part)

    def _part(self, index: int, weights: Weights | None, hook: Hook | None) -> _Part:
        return _Part(self, self._names[index], self._weights if weights is None else weights, hook)

    def head(self, x: torch.Tensor, weights: Weights | None = None, hook: Hook | None = None) -> torch.Tensor:
        """Logits fp32 [..., vocab] for the last layer's output x [..., hidden]."""
        table = self._table(weights, "lm_head.weight", "model.embed_tokens.weight")
        norm = (self._weights if weights is None else weights)["model.norm.weight"]
        a = self.norm(x, norm)
        if hook is not None:
            hook("lm_head", a)
        logits = F.linear(self.round(a, "lm_head"), table)
        cap = self.architecture.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """RMS norm over the last dimension; no weight: 1."""
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.architecture.norm_eps)
        if weight is None:
            return x
        offset = self.architecture.norm_offset
        return x * (weight if offset == 0.0 else weight + offset)

    def round(self, x: torch.Tensor, module: str) -> torch.Tensor:
        """The input of linear `module` as the runtime sees it."""
        setting = None if self.rounding is None else self.rounding.of(module)
        return x if setting is None else round_activations(x, *setting)

    def _table(self, weights: Weights | None, name: str, tied_to: str) -> torch.Tensor:
        """Embedding or head; a tied model may have either name."""
        table = self._weights if weights is None else weights
        return table[tied_to] if self.architecture.tied and name not in table else table[name]

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        if self.architecture.activation == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh" if self.architecture.activation == "gelu_tanh" else "none")

    def _attention(
        self, layer: Layer, part: _Part, a: torch.Tensor, cache: Cache | None, attend: Attend | None
    ) -> torch.Tensor:
        q, k = part.linear(a, "q"), part.linear(a, "k")
        v = k if layer.value_is_key else part.linear(a, "v")
        if layer.qk_norm == "whole":
            q, k = part.norm(q, "q_norm"), part.norm(k, "k_norm")
        # [..., n, heads * head_dim] -> [..., heads, n, head_dim]
        q, k, v = (t.unflatten(-1, (-1, layer.head_dim)).transpose(-2, -3) for t in (q, k, v))
        if layer.qk_norm == "head":
            q, k = part.norm(q, "q_norm"), part.norm(k, "k_norm")
        if layer.v_norm:
            v = self.norm(v, None)
        start = 0 if cache is None else cache.length(layer.index)
        if layer.rope is not None:
            rope = self.architecture.ropes[layer.rope]
            cos, sin = _angles(rope, start, q.shape[-2], q.device)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if self.rounding is not None and self.rounding.fp16_cache:
            k, v = k.half().float(), v.half().float()
        if cache is not None:
            k, v = cache.append(layer.index, k, v)
        out = _attend(layer, q, k, v, start) if attend is None else attend(layer, q, k, v)
        return out.transpose(-2, -3).flatten(-2)


@dataclass(frozen=True)
class _Part:
    """One layer's weights by what they do."""

    decoder: Decoder
    names: Mapping[tuple[str, str], str]
    weights: Weights
    hook: Hook | None

    def linear(self, x: torch.Tensor, part: str) -> torch.Tensor:
        name = self.names[part, "linear"]
        module = name.removesuffix(".weight")
        if self.hook is not None:
            self.hook(module, x)
        bias = self.names.get((part, "bias"))
        return F.linear(self.decoder.round(x, module), self.weights[name], None if bias is None else self.weights[bias])

    def norm(self, x: torch.Tensor, part: str) -> torch.Tensor:
        """x as it is where the layer has no such norm."""
        name = self.names.get((part, "norm"))
        return x if name is None else self.decoder.norm(x, self.weights[name])


def _angles(rope: Rope, start: int, n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin fp32 [n, dim / 2] of positions from start on; the angle is an fp32 product, as in training."""
    positions = torch.arange(start, start + n, dtype=torch.float32, device=device)
    angles = positions[:, None] * torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
    return angles.cos() * rope.factor, angles.sin() * rope.factor


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the first 2 * cos.shape[-1] dimensions of every head, i with i + half; the others stay."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def never(hidden: torch.Tensor) -> torch.Tensor:
    """What is added to scores: -inf where `hidden`. Many times as fast as `masked_fill`, and the same."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)


def _attend(layer: Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    """Causal attention of queries [..., heads, n, d] at positions start... over all keys [..., kv heads, m, d]."""
    repeat = layer.n_heads // layer.n_kv_heads
    n = q.shape[-2]
    out = torch.empty_like(q)
    for first in range(0, n, QUERY_CHUNK):
        end = min(first + QUERY_CHUNK, n)
        oldest = 0 if layer.window is None else max(0, start + first - layer.window + 1)
        keys = k[..., oldest : start + end, :].repeat_interleave(repeat, -3)
        values = v[..., oldest : start + end, :].repeat_interleave(repeat, -3)
        scores = (q[..., first:end, :] @ keys.transpose(-1, -2)).mul_(layer.attention_scale)
        if layer.attention_softcap is not None:
            scores = layer.attention_softcap * torch.tanh(scores / layer.attention_softcap)
        query = torch.arange(start + first, start + end, device=q.device)[:, None]
        key = torch.arange(oldest, start + end, device=q.device)
        hidden = key > query
        if layer.window is not None:
            hidden |= key <= query - layer.window
        out[..., first:end, :] = scores.add_(never(hidden)).softmax(-1) @ values
    return out
