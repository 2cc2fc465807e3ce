"""Hybrid mode: the device has the 2-bit part, the cache and attention, the CPU multiplies the residual.

The engine is tested on the plain-C device for every family, and on OpenCL for some; what the kernels do there is
compared bit for bit in test_gpu_kernels.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from families import FAMILIES, VOCAB
from gpu import device
from packed import packed_model
from test_lossless import GREEDY, SAMPLED

from twobit.errors import RuntimeFailure
from twobit.quant.recipe import Recipe, Rule
from twobit.runtime import device as devices
from twobit.runtime.device import Device, place
from twobit.runtime.lib import call, ffi, lib
from twobit.runtime.model import Model
from twobit.runtime.sampling import Sampling
from twobit.runtime.session import Session, StepOptions, StepResult, Use

SOME = ("llama", "gemma4_text", "qwen2-tied")  # full and sliding attention, an embedding of its own and a tied one
DRIVERS = ("opencl", "cuda")
DISTINCT = (
    *("llama", "mistral", "qwen2", "qwen2-tied", "qwen3", "smollm3", "olmo2", "phi3", "gemma2", "gemma3", "gemma4"),
    "gemma4_text",
)
"""One of each family; what the others differ in, scaled rotations for instance, their logits are compared for."""
BOUND = 5e-4
"""Of the range of the logits: activations on the border between two of their 16,383 values round one way or the other,
as sums of norms and attention have another order on the device. test_runtime.py has the same bound for the CPU."""


def ids(n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(5, VOCAB, n).tolist()


CLOSE = Recipe(rules=(Rule.parse("*_proj=4+6"),))
"""Drafts of 4 bits, most of which are right: in a model of random weights 2 bits give few."""


def hybrid(
    variant: str, kind: str = "plain", layers: int = 0, pass_tokens: int = 256, recipe: Recipe | None = None
) -> Model:
    """The model with the residual of so many layers on the device."""
    on = device(kind)
    model = Model.open(packed_model(variant, recipe))
    call(lib.tb_model_place, model.c_model, on.c_gpu, layers, pass_tokens)
    model.placed = devices.Placed(on, layers, False, on.used, pass_tokens)
    return model


def logits(model: Model, tokens: Sequence[int], *, stream: int = -1, **options: int) -> np.ndarray:
    session = Session(model, 256, 2)
    session.stream_from(stream)
    found = session.eval(tokens, every=True, **options)
    assert found is not None
    return found


def check_logits(variant: str, kind: str) -> None:
    tokens = ids(40)
    model = Model.open(packed_model(variant))
    for draft, bound in ((False, BOUND), (True, 3e-2)):
        expected = Session(model, 256).eval(tokens, every=True, draft=draft)
        found = Session(hybrid(variant, kind), 256).eval(tokens, every=True, draft=draft)
        assert expected is not None and found is not None
        error = np.abs(found - expected).max() / (expected.max() - expected.min())
        assert error <= bound, f"{error:.1e} of the range"


@pytest.mark.parametrize("variant", FAMILIES)
def test_logits_are_those_of_the_cpu(variant: str) -> None:
    check_logits(variant, "plain")


@pytest.mark.parametrize("kind", DRIVERS)
@pytest.mark.parametrize("variant", SOME)
def test_logits_on_a_device_are_those_of_the_cpu(variant: str, kind: str) -> None:
    check_logits(variant, kind)


@pytest.mark.parametrize("variant", ["mistral", "qwen2", "gemma4"])
def test_bits_depend_on_neither_batch_nor_placement(variant: str) -> None:
    """Residual multiplied by the CPU, on the device, streamed to it; in passes of any size."""
    tokens = ids(40)
    whole = logits(hybrid(variant), tokens).tobytes()
    for chunk in (1, 7):
        assert logits(hybrid(variant), tokens, chunk=chunk).tobytes() == whole, f"chunks of {chunk}"
    for layers in (1, 99):
        assert logits(hybrid(variant, layers=layers), tokens).tobytes() == whole, f"{layers} layers on the device"
        assert logits(hybrid(variant, layers=layers), tokens, chunk=3).tobytes() == whole
    for layers in (0, 2):
        streamed = Session(hybrid(variant, layers=layers), 256)
        streamed.stream_from(1)
        found = streamed.eval(tokens, every=True, chunk=16)
        assert found is not None and found.tobytes() == whole, f"streamed, {layers} layers on the device"
        assert streamed.bus["prefill"]["weights"] > 0


def generate(
    model: Model, sampling: Sampling, options: StepOptions, n: int, prompt: int = 12
) -> tuple[list[int], int, Session]:
    """(prompt and n tokens, accepted drafts, the session)."""
    history, session, accepted = ids(prompt, 3), Session(model, 256, 1), 0
    session.sync(history[:-1])
    while len(history) < prompt + n:
        step = session.step(history, sampling, options)
        history += step.tokens
        accepted += step.accepted
    return history[: prompt + n], accepted, session


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=() if v in DISTINCT else pytest.mark.full) for v in FAMILIES]
)
def test_ids_with_drafting_equal_ids_without(variant: str) -> None:
    total = 0
    for sampling in (GREEDY, SAMPLED):
        plain, _, _ = generate(hybrid(variant), sampling, StepOptions(draft_max=0), 48)
        for options in (
            StepOptions(draft_max=4, draft_fixed=True),
            StepOptions(draft_max=13, draft_tree=True),
            StepOptions(draft_max=16),
        ):
            found, accepted, _ = generate(hybrid(variant), sampling, options, 48)
            assert found == plain
            total += accepted
    assert total > 0, "no draft was ever accepted: the test would prove little"


@pytest.mark.parametrize("kind", DRIVERS)
def test_ids_on_a_device(kind: str) -> None:
    plain, _, _ = generate(hybrid("llama", kind), SAMPLED, StepOptions(draft_max=0), 24)
    for options in (StepOptions(draft_max=5, draft_fixed=True), StepOptions(draft_max=13, draft_tree=True)):
        found, accepted, _ = generate(hybrid("llama", kind), SAMPLED, options, 24)
        assert found == plain
        assert accepted > 0


ALONE = Use.ALL & ~Use.OVERLAP
COSTS = ([0.1, 0.11], [1.0, 1.02])  # of a machine whose GPU drafts fast


def steps(
    model: Model,
    sampling: Sampling,
    options: StepOptions,
    n: int,
    *,
    pinned: bool = False,
    prompt: int = 12,
    context: int = 256,
) -> tuple[list[int], list[StepResult]]:
    history, session, found = ids(prompt, 3), Session(model, context, 1), []
    if pinned:
        session.pin_costs(*COSTS)
    session.sync(history[:-1])
    while len(history) < prompt + n:
        found.append(session.step(history, sampling, options))
        history += found[-1].tokens
    return history[: prompt + n], found


NOISY = Sampling(temperature=0.8, seed=3)


def check_overlap(variant: str, kind: str, samplings: Sequence[Sampling], n: int) -> None:
    """The same text; what was drafted while the CPU verified is used, and spares passes that nothing hides."""
    used = accepted = 0
    for sampling in samplings:
        plain, _ = steps(hybrid(variant, kind, recipe=CLOSE), sampling, StepOptions(draft_max=0), n)
        for shape in ({"draft_fixed": True, "draft_max": 3}, {"draft_tree": True, "draft_max": 13}):
            passes = []
            for use in (Use.ALL, ALONE):
                model = hybrid(variant, kind, recipe=CLOSE)
                found, results = steps(model, sampling, StepOptions(use=use, **shape), n)
                assert found == plain, f"{shape}, {use!r}"
                early = sum(r.early for r in results)
                passes.append(sum(r.draft_passes for r in results))
                assert all(r.early_accepted <= r.early <= r.drafted for r in results)
                if use == ALONE:
                    assert early == sum(r.overlapped_passes for r in results) == 0
                else:
                    assert sum(r.overlapped_passes for r in results) > 0
                    used += early
                    accepted += sum(r.early_accepted for r in results)
            assert passes[0] <= passes[1]
    assert used > accepted > 0, "nothing that was drafted meanwhile was ever used: the test would prove little"


@pytest.mark.parametrize("variant", ["llama", "gemma4_text", "qwen2-tied", "mistral"])
def test_ids_with_the_overlapped_draft(variant: str) -> None:
    check_overlap(variant, "plain", (GREEDY, NOISY, SAMPLED), 40)


@pytest.mark.parametrize("kind", DRIVERS)
@pytest.mark.parametrize("variant", ["llama", "gemma4_text"])
def test_ids_with_the_overlapped_draft_on_a_device(variant: str, kind: str) -> None:
    check_overlap(variant, kind, (NOISY,), 24)


def test_the_cost_model_uses_the_overlapped_draft() -> None:
    """With costs as of a fast GPU it drafts meanwhile, the same at every run; where that costs much, it does not."""
    model = hybrid("llama", recipe=CLOSE)
    plain, _ = steps(model, NOISY, StepOptions(draft_max=0), 64)
    runs = [steps(model, NOISY, StepOptions(draft_max=16), 64, pinned=True) for _ in range(2)]
    assert runs[0][0] == runs[1][0] == plain
    counts = [[(r.drafted, r.early, r.overlapped_passes) for r in found] for _, found in runs]
    assert counts[0] == counts[1]
    assert sum(early for _, early, _ in counts[0]) > 0
    alone = steps(model, NOISY, StepOptions(draft_max=16, use=ALONE), 64, pinned=True)
    assert alone[0] == plain
    assert sum(r.draft_passes for r in runs[0][1]) < sum(r.draft_passes for r in alone[1])


LEVELS = ALONE & ~Use.CHAIN


def check_chain(variant: str, kind: str, samplings: Sequence[Sampling], n: int) -> None:
    """Passes that the device starts itself find what those find that the host starts; eight at most wait but once."""
    for sampling in samplings:
        found = [
            steps(
                hybrid(variant, kind, recipe=CLOSE),
                sampling,
                StepOptions(draft_fixed=True, draft_max=11, use=use, draft_vocab=96),
                n,
            )
            for use in (ALONE, LEVELS)
        ]
        assert found[0][0] == found[1][0]
        shapes = [[(r.tokens, r.drafted, r.accepted, r.draft_passes) for r in results] for _, results in found]
        assert shapes[0] == shapes[1]
        assert sum(r.accepted for r in found[0][1]) > 0
        for step in found[0][1]:
            assert step.draft_passes == 11
            assert step.chained == (9 if sampling in (GREEDY, NOISY) else 0)  # filters: the host ranks
        assert sum(r.chained for r in found[1][1]) == 0


@pytest.mark.parametrize("variant", ["llama", "gemma4_text", "qwen2-tied", "mistral"])
def test_a_chain_of_passes_on_the_device(variant: str) -> None:
    check_chain(variant, "plain", (GREEDY, NOISY, SAMPLED) if variant == "llama" else (NOISY,), 40)


@pytest.mark.parametrize("kind", DRIVERS)
def test_a_chain_of_passes_on_another_device(kind: str) -> None:
    check_chain("llama", kind, (NOISY,), 24)


def test_the_cost_model_chains() -> None:
    """With pinned costs a chained pass costs 0.8 of another: where it is likely to be wanted, it comes at once."""
    model = hybrid("llama", recipe=CLOSE)
    plain, _ = steps(model, GREEDY, StepOptions(draft_max=0), 96)
    runs = {
        use: [steps(model, GREEDY, StepOptions(draft_max=16, use=use), 96, pinned=True) for _ in range(2)]
        for use in (ALONE, LEVELS)
    }
    waits = {}
    for use, ((text, found), (again, same)) in runs.items():
        assert text == again == plain
        assert [(r.drafted, r.chained) for r in found] == [(r.drafted, r.chained) for r in same]
        waits[use] = sum(r.draft_passes - r.chained for r in found)
    assert waits[ALONE] < waits[LEVELS] == sum(r.draft_passes for r in runs[LEVELS][0][1])


QUICK = ("llama", "gemma2", "gemma4_text", "mistral", "olmo2", "qwen2-tied")


@pytest.mark.parametrize("variant", [pytest.param(v, marks=() if v in QUICK else pytest.mark.full) for v in DISTINCT])
def test_ids_with_drafts_at_full_precision(variant: str) -> None:
    """The text is the same, whatever layers draft with their residual; where all do, the draft is never wrong."""
    tree, chain = StepOptions(draft_tree=True, draft_max=9), StepOptions(draft_fixed=True, draft_max=4)
    for sampling in (GREEDY, NOISY):
        plain, _ = steps(hybrid(variant), sampling, StepOptions(draft_max=0), 24)
        for layers, options in ((1, tree), (99, chain)):
            found, results = steps(hybrid(variant, layers=layers), sampling, replace(options, draft_full=True), 24)
            assert found == plain, f"{layers} layers"
            assert all(r.full for r in results)
            if layers == 99:
                assert all(r.accepted == r.drafted == 4 for r in results)


def test_drafts_at_full_precision_with_filters_and_a_short_head() -> None:
    for sampling in (SAMPLED, NOISY):
        plain, _ = steps(hybrid("llama"), sampling, StepOptions(draft_max=0), 32)
        for layers in (1, 99):
            options = StepOptions(draft_full=True, draft_fixed=True, draft_max=4, draft_vocab=48)
            found, results = steps(hybrid("llama", layers=layers), sampling, options, 32)
            assert found == plain and sum(r.drafted for r in results) > 0


@pytest.mark.parametrize("kind", DRIVERS)
def test_drafts_at_full_precision_on_a_device(kind: str) -> None:
    plain, _ = steps(hybrid("llama", kind, layers=99), NOISY, StepOptions(draft_max=0), 20)
    options = StepOptions(draft_full=True, draft_fixed=True, draft_max=4)
    found, results = steps(hybrid("llama", kind, layers=99), NOISY, options, 20)
    assert found == plain
    assert all(r.accepted == r.drafted == 4 for r in results)


def test_the_cost_model_chooses_the_precision() -> None:
    """Drafts of 2 bits are mostly wrong here: where passes cost little, more of a right one is better; where they cost
    much it is not; where no layer has its residual on the device there is no choice."""
    for layers, costs, share in (
        (99, [0.02, 0.022], (0.5, 1)),
        (99, [0.4, 0.44], (0, 0.2)),
        (0, [0.02, 0.022], (0, 0)),
    ):
        model = hybrid("llama", layers=layers)
        plain, _ = steps(model, NOISY, StepOptions(draft_max=0), 160)
        counts = []
        for _ in range(2):
            history, session, full, n = ids(12, 3), Session(model, 256, 1), 0, 0
            session.pin_costs(costs, COSTS[1])
            session.sync(history[:-1])
            while len(history) < 172:
                step = session.step(history, NOISY, StepOptions(draft_max=16))
                history += step.tokens
                full, n = full + step.full, n + 1
            assert history[:172] == plain
            counts.append((full, n, session.belief.promise))
        assert counts[0] == counts[1]
        assert share[0] * n <= full <= share[1] * n, counts
        assert (counts[0][2][1] > 0) == (layers > 0)
    options = StepOptions(draft_full=True, draft_fixed=True, draft_max=4)
    assert not any(r.full for r in steps(hybrid("llama"), NOISY, options, 16)[1])


def test_what_was_drafted_meanwhile_is_dropped_where_the_text_turns() -> None:
    """Another text, a step back, another sampler between two steps: the text is the one without drafts."""
    model, other = hybrid("mistral", recipe=CLOSE), Sampling(temperature=0.5, seed=9)
    options = StepOptions(draft_max=13, draft_tree=True)
    texts = []
    for draft in (options, StepOptions(draft_max=0)):
        history, session, text = ids(12, 3), Session(model, 256, 1), []
        session.sync(history[:-1])
        for turn in range(12):
            sampling = other if turn % 3 else NOISY
            while len(history) < 12 + 9 * (turn + 1):
                history += session.step(history, sampling, draft).tokens
            del history[12 + 9 * (turn + 1) :]
            text.append(list(history))
            if turn % 2:
                history = [*history[:-4], 7, 9]
            elif turn % 4 == 0:
                session.sync(ids(20, turn))
            session.sync(history[:-1])
        texts.append(text)
    assert texts[0] == texts[1]


def test_a_short_head_drafts_from_its_rows_alone() -> None:
    """The vocabulary's first 48 tokens and those of the text: others are never drafted; the text is the same."""
    prompt = ids(12, 3)
    for variant, sampling in (("llama", NOISY), ("gemma2", GREEDY), ("llama", SAMPLED)):  # gemma2: logits with a cap
        plain, _ = steps(hybrid(variant, recipe=CLOSE), sampling, StepOptions(draft_max=0), 32)
        for use in (Use.ALL, ALONE, Use.ALL & ~Use.SHORT_HEAD):
            model, history, drafted = hybrid(variant, recipe=CLOSE), list(prompt), 0
            session = Session(model, 256, 1)
            session.sync(history[:-1])
            while len(history) < 44:
                step = session.step(
                    history, sampling, StepOptions(draft_max=4, draft_fixed=True, draft_vocab=48, use=use)
                )
                if Use.SHORT_HEAD in use:
                    assert 48 <= session.belief.head_rows < VOCAB
                    known = {t // 16 for t in history} | {0, 1, 2}
                    assert all(t // 16 in known for t in step.tokens[: step.accepted])
                else:
                    assert session.belief.head_rows == VOCAB
                history += step.tokens
                drafted += step.drafted
            assert history[:44] == plain and drafted > 0


@pytest.mark.parametrize("variant", ["mistral", "gemma4_text"])
def test_a_ring_that_has_turned(variant: str) -> None:
    """Windows of 8 positions in rings of 152 slots, a text of 400 tokens: against the CPU, and with drafts."""
    tokens = ids(400)
    expected = Session(Model.open(packed_model(variant)), 512).eval(tokens, every=True)
    found = Session(hybrid(variant, pass_tokens=16), 512).eval(tokens, every=True)
    assert expected is not None and found is not None
    assert np.abs(found - expected).max() <= BOUND * (expected.max() - expected.min())
    texts = [
        steps(hybrid(variant, pass_tokens=16, recipe=CLOSE), NOISY, o, 32, prompt=300, context=512)[0]
        for o in (StepOptions(draft_max=0), StepOptions(draft_max=13, draft_tree=True))
    ]
    assert texts[0] == texts[1]


def test_the_device_drafts_what_the_cpu_drafts() -> None:
    """Nearly as many drafts are accepted as on the CPU, whose sampler sees every logit, not the best of each span."""
    for sampling in (GREEDY, Sampling(temperature=0.8, seed=3)):
        options = StepOptions(draft_max=4, draft_fixed=True)
        _, on_cpu, _ = generate(Model.open(packed_model("llama")), sampling, options, 96)
        _, on_device, _ = generate(hybrid("llama"), sampling, options, 96)
        assert on_device >= 0.8 * on_cpu


def test_only_activations_cross_the_bus() -> None:
    """The counter against the shapes: one verification of m tokens, and drafts of which only candidates come back."""
    model = hybrid("llama")
    arch, m = model.architecture, 5
    history = ids(12, 3)
    session = Session(model, 256, 1)
    session.sync(history[:-1])
    before = session.bus
    assert before["prefill"]["weights"] == 0 and before["draft"] == {"to": 0, "back": 0, "weights": 0}
    step = session.step(history, GREEDY, StepOptions(draft_max=m - 1, draft_fixed=True, use=ALONE))
    assert step.drafted == m - 1
    bus = session.bus
    layer = arch.layers[0]
    q, kv, inter = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim, layer.intermediate
    to = len(arch.layers) * (q + 2 * kv + 2 * arch.hidden + 2 * inter) + VOCAB  # what the CPU multiplied
    back = len(arch.layers) * (2 * arch.hidden + q + inter) + arch.hidden + VOCAB  # its inputs, and the logits
    row = arch.hidden + 2 * -(-arch.hidden // 32)  # of the embedding, int8 with a scale per 32
    about = 12 + 4 * arch.ropes[0].dim + row  # ids, positions, slots, angles
    assert bus["verify"]["back"] == 4 * m * back
    assert bus["verify"]["to"] == m * (4 * to + about)
    assert bus["draft"]["back"] == step.draft_passes * 4 * 8  # ids and logits of four candidates
    assert bus["draft"]["to"] <= step.draft_passes * (about + 65 * 4)
    assert bus["draft"]["weights"] == bus["verify"]["weights"] == 0
    session = Session(hybrid("llama", recipe=CLOSE), 256, 1)
    session.sync(history[:-1])
    passes = overlapped = 0
    while not overlapped:
        before = session.bus
        step = session.step(history, GREEDY, StepOptions(draft_max=m - 1, draft_fixed=True))
        history += step.tokens
        passes, overlapped = step.draft_passes, step.overlapped_passes
    after = {phase: {k: v - before[phase][k] for k, v in n.items()} for phase, n in session.bus.items()}
    assert after["verify"]["back"] == bus["verify"]["back"]
    assert 0 <= after["verify"]["to"] - bus["verify"]["to"] <= 4 * 64  # slots that move
    assert after["draft"]["back"] == 4 * 8 * (passes + overlapped)
    assert after["draft"]["weights"] == after["verify"]["weights"] == 0


def test_a_session_goes_back_and_is_saved(tmp_path: object) -> None:
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    for variant in ("llama", "mistral"):
        tokens = ids(60)
        model = hybrid(variant)
        session = Session(model, 256, 1)
        session.eval(tokens[:40], logits=False)
        session.save(tmp_path / variant)
        session.eval(tokens[40:], logits=False)
        session.rewind(40)
        again = session.eval(tokens[40:], every=True)
        loaded = Session(model, 256, 1)
        assert loaded.load(tmp_path / variant) == 40
        found = loaded.eval(tokens[40:], every=True)
        assert again is not None and found is not None
        assert found.tobytes() == again.tobytes()


@pytest.mark.parametrize("variant", ["llama", "qwen2-tied"])
def test_placements_under_limits(variant: str) -> None:
    """From too little memory to more than enough; what is used stays under the limit, and the bits are the same."""
    tokens, bits = ids(20), set()
    on = Device("plain")

    def placed(vram: int) -> tuple[int, Model | None]:
        """(layers with their residual there, the head counted as one; -1: nothing fits, the model)."""
        model = Model.open(packed_model(variant))
        try:
            found = place(model, on, 64, vram=vram)
        except RuntimeFailure as error:
            assert "too few" in str(error)
            return -1, None
        return found.residual_layers + found.residual_head, model

    low, high = 1 << 20, 1 << 30
    while high - low > 2000:
        middle = (low + high) // 2
        low, high = (middle, high) if placed(middle)[0] < 0 else (low, middle)
    seen = []
    for vram in (low, *(high + extra for extra in range(0, 600_000, 50_000)), 1 << 30):
        layers, model = placed(vram)
        seen.append(layers)
        if model is not None:
            session = Session(model, 64, 1)
            session.stream_from(-1)
            found = session.eval(tokens, every=True)
            assert found is not None
            bits.add(found.tobytes())
            assert on.used <= vram
            del session, model
    assert len(bits) == 1
    assert seen == sorted(seen) and len(set(seen)) >= 4, seen
    assert (seen[0], seen[1], seen[-1]) == (-1, 0, len(Model.open(packed_model(variant)).architecture.layers) + 1)


def test_out_of_memory_is_an_error_that_leaves_nothing_behind() -> None:
    on = Device("plain")
    model = Model.open(packed_model("llama"))
    lib.tb_gpu_limit(on.c_gpu, 50_000)
    with pytest.raises(RuntimeFailure, match="out of memory"):
        call(lib.tb_model_place, model.c_model, on.c_gpu, 0, 256)
    assert on.used == 0
    lib.tb_gpu_limit(on.c_gpu, 1 << 30)
    call(lib.tb_model_place, model.c_model, on.c_gpu, 0, 256)
    lib.tb_gpu_limit(on.c_gpu, on.used + 1000)
    with pytest.raises(RuntimeFailure, match=r"lower --ctx"):
        Session(model, 4096, 1)


def test_damaged_weights_are_named() -> None:
    model = hybrid("llama", layers=99)
    bad = Model.open(packed_model("llama"))
    name = next(n for n in bad.packed.planes if n.endswith("layers.1.mlp.down_proj.row_scale"))
    plane = bad.packed.planes[name].copy()
    plane.view(np.float32)[3] = np.inf
    bad.packed.planes[name] = plane
    bad = Model(bad.packed)
    call(lib.tb_model_place, bad.c_model, device("plain").c_gpu, 0, 256)
    with pytest.raises(RuntimeFailure, match=r"layer 2: the input of q/k/v_proj is not finite"):
        Session(bad, 64, 1).eval(ids(3))
    assert np.isfinite(logits(model, ids(3))).all()


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found, line = devices.find("cpu")
    assert found is None and line == ""
    try:
        Device("cuda")
    except RuntimeFailure as error:
        assert re.search(r"CUDA|libcuda", str(error))
        assert devices.find("auto") == (None, "")  # PoCL is no GPU
    else:
        assert devices.find("auto")[0] is not None


def test_a_name_that_no_kind_has() -> None:
    error, absent = ffi.new("char[256]"), ffi.new("int32_t *")
    assert lib.tb_gpu_open(b"abacus", ffi.NULL, ffi.NULL, absent, error, 256) == ffi.NULL
    assert b"abacus" in ffi.string(error)
