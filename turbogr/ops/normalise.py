"""`normalised`: the l2 normalisation of outputs and item vectors, in one place because training and ranking must agree."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6


def normalised(x: Tensor) -> Tensor:
    """x / max(||x||_2, 1e-6) along the last axis (public HSTU code): float, any shape."""
    return F.normalize(x, dim=-1, eps=EPS)
