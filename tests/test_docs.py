"""The examples of docs/kernels.md are written to files and run: an operator and a mask of a user's own, and its recipe."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.data.make import write_prepared
from tests.ops.jagged_cases import offsets_of
from turbogr.cli import main
from turbogr.ops.hstu_attention import jagged_hstu_attention

CHECKOUT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(?:python|cpp|yaml)\n(?:#|//) (\S+)\n.*?^```$", re.MULTILINE | re.DOTALL)
LENGTHS = [3, 0, 1, 64, 2]


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """A folder with the example files, on the path of modules, and the kernels' cache in another."""
    folder = tmp_path_factory.mktemp("examples")
    text = (CHECKOUT / "docs" / "kernels.md").read_text()
    for found in BLOCK.finditer(text):
        file = folder / found[1]
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(found[0].splitlines()[1:-1]) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield folder
    for name in [name for name in sys.modules if name.startswith(("my_operators", "my_masks"))]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def operator(examples):
    """The module of the documented operator."""
    return importlib.import_module("my_operators.jagged_mean")


def test_all_files_of_the_examples_are_there(examples):
    files = {str(file.relative_to(examples)) for file in examples.rglob("*") if file.suffix in (".py", ".cpp", ".yaml")}
    assert files == {
        "my_operators/__init__.py",
        "my_operators/jagged_mean.py",
        "my_operators/jagged_mean.cpp",
        "my_masks.py",
        "windowed.yaml",
    }


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("lengths", [LENGTHS, [], [0, 0], [1]])
def test_own_operator_agrees_with_its_reference(operator, backend, lengths):
    if backend == "cpp" and shutil.which("g++") is None:
        pytest.skip("no g++ on the path")
    offsets, results = offsets_of(lengths), []
    x = torch.randn(sum(lengths), 7).t().contiguous().t().requires_grad_()  # rows that are not contiguous
    for chosen in (backend, "reference"):
        out = operator.jagged_mean(x, offsets, backend=chosen)
        results.append((out, *torch.autograd.grad((out * torch.arange(7)).sum(), x)))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_own_operator_fits_in_with_pytorch(operator):
    x, offsets = torch.randn(sum(LENGTHS), 5, requires_grad=True), offsets_of(LENGTHS)
    for backend in ("auto", "torch"):
        torch.library.opcheck(torch.ops.mine.jagged_mean, (x, offsets, backend))
    wide = x.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: operator.jagged_mean(x, offsets, backend="torch"), wide)
    with pytest.raises(ValueError, match="mine::jagged_mean: offsets"):
        operator.jagged_mean(x, offsets + 1)


def turbogr(*args, path, cwd, **environment):
    """A command in a process of its own, with these folders on the path of modules."""
    return subprocess.run(
        [sys.executable, "-m", "turbogr", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, CHECKOUT])), **environment},
        check=False,
        cwd=cwd,
    )


@pytest.mark.parametrize("compiler", ["g++", "no-such-compiler"])
def test_the_doctor_shows_the_own_operator(examples, compiler):
    if compiler == "g++" and shutil.which(compiler) is None:
        pytest.skip("no g++ on the path")
    run = turbogr("doctor", "--compile", "--import", "my_operators", path=[examples], cwd="/", COLUMNS="300", CXX=compiler)
    assert run.returncode == 0, run.stdout + run.stderr
    line = next(line for line in run.stdout.splitlines() if "mine::jagged_mean" in line)
    assert ("compiled with" if compiler == "g++" else "CXX names no-such-compiler") in line


@pytest.mark.usefixtures("examples")
def test_own_mask_is_found_by_its_import_path():
    torch.manual_seed(0)
    offsets = offsets_of([150, 3])
    q, k, v = (torch.randn(153, 2, 8, requires_grad=True) for _ in range(3))
    windowed, reference, causal = (
        jagged_hstu_attention(q, k, v, offsets, scale=0.1, mask=mask, backend=backend)
        for mask, backend in (("my_masks.window", "auto"), ("my_masks.window", "reference"), ("causal", "auto"))
    )
    torch.testing.assert_close(windowed, reference)
    torch.testing.assert_close(windowed[:100], causal[:100])
    assert not torch.allclose(windowed[100:150], causal[100:150]), "negative control: the mask forbids something"


def test_a_recipe_names_the_own_mask(examples, tmp_path, monkeypatch):
    prepared = write_prepared(tmp_path / "prepared", num_users=12, num_items=210, min_len=115, max_len=130)
    fit = ["fit", "-c", "movielens-100k/sasrec.yaml", f"--data.path={prepared}", "--trainer.accelerator=cpu"]
    fit += ["--data.num_workers=0", "--data.batch_size=4", "--trainer.max_epochs=1"]
    windowed = ["-c", str(examples / "windowed.yaml"), "--trainer.default_root_dir=windowed"]
    run = turbogr(*fit, *windowed, path=[examples], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    main([*fit, "--trainer.default_root_dir=causal"])
    causal, masked = (
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True) for name in ("causal", "windowed")
    )
    assert "mask: my_masks.window" in masked["turbogr_config"]
    query = "backbone.blocks.0.query.weight"
    difference = (causal["state_dict"][query] - masked["state_dict"][query]).abs().max()
    assert difference > 1e-5, "the mask has been at work"
