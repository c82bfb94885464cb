"""`events`: one unit in all files, ids that arrive whole, quoted headers, and a last line that was cut."""

import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.logs import KUAIRAND_COLUMNS, START_MS, Event, stored_histories
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.errors import DataError

EVENTS = {"user": "u", "item": "i", "time": "t"}
START = 1_649_349_856
NOON = datetime.datetime(2024, 2, 29, 12)


def write_times(file, times):
    pq.write_table(pa.table({"u": [1] * len(times), "i": list(range(len(times))), "t": times}), file)
    return file


@pytest.fixture
def files(tmp_path):
    """Parquet files of one content each: timestamps, seconds, milliseconds, timestamps of 1971 and of before 1970."""
    old = datetime.datetime(1971, 1, 1)
    older = datetime.datetime(1960, 1, 1)
    return {
        "stamps": write_times(tmp_path / "stamps.parquet", pa.array([NOON] * 3, pa.timestamp("us"))),
        "s": write_times(tmp_path / "s.parquet", pa.array([START] * 3)),
        "ms": write_times(tmp_path / "ms.parquet", pa.array([START * 1000] * 3)),
        "1971": write_times(tmp_path / "1971.parquet", pa.array([old] * 3, pa.timestamp("ms"))),
        "1960": write_times(tmp_path / "1960.parquet", pa.array([older] * 3, pa.timestamp("ms"))),
        "dates": write_times(tmp_path / "dates.parquet", pa.array([NOON.date()] * 3)),
    }


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("stamps", "s"), r"s\.parquet: row 1, column 't': .*in seconds.*in milliseconds .*stamps\.parquet.*timestamp"),
        (("1960", "s"), r"s\.parquet: row 1, column 't': .*in seconds.*in milliseconds"),
        (("s", "stamps"), r"stamps\.parquet: row 1, column 't': timestamps become milliseconds.*in seconds .*s\.parquet"),
        (("s", "1971"), r"1971\.parquet: row 1, column 't': timestamps become milliseconds.*in seconds"),
        (("s", "dates"), r"dates\.parquet: row 1, column 't': timestamps become milliseconds.*in seconds"),
    ],
    ids=str,
)
def test_units_that_differ_between_files(tmp_path, files, names, says):
    with pytest.raises(DataError, match=says):
        prepare("events", [files[name] for name in names], tmp_path / "out", PrepareOptions(**EVENTS))


@pytest.mark.parametrize(
    "names", [("stamps", "ms", "1960"), ("1971", "ms", "dates"), ("ms", "stamps"), ("ms", "1960")], ids=str
)
def test_timestamps_and_milliseconds_are_one_unit(tmp_path, files, names):
    manifest = prepare("events", [files[name] for name in names], tmp_path / "out", PrepareOptions(**EVENTS))
    assert (manifest["time_unit"], manifest["num_events"]) == ("ms", 3 * len(names))


@pytest.mark.parametrize("name", ["stamps", "1971", "dates"])
def test_timestamps_are_not_declared_seconds(tmp_path, files, name):
    with pytest.raises(DataError, match=r"parquet: row 1, column 't': timestamps become milliseconds.*--time-unit"):
        prepare("events", [files[name]], tmp_path / "out", PrepareOptions(**EVENTS, time_unit="s"))
    assert prepare("events", [files[name]], tmp_path / "ms", PrepareOptions(**EVENTS, time_unit="ms"))["time_unit"] == "ms"


@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
def test_a_quoted_header(tmp_path, delimiter):
    file = tmp_path / "log.csv"
    rows = [["u", "i", "t", "a,b;c|d"]] + [["1", str(item), str(START + item), "x"] for item in range(3)]
    file.write_text("".join(delimiter.join(f'"{cell}"' for cell in row) + "\n" for row in rows))
    prepare("events", [file], tmp_path / "out", PrepareOptions(**EVENTS))
    assert stored_histories(tmp_path / "out") == {1: [(item, START + item) for item in range(3)]}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'\x1f\x8b\x08"\x00"rest\n', "gzip"),
        ("u,i,t\n1,1,1\n".encode("utf-16"), "UTF-16"),
        (b'"u","i,t\n1,1,1\n', "a quote in the header is not closed"),
        (b"\nu,i,t\n", "the header is empty"),
    ],
)
def test_a_header_that_is_none(tmp_path, content, says):
    (tmp_path / "log.csv").write_bytes(content)
    with pytest.raises(DataError, match=rf"log\.csv: line 1: .*{says}"):
        prepare("events", [tmp_path / "log.csv"], tmp_path / "out", PrepareOptions(**EVENTS))


