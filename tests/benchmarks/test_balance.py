"""What balance.py simulates, and from which lengths."""

import numpy as np
import pytest
from _balanced import Fit, add_measured
from _lengths import amazon_beauty, draw_steps, kuairand_clicks, loads
from _report import Report
from balance import ATTENTION, KUAIRAND_PAPER, PAPER_SETTINGS, TOKENS, guesses, paper_rule, simulate, slices

from turbogr.data.balance import assign, imbalance


def test_lengths_are_those_published(shared_data):
    clicks, beauty = kuairand_clicks(shared_data), amazon_beauty(shared_data)
    assert (clicks.real, len(clicks.lengths), clicks.lengths.max()) == (True, 27_285, 83_260)
    assert clicks.lengths.mean() == pytest.approx(4_473, abs=1)
    assert (beauty.real, len(beauty.lengths), beauty.lengths.sum()) == (True, 22_363, 198_502)


def test_drawn_lengths_stand_in(tmp_path):
    clicks, beauty = kuairand_clicks(tmp_path), amazon_beauty(tmp_path)
    assert not clicks.real
    assert not beauty.real
    assert np.median(clicks.lengths) == pytest.approx(3_806, rel=0.15)
    assert np.median(beauty.lengths) == pytest.approx(6, abs=1)
    assert np.quantile(beauty.lengths, 0.9) == pytest.approx(14, abs=3)


def test_both_cuts_hold_the_same_users():
    lengths = np.arange(1, 101)
    steps = draw_steps(lengths, 30, 7)  # 210 users, of three epochs
    for cut in (steps.by_users, steps.by_tokens):
        assert len(cut) == 7
        assert np.array_equal(np.concatenate(cut)[:100].argsort().argsort() + 1, np.concatenate(cut)[:100])
    assert all(len(step) == 30 for step in steps.by_users)
    assert np.ptp([step.sum() for step in steps.by_tokens]) <= 100 < np.ptp([step.sum() for step in steps.by_users])


def test_loads_are_of_those_who_got_them():
    table = loads([np.array([5, 1, 4, 2])], 2, slices, TOKENS)
    assert table.tolist() == [[6, 6]]
    assert loads([np.array([5, 1, 4, 2])], 2, slices, TOKENS, ATTENTION)[0].tolist() == pytest.approx(
        [6 + 26 / 5120, 6 + 20 / 5120]
    )


def test_ours_beats_the_paper_on_drawn_lengths_too(tmp_path):
    cap, batch = PAPER_SETTINGS[0]
    steps = draw_steps(kuairand_clicks(tmp_path).capped(cap), 16 * batch, 20)
    found = simulate(steps, 16)
    assert found.differencing is not None
    assert found.ours.difference < 280 < found.fixed.difference
    assert found.ours.longest_wait < 1.2 < found.rule.longest_wait < found.fixed.longest_wait
    assert found.bound <= found.ours.delay


def test_the_paper_had_about_eight_histories_of_4096(shared_data):
    clicks = kuairand_clicks(shared_data)
    near, far = guesses(clicks, [4096], [8], quick=True), guesses(clicks, [2048, 8192], [2, 8], quick=True)
    assert near[0].apart(KUAIRAND_PAPER) < 0.3 < min(guess.apart(KUAIRAND_PAPER) for guess in far)


def test_the_paper_rule_is_without_exchanges():
    costs = np.array([4.0, 5, 6, 7, 8])
    assert sorted(costs[each].sum() for each in paper_rule(costs, 2)) == [13, 17]
    assert sorted(costs[each].sum() for each in assign(costs, 2)) == [15, 15]


def test_what_ranks_saw_becomes_rows():
    def fit(tokens, users, metric=0.1):
        return Fit([float("nan"), 0.2, 0.1], [float("nan"), 0.1, 0.1], tokens, users, {"val/HR@10": metric})

    off = [fit([10, 4, 3], [[1], [2], [3]]), fit([2, 4, 3], [[4], [5], [6]])]
    on = [fit([6, 4, 3], [[4], [2], [3]]), fit([6, 4, 3], [[1], [5], [6]])]
    report = Report("balance")
    add_measured(report, [{"off": [off[rank]], "tokens": [on[rank]]} for rank in range(2)])
    rows = {row.claim: row for row in report.rows}
    difference = rows["2 ranks: token difference"]
    assert (difference.value, difference.baseline) == (0, imbalance([[10, 2], [4, 4], [3, 3]]).difference)
    assert rows["2 ranks: step"].value == pytest.approx(150)
    on[1].users[1] = [7]
    with pytest.raises(SystemExit, match="did not train the same users"):
        add_measured(report, [{"off": [off[rank]], "tokens": [on[rank]]} for rank in range(2)])
