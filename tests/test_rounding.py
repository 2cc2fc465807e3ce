"""Rounding to the lattice: exact in what it reports, the same for any split of the work, better than what it is
measured against, and unmoved by degenerate input."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twobit.errors import CalibrationError, CheckpointError
from twobit.format.layout import check_matrix, check_rows, dequantize, pack, unpack
from twobit.quant import rounding
from twobit.quant.rounding import Rounded, draft_weights, identity, prepare, round_draft, round_matrix

KINDS = [(2, 6), (3, 6), (4, 4), (2, 8), (3, 8), (4, 6)]
PLANES = ("codes", "s", "m", "row_scale", "row_a", "row_b", "residual", "f")


def hessian(cols: int, seed: int = 0, tokens: int | None = None) -> torch.Tensor:
    """X^T X of correlated inputs whose columns differ in size, as a decoder's do."""
    rng = np.random.default_rng(seed)
    tokens = tokens or 4 * cols
    mix = rng.standard_normal((cols // 4 + 1, cols)) / np.sqrt(cols / 4)
    x = rng.standard_normal((tokens, cols // 4 + 1)) @ mix + 0.3 * rng.standard_normal((tokens, cols))
    x *= np.exp(0.5 * rng.standard_normal(cols))
    return torch.from_numpy(x.T @ x).float()


def weights(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed + 100)
    scale = 0.05 * np.exp(0.3 * rng.standard_normal((rows, 1)))
    return torch.from_numpy(rng.standard_t(6, (rows, cols)) * scale).float()


def relative_error(weight: torch.Tensor, found: np.ndarray | torch.Tensor, h: torch.Tensor) -> float:
    w, e = weight.double(), torch.as_tensor(found).double() - weight.double()
    h = h.double()
    return float((((e @ h) * e).sum() / ((w @ h) * w).sum()).sqrt())


def damped(h: torch.Tensor, damping: float) -> torch.Tensor:
    return h.double() + damping * h.diagonal().double().mean() * torch.eye(h.shape[0], dtype=torch.float64)


def assert_valid(rounded: Rounded) -> None:
    check_matrix(rounded)
    wide = rounding.range_limit(rounded.draft_bits, rounded.residual_bits) == 8191
    check_rows("x", rounded.row_scale, rounded.row_a, rounded.row_b, rounded.draft_bits, rounded.residual_bits, wide)
    for values in (*dequantize(rounded), np.array([rounded.draft_error, rounded.full_error])):
        assert np.isfinite(values).all()


def assert_same(a: Rounded, b: Rounded) -> None:
    for name in PLANES:
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
    assert (a.draft_error, a.full_error) == (b.draft_error, b.full_error)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 90),
    kind=st.sampled_from(KINDS),
    group=st.sampled_from([16, 32]),
    exponent=st.integers(-28, 15),
    spread=st.floats(0, 6),
    seed=st.integers(0, 2**16),
)
def test_every_result_is_on_the_lattice_and_in_range(
    rows: int, cols: int, kind: tuple[int, int], group: int, exponent: int, spread: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scales = np.exp(spread * rng.standard_normal((rows, cols)))
    w = torch.from_numpy(rng.standard_normal((rows, cols)) * scales * 10.0**exponent).float()
    rounded = round_matrix(w, hessian(cols, seed), draft_bits=kind[0], residual_bits=kind[1], residual_group=group)
    assert_valid(rounded)
    again = unpack(pack(rounded), rows, cols, *kind, group)
    for name in PLANES:
        np.testing.assert_array_equal(getattr(again, name), getattr(rounded, name))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [64, 73, 304])
def test_reported_errors_are_those_of_the_weights_it_returns(kind: tuple[int, int], cols: int) -> None:
    h, w = hessian(cols), weights(24, cols)
    rounded = round_matrix(w, h, draft_bits=kind[0], residual_bits=kind[1])
    draft, full = dequantize(rounded)
    assert rounded.draft_error == pytest.approx(relative_error(w, draft, damped(h, 0.1)), rel=2e-3)
    assert rounded.full_error == pytest.approx(relative_error(w, full, damped(h, 0.1)), rel=5e-3)


def test_factor_reproduces_the_damped_hessian() -> None:
    h = hessian(70)
    factor = prepare(h, 0.05)
    assert factor.factor is not None and factor.padded == 96 and factor.factor.shape[1] % 16 == 0
    f = np.triu(factor.factor[:70, :70].astype(np.float64), 1) + np.eye(70)
    expected = damped(h, 0.05).numpy() / float(h.diagonal().mean())
    np.testing.assert_allclose((f * factor.energy[:70]) @ f.T, expected, atol=1e-5 * expected.max())
    assert not factor.energy[70:].any() and not factor.factor[70:].any()
    assert factor.local is not None and factor.local_energy is not None
    block = np.triu(factor.local[2].astype(np.float64))
    np.testing.assert_allclose(
        (block * factor.local_energy[32:48]) @ block.T, expected[32:48, 32:48], atol=1e-5 * expected.max()
    )


def test_group_parameters_are_the_best_of_all() -> None:
    """Without feedback groups are independent: no (s, m) with nearest codes does better, given the row's U, A, B."""
    w = weights(8, 48).numpy().astype(np.float64)
    rounded = round_matrix(w.astype(np.float32), identity(48))
    draft, _ = dequantize(rounded)
    s, m, c = (a.reshape(-1) for a in np.meshgrid(np.arange(16), np.arange(-8, 8), np.arange(4), indexing="ij"))
    for row in range(8):
        u, a, b = float(rounded.row_scale[row]), int(rounded.row_a[row]), int(rounded.row_b[row])
        levels = (u * (a * s * (2 * c - 3) + b * m)).reshape(256, 4)
        for g in range(3):
            x = w[row, 16 * g : 16 * g + 16]
            best = np.abs(levels[:, None, :] - x[None, :, None]).min(2)
            found = ((draft[row, 16 * g : 16 * g + 16] - x) ** 2).sum()
            assert found <= (best**2).sum(1).min() * (1 + 1e-4)


def test_threads_row_split_and_instruction_set_do_not_change_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    w, factor = weights(101, 200), prepare(hessian(200))
    for kind, group in (((2, 6), 16), ((4, 4), 32), ((3, 8), 16)):
        options = {"draft_bits": kind[0], "residual_bits": kind[1], "residual_group": group}
        whole = round_matrix(w, factor, **options)
        assert_same(round_matrix(w, factor, threads=3, **options), whole)
        part = round_matrix(w[37:58], factor, **options)
        for name in PLANES:
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[37:58])
        for level in ("generic", "avx2"):
            with monkeypatch.context() as patch:
                patch.setattr(rounding, "cpu_level", lambda level=level: level)
                assert_same(round_matrix(w, factor, **options), whole)


def test_scaling_the_weights_by_a_power_of_two_scales_the_row_scales_only() -> None:
    w, factor = weights(9, 64), prepare(hessian(64))
    plain, scaled = round_matrix(w, factor), round_matrix(w * 2.0**-60, factor)
    np.testing.assert_array_equal(scaled.row_scale, plain.row_scale * np.float32(2.0**-60))
    for name in PLANES[:3]:
        np.testing.assert_array_equal(getattr(scaled, name), getattr(plain, name))


# -- quality --------------------------------------------------------------------------------------------------


def nearest_on_grid(x: torch.Tensor, scale: torch.Tensor, centre: torch.Tensor, top: int) -> torch.Tensor:
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    c = ((x - centre) / (2 * safe) + top / 2).round().clamp(0, top)
    return scale * (2 * c - top) + centre


def reference_gptq(w: torch.Tensor, h: torch.Tensor, bits: int, damping: float = 0.1) -> torch.Tensor:
    """Textbook GPTQ (inverse Cholesky factor) on the draft's lattice with free fp16 row scales for s and m, the best of
    a grid by rounding error; (s, m) searched per group after the error feedback of earlier groups, nearest codes."""
    top, (rows, cols) = 2**bits - 1, w.shape
    w = w.double().clone()
    inverse = torch.linalg.inv(damped(h, damping))
    upper = torch.linalg.cholesky(inverse, upper=True)
    weight = 1 / upper.diagonal() ** 2
    s = torch.arange(16.0).double().repeat_interleave(16)[:, None]
    m = torch.arange(-8.0, 8.0).double().repeat(16)[:, None]

    def search(x: torch.Tensor, d: torch.Tensor, step: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = nearest_on_grid(x[:, None, :], step[:, None, None] * s, shift[:, None, None] * m, top)
        cost = ((found - x[:, None, :]) ** 2 * d).sum(2)
        best = cost.argmin(1)
        return cost.gather(1, best[:, None])[:, 0], step * s[best, 0], shift * m[best, 0]

    deviation = w.std(1)
    best_cost = torch.full((rows,), torch.inf, dtype=torch.float64)
    step, shift = torch.zeros(rows).double(), torch.zeros(rows).double()
    for a in (0.04, 0.055, 0.07, 0.09):
        for b in (0.5, 1.0, 2.0, 3.0):
            scale = a * 4 / 2**bits * deviation
            cost = sum(search(w[:, g : g + 16], weight[g : g + 16], scale, b * scale)[0] for g in range(0, cols, 16))
            better = cost < best_cost
            best_cost = torch.where(better, cost, best_cost)
            step, shift = torch.where(better, scale, step), torch.where(better, b * scale, shift)
    step, shift = step.half().double(), shift.half().double()
    out = torch.empty_like(w)
    for g in range(0, cols, 16):
        _, scale, centre = search(w[:, g : g + 16], weight[g : g + 16], step, shift)
        for j in range(g, min(g + 16, cols)):
            out[:, j] = nearest_on_grid(w[:, j], scale, centre, top)
            w[:, j:] -= ((w[:, j] - out[:, j]) / upper[j, j])[:, None] * upper[j, j:]
    return out


def q8_0(w: torch.Tensor) -> torch.Tensor:
    x = w.reshape(w.shape[0], -1, 32)
    scale = (x.abs().amax(2, keepdim=True) / 127).half().float()
    return ((x / scale).round() * scale).reshape(w.shape)


@pytest.mark.parametrize("bits", [2, 3])
def test_draft_beats_textbook_gptq_with_free_scales_and_rounding_to_nearest(bits: int) -> None:
    h, w = hessian(256, 1), weights(48, 256, 1)
    draft, _ = dequantize(round_matrix(w, h, draft_bits=bits))
    nearest, _ = dequantize(round_matrix(w, identity(256), draft_bits=bits))
    ours = relative_error(w, draft, damped(h, 0.1))
    assert ours < 0.98 * relative_error(w, reference_gptq(w, h, bits), damped(h, 0.1))
    assert ours < 0.9 * relative_error(w, nearest, damped(h, 0.1))


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_full_weights_beat_q8_0_on_other_inputs(kind: tuple[int, int], group: int) -> None:
    w = weights(48, 256, 2)
    x = hessian(256, 2, tokens=4096)
    _, full = dequantize(round_matrix(w, x, draft_bits=kind[0], residual_bits=kind[1], residual_group=group))
    assert relative_error(w, full, x) < 0.9 * relative_error(w, q8_0(w), x)


def test_residual_bits_draft_bits_and_feedback_each_pay() -> None:
    h, w = hessian(128, 3), weights(32, 128, 3)
    results = {kind: round_matrix(w, h, draft_bits=kind[0], residual_bits=kind[1]) for kind in KINDS}
    assert results[2, 8].full_error < 0.4 * results[2, 6].full_error
    assert results[4, 4].draft_error < 0.7 * results[3, 6].draft_error < 0.5 * results[2, 6].draft_error
    assert results[2, 8].draft_error == pytest.approx(results[2, 6].draft_error, rel=0.02)
    fine, coarse = (round_matrix(w, h, residual_group=group).full_error for group in (16, 32))
    assert fine < coarse


def test_refining_lowers_the_draft_error_and_keeps_the_full_one() -> None:
    h, w = hessian(256, 8), weights(40, 256, 8)
    refined, plain = round_matrix(w, h), round_matrix(w, h, refine=False)
    assert refined.draft_error < 0.99 * plain.draft_error
    assert refined.full_error < 1.05 * plain.full_error


# -- degenerate input (failure classes A5, B1, B2, B3) -----------------------------------------------------------


@pytest.mark.parametrize("cols", [24, 40, 17, 31, 1])
def test_tail_of_a_row_is_as_good_as_its_body(cols: int) -> None:
    """The row's only large values lie in the last, incomplete group."""
    w = weights(16, cols, 4) * 1e-3
    tail = cols - (cols - 1) // 16 * 16
    w[:, -tail:] = weights(16, tail, 5)
    rounded = round_matrix(w, identity(cols))
    draft, full = (torch.from_numpy(a) for a in dequantize(rounded))
    size = w[:, -tail:].abs().amax()
    assert (full - w)[:, -tail:].abs().max() < 0.02 * size
    assert (draft - w)[:, -tail:].square().mean() < 0.1 * w[:, -tail:].square().mean()
    assert_valid(rounded)


def repeated(cols: int) -> torch.Tensor:
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, cols))).float()
    return 500 * x.T @ x


