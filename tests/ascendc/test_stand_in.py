"""The stand-in itself: every guard is tripped by the mistake that it is there for, and by nothing else."""

from __future__ import annotations

import pytest

from tests.ascendc.build import StandInError, driver

GUARDS = {
    "local vector out of bounds": r"core \d, Adds \(guards_local.h:\d+\): .* 32 elements: \[0, 40\) is out of bounds",
    "local scalar read out of bounds": r"GetValue .*: local tensor of 64 elements: \[64, 65\) is out of bounds",
    "local scalar write out of bounds": r"SetValue .*: local tensor of 64 elements: \[64, 65\) is out of bounds",
    "local outside of its buffer": "outside of the buffer of 256 bytes",
    "local without memory": "local tensor without memory",
    "local never written": "reads local memory that was never written, at element 56 of 64",
    "local never written since it was allocated": "reads local memory that was never written, at element 0",
    "local padding that nobody asked for": "reads local memory that was never written, at element 5",
    "local vector misaligned": "not aligned to 32 bytes: byte 16 of its buffer",
    "local copy misaligned": "not aligned to 32 bytes: byte 16 of its buffer",
    "local memory is full": "local memory of 196608 bytes is full: 1024 are taken and 195616 more are asked for",
    "too many buffers": "more than 64 buffers",
    "buffer without bytes": "a buffer without bytes",
    "longer than the TBuf": "longer than the TBuf of 256 bytes",
    "TBuf without a buffer": "was not given to InitBuffer",
    "local memory of a TPipe that is gone": "of a TPipe that is gone",
    "queue without a free buffer": "no buffer of the queue is free",
    "queue without buffers": "the queue was not given to InitBuffer",
    "queue with buffers twice": "has buffers already",
    "queue empty": "the queue is empty",
    "queue full": "the queue of depth 1 is full",
    "tensor freed twice": "freed before",
    "tensor never freed": "a tensor of 256 bytes was not freed",
    "tensor enqueued twice": "was enqueued before",
    "tensor of another queue": "not the queue's",
    "tensor freed in its queue": "that is in the queue",
    "tensor used in its queue": "DeQue comes first",
    "tensor used after it was freed": "that was freed",
    "tensor used while a copy fills it": "a tensor that a copy fills: EnQue and DeQue come first",
    "tensor copied out past its queue": "did not go through its queue",
    "copy into a tensor that was dequeued": "a copy into a tensor that was dequeued",
    "copy into a tensor that was calculated on": "another unit has written to",
    "nine tensors at once": "more than 8 tensors",
    "flag set twice": "event 0 is set already",
    "flag that nobody set": "waits for event 0, which nobody set",
    "flag that nobody waits for": "is not waited for: event 1",
    "event that does not exist": "event 8 does not exist",
    "event never released": "was not released",
    "event released twice": "was not reserved",
    "all events reserved": "all events of the kind are reserved",
    "operands overlap": "overlap without being the same",
    "negative count": "a negative number of elements",
    "comparison of part of a repeat": "multiples of 256 bytes",
    "selection in another mode": "a scalar in a mode of tensors",
    "gather from between elements": "offset 2 is not aligned to the elements",
    "gather out of bounds": r"\[64, 65\) is out of bounds",
    "cast in a mode that it does not have": "does not round in mode 0",
    "sum without enough work space": "local tensor of 4 elements",
    "mask longer than a repeat": "a mask of 65 elements",
    "global copy out of bounds": r"global tensor of 56 elements: \[0, 64\) is out of bounds",
    "global scalar out of bounds": r"\[256, 257\) is out of bounds",
    "global before the beginning": "is out of bounds",
    "global beyond what was registered": "outside of the registered global memory",
    "global that was not registered": "was not registered",
    "global without a buffer": "global tensor without a buffer",
    "global never written": "reads global memory that was never written, at element 0",
    "global not aligned to its elements": "not aligned to its elements",
    "output left as it was": "the output: byte 256 of 1024 was never written",
    "copy of no multiple of 32 bytes": "a length of 48 bytes is no multiple of 32",
    "copy of nothing": "a length of 0 bytes",
    "too many blocks": "4096 blocks",
    "block of half an element": "a length of 6 bytes is no number of elements",
    "too much padding": "more than 32 bytes of padding",
    "atomic mode left on": "SetAtomicNone was not called",
    "atomic mode of another type": "for another type than is copied",
    "core leaves while another waits": r"core 1 left while 1 of 2 cores wait in SyncAll|waits for cores that have left: 1 of 2",
    "two cores write the same": r"race: core \d \(DataCopy, line \d+\) and core \d .*the same 256 bytes",
    "one core reads what another writes": r"race: .*GlobalTensor::GetValue.* the same 4 bytes",
    "one core reads what another adds to": "race: ",
    "one core writes what another adds to": "race: .*the same 32 bytes",
    "kernel that stops itself": r"core \d, Trap.*: the kernel stopped itself",
    "product without Init": "Init comes first",
    "product without an operand": "an operand is not set",
    "product with an empty tiling": "the tiling is empty",
    "product transposed against its type": "A's type does not allow it",
    "product larger than its tiling": "a product of 9 x 8 x 8: the tiling was made for 8 x 8 x 8",
    "product whose rows do not fit": "rows of 8 elements do not fit into rows of 7",
    "product out of bounds": r"IterateAll .*: global tensor of 63 elements: \[56, 64\) is out of bounds",
    "product in atomic mode": "only adding is simulated",
    "result read before it is there": "the result of a product that WaitIterateAll has not waited for",
    "operand overwritten before it was read": "an operand of a product that WaitIterateAll has not waited for",
    "product posted while one is waited for": "WaitIterateAll was not called for the last product",
    "product that nobody waits for": "a product was not waited for",
    "wait for no product": "there is no product to wait for",
    "end of a product that is not there": "WaitIterateAll was not called for the last product",
    "scalar reads what the vector unit writes": "reads memory that V may still be writing: pipe S has not waited for it",
    "scalar writes what the vector unit reads": "writes memory that V may still be reading: pipe S",
    "vector reads what the scalar unit writes": "reads memory that S may still be writing: pipe V",
    "vector reads what is copied in": "reads memory that MTE2 may still be writing: pipe V",
    "copied into what the vector unit reads": "writes memory that V may still be reading: pipe MTE2",
    "copied out while the vector unit writes": "reads memory that V may still be writing: pipe MTE3",
    "vector writes what is copied out": "writes memory that MTE3 may still be reading: pipe V",
    "copied in what is copied out": "reads memory that MTE3 may still be writing: pipe MTE2",
    "copied out twice to one place": "writes memory that MTE3 may still be writing: pipe MTE3",
    "added to what is copied out": "adds to memory that MTE3 may still be writing: pipe MTE3",
    "waits of another kind": "reads memory that MTE2 may still be writing: pipe V",
    "product of what is copied out": "IterateAll .*: reads memory that MTE3 may still be writing: pipe S",
    "product onto what is copied in": "IterateAll .*: writes memory that MTE2 may still be reading: pipe S",
    "write left in the cache": "the end of the kernel: what the scalar unit wrote .* DataCacheCleanAndInvalid was not called",
    "write in the cache at a barrier": "SyncAll .*: what the scalar unit wrote to global memory is in its cache",
    "copy of what is in the cache": "DataCopy .*: memory whose new value is in the scalar unit's cache",
    "cache older than a copy": "reads what its cache holds from before it was written",
    "cache older than another core's write": "reads what its cache holds from before it was written",
    "two cores write one line": r"race: core \d \(GlobalTensor::SetValue.* the same 64 bytes",
    "blocks without bytes": "blocks of 0 bytes: there may be 1 to 2097151",
    "8-byte elements padded with another number": "8-byte elements are padded with 0 only",
    "atomic adding of a type that has none": "this type cannot be added atomically",
    "sum of no elements": "ReduceSum .*: no elements",
    "largest of no elements": "ReduceMax .*: no elements",
    "least element's index": "ReduceMin .*: indices are not simulated",
    "blocks summed in too many repeats": "BlockReduceSum .*: more than 255 repeats",
    "mask without elements": "a mask of 0 elements",
    "repeats summed in too many repeats": "WholeReduceSum .*: more than 255 repeats",
    "whole numbers compared by size": "int32_t compares for equality only",
    "selection of tensors in a mode of scalars": "two tensors in a mode of scalars",
    "product of shapes that are not positive": "shapes must be positive",
    "product without elements": "a product without elements",
    "second operand transposed against its type": "B's type does not allow it",
    "product that is not written in place": "only results in place are simulated",
    "operand whose rows do not fit": "an operand's rows of 8 elements lie in rows of 7",
}


def run(name: str, wrong: bool, seed: int = 0) -> None:
    driver("guards").call("run_guard", name.encode(), int(wrong), seed)


@pytest.mark.parametrize("name", GUARDS)
def test_a_mistake_is_noticed(name):
    with pytest.raises(StandInError, match=GUARDS[name]):
        run(name, wrong=True)


@pytest.mark.parametrize("name", GUARDS)
def test_without_the_mistake_there_is_no_error(name):
    run(name, wrong=False)


@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("name", [name for name, message in GUARDS.items() if message.startswith("race")])
def test_races_are_noticed_in_any_order_of_the_cores(name, seed):
    with pytest.raises(StandInError, match=GUARDS[name]):
        run(name, wrong=True, seed=seed)


def test_only_a_launch_may_call():
    with pytest.raises(StandInError, match="called outside of host::launch"):
        driver("guards").call("run_outside")


def test_a_launch_without_cores_is_refused():
    with pytest.raises(StandInError, match="a launch needs a core"):
        driver("guards").call("run_failing", 0, 0)


def test_memory_that_is_registered_twice_is_noticed():
    with pytest.raises(StandInError, match="registered twice"):
        driver("guards").call("run_twice")
