"""`turbogr::jagged_fuxi_attention`: FuXi's causal attention in three channels, on jagged tensors.

For every sequence, head h and its tokens i >= j (Ye et al. 2025, "FuXi-alpha: Scaling recommendation model with feature
interaction enhanced transformer"):

    S[i, j] = scale * SiLU(alpha * q[i, h] . k[j, h])                     semantic
    P[i, j] = position_bias[i - j]                                        position
    T[i, j] = time_bias[bucket(query_times[i] - key_times[j])]            time, bucketed (FuXi-alpha), or
              amplitude * decay^((|query_times[i] - key_times[j]| / time_unit)^exponent)      functional (FuXi-gamma)
    out[i, h] = concat(sum_j P[i, j] v[j, h], sum_j T[i, j] v[j, h], sum_j S[i, j] v[j, h])

    bucket(d) = clamp(floor(ln(max(|d| / time_unit, 1)) / time_divisor), 0, len(time_bias) - 1)

P and T are the same for all heads, raw: no activation, no scale. A channel that is not given is zero.

Implementations: C++ for float32 on the CPU (`kernels/cpu/fuxi_attention.cpp`); PyTorch for everything else, and where there is
no compiler; the formula itself in float64.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops import fuxi_torch
from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.fuxi_native import KERNEL, FuXiKernel
from turbogr.ops.fuxi_torch import OPERATOR
from turbogr.ops.jagged import check_attention, check_devices, check_values, without_autocast
from turbogr.ops.masks import CAUSAL, backend_for_mask, forbidden
from turbogr.ops.registry import register_loadable
from turbogr.ops.relative import check_bucketing, check_table, check_times
from turbogr.ops.relative_attention import AttentionInputs, Gradients, empty_gradients, register_gradients


class TimeChannel(TypedDict, total=False):
    """The operator's arguments that make up its time channel; none of them is no time channel."""

    time_bias: Tensor
    time_function: tuple[Tensor, Tensor, Tensor]
    query_times: Tensor
    key_times: Tensor
    time_unit: float
    time_divisor: float


