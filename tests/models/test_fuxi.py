"""FuXi: blocks against an independent dense float64 formulation, its time encoders, and both on real gaps of time."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from tests.models.make import WINDOW, allowed, random_batch
from tests.models.test_bias import gaps_of
from turbogr.batch import JaggedBatch
from turbogr.errors import ConfigurationError
from turbogr.models.bias import TimeBuckets
from turbogr.models.fuxi import FuXi
from turbogr.models.retriever import GenerativeRetriever
from turbogr.models.time_encoders import BucketedTime, FunctionalTime
from turbogr.sparse.optimizers import LazyAdam
from turbogr.sparse.table import EmbeddingTable

LENGTHS = [9, 1, 14, 30]
SPAN = 10**7 / 30
"""A thirtieth of the random histories' span, in ticks: a unit that leaves weights of every size."""


def rms_norm(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def dense_time(encoder, index, batch, start, end):
    """[n, n] weights of the time channel, every pair of them."""
    keys = batch.timestamps[None, start:end]
    asked = batch.timestamps if getattr(encoder, "row_time", None) == "event" else batch.target_times
    gap = (asked[start:end, None] - keys).abs().double()
    if isinstance(encoder, BucketedTime):
        buckets = encoder.buckets
        bucket = torch.floor(torch.log(torch.clamp(gap / buckets.unit, min=1)) / buckets.divisor).clamp(0, buckets.count)
        return encoder.tables[index][bucket.long()]
    beta = torch.log(1 + torch.exp(encoder.raw_exponent))
    log_gamma = torch.log(1 / (1 + torch.exp(-encoder.raw_decay)))
    power = torch.exp(beta * torch.log(torch.clamp(gap / encoder.unit, min=1e-300))) * (gap > 0)
    return encoder.amplitude * torch.exp(log_gamma * power)


def dense_fuxi(backbone: FuXi, tokens, batch, start, end):
    x = tokens[start:end] * backbone.dim**0.5 + backbone.positions[: end - start]
    n = end - start
    row, column = torch.arange(n)[:, None], torch.arange(n)[None]
    causal = allowed(backbone.mask, n)
    for index, block in enumerate(backbone.blocks):
        heads, dqk, dv = block.num_heads, block.qk_dim, block.v_dim
        projected = rms_norm(x) @ block.uvqk
        projected = projected * torch.sigmoid(projected)
        u, v, q, k = projected.split([3 * heads * dv, heads * dv, heads * dqk, heads * dqk], 1)
        by_position = block.bias.position[(column - row) + block.max_length - 1] * causal
        by_time = dense_time(backbone.time_encoder, index, batch, start, end) * causal
        outputs = []
        for h in range(heads):
            score = q[:, h * dqk : (h + 1) * dqk] @ k[:, h * dqk : (h + 1) * dqk].T
            semantic = score * torch.sigmoid(score) / block.max_length * causal
            values = v[:, h * dv : (h + 1) * dv]
            outputs += [by_position @ values, by_time @ values, semantic @ values]
        gated = u * rms_norm(torch.cat(outputs, 1))
        z = x + gated @ block.out.weight.T + block.out.bias
        r = rms_norm(z)
        gate = r @ block.gate.weight.T
        x = z + (gate * torch.sigmoid(gate) * (r @ block.expand.weight.T)) @ block.contract.weight.T
    return x


def small(**options):
    return FuXi(**{"dim": 8, "num_blocks": 2, "num_heads": 2, "max_length": 32, "dropout": 0.0, **options})


BACKBONES = {
    "functional": lambda: small(qk_dim=3, v_dim=5, time_encoder=FunctionalTime(SPAN)),
    "functional of both events": lambda: small(num_heads=1, time_encoder=FunctionalTime(SPAN, 0.8, "event")),
    "bucketed": lambda: small(qk_dim=3, v_dim=5, time_encoder=BucketedTime()),
    "windowed": lambda: small(time_encoder=FunctionalTime(SPAN), mask=WINDOW),
    "bucketed in minutes": lambda: small(ffn_multiplier=4, time_encoder=BucketedTime(TimeBuckets(12, 0.7, 60.0))),
}


@pytest.mark.parametrize("name", BACKBONES)
def test_equals_the_dense_formulation(name):
    torch.manual_seed(3)
    backbone = BACKBONES[name]().double()
    for parameter in backbone.parameters():  # biases start at zero: give every parameter a say
        torch.nn.init.normal_(parameter, std=0.3)
    batch = random_batch(LENGTHS)
    tokens = torch.randn(batch.num_tokens, 8, dtype=torch.float64, requires_grad=True)
    inputs = [tokens, *backbone.parameters()]
    out = backbone(tokens, batch)
    expected = torch.cat([dense_fuxi(backbone, tokens, batch, a, b) for a, b in pairwise(batch.offsets.tolist())])
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
    backbone = BACKBONES[name]()
    batch = random_batch([6, 5])
    tokens = torch.randn(11, 8)
    before = backbone(tokens, batch)
    tokens[2] = torch.randn(8)
    changed = (backbone(tokens, batch) - before).abs().sum(1) > 0
    assert changed.tolist() == [False] * 2 + [True] * 4 + [False] * 5


@pytest.mark.parametrize("name", BACKBONES)
def test_the_query_time_reaches_the_last_output_and_only_that(name):
    torch.manual_seed(0)
    backbone = BACKBONES[name]()
    batch = random_batch([6])
    tokens = torch.randn(6, 8)
    later = batch.target_times.clone()
    later[-1] += 10**6
    changed = (backbone(tokens, replace(batch, target_times=later)) - backbone(tokens, batch)).abs().sum(1) > 0
    # The negative control: the paper's gaps are those of the history alone.
    assert changed.tolist() == [False] * 5 + [name != "functional of both events"]


def test_a_reloaded_backbone_gives_the_same_outputs():
    torch.manual_seed(0)
    batch, tokens = random_batch(LENGTHS), torch.randn(sum(LENGTHS), 8)
    for make in BACKBONES.values():
        backbone, other = make(), make()
        assert not torch.equal(other(tokens, batch), backbone(tokens, batch))
        other.load_state_dict(backbone.state_dict())
        assert torch.equal(other(tokens, batch), backbone(tokens, batch))


def test_backends_agree():
    torch.manual_seed(0)
    batch, tokens = random_batch(LENGTHS), torch.randn(sum(LENGTHS), 8)
    for encoder in (lambda: FunctionalTime(SPAN), BucketedTime):
        backbones = [small(time_encoder=encoder(), backend=backend) for backend in ("auto", "torch", "reference")]
        for other in backbones[1:]:
            other.load_state_dict(backbones[0].state_dict())
            torch.testing.assert_close(other(tokens, batch), backbones[0](tokens, batch), rtol=1e-4, atol=1e-5)


def dense_parameters(backbone):
    return sum(p.numel() for name, p in backbone.named_parameters() if name != "positions")


def test_fuxi_large_has_the_papers_dense_parameters():
    """201.55 M: D 1024, 16 blocks, 8 heads of width 128, length 2048, and a feed-forward network of width D."""
    for encoder, count in ((FunctionalTime, 3), (lambda: BucketedTime(TimeBuckets(32)), 16 * 33)):
        with torch.device("meta"):
            backbone = FuXi(1024, 16, 8, 128, 128, 1, 2048, 0.5, encoder())
        projection, output, network = 1024 * 6 * 1024, 3 * 1024 * 1024 + 1024, 3 * 1024 * 1024
        assert dense_parameters(backbone) == 16 * (projection + output + network + 2 * 2048 - 1) + count
        assert dense_parameters(backbone) == pytest.approx(201.55e6, rel=2e-3)
    with torch.device("meta"):
        assert dense_parameters(FuXi.preset("large")) == pytest.approx(201.55e6, rel=2e-3)
        # the negative control
        assert dense_parameters(FuXi(1024, 16, 8, 128, 128, 2, 2048)) != pytest.approx(201.55e6, rel=0.2)


def test_initialisation():
    torch.manual_seed(0)
    backbone = FuXi(dim=64, max_length=500, ffn_multiplier=2, time_encoder=BucketedTime())
    block = backbone.blocks[0]
    assert block.uvqk.shape == (64, 4 * 64 + 2 * 64)
    assert block.uvqk.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.bias.position.std().item() == pytest.approx(0.02, rel=0.2)
    assert [tuple(table.shape) for table in backbone.time_encoder.tables] == [(129,), (129,)]
    assert backbone.time_encoder.tables[0].std().item() == pytest.approx(0.02, rel=0.2)
    assert block.out.weight.abs().max() <= (6 / (3 * 64 + 64)) ** 0.5
    assert block.gate.weight.shape == block.expand.weight.shape == block.contract.weight.T.shape == (128, 64)


def test_the_time_function_starts_where_the_paper_says():
    torch.manual_seed(0)
    drawn = torch.stack([torch.cat(FunctionalTime().function()) for _ in range(400)]).T
    for values, low, high in zip(drawn, (-0.1, 0.5, 0.5), (0.1, 0.99, 2.0), strict=True):
        assert low <= values.min()
        assert values.max() <= high
        assert values.mean().item() == pytest.approx((low + high) / 2, abs=(high - low) / 20)
    amplitude, decay, exponent = FunctionalTime(initial_decay=0.9).function()
    assert decay.item() == pytest.approx(0.9)
    assert amplitude.abs() <= 0.1
    assert 0.5 <= exponent <= 2


def test_one_time_function_serves_all_blocks():
    backbone = FuXi(dim=8, num_blocks=5)
    assert [name for name, _ in backbone.time_encoder.named_parameters()] == ["amplitude", "raw_decay", "raw_exponent"]
    assert not any("time" in name for name, _ in backbone.blocks.named_parameters())


def movielens(folder):
    return folder / "ml-latest-small" / "ratings.csv", "userId", "timestamp", "movieId", 86_400.0


def kuairand(folder):
    (path,) = (folder / "kuairand-27k-sample").glob("log_standard*.csv")
    return path, "user_id", "time_ms", "video_id", 86_400_000.0


@pytest.mark.parametrize("source", [movielens, kuairand])
def test_the_functional_channel_is_alive_on_real_gaps(shared_data, source):
    path, user, time, _, day = source(shared_data)
    with open(path, newline="") as file:
        gaps = torch.cat(list(gaps_of(csv.DictReader(file), user, time))).double()

    def alive(unit, seed):
        torch.manual_seed(seed)
        amplitude, decay, exponent = (x.detach().double() for x in FunctionalTime(unit).function())
        return ((amplitude * decay ** ((gaps / unit) ** exponent)).abs() > 1e-3).double().mean().item()

    shares = [alive(day, seed) for seed in range(10)]
    assert min(shares) > 0.2
    # The negative control: with time in seconds the channel is dead wherever it starts.
    assert max(alive(day / 86_400, seed) for seed in range(10)) < 0.1


def real_batch(path, user, time, item, users=24, newest=60):
    """The newest events of the log's first users, as a training batch."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    catalogue = {name: index for index, name in enumerate(sorted({row[item] for row in rows}))}
    events: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        events.setdefault(row[user], []).append((int(row[time]), catalogue[row[item]]))
    chosen = [torch.tensor(sorted(x)[-newest - 1 :]) for x in events.values() if len(x) > 5][:users]
    tokens = sum(len(x) - 1 for x in chosen)
    batch = JaggedBatch(
        values=torch.cat([x[:-1, 1] for x in chosen]),
        offsets=torch.tensor([0, *(len(x) - 1 for x in chosen)]).cumsum(0),
        timestamps=torch.cat([x[:-1, 0] for x in chosen]),
        targets=torch.cat([x[1:, 1] for x in chosen]),
        target_times=torch.cat([x[1:, 0] for x in chosen]),
        user_ids=torch.arange(len(chosen)),
        max_length=newest,
        negatives=torch.randint(0, len(catalogue), (tokens, 64), generator=torch.Generator().manual_seed(0)),
    )
    return batch, len(catalogue)


@pytest.mark.parametrize("encoder", ["functional", "bucketed"])
@pytest.mark.parametrize("source", [movielens, kuairand])
def test_every_parameter_learns_on_real_data(shared_data, source, encoder):
    path, user, time, item, day = source(shared_data)
    batch, num_items = real_batch(path, user, time, item)
    torch.manual_seed(0)
    chosen = FunctionalTime(day) if encoder == "functional" else BucketedTime(TimeBuckets(unit=day / 86_400))
    model = GenerativeRetriever(
        num_items,
        FuXi(dim=16, num_blocks=2, num_heads=2, max_length=60, dropout=0.0, time_encoder=chosen),
        EmbeddingTable(LazyAdam(lr=4e-3)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=4e-3),
    )
    model.log = lambda *args, **kwargs: None
    optimizer = model.configure_optimizers()
    losses = []
    for _ in range(11):
        optimizer.zero_grad()
        loss = model.training_step(batch, 0)
        loss.backward()
        losses.append(loss.item())
        if len(losses) == 11:
            break
        model.embeddings.apply_gradients()
        optimizer.step()
    assert losses[10] < losses[0]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients.values()), gradients
    assert all(math.isfinite(gradient.abs().max()) for gradient in gradients.values())
    if encoder == "functional":
        assert all(gradients[f"backbone.time_encoder.{x}"].item() != 0 for x in ("amplitude", "raw_decay", "raw_exponent"))
        amplitude, decay, exponent = (x.detach().double() for x in chosen.function())
        pairs = [
            (batch.target_times[a:b, None] - batch.timestamps[None, a:b])[torch.ones(b - a, b - a, dtype=torch.bool).tril()]
            for a, b in pairwise(batch.offsets.tolist())
        ]
        weights = amplitude * decay ** ((torch.cat(pairs).abs() / day) ** exponent)
        assert (weights.abs() > 1e-3).double().mean() > 0.2, "alive after training, too"


def test_dropout_is_where_the_paper_puts_it():
    """On the input, the gated output and the feed-forward network's input, and nowhere in evaluation."""
    torch.manual_seed(0)
    backbone, batch, tokens = small(dropout=0.5), random_batch([6]), torch.randn(6, 8)
    assert not torch.equal(backbone(tokens, batch), backbone(tokens, batch))
    block = backbone.blocks[0]
    time = backbone.time_encoder.channel(0, batch)
    torch.nn.init.zeros_(block.out.weight)
    torch.nn.init.zeros_(block.out.bias)
    assert not torch.equal(block(tokens, batch, time), block(tokens, batch, time))
    expected = tokens + block.contract(F.silu(block.gate(rms_norm(tokens))) * block.expand(rms_norm(tokens)))
    block.eval()
    torch.testing.assert_close(block(tokens, batch, time), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FuXi(dim=10, num_heads=3), "FuXi: dim 10 is not divisible by num_heads 3"),
        (lambda: FuXi(num_blocks=0), "FuXi: num_blocks must be at least 1"),
        (lambda: FuXi(ffn_multiplier=0), "FuXi: ffn_multiplier must be at least 1, got 0"),
        (lambda: FuXi(v_dim=-1), "FuXi: v_dim must be at least 1"),
        (lambda: FuXi(backend="cuda"), "FuXi: backend must be one of"),
        (lambda: FunctionalTime(unit=0.0), "unit must be positive, got 0.0"),
        (lambda: FunctionalTime(initial_decay=1.0), r"initial_decay must lie in \(0, 1\), got 1.0"),
        (lambda: FunctionalTime(row_time="next"), "row_time must be one of request, event, got 'next'"),
        (lambda: FuXi(max_length=8)(torch.zeros(3, 50), random_batch([3])), "built for histories of 8 tokens"),
    ],
)
def test_impossible_options_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
