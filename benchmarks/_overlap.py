"""How much of a device's copies from and to the host runs beside its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Span = tuple[int, int]
"""Beginning and end."""


def copies_and_kernels(function: Callable[[], object]) -> tuple[list[Span], list[Span]]:
    """Spans, in nanoseconds, of copies between host and device, and of all else that the device does, while `function` runs."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    results = profiler.profiler
    assert results is not None
    copies: list[Span] = []
    kernels: list[Span] = []
    for event in results.kineto_results.events():
        if event.device_type() == DeviceType.CUDA and event.duration_ns():
            crosses = event.name().startswith(("Memcpy HtoD", "Memcpy DtoH"))
            (copies if crosses else kernels).append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return copies, kernels


def beside(copies: Iterable[Span], kernels: Iterable[Span]) -> float:
    """The share of the copies' time in which a kernel runs; 1 if there are no copies."""
    merged = _merged(kernels)
    total = hidden = first = 0
    for start, end in _merged(copies):
        total += end - start
        while first < len(merged) and merged[first][1] <= start:
            first += 1
        for begin, stop in merged[first:]:
            if begin >= end:
                break
            hidden += min(end, stop) - max(start, begin)
    return hidden / total if total else 1.0


def _merged(spans: Iterable[Span]) -> list[Span]:
    """In order, without overlaps."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
