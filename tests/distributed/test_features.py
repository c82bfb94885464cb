"""Features on several ranks: their tables are sharded like the items', and everything equals one process."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest

from tests.distributed.features_worker import CASES, make, trained
from tests.distributed.launch import launch_checks
from tests.distributed.strategy_cases import relative
from turbogr.models.tokens import Tokens

TOLERANCE = 1e-5
_features = Tokens.features


def without_tab(tokens, batch):
    return _features(tokens, replace(batch, features={"tab": batch.features["tab"].zero_()}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("prepared") / "p")


@pytest.fixture(scope="module")
def one(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "one.ckpt"
    return out, trained(folder, 1, "auto", out)


@pytest.fixture(scope="module")
def four_out(tmp_path_factory):
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def four(folder, four_out):
    return launch_checks("tests.distributed.features_worker", 4, four_out, str(folder), str(four_out), timeout=300)


@pytest.mark.parametrize("name", CASES)
def test_training_and_evaluation_equal_one_process(four, four_out, one, name):
    """Weights, dense and sparse optimizer state; the items' vectors are made of rows that lie on other ranks."""
    reports, (path, expected) = four[name], one
    differences = relative(four_out / f"{name}.ckpt", path)
    assert max(differences.values()) <= TOLERANCE, differences
    assert "tokens.item_weight" in differences
    for report in reports:
        assert report["test"] == pytest.approx(expected["test"], abs=1e-6)
    for member in {report["member"] for report in reports}:
        assert len({report["digest"] for report in reports if report["member"] == member}) == 1


def test_other_rows_of_a_feature_are_seen(four, four_out, one, folder, tmp_path):
    """The control: a step in which one feature of the events is not what it was."""
    other = tmp_path / "other.ckpt"
    four["2 groups of 2"]
    with patch.object(Tokens, "features", without_tab):
        trained(folder, 1, "auto", other)
    assert max(relative(four_out / "2 groups of 2.ckpt", other).values()) > 100 * TOLERANCE


def test_rows_of_items_are_not_sent_at_every_step(four):
    """They are the same on all ranks from the beginning: DDP need not broadcast [V] of them before each forward pass."""
    assert [report["synced"] for report in four["2 groups of 2"]] == [[]] * 4
