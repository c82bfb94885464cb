"""Every C++ kernel against its operator's float64 reference, on one awkward input each, outputs and gradients.

`python -m tests.ops.parity` prints the largest relative error of each kernel as JSON. A process of its own, because a kernel is
compiled once per process: `CXX` and `XDG_CACHE_HOME` say how and where.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tests.ops.jagged_cases import offsets_of
from turbogr.ops.add_positions import jagged_add_positions
from turbogr.ops.backend import Backend
from turbogr.ops.dropout import dropout
from turbogr.ops.embedding_lookup import jagged_embedding_lookup
from turbogr.ops.fuxi_attention import jagged_fuxi_attention
from turbogr.ops.gated_norm import gated_norm
from turbogr.ops.hstu_attention import jagged_hstu_attention
from turbogr.ops.negative_logits import negative_logits, negative_logits_gradients
from turbogr.ops.normalise import normalised
from turbogr.ops.registry import describe
from turbogr.ops.row_update import RowRule, row_update
from turbogr.ops.sampled_softmax import sampled_softmax
from turbogr.ops.silu_split import silu_split
from turbogr.ops.softmax_attention import jagged_softmax_attention
from turbogr.ops.unique import unique_segments

LENGTHS = [0, 1, 2, 63, 64, 65, 130]
TOKENS = sum(LENGTHS)


def attention_inputs() -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k [T, 3, 17] and v [T, 3, 33], the offsets, and times that rise by up to a month."""
    q, k, v = (torch.randn(TOKENS, 3, width) for width in (17, 17, 33))
    times = torch.randint(0, 2_600_000, (TOKENS,)).cumsum(0)
    return [q, k, v], offsets_of(LENGTHS), times


