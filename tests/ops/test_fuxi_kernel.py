"""The C++ kernel of FuXi attention beyond what every back end is tested on: tile edges, the time function, threads, memory."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.ops.jagged_cases import WIDTHS, max_errors
from tests.ops.sanitizer import assert_clean
from tests.ops.test_fuxi_attention import inputs_of, pair, worst_error
from tests.ops.thread_counts import same_for_threads
from turbogr.ops import fuxi_attention
from turbogr.ops.fuxi_attention import KERNEL, jagged_fuxi_attention
from turbogr.ops.native import Kernel

TOLERANCE = 1e-5
EDGES = [0, 1, 2, 63, 64, 65, 0, 127, 129]
CHANNELS = ["bucketed", "functional", None]


@pytest.fixture(autouse=True)
def _kernel():
    if KERNEL.library() is None:
        pytest.skip(KERNEL.failure())


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize(("heads", "qk_dim", "v_dim"), WIDTHS)
def test_edges_of_tiles_at_all_widths(heads, qk_dim, v_dim, channel):
    tensors, offsets, queries, keys = inputs_of(EDGES, heads, qk_dim, v_dim, torch.float32)
    operator, reference = pair(offsets, queries, keys, channel, backend="cpp", alpha=qk_dim**-0.5)
    assert worst_error(operator, reference, tensors, offsets) < TOLERANCE


@pytest.mark.parametrize("channel", ["bucketed", "functional"])
def test_one_sequence_of_5000_tokens(channel):
    """Against the formula for some rows: only they have a gradient, so that nothing of size [5000, 5000] is needed."""
    tensors, offsets, queries, keys = inputs_of([5000, 3], heads=2, dtype=torch.float32)
    chosen = torch.randint(0, 5000, (100,), generator=torch.Generator().manual_seed(0))
    rows = torch.cat([torch.tensor([0, 63, 64, 4999]), chosen]).unique()
    operator, _ = pair(offsets, queries, keys, channel, backend="cpp")

    def formula(q, k, v, position, time, *numbers):
        q, k, v, position, time = (x.double() for x in (q, k, v, position, time))
        distance = rows[:, None] - torch.arange(5000)
        gap = (queries[rows, None] - keys[None, :5000]).abs().double()
        if channel == "bucketed":
            weights = time[(gap.clamp(min=1).log() / 0.301).floor().clamp(max=27).long()]
        else:
            amplitude, decay, exponent = (x.double() for x in numbers)
            weights = amplitude * decay ** ((gap / 60) ** exponent)
        semantic = 0.05 * F.silu(0.7 * torch.einsum("ihd,jhd->hij", q[rows], k[:5000]))
        stacked = torch.stack([x.expand_as(semantic) for x in (position[distance.clamp(min=0)], weights, semantic)])
        return torch.einsum("chij,jhd->ihcd", stacked * (distance >= 0), v[:5000]).flatten(2)

    assert max(max_errors(lambda *x: operator(*x)[rows], formula, tensors, relative=True)) < TOLERANCE


def weights_of(gaps, amplitude, decay, exponent, unit):
    """The kernel's time weights of single gaps, one sequence each."""
    tokens = gaps.numel()
    zeros = torch.zeros(tokens, 1, 1)
    return jagged_fuxi_attention(
        zeros,
        zeros,
        torch.ones(tokens, 1, 1),
        torch.arange(tokens + 1),
        scale=1.0,
        time_function=tuple(torch.tensor(x) for x in (amplitude, decay, exponent)),
        query_times=gaps,
        key_times=torch.zeros_like(gaps),
        time_unit=unit,
        backend="cpp",
    )[:, 0, 1]


@pytest.mark.parametrize("exponent", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("decay", [0.01, 0.5, 0.8, 0.99, 0.9999])
@pytest.mark.parametrize("unit", [1.0, 86_400.0, 1e9])
def test_the_time_function_is_as_exact_as_float32_allows(unit, decay, exponent):
    """Absolute error below 4e-7 of the amplitude for gaps from 0 to 10^15 ticks, the only one that a sum over pairs sees."""
    gaps = torch.cat([torch.arange(100), torch.logspace(2, 15, 5000, dtype=torch.float64).long()])
    actual = weights_of(gaps, 2.0, decay, exponent, unit)
    numbers = [float(torch.tensor(x)) for x in (decay, exponent)]  # as float32 holds them
    expected = 2.0 * numbers[0] ** ((gaps.double() / unit) ** numbers[1])
    assert (actual.double() - expected).abs().max() < 2.0 * 4e-7
    # The negative control: a decay that is off by 1e-5 is noticed.
    moved = weights_of(gaps, 2.0, decay - 1e-5, exponent, unit)
    assert (moved.double() - expected).abs().max() > 2.0 * 4e-7


def test_broken_numbers_show():
    for broken in ((torch.nan, 0.5, 1.0), (0.1, torch.nan, 1.0), (0.1, 0.5, torch.nan)):
        assert weights_of(torch.tensor([5, 10**6]), *broken, 1.0).isnan().all()


@pytest.mark.parametrize("channel", CHANNELS)
def test_threads_do_not_change_a_bit(channel):
    tensors, offsets, queries, keys = inputs_of([300, 5, 64, 1, 200], heads=4, qk_dim=16, v_dim=16, dtype=torch.float32)
    operator, _ = pair(offsets, queries, keys, channel, backend="cpp")

    def results_of():
        out = operator(*tensors)
        return [out, *torch.autograd.grad(out.square().sum(), tensors, allow_unused=True, materialize_grads=True)]

    same_for_threads(results_of, tensors[0], (1, 2, 3, 2))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_damaged_numbers_stay_visible(which, value):
    tensors, offsets, queries, keys = inputs_of([70, 3], dtype=torch.float32)
    with torch.no_grad():
        tensors[which][5, 1, 2] = value
    actual, expected = (pair(offsets, queries, keys, backend=b)[0](*tensors).isfinite() for b in ("cpp", "torch"))
    assert torch.equal(actual, expected)
    assert not actual.all()


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors(flags, monkeypatch, tmp_path):
    """The same source for processors with AVX2 and with four lanes only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", f"g++ {flags}")
    kernel = Kernel("fuxi_attention")
    if kernel.library() is None:
        pytest.skip(f"g++ {flags} does not build here: {kernel.failure()}")
    monkeypatch.setattr(fuxi_attention, "KERNEL", kernel)
    for channel in CHANNELS:
        test_edges_of_tiles_at_all_widths(3, 50, 33, channel)
        test_edges_of_tiles_at_all_widths(2, 7, 8, channel)
    test_the_time_function_is_as_exact_as_float32_allows(86_400.0, 0.8, 1.0)
    test_the_time_function_is_as_exact_as_float32_allows(1.0, 0.9999, 0.5)


@pytest.mark.slow
def test_no_access_outside_and_no_undefined_behaviour(tmp_path):
    assert_clean("fuxi_attention", "fuxi_sanitizer.cpp", tmp_path)
