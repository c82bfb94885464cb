"""`groups: auto`, and the refusal of tables that do not fit: what the strategy decides before it makes its groups."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch import distributed as dist

from turbogr.data.datamodule import SequenceDataModule
from turbogr.errors import ConfigurationError
from turbogr.sparse.groups import GroupCost, Links, Tables, choose_groups, count_rows, group_costs, reason, refuse, tables_of
from turbogr.sparse.links import measure_links
from turbogr.sparse.table import EmbeddingTable
from turbogr.sparse.topology import check_groups
from turbogr.units import parse_bytes

COUNTED_RANKS = 64
"""Ranks whose first batches are compared; what more ranks share is estimated (`DistinctRows`)."""

GROUPS_KEY = "turbogr_groups"
"""Key of a checkpoint under which the groups of the run that wrote it stand: {"ranks": W, "groups": M}."""

_CGROUP = Path("/sys/fs/cgroup/memory.max")


def memory_of_a_rank(device: torch.device, ranks_per_node: int) -> int:
    """Bytes that a rank may count on: its device's, or its share of the node's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type != "cpu":
        return int(torch.get_device_module(device).mem_get_info(device)[1])
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _CGROUP.is_file() and (limit := _CGROUP.read_text().strip()).isdigit():
        memory = min(memory, int(limit))  # of a container
    return memory // ranks_per_node


def first_rows(trainer: Trainer, table: EmbeddingTable) -> Tensor | None:
    """Int64 [U], the distinct rows that this rank's first batch will look up.

    None where nothing is trained, or where a batch cannot be had without beginning to load.
    """
    data, module = trainer.datamodule, trainer.lightning_module  # type: ignore[attr-defined]
    if trainer.state.fn != TrainerFn.FITTING or not isinstance(data, SequenceDataModule):
        return None
    loader = data.train_dataloader()
    batch = loader.dataset[next(loader.batches.stream(0))]
    return table.request(module.sparse_features(batch)).ids  # type: ignore[operator]


class Asked(NamedTuple):
    """What the strategy's options say about groups.

    Attributes:
        groups: M; None leaves the choice to the rule.
        memory: bytes that a rank may use; None finds out.
        local: bytes a second to ranks of the own node; None measures.
        network: bytes a second to ranks of other nodes; None measures.
    """

    groups: int | None
    memory: int | None = None
    local: int | None = None
    network: int | None = None

    @classmethod
    def of(
        cls,
        groups: int | Literal["auto"],
        memory_per_rank: str | None,
        local_bandwidth: str | None,
        network_bandwidth: str | None,
    ) -> Asked:
        """From the options, in their own words.

        Raises:
            ConfigurationError: an impossible value.
        """
        if groups != "auto" and (isinstance(groups, bool) or not isinstance(groups, int) or groups < 1):
            raise ConfigurationError(f'TurboGRStrategy: groups must be 1 or more, or "auto"; got {groups!r}')
        sizes = {"memory_per_rank": memory_per_rank, "local_bandwidth": local_bandwidth, "network_bandwidth": network_bandwidth}
        parsed = [None if text is None else parse_bytes(f"TurboGRStrategy: {name}", text) for name, text in sizes.items()]
        return cls(None if groups == "auto" else groups, *parsed)

    def settle(
        self,
        trainer: Trainer,
        table: EmbeddingTable,
        whole: bool,
        device: torch.device,
        num_nodes: int,
        timeout: timedelta,
    ) -> int:
        """The number of groups; says why if it was chosen. Every rank calls it, before tables are sharded.

        Args:
            trainer: about to fit, validate, test or predict.
            table: of its model.
            whole: whether each table lies on one rank as a whole.
            device: where tables will lie.
            num_nodes: over which the ranks are spread evenly.
            timeout: of each collective.

        Raises:
            ConfigurationError: the number does not divide the ranks', or the tables do not fit into a rank's memory.
        """
        world = trainer.world_size
        if self.groups is not None:
            check_groups(self.groups, world)
        ranks_per_node = world // num_nodes
        memory = memory_of_a_rank(device, ranks_per_node) if self.memory is None else self.memory
        links = Links(ranks_per_node, self.local, self.network) if self.local and self.network else None
        # The parameters, their gradients, and two moments of an optimizer such as Adam.
        dense = (x.nbytes for x in trainer.lightning_module.parameters() if x.requires_grad)
        ids = first_rows(trainer, table) if self.groups is None else None
        means = Means(memory, links, ranks_per_node, device, timeout)
        cost, why = settle_groups(self.groups, tables_of(table, whole), ids, 4 * sum(dense), means)
        if self.groups is None:
            rank_zero_info(why)
        return cost.groups

    def compare(self, checkpoint: Mapping[str, Any], world: int, groups: int) -> None:
        """Says so if a run is taken up with another number of groups than it had, though nobody asked for another.

        Lightning gives the checkpoint after the tables have been divided, so what it says cannot decide.

        Args:
            checkpoint: that is taken up.
            world: W.
            groups: M, as settled.
        """
        before = checkpoint.get(GROUPS_KEY)
        if self.groups is None and before is not None and before["ranks"] == world and before["groups"] != groups:
            rank_zero_warn(
                f"groups = {groups}, but {before['groups']} in the run that is taken up: it goes on as it would have, up to "
                f"rounding; set groups: {before['groups']} for the same bits"
            )


class Means(NamedTuple):
    """What there is to train with.

    Attributes:
        memory: bytes that this rank may use; the least of all ranks counts.
        links: as given; None measures them where they matter.
        ranks_per_node: ranks that share a node.
        device: where tables lie.
        timeout: of each collective.
    """

    memory: int
    links: Links | None
    ranks_per_node: int
    device: torch.device
    timeout: timedelta


def settle_groups(groups: int | None, tables: Tables, ids: Tensor | None, beside: int, means: Means) -> tuple[GroupCost, str]:
    """Takes the number of groups that was asked for, if it fits, or chooses one. Every rank calls it; all get one answer.

    Args:
        groups: M, which divides the number of ranks; None chooses by the rule of `turbogr.sparse.groups`.
        tables: of the model.
        ids: int64 [U] on the CPU, distinct rows that this rank's first batch looks up; None if no batch could be had before
            training, and the choice then rests on memory and latency.
        beside: bytes that are known to be needed beside the tables: dense parameters, gradients and optimizer state.
        means: there are.

    Returns:
        What was settled, and why.

    Raises:
        ConfigurationError: the tables do not fit into a rank's memory.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    memory, links = means.memory, means.links
    if world > 1:
        least = torch.tensor(memory, device=means.device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        memory = int(least)
        if groups is None and links is None:
            links = measure_links(means.ranks_per_node, means.device, means.timeout)
    rows = count_rows(_of_all_ranks(ids, world, means.device), sum(tables.rows.values()))
    costs = group_costs(world, tables, rows, links or Links(means.ranks_per_node), beside, memory)
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
