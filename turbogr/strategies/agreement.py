"""What the ranks tell each other at each step, and how they stop together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

_HEAD = 3  # has a batch, its samples, signal


class StopRequest:
    """A signal by which one process is asked to stop, and which all ranks obey at the same step.

    Args:
        alone: there is no other rank to wait for.

    Attributes:
        asked: signal number that this process was sent; 0 for none. A signal handler may set it through `ask`.
        agreed: the same, once every rank knows; the largest where ranks were sent different ones.
        taken: someone obeys `agreed`; until then Lightning's own reaction to SIGTERM stands.
    """

    def __init__(self, alone: bool = True) -> None:
        self.alone = alone
        self.asked, self.agreed, self.taken = 0, 0, False

    def ask(self, signum: int) -> None:
        """Asks all ranks to stop."""
        self.asked = signum
        if self.alone:
            self.agreed = signum

    def agree(self, signum: int) -> None:
        """Notes what all ranks have been told; called at the same step on all of them."""
        self.agreed = max(self.agreed, signum)


class Agreement:
    """One all-gather of small numbers on the host, begun when a batch is loaded and awaited a step later.

    Not a dataclass on purpose: Lightning moves and clones what is one.

    Args:
        samples: of this rank's batch; None where it has no further batch.
        send_counts: [I], rows that this rank asks of each member of its group.
        signum: signal that this process was sent, or 0.
        group: all ranks, on gloo; None for a single rank, which agrees with itself.
    """

    def __init__(self, samples: int | None, send_counts: Sequence[int], signum: int, group: dist.ProcessGroup | None) -> None:
        own = torch.tensor([samples is not None, samples or 0, signum, *send_counts])
        self._all, self._work = [own], None
        if group is not None:
            self._all = [torch.empty_like(own) for _ in range(group.size())]
            self._work = dist.all_gather(self._all, own, group=group, async_op=True)

    def wait(self) -> Tensor:
        """int64 [W, 3 + I], what every rank has told."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return torch.stack(self._all)


class Agreed:
    """What became of an Agreement.

    Args:
        told: from `Agreement.wait`.
        rank: this rank.
        group_size: I.

    Attributes:
        goes_on: every rank has a batch.
        samples: [W], of their batches.
        signum: the largest signal that any process was sent, or 0.
        receive_counts: [I], rows that each member of this rank's group asks of this rank.
    """

    def __init__(self, told: Tensor, rank: int, group_size: int) -> None:
        group, member = divmod(rank, group_size)
        self.goes_on = bool(told[:, 0].all())
        self.samples: list[int] = told[:, 1].tolist()
        self.signum = int(told[:, 2].max())
        self.receive_counts: list[int] = told[group * group_size : (group + 1) * group_size, _HEAD + member].tolist()


def gather_numbers(number: int, group: dist.ProcessGroup) -> list[int]:
    """A number of every rank, by rank; blocks."""
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(numbers, torch.tensor([number]), group=group)
    return [int(x) for x in numbers]
