"""Loaders as the strategy wants them: training runs ahead of the trainer, evaluation ends on all ranks at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from torch import distributed as dist

from turbogr.errors import ConfigurationError
from turbogr.strategies.agreement import gather_numbers
from turbogr.strategies.pipeline import InFlight, Pipeline

_KEPT_STATES = 16  # of a stateful loader: more than batches are ever in flight


class LookaheadLoader:
    """A training loader whose batches a Pipeline loads ahead; in every other respect the loader within.

    Lightning takes its attributes from it and sets them on it, so both are passed on.

    Args:
        inner: the user's loader.
        pipeline: which batches are handed out from.
        trainer: whose progress says where in an epoch an iteration begins.
        length: batches that every rank has, at least; None where that is not known.
    """

    # What is set on Lightning's behalf goes to the loader within, but for these.
    _batches: Iterator[Any]
    _skip: int
    begun: bool

    def __init__(self, inner: Any, pipeline: Pipeline, trainer: Trainer, length: int | None) -> None:
        self.__dict__.update(_inner=inner, _pipeline=pipeline, _trainer=trainer, _length=length)
        self.__dict__.update(_batches=iter(()), _skip=0, begun=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
        else:
            setattr(self._inner, name, value)

    def __len__(self) -> int:
        """Batches of the rank that has fewest.

        Raises:
            TypeError: that is not known.
        """
        if self._length is None:
            raise TypeError(f"{type(self._inner).__name__} has no length")
        return self._length

    def __iter__(self) -> Iterator[InFlight]:
        """Begins an epoch, or the rest of one."""
        self.begun = True
        # Lightning does so after it has called iter(); workers take their first indices here.
        _set_sampler_epoch(self._inner, self._trainer.fit_loop.epoch_progress.current.processed)
        # At once, not with the first batch: a DataLoader draws from the global stream here, as it does without a strategy.
        self._batches = iter(self._inner)
        self._pipeline.begin(self, self._span)
        return self

    def __next__(self) -> InFlight:
        """The next batch in flight."""
        return self._pipeline.hand_out()

    def pull(self) -> Any | None:
        """The next batch of the loader within; None at its end."""
        for _ in range(self._skip):  # batches that a run trained before it was resumed
            next(self._batches, None)
        self._skip = 0
        return next(self._batches, None)

    def _span(self) -> tuple[int, float]:
        """Indices of the first batch, and of the one after the last, that this iteration may give."""
        loop = self._trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        end = self._trainer.num_training_batches
        # Without a length, Lightning fetches a batch before it has settled where a resumed run stands.
        resumed = loop.restarting and not progress.is_last_batch
        first = progress.current.ready if end != float("inf") else progress.current.processed if resumed else 0
        self._begin_at(first)
        return first, end

    def _begin_at(self, first: int) -> None:
        self._skip = first


class StatefulLookaheadLoader(LookaheadLoader):
    """The same for a loader that can be saved and restored: its state is that after the last trained batch.

    A class of its own, because Lightning counts the loaders that have a state, and loads a checkpoint into as many only.
    """

    _states: dict[int, dict[str, Any]]
    _pulled: int

    def __init__(self, inner: Any, pipeline: Pipeline, trainer: Trainer, length: int | None) -> None:
        super().__init__(inner, pipeline, trainer, length)
        self.__dict__.update(_states={}, _pulled=0)

    def pull(self) -> Any | None:
        """As in LookaheadLoader; keeps the state behind the batch."""
        host = super().pull()
        self._pulled += 1
        self._keep()
        return host

    def state_dict(self) -> dict[str, Any]:
        """State of the loader within, as of the last trained batch."""
        trained = self._trainer.fit_loop.epoch_loop.batch_progress.current.processed
        return self._states[trained] if trained in self._states else self._inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the loader within."""
        self._inner.load_state_dict(state)

    def _begin_at(self, first: int) -> None:
        self._skip = 0  # it goes on where it was saved
        self._states = {}
        self._pulled = first
        self._keep()

    def _keep(self) -> None:
        self._states[self._pulled] = self._inner.state_dict()
        self._states.pop(self._pulled - _KEPT_STATES, None)


class EvenLoader:
    """An evaluation loader of unknown length on several ranks: it ends on all at once, or none goes on.

    Rows are looked up, and the catalogue is ranked, by all ranks together; a rank without a batch would leave the others
    waiting.

    Args:
        inner: the user's loader.
        name: of the stage, for the message.
        group: all ranks, on gloo.
    """

    def __init__(self, inner: Any, name: str, group: dist.ProcessGroup) -> None:
        self.__dict__.update(_inner=inner, _name=name, _group=group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __iter__(self) -> Iterator[Any]:
        """Batches, as long as every rank has one.

        Raises:
            ConfigurationError: on all ranks, if some have one and some have none.
        """
        done = 0
        batches = iter(self._inner)
        while True:
            batch = next(batches, None)
            have = gather_numbers(int(batch is not None), self._group)
            if not any(have):
                return
            if not all(have):
                raise uneven_error(self._name, [f"rank {have.index(0)} has {done}, rank {have.index(1)} has more"])
            done += 1
            yield batch


def training_loader(inner: Any, pipeline: Pipeline, trainer: Trainer, group: dist.ProcessGroup | None) -> LookaheadLoader:
    """The look-ahead loader for a training loader; all ranks call it together.

    Args:
        inner: the user's loader.
        pipeline: as above.
        trainer: as above.
        group: all ranks, on gloo; None for a single rank.
    """
    lengths = _lengths(inner, group)
    length = None if min(lengths) < 0 else min(lengths)
    kind = StatefulLookaheadLoader if isinstance(inner, _Stateful) else LookaheadLoader
    return kind(inner, pipeline, trainer, length)


def evaluation_loader(inner: Any, name: str, group: dist.ProcessGroup) -> Any:
    """An evaluation loader for several ranks: `inner` itself, if every rank has equally many batches.

    Args:
        inner: the user's loader.
        name: of the stage.
        group: all ranks, on gloo.

    Raises:
        ConfigurationError: on all ranks, if the numbers of batches differ.
    """
    lengths = _lengths(inner, group)
    if min(lengths) < 0:
        return EvenLoader(inner, name, group)
    if len(set(lengths)) > 1:
        raise uneven_error(name, [f"rank {rank} has {length}" for rank, length in enumerate(lengths)])
    return inner


def uneven_error(name: str, numbers: list[str]) -> ConfigurationError:
    """The refusal of evaluation with different numbers of batches."""
    return ConfigurationError(
        f"{name}: the ranks have different numbers of batches ({', '.join(numbers)}), but they look rows up together: give "
        "every rank equally many, as SequenceDataModule does; a batch may be empty"
    )


def _lengths(inner: Any, group: dist.ProcessGroup | None) -> list[int]:
    """Batches of every rank; -1 where not known."""
    length = sized_len(inner)
    own = -1 if length is None else length
    return [own] if group is None else gather_numbers(own, group)
