"""The manifest of a prepared folder: what it was made from, what it holds, and a hash to compare two of them."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from turbogr.data.features import SIDES
from turbogr.errors import DataError
from turbogr.files import replace_file

FORMAT, FORMAT_WITH_FEATURES = 1, 2
"""The format of a folder. One without features is still written as format 1, which every version of turbogr reads; one with
features is format 2, so that an older version refuses it instead of leaving the features out in silence."""
MANIFEST = "manifest.json"
PROTOCOLS = ("three_way", "published")
TIME_UNITS = ("s", "ms", "none")
MIN_EVENTS = 3
"""The shortest history that can be split three ways: one event to train on, one for validation, one for the test."""

_REQUIRED: dict[str, type | tuple[type, ...]] = {
    "turbogr": str,
    "source": str,
    "files": list,
    "options": dict,
    "protocol": str,
    "time_unit": str,
    "counts": list,
    "too_short": int,
    "num_users": int,
    "num_items": int,
    "num_events": int,
    "length_percentiles": dict,
    "maps": dict,
    "content_hash": str,
}
_FEATURE_REQUIRED: dict[str, type] = {"name": str, "side": str, "rows": int, "file": str, "map": str}
_HASH_CHUNK = 1 << 22


def length_percentiles(lengths: np.ndarray) -> dict[str, float]:
    """Describe the number of events of each user.

    Args:
        lengths: integers [U], events of every user, U >= 1.

    Returns:
        min, p10, p50, p90, p99, max and mean, in events. Percentiles are interpolated linearly (NumPy's default).
    """
    p10, p50, p90, p99 = (float(value) for value in np.percentile(lengths, [10, 50, 90, 99]))
    return {
        "min": int(lengths.min()),
        "p10": p10,
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": int(lengths.max()),
        "mean": float(lengths.mean()),
    }


class ContentHash:
    """SHA-256 over what a prepared folder means: its arrays, its original ids, and the options that shaped it.

    It depends neither on where the files lie, nor on threads, memory limits or the time of day. Every part is written with its
    name, type and length, so that two different folders cannot give the same stream of bytes.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add_settings(self, settings: dict[str, Any]) -> None:
        """Add settings (JSON values), in the order of their names."""
        self._part("settings", json.dumps(settings, sort_keys=True).encode())

    def add_array(self, name: str, array: np.ndarray) -> None:
        """Add a one-dimensional array of numbers, read in slices so that a memory-mapped one is never loaded whole."""
        little = array.dtype.newbyteorder("<")
        self._header(name, f"{little.str}[{len(array)}]")
        for start in range(0, len(array), _HASH_CHUNK):
            self._digest.update(np.ascontiguousarray(array[start : start + _HASH_CHUNK], dtype=little).tobytes())

    def add_ids(self, name: str, ids: pa.ChunkedArray | pa.Array) -> None:
        """Add original ids, int64 or strings."""
        if pa.types.is_integer(ids.type):
            self.add_array(name, ids.cast(pa.int64()).to_numpy())
        else:
            self._header(name, f"string[{len(ids)}]")
            for value in ids:
                text = value.as_py().encode()
                self._digest.update(len(text).to_bytes(8, "little"))
                self._digest.update(text)

    def add_feature(self, name: str, side: str, rows: np.ndarray, values: pa.Array) -> None:
        """Add a feature: its row of every event or item, and the value of every row (null in row 0)."""
        self.add_array(f"{side} feature {name}", rows)
        known = values.slice(1)
        if pa.types.is_floating(known.type):
            self.add_array(f"values of {name}", known.to_numpy())
        else:
            self.add_ids(f"values of {name}", known)

    def hexdigest(self) -> str:
        """The hash, as ``sha256:`` and 64 hexadecimal digits."""
        return "sha256:" + self._digest.hexdigest()

    def _part(self, name: str, value: bytes) -> None:
        self._header(name, f"bytes[{len(value)}]")
        self._digest.update(value)

    def _header(self, name: str, kind: str) -> None:
        self._digest.update(f"\n{name} {kind}\n".encode())


def write_manifest(folder: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    """Write ``manifest.json`` into ``folder``, last and in one move, so that a folder with a manifest is a complete one.

    Args:
        folder: the prepared folder.
        manifest: every key of the format except ``format``, which is added; ``features`` may be left out.

    Returns:
        The manifest with ``format``.
    """
    manifest = {"format": FORMAT_WITH_FEATURES if manifest.get("features") else FORMAT, **manifest}
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    replace_file(folder / MANIFEST, lambda file: file.write_text(text, encoding="utf-8"))
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check ``manifest.json``.

    Args:
        folder: a prepared folder.

    Returns:
        The manifest.

    Raises:
        DataError: the folder or the manifest is absent, unreadable, of another format, or lacks a key.
    """
    path = folder / MANIFEST
    make = "make the folder with `turbogr data prepare SOURCE PATH... --out DIR`"
    if not folder.exists():
        raise DataError(f"{folder}: no such prepared folder; {make}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"{folder}: not a prepared folder, it has no {MANIFEST}; {make}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); {make}") from error
    try:
        manifest = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}: line {error.lineno}, column {error.colno}: not JSON ({error.msg}); {make} again") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if found not in (FORMAT, FORMAT_WITH_FEATURES):
        raise DataError(
            f"{path}: format is {found!r}, this turbogr reads the formats {FORMAT} and {FORMAT_WITH_FEATURES}; {make} again"
        )
    manifest.setdefault("features", [])
    _check_keys(path, manifest, {**_REQUIRED, "features": list}, make)
    for feature in manifest["features"]:
        _check_keys(path, feature if isinstance(feature, dict) else {}, _FEATURE_REQUIRED, make)
        if feature["side"] not in SIDES:
            raise DataError(f"{path}: side is {feature['side']!r}, which is none of {', '.join(SIDES)}; {make} again")
    if manifest["protocol"] not in PROTOCOLS:
        raise DataError(f"{path}: protocol is {manifest['protocol']!r}, which is none of {', '.join(PROTOCOLS)}; {make} again")
    if manifest["time_unit"] not in TIME_UNITS:
        raise DataError(
            f"{path}: time_unit is {manifest['time_unit']!r}, which is none of {', '.join(TIME_UNITS)}; {make} again"
        )
    return manifest


def _check_keys(path: Path, found: dict[str, Any], required: Mapping[str, type | tuple[type, ...]], make: str) -> None:
    for key, kind in required.items():
        if not isinstance(found.get(key), kind):
            state = "absent" if key not in found else f"{found[key]!r}"
            raise DataError(f"{path}: key {key!r} is {state}, which is not valid; {make} again")
