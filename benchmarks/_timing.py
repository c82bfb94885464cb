"""How benchmarks take times: one allocator setting for every side, process time with one thread, the machine's sgemm rate."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch


def keep_freed_memory() -> None:
    """One allocator setting for every side (glibc only: M_TRIM_THRESHOLD and M_MMAP_THRESHOLD)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-1, -1)  # never trimmed
        mallopt(-3, 2**31 - 1)


def sgemm_rate() -> float:
    """GFLOP/s of a float32 product of 1024 x 1024 matrices: the best of 20."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / min(timed(lambda: torch.mm(a, b)) for _ in range(20)) / 1e9


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call: of the process with one thread, on the wall with more."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function()
    return clock() - start


def per_call(function: Callable[[], object]) -> float:
    """Seconds of a call, averaged over enough calls to fill 20 ms."""
    function()  # after the other sides' calls, the first one finds cold caches
    calls = max(1, min(50, int(0.02 / max(timed(function), 1e-4))))
    return timed(lambda: [function() for _ in range(calls)]) / calls
