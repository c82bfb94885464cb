"""Which member of a group keeps which rows of a table. Arithmetic only: nothing here communicates."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from turbogr.errors import ConfigurationError, MissingDependencyError

ShardingKind = Literal["row_wise", "table_wise", "planner"]
"""`row_wise`: every table in equal blocks of rows; `table_wise`: every table whole on one member; `planner`: for each table one
of the two, as TorchRec's planner decides."""


class Piece:
    """Neighbouring rows that lie on one member.

    Attributes:
        member: which.
        rows: global rows, of one table.
        first: where in the member's weight they begin.
    """

    def __init__(self, member: int, rows: range, first: int) -> None:
        self.member, self.rows, self.first = member, rows, first


class Route:
    """How distinct rows travel to their owners and back: by member, and within a member in ascending order.

    Not a dataclass on purpose: Lightning moves and clones what is one.

    Attributes:
        local: int64 [U], in the order of travel: where each row lies in its owner's weight.
        counts: [I], rows for each member.
        slices: parts of the ascending order, in the order of travel; a single one where the two are the same.
    """

    def __init__(self, local: Tensor, counts: list[int], slices: list[tuple[int, int]]) -> None:
        self.local, self.counts, self.slices = local, counts, slices

    def to_travel(self, values: Tensor) -> Tensor:
        """Values [U, ...] in ascending order, brought into the order of travel; `values` itself where the two are the same."""
        if len(self.slices) == 1:
            return values
        return torch.cat([values[start:stop] for start, stop in self.slices])

    def from_travel(self, values: Tensor) -> Tensor:
        """The way back."""
        if len(self.slices) == 1:
            return values
        parts = values.split([stop - start for start, stop in self.slices])
        return torch.cat([part for _, part in sorted(zip(self.slices, parts, strict=True), key=lambda pair: pair[0])])


