"""`prepare` with features: aligned with the events and items through every filter, on random logs and on the real ones."""

import csv
import tempfile
from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.logs import Event, naive_histories, stored_histories, stored_item_values, write_kuairand, write_triples
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.prepared import PreparedData
from turbogr.data.sources.kuairand import ACTIONS
from turbogr.errors import DataError

COLUMNS = ("user", "item", "time", "kind", "price", "place", "keep")
EVENTS = st.lists(
    st.tuples(
        st.integers(0, 4).map(lambda user: user * 10**17 + 3),
        st.integers(0, 6).map(lambda item: item * 7),
        st.integers(1_000_000, 1_000_004),
        st.sampled_from([None, 3, -7, 10**17]),
        st.sampled_from([None, 4.5, 0.5, -2.25]),
        st.sampled_from([None, "a", "b b", "ü,x"]),
        st.sampled_from([1, 1, 1, 0]),
    ),
    min_size=1,
    max_size=60,
)
ITEMS = st.dictionaries(st.integers(0, 8).map(lambda item: item * 7), st.sampled_from([None, "x", "y"]), min_size=1)
OPTIONS = st.builds(
    PrepareOptions,
    user=st.just("user"),
    item=st.just("item"),
    time=st.just("time"),
    where=st.just("keep = 1"),
    features=st.permutations(["kind", "price", "place"]).map(tuple),
    repeats=st.sampled_from(["keep", "first", "last"]),
    k_core=st.integers(0, 4),
    k_core_passes=st.sampled_from([None, 1, 2]),
    max_length=st.sampled_from([None, 3, 5]),
)


def _write(file, events, parquet):
    if parquet:
        types = [pa.int64()] * 4 + [pa.float64(), pa.string(), pa.int64()]
        arrays = [pa.array(column, kind) for column, kind in zip(zip(*events, strict=True), types, strict=True)]
        pq.write_table(pa.table(dict(zip(COLUMNS, arrays, strict=True))), file)
    else:
        with file.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([COLUMNS, *events])
    return file


@settings(max_examples=60, deadline=None)
@given(
    events=EVENTS,
    shelves=ITEMS,
    options=OPTIONS,
    cut=st.integers(0, 60),
    parquet=st.booleans(),
    block=st.sampled_from([120, 1 << 20]),
    chunk=st.sampled_from([1, 7, 1 << 20]),
)
def test_features_are_the_naive_reference(events, shelves, options, cut, parquet, block, chunk):
    order = [3 + ("kind", "price", "place").index(name) for name in options.features]
    wanted = [(*event[:3], *(event[position] for position in order)) for event in events if event[6]]
    expected = naive_histories(wanted, options.repeats, options.k_core, options.k_core_passes, options.max_length)
    kept = [event for history in expected.values() for event in history]
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch("turbogr.data.sources.common.BLOCK_BYTES", block),
        mock.patch("turbogr.data.filtering.CHUNK_EVENTS", chunk),
    ):
        folder = Path(name)
        parts = [part for part in (events[:cut], events[cut:]) if part]
        files = [_write(folder / f"log_{number}", part, parquet) for number, part in enumerate(parts)]
        table = folder / "items.csv"
        table.write_text("item,shelf\n" + "".join(f"{item},{shelf or ''}\n" for item, shelf in shelves.items()))
        options = PrepareOptions(**vars(options) | {"item_features": (f"{table}:shelf",)})
        # A feature without any value among the kept is refused; a CSV column without any value at all, too.
        lost = [all(event[2 + n] is None for event in kept) for n in range(3)] + [not any(shelves.get(e[0]) for e in kept)]
        if any(lost):
            with pytest.raises(DataError):
                prepare("events", files, folder / "out", options)
            assert not (folder / "out").exists()
            return
        prepare("events", files, folder / "out", options)
        assert stored_histories(folder / "out") == expected
        assert stored_item_values(folder / "out", "shelf") == {event[0]: shelves.get(event[0]) for event in kept}
        data = PreparedData.open(folder / "out")
        for number, feature in enumerate(options.features):
            counts = Counter(event[2 + number] for event in kept)
            known = sorted(value for value in counts if value is not None)
            stored = pq.read_table(folder / "out" / "features" / f"{feature}.parquet").to_pydict()
            assert stored["value"] == [None, *known]
            assert stored["count"] == [counts[value] for value in stored["value"]]
            assert data.features[number].num_rows == 1 + len(known)
            parquet_rows = pq.read_table(folder / "out" / "events.parquet")[feature].to_numpy()
            assert parquet_rows.tolist() == data.event_features[feature].tolist()


