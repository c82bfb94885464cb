import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from matplotlib.image import imread
from torch.utils.data import DataLoader

from turbogr.batch import NO_TARGET, JaggedBatch
from turbogr.callbacks import report, throughput
from turbogr.callbacks.report import Report, read_metrics
from turbogr.callbacks.resume import LastCheckpoint
from turbogr.callbacks.throughput import Throughput
from turbogr.errors import ConfigurationError
from turbogr.metrics import retrieval_metrics
from turbogr.ops.catalogue import target_ranks

ITEMS = 40


def evaluation_batch():
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(ITEMS, (60,), generator=generator)
    offsets, users = torch.arange(0, 61, 3), torch.arange(20)
    targets = torch.full((60,), NO_TARGET)
    targets[offsets[1:] - 1] = (values[offsets[1:] - 1] + 1) % ITEMS
    return JaggedBatch(
        values,
        offsets,
        torch.zeros_like(values),
        targets,
        torch.zeros_like(values),
        users,
        3,
        seen=values,
        seen_offsets=offsets,
    )


def batches(made):
    return DataLoader(made, batch_size=None, collate_fn=lambda batch: batch)


class ToyData(LightningDataModule):
    protocol, num_items = "three_way", ITEMS
    prepared = SimpleNamespace(training_counts=lambda protocol: np.arange(ITEMS))

    def __init__(self, batches=6):
        super().__init__()
        self.batches = batches

    def train_dataloader(self):
        return batches([self._training_batch(seed) for seed in range(self.batches)])

    def _training_batch(self, seed):
        values = torch.randint(ITEMS, (10,), generator=torch.Generator().manual_seed(seed))
        times = torch.zeros_like(values)
        return JaggedBatch(values, torch.tensor([0, 4, 10]), times, (values + 1) % ITEMS, times, torch.arange(2), 6)

    def val_dataloader(self):
        return batches([evaluation_batch()])

    test_dataloader = val_dataloader


class Toy(LightningModule):
    def __init__(self):
        super().__init__()
        self.query, self.item = torch.nn.Embedding(ITEMS, 8), torch.nn.Embedding(ITEMS, 8)
        self.metrics = retrieval_metrics([1, 10])

    def training_step(self, batch, _):
        loss = torch.nn.functional.cross_entropy(self.query(batch.values) @ self.item.weight.T, batch.targets)
        self.log("train/loss", loss, batch_size=batch.num_tokens)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)

    def validation_step(self, batch, _):
        last, queries = batch.last, self.query(batch.values[batch.last])
        self.metrics.update(target_ranks(queries, self.item.weight, batch.targets[last], batch.seen, batch.seen_offsets))

    test_step = validation_step

    def _log(self, stage):
        self.log_dict({f"{stage}/{name}": value for name, value in self.metrics.compute().items()})
        self.metrics.reset()

    def on_validation_epoch_end(self):
        self._log("val")

    def on_test_epoch_end(self):
        self._log("test")


def make_trainer(folder, *callbacks, epochs=4, **options):
    checkpoint = ModelCheckpoint(
        folder / "checkpoints", filename="best", monitor="val/NDCG@10", mode="max", save_last=True, enable_version_counter=False
    )
    return Trainer(
        **{
            "logger": False,
            "default_root_dir": folder,
            "max_epochs": epochs,
            "accelerator": "cpu",
            "log_every_n_steps": 2,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [Report(), Throughput(), *callbacks, checkpoint],
            **options,
        }
    )


@pytest.fixture
def run(tmp_path, capsys):
    torch.manual_seed(0)
    folder = tmp_path / "runs" / "toy"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    trainer = make_trainer(folder)
    trainer.fit(Toy(), datamodule=ToyData())
    return folder, capsys.readouterr().out


