"""What TurboGRStrategy cannot do, said in one sentence each, with what to do instead."""

from __future__ import annotations

import inspect

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from turbogr.errors import ConfigurationError
from turbogr.sparse.table import EmbeddingTable

_HOOK, _AFTER = "on_before_batch_transfer", "on_after_batch_transfer"


def only_table(module: LightningModule) -> EmbeddingTable:
    """The module's EmbeddingTable.

    Raises:
        ConfigurationError: it has none, or several.
    """
    tables = [part for part in module.modules() if isinstance(part, EmbeddingTable)]
    if len(tables) != 1:
        raise ConfigurationError(
            f"TurboGRStrategy shards the one EmbeddingTable of a module, and {type(module).__name__} has {len(tables)}: "
            + ("put its tables into one, by names" if tables else "use strategy auto or ddp for models without one")
        )
    return tables[0]


def refuse_module(trainer: Trainer, module: LightningModule) -> None:
    """Refuses modules and data modules that cannot be trained under TurboGRStrategy.

    Raises:
        ConfigurationError: says why, and what to do.
    """
    name = type(module).__name__
    for method in ("sparse_features", "sample_count"):
        if not callable(getattr(module, method, None)):
            raise ConfigurationError(
                f"TurboGRStrategy asks a module which rows a batch looks up before it is trained: give {name} a method "
                f"{method}(batch), as GenerativeRetriever has"
            )
    if trainer.state.fn != TrainerFn.FITTING:
        return
    if not module.automatic_optimization:
        raise ConfigurationError(
            f"TurboGRStrategy updates rows where Lightning takes the optimizer's step, and {name} optimizes manually: set "
            "automatic_optimization = True, or train with strategy auto on one device"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigurationError(
            f"TurboGRStrategy loads batches ahead itself: let {name}.training_step take a batch instead of dataloader_iter"
        )
    data = trainer.datamodule  # type: ignore[attr-defined]
    for owner in (module, data):
        if owner is not None and is_overridden(_HOOK, owner):
            raise ConfigurationError(
                f"{type(owner).__name__}.{_HOOK} would run after the batch's rows were asked for: do its work in the loader's "
                "collate_fn"
            )
        if owner is not None and trainer.strategy.root_device.type != "cpu" and is_overridden(_AFTER, owner):
            raise ConfigurationError(
                f"{type(owner).__name__}.{_AFTER} would change a batch whose rows were found on the host, before it was copied "
                f"to {trainer.strategy.root_device}: do its work in the loader's collate_fn, or in training_step"
            )


def refuse_on_ranks(trainer: Trainer) -> None:
    """Refuses what would leave ranks waiting for each other, where there are several.

    Raises:
        ConfigurationError: says why, and what to do.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        raise ConfigurationError(
            "Lightning requeues a SLURM job from within a signal handler, wherever each rank stands, and a checkpoint takes "
            "them all at one point: pass plugins=SLURMEnvironment(auto_requeue=False), or start the ranks with torchrun"
        )
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "save_on_exception", False):
            raise ConfigurationError(
                f"{type(callback).__name__}: save_on_exception needs all ranks, and those that did not fail stand elsewhere: "
                "leave it out, and resume from the last checkpoint (every_n_train_steps, LastCheckpoint)"
            )


def refuse_precision(strategy: Strategy) -> None:
    """Refuses precisions that scale the loss.

    Raises:
        ConfigurationError: names one that does.
    """
    if getattr(strategy.precision_plugin, "scaler", None) is not None:
        raise ConfigurationError(
            f"precision {strategy.precision_plugin.precision} scales the loss, and rows' gradients with it: use bf16-mixed or "
            "32-true"
        )


def refuse_optimizers(optimizers: list[torch.optim.Optimizer]) -> None:
    """Refuses optimizers that compute a batch more than once a step.

    Raises:
        ConfigurationError: names one that does.
    """
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ConfigurationError(
            "LBFGS computes each batch several times, and TurboGRStrategy fetches its rows once: choose another optimizer, "
            "such as torch.optim.AdamW"
        )


def refuse_second_loader() -> None:
    """Raises ConfigurationError: `train_dataloader` returned several loaders."""
    raise ConfigurationError(
        "TurboGRStrategy loads one training loader ahead, and train_dataloader returned several: combine them into one whose "
        "batches hold everything"
    )
