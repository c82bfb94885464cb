"""Features in whole runs: what can only be learned from them, evaluation against brute force, reload, prediction."""

from __future__ import annotations

import copy
import itertools

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from tests.data.make import write_prepared
from turbogr.data.datamodule import SequenceDataModule
from turbogr.models import tokens as tokens_module
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.sparse.optimizers import LazyAdam
from turbogr.sparse.table import EmbeddingTable

V = 60
FEATURES = {"author": ("item", 9), "tab": ("event", 13), "tag": ("item", 5)}


def data_of(path, **options):
    return SequenceDataModule(str(path), batch_size=16, max_length=16, num_negatives=20, num_workers=0, seed=1, **options)


def model_of(data, combine="sum", seed=7):
    torch.manual_seed(seed)
    return GenerativeRetriever(
        V,
        HSTU(dim=16, max_length=16, dropout=0.1),
        EmbeddingTable(LazyAdam(lr=1e-2)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        top_k=(1, 10),
        predict_k=V,
        features=data.features,
        combine=combine,
    )


def trainer_of(tmp_path, **options):
    return pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **options},
    )


def v_of_all_items(model, data, combine):
    """float64 [V, D] from the formulas and from the files of the prepared folder."""
    table = model.embeddings.weight.detach().double()
    author, tag = (np.load(data.prepared.path / "features" / f"{name}.npy") for name in ("author", "tag"))
    parts = [table[:V], table[V:][author], table[V + 9 + 13 :][tag]]
    return sum(parts) if combine == "sum" else torch.cat(parts, 1) @ model.tokens.item_weight.detach().double().T


def queries_of(model, data, combine, batch):
    """float64 [B, D] from the formulas; the backbone is the model's own."""
    table = model.embeddings.weight.detach().double()
    parts = [v_of_all_items(model, data, combine)[batch.values], table[V + 9 : V + 9 + 13][batch.features["tab"]]]
    tokens = sum(parts) if combine == "sum" else torch.cat(parts, 1) @ model.tokens.event_weight.detach().double().T
    return copy.deepcopy(model.backbone).double().eval()(tokens, batch)[batch.last]


@pytest.mark.parametrize("combine", ["sum", "concat"])
def test_evaluation_and_prediction_equal_brute_force(tmp_path, combine, monkeypatch):
    monkeypatch.setattr(tokens_module, "CATALOGUE_CHUNK", 25)
    data = data_of(write_prepared(tmp_path / "data", 48, V, 4, 24, features=FEATURES))
    model = model_of(data, combine)
    trainer = trainer_of(tmp_path)
    trainer.fit(model, data)

    made = []
    whole = model.item_vectors
    monkeypatch.setattr(model, "item_vectors", lambda: made.append(1) or whole())
    lookups = []
    hook = model.embeddings.register_forward_hook(lambda module, args, lookup: lookups.append(lookup))
    (result,) = trainer.test(model, data, verbose=False)
    hook.remove()
    batches = list(data.test_dataloader())
    assert len(batches) == len(lookups) - 3 > 1
    assert made == [1], "the items' vectors are made once, in three chunks, and then each batch looks up once"
    assert model._catalogue is None

    with torch.no_grad():
        v = torch.nn.functional.normalize(v_of_all_items(model, data, combine), dim=1)
        ranks = []
        for batch in batches:
            for user, scores in enumerate(queries_of(model, data, combine, batch) @ v.T):
                target = int(batch.targets[batch.last[user]])
                seen = set(batch.seen[batch.seen_offsets[user] : batch.seen_offsets[user + 1]].tolist()) - {target}
                ranks.append(sum(bool(scores[i] > scores[target]) for i in range(V) if i not in seen))
        ranks = torch.tensor(ranks).double()
        expected = {"test/HR@10": (ranks < 10).double().mean(), "test/MRR": (1 / (1 + ranks)).mean()}
        expected["test/NDCG@10"] = ((ranks < 10) / (ranks + 2).log2()).mean()
        for name, value in expected.items():
            assert result[name] == pytest.approx(float(value), abs=1e-5), name

        predicted = trainer.predict(model, data)
        for (_, items, scores), batch in zip(predicted, data.predict_dataloader(), strict=True):
            expected_scores = torch.nn.functional.normalize(queries_of(model, data, combine, batch), dim=1) @ v.T
            kept = items >= 0
            torch.testing.assert_close(
                scores[kept].double(), expected_scores.gather(1, items.clamp(min=0))[kept], rtol=1e-3, atol=1e-4
            )
    assert model._catalogue is None


