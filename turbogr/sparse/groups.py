"""How many groups: what each choice of M costs in memory and bytes, and the rule behind `groups: auto`.

W ranks are M groups of I = W / M. Ids, rows and gradients stay inside a group; between groups go distinct rows with their
summed gradients (TurboGR, section 4.2.1, which leaves M open). Copies of the tables pay where ranks ask for the same rows,
where a long way is slower than a short one, and where many messages are dear; where every rank has rows of its own, each copy
must still hear of all of them. The rule: of the M that divide W and fit into a rank's memory, the one whose communication
takes the least time on the given links; of equal ones the smaller. The time is a model, not a promise:

    time = bytes to the own node / local bandwidth + bytes to others / network bandwidth + latency x messages

all of it one after the other, though training hides a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from turbogr.errors import ConfigurationError
from turbogr.sparse.exchange import choose_form, exchange_rows
from turbogr.sparse.sharding import Sharding
from turbogr.sparse.table import EmbeddingTable
from turbogr.units import in_bytes

ID_BYTES, ROW_ID_BYTES, SIZES_BYTES, VALUE_BYTES = 8, 4, 16, 4
"""An id inside a group; a row's number between groups, and what goes before them; a number of a row."""


@dataclass(frozen=True)
class Links:
    """What connects ranks.

    Attributes:
        ranks_per_node: ranks that share a node, hence the local links.
        local: bytes a second that a rank sends to ranks of its node.
        network: bytes a second that a rank sends to ranks of other nodes.
        latency: seconds that one message takes beyond its bytes.
    """

    ranks_per_node: int
    local: float = 50e9
    network: float = 12.5e9
    latency: float = 20e-6


