"""`turbogr::dropout`: dropout whose mask is computed, not drawn and not kept.

    out[r, c] = x[r, c] * (1 / (1 - p) if bits(seed, r, c) >= p * 2^32 else 0)

r numbers the rows of the last axis, c the elements of a row. `bits` are 32 bits of an integer hash: SplitMix64 of the seed and
the row gives two keys, with which the mixing function triple32 (Wellons 2018) is taken of the column. So every element's fate
can be found out alone: by any thread, and again in backward, which is the same function of the gradient. One seed is drawn for
each call from PyTorch's default CPU generator; `torch.manual_seed` fixes all.

Implementations: C++ for float32 and narrower on the CPU (`kernels/cpu/dropout.cpp`), PyTorch for everything else. They agree
bit for bit. Arithmetic is float32 at least.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from turbogr.errors import ConfigurationError
from turbogr.ops.backend import Backend, check_backend, kernel_for
from turbogr.ops.dropout_native import KERNEL, native_dropout
from turbogr.ops.registry import register_loadable

OPERATOR = "turbogr::dropout"

SEGMENT = 1 << 18
"""Elements whose bits PyTorch works out at once: their int64 temporaries stay in cache."""

WORD = (1 << 32) - 1


def dropout(x: Tensor, p: float, *, backend: Backend = "auto") -> Tensor:
    """Dropout of the module's docstring; differentiates x.

    Args:
        x: float, any shape.
        p: share of the elements that become zero, in [0, 1); realised in steps of 2^-32.
        backend: see `turbogr.ops.backend.Backend`.

    Returns:
        In the shape and dtype of x; x itself where p is 0.

    Raises:
        ValueError: if p is outside [0, 1) or x is not of a floating dtype.
        ConfigurationError: if `backend` is unknown, or is `cpp` and x is not a float of at most 32 bits on the CPU.
        MissingDependencyError: if `backend` is `cpp` and the kernel cannot be compiled or loaded.
    """
    check_backend(OPERATOR, backend)
    check_probability(OPERATOR, p)
    if not x.is_floating_point():
        raise ValueError(f"{OPERATOR}: x is of a floating dtype; got {x.dtype}")
    if p == 0.0:
        return x
    seed = draw_seed()
    return dropout_reference(x, p, int(seed)).to(x.dtype) if backend == "reference" else _dropout(x, p, seed, backend)


def dropout_reference(x: Tensor, p: float, seed: int) -> Tensor:
    """The formula in float64 with Python's own integers, one element at a time: the oracle."""
    rows, columns = rows_of(x).shape
    factors = [
        [1 / (1 - p) if _bits_of(seed, row, column) >= threshold_of(p) else 0.0 for column in range(columns)]
        for row in range(rows)
    ]
    return x.double() * torch.tensor(factors, dtype=torch.float64, device=x.device).view(x.shape)


def check_probability(owner: str, p: float) -> None:
    """Raises ValueError, which names `owner`, if p is outside [0, 1)."""
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{owner}: the dropout probability p must lie in [0, 1), got {p}")


def check_columns(owner: str, x: Tensor) -> None:
    """Raises ValueError, which names `owner`, if a row of x [N, D] has more elements than the mask can number."""
    if x.shape[1] > WORD:
        raise ValueError(f"{owner}: a row holds {x.shape[1]} elements, columns are counted in 32 bits")


def draw_seed() -> Tensor:
    """int64 [], from PyTorch's default CPU generator, whatever device the mask is for: reading it waits for nothing."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64)


def threshold_of(p: float) -> int:
    """The least bits of an element that is kept."""
    return min(math.floor(p * 2**32 + 0.5), WORD)


def rows_of(x: Tensor) -> Tensor:
    """[N, D] of any shape [..., D]; a scalar is one row of one element."""
    return x.reshape(-1, x.shape[-1] if x.dim() and x.shape[-1] else 1)


def dropout_factors(rows: slice, columns: int, p: float, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What PyTorch multiplies elements [rows, columns] with: 0 or 1 / (1 - p)."""
    keep = _bits(torch.arange(rows.start, rows.stop, device=device), columns, seed) >= threshold_of(p)
    return keep.to(dtype).mul_(1 / (1 - p))


