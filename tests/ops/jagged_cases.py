"""Jagged inputs that every attention operator is checked on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LENGTHS: dict[str, list[int]] = {
    "empty batch": [],
    "empty sequences": [0, 0, 0],
    "length 1": [1],
    "edges of a block": [127, 128, 129, 0, 1, 2],
    "one long, many short": [400, *range(1, 9)],
    "equal lengths": [37, 37, 37],
}


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
