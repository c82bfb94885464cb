"""A rank that fails ends all others, well before the process group's timeout, and they say which, when and why."""

from __future__ import annotations

import re

import pytest

from tests.distributed.launch import launch

WORKER = "tests.distributed.failing_worker"


def failed(how: str, who: int, folder, ranks: int = 4) -> list[str]:
    finished = launch(["-m", WORKER, how, str(who)], ranks, folder, timeout=120, expect=1)
    for output in finished.outputs:
        (seconds,) = re.findall(r"ended after (\d+) s", output) or ["40" if how != "killed" else "0"]
        assert int(seconds) < 30, finished.everything()  # the timeout is 40
    return finished.outputs


def test_a_rank_that_raises_in_its_step(tmp_path):
    outputs = failed("step", 1, tmp_path)
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
def test_wherever_it_raises(tmp_path, how, who, said):
    outputs = failed(how, who, tmp_path, ranks=2)
    assert re.search(said, outputs[1 - who]), outputs[1 - who]


@pytest.mark.slow
def test_a_rank_that_is_killed(tmp_path):
    """It cannot say why; the others say that it is gone."""
    outputs = failed("killed", 1, tmp_path, ranks=2)
    assert "rank 0 lost the connection to a rank that said nothing (was it killed?) in train at step 3" in outputs[0]
