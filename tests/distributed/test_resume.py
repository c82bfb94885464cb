"""Two ranks that stop anywhere and go on in another trainer end as those that never stopped, bit for bit, in both modes."""

from __future__ import annotations

import pytest

from tests.data.make import write_prepared
from tests.distributed.launch import launch_checks
from tests.distributed.resume_worker import BATCHES, CASES, MISTAKES, MODES, UNDISTURBED, USERS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    prepared = write_prepared(folder / "p", num_users=USERS, num_items=40, min_len=5, max_len=12, seed=1)
    module = "tests.distributed.resume_worker"
    return launch_checks(module, 2, folder / "two", str(prepared), str(folder), timeout=240.0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_goes_on_bit_for_bit(two, name, mode):
    """Rows, their optimizer's state, dense parameters and moments, schedule and metrics, on each rank."""
    for found in two[f"{name}, {mode}"]:
        whole, others = found["whole"], {stop: one for stop, one in found.items() if stop != "whole"}
        steps = 2 * (-(-BATCHES // CASES[name].trainer.get("accumulate_grad_batches", 1)))
        assert whole["steps"] == steps
        assert whole["metrics"].keys() >= ({"val/MRR"} if isinstance(CASES[name].data, dict) else set())
        assert others.keys() == {str(stop) for stop in CASES[name].stops}
        for stop, resumed in others.items():
            assert resumed == whole, stop


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(two, name):
    """Negative control; without a mistake the same function finds nothing."""
    case, mode, _ = MISTAKES[name]
    for found, spoilt in zip(two[f"{case}, {mode}"], two[name], strict=True):
        same = spoilt["rows and dense"] == found["whole"]["rows and dense"]
        assert same == (name == "none")


@pytest.mark.parametrize("groups", [1, 2])
def test_a_signal_without_a_checkpoint_leaves_nothing_behind(two, groups):
    """SIGTERM on one rank ends fit on both; its lanes end with it, and the process can train again, as if nothing had been."""
    reports = two[f"terminated, {groups}"]
    for report in reports:
        assert report["step"] == reports[0]["step"] < BATCHES
        assert {"turbogr-failures", "turbogr-ids", "turbogr-values"} <= set(report["during"])  # negative control
        assert report["after"] == report["after again"] == report["after all"] == []
        assert report["again"] > report["step"]
    for report, found in zip(reports, two[f"{UNDISTURBED[groups]}, semi_async"], strict=True):
        assert report["other"] == found["whole"]


def test_the_processes_end_without_complaint(two):
    """And close their process groups before they do, of which torch would say that they have not been destroyed."""
    assert two.finished.code == 0
    assert "destroy" not in two.finished.everything()
