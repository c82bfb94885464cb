"""What all operators on jagged tensors ask of their inputs.

A jagged tensor of T tokens is B sequences laid end to end, cut by `offsets` [B + 1], which rise from 0 to T.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(like: Tensor) -> AbstractContextManager[object]:
    """Context in which products keep their operands' dtype: an operator's arithmetic is not the caller's to change."""
    device = like.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def check_devices(operator: str, **tensors: Tensor | None) -> None:
    """Checks that all tensors, named as the operator's arguments, are where the first one is; absent ones are passed over.

    One tensor decides the back end: a kernel would read another one's address on a device as one of its own.

    Raises:
        ValueError: names the operator, both arguments and both devices.
    """
    given = [(name, tensor.device) for name, tensor in tensors.items() if tensor is not None]
    for name, device in given[1:]:
        if device != given[0][1]:
            raise ValueError(f"{operator}: {name} is on {device}, but {given[0][0]} on {given[0][1]}")


def check_attention(operator: str, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
    """Checks what all jagged attention operators ask: q, k [T, H, dqk], v [T, H, dv], offsets [B + 1], on one device.

    No value is read, so that fake tensors pass: `check_values` does that, inside the operator.

    Returns:
        offsets as int64: int32 ones are widened.

    Raises:
        ValueError: names the operator, the argument and what was found.
    """
    if q.dim() != 3 or k.shape != q.shape or v.dim() != 3 or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"{operator}: q and k are [T, H, dqk] and v is [T, H, dv]; "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if not (q.is_floating_point() and q.dtype == k.dtype == v.dtype):
        raise ValueError(f"{operator}: q, k and v share one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    check_devices(operator, q=q, k=k, v=v, offsets=offsets)
    if min(*q.shape[1:], v.shape[2]) < 1:
        raise ValueError(
            f"{operator}: heads and their widths are at least 1; got H {q.shape[1]}, dqk {q.shape[2]}, dv {v.shape[2]}"
        )
    # Elements are counted in 64 bits everywhere; but PyTorch's matrix products take each of their sizes in 32 bits.
    if max(q.shape[2], v.shape[2]) >= 2**31:
        raise ValueError(f"{operator}: a width of {max(q.shape[2], v.shape[2]):,} is beyond 2^31 - 1")
    return as_offsets(operator, offsets)


def check_values(operator: str, offsets: Tensor, tokens: int, position_bias: Tensor | None = None) -> None:
    """Checks that int64 offsets rise from 0 to `tokens`, by no more than a position table has entries where there is one.

    On the host only: reading values from a device would wait for it.

    Raises:
        ValueError: names the operator and what was found.
    """
    if offsets.device.type != "cpu":
        return
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0 or last != tokens or bool((offsets.diff() < 0).any()):
        raise ValueError(f"{operator}: offsets rise from 0 to {tokens}; got first {first}, last {last}, or a fall between")
    longest = longest_of(offsets)
    if longest >= 2**31:
        raise ValueError(f"{operator}: a sequence of {longest:,} tokens is beyond 2^31 - 1")
    if position_bias is not None and longest > position_bias.numel():
        raise ValueError(
            f"{operator}: position_bias has {position_bias.numel()} entries, the longest sequence {longest} tokens"
        )


def longest_of(offsets: Tensor) -> int:
    """The longest sequence where offsets are on the host; 0 elsewhere, and for a batch of none."""
    return int(offsets.diff().max()) if offsets.device.type == "cpu" and offsets.numel() > 1 else 0


def as_offsets(operator: str, offsets: Tensor) -> Tensor:
    """`offsets` as int64; no value is read.

    Raises:
        ValueError: names the operator and what was found, if shape or dtype are others than int64 or int32 [B + 1].
    """
    if offsets.dim() != 1 or offsets.dtype not in (torch.int64, torch.int32) or offsets.numel() < 1:
        raise ValueError(f"{operator}: offsets is int64 or int32 [B + 1]; got {offsets.dtype} {list(offsets.shape)}")
    return offsets.long()
