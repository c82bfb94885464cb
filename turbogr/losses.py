"""Losses of retrieval training."""

from __future__ import annotations

import math
from abc import abstractmethod

from torch import Tensor, nn

from turbogr.errors import ConfigurationError
from turbogr.ops.backend import Backend, check_backend
from turbogr.ops.sampled_softmax import sampled_softmax


class RetrievalLoss(nn.Module):
    """What the retriever asks of a loss; subclass it and name the class path in a recipe under `model.loss`."""

    @abstractmethod
    def forward(self, output: Tensor, items: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        """Mean loss over tokens; 0, with gradients of 0, where there is none (a rank's share of a short batch may be empty).

        Args:
            output: float [T, D], l2-normalised output of each token.
            items: float [U, D], l2-normalised distinct item rows of the batch.
            targets: int64 [T], each token's target as an index into `items`.
            negatives: int64 [T, R], each token's negatives as indices into `items`.

        Returns:
            float scalar.
        """


class SampledSoftmax(RetrievalLoss):
    """Sampled softmax over a token's target and its own drawn negatives.

    loss = mean over tokens of -log softmax([o.p, o.n_1, ..., o.n_R] / temperature)[0], where o, p and n are l2-normalised and a
    negative equal to the token's target is masked.

    Args:
        temperature: divides the logits.
        backend: of `turbogr::sampled_softmax`, which computes the loss of each token; see `turbogr.ops.backend.Backend`.

    Raises:
        ConfigurationError: if the temperature is not positive and finite, or the back end is unknown.
    """

    def __init__(self, temperature: float = 0.05, backend: Backend = "auto") -> None:
        super().__init__()
        if not 0 < temperature < math.inf:
            raise ConfigurationError(f"SampledSoftmax: temperature must be positive and finite, got {temperature}")
        check_backend("SampledSoftmax", backend)
        self.temperature, self.backend = temperature, backend

    def forward(self, output: Tensor, items: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        """Mean loss over tokens; shapes in RetrievalLoss.forward."""
        losses = sampled_softmax(output, items, targets, negatives, temperature=self.temperature, backend=self.backend)
        return losses.mean() if losses.numel() else losses.sum()  # a rank's share of a batch may be empty: 0, and no NaN
