from __future__ import annotations

import pytest
import torch

from turbogr.errors import ConfigurationError, DataError, MissingDependencyError
from turbogr.ops import embedding_lookup, row_update
from turbogr.ops import unique as unique_module
from turbogr.ops.native import Kernel
from turbogr.sparse.optimizers import SGD, LazyAdam
from turbogr.sparse.table import EmbeddingTable, ItemFeature, SparseFeature


def table_of(rows=20, dim=3, optimizer=None, backend="auto"):
    torch.manual_seed(0)
    table = EmbeddingTable(optimizer or SGD(lr=1.0), backend=backend)
    table.allocate(rows, dim)
    return table


def test_a_lookup_holds_each_row_once_and_serves_every_feature():
    table = table_of()
    features = {"values": torch.tensor([5, 2, 5]), "negatives": torch.tensor([[2, 7], [7, 7]])}
    lookup = table(features)
    assert lookup.ids.tolist() == [2, 5, 7]
    for name, ids in features.items():
        assert torch.equal(lookup[name], table.weight[ids])
        assert torch.equal(lookup.ids[lookup.index[name]], ids)


def test_one_update_with_the_summed_gradient():
    table = table_of()
    before = table.weight.clone()
    lookup = table({"a": torch.tensor([1, 1, 4]), "b": torch.tensor([1])})
    (lookup["a"].sum() + 2 * lookup["b"].sum()).backward()
    table.apply_gradients()
    change = before - table.weight
    assert change[1].tolist() == pytest.approx([4.0] * 3)  # twice in a, once in b with weight 2
    assert change[4].tolist() == pytest.approx([1.0] * 3)
    assert not change[[0, 2, 3, *range(5, 20)]].any()


def test_accumulated_lookups_become_one_update_not_two():
    """Adam tells one update from two: its step count and its second moment of the sum."""
    table = table_of(optimizer=LazyAdam(lr=0.1))
    twin = table_of(optimizer=LazyAdam(lr=0.1))
    for ids in ([1, 2], [2, 3]):
        table({"a": torch.tensor(ids)})["a"].sum().backward()
    table.apply_gradients()
    twin({"a": torch.tensor([1, 2, 2, 3])})["a"].sum().backward()
    twin.apply_gradients()
    for (name, actual), expected in zip(table.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(actual, expected), name
    assert table.optimizer.steps == 1


@pytest.mark.parametrize("accumulated", [1, 3])
def test_back_ends_agree(accumulated):
    g = torch.Generator().manual_seed(1)
    batches = [(torch.randint(0, 20, (9, 4), generator=g), torch.randn(9, 4, 3, generator=g)) for _ in range(6)]
    results = []
    for backend in ("auto", "torch", "reference"):
        table = table_of(optimizer=LazyAdam(lr=0.1), backend=backend)
        for batch, (ids, weights) in enumerate(batches):
            (table({"a": ids, "b": ids[:2]})["a"] * weights).sum().backward()
            if batch % accumulated == accumulated - 1:
                table.apply_gradients()
        results.append(table.state_dict())
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-6)
    assert not torch.equal(results[0]["weight"], table_of().weight)


def step(table):
    table({"a": torch.tensor([1])})["a"].sum().backward()
    table.apply_gradients()


def test_the_back_end_reaches_every_operator(monkeypatch):
    """`cpp` without a compiler is refused by each of them, one after the other."""
    kernels = [unique_module, embedding_lookup, row_update]
    if unique_module.KERNEL.library() is None or row_update.KERNEL.library() is None:
        pytest.skip("there is no compiler")
    for module, operator in zip(kernels, ("unique_ids", "jagged_embedding_lookup", "row_update"), strict=True):
        table = table_of(backend="cpp")
        with monkeypatch.context() as absent:
            absent.setattr(module, "KERNEL", Kernel("absent"))
            with pytest.raises(MissingDependencyError, match=rf"{operator}: backend cpp cannot be used"):
                step(table)


def test_a_lookup_of_nothing():
    table = table_of()
    lookup = table({"a": torch.zeros(0, 4, dtype=torch.int64)})
    assert lookup["a"].shape == (0, 4, 3)
    lookup["a"].sum().backward()
    table.apply_gradients()


def test_evaluation_and_discarded_gradients_change_nothing():
    table = table_of()
    before = table.weight.clone()
    table.eval()
    assert not table({"a": torch.tensor([3])}).rows.requires_grad
    table.train()
    with torch.no_grad():
        assert not table({"a": torch.tensor([3])}).rows.requires_grad
    table({"a": torch.tensor([3])})["a"].sum().backward()
    table.discard_gradients()
    table.apply_gradients()
    table({"a": torch.tensor([4])})  # looked up in vain
    table.apply_gradients()
    assert torch.equal(table.weight, before)


