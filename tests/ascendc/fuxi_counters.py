"""What the kernels of FuXi's attention move and calculate, against the naive formulation: the tables of their README.

`python -m tests.ascendc.fuxi_counters` prints them; `test_fuxi_counters.py` compares. The kernels' numbers are counted by the
stand-in, the naive ones follow from shapes: q, k, v (and the output's gradient) are padded to [B, S, H, d], results gathered;
position and time weights are written as float32 [B, S, S] each and read by each head; products cover all S x S pairs, and their
results and factors go through global memory once; tables are looked up, and their gradients summed, by one scalar operation,
or read-modify-write, per causal pair and table.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.ascendc.fuxi import Case, backward, case_of, forward

LENGTHS = [512, 357, 211, 120, 96, 64, 33, 7]
HEADS, QK, V = 4, 32, 32
DTYPE = torch.bfloat16
CORES = 24


def example(channel: str) -> Case:
    """The batch that is counted. Its times are whole random numbers: the same on every machine, and so is what they take."""
    steps = torch.randint(0, 400, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    keys = steps[0].cumsum(0)
    return replace(case_of(LENGTHS, HEADS, QK, V, DTYPE, channel=channel), key_times=keys, query_times=keys + steps[1])


def naive(channel: str, backwards: bool) -> dict[str, int]:
    """Of the naive formulation; scalar operations of the tables only."""
    size, padded, tokens = DTYPE.itemsize, len(LENGTHS) * max(LENGTHS), sum(LENGTHS)
    squares = len(LENGTHS) * max(LENGTHS) ** 2
    pairs, causal = HEADS * squares, sum(n * (n + 1) // 2 for n in LENGTHS)
    row_qk, row_v = HEADS * QK * size, HEADS * V * size
    shared = 2 * squares * 4 + 2 * pairs * 4  # position and time weights, written once and read by each head
    if not backwards:
        rows = 2 * row_qk + (1 + 3) * row_v  # q, k, v, output
        products = padded * (2 * row_qk + (3 + 3) * row_v) + pairs * (4 + size)  # scores out, semantic weights in
        elementwise, depth = pairs * (4 + size), QK + 3 * V
    else:
        rows = 4 * row_qk + (1 + 3 + 1) * row_v  # q, k, v, gradient of the output; gradients of q, k, v
        # Scores and three channels' weights' gradients out; score gradients in, twice, and semantic weights.
        products = padded * (6 * row_qk + 10 * row_v) + pairs * (4 * 4 + 3 * size)
        elementwise, depth = pairs * (2 * 4 + 2 * size), 3 * QK + 6 * V
        shared += 2 * pairs * 4 + 2 * squares * 4  # their gradients, summed over heads
    return {
        "converted": (tokens + padded) * rows,
        "shared": shared,
        "bytes": (tokens + padded) * rows + shared + products + elementwise,
        "multiply_adds": pairs * depth,
        "scalar": causal * (2 if channel == "bucketed" else 1),
    }


def table(channel: str) -> str:
    """Markdown."""
    case = example(channel)
    lines = ["| | forward | naive | backward | naive |", "|---|---|---|---|---|"]
    counted, expected = (forward(case, CORES)[1], backward(case, CORES)[1]), (naive(channel, False), naive(channel, True))

    def line(name: str, values: list[int], factors: list[int]) -> None:
        cells = [x for pair in zip(values, factors, strict=True) for x in pair]
        lines.append(f"| {name} | " + " | ".join(f"{x:,}" for x in cells) + " |")

    line("bytes converted between jagged and padded", [0, 0], [x["converted"] for x in expected])
    line("bytes of dense position and time weights and their gradients", [0, 0], [x["shared"] for x in expected])
    split = 2 * 2 * sum(LENGTHS) * HEADS * V * DTYPE.itemsize  # two channels, in and out
    line("bytes of splitting the output's gradient by channel", [0, split], [0, 0])
    line("bytes to and from global memory, all", [x.bytes_global for x in counted], [x["bytes"] for x in expected])
    line("multiply-adds of the cube", [x.cube_multiply_adds for x in counted], [x["multiply_adds"] for x in expected])
    line("scalar operations (naive: the tables alone)", [x.scalar_operations for x in counted], [x["scalar"] for x in expected])
    plain = "| {} | {:,} | | {:,} | |"
    lines.append(plain.format("elements of vector instructions", *(x.vector_elements for x in counted)))
    lines.append(plain.format("bytes of local memory, at most", *(x.peak_local_bytes for x in counted)))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table("bucketed"), table("functional"), sep="\n\n")
