"""Strict, typed reading of delimited text.

Arrow parses whole blocks, with every wanted column declared; nothing is ever guessed from the data. Where Arrow or a check of a
whole column objects, the block is read once more, line by line, to name the first line and column at fault.
"""

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv

from turbogr.data.sources import cut
from turbogr.data.sources.common import Clock, Intake, Kind, Place, cell_fault, column_is_sound, shorten
from turbogr.errors import DataError

_BOM = b"\xef\xbb\xbf"
_FOREIGN = {
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8",
    b"\x1f\x8b": "compressed with gzip; decompress it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"PAR1": "a Parquet file; the source `events` reads it",
}
# Arrow's delimiter is one character; `::` becomes the one that ASCII has for this very purpose.
_UNIT_SEPARATOR = "\x1f"
_LONGEST_LINE = 1 << 24


@dataclass(frozen=True)
class Layout:
    """How a log is written, and which of its columns are wanted.

    Attributes:
        wanted: what each wanted column must hold, by name.
        delimiter: the text between cells.
        names: the columns of a file without a header; None where line 1 is the header.
        quoted: whether cells may stand in double quotes. A cell never spans lines.
        id_hint: what a message about a wrong id ends with.
    """

    wanted: dict[str, Kind]
    delimiter: str = ","
    names: tuple[str, ...] | None = None
    quoted: bool = True
    id_hint: str = ""

    def split(self, line: str) -> list[str]:
        """Split one line into cells.

        Raises:
            csv.Error: a quote is not closed, or stands inside a cell.
        """
        if not self.quoted or len(self.delimiter) > 1:
            return line.split(self.delimiter)
        return next(csv.reader([line], delimiter=self.delimiter, strict=True), [])


