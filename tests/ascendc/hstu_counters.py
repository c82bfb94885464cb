"""What the kernels of HSTU attention move and calculate, against the naive formulation: the table of their README.

`python -m tests.ascendc.hstu_counters` prints it; `test_hstu_counters.py` compares. The kernels' numbers are counted by the
stand-in, the naive ones follow from shapes: q, k, v (and the output's gradient) are padded to [B, S, H, d], results gathered;
the bias is written as float32 [B, S, S] and read by each head; products cover all S x S pairs, and their results and factors go
through global memory once; the tables' gradients are summed by one scalar read-modify-write per causal pair and table.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.ascendc.hstu import Case, backward, case_of, forward

LENGTHS = [512, 357, 211, 120, 96, 64, 33, 7]
HEADS, QK, V = 4, 32, 32
DTYPE = torch.bfloat16
CORES = 24


def example() -> Case:
    """The batch that is counted. Its times are whole random numbers: the same on every machine, and so is what they take."""
    steps = torch.randint(0, 400, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    keys = steps[0].cumsum(0)
    return replace(case_of(LENGTHS, HEADS, QK, V, DTYPE), key_times=keys, query_times=keys + steps[1])


def naive(backwards: bool) -> dict[str, int]:
    """Of the naive formulation; scalar operations of the bias only."""
    size, padded, tokens = DTYPE.itemsize, len(LENGTHS) * max(LENGTHS), sum(LENGTHS)
    squares = len(LENGTHS) * max(LENGTHS) ** 2
    pairs, causal = HEADS * squares, sum(n * (n + 1) // 2 for n in LENGTHS)
    row_qk, row_v = HEADS * QK * size, HEADS * V * size
    if not backwards:
        rows = 2 * row_qk + 2 * row_v  # q, k, v, output
        products = padded * (2 * row_qk + 2 * row_v) + pairs * (4 + size)  # scores out, weights in
        elementwise, depth = pairs * (4 + size), QK + V
        bias, scalars = squares * 4 + pairs * 4, 2 * causal
    else:
        rows = 4 * row_qk + 3 * row_v  # q, k, v, gradient of the output; gradients of q, k, v
        # Scores and weights' gradients out; score gradients in, twice, and weights.
        products = padded * (6 * row_qk + 4 * row_v) + pairs * (2 * 4 + 3 * size)
        elementwise, depth = pairs * (2 * 4 + 2 * size), 3 * QK + 2 * V
        bias = squares * 4 + pairs * 4 + pairs * size + squares * 4  # the bias, and the score gradients summed over heads
        scalars = 2 * causal
    return {
        "converted": (tokens + padded) * rows,
        "bias": bias,
        "bytes": (tokens + padded) * rows + bias + products + elementwise,
        "multiply_adds": pairs * depth,
        "scalar": scalars,
    }


def table() -> str:
    """Markdown."""
    case = example()
    lines = ["| | forward | naive | backward | naive |", "|---|---|---|---|---|"]
    counted, expected = (forward(case, CORES)[1], backward(case, CORES)[1]), (naive(False), naive(True))

    def line(name: str, values: list[int], factors: list[int]) -> None:
        cells = [x for pair in zip(values, factors, strict=True) for x in pair]
        lines.append(f"| {name} | " + " | ".join(f"{x:,}" for x in cells) + " |")

    line("bytes converted between jagged and padded", [0, 0], [x["converted"] for x in expected])
    line("bytes of a dense bias and its gradient", [0, 0], [x["bias"] for x in expected])
    line("bytes to and from global memory, all", [x.bytes_global for x in counted], [x["bytes"] for x in expected])
    line("multiply-adds of the cube", [x.cube_multiply_adds for x in counted], [x["multiply_adds"] for x in expected])
    line("scalar operations (naive: the bias alone)", [x.scalar_operations for x in counted], [x["scalar"] for x in expected])
    plain = "| {} | {:,} | | {:,} | |"
    lines.append(plain.format("elements of vector instructions", *(x.vector_elements for x in counted)))
    lines.append(plain.format("bytes of local memory, at most", *(x.peak_local_bytes for x in counted)))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
