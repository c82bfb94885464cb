"""The C++ back end of `turbogr::jagged_hstu_attention`: what `kernels/cpu/hstu_attention.h` declares, called through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int, c_int64, c_void_p
from typing import Literal, get_args

import torch
from torch import Tensor

from turbogr.errors import ConfigurationError
from turbogr.ops.native import Kernel, check, pointer, rows
from turbogr.ops.relative_attention import AttentionInputs, Gradients
from turbogr.ops.time_buckets import bucket_thresholds

KERNEL = Kernel("hstu_attention")
DTYPES = (torch.float32, torch.bfloat16)
"""Of q, k, v, the output and their gradients; the kernel computes in float32."""

Products = Literal["fp32", "bf16"]
"""What the factors of matrix products are rounded to; sums, and all else, are float32. On a processor with AVX512-BF16, `bf16`
makes long sequences 1.4 to 1.7 times as fast, at errors of 3e-3 (root mean square, relative); others only emulate it."""

OPERATOR = "turbogr::jagged_hstu_attention"


def check_products(owner: str, products: str) -> None:
    """Raises ConfigurationError, which names `owner`, if `products` is none of `Products`."""
    if products not in get_args(Products):
        raise ConfigurationError(f"{owner}: products must be one of {', '.join(get_args(Products))}, got {products!r}")


class BiasInputs(ctypes.Structure):
    """`TurbogrBias` of `kernels/cpu/bias_tables.h`."""

    _fields_ = [
        *((name, c_void_p) for name in ("position_bias", "time_bias")),
        ("time_count", c_int64),
        *((name, c_void_p) for name in ("thresholds", "query_times", "key_times")),
        *((name, c_double) for name in ("time_unit", "time_divisor")),
    ]


class _Problem(ctypes.Structure):
    """`TurbogrHstu`."""

    _fields_ = [
        *((name, c_int64) for name in ("sequences", "heads", "qk_width", "v_width")),
        ("offsets", c_void_p),
        ("bfloat16", c_int64),
        *((name, c_void_p) for name in "qkv"),
        *((f"{name}_{axis}", c_int64) for name in "qkv" for axis in ("row", "head")),
        ("bias", BiasInputs),
        *((name, c_float) for name in ("scale", "alpha")),
        ("bfloat16_products", c_int64),
        ("threads", c_int64),
    ]


class _Gradients(ctypes.Structure):
    """`TurbogrHstuGradients`."""

    _fields_ = [
        ("out", c_void_p),
        *((f"out_{axis}", c_int64) for axis in ("row", "head")),
        *((name, c_void_p) for name in "qkv"),
        *((f"{name}_{axis}", c_int64) for name in "qkv" for axis in ("row", "head")),
        ("position_bias", c_void_p),
        ("position_count", c_int64),
        ("time_bias", c_void_p),
    ]


class HSTUKernel:
    """One call's inputs, in the form that the kernel reads; they stay alive as long as this object.

    Args are those of the operator, on the CPU; q, k and v of one of `DTYPES`, the tables of any float dtype.
    """

    def __init__(self, library: ctypes.CDLL, inputs: AttentionInputs, products: str = "fp32") -> None:
        q, k, v, offsets, position_bias, time_bias, query_times, key_times, scale, alpha, time_unit, time_divisor = inputs
        self.library = library
        self.inputs = (q, k, v)
        self.q, self.k, self.v = (rows(x) for x in (q, k, v))
        tables = [None if table is None else table.float().contiguous() for table in (position_bias, time_bias)]
        times = [None if time_bias is None or x is None else x.contiguous() for x in (query_times, key_times)]
        thresholds = None if time_bias is None else bucket_thresholds(time_bias.numel(), time_unit, time_divisor)
        self.kept = [offsets.contiguous(), *tables, thresholds, *times]
        pointers = [pointer(x) for x in self.kept]
        self.problem = _Problem(
            offsets.numel() - 1,
            *q.shape[1:],
            v.shape[2],
            pointers[0],
            q.dtype == torch.bfloat16,
            *(pointer(x) for x in (self.q, self.k, self.v)),
            *(stride for x in (self.q, self.k, self.v) for stride in x.stride()[:2]),
            BiasInputs(*pointers[1:3], 0 if time_bias is None else time_bias.numel(), *pointers[3:], time_unit, time_divisor),
            scale,
            alpha,
            products == "bf16",
            torch.get_num_threads(),
        )
        self.position_bias, self.time_bias = position_bias, time_bias

    def forward(self) -> Tensor:
        """[T, H, dv] in the dtype of v."""
        out = self.v.new_empty(self.v.shape)
        run = self.library.turbogr_hstu_forward
        run.argtypes, run.restype = [POINTER(_Problem), c_void_p, c_int64, c_int64], c_int
        check(run(self.problem, out.data_ptr(), *out.stride()[:2]), OPERATOR)
        return out

    def backward(self, gradient: Tensor) -> Gradients:
        """Gradients of q, k, v and of both tables (empty where there is none), given that of the output [T, H, dv]."""
        gradient = rows(gradient)
        grad_q, grad_k, grad_v = grads = [x.new_empty(x.shape) for x in self.inputs]
        tables = [torch.empty(0 if x is None else x.numel()) for x in (self.position_bias, self.time_bias)]
        run = self.library.turbogr_hstu_backward
        run.argtypes, run.restype = [POINTER(_Problem), POINTER(_Gradients)], c_int
        gradients = _Gradients(
            pointer(gradient),
            *gradient.stride()[:2],
            *(pointer(x) for x in grads),
            *(stride for x in grads for stride in x.stride()[:2]),
            pointer(tables[0]),
            tables[0].numel(),
            pointer(tables[1]),
        )
        check(run(self.problem, gradients), OPERATOR)
        position, time = (
            x.to(self.q.dtype if table is None else table.dtype)
            for x, table in zip(tables, (self.position_bias, self.time_bias), strict=True)
        )
        return grad_q, grad_k, grad_v, position, time
