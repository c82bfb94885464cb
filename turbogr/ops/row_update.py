"""`turbogr::row_update`: updates the rows of an embedding table that a batch touched, and their optimizer state, in place.

With g the summed gradient of a row w of width D, elementwise unless said otherwise:

    sgd               w <- w - lr g
    adagrad           S <- S + g^2;               w <- w - lr g / (sqrt(S) + eps)
    row_wise_adagrad  s <- s + mean(g^2);         w <- w - lr g / (sqrt(s) + eps)        one s a row
    lazy_adam         m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  c = sqrt(1 - b2^t) / (1 - b1^t)
                      w <- w - lr (c m / (sqrt(v) + eps) + weight_decay w)

AdaGrad is that of TurboGR, eq. 3, and of torch.optim.Adagrad; lazy Adam that of torch.optim.SparseAdam, with AdamW's decoupled
decay of touched rows; t counts the steps of the table, not of a row.

Two forms: distinct rows with a gradient each, and raw gradients of a batch's occurrences, which are sorted and summed first.
Neither touches anything of the table's size. Implementations: C++ for float32 on the CPU (`kernels/cpu/embedding.cpp`), whose
result no thread count changes; PyTorch for everything else, and where there is no compiler; the formula itself in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from turbogr.ops import embedding_native
from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.copies import ROWS_AT_ONCE, to_device
from turbogr.ops.embedding_lookup import check_range, check_tables, edges_of, outside, segment_sums
from turbogr.ops.embedding_native import KERNEL
from turbogr.ops.jagged import check_devices
from turbogr.ops.registry import register_loadable
from turbogr.ops.unique import unique_segments

OPERATOR = "turbogr::row_update"
JAGGED = "turbogr::jagged_row_update"

Kind = Literal["sgd", "adagrad", "row_wise_adagrad", "lazy_adam"]
_KINDS = get_args(Kind)  # in the order of their numbers in kernels/cpu/embedding.h


@dataclass(frozen=True)
class RowRule:
    """How a row is updated; the formulas stand in the module's docstring.

    Attributes:
        kind: which of them.
        lr: learning rate.
        eps: keeps the root from zero; not used by `sgd`.
        betas: decay of the moments; `lazy_adam` only.
        weight_decay: decoupled decay; `lazy_adam` only.
    """

    kind: Kind
    lr: float
    eps: float = 1e-10
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0

    def state_shapes(self, num_rows: int, dim: int) -> list[tuple[int, int]]:
        """Shapes of the state's float tensors; `lazy_adam` has the step's number, int64 [] from 1, behind them."""
        widths = {"sgd": [], "adagrad": [dim], "row_wise_adagrad": [1], "lazy_adam": [dim, dim]}[self.kind]
        return [(num_rows, width) for width in widths]


def row_update(
    rule: RowRule, weight: Tensor, state: Sequence[Tensor], rows: Tensor, gradient: Tensor, *, backend: Backend = "auto"
) -> None:
    """Updates `weight[rows]` and their state.

    Args:
        rule: how.
        weight: float [V, D], changed in place.
        state: `sgd`: none; `adagrad`: the sum, float [V, D]; `row_wise_adagrad`: the sum, float [V, 1]; `lazy_adam`: first and
            second moment, float [V, D], and the number of this step, int64 [], which the caller counts. Changed in place, but
            for the number.
        rows: int64 or int32 [U], distinct: rows named twice get some mixture.
        gradient: float [U, D], summed over the rows' occurrences. It may lie on the host where the table lies on a device: it
            is then brought there in parts, for which `rows` are not checked as a whole.
        backend: see `turbogr.ops.backend.Backend`.

    Raises:
        IndexError: if a row lies outside the table; nothing is changed then.
        ValueError: if shapes or dtypes contradict each other or the rule, or devices differ.
        ConfigurationError: if `backend` is unknown, or is `cpp` and the table is not float32 on the CPU.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    if gradient.device.type == "cpu" and weight.device.type != "cpu":
        for some, part in zip(rows.split(ROWS_AT_ONCE), gradient.split(ROWS_AT_ONCE), strict=True):
            row_update(rule, weight, state, some.to(weight.device), to_device(part, weight.device), backend=backend)
        return
    _check(OPERATOR, rule, [weight], [state], rows, gradient, None)
    if backend == "reference":
        _take_reference(rule, weight, state, rows, gradient)
    else:
        _update(rule, weight, state, rows.long(), gradient, None, backend)


