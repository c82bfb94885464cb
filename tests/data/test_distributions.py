"""Negatives drawn by log-uniform, by popularity and within the batch, and log q."""

import math
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.make import write_prepared
from tests.data.test_ranks import make
from tests.data.test_resume import Stop, assert_resumes_exactly, run
from turbogr.data.datamodule import SequenceDataModule
from turbogr.data.distributions import InBatchNegatives, WeightedNegatives, alias_table, probabilities
from turbogr.data.histories import target_counts
from turbogr.errors import ConfigurationError

CELL = 1 << 32
SAMPLINGS = ["log_uniform", "popularity", "in_batch"]
OTHERS = SAMPLINGS[:2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared") / "p", 43, 60, min_len=4, max_len=15, seed=2)


def units(table: np.ndarray) -> np.ndarray:
    """2^-32 of a cell that each item has in an alias table, in all cells together."""
    own = (table >> np.uint64(32)).astype(np.int64)
    total = own.copy()
    np.add.at(total, (table & np.uint64(CELL - 1)).astype(np.int64), CELL - own)
    return total


def surprise(counts: np.ndarray, chances: np.ndarray) -> float:
    """Chi-square statistic of counts over cells with these chances, as standard deviations from its expectation."""
    expected = chances / chances.sum() * counts.sum()
    degrees = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


@given(st.lists(st.one_of(st.floats(1e-9, 1e9), st.just(1.0)), min_size=1, max_size=60))
def test_an_alias_table_gives_every_item_its_share(weights: list[float]):
    chances = np.array(weights)
    found = units(alias_table(chances))
    expected = chances / chances.sum() * len(chances) * CELL
    assert found.sum() == len(chances) * CELL
    assert found.min() >= 1
    off = np.abs(found - expected)
    off[np.argmax(expected)] /= len(chances)  # which takes the remainders of all
    assert off.max() <= 1


@pytest.mark.parametrize("size", [2, 1000, 100_000])
def test_alias_tables_of_popularity(size: int):
    chances = probabilities("log_uniform", np.random.default_rng(0).zipf(1.2, size).clip(max=10**6))
    found = units(alias_table(chances))
    np.testing.assert_allclose(found / (size * CELL), chances / chances.sum(), rtol=1e-6)
    assert not np.allclose(found / (size * CELL), chances[::-1] / chances.sum(), rtol=1e-3)


def test_weighted_draws_have_their_chances():
    counts = np.array([0, 1, 3, 100, 5, 5, 0, 40])
    for sampling in OTHERS:
        chances = probabilities(sampling, counts, 0.5 if sampling == "popularity" else 1.0)
        sampler = WeightedNegatives(chances, 7, seed=1)
        draws = np.concatenate([sampler.draw(np.arange(300), np.full(300, 40), epoch).numpy() for epoch in (0, 1)])
        found = np.bincount(draws.ravel(), minlength=8)
        assert abs(surprise(found, chances)) < 4
        assert surprise(found, np.ones(8)) > 1000


def test_weighted_draws_are_not_correlated():
    sampler = WeightedNegatives(np.arange(1.0, 1001.0), 16, seed=0)
    draws = sampler.draw(np.arange(300), np.full(300, 50), 0).numpy().reshape(300, 50, 16)
    other = sampler.draw(np.arange(300), np.full(300, 50), 1).numpy().reshape(300, 50, 16)
    pairs = [(draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1]), (draws[..., 1:], draws[..., :-1]), (draws, other)]
    for a, b in pairs:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1] * math.sqrt(a.size)) < 4


@given(st.data())
def test_weighted_draws_do_not_depend_on_the_batch(data: st.DataObject):
    samples = np.array(data.draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=5, unique=True)))
    lengths = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(samples), max_size=len(samples))))
    sampler = WeightedNegatives(np.arange(1.0, 51.0), data.draw(st.integers(1, 9)), seed=4)
    together = sampler.draw(samples, lengths, 3)
    assert together.shape == (lengths.sum(), sampler.num_negatives)
    assert together.dtype == torch.int64
    alone = [sampler.draw(samples[b : b + 1], lengths[b : b + 1], 3) for b in range(len(samples))]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("change", ["seed", "epoch", "sample"])
def test_seed_epoch_and_sample_change_the_draws(change: str):
    def drawn(seed: int = 0, epoch: int = 0, sample: int = 0) -> list[torch.Tensor]:
        inputs = np.array([sample]), np.array([500]), epoch
        chances = np.arange(1.0, 10_001.0)
        targets = torch.arange(500)
        return [
            WeightedNegatives(chances, 8, seed).draw(*inputs, targets),
            InBatchNegatives(8, seed).draw(*inputs, targets),
        ]

    for a, b, again in zip(drawn(), drawn(**{change: 1}), drawn(), strict=True):
        assert (a == b).float().mean() < 0.02
        assert torch.equal(a, again)


