"""The cost of each number of groups, and the choice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from turbogr.errors import ConfigurationError
from turbogr.sparse.groups import DistinctRows, Links, Tables, choose_groups, count_rows, group_costs, reason, refuse

TABLES = Tables({"items": 1_000_001, "tag": 10}, dim=8, row_bytes=96)
ROWS = DistinctRows({1: 1000, 2: 1600, 4: 2500, 8: 4000}, most=1_000_011)
LINKS = Links(ranks_per_node=2, local=1e9, network=1e8, latency=0.0)


def costs(world_size=8, rows=ROWS, links=LINKS, step_bytes=0, memory=None):
    return {cost.groups: cost for cost in group_costs(world_size, TABLES, rows, links, step_bytes, memory)}


def test_every_divisor_is_a_choice():
    assert list(costs(12)) == [1, 2, 3, 4, 6, 12]
    assert [cost.group_size for cost in costs(12).values()] == [12, 6, 4, 3, 2, 1]


def test_bytes_of_each_choice_by_hand():
    found = costs()
    # one group of 8: 7/8 of 1000 rows go to others, each as an id, a row and a gradient
    assert found[1].inside == pytest.approx(875 * (8 + 2 * 32))
    assert (found[1].between, found[1].exchange) == (0, "none")
    # four groups of 2: a member owns half of its group's 1600 rows, and of all 4000
    assert found[4].inside == pytest.approx(500 * 72)
    gather, two_phase = 3 * 800 * 32, 3 / 4 * (800 + 2000) * 32
    assert found[4].exchange == "two_phase"
    assert two_phase < gather
    assert found[4].between == pytest.approx(3 * (4 * 800 + 16) + two_phase)
    # two groups of 4: everyone to one other, or half to it and half back
    assert found[2].exchange == "gather"
    assert found[2].between == pytest.approx(4 * 625 + 16 + 625 * 32)
    # eight groups of 1: nothing inside
    assert found[8].inside == 0
    assert [found[m].table_bytes for m in (1, 2, 4, 8)] == [
        96 * (125001 + 2),
        96 * (250001 + 3),
        96 * (500001 + 5),
        96 * 1_000_011,
    ]


def test_links_inside_a_node_are_the_local_ones():
    found = costs()
    assert found[4].off_node == pytest.approx(found[4].between), "groups of 2 lie within nodes of 2"
    assert found[1].off_node == pytest.approx(found[1].inside * 6 / 7), "6 of 7 peers lie on other nodes"
    assert found[8].off_node == pytest.approx(found[8].between * 6 / 7)
    cost = found[4]
    assert cost.seconds == pytest.approx(cost.inside / 1e9 + cost.between / 1e8)
    late = costs(links=replace(LINKS, latency=1.0))
    assert late[4].seconds - cost.seconds == pytest.approx(3 * 1 + 4 * 3)


def test_the_choice_is_the_fastest_that_fits():
    everything = list(costs().values())
    fastest = min(everything, key=lambda cost: cost.seconds)
    assert choose_groups(everything) == fastest
    assert f"groups = {fastest.groups}: least communication" in reason(fastest, everything)
    # memory for two groups at most
    memory = costs()[2].bytes_per_rank
    found = list(costs(memory=memory).values())
    assert [cost.fits for cost in found] == [True, True, False, False]
    chosen = choose_groups(found)
    assert chosen.groups <= 2
    assert "4, 8 do not fit into memory" in reason(chosen, found)


def test_rows_that_all_want_are_copied_and_rows_of_one_are_not():
    """Copies pay where ranks ask for the same rows, and where messages are dear; else each copy must hear of every row."""
    slow = replace(LINKS, network=1e6)
    shared = DistinctRows({1: 1000, 2: 1000, 4: 1000, 8: 1000}, most=10**6)
    assert choose_groups(list(costs(rows=shared, links=slow).values())).group_size == 2, "groups within nodes"
    alone = DistinctRows({1: 1000, 2: 2000, 4: 4000, 8: 8000}, most=10**6)
    assert choose_groups(list(costs(rows=alone, links=slow).values())).groups == 1
    late = replace(LINKS, latency=1.0)
    assert choose_groups(list(costs(rows=alone, links=late).values())).groups in (2, 4), "fewest messages"


def test_what_cannot_fit_is_refused_with_numbers():
    found = list(costs(step_bytes=10**9, memory=10**9).values())
    with pytest.raises(
        ConfigurationError, match=r"groups = 1 needs 12\.0 MB of tables .* 8 ranks and 1\.0 GB .*: use more ranks"
    ):
        choose_groups(found)
    found = list(costs(memory=costs()[2].bytes_per_rank).values())
    with pytest.raises(ConfigurationError, match=r"groups = 8 needs 96\.0 MB .*: choose groups 1 or 2"):
        refuse(found[-1], found)


def test_distinct_rows_between_and_beyond_the_counted():
    assert ROWS.of(4) == 2500
    assert ROWS.of(3) == pytest.approx(1600 * 3 / 2), "no more than in proportion"
    assert ROWS.of(16) == pytest.approx(4000 * 1.6), "grows on as from 4 to 8"
    assert ROWS.of(10**9) == ROWS.most
    assert DistinctRows({1: 10.0}, most=25).of(4) == 25
    assert DistinctRows({1: 0.0, 2: 0.0}, most=25).of(4) == 0


def test_rows_are_counted_over_neighbouring_ranks():
    ids = [torch.tensor(rows, dtype=torch.int64) for rows in ([0, 1], [1, 2], [], [9])]
    assert count_rows(ids, 10) == DistinctRows({1: 5 / 4, 2: (3 + 1) / 2, 4: 4.0}, most=10)
