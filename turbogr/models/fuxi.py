"""FuXi: FuXi-alpha's blocks (Ye et al. 2025), with the time channel of FuXi-alpha or of FuXi-gamma."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.batch import JaggedBatch
from turbogr.models.backbone import Backbone, head_width, positive
from turbogr.models.bias import RelativeBias
from turbogr.models.time_encoders import FunctionalTime, TimeEncoder
from turbogr.ops.backend import Backend
from turbogr.ops.dropout import Dropout
from turbogr.ops.fuxi_attention import TimeChannel, jagged_fuxi_attention
from turbogr.ops.gated_norm import gated_norm, unit_norm
from turbogr.ops.masks import CAUSAL
from turbogr.ops.silu_split import silu_split

EPS = 1e-6


class FuXiBlock(nn.Module):
    """One block, on jagged tokens x [T, D].

        U, V, Q, K = split(SiLU(RMS(x) W))
        O = concat over heads of [P V, T V, S V],  S = SiLU(Q K^T) / n,  P = w_pos[j - i],  T = the time channel; all causal
        z = x + W_0 Dropout(U * RMS(O)) + b_0
        r = Dropout(RMS(z)),  out = z + W_2 (SiLU(W_1 r) * W_3 r)

    The norms are without affine parameters, the one of O runs over all heads and channels jointly; n is the constant longest
    length; P and T are shared by the heads.

    Args:
        dim: D.
        num_heads: H.
        qk_dim: width of a head's queries and keys.
        v_dim: width of a head's values; its gates are three times as wide, for three channels.
        ffn_dim: width of the feed-forward network's hidden layer.
        max_length: n.
        dropout: on the gated attention output and on the feed-forward network's input.
        backend: implementation of the operators.
        mask: who attends to whom.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qk_dim: int,
        v_dim: int,
        ffn_dim: int,
        max_length: int,
        dropout: float,
        backend: Backend = "auto",
        mask: str = CAUSAL,
    ) -> None:
        super().__init__()
        self.backend: Backend = backend
        self.mask = mask
        self.num_heads, self.qk_dim, self.v_dim, self.max_length = num_heads, qk_dim, v_dim, max_length
        self.sizes = [3 * num_heads * v_dim, num_heads * v_dim, num_heads * qk_dim, num_heads * qk_dim]
        self.uvqk = nn.Parameter(torch.empty(dim, sum(self.sizes)).normal_(std=0.02))
        self.bias = RelativeBias(max_length, None)
        self.out = nn.Linear(3 * num_heads * v_dim, dim)
        self.gate, self.expand = nn.Linear(dim, ffn_dim, bias=False), nn.Linear(dim, ffn_dim, bias=False)
        self.contract = nn.Linear(ffn_dim, dim, bias=False)
        for linear in (self.out, self.gate, self.expand, self.contract):
            nn.init.xavier_uniform_(linear.weight)
        self.dropout = Dropout(dropout, backend)

    def forward(self, x: Tensor, batch: JaggedBatch, time: TimeChannel) -> Tensor:
        """float [T, D] to float [T, D]; `time` holds the time arguments of the attention."""
        u, v, q, k = silu_split(self._rms(x) @ self.uvqk, self.sizes, backend=self.backend)
        attended = jagged_fuxi_attention(
            q.unflatten(1, (self.num_heads, self.qk_dim)),
            k.unflatten(1, (self.num_heads, self.qk_dim)),
            v.unflatten(1, (self.num_heads, self.v_dim)),
            batch.offsets,
            scale=1 / self.max_length,
            position_bias=self.bias.by_distance(),
            mask=self.mask,
            backend=self.backend,
            **time,
        ).flatten(1)
        z = x + self.out(gated_norm(u, attended, eps=EPS, p=self.dropout.active, norm="rms", backend=self.backend))
        r = self._rms(z, p=self.dropout.active)
        return z + self.contract(F.silu(self.gate(r)) * self.expand(r))

    def _rms(self, x: Tensor, p: float = 0.0) -> Tensor:
        """Dropout(RMS(x))."""
        return unit_norm(x, eps=EPS, p=p, norm="rms", backend=self.backend)


class FuXi(Backbone):
    """A stack of FuXi blocks.

    Args:
        dim: D, width of items and tokens.
        num_blocks: how many blocks.
        num_heads: H, heads of each block.
        qk_dim: width of a head's queries and keys; dim / num_heads if None.
        v_dim: width of a head's values; dim / num_heads if None.
        ffn_multiplier: m, the feed-forward networks' hidden width is m * D; the paper takes 1 for MovieLens-1M, 4 for -20M.
        max_length: longest history, and the constant n that semantic attention is divided by.
        dropout: on the input, on each block's gated output and on its feed-forward network's input.
        time_encoder: FunctionalTime (FuXi-gamma's, shared by all blocks) or BucketedTime (FuXi-alpha's), with the unit of the
            data's times; None is FunctionalTime for times in seconds.
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
        ffn_multiplier: int = 1,
        max_length: int = 200,
        dropout: float = 0.2,
        time_encoder: TimeEncoder | None = None,
        backend: Backend = "auto",
        rematerialise: bool = False,
        mask: str = CAUSAL,
    ) -> None:
        super().__init__(dim, max_length, dropout, backend, rematerialise, mask)
        positive(self, num_blocks=num_blocks, num_heads=num_heads, ffn_multiplier=ffn_multiplier)
        qk_dim = head_width(self, dim, num_heads) if qk_dim is None else qk_dim
        v_dim = head_width(self, dim, num_heads) if v_dim is None else v_dim
        positive(self, qk_dim=qk_dim, v_dim=v_dim)
        self.blocks = nn.ModuleList(
            FuXiBlock(dim, num_heads, qk_dim, v_dim, ffn_multiplier * dim, max_length, dropout, backend, mask)
            for _ in range(num_blocks)
        )
        self.time_encoder: TimeEncoder = FunctionalTime() if time_encoder is None else time_encoder
        self.time_encoder.allocate(num_blocks)

    def encode(self, x: Tensor, batch: JaggedBatch) -> Tensor:
        """The blocks: float [T, D] to float [T, D]."""
        for index, block in enumerate(self.blocks):
            x = self.run(block, x, batch, self.time_encoder.channel(index, batch))
        return x
