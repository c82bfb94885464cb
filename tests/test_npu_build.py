"""`python -m turbogr.npu_build`: the plugin compiled without CANN, and what is told where something is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from turbogr import cann
from turbogr.ops import npu_plugin

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in cann.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "cache" / "turbogr" / "npu"


def npu_build(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **variables}
    command = [sys.executable, "-m", "turbogr.npu_build", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd="/")


@pytest.fixture(scope="module")
def torch_npu(tmp_path_factory):
    """A cache that has torch_npu's headers, and nothing built; skips where the wheel cannot be had."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    run = subprocess.run([*pip, f"torch-npu=={npu_plugin.TORCH_NPU}"], capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip(f"the wheel of torch-npu {npu_plugin.TORCH_NPU} cannot be had: {run.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.slow
def test_gate_the_plugin_compiles_and_links_without_cann(cache, torch_npu):
    if shutil.which("g++") is None:
        pytest.skip("no g++ on the path")
    began = time.monotonic()
    # pip looks into the folder first: what was downloaded is not downloaded again.
    first = npu_build(PIP_FIND_LINKS=str(torch_npu), CXX="g++")
    assert first.returncode == 0, first.stdout + first.stderr
    print(f"took {time.monotonic() - began:.0f} s")
    libraries = npu_plugin.libraries()
    assert libraries.plugin.is_file()
    assert f"plugin: {libraries.plugin}" in first.stdout, "it says where the library was written"
    assert "its kernels are not built" in first.stdout
    written = libraries.plugin.stat().st_mtime_ns
    # Every operator that has kernels is registered.
    content = libraries.plugin.read_bytes()
    registered = set(re.findall(rb"turbogr::(\w+)", content))
    assert {name.encode() for name in OPERATORS} <= registered
    second = npu_build()
    assert second.returncode == 0
    assert second.stdout.splitlines()[0] == f"plugin: {libraries.plugin}", "the second time there is nothing to do"
    assert libraries.plugin.stat().st_mtime_ns == written
    assert {file.name for file in cache.iterdir()} == {libraries.plugin.parent.name, f"torch-npu-{npu_plugin.TORCH_NPU}"}


OPERATORS = [
    f"{operator}{direction}"
    for operator in ("jagged_hstu_attention", "jagged_fuxi_attention", "jagged_embedding_lookup", "negative_logits")
    for direction in ("", "_backward")
]


@pytest.mark.slow
def test_make_works_from_any_folder(cache, torch_npu):
    if shutil.which("g++") is None or shutil.which("make") is None:
        pytest.skip("no g++ or make on the path")
    for folder in ("/", str(CHECKOUT / "docs")):
        run = subprocess.run(
            ["make", "-C", str(CHECKOUT), "-n", "npu-plugin"], capture_output=True, text=True, check=False, cwd=folder
        )
        assert run.returncode == 0, run.stderr
        assert "-m turbogr.npu_build" in run.stdout


def test_without_a_compiler_it_says_so():
    run = npu_build(CXX="no-such-compiler")
    assert run.returncode == 1
    assert run.stderr.startswith("npu_build: CXX names no-such-compiler, which is not on the path")
    assert "Traceback" not in run.stderr


def write_cann(folder: Path, release: str | None) -> Path:
    if release is not None:
        (folder / "x86_64-linux").mkdir(parents=True)
        (folder / "x86_64-linux" / "ascend_toolkit_install.info").write_text(
            f"package_name=Ascend-cann-toolkit\nversion={release}\n"
        )
    folder.mkdir(exist_ok=True)
    return folder