def jagged_fuxi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    alpha: float = 1.0,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    time_function: tuple[Tensor, Tensor, Tensor] | None = None,
    query_times: Tensor | None = None,
    key_times: Tensor | None = None,
    time_unit: float = 1.0,
    time_divisor: float = 0.301,
    mask: str = CAUSAL,
    backend: Backend = "auto",
) -> Tensor:
    """Attention of the module's docstring; differentiates q, k, v, both tables and the three numbers of the time function.

    Args:
        q: float [T, H, dqk], queries.
        k: float [T, H, dqk], keys.
        v: float [T, H, dv], values.
        offsets: int64 or int32 [B + 1], rising from 0 to T.
        scale: factor on the semantic weights, usually 1 / max_length.
        alpha: factor on q . k.
        position_bias: float [P], weight of the distance i - j; P is at least the longest sequence.
        time_bias: float [K], weight of each bucket of time differences.
        time_function: amplitude, decay in (0, 1] and exponent > 0, float [] each; instead of time_bias. A difference of 0 has
            the weight `amplitude`.
        query_times: int64 or int32 [T], the time of row i; with a time channel only.
        key_times: int64 or int32 [T], the time of token j's own event; with a time channel only.
        time_unit: ticks of the times per unit of the formulas (86400 for seconds that the time function sees as days).
        time_divisor: width of a bucket in natural logarithms.
        mask: `causal`, or the name or import path of a mask that forbids more (`turbogr.ops.masks`), to all three channels.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [T, H, 3 dv]: position, time, semantic.

    Raises:
        ValueError: if shapes, dtypes or values contradict each other.
        ConfigurationError: if `backend` or `mask` is unknown, or `backend` is `cpp` and the inputs are not float32 on the CPU
            or the mask is not causal.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    backend = backend_for_mask(OPERATOR, backend, mask)
    offsets = check_attention(OPERATOR, q, k, v, offsets)
    if position_bias is not None:
        check_table(OPERATOR, "position_bias", position_bias, q)
    if time_bias is None and time_function is None:
        query_times = key_times = None
    else:
        needed_by = "time_bias" if time_function is None else "time_function"
        query_times, key_times = check_times(OPERATOR, needed_by, q, query_times, key_times)
        _check_time(q, time_bias, time_function, time_unit, time_divisor)
    if backend == "reference":
        check_values(OPERATOR, offsets, q.shape[0], position_bias)
        if time_function is not None:
            _check_function(*time_function[1:])
        return jagged_fuxi_attention_reference(
            q,
            k,
            v,
            offsets,
            scale=scale,
            alpha=alpha,
            position_bias=position_bias,
            time_bias=time_bias,
            time_function=time_function,
            query_times=query_times,
            key_times=key_times,
            time_unit=time_unit,
            time_divisor=time_divisor,
            mask=mask,
        ).to(v.dtype)
    parameters = time_bias if time_function is None else torch.stack([x.reshape(()) for x in time_function])
    options = (scale, alpha, time_unit, time_divisor, time_function is not None, mask, backend)
    with without_autocast(q):
        return _fuxi_attention(q, k, v, offsets, position_bias, parameters, query_times, key_times, *options)


def jagged_fuxi_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    scale: float,
    alpha: float = 1.0,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    time_function: tuple[Tensor, Tensor, Tensor] | None = None,
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
        values = v[start:end].double()
        scores = alpha * torch.einsum("ihd,jhd->hij", q[start:end].double(), k[start:end].double())
        position = time = torch.zeros_like(scores[0])
        if position_bias is not None:
            position = position_bias.double()[(index[:, None] - index[None]).clamp(min=0)]
        if query_times is not None and key_times is not None:
            gap = (query_times[start:end, None] - key_times[None, start:end]).abs().double() / time_unit
            if time_bias is not None:
                bucket = (gap.clamp(min=1).log() / time_divisor).floor().clamp(max=len(time_bias) - 1).long()
                time = time_bias.double()[bucket]
            elif time_function is not None:
                amplitude, decay, exponent = (x.double() for x in time_function)
                time = amplitude * decay ** (gap**exponent)
        weights = torch.stack([position.expand_as(scores), time.expand_as(scores), scale * F.silu(scores)])
        weights = weights.masked_fill(forbidden(OPERATOR, mask, 0, end - start, q.device), 0.0)
        outputs.append(torch.einsum("chij,jhd->ihcd", weights, values).flatten(2))
    return torch.cat(outputs)


def _check_time(
    q: Tensor,
    time_bias: Tensor | None,
    time_function: tuple[Tensor, Tensor, Tensor] | None,
    time_unit: float,
    time_divisor: float,
) -> None:
    check_bucketing(OPERATOR, time_unit, time_divisor)
    if time_function is None:
        if time_bias is not None:
            check_table(OPERATOR, "time_bias", time_bias, q)
        return
    if time_bias is not None:
        raise ValueError(f"{OPERATOR}: the time channel is time_bias or time_function; got both")
    if len(time_function) != 3 or any(x.numel() != 1 or not x.is_floating_point() for x in time_function):
        found = ", ".join(f"{x.dtype} {list(x.shape)}" for x in time_function)
        raise ValueError(f"{OPERATOR}: time_function is amplitude, decay and exponent, one float each; got {found}")
    check_devices(OPERATOR, q=q, **dict(zip(("amplitude", "decay", "exponent"), time_function, strict=True)))


def _check_function(decay: Tensor, exponent: Tensor) -> None:
    """Checks the values of a time function; inside the operator, so that fake tensors pass."""
    # Read on the host only: a device would have to be waited for. A NaN passes, and shows in the output.
    if decay.device.type == "cpu":
        found = float(decay.detach()), float(exponent.detach())
        if found[0] <= 0 or found[0] > 1 or found[1] <= 0:
            raise ValueError(f"{OPERATOR}: decay must lie in (0, 1] and exponent be positive; got {found[0]} and {found[1]}")


@torch.library.custom_op(OPERATOR, mutates_args=())
def _fuxi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_parameters: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    scale: float,
    alpha: float,
    time_unit: float,
    time_divisor: float,
    functional: bool,
    mask: str = CAUSAL,
    backend: str = "auto",
) -> Tensor:
    check_values(OPERATOR, offsets, q.shape[0], position_bias)
    if functional and time_parameters is not None:
        _check_function(*time_parameters[1:])
    library = kernel_for(KERNEL, OPERATOR, backend, q)
    inputs = AttentionInputs(
        q, k, v, offsets, position_bias, time_parameters, query_times, key_times, scale, alpha, time_unit, time_divisor
    )
    if library is not None:
        return FuXiKernel(library, inputs, functional).forward()
    return fuxi_torch.forward(inputs, functional, mask)


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _fuxi_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_parameters: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    scale: float,
    alpha: float,
    time_unit: float,
    time_divisor: float,
    functional: bool,
    mask: str = CAUSAL,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    library = kernel_for(KERNEL, OPERATOR, backend, q)
    inputs = AttentionInputs(
        q, k, v, offsets, position_bias, time_parameters, query_times, key_times, scale, alpha, time_unit, time_divisor
    )
    if library is not None:
        return FuXiKernel(library, inputs, functional).backward(gradient)
    return fuxi_torch.backward(gradient, inputs, functional, mask)


@_fuxi_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return v.new_empty(v.shape[0], v.shape[1], 3 * v.shape[2])


@_fuxi_attention_backward.register_fake
def _(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_parameters: Tensor | None,
    *rest: object,
) -> Gradients:
    return empty_gradients(q, k, v, position_bias, time_parameters)


register_gradients(_fuxi_attention, _fuxi_attention_backward)
register_loadable(OPERATOR, KERNEL)
