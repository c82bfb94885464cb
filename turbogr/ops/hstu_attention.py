"""`turbogr::jagged_hstu_attention`: HSTU's causal SiLU attention with relative position and time bias, on jagged tensors.

For every sequence, head h and its tokens i >= j (Zhai et al. 2024, "Actions speak louder than words", eq. 2):

    a[i, j] = SiLU(alpha * q[i, h] . k[j, h] + position_bias[i - j] + time_bias[bucket(query_times[i] - key_times[j])])
    out[i, h] = scale * sum_{j <= i} a[i, j] v[j, h]
    bucket(d) = clamp(floor(ln(max(|d| / time_unit, 1)) / time_divisor), 0, len(time_bias) - 1)

The bias is shared by all heads. There is no softmax: `scale` is usually 1 / n with the configured longest length n.

Implementations: C++ for float32 on the CPU (`kernels/cpu/hstu_attention.cpp`); PyTorch for everything else, and where there is
no compiler; the formula itself in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.hstu_native import KERNEL, HSTUKernel
from turbogr.ops.jagged import LengthGroup, check_attention, length_groups, row_blocks, without_autocast
from turbogr.ops.registry import register_loadable
from turbogr.ops.time_buckets import TimeBucketing

OPERATOR = "turbogr::jagged_hstu_attention"


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
    backend: Backend = "auto",
) -> Tensor:
    """Causal SiLU attention of the module's docstring; differentiates q, k, v and both bias tables.

    Args:
        q: float [T, H, dqk], queries.
        k: float [T, H, dqk], keys.
        v: float [T, H, dv], values.
        offsets: int64 [B + 1], rising from 0 to T.
        scale: factor on the output, usually 1 / max_length.
        alpha: factor on q . k.
        position_bias: float [P], bias of the distance i - j; P is at least the longest sequence.
        time_bias: float [K], bias of each bucket of time differences.
        query_times: int64 [T], the time at which token i asks (the next event's time); with time_bias only.
        key_times: int64 [T], the time of token j's own event; with time_bias only.
        time_unit: ticks of the times per unit of the bucket formula (1000 for milliseconds bucketed in seconds).
        time_divisor: width of a bucket in natural logarithms.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [T, H, dv].

    Raises:
        ValueError: if shapes or dtypes contradict each other.
        ConfigurationError: if `backend` is unknown, or is `cpp` and the inputs are not float32 on the CPU.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    _check(q, k, v, offsets, position_bias, time_bias, query_times, key_times, time_unit, time_divisor)
    if backend == "reference":
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
        ).to(v.dtype)
    with without_autocast(q):
        return _hstu_attention(
            q, k, v, offsets, position_bias, time_bias, query_times, key_times, scale, alpha, time_unit, time_divisor, backend
        )


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
) -> Tensor:
    """The formula written down in float64, one sequence at a time: the oracle of every implementation."""
    outputs = [v[:0].double()]
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        index = torch.arange(end - start, device=q.device)
        scores = alpha * torch.einsum("ihd,jhd->hij", q[start:end].double(), k[start:end].double())
        if position_bias is not None:
            scores = scores + position_bias.double()[(index[:, None] - index[None]).clamp(min=0)]
        if time_bias is not None and query_times is not None and key_times is not None:
            gap = (query_times[start:end, None] - key_times[None, start:end]).abs().double() / time_unit
            bucket = (gap.clamp(min=1).log() / time_divisor).floor().clamp(max=len(time_bias) - 1).long()
            scores = scores + time_bias.double()[bucket]
        outputs.append(scale * torch.einsum("hij,jhd->ihd", F.silu(scores).tril(), v[start:end].double()))
    return torch.cat(outputs)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    query_times: Tensor | None,
    key_times: Tensor | None,
    time_unit: float,
    time_divisor: float,
) -> None:
    check_attention(OPERATOR, q, k, v, offsets)
    for name, table in (("position_bias", position_bias), ("time_bias", time_bias)):
        if table is not None and (table.dim() != 1 or table.numel() == 0):
            raise ValueError(f"{OPERATOR}: {name} is a table of one dimension; got {list(table.shape)}")
    if position_bias is not None and offsets.device.type == "cpu" and offsets.numel() > 1:
        longest = int(offsets.diff().max())
        if longest > position_bias.numel():
            raise ValueError(
                f"{OPERATOR}: position_bias has {position_bias.numel()} entries, the longest sequence {longest} tokens"
            )
    if time_bias is not None:
        for name, times in (("query_times", query_times), ("key_times", key_times)):
            if times is None or times.shape != q.shape[:1] or times.dtype != torch.int64:
                found = "nothing" if times is None else f"{times.dtype} {list(times.shape)}"
                raise ValueError(f"{OPERATOR}: time_bias needs {name} as int64 [{q.shape[0]}]; got {found}")
        if time_unit <= 0 or time_divisor <= 0:
            raise ValueError(f"{OPERATOR}: time_unit {time_unit} and time_divisor {time_divisor} must be positive")


