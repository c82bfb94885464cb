"""`prepare`: counts on real logs, order of ties, filters, and the content hash."""

import csv
import json
import random
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.logs import START_MS, Event, naive_histories, some_triples, stored_histories, write_kuairand, write_triples
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.prepared import PreparedData
from turbogr.errors import DataError

SIGNALS = ["is_click", "is_like", "is_follow", "is_comment", "is_forward", "long_view"]


def counted(triples):
    return {
        "events": len(triples),
        "users": len({user for user, _, _ in triples}),
        "items": len({item for _, item, _ in triples}),
    }


def test_real_kuairand_counts(shared_data, tmp_path):
    """Every row of the table against csv and Counter."""
    folder = shared_data / "kuairand-27k-sample"
    rows = []
    for file in sorted(folder.glob("log_*.csv")):
        with file.open(newline="") as stream:
            rows += list(csv.DictReader(stream))
    triple = lambda row: (int(row["user_id"]), int(row["video_id"]), int(row["time_ms"]))  # noqa: E731
    not_hated = [row for row in rows if row["is_hate"] == "0"]
    positive = [triple(row) for row in not_hated if any(row[name] == "1" for name in SIGNALS)]
    core = positive
    while True:
        users, items = Counter(u for u, _, _ in core), Counter(i for _, i, _ in core)
        left = [(u, i, t) for u, i, t in core if users[u] >= 5 and items[i] >= 5]
        if len(left) == len(core):
            break
        core = left
    manifest = prepare("kuairand", [folder], tmp_path / "out")
    steps = ([triple(row) for row in rows], [triple(row) for row in not_hated], positive, core)
    expected = [counted(step) for step in steps]
    assert [{k: v for k, v in step.items() if k != "step"} for step in manifest["counts"][:4]] == expected
    # The numbers themselves, so that a change of the data or of both counts is seen.
    assert [step["events"] for step in manifest["counts"]] == [41_878, 33_795, 33_758, 33_734, 33_734]
    assert (manifest["num_users"], manifest["num_items"], manifest["too_short"]) == (664, 1_851, 0)
    assert stored_histories(tmp_path / "out") == naive_histories(positive, k=5)
    lengths = np.array(sorted(Counter(u for u, _, _ in core).values()))
    assert manifest["length_percentiles"]["p90"] == pytest.approx(np.percentile(lengths, 90))
    assert manifest["length_percentiles"]["max"] == lengths.max()
    # It is the data that the traps are about: many times are tied.
    assert any(len(history) > len({time for _, time in history}) for history in naive_histories(positive).values())


def test_real_movielens_counts(shared_data, tmp_path):
    file = shared_data / "ml-latest-small" / "ratings.csv"
    with file.open(newline="") as stream:
        triples = [(int(row["userId"]), int(row["movieId"]), int(row["timestamp"])) for row in csv.DictReader(stream)]
    manifest = prepare("movielens", [file.parent], tmp_path / "out")
    assert (manifest["num_users"], manifest["num_items"], manifest["num_events"]) == (610, 9_724, 100_836)
    assert manifest["counts"][0] == {"step": "read", **counted(triples)}
    assert stored_histories(tmp_path / "out") == naive_histories(triples)
    by_user = {user: [time for each, _, time in triples if each == user] for user in range(1, 6)}
    assert all(times != sorted(times) for times in by_user.values())  # the file is not in the order that is asked of us
    core = prepare("movielens", [file], tmp_path / "core", PrepareOptions(k_core=20, max_length=50))
    assert stored_histories(tmp_path / "core") == naive_histories(triples, k=20, max_length=50)
    assert core["num_events"] < manifest["num_events"]
    assert core["length_percentiles"]["max"] == 50


def test_real_sequences(shared_data, tmp_path):
    file = shared_data / "amazon" / "Beauty.txt"
    manifest = prepare("sequences", [file], tmp_path / "out")
    assert (manifest["num_users"], manifest["num_items"], manifest["num_events"]) == (22_363, 12_101, 198_502)
    lines = [[int(word) for word in line.split()] for line in file.read_text().splitlines()]
    stored = stored_histories(tmp_path / "out")
    assert {user: [item for item, _ in history] for user, history in stored.items()} == {line[0]: line[1:] for line in lines}