@dataclass
class TextLog:
    """One log file of a known layout.

    Attributes:
        path: the file.
        layout: how it is written.
        clock: the data set's clock, shared by its files.
        inferred: the types of the columns whose type is inferred, one in all of the data set's files.
    """

    path: Path
    layout: Layout
    clock: Clock
    inferred: dict[str, pa.DataType] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list, init=False)

    def tables(self, intake: Intake) -> Iterator[pa.Table]:
        """Read the file block by block.

        Args:
            intake: opens the file.

        Yields:
            The wanted columns, by name, in the order of the layout; rows in the file's order.

        Raises:
            DataError: the first fault in the file, with its line and column.
        """
        rows = 0
        last_column = cut.LastColumn()
        for block, first_line in self.blocks(intake):
            table = self._parse(block, first_line)
            rows += len(table)
            if len(table):
                self._check_end(table, last_column, first_line, ended=block.endswith((b"\n", b"\r")))
                yield table
        if rows == 0:
            what = "holds a header and no rows" if self._names and self.layout.names is None else "is empty"
            raise DataError(f"{self.path}: line 1: the file {what}; remove it from the arguments if that is right")

    def blocks(self, intake: Intake) -> Iterator[tuple[bytes, int]]:
        """Read the file in blocks of whole lines.

        Args:
            intake: opens the file.

        Yields:
            Lines without header and byte order mark, and the number of the first of them.

        Raises:
            DataError: the file cannot be read, is not text, or its header lacks a wanted column.
        """
        with intake.open(self.path) as next_block:
            rest, line, started = b"", 1, False
            while chunk := next_block():
                cut = chunk.rfind(b"\n") + 1
                if cut == 0 and len(rest) + len(chunk) > _LONGEST_LINE:
                    raise self._at(line).error(
                        None, f"is longer than {_LONGEST_LINE} bytes; this is no log of one event a line"
                    )
                block, rest = (rest + chunk[:cut], chunk[cut:]) if cut else (b"", rest + chunk)
                if block and not started:
                    block, line, started = *self._begin(block), True
                if block:
                    yield block, line
                    line += block.count(b"\n")
            if rest and not started:
                rest, line = self._begin(rest)
            if rest:
                yield rest, line

    def _begin(self, block: bytes) -> tuple[bytes, int]:
        """Strip byte order mark and header from the first block."""
        for magic, what in _FOREIGN.items():
            if block.startswith(magic):
                raise self._at(1).error(None, f"the file is {what}")
        block = block.removeprefix(_BOM)
        if self.layout.names is not None:
            self._names = list(self.layout.names)
            return block, 1
        head, _, body = block.partition(b"\n")
        self._names = read_header(self.path, head, self.layout)
        for name in self.layout.wanted:
            found = self._names.count(name)
            if found != 1:
                state = "missing" if found == 0 else f"there {found} times"
                raise self._at(1).error(name, f"the column is {state}; the header has {', '.join(self._names)}")
        return body, 2

    def _parse(self, block: bytes, first_line: int) -> pa.Table:
        layout = self.layout
        self._check_bytes(block, first_line)
        positions = {name: f"c{self._names.index(name)}" for name in layout.wanted}
        types = {
            positions[name]: known
            for name, kind in layout.wanted.items()
            if (known := kind.arrow_type or self.inferred.get(name)) is not None
        }
        delimiter = layout.delimiter
        if len(delimiter) > 1:
            block_to_parse, delimiter = block.replace(delimiter.encode(), _UNIT_SEPARATOR.encode()), _UNIT_SEPARATOR
        else:
            block_to_parse = block
        optional = any(kind.is_inferred for kind in layout.wanted.values())
        try:
            table = pacsv.read_csv(
                pa.BufferReader(block_to_parse),
                read_options=pacsv.ReadOptions(column_names=[f"c{i}" for i in range(len(self._names))], block_size=4 << 20),
                parse_options=pacsv.ParseOptions(delimiter=delimiter, quote_char='"' if layout.quoted else False),
                convert_options=pacsv.ConvertOptions(
                    include_columns=list(positions.values()),
                    column_types=types,
                    null_values=[""] if optional else [],
                    strings_can_be_null=False,
                    quoted_strings_can_be_null=False,
                ),
            ).rename_columns(list(positions))
        except pa.ArrowInvalid as error:
            self._raise_fault(block, first_line, str(error))
            raise  # unreachable; it tells the type checker that the line above does not return
        if len(table) == 0:
            return table
        for name, kind in layout.wanted.items():
            if kind is Kind.TIME:
                # The first time decides the unit; a fault in it is then found like any other.
                self.clock.start(table[name][0].as_py() or 0, f"{self.path}, line {first_line}, column {name!r}")
            if not column_is_sound(table[name], kind, self.clock):
                self._raise_fault(block, first_line, f"column {name!r} holds an impossible value")
            if kind is Kind.DECIMAL_TIME:
                table = table.set_column(table.schema.get_field_index(name), name, table[name].cast(pa.int64()))
        return table

    def _check_end(self, table: pa.Table, last_column: cut.LastColumn, line: int, ended: bool) -> None:
        """Refuse a last line without a line break whose last cell looks cut; it is a block of its own."""
        name = self._names[-1]
        kind = self.layout.wanted.get(name)
        if kind in (Kind.TIME, Kind.DECIMAL_TIME):
            if not ended and last_column.time_is_cut(value := table[name][-1].as_py()):
                raise self._at(line).error(name, cut.message("time", value))
            last_column.add_times(table[name])
        elif kind in (Kind.ID, Kind.TEXT_ID):
            if not ended and last_column.id_is_cut(value := table[name][-1].as_py()):
                raise self._at(line).error(name, cut.message("id", value))
            last_column.add_ids(table[name])

    def _check_bytes(self, block: bytes, first_line: int) -> None:
        """Find what Arrow would forgive: lone carriage returns, careless quotes, hexadecimal numbers, the stand-in for `::`."""
        if b"\r" in block and block.count(b"\r") != block.count(b"\r\n") + block.endswith(b"\r"):
            self._raise_fault(block, first_line, "a carriage return stands inside a line")
        # A search for one letter is twenty times as fast as one for "0x", and logs of numbers hold no letter.
        marks = [b"0" + letter for letter in (b"x", b"X") if letter in block]
        if self.layout.quoted and b'"' in block and b'"' in self._quoted_cell.sub(b"", block):
            marks.append(b'"')
        if len(self.layout.delimiter) > 1:
            marks.append(_UNIT_SEPARATOR.encode())
        for mark in marks:
            start = block.find(mark)
            while start >= 0:
                begin = block.rfind(b"\n", 0, start) + 1
                end = block.find(b"\n", start)
                end = len(block) if end < 0 else end
                fault = self._line_fault(block[begin:end])
                if fault is not None:
                    raise self._at(first_line + block.count(b"\n", 0, begin)).error(*fault)
                start = block.find(mark, end)

    @property
    def _quoted_cell(self) -> re.Pattern[bytes]:
        """Matches a cell in quotes that nobody can misread; line by line they would cost most of the time of reading."""
        mark = re.escape(self.layout.delimiter.encode())
        return re.compile(rb'(?:(?<=%s)|^)"[^"\r\n]*"(?=%s|\r?$)' % (mark, mark), re.MULTILINE)

    def _raise_fault(self, block: bytes, first_line: int, reason: str) -> None:
        """Raise the error of the block's first fault, found line by line."""
        for number, line in enumerate(block.split(b"\n"), first_line):
            fault = self._line_fault(line)
            if fault is not None:
                raise self._at(number).error(*fault)
        last = first_line + block.count(b"\n")
        raise DataError(f"{self.path}: lines {first_line} to {last}: cannot be read as {len(self._names)} columns ({reason})")

    def _line_fault(self, raw: bytes) -> tuple[str, str] | None:
        """Column and message of the first fault in a line; None where there is none."""
        layout = self.layout
        raw = raw.removesuffix(b"\r")
        if not raw:
            return None
        cells = self._cells(raw)
        if isinstance(cells, tuple):
            return cells
        if layout.names is None and cells == self._names:
            return self._names[0], "the header stands here again; delete this line (were files joined with `cat`?)"
        for name, cell in zip(self._names, cells, strict=False):
            if name in layout.wanted and (message := self._cell_fault(name, cell, layout.wanted[name])) is not None:
                return name, message
        if len(cells) != len(self._names):
            cut = " (cut off?)" if len(cells) < len(self._names) else ""
            return self._name(
                len(cells)
            ), f"the line has {len(cells)} values, not {len(self._names)}{cut}: {shorten(line_of(raw))}"
        return None

    def _cells(self, raw: bytes) -> list[str] | tuple[str, str]:
        """The cells of a line, or column and message of what forbids to split it."""
        layout = self.layout
        if b"\r" in raw:
            return self._names[0], "a carriage return stands inside the line; lines must end in \\n or \\r\\n"
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            # Formats of numbers only are read whatever the encoding of columns that nobody wants.
            if any(kind.is_inferred or kind in (Kind.TEXT_ID, Kind.TEXT) for kind in layout.wanted.values()):
                column = self._name(line_of(raw[: error.start]).count(layout.delimiter))
                return column, f"byte {raw[error.start : error.start + 1]!r} is not UTF-8; convert the file to UTF-8"
            line = raw.decode("latin-1")
        try:
            return layout.split(line)
        except csv.Error:
            column = self._name(line.count(layout.delimiter, 0, line.find('"')))
            return column, f"a quote is not closed, or stands inside a value: {shorten(line)}; a value may not span lines"

    def _name(self, position: int) -> str:
        return self._names[min(position, len(self._names) - 1)]

    def _cell_fault(self, name: str, cell: str, kind: Kind) -> str | None:
        if not kind.is_inferred:
            message = cell_fault(cell, kind, self.clock)
            return message + self.layout.id_hint if message is not None and kind is Kind.ID else message
        expected = self.inferred.get(name, pa.string())
        try:
            if cell:
                pa.array([cell.strip(" \t")]).cast(expected)
        except pa.ArrowInvalid:
            message = f"{shorten(cell)} is not of type {expected}, as most of the column is"
            return f"{message}; --text-features takes the column as text" if kind is Kind.CATEGORY else message
        return None

    def _at(self, line: int) -> Place:
        return Place(self.path, line)


def split_header(head: bytes, layout: Layout) -> list[str]:
    """Split a header into the names of the columns.

    Raises:
        csv.Error: a quote is not closed, or stands inside a name.
    """
    return [name.strip() for name in layout.split(line_of(head.removesuffix(b"\r")))]


def line_of(raw: bytes) -> str:
    """Decode a piece of a log for an error message."""
    return raw.decode("utf-8", errors="replace")


def read_header(path: Path, head: bytes, layout: Layout) -> list[str]:
    """Split a header into the names of the columns.

    Raises:
        DataError: the line is empty or its quotes are not closed.
    """
    line = line_of(head.removesuffix(b"\r"))
    if not line.strip():
        raise Place(path, 1).error(None, "the header is empty")
    try:
        return split_header(head, layout)
    except csv.Error as error:
        raise Place(path, 1).error(None, f"a quote in the header is not closed: {shorten(line)}") from error
