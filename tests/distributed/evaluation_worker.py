"""What the ranks of tests/distributed/test_evaluation.py do: sharded evaluation of made-up vectors, against one process."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch import distributed as dist

import turbogr.ops.catalogue_part as catalogue_part
from tests.distributed.launch import report_checks
from tests.distributed.strategy_cases import sync
from tests.ops.largest_tensor import LargestTensor
from turbogr.batch import JaggedBatch
from turbogr.callbacks.predictions import PredictionWriter
from turbogr.callbacks.progress import EpochLines
from turbogr.callbacks.report import Report
from turbogr.callbacks.run_start import ReplaceEarlierRun
from turbogr.callbacks.summary import Summary
from turbogr.callbacks.throughput import Throughput
from turbogr.data.datamodule import SequenceDataModule
from turbogr.metrics import retrieval_metrics
from turbogr.models.retriever import GenerativeRetriever
from turbogr.models.sasrec import SASRec
from turbogr.sparse.catalogue import LocalCatalogue
from turbogr.sparse.sharded_catalogue import ShardedCatalogue

K = 12


class Users(NamedTuple):
    """Users of a batch, with their arguments of a catalogue."""

    queries: Tensor
    targets: Tensor
    seen: Tensor
    seen_offsets: Tensor

    def slice(self, start: int, stop: int) -> Users:
        """Users start to stop."""
        low, high = int(self.seen_offsets[start]), int(self.seen_offsets[stop])
        offsets = self.seen_offsets[start : stop + 1] - low
        return Users(self.queries[start:stop], self.targets[start:stop], self.seen[low:high], offsets)


def problem(seed: int, users: int, items: int, width: int) -> tuple[Tensor, Users]:
    """Vectors, a third of them equal so that scores tie across ranks, and users with seen items (repeats, their own target)."""
    g = torch.Generator().manual_seed(seed)
    vectors = torch.randn(items, width, generator=g) * torch.rand(items, 1, generator=g)
    vectors[torch.randint(items, (items // 3,), generator=g)] = vectors[0].clone()
    lengths = torch.randint(0, 30, (users,), generator=g)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    queries = torch.nn.functional.normalize(torch.randn(users, width, generator=g), dim=1)
    targets = torch.randint(items, (users,), generator=g)
    return vectors, Users(queries, targets, torch.randint(items, (int(offsets[-1]),), generator=g), offsets)


def row_wise(items: int) -> range:
    """This rank's rows, as EmbeddingTable's row-wise sharding has them."""
    block = -(-items // dist.get_world_size())
    return range(min(dist.get_rank() * block, items), min((dist.get_rank() + 1) * block, items))


def table_wise(items: int) -> range:
    """Everything on the last rank."""
    return range(items) if dist.get_rank() == dist.get_world_size() - 1 else range(0)


def uneven(items: int) -> range:
    """Rank 0 has a single item."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    bounds = [0, *(1 + (items - 1) * r // (ranks - 1) for r in range(ranks))]
    return range(bounds[rank], bounds[rank + 1])


def own_users(users: int, kind: str) -> tuple[int, int]:
    """This rank's slice of a batch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if kind == "one":  # all on the last rank
        return (0, users) if rank == ranks - 1 else (0, 0)
    return users * rank // ranks, users * (rank + 1) // ranks


def sharded(vectors: Tensor, rows: range) -> ShardedCatalogue:
    group = dist.group.WORLD
    assert group is not None
    return ShardedCatalogue(vectors[rows.start : rows.stop], rows, len(vectors), group)


def differences(vectors: Tensor, users: Users, rows: range, part: tuple[int, int], k: int = K) -> list[str]:
    """What of a sharded evaluation is not, bit by bit, what one process finds."""
    local, mine = LocalCatalogue(vectors), users.slice(*part)
    catalogue = sharded(vectors, rows)
    wrong = []
    for name, seen in (("filtered", mine[2:]), ("unfiltered", (None, None))):
        everyone = users[2:] if seen[0] is not None else (None, None)
        ranks = local.target_ranks(users.queries, users.targets, *everyone)[slice(*part)]
        if not torch.equal(catalogue.target_ranks(mine.queries, mine.targets, *seen), ranks):
            wrong.append(f"{name} ranks")
        scores, items = local.top_items(users.queries, k, *everyone)
        found_scores, found_items = catalogue.top_items(mine.queries, k, *seen)
        if not torch.equal(found_scores.view(torch.int32), scores[slice(*part)].view(torch.int32)):
            wrong.append(f"{name} scores")
        if not torch.equal(found_items, items[slice(*part)]):
            wrong.append(f"{name} items")
    return wrong


def equal_to_one_process(kind: Callable[[int], range]) -> list[str]:
    wrong = []
    for seed, (users, items, width) in enumerate([(1, 5, 8), (7, 300, 17), (40, 1682, 50), (64, 999, 64), (130, 257, 300)]):
        vectors, batch = problem(seed, users, items, width)
        for part in ("spread", "one"):
            found = differences(vectors, batch, kind(items), own_users(users, part), min(K, items))
            wrong += [f"{users} users ({part}), {items} items: {what}" for what in found]
    return wrong


def without_a_part() -> dict[str, list[str]]:
    """Negative control: what differs if a rank keeps its items to itself."""
    vectors, batch = problem(3, 40, 1682, 50)
    found = {}
    for silent in range(dist.get_world_size()):
        rows = range(0) if dist.get_rank() == silent else row_wise(len(vectors))
        found[f"without rank {silent}"] = differences(vectors, batch, rows, own_users(40, "spread"))
    return found


def damaged() -> dict[str, Any]:
    """A NaN on one rank puts the targets of all ranks' users last, but for those who have seen the item."""
    vectors, batch = problem(4, 12, 300, 8)
    vectors[299] = torch.nan
    own = own_users(12, "spread")
    return {
        "wrong": differences(vectors, batch, row_wise(300), own, 300),
        "ranks": LocalCatalogue(vectors).target_ranks(batch.queries, batch.targets, None, None).tolist(),
    }


