"""Ctrl-C, SIGTERM and resume."""

import shlex
import subprocess
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401 (so that its log handlers exist before the first test)
import pytest
import torch

from tests.cli.support import SMALL, child, csv_values
from turbogr.cli_arguments import resume_command

# Ctrl-C. 48 or more users in batches of 16: 4 steps an epoch.


def interrupted_fit(prepared: Path, folder: str, step: int, *args: str) -> subprocess.CompletedProcess[str]:
    callback = f"trainer: {{callbacks+: [{{class_path: tests.interrupting.SignalAt, init_args: {{step: {step}}}}}]}}"
    Path("signal.yaml").write_text(callback)
    options = [f"--data.path={prepared}", f"--trainer.default_root_dir={folder}", "--trainer.max_epochs=3", *SMALL, *args]
    command = [sys.executable, "-m", "turbogr", "fit", "-c", "signal.yaml", *options]
    return child(command, start_new_session=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "args", "stops_at"),
    [
        (1, (), 2),  # within the first epoch
        (5, ("--trainer.callbacks.group=true", "--data.num_workers=1"), 6),  # second epoch; workers get the signal as well
        (3, (), 4),  # the epoch's last step: stops behind the validation that follows
        (2, ("--trainer.accumulate_grad_batches=2",), 3),  # gradients are pending: stops behind the step
        (2, ("--trainer.val_check_interval=3",), 3),  # validation within an epoch: stops behind it
        (4, ("--trainer.limit_val_batches=0", "--checkpoint.monitor=null"), 5),
    ],
    ids=["first-epoch", "worker", "epoch-end", "accumulation", "validation-within", "no-validation"],
)
def test_resumed_run_equals_an_uninterrupted_one(prepared, step, args, stops_at):
    whole = interrupted_fit(prepared, "whole", 10_000, *args)
    assert whole.returncode == 0, whole.stderr

    stopped = interrupted_fit(prepared, "parts", step, *args)
    assert stopped.returncode == 130, stopped.stderr
    assert "Traceback" not in stopped.stderr
    saved = torch.load("parts/checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == stops_at
    command = stopped.stderr.splitlines()[-1].strip()
    assert command.endswith("--ckpt_path parts/checkpoints/last.ckpt")
    resumed = child(shlex.split(command))
    assert resumed.returncode == 0, resumed.stderr

    ends = [torch.load(f"{folder}/checkpoints/last.ckpt", weights_only=True) for folder in ("whole", "parts")]
    assert ends[0]["global_step"] == ends[1]["global_step"] > saved["global_step"]
    assert ends[0]["epoch"] == ends[1]["epoch"]
    for name, tensor in ends[0]["state_dict"].items():
        assert torch.equal(tensor, ends[1]["state_dict"][name]), name
        # negative control: the run went on changing after it was taken up
    assert any(not torch.equal(tensor, saved["state_dict"][name]) for name, tensor in ends[0]["state_dict"].items())
    states = [end["optimizer_states"][0]["state"] for end in ends]
    for key, state in states[0].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, states[1][key][name]), (key, name)
    validated = [[row for row in csv_values(Path(folder, "metrics.csv")) if "val/MRR" in row] for folder in ("whole", "parts")]
    assert validated[0] == validated[1], "no validation is lost or doubled"


@pytest.mark.parametrize("given", [["--overwrite"], ["--overwrite", "true"], ["--overwrite=true"], ["--ckpt_path", "a"]])
def test_command_to_resume_replaces_nothing(given):
    command = resume_command("fit", ["-c", "a.yaml", *given, "--data.batch_size", "4"], Path("last.ckpt"))
    assert command.endswith("fit -c a.yaml --data.batch_size 4 --ckpt_path last.ckpt")


@pytest.mark.slow
def test_second_ctrl_c_kills_and_sigterm_is_obeyed(prepared):
    killed = interrupted_fit(prepared, "killed", 1, "--trainer.callbacks.times=2")
    assert killed.returncode == -2
    assert not Path("killed/checkpoints/last.ckpt").exists()
    terminated = interrupted_fit(prepared, "terminated", 1, "--trainer.callbacks.name=SIGTERM")
    assert terminated.returncode == 143, terminated.stderr
    assert Path("terminated/checkpoints/last.ckpt").exists()
    assert "to resume:" in terminated.stderr
