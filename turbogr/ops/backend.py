"""The option `backend` of operators that have a C++ kernel."""

from __future__ import annotations

import ctypes
from typing import Literal, get_args

import torch
from torch import Tensor

from turbogr.errors import ConfigurationError, MissingDependencyError
from turbogr.ops.native import Kernel

Backend = Literal["auto", "cpp", "torch", "reference"]
"""`auto`: the C++ kernel where it serves the tensors' dtype and device and can be compiled and loaded, else PyTorch; `cpp`: the
kernel or an error; `torch`: PyTorch; `reference`: the plain float64 formula, slow, for comparisons."""


def check_backend(owner: str, backend: str) -> None:
    """Raises ConfigurationError, which names `owner`, if `backend` is none of the above."""
    if backend not in get_args(Backend):
        raise ConfigurationError(f"{owner}: backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")


def kernel_for(
    kernel: Kernel, operator: str, backend: str, like: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> ctypes.CDLL | None:
    """The library that computes this call, or None for PyTorch.

    Args:
        kernel: the operator's kernel; whether it can be used is found out at the first call of the process.
        operator: name for messages.
        backend: `auto`, `cpp` or `torch`.
        like: one of the inputs, whose dtype and device decide.
        dtypes: what the kernel computes.

    Raises:
        ConfigurationError: if `cpp` is asked for tensors that are not on the CPU or of none of `dtypes`.
        MissingDependencyError: if `cpp` is asked for and cannot be had.
    """
    if backend == "torch":
        return None
    suits = like.dtype in dtypes and like.device.type == "cpu"
    if suits:
        library = kernel.library()
        if library is None and backend == "cpp":
            raise MissingDependencyError(f"{operator}: backend cpp cannot be used: {kernel.failure()}")
        return library
    if backend == "cpp":
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ConfigurationError(
            f"{operator}: backend cpp computes {known} on the CPU, got {like.dtype} on {like.device}; "
            "backend auto takes PyTorch for those"
        )
    return None
