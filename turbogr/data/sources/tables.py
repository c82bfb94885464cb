"""Tables whose wanted columns are named by options: CSV with a header, or Parquet, told by content."""

import csv
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from turbogr.data.sources.column_types import column_types
from turbogr.data.sources.common import Clock, Intake, Kind, Place, column_is_sound, readable, shorten, value_fault
from turbogr.data.sources.text import Layout, TextLog, split_header
from turbogr.errors import DataError

ID_HINT = "; text ids need --string-ids"

_DELIMITERS = (",", "\t", ";", "|", "::")
_MAGIC = b"PAR1"
_TIMESTAMPS = Clock("ms", checked=False)  # what a column of timestamps may hold: anything
_HEAD_BYTES = 1 << 16
_BATCH_ROWS = 1 << 20
# Above it, floats of these widths skip whole numbers: 2**53 + 1 has become 2**53 before anybody reads it.
_EXACT = {16: 2**11, 32: 2**24, 64: 2**53}

Wanted = Callable[[Path, Sequence[str], str], dict[str, Kind]]


class Tables:
    """Files of one data set that have some columns in common."""

    def __init__(
        self,
        files: Sequence[Path],
        required: Collection[str],
        wanted: Wanted,
        clock: Clock,
        known: Layout | None = None,
    ) -> None:
        """Take the files; nothing is read yet.

        Args:
            files: CSV and Parquet files, in reading order.
            required: names of columns that every file must have; a CSV file's delimiter is the one that shows most of them.
            wanted: given a file, the names of its columns and what counts its places ("line" or "row"), the columns to read and
                what they must hold.
            clock: the data set's clock.
            known: how the files are written, where it is known; None finds the delimiter in each file's header.
        """
        self._files, self._required, self._wanted, self._clock, self._known = files, required, wanted, clock, known

    def read(self, intake: Intake) -> Iterator[tuple[Place, pa.Table]]:
        """Read all files block by block.

        Args:
            intake: opens the files.

        Yields:
            The first line or row of the file, and the wanted columns of some of its rows; columns whose type is inferred have
            one in all CSV files, and their own in Parquet.

        Raises:
            DataError: the first fault, with its file, line and column.
        """
        is_parquet = {file: _is_parquet(file) for file in self._files}
        layouts = {file: self._known or self._layout(file) for file in self._files if not is_parquet[file]}
        inferred = column_types([TextLog(file, _to_infer(layout), self._clock) for file, layout in layouts.items()])
        for file in self._files:
            if is_parquet[file]:
                place, tables = Place(file, 1, "row"), self._parquet(file, intake)
            else:
                place, tables = Place(file, 1), TextLog(file, layouts[file], self._clock, inferred).tables(intake)
            for table in tables:
                yield place, table

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
        wanted = set(self._required)
        delimiter = max(_DELIMITERS, key=lambda each: (len(wanted & set(headers[each])), len(headers[each])))
        columns = self._wanted(file, headers[delimiter], "line")
        return Layout(columns, delimiter, quoted=len(delimiter) == 1, id_hint=ID_HINT)

    def _parquet(self, file: Path, intake: Intake) -> Iterator[pa.Table]:
        with intake.open(file) as next_block:
            try:
                table = pq.ParquetFile(file)
                names = table.schema_arrow.names
                for name in self._required:
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
            if kind.is_inferred or kind is Kind.TEXT:
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
            hint = ID_HINT if kind is Kind.ID else "; write it as an integer or a timestamp"
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


def _to_infer(layout: Layout) -> Layout:
    """The same file with only those columns wanted whose type comes from their cells."""
    return replace(layout, wanted={name: kind for name, kind in layout.wanted.items() if kind.is_inferred})
