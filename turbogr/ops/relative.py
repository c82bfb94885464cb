"""What pairs of tokens have between them: the distance of their positions and the gap of their times.

For the PyTorch implementations of attention (`turbogr.ops.layout`): values by pair from tables that all heads share, and the
way of their gradients back into the tables.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.jagged import check_devices
from turbogr.ops.layout import BLOCK_ROWS, Block, Chunk, Layout
from turbogr.ops.time_buckets import TimeBucketing


class PositionTable:
    """The position table as one matrix with entry (r, c) = table[r + zero - c], of which every block of rows is a part.

    A block's row r is at position first + r: with its columns from zero - first on, entry (r, j) is table[first + r - j], and 0
    above the diagonal.

    Args:
        table: float [P], at least as long as the longest sequence.
        layout: of the batch.
    """

    def __init__(self, table: Tensor, layout: Layout) -> None:
        longest = layout.groups[0].length if layout.groups else 0
        rows = min(longest, BLOCK_ROWS)
        self.table, self.longest, self.rows, self.width = table, longest, rows, max(longest + rows - 1, 0)
        self.zero = longest - 1
        if longest:
            # Row r is the reversed table, moved right by r. Strides cannot be negative: the rows are made in reverse.
            reversed_table = F.pad(table[:longest].flip(0), (rows - 1, rows - 1))
            self.matrix = reversed_table.as_strided((rows, self.width), (1, 1)).flip(0)
        self.sums: Tensor | None = None

    def block(self, block: Block) -> Tensor:
        """[rows, end]."""
        return self._part(self.matrix, block)

    def _part(self, matrix: Tensor, block: Block) -> Tensor:
        first = self.zero - block.first
        return matrix[: block.rows, first : first + block.end]

    def accumulate(self, by_pair: Tensor, block: Block) -> None:
        """Adds [G, rows, end], which is zero above the diagonal."""
        if self.sums is None:
            self.sums = torch.zeros_like(self.matrix, dtype=torch.promote_types(self.matrix.dtype, torch.float32))
        self._part(self.sums, block).add_(by_pair[0] if len(by_pair) == 1 else by_pair.sum(0))

    def gradient(self) -> Tensor:
        """Of the whole table: the sums along the matrix's diagonals."""
        total = torch.zeros_like(self.table)
        if self.sums is not None:
            # Each row reversed and padded, then read with one column less: entry (r, c) comes to column width - 1 - c + r.
            skewed = F.pad(self.sums.flip(1), (0, self.rows)).view(-1)[: self.rows * (self.width + self.rows - 1)]
            by_column = skewed.view(self.rows, -1).sum(0, dtype=torch.float64)
            total[: self.longest] = by_column[self.width - 1 - self.zero :][: self.longest]
        return total


class TimeGaps:
    """Differences query time - key time: integers, because they must be exact; narrow ones where those suffice.

    Args:
        layout: of the batch.
        query_times: int64 [T].
        key_times: int64 [T].
    """

    def __init__(self, layout: Layout, query_times: Tensor, key_times: Tensor) -> None:
        ends = [end for times in (query_times, key_times) if times.numel() for end in times.aminmax()]
        base = torch.stack(ends).amin() if ends else 0
        # On the host only: reading values from a device would wait for it.
        narrow = bool(ends) and ends[0].device.type == "cpu" and int(torch.stack(ends).amax() - base) < 2**31 - 1
        dtype = torch.int32 if narrow else torch.int64
        self.query_times, self.key_times = (layout.spread_tokens((x - base).to(dtype)) for x in (query_times, key_times))

    def of(self, chunk: Chunk) -> Tensor:
        """int32 or int64, one a pair of the chunk."""
        gaps = self.key_times.new_empty(chunk.pairs)
        for block in chunk.blocks:
            asked = block.group.tokens(self.query_times)[:, block.first : block.end, None]
            torch.sub(asked, block.group.tokens(self.key_times)[:, None, : block.end], out=block.of_pairs(gaps))
        return gaps


class TimeTable:
    """The time table, and the buckets of a chunk's pairs.

    Args:
        table: float [K].
        gaps: of the batch.
        unit: ticks per unit of the bucket formula.
        divisor: width of a bucket in natural logarithms.
    """

    def __init__(self, table: Tensor, gaps: TimeGaps, unit: float, divisor: float) -> None:
        self.table, self.gaps = table, gaps
        self.bucketing = TimeBucketing.of(table.numel(), unit, divisor, gaps.key_times)
        # Millions of terms are added up: float64 costs nothing here.
        self.sums = torch.zeros(table.numel(), dtype=torch.float64, device=table.device)

    def buckets(self, chunk: Chunk) -> Tensor:
        """int32, one a pair of the chunk."""
        return self.bucketing(self.gaps.of(chunk))

    def accumulate(self, by_pair: Tensor, buckets: Tensor) -> None:
        """Adds the gradients of a chunk's pairs."""
        if buckets.device.type == "cpu":
            self.sums += torch.bincount(buckets, by_pair.double(), minlength=self.sums.numel())
        else:  # bincount would read the largest bucket from the device
            self.sums.index_add_(0, buckets, by_pair.double())

    def gradient(self) -> Tensor:
        """Of the whole table."""
        return self.sums.to(self.table.dtype)


def check_table(operator: str, name: str, table: Tensor, q: Tensor) -> None:
    """Raises ValueError, which names operator and table, if that is not float [1 ... 2^31 - 1] or not where q is."""
    if table.dim() != 1 or not 0 < table.numel() < 2**31 or not table.is_floating_point():
        raise ValueError(
            f"{operator}: {name} is a float table of one dimension and of at most 2^31 - 1 entries; "
            f"got {table.dtype} {list(table.shape)}"
        )
    check_devices(operator, q=q, **{name: table})


def check_bucketing(operator: str, time_unit: float, time_divisor: float) -> None:
    """Raises ValueError, which names the operator, unless both numbers are positive; NaN is not."""
    if not (time_unit > 0 and time_divisor > 0):
        raise ValueError(f"{operator}: time_unit {time_unit} and time_divisor {time_divisor} must be positive")


def check_times(
    operator: str, needed_by: str, q: Tensor, query_times: Tensor | None, key_times: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Both times as int64 [T], where q [T, H, dqk] is.

    Raises:
        ValueError: names the operator, what needs the times and what was found.
    """
    checked, tokens = [], q.shape[0]
    for name, times in (("query_times", query_times), ("key_times", key_times)):
        if times is None or times.shape != (tokens,) or times.dtype not in (torch.int64, torch.int32):
            found = "nothing" if times is None else f"{times.dtype} {list(times.shape)}"
            raise ValueError(f"{operator}: {needed_by} needs {name} as int64 or int32 [{tokens}]; got {found}")
        check_devices(operator, q=q, **{name: times})
        checked.append(times.long())
    return checked[0], checked[1]