def dead_columns(cols: int) -> torch.Tensor:
    h = hessian(cols)
    h[::3] = 0
    h[:, ::3] = 0
    return h


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("make", [repeated, dead_columns])
def test_singular_hessians_give_valid_codes(make: object, damping: float) -> None:
    h, w = make(96), weights(20, 96)  # type: ignore[operator]
    rounded = round_matrix(w, h, damping=damping)
    assert_valid(rounded)
    assert rounded.draft_error < 0.5 and rounded.full_error < 0.02
    assert (rounded.note is None) == (damping > 0)
    _, full = dequantize(rounded)
    assert relative_error(w, full, torch.eye(96)) < 0.05


def test_hessian_that_is_not_positive_definite_is_damped_more_and_then_given_up() -> None:
    w, h = weights(8, 32), hessian(32)
    bent = h.clone()
    bent[0, 1] = bent[1, 0] = 3 * h.diagonal().mean()
    rounded = round_matrix(w, bent)
    assert rounded.note is not None and "damping raised from 0.1 to 10" in rounded.note
    assert_valid(rounded)
    bent[0, 1] = bent[1, 0] = 1e4 * h.diagonal().mean()
    rounded = round_matrix(w, bent)
    assert rounded.note is not None and "rounded to nearest" in rounded.note
    assert_valid(rounded)
    assert_same(rounded, round_matrix(w, identity(32, rounded.note)))


