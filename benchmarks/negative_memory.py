"""Peak memory and time of whole training steps with 32, 64, 128 and 512 negatives, by how the negatives are kept.

The model is FuXi of the paper's size ladder and its histories are as long as the paper's, but fewer and narrower: FuXi-small
takes 105 D values a token beside the negatives, and the paper's FuXi-large, by its Table 7, 102 D. "Plain" gathers the
embeddings of all draws to [T, R, D] and leaves the rest to autograd, as public trainers do; it does so from rows that are
distinct and normalised already, and so takes two such tensors, where trainers that look up and normalise every draw take up to
four. Everything else of the step is the same on all sides: one model, one batch. Losses and gradients must agree with plain's
before anything is timed, those of half precision up to its rounding; sharing trains with another loss, on half of the draws.

Two catalogues: one of which a batch draws each item many times, so that distinct rows are few, and one of which most draws are
distinct, where plain's distinct rows come on top of its two tensors. What is measured is a step, not the first, which makes the
optimizer's state. Steps are interleaved, and the ratio is the median over the rounds. With one thread, process time is counted.
On the CPU peak memory counts PyTorch's allocations above the weights and the optimizers' state, rows "on the host" included,
and the most that the loss's kernel may use itself. `--device cuda` does the same on a GPU, by its own count of allocations,
with the rows on the host where they are offloaded, and adds how much of the copies between host and device runs beside kernels.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from _batches import Lengths, synthetic_batches
from _fuxi_large import GATHERED, LENGTH, extrapolated, extrapolated_table
from _memory import allocations
from _negative_sides import PLAIN, SIDES, Side, Trained, check_agreement
from _overlap import beside, copies_and_kernels
from _report import Report, parse_arguments
from _results import CHECKOUT, markdown_table, write_section
from _timing import keep_freed_memory, timed

from turbogr.batch import JaggedBatch
from turbogr.models.fuxi import FuXi
from turbogr.negative_bytes import SEGMENT, NegativeLoad

GB = 1e9
PAGE = CHECKOUT / "docs" / "negatives.md"
COUNTS = (32, 64, 128, 512)
PROMISED = 128
SAVED = 60
"""% of a step's peak at 128 negatives; the paper saves 32 %."""
SCRATCH_PER_SAMPLE = 12
"""Bytes that the C++ kernel may use itself, at most: while it sums the gradient of the rows."""


@dataclass(frozen=True)
class Shape:
    """Histories of 2,048 tokens through FuXi of one size of the ladder.

    Attributes:
        size: of the ladder.
        users: histories of a batch.
        length: tokens of each.
        items: of the catalogue.
        negatives: counts that are measured.
        promised: whether this shape carries the targets.
    """

    size: str
    users: int
    length: int
    items: int
    negatives: tuple[int, ...]
    promised: bool

    def __str__(self) -> str:
        return f"FuXi-{self.size}, {self.users} x {self.length:,} tokens, {self.items:,} items"

    def batch(self, negatives: int, seed: int) -> JaggedBatch:
        """Histories of full length, uniform negatives."""
        [batch], _ = synthetic_batches(Lengths(20.0, 0.1, 1, self.items), self.users, self.length, 1)
        generator = torch.Generator().manual_seed(seed)
        return replace(batch, negatives=torch.randint(self.items, (batch.num_tokens, negatives), generator=generator))


FULL = (
    Shape("small", 2, 2048, 20_000, COUNTS, promised=True),
    Shape("small", 2, 2048, 1_000_000, (PROMISED,), promised=False),
)
QUICK = (Shape("tiny", 1, 512, 2_000, (32, PROMISED), promised=True),)
CUDA = (
    Shape("medium", 8, 2048, 50_000, COUNTS, promised=True),
    Shape("medium", 8, 2048, 4_000_000, (PROMISED,), promised=False),
)


@dataclass(frozen=True)
class Measured:
    """Of one side with one number of negatives.

    Attributes:
        peak: bytes of a step.
        computed: bytes of the negatives by turbogr.negative_bytes, those on the host included where that is the device.
        seconds: of a step.
        ratio: of its time over plain's.
    """

    peak: int
    computed: int
    seconds: float
    ratio: float

    def saved(self, plain: Measured) -> float:
        """Share of plain's peak."""
        return 1 - self.peak / plain.peak


Step = Callable[[], object]
Table = dict[tuple[int, str], Measured]
"""(negatives, side) -> what was measured."""


class Host:
    """How a step is measured on the CPU."""

    device = torch.device("cpu")
    name = "CPU"
    shapes = FULL
    section = "negative memory"
    rounding = 1e-5
    """Of sums in another order, as a share of the largest value."""

    def seconds(self, step: Step) -> float:
        """Of one step."""
        return timed(step)

    def peak(self, step: Step) -> int:
        """Bytes above what was there before."""
        gc.collect()  # so that nothing older is freed meanwhile
        return allocations(step)[1]

    def scratch(self, batch: JaggedBatch, side: Side) -> int:
        """Bytes that kernels use beside PyTorch's allocations, at most."""
        assert batch.negatives is not None
        return 0 if side.materialised else SCRATCH_PER_SAMPLE * (batch.num_tokens + batch.negatives.numel())

    def add_overlap(self, report: Report, claim: str, step: Step) -> None:
        """Nothing is copied."""


