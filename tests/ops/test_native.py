"""How C++ kernels are compiled, cached, loaded, and done without. Every test has a cache folder and a log of its own."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ops.test_hstu_attention import inputs_of, pair
from turbogr.errors import MissingDependencyError
from turbogr.ops import hstu_attention, native, toolchain
from turbogr.ops.native import Kernel
from turbogr.resources import kernels_dir

CHECKOUT = Path(__file__).resolve().parents[2]
NAME = "hstu_attention"
SOURCE = kernels_dir() / "cpu" / f"{NAME}.cpp"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on the path")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native, "_told", set())
    return tmp_path / "cache" / "turbogr" / "kernels"


def fake_compiler(folder, monkeypatch, body):
    """A compiler that tells its version and then does `body`."""
    script = folder / "fake-g++"
    script.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi\n{body}\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return script


@pytest.fixture
def tiny(tmp_path):
    """Two small kernels of a user's: one source includes a header beside it."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "answer.h").write_text("constexpr int ANSWER = 42;\n")
    (folder / "first.cpp").write_text('#include "answer.h"\nextern "C" int first() { return ANSWER; }\n')
    (folder / "second.cpp").write_text('extern "C" int second() { return 43; }\n')
    return folder


@needs_compiler
def test_compiled_once_and_found_again(cache, caplog, tiny):
    kernel = Kernel("first", tiny)
    assert kernel.choice()[0] == "cpp"
    assert "will be compiled at first use with g++" in kernel.choice()[1]
    assert not cache.exists(), "nothing is compiled by asking"
    library = kernel.library()
    assert library is not None
    assert library.first() == 42
    assert kernel.library() is library
    files = [p for p in cache.rglob("*") if p.is_file()]
    assert len(files) == 1
    assert re.fullmatch(r"first-[0-9a-f]{32}\.so", files[0].name)
    backend, reason = kernel.choice()
    assert backend == "cpp"
    assert reason.startswith("compiled with g++")
    written = files[0].stat().st_mtime_ns
    again = Kernel("first", tiny)
    assert again.choice() == (backend, reason)
    assert again.library() is not None
    assert files[0].stat().st_mtime_ns == written
    assert not caplog.records


@needs_compiler
def test_the_key_knows_compiler_flags_and_processor(monkeypatch):
    plans = [toolchain.plan(SOURCE)]
    monkeypatch.setenv("CXX", "g++ -fno-math-errno")
    plans.append(toolchain.plan(SOURCE))
    monkeypatch.setattr(toolchain, "_instruction_sets", lambda: "flags : fpu sse")
    plans.append(toolchain.plan(SOURCE))
    monkeypatch.setattr(toolchain.platform, "libc_ver", lambda: ("glibc", "2.17"))
    plans.append(toolchain.plan(SOURCE))
    monkeypatch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, "-g"))
    plans.append(toolchain.plan(SOURCE))
    assert len({plan.folder for plan in plans}) == len(plans)
    assert plans[-1] == toolchain.plan(SOURCE)


@needs_compiler
def test_the_key_knows_the_sources(tiny):
    plans = [toolchain.plan(tiny / "first.cpp").folder]
    assert toolchain.plan(tiny / "first.cpp").folder == plans[0]
    (tiny / "answer.h").write_text("constexpr int ANSWER = 44;\n")
    plans.append(toolchain.plan(tiny / "first.cpp").folder)
    (tiny / "first.cpp").write_text('#include "answer.h"\nextern "C" int first() { return -ANSWER; }\n')
    plans.append(toolchain.plan(tiny / "first.cpp").folder)
    assert len(set(plans)) == len(plans)


@needs_compiler
def test_an_architecture_in_cxx_takes_the_place_of_the_native_one(monkeypatch):
    assert "-march=native" in toolchain.plan(SOURCE).command
    monkeypatch.setenv("CXX", "g++ -march=x86-64")
    assert [word for word in toolchain.plan(SOURCE).command if word.startswith("-march")] == ["-march=x86-64"]


