"""Training goes as it went: stored losses of 30 seeded steps, by backbone, features and back end."""

from __future__ import annotations

import pytest

from tests.models.golden_curves import COMMAND, CURVES, SEED, STEPS, curve, stored
from turbogr.ops.hstu_native import KERNEL

TOLERANCE = 1e-4


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("name", CURVES)
def test_losses_are_the_stored_ones(name, backend):
    if backend == "cpp" and KERNEL.library() is None:
        pytest.skip(KERNEL.failure())
    expected = stored(name)
    assert len(expected) == STEPS
    assert curve(name, backend) == pytest.approx(expected, rel=0, abs=TOLERANCE), f"{COMMAND} writes them again"


@pytest.mark.parametrize("name", CURVES)
def test_another_seed_gives_another_curve(name):
    """The negative control."""
    other = curve(name, seed=SEED + 1)
    assert sum(abs(a - b) > 100 * TOLERANCE for a, b in zip(other, stored(name), strict=True)) > STEPS // 2
