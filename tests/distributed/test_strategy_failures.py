"""A rank that fails ends all others, well before the process group's timeout, and they say which, when and why.

What they saved last can be gone on from.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.distributed.failing_worker import BATCHES
from tests.distributed.launch import launch
from tests.distributed.strategy_cases import SizedBatches
from tests.strategies.test_resume import toy

WORKER = "tests.distributed.failing_worker"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, torch.Tensor]:
    """What one process trains from the batches that every rank has; the mean over ranks is its own."""
    return toy(tmp_path_factory.mktemp("whole"), "semi_async", SizedBatches(BATCHES, 1))


def failed(how: str, who: int, folder: Path, whole: dict[str, torch.Tensor], ranks: int = 2) -> list[str]:
    saved = folder / "saved"
    finished = launch(["-m", WORKER, how, str(who), str(saved)], ranks, folder / "launch", timeout=120, expect=1)
    for output in finished.outputs:
        (seconds,) = re.findall(r"ended after (\d+) s", output) or ["40" if how != "killed" else "0"]
        assert int(seconds) < 30, finished.everything()  # the timeout is 40
    last = max(saved.glob("step=*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    assert apart(toy(folder / "resumed", "semi_async", SizedBatches(BATCHES, 1), last), whole) < 1e-5
    control = toy(folder / "control", "semi_async", SizedBatches(BATCHES, 2), last)
    assert apart(control, whole) > 1e-3
    return finished.outputs


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two runs' tensors."""
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


def test_a_rank_that_raises_in_its_step(tmp_path, whole):
    outputs = failed("step", 1, tmp_path, whole, ranks=4)
    assert "ValueError: the cause" in outputs[1]
    for rank in (0, 2, 3):
        assert "rank 1 failed in train at step 3: ValueError: the cause" in outputs[rank], outputs[rank]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "who", "said"),
    [
        ("loader", 0, r"rank 0 failed in train at step 2: OSError: the cause"),
        ("backward", 1, r"rank 1 failed in train at step 3: ValueError: the cause"),
        ("validation", 1, r"rank 1 failed in validate at step 8: ValueError: the cause"),
        ("worker", 1, r"rank 1 failed in train at step 2: OSError: Caught OSError in DataLoader worker process 0"),
        ("unique", 1, r"rank 1 failed in train at step 3: ValueError: the cause"),
        ("values", 0, r"rank 0 failed in train at step 6: ValueError: the cause"),
    ],
)
def test_wherever_it_raises(tmp_path, whole, how, who, said):
    outputs = failed(how, who, tmp_path, whole)
    assert re.search(said, outputs[1 - who]), outputs[1 - who]


@pytest.mark.slow
def test_a_rank_that_is_killed(tmp_path, whole):
    """It cannot say why; the others say that it is gone."""
    outputs = failed("killed", 1, tmp_path, whole)
    assert "rank 0 lost the connection to a rank that said nothing (was it killed?) in train at step 3" in outputs[0]
