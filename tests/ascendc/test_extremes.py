"""ReduceMax and ReduceMin of the stand-in."""

from __future__ import annotations

import pytest
import torch

from tests.ascendc.build import StandInError, driver


@pytest.mark.parametrize("count", [8, 64, 200])
def test_the_largest_and_the_least(count):
    x, found = torch.randn(count), torch.empty(2)
    counters = driver("values_driver").call("extremes", x, found, count, 0)
    assert found.tolist() == [x.max(), x.min()]
    assert counters.vector_reductions == 2 * count


@pytest.mark.parametrize(
    ("mistake", "message"),
    [(1, "no elements"), (2, "indices are not simulated"), (3, "reads local memory that was never written")],
)
def test_guards(mistake, message):
    with pytest.raises(StandInError, match=message):
        driver("values_driver").call("extremes", torch.randn(64), torch.empty(2), 64, mistake)
