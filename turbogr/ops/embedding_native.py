"""The C++ back end of embedding look-ups and row updates: what `kernels/cpu/embedding.h` declares, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.native import Kernel, check, pointer, rows

KERNEL = Kernel("embedding")

_DONE, _NO_MEMORY = -1, -2


class _Lookup(ctypes.Structure):
    """`TurbogrLookup`."""

    _fields_ = [
        *((name, c_int64) for name in ("tables", "width")),
        *((name, c_void_p) for name in ("weights", "rows", "strides", "ids", "splits")),
        ("threads", c_int64),
    ]


class _RowUpdate(ctypes.Structure):
    """`TurbogrRowUpdate`."""

    _fields_ = [
        *((name, c_int64) for name in ("rule", "num_rows", "width")),
        ("weight", c_void_p),
        ("weight_stride", c_int64),
        *((name, c_void_p) for name in ("first", "second")),
        *((name, c_int64) for name in ("first_stride", "second_stride", "count")),
        *((name, c_void_p) for name in ("rows", "order", "starts", "gradient")),
        ("gradient_stride", c_int64),
        *((name, c_double) for name in ("lr", "eps", "beta1", "beta2", "weight_decay", "correction")),
        ("threads", c_int64),
    ]


def lookup_forward(
    library: ctypes.CDLL, tables: Sequence[Tensor], ids: Tensor, splits: Sequence[int], out: Tensor
) -> int | None:
    """Writes the rows of all ids to `out`, float32 [N, D] with contiguous rows.

    Returns:
        The position of the first id outside its table, if there is one.
    """
    weights = [rows(table) for table in tables]
    ids = ids.contiguous()
    problem = _problem([table.shape[0] for table in tables], out.shape[1], ids, splits, weights)
    run = library.turbogr_lookup_forward
    run.argtypes, run.restype = [POINTER(_Lookup), c_void_p, c_int64], c_int64
    return _position(run(problem, pointer(out), out.stride(0)), "turbogr::jagged_embedding_lookup")


def lookup_backward(
    library: ctypes.CDLL,
    gradient: Tensor,
    ids: Tensor,
    splits: Sequence[int],
    num_rows: Sequence[int],
    wanted: Sequence[bool],
) -> tuple[list[Tensor], int | None]:
    """Gradients of all tables, empty for those that are not wanted, given that of the output [N, D].

    Returns:
        Besides, the position of the first id outside its table, if there is one.
    """
    gradient, ids = rows(gradient), ids.contiguous()
    tables = [gradient.new_empty(v if want else 0, gradient.shape[1]) for v, want in zip(num_rows, wanted, strict=True)]
    pointers = _addresses([pointer(table) if want else None for table, want in zip(tables, wanted, strict=True)])
    problem = _problem(num_rows, gradient.shape[1], ids, splits, [])
    run = library.turbogr_lookup_backward
    run.argtypes, run.restype = [POINTER(_Lookup), c_void_p, c_int64, c_void_p], c_int64
    code = run(problem, pointer(gradient), gradient.stride(0), pointers)
    return tables, _position(code, "turbogr::jagged_embedding_lookup_backward")


def row_update(
    library: ctypes.CDLL,
    rule: int,
    weight: Tensor,
    state: Sequence[Tensor],
    distinct: Tensor,
    gradient: Tensor,
    segments: tuple[Tensor, Tensor] | None,
    options: tuple[float, float, float, float, float, float],
) -> int | None:
    """Updates rows of `weight` [V, D] and of their state in place.

    Args:
        library: the loaded kernel.
        rule: number of the rule in the header.
        weight: float32 [V, D].
        state: none, one or two float32 [V, D] or [V, 1].
        distinct: int64 [U], the rows.
        gradient: float32 [U, D], or [N, D] with `segments`.
        segments: order int64 [N] and starts int64 [U + 1]: the gradient of a row is the sum over its segment.
        options: lr, eps, beta1, beta2, weight decay and bias correction.

    Returns:
        The place of the first row outside the table, if there is one; nothing is updated then.
    """
    targets = [weight, *state]
    written = [rows(x) for x in targets]
    gradient, distinct = rows(gradient), distinct.contiguous()
    order, starts = (None, None) if segments is None else (x.contiguous() for x in segments)
    first, second = [*written[1:], None, None][:2]
    problem = _RowUpdate(
        rule,
        *weight.shape,
        pointer(written[0]),
        written[0].stride(0),
        pointer(first),
        pointer(second),
        0 if first is None else first.stride(0),
        0 if second is None else second.stride(0),
        distinct.numel(),
        pointer(distinct),
        pointer(order),
        pointer(starts),
        pointer(gradient),
        gradient.stride(0),
        *options,
        torch.get_num_threads(),
    )
    run = library.turbogr_row_update
    run.argtypes, run.restype = [POINTER(_RowUpdate)], c_int64
    wrong = _position(run(problem), "turbogr::row_update")
    for target, x in zip(targets, written, strict=True):
        if x is not target:  # a view whose rows are not contiguous
            target.copy_(x)
    return wrong


def _problem(num_rows: Sequence[int], width: int, ids: Tensor, splits: Sequence[int], weights: Sequence[Tensor]) -> _Lookup:
    # ctypes keeps the arrays alive: a structure refers to what its pointers were made from only if it is told to.
    kept: list[ctypes.Array[Any]] = [
        _addresses([pointer(x) for x in weights]),
        *((c_int64 * len(x))(*x) for x in (num_rows, [x.stride(0) for x in weights], splits)),
    ]
    addresses = [ctypes.addressof(x) for x in kept]
    problem = _Lookup(len(num_rows), width, *addresses[:3], pointer(ids), addresses[3], torch.get_num_threads())
    problem.kept = kept
    return problem


def _addresses(pointers: Sequence[int | None]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(pointers))(*pointers)


def _position(code: int, operator: str) -> int | None:
    check(code == _NO_MEMORY, operator)
    return None if code == _DONE else code
