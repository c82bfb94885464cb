"""docs/npu.md and the kernels' READMEs: what they name is there, and what they count is what the operators' READMEs say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from turbogr import cann, npu_build
from turbogr.ops import npu_plugin

CHECKOUT = Path(__file__).resolve().parents[1]
PAGE = (CHECKOUT / "docs" / "npu.md").read_text()
ASCENDC = CHECKOUT / "kernels" / "ascendc"


def rows_of(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_files_that_are_named_exist():
    named = set(re.findall(r"`((?:tests|turbogr|kernels)/[\w/.*]+)`", PAGE))
    assert len(named) > 10
    missing = [name for name in named if not list(CHECKOUT.glob(name.rstrip("/")))]
    assert not missing


def test_commands_exist():
    targets = set(re.findall(r"make (npu-[\w-]+)", PAGE))
    assert targets == {"npu-plugin", "npu-kernels", "npu-cpu-twin"}
    makefile = (CHECKOUT / "Makefile").read_text()
    for target in targets:
        assert f"\n{target}:" in makefile
    for option in set(re.findall(r"npu_build (--[\w-]+)", PAGE)) | {"--architecture", "--again"}:
        assert f'"{option}"' in Path(npu_build.__file__).read_text()
    assert (CHECKOUT / "tests" / "ascendc" / "on_device.py").is_file()


def test_releases_and_variables_are_those_of_the_code():
    assert f"torch-npu=={npu_plugin.TORCH_NPU}" in PAGE
    assert f"CANN >= {cann.OLDEST}" in PAGE
    assert npu_build.ARCHITECTURE in PAGE
    for variable in cann.VARIABLES:
        assert variable in PAGE
    extra = (CHECKOUT / "pyproject.toml").read_text()
    assert f"torch-npu=={npu_plugin.TORCH_NPU.rpartition('.')[0]}.*" in extra


def test_counted_numbers_are_those_of_the_operators():
    operator, checked = "", 0
    table = PAGE.split("### Counted on the stand-in")[1].split("## What only hardware can prove")[0]
    for name, *cells in rows_of(table)[2:]:
        operator = name or operator
        assert cells in rows_of((ASCENDC / operator / "README.md").read_text()), (operator, cells)
        checked += 1
    assert operator == "negative_logits"
    assert checked > 10


@pytest.mark.parametrize("operator", sorted(x.parent.name for x in ASCENDC.glob("*/op_host")))
def test_every_kernel_is_launched_and_registered_with_all_dtypes(operator):
    registered = "".join(x.read_text() for x in (CHECKOUT / "kernels" / "torch_npu_plugin").glob("*.cpp"))
    for direction in ("", "_backward"):
        kernel = (ASCENDC / operator / "op_kernel" / f"{operator}{direction}.cpp").read_text()
        launched = (ASCENDC / "launch" / f"{operator}{direction}.cpp").read_text()
        for dtype in ("float", "half", "bfloat16"):
            assert f"({operator}{direction}_{dtype}, " in kernel
            assert f"({operator}{direction}_{dtype}, " in launched
        assert f'"turbogr::{operator}{direction}"' in registered
