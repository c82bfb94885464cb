"""The PyTorch implementation of `turbogr::jagged_fuxi_attention`, for every dtype and device and for every mask.

Dense groups of similar lengths, and blocks of rows in them (`turbogr.ops.jagged`); backward computes the weights again.
Position and time weights are the same for all heads, so that their products take the values of all heads side by side.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.jagged import length_groups, row_blocks
from turbogr.ops.masks import CAUSAL, forbidden
from turbogr.ops.relative import TimeGaps, add_diagonals, toeplitz
from turbogr.ops.time_buckets import TimeBucketing

OPERATOR = "turbogr::jagged_fuxi_attention"

SMALLEST_DECAY = 1e-30
LARGEST_POWER = 1e30
"""Bounds that keep logarithms and products finite; beyond them every weight is 0 or its limit anyway."""


class TimeWeights(Protocol):
    """The time channel: weights of a block, and the way of their gradients back into its parameters."""

    def block(self, gaps: Tensor) -> Tensor:
        """Weights of integer gaps [G, rows, keys]; remembered for `accumulate`."""

    def accumulate(self, gradient: Tensor) -> None:
        """Takes the gradient of the last block's weights, zero where attention is forbidden."""

    def gradient(self) -> Tensor:
        """float64, shaped as the parameters."""


class BucketedWeights:
    """table[bucket(gap)].

    Args:
        table: float [K].
        unit: ticks per unit of the bucket formula.
        divisor: width of a bucket in natural logarithms.
        like: times, for their dtype and device.
    """

    def __init__(self, table: Tensor, unit: float, divisor: float, like: Tensor) -> None:
        self.table = table
        self.bucketing = TimeBucketing.of(table.numel(), unit, divisor, like)
        self.sums = torch.zeros(table.numel(), dtype=torch.float64, device=table.device)

    def block(self, gaps: Tensor) -> Tensor:
        """See TimeWeights."""
        self.buckets = self.bucketing(gaps)
        return self.table.index_select(0, self.buckets.view(-1)).view(gaps.shape)

    def accumulate(self, gradient: Tensor) -> None:
        """See TimeWeights."""
        self.sums += torch.bincount(self.buckets.view(-1), gradient.reshape(-1).double(), minlength=self.sums.numel())

    def gradient(self) -> Tensor:
        """See TimeWeights."""
        return self.sums


class FunctionalWeights:
    """amplitude * decay^((gap / unit)^exponent), in float32 at least.

    Args:
        parameters: float [3], amplitude, decay, exponent.
        unit: ticks per unit of the formula.
        dtype: of q, k and v.
    """

    def __init__(self, parameters: Tensor, unit: float, dtype: torch.dtype) -> None:
        self.unit, self.dtype = unit, torch.promote_types(dtype, torch.float32)
        self.amplitude, decay, self.exponent = parameters.double().unbind()
        self.decay = decay.clamp(min=SMALLEST_DECAY)
        self.sums = torch.zeros(3, dtype=torch.float64, device=parameters.device)

    def block(self, gaps: Tensor) -> Tensor:
        """See TimeWeights."""
        gaps = gaps.abs()
        zero = gaps == 0
        # The logarithm of 0 is replaced before it is taken: its product with the power 0 must be 0, not NaN.
        self.log = gaps.to(self.dtype).mul_(1 / self.unit).masked_fill_(zero, 1.0).log_()
        self.power = (self.log * self.exponent.to(self.dtype)).exp_().clamp_(max=LARGEST_POWER).masked_fill_(zero, 0.0)
        self.decayed = (self.power * self.decay.log().to(self.dtype)).exp_()
        return self.decayed * self.amplitude.to(self.dtype)

    def accumulate(self, gradient: Tensor) -> None:
        """See TimeWeights."""
        total = gradient.to(self.dtype) * self.decayed
        self.sums[0] += total.sum(dtype=torch.float64)
        total *= self.power
        self.sums[1] += total.sum(dtype=torch.float64)
        self.sums[2] += total.mul_(self.log).sum(dtype=torch.float64)

    def gradient(self) -> Tensor:
        """See TimeWeights."""
        plain, by_power, by_log = self.sums.unbind()
        return torch.stack([plain, self.amplitude / self.decay * by_power, self.amplitude * self.decay.log() * by_log])


