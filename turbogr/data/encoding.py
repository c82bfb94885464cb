"""Features while a folder is prepared: values become codes in DuckDB, and the codes of what is left become rows of a table."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from turbogr.data.features import MISSING_ROW
from turbogr.data.filtering import Chunk, EventStore
from turbogr.data.manifest import ContentHash
from turbogr.data.sources.common import Intake
from turbogr.data.sources.item_tables import ItemTable
from turbogr.data.workspace import Database, npy
from turbogr.errors import DataError

FOLDER = "features"

_SQL_TYPES = {pa.int64(): "BIGINT", pa.float64(): "DOUBLE", pa.string(): "VARCHAR"}
_BATCH_ROWS = 1 << 20


class Known(Protocol):
    """Features whose values have rows already."""

    def values(self, name: str) -> pa.Array:
        """The value of every row, null in row 0."""
        ...


class FeatureFiles:
    """Writes the files of features into a folder that is being prepared.

    Attributes:
        entries: the manifest's entries of the features written so far.
    """

    def __init__(self, folder: Path, content: ContentHash) -> None:
        """Take the folder.

        Args:
            folder: the prepared folder.
            content: its hash, to which every feature is added.
        """
        self._folder, self._content = folder, content
        self.entries: list[dict[str, Any]] = []

    def rows_file(self, name: str) -> Path:
        """The file of a feature's rows; its folder exists afterwards."""
        (self._folder / FOLDER).mkdir(exist_ok=True)
        return self._folder / FOLDER / f"{name}.npy"

    def add(self, name: str, side: str, values: pa.Array, counts: np.ndarray) -> None:
        """Write the map of a feature whose rows are written, and note both.

        Args:
            name: of the feature.
            side: ``"event"`` or ``"item"``.
            values: original values of the rows 1, 2, …
            counts: int64 [1 + values], events or items of every row, ``MISSING_ROW`` first.
        """
        values = pa.concat_arrays([pa.nulls(1, values.type), values])
        file, map_file = f"{FOLDER}/{name}.npy", f"{FOLDER}/{name}.parquet"
        table = pa.table({"row": np.arange(len(values), dtype=np.int64), "value": values, "count": counts.astype(np.int64)})
        pq.write_table(table, self._folder / map_file, compression="zstd")
        self._content.add_feature(name, side, np.load(self._folder / file, mmap_mode="r"), values)
        self.entries.append({"name": name, "side": side, "rows": len(values), "file": file, "map": map_file})


class EventFeatures:
    """The features of events; in the table ``raw`` their columns are named ``feature_0``, ``feature_1`` and so on."""

    def __init__(self, names: Sequence[str], database: Database, known: Known | None = None) -> None:
        """Take the features.

        Args:
            names: of the features, in the order of their columns.
            database: where the events are.
            known: the values that have rows; None takes those that occur.
        """
        self.names, self._database, self._known = list(names), database, known

    def columns(self, table: pa.Table) -> str:
        """SQL for the columns of ``raw``, given the first table that goes into it; each begins with a comma.

        Raises:
            DataError: values are text where the known ones are numbers, or the reverse.
        """
        for name in self.names:
            ours = table[name].type
            theirs = ours if self._known is None else self._known.values(name).type
            if pa.types.is_string(ours) != pa.types.is_string(theirs):
                raise DataError(f"feature {name!r} is of type {ours} in the logs, but of type {theirs} in --vocabulary-of")
        types = [_SQL_TYPES[table[name].type] for name in self.names]
        return "".join(f", feature_{number} {kind}" for number, kind in enumerate(types))

    def number(self) -> None:
        """Number the known values, else those of all events that the source's own filters leave, from 1, in ascending order."""
        for number, name in enumerate(self.names):
            if self._known is None:
                _number_values(self._database, f"feature_{number}", f"feature_{number}", "raw WHERE dropped = 0")
                continue
            values = self._known.values(name).slice(1)
            self._database.execute(f"CREATE TABLE feature_{number} (value {_SQL_TYPES[values.type]}, code INTEGER)")
            codes = np.arange(1, 1 + len(values), dtype=np.int32)
            self._database.append(f"feature_{number}", pa.table({"value": values, "code": codes}))

    @property
    def select(self) -> str:
        """SQL for an event's codes; each begins with a comma."""
        return "".join(f", coalesce(feature_{n}.code, {MISSING_ROW}) AS feature_{n}" for n in range(len(self.names)))

    @property
    def joins(self) -> str:
        """SQL that joins the codes to ``raw``."""
        return " ".join(f"LEFT JOIN feature_{n} ON feature_{n}.value = raw.feature_{n}" for n in range(len(self.names)))

    @contextmanager
    def writer(self, store: EventStore, files: FeatureFiles, first_file: Path) -> Iterator[Callable[[Chunk], list[np.ndarray]]]:
        """Write the rows of every event, chunk by chunk; afterwards the maps.

        Args:
            store: the events that are left.
            files: where to.
            first_file: of the logs, for the message.

        Yields:
            A function that takes the store's chunks in order, and gives int32 [e] rows of each feature.

        Raises:
            DataError: no event that is left has a value of a feature.
        """
        total = int(store.lengths.sum())
        known, counts, kept_rows, row_of = [], [], [], []
        for number, name in enumerate(self.names):
            values = self._database.table(f"SELECT value FROM feature_{number} ORDER BY code")["value"].combine_chunks()
            counts.append(store.feature_counts(number, 1 + len(values)))
            kept = counts[-1][1:] > 0 if self._known is None else np.ones(len(values), dtype=bool)
            if not kept.any():
                raise DataError(f"{first_file}: column {name!r}: no event that is kept has a value; leave this feature out")
            known.append(values.filter(pa.array(kept)))
            kept_rows.append(np.concatenate([[True], kept]))
            row_of.append(np.concatenate([[MISSING_ROW], np.cumsum(kept)]).astype(np.int32))
        with ExitStack() as stack:
            streams = [stack.enter_context(npy(files.rows_file(name), np.int32, total)) for name in self.names]

            def write(chunk: Chunk) -> list[np.ndarray]:
                rows = [rows_of_codes[codes] for rows_of_codes, codes in zip(row_of, chunk.features, strict=True)]
                for stream, array in zip(streams, rows, strict=True):
                    stream.write(array.data)
                return rows

            yield write
        for name, values, count, kept in zip(self.names, known, counts, kept_rows, strict=True):
            files.add(name, "event", values, count[kept])


