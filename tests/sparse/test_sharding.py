from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr.errors import ConfigurationError, MissingDependencyError
from turbogr.sparse.accumulation import Touched, merge
from turbogr.sparse.exchange import RowUnion
from turbogr.sparse.optimizers import LazyAdam
from turbogr.sparse.sharding import Sharding
from turbogr.sparse.shards import keep_part
from turbogr.sparse.table import EmbeddingTable


def spans_of(*sizes: int) -> dict[str, range]:
    spans, start = {}, 0
    for place, size in enumerate(sizes):
        spans["items" if place == 0 else f"table {place}"] = range(start, start + size)
        start += size
    return spans


@st.composite
def shardings(draw) -> Sharding:
    spans = spans_of(*draw(st.lists(st.integers(1, 20), min_size=1, max_size=4)))
    members = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["row_wise", "table_wise", "any"]))
    if kind == "row_wise":
        return Sharding.row_wise(spans, members)
    if kind == "table_wise":
        placed = {table: draw(st.integers(0, members - 1)) for table in spans}
        return Sharding.table_wise(spans, members, draw(st.sampled_from([placed, None])))
    cuts = {
        table: st.lists(st.integers(0, len(span)), min_size=members - 1, max_size=members - 1) for table, span in spans.items()
    }
    return Sharding(spans, {table: [0, *sorted(draw(cut)), len(spans[table])] for table, cut in cuts.items()})


@settings(deadline=None)
@given(shardings())
def test_every_row_is_owned_once(sharding):
    parts = [sharding.rows_of(member) for member in range(sharding.members)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(sharding.num_rows))
    assert [len(part) for part in parts] == sharding.sizes
    for table, span in sharding.spans.items():
        owned = [sharding.owned(member)[table] for member in range(sharding.members)]
        assert sum(map(len, owned)) == len(span)


@settings(deadline=None)
@given(shardings())
def test_owner_and_local_are_the_inverse_of_rows_of(sharding):
    for member in range(sharding.members):
        rows = sharding.rows_of(member)
        assert (sharding.owner(rows) == member).all()
        assert torch.equal(sharding.local(rows, member), torch.arange(len(rows)))


@settings(deadline=None)
@given(shardings())
def test_a_weight_lies_in_the_order_of_tables(sharding):
    """What `EmbeddingTable.owned` promises: one table after the other, rows ascending."""
    for member in range(sharding.members):
        expected = [sharding.spans[table].start + row for table, owned in sharding.owned(member).items() for row in owned]
        assert sharding.rows_of(member).tolist() == expected


@settings(deadline=None)
@given(shardings(), st.data())
def test_rows_travel_to_their_owners_and_back(sharding, data):
    ids = torch.tensor(sorted(data.draw(st.sets(st.integers(0, sharding.num_rows - 1)))), dtype=torch.int64)
    route = sharding.route(ids)
    travelling = route.to_travel(ids)
    assert sum(route.counts) == len(ids)
    for member, (part, local) in enumerate(zip(travelling.split(route.counts), route.local.split(route.counts), strict=True)):
        assert torch.equal(part, ids[sharding.owner(ids) == member])
        assert torch.equal(sharding.local(part, member), local)
    assert torch.equal(route.from_travel(travelling), ids)
    values = torch.randn(len(ids), 3)
    assert torch.equal(route.from_travel(route.to_travel(values)), values)


def test_one_table_in_blocks_travels_without_a_copy():
    values = torch.randn(4, 2)
    route = Sharding.row_wise(spans_of(10), 4).route(torch.tensor([0, 3, 4, 9]))
    assert (route.counts, route.local.tolist()) == ([1, 2, 0, 1], [0, 0, 1, 0])
    assert route.to_travel(values) is values
    assert route.from_travel(values) is values


def test_small_tables_leave_members_empty():
    assert Sharding.row_wise(spans_of(5), 4).sizes == [2, 2, 1, 0]
    sharding = Sharding.row_wise(spans_of(9, 1), 4)
    assert sharding.sizes == [4, 3, 3, 0]
    assert sharding.owned(3) == {"items": range(9, 9), "table 1": range(1, 1)}
    assert sharding.rows_of(3).tolist() == []
    whole = Sharding.table_wise(spans_of(5, 9, 3), 2)  # the largest first, each where there is least
    assert (whole.sizes, whole.owned(0)) == ([9, 8], {"items": range(0, 0), "table 1": range(9), "table 2": range(0, 0)})


