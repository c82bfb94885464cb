"""Embedding tables, forward, backward and row-wise AdaGrad: jagged operators over padded nn.Embedding and TorchRec.

Four tables of one width; each serves a jagged batch of sequences whose lengths are uniform, so that half of a padded batch is
padding; ids follow a Zipf law. Everyone starts from the same weights, and after one step the same rows must hold the same
numbers before anything is timed.

The padded side is what research code does: `nn.Embedding` with a padding row on [sequences, longest] ids, its backward and an
exact row-wise AdaGrad written with PyTorch's operators, once with sparse gradients (coalesced, touched rows updated) and once
with dense ones (all rows updated); the faster of the two counts. TorchRec's side is its EmbeddingCollection on a
KeyedJaggedTensor, with the dense gradients that it has on a CPU and the same dense update. Ours looks up into a reused output,
and sorts, sums and updates in one operator; sorting is counted in full, although a data pipeline could do it ahead of time.

Calls are interleaved and a ratio is the median over the rounds; with one thread, process time is counted. All sides run with
freed memory kept by the process. Peak memory counts PyTorch's allocations and our reused output, not the tables; the
kernel's own scratch, a few rows a thread and what finds the distinct ids (some bytes an id), is not among them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from _memory import allocations
from _report import Report, parse_arguments
from _timing import keep_freed_memory, timed
from torch import Tensor, nn

from turbogr.ops.backend import Backend
from turbogr.ops.embedding_lookup import KERNEL, jagged_embedding_lookup
from turbogr.ops.row_update import RowRule, jagged_row_update

TABLES, SEED = 4, 0
RULE = RowRule("row_wise_adagrad", lr=0.01, eps=1e-8)


@dataclass(frozen=True)
class Shape:
    """Sequences a table, their longest, rows and width of a table, and the exponent of Zipf's law."""

    sequences: int
    longest: int
    rows: int
    width: int
    exponent: float = 1.05


class Problem:
    """One batch in both layouts, its gradient, and the tables that all sides share.

    Attributes:
        weights: parameters float32 [V, D]; row 0 is padding, which no sequence contains.
        states: float32 [V, 1] each, row-wise AdaGrad's sums.
        padded: int64 [tables, sequences, longest]; `mask`, bool, where it holds an event.
        ids: int64 [N]; `splits`, int64 [tables + 1].
        gradient: float32 [N, D]; `padded_gradient`, the same in [tables, sequences, longest, D], zero in the padding.
    """

    def __init__(self, shape: Shape) -> None:
        g = torch.Generator().manual_seed(SEED)
        self.shape = shape
        self.lengths = torch.randint(1, shape.longest, (TABLES, shape.sequences), generator=g)
        self.mask = torch.arange(shape.longest) < self.lengths[:, :, None]
        self.padded = torch.zeros(self.mask.shape, dtype=torch.int64)
        law = torch.arange(1, shape.rows, dtype=torch.float64).pow(-shape.exponent).cumsum(0)
        draws = torch.rand(int(self.mask.sum()), generator=g, dtype=torch.float64) * law[-1]
        # Popular rows lie all over the table.
        self.padded[self.mask] = torch.randperm(shape.rows - 1, generator=g)[torch.searchsorted(law, draws)] + 1
        self.ids = self.padded[self.mask]
        counts = self.lengths.sum(1)
        self.splits = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        self.gradient = torch.randn(len(self.ids), shape.width, generator=g)
        self.padded_gradient = torch.zeros(*self.mask.shape, shape.width)
        self.padded_gradient[self.mask] = self.gradient
        self.weights = [nn.Parameter(torch.randn(shape.rows, shape.width, generator=g) * 0.01) for _ in range(TABLES)]
        self.states = [torch.full((shape.rows, 1), 0.1) for _ in range(TABLES)]
        self.touched = [self.ids[self.splits[k] : self.splits[k + 1]].unique() for k in range(TABLES)]

    def rows(self) -> list[Tensor]:
        """The rows and sums that a step changes, copied."""
        pairs = zip(self.weights, self.states, self.touched, strict=True)
        return [x.detach()[rows] for weight, state, rows in pairs for x in (weight, state)]

    def restore(self, rows: list[Tensor]) -> None:
        """Puts them back."""
        with torch.no_grad():
            for k, touched in enumerate(self.touched):
                self.weights[k][touched] = rows[2 * k]
                self.states[k][touched] = rows[2 * k + 1]


