"""The same bits for any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def same_for_threads(results_of: Callable[[], list[Tensor]], touched: Tensor, counts: Iterable[int] = (1, 2, 3)) -> None:
    """Asserts that results are the same bits for each number of threads.

    Args:
        results_of: outputs and gradients, computed from `touched` among others.
        touched: an input of more than one row; its last row is changed in the end, and the results must show it.
        counts: numbers of threads.
    """
    threads, results = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append([x.detach().clone() for x in results_of()])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert _same(results[0], other)
    with torch.no_grad():
        touched[-1] += 1
    assert not _same(results[0], results_of()), "negative control: one row of the input is another"


def _same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))
