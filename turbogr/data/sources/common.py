"""What the readers share: files found and hashed, what a column must hold, the clock of a data set, errors with their place."""

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from turbogr.errors import DataError

BLOCK_BYTES = 32 << 20
"""Bytes read, hashed and parsed at a time: large enough to keep two cores busy, small beside any memory limit."""

INT64_MAX = 2**63 - 1
_SECONDS_END = 10**11  # the year 5138 in seconds, March 1973 in milliseconds: no log lies near it on either side
_MILLISECONDS_END = 10**14
_UNIT_NAMES = {"s": "seconds", "ms": "milliseconds"}
_INTEGER = re.compile(r"-?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


class Kind(Enum):
    """What the cells of a column must be."""

    ID = "id"  # a whole number, 0 .. 2**63 - 1
    TEXT_ID = "text id"  # any text but none
    TIME = "time"  # a whole number on the clock
    DECIMAL_TIME = "decimal time"  # the same, written as a decimal (`8.8125E8`, `881250949.0`)
    FLAG = "flag"  # 0 or 1
    NUMBER = "number"  # a decimal
    TEXT = "text"  # any text, also none
    INFERRED = "inferred"  # for --where: of the type that the whole column allows
    CATEGORY = "category"  # for features: whole numbers, decimals or text, as the whole column allows

    @property
    def arrow_type(self) -> pa.DataType | None:
        """The Arrow type that a column of this kind is parsed to; None where it is inferred."""
        return _ARROW_TYPES.get(self)

    @property
    def is_inferred(self) -> bool:
        """Whether the type is taken from all cells of the column, of which some may be missing."""
        return self in (Kind.INFERRED, Kind.CATEGORY)


_ARROW_TYPES = {
    Kind.ID: pa.int64(),
    Kind.TEXT_ID: pa.string(),
    Kind.TEXT: pa.string(),
    Kind.TIME: pa.int64(),
    Kind.DECIMAL_TIME: pa.float64(),
    Kind.FLAG: pa.uint8(),
    Kind.NUMBER: pa.float64(),
}


class Clock:
    """The unit of a data set's times, and whether a time can be right.

    Seconds and milliseconds of one century differ a thousandfold, so the size of a number tells its unit.

    Attributes:
        unit: ``"s"`` or ``"ms"``; None until the first time of a data set of unknown unit was seen.
        low: the smallest possible time.
        high: the first impossible one above it.
    """

    def __init__(self, unit: str | None, earliest: int | None = None, checked: bool = True) -> None:
        """Take the unit that the source defines, or None to take it from the first time.

        Args:
            unit: ``"s"``, ``"ms"`` or None.
            earliest: the oldest time that the source can hold, in ``unit``; None is 0 (s) or March 1973 (ms).
            checked: False takes every time as it is (a person declared the unit).
        """
        self.unit: str | None = None
        self.low, self.high = -INT64_MAX - 1, INT64_MAX + 1
        self._checked = checked
        self._origin = "the source defines them so" if checked else "--time-unit says so"
        if unit is not None:
            self._set(unit)
        if earliest is not None:
            self.low = earliest

    def start(self, value: int, where: str) -> None:
        """Take the unit from the data set's first time; without effect where it is known."""
        if self.unit is None:
            self._origin = f"{where} is {value}"
            self._set("ms" if value >= _SECONDS_END else "s")

    def timestamps_fault(self, where: str) -> str | None:
        """Take milliseconds because timestamps become them, or say why they cannot stand in this data set.

        Timestamps need no check of their size; numbers in other files still do, so that the bounds stay what they are.

        Args:
            where: the column of timestamps, for messages.
        """
        if self.unit is None:
            self._origin = f"{where} is a timestamp"
            self._set("ms")
        if self.unit == "ms":
            return None
        return (
            f"timestamps become milliseconds, but this data set's times are in {_UNIT_NAMES[str(self.unit)]} ({self._origin}); "
            "bring all files to one unit, or leave --time-unit s out"
        )

    def _set(self, unit: str) -> None:
        self.unit = unit
        if self._checked:
            self.low, self.high = (0, _SECONDS_END) if unit == "s" else (_SECONDS_END, _MILLISECONDS_END)

    def fault(self, value: int) -> str | None:
        """Say why a time cannot be right, or None."""
        if self.low <= value < self.high:
            return None
        if value < 0:
            return f"time {value} is negative"
        if value >= _MILLISECONDS_END:
            return f"time {value} is neither seconds nor milliseconds since 1970"
        found = "ms" if value >= _SECONDS_END else "s"
        unit = str(self.unit)
        if found != unit:
            return (
                f"time {value} is in {_UNIT_NAMES[found]}, or cut off, but this data set's times are in {_UNIT_NAMES[unit]} "
                f"({self._origin}); bring all files to one unit"
            )
        return f"time {value} is before {self.low}, older than this source can hold: cut off, or not in {_UNIT_NAMES[unit]}"


@dataclass(frozen=True)
class Place:
    """Where in the raw logs something stands: a file, and a line (text) or row (Parquet) counted from 1."""

    path: Path
    number: int
    word: str = "line"

    def __str__(self) -> str:
        return f"{self.path}: {self.word} {self.number}"

    def error(self, column: str | None, message: str) -> DataError:
        """Make the one error that a reader raises: file, line, column, what is wrong."""
        return DataError(f"{self}{'' if column is None else f', column {column!r}'}: {message}")


def cell_fault(cell: str, kind: Kind, clock: Clock) -> str | None:
    """Say why the text of one cell is not what its column must hold, or None: the rules of every typed column, in one place."""
    cell = cell.strip(" \t")
    if kind is Kind.TEXT:
        return None
    if kind is Kind.TEXT_ID:
        return None if cell else "the id is empty"
    if kind in (Kind.NUMBER, Kind.DECIMAL_TIME):
        return _decimal_fault(cell, kind, clock)
    if not _INTEGER.fullmatch(cell):
        what = {Kind.ID: "a whole-number id", Kind.TIME: "a whole-number time", Kind.FLAG: "0 or 1"}[kind]
        return f"{shorten(cell)} is not {what}"
    return value_fault(int(cell), kind, clock)


def value_fault(value: int, kind: Kind, clock: Clock) -> str | None:
    """Say why a whole number cannot be an id, a time or a flag, or None."""
    if kind is Kind.FLAG:
        return None if value in (0, 1) else f"{value} is not 0 or 1"
    if not -INT64_MAX - 1 <= value <= INT64_MAX:
        return f"{value} does not fit into 64 bits (at most {INT64_MAX})"
    if kind is Kind.ID:
        return None if value >= 0 else f"id {value} is negative"
    return clock.fault(value)


def _decimal_fault(cell: str, kind: Kind, clock: Clock) -> str | None:
    if not _DECIMAL.fullmatch(cell) or not math.isfinite(value := float(cell)):
        return f"{shorten(cell)} is not a number"
    if kind is Kind.NUMBER:
        return None
    if abs(value) >= 2**53 or not value.is_integer():
        return f"{shorten(cell)} is not a whole number of at most 53 bits"
    return clock.fault(int(value))


def column_is_sound(values: pa.ChunkedArray, kind: Kind, clock: Clock) -> bool:
    """Check a parsed column at once; :func:`cell_fault` says afterwards which cell is at fault and why."""
    if values.null_count:
        return kind.is_inferred
    if kind is Kind.TEXT_ID:
        return bool(pc.min(pc.utf8_length(pc.ascii_trim(values, " \t"))).as_py() > 0)
    if kind in (Kind.NUMBER, Kind.DECIMAL_TIME):
        if not pc.all(pc.is_finite(values)).as_py():
            return False
        if kind is Kind.DECIMAL_TIME and not pc.all(pc.equal(values, pc.trunc(values))).as_py():
            return False
    if kind.is_inferred or kind in (Kind.TEXT, Kind.NUMBER):
        return True
    extremes = pc.min_max(values).as_py()
    low, high = {Kind.ID: (0, INT64_MAX + 1), Kind.FLAG: (0, 2)}.get(kind, (clock.low, clock.high))
    return bool(low <= extremes["min"] and extremes["max"] < high)


def shorten(text: str, limit: int = 60) -> str:
    """Quote a piece of a log for an error message."""
    return repr(text if len(text) <= limit else text[:limit] + "…")


class Intake:
    """Opens the raw files; hashes every byte in a second thread while the first one parses; reports progress.

    Attributes:
        files: path, bytes and sha256 of every file that was read to its end, for the manifest.
    """

    def __init__(self, advance: Callable[[int], None] = lambda count: None) -> None:
        self.files: list[dict[str, Any]] = []
        self._advance = advance

    @contextmanager
    def open(self, path: Path) -> Iterator[Callable[[], bytes]]:
        """Open one file; the value is a function that gives its next block of bytes, empty at the end.

        Raises:
            DataError: the file cannot be opened or read.
        """
        digest, total = hashlib.sha256(), 0
        with readable(path) as file, ThreadPoolExecutor(1, "sha256") as pool:
            hashed = pool.submit(digest.update, b"")

            def next_block() -> bytes:
                nonlocal hashed, total
                try:
                    block = file.read(BLOCK_BYTES)
                except OSError as error:
                    raise DataError(f"{path}: cannot be read ({error.strerror})") from error
                hashed.result()
                hashed = pool.submit(digest.update, block)
                total += len(block)
                self._advance(len(block))
                return block

            yield next_block
            hashed.result()
        self.files.append({"path": str(path), "bytes": total, "sha256": digest.hexdigest()})


@contextmanager
def readable(path: Path) -> Iterator[BinaryIO]:
    """Open a raw file, or say why it cannot be opened.

    Raises:
        DataError: the file is absent, a folder, or not readable.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file or folder") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
    with file:
        yield file


class Source(Protocol):
    """A data set in its raw form, ready to be read once from its first event to its last.

    Attributes:
        filters: what the source's own filters keep, in their order ("not hated", ...), for the table of counts.
        files: every file, in reading order.
        text_ids: whether ids are text rather than int64.
        features: names of the features that every event has.
    """

    text_ids: bool

    @property
    def filters(self) -> Sequence[str]:
        """See the class."""
        ...

    @property
    def files(self) -> Sequence[Path]:
        """See the class."""
        ...

    @property
    def features(self) -> Sequence[str]:
        """See the class."""
        ...

    @property
    def time_unit(self) -> str:
        """``"s"``, ``"ms"`` or ``"none"``; known once the first block was read."""
        ...

    def tables(self, intake: Intake) -> Iterator[pa.Table]:
        """Give all events in reading order.

        Args:
            intake: opens the files.

        Yields:
            Tables of ``user`` and ``item`` (int64 or string), ``time`` (int64) and ``dropped`` (uint8: 0, or the number of the
            first of ``filters`` that drops the event, counted from 1), and behind them a column for each of ``features``
            (int64, float64 or string, always the same; null where the value is missing).

        Raises:
            DataError: the first thing in the logs that is not as it must be, with its file, line and column.
        """
        ...


def expand(paths: Sequence[Path], inside: Callable[[Path], list[Path]]) -> list[Path]:
    """Replace folders by the logs in them and refuse a file that is named twice.

    Args:
        paths: files and folders.
        inside: gives the logs of a folder, in reading order.

    Returns:
        Files, in reading order.

    Raises:
        DataError: a path is absent or unreadable, a folder holds no log, or a file is named twice.
    """
    files: list[Path] = []
    seen: set[Path] = set()
    for path in paths:
        try:
            found = inside(path) if path.is_dir() else [path]
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); check its permissions") from error
        for file in found:
            if file.resolve() in seen:
                raise DataError(f"{file}: is given twice; its events would count twice")
            seen.add(file.resolve())
            with readable(file):
                files.append(file)
    if not files:
        raise DataError("no file is given; name the log files or their folder")
    return files