def jagged_row_update(
    rule: RowRule,
    tables: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    ids: Tensor,
    gradient: Tensor,
    splits: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> None:
    """Backward and update of a `jagged_embedding_lookup` in one: each table's touched rows, once, with their summed gradient.

    Args:
        rule: how.
        tables: K tensors, float [V_k, D], changed in place.
        states: the state of each table as in `row_update`.
        ids: int64 or int32 [N], the rows that were looked up; any number of times each.
        gradient: float [N, D], gradient of what was looked up.
        splits: int64 or int32 [K + 1], rising from 0 to N; table k was asked for ids[splits[k] : splits[k + 1]]; may be left
            out for a single table.
        backend: see `turbogr.ops.backend.Backend`.

    Raises:
        IndexError: if an id lies outside its table; names the table, the id and the table's rows. Nothing is changed then.
        ValueError: and the others as in `row_update`.
    """
    check_backend(JAGGED, backend)
    tables = list(tables)
    check_tables(JAGGED, tables, ids, splits)
    _check(JAGGED, rule, tables, states, ids, gradient, splits)
    edges = edges_of(JAGGED, splits, ids.numel(), len(tables))
    ids = ids.long()
    parts = [slice(first, end) for first, end in pairwise(edges)]
    if backend == "reference":
        check_range(JAGGED, ids, edges, [len(table) for table in tables])
        for table, state, part in zip(tables, states, parts, strict=True):
            _take_reference(rule, table, state, ids[part], gradient[part])
        return
    # A kernel that computes float32 on the CPU is no reason to refuse integers elsewhere: `cpp` is asked of the update only.
    sorting: Backend = "torch" if backend == "torch" else "auto"
    try:
        # All ids are found to be inside before the first table is changed.
        found = [unique_segments(ids[part], len(table), backend=sorting) for table, part in zip(tables, parts, strict=True)]
    except IndexError:
        check_range(JAGGED, ids, edges, [len(table) for table in tables])  # names the table besides
        raise
    for table, state, part, batch in zip(tables, states, parts, found, strict=True):
        _update(rule, table, state, batch.unique, gradient[part], (batch.order, batch.starts), backend)


def row_update_reference(rule: RowRule, weight: Tensor, state: Sequence[Tensor], ids: Tensor, gradient: Tensor) -> list[Tensor]:
    """The formula in float64, one row at a time: the oracle.

    Args:
        rule: how.
        weight: float [V, D].
        state: as in `row_update`.
        ids: int64 [N], any number of times each.
        gradient: float [N, D].

    Returns:
        The new weight and the new float state, float64.
    """
    w, *s = (x.double().clone() for x in [weight, *state] if x.dim())
    steps = state[-1].item() if rule.kind == "lazy_adam" else 0
    b1, b2 = rule.betas
    for row in ids.unique().tolist():
        if not 0 <= row < len(w):
            raise IndexError(outside(OPERATOR, 0, row, len(w)))
        g = gradient[ids == row].double().sum(0)
        if rule.kind == "sgd":
            step = g
        elif rule.kind == "lazy_adam":
            s[0][row] = b1 * s[0][row] + (1 - b1) * g
            s[1][row] = b2 * s[1][row] + (1 - b2) * g**2
            correction = (1 - b2**steps) ** 0.5 / (1 - b1**steps)
            step = correction * s[0][row] / (s[1][row] ** 0.5 + rule.eps) + rule.weight_decay * w[row]
        else:
            s[0][row] += g**2 if rule.kind == "adagrad" else (g**2).mean()
            step = g / (s[0][row] ** 0.5 + rule.eps)
        w[row] -= rule.lr * step
    return [w, *s]


def _take_reference(rule: RowRule, weight: Tensor, state: Sequence[Tensor], ids: Tensor, gradient: Tensor) -> None:
    with torch.no_grad():
        updated = row_update_reference(rule, weight, state, ids.long(), gradient)
        for target, x in zip([weight, *(x for x in state if x.dim())], updated, strict=True):
            target.copy_(x)


def _check(
    operator: str,
    rule: RowRule,
    tables: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    ids: Tensor,
    gradient: Tensor,
    splits: Tensor | None,
) -> None:
    if rule.kind not in _KINDS:
        raise ValueError(f"{operator}: the rule's kind is one of {', '.join(_KINDS)}; got {rule.kind!r}")
    check_tables(operator, tables, ids, splits)
    width = tables[0].shape[1]
    if gradient.shape != (ids.numel(), width) or gradient.dtype != tables[0].dtype:
        raise ValueError(
            f"{operator}: gradient is {tables[0].dtype} [{ids.numel()}, {width}]; got {gradient.dtype} {list(gradient.shape)}"
        )
    check_devices(operator, tables=tables[0], gradient=gradient)
    if len(states) != len(tables):
        raise ValueError(f"{operator}: there are {len(tables)} tables and {len(states)} states")
    for table, state in zip(tables, states, strict=True):
        expected: list[tuple[tuple[int, ...], torch.dtype]]
        expected = [(shape, table.dtype) for shape in rule.state_shapes(*table.shape)]
        if rule.kind == "lazy_adam":
            expected.append(((), torch.int64))
        found = [(tuple(x.shape), x.dtype) for x in state]
        if found != expected:
            raise ValueError(f"{operator}: the state of {rule.kind} is {expected} for a table {list(table.shape)}; got {found}")
        # But for the number of the step, which optimizers keep on the CPU.
        for x in state:
            check_devices(operator, tables=table, state=x if x.dim() else None)


def _update(
    rule: RowRule,
    weight: Tensor,
    state: Sequence[Tensor],
    rows: Tensor,
    gradient: Tensor,
    segments: tuple[Tensor, Tensor] | None,
    backend: str,
) -> None:
    floats: list[Tensor | None] = [x for x in state if x.dim()]
    first, second = (*floats, None, None)[:2]
    steps = state[-1] if rule.kind == "lazy_adam" else None
    order, starts = (None, None) if segments is None else segments
    number = _KINDS.index(rule.kind)
    with torch.no_grad():
        options = (rule.lr, rule.eps, *rule.betas, rule.weight_decay)
        _row_update(weight, first, second, steps, rows, gradient, order, starts, number, *options, backend)


@torch.library.custom_op(OPERATOR, mutates_args={"weight", "first", "second"})
def _row_update(
    weight: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    steps: Tensor | None,
    rows: Tensor,
    gradient: Tensor,
    order: Tensor | None,
    starts: Tensor | None,
    rule: int,
    lr: float,
    eps: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    backend: str = "auto",
) -> None:
    segments = None if order is None or starts is None else (order, starts)
    library = kernel_for(KERNEL, OPERATOR, backend, weight)
    if library is not None:
        state = [x for x in (first, second) if x is not None]
        correction = 1.0 if steps is None else float(_correction(steps, beta1, beta2))
        options = (lr, eps, beta1, beta2, weight_decay, correction)
        wrong = embedding_native.row_update(library, rule, weight, state, rows, gradient, segments, options)
        if wrong is not None:
            raise IndexError(outside(OPERATOR, 0, int(rows[wrong]), len(weight)))
        return
    check_range(OPERATOR, rows, [0, len(rows)], [len(weight)])
    if segments is not None and len(rows):
        gradient = segment_sums(gradient, *segments)
    kind, update = _KINDS[rule], gradient
    if kind == "lazy_adam" and first is not None and second is not None and steps is not None:
        mean = first.index_select(0, rows).lerp_(gradient, 1 - beta1)
        square = second.index_select(0, rows).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        first.index_copy_(0, rows, mean)
        second.index_copy_(0, rows, square)
        update = mean.mul_(_correction(steps, beta1, beta2).to(mean.dtype)).div_(square.sqrt_().add_(eps))
        if weight_decay:
            update.add_(weight.index_select(0, rows), alpha=weight_decay)
    elif first is not None:
        squares = gradient.square()
        total = first.index_select(0, rows).add_(squares if kind == "adagrad" else squares.mean(1, keepdim=True))
        first.index_copy_(0, rows, total)
        update = gradient / total.sqrt_().add_(eps)
    weight.index_copy_(0, rows, weight.index_select(0, rows).sub_(update, alpha=lr))


def _correction(steps: Tensor, beta1: float, beta2: float) -> Tensor:
    """Adam's correction of both moments, float64 []."""
    count = steps.double()
    return (1 - beta2**count).sqrt() / (1 - beta1**count)


@_row_update.register_fake
def _(*inputs: object) -> None:
    return None


register_loadable(OPERATOR, KERNEL)
