"""HSTU, FuXi and SASRec on four public data sets, and HSTU with features on two, as a user runs them from the command line.

Each run is `turbogr fit` until validation has stopped improving and `turbogr test` of the best epoch. Every finished run is a
row in a file of JSON lines; runs that stand there are not repeated, so a stopped matrix is taken up again by the same command,
and a finished one only prints its table. `--results FILE` measures anew into another file, `--page` writes the tables of
docs/results.md.

MovieLens-100K comes from the package registry; the other data sets are looked for in `--data`, and left out where they are not.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from _report import Report, parse_arguments
from _results import PAGE, RESULTS, SHARED_DATA, add_row, markdown_table, read_rows, write_section
from _runs import call, fit_and_test, shown

import turbogr

MODELS = {"hstu": "HSTU", "fuxi": "FuXi", "sasrec": "SASRec"}
SEEDS = (1, 2)
METRICS = ("HR@10", "HR@50", "HR@200", "NDCG@10", "NDCG@50", "NDCG@200")

Row = dict[str, Any]


@dataclass(frozen=True)
class Yardstick:
    """A data set and what is trained on it.

    Attributes:
        title: what it is called.
        raw: its file in the folder of real data, None where it is fetched.
        source: the source of `turbogr data prepare`.
        prepare: further options of `turbogr data prepare`.
        models: what is compared: names of recipes in movielens-100k/, or variants of HSTU.
        options: of `turbogr fit` for all of them, beyond the recipe's.
        of_model: and for one of them: what its times need, or what makes the variant.
        epochs: at most.
        patience: epochs without a better NDCG@10 on validation after which a run ends.
    """

    title: str
    raw: str | None
    source: str
    prepare: tuple[str, ...] = ()
    models: Mapping[str, str] = field(default_factory=lambda: MODELS)
    options: tuple[str, ...] = ()
    of_model: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    epochs: int = 100
    patience: int = 15


RAW_KUAIRAND = "kuairand-27k-sample/log_standard_4_08_to_4_21_27k.csv"
KUAIRAND = ("--model.backbone.dropout", "0.5")
SECONDS = ("--model.backbone.time.unit", "1000")
VARIANTS = {"without": "HSTU without features", "sum": "with features, sum", "concat": "with features, concat"}
OF_VARIANT = {
    "without": ("--data.features", "[]"),
    "sum": ("--data.features", "all"),
    "concat": ("--data.features", "all", "--model.combine", "concat"),
}
YARDSTICKS = {
    "movielens-100k": Yardstick("MovieLens-100K", None, "movielens"),
    "ml-latest-small": Yardstick("MovieLens latest-small", "ml-latest-small/ratings.csv", "movielens", epochs=200, patience=25),
    "kuairand-27k-sample": Yardstick(
        "KuaiRand-27K, sample",
        RAW_KUAIRAND,
        "kuairand",
        options=KUAIRAND,
        of_model={"hstu": SECONDS, "fuxi": ("--model.backbone.time_encoder.unit", "86400000")},
        epochs=200,
    ),
    "amazon-beauty": Yardstick(
        "Amazon Beauty",
        "amazon/Beauty.txt",
        "sequences",
        options=("--model.backbone.dropout", "0.5", "--data.max_length", "50", "--data.batch_size", "128"),
        of_model={"hstu": ("--model.backbone.time", "null"), "fuxi": ("--model.backbone.time_encoder.unit", "1")},
        epochs=20,
        patience=2,
    ),
}
FEATURES = {
    "kuairand-27k-sample-features": Yardstick(
        "KuaiRand-27K, sample: actions and tab of each event",
        RAW_KUAIRAND,
        "kuairand",
        prepare=("--features", "actions,tab"),
        models=VARIANTS,
        options=(*KUAIRAND, *SECONDS),
        of_model=OF_VARIANT,
    ),
    "movielens-100k-features": Yardstick(
        "MovieLens-100K: rating of each event",
        None,
        "movielens",
        prepare=("--features", "rating"),
        models=VARIANTS,
        of_model=OF_VARIANT,
    ),
}
ALL = {**YARDSTICKS, **FEATURES}


def data_commands(name: str, raw: str) -> list[list[str]]:
    """What prepares a data set in `data/`, as arguments of `turbogr`; `raw` is the folder that has its files, or nothing."""
    yardstick = ALL[name]
    fetch, file = [], f"{raw}/{yardstick.raw}" if raw else yardstick.raw
    if yardstick.raw is None:
        file = "data/raw/movielens-100k"
        fetch = [["data", "fetch", "movielens-100k", "--out", file]]
    return [*fetch, ["data", "prepare", yardstick.source, str(file), *yardstick.prepare, "--out", f"data/{name}"]]


def fit_command(name: str, model: str, seed: int) -> list[str]:
    """What trains a model, as arguments of `turbogr`."""
    yardstick = ALL[name]
    recipe = model if model in MODELS else "hstu"
    stop = ("EarlyStopping", "val/NDCG@10", "max", str(yardstick.patience))
    keys = ("callbacks+", "callbacks.monitor", "callbacks.mode", "callbacks.patience")
    return [
        *("fit", "-c", f"movielens-100k/{recipe}.yaml", "--data.path", f"data/{name}"),
        *("--trainer.default_root_dir", run_folder(name, model, seed), "--seed_everything", str(seed)),
        *(*yardstick.options, *yardstick.of_model.get(model, ()), "--trainer.max_epochs", str(yardstick.epochs)),
        *(f"--trainer.{key}={value}" for key, value in zip(keys, stop, strict=True)),
    ]


def run_folder(name: str, model: str, seed: int) -> str:
    """Where a run leaves its files."""
    return f"runs/{name}-{model}-{seed}"


def prepare(name: str, raw: Path, folder: Path) -> bool:
    """Prepares a data set in folder/data; False if its files are not there."""
    file = ALL[name].raw
    if file is not None and not (raw / file).is_file():
        print(f"{ALL[name].title} is left out: no {raw / file}", file=sys.stderr)
        return False
    if not (folder / "data" / name / "manifest.json").is_file():
        for command in data_commands(name, str(raw)):
            if command[1] == "prepare" or not (folder / command[-1]).is_dir():
                call(command, folder)
    return True


def run(name: str, model: str, seed: int, folder: Path) -> Row:
    """Trains and tests a model; returns the row."""
    command = fit_command(name, model, seed)
    done = fit_and_test(command, run_folder(name, model, seed), folder)
    tested = done.tested
    validations = [row for row in done.logged if "val/NDCG@10" in row]
    best = next(row for row in validations if row["epoch"] == tested["epoch"])
    return {
        "data": name,
        "model": model,
        "seed": seed,
        "epochs": len(validations),
        "best_epoch": tested["epoch"] + 1,
        "validation": {metric: best[f"val/{metric}"] for metric in METRICS},
        **{who: {metric: tested["metrics"][key][metric] for metric in METRICS} for who, key in TESTED.items()},
        "fit_seconds": round(done.fit_seconds, 1),
        "fit_cpu_seconds": round(done.fit_cpu_seconds, 1),
        "command": shown(command),
        "turbogr": turbogr.__version__,
    }


BASELINES = ("sasrec", "without")
"""What the others are compared with."""

TESTED = {"test": "model", "popularity": "popularity", "random": "random"}
"""Key of a row -> key of the metrics in test.json."""


def wanted(names: Iterable[str], seeds: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """The matrix, in the order in which it is run: every model once, before the next seed."""
    return ((name, model, seed) for name in names for seed in seeds for model in ALL[name].models)


def of(rows: Sequence[Row], name: str, model: str) -> list[Row]:
    """The rows of a model on a data set, by seed."""
    return sorted((row for row in rows if (row["data"], row["model"]) == (name, model)), key=lambda row: row["seed"])


def mean(rows: Sequence[Row], metric: str) -> float:
    """Of a test metric over seeds."""
    return statistics.fmean(row["test"][metric] for row in rows)


def seed_noise(rows: Sequence[Row], name: str, metric: str) -> float:
    """Standard error of the difference between two models' means, from the spread of seeds pooled over the models.

    nan where no model has two seeds.
    """
    values = [[row["test"][metric] for row in of(rows, name, model)] for model in ALL[name].models]
    squares = sum(sum((x - statistics.fmean(group)) ** 2 for x in group) for group in values if group)
    freedom = sum(len(group) - 1 for group in values if group)
    if not freedom:
        return math.nan
    return math.sqrt(squares / freedom * 2 / min(len(group) for group in values if group))


def data_table(rows: Sequence[Row], name: str) -> str:
    """Test metrics of the models and of popularity on one data set, as Markdown: mean and half the range over seeds."""
    header = ["test", *METRICS, "best epoch", "epochs", "CPU s"]
    lines = []
    for model, title in ALL[name].models.items():
        runs = of(rows, name, model)
        if not runs:
            continue
        cells = [spread([row["test"][metric] for row in runs]) for metric in METRICS]
        counts = [", ".join(whole(row.get(key)) for row in runs) for key in ("best_epoch", "epochs", "fit_cpu_seconds")]
        lines.append([title, *cells, *counts])
    for who in ("popularity", "random"):
        first = next(row for row in rows if row["data"] == name)
        lines.append([who, *(decimal(first[who][metric]) for metric in METRICS), "", "", ""])
    return markdown_table(header, lines)


def spread(values: Sequence[float]) -> str:
    """`.1234 ± .0012`: the mean, and half the distance from the least to the most."""
    text = decimal(statistics.fmean(values))
    return f"{text} ± {decimal((max(values) - min(values)) / 2)}" if len(values) > 1 else text


def whole(value: float | None) -> str:
    """Without decimals; a dash for what was not measured."""
    return "-" if value is None else f"{value:.0f}"


def decimal(value: float) -> str:
    """Four places, without the zero before the point."""
    return f"{value:.4f}".removeprefix("0")


UNBROKEN: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def results_section(rows: Sequence[Row], yardsticks: Mapping[str, Yardstick]) -> str:
    """Every data set's table and the commands that made it, as Markdown."""
    parts = []
    for name, yardstick in yardsticks.items():
        models = [model for model in yardstick.models if of(rows, name, model)]
        if not models:
            continue
        typed = [*data_commands(name, ""), *(fit_command(name, model, SEEDS[0]) for model in models)]
        commands = "\n".join(" \\\n    ".join(textwrap.wrap(shown(each), 112, **UNBROKEN)) for each in typed)
        parts.append(f"### {yardstick.title}\n\n{data_table(rows, name)}\n\n```console\n{commands}\n```")
    return "\n\n".join(parts)


