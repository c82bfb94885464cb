"""`prepare`: counts on real logs, order of ties, content hash, options, and a folder that appears whole or not at all."""

import csv
import errno
import json
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from tests.data.logs import START_MS, Event, naive_histories, stored_histories, write_kuairand, write_triples
from turbogr.data.commands import main
from turbogr.data.filtering import EventStore
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.prepared import PreparedData
from turbogr.errors import ConfigurationError, DataError

SIGNALS = ["is_click", "is_like", "is_follow", "is_comment", "is_forward", "long_view"]


def counted(triples):
    return {
        "events": len(triples),
        "users": len({user for user, _, _ in triples}),
        "items": len({item for _, item, _ in triples}),
    }


def some_triples(seed=0, users=20, events=400):
    rng = random.Random(seed)
    return [(rng.randrange(users), rng.randrange(30), 900_000_000 + rng.randrange(15)) for _ in range(events)]


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


WRONG = {
    "movielens": {
        "signals": ("is_click",),
        "keep_hated": True,
        "user": "u",
        "where": "1",
        "time_unit": "s",
        "string_ids": True,
    },
    "kuairand": {"min_rating": 1.0, "item": "i", "time": "t"},
    "sequences": {"min_rating": 1.0, "where": "1"},
}


@pytest.mark.parametrize(("source", "option"), [(source, option) for source in WRONG for option in WRONG[source]])
def test_options_of_another_source_are_refused(tmp_path, source, option):
    with pytest.raises(ConfigurationError, match=f"--{option.replace('_', '-')} is an option of .*, not of {source}"):
        prepare(source, [tmp_path], tmp_path / "out", PrepareOptions(**{option: WRONG[source][option]}))


@pytest.mark.parametrize(
    "options",
    [{"k_core": -1}, {"k_core_passes": 0}, {"max_length": 2}, {"repeats": "some"}, {"protocol": "two"}, {"time_unit": "us"}],
    ids=str,
)
def test_impossible_options(options):
    with pytest.raises(ConfigurationError, match="--" + next(iter(options)).replace("_", "-")):
        PrepareOptions(**options)


