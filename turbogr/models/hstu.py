"""HSTU: Hierarchical Sequential Transduction Units (Zhai et al. 2024, "Actions speak louder than words")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from turbogr.batch import JaggedBatch
from turbogr.errors import ConfigurationError
from turbogr.models.backbone import Backbone, head_width, positive
from turbogr.models.bias import RelativeBias, TimeBuckets
from turbogr.ops.backend import Backend
from turbogr.ops.dropout import Dropout
from turbogr.ops.gated_norm import gated_norm, unit_norm
from turbogr.ops.hstu_attention import jagged_hstu_attention
from turbogr.ops.hstu_native import Products, check_products
from turbogr.ops.masks import CAUSAL
from turbogr.ops.silu_split import silu_split

EPS = 1e-6

AttentionScale = Literal["constant", "length", "position"]
"""The n that attention is divided by: max_length, the length of the row's history, or the number of keys up to the row."""


class Affine(nn.Module):
    """weight * x + bias, a pair of numbers for each column; starts as the identity.

    Args:
        width: columns of x.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """float [T, width] to float [T, width]."""
        return torch.addcmul(self.bias, x, self.weight)


class HSTUBlock(nn.Module):
    """One block, on jagged tokens x [T, D].

        U, V, Q, K = split(SiLU(LN(x) W + b_w))
        A = SiLU(alpha Q K^T + b) / n, causal
        out = x + W_o Dropout(U * LN(A V)) + b_o

    The second layer norm runs over all heads jointly. By default, as in the public research code, the norms are without affine
    parameters, there is no b_w, alpha is 1 and n is the constant longest length.

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
        affine_norms: both norms have a weight and a bias.
        uvqk_bias: there is a b_w.
        scaled_scores: alpha is 1 / sqrt(qk_dim).
        products: precision of attention's matrix products.
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
        affine_norms: bool = False,
        uvqk_bias: bool = False,
        scaled_scores: bool = False,
        products: Products = "fp32",
    ) -> None:
        super().__init__()
        self.backend: Backend = backend
        self.mask = mask
        self.products: Products = products
        self.num_heads, self.qk_dim, self.v_dim, self.max_length = num_heads, qk_dim, v_dim, max_length
        self.sizes = [num_heads * v_dim, num_heads * v_dim, num_heads * qk_dim, num_heads * qk_dim]
        self.uvqk = nn.Parameter(torch.empty(dim, sum(self.sizes)).normal_(std=0.02))
        self.uvqk_bias = nn.Parameter(torch.zeros(sum(self.sizes))) if uvqk_bias else None
        self.input_affine = Affine(dim) if affine_norms else None
        self.output_affine = Affine(num_heads * v_dim) if affine_norms else None
        self.alpha = qk_dim**-0.5 if scaled_scores else 1.0
        self.out = nn.Linear(num_heads * v_dim, dim)
        nn.init.xavier_uniform_(self.out.weight)
        self.dropout = Dropout(dropout, backend)
        self.bias = RelativeBias(max_length, time)
        self.time = TimeBuckets() if time is None else time

    def forward(self, x: Tensor, batch: JaggedBatch, row_scale: Tensor | None = None) -> Tensor:
        """float [T, D] to float [T, D]; `row_scale` float [T, 1] is 1 / n where each row has an n of its own."""
        u, v, q, k = silu_split(self._project(x), self.sizes, backend=self.backend)
        attended = jagged_hstu_attention(
            q.unflatten(1, (self.num_heads, self.qk_dim)),
            k.unflatten(1, (self.num_heads, self.qk_dim)),
            v.unflatten(1, (self.num_heads, self.v_dim)),
            batch.offsets,
            scale=1 / self.max_length if row_scale is None else 1.0,
            alpha=self.alpha,
            position_bias=self.bias.by_distance(),
            time_bias=self.bias.time,
            # The time of row i is the *next* event's, the request time, so that at inference the query time takes its place.
            query_times=batch.target_times,
            key_times=batch.timestamps,
            time_unit=self.time.unit,
            time_divisor=self.time.divisor,
            mask=self.mask,
            products=self.products,
            backend=self.backend,
        ).flatten(1)
        if row_scale is not None:
            attended = attended * row_scale.to(attended.dtype)
        return x + self.out(self._gate(u, attended))

    def _project(self, x: Tensor) -> Tensor:
        normed = unit_norm(x, eps=EPS, backend=self.backend)
        if self.input_affine is not None:
            normed = self.input_affine(normed)
        return normed @ self.uvqk if self.uvqk_bias is None else torch.addmm(self.uvqk_bias, normed, self.uvqk)

    def _gate(self, u: Tensor, attended: Tensor) -> Tensor:
        if self.output_affine is None:
            return gated_norm(u, attended, eps=EPS, p=self.dropout.active, backend=self.backend)
        return self.dropout(u * self.output_affine(unit_norm(attended, eps=EPS, backend=self.backend)))


