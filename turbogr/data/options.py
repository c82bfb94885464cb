"""The options of ``turbogr data prepare``."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from turbogr.data.manifest import MIN_EVENTS, PROTOCOLS
from turbogr.data.sources.kuairand import SIGNALS
from turbogr.errors import ConfigurationError

SOURCES = ("movielens", "kuairand", "sequences", "events")
_K_CORE = {"kuairand": 5}
# Options that only some sources have; given to another one they would be silently without effect.
_BELONGS = {
    "signals": ("kuairand",),
    "keep_hated": ("kuairand",),
    "min_rating": ("movielens",),
    "user": ("events",),
    "item": ("events",),
    "time": ("events",),
    "where": ("events",),
    "time_unit": ("events",),
    "string_ids": ("events", "sequences"),
    "features": ("movielens", "kuairand", "events"),
}
WITHOUT_MEANING = ("memory_limit", "features", "item_features", "item_key", "text_features", "vocabulary_of")
"""Options that the content hash leaves out: the first changes how the work is done, never what comes out; what the others mean
is in the arrays and values that the hash covers, and the path of a file means nothing."""


@dataclass(frozen=True)
class PrepareOptions:
    """Every option of ``turbogr data prepare``; ``docs/data.md`` explains the choices.

    Attributes:
        signals: kuairand: an event is positive if one of these columns is 1; None means the paper's six; () keeps all events.
        keep_hated: kuairand: keep events that the user marked as hated.
        min_rating: movielens: drop lower ratings.
        user: events: name of the column of users.
        item: events: name of the column of items.
        time: events: name of the column of times.
        where: events: SQL condition; rows for which it is not true are dropped.
        time_unit: events: ``"s"``, ``"ms"``, or ``"auto"`` to tell it by the size of the times.
        string_ids: events, sequences: ids are text.
        repeats: of several events of one user with one item keep all (``"keep"``), the first, or the last.
        k_core: least number of events of every user and item; 0 is off; None is 5 for kuairand, else 0, and always 0 with
            ``vocabulary_of``.
        k_core_passes: passes of the k-core filter; None repeats it until nothing changes.
        max_length: keep the newest so many events of each user; None keeps all.
        features: features of events: movielens ``rating``; kuairand categorical columns of the logs or ``actions``, all signals
            of an event as one category; events: names of columns.
        item_features: features of items: ``FILE:COLUMN[,COLUMN…]``, each a table (CSV or Parquet) of one row an item.
        item_key: name of the column of items in these tables; None is the source's own (``video_id``, ``movieId``, ``item``).
        text_features: those of the features that are text whatever their cells look like.
        vocabulary_of: a prepared folder whose rows of items and features the new folder keeps, so that a model trained on the
            former can be used on the latter: events of other items are dropped, other values of features are row 0.
        protocol: ``"three_way"`` or ``"published"``; recorded, and applied by the data module.
        memory_limit: what DuckDB may use, such as ``"2GB"``; the process needs about 1 GiB more.
    """

    signals: tuple[str, ...] | None = None
    keep_hated: bool = False
    min_rating: float | None = None
    user: str | None = None
    item: str | None = None
    time: str | None = None
    where: str | None = None
    time_unit: Literal["auto", "s", "ms"] = "auto"
    string_ids: bool = False
    repeats: Literal["keep", "first", "last"] = "keep"
    k_core: int | None = None
    k_core_passes: int | None = None
    max_length: int | None = None
    features: tuple[str, ...] = ()
    item_features: tuple[str, ...] = ()
    item_key: str | None = None
    text_features: tuple[str, ...] = ()
    vocabulary_of: str | None = None
    protocol: Literal["three_way", "published"] = "three_way"
    memory_limit: str = "2GB"

    def __post_init__(self) -> None:
        choices = {"time_unit": ("auto", "s", "ms"), "repeats": ("keep", "first", "last"), "protocol": PROTOCOLS}
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                raise ConfigurationError(f"{flag(name)} is {getattr(self, name)!r}; choose one of {', '.join(valid)}")
        for name, least, off in (("k_core", 0, "0 turns it off"), ("k_core_passes", 1, "leave it out for as many as needed")):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigurationError(f"{flag(name)} is {value}; it must be at least {least} ({off})")
        if self.max_length is not None and self.max_length < MIN_EVENTS:
            raise ConfigurationError(f"--max-length is {self.max_length}; a user needs at least {MIN_EVENTS} events")

    def resolved(self, source: str) -> dict[str, Any]:
        """All options that a source has, with its defaults filled in, as JSON values.

        Args:
            source: one of ``SOURCES``.

        Raises:
            ConfigurationError: no such source, or an option that it does not have.
        """
        if source not in SOURCES:
            raise ConfigurationError(f"unknown source {source!r}; choose one of {', '.join(SOURCES)}")
        for option in fields(self):
            owners = _BELONGS.get(option.name, SOURCES)
            if source not in owners and getattr(self, option.name) != option.default:
                raise ConfigurationError(f"{flag(option.name)} is an option of {' and '.join(owners)}, not of {source}")
        missing = [flag(name) for name in ("user", "item", "time") if source == "events" and getattr(self, name) is None]
        if missing:
            raise ConfigurationError(f"the source events needs {', '.join(missing)}: the names of the columns")
        values = {name: value for name, value in asdict(self).items() if source in _BELONGS.get(name, SOURCES)}
        if self.k_core is None:
            values["k_core"] = _K_CORE.get(source, 0) if self.vocabulary_of is None else 0
        values["k_core_passes"] = self.k_core_passes or "fixpoint"
        if source == "kuairand":
            values["signals"] = SIGNALS if self.signals is None else self.signals
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def flag(name: str) -> str:
    """The option of the command line that an attribute of :class:`PrepareOptions` is."""
    return "--" + name.replace("_", "-")
