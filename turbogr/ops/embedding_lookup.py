"""`turbogr::jagged_embedding_lookup`: rows of several embedding tables of one width, by explicit indices, without padding.

    out[i] = tables[k][ids[i]]    for splits[k] <= i < splits[k + 1]

The gradient of a table is dense; a row's is the sum over its occurrences in the order of the batch, whatever the number of
threads. In training, the "table" is the leaf of a batch's distinct rows [U, D] (`turbogr.sparse.table`), so that nothing of the
catalogue's size is made; for raw gradients of a whole table see `turbogr.ops.row_update.jagged_row_update`.

Implementations: C++ for float32 on the CPU (`kernels/cpu/embedding.cpp`); PyTorch for everything else, and where there is no
compiler; the formula itself in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops import embedding_native
from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.embedding_native import KERNEL
from turbogr.ops.jagged import check_devices
from turbogr.ops.registry import register_loadable
from turbogr.ops.unique import NARROW

OPERATOR = "turbogr::jagged_embedding_lookup"


def jagged_embedding_lookup(
    tables: Sequence[Tensor],
    ids: Tensor,
    splits: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Look-up of the module's docstring; differentiates the tables.

    Args:
        tables: K tensors, float [V_k, D], of one dtype, device and D.
        ids: int64 or int32 [N], rows of the tables.
        splits: int64 or int32 [K + 1], rising from 0 to N, on any device; may be left out for a single table.
        out: float [N, D] of the tables' dtype, to be written instead of a new tensor; not with tables that require a gradient
            (unless gradients are disabled), and not in the storage of a table.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [N, D], `out` if that is given.

    Raises:
        IndexError: if an id lies outside its table; names the table, the id and the table's rows. (Tables on other devices
            than the CPU: PyTorch's own error.)
        ValueError: if shapes, dtypes or splits contradict each other, devices differ, or `out` is given where a gradient is
            wanted or lies in a table.
        ConfigurationError: if `backend` is unknown, or is `cpp` and the tables are not float32 on the CPU.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    tables = list(tables)
    check_tables(OPERATOR, tables, ids, splits)
    ids = ids.long()
    if out is None:
        if backend == "reference":
            return jagged_embedding_lookup_reference(tables, ids, splits).to(tables[0].dtype)
        return _lookup(tables, ids, splits, backend)
    if out.shape != (ids.numel(), tables[0].shape[1]) or out.dtype != tables[0].dtype or out.device != tables[0].device:
        raise ValueError(
            f"{OPERATOR}: out is {tables[0].dtype} {[ids.numel(), tables[0].shape[1]]} on the tables' device; "
            f"got {out.dtype} {list(out.shape)} on {out.device}"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*tables, out)):
        raise ValueError(f"{OPERATOR}: out cannot be given where a gradient is wanted")
    if any(out.untyped_storage() is table.untyped_storage() for table in tables):
        raise ValueError(f"{OPERATOR}: out shares its storage with a table, whose rows would change while they are read")
    if backend == "reference":
        return out.copy_(jagged_embedding_lookup_reference(tables, ids, splits))
    _lookup_out(tables, ids, splits, out, backend)
    return out


def jagged_embedding_lookup_reference(tables: Sequence[Tensor], ids: Tensor, splits: Tensor | None = None) -> Tensor:
    """The formula written down in float64, one table at a time: the oracle."""
    edges = edges_of(OPERATOR, splits, ids.numel(), len(tables))
    check_range(OPERATOR, ids, edges, [len(table) for table in tables])
    return torch.cat([table.double()[ids[edges[k] : edges[k + 1]]] for k, table in enumerate(tables)])


def sum_by_row(gradient: Tensor, index: Tensor, num_rows: int, *, backend: Backend = "auto") -> Tensor:
    """Sums of the rows that share an index, in their order: `index_add_` into zeros whose result no thread count changes.

    Args:
        gradient: float [N, D].
        index: int64 [N], in [0, num_rows).
        num_rows: rows of the result.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        float [num_rows, D].

    Raises:
        IndexError: if an index is outside.
        ValueError: if the devices differ.
    """
    check_devices(f"{OPERATOR}_backward", gradient=gradient, index=index)
    if backend == "reference":
        sums = torch.zeros(num_rows, gradient.shape[1], dtype=torch.float64, device=gradient.device)
        return sums.index_add_(0, index, gradient.double()).to(gradient.dtype)
    return _lookup_backward(gradient, index, None, [num_rows], [True], backend)[0]


def check_tables(operator: str, tables: Sequence[Tensor], ids: Tensor, splits: Tensor | None) -> None:
    """Checks tables [V_k, D] of one dtype and device, ids [N] there, splits [K + 1]; values are checked where they are read.

    Raises:
        ValueError: names the operator, the argument and what was found.
    """
    if not tables:
        raise ValueError(f"{operator}: there is no table")
    first = tables[0]
    for table in tables:
        if table.dim() != 2 or table.shape[1] != first.shape[1] or table.dtype != first.dtype or table.device != first.device:
            found = ", ".join(f"{x.dtype} {list(x.shape)} on {x.device}" for x in tables)
            raise ValueError(f"{operator}: tables are [V, D] of one dtype, device and D; got {found}")
    if not first.is_floating_point():
        raise ValueError(f"{operator}: tables are of a floating dtype; got {first.dtype}")
    if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{operator}: ids is int64 or int32 [N]; got {ids.dtype} {list(ids.shape)}")
    check_devices(operator, tables=first, ids=ids)
    if splits is None:
        if len(tables) != 1:
            raise ValueError(f"{operator}: splits can be left out for a single table only; there are {len(tables)}")
    elif splits.shape != (len(tables) + 1,) or splits.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{operator}: splits is int64 or int32 [{len(tables) + 1}], one more than tables; "
            f"got {splits.dtype} {list(splits.shape)}"
        )


def edges_of(operator: str, splits: Tensor | None, count: int, tables: int) -> list[int]:
    """The splits as numbers; raises ValueError if they do not rise from 0 to `count`."""
    edges = [0, count] if splits is None else splits.tolist()
    if len(edges) != tables + 1 or edges[0] != 0 or edges[-1] != count or sorted(edges) != edges:
        raise ValueError(f"{operator}: splits rise from 0 to {count} for {tables} tables; got {edges}")
    return edges


def outside(operator: str, table: int, row: int, num_rows: int) -> str:
    """Message of an IndexError."""
    return f"{operator}: table {table}: id {row} is outside the table's rows 0..{num_rows - 1}"


def check_range(operator: str, ids: Tensor, edges: Sequence[int], num_rows: Sequence[int]) -> None:
    """Raises IndexError for the first id outside its table; on the CPU only: reading from a device would wait for it."""
    if ids.device.type != "cpu":
        return
    for k, rows in enumerate(num_rows):
        part = ids[edges[k] : edges[k + 1]]
        if part.numel():
            low, high = torch.aminmax(part)
            if low < 0 or high >= rows:
                raise IndexError(outside(operator, k, int(part[(part < 0) | (part >= rows)][0]), rows))


def _refuse(operator: str, wrong: int | None, ids: Tensor, edges: Sequence[int], num_rows: Sequence[int]) -> None:
    if wrong is not None:
        table = next(k for k in range(len(num_rows)) if wrong < edges[k + 1])
        raise IndexError(outside(operator, table, int(ids[wrong]), num_rows[table]))


# PyTorch 2.13 loses count of the inputs of an operator with a list of tensors, where one is left to its default: there is none.
@torch.library.custom_op(OPERATOR, mutates_args=())
def _lookup(tables: Sequence[Tensor], ids: Tensor, splits: Tensor | None, backend: str) -> Tensor:
    out = tables[0].new_empty(ids.numel(), tables[0].shape[1])
    _write(tables, ids, splits, out, backend)
    return out


@torch.library.custom_op(f"{OPERATOR}_out", mutates_args={"out"})
def _lookup_out(tables: Sequence[Tensor], ids: Tensor, splits: Tensor | None, out: Tensor, backend: str) -> None:
    if out.stride(1) == 1:
        _write(tables, ids, splits, out, backend)
    else:
        out.copy_(_lookup(tables, ids, splits, backend))


def _write(tables: Sequence[Tensor], ids: Tensor, splits: Tensor | None, out: Tensor, backend: str) -> None:
    edges = edges_of(OPERATOR, splits, ids.numel(), len(tables))
    num_rows = [table.shape[0] for table in tables]
    library = kernel_for(KERNEL, OPERATOR, backend, tables[0])
    if library is not None:
        _refuse(OPERATOR, embedding_native.lookup_forward(library, tables, ids, edges, out), ids, edges, num_rows)
        return
    check_range(OPERATOR, ids, edges, num_rows)
    for k, table in enumerate(tables):
        torch.index_select(table, 0, ids[edges[k] : edges[k + 1]], out=out[edges[k] : edges[k + 1]])


@torch.library.custom_op(f"{OPERATOR}_backward", mutates_args=())
def _lookup_backward(
    gradient: Tensor,
    ids: Tensor,
    splits: Tensor | None,
    num_rows: Sequence[int],
    wanted: Sequence[bool],
    backend: str,
) -> list[Tensor]:
    edges = edges_of(OPERATOR, splits, ids.numel(), len(num_rows))
    library = kernel_for(KERNEL, OPERATOR, backend, gradient)
    if library is not None:
        tables, wrong = embedding_native.lookup_backward(library, gradient, ids, edges, num_rows, wanted)
        _refuse(OPERATOR, wrong, ids, edges, num_rows)
        return tables
    check_range(OPERATOR, ids, edges, num_rows)
    return [
        _sums(gradient[edges[k] : edges[k + 1]], ids[edges[k] : edges[k + 1]], rows if wanted[k] else 0)
        for k, rows in enumerate(num_rows)
    ]


def _sums(gradient: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    if not num_rows or not ids.numel():
        return gradient.new_zeros(num_rows, gradient.shape[1])
    # A segment for every row, found or not: how many are found is what a device would have to be asked.
    ordered, order = (ids.int() if num_rows < NARROW else ids).sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(num_rows + 1, dtype=ordered.dtype, device=ids.device))
    return segment_sums(gradient, order, starts)


def segment_sums(gradient: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """PyTorch's sum of the rows `order[starts[u] : starts[u + 1]]` of `gradient` for every u: [U, D], in their order."""
    return F.embedding_bag(order, gradient, starts[:-1], mode="sum")