@pytest.mark.parametrize("filters", [{"repeats": "first"}, {"repeats": "last"}, {"k_core": 7}, {"max_length": 4}, {}], ids=str)
def test_every_filter_keeps_features_with_their_events(tmp_path, filters):
    """Enough events for each filter to drop some and keep some; no two have the same values of both features."""
    random = np.random.default_rng(0)
    users, items = random.integers(0, 20, 150) ** 2 // 20, random.integers(0, 12, 150)
    events = [(int(u), int(i), 1000 + n // 4, n, f"p{n % 7}") for n, (u, i) in enumerate(zip(users, items, strict=True))]
    events += [(99, 1, 7, 200, "p"), (99, 2, 7, 201, "p")]  # too short
    table = pa.table(dict(zip(COLUMNS, zip(*events, strict=True), strict=False)))
    pq.write_table(table, tmp_path / "log.parquet")
    options = PrepareOptions(user="user", item="item", time="time", features=("kind", "price"), **filters)
    manifest = prepare("events", [tmp_path / "log.parquet"], tmp_path / "out", options)
    dropped = 152 - manifest["num_events"]
    assert dropped == 2 if not filters else 2 < dropped < 130
    naive = naive_histories(events, options.repeats, options.k_core or 0, None, options.max_length)
    assert stored_histories(tmp_path / "out") == naive


def test_the_reference_would_notice_a_shifted_feature():
    """Negative control: events alike but for a feature, whose order a sort or a filter could lose."""
    events = [(1, 5, 9, kind) for kind in range(5)]
    assert naive_histories(events, max_length=3) == {1: [(5, 9, 2), (5, 9, 3), (5, 9, 4)]}
    assert naive_histories(events, max_length=3) != naive_histories(events[::-1], max_length=3)
    assert naive_histories([*events, (1, 6, 9, 7), (1, 7, 9, 8)], "first")[1][0] == (5, 9, 0)


def _rows(file):
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_real_kuairand(shared_data, tmp_path):
    log = shared_data / "kuairand-27k-sample" / "log_standard_4_08_to_4_21_27k.csv"
    videos = shared_data / "kuairand-pure-features" / "video_features_basic_pure.csv"
    options = PrepareOptions(
        features=("hourmin", "is_like", "long_view", "tab", "actions"), item_features=(f"{videos}:author_id,tag,music_type",)
    )
    prepare("kuairand", [log], tmp_path / "out", options)
    positive = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "long_view")
    events = [
        (
            *(int(row[name]) for name in ("user_id", "video_id", "time_ms", "hourmin", "is_like", "long_view", "tab")),
            sum(int(row[name]) << bit for bit, name in enumerate(ACTIONS)),
        )
        for row in _rows(log)
        if row["is_hate"] == "0" and any(row[name] == "1" for name in positive)
    ]
    assert stored_histories(tmp_path / "out") == naive_histories(events, k=5)
    known = {int(row["video_id"]): row for row in _rows(videos)}
    tags = stored_item_values(tmp_path / "out", "tag")
    assert tags == {item: (known[item]["tag"].split(",")[0] or None) if item in known else None for item in tags}
    authors = stored_item_values(tmp_path / "out", "author_id")
    assert authors == {item: int(known[item]["author_id"]) if item in known else None for item in authors}
    kinds = stored_item_values(tmp_path / "out", "music_type")
    cells = {item: known[item]["music_type"] if item in known else "" for item in kinds}
    assert kinds == {item: float(cell) if cell else None for item, cell in cells.items()}
    assert 30 < sum(author is not None for author in authors.values()) < len(authors)


def test_real_movielens(shared_data, tmp_path):
    folder = shared_data / "ml-latest-small"
    options = PrepareOptions(
        features=("rating",), item_features=(f"{folder / 'movies.csv'}:genres",), repeats="last", k_core=3, max_length=60
    )
    prepare("movielens", [folder / "ratings.csv"], tmp_path / "out", options)
    rows = _rows(folder / "ratings.csv")
    events = [(int(r["userId"]), int(r["movieId"]), int(r["timestamp"]), float(r["rating"])) for r in rows]
    assert stored_histories(tmp_path / "out") == naive_histories(events, "last", 3, None, 60)
    genres = {int(row["movieId"]): row["genres"].split("|")[0] for row in _rows(folder / "movies.csv")}
    stored = stored_item_values(tmp_path / "out", "genres")
    assert stored == {item: None if genres[item] == "(no genres listed)" else genres[item] for item in stored}
    assert PreparedData.open(tmp_path / "out").feature_values("rating").to_pylist() == [None, *np.arange(0.5, 5.1, 0.5)]


def test_actions_are_the_bits_of_all_signals(tmp_path):
    """Whatever --signals asks for: its columns and those of the features are read once."""
    events = [Event(1, 3, 1_649_349_856_990 + n, click=n & 1, like=n >> 1 & 1, hate=n >> 2 & 1) for n in range(8)]
    options = PrepareOptions(signals=(), keep_hated=True, k_core=0, features=("actions", "is_hate", "is_click"))
    prepare("kuairand", [write_kuairand(tmp_path / "log_a.csv", events)], tmp_path / "out", options)
    rows = [event[2:] for event in stored_histories(tmp_path / "out")[1]]
    assert rows == [(e.click + 2 * e.like + 64 * e.hate, e.hate, e.click) for e in events]


@pytest.mark.parametrize("form", ["movies.csv", "movies.dat", "movies.parquet"])
def test_forms_of_movies(tmp_path, form):
    log = write_triples(tmp_path / "u.data", [(1, item, 900_000_000 + item) for item in (1, 2, 3, 4)])
    file = tmp_path / form
    rows = [(1, 'Toy, "The" (1995)', "Animation|Comedy"), (2, "Café (1995)", "Drama"), (4, "X", "(no genres listed)")]
    if form == "movies.dat":  # as GroupLens writes it: latin-1, without a header
        file.write_bytes("".join(f"{key}::{title}::{genres}\n" for key, title, genres in rows).encode("latin-1"))
    elif form == "movies.csv":
        with file.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows([("movieId", "title", "genres"), *rows])
    else:
        names = ("movieId", "title", "genres")
        pq.write_table(pa.table(dict(zip(names, zip(*rows, strict=True), strict=True))), file)
    prepare("movielens", [log], tmp_path / "out", PrepareOptions(item_features=(f"{file}:genres",)))
    assert stored_item_values(tmp_path / "out", "genres") == {1: "Animation", 2: "Drama", 3: None, 4: None}


def test_sequences_and_text_ids(tmp_path):
    (tmp_path / "log.txt").write_text("ann x y z\nbob y z w x\n")
    (tmp_path / "items.tsv").write_text("sku\tcode\tbrand\nx\t007\tB\ny\t7\t\nz\tA1\tA\n")
    (tmp_path / "more.csv").write_text("sku,weight\nx,1.50\nw,2\n")
    options = PrepareOptions(
        string_ids=True,
        item_features=(f"{tmp_path / 'items.tsv'}:code,brand", f"{tmp_path / 'more.csv'}:weight"),
        item_key="sku",
        text_features=("code",),
    )
    manifest = prepare("sequences", [tmp_path / "log.txt"], tmp_path / "out", options)
    assert [feature["name"] for feature in manifest["features"]] == ["code", "brand", "weight"]
    assert [Path(file["path"]).name for file in manifest["files"]] == ["log.txt", "items.tsv", "more.csv"]
    assert stored_item_values(tmp_path / "out", "code") == {"w": None, "x": "007", "y": "7", "z": "A1"}
    assert stored_item_values(tmp_path / "out", "brand") == {"w": None, "x": "B", "y": None, "z": "A"}
    assert stored_item_values(tmp_path / "out", "weight") == {"w": 2.0, "x": 1.5, "y": None, "z": None}
