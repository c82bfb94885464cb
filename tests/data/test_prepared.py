"""PreparedData: what it gives, what it refuses to open, what a worker process receives."""

import json
import pickle
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.make import write_prepared
from turbogr.data.prepared import PreparedData
from turbogr.errors import ConfigurationError, DataError


@pytest.fixture
def folder(tmp_path):
    return write_prepared(tmp_path / "data", num_users=30, num_items=40, min_len=3, max_len=12, seed=1, time_unit="ms")


def test_open(folder):
    data = PreparedData.open(str(folder))
    assert (data.num_users, data.num_items, data.time_unit, data.protocol) == (30, 40, "ms", "three_way")
    assert data.num_events == len(data.items) == len(data.times) == data.offsets[-1] == data.manifest["num_events"]
    assert (data.items.dtype, data.times.dtype, data.offsets.dtype) == (np.int32, np.int64, np.int64)
    assert isinstance(data.items, np.memmap)
    assert data.path == folder


@pytest.mark.parametrize("text", [False, True])
def test_original_ids(tmp_path, text):
    data = PreparedData.open(write_prepared(tmp_path / "data", 30, 40, string_ids=text))
    items, users = data.item_ids(np.array([[0, 39], [3, 3]])), data.user_ids(np.array([29]))
    assert items.to_pylist() == (["i000000100", "i000000373", "i000000121", "i000000121"] if text else [100, 373, 121, 121])
    assert users.to_pylist() == (["u000000097"] if text else [97])
    assert data.item_ids(np.array([], dtype=np.int64)).to_pylist() == []
    for rows, ids, says in (
        ([-1], data.item_ids, "row -1 is none of the 40 items"),
        ([0, 30], data.user_ids, "row 30 is none of the 30"),
    ):
        with pytest.raises(DataError, match=says):
            ids(np.array(rows))


@pytest.mark.parametrize("chunk", [7, 1 << 22])
@pytest.mark.parametrize(("protocol", "held_out"), [("three_way", 2), ("published", 1), (None, 2)])
def test_training_counts(folder, monkeypatch, protocol, held_out, chunk):
    monkeypatch.setattr("turbogr.data.prepared._COUNT_CHUNK", chunk)
    data = PreparedData.open(folder)
    expected = np.zeros(data.num_items, dtype=np.int64)
    for user in range(data.num_users):
        for item in data.items[data.offsets[user] : data.offsets[user + 1] - held_out]:
            expected[item] += 1
    counts = data.training_counts(protocol)
    assert counts.dtype == np.int64
    assert counts.tolist() == expected.tolist()
    with pytest.raises(ConfigurationError, match="'two_way'"):
        data.training_counts("two_way")


def test_a_pickled_one_maps_the_files_again(folder):
    """What a spawned loader worker receives is a path, not a copy of the events."""
    data = PreparedData.open(folder)
    text = pickle.dumps(data)
    assert len(text) < 500
    again = pickle.loads(text)
    assert isinstance(again.items, np.memmap)
    assert again.items.tolist() == data.items.tolist()


def _edit(**values):
    def damage(folder):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | values))

    return damage


def _drop_key(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["num_items"]
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _save(name, change):
    return lambda folder: np.save(folder / f"{name}.npy", change(np.load(folder / f"{name}.npy")))


def _truncate(name):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-9])


def _swap_offsets(offsets):
    offsets[3], offsets[4] = offsets[4], offsets[3]
    return offsets


DAMAGE = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "data: not a prepared folder"),
    "manifest cut off": (_truncate("manifest.json"), r"manifest\.json: line \d+, column \d+: not JSON"),
    "manifest not an object": (lambda folder: (folder / "manifest.json").write_text("[]"), "format is None"),
    "another format": (_edit(format=3), r"manifest\.json: format is 3, this turbogr reads the formats 1 and 2"),
    "key absent": (_drop_key, r"manifest\.json: key 'num_items' is absent"),
    "key of another type": (_edit(num_users="many"), r"manifest\.json: key 'num_users' is 'many'"),
    "unknown protocol": (_edit(protocol="two_way"), r"manifest\.json: protocol is 'two_way'"),
    "unknown unit": (_edit(time_unit="h"), r"manifest\.json: time_unit is 'h'"),
    "items absent": (lambda folder: (folder / "items.npy").unlink(), r"items\.npy: absent"),
    "items of another type": (_save("items", lambda items: items.astype(np.int64)), r"items\.npy: holds int64 .*says int32"),
    "times too few": (_save("times", lambda times: times[:-1]), r"times\.npy: holds"),
    "times cut off": (_truncate("times.npy"), r"times\.npy: not a readable NumPy array"),
    "offsets of fewer users": (_save("offsets", lambda offsets: offsets[:-1]), r"offsets\.npy: holds"),
    "offsets backwards": (_save("offsets", _swap_offsets), r"offsets\.npy: does not divide"),
    "offsets not from 0": (_save("offsets", lambda offsets: offsets + 1), r"offsets\.npy: does not divide"),
    "users absent": (lambda folder: (folder / "users.parquet").unlink(), r"users\.parquet: absent"),
    "catalogue cut off": (_truncate("catalogue.parquet"), r"catalogue\.parquet: not a readable Parquet"),
    "fewer items than rows": (_edit(num_items=39), r"catalogue\.parquet: holds 40 rows, the manifest says 39"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_folder_is_refused_with_its_file(folder, case):
    damage, says = DAMAGE[case]
    PreparedData.open(folder)  # good until it is damaged
    damage(folder)
    with pytest.raises(DataError, match=re.escape(str(folder.parent)) + "/.*" + says.removeprefix("data")) as caught:
        PreparedData.open(folder)
    assert "turbogr data prepare" in str(caught.value)


def test_an_absent_folder(tmp_path):
    with pytest.raises(DataError, match="nowhere: no such prepared folder"):
        PreparedData.open(tmp_path / "nowhere")


def test_a_catalogue_without_ids(folder):
    table = pq.read_table(folder / "catalogue.parquet").drop_columns("id")
    pq.write_table(table, folder / "catalogue.parquet")
    with pytest.raises(DataError, match=r"catalogue\.parquet: not a readable Parquet file"):
        PreparedData.open(folder).item_ids(np.array([0]))
