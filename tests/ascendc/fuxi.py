"""FuXi's attention on the stand-in: inputs, calls of the drivers, and the reference."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ascendc.build import Counters, driver
from tests.ascendc.hstu import DTYPES
from tests.ops.jagged_cases import offsets_of
from turbogr.ops.fuxi_attention import jagged_fuxi_attention_reference
from turbogr.ops.time_buckets import bucket_thresholds

CHANNELS = ["bucketed", "functional", None]
"""Kinds of the time channel; FuxiTime in the tiling."""

_FIELDS = {
    ctypes.c_int64: "dtype tokens sequences heads qk_width v_width position_count time_kind time_count cores seed",
    ctypes.c_double: "scale alpha time_unit time_divisor",
    ctypes.c_void_p: "q k v offsets position_bias time_parameters query_times key_times thresholds",
}


class _Problem(ctypes.Structure):
    """`driver::Problem` of fuxi_problem.h."""

    _fields_ = [(name, type_) for type_, names in _FIELDS.items() for name in names.split()]


@dataclass
class Case:
    """A batch, in the dtype that the kernel is given; tables and the time function's numbers are float32.

    Attributes:
        q: [T, H, dqk].
        k: [T, H, dqk].
        v: [T, H, dv].
        offsets: int64 [B + 1].
        gradient: of the output, [T, H, 3 dv].
        position: float32 [P], or None.
        time: float32, the table [K], or amplitude, decay and exponent [3]; or None.
        functional: whether `time` is a time function's.
        query_times: int64 [T].
        key_times: int64 [T].
        scale: factor on the semantic weights.
        alpha: factor on q . k.
        unit: ticks of the times per unit of the formulas.
        divisor: width of a bucket in natural logarithms.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    gradient: Tensor
    position: Tensor | None
    time: Tensor | None
    functional: bool
    query_times: Tensor
    key_times: Tensor
    scale: float = 0.05
    alpha: float = 0.7
    unit: float = 1.0
    divisor: float = 0.301

    def problem(self, cores: int, seed: int) -> tuple[_Problem, list[Tensor | None]]:
        """For a driver, and the tensors that it points to, which must live as long."""
        buckets = 0 if self.time is None or self.functional else self.time.numel()
        kind = 0 if self.time is None else 2 if self.functional else 1
        kept = [
            self.q,
            self.k,
            self.v,
            self.offsets,
            self.position,
            self.time,
            self.query_times if kind else None,
            self.key_times if kind else None,
            bucket_thresholds(buckets, self.unit, self.divisor) if buckets else None,
        ]
        numbers = [DTYPES.index(self.q.dtype), self.q.shape[0], self.offsets.numel() - 1, *self.q.shape[1:], self.v.shape[2]]
        numbers += [0 if self.position is None else self.position.numel(), kind, buckets, cores, seed]
        pointers = [None if x is None or not x.numel() else x.data_ptr() for x in kept]
        return _Problem(*numbers, self.scale, self.alpha, self.unit, self.divisor, *pointers), kept

    def reference(self) -> list[Tensor]:
        """float64: the output, and the gradients of q, k, v and of position and time, as far as there are any."""
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        position, time = (None if x is None else x.double().requires_grad_() for x in (self.position, self.time))
        out = jagged_fuxi_attention_reference(
            *leaves,
            self.offsets,
            scale=self.scale,
            alpha=self.alpha,
            position_bias=position,
            time_bias=None if self.functional else time,
            time_function=(time[0], time[1], time[2]) if self.functional and time is not None else None,
            query_times=None if time is None else self.query_times,
            key_times=None if time is None else self.key_times,
            time_unit=self.unit,
            time_divisor=self.divisor,
        )
        leaves += [x for x in (position, time) if x is not None]
        gradients = torch.autograd.grad(out, leaves, self.gradient.double(), allow_unused=True, materialize_grads=True)
        return [out.detach(), *gradients]


def case_of(
    lengths: Sequence[int],
    heads: int = 2,
    qk_dim: int = 8,
    v_dim: int = 5,
    dtype: torch.dtype = torch.float32,
    position: bool = True,
    channel: str | None = "functional",
    seed: int = 0,
) -> Case:
    """Random inputs, sized so that sums over a few hundred pairs stay near 1; times rise by up to 400 from event to event."""
    g = torch.Generator().manual_seed(seed)
    offsets = offsets_of(lengths)
    tokens = int(offsets[-1])
    q, k = (torch.randn(tokens, heads, qk_dim, generator=g).to(dtype) for _ in range(2))
    v = torch.randn(tokens, heads, v_dim, generator=g).to(dtype)
    gradient = torch.randn(tokens, heads, 3 * v_dim, generator=g).div(heads**0.5 * v_dim**0.5).to(dtype)
    position_bias = torch.randn(max([1, *lengths]) + 3, generator=g) * 0.02 if position else None
    table = torch.randn(28, generator=g) * 0.02  # the last bucket begins at 3386
    function = torch.tensor([-0.03, 0.9, 0.6])
    keys = torch.rand(tokens, generator=g).mul(6).exp().long().cumsum(0)
    gaps = torch.rand(tokens, generator=g).mul(6).exp().long()
    queries = keys + torch.where(torch.rand(tokens, generator=g) < 0.1, 0, gaps)  # some gaps are 0
    functional = channel == "functional"
    time = None if channel is None else function if functional else table
    alpha = 0.7 * 8**0.5 / qk_dim**0.5
    unit = 60.0 if functional else 1.0
    scale = 1 / max([20, *lengths])
    return Case(q, k, v, offsets, gradient, position_bias, time, functional, queries, keys, scale, alpha, unit)


def forward(case: Case, cores: int = 2, seed: int = 1) -> tuple[Tensor, Counters]:
    """The kernel's output, and what it took."""
    out = torch.empty_like(case.gradient)
    problem, kept = case.problem(cores, seed)
    counters = driver("fuxi_attention_driver", "jagged_fuxi_attention").call("fuxi_attention", bytes(problem), out)
    del kept
    return out, counters


def backward(case: Case, cores: int = 2, seed: int = 1) -> tuple[list[Tensor], Counters]:
    """The kernel's gradients of q, k, v and of position and time, as far as there are any, and what they took."""
    outputs = [torch.empty_like(x) for x in (case.q, case.k, case.v)]
    tables = [None if x is None else torch.empty_like(x) for x in (case.position, case.time)]
    problem, kept = case.problem(cores, seed)
    counters = driver("fuxi_attention_backward_driver", "jagged_fuxi_attention_backward").call(
        "fuxi_attention_backward", bytes(problem), case.gradient, *outputs, *tables
    )
    del kept
    return [*outputs, *(x for x in tables if x is not None)], counters
