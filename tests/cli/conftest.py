"""A prepared folder, and a working directory of its own for every test."""

import logging
import sys
from pathlib import Path

import pytest

from tests.data.make import write_prepared


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared"), num_users=60, num_items=40, min_len=5)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch, capsys):
    """Every test runs in an empty folder and leaves no global seed behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    # Lightning's handlers hold the stderr of the moment it was imported; pytest has replaced and closed that one.
    handlers = [h for name in ("lightning.pytorch", "lightning.fabric") for h in logging.getLogger(name).handlers]
    for handler in handlers:
        handler.setStream(sys.stderr)
    yield
    for handler in handlers:
        handler.setStream(sys.__stderr__)
