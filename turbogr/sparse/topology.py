"""HSPTopology: W ranks as M groups of I, and the process groups over which each kind of data travels."""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from turbogr.errors import ConfigurationError

TIMEOUT = timedelta(minutes=30)
"""Of every collective, unless another is asked for; PyTorch's own for gloo."""


class ProcessGroups(NamedTuple):
    """The communicators of HSPTopology, of which the attributes tell."""

    ids: dist.ProcessGroup
    shard: dist.ProcessGroup
    replica: dist.ProcessGroup
    meta: dist.ProcessGroup
    host: dist.ProcessGroup


class HSPTopology:
    """Ranks in contiguous groups: rank = group * I + member; the tables are sharded inside a group and copied between groups.

    What may be under way at one time has a communicator of its own, so that nothing queues behind anything else and every
    communicator sees its operations in one order on all ranks. Each carries the timeout.

    Args:
        groups: M.
        mesh: ranks [M, I], named ("replicate", "shard").
        process_groups: the communicators.

    Attributes:
        world_size: W.
        groups: M.
        group_size: I = W / M.
        rank: of this process.
        group: its group.
        member: its place in the group.
        mesh: as given, for what speaks DTensor.
        ids_pg: the ranks of this group on gloo; ids, which are found and sorted on the host, wherever rows lie.
        shard_pg: the same ranks; rows and gradients.
        replica_pg: the same member of all groups; values of the sparse exchange.
        meta_pg: the same ranks on gloo; row ids and sizes. `ids_pg` and `meta_pg` belong to the one thread that uses them.
        host_pg: all ranks on gloo; the strategy's agreement at each step.
    """

    def __init__(self, groups: int, mesh: DeviceMesh, process_groups: ProcessGroups) -> None:
        self.world_size, self.groups, self.rank = dist.get_world_size(), groups, dist.get_rank()
        self.group_size = self.world_size // groups
        self.group, self.member = divmod(self.rank, self.group_size)
        self.mesh = mesh
        self.ids_pg, self.shard_pg, self.replica_pg, self.meta_pg, self.host_pg = process_groups

    @classmethod
    def build(cls, groups: int, device_type: str = "cpu", timeout: timedelta = TIMEOUT) -> HSPTopology:
        """Makes the communicators; every rank calls it, with the same arguments.

        Args:
            groups: M.
            device_type: where the tables lie; `shard_pg` and `replica_pg` are on the default back end of the process group.
            timeout: of each collective. A rank that waits longer for another raises RuntimeError (gloo) or is ended by its
                watchdog (nccl).

        Raises:
            ConfigurationError: if `groups` does not divide the number of ranks.
        """
        world = dist.get_world_size()
        check_groups(groups, world)
        members = world // groups
        ranks = torch.arange(world).view(groups, members)
        # Every rank takes part in making every communicator, its own or not, in one order.
        ids = [dist.new_group(row.tolist(), timeout=timeout, backend="gloo") for row in ranks]
        shard = [dist.new_group(row.tolist(), timeout=timeout) for row in ranks]
        replica = [dist.new_group(column.tolist(), timeout=timeout) for column in ranks.T]
        meta = [dist.new_group(column.tolist(), timeout=timeout, backend="gloo") for column in ranks.T]
        host = dist.new_group(timeout=timeout, backend="gloo")
        group, member = divmod(dist.get_rank(), members)
        mesh = DeviceMesh.from_group(
            [replica[member], shard[group]], device_type, mesh=ranks, mesh_dim_names=("replicate", "shard")
        )
        return cls(groups, mesh, ProcessGroups(ids[group], shard[group], replica[member], meta[member], host))


def check_groups(groups: int, world_size: int) -> None:
    """Refuses a number of groups that W ranks cannot form.

    Raises:
        ConfigurationError: names the numbers that would do.
    """
    if groups < 1 or world_size % groups:
        possible = ", ".join(str(m) for m in range(1, world_size + 1) if world_size % m == 0)
        raise ConfigurationError(
            f"groups must divide the number of ranks: {world_size} ranks can form {possible} groups, not {groups}"
        )
