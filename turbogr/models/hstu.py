"""HSTU: Hierarchical Sequential Transduction Units (Zhai et al. 2024, "Actions speak louder than words")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from turbogr.batch import JaggedBatch
from turbogr.models.backbone import Backbone, head_width, positive
from turbogr.models.bias import RelativeBias, TimeBuckets
from turbogr.ops.backend import Backend
from turbogr.ops.dropout import Dropout
from turbogr.ops.gated_norm import gated_norm, unit_norm
from turbogr.ops.hstu_attention import jagged_hstu_attention
from turbogr.ops.masks import CAUSAL
from turbogr.ops.silu_split import silu_split

EPS = 1e-6


class HSTUBlock(nn.Module):
    """One block, on jagged tokens x [T, D].

        U, V, Q, K = split(SiLU(LN(x) W))
        A = SiLU(Q K^T + b) / n, causal
        out = x + W_o Dropout(U * LN(A V)) + b_o

    Both layer norms are without affine parameters, the second runs over all heads jointly; n is the constant longest length.

    Args:
        dim: D.
        num_heads: H.
        qk_dim: width of a head's queries and keys.
        v_dim: width of a head's values and gates.
        max_length: n.
        dropout: on the gated attention output.
        time: buckets of the time bias, or None for position bias alone.
        backend: implementation of the operators.
        mask: who attends to whom.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qk_dim: int,
        v_dim: int,
        max_length: int,
        dropout: float,
        time: TimeBuckets | None,
        backend: Backend = "auto",
        mask: str = CAUSAL,
    ) -> None:
        super().__init__()
        self.backend: Backend = backend
        self.mask = mask
        self.num_heads, self.qk_dim, self.v_dim, self.max_length = num_heads, qk_dim, v_dim, max_length
        self.sizes = [num_heads * v_dim, num_heads * v_dim, num_heads * qk_dim, num_heads * qk_dim]
        self.uvqk = nn.Parameter(torch.empty(dim, sum(self.sizes)).normal_(std=0.02))
        self.out = nn.Linear(num_heads * v_dim, dim)
        nn.init.xavier_uniform_(self.out.weight)
        self.dropout = Dropout(dropout, backend)
        self.bias = RelativeBias(max_length, time)
        self.time = TimeBuckets() if time is None else time

    def forward(self, x: Tensor, batch: JaggedBatch) -> Tensor:
        """float [T, D] to float [T, D]."""
        u, v, q, k = silu_split(unit_norm(x, eps=EPS, backend=self.backend) @ self.uvqk, self.sizes, backend=self.backend)
        attended = jagged_hstu_attention(
            q.unflatten(1, (self.num_heads, self.qk_dim)),
            k.unflatten(1, (self.num_heads, self.qk_dim)),
            v.unflatten(1, (self.num_heads, self.v_dim)),
            batch.offsets,
            scale=1 / self.max_length,
            position_bias=self.bias.by_distance(),
            time_bias=self.bias.time,
            # The time of row i is the *next* event's, the request time, so that at inference the query time takes its place.
            query_times=batch.target_times,
            key_times=batch.timestamps,
            time_unit=self.time.unit,
            time_divisor=self.time.divisor,
            mask=self.mask,
            backend=self.backend,
        ).flatten(1)
        return x + self.out(gated_norm(u, attended, eps=EPS, p=self.dropout.active, backend=self.backend))


class HSTU(Backbone):
    """A stack of HSTU blocks.

    Args:
        dim: D, width of items and tokens.
        num_blocks: how many blocks.
        num_heads: H, heads of each block.
        qk_dim: width of a head's queries and keys; dim / num_heads if None.
        v_dim: width of a head's values and gates; dim / num_heads if None.
        max_length: longest history, and the constant n that attention is divided by.
        dropout: on the input and on each block's gated output.
        time: buckets of the time bias, or None for position bias alone.
        backend: implementation of the operators, see Backbone.
        rematerialise: less memory for more time, see Backbone.
        mask: who attends to whom, see Backbone.

    Raises:
        ConfigurationError: if an option is out of range, or dim is not divisible by num_heads where widths are derived from it.
    """

    def __init__(
        self,
        dim: int = 50,
        num_blocks: int = 2,
        num_heads: int = 1,
        qk_dim: int | None = None,
        v_dim: int | None = None,
        max_length: int = 200,
        dropout: float = 0.2,
        time: TimeBuckets | None = TimeBuckets(),  # noqa: B008 (frozen)
        backend: Backend = "auto",
        rematerialise: bool = False,
        mask: str = CAUSAL,
    ) -> None:
        super().__init__(dim, max_length, dropout, backend, rematerialise, mask)
        positive(self, num_blocks=num_blocks, num_heads=num_heads)
        qk_dim = head_width(self, dim, num_heads) if qk_dim is None else qk_dim
        v_dim = head_width(self, dim, num_heads) if v_dim is None else v_dim
        positive(self, qk_dim=qk_dim, v_dim=v_dim)
        self.blocks = nn.ModuleList(
            HSTUBlock(dim, num_heads, qk_dim, v_dim, max_length, dropout, time, backend, mask) for _ in range(num_blocks)
        )

    def encode(self, x: Tensor, batch: JaggedBatch) -> Tensor:
        """The blocks: float [T, D] to float [T, D]."""
        for block in self.blocks:
            x = self.run(block, x, batch)
        return x
