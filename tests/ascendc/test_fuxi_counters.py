"""What the kernels of FuXi's attention take, as their README has it, and on real times."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ascendc import fuxi_counters
from tests.ascendc.fuxi import backward, case_of, forward
from tests.ascendc.hstu import TOLERANCES, worst
from tests.ascendc.test_hstu_counters import kuairand_times
from turbogr.resources import kernels_dir


@pytest.mark.parametrize("channel", ["bucketed", "functional"])
def test_the_readme_has_the_counters(channel):
    readme = (kernels_dir() / "ascendc" / "jagged_fuxi_attention" / "README.md").read_text()
    assert fuxi_counters.table(channel) in readme, "python -m tests.ascendc.fuxi_counters prints the tables"


def test_real_kuairand_times(shared_data):
    """Sessions, equal times and weeks of gaps, as a function of days: parity, and few scalar operations."""
    histories = kuairand_times(shared_data, 6)
    lengths = [x.numel() for x in histories]
    keys = torch.cat(histories)
    queries = torch.cat([torch.cat([x[1:], x[-1:]]) for x in histories])
    case = replace(case_of(lengths, heads=2), key_times=keys, query_times=queries, unit=86_400_000.0)
    expected = case.reference()
    tolerance = TOLERANCES[torch.float32]
    gradients, counters = backward(case, 7)
    assert worst([forward(case, 7)[0], *gradients], expected, tolerance) <= tolerance
    assert counters.scalar_operations <= 2 * sum(n * (n + 1) // 2 for n in lengths) / 8
    in_seconds = replace(case, unit=1000.0).reference()
    assert worst(gradients[4:], in_seconds[5:], tolerance) > 0.5, "negative control: the unit matters"
