"""Products of tokens with rows that are kept apart, segment by segment (TurboGR, section 4.3.1).

    for each segment of tokens:
        the distinct rows of its samples come to the device, while the products of the segment before are computed
        products [t, R] = output [t, D] . normalised rows

Only products are kept: backward fetches each segment once more and adds its rows' gradient where the rows lie. At most the rows
of two segments are on the device. Where rows lie there anyway, as all do on a CPU, forward reads them in place, and segments
bound what backward gathers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from turbogr.ops.backend import Backend
from turbogr.ops.copies import on_host
from turbogr.ops.negative_logits import negative_logits, negative_logits_gradients
from turbogr.ops.normalise import EPS
from turbogr.ops.unique import unique_ids
from turbogr.sparse.apart import ApartRows
from turbogr.sparse.lane import Ticket, copy_lane

VALUES_AT_ONCE = 1 << 18
"""Of the rows that are widened, or go through normalisation, together: what that needs besides stays in the cache, 1 MB."""


def apart_products(
    output: Tensor, rows: ApartRows, index: Tensor, segment: int | None = None, lent: int = 0, backend: Backend = "auto"
) -> Tensor:
    """Products of each token's output with the l2-normalised rows of its samples.

    Args:
        output: float32 [T, D].
        rows: N rows, on the device of `output` or on the host; their gradient is added to them.
        index: int64 [T, R], into `rows.values`, on the device of `output`.
        segment: tokens whose rows are fetched at a time; None is all at once.
        lent: so many of the last columns of `index` give `rows` no gradient.
        backend: of the products, see `turbogr.ops.backend.Backend`.

    Returns:
        float32 [T, R].
    """
    products: Tensor = _ApartProducts.apply(output, rows.anchor, rows, index, segment, lent, backend)
    return products


class _ApartProducts(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]  # noqa: ANN205
        ctx,  # noqa: ANN001
        output: Tensor,
        anchor: Tensor,
        rows: ApartRows,
        index: Tensor,
        segment: int | None,
        lent: int,
        backend: Backend,
    ):
        ctx.save_for_backward(output, index)
        ctx.rows, ctx.segment, ctx.lent, ctx.backend = rows, segment, lent, backend
        if rows.values.device == output.device:  # rows that lie where they are wanted are read there
            return negative_logits(output, rows.values, index, factors=_factors(rows.values), backend=backend)
        products = output.new_empty(index.shape)
        for part, values, place, _ in _segments(rows, index, segment, output.device, backend):
            products[part] = negative_logits(output[part], values, place, factors=_factors(values), backend=backend)
            del values, place
        return products

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        output, index = ctx.saved_tensors
        columns = index.shape[1] - ctx.lent
        grad_output = torch.empty_like(output)
        for part, values, place, distinct in _segments(ctx.rows, index, ctx.segment, output.device, ctx.backend):
            factors = _factors(values)
            options = {"factors": factors, "backend": ctx.backend}
            own, lent = gradient[part].split([columns, ctx.lent], 1)
            grad_output[part], of_vectors = negative_logits_gradients(own, output[part], values, place[:, :columns], **options)
            if ctx.lent:
                grad_output[part] += negative_logits_gradients(lent, output[part], values, place[:, columns:], **options)[0]
            ctx.rows.add_gradient(_through_normalisation(of_vectors, values, factors), distinct)
            del values, place, distinct, factors, of_vectors  # before the next but one segment is fetched
        return grad_output, None, None, None, None, None, None


def _factors(values: Tensor) -> Tensor:
    """float32 [n]: what normalises rows [n, D]; so no normalised copy of them is made."""
    # By parts: PyTorch widens what it takes the norm of.
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in values.split(_rows_at_once(values))]
    return torch.cat(norms).clamp_(min=EPS).reciprocal_()


def _rows_at_once(values: Tensor) -> int:
    return max(1, VALUES_AT_ONCE // max(1, values.shape[1]))


def _through_normalisation(gradient: Tensor, values: Tensor, factors: Tensor) -> Tensor:
    """Derivatives by rows, of those by the normalised rows, float32 [n, D], which are overwritten."""
    at_once = _rows_at_once(values)
    for g, rows, factor in zip(gradient.split(at_once), values.split(at_once), factors[:, None].split(at_once), strict=True):
        vectors = rows.float() * factor
        # A row that is shorter than eps is divided by a constant: nothing of its gradient is taken away.
        share = torch.linalg.vecdot(g, vectors)[:, None].masked_fill_(factor >= 1 / EPS, 0)
        g.addcmul_(vectors, share, value=-1).mul_(factor)
    return gradient


def _segments(
    rows: ApartRows, index: Tensor, segment: int | None, device: torch.device, backend: Backend
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor | None]]:
    """Tokens; their distinct rows, [n, D], on the device; where samples stand in these; which they are (None: all)."""
    tokens = len(index)
    if segment is None:
        yield slice(0, tokens), rows.values.to(device), index, None
        return
    lane, places = copy_lane(device), on_host(index) if rows.values.device.type == "cpu" else index

    def fetch(start: int) -> tuple[slice, Ticket[tuple[Tensor, Tensor]], Tensor]:
        part = slice(start, min(start + segment, tokens))
        distinct, place = unique_ids(places[part].reshape(-1), len(rows.values), backend=backend)
        found = rows.values[distinct]
        place = place.view(-1, index.shape[1])
        return part, lane.submit(lambda: (_sent(found, device), _sent(place, device))), distinct

    ahead = fetch(0) if tokens else None
    while ahead is not None:
        part, arriving, distinct = ahead
        ahead = fetch(part.stop) if part.stop < tokens else None
        values, place = arriving.wait()
        yield part, values, place, distinct
        del arriving, distinct, values, place  # before the next but one is fetched


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if tensor.device.type == device.type else tensor.pin_memory().to(device, non_blocking=True)
