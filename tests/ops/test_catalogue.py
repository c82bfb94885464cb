import numpy as np
import pytest
import torch
from _memory import allocations
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.largest_tensor import LargestTensor
from turbogr.ops import catalogue_part
from turbogr.ops.catalogue import target_ranks, target_ranks_reference, top_items, top_items_reference
from turbogr.ops.normalise import normalised


def problem(seed, users=9, items=300, width=8, most_seen=40, integers=True):
    """Random vectors (small integers: scores are exact and often tie), targets and seen items with repeats."""
    generator = torch.Generator().manual_seed(seed)

    def vectors(rows):
        if integers:
            return torch.randint(-2, 3, (rows, width), generator=generator).float()
        return torch.randn(rows, width, generator=generator)

    queries, table = vectors(users), vectors(items)
    targets = torch.randint(items, (users,), generator=generator)
    lengths = torch.randint(most_seen + 1, (users,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    seen = torch.randint(items, (int(offsets[-1]),), generator=generator)
    return queries, table, targets, seen, offsets


def numpy_ranks(queries, table, targets, seen, offsets):
    """Brute force, written apart from the reference: a lexical sort of the full score matrix."""
    scores = queries.numpy().astype(np.float64) @ table.numpy().astype(np.float64).T
    ranks = []
    for user, target in enumerate(targets.tolist()):
        keep = np.ones(len(table), dtype=bool)
        keep[seen[offsets[user] : offsets[user + 1]].numpy()] = False
        keep[target] = True
        rows = np.flatnonzero(keep)
        order = rows[np.lexsort((rows, -scores[user, rows]))]
        ranks.append(int(np.flatnonzero(order == target)[0]))
    return torch.tensor(ranks)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_equal_brute_force_and_reference(seed):
    arguments = problem(seed)
    ranks = target_ranks(*arguments, chunk_rows=64)
    assert torch.equal(ranks, numpy_ranks(*arguments))
    assert torch.equal(ranks, target_ranks_reference(*arguments))
    unfiltered = target_ranks(*arguments[:3])
    assert torch.equal(unfiltered, target_ranks_reference(*arguments[:3]))
    assert not torch.equal(ranks, unfiltered), "negative control: filtering changes something here"


@pytest.mark.parametrize("k", [1, 7, 250, 300, 2000])
def test_top_items_equal_reference(k):
    queries, table, _, seen, offsets = problem(3)
    scores, rows = top_items(queries, table, k, seen, offsets, chunk_rows=64)
    want_scores, want_rows = top_items_reference(queries, table, k, seen, offsets)
    assert scores.dtype == torch.float32
    assert rows.dtype == torch.int64
    assert torch.equal(rows, want_rows)
    assert torch.equal(scores.double(), want_scores)


def test_more_items_wanted_than_unseen():
    table = torch.tensor([[3.0], [1.0], [2.0]])
    scores, rows = top_items(torch.ones(2, 1), table, 4, torch.tensor([0, 0, 1, 0, 1, 2]), torch.tensor([0, 3, 6]))
    assert rows.tolist() == [[2, -1, -1, -1], [-1, -1, -1, -1]]
    assert scores[0].tolist() == [2.0] + [-torch.inf] * 3
    assert scores[1].tolist() == [-torch.inf] * 4


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    users=st.integers(1, 20),
    items=st.integers(1, 400),
    chunk_rows=st.integers(1, 450),
    k=st.integers(1, 60),
    integers=st.booleans(),
)
def test_chunk_size_never_changes_the_result(seed, users, items, chunk_rows, k, integers):
    queries, table, targets, seen, offsets = problem(seed, users, items, integers=integers)
    table[items // 2] = table[0]  # a tie that crosses chunks
    whole = top_items(queries, table, k, seen, offsets, chunk_rows=items)
    parts = top_items(queries, table, k, seen, offsets, chunk_rows=chunk_rows)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])
    ranks = target_ranks(queries, table, targets, seen, offsets, chunk_rows=chunk_rows)
    assert torch.equal(ranks, target_ranks(queries, table, targets, seen, offsets, chunk_rows=items))
    if integers:
        assert torch.equal(ranks, target_ranks_reference(queries, table, targets, seen, offsets))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**20), users=st.integers(1, 20), items=st.integers(2, 400), integers=st.booleans())