@dataclass(frozen=True)
class Side:
    """`forward` gives one output [n, D] a table; `update` takes what it gave, and does backward and update."""

    forward: Callable[[], list[Tensor]]
    update: Callable[[list[Tensor]], None]


def padded_side(problem: Problem, sparse: bool) -> Side:
    """nn.Embedding on padded ids."""
    shape = problem.shape
    modules = [nn.Embedding(shape.rows, shape.width, padding_idx=0, sparse=sparse, _weight=w.data) for w in problem.weights]

    def forward() -> list[Tensor]:
        return [module(ids) for module, ids in zip(modules, problem.padded, strict=True)]

    def update(outputs: list[Tensor]) -> None:
        for module, output, gradient, state in zip(modules, outputs, problem.padded_gradient, problem.states, strict=True):
            output.backward(gradient)
            adagrad(module.weight, state)

    return Side(forward, update)


def adagrad(weight: Tensor, state: Tensor) -> None:
    """Row-wise AdaGrad with PyTorch's operators, on the rows of a sparse gradient or on all."""
    gradient = weight.grad
    assert gradient is not None
    with torch.no_grad():
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            state.index_add_(0, rows, values.square().mean(1, keepdim=True))
            weight.index_add_(0, rows, values / state[rows].sqrt_().add_(RULE.eps), alpha=-RULE.lr)
        else:
            state.add_(gradient.square().mean(1, keepdim=True))
            weight.addcdiv_(gradient, state.sqrt().add_(RULE.eps), value=-RULE.lr)
    weight.grad = None


def torchrec_side(problem: Problem) -> Side:
    """TorchRec's EmbeddingCollection."""
    from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

    shape, names = problem.shape, [f"t{k}" for k in range(TABLES)]
    configs = [
        EmbeddingConfig(name=name, embedding_dim=shape.width, num_embeddings=shape.rows, feature_names=[name]) for name in names
    ]
    collection = EmbeddingCollection(tables=configs, device=torch.device("meta"))
    weights = [nn.Parameter(weight.data) for weight in problem.weights]
    for name, weight in zip(names, weights, strict=True):
        collection.embeddings[name].weight = weight

    def forward() -> list[Tensor]:
        features = KeyedJaggedTensor(keys=names, values=problem.ids, lengths=problem.lengths.flatten())
        found = collection(features)
        return [found[name].values() for name in names]

    def update(outputs: list[Tensor]) -> None:
        torch.autograd.backward(outputs, list(problem.gradient.split(problem.splits.diff().tolist())))
        for weight, state in zip(weights, problem.states, strict=True):
            adagrad(weight, state)

    return Side(forward, update)


def ours(problem: Problem, backend: Backend) -> Side:
    """The operators with one of their back ends."""
    weights = [weight.data for weight in problem.weights]
    output = torch.empty_like(problem.gradient)
    sizes = problem.splits.diff().tolist()

    def forward() -> list[Tensor]:
        found = jagged_embedding_lookup(weights, problem.ids, problem.splits, out=output, backend=backend)
        return list(found.split(sizes))

    def update(outputs: list[Tensor]) -> None:
        states = [[state] for state in problem.states]
        jagged_row_update(RULE, weights, states, problem.ids, problem.gradient, problem.splits, backend=backend)

    return Side(forward, update)


