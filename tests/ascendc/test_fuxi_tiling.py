"""The tiling of FuXi's attention: local memory, workspace, the cube's shapes."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.ascendc.build import driver
from tests.ops.jagged_cases import LENGTHS, WIDTHS

LOCAL_BYTES = 192 * 1024
FACTS = ("strip_rows", "local", "workspace_forward", "workspace_backward", "fits", "aligned")


def facts_of(
    tokens=1000, heads=4, qk=64, v=64, element=2, positions=4096, kind=1, times=129, cores=48, unit=1.0, divisor=0.301
):
    """By name, or the error."""
    numbers = torch.tensor([tokens, heads, qk, v, element, positions, kind, times, cores])
    facts = torch.zeros(len(FACTS), dtype=torch.int64)
    error = driver("tiling_driver").function("fuxi_facts", ctypes.c_char_p)(numbers, unit, divisor, facts)
    return error.decode() if error else dict(zip(FACTS, facts.tolist(), strict=True))


@pytest.mark.parametrize("element", [2, 4])
@pytest.mark.parametrize("cores", [1, 2, 7, 24, 48])
@pytest.mark.parametrize(("heads", "qk", "v"), [*WIDTHS, (4, 512, 512), (16, 64, 64), (1, 1, 512)])
def test_everything_fits(heads, qk, v, cores, element):
    """Shapes of the parity matrix, and the largest; tables from none to the longest, and the time function."""
    for tokens in [*(sum(x) for x in LENGTHS.values()), 100_000]:
        for positions, kind, times in [(0, 0, 0), (1, 2, 0), (0, 1, 1), (8192, 1, 129), (228_000, 2, 0), (64, 1, 1000)]:
            facts = facts_of(tokens, heads, qk, v, element, positions, kind, times, cores)
            assert facts["local"] <= LOCAL_BYTES
            assert facts["fits"], "what the cube calculates at a time is larger than its memories"
            assert facts["aligned"]
            assert facts["workspace_forward"] % (512 * cores) == 0
            shared = 2 * -(-tokens * heads * v * element // 512) * 512 if kind or positions else 0
            assert (facts["workspace_backward"] - shared) % (512 * cores) == 0
            assert (facts["workspace_backward"] - shared) // cores < 2**26, "a core's own part, whatever the batch"


def test_wide_tables_take_narrower_strips():
    assert facts_of(times=128)["strip_rows"] == 32
    assert facts_of(times=1000)["strip_rows"] < 32
    assert facts_of(kind=2, times=0, element=4)["strip_rows"] == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qk": 513}, "at most 512 columns"),
        ({"v": 0}, "must be positive"),
        ({"element": 8}, "float32, float16 or bfloat16"),
        ({"tokens": 2**31}, "at most 2\\^31 - 1 tokens"),
        ({"heads": 50, "v": 500}, "at most 65535 columns"),
        ({"times": 5000}, "time table does not fit"),
        ({"times": 0}, "a time table has entries"),
        ({"kind": 2}, "nothing else has"),
        ({"kind": 3}, "a table, a function or nothing"),
        ({"divisor": 1e-4}, "a time_divisor of 0.00025 on"),
        ({"unit": 1e13}, "time_unit between"),
        ({"kind": 2, "times": 0, "unit": 1e13}, "time_unit must lie between"),
        ({"positions": -1}, "position table"),
    ],
)
def test_what_does_not_fit_is_told(change, message):
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(facts_of(**change))
