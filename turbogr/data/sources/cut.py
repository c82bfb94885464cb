"""Whether the last cell of a file that ends without a line break was cut inside."""

import pyarrow as pa
import pyarrow.compute as pc

_ENOUGH = 100
"""Ids that must be of one width before a shorter one is suspect: of ids 1, 2, 3, …, one in ten is shorter than the rest."""


class LastColumn:
    """The cells of a file's last column so far, to compare the last one with.

    A cut takes digits away. Times of one log lie close together, so that a time of fewer digits and less than half of the
    smallest was cut. Ids may be of any width; a short one is suspect only where very many others have one width.
    """

    def __init__(self) -> None:
        self._smallest: int | None = None
        self._widths: set[int] = set()
        self._count = 0

    def add_times(self, times: pa.ChunkedArray) -> None:
        """Take the times of complete lines: int64."""
        least = _least(times)
        self._smallest = least if self._smallest is None else min(self._smallest, least)

    def add_ids(self, ids: pa.ChunkedArray) -> None:
        """Take the ids of complete lines: int64 or string."""
        if pa.types.is_integer(ids.type):
            widths = [len(str(value)) for value in pc.min_max(ids).as_py().values()]
        else:
            widths = list(pc.min_max(pc.utf8_length(ids)).as_py().values())
        self._widths.update(widths)
        self._count += len(ids)

    def time_is_cut(self, value: int) -> bool:
        """Tell whether the last time looks cut."""
        value = abs(value)
        return self._smallest is not None and 2 * value < self._smallest and len(str(value)) < len(str(self._smallest))

    def id_is_cut(self, value: int | str) -> bool:
        """Tell whether the last id looks cut."""
        return self._count >= _ENOUGH and len(self._widths) == 1 and len(str(value)) < min(self._widths)


def message(what: str, value: object) -> str:
    """Say that the last line looks cut.

    Args:
        what: ``"time"`` or ``"id"``.
        value: the last cell.
    """
    return (
        f"the file ends without a line break in the {what} {value}, shorter than every other {what} in this column: the last "
        "line looks cut off; get the file again, or end the line with a line break if it is complete"
    )


def _least(times: pa.ChunkedArray) -> int:
    extremes = pc.min_max(times).as_py()
    if extremes["min"] > 0:
        return int(extremes["min"])
    return max(0, -int(extremes["max"]))
