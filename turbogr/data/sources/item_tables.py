"""Tables of one row an item, for features of items: KuaiRand's ``video_features_basic_*.csv``, MovieLens's movies."""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from turbogr.data.sources.categories import FeatureColumns
from turbogr.data.sources.common import Clock, Intake, Kind, Place, readable
from turbogr.data.sources.tables import ID_HINT, Tables
from turbogr.data.sources.text import Layout
from turbogr.errors import ConfigurationError

KEYS = {"kuairand": "video_id", "movielens": "movieId"}
"""The column of items in the item tables of these sources."""

_CLOCK = Clock("s", checked=False)
_MOVIES_DAT = ("movieId", "title", "genres")  # movies.dat has no header
# Columns whose cells may hold several values, of which the first is taken: the delimiter, and what stands for none.
_SEVERAL: dict[str, dict[str, tuple[str, str | None]]] = {
    "kuairand": {"tag": (",", None)},
    "movielens": {"genres": ("|", "(no genres listed)")},
}


class ItemTable:
    """One table of items, and those of its columns that are features.

    Attributes:
        file: the table.
        features: names of the columns.
    """

    def __init__(self, text: str, source: str, key: str | None, text_ids: bool, text_features: Collection[str] = ()) -> None:
        """Take one ``--item-features``.

        Args:
            text: ``FILE:COLUMN[,COLUMN…]``.
            source: of the events.
            key: name of the column of items; None is the one of ``KEYS``.
            text_ids: whether the source's ids are text.
            text_features: names of columns that are text whatever their cells look like.

        Raises:
            ConfigurationError: the text is not of that form, or the column of items is not named or is a feature.
        """
        file, colon, columns = text.rpartition(":")
        self.features = tuple(name.strip() for name in columns.split(","))
        if not colon or not file or not all(self.features):
            raise ConfigurationError(f"--item-features is {text!r}; write FILE:COLUMN or FILE:COLUMN,COLUMN")
        key = key or KEYS.get(source)
        if key is None:
            raise ConfigurationError(f"--item-features {text!r}: name the column of items of that table with --item-key")
        if key in self.features:
            raise ConfigurationError(f"--item-features {text!r}: {key!r} is the column of items, not a feature of them")
        self.file = Path(file)
        self._key, self._text_ids = key, text_ids
        self._columns = FeatureColumns(self.features, text_features, _SEVERAL.get(source))

    def tables(self, intake: Intake) -> Iterator[pa.Table]:
        """Read the table.

        Args:
            intake: opens the file.

        Yields:
            ``item`` (int64 or string), then each of ``features`` (int64, float64 or string; null where the value is missing).

        Raises:
            DataError: the first fault, with its file, line and column.
        """
        known = None
        if self.file.suffix == ".dat":
            known = Layout(self._wanted(self.file, _MOVIES_DAT, "line"), "::", _MOVIES_DAT, quoted=False, id_hint=ID_HINT)
        reader = Tables([self.file], [self._key, *self.features], self._wanted, _CLOCK, known)
        for place, table in reader.read(intake):
            yield pa.table({"item": table[self._key], **self._columns.take(place, table)})

    def place_of(self, number: int) -> Place:
        """Find the line (Parquet: row) of the row with this number, counted from 0."""
        with readable(self.file) as stream:
            if stream.read(4) == b"PAR1":
                return Place(self.file, number + 1, "row")
            stream.seek(0)
            rows = -1 if self.file.suffix == ".dat" else -2
            for line, text in enumerate(stream, 1):
                rows += bool(text.strip(b"\r\n"))
                if rows == number:
                    return Place(self.file, line)
        return Place(self.file, 1)

    @property
    def key(self) -> str:
        """Name of the column of items."""
        return self._key

    def _wanted(self, file: Path, names: Sequence[str], word: str) -> dict[str, Kind]:
        return {self._key: Kind.TEXT_ID if self._text_ids else Kind.ID, **self._columns.kinds}
