from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from turbogr.batch import NO_TARGET, JaggedBatch
from turbogr.errors import DataError


def make_batch(lengths: list[int], negatives: int | None = 3, seen: list[int] | None = None, **changes: Any) -> JaggedBatch:
    tokens = sum(lengths)
    fields: dict[str, Any] = {
        "values": torch.arange(tokens),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
        "timestamps": torch.arange(tokens) * 10,
        "targets": torch.arange(tokens) + 1,
        "target_times": torch.arange(tokens) * 10 + 10,
        "user_ids": torch.arange(len(lengths)) + 100,
        "max_length": max(lengths, default=1),
        "negatives": None if negatives is None else torch.arange(tokens * negatives).view(tokens, negatives),
    }
    if seen is not None:
        fields |= {"seen": torch.arange(sum(seen)), "seen_offsets": torch.tensor([0, *seen]).cumsum(0)}
    return JaggedBatch(**(fields | changes))


def tensors(batch: JaggedBatch) -> dict[str, Tensor]:
    return {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}


def test_properties():
    batch = make_batch([2, 0, 3])
    assert (batch.num_users, batch.num_tokens, batch.max_length) == (3, 5, 3)
    assert batch.lengths.tolist() == [2, 0, 3]
    assert batch.last[[0, 2]].tolist() == [1, 4]


def test_empty_batch_is_valid():
    batch = make_batch([], seen=[])
    assert (batch.num_users, batch.num_tokens) == (0, 0)


def test_last_target_may_be_unknown():
    targets = torch.tensor([1, NO_TARGET, 3, NO_TARGET])
    assert make_batch([2, 2], targets=targets).targets.tolist() == targets.tolist()


@given(st.lists(st.integers(0, 6), max_size=8), st.none() | st.integers(1, 4))
def test_any_lengths_are_valid(lengths: list[int], negatives: int | None):
    batch = make_batch(lengths, negatives, seen=[n + 1 for n in lengths])
    assert batch.lengths.tolist() == lengths
    for before, after in zip(tensors(batch).items(), tensors(batch.to("cpu")).items(), strict=True):
        assert before[0] == after[0]
        assert torch.equal(before[1], after[1])


@pytest.mark.parametrize("name", ["values", "offsets", "timestamps", "targets", "target_times", "user_ids"])
def test_wrong_type_or_shape_is_named(name: str):
    good = make_batch([2, 3])
    value = getattr(good, name)
    for bad in (value.int(), value.double(), value.unsqueeze(0)):
        with pytest.raises(DataError, match=rf"JaggedBatch\.{name} is torch\.\w+ \[[\d, ]+\], expected torch\.int64"):
            replace(good, **{name: bad})


@pytest.mark.parametrize("name", ["offsets", "timestamps", "targets", "target_times", "user_ids"])
@pytest.mark.parametrize("cut", [slice(1, None), slice(0, 0)])
def test_wrong_length_is_refused(name: str, cut: slice):
    good = make_batch([2, 3])
    with pytest.raises(DataError, match="JaggedBatch"):
        replace(good, **{name: getattr(good, name)[cut]})


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2, 5], "offsets must rise from 0 to 5, found first 1"),
        ([0, 2, 4], "offsets must rise from 0 to 5, found first 0, last 4"),
        ([0, 6, 5], "smallest step -1"),
    ],
)
def test_offsets_must_cover_the_tokens(offsets: list[int], message: str):
    with pytest.raises(DataError, match=message):
        replace(make_batch([2, 3]), offsets=torch.tensor(offsets))


def test_too_long_history_is_named():
    with pytest.raises(DataError, match="history 1 of the batch has 3 tokens, more than max_length 2"):
        make_batch([2, 3], max_length=2)


@pytest.mark.parametrize(
    "negatives", [torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64), torch.zeros(4, 3, dtype=torch.int64)]
)
def test_negatives_must_be_one_row_a_token(negatives: Tensor):
    with pytest.raises(DataError, match=r"JaggedBatch\.negatives is .*, expected torch\.int64 \[5, R\]"):
        replace(make_batch([2, 3]), negatives=negatives)


def test_seen_is_checked():
    good = make_batch([2, 3], seen=[4, 1])
    with pytest.raises(DataError, match="come together"):
        replace(good, seen_offsets=None)
    with pytest.raises(DataError, match="come together"):
        replace(good, seen=None)
    with pytest.raises(DataError, match=r"seen is torch\.int32"):
        replace(good, seen=good.seen.int())
    with pytest.raises(DataError, match=r"seen_offsets is torch\.int64 \[2\]"):
        replace(good, seen_offsets=torch.tensor([0, 5]))
    with pytest.raises(DataError, match="seen_offsets must rise from 0 to 5"):
        replace(good, seen_offsets=torch.tensor([0, 4, 6]))
    # A user may have seen more than max_length items.
    assert make_batch([2, 3], seen=[40, 1]).seen.numel() == 41


def test_moving_leaves_out_the_checks_elsewhere():
    # "meta" stands for a device: reading its offsets is impossible, so this fails if the checks run there.
    moved = make_batch([2, 3], seen=[1, 1]).to("meta")
    assert {value.device.type for value in tensors(moved).values()} == {"meta"}
    assert moved.max_length == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a GPU")
def test_pinned_batch_reaches_the_gpu_unchanged():
    batch = make_batch([2, 3], seen=[1, 1])
    pinned = batch.pin_memory()
    assert all(value.is_pinned() for value in tensors(pinned).values())
    there = pinned.to("cuda", non_blocking=True)
    for name, value in tensors(there.to("cpu")).items():
        assert torch.equal(value, getattr(batch, name))


def test_pin_memory_pins_every_tensor(monkeypatch: pytest.MonkeyPatch):
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    batch = make_batch([2, 3], seen=[1, 1])
    assert isinstance(batch.pin_memory(), JaggedBatch)
    assert len(pinned) == len(tensors(batch)) == 9


def test_survives_a_worker_process():
    expected = make_batch([2, 3], seen=[1, 1])
    (found,) = DataLoader([expected], batch_size=None, num_workers=1, collate_fn=lambda batch: batch)
    assert found.max_length == expected.max_length
    for name, value in tensors(found).items():
        assert torch.equal(value, getattr(expected, name))


def test_keyed_jagged_tensor_holds_the_same_ids():
    pytest.importorskip("torchrec")
    batch = make_batch([2, 0, 3], negatives=4)
    keyed = batch.to_keyed_jagged_tensor()
    assert keyed.keys() == ["values", "targets", "negatives"]
    assert keyed.stride() == 3
    for key in ("values", "targets"):
        assert torch.equal(keyed[key].values(), getattr(batch, key))
        assert torch.equal(keyed[key].offsets(), batch.offsets)
    assert torch.equal(keyed["negatives"].values().view(-1, 4), batch.negatives)
    assert keyed["negatives"].lengths().tolist() == [8, 0, 12]


def test_keyed_jagged_tensor_without_negatives():
    pytest.importorskip("torchrec")
    assert make_batch([2, 3], negatives=None).to_keyed_jagged_tensor().keys() == ["values", "targets"]