class _Bias:
    """Position and time bias of one block of rows, and the way of their gradients back into the tables."""

    def __init__(
        self,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        query_times: Tensor | None,
        key_times: Tensor | None,
        time_unit: float,
        time_divisor: float,
    ) -> None:
        self.position_bias, self.time_bias = position_bias, time_bias
        self.query_times = self.key_times = None
        if time_bias is not None and query_times is not None and key_times is not None and key_times.numel():
            # Integers, because differences must be exact; narrow ones where they suffice.
            base = torch.minimum(query_times.min(), key_times.min())
            span = torch.maximum(query_times.max(), key_times.max()) - base
            dtype = torch.int32 if int(span) < 2**31 - 1 else torch.int64
            self.query_times, self.key_times = (query_times - base).to(dtype), (key_times - base).to(dtype)
            self.buckets = TimeBucketing.of(time_bias.numel(), time_unit, time_divisor, self.key_times)

    def block(self, group: LengthGroup, first: int, end: int) -> tuple[Tensor | None, Tensor | None]:
        """Bias [G, 1, rows, end] or [rows, end] of rows first..end over keys 0..end, and its buckets int32 [G, rows, end]."""
        bias = buckets = None
        if self.time_bias is not None and self.query_times is not None and self.key_times is not None:
            asked = group.gather_times(self.query_times)[:, first:end, None]
            buckets = self.buckets(asked - group.gather_times(self.key_times)[:, None, :end])
            bias = self.time_bias.index_select(0, buckets.view(-1)).view(buckets.shape)[:, None]
        if self.position_bias is not None:
            by_distance = _toeplitz(self.position_bias, first, end)
            bias = by_distance if bias is None else bias.add_(by_distance)
        return bias, buckets

    def accumulate(
        self, gradient: Tensor, buckets: Tensor | None, first: int, end: int, position: Tensor | None, time: Tensor | None
    ) -> None:
        """Adds the score gradient [G, H, rows, end] of a block (zero above the diagonal) to the tables' gradients (float64)."""
        by_pair = gradient.sum(1)
        if time is not None and buckets is not None:
            time += torch.bincount(buckets.view(-1), by_pair.view(-1).double(), minlength=time.numel())
        if position is not None:
            _add_diagonals(by_pair.sum(0), first, end, position)


def _toeplitz(table: Tensor, first: int, end: int) -> Tensor:
    """[rows, end] with table[i - j] where i >= j (anything elsewhere): a strided view of the reversed table."""
    rows = end - first
    reversed_table = F.pad(table[:end].flip(0), (0, rows - 1))  # entry x holds table[end - 1 - x]
    return reversed_table.as_strided((rows, end), (1, 1)).flip(0)


