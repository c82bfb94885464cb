from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from matplotlib.image import imread
from torch.utils.data import DataLoader

from turbogr.callbacks.load_balance import DELAY, DIFFERENCE, WASTED, LoadBalance, Loads
from turbogr.data.balance import CostModel, imbalance
from turbogr.data.samplers import EpochBatches
from turbogr.data.sharing import Sharing
from turbogr.data.stochastic_length import StochasticLength
from turbogr.errors import ConfigurationError

RANKS, USERS = 4, 90
LENGTHS = np.random.default_rng(0).lognormal(4.0, 1.0, USERS).astype(np.int64) + 1
PLANS = {
    "slices": {},
    "greedy": {"sharing": Sharing.of("tokens")},
    "attention": {"sharing": Sharing.of("attention", CostModel(1.0, 0.05), "karmarkar_karp")},
    "by tokens": {"sharing": Sharing.of("tokens"), "tokens_per_batch": "auto"},
    "thinned": {"stochastic_length": StochasticLength()},
}


def batches(name, rank=0):
    return EpochBatches(3 * np.arange(USERS), 5, 7, rank=rank, ranks=RANKS, lengths=LENGTHS, **PLANS[name])


def lengths_of(key):
    return LENGTHS[key.samples // 3] if key.kept is None else key.kept


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_says_what_each_rank_gets(name):
    """Against the batches themselves, in the second epoch from its second batch on."""
    plan = list(batches(name).plan(1, 1))
    assert len(plan) == len(batches(name)) - 1
    for rank in range(RANKS):
        stream = batches(name, rank).stream(len(batches(name)) + 1)
        for (_, trained), key in zip(plan, stream, strict=False):
            np.testing.assert_array_equal(trained[rank], lengths_of(key))
    for whole, trained in plan:
        if name != "thinned":
            assert sorted(whole) == sorted(np.concatenate(trained))


def test_a_plan_needs_lengths():
    with pytest.raises(ValueError, match="needs lengths"):
        next(EpochBatches(np.arange(9), 2, 0).plan(0))


@given(st.lists(st.lists(st.integers(0, 50), min_size=3, max_size=3), min_size=1, max_size=9))
def test_loads_sum_up_as_imbalance_does(steps):
    table, loads = np.array(steps), Loads()
    for step in table:
        loads.add(step, step)
    ours, expected = loads.figures(3), imbalance(table)
    assert vars(ours) == pytest.approx(vars(expected))


class Fit:
    """What LoadBalance sees of a trainer of several ranks."""

    def __init__(self, folder, loader, rank=0):
        self.default_root_dir, self.train_dataloader, self.world_size = folder, loader, RANKS
        self.is_global_zero, self.fast_dev_run, self.logged = rank == 0, False, []
        progress = Trainer(logger=False, enable_progress_bar=False).fit_loop.epoch_loop.batch_progress
        self.fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
        self.strategy = SimpleNamespace(root_device=torch.device("cpu"), all_gather=self.gathered)
        self._logger_connector = SimpleNamespace(should_update_logs=True)
        self.gathers = 0

    def log(self, name, value, on_step, **_):
        self.logged.append((name, value, on_step))

    def gathered(self, counts):
        self.gathers += 1
        return torch.stack([counts * (rank + 1) for rank in range(RANKS)])

    def run(self, callback, made, epochs=1, first=0):
        callback.on_train_start(self, self)
        self.fit_loop.epoch_loop.batch_progress.total.processed = first
        for epoch in range(epochs):
            if epoch or not first:  # as Lightning, which does not announce the epoch in which a run is resumed
                callback.on_train_epoch_start(self, self)
            for index, batch in enumerate(made):
                self.fit_loop.epoch_loop.batch_progress.total.processed += 1
                callback.on_train_batch_end(self, self, None, batch, index)
            callback.on_train_epoch_end(self, self)
        callback.teardown(self, self, "fit")


def reference(name, number):
    """Tokens and costs of all ranks in a batch, from their own streams; and those of plain slices."""
    keys = [next(batches(name, rank).stream(number)) for rank in range(RANKS)]
    cost = batches(name).sharing.cost
    epoch, first = divmod(number, len(batches(name)))
    together = next(batches(name).together(epoch, first))
    slices = [LENGTHS[part] for part in np.array_split(together, RANKS)]
    return [
        (np.array([own.sum() for own in side]), np.array([cost(own).sum() for own in side]))
        for side in ([lengths_of(key) for key in keys], slices)
    ]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("first", [0, 3])
def test_every_step_is_logged_without_asking_other_ranks(name, first, tmp_path, capsys):
    """From the start and, as a resumed run, from the middle of an epoch on; over the end of an epoch."""
    callback, trainer = LoadBalance(), Fit(tmp_path, SimpleNamespace(batches=batches(name)))
    steps = len(batches(name))
    trainer.run(callback, range(steps), epochs=2, first=first)
    assert trainer.gathers == 0
    expected, before = [], []
    for number in range(first, first + 2 * steps):
        (tokens, costs), (plain, plain_costs) = reference(name, number)
        expected.append((np.ptp(tokens), 100 * np.ptp(costs) / costs.max(), 100 * (1 - costs.mean() / costs.max())))
        before.append((np.ptp(plain), 100 * np.ptp(plain_costs) / plain_costs.max()))
    names, values, on_step = zip(*trainer.logged, strict=True)
    assert names == (DIFFERENCE, DELAY, WASTED) * (2 * steps)
    assert all(on_step)
    np.testing.assert_allclose(np.reshape(values, (-1, 3)), expected)
    np.testing.assert_allclose(callback.before.differences, [step[0] for step in before])
    np.testing.assert_allclose(callback.before.delays, [step[1] for step in before])
    if name == "slices":
        assert list(callback.before.delays) == list(callback.after.delays)
    else:
        assert np.mean(callback.after.delays) < 0.9 * np.mean(callback.before.delays)
    out = capsys.readouterr().out
    assert f"Load balance of {2 * steps} steps on 4 ranks" in out
    assert f"{np.mean(callback.before.delays):.2f} %" in out
    assert ("balance: tokens" in out) == (name == "slices")
    assert f"{np.mean(callback.after.delays):.2f} %" in out
    assert str(tmp_path / "load_balance.png") in out
    assert imread(tmp_path / "load_balance.png").shape[1] == 1650


def test_steps_that_loggers_do_not_want_are_still_counted(tmp_path):
    callback, trainer = LoadBalance(), Fit(tmp_path, SimpleNamespace(batches=batches("greedy")))
    trainer._logger_connector.should_update_logs = False
    trainer.run(callback, range(5))
    assert not trainer.logged
    assert len(callback.after) == 5


def test_other_ranks_do_nothing(tmp_path, capsys):
    callback, trainer = LoadBalance(), Fit(tmp_path, SimpleNamespace(batches=batches("greedy")), rank=1)
    trainer.run(callback, range(5))
    assert not trainer.logged
    assert not len(callback.after)
    assert not capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_counts_of_a_users_own_loader_are_gathered_once_an_epoch(tmp_path, capsys):
    callback, trainer = LoadBalance(tmp_path / "a" / "b.png"), Fit(tmp_path, DataLoader(range(3)))
    trainer.run(callback, [SimpleNamespace(num_tokens=n) for n in (10, 20, 60)], epochs=2)
    assert trainer.gathers == 2
    # ranks have 1, 2, 3 and 4 times as much
    assert [(n, pytest.approx(v), s) for n, v, s in trainer.logged] == [
        (DIFFERENCE, 90.0, False),
        (DELAY, 75.0, False),
        (WASTED, 37.5, False),
    ] * 2
    assert list(callback.after.differences) == [30, 60, 180] * 2
    assert not len(callback.before)
    out = capsys.readouterr().out
    assert "as trained" in out
    assert "before" not in out
    assert (tmp_path / "a" / "b.png").is_file()


def test_batches_without_tokens_are_refused(tmp_path):
    trainer = Fit(tmp_path, DataLoader(range(3)))
    with pytest.raises(ConfigurationError, match=r"batch\.num_tokens, which a Tensor of this loader does not have"):
        trainer.run(LoadBalance(), DataLoader(range(3)))


class Toy(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, index):
        return self.weight * 1.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_one_rank_has_nothing_to_balance(tmp_path, capsys, caplog):
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    trainer = Trainer(**options, max_epochs=1, default_root_dir=tmp_path, callbacks=[LoadBalance()], accelerator="cpu")
    with caplog.at_level("INFO"):
        trainer.fit(Toy(), DataLoader(range(3)))
    assert "one rank trains alone, so there is nothing to balance" in caplog.text
    assert not list(tmp_path.iterdir())
    assert "train/token_difference" not in trainer.callback_metrics