@_lookup.register_fake
def _(tables: Sequence[Tensor], ids: Tensor, splits: Tensor | None, backend: str) -> Tensor:
    return tables[0].new_empty(ids.numel(), tables[0].shape[1])


@_lookup_out.register_fake
def _(*inputs: object) -> None:
    return None


@_lookup_backward.register_fake
def _(
    gradient: Tensor,
    ids: Tensor,
    splits: Tensor | None,
    num_rows: Sequence[int],
    wanted: Sequence[bool],
    backend: str,
) -> list[Tensor]:
    return [gradient.new_empty(v if want else 0, gradient.shape[1]) for v, want in zip(num_rows, wanted, strict=True)]


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    tables, ids, splits, ctx.backend = inputs
    ctx.num_rows = [table.shape[0] for table in tables]
    ctx.wanted = [table.requires_grad for table in tables]
    ctx.save_for_backward(ids, splits)


def _backward(ctx, gradient: Tensor) -> tuple[list[Tensor | None], None, None, None]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    ids, splits = ctx.saved_tensors
    grads = _lookup_backward(gradient, ids, splits, ctx.num_rows, ctx.wanted, ctx.backend)
    return [grad if want else None for grad, want in zip(grads, ctx.wanted, strict=True)], None, None, None


_lookup.register_autograd(_backward, setup_context=_setup_context)
register_loadable(OPERATOR, KERNEL)
