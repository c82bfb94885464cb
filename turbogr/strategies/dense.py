"""What DDP does with the dense part, and what it must leave alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from turbogr.sparse.engine import SparseEngine
from turbogr.sparse.table import EmbeddingTable
from turbogr.tracing import Trace


def keep_from_ddp(module: nn.Module, table: EmbeddingTable, engine: SparseEngine) -> None:
    """Keeps a table and its optimizer's state from DDP, which would make them equal on all ranks; to be called before it wraps.

    Args:
        module: what DDP will wrap.
        table: part of it, sharded.
        engine: keeps the table's rows.
    """
    prefixes = [name for name, part in module.named_modules() if part is table]
    names = [f"{prefix}.{key}" if prefix else key for prefix in prefixes for key in engine.local_state()]
    # DDP would broadcast buffers before every forward pass. Integers, and what no checkpoint keeps, such as log q of all items,
    # come with the data or the code and are the same on all ranks.
    kept = module.state_dict(keep_vars=True).keys()
    names += [name for name, buffer in module.named_buffers() if not buffer.is_floating_point() or name not in kept]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


class FixedBuckets(DistributedDataParallel):
    """DDP whose buckets of gradients are the same in every step.

    With three ranks or more the order in which a gradient's parts are added hangs on where it lies in its bucket. DDP fills the
    buckets anew after the first backward pass, in the order in which it saw gradients come; the first step of a resumed run
    would add in another order than the same step of the run before. Here they are filled once, in the order in which
    gradients come where parameters are used in the order of their definition.

    Args:
        module: as in DistributedDataParallel.
        options: the same.
    """

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()
        return parameters[::-1], sparse[::-1]


class TracedReduction:
    """DDP's reduction of dense gradients, in the bits of DDP's own, with spans: of each bucket, and of the wait for them.

    Args:
        trace: where spans go.
        number: of the batch in training.
    """

    def __init__(self, trace: Trace, number: Callable[[], int]) -> None:
        self._trace, self._number = trace, number
        self._under_way: list[torch.futures.Future[Tensor]] = []

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The mean of a bucket's gradients over the ranks.

        Args:
            bucket: as DDP gives it to a communication hook.
        """
        if bucket.index() == 0:
            # Called when the last gradient is there, before DDP, which asks for the same with its last bucket, waits in C++.
            self._under_way = []  # of a backward pass that failed
            Variable._execution_engine.queue_callback(self._wait)
        start, batch = time.perf_counter(), self._number()
        gradients = bucket.buffer().mul_(1.0 / dist.get_world_size())

        def ended(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
            self._trace.add("dense gradients", batch, "communication", start)
            return reduced.value()[0]

        future = dist.all_reduce(gradients, async_op=True).get_future().then(ended)
        self._under_way.append(future)
        return future

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, []
        with self._trace.span("wait for dense gradients", self._number(), "wait"):
            for future in under_way:
                future.wait()


def reduce_traced(state: TracedReduction, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """`TracedReduction.reduce` as DDP wants a communication hook."""
    return state.reduce(bucket)


# DDP compares a hook's annotations with types; ours are text until here.
reduce_traced.__annotations__ = get_type_hints(reduce_traced)
