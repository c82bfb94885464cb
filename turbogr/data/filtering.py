"""Filters over events that are already ordered: repeats, k-core, newest, long enough.

The events lie in flat files, one a column, users one after the other; a filter reads them from start to end in pieces of whole
users and writes what it keeps to new ones. Memory is bounded by the numbers of users and items, never by the number of events.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

CHUNK_EVENTS = 1 << 21

Mask = Callable[["Chunk"], np.ndarray]


class Chunk:
    """Some whole users' events.

    Attributes:
        first_user: row of the first user; the others follow.
        lengths: int64 [u], events of each user.
        items: int32 [e], item rows.
        times: int64 [e], times.
        features: int32 [e] each, codes of every feature of events.
    """

    def __init__(
        self, first_user: int, lengths: np.ndarray, items: np.ndarray, times: np.ndarray, *features: np.ndarray
    ) -> None:
        self.first_user, self.lengths, self.items, self.times = first_user, lengths, items, times
        self.features = features

    @property
    def users(self) -> np.ndarray:
        """int64 [e]: user of each event, counted from the chunk's first."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def per_user(self, mask: np.ndarray) -> np.ndarray:
        """Count the events of each user for which a mask (bool [e]) is true: int64 [u]."""
        total = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        ends = np.cumsum(self.lengths)
        return total[ends] - total[ends - self.lengths]


class EventStore:
    """Ordered events on disk.

    Attributes:
        lengths: int64 [U], events left of every user.
        item_counts: int64 [V], events left of every item.
    """

    def __init__(self, folder: Path, num_items: int, num_features: int = 0) -> None:
        """Make an empty store.

        Args:
            folder: an existing folder for its files.
            num_items: number of item rows V.
            num_features: number of features that every event has.
        """
        self._folder = folder
        self._columns: list[tuple[str, type[np.generic]]] = [("items", np.int32), ("times", np.int64)]
        self._columns += [(f"feature_{number}", np.int32) for number in range(num_features)]
        self._generation = 0
        self.lengths = np.zeros(0, dtype=np.int64)
        self.item_counts = np.zeros(num_items, dtype=np.int64)

    def fill(self, lengths: np.ndarray, blocks: Iterator[tuple[np.ndarray, ...]]) -> None:
        """Write all events.

        Args:
            lengths: int64 [U], events of every user.
            blocks: item rows (int32), times (int64) and each feature's codes (int32) of successive events, users one after the
                other.
        """
        self._write(lengths, blocks)

    def chunks(self) -> Iterator[Chunk]:
        """Read all events, in order."""
        total = int(self.lengths.sum())
        if total == 0:
            return
        columns = [np.memmap(self._file(name), dtype, mode="r", shape=(total,)) for name, dtype in self._columns]
        ends = np.cumsum(self.lengths)
        user, start = 0, 0
        while user < len(ends):
            # Whole users only; one user longer than a chunk is a chunk of its own.
            last = max(int(np.searchsorted(ends, start + CHUNK_EVENTS, side="right")), user + 1)
            end = int(ends[last - 1])
            yield Chunk(user, self.lengths[user:last], *(np.asarray(column[start:end]) for column in columns))
            user, start = last, end

    def keep(self, mask_of: Mask) -> None:
        """Drop the events for which a mask is false.

        Args:
            mask_of: gives bool [e] for a chunk; it may use ``lengths`` and ``item_counts``, which change only afterwards.
        """
        lengths = np.zeros_like(self.lengths)

        def kept() -> Iterator[tuple[np.ndarray, ...]]:
            for chunk in self.chunks():
                mask = mask_of(chunk)
                lengths[chunk.first_user : chunk.first_user + len(chunk.lengths)] = chunk.per_user(mask)
                yield tuple(column[mask] for column in (chunk.items, chunk.times, *chunk.features))

        self._write(lengths, kept())

    def feature_counts(self, number: int, size: int) -> np.ndarray:
        """Count how often each code of a feature is left: int64 [size]."""
        counts = np.zeros(size, dtype=np.int64)
        for chunk in self.chunks():
            np.add(counts, np.bincount(chunk.features[number], minlength=size), out=counts)
        return counts

    def counts(self) -> dict[str, int]:
        """Count events, users and items that are left."""
        return {
            "events": int(self.lengths.sum()),
            "users": int(np.count_nonzero(self.lengths)),
            "items": int(np.count_nonzero(self.item_counts)),
        }

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.{self._generation}"

    def _write(self, lengths: np.ndarray, blocks: Iterator[tuple[np.ndarray, ...]]) -> None:
        old = [self._file(name) for name, _ in self._columns]
        new = [self._folder / f"{name}.{self._generation + 1}" for name, _ in self._columns]
        counts = np.zeros_like(self.item_counts)
        with ExitStack() as stack:
            # Plain writes: a full disk is an OSError here, where a write through a memory map would kill the process.
            files = [stack.enter_context(file.open("wb")) for file in new]
            for block in blocks:
                for stream, column in zip(files, block, strict=True):
                    stream.write(np.ascontiguousarray(column).data)
                np.add(counts, np.bincount(block[0], minlength=len(counts)), out=counts)
        for file in old:
            file.unlink(missing_ok=True)
        self._generation += 1
        self.lengths, self.item_counts = lengths, counts


