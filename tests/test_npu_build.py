"""`python -m turbogr.npu_build`: the plugin compiled without CANN, and what is told where something is missing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ascendc.plugin import gate
from turbogr import cann, npu_build
from turbogr.errors import MissingDependencyError
from turbogr.ops import npu_plugin

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in cann.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return tmp_path / "cache" / "turbogr" / "npu"


def run_build(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), **variables}
    command = [sys.executable, "-m", "turbogr.npu_build", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd="/")


@pytest.fixture(scope="module")
def built():
    """The command's result in an empty cache, shared with the plugin's test; skips where torch_npu's wheel cannot be had."""
    found = gate.passed()
    if found is None:
        pytest.skip(f"the wheel of torch-npu {npu_plugin.TORCH_NPU} cannot be had")
    return found


@pytest.mark.slow
def test_gate_the_plugin_compiles_and_links_without_cann(built, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(built.cache))
    libraries = npu_plugin.libraries()
    assert libraries.plugin.is_file()
    assert f"plugin: {libraries.plugin}" in built.stdout, "it says where the library was written"
    assert "its kernels are not built" in built.stdout
    compiled = {line.strip() for line in built.stdout.splitlines() if line.startswith("  ")}
    assert compiled == {source.name for source in npu_build.sources()}, "all sources, none kept from before"
    # Every operator that has kernels is registered.
    registered = set(re.findall(rb"turbogr::(\w+)", libraries.plugin.read_bytes()))
    assert {name.encode() for name in OPERATORS} <= registered
    folder, wheel = libraries.plugin.parent, f"torch-npu-{npu_plugin.TORCH_NPU}"
    assert {file.name for file in folder.parent.iterdir()} == {folder.name, wheel}
    assert {file.name for file in folder.iterdir()} == {libraries.plugin.name, "objects"}


@pytest.mark.slow
def test_make_finds_nothing_to_do_the_second_time_from_any_folder(built, monkeypatch):
    if shutil.which("make") is None or not (CHECKOUT / ".venv" / ".turbogr-setup").is_file():
        pytest.skip("no make on the path, or this checkout was not set up by make")
    monkeypatch.setenv("XDG_CACHE_HOME", str(built.cache))
    library = npu_plugin.libraries().plugin
    written = library.stat().st_mtime_ns
    # Whatever the dates of files say, setting up again is not what is tested.
    make = ["make", "-C", str(CHECKOUT), "-o", ".venv/.turbogr-setup", "npu-plugin"]
    for folder in ("/", str(CHECKOUT / "docs")):
        run = subprocess.run(make, capture_output=True, text=True, env=gate.environment(built.cache), check=False, cwd=folder)
        assert run.returncode == 0, run.stderr
        told = run.stdout.splitlines()
        assert f"plugin: {library}" in told
        assert not any("compiled" in line or "download" in line for line in told)
    assert library.stat().st_mtime_ns == written


OPERATORS = [
    f"{operator}{direction}"
    for operator in ("jagged_hstu_attention", "jagged_fuxi_attention", "jagged_embedding_lookup", "negative_logits")
    for direction in ("", "_backward")
]


FAKE_COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo 1; exit; fi
case "$*" in *second.cpp*) if [ ! -f {whole} ]; then exit 1; fi;; esac
for output; do :; done
touch "$output"
"""


def test_a_build_that_was_cut_short_goes_on(tmp_path, monkeypatch, capfd):
    compiler, whole, folder = tmp_path / "cxx", tmp_path / "whole", tmp_path / "objects"
    compiler.write_text(FAKE_COMPILER.format(whole=whole))
    compiler.chmod(0o755)
    wanted = [Path("first.cpp"), Path("second.cpp")]

    def compiled(command: str) -> set[str]:
        monkeypatch.setenv("CXX", command)
        made = npu_build.compile_sources(wanted, folder, torch_npu=None)
        assert all(x.is_file() for x in made)
        return {line.strip() for line in capfd.readouterr().out.splitlines() if line.startswith("  ")}

    with pytest.raises(MissingDependencyError, match="cxx failed with exit code 1"):
        compiled(str(compiler))
    assert capfd.readouterr().out.splitlines()[1:] == ["  first.cpp"]
    whole.touch()
    assert compiled(str(compiler)) == {"second.cpp"}
    assert compiled(str(compiler)) == set()
    assert compiled(f"{compiler} -g") == {"first.cpp", "second.cpp"}, "another command's objects are others"


def test_without_a_compiler_it_says_so():
    run = run_build(CXX="no-such-compiler")
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
    run = run_build("--kernels", PATH=path, ASCEND_HOME_PATH=str(home))
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
    run = run_build("--kernels", PATH=path, **named)
    assert run.returncode == 1
    assert told in run.stderr
    assert "Traceback" not in run.stderr
    assert not libraries.kernels.exists()


def test_kernels_without_cmake(tmp_path, monkeypatch):
    plugin_is_there()
    run = run_build("--kernels", PATH=str(tmp_path), ASCEND_HOME_PATH=str(write_cann(tmp_path / "cann", "9.0.0")))
    assert run.returncode == 1
    assert "npu_build: there is no cmake on the path" in run.stderr
