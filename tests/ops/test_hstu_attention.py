from __future__ import annotations

import pytest
import torch
from _memory import allocations
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.jagged_cases import LENGTHS, max_errors, offsets_of
from turbogr.ops import jagged
from turbogr.ops.hstu_attention import _hstu_attention, jagged_hstu_attention, jagged_hstu_attention_reference


def inputs_of(lengths, heads=2, qk_dim=8, v_dim=5, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    offsets = offsets_of(lengths)
    tokens = int(offsets[-1])
    q, k = (torch.randn(tokens, heads, qk_dim, generator=g, dtype=torch.float64) for _ in range(2))
    v = torch.randn(tokens, heads, v_dim, generator=g, dtype=torch.float64)
    position = torch.randn(max([1, *lengths]) + 3, generator=g, dtype=torch.float64)
    time = torch.randn(20, generator=g, dtype=torch.float64)
    keys = torch.cat(
        [torch.zeros(0, dtype=torch.int64)] + [torch.randint(0, 10**7, (n,), generator=g).sort()[0] for n in lengths]
    )
    queries = keys + torch.randint(0, 5000, (tokens,), generator=g)
    tensors = [x.to(dtype).requires_grad_() for x in (q, k, v, position, time)]
    return tensors, offsets, queries, keys


def pair(offsets, queries, keys, use_position=True, use_time=True, **options):
    options = {"scale": 0.05, "alpha": 0.7, **options}

    def call(function):
        def run(q, k, v, position, time):
            return function(
                q,
                k,
                v,
                offsets,
                position_bias=position if use_position else None,
                time_bias=time if use_time else None,
                query_times=queries if use_time else None,
                key_times=keys if use_time else None,
                **options,
            )

        return run

    return call(jagged_hstu_attention), call(jagged_hstu_attention_reference)


@pytest.mark.parametrize("use_time", [True, False])
@pytest.mark.parametrize("use_position", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_equals_the_reference_with_all_gradients(lengths, use_position, use_time):
    tensors, offsets, queries, keys = inputs_of(lengths)
    operator, reference = pair(offsets, queries, keys, use_position, use_time)
    assert max(max_errors(operator, reference, tensors)) < 1e-11


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.1)])
def test_lower_precision_stays_near_the_reference(dtype, tolerance):
    tensors, offsets, queries, keys = inputs_of([150, 3, 70], dtype=dtype)
    operator, reference = pair(offsets, queries, keys)
    assert operator(*tensors).dtype == dtype
    assert max(max_errors(operator, reference, tensors)) < tolerance


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=6),
    heads=st.integers(1, 4),
    qk_dim=st.integers(1, 9),
    v_dim=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_shape_equals_the_reference(lengths, heads, qk_dim, v_dim, seed):
    tensors, offsets, queries, keys = inputs_of(lengths, heads, qk_dim, v_dim, seed=seed)
    operator, reference = pair(offsets, queries, keys)
    assert max(max_errors(operator, reference, tensors)) < 1e-11


def test_causal_and_within_a_sequence():
    tensors, offsets, queries, keys = inputs_of([5, 4])
    operator, _ = pair(offsets, queries, keys)
    before = operator(*tensors)
    with torch.no_grad():
        for tensor in tensors[:3]:
            tensor[3] += 1.0  # token 3 of sequence 0
    changed = (operator(*tensors) - before).abs().sum((1, 2)) > 0
    assert changed.tolist() == [False, False, False, True, True, False, False, False, False]


def test_the_time_unit_scales_the_gaps():
    tensors, offsets, queries, keys = inputs_of([30])
    seconds, _ = pair(offsets, queries, keys)
    milliseconds, _ = pair(offsets, queries * 1000, keys * 1000, time_unit=1000.0)
    mistaken, _ = pair(offsets, queries * 1000, keys * 1000)
    torch.testing.assert_close(seconds(*tensors), milliseconds(*tensors))
    assert not torch.allclose(seconds(*tensors), mistaken(*tensors))