def test_what_is_no_sharding_is_refused():
    spans = spans_of(5, 3)
    with pytest.raises(ValueError, match=r"edges of table 1 rise from 0 to 3"):
        Sharding(spans, {"items": [0, 2, 5], "table 1": [0, 2, 2]})
    with pytest.raises(ConfigurationError, match=r"each of the tables items, table 1 on a member from 0 to 1"):
        Sharding.table_wise(spans, 2, {"items": 0, "table 1": 2})
    with pytest.raises(ConfigurationError, match=r"each of the tables items, table 1"):
        Sharding.table_wise(spans, 2, {"items": 0})
    with pytest.raises(ConfigurationError, match=r"row_wise, table_wise, planner; got 'column_wise'"):
        Sharding.of_kind("column_wise", spans, 8, 2)
    sharding = Sharding.row_wise(spans, 2)
    for ids in ([8], [-1]):
        with pytest.raises(IndexError, match=r"outside the rows 0\.\.7"):
            sharding.owner(torch.tensor(ids))
    with pytest.raises(ValueError, match="row 4 is not kept by member 0"):
        sharding.local(torch.tensor([0, 4]), 0)


def test_the_planner_decides_for_each_table():
    pytest.importorskip("torchrec")
    spans = spans_of(10_000_000, 1_000_000, 100)
    planned = Sharding.of_kind("planner", spans, 64, 2)
    assert planned.edges["items"] == [0, 5_000_000, 10_000_000]  # row-wise
    assert planned.edges["table 1"] in ([0, 1_000_000, 1_000_000], [0, 0, 1_000_000])  # table-wise
    assert planned.edges == Sharding.planned(spans, 64, 2).edges  # on every rank the same
    assert Sharding.planned(spans, 64, 1).sizes == [11_000_100]


def test_the_planner_explains_what_it_cannot_plan():
    with pytest.raises(ConfigurationError, match=r"multiple of 4, and this model's is 50"):
        Sharding.planned(spans_of(10), 50, 2)
    pytest.importorskip("torchrec")
    with pytest.raises(ConfigurationError, match=r"no plan for tables of 25600\.0 GB on 2 ranks: .*insufficient storage"):
        Sharding.planned(spans_of(10**11), 64, 2)


def test_without_torchrec_only_the_planner_is_missing():
    program = """
import sys
sys.modules["torchrec"] = None
from turbogr.errors import MissingDependencyError
from turbogr.sparse.sharding import Sharding
spans = {"items": range(10)}
assert Sharding.of_kind("row_wise", spans, 8, 2).sizes == [5, 5]
try:
    Sharding.planned(spans, 8, 2)
except MissingDependencyError as error:
    assert "run `turbogr doctor`, or choose sharding row_wise" in str(error), error
else:
    raise AssertionError("planned without torchrec")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert issubclass(MissingDependencyError, ImportError)


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_a_member_keeps_its_part_of_weight_and_state(kind):
    spans = spans_of(7, 3)
    sharding = Sharding.of_kind(kind, spans, 2, 3)
    for member in range(3):
        table = EmbeddingTable(LazyAdam())
        table.allocate({name: len(span) for name, span in spans.items()}, 2)
        table.weight.copy_(torch.arange(20.0).view(10, 2))
        table.optimizer.exp_avg.copy_(table.weight * 2)
        keep_part(table, sharding, member)
        rows = sharding.rows_of(member)
        assert table.weight[:, 0].tolist() == (2.0 * rows).tolist()
        assert torch.equal(table.optimizer.exp_avg, 2 * table.weight)
        assert table.optimizer.steps.shape == ()
        assert (table.owned, table.num_rows) == (sharding.owned(member), 10)
        assert not table.weight.requires_grad


def touched(rows: list[int], others: list[int]) -> Touched:
    """Of the first of two groups, with the union."""
    ids = torch.tensor(sorted({*rows, *others}), dtype=torch.int64)
    places = [torch.searchsorted(ids, torch.tensor(own, dtype=torch.int64)) for own in (rows, others)]
    return Touched(torch.tensor(rows, dtype=torch.int64), RowUnion(ids, places))


def test_accumulated_batches_and_their_unions_are_merged():
    merged, inverse = merge([touched([1, 4], [0, 4]), touched([], []), touched([4, 6], [])])
    assert merged.rows.tolist() == [1, 4, 6]
    assert inverse.tolist() == [0, 1, 1, 2]
    assert merged.union.ids.tolist() == [0, 1, 4, 6]
    assert [places.tolist() for places in merged.union.positions] == [[1, 2, 3], [0, 2]]
    alone = touched([1], [2])
    assert merge([alone]) == (alone, None)
    nothing, inverse = merge([touched([], []), touched([], [])])
    assert (len(nothing.rows), len(nothing.union.ids), len(inverse)) == (0, 0, 0)


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_rows_at_is_the_way_back_of_local(kind):
    sharding = Sharding.of_kind(kind, {"items": range(11), "tags": range(11, 14)}, 4, 3)
    for member in range(3):
        rows = sharding.rows_of(member)
        assert torch.equal(sharding.rows_at(sharding.local(rows, member), member), rows)
