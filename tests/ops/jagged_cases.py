"""Inputs that several operators are checked on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from turbogr.ops.layout import BLOCK_ROWS

BACKEND_DTYPES = [
    (backend, dtype)
    for backend in ("cpp", "torch", "reference")
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
    if (backend, dtype) != ("cpp", torch.float64)  # kernels compute in float32
]
"""What the operators between the products are tested with."""

LENGTHS: dict[str, list[int]] = {
    "empty batch": [],
    "empty sequences": [0, 0, 0],
    "length 1": [1],
    "edges of a tile": [63, 64, 65, 0, 1, 2],
    "edges of a block": [BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 0, 2 * BLOCK_ROWS],
    "one long, many short": [400, *range(1, 9)],
    "equal lengths": [37, 37, 37],
}


WIDTHS = [(1, 8, 8), (2, 16, 33), (3, 50, 50), (4, 32, 32), (5, 7, 65), (6, 1, 1), (7, 17, 128), (8, 128, 64)]
"""Heads, width of queries and keys, width of values."""


def offsets_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def max_errors(
    operator: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    seed: int = 0,
    relative: bool = False,
) -> list[float]:
    """Largest difference of the output and of each input's gradient: absolute, or relative to the largest expected value."""
    out, expected = operator(*inputs), reference(*inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    actual = torch.autograd.grad(out, inputs, weights.to(out.dtype), allow_unused=True, materialize_grads=True)
    wanted = torch.autograd.grad(expected, inputs, weights, allow_unused=True, materialize_grads=True)
    errors = []
    for a, b in [(out, expected), *zip(actual, wanted, strict=True)]:
        error = float((a.double() - b.double()).detach().abs().max()) if a.numel() else 0.0
        largest = float(b.detach().abs().max()) if b.numel() else 0.0
        errors.append(error / largest if relative and largest else error)
    return errors


def far_apart(x: Tensor, row_stride: int = 2**30) -> Tensor:
    """A copy of x [T, H, D] whose rows lie 2^30 elements apart: an index of 32 bits does not reach the third one.

    The memory between the rows is never touched, and takes no room where the system hands out pages at first use.
    """
    try:
        room = torch.empty((x.shape[0] - 1) * row_stride + x[0].numel(), dtype=x.dtype)
    except RuntimeError as error:
        pytest.skip(f"not enough address space: {error}")
    return room.as_strided(x.shape, (row_stride, x.shape[2], 1)).copy_(x)
