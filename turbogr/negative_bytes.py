"""What a batch's negatives take on the device, by how they are looked up and kept: arithmetic, nothing is measured here.

A batch has T tokens and looks up R negatives for each; D is the width of a row and N the number of distinct rows among the
T R negatives. In a training step, where the most is alive at once, in the loss's backward pass:

    gathered        embeddings and their gradient, [T, R, D] each: what trainers do that look up every draw
    fused           the distinct rows once, in the leaf of the whole batch: rows, normalised rows, and the gradient of these
    apart           the distinct rows in a tensor of their own, in half precision; their gradient in float32, which is then
                    added to that of the batch's distinct rows
    offloaded       rows and gradient on the host; on the device the rows of two segments of tokens, one computed, one on its
                    way, and the gradient of one

TurboGR (section 4.3.1) offloads the gathered tensor. Its Table 7 is that tensor: batches of 15 histories of 2,048 tokens, D =
1,024 and float32 make T R D 4 bytes = 16.1 GB at 128 negatives, where 50.39 - 34.27 GB were saved.

All of them compute [T, R] logits; sharing (section 4.3.3) makes these k R wide and nothing else larger but the segments: what
is borrowed is multiplied with the output of the borrower, and its rows come with the segment of the borrower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from turbogr.batch import JaggedBatch

SEGMENT = 100
"""Tokens that are fetched from the host at a time: the paper's."""

SHARE = 0.1
"""Of a device's memory: what negatives may take before `NegativeOffload` of mode auto offloads them."""

FP32, FP16 = 4, 2
"""Bytes of a value; those of bfloat16 are FP16's."""

_INDEX = 8  # int64


@dataclass(frozen=True)
class NegativeLoad:
    """What the bytes hang on.

    Attributes:
        tokens: T, of the batch.
        drawn: R, negatives that are looked up for each token.
        width: D, of a row.
        distinct: N, distinct rows among the T R negatives.
        added: of these, the rows that no token and no target of the batch looks up: what the negatives add to its leaf.
    """

    tokens: int
    drawn: int
    width: int
    distinct: int
    added: int

    @classmethod
    def of(cls, batch: JaggedBatch, width: int, drawn: int | None = None) -> NegativeLoad:
        """Of a batch, counted.

        Args:
            batch: with negatives.
            width: D.
            drawn: R, if only the first R negatives of each token are to be looked up.

        Raises:
            ValueError: if the batch has no negatives, or fewer than `drawn`.
        """
        found = 0 if batch.negatives is None else batch.negatives.shape[1]
        wanted = found if drawn is None else drawn
        if batch.negatives is None or not 0 <= wanted <= found:
            raise ValueError(f"{wanted} negatives a token cannot be taken from a batch that has {found}")
        rows = batch.negatives[:, :wanted].unique()
        seen = torch.isin(rows, torch.cat([batch.values, batch.targets]))
        return cls(batch.num_tokens, wanted, width, len(rows), len(rows) - int(seen.sum()))

    @classmethod
    def expected(cls, tokens: int, drawn: int, width: int, num_items: int, others: int = 0) -> NegativeLoad:
        """With the rows that uniform draws from V items hit on average, V (1 - (1 - 1 / V) ^ (T R)).

        Args:
            tokens: T.
            drawn: R.
            width: D.
            num_items: V, at least 1.
            others: distinct items that the batch looks up otherwise.

        Raises:
            ValueError: if there are no items, or fewer than `others`.
        """
        if not max(1, others) <= num_items:
            raise ValueError(f"num_items is {num_items}; it must be at least 1, and at least others, {others}")
        missed = math.exp(tokens * drawn * math.log1p(-1 / num_items)) if num_items > 1 else float(not tokens * drawn)
        hit = 1 - missed
        return cls(tokens, drawn, width, round(num_items * hit), round((num_items - others) * hit))


@dataclass(frozen=True)
class NegativeBytes:
    """Of the negatives alone.

    Attributes:
        ids: the drawn ids, and where each finds its row.
        rows: embeddings on the device.
        gradients: of these.
        logits: the products, and their derivatives, as far as they are alive together.
        host: embeddings and gradients in the host's memory.
    """

    ids: int
    rows: int
    gradients: int
    logits: int
    host: int = 0

    @property
    def device(self) -> int:
        """On the device."""
        return self.ids + self.rows + self.gradients + self.logits


