"""Collisions on two ranks counts what one process with all their users counts."""

from __future__ import annotations

import pytest

from tests.distributed.collisions_worker import CASES, figures
from tests.distributed.launch import launch_checks
from tests.distributed.strategy_cases import TOGETHER, make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("prepared") / "p")


@pytest.fixture(scope="module")
def two(folder, tmp_path_factory):
    return launch_checks("tests.distributed.collisions_worker", 2, tmp_path_factory.mktemp("collisions"), str(folder))


@pytest.mark.parametrize("name", CASES)
def test_ranks_count_together(name, folder, two):
    one = figures(folder, 1, name, "auto")
    assert one.pop("tau") == 0
    tau = int(CASES[name][1]["mode"] == "semi_async")
    assert two[name] == [{"tau": tau, **one}] * 2


def test_negative_control(folder, two):
    """Half of each step's users have other figures."""
    half = figures(folder, 1, "full", "auto", batch_size=TOGETHER // 2)
    assert half["samples"] == two["full"][0]["samples"] // 2
    assert half["shared"] != two["full"][0]["shared"]