def test_fit_leaves_metrics_and_report(run):
    folder, printed = run
    rows = read_metrics(folder / "metrics.csv")
    names = set().union(*rows)
    assert {
        "step",
        "epoch",
        "train/loss",
        "train/tokens_per_second",
        "val/HR@1",
        "val/HR@10",
        "val/NDCG@10",
        "val/MRR",
    } <= names
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 24, 2))
    assert len([row for row in rows if "val/MRR" in row]) == 4
    assert imread(folder / "report.png").shape[2] == 4
    assert {path.name for path in folder.iterdir()} <= {
        "metrics.csv", "report.png", "config.yaml", "checkpoints", "tensorboard"
    }  # fmt: skip

    best = max((row for row in rows if "val/NDCG@10" in row), key=lambda row: row["val/NDCG@10"])
    assert f"epoch {best['epoch'] + 1:.0f}, step {best['step'] + 1:.0f} " in printed
    assert f"{best['val/HR@10']:.4f}" in printed
    for file in ("metrics.csv", "config.yaml", "checkpoints/best.ckpt", "checkpoints/last.ckpt", "report.png"):
        assert str(folder / file) in printed, "whole, not broken over two lines"


def test_paths_are_relative_where_they_can_be(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_trainer(tmp_path / "runs", epochs=1).fit(Toy(), datamodule=ToyData())
    printed = capsys.readouterr().out
    assert " runs/metrics.csv" in printed
    assert str(tmp_path) not in printed
    assert "config.yaml" not in printed, "only files that exist are listed"


def test_resumed_run_continues_its_metrics(run):
    folder, _ = run
    before = read_metrics(folder / "metrics.csv")
    shortened = folder / "checkpoints" / "epoch2.ckpt"
    trainer = make_trainer(folder, ModelCheckpoint(folder / "other", save_top_k=-1, filename="{epoch}"), epochs=2)
    trainer.fit(Toy(), datamodule=ToyData())
    assert max(row["step"] for row in read_metrics(folder / "metrics.csv")) < 12, "a fresh run starts a fresh file"
    (folder / "other" / "epoch=0.ckpt").rename(shortened)
    trainer = make_trainer(folder, epochs=4)
    trainer.fit(Toy(), datamodule=ToyData(), ckpt_path=shortened)
    after = read_metrics(folder / "metrics.csv")
    assert [row["step"] for row in after if "train/loss" in row] == [row["step"] for row in before if "train/loss" in row]
    assert [row["epoch"] for row in after if "val/MRR" in row] == [0, 1, 2, 3], "epoch 1 was dropped and trained again"


@pytest.mark.parametrize("stop_at", [6, 9], ids=["epoch-end", "within-an-epoch"])
def test_resumed_run_repeats_no_step(tmp_path, stop_at):
    def train(**options):
        trainer = make_trainer(tmp_path, LastCheckpoint(tmp_path / "resume.ckpt"), log_every_n_steps=1, **options)
        resume = {"ckpt_path": tmp_path / "resume.ckpt"} if "max_steps" not in options else {}
        trainer.fit(Toy(), datamodule=ToyData(), **resume)
        return [row["step"] for row in read_metrics(tmp_path / "metrics.csv") if "train/loss" in row]

    assert train(max_steps=stop_at) == list(range(stop_at))
    assert train(epochs=3) == list(range(18))


def test_event_files_where_tensorboard_is_installed(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_trainer(tmp_path, epochs=2).fit(Toy(), datamodule=ToyData())
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rows = [row for row in read_metrics(tmp_path / "metrics.csv") if "val/NDCG@10" in row]
    logged = events.Scalars("val/NDCG@10")
    assert [event.step for event in logged] == [row["step"] for row in rows]
    assert [event.value for event in logged] == pytest.approx([row["val/NDCG@10"] for row in rows])


def test_no_event_files_without_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    make_trainer(tmp_path, epochs=1).fit(Toy(), datamodule=ToyData())
    assert not (tmp_path / "tensorboard").exists()
    assert (tmp_path / "metrics.csv").is_file()


def test_fewer_steps_than_are_logged(tmp_path, capsys):
    make_trainer(tmp_path, max_steps=3, log_every_n_steps=5).fit(Toy(), datamodule=ToyData())
    printed = capsys.readouterr().out
    assert "no validation took place" in printed
    assert str(tmp_path / "report.png") in printed


def test_failed_start_keeps_the_old_metrics(run):
    folder, _ = run
    before = (folder / "metrics.csv").read_text()
    with pytest.raises(FileNotFoundError):
        make_trainer(folder).fit(Toy(), datamodule=ToyData(), ckpt_path=folder / "absent.ckpt")
    assert (folder / "metrics.csv").read_text() == before


@pytest.mark.parametrize(
    ("options", "data"),
    [({"limit_train_batches": 0}, ToyData()), ({"epochs": 0}, ToyData()), ({"max_steps": 0}, ToyData()), ({}, ToyData(0))],
)
def test_training_nothing_is_an_error(tmp_path, options, data):
    with pytest.raises(ConfigurationError, match="not a single training step"):
        make_trainer(tmp_path, **options).fit(Toy(), datamodule=data)


def test_resuming_a_finished_run_is_an_error(run):
    folder, _ = run
    with pytest.raises(ConfigurationError, match=r"last\.ckpt: raise it to train further"):
        make_trainer(folder).fit(Toy(), datamodule=ToyData(), ckpt_path=folder / "checkpoints" / "last.ckpt")


def test_without_validation(tmp_path, capsys):
    make_trainer(tmp_path, limit_val_batches=0, epochs=1).fit(Toy(), datamodule=ToyData())
    assert "no validation took place" in capsys.readouterr().out
    assert (tmp_path / "report.png").is_file()


def test_fast_dev_run_writes_nothing(tmp_path):
    make_trainer(tmp_path, fast_dev_run=1).fit(Toy(), datamodule=ToyData())
    assert not any((tmp_path / name).exists() for name in ("metrics.csv", "report.png", "tensorboard"))


def test_test_compares_with_baselines(run, capsys):
    folder, _ = run
    metrics = (folder / "metrics.csv").read_text()
    capsys.readouterr()
    trainer = make_trainer(folder)
    [logged] = trainer.test(Toy(), datamodule=ToyData(), ckpt_path=folder / "checkpoints" / "best.ckpt", verbose=False)
    written = json.loads((folder / "test.json").read_text())
    assert written["metrics"]["model"] == pytest.approx({name.removeprefix("test/"): v for name, v in logged.items()})
    assert list(written["metrics"]) == ["model", "popularity", "random"]
    assert written["metrics"]["model"]["HR@10"] > written["metrics"]["random"]["HR@10"]
    assert written["checkpoint"].endswith("best.ckpt")
    best = max(
        (row for row in read_metrics(folder / "metrics.csv") if "val/NDCG@10" in row), key=lambda row: row["val/NDCG@10"]
    )
    assert written["epoch"] == best["epoch"]
    printed = capsys.readouterr().out
    assert f"best.ckpt, epoch {best['epoch'] + 1:.0f}" in printed
    for row in written["metrics"].values():
        assert f"{row['HR@10']:.4f}" in printed
    assert str(folder / "test.png") in printed
    assert imread(folder / "test.png").ndim == 3
    assert (folder / "metrics.csv").read_text() == metrics, "testing leaves the run's metrics alone"


def test_test_without_baselines_or_checkpoint(tmp_path, capsys):
    trainer = make_trainer(tmp_path, callbacks=[Report(baselines=False)])
    trainer.test(Toy(), datamodule=ToyData(), verbose=False)
    assert list(json.loads((tmp_path / "test.json").read_text())["metrics"]) == ["model"]
    printed = capsys.readouterr().out
    assert "weights in memory" in printed
    assert "popularity" not in printed


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Sleep(Callback):
    """Lets 2 s pass in each training step and 100 s in each validation."""

    def __init__(self, clock):
        self.clock = clock

    def on_train_batch_start(self, *_):
        self.clock.now += 2

    def on_validation_batch_start(self, *_):
        self.clock.now += 100


def test_throughput_counts_training_time_only(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(throughput, "perf_counter", clock)
    trainer = make_trainer(tmp_path, Sleep(clock), val_check_interval=3)
    trainer.fit(Toy(), datamodule=ToyData())
    logged = [row for row in read_metrics(tmp_path / "metrics.csv") if "train/tokens_per_second" in row]
    assert len(logged) == 12
    assert {row["train/tokens_per_second"] for row in logged} == {5.0}
    meter = next(callback for callback in trainer.callbacks if isinstance(callback, Throughput))
    assert (meter.tokens, meter.seconds, meter.average) == (240, 48, 5)
    assert clock.now > 800, "negative control: validation took its time"


def test_average_begins_anew_after_each_log(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(throughput, "perf_counter", clock)

    class Slowing(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            clock.now += 1 if batch_idx < 2 else 10

    make_trainer(tmp_path, Slowing(), epochs=1).fit(Toy(), datamodule=ToyData())
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row["train/tokens_per_second"] for row in rows if "train/tokens_per_second" in row] == [10, 1, 1]
