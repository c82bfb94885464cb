"""What the PyTorch implementations of jagged operators share: groups of similar lengths and blocks of rows.

A jagged tensor of T tokens is B sequences laid end to end, cut by int64 `offsets` [B + 1]. PyTorch has no causal attention on
that layout, so sequences of similar lengths are gathered into small dense groups; rows are taken in blocks, so that no
[length, length] matrix is ever kept, and keys behind a block's last row (which causality forbids) are not computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_WASTE = 1.2
"""A group's padded score elements per valid one."""

GROUP_ELEMENTS = 1 << 19
"""Score elements of one block of rows (2 MiB in float32): stays in a core's cache between two passes."""

BLOCK_ROWS = 128


@dataclass(frozen=True)
class LengthGroup:
    """Sequences of similar length, gathered into a dense [G, N] block.

    Attributes:
        tokens: int64 [G, N], index of each token in the jagged tensor; positions behind a sequence's end repeat its last token.
        valid: bool [G, N], False behind a sequence's end; None where all are valid.
    """

    tokens: Tensor
    valid: Tensor | None

    @property
    def length(self) -> int:
        """N, the longest sequence of the group."""
        return self.tokens.shape[1]

    def gather(self, jagged: Tensor) -> Tensor:
        """[T, H, D] to [G, H, N, D]."""
        size, length = self.tokens.shape
        rows = jagged.index_select(0, self.tokens.view(-1))
        return rows.view(size, length, *jagged.shape[1:]).transpose(1, 2)

    def gather_times(self, times: Tensor) -> Tensor:
        """[T] to [G, N]."""
        return times.index_select(0, self.tokens.view(-1)).view_as(self.tokens)

    def gather_gradient(self, jagged: Tensor) -> Tensor:
        """[T, H, D] to [G, H, N, D], zero behind a sequence's end."""
        dense = self.gather(jagged)
        return dense if self.valid is None else dense * self.valid[:, None, :, None]

    def scatter(self, dense: Tensor, out: Tensor) -> None:
        """Writes the valid part of [G, H, N, D] to its places in `out` [T, H, D]."""
        rows = dense.transpose(1, 2)
        if self.valid is None:
            out.index_copy_(0, self.tokens.view(-1), rows.reshape(-1, *out.shape[1:]))
        else:
            out.index_copy_(0, self.tokens[self.valid], rows[self.valid])


def without_autocast(like: Tensor) -> torch.autocast:
    """Context in which products keep their operands' dtype: an operator's arithmetic is not the caller's to change."""
    return torch.autocast(like.device.type, enabled=False)


def check_attention(operator: str, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Checks what all jagged attention operators ask: q, k [T, H, dqk], v [T, H, dv], offsets rising from 0 to T.

    The values of offsets are checked on the host only: reading them from a device would wait for it.

    Returns:
        offsets as int64: int32 ones are widened.

    Raises:
        ValueError: names the operator, the argument and what was found.
    """
    if q.dim() != 3 or k.shape != q.shape or v.dim() != 3 or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"{operator}: q and k are [T, H, dqk] and v is [T, H, dv]; "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if not (q.is_floating_point() and q.dtype == k.dtype == v.dtype):
        raise ValueError(f"{operator}: q, k and v share one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    offsets = check_offsets(operator, offsets, q.shape[0])
    # Elements are counted in 64 bits everywhere; but matrix products take each of their sizes in 32 bits.
    largest = max(q.shape[2], v.shape[2], longest_of(offsets))
    if largest >= 2**31:
        raise ValueError(f"{operator}: a width or a sequence of {largest:,} is beyond 2^31 - 1")
    return offsets


def check_offsets(operator: str, offsets: Tensor, tokens: int) -> Tensor:
    """`offsets` as int64 [B + 1], if they are int64 or int32 and rise from 0 to `tokens`; values are checked on the host only.

    Raises:
        ValueError: names the operator and what was found.
    """
    if offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32) or offsets.numel() < 1:
        raise ValueError(f"{operator}: offsets is int64 or int32 [B + 1]; got {offsets.dtype} {list(offsets.shape)}")
    if offsets.device.type == "cpu":
        first, last = int(offsets[0]), int(offsets[-1])
        if first != 0 or last != tokens or bool((offsets.diff() < 0).any()):
            raise ValueError(f"{operator}: offsets rise from 0 to {tokens}; got first {first}, last {last}, or a fall between")
    return offsets.long()


def longest_of(offsets: Tensor) -> int:
    """The longest sequence where offsets are on the host; 0 elsewhere, and for a batch of none."""
    return int(offsets.diff().max()) if offsets.device.type == "cpu" and offsets.numel() > 1 else 0


def length_groups(offsets: Tensor, heads: int) -> list[LengthGroup]:
    """Partitions the sequences of a batch into groups of similar length; empty sequences belong to none.

    Args:
        offsets: int64 [B + 1].
        heads: heads that one block of rows holds at once.

    Returns:
        Groups from the longest to the shortest; each wastes at most MAX_WASTE and fits GROUP_ELEMENTS where one sequence does.
    """
    lengths = offsets.diff().tolist()
    order = sorted((b for b in range(len(lengths)) if lengths[b]), key=lambda b: -lengths[b])
    return [_group(offsets, lengths, members) for members in _partition(order, lengths, heads)]


def _partition(order: Sequence[int], lengths: Sequence[int], heads: int) -> Iterator[list[int]]:
    members: list[int] = []
    valid = 0
    for b in order:
        longest = lengths[members[0]] if members else lengths[b]
        padded = (len(members) + 1) * longest**2
        block = (len(members) + 1) * heads * min(longest, BLOCK_ROWS) * longest
        if members and (padded > MAX_WASTE * (valid + lengths[b] ** 2) or block > GROUP_ELEMENTS):
            yield members
            members, valid = [], 0
        members.append(b)
        valid += lengths[b] ** 2
    if members:
        yield members


def _group(offsets: Tensor, lengths: Sequence[int], members: Sequence[int]) -> LengthGroup:
    longest = lengths[members[0]]
    rows = torch.tensor(members, device=offsets.device)
    starts, counts = offsets[rows, None], (offsets[rows + 1] - offsets[rows])[:, None]
    position = torch.arange(longest, device=offsets.device)[None]
    all_valid = lengths[members[-1]] == longest
    tokens = starts + position if all_valid else starts + torch.minimum(position, counts - 1)
    return LengthGroup(tokens=tokens, valid=None if all_valid else position < counts)


def row_blocks(length: int) -> Iterator[tuple[int, int]]:
    """(first, behind last) row of each block of at most BLOCK_ROWS rows."""
    for first in range(0, length, BLOCK_ROWS):
        yield first, min(first + BLOCK_ROWS, length)
