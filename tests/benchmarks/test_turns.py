"""What pipeline.py makes of its turns."""

import os

import pytest
from _report import Report
from _results import with_section
from _turns import NAMES, PAGE, PLAIN, SEMI, SERIAL, SPARSE_DIST, SYNC, Turn, add_rows, of_all_ranks, section

STEPS = {SERIAL: 0.40, PLAIN: 0.35, SPARSE_DIST: 0.30, SYNC: 0.32, SEMI: 0.20}


def measured(rank: int, exposed: float, free_rounds: int = 2):
    """Three turns behind the link; the second rank is a little slower, and the last turn of all sides twice as long."""
    factor = 1.0 + 0.1 * rank

    def turns(count: int):
        return {
            name: [Turn(wall * factor * (1 + (i == 2)), wall / 2, 0.9 - exposed, exposed, 0.1) for i in range(count)]
            for name, wall in STEPS.items()
        }

    return {"turns": {"link": turns(3), "free": turns(free_rounds)}}


def rows_of(exposed: float, quick: bool = False, ranks: int = 2):
    report = Report("pipeline", quick)
    add_rows(report, [measured(rank, exposed) for rank in range(ranks)])
    assert len({row.claim for row in report.rows}) == len(report.rows)
    return {row.claim: row for row in report.rows}


def test_turns_of_all_ranks():
    """The slowest rank says when a step has ended, the shares are the mean of both."""
    [turn, *_] = of_all_ranks([measured(0, 0.02), measured(1, 0.06)], "link")[SEMI]
    assert (turn.wall, turn.exposed, turn.process) == pytest.approx((0.22, 0.04, 0.1))


@pytest.mark.parametrize(("exposed", "holds"), [(0.05, True), (0.06, False)])
def test_promises(monkeypatch, exposed, holds):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    rows = rows_of(exposed)
    row = rows["ours, semi-async: exposed communication"]
    assert (row.value, row.holds) == (pytest.approx(100 * exposed), holds)
    faster = rows["ours, semi-async: speed over TorchRec, SparseDist"]
    assert (faster.value, faster.holds) == (pytest.approx(1.5), True)
    assert rows["ours, semi-async: speed over serial"].value == pytest.approx(2.0)
    assert sum(row.target is not None for row in rows.values()) == 3
    assert sum(row.target is not None for row in rows_of(exposed, quick=True).values()) == 2
    assert all(row.target is None for row in rows_of(exposed, ranks=3).values()), "ranks share cores"


def test_the_page():
    """A line for each side; what is missed is said."""
    text = section([measured(0, 0.06, 0), measured(1, 0.06, 0)], ["one way"])
    assert text in with_section(PAGE.read_text(encoding="utf-8"), "pipeline", text)
    assert [line.split(" | ")[0] for line in text.splitlines()[2:7]] == [f"| {NAMES[name]}" for name in STEPS]
    assert "- 2.00 times as fast as serial: everything waited for where it is begun (1.5 asked);" in text
    assert "6.0 % (5.4 asked, and **not** reached)" in text
    assert text.endswith("- one way")
    assert "5.0 % (5.4 asked)" in section([measured(0, 0.05)], [])
    assert "without the link 1.50;" in section([measured(0, 0.05)], [])
