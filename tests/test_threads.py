"""OpenMP's wait policy: set before torch is imported, never over the user's own choice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
PROGRAM = f"import os, sys, turbogr; assert 'torch' not in sys.modules; print(*[os.environ.get(name) for name in {NAMES}])"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "PASSIVE 1000"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None"),
        ({"GOMP_SPINCOUNT": "5"}, "None 5"),
    ],
)
def test_threads_soon_sleep_unless_told_otherwise(given, expected):
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | given
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == expected