def nobody() -> list[list[int]]:
    """No rank has a user."""
    vectors, batch = problem(5, 3, 50, 8)
    none, catalogue = batch.slice(0, 0), sharded(vectors, row_wise(50))
    results = [catalogue.target_ranks(*none), *catalogue.top_items(none.queries, 4, *none[2:])]
    return [list(result.shape) for result in results]


def refused() -> dict[str, Any]:
    """A row that is none, on one rank only: all raise the same, and can go on."""
    vectors, batch = problem(6, 8, 50, 8)
    mine, catalogue = batch.slice(*own_users(8, "spread")), sharded(vectors, row_wise(50))
    said = []
    last = dist.get_rank() == dist.get_world_size() - 1
    wrong = mine._replace(targets=mine.targets + 50 if last else mine.targets)
    strange = mine._replace(seen=torch.full_like(mine.seen, -3) if last else mine.seen)
    for call in (lambda: catalogue.target_ranks(*wrong), lambda: catalogue.top_items(mine.queries, 4, *strange[2:])):
        try:
            call()
        except IndexError as error:
            said.append(str(error))
    return {"said": said, "wrong": differences(vectors, batch, row_wise(50), own_users(8, "spread"))}


class Collectives:
    """Counts calls of torch.distributed while it is entered."""

    names = ("all_gather", "all_reduce", "all_to_all_single", "barrier")

    def __enter__(self) -> list[str]:
        self.calls: list[str] = []
        self.real = {name: getattr(dist, name) for name in self.names}
        for name, function in self.real.items():
            setattr(dist, name, self._counted(name, function))
        return self.calls

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *error: object) -> None:
        for name, function in self.real.items():
            setattr(dist, name, function)


def collectives() -> dict[str, list[str]]:
    """What a batch sends, however its users are spread."""
    found = {}
    for users, part in ((40, "spread"), (40, "one"), (1, "spread")):
        vectors, batch = problem(7, users, 3000, 16)
        mine, catalogue = batch.slice(*own_users(users, part)), sharded(vectors, row_wise(3000))
        with Collectives() as calls:
            catalogue.target_ranks(*mine)
        found[f"ranks {users} {part}"] = list(calls)
        with Collectives() as calls:
            catalogue.top_items(mine.queries, K, *mine[2:])
        found[f"top {users} {part}"] = list(calls)
    return found


def largest_tensor() -> int:
    """Bytes of the largest tensor of an evaluation of 64 users and 60,000 items in chunks of 64 KiB."""
    vectors, batch = problem(8, 64, 60_000, 8)
    mine, catalogue = batch.slice(*own_users(64, "spread")), sharded(vectors, row_wise(60_000))
    before, catalogue_part.CHUNK_BYTES = catalogue_part.CHUNK_BYTES, 2**16
    with LargestTensor(*mine, catalogue.vectors) as largest:
        catalogue.target_ranks(*mine)
        catalogue.top_items(mine.queries, K, *mine[2:])
    catalogue_part.CHUNK_BYTES = before
    return largest.bytes


