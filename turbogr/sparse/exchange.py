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

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from turbogr.errors import ConfigurationError
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

    On a CPU everything between `start` and `wait` runs beside the caller, in a thread that waits for the first collective,
    adds, and, in two_phase, issues the second collective as soon as the sums are there: both transfers and the sums overlap
    with whatever the caller does meanwhile. Elsewhere only the first collective runs on its own; the rest is queued by `wait`,
    as two threads that queue work of several communicators could do so in different orders on different ranks.

    Memory: the sums [N, D] and what is received, besides the gradient (and its padded copy in `gather`). While an exchange
    runs, the caller must not use `replica_pg` for anything else.

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
        self._running: _Running | None = None

    def start(self, gradient: Tensor, union: RowUnion) -> None:
        """Begins to send; returns at once.

        Args:
            gradient: float [n, D], of this group's rows in the order of its ids; not to be changed before `wait` has returned.
            union: of this update.

        Raises:
            RuntimeError: if the exchange before has not been waited for.
            ValueError: if the gradient has not as many rows as this group has ids in the union.
        """
        if self._running is not None:
            raise RuntimeError("ValueExchange: start was called twice without wait")
        group, groups = self.replica_pg.rank(), self.replica_pg.size()
        if len(union.sizes) != groups or len(gradient) != union.sizes[group]:
            raise ValueError(
                f"ValueExchange: a union of {groups} groups with {len(gradient)} rows of group {group} was expected; "
                f"the union's sizes are {union.sizes}"
            )
        gradient = gradient.detach().contiguous()
        if groups == 1 or len(union.ids) == 0:
            self._running = _Running(lambda: gradient, beside=False)
            return
        begin = _begin_gather if choose_form(union.sizes, len(union.ids), self.form) == "gather" else _begin_two_phase
        self._running = _Running(begin(gradient, union, self.replica_pg), beside=gradient.device.type == "cpu")

    def wait(self) -> Tensor:
        """The sums over the groups, float [N, D] in the order of the union's ids; the same bits on all groups.

        For M = 1, or where no group has a row, the gradient itself.

        Raises:
            RuntimeError: if nothing was started, or a collective failed or timed out.
        """
        if self._running is None:
            raise RuntimeError("ValueExchange: wait was called without start")
        running, self._running = self._running, None
        return running.result()


class _Running:
    """An exchange under way: `finish` runs in a thread of its own (`beside`), or when the result is asked for."""

    def __init__(self, finish: Callable[[], Tensor], beside: bool) -> None:
        self._finish = finish
        self._sums: Tensor | None = None
        self._error: BaseException | None = None
        # A daemon: where a peer has failed, the process must be able to end before the collective's timeout.
        self._thread = threading.Thread(target=self._run, name="turbogr-exchange", daemon=True) if beside else None
        if self._thread is not None:
            self._thread.start()

    def _run(self) -> None:
        try:
            self._sums = self._finish()
        except BaseException as error:  # raised again where the result is asked for
            self._error = error

    def result(self) -> Tensor:
        if self._thread is None:
            return self._finish()
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._sums is not None
        return self._sums


# Both make every tensor before the thread begins: what a thread of its own allocates comes from fresh pages each time.


def _begin_gather(gradient: Tensor, union: RowUnion, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    longest = max(union.sizes)
    gathered = gradient.new_empty(len(union.sizes) * longest, gradient.shape[1])
    sums = gradient.new_empty(len(union.ids), gradient.shape[1])
    work = dist.all_gather_single(gathered, _padded(gradient, longest), group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        parts = [part[:size] for part, size in zip(gathered.split(longest), union.sizes, strict=True)]
        return _sum(parts, union.positions, sums)

    return finish


def _begin_two_phase(gradient: Tensor, union: RowUnion, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    me, groups = group.rank(), group.size()
    sent = [stop - start for start, stop in pairwise(union.cuts[me])]
    mine = [(cuts[me], cuts[me + 1]) for cuts in union.cuts]
    counts = [stop - start for start, stop in mine]
    received, owned, sums = (gradient.new_empty(n, gradient.shape[1]) for n in (sum(counts), union.block, groups * union.block))
    work = dist.all_to_all_single(received, gradient, counts, sent, group=group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        places = [
            positions[start:stop] - me * union.block for positions, (start, stop) in zip(union.positions, mine, strict=True)
        ]
        dist.all_gather_single(sums, _sum(received.split(counts), places, owned), group=group)
        return sums[: len(union.ids)]

    return finish


def _sum(parts: Sequence[Tensor], positions: Sequence[Tensor], out: Tensor) -> Tensor:
    """Adds the groups' rows one group after the other: positions of one group are distinct, so no order is left to chance."""
    out.zero_()
    for part, places in zip(parts, positions, strict=True):
        out.index_add_(0, places.to(out.device), part)
    return out


def _padded(rows: Tensor, length: int) -> Tensor:
    """`rows` with zeros behind, `length` in all; itself if it has as many."""
    if len(rows) == length:
        return rows
    padded = rows.new_zeros(length, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded
