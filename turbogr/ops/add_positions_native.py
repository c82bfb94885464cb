"""The C++ back end of `turbogr::jagged_add_positions`: what `kernels/cpu/add_positions.h` declares, called through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from turbogr.ops.native import Kernel, rows

KERNEL = Kernel("add_positions")


class _Problem(ctypes.Structure):
    """`TurbogrAddPositions`."""

    _fields_ = [
        ("sequences", c_int64),
        ("width", c_int64),
        ("offsets", c_void_p),
        ("scale", c_float),
        ("seed", c_uint64),
        ("threshold", c_uint64),
        ("kept_scale", c_float),
        ("threads", c_int64),
    ]


class AddPositionsKernel:
    """One call's options, in the form that the kernel reads; offsets stay alive as long as this object.

    Args:
        library: the loaded kernel.
        offsets: int64 [B + 1].
        width: D.
        scale: factor on the tokens.
        seed: of the mask.
        threshold: least bits of an element that is kept; 0 keeps all.
        kept_scale: factor on what is kept.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        offsets: Tensor,
        width: int,
        scale: float,
        seed: int,
        threshold: int,
        kept_scale: float,
    ) -> None:
        self.library, self.offsets = library, offsets.contiguous()
        mask = (seed, threshold, kept_scale)
        pointer = self.offsets.data_ptr()
        self.problem = _Problem(offsets.numel() - 1, width, pointer, scale, *mask, torch.get_num_threads())

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """float32 [T, D] of float32 x [T, D] and table [P, D]."""
        x, table = rows(x), rows(table)
        out = x.new_empty(x.shape)
        run = self.library.turbogr_add_positions_forward
        run.argtypes, run.restype = [POINTER(_Problem), c_void_p, c_int64, c_void_p, c_int64, c_void_p], None
        run(self.problem, x.data_ptr(), x.stride(0), table.data_ptr(), table.stride(0), out.data_ptr())
        return out

    def backward(self, gradient: Tensor, positions: int) -> tuple[Tensor, Tensor]:
        """Gradients of x [T, D] and of the table [positions, D], given that of the output."""
        gradient = rows(gradient)
        grad_x, grad_table = gradient.new_empty(gradient.shape), gradient.new_empty(positions, gradient.shape[1])
        run = self.library.turbogr_add_positions_backward
        run.argtypes, run.restype = [POINTER(_Problem), c_void_p, c_int64, c_int64, c_void_p, c_void_p], None
        run(self.problem, gradient.data_ptr(), gradient.stride(0), positions, grad_x.data_ptr(), grad_table.data_ptr())
        return grad_x, grad_table
