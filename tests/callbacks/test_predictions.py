from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from turbogr.callbacks.predictions import PredictionWriter
from turbogr.errors import ConfigurationError
from turbogr.ops.catalogue import top_items

USERS, ITEMS, K = 11, 6, 4


def seen_of(user):
    """User u has seen the first u % 5 items: few unseen ones remain for some."""
    return list(range(user % 5))


class Data(LightningDataModule):
    prepared = SimpleNamespace(
        user_ids=lambda rows: pa.array([f"u{row}" for row in np.asarray(rows).tolist()]),
        item_ids=lambda rows: pa.array(np.asarray(rows, dtype=np.int64) * 100),
    )

    def predict_dataloader(self):
        return DataLoader(torch.arange(USERS), batch_size=4)


class Model(LightningModule):
    def predict_step(self, users, batch_idx):
        seen = [seen_of(user) for user in users.tolist()]
        offsets = torch.tensor([0, *np.cumsum([len(items) for items in seen]).tolist()])
        items = torch.tensor([item for row in seen for item in row], dtype=torch.int64)
        scores, rows = top_items(torch.ones(len(users), 1), torch.arange(ITEMS).float()[:, None], K, items, offsets)
        return users, rows, scores


class Interrupted(Model):
    def predict_step(self, users, batch_idx):
        if batch_idx == 1:
            raise RuntimeError("out of memory")
        return super().predict_step(users, batch_idx)


class Wrong(Model):
    def predict_step(self, users, batch_idx):
        return super().predict_step(users, batch_idx)[1:]


def predict(folder, model=None, data=None, path=None, **options):
    trainer = Trainer(
        default_root_dir=folder,
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PredictionWriter(path)],
        **options,
    )
    if isinstance(data, DataLoader):
        return trainer.predict(model or Model(), data, return_predictions=False)
    return trainer.predict(model or Model(), datamodule=data or Data(), return_predictions=False)


def test_original_ids_in_rank_order(tmp_path):
    predict(tmp_path)
    table = pq.read_table(tmp_path / "predictions.parquet")
    assert table.schema.field("user_id").type == pa.string()
    assert table.schema.field("item_ids").type == pa.list_(pa.int64())
    assert table.schema.field("scores").type == pa.list_(pa.float32())
    assert table["user_id"].to_pylist() == [f"u{user}" for user in range(USERS)]
    for user, (items, scores) in enumerate(zip(table["item_ids"].to_pylist(), table["scores"].to_pylist(), strict=True)):
        unseen = [row for row in range(ITEMS) if row not in seen_of(user)]
        best = sorted(unseen, reverse=True)[:K]
        assert items == [row * 100 for row in best]
        assert scores == best, "and no -inf of an absent item"
    assert sorted({len(items) for items in table["item_ids"].to_pylist()}) == [2, 3, 4]


def test_written_batch_by_batch_under_a_given_name(tmp_path):
    path = tmp_path / "new" / "top.parquet"
    predict(tmp_path, path=path)
    assert pq.ParquetFile(path).num_row_groups == 3
    assert [file.name for file in path.parent.iterdir()] == ["top.parquet"]
    assert not (tmp_path / "predictions.parquet").exists()


def test_interrupted_leaves_the_old_file_and_no_other(tmp_path):
    predict(tmp_path)
    before = (tmp_path / "predictions.parquet").read_bytes()
    with pytest.raises(RuntimeError, match="out of memory"):
        predict(tmp_path, Interrupted())
    assert [file.name for file in tmp_path.iterdir()] == ["predictions.parquet"]
    assert (tmp_path / "predictions.parquet").read_bytes() == before


def test_nothing_to_predict(tmp_path):
    with pytest.raises(ConfigurationError, match="limit_predict_batches"):
        predict(tmp_path, limit_predict_batches=0)


def test_wrong_predict_step(tmp_path):
    with pytest.raises(ConfigurationError, match=r"must return \(user rows .* returned \[4, 4\], \[4, 4\]"):
        predict(tmp_path, Wrong())
    assert list(tmp_path.iterdir()) == []


def test_data_without_original_ids(tmp_path):
    with pytest.raises(ConfigurationError, match=r"needs a data module with prepared data .* found NoneType"):
        predict(tmp_path, data=DataLoader(torch.arange(3)))


def test_several_processes_are_refused(tmp_path):
    trainer = SimpleNamespace(world_size=2, datamodule=Data(), default_root_dir=str(tmp_path))
    with pytest.raises(ConfigurationError, match="this run has 2"):
        PredictionWriter().on_predict_start(trainer, None)
