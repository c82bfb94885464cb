"""PredictionWriter: recommendations as one Parquet file with the ids of the source data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from turbogr.errors import ConfigurationError


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


class PredictionWriter(BasePredictionWriter):
    """Writes what `predict_step` returns, batch by batch, and never holds more than one batch.

    `predict_step` returns (user rows int64 [B], item rows int64 [B, K], scores float [B, K]), best items first; item row -1
    means that the user has no further unseen item, and is left out. The file has one row a user:

    - `user_id`: original id, int64 or string;
    - `item_ids`: list of original ids, best first;
    - `scores`: list of float32, as long as `item_ids`.

    It gets its name only once it is complete. Call `trainer.predict(..., return_predictions=False)`, else Lightning keeps every
    batch in memory.

    Args:
        path: the file; None is predictions.parquet in the run folder (`Trainer(default_root_dir=...)`).

    Raises:
        ConfigurationError: predicting on several devices, without a data module that knows the original ids, or with a
            `predict_step` that returns something else.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        super().__init__(write_interval="batch")
        self.path = None if path is None else Path(path)
        self._writer: pq.ParquetWriter | None = None
        self._users = 0

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the data module and prepares the folder."""
        if trainer.world_size > 1:
            raise ConfigurationError(
                f"predictions are written by one process, but this run has {trainer.world_size}: set trainer.devices and "
                "trainer.num_nodes to 1"
            )
        self._ids(trainer)
        self._target(trainer).parent.mkdir(parents=True, exist_ok=True)
        self._users = 0

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Appends one batch."""
        table = _table(self._ids(trainer), *_checked(prediction))
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._partial(trainer), table.schema)
        self._writer.write_table(table)
        self._users += table.num_rows

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Completes the file and says where it is.

        Raises:
            ConfigurationError: there was no user to predict for.
        """
        # Not in on_predict_end, which Lightning leaves out where there is no batch.
        if stage != "predict":
            return
        if self._writer is None:
            raise ConfigurationError("nothing was predicted: the data has no user, or trainer.limit_predict_batches is 0")
        self._close()
        self._partial(trainer).replace(self._target(trainer))
        rank_zero_info(f"Predictions for {self._users} users: {self._target(trainer)}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Removes the unfinished file."""
        if self._writer is not None:
            with suppress(OSError):  # a full disk refuses the last bytes too
                self._close()
            self._writer = None
            self._partial(trainer).unlink(missing_ok=True)

    def _close(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._writer = None

    def _target(self, trainer: Trainer) -> Path:
        return self.path or Path(trainer.default_root_dir) / "predictions.parquet"

    def _partial(self, trainer: Trainer) -> Path:
        target = self._target(trainer)
        return target.with_name(f".{target.name}.partial")

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
