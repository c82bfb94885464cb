"""`turbogr doctor` in whole, half and broken environments, each a child process that never touches this one's packages."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from turbogr import doctor

SITE = Path(sysconfig.get_paths()["purelib"])
CHECKOUT = Path(__file__).resolve().parents[1]


def run_doctor(*, python: str = sys.executable, first: Path | None = None, args: tuple[str, ...] = (), **variables: str):
    """Runs the doctor with `first` at the head of the module path and a console wide enough for its rows."""
    path = [str(p) for p in (first, CHECKOUT) if p is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "COLUMNS": "300", **variables}
    return subprocess.run(
        [python, "-m", "turbogr", "doctor", *args], capture_output=True, text=True, env=environment, check=False, cwd="/"
    )


def row(output: str, package: str) -> str:
    return next(line for line in output.splitlines() if f"│ {package} " in line)


def scratch_site(folder: Path, without: tuple[str, ...]) -> str:
    """A virtual environment that holds links to all of ours but some packages; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next((folder / "lib").glob("python*")) / "site-packages"
    for entry in SITE.iterdir():
        if not entry.name.lower().startswith(without):
            (site / entry.name).symlink_to(entry)
    return str(folder / "bin" / "python")


def fake_distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_this_environment_is_ready():
    run = run_doctor()
    assert run.returncode == 0, run.stdout + run.stderr
    assert "training on one device: ready" in run.stdout
    assert " ok " in row(run.stdout, "torch")
    assert "jagged_hstu_attention" in run.stdout, "the back end of each operator is shown"
    assert "C++ compiler:" in run.stdout
    assert "accelerators:" in run.stdout
    assert "NPU: torch_npu is not installed; accelerator npu needs it, other accelerators do not" in run.stdout


