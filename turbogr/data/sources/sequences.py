"""One user a line: ``user item item …`` in time order, without times (the form of many published 5-core data sets)."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from turbogr.data.sources import cut
from turbogr.data.sources.common import Clock, Intake, Kind, Place, cell_fault, expand
from turbogr.data.sources.text import Layout, TextLog
from turbogr.errors import DataError

_CLOCK = Clock("s", checked=False)
_EVENTS = pa.schema([("user", pa.int64()), ("item", pa.int64()), ("time", pa.int64()), ("dropped", pa.uint8())])


class Sequences:
    """Sequence files. A user who has several lines has one history, in the order of the lines.

    Attributes:
        filters: none.
        files: the files, in reading order.
        text_ids: whether ids are text rather than int64.
        features: none.
        time_unit: ``"none"``.
    """

    time_unit = "none"
    filters: Sequence[str] = ()
    features: Sequence[str] = ()

    def __init__(self, paths: Sequence[Path], text_ids: bool = False) -> None:
        """Find the files.

        Args:
            paths: text files.
            text_ids: take ids as text.

        Raises:
            DataError: a path cannot be read or is a folder.
        """
        self.text_ids = text_ids
        self.files = expand(paths, _refuse_folder)

    def tables(self, intake: Intake) -> Iterator[pa.Table]:
        """Give all events in reading order (:meth:`turbogr.data.sources.common.Source.tables`); every time is 0."""
        for file in self.files:
            log = TextLog(file, Layout({}, " ", ("line",), quoted=False), _CLOCK)
            events = 0
            last_column = cut.LastColumn()
            for block, first_line in log.blocks(intake):
                table = self._parse(file, block, first_line)
                events += len(table)
                if len(table):
                    self._check_end(
                        table["item"], last_column, Place(file, first_line), block.endswith((b"\n", b"\r", b" ", b"\t"))
                    )
                    yield table
            if events == 0:
                raise Place(file, 1).error(None, "the file is empty; remove it from the arguments if that is right")

    def _parse(self, file: Path, block: bytes, first_line: int) -> pa.Table:
        raw = block.split(b"\n")
        try:
            lines = pc.ascii_trim_whitespace(pa.array(raw, pa.binary()).cast(pa.string()))
            lines = lines.filter(pc.not_equal(lines, ""))
            if len(lines) == 0:
                return _EVENTS.empty_table()
            words = pc.ascii_split_whitespace(lines)
            lengths = pc.list_value_length(words).to_numpy()
            ids = pc.list_flatten(words)
            if not self.text_ids:
                if not pc.all(pc.match_substring_regex(ids, "^[0-9]+$")).as_py():
                    raise pa.ArrowInvalid("an id is not a whole number")
                ids = ids.cast(pa.int64())
            if (lengths < 2).any():
                raise pa.ArrowInvalid("a line has no item")
        except pa.ArrowInvalid as error:
            self._raise_fault(file, raw, first_line)
            raise DataError(f"{file}: lines {first_line} to {first_line + len(raw)}: {error}") from error
        starts = np.cumsum(lengths) - lengths
        is_item = np.ones(len(ids), dtype=bool)
        is_item[starts] = False
        users = ids.take(pa.array(np.repeat(starts, lengths - 1)))
        zeros = np.zeros(len(users), dtype=np.int64)
        columns = [users, ids.filter(pa.array(is_item)), pa.array(zeros), pa.array(zeros.astype(np.uint8))]
        return pa.table(columns, names=["user", "item", "time", "dropped"])

    def _check_end(self, items: pa.ChunkedArray, last_column: cut.LastColumn, place: Place, ended: bool) -> None:
        """Refuse a last line without a line break whose last item looks cut; it is a block of its own."""
        if not ended:
            complete, last = items[:-1], items[-1].as_py()
            if len(complete):
                last_column.add_ids(complete)
            if last_column.id_is_cut(last):
                raise place.error(f"item {len(items)}", cut.message("id", last))
        else:
            last_column.add_ids(items)

    def _raise_fault(self, file: Path, lines: list[bytes], first_line: int) -> None:
        kind = Kind.TEXT_ID if self.text_ids else Kind.ID
        for number, raw in enumerate(lines, first_line):
            place = Place(file, number)
            words = raw.split()
            for position, word in enumerate(words):
                column = f"item {position}" if position else "user"
                try:
                    message = cell_fault(word.decode("utf-8"), kind, _CLOCK)
                except UnicodeDecodeError:
                    message = f"{word!r} is not UTF-8; convert the file to UTF-8"
                if message is not None:
                    hint = "" if self.text_ids else "; text ids need --string-ids"
                    raise place.error(column, message + hint)
            if len(words) == 1:
                raise place.error("item 1", f"user {words[0].decode()} has no item; the line is cut off, or delete it")


def _refuse_folder(folder: Path) -> list[Path]:
    raise DataError(f"{folder}: is a folder; name the sequence files themselves")
