"""HSTU attention on the stand-in: inputs, calls of the drivers, the reference, and how results are compared."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.ascendc.build import Counters, driver
from tests.ops.jagged_cases import offsets_of
from turbogr.ops.hstu_attention import jagged_hstu_attention_reference
from turbogr.ops.time_buckets import bucket_thresholds

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""At most this fraction of differences may be larger than it."""

DTYPES = list(TOLERANCES)


_FIELDS = {
    ctypes.c_int64: "dtype tokens sequences heads qk_width v_width position_count time_count cores seed",
    ctypes.c_double: "scale alpha time_unit time_divisor",
    ctypes.c_void_p: "q k v offsets position_bias time_bias query_times key_times thresholds",
}


class _Problem(ctypes.Structure):
    """`driver::Problem` of hstu_problem.h."""

    _fields_ = [(name, type_) for type_, names in _FIELDS.items() for name in names.split()]


@dataclass
class Case:
    """A batch, in the dtype that the kernel is given; tables are float32.

    Attributes:
        q: [T, H, dqk].
        k: [T, H, dqk].
        v: [T, H, dv].
        offsets: int64 [B + 1].
        gradient: of the output, [T, H, dv].
        position: float32 [P], or None.
        time: float32 [K], or None.
        query_times: int64 [T].
        key_times: int64 [T].
        scale: factor on the output.
        alpha: factor on q . k.
        unit: ticks of the times per unit of the bucket formula.
        divisor: width of a bucket in natural logarithms.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    gradient: Tensor
    position: Tensor | None
    time: Tensor | None
    query_times: Tensor
    key_times: Tensor
    scale: float = 0.05
    alpha: float = 0.7
    unit: float = 1.0
    divisor: float = 0.301

    def problem(self, cores: int, seed: int) -> tuple[_Problem, list[Tensor | None]]:
        """For a driver, and the tensors that it points to, which must live as long."""
        thresholds = None if self.time is None else bucket_thresholds(self.time.numel(), self.unit, self.divisor)
        with_time = self.time is not None
        kept = [
            self.q,
            self.k,
            self.v,
            self.offsets,
            self.position,
            self.time,
            self.query_times if with_time else None,
            self.key_times if with_time else None,
            thresholds,
        ]
        numbers = [DTYPES.index(self.q.dtype), self.q.shape[0], self.offsets.numel() - 1, *self.q.shape[1:], self.v.shape[2]]
        numbers += [0 if x is None else x.numel() for x in (self.position, self.time)] + [cores, seed]
        pointers = [None if x is None or not x.numel() else x.data_ptr() for x in kept]
        return _Problem(*numbers, self.scale, self.alpha, self.unit, self.divisor, *pointers), kept

    def reference(self) -> list[Tensor]:
        """float64: the output, and the gradients of q, k, v and of the tables that there are."""
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v, self.position, self.time) if x is not None]
        tables: Iterator[Tensor] = iter(leaves[3:])
        position = None if self.position is None else next(tables)
        time = None if self.time is None else next(tables)
        out = jagged_hstu_attention_reference(
            *leaves[:3],
            self.offsets,
            scale=self.scale,
            alpha=self.alpha,
            position_bias=position,
            time_bias=time,
            query_times=self.query_times,
            key_times=self.key_times,
            time_unit=self.unit,
            time_divisor=self.divisor,
        )
        gradients = torch.autograd.grad(out, leaves, self.gradient.double(), allow_unused=True, materialize_grads=True)
        return [out.detach(), *gradients]


def case_of(
    lengths: Sequence[int],
    heads: int = 2,
    qk_dim: int = 8,
    v_dim: int = 5,
    dtype: torch.dtype = torch.float32,
    position: bool = True,
    time: bool = True,
    seed: int = 0,
) -> Case:
    """Random inputs; times rise by up to 400 from event to event."""
    g = torch.Generator().manual_seed(seed)
    offsets = offsets_of(lengths)
    tokens = int(offsets[-1])
    q, k = (torch.randn(tokens, heads, qk_dim, generator=g).to(dtype) for _ in range(2))
    v, gradient = (torch.randn(tokens, heads, v_dim, generator=g).to(dtype) for _ in range(2))
    position_bias = torch.randn(max([1, *lengths]) + 3, generator=g) if position else None
    time_bias = torch.randn(28, generator=g) if time else None  # the last bucket begins at 3386
    keys = torch.rand(tokens, generator=g).mul(6).exp().long().cumsum(0)
    queries = keys + torch.rand(tokens, generator=g).mul(6).exp().long()
    return Case(q, k, v, offsets, gradient, position_bias, time_bias, queries, keys, alpha=0.7 * 8**0.5 / qk_dim**0.5)


def forward(case: Case, cores: int = 2, seed: int = 1) -> tuple[Tensor, Counters]:
    """The kernel's output, and what it took."""
    out = torch.empty_like(case.v)
    problem, kept = case.problem(cores, seed)
    counters = driver("hstu_attention_driver", "jagged_hstu_attention").call("hstu_attention", bytes(problem), out)
    del kept
    return out, counters


def backward(case: Case, cores: int = 2, seed: int = 1) -> tuple[list[Tensor], Counters]:
    """The kernel's gradients of q, k, v and of the tables that there are, and what they took."""
    outputs = [torch.empty_like(x) for x in (case.q, case.k, case.v)]
    tables = [None if x is None else torch.empty_like(x) for x in (case.position, case.time)]
    problem, kept = case.problem(cores, seed)
    counters = driver("hstu_attention_backward_driver", "jagged_hstu_attention_backward").call(
        "hstu_attention_backward", bytes(problem), case.gradient, *outputs, *tables
    )
    del kept
    return [*outputs, *(x for x in tables if x is not None)], counters


def worst(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> float:
    """Of all tensors, the largest fraction of elements that differ by more than the tolerance."""
    fractions = [0.0]
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        if a.numel():
            fractions.append(float(((a.double() - b).abs() > tolerance).double().mean()))
            assert bool(a.isfinite().all())
    return max(fractions)


def without_tables(case: Case) -> Case:
    """The same without biases."""
    return replace(case, position=None, time=None)
