"""Where a preparation works: a folder that appears at once or not at all, a database that spills into it, arrays in pieces."""

import errno
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, Self, TypeVar

import duckdb
import numpy as np
import pyarrow as pa

from turbogr.errors import ConfigurationError, DataError

T = TypeVar("T")

# DuckDB and Arrow tell a full disk in their message only.
_LEAST_MEMORY = "500MB"
_FULL = re.compile(r"no space left|max_temp_directory_size|disk quota|file too large", re.IGNORECASE)


@contextmanager
def workspace(out: Path) -> Iterator[tuple[Path, Path]]:
    """Make a folder beside the output that becomes the output when all went well and vanishes otherwise (Ctrl-C included).

    Args:
        out: the output folder: absent or empty.

    Yields:
        The folder to write into, and one for scratch files.

    Raises:
        DataError: the output cannot be made or is not empty, or the disk is full.
        ConfigurationError: DuckDB needs more memory than it was given.
    """
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            what = "is not empty" if out.is_dir() else "is a file"
            raise DataError(f"{out}: the output folder {what}; name another one, or delete it")
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent))
    except OSError as error:
        raise DataError(f"{out}: the output folder cannot be made ({error.strerror})") from error
    try:
        folder, scratch = temporary / "out", temporary / "scratch"
        folder.mkdir()
        scratch.mkdir()
        with _failures_explained(out):
            yield folder, scratch
            folder.replace(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _failures_explained(out: Path) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # What DuckDB's Python package makes of Ctrl-C during a query in the main thread (--where).
        if str(error) == "Query interrupted":
            raise KeyboardInterrupt from error
        raise
    except (OSError, duckdb.Error, pa.ArrowException) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or _FULL.search(str(error)):
            raise DataError(
                f"{out}: the disk is full; preparing needs about twice the size of the logs beside the output. Nothing "
                f"was left behind; free some space, or choose --out on another disk ({error})"
            ) from error
        if isinstance(error, OSError):
            raise DataError(f"{error.filename or out}: cannot be written or read ({error.strerror or error})") from error
        raise


class Database:
    """A DuckDB that spills into a folder, keeps the order of rows, and stops at Ctrl-C.

    Queries run in a second thread while the main one waits: DuckDB's own check for Ctrl-C, made in the thread that runs the
    query, was seen to come minutes late.
    """

    def __init__(self, scratch: Path, memory_limit: str) -> None:
        """Open the database.

        Args:
            scratch: an existing folder.
            memory_limit: a size such as ``"2GB"``.

        Raises:
            ConfigurationError: the limit is no size, or is too small to begin with.
        """
        self._memory_limit = memory_limit
        config: dict[str, Any] = {"temp_directory": str(scratch / "spill"), "preserve_insertion_order": True}
        self._connection = duckdb.connect(":memory:", config=config)
        self._pool = ThreadPoolExecutor(1, "duckdb")
        try:
            self.execute("SET memory_limit = ?", [memory_limit])
        except duckdb.Error as error:
            raise ConfigurationError(f"--memory-limit is {memory_limit!r}; write a size such as 2GB") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        # The thread itself is waited for, not a mark that it sets: Ctrl-C may come when it has taken a query, not begun it.
        end = Thread(target=self._pool.shutdown, kwargs={"cancel_futures": True})
        end.start()
        # Again and again, because an interrupt just before a statement is without effect.
        while end.is_alive():
            self._connection.interrupt()
            end.join(0.05)
        self._connection.close()

    def execute(self, statement: str, parameters: Sequence[object] = ()) -> None:
        """Run a statement."""
        self._run(lambda: self._connection.execute(statement, list(parameters)))

    def append(self, name: str, rows: pa.Table) -> None:
        """Append rows to a table, behind the ones that it has."""

        def insert() -> None:
            self._connection.register("block", rows)
            self._connection.execute(f"INSERT INTO {name} SELECT * FROM block")
            self._connection.unregister("block")

        self._run(insert)

    def table(self, query: str) -> pa.Table:
        """Run a query whose result fits into memory."""
        return self._run(lambda: self._connection.sql(query).to_arrow_table())

    def batches(self, query: str, rows: int) -> Iterator[pa.RecordBatch]:
        """Run a query and give its result in pieces of at most so many rows."""
        reader = self._run(lambda: self._connection.sql(query).to_arrow_reader(rows))
        while (batch := self._run(lambda: next(reader, None))) is not None:
            yield batch

    def _run(self, work: Callable[[], T]) -> T:
        def in_thread() -> T:
            try:
                return work()
            except duckdb.OutOfMemoryException as error:
                if _FULL.search(str(error)):  # DuckDB's name for a disk without room to spill
                    raise
                # DuckDB's own advice includes to give up the order of rows, on which the result rests.
                raise ConfigurationError(
                    f"--memory-limit {self._memory_limit} is too small for these logs; give more: {_LEAST_MEMORY} is a "
                    "sensible minimum, and more users and items need more"
                ) from error

        future = self._pool.submit(in_thread)
        # In short waits: a Ctrl-C that comes just before the main thread blocks does not wake it.
        while not wait([future], timeout=0.1).done:
            pass
        return future.result()


@contextmanager
def npy(file: Path, dtype: type[np.generic], length: int) -> Iterator[Any]:
    """Open a one-dimensional .npy file for writing in pieces.

    Args:
        file: the file.
        dtype: type of its numbers.
        length: how many there will be.

    Yields:
        The stream, behind the header.
    """
    with file.open("wb") as stream:
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": (length,)}
        np.lib.format.write_array_header_1_0(stream, header)
        yield stream
