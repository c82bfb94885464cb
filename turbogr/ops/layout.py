"""How the PyTorch implementations of jagged attention lay out a batch: dense groups, blocks of rows in them, chunks of blocks.

PyTorch has no causal attention on a jagged tensor (T tokens of B sequences laid end to end, cut by `offsets` [B + 1]), and a
call of an operator costs microseconds, which for short histories is more than its arithmetic. So

- sequences of similar lengths form a *group*: G sequences padded to N tokens;
- all groups of a batch lie in one buffer, group after group, each as [G, H, N, D]: one gather a tensor brings them there, and a
  group's part is a batch of matrices for `torch.bmm` without another copy;
- a group's rows are taken in *blocks* of at most BLOCK_ROWS, with the keys up to the block's last row: no [N, N] matrix is ever
  kept, and what causality forbids is computed within a block only;
- the scores of many small blocks lie side by side in one *chunk*, so that elementwise functions run once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from turbogr.ops.copies import on_host, to_device

MAX_WASTE = 1.2
"""A group's padded score elements per valid one, beyond FREE_WASTE."""

FREE_WASTE = 1 << 13
"""Padded score elements (of all heads) that cost less time than the calls for one more group."""

CHUNK_ELEMENTS = 1 << 19
"""Elements of one chunk (2 MiB in float32): they stay in a core's cache between two passes."""

PAIR_ELEMENTS = 3
"""Elements of a pair of tokens besides its heads' scores: a bucket, a bias and the like."""

BLOCK_ROWS = 96


@dataclass(frozen=True)
class Group:
    """`size` sequences padded to `length` tokens, which begin at token `start` of the padded batch; each has `heads` heads."""

    start: int
    size: int
    length: int
    heads: int

    def matrices(self, dense: Tensor) -> Tensor:
        """This group's part [size * heads, length, D] of a buffer that `Layout.spread` made."""
        first = self.start * self.heads
        rows = dense[first : first + self.size * self.heads * self.length]
        return rows.view(self.size * self.heads, self.length, dense.shape[1])

    def tokens(self, dense: Tensor) -> Tensor:
        """This group's part [size, length, ...] of what `Layout.spread_tokens` made."""
        part = dense[self.start : self.start + self.size * self.length]
        return part.view(self.size, self.length, *dense.shape[1:])


@dataclass(frozen=True)
class Block:
    """Rows first..end of a group over the keys 0..end; its pairs of tokens begin at `start` in its chunk."""

    group: Group
    first: int
    end: int
    start: int

    @property
    def rows(self) -> int:
        """end - first."""
        return self.end - self.first

    @property
    def pairs(self) -> int:
        """Pairs of a row and a key, of all sequences."""
        return self.group.size * self.rows * self.end

    def of_pairs(self, chunk: Tensor) -> Tensor:
        """This block's part [size, rows, end] of one number a pair of the chunk."""
        return chunk[self.start : self.start + self.pairs].view(self.group.size, self.rows, self.end)

    def of_scores(self, chunk: Tensor) -> Tensor:
        """This block's part [size * heads, rows, end] of one number a pair and head of the chunk."""
        heads = self.group.heads
        part = chunk[self.start * heads : (self.start + self.pairs) * heads]
        return part.view(self.group.size * heads, self.rows, self.end)

    def queries(self, dense: Tensor) -> Tensor:
        """The block's rows [size * heads, rows, D] of a buffer that `Layout.spread` made."""
        return self.group.matrices(dense)[:, self.first : self.end]

    def keys(self, dense: Tensor) -> Tensor:
        """The rows that it attends to, [size * heads, end, D]."""
        return self.group.matrices(dense)[:, : self.end]

    def add_to_keys(self, dense: Tensor, left: Tensor, right: Tensor) -> None:
        """Adds left [.., end, rows] @ right [.., rows, D] to the rows attended to; the group's first block writes them."""
        keys = self.keys(dense)
        if self.end == self.group.length:
            torch.bmm(left, right, out=keys)
        else:
            keys.baddbmm_(left, right)

    def by_sequence(self, scores: Tensor) -> Tensor:
        """[size * heads, rows, end] as [size, heads, rows, end]."""
        return scores.view(self.group.size, self.group.heads, self.rows, self.end)


@dataclass(frozen=True)
class Chunk:
    """Blocks whose scores lie side by side."""

    blocks: list[Block]
    pairs: int
    heads: int

    def new_scores(self, like: Tensor) -> Tensor:
        """Uninitialised room for one number a pair and head, of the dtype and on the device of `like`."""
        return like.new_empty(self.pairs * self.heads)