def test_hessian_of_zeros_means_rounding_to_nearest() -> None:
    rounded = round_matrix(weights(8, 32), torch.zeros(32, 32))
    assert rounded.note is not None and "all zero" in rounded.note
    assert_valid(rounded)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    h, w = hessian(32), weights(8, 32)
    w[5, 3] = bad
    with pytest.raises(CheckpointError, match="row 5"):
        round_matrix(w, h)
    h[2, 7] = bad
    with pytest.raises(CalibrationError, match="not finite"):
        prepare(h)


def test_near_zero_groups_and_rows_give_zeros_or_finite_weights() -> None:
    values = [0.0, 1e-40, 1e-30, 1e-20, 1e-8]
    w = weights(len(values) + 2, 96, 6)
    for i, value in enumerate(values):
        w[i, 32:48] = value
    w[5, 32:48] = 1e-30
    w[5, 40] = 1.0
    w[6] = 1e-40
    rounded = round_matrix(w, hessian(96))
    assert_valid(rounded)
    draft, full = dequantize(rounded)
    for i in range(4):  # under 2^-40 of the row
        assert not draft[i, 32:48].any() and not full[i, 32:48].any()
    assert rounded.row_scale[6] == 0 and not full[6].any() and not rounded.codes[6].any()
    assert full[5, 40] == pytest.approx(1.0, abs=0.02)
    zeros = round_matrix(torch.zeros(3, 33), hessian(33))
    assert_valid(zeros)
    assert zeros.draft_error == 0 and not any(getattr(zeros, name).any() for name in PLANES)


