"""The stand-in itself: what it calculates and counts, and that every guard is tripped by the mistake it is there for."""

from __future__ import annotations

import pytest
import torch

from tests.ascendc.build import driver

COUNT = 1013


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("cores", [1, 2, 7, 24, 48])
def test_a_kernel_gives_the_same_on_any_number_of_cores_in_any_order(cores, seed):
    x, y = torch.randn(COUNT), torch.empty(COUNT)
    counters = driver("guards").call("run_exponential", x, y, COUNT, cores, seed)
    assert torch.allclose(y, x.exp(), rtol=1e-6)
    assert counters.bytes_global_to_local == counters.bytes_local_to_global == 4 * COUNT
    assert counters.vector_functions == counters.vector_elements == COUNT
    assert counters.peak_local_bytes == 4 * 256
