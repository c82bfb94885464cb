"""What benchmarks/logit_sharing.py makes of finished runs; the runs themselves are not repeated here."""

from __future__ import annotations

import math
from itertools import product

import pytest
from _noise import STUDENT, standard_error
from _report import Report
from logit_sharing import (
    COMPARISONS,
    CONTROLLED,
    KS,
    METRICS,
    PRECISIONS,
    SEEDS,
    STUDIES,
    VARIANTS,
    comparison_table,
    explained,
    fit_command,
    precision_section,
    precision_table,
    report_rows,
    run_folder,
    section,
    values,
    wanted,
)

from turbogr.cli import main

NAME = "movielens-100k"


def runs(data: str = NAME, **of_variants: list[float]) -> list[dict]:
    """Seeds 1, 2, ... of each variant, whose metrics all are the value; the later seeds first."""
    rows = []
    for variant, found in of_variants.items():
        name = variant.removeprefix("n").replace("_", "-")
        assert name in VARIANTS
        for seed, value in enumerate(found, 1):
            test = {f"{metric}@{k}": value for metric, k in product(("HR", "NDCG"), KS)}
            rows.append({"data": data, "variant": name, "seed": seed, "best_epoch": 2, "test": test})
    return rows[::-1]


def test_seeds_are_paired():
    rows = runs(n128=[0.1, 0.2, 0.3], n64_shared=[0.11, 0.19], n64=[0.1, 0.2])
    assert values(rows, NAME, ["128", "64-shared"], "HR@10") == [[0.1, 0.2], [0.11, 0.19]]
    lines = comparison_table(rows, NAME, COMPARISONS[0]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    shared = next(line for line in lines if "k = 2" in line).split(" | ")
    assert shared[1:4] == [".1500 ± .0400", "+.0100, -.0100", "+.0000"]


def test_precisions_at_every_k():
    table = precision_table(runs(n128=[0.1, 0.2], n128_fp16=[0.11, 0.2]), NAME)
    assert table.count("+.0050") == 2 * len(KS) == 12


def test_sections_hold_what_has_run():
    rows = runs(n128=[0.1], n64_shared=[0.1], n64=[0.1])
    assert section(rows).count("####") == 1
    assert section(rows).startswith("HSTU by")
    assert section(rows).count("turbogr fit") == 2
    assert "####" not in precision_section(rows)
    assert "128-fp16" in precision_section([*rows, *runs(n128_fp16=[0.1])])


@pytest.mark.parametrize(("shared", "half", "holds"), [(0.20, 0.20, True), (0.20, 0.10, True), (0.17, 0.20, False)])
def test_what_is_promised(shared: float, half: float, holds: bool):
    """Sharing is level with all negatives; what half of them are without it is said and not judged."""
    around = {name: [x - 0.01, x, x + 0.01] for name, x in (("n128", 0.2), ("n64_shared", shared), ("n64", half))}
    report = Report("logit sharing")
    report_rows(report, runs(**around))
    assert [row.holds for row in report.rows if row.holds is not None] == [holds] * len(METRICS)
    assert len(report.rows) == 2 * len(METRICS)


@pytest.mark.parametrize(("fp16", "holds"), [(0.205, True), (0.195, True), (0.26, False), (0.14, False)])
def test_precisions_may_not_differ_either_way(fp16: float, holds: bool):
    report = Report("logit sharing")
    report_rows(report, runs(n128=[0.19, 0.2, 0.21], n128_fp16=[fp16 - 0.01, fp16, fp16 + 0.01]))
    assert [row.holds for row in report.rows] == [holds] * 2 * len(KS)


@pytest.mark.parametrize(("few", "holds"), [(0.1, True), (0.19, False)])
def test_the_control_must_be_told_apart(few: float, holds: bool):
    around = {"n128": [0.19, 0.2, 0.21], "n4": [few - 0.01, few, few + 0.01]}
    for data, expected in ((CONTROLLED, holds), (NAME, None)):
        report = Report("logit sharing")
        report_rows(report, runs(data, **around))
        assert [row.holds for row in report.rows] == [expected] * len(METRICS)


def test_one_seed_promises_nothing():
    report = Report("logit sharing")
    report_rows(report, runs(n128=[0.2], n64_shared=[0.1], n64=[0.1], n128_fp16=[0.1]))
    assert {row.holds for row in report.rows} == {None}


def test_what_seeds_explain():
    groups = [[0.1, 0.2, 0.3], [0.2, 0.2, 0.2]]
    assert standard_error(groups) == pytest.approx(math.sqrt(0.02 / 4 * 2 / 3))
    assert explained(groups) == pytest.approx(STUDENT[4] * standard_error(groups))
    assert math.isnan(standard_error([[0.1], [0.1]]))


def test_the_matrix_takes_variants_side_by_side():
    matrix = list(wanted(list(STUDIES), list(VARIANTS), SEEDS))
    assert len(matrix) == len(set(matrix)) == len({run_folder(*key) for key in matrix}) == 2 * 7 * 3
    assert [seed for _, _, seed in matrix] == sorted(seed for _, _, seed in matrix)
    compared = {each for c in COMPARISONS for each in (c.whole, c.shared, c.half)}
    assert compared | set(PRECISIONS) == set(VARIANTS)
    for c in COMPARISONS:
        assert VARIANTS[c.whole].negatives == 2 * VARIANTS[c.shared].negatives == 2 * VARIANTS[c.half].negatives


@pytest.mark.parametrize("variant", VARIANTS)
def test_commands_parse(variant: str, capsys: pytest.CaptureFixture[str]):
    command = fit_command("kuairand-27k-sample", variant, 2)
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--print_config"])
    assert not stopped.value.code
    assert f"num_negatives: {VARIANTS[variant].negatives}" in capsys.readouterr().out
