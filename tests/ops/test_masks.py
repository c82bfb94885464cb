"""Masks by name and by import path, in both attention operators that this file covers, against the float64 references."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from tests.ops.jagged_cases import LENGTHS, max_errors, offsets_of
from turbogr.errors import ConfigurationError
from turbogr.ops import masks
from turbogr.ops.hstu_attention import _hstu_attention, jagged_hstu_attention, jagged_hstu_attention_reference
from turbogr.ops.layout import BLOCK_ROWS
from turbogr.ops.masks import check_mask, forbidden, known_masks, register_mask
from turbogr.ops.softmax_attention import (
    _softmax_attention,
    jagged_softmax_attention,
    jagged_softmax_attention_reference,
)

OPERATORS = {
    "hstu": (jagged_hstu_attention, jagged_hstu_attention_reference),
    "softmax": (jagged_softmax_attention, jagged_softmax_attention_reference),
}
MODULE = """
def window(query_position, key_position):
    return query_position - key_position < 7

def from_the_third_on(query_position, key_position):
    return (query_position >= 3) & (key_position % 2 == 0) & (key_position > 0)

def nobody(query_position, key_position):
    return key_position < 0

def everybody(query_position, key_position):
    return key_position >= 0

def of_floats(query_position, key_position):
    return (query_position - key_position).float()

def too_wide(query_position, key_position):
    return (query_position - key_position < 7).repeat(1, 2)

not_a_function = 3
"""
numbers = itertools.count()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The import path of a user's module, which stands outside this package."""
    name = f"masks_of_a_user_{next(numbers)}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.fixture
def registry(monkeypatch):
    """What is registered here is forgotten afterwards."""
    monkeypatch.setattr(masks, "_registered", {})


def inputs_of(lengths, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(sum(lengths), 2, d, generator=g, dtype=dtype).requires_grad_() for d in (8, 8, 5)]


def pair(name, lengths, **options):
    offsets = offsets_of(lengths)
    return [
        partial(lambda function, q, k, v: function(q, k, v, offsets, scale=0.3, **options), function)
        for function in OPERATORS[name]
    ]


