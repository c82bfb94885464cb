"""How ids, rows and sums are spread over cores, and local memory: the headers that host and kernels share."""

from __future__ import annotations

import csv
import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ascendc import lookup, negatives
from tests.ascendc.build import driver
from tests.ascendc.hstu import DTYPES
from tests.ops.test_embedding_lookup import CASES
from tests.ops.test_negative_logits import SHAPES

CORES = [1, 2, 7, 24, 48]
LOCAL_BYTES = 192 * 1024


def parts_of(begin: int, end: int, cores: int) -> torch.Tensor:
    parts = torch.empty(cores, 2, dtype=torch.int64)
    driver(*lookup.DRIVER).function("even_parts", None)(begin, end, cores, parts)
    return parts


def sums_of(starts: torch.Tensor, cores: int) -> list[dict[str, int]]:
    parts = torch.empty(cores, 8, dtype=torch.int64)
    driver(*lookup.DRIVER).function("sum_parts", None)(starts, len(starts) - 1, cores, parts)
    names = ("empty", "first_row", "last_row", "first", "last", "resumes", "stops", "first_core")
    return [dict(zip(names, row, strict=True)) for row in parts.tolist()]


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=12), cores=st.sampled_from(CORES))
def test_every_table_is_spread_evenly(counts, cores):
    """Parts differ by at most one: of each table, and of all tables together."""
    loads = torch.zeros(cores, dtype=torch.int64)
    begin = 0
    for count in counts:
        parts = parts_of(begin, begin + count, cores)
        sizes = parts[:, 1] - parts[:, 0]
        assert sizes.max() - sizes.min() <= 1
        ids = torch.cat([torch.arange(a, b) for a, b in parts.tolist()]).sort().values
        assert torch.equal(ids, torch.arange(begin, begin + count))
        loads += sizes
        begin += count
    assert loads.max() - loads.min() <= 1


@settings(max_examples=120, deadline=None)
@given(counts=st.lists(st.integers(0, 9) | st.integers(0, 400), min_size=1, max_size=60), cores=st.sampled_from(CORES))
def test_every_position_is_summed_once_and_every_row_written_once(counts, cores):
    check_sums(counts, cores)


@pytest.mark.parametrize("cores", CORES)
@pytest.mark.parametrize("counts", [[0], [1], [0] * 100, [10_000], [0, 5000, 0, 1], [1] * 97], ids=str)
def test_sums_of_few_and_of_many(counts, cores):
    check_sums(counts, cores)


def check_sums(counts: list[int], cores: int) -> None:
    base = 11  # positions of earlier tables
    starts = torch.tensor([0, *counts]).cumsum(0) + base
    edges, rows = starts.tolist(), len(counts)
    parts = sums_of(starts, cores)
    positions, written, items = [], [], []
    for core, p in enumerate(parts):
        if p["empty"]:
            items.append(0)
            continue
        positions += range(p["first"], p["last"])
        written += range(p["first_row"], p["last_row"])
        items.append(p["last"] - p["first"] + p["last_row"] - p["first_row"])
        assert p["resumes"] == (p["first"] > edges[p["first_row"]])
        assert p["stops"] == (p["last_row"] < rows and p["last"] > edges[p["last_row"]])
        if p["resumes"] and p["first_row"] < p["last_row"]:
            # Everyone from the first core on has left a part of the row, or has nothing at all.
            givers = [x for x in parts[p["first_core"] : core] if not x["empty"]]
            assert givers
            assert all(x["stops"] and x["last_row"] == p["first_row"] for x in givers)
            assert not givers[0]["resumes"] or givers[0]["first_row"] < p["first_row"]
    assert positions == list(range(base, edges[-1]))
    assert written == list(range(rows))
    assert max(items) - min(items) <= 1


SIZES = ("forward_bytes", "backward_bytes", "pitch", "forward_rows", "backward_rows", "workspace")


