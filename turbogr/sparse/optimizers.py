"""Row optimizers: update only the rows of an embedding table that a step touched.

State lives in buffers, so that a table's `state_dict` is the whole truth under every strategy. All of them are written with
`index_select` / `index_copy_` alone: the same code runs on any device.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from turbogr.errors import ConfigurationError


class RowOptimizer(nn.Module):
    """Base class: `step(weight, rows, gradient)` on distinct rows, in place.

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
    def step(self, weight: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Updates `weight[rows]` and their state.

        Args:
            weight: float [V, D], changed in place.
            rows: int64 [U], distinct.
            gradient: float [U, D], summed over the rows' occurrences.
        """

    def _subtract(self, weight: Tensor, rows: Tensor, update: Tensor) -> None:
        weight.index_copy_(0, rows, weight.index_select(0, rows).sub_(update, alpha=self.lr))


class SGD(RowOptimizer):
    """w <- w - lr * g."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)

    def allocate(self, num_rows: int, dim: int) -> None:
        """No state."""

    @torch.no_grad()
    def step(self, weight: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """One step on `rows`; shapes in RowOptimizer.step."""
        self._subtract(weight, rows, gradient)


class AdaGrad(RowOptimizer):
    """S <- S + g^2, w <- w - lr * g / (sqrt(S) + eps), elementwise (TurboGR, eq. 3). State: `sum` float [V, D]."""

    sum: Tensor

    def __init__(self, lr: float = 0.05, eps: float = 1e-10) -> None:
        super().__init__(lr)
        self.eps = eps

    def allocate(self, num_rows: int, dim: int) -> None:
        """Registers `sum`."""
        self.register_buffer("sum", torch.zeros(num_rows, dim))

    @torch.no_grad()
    def step(self, weight: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """One step on `rows`; shapes in RowOptimizer.step."""
        total = self.sum.index_select(0, rows).addcmul_(gradient, gradient)
        self.sum.index_copy_(0, rows, total)
        self._subtract(weight, rows, gradient / total.sqrt_().add_(self.eps))


class RowWiseAdaGrad(RowOptimizer):
    """AdaGrad with one accumulator a row, fed by the row's mean of g^2: 1 / D of the state. State: `sum` float [V, 1]."""

    sum: Tensor

    def __init__(self, lr: float = 0.05, eps: float = 1e-10) -> None:
        super().__init__(lr)
        self.eps = eps

    def allocate(self, num_rows: int, dim: int) -> None:
        """Registers `sum`."""
        self.register_buffer("sum", torch.zeros(num_rows, 1))

    @torch.no_grad()
    def step(self, weight: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """One step on `rows`; shapes in RowOptimizer.step."""
        total = self.sum.index_select(0, rows).add_(gradient.square().mean(1, keepdim=True))
        self.sum.index_copy_(0, rows, total)
        self._subtract(weight, rows, gradient / total.sqrt_().add_(self.eps))


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

    @torch.no_grad()
    def step(self, weight: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """One step on `rows`; shapes in RowOptimizer.step."""
        self.steps += 1
        first, second = self.betas
        mean = self.exp_avg.index_select(0, rows).lerp_(gradient, 1 - first)
        square = self.exp_avg_sq.index_select(0, rows).mul_(second).addcmul_(gradient, gradient, value=1 - second)
        self.exp_avg.index_copy_(0, rows, mean)
        self.exp_avg_sq.index_copy_(0, rows, square)
        steps = self.steps.double()
        correction = ((1 - second**steps).sqrt() / (1 - first**steps)).to(weight.dtype)
        update = mean.mul_(correction).div_(square.sqrt_().add_(self.eps))
        if self.weight_decay:
            update.add_(weight.index_select(0, rows), alpha=self.weight_decay)
        self._subtract(weight, rows, update)
