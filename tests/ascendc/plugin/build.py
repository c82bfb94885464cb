"""Compiles the device, the plugin without its file for torch_npu, and the kernels' library; kept like drivers (../build.py)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.ascendc.build import HOST, compiler
from turbogr.ops.npu_plugin import KERNELS, PLUGIN
from turbogr.ops.toolchain import cache_dir
from turbogr.resources import kernels_dir

HERE = Path(__file__).parent
DEVICE = "libturbogr_host_device.so"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-pthread", "-Wall", "-Wextra")
STAND_IN_FLAGS = ("-fno-gnu-unique", "-ffp-contract=off")


def build() -> Path:
    """The folder with the three libraries, which stand side by side as the plugin expects it."""
    root = Path(torch.__file__).parent
    torch_flags = [word for x in ("include", "include/torch/csrc/api/include") for word in ("-isystem", str(root / x))]
    linked = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    kernel_flags = [*STAND_IN_FLAGS, f"-I{HERE}", f"-I{HOST}", f"-I{kernels_dir() / 'ascendc'}"]
    plugin, launch = kernels_dir() / "torch_npu_plugin", kernels_dir() / "ascendc" / "launch"
    parts = {
        DEVICE: ([HERE / "host_device.cpp"], torch_flags, linked),
        # What it needs of the device is found when it is loaded.
        PLUGIN: ([x for x in sorted(plugin.glob("*.cpp")) if x.name != "device_npu.cpp"], torch_flags, linked),
        KERNELS: ([*sorted(launch.glob("*.cpp")), HERE / "platform.cpp"], kernel_flags, []),
    }
    command = [*compiler(), *FLAGS]
    folder = cache_dir().parent / "ascendc_host" / f"plugin-{_digest(command)}"
    if all((folder / name).is_file() for name in parts):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as building:
        jobs = [(name, source, flags) for name, (sources, flags, _) in parts.items() for source in sources]

        def compile_one(job: tuple[str, Path, list[str]]) -> str:
            name, source, flags = job
            compiled = Path(building) / f"{name}-{source.stem}.o"
            _run([*command, *flags, "-c", str(source), "-o", str(compiled)])
            return str(compiled)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            compiled = list(pool.map(compile_one, jobs))
        for name, (_, _, libraries) in parts.items():
            objects = [file for file, job in zip(compiled, jobs, strict=True) if job[0] == name]
            _run([*command, "-shared", *objects, *libraries, "-o", str(Path(building) / name)])
            (Path(building) / name).replace(folder / name)
    return folder


def _digest(command: list[str]) -> str:
    digest = hashlib.sha256("\0".join([*command, torch.__version__]).encode())
    for root in (HERE, HOST, kernels_dir() / "ascendc", kernels_dir() / "torch_npu_plugin"):
        for file in sorted(root.rglob("*")):
            if file.suffix in (".h", ".cpp"):
                digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[-1]} cannot be made:\n{done.stderr[-6000:]}"
