"""Values of categorical features: which types they have, which are missing, which of several in one cell is taken."""

import re
from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from turbogr.data.sources.common import Kind, Place
from turbogr.errors import ConfigurationError

_NAME = re.compile(r"\w[\w.-]*")  # files are named so
_TAKEN = ("user", "item", "time", "items", "values", "targets", "negatives")  # in events.parquet and in a model's look-up


def check_names(names: list[str]) -> None:
    """Refuse names of features that cannot name a file and a table, or that stand there twice.

    Raises:
        ConfigurationError: a name is not possible.
    """
    for name in names:
        if not _NAME.fullmatch(name) or name in _TAKEN:
            raise ConfigurationError(
                f"a feature cannot be named {name!r}: letters, digits, '_', '-' and '.' are possible, and {', '.join(_TAKEN)} "
                "are taken; rename the column"
            )
    lower = [name.lower() for name in names]
    for name in names:
        if lower.count(name.lower()) > 1:
            raise ConfigurationError(f"the feature {name!r} is named twice (case does not count); name it once, or rename one")


def categories(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Bring a column to one of the three types of features and make its missing values null.

    Args:
        column: whole numbers, decimals, text, or what can be written as text (booleans, dates, timestamps, fixed decimals).

    Returns:
        int64, float64 (no NaN, no negative zero) or string (no blanks around, not empty).

    Raises:
        pa.ArrowInvalid: a whole number does not fit into 64 bits.
        pa.ArrowNotImplementedError: the type cannot be written as text.
    """
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_integer(column.type):
        return column.cast(pa.int64())
    if pa.types.is_floating(column.type):
        column = pc.add(column.cast(pa.float64()), 0.0)  # -0.0 becomes 0.0, which is the same value
        return pc.if_else(pc.is_nan(column), pa.scalar(None, pa.float64()), column)
    text = pc.ascii_trim(column.cast(pa.string()), " \t")
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)


def first_of(column: pa.ChunkedArray, delimiter: str) -> pa.ChunkedArray:
    """Take the first of several values in each cell of a column of text; a cell without the delimiter is one value."""
    return pc.list_element(pc.split_pattern(column, delimiter, max_splits=1), 0)


class FeatureColumns:
    """The columns of features in the tables of one data set: one type each, whatever file they come from.

    Attributes:
        kinds: what the reader must take the columns for.
    """

    def __init__(
        self, names: Sequence[str], text: Collection[str] = (), several: Mapping[str, tuple[str, str | None]] | None = None
    ) -> None:
        """Take the columns.

        Args:
            names: of the columns.
            text: those that are text whatever their cells look like.
            several: of columns (text as well) whose cells may hold several values, the delimiter between them, of which the
                first value is taken, and a text that stands for none.
        """
        self._several = {name: rule for name, rule in (several or {}).items() if name in names}
        self.kinds = {name: Kind.TEXT if name in text or name in self._several else Kind.CATEGORY for name in names}
        self._types: dict[str, tuple[pa.DataType, Place]] = {}

    def take(self, place: Place, table: pa.Table) -> dict[str, pa.ChunkedArray]:
        """Take the features from a table.

        Args:
            place: the first row of the file that the table comes from, for messages.
            table: with these columns.

        Returns:
            int64, float64 or string by name of the column; null where the value is missing.

        Raises:
            DataError: a column is of another type than in an earlier file, or of one that cannot be a category.
        """
        taken = {}
        for name, kind in self.kinds.items():
            column = table[name]
            try:
                if kind is Kind.TEXT:
                    column = column.cast(pa.string())
                if name in self._several:
                    delimiter, none = self._several[name]
                    column = first_of(column, delimiter)
                    if none is not None:
                        column = pc.if_else(pc.equal(column, none), pa.scalar(None, pa.string()), column)
                column = categories(column)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise place.error(name, f"cannot be a feature ({error}); store it as whole numbers or as text") from error
            known, first = self._types.setdefault(name, (column.type, place))
            if column.type != known:
                raise place.error(
                    name,
                    f"the feature is of type {column.type} here, but of type {known} in {first.path}; bring both to one type, "
                    "or name it in --text-features",
                )
            taken[name] = column
        return taken
