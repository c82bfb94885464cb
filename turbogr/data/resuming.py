"""Where a resumed run stands, and whether its data and options are those that it was interrupted with."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.progress import _ProcessedTracker

_EARLIER = {
    "batch_size": 0,
    "ranks": 1,
    "tokens_per_batch": None,
    "stochastic_length": None,
    "balance": "off",
    "balance_cost": None,
    "balance_method": "greedy",
    "max_tokens_per_rank": None,
    "negative_sampling": "uniform",
    "popularity_exponent": 1.0,
}
"""What versions that did not know these options did."""
_WHO = ("balance", "balance_cost", "balance_method", "max_tokens_per_rank", "ranks")
"""Who trains a user, not what a step trains; unless ranks thin their own users, or draw negatives among their own tokens."""
_SIZE = ("batch_size", "tokens_per_batch")


def settle_progress(trainer: Trainer) -> int:
    """Count the batches trained so far, at the moment when an epoch or the rest of one begins.

    Lightning counts a batch as processed right after its optimizer step, and restores that count, wherever the checkpoint was
    written (`on_train_batch_end`, `on_validation_end`, `on_train_epoch_end`, `on_exception`). Its other counters are one off in
    a resumed run, in two ways that a second resume would then suffer from, so they are brought into line here:

    - after resuming from the `on_train_batch_end` of an epoch's last batch, Lightning 2.6 enters the next epoch without
      counting it as started, and later takes any checkpoint of that epoch for one of a finished epoch;
    - after resuming from an interrupted step, its total of started batches keeps that step, and later a checkpoint of
      `on_train_batch_end` is not recognised as such.

    Args:
        trainer: in `fit`, about to fetch the first batch.

    Returns:
        Batches trained, in all epochs and across resumed runs.
    """
    epochs = trainer.fit_loop.epoch_progress
    for epoch in (epochs.total, epochs.current):
        assert isinstance(epoch, _ProcessedTracker)
        epoch.ready = epoch.started = epoch.processed + 1
    batches = trainer.fit_loop.epoch_loop.batch_progress.total
    assert isinstance(batches, _ProcessedTracker)
    batches.ready = batches.started = batches.completed = batches.processed
    return batches.processed


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """How a checkpoint's data and order differ from ours.

    Ranks may differ if the users of a step stay the same, and so may how they share them; but not where they thin histories
    (stochastic length), each up to its own load, or draw negatives from their own part of the batch.

    Args:
        theirs: `SequenceDataModule.state_dict` of the checkpoint, perhaps of an earlier version.
        ours: the same of this run.

    Returns:
        For each option "name was this and is that".
    """
    theirs = _EARLIER | theirs
    elsewhere = {*_WHO, *_SIZE, "vocabulary"}  # the last is part of the content
    if ours["stochastic_length"] is not None or ours["negative_sampling"] == "in_batch":
        elsewhere -= set(_WHO)
    found = [f"{k} was {theirs.get(k)!r} and is {v!r}" for k, v in ours.items() if k not in elsewhere and theirs.get(k) != v]
    units = [state["tokens_per_batch"] for state in (theirs, ours)]
    if all(isinstance(unit, int) for unit in units):
        size, what = "tokens_per_batch", "tokens"
    elif units[0] != units[1]:
        return [*found, f"tokens_per_batch was {units[0]!r} and is {units[1]!r}"]
    else:
        size, what = "batch_size", "users"
    was, now = (state[size] * state["ranks"] for state in (theirs, ours))
    if was != now:
        texts = [str(state[size]) for state in (theirs, ours)]
        if max(theirs["ranks"], ours["ranks"]) > 1:
            texts = [
                f"{state[size]} x {state['ranks']} ranks = {together} {what} a step"
                for state, together in ((theirs, was), (ours, now))
            ]
        found.append(f"{size} was {texts[0]} and is {texts[1]}")
    return found
