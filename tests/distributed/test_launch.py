import os
import re
import time

import pytest

from tests.distributed.launch import launch, launch_checks

WORKER = ["-m", "tests.distributed.launch_worker"]


def test_reports_of_two_simulated_nodes(tmp_path):
    checks = launch_checks(WORKER[1], 4, tmp_path, "checks", nodes=2)
    assert checks["total"] == [[6.0, 4.0]] * 4
    with pytest.raises(AssertionError, match="rank 2 is broken"):
        checks["broken"]
    with pytest.raises(AssertionError, match="not reached"):
        checks["after"]
    assert "hello from 3 of 4, node 1" in checks.finished.outputs[3]
    assert "hello from 0 of 4, node 0" in checks.finished.outputs[0]


def test_a_rank_that_fails_fails_the_launch_with_its_output(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)expected exit code 0.*hello from 0.*rank 1 gives up"):
        launch([*WORKER, "fail"], 2, tmp_path)


def test_a_launch_that_hangs_is_killed_with_all_its_ranks(tmp_path):
    with pytest.raises(AssertionError, match=r"(?s)killed.*hello from 0.*hello from 1"):
        launch([*WORKER, "hang"], 2, tmp_path, timeout=15, environment={"TURBOGR_TEST_MARK": str(tmp_path)})
    deadline = time.monotonic() + 10
    while (left := marked_processes(f"TURBOGR_TEST_MARK={tmp_path}")) and time.monotonic() < deadline:
        time.sleep(0.1)  # a killed process takes a moment to disappear
    assert not left


def marked_processes(mark: str) -> list[str]:
    if not os.path.isdir("/proc/self"):
        pytest.skip("there is no /proc to look for processes in")
    found = []
    for pid in filter(re.compile(r"\d+").fullmatch, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", errors="replace") as environ:
                if mark in environ.read():
                    found.append(pid)
        except OSError:
            continue
    return found
