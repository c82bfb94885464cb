"""Runs a function of a benchmark on several ranks of this machine, over gloo, one thread each."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_on_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    timeout_s: float = 300.0,
    prepare: Callable[[int], str] | None = None,
) -> list[Any]:
    """What `function(*arguments)` returns on every rank, in the order of the ranks; a default process group is open.

    Args:
        function: of a module, so that a fresh process can import it.
        ranks: how many processes.
        arguments: can be pickled, as can the results.
        timeout_s: seconds, after which the ranks are ended.
        prepare: called on every rank, with its number, before its process group is opened; returns the back end's name. None
            takes gloo.

    Raises:
        SystemExit: if a rank fails, with its traceback, or at the timeout.
    """
    context = multiprocessing.get_context("spawn")
    os.environ["OMP_NUM_THREADS"] = "1"  # read by a rank as it starts; holds for threads that it begins later, too
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=_rank, args=(answers, store, rank, ranks, timeout_s, prepare, function, arguments), daemon=True
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        patience = 0.0  # a rank that failed leaves the others waiting for it
        try:
            results = _collect(answers, processes, time.monotonic() + timeout_s)
            patience = 10.0
            return results
        finally:
            for process in processes:
                process.join(patience)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(answers: Any, processes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        try:
            rank, error, result = answers.get(timeout=1.0)
        except queue.Empty:
            # One that was killed from outside says nothing.
            dead = [rank for rank, process in enumerate(processes) if process.exitcode and rank not in results]
            if dead or time.monotonic() > deadline:
                raise SystemExit(f"ranks {dead} died without a word" if dead else "the ranks took too long") from None
            continue
        if error is not None:
            raise SystemExit(f"rank {rank} failed:\n{error}")
        results[rank] = pickle.loads(result)
    return [results[rank] for rank in range(len(processes))]


def _rank(
    answers: Any,
    store: str,
    rank: int,
    ranks: int,
    timeout_s: float,
    prepare: Callable[[int], str] | None,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    backend = "gloo" if prepare is None else prepare(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_s)
    )
    try:
        # Pickled here: the queue would pass tensors as handles, which are gone when this process is.
        answers.put((rank, None, pickle.dumps(function(*arguments))))
        dist.barrier()
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
        raise
    dist.destroy_process_group()
