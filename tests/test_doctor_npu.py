"""What `turbogr doctor` tells of CANN and of the plugin for NPUs; torch_npu is a stand-in, the libraries are tiny or broken."""

import subprocess

import pytest

from tests.test_doctor import NPU_HERE, fake_distribution, run_doctor
from turbogr import cann
from turbogr.ops import npu_plugin


def line(output: str, begin: str) -> str:
    return next(x for x in output.splitlines() if x.startswith(begin)).removeprefix(begin)


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Runs the doctor with a cache of its own and no CANN but the one given."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in cann.VARIABLES:
        monkeypatch.delenv(variable, raising=False)

    def run(**variables: str) -> tuple[str, str, subprocess.CompletedProcess[str]]:
        # Without a compiler: the new cache has none of the CPU's kernels, and they are not looked at here.
        done = run_doctor(first=tmp_path, CXX="no-such-compiler", **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return line(done.stdout, "CANN: "), line(done.stdout, "NPU plugin: "), done

    return run


def libraries_of(monkeypatch, with_npu: bool) -> npu_plugin.Libraries:
    if with_npu:
        release = npu_plugin._release
        monkeypatch.setattr(npu_plugin, "_release", lambda name: "2.13.0" if name == "torch-npu" else release(name))
    return npu_plugin.libraries()


def test_nothing_is_there(told):
    of_cann, of_plugin, _ = told()
    assert (
        of_cann == "not found (ASCEND_HOME_PATH and ASCEND_TOOLKIT_HOME are not set: source its set_env.sh); only NPUs need it"
    )
    assert of_plugin.startswith("not built from these sources (")
    assert of_plugin.endswith("python -m turbogr.npu_build; without it operators run in PyTorch on NPUs")


def test_cann_is_there_and_the_plugin_is_built_but_torch_npu_is_missing(told, tmp_path, monkeypatch):
    home = tmp_path / "cann"
    (home / "aarch64-linux").mkdir(parents=True)
    (home / "aarch64-linux" / "ascend_toolkit_install.info").write_text("version=9.0.0\n")
    found = libraries_of(monkeypatch, with_npu=False)
    found.plugin.parent.mkdir(parents=True)
    found.plugin.touch()
    found.kernels.touch()
    of_cann, of_plugin, _ = told(ASCEND_TOOLKIT_HOME=str(home))
    assert of_cann == f"9.0.0, ASCEND_TOOLKIT_HOME is {home}"
    assert of_plugin == f"built: {found.plugin}; it cannot be loaded without torch_npu"


def test_plugin_that_cannot_be_loaded_is_told_with_its_reason_and_the_rest_is_looked_at(told, tmp_path, monkeypatch):
    (tmp_path / "torch_npu.py").write_text(NPU_HERE.format(count=1))
    fake_distribution(tmp_path, "torch_npu", "2.13.0")
    found = libraries_of(monkeypatch, with_npu=True)
    found.plugin.parent.mkdir(parents=True)
    found.plugin.write_bytes(b"no library")
    found.kernels.write_bytes(b"no library")
    of_cann, of_plugin, done = told(ASCEND_HOME_PATH=str(tmp_path / "gone"))
    assert of_cann == f"ASCEND_HOME_PATH names {tmp_path / 'gone'}, which is no folder"
    assert of_plugin.startswith("built, but cannot be loaded (OSError: ")
    assert "libturbogr_ascendc.so: file too short" in of_plugin or "invalid ELF header" in of_plugin
    assert of_plugin.endswith("operators run in PyTorch on NPUs")
    assert "NPU: torch_npu 2.13.0, 1 visible" in done.stdout
    assert "jagged_hstu_attention" in done.stdout


def test_plugin_that_is_loaded(told, tmp_path, monkeypatch):
    (tmp_path / "torch_npu.py").write_text(NPU_HERE.format(count=1))
    fake_distribution(tmp_path, "torch_npu", "2.13.0")
    found = libraries_of(monkeypatch, with_npu=True)
    found.plugin.parent.mkdir(parents=True)
    for library in (found.plugin, found.kernels):
        command = ["g++", "-x", "c++", "-shared", "-fPIC", "-o", str(library), "-"]
        try:
            subprocess.run(command, input="int answer() { return 42; }", text=True, check=True)
        except FileNotFoundError:
            pytest.skip("no g++ on the path")
    assert told()[1] == f"built and loaded: {found.plugin}"