class Cuda(Host):
    """How a step is measured on a GPU."""

    device = torch.device("cuda")
    shapes = CUDA
    section = "negative memory on a GPU"
    rounding = 1e-4

    @property
    def name(self) -> str:  # type: ignore[override]
        """Of the GPU."""
        return torch.cuda.get_device_name()

    def seconds(self, step: Step) -> float:
        """On the wall, until the device is done."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def peak(self, step: Step) -> int:
        """Of the caching allocator, above what was there before."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def scratch(self, batch: JaggedBatch, side: Side) -> int:
        """None: PyTorch's operators compute."""
        return 0

    def add_overlap(self, report: Report, claim: str, step: Step) -> None:
        """The row of what copies cost."""
        copies, kernels = copies_and_kernels(step)
        report.add(f"{claim}, copies beside kernels", 100 * beside(copies, kernels), "% of their time")


def measure(report: Report, host: Host, shape: Shape, rounds: int, sides: Sequence[str]) -> Table:
    """Adds the rows of a shape; `sides` begin with plain's."""
    torch.manual_seed(0)
    trained = Trained(shape.items, FuXi.preset(shape.size, max_length=shape.length), host.device)
    found: Table = {}
    for count in shape.negatives:
        batch = shape.batch(count, seed=count)
        load = {k: NegativeLoad.of(batch, trained.model.embeddings.dim, count // k) for k in {SIDES[name].k for name in sides}}
        batch = batch.to(host.device)
        steps = {name: partial(trained.step_of, SIDES[name], SIDES[name].drawn(batch)) for name in sides}
        try:
            if count == min(shape.negatives):
                check_agreement(trained, batch, sides, host.rounding)
            for step in steps.values():
                step()
            peaks = {name: host.peak(step) + host.scratch(batch, SIDES[name]) for name, step in steps.items()}
        except torch.OutOfMemoryError:
            report.note(f"{shape}: {count} negatives do not fit into the memory of this device")
            break
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(rounds):
            print(f"{shape}, {count} negatives: round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
            for name, step in steps.items():
                seconds[name].append(host.seconds(step))
        for name in sides:
            ratio = statistics.median(ours / plain for ours, plain in zip(seconds[name], seconds[PLAIN], strict=True))
            computed = SIDES[name].computed(load[SIDES[name].k], host.device.type)
            found[count, name] = Measured(peaks[name], computed, statistics.median(seconds[name]), ratio)
        add_rows(report, shape, count, {name: found[count, name] for name in sides})
        if count == PROMISED:
            for name in (name for name in sides if SIDES[name].offload):
                host.add_overlap(report, f"{shape}, {count} negatives: {name}", steps[name])
    return found


def add_rows(report: Report, shape: Shape, count: int, measured: Mapping[str, Measured]) -> None:
    """Of one number of negatives."""
    plain, promised = measured[PLAIN], shape.promised and count == PROMISED
    for name, one in measured.items():
        claim = f"{shape}, {count} negatives: {name}"
        report.add(f"{claim}, peak of a step", one.peak / GB, "GB", baseline=plain.peak / GB)
        report.add(f"{claim}, time of a step", one.seconds, "s", baseline=plain.seconds)
        if name != PLAIN:
            floor, ceiling = (SAVED, 1.0) if promised else (None, None)
            report.add(f"{claim}, saved of plain's peak", 100 * one.saved(plain), "%", at_least=floor)
            report.add(f"{claim}, time over plain", one.ratio, "x", baseline=1.0, at_most=ceiling)
            less = (plain.computed - one.computed) / GB
            report.add(f"{claim}, saved; beside it as computed", (plain.peak - one.peak) / GB, "GB", baseline=less)


def section(tables: Mapping[Shape, Table]) -> str:
    """What was measured, as Markdown."""
    parts = []
    for shape, table in tables.items():
        names = [name for name in SIDES if any(side == name for _, side in table)]
        lines = []
        for count in dict.fromkeys(count for count, _ in table):
            plain = table[count, PLAIN]
            others = [table[count, name] for name in names if name != PLAIN]
            cells = [f"{each.peak / GB:.2f} GB, -{100 * each.saved(plain):.0f} %, x {each.ratio:.2f}" for each in others]
            lines.append([f"{count}", f"{plain.peak / GB:.2f} GB, {plain.seconds:.2f} s", *cells])
        parts.append(f"{shape}:\n\n{markdown_table(['negatives', *names], lines)}")
    return "\n\n".join(parts)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch and of the kernels (default: 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what trains (default: cpu)")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each side that are timed (default: 5)")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="these alone, beside plain")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/negatives.md")
    arguments = parse_arguments(parser)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no GPU here")
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    host = Host() if arguments.device == "cpu" else Cuda()
    sides = list(dict.fromkeys([PLAIN, *arguments.sides]))
    report = Report("negative_memory", arguments.quick)
    shapes = QUICK if arguments.quick else host.shapes
    rounds = 2 if arguments.quick else arguments.rounds
    tables = {shape: measure(report, host, shape, rounds, sides) for shape in shapes}
    for line in extrapolated(negatives=(PROMISED,)):
        where = f"computed, FuXi-large, {line.batch} x {LENGTH:,} tokens, {line.items:,} items, {line.negatives} negatives"
        for choice in line.gigabytes:
            if choice != GATHERED:
                report.add(f"{where}: {choice}", line.gigabytes[choice], "GB", baseline=line.gigabytes[GATHERED])
    report.note(f"{host.name}, {torch.get_num_threads()} threads, torch {torch.__version__}, fp32; offloaded: {SEGMENT} tokens")
    report.note("'computed' are bytes of turbogr.negative_bytes; of FuXi-large nothing is run, and docs/negatives.md has more")
    if arguments.page and not arguments.quick:
        write_section(PAGE, host.section, section(tables))
        write_section(PAGE, "negatives of FuXi-large", extrapolated_table())
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
