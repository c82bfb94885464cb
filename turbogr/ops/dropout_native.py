"""The C++ back end of `turbogr::dropout`: what `kernels/cpu/dropout.h` declares, called through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from turbogr.ops.native import Kernel, rows

KERNEL = Kernel("dropout")


class _Problem(ctypes.Structure):
    """`TurbogrDropout`."""

    _fields_ = [
        ("rows", c_int64),
        ("columns", c_int64),
        ("in", c_void_p),
        ("in_row", c_int64),
        ("out", c_void_p),
        ("out_row", c_int64),
        ("seed", c_uint64),
        ("threshold", c_uint64),
        ("scale", c_float),
        ("threads", c_int64),
    ]


def native_dropout(library: ctypes.CDLL, x: Tensor, threshold: int, scale: float, seed: int) -> Tensor:
    """float32 [N, D], contiguous, of float32 x [N, D]."""
    x = rows(x)
    out = x.new_empty(x.shape)
    run = library.turbogr_dropout
    run.argtypes, run.restype = [POINTER(_Problem)], None
    run(
        _Problem(
            *x.shape, x.data_ptr(), x.stride(0), out.data_ptr(), x.shape[1], seed, threshold, scale, torch.get_num_threads()
        )
    )
    return out
