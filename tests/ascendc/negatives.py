"""Negative logits on the stand-in: inputs, calls of the driver, and the reference."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.ascendc.build import Counters, driver
from tests.ascendc.hstu import DTYPES
from turbogr.ops.negative_logits import negative_logits_reference

DRIVER = ("negative_logits_driver", "negative_logits", "negative_logits_backward")


class Problem(ctypes.Structure):
    """`Problem` of negative_logits_driver.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ["dtype", "tokens", "samples", "rows", "width", "cores", "seed"]]


@dataclass
class Case:
    """output [T, D] and rows [U, D] in the dtype that the kernel is given, index [T, R]."""

    output: Tensor
    rows: Tensor
    index: Tensor

    def problem(self, cores: int, seed: int) -> Problem:
        dtype = DTYPES.index(self.output.dtype)
        return Problem(dtype, *self.index.shape, *self.rows.shape, cores, seed)

    def groups(self, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [T * R], weights [T * R] and starts [U + 1], as the plugin makes them: pairs by row, in their order."""
        ordered, order = self.index.flatten().sort(stable=True)
        starts = torch.searchsorted(ordered, torch.arange(len(self.rows) + 1))
        return order.div(max(1, self.index.shape[1]), rounding_mode="floor"), gradient.flatten()[order], starts

    def expected(self, gradient: Tensor) -> list[Tensor]:
        """logits and both gradients, in float64."""
        leaves = [self.output.double().requires_grad_(), self.rows.double().requires_grad_()]
        logits = negative_logits_reference(*leaves, self.index)
        return [logits.detach(), *torch.autograd.grad(logits, leaves, gradient.double())]


def case_of(tokens: int, samples: int, width: int, rows: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Case:
    """Random numbers such that logits are mostly below 1."""
    g = torch.Generator().manual_seed(seed)
    output, table = (torch.randn(n, width, generator=g).mul(0.5 * max(1, width) ** -0.25).to(dtype) for n in (tokens, rows))
    return Case(output, table, torch.randint(0, max(rows, 1), (tokens, samples), generator=g))


def forward(case: Case, cores: int = 7, seed: int = 1) -> tuple[Tensor, Counters]:
    """logits [T, R], and what the launch did."""
    logits = torch.empty(case.index.shape, dtype=case.output.dtype)
    problem = case.problem(cores, seed)
    address = ctypes.addressof(problem)
    return logits, driver(*DRIVER).call("negative_forward", address, case.output, case.rows, case.index, logits)


def backward(case: Case, gradient: Tensor, cores: int = 7, seed: int = 1) -> tuple[Tensor, Tensor, Counters]:
    """The gradients of output and rows, and what the launch did."""
    results = torch.empty_like(case.output), torch.empty_like(case.rows)
    problem = case.problem(cores, seed)
    inputs = gradient, case.output, case.rows, case.index, *case.groups(gradient)
    return *results, driver(*DRIVER).call("negative_backward", ctypes.addressof(problem), *inputs, *results)
