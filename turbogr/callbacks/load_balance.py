"""LoadBalance: how equal the ranks' work was, step by step, and what balancing made of it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.utilities import rank_zero_info
from rich.table import Table

from turbogr.callbacks.drawing import draw_balance
from turbogr.callbacks.terminal import print_table, shown
from turbogr.data.balance import CostModel, Imbalance, imbalance
from turbogr.data.negatives import Int64Array
from turbogr.data.packing import Float64Array
from turbogr.data.samplers import EpochBatches
from turbogr.errors import ConfigurationError

DIFFERENCE, DELAY, WASTED = "train/token_difference", "train/imbalance_delay", "train/wasted_compute"


class LoadBalance(Callback):
    """Logs how unequal the ranks of each step are, and compares with plain slices of the same batches at the end.

    Taken down at every step, from lengths alone, so that no rank waits for another, and logged at those of which loggers get
    values (`Trainer(log_every_n_steps=...)`):

    - "train/token_difference": tokens of the rank with most, less those of the rank with fewest;
    - "train/imbalance_delay": %, the share of the step that the lightest rank waits for the heaviest, (most - least) / most;
    - "train/wasted_compute": %, the share of all ranks' time that is waiting, (most - mean) / most.

    The two shares count cost, which is tokens unless the data module's `balance_cost` says otherwise (TurboGR, table 3; the
    definitions are those of `turbogr.data.balance.Imbalance`). They are about work as planned, not about measured time.

    At the end a table compares them, and load_balance.png draws their histograms: before, what each rank would have had, had
    the same batches been shared out as slices of equally many whole histories; after, what it did have.

    With a loader of your own, whose plan is not known, every rank counts its batches' tokens (`batch.num_tokens`), and the
    counts are gathered once at the end of each epoch: then the mean of an epoch is logged, and there is no before. On one rank
    there is nothing to balance, and nothing is written.

    Args:
        path: of the picture; None is load_balance.png in the run folder (`Trainer(default_root_dir=...)`).

    Attributes:
        before: the plain slices; empty where they are not known, and on ranks other than 0.
        after: what was trained; the same.

    Raises:
        ConfigurationError: with a loader of your own, batches do not say how many tokens they have.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.before, self.after = Loads(), Loads()
        self._idle = True
        self._loader: Any = None
        self._batches: EpochBatches | None = None
        self._plan: Iterator[tuple[Int64Array, list[Int64Array]]] = iter(())
        self._next = -1
        self._counts: list[int] = []
        self._way = ""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts from nothing."""
        self.before, self.after = Loads(), Loads()
        self._way, self._loader, self._counts = "", None, []
        alone = trainer.world_size == 1
        self._idle = alone or bool(getattr(trainer, "fast_dev_run", False))
        if alone:
            rank_zero_info("LoadBalance: one rank trains alone, so there is nothing to balance")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the step, on rank 0; or counts it."""
        if self._idle:
            return
        # Not at the start of an epoch, which Lightning does not announce where a run is resumed within one.
        if self._loader is None or self._loader is not trainer.train_dataloader:
            self._loader, self._next = trainer.train_dataloader, -1
            batches = getattr(self._loader, "batches", None)
            self._batches = batches if isinstance(batches, EpochBatches) and batches.lengths is not None else None
        if self._batches is None:
            tokens = getattr(batch, "num_tokens", None)
            if not isinstance(tokens, int):
                raise ConfigurationError(
                    f"LoadBalance counts batch.num_tokens, which a {type(batch).__name__} of this loader does not have: give "
                    "it one, train on data of SequenceDataModule, or leave LoadBalance out"
                )
            self._counts.append(tokens)
        elif trainer.is_global_zero:
            progress = trainer.fit_loop.epoch_loop.batch_progress.total
            assert isinstance(progress, _ProcessedTracker)
            step = self._planned(self._batches, progress.processed - 1)
            # A value that no logger gets would still be copied to the device.
            if trainer._logger_connector.should_update_logs:  # as Lightning's own monitors ask
                for name, value in zip((DIFFERENCE, DELAY, WASTED), step, strict=True):
                    pl_module.log(name, value, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers what was counted; all ranks come here, after equally many steps."""
        if self._idle or not self._counts:
            return
        counted = torch.tensor(self._counts, device=trainer.strategy.root_device)
        loads = trainer.strategy.all_gather(counted).T.cpu().numpy()
        self._counts = []
        if not trainer.is_global_zero:
            return
        steps = np.array([self.after.add(step, step) for step in loads]).mean(0)
        for name, value in zip((DIFFERENCE, DELAY, WASTED), steps, strict=True):
            pl_module.log(name, float(value), on_step=False, on_epoch=True, batch_size=1, rank_zero_only=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Draws the histograms and prints the table, after the progress bar has gone."""
        if stage != "fit" or self._idle or not trainer.is_global_zero or not len(self.after):
            return
        path = self.path or Path(trainer.default_root_dir) / "load_balance.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._way == "slices":
            ways, advice = (
                {"as trained, plain slices": self.after},
                ["balance: tokens, of the data module, would share them out"],
            )
        else:
            ways = {"before, plain slices": self.before} if len(self.before) else {}
            ways[f"as trained{', ' if self._way else ''}{self._way}"] = self.after
            advice = []
        title = f"Load balance of {len(self.after):,} steps on {trainer.world_size} ranks"
        measures = {"Largest token difference": "differences", "Imbalance delay, %": "delays", "Wasted compute, %": "wasted"}
        draw_balance({m: {w: getattr(loads, name) for w, loads in ways.items()} for m, name in measures.items()}, path, title)
        table = _table({way: loads.figures(trainer.world_size) for way, loads in ways.items()})
        print_table(title, table, *advice, f"written: {shown(path)}")

    def _planned(self, batches: EpochBatches, number: int) -> tuple[float, float, float]:
        """Takes down what each rank has in batch `number` of all epochs, and would have had as slices."""
        if number != self._next:
            epoch, first = divmod(number, len(batches))
            self._plan = batches.plan(epoch, first)
        planned = next(self._plan)
        last = (number + 1) % len(batches) == 0
        self._next = -1 if last else number + 1
        lengths, trained = planned
        cost = batches.sharing.cost
        self._way = "stochastic length" if batches.stochastic_length is not None else batches.sharing.method.replace("_", "-")
        self.before.add(*_loads(np.array_split(lengths, batches.ranks), cost))
        return self.after.add(*_loads(trained, cost))


class Loads:
    """How unequal the ranks were in each step: three numbers a step, however many ranks there are.

    Attributes:
        differences: of tokens, heaviest rank less lightest.
        delays: %, share of the step that the lightest rank waits.
        wasted: %, share of all ranks' time that is waiting.
    """

    def __init__(self) -> None:
        self.differences, self.delays, self.wasted = array("d"), array("d"), array("d")
        self._heaviest = self._total = 0.0

    def __len__(self) -> int:
        """Steps."""
        return len(self.differences)

    def add(self, tokens: Int64Array | Float64Array, costs: Int64Array | Float64Array) -> tuple[float, float, float]:
        """Takes down a step.

        Args:
            tokens: [ranks].
            costs: [ranks].

        Returns:
            Difference of tokens, delay and wasted compute.
        """
        by_cost = imbalance(costs[None])
        step = (imbalance(tokens[None]).difference, by_cost.longest_wait, by_cost.delay)
        for values, value in zip((self.differences, self.delays, self.wasted), step, strict=True):
            values.append(value)
        self._heaviest += float(costs.max())
        self._total += float(costs.sum())
        return step

    def figures(self, ranks: int) -> Imbalance:
        """Of all steps together; there must be one or more.

        Returns:
            As `turbogr.data.balance.imbalance` of all loads: differences of tokens, the rest of costs.
        """
        return Imbalance(
            difference=float(np.mean(self.differences)),
            largest_difference=max(self.differences),
            delay=float(np.mean(self.wasted)),
            longest_wait=float(np.mean(self.delays)),
            wasted=100 * (1 - self._total / (ranks * self._heaviest)) if self._heaviest else 0.0,
        )


def _loads(histories: list[Int64Array], cost: CostModel) -> tuple[Int64Array, Float64Array]:
    """Tokens and costs of each rank; of all at once, for there may be thousands."""
    together = np.concatenate(histories)
    ends = np.cumsum([len(own) for own in histories])
    tokens, costs = (np.concatenate([[0], np.cumsum(values)])[ends] for values in (together, cost(together)))
    return np.diff(tokens, prepend=0), np.diff(costs, prepend=0.0)


def _table(ways: dict[str, Imbalance]) -> Table:
    table = Table()
    table.add_column("")
    for way in ways:
        table.add_column(way, justify="right")
    rows = {
        "token difference between ranks, mean": ("difference", "{:,.1f}"),
        "token difference between ranks, largest": ("largest_difference", "{:,.0f}"),
        "imbalance delay (the lightest rank's wait)": ("longest_wait", "{:.2f} %"),
        "wasted compute (all ranks' waits)": ("wasted", "{:.2f} %"),
    }
    for name, (figure, form) in rows.items():
        table.add_row(name, *(form.format(getattr(figures, figure)) for figures in ways.values()))
    return table