@pytest.mark.parametrize("distinct_times", [1, 3, 1000])
def test_ties_keep_reading_order_across_files_and_blocks(tmp_path, monkeypatch, distinct_times):
    monkeypatch.setattr("turbogr.data.sources.common.BLOCK_BYTES", 1 << 16)
    rng = random.Random(distinct_times)
    triples = [(rng.randrange(40), rng.randrange(10_000), 900_000_000 + rng.randrange(distinct_times)) for _ in range(30_000)]
    files = []
    for number, start in enumerate(range(0, len(triples), 7_000)):
        files.append(write_triples(tmp_path / f"{9 - number}.data", triples[start : start + 7_000]))
    prepare("movielens", files, tmp_path / "out")
    assert stored_histories(tmp_path / "out") == naive_histories(triples)
    if distinct_times == 1:
        assert stored_histories(tmp_path / "out") != naive_histories(triples[::-1])


def test_files_of_the_folder_agree(tmp_path):
    file = write_triples(tmp_path / "u.data", some_triples())
    manifest = prepare("movielens", [file], tmp_path / "out")
    data = PreparedData.open(tmp_path / "out")
    events = pq.read_table(tmp_path / "out" / "events.parquet")
    assert events["item"].to_numpy().tolist() == data.items.tolist()
    assert events["time"].to_numpy().tolist() == data.times.tolist()
    lengths = np.diff(data.offsets)
    assert events["user"].to_numpy().tolist() == np.repeat(np.arange(data.num_users), lengths).tolist()
    for name, counts in (("users", lengths), ("catalogue", np.bincount(data.items))):
        table = pq.read_table(tmp_path / "out" / f"{name}.parquet")
        assert table.column_names == ["row", "id", "events"]
        assert table["row"].to_pylist() == list(range(len(counts)))
        assert table["id"].to_pylist() == sorted(table["id"].to_pylist())
        assert table["events"].to_pylist() == counts.tolist()
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    assert {each.name for each in (tmp_path / "out").iterdir()} == {
        "manifest.json", "items.npy", "times.npy", "offsets.npy", "events.parquet", "users.parquet", "catalogue.parquet",
    }  # fmt: skip


def test_users_too_short_are_dropped_counted_and_reported(tmp_path):
    triples = [(user, user * 10 + step, 900_000_000 + step) for user in range(1, 6) for step in range(user)]
    manifest = prepare("movielens", [write_triples(tmp_path / "u.data", triples)], tmp_path / "out")
    assert manifest["too_short"] == 2
    assert manifest["counts"] == [
        {"step": "read", "events": 15, "users": 5, "items": 15},
        {"step": "users of >= 3 events", "events": 12, "users": 3, "items": 12},
    ]
    assert list(stored_histories(tmp_path / "out")) == [3, 4, 5]


def test_passes_of_the_k_core(tmp_path):
    """A chain that falls apart one link a pass: one pass and the fixed point are different data sets."""
    triples = [(user, item, 900_000_000) for user in range(6) for item in (user, user + 1)] + [
        (7, 9, 900_000_000 + n) for n in range(3)
    ]
    file = write_triples(tmp_path / "u.data", triples)
    events = {}
    for passes in (1, 2, None):
        manifest = prepare(
            "movielens", [file], tmp_path / str(passes), PrepareOptions(k_core=2, k_core_passes=passes, repeats="keep")
        )
        events[passes] = manifest["counts"][1]["events"]
        assert stored_histories(tmp_path / str(passes)) == naive_histories(triples, k=2, passes=passes)
    assert events[1] > events[2] > events[None] == 3


