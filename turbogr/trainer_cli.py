"""`turbogr fit | validate | test | predict`: LightningCLI with one model class, one data class and a run folder."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

# Imported so that their short names ("SASRec", "Timeline") are accepted where a class path is.
import turbogr.callbacks.collisions
import turbogr.callbacks.load_balance
import turbogr.callbacks.logit_sharing
import turbogr.callbacks.negative_offload
import turbogr.callbacks.negative_quantization
import turbogr.callbacks.timeline
import turbogr.models.fuxi
import turbogr.models.sasrec  # noqa: F401
from turbogr.callbacks.predictions import PredictionWriter
from turbogr.callbacks.progress import EpochBar, EpochLines
from turbogr.callbacks.report import Report
from turbogr.callbacks.resume import LastCheckpoint, TrainingInterrupted
from turbogr.callbacks.run_start import ReplaceEarlierRun
from turbogr.callbacks.summary import Summary
from turbogr.callbacks.throughput import Throughput
from turbogr.checkpoints import OtherCatalogueError
from turbogr.cli_arguments import find_recipes, resume_command
from turbogr.cli_checks import (
    check_max_length,
    check_numbers,
    model_differences,
    one_max_length,
    settle_devices,
    settle_monitor,
)
from turbogr.cli_errors import explain
from turbogr.data.datamodule import SequenceDataModule
from turbogr.errors import ConfigurationError, MissingDependencyError, TurboGRError
from turbogr.files import replace_file
from turbogr.models.retriever import GenerativeRetriever
from turbogr.resources import recipes_dir
from turbogr.run_folder import BEST, CONFIG_KEY, Checkpoint, RunFolder
from turbogr.sparse.initial_rows import deferred_rows
from turbogr.strategies import TurboGRStrategy
from turbogr.strategies.failures import RankFailedError

DEFAULT_SEED = 42
CKPT_HELP = (
    "Checkpoint: best (of the run folder; the default), last, or a file.",
    "Go on from this checkpoint: last or best of the run folder, or a file. data.* and model.* must be as they were, but for "
    "model.top_k and model.predict_k; trainer.* may change.",
)
# Keys that say what one call does, not what is trained: they have no place in a configuration that is used again.
_CALL_KEYS = ("config", "ckpt_path", "weights_only", "overwrite")


def run(command: str, args: list[str], cli: type[TurboGRCLI] | None = None) -> int:
    """Runs one command of the trainer.

    Args:
        command: fit, validate, test or predict, or another one that `cli` knows.
        args: the rest of the command line.
        cli: what parses, builds and runs; None is TurboGRCLI.

    Returns:
        Exit code: 0, or 128 + signal number where a signal stopped the training.

    Raises:
        TurboGRError: for what the user can mend.
        SystemExit: with code 2 for a wrong command line.
    """
    _silence_noise()
    args = find_recipes(args)
    try:
        (cli or TurboGRCLI)(command, args)
    except TrainingInterrupted as interrupted:
        if getattr(rank_zero_only, "rank", 0) == 0:
            print(
                f"saved {interrupted.checkpoint}; to resume:\n  {resume_command(command, args, interrupted.checkpoint)}",
                file=sys.stderr,
            )
        elif "RANK" not in os.environ:
            return 0  # Lightning started this rank, and kills all others at once where one ends with another code
        return 128 + interrupted.signum
    except MisconfigurationException as error:
        raise ConfigurationError(" ".join(str(error).split())) from error
    except (TypeError, ValueError) as error:
        # jsonargparse wraps what a constructor raises into an error of its own.
        if (cause := _users_error(error) or _of_strategy(error) or _of_requirement(error)) is None:
            raise
        raise cause from error
    return 0


class Parser(LightningArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints the error and exits with code 2."""
        if not self.exit_on_error:  # a parser inside a parser: the outer one speaks
            super().error(message, ex)
        parser = _chosen(self)
        known = [a.dest for a in parser._actions if a.dest not in ("help", "==SUPPRESS==")]
        print(f"{parser.prog.replace(' [options]', '')}: error: {explain(message, known)}", file=sys.stderr)
        raise SystemExit(2)


