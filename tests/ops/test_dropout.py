"""Counter-based dropout: what its bits are worth, and that back ends, threads, forward and backward agree on them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from tests.ops.thread_counts import same_for_threads
from turbogr.errors import ConfigurationError
from turbogr.ops.dropout import Dropout, _bits, _dropout, draw_seed, dropout, dropout_reference, threshold_of
from turbogr.ops.dropout_native import KERNEL

SHAPES = [(), (0,), (1,), (0, 5), (5, 0), (1, 1), (7, 15), (3, 16), (2, 17), (2, 3, 33), (300, 50), (2, 3, 4, 5), (1, 100_003)]
SEEDS = [0, 1, 2**31, 2**62 + 12345, 2**63 - 1]


def seed_of(value):
    return torch.tensor(value, dtype=torch.int64)


@pytest.fixture
def native():
    if KERNEL.library() is None:
        pytest.skip(KERNEL.failure())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_back_ends_agree_bit_for_bit(shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for seed in SEEDS:
        for p in (1e-4, 0.2, 0.5, 0.999):
            assert torch.equal(*(_dropout(x, p, seed_of(seed), backend) for backend in ("cpp", "torch")))


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("shape", [s for s in SHAPES if s != (1, 100_003)])
def test_equals_the_reference(shape, backend):
    x = torch.randn(shape, dtype=torch.float64)
    for seed in SEEDS[2:4]:
        expected = dropout_reference(x, 0.3, seed)
        torch.testing.assert_close(_dropout(x, 0.3, seed_of(seed), backend), expected, rtol=1e-15, atol=0)
        narrow = _dropout(x.float(), 0.3, seed_of(seed), backend)
        torch.testing.assert_close(narrow.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("native")
def test_rows_far_apart_and_strided():
    packed = torch.randn(70, 90)
    for x in (
        packed[:, 20:57],
        packed[::3],
        packed.T,
        packed[:, ::2],
        packed.view(7, 10, 90).transpose(0, 1),
        packed[0].expand(9, 90),
    ):
        expected = _dropout(x.clone(memory_format=torch.contiguous_format), 0.4, seed_of(5), "torch")
        assert torch.equal(_dropout(x, 0.4, seed_of(5), "cpp"), expected)
        assert torch.equal(_dropout(x, 0.4, seed_of(5), "torch"), expected)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 40),
    columns=st.integers(0, 70),
    p=st.floats(0, 1, exclude_max=True, exclude_min=True),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_shape_probability_and_seed(rows, columns, p, seed):
    x = torch.ones(rows, columns)
    out = _dropout(x, p, seed_of(seed), "auto")
    assert torch.equal(out, _dropout(x, p, seed_of(seed), "torch"))
    assert set(out.unique().tolist()) <= {0.0, torch.tensor(1 / (1 - p), dtype=torch.float32).item()}


def bits_of(rows, columns, seed):
    return _bits(torch.arange(rows), columns, seed)


def test_bits_of_the_python_formula():
    from turbogr.ops.dropout import _bits_of

    for seed in SEEDS:
        expected = [[_bits_of(seed, r, c) for c in range(9)] for r in range(6)]
        assert bits_of(6, 9, seed).tolist() == expected


@pytest.mark.parametrize("p", [0.01, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(10_000, 50), (1, 500_000), (500_000, 1)])
def test_the_rate_is_p(shape, p):
    x = torch.ones(shape)
    torch.manual_seed(11)
    for _ in range(3):
        dropped = int((dropout(x, p) == 0).sum())
        deviation = (x.numel() * p * (1 - p)) ** 0.5
        assert abs(dropped - x.numel() * p) < 5 * deviation


def correlation(a, b):
    """In standard deviations of what independent bits give."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()) * a.numel() ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent(p):
    keep = bits_of(4000, 128, 77) >= threshold_of(p)
    for lag in (1, 2, 3, 4, 8, 15, 16, 17, 32, 50, 64):
        assert abs(correlation(keep[:, :-lag], keep[:, lag:])) < 4.5, f"columns {lag} apart"
        assert abs(correlation(keep[:-lag], keep[lag:])) < 4.5, f"rows {lag} apart"
        assert abs(correlation(keep[:-lag, :-lag], keep[lag:, lag:])) < 4.5, f"diagonal, {lag} apart"
    # The negative control: a mask that follows its neighbour now and then is caught.
    follows = torch.rand(4000, 127, generator=torch.Generator().manual_seed(0)) < 0.02
    copied = torch.where(follows, keep[:, :-1], keep[:, 1:])
    assert abs(correlation(keep[:, :-1], copied)) > 4.5