def _add_diagonals(block: Tensor, first: int, end: int, out: Tensor) -> None:
    """Adds sum over {(i, j): i - j = d} of block [rows, end] to out[d]; block is zero where j > i."""
    rows = end - first
    # Row i, reversed and padded to a width of end + rows, then read with one column less: distances become columns.
    skewed = F.pad(block.flip(1), (0, rows)).view(-1)[: rows * (end + rows - 1)].view(rows, end + rows - 1)
    # Before skewing, column c of row r is j = end - 1 - c; after it, c' = c + r, so that d = first + r - j = c' - (rows - 1).
    out[:end] += skewed.sum(0)[rows - 1 :].to(out.dtype)


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
    backend: str = "auto",
) -> Tensor:
    library = kernel_for(KERNEL, OPERATOR, backend, q)
    if library is not None:
        inputs = (q, k, v, offsets, position_bias, time_bias, query_times, key_times, scale, alpha, time_unit, time_divisor)
        return HSTUKernel(library, *inputs).forward()
    out = v.new_zeros(v.shape)
    bias = _Bias(position_bias, time_bias, query_times, key_times, time_unit, time_divisor)
    for group in length_groups(offsets, q.shape[1]):
        queries, keys, values = (group.gather(x) for x in (q, k, v))
        dense = torch.empty_like(values)
        for first, end in row_blocks(group.length):
            scores, _ = _scores(bias, group, queries, keys, first, end, alpha)
            weights = F.silu(scores, inplace=True)
            weights[..., first:].tril_()
            dense[:, :, first:end] = weights @ values[:, :, :end]
        group.scatter(dense.mul_(scale), out)
    return out


def _scores(
    bias: _Bias, group: LengthGroup, queries: Tensor, keys: Tensor, first: int, end: int, alpha: float
) -> tuple[Tensor, Tensor | None]:
    scores = queries[:, :, first:end] @ keys[:, :, :end].transpose(2, 3)
    if alpha != 1.0:
        scores.mul_(alpha)
    block, buckets = bias.block(group, first, end)
    return (scores if block is None else scores.add_(block)), buckets


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    library = kernel_for(KERNEL, OPERATOR, backend, q)
    if library is not None:
        inputs = (q, k, v, offsets, position_bias, time_bias, query_times, key_times, scale, alpha, time_unit, time_divisor)
        return HSTUKernel(library, *inputs).backward(gradient)
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # Table gradients add up millions of terms: float64 costs nothing here.
    grad_position, grad_time = (_table_gradient(table, q) for table in (position_bias, time_bias))
    bias = _Bias(position_bias, time_bias, query_times, key_times, time_unit, time_divisor)
    for group in length_groups(offsets, q.shape[1]):
        queries, keys, values = (group.gather(x) for x in (q, k, v))
        grad_out = group.gather_gradient(gradient) * scale
        dq, dk, dv = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        for first, end in row_blocks(group.length):
            scores, buckets = _scores(bias, group, queries, keys, first, end, alpha)
            block_grad = grad_out[:, :, first:end]
            grad_weights = block_grad @ values[:, :, :end].transpose(2, 3)
            grad_weights[..., first:].tril_()
            grad_scores = torch.ops.aten.silu_backward(grad_weights, scores)
            weights = F.silu(scores, inplace=True)
            weights[..., first:].tril_()
            dv[:, :, :end] += weights.transpose(2, 3) @ block_grad
            dq[:, :, first:end] = grad_scores @ keys[:, :, :end]
            dk[:, :, :end] += grad_scores.transpose(2, 3) @ queries[:, :, first:end]
            bias.accumulate(
                grad_scores,
                buckets,
                first,
                end,
                None if position_bias is None else grad_position,
                None if time_bias is None else grad_time,
            )
        if alpha != 1.0:
            dq.mul_(alpha)
            dk.mul_(alpha)
        for dense, out in ((dq, grad_q), (dk, grad_k), (dv, grad_v)):
            group.scatter(dense, out)
    position_dtype = q.dtype if position_bias is None else position_bias.dtype
    time_dtype = q.dtype if time_bias is None else time_bias.dtype
    return grad_q, grad_k, grad_v, grad_position.to(position_dtype), grad_time.to(time_dtype)


def _table_gradient(table: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros(0 if table is None else table.numel(), dtype=torch.float64, device=like.device)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    position, time = (q.new_empty(0) if table is None else torch.empty_like(table) for table in (position_bias, time_bias))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), position, time


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def _backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    saved = ctx.saved_tensors
    grad_q, grad_k, grad_v, grad_position, grad_time = _hstu_attention_backward(gradient, *saved, *ctx.options)
    position = None if saved[4] is None else grad_position
    time = None if saved[5] is None else grad_time
    return grad_q, grad_k, grad_v, None, position, time, None, None, None, None, None, None, None


_hstu_attention.register_autograd(_backward, setup_context=_setup_context)
register_loadable(OPERATOR, KERNEL)
