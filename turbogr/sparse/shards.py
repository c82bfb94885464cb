"""A member's part of a table and of its optimizer's state: cut out, gathered, loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch import distributed as dist

from turbogr.errors import DataError
from turbogr.sparse.row_files import chunked, portion, row_bytes
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
        """The state of the whole table, on the CPU; all members of the group call it together.

        Rows travel portion by portion: who gets the state needs room for it on the CPU, the others for nothing, and no device
        for more than a portion.

        Args:
            to_member: the only member that gets it, the others returning {}; None gives it to all.
        """
        result = {}
        for name, local in local_tensors(self.table).items():
            here = to_member in (None, self.member)
            if name not in self.names:
                whole: Tensor | None = local.to("cpu", copy=True)
            else:
                shape = (self.sharding.num_rows, *local.shape[1:])
                whole = torch.empty(shape, dtype=local.dtype) if here else None
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
        """Brings every member's rows into their places in `whole`, portion by portion."""
        room = local[:0]
        for member in range(self.sharding.members):
            for piece in chunked(self.sharding.pieces(member), row_bytes(local)):
                if member == self.member:
                    rows = portion(local, piece).contiguous()
                else:
                    if len(room) < len(piece.rows):
                        room = local.new_empty(len(piece.rows), *local.shape[1:])
                    rows = room[: len(piece.rows)]
                if to_member is None:
                    dist.broadcast(rows, group=self.group, group_src=member)
                elif member == self.member != to_member:
                    dist.send(rows, group=self.group, group_dst=to_member)
                elif member != self.member == to_member:
                    dist.recv(rows, group=self.group, group_src=member)
                if whole is not None:
                    whole[piece.rows.start : piece.rows.stop] = rows
