"""TorchRec's sides of pipeline.py: its sharded collection with the fused optimizer, with and without its pipeline."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from _link import Link, Moved
from _sides import BUCKET_MB, EPS, LEARNING_RATE, Dense, dense_state
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv
from torchrec.streamable import Pipelineable

from turbogr.batch import JaggedBatch
from turbogr.models.retriever import GenerativeRetriever, published_adamw
from turbogr.tracing import Span


@dataclass
class Input(Pipelineable):
    """A batch as TorchRec's pipeline takes it."""

    ids: KeyedJaggedTensor
    index: dict[str, Tensor]
    batch: JaggedBatch
    weight: float

    def to(self, device: torch.device, non_blocking: bool) -> Input:
        """Where it is."""
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """A CPU has none."""


class Whole(nn.Module):
    """TorchRec's sharded table, and the dense part under DDP; the pipeline traces it."""

    def __init__(self, table: nn.Module, dense: nn.Module) -> None:
        super().__init__()
        self.table, self.dense = table, dense

    def forward(self, inputs: Input) -> tuple[Tensor, Tensor]:
        """The batch's weighted loss twice, as the pipeline has it: to differentiate, and to hand out."""
        found = self.table(inputs.ids)
        loss = self.dense(found["items"].values(), inputs.index, inputs.batch) * inputs.weight
        return loss, loss.detach()


class TorchRec:
    """ShardedEmbeddingCollection with its fused optimizer, with or without TrainPipelineSparseDist.

    Args:
        model: from whose weights it starts.
        batches: of this rank, again and again.
        weights: factor of each batch's loss.
        link: of this process.
        pipelined: by TrainPipelineSparseDist.
    """

    def __init__(
        self, model: GenerativeRetriever, batches: list[JaggedBatch], weights: list[float], link: Link, pipelined: bool
    ) -> None:
        self.model, self.link = model, link
        rows = model.embeddings.weight
        self.sharded = _sharded(len(rows), rows.shape[1])
        self.first = -(-len(rows) // dist.get_world_size()) * dist.get_rank()
        local = self._local()
        local.copy_(rows[self.first : self.first + len(local)])
        dense = Dense(model)
        self.whole = Whole(self.sharded, DistributedDataParallel(dense, bucket_cap_mb=BUCKET_MB))
        self.optimizer = published_adamw(dense.parameters())
        inputs = []
        for batch, weight in zip(batches, weights, strict=True):
            request = model.embeddings.request(model.sparse_features(batch))
            ids = KeyedJaggedTensor(keys=["items"], values=request.ids, lengths=torch.tensor([len(request.ids)]))
            inputs.append(Input(ids, request.index, batch, weight))
        self.inputs: Iterator[Input] = itertools.cycle(inputs)
        self.pipeline = TrainPipelineSparseDist(self.whole, self.optimizer, torch.device("cpu")) if pipelined else None
        self.waits: list[Span] = []
        self.moved: list[Moved] = []

    def run(self, steps: int) -> None:
        """As in Side."""
        for _ in range(steps):
            if self.pipeline is not None:
                self.pipeline.progress(self.inputs)
                continue
            self.optimizer.zero_grad()
            loss, _ = self.whole(next(self.inputs))
            loss.backward()
            self.optimizer.step()

    def watch(self, watched: bool) -> None:
        """As in Side."""
        if watched:
            self.link.record()
        else:
            self.moved, self.waits = self.link.recorded()

    def spans(self, start: float, end: float) -> list[Span]:
        """As in Side: whatever is not waiting counts as computing."""
        here = threading.get_ident()
        sent = [Span(moved.name, -1, "communication", moved.begun, moved.end) for moved in self.moved]
        return [Span("step", -1, "compute", start, end, here), *self.waits, *sent]

    def state(self) -> dict[str, Tensor]:
        """As in Side."""
        local, rows = self._local(), self.model.embeddings.num_rows
        block = -(-rows // dist.get_world_size())
        padded = local.new_zeros(block, local.shape[1])
        padded[: len(local)] = local
        whole = local.new_empty(dist.get_world_size() * block, local.shape[1])
        dist.all_gather_single(whole, padded)
        return {**dense_state(self.model), "rows": whole[:rows]}

    def close(self) -> None:
        """As in Side."""

    def _local(self) -> Tensor:
        (table,) = self.sharded.state_dict().values()
        return table.local_shards()[0].tensor.detach()


def _sharded(rows: int, dim: int) -> Any:
    """TorchRec's collection of one table, row-wise over all ranks; on a CPU its kernel must be named."""
    config = EmbeddingConfig(name="rows", embedding_dim=dim, num_embeddings=rows, feature_names=["items"])
    device, world = torch.device("cpu"), dist.get_world_size()
    collection = EmbeddingCollection(tables=[config], device=device)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LEARNING_RATE, "eps": EPS}
    sharder = EmbeddingCollectionSharder(fused_params=fused)
    spec = {"rows": row_wise(compute_kernel="fused")}
    plan = construct_module_sharding_plan(
        collection, spec, sharder=sharder, local_size=world, world_size=world, device_type="cpu"
    )
    return sharder.shard(collection, plan, ShardingEnv.from_process_group(dist.group.WORLD), device)
