"""ApartRows: the distinct rows of one feature, kept apart from a batch's leaf: in half precision, on the host, or both.

A batch's rows are one leaf [U, D], on which one gradient arrives. What a feature looks up beside that, such as the negatives,
may be most of it. Such a feature can be kept apart (TurboGR, sections 4.3.1 and 4.3.2):

    distinct ids of all features [U]
      -> the rows that any other feature looks up     the leaf, float32, on the device
      -> the rows of the feature that is kept apart   ApartRows.values, in its dtype, on the device or the host

A row that both look up stands in both: it is sent once, and read, where it arrives or from the table, once for each. Autograd
sees no half-precision tensor: gradients would be rounded to it, and those of a mean over many tokens underflow in float16.
Whoever computes with `values` adds the gradient in float32 with `add_gradient`; `anchor` is what ties that computation to the
loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from turbogr.errors import ConfigurationError
from turbogr.ops.copies import ROWS_AT_ONCE, note_host_copy, on_host, to_device


class Apart(NamedTuple):
    """How a feature is kept apart.

    Attributes:
        dtype: of its rows.
        on_host: whether they lie on the host, whatever device trains.
    """

    dtype: torch.dtype = torch.float32
    on_host: bool = False


class Places:
    """Where the distinct rows of a batch belong.

    Not a dataclass on purpose: Lightning moves and clones what is one.

    Attributes:
        main: int64 [U_main], ascending: those of the batch's U distinct rows that the leaf holds.
        main_sizes: table -> how many of them are its rows.
        apart: feature -> int64 [N], ascending: those that it looks up.
        ids: feature -> int64 [N], their ids.
    """

    def __init__(self, main: Tensor, main_sizes: dict[str, int], apart: dict[str, Tensor], ids: dict[str, Tensor]) -> None:
        self.main, self.main_sizes, self.apart, self.ids = main, main_sizes, apart, ids

    def to(self, device: torch.device) -> Places:
        """The same places on a device, copied in the current stream; the host still knows them."""
        moved = ({name: _moved(x, device) for name, x in part.items()} for part in (self.apart, self.ids))
        return Places(_moved(self.main, device), self.main_sizes, *moved)


class ApartRows:
    """Rows of one feature of one batch.

    Not a dataclass on purpose: Lightning moves and clones what is one.

    Attributes:
        ids: int64 [N], distinct rows of the table's row space, ascending, on the device that trains.
        values: float [N, D].
        index: int64 in the shape of the feature's ids: where in `values` each of them stands.
        places: int64 [N], where in the batch's U distinct rows each of them stands; beside `values`.
        num_rows: U.
        anchor: float32 [0], a leaf: what is computed from `values` hangs on it.
        gradient: float32 [U, D], beside `values`: of the batch's distinct rows, so far; None before the first.
    """

    def __init__(self, ids: Tensor, values: Tensor, index: Tensor, places: Tensor, num_rows: int, trains: bool) -> None:
        self.ids, self.values, self.index, self.places = ids, values, index, _beside(values, places)
        self.anchor = torch.empty(0, dtype=torch.float32, requires_grad=trains)
        self.gradient: Tensor | None = None
        self.num_rows = num_rows

    def add_gradient(self, gradient: Tensor, rows: Tensor | None = None) -> None:
        """Adds a gradient.

        Args:
            gradient: float [n, D].
            rows: int64 [n], distinct, of `values`, beside them; None is all.
        """
        places = self.places if rows is None else self.places[rows]
        gradient = gradient.to(self.values.device, torch.float32)
        if self.gradient is None:
            self.gradient = torch.zeros(self.num_rows, gradient.shape[1], device=gradient.device)
            self.gradient[places] = gradient
        else:
            self.gradient.index_add_(0, places, gradient)


def find_places(ids: Tensor, index: Mapping[str, Tensor], sizes: Mapping[str, int], apart: Mapping[str, Apart]) -> Places:
    """Which distinct rows the features look up that are kept apart, and which the others.

    Args:
        ids: int64 [U], the distinct rows.
        index: feature -> int64 of any shape: where among the distinct rows each of its ids stands.
        sizes: table -> how many of the distinct rows are its own, one table after the other.
        apart: features of `index` that are kept apart.
    """
    main = _marked(ids, [where for name, where in index.items() if name not in apart])
    main_sizes = dict(zip(sizes, (int(part.sum()) for part in main.split(list(sizes.values()))), strict=True))
    used = {name: _marked(ids, [index[name]]).nonzero().view(-1) for name in apart}
    return Places(main.nonzero().view(-1), main_sizes, used, {name: ids[where] for name, where in used.items()})


def renumbered(index: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """Indices into the distinct rows as indices into those of them at `places`, among which they are."""
    numbers = torch.empty(num_rows, dtype=torch.int64, device=index.device)
    numbers[places] = torch.arange(len(places), device=index.device)
    return numbers[index]


def kept(read: Callable[[Tensor], Tensor], places: Tensor, apart: Apart) -> Tensor:
    """float [N, D], rows as the feature keeps them; without gradients.

    Args:
        read: gives the rows at some of a batch's U distinct ones, float [n, D] in a new tensor.
        places: int64 [N], which of them.
        apart: how.
    """
    if not apart.on_host or places.device.type == "cpu":
        return read(places).to(apart.dtype)
    # Into pinned memory, so that segments are fetched without waiting, and by parts: all of them may not fit on the device.
    parts = places.split(ROWS_AT_ONCE)
    first = read(parts[0]).to(apart.dtype)
    host = torch.empty(len(places), first.shape[1], dtype=apart.dtype).pin_memory()
    host[: len(first)] = first
    for number, part in enumerate(parts[1:], 1):
        host[number * ROWS_AT_ONCE : number * ROWS_AT_ONCE + len(part)] = read(part).to(apart.dtype)
    return host


def whole_gradient(leaf: Tensor, places: Tensor, apart: Mapping[str, ApartRows]) -> Tensor:
    """float32 [U, D], the gradient of a batch's distinct rows, of the leaf and of what is kept apart; on the host, if that is.

    Args:
        leaf: float [U_main, D], with its gradient.
        places: int64 [U_main], which of the U distinct rows it holds.
        apart: by feature.
    """
    parts = [rows.gradient for rows in apart.values() if rows.gradient is not None]
    if not parts:
        gradient = leaf.new_zeros(next(iter(apart.values())).num_rows, leaf.shape[1])
    else:
        gradient = parts[0]
        for part in parts[1:]:
            gradient += part.to(gradient.device)
    if leaf.grad is not None:
        gradient.index_add_(0, _beside(gradient, places), leaf.grad.to(gradient.device))
    return gradient


def refuse_item_features(feature: str, apart: Mapping[str, Apart]) -> None:
    """Raises ConfigurationError: an item's vector is made of several rows, which do not lie in one place."""
    raise ConfigurationError(
        f"feature {feature!r} is a property of items, whose rows cannot be kept apart ({', '.join(apart)}): leave out "
        "NegativeOffload (or choose its mode fused) and NegativeQuantization, or train without features of items "
        "(data.features)"
    )


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    moved = to_device(tensor, device)
    note_host_copy(moved, tensor)
    return moved


def _beside(rows: Tensor, places: Tensor) -> Tensor:
    return on_host(places) if rows.device.type == "cpu" else places


def _marked(ids: Tensor, indices: list[Tensor]) -> Tensor:
    marks = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for index in indices:
        marks[index.reshape(-1)] = True
    return marks