def test_content_hash(tmp_path):
    triples = some_triples()
    file = write_triples(tmp_path / "u.data", triples)
    first = prepare("movielens", [file], tmp_path / "first")
    elsewhere = tmp_path / "other" / "place"
    elsewhere.mkdir(parents=True)
    shutil.copy(file, elsewhere / "renamed.data")
    again = prepare("movielens", [elsewhere / "renamed.data"], elsewhere / "out", PrepareOptions(memory_limit="500MB"))
    assert again["content_hash"] == first["content_hash"]
    assert again["files"][0]["sha256"] == first["files"][0]["sha256"]
    parts = [write_triples(tmp_path / f"{n}.data", triples[start : start + 100]) for n, start in enumerate(range(0, 400, 100))]
    assert prepare("movielens", parts, tmp_path / "parts")["content_hash"] == first["content_hash"]
    options = [{"protocol": "published"}, {"max_length": 5}, {"k_core": 1}]
    hashes = {prepare("movielens", [file], tmp_path / str(each), PrepareOptions(**each))["content_hash"] for each in options}
    for which in range(3):  # another user, another item, another time
        changed = [tuple(value + (position == which) for position, value in enumerate(triple)) for triple in triples]
        raw = write_triples(tmp_path / f"changed{which}.data", changed)
        hashes.add(prepare("movielens", [raw], tmp_path / f"changed{which}")["content_hash"])
    assert len(hashes | {first["content_hash"]}) == 7


@pytest.mark.parametrize("threads", ["1", "2"])
def test_content_hash_does_not_depend_on_threads_or_process(tmp_path, threads):
    file = write_triples(tmp_path / "u.data", some_triples())
    script = (
        "import sys, duckdb, pyarrow; pyarrow.set_cpu_count(int(sys.argv[3]))\n"
        "real = duckdb.connect\n"
        "def connect(*args, config): return real(*args, config={**config, 'threads': int(sys.argv[3])})\n"
        "duckdb.connect = connect\n"
        "from turbogr.data.prepare import prepare\n"
        "print(prepare('movielens', [sys.argv[1]], sys.argv[2])['content_hash'])"
    )
    command = [sys.executable, "-c", script, str(file), str(tmp_path / "out"), threads]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert shown == prepare("movielens", [file], tmp_path / "here")["content_hash"]


def test_nobody_left(tmp_path):
    file = write_kuairand(tmp_path / "log_1.csv", [Event(1, item, START_MS + item) for item in range(10)])
    with pytest.raises(DataError, match=r"log_1\.csv: no user is left after the step '5-core, 1 pass' \(read: 10 events; "):
        prepare("kuairand", [file], tmp_path / "out")
    hated = write_kuairand(tmp_path / "log_2.csv", [Event(1, item, START_MS, hate=1) for item in range(10)])
    with pytest.raises(DataError, match="no user is left after the step 'not hated'"):
        prepare("kuairand", [hated], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("keep", ["first", "last"])
def test_repeats(tmp_path, keep):
    """1 returns to item 5 twice, the second time tied with item 6, which was read before."""
    triples = [(1, 5, 800_000_001), (1, 6, 800_000_002), (1, 5, 800_000_002), (1, 7, 800_000_003), (1, 5, 800_000_000)]
    prepare("movielens", [write_triples(tmp_path / "u.data", triples)], tmp_path / "out", PrepareOptions(repeats=keep))
    items = [item for item, _ in stored_histories(tmp_path / "out")[1]]
    assert items == {"first": [5, 6, 7], "last": [6, 5, 7]}[keep]


@pytest.mark.slow
def test_a_million_rows_within_little_memory(tmp_path):
    """DuckDB gets 200 MB, less than its tables take, so that spilling is on the way to the result."""
    rng = np.random.default_rng(0)
    users, items, times = (
        rng.integers(0, 5_000, 2_000_000),
        rng.integers(0, 10**12, 2_000_000),
        rng.integers(0, 10**6, 2_000_000),
    )
    file = tmp_path / "u.data"
    np.savetxt(file, np.stack([users, items, users * 0 + 3, times + 900_000_000], 1), fmt="%d", delimiter="\t")
    small = prepare("movielens", [file], tmp_path / "small", PrepareOptions(memory_limit="200MB"))
    large = prepare("movielens", [file], tmp_path / "large")
    assert small["content_hash"] == large["content_hash"]
    data = PreparedData.open(tmp_path / "small")
    order = np.lexsort((np.arange(len(users)), times, users))
    assert (data.times == times[order] + 900_000_000).all()
    assert (data.item_ids(data.items).to_numpy() == items[order]).all()
