"""The sparse exchange between groups: which rows each group touched, and the sums of their gradients.

Each of M groups keeps a full copy of the tables and has its own gradient for the rows that its batch touched: `gradient`, float
[n_m, D], of rows `ids`, int64 [n_m]. Before the update every group needs the sum over the groups for every row that any of them
touched, N rows in all (TurboGR, §4.2.1). Row ids need no gradient, so they go steps ahead (`union_of_rows`); with every group's
ids known, values travel bare, in one of two forms (`ValueExchange`):

    gather      every group sends its rows, padded to the longest, to all others, and each adds them all up
    two_phase   the union is cut into M equal slices, slice m owned by group m; every group sends each owner the rows that lie
                in its slice, the owner adds them up and sends the sums to all others: reduce-scatter and all-gather by row

Rows sent by all groups together, with n the longest n_m (`exchange_rows`):

    gather      M (M - 1) n
    two_phase   (M - 1) / M * sum(n_m)  +  M (M - 1) ceil(N / M)

times D times the bytes of a value. Two groups that touch different rows are best off with `gather`; the more groups share a
row, or the more unequal they are, the more `two_phase` saves. In both forms groups are added in the order of their numbers,
starting from zero, by single additions: all groups hold the same bits, and so do both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from turbogr.errors import ConfigurationError
from turbogr.ops.copies import to_device
from turbogr.ops.unique import NARROW, unique_ids

ExchangeForm = Literal["auto", "gather", "two_phase"]
Chosen = Literal["gather", "two_phase"]


class RowUnion:
    """The rows that any group touched, and where each group's own stand among them; equal on all groups.

    Not a dataclass on purpose: Lightning moves and clones what is one.

    Args:
        ids: int64 [N], distinct, ascending.
        positions: for every group, int64 [n_m], ascending: where in `ids` its own ids stand, in their order.

    Attributes:
        sizes: n_m of every group.
        block: rows of a slice of the union, ceil(N / M); the last slices may have fewer or none.
        cuts: for every group, M + 1 numbers: its rows `cuts[k]` to `cuts[k + 1]` lie in slice k.
    """

    def __init__(self, ids: Tensor, positions: list[Tensor]) -> None:
        self.ids, self.positions = ids, positions
        self.sizes = [len(places) for places in positions]
        groups = len(positions)
        self.block = -(-len(ids) // groups)
        edges = torch.arange(groups + 1) * self.block
        self.cuts: list[list[int]] = [torch.searchsorted(places, edges).tolist() for places in positions]


def union_of_rows(ids: Tensor, meta_pg: dist.ProcessGroup) -> RowUnion:
    """Tells all groups which rows this one touched; blocks, so it is for the thread that owns `meta_pg`.

    Sends two numbers, and then the ids padded to the longest group's, as int32 unless some group has a row of 2^31 or more.

    Args:
        ids: int64 [n] on the CPU, distinct, ascending, rows of the table's row space or of this member's part of it, counted in
            the same way on all groups.
        meta_pg: same member of all M groups, on gloo.

    Returns:
        The union, equal on all groups. For M = 1 nothing is sent.
    """
    groups = meta_pg.size()
    if groups == 1:
        return RowUnion(ids, [torch.arange(len(ids))])
    bound = int(ids[-1]) + 1 if len(ids) else 0
    found = torch.empty(groups * 2, dtype=torch.int64)
    dist.all_gather_single(found, torch.tensor([len(ids), bound]), group=meta_pg)
    sizes, bounds = found.view(groups, 2).T.tolist()
    longest = max(sizes)
    if longest == 0:
        return RowUnion(ids, [ids] * groups)
    narrow = torch.int32 if max(bounds) <= NARROW else torch.int64
    gathered = torch.empty(groups * longest, dtype=narrow)
    dist.all_gather_single(gathered, _padded(ids.to(narrow), longest), group=meta_pg)
    parts = [part[:size] for part, size in zip(gathered.view(groups, longest), sizes, strict=True)]
    union, places = unique_ids(torch.cat(parts), max(bounds))
    return RowUnion(union, list(places.split(sizes)))


def exchange_rows(sizes: Sequence[int], union: int) -> dict[Chosen, float]:
    """Rows sent by all groups together in either form, by the formulas of the module's docstring.

    Those of two_phase's first half are what is expected of ids spread evenly over the union: sizes alone are known before the
    union's cuts are.

    Args:
        sizes: n_m, rows that each group touched.
        union: N, rows that any group touched.
    """
    groups = len(sizes)
    return {
        "gather": float(groups * (groups - 1) * max(sizes)),
        "two_phase": (groups - 1) / groups * sum(sizes) + groups * (groups - 1) * -(-union // groups),
    }


def choose_form(sizes: Sequence[int], union: int, form: ExchangeForm = "auto") -> Chosen:
    """The form to be used: `form` itself, or for `auto` the one that sends fewer rows; the same on all groups."""
    if form != "auto":
        return form
    rows = exchange_rows(sizes, union)
    return "two_phase" if rows["two_phase"] < rows["gather"] else "gather"


class ValueExchange:
    """Sums one update's gradients over the groups.

    Memory: the sums [N, D] and what is received, besides the gradient (and its padded copy in `gather`).

    Args:
        replica_pg: same member of all M groups.
        form: `gather`, `two_phase`, or `auto` for the one that sends fewer bytes, chosen for each update from the sizes alone.

    Raises:
        ConfigurationError: if `form` is unknown.
    """

    def __init__(self, replica_pg: dist.ProcessGroup, form: ExchangeForm = "auto") -> None:
        if form not in get_args(ExchangeForm):
            raise ConfigurationError(f"exchange must be one of {', '.join(get_args(ExchangeForm))}; got {form!r}")
        self.replica_pg, self.form = replica_pg, form

    def prepare(self, union: RowUnion, like: Tensor) -> Callable[[Tensor], Tensor]:
        """Makes room for an exchange; nothing is sent yet.

        Room is made here and not where the exchange runs: what a thread of its own allocates comes from fresh pages each time.

        Args:
            union: of this update.
            like: float [?, D], of the gradient's width, type and device.

        Returns:
            A function that exchanges and waits. It takes the gradient, float [n, D], of this group's rows in the order of its
            ids, and gives the sums over the groups, float [N, D] in the order of the union's ids, the same bits on all groups.
            For M = 1, or where no group has a row, the gradient itself. It raises RuntimeError if a collective fails.

        Raises:
            ValueError: if the union is of another number of groups.
        """
        groups = self.replica_pg.size()
        if len(union.sizes) != groups:
            raise ValueError(f"ValueExchange: a union of {groups} groups was expected, the union's sizes are {union.sizes}")
        if groups == 1 or len(union.ids) == 0:
            return lambda gradient: gradient
        prepare = _gather if choose_form(union.sizes, len(union.ids), self.form) == "gather" else _two_phase
        return prepare(union, like, self.replica_pg)


def _gather(union: RowUnion, like: Tensor, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    longest, width = max(union.sizes), like.shape[1]
    gathered, sums = (like.new_empty(n, width) for n in (len(union.sizes) * longest, len(union.ids)))

    def exchange(gradient: Tensor) -> Tensor:
        _check(gradient, union, group)
        dist.all_gather_single(gathered, _padded(gradient.contiguous(), longest), group=group)
        parts = [part[:size] for part, size in zip(gathered.split(longest), union.sizes, strict=True)]
        return _sum(parts, union.positions, sums)

    return exchange


def _two_phase(union: RowUnion, like: Tensor, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    me, groups = group.rank(), group.size()
    sent = [stop - start for start, stop in pairwise(union.cuts[me])]
    mine = [(cuts[me], cuts[me + 1]) for cuts in union.cuts]
    counts = [stop - start for start, stop in mine]
    sizes = (sum(counts), union.block, groups * union.block)
    received, owned, sums = (like.new_empty(n, like.shape[1]) for n in sizes)

    def exchange(gradient: Tensor) -> Tensor:
        _check(gradient, union, group)
        dist.all_to_all_single(received, gradient.contiguous(), counts, sent, group=group)
        places = [
            positions[start:stop] - me * union.block for positions, (start, stop) in zip(union.positions, mine, strict=True)
        ]
        dist.all_gather_single(sums, _sum(received.split(counts), places, owned), group=group)
        return sums[: len(union.ids)]

    return exchange


def _check(gradient: Tensor, union: RowUnion, group: dist.ProcessGroup) -> None:
    rows = union.sizes[group.rank()]
    if len(gradient) != rows:
        raise ValueError(f"ValueExchange: this group has {rows} rows in the union, the gradient has {len(gradient)}")


def _sum(parts: Sequence[Tensor], positions: Sequence[Tensor], out: Tensor) -> Tensor:
    """Adds the groups' rows one group after the other: positions of one group are distinct, so no order is left to chance."""
    out.zero_()
    for part, places in zip(parts, positions, strict=True):
        out.index_add_(0, to_device(places, out.device), part)
    return out


def _padded(rows: Tensor, length: int) -> Tensor:
    """`rows` with zeros behind, `length` in all; itself if it has as many."""
    if len(rows) == length:
        return rows
    padded = rows.new_zeros(length, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded
