"""The PyTorch implementation of `turbogr::jagged_softmax_attention`, for every dtype and device and for every mask.

Dense groups of similar lengths and blocks of rows in them (`turbogr.ops.layout`); backward computes the scores again. Half
precision is computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops.layout import Chunk, Layout
from turbogr.ops.masks import forbid, forbidden
from turbogr.ops.softmax_native import OPERATOR


def computed_in(q: Tensor) -> torch.dtype:
    """The dtype of scores and of their log sums."""
    return torch.promote_types(q.dtype, torch.float32)


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float, mask: str) -> tuple[Tensor, Tensor]:
    """Output [T, H, dv], and the log of each row's sum of exponentials [T, H], infinite where a row may attend to nothing."""
    layout = Layout(offsets, q.shape[1])
    queries, keys, values = (layout.spread(x.to(computed_in(q))) for x in (q, k, v))
    queries.mul_(scale)
    out, largest, sums = torch.empty_like(values), queries.new_empty(len(queries), 1), queries.new_empty(len(queries), 1)

    def run(chunk: Chunk) -> None:
        scores = chunk.new_scores(queries)
        for block in chunk.blocks:
            of_block, of_rows = block.of_scores(scores), block.queries(largest)
            torch.bmm(block.queries(queries), block.keys(keys).mT, out=of_block)
            of_block.masked_fill_(forbidden(OPERATOR, mask, block.first, block.end, q.device), -torch.inf)
            torch.amax(of_block, 2, keepdim=True, out=of_rows)
            of_rows.masked_fill_(of_rows == -torch.inf, 0)  # a row that may attend to nothing: exp(-inf - 0) is zero
            of_block -= of_rows
        scores.exp_()
        for block in chunk.blocks:
            of_block = block.of_scores(scores)
            torch.sum(of_block, 2, keepdim=True, out=block.queries(sums))
            torch.bmm(of_block, block.keys(values), out=block.queries(out))

    for chunk in layout.chunks():
        run(chunk)  # a function of its own, so that nothing of a chunk outlives it
    sums.masked_fill_(sums == 0, torch.inf)
    return layout.collect(out.div_(sums)).to(v.dtype), layout.collect(largest.add_(sums.log_()))[..., 0]


def backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    out: Tensor,
    log_sums: Tensor,
    scale: float,
    mask: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given what forward returned and the gradient of the output."""
    layout = Layout(offsets, q.shape[1])
    queries, keys, values, incoming = (layout.spread(x.to(computed_in(q))) for x in (q, k, v, gradient))
    queries.mul_(scale)
    # What the gradients of a row's weights have in common, weighted with the weights: the output times its gradient.
    mean = (incoming * layout.spread(out.to(incoming.dtype))).sum(1, keepdim=True)
    log_sum = layout.spread(log_sums[..., None])
    grad_q, grad_k, grad_v = torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(values)

    def run(chunk: Chunk) -> None:
        scores, grad_scores = chunk.new_scores(queries), chunk.new_scores(queries)
        for block in chunk.blocks:
            of_block, grad_of_block = block.of_scores(scores), block.of_scores(grad_scores)
            torch.bmm(block.queries(queries), block.keys(keys).mT, out=of_block)
            of_block -= block.queries(log_sum)
            torch.bmm(block.queries(incoming), block.keys(values).mT, out=grad_of_block)
            grad_of_block -= block.queries(mean)
        weights = scores.exp_()
        grad_scores *= weights
        for block in chunk.blocks:
            of_block, grad_of_block = block.of_scores(weights), block.of_scores(grad_scores)
            # Forbidden scores may have overflowed in exp: they are overwritten, not multiplied.
            forbid(OPERATOR, mask, of_block, block.first)
            forbid(OPERATOR, mask, grad_of_block, block.first)
            block.add_to_keys(grad_v, of_block.mT, block.queries(incoming))
            block.add_to_keys(grad_k, grad_of_block.mT, block.queries(queries))
            torch.bmm(grad_of_block, block.keys(keys), out=block.queries(grad_q))

    for chunk in layout.chunks():
        run(chunk)
    grad_q.mul_(scale)
    return layout.collect(grad_q).to(q.dtype), layout.collect(grad_k).to(k.dtype), layout.collect(grad_v).to(v.dtype)
