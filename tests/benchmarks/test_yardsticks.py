"""What benchmarks/yardsticks.py and scaling_law.py make of finished runs; the runs themselves are not repeated here."""

from __future__ import annotations

import math
import shlex

import numpy as np
import pytest
import yaml
from _report import Report
from _results import PAGE, RESULTS, add_row, markdown_table, read_rows, with_section
from scaling_law import draw, fit_law, law_of, section
from yardsticks import (
    ALL,
    FEATURES,
    METRICS,
    SEEDS,
    YARDSTICKS,
    data_commands,
    data_table,
    fit_command,
    report_rows,
    results_section,
    seed_noise,
    shown,
    spread,
    wanted,
)

from turbogr.cli import main


def row(model: str, seed: int, value: float, data: str = "movielens-100k") -> dict:
    """A finished run whose test metrics all are `value`."""
    return {
        "data": data,
        "model": model,
        "seed": seed,
        "epochs": 30 + seed,
        "best_epoch": 20 + seed,
        "validation": dict.fromkeys(METRICS, value),
        "test": dict.fromkeys(METRICS, value),
        "popularity": dict.fromkeys(METRICS, 0.05),
        "random": dict.fromkeys(METRICS, 0.005),
        "fit_seconds": 100.0,
        "fit_cpu_seconds": 90.4,
        "command": shown(fit_command(data, model, seed)),
    }


ROWS = [row("hstu", 2, 0.20), row("hstu", 1, 0.18), row("fuxi", 1, 0.16), row("sasrec", 1, 0.17), row("sasrec", 2, 0.17)]


def test_the_table_has_means_and_half_the_range_over_seeds():
    lines = data_table(ROWS, "movielens-100k").splitlines()
    assert lines[0] == f"| test | {' | '.join(METRICS)} | best epoch | epochs | CPU s |"
    assert len({line.count("|") for line in lines}) == 1
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in lines[2:]}
    assert list(cells) == ["HSTU", "FuXi", "SASRec", "popularity", "random"]
    assert cells["HSTU"][: len(METRICS)] == [".1900 ± .0100"] * len(METRICS)
    assert cells["HSTU"][len(METRICS) :] == ["21, 22", "31, 32", "90, 90 |"], "in the order of the seeds"
    assert cells["FuXi"][0] == ".1600", "one seed has no spread"
    assert cells["popularity"][0] == ".0500"


def test_numbers_as_they_are_written():
    assert spread([0.1234]) == ".1234"
    assert spread([1.0, 1.0]) == "1.0000 ± .0000"
    assert markdown_table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"


def test_seed_noise_is_the_standard_error_of_a_difference():
    # pooled variance (0.02^2 / 2 + 0) / 2 degrees of freedom
    rows = [each for each in ROWS if each["model"] != "fuxi"]
    assert seed_noise(rows, "movielens-100k", "HR@10") == pytest.approx(math.sqrt(0.0002 / 2 * 2 / 2))
    assert math.isnan(seed_noise([row("hstu", 1, 0.2)], "movielens-100k", "HR@10"))


@pytest.mark.parametrize(("hstu", "holds"), [(0.2, True), (0.166, True), (0.15, False)])
def test_the_promise_is_sasrec_less_the_noise(hstu, holds):
    runs = [row("hstu", 1, hstu + 0.002), row("hstu", 2, hstu - 0.002), row("sasrec", 1, 0.172), row("sasrec", 2, 0.168)]
    report = Report("yardsticks")
    report_rows(report, runs)
    assert [each.holds for each in report.rows] == [holds, None]
    assert report.rows[0].baseline == pytest.approx(0.17)
    assert report.rows[1].baseline == 0.05
    elsewhere = Report("yardsticks")
    report_rows(elsewhere, [{**each, "data": "amazon-beauty"} for each in runs])
    assert [each.holds for each in elsewhere.rows] == [None, None]


def test_the_matrix_runs_every_model_before_the_next_seed():
    name = "kuairand-27k-sample-features"
    assert list(wanted([name], [1, 2])) == [(name, model, seed) for seed in (1, 2) for model in ("without", "sum", "concat")]


@pytest.mark.parametrize(("name", "model"), [(name, model) for name, each in ALL.items() for model in each.models])
def test_commands_are_understood(name, model, capsys):
    """The parser takes every option; nothing is built."""
    command = shlex.split(shown(fit_command(name, model, 2)))
    assert command[:2] == ["turbogr", "fit"]
    with pytest.raises(SystemExit) as stopped:
        main([*command[1:], "--print_config"])
    assert not stopped.value.code
    parsed = yaml.safe_load(capsys.readouterr().out)
    assert parsed["seed_everything"] == 2
    assert parsed["trainer"]["max_epochs"] == ALL[name].epochs
    [stopping] = parsed["trainer"]["callbacks"]
    assert stopping["init_args"]["patience"] == ALL[name].patience
    assert (stopping["init_args"]["monitor"], stopping["init_args"]["mode"]) == (parsed["checkpoint"]["monitor"], "max")
    options = parsed["model"]["backbone"]["init_args"]
    assert (options["dim"], options["num_blocks"]) == (50, 2)
    backbone = parsed["model"]["backbone"]["class_path"].rpartition(".")[2]
    times = {"HSTU": options.get("time") and options["time"]["unit"], "SASRec": None}
    unit = times[backbone] if backbone in times else options["time_encoder"]["init_args"]["unit"]
    assert (backbone, unit) in {
        "movielens-100k": {("HSTU", 1), ("FuXi", 86_400), ("SASRec", None)},
        "ml-latest-small": {("HSTU", 1), ("FuXi", 86_400), ("SASRec", None)},
        "kuairand-27k-sample": {("HSTU", 1000), ("FuXi", 86_400_000), ("SASRec", None)},
        "amazon-beauty": {("HSTU", None), ("FuXi", 1), ("SASRec", None)},
        "movielens-100k-features": {("HSTU", 1)},
        "kuairand-27k-sample-features": {("HSTU", 1000)},
    }[name]
    features = {"without": ([], "sum"), "sum": ("all", "sum"), "concat": ("all", "concat")}
    if model in features:
        assert (parsed["data"]["features"], parsed["model"]["combine"]) == features[model]


