"""`turbogr::sampled_softmax`: the softmax loss of each token over its target and its own sampled rows.

    logits[t, s] = output[t] . rows[u] / temperature + bias[u],  u = targets[t], negatives[t, 0], negatives[t, 1], ...
    loss[t] = -log softmax(logits[t])[0], where a negative equal to the token's target is left out

With bias[u] = -log q(u), where q is the probability that a row is drawn, this is the correction of sampling bias (Yi et al.
2019, "Sampling-bias-corrected neural modeling for large corpus item recommendations", section 3; TensorFlow's
`sampled_softmax_loss`). The last `lent` negatives were drawn for other tokens (paper eq. 6): they count in the loss and give
the output its gradient, but the rows none.

One pass over a token's rows gives the loss and both derivatives that backward needs: by the products that are not lent,
[T, 1 + R - lent], and by the output, [T, D]. They are what is kept. Backward then sums the table's gradient.

Implementations: C++ for float32 on the CPU (`kernels/cpu/negative_logits.cpp`), where a token's rows are still in the cache
when they are needed the second time; PyTorch for everything else, on the parts of `turbogr.ops.negative_logits`; the formula
itself in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.jagged import check_devices, without_autocast
from turbogr.ops.negative_logits import check_rows, checked_samples, row_sums, sample_logits, weighted_rows
from turbogr.ops.negative_logits_native import KERNEL, SampledRows
from turbogr.ops.registry import register_loadable

OPERATOR = "turbogr::sampled_softmax"


def sampled_softmax(
    output: Tensor,
    rows: Tensor,
    targets: Tensor,
    negatives: Tensor,
    *,
    temperature: float,
    bias: Tensor | None = None,
    lent: int = 0,
    backend: Backend = "auto",
) -> Tensor:
    """Losses of the module's docstring; differentiates `output` and `rows`.

    Args:
        output: float [T, D].
        rows: float [U, D], the distinct rows.
        targets: int64 or int32 [T], row of each token's target, in [0, U).
        negatives: int64 or int32 [T, R], row of each sample, in [0, U); a row drawn twice counts twice.
        temperature: divides the products; positive and finite.
        bias: float [U], added to the logits of a row, the target's too; it gets no gradient. None for none.
        lent: so many of the last columns of `negatives`, 0 to R, give `rows` no gradient.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [T]; 0 for a token whose negatives are all left out.

    Raises:
        ValueError: if shapes or dtypes contradict each other, devices differ, the temperature is not positive and
            finite, `bias` asks for a gradient, or `lent` is not in 0..R.
        IndexError: if an index on the CPU is not a row; the message names the first one.
        ConfigurationError: if `backend` is unknown, or is `cpp` and the inputs are not float32 on the CPU.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    negatives = checked_samples(OPERATOR, output, rows, negatives, "negatives")
    check_devices(OPERATOR, output=output, targets=targets)
    if targets.shape != output.shape[:1] or targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{OPERATOR}: targets is int64 or int32 [T] with T = {output.shape[0]}; got {targets.dtype} {list(targets.shape)}"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"{OPERATOR}: temperature must be positive and finite, got {temperature}")
    if bias is not None:
        check_devices(OPERATOR, output=output, bias=bias)
        if bias.shape != rows.shape[:1] or not bias.is_floating_point():
            raise ValueError(f"{OPERATOR}: bias is float [U] with U = {rows.shape[0]}; got {bias.dtype} {list(bias.shape)}")
        if bias.requires_grad:
            raise ValueError(f"{OPERATOR}: bias gets no gradient; give it detached")
        bias = bias.to(output.dtype)
    if not 0 <= lent <= negatives.shape[1]:
        raise ValueError(f"{OPERATOR}: lent is within 0..R with R = {negatives.shape[1]}; got {lent}")
    targets = targets.long()
    if backend == "reference":
        check_rows(OPERATOR, "targets", targets, rows.shape[0])
        check_rows(OPERATOR, "negatives", negatives, rows.shape[0])
        return sampled_softmax_reference(output, rows, targets, negatives, temperature, bias, lent).to(output.dtype)
    with without_autocast(output):
        return _sampled_softmax(output, rows, targets, negatives, temperature, bias, lent, backend)[0]


