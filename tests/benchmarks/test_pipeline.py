"""The link of pipeline.py: its model by hand, and what comes through it on two ranks; no time decides but a lower bound."""

import itertools
import math
import subprocess

import _namespaces
import pytest
import torch
from _link import BACKEND, Card, LinkGroup, Speed, open_link, traffic
from _ranks import run_on_ranks
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SPEED = Speed(bandwidth=1e6, latency=0.01)


def test_a_card_is_serial_and_latency_does_not_occupy_it():
    card = Card(Speed(bandwidth=100.0, latency=0.5))
    assert card.book(100, now=10.0) == (10.0, 11.5)
    assert card.book(50, now=10.2) == (11.0, 12.0)  # waits for the first one's bytes, not for its latency
    assert card.book(0, now=11.6) == (11.6, 12.1)
    assert card.book(200, now=20.0) == (20.0, 22.5)


def test_results_arrive_in_the_order_of_booking():
    card = Card(Speed(bandwidth=10.0, latency=0.1))
    sizes = [70, 0, 5, 1, 30, 0, 2]
    arrivals = [card.book(nbytes, now=0.01 * index)[1] for index, nbytes in enumerate(sizes)]
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(sum(sizes) / 10.0 + 0.1)


def test_without_bandwidth_nothing_is_kept_back():
    card = Card(Speed(latency=1.0))
    assert card.book(10**12, now=3.0) == (3.0, 3.0)


def test_bytes_of_collectives():
    x, out = torch.zeros(6, 2), torch.zeros(4, 2)
    # Of six rows sent, this rank keeps two; of four received, one is its own.
    assert traffic("all_to_all_single", (out, x, [1, 3], [2, 4]), ranks=2, rank=0) == 4 * 8
    assert traffic("all_to_all_single", (x, x, [], []), ranks=3, rank=1) == pytest.approx(4 * 8)
    assert traffic("all_to_all_single", (out[:0], x[:0], [0, 0], [0, 0]), ranks=2, rank=1) == 0
    assert traffic("all_gather_single", (x, x[:2]), ranks=3, rank=0) == 2 * 16
    assert traffic("allgather", ([[x, x]], [x]), ranks=2, rank=0) == 48
    assert traffic("allreduce", ([x],), ranks=4, rank=0) == pytest.approx(2 * 3 / 4 * 48)
    assert traffic("broadcast", ([x],), ranks=4, rank=3) == 48
    assert traffic("barrier", (), ranks=4, rank=0) == 0
    with pytest.raises(NotImplementedError, match="scatter"):
        traffic("scatter", ([x],), ranks=2, rank=0)


def over_link(rank: int) -> str:
    open_link(SPEED)
    return BACKEND


def through_the_link() -> dict[str, object]:
    """What two ranks get through the link, and what its record says."""
    world, rank = dist.group.WORLD, dist.get_rank()
    assert isinstance(world, LinkGroup)
    world.link.record()
    sent = torch.arange(3.0) + 10 * rank
    received = torch.empty(2 if rank == 0 else 4)
    counts = ([1, 1], [1, 2]) if rank == 0 else ([2, 2], [1, 2])
    exchange = dist.all_to_all_single(received, sent, *counts, async_op=True)
    gathered = torch.empty(4000)
    # Another communicator, which asks for gloo: it has the same card, and waits behind the exchange.
    other = dist.new_group(backend="gloo")
    gathering = dist.all_gather_single(gathered, torch.full((2000,), float(rank)), group=other, async_op=True)
    gathering.wait()
    exchange.wait()
    total = torch.ones(1000)
    dist.all_reduce(total)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(50, 50))
    model(torch.full((1, 50), rank + 1.0)).sum().backward()
    gradient = model.module.weight.grad
    assert gradient is not None
    moved, waits = world.link.recorded()
    return {
        "exchanged": received.tolist(),
        "gathered": [float(gathered[0]), float(gathered[-1])],
        "total": float(total[0]),
        "gradient": float(gradient[0, 0]),
        "backend": dist.get_backend(other),
        "moved": moved,
        "waits": [span.name for span in waits],
    }


def test_two_ranks_behind_a_link():
    ranks = run_on_ranks(through_the_link, 2, timeout_s=120.0, prepare=over_link)
    assert [rank["exchanged"] for rank in ranks] == [[0.0, 10.0], [1.0, 2.0, 11.0, 12.0]]
    for rank in ranks:
        assert rank["gathered"] == [0.0, 1.0]
        assert (rank["total"], rank["gradient"], rank["backend"]) == (2.0, 1.5, BACKEND)
        moved = rank["moved"]
        assert {("all_gather_single", 8000.0), ("allreduce", 4000.0)} < {(one.name, one.nbytes) for one in moved}
        reduced = moved[-1]
        assert (reduced.name, reduced.nbytes) == ("allreduce", (50 * 50 + 50) * 4)
        for one in moved:
            assert one.begun <= one.start
            assert one.end - one.start >= one.nbytes / SPEED.bandwidth + SPEED.latency
        for first, second in itertools.pairwise(moved):
            assert second.start >= first.start + first.nbytes / SPEED.bandwidth
            assert second.end >= first.end
        # The last one is DDP's own, in C++, behind the backward pass.
        assert rank["waits"][:3] == ["wait for all_gather_single", "wait for all_to_all_single", "wait for allreduce"]
        assert rank["waits"][-1] == "wait for allreduce"


def test_a_shaped_link_needs_iproute2(monkeypatch):
    monkeypatch.setattr(_namespaces.shutil, "which", lambda tool: None)
    with (
        pytest.raises(SystemExit, match=r"--link real needs ip and tc \(iproute2\)"),
        _namespaces.shaped_network("test", 2, 1e6),
    ):
        pass


def test_a_refused_command_is_named(monkeypatch):
    monkeypatch.setattr(_namespaces.shutil, "which", lambda tool: tool)
    refused = subprocess.CompletedProcess("ip", 1, stdout="", stderr="not permitted")
    monkeypatch.setattr(_namespaces.subprocess, "run", lambda *arguments, **options: refused)
    with (
        pytest.raises(SystemExit, match=r"'ip netns add testhub' failed \(not permitted\).*administrator.*simulated link"),
        _namespaces.shaped_network("test", 2, 1e6),
    ):
        pass


def test_sides_must_agree_before_they_are_compared():
    pytest.importorskip("torchrec")
    from pipeline import LATE, SEMI, SYNC, check

    check({SYNC: 0.0, SEMI: 1e-5, LATE: 0.3})
    for wrong in (0.1, math.nan):
        with pytest.raises(SystemExit, match=f"{SYNC}: the weights differ"):
            check({SYNC: wrong, SEMI: 0.0, LATE: 0.3})
    with pytest.raises(SystemExit, match="changes nothing"):
        check({SYNC: 0.0, SEMI: 0.0, LATE: 0.0})
