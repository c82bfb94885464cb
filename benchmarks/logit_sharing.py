"""Half the negatives with logit sharing against all of them, and negatives in half precision, as TurboGR's table 8 does it.

Two real data sets, three seeds. Each run is `turbogr fit` for a fixed number of epochs and `turbogr test` of the epoch that was
best on validation, on one thread, so that `--jobs 2` trains two at a time. Runs of a seed have the same first rows, batches and
dropout; 64 negatives are the same ones with and without sharing, and 128 the same ones in both precisions. Finished runs are
rows in a file of JSON lines and are not repeated; `--results FILE` measures anew, `--page` writes the tables of
docs/negatives.md.

Where a catalogue has some thousand items, 64 negatives a token may be as good as 128, and then sharing has nothing to win. So
there are 8 and 4 as well, and a control: whether three seeds can tell anything apart, such as 4 negatives from 128.

MovieLens-100K comes from the package registry; KuaiRand is looked for in `--data`, and left out where it is not.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

from _noise import STUDENT, standard_error
from _report import Report, parse_arguments
from _results import CHECKOUT, RESULTS, SHARED_DATA, add_row, markdown_table, read_rows, write_section
from _runs import fit_and_test, loss_of_epochs, shown
from semi_async import signed
from yardsticks import KUAIRAND, RAW_KUAIRAND, SECONDS, UNBROKEN, decimal, prepare, spread

import turbogr

SEEDS = (1, 2, 3)
KS = (10, 50, 100, 200, 500, 1000)
METRICS = ("HR@10", "NDCG@10")
PAGE = CHECKOUT / "docs" / "negatives.md"

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A data set of yardsticks.py and how it is trained.

    Attributes:
        title: what it is called.
        epochs: of every run.
        options: of `turbogr fit`, beyond the recipe's.
    """

    title: str
    epochs: int
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """How negatives are drawn and used.

    Attributes:
        title: what it is called.
        negatives: drawn for each token.
        options: of `turbogr fit`.
    """

    title: str
    negatives: int
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """What is compared: the names of variants.

    Attributes:
        whole: all negatives.
        shared: half of them, with sharing.
        half: half of them.
    """

    whole: str
    shared: str
    half: str


SHARING = ("--trainer.callbacks+", "turbogr.callbacks.logit_sharing.LogitSharing", "--trainer.callbacks.k", "2")
FP16 = ("--trainer.callbacks+", "turbogr.callbacks.negative_quantization.NegativeQuantization")
STUDIES = {
    "movielens-100k": Study("MovieLens-100K", 60),
    "kuairand-27k-sample": Study("KuaiRand-27K, sample", 80, (*KUAIRAND, *SECONDS)),
}
VARIANTS = {
    "128": Variant("128 negatives", 128),
    "64-shared": Variant("64, logit sharing k = 2", 64, SHARING),
    "64": Variant("64", 64),
    "128-fp16": Variant("128, fp16", 128, (*FP16, "--trainer.callbacks.dtype", "fp16")),
    "8": Variant("8 negatives", 8),
    "4-shared": Variant("4, logit sharing k = 2", 4, SHARING),
    "4": Variant("4", 4),
}
COMPARISONS = (Comparison("128", "64-shared", "64"), Comparison("8", "4-shared", "4"))
PRECISIONS = ("128", "128-fp16")
CONTROL = ("128", "4")
CONTROLLED = "kuairand-27k-sample"
"""Where the control has to show; on MovieLens-100K it does in HR@10, and hardly in NDCG@10."""
HOW = """\
HSTU by `recipes/movielens-100k/hstu.yaml`, so many epochs as the commands say, tested at the epoch that was best on validation:
mean and half the range over seeds 1, 2 and 3, the differences by seed, and the standard error of a difference of two means that
the spread over seeds implies. All runs: `benchmarks/logit_sharing.py`, `docs/results/logit_sharing.jsonl`."""
"""What stands above the tables of a page."""


def fit_command(name: str, variant: str, seed: int) -> list[str]:
    """What trains a variant on a data set, as arguments of `turbogr`."""
    study, how = STUDIES[name], VARIANTS[variant]
    return [
        *("fit", "-c", "movielens-100k/hstu.yaml", "--data.path", f"data/{name}"),
        *("--trainer.default_root_dir", run_folder(name, variant, seed), "--seed_everything", str(seed), *study.options),
        *("--trainer.max_epochs", str(study.epochs), "--model.top_k", json.dumps(KS, separators=(",", ":"))),
        *("--data.num_negatives", str(how.negatives), *how.options),
    ]


def run_folder(name: str, variant: str, seed: int) -> str:
    """Where a run leaves its files."""
    return f"runs/{name}-negatives-{variant}-{seed}"


