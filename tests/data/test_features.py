"""Features of a prepared folder: what the folder gives, what batches carry, what never leaks."""

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader

from tests.data.make import write_prepared
from tests.test_batch import make_batch
from turbogr.data.datamodule import SequenceDataModule
from turbogr.data.describe import print_manifest
from turbogr.data.features import FeatureTable, chosen, rows_of
from turbogr.data.histories import EvaluationHistories
from turbogr.data.manifest import read_manifest
from turbogr.data.prepared import PreparedData
from turbogr.errors import ConfigurationError, DataError

FEATURES = {"rating": ("event", 6), "genre": ("item", 4), "tab": ("event", 3)}


@pytest.fixture
def folder(tmp_path):
    return write_prepared(tmp_path / "data", num_users=30, num_items=40, min_len=3, max_len=12, seed=1, features=FEATURES)


def test_what_a_folder_gives(folder):
    data = PreparedData.open(folder)
    assert [(table.name, table.side, table.num_rows) for table in data.features] == [
        ("rating", "event", 6), ("genre", "item", 4), ("tab", "event", 3),
    ]  # fmt: skip
    rating, genre, tab = data.features
    assert rating.item_rows is None
    assert tab.item_rows is None
    assert isinstance(genre.item_rows, np.memmap)
    assert (genre.item_rows.dtype, genre.item_rows.shape) == (np.int32, (40,))
    assert list(data.event_features) == ["rating", "tab"]
    assert data.event_features["tab"].shape == data.items.shape
    assert data.feature_values("genre").to_pylist() == [None, 1001, 1002, 1003]


def test_values_to_rows(folder):
    data = PreparedData.open(folder)
    rows = data.feature_rows("genre", [1003, 999, None, 1001, 1001])
    assert rows.dtype == np.int64
    assert rows.tolist() == [3, 0, 0, 1, 1]
    assert data.feature_rows("genre", []).tolist() == []
    with pytest.raises(ConfigurationError, match="values of this feature are of type int64"):
        data.feature_rows("genre", ["drama"])
    with pytest.raises(ConfigurationError, match=r"names 'genres', which .*data does not have; it has rating, genre, tab"):
        data.feature_rows("genres", [1])
    assert rows_of([4, 3.5, float("nan"), None, 5.0], pa.array([None, 3.5, 4.0])).tolist() == [2, 1, 0, 0, 0]
    assert rows_of([" b", "ü", "", None], pa.array([None, "a", "b", "ü"])).tolist() == [2, 3, 0, 0]
    assert rows_of([True, False, None], pa.array([None, "false", "true"])).tolist() == [2, 1, 0]


def test_every_row_of_the_folder_comes_back_from_its_value(folder):
    data = PreparedData.open(folder)
    for table in data.features:
        values = data.feature_values(table.name)
        assert data.feature_rows(table.name, values.to_pylist()).tolist() == list(range(table.num_rows))


def test_chosen_features():
    tables = (FeatureTable("a", "event", 3), FeatureTable("b", "item", 2, np.zeros(4, np.int32)))
    assert chosen(tables, "all", "data") == tables
    assert chosen(tables, ["b", "a"], "data") == tables[::-1]
    assert chosen(tables, [], "data") == ()
    with pytest.raises(ConfigurationError, match="names one feature twice: a, a"):
        chosen(tables, ["a", "a"], "data")
    with pytest.raises(ConfigurationError, match="has none; prepare it with --features or --item-features"):
        chosen((), ["a"], "data")


def _batches(module):
    module.trainer = None
    yield from module.train_dataloader()
    for loader in (module.val_dataloader(), module.test_dataloader(), module.predict_dataloader()):
        yield from loader


@pytest.mark.parametrize("workers", [0, 2])
def test_a_token_carries_its_own_event(folder, workers):
    """By brute force over a user's events: token i is an event that (item, time, rating, tab) all come from."""
    module = SequenceDataModule(folder, batch_size=7, max_length=5, num_negatives=3, seed=3, num_workers=workers)
    data, tokens = module.prepared, 0
    for batch in _batches(module):
        assert list(batch.features) == ["rating", "tab"]
        for user, start, end in zip(batch.user_ids.tolist(), batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False):
            first, last = data.offsets[user], data.offsets[user + 1]
            own = [data.items, data.times, data.event_features["rating"], data.event_features["tab"]]
            events = list(zip(*(array[first:last].tolist() for array in own), strict=True))
            columns = [batch.values, batch.timestamps, batch.features["rating"], batch.features["tab"]]
            carried = list(zip(*(column[start:end].tolist() for column in columns), strict=True))
            windows = [events[i : i + len(carried)] for i in range(len(events) - len(carried) + 1)]
            assert carried in windows
            tokens += len(carried)
    assert tokens > 500


