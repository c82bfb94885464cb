"""SASRec: self-attentive sequential recommendation (Kang and McAuley 2018), in the form of the public HSTU code's baseline."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.batch import JaggedBatch
from turbogr.models.backbone import Backbone, head_width, positive
from turbogr.ops.backend import Backend
from turbogr.ops.dropout import Dropout
from turbogr.ops.gated_norm import unit_norm
from turbogr.ops.masks import CAUSAL
from turbogr.ops.softmax_attention import jagged_softmax_attention

EPS = 1e-8


class SASRecBlock(nn.Module):
    """One block, on jagged tokens x [T, D].

        q = LN(x),  h = LN(q + MHA(q, x, x)),  out = h + FFN(h)

    Keys and values are un-normed, the residual is the normed query, layer norms are without affine parameters; FFN is
    D -> F, ReLU, dropout, F -> D, dropout. (The public code also drops attention weights; this block does not.)

    Args:
        dim: D.
        num_heads: H; a head has width D / H.
        ffn_dim: F.
        dropout: in the feed-forward network.
        backend: implementation of the operators.
        mask: who attends to whom.
    """

    def __init__(
        self, dim: int, num_heads: int, ffn_dim: int, dropout: float, backend: Backend = "auto", mask: str = CAUSAL
    ) -> None:
        super().__init__()
        self.num_heads, self.mask = num_heads, mask
        self.backend: Backend = backend
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.expand, self.contract = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
        self.dropout = Dropout(dropout, backend)
        for linear in (self.query, self.key, self.value, self.out, self.expand, self.contract):
            nn.init.xavier_normal_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, batch: JaggedBatch) -> Tensor:
        """float [T, D] to float [T, D]."""
        normed = unit_norm(x, eps=EPS, backend=self.backend)
        q, k, v = (
            project(source).unflatten(1, (self.num_heads, -1))
            for project, source in ((self.query, normed), (self.key, x), (self.value, x))
        )
        attended = jagged_softmax_attention(
            q, k, v, batch.offsets, scale=q.shape[-1] ** -0.5, mask=self.mask, backend=self.backend
        )
        h = unit_norm(normed + self.out(attended.flatten(1)), eps=EPS, backend=self.backend)
        hidden = self.dropout(F.relu(self.expand(h)))
        return h + self.dropout(self.contract(hidden))


class SASRec(Backbone):
    """A stack of SASRec blocks; it has no notion of time.

    Args:
        dim: D, width of items and tokens.
        num_blocks: how many blocks.
        num_heads: H, heads of each block.
        ffn_dim: hidden width of the feed-forward networks; dim if None.
        max_length: longest history.
        dropout: on the input and in the feed-forward networks.
        backend: implementation of the operators, see Backbone.
        rematerialise: less memory for more time, see Backbone.
        mask: who attends to whom, see Backbone.

    Raises:
        ConfigurationError: if an option is out of range, or dim is not divisible by num_heads.
    """

    def __init__(
        self,
        dim: int = 50,
        num_blocks: int = 2,
        num_heads: int = 1,
        ffn_dim: int | None = None,
        max_length: int = 200,
        dropout: float = 0.2,
        backend: Backend = "auto",
        rematerialise: bool = False,
        mask: str = CAUSAL,
    ) -> None:
        super().__init__(dim, max_length, dropout, backend, rematerialise, mask)
        ffn_dim = dim if ffn_dim is None else ffn_dim
        positive(self, num_blocks=num_blocks, num_heads=num_heads, ffn_dim=ffn_dim)
        head_width(self, dim, num_heads)
        self.blocks = nn.ModuleList(SASRecBlock(dim, num_heads, ffn_dim, dropout, backend, mask) for _ in range(num_blocks))

    def encode(self, x: Tensor, batch: JaggedBatch) -> Tensor:
        """The blocks: float [T, D] to float [T, D]."""
        for block in self.blocks:
            x = self.run(block, x, batch)
        return x