def with_gradients(outputs: Iterable[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    outputs = list(outputs)
    loss = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for x in outputs)
    return [*(x.detach() for x in outputs), *torch.autograd.grad(loss, leaves)]


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    return [x.requires_grad_() for x in tensors]


def hstu(backend: Backend) -> list[Tensor]:
    qkv, offsets, times = attention_inputs()
    leaves = leaves_of(*qkv, torch.randn(max(LENGTHS)), torch.randn(60))
    q, k, v, position, time = leaves
    out = jagged_hstu_attention(
        q,
        k,
        v,
        offsets,
        scale=0.1,
        alpha=0.3,
        position_bias=position,
        time_bias=time,
        query_times=times + 1000,
        key_times=times,
        backend=backend,
    )
    return with_gradients([out], leaves)


def fuxi(backend: Backend) -> list[Tensor]:
    qkv, offsets, times = attention_inputs()
    position = torch.randn(max(LENGTHS))
    results = []
    for function in (False, True):
        time = [torch.tensor(0.7), torch.tensor(0.9), torch.tensor(0.4)] if function else [torch.randn(60)]
        leaves = leaves_of(*(x.detach().clone() for x in (*qkv, position)), *time)
        out = jagged_fuxi_attention(
            *leaves[:3],
            offsets,
            scale=0.1,
            position_bias=leaves[3],
            time_bias=None if function else leaves[4],
            time_function=tuple(leaves[4:]) if function else None,
            query_times=times + 1000,
            key_times=times,
            time_unit=86400.0 if function else 1.0,
            backend=backend,
        )
        results += with_gradients([out], leaves)
    return results


def softmax(backend: Backend) -> list[Tensor]:
    qkv, offsets, _ = attention_inputs()
    leaves = leaves_of(*qkv)
    return with_gradients([jagged_softmax_attention(*leaves, offsets, scale=0.3, backend=backend)], leaves)


def embedding(backend: Backend) -> list[Tensor]:
    leaves = leaves_of(torch.randn(40, 37), torch.randn(9, 37))
    ids = torch.cat([torch.randint(0, 40, (500,)), torch.randint(0, 9, (70,))])
    results = with_gradients([jagged_embedding_lookup(leaves, ids, torch.tensor([0, 500, 570]), backend=backend)], leaves)
    for rule in (RowRule("row_wise_adagrad", lr=0.1), RowRule("lazy_adam", lr=0.1, eps=1e-8)):
        weight, rows, gradient = torch.randn(40, 37), torch.randperm(40)[:23], torch.randn(23, 37)
        state = [torch.rand(shape) for shape in rule.state_shapes(40, 37)]
        step = [torch.tensor(3)] if rule.kind == "lazy_adam" else []
        row_update(rule, weight, [*state, *step], rows, gradient, backend=backend)
        results += [weight, *state]
    return results


def negatives(backend: Backend) -> list[Tensor]:
    leaves = leaves_of(torch.randn(TOKENS, 37), torch.randn(211, 37))
    index, targets = torch.randint(0, 211, (TOKENS, 19)), torch.randint(0, 211, (TOKENS,))
    logits = negative_logits(*leaves, index, backend=backend)
    loss = sampled_softmax(*leaves, targets, index, temperature=0.7, backend=backend)
    corrected = sampled_softmax(*leaves, targets, index, temperature=0.7, bias=torch.randn(211), lent=7, backend=backend)
    results = with_gradients([logits, loss, corrected], leaves)
    gradient, factors = torch.randn(TOKENS, 19), torch.rand(211)
    for dtype in (torch.float16, torch.bfloat16):
        half = leaves[0].detach(), torch.randn(211, 37).to(dtype), index
        results.append(negative_logits(*half, factors=factors, backend=backend))
        results += negative_logits_gradients(gradient, *half, factors=factors, backend=backend)
    return results


def unique(backend: Backend) -> list[Tensor]:
    few, many = torch.randint(0, 500, (3000,)), torch.randint(0, 2**40, (3000,))
    return [*unique_segments(few, 500, backend=backend), *unique_segments(many, 2**40, backend=backend)]


def random_mask(backend: Backend) -> list[Tensor]:
    leaves = leaves_of(torch.randn(TOKENS, 37))
    return with_gradients([dropout(leaves[0], 0.3, backend=backend)], leaves)


def norm(backend: Backend) -> list[Tensor]:
    leaves = leaves_of(torch.randn(TOKENS, 37), torch.randn(TOKENS, 37))
    return with_gradients([gated_norm(*leaves, eps=1e-6, p=0.3, backend=backend)], leaves)


def split(backend: Backend) -> list[Tensor]:
    leaves = leaves_of(torch.randn(TOKENS, 60))
    return with_gradients(silu_split(leaves[0], [37, 3, 20], backend=backend), leaves)


def positions(backend: Backend) -> list[Tensor]:
    leaves = leaves_of(torch.randn(TOKENS, 37), torch.randn(max(LENGTHS), 37))
    return with_gradients([jagged_add_positions(*leaves, offsets_of(LENGTHS), scale=6.0, p=0.3, backend=backend)], leaves)


def unit_length(backend: Backend) -> list[Tensor]:
    leaves = leaves_of(torch.randn(TOKENS, 37))
    return with_gradients([normalised(leaves[0], backend=backend)], leaves)


CASES: dict[str, Callable[[Backend], list[Tensor]]] = {
    "add_positions": positions,
    "dropout": random_mask,
    "embedding": embedding,
    "fuxi_attention": fuxi,
    "gated_norm": norm,
    "hstu_attention": hstu,
    "l2_normalise": unit_length,
    "negative_logits": negatives,
    "silu_split": split,
    "softmax_attention": softmax,
    "unique": unique,
}
"""By the name of the kernel's source."""


def error_of(case: Callable[[Backend], list[Tensor]]) -> float:
    """Largest error of one tensor, relative to its largest element."""
    results = []
    for backend in ("cpp", "reference"):
        torch.manual_seed(3)
        results.append([x.detach().double() for x in case(backend)])
    return max(
        float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
        for actual, expected in zip(*results, strict=True)
    )


if __name__ == "__main__":
    describe(load=True)  # compiles everything at once
    print(json.dumps({name: error_of(case) for name, case in CASES.items()}))
