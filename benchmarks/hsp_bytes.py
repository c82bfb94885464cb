"""Bytes that a training step moves inside and between nodes: tables sharded over all ranks against hierarchical parallelism.

Three ways to train one table of V rows on K nodes of I ranks, each rank with its own sequences, targets and negatives:

    raw      rows are sharded over all K I ranks; every id is asked for, answered by a row, and gets a gradient back
    unique   the same, but each rank asks for distinct rows only
    HSP      M = K groups of I ranks, each with a full copy: distinct rows travel inside the group as above; between groups go
             the distinct rows that each group touched, with their summed gradients (turbogr/sparse/exchange.py)

An id has 8 bytes inside a group and 4 between groups, a number of a row has 4. What a rank owns itself is not counted. All ids
are drawn and counted; the ranks themselves are not run, but for one small configuration: four gloo ranks train with the real
engine while the collectives are counted, which must agree with the formulas to the byte.

Histories and targets are drawn by the published exposures of KuaiRand-27K's videos, negatives uniformly over the catalogue, as
`turbogr fit` draws them. HSP saves what the ranks of a node ask for more than once. Of raw it needs about V / (ids that a node
draws) while a node draws more ids than there are rows, hence the promise; on larger catalogues few rows are asked for twice,
and nothing is promised.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _popularity import Popularity
from _ranks import run_on_ranks
from _report import Report, parse_arguments
from torch import Tensor

from turbogr.ops.unique import unique_ids
from turbogr.sparse.engine import SparseEngine
from turbogr.sparse.exchange import ExchangeForm, choose_form, exchange_rows
from turbogr.sparse.optimizers import AdaGrad
from turbogr.sparse.sharding import Sharding
from turbogr.sparse.table import EmbeddingTable
from turbogr.sparse.topology import HSPTopology

RANKS_PER_NODE = 8
NODES = (2, 4, 8, 16)
DIM = 256
USERS, LENGTH, NEGATIVES = 15, 2048, 128
"""Of a rank, as in the recipes of the KuaiRand-27K size ladder."""

ID, ROW_ID, SIZES, VALUE = 8, 4, 16, 4
"""Bytes: an id inside a group, a row's number between groups, what a group announces ahead of them, a number of a row."""
MB = 1e6


@dataclass
class Moved:
    """Bytes a step that all ranks send together: to ranks of their node or group, and to others."""

    inside: float = 0.0
    between: float = 0.0


@dataclass(frozen=True)
class Catalogue:
    """The videos exposed at least so often, and what is promised of HSP's bytes between nodes in % of raw."""

    name: str
    exposures: int
    promise: float | None


CATALOGUES = [
    Catalogue("50 exposures or more", 50, 5.0),
    Catalogue("1,000 or more", 1000, 5.0),
    Catalogue("10 or more", 10, None),
    Catalogue("all videos", 1, None),
]


def draw(popularity: Popularity, rank: int) -> Tensor:
    """int64 [N], ids of a rank's batch: histories, targets and negatives."""
    g = torch.Generator().manual_seed(rank)
    sequences = popularity.draw(USERS * (LENGTH + 1), g).view(USERS, LENGTH + 1)
    history, targets = sequences[:, :-1].reshape(-1), sequences[:, 1:].reshape(-1)
    negatives = torch.randint(0, popularity.rows, (USERS * LENGTH * NEGATIVES,), generator=g)
    return torch.cat([history, targets, negatives])


class Sharded:
    """Counts look-ups of tables sharded in blocks over `ranks` ranks, `per_node` on a node (or in a group)."""

    def __init__(self, ranks: int, per_node: int, dim: int) -> None:
        self.ranks, self.per_node, self.row = ranks, per_node, ID + 2 * VALUE * dim
        self.moved = Moved()

    def add(self, rank: int, owners: Tensor) -> None:
        """Counts a rank that asks each of the ranks for `owners[r]` rows."""
        first = rank // self.per_node * self.per_node
        near = int(owners[first : first + self.per_node].sum())
        self.moved.inside += (near - int(owners[rank])) * self.row
        self.moved.between += (int(owners.sum()) - near) * self.row


