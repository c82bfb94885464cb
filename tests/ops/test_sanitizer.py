from __future__ import annotations

import subprocess

import pytest

from tests.ops import sanitizer


@pytest.mark.slow
def test_memory_that_is_not_given_back_is_noticed(tmp_path):
    """Negative control of the drivers' runs."""
    source = tmp_path / "leak.cpp"
    source.write_text("#include <cstdlib>\nint main() { void* volatile lost = std::malloc(7); lost = nullptr; }\n")
    program = sanitizer.built([source], tmp_path)
    if sanitizer.NO_LEAKS_HERE in subprocess.run([program], capture_output=True, text=True, check=False).stderr:
        pytest.skip("leaks cannot be searched for here")
    done = sanitizer.run([program])
    assert done.returncode != 0
    assert "7 byte(s) leaked" in done.stderr