def test_data_are_prepared_where_the_runs_look_for_them():
    for name in ALL:
        assert data_commands(name, "elsewhere")[-1][-2:] == ["--out", f"data/{name}"]
        command = fit_command(name, "hstu", 1)
        assert command[command.index("--data.path") + 1] == f"data/{name}"


def test_a_page_has_a_table_and_the_commands_of_each_data_set():
    text = results_section([*ROWS, row("sum", 1, 0.3, "movielens-100k-features")], YARDSTICKS)
    assert text.startswith("### MovieLens-100K\n\n| test |")
    assert "| HSTU | .1900 ± .0100 |" in text
    assert "turbogr data fetch movielens-100k" in text
    for model in ("hstu", "fuxi", "sasrec"):
        assert f"turbogr fit -c movielens-100k/{model}.yaml" in text.replace(" \\\n   ", "")
    assert "features" not in text
    assert "latest" not in text, "what was not run is not shown"


def test_rows_are_kept(tmp_path):
    path = tmp_path / "results" / "rows.jsonl"
    assert read_rows(path) == []
    for each in ROWS[:2]:
        add_row(path, each)
    assert read_rows(path) == ROWS[:2]
    assert [file.name for file in path.parent.iterdir()] == ["rows.jsonl"]
    with pytest.raises(ValueError, match="JSON"):
        add_row(path, {"test": math.nan})
    assert read_rows(path) == ROWS[:2]


def test_a_section_of_a_page_is_replaced():
    page = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n"
    new = with_section(page, "x", "new\n")
    assert new == "a\n<!-- x -->\nnew\n<!-- end of x -->\nb\n"
    assert with_section(new, "x", "new") == new
    for damaged in ("nothing", page + page):
        with pytest.raises(ValueError, match="x -->"):
            with_section(damaged, "x", "new")


def test_the_law_is_found_again():
    compute = [1e9, 4e9, 1.6e10, 2.56e11]
    law = fit_law(compute, [0.1 + 0.02 * step for step in (0, 1, 2, 4)])
    assert (law.compute, law.quality, law.gain, law.r_squared) == pytest.approx((1e9, 0.1, 0.02, 1.0))
    assert law(6.4e10) == pytest.approx(0.16)
    noisy = fit_law(compute, [0.1, 0.13, 0.13, 0.18])
    assert noisy.gain == pytest.approx(np.polyfit([0, 1, 2, 4], [0.1, 0.13, 0.13, 0.18], 1)[0])
    assert 0.9 < noisy.r_squared < 1
    with pytest.raises(ValueError, match="two different"):
        fit_law([1e9, 1e9], [0.1, 0.2])
    with pytest.raises(ValueError, match="positive"):
        fit_law([0.0, 1e9], [0.1, 0.2])


def scaled(size: str, seed: int, compute: float, loss: float) -> dict:
    return {"size": size, "seed": seed, "dense": 1000, "compute": compute, "test": loss, "popularity": 8.0, "epoch": 7}


def test_the_law_is_written_and_drawn(tmp_path, capsys):
    rows = [scaled("small", 1, 1e9, 6.0), scaled("small", 2, 1e9, 6.4), scaled("large", 1, 4e9, 5.2)]
    law = law_of(rows)
    assert (law.quality, law.gain) == pytest.approx((0.225, 0.125))
    text = section(rows)
    assert "| small | 1,000 | 1e+09 | 6.0000 / 6.4000 | 0.2500 / 0.2000 | 0.2250 | 7 / 7 |" in text
    assert "Q(C) ≈ 0.2250 + 0.1250 · log4(C / 1e+09)" in text
    draw(rows, law, tmp_path / "law.png")
    assert (tmp_path / "law.png").read_bytes().startswith(b"\x89PNG")
    assert "law.png" in capsys.readouterr().out


def test_the_page_is_what_the_stored_runs_say():
    page = PAGE.read_text(encoding="utf-8")
    rows = read_rows(RESULTS / "yardsticks.jsonl")
    assert with_section(page, "yardsticks", results_section(rows, YARDSTICKS)) == page
    assert with_section(page, "features", results_section(rows, FEATURES)) == page
    sizes = sorted(read_rows(RESULTS / "scaling_law.jsonl"), key=lambda each: (each["compute"], each["seed"]))
    assert with_section(page, "scaling law", section(sizes)) == page


def test_the_stored_runs_are_those_of_the_commands_shown():
    rows = read_rows(RESULTS / "yardsticks.jsonl")
    assert [(each["data"], each["model"], each["seed"]) for each in rows] == list(wanted(ALL, SEEDS))
    for each in rows:
        assert each["command"] == shown(fit_command(each["data"], each["model"], each["seed"]))
        assert each["best_epoch"] <= each["epochs"] <= ALL[each["data"]].epochs
