"""Any table of events, CSV or Parquet, whose columns for user, item and time are named by options."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from turbogr.data.sources.common import Clock, Intake, Kind, Place, column_is_sound, expand, readable, shorten, value_fault
from turbogr.data.sources.text import Layout, TextLog, read_header
from turbogr.errors import ConfigurationError, DataError

_DELIMITERS = (",", "\t", ";", "|", "::")
_MAGIC = b"PAR1"
_HEAD_BYTES = 1 << 16
_BATCH_ROWS = 1 << 20
_HINT = "; text ids need --string-ids"


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
            ConfigurationError: one column has two roles.
        """
        if len({user, item, time}) < 3:
            raise ConfigurationError(f"--user {user!r}, --item {item!r} and --time {time!r} must be three different columns")
        self._roles = (user, item, time)
        self._where = where
        self.text_ids = text_ids
        self.filters = [] if where is None else [f"where {where}"]
        self.files = expand(paths, _tables_of)
        self._clock = Clock(None) if time_unit == "auto" else Clock(time_unit, checked=False)
        # The words of the condition: the columns among them are read too.
        self._words = {word.lower() for word in re.findall(r'"[^"]+"|\w+', where or "")}

    @property
    def time_unit(self) -> str:
        """``"s"`` or ``"ms"``; known once the first block was read."""
        return str(self._clock.unit)

    def tables(self, intake: Intake) -> Iterator[pa.Table]:
        """Give all events in reading order (:meth:`turbogr.data.sources.common.Source.tables`)."""
        inferred: dict[str, pa.DataType] = {}
        for file in self.files:
            with readable(file) as stream:
                is_parquet = stream.read(len(_MAGIC)) == _MAGIC
            found = self._parquet(file, intake) if is_parquet else self._text(file, intake, inferred)
            for table in found:
                user, item, time = (table[name] for name in self._roles)
                yield pa.table([user, item, time, self._dropped(table)], names=["user", "item", "time", "dropped"])

    def _wanted(self, names: Sequence[str]) -> dict[str, Kind]:
        ids = Kind.TEXT_ID if self.text_ids else Kind.ID
        wanted = dict(zip(self._roles, (ids, ids, Kind.TIME), strict=True))
        for name in names:
            if name not in wanted and ({name.lower(), f'"{name.lower()}"'} & self._words):
                wanted[name] = Kind.INFERRED
        return wanted

    def _text(self, file: Path, intake: Intake, inferred: dict[str, pa.DataType]) -> Iterator[pa.Table]:
        with readable(file) as stream:
            head = stream.read(_HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0]
        # The delimiter that makes most of the wanted names appear in the header; ties go to the comma.
        headers = {}
        for delimiter in _DELIMITERS:
            layout = Layout({}, delimiter, quoted=len(delimiter) == 1)
            headers[delimiter] = read_header(file, head, layout) if head.strip() else []
        delimiter = max(_DELIMITERS, key=lambda each: (len(set(self._roles) & set(headers[each])), len(headers[each])))
        layout = Layout(self._wanted(headers[delimiter]), delimiter, quoted=len(delimiter) == 1, id_hint=_HINT)
        return TextLog(file, layout, self._clock, inferred).tables(intake)

    def _parquet(self, file: Path, intake: Intake) -> Iterator[pa.Table]:
        with intake.open(file) as next_block:
            try:
                table = pq.ParquetFile(file)
                names = table.schema_arrow.names
                for name in self._roles:
                    if name not in names:
                        raise Place(file, 1, "row").error(name, f"the column is missing; the table has {', '.join(names)}")
                first_row = 1
                for batch in table.iter_batches(_BATCH_ROWS, columns=list(self._wanted(names))):
                    if len(batch):
                        yield self._typed(file, pa.Table.from_batches([batch]), first_row)
                        first_row += len(batch)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{file}: cannot be read as Parquet ({error})") from error
            while next_block():
                pass  # Parquet is read out of order; hash and size come from reading it once more from start to end
        if first_row == 1:
            raise Place(file, 1, "row").error(None, "the table is empty; remove it from the arguments if that is right")

    def _typed(self, file: Path, table: pa.Table, first_row: int) -> pa.Table:
        for name, kind in self._wanted(table.column_names).items():
            column = table[name]
            if kind is Kind.INFERRED:
                continue
            if column.null_count:
                missing = int(np.argmax(column.is_null().to_numpy()))
                raise Place(file, first_row + missing, "row").error(name, "the value is missing (NULL)")
            if kind is Kind.TIME and (pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)):
                column = column.cast(pa.timestamp("ms", tz=getattr(column.type, "tz", None)), safe=False).cast(pa.int64())
                self._clock.declare_milliseconds(f"{file}, column {name!r} is a timestamp")
            column = self._cast(file, name, column, kind, first_row)
            if kind is Kind.TIME:
                self._clock.start(column[0].as_py(), f"{file}, row {first_row}, column {name!r}")
            if not column_is_sound(column, kind, self._clock):
                for index, value in enumerate(column.to_pylist()):
                    message = (
                        value_fault(value, kind, self._clock) if kind is not Kind.TEXT_ID else (None if value else "is empty")
                    )
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

    def _dropped(self, table: pa.Table) -> pa.Array:
        if self._where is None:
            return pa.array(np.zeros(len(table), dtype=np.uint8))
        with duckdb.connect() as database:
            database.register("events", table)
            try:
                kept = database.execute(
                    f"SELECT coalesce(CAST(({self._where}) AS BOOLEAN), false) AS kept FROM events"
                ).fetchnumpy()
            except duckdb.Error as error:
                columns = ", ".join(table.column_names)
                raise ConfigurationError(f"--where {self._where!r} fails (columns read: {columns}): {error}") from error
        return pa.array((~np.asarray(kept["kept"], dtype=bool)).astype(np.uint8))


def _tables_of(folder: Path) -> list[Path]:
    found = sorted(file for file in folder.iterdir() if file.suffix in (".csv", ".tsv", ".parquet") and file.is_file())
    if not found:
        raise DataError(f"{folder}: holds no .csv, .tsv or .parquet file")
    return found
