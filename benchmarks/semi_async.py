"""Training with mode semi_async against mode sync: two real data sets, and two made ones that show when the delay hurts.

Each run is `turbogr fit` for a fixed number of epochs and `turbogr test` of the epoch that was best on validation, on one
thread, so that `--jobs 2` trains two at a time. Both modes of a seed have the same first rows, batches, negatives and dropout:
what differs between them is the delay alone. Finished runs are rows in a file of JSON lines and are not repeated;
`--results FILE` measures anew, `--page` writes the tables of docs/semi-async.md and draws its picture.

The made sets are rings: a user walks a dozen items along a ring of 24, so that the next item is certain. One ring is a
catalogue of 24 rows of which every step updates every one; 400 rings are 9,600 rows. Both are trained with the same large
learning rate of the rows, and the one ring also with the recipe's.

What the data sets' collisions are is counted by the callback Collisions over the first steps of a training.

MovieLens-100K comes from the package registry; KuaiRand is looked for in `--data`, and left out where it is not.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import random
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from threading import Lock
from typing import Any

from _noise import STUDENT, standard_error
from _report import Report, parse_arguments
from _results import CHECKOUT, RESULTS, SHARED_DATA, add_row, markdown_table, read_rows, write_section
from _runs import call, fit_and_test, loss_of_epochs, shown
from matplotlib.figure import Figure
from yardsticks import KUAIRAND, SECONDS, UNBROKEN, decimal, spread
from yardsticks import prepare as prepare_real

import turbogr  # before torch: its OpenMP settings

import lightning.pytorch as pl  # isort: skip
from turbogr.callbacks.collisions import Collisions
from turbogr.data.datamodule import SequenceDataModule
from turbogr.files import replace_file
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever

MODES = {"sync": "sync", "semi_async": "semi-async"}
COLOURS = {"sync": "#7b8794", "semi_async": "#2563eb"}
SEEDS = (1, 2, 3)
COUNTED = "counted"
"""In place of a mode: a row of what Collisions says."""
WINDOW = 50
"""Steps that it counts."""
PAGE = CHECKOUT / "docs" / "semi-async.md"
PNG = CHECKOUT / "docs" / "images" / "semi_async.png"

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A data set and how it is trained.

    Attributes:
        title: what it is called.
        epochs: of every run.
        options: of `turbogr fit`, beyond the recipe's.
        metrics: of the test that are compared.
        rings: how many make the data set; 0 for a real one of yardsticks.py.
        users: who walk on them.
        curve: metric of validation that is drawn; the training loss if it is "loss".
        hurts: whether the delay is expected to do harm.
    """

    title: str
    epochs: int
    options: tuple[str, ...] = ()
    metrics: tuple[str, str] = ("HR@10", "NDCG@10")
    rings: int = 0
    users: int = 0
    curve: str = "NDCG@10"
    hurts: bool = False


RING_ITEMS, RING_STEPS, RING_NEGATIVES = 24, 12, 16
RING = (
    *("--model.backbone.dim", "16", "--model.backbone.num_blocks", "1", "--model.backbone.dropout", "0"),
    *("--model.backbone.time", "null", "--data.num_negatives", str(RING_NEGATIVES), "--data.max_length", "50"),
    *("--model.top_k", "[1,10]"),
)
LARGE_STEPS = ("--model.embeddings.optimizer", "turbogr.sparse.optimizers.SGD", "--model.embeddings.optimizer.lr", "1.0", *RING)
RING_METRICS = ("HR@1", "NDCG@10")
STUDIES = {
    "movielens-100k": Study("MovieLens-100K", 60),
    "kuairand-27k-sample": Study("KuaiRand-27K, sample", 80, (*KUAIRAND, *SECONDS)),
    "one-ring": Study("One ring, large steps", 10, LARGE_STEPS, RING_METRICS, 1, 256, "loss", hurts=True),
    "one-ring-small-steps": Study("One ring, the recipe's steps", 20, RING, RING_METRICS, 1, 256, "loss"),
    "many-rings": Study("400 rings, large steps", 6, LARGE_STEPS, RING_METRICS, 400, 6400, "loss"),
}


