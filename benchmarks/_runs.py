"""`turbogr fit` and `turbogr test` as child processes, and what they leave behind."""

from __future__ import annotations

import csv
import json
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finished:
    """A run that was trained and tested.

    Attributes:
        tested: test.json.
        logged: the rows of metrics.csv, without the cells that are empty.
        fit_seconds: of `turbogr fit`, from start to end.
        fit_cpu_seconds: of its processes; also of others that ended meanwhile, where several runs are trained at a time.
    """

    tested: dict[str, Any]
    logged: list[dict[str, float]]
    fit_seconds: float
    fit_cpu_seconds: float


def shown(arguments: Sequence[str]) -> str:
    """As a user types it."""
    return shlex.join(["turbogr", *arguments])


def call(arguments: Sequence[str], folder: Path) -> tuple[float, float]:
    """Runs the command line in a child process; returns seconds of wall time and of CPU time. Its output goes to stderr."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    print(shown(arguments), file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "turbogr", *arguments], check=True, stdout=sys.stderr, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.perf_counter() - started, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def fit_and_test(command: Sequence[str], path: str, folder: Path) -> Finished:
    """Trains, then tests the best epoch.

    Args:
        command: arguments of `turbogr` that train.
        path: the run's folder, within `folder`.
        folder: where the command line runs.
    """
    seconds, cpu_seconds = call([*command, "--overwrite"], folder)
    call(["test", "-c", f"{path}/config.yaml"], folder)
    tested = json.loads((folder / path / "test.json").read_text())
    with open(folder / path / "metrics.csv", newline="") as file:
        logged = [{key: float(value) for key, value in each.items() if value} for each in csv.DictReader(file)]
    return Finished(tested, logged, seconds, cpu_seconds)


def loss_of_epochs(logged: Sequence[Mapping[str, float]]) -> list[float]:
    """Mean of the training loss over the logged steps of every epoch."""
    epochs: dict[float, list[float]] = {}
    for each in logged:
        if "train/loss" in each:
            epochs.setdefault(each["epoch"], []).append(each["train/loss"])
    return [round(statistics.fmean(losses), 6) for _, losses in sorted(epochs.items())]
