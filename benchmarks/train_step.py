"""A whole HSTU training step against the padded dense formulation of public research trainers, at two shapes.

Both sides start from the same weights and see the same batches; their losses must agree before anything is timed. The baseline
pads every history to the batch's longest, builds the [B, N, N] bias and the [B, H, N, N] scores, gathers the negatives'
embeddings to [T, R, D], normalises them there, and trains the whole table with AdamW. Steps are interleaved; the ratio is the
median over the rounds. Peak memory counts PyTorch's allocations above weights and optimizer state.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from _memory import allocations
from _report import Report, parse_arguments
from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.batch import JaggedBatch
from turbogr.losses import SampledSoftmax
from turbogr.models.bias import TimeBuckets
from turbogr.models.hstu import EPS, HSTU, HSTUBlock
from turbogr.models.retriever import GenerativeRetriever
from turbogr.ops.normalise import normalised
from turbogr.sparse.optimizers import LazyAdam
from turbogr.sparse.table import EmbeddingTable

NEGATIVES = 128
LEARNING_RATE = 1e-3
DROPOUT = 0.2


@dataclass(frozen=True)
class Shape:
    """One setting: catalogue, backbone and a log-normal of history lengths (of the logarithm: mean, deviation)."""

    name: str
    num_items: int
    users: int
    lengths: tuple[float, float, int]
    backbone: Callable[[float], HSTU]  # of a dropout probability
    rounds: int


SHAPES = [
    # MovieLens-100K: 1,682 films, half of the users have more than 65 events, a seventh more than 200.
    Shape(
        "MovieLens-like: D 50, L 200, 2 blocks, 1 head, batch 128",
        1682,
        128,
        (4.2, 0.95, 18),
        lambda p: HSTU(50, 2, 1, dropout=p),
        8,
    ),
    # MovieLens latest-small: 9,724 films, median 70, a twentieth of the users have more than 600.
    Shape(
        "long: D 128, L 1024, 4 blocks, 4 heads, batch 16",
        9724,
        16,
        (4.4, 1.1, 20),
        lambda p: HSTU(128, 4, 4, 32, 32, 1024, p, TimeBuckets()),
        5,
    ),
]


def random_batch(shape: Shape, max_length: int, seed: int) -> JaggedBatch:
    """Histories with the shape's lengths, popular items more often, and log-normal gaps in seconds."""
    g = torch.Generator().manual_seed(seed)
    mean, deviation, least = shape.lengths
    lengths = torch.empty(shape.users).log_normal_(mean, deviation, generator=g).long().clamp(least, max_length)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = int(offsets[-1])
    items = (torch.rand(tokens + shape.users, generator=g) ** 2 * shape.num_items).long()
    gaps = torch.empty(tokens + shape.users).log_normal_(3.0, 3.0, generator=g).long()
    keep = torch.ones(tokens + shape.users, dtype=torch.bool)
    keep[offsets[1:] + torch.arange(shape.users)] = False  # a user's last event is a target only
    times = 10**9 + gaps.cumsum(0)
    return JaggedBatch(
        values=items[keep],
        offsets=offsets,
        timestamps=times[keep],
        targets=items[1:][keep[:-1]],
        target_times=times[1:][keep[:-1]],
        user_ids=torch.arange(shape.users),
        max_length=max_length,
        negatives=torch.randint(0, shape.num_items, (tokens, NEGATIVES), generator=g),
    )


class PaddedTrainer(nn.Module):
    """The baseline: the same model on padded dense tensors, the table an ordinary dense parameter."""

    def __init__(self, model: GenerativeRetriever) -> None:
        super().__init__()
        backbone = model.backbone
        assert isinstance(backbone, HSTU)
        self.backbone = backbone
        self.table = nn.Embedding.from_pretrained(model.embeddings.weight.detach().clone(), freeze=False)
        assert isinstance(model.loss, SampledSoftmax)
        self.temperature = model.loss.temperature

    def loss(self, batch: JaggedBatch) -> Tensor:
        """Mean loss over the valid positions of the padded batch."""
        lengths, longest = batch.lengths, int(batch.lengths.max())
        position = torch.arange(longest)
        valid = position < lengths[:, None]

        def padded(jagged: Tensor) -> Tensor:
            return jagged.new_zeros(len(lengths), longest).masked_scatter(valid, jagged)

        x = self.table(padded(batch.values)) * self.backbone.dim**0.5 + self.backbone.positions[:longest]
        x = self.backbone.dropout(x) * valid[..., None]
        asked, happened = padded(batch.target_times), padded(batch.timestamps)
        for block in self.backbone.blocks:
            assert isinstance(block, HSTUBlock)
            x = self._block(block, x, asked, happened, position) * valid[..., None]
        assert batch.negatives is not None
        output = normalised(x[valid])
        positive = normalised(self.table(batch.targets))
        negative = normalised(self.table(batch.negatives))
        logits = torch.einsum("td,trd->tr", output, negative)
        logits = logits.masked_fill(batch.negatives == batch.targets[:, None], -torch.inf)
        logits = torch.cat([(output * positive).sum(1, keepdim=True), logits], 1) / self.temperature
        return -F.log_softmax(logits, dim=1)[:, 0].mean()

    @staticmethod
    def _block(block: HSTUBlock, x: Tensor, asked: Tensor, happened: Tensor, position: Tensor) -> Tensor:
        users, longest, _ = x.shape
        u, v, q, k = F.silu(F.layer_norm(x, x.shape[-1:], eps=EPS) @ block.uvqk).split(block.sizes, dim=-1)
        q, k, v = (t.view(users, longest, block.num_heads, -1) for t in (q, k, v))
        assert block.bias.time is not None
        gap = (asked[:, :, None] - happened[:, None, :]).abs().clamp(min=1).float() / block.time.unit
        buckets = (gap.log() / block.time.divisor).long().clamp(0, block.time.count)
        bias = block.bias.position[(position[None] - position[:, None]) + block.max_length - 1] + block.bias.time[buckets]
        weights = F.silu(torch.einsum("bihd,bjhd->bhij", q, k) + bias[:, None]) / block.max_length
        weights = weights * torch.ones(longest, longest).tril()
        attended = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
        return x + block.out(F.dropout(u * F.layer_norm(attended, attended.shape[-1:], eps=EPS), block.dropout))


