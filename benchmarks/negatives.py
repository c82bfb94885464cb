"""Negatives and the loss on them, forward and backward: C++ and PyTorch operators over the materialised form.

The baseline gathers the negatives' embeddings to [T, R, D], as public trainers do, and leaves the rest to autograd: for
`negative_logits` a product with the output, for `sampled_softmax` the products, the mask and a log-softmax. All sides see the
same inputs; results and gradients must agree before anything is timed. Calls are interleaved and the ratio is the median over
the rounds; with one thread, process time is counted, so that neighbours on the machine disturb little. All sides run with freed
memory kept by the process. Peak memory counts PyTorch's allocations and, for C++, the kernel's own scratch as well, as the most
that it can be: twelve bytes a sample while the gradient of the rows is summed.

Rows in half precision are compared with rows in float32 by the same operator: once as they are, and once normalised on the way
in, which float32 rows are by a copy and half ones by factors.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from _memory import allocations
from _report import Report, parse_arguments
from _timing import keep_freed_memory, timed
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.backend import Backend
from turbogr.ops.negative_logits import KERNEL, negative_logits, negative_logits_gradients
from turbogr.ops.normalise import EPS, normalised
from turbogr.ops.sampled_softmax import sampled_softmax

TEMPERATURE = 0.05
SCRATCH_PER_SAMPLE = 12
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    """T tokens, R negatives of each, width D, U distinct rows; `promised` shapes carry the targets."""

    tokens: int
    samples: int
    width: int
    rows: int
    promised: bool

    def __str__(self) -> str:
        return f"T {self.tokens:,}, R {self.samples}, D {self.width}, U {self.rows:,}"


SHAPES = [
    Shape(16384, 128, 128, 10_000, True),
    Shape(16384, 128, 128, 500_000, True),
    Shape(10500, 128, 50, 1682, False),  # a training step on MovieLens-100K
]


@dataclass(frozen=True)
class Problem:
    """Normalised output [T, D] and rows [U, D], targets [T], negatives [T, R], the incoming gradient of the logits [T, R]."""

    output: Tensor
    rows: Tensor
    targets: Tensor
    negatives: Tensor
    gradient: Tensor

    @classmethod
    def of(cls, shape: Shape) -> Problem:
        """Random vectors, uniform samples."""
        g = torch.Generator().manual_seed(0)
        return cls(
            F.normalize(torch.randn(shape.tokens, shape.width, generator=g)).requires_grad_(),
            F.normalize(torch.randn(shape.rows, shape.width, generator=g)).requires_grad_(),
            torch.randint(0, shape.rows, (shape.tokens,), generator=g),
            torch.randint(0, shape.rows, (shape.tokens, shape.samples), generator=g),
            torch.randn(shape.tokens, shape.samples, generator=g),
        )


Side = Callable[[Problem], tuple[Tensor, ...]]
"""Forward and backward: the result and the gradients of output and rows."""


def _step(problem: Problem, result: Tensor, gradient: Tensor | None = None) -> tuple[Tensor, ...]:
    return result.detach(), *torch.autograd.grad(result, (problem.output, problem.rows), gradient)


def materialised_logits(problem: Problem) -> tuple[Tensor, ...]:
    """The baseline of `negative_logits`."""
    negatives = F.embedding(problem.negatives, problem.rows)
    return _step(problem, torch.einsum("td,trd->tr", problem.output, negatives), problem.gradient)


def materialised_loss(problem: Problem) -> tuple[Tensor, ...]:
    """The baseline of `sampled_softmax`."""
    positive = (problem.output * F.embedding(problem.targets, problem.rows)).sum(1, keepdim=True)
    negative = torch.einsum("td,trd->tr", problem.output, F.embedding(problem.negatives, problem.rows))
    negative = negative.masked_fill(problem.negatives == problem.targets[:, None], -torch.inf)
    return _step(problem, -F.log_softmax(torch.cat([positive, negative], 1) / TEMPERATURE, dim=1)[:, 0].mean())


def logits(backend: Backend, problem: Problem) -> tuple[Tensor, ...]:
    """The operator `negative_logits`."""
    return _step(problem, negative_logits(problem.output, problem.rows, problem.negatives, backend=backend), problem.gradient)


def loss(backend: Backend, problem: Problem) -> tuple[Tensor, ...]:
    """The operator `sampled_softmax`, averaged."""
    inputs = problem.output, problem.rows, problem.targets, problem.negatives
    return _step(problem, sampled_softmax(*inputs, temperature=TEMPERATURE, backend=backend).mean())


def check_agreement(name: str, problem: Problem, sides: dict[str, Side]) -> None:
    """Compares results and gradients with the baseline's.

    Raises:
        SystemExit: if they differ.
    """
    expected = sides["materialised"](problem)
    for side, run in sides.items():
        for what, a, b in zip(("result", "output", "rows"), run(problem), expected, strict=True):
            if not (a - b).abs().max() <= 1e-5 * b.abs().max():
                raise SystemExit(f"{name}: {what} of {side} differs from the baseline")


def measure(report: Report, name: str, shape: Shape, sides: dict[str, Side], rounds: int) -> None:
    """Adds the rows of one operator at one shape; the side `materialised` is the baseline."""
    problem = Problem.of(shape)
    check_agreement(name, problem, sides)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, run in sides.items():
            seconds[side].append(timed(partial(run, problem)))
    results = sum(x.numel() * x.element_size() for x in sides["materialised"](problem))
    peaks = {side: allocations(partial(run, problem))[1] for side, run in sides.items()}
    speeds, shares = {"cpp": 4.0, "torch": 1.8}, {"cpp": 0.08, "torch": 0.06}
    baseline = peaks["materialised"]
    for side in sides:
        report.add(f"{name}, {shape}: {side}, time", 1e3 * statistics.median(seconds[side]), "ms")
        if side == "materialised":
            continue
        ratio = statistics.median(b / a for a, b in zip(seconds[side], seconds["materialised"], strict=True))
        floor = speeds[side] if shape.promised else None
        report.add(f"{name}, {shape}: {side} over materialised", ratio, "x", baseline=1.0, at_least=floor)
        peak = peaks[side] + (SCRATCH_PER_SAMPLE * shape.tokens * (shape.samples + 1) if side == "cpp" else 0)
        bound = shares[side] * (baseline - results) / MIB if shape.promised else None
        report.add(
            f"{name}, {shape}: {side}, peak memory beyond the results",
            (peak - results) / MIB,
            "MiB",
            baseline=(baseline - results) / MIB,
            at_most=bound,
        )
        report.add(f"{name}, {shape}: {side}, peak memory", peak / MIB, "MiB", baseline=baseline / MIB)


def apart(problem: Problem, backend: Backend, rows: Tensor, normalise: bool) -> tuple[Tensor, ...]:
    """Logits and both gradients from rows that autograd does not see; a copy normalises float32 rows, factors half ones."""
    factors = None
    if normalise and rows.dtype == torch.float32:
        rows = normalised(rows, backend=backend)
    elif normalise:
        factors = 1 / torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).clamp(min=EPS)
    tokens = problem.output.detach()
    logits = negative_logits(tokens, rows, problem.negatives, factors=factors, backend=backend)
    gradients = negative_logits_gradients(problem.gradient, tokens, rows, problem.negatives, factors=factors, backend=backend)
    return logits, *gradients


def measure_half(report: Report, shape: Shape, backends: list[Backend], rounds: int) -> None:
    """Adds the rows of `negative_logits` on half rows at one shape."""
    problem = Problem.of(shape)
    rows = problem.rows.detach()
    for backend in backends:
        for normalise in (False, True):
            half = {name: rows.to(dtype) for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16))}
            sides = {"fp32": rows, **half}
            seconds: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(rounds):
                for side, stored in sides.items():
                    seconds[side].append(timed(partial(apart, problem, backend, stored, normalise)))
            for side in half:
                ratio = statistics.median(b / a for a, b in zip(seconds[side], seconds["fp32"], strict=True))
                how = "normalised by factors over a normalised copy of fp32" if normalise else "over fp32"
                report.add(f"rows kept apart, {shape}: {backend}, {side} {how}", ratio, "x", baseline=1.0)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch and of the kernel (default: 1)")
    arguments = parse_arguments(parser)
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    report = Report("negatives", arguments.quick)
    backends: list[Backend] = ["torch"] if KERNEL.library() is None else ["cpp", "torch"]
    for shape in [replace(shape, tokens=shape.tokens // 4) for shape in SHAPES] if arguments.quick else SHAPES:
        for name, operator, baseline in (
            ("negative_logits", logits, materialised_logits),
            ("sampled_softmax", loss, materialised_loss),
        ):
            sides: dict[str, Side] = {backend: partial(operator, backend) for backend in backends}
            measure(report, name, shape, {**sides, "materialised": baseline}, 3 if arguments.quick else 5)
        measure_half(report, shape, backends, 3 if arguments.quick else 5)
    report.note(f"{torch.get_num_threads()} threads, torch {torch.__version__}, fp32")
    report.note(
        "results: the logits or the loss and both gradients, which every side returns; the gradient of the rows is [U, D]"
    )
    report.note(f"cpp: {', '.join(KERNEL.choice())}")
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
