"""A prepared folder, opened: memory-mapped arrays, original ids, and how often each item may be trained on."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from turbogr.data.features import FeatureTable, chosen, rows_of
from turbogr.data.manifest import MIN_EVENTS, PROTOCOLS, read_manifest
from turbogr.errors import ConfigurationError, DataError

_AGAIN = "prepare the folder again with `turbogr data prepare`"

Protocol = Literal["three_way", "published"]
Stage = Literal["validation", "test", "predict"]

HELD_OUT: dict[Protocol, dict[Stage, int]] = {
    "three_way": {"validation": 2, "test": 1, "predict": 0},
    "published": {"validation": 1, "test": 1, "predict": 0},
}
"""How many of a user's last events an evaluation may not see; the first of them is its target. Training sees what validation
sees."""

_COUNT_CHUNK = 1 << 22


class PreparedData:
    """The events of every user, oldest first, as ``turbogr data prepare`` wrote them. Made by :meth:`open`.

    Attributes:
        path: the folder.
        manifest: the folder's manifest (``docs/data.md`` lists its keys).
        vocabulary: content hash of the folder that the rows of items and features come from: its own, or with
            ``--vocabulary-of`` another one's.
        num_users: number of users U; user rows are 0..U-1.
        num_items: number of items V; item rows are 0..V-1, and there is no padding row.
        num_events: number of events E.
        time_unit: unit of ``times``: ``"s"``, ``"ms"``, or ``"none"`` where the source has no times.
        protocol: how the source was meant to be split: ``"three_way"`` or ``"published"``.
        items: int32 [E], memory-mapped: the item row of every event, users one after the other.
        times: int64 [E], memory-mapped: the time of every event in ``time_unit`` ("none": position within the user).
        offsets: int64 [U + 1], memory-mapped: user u's events are ``items[offsets[u]:offsets[u + 1]]``, three or more.
        features: the features beside the item, in the order in which they were asked for; ``item_rows`` is memory-mapped.
        event_features: by name, int32 [E], memory-mapped: the row of every event in the table of an event-side feature.
    """

    path: Path
    manifest: dict[str, Any]
    vocabulary: str
    num_users: int
    num_items: int
    num_events: int
    time_unit: str
    protocol: str
    items: np.ndarray
    times: np.ndarray
    offsets: np.ndarray
    features: tuple[FeatureTable, ...]
    event_features: dict[str, np.ndarray]

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open a prepared folder and check that its files belong together.

        The check reads sizes, types and ``offsets``; it does not read the events, so that opening is fast at any size.

        Args:
            path: the folder that ``turbogr data prepare`` wrote.

        Returns:
            The opened folder.

        Raises:
            DataError: the folder or a file of it is absent, unreadable, of another format, or does not match the manifest.
        """
        data = cls()
        data.path = Path(path)
        data.manifest = read_manifest(data.path)
        data.vocabulary = data.manifest.get("vocabulary", data.manifest["content_hash"])
        data.num_users, data.num_items, data.num_events = (
            data.manifest[f"num_{what}"] for what in ("users", "items", "events")
        )
        data.time_unit, data.protocol = data.manifest["time_unit"], data.manifest["protocol"]
        data.items = _map(data.path / "items.npy", np.int32, data.num_events)
        data.times = _map(data.path / "times.npy", np.int64, data.num_events)
        data.offsets = _map(data.path / "offsets.npy", np.int64, data.num_users + 1)
        lengths = np.diff(data.offsets)
        if data.offsets[0] != 0 or data.offsets[-1] != data.num_events or (lengths < MIN_EVENTS).any():
            raise DataError(
                f"{data.path / 'offsets.npy'}: does not divide {data.num_events} events into {data.num_users} users of "
                f"at least {MIN_EVENTS} events each; {_AGAIN}"
            )
        data._ids = {}
        for map_name, rows in (("users", data.num_users), ("items", data.num_items)):
            data._check_map(data.path / data.manifest["maps"].get(map_name, ""), rows)
        data._open_features()
        return data

    def item_ids(self, rows: np.ndarray) -> pa.Array:
        """Translate item rows to original ids.

        Args:
            rows: integers of any shape, flattened; each 0..V-1.

        Returns:
            int64 or string ids, one a row.

        Raises:
            DataError: a row is not of the catalogue, or the map cannot be read.
        """
        return self._original("items", rows, self.num_items)

    def user_ids(self, rows: np.ndarray) -> pa.Array:
        """Translate user rows to original ids.

        Args:
            rows: integers of any shape, flattened; each 0..U-1.

        Returns:
            int64 or string ids, one a row.

        Raises:
            DataError: a row is not a user's, or the map cannot be read.
        """
        return self._original("users", rows, self.num_users)

    def feature_values(self, name: str) -> pa.Array:
        """Read what the rows of a feature mean.

        Args:
            name: of the feature.

        Returns:
            int64, float64 or string, one original value a row, ascending; null at ``MISSING_ROW``.

        Raises:
            ConfigurationError: there is no such feature.
            DataError: the map cannot be read.
        """
        chosen(self.features, [name], self.path)
        if name not in self._feature_values:
            file = self.path / next(each["map"] for each in self.manifest["features"] if each["name"] == name)
            column = _read_parquet(file, lambda file: pq.read_table(file, columns=["value"])["value"])
            self._feature_values[name] = column.combine_chunks()
        return self._feature_values[name]

    def feature_rows(self, name: str, values: Iterable[Any]) -> np.ndarray:
        """Translate raw values, such as those of new events at inference, to rows of a feature.

        Args:
            name: of the feature.
            values: raw values; None is a missing one.

        Returns:
            int64, one row a value: ``MISSING_ROW`` where the value is missing or does not occur in this folder.

        Raises:
            ConfigurationError: there is no such feature, or a value is not of its type.
            DataError: the map cannot be read.
        """
        return rows_of(values, self.feature_values(name))

    def training_counts(self, protocol: str | None = None) -> np.ndarray:
        """Count how often each item occurs in training events.

        Args:
            protocol: ``"three_way"`` holds out the last two events of every user, ``"published"`` the last one; None takes the
                manifest's.

        Returns:
            int64 [V].

        Raises:
            ConfigurationError: no such protocol.
        """
        protocol = protocol or self.protocol
        if protocol not in PROTOCOLS:
            raise ConfigurationError(f"protocol is {protocol!r}; choose one of {', '.join(PROTOCOLS)}")
        counts = np.zeros(self.num_items, dtype=np.int64)
        for start in range(0, self.num_events, _COUNT_CHUNK):
            counts += np.bincount(self.items[start : start + _COUNT_CHUNK], minlength=self.num_items)
        for back in range(1, HELD_OUT[cast(Protocol, protocol)]["validation"] + 1):
            counts -= np.bincount(self.items[self.offsets[1:] - back], minlength=self.num_items)
        return counts

    def __reduce__(self) -> tuple[Callable[[Path], "PreparedData"], tuple[Path]]:
        # A pickled memmap is a copy of its contents; loader workers map the files again instead.
        return type(self).open, (self.path,)

    _ids: dict[str, pa.Array]
    _feature_values: dict[str, pa.Array]

    def _open_features(self) -> None:
        self._feature_values, self.event_features, tables = {}, {}, []
        for feature in self.manifest["features"]:
            name, side, rows = feature["name"], feature["side"], feature["rows"]
            array = _map(self.path / feature["file"], np.int32, self.num_events if side == "event" else self.num_items)
            self._check_map(self.path / feature["map"], rows)
            if side == "event":
                self.event_features[name] = array
            tables.append(FeatureTable(name, side, rows, array if side == "item" else None))
        self.features = tuple(tables)

    def _check_map(self, file: Path, rows: int) -> None:
        found = _read_parquet(file, lambda file: pq.read_metadata(file).num_rows)
        if found != rows:
            raise DataError(f"{file}: holds {found} rows, the manifest says {rows}; {_AGAIN}")

    def _original(self, which: str, rows: np.ndarray, count: int) -> pa.Array:
        rows = np.asarray(rows).reshape(-1)
        bad = (rows < 0) | (rows >= count)
        if bad.any():
            raise DataError(f"{self.path}: row {rows[bad][0]} is none of the {count} {which} (0..{count - 1})")
        if which not in self._ids:
            file = self.path / self.manifest["maps"][which]
            column = _read_parquet(file, lambda file: pq.read_table(file, columns=["id"])["id"])
            self._ids[which] = column.combine_chunks()
        return self._ids[which].take(pa.array(rows.astype(np.int64)))


def _map(file: Path, dtype: type[np.generic], length: int) -> np.ndarray:
    """Memory-map one array; an empty one, which the system cannot map, is impossible because every folder has users."""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise DataError(f"{file}: absent; {_AGAIN}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not a readable NumPy array ({error}); {_AGAIN}") from error
    if array.dtype != dtype or array.shape != (length,):
        expected = f"{np.dtype(dtype).name} [{length}]"
        found = f"{array.dtype.name} {list(array.shape)}"
        raise DataError(f"{file}: holds {found}, the manifest says {expected}; {_AGAIN}")
    return array


def _read_parquet(file: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(file)
    except FileNotFoundError as error:
        raise DataError(f"{file}: absent; {_AGAIN}") from error
    except (OSError, pa.ArrowException, KeyError) as error:
        raise DataError(f"{file}: not a readable Parquet file ({error}); {_AGAIN}") from error
