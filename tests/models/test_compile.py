"""torch.compile takes a whole backbone as one graph, and computes what it computes without."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.models.make import WINDOW, random_batch
from turbogr.models.fuxi import FuXi
from turbogr.models.hstu import HSTU
from turbogr.models.sasrec import SASRec


def results(function, backbone, tokens, batch):
    torch.manual_seed(1)
    out = function(tokens, batch)
    return [out, *torch.autograd.grad(out.square().sum(), [tokens, *backbone.parameters()])]


@pytest.mark.filterwarnings("ignore:.*context_fn.*")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *itertools.product([HSTU, FuXi, SASRec], [{}, {"mask": WINDOW}, {"rematerialise": True}]),
        (HSTU, {"affine_norms": True, "uvqk_bias": True, "scaled_scores": True, "attention_scale": "position"}),
    ],
)
def test_a_backbone_is_one_graph(kind, options):
    torch.manual_seed(0)
    torch._dynamo.reset()
    backbone = kind(dim=8, max_length=32, dropout=0.3, **options)
    compiled = torch.compile(backbone, backend="aot_eager", fullgraph=True)
    for lengths in ([9, 1, 14], [3, 0, 20, 7]):
        batch = random_batch(lengths)
        tokens = torch.randn(batch.num_tokens, 8, requires_grad=True)
        for actual, expected in zip(*(results(f, backbone, tokens, batch) for f in (compiled, backbone)), strict=True):
            torch.testing.assert_close(actual, expected)
