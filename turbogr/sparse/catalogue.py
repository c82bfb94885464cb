"""Catalogue: ranks and recommends all items, from item vectors that lie in this process."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from turbogr.ops.catalogue import target_ranks, top_items


class Catalogue(Protocol):
    """What a model asks at evaluation; whether the items lie here or on several ranks is its own affair."""

    def target_ranks(self, queries: Tensor, targets: Tensor, seen: Tensor | None, seen_offsets: Tensor | None) -> Tensor:
        """Int64 [B], each user's rank of the target; arguments and order as in `turbogr.ops.catalogue.target_ranks`."""

    def top_items(self, queries: Tensor, k: int, seen: Tensor | None, seen_offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        """Scores float32 [B, k] and rows int64 [B, k]; as in `turbogr.ops.catalogue.top_items`."""


class LocalCatalogue:
    """All items in this process, scored by cosine similarity.

    Args:
        vectors: float [V, D], of every item; need not be normalised.
    """

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def target_ranks(self, queries: Tensor, targets: Tensor, seen: Tensor | None, seen_offsets: Tensor | None) -> Tensor:
        """As in Catalogue."""
        return target_ranks(queries, self.vectors, targets, seen, seen_offsets, cosine=True)

    def top_items(self, queries: Tensor, k: int, seen: Tensor | None, seen_offsets: Tensor | None) -> tuple[Tensor, Tensor]:
        """As in Catalogue."""
        return top_items(queries, self.vectors, k, seen, seen_offsets, cosine=True)