def report_rows(report: Report, rows: Sequence[Row]) -> None:
    """One claim a model and data set; on MovieLens, HSTU and FuXi are not below SASRec by more than the seeds' noise."""
    for name, yardstick in ALL.items():
        for model, title in yardstick.models.items():
            runs = of(rows, name, model)
            if not runs:
                continue
            other = [] if model in BASELINES else [row for each in BASELINES for row in of(rows, name, each)]
            baseline = mean(other, "NDCG@10") if other else runs[0]["popularity"]["NDCG@10"]
            noise = seed_noise(rows, name, "NDCG@10")
            promised = bool(other) and name in ("movielens-100k", "ml-latest-small") and not math.isnan(noise)
            report.add(
                f"{yardstick.title}, {title}: test NDCG@10, mean of {len(runs)} seeds",
                mean(runs, "NDCG@10"),
                "",
                baseline=baseline,
                at_least=baseline - 2 * noise if promised else None,
            )
    report.note(
        "baselines: SASRec, HSTU without features; of these popularity. Promised: SASRec less twice the seeds' standard error"
    )


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS / "yardsticks.jsonl", help="rows of finished runs, JSON lines")
    parser.add_argument("--folder", type=Path, help="where data/ and runs/ are kept; a temporary folder if not given")
    parser.add_argument("--data", type=Path, default=SHARED_DATA, help="folder of the raw data sets")
    parser.add_argument("--only", nargs="+", choices=ALL, default=list(ALL), help="these data sets alone")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/results.md")
    arguments = parse_arguments(parser)
    report = Report("yardsticks", arguments.quick)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        results, runs = arguments.results, list(wanted(arguments.only, SEEDS))
        if arguments.quick:
            results = Path(scratch) / "quick.jsonl"
            sample = "kuairand-27k-sample"
            name = sample if (arguments.data / RAW_KUAIRAND).is_file() else "movielens-100k"
            ALL[name] = replace(ALL[name], epochs=3)
            runs = list(wanted([name], SEEDS[:1]))
        done = {(row["data"], row["model"], row["seed"]) for row in read_rows(results)}
        missing = [key for key in runs if key not in done]
        report.note(f"{len(runs) - len(missing)} of {len(runs)} runs stood in the results file already")
        there = {name: prepare(name, arguments.data, folder) for name in dict.fromkeys(name for name, _, _ in missing)}
        for number, (name, model, seed) in enumerate(missing, 1):
            if there[name]:
                print(f"run {number} of {len(missing)}", file=sys.stderr)
                add_row(results, run(name, model, seed, folder))
        rows = [row for row in read_rows(results) if row["data"] in {name for name, _, _ in runs}]
    report_rows(report, rows)
    if arguments.page:
        for section, yardsticks in (("yardsticks", YARDSTICKS), ("features", FEATURES)):
            write_section(PAGE, section, results_section(read_rows(arguments.results), yardsticks))
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
