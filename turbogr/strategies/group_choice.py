"""`groups: auto`, and the refusal of tables that do not fit: what the strategy decides before it makes its groups."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from turbogr.sparse.groups import GroupCost, Links, choose_groups, count_rows, group_costs, reason, refuse, tables_of
from turbogr.sparse.links import measure_links
from turbogr.sparse.table import EmbeddingTable

COUNTED_RANKS = 64
"""Ranks whose first batches are compared; what more ranks share is estimated (`DistinctRows`)."""


def memory_of_a_rank(device: torch.device, ranks_per_node: int) -> int:
    """Bytes that a rank may count on: its device's, or its share of the node's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks_per_node


def settle_groups(
    groups: int | None,
    table: EmbeddingTable,
    ids: Tensor | None,
    links: Links | None,
    memory: int,
    beside: int,
    ranks_per_node: int,
    device: torch.device,
    timeout: timedelta,
) -> tuple[GroupCost, str]:
    """Takes the number of groups that was asked for, if it fits, or chooses one. Every rank calls it; all get one answer.

    Args:
        groups: M; None chooses by the rule of `turbogr.sparse.groups`.
        table: before an engine has taken its part.
        ids: int64 [U] on the CPU, distinct rows that this rank's first batch looks up; None if no batch could be had before
            training, and the choice then rests on memory and latency.
        links: as given; None measures them.
        memory: bytes that this rank may use; the least of all ranks counts.
        beside: bytes that are known to be needed beside the tables: dense parameters, gradients and optimizer state.
        ranks_per_node: ranks that share a node.
        device: where tables lie.
        timeout: of each collective.

    Returns:
        What was settled, and why.

    Raises:
        ConfigurationError: the tables do not fit into a rank's memory.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:
        least = torch.tensor(memory, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        memory = int(least)
    if groups is None and world > 1:
        links = measure_links(ranks_per_node, device, timeout) if links is None else links
    rows = count_rows(_of_all_ranks(ids, world, device), table.num_rows)
    costs = group_costs(world, tables_of(table), rows, links or Links(ranks_per_node), beside, memory)
    if groups is not None:
        asked = next(cost for cost in costs if cost.groups == groups)
        if not asked.fits:
            refuse(asked, costs)
        return asked, f"groups = {groups}: as asked"
    chosen = choose_groups(costs)
    return chosen, reason(chosen, costs)


def _of_all_ranks(ids: Tensor | None, world: int, device: torch.device) -> list[Tensor]:
    """The rows of the first ranks, at most COUNTED_RANKS of them, and of a number that divides W."""
    ids = torch.zeros(0, dtype=torch.int64) if ids is None else ids
    if world == 1:
        return [ids]
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(ids)], device=device))
    padded = torch.zeros(max(int(size) for size in sizes), dtype=torch.int64, device=device)
    padded[: len(ids)] = ids.to(device)
    gathered = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(gathered, padded)
    counted = max(k for k in range(1, min(world, COUNTED_RANKS) + 1) if world % k == 0)
    return [part[: int(size)].cpu() for part, size in zip(gathered[:counted], sizes, strict=False)]
