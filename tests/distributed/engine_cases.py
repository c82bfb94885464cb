"""What the engine's tests train: batches that every rank knows, one table on all of them, and the engine on a rank's own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from turbogr.sparse.engine import SparseEngine
from turbogr.sparse.optimizers import SGD, AdaGrad, LazyAdam, LazyAdamW, RowOptimizer, RowWiseAdaGrad
from turbogr.sparse.sharding import Sharding
from turbogr.sparse.table import EmbeddingTable, Features, ItemFeature, Lookup, SparseFeature
from turbogr.sparse.topology import HSPTopology

DIM, STEPS = 8, 6
TIMEOUT = timedelta(seconds=30)
OPTIMIZERS = {
    "sgd": lambda: SGD(0.5),
    "adagrad": lambda: AdaGrad(0.1),
    "row_wise_adagrad": lambda: RowWiseAdaGrad(0.1),
    "lazy_adam": lambda: LazyAdam(0.05),
    "lazy_adamw": lambda: LazyAdamW(0.05, weight_decay=0.1),
}
ONE = {"items": 53}
SEVERAL = {"items": 53, "author": 6, "tag": 17}
OF_TAG = torch.arange(53) % 17
_topologies: dict[int, HSPTopology] = {}


def topology(groups: int) -> HSPTopology:
    """One for each number of groups: process groups are dear."""
    if groups not in _topologies:
        _topologies[groups] = HSPTopology.build(groups, timeout=TIMEOUT)
    return _topologies[groups]


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        fault: none, or a deliberate mistake: `exchange` (only group 0's gradients are used), `group_size` (gradients divided
            by I), `unweighted` (ranks with different numbers of samples count alike).
    """

    groups: int
    sharding: str = "row_wise"
    optimizer: str = "lazy_adam"
    several: bool = False
    accumulate: int = 1
    exchange: str = "auto"
    backend: str = "auto"
    lr_scale: float = 1.0
    clip_norm: float | None = None
    fault: str = ""

    @property
    def tables(self) -> dict[str, int]:
        return SEVERAL if self.several else ONE


class Share:
    """A rank's share of a batch: features, and the weights with which its loss sums what they look up."""

    def __init__(self, case: Case, rank: int, step: int) -> None:
        g = torch.Generator().manual_seed(1000 * step + rank)
        # Rank 1 has nothing now and then, and in one step no rank has anything but the first.
        self.tokens = 0 if (rank == 1 and step % 3 == 1) or (rank and step == 3) else 3 + 4 * rank + step
        self.features: dict[str, Tensor | SparseFeature | ItemFeature] = {
            "values": torch.randint(0, 53, (self.tokens,), generator=g),
            "negatives": torch.randint(0, 20, (self.tokens, 4), generator=g),  # many ranks ask for the same rows
        }
        if case.several:
            self.features["author"] = SparseFeature("author", torch.randint(0, 6, (self.tokens, 2), generator=g))
            self.features["tag"] = ItemFeature("tag", OF_TAG)
        self.weights = {
            name: torch.randn(*feature_ids(feature).shape, DIM, generator=g)
            for name, feature in self.features.items()
            if not isinstance(feature, ItemFeature)
        }

    def loss(self, lookup: Lookup) -> Tensor:
        """Sum of the tokens' losses."""
        if "tag" in self.features:
            # Each item with its tag, as a model adds a property to the item.
            items = lookup.rows[: len(lookup.index["tag"])] + lookup["tag"]
            rows = {"values": items[lookup.index["values"]], "negatives": items[lookup.index["negatives"]]}
            rows["author"] = lookup["author"]
        else:
            rows = {name: lookup[name] for name in self.weights}
        return sum(((rows[name] + 0.3).square() * weights).sum() for name, weights in self.weights.items())


def feature_ids(feature: Tensor | SparseFeature | ItemFeature) -> Tensor:
    return feature if isinstance(feature, Tensor) else feature[1]


def table_of(case: Case) -> EmbeddingTable:
    torch.manual_seed(5)
    optimizer: RowOptimizer = OPTIMIZERS[case.optimizer]()
    table = EmbeddingTable(optimizer, init_std=1.0, backend=case.backend)
    table.allocate(case.tables, DIM)
    return table.train()


