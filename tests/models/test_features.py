"""Features of events and items: the formulas in float64, what they change, and how often rows are fetched."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.models.features import (
    AUTHORS,
    DIM,
    FEATURES,
    NUM_ITEMS,
    batch_of,
    dense_items,
    dense_tables,
    dense_tokens,
    model_of,
)
from turbogr.data.features import FeatureTable
from turbogr.errors import ConfigurationError
from turbogr.models import tokens as tokens_module
from turbogr.models.fuxi import FuXi
from turbogr.models.sasrec import SASRec
from turbogr.sparse.optimizers import SGD
from turbogr.sparse.table import EmbeddingTable

COMBINE = pytest.mark.parametrize("combine", ["sum", "concat"])
EXACT = {"rtol": 1e-4, "atol": 1e-5}


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


def dense_loss(model, combine, tables, batch, backbone):
    """The training loss in float64, from whole tables and expanded negatives."""
    output = unit(backbone(dense_tokens(model, combine, tables, batch), batch))
    v = unit(dense_items(model, combine, tables))
    candidates = torch.cat([batch.targets[:, None], batch.negatives], 1)
    logits = (output[:, None] * v[candidates]).sum(-1) / 0.05
    masked = candidates == batch.targets[:, None]
    masked[:, 0] = False
    return -logits.masked_fill(masked, -torch.inf).log_softmax(1)[:, 0].mean()


@COMBINE
def test_loss_and_all_gradients_are_those_of_the_formulas(combine):
    model, batch = model_of(combine=combine), batch_of()
    tables, backbone = dense_tables(model), copy.deepcopy(model.backbone).double()
    expected = dense_loss(model, combine, tables, batch, backbone)
    expected.backward()
    (lookup,) = captured(model, lambda: model.training_step(batch, 0).backward())
    torch.testing.assert_close(model.training_step(batch, 0).double(), expected.detach(), **EXACT)

    found = torch.zeros(58, DIM).index_add_(0, lookup.ids, lookup.rows.grad)
    rows = torch.cat([tables[name].grad for name in ("items", "author", "tab", "tag", "is_like")])
    torch.testing.assert_close(found.double(), rows, **EXACT)
    assert (rows.abs().sum(1) > 0).sum() > 40, "rows of every table are trained"
    for name, table in (("item_weight", "W_item"), ("event_weight", "W_event")):
        if combine == "concat":
            torch.testing.assert_close(model.tokens.get_parameter(name).grad.double(), tables[table].grad, **EXACT)
    dense = dict(backbone.named_parameters())
    for name, parameter in model.backbone.named_parameters():
        torch.testing.assert_close(parameter.grad.double(), dense[name].grad, msg=name, **EXACT)
    # The control: another feature's rows give another loss.
    swapped = {**tables, "tab": tables["is_like"][[0, 1, 2, 0, 1]]}
    assert abs(dense_loss(model, combine, swapped, batch, backbone) - expected) > 1e-3


def captured(model, action):
    """The look-ups that an action makes."""
    lookups = []
    hook = model.embeddings.register_forward_hook(lambda module, args, lookup: lookups.append(lookup))
    action()
    hook.remove()
    return lookups


def test_concat_starts_as_sum():
    batch = batch_of()
    losses = []
    for combine in ("sum", "concat"):
        model = model_of(combine=combine)
        with torch.no_grad():
            for parameter in model.tokens.parameters():
                parameter.copy_(torch.eye(DIM).repeat(1, 3))
        losses.append(model.training_step(batch, 0).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@COMBINE
def test_targets_and_negatives_are_items_with_their_features(combine):
    """The loss gets v of targets and negatives, not rows of ids."""
    seen = {}

    class Recorder(torch.nn.Module):
        def forward(self, output, items, targets, negatives):
            seen.update(items=items, targets=targets, negatives=negatives)
            return output.sum()

    model, batch = model_of(combine=combine, loss=Recorder()), batch_of()
    model.training_step(batch, 0)
    v = unit(dense_items(model, combine, dense_tables(model)))
    for ids, index in ((batch.targets, seen["targets"]), (batch.negatives, seen["negatives"])):
        torch.testing.assert_close(seen["items"][index].double(), v[ids], **EXACT)
    distinct = torch.cat([batch.values, batch.targets, batch.negatives.flatten()]).unique()
    assert len(seen["items"]) == len(distinct), "once per distinct item, and no row of a feature among them"
    ids_alone = unit(model.embeddings.weight[:NUM_ITEMS])
    assert (seen["items"] - ids_alone[distinct]).abs().max() > 0.1


def test_a_step_looks_up_once_and_an_update_is_one(monkeypatch):
    model, batch, calls = model_of(), batch_of(), []
    request = EmbeddingTable.request

    def counted(self, features, trains=False):
        calls.append(features)
        return request(self, features, trains)

    monkeypatch.setattr(EmbeddingTable, "request", counted)
    lookups = captured(model, lambda: model.training_step(batch, 0).backward())
    assert len(lookups) == len(calls) == 1
    assert lookups[0].rows.is_leaf
    assert lookups[0].rows.grad is not None
    assert len(lookups[0].ids.unique()) == len(lookups[0].ids)
    updates = []
    monkeypatch.setattr(model.embeddings.optimizer, "step", lambda weight, ids, *rest: updates.append(ids))
    model.on_before_optimizer_step(None)
    assert len(updates) == 1
    assert torch.equal(updates[0], lookups[0].ids)


def test_what_a_batch_looks_up_is_a_function_of_the_batch():
    model, batch = model_of(), batch_of()
    first, second = model.sparse_features(batch), model.sparse_features(batch)
    assert list(first) == list(second) == ["values", "targets", "negatives", "tab", "is_like", "author", "tag"]
    for name in first:
        tensors = [x if isinstance(x, torch.Tensor) else x[1] for x in (first[name], second[name])]
        assert tensors[0] is tensors[1]
    assert list(model.sparse_features(replace(batch, negatives=None))) == ["values", "tab", "is_like", "author", "tag"]


def test_without_features_nothing_is_added():
    model = model_of(features=())
    assert not [name for name in model.state_dict() if name.startswith("tokens.")]
    assert model.embeddings.spans == {"items": range(NUM_ITEMS)}
    assert set(model.sparse_features(batch_of())) == {"values", "targets", "negatives"}
    assert model.item_vectors().data_ptr() == model.embeddings.weight.data_ptr(), "no second table at evaluation"


@pytest.mark.parametrize("sides", [("event",), ("item",)])
@COMBINE
def test_one_side_alone(sides, combine):
    """Features of events leave items as they are, and the other way round."""
    features = [feature for feature in FEATURES if feature.side in sides]
    model, batch = model_of(features, combine=combine), batch_of()
    batch = replace(batch, features=batch.features if "event" in sides else {})
    (lookup,) = captured(model, lambda: model.training_step(batch, 0).backward())
    items, tokens = model.tokens(lookup)
    of_items, of_values = model.embeddings.weight[:NUM_ITEMS][lookup.ids[: len(items)]], items[lookup.index["values"]]
    assert torch.equal(items, of_items) == (sides == ("event",))
    assert torch.equal(tokens, of_values) == (sides == ("item",))


@pytest.mark.parametrize("backbone", [SASRec, FuXi])
def test_other_backbones_and_mixed_precision(backbone):
    model = model_of(backbone=backbone(DIM, num_blocks=1, max_length=32), combine="concat")
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.training_step(batch_of(), 0)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.requires_grad)


@COMBINE
def test_unknown_values_are_row_0_of_their_table(combine):
    """A batch of events whose values are all new: the model answers, by the formula, from rows 0 that training left alone."""
    model, batch = model_of(combine=combine, optimizer=SGD(1.0)), batch_of(negatives=None)
    trained = batch_of()
    trained = replace(trained, features={name: rows.clamp(min=1) for name, rows in trained.features.items()})
    before = model.embeddings.weight.clone()
    model.training_step(trained, 0).backward()
    model.on_before_optimizer_step(None)
    changed = (model.embeddings.weight != before).any(1)
    assert not changed[46], "row 0 of tab"
    assert not changed[55], "row 0 of is_like"
    assert changed[47:51].any()

    model.eval()
    unknown = replace(batch, features={name: torch.zeros_like(rows) for name, rows in batch.features.items()})
    filled = unknown.lengths > 0
    with torch.no_grad():
        found = model.queries(unknown)[filled].double()
        tables, backbone = dense_tables(model), copy.deepcopy(model.backbone).double()
        expected = unit(backbone(dense_tokens(model, combine, tables, unknown), unknown)[unknown.last])[filled]
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
        assert not torch.allclose(model.queries(batch)[filled].double(), expected, atol=1e-3), "the known ones differ"


@pytest.mark.parametrize("chunk", [7, 1 << 16])
@COMBINE
def test_the_catalogue_is_made_of_chunks_of_item_vectors(combine, chunk, monkeypatch):
    monkeypatch.setattr(tokens_module, "CATALOGUE_CHUNK", chunk)
    model = model_of(combine=combine)
    lookups = captured(model, model.item_vectors)
    assert len(lookups) == (6 if chunk == 7 else 1)
    assert not any(lookup.rows.requires_grad for lookup in lookups)
    assert not model.embeddings._pending
    expected = dense_items(model, combine, dense_tables(model))
    torch.testing.assert_close(model.item_vectors().double(), expected.detach(), **EXACT)
    # The part of one of several processes: as many look-ups, of fewer items.
    model.embeddings.owned = {**model.embeddings.owned, "items": range(30, 37)}
    model.embeddings.weight.data[:7] = model.embeddings.weight.data[30:37].clone()
    assert len(captured(model, model.item_vectors)) == len(lookups)
    torch.testing.assert_close(model.item_vectors().double(), expected.detach()[30:37], **EXACT)


def test_an_empty_batch():
    """What a rank gets that has no users left."""
    model = model_of()
    lookup = model.embeddings(model.sparse_features(batch_of([])))
    items, tokens = model.tokens(lookup)
    assert (items.shape, tokens.shape) == ((0, DIM), (0, DIM))


def test_state_is_reloaded_and_other_features_are_refused():
    model = model_of(combine="concat")
    state = model.state_dict()
    assert not [name for name in state if "item_rows" in name], "rows of items come from the data"
    other = model_of(combine="concat", seed=4)
    other.load_state_dict(state)
    batch = batch_of()
    assert other.training_step(batch, 0).item() == model.training_step(batch, 0).item()

    changed = AUTHORS.copy()
    changed[7] = (changed[7] + 1) % 6
    author, tab, tag, is_like = FEATURES
    for features, names in (
        ((replace(author, item_rows=changed), tab, tag, is_like), "author differ"),
        ((tag, tab, author, is_like), "tag, author differ"),
        ((author, replace(tab, name="page"), tag, is_like), "page differ"),
    ):
        with pytest.raises(ConfigurationError, match=f"trained with other features than these: {names}"):
            model_of(features, combine="concat").load_state_dict(state)
    with pytest.raises(RuntimeError, match="fingerprints"):
        model_of(()).load_state_dict(state)


def test_features_that_do_not_fit_are_refused():
    rows = np.zeros(NUM_ITEMS, dtype=np.int32)
    for feature, message in (
        (FeatureTable("items", "event", 3), "a feature cannot be called 'items'"),
        (FeatureTable("values", "event", 3), "a feature cannot be called 'values'"),
        (FeatureTable("a", "item", 3), "'a': a feature of items has item_rows"),
        (FeatureTable("a", "event", 3, rows), "'a': a feature of items has item_rows"),
        (FeatureTable("a", "item", 3, rows[:-1]), "'a' must give each of the 40 items a row from 0 to 2"),
        (FeatureTable("a", "item", 3, rows + 3), "'a' must give each of the 40 items a row from 0 to 2"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            model_of((feature,))
    with pytest.raises(ConfigurationError, match="a feature cannot be called 'a'"):
        model_of((FeatureTable("a", "event", 3), FeatureTable("a", "event", 3)))
    with pytest.raises(ConfigurationError, match=r"model.combine is 'max'; choose one of sum, concat"):
        model_of(combine="max")


def test_names_of_columns_need_not_be_names_of_attributes():
    model = model_of((FeatureTable("a.b c", "item", 6, AUTHORS), FeatureTable("weight", "event", 5)))
    batch = batch_of()
    model.training_step(replace(batch, features={"weight": batch.features["tab"]}), 0)
    assert torch.equal(model.tokens.item_rows("a.b c"), torch.from_numpy(AUTHORS))