def test_in_batch_draws_are_other_tokens_targets():
    tokens, rounds = 13, 400
    sampler = InBatchNegatives(9, seed=5)
    lengths = np.array([4, 0, 9])
    pairs = np.zeros((tokens, tokens), dtype=np.int64)
    for epoch in range(rounds):
        drawn = sampler.draw(np.array([3, 4, 8]), lengths, epoch, torch.arange(100, 100 + tokens)).numpy() - 100
        assert drawn.shape == (tokens, 9)
        np.add.at(pairs, (np.arange(tokens)[:, None], drawn), 1)
    assert not pairs.diagonal().any()
    others = pairs[~np.eye(tokens, dtype=bool)]
    assert abs(surprise(others, np.ones(len(others)))) < 4
    assert surprise(pairs.ravel(), np.ones(tokens**2)) > 100


@pytest.mark.parametrize("lengths", [[1], [0, 1, 0], [], [0, 0]])
def test_a_lone_token_draws_its_own_target(lengths: list[int]):
    """Which the loss masks; and a batch without tokens draws nothing."""
    targets = torch.full((sum(lengths),), 17)
    drawn = InBatchNegatives(3, 0).draw(np.arange(len(lengths)), np.array(lengths, dtype=np.int64), 0, targets)
    assert drawn.tolist() == [[17] * 3] * sum(lengths)


def test_log_uniform_is_zipf_by_rank():
    counts = np.array([5, 9, 0, 5])
    expected = [math.log((rank + 2) / (rank + 1)) / math.log(5) for rank in (1, 0, 3, 2)]
    np.testing.assert_allclose(probabilities("log_uniform", counts), expected)
    assert sum(expected) == pytest.approx(1)


def test_popularity_is_a_power_of_one_more_than_the_count():
    counts = np.array([0, 3, 8])
    np.testing.assert_allclose(probabilities("popularity", counts), np.array([1, 4, 9]) / 14)
    np.testing.assert_allclose(probabilities("popularity", counts, 0.5), np.array([1, 2, 3]) / 6)
    np.testing.assert_allclose(probabilities("popularity", counts, 0), np.full(3, 1 / 3))
    extreme = probabilities("popularity", np.array([0, 10**9]), 300)
    assert np.isfinite(np.log(extreme)).all()


def test_in_batch_is_the_share_of_targets():
    np.testing.assert_allclose(probabilities("in_batch", np.array([0, 3, 7])), [0.1, 0.3, 0.7])
    assert probabilities("uniform", np.array([0, 3])) is None


@pytest.mark.parametrize("protocol", ["three_way", "published"])
@pytest.mark.parametrize("max_length", [1, 6, 200])
def test_counts_are_those_of_training_targets(folder: Path, protocol: Any, max_length: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("turbogr.data.histories._COUNT_CHUNK", 40)
    data = SequenceDataModule(folder, 7, max_length, 5, protocol=protocol, num_workers=0)
    counted = Counter(item for batch in data.train_dataloader() for item in batch.targets.tolist())
    counts = target_counts(data.prepared, data.protocol, max_length)
    assert counts.tolist() == [counted[item] for item in range(60)]
    assert counts.sum() == data.num_training_tokens


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_log_q_is_how_often_items_are_drawn(folder: Path, sampling: str):
    data = make(folder, negative_sampling=sampling, num_negatives=60)
    assert data.log_q.dtype == np.float32
    assert data.log_q.shape == (60,)
    assert np.isfinite(data.log_q).all()
    found = np.zeros(60)
    loader = data.train_dataloader()
    for epoch in range(20):
        loader.set_epoch(epoch)
        for batch in loader:
            found += np.bincount(batch.negatives.numpy().ravel(), minlength=60)
    share = found / found.sum()
    chances = np.exp(data.log_q)
    drawn = share > 0
    assert drawn.sum() >= 55
    # Within the batch a token never draws itself, so that this is close and not exact there.
    assert np.abs(share - chances)[drawn].max() < 0.15 * chances.max()
    assert np.corrcoef(share, chances)[0, 1] > 0.97


def test_log_q_corrects_an_estimate():
    """The mean of f / q over draws is the sum of f over the catalogue; without log q it is another number."""
    counts = np.random.default_rng(1).zipf(1.5, 300).clip(max=5000)
    scores = np.random.default_rng(2).normal(size=300)
    for sampling in OTHERS:
        chances = probabilities(sampling, counts)
        draws = WeightedNegatives(chances, 200, 3).draw(np.arange(100), np.full(100, 50), 0).numpy()
        exact = np.exp(scores).sum()
        assert np.exp(scores - np.log(chances))[draws].mean() == pytest.approx(exact, rel=0.02)
        assert np.exp(scores + math.log(300))[draws].mean() != pytest.approx(exact, rel=0.02)


def test_uniform_draws_have_no_log_q(folder: Path):
    assert make(folder).log_q is None


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_workers_change_nothing(folder: Path, sampling: str):
    alone, workers = (list(make(folder, negative_sampling=sampling, num_workers=count).train_dataloader()) for count in (0, 2))
    for a, b in zip(alone, workers, strict=True):
        assert torch.equal(a.negatives, b.negatives)
        assert torch.equal(a.targets, b.targets)
    if sampling == "in_batch":
        assert all(set(batch.negatives.flatten().tolist()) <= set(batch.targets.tolist()) for batch in alone)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_ranks_change_draws_within_the_batch_only(folder: Path, sampling: str):
    def negatives(ranks: int) -> dict[int, list]:
        found: dict[int, list] = {}
        for rank in range(ranks):
            options = {"batch_size": 12 // ranks, "negative_sampling": sampling}
            for batch in make(folder, rank, ranks, **options).train_dataloader():
                parts = batch.negatives.split(batch.lengths.tolist())
                found |= {user: part.tolist() for user, part in zip(batch.user_ids.tolist(), parts, strict=True)}
        return found

    assert (negatives(1) == negatives(3)) is (sampling != "in_batch")


def test_samplers_are_picklable():
    for sampler in (WeightedNegatives(np.arange(1.0, 9.0), 3, 1), InBatchNegatives(3, 1)):
        inputs = np.array([1, 2]), np.array([3, 4]), 0, torch.arange(7)
        assert torch.equal(pickle.loads(pickle.dumps(sampler)).draw(*inputs), sampler.draw(*inputs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"negative_sampling": "zipf"},
            "negative_sampling is 'zipf'; choose one of uniform, log_uniform, popularity, in_batch",
        ),
        ({"popularity_exponent": 0.5}, 'popularity_exponent is 0.5, an option of negative_sampling "popularity"'),
        ({"negative_sampling": "in_batch", "popularity_exponent": 2.0}, 'but that is "in_batch"'),
        ({"negative_sampling": "popularity", "popularity_exponent": -1.0}, "popularity_exponent is -1.0; it must be 0 or more"),
        ({"negative_sampling": "popularity", "popularity_exponent": math.inf}, "popularity_exponent is inf"),
        ({"negative_sampling": "popularity", "popularity_exponent": math.nan}, "popularity_exponent is nan"),
    ],
)
def test_impossible_options_are_refused(folder: Path, options: dict, message: str):
    with pytest.raises(ConfigurationError, match=message):
        make(folder, **options)


