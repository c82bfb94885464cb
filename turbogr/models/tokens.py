"""Tokens: from the rows of a batch to its items and tokens, where events and items carry features of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.batch import JaggedBatch
from turbogr.data.features import SIDES, FeatureTable
from turbogr.errors import ConfigurationError
from turbogr.ops.backend import Backend
from turbogr.ops.embedding_lookup import jagged_embedding_lookup
from turbogr.sparse.table import ITEMS, EmbeddingTable, Features, ItemFeature, Lookup, SparseFeature

Combine = Literal["sum", "concat"]
VALUES, TARGETS, NEGATIVES = "values", "targets", "negatives"
"""Names under which a batch's own item ids are looked up."""

CATALOGUE_CHUNK = 1 << 16
"""Items whose vectors are made at once when the whole catalogue is wanted."""


class Tokens(nn.Module):
    """Combines an item's id with its features, and an item with the features of the event that it was part of.

    For an item i with the features a, b, … of its own, and an event e of that item with the features c, d, …, E being the rows
    of each table:

        sum        v(i) = E[i] + E_a[a(i)] + E_b[b(i)] + …               x(e) = v(i) + E_c[c(e)] + E_d[d(e)] + …
        concat     v(i) = W_item [E[i]; E_a[a(i)]; E_b[b(i)]; …]         x(e) = W_event [v(i); E_c[c(e)]; E_d[d(e)]; …]

    v is what is ranked: histories, targets, negatives and the catalogue share it. x is what enters the backbone. Both are of
    width D: W_item is [D, (1 + features of items) D], W_event likewise; they have no bias and start as [I I … I], so that
    training starts where `sum` does. A side without features is left as it is. (RecBole's SASRecF projects like this; `sum` is
    how Transformers add positions.)

    Values that are missing, and values that appear after training, are row 0 of their table, a row like any other.

    Args:
        num_items: V, size of the catalogue.
        dim: D.
        features: of events and items; none leaves items and tokens as they are looked up.
        combine: see above.

    Attributes:
        tables: table -> rows: the items', then one for each feature.

    Raises:
        ConfigurationError: if `combine` is unknown, a feature's name is taken, or its rows do not fit the catalogue.
    """

    fingerprints: Tensor

    def __init__(self, num_items: int, dim: int, features: Sequence[FeatureTable] = (), combine: Combine = "sum") -> None:
        super().__init__()
        if combine not in get_args(Combine):
            raise ConfigurationError(f"model.combine is {combine!r}; choose one of {', '.join(get_args(Combine))}")
        self.combine = combine
        self.tables = {ITEMS: num_items}
        self.names: dict[str, list[str]] = {side: [] for side in SIDES}
        for feature in features:
            self._check(feature)
            self.tables[feature.name] = feature.num_rows
            self.names[feature.side].append(feature.name)
            if feature.item_rows is not None:
                # Always real, also where a model is built without memory: they come from the data, not from an initialiser.
                rows = torch.tensor(np.asarray(feature.item_rows), dtype=torch.int64, device="cpu")
                self.register_buffer(self._buffer(feature.name), rows, persistent=False)
        if features:
            marks = torch.tensor([_fingerprint(feature) for feature in features], device="cpu")
            self.register_buffer("fingerprints", marks)
        for side, names in self.names.items():
            weight = nn.Parameter(torch.eye(dim).repeat(1, 1 + len(names))) if names and combine == "concat" else None
            self.register_parameter(f"{side}_weight", weight)

    def _check(self, feature: FeatureTable) -> None:
        name, rows, num_items = feature.name, feature.item_rows, self.tables[ITEMS]
        if name in (*self.tables, VALUES, TARGETS, NEGATIVES):
            raise ConfigurationError(f"a feature cannot be called {name!r}: there is something else of that name; rename it")
        if feature.side not in SIDES or (feature.side == "item") != (rows is not None):
            raise ConfigurationError(f"feature {name!r}: a feature of items has item_rows, one of events has none")
        if rows is not None and (
            rows.shape != (num_items,) or rows.min(initial=0) < 0 or rows.max(initial=0) >= feature.num_rows
        ):
            raise ConfigurationError(
                f"feature {name!r} must give each of the {num_items} items a row from 0 to {feature.num_rows - 1}"
            )

    def features(self, batch: JaggedBatch) -> Features:
        """What the features look up for a batch, by name; a pure function of the batch."""
        of_events = {name: SparseFeature(name, batch.features[name]) for name in self.names["event"]}
        return {**of_events, **{name: ItemFeature(name, self.item_rows(name)) for name in self.names["item"]}}

    def item_rows(self, name: str) -> Tensor:
        """int64 [V], the row of each item in the table of a feature of items."""
        return self.get_buffer(self._buffer(name))

    def forward(self, lookup: Lookup) -> tuple[Tensor, Tensor]:
        """Items and tokens of a look-up.

        Args:
            lookup: of `features(batch)` and of item ids, `VALUES` among them.

        Returns:
            v float [U_i, D] of the distinct items, which the look-up's index of item ids refers to; x float [T, D].
        """
        if len(self.tables) == 1:
            return lookup.rows, lookup[VALUES]
        rows, found = self._split(lookup)
        items = self._combined("item", rows, found, lookup.backend)
        tokens = jagged_embedding_lookup([items], lookup.index[VALUES], backend=lookup.backend)
        return items, self._combined("event", tokens, found, lookup.backend)

    @torch.no_grad()
    def catalogue(self, table: EmbeddingTable) -> Tensor | None:
        """v of all items whose rows lie in this process, float [owned items, D]; None where that is the rows themselves.

        Every rank of a group must call it together.
        """
        names = self.names["item"]
        if not names:
            return None
        owned = table.owned[ITEMS]
        rows = table.weight[: len(owned)]
        vectors = torch.empty_like(rows)
        # As many look-ups on every rank, however many items it owns.
        pieces = -(-self.tables[ITEMS] // CATALOGUE_CHUNK)
        for start, stop in pairwise(len(owned) * k // pieces for k in range(pieces + 1)):
            ids = {name: self.item_rows(name)[owned.start + start : owned.start + stop] for name in names}
            lookup = table({name: SparseFeature(name, rows_of) for name, rows_of in ids.items()})
            vectors[start:stop] = self._combined("item", rows[start:stop], self._split(lookup)[1], lookup.backend)
        return vectors

    def _split(self, lookup: Lookup) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Rows of the distinct items; feature -> its distinct rows, and which of them each item or event has."""
        sizes = [lookup.sizes[name] for name in self.tables]
        # Split, so that each table's gradient has that table's rows alone, and all of them become one in a single pass.
        items, *features = lookup.rows.split(sizes)
        names = [name for name in self.tables if name != ITEMS]
        parts = zip(names, features, accumulate(sizes), strict=False)
        return items, {name: (rows, lookup.index[name] - start) for name, rows, start in parts if name in lookup.index}

    def _combined(self, side: str, base: Tensor, found: dict[str, tuple[Tensor, Tensor]], backend: Backend) -> Tensor:
        """v of rows of items, or x of the v of each token's item."""
        names = self.names[side]
        blocks: Sequence[Tensor | None] = [None] * (1 + len(names))
        if names and self.combine == "concat":
            # W [a; b] = W_a a + W_b b: each distinct row is projected once, and nothing is concatenated.
            blocks = self.get_parameter(f"{side}_weight").split(base.shape[1], 1)
        base = _projected(base, blocks[0])
        for name, block in zip(names, blocks[1:], strict=True):
            rows, index = found[name]
            base = base + jagged_embedding_lookup([_projected(rows, block)], index, backend=backend)
        return base

    def _buffer(self, name: str) -> str:
        return f"item_rows_{list(self.tables).index(name)}"  # a feature's name may be none of an attribute

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved, names = state_dict.get(f"{prefix}fingerprints"), list(self.tables)[1:]
        if isinstance(saved, Tensor) and names and saved.shape == self.fingerprints.shape:
            changed = [
                name for name, old, new in zip(names, saved.tolist(), self.fingerprints.tolist(), strict=True) if old != new
            ]
            if changed:
                raise ConfigurationError(
                    f"the checkpoint was trained with other features than these: {', '.join(changed)} differ in name, in size "
                    "or in the rows of items; use the prepared folder and data.features that it was trained with"
                )
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _projected(rows: Tensor, block: Tensor | None) -> Tensor:
    # Under autocast the product is narrower; what is looked up is not.
    return rows if block is None else F.linear(rows, block).to(rows.dtype)


def _fingerprint(feature: FeatureTable) -> int:
    """Of all that a trained row's meaning hangs on: 64 bits, small enough for every checkpoint."""
    digest = hashlib.sha256(f"{feature.name}\0{feature.side}\0{feature.num_rows}\0".encode())
    if feature.item_rows is not None:
        digest.update(np.ascontiguousarray(feature.item_rows, dtype="<i8").tobytes())
    return int.from_bytes(digest.digest()[:8], "little", signed=True)
