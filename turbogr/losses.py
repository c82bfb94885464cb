"""Losses of retrieval training."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
            negatives: int64 [T, R], each token's negatives as indices into `items`. One that equals the token's target does not
                count: so is written what is to be left out (`mask_history`, what LogitSharing must not lend).

        Returns:
            float scalar.
        """

    def of_products(
        self,
        positive: Tensor,
        negative: Tensor,
        masked: Tensor,
        positive_bias: Tensor | None = None,
        negative_bias: Tensor | None = None,
    ) -> Tensor:
        """The same loss where the products have been computed elsewhere, as of rows that are kept apart, or shared.

        Args:
            positive: float [T], each token's product with its target.
            negative: float [T, R], each token's products with its negatives.
            masked: bool [T, R], which of these are left out.
            positive_bias: float [T], as `bias` of SampledSoftmax.forward.
            negative_bias: float [T, R], likewise.

        Returns:
            float scalar.

        Raises:
            ConfigurationError: the loss has no such form.
        """
        refuse_without_products(self, "training with negatives that are kept apart, or lent as products,")
        raise NotImplementedError


def has_products(loss: RetrievalLoss) -> bool:
    """Whether the loss has a form `of_products` of its own."""
    return type(loss).of_products is not RetrievalLoss.of_products


def refuse_without_products(loss: RetrievalLoss, wanted_by: str) -> None:
    """Raises ConfigurationError if the loss has no `of_products`."""
    if not has_products(loss):
        raise ConfigurationError(
            f"{wanted_by} needs a loss that has of_products (turbogr.losses.RetrievalLoss); {type(loss).__name__} has none: "
            "write one, or train without"
        )


def refuse_without(loss: RetrievalLoss, option: str, wanted_by: str) -> None:
    """Raises ConfigurationError if the loss's `forward` does not take an option."""
    if option not in inspect.signature(loss.forward).parameters:
        raise ConfigurationError(
            f"{wanted_by} needs a loss whose forward takes {option!r} (turbogr.losses.SampledSoftmax); "
            f"{type(loss).__name__} does not"
        )


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

    def forward(
        self,
        output: Tensor,
        items: Tensor,
        targets: Tensor,
        negatives: Tensor,
        bias: Tensor | None = None,
        lent: int = 0,
    ) -> Tensor:
        """Mean loss over tokens; shapes in RetrievalLoss.forward.

        Args:
            output: as there.
            items: as there.
            targets: as there.
            negatives: as there.
            bias: float [U], added to the logits of an item, such as the log-Q correction; None for none.
            lent: so many of the last columns of `negatives` give `items` no gradient.
        """
        losses = sampled_softmax(
            output, items, targets, negatives, temperature=self.temperature, bias=bias, lent=lent, backend=self.backend
        )
        return losses.mean() if losses.numel() else losses.sum()  # a rank's share of a batch may be empty: 0, and no NaN

    def of_products(
        self,
        positive: Tensor,
        negative: Tensor,
        masked: Tensor,
        positive_bias: Tensor | None = None,
        negative_bias: Tensor | None = None,
    ) -> Tensor:
        """As in RetrievalLoss."""
        positive, negative = positive.float() / self.temperature, negative.float() / self.temperature
        if positive_bias is not None:
            positive = positive + positive_bias
        if negative_bias is not None:
            negative = negative + negative_bias
        # Finite, so that a token whose negatives are all left out has a gradient of 0 and no NaN.
        others = negative.masked_fill(masked, torch.finfo(negative.dtype).min / 2).logsumexp(1)
        losses = F.softplus(others - positive)  # -log(p / (p + n)), the smaller of the two not rounded away
        return losses.mean() if losses.numel() else (losses.sum() + negative.sum())
