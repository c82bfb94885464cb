"""Where a preparation works: a folder that appears at once or not at all, a database that spills into it, arrays in pieces."""

import errno
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from turbogr.errors import ConfigurationError, DataError

# DuckDB and Arrow tell a full disk in their message only.
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
        with _full_disk_explained(out):
            yield folder, scratch
            folder.replace(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _full_disk_explained(out: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, duckdb.Error, pa.ArrowException) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or _FULL.search(str(error)):
            raise DataError(
                f"{out}: the disk is full; preparing needs about twice the size of the logs beside the output. Nothing "
                f"was left behind; free some space, or choose --out on another disk ({error})"
            ) from error
        if isinstance(error, duckdb.OutOfMemoryException):
            raise ConfigurationError(f"--memory-limit is too small for these logs: {error}") from error
        raise


@contextmanager
def database(scratch: Path, memory_limit: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a DuckDB that spills into ``scratch`` and keeps the order of rows.

    Args:
        scratch: an existing folder.
        memory_limit: a size such as ``"2GB"``.

    Raises:
        ConfigurationError: the limit is no size.
    """
    config: dict[str, Any] = {"temp_directory": str(scratch / "spill"), "preserve_insertion_order": True}
    with duckdb.connect(":memory:", config=config) as connection:
        try:
            connection.execute("SET memory_limit = ?", [memory_limit])
        except duckdb.Error as error:
            raise ConfigurationError(f"--memory-limit is {memory_limit!r}; write a size such as 2GB") from error
        yield connection


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