class Layout:
    """The groups of a batch and where each token lies in them; empty sequences lie nowhere.

    Args:
        offsets: int64 [B + 1].
        heads: H.
    """

    def __init__(self, offsets: Tensor, heads: int) -> None:
        self.heads = heads
        host = on_host(offsets)
        lengths = host.diff().tolist()
        self.groups: list[Group] = []
        starts, strides = [0] * len(lengths), [0] * len(lengths)
        padded = 0
        for members in partition(lengths, heads):
            group = Group(padded, len(members), lengths[members[0]], heads)
            self.groups.append(group)
            for b in members:
                starts[b], strides[b] = padded, group.length
                padded += group.length
        self.padded = padded
        start, stride = to_device(torch.tensor([starts, strides], dtype=torch.int64), offsets.device)
        self._tokens = int(host[-1])
        sequence = torch.arange(len(lengths), device=offsets.device).repeat_interleave(offsets.diff(), output_size=self._tokens)
        position = torch.arange(self._tokens, device=offsets.device) - offsets[sequence]
        self._place = start[sequence] + position
        head = torch.arange(heads, device=offsets.device)
        self._row = (start[sequence] * heads + position)[:, None] + stride[sequence, None] * head

    def spread(self, x: Tensor) -> Tensor:
        """[T, H, D] to [padded * H, D]: group after group as [G, H, N, D], zero behind a sequence's end."""
        rows, width = self._row.numel(), x.shape[2]
        padded = x.new_empty(rows + 1, width)  # with the row of zeros that padding reads
        padded[:-1].view_as(x).copy_(x)
        padded[-1] = 0
        return padded.index_select(0, self._source)

    def spread_tokens(self, x: Tensor) -> Tensor:
        """[T, ...] to [padded, ...]: group after group as [G, N, ...], zero behind a sequence's end."""
        return x.new_zeros(self.padded, *x.shape[1:]).index_copy_(0, self._place, x)

    def collect(self, dense: Tensor) -> Tensor:
        """[padded * H, D] back to [T, H, D]."""
        return dense.index_select(0, self._row.view(-1)).view(self._tokens, self.heads, dense.shape[1])

    def collect_tokens(self, dense: Tensor) -> Tensor:
        """[padded, ...] back to [T, ...]."""
        return dense.index_select(0, self._place)

    @cached_property
    def _source(self) -> Tensor:
        rows = self._row.view(-1)
        source = rows.new_full((self.padded * self.heads,), rows.numel())
        return source.index_copy_(0, rows, torch.arange(rows.numel(), device=rows.device))

    def chunks(self) -> Iterator[Chunk]:
        """All blocks of all groups, the longest group first; a chunk exceeds CHUNK_ELEMENTS only with a single block."""
        blocks: list[Block] = []
        pairs = 0
        for group in self.groups:
            # The last block comes first: it reaches all keys, whose gradients the others then add to.
            for first in reversed(range(0, group.length, BLOCK_ROWS)):
                block = Block(group, first, min(first + BLOCK_ROWS, group.length), pairs)
                if blocks and (pairs + block.pairs) * (self.heads + PAIR_ELEMENTS) > CHUNK_ELEMENTS:
                    yield Chunk(blocks, pairs, self.heads)
                    block = Block(group, block.first, block.end, 0)
                    blocks, pairs = [], 0
                blocks.append(block)
                pairs += block.pairs
        if blocks:
            yield Chunk(blocks, pairs, self.heads)


def partition(lengths: Sequence[int], heads: int) -> Iterator[list[int]]:
    """Groups of sequences of similar length, the longest sequence first; empty ones belong to none.

    Each group wastes at most MAX_WASTE or FREE_WASTE, and a block of its rows fits CHUNK_ELEMENTS where one sequence's does.
    """
    members: list[int] = []
    valid = 0
    for b in sorted((b for b in range(len(lengths)) if lengths[b]), key=lambda b: -lengths[b]):
        longest = lengths[members[0]] if members else lengths[b]
        padded = (len(members) + 1) * longest**2
        waste = padded - valid - lengths[b] ** 2
        block = (len(members) + 1) * (heads + PAIR_ELEMENTS) * min(longest, BLOCK_ROWS) * longest
        wasteful = waste > (MAX_WASTE - 1) * (padded - waste) and waste * heads > FREE_WASTE
        if members and (wasteful or block > CHUNK_ELEMENTS):
            yield members
            members, valid = [], 0
        members.append(b)
        valid += lengths[b] ** 2
    if members:
        yield members
