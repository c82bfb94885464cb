"""Imports packages one after the other and says so: the child process of `turbogr doctor`.

It holds no try block on purpose. A package whose import raises, aborts or kills the process ends the child, and the last line
that it printed names the culprit; the parent goes on with a new child for the rest.
"""

import ctypes
import importlib
import json
import sys
from dataclasses import asdict
from typing import Any

ACCELERATORS = "@accelerators"
OPERATORS = "@operators"
NPU_PLUGIN = "@npu-plugin"


def accelerators() -> list[str]:
    """The accelerators that torch can use here, in words."""
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(f"cuda:{index} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        found.append("mps")
    npu = getattr(torch, "npu", None)
    found.extend(f"npu:{index}" for index in range(npu.device_count() if npu is not None else 0))
    return found


def operators() -> list[dict[str, str]]:
    """Name, back end and reason of every operator; what is compiled at first use is compiled now."""
    from turbogr.ops.registry import describe

    return [asdict(info) for info in describe(load=True)]


def npu_plugin() -> str:
    """The plugin for NPUs, loaded with its kernels."""
    from turbogr.ops.npu_plugin import libraries, load

    importlib.import_module("torch_npu")
    ctypes.CDLL(str(libraries().kernels))
    return str(load())


def main(names: list[str]) -> None:
    """Prints a JSON object a line: {"start": name}, then {"done": name, "answer": ...} if that did not end the process.

    Args:
        names: importable modules, ACCELERATORS, OPERATORS or NPU_PLUGIN.
    """
    for name in names:
        print(json.dumps({"start": name}), flush=True)
        answer: Any = None
        if name == ACCELERATORS:
            answer = accelerators()
        elif name == OPERATORS:
            answer = operators()
        elif name == NPU_PLUGIN:
            answer = npu_plugin()
        else:
            importlib.import_module(name)
        print(json.dumps({"done": name, "answer": answer}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
