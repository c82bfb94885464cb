"""MovieLens ratings in the four forms in which they are passed around; every rating is an event.

=====================  =========  ==================================================================
``ratings.dat``        1M, 10M    ``user::movie::rating::time``, no header
``ratings.csv``        latest, …  header ``userId,movieId,rating,timestamp``
``u.data``             100K       ``user<TAB>movie<TAB>rating<TAB>time``, no header
``ml-100k.inter``      RecBole    header ``user_id:token item_id:token rating:float timestamp:float``
=====================  =========  ==================================================================
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from turbogr.data.sources.categories import categories
from turbogr.data.sources.common import Clock, Intake, Kind, Place, expand, readable
from turbogr.data.sources.text import Layout, TextLog
from turbogr.errors import ConfigurationError, DataError

EARLIEST = 700_000_000
"""March 1992, in seconds. MovieLens opened in 1995; a smaller number is a time that was cut off (it is the last column)."""

_NAMES = ("user", "movie", "rating", "time")
_KINDS = (Kind.ID, Kind.ID, Kind.NUMBER, Kind.TIME)
_PLAIN = dict(zip(_NAMES, _KINDS, strict=True))
_DAT = Layout(_PLAIN, "::", _NAMES, quoted=False)
_UDATA = Layout(_PLAIN, "\t", _NAMES, quoted=False)
_CSV = Layout(dict(zip(("userId", "movieId", "rating", "timestamp"), _KINDS, strict=True)), ",")
_INTER_NAMES = ("user_id:token", "item_id:token", "rating:float", "timestamp:float")
_INTER = Layout(dict(zip(_INTER_NAMES, (*_KINDS[:3], Kind.DECIMAL_TIME), strict=True)), "\t", quoted=False)
_BY_SUFFIX = {".dat": _DAT, ".csv": _CSV, ".data": _UDATA, ".inter": _INTER}
_FILES = ("ratings.dat", "ratings.csv", "u.data")
_HEAD_BYTES = 4096

FEATURES = ("rating",)
"""What may be a feature of an event."""


class MovieLens:
    """MovieLens ratings.

    Attributes:
        filters: ``rating >= …`` where a least rating is asked, else none.
        files: the rating files, in reading order.
        text_ids: False; ids are int64.
        features: ``rating``, if chosen.
        time_unit: ``"s"``.
    """

    text_ids = False
    time_unit = "s"

    def __init__(self, paths: Sequence[Path], min_rating: float | None = None, features: Sequence[str] = ()) -> None:
        """Find the rating files.

        Args:
            paths: rating files, or folders that hold exactly one.
            min_rating: drop lower ratings; None keeps all.
            features: ``("rating",)`` makes each rating a category of its event.

        Raises:
            DataError: a path cannot be read, or a folder holds none or several rating files.
            ConfigurationError: there is no such feature.
        """
        for feature in features:
            if feature not in FEATURES:
                raise ConfigurationError(
                    f"--features: {feature!r} is no feature of MovieLens's ratings; choose {', '.join(FEATURES)} (columns of "
                    "movies.csv are given with --item-features)"
                )
        self.features = tuple(features)
        self._min_rating = min_rating
        self.filters = [] if min_rating is None else [f"rating >= {min_rating:g}"]
        self.files = expand(paths, _ratings_of)

    def tables(self, intake: Intake) -> Iterator[pa.Table]:
        """Give all ratings in reading order (:meth:`turbogr.data.sources.common.Source.tables`)."""
        clock = Clock("s", earliest=EARLIEST)
        for file in self.files:
            for table in TextLog(file, _layout_of(file), clock).tables(intake):
                user, movie, rating, time = table.columns
                dropped = np.zeros(len(table), dtype=np.uint8)
                if self._min_rating is not None:
                    dropped[rating.to_numpy() < self._min_rating] = 1
                columns = [user, movie, time, pa.array(dropped), *(categories(rating) for _ in self.features)]
                yield pa.table(columns, names=["user", "item", "time", "dropped", *self.features])


def _layout_of(file: Path) -> Layout:
    """The suffix tells the form; a file of another name is told by its first line."""
    if file.suffix in _BY_SUFFIX:
        return _BY_SUFFIX[file.suffix]
    with readable(file) as stream:
        head = stream.read(_HEAD_BYTES).split(b"\n", 1)[0]
    for mark, layout in ((b"::", _DAT), (b":token", _INTER), (b"userId", _CSV), (b"\t", _UDATA)):
        if mark in head:
            return layout
    forms = "ratings.dat, ratings.csv, u.data and RecBole's .inter"
    raise Place(file, 1).error(
        None, f"the line has none of MovieLens's forms ({forms}); the source `events` reads other tables"
    )


def _ratings_of(folder: Path) -> list[Path]:
    found = [folder / name for name in _FILES if (folder / name).is_file()] + sorted(folder.glob("*.inter"))
    if len(found) != 1:
        seen = ", ".join(file.name for file in found) or "none"
        raise DataError(f"{folder}: must hold one of {', '.join(_FILES)} or *.inter, but holds {seen}; name the file")
    return found
