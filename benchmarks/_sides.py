"""The sides of pipeline.py: one model and one stream of batches, trained in ways that differ in what waits for what.

All look up a batch's distinct rows once, from a table that is sharded row-wise, and turn them into the same loss by the same
code; dense parameters are copied, their gradients averaged. TorchRec is handed the distinct ids ready-made (its own removal of
duplicates has no CPU kernel, and without one it would send every id's row); ours finds them within the step. TorchRec's sides
are in `_torchrec.py`.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from _batches import Lengths, real_batches, synthetic_batches
from torch import Tensor, nn
from torch.utils.data import DataLoader

from turbogr.batch import JaggedBatch
from turbogr.losses import SampledSoftmax
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever, published_adamw
from turbogr.models.tokens import NEGATIVES, TARGETS, VALUES
from turbogr.ops.embedding_lookup import jagged_embedding_lookup
from turbogr.ops.normalise import normalised
from turbogr.sparse.engine import SparseEngine
from turbogr.sparse.optimizers import RowWiseAdaGrad
from turbogr.sparse.sharding import Sharding
from turbogr.sparse.table import EmbeddingTable
from turbogr.sparse.topology import HSPTopology
from turbogr.sparse.transport import SparseBatch
from turbogr.strategies.turbogr import TurboGRStrategy
from turbogr.tracing import Span, Trace

LEARNING_RATE, EPS = 0.05, 1e-10
"""Of the rows' AdaGrad, one accumulator a row."""

BUCKET_MB = 0.25
"""Of dense gradients, for DDP on either side: the last bucket is reduced behind the backward pass, where nothing hides it, and
with DDP's own 25 MB it would hold nearly all of so small a model."""


@dataclass(frozen=True)
class Shape:
    """Of the model and its batches.

    Attributes:
        lengths: of histories, and the catalogue's size; of synthetic batches.
        users: histories of a rank's batch.
        max_length: of a history.
        negatives: drawn for each token.
        dim: D.
        blocks: of HSTU.
        heads: of each.
        data: folder of prepared data; None draws synthetic batches.
    """

    lengths: Lengths
    users: int
    max_length: int
    negatives: int
    dim: int
    blocks: int
    heads: int
    data: Any = None


def make_batches(shape: Shape, count: int, rank: int, ranks: int) -> tuple[list[JaggedBatch], int]:
    """This rank's batches, and the size of the catalogue.

    Synthetic ones have the same lengths on all ranks, batch by batch, and ids of their own, so that ranks have equal work.
    """
    if shape.data is not None:
        batches, items = real_batches(shape.data, shape.users, shape.max_length, count * ranks)
        return [replace(b, negatives=b.negatives[:, : shape.negatives]) for b in batches[rank::ranks]], items  # type: ignore[index]
    batches, items = synthetic_batches(shape.lengths, shape.users, shape.max_length, count)
    g = torch.Generator().manual_seed(rank)
    return [_own_ids(batch, shape, g) for batch in batches], items


def _own_ids(batch: JaggedBatch, shape: Shape, g: torch.Generator) -> JaggedBatch:
    tokens, items = batch.num_tokens, shape.lengths.num_items
    popular = (torch.rand(2, tokens, generator=g) ** 2 * items).long()
    negatives = torch.randint(0, items, (tokens, shape.negatives), generator=g)
    return replace(batch, values=popular[0], targets=popular[1], negatives=negatives)


def make_model(shape: Shape, items: int) -> GenerativeRetriever:
    """The same weights whenever it is called; no dropout, so that sides can be compared."""
    torch.manual_seed(0)
    backbone = HSTU(shape.dim, shape.blocks, shape.heads, max_length=shape.max_length, dropout=0.0)
    table = EmbeddingTable(RowWiseAdaGrad(LEARNING_RATE, EPS))
    return GenerativeRetriever(items, backbone, table, SampledSoftmax(), top_k=(1,), predict_k=1)


class Dense(nn.Module):
    """All of a retriever but its table: from a batch's rows to its loss, as GenerativeRetriever.training_step has it."""

    def __init__(self, model: GenerativeRetriever) -> None:
        super().__init__()
        self.backbone, self.loss = model.backbone, model.loss

    def forward(self, rows: Tensor, index: dict[str, Tensor], batch: JaggedBatch) -> Tensor:
        """Mean loss of the batch; `rows` float [U, D] and `index` are those of its look-up."""
        tokens = jagged_embedding_lookup([rows], index[VALUES])
        output = normalised(self.backbone(tokens, batch))
        return self.loss(output, normalised(rows), index[TARGETS], index[NEGATIVES])


class Side(Protocol):
    """One way to train."""

    def run(self, steps: int) -> None:
        """Trains so many batches more."""

    def watch(self, watched: bool) -> None:
        """Begins or ends to take down what is done."""

    def spans(self, start: float, end: float) -> list[Span]:
        """What was done between two moments, as `turbogr.callbacks.intervals.step_shares` wants it."""

    def state(self) -> dict[str, Tensor]:
        """All weights, under the names of the model; called by all ranks, when all given steps are done."""

    def close(self) -> None:
        """No further step; called by all ranks."""