class HSTU(Backbone):
    """A stack of HSTU blocks.

    The defaults are the public research code's (`generative_recommenders/research`). The options from `affine_norms` to
    `attention_scale` lead to the variant for production of the same repository (`STULayer` in
    `generative_recommenders/modules/stu.py`).

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
        affine_norms: both layer norms of a block have a weight and a bias (STULayer).
        uvqk_bias: the projection to U, V, Q and K has a bias (STULayer).
        scaled_scores: Q K^T is multiplied by 1 / sqrt(qk_dim) inside SiLU (STULayer's default `attn_alpha`).
        attention_scale: what attention is divided by. `constant`: max_length (the research code and STULayer). `length`: the
            length of the row's own history, `position`: the number of events up to the row itself; the public kernels take any
            such factor a row (`attn_scale` of `hstu_mha`). With `length`, a row of training knows how much follows it.
        products: `bf16` lets the C++ kernel round the factors of attention's matrix products to bfloat16, for speed at errors
            of 3e-3 (`turbogr.ops.hstu_native.Products`); the other back ends do not.

    Raises:
        ConfigurationError: if an option is out of range, or dim is not divisible by num_heads where widths are derived from it.
    """

    # 32 buckets are the paper's; with the public divisor they would end at 4.2 hours, so they reach 103 days.
    PRESET: ClassVar[Mapping[str, Any]] = {"time": TimeBuckets(count=32, divisor=0.5)}

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
        affine_norms: bool = False,
        uvqk_bias: bool = False,
        scaled_scores: bool = False,
        attention_scale: AttentionScale = "constant",
        products: Products = "fp32",
    ) -> None:
        super().__init__(dim, max_length, dropout, backend, rematerialise, mask)
        positive(self, num_blocks=num_blocks, num_heads=num_heads)
        qk_dim = head_width(self, dim, num_heads) if qk_dim is None else qk_dim
        v_dim = head_width(self, dim, num_heads) if v_dim is None else v_dim
        positive(self, qk_dim=qk_dim, v_dim=v_dim)
        check_products("HSTU", products)
        if attention_scale not in get_args(AttentionScale):
            raise ConfigurationError(
                f"HSTU: attention_scale must be one of {', '.join(get_args(AttentionScale))}, got {attention_scale!r}"
            )
        self.attention_scale: AttentionScale = attention_scale
        widths, variant = (dim, num_heads, qk_dim, v_dim), (affine_norms, uvqk_bias, scaled_scores, products)
        self.blocks = nn.ModuleList(
            HSTUBlock(*widths, max_length, dropout, time, backend, mask, *variant) for _ in range(num_blocks)
        )

    def encode(self, x: Tensor, batch: JaggedBatch) -> Tensor:
        """The blocks: float [T, D] to float [T, D]."""
        row_scale = self._row_scale(x, batch.offsets)
        for block in self.blocks:
            x = self.run(block, x, batch, row_scale)
        return x

    def _row_scale(self, x: Tensor, offsets: Tensor) -> Tensor | None:
        """1 / n of each row, float [T, 1]; None where n is the same for all."""
        if self.attention_scale == "constant":
            return None
        lengths = offsets.diff()
        if self.attention_scale == "length":
            n = lengths.repeat_interleave(lengths, output_size=x.shape[0])
        else:
            starts = offsets[:-1].repeat_interleave(lengths, output_size=x.shape[0])
            n = torch.arange(1, x.shape[0] + 1, device=x.device) - starts
        return n.to(x.dtype).reciprocal()[:, None]
