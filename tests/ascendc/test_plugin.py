"""The plugin for NPUs, compiled as it is but for device_npu.cpp, on a device made of the host's memory.

The kernels run on the stand-in for AscendC, which throws for whatever they touch beyond the plugin's tensors. Renaming a device
is for a whole process: a child does it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ascendc.plugin.build import build

CHECKOUT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow  # compiles against PyTorch's headers


@pytest.fixture(scope="module")
def found():
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.ascendc.plugin.checks", str(build())]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


OPERATORS = ["jagged_hstu_attention", "jagged_fuxi_attention", "jagged_embedding_lookup", "negative_logits"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_equals_the_reference_with_all_gradients_by_kernels(found, operator, dtype):
    results = [x for x in found["parity"] if x["name"].partition(",")[0] == operator and x["dtype"] == dtype]
    assert len(results) > 1
    for result in results:
        assert result["share"] < result["tolerance"], result
        assert result["launches"] == result["kernels"], result


def test_what_no_kernel_computes_is_pytorchs(found):
    assert found["launches"] == {"auto": 1, "torch": 0, "float64": 0, "mask": 0, "no tokens": 0, "too wide": 0}
    assert found["in PyTorch"] < 1e-4


def test_rows_that_are_not_contiguous(found):
    assert found["strided"] < 1e-4
    assert found["negative control"] > 1e-2


def test_offsets_are_copied_to_the_host_once_and_again_when_they_change(found):
    assert found["offsets seen again"] == 0
    assert found["changed"] < 1e-4


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "falling",
            "ValueError: offsets rise from 0 to 75; got first 0, last 75, or a fall between",
        ),
        ("too short", "ValueError: offsets rise from 0 to 75; got first 0, last 3"),
        (
            "short table",
            "ValueError: position_bias has 10 entries, the longest sequence 75 tokens",
        ),
        ("cpp", "ConfigurationError: backend cpp computes float32 or bfloat16 on the CPU"),
        ("two devices", "RuntimeError: turbogr: jagged_hstu_attention_float: a tensor is on cpu, another one on npu:0"),
        ("shapes", "ValueError: q and k are [T, H, dqk] and v is [T, H, dv]; got q [75, 2, 8]"),
        ("rank", "ValueError: q and k are [T, H, dqk] and v is [T, H, dv]; got q [75, 8]"),
        ("no rank", "ValueError: q and k are [T, H, dqk] and v is [T, H, dv]; got q []"),
    ],
)
def test_what_is_wrong_is_told(found, what, message):
    assert found["said"][what].replace("turbogr::jagged_hstu_attention: ", "").startswith(message)


@pytest.mark.parametrize(
    ("what", "launches"),
    [
        ("out", 1),
        ("out, strided", 1),
        ("gradient of [True, False]", 2),
        ("gradient of [False, True]", 2),
        ("rows in half precision", 0),
    ],
)
def test_particular_rows(found, what, launches):
    assert found["rows"][what][0] < 1e-4
    assert found["rows"][what][1] == launches


def test_splits_that_fall_are_refused(found):
    assert found["rows"]["wrong splits"].startswith("ValueError: turbogr::jagged_embedding_lookup: splits rise from 0 to 30")


@pytest.mark.parametrize(
    ("what", "got"),
    [
        ("narrow ids", "Int [30] on npu:0"),
        ("ids elsewhere", "Long [30] on cpu"),
        ("ids of two dimensions", "Long [15, 2] on npu:0"),
    ],
)
def test_the_backward_of_a_look_up_refuses_ids_that_are_none(found, what, got):
    said = "ValueError: turbogr::jagged_embedding_lookup_backward: ids are int64 [N] on npu:0; got "
    assert found["rows"][what] == said + got
    assert found["rows"]["sound ids"] == "returned"
