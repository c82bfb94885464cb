"""What hsp_bytes.py counts, against counting by hand; ranks of benchmarks that fail."""

import hsp_bytes
import pytest
import torch
from _popularity import Popularity
from _ranks import run_on_ranks
from hsp_bytes import DIM, RANKS_PER_NODE, Exchange, Sharded, count


def test_ids_are_as_popular_as_published():
    popularity = Popularity(1)
    ids = popularity.draw(200_000, torch.Generator().manual_seed(0))
    assert popularity.rows == 32_038_693
    assert int(ids.min()) >= 0
    assert int(ids.max()) < popularity.rows
    # The top 0.1 %, 1 % and 10 % of the videos take 14.7 %, 44.1 % and 79.9 % of the exposures.
    ranks = ids * pow(2_654_435_761, -1, popularity.rows) % popularity.rows
    for top, share in ((0.001, 0.147), (0.01, 0.441), (0.1, 0.799)):
        assert float((ranks < top * popularity.rows).double().mean()) == pytest.approx(share, abs=0.02)


def test_fewer_exposures_make_a_smaller_catalogue():
    assert Popularity(50, multiple=128).rows % 128 == 0
    assert 1_000_000 < Popularity(50, multiple=128).rows <= 1_041_150


def test_look_ups_are_counted_by_node():
    sharded = Sharded(ranks=4, per_node=2, dim=3)
    sharded.add(1, torch.tensor([5, 7, 11, 13]))
    row = 8 + 2 * 4 * 3
    assert (sharded.moved.inside, sharded.moved.between) == (5 * row, 24 * row)


def test_the_exchange_is_counted_by_member():
    exchange = Exchange(rows=4, members=2, dim=3, form="gather")
    exchange.add([torch.tensor([0, 1]), torch.tensor([1, 3])])  # member 0 keeps rows 0 and 1, member 1 rows 2 and 3
    exchange.add([torch.tensor([3])])
    # Each of two groups sends the longer of both lists and 16 bytes of sizes to the other.
    assert exchange.bytes_sent() == 2 * (2 * (4 * 3 + 4) + 16) + 2 * (1 * (4 * 3 + 4) + 16)


def test_all_ways_are_counted_from_the_same_ids(monkeypatch):
    for name, value in (("USERS", 1), ("LENGTH", 8), ("NEGATIVES", 4)):
        monkeypatch.setattr(hsp_bytes, name, value)
    nodes, popularity = 2, Popularity(3000, multiple=16)
    ways = count(popularity, [nodes])[nodes]
    ranks = nodes * RANKS_PER_NODE
    block, group_block = popularity.rows // ranks, popularity.rows // RANKS_PER_NODE
    asked = [hsp_bytes.draw(popularity, rank).tolist() for rank in range(ranks)]
    node = [rank // RANKS_PER_NODE for rank in range(ranks)]
    row = 8 + 2 * 4 * DIM
    for way, lists in (("raw", asked), ("unique", [set(ids) for ids in asked])):
        owners = [(rank, row_id // block) for rank, ids in enumerate(lists) for row_id in ids]
        assert ways[way].between == row * sum(node[rank] != node[owner] for rank, owner in owners)
        assert ways[way].inside == row * sum(rank != owner and node[rank] == node[owner] for rank, owner in owners)
    members = [(rank % RANKS_PER_NODE, row_id // group_block) for rank, ids in enumerate(asked) for row_id in set(ids)]
    assert ways["HSP"].inside == row * sum(asking != owner for asking, owner in members)
    groups = [set().union(*asked[:RANKS_PER_NODE]), set().union(*asked[RANKS_PER_NODE:])]
    longest = [max(sum(r // group_block == m for r in rows) for rows in groups) for m in range(RANKS_PER_NODE)]
    gathered = sum(2 * (n * (4 * DIM + 4) + 16) for n in longest)
    assert 0 < ways["HSP"].between <= gathered


def fail_on_one() -> int:
    if torch.distributed.get_rank() == 1:
        raise ValueError("this rank is broken")
    torch.distributed.barrier()
    return 0


def test_a_failing_rank_ends_the_benchmark_with_its_traceback():
    with pytest.raises(SystemExit, match=r"(?s)rank 1 failed.*this rank is broken"):
        run_on_ranks(fail_on_one, 2, timeout_s=60.0)
