"""What tests of TurboGRStrategy train, in one process and on several ranks: small models on a prepared folder."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from tests.data.make import write_prepared
from turbogr.callbacks.logit_sharing import LogitSharing
from turbogr.callbacks.negative_offload import NegativeOffload
from turbogr.callbacks.negative_quantization import NegativeQuantization
from turbogr.data.datamodule import SequenceDataModule
from turbogr.data.prepare import prepare
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.negative_bytes import NegativeLoad
from turbogr.sparse import optimizers
from turbogr.sparse.table import EmbeddingTable
from turbogr.strategies import TurboGRStrategy

TOGETHER = 32
"""Users of a step, on all ranks together."""
ROWS: dict[str, Callable[[], optimizers.RowOptimizer]] = {
    "adagrad": optimizers.AdaGrad,
    "row_wise_adagrad": optimizers.RowWiseAdaGrad,
    "lazy_adam": optimizers.LazyAdam,
}
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
NEGATIVES: dict[str, Callable[[], pl.Callback]] = {
    "offload": lambda: NegativeOffload(segment=30, mode="offload"),
    "fp16": NegativeQuantization,
    "sharing": LogitSharing,
}
# Options of TurboGRStrategy and of what is trained. One process trains the same under strategy="auto".
FOUR = {f"{4 // i} groups of {i}, {rows}": ({"groups": 4 // i}, {"rows": rows}) for i in (1, 2, 4) for rows in ROWS}
FOUR |= {
    "table-wise": ({"groups": 2, "sharding": "table_wise"}, {"rows": "lazy_adam"}),
    "two-phase": ({"groups": 2, "exchange": "two_phase"}, {"rows": "lazy_adam"}),
    "accumulated": ({"groups": 2}, {"rows": "lazy_adam", "accumulate_grad_batches": 2, "max_epochs": 2}),
    "clipped": ({"groups": 2}, {"rows": "lazy_adam", "gradient_clip_val": 0.05}),
    "scheduled": ({"groups": 2}, {"rows": "adagrad", "scheduled": True, "val_check_interval": 2}),
}
SEMI = {"mode": "semi_async"}
FOUR |= {
    "semi_async": ({"groups": 2, **SEMI}, {"rows": "lazy_adam", "max_epochs": 2}),
    "semi_async, accumulated": ({"groups": 2, **SEMI}, {"rows": "adagrad", "accumulate_grad_batches": 2, "max_epochs": 2}),
    "semi_async, table-wise, validated": (
        {"groups": 1, "sharding": "table_wise", "batches_in_flight": 3, **SEMI},
        {"rows": "lazy_adam", "val_check_interval": 2},
    ),
    "semi_async, copies, clipped": (
        {"groups": 4, "exchange": "two_phase", "sparse_clip_norm": 0.01, **SEMI},
        {"rows": "adagrad", "gradient_clip_val": 0.05},
    ),
}
TWO = {
    f"{groups} groups of {2 // groups}, {rows}": ({"groups": groups}, {"rows": rows})
    for groups in (1, 2)
    for rows in ("adagrad", "row_wise_adagrad", "lazy_adam")
}


FOUR |= {
    "offloaded": ({"groups": 2}, {"rows": "lazy_adam", "negatives": ("offload",), "accumulate_grad_batches": 2}),
    "fp16 negatives": ({"groups": 2}, {"rows": "adagrad", "negatives": ("fp16",)}),
    "fp16 negatives, table-wise": (
        {"groups": 1, "sharding": "table_wise"},
        {"rows": "adagrad", "negatives": ("fp16", "offload")},
    ),
}
TWO |= {
    "semi_async, fp16 negatives": (
        {"groups": 1, **SEMI},
        {"rows": "adagrad", "max_epochs": 2, "negatives": ("offload", "fp16")},
    ),
    "semi_async": ({"groups": 1, **SEMI}, {"rows": "lazy_adam", "max_epochs": 2}),
    "semi_async, bf16-mixed": ({"groups": 2, **SEMI}, {"rows": "adagrad", "precision": "bf16-mixed"}),
}
POPULARITY = {"data": {"negative_sampling": "popularity"}, "rows": "adagrad"}
TWO |= {
    "log q": ({"groups": 1}, POPULARITY),
    "log q, semi_async, fp16 negatives": ({"groups": 1, **SEMI}, {**POPULARITY, "negatives": ("fp16",)}),
}


SHARED = {
    f"shared, {name}": ({"groups": groups, **SEMI}, {"rows": "adagrad", "negatives": ("sharing", "fp16"), **options})
    for name, groups, options in (("one group", 1, {}), ("two groups", 2, {}), ("another seed", 2, {"seed": 8}))
}
"""On two ranks. Tokens borrow within their rank: one process does not train the same, but other groups do."""


def make_folder(folder: Path, shared: Path | None = None) -> Path:
    """MovieLens latest-small where it is there, else random events."""
    if shared is not None:
        prepare("movielens", [shared / "ml-latest-small"], folder)
        return folder
    return write_prepared(folder, num_users=110, num_items=60, max_len=20, seed=1)


def shared_folder() -> Path | None:
    folder = Path(__file__).resolve().parents[3] / "shared" / "data"
    return folder if (folder / "ml-latest-small").is_dir() else None


def build(
    folder: Path,
    ranks: int,
    rows: str = "lazy_adam",
    dropout: float = 0.0,
    scheduled: bool = False,
    corrected: bool = True,
    **data: Any,
) -> tuple[GenerativeRetriever, SequenceDataModule]:
    """A model, its logits corrected by log q unless draws are uniform or `corrected` is False, and its data."""
    pl.seed_everything(7)
    options = {"batch_size": TOGETHER // ranks, "max_length": 20, "num_negatives": 6, "num_workers": 0, "eval_batch_size": 64}
    module = SequenceDataModule(folder, **{**options, **data})
    model = GenerativeRetriever(
        module.num_items,
        HSTU(dim=8, num_blocks=1, num_heads=2, max_length=20, dropout=dropout),
        EmbeddingTable(ROWS[rows]()),
        optimizer=adam,
        scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5) if scheduled else None,
        top_k=(1, 10),
        predict_k=5,
        log_q=module.log_q if corrected else None,
    )
    return model, module


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Of the dense parameters."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6)


def fit(
    folder: Path,
    ranks: int,
    strategy: str | TurboGRStrategy,
    callbacks: list[pl.Callback] | None = None,
    ckpt_path: Path | None = None,
    rows: str = "lazy_adam",
    scheduled: bool = False,
    dropout: float = 0.0,
    data: dict[str, Any] | None = None,
    negatives: Sequence[str] = (),
    seed: int | None = None,
    corrected: bool = True,
    **options: Any,
) -> pl.Trainer:
    """Trains, on `ranks` ranks of which torchrun has started as many, with callbacks of NEGATIVES."""
    model, module = build(folder, ranks, rows, dropout, scheduled, corrected, **(data or {}))
    model.seed = seed
    checkpoints = any(isinstance(callback, pl.callbacks.Checkpoint) for callback in callbacks or [])
    settings = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 0, "enable_checkpointing": checkpoints}
    if "val_check_interval" in options:
        settings["limit_val_batches"] = 2
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    callbacks = [*(callbacks or []), *(NEGATIVES[name]() for name in negatives)]
    settings |= {"devices": ranks // nodes, "num_nodes": nodes, "callbacks": callbacks, "strategy": strategy}
    trainer = pl.Trainer(**QUIET, **{**settings, **options})
    trainer.fit(model, module, ckpt_path=ckpt_path, weights_only=True)
    return trainer


def digest(strategy: TurboGRStrategy) -> str:
    """Of this rank's part of the tables and of their optimizer's state."""
    table = strategy.lightning_module.embeddings
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in table.state_dict().values())).hexdigest()


def relative(path: Path, expected: Path) -> dict[str, float]:
    """Tensor of a checkpoint -> norm of its difference from another, over that one's norm; optimizers' state included.

    Not element by element: a few of many thousand gradients are zero but for rounding, and the first step of AdaGrad and Adam
    is as large for those as for any.
    """
    own, theirs = (flat(torch.load(file, weights_only=True)) for file in (path, expected))
    assert own.keys() == theirs.keys()
    return {
        name: float((own[name].double() - tensor.double()).norm() / tensor.double().norm().clamp(min=1e-12))
        for name, tensor in theirs.items()
    }


def flat(checkpoint: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint's model and optimizers."""
    found = {name: tensor for name, tensor in checkpoint["state_dict"].items() if tensor.numel()}
    for number, optimizer in enumerate(checkpoint["optimizer_states"]):
        for key, state in optimizer["state"].items():
            found |= {f"optimizer {number}, {key}, {name}": value for name, value in state.items()}
    return found


