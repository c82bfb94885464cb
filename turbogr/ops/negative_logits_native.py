"""The C++ back end of `turbogr::negative_logits` and `turbogr::sampled_softmax` (`kernels/cpu/negative_logits.h`)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from turbogr.ops.native import Kernel, check, pointer, rows

KERNEL = Kernel("negative_logits")

WRONG_INDEX = 2
"""What a function returns if a sample is outside the table."""

MOST_TOKENS = 2**32 - 1
"""A sample that waits for its sum is kept in 12 bytes, 4 of them for its token."""

TABLE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""`TURBOGR_FLOAT32` and the others."""


class _Samples(ctypes.Structure):
    """`TurbogrSamples`."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "count", "width", "rows")),
        ("output", c_void_p),
        ("output_row", c_int64),
        ("table", c_void_p),
        *((name, c_int64) for name in ("table_row", "table_type")),
        *((name, c_void_p) for name in ("targets", "index", "bias", "row_factors")),
        ("lent", c_int64),
        ("threads", c_int64),
    ]


class SampledRows:
    """Tokens and their samples in the form that the kernel reads; the tensors stay alive as long as this object.

    Args:
        operator: name for messages.
        library: the loaded kernel.
        num_rows: U.
        index: int64 [T, R].
        targets: int64 [T]: a token's sample 0, before its R others; or None.
        output: float32 [T, D].
        table: float32 [U, D], or float16 or bfloat16 for `logits` and `weighted_rows`; None if only `row_sums` is called.
        bias: float32 [U], added to the logits of `softmax`; None for none.
        row_factors: float32 [U], times which `logits` and `weighted_rows` take the table's rows; None for 1.
        lent: so many of a token's last samples, 0 <= lent <= R, are left out by `row_sums`.

    Raises:
        ValueError: if there are more than `MOST_TOKENS` tokens.
    """

    def __init__(
        self,
        operator: str,
        library: ctypes.CDLL,
        num_rows: int,
        index: Tensor,
        targets: Tensor | None,
        output: Tensor,
        table: Tensor | None = None,
        bias: Tensor | None = None,
        row_factors: Tensor | None = None,
        lent: int = 0,
    ) -> None:
        if output.shape[0] > MOST_TOKENS:
            raise ValueError(f"{operator}: {output.shape[0]:,} tokens are beyond 2^32 - 1")
        self.operator, self.library = operator, library
        self.tokens, self.width = output.shape
        self.count, self.num_rows = index.shape[1] + (targets is not None), num_rows
        self.lent = lent
        self.index, self.targets = index.contiguous(), None if targets is None else targets.contiguous()
        self.output, self.table = rows(output), None if table is None else rows(table)
        self.bias = None if bias is None else bias.contiguous()
        self.row_factors = None if row_factors is None else row_factors.contiguous()
        self.samples = _Samples(
            self.tokens,
            self.count,
            self.width,
            self.num_rows,
            pointer(self.output),
            self.output.stride(0),
            pointer(self.table),
            0 if self.table is None else self.table.stride(0),
            0 if self.table is None else TABLE_TYPES[self.table.dtype],
            pointer(self.targets),
            pointer(self.index),
            pointer(self.bias),
            pointer(self.row_factors),
            lent,
            torch.get_num_threads(),
        )

    def logits(self) -> Tensor:
        """float32 [T, R]: products of each token's output with its rows."""
        logits = _empty(self.tokens, self.count)
        self._run("turbogr_negative_logits", logits)
        return logits

    def softmax(self, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Losses [T], their derivatives by the products [T, 1 + R - lent] and by the output [T, D], float32."""
        results = _empty(self.tokens), _empty(self.tokens, self.count - self.lent), _empty(self.tokens, self.width)
        self._run("turbogr_sampled_softmax", c_float(temperature), *results)
        return results

    def weighted_rows(self, weights: Tensor) -> Tensor:
        """float32 [T, D]: the rows of each token, summed with the weights [T, R or 1 + R]."""
        sums = _empty(self.tokens, self.width)
        self._run("turbogr_weighted_rows", weights.contiguous(), sums)
        return sums

    def row_sums(self, weights: Tensor, factors: Tensor | None = None) -> Tensor:
        """float32 [U, D]: outputs of the tokens that drew a row, summed with the weights times factors [T].

        Weights are [T, R - lent], or [T, 1 + R - lent] with targets.
        """
        sums = _empty(self.num_rows, self.width)
        self._run("turbogr_row_sums", weights.contiguous(), None if factors is None else factors.contiguous(), sums)
        return sums

    def _run(self, function: str, *arguments: Tensor | c_float | None) -> None:
        run = getattr(self.library, function)
        kinds = [c_float if isinstance(x, c_float) else c_void_p for x in arguments]
        run.argtypes, run.restype = [POINTER(_Samples), *kinds, POINTER(c_int64)], c_int
        wrong = c_int64()
        code = run(self.samples, *(x if isinstance(x, c_float) else pointer(x) for x in arguments), wrong)
        if code == WRONG_INDEX:
            raise IndexError(self._outside(wrong.value))
        check(code, self.operator)

    def _outside(self, sample: int) -> str:
        token, place = divmod(sample, self.count)
        if self.targets is not None and place == 0:
            return outside(self.operator, f"targets[{token}]", int(self.targets[token]), self.num_rows)
        place -= self.targets is not None
        name = "index" if self.targets is None else "negatives"
        return outside(self.operator, f"{name}[{token}, {place}]", int(self.index[token, place]), self.num_rows)


def outside(operator: str, name: str, value: int, num_rows: int) -> str:
    """Message of an index that is not a row of the table."""
    return f"{operator}: {name} is {value}, outside the rows 0..{num_rows - 1}"


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)
