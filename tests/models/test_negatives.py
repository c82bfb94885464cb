"""Masked, shared, segmented, quantised: every way of a batch's negatives to its loss, against the formula written down."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.models.make import random_batch
from turbogr.errors import ConfigurationError
from turbogr.losses import RetrievalLoss, SampledSoftmax
from turbogr.models import apart_products
from turbogr.models.backbone import Backbone
from turbogr.models.negatives import SharedLogits, lenders
from turbogr.models.retriever import GenerativeRetriever
from turbogr.models.tokens import NEGATIVES
from turbogr.ops.negative_logits import negative_logits as real_negative_logits
from turbogr.sparse.apart import Apart
from turbogr.sparse.table import EmbeddingTable

NUM_ITEMS, DIM, TEMPERATURE, SEED = 40, 8, 0.2, 3
LENGTHS = [5, 1, 9, 0, 4]


class Shift(Backbone):
    """Something between tokens and output that has a parameter."""

    def __init__(self) -> None:
        super().__init__(DIM, 32, 0.0)
        self.weight = torch.nn.Parameter(torch.eye(DIM) + 0.1)

    def forward(self, tokens, batch):
        return tokens @ self.weight


def model_of(log_q=None, mask_history=False, apart=None, **sharing) -> GenerativeRetriever:
    torch.manual_seed(1)
    model = GenerativeRetriever(
        NUM_ITEMS,
        Shift(),
        EmbeddingTable(init_std=0.5),
        SampledSoftmax(TEMPERATURE),
        top_k=(5,),
        seed=SEED,
        log_q=log_q,
        mask_history=mask_history,
    )
    if sharing:
        model.negatives.sharing = SharedLogits(**sharing)
    if apart is not None:
        model.embeddings.apart[NEGATIVES], model.negatives.segment = apart
    return model


def step_of(model, batch, batch_idx=0):
    """Loss, and gradients of the backbone and of the whole table."""
    loss = model.training_step(batch, batch_idx)
    loss.backward()
    table = torch.zeros(NUM_ITEMS, DIM)
    for lookup in model.embeddings._pending:
        gradient = lookup.take_gradient()
        if gradient is not None:
            table[lookup.ids] += gradient
    return loss.detach(), model.backbone.weight.grad, table


def written_down(model, batch, batch_idx=0, half=None):
    """Equations 5 and 6, token by token in float64; gradients of the same things."""
    weight = model.backbone.weight.detach().double().requires_grad_()
    table = model.embeddings.weight.detach().double().requires_grad_()
    # A rounding whose gradient is 1; after the positives, which are not rounded.
    rounded = table + (table.detach().to(half or torch.float64).double() - table.detach())
    output = F.normalize(table[batch.values] @ weight, dim=1)
    positives, negatives = F.normalize(table, dim=1), F.normalize(rounded, dim=1)
    bias = torch.zeros(NUM_ITEMS, dtype=torch.float64) if model._log_q is None else -model._log_q.double()
    users = torch.repeat_interleave(torch.arange(batch.num_users), batch.lengths)
    held = [set(torch.cat([x[users == u] for x in (batch.values, batch.targets)]).tolist()) for u in range(batch.num_users)]
    tokens, drawn = batch.negatives.shape
    sharing = model.negatives.sharing

    def left_out(token, item):
        return item == batch.targets[token] or (model.negatives.mask_history and int(item) in held[users[token]])

    lent = lenders(tokens, drawn, sharing.k, (SEED, 0, batch_idx, 5)) if sharing else torch.empty(tokens, 0)
    total = 0.0
    for i in range(tokens):
        others = [output[i] @ negatives[n] / TEMPERATURE + bias[n] for n in batch.negatives[i].tolist() if not left_out(i, n)]
        for column, k in enumerate(lent[i].tolist()):
            n = int(batch.negatives[k, column % drawn])
            if left_out(k, n) or left_out(i, n):
                continue
            if sharing.scores == "own":
                vector = negatives[n] if sharing.lender_gradient else negatives[n].detach()
                others.append(output[i] @ vector / TEMPERATURE + bias[n])
            else:
                logit = output[k] @ negatives[n] / TEMPERATURE
                others.append((logit if sharing.lender_gradient else logit.detach()) + bias[n])
        own = output[i] @ positives[batch.targets[i]] / TEMPERATURE + bias[batch.targets[i]]
        total = total - (own - torch.stack([own, *others]).logsumexp(0))
    loss = total / tokens
    return loss.detach(), *torch.autograd.grad(loss, (weight, table))


def check(actual, expected, tolerance=1e-6):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def log_q() -> np.ndarray:
    counts = np.random.default_rng(0).integers(1, 30, NUM_ITEMS)
    return np.log(counts / counts.sum()).astype(np.float32)


APART = {
    "fused": None,
    "apart": (Apart(), None),
    "segments of 1": (Apart(on_host=True), 1),
    "segments of 7": (Apart(on_host=True), 7),
    "one segment": (Apart(on_host=True), 1000),
}
SHARING = [
    {},
    *({"k": k, "scores": s, "lender_gradient": g} for k, s, g in product((1, 2, 4), ("own", "lender"), (True, False))),
]


@pytest.mark.parametrize("how", APART)
@pytest.mark.parametrize("sharing", SHARING, ids=str)
@pytest.mark.parametrize(("corrected", "mask_history"), [(False, False), (True, True)])
def test_loss_and_gradients_are_the_formulas(how, sharing, corrected, mask_history):
    batch = random_batch(LENGTHS, NUM_ITEMS, negatives=6)
    assert (batch.negatives == batch.targets[:, None]).any()
    model = model_of(log_q() if corrected else None, mask_history, APART[how], **sharing)
    check(step_of(model, batch), written_down(model, batch))


@pytest.mark.parametrize("segment", [None, 7])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sharing", [{}, {"k": 3}, {"k": 3, "scores": "lender", "lender_gradient": False}], ids=str)
def test_quantised_negatives_are_rounded_and_nothing_else_is(segment, half, sharing):
    batch = random_batch(LENGTHS, NUM_ITEMS, negatives=6)
    model = model_of(apart=(Apart(half, segment is not None), segment), **sharing)
    expected = written_down(model, batch, half=half)
    check(step_of(model, batch), expected)
    plain = written_down(model, batch)
    assert abs(float(plain[0] - expected[0])) > 1e-6, "rounding changes the loss"


def test_what_a_formula_leaves_out_is_seen():
    # The negative controls of the two tests above: other lenders, another mask, another correction.
    batch = random_batch(LENGTHS, NUM_ITEMS, negatives=6)
    expected = written_down(model_of(k=2), batch)[0]
    for other in (
        step_of(model_of(k=2), batch, batch_idx=1),
        step_of(model_of(k=3), batch),
        step_of(model_of(k=2, scores="lender"), batch),
        step_of(model_of(mask_history=True, k=2), batch),
        step_of(model_of(log_q(), k=2), batch),
    ):
        assert abs(float(other[0] - expected)) > 1e-4


@pytest.mark.parametrize("shape", [(1, 4, 3), (2, 5, 2), (2, 5, 7), (7, 3, 2), (7, 3, 4), (30, 6, 5), (9, 1, 9)])
def test_lenders(shape):
    tokens, drawn, k = shape
    found = lenders(tokens, drawn, k, (0, 1))
    copies = min(k, tokens) - 1
    assert found.shape == (tokens, copies * drawn)
    assert torch.equal(found, lenders(tokens, drawn, k, (0, 1))), "seeded"
    for token, who in enumerate(found.tolist()):
        assert token not in who
        for j in range(drawn):
            assert len(set(who[j::drawn])) == copies, "no negative twice"
    for column in found.T.tolist():
        assert sorted(column) == list(range(tokens)), "each negative is lent once in a column"


def test_lenders_change_with_the_seed_and_the_column():
    found = lenders(50, 8, 2, (0, 1))
    assert not torch.equal(found, lenders(50, 8, 2, (0, 2)))
    assert len({tuple(column) for column in found.T.tolist()}) > 1


@pytest.mark.parametrize("how", APART)
@pytest.mark.parametrize("scores", ["own", "lender"])
def test_sharing_looks_nothing_up(how, scores, monkeypatch):
    batch = random_batch(LENGTHS, NUM_ITEMS, negatives=6)
    looked_up = []
    request = EmbeddingTable.request

    def counted(self, features, trains=False):
        found = request(self, features, trains)
        looked_up.append(found.ids.tolist())
        return found

    monkeypatch.setattr(EmbeddingTable, "request", counted)
    step_of(model_of(apart=APART[how]), batch)
    step_of(model_of(apart=APART[how], k=4, scores=scores), batch)
    assert len(looked_up) == 2
    assert looked_up[0] == looked_up[1]


def test_the_lenders_products_are_computed_once(monkeypatch):
    batch = random_batch(LENGTHS, NUM_ITEMS, negatives=6)
    products = []

    def counted(output, rows, index, **options):
        products.append(tuple(index.shape))
        return real_negative_logits(output, rows, index, **options)

    monkeypatch.setattr("turbogr.models.negatives.negative_logits", counted)
    model_of(k=4, scores="lender").training_step(batch, 0)
    assert sorted(products) == [(batch.num_tokens, 1), (batch.num_tokens, 6)]


def test_segments_are_never_larger(monkeypatch):
    batch = random_batch([9, 9, 9], 2000, negatives=6)
    shapes = []

    def noted(real):
        def function(*arguments, **options):
            *_, output, rows, _ = arguments
            shapes.append((len(output), len(rows)))
            return real(*arguments, **options)

        return function

    for name in ("negative_logits", "negative_logits_gradients"):
        monkeypatch.setattr(apart_products, name, noted(getattr(apart_products, name)))
    model = GenerativeRetriever(2000, Shift(), loss=SampledSoftmax(), top_k=(5,), seed=1)
    model.embeddings.apart[NEGATIVES], model.negatives.segment = Apart(on_host=True), 4
    model.training_step(batch, 0).backward()
    assert shapes[0][0] == batch.num_tokens, "rows that lie where they are wanted are read there"
    assert [tokens for tokens, _ in shapes[1:]] == [4, 4, 4, 4, 4, 4, 3]
    assert max(rows for _, rows in shapes[1:]) <= 4 * 6


def test_rows_and_gradients_are_kept_as_told():
    batch = random_batch(LENGTHS, NUM_ITEMS, negatives=6)
    model = model_of(apart=(Apart(torch.float16), None))
    loss = model.training_step(batch, 0)
    (lookup,) = model.embeddings._pending
    part = lookup.apart[NEGATIVES]
    assert part.values.dtype == torch.float16
    assert lookup.rows.dtype == torch.float32
    assert part.ids.tolist() == batch.negatives.unique().tolist()
    assert len(lookup.rows) == len(torch.cat([batch.values, batch.targets]).unique()), "a leaf of the others alone"
    assert lookup.ids.tolist() == torch.cat([batch.values, batch.targets, batch.negatives.flatten()]).unique().tolist()
    loss.backward()
    assert part.gradient is not None
    assert part.gradient.dtype == torch.float32


def test_gradients_are_not_rounded():
    # Why autograd sees no half precision: a mean over many tokens has gradients below float16's smallest number.
    batch = random_batch(LENGTHS, NUM_ITEMS, negatives=6)
    model = model_of(apart=(Apart(torch.float16), None))
    expected = written_down(model, batch, half=torch.float16)[2]
    (model.training_step(batch, 0) * 2.0**-20).backward()
    (lookup,) = model.embeddings._pending
    table = torch.zeros(NUM_ITEMS, DIM).index_add_(0, lookup.ids, lookup.take_gradient())
    check((table * 2.0**20,), (expected,))
    assert (table.half() == 0)[expected != 0].any(), "which float16 would lose"


@pytest.mark.parametrize("how", APART)
def test_a_gradient_is_taken_once(how):
    """A second time the parts would have been added up twice."""
    model = model_of(apart=APART[how])
    model.training_step(random_batch(LENGTHS, NUM_ITEMS, negatives=6), 0).backward()
    (lookup,) = model.embeddings._pending
    assert lookup.take_gradient() is not None
    with pytest.raises(RuntimeError, match="has been taken already"):
        lookup.take_gradient()


def test_an_update_takes_both_parts():
    batch = random_batch(LENGTHS, NUM_ITEMS, negatives=6)
    updated = []
    for apart in (None, (Apart(), None), (Apart(on_host=True), 3)):
        model = model_of(apart=apart)
        for batch_idx in range(2):  # accumulated
            model.training_step(batch, batch_idx).backward()
        model.on_before_optimizer_step(None)
        updated.append(model.embeddings.weight.detach().clone())
    assert not torch.equal(updated[0], model_of().embeddings.weight)
    for other in updated[1:]:
        torch.testing.assert_close(other, updated[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("how", APART)
@pytest.mark.parametrize("lengths", [[], [0, 0], [1]])
def test_batches_of_few_tokens(how, lengths):
    batch = random_batch(lengths, NUM_ITEMS, negatives=6)
    model = model_of(apart=APART[how], mask_history=True, k=3)
    loss, weight, _ = step_of(model, batch)
    assert loss.isfinite()
    assert weight is not None
    assert weight.isfinite().all()


def test_a_token_whose_negatives_are_all_left_out_costs_nothing():
    batch = random_batch([3], NUM_ITEMS, negatives=2)
    object.__setattr__(batch, "negatives", batch.targets[:, None].repeat(1, 2))
    for apart in APART.values():
        loss, weight, table = step_of(model_of(apart=apart, k=2), batch)
        assert loss == 0
        assert not weight.any()
        assert not table.any()


class Own(RetrievalLoss):
    """A loss as it was before there was anything to share."""

    def forward(self, output, items, targets, negatives):
        return (output @ items.T).sum()


def test_a_loss_of_ones_own_is_told_what_it_lacks():
    batch = random_batch(LENGTHS, NUM_ITEMS, negatives=6)
    model = GenerativeRetriever(NUM_ITEMS, Shift(), loss=Own(), top_k=(5,), seed=1)
    model.negatives.sharing = SharedLogits(2)
    model.training_step(batch, 0).backward()
    model.negatives.sharing = SharedLogits(2, "lender")
    with pytest.raises(ConfigurationError, match=r"of_products .*; Own has none"):
        model.training_step(batch, 0)
    with pytest.raises(ConfigurationError, match="'bias'"):
        GenerativeRetriever(NUM_ITEMS, Shift(), loss=Own(), top_k=(5,), log_q=log_q())


@pytest.mark.parametrize("wrong", [np.zeros(3), np.full(NUM_ITEMS, -np.inf)])
def test_log_q_must_fit(wrong):
    with pytest.raises(ConfigurationError, match="log_q"):
        model_of(log_q=wrong)


def test_uniform_log_q_changes_nothing():
    batch = random_batch(LENGTHS, NUM_ITEMS, negatives=6)
    uniform = np.full(NUM_ITEMS, -np.log(NUM_ITEMS), dtype=np.float32)
    check((step_of(model_of(log_q=uniform), batch)[0],), (step_of(model_of(), batch)[0].double(),))
