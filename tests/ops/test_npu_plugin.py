"""How the plugin for NPUs is found and loaded: with libraries that stand in for it, each test with a cache of its own."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from turbogr import resources
from turbogr.errors import MissingDependencyError
from turbogr.ops import npu_plugin

CHECKOUT = Path(__file__).resolve().parents[2]
LOG = "turbogr.ops.npu_plugin"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    npu_plugin._load.cache_clear()
    npu_plugin._tell.cache_clear()
    yield tmp_path / "cache" / "turbogr" / "npu"
    npu_plugin._load.cache_clear()
    npu_plugin._tell.cache_clear()


def compiled(source: str, library: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ on the path")
    library.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["g++", "-x", "c++", "-shared", "-fPIC", "-o", str(library), "-"], input=source, text=True, check=True)


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the kernels' folder, which can be changed."""
    folder = tmp_path / "kernels"
    shutil.copytree(resources.kernels_dir(), folder)
    monkeypatch.setattr(npu_plugin, "kernels_dir", lambda: folder)
    return folder


def test_both_libraries_belong_side_by_side_in_the_cache(cache):
    found = npu_plugin.libraries()
    assert found.plugin.parent == found.kernels.parent
    assert found.plugin.parent.parent == cache
    assert not cache.exists(), "asking writes nothing"
    assert found == npu_plugin.libraries()


@pytest.mark.parametrize("changed", ["torch_npu_plugin/launch.cpp", "ascendc/common/align.h"])
def test_other_sources_are_other_libraries(sources, changed):
    before = npu_plugin.libraries()
    (sources / "cpu" / "embedding.cpp").write_text("// not of the plugin")
    (sources / "ascendc" / "README.md").write_text("no source")
    assert npu_plugin.libraries() == before
    (sources / changed).write_text("// changed")
    assert npu_plugin.libraries() != before


@pytest.mark.parametrize("distribution", ["torch", "torch-npu"])
def test_other_releases_are_other_libraries(monkeypatch, distribution):
    before = npu_plugin.libraries()
    release = npu_plugin._release
    monkeypatch.setattr(npu_plugin, "_release", lambda name: "2.99.0" if name == distribution else release(name))
    assert npu_plugin.libraries() != before


def test_what_is_not_built_is_told_with_the_command_that_builds_it():
    found = npu_plugin.libraries()
    with pytest.raises(MissingDependencyError, match=rf"{npu_plugin.PLUGIN} is missing\): python -m turbogr.npu_build$"):
        npu_plugin.load()
    found.plugin.parent.mkdir(parents=True)
    found.plugin.touch()
    with pytest.raises(MissingDependencyError, match=r"libturbogr_ascendc.so is missing\): .*npu_build --kernels, with CANN"):
        npu_plugin.load()
    found.kernels.touch()
    assert found.missing() is None


def test_library_that_cannot_be_loaded_is_told_with_its_reason():
    found = npu_plugin.libraries()
    found.plugin.parent.mkdir(parents=True)
    found.plugin.write_bytes(b"no library")
    found.kernels.touch()
    with pytest.raises(MissingDependencyError, match=r"cannot be loaded \(.*libturbogr_npu.so.*\); .*npu_build --again"):
        npu_plugin.load()


def test_why_operators_run_in_pytorch_is_said_once(caplog):
    with caplog.at_level(logging.INFO, logger=LOG):
        assert not npu_plugin.load_or_tell()
        assert not npu_plugin.load_or_tell()
    assert len(caplog.records) == 1
    assert caplog.records[0].levelname == "WARNING"
    assert "operators run in PyTorch on NPUs" in caplog.text
    assert "python -m turbogr.npu_build" in caplog.text


PROGRAM = """
import ctypes, json, threading, torch
from turbogr.ops import npu_plugin
loads, load = [], torch.ops.load_library
torch.ops.load_library = lambda path: (loads.append(str(path)), load(path))
threads = [threading.Thread(target=npu_plugin.load) for _ in range(4)]
[t.start() for t in threads], [t.join() for t in threads]
print(json.dumps([loads, ctypes.CDLL(loads[0]).answer(), str(npu_plugin.load())]))
"""


def test_it_is_loaded_once_a_process():
    found = npu_plugin.libraries()
    compiled('extern "C" int answer() { return 42; }', found.plugin)
    found.kernels.touch()
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    loads, answer, path = json.loads(run.stdout)
    assert loads == [str(found.plugin)] == [path]
    assert answer == 42
