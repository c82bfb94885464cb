"""The forms in which logs come: every one gives the same events."""

import datetime
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.logs import START_MS, Event, naive_histories, stored_histories, write_kuairand, write_triples
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.prepared import PreparedData
from turbogr.errors import ConfigurationError, DataError

TRIPLES = [(user, (user * 7 + step * 3) % 11, 964_982_703 + (step // 3)) for step in range(8) for user in (5, 2, 9)]
EVENTS = {"user": "u", "item": "i", "time": "t"}
MOVIELENS = {
    "ratings.dat": ("", "{}::{}::4::{}"),
    "ratings.csv": ("userId,movieId,rating,timestamp\n", "{},{},4.5,{}"),
    "u.data": ("", "{}\t{}\t4\t{}"),
    "ml-100k.inter": ("user_id:token\titem_id:token\trating:float\ttimestamp:float\n", "{}\t{}\t4\t{}"),
}


def movielens_bytes(name: str, ending: str = "\n") -> bytes:
    head, line = MOVIELENS[name]
    return (head + "".join(line.format(*triple) + "\n" for triple in TRIPLES)).replace("\n", ending).encode()


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("name", MOVIELENS)
def test_movielens_forms(tmp_path, monkeypatch, name, ending, bom):
    monkeypatch.setattr("turbogr.data.sources.common.BLOCK_BYTES", 50)
    content = bom + movielens_bytes(name, ending)
    for number, text in enumerate([content, content.removesuffix(ending.encode())]):
        (tmp_path / name).write_bytes(text)
        manifest = prepare("movielens", [tmp_path / name], tmp_path / f"out{number}")
        assert stored_histories(tmp_path / f"out{number}") == naive_histories(TRIPLES)
        assert manifest["time_unit"] == "s"
        assert manifest["files"][0]["bytes"] == len(text)


def test_movielens_folder_and_unknown_names(tmp_path):
    for name in MOVIELENS:
        folder = tmp_path / name.replace(".", "_")
        folder.mkdir()
        (folder / name).write_bytes(movielens_bytes(name))
        prepare("movielens", [folder], folder / "out")
        shutil.copy(folder / name, folder / "renamed.txt")
        prepare("movielens", [folder / "renamed.txt"], folder / "out2")
        assert stored_histories(folder / "out") == stored_histories(folder / "out2") == naive_histories(TRIPLES)
    (tmp_path / "odd.txt").write_text("1 2 3 4\n")
    with pytest.raises(DataError, match=r"odd\.txt: line 1: .*MovieLens's forms"):
        prepare("movielens", [tmp_path / "odd.txt"], tmp_path / "out")
    shutil.copy(folder / name, folder / "u.data")
    with pytest.raises(DataError, match=r"holds u\.data, ml-100k\.inter; name the file"):
        prepare("movielens", [folder], tmp_path / "out")


@pytest.mark.parametrize(("cell", "good"), [("9.64982703E8", True), ("964982703.0", True), ("964982703.5", False)])
def test_recbole_times_may_be_decimals(tmp_path, cell, good):
    file = tmp_path / "ml.inter"
    head, line = MOVIELENS["ml-100k.inter"]
    file.write_text(head + "".join(line.format(1, item, cell) + "\n" for item in range(3)))
    if good:
        prepare("movielens", [file], tmp_path / "out")
        assert PreparedData.open(tmp_path / "out").times.tolist() == [964982703] * 3
    else:
        with pytest.raises(DataError, match=r"line 2, column 'timestamp:float': '964982703\.5' is not a whole number"):
            prepare("movielens", [file], tmp_path / "out")


def test_min_rating(tmp_path):
    file = tmp_path / "u.data"
    file.write_text("".join(f"1\t{item}\t{item}\t{964982703 + item}\n" for item in range(1, 6)))
    manifest = prepare("movielens", [file], tmp_path / "out", PrepareOptions(min_rating=2.5))
    assert stored_histories(tmp_path / "out") == {1: [(item, 964982703 + item) for item in (3, 4, 5)]}
    assert manifest["counts"][1] == {"step": "rating >= 2.5", "events": 3, "users": 1, "items": 3}


@pytest.mark.parametrize("inside", ["", "data"])
def test_kuairand_folder_concatenates_its_logs_by_name(tmp_path, inside):
    folder = tmp_path / "KuaiRand" / inside
    folder.mkdir(parents=True)
    # All times equal: the order of the files and of their rows is the order of the history.
    names = ["log_standard_4_22_to_5_08_pure.csv", "log_random_4_22_to_5_08_pure.csv", "log_standard_4_08_to_4_21_pure.csv"]
    for number, name in enumerate(names):
        write_kuairand(folder / name, [Event(1, 10 * number + item, START_MS) for item in (2, 1)])
    (folder / "video_features_basic_pure.csv").write_text("video_id\n1\n")
    manifest = prepare("kuairand", [tmp_path / "KuaiRand"], tmp_path / "out", PrepareOptions(k_core=0))
    assert [item for item, _ in stored_histories(tmp_path / "out")[1]] == [12, 11, 22, 21, 2, 1]
    assert [file["path"].rsplit("/", 1)[1] for file in manifest["files"]] == sorted(names)
    given = [folder / name for name in names]
    prepare("kuairand", given, tmp_path / "out2", PrepareOptions(k_core=0))
    assert [item for item, _ in stored_histories(tmp_path / "out2")[1]] == [2, 1, 12, 11, 22, 21]


def test_kuairand_needs_only_the_columns_it_uses(tmp_path):
    file = tmp_path / "log_1.csv"
    file.write_text("time_ms,video_id,user_id,is_like\n" + "".join(f"{START_MS + i},{i},1,{i % 2}\n" for i in range(8)))
    prepare("kuairand", [file], tmp_path / "out", PrepareOptions(signals=("is_like",), keep_hated=True, k_core=0))
    assert [item for item, _ in stored_histories(tmp_path / "out")[1]] == [1, 3, 5, 7]
    with pytest.raises(DataError, match="column 'is_hate': the column is missing"):
        prepare("kuairand", [file], tmp_path / "out2", PrepareOptions(signals=("is_like",)))
    with pytest.raises(ConfigurationError, match="'is_liked' is no signal of KuaiRand"):
        prepare("kuairand", [file], tmp_path / "out2", PrepareOptions(signals=("is_liked",)))


def test_bytes_of_unwanted_columns_do_not_matter(tmp_path):
    file = tmp_path / "ratings.csv"
    rows = b"".join(b"1,%d,4.0,96498270%d,caf\xe9\n" % (item, item) for item in range(3))
    file.write_bytes(b"userId,movieId,rating,timestamp,note\xe9\n" + rows)
    prepare("movielens", [file], tmp_path / "out")
    assert len(stored_histories(tmp_path / "out")[1]) == 3


def test_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr("turbogr.data.sources.common.BLOCK_BYTES", 8)
    file = tmp_path / "sequences.txt"
    file.write_bytes(b"\xef\xbb\xbf7 5 4 5 6\r\n\r\n2\t9 9  8 \n\n7 1 2\n3 1 2\n10 4 4 4")
    manifest = prepare("sequences", [file], tmp_path / "out")
    expected = {2: [9, 9, 8], 7: [5, 4, 5, 6, 1, 2], 10: [4, 4, 4]}
    assert stored_histories(tmp_path / "out") == {
        user: [(i, t) for t, i in enumerate(items)] for user, items in expected.items()
    }
    assert (manifest["time_unit"], manifest["too_short"]) == ("none", 1)
    prepare("sequences", [file], tmp_path / "text", PrepareOptions(string_ids=True))
    assert list(stored_histories(tmp_path / "text")) == ["10", "2", "7"]


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|", "::"])
def test_events_of_any_delimiter(tmp_path, delimiter):
    file = tmp_path / "log.csv"
    lines = [["note", "t", "i", "u"]] + [["x", str(time), str(item), str(user)] for user, item, time in TRIPLES]
    file.write_text("".join(delimiter.join(line) + "\n" for line in lines))
    manifest = prepare("events", [file], tmp_path / "out", PrepareOptions(**EVENTS))
    assert stored_histories(tmp_path / "out") == naive_histories(TRIPLES)
    assert manifest["time_unit"] == "s"


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_events_with_text_ids_and_a_condition(tmp_path, form):
    users, items, times = (list(column) for column in zip(*TRIPLES, strict=True))
    ratings = [(index % 10) / 2 for index in range(len(TRIPLES))]
    table = {
        "u": [f"ü {user}" for user in users],
        "i": [f'say "{item}", twice' for item in items],
        "t": [time * 1000 for time in times],
        "rating": ratings,
        "kind": ["view", "buy"] * (len(users) // 2),
    }
    file = tmp_path / f"log.{form}"
    if form == "parquet":
        pq.write_table(pa.table(table), file, row_group_size=5)
    else:
        quoted = ['"' + item.replace('"', '""') + '"' for item in table["i"]]
        rows = zip(table["u"], quoted, table["t"], table["rating"], table["kind"], strict=True)
        file.write_text("u,i,t,rating,kind\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    options = PrepareOptions(**EVENTS, string_ids=True, where="rating >= 1.5 OR kind = 'view'")
    manifest = prepare("events", [file], tmp_path / "out", options)
    kept = [index for index in range(len(users)) if ratings[index] >= 1.5 or table["kind"][index] == "view"]
    assert 0 < len(kept) < len(users)
    expected = naive_histories([(table["u"][index], table["i"][index], table["t"][index]) for index in kept])
    assert stored_histories(tmp_path / "out") == expected
    assert manifest["counts"][1]["events"] == len(kept)
    assert manifest["time_unit"] == "ms"
    with pytest.raises(
        DataError, match="--string-ids" if form == "parquet" else "'ü 5' is not a whole-number id; text ids need"
    ):
        prepare("events", [file], tmp_path / "out2", PrepareOptions(**EVENTS))


def test_events_of_timestamps(tmp_path):
    start = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
    times = [start + datetime.timedelta(milliseconds=step) for step in (2, 0, 1)]
    for number, column in enumerate([pa.array(times, pa.timestamp("us", tz="UTC")), pa.array(times, pa.timestamp("ns"))]):
        file = tmp_path / f"log{number}.parquet"
        pq.write_table(pa.table({"u": [1, 1, 1], "i": [1, 2, 3], "t": column}), file)
        assert prepare("events", [file], tmp_path / f"out{number}", PrepareOptions(**EVENTS))["time_unit"] == "ms"
        first = int(start.timestamp() * 1000)
        assert stored_histories(tmp_path / f"out{number}") == {1: [(2, first), (3, first + 1), (1, first + 2)]}


def test_events_declared_unit_takes_any_time(tmp_path):
    file = tmp_path / "log.csv"
    file.write_text("u,i,t\n1,1,5\n1,2,-7\n1,3,1649349856990\n")
    options = PrepareOptions(**EVENTS, time_unit="ms")
    assert prepare("events", [file], tmp_path / "out", options)["time_unit"] == "ms"
    assert stored_histories(tmp_path / "out") == {1: [(2, -7), (1, 5), (3, 1649349856990)]}


def test_events_ids_up_to_the_last_of_int64(tmp_path):
    file = tmp_path / "log.csv"
    last = 2**63 - 1
    file.write_text("u,i,t\n" + "".join(f"{last},{last - item},{1649349856 + item}\n" for item in range(3)))
    prepare("events", [file], tmp_path / "out", PrepareOptions(**EVENTS))
    data = PreparedData.open(tmp_path / "out")
    assert data.user_ids(np.array([0])).to_pylist() == [last]
    assert data.item_ids(data.items).to_pylist() == [last, last - 1, last - 2]
    assert data.items.tolist() == [2, 1, 0]


def test_every_form_gives_the_same_folder(tmp_path):
    """MovieLens's forms differ in nothing that is stored, so their hashes are equal; another order of ties is another hash."""
    hashes = set()
    for name in MOVIELENS:
        (tmp_path / name).write_bytes(movielens_bytes(name))
        hashes.add(prepare("movielens", [tmp_path / name], tmp_path / f"out_{name}")["content_hash"])
    assert len(hashes) == 1
    write_triples(tmp_path / "u.data", TRIPLES[::-1])
    assert prepare("movielens", [tmp_path / "u.data"], tmp_path / "reversed")["content_hash"] not in hashes
