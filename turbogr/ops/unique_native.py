"""The C++ back end of `turbogr::unique_ids`: what `kernels/cpu/unique.h` declares, called through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int64, c_void_p

import torch
from torch import Tensor

from turbogr.ops.native import Kernel, pointer

KERNEL = Kernel("unique")

_NO_MEMORY = -(2**63)


class _Problem(ctypes.Structure):
    """`TurbogrUnique`."""

    _fields_ = [
        ("ids", c_void_p),
        *((name, c_int64) for name in ("count", "num_rows")),
        *((name, c_void_p) for name in ("unique", "inverse", "order", "starts")),
        ("threads", c_int64),
    ]


def unique(library: ctypes.CDLL, ids: Tensor, num_rows: int, segments: bool) -> tuple[list[Tensor], int | None]:
    """Distinct ids and the place of each; with `segments` also the ids' positions grouped by id, and where each group begins.

    Args:
        library: the loaded kernel.
        ids: int64 [N] on the CPU.
        num_rows: ids lie in [0, num_rows).
        segments: also the last two results.

    Returns:
        `unique` [U], `inverse` [N] and, where asked for, `order` [N] and `starts` [U + 1], all int64; then the position of the
        first id outside the table, if there is one (the tensors then hold nothing of use).
    """
    ids = ids.contiguous()
    most = min(ids.numel(), num_rows)
    outputs = [ids.new_empty(most), ids.new_empty(ids.numel())]
    if segments:
        outputs += [ids.new_empty(ids.numel()), ids.new_empty(most + 1)]
    run = library.turbogr_unique
    run.argtypes, run.restype = [POINTER(_Problem)], c_int64
    results = [pointer(x) for x in outputs] + [None] * (4 - len(outputs))
    found = run(_Problem(pointer(ids), ids.numel(), num_rows, *results, torch.get_num_threads()))
    if found == _NO_MEMORY:
        raise MemoryError("turbogr::unique_ids: no memory for the kernel's scratch")
    if found < 0:
        return outputs, -1 - found
    # Shrinking keeps the storage: no copy.
    outputs[0].resize_(found)
    if segments:
        outputs[3].resize_(found + 1)
    return outputs, None
