"""Checkpoints of sharded tables: gathered into one file, or a directory into which every rank writes its part.

Both hold the whole truth in one global row order, and load on any number of ranks and groups, under any sharding, and under
`strategy="auto"`. Lightning's hooks call, on every rank,

    lightning_module_state_dict   gathered_state or dense_state
    save_checkpoint               save_gathered or save_directory
    load_checkpoint               the checkpoint plug-in: turbogr.checkpoints.CheckpointFiles
    load_model_state_dict         load_state, which takes either form

In mode semi_async the last update is in the tables, but the next batch reads them as they were before it: a checkpoint holds
those few rows beside the tables (`note_delayed`, `own_delayed`), and whoever has no use for them may ignore them.

Optimizers of dense parameters, schedulers, loops and callbacks are the same on all ranks and travel as under plain DDP.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import PickleError
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch import LightningModule
from torch import Tensor, distributed
from torch.distributed.checkpoint import CheckpointException

from turbogr.checkpoints import (
    HEADER,
    ROWS_KEY,
    is_directory,
    note_tables,
    put_in_place,
    refuse_other_catalogue,
    remove,
    table_prefix,
    temporary,
    write_through,
)
from turbogr.errors import ConfigurationError
from turbogr.sparse.engine import SparseEngine
from turbogr.sparse.row_files import read_rows, saved_rows, write_rows
from turbogr.sparse.updates import RowValues

DELAYED_KEY = "turbogr_delayed_rows"
"""Key of a checkpoint under which rows stand that the next batch reads as they were before the last update:
{"rows": int64 [n], global; "values": float [n, D]}."""


def dense_state(module: LightningModule, engine: SparseEngine) -> dict[str, Any]:
    """The module's state_dict without rows: what is the same on all ranks."""
    rows = _row_tensors(module, engine)
    return {key: value for key, value in module.state_dict().items() if key not in rows}


def gathered_state(module: LightningModule, engine: SparseEngine) -> dict[str, Any]:
    """The module's state_dict as one process would have it, on rank 0; elsewhere without rows.

    Rows travel inside group 0 only, portion by portion: rank 0 needs room for the whole tables on the CPU, the others for
    nothing, and no device for more than a portion. To be called by all ranks, with no batch in flight.
    """
    state = dense_state(module, engine)
    if engine.topology.group != 0:
        return state
    prefix = table_prefix(module, engine.table)
    state |= {f"{prefix}{key}": tensor for key, tensor in engine.full_state(to_member=0).items()}
    # As module.state_dict() orders them: rank 0's file is the one that one process writes.
    return {key: state[key] for key in module.state_dict() if key in state}


