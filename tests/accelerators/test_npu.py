"""NPUAccelerator beside a stand-in for torch_npu, and without it. Renaming a device is for a whole process: children do it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest

from turbogr.accelerators import NPUAccelerator
from turbogr.errors import MissingDependencyError

CHECKOUT = Path(__file__).resolve().parents[2]


def child(*arguments: str, first: Path | None = None) -> subprocess.CompletedProcess:
    path = os.pathsep.join(str(p) for p in (first, CHECKOUT) if p is not None)
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def found():
    run = child("-m", "tests.accelerators.npu_checks")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_name_and_devices(found):
    assert found["registered"]
    assert found["available"]
    assert found["count"] == 4
    assert found["parallel"] == ["npu:0", "npu:1"]
    assert found["root"] == "npu:0"
    assert found["stats"] == {"allocated_bytes.all.current": 7}
    assert found["told"][-1] == "empty_cache", "teardown gives memory back"


def test_the_plugin_is_looked_for_when_the_device_is_set_up(found):
    told = found["told"]
    assert told[told.index("set_device npu:0") + 1] == "plugin"
    assert told.count("plugin") == sum(x.startswith("set_device") for x in told)


def test_process_groups_use_hccl_unless_told_otherwise(found):
    assert found["backend"] == "hccl"
    assert found["own backend"] == "gloo"


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        ("2", [0, 1]),
        ("'2'", [0, 1]),
        ("-1", [0, 1, 2, 3]),
        ("'-1'", [0, 1, 2, 3]),
        ("[1, 3]", [1, 3]),
        ("'1,3'", [1, 3]),
    ],
)
def test_devices_that_are_there(found, asked, numbers):
    assert found["devices"][asked] == str(numbers)


@pytest.mark.parametrize("asked", ["5", "[4]", "[1, 1]", "-2"])
def test_devices_that_are_not_there_are_refused(found, asked):
    assert found["devices"][asked] == f"ConfigurationError: devices: {asked} asks for NPUs that are not there; 4 are visible"


def test_devices_that_are_no_numbers_are_refused(found):
    assert found["devices"]["'two'"] == "ConfigurationError: devices: 'two' names no NPUs; give a number, or a list such as 0,1"


def test_trap_strategy_auto_on_one_device_is_refused_and_no_cpu_trains(found):
    assert found["auto"].startswith("ConfigurationError: accelerator npu: the strategy would train on cpu")
    assert "set trainer.strategy to turbogr" in found["auto"]
    assert found["turbogr on one"] == "npu:0"
    assert found["single"] == "None"
    assert "set_device npu:0" in found["told"]


def test_trap_mixed_precision_casts_on_the_npu(found):
    assert found["before setup"] == "cuda", "what Lightning chooses"
    assert found["bf16-mixed"] == found["bf16-mixed single"] == "npu"
    assert found["autocast"] == "True"
    assert found["32-true"] == "none"
    assert "set trainer.precision to bf16-mixed or 32-true" in found["16-mixed"]


def test_trap_no_cuda_stream_is_opened(found):
    assert found["wrap"] == "DistributedDataParallel"
    assert found["wrap by Lightning"] != "DistributedDataParallel", "negative control"
    for refused in ("ddp", "auto of two"):
        assert found[refused].startswith("ConfigurationError: accelerator npu: Lightning's DDP opens a CUDA stream")
        assert "set trainer.strategy to turbogr" in found[refused]


def test_without_torch_npu_it_says_what_to_install():
    with pytest.raises(MissingDependencyError, match=r"torch_npu, which is not installed: pip install 'turbogr\[npu\]'"):
        pl.Trainer(accelerator="npu", devices=2)
    assert not NPUAccelerator.is_available()
    trainer = pl.Trainer(accelerator="auto", logger=False, enable_checkpointing=False)
    assert not isinstance(trainer.accelerator, NPUAccelerator)


@pytest.mark.parametrize(
    "body",
    [
        "raise ImportError('libhccl.so: cannot open')",
        "raise OSError('libhccl.so: cannot open')",
        "raise RuntimeError('libhccl.so')",
    ],
)
def test_torch_npu_that_cannot_be_loaded_is_told_with_its_reason(tmp_path, body):
    (tmp_path / "torch_npu.py").write_text(body)
    program = "from turbogr.accelerators import NPUAccelerator; print(NPUAccelerator.is_available()); NPUAccelerator()"
    run = child("-c", program, first=tmp_path)
    assert run.stdout.strip() == "False"
    last = run.stderr.strip().splitlines()[-1]
    assert "turbogr.errors.MissingDependencyError: accelerator npu needs torch_npu, which cannot be loaded (libhccl.so" in last
    assert "set_env.sh" in last
