"""Batches for model tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turbogr.batch import JaggedBatch

WINDOW = "tests.models.make.window"


def window(query_position: torch.Tensor, key_position: torch.Tensor) -> torch.Tensor:
    """A mask of a user's own: each token attends to itself and the two before it."""
    return query_position - key_position < 3


def allowed(mask: str, length: int) -> torch.Tensor:
    """bool [length, length], who attends to whom under "causal" or `WINDOW`."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    return (distance >= 0) & (distance < (3 if mask == WINDOW else length))


def random_batch(
    lengths: Sequence[int], num_items: int = 40, negatives: int | None = 6, max_length: int = 32, seed: int = 0
) -> JaggedBatch:
    """A training batch of random histories with rising times; tokens may repeat items."""
    g = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    events = [torch.randint(0, num_items, (n + 1,), generator=g) for n in lengths]
    times = [torch.randint(0, 10**7, (n + 1,), generator=g).sort()[0] for n in lengths]
    tokens = int(offsets[-1])
    nothing = [torch.zeros(0, dtype=torch.int64)]
    return JaggedBatch(
        values=torch.cat(nothing + [e[:-1] for e in events]),
        offsets=offsets,
        timestamps=torch.cat(nothing + [t[:-1] for t in times]),
        targets=torch.cat(nothing + [e[1:] for e in events]),
        target_times=torch.cat(nothing + [t[1:] for t in times]),
        user_ids=torch.arange(len(lengths)),
        max_length=max_length,
        negatives=None if negatives is None else torch.randint(0, num_items, (tokens, negatives), generator=g),
    )