def test_rank_is_the_place_in_the_list(seed, users, items, integers):
    queries, table, targets, seen, offsets = problem(seed, users, items, integers=integers)
    owner = torch.arange(users).repeat_interleave(offsets.diff())
    keep = seen != targets[owner]
    seen, owner = seen[keep], owner[keep]
    offsets = torch.cat([offsets[:1], torch.bincount(owner, minlength=users).cumsum(0)])
    ranks = target_ranks(queries, table, targets, seen, offsets, chunk_rows=64)
    _, rows = top_items(queries, table, items, seen, offsets, chunk_rows=128)
    assert torch.equal(rows.gather(1, ranks[:, None])[:, 0], targets)


def test_constant_scores_rank_by_row():
    table = torch.zeros(1000, 4)
    targets = torch.tensor([0, 1, 499, 999])
    assert target_ranks(torch.ones(4, 4), table, targets, chunk_rows=64).tolist() == targets.tolist()
    scores, rows = top_items(torch.ones(4, 4), table, 200, chunk_rows=64)
    assert rows.tolist() == [list(range(200))] * 4
    assert not scores.any()


@pytest.mark.parametrize("width", [1, 17, 50, 64, 300, 1024])
@pytest.mark.parametrize("users", [1, 2, 3, 5, 16, 40])
@pytest.mark.parametrize("items", [7, 50, 1682])
def test_equal_vectors_tie_exactly(width, users, items):
    # With plain products of these shapes, some of the equal vectors' scores differ in the last bit.
    queries = torch.randn(users, width, generator=torch.Generator().manual_seed(width))
    table = torch.randn(1, width, generator=torch.Generator().manual_seed(items)).expand(items, -1)
    targets = torch.arange(users) * 31 % items
    assert torch.equal(target_ranks(queries, table, targets), targets)
    assert torch.equal(target_ranks(queries, table, targets, chunk_rows=64), targets)
    scores, rows = top_items(queries, table, items, chunk_rows=64)
    assert torch.equal(rows, torch.arange(items).expand(users, -1))
    assert (scores == scores[:, :1]).all()


def test_more_users_than_chunk_rows():
    arguments = problem(11, users=200, items=100)
    assert torch.equal(target_ranks(*arguments, chunk_rows=64), target_ranks(*arguments))
    assert torch.equal(target_ranks(*arguments), target_ranks_reference(*arguments))


def test_batch_composition_does_not_matter():
    queries, table, targets, seen, offsets = problem(5, users=33, items=500, integers=False)
    together = target_ranks(queries, table, targets, seen, offsets)
    alone = [
        target_ranks(queries[u : u + 1], table, targets[u : u + 1], seen[a:b], torch.tensor([0, b - a]))
        for u, (a, b) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False))
    ]
    assert torch.equal(together, torch.cat(alone))


def test_repeated_target_is_never_filtered():
    table = torch.tensor([[5.0], [4.0], [3.0], [2.0]])
    one = torch.ones(1, 1)
    seen, offsets = torch.tensor([1, 0, 1, 2]), torch.tensor([0, 4])
    assert target_ranks(one, table, torch.tensor([2]), seen, offsets).tolist() == [0]
    assert target_ranks(one, table, torch.tensor([3]), seen, offsets).tolist() == [0]
    assert target_ranks(one, table, torch.tensor([2])).tolist() == [2]


