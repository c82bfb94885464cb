"""Load-balanced stochastic length: which histories are thinned, to what, and that it depends on (seed, epoch, user) alone."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.make import write_prepared
from tests.data.test_ranks import make
from turbogr.batch import JaggedBatch
from turbogr.data.samplers import EpochBatches
from turbogr.data.stochastic_length import StochasticLength, thinned
from turbogr.errors import ConfigurationError

LONGEST = 400
LENGTHS = np.minimum(np.exp(np.random.default_rng(3).normal(4, 1.2, 500)).astype(np.int64) + 1, LONGEST)
USERS = np.arange(1000, 1500)


def test_the_papers_figures():
    # N = 4096, alpha = 1.6: histories of 4096^0.8 = 776 tokens; the longest are whole with 4096^-0.4 = 3.6 %.
    length = StochasticLength(alpha=1.6)
    assert length.shortest(4096) == 776
    assert length.whole(np.array([100, 776, 1552, 4096]), 4096) == pytest.approx([1, 1, 0.25, 4096**-0.4], rel=2e-3)
    assert StochasticLength(alpha=2.0).shortest(4096) == 4096


@given(
    st.lists(st.integers(1, LONGEST), min_size=0, max_size=40),
    st.floats(0.5, 2.0),
    st.sampled_from([0.5, 1.0, 1.5, 2.0]),
    st.floats(0, 2),
    st.integers(0, 3),
)
@settings(deadline=None)
def test_the_target_is_met_where_it_can_be(tokens, alpha, gamma, share, epoch):
    length, histories = StochasticLength(alpha, gamma), np.array(tokens, dtype=np.int64)
    least = np.minimum(histories, length.shortest(LONGEST))
    low, high = (float((x.astype(float) ** gamma).sum()) for x in (least, histories))
    target = low + share * (high - low)
    kept = length.kept(histories, USERS[: len(histories)], target, LONGEST, 5, epoch)
    assert (kept >= least).all()
    assert (kept <= histories).all()
    load = float((kept.astype(float) ** gamma).sum())
    between = np.flatnonzero((kept > least) & (kept < histories))
    assert len(between) <= 1  # all others are whole or as short as can be
    if target > high * (1 + 1e-9):
        assert (kept == histories).all()
    else:
        token = LONGEST**gamma - (LONGEST - 1) ** gamma if gamma >= 1 else 1.0
        assert target - token * (1 + 1e-6) - 1e-6 <= load <= target * (1 + 1e-9) + 1e-9


def test_the_mean_target_is_what_plain_stochastic_length_expects():
    length, random = StochasticLength(1.4, 2.0), np.random.default_rng(0)
    whole = length.whole(LENGTHS, LONGEST)
    loads = [
        float((np.where(random.random(500) < whole, LENGTHS, np.minimum(LENGTHS, length.shortest(LONGEST))) ** 2.0).sum())
        for _ in range(4000)
    ]
    assert length.target(LENGTHS, 1, LONGEST) == pytest.approx(
        np.mean(loads), rel=5 * np.std(loads) / np.mean(loads) / 4000**0.5
    )
    assert length.target(LENGTHS, 4, LONGEST) == length.target(LENGTHS, 1, LONGEST) / 4


def loads(gamma: float, thinning: StochasticLength | None) -> np.ndarray:
    """[steps, ranks] of an epoch on 4 ranks."""
    table = []
    for rank in range(4):
        batches = EpochBatches(USERS, 16, 7, rank=rank, ranks=4, lengths=LENGTHS, stochastic_length=thinning)
        kept = [LENGTHS[key.samples - 1000] if key.kept is None else key.kept for key in batches]
        table.append([float((each**gamma).sum()) for each in kept])
    return np.array(table).T[:-1]  # the last is short


@pytest.mark.parametrize("gamma", [1.0, 2.0])
def test_ranks_have_equal_loads(gamma: float):
    def spread(table: np.ndarray) -> float:
        return float(np.mean((table.max(1) - table.min(1)) / table.max(1)))

    # Where alpha leaves each rank histories to thin, and not all of them.
    assert spread(loads(gamma, StochasticLength(1.5, gamma))) < spread(loads(gamma, None)) / 3


def test_who_stays_whole_is_drawn_by_weight():
    # Of two histories of which one fits: chances are as the weights, 1 / n^2.
    length = StochasticLength(alpha=1.0, gamma=1.0)
    tokens = np.array([100, 200])
    target = float(100 + length.shortest(LONGEST))
    whole = sum(length.kept(tokens, USERS[:2], target, LONGEST, seed, 0)[0] == 100 for seed in range(4000))
    assert abs(whole / 4000 - 0.8) < 5 * (0.16 / 4000) ** 0.5


def test_thinned_tokens_are_a_fair_draw():
    tokens, kept = np.array([7, 0, 1, 10]), np.array([3, 0, 1, 10])
    counts = np.zeros(7, dtype=np.int64)
    pairs = set()
    for epoch in range(3000):
        found = thinned(tokens, kept, USERS[:4], 1, epoch)
        first, rest = found[:3], found[3:]
        assert (np.diff(first) > 0).all()
        assert rest.tolist() == [0, *range(10)]
        counts[first] += 1
        pairs.add(tuple(first.tolist()))
    assert len(pairs) == 35  # all of 7 over 3
    assert np.abs(counts - 3000 * 3 / 7).max() < 5 * np.sqrt(3000 * 3 / 7 * 4 / 7)
    assert thinned(tokens, kept, USERS[:4], 1, 5).tolist() == thinned(tokens, kept, USERS[:4], 1, 5).tolist()
    # A history's draw does not depend on what else the batch holds.
    alone = thinned(tokens[:1], kept[:1], USERS[:1], 1, 5)
    assert thinned(tokens, kept, USERS[:4], 1, 5)[:3].tolist() == alone.tolist()
    assert thinned(tokens[:0], kept[:0], USERS[:0], 1, 5).tolist() == []


@pytest.mark.parametrize(("option", "value"), [("alpha", 0.0), ("alpha", 2.1), ("gamma", 0.0), ("gamma", float("inf"))])
def test_impossible_options_are_refused(option: str, value: float):
    with pytest.raises(ConfigurationError, match=f"stochastic_length.{option} is {value}"):
        StochasticLength(**{option: value})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared") / "p", 43, 60, min_len=4, max_len=60, seed=2)


THINNING: dict[str, Any] = {"max_length": 200, "stochastic_length": StochasticLength(1.5, 2.0)}


def events(batch: JaggedBatch) -> dict[int, list[tuple[int, ...]]]:
    """Each user's (item, time, target, target's time)."""
    tensors = (batch.values, batch.timestamps, batch.targets, batch.target_times)
    tokens = list(zip(*(tensor.tolist() for tensor in tensors), strict=True))
    bounds = batch.offsets.tolist()
    return {user: tokens[bounds[b] : bounds[b + 1]] for b, user in enumerate(batch.user_ids.tolist())}


def subsequence(short: list, whole: list) -> bool:
    remaining = iter(whole)
    return all(token in remaining for token in short)


def test_batches_of_thinned_histories(folder: Path):
    whole = {
        user: tokens for batch in make(folder, max_length=200).train_dataloader() for user, tokens in events(batch).items()
    }
    loader = make(folder, **THINNING).train_dataloader()
    least, thinner, epochs = StochasticLength(1.5).shortest(max(map(len, whole.values()))), 0, []
    for _ in range(2):
        found = {}
        for batch in loader:
            assert batch.negatives.shape[0] == batch.num_tokens
            found |= events(batch)
        assert found.keys() == whole.keys()  # every user, once
        for user, tokens in found.items():
            assert subsequence(tokens, whole[user])
            assert len(tokens) >= min(len(whole[user]), least)
            thinner += len(tokens) < len(whole[user])
        epochs.append(found)
    assert thinner > 10
    assert epochs[0] != epochs[1]


def test_workers_and_resuming_change_nothing(folder: Path):
    def batches(first: int, workers: int = 0) -> list[dict]:
        found = []
        for rank in range(2):
            loader = make(folder, rank, 2, num_workers=workers, **THINNING).train_dataloader()
            loader.load_state_dict({"batches": first})
            found.append([events(batch) for _ in range(2) for batch in islice(loader, 5)])
        return found

    assert batches(0, workers=2) == batches(0)
    assert [each[3:5] for each in batches(0)] == [each[:2] for each in batches(3)]


def test_resuming_needs_the_same_ranks_and_shares(folder: Path):
    """Here it changes what is trained on; without thinning it would not, and is allowed."""
    state = make(folder, 0, 2, batch_size=6, **THINNING).state_dict()
    make(folder, 1, 2, fitting=True, batch_size=6, **THINNING).load_state_dict(state)
    for ranks, changes, message in (
        (4, {"batch_size": 3}, "ranks was 2 and is 4"),
        (2, {"balance": "tokens"}, "balance was 'off' and is 'tokens'"),
        (2, {"stochastic_length": StochasticLength(1.6, 2.0)}, r"stochastic_length was {'alpha': 1.5.* and is {'alpha': 1.6"),
        (2, {"stochastic_length": None}, "stochastic_length was .* and is None"),
    ):
        options = THINNING | {"batch_size": 6} | changes
        with pytest.raises(ConfigurationError, match=message):
            make(folder, 0, ranks, fitting=True, **options).load_state_dict(state)
    plain = make(folder, 0, 2, batch_size=6).state_dict()
    make(folder, 0, 4, fitting=True, batch_size=3, balance="tokens").load_state_dict(plain)
