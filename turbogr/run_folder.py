"""The folder of one run: what lies where, what may be overwritten, which checkpoint is meant by a name."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from turbogr.errors import ConfigurationError

BEST, LAST = "best", "last"
CONFIG_KEY = "turbogr_config"
"""Key of a checkpoint under which its merged configuration stands, as YAML text."""


@dataclass(frozen=True)
class RunFolder:
    """Names of everything that a run writes.

    Attributes:
        path: the folder; `trainer.default_root_dir`.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The merged configuration of `fit`."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Everything that was logged, one row a step."""
        return self.path / "metrics.csv"

    @property
    def checkpoints(self) -> Path:
        """Folder of best.ckpt and last.ckpt."""
        return self.path / "checkpoints"

    def checkpoint(self, name: str) -> Path:
        """Where the checkpoint `name` ("best" or "last") is, whether or not it exists."""
        return self.checkpoints / f"{name}.ckpt"

    def resolve(self, ckpt_path: str) -> Path:
        """The file meant by "best", "last" or a path.

        Raises:
            ConfigurationError: if there is no such file; the message names those that exist.
        """
        path = self.checkpoint(ckpt_path) if ckpt_path in (BEST, LAST) else Path(ckpt_path)
        if path.exists():
            return path
        there = ", ".join(str(p) for p in sorted(self.checkpoints.glob("*.ckpt"))) or f"none in {self.checkpoints}"
        raise ConfigurationError(
            f"there is no checkpoint {path} (checkpoints found: {there}); train first with `turbogr fit`, or name one with "
            "--ckpt_path, or the run's folder with --trainer.default_root_dir"
        )

    def earlier_run(self) -> list[Path]:
        """Files of an earlier run that a new one would overwrite."""
        files = [self.config, self.metrics, *self.checkpoints.glob("*.ckpt")]
        return sorted(file for file in files if file.exists())

    def refuse_earlier_run(self) -> None:
        """Raises ConfigurationError if a new run would overwrite an earlier one's files."""
        if files := self.earlier_run():
            names = ", ".join(str(file.relative_to(self.path)) for file in files)
            raise ConfigurationError(
                f"{self.path} holds an earlier run ({names}). Continue it with --ckpt_path last, replace it with "
                "--overwrite, or choose another folder with --trainer.default_root_dir"
            )

    def remove_earlier_run(self) -> None:
        """Deletes an earlier run's files, and nothing else that may lie in the folder."""
        written_later = ("report.png", "test.json", "validate.json", "predictions.parquet")
        for file in [*self.earlier_run(), *(self.path / name for name in written_later)]:
            file.unlink(missing_ok=True)

    def keep_metrics_before(self, step: int) -> None:
        """Drops rows of metrics.csv from `step` on: a run that resumes there logs them again."""
        if not self.metrics.exists():
            return
        with self.metrics.open(newline="") as file:
            reader = csv.DictReader(file)
            header, rows = reader.fieldnames or [], [row for row in reader if int(row["step"]) < step]
        partial = self.metrics.with_name(f".{self.metrics.name}.partial")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=header)
            writer.writeheader()
            writer.writerows(rows)
        partial.replace(self.metrics)

    def loggers(self) -> list[Logger]:
        """metrics.csv, and TensorBoard's files if TensorBoard is installed."""
        loggers: list[Logger] = [RunLogger(self.path)]
        if find_spec("tensorboard"):
            loggers.append(TensorBoardLogger(self.path, name="", version="tensorboard"))
        return loggers


class RunLogger(CSVLogger):
    """Writes metrics.csv straight into a run's folder, going on where an existing file ends.

    Args:
        folder: the run's folder.
        flush_logs_every_n_steps: rows reach the file at steps divisible by this, and at the end.
    """

    def __init__(self, folder: str | Path, flush_logs_every_n_steps: int = 100) -> None:
        super().__init__(folder, name="", version="", flush_logs_every_n_steps=flush_logs_every_n_steps)

    @property
    def log_dir(self) -> str:
        """The run's folder (CSVLogger would give it a trailing separator)."""
        return os.fspath(Path(self.save_dir))

    @property
    def experiment(self) -> ExperimentWriter:  # type: ignore[override]
        """The writer; created at first use."""
        if self._experiment is None:
            self._experiment = _ContinuingWriter(self.log_dir)
        return self._experiment  # type: ignore[return-value]


class _ContinuingWriter(ExperimentWriter):
    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        if path.exists():
            with path.open(newline="") as file:
                self.metrics_keys = list(csv.DictReader(file).fieldnames or [])

    def _check_log_dir_exists(self) -> None:
        """RunFolder decides what is deleted; Lightning's writer would delete metrics.csv here."""


class Checkpoint:
    """What a checkpoint says about itself, read without its tensors.

    Args:
        path: the file.

    Raises:
        ConfigurationError: if it cannot be read as a checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def content(self) -> Mapping[str, Any]:
        """The file's dictionary; tensors stay on disk."""
        try:
            content = torch.load(self.path, map_location="cpu", weights_only=True, mmap=self.path.is_file())
        except (RuntimeError, OSError, EOFError, ValueError) as error:
            raise ConfigurationError(f"{self.path} cannot be read as a checkpoint: {error}") from error
        if not isinstance(content, dict) or "state_dict" not in content:
            raise ConfigurationError(f"{self.path} is not a checkpoint of turbogr: it has no state_dict")
        return content

    @property
    def global_step(self) -> int:
        """Optimizer steps taken when it was written."""
        return int(self.content.get("global_step", 0))

    @property
    def config(self) -> str | None:
        """The merged configuration that it was trained with, YAML text; None if it was not written by the command line."""
        return self.content.get(CONFIG_KEY)

    def describe(self) -> str:
        """One line: file, epoch, step and the score it was kept for."""
        text = f"{self.path} (epoch {self.content.get('epoch', '?')}, step {self.global_step}"
        for state in self.content.get("callbacks", {}).values():
            if isinstance(state, dict) and state.get("monitor") and state.get("current_score") is not None:
                text += f", {state['monitor']} {float(state['current_score']):.4f}"
        return f"{text})"
