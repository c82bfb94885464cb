from __future__ import annotations

import itertools
from dataclasses import replace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.data.make import write_prepared
from tests.models.make import random_batch
from turbogr.data.datamodule import SequenceDataModule
from turbogr.errors import ConfigurationError
from turbogr.losses import RetrievalLoss
from turbogr.models.fuxi import FuXi
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.models.sasrec import SASRec
from turbogr.ops.normalise import normalised
from turbogr.sparse.optimizers import SGD, AdaGrad, LazyAdam, RowWiseAdaGrad
from turbogr.sparse.table import EmbeddingTable

NUM_ITEMS, TOP_K = 60, (1, 10)


def folder(path, cyclic=False, num_users=48, num_items=NUM_ITEMS):
    """A prepared folder of random histories; cyclic: every item is followed by the next row, so that there is much to learn."""
    write_prepared(path, num_users=num_users, num_items=num_items, min_len=4, max_len=24, seed=5)
    if cyclic:
        offsets = np.load(path / "offsets.npy")
        start = np.random.default_rng(0).integers(0, num_items, len(offsets) - 1)
        rows = [(s + np.arange(b - a)) % num_items for s, (a, b) in zip(start, itertools.pairwise(offsets), strict=True)]
        np.save(path / "items.npy", np.concatenate(rows).astype(np.int32))
    return path


def data_of(path, **options):
    return SequenceDataModule(str(path), batch_size=8, max_length=16, num_negatives=20, num_workers=0, **options)


def model_of(num_items=NUM_ITEMS, backbone=HSTU, optimizer=None, lr=1e-2, **options):
    torch.manual_seed(7)
    return GenerativeRetriever(
        num_items,
        backbone(dim=16, max_length=16, dropout=options.pop("dropout", 0.1)),
        EmbeddingTable(optimizer or LazyAdam(lr=lr)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        top_k=TOP_K,
        **options,
    )


def trainer_of(tmp_path, **options):
    return pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "max_epochs": 3, **options},
    )


def state_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    different = [name for name in actual if not torch.equal(actual[name], expected[name])]
    assert not different


@pytest.mark.parametrize("backbone", [HSTU, SASRec, FuXi])
@pytest.mark.parametrize("optimizer", [LazyAdam(1e-2), AdaGrad(0.1), RowWiseAdaGrad(0.1)])
def test_learns_what_there_is_to_learn(tmp_path, backbone, optimizer):
    data, model = data_of(folder(tmp_path / "data", cyclic=True)), model_of(backbone=backbone, optimizer=optimizer)
    trainer = trainer_of(tmp_path, max_epochs=25)
    (before,) = trainer.validate(model, data, verbose=False)
    trainer.fit(model, data)
    (after,) = trainer.test(model, data, verbose=False)
    assert before["val/HR@10"] < 0.5
    assert after["test/HR@10"] > 0.9
    assert after["test/HR@1"] <= after["test/HR@10"]
    assert 0 < after["test/NDCG@10"] <= after["test/HR@10"]
    assert 0 < after["test/MRR"] <= 1


def chance_bounds(users, k, num_items):
    """K / catalogue, five standard deviations either way."""
    p = k / num_items
    spread = 5 * (p * (1 - p) / users) ** 0.5
    return p - spread, p + spread


def test_an_untrained_model_scores_k_over_catalogue(tmp_path):
    data = data_of(folder(tmp_path / "data", num_users=1500, num_items=300))
    (result,) = trainer_of(tmp_path).test(model_of(300), data, verbose=False)
    low, high = chance_bounds(1500, 10, 300 - 14)  # seen items are filtered: about 14 a user
    assert low < result["test/HR@10"] < high


@pytest.mark.parametrize("shuffled", [True, False], ids=["shuffled targets", "control"])
def test_shuffled_targets_teach_nothing(tmp_path, shuffled):
    """If evaluation leaked the target, a model trained on noise would still find it. The control sees the real targets."""

    class Shuffled(GenerativeRetriever):
        def training_step(self, batch, batch_idx):
            if shuffled:
                g = torch.Generator().manual_seed(batch_idx)
                batch = replace(batch, targets=batch.targets[torch.randperm(batch.num_tokens, generator=g)])
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    data = data_of(folder(tmp_path / "data", cyclic=True, num_users=400))
    model = Shuffled(NUM_ITEMS, HSTU(dim=16, max_length=16), EmbeddingTable(LazyAdam(1e-2)), top_k=TOP_K)
    trainer = trainer_of(tmp_path, max_epochs=8)
    trainer.fit(model, data)
    (result,) = trainer.test(model, data, verbose=False)
    if shuffled:
        assert result["test/HR@10"] < chance_bounds(400, 10, NUM_ITEMS - 14)[1]
    else:
        assert result["test/HR@10"] > 0.8