class Serial:
    """The engine's calls one after the other, each waited for, and one all-reduce of all dense gradients behind backward.

    Args:
        model: whose table it shards.
        batches: of this rank, again and again.
        weights: factor of each batch's loss.
        groups: M.
        late: rows of a batch are read before the update of the batch before it: semi-asynchronous training by hand (tau = 1).
    """

    def __init__(
        self, model: GenerativeRetriever, batches: list[JaggedBatch], weights: list[float], groups: int, late: bool = False
    ) -> None:
        self.model, self.late = model, late
        self.trace = Trace()
        topology = HSPTopology.build(groups)
        sharding = Sharding.row_wise(model.embeddings.spans, topology.group_size)
        self.engine = SparseEngine(model.embeddings, topology, sharding, trace=self.trace)
        self.dense = Dense(model)
        self.optimizer = published_adamw(self.dense.parameters())
        self.batches = itertools.cycle(zip(batches, weights, strict=True))
        self.trained: SparseBatch | None = None

    def run(self, steps: int) -> None:
        """As in Side."""
        for batch, weight in itertools.islice(self.batches, steps):
            self._step(batch, weight)

    def _step(self, batch: JaggedBatch, weight: float) -> None:
        engine = self.engine
        prepared = engine.prepare(self.model.sparse_features(batch))
        with self.trace.span("counts", -1, "communication"):
            counts = engine.receive_counts(prepared)
        engine.start_ids(prepared, counts)
        engine.finish_ids(prepared)
        engine.join_unique(prepared)
        engine.start_rows(prepared)
        engine.finish_rows(prepared)
        if self.late:
            self._update()
        assert prepared.lookup is not None
        self.optimizer.zero_grad()
        with self.trace.span("forward", -1, "compute"):
            loss = self.dense(prepared.lookup.rows, prepared.lookup.index, batch)
        with self.trace.span("backward", -1, "compute"):
            (loss * weight).backward()
        self._reduce()
        with self.trace.span("dense step", -1, "compute"):
            self.optimizer.step()
        self.trained = prepared
        if not self.late:
            self._update()

    def _update(self) -> None:
        if self.trained is not None:
            self.engine.backward(self.trained)
            self.engine.start_exchange(1 / dist.get_world_size())
            self.engine.update()
            self.trained = None

    def _reduce(self) -> None:
        gradients = [p.grad for p in self.dense.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(dist.get_world_size())
        with self.trace.span("all dense gradients", -1, "communication"):
            dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def watch(self, watched: bool) -> None:
        """As in Side."""
        self.trace.active = watched

    def spans(self, start: float, end: float) -> list[Span]:
        """As in Side."""
        return self.trace.take()

    def state(self) -> dict[str, Tensor]:
        """As in Side."""
        self._update()
        return {**dense_state(self.model), "rows": self.engine.full_state()["weight"]}

    def close(self) -> None:
        """As in Side."""
        self.engine.close()


class Ours(pl.Callback):
    """TurboGRStrategy under a Trainer, which runs in a thread of its own and is let go on for so many steps.

    Args:
        model: to train.
        batches: of this rank, again and again.
        steps: all that will be asked for.
        options: of the strategy.
    """

    def __init__(self, model: GenerativeRetriever, batches: list[JaggedBatch], steps: int, **options: Any) -> None:
        self.model = model
        os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "NODE_RANK": "0"}  # as whoever starts ranks does for Lightning
        self.strategy = TurboGRStrategy(process_group_backend=dist.get_backend(), bucket_cap_mb=BUCKET_MB, **options)
        self.strategy.trace.wanted = True
        self.trainer = pl.Trainer(
            strategy=self.strategy,
            accelerator="cpu",
            devices=dist.get_world_size(),
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[self],
        )
        stream = [batches[index % len(batches)] for index in range(steps)]
        self._loader: DataLoader[JaggedBatch] = DataLoader(stream, batch_size=None)  # type: ignore[arg-type]
        self._left, self._closing = 0, False
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._fit, name="trainer", daemon=True)
        self._thread.start()
        self._await()

    def _fit(self) -> None:
        try:
            self.trainer.fit(self.model, self._loader)
        except BaseException as error:  # raised again by whoever waits for the steps
            self._error = error
        self._done.release()

    def _await(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Waits for the first `run`."""
        self._pause()

    def on_train_batch_end(self, trainer: pl.Trainer, *arguments: Any) -> None:
        """Waits for the next `run` where this one is done."""
        self._left -= 1
        if self._left == 0:
            self._pause()

    def _pause(self) -> None:
        self._done.release()
        self._go.acquire()
        if self._closing:
            self.trainer.should_stop = True

    def run(self, steps: int) -> None:
        """As in Side."""
        self._left = steps
        self._go.release()
        self._await()

    def watch(self, watched: bool) -> None:
        """As in Side."""
        self.strategy.trace.active = watched

    def spans(self, start: float, end: float) -> list[Span]:
        """As in Side."""
        return self.strategy.trace.take()

    def state(self) -> dict[str, Tensor]:
        """As in Side."""
        self.strategy.pipeline.flush()
        return {**dense_state(self.model), "rows": self.strategy.engine.full_state()["weight"]}

    def close(self) -> None:
        """As in Side."""
        self._closing = True
        self._go.release()
        self._await()
        self._thread.join()


def dense_state(model: GenerativeRetriever) -> dict[str, Tensor]:
    """Copies of the dense parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


Make = Callable[[], Side]
"""Makes a side with fresh weights; called by all ranks."""


def clock_of(side: Side, steps: int) -> tuple[float, float, float]:
    """Start, end and process time of so many steps, in seconds."""
    process, start = time.process_time(), time.perf_counter()
    side.run(steps)
    return start, time.perf_counter(), time.process_time() - process
