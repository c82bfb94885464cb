"""Sums over groups in both forms, and the bytes they send: against a float64 sum that every rank computes by itself."""

import pytest
import torch

from tests.distributed.exchange_worker import CASES, DIM, FORMS
from tests.distributed.launch import launch_checks
from turbogr.errors import ConfigurationError
from turbogr.sparse.exchange import RowUnion, ValueExchange, choose_form, exchange_rows

TOLERANCE = 1e-6
GROUPS = (1, 2, 3, 4)


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    return launch_checks("tests.distributed.exchange_worker", 4, tmp_path_factory.mktemp("exchange"))


def entries(ranks, groups):
    """Case -> what each of the groups found."""
    found = [result for result in ranks[f"sums{groups}"] if result is not None]
    assert len(found) == groups
    return {case: [result[case] for result in found] for case in CASES}


@pytest.mark.parametrize("groups", GROUPS)
def test_the_union_holds_every_group_s_rows(ranks, groups):
    for case, found in entries(ranks, groups).items():
        assert all(entry["ids"] and entry["own"] for entry in found), case


@pytest.mark.parametrize("groups", GROUPS)
def test_sums_are_right_and_the_same_bits_on_all_groups_in_all_forms(ranks, groups):
    for case, found in entries(ranks, groups).items():
        assert all(entry["unchanged"] for entry in found), case
        bits = {digest for entry in found for form in (*FORMS, "auto") for digest in entry[form]["bits"]}
        assert len(bits) == 1, case
        for entry in found:
            assert entry["gather"]["error"] <= TOLERANCE, case
            assert entry["gather"]["shape"] == [entry["rows"], DIM]


def test_a_dropped_group_is_noticed_although_all_groups_agree(ranks):
    found = [result for result in ranks["dropped"] if result is not None]
    for form in FORMS:
        assert len({result[form]["bits"] for result in found}) == 1
        assert all(result[form]["error"] > 100 * TOLERANCE for result in found)


@pytest.mark.parametrize("groups", GROUPS)
def test_bytes_sent_are_those_of_the_formulas(ranks, groups):
    for case, found in entries(ranks, groups).items():
        sizes, rows = found[0]["sizes"], found[0]["rows"]
        row_bytes = 4 * DIM
        expected = exchange_rows(sizes, rows)
        sent = {form: sum(entry[form]["sent"] for entry in found) for form in (*FORMS, "auto")}
        assert sent["gather"] == expected["gather"] * row_bytes, case
        # The formula expects ids spread evenly; all that a group has may lie in its own slice, or in another's.
        slack = sum(sizes) * row_bytes
        assert abs(sent["two_phase"] - expected["two_phase"] * row_bytes) <= slack, case
        assert sent["auto"] == sent[choose_form(sizes, rows)], case
        id_bytes = 0 if groups == 1 else 16 + (8 if case == "wide_ids" else 4) * max(sizes)
        assert all(entry["id_bytes"] == id_bytes * (groups - 1) for entry in found), case


def test_one_group_sends_nothing(ranks):
    for found in entries(ranks, 1).values():
        assert all(found[0][form]["sent"] == 0 and not found[0][form]["how"] for form in (*FORMS, "auto"))


def test_equal_rows_spread_evenly_send_what_the_formula_says(ranks):
    entry = [found["disjoint"] for found in ranks["sums4"]]
    assert sum(x["two_phase"]["sent"] for x in entry) == pytest.approx(
        4 * DIM * exchange_rows([50] * 4, 200)["two_phase"], rel=0.02
    )


def test_the_forms_use_different_collectives(ranks):
    entry = entries(ranks, 2)["overlapping"][0]
    assert entry["gather"]["how"] == ["gather"]
    assert entry["two_phase"]["how"] == ["exchange", "gather"]


def test_a_peer_that_never_comes_is_an_error(ranks):
    assert ranks["lost"][0] not in (None, "no error")


def test_misuse_is_refused(ranks):
    rows, groups = ranks["misuse"][0]
    assert "this group has 2 rows in the union, the gradient has 3" in rows
    assert "a union of 2 groups was expected" in groups


@pytest.mark.parametrize(
    ("sizes", "union", "form"),
    [
        ([100, 100], 200, "gather"),  # nothing shared: two_phase would send the union twice over
        ([100, 100], 100, "gather"),  # all shared: equal, and one collective is enough
        ([1000, 10], 1000, "two_phase"),  # padding is what costs
        ([100] * 4, 200, "two_phase"),
        ([100] * 4, 400, "gather"),
        ([100] * 8, 300, "two_phase"),
        ([100], 100, "gather"),
        ([0, 0], 0, "gather"),
    ],
)
def test_the_form_with_fewer_bytes_is_chosen(sizes, union, form):
    rows = exchange_rows(sizes, union)
    assert choose_form(sizes, union) == form
    assert rows[form] == min(rows.values())
    assert {choose_form(sizes, union, wish) for wish in FORMS} == set(FORMS)


def test_unknown_forms_are_refused():
    with pytest.raises(ConfigurationError, match="exchange must be one of auto, gather, two_phase; got 'ring'"):
        ValueExchange(None, "ring")


def test_slices_cut_every_group_s_rows():
    union = RowUnion(torch.arange(10, 17), [torch.tensor([0, 3, 6]), torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)])
    assert union.block == 3
    assert union.cuts == [[0, 1, 2, 3], [0, 2, 2, 2], [0, 0, 0, 0]]