def drop_repeats(store: EventStore, keep: str) -> None:
    """Keep one event of every user-item pair.

    Args:
        store: the events.
        keep: ``"first"`` or ``"last"``, by (time, file order).
    """

    def mask_of(chunk: Chunk) -> np.ndarray:
        pairs = chunk.users * len(store.item_counts) + chunk.items
        if keep == "last":
            pairs = pairs[::-1]
        chosen = np.unique(pairs, return_index=True)[1]
        mask = np.zeros(len(pairs), dtype=bool)
        mask[chosen if keep == "first" else len(pairs) - 1 - chosen] = True
        return mask

    store.keep(mask_of)


def k_core(store: EventStore, k: int, passes: int | None, done: Callable[[int], None] = lambda count: None) -> int:
    """Drop users and items with fewer than k events, again and again.

    A pass counts once, then drops the events of every user and of every item that is short of k. The fixed point does not
    depend on that order; a limited number of passes does.

    Args:
        store: the events.
        k: least number of events.
        passes: number of passes, or None for as many as change something.
        done: called after each pass with the number of passes so far.

    Returns:
        Number of passes that dropped something.
    """
    count = 0
    while passes is None or count < passes:
        good_users, good_items = store.lengths >= k, store.item_counts >= k
        if not (store.lengths[~good_users].any() or store.item_counts[~good_items].any()):
            break

        def mask_of(chunk: Chunk, good_users: np.ndarray = good_users, good_items: np.ndarray = good_items) -> np.ndarray:
            of_user = good_users[chunk.first_user : chunk.first_user + len(chunk.lengths)]
            return np.repeat(of_user, chunk.lengths) & good_items[chunk.items]

        store.keep(mask_of)
        count += 1
        done(count)
    return count


def keep_newest(store: EventStore, length: int) -> None:
    """Keep the last ``length`` events of every user."""

    def mask_of(chunk: Chunk) -> np.ndarray:
        from_end = np.repeat(np.cumsum(chunk.lengths), chunk.lengths) - np.arange(len(chunk.items))
        return from_end <= length

    store.keep(mask_of)


def drop_short(store: EventStore, length: int) -> int:
    """Drop users with fewer than ``length`` events.

    Returns:
        Number of users with at least one event who were dropped.
    """
    short = (store.lengths < length) & (store.lengths > 0)
    if short.any():
        store.keep(
            lambda chunk: np.repeat(~short[chunk.first_user : chunk.first_user + len(chunk.lengths)], chunk.lengths),
        )
    return int(short.sum())