def test_cann_is_found_as_the_environment_names_it(tmp_path, monkeypatch):
    assert cann.find() is None
    older, newer = write_cann(tmp_path / "older", "8.3.RC1"), write_cann(tmp_path / "newer", "9.0.0")
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(newer))
    assert cann.find() == cann.Cann("ASCEND_TOOLKIT_HOME", newer, "9.0.0")
    assert cann.Cann("ASCEND_TOOLKIT_HOME", newer, "9.0.0").problem() is None
    monkeypatch.setenv("ASCEND_HOME_PATH", str(older))
    found = cann.find()
    assert found == cann.Cann("ASCEND_HOME_PATH", older, "8.3.RC1")
    assert found.problem() == f"CANN 8.3.RC1 in {older} is older than 9, which the kernels need"
    monkeypatch.setenv("ASCEND_HOME_PATH", str(write_cann(tmp_path / "bare", None)))
    assert cann.find() == cann.Cann("ASCEND_HOME_PATH", tmp_path / "bare", None)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "gone"))
    assert cann.find().problem() == f"ASCEND_HOME_PATH names {tmp_path / 'gone'}, which is no folder"


FAKE_CMAKE = """#!/bin/sh
echo "$@" >> {log}
if [ "$1" = -S ]; then mkdir -p "$4"; else touch "$2/libturbogr_ascendc.so"; fi
{end}
"""


@pytest.fixture
def cmake(tmp_path):
    """A folder for the path, whose cmake writes down what it is told; and what it wrote."""
    folder, log = tmp_path / "bin", tmp_path / "cmake.log"
    folder.mkdir()

    def install(end: str = "") -> tuple[str, Path]:
        (folder / "cmake").write_text(FAKE_CMAKE.format(log=log, end=end))
        (folder / "cmake").chmod(0o755)
        return f"{folder}{os.pathsep}{os.environ['PATH']}", log

    return install


def plugin_is_there() -> npu_plugin.Libraries:
    libraries = npu_plugin.libraries()
    libraries.plugin.parent.mkdir(parents=True)
    libraries.plugin.touch()
    return libraries


def test_kernels_are_built_by_cmake_beside_the_plugin(tmp_path, cmake):
    path, log = cmake()
    libraries, home = plugin_is_there(), write_cann(tmp_path / "cann", "9.0.0")
    run = npu_build("--kernels", PATH=path, ASCEND_HOME_PATH=str(home))
    assert run.returncode == 0, run.stderr
    assert libraries.kernels.is_file()
    assert f"kernels: {libraries.kernels}" in run.stdout
    assert f"kernels for dav-2201 with CANN 9.0.0 in {home}" in run.stdout
    configure, build = log.read_text().splitlines()
    assert configure.startswith(f"-S {CHECKOUT / 'kernels' / 'ascendc'} -B ")
    assert "-DCMAKE_ASC_ARCHITECTURES=dav-2201 -DCMAKE_ASC_RUN_MODE=npu" in configure
    assert "--target turbogr_ascendc" in build
    assert libraries.missing() is None


@pytest.mark.parametrize(
    ("release", "end", "told"),
    [
        (None, "", "npu_build: ASCEND_HOME_PATH and ASCEND_TOOLKIT_HOME are not set: source set_env.sh of CANN >= 9"),
        ("8.3.RC1", "", "is older than 9, which the kernels need"),
        ("9.0.0", "exit 3", "npu_build: cmake failed with exit code 3"),
    ],
)
def test_kernels_that_cannot_be_built_are_told_in_one_line(tmp_path, cmake, release, end, told):
    path, _ = cmake(end)
    libraries = plugin_is_there()
    named = {} if release is None else {"ASCEND_HOME_PATH": str(write_cann(tmp_path / "cann", release))}
    run = npu_build("--kernels", PATH=path, **named)
    assert run.returncode == 1
    assert told in run.stderr
    assert "Traceback" not in run.stderr
    assert not libraries.kernels.exists()


def test_kernels_without_cmake(tmp_path, monkeypatch):
    plugin_is_there()
    run = npu_build("--kernels", PATH=str(tmp_path), ASCEND_HOME_PATH=str(write_cann(tmp_path / "cann", "9.0.0")))
    assert run.returncode == 1
    assert "npu_build: there is no cmake on the path" in run.stderr