def shares(case: Case, step: int) -> list[Share]:
    return [Share(case, rank, step) for rank in range(dist.get_world_size())]


def whole(batch: list[Share]) -> Features:
    """The features of all ranks, concatenated."""
    joined = {}
    for name, feature in batch[0].features.items():
        ids = torch.cat([feature_ids(share.features[name]) for share in batch])
        if isinstance(feature, ItemFeature):
            joined[name] = feature
        else:
            joined[name] = SparseFeature(feature.table, ids) if isinstance(feature, SparseFeature) else ids
    return joined


def trained_alone(case: Case) -> dict[str, Tensor]:
    """The state after one process has trained on the concatenated batches."""
    table = table_of(case)
    for step in range(0, STEPS, case.accumulate):
        for micro in range(step, step + case.accumulate):
            batch = shares(case, micro)
            lookup = table(whole(batch))
            joined = Share(case, 0, micro)
            joined.features = whole(batch)
            joined.weights = {name: torch.cat([share.weights[name] for share in batch]) for name in batch[0].weights}
            tokens = sum(share.tokens for share in batch)
            (joined.loss(lookup) / tokens / case.accumulate).backward()
        table.apply_gradients(case.lr_scale, case.clip_norm)
    return table.state_dict()


def engine_of(case: Case) -> SparseEngine:
    table, where = table_of(case), topology(case.groups)
    sharding = Sharding.of_kind(case.sharding, table.spans, DIM, where.group_size)
    return SparseEngine(table, where, sharding, case.exchange)


def fetched(engine: SparseEngine, features: Features):
    """A batch, looked up and current."""
    batch = engine.prepare(features)
    engine.start_ids(batch, engine.receive_counts(batch))
    engine.finish_ids(batch)
    engine.join_unique(batch)
    engine.start_rows(batch)
    engine.finish_rows(batch)
    engine.current(batch)
    return batch


def train(engine: SparseEngine, case: Case) -> None:
    """The same training by all ranks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if case.fault == "exchange":
        engine._updates._exchange = OnlyGroupZero(engine.topology)
    for step in range(0, STEPS, case.accumulate):
        for micro in range(step, step + case.accumulate):
            batch = shares(case, micro)
            share, tokens = batch[rank], sum(s.tokens for s in batch)
            sent = fetched(engine, share.features)
            loss = share.loss(engine.table(share.features)) / max(share.tokens, 1) / case.accumulate
            weight = 1.0 if case.fault == "unweighted" else share.tokens * ranks / tokens
            (loss * weight).backward()
            engine.backward(sent)
        engine.start_exchange(1.0 / ranks / (engine.topology.group_size if case.fault == "group_size" else 1))
        engine.update(case.lr_scale, case.clip_norm)


class OnlyGroupZero:
    """An exchange that keeps the replicas bit-identical, and is wrong."""

    def __init__(self, where: HSPTopology) -> None:
        self.pg = where.replica_pg

    def prepare(self, union, like):
        def exchange(gradient: Tensor) -> Tensor:
            sums = gradient.new_zeros(len(union.ids), gradient.shape[1])
            sums[union.positions[self.pg.rank()]] = gradient
            dist.broadcast(sums, group=self.pg, group_src=0)
            return sums

        return exchange


def differences(case: Case) -> dict[str, object]:
    """Largest relative difference of each tensor from one process, and a digest of this rank's own part."""
    engine = engine_of(case)
    train(engine, case)
    found, expected = engine.full_state(), trained_alone(case)
    engine.close()
    assert found.keys() == expected.keys()
    largest = {name: relative(found[name], expected[name]) for name in expected}
    return {"relative": largest, "digest": digest(engine.local_state()), "member": engine.topology.member}


def relative(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-12))


def digest(state: dict[str, Tensor]) -> str:
    content = b"".join(state[name].contiguous().numpy().tobytes() for name in sorted(state))
    return hashlib.sha256(content).hexdigest()
