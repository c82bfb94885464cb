"""`turbogr::unique_ids`: the distinct ids of a batch and where each id found its own, the step before every look-up.

`turbogr::unique_segments` gives besides what a reduction over equal ids needs: their positions, grouped.

Implementations: C++ for int64 on the CPU (`kernels/cpu/unique.cpp`: a bitmap of small tables, a radix sort for large ones);
PyTorch's stable sort where there is no compiler and on other devices; Python's own sort as the reference.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from turbogr.ops import unique_native
from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.registry import register_loadable
from turbogr.ops.unique_native import KERNEL

OPERATOR = "turbogr::unique_ids"
SEGMENTS = "turbogr::unique_segments"

DENSE_FACTOR = 4
"""Without a compiler, marking a table of `num_rows` flags beats sorting while the table has at most this many rows per id."""

NARROW = 2**31
"""Ids of at most so many rows fit into int32."""


class Segments(NamedTuple):
    """Distinct ids, and the positions at which each of them stands.

    Attributes:
        unique: int64 [U], the distinct ids, ascending.
        inverse: int64 [N], place of each id in `unique`.
        order: int64 [N], positions grouped by id, ascending within a group: a stable argsort of the ids.
        starts: int64 [U + 1]; the positions of `unique[u]` are `order[starts[u] : starts[u + 1]]`.
    """

    unique: Tensor
    inverse: Tensor
    order: Tensor
    starts: Tensor


def unique_ids(ids: Tensor, num_rows: int, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """The distinct ids, ascending, and the position of each id among them.

    Args:
        ids: int64 or int32, any shape, values in [0, num_rows).
        num_rows: size of the table that the ids index.
        backend: see `turbogr.ops.backend.Backend`; ids are integers, and no float32 is asked for.

    Returns:
        `unique`, int64 [U], ascending; `inverse`, int64 in the shape of `ids`, with `unique[inverse] == ids`.

    Raises:
        IndexError: if an id lies outside [0, num_rows); the message names the first one.
        ValueError: if ids are no integers or `num_rows` is negative.
        ConfigurationError: if `backend` is unknown, or is `cpp` and the ids are not on the CPU.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    flat = _checked(OPERATOR, ids, num_rows, backend)
    if backend == "reference":
        unique, inverse = unique_ids_reference(flat, num_rows)
    else:
        unique, inverse = _unique_ids(flat, num_rows, backend)
    return unique, inverse.view(ids.shape)


def unique_segments(ids: Tensor, num_rows: int, *, backend: Backend = "auto") -> Segments:
    """The distinct ids and the positions of each: what sums over equal ids are made of.

    Args:
        ids: int64 or int32 [N], values in [0, num_rows).
        num_rows: as in `unique_ids`, like `backend` and the errors.
        backend: as in `unique_ids`.

    Returns:
        Segments.
    """
    if ids.dim() != 1:
        raise ValueError(f"{SEGMENTS}: ids is int64 [N]; got {list(ids.shape)}")
    flat = _checked(SEGMENTS, ids, num_rows, backend)
    if backend == "reference":
        return _with_segments(*unique_ids_reference(flat, num_rows))
    return Segments(*_unique_segments(flat, num_rows, backend))


def unique_ids_reference(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The same through Python's own sort: the oracle."""
    flat = ids.flatten().tolist()
    for row in flat:
        if not 0 <= row < num_rows:
            raise IndexError(_outside(OPERATOR, row, num_rows))
    rows = sorted(set(flat))
    place = {row: index for index, row in enumerate(rows)}
    inverse = torch.tensor([place[row] for row in flat], dtype=torch.int64).view(ids.shape)
    return torch.tensor(rows, dtype=torch.int64), inverse


def _checked(operator: str, ids: Tensor, num_rows: int, backend: str) -> Tensor:
    check_backend(operator, backend)
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{operator}: ids are int64 or int32; got {ids.dtype}")
    if num_rows < 0:
        raise ValueError(f"{operator}: num_rows must not be negative; got {num_rows}")
    return ids.long().flatten()


def _outside(operator: str, row: int, num_rows: int) -> str:
    return f"{operator}: id {row} is outside the table's rows 0..{num_rows - 1}"


@torch.library.custom_op(OPERATOR, mutates_args=())
def _unique_ids(ids: Tensor, num_rows: int, backend: str = "auto") -> tuple[Tensor, Tensor]:
    library = kernel_for(KERNEL, OPERATOR, backend, ids, (torch.int64,))
    if library is not None:
        unique, inverse = _native(OPERATOR, library, ids, num_rows, False)
        return unique, inverse
    _check_range(OPERATOR, ids, num_rows)
    if num_rows <= DENSE_FACTOR * ids.numel():
        return _by_marking(ids, num_rows)
    if num_rows <= NARROW:
        return _by_sorting(ids, num_rows)[:2]
    unique, inverse = torch.unique(ids, return_inverse=True)
    return unique, inverse


@torch.library.custom_op(SEGMENTS, mutates_args=())
def _unique_segments(ids: Tensor, num_rows: int, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    library = kernel_for(KERNEL, SEGMENTS, backend, ids, (torch.int64,))
    if library is not None:
        unique, inverse, order, starts = _native(SEGMENTS, library, ids, num_rows, True)
        return unique, inverse, order, starts
    _check_range(SEGMENTS, ids, num_rows)
    return _by_sorting(ids, num_rows)


def _native(operator: str, library: ctypes.CDLL, ids: Tensor, num_rows: int, segments: bool) -> list[Tensor]:
    outputs, wrong = unique_native.unique(library, ids, num_rows, segments)
    if wrong is not None:
        raise IndexError(_outside(operator, int(ids[wrong]), num_rows))
    return outputs


def _check_range(operator: str, ids: Tensor, num_rows: int) -> None:
    if ids.numel():
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < 0 or high >= num_rows:
            raise IndexError(_outside(operator, int(ids[(ids < 0) | (ids >= num_rows)][0]), num_rows))


def _by_marking(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    present = torch.zeros(num_rows, dtype=torch.bool, device=ids.device)
    present[ids] = True
    place = present.cumsum(0) - 1
    return present.nonzero().view(-1), place.index_select(0, ids)


def _by_sorting(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # PyTorch's stable sort of integers is a radix sort: half the bytes, half the time.
    values, order = (ids.int() if num_rows <= NARROW else ids).sort(stable=True)
    first = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[1:], values[:-1], out=first[1:])
    inverse = torch.empty_like(ids).scatter_(0, order, first.cumsum(0).sub_(1))
    starts = torch.cat([first.nonzero().view(-1), order.new_full((1,), ids.numel())])
    return values[first].long(), inverse, order, starts


def _with_segments(unique: Tensor, inverse: Tensor) -> Segments:
    counts = torch.bincount(inverse, minlength=unique.numel())
    return Segments(unique, inverse, inverse.argsort(stable=True), torch.cat([counts.new_zeros(1), counts.cumsum(0)]))


@_unique_ids.register_fake
def _(ids: Tensor, num_rows: int, backend: str = "auto") -> tuple[Tensor, Tensor]:
    return ids.new_empty(torch.library.get_ctx().new_dynamic_size()), torch.empty_like(ids)


@_unique_segments.register_fake
def _(ids: Tensor, num_rows: int, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = torch.library.get_ctx().new_dynamic_size()
    return ids.new_empty(found), torch.empty_like(ids), torch.empty_like(ids), ids.new_empty(found + 1)


register_loadable(OPERATOR, KERNEL)
register_loadable(SEGMENTS, KERNEL)
