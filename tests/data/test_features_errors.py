"""`prepare` with features: what is refused, and where the message points; the content hash."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.logs import some_triples, stored_histories, stored_item_values, write_triples
from turbogr.data.commands import main
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.prepared import PreparedData
from turbogr.errors import ConfigurationError, DataError

LOG = "user,item,time,kind\n" + "".join(f"1,{item},{100 + item},{item % 2}\n" for item in range(6))
ITEMS = "item,shelf\n" + "".join(f"{item},{item % 3}\n" for item in range(6))


@pytest.fixture
def run(tmp_path):
    """Prepare the log with a table of items; gives the folder."""

    def run(log=LOG, items=ITEMS, name="out", **options):
        (tmp_path / "log.csv").write_text(log, encoding="utf-8")
        if isinstance(items, pa.Table):
            pq.write_table(items, tmp_path / "items.csv")
        else:
            (tmp_path / "items.csv").write_text(items, encoding="utf-8")
        roles = {"user": "user", "item": "item", "time": "time"}
        roles |= {"features": ("kind",), "item_features": (f"{tmp_path / 'items.csv'}:shelf",)}
        prepare("events", [tmp_path / "log.csv"], tmp_path / name, PrepareOptions(**(roles | options)))
        return tmp_path / name

    return run


FAULTS = {
    "a cell that is no number": ({"log": LOG + "1,9,200,x\n"}, "log.csv: line 8, column 'kind': 'x' is not of type double"),
    "a column that is not there": ({"features": ("sort",)}, "log.csv: line 1, column 'sort': the column is missing"),
    "a line cut off": ({"items": ITEMS + "7\n"}, "items.csv: line 8, column 'shelf': the line has 1 values, not 2 (cut off?)"),
    "an item's cell that is no number": ({"items": ITEMS + "7,a\n"}, "items.csv: line 8, column 'shelf': 'a' is not of type"),
    "an id that is no number": ({"items": ITEMS + "x7,1\n"}, "items.csv: line 8, column 'item': 'x7' is not a whole-number id"),
    "an item without an id": ({"items": ITEMS + ",1\n"}, "items.csv: line 8, column 'item': '' is not a whole-number id"),
    "an item twice": (
        {"items": ITEMS + "\n3,0\n"},
        "items.csv: line 9, column 'item': item 3 is there again (first in line 5); keep one of its rows",
    ),
    "an item twice in Parquet": (
        {"items": pa.table({"item": [4, 5, 4], "shelf": ["a", "b", "c"]})},
        "items.csv: row 3, column 'item': item 4 is there again (first in row 1)",
    ),
    "a table of other items": (
        {"items": "item,shelf\n70,1\n"},
        "items.csv: column 'shelf': none of the 6 items of the logs has a value; are 'item' the ids of the logs?",
    ),
    "a feature of no event": (
        {"log": LOG.replace(",0\n", ",\n").replace(",1\n", ",\n")},
        "log.csv: column 'kind': no event that is kept has a value; leave this feature out",
    ),
    "a column of lists": (
        {"items": pa.table({"item": [1], "shelf": [["a"]]})},
        "items.csv: row 1, column 'shelf': cannot be a feature",
    ),
    "a number above 64 bits": (
        {"items": pa.table({"item": [1], "shelf": pa.array([2**63], pa.uint64())})},
        "items.csv: row 1, column 'shelf': cannot be a feature",
    ),
    "a table without the column of items": (
        {"items": ITEMS.replace("item", "sku")},
        "items.csv: line 1, column 'item': the column is missing; the header has sku, shelf",
    ),
    "an empty table": ({"items": "item,shelf\n"}, "items.csv: line 1: the file holds a header and no rows"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_name_their_place(run, tmp_path, case):
    changes, says = FAULTS[case]
    with pytest.raises(DataError, match="^" + re.escape(f"{tmp_path}/{says}")):
        run(**changes)
    assert not (tmp_path / "out").exists()


def test_text_features_take_any_cell(run):
    folder = run(log=LOG + "1,9,200,x\n", items=ITEMS + "9,a b\n", text_features=("kind", "shelf"))
    assert [event[2] for event in stored_histories(folder)[1]] == ["0", "1", "0", "1", "0", "1", "x"]
    assert stored_item_values(folder, "shelf")[9] == "a b"


@pytest.mark.parametrize(("name", "says"), [("none.csv", "no such file or folder"), ("", "cannot be read")])
def test_a_table_of_items_that_cannot_be_opened(run, tmp_path, name, says):
    with pytest.raises(DataError, match=f"^{re.escape(str(tmp_path / name))}: {says}"):
        run(item_features=(f"{tmp_path / name}:shelf",))


def test_long_numbers_are_no_decimals(run):
    """As decimals, both would be one category."""
    log = LOG + "1,9,200,12345678901234567890\n1,9,201,12345678901234567891\n"
    with pytest.raises(DataError, match=r"line 8, column 'kind': '12345678901234567890' is not of type int64.*--text-features"):
        run(log=log)
    assert [event[2] for event in stored_histories(run(log=log, text_features=("kind",)))[1]][-2:] == [
        "12345678901234567890", "12345678901234567891",
    ]  # fmt: skip


def test_types_of_two_files(tmp_path):
    (tmp_path / "a.csv").write_text(LOG)
    table = pa.table({"user": [2] * 3, "item": [1, 2, 3], "time": [1, 2, 3], "kind": ["0", "1", "x"]})
    pq.write_table(table, tmp_path / "b.parquet")
    options = {"user": "user", "item": "item", "time": "time", "features": ("kind",)}
    with pytest.raises(
        DataError, match=r"b\.parquet: row 1, column 'kind': the feature is of type string here, but of type int64"
    ):
        prepare("events", [tmp_path], tmp_path / "out", PrepareOptions(**options))
    prepare("events", [tmp_path], tmp_path / "out", PrepareOptions(**options, text_features=("kind",)))
    assert PreparedData.open(tmp_path / "out").feature_values("kind").to_pylist() == [None, "0", "1", "x"]


def test_types_that_become_text_and_numbers(tmp_path):
    columns = {"user": [1] * 3, "item": [1, 2, 3], "time": [1, 2, 3], "yes": [True, False, None]}
    columns |= {"code": pa.array(["a", None, " "]).dictionary_encode(), "share": pa.array([-0.0, float("nan"), 0.0])}
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    options = PrepareOptions(user="user", item="item", time="time", features=("yes", "code", "share"))
    prepare("events", [tmp_path / "log.parquet"], tmp_path / "out", options)
    rows = [event[2:] for event in stored_histories(tmp_path / "out")[1]]
    assert rows == [("true", "a", 0.0), ("false", None, None), (None, None, 0.0)]


MISTAKES = {
    "not of kuairand": ("kuairand", {"features": ("author_id",)}, "'author_id' is no categorical column of KuaiRand's logs"),
    "not of movielens": ("movielens", {"features": ("genres",)}, "'genres' is no feature of MovieLens's ratings"),
    "not of sequences": ("sequences", {"features": ("a",)}, "--features is an option of movielens and kuairand and events"),
    "form": ("movielens", {"item_features": ("movies.csv",)}, "write FILE:COLUMN or FILE:COLUMN,COLUMN"),
    "no column": ("movielens", {"item_features": ("movies.csv:",)}, "write FILE:COLUMN"),
    "the key": ("movielens", {"item_features": ("movies.csv:movieId",)}, "'movieId' is the column of items"),
    "no key": ("sequences", {"item_features": ("x.csv:a",)}, "name the column of items of that table with --item-key"),
    "a key alone": ("movielens", {"item_key": "movieId"}, "--item-key names the column of items in the tables"),
    "twice": ("movielens", {"features": ("rating", "rating")}, "the feature 'rating' is named twice"),
    "twice but for case": ("movielens", {"item_features": ("a.csv:genres", "b.csv:Genres")}, "named twice"),
    "a path": ("movielens", {"item_features": ("a.csv:x/y",)}, "a feature cannot be named 'x/y'"),
    "a taken name": ("movielens", {"item_features": ("a.csv:time",)}, "a feature cannot be named 'time'"),
    "text of nothing": ("movielens", {"text_features": ("genres",)}, "--text-features names 'genres', which is not among"),
    "a column with two roles": (
        "events", {"user": "u", "item": "i", "time": "t", "features": ("i",)}, "'i', which is already the column",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_options_that_cannot_be(tmp_path, case):
    source, options, says = MISTAKES[case]
    (tmp_path / "log_x.csv").write_text("x")
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        prepare(source, [tmp_path / "log_x.csv"], tmp_path / "out", PrepareOptions(**options))


def test_the_content_hash_covers_features(run, tmp_path):
    def content(**changes):
        run.count = getattr(run, "count", 0) + 1
        return PreparedData.open(run(name=f"out{run.count}", **changes)).manifest["content_hash"]

    first = content()
    assert content() == first
    assert content(memory_limit="1GB") == first
    assert content(items=ITEMS + "77,5\n") == first  # not of the catalogue
    others = [
        content(features=()),
        content(item_features=()),
        content(features=(), item_features=()),
        content(log=LOG.replace("105,1", "105,0")),
        content(log=LOG.replace(",1\n", ",2\n")),  # the same rows, other values
        content(items=ITEMS.replace("5,2", "5,1")),
        content(text_features=("kind",)),
    ]
    assert len({first, *others}) == 1 + len(others)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "items.csv").rename(tmp_path / "elsewhere" / "table.csv")
    (tmp_path / "elsewhere" / "table.csv").write_text(ITEMS)
    assert content(item_features=(f"{tmp_path / 'elsewhere' / 'table.csv'}:shelf",)) == first


def test_command_line(tmp_path, capsys):
    log = write_triples(tmp_path / "u.data", some_triples())
    (tmp_path / "movies.csv").write_text("movieId,genres,year\n" + "".join(f"{n},A|B,{1990 + n % 3}\n" for n in range(30)))
    (tmp_path / "more.csv").write_text("movieId,label\n1,x\n2,y\n")
    arguments = ["prepare", "movielens", str(log), "--out", str(tmp_path / "out"), "--features", "rating"]
    arguments += [
        "--item-features",
        f"{tmp_path / 'movies.csv'}:genres,year",
        "--item-features",
        f"{tmp_path / 'more.csv'}:label",
    ]
    assert main([*arguments, "--text-features", "year"]) == 0
    shown = capsys.readouterr().out
    data = PreparedData.open(tmp_path / "out")
    assert [table.name for table in data.features] == ["rating", "genres", "year", "label"]
    assert data.manifest["options"]["features"] == ["rating"]
    assert data.feature_values("year").to_pylist() == [None, "1990", "1991", "1992"]
    for line in ("rating", "genres", "3.0 (100.0%)", "A (100.0%)", "93.3%"):
        assert line in shown
    assert main(["describe", str(tmp_path / "out")]) == 0
    assert "3.0 (100.0%)" in capsys.readouterr().out
