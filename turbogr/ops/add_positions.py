"""`turbogr::jagged_add_positions`: a sequence model's input, tokens plus the embedding of their position, with dropout.

    out[t] = dropout(scale * x[t] + table[t - start of t's sequence], p)

Dropout is that of `turbogr.ops.dropout`, bit for bit. Only offsets and the mask's seed are kept for backward. The gradient of a
table's row is summed in the order of the batch, whatever the number of threads.

Implementations: C++ for float32 and narrower on the CPU (`kernels/cpu/add_positions.cpp`); PyTorch for everything else; the
formula in float64. Arithmetic is float32 at least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops.add_positions_native import KERNEL, AddPositionsKernel
from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.dropout import check_columns, check_probability, draw_seed, drop_, dropout_reference, threshold_of
from turbogr.ops.jagged import as_offsets, check_devices, check_values, longest_of, without_autocast
from turbogr.ops.registry import register_loadable

OPERATOR = "turbogr::jagged_add_positions"


def jagged_add_positions(
    x: Tensor, table: Tensor, offsets: Tensor, *, scale: float = 1.0, p: float = 0.0, backend: Backend = "auto"
) -> Tensor:
    """Sum of the module's docstring; differentiates x and the table.

    Args:
        x: float [T, D], tokens.
        table: float [P, D], embeddings of the positions 0, 1, ...; P is at least the longest sequence.
        offsets: int64 or int32 [B + 1], rising from 0 to T.
        scale: factor on x.
        p: dropout probability in [0, 1); give 0 in evaluation.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [T, D], in the wider of both dtypes.

    Raises:
        ValueError: if shapes, dtypes or values contradict each other.
        ConfigurationError: if `backend` is unknown, or is `cpp` and the inputs are not floats of at most 32 bits on the CPU.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    check_probability(OPERATOR, p)
    if x.dim() != 2 or table.dim() != 2 or x.shape[1] != table.shape[1]:
        raise ValueError(f"{OPERATOR}: x is [T, D] and table [P, D]; got {list(x.shape)} and {list(table.shape)}")
    if not (x.is_floating_point() and table.is_floating_point()):
        raise ValueError(f"{OPERATOR}: x and table are of floating dtypes; got {x.dtype} and {table.dtype}")
    check_devices(OPERATOR, x=x, table=table, offsets=offsets)
    offsets = as_offsets(OPERATOR, offsets)
    seed = draw_seed() if p else None
    if backend == "reference":
        _check_values(offsets, x, table)
        seed_value = 0 if seed is None else int(seed)
        return jagged_add_positions_reference(x, table, offsets, scale=scale, p=p, seed=seed_value).to(_dtype(x, table))
    with without_autocast(x):
        return _add_positions(x, table, offsets, seed, scale, p, backend)


def jagged_add_positions_reference(x: Tensor, table: Tensor, offsets: Tensor, *, scale: float, p: float, seed: int) -> Tensor:
    """The formula in float64, one sequence at a time: the oracle."""
    parts = [x[:0].double() + table[:0].double()]
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        parts.append(scale * x[start:end].double() + table[: end - start].double())
    return dropout_reference(torch.cat(parts), p, seed) if p else torch.cat(parts)


def _check_values(offsets: Tensor, x: Tensor, table: Tensor) -> None:
    """Inside the operator, so that fake tensors pass its public function."""
    check_values(OPERATOR, offsets, x.shape[0])
    if longest_of(offsets) > table.shape[0]:
        raise ValueError(f"{OPERATOR}: table has {table.shape[0]} rows, the longest sequence {longest_of(offsets)} tokens")


def _dtype(x: Tensor, table: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, table.dtype)


def _wide(x: Tensor, like: Tensor) -> Tensor:
    """In the dtype of the arithmetic."""
    return x.to(torch.promote_types(torch.promote_types(x.dtype, like.dtype), torch.float32))


def _kernel(x: Tensor, offsets: Tensor, seed: Tensor | None, scale: float, p: float, backend: str) -> AddPositionsKernel | None:
    check_columns(OPERATOR, x)
    library = kernel_for(KERNEL, OPERATOR, backend, x)
    if library is None:
        return None
    mask = (0, 0, 1.0) if seed is None else (int(seed), threshold_of(p), 1 / (1 - p))
    return AddPositionsKernel(library, offsets, x.shape[1], scale, *mask)


def _positions(offsets: Tensor, tokens: int) -> Tensor:
    """int64 [T], the place of each token in its sequence."""
    starts = offsets[:-1].repeat_interleave(offsets.diff(), output_size=tokens)
    return torch.arange(tokens, device=offsets.device) - starts


@torch.library.custom_op(OPERATOR, mutates_args=())
def _add_positions(
    x: Tensor, table: Tensor, offsets: Tensor, seed: Tensor | None, scale: float, p: float, backend: str = "auto"
) -> Tensor:
    _check_values(offsets, x, table)
    wide, rows = _wide(x, table), _wide(table, x)
    kernel = _kernel(wide, offsets, seed, scale, p, backend)
    if kernel is not None:
        out = kernel.forward(wide, rows)
    else:
        out = drop_(rows.index_select(0, _positions(offsets, x.shape[0])).add_(wide, alpha=scale), seed, p)
    return out.to(_dtype(x, table))


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _add_positions_backward(
    gradient: Tensor, offsets: Tensor, seed: Tensor | None, positions: int, scale: float, p: float, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    g = _wide(gradient, gradient)
    kernel = _kernel(g, offsets, seed, scale, p, backend)
    if kernel is not None:
        return kernel.backward(g, positions)
    g = drop_(g.clone(), seed, p)
    grad_table = g.new_zeros(positions, g.shape[1]).index_add_(0, _positions(offsets, len(g)), g)
    return g.mul_(scale), grad_table


@_add_positions.register_fake
def _(x: Tensor, table: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape, dtype=_dtype(x, table))


@_add_positions_backward.register_fake
def _(gradient: Tensor, offsets: Tensor, seed: Tensor | None, positions: int, *rest: object) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.new_empty(gradient.shape, dtype=wide), gradient.new_empty(positions, gradient.shape[1], dtype=wide)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    x, table, offsets, seed, *ctx.options = inputs
    ctx.positions, ctx.dtypes = table.shape[0], (x.dtype, table.dtype)
    ctx.save_for_backward(offsets, seed)


def _backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    grads = _add_positions_backward(gradient, *ctx.saved_tensors, ctx.positions, *ctx.options)
    grad_x, grad_table = (g.to(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True))
    return grad_x, grad_table, None, None, None, None, None


_add_positions.register_autograd(_backward, setup_context=_setup_context)
register_loadable(OPERATOR, KERNEL)
