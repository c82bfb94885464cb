"""Report: what a run leaves behind, and what it says at its end.

After `fit` the run folder (`Trainer(default_root_dir=...)`) holds metrics.csv and report.png, and one table in the terminal
names the best validation metrics and every file. After `test` there are test.json and test.png, and a table of the test metrics
beside the popularity and random baselines.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from rich.table import Table

from turbogr.baselines import EvaluationData, evaluate_baselines
from turbogr.callbacks.drawing import draw_report, draw_test
from turbogr.callbacks.resume import LastCheckpoint
from turbogr.callbacks.terminal import print_table, shown
from turbogr.callbacks.throughput import Throughput
from turbogr.errors import ConfigurationError
from turbogr.files import replace_file

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
            own.append(EventFiles(folder, name="tensorboard", version=""))
        trainer.loggers = [MetricsLogger(folder), *own]

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Notes which epoch the weights come from."""
        self._loaded_epoch = checkpoint["epoch"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Opens metrics.csv: empty, or with the rows up to the step that training resumes from."""
        logger = _metrics_logger(trainer)
        if logger is not None and trainer.is_global_zero:
            # Not the loops' own count for loggers: in a checkpoint of the middle of an epoch it is one short.
            steps = trainer.global_step
            logger.begin(steps if trainer.ckpt_path or steps else None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts."""
        self._batches += 1

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuses a run that trained nothing.

        Raises:
            ConfigurationError: no training step happened.
        """
        if not self._batches:
            raise ConfigurationError(
                "not a single training step was done: the training data has no batch, trainer.limit_train_batches is 0, or "
                f"trainer.max_epochs ({trainer.max_epochs}) or trainer.max_steps ({trainer.max_steps}) was reached before the "
                "start" + (f" by {trainer.ckpt_path}: raise it to train further" if trainer.ckpt_path else "")
            )

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
            if path.exists():
                table.add_row(label, shown(path))
        return table

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """After `fit` writes report.png, after `test` test.json and test.png with the baselines' scores; prints the table."""
        # Not in on_fit_end or on_test_end: the progress bar is still on the screen there, and erases what is printed over it.
        if getattr(trainer, "fast_dev_run", False) or not trainer.is_global_zero:
            return
        if stage == "fit":
            self._finish_fit(trainer)
        elif stage == "test":
            self._finish_test(trainer, pl_module)

    def _finish_fit(self, trainer: Trainer) -> None:
        logger = _metrics_logger(trainer)
        if logger is None:
            return
        logger.save()
        folder = Path(trainer.default_root_dir)
        # Nothing is logged before step trainer.log_every_n_steps, nor without validation.
        rows = read_metrics(logger.path) if logger.path.exists() else []
        best = _best_row(rows, *_monitored(trainer))
        folder.mkdir(parents=True, exist_ok=True)
        draw_report(rows, best, folder / "report.png", title=folder.resolve().name)
        print_table("Training finished", self._fit_table(trainer, rows, best, folder))

    def _finish_test(self, trainer: Trainer, pl_module: LightningModule) -> None:
        results = {"model": _test_metrics(trainer)}
        top_k = sorted(int(name.removeprefix("HR@")) for name in results["model"] if name.startswith("HR@"))
        data = trainer.datamodule  # type: ignore[attr-defined]
        if self.baselines and top_k and isinstance(data, EvaluationData):
            with _alone(data):
                results |= evaluate_baselines(data, top_k, self.seed, pl_module.device)
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = str(trainer.ckpt_path) if trainer.ckpt_path else None
        written = {"checkpoint": checkpoint, "epoch": self._loaded_epoch, "metrics": results}
        replace_file(folder / "test.json", lambda path: path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8"))
        source = f"{shown(Path(checkpoint))}, epoch {_counted(self._loaded_epoch)}" if checkpoint else "weights in memory"
        paths = [folder / "test.json"]
        if top_k:
            draw_test(results, 10 if 10 in top_k else top_k[0], folder / "test.png", title=source)
            paths.append(folder / "test.png")
        print_table(f"Test of {source}", _test_table(results), *(f"written: {shown(path)}" for path in paths))


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

    def begin(self, steps: int | None) -> None:
        """Keeps the rows of an earlier run's first `steps` steps, which are numbered from 0; none of them if it is None."""
        rows = [] if steps is None or not self.path.exists() else read_metrics(self.path)
        kept = [row for row in rows if steps is not None and row["step"] < steps]
        self.path.unlink(missing_ok=True)
        self.experiment.metrics, self.experiment.metrics_keys = [], []
        for row in kept:
            self.experiment.log_metrics(row, int(row["step"]))
        self.experiment.save()

    def log_hyperparams(self, params: Any = None) -> None:
        """Writes nothing."""


class EventFiles(TensorBoardLogger):
    """Lightning's TensorBoardLogger, without hyperparameters: config.yaml holds them.

    So the first file is written with the first metric, and a run that fails before it leaves none.
    """

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Writes nothing."""

    def save(self) -> None:
        """Flushes what was logged; opens no file."""
        if self._experiment is not None:
            self._experiment.flush()


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


@contextmanager
def _alone(data: Any) -> Iterator[None]:
    """Outside its trainer, of whose ranks it would give this one's share, a data module gives all users."""
    trainer, data.trainer = getattr(data, "trainer", None), None
    try:
        yield
    finally:
        data.trainer = trainer


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


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _counted(epoch: int | None) -> str:
    """Lightning numbers epochs from 0, people count from 1."""
    return "?" if epoch is None else str(epoch + 1)
