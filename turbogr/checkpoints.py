"""Checkpoints on disk in both forms, a file or a directory; what every strategy writes and reads.

A file is what Lightning writes, and `torch.load(weights_only=True)` reads it. A directory holds the same dictionary in
`checkpoint.pt` without the tables' rows, and those, in pieces that many ranks wrote, in the folder that it names
(`turbogr.sparse.row_files`). Both are written under a temporary name and renamed at the end: a process that is killed while it
saves leaves the checkpoint that was there before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from turbogr.errors import ConfigurationError
from turbogr.sparse.row_files import read_all_rows
from turbogr.sparse.table import EmbeddingTable

HEADER = "checkpoint.pt"
"""File of a directory that holds all but the rows, and that makes it a checkpoint: it is renamed into place last."""
TABLES_KEY = "turbogr_tables"
"""Key of a checkpoint under which the sizes of its tables stand: {"rows": {table: rows}, "width": D}."""
ROWS_KEY = "turbogr_rows"
"""Key of a directory's header under which the folder of its rows stands: its name on disk, its path once read."""


class OtherCatalogueError(ConfigurationError):
    """A checkpoint whose tables are not the model's."""


def is_directory(path: str | Path) -> bool:
    """Whether `path` is a checkpoint in the form of a directory."""
    return (Path(path) / HEADER).is_file()


def read(path: str | Path, weights_only: bool | None = True) -> dict[str, Any]:
    """Reads a checkpoint of either form; a directory's rows stay on disk, under ROWS_KEY stands where.

    Tensors of a file are mapped, not read: a rank that needs a part of a table touches that part alone.

    Args:
        path: file or directory.
        weights_only: as in `torch.load`.
    """
    path = Path(path)
    directory = is_directory(path)
    content = torch.load(path / HEADER if directory else path, map_location="cpu", weights_only=weights_only, mmap=True)
    if directory and isinstance(content, dict) and ROWS_KEY in content:
        content[ROWS_KEY] = str(path / content[ROWS_KEY])
    return content


