from __future__ import annotations

import copy

import pytest
import torch

from turbogr.errors import ConfigurationError
from turbogr.sparse.optimizers import SGD, AdaGrad, LazyAdam, LazyAdamW, RowWiseAdaGrad

V, D, STEPS = 30, 6, 12


def steps(seed=0):
    """(rows, gradient) of each step; some rows are never touched."""
    g = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        rows = torch.randperm(V - 5, generator=g)[:8]
        yield rows, torch.randn(8, D, generator=g)


def run_ours(optimizer, backend="auto"):
    weight = torch.linspace(-1, 1, V * D).view(V, D).clone()
    optimizer.allocate(V, D)
    for rows, gradient in steps():
        optimizer.step(weight, rows, gradient, backend)
    return weight


def run_torch(make):
    """torch's own optimizer on an embedding with sparse gradients."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, V * D).view(V, D).clone())
    optimizer = make([weight])
    for rows, gradient in steps():
        weight.grad = torch.sparse_coo_tensor(rows[None], gradient, (V, D)).coalesce()
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


def test_sgd_equals_torch():
    expected, _ = run_torch(lambda p: torch.optim.SGD(p, lr=0.3))
    torch.testing.assert_close(run_ours(SGD(lr=0.3)), expected)


def test_adagrad_equals_torch_weights_and_state():
    ours = AdaGrad(lr=0.3)
    expected, state = run_torch(lambda p: torch.optim.Adagrad(p, lr=0.3, eps=1e-10))
    torch.testing.assert_close(run_ours(ours), expected)
    torch.testing.assert_close(ours.sum, state["sum"])


def test_lazy_adam_equals_torch_weights_and_state():
    ours = LazyAdam(lr=0.3, betas=(0.8, 0.95))
    expected, state = run_torch(lambda p: torch.optim.SparseAdam(p, lr=0.3, betas=(0.8, 0.95)))
    torch.testing.assert_close(run_ours(ours), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.exp_avg, state["exp_avg"])
    torch.testing.assert_close(ours.exp_avg_sq, state["exp_avg_sq"])
    assert ours.steps == STEPS


def test_lazy_adam_on_all_rows_equals_adamw():
    ours = LazyAdam(lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)
    ours.allocate(V, D)
    weight = torch.ones(V, D)
    dense = torch.nn.Parameter(torch.ones(V, D))
    adamw = torch.optim.AdamW([dense], lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)
    g = torch.Generator().manual_seed(1)
    for _ in range(10):
        dense.grad = torch.randn(V, D, generator=g)
        ours.step(weight, torch.arange(V), dense.grad)
        adamw.step()
    # AdamW adds eps after its bias correction, SparseAdam before: nothing at these gradients.
    torch.testing.assert_close(weight, dense.detach(), rtol=1e-5, atol=1e-6)


def test_row_wise_adagrad_equals_its_formula():
    ours = RowWiseAdaGrad(lr=0.3, eps=1e-8)
    weight = run_ours(ours)
    expected, total = torch.linspace(-1, 1, V * D).view(V, D).double(), torch.zeros(V, dtype=torch.float64)
    for rows, gradient in steps():
        for row, g in zip(rows.tolist(), gradient.double(), strict=True):
            total[row] += (g**2).mean()
            expected[row] -= 0.3 * g / (total[row].sqrt() + 1e-8)
    torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.sum[:, 0].double(), total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [SGD(), AdaGrad(), RowWiseAdaGrad(), LazyAdam(weight_decay=0.5)])
def test_untouched_rows_and_their_state_stand_still(optimizer):
    weight = run_ours(optimizer)
    assert torch.equal(weight[V - 5 :], torch.linspace(-1, 1, V * D).view(V, D)[V - 5 :])
    for name, state in optimizer.named_buffers():
        if state.dim():
            assert not state[V - 5 :].any(), name
            assert state[: V - 5].any(), name


@pytest.mark.parametrize("optimizer", [SGD(), AdaGrad(), RowWiseAdaGrad(), LazyAdam(weight_decay=0.5)])
def test_back_ends_agree_on_weights_and_state(optimizer):
    results = []
    for backend in ("auto", "torch", "reference"):
        ours = copy.deepcopy(optimizer)
        results.append({"weight": run_ours(ours, backend), **ours.state_dict()})
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-6)


def test_a_step_that_is_refused_does_not_count():
    ours = LazyAdam()
    ours.allocate(V, D)
    weight = torch.zeros(V, D)
    with pytest.raises(IndexError, match=f"id {V} is outside"):
        ours.step(weight, torch.tensor([1, V]), torch.ones(2, D))
    assert not weight.any()
    assert ours.steps == 0


@pytest.mark.parametrize("optimizer", [AdaGrad(), RowWiseAdaGrad(), LazyAdam()])
def test_the_state_dict_is_the_whole_truth(optimizer):
    """Half the steps, state_dict into a fresh optimizer, the other half: the same bits as in one go."""
    whole = copy.deepcopy(optimizer)
    expected = run_ours(whole)
    weight = torch.linspace(-1, 1, V * D).view(V, D).clone()
    first, second = copy.deepcopy(optimizer), copy.deepcopy(optimizer)
    first.allocate(V, D)
    second.allocate(V, D)
    for index, (rows, gradient) in enumerate(steps()):
        if index == STEPS // 2:
            second.load_state_dict(first.state_dict())
        (first if index < STEPS // 2 else second).step(weight, rows, gradient)
    assert torch.equal(weight, expected)
    for name, state in second.state_dict().items():
        assert torch.equal(state, whole.state_dict()[name]), name


def test_impossible_options_are_refused():
    with pytest.raises(ConfigurationError, match="lr must be positive, got 0"):
        SGD(lr=0)
    with pytest.raises(ConfigurationError, match=r"betas must lie in \[0, 1\)"):
        LazyAdam(betas=(0.9, 1.0))


@pytest.mark.parametrize("make", [SGD, AdaGrad, RowWiseAdaGrad, LazyAdam, LazyAdamW])
def test_a_scaled_step_is_a_step_with_another_rate(make):
    scaled, plain = make(lr=0.4), make(lr=0.1)
    weights = [torch.linspace(-1, 1, V * D).view(V, D).clone() for _ in range(2)]
    for optimizer in (scaled, plain):
        optimizer.allocate(V, D)
    for rows, gradient in steps():
        scaled.step(weights[0], rows, gradient, lr_scale=0.25)
        plain.step(weights[1], rows, gradient)
    assert torch.equal(*weights)
    assert not torch.equal(weights[0], run_ours(make(lr=0.4)))


def test_lazy_adamw_is_lazy_adam_with_decay():
    assert torch.equal(run_ours(LazyAdamW(lr=0.1)), run_ours(LazyAdam(lr=0.1, weight_decay=0.01)))
    assert not torch.equal(run_ours(LazyAdamW(lr=0.1)), run_ours(LazyAdam(lr=0.1)))
