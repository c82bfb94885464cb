"""`python -m tests.ascendc.on_device`: every operator that has kernels for NPUs against its float64 reference, with gradients.

On a machine with NPUs it prints a line a case, and ends with 1 if one is out of tolerance or was not computed by a kernel.
`tests/ascendc/test_plugin.py` runs the same cases on a device that it makes of the host's memory.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.ops.jagged_cases import offsets_of
from turbogr.ops import npu_plugin
from turbogr.ops.backend import Backend
from turbogr.ops.embedding_lookup import jagged_embedding_lookup
from turbogr.ops.fuxi_attention import jagged_fuxi_attention
from turbogr.ops.hstu_attention import jagged_hstu_attention
from turbogr.ops.negative_logits import negative_logits

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 5e-3}
"""Of each dtype: the absolute difference that no larger share of the elements than this number may exceed."""

LENGTHS = {"edges of a tile": [63, 64, 65, 0, 1, 2], "two blocks": [300, 7], "short": [3, 1]}


@dataclass(frozen=True)
class Case:
    """Inputs of one operator.

    Attributes:
        name: operator and what is particular.
        leaves: float64, differentiated.
        others: integers.
        call: of the back end, the leaves and the others, both where the operator runs.
        kernels: how many launches forward and backward need together.
    """

    name: str
    leaves: list[Tensor]
    others: list[Tensor]
    call: Callable[[Backend, Sequence[Tensor], Sequence[Tensor]], Tensor]
    kernels: int = 2


@dataclass(frozen=True)
class Result:
    """What came of a case in one dtype: the largest share of elements out of tolerance, in all tensors, and the launches."""

    name: str
    dtype: str
    share: float
    tolerance: float
    largest: float
    launches: int
    kernels: int

    @property
    def right(self) -> bool:
        return self.share < self.tolerance and self.launches == self.kernels


def attention_cases(seed: int) -> Iterator[Case]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    for lengths_name, lengths in LENGTHS.items():
        offsets, tokens = offsets_of(lengths), sum(lengths)
        keys = torch.rand(tokens, generator=g).mul(6).exp().long().cumsum(0)
        others = [offsets, keys + 5, keys]
        qkv = [0.5 * normal(tokens, 2, 16), 0.5 * normal(tokens, 2, 16), 0.5 * normal(tokens, 2, 24)]
        position, time = 0.3 * normal(max(lengths) + 3), 0.3 * normal(28)

        def hstu(backend: Backend, leaves: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
            tables = leaves[3:]
            times = {"time_bias": tables[1], "query_times": others[1], "key_times": others[2]} if len(tables) > 1 else {}
            biases = {"position_bias": tables[0]} if tables else {}
            return jagged_hstu_attention(*leaves[:3], others[0], scale=0.1, alpha=0.7, backend=backend, **biases, **times)

        def fuxi(backend: Backend, leaves: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
            numbers = leaves[4:]
            times = {"time_function": tuple(numbers)} if len(numbers) > 1 else {"time_bias": numbers[0]}
            return jagged_fuxi_attention(
                *leaves[:3],
                others[0],
                scale=0.1,
                alpha=0.7,
                position_bias=leaves[3],
                query_times=others[1],
                key_times=others[2],
                time_unit=60.0,
                backend=backend,
                **times,
            )

        yield Case(f"jagged_hstu_attention, {lengths_name}, both tables", [*qkv, position, time], others, hstu)
        yield Case(f"jagged_hstu_attention, {lengths_name}, no table", qkv, others, hstu)
        function = [torch.tensor(x, dtype=torch.float64) for x in (0.7, 0.9, 0.4)]
        yield Case(f"jagged_fuxi_attention, {lengths_name}, buckets", [*qkv, position, time], others, fuxi)
        yield Case(f"jagged_fuxi_attention, {lengths_name}, function", [*qkv, position, *function], others, fuxi)


def row_cases(seed: int) -> Iterator[Case]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return 0.5 * torch.randn(*shape, generator=g, dtype=torch.float64)

    def look_up(backend: Backend, leaves: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        return jagged_embedding_lookup(leaves, others[0], *others[1:], backend=backend)

    def logits(backend: Backend, leaves: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        return negative_logits(*leaves, others[0], backend=backend)

    ids = [torch.randint(0, rows, (count,), generator=g) for rows, count in ((40, 500), (9, 70), (3, 0))]
    splits = torch.tensor([0, 500, 570, 570])
    tables = [normal(40, 36), normal(9, 36), normal(3, 36)]
    yield Case("jagged_embedding_lookup, three tables", tables, [torch.cat(ids), splits], look_up)
    yield Case("jagged_embedding_lookup, one table", [normal(40, 64)], [ids[0]], look_up)
    index = torch.randint(0, 211, (65, 19), generator=g)
    yield Case("negative_logits", [normal(65, 36), normal(211, 36)], [index], logits)
    yield Case("negative_logits, one sample", [normal(5, 64), normal(3, 64)], [index[:5, :1] % 3], logits)


def cases(seed: int = 0) -> Iterator[Case]:
    yield from attention_cases(seed)
    yield from row_cases(seed)


def with_gradients(out: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of a sum of it with weights."""
    weights = torch.linspace(-1, 1, max(out.numel(), 1), dtype=torch.float64)[: out.numel()].view(out.shape)
    loss_of = weights.to(out.device, out.dtype)
    return [out.detach(), *torch.autograd.grad(out, list(leaves), loss_of)]


def run(case: Case, dtype: torch.dtype, device: str, launches: Callable[[], int]) -> Result:
    rounded = [x.to(dtype) for x in case.leaves]
    expected_leaves = [x.double().requires_grad_() for x in rounded]
    expected = with_gradients(case.call("reference", expected_leaves, case.others), expected_leaves)
    leaves = [x.to(device).requires_grad_() for x in rounded]
    before = launches()
    out = case.call("auto", leaves, [x.to(device) for x in case.others])
    actual = with_gradients(out, leaves)
    after = launches()
    tolerance = TOLERANCES[dtype]
    share, largest = 0.0, 0.0
    for a, b in zip(actual, expected, strict=True):
        if b.numel():
            # A sum over many elements is as wrong as it is large.
            difference = (a.cpu().double() - b).abs() / b.abs().max().clamp(min=1.0)
            wrong = (difference > tolerance) | difference.isnan()
            share = max(share, float(wrong.double().mean()))
            largest = max(largest, float("inf") if bool(difference.isnan().any()) else float(difference.max()))
    return Result(case.name, str(dtype).removeprefix("torch."), share, tolerance, largest, after - before, case.kernels)


def launches_of(plugin: Path) -> Callable[[], int]:
    """How many kernels the plugin has launched so far."""
    count = ctypes.CDLL(str(plugin)).turbogr_launches
    count.restype = ctypes.c_int64
    return count


def main() -> int:
    importlib.import_module("torch_npu")
    launches = launches_of(npu_plugin.load())
    wrong = 0
    for case in cases():
        for dtype in TOLERANCES:
            result = run(case, dtype, "npu:0", launches)
            wrong += not result.right
            launched = f"{result.launches} of {result.kernels} kernels"
            verdict = "ok   " if result.right else "WRONG"
            print(f"{verdict} {result.name}, {result.dtype}: largest {result.largest:.1e}, {launched}", flush=True)
    print(f"{wrong} wrong" if wrong else "all right")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
