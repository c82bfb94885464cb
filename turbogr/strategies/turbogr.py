"""TurboGRStrategy: hierarchical sparse parallelism as a Lightning strategy.

W ranks are M groups of I. The tables are sharded inside each group and copied between groups; everything else is replicated,
as under DDP. Training equals that of one process on the ranks' batches together (TurboGR, section 4.2). This file is the table
of Lightning's hooks; what they do is in `pipeline` (batches in flight), `turbogr.sparse.engine` (rows), `checkpoint`,
`lookahead` (loaders), `agreement` and `failures`.
"""

from __future__ import annotations

import atexit
import itertools
import signal
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch import distributed as dist
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from turbogr.checkpoints import use_checkpoint_files
from turbogr.errors import ConfigurationError
from turbogr.sparse.engine import SparseEngine
from turbogr.sparse.exchange import ExchangeForm
from turbogr.sparse.initial_rows import deferred_rows
from turbogr.sparse.sharding import Sharding, ShardingKind
from turbogr.sparse.table import EmbeddingTable
from turbogr.sparse.topology import HSPTopology
from turbogr.strategies.agreement import StopRequest, gather_numbers
from turbogr.strategies.checkpoint import (
    dense_state,
    gathered_state,
    load_state,
    note_delayed,
    own_delayed,
    save_directory,
    save_gathered,
)
from turbogr.strategies.dense import FixedBuckets, TracedReduction, keep_from_ddp, reduce_traced
from turbogr.strategies.failures import FailureBoard
from turbogr.strategies.group_choice import GROUPS_KEY, Asked
from turbogr.strategies.lookahead import LookaheadLoader, evaluation_loader, training_loader
from turbogr.strategies.npu import DDPOnNPU
from turbogr.strategies.pipeline import InFlight, Mode, Pipeline
from turbogr.strategies.refusals import (
    only_table,
    refuse_module,
    refuse_on_ranks,
    refuse_optimizers,
    refuse_precision,
    refuse_second_loader,
)
from turbogr.strategies.transfer import Transfer
from turbogr.tracing import Trace

_runs = itertools.count(1)
"""Of this process; the other ranks count the same."""