class _Channels:
    """Position and time weights of blocks of rows, and the gradients of what they are made of."""

    def __init__(
        self,
        q: Tensor,
        position_bias: Tensor | None,
        time_parameters: Tensor | None,
        query_times: Tensor | None,
        key_times: Tensor | None,
        time_unit: float,
        time_divisor: float,
        functional: bool,
    ) -> None:
        self.dtype, self.position_bias = q.dtype, position_bias
        size = 0 if position_bias is None else position_bias.numel()
        self.grad_position = torch.zeros(size, dtype=torch.float64, device=q.device)
        self.time: TimeWeights | None = None
        if time_parameters is not None and query_times is not None and key_times is not None:
            self.gaps = TimeGaps.of(query_times, key_times)
            if functional:
                self.time = FunctionalWeights(time_parameters, time_unit, q.dtype)
            else:
                self.time = BucketedWeights(time_parameters, time_unit, time_divisor, self.gaps.keys)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_parameters: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    scale: float,
    alpha: float,
    time_unit: float,
    time_divisor: float,
    functional: bool,
    mask: str,
) -> Tensor:
    """Output [T, H, 3 dv]; arguments are the operator's."""
    heads, width = v.shape[1:]
    out = v.new_zeros(v.shape[0], heads, 3 * width)
    by_position, by_time, by_content = (slice(x * width, (x + 1) * width) for x in range(3))
    channels = _Channels(q, position_bias, time_parameters, query_times, key_times, time_unit, time_divisor, functional)
    for group in length_groups(offsets, heads):
        queries, keys, values = (group.gather(x) for x in (q, k, v))
        beside = values.transpose(1, 2).flatten(2)
        dense = v.new_zeros(*values.shape[:3], 3 * width)
        for first, end in row_blocks(group.length):
            rows = dense[:, :, first:end]
            weights = _cut(F.silu(_scores(queries, keys, first, end, alpha), inplace=True), first, end, mask)
            torch.mul(weights @ values[:, :, :end], scale, out=rows[..., by_content])
            if position_bias is not None:
                weights = _cut(toeplitz(position_bias, first, end).to(q.dtype), first, end, mask)
                rows[..., by_position] = _apart(weights @ beside[:, :end], heads)
            if channels.time is not None:
                weights = channels.time.block(channels.gaps.block(group, first, end)).to(q.dtype)
                rows[..., by_time] = _apart(_cut(weights, first, end, mask) @ beside[:, :end], heads)
        group.scatter(dense, out)
    return out


def backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_parameters: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    scale: float,
    alpha: float,
    time_unit: float,
    time_divisor: float,
    functional: bool,
    mask: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, position table and time parameters (empty where there are none), given that of the output."""
    heads, width = v.shape[1:]
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    channels = _Channels(q, position_bias, time_parameters, query_times, key_times, time_unit, time_divisor, functional)
    for group in length_groups(offsets, heads):
        queries, keys, values = (group.gather(x) for x in (q, k, v))
        beside = values.transpose(1, 2).flatten(2)
        by_position, by_time, by_content = group.gather_gradient(gradient).split(width, dim=3)
        by_position, by_time = (x.transpose(1, 2).flatten(2) for x in (by_position, by_time))
        by_content = by_content * scale
        dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        d_beside = torch.zeros_like(beside)
        for first, end in row_blocks(group.length):
            keys_seen, values_seen = beside[:, :end].transpose(1, 2), values[:, :, :end].transpose(2, 3)
            scores = _scores(queries, keys, first, end, alpha)
            rows = by_content[:, :, first:end]
            grad_scores = torch.ops.aten.silu_backward(_cut(rows @ values_seen, first, end, mask), scores)
            weights = _cut(F.silu(scores, inplace=True), first, end, mask)
            dv[:, :, :end] += weights.transpose(2, 3) @ rows
            dq[:, :, first:end] = grad_scores @ keys[:, :, :end]
            dk[:, :, :end] += grad_scores.transpose(2, 3) @ queries[:, :, first:end]
            if position_bias is not None:
                rows = by_position[:, first:end]
                weights = _cut(toeplitz(position_bias, first, end).to(q.dtype), first, end, mask)
                d_beside[:, :end] += weights.T @ rows
                by_pair = _cut((rows @ keys_seen).sum(0), first, end, mask)
                add_diagonals(by_pair, first, end, channels.grad_position)
            if channels.time is not None:
                rows = by_time[:, first:end]
                weights = channels.time.block(channels.gaps.block(group, first, end)).to(q.dtype)
                d_beside[:, :end] += _cut(weights, first, end, mask).transpose(1, 2) @ rows
                channels.time.accumulate(_cut(rows @ keys_seen, first, end, mask))
        if alpha != 1.0:
            dq.mul_(alpha)
            dk.mul_(alpha)
        for dense, out in ((dq, grad_q), (dk, grad_k), (dv.add_(_apart(d_beside, heads)), grad_v)):
            group.scatter(dense, out)
    grad_position = channels.grad_position.to(q.dtype if position_bias is None else position_bias.dtype)
    if time_parameters is None:
        return grad_q, grad_k, grad_v, grad_position, q.new_empty(0)
    time_sums = torch.zeros(time_parameters.shape, device=q.device) if channels.time is None else channels.time.gradient()
    return grad_q, grad_k, grad_v, grad_position, time_sums.to(time_parameters.dtype)


def _scores(queries: Tensor, keys: Tensor, first: int, end: int, alpha: float) -> Tensor:
    scores = queries[:, :, first:end] @ keys[:, :, :end].transpose(2, 3)
    return scores if alpha == 1.0 else scores.mul_(alpha)


def _apart(beside: Tensor, heads: int) -> Tensor:
    """[G, rows, H dv], the heads side by side, to [G, H, rows, dv]."""
    return beside.unflatten(2, (heads, -1)).transpose(1, 2)


def _cut(weights: Tensor, first: int, end: int, mask: str) -> Tensor:
    """Zeroes, in place, what the mask forbids to rows first..end over keys 0..end (the last two axes)."""
    if mask == CAUSAL:
        weights[..., first:].tril_()
        return weights
    return weights.masked_fill_(forbidden(OPERATOR, mask, first, end, weights.device), 0)
