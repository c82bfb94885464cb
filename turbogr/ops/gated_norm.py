"""`turbogr::gated_norm`: norms without affine parameters, and what HSTU and FuXi make of them, in one pass.

    out = dropout(gate * norm(x), p)                  between attention and the output projection
        = dropout(norm(x), p)                         without a gate
    norm(x) = (x - mean(x)) / sqrt(var(x) + eps)      "layer": layer norm without affine parameters
            = x / sqrt(mean(x^2) + eps)               "rms": root mean square norm

over the last axis. Dropout is that of `turbogr.ops.dropout`, bit for bit. Only gate, x and the mask's seed are kept for
backward, which normalises again.

Implementations: C++ for float32 and narrower on the CPU (`kernels/cpu/gated_norm.cpp`); PyTorch for everything else; the
formula itself in float64. Arithmetic is float32 at least.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.dropout import (
    check_columns,
    check_probability,
    draw_seed,
    drop_,
    dropout_reference,
    rows_of,
    threshold_of,
)
from turbogr.ops.gated_norm_native import KERNEL, GatedNormKernel
from turbogr.ops.jagged import check_devices, without_autocast
from turbogr.ops.registry import register_loadable

OPERATOR = "turbogr::gated_norm"

Norm = Literal["layer", "rms"]


def unit_norm(x: Tensor, *, eps: float, p: float = 0.0, norm: Norm = "layer", backend: Backend = "auto") -> Tensor:
    """dropout(norm(x), p) of the module's docstring; differentiates x. Arguments and errors are those of `gated_norm`.

    Args:
        x: float [..., D].
        eps: added to the variance (the mean square with "rms").
        p: dropout probability in [0, 1); give 0 in evaluation.
        norm: "layer" or "rms".
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [..., D] in the dtype of x.
    """
    return gated_norm(None, x, eps=eps, p=p, norm=norm, backend=backend)


def gated_norm(
    gate: Tensor | None, x: Tensor, *, eps: float, p: float = 0.0, norm: Norm = "layer", backend: Backend = "auto"
) -> Tensor:
    """Gated norm of the module's docstring; differentiates gate and x.

    Args:
        gate: float [..., D], or None for no gate.
        x: float [..., D], the shape of gate.
        eps: added to the variance (the mean square with "rms").
        p: dropout probability in [0, 1); give 0 in evaluation.
        norm: "layer" or "rms".
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [..., D], in the wider of both dtypes.

    Raises:
        ValueError: if shapes or dtypes contradict each other, or p, eps or norm is impossible.
        ConfigurationError: if `backend` is unknown, or is `cpp` and the inputs are not floats of at most 32 bits on the CPU.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    check_probability(OPERATOR, p)
    given = [x] if gate is None else [gate, x]
    if not x.dim() or any(t.shape != x.shape or not t.is_floating_point() for t in given):
        found = " and ".join(f"{t.dtype} {list(t.shape)}" for t in given)
        raise ValueError(f"{OPERATOR}: gate and x are floats of one shape [..., D]; got {found}")
    check_devices(OPERATOR, x=x, gate=gate)
    if norm not in ("layer", "rms") or eps < 0:
        raise ValueError(f"{OPERATOR}: norm is layer or rms and eps not negative; got {norm!r} and {eps}")
    seed = draw_seed() if p else None
    if backend == "reference":
        return gated_norm_reference(gate, x, eps=eps, p=p, norm=norm, seed=0 if seed is None else int(seed)).to(_dtype(gate, x))
    with without_autocast(x):
        return _gated_norm(gate, x, seed, p, eps, norm == "layer", backend)


def gated_norm_reference(gate: Tensor | None, x: Tensor, *, eps: float, p: float, norm: Norm, seed: int) -> Tensor:
    """The formula in float64: the oracle."""
    away = x.double() - (x.double().mean(-1, keepdim=True) if norm == "layer" else 0)
    normed = away / (away.square().mean(-1, keepdim=True) + eps).sqrt()
    gated = normed if gate is None else gate.double() * normed
    return dropout_reference(gated, p, seed) if p else gated


