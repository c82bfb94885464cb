"""`turbogr::negative_logits`: scores of each token against its own sampled rows, without a [T, R, D] tensor.

    logits[t, r] = output[t] . rows[index[t, r]]

Implementations: C++ for float32 on the CPU (`kernels/cpu/negative_logits.cpp`), which reads the rows where they lie; PyTorch
for everything else; the formula itself in float64. PyTorch gathers the embeddings of a segment of tokens, uses and drops them,
and sums both gradients as weighted bags, for which nothing is expanded. With few distinct rows U it multiplies a segment of
tokens with all of them and picks R scores a token; the gradient of the rows is then a matrix product with scattered weights.
Nothing but the inputs is kept for backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.jagged import check_devices, without_autocast
from turbogr.ops.negative_logits_native import KERNEL, SampledRows, outside
from turbogr.ops.registry import register_loadable

OPERATOR = "turbogr::negative_logits"

DENSE_ROWS_PER_SAMPLE = 8
"""Products with all rows win while U is at most this many times R (measured on a CPU at D = 50, 64 and 128)."""

SEGMENT_BYTES = 4 << 20
"""Bytes of one segment's temporary: small enough to stay in cache, large enough to keep the cores busy."""


def negative_logits(output: Tensor, rows: Tensor, index: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Scores of the module's docstring; differentiates `output` and `rows`.

    Args:
        output: float [T, D].
        rows: float [U, D], the distinct rows.
        index: int64 or int32 [T, R], row of each sample, in [0, U).
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [T, R].

    Raises:
        ValueError: if shapes or dtypes contradict each other, or devices differ.
        IndexError: if an index on the CPU is not a row; the message names the first one.
        ConfigurationError: if `backend` is unknown, or is `cpp` and the inputs are not float32 on the CPU.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    index = checked_samples(OPERATOR, output, rows, index)
    if backend == "reference":
        check_rows(OPERATOR, "index", index, rows.shape[0])
        return negative_logits_reference(output, rows, index).to(output.dtype)
    with without_autocast(output):
        return _negative_logits(output, rows, index, backend)


def negative_logits_reference(output: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """The formula in float64 with everything materialised: the oracle."""
    return torch.einsum("td,trd->tr", output.double(), rows.double()[index.long()])


def checked_samples(operator: str, output: Tensor, rows: Tensor, index: Tensor, name: str = "index") -> Tensor:
    """`index` as int64 [T, R], if it fits output [T, D] and rows [U, D]; its values are not looked at.

    Raises:
        ValueError: names the operator, the argument and what was found.
    """
    if output.dim() != 2 or rows.dim() != 2 or output.shape[1] != rows.shape[1] or output.dtype != rows.dtype:
        raise ValueError(
            f"{operator}: output [T, D] and rows [U, D] share D and dtype; "
            f"got {output.dtype} {list(output.shape)} and {rows.dtype} {list(rows.shape)}"
        )
    if not output.is_floating_point():
        raise ValueError(f"{operator}: output and rows are of a floating dtype; got {output.dtype}")
    if index.dim() != 2 or index.shape[0] != output.shape[0] or index.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{operator}: {name} is int64 or int32 [T, R] with T = {output.shape[0]}; got {index.dtype} {list(index.shape)}"
        )
    check_devices(operator, output=output, rows=rows, **{name: index})
    return index.long()


def check_rows(operator: str, name: str, index: Tensor, num_rows: int) -> None:
    """Raises IndexError, which names the first one, if an index is not a row. On the CPU only: a device would be waited for."""
    if index.device.type == "cpu" and index.numel():
        low, high = torch.aminmax(index)
        if int(low) < 0 or int(high) >= num_rows:
            place = tuple(((index < 0) | (index >= num_rows)).nonzero()[0].tolist())
            raise IndexError(outside(operator, f"{name}[{', '.join(map(str, place))}]", int(index[place]), num_rows))


def sample_logits(output: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """[T, R]: the formula, in PyTorch."""
    logits = output.new_empty(index.shape)
    samples, width = index.shape[1], rows.shape[1]
    if _dense(rows.shape[0], index):
        for part in _segments(len(index), rows.shape[0] * output.element_size()):
            torch.gather(output[part] @ rows.T, 1, index[part], out=logits[part])
    else:
        for part in _segments(len(index), samples * width * output.element_size()):
            sampled = rows.index_select(0, index[part].reshape(-1)).view(part.stop - part.start, samples, width)
            # The vector on the left: products of many small matrices with a column are several times slower on a CPU.
            torch.bmm(output[part].unsqueeze(1), sampled.transpose(1, 2), out=logits[part].unsqueeze(1))
    return logits


def weighted_rows(weights: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """[T, D]: sum over r of weights[t, r] * rows[index[t, r]], in PyTorch."""
    if not index.numel():
        return rows.new_zeros(len(index), rows.shape[1])
    return F.embedding_bag(index, rows, per_sample_weights=weights, mode="sum")


def row_sums(weights: Tensor, output: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """[U, D]: sum over the samples (t, r) of each row of weights[t, r] * output[t], in PyTorch."""
    if not index.numel():
        return output.new_zeros(num_rows, output.shape[1])
    if _dense(num_rows, index):
        sums = output.new_zeros(num_rows, output.shape[1])
        for part in _segments(len(index), num_rows * weights.element_size()):
            scattered = weights.new_zeros(part.stop - part.start, num_rows).scatter_add_(1, index[part], weights[part])
            sums.addmm_(scattered.T, output[part])
        return sums
    # One bag of tokens a row. Narrow integers are sorted in half the time.
    flat = index.flatten()
    ordered, order = (flat.int() if num_rows <= torch.iinfo(torch.int32).max else flat).sort(stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(num_rows + 1, dtype=ordered.dtype, device=ordered.device))
    weight = weights.flatten().index_select(0, order)
    tokens = order.div_(index.shape[1], rounding_mode="floor")
    return F.embedding_bag(tokens, output, offsets, mode="sum", per_sample_weights=weight, include_last_offset=True)


def _dense(num_rows: int, index: Tensor) -> bool:
    return num_rows <= DENSE_ROWS_PER_SAMPLE * index.shape[1]


def _segments(tokens: int, bytes_per_token: int) -> Iterator[slice]:
    step = max(1, SEGMENT_BYTES // max(1, bytes_per_token))
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


@torch.library.custom_op(OPERATOR, mutates_args=())
def _negative_logits(output: Tensor, rows: Tensor, index: Tensor, backend: str = "auto") -> Tensor:
    library = kernel_for(KERNEL, OPERATOR, backend, output)
    if library is not None:
        return SampledRows(OPERATOR, library, rows.shape[0], index, None, output, rows).logits()
    check_rows(OPERATOR, "index", index, rows.shape[0])
    return sample_logits(output, rows, index)


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _negative_logits_backward(
    gradient: Tensor, output: Tensor, rows: Tensor, index: Tensor, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    library = kernel_for(KERNEL, OPERATOR, backend, output)
    if library is not None:
        samples = SampledRows(OPERATOR, library, rows.shape[0], index, None, output, rows)
        return samples.weighted_rows(gradient), samples.row_sums(gradient)
    check_rows(OPERATOR, "index", index, rows.shape[0])
    return weighted_rows(gradient, rows, index), row_sums(gradient, output, index, rows.shape[0])


@_negative_logits.register_fake
def _(output: Tensor, rows: Tensor, index: Tensor, backend: str = "auto") -> Tensor:
    return output.new_empty(index.shape)


@_negative_logits_backward.register_fake
def _(gradient: Tensor, output: Tensor, rows: Tensor, index: Tensor, backend: str = "auto") -> tuple[Tensor, Tensor]:
    return output.new_empty(output.shape), rows.new_empty(rows.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    ctx.save_for_backward(*inputs[:3])
    ctx.backend = inputs[3]


def _backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    return *_negative_logits_backward(gradient, *ctx.saved_tensors, ctx.backend), None, None


_negative_logits.register_autograd(_backward, setup_context=_setup_context)
register_loadable(OPERATOR, KERNEL)
