"""`turbogr::sampled_softmax`: the softmax loss of each token over its target and its own sampled rows.

    logits[t] = [output[t] . rows[targets[t]], output[t] . rows[negatives[t, 0]], ...] / temperature
    loss[t] = -log softmax(logits[t])[0], where a negative equal to the token's target is left out

One pass over a token's rows gives the loss and both derivatives that backward needs: by the products, [T, 1 + R], and by the
output, [T, D]. They are what is kept. Backward then sums the table's gradient.

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
    output: Tensor, rows: Tensor, targets: Tensor, negatives: Tensor, *, temperature: float, backend: Backend = "auto"
) -> Tensor:
    """Losses of the module's docstring; differentiates `output` and `rows`.

    Args:
        output: float [T, D].
        rows: float [U, D], the distinct rows.
        targets: int64 or int32 [T], row of each token's target, in [0, U).
        negatives: int64 or int32 [T, R], row of each sample, in [0, U); a row drawn twice counts twice.
        temperature: divides the products; positive and finite.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [T]; 0 for a token whose negatives are all left out.

    Raises:
        ValueError: if shapes or dtypes contradict each other, devices differ, or the temperature is not
            positive and finite.
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
    targets = targets.long()
    if backend == "reference":
        check_rows(OPERATOR, "targets", targets, rows.shape[0])
        check_rows(OPERATOR, "negatives", negatives, rows.shape[0])
        return sampled_softmax_reference(output, rows, targets, negatives, temperature).to(output.dtype)
    with without_autocast(output):
        return _sampled_softmax(output, rows, targets, negatives, temperature, backend)[0]


def sampled_softmax_reference(output: Tensor, rows: Tensor, targets: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """The formula in float64 with everything materialised: the oracle."""
    samples = torch.cat([targets[:, None], negatives], dim=1).long()
    logits = torch.einsum("td,tsd->ts", output.double(), rows.double()[samples]) / temperature
    logits = torch.cat([logits[:, :1], logits[:, 1:].masked_fill(negatives == targets[:, None], -torch.inf)], dim=1)
    return -logits.log_softmax(1)[:, 0]


def _loss_and_coefficients(products: Tensor, equal: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Losses [T] and their derivatives by the products [T, 1 + R], which are overwritten; `equal` [T, R]: left out."""
    products[:, 1:].masked_fill_(equal, -torch.inf)
    logits = products.div_(temperature)
    loss = logits.logsumexp(1) - logits[:, 0]
    coefficients = logits.softmax(1)
    coefficients[:, 0] = -coefficients[:, 1:].sum(1)  # softmax - 1, without its cancellation
    return loss, coefficients.div_(temperature)


@torch.library.custom_op(OPERATOR, mutates_args=())
def _sampled_softmax(
    output: Tensor, rows: Tensor, targets: Tensor, negatives: Tensor, temperature: float, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    library = kernel_for(KERNEL, OPERATOR, backend, output)
    if library is not None:
        return SampledRows(OPERATOR, library, rows.shape[0], negatives, targets, output, rows).softmax(temperature)
    check_rows(OPERATOR, "targets", targets, rows.shape[0])
    check_rows(OPERATOR, "negatives", negatives, rows.shape[0])
    samples = torch.cat([targets[:, None], negatives], dim=1)
    products = sample_logits(output, rows, samples)
    loss, coefficients = _loss_and_coefficients(products, negatives == targets[:, None], temperature)
    return loss, coefficients, weighted_rows(coefficients, rows, samples)


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _sampled_softmax_backward(
    gradient: Tensor,
    output: Tensor,
    num_rows: int,
    targets: Tensor,
    negatives: Tensor,
    coefficients: Tensor,
    direction: Tensor,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    grad_output = direction * gradient[:, None]
    library = kernel_for(KERNEL, OPERATOR, backend, output)
    if library is not None:
        sampled = SampledRows(OPERATOR, library, num_rows, negatives, targets, output)
        return grad_output, sampled.row_sums(coefficients, gradient)
    samples = torch.cat([targets[:, None], negatives], dim=1)
    return grad_output, row_sums(coefficients * gradient[:, None], output, samples, num_rows)


@_sampled_softmax.register_fake
def _(
    output: Tensor, rows: Tensor, targets: Tensor, negatives: Tensor, temperature: float, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, samples = negatives.shape
    return output.new_empty(tokens), output.new_empty(tokens, 1 + samples), output.new_empty(output.shape)


@_sampled_softmax_backward.register_fake
def _(gradient: Tensor, output: Tensor, num_rows: int, *rest: object) -> tuple[Tensor, Tensor]:
    return output.new_empty(output.shape), output.new_empty(num_rows, output.shape[1])


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    tokens, rows, targets, negatives, _, ctx.backend = inputs
    _, coefficients, direction = output
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(tokens, targets, negatives, coefficients, direction)
    ctx.mark_non_differentiable(coefficients, direction)
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    if gradient is None:
        return None, None, None, None, None, None
    output, *kept = ctx.saved_tensors
    return *_sampled_softmax_backward(gradient, output, ctx.num_rows, *kept, ctx.backend), None, None, None, None


_sampled_softmax.register_autograd(_backward, setup_context=_setup_context)
register_loadable(OPERATOR, KERNEL)
