"""The PyTorch implementation of `turbogr::jagged_hstu_attention`, for every dtype and device and for every mask.

Dense groups of similar lengths and blocks of rows in them (`turbogr.ops.layout`); backward computes the scores again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.layout import BLOCK_ROWS, Block, Chunk, Layout
from turbogr.ops.masks import forbid
from turbogr.ops.time_buckets import TimeBucketing

OPERATOR = "turbogr::jagged_hstu_attention"


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    scale: float,
    alpha: float,
    time_unit: float,
    time_divisor: float,
    mask: str,
) -> Tensor:
    """Output [T, H, dv]; arguments are the operator's."""
    layout = Layout(offsets, q.shape[1])
    queries, keys, values = (layout.spread(x) for x in (q, k, v))
    queries.mul_(alpha)
    out = torch.empty_like(values)
    position = None if position_bias is None else _PositionBias(position_bias, layout)
    time = _TimeBias.of(layout, time_bias, query_times, key_times, time_unit, time_divisor)

    def run(chunk: Chunk) -> None:
        scores, _ = _scores(chunk, queries, keys, position, time)
        weights = F.silu(scores, inplace=True)
        for block in chunk.blocks:
            of_block = block.of_scores(weights)
            forbid(OPERATOR, mask, of_block, block.first)
            torch.bmm(of_block, block.keys(values), out=block.queries(out))

    for chunk in layout.chunks():
        run(chunk)  # a function of its own, so that nothing of a chunk outlives it
    return layout.collect(out.mul_(scale))


def backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    scale: float,
    alpha: float,
    time_unit: float,
    time_divisor: float,
    mask: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of both tables (empty where there is none), given that of the output."""
    layout = Layout(offsets, q.shape[1])
    queries, keys, values, incoming = (layout.spread(x) for x in (q, k, v, gradient))
    queries.mul_(alpha)
    incoming.mul_(scale)
    grad_q, grad_k, grad_v = torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(values)
    position = None if position_bias is None else _PositionBias(position_bias, layout)
    time = _TimeBias.of(layout, time_bias, query_times, key_times, time_unit, time_divisor)

    def run(chunk: Chunk) -> None:
        scores, buckets = _scores(chunk, queries, keys, position, time)
        grad_scores = chunk.new_scores(scores)
        for block in chunk.blocks:
            torch.bmm(block.queries(incoming), block.keys(values).mT, out=block.of_scores(grad_scores))
        torch.ops.aten.silu_backward.grad_input(grad_scores, scores, grad_input=grad_scores)
        weights = F.silu(scores, inplace=True)
        for block in chunk.blocks:
            of_block, grad_of_block = block.of_scores(weights), block.of_scores(grad_scores)
            forbid(OPERATOR, mask, of_block, block.first)
            forbid(OPERATOR, mask, grad_of_block, block.first)
            block.add_to_keys(grad_v, of_block.mT, block.queries(incoming))
            block.add_to_keys(grad_k, grad_of_block.mT, block.queries(queries))
            torch.bmm(grad_of_block, block.keys(keys), out=block.queries(grad_q))
        del scores, weights, of_block
        _accumulate(chunk, grad_scores, buckets, position, time)

    for chunk in layout.chunks():
        run(chunk)
    grad_q.mul_(alpha)
    of_position = q.new_empty(0) if position is None else position.gradient()
    of_time = q.new_empty(0) if time is None else time.gradient()
    return layout.collect(grad_q), layout.collect(grad_k), layout.collect(grad_v), of_position, of_time


def _scores(
    chunk: Chunk, queries: Tensor, keys: Tensor, position: _PositionBias | None, time: _TimeBias | None
) -> tuple[Tensor, Tensor | None]:
    """Scores with bias of one chunk, and the buckets int32 of its pairs."""
    scores = chunk.new_scores(queries)
    bias = buckets = None
    if time is not None:
        buckets = time.buckets(chunk)
        bias = time.table.index_select(0, buckets)
    for block in chunk.blocks:
        of_block = block.of_scores(scores)
        torch.bmm(block.queries(queries), block.keys(keys).mT, out=of_block)
        if bias is not None:
            of_pairs = block.of_pairs(bias)
            if position is not None:
                of_pairs += position.block(block)
            block.by_sequence(of_block).add_(of_pairs[:, None])
        elif position is not None:
            of_block += position.block(block)
    return scores, buckets


def _accumulate(
    chunk: Chunk, grad_scores: Tensor, buckets: Tensor | None, position: _PositionBias | None, time: _TimeBias | None
) -> None:
    """Adds the gradients of a chunk's scores (zero where attention is forbidden) to those of the tables."""
    if position is None and time is None:
        return
    by_pair = grad_scores.new_empty(chunk.pairs)
    for block in chunk.blocks:
        of_pairs = block.of_pairs(by_pair)
        torch.sum(block.by_sequence(block.of_scores(grad_scores)), 1, out=of_pairs)
        if position is not None:
            position.accumulate(of_pairs, block)
    if time is not None and buckets is not None:
        time.accumulate(by_pair, buckets)


