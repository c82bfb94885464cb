"""The C++ back end of `turbogr::l2_normalise`: what `kernels/cpu/l2_normalise.h` declares, called through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from turbogr.ops.native import Kernel, rows

KERNEL = Kernel("l2_normalise")


class _Problem(ctypes.Structure):
    """`TurbogrL2Normalise`."""

    _fields_ = [
        ("rows", c_int64),
        ("columns", c_int64),
        ("x", c_void_p),
        ("x_row", c_int64),
        ("eps", c_float),
        ("threads", c_int64),
    ]


def native_normalise(library: ctypes.CDLL, x: Tensor, eps: float) -> Tensor:
    """float32 [N, D], contiguous, of float32 x [N, D]."""
    x = rows(x)
    out = x.new_empty(x.shape)
    run = library.turbogr_l2_normalise_forward
    run.argtypes, run.restype = [POINTER(_Problem), c_void_p], None
    run(_problem(x, eps), out.data_ptr())
    return out


def native_normalise_backward(library: ctypes.CDLL, gradient: Tensor, x: Tensor, eps: float) -> Tensor:
    """Gradient of x, given that of the output."""
    x, gradient = rows(x), rows(gradient)
    out = x.new_empty(x.shape)
    run = library.turbogr_l2_normalise_backward
    run.argtypes, run.restype = [POINTER(_Problem), c_void_p, c_int64, c_void_p], None
    run(_problem(x, eps), gradient.data_ptr(), gradient.stride(0), out.data_ptr())
    return out


def _problem(x: Tensor, eps: float) -> _Problem:
    return _Problem(*x.shape, x.data_ptr(), x.stride(0), eps, torch.get_num_threads())