def load_state(module: LightningModule, engine: SparseEngine, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
    """Loads a checkpoint of either form into the module, on every rank its own part of the rows.

    Args:
        module: whose tables the engine keeps.
        engine: the rows' store.
        checkpoint: what `turbogr.checkpoints.read` gave.
        strict: as in `torch.nn.Module.load_state_dict`.

    Raises:
        OtherCatalogueError: on every rank, if the checkpoint belongs to another catalogue; nothing is loaded then.
        ConfigurationError: on every rank, if one of them cannot read its rows; nothing is loaded then.
        RuntimeError: if other keys or shapes are not the module's.
    """
    refuse_other_catalogue(checkpoint, module, engine.table)
    own = engine.sharding.pieces(engine.topology.member)
    state, parts = dict(checkpoint["state_dict"]), _row_tensors(module, engine)
    if ROWS_KEY in checkpoint:
        folder = Path(checkpoint[ROWS_KEY])
        rows: dict[str, Tensor] = {}

        def fetch() -> None:
            saved = saved_rows(folder)
            fitting = {key: part for key, part in parts.items() if key in saved and saved[key][0][1:] == part.shape[1:]}
            rows.update((key, torch.empty_like(part, device="cpu")) for key, part in fitting.items())
            read_rows(folder, rows, own)
            # What does not fit is not read: load_state_dict refuses it by name and shape, as it does with a file.
            count = sum(len(piece.rows) for piece in own)
            others = ((key, shape) for key, (shape, _) in saved.items() if key not in fitting)
            rows.update((key, torch.empty(count, *shape[1:], device="meta")) for key, shape in others)

        _together(fetch, engine, f"the rows in {folder} cannot be read")
        state.update(rows)
    else:
        # A file's tensors are mapped: only the rows of this rank are read.
        for key in parts.keys() & state.keys():
            mapped = [state[key][piece.rows.start : piece.rows.stop] for piece in own]
            state[key] = mapped[0] if len(mapped) == 1 else torch.cat([state[key][:0], *mapped])
    module.load_state_dict(state, strict=strict)


def save_gathered(checkpoint: dict[str, Any], path: Path, engine: SparseEngine, files: CheckpointIO) -> None:
    """Writes a checkpoint whose `state_dict` is `gathered_state`'s into one file; to be called by all ranks.

    Args:
        checkpoint: as Lightning dumped it.
        path: rank 0's counts.
        engine: the rows' store.
        files: the strategy's checkpoint plug-in, which writes on rank 0.

    Raises:
        ConfigurationError: on every rank, if the file cannot be written; an earlier one is then as it was.
    """
    note_tables(checkpoint, engine.table)

    def write() -> None:
        if engine.topology.rank == 0:
            files.save_checkpoint(checkpoint, path)

    _together(write, engine, f"the checkpoint {path} cannot be written")


def save_directory(checkpoint: dict[str, Any], path: Path, module: LightningModule, engine: SparseEngine) -> None:
    """Writes a checkpoint whose `state_dict` is `dense_state`'s as a directory; to be called by all ranks.

    Every row is written once: the groups, whose copies are bit-identical, share the writing. A directory that is there is
    replaced from within: its header, renamed into place last, names the folder of the rows that belong to it.

    Args:
        checkpoint: as Lightning dumped it.
        path: rank 0's counts; on a file system that all ranks see.
        module: whose tables the engine keeps.
        engine: the rows' store.

    Raises:
        ConfigurationError: on every rank, if one of them cannot write; an earlier checkpoint is then as it was.
    """
    topology = engine.topology
    failed = f"the checkpoint {path} cannot be written"
    note_tables(checkpoint, engine.table)
    place = _Place.choose(Path(path))
    chosen: list[Any] = [place]
    distributed.broadcast_object_list(chosen, src=0, group=topology.host_pg)
    place = chosen[0]

    def make_room() -> None:
        if topology.rank == 0:
            place.make()

    def look() -> None:
        if not place.rows.is_dir():
            raise OSError(
                f"rank {topology.rank} does not see {place.rows}: a directory needs a file system that all ranks share; "
                "choose checkpoint: gathered"
            )

    def commit() -> None:
        if topology.rank == 0:
            place.commit(checkpoint)

    try:
        _together(make_room, engine, failed)
        _together(look, engine, failed)
        write_rows(
            place.rows,
            {key: part.detach() for key, part in _row_tensors(module, engine).items()},
            engine.sharding.pieces(topology.member),
            engine.table.num_rows,
            topology.host_pg,
            copy=(topology.group, topology.groups),
        )
        _together(commit, engine, failed)
    except CheckpointException as error:
        place.clear()
        causes = "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in error.failures.items())
        raise ConfigurationError(f"{failed}: {causes}") from error
    except ConfigurationError:
        place.clear()
        raise


def note_delayed(checkpoint: dict[str, Any], delayed: RowValues | None, engine: SparseEngine) -> None:
    """Adds the delayed rows of all members to rank 0's checkpoint; to be called by all ranks.

    Args:
        checkpoint: as Lightning dumped it.
        delayed: this rank's, as `Pipeline.delayed`; None on all ranks or on none.
        engine: the rows' store.
    """
    if delayed is None:
        return
    topology = engine.topology
    rows, values = engine.sharding.rows_at(delayed.rows.cpu(), topology.member), delayed.values.cpu()
    parts: list[Any] = [(rows, values)]
    if topology.world_size > 1:
        parts = [None] * topology.world_size
        mine = (rows, values) if topology.group == 0 else None  # the groups' copies are equal
        distributed.gather_object(mine, parts if topology.rank == 0 else None, group=topology.host_pg, group_dst=0)
    if topology.rank == 0:
        rows, values = (torch.cat(tensors) for tensors in zip(*[part for part in parts if part is not None], strict=True))
        checkpoint[DELAYED_KEY] = {"rows": rows, "values": values}


def own_delayed(checkpoint: Mapping[str, Any], engine: SparseEngine) -> RowValues | None:
    """This rank's part of a checkpoint's delayed rows; None if it has none at all."""
    if DELAYED_KEY not in checkpoint:
        return None
    rows, values = checkpoint[DELAYED_KEY]["rows"], checkpoint[DELAYED_KEY]["values"]
    member, device = engine.topology.member, engine.table.weight.device
    here = engine.sharding.owner(rows) == member
    local, order = engine.sharding.local(rows[here], member).sort()
    return RowValues(local, values[here][order].to(device))


class _Place(NamedTuple):
    """Where a directory is built.

    Attributes:
        path: what it will be called.
        building: what it is called while it is built; `path` itself where that is such a directory already.
        rows: the folder of its rows.
    """

    path: Path
    building: Path
    rows: Path

    @classmethod
    def choose(cls, path: Path) -> _Place:
        """For a checkpoint called `path`."""
        building = path if is_directory(path) else temporary(path)
        return cls(path, building, building / f"rows-{uuid.uuid4().hex[:8]}")

    def make(self) -> None:
        """Makes the folders, and deletes what a killed process left."""
        if self.building != self.path:
            remove(self.building)
        self.rows.mkdir(parents=True)

    def commit(self, checkpoint: Mapping[str, Any]) -> None:
        """Writes the header: from here on the directory is the new checkpoint."""
        header = self.building / HEADER
        write_through({**checkpoint, ROWS_KEY: self.rows.name}, temporary(header))
        temporary(header).replace(header)
        for folder in self.building.glob("rows-*"):
            if folder != self.rows:
                shutil.rmtree(folder, ignore_errors=True)  # the next one to be saved tries again
        if self.building != self.path:
            put_in_place(self.building, self.path)

    def clear(self) -> None:
        """Deletes what a failure left behind; calls no collective."""
        shutil.rmtree(self.rows if self.building == self.path else self.building, ignore_errors=True)


def _row_tensors(module: LightningModule, engine: SparseEngine) -> dict[str, Tensor]:
    """Key in the module's state_dict -> this rank's part of the weight or of a row optimizer's state."""
    prefix = table_prefix(module, engine.table)
    return {f"{prefix}{key}": tensor for key, tensor in engine.local_state().items() if key in engine.sharded_keys}


def _together(act: Callable[[], None], engine: SparseEngine, failed: str) -> None:
    """Acts on every rank and waits for all; where it fails on one, every rank raises, and none is left waiting."""
    problem = None
    try:
        act()
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, TypeError, AttributeError, PickleError) as error:
        problem = f"rank {engine.topology.rank}: {type(error).__name__}: {error}"
    problems: list[str | None] = [None] * engine.topology.world_size
    distributed.all_gather_object(problems, problem, group=engine.topology.host_pg)
    if found := [text for text in problems if text is not None]:
        raise ConfigurationError(f"{failed}: {'; '.join(found)}")
