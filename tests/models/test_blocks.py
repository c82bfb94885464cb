"""Each block against an independent dense float64 formulation, forward and every gradient."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from tests.models.make import WINDOW, allowed, random_batch
from turbogr.errors import ConfigurationError
from turbogr.models.bias import RelativeBias, TimeBuckets
from turbogr.models.fuxi import FuXi
from turbogr.models.hstu import HSTU
from turbogr.models.sasrec import SASRec
from turbogr.ops.hstu_native import KERNEL

LENGTHS = [9, 1, 14, 30]


def layer_norm(x, eps):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + eps).sqrt()


def dense_input(backbone, tokens):
    return tokens * backbone.dim**0.5 + backbone.positions[: len(tokens)]


def dense_hstu(backbone: HSTU, tokens, batch, start, end, scaled=False):
    x = dense_input(backbone, tokens[start:end])
    n = end - start
    row, column = torch.arange(n)[:, None], torch.arange(n)[None]
    divisors = {"constant": backbone.max_length, "length": n, "position": row + 1}
    for block in backbone.blocks:
        heads, dqk, dv = block.num_heads, block.qk_dim, block.v_dim
        normed = layer_norm(x, 1e-6)
        if block.input_affine is not None:
            normed = normed * block.input_affine.weight + block.input_affine.bias
        projected = normed @ block.uvqk + (0 if block.uvqk_bias is None else block.uvqk_bias)
        u, v, q, k = F.silu(projected).split([heads * dv, heads * dv, heads * dqk, heads * dqk], 1)
        bias = block.bias.position[(column - row) + block.max_length - 1]
        if block.bias.time is not None:
            gap = (batch.target_times[start:end, None] - batch.timestamps[None, start:end]).abs().double() / block.time.unit
            bucket = torch.floor(torch.log(torch.clamp(gap, min=1)) / block.time.divisor).clamp(0, block.time.count)
            bias = bias + block.bias.time[bucket.long()]
        heads_out = []
        for h in range(heads):
            score = q[:, h * dqk : (h + 1) * dqk] @ k[:, h * dqk : (h + 1) * dqk].T
            score = (score / dqk**0.5 if scaled else score) + bias
            weight = score * torch.sigmoid(score) / divisors[backbone.attention_scale] * allowed(backbone.mask, n)
            heads_out.append(weight @ v[:, h * dv : (h + 1) * dv])
        normed = layer_norm(torch.cat(heads_out, 1), 1e-6)
        if block.output_affine is not None:
            normed = normed * block.output_affine.weight + block.output_affine.bias
        x = x + (u * normed) @ block.out.weight.T + block.out.bias
    return x


def dense_sasrec(backbone: SASRec, tokens, batch, start, end):
    x = dense_input(backbone, tokens[start:end])
    n = end - start
    forbidden = ~allowed(backbone.mask, n)
    for block in backbone.blocks:
        dim = x.shape[1] // block.num_heads
        normed = layer_norm(x, 1e-8)
        q, k, v = block.query(normed), block.key(x), block.value(x)
        heads_out = []
        for h in range(block.num_heads):
            part = slice(h * dim, (h + 1) * dim)
            score = (q[:, part] @ k[:, part].T / dim**0.5).masked_fill(forbidden, float("-inf"))
            heads_out.append(torch.softmax(score, 1) @ v[:, part])
        h = layer_norm(normed + block.out(torch.cat(heads_out, 1)), 1e-8)
        x = h + block.contract(torch.relu(block.expand(h)))
    return x


def hstu(**options):
    return HSTU(
        **{"dim": 8, "num_blocks": 2, "num_heads": 2, "qk_dim": 3, "v_dim": 5, "max_length": 32, "dropout": 0.0, **options}
    )


PRODUCTION = {"affine_norms": True, "uvqk_bias": True, "scaled_scores": True}
BACKBONES = {
    "hstu": (hstu, dense_hstu),
    "hstu with affine norms": (lambda: hstu(affine_norms=True), dense_hstu),
    "hstu with a bias": (lambda: hstu(uvqk_bias=True), dense_hstu),
    "hstu with scaled scores": (lambda: hstu(scaled_scores=True), partial(dense_hstu, scaled=True)),
    "hstu over length": (lambda: hstu(attention_scale="length"), dense_hstu),
    "hstu over position": (lambda: hstu(attention_scale="position"), dense_hstu),
    "hstu of production": (
        lambda: hstu(**PRODUCTION, attention_scale="position", mask=WINDOW, rematerialise=True),
        partial(dense_hstu, scaled=True),
    ),
    "hstu without time": (lambda: HSTU(dim=8, num_blocks=1, num_heads=1, max_length=32, dropout=0.0, time=None), dense_hstu),
    "hstu in minutes": (
        lambda: HSTU(dim=8, num_blocks=1, max_length=32, dropout=0.0, time=TimeBuckets(12, 0.7, 60.0)),
        dense_hstu,
    ),
    "hstu windowed": (lambda: HSTU(dim=8, num_heads=2, max_length=32, dropout=0.0, mask=WINDOW), dense_hstu),
    "sasrec": (lambda: SASRec(dim=8, num_blocks=2, num_heads=2, ffn_dim=11, max_length=32, dropout=0.0), dense_sasrec),
    "sasrec windowed": (lambda: SASRec(dim=8, num_heads=2, max_length=32, dropout=0.0, mask=WINDOW), dense_sasrec),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_equals_the_dense_formulation(name):
    make, dense = BACKBONES[name]
    torch.manual_seed(3)
    backbone = make().double()
    for parameter in backbone.parameters():  # biases start at zero: give every parameter a say
        torch.nn.init.normal_(parameter, std=0.3)
    batch = random_batch(LENGTHS)
    tokens = torch.randn(batch.num_tokens, 8, dtype=torch.float64, requires_grad=True)
    inputs = [tokens, *backbone.parameters()]
    out = backbone(tokens, batch)
    offsets = batch.offsets.tolist()
    expected = torch.cat([dense(backbone, tokens, batch, a, b) for a, b in pairwise(offsets)])
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn_like(out)
    for actual, wanted in zip(
        torch.autograd.grad(out, inputs, weights), torch.autograd.grad(expected, inputs, weights), strict=True
    ):
        assert wanted.count_nonzero() > 0
        torch.testing.assert_close(actual, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", BACKBONES)
def test_outputs_depend_on_the_own_past_only(name):
    torch.manual_seed(0)
    backbone = BACKBONES[name][0]().double()
    batch = random_batch([6, 5])
    tokens = torch.randn(11, 8, dtype=torch.float64)
    before = backbone(tokens, batch)
    tokens[2] = torch.randn(8, dtype=torch.float64)  # a constant shift would vanish in the layer norm
    changed = (backbone(tokens, batch) - before).abs().sum(1) > 0
    assert changed.tolist() == [False] * 2 + [True] * 4 + [False] * 5


@pytest.mark.parametrize("option", [*PRODUCTION, "attention_scale"])
def test_each_option_of_hstu_changes_what_it_computes(option):
    """The negative control of the parity above: what both have is the same, what the option adds is random."""
    torch.manual_seed(0)
    batch, tokens = random_batch(LENGTHS), torch.randn(sum(LENGTHS), 8)
    backbones = [hstu(), hstu(**{option: "length" if option == "attention_scale" else True})]
    for backbone in backbones:
        for parameter in backbone.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    backbones[1].load_state_dict(backbones[0].state_dict(), strict=False)
    outputs = [backbone(tokens, batch) for backbone in backbones]
    assert not torch.allclose(*outputs, rtol=1e-3, atol=1e-3)


def test_products_of_bfloat16_are_the_kernel_s():
    if KERNEL.library() is None:
        pytest.skip(KERNEL.failure())
    batch, tokens, outputs = random_batch(LENGTHS), torch.randn(sum(LENGTHS), 8), {}
    for backend, products in (("cpp", "fp32"), ("cpp", "bf16"), ("torch", "bf16")):
        torch.manual_seed(0)
        backbone = hstu(products=products, backend=backend)
        for parameter in backbone.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        outputs[backend, products] = backbone(tokens, batch)
    exact = outputs["cpp", "fp32"]
    error = (outputs["cpp", "bf16"] - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 1e-5 < error < 1e-2
    torch.testing.assert_close(outputs["torch", "bf16"], exact, rtol=1e-4, atol=1e-5)  # PyTorch does not round


def test_affine_norms_and_the_bias_start_as_if_they_were_not_there():
    batch, tokens, outputs = random_batch(LENGTHS), torch.randn(sum(LENGTHS), 8), []
    for options in ({}, {"affine_norms": True, "uvqk_bias": True}):
        torch.manual_seed(0)
        outputs.append(hstu(**options)(tokens, batch))
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize(("scale", "same"), [("constant", True), ("position", True), ("length", False)])
def test_a_division_by_the_length_alone_lets_the_past_know_what_follows(scale, same):
    torch.manual_seed(0)
    backbone, batch, tokens = hstu(attention_scale=scale).double(), random_batch([9]), torch.randn(9, 8, dtype=torch.float64)
    per_token = ("values", "timestamps", "targets", "target_times", "negatives")
    shorter = replace(batch, offsets=torch.tensor([0, 6]), **{name: getattr(batch, name)[:6] for name in per_token})
    assert torch.allclose(backbone(tokens[:6], shorter), backbone(tokens, batch)[:6], rtol=1e-9, atol=0) == same


@pytest.mark.parametrize("backbone", [HSTU, SASRec, FuXi])
def test_a_mask_narrows_what_outputs_depend_on(backbone):
    torch.manual_seed(0)
    batch, tokens = random_batch([9]), torch.randn(9, 8)
    for mask, last in (("causal", 9), (WINDOW, 5)):
        for rematerialise in (False, True):
            model = backbone(dim=8, num_blocks=1, max_length=32, dropout=0.0, mask=mask, rematerialise=rematerialise)
            before, other = model(tokens, batch), tokens.clone()
            other[2] = torch.randn(8)
            changed = (model(other, batch) - before).abs().sum(1) > 0
            assert changed.tolist() == [2 <= row < last for row in range(9)]


def test_a_history_gives_the_same_output_in_any_batch():
    torch.manual_seed(0)
    backbone = HSTU(dim=8, max_length=32, dropout=0.0).double()
    batch = random_batch([7, 20])
    tokens = torch.randn(27, 8, dtype=torch.float64)
    alone = replace(
        batch,
        values=batch.values[:7],
        offsets=torch.tensor([0, 7]),
        timestamps=batch.timestamps[:7],
        targets=batch.targets[:7],
        target_times=batch.target_times[:7],
        user_ids=batch.user_ids[:1],
        negatives=None,
    )
    torch.testing.assert_close(backbone(tokens[:7], alone), backbone(tokens, batch)[:7])


def test_the_query_time_reaches_the_last_output_and_only_that():
    torch.manual_seed(0)
    backbone = HSTU(dim=8, max_length=32, dropout=0.0)
    batch = random_batch([6])
    tokens = torch.randn(6, 8)
    later = batch.target_times.clone()
    later[-1] += 10**6
    changed = (backbone(tokens, replace(batch, target_times=later)) - backbone(tokens, batch)).abs().sum(1) > 0
    assert changed.tolist() == [False] * 5 + [True]
    sasrec = SASRec(dim=8, max_length=32, dropout=0.0)
    assert torch.equal(sasrec(tokens, replace(batch, target_times=later)), sasrec(tokens, batch))


def test_hstu_large_has_the_papers_dense_parameters():
    with torch.device("meta"):
        explicit, preset = HSTU(1024, 16, 8, 128, 128, 2048, 0.5, TimeBuckets(32)), HSTU.preset("large")
    for backbone in (explicit, preset):
        assert sum(p.numel() for p in backbone.blocks.parameters()) == 83_968_512


def test_initialisation():
    torch.manual_seed(0)
    backbone = HSTU(dim=64, max_length=500)
    assert backbone.positions.std().item() == pytest.approx(0.8796 / 8, rel=0.02)
    assert backbone.blocks[0].uvqk.std().item() == pytest.approx(0.02, rel=0.05)
    assert backbone.blocks[0].bias.position.std().item() == pytest.approx(0.02, rel=0.2)
    assert backbone.blocks[0].out.weight.abs().max() <= (6 / 128) ** 0.5


def test_the_position_table_is_read_by_distance():
    bias = RelativeBias(4, None)
    with torch.no_grad():
        bias.position.copy_(torch.arange(7.0))
    assert bias.by_distance().tolist() == [3.0, 2.0, 1.0, 0.0]  # w_pos[j - i + n - 1] for i - j = 0, 1, 2, 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HSTU(dim=10, num_heads=3), "dim 10 is not divisible by num_heads 3"),
        (lambda: SASRec(dim=10, num_heads=3), "dim 10 is not divisible by num_heads 3"),
        (lambda: HSTU(max_length=0), "HSTU: max_length must be at least 1, got 0"),
        (lambda: HSTU(num_blocks=0), "HSTU: num_blocks must be at least 1"),
        (lambda: HSTU(qk_dim=-1), "HSTU: qk_dim must be at least 1"),
        (lambda: SASRec(ffn_dim=0), "SASRec: ffn_dim must be at least 1"),
        (lambda: HSTU(products="fp16"), "HSTU: products must be one of fp32, bf16, got 'fp16'"),
        (lambda: HSTU(attention_scale="row"), "attention_scale must be one of constant, length, position, got 'row'"),
        (lambda: HSTU(dropout=1.0), r"dropout must lie in \[0, 1\), got 1.0"),
        (lambda: HSTU(mask="windowed"), "HSTU: there is no mask 'windowed'; known are causal"),
        (lambda: SASRec(mask="no_such_masks.window"), "SASRec: mask 'no_such_masks.window' cannot be imported"),
        (lambda: FuXi(mask=WINDOW + "s"), "FuXi: mask 'tests.models.make.windows': module tests.models.make has no function"),
        (lambda: HSTU(mask=WINDOW, backend="cpp"), "HSTU: backend cpp computes mask causal only"),
        (lambda: TimeBuckets(divisor=0.0), "count, divisor and unit must be positive"),
        (lambda: HSTU(max_length=8)(torch.zeros(3, 50), random_batch([3])), "built for histories of 8 tokens"),
    ],
)
def test_impossible_sizes_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