@pytest.mark.slow
def test_missing_fbgemm_is_a_warning_with_the_command_that_mends_it(tmp_path):
    python = scratch_site(tmp_path / "venv", without=("fbgemm",))
    run = run_doctor(python=python)
    assert run.returncode == 0, run.stdout + run.stderr
    line = row(run.stdout, "fbgemm-gpu") if doctor._torch_cuda() else row(run.stdout, "fbgemm-gpu-cpu")
    assert " warning " in line
    assert "not installed" in line
    build = doctor.companions()[1]
    assert f"{python} -m pip install --no-deps {build}" in run.stdout
    # torchrec is there but cannot be imported without fbgemm
    assert " warning " in row(run.stdout, "torchrec")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise OSError('libtorch_cuda.so: cannot open shared object file')", "OSError: libtorch_cuda.so: cannot open"),
        ("raise RuntimeError('built for torch 1.0')", "RuntimeError: built for torch 1.0"),
        ("import no_such_helper", "No module named 'no_such_helper'"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ],
    ids=["missing-library", "runtime-error", "missing-module", "crash"],
)
def test_fbgemm_whose_import_fails_is_shown_with_its_message(tmp_path, body, message):
    (tmp_path / "fbgemm_gpu").mkdir()
    (tmp_path / "fbgemm_gpu" / "__init__.py").write_text(body)
    name, version = doctor.companions()[1].split("==")
    fake_distribution(tmp_path, name, version)
    run = run_doctor(first=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    line = row(run.stdout, name)
    assert " warning " in line
    assert message in line
    assert f"to mend {name}: " in run.stdout
    # what comes after the failing package is still looked at
    assert "operators" in run.stdout
    assert " ok " in row(run.stdout, "lightning")


NPU_HERE = """
import types, torch
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", types.SimpleNamespace(device_count=lambda: {count}))
"""


@pytest.mark.parametrize(
    ("count", "line"),
    [(2, "NPU: torch_npu 2.13.0, 2 visible; set trainer.accelerator npu"), (0, "NPU: torch_npu 2.13.0, 0 visible: no NPU can")],
)
def test_line_on_the_npu(tmp_path, count, line):
    (tmp_path / "torch_npu.py").write_text(NPU_HERE.format(count=count))
    fake_distribution(tmp_path, "torch_npu", "2.13.0")
    run = run_doctor(first=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    assert line in run.stdout
    assert ("accelerators: npu:0, npu:1" in run.stdout) == (count == 2)


@pytest.mark.slow
def test_torch_npu_that_keeps_torch_from_being_imported_is_told(tmp_path):
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    fake_distribution(tmp_path, "torch_npu", "2.13.0")
    # so that torch loads it by itself
    entry = tmp_path / "torch_npu-2.13.0.dist-info" / "entry_points.txt"
    entry.write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    run = run_doctor(first=tmp_path)
    assert run.returncode == 1
    assert "NPU: torch_npu 2.13.0 cannot be loaded (" in run.stdout
    assert "to mend torch: " in run.stdout
    assert "-m pip uninstall -y torch-npu" in run.stdout


def test_needed_package_of_a_wrong_version_is_broken(tmp_path):
    fake_distribution(tmp_path, "torchmetrics", "1.0.3")
    run = run_doctor(first=tmp_path)
    assert run.returncode == 1
    line = row(run.stdout, "torchmetrics")
    assert "1.0.3" in line
    assert " broken " in line
    assert "-m pip install 'torchmetrics>=1.4'" in run.stdout
    assert "broken: torchmetrics" in run.stdout


def test_needed_package_whose_import_fails_is_broken_but_the_doctor_works(tmp_path):
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").write_text("raise ValueError('half installed')")
    run = run_doctor(first=tmp_path)
    assert run.returncode == 1
    assert "ValueError: half installed" in row(run.stdout, "lightning")
    assert " broken " in row(run.stdout, "lightning")


def test_companions_are_printed_alone_for_pip():
    run = run_doctor(args=("--companions",))
    assert run.returncode == 0
    assert run.stdout.split() == doctor.companions()
    assert all("==" in text for text in run.stdout.split())


OWN_OPERATOR = """
from turbogr.ops.registry import register

register("mine::nothing", "torch", "written by a user")
"""


def test_operators_of_ones_own_are_shown_when_their_module_is_imported(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_OPERATOR)
    run = run_doctor(first=tmp_path, args=("--import", "mine"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "written by a user" in row(run.stdout, "mine::nothing")
    assert " ok " in row(run.stdout, "mine")
    assert "jagged_hstu_attention" in run.stdout


@pytest.mark.slow
def test_module_of_ones_own_that_cannot_be_imported_is_broken(tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_helper")
    run = run_doctor(first=tmp_path, args=("--import", "mine"))
    assert run.returncode == 1
    assert "No module named 'no_such_helper'" in row(run.stdout, "mine")
    assert "broken: mine" in run.stdout
    assert "jagged_hstu_attention" in run.stdout


def test_compile_without_a_compiler_tells_what_to_do(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_OPERATOR)
    run = run_doctor(first=tmp_path, args=("--compile", "--import", "mine"), CXX="no-such-compiler")
    assert run.returncode == 0, run.stdout + run.stderr
    line = row(run.stdout, "turbogr::jagged_hstu_attention")
    assert "torch" in line
    assert "CXX names no-such-compiler, which is not on the path; install g++ or set CXX" in line
    assert "written by a user" in row(run.stdout, "mine::nothing")
    assert "C++ compiler: none, operators use PyTorch, which is slower: CXX names no-such-compiler" in run.stdout
    assert "lightning" not in run.stdout, "only operators are looked at"


def test_compile_fails_where_operators_cannot_be_imported(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch.so: cannot open')")
    run = run_doctor(first=tmp_path, args=("--compile",))
    assert run.returncode == 1
    assert "libtorch.so: cannot open" in run.stdout


def test_abbreviated_option_is_refused():
    run = run_doctor(args=("--comp",))
    assert run.returncode == 2
    assert "unrecognized arguments: --comp" in run.stderr


def test_build_of_fbgemm_follows_the_build_of_torch(monkeypatch):
    monkeypatch.setattr(doctor, "_torch_cuda", lambda: "12.8")
    assert doctor.companions()[1].startswith("fbgemm-gpu==")
    monkeypatch.setattr(doctor, "_torch_cuda", lambda: None)
    assert doctor.companions()[1].startswith("fbgemm-gpu-cpu==")