class _PositionBias:
    """The position table as one matrix with entry (r, c) = table[r + zero - c], of which every block of rows is a part.

    A block's row r is at position first + r: with its columns from zero - first on, entry (r, j) is table[first + r - j]. Above
    the diagonal, where no attention is, stands anything.
    """

    def __init__(self, table: Tensor, layout: Layout) -> None:
        longest = layout.groups[0].length if layout.groups else 0
        rows = min(longest, BLOCK_ROWS)
        self.table, self.longest, self.rows, self.width = table, longest, rows, max(longest + rows - 1, 0)
        self.zero = longest - 1
        if longest:
            # Row r is the reversed table, moved right by r. Strides cannot be negative: the rows are made in reverse.
            reversed_table = F.pad(table[:longest].flip(0), (rows - 1, rows - 1))
            self.matrix = reversed_table.as_strided((rows, self.width), (1, 1)).flip(0)
        self.sums: Tensor | None = None

    def block(self, block: Block) -> Tensor:
        """[rows, end]."""
        return self._part(self.matrix, block)

    def _part(self, matrix: Tensor, block: Block) -> Tensor:
        first = self.zero - block.first
        return matrix[: block.rows, first : first + block.end]

    def accumulate(self, by_pair: Tensor, block: Block) -> None:
        """Adds [G, rows, end], which is zero above the diagonal."""
        if self.sums is None:
            self.sums = torch.zeros_like(self.matrix, dtype=torch.promote_types(self.matrix.dtype, torch.float32))
        self._part(self.sums, block).add_(by_pair[0] if len(by_pair) == 1 else by_pair.sum(0))

    def gradient(self) -> Tensor:
        """Of the whole table: the sums along the matrix's diagonals."""
        total = torch.zeros_like(self.table)
        if self.sums is not None:
            # Each row reversed and padded, then read with one column less: entry (r, c) comes to column width - 1 - c + r.
            skewed = F.pad(self.sums.flip(1), (0, self.rows)).view(-1)[: self.rows * (self.width + self.rows - 1)]
            by_column = skewed.view(self.rows, -1).sum(0, dtype=torch.float64)
            total[: self.longest] = by_column[self.width - 1 - self.zero :][: self.longest]
        return total


class _TimeBias:
    """The time table, and the buckets of a chunk's pairs."""

    def __init__(
        self, layout: Layout, table: Tensor, query_times: Tensor, key_times: Tensor, unit: float, divisor: float
    ) -> None:
        # Integers, because differences must be exact; narrow ones where they suffice.
        ends = [end for times in (query_times, key_times) if times.numel() for end in times.aminmax()]
        base = torch.stack(ends).amin() if ends else 0
        narrow = bool(ends) and int(torch.stack(ends).amax() - base) < 2**31 - 1
        dtype = torch.int32 if narrow else torch.int64
        self.query_times, self.key_times = (layout.spread_tokens((x - base).to(dtype)) for x in (query_times, key_times))
        self.bucketing = TimeBucketing.of(table.numel(), unit, divisor, self.key_times)
        self.table = table
        # Millions of terms are added up: float64 costs nothing here.
        self.sums = torch.zeros(table.numel(), dtype=torch.float64, device=table.device)

    @classmethod
    def of(
        cls,
        layout: Layout,
        table: Tensor | None,
        query_times: Tensor | None,
        key_times: Tensor | None,
        unit: float,
        divisor: float,
    ) -> _TimeBias | None:
        """None where there is no table."""
        if table is None or query_times is None or key_times is None:
            return None
        return cls(layout, table, query_times, key_times, unit, divisor)

    def buckets(self, chunk: Chunk) -> Tensor:
        """int32, one a pair of the chunk."""
        gaps = self.key_times.new_empty(chunk.pairs)
        for block in chunk.blocks:
            asked = block.group.tokens(self.query_times)[:, block.first : block.end, None]
            torch.sub(asked, block.group.tokens(self.key_times)[:, None, : block.end], out=block.of_pairs(gaps))
        return self.bucketing(gaps)

    def accumulate(self, by_pair: Tensor, buckets: Tensor) -> None:
        """Adds the gradients of a chunk's pairs."""
        self.sums += torch.bincount(buckets, by_pair.double(), minlength=self.sums.numel())

    def gradient(self) -> Tensor:
        """Of the whole table."""
        return self.sums.to(self.table.dtype)
