"""`turbogr::jagged_hstu_attention`: HSTU's causal SiLU attention with relative position and time bias, on jagged tensors.

For every sequence, head h and its tokens i >= j (Zhai et al. 2024, "Actions speak louder than words", eq. 2):

    a[i, j] = SiLU(alpha * q[i, h] . k[j, h] + position_bias[i - j] + time_bias[bucket(query_times[i] - key_times[j])])
    out[i, h] = scale * sum_{j <= i} a[i, j] v[j, h]
    bucket(d) = clamp(floor(ln(max(|d| / time_unit, 1)) / time_divisor), 0, len(time_bias) - 1)

The bias is shared by all heads. There is no softmax: `scale` is usually 1 / n with the configured longest length n.

Implementations: C++ for float32 and bfloat16 on the CPU (`kernels/cpu/hstu_attention.cpp`, float32 inside but for
`products`); PyTorch for everything else, and where there is no compiler; the formula itself in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops import hstu_torch
from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.hstu_native import DTYPES, KERNEL, OPERATOR, HSTUKernel, Products, check_products
from turbogr.ops.jagged import check_attention, check_values, without_autocast
from turbogr.ops.masks import CAUSAL, backend_for_mask, forbidden
from turbogr.ops.registry import register_loadable
from turbogr.ops.relative import check_bucketing, check_table, check_times
from turbogr.ops.relative_attention import AttentionInputs, Gradients, empty_gradients, register_gradients


def jagged_hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    alpha: float = 1.0,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    query_times: Tensor | None = None,
    key_times: Tensor | None = None,
    time_unit: float = 1.0,
    time_divisor: float = 0.301,
    mask: str = CAUSAL,
    products: Products = "fp32",
    backend: Backend = "auto",
) -> Tensor:
    """Causal SiLU attention of the module's docstring; differentiates q, k, v and both bias tables.

    Args:
        q: float [T, H, dqk], queries.
        k: float [T, H, dqk], keys.
        v: float [T, H, dv], values.
        offsets: int64 or int32 [B + 1], rising from 0 to T.
        scale: factor on the output, usually 1 / max_length.
        alpha: factor on q . k.
        position_bias: float [P], bias of the distance i - j; P is at least the longest sequence.
        time_bias: float [K], bias of each bucket of time differences.
        query_times: int64 or int32 [T], the time at which token i asks (the next event's time); with time_bias only.
        key_times: int64 or int32 [T], the time of token j's own event; with time_bias only.
        time_unit: ticks of the times per unit of the bucket formula (1000 for milliseconds bucketed in seconds).
        time_divisor: width of a bucket in natural logarithms.
        mask: `causal`, or the name or import path of a mask that forbids more (`turbogr.ops.masks`).
        products: whether the C++ kernel may round the factors of matrix products to bfloat16 (`Products`); the other
            implementations do not.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [T, H, dv].

    Raises:
        ValueError: if shapes or dtypes contradict each other.
        ConfigurationError: `backend`, `mask` or `products` is unknown, or `backend` is `cpp` and the inputs are neither float32
            nor bfloat16 on the CPU, or the mask is not causal.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    check_products(OPERATOR, products)
    backend = backend_for_mask(OPERATOR, backend, mask)
    offsets = check_attention(OPERATOR, q, k, v, offsets)
    query_times, key_times = _check_bias(q, position_bias, time_bias, query_times, key_times, time_unit, time_divisor)
    if backend == "reference":
        check_values(OPERATOR, offsets, q.shape[0], position_bias)
        return jagged_hstu_attention_reference(
            q,
            k,
            v,
            offsets,
            scale=scale,
            alpha=alpha,
            position_bias=position_bias,
            time_bias=time_bias,
            query_times=query_times,
            key_times=key_times,
            time_unit=time_unit,
            time_divisor=time_divisor,
            mask=mask,
        ).to(v.dtype)
    options = (scale, alpha, time_unit, time_divisor, mask, backend, products)
    with without_autocast(q):
        return _hstu_attention(q, k, v, offsets, position_bias, time_bias, query_times, key_times, *options)


def jagged_hstu_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    alpha: float = 1.0,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    query_times: Tensor | None = None,
    key_times: Tensor | None = None,
    time_unit: float = 1.0,
    time_divisor: float = 0.301,
    mask: str = CAUSAL,
) -> Tensor:
    """The formula written down in float64, one sequence at a time: the oracle of every implementation."""
    outputs = []
    # From an empty sequence on: without any, some inputs would have no gradient instead of one of 0.
    for start, end in zip([0, *offsets[:-1].tolist()], offsets.tolist(), strict=True):
        index = torch.arange(end - start, device=q.device)
        scores = alpha * torch.einsum("ihd,jhd->hij", q[start:end].double(), k[start:end].double())
        if position_bias is not None:
            scores = scores + position_bias.double()[(index[:, None] - index[None]).clamp(min=0)]
        if time_bias is not None and query_times is not None and key_times is not None:
            gap = (query_times[start:end, None] - key_times[None, start:end]).abs().double() / time_unit
            bucket = (gap.clamp(min=1).log() / time_divisor).floor().clamp(max=len(time_bias) - 1).long()
            scores = scores + time_bias.double()[bucket]
        weights = F.silu(scores).masked_fill(forbidden(OPERATOR, mask, 0, end - start, q.device), 0.0)
        outputs.append(scale * torch.einsum("hij,jhd->ihd", weights, v[start:end].double()))
    return torch.cat(outputs)


def _check_bias(
    q: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    time_unit: float,
    time_divisor: float,
) -> tuple[Tensor | None, Tensor | None]:
    """Both times, as int64."""
    if position_bias is not None:
        check_table(OPERATOR, "position_bias", position_bias, q)
    if time_bias is None:
        return None, None
    check_table(OPERATOR, "time_bias", time_bias, q)
    check_bucketing(OPERATOR, time_unit, time_divisor)
    return check_times(OPERATOR, "time_bias", q, query_times, key_times)


@torch.library.custom_op(OPERATOR, mutates_args=())
def _hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    scale: float,
    alpha: float,
    time_unit: float,
    time_divisor: float,
    mask: str = CAUSAL,
    backend: str = "auto",
    products: str = "fp32",
) -> Tensor:
    check_values(OPERATOR, offsets, q.shape[0], position_bias)
    library = kernel_for(KERNEL, OPERATOR, backend, q, DTYPES)
    inputs = AttentionInputs(
        q, k, v, offsets, position_bias, time_bias, query_times, key_times, scale, alpha, time_unit, time_divisor
    )
    if library is not None:
        return HSTUKernel(library, inputs, products).forward()
    return hstu_torch.forward(inputs, mask)


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _hstu_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    scale: float,
    alpha: float,
    time_unit: float,
    time_divisor: float,
    mask: str = CAUSAL,
    backend: str = "auto",
    products: str = "fp32",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    library = kernel_for(KERNEL, OPERATOR, backend, q, DTYPES)
    inputs = AttentionInputs(
        q, k, v, offsets, position_bias, time_bias, query_times, key_times, scale, alpha, time_unit, time_divisor
    )
    if library is not None:
        return HSTUKernel(library, inputs, products).backward(gradient)
    return hstu_torch.backward(gradient, inputs, mask)


@_hstu_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return v.new_empty(v.shape)


@_hstu_attention_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    *rest: object,
) -> Gradients:
    return empty_gradients(q, k, v, position_bias, time_bias)


register_gradients(_hstu_attention, _hstu_attention_backward)
register_loadable(OPERATOR, KERNEL)
