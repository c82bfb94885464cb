"""The wheel: complete, importable away from the checkout, and able to train."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.data.make import write_prepared

CHECKOUT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(CHECKOUT)]
    build = subprocess.run(command, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    return next(folder.glob("turbogr-*.whl"))


def test_every_file_is_inside(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    for name in ("kernels", "recipes"):
        files = [p for p in (CHECKOUT / name).rglob("*") if p.is_file()]
        assert files
        for file in files:
            assert f"turbogr/{file.relative_to(CHECKOUT).as_posix()}" in inside
    modules = (CHECKOUT / "turbogr").rglob("*.py")
    assert {f"turbogr/{p.relative_to(CHECKOUT / 'turbogr').as_posix()}" for p in modules} <= inside
    assert not [name for name in inside if name.startswith("tests")]


def test_source_distribution_can_be_set_up(tmp_path):
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(CHECKOUT)]
    build = subprocess.run(command, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    with tarfile.open(next(tmp_path.glob("turbogr-*.tar.gz"))) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    scripts = {f"scripts/{path.name}" for path in (CHECKOUT / "scripts").glob("*.sh")}
    assert scripts
    assert {"Makefile", "pyproject.toml", "README.md", "LICENSE", *scripts} <= inside


def test_installed_wheel_trains_two_steps(wheel, tmp_path):
    scratch = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(scratch)], check=True)
    python = scratch / "bin" / "python"
    site = next((scratch / "lib").glob("python*")) / "site-packages"
    # Dependencies come from this environment. A plain path in a .pth file adds the folder and reads no .pth files in it, so
    # that an editable installation of the checkout stays out of sight.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet", str(wheel)]
    subprocess.run(command, check=True)

    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PL_GLOBAL_SEED")}
    work = tmp_path / "work"
    work.mkdir()

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(args, capture_output=True, text=True, env=environment, cwd=work, check=False)

    code = (
        "import json, turbogr; from turbogr.resources import kernels_dir, recipes_dir;"
        "print(json.dumps([turbogr.__file__, str(kernels_dir()), str(recipes_dir())]))"
    )
    where = run(str(python), "-c", code)
    assert where.returncode == 0, where.stderr
    assert all(Path(path).is_relative_to(site.resolve()) for path in json.loads(where.stdout)), where.stdout

    prepared = write_prepared(tmp_path / "prepared", num_users=40, num_items=250, min_len=5)
    small = ["--trainer.max_steps=2", "--data.batch_size=8", "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=1"]
    fit = run(str(scratch / "bin" / "turbogr"), "fit", "-c", "movielens-100k/hstu.yaml", f"--data.path={prepared}", *small)
    assert fit.returncode == 0, fit.stdout + fit.stderr
    checkpoint = work / "runs" / "movielens-100k-hstu" / "checkpoints" / "last.ckpt"
    step = run(str(python), "-c", f"import torch; print(torch.load({str(checkpoint)!r}, weights_only=True)['global_step'])")
    assert step.stdout.strip() == "2", step.stderr
