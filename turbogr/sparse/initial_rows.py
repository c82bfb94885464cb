"""What rows start from: a truncated normal, drawn block by block, so that a rank can make its own part of a table alone.

The first block comes from the global stream of random numbers, at the place where the table is allocated; block k > 0 has a
stream of its own, seeded by the state of the global one there and by k. So a table that is made whole, and one of which every
rank makes its part, start alike, and the global stream goes on alike after either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

BLOCK_ROWS = 65_536
"""Rows that share a stream."""

_deferred = ContextVar("turbogr_deferred_rows", default=False)


@contextmanager
def deferred_rows() -> Iterator[None]:
    """Within, tables are allocated without memory: their rows are made when a strategy has divided them among the ranks.

    For tables that are too large for one process. `Trainer.init_module()` does it under `TurboGRStrategy`, and so does the
    command line; under other strategies such a table cannot be used.
    """
    token = _deferred.set(True)
    try:
        yield
    finally:
        _deferred.reset(token)


def are_deferred() -> bool:
    """Whether rows are to be made later."""
    return _deferred.get()


class InitialRows:
    """The rows that a table starts from; takes its place in the global stream when it is made.

    Args:
        num_rows: V.
        dim: D.
        std: standard deviation of the normal, which is cut at two of them.
    """

    def __init__(self, num_rows: int, dim: int, std: float) -> None:
        state = torch.get_rng_state().numpy().tobytes()
        self.num_rows, self.dim, self.std = num_rows, dim, std
        self._seed = hashlib.sha256(state).digest()
        self._first = self._draw(min(num_rows, BLOCK_ROWS), None)

    def rows(self, pieces: Iterable[range]) -> Tensor:
        """Float [rows of all pieces, D]; of beginnings and ends of blocks that lie outside, no more than one at a time."""
        pieces = list(pieces)
        made = torch.empty(sum(map(len, pieces)), self.dim)
        done = 0
        for piece in pieces:
            for block in range(piece.start // BLOCK_ROWS, -(-piece.stop // BLOCK_ROWS) if len(piece) else 0):
                start = block * BLOCK_ROWS
                begin, end = max(piece.start, start), min(piece.stop, start + BLOCK_ROWS)
                made[done : done + end - begin] = self._block(block)[begin - start : end - start]
                done += end - begin
        return made

    def _block(self, number: int) -> Tensor:
        if not number:
            return self._first
        seed = hashlib.sha256(self._seed + number.to_bytes(8, "little")).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
        return self._draw(min(BLOCK_ROWS, self.num_rows - number * BLOCK_ROWS), generator)

    def _draw(self, rows: int, generator: torch.Generator | None) -> Tensor:
        return nn.init.trunc_normal_(
            torch.empty(rows, self.dim), std=self.std, a=-2 * self.std, b=2 * self.std, generator=generator
        )
