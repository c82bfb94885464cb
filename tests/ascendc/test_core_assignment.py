"""Which core computes which rows, and the tiles of a task: the C++ headers that host and kernels share."""

from __future__ import annotations

import csv
import itertools

import pytest
import torch

from tests.ascendc.build import driver
from tests.ops.jagged_cases import LENGTHS, offsets_of

CORES = [1, 2, 7, 24, 48]
ROWS = 256


def core_pairs(lengths, cores, by_keys):
    """Pairs of each core, and of the largest block."""
    pairs, offsets = torch.empty(cores, dtype=torch.int64), offsets_of(lengths)
    largest = driver("tiling_driver").function("core_pairs")(by_keys, offsets, len(lengths), cores, pairs)
    return pairs, largest


def plan_of(lengths, cores, by_keys):
    """Of each core: (token, length, first row) of its blocks."""
    offsets, room = offsets_of(lengths), torch.empty(1 << 16, dtype=torch.int32)
    count = driver("tiling_driver").function("packed_plan")(by_keys, offsets, len(lengths), cores, room, room.numel())
    first, blocks = room[: cores + 1].tolist(), room[cores + 1 : count].view(-1, 3).tolist()
    assert first[0] == 0
    assert first[-1] == len(blocks)
    return [blocks[a:b] for a, b in itertools.pairwise(first)]


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("cores", CORES)
@pytest.mark.parametrize("lengths", [*LENGTHS.values(), [0, 300, 0, 1, 4096, 255, 256, 257]])
def test_every_row_has_one_core(lengths, cores, by_keys):
    plan = plan_of(lengths, cores, by_keys)
    found = sorted((token, length, first) for blocks in plan for token, length, first in blocks)
    starts = offsets_of(lengths).tolist()
    assert found == [
        (start, length, first) for start, length in zip(starts, lengths, strict=False) for first in range(0, length, ROWS)
    ]
    pairs, _ = core_pairs(lengths, cores, by_keys)
    assert int(pairs.sum()) == sum(n * (n + 1) // 2 for n in lengths)


def test_costs_are_those_of_causal_attention():
    """A core's pairs, counted one by one."""
    lengths = [700, 3, 513]
    for by_keys in (False, True):
        pairs, _ = core_pairs(lengths, 3, by_keys)
        for core, blocks in enumerate(plan_of(lengths, 3, by_keys)):
            rows = [(length, i) for _, length, first in blocks for i in range(first, min(first + ROWS, length))]
            assert int(pairs[core]) == sum(length - i if by_keys else i + 1 for length, i in rows)


def kuairand_lengths(folder, column):
    """Real KuaiRand-27K: exposures or clicks of every user, in the file's order."""
    with (folder / "kuairand-27k-stats" / "log_standard_user_stats_distribution.csv").open(encoding="utf-8-sig") as file:
        return [int(float(row[column])) for row in csv.DictReader(file)]


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("cores", [24, 48])
@pytest.mark.parametrize(("column", "longest", "batch"), [("clicks", 2048, 32), ("clicks", 4096, 15), ("exposures", 8192, 8)])
def test_real_kuairand_lengths_are_balanced(shared_data, column, longest, batch, cores, by_keys):
    """The largest core has at most 5% more than the mean; not so where blocks are dealt out in turn.

    Where one block has more than half of what a core has in the mean, no plan need be that good: 6% there.
    """
    lengths = [min(x, longest) for x in kuairand_lengths(shared_data, column)]
    in_turn = []
    for start in range(0, 100 * batch, batch):
        pairs, largest = core_pairs(lengths[start : start + batch], cores, by_keys)
        mean = float(pairs.double().mean())
        assert int(pairs.max()) <= (1.05 if largest <= mean / 2 else 1.06) * mean
        in_turn.append(largest_in_turn(lengths[start : start + batch], cores, by_keys) / mean)
    assert min(in_turn) > 1.05, "negative control: blocks dealt out in turn are not balanced"


def largest_in_turn(lengths, cores, by_keys):
    costs, core = [0] * cores, 0
    for length in lengths:
        for first in range(0, length, ROWS):
            end = min(first + ROWS, length)
            ahead, behind = (length - end, length - first) if by_keys else (first, end)
            costs[core % cores] += behind * (behind + 1) // 2 - ahead * (ahead + 1) // 2
            core += 1
    return max(costs)


def test_the_same_lengths_give_the_same_plan():
    lengths = torch.randint(0, 3000, (40,)).tolist()
    assert plan_of(lengths, 24, False) == plan_of(lengths, 24, False)
    assert plan_of(lengths, 24, False) != plan_of(lengths[::-1], 24, False)


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 255, 256, 257, 320, 321, 600])
def test_tiles_cover_every_pair_once(length, by_keys):
    """And the first tile of a task has all its rows, so that sums can begin with it."""
    times = torch.zeros(length, length, dtype=torch.int32)
    assert driver("tiling_driver").function("covered_pairs")(by_keys, length, times) == 0
    assert bool((times.tril() == torch.ones_like(times).tril()).all())
    assert int(times.max()) == 1
    # Above the diagonal there is nothing but the rest of 64 x 64 squares.
    index = torch.arange(length)
    assert bool((times[(index[:, None] // 64) < (index[None] // 64)] == 0).all())
