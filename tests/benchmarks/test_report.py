"""The table and the JSON file shared by the benchmark scripts."""

import argparse
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from _report import Report, parse_arguments


def test_options_are_added_to_the_script_s_own():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=3)
    parsed = parse_arguments(parser, ["--json", "a/b.json", "--quick"])
    assert (parsed.rows, parsed.json, parsed.quick) == (3, Path("a/b.json"), True)
    assert parse_arguments(argparse.ArgumentParser(), []).json is None


@pytest.mark.parametrize(
    ("bound", "holds", "target"),
    [
        ({"at_most": 4.0}, True, "≤ 4"),
        ({"at_most": 2.0}, False, "≤ 2"),
        ({"at_least": 3.0}, True, "≥ 3"),
        ({"at_least": 3.5}, False, "≥ 3.5"),
        ({}, None, None),
    ],
)
def test_promise_is_judged(bound, holds, target):
    row = Report("x").add("peak", 3.0, "GiB", baseline=8.0, **bound)
    assert (row.holds, row.target, row.baseline) == (holds, target, 8.0)


def test_not_a_number_keeps_no_promise():
    report = Report("x")
    assert report.add("a", float("nan"), "s", at_most=1.0).holds is False
    assert report.add("b", float("nan"), "s", at_least=1.0).holds is False


def test_two_bounds_are_refused():
    with pytest.raises(ValueError, match="not both"):
        Report("x").add("a", 1.0, "s", at_most=1.0, at_least=0.0)


def test_exit_status_tells_broken_promises(tmp_path, capsys):
    report = Report("x")
    assert report.finish(None) == 1, "nothing measured is no success"
    report.add("a", 1.0, "s", at_most=2.0)
    assert report.finish(None) == 0
    report.add("b", 3.0, "s", at_most=2.0)
    assert report.finish(tmp_path / "deep" / "x.json") == 1
    assert str(tmp_path / "deep" / "x.json") in capsys.readouterr().out


def test_json_holds_the_rows_and_nothing_is_left_beside_it(tmp_path):
    report = Report("prepare", quick=True)
    report.add("rows", 1234567.0, "rows/s", baseline=1000.0, at_least=1.0)
    report.note("on a short file")
    path = tmp_path / "out.json"
    report.write(path)
    report.write(path)  # a second run replaces the first
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored["rows"] == [
        {"claim": "rows", "value": 1234567.0, "unit": "rows/s", "baseline": 1000.0, "target": "≥ 1", "holds": True}
    ]
    assert (stored["quick"], stored["notes"]) == (True, ["on a short file"])


def test_interrupted_write_leaves_no_file(tmp_path):
    report = Report("x")
    report.add("a", float("nan"), "s")  # JSON has no NaN: refused rather than written as an unreadable file
    with pytest.raises(ValueError, match="JSON"):
        report.write(tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


def test_table_shows_every_number():
    report = Report("prepare")
    report.add("throughput", 1234567.0, "rows/s", baseline=0.00012, at_least=2e6)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    report.print(console)
    text = console.export_text()
    for expected in ("prepare", "throughput", "1,234,567", "1.200e-04", "≥ 2,000,000", "rows/s", "no"):
        assert expected in text
