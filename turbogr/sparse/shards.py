"""A member's part of a table and of its optimizer's state: cut out, gathered, loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist

from turbogr.errors import DataError
from turbogr.sparse.sharding import Sharding
from turbogr.sparse.table import EmbeddingTable


def is_sharded(tensor: Tensor, rows: int) -> bool:
    """Whether a tensor of the table's state has a row for each of the table's `rows`; what has not is the same everywhere."""
    return tensor.dim() > 0 and len(tensor) == rows


def part_of(full: Tensor, sharding: Sharding, member: int) -> Tensor:
    """The member's rows of a tensor that has all rows, in the order of its weight; always a copy."""
    parts = [full[piece.rows.start : piece.rows.stop] for piece in sharding.pieces(member)]
    return torch.cat([full[:0], *parts])


def keep_part(table: EmbeddingTable, sharding: Sharding, member: int) -> None:
    """Replaces a whole table's weight and row state by the member's part; makes no more than that of a deferred table."""
    rows = table.num_rows
    table.owned = sharding.owned(member)
    if table.initial is not None:
        table.make_rows(piece.rows for piece in sharding.pieces(member))
        return
    table.weight = nn.Parameter(part_of(table.weight.detach(), sharding, member), requires_grad=False)
    for name, buffer in list(table.named_buffers()):
        if is_sharded(buffer, rows):
            owner, _, attribute = name.rpartition(".")
            setattr(table.get_submodule(owner), attribute, part_of(buffer, sharding, member))


def local_tensors(table: EmbeddingTable) -> dict[str, Tensor]:
    """The table's state as it lies here, under the keys of its `state_dict`; not copied."""
    return {name: tensor.detach() for name, tensor in table.state_dict(keep_vars=True).items()}


class ShardedState:
    """The state of a table that lies in parts on the members of a group.

    Args:
        table: this member's part.
        sharding: who has what.
        member: which this is.
        group: the members' process group.
        names: keys of the tensors that are sharded by rows; the others are the same on every member.
    """

    def __init__(
        self, table: EmbeddingTable, sharding: Sharding, member: int, group: dist.ProcessGroup, names: frozenset[str]
    ) -> None:
        self.table, self.sharding, self.member, self.group, self.names = table, sharding, member, group, names

    def gathered(self, to_member: int | None = None) -> dict[str, Tensor]:
        """The state of the whole table, on the CPU or device where the table lies; all members of the group call it together.

        Args:
            to_member: the only member that gets it, the others returning {}; None gives it to all. One tensor after the other
                is put together in place: beyond the result nothing of the table's size is needed.
        """
        result = {}
        for name, local in local_tensors(self.table).items():
            here = to_member in (None, self.member)
            if name not in self.names:
                whole: Tensor | None = local.clone()
            else:
                whole = local.new_empty(self.sharding.num_rows, *local.shape[1:]) if here else None
                self._gather(local, whole, to_member)
            if here and whole is not None:
                result[name] = whole
        return result

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes this member's part of a whole table's state; no communication.

        Raises:
            DataError: if keys or shapes are not those of this table; nothing is changed then.
        """
        local = local_tensors(self.table)
        if set(state) != set(local):
            raise DataError(
                f"the checkpoint's table has {', '.join(sorted(state))}, this one has {', '.join(sorted(local))}: was it "
                "trained with another row optimizer?"
            )
        for name, tensor in local.items():
            shape = (self.sharding.num_rows, *tensor.shape[1:]) if name in self.names else tuple(tensor.shape)
            if tuple(state[name].shape) != shape:
                raise DataError(
                    f"the checkpoint's {name} has the shape {list(state[name].shape)}, this table's has {list(shape)}: was it "
                    "trained on another catalogue or with another width?"
                )
        for name, tensor in local.items():
            part = part_of(state[name], self.sharding, self.member) if name in self.names else state[name]
            tensor.copy_(part)

    def _gather(self, local: Tensor, whole: Tensor | None, to_member: int | None) -> None:
        """Brings every member's pieces into their places in `whole`, one transfer a piece."""
        for piece in (piece for member in range(self.sharding.members) for piece in self.sharding.pieces(member)):
            into = local[:0] if whole is None else whole[piece.rows.start : piece.rows.stop]
            if piece.member == self.member:
                mine = local[piece.first : piece.first + len(piece.rows)]
                if whole is not None:
                    into.copy_(mine)
                else:
                    dist.send(mine, group=self.group, group_dst=to_member)
            elif to_member == self.member:
                dist.recv(into, group=self.group, group_src=piece.member)
            if to_member is None:
                dist.broadcast(into, group=self.group, group_src=piece.member)
