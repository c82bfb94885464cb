"""The PyTorch implementation of `turbogr::jagged_fuxi_attention`, for every dtype and device and for every mask.

Dense groups of similar lengths and blocks of rows in them (`turbogr.ops.layout`); backward computes the weights again. Position
and time weights are the same for all heads: their products take the values of all heads side by side.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.layout import Block, Chunk, Layout
from turbogr.ops.masks import forbid
from turbogr.ops.relative import PositionTable, TimeGaps, TimeTable
from turbogr.ops.relative_attention import AttentionInputs, Gradients
from turbogr.ops.silu_torch import silu_backward

OPERATOR = "turbogr::jagged_fuxi_attention"

SMALLEST_DECAY = 1e-30
LARGEST_POWER = 1e30
"""Bounds that keep logarithms and products finite; beyond them every weight is 0 or its limit anyway."""


class TimeWeights(Protocol):
    """The time channel: weights of a chunk's pairs, and the way of their gradients back into its parameters."""

    def of(self, chunk: Chunk) -> Tensor:
        """float, one a pair of the chunk; remembered for `accumulate`."""

    def accumulate(self, by_pair: Tensor) -> None:
        """Takes the gradients of the last chunk's weights, zero where attention is forbidden."""

    def gradient(self) -> Tensor:
        """Of the parameters, in their shape and dtype."""


class BucketedWeights:
    """table[bucket(gap)].

    Args:
        table: the table with its buckets.
    """

    def __init__(self, table: TimeTable) -> None:
        self.table = table
        self.gradient = table.gradient

    def of(self, chunk: Chunk) -> Tensor:
        """See TimeWeights."""
        self.buckets = self.table.buckets(chunk)
        return self.table.table.index_select(0, self.buckets)

    def accumulate(self, by_pair: Tensor) -> None:
        """See TimeWeights."""
        self.table.accumulate(by_pair, self.buckets)


class FunctionalWeights:
    """amplitude * decay^((gap / unit)^exponent), in float32 at least.

    Args:
        parameters: float [3], amplitude, decay, exponent.
        gaps: of the batch.
        unit: ticks per unit of the formula.
        dtype: of q, k and v.
    """

    def __init__(self, parameters: Tensor, gaps: TimeGaps, unit: float, dtype: torch.dtype) -> None:
        self.gaps, self.unit = gaps, unit
        self.dtype, self.result_dtype = torch.promote_types(dtype, torch.float32), parameters.dtype
        self.amplitude, decay, self.exponent = parameters.double().unbind()
        self.decay = decay.clamp(min=SMALLEST_DECAY)
        self.sums = torch.zeros(3, dtype=torch.float64, device=parameters.device)

    def of(self, chunk: Chunk) -> Tensor:
        """See TimeWeights."""
        gaps = self.gaps.of(chunk).abs_()
        zero = gaps == 0
        # The logarithm of 0 is replaced before it is taken: its product with the power 0 must be 0, not NaN.
        self.log = gaps.to(self.dtype).mul_(1 / self.unit).masked_fill_(zero, 1.0).log_()
        self.power = (self.log * self.exponent.to(self.dtype)).exp_().clamp_(max=LARGEST_POWER).masked_fill_(zero, 0.0)
        self.decayed = (self.power * self.decay.log().to(self.dtype)).exp_()
        return self.decayed * self.amplitude.to(self.dtype)

    def accumulate(self, by_pair: Tensor) -> None:
        """See TimeWeights."""
        total = by_pair.to(self.dtype) * self.decayed
        self.sums[0] += total.sum(dtype=torch.float64)
        total *= self.power
        self.sums[1] += total.sum(dtype=torch.float64)
        self.sums[2] += total.mul_(self.log).sum(dtype=torch.float64)

    def gradient(self) -> Tensor:
        """See TimeWeights."""
        plain, by_power, by_log = self.sums.unbind()
        numbers = [plain, self.amplitude / self.decay * by_power, self.amplitude * self.decay.log() * by_log]
        return torch.stack(numbers).to(self.result_dtype)


def forward(inputs: AttentionInputs, functional: bool, mask: str) -> Tensor:
    """Output [T, H, 3 dv]."""
    q, k, v, offsets, position_bias, _, _, _, scale, alpha, _, _ = inputs
    layout = Layout(offsets, q.shape[1])
    queries, keys, values = (layout.spread(x) for x in (q, k, v))
    queries.mul_(alpha)
    beside = layout.spread_tokens(v.flatten(1))
    by_content, by_position, by_time = torch.empty_like(values), torch.zeros_like(beside), torch.zeros_like(beside)
    position = None if position_bias is None else PositionTable(position_bias, layout)
    time = _time_weights(layout, inputs, functional)

    def run(chunk: Chunk) -> None:
        weights = F.silu(_scores(chunk, queries, keys), inplace=True)
        time_weights = None if time is None else time.of(chunk).to(q.dtype)
        for block in chunk.blocks:
            of_block = block.of_scores(weights)
            forbid(OPERATOR, mask, of_block, block.first)
            torch.bmm(of_block, block.keys(values), out=block.queries(by_content))
            if position is not None:
                torch.matmul(_of_positions(position, block, mask, q.dtype), _seen(block, beside), out=_rows(block, by_position))
            if time_weights is not None:
                of_pairs = block.of_pairs(time_weights)
                forbid(OPERATOR, mask, of_pairs, block.first)
                torch.bmm(of_pairs, _seen(block, beside), out=_rows(block, by_time))

    for chunk in layout.chunks():
        run(chunk)  # a function of its own, so that nothing of a chunk outlives it
    tokens, heads, width = v.shape
    apart = [layout.collect_tokens(x).view(tokens, heads, width) for x in (by_position, by_time)]
    return torch.cat([*apart, layout.collect(by_content.mul_(scale))], dim=2)


