"""Saves and loads checkpoints on several ranks; what each rank finds is judged by test_checkpoint.py.

Arguments: "four" or "two", the folder that the launches share.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from tests.distributed.checkpoint_cases import Small, build, fill, spoil, wrong
from tests.distributed.launch import report_checks
from turbogr.checkpoints import ROWS_KEY, CheckpointFiles
from turbogr.errors import ConfigurationError
from turbogr.sparse import row_files
from turbogr.sparse.engine import SparseEngine
from turbogr.sparse.sharding import Piece
from turbogr.sparse.topology import HSPTopology
from turbogr.strategies import checkpoint as sharded

FILES = CheckpointFiles()
REST = {"epoch": 3, "optimizer_states": [{"state": {0: {"exp_avg": torch.arange(6.0)}}}], "turbogr_config": "seed: 1\n"}
KINDS = ("row_wise", "table_wise")


def save(module: Small, engine: SparseEngine, path: Path, directory: bool, **rest: Any) -> None:
    """As a strategy does."""
    state = sharded.dense_state(module, engine) if directory else sharded.gathered_state(module, engine)
    content = {**REST, **rest, "state_dict": state}
    if directory:
        sharded.save_directory(content, path, module, engine)
    else:
        sharded.save_gathered(content, path, engine, FILES)
    dist.barrier()


def load(module: Small, engine: SparseEngine, path: Path) -> dict[str, Any]:
    """As Lightning and a strategy do."""
    content = FILES.load_checkpoint(path, weights_only=True)
    module.on_load_checkpoint(content)
    sharded.load_state(module, engine, content)
    return content


class Ranks:
    """Ranks in one or several layouts.

    Args:
        folder: shared by all launches.
        groups: numbers of groups.
    """

    def __init__(self, folder: Path, groups: tuple[int, ...]) -> None:
        self.folder = folder
        self.topologies = {count: HSPTopology.build(count) for count in groups}
        self.built = {(count, kind): build(t, kind) for count, t in self.topologies.items() for kind in KINDS}

    def load(self) -> dict[str, dict[str, list[str]]]:
        """File or directory -> layout -> names of tensors that are not what was saved."""
        found: dict[str, dict[str, list[str]]] = {}
        for path in sorted(self.folder.glob("*.ckpt")):
            found[path.name] = {}
            for (count, kind), (module, engine) in self.built.items():
                spoil(module)
                content = load(module, engine, path)
                assert torch.equal(content["optimizer_states"][0]["state"][0]["exp_avg"], torch.arange(6.0))
                assert content["turbogr_config"] == "seed: 1\n"
                found[path.name][f"{count} {kind}"] = wrong(module, engine)
        return found


def refusal(act: Callable[[], Any]) -> str:
    """The message of the refusal; empty where there is none."""
    try:
        act()
    except (ConfigurationError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Four(Ranks):
    """2 groups of 2 save; 2 x 2, 4 x 1 and 1 x 4 load."""

    def save(self) -> dict[str, Any]:
        """Both forms, from both shardings."""
        row_files.CHUNK_BYTES = 5 * 16  # several portions a piece
        for kind in KINDS:
            module, engine = self.built[2, kind]
            fill(module, engine)
            for directory in (True, False):
                save(module, engine, self.folder / f"{kind}-{'directory' if directory else 'file'}.ckpt", directory)
        state = sharded.gathered_state(module, engine)
        return {"rows": [key for key in state if key.startswith("embeddings.") and state[key].dim()]}

    def disorder(self) -> dict[str, Any]:
        """Two members save users as each other's; or one leaves its users out."""
        module, engine = self.built[2, "row_wise"]
        right = engine.sharding.pieces

        def exchanged(member: int) -> list[Piece]:
            *others, users = right(member)
            return [*others, Piece(member, right(1 - member)[-1].rows, users.first)]

        found: dict[str, Any] = {}
        for form in ("directory", "file"):
            fill(module, engine)
            engine.sharding.pieces = exchanged  # type: ignore[method-assign]
            save(module, engine, self.folder / "disorder" / form, form == "directory")
            engine.sharding.pieces = right  # type: ignore[method-assign]
            load(module, engine, self.folder / "disorder" / form)
            found[form] = wrong(module, engine)
        engine.sharding.pieces = lambda member: right(member)[:-1]  # type: ignore[method-assign]
        found["left out"] = refusal(lambda: save(module, engine, self.folder / "disorder" / "short", True))
        engine.sharding.pieces = right  # type: ignore[method-assign]
        return found

    def other_catalogue(self) -> dict[str, list[str]]:
        """Refused with the table and the numbers, and nothing loaded."""
        found = {}
        others = {
            "rows": {"tables": {"items": 60, "tags": 3, "users": 10}},
            "missing": {"tables": {"items": 61, "users": 10}},
            "extra": {"tables": {"items": 61, "tags": 3, "users": 10, "shops": 4}},
            "order": {"tables": {"items": 61, "users": 10, "tags": 3}},
            "width": {"dim": 8},
            "optimizer": {"optimizer": "adagrad"},
            "state": {"optimizer": "row_wise_adagrad"},
        }
        for name, options in others.items():
            module, engine = build(self.topologies[2], **options)
            spoil(module)
            for form in ("file", "directory"):
                said = refusal(lambda m=module, e=engine, f=form: load(m, e, self.folder / f"row_wise-{f}.ckpt"))
                untouched = bool((module.embeddings.weight == -1).all()) and bool((module.dense.weight == -1).all())
                found[f"{name} {form}"] = [said, str(untouched)]
        return found

    def failures(self) -> dict[str, Any]:
        """A rank that cannot write: all ranks hear of it, and the checkpoint before is as it was."""
        module, engine = self.built[2, "row_wise"]
        found: dict[str, Any] = {}
        for form, rank in (("directory", 0), ("directory", 3), ("file", 0)):
            path = self.folder / "failing" / f"{form}.ckpt"
            fill(module, engine)
            save(module, engine, path, form == "directory")
            spoil(module)
            real = torch.save
            if dist.get_rank() == rank:
                torch.save = _disk_full
            said = refusal(lambda p=path, f=form: save(module, engine, p, f == "directory"))
            torch.save = real
            load(module, engine, path)
            found[f"{form} {rank}"] = [said, wrong(module, engine), sorted(p.name for p in path.parent.iterdir())]
        return found

    def damaged(self) -> dict[str, Any]:
        """Rows that rank 3 alone reads damaged: all ranks hear of it, and nothing is loaded."""
        module, engine = self.built[2, "row_wise"]
        path, found = self.folder / "damaged" / "directory.ckpt", {}
        for name in ("rows", "contents"):
            fill(module, engine)
            save(module, engine, path, True)
            spoil(module)
            content = FILES.load_checkpoint(path, weights_only=True)
            if dist.get_rank() == 3:
                rows = Path(shutil.copytree(content[ROWS_KEY], self.folder / f"damaged-{name}"))
                for file in rows.glob("*.distcp") if name == "rows" else [rows / ".metadata"]:
                    file.write_bytes(file.read_bytes()[:100])
                content[ROWS_KEY] = str(rows)
            said = refusal(lambda c=content: sharded.load_state(module, engine, c))
            found[name] = [said, str(bool((module.embeddings.weight == -1).all()))]
        return found

    def replaced(self) -> dict[str, Any]:
        """Each form over each, and twice: what was saved last is loaded, and nothing else is left."""
        module, engine = self.built[2, "row_wise"]
        path, found = self.folder / "replaced" / "last.ckpt", {}
        for number, directory in enumerate((True, True, False, False, True)):
            fill(module, engine)
            save(module, engine, path, directory, epoch=number)
            spoil(module)
            content = load(module, engine, path)
            rows = len(list(path.glob("rows-*"))) if directory else 0
            found[str(number)] = [content["epoch"], wrong(module, engine), [p.name for p in path.parent.iterdir()], rows]
            dist.barrier()
        return found


