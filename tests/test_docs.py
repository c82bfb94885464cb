"""The examples of docs/kernels.md are written to files and run: an operator and a mask of a user's own."""

from __future__ import annotations

import importlib
import shutil
import sys
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.documented import turbogr, write_examples
from tests.ops.jagged_cases import offsets_of
from turbogr.ops.hstu_attention import jagged_hstu_attention

LENGTHS = [3, 0, 1, 64, 2]


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """A folder with the example files, on the path of modules, and the kernels' cache in another."""
    folder = tmp_path_factory.mktemp("examples")
    write_examples("kernels.md", folder)
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
        compiled = torch.compile(partial(operator.jagged_mean, backend=backend), fullgraph=True, backend="eager")
        assert torch.equal(compiled(x, offsets), operator.jagged_mean(x, offsets, backend=backend))
    wide = x.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: operator.jagged_mean(x, offsets, backend="torch"), wide)
    with pytest.raises(ValueError, match="mine::jagged_mean: offsets"):
        operator.jagged_mean(x, offsets + 1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert operator.jagged_mean(torch.randn(sum(LENGTHS), 5), offsets.new_empty(len(LENGTHS) + 1)).shape == (
            len(LENGTHS),
            5,
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
