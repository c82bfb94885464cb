"""A run and what follows it."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401 (so that its log handlers exist before the first test)
import pytest
import torch
import yaml

from tests.cli.support import CHECKOUT, SMALL, Built, child, csv_values, csv_values_of, fails, fit
from turbogr.cli import main


def test_run_folder_and_everything_that_uses_it(prepared, capsys):
    fit(prepared)
    folder = Path("run")
    printed = capsys.readouterr()
    for written in ("config.yaml", "metrics.csv", "report.png", "checkpoints/best.ckpt", "checkpoints/last.ckpt"):
        assert f"run/{written} " in printed.out, "the final table says where everything is"
    assert {p.name for p in folder.iterdir()} >= {"config.yaml", "metrics.csv", "report.png", "checkpoints"}
    assert {p.name for p in (folder / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    checkpoint = torch.load("run/checkpoints/best.ckpt", weights_only=True)
    assert isinstance(checkpoint["turbogr_config"], str)
    stored = yaml.safe_load(checkpoint["turbogr_config"])
    assert stored == yaml.safe_load((folder / "config.yaml").read_text())
    assert stored["seed_everything"] == 42
    assert stored["model"]["backbone"]["init_args"]["dim"] == 16
    metrics = (folder / "metrics.csv").read_bytes()
    config = (folder / "config.yaml").read_bytes()
    assert "epoch 2/2" in printed.err, "progress is visible without a terminal"

    # the configuration that was written is one that the other commands take, and they leave the run's files alone
    for command in ("validate", "test", "predict"):
        main([command, "-c", "run/config.yaml"])
        assert "run/checkpoints/best.ckpt" in capsys.readouterr().err
    assert (folder / "test.json").is_file()
    assert (folder / "predictions.parquet").is_file()
    assert (folder / "metrics.csv").read_bytes() == metrics
    assert (folder / "config.yaml").read_bytes() == config

    # another model
    with pytest.raises(SystemExit) as stopped:
        main(["test", "-c", "run/config.yaml", "--model.backbone.dim=32"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 1
    assert "model.backbone.init_args.dim was 16 and is 32" in line

    # a second run into the same folder
    best = (folder / "checkpoints" / "best.ckpt").read_bytes()
    code, line = fails(["fit", "-c", "run/config.yaml"], capsys)
    assert code == 1
    assert all(way in line for way in ("--overwrite", "--ckpt_path last", "--trainer.default_root_dir"))
    assert (folder / "checkpoints" / "best.ckpt").read_bytes() == best
    (folder / "mine.txt").write_text("kept")
    fit(prepared, "--overwrite")
    assert (folder / "mine.txt").is_file()
    assert not (folder / "test.json").exists(), "results of the replaced run are gone with it"
    # equal seeds give equal results
    assert csv_values(folder / "metrics.csv") == csv_values_of(metrics)

    # going on
    capsys.readouterr()
    main(["fit", "-c", "run/config.yaml", "--ckpt_path=last", "--trainer.max_epochs=3"])
    assert "resuming from run/checkpoints/last.ckpt" in capsys.readouterr().err


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_earlier_run_is_kept_until_the_new_one_has_begun(prepared, capsys):
    fit(prepared)
    before = contents(Path("run"))
    assert "checkpoints/best.ckpt" in before
    for wrong in ("--trainer.max_epochs=0", "--trainer.fast_dev_run=1", "--model.seed=-1"):
        with contextlib.suppress(SystemExit):
            fit(prepared, "--overwrite", wrong)
        assert contents(Path("run")) == before, wrong
    # In a child: two devices start a second process.
    options = [f"--data.path={prepared}", "--trainer.default_root_dir=run", *SMALL, "--overwrite", "--trainer.devices=2"]
    assert child([sys.executable, "-m", "turbogr", "fit", *options], start_new_session=True).returncode == 1
    assert contents(Path("run")) == before
    # there is nothing to replace a run with that is to be gone on with
    capsys.readouterr()
    with pytest.raises(SystemExit):
        fit(prepared, "--overwrite", "--ckpt_path=last", "--trainer.max_epochs=3")
    assert "--overwrite would delete the run that --ckpt_path" in capsys.readouterr().err
    assert contents(Path("run")) == before
    # negative control
    fit(prepared, "--overwrite", "--trainer.max_steps=1")
    after = contents(Path("run"))
    assert after["config.yaml"] != before["config.yaml"]
    assert torch.load("run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 1


def test_other_model_cannot_be_resumed(prepared, capsys):
    fit(prepared)
    before = contents(Path("run"))
    resume = ["--ckpt_path=last", "--trainer.max_epochs=3"]
    for option, message in (
        ("--model.optimizer.lr=0.5", "model.optimizer.init_args.lr was 0.001 and is 0.5"),
        ("--model.embeddings.optimizer.lr=0.5", "model.embeddings.init_args.optimizer.init_args.lr was 0.001 and is 0.5"),
        ("--model.backbone.dim=32", "model.backbone.init_args.dim was 16 and is 32"),
        ("--model.seed=3", "model.seed was None and is 3"),
    ):
        with pytest.raises(SystemExit) as stopped:
            fit(prepared, *resume, option)
        assert stopped.value.code == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"cannot be resumed: {message}. " in line
        assert contents(Path("run")) == before
    fit(prepared, *resume, "--model.top_k=[1,5,10]", "--model.predict_k=3")
    assert torch.load("run/checkpoints/last.ckpt", weights_only=True)["epoch"] == 2
    with pytest.raises(SystemExit):
        main(["fit", "--help"])
    assert "data.* and model.* must be as they were" in " ".join(capsys.readouterr().out.split())


def test_stop_within_an_epoch_is_resumed(prepared):
    fit(prepared, "--trainer.max_steps=6")  # of 4 steps an epoch
    assert torch.load("run/checkpoints/last.ckpt", weights_only=True)["global_step"] == 6
    fit(prepared, "--ckpt_path=last", "--trainer.max_epochs=3")
    fit(prepared, "--trainer.default_root_dir=whole", "--trainer.max_epochs=3")
    one, other = (torch.load(f"{folder}/checkpoints/last.ckpt", weights_only=True) for folder in ("run", "whole"))
    assert one["global_step"] == other["global_step"] == 12
    assert all(torch.equal(tensor, one["state_dict"][name]) for name, tensor in other["state_dict"].items())


def test_fewer_steps_than_are_logged(prepared, capsys):
    fit(prepared, "--trainer.max_steps=3")
    assert "run/checkpoints/last.ckpt" in capsys.readouterr().out


def test_first_lines_say_what_is_trained(prepared, capsys):
    main(["fit", f"--data.path={prepared}", "--trainer.max_steps=1", *SMALL[:-1]])
    err = capsys.readouterr().err
    assert "item table of 40 rows x 16, 2.6 kB and 5.1 kB of its LazyAdam" in err
    assert err.count("HSTU: ") == 1
    data = Built("fit", [f"--data.path={prepared}", *SMALL, "--trainer.default_root_dir=other"]).datamodule
    tokens = sum(batch.num_tokens for batch in data.train_dataloader())
    assert f"data: 60 users, 40 items, {tokens} training tokens an epoch" in err
    assert "Non-trainable" not in err


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_terminal_keeps_the_final_table(prepared):
    import pty

    options = [f"--data.path={prepared}", "--trainer.default_root_dir=run", "--trainer.max_epochs=2", *SMALL]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "COLUMNS": "120", "TERM": "xterm"}
    outer, inner = pty.openpty()
    command = [sys.executable, "-m", "turbogr", "fit", *options]
    with subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=environment) as process:
        os.close(inner)
        chunks = []
        # Linux reports the other end's closing as an error.
        with contextlib.suppress(OSError):
            while chunk := os.read(outer, 65536):
                chunks.append(chunk)
    os.close(outer)
    screen = b"".join(chunks).decode()
    assert process.returncode == 0, screen
    table = screen[screen.index("Training finished") :]
    assert "run/checkpoints/last.ckpt" in table
    assert "Epoch 2/2" in screen, "there was a bar, and it counts from 1"
    assert not any(control in table for control in ("Epoch", "\x1b[2K", "\x1b[1A")), "and it is gone before the table comes"


@pytest.mark.parametrize("command", ["test", "validate", "predict"])
def test_no_checkpoint(command, prepared, capsys):
    code, line = fails([command, f"--data.path={prepared}", *SMALL], capsys)
    assert code == 1
    assert "there is no checkpoint runs/" in line
    assert "best.ckpt" in line


def test_damaged_checkpoint(prepared, capsys):
    Path("damaged.ckpt").write_bytes(b"not a checkpoint")
    code, line = fails(["test", f"--data.path={prepared}", *SMALL, "--ckpt_path=damaged.ckpt"], capsys)
    assert code == 1
    assert "damaged.ckpt cannot be read as a checkpoint" in line
