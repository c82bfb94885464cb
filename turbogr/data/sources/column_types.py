"""The types of the columns of ``--where`` and of features in CSV, taken from all of their cells."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from turbogr.data.sources.common import Intake, Kind
from turbogr.data.sources.text import TextLog

_NUMERIC_SHARE = 0.5
_NUMBER = r"^[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?$"
# The narrowest first. Times of day stay text, which orders them as well.
_CANDIDATES = (
    pa.int64(),
    pa.bool_(),
    pa.float64(),
    pa.date32(),
    pa.timestamp("s"),
    pa.timestamp("ns"),
)
# A category's text must be that of its cells, in any file: a boolean or a date would be written in one way, whatever the cell.
_CATEGORIES = (pa.int64(), pa.float64())
_LONG = r"^[+-]?[0-9]{16,}$"  # decimals would make one category of several such numbers


@dataclass
class _Column:
    """What the cells of one column allow so far; `mostly` is its type if most of them are numbers, but not all."""

    kind: Kind
    alive: list[pa.DataType] = field(init=False)
    filled: int = 0
    numbers: int = 0
    mostly: pa.DataType = field(default_factory=pa.float64)

    def __post_init__(self) -> None:
        self.alive = list(_CATEGORIES if self.kind is Kind.CATEGORY else _CANDIDATES)

    def add(self, cells: pa.ChunkedArray) -> None:
        cells = pc.ascii_trim(cells, " \t")
        cells = cells.filter(pc.not_equal(cells, ""))
        self.filled += len(cells)
        self.numbers += int(pc.sum(pc.match_substring_regex(cells, _NUMBER)).as_py() or 0)
        self.alive = [candidate for candidate in self.alive if _allows(cells, candidate)]
        if self.kind is Kind.CATEGORY and pc.any(pc.match_substring_regex(cells, _LONG)).as_py():
            self.mostly = pa.int64()
            self.alive = [candidate for candidate in self.alive if candidate == pa.int64()]

    @property
    def type(self) -> pa.DataType:
        # A category without any value fits known numbers so; where known values are text, the column is declared as text.
        if (self.filled or self.kind is Kind.CATEGORY) and self.alive:
            return self.alive[0]
        # Mostly numbers: one damaged cell must not turn them into text. Reading finds the cell and names it.
        return self.mostly if self.filled and self.numbers / self.filled > _NUMERIC_SHARE else pa.string()


def column_types(logs: Sequence[TextLog]) -> dict[str, pa.DataType]:
    """Read the wanted columns of all files as text and find the narrowest type of every one that fits all of its cells.

    A type that came from the first block would make what a condition means depend on where the blocks are cut, and would refuse
    a later cell that is good.

    Args:
        logs: the files; all wanted columns are of a kind whose type is inferred.

    Returns:
        Types by name of column.

    Raises:
        DataError: a file cannot be read as a table.
    """
    columns: dict[str, _Column] = {}
    for log in logs:
        names = list(log.layout.wanted)
        if not names:
            continue
        log.inferred = dict.fromkeys(names, pa.string())
        for table in log.tables(Intake()):
            for name in names:
                columns.setdefault(name, _Column(log.layout.wanted[name])).add(table[name])
    return {name: column.type for name, column in columns.items()}


def _allows(cells: pa.ChunkedArray, candidate: pa.DataType) -> bool:
    try:
        cells.cast(candidate)
    except pa.ArrowInvalid:
        return False
    return True
