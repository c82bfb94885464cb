from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from turbogr.errors import ConfigurationError
from turbogr.losses import SampledSoftmax


def naive(output, items, targets, negatives, temperature):
    """Token by token in float64."""
    total = 0.0
    for token, (target, drawn) in enumerate(zip(targets.tolist(), negatives.tolist(), strict=True)):
        rows = [target] + [n for n in drawn if n != target]
        logits = items[rows].double() @ output[token].double() / temperature
        total = total - torch.log_softmax(logits, 0)[0]
    return total / len(targets)


def inputs(seed=0):
    g = torch.Generator().manual_seed(seed)
    output = F.normalize(torch.randn(7, 5, generator=g, dtype=torch.float64), dim=1).requires_grad_()
    items = F.normalize(torch.randn(9, 5, generator=g, dtype=torch.float64), dim=1).requires_grad_()
    return output, items, torch.randint(0, 9, (7,), generator=g), torch.randint(0, 9, (7, 12), generator=g)


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_equals_the_naive_form_with_gradients(backend):
    output, items, targets, negatives = inputs()
    assert (negatives == targets[:, None]).any()
    loss = SampledSoftmax(0.2, backend)(output, items, targets, negatives)
    expected = naive(output, items, targets, negatives, 0.2)
    torch.testing.assert_close(loss, expected)
    for actual, wanted in zip(
        torch.autograd.grad(loss, (output, items)), torch.autograd.grad(expected, (output, items)), strict=True
    ):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("temperature", [0.01, 0.05, 1.0])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_single_precision_equals_the_naive_form(backend, temperature):
    output, items, targets, negatives = inputs()
    output, items = (x.detach().float().requires_grad_() for x in (output, items))
    loss = SampledSoftmax(temperature, backend)(output, items, targets, negatives)
    expected = naive(output, items, targets, negatives, temperature)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    for actual, wanted in zip(
        torch.autograd.grad(loss, (output, items)), torch.autograd.grad(expected, (output, items)), strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5 / temperature)


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_without_tokens_the_loss_and_its_gradients_are_0(backend):
    # A rank's share of a short batch may be empty: it takes part in every exchange, and must add nothing.
    output, items, targets, negatives = inputs()
    loss = SampledSoftmax(backend=backend)(output[:0].float(), items.float(), targets[:0], negatives[:0])
    assert loss == 0
    loss.backward()
    for gradient in (output.grad, items.grad):
        assert gradient is not None
        assert not gradient.any()


def test_a_negative_equal_to_the_target_is_masked():
    output, items, targets, negatives = inputs()
    loss = SampledSoftmax()
    more = torch.cat([negatives, targets[:, None]], dim=1)
    assert torch.equal(loss(output, items, targets, more), loss(output, items, targets, negatives))
    only = targets[:, None].expand(-1, 3).contiguous()
    assert loss(output, items, targets, only) == 0


def test_options_are_checked_at_construction():
    with pytest.raises(
        ConfigurationError, match="SampledSoftmax: backend must be one of auto, cpp, torch, reference, got 'fast'"
    ):
        SampledSoftmax(backend="fast")
    for temperature in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match=f"temperature must be positive and finite, got {temperature}"):
            SampledSoftmax(temperature)
