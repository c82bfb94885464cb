"""DryRun: a training step of which shapes are known and nothing is computed or allocated.

Floating-point tensors are fake (`torch._subclasses.FakeTensor`: shape, dtype and device, no memory), so that a model of any
size runs in milliseconds. Integers are real: what a batch looks up, how long its histories are and how many distinct rows it
touches decides what a step costs, and code that reads such values runs as it would in training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass
class Allocations:
    """Bytes that operators have allocated and that somebody still holds; workspaces inside operators are not seen."""

    most: int = 0
    _live: dict[int, tuple[StorageWeakRef, int, str]] = field(default_factory=dict)

    def add(self, tensor: Tensor, part: str) -> None:
        """Notes the storage of an operator's result."""
        storage = tensor.untyped_storage()
        self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), part

    def settle(self) -> None:
        """Forgets what nobody holds any more, and updates the largest sum."""
        self._live = {address: entry for address, entry in self._live.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size, _ in self._live.values()))

    def by_part(self) -> dict[str, int]:
        """Bytes held now, by the part that allocated them."""
        self.settle()
        sums: dict[str, int] = {}
        for _, size, part in self._live.values():
            sums[part] = sums.get(part, 0) + size
        return sums


class DryRun(TorchDispatchMode):
    """Inside this context, floating-point tensors that code creates are fake, and what operators allocate is noted.

    Operators of fake and real tensors give fake ones, operators of real ones (integers) real ones.

    Attributes:
        fake: makes the tensors of a model that is built in this context.
        allocations: of all operators inside the context.
        part: name under which allocations are noted.
    """

    def __init__(self) -> None:
        super().__init__()
        # Real tensors may meet fake ones: a batch's integers.
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.allocations = Allocations()
        self.part = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(isinstance(x, FakeTensor) for x in tensors):
            if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
                args = (args[0], _as_integers(args[1]), *args[2:])
            out = func(*args, **kwargs)
        elif tensors:
            out = func(*args, **kwargs)
        else:
            with self.fake:
                out = func(*args, **kwargs)
            if not any(x.is_floating_point() for x in tree_leaves(out) if isinstance(x, Tensor)):
                out = func(*args, **kwargs)
        # A result in the storage of an argument is a view, or was computed in place.
        old = {x.untyped_storage()._cdata for x in tensors}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in old:
                self.allocations.add(x, self.part)
        self.allocations.settle()
        return out

    def adopt(self, model: nn.Module) -> None:
        """Replaces the parameters and buffers of a model that was built on the device `meta` by fake ones on the CPU.

        The model is built there and not with fake tensors at once because PyTorch's initialisers know `meta`. Floating-point
        tensors that are no parameter or buffer stay where they are, and so do buffers of integers that have values.
        """
        memo: dict[int, Tensor] = {}  # a shared parameter stays shared

        def fake(tensor: Tensor) -> Tensor:
            if id(tensor) not in memo:
                with self.fake:
                    empty = torch.empty_like(tensor, device="cpu")
                memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            return memo[id(tensor)]

        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                # Typed as one or the other; both are tensors by name.
                without_values = {
                    name: fake(x) for name, x in tensors.items() if x is not None and (x.is_meta or x.is_floating_point())
                }
                tensors.update(without_values)  # type: ignore[arg-type]


def _as_integers(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Masks of known values as the indices that they select: a fake mask would not say how many."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
            found.append(index)
        else:
            found.extend(index.nonzero().unbind(1))
    return found
