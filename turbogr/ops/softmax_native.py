"""The C++ back end of `turbogr::jagged_softmax_attention`: what `kernels/cpu/softmax_attention.h` declares, through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from turbogr.ops.native import Kernel, check, pointer, rows

KERNEL = Kernel("softmax_attention")
OPERATOR = "turbogr::jagged_softmax_attention"


class _Problem(ctypes.Structure):
    """`TurbogrSoftmax`."""

    _fields_ = [
        *((name, c_int64) for name in ("sequences", "heads", "qk_width", "v_width")),
        *((name, c_void_p) for name in ("offsets", "q", "k", "v")),
        *((f"{name}_{axis}", c_int64) for name in "qkv" for axis in ("row", "head")),
        ("scale", c_float),
        ("threads", c_int64),
    ]


class _Result(ctypes.Structure):
    """`TurbogrSoftmaxResult`."""

    _fields_ = [("out", c_void_p), ("out_row", c_int64), ("out_head", c_int64), ("log_sums", c_void_p)]


class _Gradients(ctypes.Structure):
    """`TurbogrSoftmaxGradients`."""

    _fields_ = [
        *((name, c_void_p) for name in ("out", "log_sums", "incoming")),
        *((f"{name}_{axis}", c_int64) for name in ("out", "incoming") for axis in ("row", "head")),
        *((name, c_void_p) for name in "qkv"),
        *((f"{name}_{axis}", c_int64) for name in "qkv" for axis in ("row", "head")),
    ]


class SoftmaxKernel:
    """One call's inputs, in the form that the kernel reads; they stay alive as long as this object.

    Args are those of the operator, float32 and on the CPU.
    """

    def __init__(self, library: ctypes.CDLL, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, scale: float) -> None:
        self.library = library
        self.inputs = (q, k, v)
        self.kept = [offsets.contiguous(), *(rows(x) for x in (q, k, v))]
        self.problem = _Problem(
            offsets.numel() - 1,
            *q.shape[1:],
            v.shape[2],
            *(pointer(x) for x in self.kept),
            *(stride for x in self.kept[1:] for stride in x.stride()[:2]),
            scale,
            torch.get_num_threads(),
        )

    def forward(self) -> tuple[Tensor, Tensor]:
        """float32 [T, H, dv], and the log of each row's sum of exponentials [T, H]."""
        v = self.inputs[2]
        out, log_sums = v.new_empty(v.shape), v.new_empty(v.shape[:2])
        run = self.library.turbogr_softmax_forward
        run.argtypes, run.restype = [POINTER(_Problem), POINTER(_Result)], c_int
        check(run(self.problem, _Result(pointer(out), *out.stride()[:2], pointer(log_sums))), OPERATOR)
        return out, log_sums

    def backward(self, gradient: Tensor, out: Tensor, log_sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, given what forward returned and the gradient of the output [T, H, dv]."""
        gradient, out, log_sums = rows(gradient), rows(out), log_sums.contiguous()
        grad_q, grad_k, grad_v = grads = [x.new_empty(x.shape) for x in self.inputs]
        gradients = _Gradients(
            *(pointer(x) for x in (out, log_sums, gradient)),
            *(stride for x in (out, gradient) for stride in x.stride()[:2]),
            *(pointer(x) for x in grads),
            *(stride for x in grads for stride in x.stride()[:2]),
        )
        run = self.library.turbogr_softmax_backward
        run.argtypes, run.restype = [POINTER(_Problem), POINTER(_Gradients)], c_int
        check(run(self.problem, gradients), OPERATOR)
        return grad_q, grad_k, grad_v