class TurboGRStrategy(DDPOnNPU):
    """Trains on W ranks as one process would: tables sharded inside groups of ranks, sparse exchange between groups.

    The module has one EmbeddingTable, and says with `sparse_features(batch)` and `sample_count(batch)` what a batch looks up
    and how many terms its mean loss has (GenerativeRetriever does). Then weights and optimizer state are those of one process
    on the batches of all ranks together; on one rank they are those of strategy="auto", bit for bit.

    Ranks are started by Lightning (`Trainer(devices=4, ...)`) or by torchrun.

    Args:
        groups: M, the number of copies of the tables; must divide the number of ranks. "auto" chooses by the rule of
            `turbogr.sparse.groups`, from the rows of the first batches, memory and links; training
            that is taken up on as many ranks, but with another number, says so.
        mode: "semi_async", rows are updated one step later than the dense parameters, so that what travels does so beside the
            computation (TurboGR, sections 4.2.2 and 4.2.3); "sync", every batch sees the updates of all before it.
        batches_in_flight: from the one whose rows are being updated to the one that is being loaded, 2 to 8. What is trained
            does not depend on it.
        sharding: of the tables over the ranks of a group; see `turbogr.sparse.sharding.ShardingKind`.
        exchange: form of the exchange between groups; "auto" takes the one that sends fewer bytes.
        sparse_lr: "constant" leaves the rows' learning rate as the row optimizer has it; "follow" scales it as the schedulers
            have scaled that of the dense optimizer's first group against its `initial_lr` (OneCycleLR's is its start).
        sparse_clip_norm: largest norm of the rows' gradient, of all tables and ranks together; None does not clip. (The
            trainer's `gradient_clip_val` clips the dense parameters only.)
        bucket_cap_mb: dense gradients are reduced in buckets of at most so many MB, beside the backward pass; the last bucket's
            reduction is what the pass waits for, so a small or slowly connected model wants small ones. None is DDP's 25.
        checkpoint: "gathered", one file that any strategy loads; "distributed", a directory into which every rank writes its
            own rows.
        memory_per_rank: what a rank may use for tables and dense parameters, such as "64GB"; what does not fit is refused.
            None is the memory of the device, or a rank's share of the node's.
        local_bandwidth: for `groups: auto`, what a rank sends in a second to ranks of its node, such as "50GB".
        network_bandwidth: the same to ranks of other nodes; where one of the two is None, both are measured.
        timeout_s: seconds that a rank waits for another before it raises.
        process_group_backend: of `torch.distributed`; None is the device's default.
        start_method: how Lightning starts the ranks; "popen" is the only one.
        cluster_environment: as in DDPStrategy.
        checkpoint_io: as in DDPStrategy.

    Attributes:
        topology: of the ranks; from `setup` on.
        engine: keeps the tables' rows; from `setup` on.
        stop: a signal that all ranks obey together.
        trace: what is done when, if somebody wants to know.

    Raises:
        ConfigurationError: an option has an impossible value.
    """

    topology: HSPTopology
    engine: SparseEngine
    pipeline: Pipeline

    def __init__(
        self,
        groups: int | Literal["auto"] = 1,
        mode: Mode = "semi_async",
        batches_in_flight: int = 6,
        sharding: ShardingKind = "row_wise",
        exchange: ExchangeForm = "auto",
        sparse_lr: Literal["constant", "follow"] = "constant",
        sparse_clip_norm: float | None = None,
        bucket_cap_mb: float | None = None,
        checkpoint: Literal["gathered", "distributed"] = "gathered",
        memory_per_rank: str | None = None,
        local_bandwidth: str | None = None,
        network_bandwidth: str | None = None,
        timeout_s: float = 1800.0,
        process_group_backend: str | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
    ) -> None:
        _check_choice("mode", mode, ("sync", "semi_async"))
        _check_choice("batches_in_flight", batches_in_flight, range(2, 9))
        _check_choice("sharding", sharding, ("row_wise", "table_wise", "planner"))
        _check_choice("exchange", exchange, ("auto", "gather", "two_phase"))
        _check_choice("sparse_lr", sparse_lr, ("constant", "follow"))
        _check_choice("checkpoint", checkpoint, ("gathered", "distributed"))
        self._asked = Asked.of(groups, memory_per_rank, local_bandwidth, network_bandwidth)
        positive = {"sparse_clip_norm": sparse_clip_norm, "bucket_cap_mb": bucket_cap_mb, "timeout_s": timeout_s}
        for name, value in positive.items():
            if value is not None and value <= 0:
                raise ConfigurationError(f"TurboGRStrategy: {name} must be positive, got {value}")
        if start_method != "popen":
            raise ConfigurationError(
                f"TurboGRStrategy: processes that are started by {start_method} would share one process's tables: leave "
                "start_method at popen, or start the ranks with torchrun"
            )
        super().__init__(
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_s),
            start_method=start_method,
            bucket_cap_mb=bucket_cap_mb,
        )
        self.groups, self.mode, self.sharding, self.exchange = groups, mode, sharding, exchange
        self.batches_in_flight = batches_in_flight
        self.sparse_lr, self.sparse_clip_norm, self.checkpoint_form = sparse_lr, sparse_clip_norm, checkpoint
        self.stop = StopRequest()
        self.trace = Trace()
        self._lookahead: LookaheadLoader | None = None
        self._board: FailureBoard | None = None

    # Before training.

    def setup_environment(self) -> None:
        """Opens the process group, which is closed when the process ends, and watches for ranks that fail."""
        with isolate_rng():  # DDP seeds anew here; one process does not
            super().setup_environment()
        run = next(_runs)
        if run == 1:
            atexit.register(_close_process_group)
        self.stop = StopRequest(alone=self.world_size == 1)
        if self.world_size > 1:
            store = dist.distributed_c10d._get_default_store()
            self._board = FailureBoard(self.global_rank, self.world_size, store, run)

    def setup(self, trainer: Trainer) -> None:
        """Refuses what cannot work, shards the tables, and keeps them from DDP."""
        module = self.lightning_module
        assert module is not None
        table = only_table(module)
        refuse_module(trainer, module)
        if self.world_size > 1:
            refuse_on_ranks(trainer)
        use_checkpoint_files(self)
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_precision(self)
        self._shard(table)
        keep_from_ddp(module, table, self.engine)
        transfer = Transfer(self.root_device, self._to_device)
        options = (self.mode, self.batches_in_flight, self.trace)
        self.pipeline = Pipeline(self.engine, module, transfer, self.stop, *options)  # type: ignore[arg-type]
        self._lookahead = None
        super().setup(trainer)
        if self.world_size == 1:
            # For a strategy of several ranks Lightning replaces a shuffling sampler by another, with another order.
            trainer._accelerator_connector.use_distributed_sampler = False
        else:
            # Lightning's own handler begins a broadcast wherever the main thread stands, and its loop waits for another one
            # at every step. Here the signal travels with the agreement on each batch.
            trainer._signal_connector._sigterm_notifier_fn = self._on_sigterm  # type: ignore[assignment, method-assign]
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = self._raise_sigterm  # type: ignore[method-assign]

    def configure_ddp(self) -> None:
        """A single rank has nothing to reduce."""
        if self.world_size > 1:
            super().configure_ddp()
        if self.trace.wanted and isinstance(self.model, DistributedDataParallel):
            self.model.register_comm_hook(TracedReduction(self.trace, lambda: self.pipeline.current.index), reduce_traced)

    def _setup_model(self, model: Module) -> DistributedDataParallel:
        device_ids = self.determine_ddp_device_ids()
        # As in DDPStrategy: DDP must be made outside the default stream of CUDA.
        with torch.cuda.stream(torch.cuda.Stream()) if device_ids is not None else nullcontext():
            return FixedBuckets(model, device_ids=device_ids, **self._ddp_kwargs)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """As in DDPStrategy."""
        super().setup_optimizers(trainer)
        refuse_optimizers(self.optimizers)

    def process_dataloader(self, dataloader: object) -> object:
        """Training runs ahead of the trainer; evaluation must come out even on all ranks."""
        trainer = self._trainer
        host_pg = self.topology.host_pg if self.world_size > 1 else None
        if trainer.training:
            if self._lookahead is not None and not self._lookahead.begun:
                refuse_second_loader()
            self._lookahead = training_loader(dataloader, self.pipeline, trainer, host_pg)
            return self._lookahead
        stage = trainer.state.stage
        return dataloader if host_pg is None else evaluation_loader(dataloader, str(stage and stage.value), host_pg)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Within, as in `Trainer.init_module()`, a table's rows are left to be made when it is sharded, each by its owner."""
        with super().tensor_init_context(empty_init), deferred_rows():
            yield

    # A step.

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """A training batch has been on the device for some steps."""
        if isinstance(batch, InFlight):
            return self.pipeline.take(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass, between fetching its rows and what later batches need."""
        self.pipeline.prepare()
        if self.global_rank > 0:
            self._draw_other_masks()
        with self.trace.span("forward", self.pipeline.current.index, "compute"):
            output = super().training_step(*args, **kwargs)
        self.pipeline.run_ahead()
        return output

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """The backward pass of the weighted loss; rows' gradients go to their owners."""
        current = self.pipeline.current
        with self.trace.span("backward", current.index, "compute"):
            weighted = closure_loss if current.weight == 1.0 else closure_loss * current.weight
            loss = super().backward(weighted, optimizer, *args, **kwargs)
        self.pipeline.send_back()
        return loss

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """The dense step, while groups exchange rows' gradients; then the rows' update, or the next step's."""
        began = 0.0

        def closure_and_exchange() -> Any:
            nonlocal began
            result = closure()
            self.pipeline.exchange()
            began = time.perf_counter()
            return result

        output = super().optimizer_step(optimizer, closure_and_exchange, model, **kwargs)
        self.trace.add("dense step", self.pipeline.current.index, "compute", began)
        self.pipeline.update(self._sparse_lr_scale(), self.sparse_clip_norm)
        return output

    def on_validation_start(self) -> None:
        """Evaluation reads the tables with all updates."""
        self.pipeline.flush()

    # Checkpoints.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Every rank reads its own part of the rows, so the tables must be sharded first."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state: whole on rank 0, or without the rows where every rank writes its own."""
        module = self.lightning_module
        assert module is not None
        if self._table.engine is None:
            return module.state_dict()
        interrupted = self._trainer.state.status == TrainerStatus.INTERRUPTED
        if interrupted and self.world_size > 1 and not self.stop.agreed:
            raise ConfigurationError(
                "no checkpoint is written after an exception on several ranks, as it takes them all: use LastCheckpoint, or "
                "ModelCheckpoint(every_n_train_steps=...), and resume from what it wrote last"
            )
        if interrupted:
            progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
            self.pipeline.break_off(progress.processed)  # type: ignore[attr-defined]
        else:
            self.pipeline.flush()
        form = dense_state if self.checkpoint_form == "distributed" else gathered_state
        return form(module, self.engine)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None) -> None:
        """Writes one file, or a directory by all ranks."""
        module = self.lightning_module
        assert module is not None
        note_delayed(checkpoint, self.pipeline.delayed, self.engine)
        if self.world_size > 1:
            checkpoint[GROUPS_KEY] = {"ranks": self.world_size, "groups": self.topology.groups}
        if self._table.engine is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        elif self.checkpoint_form == "distributed":
            save_directory(checkpoint, Path(filepath), module, self.engine)
        else:
            save_gathered(checkpoint, Path(filepath), self.engine, self.checkpoint_io)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Takes this rank's part of the rows from either form."""
        module = self.lightning_module
        assert module is not None
        load_state(module, self.engine, checkpoint, strict)
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._asked.compare(checkpoint, self.world_size, self.topology.groups)
        self.pipeline.delayed = own_delayed(checkpoint, self.engine) if self.mode == "semi_async" else None

    # The end.

    def on_train_end(self) -> None:
        """Brings the tables up to date, and completes what was begun for batches that will not be trained."""
        self.pipeline.flush()
        self.pipeline.drop()

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks, or says which of them failed first; waits for none of them."""
        super().on_exception(exception)
        if self._board is None or self.stop.agreed:
            return
        step, stage = self._trainer.global_step, self._trainer.state.stage
        self._board.blame(exception, f"{stage.value if stage else 'setup'} at step {step}")

    def teardown(self) -> None:
        """Ends the lanes; a table that lies in this process as a whole is given back."""
        if self._board is not None:
            self._board.close()
        try:
            if hasattr(self, "engine") and self.stop.agreed:
                self.pipeline.drop()  # all ranks leave at this point: what they have begun together ends on all of them
        finally:
            if hasattr(self, "engine"):
                self._leave_engine()
            super().teardown()

    def _leave_engine(self) -> None:
        whole = self.topology.group_size == 1
        # After an exception other ranks may wait for what is under way here; a later fit of these tables comes behind it.
        if whole or self.stop.agreed or self._trainer.state.status != TrainerStatus.INTERRUPTED:
            self.engine.close()
        if whole:
            self._table.engine = None

    @property
    def failed_elsewhere(self) -> str | None:
        """What another rank said when it failed: which, when and why; None if none did."""
        return None if self._board is None else self._board.failed_elsewhere

    def agree_to_stop(self) -> int:
        """The signal that any rank was sent, or 0; all ranks call it at the same point, and wait for each other."""
        if self.world_size > 1:
            self.stop.agree(max(gather_numbers(self.stop.asked, self.topology.host_pg)))
        return self.stop.agreed

    # Within.

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    @property
    def _table(self) -> EmbeddingTable:
        assert self.lightning_module is not None
        return only_table(self.lightning_module)

    def _shard(self, table: EmbeddingTable) -> None:
        if not hasattr(self, "topology"):
            timeout = self._timeout or timedelta(minutes=30)
            whole = self.sharding == "table_wise"
            groups = self._asked.settle(self._trainer, table, whole, self.root_device, self.num_nodes, timeout)
            self.topology = HSPTopology.build(groups, self.root_device.type, timeout)
        if table.engine is None:
            sharding = Sharding.of_kind(self.sharding, table.spans, table.dim, self.topology.group_size, self.root_device.type)
            self.engine = SparseEngine(table, self.topology, sharding, self.exchange, self.trace)
        elif table.engine is not getattr(self, "engine", None):
            raise ConfigurationError(
                "the model's tables have already been divided among the ranks by another trainer: go on with that one, or "
                "make a new model and give it the checkpoint (ckpt_path)"
            )
        self.engine.discard()

    def _to_device(self, host: Any) -> Any:
        return super().batch_to_device(self.precision_plugin.convert_input(host))

    def _draw_other_masks(self) -> None:
        """Seeds this rank by a draw of what is one stream on all ranks: rank 0 drops what one process does, others not."""
        draw = int(torch.randint(2**62, ()))
        torch.manual_seed((draw + self.global_rank * 0x9E3779B97F4A7C15) % 2**63)

    def _sparse_lr_scale(self) -> float:
        if self.sparse_lr == "constant" or not self.optimizers:
            return 1.0
        group = self.optimizers[0].param_groups[0]
        return group["lr"] / group.get("initial_lr", group["lr"])

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        self.stop.ask(signum)
        if self.launcher is not None:
            self.launcher.kill(signal.Signals(signum))

    def _raise_sigterm(self) -> None:
        if self.stop.agreed and not self.stop.taken:
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException


def _check_choice(option: str, value: object, choices: Sequence[object]) -> None:
    if value not in choices:
        raise ConfigurationError(f"TurboGRStrategy: {option} must be one of {', '.join(map(str, choices))}; got {value!r}")


def _close_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
