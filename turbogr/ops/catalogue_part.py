"""`CataloguePart`: some consecutive items of the catalogue against a batch of users, one chunk of items at a time.

A float32 matrix product ties equal item vectors exactly, in whatever part they lie, only in certain shapes (see `_ROW_MULTIPLE`
and `_MIN_USERS`), so every product made here has such a shape, the targets' own scores included.

The user's earlier items are masked by scatter: their (user, item) pairs are sorted by item once, and each chunk takes its
slice. Nothing of size [B, V] ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from turbogr.ops.normalise import normalised

CHUNK_BYTES = 8 * 2**20
"""Size of one chunk's float32 scores [B, C] unless `chunk_rows` says otherwise; working memory is a small multiple of it."""

# Measured with MKL: the columns that a product of a ragged width leaves to its edge kernel, and the rows of a very flat one,
# are summed in another order, so that equal vectors get scores one unit in the last place apart. With widths that are
# multiples of 64 and at least 16 users, a score depends on nothing but its two vectors (tests/ops/test_catalogue.py).
_ROW_MULTIPLE = 64
_MIN_USERS = 16

_ABSENT = torch.iinfo(torch.int64).min
"""Sort key of no item: below every score, NaN included."""
_ROW_MASK = 2**32 - 1


@dataclass
class _Pairs:
    """(user, item) pairs sorted by item, then user; those of chunk c are `cuts[c]` to `cuts[c + 1]`."""

    users: Tensor
    items: Tensor
    num_users: int
    rows: range
    chunk_rows: int
    cuts: list[int]

    @classmethod
    def of(cls, users: Tensor, items: Tensor, num_users: int, rows: range, chunk_rows: int) -> _Pairs:
        keys = (items * max(num_users, 1) + users).sort().values
        users, items = keys % max(num_users, 1), keys // max(num_users, 1)
        starts = torch.arange(rows.start, rows.stop + chunk_rows, chunk_rows, device=items.device).clamp(max=rows.stop)
        # The only wait for the device, before the loop over chunks.
        cuts = torch.searchsorted(items, starts).tolist()
        return cls(users, items, num_users, rows, chunk_rows, cuts)

    def within(self, start: int) -> tuple[Tensor, Tensor]:
        """Users and columns of the pairs of the chunk that begins at row `start`."""
        chunk = (start - self.rows.start) // self.chunk_rows
        part = slice(self.cuts[chunk], self.cuts[chunk + 1])
        return self.users[part], self.items[part] - start

    def with_targets(self, targets: Tensor) -> _Pairs:
        everyone = torch.arange(self.num_users, device=targets.device)
        users, items = torch.cat([self.users, everyone]), torch.cat([self.items, targets])
        return self.of(users, items, self.num_users, self.rows, self.chunk_rows)

    def distinct_per_user(self) -> Tensor:
        first = torch.ones_like(self.items)
        first[1:] = ((self.items[1:] != self.items[:-1]) | (self.users[1:] != self.users[:-1])).long()
        return torch.zeros(self.num_users, dtype=torch.int64, device=self.items.device).scatter_add_(0, self.users, first)