class Sharding:
    """The row space, divided among the I members of a group: for every table at most one piece a member, in their order.

    A member's weight holds its pieces in the order of the tables.

    Args:
        spans: table -> its rows in the row space, as in EmbeddingTable.
        edges: table -> I + 1 numbers rising from 0 to the table's rows; member m keeps the table's rows `edges[m]` to
            `edges[m + 1]`.

    Attributes:
        spans: as given.
        edges: as given.
        members: I.

    Raises:
        ValueError: if the edges do not do that.
    """

    def __init__(self, spans: Mapping[str, range], edges: Mapping[str, Sequence[int]]) -> None:
        self.spans, self.edges = dict(spans), {table: list(edges[table]) for table in spans}
        self.members = len(next(iter(self.edges.values()))) - 1
        for table, span in self.spans.items():
            cut = self.edges[table]
            if len(cut) != self.members + 1 or cut[0] != 0 or cut[-1] != len(span) or sorted(cut) != cut:
                raise ValueError(
                    f"Sharding: edges of {table} rise from 0 to {len(span)} in {self.members + 1} numbers; got {cut}"
                )
        by_member = [self._pieces_of(member) for member in range(self.members)]
        self.sizes = [sum(len(piece.rows) for piece in pieces) for pieces in by_member]
        self._travel = [piece for pieces in by_member for piece in pieces]
        self._ascending = sorted(self._travel, key=lambda piece: piece.rows.start)
        self._places = [self._ascending.index(piece) for piece in self._travel]
        self._stops = torch.tensor([piece.rows.stop for piece in self._ascending])
        self._owners = torch.tensor([piece.member for piece in self._ascending])
        self._shifts = torch.tensor([piece.first - piece.rows.start for piece in self._ascending])

    @classmethod
    def row_wise(cls, spans: Mapping[str, range], members: int) -> Sharding:
        """Every table in blocks of ceil(rows / I); of a small table the last members may have nothing."""
        return cls(spans, {table: _blocks(len(span), members) for table, span in spans.items()})

    @classmethod
    def table_wise(cls, spans: Mapping[str, range], members: int, placement: Mapping[str, int] | None = None) -> Sharding:
        """Every table whole on one member.

        Args:
            spans: table -> its rows.
            members: I.
            placement: table -> member; by default the largest table first, each on the member with the fewest rows so far.

        Raises:
            ConfigurationError: if the placement leaves out a table, or names one or a member that does not exist.
        """
        placement = _by_size(spans, members) if placement is None else placement
        if set(placement) != set(spans) or not all(0 <= member < members for member in placement.values()):
            raise ConfigurationError(
                f"table-wise sharding places each of the tables {', '.join(spans)} on a member from 0 to {members - 1}; "
                f"got {dict(placement)}"
            )
        return cls(spans, {table: _whole(len(span), placement[table], members) for table, span in spans.items()})

    @classmethod
    def planned(cls, spans: Mapping[str, range], dim: int, members: int, device_type: str = "cpu") -> Sharding:
        """For every table row-wise or table-wise, as TorchRec's EmbeddingShardingPlanner decides for I ranks of one host.

        The planner is given sizes only, and decides the same on every rank.

        Args:
            spans: table -> its rows.
            dim: D, width of every table.
            members: I.
            device_type: for which the planner estimates, "cpu" or "cuda".

        Raises:
            ConfigurationError: if the width is not a multiple of 4, which TorchRec's kernels demand, or the planner finds no
                plan that fits into memory.
            MissingDependencyError: if torchrec cannot be imported.
        """
        if dim % 4:
            raise ConfigurationError(
                f"sharding planner: TorchRec plans tables whose width is a multiple of 4, and this model's is {dim}: choose "
                "another width, or sharding row_wise or table_wise"
            )
        return cls(spans, _plan(spans, dim, members, device_type))

    @classmethod
    def of_kind(
        cls, kind: ShardingKind, spans: Mapping[str, range], dim: int, members: int, device_type: str = "cpu"
    ) -> Sharding:
        """The sharding that a configuration names; arguments and errors as above.

        Raises:
            ConfigurationError: if the kind is unknown.
        """
        if kind not in get_args(ShardingKind):
            raise ConfigurationError(f"sharding must be one of {', '.join(get_args(ShardingKind))}; got {kind!r}")
        if kind == "planner":
            return cls.planned(spans, dim, members, device_type)
        return cls.row_wise(spans, members) if kind == "row_wise" else cls.table_wise(spans, members)

    @property
    def num_rows(self) -> int:
        """Rows of all tables together."""
        return sum(self.sizes)

    def owned(self, member: int) -> dict[str, range]:
        """Table -> those of its own rows, numbered from 0, that the member keeps; as in EmbeddingTable.owned."""
        return {table: range(cut[member], cut[member + 1]) for table, cut in self.edges.items()}

    def pieces(self, member: int) -> list[Piece]:
        """The member's pieces, none empty, in the order of its weight."""
        return [piece for piece in self._travel if piece.member == member]

    def rows_of(self, member: int) -> Tensor:
        """int64 [owned rows], the global rows that the member keeps, in the order of its weight."""
        parts = [torch.arange(piece.rows.start, piece.rows.stop) for piece in self.pieces(member)]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])

    def owner(self, ids: Tensor) -> Tensor:
        """int64 in the shape of `ids`, the member that keeps each global row.

        Raises:
            IndexError: if a row does not exist.
        """
        return self._owners.to(ids.device)[self._piece(ids)]

    def local(self, ids: Tensor, member: int) -> Tensor:
        """int64 in the shape of `ids`, where each global row stands in the member's weight.

        Raises:
            IndexError: if a row does not exist.
            ValueError: if another member keeps one of them.
        """
        foreign = self.owner(ids) != member
        if foreign.any():
            raise ValueError(f"Sharding: row {int(ids[foreign][0])} is not kept by member {member}")
        return ids + self._shifts.to(ids.device)[self._piece(ids)]

    def rows_at(self, places: Tensor, member: int) -> Tensor:
        """int64 in the shape of `places`, the global row at each place of the member's weight: the way back of `local`."""
        pieces = self.pieces(member)
        starts, shifts = (torch.tensor(x) for x in ([p.first for p in pieces], [p.rows.start - p.first for p in pieces]))
        return places + shifts[torch.searchsorted(starts, places, right=True) - 1] if pieces else places

    def route(self, ids: Tensor) -> Route:
        """How rows travel.

        Args:
            ids: int64 [U], distinct global rows, ascending, all of which exist (EmbeddingTable.request has seen to it).
        """
        # Rows of a piece are neighbours among ascending ids, and so a handful of cuts says everything: nothing is computed
        # for each row but its place, and that by one subtraction.
        cuts = [0, *torch.searchsorted(ids, self._stops.to(ids.device)).tolist()]
        slices = list(pairwise(cuts))
        local, counts, start = torch.empty_like(ids), [0] * self.members, 0
        order: list[tuple[int, int]] = []
        for piece, place in zip(self._travel, self._places, strict=True):
            first, last = slices[place]
            if last > first:
                torch.add(ids[first:last], piece.first - piece.rows.start, out=local[start : start + last - first])
                counts[piece.member] += last - first
                start += last - first
                if order and order[-1][1] == first:
                    order[-1] = (order[-1][0], last)
                else:
                    order.append((first, last))
        return Route(local, counts, order or [(0, 0)])

    def _pieces_of(self, member: int) -> list[Piece]:
        pieces, first = [], 0
        for table, owned in self.owned(member).items():
            if owned:
                start = self.spans[table].start
                pieces.append(Piece(member, range(start + owned.start, start + owned.stop), first))
                first += len(owned)
        return pieces

    def _piece(self, ids: Tensor) -> Tensor:
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= self.num_rows):
            wrong = ids[(ids < 0) | (ids >= self.num_rows)]
            raise IndexError(f"Sharding: row {int(wrong[0])} is outside the rows 0..{self.num_rows - 1}")
        return torch.searchsorted(self._stops.to(ids.device), ids, right=True)


