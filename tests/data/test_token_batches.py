"""Batches of equally many tokens, and batches shared out by cost: every user once, the same steps on any number of ranks."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr.data.balance import CostModel
from turbogr.data.samplers import BatchKey, EpochBatches
from turbogr.data.sharing import Sharing
from turbogr.errors import ConfigurationError

SHARINGS = {
    "slices": Sharing(),
    "tokens": Sharing("greedy"),
    "attention": Sharing("greedy", CostModel(1.0, 0.001)),
    "karmarkar_karp": Sharing("karmarkar_karp"),
}


def make(lengths: Any, ranks: int = 1, rank: int = 0, batch_size: int = 4, **options: Any) -> EpochBatches:
    """Users 100, 101, … with these lengths."""
    tokens = np.asarray(lengths, dtype=np.int64)
    return EpochBatches(np.arange(100, 100 + len(tokens)), batch_size, 7, rank=rank, ranks=ranks, lengths=tokens, **options)


def steps(lengths: Any, ranks: int, epochs: int = 2, first: int = 0, **options: Any) -> list[list[list[int]]]:
    """For every batch of some epochs, what each rank trains."""
    every = [make(lengths, ranks, rank, **options) for rank in range(ranks)]
    streams = [islice(each.stream(first), epochs * len(each) - first) for each in every]
    return [[key.samples.tolist() for key in keys] for keys in zip(*streams, strict=True)]


def skewed(count: int, seed: int = 0) -> np.ndarray:
    return np.minimum(np.exp(np.random.default_rng(seed).normal(3.5, 1.2, count)).astype(np.int64) + 1, 2048)


cases = {
    "lengths": st.lists(st.integers(1, 300), min_size=1, max_size=60),
    "ranks": st.integers(1, 5),
    "batch_size": st.integers(1, 6),
    "tokens_per_batch": st.one_of(st.none(), st.just("auto"), st.integers(1, 2000)),
    "sharing": st.sampled_from(list(SHARINGS.values())),
}


@given(**cases)
@settings(deadline=None)
def test_every_user_once_an_epoch_on_one_rank(lengths, ranks, batch_size, tokens_per_batch, sharing):
    options = {"batch_size": batch_size, "tokens_per_batch": tokens_per_batch, "sharing": sharing}
    every = [make(lengths, ranks, rank, **options) for rank in range(ranks)]
    assert len({len(each) for each in every}) == 1
    for epoch in range(2):
        found = []
        for each in every:
            each.set_epoch(epoch)
            keys = list(each)
            assert len(keys) == len(each)
            assert {key.epoch for key in keys} == {epoch}
            assert all(key.kept is None for key in keys)
            found += [user for key in keys for user in key.samples.tolist()]
        assert sorted(found) == list(range(100, 100 + len(lengths)))
    # A rank is without users only where there are fewer of them than ranks.
    for shares in steps(lengths, ranks, **options):
        assert sum(map(bool, shares)) == min(ranks, sum(map(len, shares)))


@given(**cases, first=st.integers(0, 40))
@settings(deadline=None)
def test_any_batch_is_the_same_whoever_starts_there(lengths, ranks, batch_size, tokens_per_batch, sharing, first):
    options = {"batch_size": batch_size, "tokens_per_batch": tokens_per_batch, "sharing": sharing}
    whole = steps(lengths, ranks, **options)
    first %= len(whole)
    assert steps(lengths, ranks, first=first, **options) == whole[first:]


def together(found: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(user for share in shares for user in share) for shares in found]


@given(cases["lengths"], st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (12, 1)]), st.sampled_from(list(SHARINGS)))
@settings(deadline=None)
def test_a_step_has_the_same_users_however_it_is_shared(lengths, shape, sharing):
    ranks, batch_size = shape
    for tokens_per_batch, alone in ((None, None), ("auto", "auto"), (50 * batch_size, 600)):
        expected = steps(lengths, 1, batch_size=12, tokens_per_batch=alone)
        options = {"batch_size": batch_size, "tokens_per_batch": tokens_per_batch, "sharing": SHARINGS[sharing]}
        assert together(steps(lengths, ranks, **options)) == together(expected)


def test_one_rank_keeps_the_order_whatever_the_balance():
    for sharing in SHARINGS.values():
        assert steps(skewed(100), 1, sharing=sharing) == steps(skewed(100), 1)


def test_balance_moves_users():
    # Negative control of the comparisons above: who trains whom does differ, and so does what a step has.
    slices = steps(skewed(100), 4)
    assert steps(skewed(100), 4, sharing=SHARINGS["tokens"]) != slices
    assert together(steps(skewed(100), 4, tokens_per_batch="auto")) != together(slices)


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_have_equally_many_tokens(shuffle: bool):
    lengths = skewed(3000)
    batches = make(lengths, ranks=4, batch_size=16, tokens_per_batch="auto", shuffle=shuffle)
    assert len(batches) == round(3000 / 64)
    mean = lengths.sum() / len(batches)
    for epoch in range(3):
        sizes = [int(lengths[batch].sum()) for batch in batches.together(epoch)]
        assert len(sizes) == len(batches)
        assert max(abs(size - mean) for size in sizes) <= lengths.max()
    plain = [int(lengths[batch].sum()) for batch in make(lengths, ranks=4, batch_size=16).together(0)][:-1]
    assert np.std(sizes) < np.std(plain) / 3
    assert len({len(batch) for batch in batches.together(0)}) > 5  # by other numbers of users


def test_the_budget_decides_how_many_batches():
    lengths = skewed(1000)
    total = int(lengths.sum())
    for budget in (200, 1000, 10_000):
        for ranks in (1, 3):
            assert len(make(lengths, ranks, tokens_per_batch=budget)) == round(total / budget / ranks)
    assert len(make(lengths, tokens_per_batch=10 * total)) == 1
    assert len(make(lengths, tokens_per_batch=1)) == 1000  # no batch is empty
    # "auto" is batch_size users of mean length.
    assert len(make(lengths, 2, batch_size=5, tokens_per_batch="auto")) == 100
    assert len(make(lengths, 2, batch_size=5, tokens_per_batch=round(5 * lengths.mean()))) == 100


@pytest.mark.parametrize("name", ["tokens", "attention", "karmarkar_karp"])
def test_ranks_have_equal_costs(name: str):
    lengths, sharing = skewed(3000), SHARINGS[name]
    cost = dict(zip(range(100, 3100), sharing.cost(lengths), strict=True))

    def delay(shared: Sharing) -> float:
        loads = np.array(
            [
                [sum(cost[u] for u in share) for share in shares]
                for shares in steps(lengths, 4, 1, batch_size=64, sharing=shared, tokens_per_batch="auto")
            ]
        )
        return float(1 - loads.mean(1).sum() / loads.max(1).sum())

    assert delay(sharing) < 0.01 < delay(SHARINGS["slices"]) / 5


def test_the_cap_holds_and_names_the_batch_that_it_refuses():
    lengths = [100, *[10] * 63] * 3
    cost = CostModel(0.0, 1.0)  # the long one is as dear as 100 short ones

    def heaviest(max_tokens: int | None) -> int:
        found = steps(lengths, 4, 1, batch_size=16, sharing=Sharing("greedy", cost, max_tokens), shuffle=False)
        return max(sum(lengths[user - 100] for user in share) for shares in found for share in shares)

    assert heaviest(None) > 200
    assert heaviest(190) <= 190
    with pytest.raises(
        ConfigurationError, match=r"batch \d+ of epoch 0 has .* 4 ranks 100 tokens at most; .* \(max_tokens_per_rank\)"
    ):
        list(make([60] * 50, 4, batch_size=16, sharing=Sharing("greedy", max_tokens=100)))
    # What can hold in no epoch is refused at once, not where its batch comes.
    with pytest.raises(ConfigurationError, match="max_tokens_per_rank is 99, but the longest history has 100 tokens"):
        make(lengths, 4, batch_size=16, sharing=Sharing("greedy", max_tokens=99))


def test_what_needs_lengths_says_so():
    samples = np.arange(10)
    for options in ({"tokens_per_batch": 5}, {"tokens_per_batch": "auto"}, {"sharing": SHARINGS["tokens"]}):
        with pytest.raises(ValueError, match="need lengths"):
            EpochBatches(samples, 4, 0, **options)
    with pytest.raises(ValueError, match="10 samples have 9 lengths"):
        EpochBatches(samples, 4, 0, lengths=samples[1:])
    with pytest.raises(ConfigurationError, match="drop_last has no meaning with tokens_per_batch"):
        make([3, 4], tokens_per_batch=5, drop_last=True)
    with pytest.raises(ConfigurationError, match=r"no batch \(tokens_per_batch 5 on 2 ranks\)"):
        make([], 2, tokens_per_batch=5)
    assert BatchKey(0, samples).kept is None