def test_constant_and_lonely_weights() -> None:
    w = torch.full((4, 64), 0.25)
    w[1] = -0.25
    w[2] = 0
    w[2, 37] = 3.0
    w[3, :32] = 1e-5
    rounded = round_matrix(w, hessian(64))
    assert_valid(rounded)
    _, full = dequantize(rounded)
    np.testing.assert_allclose(full, w.numpy(), atol=0.02 * 3)
    np.testing.assert_allclose(full[:2], w[:2].numpy(), atol=0.01)


def test_subnormal_bf16_weights_do_not_disturb_the_others() -> None:
    tiny = torch.arange(1, 65, dtype=torch.int16).view(torch.bfloat16).float()
    w = weights(4, 128, 7)
    plain = round_matrix(w[:2], identity(128))
    w[2, :64] = tiny
    w[3] = tiny.repeat(2)
    rounded = round_matrix(w, identity(128))
    assert_valid(rounded)
    np.testing.assert_array_equal(rounded.codes[:2], plain.codes)
    _, full = dequantize(rounded)
    assert not full[3].any() and not full[2, :64].any() and full[2, 64:].any()


@pytest.mark.parametrize("options", [{"draft_bits": 5}, {"residual_bits": 7}, {"residual_group": 64}])
def test_lattices_that_do_not_exist_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no lattice"):
        round_matrix(weights(2, 16), identity(16), **options)