def _blocks(rows: int, members: int) -> list[int]:
    block = -(-rows // members)
    return [min(member * block, rows) for member in range(members + 1)]


def _whole(rows: int, owner: int, members: int) -> list[int]:
    return [0 if member <= owner else rows for member in range(members + 1)]


def _by_size(spans: Mapping[str, range], members: int) -> dict[str, int]:
    load, placement = [0] * members, {}
    for table, span in sorted(spans.items(), key=lambda item: -len(item[1])):
        placement[table] = load.index(min(load))
        load[placement[table]] += len(span)
    return placement


def _plan(spans: Mapping[str, range], dim: int, members: int, device_type: str) -> dict[str, list[int]]:
    try:
        from torchrec import EmbeddingCollection, EmbeddingConfig
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
        from torchrec.distributed.planner.types import PlannerError
    except (ImportError, OSError) as error:
        raise MissingDependencyError(
            f"sharding planner needs torchrec, which cannot be imported ({error}); run `turbogr doctor`, or choose sharding "
            "row_wise or table_wise"
        ) from error
    # TorchRec keeps tables in a ModuleDict, which refuses names of its own methods: `items`, of all names.
    names = {f"table_{table}": table for table in spans}
    tables = [
        EmbeddingConfig(name=name, embedding_dim=dim, num_embeddings=len(spans[table]), feature_names=[name])
        for name, table in names.items()
    ]
    constraints = {
        name: ParameterConstraints(sharding_types=["row_wise", "table_wise"], compute_kernels=["fused"]) for name in names
    }
    module = EmbeddingCollection(tables=tables, device=torch.device("meta"))
    logger = logging.getLogger("torchrec.distributed.planner")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it recommends ways of measuring hardware and models that do not apply here
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            topology = Topology(world_size=members, local_world_size=members, compute_device=device_type)
            planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints, debug=False)
            plan = planner.plan(module, [EmbeddingCollectionSharder()]).plan
    except PlannerError as error:
        gigabytes = sum(len(span) for span in spans.values()) * dim * 4 / 1e9
        raise ConfigurationError(
            f"sharding planner: TorchRec finds no plan for tables of {gigabytes:.1f} GB on {members} ranks: "
            f"{str(error).splitlines()[0].strip()}"
        ) from error
    finally:
        logger.setLevel(level)
    (decisions,) = plan.values()
    edges = {}
    for name, table in names.items():
        shards = sorted(
            (s.shard_offsets[0], s.shard_sizes[0], s.placement.rank()) for s in decisions[name].sharding_spec.shards
        )
        lengths = [0] * members
        for _, length, member in shards:
            lengths[member] = length
        edges[table] = [0, *accumulate(lengths)]
    return edges
