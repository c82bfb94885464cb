"""From raw logs to a prepared folder, out of core.

Arrow parses the logs in blocks, DuckDB numbers the ids and sorts the events (spilling to disk), and the filters stream over the
sorted events. Nothing is written into the output folder before everything is done.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from turbogr import __version__
from turbogr.data.encoding import EventFeatures, FeatureFiles, ItemFeatures
from turbogr.data.filtering import EventStore, drop_repeats, drop_short, k_core, keep_newest
from turbogr.data.manifest import MIN_EVENTS, ContentHash, length_percentiles, write_manifest
from turbogr.data.options import SOURCES, WITHOUT_MEANING, PrepareOptions
from turbogr.data.sources.categories import check_names
from turbogr.data.sources.common import Intake, Source, readable
from turbogr.data.sources.events import Events
from turbogr.data.sources.item_tables import ItemTable
from turbogr.data.sources.kuairand import SIGNALS, KuaiRand
from turbogr.data.sources.movielens import MovieLens
from turbogr.data.sources.sequences import Sequences
from turbogr.data.vocabulary import KnownItems, Vocabulary
from turbogr.data.workspace import Database, npy, workspace
from turbogr.errors import ConfigurationError, DataError

__all__ = ["SOURCES", "PrepareOptions", "prepare"]

_ROW_GROUP = 1 << 20


def prepare(
    source: str,
    paths: Sequence[str | Path],
    out: str | Path,
    options: PrepareOptions | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Prepare a folder for training from raw logs.

    Args:
        source: ``"movielens"``, ``"kuairand"``, ``"sequences"`` or ``"events"``.
        paths: log files or folders, in the order in which their events follow each other where times are equal.
        out: the folder to write: absent or empty.
        options: what to keep and how.
        console: where progress is shown; None shows none.

    Returns:
        The manifest that was written.

    Raises:
        DataError: a log is not as it must be (the message names file, line and column), nothing is left after a filter, the
            output folder is not empty, or the disk is full.
        ConfigurationError: an option that the source does not have, or of impossible value.
    """
    options = options or PrepareOptions()
    vocabulary = None
    if options.vocabulary_of is not None:
        vocabulary = Vocabulary(options.vocabulary_of)
        options = vocabulary.complete(options)
    settings = options.resolved(source)
    item_tables = _item_tables(source, options)
    reader = _reader(source, [Path(path) for path in paths], options)
    if vocabulary is not None:
        reader = KnownItems(reader, vocabulary)
    with workspace(Path(out)) as (folder, scratch):
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console or Console(quiet=True),
        )
        with progress, Database(scratch, options.memory_limit) as database:
            work = _Preparation(source, reader, item_tables, vocabulary, settings, folder, scratch, database, progress)
            return work.run()


