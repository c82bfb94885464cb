"""What DDP leaves alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.strategies.dense import keep_from_ddp


def test_what_comes_with_the_data_is_not_broadcast_in_every_step():
    backbone = HSTU(dim=8, num_blocks=1, num_heads=1, max_length=12)
    model = GenerativeRetriever(40, backbone, top_k=(5,), log_q=np.zeros(40))
    model.register_buffer("running", torch.zeros(3))
    keep_from_ddp(model, model.embeddings, SimpleNamespace(local_state=model.embeddings.state_dict))
    ignored = set(model._ddp_params_and_buffers_to_ignore)
    assert {"_log_q", "embeddings.weight"} <= ignored
    assert "running" not in ignored
    assert not ignored & {name for name, x in model.named_parameters() if x.requires_grad}
