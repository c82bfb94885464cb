"""Weights that make the gradients of W ranks with different numbers of samples those of one process."""

from __future__ import annotations

from collections.abc import Sequence


def loss_weight(samples: Sequence[int], rank: int) -> float:
    """Factor of a rank's mean loss, so that the mean of all ranks' gradients is the gradient of the mean over all samples.

    With n_r samples on rank r, whose mean loss has the gradient g_r, one process would get sum(n_r g_r) / sum(n_r). Dense
    gradients are averaged over the W ranks by DDP, and rows' sums are divided by W, so each loss is scaled by
    W n_r / sum(n_r) (TurboGR, section 4.2). The factor of a rank without samples is 0.

    Args:
        samples: [W], terms that each rank's mean loss averages over; `sample_count` of its batch.
        rank: whose factor.

    Returns:
        The factor; 1 where no rank has a sample.
    """
    total = sum(samples)
    return samples[rank] * len(samples) / total if total else 1.0
