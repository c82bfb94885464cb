"""What the kernels of embedding look-up and negative logits move, against naive formulations: the tables of their READMEs.

`python -m tests.ascendc.lookup_counters` prints both; `test_lookup_counters.py` compares. All is counted by the stand-in, and
the naive formulations are made of the same kernels. Of the look-up: ids padded to the longest sequence, with row 0 for
padding. Of negative logits: the sampled rows gathered to [T, R, D] in global memory and multiplied there; backward, their
gradients written to [T, R, D] and then summed by row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tests.ascendc import lookup, negatives
from tests.ascendc.build import Counters
from tests.ascendc.lookup import Batch
from tests.ascendc.negatives import Case

LENGTHS = [512, 357, 211, 120, 96, 64, 33, 7]
ROWS = [5000, 700, 60]
WIDTH = 64
TOKENS, SAMPLES, NEGATIVE_ROWS = 96, 64, 3000
DTYPE = torch.bfloat16
CORES = 24


def whole(shape: tuple[int, ...], below: int, seed: int) -> Tensor:
    """Whole random numbers: the same on every machine."""
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def padded(batch: Batch, lengths: list[int], to: int) -> Batch:
    """The same ids as [sequences, to], filled up with id 0, as a look-up without jagged tensors takes them: for every table."""
    parts = batch.ids.split(batch.splits.diff().tolist())
    rows = [pad_sequence([x.new_zeros(to), *x.split(lengths)], batch_first=True)[1:] for x in parts]
    return Batch(batch.tables, torch.cat([x.flatten() for x in rows]), torch.arange(len(parts) + 1) * len(lengths) * to)


def lookups() -> Batch:
    """A feature of each table for every token; low ids are asked for more often."""
    tokens = sum(LENGTHS)
    ids = [(whole((tokens,), v * v, k).sqrt().long() - (v - 1)).abs() for k, v in enumerate(ROWS)]
    tables = [torch.zeros(v, WIDTH, dtype=DTYPE) for v in ROWS]
    return Batch(tables, torch.cat(ids), torch.arange(len(ROWS) + 1) * tokens)


def lookup_counters() -> list[Counters]:
    """Forward, naive; backward, naive."""
    batch, naive = lookups(), padded(lookups(), LENGTHS, max(LENGTHS))
    forward = [lookup.forward(x, CORES)[1] for x in (batch, naive)]
    return [*forward, *(lookup.backward(x, torch.zeros(len(x.ids), WIDTH, dtype=DTYPE), CORES)[1] for x in (batch, naive))]


def expanded(case: Case, gradient: Tensor) -> tuple[list[Tensor], list[Counters], list[Counters]]:
    """Logits and the gradient of the rows by way of [T, R, D], and the launches of forward and backward."""
    flat, (tokens, samples) = case.index.flatten(), case.index.shape
    by_row = Batch([case.rows], flat, torch.tensor([0, len(flat)]))
    gathered, gather = lookup.forward(by_row, CORES)
    apart = Case(case.output, gathered, torch.arange(len(flat)).view(tokens, samples))
    logits, products = negatives.forward(apart, CORES)
    _, outer, spread = negatives.backward(apart, gradient, CORES)
    (of_rows,), sums = lookup.backward(by_row, outer, CORES)
    return [logits, of_rows], [gather, products], [gather, spread, sums]


def negative_case() -> Case:
    """The batch that is counted."""
    output, rows = (torch.zeros(n, WIDTH, dtype=DTYPE) for n in (TOKENS, NEGATIVE_ROWS))
    return Case(output, rows, whole((TOKENS, SAMPLES), NEGATIVE_ROWS, 5))


def negative_counters() -> list[list[Counters]]:
    """Forward, naive; backward, naive: of each the launches."""
    case, gradient = negative_case(), torch.zeros(TOKENS, SAMPLES, dtype=DTYPE)
    _, forward, backward = expanded(case, gradient)
    return [[negatives.forward(case, CORES)[1]], forward, [negatives.backward(case, gradient, CORES)[2]], backward]


LINES = {
    "bytes from global memory": "bytes_global_to_local",
    "bytes to global memory": "bytes_local_to_global",
    "copies": "copies",
    "scalar operations": "scalar_operations",
    "elements of vector instructions": "vector_elements",
    "elements added atomically": "atomic_elements",
}


def markdown(launches: list[list[Counters]], more: dict[str, list[int]]) -> str:
    """A table of columns, each of one launch or several."""
    lines = ["| | forward | naive | backward | naive |", "|---|---|---|---|---|"]
    numbers = {name: [sum(getattr(x, field) for x in column) for column in launches] for name, field in LINES.items()}
    numbers |= more | {"bytes of local memory, at most": [max(x.peak_local_bytes for x in column) for column in launches]}
    lines += [f"| {name} | " + " | ".join(f"{x:,}" for x in values) + " |" for name, values in numbers.items()]
    return "\n".join(lines)


def lookup_table() -> str:
    """Markdown."""
    return markdown([[x] for x in lookup_counters()], {})


def negative_table() -> str:
    """Markdown."""
    everything = TOKENS * SAMPLES * WIDTH * DTYPE.itemsize
    return markdown(negative_counters(), {"bytes of [T, R, D] in global memory": [0, everything, 0, 2 * everything]})


if __name__ == "__main__":
    print(lookup_table(), negative_table(), sep="\n\n")