@pytest.mark.parametrize(("draft_bits", "residual_bits"), KINDS)
def test_draft_and_residual_one_after_the_other(draft_bits: int, residual_bits: int) -> None:
    """The same bytes as both at once; and the residual brings back a weight that the draft was not made for."""
    w, factor = weights(40, 100), prepare(hessian(100))
    w[7] = 0
    kind = {"draft_bits": draft_bits, "residual_bits": residual_bits}
    draft = round_draft(w, factor, draft_bits=draft_bits)
    assert_same(round_matrix(w, factor, draft=draft, **kind), round_matrix(w, factor, **kind))
    two = draft_weights(draft).numpy()
    whole = round_matrix(w, factor, draft=draft, **kind)
    assert np.allclose(two, dequantize(whole)[0], rtol=1e-6, atol=0)
    other = w + 0.02 * weights(40, 100, seed=1)
    again = round_matrix(other, factor, draft=draft, **kind)
    assert_valid(again)
    assert np.allclose(two[np.arange(40) != 7], dequantize(again)[0][np.arange(40) != 7], rtol=1e-6, atol=0)
    assert again.full_error < 4 * whole.full_error < 0.05


def test_a_residual_has_the_same_bytes_on_every_level_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    w, factor = weights(70, 90), prepare(hessian(90))
    draft = round_draft(w * 0.9, factor)
    first = round_matrix(w, factor, draft=draft)
    monkeypatch.setattr(rounding, "ROWS_PER_TASK", 64)
    assert_same(round_matrix(w, factor, draft=draft, threads=3), first)
    for level in ("generic", "avx2"):
        monkeypatch.setattr(rounding, "cpu_level", lambda level=level: level)
        assert_same(round_matrix(w, factor, draft=round_draft(w * 0.9, factor)), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_factors_in_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(600, 331, dtype=dtype, generator=torch.Generator().manual_seed(3))
    matrix = x.T @ x / 600 + 0.1 * torch.eye(331, dtype=dtype)
    exact = torch.linalg.cholesky(matrix.double())
    monkeypatch.setattr(rounding, "DOUBLE_COLUMNS", 64)
    monkeypatch.setattr(rounding, "BLOCK", 64)
    alone = matrix.clone()
    assert rounding._cholesky(alone, None)
    assert float((alone.tril() - exact).abs().max()) < (1e-5 if dtype == torch.float32 else 1e-13)
    with ThreadPoolExecutor(3) as pool:
        together = matrix.clone()
        assert rounding._cholesky(together, pool)
    assert torch.equal(together.tril(), alone.tril())
    bad = matrix.clone()
    bad[200, 200] = -1
    assert not rounding._cholesky(bad, None)
