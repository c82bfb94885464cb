"""The ways to keep a batch's negatives, and a model that all of them train in turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.batch import JaggedBatch
from turbogr.losses import RetrievalLoss, SampledSoftmax
from turbogr.models.backbone import Backbone
from turbogr.models.negatives import SharedLogits
from turbogr.models.retriever import GenerativeRetriever
from turbogr.models.tokens import NEGATIVES
from turbogr.negative_bytes import SEGMENT, NegativeLoad, fused, gathered, offloaded, on_device
from turbogr.sparse.apart import Apart
from turbogr.sparse.optimizers import AdaGrad
from turbogr.sparse.table import EmbeddingTable

HALF_ROUNDING = 1e-2
"""What rows in half precision may change of the loss and of gradients, as a share of the largest value."""


class Gathered(RetrievalLoss):
    """The loss of SampledSoftmax with everything materialised: the baseline."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, output: Tensor, items: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        """Mean loss over tokens."""
        positive = (output * F.embedding(targets, items)).sum(1, keepdim=True)
        logits = torch.einsum("td,trd->tr", output, F.embedding(negatives, items))
        logits = logits.masked_fill(negatives == targets[:, None], -torch.inf)
        return -F.log_softmax(torch.cat([positive, logits], 1) / self.temperature, dim=1)[:, 0].mean()


@dataclass(frozen=True)
class Side:
    """One way to keep the negatives.

    Attributes:
        materialised: as [T, R, D], by the loss Gathered.
        offload: what NegativeOffload does.
        dtype: what NegativeQuantization makes of the rows.
        k: of LogitSharing; R / k negatives are drawn.
    """

    materialised: bool = False
    offload: bool = False
    dtype: torch.dtype = torch.float32
    k: int = 1

    def computed(self, load: NegativeLoad, device: str) -> int:
        """Bytes of the negatives by turbogr.negative_bytes, on a device "cpu" or another."""
        if self.materialised:  # beside the distinct rows, and these normalised
            return gathered(load).device + fused(load).rows
        value_bytes = self.dtype.itemsize
        found = offloaded(load, SEGMENT, value_bytes, self.k) if self.offload else on_device(load, value_bytes, self.k)
        return found.device + (found.host if device == "cpu" else 0)

    def drawn(self, batch: JaggedBatch) -> JaggedBatch:
        """The batch with as many negatives as are drawn for as many logits."""
        assert batch.negatives is not None
        return replace(batch, negatives=batch.negatives[:, : batch.negatives.shape[1] // self.k].contiguous())


PLAIN, FUSED = "plain", "fused"
SIDES = {
    PLAIN: Side(materialised=True),
    FUSED: Side(),
    "fp16": Side(dtype=torch.float16),
    "offload": Side(offload=True),
    "offload, fp16": Side(offload=True, dtype=torch.float16),
    "sharing k = 2": Side(k=2),
    "all three": Side(offload=True, dtype=torch.float16, k=2),
}


class Trained:
    """One model that all sides train in turns; between steps nothing but how negatives are kept is changed.

    Args:
        num_items: of the catalogue.
        backbone: of the model.
        device: where it is trained.
    """

    def __init__(self, num_items: int, backbone: Backbone, device: torch.device) -> None:
        self.model = GenerativeRetriever(num_items, backbone, EmbeddingTable(AdaGrad(4e-3)), top_k=(1,), predict_k=1)
        self.model.to(device)
        self.model.log = lambda *_, **__: None  # type: ignore[method-assign]  # no trainer here
        dense = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(dense, 4e-3, weight_decay=0.0)
        self.fused = self.model.loss
        assert isinstance(self.fused, SampledSoftmax)
        self.plain = Gathered(self.fused.temperature)

    def switch(self, side: Side) -> None:
        """Keeps negatives as this side does, and as its callbacks would."""
        self.model.loss = self.plain if side.materialised else self.fused
        self.model.negatives.segment = SEGMENT if side.offload else None
        self.model.negatives.sharing = SharedLogits(side.k) if side.k > 1 else None
        self.model.embeddings.apart.clear()
        if side.offload or side.dtype != torch.float32:
            self.model.embeddings.apart[NEGATIVES] = Apart(side.dtype, side.offload)

    def backward(self, batch: JaggedBatch) -> float:
        """Loss of the batch, whose gradients are there afterwards; the same dropout every time."""
        torch.manual_seed(0)
        self.optimizer.zero_grad()
        loss = self.model.training_step(batch, 0)
        loss.backward()
        return float(loss.detach())

    def step_of(self, side: Side, batch: JaggedBatch) -> None:
        """One training step, whose gradients end with it: what counts allocations does not see the end of older ones."""
        self.switch(side)
        self.backward(batch)
        self.model.embeddings.apply_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def gradients(self, batch: JaggedBatch) -> dict[str, Tensor]:
        """The loss, the gradient of a dense parameter that all tokens reach, and that of the rows."""
        loss = self.backward(batch)
        table = self.model.embeddings
        [lookup] = table._pending
        rows = lookup.take_gradient()
        table.discard_gradients()
        positions = self.model.backbone.positions.grad
        assert rows is not None
        assert positions is not None
        return {"loss": torch.tensor(loss), "positions": positions.clone(), "rows": rows}


def check_agreement(trained: Trained, batch: JaggedBatch, sides: Iterable[str], rounding: float) -> None:
    """Compares losses and gradients with plain's, of the sides that train with the same loss.

    Raises:
        SystemExit: if they differ.
    """
    trained.switch(SIDES[PLAIN])
    expected = trained.gradients(batch)
    for name in sides:
        side = SIDES[name]
        if side.k > 1 or side.materialised:
            continue
        trained.switch(side)
        allowed = rounding if side.dtype == torch.float32 else HALF_ROUNDING
        for what, value in trained.gradients(batch).items():
            if not (value - expected[what]).abs().max() <= allowed * expected[what].abs().max():
                raise SystemExit(f"{what} of {name} differs from the baseline's")