sync = functools.partial(TurboGRStrategy, mode="sync")
"""What trains as one process does."""


class OnTheWire(pl.Callback):
    """Counts, while a model is trained, the bytes of look-ups that this rank sends, itself included.

    Attributes:
        sent: dtype -> bytes.
        added: rows of this rank's batches that negatives alone look up.
    """

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}
        self.added = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.added += NegativeLoad.of(batch, pl_module.embeddings.dim).added

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Within, transports are listened to."""
        send = dist.all_to_all_single

        def counted(received, sent, *args, **kwargs):
            key = str(sent.dtype).removeprefix("torch.")
            self.sent[key] = self.sent.get(key, 0) + sent.nbytes
            return send(received, sent, *args, **kwargs)

        with patch.object(dist, "all_to_all_single", counted):
            yield


class SignalOn(pl.Callback):
    """Sends one rank a signal at a step."""

    def __init__(self, rank: int, step: int, name: str = "SIGTERM") -> None:
        self.rank, self.step, self.signum = rank, step, signal.Signals[name]

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            os.kill(os.getpid(), self.signum)


class Toy(pl.LightningModule):
    """A module of one's own: mean squared error of a dense layer over looked-up rows; batches are (ids, values)."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingTable(optimizers.AdaGrad())
        self.embeddings.allocate(30, 4)
        self.layer = nn.Linear(4, 1)

    def sparse_features(self, batch):
        return {"ids": batch[0]}

    def sample_count(self, batch):
        return len(batch[0])

    def training_step(self, batch, batch_idx):
        rows = self.embeddings(self.sparse_features(batch))["ids"]
        return nn.functional.mse_loss(self.layer(rows).squeeze(-1), batch[1])

    def validation_step(self, batch, batch_idx):
        self.embeddings(self.sparse_features(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


class Batches:
    """A loader of `count` batches, with or without a length."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            yield torch.randint(0, 30, (5,), generator=generator), torch.randn(5, generator=generator)


class SizedBatches(Batches):
    def __len__(self) -> int:
        return self.count
