"""`turbogr::silu_split`: SiLU of a packed projection, cut into its parts (HSTU's U, V, Q, K; FuXi's likewise).

    part_1, part_2, ... = split(x * sigmoid(x), sizes)        along the last axis

The parts are tensors of their own, not views, and their gradients are written into the one gradient of x: nothing is
concatenated. x alone is kept for backward.

Implementations: C++ for float32 and narrower on the CPU (`kernels/cpu/silu_split.cpp`); PyTorch for everything else; the
formula in float64. Arithmetic is float32 at least.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.registry import register_loadable
from turbogr.ops.silu_split_native import KERNEL, native_silu_split, native_silu_split_backward

OPERATOR = "turbogr::silu_split"


def silu_split(x: Tensor, sizes: Sequence[int], *, backend: Backend = "auto") -> list[Tensor]:
    """SiLU and split of the module's docstring; differentiates x.

    Args:
        x: float [N, W].
        sizes: widths of the parts, positive, with sum W.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [N, size] for each size, contiguous.

    Raises:
        ValueError: if shapes or dtypes contradict each other.
        ConfigurationError: if `backend` is unknown, or is `cpp` and x is not a float of at most 32 bits on the CPU.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    if x.dim() != 2 or not x.is_floating_point() or sum(sizes) != x.shape[1] or min(sizes, default=0) < 1:
        raise ValueError(
            f"{OPERATOR}: x is float [N, W] and sizes are positive with sum W; got {x.dtype} {list(x.shape)} and {list(sizes)}"
        )
    if backend == "reference":
        return [part.to(x.dtype).contiguous() for part in silu_split_reference(x, sizes)]
    return _silu_split(x, list(sizes), backend)


def silu_split_reference(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The formula in float64: the oracle."""
    return list((x.double() * x.double().sigmoid()).split(list(sizes), dim=1))


def _wide(x: Tensor) -> Tensor:
    """The dtype of the arithmetic: float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# `backend` has no default below: PyTorch leaves defaults out where it compares the gradients' structure with the inputs'.
@torch.library.custom_op(OPERATOR, mutates_args=())
def _silu_split(x: Tensor, sizes: Sequence[int], backend: str) -> list[Tensor]:
    wide = _wide(x)
    library = kernel_for(KERNEL, OPERATOR, backend, wide)
    if library is not None:
        return [part.to(x.dtype) for part in native_silu_split(library, wide, sizes)]
    return [F.silu(part).contiguous() for part in x.split(list(sizes), dim=1)]


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _silu_split_backward(gradients: Sequence[Tensor | None], x: Tensor, sizes: Sequence[int], backend: str) -> Tensor:
    wide = _wide(x)
    library = kernel_for(KERNEL, OPERATOR, backend, wide)
    if library is not None:
        widened = [None if g is None else _wide(g) for g in gradients]
        return native_silu_split_backward(library, widened, wide, sizes).to(x.dtype)
    out = x.new_zeros(x.shape)
    for gradient, part, to in zip(gradients, x.split(list(sizes), dim=1), out.split(list(sizes), dim=1), strict=True):
        if gradient is not None:
            to.copy_(torch.ops.aten.silu_backward(gradient, part))
    return out


@_silu_split.register_fake
def _(x: Tensor, sizes: Sequence[int], backend: str) -> list[Tensor]:
    return [x.new_empty(x.shape[0], size) for size in sizes]


@_silu_split_backward.register_fake
def _(gradients: Sequence[Tensor | None], x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    x, ctx.sizes, ctx.backend = inputs
    ctx.save_for_backward(x)


def _backward(ctx, gradients: Sequence[Tensor | None]) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    return _silu_split_backward(list(gradients), *ctx.saved_tensors, ctx.sizes, ctx.backend), None, None


_silu_split.register_autograd(_backward, setup_context=_setup_context)
register_loadable(OPERATOR, KERNEL)
