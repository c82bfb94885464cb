"""`turbogr::jagged_softmax_attention`: causal softmax attention on jagged tensors (SASRec, Kang and McAuley 2018).

For every sequence, head h and its tokens i >= j:

    p[i, j] = softmax over j <= i of (scale * q[i, h] . k[j, h])
    out[i, h] = sum_{j <= i} p[i, j] v[j, h]

Implementations: C++ for float32 on the CPU (`kernels/cpu/softmax_attention.cpp`); PyTorch for everything else, and where there
is no compiler; the formula itself in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from turbogr.ops import softmax_torch
from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.jagged import check_attention, check_values, without_autocast
from turbogr.ops.masks import CAUSAL, backend_for_mask, forbidden
from turbogr.ops.registry import register_loadable
from turbogr.ops.softmax_native import KERNEL, OPERATOR, SoftmaxKernel


def jagged_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    mask: str = CAUSAL,
    backend: Backend = "auto",
) -> Tensor:
    """Causal softmax attention of the module's docstring; differentiates q, k and v.

    Args:
        q: float [T, H, dqk], queries.
        k: float [T, H, dqk], keys.
        v: float [T, H, dv], values.
        offsets: int64 or int32 [B + 1], rising from 0 to T.
        scale: factor on q . k, usually 1 / sqrt(dqk).
        mask: `causal`, or the name or import path of a mask that forbids more (`turbogr.ops.masks`). A token that may attend to
            nothing gets zeros.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [T, H, dv].

    Raises:
        ValueError: if shapes or dtypes contradict each other.
        ConfigurationError: `backend` or `mask` is unknown, or `backend` is `cpp` and the inputs are not float32 on the CPU
            or the mask is not causal.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    backend = backend_for_mask(OPERATOR, backend, mask)
    offsets = check_attention(OPERATOR, q, k, v, offsets)
    if backend == "reference":
        check_values(OPERATOR, offsets, q.shape[0])
        return jagged_softmax_attention_reference(q, k, v, offsets, scale=scale, mask=mask).to(v.dtype)
    with without_autocast(q):
        return _softmax_attention(q, k, v, offsets, scale, mask, backend)[0]


def jagged_softmax_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *, scale: float, mask: str = CAUSAL
) -> Tensor:
    """The formula written down in float64, one sequence at a time: the oracle of every implementation."""
    outputs = []
    # From an empty sequence on: without any, some inputs would have no gradient instead of one of 0.
    for start, end in zip([0, *offsets[:-1].tolist()], offsets.tolist(), strict=True):
        scores = scale * torch.einsum("ihd,jhd->hij", q[start:end].double(), k[start:end].double())
        hidden = forbidden(OPERATOR, mask, 0, end - start, q.device)
        alone = hidden.all(-1, keepdim=True)  # the softmax of nothing would be NaN
        weights = scores.masked_fill(hidden & ~alone, -torch.inf).softmax(-1).masked_fill(alone, 0.0)
        outputs.append(torch.einsum("hij,jhd->ihd", weights, v[start:end].double()))
    return torch.cat(outputs)


@torch.library.custom_op(OPERATOR, mutates_args=())
def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float, mask: str = CAUSAL, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The output, and the log of each row's sum of exponentials [T, H] for backward; the latter has no gradient."""
    check_values(OPERATOR, offsets, q.shape[0])
    library = kernel_for(KERNEL, OPERATOR, backend, q)
    if library is not None:
        return SoftmaxKernel(library, q, k, v, offsets, scale).forward()
    return softmax_torch.forward(q, k, v, offsets, scale, mask)


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _softmax_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    out: Tensor,
    log_sums: Tensor,
    scale: float,
    mask: str = CAUSAL,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    library = kernel_for(KERNEL, OPERATOR, backend, q)
    if library is not None:
        return SoftmaxKernel(library, q, k, v, offsets, scale).backward(gradient, out, log_sums)
    return softmax_torch.backward(gradient, q, k, v, offsets, out, log_sums, scale, mask)


@_softmax_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), q.new_empty(q.shape[:2], dtype=softmax_torch.computed_in(q))


@_softmax_attention_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    *tensors, scale, mask, backend = inputs
    ctx.options = scale, mask, backend
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    grads = _softmax_attention_backward(gradient, *ctx.saved_tensors, *ctx.options)
    return *grads, None, *[None] * len(ctx.options)


_softmax_attention.register_autograd(_backward, setup_context=_setup_context)
register_loadable(OPERATOR, KERNEL)
