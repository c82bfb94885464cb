"""Plans of who trains what: complete, deterministic, close to the best there is, within the cap."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbogr.data.balance import CostModel, assign, cut_by_tokens, imbalance, lowest_maximum
from turbogr.data.packing import differences, longest_first
from turbogr.data.samplers import share
from turbogr.errors import ConfigurationError

METHODS = ["slices", "greedy", "karmarkar_karp"]
PLANNED = METHODS[1:]

lengths = st.lists(st.integers(1, 8192), min_size=1, max_size=60).map(lambda values: np.array(values, dtype=np.int64))
few = st.lists(st.integers(1, 60), min_size=1, max_size=8).map(lambda values: np.array(values, dtype=np.int64))


def loads(costs, plan):
    return np.array([costs[each].sum() for each in plan])


def best_maximum(costs, ranks):
    """By trying all plans."""
    plans = itertools.product(range(ranks), repeat=len(costs))
    return min(np.bincount(plan, weights=costs, minlength=ranks).max() for plan in plans)


def draw(seed, count, cap=4096):
    """Log-normal lengths such as real histories have."""
    drawn = np.random.default_rng(seed).lognormal(8.12, 0.84, count).astype(np.int64)
    return np.clip(drawn, 1, cap)


@given(lengths, st.integers(1, 20), st.sampled_from(METHODS))
def test_every_history_has_one_rank(tokens, ranks, method):
    plan = assign(CostModel()(tokens), ranks, method)
    assert len(plan) == ranks
    assert sorted(np.concatenate(plan).tolist()) == list(range(len(tokens)))
    assert all(each.dtype == np.int64 and (np.diff(each) > 0).all() for each in plan)
    assert sum(len(each) > 0 for each in plan) == min(ranks, len(tokens))
    firsts = [each[0] for each in plan if len(each)]
    assert firsts == sorted(firsts)


@given(st.integers(0, 40), st.integers(1, 9))
def test_slices_are_those_of_the_sampler(count, ranks):
    plan = assign(np.ones(count), ranks, "slices")
    for rank in range(ranks):
        assert plan[rank].tolist() == list(range(count))[share(count, rank, ranks)]


@given(few, st.integers(2, 3), st.sampled_from(PLANNED))
def test_tiny_batches_are_close_to_the_best_of_all_plans(tokens, ranks, method):
    # 4/3 - 1/(3 ranks) is Graham's bound for longest first, and not below that of Karmarkar-Karp (Michiels et al. 2003).
    costs = tokens.astype(np.float64)
    best = best_maximum(costs, ranks)
    assert lowest_maximum(costs, ranks) <= best + 1e-9
    assert best <= loads(costs, assign(costs, ranks, method)).max() <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


@given(lengths, st.integers(2, 12))
def test_exchanges_never_make_the_heaviest_heavier(tokens, ranks):
    order = np.argsort(-tokens, kind="stable")
    plain = np.zeros(ranks)
    for i in order:
        plain[plain.argmin()] += tokens[i]
    assert loads(tokens, assign(tokens.astype(np.float64), ranks)).max() <= plain.max()


@pytest.mark.parametrize("method", PLANNED)
def test_differences_nearly_vanish_on_real_shapes(method):
    tables = {"slices": [], method: []}
    for seed in range(20):
        tokens = draw(seed, 16 * 8)
        for name, table in tables.items():
            table.append(loads(tokens, assign(tokens.astype(np.float64), 16, name)))
    before, after = (imbalance(table) for table in tables.values())
    assert before.delay > 10  # the control: equally many users a rank
    assert after.delay < 0.5
    assert after.difference < 200 < before.difference


def test_differencing_as_in_the_textbook():
    # Korf 2009: of 4, 5, 6, 7, 8 differencing leaves 14 and 16, longest first 13 and 17, and the best is 15 and 15.
    costs = np.array([4.0, 5, 6, 7, 8])
    assert sorted(loads(costs, differences(costs, 2))) == [14, 16]
    assert sorted(loads(costs, longest_first(costs, 2))) == [13, 17]
    for method in PLANNED:
        assert sorted(loads(costs, assign(costs, 2, method))) == [15, 15]


@given(lengths, st.integers(2, 12))
def test_differencing_loses_no_history(tokens, ranks):
    plan = differences(tokens.astype(np.float64), ranks)
    assert len(plan) == ranks
    assert sorted(itertools.chain.from_iterable(plan)) == list(range(len(tokens)))


@pytest.mark.parametrize("method", METHODS)
def test_the_same_plan_every_time(method):
    tokens = draw(3, 300)
    tokens[::7] = tokens[0]  # ties
    costs = CostModel(1.0, 1e-4)(tokens)
    first = assign(costs, 16, method)
    assert all(np.array_equal(a, b) for a, b in zip(first, assign(costs.copy(), 16, method), strict=True))


def test_a_known_plan():
    # Frozen: a resumed run must make the same plan in another version, too.
    tokens = np.array([9, 1, 4, 4, 7, 2, 6, 3, 8, 5])
    plan = [each.tolist() for each in assign(tokens.astype(np.float64), 3)]
    assert plan == [[0, 2, 3], [1, 4, 5, 6], [7, 8, 9]]
    assert sorted(loads(tokens, plan)) == [16, 16, 17]


@given(lengths, st.integers(1, 12), st.sampled_from(METHODS), st.data())
def test_no_rank_exceeds_the_cap(tokens, ranks, method, data):
    cap = data.draw(st.integers(int(tokens.max()), int(tokens.sum()) + 1))
    costs = CostModel()(tokens)
    refusal = ""
    try:
        plan = assign(costs, ranks, method, tokens, cap, batch="batch 7")
    except ConfigurationError as error:
        refusal = str(error)
    if refusal:
        assert refusal.startswith("batch 7 has ")
        assert f"{ranks} ranks {cap} tokens" in refusal
        # Longest first is among what was tried: where a history finds no room, all ranks are more than half full.
        assert method == "slices" or tokens.sum() > ranks * cap / 2
    else:
        assert sorted(np.concatenate(plan).tolist()) == list(range(len(tokens)))
        assert loads(tokens, plan).max() <= cap


def test_a_cap_that_only_a_full_packing_meets():
    tokens = np.array([6, 4, 4, 3, 3])  # longest first: 6 + 3 (+ 3 does not fit), 4 + 4 (+ 3 neither)
    plan = assign(tokens.astype(np.float64), 2, "greedy", tokens, 10)
    assert loads(tokens, plan).tolist() == [10, 10]
    with pytest.raises(ConfigurationError, match="longest 6"):
        assign(tokens.astype(np.float64), 2, "greedy", tokens, 9)


def test_a_cap_on_tokens_holds_where_costs_are_not_tokens():
    tokens = np.array([100] + [10] * 20)
    costs = CostModel(0.0, 1.0)(tokens)
    free = assign(costs, 2)
    assert loads(tokens, free).max() == 200  # one of 100 costs more than twenty of 10
    capped = assign(costs, 2, tokens=tokens, max_tokens=160)
    assert loads(tokens, capped).max() <= 160


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.ones(3), 0), "ranks is 0"),
        ((np.ones(3), 2, "best"), "choose one of slices, greedy, karmarkar_karp"),
        ((np.ones(3), 2, "greedy", None, 5), "needs the tokens"),
    ],
)
def test_impossible_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        assign(*arguments)


def test_no_histories_and_fewer_than_ranks():
    for method in METHODS:
        assert [len(each) for each in assign(np.ones(0), 3, method)] == [0, 0, 0]
        assert [each.tolist() for each in assign(np.ones(2), 4, method)] == [[0], [1], [], []]


@given(lengths, st.data())
def test_cuts_are_near_the_ideal(tokens, data):
    batches = data.draw(st.integers(1, len(tokens)))
    cuts = cut_by_tokens(tokens, batches)
    assert cuts.dtype == np.int64
    assert len(cuts) == batches + 1
    assert (cuts[0], cuts[-1]) == (0, len(tokens))
    assert (np.diff(cuts) > 0).all()
    if tokens.max() * batches <= tokens.sum():  # no history is longer than a batch
        ends = np.cumsum(tokens)[cuts[1:-1] - 1]
        ideal = tokens.sum() * np.arange(1, batches) / batches
        assert (abs(ends - ideal) <= tokens.max() / 2 + 1e-6).all()


def test_batches_cut_by_tokens_vary_less_than_those_of_equally_many_users():
    tokens = draw(0, 4000)
    cuts = cut_by_tokens(tokens, 40)
    by_tokens = np.add.reduceat(tokens, cuts[:-1])
    by_users = tokens.reshape(40, 100).sum(1)
    assert np.ptp(by_tokens) <= 2 * tokens.max()
    assert np.ptp(by_users) > 4 * np.ptp(by_tokens)


def test_cuts_where_one_history_is_longer_than_a_batch():
    assert cut_by_tokens(np.array([1, 100, 1, 1]), 4).tolist() == [0, 1, 2, 3, 4]
    assert cut_by_tokens(np.array([100, 1, 1, 1]), 3).tolist() == [0, 1, 2, 4]
    for batches in (0, 5):
        with pytest.raises(ValueError, match="4 users cannot make"):
            cut_by_tokens(np.array([1, 1, 1, 1]), batches)


def test_costs():
    assert CostModel(2.0, 0.5)(np.array([0, 1, 4])).tolist() == [0.0, 2.5, 16.0]
    for linear, quadratic in ((-1.0, 1.0), (0.0, 0.0), (1.0, float("nan"))):
        with pytest.raises(ConfigurationError, match="both coefficients must be 0 or more"):
            CostModel(linear, quadratic)


@given(st.floats(0, 1e-3), st.floats(0, 1e-6), st.floats(0, 1.0))
def test_a_model_is_recovered_from_steps(linear, quadratic, constant):
    batches = [draw(seed, 5 + seed) for seed in range(12)]
    seconds = [constant + sum(linear * n + quadratic * n * n for n in batch.tolist()) for batch in batches]
    if linear + quadratic * 1000 < 1e-7:
        return
    fitted = CostModel.fitted(batches, seconds)
    typical = np.array([100, 1000, 4000])
    # A part that is lost in rounding beside the constant may be left out.
    np.testing.assert_allclose(
        fitted(typical), linear * typical + quadratic * typical**2, rtol=1e-4, atol=1e-5 * (max(seconds) - constant) + 1e-7
    )


def test_a_model_of_noisy_steps_is_never_negative():
    rng = np.random.default_rng(0)
    batches = [draw(seed, 8) for seed in range(30)]
    seconds = [1e-6 * float(batch.sum()) * rng.uniform(0.9, 1.1) for batch in batches]
    fitted = CostModel.fitted(batches, seconds)
    assert fitted.linear >= 0
    assert fitted.quadratic >= 0
    np.testing.assert_allclose(fitted(np.array([3000])), 3e-3, rtol=0.3)


def test_steps_that_fit_no_model():
    batches = [np.array([10]), np.array([20]), np.array([30])]
    with pytest.raises(ConfigurationError, match="do not take longer"):
        CostModel.fitted(batches, [3.0, 2.0, 1.0])
    with pytest.raises(ConfigurationError, match="three measured steps"):
        CostModel.fitted(batches[:2], [1.0, 2.0])
    with pytest.raises(ValueError, match="3 batches, but 2 times"):
        CostModel.fitted(batches, [1.0, 2.0])


def test_figures():
    found = imbalance([[10, 20, 30, 40], [50, 50, 50, 50]])
    assert found.difference == 15
    assert found.largest_difference == 30
    assert found.delay == pytest.approx(100 * (15 / 40 + 0) / 2)
    assert found.longest_wait == pytest.approx(100 * (30 / 40 + 0) / 2)
    assert found.wasted == pytest.approx(100 * (1 - 300 / (4 * 90)))
    nothing = imbalance([[0, 0]])
    assert (nothing.difference, nothing.delay, nothing.wasted) == (0, 0, 0)
    with pytest.raises(ValueError, match="steps, ranks"):
        imbalance([1, 2])


def test_a_bound_that_no_plan_beats():
    assert lowest_maximum(np.array([3.0, 3, 3]), 2) == 6  # two of three meet
    assert lowest_maximum(np.array([9.0, 1, 1]), 2) == 9
    assert lowest_maximum(np.array([4.0, 4, 4, 4]), 2) == 8
