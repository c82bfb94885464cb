"""`groups: auto` on real ranks: measured links, one answer for all, refusals with numbers."""

from __future__ import annotations

import re

import pytest

from tests.data.make import write_prepared
from tests.distributed.launch import launch_checks


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    folder = tmp_path_factory.mktemp("groups")
    prepared = write_prepared(folder / "prepared", num_users=40, num_items=60, min_len=5, max_len=12)
    return launch_checks("tests.distributed.groups_worker", 4, folder / "launch", str(prepared), nodes=2)


def same_on_all(results):
    assert all(result == results[0] for result in results)
    return results[0]


def test_links_are_measured_and_agreed(groups):
    for ranks_per_node, links in same_on_all(groups["measured"]).items():
        assert links["ranks_per_node"] == int(ranks_per_node)
        assert links["local"] > 0
        assert links["network"] > 0
        assert links["latency"] > 0


def test_rows_that_all_want_make_copies_on_each_node(groups):
    found = same_on_all(groups["shared"])
    assert (found["groups"], found["group_size"]) == (2, 2)
    assert found["why"].startswith("groups = 2: least communication")


def test_rows_of_one_rank_alone_make_one_group(groups):
    assert same_on_all(groups["alone"])["groups"] == 1


def test_without_a_batch_and_with_measured_links_there_is_a_choice(groups):
    assert same_on_all(groups["unknown"])["groups"] in (1, 2, 4)


def test_the_rank_with_least_memory_decides(groups):
    # 1,000 rows of 8 numbers and as many of state are 64 kB; a rank with 30 kB holds a quarter and the rows under way
    four, two, one, auto = same_on_all(groups["too_large"])
    assert "groups = 4 needs 64.0 kB of tables" in four
    assert "choose groups 1" in four
    assert "groups = 2 needs 32.0 kB" in two
    assert one["groups"] == 1
    assert one["why"] == "groups = 1: as asked"
    assert auto["groups"] == 1
    assert auto["why"] == "groups = 1: the only one that fits; 2, 4 do not fit into memory"


def test_the_option_of_the_strategy(groups):
    found = same_on_all(groups["trained"])
    assert found["groups"] == 2, "small table, slow network: a copy on each node"
    assert found["steps"] > 0
    message = same_on_all(groups["refused"])
    assert message.startswith("groups = 4 needs ")
    assert re.search(r"more than a rank's memory of [\d.]+ [kMGT]?B: use more ranks", message)


def test_a_run_that_goes_on_with_another_number_says_so(groups):
    """Once, on rank 0."""
    groups["trained"]
    first, *others = groups["taken_up"]
    assert first["others"]["groups"] == 1
    (said,) = first["others"]["said"]
    assert said.startswith("groups = 1, but 2 in the run that is taken up: ")
    assert said.endswith("set groups: 2 for the same bits")
    assert first["others"]["evaluating"] == [], "nothing goes on there"
    assert first["the same"] == {"groups": 2, "said": [], "evaluating": []}
    assert all(found["others"] == {"groups": 1, "said": [], "evaluating": []} for found in others)
