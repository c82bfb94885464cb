"""What the kernels of HSTU attention take, as their README has it."""

from __future__ import annotations

import csv
from dataclasses import replace

import torch

from tests.ascendc import hstu_counters
from tests.ascendc.hstu import TOLERANCES, backward, case_of, forward, worst
from turbogr.resources import kernels_dir


def test_the_readme_has_the_counters():
    readme = (kernels_dir() / "ascendc" / "jagged_hstu_attention" / "README.md").read_text()
    assert hstu_counters.table() in readme, "python -m tests.ascendc.hstu_counters prints the table"


def kuairand_times(folder, users):
    """Of real users: the times of their events in order, in milliseconds."""
    (path,) = (folder / "kuairand-27k-sample").glob("log_standard*.csv")
    times: dict[str, list[int]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            times.setdefault(row["user_id"], []).append(int(row["time_ms"]))
    return [torch.tensor(sorted(x)) for x in list(times.values())[:users]]


def test_real_kuairand_times(shared_data):
    """Sessions, equal times and weeks of gaps, bucketed in seconds: parity, and few scalar operations."""
    histories = kuairand_times(shared_data, 12)
    lengths = [x.numel() for x in histories]
    keys = torch.cat(histories)
    queries = torch.cat([torch.cat([x[1:], x[-1:]]) for x in histories])
    case = replace(case_of(lengths, heads=2), time=torch.randn(129), key_times=keys, query_times=queries, unit=1000.0)
    expected = case.reference()
    tolerance = TOLERANCES[torch.float32]
    gradients, counters = backward(case, 7)
    assert worst([forward(case, 7)[0], *gradients], expected, tolerance) <= tolerance
    assert counters.scalar_operations <= 2 * sum(n * (n + 1) // 2 for n in lengths) / 8
    in_milliseconds = replace(case, unit=1.0).reference()
    assert worst(gradients, in_milliseconds[1:], tolerance) > 0.5, "negative control: the unit matters"
