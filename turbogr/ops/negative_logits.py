"""`turbogr::negative_logits`: scores of each token against its own sampled rows, without a [T, R, D] tensor.

    logits[t, r] = output[t] . rows[index[t, r]]

Two ways, chosen by what they cost. *Dense*: with few distinct rows U, `output @ rows.T` for a segment of tokens is one matrix
product, from which the R scores of a token are picked; the work grows with U, but it runs at the machine's matrix rate.
*Gathered*: with many rows, the embeddings of a segment of tokens are gathered, used and dropped. Both recompute in backward, so
that what is kept is linear in T * R scores, never T * R * D.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.jagged import without_autocast
from turbogr.ops.registry import register

OPERATOR = "turbogr::negative_logits"

DENSE_ROWS_PER_SAMPLE = 24
"""Dense wins while U is at most this many times R (measured on a CPU at D = 50 and 128)."""

SEGMENT_BYTES = 4 << 20
"""Bytes of one segment's temporary: small enough to stay in cache, large enough to keep the cores busy."""


def negative_logits(output: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """Scores of the module's docstring; differentiates `output` and `rows`.

    Args:
        output: float [T, D].
        rows: float [U, D], the distinct rows.
        index: int64 [T, R], row of each sample, in [0, U).

    Returns:
        float [T, R].

    Raises:
        ValueError: if shapes or dtypes contradict each other.
    """
    if output.dim() != 2 or rows.dim() != 2 or output.shape[1] != rows.shape[1] or output.dtype != rows.dtype:
        raise ValueError(
            f"{OPERATOR}: output [T, D] and rows [U, D] share D and dtype; "
            f"got {output.dtype} {list(output.shape)} and {rows.dtype} {list(rows.shape)}"
        )
    if index.dim() != 2 or index.shape[0] != output.shape[0] or index.dtype != torch.int64:
        raise ValueError(f"{OPERATOR}: index is int64 [T, R] with T = {output.shape[0]}; got {index.dtype} {list(index.shape)}")
    with without_autocast(output):
        return _negative_logits(output, rows, index)


def negative_logits_reference(output: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """The formula in float64 with everything materialised: the oracle."""
    return torch.einsum("td,trd->tr", output.double(), rows.double()[index])


def _dense(rows: Tensor, index: Tensor) -> bool:
    return rows.shape[0] <= DENSE_ROWS_PER_SAMPLE * index.shape[1]


def _segments(tokens: int, bytes_per_token: int) -> Iterator[slice]:
    step = max(1, SEGMENT_BYTES // max(1, bytes_per_token))
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


@torch.library.custom_op(OPERATOR, mutates_args=())
def _negative_logits(output: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    logits = output.new_empty(index.shape)
    size = output.element_size()
    if _dense(rows, index):
        for part in _segments(len(index), rows.shape[0] * size):
            torch.gather(output[part] @ rows.T, 1, index[part], out=logits[part])
    else:
        for part in _segments(len(index), index.shape[1] * rows.shape[1] * size):
            sampled = rows.index_select(0, index[part].reshape(-1)).view(-1, index.shape[1], rows.shape[1])
            torch.matmul(sampled, output[part].unsqueeze(2), out=logits[part].unsqueeze(2))
    return logits


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _negative_logits_backward(gradient: Tensor, output: Tensor, rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    grad_output, grad_rows = torch.empty_like(output), torch.zeros_like(rows)
    size = output.element_size()
    if _dense(rows, index):
        for part in _segments(len(index), rows.shape[0] * size):
            scattered = rows.new_zeros(part.stop - part.start, rows.shape[0]).scatter_add_(1, index[part], gradient[part])
            torch.matmul(scattered, rows, out=grad_output[part])
            grad_rows.addmm_(scattered.T, output[part])
    else:
        for part in _segments(len(index), index.shape[1] * rows.shape[1] * size):
            sampled = rows.index_select(0, index[part].reshape(-1)).view(-1, index.shape[1], rows.shape[1])
            torch.matmul(gradient[part].unsqueeze(1), sampled, out=grad_output[part].unsqueeze(1))
        grad_rows = _row_gradient(gradient, output, index, rows.shape[0])
    return grad_output, grad_rows


def _row_gradient(gradient: Tensor, output: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Sum of gradient[t, r] * output[t] over the samples of each row: one weighted bag of tokens a row, nothing expanded."""
    flat = index.flatten()
    order = flat.argsort(stable=True)
    starts = torch.bincount(flat, minlength=num_rows).cumsum(0)
    offsets = torch.cat([starts.new_zeros(1), starts[:-1]])
    tokens = order // index.shape[1]
    return F.embedding_bag(tokens, output, offsets, mode="sum", per_sample_weights=gradient.flatten().index_select(0, order))


@_negative_logits.register_fake
def _(output: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    return output.new_empty(index.shape)


@_negative_logits_backward.register_fake
def _(gradient: Tensor, output: Tensor, rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(output), torch.empty_like(rows)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    return *_negative_logits_backward(gradient.contiguous(), *ctx.saved_tensors), None


_negative_logits.register_autograd(_backward, setup_context=_setup_context)
register(OPERATOR, "torch", "matrix product and pick for few distinct rows, gathered segments for many")
