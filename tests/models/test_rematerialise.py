"""What backbones keep for backward: linear in tokens, and less with `rematerialise` for the same gradients."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from _memory import retained
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.make import random_batch
from turbogr.models.fuxi import FuXi
from turbogr.models.hstu import HSTU
from turbogr.models.sasrec import SASRec
from turbogr.models.time_encoders import BucketedTime

BACKBONES = {
    "hstu": lambda **o: HSTU(**{"dim": 16, "num_blocks": 2, "num_heads": 2, "qk_dim": 5, "v_dim": 7, **o}),
    "hstu with torch": lambda **o: HSTU(**{"dim": 16, "num_blocks": 2, "backend": "torch", **o}),
    "hstu of production": lambda **o: HSTU(
        **{"dim": 16, "affine_norms": True, "uvqk_bias": True, "scaled_scores": True, "attention_scale": "position", **o}
    ),
    "fuxi": lambda **o: FuXi(**{"dim": 16, "num_blocks": 2, "num_heads": 2, "qk_dim": 5, "v_dim": 7, **o}),
    "fuxi with buckets": lambda **o: FuXi(**{"dim": 16, "num_blocks": 2, "time_encoder": BucketedTime(), **o}),
    "sasrec": lambda **o: SASRec(**{"dim": 16, "num_blocks": 2, "num_heads": 2, "ffn_dim": 32, **o}),
}


def backbone_of(name, **options):
    torch.manual_seed(1)
    return BACKBONES[name](**{"max_length": 1024, "dropout": 0.3, **options})


def gradients(backbone, batch, seed):
    """Output and gradients of tokens and all parameters."""
    tokens = torch.randn(batch.num_tokens, backbone.dim, generator=torch.Generator().manual_seed(3)).requires_grad_()
    torch.manual_seed(seed)
    out = backbone(tokens, batch)
    return [out, *torch.autograd.grad(out.square().sum(), [tokens, *backbone.parameters()])]


@pytest.mark.parametrize("name", BACKBONES)
def test_gradients_are_the_same_bit_for_bit(name):
    batch = random_batch([9, 1, 14, 30, 200], max_length=256)
    plain, spare = backbone_of(name), backbone_of(name, rematerialise=True)
    expected = gradients(plain, batch, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(gradients(spare, batch, seed=5), expected, strict=True))
    other = gradients(spare, batch, seed=6)
    assert not any(torch.equal(a, b) for a, b in zip(other[:2], expected[:2], strict=True)), "negative control: other masks"
    spare.eval(), plain.eval()
    assert all(torch.equal(a, b) for a, b in zip(gradients(spare, batch, 5), gradients(plain, batch, 5), strict=True))


@pytest.mark.parametrize("name", BACKBONES)
def test_a_mask_that_is_drawn_anew_in_backward_would_be_noticed(name, monkeypatch):
    """The negative control of the test above: without the generator's state brought back, gradients differ."""
    batch = random_batch([9, 200], max_length=256)
    expected = gradients(backbone_of(name), batch, seed=5)
    original = checkpoint.checkpoint

    def forgetful(*args, **options):
        return original(*args, **options, preserve_rng_state=False)

    monkeypatch.setattr("turbogr.models.backbone.checkpoint", forgetful)
    actual = gradients(backbone_of(name, rematerialise=True), batch, seed=5)
    assert torch.equal(actual[0], expected[0])
    assert not torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("name", BACKBONES)
def test_matrix_products_and_attention_are_computed_once(name):
    batch = random_batch([30, 40], max_length=256)

    class Count(TorchDispatchMode):
        """Operators that are computed: a result that a checkpoint kept does not come so far."""

        def __init__(self):
            super().__init__()
            self.calls = Counter()

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.calls[operator.name()] += 1
            return operator(*args, **(kwargs or {}))

    def calls(**options):
        with Count() as count:
            gradients(backbone_of(name, **options), batch, seed=5)
        return count.calls

    plain, spare = calls(), calls(rematerialise=True)
    dear = [key for key in plain if key in ("aten::mm", "aten::addmm") or "attention" in key]
    assert len(dear) == 4
    assert {key: spare[key] for key in dear} == {key: plain[key] for key in dear}
    assert spare["turbogr::gated_norm"] == 2 * plain["turbogr::gated_norm"] > 0, "negative control"


def kept(backbone, batch):
    """Bytes of the distinct tensors that the blocks save for backward, beside parameters, and the largest tensor's elements."""
    parameters = {p.untyped_storage().data_ptr() for p in backbone.parameters()}
    storages, largest = {}, 0

    def note(tensor):
        nonlocal largest
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            largest = max(largest, tensor.numel())
        return tensor

    tokens = torch.randn(batch.num_tokens, backbone.dim, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = backbone.encode(tokens, batch)
    del out
    return sum(storages.values()), largest


@pytest.mark.parametrize("name", BACKBONES)
def test_what_is_kept_is_linear_in_tokens(name):
    backbone = backbone_of(name)
    sizes = {length: kept(backbone, random_batch([length], max_length=1024)) for length in (256, 512, 1024)}
    fixed = 2 * 1024 * 8  # tables by distance, seeds, offsets
    for length in (256, 512):
        doubled = sizes[2 * length][0] / sizes[length][0]
        assert 1.8 < doubled <= 2.0 + fixed / sizes[length][0], f"{length} -> {2 * length} tokens: {doubled} times the bytes"
    assert sizes[1024][1] < 1024 * 1024 / 4, "no tensor of [N, N] elements"
    assert sizes[1024][1] >= 1024 * 16, "negative control: what is kept is seen"


@pytest.mark.parametrize("name", BACKBONES)
def test_rematerialised_blocks_keep_less_and_still_linearly(name):
    def bytes_of(length, **options):
        backbone = backbone_of(name, **options)
        batch = random_batch([length] * 4, max_length=1024)
        tokens = torch.randn(batch.num_tokens, backbone.dim, requires_grad=True)
        return retained(lambda: backbone.encode(tokens, batch))

    plain, spare = bytes_of(512), bytes_of(512, rematerialise=True)
    assert spare < 0.85 * plain
    assert 1.8 < bytes_of(1024, rematerialise=True) / spare < 2.2


def test_nothing_is_rematerialised_without_gradients(monkeypatch):
    monkeypatch.setattr("turbogr.models.backbone.checkpoint", None)
    backbone, batch = backbone_of("hstu", rematerialise=True), random_batch([5])
    with torch.no_grad():
        backbone(torch.randn(5, 16), batch)
    with pytest.raises(TypeError, match="not callable"):
        backbone(torch.randn(5, 16), batch)
