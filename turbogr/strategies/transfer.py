"""How batches get from the loader to the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from turbogr.sparse.lane import Ticket, copy_lane


class Transfer:
    """Brings batches to the device, steps before they are trained.

    On a CPU a batch is moved at once. To another device it is copied from pinned memory, in a stream of its own, while the
    device works on other batches and the host goes on: what that wants to know of the batch it reads from its own copy.

    Args:
        device: where to.
        move: moves a batch, as Lightning does.
    """

    def __init__(self, device: torch.device, move: Callable[[Any], Any]) -> None:
        self._move, self._on_host = move, device.type == "cpu"
        self._lane = copy_lane(device)

    def begin(self, host: Any) -> tuple[Any, Ticket[Any]]:
        """Begins to move a batch.

        Args:
            host: from the loader. Where that has not pinned its tensors, they are pinned here, in collections and in
                objects with a method `pin_memory`; of other objects the copy is waited for.

        Returns:
            The batch to read ids from, on the host; and the one to train, which may be used once it was waited for.
        """
        if self._on_host:
            ticket = self._lane.submit(lambda: self._move(host))
            return ticket.wait(), ticket
        pinned = pin_memory(host)  # itself where the loader has done so
        return pinned, self._lane.submit(lambda: self._move(pinned))