class Two(Ranks):
    """2 x 1 and 1 x 2 load what four ranks saved; at last a rank is killed while it saves."""

    def outlives(self) -> None:
        """What must outlive the kill."""
        module, engine = self.built[1, "row_wise"]
        fill(module, engine)
        save(module, engine, self.folder / "killed" / "directory.ckpt", True)

    def killed(self) -> None:
        """Rank 1 ends while it writes its rows."""
        module, engine = self.built[1, "row_wise"]
        spoil(module)
        if dist.get_rank() == 1:
            torch.save = _killed
        save(module, engine, self.folder / "killed" / "directory.ckpt", True)


def _disk_full(content: Any, file: Any, *args: Any, **options: Any) -> None:
    file.write(b"the first part")
    raise OSError(28, "No space left on device")


def _killed(content: Any, file: Any, *args: Any, **options: Any) -> None:
    file.write(b"the first part")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def main(which: str, folder: Path) -> None:
    """Opens the process group, as topologies need one."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    if which == "four":
        four = Four(folder, (2, 4, 1))
        four_checks = (four.save, four.load, four.disorder, four.other_catalogue, four.failures, four.damaged, four.replaced)
        checks = {f.__name__: f for f in four_checks}
    else:
        two = Two(folder, (2, 1))
        checks = {f.__name__: f for f in (two.load, two.outlives, two.killed)}
    report_checks(checks, backend="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
