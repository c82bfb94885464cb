"""`target_ranks` and `top_items`: exact ranking over the whole catalogue, one chunk of items at a time.

Both are made of what a `CataloguePart` computes about some consecutive items (`turbogr.ops.catalogue_part`): one part here, one
a rank where the catalogue is sharded (`turbogr.sparse.sharded_catalogue`), and the same bits either way.

Both use one order: score descending, then row ascending. Constant scores therefore put a target at its row's place instead
of the first, and equal item vectors tie exactly. Nothing of size [B, V] ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan

import torch
from torch import Tensor

from turbogr.ops.catalogue_part import CataloguePart, best_of
from turbogr.ops.registry import register

RANKS_OPERATOR, TOP_OPERATOR = "turbogr::target_ranks", "turbogr::top_items"


@torch.no_grad()
def target_ranks(
    queries: Tensor,
    table: Tensor,
    targets: Tensor,
    seen: Tensor | None = None,
    seen_offsets: Tensor | None = None,
    chunk_rows: int | None = None,
    cosine: bool = False,
) -> Tensor:
    """How many unseen items stand before each user's target.

    Scores are float32 dot products, whatever the dtype of the vectors and also under autocast. A rival stands before the
    target if its score is higher, or equal and its row smaller. If any score of a user is NaN (the target's or an unseen
    rival's) the target comes last: a damaged model must not look better than a sound one.

    Args:
        queries: [B, D], any float dtype.
        table: [V, D], the catalogue's vectors, any float dtype.
        targets: int64 [B], row of each user's target; never filtered, even if it is among the user's seen items.
        seen: int64 [S], rows that are no rivals, users laid end to end, in any order, repeats allowed; None filters nothing.
        seen_offsets: int64 [B + 1], user b's are `seen[seen_offsets[b]:seen_offsets[b + 1]]`; given with `seen`.
        chunk_rows: items scored at once, rounded up to a multiple of 64; None takes `CHUNK_BYTES` of scores. No influence
            on the result.
        cosine: l2-normalise the table's vectors, a chunk at a time: no second table of their size. Queries are taken as they
            are, their length does not change their order.

    Returns:
        int64 [B], 0 is the best rank.

    Raises:
        ValueError: shapes that contradict each other, or `chunk_rows` below 1.
        IndexError: a target or seen item that is not a row of the table.
    """
    part = CataloguePart.of(queries, table, targets, seen, seen_offsets, chunk_rows=chunk_rows, cosine=cosine)
    return part.ranks(part.count_before(part.target_scores()))


@torch.no_grad()
def top_items(
    queries: Tensor,
    table: Tensor,
    k: int,
    seen: Tensor | None = None,
    seen_offsets: Tensor | None = None,
    chunk_rows: int | None = None,
    cosine: bool = False,
) -> tuple[Tensor, Tensor]:
    """Each user's k best unseen items, best first, in the order that `target_ranks` counts in.

    `torch.topk` chooses freely among equal scores. Here score and row are packed into one int64 key, all keys differ, and
    the result is unique. NaN scores come after every other.

    Args:
        queries: [B, D], any float dtype.
        table: [V, D], the catalogue's vectors, any float dtype.
        k: items wanted, may exceed V.
        seen: int64 [S], as in `target_ranks`.
        seen_offsets: int64 [B + 1], as in `target_ranks`.
        chunk_rows: as in `target_ranks`.
        cosine: as in `target_ranks`.

    Returns:
        `scores`, float32 [B, k], and `rows`, int64 [B, k]. A user with fewer than k unseen items gets score -inf and row -1
        in the remaining places.

    Raises:
        ValueError: shapes that contradict each other, k or `chunk_rows` below 1.
        IndexError: a seen item that is not a row of the table.
    """
    part = CataloguePart.of(queries, table, None, seen, seen_offsets, chunk_rows=chunk_rows, cosine=cosine)
    return best_of(part.top_keys(k), k)


def target_ranks_reference(
    queries: Tensor,
    table: Tensor,
    targets: Tensor,
    seen: Tensor | None = None,
    seen_offsets: Tensor | None = None,
) -> Tensor:
    """`target_ranks` user by user in float64: the oracle."""
    ranks = []
    for user, (scores, filtered) in enumerate(_users(queries, table, seen, seen_offsets)):
        target = int(targets[user])
        rivals = [row for row in range(table.shape[0]) if row != target and row not in filtered]
        own = scores[target]
        if any(isnan(scores[row]) for row in [target, *rivals]):
            ranks.append(len(rivals))
        else:
            ranks.append(sum((-scores[row], row) < (-own, target) for row in rivals))
    return torch.tensor(ranks, dtype=torch.int64)


def top_items_reference(
    queries: Tensor,
    table: Tensor,
    k: int,
    seen: Tensor | None = None,
    seen_offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`top_items` user by user in float64: the oracle (scores float64)."""
    best_scores, best_rows = [], []
    for scores, filtered in _users(queries, table, seen, seen_offsets):
        keys = [(isnan(score), -score, row) for row, score in enumerate(scores) if row not in filtered]
        order = [row for _, _, row in sorted(keys)[:k]]
        missing = k - len(order)
        best_scores.append([scores[row] for row in order] + [-torch.inf] * missing)
        best_rows.append(order + [-1] * missing)
    return torch.tensor(best_scores, dtype=torch.float64).view(-1, k), torch.tensor(best_rows, dtype=torch.int64).view(-1, k)


def _users(
    queries: Tensor, table: Tensor, seen: Tensor | None, seen_offsets: Tensor | None
) -> Iterator[tuple[list[float], set[int]]]:
    scores = (queries.double() @ table.double().T).tolist()
    items = [] if seen is None else seen.tolist()
    bounds = [0] * (len(scores) + 1) if seen_offsets is None else seen_offsets.tolist()
    for user, row in enumerate(scores):
        yield row, set(items[bounds[user] : bounds[user + 1]])


register(RANKS_OPERATOR, "torch", "chunks of the catalogue; matrix product, comparison, scatter")
register(TOP_OPERATOR, "torch", "chunks of the catalogue; matrix product, topk on unique int64 keys")