@pytest.mark.parametrize("stage", ["train", "val", "test"])
def test_no_token_sees_the_features_of_its_target(folder, stage):
    """Mark one event of every user, all others being unmarked, and look for the marks in the batches."""
    offsets = np.load(folder / "offsets.npy")
    # Training's last target is the last training event; evaluation's is the first event held out.
    target = offsets[1:] - {"train": 3, "val": 2, "test": 1}[stage]

    def marks_seen(events):
        rows = np.zeros(offsets[-1], dtype=np.int32)
        rows[events[events >= offsets[:-1]]] = 1
        for name in ("rating", "tab"):
            np.save(folder / "features" / f"{name}.npy", rows)
        module = SequenceDataModule(folder, batch_size=7, max_length=5, num_negatives=3, seed=3, num_workers=0)
        batches = list(getattr(module, f"{stage}_dataloader")())
        assert sum(batch.num_users for batch in batches) > 20
        return [sum(int(batch.features[name].sum()) for batch in batches) for name in ("rating", "tab")]

    assert marks_seen(target) == [0, 0]
    # Negative control: the event before the target is the last token.
    seen = marks_seen(target - 1)
    assert seen[0] == seen[1] > 20


def test_the_option_of_the_data_module(folder):
    def module(features):
        return SequenceDataModule(folder, batch_size=30, num_negatives=2, num_workers=0, features=features)

    assert [table.name for table in SequenceDataModule(folder, num_negatives=2).features] == ["rating", "genre", "tab"]
    assert [table.name for table in module(["tab", "genre"]).features] == ["tab", "genre"]
    assert list(next(iter(module(["tab", "genre"]).train_dataloader())).features) == ["tab"]
    assert next(iter(module([]).test_dataloader())).features == {}
    with pytest.raises(ConfigurationError, match=r"features names 'tag', which .*data does not have"):
        module(["tag"])


def test_a_batch_checks_and_moves_its_features():
    batch = make_batch([2, 1], features={"tab": torch.tensor([1, 0, 2])})
    moved = batch.to("cpu")
    assert list(moved.features) == ["tab"]
    assert moved.features["tab"].tolist() == [1, 0, 2]
    assert batch.to("meta").features["tab"].device.type == "meta"
    assert make_batch([2, 1]).features == {}
    for wrong in (torch.tensor([1, 0]), torch.tensor([1.0, 0.0, 2.0])):
        with pytest.raises(DataError, match=r"JaggedBatch.features\['tab'\] is .*expected torch.int64 \[3\]"):
            make_batch([2, 1], features={"tab": wrong})
    # As worker processes hand it over.
    loader = DataLoader([0], batch_size=None, collate_fn=lambda _: batch, num_workers=1)
    assert next(iter(loader)).features["tab"].tolist() == [1, 0, 2]


def test_pickled_histories_map_the_files_again(folder):
    histories = EvaluationHistories(PreparedData.open(folder), "three_way", "test", 5, features=["tab"])
    text = pickle.dumps(histories)
    assert len(text) < 1000
    assert isinstance(pickle.loads(text).data.event_features["tab"], np.memmap)


def test_formats(folder, tmp_path):
    """A folder with features says so to older versions; one without is what it was, and one from before opens."""
    assert read_manifest(folder)["format"] == 2
    plain = write_prepared(tmp_path / "plain", 30, 40)
    manifest = json.loads((plain / "manifest.json").read_text())
    assert manifest["format"] == 1
    del manifest["features"]
    (plain / "manifest.json").write_text(json.dumps(manifest))
    assert PreparedData.open(plain).features == ()


def _edit(**values):
    def damage(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["features"][1] |= values
        (folder / "manifest.json").write_text(json.dumps(manifest))

    return damage


DAMAGE = {
    "rows absent": (lambda folder: (folder / "features" / "tab.npy").unlink(), r"features/tab\.npy: absent"),
    "rows of another type": (
        lambda folder: np.save(folder / "features" / "tab.npy", np.zeros(3)),
        r"features/tab\.npy: holds float64 \[3\], the manifest says int32",
    ),
    "map absent": (lambda folder: (folder / "features" / "genre.parquet").unlink(), r"features/genre\.parquet: absent"),
    "map of more rows": (_edit(rows=5), r"features/genre\.parquet: holds 4 rows, the manifest says 5"),
    "unknown side": (_edit(side="user"), r"side is 'user', which is none of event, item"),
    "no number of rows": (_edit(rows="many"), r"key 'rows' is 'many', which is not valid"),
    "another side": (_edit(side="event"), r"features/genre\.npy: holds int32 \[40\], the manifest says int32 \["),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_refused(folder, case):
    damage, says = DAMAGE[case]
    damage(folder)
    with pytest.raises(DataError, match=says) as caught:
        PreparedData.open(folder)
    assert "turbogr data prepare" in str(caught.value)


def test_a_map_without_values(folder):
    pq.write_table(pa.table({"row": [0, 1, 2]}), folder / "features" / "tab.parquet")
    with pytest.raises(DataError, match=r"features/tab\.parquet: not a readable Parquet file"):
        PreparedData.open(folder).feature_values("tab")


def test_describe_shows_features(folder):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_manifest(read_manifest(folder), folder, console)
    shown = console.export_text()
    data = PreparedData.open(folder)
    rows = np.bincount(data.event_features["rating"], minlength=6)
    most = 1 + int(np.argmax(rows[1:]))
    line = next(line for line in shown.splitlines() if "rating" in line)
    assert f"{1000 + most} ({rows[most] / rows.sum():.1%})" in line
    assert f"{rows[0] / rows.sum():.1%}" in line.split("│")[-2]
    assert "items" in next(line for line in shown.splitlines() if "genre" in line)
