"""Stands in for torch_npu: PyTorch's PrivateUse1 device renamed to "npu", once and for the whole process.

It computes nothing; it counts, and takes and keeps what it is told. To be imported by a process of its own.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types

import torch
from torch import distributed

COUNT = 4
told: list[str] = []


def install() -> None:
    """Makes `import torch_npu` and `torch.npu` work."""
    module = types.ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    sys.modules["torch_npu"] = module
    torch.utils.rename_privateuse1_backend("npu")
    npu = types.SimpleNamespace(
        set_device=lambda device: told.append(f"set_device {device}"),
        empty_cache=lambda: told.append("empty_cache"),
        device_count=lambda: COUNT,
        is_available=lambda: True,
        current_device=lambda: 0,
        memory_stats=lambda device: {"allocated_bytes.all.current": 7},
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    torch._register_device_module("npu", npu)
    distributed.Backend.default_device_backend_map["npu"] = "hccl"  # as torch_npu does
