"""Copies between the host and a device that nobody waits for.

What is in a tensor of a device the host learns only by waiting until all that was queued before is done. So what must be known
on both sides is made on the host and copied. A copy to a device is asynchronous if the memory that it reads is pinned and the
caller does not ask to wait (`non_blocking`); PyTorch keeps that memory until the copy is done. On a CPU nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_AT_ONCE = 1 << 16
"""Rows of a table, or of its gradient, that are on a device at once on their way from or to the host."""

_HOST_COPY = "_turbogr_host_copy"


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, copied in the current stream; itself where it lies there already."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def note_host_copy(tensor: Tensor, host: Tensor) -> None:
    """Notes what a tensor of a device was copied from: neither may be changed in place afterwards."""
    if tensor is not host:
        setattr(tensor, _HOST_COPY, getattr(host, _HOST_COPY, host))


def on_host(tensor: Tensor) -> Tensor:
    """The tensor on the host: itself, what it was copied from if that was noted, or a copy that is waited for."""
    return tensor if tensor.device.type == "cpu" else _copy_of(tensor)


def _copy_of(tensor: Tensor) -> Tensor:
    noted: Tensor | None = getattr(tensor, _HOST_COPY, None)
    return tensor.cpu() if noted is None or noted.device.type != "cpu" else noted