@pytest.mark.parametrize("column", ["u", "i", "t"])
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize(("kind", "limit"), [(pa.float64(), 2**53), (pa.float32(), 2**24)])
def test_floats_that_skip_whole_numbers(tmp_path, column, text, kind, limit):
    """Two neighbours above the limit are one number by the time they are read."""
    for number, value in enumerate((limit - 1, limit + 1)):
        table = {"u": [1, 1, 1], "i": [1, 2, 3], "t": [START] * 3} | {column: pa.array([float(value)] * 3, kind)}
        pq.write_table(pa.table(table), tmp_path / f"{number}.parquet")
    options = PrepareOptions(**EVENTS, string_ids=text, time_unit="ms")
    prepare("events", [tmp_path / "0.parquet"], tmp_path / "good", options)
    with pytest.raises(DataError, match=rf"1\.parquet: row 1, column '{column}': .* exactly only below {limit}"):
        prepare("events", [tmp_path / "1.parquet"], tmp_path / "out", options)


def lines(*cells, delimiter=","):
    return "".join(delimiter.join(map(str, row)) + "\n" for row in cells)


TIMED = "u,i,t\n" + lines(*((1, item, START + item) for item in range(4)))
KUAIRAND = KUAIRAND_COLUMNS.split(",")
KUAIRAND_ORDER = [name for name in KUAIRAND if name != "time_ms"] + ["time_ms"]
KUAIRAND_ROWS = [dict(zip(KUAIRAND, Event(1, item, START_MS + item).line.split(","), strict=True)) for item in range(4)]
KUAIRAND_TIMED = lines(KUAIRAND_ORDER, *([row[name] for name in KUAIRAND_ORDER] for row in KUAIRAND_ROWS))
ITEMS = lines(*((user, *range(100 + user, 110 + user)) for user in range(20)), delimiter=" ")
IDS_LAST = "u,t,i\n" + lines(*((item % 9, START, 100 + item) for item in range(200)))
# id: source, file name, whole content, how many of its last characters a cut may take, column, options
CUT = {
    "events": ("events", "log.csv", TIMED, range(2, 11), "t", {}),
    "events, declared": ("events", "log.csv", TIMED, range(2, 11), "t", {"time_unit": "s"}),
    "events, CRLF": ("events", "log.csv", TIMED.replace("\n", "\r\n"), range(3, 12), "t", {}),
    "events, ids last": ("events", "log.csv", IDS_LAST, range(2, 4), "i", {}),
    "events, text ids last": ("events", "log.csv", IDS_LAST, range(2, 4), "i", {"string_ids": True}),
    "kuairand": ("kuairand", "log_1.csv", KUAIRAND_TIMED, range(2, 14), "time_ms", {"k_core": 0}),
    "movielens": (
        "movielens",
        "u.data",
        lines(*((1, item, 3, START + item) for item in range(4)), delimiter="\t"),
        range(2, 11),
        "time",
        {},
    ),
    "movielens, decimals": (
        "movielens",
        "ml.inter",
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        + lines(*((1, item, 3, START + item) for item in range(4)), delimiter="\t"),
        range(2, 11),
        "timestamp:float",
        {},
    ),
    "sequences": ("sequences", "log.txt", ITEMS, range(2, 4), "item 10", {}),
    "sequences, text": ("sequences", "log.txt", ITEMS, range(2, 4), "item 10", {"string_ids": True}),
}


@pytest.mark.parametrize("block", [64, 32 << 20], ids=["small blocks", "one block"])
@pytest.mark.parametrize("case", CUT)
def test_a_cut_in_the_last_number(tmp_path, monkeypatch, case, block):
    monkeypatch.setattr("turbogr.data.sources.common.BLOCK_BYTES", block)
    source, name, content, cuts, column, options = CUT[case]
    options = PrepareOptions(**(EVENTS if source == "events" else {}), **options)
    file = tmp_path / name
    for number, whole in enumerate((content, content.rstrip("\r\n"), content.rstrip("\n"))):
        file.write_bytes(whole.encode())
        prepare(source, [file], tmp_path / f"whole{number}", options)
    last = content.count("\n")
    for cut in cuts:
        file.write_bytes(content[:-cut].encode())
        with pytest.raises(DataError, match=rf"{name}: line {last}, column '{column}': .*cut off"):
            prepare(source, [file], tmp_path / "out", options)


def test_a_complete_last_line_of_another_length_is_kept(tmp_path):
    """Ids of any width and times that cross a power of ten are no sign of a cut."""
    (tmp_path / "crossing.csv").write_text("u,i,t\n1,1,1000000001\n1,2,1000000000\n1,3,999999999")
    prepare("events", [tmp_path / "crossing.csv"], tmp_path / "out", PrepareOptions(**EVENTS))
    assert [item for item, _ in stored_histories(tmp_path / "out")[1]] == [3, 2, 1]
    (tmp_path / "few.txt").write_text("1 10 11 12 9")
    prepare("sequences", [tmp_path / "few.txt"], tmp_path / "few")
    (tmp_path / "mixed.txt").write_text(
        "".join(f"{user} {' '.join(map(str, range(5, 20)))}\n" for user in range(20)) + "99 7 8 3"
    )
    prepare("sequences", [tmp_path / "mixed.txt"], tmp_path / "mixed")
