"""Report: what a run leaves behind, and what it says at its end.

After `fit` the run folder (`Trainer(default_root_dir=...)`) holds metrics.csv and report.png, and one table in the terminal
names the best validation metrics and every file. After `test` there are test.json and test.png, and a table of the test metrics
beside the popularity and random baselines.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turbogr.baselines import EvaluationData, evaluate_baselines
from turbogr.callbacks.resume import LastCheckpoint
from turbogr.callbacks.throughput import METRIC as TOKENS_PER_SECOND
from turbogr.callbacks.throughput import Throughput
from turbogr.errors import ConfigurationError

BLUE, ORANGE, GREY, LIGHT, INK = "#2563eb", "#d9480f", "#7b8794", "#e4e7eb", "#1f2933"
MONITOR = "val/NDCG@10"


class Report(Callback):
    """Writes metrics.csv, report.png, test.json and test.png, and prints the final tables.

    metrics.csv is written through a `MetricsLogger` that this callback adds to the trainer, so `Trainer(logger=False)` is
    enough; if tensorboard is installed and the trainer has no logger of its own, its files go to the folder "tensorboard".
    A resumed run continues its metrics.csv from the checkpoint's step. With `fast_dev_run` nothing is written.

    Args:
        baselines: rank popularity and random too after `test`; takes two further passes over the test users.
        seed: of the random baseline.

    Raises:
        ConfigurationError: `fit` ends without a single training step.
    """

    def __init__(self, baselines: bool = True, seed: int = 0) -> None:
        self.baselines, self.seed = baselines, seed
        self._batches, self._started = 0, 0.0
        self._loaded_epoch: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Adds the loggers."""
        self._batches, self._started, self._loaded_epoch = 0, perf_counter(), None
        if stage != "fit" or getattr(trainer, "fast_dev_run", False) or _metrics_logger(trainer):
            return
        folder = trainer.default_root_dir
        own = list(trainer.loggers)
        if not own and find_spec("tensorboard"):
            own.append(TensorBoardLogger(folder, name="tensorboard", version=""))
        trainer.loggers = [MetricsLogger(folder), *own]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Notes which epoch the weights come from."""
        self._loaded_epoch = checkpoint["epoch"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens metrics.csv: empty, or with the rows up to the step that training resumes from."""
        logger = _metrics_logger(trainer)
        if logger is not None and trainer.is_global_zero:
            # Loggers count by this number and not by global_step, which grows twice as fast with two optimizers.
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            logger.begin(step if trainer.ckpt_path or step else None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts."""
        self._batches += 1

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes report.png and prints the table.

        Raises:
            ConfigurationError: no training step happened.
        """
        if not self._batches:
            raise ConfigurationError(
                "not a single training step was done: the training data has no batch, trainer.limit_train_batches is 0, or "
                f"trainer.max_epochs ({trainer.max_epochs}) or trainer.max_steps ({trainer.max_steps}) was reached before the "
                "start" + (f" by {trainer.ckpt_path}: raise it to train further" if trainer.ckpt_path else "")
            )
        logger = _metrics_logger(trainer)
        if logger is None or not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        rows = read_metrics(logger.path)
        best = _best_row(rows, *_monitored(trainer))
        draw_report(rows, best, folder / "report.png", title=folder.resolve().name)
        _print("Training finished", self._fit_table(trainer, rows, best, folder))

    def _fit_table(self, trainer: Trainer, rows: list[dict[str, float]], best: dict[str, float] | None, folder: Path) -> Table:
        table = Table(show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        if best is None:
            table.add_row("best validation", "no validation took place")
        else:
            # Loggers number steps from 0; checkpoints and progress count those done.
            table.add_row("best validation", f"epoch {best['epoch'] + 1:.0f}, step {best['step'] + 1:.0f}")
            for name in _in_order(name for name in best if name.startswith("val/")):
                table.add_row(f"  {name.removeprefix('val/')}", f"{best[name]:.4f}")
        table.add_row("trained", f"{trainer.current_epoch} epochs, {self._batches} steps in this run")
        table.add_row("time", _duration(perf_counter() - self._started))
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        throughputs = [callback for callback in callbacks if isinstance(callback, Throughput)]
        if throughputs:
            table.add_row("tokens/s", f"{throughputs[0].average:,.0f}")
        table.add_section()
        for label, path in _files(trainer, folder).items():
            if path.is_file():
                table.add_row(label, _shown(path))
        return table

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """After `test`: scores the baselines, writes test.json and test.png, prints the table."""
        # Not in on_test_end: the progress bar is still on the screen there.
        if stage != "test" or getattr(trainer, "fast_dev_run", False) or not trainer.is_global_zero:
            return
        results = {"model": _test_metrics(trainer)}
        top_k = sorted(int(name.removeprefix("HR@")) for name in results["model"] if name.startswith("HR@"))
        data = trainer.datamodule  # type: ignore[attr-defined]
        if self.baselines and top_k and isinstance(data, EvaluationData):
            results |= evaluate_baselines(data, top_k, self.seed, pl_module.device)
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = str(trainer.ckpt_path) if trainer.ckpt_path else None
        written = {"checkpoint": checkpoint, "epoch": self._loaded_epoch, "metrics": results}
        _replace(folder / "test.json", lambda path: path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8"))
        source = f"{_shown(Path(checkpoint))}, epoch {_counted(self._loaded_epoch)}" if checkpoint else "weights in memory"
        paths = [folder / "test.json"]
        if top_k:
            draw_test(results, 10 if 10 in top_k else top_k[0], folder / "test.png", title=source)
            paths.append(folder / "test.png")
        _print(f"Test of {source}", _test_table(results), *(f"written: {_shown(path)}" for path in paths))


class MetricsLogger(CSVLogger):
    """Lightning's CSVLogger, with metrics.csv directly in the run folder and able to continue an earlier file.

    Hyperparameters are not written: config.yaml holds them.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(save_dir=folder, name="", version="")

    @property
    def path(self) -> Path:
        """Where metrics.csv is."""
        return Path(self.log_dir) / ExperimentWriter.NAME_METRICS_FILE

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer, made at its first use."""
        if self._experiment is None:
            self._experiment = _MetricsWriter(self.log_dir)
        return self._experiment  # type: ignore[return-value]

    def begin(self, last_step: int | None) -> None:
        """Drops the rows of an earlier run after `last_step`, or all of them if it is None."""
        rows = [] if last_step is None or not self.path.exists() else read_metrics(self.path)
        kept = [row for row in rows if last_step is not None and row["step"] <= last_step]
        self.path.unlink(missing_ok=True)
        self.experiment.metrics, self.experiment.metrics_keys = [], []
        for row in kept:
            self.experiment.log_metrics(row, int(row["step"]))
        self.experiment.save()

    def log_hyperparams(self, params: Any = None) -> None:
        """Writes nothing."""


class _MetricsWriter(ExperimentWriter):
    def _check_log_dir_exists(self) -> None:
        # Lightning's would delete metrics.csv here, at the mere start of a resumed run; `begin` decides.
        pass


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a metrics.csv, without their empty cells.

    Args:
        path: the file.

    Returns:
        One dictionary a row, in the order of the file.
    """
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def draw_report(rows: Sequence[dict[str, float]], best: dict[str, float] | None, path: Path, title: str) -> None:
    """Draws loss, HR@10, NDCG@10 and tokens/s over steps; if K = 10 is not measured, the smallest K is shown.

    Args:
        rows: of metrics.csv.
        best: the row of the best validation, marked in the plots of validation metrics.
        path: PNG to write.
        title: of the figure.
    """
    names = set().union(*rows)
    loss = next((name for name in ("train/loss", "train/loss_step", "train/loss_epoch") if name in names), "train/loss")
    k = _shown_k(names)
    panels = [
        (loss, "Training loss", "last {:.3f}"),
        (f"val/HR@{k}", f"HR@{k}, validation", "best checkpoint {:.4f}"),
        (f"val/NDCG@{k}", f"NDCG@{k}, validation", "best checkpoint {:.4f}"),
        (TOKENS_PER_SECOND, "Tokens per second", "median {:,.0f}"),
    ]
    figure = _figure((10, 6.6), title)
    last = max((row["step"] for row in rows), default=1)
    for axes, (name, label, note) in zip(figure.subplots(2, 2, sharex=True).flat, panels, strict=True):
        points = [(row["step"], row[name]) for row in rows if name in row]
        _style(axes, label)
        axes.set_xlim(0, max(last, 1) * 1.02)
        if not points:
            axes.set_yticks([])
            axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", color=GREY)
            continue
        steps, values = np.array(points).T
        validation = name.startswith("val/")
        reach = 0 if validation else len(values) // 40
        smooth = np.array([values[max(i - reach, 0) : i + reach + 1].mean() for i in range(len(values))])
        if reach:
            axes.plot(steps, values, color=BLUE, linewidth=0.8, alpha=0.3)
        axes.plot(steps, smooth, color=BLUE, linewidth=1.8, marker="o" if len(steps) < 40 else None, markersize=3.5)
        number = float(np.median(values)) if name == TOKENS_PER_SECOND else smooth[-1]
        if validation and best is not None and name in best:
            number = best[name]
            axes.plot(best["step"], number, "o", markersize=8, color=ORANGE, markeredgecolor="white", markeredgewidth=1.5)
        axes.set_title(note.format(number), loc="right", fontsize=9.5, color=ORANGE if validation else GREY)
        if name != loss:
            axes.set_ylim(0, max(values.max() * 1.12, 1e-9))
        if values.max() >= 1000:
            axes.yaxis.set_major_formatter("{x:,.0f}")
    for axes in figure.axes[2:]:
        axes.set_xlabel("step", fontsize=9, color=INK)
        axes.xaxis.set_major_formatter("{x:,.0f}")
    _replace(path, lambda temporary: figure.savefig(temporary, format="png"))


def draw_test(results: dict[str, dict[str, float]], k: int, path: Path, title: str) -> None:
    """Draws test HR@K and NDCG@K of the model and the baselines as bars.

    Args:
        results: {"model": {"HR@10": ...}, "popularity": ..., "random": ...}.
        k: the K shown.
        path: PNG to write.
        title: of the figure.
    """
    figure = _figure((9, 1.0 + 0.5 * len(results)), title)
    names = list(results)
    for axes, metric in zip(figure.subplots(1, 2, sharey=True), (f"HR@{k}", f"NDCG@{k}"), strict=True):
        values = [results[name].get(metric, 0.0) for name in names]
        _style(axes, f"{metric}, test")
        axes.grid(visible=False)
        bars = axes.barh(names, values, color=[BLUE if name == "model" else "#b8c2cc" for name in names], height=0.62)
        axes.bar_label(bars, [f"{value:.4f}" for value in values], padding=5, fontsize=10, color=INK)
        axes.set_xlim(0, max(max(values) * 1.22, 1e-9))
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])
        axes.tick_params(axis="y", labelsize=10, length=0)
    figure.axes[0].invert_yaxis()
    _replace(path, lambda temporary: figure.savefig(temporary, format="png"))


def _figure(size: tuple[float, float], title: str) -> Figure:
    figure = Figure(figsize=size, dpi=150, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.15, h_pad=0.1, wspace=0.04, hspace=0.06)
    figure.suptitle(title, x=0.015, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.grid(axis="y", color=LIGHT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, colors=INK, length=3, color=LIGHT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT)


def _metrics_logger(trainer: Trainer) -> MetricsLogger | None:
    return next((logger for logger in trainer.loggers if isinstance(logger, MetricsLogger)), None)


def _monitored(trainer: Trainer) -> tuple[str, str]:
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.monitor:
            return callback.monitor, callback.mode
    return MONITOR, "max"


def _best_row(rows: Sequence[dict[str, float]], monitor: str, mode: str) -> dict[str, float] | None:
    measured = [row for row in rows if not math.isnan(row.get(monitor, math.nan))]
    if measured:
        return (min if mode == "min" else max)(measured, key=lambda row: row[monitor])
    return next((row for row in reversed(rows) if any(name.startswith("val/") for name in row)), None)


def _files(trainer: Trainer, folder: Path) -> dict[str, Path]:
    files = {"metrics": folder / "metrics.csv", "configuration": folder / "config.yaml"}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            for label, path in (("best checkpoint", callback.best_model_path), ("last checkpoint", callback.last_model_path)):
                if path:
                    files.setdefault(label, Path(path))
        elif isinstance(callback, LastCheckpoint):
            files["last checkpoint"] = callback.file(trainer)
    return files | {"report": folder / "report.png"}


def _test_metrics(trainer: Trainer) -> dict[str, float]:
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("test/")}
    return {name.removeprefix("test/"): metrics[name] for name in _in_order(metrics)}


def _test_table(results: dict[str, dict[str, float]]) -> Table:
    table = Table()
    table.add_column("", style="bold")
    for name in results:
        table.add_column(name, justify="right")
    compared = "popularity" in results
    if compared:
        table.add_column("model / popularity", justify="right")
    for metric, value in results["model"].items():
        cells = [f"{row[metric]:.4f}" if metric in row else "" for row in results.values()]
        popular = results.get("popularity", {}).get(metric, 0.0)
        table.add_row(metric, *cells, *([f"{value / popular:.2f}" if popular else ""] if compared else []))
    return table


def _in_order(names: Iterable[str]) -> list[str]:
    """HR@1, HR@10, HR@200, ... instead of the alphabet's HR@1, HR@10, HR@200, HR@50."""

    def key(name: str) -> tuple[str, int]:
        stem, _, k = name.partition("@")
        return stem, int(k) if k.isdecimal() else 0

    return sorted(names, key=key)


def _shown_k(names: Iterable[str]) -> int:
    found = sorted(int(name.removeprefix("val/HR@")) for name in names if name.startswith("val/HR@"))
    return 10 if 10 in found or not found else found[0]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _shown(path: Path) -> str:
    path = path.resolve()
    here = Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _print(title: str, table: Table, *lines: str) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # in a log file no path shall be broken at column 80
    # Not the table's own title and caption, which would be folded to its width.
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(table)
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _counted(epoch: int | None) -> str:
    """Lightning numbers epochs from 0, people count from 1."""
    return "?" if epoch is None else str(epoch + 1)
