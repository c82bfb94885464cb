"""Summary: what is about to be trained, and on what, in two lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from lightning.pytorch import Callback, LightningModule, Trainer

from turbogr.data.datamodule import SequenceDataModule
from turbogr.models.retriever import GenerativeRetriever
from turbogr.units import in_bytes


class Summary(Callback):
    """Prints the sizes of the model and of the data to stderr when `fit` begins.

    In place of Lightning's table, which says that the item table is not trained: its rows have an optimizer of their own.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the lines, once."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        if (
            not trainer.is_global_zero
            or not isinstance(pl_module, GenerativeRetriever)
            or not isinstance(data, SequenceDataModule)
        ):
            return
        dense = sum(parameter.numel() for parameter in pl_module.parameters() if parameter.requires_grad)
        table = pl_module.embeddings
        name = type(pl_module.backbone).__name__
        state = sum(buffer.nbytes for buffer in table.optimizer.buffers())
        here = f" of them {len(table.weight):,} on rank 0," if len(table.weight) < table.num_rows else ""
        lines = [
            f"{name}: {dense:,} dense parameters; {_tables(table.spans)} of {table.num_rows:,} rows x {table.dim},"
            f"{here} {in_bytes(table.weight.nbytes)} and {in_bytes(state)} of its {type(table.optimizer).__name__}",
            f"data: {data.num_users:,} users, {data.num_items:,} items, {data.num_training_tokens:,} training tokens an epoch"
            f"{'' if data.stochastic_length is None else ', before stochastic_length leaves some out'}",
        ]
        if trainer.world_size > 1:
            size, what = data.step_size
            mean = "" if data.balance == "off" and data.tokens_per_batch is None else " in the mean"
            together = f"{trainer.world_size} ranks: a step has {size * trainer.world_size:,} {what}"
            lines.append(f"{together}, {size:,} on each rank{mean}")
        print(*lines, sep="\n", file=sys.stderr, flush=True)


def _tables(names: Iterable[str]) -> str:
    features = list(names)[1:]
    return f"tables of items, {', '.join(features)}" if features else "item table"
