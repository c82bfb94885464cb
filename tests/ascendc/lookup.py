"""Embedding look-up on the stand-in: inputs, calls of the driver, the reference, and how results are compared."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ascendc.build import Counters, driver
from tests.ascendc.hstu import DTYPES, TOLERANCES

DRIVER = ("embedding_lookup_driver", "jagged_embedding_lookup", "jagged_embedding_lookup_backward")


class Problem(ctypes.Structure):
    """`Problem` of embedding_lookup_driver.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ["dtype", "tables", "ids", "rows", "width", "cores", "seed"]),
        ("list", ctypes.c_void_p),
    ]


@dataclass
class Batch:
    """Tables in the dtype that the kernel is given, their ids one table after the other, and where each table's begin."""

    tables: list[Tensor]
    ids: Tensor
    splits: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tables[0].dtype

    @property
    def width(self) -> int:
        return self.tables[0].shape[1]

    @property
    def bases(self) -> list[int]:
        """Rows of the tables before each table, and of all."""
        return [0, *torch.tensor([len(x) for x in self.tables]).cumsum(0).tolist()]

    def problem(self, targets: Sequence[Tensor | None], cores: int, seed: int) -> tuple[Problem, Tensor]:
        """The problem with the list of `targets`, which must stay alive as long as it."""
        edges = self.splits.tolist()
        rows = torch.tensor(
            [
                [0 if x is None else x.data_ptr(), len(self.tables[k]), edges[k], edges[k + 1], self.bases[k]]
                for k, x in enumerate(targets)
            ]
        )
        dtype = DTYPES.index(self.dtype)
        return Problem(dtype, len(targets), len(self.ids), self.bases[-1], self.width, cores, seed, rows.data_ptr()), rows

    def groups(self) -> tuple[Tensor, Tensor]:
        """order [N] and starts [rows + 1], as the plugin makes them: positions by (table, id), in their order."""
        base = torch.tensor(self.bases[:-1]).repeat_interleave(self.splits.diff())
        ordered, order = (self.ids + base).sort(stable=True)
        return order, torch.searchsorted(ordered, torch.arange(self.bases[-1] + 1))


def batch_of(
    rows: Sequence[int], counts: Sequence[int], width: int, dtype: torch.dtype = torch.float32, seed: int = 0, skew: float = 1
) -> Batch:
    """Random ids; with `skew` above 1, low ones are asked for more often."""
    g = torch.Generator().manual_seed(seed)
    tables = [torch.randn(v, width, generator=g).to(dtype) for v in rows]
    ids = [(torch.rand(n, generator=g).pow(skew) * v).long().clamp(0, max(v - 1, 0)) for v, n in zip(rows, counts, strict=True)]
    return Batch(tables, torch.cat(ids), torch.tensor([0, *counts]).cumsum(0))


def forward(batch: Batch, cores: int = 7, seed: int = 1) -> tuple[Tensor, Counters]:
    """The rows [N, D], and what the launch did."""
    out = torch.empty(len(batch.ids), batch.width, dtype=batch.dtype)
    problem, _kept = batch.problem(batch.tables, cores, seed)
    return out, driver(*DRIVER).call("lookup_forward", ctypes.addressof(problem), batch.ids, out)


def backward(
    batch: Batch, gradient: Tensor, cores: int = 7, seed: int = 1, wanted: Sequence[bool] | None = None
) -> tuple[list[Tensor | None], Counters]:
    """The gradient of each table that is wanted, and what the launch did."""
    wanted = wanted or [True] * len(batch.tables)
    targets = [torch.empty_like(x) if want else None for x, want in zip(batch.tables, wanted, strict=True)]
    problem, _kept = batch.problem(targets, cores, seed)
    counters = driver(*DRIVER).call("lookup_backward", ctypes.addressof(problem), gradient, *batch.groups())
    return targets, counters


def fraction_off(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """The fraction of differences beyond the dtype's tolerance."""
    return float(((actual.double() - expected).abs() > TOLERANCES[dtype]).double().mean()) if actual.numel() else 0.0