@pytest.mark.parametrize(("size", "draws"), [(0, 1), (3, 4), (3, 0)])
def test_impossible_samplers_are_refused(size: int, draws: int):
    with pytest.raises(ConfigurationError, match=r"catalogue of 0|num_negatives is"):
        WeightedNegatives(np.ones(size), draws, 0)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(("place", "count"), [("on_train_batch_end", 3), ("Ctrl-C", 7)])
def test_a_resumed_run_draws_the_same(folder: Path, tmp_path: Path, sampling: str, place: str, count: int):
    options = {"negative_sampling": sampling, "batch_size": 9}
    whole = run(folder, tmp_path, **options)
    first = run(folder, tmp_path, Stop(tmp_path / "stop.ckpt", place, count), **options)
    second = run(folder, tmp_path, resume=tmp_path / "stop.ckpt", workers=2, **options)
    assert_resumes_exactly(whole, [first, second])
    with pytest.raises(AssertionError):
        assert_resumes_exactly(run(folder, tmp_path, **(options | {"negative_sampling": "uniform"})), [first, second])


def fitting(folder: Path, ranks: int = 1, **options: Any) -> SequenceDataModule:
    return make(folder, 0, ranks, fitting=True, **options)


def test_a_run_is_resumed_with_the_same_sampling_only(folder: Path):
    popular = {"negative_sampling": "popularity", "popularity_exponent": 0.5}
    state = fitting(folder, **popular).state_dict()
    fitting(folder, **popular).load_state_dict(state)
    with pytest.raises(ConfigurationError, match=r"popularity_exponent was 0\.5 and is 1\.0"):
        fitting(folder, negative_sampling="popularity").load_state_dict(state)
    with pytest.raises(ConfigurationError, match="negative_sampling was 'popularity' and is 'uniform'"):
        fitting(folder).load_state_dict(state)


def test_runs_of_versions_with_uniform_draws_are_resumed(folder: Path):
    state = fitting(folder).state_dict()
    earlier = {name: value for name, value in state.items() if name not in ("negative_sampling", "popularity_exponent")}
    fitting(folder).load_state_dict(earlier)
    with pytest.raises(ConfigurationError, match="negative_sampling was 'uniform' and is 'log_uniform'"):
        fitting(folder, negative_sampling="log_uniform").load_state_dict(earlier)


def test_ranks_may_change_unless_negatives_are_drawn_within_the_batch(folder: Path):
    for sampling in ("popularity", "in_batch"):
        state = fitting(folder, 2, batch_size=6, negative_sampling=sampling).state_dict()
        other = fitting(folder, 1, batch_size=12, negative_sampling=sampling)
        if sampling == "popularity":
            other.load_state_dict(state)
        else:
            with pytest.raises(ConfigurationError, match="ranks was 2 and is 1"):
                other.load_state_dict(state)