def write_file(content: Mapping[str, Any], path: Path) -> None:
    """Writes a checkpoint's file: complete, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary(path)
    remove(partial)
    try:
        write_through(content, partial)
    except (OSError, RuntimeError):
        remove(partial)
        raise
    put_in_place(partial, path)


def write_through(content: Mapping[str, Any], path: Path) -> None:
    """Writes a file whose content is on the disk, not only on its way there, when this returns."""
    with path.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def temporary(path: Path) -> Path:
    """Where a checkpoint is written before it takes its name."""
    return path.with_name(f".{path.name}.partial")


def put_in_place(made: Path, path: Path) -> None:
    """Gives a finished checkpoint its name, in place of one that had it."""
    if not path.is_dir() and not made.is_dir():
        made.replace(path)  # in one step
        return
    # A directory cannot take the name of anything else in one step: between these two, the earlier one has this other name.
    earlier = path.with_name(f"{path.stem}-earlier{path.suffix}")
    if path.exists():
        remove(earlier)
        path.replace(earlier)
    made.replace(path)
    remove(earlier)


def remove(path: Path) -> None:
    """Deletes a file or a directory if it is there; no half of a directory keeps a checkpoint's name."""
    if path.is_dir() and not path.is_symlink():
        doomed = path.with_name(f".{path.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        path.replace(doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink(missing_ok=True)


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's checkpoint plug-in for one process and for files that rank 0 writes; reads and deletes directories too.

    `use_checkpoint_files` puts it into a strategy. Rows of a directory are read by `before_load`, or by the strategy that
    shards them.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes a file, complete or not at all."""
        if storage_options is None and _is_local_file_protocol(path):
            write_file(checkpoint, Path(path))
        else:
            super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Reads either form, a directory without its rows."""
        if _is_local_file_protocol(path) and Path(path).exists():
            content = read(path, weights_only)
            # An optimizer keeps the tensors that it is given: they must not lie in a file.
            return {k: v if k == "state_dict" else apply_to_collection(v, Tensor, Tensor.clone) for k, v in content.items()}
        return super().load_checkpoint(path, map_location, weights_only)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Deletes either form."""
        if _is_local_file_protocol(path):
            remove(Path(path))
        else:
            super().remove_checkpoint(path)


def use_checkpoint_files(strategy: Strategy) -> None:
    """Lets a strategy write files safely and read directories, unless it has a checkpoint plug-in that someone chose."""
    if type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = CheckpointFiles()


def table_prefix(module: nn.Module, table: EmbeddingTable) -> str:
    """What the keys of the table's tensors begin with in the module's state_dict.

    Raises:
        ValueError: if the table is no part of the module.
    """
    for name, part in module.named_modules():
        if part is table:
            return f"{name}." if name else ""
    raise ValueError(f"the table is no part of {type(module).__name__}")


def note_tables(checkpoint: dict[str, Any], table: EmbeddingTable) -> None:
    """Notes in a checkpoint which tables it holds."""
    checkpoint[TABLES_KEY] = {"rows": {name: len(span) for name, span in table.spans.items()}, "width": table.dim}


def before_load(checkpoint: dict[str, Any], module: LightningModule, table: EmbeddingTable) -> None:
    """To be called from a module's `on_load_checkpoint`: refuses another catalogue, and brings a directory's rows.

    Args:
        checkpoint: as Lightning hands it to `on_load_checkpoint`.
        module: to be loaded.
        table: its table. Rows that an engine keeps are left to the engine's strategy.

    Raises:
        OtherCatalogueError: if the checkpoint belongs to another catalogue; nothing is loaded then.
        ConfigurationError: if a directory's rows cannot be read.
    """
    refuse_other_catalogue(checkpoint, module, table)
    if table.engine is None and ROWS_KEY in checkpoint:
        folder = Path(checkpoint[ROWS_KEY])
        try:
            rows = read_all_rows(folder)
        except OSError as error:
            raise ConfigurationError(f"the rows in {folder} cannot be read: {error}; take another checkpoint") from error
        checkpoint["state_dict"] = {**checkpoint["state_dict"], **rows}


def refuse_other_catalogue(checkpoint: Mapping[str, Any], module: LightningModule, table: EmbeddingTable) -> None:
    """Raises OtherCatalogueError if a checkpoint's tables are not this table's; the message names table and numbers."""
    differences = _differences(checkpoint, module, table)
    if differences:
        trainer = module._trainer
        path = getattr(trainer, "ckpt_path", None) or "the checkpoint"
        raise OtherCatalogueError(
            f"{path} belongs to another catalogue: {'; '.join(differences)}. Nothing was loaded. Give the "
            "data (data.path) and the model that it was trained with, or start a new run"
        )


def _differences(checkpoint: Mapping[str, Any], module: LightningModule, table: EmbeddingTable) -> list[str]:
    saved = checkpoint.get(TABLES_KEY)
    if saved is None:  # written before tables were noted: the weight alone can tell
        weight = checkpoint.get("state_dict", {}).get(f"{table_prefix(module, table)}weight")
        shape = (table.num_rows, table.dim)
        if weight is None or tuple(weight.shape) == shape:
            return []
        return [
            f"its tables have {weight.shape[0]} rows of width {weight.shape[1]}, the model's {shape[0]} of width {shape[1]}"
        ]
    own = {name: len(span) for name, span in table.spans.items()}
    rows: dict[str, int] = saved["rows"]
    found = [
        f"its table {name!r} has {n} rows, the model's has {own[name]}" for name, n in rows.items() if own.get(name, n) != n
    ]
    found += [f"it has a table {name!r} of {n} rows, which the model has not" for name, n in rows.items() if name not in own]
    found += [f"the model has a table {name!r} of {n} rows, which it has not" for name, n in own.items() if name not in rows]
    if not found and list(rows) != list(own):
        found.append(f"its tables come in the order {', '.join(rows)}, the model's in the order {', '.join(own)}")
    if saved["width"] != table.dim:
        found.append(f"its rows have width {saved['width']}, the model's have width {table.dim}")
    return found
