"""From user rows to a JaggedBatch: whole batches at once, straight from the memory-mapped arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from turbogr.batch import NO_TARGET, JaggedBatch
from turbogr.data.negatives import Int64Array, NegativeSampler
from turbogr.data.prepared import HELD_OUT, PreparedData, Protocol, Stage
from turbogr.data.samplers import BatchKey
from turbogr.data.stochastic_length import thinned

__all__ = ["HELD_OUT", "EvaluationHistories", "Protocol", "Stage", "TrainingHistories", "target_counts"]

_COUNT_CHUNK = 1 << 22


class TrainingHistories(Dataset[JaggedBatch]):
    """Training sequences: a user's training events 1..n give n - 1 tokens, token i having event i + 1 as its target.

    Of longer histories the newest `max_length` tokens are used. Of a thinned history (`BatchKey.kept`) some of these, chosen at
    random: each sees only the others before it, and its target is still the event that followed it.

    Args:
        data: the prepared folder.
        protocol: decides which events are training events.
        max_length: most tokens of a history.
        negatives: draws each token's negatives.
        features: names of the event-side features that batches carry.
        seed: decides which tokens of a thinned history stay.
    """

    def __init__(
        self,
        data: PreparedData,
        protocol: Protocol,
        max_length: int,
        negatives: NegativeSampler,
        features: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        self.data = data
        self.held_out = HELD_OUT[protocol]["validation"]
        self.max_length = max_length
        self.negatives = negatives
        self.features = tuple(features)
        self.seed = seed

    def users(self) -> Int64Array:
        """int64 [N], ascending rows of the users who have two training events or more: one makes no token."""
        return np.flatnonzero(np.diff(np.asarray(self.data.offsets)) - self.held_out >= 2)

    def lengths(self, users: Int64Array) -> Int64Array:
        """int64 [B], tokens that each of these users trains on."""
        begins, ends = _bounds(self.data, users, self.held_out)
        return np.minimum(ends - begins - 1, self.max_length)

    def batch_lengths(self, key: BatchKey) -> Int64Array:
        """int64 [B], tokens of each history of this batch: less than `lengths` where they are thinned."""
        return self.lengths(key.samples) if key.kept is None else key.kept

    def __getitem__(self, key: BatchKey) -> JaggedBatch:
        """Build the batch of `key.samples`, with negatives of `key.epoch`; thinned histories keep each token's own target."""
        users = key.samples
        _, ends = _bounds(self.data, users, self.held_out)
        whole, lengths = self.lengths(users), self.batch_lengths(key)
        if key.kept is None:
            events = _spans(ends - 1 - lengths, lengths)
        else:
            positions = thinned(whole, lengths, users, self.seed, key.epoch)
            events = np.repeat(ends - 1 - whole, lengths) + positions
        targets = _gather(self.data.items, events + 1)
        return JaggedBatch(
            values=_gather(self.data.items, events),
            offsets=_offsets(lengths),
            timestamps=_gather(self.data.times, events),
            targets=targets,
            target_times=_gather(self.data.times, events + 1),
            user_ids=torch.tensor(users),
            max_length=self.max_length,
            negatives=self.negatives.draw(users, lengths, key.epoch, targets),
            features=_features(self.data, self.features, events),
        )


class EvaluationHistories:
    """Histories to rank the next item for; a `collate_fn` that turns a list of user rows into a batch.

    The history is the newest `max_length` events before the held-out one, which is the last token's target. `seen` is what must
    not be ranked: all the user's earlier items, of which the published protocol knows only those within the truncated history
    (that is how the published figures were computed). In `predict` nothing is held out, the last target is `NO_TARGET`, and
    `seen` is all the user's items under both protocols: nobody compares recommendations with published figures.

    Args:
        data: the prepared folder.
        protocol: decides which event is held out.
        stage: "validation", "test" or "predict".
        max_length: most tokens of a history.
        query_time: in `predict`, when the recommendation is asked for, in the data's unit; None is each user's last event.
        features: names of the event-side features that batches carry.
    """

    def __init__(
        self,
        data: PreparedData,
        protocol: Protocol,
        stage: Stage,
        max_length: int,
        query_time: int | None = None,
        features: Sequence[str] = (),
    ) -> None:
        self.data = data
        self.held_out = HELD_OUT[protocol][stage]
        self.max_length = max_length
        self.query_time = query_time
        self.features = tuple(features)
        self.sees_all = protocol == "three_way" or stage == "predict"

    def __call__(self, samples: Sequence[int]) -> JaggedBatch:
        """Build the batch of the users with these rows."""
        users = np.asarray(samples, dtype=np.int64)
        begins, ends = _bounds(self.data, users, self.held_out)
        lengths = np.minimum(ends - begins, self.max_length)
        events = _spans(ends - lengths, lengths)
        offsets = _offsets(lengths)
        values, timestamps = _gather(self.data.items, events), _gather(self.data.times, events)
        if self.held_out:
            targets, target_times = _gather(self.data.items, events + 1), _gather(self.data.times, events + 1)
        else:
            # The event after a user's last one is another user's, and does not exist for the last user.
            last = offsets[1:] - 1
            targets, target_times = values.roll(-1), timestamps.roll(-1)
            targets[last] = NO_TARGET
            target_times[last] = timestamps[last] if self.query_time is None else self.query_time
        seen, seen_offsets = values, offsets
        if self.sees_all:
            seen, seen_offsets = _gather(self.data.items, _spans(begins, ends - begins)), _offsets(ends - begins)
        return JaggedBatch(
            values=values,
            offsets=offsets,
            timestamps=timestamps,
            targets=targets,
            target_times=target_times,
            user_ids=torch.tensor(users),
            max_length=self.max_length,
            seen=seen,
            seen_offsets=seen_offsets,
            features=_features(self.data, self.features, events),
        )


def target_counts(data: PreparedData, protocol: Protocol, max_length: int) -> Int64Array:
    """Count how often each item is a target in an epoch of training on whole histories.

    Args:
        data: the prepared folder.
        protocol: decides which events are training events; held-out events are not counted.
        max_length: most tokens of a history; older events are not counted.

    Returns:
        int64 [V]; the sum is the number of training tokens.
    """
    counts = np.zeros(data.num_items, dtype=np.int64)
    step = max(1, _COUNT_CHUNK // max_length)
    for start in range(0, data.num_users, step):
        begins, ends = _bounds(data, np.arange(start, min(start + step, data.num_users)), HELD_OUT[protocol]["validation"])
        lengths = np.clip(ends - begins - 1, 0, max_length)
        counts += np.bincount(np.asarray(data.items)[_spans(ends - lengths, lengths)], minlength=data.num_items)
    return counts


def _bounds(data: PreparedData, users: Int64Array, held_out: int) -> tuple[Int64Array, Int64Array]:
    """First and one past the last event that may be used of each user: int64 [B] each."""
    offsets = np.asarray(data.offsets)
    return offsets[users], offsets[users + 1] - held_out


def _spans(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """starts[0], starts[0] + 1, … lengths[0] of them, then those of starts[1], …: int64 [lengths.sum()]."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def _offsets(lengths: Int64Array) -> Tensor:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return torch.from_numpy(offsets)


def _features(data: PreparedData, names: Sequence[str], events: Int64Array) -> dict[str, Tensor]:
    """Rows of the tokens' own events, never of their targets: at inference that event has not happened yet."""
    return {name: _gather(data.event_features[name], events) for name in names}


def _gather(array: np.ndarray, events: Int64Array) -> Tensor:
    return torch.from_numpy(np.asarray(array)[events].astype(np.int64, copy=False))