def metrics() -> dict[str, Any]:
    """Metrics of ranks that are shared out: once evenly, once all on the last rank."""
    ranks = torch.randint(0, 5000, (1000,), generator=torch.Generator().manual_seed(0)) ** 2 // 5000
    alone = retrieval_metrics([1, 10, 200], across_ranks=False)
    alone.update(ranks)
    results = {"one process": alone.compute()}
    for part in ("spread", "one"):
        together = retrieval_metrics([1, 10, 200])
        start, stop = own_users(len(ranks), part)
        for batch in ranks[start:stop].split(100) if start < stop else [ranks[:0]]:
            together.update(batch)
        results[part] = together.compute()
        together.reset()
        together.update(ranks[start:stop])
        results[f"{part}, again"] = together.compute()
    return {name: {key: float(value) for key, value in found.items()} for name, found in results.items()}


# Through the trainer. argv: the prepared folder, the folder for what is written.

ITEMS, SEED = 120, 5


def model() -> GenerativeRetriever:
    """The same on every rank and in every process."""
    torch.manual_seed(SEED)
    return GenerativeRetriever(ITEMS, SASRec(dim=16, num_heads=2, max_length=12), top_k=(1, 10, 50), predict_k=7)


def data(prepared: str | Path, batch_size: int) -> SequenceDataModule:
    return SequenceDataModule(prepared, batch_size, 12, 8, num_workers=0, seed=3)


def trainer(folder: str | Path, strategy: Any, callbacks: list[Callback], **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy=strategy,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )


def groups() -> int:
    return 1 if dist.get_world_size() == 2 else 2


def evaluate(folder: str | Path, prepared: str | Path, strategy: Any, batch_size: int) -> dict[str, Any]:
    """Validation, test with its report, and prediction of an untrained model."""
    module = model()
    runner = trainer(folder, strategy, [Report(), PredictionWriter()])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = {
            "val": runner.validate(module, data(prepared, batch_size), verbose=False)[0],
            "test": runner.test(module, data(prepared, batch_size), verbose=False)[0],
        }
        runner.predict(module, datamodule=data(prepared, batch_size), return_predictions=False)
    return results | {"warnings": [str(warning.message) for warning in said]}


def evaluate_on_ranks() -> dict[str, Any]:
    return evaluate(Path(sys.argv[2]) / "run", sys.argv[1], sync(groups=groups()), 16 // dist.get_world_size())


def train() -> dict[str, Any]:
    """Two epochs with the callbacks that count and print."""
    folder, meter = Path(sys.argv[2]) / "trained", Throughput()
    stale = folder / "stale"
    if dist.get_rank() == 0:
        folder.mkdir()
        stale.touch()
    dist.barrier()
    callbacks = [ReplaceEarlierRun([stale]), Report(), meter, EpochLines(), Summary()]
    runner = trainer(folder, sync(groups=groups()), callbacks, max_epochs=2, log_every_n_steps=3)
    sums: list[int] = []
    real = runner.strategy.reduce

    def reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sums.append(runner.global_step)
        return real(tensor, *args, **kwargs)

    runner.strategy.reduce = reduce
    runner.fit(model(), data(sys.argv[1], 16 // dist.get_world_size()))
    return {
        "tokens": meter.tokens,
        "average": meter.average,
        "sums": sums,
        "steps": runner.global_step,
        "stale": stale.exists(),
    }


class Fails(GenerativeRetriever):
    """Its last rank raises at its second batch."""

    def predict_step(self, batch: JaggedBatch, batch_idx: int) -> tuple[Tensor, Tensor, Tensor]:
        if batch_idx == 1 and dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("out of memory")
        return super().predict_step(batch, batch_idx)


def failing() -> dict[str, Any]:
    """A rank fails in prediction. The process group is of no use afterwards."""
    folder = Path(sys.argv[2]) / "run"
    module = Fails(ITEMS, SASRec(dim=16, num_heads=2, max_length=12), top_k=(1,), predict_k=7)
    runner = trainer(folder, sync(groups=groups()), [PredictionWriter()])
    started = monotonic()
    try:
        runner.predict(module, datamodule=data(sys.argv[1], 4), return_predictions=False)
    except RuntimeError as error:
        dist.destroy_process_group()  # as the end of a process does: the others lose the connection
        own = [path.name for path in folder.iterdir() if f"rank-{os.environ['RANK']}" in path.name]
        return {"error": str(error), "own": own, "seconds": monotonic() - started}
    return {}


if __name__ == "__main__":
    report_checks(
        {
            "row_wise": lambda: equal_to_one_process(row_wise),
            "table_wise": lambda: equal_to_one_process(table_wise),
            "uneven": lambda: equal_to_one_process(uneven),
            "without_a_part": without_a_part,
            "damaged": damaged,
            "nobody": nobody,
            "refused": refused,
            "collectives": collectives,
            "largest_tensor": largest_tensor,
            "metrics": metrics,
            "evaluate": evaluate_on_ranks,
            "train": train,
            "failing": failing,
        }
    )
