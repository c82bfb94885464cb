"""What HSTU's and FuXi's attention have in common as operators: their inputs, and how gradients find their way to these."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.library import CustomOpDef


class AttentionInputs(NamedTuple):
    """Inputs of an attention with position and time between pairs, in the order of the custom operators' arguments.

    Attributes:
        q: float [T, H, dqk].
        k: float [T, H, dqk].
        v: float [T, H, dv].
        offsets: int64 [B + 1].
        position_bias: float [P], or None.
        time: float [K], the table by bucket or the numbers of a time function; or None.
        query_times: int64 [T], with `time` only.
        key_times: int64 [T], with `time` only.
        scale: factor on the output of the SiLU.
        alpha: factor on q . k.
        time_unit: ticks per unit of buckets or function.
        time_divisor: width of a bucket in natural logarithms.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    offsets: Tensor
    position_bias: Tensor | None
    time: Tensor | None
    query_times: Tensor | None
    key_times: Tensor | None
    scale: float
    alpha: float
    time_unit: float
    time_divisor: float


TENSORS = 8
"""So many inputs of the operators are tensors, and come first; options follow."""

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Of q, k, v, position table and time; the last two are empty where there are none."""


def register_gradients(operator: CustomOpDef, backward: Callable[..., Gradients]) -> None:
    """Tells autograd that `backward(gradient, *inputs)` gives the gradients of `operator(*inputs)`."""

    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        ctx.save_for_backward(*inputs[:TENSORS])
        ctx.options = inputs[TENSORS:]

    def back(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]  # noqa: ANN001
        saved = ctx.saved_tensors
        grad_q, grad_k, grad_v, grad_position, grad_time = backward(gradient, *saved, *ctx.options)
        position = None if saved[4] is None else grad_position
        time = None if saved[5] is None else grad_time
        return grad_q, grad_k, grad_v, None, position, time, *[None] * (2 + len(ctx.options))

    operator.register_autograd(back, setup_context=setup_context)


def empty_gradients(q: Tensor, k: Tensor, v: Tensor, position_bias: Tensor | None, time: Tensor | None) -> Gradients:
    """Gradients without values, in shape and dtype: what the shape functions of both operators' backward give."""
    position, of_time = (q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (position_bias, time))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), position, of_time
