"""The engine on several ranks equals one table in one process: weights and optimizer state, all topologies, and the rest."""

from __future__ import annotations

import importlib.util

import pytest

from tests.distributed.engine_worker import cases, faulty
from tests.distributed.launch import launch, launch_checks

WORKER = "tests.distributed.engine_worker"
TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def four(tmp_path_factory):
    return launch_checks(WORKER, 4, tmp_path_factory.mktemp("four"), "equal", nodes=2)


@pytest.fixture(scope="session")
def two(tmp_path_factory):
    return launch_checks(WORKER, 2, tmp_path_factory.mktemp("two"), "equal")


@pytest.fixture(scope="session")
def rest(tmp_path_factory):
    return launch_checks(WORKER, 4, tmp_path_factory.mktemp("rest"), "rest")


def is_equal(reports) -> None:
    for report in reports:
        assert max(report["relative"].values()) <= TOLERANCE, report["relative"]


def copies_agree(reports) -> None:
    """The same member of all groups has the same bits."""
    for member in {report["member"] for report in reports}:
        assert len({report["digest"] for report in reports if report["member"] == member}) == 1


@pytest.mark.parametrize("name", cases(4))
def test_four_ranks_equal_one_process(four, name):
    is_equal(four[name])
    copies_agree(four[name])


@pytest.mark.parametrize("name", cases(2))
def test_two_ranks_equal_one_process(two, name):
    is_equal(two[name])
    copies_agree(two[name])


@pytest.mark.parametrize("name", faulty())
def test_a_mistake_is_seen(four, name):
    """In the optimizer's state, even where the weights hide it (AdaGrad and Adam do not care for a constant factor)."""
    for report in four[name]:
        assert max(report["relative"].values()) > 1000 * TOLERANCE, report["relative"]
    copies_agree(four[name])  # which proves nothing


def test_tables_as_the_planner_shards_them(rest):
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("torchrec is not installed")
    is_equal(rest["planned"])


def test_two_runs_have_the_same_bits(rest):
    assert all(rest["repeated"])


@pytest.mark.parametrize("which", ["one_start", "one_start_for_a_device"])
def test_groups_start_from_one_table(rest, which):
    copies_agree(rest[which])


def test_state_is_sharded_gathered_and_loaded(rest):
    for report in rest["state_over_ranks"]:
        assert all(report.values()), report


def test_states_of_other_tables_are_refused(rest):
    for rows, width, optimizer in rest["other_states"]:
        assert "weight has the shape [52, 8], this table's has [53, 8]: was it trained on another catalogue" in rows
        assert "weight has the shape [53, 7], this table's has [53, 8]" in width
        assert "table has weight, this one has optimizer.sum, weight: was it trained with another row optimizer?" in optimizer


def test_evaluation_reads_live_rows(rest):
    for report in rest["evaluation"]:
        assert all(report.values()), report


def test_lookups_that_were_not_prepared_are_refused(rest):
    for nothing, fewer, others, more, late, backward, form in rest["refusals"]:
        assert "looks up rows in training_step only" in nothing
        assert "other rows of feature 'negatives' than sparse_features(batch)" in fewer
        assert "other rows of feature 'negatives'" in others
        assert "other rows of feature 'more'" in more
        assert late == nothing
        assert "backward before finish_rows" in backward
        assert "exchange must be one of" in form


def test_discarded_gradients_leave_no_trace(rest):
    for report in rest["discarded"]:
        assert all(report.values()), report


def test_few_collectives_a_step_and_none_without_need(rest):
    """Three all-to-all inside a group (and one that tells the counts), three all-gathers between groups."""
    inside = ["all_to_all_single 4.0"]
    for report in rest["collectives"]:
        gathers = {name: [c for c in calls if c.startswith("all_gather")] for name, calls in report.items()}
        assert report["1 groups, 1"] == report["1 groups, 3"] == inside
        assert [c for c in report["2 groups, 1"] if c not in gathers["2 groups, 1"]] == inside
        assert [c for c in report["4 groups, 1"] if c not in gathers["4 groups, 1"]] == []
        for groups in (2, 4):
            assert total(gathers[f"{groups} groups, 1"]) == pytest.approx(3)
            # Row ids go for each batch, values once for three.
            assert total(gathers[f"{groups} groups, 3"]) == pytest.approx(2 + 1 / 3)


def total(calls: list[str]) -> float:
    return sum(float(call.split()[1]) for call in calls)


def test_an_id_outside_the_table_ends_all_ranks(tmp_path):
    """It is found before anything is sent; the ranks that wait for the others end as well, long before the limit."""
    finished = launch(["-m", WORKER, "wrong"], 4, tmp_path, timeout=60, expect=1)
    assert "feature 'negatives' holds id 53, outside the table's rows 0..52" in finished.outputs[1]