def backward(gradient: Tensor, inputs: AttentionInputs, functional: bool, mask: str) -> Gradients:
    """Gradients of q, k, v, position table and time parameters (empty where there are none), given that of the output."""
    q, k, v, offsets, position_bias, _, _, _, scale, alpha, _, _ = inputs
    layout = Layout(offsets, q.shape[1])
    by_position, by_time, by_content = gradient.split(v.shape[2], dim=2)
    queries, keys, values, incoming = (layout.spread(x) for x in (q, k, v, by_content))
    queries.mul_(alpha)
    incoming.mul_(scale)
    beside, of_position, of_time = (layout.spread_tokens(x.flatten(1)) for x in (v, by_position, by_time))
    grad_q, grad_k, grad_v = torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(values)
    grad_beside = torch.zeros_like(beside)
    position = None if position_bias is None else PositionTable(position_bias, layout)
    time = _time_weights(layout, inputs, functional)

    def run(chunk: Chunk) -> None:
        scores = _scores(chunk, queries, keys)
        silu_backward(OPERATOR, mask, chunk, scores, (queries, keys, values), incoming, (grad_q, grad_k, grad_v))

    def run_position(position: PositionTable, chunk: Chunk) -> None:
        for block in chunk.blocks:
            rows = _rows(block, of_position)
            weights = _of_positions(position, block, mask, q.dtype)
            _seen(block, grad_beside).add_(weights.mT @ rows)
            by_pair = rows @ _seen(block, beside).mT
            forbid(OPERATOR, mask, by_pair, block.first)
            position.accumulate(by_pair, block)

    def run_time(time: TimeWeights, chunk: Chunk) -> None:
        weights = time.of(chunk).to(q.dtype)
        by_pair = torch.empty_like(weights)
        for block in chunk.blocks:
            rows, of_pairs, grad_of_pairs = _rows(block, of_time), block.of_pairs(weights), block.of_pairs(by_pair)
            forbid(OPERATOR, mask, of_pairs, block.first)
            _seen(block, grad_beside).baddbmm_(of_pairs.mT, rows)
            torch.bmm(rows, _seen(block, beside).mT, out=grad_of_pairs)
            forbid(OPERATOR, mask, grad_of_pairs, block.first)
        time.accumulate(by_pair)

    for chunk in layout.chunks():
        run(chunk)
        if position is not None:
            run_position(position, chunk)
        if time is not None:
            run_time(time, chunk)
    grad_q.mul_(alpha)
    grad_values = layout.collect(grad_v).add_(layout.collect_tokens(grad_beside).view(v.shape))
    grad_position = q.new_empty(0) if position is None else position.gradient()
    grad_time = q.new_empty(0) if time is None else time.gradient()
    return layout.collect(grad_q), layout.collect(grad_k), grad_values, grad_position, grad_time


def _time_weights(layout: Layout, inputs: AttentionInputs, functional: bool) -> TimeWeights | None:
    if inputs.time is None or inputs.query_times is None or inputs.key_times is None:
        return None
    gaps = TimeGaps(layout, inputs.query_times, inputs.key_times)
    if functional:
        return FunctionalWeights(inputs.time, gaps, inputs.time_unit, inputs.q.dtype)
    return BucketedWeights(TimeTable(inputs.time, gaps, inputs.time_unit, inputs.time_divisor))


def _scores(chunk: Chunk, queries: Tensor, keys: Tensor) -> Tensor:
    scores = chunk.new_scores(queries)
    for block in chunk.blocks:
        torch.bmm(block.queries(queries), block.keys(keys).mT, out=block.of_scores(scores))
    return scores


def _of_positions(position: PositionTable, block: Block, mask: str, dtype: torch.dtype) -> Tensor:
    """[rows, end], a copy."""
    weights = position.block(block).to(dtype, copy=True)
    forbid(OPERATOR, mask, weights, block.first)
    return weights


def _rows(block: Block, beside: Tensor) -> Tensor:
    """The block's rows [G, rows, H dv] of values side by side."""
    return block.group.tokens(beside)[:, block.first : block.end]


def _seen(block: Block, beside: Tensor) -> Tensor:
    """The rows that it attends to, [G, end, H dv]."""
    return block.group.tokens(beside)[:, : block.end]