def sampled_softmax_reference(
    output: Tensor,
    rows: Tensor,
    targets: Tensor,
    negatives: Tensor,
    temperature: float,
    bias: Tensor | None = None,
    lent: int = 0,
) -> Tensor:
    """The formula in float64 with everything materialised: the oracle."""
    samples = torch.cat([targets[:, None], negatives], dim=1).long()
    own, others = samples.split([samples.shape[1] - lent, lent], dim=1)
    gathered = torch.cat([rows.double()[own], rows.detach().double()[others]], dim=1)
    logits = torch.einsum("td,tsd->ts", output.double(), gathered) / temperature
    if bias is not None:
        logits = logits + bias.double()[samples]
    logits = torch.cat([logits[:, :1], logits[:, 1:].masked_fill(negatives == targets[:, None], -torch.inf)], dim=1)
    return -logits.log_softmax(1)[:, 0]


def _loss_and_coefficients(products: Tensor, equal: Tensor, temperature: float, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Losses [T] and their derivatives by the products [T, 1 + R], which are overwritten.

    `equal` [T, R]: left out; `bias` [T, 1 + R], added to the logits.
    """
    logits = products.div_(temperature)
    if bias is not None:
        logits += bias
    logits[:, 1:].masked_fill_(equal, -torch.inf)
    loss = logits.logsumexp(1) - logits[:, 0]
    coefficients = logits.softmax(1)
    coefficients[:, 0] = -coefficients[:, 1:].sum(1)  # softmax - 1, without its cancellation
    return loss, coefficients.div_(temperature)


@torch.library.custom_op(OPERATOR, mutates_args=())
def _sampled_softmax(
    output: Tensor,
    rows: Tensor,
    targets: Tensor,
    negatives: Tensor,
    temperature: float,
    bias: Tensor | None = None,
    lent: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    library = kernel_for(KERNEL, OPERATOR, backend, output)
    if library is not None:
        sampled = SampledRows(OPERATOR, library, rows.shape[0], negatives, targets, output, rows, bias=bias, lent=lent)
        return sampled.softmax(temperature)
    check_rows(OPERATOR, "targets", targets, rows.shape[0])
    check_rows(OPERATOR, "negatives", negatives, rows.shape[0])
    samples = torch.cat([targets[:, None], negatives], dim=1)
    products = sample_logits(output, rows, samples)
    biases = None if bias is None else bias[samples]
    loss, coefficients = _loss_and_coefficients(products, negatives == targets[:, None], temperature, biases)
    direction = weighted_rows(coefficients, rows, samples)
    return loss, _without(coefficients, lent), direction


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _sampled_softmax_backward(
    gradient: Tensor,
    output: Tensor,
    num_rows: int,
    targets: Tensor,
    negatives: Tensor,
    coefficients: Tensor,
    direction: Tensor,
    lent: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    grad_output = direction * gradient[:, None]
    library = kernel_for(KERNEL, OPERATOR, backend, output)
    if library is not None:
        sampled = SampledRows(OPERATOR, library, num_rows, negatives, targets, output, lent=lent)
        return grad_output, sampled.row_sums(coefficients, gradient)
    samples = torch.cat([targets[:, None], _without(negatives, lent)], dim=1)
    return grad_output, row_sums(coefficients * gradient[:, None], output, samples, num_rows)


def _without(samples: Tensor, lent: int) -> Tensor:
    """The columns that are not lent, in memory of their own: what is kept for backward, and an operator's result is no view."""
    return samples[:, : samples.shape[1] - lent].contiguous() if lent else samples


@_sampled_softmax.register_fake
def _(
    output: Tensor,
    rows: Tensor,
    targets: Tensor,
    negatives: Tensor,
    temperature: float,
    bias: Tensor | None = None,
    lent: int = 0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, samples = negatives.shape
    return output.new_empty(tokens), output.new_empty(tokens, 1 + samples - lent), output.new_empty(output.shape)


@_sampled_softmax_backward.register_fake
def _(gradient: Tensor, output: Tensor, num_rows: int, *rest: object) -> tuple[Tensor, Tensor]:
    return output.new_empty(output.shape), output.new_empty(num_rows, output.shape[1])


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    tokens, rows, targets, negatives, _, _, ctx.lent, ctx.backend = inputs
    _, coefficients, direction = output
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(tokens, targets, negatives, coefficients, direction)
    ctx.mark_non_differentiable(coefficients, direction)
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    if gradient is None:
        return (None,) * 8
    output, *kept = ctx.saved_tensors
    gradients = _sampled_softmax_backward(gradient, output, ctx.num_rows, *kept, ctx.lent, ctx.backend)
    return *gradients, *(None,) * 6


_sampled_softmax.register_autograd(_backward, setup_context=_setup_context)
register_loadable(OPERATOR, KERNEL)
