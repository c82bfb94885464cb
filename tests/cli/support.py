"""What the tests of the command line share."""

import csv
import os
import subprocess
from pathlib import Path

import lightning.pytorch  # noqa: F401 (so that its log handlers exist before the first test)
import pytest
import yaml

from turbogr.cli import main
from turbogr.trainer_cli import TurboGRCLI

CHECKOUT = Path(__file__).resolve().parents[2]
SMALL = [
    "--data.num_negatives=8",
    "--data.batch_size=16",
    "--data.max_length=20",
    "--data.num_workers=0",
    "--model.top_k=[1,10]",
    "--model.backbone.dim=16",
    "--model.backbone.num_blocks=1",
    "--trainer.accelerator=cpu",
    "--trainer.enable_model_summary=false",
]


def fails(args: list[str], capsys) -> tuple[int, str]:
    """Exit code and the one line of a command line that does not work."""
    with pytest.raises(SystemExit) as stopped:
        main([str(arg) for arg in args])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip() and not line.startswith("Seed set to")]
    assert len(lines) == 1, lines
    return stopped.value.code, lines[0]


def printed(args: list[str], capsys) -> dict:
    with pytest.raises(SystemExit) as stopped:
        main([*args, "--print_config"])
    assert not stopped.value.code
    return yaml.safe_load(capsys.readouterr().out)


def child(args: list[str], *, first: Path | None = None, **options) -> subprocess.CompletedProcess[str]:
    path = [str(p) for p in (first, CHECKOUT) if p is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    environment.pop("PL_GLOBAL_SEED", None)
    return subprocess.run(args, capture_output=True, text=True, env=environment, check=False, **options)


def fit(prepared: Path, *args: str) -> None:
    main(["fit", f"--data.path={prepared}", "--trainer.default_root_dir=run", "--trainer.max_epochs=2", *SMALL, *args])


class Built(TurboGRCLI):
    """Builds everything and runs nothing."""

    def _run_subcommand(self, subcommand):
        pass


def csv_values(path: Path) -> list[dict[str, float]]:
    return csv_values_of(path.read_bytes())


def csv_values_of(content: bytes) -> list[dict[str, float]]:
    rows = csv.DictReader(content.decode().splitlines())
    return [{k: float(v) for k, v in row.items() if v and k != "train/tokens_per_second"} for row in rows]
