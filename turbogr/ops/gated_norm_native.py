"""The C++ back end of `turbogr::gated_norm`: what `kernels/cpu/gated_norm.h` declares, called through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from turbogr.ops.native import Kernel, pointer, rows

KERNEL = Kernel("gated_norm")


class _Problem(ctypes.Structure):
    """`TurbogrGatedNorm`."""

    _fields_ = [
        ("rows", c_int64),
        ("columns", c_int64),
        *((name, kind) for tensor in ("gate", "x") for name, kind in ((tensor, c_void_p), (f"{tensor}_row", c_int64))),
        ("centre", c_int64),
        ("eps", c_float),
        ("seed", c_uint64),
        ("threshold", c_uint64),
        ("scale", c_float),
        ("threads", c_int64),
    ]


class GatedNormKernel:
    """One call's inputs, float32 [N, D] on the CPU, in the form that the kernel reads; they stay alive as long as this object.

    Args:
        library: the loaded kernel.
        gate: float32 [N, D], or None.
        x: float32 [N, D].
        centre: whether the norm subtracts the mean.
        eps: added to the variance.
        seed: of the mask.
        threshold: least bits of an element that is kept; 0 keeps all.
        scale: factor on what is kept.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        gate: Tensor | None,
        x: Tensor,
        centre: bool,
        eps: float,
        seed: int,
        threshold: int,
        scale: float,
    ) -> None:
        self.library = library
        self.gate, self.x = None if gate is None else rows(gate), rows(x)
        self.problem = _Problem(
            *x.shape,
            pointer(self.gate),
            0 if self.gate is None else self.gate.stride(0),
            self.x.data_ptr(),
            self.x.stride(0),
            centre,
            eps,
            seed,
            threshold,
            scale,
            torch.get_num_threads(),
        )

    def forward(self) -> Tensor:
        """float32 [N, D]."""
        out = self.x.new_empty(self.x.shape)
        run = self.library.turbogr_gated_norm_forward
        run.argtypes, run.restype = [POINTER(_Problem), c_void_p], None
        run(self.problem, out.data_ptr())
        return out

    def backward(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of gate (empty where there is none) and x, given that of the output."""
        gradient = rows(gradient)
        grad_x = self.x.new_empty(self.x.shape)
        grad_gate = self.x.new_empty(0 if self.gate is None else self.x.shape)
        run = self.library.turbogr_gated_norm_backward
        run.argtypes, run.restype = [POINTER(_Problem), c_void_p, c_int64, c_void_p, c_void_p], None
        run(
            self.problem,
            gradient.data_ptr(),
            gradient.stride(0),
            None if self.gate is None else grad_gate.data_ptr(),
            grad_x.data_ptr(),
        )
        return grad_gate, grad_x
