"""What tables start from: the same rows whether they are made whole or in parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from turbogr.errors import ConfigurationError
from turbogr.sparse import initial_rows
from turbogr.sparse.initial_rows import InitialRows, deferred_rows
from turbogr.sparse.optimizers import AdaGrad
from turbogr.sparse.sharding import Sharding
from turbogr.sparse.shards import keep_part
from turbogr.sparse.table import EmbeddingTable

TABLES = {"items": 100, "tag": 7}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(initial_rows, "BLOCK_ROWS", 16)


def table_of(tables=TABLES, optimizer=None):
    torch.manual_seed(5)
    table = EmbeddingTable(optimizer or AdaGrad())
    table.allocate(tables, 3)
    return table


def test_a_table_of_one_block_is_a_plain_truncated_normal():
    torch.manual_seed(5)
    plain = nn.init.trunc_normal_(torch.empty(16, 3), std=0.02, a=-0.04, b=0.04)
    following = torch.rand(2)
    assert torch.equal(table_of(16).weight, plain)
    assert torch.equal(torch.rand(2), following)


def test_blocks_have_streams_of_their_own():
    weight = table_of(64).weight
    blocks = weight.view(4, 48)
    assert len({tuple(block.tolist()) for block in blocks}) == 4
    assert blocks.abs().max() <= 0.04
    torch.manual_seed(6)
    other = EmbeddingTable(AdaGrad())
    other.allocate(64, 3)
    assert not torch.eq(weight, other.weight).any(), "another seed, another stream in every block"


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_parts_of_a_deferred_table_are_the_whole(kind, members):
    whole = table_of()
    state = torch.get_rng_state()
    for member in range(members):
        with deferred_rows():
            table = table_of()
        assert table.weight.is_meta
        assert torch.equal(torch.get_rng_state(), state), "the global stream goes on alike"
        sharding = Sharding.of_kind(kind, table.spans, 3, members, "cpu")
        expected = table_of()
        keep_part(expected, sharding, member)
        keep_part(table, sharding, member)
        assert table.owned == expected.owned
        assert set(table.state_dict()) == set(expected.state_dict())
        for (name, made), cut in zip(table.state_dict().items(), expected.state_dict().values(), strict=True):
            assert torch.equal(made, cut), name
        rows = sharding.rows_of(member)
        assert torch.equal(table.weight, whole.weight[rows])


def test_no_more_than_a_block_is_made_beyond_a_part():
    made = InitialRows(1600, 3, 0.02)
    drawn = []
    made._draw = lambda rows, generator, draw=made._draw: drawn.append(rows) or draw(rows, generator)
    assert made.rows([range(40, 50), range(1590, 1600)]).shape == (20, 3)
    assert sum(drawn) == 3 * 16
    assert made.rows([range(7, 7)]).shape == (0, 3)


def test_deferred_rows_are_not_looked_up():
    with deferred_rows():
        table = table_of()
    with pytest.raises(ConfigurationError, match="only TurboGRStrategy makes them"):
        table({"values": torch.tensor([1])})
