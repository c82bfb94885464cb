"""Puts the plugin's libraries together for a device made of the host's memory; what was compiled is kept (../compile.py)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from tests.ascendc.compile import FLAGS, all_compiled, cache, compiler, compiler_version, launchers, linked
from tests.ascendc.plugin import gate
from turbogr.ops.npu_plugin import KERNELS, PLUGIN

HERE = Path(__file__).parent
DEVICE = "libturbogr_host_device.so"


def build() -> Path:
    """The folder with the three libraries, which stand side by side as the plugin expects it."""
    root = Path(torch.__file__).parent
    torch_flags = [word for x in ("include", "include/torch/csrc/api/include") for word in ("-isystem", str(root / x))]
    libraries = [f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    # What the plugin needs of the device is found when it is loaded.
    device, *of_kernels = all_compiled(
        [(HERE / "host_device.cpp", torch_flags), *((x, FLAGS) for x in [HERE / "platform.cpp", *launchers()])]
    )
    parts = {DEVICE: ([device], libraries), PLUGIN: (gate.objects(), libraries), KERNELS: (of_kernels, [])}
    made_of = [str(word) for part in parts.values() for words in part for word in words]
    everything = "\0".join([*compiler(), compiler_version(), *made_of])
    folder = cache() / f"plugin-{hashlib.sha256(everything.encode()).hexdigest()[:32]}"
    for name, (objects, needed) in parts.items():
        linked(name, objects, needed, folder)
    return folder
