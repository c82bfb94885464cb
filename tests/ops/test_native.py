"""How C++ kernels are compiled, cached, loaded, and done without. Every test has a cache folder of its own."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.test_hstu_attention import inputs_of, pair
from turbogr.errors import MissingDependencyError
from turbogr.ops import hstu_attention, native
from turbogr.ops.native import Kernel

CHECKOUT = Path(__file__).resolve().parents[2]
NAME = "hstu_attention"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on the path")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "turbogr" / "kernels"


def fake_compiler(folder, monkeypatch, body):
    """A compiler that tells its version and then does `body`."""
    script = folder / "fake-g++"
    script.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return script


@needs_compiler
def test_compiled_once_and_found_again(cache, caplog):
    kernel = Kernel(NAME)
    assert kernel.choice()[0] == "cpp"
    assert "will be compiled at first use with g++" in kernel.choice()[1]
    assert not cache.exists(), "nothing is compiled by asking"
    library = kernel.library()
    assert library is not None
    assert kernel.library() is library
    files = [p for p in cache.rglob("*") if p.is_file()]
    assert [p.name for p in files] == [f"{NAME}.so"]
    assert str(files[0]) in kernel.choice()[1]
    written = files[0].stat().st_mtime_ns
    again = Kernel(NAME)
    assert again.choice() == ("cpp", f"compiled: {files[0]}")
    assert again.library() is not None
    assert files[0].stat().st_mtime_ns == written
    assert not caplog.records


@needs_compiler
def test_the_key_knows_compiler_flags_and_processor(monkeypatch):
    plans = [native._plan(NAME)]
    monkeypatch.setenv("CXX", "g++ -fno-math-errno")
    plans.append(native._plan(NAME))
    monkeypatch.setattr(native, "_instruction_sets", lambda: "flags : fpu sse")
    plans.append(native._plan(NAME))
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-g"))
    plans.append(native._plan(NAME))
    assert len({plan.library for plan in plans}) == len(plans)
    assert plans[-1] == native._plan(NAME)


@needs_compiler
def test_the_key_knows_the_sources(tmp_path, monkeypatch):
    first = native._plan(NAME).library
    copy = tmp_path / "kernels"
    shutil.copytree(native.kernels_dir(), copy)
    monkeypatch.setattr(native, "kernels_dir", lambda: copy)
    assert native._plan(NAME).library == first
    header = copy / "cpu" / "vectors.h"
    header.write_text(header.read_text() + "\n// changed\n")
    assert native._plan(NAME).library != first


BROKEN = {
    "fails": (
        "echo 'x.cpp:1: fatal error: no such thing' >&2; exit 1",
        "failed with exit code 1: x.cpp:1: fatal error: no such",
    ),
    "is killed": ("kill -9 $$", "failed with exit code -9"),
    "writes rubbish": ('while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"', "cannot be loaded"),
    "writes nothing": ("exit 0", "succeeded but wrote no hstu_attention.so"),
}


@pytest.mark.parametrize(("body", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_compiler_leaves_pytorch_with_one_line(tmp_path, monkeypatch, caplog, body, message):
    script = fake_compiler(tmp_path, monkeypatch, body)
    kernel = Kernel(NAME)
    monkeypatch.setattr(hstu_attention, "KERNEL", kernel)
    tensors, offsets, queries, keys = inputs_of([5, 9], dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        results = [pair(offsets, queries, keys, backend=backend)[0](*tensors) for backend in ("auto", "auto", "torch")]
    assert all(torch.equal(result, results[-1]) for result in results)
    assert len(caplog.records) == 1
    assert message in caplog.records[0].getMessage()
    backend, reason = kernel.choice()
    assert backend == "torch"
    assert message in reason
    script.unlink()
    with pytest.raises(MissingDependencyError, match="backend cpp cannot be used"):
        pair(offsets, queries, keys, backend="cpp")[0](*tensors)


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert Kernel(NAME).choice() == ("torch", "CXX names no-such-compiler, which is not on the path; install g++ or set CXX")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    kernel = Kernel(NAME)
    assert kernel.library() is None
    assert kernel.choice() == ("torch", "there is no compiler g++, which is not on the path; install g++ or set CXX")


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    kernel = Kernel(NAME)
    assert kernel.library() is None
    assert "set XDG_CACHE_HOME to a folder that can" in kernel.failure()


@needs_compiler
def test_a_relative_cache_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert native.cache_dir() == tmp_path / ".cache" / "turbogr" / "kernels"


def run_python(code, **variables):
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd="/"
    )


@needs_compiler
@pytest.mark.slow
def test_processes_that_start_at_once(cache):
    code = (
        "import torch\n"
        "from turbogr.ops.hstu_attention import jagged_hstu_attention as attention\n"
        "x = torch.arange(24.0).view(6, 2, 2) / 24\n"
        "print(attention(x, x, x, torch.tensor([0, 2, 6]), scale=1.0, backend='cpp').sum().item())\n"
    )
    processes = [run_python(code) for _ in range(8)]
    answers = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, answers
    assert len({out for out, _ in answers}) == 1
    assert [p.name for p in cache.rglob("*") if p.is_file()] == [f"{NAME}.so"]
    assert not list(cache.rglob(".building-*"))


@needs_compiler
def test_what_the_doctor_asks(cache):
    code = (
        "import json\n"
        "from dataclasses import astuple\n"
        "from turbogr.ops.registry import describe\n"
        "for load in (False, True):\n"
        "    print(json.dumps([astuple(x)[1:] for x in describe(load) if x.name == 'turbogr::jagged_hstu_attention'][0]))\n"
    )
    process = run_python(code)
    out, error = process.communicate()
    assert process.returncode == 0, error
    before, after = out.splitlines()
    assert before.startswith('["cpp", "will be compiled at first use with')
    assert after.startswith('["cpp", "compiled with')
    assert str(cache) in after
