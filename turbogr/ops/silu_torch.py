"""What HSTU's and FuXi's attention share in PyTorch: backward of SiLU(scores) times values, without scale."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.layout import Chunk
from turbogr.ops.masks import forbid


def silu_backward(
    operator: str,
    mask: str,
    chunk: Chunk,
    scores: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    incoming: Tensor,
    grads: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """Adds a chunk's part to the gradients of queries, keys and values.

    Args:
        operator: name for messages.
        mask: who attends to whom.
        chunk: the part of the batch.
        scores: of the chunk; overwritten.
        inputs: queries, keys and values of the layout, the queries times alpha.
        incoming: gradient of the output, times scale.
        grads: of queries (to be multiplied by alpha in the end), keys and values.

    Returns:
        The gradients of the scores, zero where attention is forbidden.
    """
    queries, keys, values = inputs
    grad_q, grad_k, grad_v = grads
    grad_scores = chunk.new_scores(scores)
    for block in chunk.blocks:
        torch.bmm(block.queries(incoming), block.keys(values).mT, out=block.of_scores(grad_scores))
    torch.ops.aten.silu_backward.grad_input(grad_scores, scores, grad_input=grad_scores)
    weights = F.silu(scores, inplace=True)
    for block in chunk.blocks:
        of_block, grad_of_block = block.of_scores(weights), block.of_scores(grad_scores)
        forbid(operator, mask, of_block, block.first)
        forbid(operator, mask, grad_of_block, block.first)
        block.add_to_keys(grad_v, of_block.mT, block.queries(incoming))
        block.add_to_keys(grad_k, grad_of_block.mT, block.queries(queries))
        torch.bmm(grad_of_block, block.keys(keys), out=block.queries(grad_q))
    return grad_scores