@dataclass
class CataloguePart:
    """Consecutive items of the catalogue against a batch of users: in float32, in shapes that change no product's bits.

    The ranks follow from the sums over the parts: of `target_scores`, then of `count_before` of that sum. The best items
    follow from all parts' `top_keys` (`best_of`). A part without items contributes nothing.

    Attributes:
        rows: of the catalogue, those of this part.
        num_users: B.
        num_items: V, of the whole catalogue.
    """

    rows: range
    num_users: int
    num_items: int
    _queries: Tensor  # float32 [max(B, _MIN_USERS), D]
    _table: Tensor
    _targets: Tensor | None
    _excluded: _Pairs
    _chunk_rows: int
    _cosine: bool

    @classmethod
    def of(
        cls,
        queries: Tensor,
        table: Tensor,
        targets: Tensor | None = None,
        seen: Tensor | None = None,
        seen_offsets: Tensor | None = None,
        *,
        first: int = 0,
        num_items: int | None = None,
        chunk_rows: int | None = None,
        cosine: bool = False,
    ) -> CataloguePart:
        """Checks the arguments and sorts the seen items.

        Args:
            queries: as in `target_ranks`.
            table: [n, D], the vectors of the part's items.
            targets: as in `target_ranks`, rows of the whole catalogue; None if only `top_keys` is wanted.
            seen: as in `target_ranks`, rows of the whole catalogue.
            seen_offsets: as in `target_ranks`.
            first: row of the part's first item.
            num_items: V; None where the part is the whole catalogue.
            chunk_rows: as in `target_ranks`.
            cosine: as in `target_ranks`.

        Raises:
            ValueError: shapes that contradict each other, or `chunk_rows` below 1.
            IndexError: a target or seen item that is not a row of the catalogue.
        """
        if queries.dim() != 2 or table.dim() != 2 or queries.shape[1] != table.shape[1]:
            raise ValueError(f"queries {list(queries.shape)} and table {list(table.shape)} must be [B, D] and [V, D]")
        num_users, num_rows = queries.shape[0], table.shape[0]
        rows, num_items = range(first, first + num_rows), num_rows if num_items is None else num_items
        if first < 0 or rows.stop > num_items:
            raise ValueError(f"rows {first}..{rows.stop - 1} are no part of a catalogue of {num_items} items")
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
        _check_rows("seen item", seen, num_items)
        if targets is not None:
            _check_rows("target", targets, num_items)
        most = chunk_rows or max(CHUNK_BYTES // (4 * max(num_users, _MIN_USERS)), 1)
        # Chunks of equal size: a remainder of a few rows would cost as much as a whole one.
        count = max(-(-num_rows // most), 1)
        chunk_rows = -(-max(num_rows, 1) // (count * _ROW_MULTIPLE)) * _ROW_MULTIPLE
        excluded = _Pairs.of(users, seen, num_users, rows, chunk_rows)
        if targets is not None:
            # The target is no rival of itself: it joins the excluded pairs, so one scatter masks both.
            excluded = excluded.with_targets(targets)
        padded = pad(queries.float(), (0, 0, 0, max(_MIN_USERS - num_users, 0)))
        return cls(rows, num_users, num_items, padded, table, targets, excluded, chunk_rows, cosine)

    @torch.no_grad()
    def target_scores(self) -> Tensor:
        """Float32 [B], each target's score, 0 where the target lies in another part."""
        targets = self._own_targets()
        if not self.rows:
            return self._queries.new_zeros(self.num_users)
        rows = (targets - self.rows.start).clamp(0, len(self.rows) - 1)
        parts = [self._queries.new_empty(0)]
        for start in range(0, self.num_users, self._chunk_rows):
            part = rows[start : start + self._chunk_rows]
            # The whole product of which the diagonal is wanted: only its shape makes these bits equal those in `_chunks`.
            product = self._product(self._table[part])
            parts.append(product[start : start + part.shape[0]].diagonal())
        inside = (targets >= self.rows.start) & (targets < self.rows.stop)
        return torch.where(inside, torch.cat(parts), 0.0)

    @torch.no_grad()
    def count_before(self, scores: Tensor) -> Tensor:
        """Counts this part's unseen items that stand before each target.

        Args:
            scores: float32 [B], the targets' scores.

        Returns:
            int64 [2, B]: how many, and whether a NaN was met (above 0).
        """
        targets = self._own_targets()
        threshold, row = scores[:, None], targets[:, None]
        before, damaged = torch.zeros_like(targets), scores.isnan()
        for start, rivals, rows in self._chunks():
            users, columns = self._excluded.within(start)
            rivals[users, columns] = -torch.inf  # may hide a NaN of an excluded item, which must not count
            damaged |= rivals.amax(1).isnan()  # amax hands NaN on
            ahead = torch.where(rows < row, rivals >= threshold, rivals > threshold)
            ahead[users, columns] = False  # a target whose own score is -inf ties with the masked ones
            before += ahead.sum(1)
        return torch.stack([before, damaged.long()])

    def ranks(self, counts: Tensor) -> Tensor:
        """Int64 [B], the targets' ranks, from the sum of all parts' `count_before`."""
        return torch.where(counts[1] > 0, self.num_items - self._excluded.distinct_per_user(), counts[0])

    @torch.no_grad()
    def top_keys(self, k: int) -> Tensor:
        """Int64 [B, k], keys of this part's k best unseen items, in no order; `best_of` reads them.

        Raises:
            ValueError: if k is below 1.
        """
        if k < 1:
            raise ValueError(f"turbogr::top_items: k is {k}, must be at least 1")
        best = torch.full((self.num_users, k), _ABSENT, dtype=torch.int64, device=self._queries.device)
        for start, scores, rows in self._chunks():
            keys = _pack(scores, rows)
            keys[self._excluded.within(start)] = _ABSENT
            candidates = keys.topk(min(k, keys.shape[1]), dim=1, sorted=False).values
            best = torch.cat([best, candidates], dim=1).topk(k, dim=1, sorted=False).values
        return best

    def _own_targets(self) -> Tensor:
        if self._targets is None:
            raise ValueError("the part was made without targets")
        return self._targets

    def _chunks(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields (first row, scores float32 [B, c], rows int64 [c]) with c <= `_chunk_rows`."""
        for start in range(0, len(self.rows), self._chunk_rows):
            part = self._table[start : start + self._chunk_rows]
            first = self.rows.start + start
            rows = torch.arange(first, first + part.shape[0], device=part.device)
            yield first, self._product(part)[: self.num_users, : part.shape[0]], rows

    def _product(self, vectors: Tensor) -> Tensor:
        padded = pad(vectors.float(), (0, 0, 0, self._chunk_rows - vectors.shape[0]))
        if self._cosine:
            padded = normalised(padded)  # after padding: the shapes that a row's bits are known not to depend on
        with torch.autocast(self._queries.device.type, enabled=False):  # else a mixed-precision run would rank bfloat16 scores
            return self._queries @ padded.T


def best_of(keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best items among those of all parts' `CataloguePart.top_keys`.

    Args:
        keys: int64 [B, n], the parts' keys side by side, n >= k.
        k: items wanted.

    Returns:
        Scores float32 [B, k] and rows int64 [B, k], as `top_items` returns them.
    """
    return _unpack(keys.topk(k, dim=1).values)


def _check_rows(name: str, rows: Tensor, num_rows: int) -> None:
    if rows.dtype != torch.int64:
        raise ValueError(f"{name} rows are {rows.dtype}, expected torch.int64")
    if rows.numel():
        low, high = (int(x) for x in torch.aminmax(rows))
        if low < 0 or high >= num_rows:
            raise IndexError(f"{name} {low if low < 0 else high} is outside the catalogue's rows 0..{num_rows - 1}")


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
