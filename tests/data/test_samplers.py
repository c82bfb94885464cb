import random
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import Dataset

from turbogr.batch import JaggedBatch
from turbogr.data.samplers import BatchKey, EpochBatches, TrainingLoader
from turbogr.errors import ConfigurationError

SAMPLES = np.arange(100, 123)  # 23 user rows: 6 batches of 4, the last of 3


def listed(keys: Iterator[BatchKey]) -> list[tuple[int, list[int]]]:
    return [(key.epoch, key.samples.tolist()) for key in keys]


def flat(keys: list[tuple[int, list[int]]]) -> list[int]:
    return [sample for _, samples in keys for sample in samples]


class Echo(Dataset[JaggedBatch]):
    """A batch that holds its own key."""

    def __getitem__(self, key: BatchKey) -> JaggedBatch:
        users = torch.tensor(key.samples)
        epoch = torch.full_like(users, key.epoch)
        return JaggedBatch(users, torch.arange(len(users) + 1), epoch, users, epoch, users, max_length=1)


def make_loader(workers: int = 0, batches: EpochBatches | None = None) -> TrainingLoader:
    return TrainingLoader(
        Echo(), batches or EpochBatches(SAMPLES, 4, seed=7), num_workers=workers, persistent_workers=workers > 0
    )


def seen(batches: Iterator[JaggedBatch]) -> list[tuple[int, list[int]]]:
    return [(int(batch.timestamps[0]), batch.user_ids.tolist()) for batch in batches]


def test_every_sample_once_an_epoch():
    batches = EpochBatches(SAMPLES, 4, seed=7)
    for epoch in range(3):
        batches.set_epoch(epoch)
        keys = listed(iter(batches))
        assert len(keys) == len(batches) == 6
        assert {number for number, _ in keys} == {epoch}
        assert [len(samples) for _, samples in keys] == [4] * 5 + [3]
        assert sorted(flat(keys)) == SAMPLES.tolist()


def test_order_depends_on_seed_and_epoch_only():
    def order(seed: int, epoch: int, batch_size: int = 4) -> list[int]:
        batches = EpochBatches(SAMPLES, batch_size, seed)
        batches.set_epoch(epoch)
        return np.concatenate([key.samples for key in batches]).tolist()

    assert order(7, 2) == order(7, 2) == order(7, 2, batch_size=5)
    assert len({tuple(order(seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25


def test_orders_are_random():
    # Where a sample stands, over 2000 epochs: uniform, and not the neighbour of the same samples each time.
    batches = EpochBatches(np.arange(10), 10, seed=0)
    orders = np.stack([next(batches.stream(epoch)).samples for epoch in range(2000)])
    counts = np.stack([np.bincount(orders[:, place], minlength=10) for place in range(10)])
    assert np.abs(counts - 200).max() < 5 * np.sqrt(200)
    followed = np.mean([np.isin(3, order[1:][order[:-1] == 2]) for order in orders])
    assert abs(followed - 0.1) < 5 * np.sqrt(0.09 / 2000)


def test_stream_is_all_epochs_from_any_batch():
    batches = EpochBatches(SAMPLES, 4, seed=7)
    whole = []
    for epoch in range(4):
        batches.set_epoch(epoch)
        whole += listed(iter(batches))
    for start in range(18):
        assert listed(islice(batches.stream(start), 6)) == whole[start : start + 6]


def test_drop_last():
    batches = EpochBatches(SAMPLES, 4, seed=7, drop_last=True)
    assert [len(key.samples) for key in batches] == [4] * 5
    # What is dropped changes from epoch to epoch.
    used = [frozenset(np.concatenate([key.samples for key in islice(batches.stream(5 * e), 5)])) for e in range(4)]
    assert len(set(used)) > 1


def test_without_shuffling_the_order_stays():
    batches = EpochBatches(SAMPLES, 4, seed=7, shuffle=False)
    keys = listed(islice(batches.stream(0), 12))
    assert flat(keys) == SAMPLES.tolist() * 2
    assert [epoch for epoch, _ in keys] == [0] * 6 + [1] * 6


@pytest.mark.parametrize(
    ("samples", "batch_size", "drop_last", "message"),
    [
        (SAMPLES, 0, False, "batch_size is 0"),
        (SAMPLES[:0], 4, False, "0 training users has no batch"),
        (SAMPLES, 24, True, r"23 training users has no batch \(batch_size 24, drop_last True\)"),
    ],
)
def test_an_epoch_without_batches_is_refused(samples: np.ndarray, batch_size: int, drop_last: bool, message: str):
    with pytest.raises(ConfigurationError, match=message):
        EpochBatches(samples, batch_size, seed=0, drop_last=drop_last)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_loader_gives_the_batches_in_order(workers: int):
    loader = make_loader(workers)
    expected = listed(islice(loader.batches.stream(0), 18))
    assert len(loader) == 6
    assert [seen(iter(loader)) for _ in range(3)] == [expected[:6], expected[6:12], expected[12:]]
    loader.set_epoch(1)
    assert seen(iter(loader)) == expected[6:12]


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_resumes_outside_lightning(workers: int):
    loader = make_loader(workers)
    expected = listed(islice(loader.batches.stream(0), 12))
    assert seen(islice(loader, 4)) == expected[:4]
    state = loader.state_dict()
    assert state == {"batches": 4}
    resumed = make_loader(workers)
    iterator = iter(resumed)  # created before the state is loaded, as Lightning does
    resumed.load_state_dict(state)
    assert len(resumed) == 6
    assert seen(iterator) == expected[4:6]
    assert seen(iter(resumed)) == expected[6:]
    # The interrupted one goes on as well; what its workers had prepared is neither lost nor repeated.
    assert seen(iter(loader)) == expected[4:6]


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_follows_the_trainer(workers: int):
    trained = 3
    loader = make_loader(workers)
    loader._trained = lambda: trained
    expected = listed(islice(loader.batches.stream(0), 30))
    assert seen(islice(loader, 3)) == expected[3:6]
    trained = 5  # one of the batches was handed out, but not trained
    assert seen(iter(loader)) == expected[5:11]
    trained = 20
    assert seen(islice(loader, 2)) == expected[20:22]


def test_workers_live_from_epoch_to_epoch_and_end_with_training():
    loader = make_loader(workers=1)
    combined = CombinedLoader(loader)
    assert len(list(combined)) == 6
    (worker,) = loader._iterator._workers
    assert len(list(combined)) == 6
    assert loader._iterator._workers == [worker]
    assert worker.is_alive()
    combined.reset()
    assert not worker.is_alive()
    assert len(list(combined)) == 6
    combined.reset()


@pytest.mark.parametrize("workers", [0, 1])
def test_loader_takes_nothing_from_the_global_random_streams(workers: int):
    def states() -> tuple:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    assert len(list(make_loader(workers))) == 6
    assert states() == before


def test_an_error_in_a_worker_is_raised():
    class Broken(Echo):
        def __getitem__(self, key: BatchKey) -> JaggedBatch:
            raise ConfigurationError("broken")

    loader = TrainingLoader(Broken(), EpochBatches(SAMPLES, 4, seed=7), num_workers=1)
    with pytest.raises(ConfigurationError, match="broken"):
        list(loader)
