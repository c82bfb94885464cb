"""The data module with batches of equally many tokens and batches shared out by cost."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader, DistributedSampler

from tests.data.make import write_prepared
from tests.data.test_ranks import joined, make
from tests.data.test_resume import Stop, assert_resumes_exactly, run
from turbogr.data.balance import CostModel
from turbogr.data.stochastic_length import StochasticLength
from turbogr.errors import ConfigurationError

USERS = 43
BALANCES: dict[str, dict[str, Any]] = {
    "tokens": {"balance": "tokens"},
    "attention": {"balance": "attention", "balance_cost": CostModel(1.0, 0.1), "balance_method": "karmarkar_karp"},
    "cut": {"tokens_per_batch": "auto"},
    "cut, tokens": {"tokens_per_batch": 60, "balance": "tokens", "max_tokens_per_rank": 80},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared") / "p", USERS, 60, min_len=4, max_len=22, seed=2)


def per_user(parts: list[dict[str, list]]) -> dict[int, tuple]:
    """Of batches as `joined` gives them: every user's tokens and negatives."""
    found: dict[int, tuple] = {}
    for part in parts:
        bounds = np.cumsum([0, *part["lengths"]])
        for b, user in enumerate(part["user_ids"]):
            span = slice(bounds[b], bounds[b + 1])
            assert user not in found
            found[user] = (part["values"][span], part["targets"][span], part["negatives"][span])
    return found


@pytest.mark.parametrize("name", BALANCES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_trains_the_same_histories_and_negatives(folder: Path, name: str, ranks: int):
    """As that of one process."""
    alone = {"balance": "off", "balance_cost": None, "max_tokens_per_rank": None, "balance_method": "greedy"}
    options = BALANCES[name]
    size = {"batch_size": 12 // ranks, "max_length": 20} | options
    budget = options.get("tokens_per_batch")
    whole_size = {**size, "batch_size": 12, **alone}
    if isinstance(budget, int):
        whole_size["tokens_per_batch"] = budget * ranks
    whole = make(folder, **whole_size).train_dataloader()
    parts = [make(folder, rank, ranks, **size).train_dataloader() for rank in range(ranks)]
    assert {len(part) for part in parts} == {len(whole)}
    orders = set()
    for _ in range(2):
        users: list[int] = []
        for batch, *shares in zip(whole, *parts, strict=True):
            assert per_user([joined([share]) for share in shares]) == per_user([joined([batch])])
            users += batch.user_ids.tolist()
        assert sorted(users) == list(range(USERS))
        orders.add(tuple(users))
    assert len(orders) == 2


@pytest.mark.parametrize("name", BALANCES)
def test_workers_change_nothing(folder: Path, name: str):
    def batches(workers: int) -> list[dict[str, list]]:
        loader = make(folder, 1, 2, max_length=20, num_workers=workers, **BALANCES[name]).train_dataloader()
        return [joined([batch]) for _ in range(2) for batch in loader]

    assert batches(2) == batches(0)


@pytest.mark.parametrize(
    "options",
    [
        {"tokens_per_batch": "auto"},
        {"tokens_per_batch": 33, "balance": "tokens"},
        {"stochastic_length": StochasticLength(1.2), "max_length": 20},
    ],
)
@pytest.mark.parametrize(("place", "count"), [("on_train_batch_end", 3), ("Ctrl-C", 8), ("on_train_epoch_end", 1)])
def test_resumed_run_equals_uninterrupted_run(folder: Path, tmp_path: Path, options: dict, place: str, count: int):
    checkpoint = tmp_path / "stop.ckpt"
    whole = run(folder, tmp_path, **options)
    assert len(whole.model.batches) == whole.trainer.global_step > 8
    first = run(folder, tmp_path, Stop(checkpoint, place, count), workers=2, **options)
    second = run(folder, tmp_path, resume=checkpoint, **options)
    assert_resumes_exactly(whole, [first, second])


def resume(folder: Path, before: tuple[int, dict], after: tuple[int, dict]) -> None:
    state = make(folder, 0, before[0], **before[1]).state_dict()
    make(folder, 0, after[0], fitting=True, **after[1]).load_state_dict(state)


def test_what_changes_only_who_trains_may_change(folder: Path):
    plain: dict[str, Any] = {"batch_size": 6}
    resume(folder, (2, plain), (2, plain | BALANCES["tokens"]))
    resume(folder, (2, plain | BALANCES["tokens"]), (4, {"batch_size": 3} | BALANCES["attention"]))
    resume(folder, (2, plain | BALANCES["attention"]), (1, {"batch_size": 12}))
    resume(folder, (2, plain | {"tokens_per_batch": "auto"}), (4, {"batch_size": 3, "tokens_per_batch": "auto"}))
    # A number of tokens leaves batch_size without a meaning.
    resume(folder, (2, plain | {"tokens_per_batch": 60}), (4, {"batch_size": 1, "tokens_per_batch": 30}))
    # Checkpoints of versions that did not know these options.
    state = make(folder, 0, 2, **plain).state_dict()
    for name in (
        "tokens_per_batch",
        "stochastic_length",
        *(name for name in state if name.startswith(("balance", "max_tokens"))),
    ):
        del state[name]
    make(folder, 0, 2, fitting=True, **plain, **BALANCES["tokens"]).load_state_dict(state)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ((1, {}), (1, {"tokens_per_batch": "auto"}), "tokens_per_batch was None and is 'auto'"),
        ((1, {"tokens_per_batch": "auto"}), (1, {"tokens_per_batch": 60}), "tokens_per_batch was 'auto' and is 60"),
        ((1, {"tokens_per_batch": 60}), (1, {"tokens_per_batch": 70}), r": tokens_per_batch was 60 and is 70\. Resuming"),
        (
            (2, {"tokens_per_batch": 60}),
            (4, {"tokens_per_batch": 60}),
            "tokens_per_batch was 60 x 2 ranks = 120 tokens a step and is 60 x 4 ranks = 240 tokens a step",
        ),
        (
            (1, {"tokens_per_batch": "auto", "batch_size": 6}),
            (1, {"tokens_per_batch": "auto", "batch_size": 7}),
            "batch_size was 6 and is 7",
        ),
    ],
)
def test_what_changes_the_steps_may_not(folder: Path, before: tuple[int, dict], after: tuple[int, dict], message: str):
    with pytest.raises(ConfigurationError, match=message):
        resume(folder, before, after)


