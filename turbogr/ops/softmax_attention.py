"""`turbogr::jagged_softmax_attention`: causal softmax attention on jagged tensors (SASRec).

For every sequence, head h and its tokens i >= j:

    p[i, j] = softmax over j <= i of (scale * q[i, h] . k[j, h])
    out[i, h] = sum_{j <= i} p[i, j] v[j, h]
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops.jagged import check_attention, length_groups, row_blocks, without_autocast
from turbogr.ops.registry import register

OPERATOR = "turbogr::jagged_softmax_attention"


def jagged_softmax_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, scale: float) -> Tensor:
    """Causal softmax attention of the module's docstring; differentiates q, k and v.

    Args:
        q: float [T, H, dqk], queries.
        k: float [T, H, dqk], keys.
        v: float [T, H, dv], values.
        offsets: int64 [B + 1], rising from 0 to T.
        scale: factor on q . k, usually 1 / sqrt(dqk).

    Returns:
        float [T, H, dv].

    Raises:
        ValueError: if shapes or dtypes contradict each other.
    """
    offsets = check_attention(OPERATOR, q, k, v, offsets)
    with without_autocast(q):
        return _softmax_attention(q, k, v, offsets, scale)


def jagged_softmax_attention_reference(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, scale: float) -> Tensor:
    """The formula written down in float64, one sequence at a time: the oracle of every implementation."""
    outputs = [v[:0].double()]
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        scores = scale * torch.einsum("ihd,jhd->hij", q[start:end].double(), k[start:end].double())
        future = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hij,jhd->ihd", weights, v[start:end].double()))
    return torch.cat(outputs)


def _weights(queries: Tensor, keys: Tensor, first: int, end: int, scale: float) -> Tensor:
    """Softmax weights [G, H, rows, end] of rows first..end over keys 0..end."""
    scores = (queries[:, :, first:end] @ keys[:, :, :end].transpose(2, 3)).mul_(scale)
    future = torch.ones(end - first, end - first, dtype=torch.bool, device=scores.device).triu_(1)
    scores[..., first:].masked_fill_(future, -torch.inf)
    return scores.softmax(-1)


@torch.library.custom_op(OPERATOR, mutates_args=())
def _softmax_attention(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float) -> Tensor:
    out = v.new_zeros(v.shape)
    for group in length_groups(offsets, q.shape[1]):
        queries, keys, values = (group.gather(x) for x in (q, k, v))
        dense = torch.empty_like(values)
        for first, end in row_blocks(group.length):
            dense[:, :, first:end] = _weights(queries, keys, first, end, scale) @ values[:, :, :end]
        group.scatter(dense, out)
    return out


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _softmax_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for group in length_groups(offsets, q.shape[1]):
        queries, keys, values = (group.gather(x) for x in (q, k, v))
        grad_out = group.gather_gradient(gradient)
        dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        for first, end in row_blocks(group.length):
            weights = _weights(queries, keys, first, end, scale)
            block_grad = grad_out[:, :, first:end]
            grad_weights = block_grad @ values[:, :, :end].transpose(2, 3)
            grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype).mul_(scale)
            dv[:, :, :end] += weights.transpose(2, 3) @ block_grad
            dq[:, :, first:end] = grad_scores @ keys[:, :, :end]
            dk[:, :, :end] += grad_scores.transpose(2, 3) @ queries[:, :, first:end]
        for dense, out in ((dq, grad_q), (dk, grad_k), (dv, grad_v)):
            group.scatter(dense, out)
    return grad_q, grad_k, grad_v


@_softmax_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return v.new_empty(v.shape)


@_softmax_attention_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    return *_softmax_attention_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


_softmax_attention.register_autograd(_backward, setup_context=_setup_context)
register(OPERATOR, "torch", "blocks of rows with recompute; no [N, N] matrix is kept")
