"""Fixtures shared by all tests."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import turbogr  # noqa: F401  (before torch: see its OpenMP settings)

_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE")


def close_process_group() -> None:
    """What a trainer leaves open until the process ends, ends here."""
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
        # Trainers lie in cycles, and keep their groups. A loader's worker that deleted one would wait for threads that only its
        # parent has, and crash.
        gc.collect()


def restore_rendezvous(before: dict[str, str | None]) -> None:
    """Sets the environment's variables of a rendezvous as they were."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True, scope="module")
def no_ranks_left_by_a_file() -> Iterator[None]:
    """Nor by its fixtures, of which those of the whole run have been made before this one."""
    yield
    close_process_group()
    restore_rendezvous(dict.fromkeys(_RENDEZVOUS))


@pytest.fixture(autouse=True)
def no_ranks_left() -> Iterator[None]:
    """No test leaves ranks to the next."""
    from torch import distributed

    before = {name: os.environ.get(name) for name in _RENDEZVOUS}
    was_open = distributed.is_initialized()
    yield
    if not was_open:
        close_process_group()
    restore_rendezvous(before)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data beside the project; skips where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real data (../shared/data) is not on this machine")
    return folder
