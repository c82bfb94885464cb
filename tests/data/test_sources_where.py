"""`--where`: one row, one verdict, whatever the blocks; types from the whole column; one clear error for what it cannot be."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.logs import stored_histories
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.errors import ConfigurationError, DataError

EVENTS = {"user": "u", "item": "i", "time": "t"}
START = 1_649_349_856


def write_log(file, cells):
    """User 1 does item 0, 1, 2, … with these cells in column x."""
    rows = "".join(f"1,{item},{START + item},{cell}\n" for item, cell in enumerate(cells))
    file.write_text("u,i,t,x\n" + rows)
    return file


def kept(tmp_path, files, where, name="out"):
    prepare("events", files, tmp_path / name, PrepareOptions(**EVENTS, where=where))
    return [item for item, _ in stored_histories(tmp_path / name)[1]]


@pytest.mark.parametrize(
    "where",
    [
        "sum(x) > 3",
        "x > 1 OR COUNT(*) > 2",
        "row_number() over () < 20",
        "lag(x) OVER (ORDER BY t) > 1",
        "x > (SELECT avg(x) FROM events)",
        "random() < 0.5",
        "COLUMNS(*) > 1",
    ],
)
def test_what_looks_beyond_its_row_is_refused(tmp_path, where):
    file = write_log(tmp_path / "log.csv", range(5))
    with pytest.raises(ConfigurationError, match=re.escape(f"--where {where!r} must judge each row by its own")) as caught:
        kept(tmp_path, [file], where)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["1) LIMIT (3", "x >", "", "x > 1, x < 3", "unnest([true, true])", "wavg(x, x) > 1", "x > ?"])
def test_what_is_no_condition_is_refused(tmp_path, where):
    file = write_log(tmp_path / "log.csv", range(5))
    with pytest.raises(ConfigurationError, match=re.escape(f"--where {where!r}")) as caught:
        kept(tmp_path, [file], where)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("where", ["x >= 2 -- the good ones", "events.x >= 2", '"X" >= 2', "list_sum([x, 0]) >= 2"])
def test_what_judges_a_row_is_accepted(tmp_path, where):
    assert kept(tmp_path, [write_log(tmp_path / "log.csv", range(5))], where) == [2, 3, 4]


TYPES = {
    "a decimal later": (["1", "5", "5", "5", "2.5", "4.5"], "x >= 2.5", [1, 2, 3, 4, 5]),
    "a number first seen late": (["", "", "", "3", "9", "10", "11"], "x + 1 > 9", [4, 5, 6]),
    "whole numbers stay whole": (["1", "2", "3", "4", "5", "6"], "x & 1 = 1", [0, 2, 4]),
    "a time of day later": (
        ["2024-01-01", "2024-01-02", "2024-01-02", "2024-01-02 10:00:00"],
        "x > TIMESTAMP '2024-01-01'",
        [1, 2, 3],
    ),
    "text later": (["true", "true", "true", "maybe", "no"], "x = 'true' OR x = 'maybe'", [0, 1, 2, 3]),
}


@pytest.mark.parametrize("case", TYPES)
@pytest.mark.parametrize("cut", ["one block", "small blocks", "files"])
def test_a_column_has_one_type_whatever_the_cut(tmp_path, monkeypatch, case, cut):
    cells, where, expected = TYPES[case]
    files = [write_log(tmp_path / "log.csv", cells)]
    if cut == "small blocks":
        monkeypatch.setattr("turbogr.data.sources.common.BLOCK_BYTES", 30)
    if cut == "files":
        head, *rows = files[0].read_text().splitlines(keepends=True)
        files = [tmp_path / f"{number}.csv" for number in range(len(rows))]
        for file, row in zip(files, rows, strict=True):
            file.write_text(head + row)
    assert kept(tmp_path, files, where) == expected


def test_a_damaged_cell_in_a_late_file_is_named(tmp_path):
    files = [write_log(tmp_path / "a.csv", range(5)), write_log(tmp_path / "b.csv", ["7", "3 stars"])]
    with pytest.raises(DataError, match=r"b\.csv: line 3, column 'x': '3 stars' is not of type double"):
        kept(tmp_path, files, "x > 2")


@pytest.mark.parametrize("names", [["u", "i", "t", "x", "x"], ["u", "i", "t", "x", "X"], ["u", "i", "t", "x", "x", "x"]])
def test_a_column_that_is_there_twice(tmp_path, names):
    columns = [pa.array([1, 2, 3])] * 2 + [pa.array([START] * 3)] + [pa.array([1, 2, 3])] * (len(names) - 3)
    pq.write_table(pa.table(columns, names=names), tmp_path / "log.parquet")
    (tmp_path / "log.csv").write_text(
        ",".join(names) + "\n" + ",".join(["1", "1", str(START), *["1"] * (len(names) - 3)]) + "\n"
    )
    for form, word in (("parquet", "row"), ("csv", "line")):
        with pytest.raises(DataError, match=rf"log\.{form}: {word} 1, column 'x': .*there {len(names) - 3} times"):
            kept(tmp_path, [tmp_path / f"log.{form}"], "x > 1")


def test_a_role_that_is_there_twice(tmp_path):
    pq.write_table(pa.table([[1], [1], [START], [2]], names=["u", "i", "t", "u"]), tmp_path / "log.parquet")
    with pytest.raises(DataError, match=r"log\.parquet: row 1, column 'u': the column is there 2 times"):
        kept(tmp_path, [tmp_path / "log.parquet"], "t > 1")
