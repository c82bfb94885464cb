"""Batches that ranks share: together they are the batches of one process."""

from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus

from tests.data.make import write_prepared
from turbogr.batch import JaggedBatch
from turbogr.data.datamodule import SequenceDataModule
from turbogr.data.samplers import EpochBatches, EvaluationBatches, share
from turbogr.errors import ConfigurationError

USERS, ITEMS = 43, 60
STAGES = ["val", "test", "predict"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared") / "p", USERS, ITEMS, min_len=4, max_len=15, seed=2)


def make(folder: Path, rank: int = 0, ranks: int = 1, fitting: bool = False, **options: Any) -> SequenceDataModule:
    """The data module of one rank, as its trainer has it."""
    settings: dict[str, Any] = {"batch_size": 5, "max_length": 6, "num_negatives": 5, "num_workers": 0, "seed": 3}
    data = SequenceDataModule(folder, **(settings | options))
    data.trainer = SimpleNamespace(
        global_rank=rank,
        world_size=ranks,
        overfit_batches=0,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        state=SimpleNamespace(
            fn=TrainerFn.FITTING if fitting else None, status=TrainerStatus.RUNNING if fitting else TrainerStatus.FINISHED
        ),
    )
    return data


def joined(shares: list[JaggedBatch]) -> dict[str, list]:
    """The shares of a batch, put together: every tensor but the offsets, which become lengths."""
    names = ("values", "timestamps", "targets", "target_times", "user_ids", "negatives", "seen")
    tensors = {name: [getattr(part, name) for part in shares] for name in names if getattr(shares[0], name) is not None}
    tensors["lengths"] = [part.lengths for part in shares]
    if shares[0].seen_offsets is not None:
        tensors["seen_lengths"] = [part.seen_offsets.diff() for part in shares]
    return {name: torch.cat(parts).tolist() for name, parts in tensors.items()}


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_are_those_of_array_split(count: int, ranks: int):
    expected = [part.tolist() for part in np.array_split(np.arange(count), ranks)]
    assert [list(range(count)[share(count, rank, ranks)]) for rank in range(ranks)] == expected


@pytest.mark.parametrize(("ranks", "batch_size"), [(2, 5), (3, 4), (4, 5), (7, 1), (4, 11), (50, 1)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_training_batches_are_slices_of_one_process(folder: Path, ranks: int, batch_size: int, drop_last: bool):
    options = {"drop_last": drop_last and ranks * batch_size <= USERS}
    whole = make(folder, batch_size=ranks * batch_size, **options).train_dataloader()
    parts = [make(folder, rank, ranks, batch_size=batch_size, **options).train_dataloader() for rank in range(ranks)]
    assert {len(part) for part in parts} == {len(whole)}
    for _ in range(3):  # epochs
        for batch, *shares in zip(whole, *parts, strict=True):
            assert joined(shares) == joined([batch])
            sizes = [part.num_users for part in shares]
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)


def test_the_share_of_a_short_batch_may_be_empty(folder: Path):
    # 43 users, 4 ranks, batches of 40: of the last 3 users the last rank has none.
    *_, last = make(folder, 3, 4, batch_size=10).train_dataloader()
    assert (last.num_users, last.num_tokens, last.offsets.tolist()) == (0, 0, [0])
    assert last.negatives.shape == (0, 5)
    for stage in STAGES:
        *_, last = getattr(make(folder, 3, 4, batch_size=10), f"{stage}_dataloader")()
        assert (last.num_users, last.num_tokens, last.last.tolist()) == (0, 0, [])
        assert last.targets[last.last].shape == last.seen.shape == (0,)


@pytest.mark.parametrize(("ranks", "batch_size"), [(2, 5), (3, 4), (7, 1), (4, 10), (50, 1)])
@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_batches_are_slices_of_one_process(folder: Path, stage: str, ranks: int, batch_size: int):
    def loader(*place: int, size: int = batch_size) -> Any:
        return getattr(make(folder, *place, eval_batch_size=size), f"{stage}_dataloader")()

    whole, parts = loader(size=ranks * batch_size), [loader(rank, ranks) for rank in range(ranks)]
    assert {len(part) for part in parts} == {len(whole)}
    users = []
    for batch, *shares in zip(whole, *parts, strict=True):
        assert joined(shares) == joined([batch])
        users += joined(shares)["user_ids"]
    assert users == list(range(USERS))


def test_workers_change_no_share(folder: Path):
    def batches(workers: int) -> list[dict[str, list]]:
        data = make(folder, 3, 4, batch_size=10, num_workers=workers)
        loaders = [data.train_dataloader(), data.val_dataloader(), data.predict_dataloader()]
        return [joined([batch]) for loader in loaders for _ in range(2) for batch in loader]

    assert batches(2) == batches(0)


def test_no_rank_takes_anothers_share():
    # Negative control of the comparisons above: without the slices every rank has all users.
    samples = np.arange(10)
    own = [next(iter(EpochBatches(samples, 5, 0, rank=rank, ranks=2))).samples for rank in range(2)]
    both = next(iter(EpochBatches(samples, 10, 0))).samples
    assert sorted(np.concatenate(own)) == sorted(both)
    assert not set(own[0]) & set(own[1])
    assert list(EvaluationBatches(5, 2, 1, 2)) == [[2, 3], []]


@pytest.mark.parametrize(("before", "after"), [((2, 6), (4, 3)), ((4, 3), (1, 12)), ((1, 12), (3, 4)), ((2, 6), (2, 6))])
def test_resuming_with_other_ranks_trains_what_was_left(folder: Path, before: tuple[int, int], after: tuple[int, int]):
    one_process = make(folder, batch_size=12).train_dataloader()
    whole = [joined([batch]) for _ in range(2) for batch in one_process]
    assert len(whole) == 8
    ranks, batch_size = before
    first = [make(folder, rank, ranks, batch_size=batch_size).train_dataloader() for rank in range(ranks)]
    trained = [joined(list(shares)) for shares in islice(zip(*first, strict=True), 3)]
    (state,) = {tuple(loader.state_dict().items()) for loader in first}
    ranks, batch_size = after
    rest = [make(folder, rank, ranks, batch_size=batch_size).train_dataloader() for rank in range(ranks)]
    for loader in rest:
        loader.load_state_dict(dict(state))
    for _ in range(2):
        trained += [joined(list(shares)) for shares in zip(*rest, strict=True)]
    assert trained == whole


def test_a_checkpoint_of_other_ranks_is_taken_if_a_step_keeps_its_users(folder: Path):
    state = make(folder, 1, 2, batch_size=6).state_dict()
    make(folder, 3, 4, fitting=True, batch_size=3).load_state_dict(state)
    make(folder, fitting=True, batch_size=12).load_state_dict(state)
    make(folder, 1, 2, fitting=True, batch_size=6).load_state_dict(state)
    earlier = {name: value for name, value in state.items() if name != "ranks"}  # written before there were ranks
    make(folder, 1, 2, fitting=True, batch_size=3).load_state_dict(earlier)
    make(folder, fitting=True, batch_size=6).load_state_dict(earlier)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ((2, 6), (4, 6), r"batch_size was 6 x 2 ranks = 12 users a step and is 6 x 4 ranks = 24 users a step\. Resuming"),
        ((2, 6), (1, 6), r"batch_size was 6 x 2 ranks = 12 users a step and is 6 x 1 ranks = 6 users a step\. Resuming"),
        ((1, 6), (1, 7), r": batch_size was 6 and is 7\. Resuming"),
    ],
)
def test_a_checkpoint_of_other_batches_is_refused(folder: Path, before: tuple[int, int], after: tuple[int, int], message: str):
    state = make(folder, 0, before[0], batch_size=before[1]).state_dict()
    with pytest.raises(ConfigurationError, match=message):
        make(folder, 0, after[0], fitting=True, batch_size=after[1]).load_state_dict(state)
    make(folder, 0, after[0], batch_size=after[1]).load_state_dict(state)  # evaluation may differ


def test_too_few_users_for_all_ranks(folder: Path):
    with pytest.raises(ConfigurationError, match=r"batch_size 11 on 4 ranks, drop_last True"):
        make(folder, 0, 4, batch_size=11, drop_last=True).train_dataloader()


def test_overfitting_takes_batches_of_all_ranks(folder: Path):
    users = []
    for rank in range(2):
        data = make(folder, rank, 2)
        data.trainer.overfit_batches = 2
        loader = data.train_dataloader()
        assert len(loader) == 2
        users += [batch.user_ids.tolist() for batch in loader]
    assert sorted(user for part in users for user in part) == list(range(20))
