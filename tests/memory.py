"""Counts what PyTorch allocates, inside custom operators too (a dispatch mode does not see those)."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocations(function: Callable[[], object]) -> tuple[int, int]:
    """Bytes of the largest single allocation and of the peak while `function` runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak, largest = max(peak, live), max(largest, event.nbytes())
    assert largest, "the profiler saw no allocation"
    return largest, peak
