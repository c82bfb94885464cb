"""Whole training steps of HSTU, SASRec and FuXi against the padded dense formulation of public trainers, at two shapes.

Both sides start from the same weights and see the same batches; their losses must agree before anything is timed. The baseline
pads every history to the batch's longest, builds the [B, N, N] bias and the [B, H, N, N] scores, gathers the negatives'
embeddings to [T, R, D], normalises them there, and trains the whole table with AdamW (benchmarks/_padded.py). Steps are
interleaved; the ratio is the median over the rounds. All sides run with freed memory kept by the process. Peak memory counts
PyTorch's allocations above weights and optimizer state.

The sequences are those of prepared folders where --data-short and --data-long name them, else synthetic ones with such lengths.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from _batches import Lengths, building_time, first_users, real_batches, synthetic_batches
from _breakdown import OTHER, breakdown
from _memory import allocations
from _padded import PaddedTrainer
from _report import Report, parse_arguments
from _timing import keep_freed_memory, sgemm_rate, timed

from turbogr.batch import JaggedBatch
from turbogr.models.backbone import Backbone
from turbogr.models.fuxi import FuXi
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.models.sasrec import SASRec
from turbogr.models.time_encoders import BucketedTime
from turbogr.sparse.optimizers import LazyAdam
from turbogr.sparse.table import EmbeddingTable

LEARNING_RATE = 1e-3
DROPOUT = 0.2

Make = Callable[[float, bool], Backbone]
"""A backbone of a dropout probability and the option `rematerialise`."""


@dataclass(frozen=True)
class Shape:
    """One setting: batches and the backbones' sizes.

    `floors` are the promised speeds over padded: of HSTU, and of the other models.
    """

    name: str
    users: int
    max_length: int
    lengths: Lengths
    models: dict[str, Make]
    floors: tuple[float, float]
    rounds: int


SHORT = Shape(
    "D 50, L 200, 2 blocks, 1 head, batch 128",
    128,
    200,
    # MovieLens-100K: 1,682 films, half of the users have more than 65 events, a seventh more than 200.
    Lengths(4.2, 0.95, 18, 1682),
    {
        "HSTU": lambda p, r: HSTU(50, 2, 1, dropout=p, rematerialise=r),
        "SASRec": lambda p, r: SASRec(50, 2, 1, dropout=p, rematerialise=r),
        "FuXi": lambda p, r: FuXi(50, 2, 1, dropout=p, time_encoder=BucketedTime(), rematerialise=r),
    },
    (5.0, 4.0),
    9,
)
LONG = Shape(
    "D 128, L 1024, 4 blocks, 4 heads, batch 16",
    16,
    1024,
    # MovieLens latest-small: 9,724 films, median 70, a twentieth of the users have more than 600.
    Lengths(4.4, 1.1, 20, 9724),
    {
        "HSTU": lambda p, r: HSTU(128, 4, 4, max_length=1024, dropout=p, rematerialise=r),
        "SASRec": lambda p, r: SASRec(128, 4, 4, max_length=1024, dropout=p, rematerialise=r),
        "FuXi": lambda p, r: FuXi(128, 4, 4, max_length=1024, dropout=p, time_encoder=BucketedTime(), rematerialise=r),
    },
    (20.0, 4.0),
    5,
)

Step = Callable[[JaggedBatch], float]


def steppers(make: Make, num_items: int, dropout: float = DROPOUT) -> dict[str, Step]:
    """One training step of turbogr, of turbogr with rematerialised blocks and of the baseline, from the same weights."""
    torch.manual_seed(0)
    model = GenerativeRetriever(num_items, make(dropout, False), EmbeddingTable(LazyAdam(LEARNING_RATE)))
    model.log = lambda *_, **__: None  # type: ignore[method-assign]  # no trainer here
    rematerialised = copy.deepcopy(model)
    rematerialised.backbone.rematerialise = True
    baseline = PaddedTrainer(copy.deepcopy(model), dropout)
    everything = torch.optim.AdamW(baseline.parameters(), LEARNING_RATE, (0.9, 0.98), weight_decay=0.0)

    def theirs(batch: JaggedBatch) -> float:
        everything.zero_grad()
        loss = baseline.loss(batch)
        loss.backward()
        everything.step()
        return loss.item()

    return {"turbogr": _ours(model), "rematerialised": _ours(rematerialised), "padded": theirs}


def _ours(model: GenerativeRetriever) -> Step:
    dense = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], LEARNING_RATE, (0.9, 0.98), weight_decay=0.0)

    def step(batch: JaggedBatch) -> float:
        dense.zero_grad()
        loss = model.training_step(batch, 0)
        loss.backward()
        model.embeddings.apply_gradients()
        dense.step()
        return loss.item()

    return step


def check_agreement(name: str, make: Make, batches: list[JaggedBatch], num_items: int) -> None:
    """Without dropout all sides compute the same losses over three steps: the baseline is the same model.

    Raises:
        SystemExit: if they do not.
    """
    sides = steppers(make, num_items, dropout=0.0)
    for number, batch in enumerate(batches[:3]):
        few = first_users(batch, 4)
        losses = {side: step(few) for side, step in sides.items()}
        if any(abs(loss - losses["padded"]) > 1e-3 * abs(losses["padded"]) for loss in losses.values()):
            raise SystemExit(f"{name}: the losses of step {number} differ: {losses}")


def measure(report: Report, shape: Shape, model: str, batches: list[JaggedBatch], num_items: int) -> None:
    """Adds the rows of one model at one shape; memory is counted on the batch with the longest history."""
    name = f"{model}, {shape.name}"
    check_agreement(name, shape.models[model], batches, num_items)
    sides = steppers(shape.models[model], num_items)
    longest = max(batches, key=lambda batch: int(batch.lengths.max()))
    for step in sides.values():
        step(longest)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for batch in batches:
        for side, step in sides.items():
            rates[side].append(batch.num_tokens / timed(partial(step, batch)))
    rate = {side: statistics.median(values) for side, values in rates.items()}
    peak = {side: allocations(partial(step, longest))[1] / 2**20 for side, step in sides.items()}

    def over(side: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(rates[side], rates[other], strict=True))

    floor = shape.floors[0 if model == "HSTU" else 1]
    report.add(f"{name}: training speed", rate["turbogr"], "tokens/s", baseline=rate["padded"])
    report.add(f"{name}: speed over padded", over("turbogr", "padded"), "x", baseline=1.0, at_least=floor)
    report.add(f"{name}: peak memory", peak["turbogr"], "MiB", baseline=peak["padded"], at_most=0.15 * peak["padded"])
    report.add(f"{name}, rematerialised: peak memory", peak["rematerialised"], "MiB", baseline=peak["turbogr"])
    report.add(f"{name}, rematerialised: time", over("turbogr", "rematerialised"), "x", baseline=1.0)
    if model == "HSTU":
        parts(report, name, lambda: sides["turbogr"](longest))


def parts(report: Report, name: str, step: Callable[[], object]) -> None:
    """Adds the rows of where a step's time goes."""
    where = breakdown(step, 5)
    for part, share in sorted(where.shares.items(), key=lambda item: -item[1]):
        report.add(f"{name}: {part}", 100 * share, "% of step")
    products = sum(where.shares.get(part, 0.0) for part in ("projections", "attention", "loss"))
    report.add(f"{name}: all but projections, attention and loss", 100 * (1 - products), "% of step", at_most=25)
    report.add(f"{name}: projections, share of the sgemm rate", where.projection_rate / sgemm_rate(), "x", at_least=0.85)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-short", type=Path, metavar="DIR", help="prepared folder of the first shape: MovieLens-100K")
    parser.add_argument("--data-long", type=Path, metavar="DIR", help="prepared folder of the second: MovieLens latest-small")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="PyTorch's and the kernels' (default: all)"
    )
    parser.add_argument("--models", nargs="+", default=list(SHORT.models), choices=list(SHORT.models), help="default: all")
    arguments = parse_arguments(parser)
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    report = Report("train_step", arguments.quick)
    for shape, folder in ((SHORT, arguments.data_short), (LONG, arguments.data_long)):
        count = 2 if arguments.quick else shape.rounds
        source = partial(synthetic_batches, shape.lengths) if folder is None else partial(real_batches, folder)
        batches, num_items = source(shape.users, shape.max_length, count)
        for model in ("HSTU",) if arguments.quick else arguments.models:
            measure(report, shape, model, batches, num_items)
        if folder is not None:
            seconds = building_time(folder, shape.users, shape.max_length)
            report.add(f"{shape.name}: building a batch, beside the step where there are workers", 1e3 * seconds, "ms")
        tokens = statistics.mean(batch.num_tokens for batch in batches)
        longest = statistics.mean(int(batch.lengths.max()) for batch in batches)
        report.note(f"{shape.name}: {folder or 'synthetic'}, {tokens:,.0f} tokens a batch, longest {longest:,.0f}")
    report.note(f"{torch.get_num_threads()} threads, torch {torch.__version__}, fp32; a token is a position with a target")
    report.note(f"'{OTHER}' includes Python; loss and attention are fused kernels, most of whose work is products")
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