class Exchange:
    """Counts the exchange between groups: for every member, the rows that each group touched and the union of them."""

    def __init__(self, rows: int, members: int, dim: int, form: ExchangeForm = "auto") -> None:
        self.block = -(-rows // members)
        self.members, self.dim, self.form = members, dim, form
        self.union = torch.zeros(self.block * members, dtype=torch.bool)
        self.sizes: list[list[int]] = [[] for _ in range(members)]

    def add(self, requests: Iterable[Tensor]) -> None:
        """Adds a group by the distinct rows that its ranks ask for."""
        touched = torch.zeros_like(self.union)
        for ids in requests:
            touched[ids] = True
        for sizes, count in zip(self.sizes, touched.view(self.members, -1).sum(1).tolist(), strict=True):
            sizes.append(count)
        self.union |= touched

    def bytes_sent(self) -> float:
        """By all ranks together."""
        total = 0.0
        for sizes, union in zip(self.sizes, self.union.view(self.members, -1).sum(1).tolist(), strict=True):
            groups = len(sizes)
            rows = exchange_rows(sizes, union)[choose_form(sizes, union, self.form)]
            total += rows * VALUE * self.dim + groups * (groups - 1) * (SIZES + ROW_ID * max(sizes))
        return total


Counted = dict[int, dict[str, Moved]]
"""Nodes -> way -> bytes."""


def count(popularity: Popularity, nodes: Sequence[int]) -> Counted:
    """Counts every way on every number of nodes; the ranks of fewer nodes are the first ones of more."""
    most = max(nodes) * RANKS_PER_NODE
    cell = popularity.rows // most  # blocks of all numbers of ranks are made of whole cells
    ways = {k: {way: Sharded(k * RANKS_PER_NODE, RANKS_PER_NODE, DIM) for way in ("raw", "unique")} for k in nodes}
    inside = Sharded(RANKS_PER_NODE, RANKS_PER_NODE, DIM)
    exchange = Exchange(popularity.rows, RANKS_PER_NODE, DIM)
    counted: Counted = {}
    for node in range(max(nodes)):
        requests = []
        for member in range(RANKS_PER_NODE):
            rank = node * RANKS_PER_NODE + member
            ids = draw(popularity, rank)
            requests.append(unique_ids(ids, popularity.rows)[0])
            cells = {
                "raw": torch.bincount(ids // cell, minlength=most),
                "unique": torch.bincount(requests[-1] // cell, minlength=most),
            }
            for k in (k for k in nodes if node < k):
                for way, by_cell in cells.items():
                    ways[k][way].add(rank, by_cell.view(k * RANKS_PER_NODE, -1).sum(1))
            inside.add(member, cells["unique"].view(RANKS_PER_NODE, -1).sum(1))
        exchange.add(requests)
        if node + 1 in nodes:
            counted[node + 1] = {way: sharded.moved for way, sharded in ways[node + 1].items()}
            counted[node + 1]["HSP"] = Moved(inside.moved.inside, exchange.bytes_sent())
    return counted


def report_catalogue(report: Report, catalogue: Catalogue, nodes: Sequence[int], detailed: bool) -> None:
    """Adds a catalogue's rows: with the bytes themselves where `detailed`."""
    popularity = Popularity(catalogue.exposures, multiple=max(nodes) * RANKS_PER_NODE)
    where = f"{catalogue.name} (V = {popularity.rows:,})"
    for k, ways in count(popularity, nodes).items():
        raw = ways["raw"]
        for way in ("unique", "HSP"):
            promise = catalogue.promise if way == "HSP" else None
            share = 100 * ways[way].between / raw.between
            report.add(f"{where}, {k} nodes: {way}, between nodes, of raw", share, "%", baseline=100, at_most=promise)
        if detailed:
            for way, moved in ways.items():
                megabytes = (x / (k * RANKS_PER_NODE) / MB for x in (moved.inside, moved.between))
                for place, value in zip(("inside nodes", "between nodes"), megabytes, strict=True):
                    report.add(f"{where}, {k} nodes: {way}, {place}", value, "MB a rank and step")


class Collectives:
    """Counts what this rank sends through `all_to_all_single` and `all_gather_single`, by the kind of process group."""

    OTHERS = (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "broadcast",
        "gather",
        "isend",
        "reduce_scatter_tensor",
        "scatter",
        "send",
    )

    def __init__(self, topology: HSPTopology) -> None:
        self.kinds = {topology.shard_pg: "inside", topology.replica_pg: "between", topology.meta_pg: "between"}
        self.sent = Moved()

    def __enter__(self) -> Collectives:
        """Begins to count."""
        self._saved = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather_single", *self.OTHERS)}

        def exchange(
            out: Tensor, given: Tensor, counts: Any = None, sent: Any = None, group: Any = None, **options: Any
        ) -> Any:
            # Without sizes, it is the sizes of the ids that are told, which otherwise travel with the strategy's agreement.
            if sent is not None:
                self._add(group, (len(given) - sent[group.rank()]) * (given.nbytes // max(len(given), 1)))
            return self._saved["all_to_all_single"](out, given, counts, sent, group=group, **options)

        def gather(out: Tensor, given: Tensor, group: Any = None, **options: Any) -> Any:
            self._add(group, given.nbytes * (group.size() - 1))
            return self._saved["all_gather_single"](out, given, group=group, **options)

        def unknown(*arguments: Any, **options: Any) -> Any:
            raise RuntimeError("a step uses a collective that is not counted")

        counting = {"all_to_all_single": exchange, "all_gather_single": gather}
        for name in self._saved:
            setattr(dist, name, counting.get(name, unknown))
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends."""
        for name, function in self._saved.items():
            setattr(dist, name, function)

    def _add(self, group: Any, count: int) -> None:
        kind = self.kinds[group]
        setattr(self.sent, kind, getattr(self.sent, kind) + count)


RUN_RANKS, RUN_ROWS, RUN_DIM = 4, 20_000, 16
RUNS: list[tuple[int, ExchangeForm, float]] = [
    (1, "gather", 0.0),
    (2, "gather", 0.0),
    (4, "gather", 0.0),
    (4, "two_phase", 1.0),
]
"""Groups, form, and by how many % the count may differ: the formula of two_phase expects rows spread evenly over its slices."""


def run() -> list[tuple[Tensor, Moved]]:
    """On a rank of four: a step of the real engine for each of RUNS; the batch's distinct rows and the bytes sent."""
    rank = dist.get_rank()
    ids = (torch.rand(3000 + 500 * rank, generator=torch.Generator().manual_seed(rank)) ** 2 * RUN_ROWS).long()
    return [_step(ids, groups, form) for groups, form, _ in RUNS]


def _step(ids: Tensor, groups: int, form: ExchangeForm) -> tuple[Tensor, Moved]:
    table = EmbeddingTable(AdaGrad())
    table.allocate(RUN_ROWS, RUN_DIM)
    topology = HSPTopology.build(groups)
    engine = SparseEngine(table, topology, Sharding.row_wise(table.spans, topology.group_size), form)
    features = {"history": ids}
    with Collectives(topology) as collectives:
        batch = engine.prepare(features)
        engine.start_ids(batch, engine.receive_counts(batch))
        engine.finish_ids(batch)
        engine.join_unique(batch)
        engine.start_rows(batch)
        engine.finish_rows(batch)
        engine.current(batch)
        table(features)["history"].square().sum().backward()
        engine.backward(batch)
        engine.start_exchange(1 / RUN_RANKS)
        engine.update()
    engine.close()
    return batch.request.ids, collectives.sent


def report_run(report: Report) -> None:
    """Adds the rows of the run: by how much the bytes counted differ from the formulas."""
    ranks = run_on_ranks(run, RUN_RANKS)
    for (groups, form, tolerance), found in zip(RUNS, zip(*ranks, strict=True), strict=True):
        formula, counted = expected([ids for ids, _ in found], groups, form), Moved()
        for _, sent in found:
            counted.inside += sent.inside
            counted.between += sent.between
        for place in ("inside", "between"):
            bytes_sent, right = getattr(counted, place), getattr(formula, place)
            difference = 100 * abs(bytes_sent - right) / max(right, 1.0)
            claim = f"run: {RUN_RANKS} ranks, {groups} groups, {form}: bytes {place} off the formula"
            report.add(claim, difference, "%", at_most=tolerance)
            report.note(f"{claim}: {bytes_sent:,.0f} against {right:,.0f}")


def expected(requests: Sequence[Tensor], groups: int, form: ExchangeForm) -> Moved:
    """What ranks in so many groups send that ask for these distinct rows each, by the formulas."""
    members = len(requests) // groups
    inside, exchange = Sharded(members, members, RUN_DIM), Exchange(RUN_ROWS, members, RUN_DIM, form)
    for first in range(0, len(requests), members):
        group = requests[first : first + members]
        for member, ids in enumerate(group):
            inside.add(member, torch.bincount(ids // exchange.block, minlength=members))
        exchange.add(group)
    return Moved(inside.moved.inside, exchange.bytes_sent())


def main() -> int:
    """Entry point."""
    arguments = parse_arguments(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    report = Report("hsp_bytes", arguments.quick)
    nodes = NODES[:2] if arguments.quick else NODES
    for catalogue in CATALOGUES:
        report_catalogue(report, catalogue, nodes, detailed=catalogue is CATALOGUES[0])
    report_run(report)
    report.note(
        f"a node has {RANKS_PER_NODE} ranks and keeps one copy in HSP; a rank draws {USERS} sequences of {LENGTH} tokens with "
        f"{NEGATIVES} negatives, {USERS * LENGTH * (2 + NEGATIVES):,} ids; D = {DIM}"
    )
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
