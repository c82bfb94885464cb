"""Row optimizers: update only the rows of an embedding table that a step touched.

State lives in buffers, so that a table's `state_dict` is the whole truth under every strategy. The update itself is the
operator `turbogr::row_update` (`turbogr.ops.row_update`, where the formulas stand): C++ on a CPU, PyTorch elsewhere.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from turbogr.errors import ConfigurationError
from turbogr.ops.backend import Backend
from turbogr.ops.row_update import RowRule, row_update


class RowOptimizer(nn.Module):
    """Base class: `step(weight, rows, gradient)` on distinct rows, in place. Subclass it for a rule of your own.

    Args:
        lr: learning rate of the table's rows.

    Raises:
        ConfigurationError: if `lr` is not positive.
    """

    def __init__(self, lr: float) -> None:
        super().__init__()
        if lr <= 0:
            raise ConfigurationError(f"{type(self).__name__}: lr must be positive, got {lr}")
        self.lr = lr

    @abstractmethod
    def allocate(self, num_rows: int, dim: int) -> None:
        """Registers the state of a table of `num_rows` rows of width `dim` as buffers."""

    @abstractmethod
    def step(self, weight: Tensor, rows: Tensor, gradient: Tensor, backend: Backend = "auto", lr_scale: float = 1.0) -> None:
        """Updates `weight[rows]` and their state.

        Args:
            weight: float [V, D], changed in place.
            rows: int64 [U], distinct.
            gradient: float [U, D], summed over the rows' occurrences.
            backend: see `turbogr.ops.backend.Backend`.
            lr_scale: factor of the learning rate at this step, as where it follows the dense parameters' schedule.
        """


class SGD(RowOptimizer):
    """w <- w - lr * g."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)

    def allocate(self, num_rows: int, dim: int) -> None:
        """No state."""

    def step(self, weight: Tensor, rows: Tensor, gradient: Tensor, backend: Backend = "auto", lr_scale: float = 1.0) -> None:
        """One step on `rows`; shapes in RowOptimizer.step."""
        row_update(RowRule("sgd", self.lr * lr_scale), weight, [], rows, gradient, backend=backend)


class AdaGrad(RowOptimizer):
    """S <- S + g^2, w <- w - lr * g / (sqrt(S) + eps), elementwise (TurboGR, eq. 3). State: `sum` float [V, D]."""

    sum: Tensor

    def __init__(self, lr: float = 0.05, eps: float = 1e-10) -> None:
        super().__init__(lr)
        self.eps = eps

    def allocate(self, num_rows: int, dim: int) -> None:
        """Registers `sum`."""
        self.register_buffer("sum", torch.zeros(num_rows, dim))

    def step(self, weight: Tensor, rows: Tensor, gradient: Tensor, backend: Backend = "auto", lr_scale: float = 1.0) -> None:
        """One step on `rows`; shapes in RowOptimizer.step."""
        row_update(RowRule("adagrad", self.lr * lr_scale, self.eps), weight, [self.sum], rows, gradient, backend=backend)


class RowWiseAdaGrad(RowOptimizer):
    """AdaGrad with one accumulator a row, fed by the row's mean of g^2: 1 / D of the state. State: `sum` float [V, 1]."""

    sum: Tensor

    def __init__(self, lr: float = 0.05, eps: float = 1e-10) -> None:
        super().__init__(lr)
        self.eps = eps

    def allocate(self, num_rows: int, dim: int) -> None:
        """Registers `sum`."""
        self.register_buffer("sum", torch.zeros(num_rows, 1))

    def step(self, weight: Tensor, rows: Tensor, gradient: Tensor, backend: Backend = "auto", lr_scale: float = 1.0) -> None:
        """One step on `rows`; shapes in RowOptimizer.step."""
        row_update(
            RowRule("row_wise_adagrad", self.lr * lr_scale, self.eps), weight, [self.sum], rows, gradient, backend=backend
        )


class LazyAdam(RowOptimizer):
    """Adam whose moments of untouched rows stand still, as in `torch.optim.SparseAdam`; decoupled decay of touched rows.

    State: `exp_avg`, `exp_avg_sq` float [V, D]; `steps` int64 [], shared by all rows as in SparseAdam.

    Args:
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: AdamW's decoupled decay, applied to touched rows only.
    """

    exp_avg: Tensor
    exp_avg_sq: Tensor
    steps: Tensor

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        super().__init__(lr)
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigurationError(f"LazyAdam: betas must lie in [0, 1), got {betas}")
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay

    def allocate(self, num_rows: int, dim: int) -> None:
        """Registers `exp_avg`, `exp_avg_sq` and `steps`."""
        self.register_buffer("exp_avg", torch.zeros(num_rows, dim))
        self.register_buffer("exp_avg_sq", torch.zeros(num_rows, dim))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def step(self, weight: Tensor, rows: Tensor, gradient: Tensor, backend: Backend = "auto", lr_scale: float = 1.0) -> None:
        """One step on `rows`; shapes in RowOptimizer.step."""
        rule = RowRule("lazy_adam", self.lr * lr_scale, self.eps, self.betas, self.weight_decay)
        steps = self.steps + 1
        row_update(rule, weight, [self.exp_avg, self.exp_avg_sq, steps], rows, gradient, backend=backend)
        self.steps.copy_(steps)


class LazyAdamW(LazyAdam):
    """LazyAdam that decays touched rows: as LazyAdam with a `weight_decay`, under the name one would look for.

    Args:
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: AdamW's decoupled decay, applied to touched rows only.
    """

    def __init__(
        self, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8, weight_decay: float = 0.01
    ) -> None:
        super().__init__(lr, betas, eps, weight_decay)