class ItemFeatures:
    """The features of items that one table holds."""

    def __init__(self, table: ItemTable, number: int, database: Database) -> None:
        """Take the table.

        Args:
            table: the table.
            number: of the table, among all.
            database: where the events are.
        """
        self._table, self._database = table, database
        self._name = f"item_table_{number}"

    def read(self, intake: Intake) -> None:
        """Read the table.

        Raises:
            DataError: the first fault; an item that is there twice.
        """
        for number, rows in enumerate(self._table.tables(intake)):
            if number == 0:
                kinds = [_SQL_TYPES[column.type] for column in rows.columns]
                columns = ["item", *(f"feature_{n}" for n in range(len(kinds) - 1))]
                definition = ", ".join(f"{name} {kind}" for name, kind in zip(columns, kinds, strict=True))
                self._database.execute(f"CREATE TABLE {self._name} ({definition})")
            self._database.append(self._name, rows)
        # Counts spill to disk where lists of places would not; the places are those of one item.
        again = f"SELECT item FROM {self._name} GROUP BY item HAVING count(*) > 1 ORDER BY min(rowid) LIMIT 1"
        twice = self._database.table(
            f"SELECT item, rowid AS place FROM {self._name} WHERE item = ({again}) ORDER BY place LIMIT 2"
        ).to_pylist()
        if twice:
            first, second = (self._table.place_of(row["place"]) for row in twice)
            raise second.error(
                self._table.key,
                f"item {twice[0]['item']!r} is there again (first in {first.word} {first.number}); keep one of its rows",
            )

    def write(self, num_items: int, files: FeatureFiles) -> None:
        """Write the rows and maps of the catalogue's items. The table ``catalogue`` holds their ``id`` and ``row``.

        Args:
            num_items: size V of the catalogue.
            files: where to.

        Raises:
            DataError: no item of the catalogue has a value of a feature.
        """
        for number, name in enumerate(self._table.features):
            values, column = f"{self._name}_{number}", f"feature_{number}"
            joined = f"catalogue JOIN {self._name} ON {self._name}.item = catalogue.id"
            _number_values(self._database, values, column, f"{joined} WHERE true")
            known = self._database.table(f"SELECT value FROM {values} ORDER BY code")["value"].combine_chunks()
            if not len(known):
                raise DataError(
                    f"{self._table.file}: column {name!r}: none of the {num_items} items of the logs has a value; are "
                    f"{self._table.key!r} the ids of the logs?"
                )
            rows = np.full(num_items, MISSING_ROW, dtype=np.int32)
            query = (
                f"SELECT catalogue.row AS row, {values}.code AS code FROM {joined} JOIN {values} ON {values}.value = {column}"
            )
            for batch in self._database.batches(query, _BATCH_ROWS):
                rows[batch["row"].to_numpy()] = batch["code"].to_numpy()
            np.save(files.rows_file(name), rows)
            files.add(name, "item", known, np.bincount(rows, minlength=1 + len(known)))


def _number_values(database: Database, name: str, column: str, source: str) -> None:
    """Make the table ``name`` of ``value`` and ``code`` (1, 2, … in ascending order) of a column's values that are not null."""
    database.execute(
        f"CREATE TABLE {name} AS SELECT value, CAST(row_number() OVER (ORDER BY value) AS INTEGER) AS code "
        f"FROM (SELECT DISTINCT {column} AS value FROM {source} AND {column} IS NOT NULL)"
    )
