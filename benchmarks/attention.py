"""HSTU attention, forward and backward: the C++ kernel and the PyTorch implementation over padded dense eager PyTorch.

The baseline pads every sequence to the batch's longest, builds the [B, N, N] bias from positions and bucketed times and the
[B, H, N, N] scores, as the public research code does. All three see the same inputs; their outputs and gradients must agree
before anything is timed. Calls are interleaved and the ratio is the median over the rounds; with one thread, process time is
counted, so that neighbours on the machine disturb little, but for the comparison of one thread with two, which takes the wall
clock and a quiet machine. Shares of the sgemm rate count 14 flops for each element of a head's width and each pair of a token
with itself or an earlier one, and nothing else: not the sigmoids, the bias, or what a tile computes beyond the diagonal. All
sides run with freed memory kept by the process: with glibc's defaults the padded tensors are given back and faulted in again
at every step, which would flatter us. Peak memory counts PyTorch's allocations; the kernel's own scratch, at most the queries,
keys, values and their gradients of 8,192 tokens (or one longer sequence) a thread, is not among them.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from _memory import allocations
from _report import Report, parse_arguments
from _timing import keep_freed_memory, per_call, sgemm_rate
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.backend import Backend
from turbogr.ops.hstu_attention import KERNEL, jagged_hstu_attention
from turbogr.ops.hstu_native import Products

BUCKETS, DIVISOR = 128, 0.301


@dataclass(frozen=True)
class Shape:
    """Sequences with log-normal lengths (median, deviation of the logarithm, least, most), heads and their width.

    `floor` is the least speed over padded that is promised for the kernel. `by_waste` is the promise for the PyTorch
    implementation as a share of the padded score elements per causal one; None promises 1.8.
    """

    name: str
    sequences: int
    lengths: tuple[float, float, int, int]
    heads: int
    width: int
    seed: int
    floor: float
    by_waste: float | None


Attention = Callable[["Problem", list[Tensor]], Tensor]

SHORT, LONG = (12.0, 0.7, 2, 50), (150.0, 1.2, 4, 2048)
SHAPES = [
    Shape("short: 64 sequences, 4 heads of 32", 64, SHORT, 4, 32, 1, 8.0, None),
    Shape("8 sequences, 8 heads of 16", 8, LONG, 8, 16, 1, 10.0, 0.5),
    Shape("16 sequences, 2 heads of 64", 16, LONG, 2, 64, 2, 20.0, 0.5),
    Shape("16 sequences, 4 heads of 32", 16, LONG, 4, 32, 1, 50.0, 0.5),
]

CPU_FLAGS = Path("/proc/cpuinfo")

LONGEST = [
    Shape("2 sequences of 2,000-4,000, 4 heads of 32", 2, (3000.0, 0.2, 2000, 4000), 4, 32, 3, 0.9, None),
    Shape("2 sequences of 2,000-4,000, 2 heads of 64", 2, (3000.0, 0.2, 2000, 4000), 2, 64, 3, 0.9, None),
    Shape("2 sequences of 2,000-4,000, 1 head of 128", 2, (3000.0, 0.2, 2000, 4000), 1, 128, 3, 0.9, None),
]
"""Sequences so long that their edges do not count; `floor` is the promised share of the sgemm rate. The padded baseline would
take seconds and gigabytes, so the PyTorch implementation is what the kernel is compared with."""


@dataclass(frozen=True)
class Problem:
    """One batch: lengths int64 [B], q, k, v and the incoming gradient float32 [T, H, d], tables, times int64 [T]."""

    lengths: Tensor
    offsets: Tensor
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    gradient: Tensor
    query_times: Tensor
    key_times: Tensor

    @classmethod
    def of(cls, shape: Shape) -> Problem:
        """Random vectors and tables; gaps between events are log-normal seconds."""
        g = torch.Generator().manual_seed(shape.seed)
        median, deviation, least, most = shape.lengths
        lengths = torch.exp(math.log(median) + deviation * torch.randn(shape.sequences, generator=g)).round().clamp(least, most)
        lengths = lengths.long()
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        tokens = int(offsets[-1])
        # q, k and v are views of one packed tensor, as a model's projection gives them.
        packed = torch.randn(tokens, 3 * shape.heads, shape.width, generator=g) * 0.5
        q, k, v = packed.split(shape.heads, dim=1)
        position = torch.randn(most, generator=g) * 0.1
        bias = torch.randn(BUCKETS + 1, generator=g) * 0.1
        times = [torch.exp(torch.randn(n + 1, generator=g) * 2.5 + 5).long().cumsum(0) for n in lengths.tolist()]
        return cls(
            lengths,
            offsets,
            (q, k, v, position, bias),
            torch.randn(tokens, shape.heads, shape.width, generator=g),
            torch.cat([t[1:] for t in times]),
            torch.cat([t[:-1] for t in times]),
        )

    @property
    def longest(self) -> int:
        """N."""
        return int(self.lengths.max())

    @property
    def pairs(self) -> float:
        """Pairs of a token with itself or an earlier one of its sequence."""
        return float((self.lengths * (self.lengths + 1) // 2).sum())

    def step(self, attention: Attention) -> tuple[Tensor, ...]:
        """Forward and backward: the output and the gradients of q, k, v and both tables."""
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        out = attention(self, leaves)
        return out, *torch.autograd.grad(out, leaves, self.gradient)


def padded(problem: Problem, inputs: list[Tensor]) -> Tensor:
    """The baseline."""
    q, k, v, position, bias = inputs
    longest = problem.longest
    index = torch.arange(longest)
    valid = index < problem.lengths[:, None]
    rows = (problem.offsets[:-1, None] + index).clamp(max=len(q) - 1)

    def dense(x: Tensor) -> Tensor:
        return x[rows] * valid.view(*valid.shape, *[1] * (x.dim() - 1))

    gap = (dense(problem.query_times)[:, :, None] - dense(problem.key_times)[:, None, :]).abs().clamp(min=1).float()
    buckets = (gap.log() / DIVISOR).long().clamp(max=BUCKETS)
    by_position = position[(index[:, None] - index[None]).clamp(min=0)]
    scores = torch.einsum("bnhd,bmhd->bhnm", dense(q), dense(k)) * q.shape[2] ** -0.5
    scores = scores + (by_position + bias[buckets])[:, None]
    weights = F.silu(scores) / len(position) * torch.ones(longest, longest).tril()
    return torch.einsum("bhnm,bmhd->bnhd", weights, dense(v))[valid]


def ours(backend: Backend, products: Products = "fp32") -> Attention:
    """The operator with one of its back ends."""

    def attention(problem: Problem, inputs: list[Tensor]) -> Tensor:
        q, k, v, position, bias = inputs
        return jagged_hstu_attention(
            q,
            k,
            v,
            problem.offsets,
            scale=1 / len(position),
            alpha=q.shape[2] ** -0.5,
            position_bias=position,
            time_bias=bias,
            query_times=problem.query_times,
            key_times=problem.key_times,
            time_divisor=DIVISOR,
            products=products,
            backend=backend,
        )

    return attention


def gigaflops(shape: Shape, problem: Problem) -> float:
    """Useful work of a step: two products forward, five backward."""
    return 14 * shape.width * shape.heads * problem.pairs / 1e9


def check_agreement(shape: Shape, problem: Problem, sides: dict[str, Attention], baseline: Attention) -> None:
    """Compares outputs and gradients with the baseline's.

    The padded baseline's float32 logarithm puts a gap that touches a threshold into the neighbouring bucket, which changes a
    token's whole row of numbers: a few elements in a thousand may differ.

    Raises:
        SystemExit: if more do.
    """
    expected = problem.step(baseline)
    for name, side in sides.items():
        for what, a, b in zip(("out", "q", "k", "v", "position", "time"), problem.step(side), expected, strict=True):
            share = float(((a - b).abs() > 1e-4 * b.abs().max()).float().mean())
            # Two buckets of a small table change where one gap changes sides.
            if share > (4 / b.numel() if b.dim() == 1 else 2e-3):
                raise SystemExit(f"{shape.name}: {what} of {name}: {share:.1%} of it differs from the baseline")


def measure(report: Report, shape: Shape, rounds: int) -> None:
    """Adds the rows of one shape."""
    problem = Problem.of(shape)
    sides: dict[str, Attention] = {"torch": ours("torch")}
    if KERNEL.library() is not None:
        sides = {"cpp": ours("cpp"), **sides}
    check_agreement(shape, problem, sides, padded)
    everyone: dict[str, Attention] = {**sides, "padded": padded}
    seconds: dict[str, list[float]] = {name: [] for name in everyone}
    rates = []
    for _ in range(rounds):
        rates.append(sgemm_rate())
        for side, attention in everyone.items():
            seconds[side].append(per_call(partial(problem.step, attention)))

    name = f"{shape.name}, longest {problem.longest}"
    waste = shape.sequences * problem.longest**2 / problem.pairs
    floors = {"cpp": shape.floor, "torch": 1.8 if shape.by_waste is None else shape.by_waste * waste}
    for side in sides:
        ratio = statistics.median(b / a for a, b in zip(seconds[side], seconds["padded"], strict=True))
        report.add(f"{name}: {side} over padded", ratio, "x", baseline=1.0, at_least=floors[side])
    if "cpp" in sides:
        ratio = statistics.median(b / a for a, b in zip(seconds["cpp"], seconds["torch"], strict=True))
        report.add(f"{name}: cpp over torch", ratio, "x", baseline=1.0, at_least=1.0)
        share = statistics.median(gigaflops(shape, problem) / s / rate for s, rate in zip(seconds["cpp"], rates, strict=True))
        report.add(f"{name}: cpp, share of the sgemm rate", share, "x")
        report.add(f"{name}: cpp, time", 1e3 * statistics.median(seconds["cpp"]), "ms")
    baseline = allocations(partial(problem.step, padded))[1] / 2**20
    for side, attention in sides.items():
        peak = allocations(partial(problem.step, attention))[1] / 2**20
        bound = 0.05 * baseline if problem.longest >= 300 and side == "cpp" else None
        report.add(f"{name}: {side}, peak memory", peak, "MiB", baseline=baseline, at_most=bound)


def measure_longest(report: Report, shape: Shape, rounds: int) -> None:
    """Adds the share of the sgemm rate at one shape of `LONGEST`, and what products of bfloat16 gain and cost."""
    problem = Problem.of(shape)
    check_agreement(shape, problem, {"cpp": ours("cpp")}, ours("torch"))
    shares, gains, work = [], [], gigaflops(shape, problem)
    for _ in range(rounds):
        rate = sgemm_rate()
        seconds = [per_call(partial(problem.step, ours("cpp", products))) for products in get_args(Products)]
        shares.append(work / seconds[0] / rate)
        gains.append(seconds[0] / seconds[1])
    report.add(f"{shape.name}: cpp, share of the sgemm rate", statistics.median(shares), "x", at_least=shape.floor)
    in_hardware = "avx512_bf16" in CPU_FLAGS.read_text() if CPU_FLAGS.is_file() else False
    claim = f"{shape.name}: cpp, products bf16 over fp32"
    report.add(claim, statistics.median(gains), "x", baseline=1.0, at_least=1.3 if in_hardware else None)
    errors = [
        float((a - b).detach().norm() / a.detach().norm())
        for a, b in zip(problem.step(ours("cpp")), problem.step(ours("cpp", "bf16")), strict=True)
    ]
    report.add(f"{claim}: largest error, root mean square", max(errors), "", at_most=5e-3)


def measure_threads(report: Report, shape: Shape, rounds: int) -> None:
    """Adds the speed of two threads over one at one shape."""
    problem = Problem.of(shape)
    threads = torch.get_num_threads()
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(4 * rounds):
        for count, times in seconds.items():
            torch.set_num_threads(count)
            problem.step(ours("cpp"))
            start = time.perf_counter()
            problem.step(ours("cpp"))
            times.append(time.perf_counter() - start)
    torch.set_num_threads(threads)
    ratio = statistics.median(b / a for a, b in zip(seconds[2], seconds[1], strict=True))
    report.add(f"{shape.name}: cpp, 2 threads over 1", ratio, "x", baseline=1.0, at_least=1.6)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch and of the kernel (default: 1)")
    arguments = parse_arguments(parser)
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    report = Report("attention", arguments.quick)
    rounds = 3 if arguments.quick else 9
    for shape in SHAPES:
        measure(report, shape, rounds)
    if KERNEL.library() is not None:
        for shape in LONGEST:
            measure_longest(report, shape, rounds)
        if len(os.sched_getaffinity(0)) > 1:
            measure_threads(report, SHAPES[-1], rounds)
        else:
            report.note("one processor only: threads are not compared")
    report.note(f"{torch.get_num_threads()} threads, torch {torch.__version__}, fp32, sgemm {sgemm_rate():.0f} GFLOP/s")
    report.note(f"cpp: {', '.join(KERNEL.choice())}")
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
