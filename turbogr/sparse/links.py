"""Measures the links between ranks, for `groups: auto`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from statistics import median
from time import perf_counter

import torch
from torch import distributed as dist

from turbogr.sparse.groups import Links

_BYTES = 4 * 2**20
"""What a rank sends at once: enough to be told apart from the latency, little enough to take milliseconds."""
_ROUNDS = 5


def measure_links(ranks_per_node: int, device: torch.device, timeout: timedelta) -> Links:
    """Times all-to-alls inside nodes and between them, both with all ranks at once, as training does.

    Every rank calls it, and gets the same answer: the slowest rank's. Takes a fraction of a second on any sensible link.

    Args:
        ranks_per_node: neighbouring ranks that share a node; must divide the number of ranks.
        device: where tables lie.
        timeout: of each collective.
    """
    world, nodes = dist.get_world_size(), dist.get_world_size() // ranks_per_node
    ranks = torch.arange(world).view(nodes, ranks_per_node)
    inside = _group_of_mine(ranks.tolist(), timeout)
    across = _group_of_mine(ranks.T.tolist(), timeout)
    # In float32: not every back end reduces float64.
    found = torch.tensor([*_speed(inside, device), *_speed(across, device)], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    for group in (inside, across):
        dist.destroy_process_group(group)
    local, local_latency, network, network_latency = found.tolist()
    # Where there is one node, or one rank a node, there is one kind of link.
    local, network = local or network, network or local
    defaults = Links(ranks_per_node)
    return Links(
        ranks_per_node,
        1 / local if local else defaults.local,
        1 / network if network else defaults.network,
        max(local_latency, network_latency) or defaults.latency,
    )


def _group_of_mine(groups: Sequence[list[int]], timeout: timedelta) -> dist.ProcessGroup:
    made = [dist.new_group(ranks, timeout=timeout) for ranks in groups]
    return next(group for group, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks)


def _speed(group: dist.ProcessGroup, device: torch.device) -> tuple[float, float]:
    """Seconds a byte sent, and seconds a message; zeros for a group of one."""
    size = group.size()
    if size == 1:
        return 0.0, 0.0
    latency = _seconds(group, size, device) / (size - 1)
    numbers = _BYTES // 4 // size * size
    seconds = max(_seconds(group, numbers, device) - latency * (size - 1), 1e-9)
    return seconds / (4 * numbers * (size - 1) / size), latency


def _seconds(group: dist.ProcessGroup, numbers: int, device: torch.device) -> float:
    """The median time of an all-to-all of float32 numbers; the first one, which makes connections, does not count."""
    sent = torch.zeros(numbers, device=device)
    received = torch.empty_like(sent)
    times = []
    for _ in range(_ROUNDS + 1):
        dist.barrier(group)
        start = perf_counter()
        dist.all_to_all_single(received, sent, group=group)
        received[:1].item()  # waits for a device
        times.append(perf_counter() - start)
    return median(times[1:])
