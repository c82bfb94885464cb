"""`turbogr fit` on two ranks, started by torchrun and by Lightning; options of the strategy in YAML."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.support import SMALL, Built, fails
from tests.data.make import write_prepared
from tests.distributed.launch import CHECKOUT, launch
from tests.distributed.strategy_cases import relative
from turbogr.cli_checks import settle_devices
from turbogr.errors import ConfigurationError
from turbogr.strategies import TurboGRStrategy

STRATEGY = "trainer: {strategy: {class_path: turbogr.strategies.TurboGRStrategy, init_args: {groups: 2, sparse_lr: follow}}}"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared") / "p", num_users=60, num_items=40, min_len=5)


def arguments(prepared: Path, run: Path, *more: str) -> list[str]:
    options = [f"--data.path={prepared}", f"--trainer.default_root_dir={run}", "--trainer.max_epochs=2", *SMALL]
    return ["fit", *options, "--data.batch_size=8", "--model.backbone.dropout=0", *more]


def build(*args: str) -> Built:
    return Built("fit", list(args))


def test_the_strategy_in_yaml(prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("strategy.yaml").write_text(STRATEGY)
    args = arguments(prepared, tmp_path / "run")[1:]
    strategy = build(*args, "-c", "strategy.yaml").trainer.strategy
    assert isinstance(strategy, TurboGRStrategy)
    assert (strategy.groups, strategy.sparse_lr) == (2, "follow")
    Path("later.yaml").write_text("trainer: {strategy: {init_args: {groups: auto}}}")
    strategy = build(*args, "-c", "strategy.yaml", "-c", "later.yaml").trainer.strategy
    assert (strategy.groups, strategy.sparse_lr) == ("auto", "follow")
    assert isinstance(build(*args, "--trainer.strategy=turbogr").trainer.strategy, TurboGRStrategy)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--trainer.strategy.group=2", "group"),
        ("--trainer.strategy.groups=two", "groups"),
        ("--trainer.strategy.mode=fast", "mode"),
        ("--trainer.strategy.groups=0", "groups must be 1 or more"),
    ],
)
def test_wrong_options_are_refused_by_name(prepared, tmp_path, monkeypatch, capsys, option, said):
    monkeypatch.chdir(tmp_path)
    args = arguments(prepared, tmp_path / "run", "--trainer.strategy=turbogr.strategies.TurboGRStrategy", option)
    _, line = fails(args, capsys)
    assert said in line


class Section(dict):
    """As a part of a configuration."""


def test_torchrun_says_how_many_ranks_there_are():
    environment = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}
    for asked in (1, "auto", 4):
        trainer = Section(devices=asked, num_nodes=1)
        settle_devices(trainer, environment)
        assert trainer == {"devices": 4, "num_nodes": 2}
    with pytest.raises(ConfigurationError, match="devices is 3, but torchrun started 4 processes on each of 2 nodes"):
        settle_devices(Section(devices=3, num_nodes=1), environment)
    trainer = Section(devices=3, num_nodes=1)
    settle_devices(trainer, {})
    assert trainer == {"devices": 3, "num_nodes": 1}


def popen(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PL_GLOBAL_SEED"}
    environment |= {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=120, check=False)


@pytest.mark.slow
def test_torchrun_and_lightning_start_the_same_training(prepared, tmp_path):
    """One process trains as much as two, and the default callbacks write one run's files."""
    options = ("--trainer.strategy=turbogr", "--trainer.devices=2")
    for name in ("torchrun", "popen", "one"):
        (tmp_path / name).mkdir()
    started = launch(
        ["-m", "turbogr", *arguments(prepared, tmp_path / "torchrun" / "run", options[0])], 2, tmp_path / "logs", timeout=120
    )
    assert started.outputs[1].count("best validation") == 0  # rank 0 speaks for all
    by_lightning = popen(["-m", "turbogr", *arguments(prepared, tmp_path / "popen" / "run", *options)], tmp_path / "popen")
    assert by_lightning.returncode == 0, by_lightning.stderr
    assert by_lightning.stdout.count("best validation") == 1
    alone = (options[0], "--data.batch_size=16")
    one = popen(["-m", "turbogr", *arguments(prepared, tmp_path / "one" / "run", *alone)], tmp_path / "one")
    assert one.returncode == 0, one.stderr
    last = {name: tmp_path / name / "run" / "checkpoints" / "last.ckpt" for name in ("torchrun", "popen", "one")}
    assert max(relative(last["torchrun"], last["popen"]).values()) == 0.0
    assert max(relative(last["torchrun"], last["one"]).values()) <= 1e-5
    files = {path.name for path in (tmp_path / "torchrun" / "run").iterdir()}
    assert {"config.yaml", "metrics.csv", "report.png", "checkpoints"} <= files


SCRIPT = """
import sys
from pathlib import Path
import lightning.pytorch as pl
from tests.distributed.strategy_cases import QUIET, build
from turbogr.strategies import TurboGRStrategy

model, data = build(Path(sys.argv[1]), 4)
options = {"max_epochs": 1, "limit_val_batches": 0, "enable_checkpointing": False}
trainer = pl.Trainer(**QUIET, **options, devices=4, strategy=TurboGRStrategy(groups=2))
trainer.fit(model, data)
trainer.save_checkpoint(sys.argv[2])
"""


@pytest.mark.slow
def test_a_trainer_starts_its_ranks(prepared, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    finished = popen(["script.py", str(prepared), "end.ckpt"], tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert torch.load(tmp_path / "end.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.slow
def test_ctrl_c_on_ranks_that_lightning_started(prepared, tmp_path):
    """The whole group of processes gets the signal, as from a terminal; one checkpoint, one command to go on."""
    callback = "trainer: {callbacks+: [{class_path: tests.interrupting.SignalAt, init_args: {step: 1, name: SIGINT}}]}"
    (tmp_path / "signal.yaml").write_text(callback)
    args = arguments(prepared, tmp_path / "run", "-c", "signal.yaml", "--trainer.strategy=turbogr", "--trainer.devices=2")
    finished = popen(["-m", "turbogr", *args], tmp_path)
    assert finished.returncode == 130, finished.stderr
    assert finished.stderr.count("to resume:") == 1
    assert torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] in (2, 3, 4)


@pytest.mark.slow
def test_plain_ddp_is_refused_and_the_strategy_named(prepared, tmp_path):
    args = arguments(prepared, tmp_path / "run", "--trainer.strategy=ddp", "--trainer.devices=2")
    finished = popen(["-m", "turbogr", *args], tmp_path)
    assert finished.returncode == 1
    assert "train with trainer.strategy turbogr (TurboGRStrategy), or on one device" in finished.stderr