def test_times_that_span_more_than_32_bits():
    tensors, offsets, queries, keys = inputs_of([40, 2])
    far = torch.arange(42) * 2**40
    operator, reference = pair(offsets, queries + far, keys + far, time_divisor=2.0)
    assert max(max_errors(operator, reference, tensors)) < 1e-11


def test_opcheck_and_gradcheck():
    tensors, offsets, queries, keys = inputs_of([3, 0, 6], heads=1, qk_dim=2, v_dim=3)
    torch.library.opcheck(_hstu_attention, (*tensors[:3], offsets, *tensors[3:], queries, keys, 0.1, 1.0, 1.0, 0.301))
    operator, _ = pair(offsets, queries, keys)
    assert torch.autograd.gradcheck(operator, tensors)


def test_strided_inputs():
    tensors, offsets, queries, keys = inputs_of([9, 4], v_dim=8)
    packed = torch.cat([x.detach().flatten(1) for x in tensors[:3]], dim=1)
    views = [x.unflatten(1, (2, 8)) for x in packed.split(16, dim=1)]
    assert not views[0].is_contiguous()
    operator, _ = pair(offsets, queries, keys)
    torch.testing.assert_close(operator(*views, *tensors[3:]), operator(*tensors))


def test_keeps_no_square_matrix():
    """What autograd keeps is linear in tokens, and the peak stays below one score matrix, which the reference exceeds."""
    length = 1500
    tensors, offsets, queries, keys = inputs_of([length], heads=1, dtype=torch.float32)
    operator, reference = pair(offsets, queries, keys)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        operator(*tensors)
    assert 0 < sum(kept) < 40 * length
    assert allocations(lambda: operator(*tensors).sum().backward())[1] < 4 * length**2
    assert allocations(lambda: reference(*tensors).sum().backward())[1] > 4 * length**2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(4, 2, 3)}, r"q and k are \[T, H, dqk\]"),
        ({"v": torch.zeros(5, 2, 3)}, r"v is \[T, H, dv\]"),
        ({"q": torch.zeros(4, 2, 2).half()}, "share one floating dtype"),
        ({"offsets": torch.tensor([0, 4], dtype=torch.int32)}, "offsets is int64"),
        ({"position_bias": torch.zeros(2, 2)}, "position_bias is a table"),
        ({"position_bias": torch.zeros(3)}, "position_bias has 3 entries, the longest sequence 4 tokens"),
        ({"query_times": None}, "needs query_times"),
        ({"key_times": torch.zeros(3, dtype=torch.int64)}, "needs key_times"),
        ({"time_unit": 0.0}, "must be positive"),
        ({"offsets": torch.tensor([0, 3])}, "offsets rise from 0 to 4"),
        ({"offsets": torch.tensor([0, 5, 4])}, "offsets rise from 0 to 4"),
    ],
)
def test_wrong_inputs_are_named(change, message):
    arguments = {
        "q": torch.zeros(4, 2, 2),
        "k": torch.zeros(4, 2, 2),
        "v": torch.zeros(4, 2, 3),
        "offsets": torch.tensor([0, 4]),
        "scale": 1.0,
        "position_bias": torch.zeros(4),
        "time_bias": torch.zeros(5),
        "query_times": torch.zeros(4, dtype=torch.int64),
        "key_times": torch.zeros(4, dtype=torch.int64),
    }
    jagged_hstu_attention(**arguments)
    with pytest.raises(ValueError, match=message):
        jagged_hstu_attention(**{**arguments, **change})


def test_groups_cover_every_token_once_within_the_waste():
    lengths = torch.randint(0, 300, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    offsets = offsets_of(lengths)
    groups = jagged.length_groups(offsets, heads=2)
    tokens = torch.cat([g.tokens.flatten() if g.valid is None else g.tokens[g.valid] for g in groups])
    assert tokens.sort()[0].tolist() == list(range(int(offsets[-1])))
    for group in groups:
        size, longest = group.tokens.shape
        valid = size * longest**2 if group.valid is None else int((group.valid.sum(1) ** 2).sum())
        assert size * longest**2 <= jagged.MAX_WASTE * valid
        assert size == 1 or size * 2 * min(longest, jagged.BLOCK_ROWS) * longest <= jagged.GROUP_ELEMENTS
