"""Compiles the device, the plugin without its file for torch_npu, and the kernels' library; kept like drivers (../build.py)."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
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
    ascendc, plugin = kernels_dir() / "ascendc", kernels_dir() / "torch_npu_plugin"
    kernel_flags = [*STAND_IN_FLAGS, f"-I{HERE}", f"-I{HOST}", f"-I{ascendc}"]
    of_plugin = [x for x in sorted(plugin.glob("*.cpp")) if x.name != "device_npu.cpp"]
    of_kernels = [*sorted((ascendc / "launch").glob("*.cpp")), HERE / "platform.cpp"]
    # Sources, folders of what these include, flags, libraries. What the plugin needs of the device is found when it is loaded.
    parts = {
        DEVICE: ([HERE / "host_device.cpp"], [plugin], torch_flags, linked),
        PLUGIN: (of_plugin, [plugin, ascendc], torch_flags, linked),
        KERNELS: (of_kernels, [HERE, HOST, ascendc], kernel_flags, []),
    }
    command = [*compiler(), *FLAGS]
    jobs = [
        (name, [*command, *flags, "-c", str(source)], _object(source, folders, [*command, *flags]))
        for name, (sources, folders, flags, _) in parts.items()
        for source in sources
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda job: _make(job[1], job[2]), jobs))
    everything = hashlib.sha256("".join(str(file) for *_, file in jobs).encode()).hexdigest()[:32]
    folder = cache_dir().parent / "ascendc_host" / f"plugin-{everything}"
    for name, (*_, libraries) in parts.items():
        objects = [str(file) for part, _, file in jobs if part == name]
        _make([*command, "-shared", *objects, *libraries], folder / name)
    return folder


def _object(source: Path, folders: Sequence[Path], command: Sequence[str]) -> Path:
    """Where the compiled source is kept, named by all that goes into it."""
    digest = hashlib.sha256("\0".join([*command, torch.__version__]).encode())
    # A launcher includes its operator's kernels, which are .cpp files.
    headers = [x for folder in folders for x in sorted(folder.rglob("*")) if x.suffix == ".h" or x.parent.name == "op_kernel"]
    for file in [source, *headers]:
        digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return cache_dir().parent / "ascendc_host" / "objects" / f"{source.stem}-{digest.hexdigest()[:32]}.o"


def _make(command: list[str], output: Path) -> None:
    if not output.is_file():
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=".building-") as building:
            made = Path(building) / output.name
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{output.name} cannot be made:\n{done.stderr[-6000:]}"
            made.replace(output)
