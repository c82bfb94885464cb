"""`turbogr::negative_logits`: scores of each token against its own sampled rows, without a [T, R, D] tensor.

    logits[t, r] = factors[u] output[t] . rows[u],  u = index[t, r]        (factors are 1 where none are given)

Rows may be stored in half precision beside an output in float32 (paper section 4.3, "jagged FP16"): they are widened where they
are read, arithmetic is float32, and so is their gradient. Autograd would round that to the rows' dtype; it is had from
`negative_logits_gradients` instead. With factors of 1 / max(|row|, eps) rows count as normalised, without a copy of them.

Implementations: C++ for float32 outputs on the CPU (`kernels/cpu/negative_logits.cpp`), which reads the rows where they lie;
PyTorch for everything else; the formula itself in float64. PyTorch gathers the embeddings of a segment of tokens, uses and
drops them, and sums both gradients as weighted bags, for which nothing is expanded. With few distinct rows U it multiplies a
segment of tokens with all of them and picks R scores a token; the gradient of the rows is then a matrix product with scattered
weights. Nothing but the inputs is kept for backward.
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


HALF = (torch.float16, torch.bfloat16)
"""What rows may be stored in beside an output in float32."""


def negative_logits(
    output: Tensor, rows: Tensor, index: Tensor, *, factors: Tensor | None = None, backend: Backend = "auto"
) -> Tensor:
    """Scores of the module's docstring; differentiates `output`, and `rows` where they are of its dtype and without factors.

    Args:
        output: float [T, D].
        rows: float [U, D], the distinct rows, of the output's dtype; or float16 or bfloat16 with an output in float32.
        index: int64 or int32 [T, R], row of each sample, in [0, U).
        factors: float [U] in the output's dtype, times which the rows are taken; None for 1.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [T, R] in the output's dtype.

    Raises:
        ValueError: if shapes or dtypes contradict each other, devices differ, or autograd is to differentiate factors,
            rows with factors or rows in half precision: `negative_logits_gradients` does.
        IndexError: if an index on the CPU is not a row; the message names the first one.
        ConfigurationError: if `backend` is unknown, or is `cpp` and the inputs are not float32 on the CPU.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    index = checked_samples(OPERATOR, output, rows, index, half=True)
    _check_factors(output, rows, factors)
    apart = factors is not None or rows.dtype != output.dtype
    if apart and torch.is_grad_enabled() and (rows.requires_grad or (factors is not None and factors.requires_grad)):
        raise ValueError(
            f"{OPERATOR}: autograd differentiates rows in the output's dtype and without factors only; "
            "give rows and factors detached, and take the rows' gradient from negative_logits_gradients"
        )
    if backend == "reference":
        check_rows(OPERATOR, "index", index, rows.shape[0])
        return negative_logits_reference(output, rows, index, factors).to(output.dtype)
    with without_autocast(output):
        return _negative_logits(output, rows, index, factors, backend)


