"""`target_ranks` and `top_items`: exact ranking over the whole catalogue, one chunk of items at a time.

Both use one order: score descending, then row ascending. Constant scores therefore put a target at its row's place instead
of the first, and equal item vectors tie exactly. A float32 matrix product keeps that promise only in certain shapes (see
`_ROW_MULTIPLE` and `_MIN_USERS`), so every product made here has such a shape, the targets' own scores included.

The user's earlier items are masked by scatter: their (user, item) pairs are sorted by item once, and each chunk takes its
slice. Nothing of size [B, V] ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan

import torch
from torch import Tensor
from torch.nn.functional import pad

from turbogr.ops.normalise import normalised
from turbogr.ops.registry import register

RANKS_OPERATOR, TOP_OPERATOR = "turbogr::target_ranks", "turbogr::top_items"

CHUNK_BYTES = 8 * 2**20
"""Size of one chunk's float32 scores [B, C] unless `chunk_rows` says otherwise; working memory is a small multiple of it."""

# Measured with MKL: the columns that a product of a ragged width leaves to its edge kernel, and the rows of a very flat one,
# are summed in another order, so that equal vectors get scores one unit in the last place apart. With widths that are
# multiples of 64 and at least 16 users, a score depends on nothing but its two vectors (tests/ops/test_catalogue.py).
_ROW_MULTIPLE = 64
_MIN_USERS = 16

_ABSENT = torch.iinfo(torch.int64).min
"""Sort key of no item: below every score, NaN included."""


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
    problem = _Problem.of(queries, table, seen, seen_offsets, targets, chunk_rows, cosine)
    own = problem.score_rows(targets)
    # The target is no rival of itself: it joins the excluded pairs, so one scatter masks both.
    pairs = problem.excluded.with_targets(targets)
    threshold, row = own[:, None], targets[:, None]
    before = torch.zeros_like(targets)
    damaged = own.isnan()
    for start, scores, rows in problem.chunks():
        users, columns = pairs.within(start)
        scores[users, columns] = -torch.inf  # may hide a NaN of an excluded item, which must not count
        damaged |= scores.amax(1).isnan()  # amax hands NaN on
        ahead = torch.where(rows < row, scores >= threshold, scores > threshold)
        ahead[users, columns] = False  # a target whose own score is -inf ties with the masked ones
        before += ahead.sum(1)
    return torch.where(damaged, problem.num_rows - pairs.distinct_per_user(), before)


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
    if k < 1:
        raise ValueError(f"{TOP_OPERATOR}: k is {k}, must be at least 1")
    problem = _Problem.of(queries, table, seen, seen_offsets, None, chunk_rows, cosine)
    best = torch.full((problem.num_users, k), _ABSENT, dtype=torch.int64, device=queries.device)
    for start, scores, rows in problem.chunks():
        keys = _pack(scores, rows)
        keys[problem.excluded.within(start)] = _ABSENT
        candidates = keys.topk(min(k, keys.shape[1]), dim=1, sorted=False).values
        best = torch.cat([best, candidates], dim=1).topk(k, dim=1, sorted=False).values
    return _unpack(best.sort(dim=1, descending=True).values)


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


@dataclass
class _Pairs:
    """(user, item) pairs sorted by item, then user; `cuts[c]` is where chunk c begins."""

    users: Tensor
    items: Tensor
    num_users: int
    num_rows: int
    chunk_rows: int
    cuts: list[int]

    @classmethod
    def of(cls, users: Tensor, items: Tensor, num_users: int, num_rows: int, chunk_rows: int) -> _Pairs:
        keys = (items * max(num_users, 1) + users).sort().values
        users, items = keys % max(num_users, 1), keys // max(num_users, 1)
        starts = torch.arange(0, num_rows + chunk_rows, chunk_rows, device=items.device)
        # The only wait for the device, before the loop over chunks.
        cuts = torch.searchsorted(items, starts).tolist()
        return cls(users, items, num_users, num_rows, chunk_rows, cuts)

    def within(self, start: int) -> tuple[Tensor, Tensor]:
        """Users and columns of the pairs of the chunk that begins at row `start`."""
        chunk = start // self.chunk_rows
        part = slice(self.cuts[chunk], self.cuts[chunk + 1])
        return self.users[part], self.items[part] - start

    def with_targets(self, targets: Tensor) -> _Pairs:
        everyone = torch.arange(self.num_users, device=targets.device)
        users, items = torch.cat([self.users, everyone]), torch.cat([self.items, targets])
        return self.of(users, items, self.num_users, self.num_rows, self.chunk_rows)

    def distinct_per_user(self) -> Tensor:
        first = torch.ones_like(self.items)
        first[1:] = ((self.items[1:] != self.items[:-1]) | (self.users[1:] != self.users[:-1])).long()
        return torch.zeros(self.num_users, dtype=torch.int64, device=self.items.device).scatter_add_(0, self.users, first)