def test_impossible_calls(tmp_path):
    file = write_triples(tmp_path / "u.data", some_triples())
    with pytest.raises(ConfigurationError, match="unknown source 'movielense'"):
        prepare("movielense", [file], tmp_path / "out")
    with pytest.raises(ConfigurationError, match="no path"):
        prepare("movielens", [], tmp_path / "out")
    with pytest.raises(ConfigurationError, match="needs --item, --time"):
        prepare("events", [file], tmp_path / "out", PrepareOptions(user="u"))
    with pytest.raises(ConfigurationError, match="three different columns"):
        prepare("events", [file], tmp_path / "out", PrepareOptions(user="u", item="u", time="t"))
    with pytest.raises(ConfigurationError, match="--memory-limit is 'much'"):
        prepare("movielens", [file], tmp_path / "out", PrepareOptions(memory_limit="much"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["u.data"]


def test_output_folder(tmp_path):
    file = write_triples(tmp_path / "u.data", some_triples())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="full: the output folder is not empty"):
        prepare("movielens", [file], tmp_path / "full")
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    with pytest.raises(DataError, match=r"u\.data: the output folder is a file"):
        prepare("movielens", [file], file)
    with pytest.raises(DataError, match="cannot be made"):
        prepare("movielens", [file], file / "inside")
    (tmp_path / "empty").mkdir()
    prepare("movielens", [file], tmp_path / "empty")
    PreparedData.open(tmp_path / "empty")
    prepare("movielens", [file], tmp_path / "new" / "deep")
    PreparedData.open(tmp_path / "new" / "deep")
    assert oct((tmp_path / "empty").stat().st_mode) == oct((tmp_path / "full").stat().st_mode)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["deep"]


def test_output_folder_filled_meanwhile(tmp_path, monkeypatch):
    real = EventStore.counts

    def somebody_else(store):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "theirs.txt").write_text("theirs")
        return real(store)

    monkeypatch.setattr(EventStore, "counts", somebody_else)
    with pytest.raises(DataError, match=r"cannot be written or read \(Directory not empty\)"):
        prepare("movielens", [write_triples(tmp_path / "u.data", some_triples())], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "u.data"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["theirs.txt"]


def _full(*_args, **_kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def _duckdb_full(*_args, **_kwargs):
    raise duckdb.IOException("IO Error: Could not write all bytes to file: No space left on device")


@pytest.mark.parametrize(
    ("place", "failure"),
    [
        ("turbogr.data.filtering.EventStore._write", _full),
        ("turbogr.data.filtering.EventStore.fill", _duckdb_full),
        ("turbogr.data.prepare.write_manifest", _full),
        ("numpy.save", _full),
    ],
    ids=["while ordering", "in DuckDB", "manifest", "arrays"],
)
def test_disk_full_leaves_nothing(tmp_path, monkeypatch, place, failure):
    file = write_triples(tmp_path / "u.data", some_triples())
    monkeypatch.setattr(place, failure)
    with pytest.raises(DataError, match="out: the disk is full"):
        prepare("movielens", [file], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["u.data"]


def test_really_full_disk(tmp_path):
    """A file system of 1 MB, where the machine allows to mount one."""
    file = write_triples(tmp_path / "u.data", some_triples(events=200_000, users=500))
    mount = tmp_path / "small"
    mount.mkdir()
    script = (
        f"mount -t tmpfs -o size=1m tmpfs {mount} && "
        f"{sys.executable} -m turbogr data prepare movielens {file} --out {mount}/out; "
        f"echo rc $?; ls -A {mount} | wc -l"
    )
    probe = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(mount)], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("this machine does not allow to mount a small file system")
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert "the disk is full" in done.stderr, done.stderr
    assert done.stdout.split() == ["rc", "1", "0"]


@pytest.mark.parametrize("limit", ["100KB", "1MB"])
def test_too_little_memory_is_said(tmp_path, limit):
    """DuckDB's own words span lines and advise to give up the order of rows."""
    file = write_triples(tmp_path / "u.data", some_triples(users=300, events=90_000))
    with pytest.raises(ConfigurationError) as caught:
        prepare("movielens", [file], tmp_path / "out", PrepareOptions(memory_limit=limit))
    message = str(caught.value)
    assert message.startswith(f"--memory-limit {limit} is too small for these logs; give more: 500MB")
    assert "\n" not in message
    assert "order" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["u.data"]


def test_no_room_to_spill_is_a_full_disk(tmp_path, monkeypatch):
    """DuckDB calls it out of memory, though more memory is not what was missing."""

    def fail(database, *_args):
        def work():
            raise duckdb.OutOfMemoryException("failed to offload data block ('max_temp_directory_size' was reached)")

        return database._run(work)

    monkeypatch.setattr("turbogr.data.workspace.Database.batches", fail)
    with pytest.raises(DataError, match="out: the disk is full"):
        prepare("movielens", [write_triples(tmp_path / "u.data", some_triples())], tmp_path / "out")


LONG_WORK = {
    "in Python": "import time; time.sleep(600)",
    "in DuckDB": "self._database.execute('SELECT count(*) FROM range(1000000000000) t(i) WHERE i % 7 = 3')",
    "in a result of DuckDB": "list(self._database.batches('SELECT i FROM range(1000000000000) t(i) WHERE i < 0', 1000))",
    "in a condition": "raise RuntimeError('Query interrupted')",  # what DuckDB raises in the main thread
}


@pytest.mark.parametrize("work", LONG_WORK)
def test_ctrl_c_leaves_nothing(tmp_path, work):
    """A real Ctrl-C in a real process, in a step that would last for minutes."""
    file = write_triples(tmp_path / "u.data", some_triples())
    script = (
        "import sys\n"
        "from turbogr.data import prepare\n"
        "from turbogr.data.commands import main\n"
        "def order(self):\n"
        "    print('working', flush=True)\n"
        f"    {LONG_WORK[work]}\n"
        "prepare._Preparation._order = order\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "prepare", "movielens", str(file), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "interrupted; nothing was left behind" in stderr
    assert "Traceback" not in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["u.data"]


@pytest.mark.parametrize("keep", ["first", "last"])
def test_repeats(tmp_path, keep):
    """1 returns to item 5 twice, the second time tied with item 6, which was read before."""
    triples = [(1, 5, 800_000_001), (1, 6, 800_000_002), (1, 5, 800_000_002), (1, 7, 800_000_003), (1, 5, 800_000_000)]
    prepare("movielens", [write_triples(tmp_path / "u.data", triples)], tmp_path / "out", PrepareOptions(repeats=keep))
    items = [item for item, _ in stored_histories(tmp_path / "out")[1]]
    assert items == {"first": [5, 6, 7], "last": [6, 5, 7]}[keep]


def test_interrupt_in_a_late_step_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("turbogr.data.prepare.write_manifest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare("movielens", [write_triples(tmp_path / "u.data", some_triples())], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["u.data"]


def test_command_line(tmp_path, capsys):
    file = write_triples(tmp_path / "u.data", some_triples())
    arguments = ["prepare", "movielens", str(file), "--out", str(tmp_path / "out"), "--k-core", "3", "--k-core-passes", "1"]
    assert main([*arguments, "--max-length", "7", "--protocol", "published", "--repeats", "last", "--min-rating", "2"]) == 0
    shown = capsys.readouterr()
    manifest = PreparedData.open(tmp_path / "out").manifest
    assert manifest["options"] == {
        "repeats": "last", "k_core": 3, "k_core_passes": 1, "max_length": 7, "protocol": "published", "memory_limit": "2GB",
        "min_rating": 2.0,
    }  # fmt: skip
    for step in manifest["counts"]:
        assert step["step"] in shown.out
        assert f"{step['events']:,}" in shown.out
    assert f"written to {tmp_path / 'out'}" in shown.out
    assert "Reading 1 file" in shown.err


def test_command_line_mistakes(tmp_path, capsys):
    for arguments, says in (
        (
            ["prepare", "movielens", "x", "--out", "y", "--max-lenght", "3"],
            "no option --max-lenght; did you mean --max-length?",
        ),
        (["prepare", "movie", "x", "--out", "y"], "invalid choice: 'movie'"),
        (["prepare", "movielens", "x"], "--out"),
        (["prepare", "kuairand", "x", "--out", "y", "--k-core-passes", "many"], "neither a number nor `fixpoint`"),
        (["prepair"], "invalid choice: 'prepair'"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert says in capsys.readouterr().err
    write_kuairand(tmp_path / "log_1.csv", [Event(1, item, START_MS, click=0) for item in range(4)])
    command = ["prepare", "kuairand", str(tmp_path), "--k-core", "0", "--out"]
    main([*command, str(tmp_path / "a"), "--signals", "none"])
    with pytest.raises(DataError, match="no user is left after the step 'positive'"):
        main([*command, str(tmp_path / "b"), "--signals", "is_click, long_view"])


def test_progress_goes_where_it_is_asked(tmp_path, capsys):
    file = write_triples(tmp_path / "u.data", some_triples())
    prepare("movielens", [file], tmp_path / "quiet")
    assert capsys.readouterr() == ("", "")
    with (tmp_path / "log.txt").open("w") as stream:
        prepare("movielens", [file], tmp_path / "loud", console=Console(file=stream))
    shown = (tmp_path / "log.txt").read_text()
    for phase in ("Reading", "Counting", "Ordering", "Filtering", "Writing"):
        assert phase in shown


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
