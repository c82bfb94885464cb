"""PredictionWriter: recommendations as one Parquet file with the ids of the source data."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from turbogr.errors import ConfigurationError

_ROW = "user_row"
"""Column of the ranks' own files by which rank 0 orders them."""


class OriginalIds(Protocol):
    """Translates rows to the ids of the source data; `PreparedData` does."""

    def user_ids(self, rows: np.ndarray) -> pa.Array:
        """Original ids of user rows."""

    def item_ids(self, rows: np.ndarray) -> pa.Array:
        """Original ids of item rows."""


@runtime_checkable
class PredictionData(Protocol):
    """What a data module offers so that predictions can be written; `SequenceDataModule` does."""

    @property
    def prepared(self) -> OriginalIds:
        """The prepared data."""


class PredictionWriter(Callback):
    """Writes what `predict_step` returns, batch by batch, and never holds more than one batch.

    `predict_step` returns (user rows int64 [B], item rows int64 [B, K], scores float [B, K]), best items first; item row -1
    means that the user has no further unseen item, and is left out. The file has one row a user:

    - `user_id`: original id, int64 or string;
    - `item_ids`: list of original ids, best first;
    - `scores`: list of float32, as long as `item_ids`.

    It gets its name only once it is complete. Call `trainer.predict(..., return_predictions=False)`, else Lightning keeps every
    batch in memory.

    With several ranks each writes a file of its own beside it, and in the end rank 0 makes them one, in the order of user rows
    within each batch: the file that one process with a batch of all ranks' users writes. The folder must be one that all nodes
    see.

    Args:
        path: the file; None is predictions.parquet in the run folder (`Trainer(default_root_dir=...)`).

    Raises:
        ConfigurationError: predicting without a data module that knows the original ids, with a `predict_step` that returns
            something else, or in a folder where rank 0 does not find what the others wrote.
    """

    # Not Lightning's BasePredictionWriter, for which it would keep the row of every user in memory.

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._writer: pq.ParquetWriter | None = None
        self._batches = 0

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the data module and prepares the folder."""
        self._ids(trainer)
        self._target(trainer).parent.mkdir(parents=True, exist_ok=True)
        self._batches = 0

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Appends one batch."""
        users, items, scores = _checked(outputs)
        table = _table(self._ids(trainer), users, items, scores)
        if trainer.world_size > 1:
            table = table.append_column(_ROW, pa.array(users))
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._own(trainer), table.schema)
        # One row group a batch: that is how rank 0 finds what belongs together.
        self._writer.write_table(table if table.num_rows else self._writer.schema.empty_table())
        self._batches += 1

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Completes this rank's file, and waits until all ranks have."""
        self._close()
        trainer.strategy.barrier("PredictionWriter")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Rank 0 gives the file its name and says where it is.

        Raises:
            ConfigurationError: there was no user to predict for.
        """
        # Not in on_predict_end: Lightning leaves that out where there is no batch, and the other ranks would wait meanwhile.
        if stage != "predict":
            return
        if not self._batches:
            raise ConfigurationError("nothing was predicted: the data has no user, or trainer.limit_predict_batches is 0")
        if not trainer.is_global_zero:
            return
        partial = self._partial(trainer)
        if trainer.world_size > 1:
            self._merge_parts(trainer, partial)
        users = pq.read_metadata(partial).num_rows
        partial.replace(self._target(trainer))
        rank_zero_info(f"Predictions for {users} users: {self._target(trainer)}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Removes unfinished files."""
        if not self._batches and self._writer is None:
            return
        with suppress(OSError):  # a full disk refuses the last bytes too
            self._close()
        self._writer = None
        self._own(trainer).unlink(missing_ok=True)
        if trainer.is_global_zero:
            self._partial(trainer).unlink(missing_ok=True)

    def _merge_parts(self, trainer: Trainer, into: Path) -> None:
        parts = [self._part(trainer, rank) for rank in range(trainer.world_size)]
        if absent := [path for path in parts if not path.is_file()]:
            raise ConfigurationError(
                f"rank {parts.index(absent[0])} wrote its predictions to {absent[0]}, which rank 0 does not see: choose a "
                "folder that all nodes share, with trainer.default_root_dir or predictions.path"
            )
        try:
            _merge(parts, into)
        finally:
            for path in parts:
                path.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _target(self, trainer: Trainer) -> Path:
        return self.path or Path(trainer.default_root_dir) / "predictions.parquet"

    def _partial(self, trainer: Trainer) -> Path:
        target = self._target(trainer)
        return target.with_name(f".{target.name}.partial")

    def _part(self, trainer: Trainer, rank: int) -> Path:
        target = self._target(trainer)
        return target.with_name(f".{target.name}.rank-{rank}.partial")

    def _own(self, trainer: Trainer) -> Path:
        return self._partial(trainer) if trainer.world_size == 1 else self._part(trainer, trainer.global_rank)

    @staticmethod
    def _ids(trainer: Trainer) -> OriginalIds:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, PredictionData):
            raise ConfigurationError(
                f"PredictionWriter needs a data module with prepared data (SequenceDataModule), found {type(data).__name__}"
            )
        return data.prepared


def _checked(prediction: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if (
        not isinstance(prediction, tuple)
        or [type(part) for part in prediction] != [Tensor] * 3
        or [part.dim() for part in prediction] != [1, 2, 2]
        or prediction[0].shape[0] != prediction[1].shape[0]
        or prediction[1].shape != prediction[2].shape
    ):
        parts = prediction if isinstance(prediction, tuple) else (prediction,)
        found = ", ".join(str(list(part.shape)) if isinstance(part, Tensor) else type(part).__name__ for part in parts)
        raise ConfigurationError(
            f"predict_step must return (user rows [B], item rows [B, K], scores [B, K]) for PredictionWriter, returned {found}"
        )
    users, items, scores = (part.detach().cpu() for part in prediction)
    return users.numpy(), items.numpy(), scores.float().numpy()


def _table(ids: OriginalIds, users: np.ndarray, items: np.ndarray, scores: np.ndarray) -> pa.Table:
    kept = items >= 0
    offsets = pa.array(np.concatenate([[0], kept.sum(1).cumsum()]).astype(np.int32))
    return pa.table(
        {
            "user_id": ids.user_ids(users),
            "item_ids": pa.ListArray.from_arrays(offsets, ids.item_ids(items[kept])),
            "scores": pa.ListArray.from_arrays(offsets, pa.array(scores[kept], pa.float32())),
        }
    )


def _merge(parts: list[Path], into: Path) -> None:
    """Makes one file of the ranks': row group by row group, each in the order of user rows."""
    with ExitStack() as stack:
        files = [stack.enter_context(pq.ParquetFile(path)) for path in parts]
        writer = None
        for batch in range(max(file.num_row_groups for file in files)):
            # A rank without a single user does not know the types of its columns.
            shares = [file for file in files if batch < file.num_row_groups and file.metadata.row_group(batch).num_rows]
            if shares:
                table = pa.concat_tables([file.read_row_group(batch) for file in shares]).sort_by(_ROW).drop_columns(_ROW)
                if writer is None:
                    writer = stack.enter_context(pq.ParquetWriter(into, _plain(table.schema)))
                writer.write_table(table.cast(writer.schema).combine_chunks())


def _plain(schema: pa.Schema) -> pa.Schema:
    """The schema that `_table` made, from one that was read back: without the numbers that Parquet gives to columns."""
    user, items = schema.field("user_id").type, schema.field("item_ids").type.value_type
    return pa.schema({"user_id": user, "item_ids": pa.list_(items), "scores": pa.list_(pa.float32())})
