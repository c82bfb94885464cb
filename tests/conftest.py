"""Fixtures shared by all tests."""

from pathlib import Path

import pytest

import turbogr  # noqa: F401  (before torch: see its OpenMP settings)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the project; skips where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real data (../shared/data) is not on this machine")
    return folder
