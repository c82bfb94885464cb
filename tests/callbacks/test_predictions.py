from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader

from turbogr.callbacks.predictions import PredictionWriter
from turbogr.data.samplers import share
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


def consecutive(users, rank, ranks):
    return users[share(len(users), rank, ranks)]


class Ranks:
    """Every rank's trainer and writer, which go through the hooks one rank after the other."""

    def __init__(self, folder, ranks, barrier=lambda name: None):
        self.trainers = [
            SimpleNamespace(
                world_size=ranks,
                global_rank=rank,
                is_global_zero=rank == 0,
                datamodule=Data(),
                default_root_dir=str(folder),
                strategy=SimpleNamespace(barrier=barrier),
            )
            for rank in range(ranks)
        ]
        self.writers = [PredictionWriter() for _ in range(ranks)]

    def predict(self, batch_size=4, take=consecutive):
        for rank, (trainer, writer) in enumerate(zip(self.trainers, self.writers, strict=True)):
            writer.on_predict_start(trainer, None)
            for number, start in enumerate(range(0, USERS, batch_size)):
                users = torch.arange(start, min(start + batch_size, USERS))
                users = take(users, rank, len(self.trainers))
                writer.on_predict_batch_end(trainer, None, Model().predict_step(users, number), users, number)

    def finish(self):
        for hook in ("on_predict_end", "teardown"):
            for trainer, writer in reversed(list(zip(self.trainers, self.writers, strict=True))):
                getattr(writer, hook)(trainer, None, *(["predict"] if hook == "teardown" else []))


@pytest.mark.parametrize("ranks", [2, 3, 4, 12])
@pytest.mark.parametrize("batch_size", [4, 11])
@pytest.mark.parametrize("interleaved", [False, True])
def test_several_ranks_write_the_file_of_one_process(tmp_path, ranks, batch_size, interleaved):
    whole = Ranks(tmp_path / "one", 1)
    whole.predict(batch_size)
    whole.finish()
    parts = Ranks(tmp_path / "several", ranks)
    if interleaved:  # as Lightning's own sampler for several ranks has it
        parts.predict(batch_size, lambda users, rank, ranks: users[rank::ranks])
    else:
        parts.predict(batch_size)
    assert len(list((tmp_path / "several").iterdir())) == ranks, "each rank its own file, none of them the result"
    parts.finish()
    assert [file.name for file in (tmp_path / "several").iterdir()] == ["predictions.parquet"]
    one, several = (tmp_path / name / "predictions.parquet" for name in ("one", "several"))
    assert pq.ParquetFile(several).num_row_groups == pq.ParquetFile(one).num_row_groups
    assert pq.read_table(several).equals(pq.read_table(one), check_metadata=True)
    assert several.read_bytes() == one.read_bytes()


def test_a_rank_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    predict(tmp_path)
    before = (tmp_path / "predictions.parquet").read_bytes()

    def lost(name):
        raise RuntimeError("connection closed by peer")

    ranks = Ranks(tmp_path, 2, lost)
    ranks.predict()
    with pytest.raises(RuntimeError, match="closed by peer"):
        ranks.finish()
    for trainer, writer in zip(ranks.trainers, ranks.writers, strict=True):
        writer.on_exception(trainer, None, RuntimeError())
    assert [file.name for file in tmp_path.iterdir()] == ["predictions.parquet"]
    assert (tmp_path / "predictions.parquet").read_bytes() == before


def test_a_folder_that_nodes_do_not_share(tmp_path):
    ranks = Ranks(tmp_path, 3)
    ranks.predict()
    next(tmp_path.glob("*rank-1*")).unlink()
    with pytest.raises(ConfigurationError, match=r"rank 1 wrote its predictions to .* which rank 0 does not see"):
        ranks.finish()
    ranks.writers[0].on_exception(ranks.trainers[0], None, RuntimeError())
    assert not (tmp_path / "predictions.parquet").exists()
