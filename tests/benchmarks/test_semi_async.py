"""What benchmarks/semi_async.py makes of finished runs; the runs themselves are not repeated here."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import yaml
from _report import Report
from _results import RESULTS, read_rows, with_section
from _runs import loss_of_epochs
from matplotlib.image import imread
from semi_async import (
    COUNTED,
    MODES,
    PAGE,
    RING_ITEMS,
    RING_STEPS,
    SEEDS,
    STUDENT,
    STUDIES,
    collision_table,
    count,
    data_table,
    draw,
    fit_command,
    of,
    report_rows,
    section,
    seed_noise,
    signed,
    wanted,
    write_rings,
)

from turbogr.cli import main


def row(name: str, mode: str, seed: int, value: float, loss: float = 1.0) -> dict:
    """A finished run whose metrics all are `value`."""
    metrics = STUDIES[name].metrics
    curves = {metric: [value / 2, value] for metric in metrics}
    test = dict.fromkeys(metrics, value)
    return {"data": name, "mode": mode, "seed": seed, "best_epoch": 2, "test": test, "curves": {"loss": [9.0, loss], **curves}}


def runs(name: str, sync: list[float], semi: list[float], loss: float = 1.0) -> list[dict]:
    """Seeds 1, 2, ... in both modes, the later seeds first."""
    rows = [row(name, "sync", seed, value) for seed, value in enumerate(sync, 1)]
    rows += [row(name, "semi_async", seed, value, loss) for seed, value in enumerate(semi, 1)]
    return rows[::-1]


def test_the_table_pairs_seeds():
    rows = runs("movielens-100k", [0.1, 0.2, 0.3], [0.11, 0.19])
    lines = data_table(rows, "movielens-100k").splitlines()
    assert len({line.count("|") for line in lines}) == 1
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in lines[2:]}
    assert cells["sync"][0] == ".1500 ± .0500", "the third seed has no partner"
    assert cells["semi-async - sync, each seed"][:2] == ["+.0100, -.0100"] * 2
    assert cells["mean difference"][0] == signed(0.0)


def test_seed_noise_is_the_standard_error_of_the_difference():
    rows = runs("movielens-100k", [0.1, 0.2], [0.15, 0.15])
    assert seed_noise(rows, "movielens-100k", "HR@10") == pytest.approx(math.sqrt(0.005 / 2 * 2 / 2))
    assert math.isnan(seed_noise(runs("movielens-100k", [0.1], [0.1]), "movielens-100k", "HR@10"))


@pytest.mark.parametrize(("name", "semi", "loss", "holds"), [
    ("movielens-100k", 0.20, 1.0, True),
    ("movielens-100k", 0.17, 1.0, False),
    ("one-ring", 0.17, 2.0, True),
    ("one-ring", 0.20, 1.0, False),
    ("many-rings", 0.20, 1.1, True),
    ("many-rings", 0.17, 2.0, False),
])  # fmt: skip
def test_what_is_promised(name, semi, loss, holds):
    """Level where updates hardly collide; on one ring, harm."""
    report = Report("semi-async")
    report_rows(report, runs(name, [0.19, 0.2, 0.21], [semi - 0.01, semi, semi + 0.01], loss))
    judged = [each.holds for each in report.rows if each.holds is not None]
    assert len(judged) == (2 if name == "movielens-100k" else 3)
    assert judged == [holds] * len(judged)


def test_one_seed_promises_nothing_of_metrics():
    report = Report("semi-async")
    report_rows(report, runs("movielens-100k", [0.2], [0.1]))
    assert [each.holds for each in report.rows] == [None] * 3


def test_student():
    for n, quantile in STUDENT.items():
        t = np.linspace(0, quantile, 20_001)
        density = math.gamma((n + 1) / 2) / math.gamma(n / 2) / math.sqrt(n * math.pi) * (1 + t**2 / n) ** (-(n + 1) / 2)
        assert (density[1:] + density[:-1]).sum() / 2 * t[1] == pytest.approx(0.475, abs=1e-4)


def test_loss_of_epochs():
    logged = [{"epoch": 0.0, "train/loss": 3.0}, {"epoch": 0.0, "train/loss": 1.0}, {"epoch": 0.0, "val/NDCG@10": 0.1}]
    assert loss_of_epochs([*logged, {"epoch": 1.0, "train/loss": 0.5}]) == [2.0, 0.5]


def test_rings(tmp_path):
    write_rings(tmp_path / "rings.txt", 3, 40)
    lines = [list(map(int, line.split())) for line in (tmp_path / "rings.txt").read_text().splitlines()]
    assert [line[0] for line in lines] == list(range(1, 41))
    for _, *items in lines:
        assert len(items) == RING_STEPS
        assert len({(item - 1) // RING_ITEMS for item in items}) == 1, "a user stays on a ring"
        assert all((after - before) % RING_ITEMS == 1 for before, after in pairwise(items))
    assert {(items[0] - 1) // RING_ITEMS for _, *items in lines} == {0, 1, 2}


def test_the_matrix_counts_first_and_then_takes_modes_side_by_side():
    matrix = list(wanted(["one-ring", "many-rings"], list(MODES), [1, 2]))
    assert matrix[:2] == [("one-ring", COUNTED, 1), ("many-rings", COUNTED, 1)]
    assert matrix[2:6] == [(name, mode, 1) for name in ("one-ring", "many-rings") for mode in MODES]


@pytest.mark.parametrize("name", STUDIES)
def test_commands_are_understood(name, capsys):
    """The parser takes every option; nothing is built. Modes differ in nothing but the mode."""
    parsed = []
    for mode in MODES:
        with pytest.raises(SystemExit) as stopped:
            main([*fit_command(name, mode, 2), "--print_config"])
        assert not stopped.value.code
        parsed.append(yaml.safe_load(capsys.readouterr().out))
    sync, semi = (each["trainer"].pop("strategy") for each in parsed)
    assert sync["init_args"].pop("mode") == "sync"
    assert semi["init_args"].pop("mode") == "semi_async"
    assert sync == semi
    assert [each["trainer"].pop("default_root_dir") for each in parsed] == [f"runs/{name}-{mode}-2" for mode in MODES]
    assert parsed[0] == parsed[1]
    assert (parsed[0]["seed_everything"], parsed[0]["trainer"]["max_epochs"]) == (2, STUDIES[name].epochs)


def test_count_and_draw(tmp_path, capsys):
    write_rings(tmp_path / "one-ring.txt", 1, 256)
    main(["data", "prepare", "sequences", str(tmp_path / "one-ring.txt"), "--out", str(tmp_path / "data/one-ring")])
    counted = count("one-ring", tmp_path)
    assert counted["with_negatives"]["alpha"] == 1.0
    assert counted["with_negatives"]["rows"] == RING_ITEMS
    assert 0 < counted["without_negatives"]["alpha"] < 1
    assert collision_table([counted]).count("\n") == 3
    draw(runs("one-ring", [0.5, 0.6], [0.4, 0.3]), tmp_path / "curves.png")
    assert imread(tmp_path / "curves.png").ndim == 3


def test_the_page_is_what_the_rows_say():
    rows = read_rows(RESULTS / "semi_async.jsonl")
    assert {(r["data"], r["mode"], r["seed"]) for r in rows} == set(wanted(list(STUDIES), list(MODES), SEEDS))
    for name in STUDIES:
        assert [each["seed"] for each in of(rows, name, "semi_async")] == list(SEEDS)
    page = PAGE.read_text(encoding="utf-8")
    assert with_section(with_section(page, "curves", section(rows)), "collisions", collision_table(rows)) == page
    report = Report("semi-async")
    report_rows(report, rows)
    assert not [each.claim for each in report.rows if each.holds is False]
