"""`turbogr describe`: what a configuration costs, before anything is trained."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from rich.console import Console

from turbogr.cli_checks import check_max_length
from turbogr.errors import ConfigurationError
from turbogr.planning import plan
from turbogr.planning_tables import print_plan, write_json
from turbogr.trainer_cli import TurboGRCLI
from turbogr.trainer_cli import run as run_with


def run(args: list[str]) -> int:
    """Runs `turbogr describe`; as `turbogr.trainer_cli.run`."""
    return run_with("describe", args, DescribeCLI)


class _Options(Trainer):
    """Never built: LightningCLI takes a command's own options from the trainer's method of that name."""

    def describe(self, model: LightningModule, datamodule: LightningDataModule, json: Path | None = None) -> None:
        """Parameters, FLOPs and bytes of a training step, without training.

        Args:
            model: what is described.
            datamodule: what it would be trained on.
            json: Also write the numbers to this file.
        """


class DescribeCLI(TurboGRCLI):
    """Parses as `fit` does; builds the data, and the model without memory; plans and prints."""

    trainer_type: type[Trainer] = _Options

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Its own command."""
        return {self.command: {"model", "datamodule"}}

    def before_instantiate_classes(self) -> None:
        """Nothing is written, so no run folder is settled."""
        check_max_length(self.args, self.config[self.command].data.max_length)

    def instantiate_classes(self) -> None:
        """No trainer: a configuration for a device that this machine lacks can be described, too."""
        try:
            with torch.device("meta"):
                self.config_init = self.parser.instantiate_classes(self.config)
        except (RuntimeError, ValueError) as error:
            if "meta tensor" not in str(error):
                raise
            # Of jsonargparse's nested messages, the one that tells.
            reason = next(line for line in str(error).splitlines() if "meta tensor" in line).strip(" -")
            raise ConfigurationError(
                f"the model cannot be described: it is built without values, and a constructor reads some ({reason})"
            ) from error
        self.model, self.datamodule = (self._get(self.config_init, key) for key in ("model", "data"))

    def _run_subcommand(self, subcommand: str) -> None:
        config = self.config_init[subcommand]
        found = plan(self.model, self.datamodule, str(config.trainer.precision or "32-true"))
        if config.trainer.accumulate_grad_batches > 1:
            found.notes.append(f"the optimizers take a step after {config.trainer.accumulate_grad_batches} such batches")
        print_plan(found)
        if config.json is not None:
            write_json(found.as_dict(), config.json)
            Console(highlight=False, markup=False, soft_wrap=True).print(f"written to {config.json}")
