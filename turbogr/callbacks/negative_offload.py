"""NegativeOffload: the negatives' rows stay on the host, and come to the device in segments (TurboGR, section 4.3.1)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from turbogr.callbacks.negative_path import NegativeCallback, keep_apart, keep_together, negative_path
from turbogr.data.datamodule import SequenceDataModule
from turbogr.errors import ConfigurationError
from turbogr.losses import has_products, refuse_without_products
from turbogr.models.retriever import GenerativeRetriever
from turbogr.models.tokens import NEGATIVES
from turbogr.negative_bytes import FP16, FP32, SEGMENT, NegativeLoad, offload_below, offloaded, on_device
from turbogr.units import in_bytes

OffloadMode = Literal["auto", "offload", "fused"]


class NegativeOffload(NegativeCallback):
    """Keeps the embeddings of negatives on the host and computes their logits in segments of tokens.

    While a segment is computed, the distinct rows of the next one are on their way into a second buffer; logits are put
    together and go into the loss as always; in backward each segment is fetched and computed once more, and its rows' gradient
    goes back to the host. No embedding for every draw, [T, R, D], exists anywhere, and of the negatives' rows the device holds
    two segments during forward and backward. (Under TurboGRStrategy with several ranks, all distinct rows of the batch pass
    through the device once on their way from their owners, and their gradients on the way back.) On a CPU, where the rows are
    on the host anyway, forward reads them where they lie, and backward works in segments.

    Results are those of the plain loss, up to the order of sums.

    Args:
        segment: tokens of a segment.
        mode: "offload" does it; "fused" does not: the fused loss reads each distinct row once from the batch's one leaf and has
            no [T, R, D] either; "auto" offloads where the fused loss would take more than a tenth of the device's memory, and
            says what it chose.

    Raises:
        ConfigurationError: an option has an impossible value, the trainer has another such callback, or rows are to be kept on
            the host and the module has features of items or a loss without `of_products`.
    """

    def __init__(self, segment: int = SEGMENT, mode: OffloadMode = "auto") -> None:
        if segment < 1:
            raise ConfigurationError(f"NegativeOffload: segment must be at least 1, got {segment}")
        if mode not in get_args(OffloadMode):
            raise ConfigurationError(f"NegativeOffload: mode must be one of {', '.join(get_args(OffloadMode))}; got {mode!r}")
        self.segment, self.mode = segment, mode

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a module that has no such negatives, and a loss that cannot use them."""
        _, model = negative_path(pl_module, "NegativeOffload")
        self.refuse_another(trainer)
        if stage == "fit" and self.mode == "offload":
            refuse_without_products(model.loss, f"NegativeOffload(mode={self.mode!r})")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switches it on; here, because what it saves depends on what the other callbacks have switched on."""
        path, model = negative_path(pl_module, "NegativeOffload")
        if self.mode == "offload" or (self.mode == "auto" and self._pays(trainer, model)):
            keep_apart(model, "NegativeOffload", on_host=True)
            path.segment = self.segment

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Switches it off, for whoever trains the model again without."""
        path, model = negative_path(pl_module, "NegativeOffload")
        keep_together(model, "on_host")
        path.segment = None

    def _pays(self, trainer: Trainer, model: GenerativeRetriever) -> bool:
        device = trainer.strategy.root_device
        if device.type == "cpu":
            return _say(False, "rows are in the host's memory anyway")
        if model.tokens.names["item"]:
            return _say(False, "features of items make items' vectors of several rows, which cannot be kept apart")
        if not has_products(model.loss):
            return _say(False, f"{type(model.loss).__name__} has no of_products, which it needs")
        data = getattr(trainer, "datamodule", None)
        if not isinstance(data, SequenceDataModule):
            return _say(False, "batches are not known beforehand; choose mode: offload if memory is short")
        if data.negative_sampling == "in_batch":
            return _say(False, "negatives drawn within the batch are targets, whose rows are looked up anyway")
        size, unit = data.step_size
        tokens = size if unit == "tokens" else round(size * data.num_training_tokens / max(data.num_users, 1))
        load = NegativeLoad.expected(tokens, data.num_negatives, model.embeddings.dim, model.num_items)
        k = 1 if model.negatives.sharing is None else model.negatives.sharing.k
        narrow = NEGATIVES in model.embeddings.apart and model.embeddings.apart[NEGATIVES].dtype != torch.float32
        value_bytes = FP16 if narrow else FP32
        without, with_it = on_device(load, value_bytes, k).device, offloaded(load, self.segment, value_bytes, k).device
        total = int(torch.get_device_module(device).mem_get_info(device)[1])
        figures = f"{in_bytes(without)} fused, {in_bytes(with_it)} offloaded, of {in_bytes(total)}"
        return _say(total < offload_below(load, self.segment, value_bytes, k), figures)


def _say(offload: bool, why: str) -> bool:
    rank_zero_info(f"NegativeOffload: negatives are {'offloaded to the host' if offload else 'not offloaded'} ({why})")
    return offload