def sizes_of(name: str, library: tuple[str, ...], problem: ctypes.Structure) -> dict[str, int] | None:
    numbers = torch.empty(len(SIZES), dtype=torch.int64)
    refused = driver(*library).function(name)(ctypes.addressof(problem), numbers)
    return None if refused else dict(zip(SIZES, numbers.tolist(), strict=True))


@pytest.mark.parametrize("dtype", range(3), ids=["float", "half", "bfloat16"])
@pytest.mark.parametrize("cores", CORES)
def test_local_memory_and_alignment(dtype, cores):
    widths = {1, 7, 8, 16, 17, 33, 50, 64, 65, 128, 129, 255, 256, 400, 512, 1000, 2048, 4095, 4096}
    problems = [
        ("lookup_sizes", lookup.DRIVER, lookup.Problem(dtype, len(rows), sum(counts), sum(rows), width, cores, 0, None))
        for width in widths
        for rows, counts in CASES.values()
    ]
    shapes = [(40, 7, width, 30) for width in widths] + SHAPES
    problems += [
        ("negative_sizes", negatives.DRIVER, negatives.Problem(dtype, t, r, u, width, cores, 0))
        for t, r, width, u in shapes
        if width
    ]
    for name, library, problem in problems:
        sizes = sizes_of(name, library, problem)
        assert max(sizes["forward_bytes"], sizes["backward_bytes"]) <= LOCAL_BYTES
        assert min(sizes["forward_rows"], sizes["backward_rows"]) >= 1
        assert sizes["pitch"] * (4, 2, 2)[dtype] % 32 == 0
        assert problem.width <= sizes["pitch"] < problem.width + 16
        assert sizes["workspace"] % 512 == 0
        if problem.width <= 128:
            assert min(sizes["forward_rows"], sizes["backward_rows"]) >= 64, "rows of usual widths are copied by the dozen"


@pytest.mark.parametrize("width", [0, -1, 4097])
def test_what_does_not_fit_is_refused(width):
    assert sizes_of("lookup_sizes", lookup.DRIVER, lookup.Problem(0, 1, 5, 5, width, 24, 0, None)) is None
    assert sizes_of("negative_sizes", negatives.DRIVER, negatives.Problem(0, 5, 5, 5, width, 24, 0)) is None


def test_what_the_kernels_take_is_what_the_tiling_says():
    batch = lookup.batch_of([50, 5], [200, 9], 50)
    sizes = sizes_of("lookup_sizes", lookup.DRIVER, lookup.Problem(0, 2, 209, 55, 50, 7, 0, None))
    assert lookup.forward(batch)[1].peak_local_bytes == sizes["forward_bytes"]
    gradient = torch.ones(209, 50)
    # The numbers of the starts are counted, too.
    assert lookup.backward(batch, gradient)[1].peak_local_bytes == sizes["backward_bytes"]
    for dtype in DTYPES:
        case = negatives.case_of(40, 7, 33, 30, dtype)
        sizes = sizes_of("negative_sizes", negatives.DRIVER, case.problem(7, 1))
        assert negatives.forward(case)[1].peak_local_bytes == sizes["forward_bytes"]
        assert negatives.backward(case, torch.ones(40, 7, dtype=dtype))[2].peak_local_bytes == sizes["backward_bytes"]


@pytest.mark.parametrize("cores", [24, 48])
def test_real_popularity_is_balanced(cores, shared_data):
    """Of the videos that KuaiRand's users rated: a few are asked for often, most of them rarely."""
    (path,) = (shared_data / "kuairand-27k-sample").glob("log_standard*.csv")
    with path.open() as file:
        videos = torch.tensor([int(row["video_id"]) for row in csv.DictReader(file)])
    counts = videos.unique(return_counts=True)[1]
    check_sums(counts.tolist(), cores)
    # Negative control: as many rows to each core.
    loads = torch.stack([x.sum() + len(x) for x in counts.tensor_split(cores)]).double()
    assert loads.max() > 1.05 * loads.mean()