def run(name: str, variant: str, seed: int, folder: Path) -> Row:
    """Trains and tests; returns the row."""
    command, path = fit_command(name, variant, seed), run_folder(name, variant, seed)
    done = fit_and_test(command, path, folder)
    return {
        "data": name,
        "variant": variant,
        "seed": seed,
        "epochs": sum("val/NDCG@10" in each for each in done.logged),
        "best_epoch": done.tested["epoch"] + 1,
        "test": {f"{metric}@{k}": done.tested["metrics"]["model"][f"{metric}@{k}"] for metric in ("HR", "NDCG") for k in KS},
        "loss": loss_of_epochs(done.logged)[-1],
        "fit_seconds": round(done.fit_seconds, 1),
        "command": shown(command),
        "turbogr": turbogr.__version__,
    }


def of(rows: Sequence[Row], name: str, variant: str) -> dict[int, Row]:
    """The rows of a variant on a data set, by seed."""
    found = {row["seed"]: row for row in rows if (row["data"], row["variant"]) == (name, variant)}
    return dict(sorted(found.items()))


def values(rows: Sequence[Row], name: str, variants: Sequence[str], metric: str) -> list[list[float]]:
    """A test metric of each variant, of the seeds that all of them have."""
    runs = [of(rows, name, variant) for variant in variants]
    seeds = [seed for seed in runs[0] if all(seed in each for each in runs)]
    return [[each[seed]["test"][metric] for seed in seeds] for each in runs]


def comparison_table(rows: Sequence[Row], name: str, comparison: Comparison) -> str:
    """All, half with sharing, and half, with the differences to all, as Markdown."""
    variants = (comparison.whole, comparison.shared, comparison.half)
    groups = {metric: values(rows, name, variants, metric) for metric in METRICS}
    lines = []
    for place, variant in enumerate(variants):
        cells = [VARIANTS[variant].title]
        for metric in METRICS:
            own, whole = groups[metric][place], groups[metric][0]
            cells.append(spread(own))
            cells.append(", ".join(signed(a - b) for a, b in zip(own, whole, strict=True)) if place else "")
            cells.append(signed(statistics.fmean(own) - statistics.fmean(whole)) if place else "")
        lines.append(cells)
    errors = [standard_error(groups[metric]) for metric in METRICS]
    lines.append(["standard error by seeds", *(cell for error in errors for cell in ("", "", shown_error(error)))])
    header = ["", *(cell for metric in METRICS for cell in (f"test {metric}", "less all, each seed", "mean"))]
    return markdown_table(header, lines)


def precision_table(rows: Sequence[Row], name: str) -> str:
    """The negatives' rows in half precision against single, at every K, as Markdown."""
    lines = []
    for metric in ("HR", "NDCG"):
        for k in KS:
            groups = values(rows, name, PRECISIONS, f"{metric}@{k}")
            single, half = map(statistics.fmean, groups)
            cells = [f"{metric}@{k}", *map(spread, groups), signed(half - single), shown_error(standard_error(groups))]
            lines.append(cells)
    return markdown_table(["test", "fp32", "fp16", "fp16 - fp32", "standard error by seeds"], lines)


def shown_error(error: float) -> str:
    """Four places; a dash where one seed says nothing."""
    return "-" if math.isnan(error) else decimal(error)


def section(rows: Sequence[Row]) -> str:
    """Every data set's tables and the commands that made them, as Markdown."""
    parts = [HOW]
    for name, study in STUDIES.items():
        for comparison in COMPARISONS:
            if complete(rows, name, (comparison.whole, comparison.shared, comparison.half)):
                commands = "\n".join(typed(fit_command(name, each, 1)) for each in (comparison.whole, comparison.shared))
                title = f"#### {study.title}: {VARIANTS[comparison.whole].title} against {VARIANTS[comparison.shared].title}"
                parts.append(f"{title}\n\n{comparison_table(rows, name, comparison)}\n\n```console\n{commands}\n```")
    return "\n\n".join(parts)


def precision_section(rows: Sequence[Row]) -> str:
    """Every data set's table of precisions and the command, as Markdown."""
    parts: list[str] = []
    for name, study in STUDIES.items():
        if complete(rows, name, PRECISIONS):
            command = typed(fit_command(name, PRECISIONS[1], 1))
            title = f"#### {study.title}: 128 negatives in fp16 against fp32"
            parts.append(f"{title}\n\n{precision_table(rows, name)}\n\n```console\n{command}\n```")
    return "\n\n".join(parts)


def typed(command: Sequence[str]) -> str:
    """A command in lines that fit a page."""
    return " \\\n    ".join(textwrap.wrap(shown(command), 112, **UNBROKEN))