def test_seeds_fix_results(tmp_path):
    path = folder(tmp_path / "data")
    results = []
    for seed in (1, 1, 2):
        model = model_of(seed=seed)
        trainer_of(tmp_path).fit(model, data_of(path, seed=3))
        results.append(state_of(model))
    assert_same(results[0], results[1])
    assert not torch.equal(results[0]["embeddings.weight"], results[2]["embeddings.weight"])  # another dropout


@pytest.mark.parametrize("stop", [2, 6, 7, 12], ids=lambda step: f"after step {step}")
def test_resumed_training_equals_uninterrupted_training_bit_for_bit(tmp_path, stop):
    """48 users in batches of 8 are 6 steps an epoch: within an epoch, at its end, behind it."""
    path = folder(tmp_path / "data")

    def fit(steps, checkpoint=None):
        saver = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=stop, save_top_k=-1)
        model = model_of(dropout=0.3)
        trainer = trainer_of(tmp_path, max_epochs=-1, max_steps=steps, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(model, data_of(path, seed=3), ckpt_path=checkpoint)
        return state_of(model), trainer.optimizers[0].state_dict()["state"]

    expected, expected_optimizer = fit(15)
    resumed, optimizer = fit(15, str(tmp_path / "saved" / f"step={stop}.ckpt"))
    assert_same(resumed, expected)
    for index, state in expected_optimizer.items():
        assert_same(optimizer[index], state)
    if stop == 7:  # the control: a run without the checkpoint's steps differs
        assert not torch.equal(fit(15 - stop)[0]["embeddings.weight"], expected["embeddings.weight"])


def test_a_reloaded_checkpoint_gives_identical_metrics(tmp_path):
    data, model = data_of(folder(tmp_path / "data")), model_of()
    trainer = trainer_of(tmp_path)
    trainer.fit(model, data)
    (expected,) = trainer.test(model, data, verbose=False)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    torch.manual_seed(99)
    fresh = model_of(lr=0.5)
    (before,) = trainer_of(tmp_path).test(fresh, data, verbose=False)
    (reloaded,) = trainer_of(tmp_path).test(fresh, data, ckpt_path=str(tmp_path / "saved.ckpt"), verbose=False)
    assert reloaded == expected
    assert before != expected


def test_accumulated_batches_equal_one_large_batch(tmp_path):
    """Batches of equal token counts, no dropout: two of 8 users accumulated are one of 16, table and dense parameters alike."""
    path = tmp_path / "data"
    write_prepared(path, num_users=48, num_items=NUM_ITEMS, min_len=12, max_len=12, seed=5)
    states = []
    for batch_size, accumulate in ((16, 1), (8, 2)):
        model = model_of(optimizer=AdaGrad(0.1), dropout=0.0)
        data = SequenceDataModule(str(path), batch_size=batch_size, max_length=16, num_negatives=20, num_workers=0, seed=1)
        trainer_of(tmp_path, max_epochs=2, accumulate_grad_batches=accumulate).fit(model, data)
        states.append(state_of(model))
    for name, expected in states[0].items():
        torch.testing.assert_close(states[1][name], expected, rtol=1e-4, atol=2e-6, msg=name)


def test_bf16_mixed_precision_trains(tmp_path):
    data, model = data_of(folder(tmp_path / "data", cyclic=True)), model_of()
    trainer = trainer_of(tmp_path, max_epochs=15, precision="bf16-mixed")
    trainer.fit(model, data)
    (result,) = trainer.test(model, data, verbose=False)
    assert result["test/HR@10"] > 0.8
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_a_scheduler_steps_with_the_optimizer(tmp_path):
    model = model_of(scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5))
    trainer = trainer_of(tmp_path, max_epochs=1)  # six steps
    trainer.fit(model, data_of(folder(tmp_path / "data")))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(5e-3)


def test_predictions_are_the_best_unseen_items(tmp_path):
    data, model = data_of(folder(tmp_path / "data")), model_of(predict_k=NUM_ITEMS)
    batches = trainer_of(tmp_path).predict(model, data)
    model.eval()
    for (users, items, scores), batch in zip(batches, data.predict_dataloader(), strict=True):
        with torch.no_grad():
            expected = model.queries(batch) @ normalised(model.embeddings.weight).T
        for user in range(len(users)):
            seen = batch.seen[batch.seen_offsets[user] : batch.seen_offsets[user + 1]].tolist()
            kept = items[user][items[user] >= 0].tolist()
            assert sorted(kept + sorted(set(seen))) == list(range(NUM_ITEMS))
            torch.testing.assert_close(scores[user][: len(kept)], expected[user, kept], rtol=1e-5, atol=1e-6)
            assert (scores[user].diff()[: len(kept) - 1] <= 0).all()


