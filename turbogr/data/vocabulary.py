"""``--vocabulary-of``: new events in the rows of items and features that another prepared folder has."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from turbogr.data.encoding import FeatureFiles
from turbogr.data.options import PrepareOptions
from turbogr.data.prepared import PreparedData
from turbogr.data.sources.common import Intake, Source
from turbogr.errors import ConfigurationError, DataError


class Vocabulary:
    """What a prepared folder knows.

    Attributes:
        num_items: size of its catalogue.
        content_hash: of the folder whose logs the rows come from: this one, or the one whose vocabulary this one has.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the folder.

        Raises:
            DataError: it cannot be used.
        """
        self._data = PreparedData.open(path)
        self.num_items = self._data.num_items
        self.content_hash = self._data.vocabulary

    def complete(self, options: PrepareOptions) -> PrepareOptions:
        """Take the features of events that are not named from the folder, and those of them that are text as text.

        Raises:
            ConfigurationError: other features are named, or features of items, which come from the folder.
        """
        names = tuple(self._data.event_features)
        if options.item_features:
            raise ConfigurationError(
                f"--item-features cannot be given with --vocabulary-of: the items' features come from {self._data.path}"
            )
        if options.features and set(options.features) != set(names):
            raise ConfigurationError(
                f"--features names {', '.join(options.features)}, but the events of {self._data.path} have "
                f"{', '.join(names) or 'none'}; leave --features out to take those"
            )
        texts = [name for name in names if pa.types.is_string(self.values(name).type)]
        return replace(options, features=names, text_features=tuple(dict.fromkeys([*options.text_features, *texts])))

    def values(self, name: str) -> pa.Array:
        """The value of every row of a feature, null in row 0."""
        return self._data.feature_values(name)

    def item_rows(self) -> pa.Table:
        """All items: ``id`` (int64 or string) and ``row`` (int32)."""
        rows = np.arange(self.num_items, dtype=np.int32)
        return pa.table({"id": self._data.item_ids(rows), "row": rows})

    def write_item_features(self, files: FeatureFiles) -> None:
        """Write the features of items as they are."""
        for table in self._data.features:
            if table.item_rows is not None:
                np.save(files.rows_file(table.name), table.item_rows)
                counts = np.bincount(table.item_rows, minlength=table.num_rows)
                files.add(table.name, "item", self.values(table.name).slice(1), counts)


class KnownItems:
    """A source of which the events of unknown items are dropped, by a filter behind its own.

    Attributes:
        filters: the source's, and ``item known``.
        files: see :class:`turbogr.data.sources.common.Source`.
        text_ids: see there.
        features: see there.
    """

    def __init__(self, source: Source, vocabulary: Vocabulary) -> None:
        """Take the source.

        Raises:
            DataError: ids are text in one of source and folder and numbers in the other.
        """
        self._source = source
        self._ids = vocabulary.item_rows()["id"].combine_chunks()
        self.text_ids, self.files, self.features = source.text_ids, source.files, source.features
        self.filters = [*source.filters, "item known"]
        if pa.types.is_string(self._ids.type) != self.text_ids:
            ours, theirs = ("text", "numbers") if self.text_ids else ("numbers", "text")
            raise DataError(
                f"{self.files[0]}: ids are {ours}, but those of --vocabulary-of are {theirs}; prepare both with --string-ids, "
                "or both without"
            )

    @property
    def time_unit(self) -> str:
        """The source's."""
        return self._source.time_unit

    def tables(self, intake: Intake) -> Iterator[pa.Table]:
        """Give all events in reading order (:meth:`turbogr.data.sources.common.Source.tables`)."""
        for table in self._source.tables(intake):
            dropped = table["dropped"].to_numpy().astype(np.uint8)
            dropped[(dropped == 0) & ~self._known(table["item"])] = len(self.filters)
            yield table.set_column(table.schema.get_field_index("dropped"), "dropped", pa.array(dropped))

    def _known(self, items: pa.ChunkedArray) -> np.ndarray:
        if self.text_ids:
            return np.asarray(pc.is_in(items, value_set=self._ids))
        # Ids of a folder ascend. A search costs less than a hash table of the whole catalogue for every block of the logs.
        ids, items = self._ids.to_numpy(), items.to_numpy()
        return ids[np.minimum(np.searchsorted(ids, items), len(ids) - 1)] == items
