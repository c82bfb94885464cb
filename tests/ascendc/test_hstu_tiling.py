"""The tiling of HSTU attention: local memory, workspace, the cube's shapes, and buckets."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.ascendc.build import driver
from tests.ops.jagged_cases import LENGTHS, WIDTHS
from turbogr.ops.time_buckets import bucket_thresholds

LOCAL_BYTES = 192 * 1024
FACTS = ("strip_rows", "local_forward", "local_backward", "workspace_forward", "workspace_backward", "fits", "aligned")


def facts_of(tokens=1000, heads=4, qk=64, v=64, element=2, positions=4096, times=129, cores=48, unit=1.0, divisor=0.301):
    """By name, or the error."""
    numbers = torch.tensor([tokens, heads, qk, v, element, positions, times, cores])
    facts = torch.zeros(len(FACTS), dtype=torch.int64)
    error = driver("tiling_driver").function("hstu_facts", ctypes.c_char_p)(numbers, unit, divisor, facts)
    return error.decode() if error else dict(zip(FACTS, facts.tolist(), strict=True))


@pytest.mark.parametrize("element", [2, 4])
@pytest.mark.parametrize("cores", [1, 2, 7, 24, 48])
@pytest.mark.parametrize(("heads", "qk", "v"), [*WIDTHS, (4, 512, 512), (16, 64, 64), (1, 1, 512)])
def test_everything_fits(heads, qk, v, cores, element):
    """Shapes of the parity matrix, and the largest; tables from none to the longest."""
    for tokens in [*(sum(x) for x in LENGTHS.values()), 100_000]:
        for positions, times in [(0, 0), (1, 0), (0, 1), (8192, 129), (228_000, 128), (64, 1000)]:
            facts = facts_of(tokens, heads, qk, v, element, positions, times, cores)
            assert max(facts["local_forward"], facts["local_backward"]) <= LOCAL_BYTES
            assert facts["fits"], "what the cube calculates at a time is larger than its memories"
            assert facts["aligned"]
            assert facts["workspace_forward"] % (512 * cores) == facts["workspace_backward"] % (512 * cores) == 0
            assert facts["workspace_backward"] // cores < 2**30


def test_workspace_does_not_grow_with_the_batch():
    """No tensor of the batch's size is kept there: nothing can be padded, converted or copied as a whole."""
    few, many = facts_of(tokens=1000), facts_of(tokens=100_000)
    for field in ("workspace_forward", "workspace_backward"):
        assert many[field] == few[field]
    longer = facts_of(positions=8192)
    assert longer["workspace_backward"] > few["workspace_backward"], "negative control: tables of gradients are kept there"


def test_wide_tables_take_narrower_strips():
    assert facts_of(times=28)["strip_rows"] == 32
    assert facts_of(times=1000)["strip_rows"] < 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk": 513}, "at most 512 columns"),
        ({"v": 0}, "must be positive"),
        ({"heads": 200, "qk": 400}, "at most 65535 columns"),
        ({"element": 8}, "float32, float16 or bfloat16"),
        ({"tokens": 2**31}, "at most 2\\^31 - 1 tokens"),
        ({"times": 5000}, "time table does not fit"),
        ({"divisor": 1e-4}, "a time_divisor of 0.00025 on"),
        ({"unit": 1e13}, "time_unit between"),
    ],
)
def test_what_does_not_fit_is_told(change, message):
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(facts_of(**change))


@pytest.mark.parametrize(
    ("count", "unit", "divisor"), [(129, 1.0, 0.301), (129, 1000.0, 0.301), (64, 60.0, 0.5), (300, 1.0, 0.05)]
)
def test_thresholds_are_the_operators(count, unit, divisor):
    """The host's C++ bisects the formula as PyTorch does; where their logarithms differ, that is by one tick at an edge."""
    found = torch.empty(count - 1, dtype=torch.int64)
    driver("tiling_driver").function("thresholds", None)(count, unit, divisor, found)
    expected = bucket_thresholds(count, unit, divisor)
    exact = expected < 2**52  # beyond, a float64 gap is rounded
    assert torch.equal(found[exact], expected[exact])
    assert torch.allclose(found.double(), expected.double(), rtol=1e-15)
