"""Items and events with features, for tests of the models that use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from tests.models.make import random_batch
from turbogr.batch import JaggedBatch
from turbogr.data.features import FeatureTable
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.sparse.optimizers import LazyAdam
from turbogr.sparse.table import EmbeddingTable

NUM_ITEMS, DIM = 40, 8
AUTHORS = np.random.default_rng(1).integers(0, 6, NUM_ITEMS)
TAGS = np.random.default_rng(2).integers(0, 4, NUM_ITEMS)
# Events and items interleaved: the order is the user's.
FEATURES = (
    FeatureTable("author", "item", 6, AUTHORS),
    FeatureTable("tab", "event", 5),
    FeatureTable("tag", "item", 4, TAGS),
    FeatureTable("is_like", "event", 3),
)


def batch_of(lengths: Sequence[int] = (5, 0, 3, 9), seed: int = 0, **options) -> JaggedBatch:
    """`random_batch` with the features of events."""
    batch = random_batch(lengths, NUM_ITEMS, seed=seed, **options)
    g = torch.Generator().manual_seed(seed + 100)
    rows = {f.name: torch.randint(0, f.num_rows, (batch.num_tokens,), generator=g) for f in FEATURES if f.side == "event"}
    return replace(batch, features=rows)


def model_of(features: Sequence[FeatureTable] = FEATURES, optimizer=None, seed: int = 3, **options) -> GenerativeRetriever:
    """A small HSTU without dropout; W_item and W_event of `concat` are no longer what they start as."""
    torch.manual_seed(seed)
    model = GenerativeRetriever(
        NUM_ITEMS,
        options.pop("backbone", None) or HSTU(DIM, num_blocks=1, max_length=32, dropout=0.0),
        EmbeddingTable(optimizer or LazyAdam(1e-2)),
        top_k=(1, 10),
        features=features,
        **options,
    )
    for name, parameter in model.tokens.named_parameters():
        assert name in ("item_weight", "event_weight")
        with torch.no_grad():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.log = lambda *args, **kwargs: None  # there is no trainer
    return model


def dense_items(model: GenerativeRetriever, combine: str, tables: dict[str, torch.Tensor]) -> torch.Tensor:
    """v of all items [V, D], written down from the formulas."""
    parts = [tables["items"], tables["author"][torch.from_numpy(AUTHORS)], tables["tag"][torch.from_numpy(TAGS)]]
    if combine == "sum":
        return parts[0] + parts[1] + parts[2]
    return torch.cat(parts, 1) @ tables["W_item"].T


def dense_tokens(model, combine, tables, batch):
    """x of all tokens [T, D]."""
    v = dense_items(model, combine, tables)[batch.values]
    parts = [v, tables["tab"][batch.features["tab"]], tables["is_like"][batch.features["is_like"]]]
    if combine == "sum":
        return parts[0] + parts[1] + parts[2]
    return torch.cat(parts, 1) @ tables["W_event"].T


def dense_tables(model: GenerativeRetriever) -> dict[str, torch.Tensor]:
    """float64 leaves of the model's tables and projections, cut out by hand."""
    cut = {"items": (0, 40), "author": (40, 46), "tab": (46, 51), "tag": (51, 55), "is_like": (55, 58)}
    tables = {name: model.embeddings.weight[a:b] for name, (a, b) in cut.items()}
    for name, parameter in (("W_item", model.tokens.item_weight), ("W_event", model.tokens.event_weight)):
        if isinstance(parameter, nn.Parameter):
            tables[name] = parameter
    return {name: table.detach().double().requires_grad_() for name, table in tables.items()}
