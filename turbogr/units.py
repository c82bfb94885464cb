"""Numbers of bytes, for people and from people."""

from __future__ import annotations

import re

from turbogr.errors import ConfigurationError

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMGTP]?)(i?)B?\s*", re.IGNORECASE)


def in_bytes(count: float) -> str:
    """A number of bytes for people, in decimal units: "512 B", "1.5 GB"."""
    size = float(count)
    for unit in _UNITS[:-2]:
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} {_UNITS[-2]}"


def parse_bytes(option: str, text: str | int) -> int:
    """A number of bytes as people write it: 64GB, "1.5 GiB", 8e9 is not one.

    Args:
        option: whose value it is, for the error.
        text: a number with an optional unit, decimal (kB, MB, GB, TB) or binary (KiB, MiB, GiB, TiB).

    Raises:
        ConfigurationError: it is none, or not positive.
    """
    found = _SIZE.fullmatch(str(text))
    size = 0
    if found:
        number, prefix, binary = found.groups()
        size = round(float(number) * (1024 if binary else 1000) ** " kmgtp".index(prefix.lower() or " "))
    if size < 1:
        raise ConfigurationError(f"{option} is {text!r}, which is no number of bytes; write it like 64GB or 512MiB")
    return size
