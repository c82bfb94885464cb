"""What the stand-in calculates and counts, against PyTorch; the order of cores."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ascendc.build import StandInError, driver

COUNT = 96
S = 0.75
NONE, RINT, FLOOR, CEIL, ROUND, TRUNC = range(6)

OPERATIONS = {
    "Add": lambda x, y: x + y,
    "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y,
    "Div": lambda x, y: x / y,
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Adds": lambda x, y: x + S,
    "Muls": lambda x, y: x * S,
    "Maxs": lambda x, y: x.clamp(min=S),
    "Mins": lambda x, y: x.clamp(max=S),
    "Exp": lambda x, y: x.exp(),
    "Ln": lambda x, y: x.log(),
    "Sqrt": lambda x, y: x.sqrt(),
    "Rsqrt": lambda x, y: x.rsqrt(),
    "Reciprocal": lambda x, y: 1 / x,
    "Abs": lambda x, y: x.abs(),
    "Relu": lambda x, y: x.relu(),
    "Silu": lambda x, y: x * x.sigmoid(),
    "Sigmoid": lambda x, y: x.sigmoid(),
    "Power": lambda x, y: x**y,
    "Power of a scalar": lambda x, y: x**S,
    "Duplicate": lambda x, y: torch.full_like(x, S),
    "CreateVecIndex": lambda x, y: 3 + torch.arange(len(x), dtype=x.dtype),
    "ArithProgression": lambda x, y: 3 + S * torch.arange(len(x), dtype=x.dtype),
    "Axpy": lambda x, y: y + S * x,
    "MulAddDst": lambda x, y: y + x * y,
}
OF_POSITIVE = {"Ln", "Sqrt", "Rsqrt", "Power", "Power of a scalar"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_vector_unit_calculates_as_pytorch_does(name, dtype):
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(COUNT, generator=generator).to(dtype) for _ in range(2))
    if name in OF_POSITIVE:
        x = x.abs() + 0.1
    out = torch.empty_like(x)
    function = "calculate_float" if dtype == torch.float32 else "calculate_half"
    counters = driver("values_driver").call(function, name.encode(), x, y, out, COUNT)
    expected = OPERATIONS[name](x.double(), y.double())
    epsilon = torch.finfo(dtype).eps
    assert torch.allclose(out.double(), expected, rtol=4 * epsilon, atol=2 * epsilon)
    assert counters.vector_elements == COUNT


NUMBERS = torch.tensor([0.0, -0.5, 0.5, 1.5, 2.5, -2.5, 1 / 3, -1 / 3, 1000.3, -65.04, 1e-6, 3e38, -7e4, 123456.7])


@pytest.mark.parametrize("mode", [RINT, FLOOR, CEIL, ROUND, TRUNC])
@pytest.mark.parametrize(("to", "dtype"), [("half", torch.float16), ("bfloat16", torch.bfloat16)])
def test_casts_to_16_bits_round_as_they_are_told(to, dtype, mode):
    out = torch.empty(len(NUMBERS), dtype=dtype)
    driver("values_driver").call("cast_to", to.encode(), NUMBERS, out, len(NUMBERS), mode)
    largest = torch.finfo(dtype).max
    nearest = NUMBERS.clamp(-largest, largest).to(dtype)
    if mode == RINT:
        assert torch.equal(out, nearest)
        return
    for x, y, near in zip(NUMBERS.tolist(), out.tolist(), nearest.tolist(), strict=True):
        if abs(x) > largest:
            assert abs(y) == largest
        elif mode == FLOOR:
            assert y <= x
        elif mode == CEIL:
            assert y >= x
        elif mode == TRUNC:
            assert abs(y) <= abs(x)
        else:
            assert abs(y - x) <= abs(near - x)
        step = max(abs(x) * torch.finfo(dtype).eps, 2.0**-24)
        assert abs(y) == largest or abs(y - x) < step or y == x


def test_casts_to_integers_round_and_saturate():
    function = {RINT: round, FLOOR: math.floor, CEIL: math.ceil, TRUNC: math.trunc}
    for mode, rounded in function.items():
        out = torch.empty(len(NUMBERS), dtype=torch.int32)
        driver("values_driver").call("cast_to", b"int32", NUMBERS, out, len(NUMBERS), mode)
        assert out.tolist() == [min(max(rounded(x), -(2**31)), 2**31 - 1) for x in NUMBERS.tolist()]


def test_a_cast_from_float_to_float_rounds_to_integers():
    out = torch.empty(len(NUMBERS))
    driver("values_driver").call("cast_to", b"float", NUMBERS, out, len(NUMBERS), RINT)
    assert torch.equal(out, NUMBERS.round())


@pytest.mark.parametrize(
    ("source", "dtype", "mode"),
    [
        ("half", torch.float16, NONE),
        ("bfloat16", torch.bfloat16, NONE),
        ("int32", torch.int32, RINT),
        ("int64", torch.int64, RINT),
    ],
)
def test_casts_to_float(source, dtype, mode):
    x = torch.tensor([0, 1, -2, 77, -1000]).to(dtype)
    out = torch.empty(len(x))
    driver("values_driver").call("cast_from", source.encode(), x, out, len(x), mode)
    assert torch.equal(out, x.float())


def test_sums_comparisons_choices_and_gathering():
    generator = torch.Generator().manual_seed(6)
    x, y = (torch.randn(128, generator=generator) for _ in range(2))
    out = torch.empty(8, 128)
    counters = driver("values_driver").call("select_and_sum", x, y, out)
    assert math.isclose(out[0, 0], x.double().sum(), abs_tol=1e-5)
    assert torch.allclose(out[1, :16], x.view(16, 8).sum(1), atol=1e-5)
    assert torch.allclose(out[2, :2], x.view(2, 64).sum(1), atol=1e-5)
    assert torch.equal(out[3], torch.where(x > y, x, y))
    assert torch.equal(out[4], torch.where(x > y, x, torch.tensor(-1.0)))
    assert torch.equal(out[5], x.flip(0))
    assert torch.equal(out[6, :64], x[:8].repeat_interleave(8))
    assert torch.equal(out[7], torch.where(x <= 0, x, torch.tensor(0.0)))
    assert counters.vector_reductions == 3 * 128
    assert counters.vector_selections == 5 * 128
    assert counters.vector_gathers == 128
    assert counters.vector_fills == 8 * 128 + 128 + 64


@pytest.mark.parametrize("transposed", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products(dtype, transposed):
    m, n, k = 5, 7, 11
    generator = torch.Generator().manual_seed(7)
    a, b = torch.randn(m, k, generator=generator).to(dtype), torch.randn(k, n, generator=generator).to(dtype)
    expected = a.double() @ b.double()
    stored_a, stored_b = (x.T.contiguous() if t else x for x, t in zip((a, b), transposed, strict=True))
    function = "multiply_float" if dtype == torch.float32 else "multiply_half"
    c = torch.ones(m, n)
    for add in (0, 1):
        counters = driver("values_driver").call(function, torch.tensor([m, n, k]), stored_a, stored_b, c, *transposed, add)
        assert torch.allclose(c.double(), expected * (1 + add), atol=1e-5)
        assert counters.cube_multiply_adds == m * n * k
        assert counters.bytes_matmul_operands == (m * k + k * n) * dtype.itemsize
        assert counters.bytes_matmul_results == 4 * m * n
        assert counters.atomic_elements == add * m * n


@pytest.mark.parametrize("cores", [1, 2, 7, 24, 48])
def test_a_kernel_gives_the_same_on_any_number_of_cores_in_any_order(cores):
    for seed in range(3):
        x, y = torch.randn(1013), torch.empty(1013)
        counters = driver("guards").call("run_exponential", x, y, 1013, cores, seed)
        assert torch.allclose(y, x.exp(), rtol=1e-6)
        assert counters.bytes_global_to_local == counters.bytes_local_to_global == 4 * 1013
        assert counters.vector_functions == counters.vector_elements == 1013
        assert counters.peak_local_bytes == 4 * 256


def test_the_order_of_cores_is_the_seeds():
    """Each core notes when it came, in two rounds."""

    def order(seed, cores=7):
        out = torch.zeros(2, cores, dtype=torch.int64)
        driver("guards").call("run_order", out, cores, seed)
        return out

    for seed in (1, 2, 3):
        first = order(seed)
        assert torch.equal(first, order(seed)), "the same again"
        assert all(sorted(x) == list(range(7)) for x in first.tolist())
        assert not torch.equal(first[0], first[1]), "another order behind SyncAll"
    assert not torch.equal(order(1), order(2))


def test_an_error_is_one_cores_and_ends_the_launch():
    with pytest.raises(StandInError, match=r"^core 5, "):
        driver("guards").call("run_failing", 24, 5)
