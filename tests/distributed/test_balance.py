"""Balancing under TurboGRStrategy: who trains a user changes, what a step trains does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.data.make import write_prepared
from tests.distributed.balance_worker import sgd
from tests.distributed.launch import launch_checks
from tests.distributed.strategy_cases import fit, relative
from turbogr.data.balance import CostModel

USERS = 97
MODES = ("sync", "semi_async")
STEP = 1e-6
"""Of one step, in single precision."""
EPOCHS = 1e-5
"""Of the eight steps of two epochs, each of which starts from the last one's rounding."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared") / "p", USERS, num_items=60, min_len=4, max_len=22, seed=1)


@pytest.fixture(scope="session")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("balance")


@pytest.fixture(scope="session")
def two(folder, out):
    return launch_checks("tests.distributed.balance_worker", 2, out, str(folder), str(out), timeout=400)


def together(reports: list[dict[str, Any]]) -> list[list[int]]:
    """The users of each step, of both ranks."""
    return [sorted(a + b) for a, b in zip(*(report["users"] for report in reports), strict=True)]


def worst(out: Path, name: str, expected: str, mode: str) -> float:
    return max(relative(out / f"{name}, {mode}.ckpt", out / f"{expected}, {mode}.ckpt").values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("balance", ["tokens", "attention"])
def test_a_reallocated_batch_gives_the_same_update(two, out, balance, mode):
    """Weights and optimizer state, dense and sparse."""
    off, balanced = two[f"a step, off, {mode}"], two[f"a step, {balance}, {mode}"]
    assert together(balanced) == together(off)
    assert balanced[0]["users"] != off[0]["users"]
    assert worst(out, f"a step, {balance}", "a step, off", mode) <= STEP


@pytest.mark.parametrize("mistake", ["lost", "unweighted"])
def test_a_mistake_is_seen(two, out, mistake):
    """A user who is forgotten; ranks that count as if they had equally many tokens."""
    two[mistake]
    assert worst(out, mistake, "a step, off", "sync") > 1000 * STEP


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["epochs", "cut", "accumulated", "validated"])
def test_epochs_of_balanced_batches_train_the_same(two, out, case, mode):
    off, balanced = two[f"{case}, off, {mode}"], two[f"{case}, tokens, {mode}"]
    users = together(balanced)
    assert users == together(off)
    assert len(users) == 8 if case != "cut" else len(users) == 6
    for epoch in (users[: len(users) // 2], users[len(users) // 2 :]):
        # Each once, whatever `use_distributed_sampler` says.
        assert sorted(user for step in epoch for user in step) == list(range(USERS))
    assert balanced[0]["digest"] == balanced[1]["digest"]  # two copies of the tables
    assert worst(out, f"{case}, tokens", f"{case}, off", mode) <= EPOCHS
    for a, b in zip(balanced[0]["metrics"], off[0]["metrics"], strict=True):
        assert a == pytest.approx(b, abs=2e-3)
    assert len(off[0]["metrics"]) == (2 if case == "validated" else 0)


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_may_have_no_users_at_an_epochs_end(two, mode):
    shares = two[f"epochs, tokens, {mode}"]
    assert [[len(report["users"][step]) for report in shares] for step in (3, 7)] == [[1, 0], [1, 0]]


def test_ranks_have_equally_many_tokens(two):
    def difference(case: str) -> float:
        a, b = (np.array(report["tokens"]) for report in two[f"{case}, sync"])
        return float(np.abs(a - b)[[0, 1, 2]].mean())

    assert difference("epochs, tokens") <= 1 < difference("epochs, off")
    assert difference("cut, tokens") <= 1 < difference("cut, off")


@pytest.mark.parametrize("case", ["epochs, attention", "cut, tokens"])
def test_two_ranks_equal_one_process(two, out, folder, tmp_path, case):
    two[f"{case}, sync"]
    data = {"tokens_per_batch": "auto"} if case == "cut, tokens" else {"balance": "attention", "balance_cost": CostModel(1.0)}
    options = {"limit_train_batches": 1.0, "max_epochs": 2, "rows": "adagrad", "data": data}
    with patch("tests.distributed.strategy_cases.adam", sgd):
        fit(folder, 1, "auto", **options).save_checkpoint(tmp_path / "one.ckpt")
    differences = relative(out / f"{case}, sync.ckpt", tmp_path / "one.ckpt")
    assert max(differences.values()) <= EPOCHS, differences


@pytest.mark.parametrize("mode", MODES)
def test_workers_change_nothing(two, mode):
    for alone, helped in zip(two[f"epochs, tokens, {mode}"], two[f"worker, tokens, {mode}"], strict=True):
        assert (alone["digest"], alone["users"]) == (helped["digest"], helped["users"])


@pytest.mark.parametrize("mode", MODES)
def test_ranks_thin_their_histories_to_one_target(two, mode):
    thinned, whole = two[f"thinned, {mode}"], two[f"epochs, off, {mode}"]
    assert [report["users"] for report in thinned] == [report["users"] for report in whole]
    (a, b), every = ([np.array(report["tokens"]) for report in reports] for reports in (thinned, whole))
    full = [step for step in range(8) if step % 4 < 3]  # the last of an epoch is one user
    assert np.abs(a - b)[full].max() <= 1 < np.abs(every[0] - every[1])[full].max()
    assert (a + b)[full].sum() < sum(every)[full].sum()


@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumed_within_an_epoch_equals_an_uninterrupted_one(two, mode):
    for report in two[f"resumed, {mode}"]:
        assert report["stopped"]["users"] + report["rest"]["users"] == report["whole"]["users"]
        assert report["rest"]["digest"] == report["whole"]["digest"] != report["stopped"]["digest"]
    for report in two[f"interrupted, {mode}"]:
        assert report["first"] + report["rest"] == report["whole"]
        assert 2 < len(report["first"]) < len(report["whole"])
        assert len(set(report["digests"])) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_run_may_be_resumed_with_another_balance(two, out, mode):
    reports = two[f"resumed otherwise, {mode}"]
    trained = together([report["stopped"] for report in reports]) + together([report["rest"] for report in reports])
    assert trained == together([report["whole"] for report in reports])
    assert [report["rest"]["users"] for report in reports] != [report["whole"]["users"][5:] for report in reports]
    name = reports[0]["name"]
    assert worst(out, f"{name} rest", f"{name} whole", mode) <= EPOCHS


@pytest.mark.parametrize("mode", MODES)
def test_a_run_cannot_be_resumed_with_other_batches(two, mode):
    for text in two[f"refused, {mode}"]:
        assert "tokens_per_batch was 'auto' and is None" in text
