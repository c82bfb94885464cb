"""GenerativeRetriever: trains a backbone to retrieve each user's next item from the whole catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import MetricCollection

from turbogr.batch import JaggedBatch
from turbogr.checkpoints import before_load, note_tables, use_checkpoint_files
from turbogr.data.features import FeatureTable
from turbogr.errors import ConfigurationError
from turbogr.losses import RetrievalLoss, SampledSoftmax, refuse_without
from turbogr.metrics import retrieval_metrics
from turbogr.models.backbone import Backbone
from turbogr.models.hstu import HSTU
from turbogr.models.negatives import NegativePath
from turbogr.models.tokens import NEGATIVES, TARGETS, VALUES, Combine, Tokens
from turbogr.ops.normalise import normalised
from turbogr.seeds import global_seed
from turbogr.sparse.catalogue import Catalogue
from turbogr.sparse.table import ITEMS, EmbeddingTable, Features

DenseOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Scheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def published_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with the settings of the public HSTU runs: lr 1e-3, betas (0.9, 0.98), no weight decay."""
    return torch.optim.AdamW(parameters, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0)


class GenerativeRetriever(pl.LightningModule):
    """Next-item retrieval with a sequence backbone, an item table and a sampled-softmax loss.

    Dense parameters are trained by `optimizer`, the table's touched rows by the table's own row optimizer, once each per
    optimizer step. A strategy may take over the table: it needs `sparse_features`, `sample_count` and the calls of
    `self.embeddings` only.

    Args:
        num_items: V, size of the catalogue.
        backbone: HSTU, SASRec or any other Backbone.
        embeddings: the item table; allocated here as V rows of the backbone's width, and a table for each feature.
        loss: SampledSoftmax or any other RetrievalLoss.
        optimizer: makes the optimizer of the dense parameters.
        scheduler: makes a learning-rate scheduler for it, stepped every optimizer step.
        top_k: the K of HR@K and NDCG@K; must not exceed the catalogue.
        predict_k: items that `predict` returns per user.
        seed: seeds dropout of every step; the global seed if None.
        features: categorical features of events and items (`SequenceDataModule.features`), which become part of tokens and
            items.
        log_q: float [V], logarithm of the probability with which each item is drawn as a negative (`SequenceDataModule.log_q`);
            the logits of targets and negatives are corrected by it. None for uniform draws, which need no correction.
        mask_history: leave out negatives that are items of the user's history in the batch, not only the token's own target.
        combine: how: their embeddings are added (sum), or concatenated and projected (concat); see `turbogr.models.tokens`.

    Raises:
        ConfigurationError: if a K exceeds the catalogue, the catalogue is empty, or features do not fit it.
    """

    def __init__(
        self,
        num_items: int,
        backbone: Backbone | None = None,
        embeddings: EmbeddingTable | None = None,
        loss: RetrievalLoss | None = None,
        optimizer: DenseOptimizer = published_adamw,
        scheduler: Scheduler | None = None,
        top_k: Sequence[int] = (1, 10, 50, 200),
        predict_k: int = 10,
        seed: int | None = None,
        features: Sequence[FeatureTable] = (),
        combine: Combine = "sum",
        log_q: npt.NDArray[np.float32] | None = None,  # this type: the command line must hand the array on as it is
        mask_history: bool = False,
    ) -> None:
        super().__init__()
        if num_items < 1:
            raise ConfigurationError(f"num_items must be at least 1, got {num_items}")
        for k in (*top_k, predict_k):
            if not 1 <= k <= num_items:
                raise ConfigurationError(
                    f"K = {k} is impossible for a catalogue of {num_items} items: "
                    f"model.top_k and model.predict_k go from 1 to {num_items}"
                )
        self.num_items, self.predict_k, self.seed = num_items, predict_k, seed
        self.backbone: Backbone = HSTU() if backbone is None else backbone
        self.embeddings = EmbeddingTable() if embeddings is None else embeddings
        self.tokens = Tokens(num_items, self.backbone.dim, features, combine)
        self.embeddings.allocate(self.tokens.tables, self.backbone.dim)
        self.loss: RetrievalLoss = SampledSoftmax() if loss is None else loss
        self._make_optimizer, self._make_scheduler = optimizer, scheduler
        self.val_metrics = retrieval_metrics(top_k).clone(prefix="val/")
        self.test_metrics = retrieval_metrics(top_k).clone(prefix="test/")
        self._catalogue: Catalogue | None = None
        self.negatives = NegativePath(mask_history)
        if log_q is not None:
            refuse_without(self.loss, "bias", "log_q")
        self._log_q: Tensor | None
        # Always real, and of the data: as which rows items have in the tables of their features.
        self.register_buffer("_log_q", None if log_q is None else _log_q_of(log_q, num_items), persistent=False)

    # What a strategy asks of the module: two pure functions of a batch.

    def sparse_features(self, batch: JaggedBatch) -> Features:
        """Feature name -> int64 ids that this batch looks up; targets and negatives in training only."""
        items = {VALUES: batch.values}
        if batch.negatives is not None:
            items |= {TARGETS: batch.targets, NEGATIVES: batch.negatives}
        return {**items, **self.tokens.features(batch)}

    def sample_count(self, batch: JaggedBatch) -> int:
        """Terms that the batch's mean loss averages over: its tokens."""
        return batch.num_tokens

    # Checkpoints, under every strategy.

    def setup(self, stage: str) -> None:
        """Lets checkpoints be files and directories."""
        use_checkpoint_files(self.trainer.strategy)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Notes the tables' sizes."""
        note_tables(checkpoint, self.embeddings)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses a checkpoint of another catalogue before anything is loaded."""
        before_load(checkpoint, self, self.embeddings)

    # Training.

    def training_step(self, batch: JaggedBatch, batch_idx: int) -> Tensor:
        """Mean loss of the batch."""
        if batch.negatives is None:
            raise ConfigurationError("a training batch carries no negatives: set data.num_negatives")
        lookup = self.embeddings(self.sparse_features(batch))
        # Items are put together and normalised once per distinct row, not once per sample: [U, D] instead of [T, R, D].
        items, tokens = self.tokens(lookup)
        output = normalised(self.backbone(tokens, batch), backend=self.backbone.backend)
        items = normalised(items, backend=lookup.backend)
        seed = (self._seed(), self.current_epoch, batch_idx)
        loss = self.negatives.loss(self.loss, output, items, lookup, batch, self._log_q, seed)
        # Not for the bar: Lightning reads what is shown there at every step, and would wait for the device.
        self.log("train/loss", loss.detach(), batch_size=self.sample_count(batch))
        return loss

    def on_fit_start(self) -> None:
        """Refuses what would train the table wrongly, and forgets what an earlier, interrupted fit left behind."""
        self.embeddings.refuse_copies(self.trainer.world_size)
        if self.trainer.precision == "16-mixed":
            raise ConfigurationError(
                "precision 16-mixed scales the loss, and the table's gradients with it: use bf16-mixed or 32"
            )
        if self.trainer.gradient_clip_val:
            rank_zero_info("gradient_clip_val clips dense parameters; rows are clipped by sparse_clip_norm of TurboGRStrategy")
        self.embeddings.discard_gradients()

    def on_train_batch_start(self, batch: JaggedBatch, batch_idx: int) -> None:
        """Seeds the step's dropout by (seed, epoch, batch): a resumed run draws what the uninterrupted one would have."""
        state = np.random.SeedSequence([self._seed(), self.current_epoch, batch_idx]).generate_state(1, np.uint64)
        torch.manual_seed(int(state[0]))

    def _seed(self) -> int:
        return global_seed() if self.seed is None else self.seed

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """One row update for all look-ups since the last one."""
        self.embeddings.apply_gradients()

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The dense optimizer, and its scheduler if one is set.

        Raises:
            ConfigurationError: one of them refuses its options.
        """
        try:
            optimizer = self._make_optimizer(parameter for parameter in self.parameters() if parameter.requires_grad)
            if self._make_scheduler is None:
                return optimizer
            scheduler = self._make_scheduler(optimizer)
        except ValueError as error:
            raise ConfigurationError(f"model.optimizer or model.scheduler has an impossible option: {error}") from error
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # Evaluation and prediction.

    def queries(self, batch: JaggedBatch) -> Tensor:
        """float [B, D], the l2-normalised output of each user's last token."""
        _, tokens = self.tokens(self.embeddings({VALUES: batch.values, **self.tokens.features(batch)}))
        return normalised(self.backbone(tokens, batch)[batch.last], backend=self.backbone.backend)

    def item_vectors(self) -> Tensor:
        """float [owned items, D], not normalised: what is ranked, of the items whose rows lie in this process.

        Where items have features, all ranks of a group call it together.
        """
        vectors = self.tokens.catalogue(self.embeddings)
        return self.embeddings.weight[: len(self.embeddings.owned[ITEMS])] if vectors is None else vectors

    def _begin_ranking(self) -> None:
        """Items stand still while they are ranked: their vectors are made once for all batches."""
        self._catalogue = self.embeddings.catalogue(self.item_vectors())

    def _end_ranking(self) -> None:
        self._catalogue = None

    def _ranked(self) -> Catalogue:
        # None where a step is called without a trainer.
        return self.embeddings.catalogue(self.item_vectors()) if self._catalogue is None else self._catalogue

    def on_validation_epoch_start(self) -> None:
        """Takes the items' vectors for all batches of validation."""
        self._begin_ranking()

    def on_test_epoch_start(self) -> None:
        """Takes the items' vectors for all batches of the test."""
        self._begin_ranking()

    def on_predict_epoch_start(self) -> None:
        """Takes the items' vectors for all batches of the prediction."""
        self._begin_ranking()

    def on_predict_epoch_end(self) -> None:
        """Drops them."""
        self._end_ranking()

    def validation_step(self, batch: JaggedBatch, batch_idx: int) -> None:
        """Ranks the held-out items of validation."""
        self._evaluate(batch, self.val_metrics)

    def test_step(self, batch: JaggedBatch, batch_idx: int) -> None:
        """Ranks the held-out items of test."""
        self._evaluate(batch, self.test_metrics)

    def _evaluate(self, batch: JaggedBatch, metrics: MetricCollection) -> None:
        targets = batch.targets[batch.last]
        metrics.update(self._ranked().target_ranks(self.queries(batch), targets, batch.seen, batch.seen_offsets))

    def on_validation_epoch_end(self) -> None:
        """Logs val/HR@K, val/NDCG@K and val/MRR over all users."""
        self._log_metrics(self.val_metrics)

    def on_test_epoch_end(self) -> None:
        """Logs test/HR@K, test/NDCG@K and test/MRR over all users."""
        self._log_metrics(self.test_metrics)

    def _log_metrics(self, metrics: MetricCollection) -> None:
        # Lightning logs metrics of one value only; ours give one for each K, and are computed, over all ranks, and reset here.
        # They are equal on all ranks, which Lightning cannot know: their maximum is what it may take for synchronised.
        for name, value in metrics.compute().items():
            self.log(name, value, prog_bar=name in ("val/HR@10", "val/NDCG@10"), sync_dist=True, reduce_fx="max")
        metrics.reset()
        self._end_ranking()

    def predict_step(self, batch: JaggedBatch, batch_idx: int) -> tuple[Tensor, Tensor, Tensor]:
        """Top items of each user: user rows int64 [B], item rows int64 [B, K], scores float [B, K], best first."""
        scores, items = self._ranked().top_items(self.queries(batch), self.predict_k, batch.seen, batch.seen_offsets)
        return batch.user_ids, items, scores


def _log_q_of(log_q: npt.ArrayLike, num_items: int) -> Tensor:
    values = torch.tensor(np.asarray(log_q), dtype=torch.float32, device="cpu")
    if values.shape != (num_items,) or not values.isfinite().all():
        raise ConfigurationError(f"log_q must have a finite number for each of the {num_items} items, got {list(values.shape)}")
    return values
