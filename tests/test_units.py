import pytest

from turbogr.errors import ConfigurationError
from turbogr.units import in_bytes, parse_bytes


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (3e12, "3.0 TB"), (4e15, "4000.0 TB")]
)
def test_bytes_for_people(count, text):
    assert in_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("64GB", 64 * 10**9), ("1.5 GiB", 3 * 2**29), ("512mib", 2**29), ("7", 7), (8, 8), ("3 k", 3000), ("2TB", 2 * 10**12)],
)
def test_bytes_from_people(text, count):
    assert parse_bytes("--memory", text) == count


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0", "1e9", "GB"])
def test_no_number_of_bytes(text):
    with pytest.raises(ConfigurationError, match=r"--memory is .*, which is no number of bytes"):
        parse_bytes("--memory", text)
