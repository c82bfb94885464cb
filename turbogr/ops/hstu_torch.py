"""The PyTorch implementation of `turbogr::jagged_hstu_attention`, for every dtype and device and for every mask.

Dense groups of similar lengths and blocks of rows in them (`turbogr.ops.layout`); backward computes the scores again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.hstu_native import OPERATOR
from turbogr.ops.layout import Chunk, Layout
from turbogr.ops.masks import forbid
from turbogr.ops.relative import PositionTable, TimeGaps, TimeTable
from turbogr.ops.relative_attention import AttentionInputs, Gradients
from turbogr.ops.silu_torch import silu_backward


def forward(inputs: AttentionInputs, mask: str) -> Tensor:
    """Output [T, H, dv]."""
    q, k, v, offsets, position_bias, _, _, _, scale, alpha, _, _ = inputs
    layout = Layout(offsets, q.shape[1])
    queries, keys, values = (layout.spread(x) for x in (q, k, v))
    queries.mul_(alpha)
    out = torch.empty_like(values)
    position = None if position_bias is None else PositionTable(position_bias, layout)
    time = _time_table(layout, inputs)

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


def backward(gradient: Tensor, inputs: AttentionInputs, mask: str) -> Gradients:
    """Gradients of q, k, v and of both tables (empty where there is none), given that of the output."""
    q, k, v, offsets, position_bias, _, _, _, scale, alpha, _, _ = inputs
    layout = Layout(offsets, q.shape[1])
    queries, keys, values, incoming = (layout.spread(x) for x in (q, k, v, gradient))
    queries.mul_(alpha)
    incoming.mul_(scale)
    grad_q, grad_k, grad_v = torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(values)
    position = None if position_bias is None else PositionTable(position_bias, layout)
    time = _time_table(layout, inputs)

    def run(chunk: Chunk) -> None:
        scores, buckets = _scores(chunk, queries, keys, position, time)
        grad_scores = silu_backward(OPERATOR, mask, chunk, scores, (queries, keys, values), incoming, (grad_q, grad_k, grad_v))
        del scores
        _accumulate(chunk, grad_scores, buckets, position, time)

    for chunk in layout.chunks():
        run(chunk)
    grad_q.mul_(alpha)
    of_position = q.new_empty(0) if position is None else position.gradient()
    of_time = q.new_empty(0) if time is None else time.gradient()
    return layout.collect(grad_q), layout.collect(grad_k), layout.collect(grad_v), of_position, of_time


def _time_table(layout: Layout, inputs: AttentionInputs) -> TimeTable | None:
    if inputs.time is None or inputs.query_times is None or inputs.key_times is None:
        return None
    gaps = TimeGaps(layout, inputs.query_times, inputs.key_times)
    return TimeTable(inputs.time, gaps, inputs.time_unit, inputs.time_divisor)


def _scores(
    chunk: Chunk, queries: Tensor, keys: Tensor, position: PositionTable | None, time: TimeTable | None
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
    chunk: Chunk, grad_scores: Tensor, buckets: Tensor | None, position: PositionTable | None, time: TimeTable | None
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
