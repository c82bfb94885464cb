"""A rank's share of a short batch may be empty: it must go through everything, and add nothing."""

import copy

import pytest
import torch
from torch import Tensor

from tests.models.make import random_batch
from turbogr.batch import JaggedBatch
from turbogr.losses import SampledSoftmax
from turbogr.models.fuxi import FuXi
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.models.sasrec import SASRec
from turbogr.models.time_encoders import BucketedTime
from turbogr.ops.normalise import normalised
from turbogr.sparse.optimizers import AdaGrad
from turbogr.sparse.table import EmbeddingTable

ITEMS = 40
NONE = torch.zeros(0, dtype=torch.int64)
BACKENDS = ["auto", "torch", "reference"]
BACKBONES = {
    "hstu": HSTU,
    "hstu_production": lambda **o: HSTU(**o, affine_norms=True, uvqk_bias=True, attention_scale="length"),
    "fuxi": FuXi,
    "fuxi_buckets": lambda **o: FuXi(**o, time_encoder=BucketedTime()),
    "sasrec": SASRec,
    "rematerialised": lambda **o: HSTU(**o, rematerialise=True),
}


def make(backbone: str, backend: str = "auto") -> GenerativeRetriever:
    torch.manual_seed(0)
    made = BACKBONES[backbone](dim=16, num_heads=2, num_blocks=2, max_length=32, dropout=0.2, backend=backend)
    return GenerativeRetriever(
        ITEMS, made, EmbeddingTable(AdaGrad(), backend=backend), SampledSoftmax(backend=backend), top_k=(1, 10), predict_k=5
    )


def evaluation_batch() -> JaggedBatch:
    return JaggedBatch(
        NONE, torch.zeros(1, dtype=torch.int64), NONE, NONE, NONE, NONE, 32, seen=NONE, seen_offsets=NONE.new_zeros(1)
    )


def step(model: GenerativeRetriever, batch: JaggedBatch) -> Tensor:
    """The training step, without a trainer to log to."""
    model.log = lambda *args, **kwargs: None
    return model.training_step(batch, 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_training_adds_nothing(backbone: str, backend: str):
    model = make(backbone, backend)
    before = copy.deepcopy(model.state_dict())
    batch = random_batch([], num_items=ITEMS)
    assert model.sample_count(batch) == 0
    loss = step(model, batch)
    assert loss == 0
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # DistributedDataParallel waits for every one of them
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name
    model.embeddings.apply_gradients()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("backbone", BACKBONES)
def test_negative_control_other_batches_add_something(backbone: str):
    model = make(backbone)
    before = model.embeddings.weight.clone()
    step(model, random_batch([3, 5], num_items=ITEMS)).backward()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters())
    model.embeddings.apply_gradients()
    assert not torch.equal(before, model.embeddings.weight)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_evaluation_and_prediction(backbone: str, backend: str):
    model, batch = make(backbone, backend).eval(), evaluation_batch()
    with torch.no_grad():
        assert model.queries(batch).shape == (0, 16)
        model.validation_step(batch, 0)
        users, items, scores = model.predict_step(batch, 0)
    assert (users.shape, items.shape, scores.shape) == ((0,), (0, 5), (0, 5))
    assert not any(metric.update_count != 1 for metric in model.val_metrics.values())
    assert {float(value) for value in model.val_metrics.compute().values()} == {0.0}


def test_bf16_mixed():
    model = make("hstu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = step(model, random_batch([], num_items=ITEMS))
    loss.backward()
    assert loss == 0
    assert all(not p.grad.any() for p in model.backbone.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_normalisation(backend: str):
    rows = torch.zeros(0, 8, requires_grad=True)
    normalised(rows, backend=backend).sum().backward()
    assert rows.grad.shape == (0, 8)


def test_batch():
    for batch in (random_batch([]), evaluation_batch()):
        assert (batch.num_users, batch.num_tokens) == (0, 0)
        assert batch.lengths.shape == batch.last.shape == (0,)
        assert batch.to("cpu").num_users == 0
