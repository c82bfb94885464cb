"""Any table of events, CSV or Parquet, whose columns for user, item, time and features are named by options."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from turbogr.data.sources.categories import FeatureColumns
from turbogr.data.sources.common import Clock, Intake, Kind, Place, expand
from turbogr.data.sources.tables import Tables
from turbogr.data.sources.where import Condition
from turbogr.errors import ConfigurationError, DataError


class Events:
    """Tables of events.

    Attributes:
        filters: the text of ``--where``, if given.
        files: the tables, in reading order.
        text_ids: whether ids are text rather than int64.
        features: names of the columns that are features of the events.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        user: str,
        item: str,
        time: str,
        where: str | None = None,
        text_ids: bool = False,
        time_unit: str = "auto",
        features: Sequence[str] = (),
        text_features: Sequence[str] = (),
    ) -> None:
        """Find the tables.

        Args:
            paths: CSV (told by content: not Parquet) and Parquet files, or folders of them.
            user: name of the column of users.
            item: name of the column of items.
            time: name of the column of times.
            where: SQL condition on the columns of a row; events for which it is not true are dropped.
            text_ids: take ids as text.
            time_unit: ``"s"`` and ``"ms"`` take times as they are; ``"auto"`` tells the unit by their size and checks them.
            features: names of further columns, the features of the events.
            text_features: those of the features that are text whatever their cells look like.

        Raises:
            DataError: a path cannot be read, or a folder holds no table.
            ConfigurationError: one column has two roles, or the condition does not judge single rows.
        """
        if len({user, item, time}) < 3:
            raise ConfigurationError(f"--user {user!r}, --item {item!r} and --time {time!r} must be three different columns")
        for name in features:
            if name in (user, item, time):
                raise ConfigurationError(f"--features names {name!r}, which is already the column of users, items or times")
        self._roles = (user, item, time)
        self._condition = None if where is None else Condition(where)
        self.features = tuple(features)
        self._feature_columns = FeatureColumns(features, text_features)
        self.text_ids = text_ids
        self.filters = [] if where is None else [f"where {where}"]
        self.files = expand(paths, _tables_of)
        self._clock = Clock(None) if time_unit == "auto" else Clock(time_unit, checked=False)

    @property
    def time_unit(self) -> str:
        """``"s"`` or ``"ms"``; known once the first block was read."""
        return str(self._clock.unit)

    def tables(self, intake: Intake) -> Iterator[pa.Table]:
        """Give all events in reading order (:meth:`turbogr.data.sources.common.Source.tables`)."""
        tables = Tables(self.files, [*self._roles, *self.features], self._wanted, self._clock)
        for place, table in tables.read(intake):
            user, item, time = (table[name] for name in self._roles)
            if self._condition is None:
                dropped = pa.array(np.zeros(len(table), dtype=np.uint8))
            else:
                dropped = self._condition.dropped(table)
            events = pa.table([user, item, time, dropped], names=["user", "item", "time", "dropped"])
            for name, column in self._feature_columns.take(place, table).items():
                events = events.append_column(name, column)
            yield events

    def _wanted(self, file: Path, names: Sequence[str], word: str = "line") -> dict[str, Kind]:
        """The columns to read from a table that has these.

        Raises:
            DataError: a name of the condition fits two columns, as SQL does not tell upper from lower case.
        """
        ids = Kind.TEXT_ID if self.text_ids else Kind.ID
        wanted = dict(zip(self._roles, (ids, ids, Kind.TIME), strict=True)) | self._feature_columns.kinds
        for name in names:
            if self._condition is not None and name.lower() in self._condition.columns:
                if (count := [each.lower() for each in names].count(name.lower())) > 1:
                    raise Place(file, 1, word).error(name, f"--where uses the column, and it is there {count} times")
                wanted.setdefault(name, Kind.INFERRED)
        return wanted


def _tables_of(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.iterdir() if file.suffix in (".csv", ".tsv", ".parquet") and file.is_file())
    if not found:
        raise DataError(f"{folder}: holds no .csv, .tsv or .parquet file")
    return found