class _Preparation:
    """The steps of one preparation, in order."""

    def __init__(
        self,
        source: str,
        reader: Source,
        item_tables: list[ItemTable],
        vocabulary: Vocabulary | None,
        settings: dict[str, Any],
        folder: Path,
        scratch: Path,
        database: Database,
        progress: Progress,
    ) -> None:
        self._source, self._reader, self._settings = source, reader, settings
        self._folder, self._scratch, self._database, self._progress = folder, scratch, database, progress
        self._counts: list[dict[str, Any]] = []
        self._vocabulary = vocabulary
        self._event_features = EventFeatures(reader.features, database, vocabulary)
        self._item_tables = item_tables
        self._item_features = [ItemFeatures(table, number, database) for number, table in enumerate(item_tables)]

    def run(self) -> dict[str, Any]:
        files = self._read()
        store = self._order()
        too_short = self._filter(store)
        content = ContentHash()
        meaning = {name: value for name, value in self._settings.items() if name not in WITHOUT_MEANING}
        known = {} if self._vocabulary is None else {"vocabulary": self._vocabulary.content_hash}
        content.add_settings({**meaning, **known, "source": self._source, "time_unit": self._reader.time_unit})
        lengths = store.lengths[store.lengths > 0]
        features = self._write(store, content)
        counts = store.counts()
        manifest = {
            "turbogr": __version__,
            "source": self._source,
            "files": files,
            "options": self._settings,
            "protocol": self._settings["protocol"],
            "time_unit": self._reader.time_unit,
            "counts": self._counts,
            "too_short": too_short,
            "num_users": counts["users"],
            "num_items": counts["items"] if self._vocabulary is None else self._vocabulary.num_items,
            "num_events": counts["events"],
            "length_percentiles": length_percentiles(lengths),
            "maps": {"users": "users.parquet", "items": "catalogue.parquet"},
            "features": features,
            **known,
            "content_hash": content.hexdigest(),
        }
        return write_manifest(self._folder, manifest)

    def _read(self) -> list[dict[str, Any]]:
        """Fill the table ``raw``; its row ids are the reading order."""
        files = [*self._reader.files, *(table.file for table in self._item_tables)]
        total = sum(file.stat().st_size for file in files)
        with self._phase(f"Reading {len(files)} file(s), {total / 1e6:,.1f} MB", total) as advance:
            intake = Intake(advance)
            for number, table in enumerate(self._reader.tables(intake)):
                if number == 0:
                    columns = f'"user" {self._id_type}, item {self._id_type}, "time" BIGINT, dropped UTINYINT'
                    self._database.execute(f"CREATE TABLE raw ({columns}{self._event_features.columns(table)})")
                self._database.append("raw", table)
            for features in self._item_features:
                features.read(intake)
        return intake.files

    @property
    def _id_type(self) -> str:
        return "VARCHAR" if self._reader.text_ids else "BIGINT"

    def _order(self) -> EventStore:
        """Number users and items by their original ids, and sort the events by (user, time, reading order)."""
        database, filters = self._database, self._reader.filters
        survivors = ["count(*) AS after_0"] + [
            f"count(*) FILTER (dropped = 0 OR dropped > {number}) AS after_{number}" for number in range(1, len(filters) + 1)
        ]
        with self._phase("Counting users and items") as advance:
            for name in ("user", "item"):
                database.execute(f'CREATE TABLE {name}s AS SELECT "{name}" AS id, {", ".join(survivors)} FROM raw GROUP BY ALL')
                advance(1)
        for number, step in enumerate(["read", *filters]):
            query = (
                f"SELECT count(*) FILTER (n > 0) AS ids, CAST(sum(n) AS BIGINT) AS events FROM (SELECT after_{number} AS n FROM"
            )
            users, items = (database.table(f"{query} {name}s)").to_pylist()[0] for name in ("user", "item"))
            self._note(step, {"events": users["events"], "users": users["ids"], "items": items["ids"]})
        last = f"after_{len(filters)}"
        with self._phase("Ordering every user's events") as advance:
            for name in ("user", "item"):
                database.execute(
                    f"CREATE TABLE {name}_rows AS SELECT id, CAST(row_number() OVER (ORDER BY id) - 1 AS INTEGER) AS row, "
                    f"{last} AS n FROM {name}s WHERE {last} > 0 ORDER BY id"
                )
                database.execute(f"DROP TABLE {name}s")
            if self._vocabulary is not None:
                database.execute(f"CREATE OR REPLACE TABLE item_rows (id {self._id_type}, row INTEGER)")
                database.append("item_rows", self._vocabulary.item_rows())
            lengths = database.table("SELECT CAST(n AS BIGINT) AS n FROM user_rows ORDER BY row")["n"].to_numpy()
            items = int(database.table("SELECT count(*) AS n FROM item_rows")["n"][0].as_py())
            features = self._event_features
            features.number()
            query = (
                f'SELECT item_rows.row AS item, raw."time" AS "time"{features.select} FROM raw '
                f'JOIN user_rows ON user_rows.id = raw."user" JOIN item_rows ON item_rows.id = raw.item {features.joins} '
                'WHERE raw.dropped = 0 ORDER BY user_rows.row, raw."time", raw.rowid'
            )
            batches = database.batches(query, _ROW_GROUP)
            store = EventStore(self._scratch, items, len(features.names))
            store.fill(lengths, (tuple(column.to_numpy() for column in batch.columns) for batch in batches))
            database.execute("DROP TABLE raw")
            advance(1)
        return store

    def _filter(self, store: EventStore) -> int:
        settings = self._settings
        with self._phase("Filtering") as advance:
            if settings["repeats"] != "keep":
                drop_repeats(store, settings["repeats"])
                self._note(f"{settings['repeats']} of repeats", store.counts())
            if settings["k_core"] > 0:
                limit = None if settings["k_core_passes"] == "fixpoint" else settings["k_core_passes"]
                passes = k_core(store, settings["k_core"], limit, lambda count: advance(1))
                self._note(f"{settings['k_core']}-core, {passes} pass{'' if passes == 1 else 'es'}", store.counts())
            if settings["max_length"] is not None:
                keep_newest(store, settings["max_length"])
                self._note(f"newest {settings['max_length']}", store.counts())
            too_short = drop_short(store, MIN_EVENTS)
            self._note(f"users of >= {MIN_EVENTS} events", store.counts())
        return too_short

    def _write(self, store: EventStore, content: ContentHash) -> list[dict[str, Any]]:
        """Renumber what is left and write the folder's files; the hash reads them back. Gives the features' entries."""
        kept_users, kept_items = store.lengths > 0, store.item_counts > 0
        if self._vocabulary is not None:
            kept_items[:] = True
        item_row = (np.cumsum(kept_items) - 1).astype(np.int32)
        lengths = store.lengths[kept_users]
        total = int(lengths.sum())
        columns = [("user", pa.int32()), ("item", pa.int32()), ("time", pa.int64())]
        schema = pa.schema(columns + [(name, pa.int32()) for name in self._event_features.names])
        folder = self._folder
        files = FeatureFiles(folder, content)
        with self._phase("Writing", total) as advance:
            with (
                npy(folder / "items.npy", np.int32, total) as items_file,
                npy(folder / "times.npy", np.int64, total) as times_file,
                pq.ParquetWriter(folder / "events.parquet", schema, compression="zstd") as events_file,
                self._event_features.writer(store, files, self._reader.files[0]) as write_features,
            ):
                first = 0
                for chunk in store.chunks():
                    own = chunk.lengths[chunk.lengths > 0]
                    users = np.repeat(np.arange(first, first + len(own), dtype=np.int32), own)
                    items, times = item_row[chunk.items], chunk.times
                    if self._reader.time_unit == "none":
                        times = np.arange(len(items)) - np.repeat(np.cumsum(own) - own, own)
                    items_file.write(items.data)
                    times_file.write(np.ascontiguousarray(times, dtype=np.int64).data)
                    table = pa.table([users, items, times, *write_features(chunk)], schema=schema)
                    events_file.write_table(table, row_group_size=_ROW_GROUP)
                    first += len(own)
                    advance(len(items))
            np.save(folder / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
            self._write_map("user", kept_users, lengths, folder / "users.parquet", content)
            self._write_map("item", kept_items, store.item_counts[kept_items], folder / "catalogue.parquet", content)
            for name in ("items", "times", "offsets"):
                content.add_array(name, np.load(folder / f"{name}.npy", mmap_mode="r"))
            for features in self._item_features:
                features.write(int(kept_items.sum()), files)
            if self._vocabulary is not None:
                self._vocabulary.write_item_features(files)
        return files.entries

    def _write_map(self, name: str, kept: np.ndarray, counts: np.ndarray, file: Path, content: ContentHash) -> None:
        ids = self._database.table(f"SELECT id FROM {name}_rows ORDER BY row")["id"].filter(pa.array(kept))
        content.add_ids(f"{name} ids", ids)
        rows = np.arange(len(ids), dtype=np.int64)
        if name == "item" and self._item_features:
            self._database.execute(f'CREATE TABLE catalogue ("row" BIGINT, id {self._id_type})')
            self._database.append("catalogue", pa.table({"row": rows, "id": ids}))
        pq.write_table(pa.table({"row": rows, "id": ids, "events": counts.astype(np.int64)}), file, compression="zstd")

    def _note(self, step: str, counts: dict[str, int]) -> None:
        self._counts.append({"step": step, **counts})
        if counts["events"] == 0:
            trail = "; ".join(f"{each['step']}: {each['events']:,} events" for each in self._counts)
            raise DataError(f"{self._reader.files[0]}: no user is left after the step {step!r} ({trail}); loosen the filters")

    @contextmanager
    def _phase(self, description: str, total: int | None = None) -> Iterator[Any]:
        task = self._progress.add_task(description, total=total)
        yield lambda count: self._progress.advance(task, count)
        finished = self._progress.tasks[self._progress.task_ids.index(task)].completed or 1
        self._progress.update(task, total=total or finished, completed=total or finished)


def _reader(source: str, paths: list[Path], options: PrepareOptions) -> Source:
    if not paths:
        raise ConfigurationError("no path is given; name the log files or their folder")
    features = options.features
    if source == "kuairand":
        return KuaiRand(paths, SIGNALS if options.signals is None else options.signals, options.keep_hated, features)
    if source == "movielens":
        return MovieLens(paths, options.min_rating, features)
    if source == "sequences":
        return Sequences(paths, options.string_ids)
    roles = str(options.user), str(options.item), str(options.time)
    texts = options.text_features
    return Events(paths, *roles, options.where, options.string_ids, options.time_unit, features, texts)


def _item_tables(source: str, options: PrepareOptions) -> list[ItemTable]:
    """The tables of ``--item-features``, which can be opened; the names of all features are checked."""
    key, texts = options.item_key or options.item, options.text_features
    tables = [ItemTable(text, source, key, options.string_ids, texts) for text in options.item_features]
    if options.item_key is not None and not tables:
        raise ConfigurationError("--item-key names the column of items in the tables of --item-features, but none is given")
    names = [*options.features, *(name for table in tables for name in table.features)]
    check_names(names)
    for name in texts:
        if name not in names:
            raise ConfigurationError(f"--text-features names {name!r}, which is not among the features: {', '.join(names)}")
    for table in tables:
        with readable(table.file):
            pass  # said now, and not after minutes of reading the logs
    return tables
