"""The whole way on real KuaiRand rows: prepare, train, evaluate, beside the popularity baseline."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from turbogr.baselines import evaluate_baselines
from turbogr.data.datamodule import SequenceDataModule
from turbogr.data.prepare import prepare
from turbogr.models.bias import TimeBuckets
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.sparse.optimizers import LazyAdam
from turbogr.sparse.table import EmbeddingTable


@pytest.mark.slow
def test_real_kuairand_is_prepared_trained_and_evaluated(shared_data, tmp_path):
    manifest = prepare("kuairand", [shared_data / "kuairand-27k-sample"], tmp_path / "data")
    # 41,828 rows of the standard log and 50 of the random one; the counts after each filter are checked against an
    # independent implementation in tests/data/test_prepare.py.
    assert manifest["counts"][0]["events"] == 41_878
    assert manifest["time_unit"] == "ms"

    pl.seed_everything(1)
    data = SequenceDataModule(tmp_path / "data", batch_size=32, max_length=100, num_negatives=64, num_workers=0)
    model = GenerativeRetriever(
        data.num_items,
        HSTU(dim=32, max_length=100, dropout=0.1, time=TimeBuckets(32, 0.5, unit=1000.0)),
        EmbeddingTable(LazyAdam(4e-3)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=4e-3),
        top_k=(10, 50),
    )
    trainer = pl.Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=12,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(model, data)
    (result,) = trainer.test(model, data, verbose=False)
    popularity = evaluate_baselines(data, (10, 50), seed=0)["popularity"]
    assert popularity["HR@50"] > 0
    assert result["test/HR@50"] > 3 * popularity["HR@50"]