@dataclass
class _Problem:
    """Checked arguments, in float32 and in shapes whose products do not depend on position."""

    queries: Tensor  # float32 [max(B, _MIN_USERS), D]
    table: Tensor
    excluded: _Pairs
    num_users: int
    num_rows: int
    chunk_rows: int
    cosine: bool

    @classmethod
    def of(
        cls,
        queries: Tensor,
        table: Tensor,
        seen: Tensor | None,
        seen_offsets: Tensor | None,
        targets: Tensor | None,
        chunk_rows: int | None,
        cosine: bool,
    ) -> _Problem:
        if queries.dim() != 2 or table.dim() != 2 or queries.shape[1] != table.shape[1]:
            raise ValueError(f"queries {list(queries.shape)} and table {list(table.shape)} must be [B, D] and [V, D]")
        num_users, num_rows = queries.shape[0], table.shape[0]
        if (seen is None) != (seen_offsets is None):
            raise ValueError("seen and seen_offsets come together or not at all")
        if seen_offsets is not None and tuple(seen_offsets.shape) != (num_users + 1,):
            raise ValueError(f"seen_offsets is {list(seen_offsets.shape)}, expected [{num_users + 1}]")
        if targets is not None and tuple(targets.shape) != (num_users,):
            raise ValueError(f"targets is {list(targets.shape)}, expected [{num_users}]")
        if chunk_rows is not None and chunk_rows < 1:
            raise ValueError(f"chunk_rows is {chunk_rows}, must be at least 1")
        if seen is None or seen_offsets is None:
            seen, users = queries.new_empty(0, dtype=torch.int64), queries.new_empty(0, dtype=torch.int64)
        else:
            everyone = torch.arange(num_users, device=queries.device)
            users = everyone.repeat_interleave(seen_offsets.diff(), output_size=seen.numel())
        _check_rows("seen item", seen, num_rows)
        if targets is not None:
            _check_rows("target", targets, num_rows)
        most = chunk_rows or max(CHUNK_BYTES // (4 * max(num_users, _MIN_USERS)), 1)
        # Chunks of equal size: a remainder of a few rows would cost as much as a whole one.
        count = max(-(-num_rows // most), 1)
        chunk_rows = -(-max(num_rows, 1) // (count * _ROW_MULTIPLE)) * _ROW_MULTIPLE
        excluded = _Pairs.of(users, seen, num_users, num_rows, chunk_rows)
        padded = pad(queries.float(), (0, 0, 0, max(_MIN_USERS - num_users, 0)))
        return cls(padded, table, excluded, num_users, num_rows, chunk_rows, cosine)

    def chunks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields (first row, scores float32 [B, c], rows int64 [c]) with c <= `chunk_rows`."""
        for start in range(0, self.num_rows, self.chunk_rows):
            part = self.table[start : start + self.chunk_rows]
            rows = torch.arange(start, start + part.shape[0], device=part.device)
            yield start, self._product(part)[: self.num_users, : part.shape[0]], rows

    def score_rows(self, rows: Tensor) -> Tensor:
        """Each user's score of one row, float32 [B], from products of the shape that `chunks` uses."""
        parts = []
        for start in range(0, self.num_users, self.chunk_rows):
            part = rows[start : start + self.chunk_rows]
            product = self._product(self.table[part])
            parts.append(product[start : start + part.shape[0]].diagonal())
        return torch.cat(parts) if parts else self.queries.new_empty(0)

    def _product(self, vectors: Tensor) -> Tensor:
        padded = pad(vectors.float(), (0, 0, 0, self.chunk_rows - vectors.shape[0]))
        if self.cosine:
            padded = normalised(padded)  # after padding: always the same shape, so that a row's bits do not depend on its place
        with torch.autocast(self.queries.device.type, enabled=False):  # else a mixed-precision run would rank bfloat16 scores
            return self.queries @ padded.T


def _check_rows(name: str, rows: Tensor, num_rows: int) -> None:
    if rows.dtype != torch.int64:
        raise ValueError(f"{name} rows are {rows.dtype}, expected torch.int64")
    if rows.numel():
        low, high = (int(x) for x in torch.aminmax(rows))
        if low < 0 or high >= num_rows:
            raise IndexError(f"{name} {low if low < 0 else high} is outside the catalogue's rows 0..{num_rows - 1}")


_ROW_MASK = 2**32 - 1


def _pack(scores: Tensor, rows: Tensor) -> Tensor:
    """int64 keys that sort like (score, -row): the score's bits, made monotone, above the complement of the row."""
    bits = (scores + 0.0).view(torch.int32)  # +0.0 makes one zero of two
    # Negative floats grow in magnitude with their bits, so theirs are flipped. NaN would sort on top.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill_(scores.isnan(), torch.iinfo(torch.int32).min)
    return ordered.long().mul_(2**32).add_(_ROW_MASK - rows)  # the product is a shift, but vectorised


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    absent = keys == _ABSENT
    ordered = (keys >> 32).int()
    scores = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)  # int32's minimum becomes a NaN again
    rows = _ROW_MASK - (keys & _ROW_MASK)
    return scores.masked_fill(absent, -torch.inf), rows.masked_fill(absent, -1)


register(RANKS_OPERATOR, "torch", "chunks of the catalogue; matrix product, comparison, scatter")
register(TOP_OPERATOR, "torch", "chunks of the catalogue; matrix product, topk on unique int64 keys")
