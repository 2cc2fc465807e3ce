"""One sequence on the C runtime: its KV cache, and the speculative step. One call into C per step, without the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from twobit.errors import RuntimeFailure, UsageError
from twobit.runtime import session_file
from twobit.runtime.lib import call, default_threads, ffi, lib
from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling

MAX_THREADS = 1024
MAX_DRAFT = int(lib.TB_MAX_DRAFT)


@dataclass(frozen=True)
class StepOptions:
    """draft_max: most drafted tokens per step, 0 is plain decoding; draft_fixed: always draft that many instead of
    as many as pay; budget: emit at most this many; draft_only: the 2-bit part alone decodes (lossy)."""

    draft_max: int = 16
    draft_fixed: bool = False
    budget: int = 1 << 30
    draft_only: bool = False
    eos: frozenset[int] = field(default_factory=frozenset)


@dataclass(frozen=True)
class StepResult:
    """Tokens emitted in order (1 or more), how many were drafted and accepted, and where the time went."""

    tokens: list[int]
    drafted: int
    accepted: int
    hit_eos: bool
    draft_s: float
    verify_s: float
    sample_s: float


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
        self, ids: Sequence[int], *, chunk: int = 256, every: bool = False, logits: bool = True, draft: bool = False
    ) -> np.ndarray | None:
        """Append tokens. fp32 logits [vocab] of the last one, [len(ids), vocab] with `every`, None without `logits`."""
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
                "draft_fixed": options.draft_fixed,
                "budget": options.budget,
                "draft_only": options.draft_only,
                "n_eos": len(options.eos),
                "eos": eos,
            },
        )
        result = ffi.new("tb_step_result *")
        tokens = ffi.new("int32_t[]", list(history))
        call(lib.tb_session_step, self._session, tokens, len(history), struct, c_options, result)
        del keep
        return StepResult(
            list(result.tokens[0 : result.n_tokens]),
            result.drafted,
            result.accepted,
            bool(result.hit_eos),
            result.draft_s,
            result.verify_s,
            result.sample_s,
        )

    @property
    def tokens(self) -> list[int]:
        """The tokens that the cache holds."""
        return list(ffi.unpack(lib.tb_session_tokens(self._session), self.length)) if self.length else []

    def sync(self, ids: Sequence[int], *, chunk: int = 256) -> int:
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
