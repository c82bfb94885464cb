import pickle
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from tests.data.make import write_prepared
from turbogr.batch import NO_TARGET, JaggedBatch
from turbogr.data.datamodule import SequenceDataModule, resolve_workers
from turbogr.data.prepared import PreparedData
from turbogr.errors import ConfigurationError, DataError

USERS, ITEMS = 40, 60
HELD_OUT = {"three_way": 2, "published": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared") / "p", USERS, ITEMS, max_len=15, seed=2)


@pytest.fixture(scope="module")
def events(folder: Path) -> list[list[tuple[int, int]]]:
    """Every user's (item, time), oldest first, in plain Python."""
    data = PreparedData.open(folder)
    bounds = data.offsets.tolist()
    pairs = list(zip(data.items.tolist(), data.times.tolist(), strict=True))
    return [pairs[start:end] for start, end in pairwise(bounds)]


def make(folder: Path, **options: Any) -> SequenceDataModule:
    settings: dict[str, Any] = {"batch_size": 7, "max_length": 6, "num_negatives": 5, "num_workers": 0, "seed": 3}
    return SequenceDataModule(folder, **(settings | options))


def rows(batch: JaggedBatch) -> list[dict[str, Any]]:
    """A batch, taken apart into users."""
    found = []
    for b, user in enumerate(batch.user_ids.tolist()):
        span = slice(batch.offsets[b], batch.offsets[b + 1])
        row = {name: getattr(batch, name)[span].tolist() for name in ("values", "timestamps", "targets", "target_times")}
        if batch.seen is not None:
            row["seen"] = batch.seen[batch.seen_offsets[b] : batch.seen_offsets[b + 1]].tolist()
        found.append({"user": user} | row)
    return found


@pytest.mark.parametrize("protocol", ["three_way", "published"])
@pytest.mark.parametrize("max_length", [1, 6, 200])
def test_training_tokens(folder: Path, events: list, protocol: str, max_length: int):
    loader = make(folder, protocol=protocol, max_length=max_length).train_dataloader()
    found = sorted((row for batch in loader for row in rows(batch)), key=lambda row: row["user"])
    expected = []
    for user, history in enumerate(events):
        training = history[: len(history) - HELD_OUT[protocol]]
        if len(training) >= 2:
            tokens, following = training[:-1][-max_length:], training[1:][-max_length:]
            expected.append(
                {
                    "user": user,
                    "values": [item for item, _ in tokens],
                    "timestamps": [time for _, time in tokens],
                    "targets": [item for item, _ in following],
                    "target_times": [time for _, time in following],
                }
            )
    assert found == expected
    assert len(found) < USERS or protocol == "published"


@pytest.mark.parametrize("protocol", ["three_way", "published"])
@pytest.mark.parametrize("max_length", [1, 6, 200])
@pytest.mark.parametrize("stage", ["val", "test", "predict"])
def test_evaluation_histories(folder: Path, events: list, protocol: str, max_length: int, stage: str):
    loader = getattr(make(folder, protocol=protocol, max_length=max_length), f"{stage}_dataloader")()
    found = [row for batch in loader for row in rows(batch)]
    expected = []
    for user, history in enumerate(events):
        held_out = {"val": HELD_OUT[protocol], "test": 1, "predict": 0}[stage]
        earlier = history[: len(history) - held_out]
        following = history[1 : len(earlier) + 1] if held_out else [*history[1:], (NO_TARGET, history[-1][1])]
        tokens, following = earlier[-max_length:], following[-max_length:]
        seen = tokens if protocol == "published" and stage != "predict" else earlier
        expected.append(
            {
                "user": user,
                "values": [item for item, _ in tokens],
                "timestamps": [time for _, time in tokens],
                "targets": [item for item, _ in following],
                "target_times": [time for _, time in following],
                "seen": [item for item, _ in seen],
            }
        )
    assert found == expected


def test_published_validation_is_its_test(folder: Path):
    data = make(folder, protocol="published")
    for a, b in zip(data.val_dataloader(), data.test_dataloader(), strict=True):
        assert rows(a) == rows(b)


def test_three_way_validation_never_shows_the_test_item(folder: Path, events: list):
    for batch in make(folder, max_length=200).val_dataloader():
        for row in rows(batch):
            assert len(row["values"]) == len(events[row["user"]]) - 2


def test_batches_are_typed_and_bounded(folder: Path):
    data = make(folder)
    batch = next(iter(data.train_dataloader()))
    assert batch.max_length == 6
    assert batch.negatives.shape == (batch.num_tokens, 5)
    assert 0 <= batch.negatives.min() <= batch.negatives.max() < ITEMS
    assert batch.seen is None
    evaluation = next(iter(data.val_dataloader()))
    assert evaluation.negatives is None
    for value in [*vars(batch).values(), *vars(evaluation).values()]:
        if isinstance(value, torch.Tensor):
            assert value.dtype == torch.int64


@pytest.mark.parametrize("stage", ["train", "val", "test", "predict"])
def test_workers_change_nothing(folder: Path, stage: str):
    def batches(workers: int) -> list[JaggedBatch]:
        loader = getattr(make(folder, num_workers=workers), f"{stage}_dataloader")()
        return [batch for _ in range(2) for batch in loader]

    expected = batches(0)
    for workers in (1, 2):
        for a, b in zip(batches(workers), expected, strict=True):
            assert rows(a) == rows(b)
            assert a.negatives is b.negatives is None or torch.equal(a.negatives, b.negatives)


def test_batch_size_changes_no_sample(folder: Path):
    def samples(batch_size: int) -> dict[int, tuple]:
        found = {}
        for batch in make(folder, batch_size=batch_size).train_dataloader():
            for row, negatives in zip(rows(batch), batch.negatives.split(batch.lengths.tolist()), strict=True):
                found[row["user"]] = (row, negatives.tolist())
        return found

    assert samples(3) == samples(40)


def test_global_seed_is_the_default(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    data = make(folder, seed=None)
    assert data.seed == 0
    seed_everything(17, verbose=False)
    assert data.seed == 17
    found = [batch.negatives for batch in data.train_dataloader()]
    for a, b in zip(found, make(folder, seed=17).train_dataloader(), strict=True):
        assert torch.equal(a, b.negatives)
    assert not torch.equal(found[0], next(iter(make(folder, seed=18).train_dataloader())).negatives)


def test_sizes(folder: Path):
    data = make(folder)
    assert (data.num_users, data.num_items) == (USERS, ITEMS)
    assert data.prepared.path == folder
    assert [len(data.val_dataloader()), len(make(folder, eval_batch_size=16).test_dataloader())] == [6, 3]
    assert len(make(folder, drop_last=True).train_dataloader()) < len(make(folder).train_dataloader())


def test_the_folder_decides_the_protocol(tmp_path: Path):
    published = write_prepared(tmp_path / "p", 10, 10, protocol="published")
    assert make(published).protocol == "published"
    assert make(published, protocol="three_way").protocol == "three_way"


def test_users_too_short_to_train_on_are_reported_once(folder: Path, events: list, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr("turbogr.data.datamodule.rank_zero_info", said.append)
    short = sum(len(history) < 4 for history in events)
    assert short > 0
    data = make(folder)
    data.train_dataloader()
    data.train_dataloader()
    assert said == [f"{short} of {USERS} users have fewer than two training events: they are evaluated, but not trained on"]


def test_nothing_to_train_on(tmp_path: Path):
    short = write_prepared(tmp_path / "p", 5, 10, max_len=3)
    with pytest.raises(DataError, match="no user has two training events under the protocol 'three_way'"):
        make(short).train_dataloader()
    assert len(list(make(short).test_dataloader())) == 1
    assert len(list(make(short, protocol="published").train_dataloader())) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_length": 0}, "max_length is 0"),
        ({"num_negatives": 0}, "num_negatives is 0"),
        ({"num_negatives": ITEMS + 1}, "num_negatives is 61, but the catalogue of .* has only 60 items"),
        ({"eval_batch_size": 0}, "eval_batch_size is 0"),
        ({"protocol": "two_way"}, "protocol is 'two_way'; choose one of three_way, published"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"num_workers": "many"}, "num_workers is 'many'"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_impossible_options_are_refused(folder: Path, options: dict, message: str):
    with pytest.raises(ConfigurationError, match=message):
        make(folder, **options)


def test_absent_folder_is_named(tmp_path: Path):
    with pytest.raises(DataError, match="nowhere"):
        make(tmp_path / "nowhere")


def test_query_time(folder: Path, events: list):
    latest = max(history[-1][1] for history in events)
    for batch in make(folder, query_time=latest + 5).predict_dataloader():
        assert (batch.target_times[batch.last] == latest + 5).all()
        assert (batch.targets[batch.last] == NO_TARGET).all()
    # Only prediction is affected.
    assert rows(next(iter(make(folder, query_time=latest).val_dataloader()))) == rows(next(iter(make(folder).val_dataloader())))
    user = [history[-1][1] for history in events].index(latest)
    with pytest.raises(
        ConfigurationError, match=rf"before the last event of 1 users \(user {10 + 3 * user}: {latest}\); times .* in s"
    ):
        make(folder, query_time=latest - 1).predict_dataloader()


def test_query_time_needs_times(tmp_path: Path):
    untimed = write_prepared(tmp_path / "p", 10, 10, time_unit="none")
    with pytest.raises(ConfigurationError, match="without times"):
        make(untimed, query_time=5)
    for batch in make(untimed).predict_dataloader():
        assert torch.equal(batch.target_times[batch.last], batch.timestamps[batch.last])


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 8, 64])
def test_automatic_workers_suit_any_machine(folder: Path, cores: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)), raising=False)
    workers = resolve_workers("auto")
    assert workers == {1: 0, 2: 0, 3: 1, 4: 2, 8: 4, 64: 4}[cores]
    data = make(folder, num_workers="auto")
    assert data.num_workers == workers
    for loader in (data.train_dataloader(), data.val_dataloader(), data.predict_dataloader()):
        assert len(loader) > 0  # DataLoader's constructor accepted the options
    assert sum(batch.num_users for batch in data.val_dataloader()) == USERS


