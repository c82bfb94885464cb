"""The PyTorch implementation of `turbogr::jagged_hstu_attention`, for every dtype and device and for every mask.

Dense groups of similar lengths, and blocks of rows in them (`turbogr.ops.jagged`); backward computes the scores again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.jagged import LengthGroup, length_groups, row_blocks
from turbogr.ops.masks import CAUSAL, forbidden
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
    out = v.new_zeros(v.shape)
    bias = _Bias(position_bias, time_bias, query_times, key_times, time_unit, time_divisor)
    for group in length_groups(offsets, q.shape[1]):
        queries, keys, values = (group.gather(x) for x in (q, k, v))
        dense = torch.empty_like(values)
        for first, end in row_blocks(group.length):
            scores, _ = _scores(bias, group, queries, keys, first, end, alpha)
            weights = F.silu(scores, inplace=True)
            _forbid(weights, first, end, mask)
            dense[:, :, first:end] = weights @ values[:, :, :end]
        group.scatter(dense.mul_(scale), out)
    return out


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
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # Table gradients add up millions of terms: float64 costs nothing here.
    grad_position, grad_time = (_table_gradient(table, q) for table in (position_bias, time_bias))
    bias = _Bias(position_bias, time_bias, query_times, key_times, time_unit, time_divisor)
    for group in length_groups(offsets, q.shape[1]):
        queries, keys, values = (group.gather(x) for x in (q, k, v))
        grad_out = group.gather_gradient(gradient) * scale
        dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        for first, end in row_blocks(group.length):
            scores, buckets = _scores(bias, group, queries, keys, first, end, alpha)
            block_grad = grad_out[:, :, first:end]
            grad_weights = block_grad @ values[:, :, :end].transpose(2, 3)
            _forbid(grad_weights, first, end, mask)
            grad_scores = torch.ops.aten.silu_backward(grad_weights, scores)
            weights = F.silu(scores, inplace=True)
            _forbid(weights, first, end, mask)
            dv[:, :, :end] += weights.transpose(2, 3) @ block_grad
            dq[:, :, first:end] = grad_scores @ keys[:, :, :end]
            dk[:, :, :end] += grad_scores.transpose(2, 3) @ queries[:, :, first:end]
            bias.accumulate(
                grad_scores,
                buckets,
                first,
                end,
                None if position_bias is None else grad_position,
                None if time_bias is None else grad_time,
            )
        if alpha != 1.0:
            dq.mul_(alpha)
            dk.mul_(alpha)
        for dense, out in ((dq, grad_q), (dk, grad_k), (dv, grad_v)):
            group.scatter(dense, out)
    position_dtype = q.dtype if position_bias is None else position_bias.dtype
    time_dtype = q.dtype if time_bias is None else time_bias.dtype
    return grad_q, grad_k, grad_v, grad_position.to(position_dtype), grad_time.to(time_dtype)


def _forbid(block: Tensor, first: int, end: int, mask: str) -> None:
    if mask == CAUSAL:
        block[..., first:].tril_()
    else:
        block.masked_fill_(forbidden(OPERATOR, mask, first, end, block.device), 0.0)


def _scores(
    bias: _Bias, group: LengthGroup, queries: Tensor, keys: Tensor, first: int, end: int, alpha: float
) -> tuple[Tensor, Tensor | None]:
    scores = queries[:, :, first:end] @ keys[:, :, :end].transpose(2, 3)
    if alpha != 1.0:
        scores.mul_(alpha)
    block, buckets = bias.block(group, first, end)
    return (scores if block is None else scores.add_(block)), buckets


class _Bias:
    """Position and time bias of one block of rows, and the way of their gradients back into the tables."""

    def __init__(
        self,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        query_times: Tensor | None,
        key_times: Tensor | None,
        time_unit: float,
        time_divisor: float,
    ) -> None:
        self.position_bias, self.time_bias = position_bias, time_bias
        self.query_times = self.key_times = None
        if time_bias is not None and query_times is not None and key_times is not None and key_times.numel():
            # Integers, because differences must be exact; narrow ones where they suffice.
            base = torch.minimum(query_times.min(), key_times.min())
            span = torch.maximum(query_times.max(), key_times.max()) - base
            dtype = torch.int32 if int(span) < 2**31 - 1 else torch.int64
            self.query_times, self.key_times = (query_times - base).to(dtype), (key_times - base).to(dtype)
            self.buckets = TimeBucketing.of(time_bias.numel(), time_unit, time_divisor, self.key_times)

    def block(self, group: LengthGroup, first: int, end: int) -> tuple[Tensor | None, Tensor | None]:
        """Bias [G, 1, rows, end] or [rows, end] of rows first..end over keys 0..end, and its buckets int32 [G, rows, end]."""
        bias = buckets = None
        if self.time_bias is not None and self.query_times is not None and self.key_times is not None:
            asked = group.gather_times(self.query_times)[:, first:end, None]
            buckets = self.buckets(asked - group.gather_times(self.key_times)[:, None, :end])
            bias = self.time_bias.index_select(0, buckets.view(-1)).view(buckets.shape)[:, None]
        if self.position_bias is not None:
            by_distance = _toeplitz(self.position_bias, first, end)
            bias = by_distance if bias is None else bias.add_(by_distance)
        return bias, buckets

    def accumulate(
        self, gradient: Tensor, buckets: Tensor | None, first: int, end: int, position: Tensor | None, time: Tensor | None
    ) -> None:
        """Adds the score gradient [G, H, rows, end] of a block (zero above the diagonal) to the tables' gradients (float64)."""
        by_pair = gradient.sum(1)
        if time is not None and buckets is not None:
            time += torch.bincount(buckets.view(-1), by_pair.view(-1).double(), minlength=time.numel())
        if position is not None:
            _add_diagonals(by_pair.sum(0), first, end, position)


def _toeplitz(table: Tensor, first: int, end: int) -> Tensor:
    """[rows, end] with table[i - j] where i >= j (anything elsewhere): a strided view of the reversed table."""
    rows = end - first
    reversed_table = F.pad(table[:end].flip(0), (0, rows - 1))  # entry x holds table[end - 1 - x]
    return reversed_table.as_strided((rows, end), (1, 1)).flip(0)


def _add_diagonals(block: Tensor, first: int, end: int, out: Tensor) -> None:
    """Adds sum over {(i, j): i - j = d} of block [rows, end] to out[d]; block is zero where j > i."""
    rows = end - first
    # Row i, reversed and padded to a width of end + rows, then read with one column less: distances become columns.
    skewed = F.pad(block.flip(1), (0, rows)).view(-1)[: rows * (end + rows - 1)].view(rows, end + rows - 1)
    # Before skewing, column c of row r is j = end - 1 - c; after it, c' = c + r, so that d = first + r - j = c' - (rows - 1).
    out[:end] += skewed.sum(0)[rows - 1 :].to(out.dtype)


def _table_gradient(table: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros(0 if table is None else table.numel(), dtype=torch.float64, device=like.device)