def complete(rows: Sequence[Row], name: str, variants: Sequence[str]) -> bool:
    """Whether all of these have run with one seed at least."""
    return bool(values(rows, name, variants, METRICS[0])[0])


def report_rows(report: Report, rows: Sequence[Row]) -> None:
    """What is claimed: sharing is not below all negatives, nor fp16 away from fp32, by more than the seeds' noise."""
    for (name, study), comparison in product(STUDIES.items(), COMPARISONS):
        if not complete(rows, name, (comparison.whole, comparison.shared, comparison.half)):
            continue
        for metric in METRICS:
            groups = values(rows, name, (comparison.whole, comparison.shared, comparison.half), metric)
            whole, shared, half = map(statistics.fmean, groups)
            seeds, title = len(groups[0]), VARIANTS[comparison.shared].title
            promise = {} if seeds < 2 else {"at_least": whole - explained(groups)}
            report.add(f"{study.title}: {title}, test {metric}, mean of {seeds} seeds", shared, "", baseline=whole, **promise)
            report.add(f"{study.title}: {VARIANTS[comparison.half].title} without, test {metric}", half, "", baseline=whole)
    for name, study in STUDIES.items():
        if complete(rows, name, CONTROL):
            for metric in METRICS:
                groups = values(rows, name, CONTROL, metric)
                whole, few = map(statistics.fmean, groups)
                promise = {"at_most": whole - explained(groups)} if name == CONTROLLED and len(groups[0]) > 1 else {}
                report.add(f"{study.title}: control, 4 negatives, test {metric}", few, "", baseline=whole, **promise)
        if complete(rows, name, PRECISIONS):
            for metric, k in product(("HR", "NDCG"), KS):
                groups = values(rows, name, PRECISIONS, f"{metric}@{k}")
                single, half = map(statistics.fmean, groups)
                promise = {} if len(groups[0]) < 2 else {"at_most": explained(groups)}
                report.add(f"{study.title}: {metric}@{k}, |fp16 - fp32|", abs(half - single), "", **promise)
    report.note(
        "baseline: all negatives, with the same seeds; promised: not below it, and fp16 not away from fp32, by more than seeds "
        "explain (95 %, Student's t)"
    )
    report.note(f"control: with 4 negatives, {STUDIES[CONTROLLED].title} must be below 128 by as much")


def explained(groups: Sequence[Sequence[float]]) -> float:
    """The difference of two means that seeds alone may make."""
    return STUDENT.get(sum(len(group) - 1 for group in groups), 2.0) * standard_error(groups)


def wanted(names: Sequence[str], variants: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """The matrix, in the order in which it is run: every data set and variant once, before the next seed."""
    return ((name, variant, seed) for seed, name, variant in product(seeds, names, variants))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "logit_sharing.jsonl", help="rows of finished runs, JSON lines"
    )
    parser.add_argument("--folder", type=Path, help="where data/ and runs/ are kept; a temporary folder if not given")
    parser.add_argument("--data", type=Path, default=SHARED_DATA, help="folder of the raw data sets")
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=list(STUDIES), help="these data sets alone")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="these variants alone")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, on one thread each")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/negatives.md")
    arguments = parse_arguments(parser)
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    report = Report("logit sharing", arguments.quick)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        results, runs = arguments.results, list(wanted(arguments.only, arguments.variants, SEEDS))
        if arguments.quick:
            results = Path(scratch) / "quick.jsonl"
            sample = "kuairand-27k-sample"
            name = sample if (arguments.data / RAW_KUAIRAND).is_file() else "movielens-100k"
            STUDIES[name] = replace(STUDIES[name], epochs=1)
            runs = list(wanted([name], ["8", "4-shared", "4"], SEEDS[:1]))
        done = {(row["data"], row["variant"], row["seed"]) for row in read_rows(results)}
        missing = [key for key in runs if key not in done]
        report.note(f"{len(runs) - len(missing)} of {len(runs)} runs stood in the results file already")
        there = {name: prepare(name, arguments.data, folder) for name in dict.fromkeys(name for name, _, _ in missing)}
        missing = [key for key in missing if there[key[0]]]
        one_at_a_time = Lock()

        def finish(numbered: tuple[int, tuple[str, str, int]]) -> None:
            number, (name, variant, seed) = numbered
            print(f"run {number} of {len(missing)}", file=sys.stderr, flush=True)
            row = run(name, variant, seed, folder)
            with one_at_a_time:
                add_row(results, row)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(finish, enumerate(missing, 1)))
        rows = [row for row in read_rows(results) if row["data"] in {name for name, _, _ in runs}]
    report_rows(report, rows)
    if arguments.page:
        write_section(PAGE, "logit sharing", section(read_rows(arguments.results)))
        write_section(PAGE, "precision", precision_section(read_rows(arguments.results)))
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