def steppers(shape: Shape) -> tuple[Callable[[JaggedBatch], float], Callable[[JaggedBatch], float], int]:
    """One training step of turbogr and of the baseline from the same weights, and the longest history."""
    torch.manual_seed(0)
    model = GenerativeRetriever(shape.num_items, shape.backbone(DROPOUT), EmbeddingTable(LazyAdam(LEARNING_RATE)))
    model.log = lambda *_, **__: None  # type: ignore[method-assign]  # no trainer here
    baseline = PaddedTrainer(copy.deepcopy(model))
    dense = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LEARNING_RATE, (0.9, 0.98), weight_decay=0.0)
    everything = torch.optim.AdamW(baseline.parameters(), LEARNING_RATE, (0.9, 0.98), weight_decay=0.0)

    def ours(batch: JaggedBatch) -> float:
        dense.zero_grad()
        loss = model.training_step(batch, 0)
        loss.backward()
        model.embeddings.apply_gradients()
        dense.step()
        return loss.item()

    def theirs(batch: JaggedBatch) -> float:
        everything.zero_grad()
        loss = baseline.loss(batch)
        loss.backward()
        everything.step()
        return loss.item()

    return ours, theirs, model.backbone.max_length


def check_agreement(shape: Shape) -> None:
    """Without dropout both sides compute the same losses over three steps: the baseline is the same model.

    Raises:
        SystemExit: if they do not.
    """
    without = Shape(shape.name, shape.num_items, 4, shape.lengths, lambda _: shape.backbone(0.0), 0)
    ours, theirs, max_length = steppers(without)
    for seed in range(3):
        batch = random_batch(without, max_length, seed)
        a, b = ours(batch), theirs(batch)
        if abs(a - b) > 1e-3 * abs(b):
            raise SystemExit(f"{shape.name}: the losses of step {seed} differ: {a} and {b} (baseline)")


def measure(report: Report, shape: Shape, rounds: int) -> None:
    """Adds the rows of one shape."""
    check_agreement(shape)
    ours, theirs, max_length = steppers(shape)
    batches = [random_batch(shape, max_length, seed) for seed in range(rounds + 1)]
    ours(batches[-1])
    theirs(batches[-1])
    rates, ratios = [], []
    for batch in batches[:rounds]:
        seconds = []
        for step in (ours, theirs):
            start = time.perf_counter()
            step(batch)
            seconds.append(time.perf_counter() - start)
        rates.append([batch.num_tokens / s for s in seconds])
        ratios.append(seconds[1] / seconds[0])
    our_rate, their_rate = (statistics.median(rate) for rate in zip(*rates, strict=True))
    report.add(f"{shape.name}: training speed", our_rate, "tokens/s", baseline=their_rate)
    report.add(f"{shape.name}: speed over padded", statistics.median(ratios), "x", baseline=1.0, at_least=1.0)
    peaks = [allocations(partial(step, batches[-1]))[1] / 2**20 for step in (ours, theirs)]
    report.add(f"{shape.name}: peak memory of a step", peaks[0], "MiB", baseline=peaks[1], at_most=peaks[1])


def main() -> int:
    """Entry point."""
    arguments = parse_arguments(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    report = Report("train_step", arguments.quick)
    for shape in SHAPES:
        measure(report, shape, 3 if arguments.quick else shape.rounds)
    report.note(f"{torch.get_num_threads()} threads, torch {torch.__version__}, fp32; a token is a position with a target")
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
