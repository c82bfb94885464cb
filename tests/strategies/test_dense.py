"""What DDP leaves alone, and what is seen of what it does."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import distributed as dist

from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.strategies.dense import FixedBuckets, TracedReduction, keep_from_ddp, reduce_traced
from turbogr.tracing import Trace


def test_what_comes_with_the_data_is_not_broadcast_in_every_step():
    backbone = HSTU(dim=8, num_blocks=1, num_heads=1, max_length=12)
    model = GenerativeRetriever(40, backbone, top_k=(5,), log_q=np.zeros(40))
    model.register_buffer("running", torch.zeros(3))
    keep_from_ddp(model, model.embeddings, SimpleNamespace(local_state=model.embeddings.state_dict))
    ignored = set(model._ddp_params_and_buffers_to_ignore)
    assert {"_log_q", "embeddings.weight"} <= ignored
    assert "running" not in ignored
    assert not ignored & {name for name, x in model.named_parameters() if x.requires_grad}


class Held(TracedReduction):
    """Reductions of one rank that end only when they are waited for by `_wait`, or after some seconds."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(trace, lambda: 7)
        self.waited, self.in_time = threading.Event(), []

    def _wait(self) -> None:
        self.waited.set()
        super()._wait()

    def all_reduce(self, gradients: torch.Tensor, async_op: bool) -> dist.Work:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()

        def end() -> None:
            self.in_time.append(self.waited.wait(10.0))
            future.set_result([gradients])

        threading.Thread(target=end, daemon=True).start()
        return SimpleNamespace(get_future=lambda: future)


def test_reductions_are_waited_for_where_it_is_seen(tmp_path, monkeypatch):
    """Before DDP does, which waits in C++ and leaves no span: else the pass would seem to compute there."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = FixedBuckets(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)), bucket_cap_mb=1e-5)
    trace = Trace()
    trace.active = True
    held = Held(trace)
    model.register_comm_hook(held, reduce_traced)
    monkeypatch.setattr(dist, "all_reduce", held.all_reduce)
    for _ in range(2):
        held.waited.clear()
        with trace.span("backward", 7, "compute"):
            model(torch.ones(2, 4)).sum().backward()
        assert model.module[1].bias.grad.item() == pytest.approx(2.0)
        model.zero_grad()
    names = [span.name for span in trace.take()]
    assert names.count("wait for dense gradients") == 2
    assert names.count("dense gradients") == len(held.in_time) > 2
    assert all(held.in_time)
