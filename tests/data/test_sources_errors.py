"""Every kind of bad input ends in one error that names file, line and column, and leaves no folder behind."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.logs import KUAIRAND_COLUMNS, START_MS, Event
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.errors import ConfigurationError, DataError

HEAD = KUAIRAND_COLUMNS.encode() + b"\n"
GOOD = [Event(user, item, START_MS + item).line.encode() + b"\n" for user in range(2) for item in range(3)]
KUAIRAND = HEAD + b"".join(GOOD)
RATINGS_HEAD = b"userId,movieId,rating,timestamp\n"
RATINGS = RATINGS_HEAD + b"".join(b"1,%d,4.0,96498270%d\n" % (movie, movie) for movie in range(1, 5))
EVENTS = {"user": "u", "item": "i", "time": "t"}
TEXT_EVENTS = EVENTS | {"string_ids": True}


def kuairand_line(**cells) -> bytes:
    row = dict(zip(KUAIRAND_COLUMNS.split(","), Event(1, 2, START_MS).line.split(","), strict=True)) | cells
    return ",".join(row.values()).encode() + b"\n"


def with_line(number: int, line: bytes, text: bytes = KUAIRAND) -> bytes:
    """`text` with another line in place of line `number` (counted from 1)."""
    lines = text.splitlines(keepends=True)
    lines[number - 1] = line
    return b"".join(lines)


def columns(text: bytes, *names: str) -> bytes:
    """A KuaiRand log without some columns."""
    keep = [index for index, name in enumerate(KUAIRAND_COLUMNS.split(",")) if name not in names]
    return b"".join(b",".join(line.split(b",")[index] for index in keep) + b"\n" for line in text.splitlines())


# id: (source, file name, bytes, options, line, column, what the message says)
BAD = {
    "missing column": ("kuairand", columns(KUAIRAND, "time_ms"), {}, 1, "time_ms", "missing"),
    "missing signal": ("kuairand", columns(KUAIRAND, "is_follow"), {}, 1, "is_follow", "missing"),
    "column twice": ("kuairand", KUAIRAND.replace(b"date", b"time_ms", 1), {}, 1, "time_ms", "2 times"),
    "user not a number": (
        "kuairand",
        with_line(4, kuairand_line(user_id="u7")),
        {},
        4,
        "user_id",
        "'u7' is not a whole",
    ),
    "item not a number": ("kuairand", with_line(4, kuairand_line(video_id="1.5")), {}, 4, "video_id", "'1.5'"),
    "item in powers": ("kuairand", with_line(4, kuairand_line(video_id="1e3")), {}, 4, "video_id", "'1e3'"),
    "item hexadecimal": ("kuairand", with_line(4, kuairand_line(video_id="0x10")), {}, 4, "video_id", "'0x10'"),
    "item with underscore": ("kuairand", with_line(4, kuairand_line(video_id="1_000")), {}, 4, "video_id", "'1_000'"),
    "item empty": ("kuairand", with_line(4, kuairand_line(video_id="")), {}, 4, "video_id", "''"),
    "item not ASCII": ("kuairand", with_line(4, kuairand_line(video_id="७")), {}, 4, "video_id", "whole-number"),
    "time not a number": ("kuairand", with_line(4, kuairand_line(time_ms="noon")), {}, 4, "time_ms", "'noon'"),
    "time missing": ("kuairand", with_line(4, kuairand_line(time_ms="NULL")), {}, 4, "time_ms", "'NULL'"),
    "negative user": ("kuairand", with_line(4, kuairand_line(user_id="-3")), {}, 4, "user_id", "id -3 is negative"),
    "negative item": ("kuairand", with_line(4, kuairand_line(video_id="-3")), {}, 4, "video_id", "id -3 is negative"),
    "negative time": ("kuairand", with_line(4, kuairand_line(time_ms="-3")), {}, 4, "time_ms", "time -3 is negative"),
    "flag of 7": ("kuairand", with_line(4, kuairand_line(is_like="7")), {}, 4, "is_like", "7 is not 0 or 1"),
    "id beyond int64": ("kuairand", with_line(4, kuairand_line(user_id=str(2**63))), {}, 4, "user_id", "64 bits"),
    "empty file": ("kuairand", b"", {}, 1, None, "empty"),
    "header only": ("kuairand", HEAD, {}, 1, None, "no rows"),
    "last line cut in the middle": ("kuairand", KUAIRAND[:-10], {}, 7, "comment_stay_time", "cut off"),
    "last line cut in a time": ("kuairand", KUAIRAND + GOOD[0][:20], {}, 8, "time_ms", "cut off"),
    "last line cut after an id": ("kuairand", KUAIRAND + b"1", {}, 8, "video_id", "cut off"),
    "header again": ("kuairand", KUAIRAND + KUAIRAND, {}, 8, "user_id", "header stands here again"),
    "value too many": ("kuairand", with_line(4, GOOD[0][:-1] + b",9\n"), {}, 4, "tab", "20 values, not 19"),
    "trailing delimiter": ("kuairand", with_line(4, GOOD[0][:-1] + b",\n"), {}, 4, "tab", "20 values, not 19"),
    "seconds among milliseconds": (
        "kuairand",
        with_line(4, kuairand_line(time_ms="1649349856")),
        {},
        4,
        "time_ms",
        "in seconds",
    ),
    "microseconds": (
        "kuairand",
        with_line(4, kuairand_line(time_ms="1649349856990000")),
        {},
        4,
        "time_ms",
        "neither",
    ),
    "carriage return": ("kuairand", with_line(4, GOOD[0][:9] + b"\r" + GOOD[0][9:]), {}, 4, "user_id", "carriage return"),
    "old Mac lines": ("kuairand", HEAD + KUAIRAND.replace(b"\n", b"\r"), {}, 2, "user_id", "carriage return"),
    "quote not closed": ("kuairand", with_line(4, b'1,"' + GOOD[0][2:]), {}, 4, "video_id", "quote"),
    "quote over two lines": ("kuairand", with_line(4, b'1,"2\n"' + GOOD[0][3:]), {}, 4, "video_id", "quote"),
    "text behind a quote": ("kuairand", with_line(4, b'1,"2"3' + GOOD[0][3:]), {}, 4, "video_id", "quote"),
    "UTF-16": ("kuairand", KUAIRAND.decode().encode("utf-16"), {}, 1, None, "UTF-16"),
    "gzip": ("kuairand", b"\x1f\x8b\x08\x00rest", {}, 1, None, "gzip"),
    "empty header": ("kuairand", b"\n" + KUAIRAND, {}, 1, None, "header is empty"),
    "damaged time": (
        "movielens",
        with_line(4, b"1,3,4.0,847434 some text1\n", RATINGS),
        {},
        4,
        "timestamp",
        "847434 some text1",
    ),
    "damaged rating": ("movielens", with_line(4, b"1,3,4.0.1,964982703\n", RATINGS), {}, 4, "rating", "'4.0.1'"),
    "rating not finite": ("movielens", with_line(4, b"1,3,nan,964982703\n", RATINGS), {}, 4, "rating", "'nan'"),
    "rating beyond float": ("movielens", with_line(4, b"1,3,1e999,964982703\n", RATINGS), {}, 4, "rating", "'1e999'"),
    "milliseconds": ("movielens", with_line(2, b"1,3,4.0,964982703000\n", RATINGS), {}, 2, "timestamp", "in milliseconds"),
    "last time cut off": ("movielens", RATINGS[:-2], {}, 5, "timestamp", "cut off"),
    "blank lines are counted": ("movielens", with_line(4, b"\n\n1,x,4.0,964982703\n", RATINGS), {}, 6, "movieId", "'x'"),
    "events: missing column": ("events", b"u,i,when\n1,2,3\n", EVENTS, 1, "t", "missing; the header has u, i, when"),
    "events: mixed units": ("events", b"u,i,t\n1,2,1649349856\n1,3,1649349857000\n", EVENTS, 3, "t", "milliseconds"),
    "events: text id": ("events", b"u,i,t\n1,2,1649349856\n1,b,1649349857\n", EVENTS, 3, "i", "'b'"),
    "events: empty text id": (
        "events",
        b"u,i,t\na,b,1649349856\na,,1649349857\n",
        TEXT_EVENTS,
        3,
        "i",
        "empty",
    ),
    "events: text not UTF-8": (
        "events",
        b"u,i,t\na,b,1649349856\na,\xe9,1649349857\n",
        TEXT_EVENTS,
        3,
        "i",
        "UTF-8",
    ),
    "events: number column of where": (
        "events",
        b"u,i,t,rating\n1,1,1649349856,4.5\n1,2,1649349856,5\n1,3,1649349857,3 stars\n",
        EVENTS | {"where": "rating >= 4"},
        4,
        "rating",
        "'3 stars'",
    ),
    "sequences: not a number": ("sequences", b"1 2 3 4\n2 5 x 6\n", {}, 2, "item 2", "'x'"),
    "sequences: negative": ("sequences", b"1 2 3 4\n-2 5 6\n", {}, 2, "user", "negative"),
    "sequences: no item": ("sequences", b"1 2 3 4\n2\n", {}, 2, "item 1", "no item"),
    "sequences: beyond int64": ("sequences", b"1 2 3 4\n2 9223372036854775808 1\n", {}, 2, "item 1", "64 bits"),
    "sequences: not UTF-8": ("sequences", b"1 2 3 4\n2 \xe9 1\n", {"string_ids": True}, 2, "item 1", "UTF-8"),
    "sequences: empty": ("sequences", b"\n", {}, 1, None, "empty"),
}
NAMES = {"kuairand": "log_standard.csv", "movielens": "ratings.csv", "events": "events.csv", "sequences": "sequences.txt"}


@pytest.mark.parametrize("block", [64, 32 << 20], ids=["small blocks", "one block"])
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_with_file_line_and_column(tmp_path, monkeypatch, case, block):
    monkeypatch.setattr("turbogr.data.sources.common.BLOCK_BYTES", block)
    source, content, options, line, column, says = BAD[case]
    file = tmp_path / "raw" / NAMES[source]
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(DataError) as caught:
        prepare(source, [file], tmp_path / "out", PrepareOptions(**options))
    message = str(caught.value)
    place = f"{file}: line {line}" + ("" if column is None else f", column {column!r}")
    assert message.startswith(place + ":"), message
    assert says in message, message
    assert "\n" not in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]


@pytest.mark.parametrize("case", [None, "quoted numbers", "blanks", "no last newline"])
def test_the_undamaged_logs_are_accepted(tmp_path, case):
    """Negative control of the table above: what the cases were made from is good."""
    kuairand = {
        None: KUAIRAND,
        "quoted numbers": with_line(4, b'"0","2"' + GOOD[2][3:]),
        "blanks": with_line(4, b" 0, 2" + GOOD[2][3:]),
        "no last newline": KUAIRAND[:-1],
    }[case]
    for source, content in (("kuairand", kuairand), ("movielens", RATINGS)):
        file = tmp_path / NAMES[source]
        file.write_bytes(content)
        manifest = prepare(source, [file], tmp_path / source, PrepareOptions(k_core=0))
        assert manifest["num_events"] == (6 if source == "kuairand" else 4)


def test_the_damaged_file_of_several_is_named(tmp_path):
    for number in range(1, 4):
        bad = with_line(5, kuairand_line(video_id="-1"))
        (tmp_path / f"log_{number}.csv").write_bytes(bad if number == 2 else KUAIRAND)
    with pytest.raises(DataError, match=re.escape(f"{tmp_path}/log_2.csv: line 5, column 'video_id': id -1")):
        prepare("kuairand", [tmp_path], tmp_path / "out")


def test_units_may_not_change_between_files(tmp_path):
    (tmp_path / "a.csv").write_text("u,i,t\n1,1,1649349856\n1,2,1649349857\n1,3,1649349858\n")
    (tmp_path / "b.csv").write_text("u,i,t\n2,1,1649349856000\n")
    with pytest.raises(DataError, match=r"b\.csv: line 2, column 't': time 1649349856000 is in milliseconds.*a\.csv, line 2"):
        prepare("events", [tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out", PrepareOptions(**EVENTS))


def test_a_folder_without_logs(tmp_path):
    (tmp_path / "raw" / "data").mkdir(parents=True)
    (tmp_path / "raw" / "video_features.csv").write_text("x\n")
    for source, says in (("kuairand", "log_*.csv"), ("movielens", "ratings.dat"), ("sequences", "is a folder")):
        with pytest.raises(DataError, match=re.escape(f"{tmp_path}/raw: ")) as caught:
            prepare(source, [tmp_path / "raw"], tmp_path / "out")
        assert says in str(caught.value)
    with pytest.raises(DataError, match=r"holds no \.csv"):
        prepare("events", [tmp_path / "raw" / "data"], tmp_path / "out", PrepareOptions(**EVENTS))


def test_unreadable_paths(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"absent\.csv: no such file"):
        prepare("kuairand", [tmp_path / "absent.csv"], tmp_path / "out")
    # The super-user may read anything, so that the refusal is simulated.
    file = tmp_path / "log_1.csv"
    file.write_bytes(KUAIRAND)
    real_open = type(file).open

    def refuse(path, *args, **kwargs):
        if path == file:
            raise PermissionError(13, "Permission denied")
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(type(file), "open", refuse)
    with pytest.raises(DataError, match=r"log_1\.csv: cannot be read \(Permission denied\)"):
        prepare("kuairand", [file], tmp_path / "out")


def test_a_file_given_twice(tmp_path):
    (tmp_path / "log_1.csv").write_bytes(KUAIRAND)
    with pytest.raises(DataError, match="given twice"):
        prepare("kuairand", [tmp_path, tmp_path / "log_1.csv"], tmp_path / "out")


PARQUET_BAD = {
    "missing column": ({"u": [1], "i": [1]}, 1, "t", "missing"),
    "negative": ({"u": [1, -1], "i": [1, 2], "t": [1649349856] * 2}, 2, "u", "negative"),
    "missing value": ({"u": [1, 1], "i": [1, None], "t": [1649349856] * 2}, 2, "i", "NULL"),
    "text": ({"u": [1, 1], "i": ["a", "b"], "t": [1649349856] * 2}, 1, "i", "--string-ids"),
    "fraction": ({"u": [1, 1], "i": [1.0, 1.5], "t": [1649349856] * 2}, 2, "i", "1.5"),
    "beyond int64": ({"u": [1, 1], "i": pa.array([1, 2**63], pa.uint64()), "t": [1649349856] * 2}, 2, "i", "64 bits"),
    "mixed units": ({"u": [1, 1], "i": [1, 2], "t": [1649349856, 1649349856000]}, 2, "t", "milliseconds"),
    "empty": ({"u": pa.array([], pa.int64()), "i": pa.array([], pa.int64()), "t": pa.array([], pa.int64())}, 1, None, "empty"),
}


@pytest.mark.parametrize("case", PARQUET_BAD)
def test_bad_parquet_is_named_with_file_row_and_column(tmp_path, case):
    content, row, column, says = PARQUET_BAD[case]
    file = tmp_path / "events.parquet"
    pq.write_table(pa.table(content), file)
    with pytest.raises(DataError) as caught:
        prepare("events", [file], tmp_path / "out", PrepareOptions(**EVENTS))
    message = str(caught.value)
    assert message.startswith(f"{file}: row {row}" + ("" if column is None else f", column {column!r}") + ":"), message
    assert says in message


def test_a_truncated_parquet_file(tmp_path):
    file = tmp_path / "events.parquet"
    pq.write_table(pa.table({"u": [1], "i": [1], "t": [1]}), file)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"events\.parquet: cannot be read as Parquet"):
        prepare("events", [file], tmp_path / "out", PrepareOptions(**EVENTS))


@pytest.mark.parametrize("where", ["rating >>> 4", "nothing > 4", "1) FROM events; --"])
def test_a_condition_that_fails(tmp_path, where):
    file = tmp_path / "events.csv"
    file.write_text("u,i,t,rating\n1,1,1649349856,4\n")
    with pytest.raises(ConfigurationError, match="--where"):
        prepare("events", [file], tmp_path / "out", PrepareOptions(**EVENTS, where=where))