def test_a_reloaded_checkpoint_gives_identical_metrics(tmp_path):
    data = data_of(write_prepared(tmp_path / "data", 48, V, 4, 24, features=FEATURES))
    model, trainer = model_of(data, "concat"), trainer_of(tmp_path)
    trainer.fit(model, data)
    (expected,) = trainer.test(model, data, verbose=False)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    fresh = model_of(data, "concat", seed=8)
    (before,) = trainer_of(tmp_path).test(fresh, data, verbose=False)
    (reloaded,) = trainer_of(tmp_path).test(fresh, data, ckpt_path=str(tmp_path / "saved.ckpt"), verbose=False)
    assert reloaded == expected
    assert before != expected


def telling(path, side):
    """Histories whose next item only a feature tells: 5 times the event's tab, or any item of the same author (i % 8 + 1)."""
    write_prepared(path, num_users=150, num_items=V, min_len=8, max_len=20, seed=5, features=FEATURES)
    offsets, random = np.load(path / "offsets.npy"), np.random.default_rng(0)
    items, tabs = np.load(path / "items.npy"), np.load(path / "features" / "tab.npy")
    authors = (np.arange(V) % 8 + 1).astype(np.int32)
    for a, b in itertools.pairwise(offsets):
        if side == "event":
            tabs[a:b] = random.integers(0, 12, b - a)
            items[a + 1 : b] = 5 * tabs[a : b - 1]
        else:
            items[a:b] = random.choice(np.flatnonzero(authors == random.integers(1, 9)), b - a)
    np.save(path / "items.npy", items)
    np.save(path / "features" / "tab.npy", tabs)
    np.save(path / "features" / "author.npy", authors)
    return path


@pytest.mark.parametrize("combine", ["sum", "concat"])
def test_what_only_the_events_feature_tells_is_learned(tmp_path, combine):
    path = telling(tmp_path / "data", "event")
    found = []
    for features in (["tab"], []):
        data = data_of(path, features=features)
        model, trainer = model_of(data, combine), trainer_of(tmp_path, max_epochs=8)
        trainer.fit(model, data)
        # Scores among all items, the user's own too: the telling ones repeat.
        hits = []
        model.eval()
        with torch.no_grad():
            for batch in data.test_dataloader():
                best = (model.queries(batch) @ torch.nn.functional.normalize(model.item_vectors(), dim=1).T).argmax(1)
                hits.append(best == batch.targets[batch.last])
        found.append(torch.cat(hits).float().mean())
    assert found[0] > 0.9
    assert found[1] < 0.3, "the control: ids alone tell nothing, and one of twelve is chance"


def test_the_items_feature_carries_over_to_items_that_were_never_trained_on(tmp_path):
    """The catalogue's last items occur in no training history; their author's other items do."""
    path = telling(tmp_path / "data", "item")
    items, offsets = np.load(path / "items.npy"), np.load(path / "offsets.npy")
    last = offsets[1:] - 1
    held_out = 48 + items[last] % 8
    items = np.where(items >= 48, items - 24, items)
    items[last] = held_out
    np.save(path / "items.npy", items)
    results = []
    for features in (["author"], []):
        data = data_of(path, features=features)
        trainer = trainer_of(tmp_path, max_epochs=8)
        model = model_of(data)
        trainer.fit(model, data)
        results.append(trainer.test(model, data, verbose=False)[0]["test/HR@10"])
    assert results[0] > 2 * results[1]