BROKEN = {
    "fails": (
        "echo 'x.cpp:1: fatal error: no such thing' >&2; exit 1",
        "failed with exit code 1: x.cpp:1: fatal error: no such",
    ),
    "knows no OpenMP": (
        "echo \"clang: error: unsupported option '-fopenmp'\" >&2; exit 1",
        "failed with exit code 1: clang: error: unsupported option '-fopenmp'",
    ),
    "has no OpenMP": (
        "echo '/usr/bin/ld: cannot find -lomp' >&2; echo 'clang: error: linker command failed' >&2; exit 1",
        "failed with exit code 1: /usr/bin/ld: cannot find -lomp",
    ),
    "is killed": ("kill -9 $$", "failed with exit code -9"),
    "writes rubbish": ('while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"', "cannot be loaded: file too short"),
    "writes nothing": ("exit 0", "succeeded but wrote no library"),
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


@pytest.mark.parametrize("body", [body for body, _ in BROKEN.values()], ids=BROKEN.keys())
def test_a_cause_common_to_several_kernels_is_told_once(tmp_path, monkeypatch, caplog, tiny, body):
    fake_compiler(tmp_path, monkeypatch, body)
    kernels = [Kernel("first", tiny), Kernel("second", tiny), Kernel(NAME)]
    with caplog.at_level(logging.WARNING):
        assert [kernel.library() for kernel in kernels] == [None] * 3
    assert len(caplog.records) == 1
    assert caplog.records[0].getMessage().startswith("first runs in PyTorch, not in C++: ")
    assert {kernel.choice() for kernel in kernels} == {("torch", kernels[0].failure())}


@needs_compiler
def test_causes_of_single_kernels_are_told_one_by_one(caplog, tiny):
    (tiny / "first.cpp").write_text("int first( { }\n")
    kernels = [Kernel("first", tiny), Kernel("second", tiny), Kernel("third", tiny)]
    with caplog.at_level(logging.WARNING):
        found = [kernel.library() is not None for kernel in kernels]
    assert found == [False, True, False]
    first, third = (record.getMessage() for record in caplog.records)
    assert "first.cpp:1:" in first
    assert "third.cpp cannot be read: No such file" in third


def test_no_compiler(monkeypatch, caplog, tiny):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert Kernel(NAME).choice() == ("torch", "CXX names no-such-compiler, which is not on the path; install g++ or set CXX")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    kernels = [Kernel(NAME), Kernel("first", tiny), Kernel("second", tiny)]
    with caplog.at_level(logging.WARNING):
        for kernel in kernels:
            assert kernel.library() is None
            assert kernel.choice() == ("torch", "there is no compiler g++, which is not on the path; install g++ or set CXX")
    assert len(caplog.records) == 1, "one line, however many kernels"


def test_a_compiler_that_is_no_command(monkeypatch, caplog, tiny):
    monkeypatch.setenv("CXX", "'g++")
    kernels = [Kernel("first", tiny), Kernel("second", tiny)]
    with caplog.at_level(logging.WARNING):
        assert [kernel.library() for kernel in kernels] == [None, None]
    assert {kernel.choice() for kernel in kernels} == {("torch", """CXX is "'g++", no command: No closing quotation""")}
    assert len(caplog.records) == 1


@needs_compiler
def test_a_cache_that_cannot_be_written(tmp_path, caplog, tiny):
    (tmp_path / "cache").write_text("a file where the folder should be")
    kernels = [Kernel("first", tiny), Kernel("second", tiny)]
    with caplog.at_level(logging.WARNING):
        assert [kernel.library() for kernel in kernels] == [None, None]
    assert "cannot be written (Not a directory); set XDG_CACHE_HOME to a folder that can" in kernels[0].failure()
    assert len(caplog.records) == 1


@needs_compiler
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda _: b"rubbish", lambda _: b""])
def test_a_damaged_library_is_compiled_again(caplog, tiny, damage):
    file = toolchain.plan(tiny / "first.cpp").build()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    kernel = Kernel("first", tiny)
    assert "will be compiled at first use" in kernel.choice()[1]
    library = kernel.library()
    assert library is not None
    assert library.first() == 42
    assert file.read_bytes() == whole
    assert not caplog.records


@needs_compiler
def test_a_relative_cache_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert toolchain.cache_dir() == tmp_path / ".cache" / "turbogr" / "kernels"


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
    files = [p.name for p in cache.rglob("*") if p.is_file()]
    assert files
    assert all(name.startswith(f"{NAME}-") for name in files)
    assert not list(cache.rglob(".building-*"))


@needs_compiler
@pytest.mark.slow
def test_what_the_doctor_asks(cache):
    """Every operator of the package and one of a user's, before and after everything is compiled at once."""
    code = (
        "import json\n"
        "from dataclasses import astuple\n"
        "from turbogr.ops.registry import describe, register\n"
        "register('mine::sum', 'torch', 'no need for more')\n"
        "for load in (False, True):\n"
        "    print(json.dumps([astuple(x) for x in describe(load)]))\n"
    )
    process = run_python(code)
    out, error = process.communicate()
    assert process.returncode == 0, error
    before, after = ({name: rest for name, *rest in json.loads(line)} for line in out.splitlines())
    assert before.keys() == after.keys()
    assert after["mine::sum"] == ["torch", "no need for more"]
    compiled = sorted(p.stem.rpartition("-")[0] for p in cache.rglob("*.so"))
    assert compiled == sorted(p.stem for p in SOURCE.parent.glob("*.cpp")), "every kernel serves an operator"
    in_cpp = [name for name, (backend, _) in after.items() if backend == "cpp"]
    assert "turbogr::jagged_hstu_attention" in in_cpp
    assert len(in_cpp) >= len(compiled)
    for name in in_cpp:
        assert before[name][1].startswith("will be compiled at first use with")
        assert after[name][1].startswith("compiled with")
    assert all(reason for _, reason in after.values())


def test_without_a_compiler_the_doctor_has_a_reason_for_each_operator_and_the_log_one_line():
    code = (
        "import json\n"
        "from dataclasses import astuple\n"
        "from turbogr.ops.registry import describe\n"
        "print(json.dumps([astuple(x) for x in describe(load=True)]))\n"
    )
    process = run_python(code, PATH="")
    out, error = process.communicate()
    assert process.returncode == 0, error
    assert {backend for _, backend, _ in json.loads(out)} == {"torch"}
    reasons = {name: reason for name, _, reason in json.loads(out)}
    assert reasons["turbogr::jagged_hstu_attention"].startswith("there is no compiler g++")
    assert error.count("runs in PyTorch, not in C++") == 1