def test_nan_puts_the_target_last():
    table = torch.tensor([[4.0], [3.0], [2.0], [1.0]])
    targets = torch.zeros(3, dtype=torch.int64)
    queries = torch.tensor([[1.0], [torch.nan], [1.0]])
    seen, offsets = torch.tensor([1, 3, 3]), torch.tensor([0, 0, 0, 3])
    assert target_ranks(queries, table, targets, seen, offsets).tolist() == [0, 3, 0]
    table[3] = torch.nan  # a rival of users 0 and 1; user 2 has seen it
    assert target_ranks(queries, table, targets, seen, offsets).tolist() == [3, 3, 0]
    assert target_ranks_reference(queries, table, targets, seen, offsets).tolist() == [3, 3, 0]
    scores, rows = top_items(torch.ones(1, 1), table, 4)
    assert rows.tolist() == [[0, 1, 2, 3]]
    assert scores[0, 3].isnan()
    # Seen twice or once, the number of rivals is the same.
    assert target_ranks(queries[1:2], table, targets[:1], torch.tensor([1, 1, 0]), torch.tensor([0, 3])).tolist() == [2]


def test_infinite_and_signed_zero_scores():
    table = torch.tensor([[-torch.inf], [torch.inf], [-0.0], [0.0], [-1.0], [-torch.inf], [1e-30], [-1e-30]])
    scores, rows = top_items(torch.ones(1, 1), table, 8)
    assert rows.tolist() == [[1, 6, 2, 3, 7, 4, 0, 5]]
    assert scores[0, 0] == torch.inf
    assert [int(target_ranks(torch.ones(1, 1), table, torch.tensor([t]))) for t in range(8)] == [6, 0, 2, 3, 5, 7, 1, 4]
    seen, offsets = torch.tensor([0, 1]), torch.tensor([0, 2])
    assert target_ranks(torch.ones(1, 1), table, torch.tensor([5]), seen, offsets).tolist() == [5]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_compared_in_float32(dtype):
    queries, table, targets, seen, offsets = problem(2, integers=False)
    queries, table = queries.to(dtype), table.to(dtype)
    exact = queries.float(), table.float()
    assert torch.equal(target_ranks(queries, table, targets, seen, offsets), target_ranks(*exact, targets, seen, offsets))
    assert torch.equal(top_items(queries, table, 9)[0], top_items(*exact, 9)[0])