def gathered(load: NegativeLoad) -> NegativeBytes:
    """An embedding for every draw, [T, R, D] in float32, and its gradient; products and their derivatives."""
    draws = load.tokens * load.drawn
    embeddings = draws * load.width * FP32
    return NegativeBytes(_INDEX * draws, embeddings, embeddings, 2 * FP32 * draws)


def fused(load: NegativeLoad, k: int = 1) -> NegativeBytes:
    """The distinct rows in the batch's leaf, in float32; the fused loss keeps one derivative for each logit.

    Args:
        load: the batch's.
        k: expansion factor of sharing, at least 1.
    """
    rows = load.added * load.width * FP32
    return NegativeBytes(_places(load, k), 2 * rows, rows, FP32 * load.tokens * load.drawn * k)


def apart(load: NegativeLoad, value_bytes: int = FP16, k: int = 1) -> NegativeBytes:
    """The distinct rows in a tensor of their own; their gradient, and once more as part of all rows' gradient, in float32.

    Args:
        load: the batch's.
        value_bytes: of a value of the rows.
        k: expansion factor of sharing, at least 1.
    """
    values = load.distinct * load.width
    return NegativeBytes(_places(load, k), values * value_bytes, 2 * values * FP32, _logits(load, k))


def on_device(load: NegativeLoad, value_bytes: int = FP32, k: int = 1) -> NegativeBytes:
    """As they are kept where they are not offloaded: float32 rows in the batch's leaf, others apart."""
    return fused(load, k) if value_bytes == FP32 else apart(load, value_bytes, k)


def offloaded(load: NegativeLoad, segment: int = SEGMENT, value_bytes: int = FP32, k: int = 1) -> NegativeBytes:
    """Two segments of tokens on the device; all rows and their gradient, float32, on the host.

    Args:
        load: the batch's.
        segment: tokens of a segment, at least 1.
        value_bytes: of a value of the rows.
        k: expansion factor of sharing, at least 1.

    Raises:
        ValueError: if the segment is not positive.
    """
    if segment < 1:
        raise ValueError(f"a segment has at least 1 token, got {segment}")
    values = load.distinct * load.width
    buffer = min(segment * load.drawn * k, load.distinct) * load.width
    host = values * (value_bytes + FP32)
    return NegativeBytes(_places(load, k), 2 * buffer * value_bytes, buffer * FP32, _logits(load, k), host)


def offload_below(load: NegativeLoad, segment: int = SEGMENT, value_bytes: int = FP32, k: int = 1) -> float:
    """Bytes of a device's memory below which `NegativeOffload` of mode auto offloads; 0 if offloading leaves more on it.

    It offloads where the negatives would take more than SHARE of the device otherwise: rows of float32 in the batch's leaf, or
    rows of half precision apart.

    Args:
        load: the batch's.
        segment: tokens of a segment.
        value_bytes: of a value of the rows.
        k: expansion factor of sharing.
    """
    without = on_device(load, value_bytes, k).device
    return without / SHARE if offloaded(load, segment, value_bytes, k).device < without else 0.0


def choices(load: NegativeLoad, shared: NegativeLoad, k: int = 2, segment: int = SEGMENT) -> dict[str, NegativeBytes]:
    """All ways to have R negatives a token, side by side.

    Args:
        load: with R draws a token.
        shared: with R / k draws, which sharing expands to R.
        k: expansion factor of sharing.
        segment: tokens of an offloaded segment.

    Returns:
        By what is switched on: "gathered", "fused", "fp16", "offload", and their combinations.
    """
    return {
        "gathered": gathered(load),
        "fused": fused(load),
        "fp16": apart(load),
        "offload": offloaded(load, segment),
        "offload, fp16": offloaded(load, segment, FP16),
        f"sharing k = {k}": fused(shared, k),
        f"sharing k = {k}, fp16": apart(shared, FP16, k),
        f"sharing k = {k}, offload, fp16": offloaded(shared, segment, FP16, k),
    }


def _places(load: NegativeLoad, k: int) -> int:
    """Drawn ids and the places of their rows, and the places of shared logits in a tensor of their own."""
    if k < 1:
        raise ValueError(f"k is at least 1, got {k}")
    draws = load.tokens * load.drawn
    return _INDEX * draws * (2 if k == 1 else 2 + k)


def _logits(load: NegativeLoad, k: int) -> int:
    return 2 * FP32 * load.tokens * load.drawn * k