def test_machines_without_affinity(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    for count, expected in ((None, 0), (6, 3)):
        monkeypatch.setattr("os.cpu_count", lambda count=count: count)
        assert resolve_workers("auto") == expected


def test_workers_map_the_files_and_do_not_copy_them(folder: Path):
    data = make(folder)
    for part in (data.train_dataloader().dataset, data.val_dataloader().loader.collate_fn):
        sent = pickle.dumps(part)
        assert len(sent) < 1000
        assert isinstance(pickle.loads(sent).data.items, np.memmap)
        assert isinstance(part.data.items, np.memmap)


@pytest.mark.slow
def test_spawned_workers_give_the_same_batches(folder: Path):
    inner = make(folder).val_dataloader()
    spawned = DataLoader(
        range(USERS), batch_size=7, collate_fn=inner.loader.collate_fn, num_workers=1, multiprocessing_context="spawn"
    )
    for a, b in zip(spawned, inner, strict=True):
        assert rows(a) == rows(b)


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("mps", False), ("cuda", True), ("npu", True)])
def test_memory_is_pinned_for_accelerators_only(folder: Path, device: str, pinned: bool):
    data = make(folder)
    data.trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=SimpleNamespace(type=device)),
        overfit_batches=0.0,
        global_rank=0,
        world_size=1,
        state=SimpleNamespace(fn=None, status=None),
    )
    assert data.val_dataloader().loader.pin_memory is pinned
    assert data.train_dataloader()._options["pin_memory"] is pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_reach_the_gpu_pinned_and_unchanged(folder: Path, workers: int):
    found: list[JaggedBatch] = []

    class Keep(LightningModule):
        def validation_step(self, batch: JaggedBatch) -> None:
            found.append(batch)

    Trainer(accelerator="gpu", devices=1, logger=False, enable_checkpointing=False).validate(
        Keep(), make(folder, num_workers=workers), verbose=False
    )
    for batch, expected in zip(found, make(folder).val_dataloader(), strict=True):
        assert batch.values.is_cuda
        assert rows(batch.to("cpu")) == rows(expected)


