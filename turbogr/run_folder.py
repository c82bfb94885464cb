"""The folder of one run: what lies where, what may be overwritten, which checkpoint is meant by a name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from turbogr.checkpoints import HEADER, is_directory, read
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
    def checkpoints(self) -> Path:
        """Folder of best.ckpt and last.ckpt, each a file or a directory."""
        return self.path / "checkpoints"

    def checkpoint(self, name: str) -> Path:
        """Where the checkpoint `name` ("best" or "last") is, whether or not it exists."""
        return self.checkpoints / f"{name}.ckpt"

    def resolve(self, ckpt_path: str) -> Path:
        """The checkpoint, file or directory, meant by "best", "last" or a path.

        Raises:
            ConfigurationError: if there is none; the message names those that exist.
        """
        path = self.checkpoint(ckpt_path) if ckpt_path in (BEST, LAST) else Path(ckpt_path)
        if path.is_file() or is_directory(path):
            return path
        if path.is_dir():
            raise ConfigurationError(f"{path} is a folder but no checkpoint: it holds no {HEADER}")
        there = ", ".join(str(p) for p in sorted(self.checkpoints.glob("*.ckpt"))) or f"none in {self.checkpoints}"
        raise ConfigurationError(
            f"there is no checkpoint {path} (checkpoints found: {there}); train first with `turbogr fit`, or name one with "
            "--ckpt_path, or the run's folder with --trainer.default_root_dir"
        )

    def earlier_run(self) -> list[Path]:
        """Files of an earlier run, and checkpoints that are directories, that a new one would overwrite."""
        files = [self.config, self.path / "metrics.csv", *self.checkpoints.glob("*.ckpt")]
        return sorted(file for file in files if file.exists())

    def refuse_earlier_run(self) -> None:
        """Raises ConfigurationError if a new run would overwrite an earlier one's files."""
        if files := self.earlier_run():
            names = ", ".join(str(file.relative_to(self.path)) for file in files)
            raise ConfigurationError(
                f"{self.path} holds an earlier run ({names}). Continue it with --ckpt_path last, replace it with "
                "--overwrite, or choose another folder with --trainer.default_root_dir"
            )

    def files_to_replace(self) -> list[Path]:
        """All that an earlier run left, and nothing else that may lie in the folder."""
        reports = [
            self.path / name for name in ("report.png", "test.json", "test.png", "load_balance.png", "predictions.parquet")
        ]
        reports += [path for form in ("json", "png") for path in self.path.glob(f"timeline*.{form}")]
        events = (self.path / "tensorboard").rglob("events.out.tfevents.*")
        return [file for file in [*self.earlier_run(), *reports, *events] if file.exists()]

    def refuse_unwritable(self) -> None:
        """Raises ConfigurationError if the folder can neither be written nor created."""
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            reason = "may not be written" if there.is_dir() else "is no folder"
            raise ConfigurationError(
                f"the run cannot be written to {self.path}: {there} {reason}; choose another folder with "
                "--trainer.default_root_dir"
            )


class Checkpoint:
    """What a checkpoint says about itself, read without its tensors.

    Args:
        path: the file or directory.

    Raises:
        ConfigurationError: if it cannot be read as a checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def content(self) -> Mapping[str, Any]:
        """Its dictionary; tensors stay on disk."""
        try:
            content = read(self.path)
        except (RuntimeError, OSError, EOFError, ValueError, UnpicklingError) as error:
            raise ConfigurationError(
                f"{self.path} cannot be read as a checkpoint ({type(error).__name__}): it is damaged or incomplete"
            ) from error
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
        """One line: where it is, epoch, step and the score it was kept for."""
        # Lightning numbers epochs from 0, people count from 1.
        text = f"{self.path} (epoch {int(self.content.get('epoch', 0)) + 1}, step {self.global_step}"
        for state in self.content.get("callbacks", {}).values():
            if isinstance(state, dict) and state.get("monitor") and state.get("current_score") is not None:
                text += f", {state['monitor']} {float(state['current_score']):.4f}"
        return f"{text})"