def _dtype(gate: Tensor | None, x: Tensor) -> torch.dtype:
    return x.dtype if gate is None else torch.promote_types(gate.dtype, x.dtype)


def _wide(gate: Tensor | None, x: Tensor) -> tuple[Tensor | None, Tensor]:
    """Both as [N, D] in the dtype of the arithmetic."""
    dtype = torch.promote_types(_dtype(gate, x), torch.float32)
    return None if gate is None else rows_of(gate).to(dtype), rows_of(x).to(dtype)


def _kernel(
    gate: Tensor | None, x: Tensor, seed: Tensor | None, p: float, eps: float, centre: bool, backend: str
) -> GatedNormKernel | None:
    check_columns(OPERATOR, x)
    library = kernel_for(KERNEL, OPERATOR, backend, x)
    if library is None:
        return None
    mask = (0, 0, 1.0) if seed is None else (int(seed), threshold_of(p), 1 / (1 - p))
    return GatedNormKernel(library, gate, x, centre, eps, *mask)


def _normed(x: Tensor, eps: float, centre: bool) -> tuple[Tensor, Tensor]:
    """The normed rows, and the inverse of each row's deviation [N, 1]."""
    away = x - x.mean(1, keepdim=True) if centre else x
    inverse = away.square().mean(1, keepdim=True).add_(eps).rsqrt_()
    return away * inverse, inverse


@torch.library.custom_op(OPERATOR, mutates_args=())
def _gated_norm(
    gate: Tensor | None, x: Tensor, seed: Tensor | None, p: float, eps: float, centre: bool, backend: str = "auto"
) -> Tensor:
    u, a = _wide(gate, x)
    kernel = _kernel(u, a, seed, p, eps, centre, backend)
    if kernel is not None:
        out = kernel.forward()
    else:
        normed, _ = _normed(a, eps, centre)
        out = drop_(normed if u is None else normed.mul_(u), seed, p)
    return out.to(_dtype(gate, x)).view(x.shape)


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _gated_norm_backward(
    gradient: Tensor,
    gate: Tensor | None,
    x: Tensor,
    seed: Tensor | None,
    p: float,
    eps: float,
    centre: bool,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    u, a = _wide(gate, x)
    g = rows_of(gradient).to(a.dtype)
    kernel = _kernel(u, a, seed, p, eps, centre, backend)
    if kernel is not None:
        grad_gate, grad_x = kernel.backward(g)
    else:
        normed, inverse = _normed(a, eps, centre)
        g = drop_(g.clone(), seed, p)
        to_normed = g if u is None else g * u
        grad_gate = a.new_empty(0) if u is None else g.mul_(normed)
        along = (to_normed * normed).mean(1, keepdim=True)
        common = to_normed.mean(1, keepdim=True) if centre else 0
        grad_x = (to_normed - common).sub_(normed.mul_(along)).mul_(inverse)
    if gate is not None:
        grad_gate = grad_gate.to(gate.dtype).view(gate.shape)
    return grad_gate, grad_x.to(x.dtype).view(x.shape)


@_gated_norm.register_fake
def _(gate: Tensor | None, x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape, dtype=_dtype(gate, x))


@_gated_norm_backward.register_fake
def _(gradient: Tensor, gate: Tensor | None, x: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(0, dtype=wide) if gate is None else gate.new_empty(gate.shape), x.new_empty(x.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    gate, x, seed = ctx.saved_tensors  # once: a checkpoint hands them out no second time
    grad_gate, grad_x = _gated_norm_backward(gradient, gate, x, seed, *ctx.options)
    return None if gate is None else grad_gate, grad_x, None, None, None, None, None


_gated_norm.register_autograd(_backward, setup_context=_setup_context)
register_loadable(OPERATOR, KERNEL)
