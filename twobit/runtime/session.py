"""One sequence on the C runtime: its KV cache, and the speculative step. One call into C per step, without the GIL."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from pathlib import Path

import numpy as np

from twobit.errors import RuntimeFailure, UsageError
from twobit.runtime import session_file
from twobit.runtime.generate import KINDS
from twobit.runtime.lib import call, default_threads, ffi, lib
from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling

MAX_THREADS = 1024
MAX_DRAFT = int(lib.TB_MAX_DRAFT)


class Use(IntFlag):
    """What may propose tokens, and how. It decides about speed only."""

    LOOKUP = int(lib.TB_USE_LOOKUP)  # what followed the longest match of the text's end in prompt and output
    DRAFT = int(lib.TB_USE_DRAFT)  # the 2-bit weights
    RECYCLED = int(lib.TB_USE_RECYCLED)  # what the full model found likely after the same token before
    TREE = int(lib.TB_USE_TREE)  # several continuations at once
    SHORT_HEAD = int(lib.TB_USE_SHORT_HEAD)  # the draft computes the logits of a part of the vocabulary
    OVERLAP = int(lib.TB_USE_OVERLAP)  # hybrid: the draft goes on while the CPU verifies
    CHAIN = int(lib.TB_USE_CHAIN)  # hybrid: draft passes that the device starts from what it has found itself
    ALL = int(lib.TB_USE_ALL)


@dataclass(frozen=True)
class StepOptions:
    """draft_max: most proposed tokens per step, 0 is plain decoding; draft_fixed: a chain of always that many from the
    2-bit weights instead of as many as pay; draft_tree: the same as a tree of all proposers in `use`; draft_vocab: rows
    of the draft's short head, 0 is chosen from the vocabulary; budget: emit at most this many tokens; draft_only: the
    2-bit part alone decodes (lossy); logprobs: None, or how many likeliest tokens to report beside the emitted one;
    draft_full: layers whose residual is in the GPU's memory draft with it, or do not; None: as measured cost says, and
    a fixed draft does not."""

    draft_max: int = 16
    draft_fixed: bool = False
    budget: int = 1 << 30
    draft_only: bool = False
    eos: frozenset[int] = field(default_factory=frozenset)
    draft_tree: bool = False
    use: Use = Use.ALL
    draft_vocab: int = 0
    logprobs: int | None = None
    draft_full: bool | None = None


@dataclass(frozen=True)
class StepResult:
    """Tokens emitted in order (1 or more), what was proposed for them, and where the time went.

    drafted: tokens proposed and verified; accepted: those of them emitted; depth: the longest path proposed. By kind of
    proposal, as in KINDS. draft_passes over draft_tokens tokens, `chained` of them started without waiting for the one
    before; overlapped_passes ran while the step verified; full: they ran at full precision where the residual is in the
    GPU's memory; early: how many of `drafted` came from such passes of the step before, early_accepted: of `accepted`.
    bytes: of weights read. logprobs: per emitted token its natural log probability under the model alone, before bias,
    penalties and temperature; top_logprobs: the likeliest tokens with theirs; both empty unless asked for.
    """

    tokens: list[int]
    drafted: int
    accepted: int
    hit_eos: bool
    draft_s: float
    verify_s: float
    sample_s: float
    depth: int
    drafted_by_kind: list[int]
    accepted_by_kind: list[int]
    draft_passes: int
    draft_tokens: int
    chained: int
    overlapped_passes: int
    full: bool
    early: int
    early_accepted: int
    bytes: float
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class Belief:
    """What a session has measured. Costs in plain steps, by number of tokens in a pass: those measured. rate: tokens
    per plain step as of late. spent: what all steps so far cost by these costs, in plain steps. promise: tokens per
    plain step that drafting promises with 2 bits, and at full precision in the layers whose residual is in the GPU's
    memory; 0 where not known. accept: per kind of proposal and bin of confidence, (chance, how often seen)."""

    plain_s: float
    rate: float
    spent: float
    draft: dict[int, float]
    verify: dict[int, float]
    overlap: float
    promise: tuple[float, float]
    accept: dict[str, list[tuple[float, float]]]
    head_rows: int


class Session:
    """max_context: positions the cache may grow to; threads None: one per usable core."""

    def __init__(self, model: Model, max_context: int, threads: int | None = None) -> None:
        self.model = model
        self.max_context = max_context
        self.threads = default_threads() if threads is None else threads
        if not 1 <= self.threads <= MAX_THREADS:
            raise UsageError(f"{self.threads} threads: between 1 and {MAX_THREADS} are possible")
        buffer = ffi.new("char[512]")
        pointer = lib.tb_session_new(model.c_model, max_context, self.threads, buffer, 512)
        if pointer == ffi.NULL:
            raise RuntimeFailure(ffi.string(buffer).decode())
        self._session = ffi.gc(pointer, lib.tb_session_free)
        self._chunk = 256 if model.placed is None else model.placed.pass_tokens

    @property
    def length(self) -> int:
        """Tokens that the cache holds."""
        return int(lib.tb_session_length(self._session))

    @property
    def bytes(self) -> int:
        """Memory of cache and scratch."""
        return int(lib.tb_session_bytes(self._session))

    @property
    def product_seconds(self) -> float:
        """Time spent in matrix products since the session was made."""
        return float(lib.tb_session_product_seconds(self._session))

    def eval(
        self,
        ids: Sequence[int],
        *,
        chunk: int | None = None,
        every: bool = False,
        logits: bool = True,
        draft: bool = False,
    ) -> np.ndarray | None:
        """Append tokens. fp32 logits [vocab] of the last one, [len(ids), vocab] with `every`, None without `logits`.

        chunk: tokens of a pass, None for what suits the device."""
        chunk = self._chunk if chunk is None else chunk
        tokens = ffi.new("int32_t[]", list(ids))
        out = np.empty((len(ids) if every else 1, self.model.vocab), np.float32) if logits else None
        pointer = ffi.NULL if out is None else ffi.from_buffer("float[]", out)
        if draft:
            call(lib.tb_session_eval_draft, self._session, tokens, len(ids), every, pointer)
        else:
            call(lib.tb_session_eval, self._session, tokens, len(ids), chunk, every, pointer)
        return out if out is None or every else out[0]

    def step(self, history: Sequence[int], sampling: Sampling, options: StepOptions) -> StepResult:
        """Emit the next tokens. `history` is everything so far; the cache holds all of it but the last token."""
        struct, keep = sampling.to_c()
        eos = ffi.new("int32_t[]", sorted(options.eos) or [-1])
        c_options = ffi.new(
            "tb_step_options *",
            {
                "draft_max": min(options.draft_max, MAX_DRAFT),
                "draft_fixed": 2 if options.draft_tree else int(options.draft_fixed),
                "draft_full": 0 if options.draft_full is None else 1 if options.draft_full else -1,
                "use": int(options.use),
                "draft_vocab": options.draft_vocab,
                "budget": options.budget,
                "draft_only": options.draft_only,
                "logprobs": -1 if options.logprobs is None else options.logprobs,
                "n_eos": len(options.eos),
                "eos": eos,
            },
        )
        r = ffi.new("tb_step_result *")
        if isinstance(history, array) and history.itemsize == 4:
            tokens = ffi.from_buffer("int32_t[]", history)
        else:
            tokens = ffi.new("int32_t[]", list(history))
        call(lib.tb_session_step, self._session, tokens, len(history), struct, c_options, r)
        del keep
        n, top = r.n_tokens, options.logprobs or 0
        pairs = [(r.top_ids[i], r.top_logprobs[i]) for i in range(n * top)]
        return StepResult(
            tokens=list(r.tokens[0:n]),
            drafted=r.drafted,
            accepted=r.accepted,
            hit_eos=bool(r.hit_eos),
            draft_s=r.draft_s,
            verify_s=r.verify_s,
            sample_s=r.sample_s,
            depth=r.depth,
            drafted_by_kind=list(r.drafted_by_kind),
            accepted_by_kind=list(r.accepted_by_kind),
            draft_passes=r.draft_passes,
            draft_tokens=r.draft_tokens,
            chained=r.chained,
            overlapped_passes=r.overlapped_passes,
            full=bool(r.full),
            early=r.early,
            early_accepted=r.early_accepted,
            bytes=r.bytes,
            logprobs=[] if options.logprobs is None else list(r.logprob[0:n]),
            top_logprobs=[[p for p in pairs[i * top : i * top + top] if p[0] >= 0] for i in range(n if top else 0)],
        )

    def stream_from(self, tokens: int) -> None:
        """Tokens from which a pass brings the residual to the device: 0 as measured, -1 never. The same bits."""
        lib.tb_session_stream_from(self._session, tokens)

    @property
    def bus(self) -> dict[str, dict[str, int]]:
        """Bytes that crossed the bus so far, by phase: to the device, back, and how many of them were weights."""
        view = ffi.new("tb_bus *")
        lib.tb_session_bus(self._session, view)
        return {
            name: {"to": int(view.to[i]), "back": int(view.back[i]), "weights": int(view.weights[i])}
            for i, name in enumerate(("prefill", "draft", "verify"))
        }

    @property
    def belief(self) -> Belief:
        """What the session has measured so far, and decides by."""
        view = ffi.new("tb_belief_view *")
        lib.tb_session_belief(self._session, view)
        return Belief(
            plain_s=view.plain_s,
            rate=view.rate,
            spent=view.spent,
            draft={m: cost for m, cost in enumerate(view.draft) if cost > 0},
            verify={m: cost for m, cost in enumerate(view.verify) if cost > 0},
            overlap=view.overlap,
            promise=(view.promise[0], view.promise[1]),
            accept={kind: list(zip(view.accept[k], view.seen[k], strict=True)) for k, kind in enumerate(KINDS)},
            head_rows=view.head_rows,
        )

    def pin_costs(self, draft: Sequence[float], verify: Sequence[float]) -> None:
        """Decide by given costs instead of measured ones: decisions then depend on the text alone.

        Plain steps per pass over 1, 2, ... tokens; the last two go on in a straight line. At least two of each.
        """
        if min(len(draft), len(verify)) < 2 or min(*draft, *verify) <= 0:
            raise UsageError("costs of passes are positive, and at least two for draft and verification")

        def line(costs: Sequence[float], n: int) -> list[float]:
            slope = costs[-1] - costs[-2]
            return [0.0, *costs, *(costs[-1] + slope * (i + 1) for i in range(n - len(costs)))][: n + 1]

        tables = (ffi.new("double[]", line(draft, MAX_DRAFT)), ffi.new("double[]", line(verify, MAX_DRAFT + 1)))
        lib.tb_session_pin_costs(self._session, *tables)

    @property
    def tokens(self) -> list[int]:
        """The tokens that the cache holds."""
        return list(ffi.unpack(lib.tb_session_tokens(self._session), self.length)) if self.length else []

    def sync(self, ids: Sequence[int], *, chunk: int | None = None) -> int:
        """Make the cache hold exactly `ids`: the common prefix stays, the rest is evaluated; returns how many that was.

        What the 2-bit part alone evaluated is never kept, and a sliding window may make it go back further.
        """
        kept = int(lib.tb_session_keep(self._session, ffi.new("int32_t[]", list(ids) or [0]), len(ids)))
        if kept < len(ids):
            self.eval(ids[kept:], chunk=chunk, logits=False, draft=self.model.draft_only)
        return len(ids) - kept

    def save(self, path: str | Path) -> None:
        """Write the cache to a file that `load` reads; it appears complete or not at all."""
        length, high = self.length, int(lib.tb_session_high(self._session))
        state = np.empty(int(lib.tb_session_state_bytes(self._session, length, high)), np.uint8)
        call(lib.tb_session_state_get, self._session, ffi.from_buffer("uint8_t[]", state), state.size)
        build = self.model.packed.manifest.build_id
        session_file.write(Path(path), session_file.State(build, high, self.tokens, state))

    def load(self, path: str | Path) -> int:
        """Replace the cache by a saved one; returns its length. The bits are those of evaluating its tokens again.

        Raises FormatError for a file that is damaged, of another model or of another twobit, UsageError where the
        context is too small. The session is as before then.
        """

        def size(length: int, high: int) -> int:
            return int(lib.tb_session_state_bytes(self._session, length, high))

        saved = session_file.read(Path(path), self.model.packed.manifest.build_id, self.max_context, size)
        tokens = ffi.new("int32_t[]", saved.tokens or [0])
        state = ffi.from_buffer("uint8_t[]", saved.state)
        call(lib.tb_session_state_set, self._session, tokens, len(saved.tokens), saved.high, state, saved.state.size)
        return self.length

    def rewind(self, length: int) -> None:
        """Forget the positions from `length` on."""
        call(lib.tb_session_rewind, self._session, length)

    def abort(self, on: bool = True) -> None:
        """Make the call in progress, or the next one, stop with KeyboardInterrupt; `abort(False)` clears it."""
        lib.tb_session_abort(self._session, on)
