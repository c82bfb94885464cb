"""The C++ back end of `turbogr::silu_split`: what `kernels/cpu/silu_split.h` declares, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_int64, c_void_p

import torch
from torch import Tensor

from turbogr.ops.native import Kernel, pointer, rows

KERNEL = Kernel("silu_split")


class _Part(ctypes.Structure):
    """`TurbogrPart`."""

    _fields_ = [("data", c_void_p), ("columns", c_int64), ("row", c_int64)]


class _Problem(ctypes.Structure):
    """`TurbogrSiluSplit`."""

    _fields_ = [
        ("rows", c_int64),
        ("packed", c_void_p),
        ("packed_row", c_int64),
        ("parts", POINTER(_Part)),
        ("count", c_int64),
        ("threads", c_int64),
    ]


def native_silu_split(library: ctypes.CDLL, packed: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """float32 [N, size] for each size, of float32 packed [N, sum of sizes]."""
    packed = rows(packed)
    parts = [packed.new_empty(packed.shape[0], size) for size in sizes]
    run = library.turbogr_silu_split_forward
    run.argtypes, run.restype = [POINTER(_Problem)], None
    run(_problem(packed, parts, sizes))
    return parts


def native_silu_split_backward(
    library: ctypes.CDLL, gradients: Sequence[Tensor | None], packed: Tensor, sizes: Sequence[int]
) -> Tensor:
    """Gradient of packed, float32 [N, sum of sizes], given those of the parts (None: zero)."""
    packed, strided = rows(packed), [None if g is None else rows(g) for g in gradients]
    out = packed.new_empty(packed.shape)
    run = library.turbogr_silu_split_backward
    run.argtypes, run.restype = [POINTER(_Problem), c_void_p], None
    run(_problem(packed, strided, sizes), out.data_ptr())
    return out


def _problem(packed: Tensor, parts: Sequence[Tensor | None], sizes: Sequence[int]) -> _Problem:
    described = (
        _Part(pointer(part), size, 0 if part is None else part.stride(0)) for part, size in zip(parts, sizes, strict=True)
    )
    return _Problem(
        packed.shape[0],
        packed.data_ptr(),
        packed.stride(0),
        (_Part * len(sizes))(*described),
        len(sizes),
        torch.get_num_threads(),
    )
