"""NegativePath: from a batch's drawn negatives to its loss, with what callbacks have switched on.

drawn [T, R] -> masked: a token's own target, and if asked for the items of the user's history
  -> shared: borrowed from other tokens, [T, k R]                                          LogitSharing
  -> the fused loss on the batch's one leaf; or, where the negatives' rows are kept apart     NegativeQuantization,
     or logits are reused, products [T, k R], and the loss of these                           NegativeOffload
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from turbogr.batch import JaggedBatch
from turbogr.errors import ConfigurationError
from turbogr.losses import RetrievalLoss
from turbogr.models.apart_products import apart_products
from turbogr.models.tokens import NEGATIVES, TARGETS
from turbogr.ops.copies import to_device
from turbogr.ops.negative_logits import negative_logits
from turbogr.sparse.lookup import Lookup
from turbogr.sparse.table import ITEMS

Scores = Literal["own", "lender"]

_SHARING = 5
"""Purpose of the seed of what is shared: beside a step's dropout, and beside `turbogr.data.negatives`' purposes."""


class SharedLogits(NamedTuple):
    """How each token's R negatives become k R (TurboGR, section 4.3.3, equations 5 and 6).

    Attributes:
        k: expansion factor, at least 1.
        scores: "own": a borrowed negative is multiplied with the borrower's output, o_i . n_kj as in equation 6; "lender": the
            product that the lender has computed is taken as it is, o_k . n_kj.
        lender_gradient: whether what is borrowed gives its lender a gradient: with "own" the embedding n_kj, with "lender" the
            product, and so both n_kj and o_k. Without it n_kj is trained by its own token alone.
    """

    k: int
    scores: Scores = "own"
    lender_gradient: bool = True

    def check(self) -> SharedLogits:
        """Itself, if its values are possible.

        Raises:
            ConfigurationError: if they are not.
        """
        if self.k < 1:
            raise ConfigurationError(f"LogitSharing: k must be at least 1, got {self.k}")
        if self.scores not in get_args(Scores):
            raise ConfigurationError(f"LogitSharing: scores must be one of {', '.join(get_args(Scores))}; got {self.scores!r}")
        return self


def lenders(num_tokens: int, num_negatives: int, k: int, seed: tuple[int, ...]) -> Tensor:
    """Who lends to whom: int64 [T, (min(k, T) - 1) R], the token whose negative j stands in column m R + j of each token.

    The tokens are put in a random circle; in each column the lender is a random number of places further on, another one for
    each m. So nobody borrows from themselves, nobody borrows one negative twice, each negative is lent equally often, and a
    token's lenders differ from column to column: the token-level shuffle.

    Args:
        num_tokens: T.
        num_negatives: R.
        k: expansion factor.
        seed: of all that is random.
    """
    copies = max(min(k, num_tokens) - 1, 0)
    random = np.random.default_rng(seed)
    circle = torch.from_numpy(random.permutation(num_tokens))
    # Steps from 1 to T - 1, those of a column from ranges of their own and so distinct.
    edges = 1 + np.arange(copies + 1) * (num_tokens - 1) // max(copies, 1)
    steps = torch.from_numpy(random.integers(edges[:-1, None], edges[1:, None], (copies, num_negatives)).reshape(-1))
    place = torch.empty_like(circle)
    place[circle] = torch.arange(num_tokens)
    return circle[(place[:, None] + steps).remainder_(max(num_tokens, 1))]


class NegativePath:
    """The negatives of a GenerativeRetriever's training step.

    Args:
        mask_history: leave out negatives that are items of their user's history in the batch, its tokens' and its targets'.

    Attributes:
        sharing: what LogitSharing has switched on.
        segment: tokens of a segment, where NegativeOffload has switched it on; their rows are then kept on the host.
    """

    def __init__(self, mask_history: bool = False) -> None:
        self.mask_history = mask_history
        self.sharing: SharedLogits | None = None
        self.segment: int | None = None

    def loss(
        self,
        loss: RetrievalLoss,
        output: Tensor,
        items: Tensor,
        lookup: Lookup,
        batch: JaggedBatch,
        log_q: Tensor | None,
        seed: tuple[int, ...],
    ) -> Tensor:
        """Mean loss of a batch.

        Args:
            loss: of the model.
            output: float [T, D], l2-normalised output of each token.
            items: float [U, D], l2-normalised: the items among `lookup.rows`.
            lookup: of the batch.
            batch: with negatives.
            log_q: float32 [V], logarithm of the probability with which each item is drawn; None for uniform draws.
            seed: of the step.
        """
        assert batch.negatives is not None
        part, targets, backend = lookup.apart.get(NEGATIVES), lookup.index[TARGETS], lookup.backend
        pool, own, index = lookup.ids[: lookup.sizes[ITEMS]], targets, lookup.index[NEGATIVES]
        if part is not None:
            pool, own, index = part.ids, _find(part.ids, batch.targets), part.index
        if log_q is not None or self.mask_history:
            pool = to_device(pool, output.device)
        masked, borrowed = self._choose(batch, pool, own, index, seed)
        scores = self.sharing.scores if self.sharing is not None else "own"
        lent = 0 if self.sharing is None or self.sharing.lender_gradient or scores == "lender" else _width(borrowed)
        bias = None if log_q is None else -log_q[pool]
        if part is None and scores == "own":
            drawn = [index if masked is None else torch.where(masked[:, : index.shape[1]], own[:, None], index)]
            if borrowed is not None and masked is not None:
                drawn.append(torch.where(masked[:, index.shape[1] :], own[:, None], borrowed.gathered(index)))
            # A loss of one's own need not know what it is not asked for.
            options = {name: value for name, value in (("bias", bias), ("lent", lent or None)) if value is not None}
            return loss(output, items, targets, torch.cat(drawn, 1) if len(drawn) > 1 else drawn[0], **options)

        if masked is None:
            masked = index == own[:, None]
        wanted = index if borrowed is None or scores == "lender" else torch.cat([index, borrowed.gathered(index)], 1)
        if part is None:
            products = negative_logits(output, items, wanted, backend=backend)
        else:
            products = apart_products(output.float(), part, wanted, self.segment, lent, backend)
        if borrowed is not None and scores == "lender":
            of_lenders = products if self.sharing is None or self.sharing.lender_gradient else products.detach()
            products = torch.cat([products, borrowed.gathered(of_lenders)], 1)
        positive = negative_logits(output, items, targets[:, None], backend=backend)[:, 0]
        if log_q is None or bias is None:
            return loss.of_products(positive, products, masked)
        all_of_them = index if borrowed is None else torch.cat([index, borrowed.gathered(index)], 1)
        return loss.of_products(positive, products, masked, -log_q[batch.targets], bias[all_of_them])

    def _choose(
        self, batch: JaggedBatch, pool: Tensor, own: Tensor, index: Tensor, seed: tuple[int, ...]
    ) -> tuple[Tensor | None, _Borrowed | None]:
        """bool [T, k R], which negatives are left out (None: those equal to the target); who lends the shared ones."""
        history = _History(batch, pool) if self.mask_history else None
        if history is None and self.sharing is None:
            return None, None
        masked = index == own[:, None]
        if history is not None:
            masked |= history.holds(index)
        if self.sharing is None:
            return masked, None
        borrowed = _Borrowed(
            lenders(len(index), index.shape[1], self.sharing.k, (*seed, _SHARING)), index.shape[1], index.device
        )
        lent = borrowed.gathered(index)
        also = borrowed.gathered(masked) | (lent == own[:, None])
        if history is not None:
            also |= history.holds(lent)
        return torch.cat([masked, also], 1), borrowed


class _Borrowed:
    """Takes, for every token, what its lenders have."""

    def __init__(self, lenders: Tensor, num_negatives: int, device: torch.device) -> None:
        columns = torch.arange(lenders.shape[1]) % max(num_negatives, 1)
        self.shape = lenders.shape
        self._flat = to_device((lenders * num_negatives + columns).view(-1), device)

    def gathered(self, values: Tensor) -> Tensor:
        """[T, (k - 1) R], of values [T, R]."""
        return values.reshape(-1).index_select(0, self._flat).view(self.shape)


class _History:
    """Which items of a batch's pool of negatives are in the history of each user."""

    def __init__(self, batch: JaggedBatch, pool: Tensor) -> None:
        self._users = torch.repeat_interleave(
            torch.arange(batch.num_users, device=pool.device), batch.lengths, output_size=batch.num_tokens
        )
        # What is not in the pool falls into a column that nobody asks for.
        held = torch.zeros(batch.num_users, len(pool) + 1, dtype=torch.bool, device=pool.device)
        for ids in (batch.values, batch.targets):
            held[self._users, _find(pool, ids)] = True
        self._held, self._width = held.view(-1), held.shape[1]

    def holds(self, index: Tensor) -> Tensor:
        """bool [T, n], of int64 [T, n] in the pool."""
        return self._held[index + (self._users * self._width)[:, None]]


def _find(pool: Tensor, ids: Tensor) -> Tensor:
    """int64, where in the pool, ascending, each id stands; -1 for those that are not there."""
    if not len(pool):
        return torch.full_like(ids, -1)
    place = torch.searchsorted(pool, ids).clamp_(max=len(pool) - 1)
    return torch.where(pool[place] == ids, place, -1)


def _width(borrowed: _Borrowed | None) -> int:
    return 0 if borrowed is None else borrowed.shape[1]
