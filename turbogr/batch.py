"""JaggedBatch: the one type that travels from the loader to the loss."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from turbogr.errors import DataError, MissingDependencyError
from turbogr.ops.copies import note_host_copy

if TYPE_CHECKING:
    from torchrec import KeyedJaggedTensor

NO_TARGET = -1
"""Value of `targets` where the next item is unknown (the last token of a user in `predict`)."""


@dataclass(frozen=True, eq=False)
class JaggedBatch:
    """B users' histories laid end to end: T tokens, no padding anywhere.

    Token i holds an event; its target is the event that follows. In training every token has a target. In evaluation
    the target of a user's last token is the held-out item, and only that one is scored; in prediction it is NO_TARGET.

    Attributes:
        values: int64 [T], item row of each token.
        offsets: int64 [B + 1], user b's tokens are `values[offsets[b]:offsets[b + 1]]`, oldest first.
        timestamps: int64 [T], when the token's event happened, in the data set's unit.
        targets: int64 [T], item row of the next event, or NO_TARGET.
        target_times: int64 [T], when the next event happened; for the last token of a user in prediction, the query time.
        user_ids: int64 [B], user row of each history.
        max_length: no history is longer than this.
        negatives: int64 [T, R], item rows drawn for each token; None in evaluation.
        seen: int64 [S], item rows that evaluation must not recommend to its user; None in training.
        seen_offsets: int64 [B + 1], user b's are `seen[seen_offsets[b]:seen_offsets[b + 1]]`.
        features: by name, int64 [T], for each token the row of its own event (never of its target) in the table of an
            event-side feature; see `turbogr.data.features.FeatureTable`. Item-side features follow from the item and are not
            here.

    Raises:
        DataError: if shapes, dtypes or offsets contradict each other.
    """

    values: Tensor
    offsets: Tensor
    timestamps: Tensor
    targets: Tensor
    target_times: Tensor
    user_ids: Tensor
    max_length: int
    negatives: Tensor | None = None
    seen: Tensor | None = None
    seen_offsets: Tensor | None = None
    features: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Checked where the batch is built (on the host, in the loader); copies to a device skip it: reading offsets
        # there would wait for the device.
        if self.values.device.type == "cpu":
            self._check()

    def _check(self) -> None:
        tokens, users = self.values.numel(), self.user_ids.numel()
        expected = {
            "values": (tokens,),
            "offsets": (users + 1,),
            "timestamps": (tokens,),
            "targets": (tokens,),
            "target_times": (tokens,),
            "user_ids": (users,),
        }
        if (self.seen is None) != (self.seen_offsets is None):
            raise DataError("JaggedBatch.seen and JaggedBatch.seen_offsets come together or not at all")
        if self.seen is not None:
            expected |= {"seen": (self.seen.numel(),), "seen_offsets": (users + 1,)}
        checked = {name: (getattr(self, name), shape) for name, shape in expected.items()}
        checked |= {f"features[{name!r}]": (rows, (tokens,)) for name, rows in self.features.items()}
        for name, (tensor, shape) in checked.items():
            if tensor.dtype != torch.int64 or tuple(tensor.shape) != shape:
                raise DataError(
                    f"JaggedBatch.{name} is {tensor.dtype} {list(tensor.shape)}, expected torch.int64 {list(shape)}"
                )
        if self.negatives is not None and (
            self.negatives.dtype != torch.int64 or self.negatives.dim() != 2 or self.negatives.shape[0] != tokens
        ):
            raise DataError(
                f"JaggedBatch.negatives is {self.negatives.dtype} {list(self.negatives.shape)}, "
                f"expected torch.int64 [{tokens}, R]"
            )
        _check_offsets("offsets", self.offsets, tokens, self.max_length)
        if self.seen is not None and self.seen_offsets is not None:
            _check_offsets("seen_offsets", self.seen_offsets, self.seen.numel(), None)

    @property
    def num_users(self) -> int:
        """B."""
        return self.user_ids.numel()

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.values.numel()

    @property
    def lengths(self) -> Tensor:
        """int64 [B], tokens of each history."""
        return self.offsets.diff()

    @property
    def last(self) -> Tensor:
        """int64 [B], index of each history's last token. Meaningless for an empty history."""
        return self.offsets[1:] - 1

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedBatch:
        """The same batch on `device`."""
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        note_host_copy(moved.offsets, self.offsets)  # operators plan by lengths, and need not wait for the device to know them
        return moved

    def pin_memory(self) -> JaggedBatch:
        """The same batch in page-locked memory, from which copies to a device are asynchronous."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to_keyed_jagged_tensor(self) -> KeyedJaggedTensor:
        """The item ids as TorchRec's KeyedJaggedTensor with keys "values", "targets" and, if drawn, "negatives".

        Raises:
            MissingDependencyError: if torchrec cannot be imported.
        """
        try:
            from torchrec import KeyedJaggedTensor
        except (ImportError, OSError) as error:
            raise MissingDependencyError(
                f"to_keyed_jagged_tensor() needs torchrec, which cannot be imported ({error}); run `turbogr doctor`"
            ) from error
        features = {"values": self.values, "targets": self.targets}
        lengths = [self.lengths, self.lengths]
        if self.negatives is not None:
            features["negatives"] = self.negatives.flatten()
            lengths.append(self.lengths * self.negatives.shape[1])
        return KeyedJaggedTensor(keys=list(features), values=torch.cat(list(features.values())), lengths=torch.cat(lengths))

    def _map(self, function: Any) -> JaggedBatch:
        moved: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {name: function(value) for name, value in moved.items() if isinstance(value, Tensor)}
        return replace(self, **moved, features={name: function(rows) for name, rows in self.features.items()})


def _check_offsets(name: str, offsets: Tensor, total: int, max_length: int | None) -> None:
    lengths = offsets.diff()
    if int(offsets[0]) != 0 or int(offsets[-1]) != total or (lengths.numel() and int(lengths.min()) < 0):
        raise DataError(
            f"JaggedBatch.{name} must rise from 0 to {total}, found first {int(offsets[0])}, last {int(offsets[-1])}, "
            f"smallest step {int(lengths.min()) if lengths.numel() else 0}"
        )
    if max_length is not None and lengths.numel() and int(lengths.max()) > max_length:
        row = int(lengths.argmax())
        raise DataError(f"history {row} of the batch has {int(lengths[row])} tokens, more than max_length {max_length}")