@pytest.mark.parametrize("options", [{"tokens_per_batch": "auto"}, {"tokens_per_batch": 60}, {"balance": "tokens"}])
def test_overfitting_takes_so_many_batches(folder: Path, options: dict):
    users: list[list[int]] = []
    for rank in range(2):
        data = make(folder, rank, 2, max_length=20, **options)
        data.trainer.overfit_batches = 2
        loader = data.train_dataloader()
        assert len(loader) == 2
        epochs = [[batch.user_ids.tolist() for batch in loader] for _ in range(2)]
        assert epochs[0] == epochs[1]
        users += epochs[0]
    everyone = sorted(user for share in users for user in share)
    assert everyone == list(range(len(everyone)))


def test_overfitting_makes_no_batches_smaller_than_asked_for(folder: Path):
    data = make(folder, 0, 1, max_length=20, tokens_per_batch=200)
    whole = data.train_dataloader()
    assert 1 < len(whole) < 9
    data.trainer.overfit_batches = 9
    assert len(data.train_dataloader()) == len(whole)


def test_a_cap_that_cannot_hold_names_the_batch(folder: Path):
    data = make(folder, 0, 2, max_length=20, balance="tokens", max_tokens_per_rank=21)
    with pytest.raises(ConfigurationError, match=r"batch \d of epoch 0 has \d+ tokens in 10 histories"):
        list(data.train_dataloader())


def test_options_that_exclude_each_other(folder: Path):
    with pytest.raises(ConfigurationError, match="drop_last has no meaning with tokens_per_batch"):
        make(folder, drop_last=True, tokens_per_batch="auto")


def test_the_size_of_a_step(folder: Path):
    assert make(folder, tokens_per_batch="auto").step_size == (5, "users")
    assert make(folder, tokens_per_batch=60).step_size == (60, "tokens")


def test_lightning_leaves_our_loaders_alone(folder: Path):
    """`use_distributed_sampler` changes nothing on several ranks, where it would replace the sampler of a DataLoader."""
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False)
    assert trainer._accelerator_connector.use_distributed_sampler  # as it is unless somebody turns it off
    prepare = partial(trainer._data_connector._prepare_dataloader, shuffle=True, mode=RunningStage.TRAINING)
    data = make(folder, 0, 2, balance="tokens")
    for loader in (data.train_dataloader(), data.val_dataloader()):
        assert prepare(loader) is loader
    plain: DataLoader[int] = DataLoader(range(10), batch_size=2)  # type: ignore[arg-type]
    assert isinstance(prepare(plain).sampler, DistributedSampler)