def drop_(x: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """Dropout of x [N, D] in place, by PyTorch; nothing if there is no seed."""
    if seed is not None:
        for part in row_segments(*x.shape):
            x[part] *= dropout_factors(part, x.shape[1], p, int(seed), x.dtype, x.device)
    return x


def row_segments(rows: int, columns: int) -> list[slice]:
    """Slices of about SEGMENT elements."""
    step = max(1, SEGMENT // max(1, columns))
    return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]


def _bits(rows: Tensor, columns: int, seed: int) -> Tensor:
    """int64 [R, columns] with 32 random bits each, as kernels/cpu/random_bits.h has them.

    int64 products wrap around, their low bits are right; its right shift drags the sign along, which is masked.
    """
    z = (rows + 1) * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    z = z ^ (z >> 31 & (1 << 33) - 1)
    first, second = (z & WORD)[:, None], (z >> 32 & WORD)[:, None]
    x = torch.arange(columns, device=rows.device) ^ first
    x ^= x >> 17
    x.mul_(0xED5AD4BB).bitwise_and_(WORD)
    x ^= x >> 11
    x.mul_(0xAC4C1B51).add_(second).bitwise_and_(WORD)
    x ^= x >> 15
    x.mul_(0x31848BAB).bitwise_and_(WORD)
    x ^= x >> 14
    return x


def _signed(word: int) -> int:
    """The int64 of the same 64 bits."""
    return word - (1 << 64) if word >= 1 << 63 else word


def _bits_of(seed: int, row: int, column: int) -> int:
    long = (1 << 64) - 1
    z = (seed + (row + 1) * 0x9E3779B97F4A7C15) & long
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & long
    z = (z ^ z >> 27) * 0x94D049BB133111EB & long
    z ^= z >> 31
    x = column ^ (z & WORD)
    x ^= x >> 17
    x = x * 0xED5AD4BB & WORD
    x ^= x >> 11
    x = (x * 0xAC4C1B51 + (z >> 32)) & WORD
    x ^= x >> 15
    x = x * 0x31848BAB & WORD
    return x ^ x >> 14


@torch.library.custom_op(OPERATOR, mutates_args=())
def _dropout(x: Tensor, p: float, seed: Tensor, backend: str = "auto") -> Tensor:
    # Half precision is computed in float32, by either back end.
    wide = rows_of(x.float() if x.dtype.itemsize < 4 else x)
    check_columns(OPERATOR, wide)
    library = kernel_for(KERNEL, OPERATOR, backend, wide)
    if library is not None:
        out = native_dropout(library, wide, threshold_of(p), 1 / (1 - p), int(seed))
    else:
        out = wide.new_empty(wide.shape)
        for part in row_segments(*wide.shape):
            factors = dropout_factors(part, wide.shape[1], p, int(seed), wide.dtype, wide.device)
            torch.mul(wide[part], factors, out=out[part])
    return out.to(x.dtype).view(x.shape)


@_dropout.register_fake
def _(x: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    _, ctx.p, seed, ctx.backend = inputs
    ctx.save_for_backward(seed)


def _backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]  # noqa: ANN001
    return _dropout(gradient, ctx.p, *ctx.saved_tensors, ctx.backend), None, None, None


_dropout.register_autograd(_backward, setup_context=_setup_context)
register_loadable(OPERATOR, KERNEL)


class Dropout(nn.Module):
    """`dropout` in training, nothing in evaluation.

    Args:
        p: share of the elements that become zero, in [0, 1).
        backend: see `turbogr.ops.backend.Backend`.

    Raises:
        ConfigurationError: if an option is out of range.
    """

    def __init__(self, p: float, backend: Backend = "auto") -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ConfigurationError(f"Dropout: p must lie in [0, 1), got {p}")
        check_backend("Dropout", backend)
        self.p = p
        self.backend: Backend = backend

    @property
    def active(self) -> float:
        """The probability to hand to an operator that has dropout inside: p in training, 0 in evaluation."""
        return self.p if self.training else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """float, the shape of x."""
        return dropout(x, self.active, backend=self.backend)

    def extra_repr(self) -> str:
        """The options, as print shows them."""
        return f"p={self.p}, backend={self.backend!r}"