@pytest.mark.parametrize("mask", ["window", "from_the_third_on", "nobody", "everybody"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("name", OPERATORS)
def test_equals_the_reference_with_all_gradients(name, lengths, mask, module):
    assert max(max_errors(*pair(name, lengths, mask=f"{module}.{mask}"), inputs_of(lengths))) < 1e-11


@pytest.mark.parametrize("name", OPERATORS)
def test_a_windowed_mask_is_the_formula(name, module):
    """Written down a second time, without masks.py: the reference uses it."""
    lengths, scale = [2 * BLOCK_ROWS + 3], 0.3
    q, k, v = inputs_of(lengths)
    distance = torch.arange(lengths[0])[:, None] - torch.arange(lengths[0])
    allowed = (distance >= 0) & (distance < 7)
    scores = torch.einsum("ihd,jhd->hij", q, k)
    if name == "hstu":
        weights = scale * scores.sigmoid() * scores * allowed
    else:
        weights = (scale * scores).masked_fill(~allowed, -torch.inf).softmax(-1)
    expected = torch.einsum("hij,jhd->ihd", weights, v)
    for backend in ("auto", "torch", "reference"):
        operator, _ = pair(name, lengths, mask=f"{module}.window", backend=backend)
        torch.testing.assert_close(operator(q, k, v), expected)
    assert not torch.allclose(pair(name, lengths)[0](q, k, v), expected), "negative control: causal attention is something else"


@pytest.mark.parametrize("name", OPERATORS)
def test_the_future_stays_hidden_and_everybody_is_causal(name, module):
    q, k, v = inputs_of([40, 3])
    everybody, causal = (pair(name, [40, 3], mask=mask)[0](q, k, v) for mask in (f"{module}.everybody", "causal"))
    assert torch.equal(everybody, causal)
    damaged = k.detach().clone()
    damaged[20:40] = torch.nan
    assert pair(name, [40, 3], mask=f"{module}.everybody")[0](q, damaged, v)[:20].isfinite().all()


@pytest.mark.parametrize("name", OPERATORS)
def test_a_token_that_may_attend_to_nothing_gets_zeros(name, module):
    tensors = inputs_of([10, 2])
    operator, _ = pair(name, [10, 2], mask=f"{module}.from_the_third_on")
    out = operator(*tensors)
    empty = (out == 0).all(-1).all(-1)
    assert empty.tolist() == [True] * 3 + [False] * 7 + [True] * 2
    grads = torch.autograd.grad(out.sum(), tensors)
    assert all(x.isfinite().all() for x in grads)
    assert not grads[0][:3].any()


@pytest.mark.parametrize("name", OPERATORS)
def test_float32_takes_pytorch(name, module):
    lengths = [150, 3]
    operator, reference = pair(name, lengths, mask=f"{module}.window")
    assert max(max_errors(operator, reference, inputs_of(lengths, torch.float32))) < 1e-4
    with pytest.raises(ConfigurationError, match=r"backend cpp computes mask causal only, got 'masks_of_a_user_\d+.window'"):
        pair(name, lengths, mask=f"{module}.window", backend="cpp")[0](*inputs_of(lengths, torch.float32))


def test_opcheck_and_gradcheck(module):
    q, k, v = inputs_of([3, 0, 9])
    offsets, mask = offsets_of([3, 0, 9]), f"{module}.window"
    torch.library.opcheck(_softmax_attention, (q, k, v, offsets, 0.5, mask, "torch"))
    torch.library.opcheck(_hstu_attention, (q, k, v, offsets, None, None, None, None, 0.5, 1.0, 1.0, 0.301, mask, "torch"))
    for name in OPERATORS:
        assert torch.autograd.gradcheck(pair(name, [3, 0, 9], mask=mask)[0], (q, k, v))


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("name", OPERATORS)
def test_a_registered_mask(name, module):
    def window(query_position, key_position):
        return query_position - key_position < 7

    register_mask("window", window)
    register_mask("window", window)  # importing a module twice does no harm
    assert known_masks() == ["causal", "window"]
    tensors = inputs_of([30])
    by_name, by_path = (pair(name, [30], mask=mask)[0](*tensors) for mask in ("window", f"{module}.window"))
    assert torch.equal(by_name, by_path)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "a name has no dots and is not empty, got ''"),
        ("mine.window", "a name has no dots and is not empty, got 'mine.window'"),
        ("causal", "there is a mask named 'causal' already"),
        ("taken", "there is a mask named 'taken' already"),
    ],
)
def test_names_that_cannot_be_registered(name, message):
    register_mask("taken", torch.lt)
    with pytest.raises(ConfigurationError, match=message):
        register_mask(name, torch.le)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("widnow", r"there is no mask 'widnow'; known are causal, window, and a function of a module"),
        ("no_such_module.window", "mask 'no_such_module.window' cannot be imported: No module named 'no_such_module'"),
        ("{module}.widnow", r"module masks_of_a_user_\d+ has no function widnow"),
        ("{module}.not_a_function", "has no function not_a_function"),
        ("{module}.of_floats", r"must return bool, broadcastable to \[4, 4\]; it returned torch.float32 \[4, 4\]"),
        ("{module}.too_wide", r"must return bool, broadcastable to \[4, 4\]; it returned torch.bool \[4, 8\]"),
        ("", "there is no mask ''"),
        (".window", "there is no mask '.window'"),
        ("..masks.window", "there is no mask"),
    ],
)
@pytest.mark.parametrize("name", OPERATORS)
def test_masks_that_cannot_be_used_are_named(name, mask, message, module):
    register_mask("window", torch.lt)
    with pytest.raises(ConfigurationError, match=message):
        pair(name, [4], mask=mask.format(module=module))[0](*inputs_of([4]))


def test_a_mistake_in_the_users_module_keeps_its_traceback(tmp_path, monkeypatch):
    (tmp_path / "masks_with_a_mistake.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        check_mask("a model", "masks_with_a_mistake.window")


def test_masks_are_asked_block_by_block(module):
    """Rows first..end of a block see what they see in the whole matrix."""
    whole = forbidden("here", f"{module}.window", 0, 50, torch.device("cpu"))
    assert torch.equal(forbidden("here", f"{module}.window", 20, 31, torch.device("cpu")), whole[20:31, :31])
    assert whole.sum() == 50 * 50 - sum(min(i + 1, 7) for i in range(50))
