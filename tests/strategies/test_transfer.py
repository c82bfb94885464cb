"""What goes to a device, and that nobody waits for it: training on a simulated device that keeps account of both.

This has run on no CUDA device and no NPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.data.make import write_prepared
from tests.distributed.launch import launch_checks
from turbogr.ops.copies import on_host, to_device
from turbogr.sparse.host_features import HostFeatures
from turbogr.sparse.lane import NoLane, copy_lane
from turbogr.sparse.table import ItemFeature
from turbogr.strategies.transfer import Transfer

FEATURES = {"author": ("item", 17), "tab": ("event", 5), "tag": ("item", 6)}
CPU = torch.device("cpu")
STEPS = 3  # that are looked at
WORKER = "tests.accelerators.simulated_worker"


def launched(folder: Path, ranks: int):
    prepared = write_prepared(folder / "p", num_users=110, num_items=61, max_len=20, seed=1, features=FEATURES)
    return launch_checks(WORKER, ranks, folder / "run", str(prepared), timeout=240.0)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("one"), 1)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launched(tmp_path_factory.mktemp("two"), 2)


def assert_nobody_waits(found: dict) -> None:
    assert found["wait"] == [], "the host waits for the device within a step"
    assert found["race"] == [], "a stream reads what another may not have written yet"
    assert found["reuse"] == [], "memory is written again while another stream may still read it"
    assert len(found["copy"]) >= STEPS
    assert found["difference"] < 1e-5, "it does not train what a CPU trains"


@pytest.mark.parametrize(
    "name",
    ["HSTU, semi_async", "HSTU, sync", "FuXi, semi_async", "SASRec, semi_async", "sums, accumulated, clipped", "toy"],
)
def test_no_step_waits_for_the_device(one, name):
    """With features of events and items, dropout, a validation at the end; from step 5 to step 8, Lightning included."""
    (found,) = one[name]
    assert_nobody_waits(found)


@pytest.mark.parametrize("name", [f"{groups} groups, {mode}" for groups in (1, 2) for mode in ("semi_async", "sync")])
def test_no_step_waits_on_two_ranks(two, name):
    """Rows, gradients and values travel in a stream of their own."""
    for found in two[name]:
        assert_nobody_waits(found)


def test_negatives_on_the_host_are_waited_for_where_the_host_needs_them_and_nowhere_else(one):
    (found,) = one["negatives"]
    assert found["race"] == found["reuse"] == []
    assert found["difference"] < 1e-5
    # Rows on their way to the host and gradients on their way back; and the places of what sharing has put together.
    allowed = ("kept <", "add_gradient <", "whole_gradient <", "on_host < turbogr/models/apart_products.py")
    assert all(any(name in entry for name in allowed) for entry in found["wait"])
    assert any("apart_products.py" in entry and "_sent" in entry for entry in found["copy"]), "segments come without waiting"


def test_batches_and_indices_are_copied_in_streams_of_their_own(one):
    (found,) = one["HSTU, semi_async"]
    assert len(found["streams"]) == 3  # the third is that of the computation: rows of a look-up, and of an update
    batches = [entry for entry in found["copy"] if "strategies/transfer.py" in entry]
    index = [entry for entry in found["copy"] if "engine.py" in entry and "prepare" in entry]
    assert len(batches) % STEPS == len(index) % STEPS == 0
    assert len(index) == STEPS * 6  # values, targets, negatives and three features


def test_control_a_value_that_is_read_is_seen(one):
    (found,) = one["reading"]
    assert len(found["wait"]) == STEPS
    assert all("_local_scalar_dense" in entry and "on_train_batch_end" in entry for entry in found["wait"])


def test_control_memory_that_is_not_pinned_is_waited_for(one):
    (found,) = one["unpinned"]
    assert len(found["wait"]) == STEPS * 2  # ids and values


def test_control_streams_that_do_not_wait_for_each_other_are_seen(one, two):
    assert one["no waiting for copies"][0]["race"]
    assert one["copies that do not wait"][0]["reuse"]
    assert all(found["race"] for found in two["no waiting"])


def test_what_would_change_a_batch_behind_its_ids_is_refused(one):
    assert one["changing"][0].startswith("Changing.on_after_batch_transfer would change a batch whose rows were found on")
    assert one["shorter"][0].startswith("training_step looks up other rows of feature 'ids' than sparse_features")


def test_on_a_cpu_nothing_is_copied():
    tensor, lane = torch.arange(3), copy_lane(CPU)
    assert isinstance(lane, NoLane)
    assert to_device(tensor, CPU) is on_host(tensor) is tensor
    features = {"values": tensor, "author": ItemFeature("author", tensor)}
    assert HostFeatures().of(features) is features
    moved = []
    readable, ticket = Transfer(CPU, lambda host: moved.append(host) or [host]).begin("batch")
    assert moved == ["batch"]  # at once, and once
    assert ticket.wait() is readable
    assert readable == ["batch"]
