"""`turbogr::l2_normalise`, the normalisation of outputs and item vectors, in one place because training and ranking must agree.

    out = x / max(||x||_2, 1e-6)        along the last axis (public HSTU code)

Implementations: C++ for float32 and narrower on the CPU (`kernels/cpu/l2_normalise.cpp`); PyTorch for everything else; the
formula in float64. Arithmetic is float32 at least.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.dropout import rows_of
from turbogr.ops.jagged import without_autocast
from turbogr.ops.normalise_native import KERNEL, native_normalise, native_normalise_backward
from turbogr.ops.registry import register_loadable

OPERATOR = "turbogr::l2_normalise"

EPS = 1e-6


def normalised(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Normalisation of the module's docstring; differentiates x. A row shorter than 1e-6 is divided by 1e-6.

    Args:
        x: float [..., D].
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [..., D] in the dtype of x.

    Raises:
        ValueError: if x is not of a floating dtype or has no axis.
        ConfigurationError: if `backend` is unknown, or is `cpp` and x is not a float of at most 32 bits on the CPU.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    if not x.is_floating_point() or not x.dim():
        raise ValueError(f"{OPERATOR}: x is float [..., D]; got {x.dtype} {list(x.shape)}")
    if backend == "reference":
        return normalised_reference(x).to(x.dtype)
    with without_autocast(x):
        return _normalise(x, backend)


def normalised_reference(x: Tensor) -> Tensor:
    """The formula in float64: the oracle."""
    return x.double() / torch.linalg.vector_norm(x.double(), dim=-1, keepdim=True).clamp(min=EPS)


def _wide(x: Tensor) -> Tensor:
    """[N, D] in the dtype of the arithmetic."""
    return rows_of(x).to(torch.promote_types(x.dtype, torch.float32))


def _like(out: Tensor, x: Tensor) -> Tensor:
    """In the dtype and shape of x."""
    out = out.to(x.dtype)
    # No view where none is needed: autograd adds another gradient to a tensor in place only if nothing else holds its storage.
    return out if out.shape == x.shape else out.view(x.shape)


@torch.library.custom_op(OPERATOR, mutates_args=())
def _normalise(x: Tensor, backend: str = "auto") -> Tensor:
    wide = _wide(x)
    library = kernel_for(KERNEL, OPERATOR, backend, wide)
    if library is not None:
        out = native_normalise(library, wide, EPS)
    else:
        out = wide / torch.linalg.vector_norm(wide, dim=1, keepdim=True).clamp_(min=EPS)
    return _like(out, x)


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _normalise_backward(gradient: Tensor, x: Tensor, backend: str = "auto") -> Tensor:
    wide, g = _wide(x), _wide(gradient)
    library = kernel_for(KERNEL, OPERATOR, backend, wide)
    if library is not None:
        out = native_normalise_backward(library, g, wide, EPS)
    else:
        length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        short, divisor = length < EPS, length.clamp(min=EPS)
        # A row that is shorter than eps is divided by a constant: nothing of its gradient is taken away.
        share = ((g * wide).sum(1, keepdim=True) / divisor.square()).masked_fill_(short, 0)
        out = (g - wide * share).div_(divisor)
    return _like(out, x)


@_normalise.register_fake
def _(x: Tensor, backend: str = "auto") -> Tensor:
    return x.new_empty(x.shape)


@_normalise_backward.register_fake
def _(gradient: Tensor, x: Tensor, backend: str = "auto") -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    x, ctx.backend = inputs
    ctx.save_for_backward(x)


def _backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    return _normalise_backward(gradient, *ctx.saved_tensors, ctx.backend), None


_normalise.register_autograd(_backward, setup_context=_setup_context)
register_loadable(OPERATOR, KERNEL)
