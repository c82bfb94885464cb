"""What negatives take in the paper's FuXi-large: its Table 7, and the bytes of turbogr's ways at the same shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from _results import markdown_table

from turbogr.negative_bytes import NegativeLoad, choices

WIDTH, LENGTH = 1024, 2048
TABLE_7 = {32: (22.21, 17.42), 64: (31.64, 23.44), 128: (50.39, 34.27)}
"""Negatives -> GB on the device in the paper: plain, offloaded."""
PAPER_BATCH = 15
"""Histories of the device's batch of Table 7: its differences are the tensor [T, R, D] of that many."""
ITEMS = (1_000_000, 32_038_725)
"""A catalogue, and all videos of KuaiRand-27K; the paper filters these and does not say how many are left."""


GATHERED = "gathered"


@dataclass(frozen=True)
class Extrapolated:
    """One line of the table.

    Attributes:
        items: of the catalogue.
        batch: histories of 2,048 tokens.
        negatives: R.
        rest: GB of all else, by Table 7.
        gigabytes: choice -> GB of the negatives on the device.
        host: GB on the host where they are offloaded.
    """

    items: int
    batch: int
    negatives: int
    rest: float
    gigabytes: dict[str, float]
    host: float

    def saved(self, choice: str) -> float:
        """Share of the whole step's memory, against embeddings that are gathered."""
        plain = self.rest + self.gigabytes[GATHERED]
        return 1 - (self.rest + self.gigabytes[choice]) / plain


def rest_of_the_paper() -> tuple[float, float]:
    """GB that Table 7 leaves without negatives, and by which it grows with each; the line through its ends."""
    (few, (first, _)), (many, (last, _)) = min(TABLE_7.items()), max(TABLE_7.items())
    growth = (last - first) / (many - few)
    return first - few * growth, growth


def extrapolated(
    items: tuple[int, ...] = ITEMS, batches: tuple[int, ...] = (8, 15), negatives: tuple[int, ...] = (32, 64, 128, 512)
) -> Iterator[Extrapolated]:
    """FuXi-large with uniform negatives of catalogues, batches of histories of 2,048 tokens, and numbers of negatives.

    How much of all else hangs on the batch is not known: it is taken as it was with 15 histories, so that the savings with
    fewer look smaller than they are.
    """
    rest, _ = rest_of_the_paper()
    for num_items, batch, count in product(items, batches, negatives):
        tokens = batch * LENGTH
        whole, half = (NegativeLoad.expected(tokens, drawn, WIDTH, num_items) for drawn in (count, count // 2))
        found = choices(whole, half)
        gigabytes = {name: each.device / 1e9 for name, each in found.items()}
        yield Extrapolated(num_items, batch, count, rest, gigabytes, found["offload"].host / 1e9)


def extrapolated_table() -> str:
    """GB of the negatives on the device, and with offloading on the host, as Markdown."""
    lines = list(extrapolated())
    names = list(lines[0].gigabytes)
    rows = [
        [
            *(f"{number:,}" for number in (line.items, line.batch, line.negatives)),
            *(f"{line.gigabytes[name]:.2f}" for name in names),
            f"{line.host:.1f}",
        ]
        for line in lines
    ]
    return markdown_table(["items", "histories", "negatives", *names, "host, offload"], rows, left=0)
