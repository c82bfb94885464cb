"""Counts what PyTorch allocates, inside custom operators too (a dispatch mode does not see those)."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def allocations(function: Callable[[], object]) -> tuple[int, int]:
    """Bytes of the largest single allocation, and of the peak above what was live before, while `function` runs.

    Raises:
        RuntimeError: if nothing was allocated: the profiler does not see this PyTorch's allocator.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    results = profiler.profiler
    assert results is not None
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    live = peak = largest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak, largest = max(peak, live), max(largest, event.nbytes())
    if not largest:
        raise RuntimeError("the profiler saw no allocation")
    return largest, peak


def retained(function: Callable[[], object]) -> int:
    """Bytes still allocated when `function` has returned and its result is held: for a forward pass, what backward needs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    del result
    results = profiler.profiler
    assert results is not None
    return sum(e.nbytes() for e in results.kineto_results.events() if e.name() == "[memory]")