def negative_logits_gradients(
    gradient: Tensor,
    output: Tensor,
    rows: Tensor,
    index: Tensor,
    *,
    factors: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Gradients of `negative_logits`, for a caller's own `torch.autograd.Function`; is not differentiated itself.

    Args:
        gradient: float [T, R], the loss's derivatives by the logits, in the output's dtype.
        output: as in `negative_logits`, and so are the others.
        rows: see there.
        index: see there.
        factors: see there.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        The derivatives by `output`, [T, D], and by the rows as they count in the products, factors[u] * rows[u], [U, D]; both
        in the output's dtype, whatever that of the rows. The latter times factors[u] are those by the rows at fixed factors;
        with factors of 1 / max(|row|, eps), they are what the derivative of normalisation takes.

    Raises:
        ValueError, IndexError, ConfigurationError, MissingDependencyError: as `negative_logits`.
    """
    check_backend(OPERATOR, backend)
    index = checked_samples(OPERATOR, output, rows, index, half=True)
    _check_factors(output, rows, factors)
    check_devices(OPERATOR, output=output, gradient=gradient)
    if gradient.shape != index.shape or gradient.dtype != output.dtype:
        raise ValueError(
            f"{OPERATOR}: gradient is {output.dtype} {list(index.shape)}, as the logits; "
            f"got {gradient.dtype} {list(gradient.shape)}"
        )
    with torch.no_grad(), without_autocast(output):
        if backend != "reference":
            return _negative_logits_backward(gradient, output, rows, index, factors, True, backend)
        check_rows(OPERATOR, "index", index, rows.shape[0])
        weights, wide = gradient.double(), _scaled(rows, factors)
        by_output = torch.einsum("tr,trd->td", weights, wide[index])
        outer = weights[:, :, None] * output.double()[:, None]
        by_rows = torch.zeros_like(wide).index_add_(0, index.flatten(), outer.flatten(0, 1))
        return by_output.to(output.dtype), by_rows.to(output.dtype)


def negative_logits_reference(output: Tensor, rows: Tensor, index: Tensor, factors: Tensor | None = None) -> Tensor:
    """The formula in float64 with everything materialised: the oracle."""
    return torch.einsum("td,trd->tr", output.double(), _scaled(rows, factors)[index.long()])


def _scaled(rows: Tensor, factors: Tensor | None) -> Tensor:
    """float64 [U, D]: the rows as they count in the products."""
    return rows.double() if factors is None else rows.double() * factors.double()[:, None]


def _check_factors(output: Tensor, rows: Tensor, factors: Tensor | None) -> None:
    if factors is None:
        return
    check_devices(OPERATOR, output=output, factors=factors)
    if factors.shape != rows.shape[:1] or factors.dtype != output.dtype:
        raise ValueError(
            f"{OPERATOR}: factors are {output.dtype} [U] with U = {rows.shape[0]}; got {factors.dtype} {list(factors.shape)}"
        )


def checked_samples(
    operator: str, output: Tensor, rows: Tensor, index: Tensor, name: str = "index", *, half: bool = False
) -> Tensor:
    """`index` as int64 [T, R], if it fits output [T, D] and rows [U, D]; its values are not looked at.

    With `half`, rows may be in half precision beside an output in float32.

    Raises:
        ValueError: names the operator, the argument and what was found.
    """
    narrow = half and rows.dtype in HALF and output.dtype == torch.float32
    if output.dim() != 2 or rows.dim() != 2 or output.shape[1] != rows.shape[1] or not (narrow or output.dtype == rows.dtype):
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


def sample_logits(output: Tensor, rows: Tensor, index: Tensor, factors: Tensor | None = None) -> Tensor:
    """[T, R] in the output's dtype: the formula, in PyTorch."""
    logits = output.new_empty(index.shape)
    samples, width = index.shape[1], rows.shape[1]
    if _dense(rows.shape[0], index):
        few = rows.to(output.dtype)
        for part in _segments(len(index), rows.shape[0] * output.element_size()):
            torch.gather(output[part] @ few.T, 1, index[part], out=logits[part])
    else:
        for part in _segments(len(index), samples * width * output.element_size()):
            sampled = (
                rows.index_select(0, index[part].reshape(-1)).view(part.stop - part.start, samples, width).to(output.dtype)
            )
            # The vector on the left: products of many small matrices with a column are several times slower on a CPU.
            torch.bmm(output[part].unsqueeze(1), sampled.transpose(1, 2), out=logits[part].unsqueeze(1))
    return logits if factors is None else logits.mul_(factors[index])


def weighted_rows(weights: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """[T, D] in the weights' dtype: sum over r of weights[t, r] * rows[index[t, r]], in PyTorch."""
    if not index.numel():
        return weights.new_zeros(len(index), rows.shape[1])
    # Bags know one dtype. A wide copy of the rows is no larger than their gradient, which backward makes next.
    return F.embedding_bag(index, rows.to(weights.dtype), per_sample_weights=weights, mode="sum")


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
def _negative_logits(
    output: Tensor, rows: Tensor, index: Tensor, factors: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    library = kernel_for(KERNEL, OPERATOR, backend, output)
    if library is not None:
        return SampledRows(OPERATOR, library, rows.shape[0], index, None, output, rows, row_factors=factors).logits()
    check_rows(OPERATOR, "index", index, rows.shape[0])
    return sample_logits(output, rows, index, factors)


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _negative_logits_backward(
    gradient: Tensor,
    output: Tensor,
    rows: Tensor,
    index: Tensor,
    factors: Tensor | None = None,
    both: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    # Unless both are asked for, the gradient of the rows is one of no rows.
    library = kernel_for(KERNEL, OPERATOR, backend, output)
    if library is not None:
        samples = SampledRows(OPERATOR, library, rows.shape[0], index, None, output, rows, row_factors=factors)
        grad_output = samples.weighted_rows(gradient)
        return grad_output, samples.row_sums(gradient) if both else output.new_empty(0, output.shape[1])
    check_rows(OPERATOR, "index", index, rows.shape[0])
    grad_output = weighted_rows(gradient if factors is None else gradient * factors[index], rows, index)
    return grad_output, row_sums(gradient, output, index, rows.shape[0]) if both else output.new_empty(0, output.shape[1])


@_negative_logits.register_fake
def _(output: Tensor, rows: Tensor, index: Tensor, factors: Tensor | None = None, backend: str = "auto") -> Tensor:
    return output.new_empty(index.shape)


@_negative_logits_backward.register_fake
def _(
    gradient: Tensor,
    output: Tensor,
    rows: Tensor,
    index: Tensor,
    factors: Tensor | None = None,
    both: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    return output.new_empty(output.shape), output.new_empty(rows.shape[0] if both else 0, rows.shape[1])


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    ctx.save_for_backward(*inputs[:4])
    ctx.backend = inputs[4]


def _backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    both = ctx.needs_input_grad[1]
    grad_output, grad_rows = _negative_logits_backward(gradient, *ctx.saved_tensors, both, ctx.backend)
    return grad_output, grad_rows if both else None, None, None, None


_negative_logits.register_autograd(_backward, setup_context=_setup_context)
register_loadable(OPERATOR, KERNEL)