class SaveConfig(SaveConfigCallback):
    """Writes the merged configuration into the run folder (`fit` only) and into every checkpoint."""

    def text(self) -> str:
        """The merged configuration as YAML, without what belongs to this call alone."""
        config = self.config.clone()
        for key in _CALL_KEYS:
            config.pop(key, None)
        return self.parser.dump(config, skip_unset=False, skip_validation=True)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Not yet: a run that fails before its first step must leave the configuration of the one before."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes it."""
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, "fit")

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes config.yaml."""
        path = RunFolder(Path(trainer.default_root_dir)).config
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda partial: partial.write_text(self.text()))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """As text: torch.load(weights_only=True) accepts it."""
        checkpoint[CONFIG_KEY] = self.text()


class TurboGRCLI(LightningCLI):
    """Parses, builds and runs.

    Args:
        command: fit, validate, test or predict.
        args: the rest of the command line.
    """

    trainer_type: type[Trainer] = Trainer

    def __init__(self, command: str, args: list[str]) -> None:
        self.command, self.args = command, args
        base = str(recipes_dir() / "base.yaml")
        super().__init__(
            GenerativeRetriever,
            SequenceDataModule,
            trainer_class=self.trainer_type,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=DEFAULT_SEED,
            parser_class=Parser,
            # allow_abbrev: a misspelt option must not be taken for one that starts like it
            parser_kwargs={"prog": "turbogr", "allow_abbrev": False, command: {"default_config_files": [base]}},
            args=[command, *args],
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The chosen one alone: a parser of all options is slow to build."""
        return {self.command: LightningCLI.subcommands()[self.command]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Callbacks that every run has, and options that follow from others."""
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(Report, "report")
        parser.add_lightning_class_args(PredictionWriter, "predictions")
        parser.link_arguments("data.num_items", "model.num_items", apply_on="instantiate")
        parser.link_arguments("data.features", "model.features", apply_on="instantiate")
        parser.link_arguments("data.log_q", "model.log_q", apply_on="instantiate")
        parser.link_arguments(("data.max_length", "model.backbone"), "model.backbone.init_args.max_length", one_max_length)
        if self.command == "fit":
            parser.add_argument(
                "--overwrite",
                type=bool,
                default=False,
                help="Replace an earlier run in the same folder, as soon as the first step begins.",
                nargs="?",
                const=True,
            )

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        for action in parser._actions:
            if action.dest == "ckpt_path":
                action.help = CKPT_HELP[subcommand == "fit"]
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """As Lightning's, without its warning that sys.argv was not used."""
        self.config = parser.parse_args(args)
        check_numbers(self.config[self.command])
        if self.command == "predict":
            # The writer has them on disk; keeping them in memory as well serves nobody here.
            self.config[self.command]["return_predictions"] = False
        if self.command == "test":
            self.config[self.command]["verbose"] = False  # Report's table says the same, and more

    def _parse_ckpt_path(self) -> None:
        """Lightning's would take hyperparameters out of the checkpoint; the configuration alone says what is built."""

    def before_instantiate_classes(self) -> None:
        """Settles the run folder and the checkpoint before anything is built."""
        config = self.config[self.command]
        check_max_length(self.args, config.data.max_length)
        settle_devices(config.trainer, os.environ)
        self.folder = RunFolder(Path(config.trainer.default_root_dir or default_run_folder(config)))
        config.trainer.default_root_dir = str(self.folder.path)
        config.checkpoint.dirpath = config.checkpoint.dirpath or str(self.folder.checkpoints)
        self.checkpoint: Checkpoint | None = None
        if self.command != "fit" or config.ckpt_path:
            self.checkpoint = Checkpoint(self.folder.resolve(config.ckpt_path or BEST))
            config.ckpt_path = str(self.checkpoint.path)
        self.resuming = self.checkpoint is not None and self.checkpoint.path.resolve().is_relative_to(
            self.folder.path.resolve()
        )
        if self.command != "validate":
            self.folder.refuse_unwritable()
        if self.command == "fit":
            self._check_fit(config)

    def _check_fit(self, config: Namespace) -> None:
        settle_monitor(config)
        if config.overwrite and self.resuming:
            raise ConfigurationError(
                f"--overwrite would delete the run that --ckpt_path {config.ckpt_path} goes on from: give one of the two "
                "(--overwrite=false where a configuration file asks for it)"
            )
        if not (self.resuming or config.overwrite or config.trainer.fast_dev_run):
            self.folder.refuse_earlier_run()
        if self.checkpoint is not None and (differences := self._model_differences(self.checkpoint, all_options=False)):
            raise ConfigurationError(
                f"{self.checkpoint.path} cannot be resumed: {'; '.join(differences)}. A resumed run keeps the model and the "
                "optimizers that it was begun with; restore these options, or start a new run"
            )

    def instantiate_classes(self) -> None:
        """Rows of tables that will be divided among the ranks are made by the ranks that keep them."""
        strategy = self.config[self.command].trainer.strategy
        name = strategy.class_path if isinstance(strategy, Namespace) else strategy
        sharded = str(name).rpartition(".")[2] in ("turbogr", TurboGRStrategy.__name__)
        with deferred_rows() if sharded else nullcontext():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Adds what a run has without being asked: progress, throughput, Ctrl-C."""
        config = self.config_init[self.command].trainer
        callbacks = config.callbacks or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if self.command == "fit":
            callbacks += [Throughput(), LastCheckpoint(self.folder.checkpoint("last"))]
            if self.config[self.command].overwrite and not config.fast_dev_run:
                callbacks.insert(0, ReplaceEarlierRun(self.folder.files_to_replace()))
            if config.enable_model_summary is None:
                config.enable_model_summary = False  # its table calls the item table, which is trained, non-trainable
                callbacks.append(Summary())
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if config.enable_progress_bar is not False and not has_bar:
            if sys.stderr.isatty():
                callbacks.append(EpochBar())
            else:
                config.enable_progress_bar = False
                callbacks.append(EpochLines())
        config.callbacks = callbacks
        if config.logger is None:
            config.logger = False  # Report brings metrics.csv, and TensorBoard where that is installed
        try:
            return super().instantiate_trainer(**kwargs)
        except (TypeError, ValueError, ModuleNotFoundError, MisconfigurationException) as error:
            # Lightning's own words for devices, an accelerator or a precision that this machine does not have
            raise ConfigurationError(f"the trainer cannot be built: {' '.join(str(error).split())}") from error

    def before_fit(self) -> None:
        """Says what the run goes on from."""
        if self.checkpoint is not None:
            self._say("resuming from")

    def before_validate(self) -> None:
        """Says what is evaluated."""
        self._say("validating")

    def before_test(self) -> None:
        """Says what is evaluated."""
        self._say("testing")

    def before_predict(self) -> None:
        """Says what predicts."""
        self._say("predicting with")

    def _say(self, what: str) -> None:
        assert self.checkpoint is not None
        if self.trainer.is_global_zero:
            print(f"{what} {self.checkpoint.describe()}", file=sys.stderr)

    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        except OtherCatalogueError as error:
            differences = [] if self.checkpoint is None else self._model_differences(self.checkpoint)
            raise ConfigurationError("; ".join([str(error), *differences])) from error
        except RuntimeError as error:
            strategy = self.trainer.strategy
            if isinstance(strategy, TurboGRStrategy) and strategy.failed_elsewhere:
                raise RankFailedError(strategy.failed_elsewhere) from error
            if (cause := _users_error(error)) is not None:
                raise cause from error  # what Lightning's clearing up behind it raised hides it
            if self.checkpoint is None or "loading state_dict" not in str(error):
                raise
            path, differences = self.checkpoint.path, self._model_differences(self.checkpoint)
            raise ConfigurationError(
                f"{path} was trained with another model: {'; '.join(differences) or ' '.join(str(error).split())}. Give the "
                f"configuration it was trained with: -c {self.folder.config} (the checkpoint holds it too, as {CONFIG_KEY!r})"
            ) from error

    def _model_differences(self, checkpoint: Checkpoint, all_options: bool = True) -> list[str]:
        if checkpoint.config is None:
            return []
        own = self._parser(self.command).dump(self.config[self.command], skip_unset=False, skip_validation=True)
        return model_differences(checkpoint.config, own, all_options)


def default_run_folder(config: Namespace) -> Path:
    """Names the folder of a run after its data and its backbone."""
    backbone = config.model.backbone
    name = backbone.class_path.rpartition(".")[2].lower() if isinstance(backbone, Namespace) else "hstu"
    return Path("runs") / f"{Path(config.data.path).resolve().name}-{name}"


def _users_error(error: BaseException | None) -> TurboGRError | None:
    """The first of our own errors among the causes of an error."""
    while error is not None and not isinstance(error, TurboGRError):
        error = error.__cause__ or error.__context__
    return error


def _of_strategy(error: Exception) -> TurboGRError | None:
    """What TurboGRStrategy's constructor said: where a name would do as well, jsonargparse keeps its text alone."""
    said = [line.partition(" - ")[2] for line in str(error).splitlines() if f" - {TurboGRStrategy.__name__}: " in line]
    return ConfigurationError(said[0]) if said else None


def _of_requirement(error: Exception) -> TurboGRError | None:
    """What a class said that needs a package which is not installed."""
    match = re.search(r"class_path '([^']+)':\s+(Requirement [^\n]+)", str(error))
    return MissingDependencyError(f"{match[1]}: {match[2]}") if match else None


def _chosen(parser: Any) -> Any:
    """The parser of the one subcommand, if `parser` is the one above it."""
    action = getattr(parser, "_subcommands_action", None)
    return next(iter(action.choices.values())) if action is not None and action.choices else parser


def _silence_noise() -> None:
    """Hides what Lightning says that no user of this command line can act on."""
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    # The data module has chosen the number of workers for this machine.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # A run that goes on finds its own files; whether a new one may is decided before.
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty.")

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("💡", "TPU available"))

    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(keep)
