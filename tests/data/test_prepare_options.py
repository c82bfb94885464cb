"""`prepare`: options and the command line; what is impossible is one clear error."""

import pytest

from tests.data.logs import START_MS, Event, some_triples, write_kuairand, write_triples
from turbogr.data.commands import main
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.prepared import PreparedData
from turbogr.errors import ConfigurationError, DataError

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


def test_command_line(tmp_path, capsys):
    file = write_triples(tmp_path / "u.data", some_triples())
    arguments = ["prepare", "movielens", str(file), "--out", str(tmp_path / "out"), "--k-core", "3", "--k-core-passes", "1"]
    assert main([*arguments, "--max-length", "7", "--protocol", "published", "--repeats", "last", "--min-rating", "2"]) == 0
    shown = capsys.readouterr()
    manifest = PreparedData.open(tmp_path / "out").manifest
    assert manifest["options"] == {
        "repeats": "last", "k_core": 3, "k_core_passes": 1, "max_length": 7, "protocol": "published", "memory_limit": "2GB",
        "min_rating": 2.0, "features": [], "item_features": [], "item_key": None, "text_features": [],
        "vocabulary_of": None,
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