def fit_command(name: str, mode: str, seed: int) -> list[str]:
    """What trains a data set in a mode, as arguments of `turbogr`."""
    study = STUDIES[name]
    return [
        *("fit", "-c", "movielens-100k/hstu.yaml", "--data.path", f"data/{name}"),
        *("--trainer.default_root_dir", run_folder(name, mode, seed), "--seed_everything", str(seed), *study.options),
        *("--trainer.max_epochs", str(study.epochs), "--trainer.strategy", "turbogr.strategies.TurboGRStrategy"),
        *("--trainer.strategy.mode", mode),
    ]


def run_folder(name: str, mode: str, seed: int) -> str:
    """Where a run leaves its files."""
    return f"runs/{name}-{mode}-{seed}"


def prepare(name: str, raw: Path, folder: Path) -> bool:
    """Prepares a data set in folder/data; False if its files are not there."""
    study = STUDIES[name]
    if not study.rings:
        return prepare_real(name, raw, folder)
    if not (folder / "data" / name / "manifest.json").is_file():
        write_rings(folder / f"{name}.txt", study.rings, study.users)
        call(["data", "prepare", "sequences", f"{name}.txt", "--out", f"data/{name}"], folder)
    return True


def write_rings(path: Path, rings: int, users: int) -> None:
    """One user a line: its number, and RING_STEPS items along one of the rings from a random one on."""
    draw = random.Random(0)
    lines = []
    for user in range(1, users + 1):
        ring, start = draw.randrange(rings), draw.randrange(RING_ITEMS)
        items = [1 + ring * RING_ITEMS + (start + step) % RING_ITEMS for step in range(RING_STEPS)]
        lines.append(" ".join(map(str, [user, *items])))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(name: str, mode: str, seed: int, folder: Path) -> Row:
    """Trains and tests; returns the row."""
    study, command, path = STUDIES[name], fit_command(name, mode, seed), run_folder(name, mode, seed)
    done = fit_and_test(command, path, folder)
    validated = [each for each in done.logged if "val/NDCG@10" in each]
    return {
        "data": name,
        "mode": mode,
        "seed": seed,
        "epochs": len(validated),
        "best_epoch": done.tested["epoch"] + 1,
        "test": {metric: done.tested["metrics"]["model"][metric] for metric in study.metrics},
        "curves": {
            "loss": loss_of_epochs(done.logged),
            **{metric: [round(each[f"val/{metric}"], 6) for each in validated] for metric in study.metrics},
        },
        "fit_seconds": round(done.fit_seconds, 1),
        "command": shown(command),
        "turbogr": turbogr.__version__,
    }


def count(name: str, folder: Path) -> Row:
    """What Collisions says of a data set, of all its rows and of those that are no negatives; returns the row."""
    negatives = RING_NEGATIVES if STUDIES[name].rings else 128
    counted = {"with_negatives": Collisions(WINDOW), "without_negatives": Collisions(WINDOW, ["negatives"])}
    for callback in counted.values():
        data = SequenceDataModule(folder / "data" / name, batch_size=32, num_negatives=negatives, seed=1, num_workers=0)
        model = GenerativeRetriever(data.num_items, HSTU(dim=8, num_blocks=1, max_length=data.max_length), top_k=(1,))
        trainer = pl.Trainer(
            max_steps=WINDOW,
            accelerator="cpu",
            limit_val_batches=0,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, data)
    figures = {which: asdict(callback.figures) for which, callback in counted.items() if callback.figures is not None}
    return {"data": name, "mode": COUNTED, "seed": 1, **figures, "turbogr": turbogr.__version__}


def of(rows: Sequence[Row], name: str, mode: str) -> list[Row]:
    """The rows of a mode on a data set, by seed; only seeds that both modes have."""
    seeds = {each: {row["seed"] for row in rows if (row["data"], row["mode"]) == (name, each)} for each in MODES}
    both = set.intersection(*seeds.values())
    return sorted(
        (row for row in rows if (row["data"], row["mode"]) == (name, mode) and row["seed"] in both), key=lambda row: row["seed"]
    )


def values_of(rows: Sequence[Row], name: str, mode: str, metric: str) -> list[float]:
    """A test metric of a mode, or its training loss in the last epoch, by seed."""
    runs = of(rows, name, mode)
    return [row["curves"]["loss"][-1] if metric == "loss" else row["test"][metric] for row in runs]


