"""Collisions: how often samples of different steps look up the same rows, which is what a delayed update can harm.

TurboGR (section 4.2.2, equation 4) bounds the convergence of semi-asynchronous training by that of SGD and one more term,
O(alpha L tau / T): alpha is the probability that samples of different steps collide in a feature, tau the number of steps by
which an embedding's update is late. The paper gives alpha's two ends: 1 / N_emb if all N_emb features are equally likely, and 1
if one feature is in every sample. `alpha` and `shared` below both have them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from torch import Tensor
from torch import distributed as dist

from turbogr.batch import JaggedBatch
from turbogr.errors import ConfigurationError
from turbogr.ops.unique import unique_ids
from turbogr.sparse.table import ITEMS, Features, ItemFeature, SparseFeature
from turbogr.strategies.refusals import only_table
from turbogr.strategies.turbogr import TurboGRStrategy

Int64Array = NDArray[np.int64]
_WORD = 64
"""Samples that are compared with all others at a time: one bit each."""


@dataclass
class StepRows:
    """The distinct rows of each sample of one step.

    Attributes:
        rows: by batch (and rank), int32 or int64: the rows of its first sample, then those of its second, and so on.
        counts: by batch (and rank), int64: how many rows each sample has.
        follows: whether the step before belongs to the same epoch.
    """

    rows: list[NDArray[np.integer]] = field(default_factory=list)
    counts: list[Int64Array] = field(default_factory=list)
    follows: bool = False

    def together(self, others: Sequence[StepRows]) -> StepRows:
        """The same step on several ranks."""
        rows = [part for each in (self, *others) for part in each.rows]
        return StepRows(rows, [part for each in (self, *others) for part in each.counts], self.follows)


@dataclass(frozen=True)
class Figures:
    """What a window of steps says about collisions.

    R_i is the set of rows that sample i looks up, N the number of samples in the window, s(i) the step of sample i, and R^s
    the union of the R_i of step s.

    Attributes:
        steps: in the window.
        samples: N.
        rows: distinct rows of all samples.
        alpha: max over rows v of |{i : v in R_i}| / N, the share of samples that hold the most frequent row.
        row: that row, the first one if there are several.
        shared: |{(i, j) : s(i) != s(j), R_i and R_j meet}| / |{(i, j) : s(i) != s(j)}|, the probability that two samples of
            different steps share a row; nan for a single step.
        repeated: sum over s of |R^s and R^(s-1)| / sum over s of |R^s|, over the steps whose predecessor belongs to the window
            and to the same epoch: the share of a step's rows that the step before looked up too. These rows, and no others,
            are read before their last update under mode semi_async (with accumulation, by the step's first batch alone). nan
            where there is no such step.
    """

    steps: int
    samples: int
    rows: int
    alpha: float
    row: int
    shared: float
    repeated: float


def collisions(steps: Sequence[StepRows]) -> Figures:
    """Counts, exactly.

    Work: for N samples with E distinct rows in all, N E / 128 look-ups in a table of 8 bytes a row, and a sort of E.

    Args:
        steps: consecutive, of at least one sample.
    """
    counts = np.concatenate([part for step in steps for part in step.counts])
    rows = np.concatenate([part for step in steps for part in step.rows])
    ends = np.cumsum([sum(map(len, step.rows)) for step in steps])  # of the steps' rows among all
    sizes = np.array([sum(map(len, step.counts)) for step in steps])  # samples
    distinct, places, times = np.unique(rows, return_inverse=True, return_counts=True)
    step_of = np.repeat(np.arange(len(steps)), sizes)
    samples = len(counts)
    most = int(times.argmax()) if len(times) else 0
    others = samples**2 - int((sizes**2).sum())
    shared = 2 * _meeting_pairs(places, counts, step_of, len(distinct)) / others if others else math.nan
    return Figures(
        steps=len(steps),
        samples=samples,
        rows=len(distinct),
        alpha=float(times[most] / samples) if len(times) else 0.0,
        row=int(distinct[most]) if len(times) else 0,
        shared=shared,
        repeated=_repeated(np.split(places, ends[:-1]), steps, len(distinct)),
    )


def _meeting_pairs(rows: Int64Array, counts: Int64Array, step_of: Int64Array, num_rows: int) -> int:
    """Unordered pairs of samples of different steps that have a row in common."""
    held = counts > 0  # the others meet nobody
    counts, step_of = counts[held], step_of[held]
    starts = np.concatenate([[0], counts.cumsum()])
    ones = np.uint64(1) << np.arange(_WORD, dtype=np.uint64)
    meeting = 0
    for first in range(0, len(counts), _WORD):
        block = range(first, min(first + _WORD, len(counts)))
        # Who of the block holds each row, and who of it is of each step: a bit a sample.
        holders = np.zeros(num_rows, np.uint64)
        present = np.zeros(int(step_of[-1]) + 1, np.uint64)
        for bit, sample in zip(ones, block, strict=False):
            holders[rows[starts[sample] : starts[sample + 1]]] |= bit
            present[step_of[sample]] |= bit
        met = np.bitwise_or.reduceat(holders[rows[starts[first] :]], starts[first:-1] - starts[first])
        met &= ~present[step_of[first:]]
        met[: len(block)] &= ones[: len(block)] - np.uint64(1)  # within the block every pair once
        meeting += int(np.unpackbits(met.view(np.uint8)).sum())
    return meeting


def _repeated(rows_of_steps: Sequence[Int64Array], steps: Sequence[StepRows], num_rows: int) -> float:
    common = total = 0
    before = np.zeros(num_rows, bool)
    for index, (rows, step) in enumerate(zip(rows_of_steps, steps, strict=True)):
        now = np.zeros(num_rows, bool)
        now[rows] = True
        if index and step.follows:
            common += int((now & before).sum())
            total += int(now.sum())
        before = now
    return common / total if total else math.nan


def rows_of_samples(
    features: Features, sample_of: Tensor, num_samples: int, spans: Mapping[str, range]
) -> tuple[NDArray[np.integer], Int64Array]:
    """The distinct rows of each sample.

    Args:
        features: what a batch looks up, name -> ids whose first dimension is that of `sample_of`; a property of items
            (`ItemFeature`) belongs to the samples that hold the item.
        sample_of: int64 [T], the sample of each first index, on the CPU.
        num_samples: B.
        spans: table -> its rows in the row space.

    Returns:
        Rows, sample after sample, int32 where they fit; and how many each sample has, int64 [B].
    """
    num_rows = max(span.stop for span in spans.values())
    held: dict[str, list[Tensor]] = {}
    for feature in features.values():
        if not isinstance(feature, ItemFeature):
            table, ids = feature if isinstance(feature, SparseFeature) else SparseFeature(ITEMS, feature)
            ids = ids.cpu()
            samples = sample_of.view(-1, *[1] * (ids.dim() - 1)).expand(ids.shape)
            held.setdefault(table, []).append((samples * num_rows + spans[table].start + ids).flatten())
    space = max(num_samples, 1) * num_rows
    if ITEMS in held:
        items = unique_ids(torch.cat(held[ITEMS]), space)[0]
        held[ITEMS] = [items]
        for feature in features.values():
            if isinstance(feature, ItemFeature):
                item = items % num_rows
                rows = feature.rows.cpu()[item] + spans[feature.table].start
                held.setdefault(feature.table, []).append(items - item + rows)
    found = unique_ids(torch.cat([part for parts in held.values() for part in parts]), space)[0]
    counts = torch.bincount(found // num_rows, minlength=num_samples)
    rows = found % num_rows
    return (rows.int() if num_rows <= 2**31 else rows).numpy(), counts.numpy()


class Collisions(Callback):
    """Measures the collision probability alpha of the training data, and logs alpha * tau beside the loss.

    tau is 1 under TurboGRStrategy(mode="semi_async"), and 0 in every other mode and under every other strategy. The first
    `window` steps of a fit are counted exactly, all ranks' samples together; what is counted, and its formulas, stands in
    `Figures`. After the window, or at the end of a shorter training, one paragraph is printed, and from then on every logged
    step has "train/alpha_tau", "train/alpha", "train/shared" and "train/repeated", but for what `Figures` calls nan.

    A sample is a history of a JaggedBatch, and of any other batch what the first dimension of its ids counts. A step is an
    optimizer step: with accumulation, all its batches. The rows are those of `sparse_features(batch)` of the module: history,
    targets, negatives and features alike. Negatives are drawn from the whole catalogue and say nothing about the data, so
    `without: [negatives]` is what to compare data sets by; their rows are updated, and may be late, as all others.

    Costs: in the steps of the window, one sort of the batch's ids, and on an accelerator their copy to the host, which waits
    for it. Memory: 4 bytes (8 in tables of 2^31 rows or more) for each distinct row of each sample of the window, on the rank
    that trained it, and in the end for those of all ranks on rank 0, which counts while the others wait; nothing after it.

    Args:
        window: steps that are counted.
        without: features that are left out, by their names in `sparse_features`.

    Attributes:
        figures: on all ranks; None until the window is full.
        tau: of the last fit.

    Raises:
        ConfigurationError: `window` is less than 2; at the start of a fit, the module has no `sparse_features` or no
            EmbeddingTable; at the first step, it has no such feature, or ids of different lengths.
    """

    def __init__(self, window: int = 50, without: Sequence[str] = ()) -> None:
        if window < 2:
            raise ConfigurationError(f"Collisions: window must be at least 2 steps, got {window}")
        self.window, self.without = window, tuple(without)
        self.figures: Figures | None = None
        self.tau = 0
        self._steps: list[StepRows] = []
        self._step = self._epoch = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts a new window."""
        if not callable(getattr(pl_module, "sparse_features", None)):
            raise ConfigurationError(
                f"Collisions asks a module which rows a batch looks up: give {type(pl_module).__name__} a method "
                "sparse_features(batch), as GenerativeRetriever has, or leave the callback out"
            )
        only_table(pl_module)
        strategy = trainer.strategy
        self.tau = int(isinstance(strategy, TurboGRStrategy) and strategy.mode == "semi_async")
        self.figures, self._steps, self._step, self._epoch = None, [], -1, -1

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Notes the rows of the batch."""
        if self.figures is not None:
            return
        if trainer.global_step != self._step:
            self._steps.append(StepRows(follows=trainer.current_epoch == self._epoch))
            self._step, self._epoch = trainer.global_step, trainer.current_epoch
        rows, counts = self._rows(pl_module, batch)
        self._steps[-1].rows.append(rows)
        self._steps[-1].counts.append(counts)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts when the window is full, and logs."""
        # All ranks count optimizer steps alike, and so come here together.
        if self.figures is None and len(self._steps) == self.window and trainer.global_step != self._step:
            self._finish(trainer, pl_module)
        if self.figures is not None:
            values = {
                "train/alpha_tau": self.figures.alpha * self.tau,
                "train/alpha": self.figures.alpha,
                "train/shared": self.figures.shared,
                "train/repeated": self.figures.repeated,
            }
            measured = {name: value for name, value in values.items() if not math.isnan(value)}
            pl_module.log_dict(measured, on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Counts what there was, if the window was not filled."""
        if self.figures is None and self._steps:
            self._finish(trainer, pl_module)

    def _rows(self, module: Any, batch: Any) -> tuple[NDArray[np.integer], Int64Array]:
        features = dict(module.sparse_features(batch))
        for name in self.without:
            if name not in features:
                raise ConfigurationError(
                    f"Collisions: without names a feature {name!r}; {type(module).__name__} has {', '.join(features)}"
                )
            del features[name]
        ids = {name: f for name, f in features.items() if not isinstance(f, ItemFeature)}
        lengths = {name: len(f.ids if isinstance(f, SparseFeature) else f) for name, f in ids.items()}
        if isinstance(batch, JaggedBatch):
            sample_of = torch.arange(batch.num_users).repeat_interleave(batch.lengths.cpu())
            samples, length = batch.num_users, batch.num_tokens
        else:
            samples = length = next(iter(lengths.values()), 0)
            sample_of = torch.arange(samples)
        if not lengths or set(lengths.values()) != {length}:
            raise ConfigurationError(
                "Collisions finds the sample of an id by its first index, and needs features of one length: "
                + (", ".join(f"{name} has {n}" for name, n in lengths.items()) or "there are none")
            )
        return rows_of_samples(features, sample_of, samples, only_table(module).spans)

    def _finish(self, trainer: Trainer, module: LightningModule) -> None:
        steps, self._steps = self._steps, []
        if trainer.world_size > 1:
            self.figures = _together(steps, trainer.strategy)
        else:
            self.figures = collisions(steps)
        if trainer.is_global_zero:
            print(self._said(trainer, module, self.figures), file=sys.stderr, flush=True)

    def _said(self, trainer: Trainer, module: LightningModule, figures: Figures) -> str:
        spans = only_table(module).spans
        table, span = next((name, span) for name, span in spans.items() if figures.row in span)
        left_out = f", without {', '.join(self.without)}" if self.without else ""
        loss = trainer.callback_metrics.get("train/loss")
        beside = "" if loss is None else f", train/loss = {float(loss):.4f}"
        return (
            f"collisions of {figures.samples:,} samples in {figures.steps:,} steps{left_out}: "
            f"alpha * tau = {figures.alpha * self.tau:.4g}{beside}\n"
            f"  alpha = {figures.alpha:.4g}: that share of the samples holds row {figures.row - span.start} of {table}; "
            f"tau = {self.tau}\n"
            f"  {_between_steps(figures)}"
        )


def _between_steps(figures: Figures) -> str:
    """What is said of different steps, or why there is nothing to say."""
    if math.isnan(figures.shared):
        return "all of them in one step: there are no two steps to compare, train for 2 or more"
    shared = f"two samples of different steps share a row with probability {figures.shared:.4g}; "
    if math.isnan(figures.repeated):
        return shared + "no step came behind another of its epoch, so none could read rows before their last update"
    return shared + f"{figures.repeated:.1%} of a step's rows were in the step before"


def _together(steps: list[StepRows], strategy: Any) -> Figures:
    """The figures of all ranks' samples, on all ranks; rank 0 counts."""
    group = strategy.topology.host_pg if isinstance(strategy, TurboGRStrategy) else None
    root = dist.get_rank() == 0
    gathered: list[Any] | None = [None] * dist.get_world_size() if root else None
    dist.gather_object(steps, gathered, group=group)
    told: list[Any] = [None]
    if gathered is not None:
        told = [collisions([first.together(others) for first, *others in zip(*gathered, strict=True)])]
    dist.broadcast_object_list(told, group=group)
    return told[0]
