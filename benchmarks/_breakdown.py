"""Where the time of a training step goes, by PyTorch's profiler: each operator's own time, filed under what it is for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")

PARTS: dict[str, tuple[str, ...]] = {
    "attention": ("jagged_hstu_attention", "jagged_softmax_attention", "jagged_fuxi_attention"),
    "loss": ("sampled_softmax", "negative_logits"),
    "embedding": ("unique_ids", "unique_segments", "jagged_embedding_lookup", "row_update"),
    "norms, gates, dropout": ("gated_norm", "silu_split", "dropout", "add_positions", "l2_normalise"),
}
"""Operators of this package, by a part of their names."""

OTHER = "elementwise and the rest"


@dataclass(frozen=True)
class Breakdown:
    """Shares of a step's time, and how its projections did.

    Attributes:
        shares: name -> share of the step; they sum to 1. "elementwise and the rest" holds what no operator accounts for, too.
        projection_rate: GFLOP/s of the plain matrix products, forward and backward.
    """

    shares: dict[str, float]
    projection_rate: float


def breakdown(step: Callable[[], object], steps: int) -> Breakdown:
    """Profiles `steps` calls of `step`."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        total = 1e6 * sum(_seconds(step) for _ in range(steps))
    events = [e for e in profiler.events() or [] if isinstance(e, FunctionEvent)]
    spent: dict[str, float] = {}
    for event in events:
        part = _part(event)
        spent[part] = spent.get(part, 0.0) + event.self_cpu_time_total
    spent[OTHER] = total - sum(time for part, time in spent.items() if part != OTHER)
    products = [e for e in events if _part(e) == "projections"]
    seconds = sum(e.self_cpu_time_total for e in products) / 1e6
    return Breakdown({part: time / total for part, time in spent.items()}, _flops(products) / seconds / 1e9)


def _seconds(step: Callable[[], object]) -> float:
    """Seconds on the wall, as the profiler counts."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _part(event: FunctionEvent) -> str:
    """What an operator is for: by its own name, or by that of the operator of this package or the optimizer that called it."""
    above: FunctionEvent | None = event
    while above is not None:
        if above.name.startswith("Optimizer.step"):
            return "optimizer"
        for part, names in PARTS.items():
            if any(name in above.name for name in names):
                return part
        above = above.cpu_parent
    return "projections" if event.name in PRODUCTS else OTHER


def _flops(products: Iterable[FunctionEvent]) -> float:
    total = 0.0
    for event in products:
        shapes: Any = event.input_shapes  # a list of shapes, whatever its annotation says
        left, right = [shape for shape in shapes if len(shape) >= 2][-2:]
        batch = left[0] if len(left) == 3 else 1
        total += 2.0 * batch * left[-2] * left[-1] * right[-1]
    return total