def test_every_bit_is_fair_and_rows_and_columns_vary():
    bits = bits_of(2000, 200, 123)
    for bit in range(32):
        ones = int((bits >> bit & 1).sum())
        assert abs(ones - bits.numel() / 2) < 5 * bits.numel() ** 0.5 / 2, f"bit {bit}"
    keep = (bits < threshold_of(0.25)).double()
    for axis, other in ((0, 1), (1, 0)):
        # Sums along an axis vary as much as binomial ones, neither more nor less.
        expected = keep.shape[axis] * 0.25 * 0.75
        spread = 5 * (2 / keep.shape[other]) ** 0.5
        assert abs(float(keep.sum(axis).var()) / expected - 1) < spread


def test_seeds_give_unrelated_masks():
    for one, other in ((0, 1), (1, 2), (5, 5 + 2**32), (9, 9 ^ 2**62)):
        a, b = (bits_of(2000, 64, seed) >= threshold_of(0.3) for seed in (one, other))
        for shift in (0, 1, 2):
            assert abs(correlation(a[: 2000 - shift], b[shift:])) < 4.5
        assert not torch.equal(a, b)


def test_torch_manual_seed_fixes_the_mask():
    x = torch.ones(100, 10)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append([dropout(x, 0.5), dropout(x, 0.5)])
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][0], drawn[0][1])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert draw_seed().dtype == torch.int64


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_backward_has_the_mask_of_forward_and_keeps_the_seed_only(backend):
    x = torch.randn(40, 30, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = dropout(x, 0.4, backend=backend)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient * x, out)
    assert (gradient == 0).any()
    if backend != "reference":
        assert [t.numel() for t in saved] == [1]


@pytest.mark.usefixtures("native")
def test_threads_do_not_change_a_bit():
    x = torch.randn(3001, 50)
    same_for_threads(lambda: [_dropout(x, 0.2, seed_of(3), "cpp")], x)


def test_operator_is_sound():
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(5, 7, dtype=dtype, requires_grad=True)
        for backend in ("auto", "torch"):
            opcheck(_dropout, (x, 0.3, seed_of(8), backend))
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: _dropout(x, 0.3, seed_of(8), "torch"), (x,))
    assert torch.autograd.gradgradcheck(lambda x: _dropout(x, 0.3, seed_of(8), "torch"), (x,))


def test_damaged_numbers_stay_visible():
    for backend in ("auto", "torch"):
        assert _dropout(torch.full((50, 3), torch.nan), 0.5, seed_of(0), backend).isnan().all()


def test_module_is_the_identity_in_evaluation():
    x, module = torch.randn(50, 8), Dropout(0.5)
    assert module.eval()(x) is x
    assert (module.train()(x) == 0).any()
    assert dropout(x, 0.0) is x
    assert str(module) == "Dropout(p=0.5, backend='auto')"
    assert not list(module.parameters())
    assert not module.state_dict()


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_impossible_probabilities_are_refused(p):
    with pytest.raises(ValueError, match=r"p must lie in \[0, 1\)"):
        dropout(torch.ones(3), p)
    with pytest.raises(ConfigurationError, match=r"p must lie in \[0, 1\)"):
        Dropout(p)


def test_impossible_inputs_are_refused():
    with pytest.raises(ValueError, match="floating dtype; got torch"):
        dropout(torch.ones(3, dtype=torch.int64), 0.5)
    with pytest.raises(ConfigurationError, match="backend must be one of"):
        dropout(torch.ones(3), 0.5, backend="fast")
    with pytest.raises(ConfigurationError, match="backend must be one of"):
        Dropout(0.5, backend="fast")
    if KERNEL.library() is not None:
        with pytest.raises(ConfigurationError, match="float32 on the CPU"):
            dropout(torch.ones(3, dtype=torch.float64), 0.5, backend="cpp")
    with pytest.raises(ValueError, match="columns are counted in 32 bits"):
        _dropout(torch.zeros(1).expand(1, 2**32), 0.5, seed_of(0), "torch")


def test_compiles_and_traces():
    def function(x):
        return dropout(x, 0.5).square().sum()

    assert torch.compile(function, backend="eager", fullgraph=True)(torch.ones(4, 4)).shape == ()
