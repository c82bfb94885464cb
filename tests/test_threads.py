"""OpenMP's wait policy: set before torch is imported, never over the user's own choice."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = "import os, sys, turbogr; assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_asleep_unless_told_otherwise(given, expected):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if given:
        environment["OMP_WAIT_POLICY"] = given
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == expected
