"""The C++ back end of `turbogr::jagged_fuxi_attention`: what `kernels/cpu/fuxi_attention.h` declares, called through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from turbogr.ops.fuxi_torch import OPERATOR
from turbogr.ops.hstu_native import BiasInputs
from turbogr.ops.native import Kernel, check, pointer, rows
from turbogr.ops.relative_attention import AttentionInputs, Gradients
from turbogr.ops.time_buckets import bucket_thresholds

KERNEL = Kernel("fuxi_attention")


class _Problem(ctypes.Structure):
    """`TurbogrFuxi`."""

    _fields_ = [
        *((name, c_int64) for name in ("sequences", "heads", "qk_width", "v_width")),
        *((name, c_void_p) for name in ("offsets", "q", "k", "v")),
        *((f"{name}_{axis}", c_int64) for name in "qkv" for axis in ("row", "head")),
        ("bias", BiasInputs),
        ("time_function", c_void_p),
        *((name, c_float) for name in ("scale", "alpha")),
        ("threads", c_int64),
    ]


class _Gradients(ctypes.Structure):
    """`TurbogrFuxiGradients`."""

    _fields_ = [
        ("out", c_void_p),
        *((f"out_{axis}", c_int64) for axis in ("row", "head")),
        *((name, c_void_p) for name in "qkv"),
        *((f"{name}_{axis}", c_int64) for name in "qkv" for axis in ("row", "head")),
        ("position_bias", c_void_p),
        ("position_count", c_int64),
        ("time_bias", c_void_p),
        ("time_function", c_void_p),
    ]


class FuXiKernel:
    """One call's inputs, in the form that the kernel reads; they stay alive as long as this object.

    Args are those of the operator, float32 (table and numbers: any float dtype) and on the CPU.
    """

    def __init__(self, library: ctypes.CDLL, inputs: AttentionInputs, functional: bool) -> None:
        q, k, v, offsets, position_bias, time_parameters, query_times, key_times, scale, alpha, time_unit, time_divisor = inputs
        self.library, self.functional = library, functional
        self.inputs = (q, k, v)
        self.position_bias, self.time_parameters = position_bias, time_parameters
        self.q, self.k, self.v = (rows(x) for x in (q, k, v))
        table = None if functional or time_parameters is None else time_parameters.float().contiguous()
        function = time_parameters.double().contiguous() if functional and time_parameters is not None else None
        position = None if position_bias is None else position_bias.float().contiguous()
        thresholds = None if table is None else bucket_thresholds(table.numel(), time_unit, time_divisor)
        times = [None if x is None else x.contiguous() for x in (query_times, key_times)]
        self.kept = (offsets.contiguous(), position, table, thresholds, *times, function)
        start, *of_bias, numbers = (pointer(x) for x in self.kept)
        self.problem = _Problem(
            offsets.numel() - 1,
            *q.shape[1:],
            v.shape[2],
            start,
            *(pointer(x) for x in (self.q, self.k, self.v)),
            *(stride for x in (self.q, self.k, self.v) for stride in x.stride()[:2]),
            BiasInputs(*of_bias[:2], 0 if table is None else table.numel(), *of_bias[2:], time_unit, time_divisor),
            numbers,
            scale,
            alpha,
            torch.get_num_threads(),
        )

    def forward(self) -> Tensor:
        """float32 [T, H, 3 dv]."""
        tokens, heads, width = self.v.shape
        out = self.v.new_empty(tokens, heads, 3 * width)
        run = self.library.turbogr_fuxi_forward
        run.argtypes, run.restype = [POINTER(_Problem), c_void_p, c_int64, c_int64], c_int
        check(run(self.problem, out.data_ptr(), *out.stride()[:2]), OPERATOR)
        return out

    def backward(self, gradient: Tensor) -> Gradients:
        """Gradients of q, k, v, position table and time parameters (empty where there are none), given the output's."""
        gradient = rows(gradient)
        grad_q, grad_k, grad_v = grads = [x.new_empty(x.shape) for x in self.inputs]
        position, time = (self.q.new_empty(0 if x is None else x.numel()) for x in (self.position_bias, self.time_parameters))
        if self.functional:
            time = time.double()
        run = self.library.turbogr_fuxi_backward
        run.argtypes, run.restype = [POINTER(_Problem), POINTER(_Gradients)], c_int
        gradients = _Gradients(
            pointer(gradient),
            *gradient.stride()[:2],
            *(pointer(x) for x in grads),
            *(stride for x in grads for stride in x.stride()[:2]),
            pointer(position),
            position.numel(),
            *((None, pointer(time)) if self.functional else (pointer(time), None)),
        )
        check(run(self.problem, gradients), OPERATOR)
        position, time = (
            x if parameters is None else x.to(parameters.dtype)
            for x, parameters in ((position, self.position_bias), (time, self.time_parameters))
        )
        return grad_q, grad_k, grad_v, position, time
