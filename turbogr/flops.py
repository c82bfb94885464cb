"""How many floating-point operations turbogr's own operators take, for `torch.utils.flop_counter.FlopCounterMode`.

PyTorch's convention: products are counted, two operations for a multiplication and its addition; elementwise work (norms,
activations, dropout, softmax, optimizers) is not. Attention is counted over the pairs of tokens that causality allows, from
the values of `offsets`: for a sequence of n tokens n (n + 1) / 2 pairs. Its backward passes compute the scores again, which
is counted, too.

Importing this module registers the formulas. An operator of a user's own is counted as soon as its module registers one:

    @torch.utils.flop_counter.register_flop_formula(torch.ops.mine.jagged_mean)
    def _(x_shape, offsets_shape, *rest, **options):
        return x_shape[0] * x_shape[1]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

# So that the operators exist whose formulas follow.
import turbogr.ops.embedding_lookup
import turbogr.ops.fuxi_attention
import turbogr.ops.hstu_attention
import turbogr.ops.negative_logits
import turbogr.ops.sampled_softmax
import turbogr.ops.softmax_attention  # noqa: F401

Pairs = Callable[[Tensor], int]
"""Pairs of tokens that attention computes, given offsets int64 [B + 1]."""

OPERATORS = torch.ops.turbogr


def causal_pairs(offsets: Tensor) -> int:
    """Sum over the sequences of n (n + 1) / 2.

    Raises:
        ValueError: if the values of the offsets are not known (a fake tensor, or one on the device `meta`).
    """
    lengths = _lengths(offsets)
    return int((lengths * (lengths + 1) // 2).sum())


def padded_pairs(offsets: Tensor) -> int:
    """B n^2 with the longest length n: what dense attention over a padded batch computes, before it masks."""
    lengths = _lengths(offsets)
    return int(lengths.numel() * lengths.max() ** 2) if lengths.numel() else 0


def _lengths(offsets: Tensor) -> Tensor:
    if isinstance(offsets, torch._subclasses.FakeTensor) or offsets.is_meta:
        raise ValueError("operations of jagged attention are counted from the values of `offsets`, which a fake tensor has not")
    return offsets.diff()


def _attention(pairs: Pairs, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *rest: Any, **options: Any) -> int:
    """HSTU's and softmax attention: scores, and weights times values."""
    return 2 * pairs(offsets) * q.shape[1] * (q.shape[2] + v.shape[2])


def _attention_backward(
    pairs: Pairs, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, *rest: Any, **options: Any
) -> int:
    """Scores again; gradients of the weights, of queries, keys and values."""
    return 2 * pairs(offsets) * q.shape[1] * (3 * q.shape[2] + 2 * v.shape[2])


def _fuxi(
    pairs: Pairs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_parameters: Tensor | None,
    *rest: Any,
    **options: Any,
) -> int:
    """Scores, and the weights of each channel times values."""
    return 2 * pairs(offsets) * q.shape[1] * (q.shape[2] + _channels(position_bias, time_parameters) * v.shape[2])


def _fuxi_backward(
    pairs: Pairs,
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    position_bias: Tensor | None,
    time_parameters: Tensor | None,
    *rest: Any,
    **options: Any,
) -> int:
    """Scores again; gradients of the channels' weights, of queries and keys, and of values through each channel."""
    channels = _channels(position_bias, time_parameters)
    return 2 * pairs(offsets) * q.shape[1] * (3 * q.shape[2] + 2 * channels * v.shape[2])


def _channels(*tables: Tensor | None) -> int:
    return 1 + sum(table is not None for table in tables)


def attention_formulas(pairs: Pairs) -> dict[Any, Callable[..., int]]:
    """Formulas of the attention operators, by operator, that count these pairs.

    They take the operators' arguments themselves, as `register_flop_formula(..., get_raw=True)` and FlopCounterMode's
    `custom_mapping` allow.
    """
    formulas: dict[Any, Callable[..., int]] = {
        OPERATORS.jagged_hstu_attention: partial(_attention, pairs),
        OPERATORS.jagged_hstu_attention_backward: partial(_attention_backward, pairs),
        OPERATORS.jagged_softmax_attention: partial(_attention, pairs),
        OPERATORS.jagged_softmax_attention_backward: partial(_attention_backward, pairs),
        OPERATORS.jagged_fuxi_attention: partial(_fuxi, pairs),
        OPERATORS.jagged_fuxi_attention_backward: partial(_fuxi_backward, pairs),
    }
    for formula in formulas.values():
        formula._get_raw = True  # type: ignore[attr-defined] # FlopCounterMode asks for it
    return formulas


for _operator, _formula in attention_formulas(causal_pairs).items():
    register_flop_formula(_operator, get_raw=True)(_formula)


@register_flop_formula(OPERATORS.negative_logits)
def _negative_logits(output: torch.Size, rows: torch.Size, index: torch.Size, *rest: Any, **options: Any) -> int:
    return 2 * prod(index) * output[1]


@register_flop_formula(OPERATORS.negative_logits_backward)
def _negative_logits_backward(
    gradient: torch.Size, output: torch.Size, rows: torch.Size, index: torch.Size, *rest: Any, **options: Any
) -> int:
    """Of the output and of the rows."""
    return 4 * prod(index) * output[1]


@register_flop_formula(OPERATORS.sampled_softmax)
def _sampled_softmax(
    output: torch.Size, rows: torch.Size, targets: torch.Size, negatives: torch.Size, *rest: Any, **options: Any
) -> int:
    """Products with the target and the negatives, and at once their sum that is the output's gradient."""
    return 4 * negatives[0] * (1 + negatives[1]) * output[1]


@register_flop_formula(OPERATORS.sampled_softmax_backward)
def _sampled_softmax_backward(
    gradient: torch.Size,
    output: torch.Size,
    num_rows: int,
    targets: torch.Size,
    negatives: torch.Size,
    *rest: Any,
    **options: Any,
) -> int:
    """Of the rows."""
    return 2 * negatives[0] * (1 + negatives[1]) * output[1]


@register_flop_formula(OPERATORS.jagged_embedding_lookup_backward)
def _lookup_backward(gradient: torch.Size, *rest: Any, **options: Any) -> int:
    """One addition an element: gradients of equal ids are summed."""
    return prod(gradient)
