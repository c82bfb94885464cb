"""Categorical features of events and items beside the item id: what a model needs to know of them, and their values as rows.

A feature is a table of embedding rows. Row 0 is for values that are missing and for values that the prepared folder does not
know; the values that occur in the folder have rows 1, 2, … in ascending order.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from turbogr.data.sources.categories import categories
from turbogr.errors import ConfigurationError

Side = Literal["event", "item"]

SIDES: tuple[Side, ...] = ("event", "item")
MISSING_ROW = 0
"""The row of every feature that stands for a missing or unknown value."""


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """One categorical feature of a prepared folder.

    Attributes:
        name: of the feature, and of the original column.
        side: ``"event"`` where every event has its own value (``JaggedBatch.features[name]`` has the row of each token's own
            event), ``"item"`` where the value belongs to the item (``item_rows``).
        num_rows: rows of the feature's table, ``MISSING_ROW`` included: 1 + number of known values.
        item_rows: integers [V], row of each item; None for features of events.
    """

    name: str
    side: Side
    num_rows: int
    item_rows: np.ndarray | None = None


def chosen(tables: tuple[FeatureTable, ...], names: Literal["all"] | Iterable[str], where: object) -> tuple[FeatureTable, ...]:
    """The features that a person asks for, in the order in which they are asked for.

    Args:
        tables: those that there are.
        names: names, or ``"all"``.
        where: the prepared folder, for the message.

    Raises:
        ConfigurationError: there is no such feature, or one is named twice.
    """
    if names == "all":
        return tables
    names = [names] if isinstance(names, str) else list(names)
    by_name = {table.name: table for table in tables}
    for name in names:
        if name not in by_name:
            known = ", ".join(by_name) or "none; prepare it with --features or --item-features"
            raise ConfigurationError(f"features names {name!r}, which {where} does not have; it has {known}")
    if len(set(names)) < len(names):
        raise ConfigurationError(f"features names one feature twice: {', '.join(names)}")
    return tuple(by_name[name] for name in names)


def rows_of(values: Iterable[Any], known: pa.Array) -> np.ndarray:
    """Translate raw values to rows of a feature's table.

    Args:
        values: raw values, as many as wanted; None is a missing one. Blanks around text do not count.
        known: the value of every row, ascending, null at ``MISSING_ROW``.

    Returns:
        int64, one row a value; ``MISSING_ROW`` where the value is missing or not known.

    Raises:
        ConfigurationError: a value is not of the feature's type (text, whole or decimal numbers).
    """
    try:
        wanted = categories(pa.chunked_array([pa.array(list(values))])).cast(known.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise ConfigurationError(f"values of this feature are of type {known.type}: {error}") from error
    found = pc.index_in(wanted, value_set=known.slice(1)).combine_chunks().fill_null(-1)
    return np.asarray(found, dtype=np.int64) + 1