def test_autocast_and_gradients_stay_out():
    queries, table, targets, seen, offsets = problem(2, users=64, items=500, integers=False)
    queries.requires_grad_()
    table.requires_grad_()
    want = target_ranks(queries, table, targets, seen, offsets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (queries @ table.T).dtype == torch.bfloat16, "negative control: a plain product is rounded here"
        assert torch.equal(target_ranks(queries, table, targets, seen, offsets), want)
        scores, _ = top_items(queries, table, 5)
    assert torch.equal(scores, top_items(queries, table, 5)[0])
    assert not scores.requires_grad


def test_memory_does_not_grow_with_the_catalogue(monkeypatch):
    monkeypatch.setattr(catalogue_part, "CHUNK_BYTES", 2**16)
    used = {}
    for items in (2_000, 16_000):
        queries, table, targets, seen, offsets = problem(1, users=64, items=items)
        with LargestTensor(queries, table) as ranks:
            target_ranks(queries, table, targets, seen, offsets)
        with LargestTensor(queries, table) as top:
            top_items(queries, table, 20, seen, offsets)
        used[items] = ranks.bytes, top.bytes
    # int64 keys are twice the float32 scores; a chunk is rounded up to a multiple of 64 rows.
    for ranks_bytes, top_bytes in used.values():
        assert ranks_bytes <= 1.25 * 2**16
        assert top_bytes <= 2 * 1.25 * 2**16
    with LargestTensor(queries, table) as control:
        torch.mm(queries, table.T)
    assert control.bytes == 64 * 16_000 * 4, "negative control: the count sees a full score matrix"


def test_million_items():
    queries, table, targets, seen, offsets = problem(8, users=8, items=1_000_000, integers=False)
    ranks = target_ranks(queries, table, targets, seen, offsets)
    scores, rows = top_items(queries, table, 2000, seen, offsets)
    for user in range(8):
        full = (queries[user].double() @ table.double().T).numpy()
        own = full[targets[user]]
        full[seen[offsets[user] : offsets[user + 1]].numpy()] = -np.inf
        # Float32 may swap near ties against float64: the rank lies between two exact counts.
        assert (full > own + 1e-5).sum() <= ranks[user] <= (full > own - 1e-5).sum()
        assert np.allclose(np.sort(full)[::-1][:2000], scores[user].numpy(), atol=1e-5)
        assert np.allclose(full[rows[user].numpy()], scores[user].numpy(), atol=1e-5)
    assert all(len(set(row)) == 2000 for row in rows.tolist())


def test_no_users():
    empty = torch.empty(0, dtype=torch.int64)
    assert target_ranks(torch.empty(0, 4), torch.ones(5, 4), empty).shape == (0,)
    scores, rows = top_items(torch.empty(0, 4), torch.ones(5, 4), 3, empty, torch.zeros(1, dtype=torch.int64))
    assert scores.shape == rows.shape == (0, 3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"targets": torch.tensor([0, -1])}, IndexError, r"target -1 is outside the catalogue's rows 0\.\.4"),
        ({"targets": torch.tensor([5, 1])}, IndexError, "target 5"),
        ({"targets": torch.tensor([1])}, ValueError, r"targets is \[1\], expected \[2\]"),
        ({"targets": torch.tensor([1, 1], dtype=torch.int32)}, ValueError, "torch.int32"),
        ({"seen": torch.tensor([0, 9])}, IndexError, "seen item 9"),
        ({"seen": None}, ValueError, "come together"),
        ({"seen_offsets": torch.tensor([0, 2])}, ValueError, "seen_offsets"),
        ({"queries": torch.ones(2, 3)}, ValueError, "must be"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows is 0"),
    ],
)
def test_bad_arguments(change, error, message):
    arguments = {
        "queries": torch.ones(2, 4),
        "table": torch.ones(5, 4),
        "targets": torch.tensor([0, 1]),
        "seen": torch.tensor([0, 1]),
        "seen_offsets": torch.tensor([0, 1, 2]),
    }
    target_ranks(**arguments)
    with pytest.raises(error, match=message):
        target_ranks(**{**arguments, **change})


def test_bad_k():
    with pytest.raises(ValueError, match="k is 0"):
        top_items(torch.ones(1, 1), torch.ones(2, 1), 0)


@pytest.mark.parametrize("chunk_rows", [None, 64, 128])
def test_cosine_is_the_normalised_table(chunk_rows):
    generator = torch.Generator().manual_seed(0)
    queries, table = torch.randn(20, 9, generator=generator), torch.randn(500, 9, generator=generator) * torch.rand(500, 1) * 3
    table[7] = 0.0  # no direction: score 0, not NaN
    targets = torch.randint(0, 500, (20,), generator=generator)
    ranks = target_ranks(queries, table, targets, chunk_rows=chunk_rows, cosine=True)
    scores, rows = top_items(queries, table, 30, chunk_rows=chunk_rows, cosine=True)
    assert torch.equal(ranks, target_ranks(queries, normalised(table), targets))
    expected_scores, expected_rows = top_items(queries, normalised(table), 30)
    assert torch.equal(rows, expected_rows)
    torch.testing.assert_close(scores, expected_scores)
    assert not torch.equal(ranks, target_ranks(queries, table, targets)), "lengths matter without it"


def test_cosine_makes_no_second_table():
    queries, table = torch.randn(16, 32), torch.randn(400_000, 32)
    largest, _ = allocations(lambda: target_ranks(queries, table, torch.arange(16), cosine=True))
    assert largest < table.numel() * 4 / 2
    largest, _ = allocations(lambda: target_ranks(queries, normalised(table), torch.arange(16)))
    assert largest >= table.numel() * 4