def test_no_dense_optimizer_sees_the_table():
    assert [name for name, p in table_of().named_parameters() if p.requires_grad] == []
    assert set(table_of(optimizer=LazyAdam()).state_dict()) == {
        "weight",
        "optimizer.exp_avg",
        "optimizer.exp_avg_sq",
        "optimizer.steps",
    }


def test_rows_start_from_a_truncated_normal():
    weight = table_of(5000, 8).weight
    assert weight.abs().max() <= 0.04
    assert weight.std().item() == pytest.approx(0.02 * 0.8796, rel=0.02)  # a normal cut at two deviations


def test_ids_outside_the_table_are_named():
    with pytest.raises(DataError, match=r"feature 'b' holds id 20, outside the table's rows 0\.\.19"):
        table_of()({"a": torch.tensor([3]), "b": torch.tensor([[20]])})


def test_several_tables_in_one_row_space():
    table = EmbeddingTable(SGD(lr=1.0))
    table.allocate({"items": 20, "author": 4}, 3)
    assert (table.spans, table.owned) == (
        {"items": range(20), "author": range(20, 24)},
        {"items": range(20), "author": range(4)},
    )
    before = table.weight.clone()
    lookup = table({"values": torch.tensor([3, 1]), "author": SparseFeature("author", torch.tensor([[3], [0]]))})
    assert lookup.ids.tolist() == [1, 3, 20, 23]
    assert torch.equal(lookup["author"], table.weight[torch.tensor([[23], [20]])])
    lookup["author"].sum().backward()
    table.apply_gradients()
    assert (before - table.weight).nonzero()[:, 0].unique().tolist() == [20, 23]
    with pytest.raises(DataError, match=r"feature 'author' holds id 4, outside the table's rows 0\.\.3"):
        table({"author": SparseFeature("author", torch.tensor([4]))})
    with pytest.raises(DataError, match=r"feature 'values' holds id 20, outside the table's rows 0\.\.19"):
        table({"values": torch.tensor([20])})  # would be author 0
    with pytest.raises(DataError, match=r"feature 'x' asks for a table 'tags'; there are items, author"):
        table({"x": SparseFeature("tags", torch.tensor([0]))})
    with pytest.raises(ConfigurationError, match="first table is 'items'"):
        EmbeddingTable().allocate({"author": 4}, 3)


def test_a_property_of_items_is_looked_up_once_for_each_distinct_item():
    table = EmbeddingTable(SGD(lr=1.0))
    table.allocate({"items": 6, "author": 3, "tab": 2}, 4)
    authors = torch.tensor([2, 0, 2, 1, 1, 0])
    features = {
        "author": ItemFeature("author", authors),
        "values": torch.tensor([5, 2, 0, 5]),
        "tab": SparseFeature("tab", torch.tensor([1, 1, 0, 1])),
        "negatives": torch.tensor([[2], [5]]),
    }
    lookup = table(features)
    assert list(lookup.index) == list(features)
    assert lookup.ids.tolist() == [0, 2, 5, 6, 8, 9, 10], "items, authors 0 and 2, both tabs"
    assert lookup.index["author"].tolist() == [4, 4, 3], "of the items 0, 2 and 5"
    assert torch.equal(lookup["author"], table.weight[6 + authors[[0, 2, 5]]])
    assert torch.equal(lookup["negatives"], table.weight[features["negatives"]])
    before = table.weight.clone()
    lookup["author"].sum().backward()
    table.apply_gradients()
    assert (before - table.weight)[:, 0].tolist() == pytest.approx([0, 0, 0, 0, 0, 0, 1, 0, 2, 0, 0])
    assert table.request({"author": features["author"]}).ids.tolist() == []
    with pytest.raises(DataError, match=r"feature 'author' holds id 3, outside the table's rows 0\.\.2"):
        table({"values": torch.tensor([0]), "author": ItemFeature("author", authors + 1)})


def test_impossible_sizes_are_refused():
    with pytest.raises(ConfigurationError, match=r"items .* 0 x 4"):
        table_of(0, 4)
    with pytest.raises(ConfigurationError, match="init_std"):
        EmbeddingTable(init_std=-1.0)
    with pytest.raises(ConfigurationError, match="EmbeddingTable: backend must be one of"):
        EmbeddingTable(backend="gpu")


@pytest.mark.parametrize("largest", [0.5, 1e6])
def test_clipping_by_the_norm_of_all_rows(largest):
    """As torch clips a dense parameter that has the same gradient."""
    table = table_of()
    parameter = torch.nn.Parameter(table.weight.clone())
    ids, weights = torch.tensor([1, 4, 4, 9]), torch.arange(12.0).view(4, 3)
    (table({"a": ids})["a"] * weights).sum().backward()
    (parameter[ids] * weights).sum().backward()
    torch.nn.utils.clip_grad_norm_([parameter], largest)
    expected = table.weight - 0.5 * parameter.grad
    table.apply_gradients(lr_scale=0.5, clip_norm=largest)
    torch.testing.assert_close(table.weight.data, expected.data)
