"""Step time on four gloo ranks: our sparse engine against TorchRec's ShardedEmbeddingCollection with its fused optimizer.

One table, row-wise over the ranks, row-wise AdaGrad; histories, targets and 128 negatives a token, drawn as KuaiRand-27K's
videos were exposed (negatives uniformly). TorchRec looks up every id and updates in its backward pass (EXACT_ROWWISE_ADAGRAD);
its own removal of duplicates (use_index_dedup) has no CPU kernel. Ours runs as one group of four, which shards just as TorchRec
does, and as two groups of two. All see the same ids from the same weights, and the same sampled softmax turns the looked-up
rows [T, D], [T, D] and [T, R, D] into a loss; the weights must agree after the first steps. Then steps are interleaved in the
same processes, each begun together; a ratio is the median over the rounds. Beside the time on the wall stands the time of all
ranks' processes, which says more where ranks share cores with each other or with neighbours.

Where the time goes is measured in a second run of the same steps, in which the ranks wait for each other after each part (so
that waiting is not charged to the wrong one): the parts' sum may exceed the step.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from _popularity import Popularity
from _ranks import run_on_ranks
from _report import Report, parse_arguments
from _timing import keep_freed_memory
from torch import Tensor

from turbogr.sparse.engine import SparseEngine
from turbogr.sparse.optimizers import RowWiseAdaGrad
from turbogr.sparse.sharding import Sharding
from turbogr.sparse.table import EmbeddingTable
from turbogr.sparse.topology import HSPTopology

RANKS, DIM, NEGATIVES = 4, 64, 128
EXPOSURES = 100
"""The catalogue: videos exposed so often, half a million."""
LEARNING_RATE, EPS, TEMPERATURE = 0.05, 1e-10, 0.05
BATCHES = 4
TOLERANCE = 1e-5

THEIRS, ONE_GROUP, TWO_GROUPS = "TorchRec, row-wise over 4", "ours, 1 group of 4", "ours, 2 groups of 2"

Clock = tuple[float, float]
"""Seconds on the wall and of processes."""

Part = Callable[[str], None]
"""Called at the end of each part of a step, with its name."""


class Side(Protocol):
    """One way to train."""

    def step(self, batch: int, part: Part) -> None:
        """A whole training step on one of the batches."""

    def weight(self) -> Tensor:
        """float [V, D], the whole table; called by all ranks."""


@dataclass(frozen=True)
class Batch:
    """Ids of a rank's batch.

    Attributes:
        history: int64 [T].
        targets: int64 [T].
        negatives: int64 [T, R].
    """

    history: Tensor
    targets: Tensor
    negatives: Tensor


def draw(popularity: Popularity, tokens: int, seed: int) -> Batch:
    """A batch of that many tokens."""
    g = torch.Generator().manual_seed(seed)
    sequence = popularity.draw(tokens + 1, g)
    return Batch(sequence[:-1], sequence[1:], torch.randint(0, popularity.rows, (tokens, NEGATIVES), generator=g))


def head(history: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
    """Mean sampled softmax of [T, D], [T, D], [T, R, D]."""
    positive = (history * targets).sum(1, keepdim=True)
    logits = torch.cat([positive, torch.einsum("td,trd->tr", history, negatives)], 1) / TEMPERATURE
    return -torch.log_softmax(logits, 1)[:, 0].mean()


class Ours:
    """The engine in so many groups."""

    def __init__(self, weight: Tensor, batches: list[Batch], groups: int) -> None:
        self.table = EmbeddingTable(RowWiseAdaGrad(LEARNING_RATE, EPS))
        self.table.allocate(len(weight), DIM)
        self.table.weight.data.copy_(weight)
        topology = HSPTopology.build(groups)
        self.engine = SparseEngine(self.table, topology, Sharding.row_wise(self.table.spans, topology.group_size))
        self.features = [{"history": b.history, "targets": b.targets, "negatives": b.negatives} for b in batches]

    def step(self, batch: int, part: Part) -> None:
        """As in Side."""
        engine = self.engine
        prepared = engine.prepare(self.features[batch])
        part("unique")
        engine.start_ids(prepared, engine.receive_counts(prepared))
        engine.finish_ids(prepared)
        part("ids all-to-all")
        engine.join_unique(prepared)
        part("owner's unique, row ids")
        engine.start_rows(prepared)
        engine.finish_rows(prepared)
        part("rows all-to-all")
        engine.current(prepared)
        lookup = self.table(self.features[batch])
        loss = head(lookup["history"], lookup["targets"], lookup["negatives"])
        part("look-up and loss, forward")
        loss.backward()
        part("look-up and loss, backward")
        engine.backward(prepared)
        part("gradients all-to-all, sum")
        engine.start_exchange(1 / RANKS)
        engine.update()
        part("exchange and update")

    def weight(self) -> Tensor:
        """As in Side."""
        return self.engine.full_state()["weight"]


class TorchRec:
    """TorchRec's own sharded collection, all ranks one group."""

    def __init__(self, weight: Tensor, batches: list[Batch]) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        from torchrec.distributed.types import ShardingEnv

        names = ["history", "targets", "negatives"]
        config = EmbeddingConfig(name="videos", embedding_dim=DIM, num_embeddings=len(weight), feature_names=names)
        device = torch.device("cpu")
        collection = EmbeddingCollection(tables=[config], device=device)
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LEARNING_RATE, "eps": EPS}
        sharder = EmbeddingCollectionSharder(fused_params=fused)
        # On a CPU a kernel must be named: the default one is not the fused one.
        plan = construct_module_sharding_plan(
            collection,
            {"videos": row_wise(compute_kernel="fused")},
            sharder=sharder,
            local_size=RANKS,
            world_size=RANKS,
            device_type="cpu",
        )
        self.sharded = sharder.shard(collection, plan, ShardingEnv.from_process_group(dist.group.WORLD), device)
        self.rows = len(weight)
        first = -(-self.rows // RANKS) * dist.get_rank()
        local = self._local()
        local.copy_(weight[first : first + len(local)])
        self.inputs = [
            KeyedJaggedTensor(
                keys=names,
                values=torch.cat([b.history, b.targets, b.negatives.flatten()]),
                lengths=torch.tensor([b.history.numel(), b.targets.numel(), b.negatives.numel()]),
            )
            for b in batches
        ]

    def step(self, batch: int, part: Part) -> None:
        """As in Side."""
        out = self.sharded(self.inputs[batch])
        found = {name: out[name].values() for name in ("history", "targets", "negatives")}
        part("ids all-to-all, look-up, rows all-to-all")
        loss = head(found["history"], found["targets"], found["negatives"].view(-1, NEGATIVES, DIM))
        part("loss, forward")
        loss.backward()
        part("loss, backward; gradients all-to-all, update")

    def weight(self) -> Tensor:
        """As in Side."""
        local = self._local()
        block = -(-self.rows // RANKS)
        padded = local.new_zeros(block, DIM)
        padded[: len(local)] = local
        whole = local.new_empty(RANKS * block, DIM)
        dist.all_gather_single(whole, padded)
        return whole[: self.rows]

    def _local(self) -> Tensor:
        (table,) = self.sharded.state_dict().values()
        return table.local_shards()[0].tensor.detach()


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    """On every rank, by side: clocks of every round and part, distance of the weights; and what a batch holds."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    keep_freed_memory()
    popularity = Popularity(EXPOSURES)
    batches = [draw(popularity, tokens, RANKS * seed + dist.get_rank()) for seed in range(BATCHES)]
    weight = torch.randn(popularity.rows, DIM, generator=torch.Generator().manual_seed(0)) * 0.02
    sides: dict[str, Side] = {
        THEIRS: TorchRec(weight, batches),
        ONE_GROUP: Ours(weight, batches, 1),
        TWO_GROUPS: Ours(weight, batches, 2),
    }
    for side in sides.values():
        for batch in range(BATCHES):
            side.step(batch, lambda _: None)
    expected = sides[THEIRS].weight()
    change = (expected - weight).abs().max()
    distance = {name: float((side.weight() - expected).abs().max() / change) for name, side in sides.items()}

    steps: dict[str, list[Clock]] = {name: [] for name in sides}
    parts: dict[str, dict[str, list[Clock]]] = {name: {} for name in sides}
    for whole in (True, False):
        for number in range(rounds):
            for name, side in sides.items():
                watch = Watch()
                side.step(number % BATCHES, (lambda _: None) if whole else partial(_note, watch, parts[name]))
                if whole:
                    steps[name].append(watch.lap())
    ids = torch.cat([batches[0].history, batches[0].targets, batches[0].negatives.flatten()])
    counts = {"ids": len(ids), "distinct": len(ids.unique()), "rows": popularity.rows}
    return {"steps": steps, "parts": parts, "distance": distance, **counts}


def _note(watch: Watch, parts: dict[str, list[Clock]], what: str) -> None:
    parts.setdefault(what, []).append(watch.lap())


class Watch:
    """Takes laps of all ranks together."""

    def __init__(self) -> None:
        dist.barrier()
        self._start()

    def lap(self) -> Clock:
        """Since the last one: seconds until the last rank is there, and seconds of this process."""
        spent = time.process_time() - self._process
        dist.barrier()
        wall = time.perf_counter() - self._wall
        self._start()
        return wall, spent

    def _start(self) -> None:
        self._wall, self._process = time.perf_counter(), time.process_time()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=500, help="tokens of a rank's batch (default: 500)")
    arguments = parse_arguments(parser)
    report = Report("hsp_step", arguments.quick)
    rounds = 5 if arguments.quick else 30
    ranks = run_on_ranks(measure, RANKS, arguments.tokens, rounds, timeout_s=900.0)
    for name, distance in ranks[0]["distance"].items():
        if not distance <= TOLERANCE:
            raise SystemExit(f"{name}: the weights differ from TorchRec's by {distance:.1e} of their largest change")
    steps = {name: together([rank["steps"][name] for rank in ranks]) for name in ranks[0]["steps"]}
    for name in (ONE_GROUP, TWO_GROUPS):
        speed, work = (
            statistics.median(a[which] / b[which] for a, b in zip(steps[THEIRS], steps[name], strict=True)) for which in (0, 1)
        )
        report.add(f"{name}: speed over {THEIRS}", speed, "x", baseline=1.0, at_least=1.0)
        report.add(f"{name}: the same by process time", work, "x", baseline=1.0)
    for name, clocks in steps.items():
        report.add(f"{name}: step", milliseconds(clocks, 0), "ms")
        report.add(f"{name}: step, process time of all ranks", milliseconds(clocks, 1), "ms")
    for name, parts in ranks[0]["parts"].items():
        for part in parts:
            clocks = together([rank["parts"][name][part] for rank in ranks])
            report.add(f"{name}: {part}", milliseconds(clocks, 0), "ms")
    found = ranks[0]
    report.note(f"a rank's batch: {found['ids']} ids, {found['distinct']} distinct of {found['rows']} rows, D {DIM}")
    apart = ", ".join(f"{name} {value:.1e}" for name, value in found["distance"].items() if name != THEIRS)
    report.note(f"largest difference of weights from TorchRec's after {BATCHES} steps, over the largest change: {apart}")
    report.note(f"{RANKS} ranks of one thread, {rounds} rounds, torch {torch.__version__}")
    return report.finish(arguments.json)


def together(clocks: Sequence[Sequence[Clock]]) -> list[Clock]:
    """Every lap of all ranks: the longest on the wall, the sum of the processes' times."""
    return [(max(wall for wall, _ in laps), sum(spent for _, spent in laps)) for laps in zip(*clocks, strict=True)]


def milliseconds(clocks: Sequence[Clock], which: int) -> float:
    """Median."""
    return 1e3 * statistics.median(clock[which] for clock in clocks)


if __name__ == "__main__":
    raise SystemExit(main())