@dataclass(frozen=True)
class Tables:
    """What is sharded.

    Attributes:
        rows: table -> its rows.
        dim: D, width of a row.
        row_bytes: bytes of a row with its optimizer's state.
        whole: whether every table lies on one rank of a group as a whole, as in table-wise sharding; else by rows.
    """

    rows: Mapping[str, int]
    dim: int
    row_bytes: int
    whole: bool = False

    def bytes_per_rank(self, group_size: int) -> int:
        """Of the rank of a group that has most."""
        if self.whole:
            spans = {name: range(rows) for name, rows in self.rows.items()}
            sharding = Sharding.table_wise(spans, group_size)
            most = max(sum(len(piece.rows) for piece in sharding.pieces(member)) for member in range(group_size))
            return most * self.row_bytes
        return sum(-(-rows // group_size) for rows in self.rows.values()) * self.row_bytes


def tables_of(table: EmbeddingTable, whole: bool = False) -> Tables:
    """The sizes of all tables, with the state of their optimizer; before an engine has taken its part. `whole`: see Tables."""
    rows = table.num_rows
    state = sum(x.nbytes for x in table.optimizer.buffers() if x.dim() and x.shape[0] == rows)
    return Tables(
        {name: len(span) for name, span in table.spans.items()}, table.dim, (table.weight.nbytes + state) // rows, whole
    )


@dataclass(frozen=True)
class DistinctRows:
    """Distinct rows of all tables that the batches of k ranks ask for in one step, together.

    Attributes:
        counts: k -> mean distinct rows, k = 1 among them.
        most: rows of all tables: no count is larger.
    """

    counts: Mapping[int, float]
    most: int

    def of(self, ranks: int) -> float:
        """Those of `ranks` ranks; beyond the largest count by Heaps' law, c k^b through the two largest counts."""
        if ranks in self.counts:
            return self.counts[ranks]
        known = sorted(self.counts)
        if ranks < known[-1] or len(known) == 1:
            nearest = max(k for k in known if k <= ranks)
            return min(self.counts[nearest] * ranks / nearest, self.most)
        a, b = known[-2:]
        power = log(self.counts[b] / max(self.counts[a], 1)) / log(b / a) if self.counts[b] else 0.0
        return min(self.counts[b] * (ranks / b) ** power, self.most)


def count_rows(ids: Sequence[Tensor], num_rows: int) -> DistinctRows:
    """Counts what the ranks of one step share.

    Args:
        ids: of each rank, int64 [U_r], the distinct rows that its batch looks up.
        num_rows: of all tables.

    Returns:
        The mean over all blocks of k neighbouring ranks, for every k that divides their number.
    """
    ranks = len(ids)
    counts: dict[int, float] = {}
    # One for all blocks, and never read as a whole: a table may have more rows than all batches together by far.
    wanted = torch.zeros(num_rows, dtype=torch.bool)
    for k in (k for k in range(1, ranks + 1) if ranks % k == 0):
        distinct = 0
        for start in range(0, ranks, k):
            block = ids[start : start + k]
            for own in block:
                distinct += len(own) - int(wanted[own].count_nonzero())
                wanted[own] = True
            for own in block:
                wanted[own] = False
        counts[k] = distinct * k / ranks
    return DistinctRows(counts, num_rows)


@dataclass(frozen=True)
class GroupCost:
    """One choice of M. Bytes are those that a rank sends in a step, in the mean.

    Attributes:
        groups: M.
        group_size: I.
        table_bytes: rows and optimizer state of a rank.
        step_bytes: everything else that a rank holds at the peak of a step.
        inside: bytes to ranks of its group: ids, rows and gradients.
        between: bytes to ranks of other groups: numbers of rows and their gradients.
        off_node: of both, bytes to other nodes.
        exchange: form of the exchange between groups that moves fewer bytes: "none", "gather" or "two_phase".
        seconds: of communication, one after the other.
        fits: whether table_bytes + step_bytes fit into a rank's memory.
        memory: bytes that a rank may use; None if that is not known.
    """

    groups: int
    group_size: int
    table_bytes: int
    step_bytes: int
    inside: float
    between: float
    off_node: float
    exchange: str
    seconds: float
    fits: bool
    memory: int | None = None

    @property
    def bytes_per_rank(self) -> int:
        """Of memory."""
        return self.table_bytes + self.step_bytes


def group_costs(
    world_size: int, tables: Tables, rows: DistinctRows, links: Links, step_bytes: int, memory: int | None = None
) -> list[GroupCost]:
    """What every M that divides W costs.

    Args:
        world_size: W.
        tables: what is sharded.
        rows: distinct rows of a step.
        links: between ranks.
        step_bytes: that a rank holds at the peak of a step beside the tables: parameters, activations, batches.
        memory: bytes that a rank may use; None fits everything.

    Returns:
        In the order of M.
    """
    return [
        _cost(groups, world_size // groups, tables, rows, links, step_bytes, memory)
        for groups in range(1, world_size + 1)
        if world_size % groups == 0
    ]


def choose_groups(costs: list[GroupCost]) -> GroupCost:
    """The rule of the module's docstring.

    Args:
        costs: of all M.

    Raises:
        ConfigurationError: if not even one group fits; says by how much.
    """
    fitting = [cost for cost in costs if cost.fits]
    if not fitting:
        refuse(min(costs, key=lambda cost: cost.bytes_per_rank), [])
    return min(fitting, key=lambda cost: (cost.seconds, cost.groups))


def reason(chosen: GroupCost, costs: list[GroupCost]) -> str:
    """Why it was chosen, one sentence."""
    others = [cost for cost in costs if cost is not chosen and cost.fits]
    too_large = [cost.groups for cost in costs if not cost.fits]
    text = f"groups = {chosen.groups}: "
    if others:
        next_best = min(others, key=lambda cost: cost.seconds)
        text += (
            f"least communication, {chosen.seconds * 1e3:.3g} ms a step; next best {next_best.groups} with "
            f"{next_best.seconds * 1e3:.3g} ms"
        )
    else:
        text += "the only one that fits" if too_large else "there is no other"
    return text + (f"; {', '.join(map(str, too_large))} do not fit into memory" if too_large else "")


def refuse(cost: GroupCost, others: list[GroupCost]) -> None:
    """Raises ConfigurationError: this choice does not fit; names the numbers and the choices that do."""
    fitting = [str(other.groups) for other in others if other.fits]
    way_out = (
        f"choose groups {' or '.join(fitting)}"
        if fitting
        else "use more ranks, a smaller dim, or a row optimizer with less state"
    )
    limit = "" if cost.memory is None else f" of {in_bytes(cost.memory)}"
    raise ConfigurationError(
        f"groups = {cost.groups} needs {in_bytes(cost.table_bytes)} of tables and optimizer state on each of a group's "
        f"{cost.group_size} ranks and {in_bytes(cost.step_bytes)} beside them, more than a rank's memory{limit}: {way_out}"
    )


def _cost(
    groups: int, group_size: int, tables: Tables, rows: DistinctRows, links: Links, step_bytes: int, memory: int | None
) -> GroupCost:
    own, width = rows.of(1), VALUE_BYTES * tables.dim
    peer_share = own / group_size * (ID_BYTES + 2 * width)  # to one other rank of the group: ids, rows, gradients
    inside = peer_share * (group_size - 1)
    # A member's part of what its group asks for, and of what all groups ask for.
    asked, united = rows.of(group_size) / group_size, rows.of(groups * group_size) / group_size
    exchange, between = "none", 0.0
    if groups > 1:
        sizes, union = [round(asked)] * groups, round(united)
        form = choose_form(sizes, union)
        exchange = form
        between = exchange_rows(sizes, union)[form] / groups * width + (groups - 1) * (ROW_ID_BYTES * asked + SIZES_BYTES)

    # Ranks of a group follow each other, so a group no larger than a node lies within nodes.
    near_members = min(group_size, links.ranks_per_node) - 1
    far_members = group_size - 1 - near_members
    near_groups = max(links.ranks_per_node // group_size, 1) - 1
    near_groups = min(near_groups, groups - 1)
    far_groups = groups - 1 - near_groups
    off_node = peer_share * far_members + (between * far_groups / (groups - 1) if groups > 1 else 0.0)
    on_node = inside + between - off_node
    messages = 3 * (group_size - 1) + (3 if exchange == "gather" else 4) * (groups - 1)
    seconds = on_node / links.local + off_node / links.network + links.latency * messages

    table_bytes = tables.bytes_per_rank(group_size)
    # Leaf and gradient of the asking rank; rows, gradient and sums of the owner.
    buffers = round(width * (2 * own + 2 * asked + (united if groups > 1 else 0)))
    total = table_bytes + step_bytes + buffers
    return GroupCost(
        groups,
        group_size,
        table_bytes,
        step_bytes + buffers,
        inside,
        between,
        off_node,
        exchange,
        seconds,
        memory is None or total <= memory,
        memory,
    )