def seed_noise(rows: Sequence[Row], name: str, metric: str) -> float:
    """Standard error of the difference between the modes' means, from the spread of seeds pooled over the modes.

    nan where there is one seed only.
    """
    return standard_error([values_of(rows, name, mode, metric) for mode in MODES])


def data_table(rows: Sequence[Row], name: str) -> str:
    """Both modes, and the difference of each seed, as Markdown."""
    study = STUDIES[name]
    columns = [*study.metrics, "loss"]
    lines = []
    for mode, title in MODES.items():
        cells = [spread(values_of(rows, name, mode, metric)) for metric in columns]
        lines.append([title, *cells, ", ".join(str(row["best_epoch"]) for row in of(rows, name, mode))])
    differences = {metric: differences_of(rows, name, metric) for metric in columns}
    each = [", ".join(map(signed, differences[metric])) for metric in columns]
    lines.append(["semi-async - sync, each seed", *each, ""])
    lines.append(["mean difference", *(signed(statistics.fmean(differences[metric])) for metric in columns), ""])
    noise = [seed_noise(rows, name, metric) for metric in columns]
    lines.append(["standard error by seeds", *("-" if math.isnan(x) else decimal(x) for x in noise), ""])
    return markdown_table(["", *(f"test {metric}" for metric in study.metrics), "last loss", "best epoch"], lines)


def collision_table(rows: Sequence[Row]) -> str:
    """What Collisions says of each data set, as Markdown."""
    lines = []
    for name, study in STUDIES.items():
        for row in rows:
            if (row["data"], row["mode"]) == (name, COUNTED):
                for which, title in (("without_negatives", study.title), ("with_negatives", "with negatives")):
                    found = row[which]
                    cells = [f"{found[key]:.4f}" for key in ("alpha", "shared", "repeated")]
                    lines.append([title, f"{found['samples']:,}", f"{found['rows']:,}", *cells])
    return markdown_table([f"{WINDOW} steps of", "samples", "rows", "alpha", "shared", "repeated"], lines)


def differences_of(rows: Sequence[Row], name: str, metric: str) -> list[float]:
    """Semi-async less sync, by seed."""
    pairs = zip(values_of(rows, name, "semi_async", metric), values_of(rows, name, "sync", metric), strict=True)
    return [semi - sync for semi, sync in pairs]


def signed(value: float) -> str:
    """Four places with a sign."""
    return f"{'-' if round(value, 4) < 0 else '+'}{decimal(abs(value))}"


def section(rows: Sequence[Row]) -> str:
    """Every data set's table and the commands that made it, as Markdown."""
    parts = []
    for name, study in STUDIES.items():
        if of(rows, name, "sync"):
            command = textwrap.wrap(shown(fit_command(name, "semi_async", 1)), 112, **UNBROKEN)
            typed = " \\\n    ".join(command)
            parts.append(f"### {study.title}\n\n{data_table(rows, name)}\n\n```console\n{typed}\n```")
    return "\n\n".join(parts)


def report_rows(report: Report, rows: Sequence[Row]) -> None:
    """What is claimed: no loss beyond the seeds' noise on real data, and harm where every step updates the same few rows."""
    for name, study in STUDIES.items():
        runs = of(rows, name, "sync")
        if not runs:
            continue
        for metric in study.metrics:
            ours, sync = (statistics.fmean(values_of(rows, name, mode, metric)) for mode in ("semi_async", "sync"))
            noise = seed_noise(rows, name, metric)
            least = sync - STUDENT.get(2 * len(runs) - 2, 2.0) * noise
            promise = {} if math.isnan(noise) else {"at_most" if study.hurts else "at_least": least}
            report.add(f"{study.title}: test {metric}, mean of {len(runs)} seeds", ours, "", baseline=sync, **promise)
        loss = [statistics.fmean(values_of(rows, name, mode, "loss")) for mode in ("semi_async", "sync")]
        promise = {"at_least": 1.5} if study.hurts else {"at_most": 1.25} if study.rings else {}
        report.add(f"{study.title}: training loss of the last epoch, semi-async / sync", loss[0] / loss[1], "", **promise)
    for row in rows:
        if row["mode"] == COUNTED:
            report.add(f"{STUDIES[row['data']].title}: alpha, without negatives", row["without_negatives"]["alpha"], "")
    report.note(
        "baseline: mode sync with the same seeds; promised: not below it by more than seeds explain (95 %, Student's t)"
    )
    report.note("one ring is the negative control: there semi-async must be below sync by as much")


