"""Any table of events, CSV or Parquet, whose columns for user, item and time are named by options."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from turbogr.data.sources.column_types import column_types
from turbogr.data.sources.common import Clock, Intake, Kind, Place, column_is_sound, expand, readable, shorten, value_fault
from turbogr.data.sources.text import Layout, TextLog, split_header
from turbogr.data.sources.where import Condition
from turbogr.errors import ConfigurationError, DataError

_DELIMITERS = (",", "\t", ";", "|", "::")
_MAGIC = b"PAR1"
_TIMESTAMPS = Clock("ms", checked=False)  # what a column of timestamps may hold: anything
_HEAD_BYTES = 1 << 16
_BATCH_ROWS = 1 << 20
_HINT = "; text ids need --string-ids"
# Above it, floats of these widths skip whole numbers: 2**53 + 1 has become 2**53 before anybody reads it.
_EXACT = {16: 2**11, 32: 2**24, 64: 2**53}


class Events:
    """Tables of events.

    Attributes:
        filters: the text of ``--where``, if given.
        files: the tables, in reading order.
        text_ids: whether ids are text rather than int64.
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

        Raises:
            DataError: a path cannot be read, or a folder holds no table.
            ConfigurationError: one column has two roles, or the condition does not judge single rows.
        """
        if len({user, item, time}) < 3:
            raise ConfigurationError(f"--user {user!r}, --item {item!r} and --time {time!r} must be three different columns")
        self._roles = (user, item, time)
        self._condition = None if where is None else Condition(where)
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
        is_parquet = {file: _is_parquet(file) for file in self.files}
        layouts = {file: self._layout(file) for file in self.files if not is_parquet[file]}
        conditional = [TextLog(file, _conditional(layout), self._clock) for file, layout in layouts.items()]
        inferred = column_types(conditional)
        for file in self.files:
            if is_parquet[file]:
                found = self._parquet(file, intake)
            else:
                found = TextLog(file, layouts[file], self._clock, inferred).tables(intake)
            for table in found:
                user, item, time = (table[name] for name in self._roles)
                if self._condition is None:
                    dropped = pa.array(np.zeros(len(table), dtype=np.uint8))
                else:
                    dropped = self._condition.dropped(table)
                yield pa.table([user, item, time, dropped], names=["user", "item", "time", "dropped"])

    def _wanted(self, file: Path, names: Sequence[str], word: str = "line") -> dict[str, Kind]:
        """The columns to read from a table that has these.

        Raises:
            DataError: a name of the condition fits two columns, as SQL does not tell upper from lower case.
        """
        ids = Kind.TEXT_ID if self.text_ids else Kind.ID
        wanted = dict(zip(self._roles, (ids, ids, Kind.TIME), strict=True))
        for name in names:
            if self._condition is not None and name.lower() in self._condition.columns:
                if (count := [each.lower() for each in names].count(name.lower())) > 1:
                    raise Place(file, 1, word).error(name, f"--where uses the column, and it is there {count} times")
                wanted.setdefault(name, Kind.INFERRED)
        return wanted

    def _layout(self, file: Path) -> Layout:
        with readable(file) as stream:
            head = stream.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0]
        # The delimiter that makes most of the wanted names appear in the header; ties go to the comma.
        headers: dict[str, list[str]] = {}
        for delimiter in _DELIMITERS:
            if delimiter.encode() not in head:
                headers[delimiter] = []
                continue
            try:
                headers[delimiter] = split_header(head, Layout({}, delimiter, quoted=len(delimiter) == 1))
            except csv.Error:
                # Quotes do not fit this delimiter; where they fit none, reading the file says what is wrong with it.
                headers[delimiter] = []
        delimiter = max(_DELIMITERS, key=lambda each: (len(set(self._roles) & set(headers[each])), len(headers[each])))
        return Layout(self._wanted(file, headers[delimiter]), delimiter, quoted=len(delimiter) == 1, id_hint=_HINT)

    def _parquet(self, file: Path, intake: Intake) -> Iterator[pa.Table]:
        with intake.open(file) as next_block:
            try:
                table = pq.ParquetFile(file)
                names = table.schema_arrow.names
                for name in self._roles:
                    if (count := names.count(name)) != 1:
                        state = "missing" if count == 0 else f"there {count} times"
                        raise Place(file, 1, "row").error(name, f"the column is {state}; the table has {', '.join(names)}")
                first_row = 1
                wanted = self._wanted(file, names, "row")
                for batch in table.iter_batches(_BATCH_ROWS, columns=list(wanted)):
                    if len(batch):
                        yield self._typed(file, pa.Table.from_batches([batch]), wanted, first_row)
                        first_row += len(batch)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{file}: cannot be read as Parquet ({error})") from error
            while next_block():
                pass  # Parquet is read out of order; hash and size come from reading it once more from start to end
        if first_row == 1:
            raise Place(file, 1, "row").error(None, "the table is empty; remove it from the arguments if that is right")

    def _typed(self, file: Path, table: pa.Table, wanted: dict[str, Kind], first_row: int) -> pa.Table:
        for name, kind in wanted.items():
            column, clock = table[name], self._clock
            if kind is Kind.INFERRED:
                continue
            if column.null_count:
                missing = int(np.argmax(column.is_null().to_numpy()))
                raise Place(file, first_row + missing, "row").error(name, "the value is missing (NULL)")
            if kind is Kind.TIME and (pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)):
                if (message := self._clock.timestamps_fault(f"{file}, column {name!r}")) is not None:
                    raise Place(file, first_row, "row").error(name, message)
                # Cutting microseconds off is wanted; seconds that overflow are not.
                finer = pa.types.is_timestamp(column.type) and column.type.unit in ("us", "ns")
                column = column.cast(pa.timestamp("ms", tz=getattr(column.type, "tz", None)), safe=not finer).cast(pa.int64())
                clock = _TIMESTAMPS
            column = self._cast(file, name, column, kind, first_row)
            if kind is Kind.TIME:
                clock.start(column[0].as_py(), f"{file}, row {first_row}, column {name!r}")
            if not column_is_sound(column, kind, clock):
                for index, value in enumerate(column.to_pylist()):
                    message = value_fault(value, kind, clock) if kind is not Kind.TEXT_ID else (None if value else "is empty")
                    if message is not None:
                        raise Place(file, first_row + index, "row").error(name, message)
            table = table.set_column(table.schema.get_field_index(name), name, column)
        return table

    def _cast(self, file: Path, name: str, column: pa.ChunkedArray, kind: Kind, first_row: int) -> pa.ChunkedArray:
        target = kind.arrow_type
        is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
        if kind is not Kind.TEXT_ID and not is_number:
            hint = _HINT if kind is Kind.ID else "; write it as an integer or a timestamp"
            raise Place(file, first_row, "row").error(name, f"the column is of type {column.type}, not of whole numbers{hint}")
        if pa.types.is_floating(column.type):
            limit = _EXACT[column.type.bit_width]
            inexact = pc.greater_equal(pc.abs(column.cast(pa.float64())), float(limit)).to_numpy()
            if inexact.any():
                index = int(np.argmax(inexact))
                raise Place(file, first_row + index, "row").error(
                    name,
                    f"{shorten(str(column[index].as_py()))} is a number of type {column.type}, which holds whole numbers "
                    f"exactly only below {limit}; store the column as integers",
                )
        try:
            return column.cast(target)
        except pa.ArrowInvalid:
            for index, value in enumerate(column.to_pylist()):
                try:
                    pa.array([value], column.type).cast(target)
                except pa.ArrowInvalid:
                    raise Place(file, first_row + index, "row").error(
                        name, f"{shorten(str(value))} is not a whole number of 64 bits"
                    ) from None
            raise


def _is_parquet(file: Path) -> bool:
    with readable(file) as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


def _conditional(layout: Layout) -> Layout:
    """The same file with only the columns wanted that the condition alone uses."""
    return replace(layout, wanted={name: kind for name, kind in layout.wanted.items() if kind is Kind.INFERRED})


def _tables_of(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.iterdir() if file.suffix in (".csv", ".tsv", ".parquet") and file.is_file())
    if not found:
        raise DataError(f"{folder}: holds no .csv, .tsv or .parquet file")
    return found
