"""LogitSharing: more negatives than are looked up, by what other tokens of the batch have drawn (TurboGR, section 4.3.3)."""

from __future__ import annotations

import math
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from turbogr.batch import JaggedBatch
from turbogr.callbacks.negative_path import NegativeCallback, negative_path
from turbogr.data.datamodule import SequenceDataModule
from turbogr.errors import ConfigurationError
from turbogr.losses import refuse_without, refuse_without_products
from turbogr.models.negatives import Scores, SharedLogits

ENOUGH_TOKENS, FEW_TOKENS = 15 * 2048, 2 * 2048
"""Tokens of a batch at the ends of TurboGR's table 9, for which it recommends k = 2 and k = 4 (128 logits, length 2,048)."""


def recommended(tokens: float) -> int:
    """The k that TurboGR's table 9 recommends for batches of so many tokens: 2 to 4, logarithmic between its ends."""
    if tokens <= FEW_TOKENS:
        return 4
    return max(2, round(4 - 2 * math.log(tokens / FEW_TOKENS) / math.log(ENOUGH_TOKENS / FEW_TOKENS)))


class LogitSharing(NegativeCallback):
    """Extends each token's R negatives to k R by negatives of other tokens of its batch; none of them is looked up for it.

    loss_i = -log(exp(l_i+) / (exp(l_i+) + sum_j exp(o_i . n_ij / temperature) + delta_i)), where delta_i sums the same over
    (k - 1) R pairs (lender, j) (TurboGR, equations 5 and 6). Lenders are drawn anew in every step, for every column another
    (`turbogr.models.negatives.lenders`), from (seed, epoch, batch): a resumed run draws what the uninterrupted one would have.
    A token never borrows from itself, and what equals its target, or is masked for its lender, is left out.

    On several ranks tokens borrow within their rank's batch: nothing is sent for it, and results depend on how a step is
    divided. With k = 1 nothing is shared.

    Args:
        k: expansion factor, or "auto": TurboGR's table 9, by the tokens of a batch, which says what it chose.
        scores: "own" multiplies what is borrowed with the borrower's own output, as equation 6 has it; "lender" takes the
            product that the lender has computed, as the text beside it has it, and so costs no product.
        lender_gradient: whether what is borrowed gives a gradient to its lender; see `turbogr.models.negatives.SharedLogits`.

    Raises:
        ConfigurationError: an option has an impossible value, the trainer has another such callback, or the module or its loss
            cannot share.
    """

    def __init__(self, k: int | Literal["auto"] = 2, scores: Scores = "own", lender_gradient: bool = True) -> None:
        if isinstance(k, str) and k != "auto":
            raise ConfigurationError(f'LogitSharing: k must be a number, 1 or more, or "auto"; got {k!r}')
        self.k, self.scores, self.lender_gradient = k, scores, lender_gradient
        self._shared(2 if k == "auto" else k)
        self._warned = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Switches sharing on."""
        path, model = negative_path(pl_module, "LogitSharing")
        self.refuse_another(trainer)
        if stage != "fit":
            return
        if self.scores == "lender":
            refuse_without_products(model.loss, "LogitSharing(scores='lender')")
        if self.scores == "own" and not self.lender_gradient:
            refuse_without(model.loss, "lent", "LogitSharing(lender_gradient=False)")
        tokens = _tokens_of_a_batch(trainer)
        chosen: int
        if self.k == "auto":
            chosen = 2 if tokens is None else recommended(tokens)
            of = "batches of unknown size" if tokens is None else f"{tokens:,.0f} tokens a batch"
            rank_zero_info(f"LogitSharing: k = {chosen} for {of}; k R negatives are used for every R that are drawn")
        else:
            chosen = self.k
            if tokens is not None and chosen > 1 and tokens < FEW_TOKENS and chosen < recommended(tokens):
                rank_zero_warn(
                    f"LogitSharing: a batch has {tokens:,.0f} tokens in the mean, fewer than any that TurboGR recommends "
                    f"k = {chosen} for; larger batches share more different negatives, or choose k: {recommended(tokens)}"
                )
        path.sharing = self._shared(chosen)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Warns once of a batch that has too few tokens for k."""
        sharing = negative_path(pl_module, "LogitSharing")[0].sharing
        if self._warned or sharing is None or not isinstance(batch, JaggedBatch) or batch.num_tokens >= sharing.k:
            return
        self._warned = True
        rank_zero_warn(
            f"LogitSharing: batch {batch_idx} has {batch.num_tokens} tokens, which can lend each other less than "
            f"k = {sharing.k} asks for"
        )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Switches it off, for whoever trains the model again without."""
        negative_path(pl_module, "LogitSharing")[0].sharing = None

    def _shared(self, k: int) -> SharedLogits:
        return SharedLogits(k, self.scores, self.lender_gradient).check()


def _tokens_of_a_batch(trainer: Trainer) -> float | None:
    """On a rank, in the mean; None where it is not known without taking batches."""
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, SequenceDataModule):
        return None
    size, unit = data.step_size
    return float(size) if unit == "tokens" else min(size, data.num_users) * data.num_training_tokens / data.num_users