def check_agreement(problem: Problem, sides: dict[str, Side]) -> None:
    """Compares what is looked up, and the rows and sums after one step, with those of the first side.

    Raises:
        SystemExit: if they differ.
    """
    before = problem.rows()
    expected: list[Tensor] = []
    for name, side in sides.items():
        outputs = side.forward()
        found = [x.detach()[problem.mask[k]] if x.dim() == 3 else x.detach().clone() for k, x in enumerate(outputs)]
        side.update(outputs)
        found += problem.rows()
        problem.restore(before)
        expected = expected or found
        for a, b in zip(found, expected, strict=True):
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-5):
                raise SystemExit(f"{name} differs from {next(iter(sides))} by {float((a - b).abs().max())}")


def measure(report: Report, problem: Problem, rounds: int) -> None:
    """Adds all rows."""
    baselines = {"padded, sparse gradients": padded_side(problem, True), "padded, dense gradients": padded_side(problem, False)}
    if find_spec("torchrec") is not None:
        baselines["TorchRec"] = torchrec_side(problem)
    else:
        report.note("torchrec is not installed: no comparison with its EmbeddingCollection")
    mine: dict[str, Side] = {"torch": ours(problem, "torch")}
    if KERNEL.library() is not None:
        mine = {"cpp": ours(problem, "cpp"), **mine}
    sides = {**baselines, **mine}
    check_agreement(problem, sides)

    forward: dict[str, list[float]] = {name: [] for name in sides}
    update: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            outputs: list[Tensor] = []
            forward[name].append(timed(lambda side=side, outputs=outputs: outputs.extend(side.forward())))  # type: ignore[misc]
            update[name].append(timed(lambda side=side, outputs=outputs: side.update(outputs)))  # type: ignore[misc]
            del outputs
    total = {name: [a + b for a, b in zip(forward[name], update[name], strict=True)] for name in sides}
    padded = [name for name in baselines if name.startswith("padded")]

    def ratio(seconds: dict[str, list[float]], name: str, over: list[str]) -> float:
        best = [min(times) for times in zip(*(seconds[other] for other in over), strict=True)]
        return statistics.median(b / a for a, b in zip(seconds[name], best, strict=True))

    for name in mine:
        promised = name == "cpp"
        for what, seconds, floor in (
            ("forward", forward, 1.5),
            ("backward + row-wise AdaGrad", update, 3.5),
            ("total", total, 2.5),
        ):
            value = ratio(seconds, name, padded)
            report.add(f"{what}: {name} over padded", value, "x", baseline=1.0, at_least=floor if promised else None)
        if "TorchRec" in baselines:
            value = ratio(total, name, ["TorchRec"])
            report.add(f"total: {name} over TorchRec", value, "x", baseline=1.0, at_least=3.0 if promised else None)
    for name in sides:
        times = (1e3 * statistics.median(x[name]) for x in (forward, update))
        report.note("{}: forward {:.0f} ms, backward and update {:.0f} ms".format(name, *times))
    peaks = {name: allocations(lambda side=side: side.update(side.forward()))[1] / 2**20 for name, side in sides.items()}  # type: ignore[misc]
    for name in mine:
        peaks[name] += problem.gradient.nbytes / 2**20  # the output that is written again and again
    for name in mine:
        report.add(f"{name}: peak memory", peaks[name], "MiB", baseline=min(peaks[other] for other in padded))
    report.note(", ".join(f"{name} {peak:.0f} MiB" for name, peak in peaks.items()) + " at their peaks")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch and of the kernel (default: 1)")
    parser.add_argument("--width", type=int, default=128, help="D, width of the tables (default: 128)")
    arguments = parse_arguments(parser)
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    shape = Shape(60, 1000, 100_000, arguments.width) if arguments.quick else Shape(250, 1000, 500_000, arguments.width)
    problem = Problem(shape)
    report = Report("embedding", arguments.quick)
    measure(report, problem, 5)
    padding = 1 - float(problem.mask.float().mean())
    report.note(
        f"{TABLES} tables of {shape.rows} x {shape.width}, {len(problem.ids)} ids, {padding:.0%} padding, "
        f"{sum(len(x) for x in problem.touched)} distinct; {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    report.note(f"cpp: {', '.join(KERNEL.choice())}")
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
