"""`prepare --vocabulary-of`: new events in the rows that a model was trained with; what it does not know."""

import re
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.logs import naive_histories, stored_histories, stored_item_values
from turbogr.data.commands import main
from turbogr.data.datamodule import SequenceDataModule
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.prepared import PreparedData
from turbogr.errors import ConfigurationError, DataError

ROLES = {"user": "user", "item": "item", "time": "time"}
OLD = [(user, 10 * item, 100 + item, item % 3 or None, "abc"[user % 3]) for user in range(5) for item in range(6)]


def _log(file, events, text=False):
    names = ("user", "item", "time", "kind", "place")
    kinds = (pa.int64(), pa.string() if text else pa.int64(), pa.int64(), pa.int64(), pa.string())
    columns = zip(*[(u, f"i{i}" if text else i, *rest) for u, i, *rest in events], strict=True)
    pq.write_table(pa.table({n: pa.array(c, k) for n, c, k in zip(names, columns, kinds, strict=True)}), file)
    return file


@pytest.fixture(scope="module", params=[False, True], ids=["numbers", "text"])
def old(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("old")
    key = "i" if request.param else ""
    (folder / "shelf.csv").write_text("item,shelf\n" + "".join(f"{key}{10 * n},{n // 2}\n" for n in range(4)))
    options = PrepareOptions(
        **ROLES, features=("kind", "place"), item_features=(f"{folder / 'shelf.csv'}:shelf",), string_ids=request.param
    )
    prepare("events", [_log(folder / "log.parquet", OLD, request.param)], folder / "out", options)
    return folder / "out", request.param


NEW = st.lists(
    st.tuples(
        st.integers(0, 3).map(lambda user: user + 100),
        st.sampled_from([0, 10, 10, 20, 30, 7, 99]),
        st.integers(500, 503),
        st.sampled_from([1, 2, 3, None]),
        st.sampled_from(["a", "c", "d", None]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=15, deadline=None)
@given(events=NEW, repeats=st.sampled_from(["keep", "last"]))
def test_new_events_are_the_naive_reference(old, tmp_path_factory, events, repeats):
    """Other items' events are dropped, other values are as if missing, and no row means anything else than before."""
    folder, text = old
    place = tmp_path_factory.mktemp("new")
    known = [event for event in events if event[1] in range(0, 60, 10)]
    known = [(u, i, t, None if k == 3 else k, None if p == "d" else p) for u, i, t, k, p in known]
    known = [(str(u), f"i{i}", *rest) for u, i, *rest in known] if text else known
    expected = naive_histories(known, repeats)
    log = _log(place / "log.parquet", events, text)
    options = PrepareOptions(**ROLES, string_ids=text, vocabulary_of=str(folder), repeats=repeats)
    if not expected:
        with pytest.raises(DataError, match="no user is left"):
            prepare("events", [log], place / "out", options)
        return
    prepare("events", [log], place / "out", options)
    assert stored_histories(place / "out") == expected
    before, after = PreparedData.open(folder), PreparedData.open(place / "out")
    assert after.num_items == before.num_items == 6
    rows = np.arange(6)
    assert after.item_ids(rows).equals(before.item_ids(rows))
    assert [table.name for table in after.features] == [table.name for table in before.features] == ["kind", "place", "shelf"]
    for one, two in zip(before.features, after.features, strict=True):
        assert (one.side, one.num_rows) == (two.side, two.num_rows)
        assert before.feature_values(one.name).equals(after.feature_values(one.name))
    assert stored_item_values(folder, "shelf") == stored_item_values(place / "out", "shelf")
    counts = pq.read_table(place / "out" / "features" / "place.parquet")["count"].to_pylist()
    assert counts == np.bincount(after.event_features["place"], minlength=4).tolist()


def test_the_same_logs_give_the_same_arrays(old, tmp_path):
    folder, text = old
    options = PrepareOptions(**ROLES, string_ids=text, vocabulary_of=str(folder))
    manifest = prepare("events", [folder.parent / "log.parquet"], tmp_path / "out", options)
    first, second = PreparedData.open(folder), PreparedData.open(tmp_path / "out")
    assert np.array_equal(first.items, second.items)
    for name, rows in first.event_features.items():
        assert np.array_equal(rows, second.event_features[name])
    # A vocabulary's vocabulary is the first folder's.
    assert manifest["vocabulary"] == first.manifest["content_hash"] != manifest["content_hash"]
    options = PrepareOptions(**ROLES, string_ids=text, vocabulary_of=str(tmp_path / "out"))
    again = prepare("events", [folder.parent / "log.parquet"], tmp_path / "again", options)
    assert (again["vocabulary"], again["content_hash"]) == (manifest["vocabulary"], manifest["content_hash"])
    module = SequenceDataModule(tmp_path / "again", num_negatives=2, num_workers=0)
    assert [table.num_rows for table in module.features] == [table.num_rows for table in first.features]
    batch = next(iter(module.predict_dataloader()))
    assert set(batch.features) == {"kind", "place"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for known in (folder, tmp_path / "out"):
            module.load_state_dict(SequenceDataModule(known, num_negatives=2).state_dict())
        module.load_state_dict({"content_hash": first.manifest["content_hash"]})  # of an earlier version
    with pytest.warns(UserWarning, match="new logs are prepared for a model with --vocabulary-of"):
        module.load_state_dict({"content_hash": "sha256:other"})


@pytest.mark.parametrize(
    "cells",
    [["True", "False", "TRUE"], ["2020-01-02", "x", "2020-01-02"], ["2020-01-01T00:00:00", "2020-01-02", ""], ["7", "1.5", ""]],
)
def test_cells_of_csv_mean_the_same_again(cells, tmp_path):
    """Whatever their type may look like; and a column without values is that of missing ones."""

    def rows(out, cells, **options):
        lines = [f"1,{item},{100 + item},{cell}" for item, cell in enumerate(cells)]
        (tmp_path / "log.csv").write_text("\n".join(["user,item,time,mark", *lines, ""]))
        prepare("events", [tmp_path / "log.csv"], tmp_path / out, PrepareOptions(**ROLES, **options))
        data = PreparedData.open(tmp_path / out)
        assert data.feature_rows("mark", cells).tolist() == data.event_features["mark"].tolist()
        return data.event_features["mark"].tolist()

    first = rows("out", cells, features=("mark",))
    assert sorted(set(first) - {0}) == list(range(1, 1 + len(set(cells) - {""})))
    assert rows("again", cells, vocabulary_of=str(tmp_path / "out")) == first
    assert rows("missing", [""] * 3, vocabulary_of=str(tmp_path / "out")) == [0, 0, 0]


def test_what_cannot_be(old, tmp_path):
    folder, text = old
    log = _log(tmp_path / "log.parquet", OLD, text)

    def run(error, says, **options):
        with pytest.raises(error, match=re.escape(says)):
            prepare("events", [log], tmp_path / "out", PrepareOptions(**ROLES | {"vocabulary_of": str(folder), **options}))
        assert not (tmp_path / "out").exists()

    run(ConfigurationError, "--item-features cannot be given with --vocabulary-of", item_features=("x.csv:shelf",))
    run(ConfigurationError, f"but the events of {folder} have kind, place; leave --features out", features=("kind",))
    run(DataError, "--vocabulary-of are", string_ids=not text)
    run(DataError, "no such prepared folder", vocabulary_of=str(tmp_path / "nowhere"))
    table = pq.read_table(log)
    table = table.set_column(3, "kind", table["kind"].cast(pa.string()))
    pq.write_table(table, log)
    run(DataError, "feature 'kind' is of type string in the logs, but of type int64 in --vocabulary-of", string_ids=text)


def test_command_line(old, tmp_path, capsys):
    folder, text = old
    log = _log(tmp_path / "log.parquet", [*OLD, (0, 777, 900, 1, "a")], text)
    arguments = [
        "prepare",
        "events",
        str(log),
        "--user",
        "user",
        "--item",
        "item",
        "--time",
        "time",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main([*arguments, "--vocabulary-of", str(folder), *(["--string-ids"] if text else [])]) == 0
    assert "item known" in capsys.readouterr().out
    assert [step["events"] for step in PreparedData.open(tmp_path / "o").manifest["counts"]] == [31, 30, 30]
