"""The padded dense formulation that public research trainers use: the baseline of whole training steps.

Every history is padded to the batch's longest, scores and biases are [B, H, N, N] and [B, N, N] tensors, the negatives'
embeddings are gathered to [T, R, D] and normalised there, and the table is an ordinary dense parameter. The weights are those
of a TurboGR model: both sides are the same function of them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from turbogr.batch import JaggedBatch
from turbogr.losses import SampledSoftmax
from turbogr.models import hstu, sasrec
from turbogr.models.bias import RelativeBias, TimeBuckets
from turbogr.models.fuxi import EPS as FUXI_EPS
from turbogr.models.fuxi import FuXi, FuXiBlock
from turbogr.models.hstu import HSTUBlock
from turbogr.models.retriever import GenerativeRetriever
from turbogr.models.sasrec import SASRecBlock
from turbogr.models.time_encoders import BucketedTime
from turbogr.ops.normalise import normalised


class PaddedTrainer(nn.Module):
    """The baseline's model and loss.

    Args:
        model: whose backbone it shares (give it a copy) and whose table it copies.
        dropout: probability, the model's.
    """

    def __init__(self, model: GenerativeRetriever, dropout: float) -> None:
        super().__init__()
        self.backbone, self.p = model.backbone, dropout
        self.table = nn.Embedding.from_pretrained(model.embeddings.weight.detach().clone(), freeze=False)
        assert isinstance(model.loss, SampledSoftmax)
        self.temperature = model.loss.temperature

    def loss(self, batch: JaggedBatch) -> Tensor:
        """Mean loss over the valid positions of the padded batch."""
        lengths, longest = batch.lengths, int(batch.lengths.max())
        position = torch.arange(longest)
        valid = position < lengths[:, None]

        def padded(jagged: Tensor) -> Tensor:
            return jagged.new_zeros(len(lengths), longest).masked_scatter(valid, jagged)

        x = self.table(padded(batch.values)) * self.backbone.dim**0.5 + self.backbone.positions[:longest]
        x = F.dropout(x, self.p) * valid[..., None]
        asked, happened = padded(batch.target_times), padded(batch.timestamps)
        assert isinstance(self.backbone.blocks, nn.ModuleList)
        for index, block in enumerate(self.backbone.blocks):
            x = self._block(index, block)(x, asked, happened) * valid[..., None]
        assert batch.negatives is not None
        output = normalised(x[valid])
        positive = normalised(self.table(batch.targets))
        negative = normalised(self.table(batch.negatives))
        logits = torch.einsum("td,trd->tr", output, negative)
        logits = logits.masked_fill(batch.negatives == batch.targets[:, None], -torch.inf)
        logits = torch.cat([(output * positive).sum(1, keepdim=True), logits], 1) / self.temperature
        return -F.log_softmax(logits, dim=1)[:, 0].mean()

    def _block(self, index: int, block: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The block as a function of x [B, N, D] and the times of rows and keys [B, N]."""
        if isinstance(block, HSTUBlock):
            return lambda x, asked, happened: self._hstu(block, x, asked, happened)
        if isinstance(block, SASRecBlock):
            return lambda x, asked, happened: self._sasrec(block, x)
        assert isinstance(block, FuXiBlock)
        assert isinstance(self.backbone, FuXi)
        encoder = self.backbone.time_encoder
        assert isinstance(encoder, BucketedTime)
        return lambda x, asked, happened: self._fuxi(
            block, x, _by_time(encoder.tables[index], encoder.buckets, asked, happened)
        )

    def _hstu(self, block: HSTUBlock, x: Tensor, asked: Tensor, happened: Tensor) -> Tensor:
        u, v, q, k = F.silu(F.layer_norm(x, x.shape[-1:], eps=hstu.EPS) @ block.uvqk).split(block.sizes, dim=-1)
        q, k, v = (_heads(t, block.num_heads) for t in (q, k, v))
        assert block.bias.time is not None
        bias = _by_position(block.bias, x.shape[1]) + _by_time(block.bias.time, block.time, asked, happened)
        weights = F.silu(torch.einsum("bihd,bjhd->bhij", q, k) + bias[:, None]) / block.max_length * _causal(x.shape[1])
        attended = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
        gated = u * F.layer_norm(attended, attended.shape[-1:], eps=hstu.EPS)
        return x + block.out(F.dropout(gated, self.p))

    def _sasrec(self, block: SASRecBlock, x: Tensor) -> Tensor:
        normed = F.layer_norm(x, x.shape[-1:], eps=sasrec.EPS)
        q, k, v = (_heads(t, block.num_heads) for t in (block.query(normed), block.key(x), block.value(x)))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(_causal(x.shape[1]) == 0, -torch.inf).softmax(-1)
        attended = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)
        h = F.layer_norm(normed + block.out(attended), x.shape[-1:], eps=sasrec.EPS)
        return h + F.dropout(block.contract(F.dropout(F.relu(block.expand(h)), self.p)), self.p)

    def _fuxi(self, block: FuXiBlock, x: Tensor, by_time: Tensor) -> Tensor:
        u, v, q, k = F.silu(F.rms_norm(x, x.shape[-1:], eps=FUXI_EPS) @ block.uvqk).split(block.sizes, dim=-1)
        q, k, v = (_heads(t, block.num_heads) for t in (q, k, v))
        causal = _causal(x.shape[1])
        semantic = F.silu(torch.einsum("bihd,bjhd->bhij", q, k)) / block.max_length * causal
        channels = [
            torch.einsum("ij,bjhd->bihd", _by_position(block.bias, x.shape[1]) * causal, v),
            torch.einsum("bij,bjhd->bihd", by_time * causal, v),
            torch.einsum("bhij,bjhd->bihd", semantic, v),
        ]
        attended = torch.cat(channels, dim=-1).flatten(2)
        z = x + block.out(F.dropout(u * F.rms_norm(attended, attended.shape[-1:], eps=FUXI_EPS), self.p))
        r = F.dropout(F.rms_norm(z, z.shape[-1:], eps=FUXI_EPS), self.p)
        return z + block.contract(F.silu(block.gate(r)) * block.expand(r))


def _heads(x: Tensor, heads: int) -> Tensor:
    """[B, N, H * d] to [B, N, H, d]."""
    return x.unflatten(2, (heads, -1))


def _causal(longest: int) -> Tensor:
    return torch.ones(longest, longest).tril()


def _by_position(bias: RelativeBias, longest: int) -> Tensor:
    position = torch.arange(longest)
    return bias.position[(position[None] - position[:, None]) + bias.max_length - 1]


def _by_time(table: Tensor, time: TimeBuckets, asked: Tensor, happened: Tensor) -> Tensor:
    """[B, N, N], the time bias of rows that ask at `asked` and keys that happened at `happened`, both [B, N]."""
    gap = (asked[:, :, None] - happened[:, None, :]).abs().clamp(min=1).float() / time.unit
    return table[(gap.log() / time.divisor).long().clamp(0, time.count)]
