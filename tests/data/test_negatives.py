import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turbogr.data.negatives import NEGATIVES, ORDER, UniformNegatives, stream_keys
from turbogr.errors import ConfigurationError


def draw(sampler: UniformNegatives, samples: list[int], lengths: list[int], epoch: int = 0) -> list[torch.Tensor]:
    """Draws of each sample: [length, R] each."""
    drawn = sampler.draw(np.array(samples, dtype=np.int64), np.array(lengths, dtype=np.int64), epoch)
    assert drawn.dtype == torch.int64
    assert drawn.shape == (sum(lengths), sampler.num_negatives)
    return list(drawn.split(lengths))


def uniformity(draws: np.ndarray, num_items: int, buckets: int) -> float:
    """Chi-square statistic of draws over equal shares of 0..num_items-1, as standard deviations from its expectation."""
    assert num_items % buckets == 0
    counts = np.bincount(draws.ravel() // (num_items // buckets), minlength=buckets)
    assert len(counts) == buckets
    expected = draws.size / buckets
    degrees = buckets - 1
    return float((((counts - expected) ** 2).sum() / expected - degrees) / math.sqrt(2 * degrees))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson correlation, as standard deviations from 0."""
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1] * math.sqrt(a.size))


@given(st.data())
def test_draws_do_not_depend_on_the_batch(data: st.DataObject):
    samples = data.draw(st.lists(st.integers(0, 10**9), min_size=1, max_size=6, unique=True))
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=len(samples), max_size=len(samples)))
    sampler = UniformNegatives(50, data.draw(st.integers(1, 9)), seed=4)
    together = draw(sampler, samples, lengths, epoch=3)
    order = data.draw(st.permutations(range(len(samples))))
    for position, shuffled in zip(
        order, draw(sampler, [samples[i] for i in order], [lengths[i] for i in order], epoch=3), strict=True
    ):
        assert torch.equal(shuffled, together[position])
    for sample, length, expected in zip(samples, lengths, together, strict=True):
        assert torch.equal(draw(sampler, [sample], [length], epoch=3)[0], expected)


def test_draws_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch):
    sampler = UniformNegatives(1000, 10, seed=4)
    expected = draw(sampler, [3, 5], [700, 300])
    monkeypatch.setattr("turbogr.data.negatives._CHUNK", 35)
    for a, b in zip(draw(sampler, [3, 5], [700, 300]), expected, strict=True):
        assert torch.equal(a, b)


def test_seed_epoch_and_sample_change_the_draws():
    base = draw(UniformNegatives(10**6, 8, seed=0), [0], [20])[0]
    for seed, epoch, sample in [(1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        other = draw(UniformNegatives(10**6, 8, seed), [sample], [20], epoch)[0]
        assert (base == other).float().mean() < 0.05


@pytest.mark.parametrize(
    ("num_items", "buckets"),
    [(7, 7), (1680, 1680), (2048, 2048), (32_038_725, 235), (3 << 30, 96), (1 << 32, 256)],
)
def test_draws_are_uniform(num_items: int, buckets: int):
    samples = np.arange(300)
    sampler = UniformNegatives(num_items, 7, seed=1)
    draws = np.concatenate([sampler.draw(samples, np.full(300, 100), epoch).numpy() for epoch in range(5)])
    assert 0 <= draws.min() <= draws.max() < num_items
    assert abs(uniformity(draws, num_items, buckets)) < 4


def test_draws_are_uniform_where_many_are_rejected():
    # V = 3 * 2^30: a quarter of the words is rejected and drawn anew. Without that, values of 0 mod 3 come twice as often.
    size, shape = 3 << 30, (np.arange(300), np.full(300, 100))
    draws = UniformNegatives(size, 7, seed=1).draw(*shape, 0).numpy() % 3
    assert abs(uniformity(draws, 3, 3)) < 4
    words = UniformNegatives(1 << 32, 7, seed=1).draw(*shape, 0).numpy()
    assert uniformity(((words * 3) >> 2) % 3, 3, 3) > 1000
    assert uniformity(words % size, size, 96) > 1000


def test_neighbours_are_not_correlated():
    sampler = UniformNegatives(10**6, 16, seed=0)
    length = 200

    def drawn(epoch: int, seed: int = 0) -> np.ndarray:
        sampler.seed = seed
        return sampler.draw(np.arange(500), np.full(500, length), epoch).numpy().reshape(500, length, 16)

    base = drawn(0)
    pairs = {
        "sample": (base[:-1], base[1:]),
        "position": (base[:, :-1], base[:, 1:]),
        "draw": (base[..., :-1], base[..., 1:]),
        "halves of a word": (base[..., 0::2], base[..., 1::2]),
        "epoch": (base, drawn(1)),
        "seed": (base, drawn(0, seed=1)),
        "epoch and sample": (base[:-1], drawn(1)[1:]),
        "seed and epoch": (drawn(1), drawn(0, seed=1)),
    }
    for name, (a, b) in pairs.items():
        assert abs(correlation(a, b)) < 4, name
        # Equal draws occur as often as chance has it: 1 in 10^6.
        assert np.count_nonzero(a == b) < 20, name
    assert correlation(base, base) > 1000  # the measure can fail


def test_no_word_is_used_twice():
    # With V = 2^32 a draw is half a word as it was hashed; overlapping streams would repeat pairs of halves.
    sampler = UniformNegatives(1 << 32, 6, seed=9)
    pairs = np.concatenate([sampler.draw(np.arange(400), np.full(400, 100), epoch).numpy() for epoch in (0, 1)]).reshape(-1, 2)
    words = pairs[:, 0].astype(np.uint64) << np.uint64(32) | pairs[:, 1].astype(np.uint64)
    assert len(np.unique(words)) == len(words) == 240_000


def test_keys_are_distinct():
    samples = np.arange(100_000)
    keys = [stream_keys(seed, epoch, samples, use) for seed in (0, 1) for epoch in (0, 1) for use in (ORDER, NEGATIVES)]
    assert len(np.unique(np.concatenate(keys))) == 8 * len(samples)


def test_is_picklable():
    sampler = UniformNegatives(50, 3, seed=2**64 - 1)
    copy = pickle.loads(pickle.dumps(sampler))
    assert torch.equal(draw(copy, [1], [4])[0], draw(sampler, [1], [4])[0])


@pytest.mark.parametrize(
    ("num_items", "num_negatives", "seed", "message"),
    [
        (0, 1, 0, "catalogue of 0 items"),
        ((1 << 32) + 1, 1, 0, "catalogue of 4294967297 items"),
        (10, 0, 0, "num_negatives is 0; it must lie between 1 and the size of the catalogue, 10"),
        (10, 11, 0, "num_negatives is 11"),
        (10, 1, -1, "seed is -1"),
        (10, 1, 2**64, "seed is 18446744073709551616"),
    ],
)
def test_impossible_options_are_refused(num_items: int, num_negatives: int, seed: int, message: str):
    with pytest.raises(ConfigurationError, match=message):
        UniformNegatives(num_items, num_negatives, seed)