def test_the_query_time_changes_the_scores_of_a_time_aware_model(tmp_path):
    path = folder(tmp_path / "data")
    later = int(np.load(path / "times.npy").max()) + 10**8

    def scores(backbone, **options):
        batches = trainer_of(tmp_path).predict(model_of(backbone=backbone), data_of(path, **options))
        return torch.cat([batch[2] for batch in batches])

    assert not torch.equal(scores(HSTU), scores(HSTU, query_time=later))
    assert not torch.equal(scores(FuXi), scores(FuXi, query_time=later))
    assert torch.equal(scores(SASRec), scores(SASRec, query_time=later))


def test_what_a_strategy_asks_for():
    model, batch = model_of(), random_batch([3, 0, 5], num_items=NUM_ITEMS, max_length=16)
    assert set(model.sparse_features(batch)) == {"values", "targets", "negatives"}
    assert set(model.sparse_features(replace(batch, negatives=None))) == {"values"}
    assert model.sample_count(batch) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_items": 5}, "K = 10 is impossible for a catalogue of 5 items"),
        ({"predict_k": 61}, "K = 61 is impossible for a catalogue of 60 items"),
        ({"num_items": 0}, "num_items must be at least 1"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        model_of(**options)


def test_several_processes_without_a_strategy_for_the_table_are_refused(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path)
    monkeypatch.setattr(type(trainer), "world_size", 2)
    model = model_of()
    model.trainer = trainer
    with pytest.raises(ConfigurationError, match="tables would drift apart"):
        model.on_fit_start()


def test_a_loss_of_ones_own(tmp_path):
    class Squared(RetrievalLoss):
        def forward(self, output, items, targets, negatives):
            return (output - items[targets]).square().mean()

    torch.manual_seed(7)
    model = GenerativeRetriever(NUM_ITEMS, HSTU(dim=16, max_length=16), loss=Squared(), top_k=TOP_K)
    before = state_of(model)
    trainer_of(tmp_path, max_epochs=1).fit(model, data_of(folder(tmp_path / "data")))
    assert not torch.equal(before["embeddings.weight"], model.embeddings.weight)


def test_clipping_spares_the_table_and_says_so(tmp_path, caplog):
    """Rows move as without clipping; dense parameters hardly move."""
    path, states = folder(tmp_path / "data"), []
    for clip in (None, 1e-9):
        torch.manual_seed(7)
        sgd = GenerativeRetriever(
            NUM_ITEMS,
            HSTU(dim=16, max_length=16, dropout=0.0),
            EmbeddingTable(SGD(0.1)),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            top_k=TOP_K,
        )
        before = state_of(sgd)
        with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
            trainer_of(tmp_path, max_steps=1, max_epochs=-1, gradient_clip_val=clip).fit(sgd, data_of(path, seed=3))
        after = state_of(sgd)
        states.append({name: (after[name] - before[name]).abs().max().item() for name in after})
    assert states[0]["embeddings.weight"] == states[1]["embeddings.weight"] > 0
    assert states[1]["backbone.positions"] < 1e-3 * states[0]["backbone.positions"]
    assert "rows are clipped by sparse_clip_norm" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("backbone", [HSTU, SASRec, FuXi])
def test_overfits_100_users(backbone):
    """Every training target of 100 users of 20 random events, by a model without dropout: HR@1 > 0.9."""
    torch.manual_seed(1)
    num_items = 1000
    batch = random_batch([20] * 100, num_items=num_items, negatives=512, max_length=20)
    model = GenerativeRetriever(
        num_items,
        backbone(dim=64, max_length=20, dropout=0.0),
        EmbeddingTable(LazyAdam(lr=5e-3)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3, betas=(0.9, 0.98)),
    )
    model.log = lambda *args, **kwargs: None
    optimizer = model.configure_optimizers()
    for _ in range(200):
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        model.embeddings.apply_gradients()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        output = normalised(model.backbone(model.embeddings({"values": batch.values})["values"], batch))
        best = (output @ normalised(model.embeddings.weight).T).argmax(1)
    assert (best == batch.targets).float().mean() > 0.9
