"""Options are checked, and what cannot work is refused with a sentence that says what to do."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import StrategyRegistry

from tests.distributed.strategy_cases import QUIET, SizedBatches, Toy
from turbogr.errors import ConfigurationError, DataError
from turbogr.strategies import TurboGRStrategy, group_choice
from turbogr.strategies.aggregation import loss_weight
from turbogr.strategies.agreement import StopRequest
from turbogr.strategies.refusals import refuse_on_ranks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": 0}, 'groups must be 1 or more, or "auto"; got 0'),
        ({"groups": True}, "groups must be 1 or more"),
        ({"groups": "two"}, "groups must be 1 or more"),
        ({"mode": "semi"}, "mode must be one of sync, semi_async; got 'semi'"),
        ({"batches_in_flight": 9}, "batches_in_flight must be one of 2, 3, 4, 5, 6, 7, 8; got 9"),
        ({"sharding": "rows"}, "sharding must be one of row_wise, table_wise, planner"),
        ({"exchange": "ring"}, "exchange must be one of auto, gather, two_phase"),
        ({"sparse_lr": "fixed"}, "sparse_lr must be one of constant, follow"),
        ({"checkpoint": "file"}, "checkpoint must be one of gathered, distributed"),
        ({"sparse_clip_norm": 0.0}, "sparse_clip_norm must be positive, got 0.0"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb must be positive"),
        ({"timeout_s": -1.0}, "timeout_s must be positive"),
        *(({"start_method": name}, "start the ranks with torchrun") for name in ("spawn", "fork", "forkserver")),
    ],
)
def test_options(options, message):
    with pytest.raises(ConfigurationError, match=message):
        TurboGRStrategy(**options)


def test_a_misspelt_option_is_no_option():
    with pytest.raises(TypeError, match="group"):
        TurboGRStrategy(group=2)


def test_the_strategy_has_a_name():
    assert isinstance(StrategyRegistry.get("turbogr"), TurboGRStrategy)
    assert isinstance(pl.Trainer(**QUIET, devices=1, strategy="turbogr").strategy, TurboGRStrategy)


class Manual(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Moving(Toy):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch


class Iterating(Toy):
    def training_step(self, dataloader_iter):
        return None


class NoCount(Toy):
    sample_count = None


class TwoTables(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.more = Toy().embeddings


class NoTable(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = torch.nn.Linear(1, 1)


class Newton(Toy):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.layer.parameters())


class Other(Toy):
    """Looks up other rows than it names."""

    def training_step(self, batch, batch_idx):
        return self.layer(self.embeddings({"ids": (batch[0] + batch_idx) % 30})["ids"]).mean()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Manual, "Manual optimizes manually: set automatic_optimization = True"),
        (Moving, "Moving.on_before_batch_transfer would run after .* collate_fn"),
        (Iterating, "let Iterating.training_step take a batch instead of dataloader_iter"),
        (NoCount, r"give NoCount a method sample_count\(batch\)"),
        (TwoTables, "TwoTables has 2: put its tables into one"),
        (NoTable, "NoTable has 0: use strategy auto or ddp"),
        (Newton, "LBFGS computes each batch several times"),
        (Other, "looks up other rows of feature 'ids' than"),
    ],
)
def test_modules(model, message):
    with pytest.raises(ConfigurationError, match=message):
        fit(model())


def fit(model: pl.LightningModule, loader=None, **options) -> pl.Trainer:
    settings = {"max_epochs": 1, "enable_checkpointing": False, "devices": 1, "strategy": TurboGRStrategy(), **options}
    trainer = pl.Trainer(**QUIET, **settings)
    trainer.fit(model, SizedBatches(3, 1) if loader is None else loader)
    return trainer


def test_hooks_of_a_data_module_are_refused_too():
    class Data(pl.LightningDataModule):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch

        def train_dataloader(self):
            return SizedBatches(3, 1)

    with pytest.raises(ConfigurationError, match=r"Data\.on_before_batch_transfer would run after"):
        fit(Toy(), Data())


def test_several_training_loaders_are_refused():
    with pytest.raises(ConfigurationError, match="train_dataloader returned several"):
        fit(Toy(), {"a": SizedBatches(3, 1), "b": SizedBatches(3, 2)})


def test_a_scaled_loss_is_refused(monkeypatch):
    strategy = TurboGRStrategy()
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    monkeypatch.setattr(type(strategy), "precision_plugin", property(lambda self: plugin, lambda self, value: None))
    with pytest.raises(ConfigurationError, match="precision 16-mixed scales the loss"):
        fit(Toy(), strategy=strategy)


def test_groups_must_divide_the_ranks():
    with pytest.raises(ConfigurationError, match="1 ranks can form 1 groups, not 2"):
        fit(Toy(), strategy=TurboGRStrategy(groups=2))


def test_an_id_outside_the_table_is_named():
    class Wrong(Toy):
        def sparse_features(self, batch):
            return {"ids": batch[0] + 30}

    with pytest.raises(DataError, match=r"feature 'ids' holds id \d+, outside the table's rows 0..29"):
        fit(Wrong())


def test_weights_of_losses():
    samples = [3, 0, 5, 4]
    weights = [loss_weight(samples, rank) for rank in range(4)]
    assert weights == [1.0, 0.0, 5 / 3, 4 / 3]
    assert loss_weight([7], 0) == 1.0
    assert loss_weight([0, 0], 1) == 1.0


def test_a_single_rank_agrees_with_itself():
    alone, one_of_two = StopRequest(alone=True), StopRequest(alone=False)
    for request in (alone, one_of_two):
        request.ask(15)
    assert (alone.agreed, one_of_two.agreed) == (15, 0)
    one_of_two.agree(0)
    one_of_two.agree(15)
    one_of_two.agree(2)
    assert one_of_two.agreed == 15


def test_what_would_leave_ranks_waiting():
    saving = pl.callbacks.ModelCheckpoint(save_on_exception=True)
    trainer = pl.Trainer(**{**QUIET, "enable_checkpointing": True}, devices=1, strategy="turbogr", callbacks=[saving])
    with pytest.raises(ConfigurationError, match="ModelCheckpoint: save_on_exception needs all ranks"):
        refuse_on_ranks(trainer)
    trainer = pl.Trainer(**QUIET, devices=1, strategy="turbogr")
    refuse_on_ranks(trainer)
    trainer.strategy.cluster_environment = SLURMEnvironment(auto_requeue=False)
    refuse_on_ranks(trainer)
    trainer.strategy.cluster_environment = SLURMEnvironment()
    with pytest.raises(ConfigurationError, match="auto_requeue=False"):
        refuse_on_ranks(trainer)


def test_a_container_has_the_memory_of_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(group_choice, "_CGROUP", tmp_path / "memory.max")
    whole = group_choice.memory_of_a_rank(torch.device("cpu"), 1)
    for text, memory in (("max\n", whole), ("1000\n", 1000), (f"{2 * whole}\n", whole)):
        group_choice._CGROUP.write_text(text)
        assert group_choice.memory_of_a_rank(torch.device("cpu"), 1) == memory
    assert group_choice.memory_of_a_rank(torch.device("cpu"), 4) == whole // 4