def draw(rows: Sequence[Row], path: Path) -> None:
    """The curves of all runs: a thin line each, the mean of the seeds as a thick one."""
    names = [name for name in STUDIES if of(rows, name, "sync")]
    figure = Figure((10, 3.3 * math.ceil(len(names) / 2)), dpi=130, layout="constrained")
    grid = figure.subplots(math.ceil(len(names) / 2), 2, squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        study = STUDIES[name]
        for mode, title in MODES.items():
            curves = [row["curves"][study.curve] for row in of(rows, name, mode)]
            epochs = range(1, len(curves[0]) + 1)
            for curve in curves:
                axes.plot(epochs, curve, color=COLOURS[mode], linewidth=0.7, alpha=0.45)
            mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            axes.plot(epochs, mean, color=COLOURS[mode], linewidth=2, label=f"{title}, mean of {len(curves)} seeds")
        what = "training loss" if study.curve == "loss" else f"{study.curve}, validation"
        axes.set_title(f"{study.title}: {what}", loc="left", fontsize=10)
        axes.set_xlabel("epoch", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8.5)
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: figure.savefig(file, format="png"))
    print(f"drawn to {path}")


def wanted(names: Sequence[str], modes: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, str, int]]:
    """The matrix, in the order in which it is run: what is counted, then every data set and mode once, before the next seed."""
    yield from ((name, COUNTED, 1) for name in names)
    yield from ((name, mode, seed) for seed, name, mode in product(seeds, names, modes))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS / "semi_async.jsonl", help="rows of finished runs, JSON lines")
    parser.add_argument("--folder", type=Path, help="where data/ and runs/ are kept; a temporary folder if not given")
    parser.add_argument("--data", type=Path, default=SHARED_DATA, help="folder of the raw data sets")
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=list(STUDIES), help="these data sets alone")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="these modes alone")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, on one thread each")
    parser.add_argument("--png", type=Path, help="draw the curves to this file")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/semi-async.md and draw its picture")
    arguments = parse_arguments(parser)
    os.environ["OMP_NUM_THREADS"] = "1"
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    report = Report("semi-async", arguments.quick)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        results, runs = arguments.results, list(wanted(arguments.only, arguments.modes, SEEDS))
        if arguments.quick:
            results = Path(scratch) / "quick.jsonl"
            STUDIES["one-ring"] = replace(STUDIES["one-ring"], epochs=6)
            runs = list(wanted(["one-ring"], arguments.modes, SEEDS[:1]))
        done = {(row["data"], row["mode"], row["seed"]) for row in read_rows(results)}
        missing = [key for key in runs if key not in done]
        report.note(f"{len(runs) - len(missing)} of {len(runs)} runs stood in the results file already")
        there = {name: prepare(name, arguments.data, folder) for name in dict.fromkeys(name for name, _, _ in missing)}
        missing = [key for key in missing if there[key[0]]]
        for name in [name for name, mode, _ in missing if mode == COUNTED]:
            add_row(results, count(name, folder))
        missing = [key for key in missing if key[1] != COUNTED]
        one_at_a_time = Lock()

        def finish(numbered: tuple[int, tuple[str, str, int]]) -> None:
            number, (name, mode, seed) = numbered
            print(f"run {number} of {len(missing)}", file=sys.stderr, flush=True)
            row = run(name, mode, seed, folder)
            with one_at_a_time:
                add_row(results, row)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(finish, enumerate(missing, 1)))
        rows = [row for row in read_rows(results) if row["data"] in {name for name, _, _ in runs}]
    report_rows(report, rows)
    if arguments.page or arguments.png:
        draw(read_rows(arguments.results), arguments.png or PNG)
    if arguments.page:
        write_section(PAGE, "collisions", collision_table(read_rows(arguments.results)))
        write_section(PAGE, "curves", section(read_rows(arguments.results)))
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
