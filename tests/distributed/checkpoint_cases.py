"""A module with sharded tables, filled so that every number tells where it belongs."""

from __future__ import annotations

import zlib
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from turbogr.checkpoints import before_load, note_tables
from turbogr.sparse.engine import SparseEngine
from turbogr.sparse.optimizers import AdaGrad, LazyAdam, RowOptimizer, RowWiseAdaGrad
from turbogr.sparse.sharding import Sharding
from turbogr.sparse.table import EmbeddingTable
from turbogr.sparse.topology import HSPTopology

TABLES = {"items": 61, "tags": 3, "users": 10}
DIM = 4
OPTIMIZERS: dict[str, type[RowOptimizer]] = {"lazy_adam": LazyAdam, "adagrad": AdaGrad, "row_wise_adagrad": RowWiseAdaGrad}


class Small(pl.LightningModule):
    """One dense layer, tables, and a buffer."""

    def __init__(self, tables: dict[str, int] | None = None, dim: int = DIM, optimizer: str = "lazy_adam") -> None:
        super().__init__()
        self.dense = nn.Linear(dim, 2)
        self.embeddings = EmbeddingTable(OPTIMIZERS[optimizer]())
        self.embeddings.allocate(tables or TABLES, dim)
        self.register_buffer("seen", torch.zeros(2))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        note_tables(checkpoint, self.embeddings)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        before_load(checkpoint, self, self.embeddings)


def build(topology: HSPTopology, sharding: str = "row_wise", **options: Any) -> tuple[Small, SparseEngine]:
    """The module, and the engine that has its rows."""
    torch.manual_seed(0)
    module = Small(**options)
    table = module.embeddings
    return module, SparseEngine(table, topology, Sharding.of_kind(sharding, table.spans, table.dim, topology.group_size))


def expected(name: str, shape: torch.Size, rows: Tensor | None) -> Tensor:
    """What a tensor of the state holds, exactly: distinct for every name, row and column. `rows` are global, [shape[0]]."""
    start = 128.0 * (zlib.crc32(name.encode()) % 61)
    if rows is None:
        return start + torch.arange(shape.numel()).view(shape) / 8
    return start + rows.view(-1, *[1] * (len(shape) - 1)) + torch.arange(shape[1:].numel()).view(1, *shape[1:]) / 8


def fill(module: Small, engine: SparseEngine | None) -> None:
    """Gives every tensor its expected values, placed by `Sharding.rows_of` and nothing that a checkpoint uses."""
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            tensor.copy_(_of(module, engine, name, tensor))


def wrong(module: Small, engine: SparseEngine | None) -> list[str]:
    """Names of tensors that do not hold their expected values."""
    state = module.state_dict().items()
    return [name for name, tensor in state if not torch.equal(tensor, _of(module, engine, name, tensor))]


def spoil(module: nn.Module) -> None:
    """Forgets everything."""
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(-1)


def _of(module: Small, engine: SparseEngine | None, name: str, tensor: Tensor) -> Tensor:
    table, rows = module.embeddings, None
    if name.startswith("embeddings.") and tensor.dim():
        rows = torch.arange(table.num_rows) if engine is None else engine.sharding.rows_of(engine.topology.member)
    return expected(name, tensor.shape, rows).to(tensor.dtype)