class Nothing(LightningModule):
    """Records what it is given; has one parameter, as `fit` wants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.users: list[list[int]] = []

    def training_step(self, batch: JaggedBatch) -> torch.Tensor:
        self.users.append(batch.user_ids.tolist())
        return self.weight * 1.0

    def predict_step(self, batch: JaggedBatch) -> torch.Tensor:
        return batch.user_ids

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(tmp_path: Path, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet, **options)


def test_predict_covers_every_user_in_order(folder: Path, tmp_path: Path):
    found = make_trainer(tmp_path).predict(Nothing(), make(folder))
    assert torch.cat(found).tolist() == list(range(USERS))


def test_limited_epochs_go_on_where_the_last_one_ended(folder: Path, tmp_path: Path):
    model, data = Nothing(), make(folder)
    make_trainer(tmp_path, max_epochs=5, limit_train_batches=2).fit(model, data)
    stream = data.train_dataloader().batches.stream(0)
    assert model.users == [next(stream).samples.tolist() for _ in range(10)]


def test_overfitting_repeats_the_same_batches(folder: Path, tmp_path: Path):
    model = Nothing()
    make_trainer(tmp_path, max_epochs=3, overfit_batches=2).fit(model, make(folder))
    assert model.users[:2] == model.users[2:4] == model.users[4:]
    assert len({user for users in model.users for user in users}) == 14
    with pytest.raises(ConfigurationError, match=r"overfit_batches is 0\.5"):
        make_trainer(tmp_path, max_epochs=1, overfit_batches=0.5).fit(Nothing(), make(folder))


def test_command_line_reads_every_option(folder: Path):
    parser = ArgumentParser()
    parser.add_class_arguments(SequenceDataModule, "data")
    arguments = parser.parse_args(
        ["--data.path", str(folder), "--data.num_workers", "auto", "--data.protocol", "published", "--data.num_negatives", "9"]
    )
    data = parser.instantiate(arguments).data
    assert (data.protocol, data.num_negatives, data.batch_size, data.max_length) == ("published", 9, 128, 200)
    with pytest.raises(SystemExit):
        parser.parse_args(["--data.path", str(folder), "--data.protocol", "two_way"])
