"""The command line: what it accepts, what it refuses and how it says so, what a run leaves behind."""

import contextlib
import csv
import logging
import os
import shlex
import subprocess
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401 (so that its log handlers exist before the first test)
import pytest
import torch
import yaml

from tests.data.make import write_prepared
from turbogr.cli import main
from turbogr.trainer_cli import TurboGRCLI, resume_command

CHECKOUT = Path(__file__).resolve().parents[1]
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


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("prepared"), num_users=60, num_items=40, min_len=5)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch, capsys):
    """Every test runs in an empty folder and leaves no global seed behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    # Lightning's handlers hold the stderr of the moment it was imported; pytest has replaced and closed that one.
    handlers = [h for name in ("lightning.pytorch", "lightning.fabric") for h in logging.getLogger(name).handlers]
    for handler in handlers:
        handler.setStream(sys.stderr)
    yield
    for handler in handlers:
        handler.setStream(sys.__stderr__)


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


# Before any subcommand is built.


def test_help_imports_neither_torch_nor_lightning():
    code = (
        "import sys; from turbogr.cli import main; main(['--help']); main(['--version']);"
        "assert not {'torch', 'lightning', 'jsonargparse'} & set(sys.modules)"
    )
    run = child([sys.executable, "-c", code])
    assert run.returncode == 0, run.stderr
    assert all(command in run.stdout for command in ("fit", "validate", "test", "predict", "data", "doctor"))


def test_broken_lightning_is_one_line_that_names_the_doctor(tmp_path):
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").write_text("raise ImportError('half installed')")
    turbogr = [sys.executable, "-m", "turbogr"]
    assert child([*turbogr, "--help"], first=tmp_path).returncode == 0
    run = child([*turbogr, "fit"], first=tmp_path)
    assert run.returncode == 1
    assert run.stderr.splitlines() == [
        "turbogr fit: error: half installed; run `turbogr doctor` to see what is broken and how to mend it"
    ]


def test_misspelt_command(capsys):
    assert fails(["fitt"], capsys) == (2, "turbogr: error: there is no command 'fitt'; did you mean fit?")


def test_data_is_dispatched(capsys):
    with pytest.raises(SystemExit):
        main(["data", "prepare", "--help"])
    assert "--k-core" in capsys.readouterr().out


# Options.


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--trainer.max_epoch=3"], "there is no option --trainer.max_epoch; did you mean --trainer.max_epochs?"),
        (["--trainr.max_epochs=3"], "there is no option --trainr; did you mean --trainer?"),
        (["--data.batchsize", "3"], "there is no option --data.batchsize; did you mean --data.batch_size?"),
        (["--model.backbone.dimm=3"], "model.backbone: turbogr.models.hstu.HSTU has no option dimm; did you mean dim?"),
        (["--model.backbone=SASRecc"], "neither a class path nor the name of a known class; did you mean SASRec?"),
        (["--model.backbone=turbogr.models.hstu.HSTUU"], "there is no turbogr.models.hstu.HSTUU; did you mean HSTU?"),
        (["--model.backbone=turbogr.nothing.HSTU"], "there is no turbogr.nothing"),
        (["--model.embeddings.optimizer.lrr=3"], "LazyAdam has no option lrr; did you mean lr?"),
        (
            ["--trainer.callbacks+=Timer", "--trainer.callbacks.durationn=1"],
            "Timer has no option durationn; did you mean duration?",
        ),
        (["--trainer.max_epochs=three"], "trainer.max_epochs: 'three' is not accepted, expected int or null"),
        (["--data.protocol=two_way"], "data.protocol"),
        (["--model.optimizer.lrr=1"], "model.optimizer: torch.optim.AdamW has no option lrr; did you mean lr?"),
        (["--model.optimizer.weightdecay=1"], "torch.optim.AdamW has no option weightdecay; did you mean weight_decay?"),
        (
            ["--model.optimizer=AdamWW"],
            "model.optimizer: AdamWW is neither a class path nor the name of a known class; did you",
        ),
        (["--model.optimizer.lr=x"], "model.optimizer.init_args.lr: 'x' is not accepted, expected float"),
        (
            ["--model.scheduler=StepLR", "--model.scheduler.step_siz=3"],
            "model.scheduler: torch.optim.lr_scheduler.StepLR has no option step_siz; did you mean step_size?",
        ),
        (["--model.scheduler=StepLRR"], "known class; did you mean StepLR?"),
        (["--model.scheduler=StepLR"], "model.scheduler.init_args.step_size must be given"),
    ],
)
def test_wrong_option_on_the_command_line(args, message, prepared, capsys):
    code, line = fails(["fit", f"--data.path={prepared}", *args], capsys)
    assert code == 2
    assert message in line
    assert line.startswith("turbogr fit: error: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {max_epoch: 3}", "there is no option trainer.max_epoch; did you mean trainer.max_epochs?"),
        ("trainr: {max_epochs: 3}", "there is no option trainr; did you mean trainer?"),
        ("model: {backbone: {init_args: {dimm: 3}}}", "turbogr.models.hstu.HSTU has no option dimm; did you mean dim?"),
        (
            "model: {embeddings: {init_args: {optimizer: {class_path: AdaGrad, init_args: {epss: 3}}}}}",
            "model.embeddings.init_args.optimizer: turbogr.sparse.optimizers.AdaGrad has no option epss; did you mean eps?",
        ),
        ("data: {batch_size: many}", "data.batch_size: 'many' is not accepted, expected int"),
        (
            "model: {optimizer: {class_path: torch.optim.AdamW, init_args: {lrr: 1}}}",
            "model.optimizer: torch.optim.AdamW has no option lrr; did you mean lr?",
        ),
    ],
)
def test_wrong_option_in_a_file(text, message, prepared, capsys):
    Path("wrong.yaml").write_text(text)
    code, line = fails(["fit", f"--data.path={prepared}", "-c", "wrong.yaml"], capsys)
    assert code == 2
    assert message in line


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  backbone: [\n", "wrong.yaml, line 3, column 1: not valid YAML"),
        ("", "wrong.yaml is empty"),
        ("# nothing yet\n", "wrong.yaml is empty"),
        ("- trainer\n", "wrong.yaml holds a list"),
    ],
)
@pytest.mark.parametrize("option", [["-c", "wrong.yaml"], ["--config=wrong.yaml"]])
def test_file_that_is_no_configuration(text, message, option, prepared, capsys):
    Path("wrong.yaml").write_text(text)
    code, line = fails(["fit", f"--data.path={prepared}", *option], capsys)
    assert code == 1
    assert message in line


def test_missing_option(capsys):
    assert fails(["fit"], capsys) == (
        2,
        "turbogr fit: error: --data.path must be given, on the command line or in a configuration file",
    )


def test_files_compose_and_callbacks_append(prepared, capsys):
    Path("a.yaml").write_text("trainer: {max_epochs: 7, callbacks: [{class_path: DeviceStatsMonitor}]}\ndata: {batch_size: 4}")
    Path("b.yaml").write_text("trainer: {callbacks+: [{class_path: LearningRateMonitor}]}\ndata: {batch_size: 5}")
    config = printed(["fit", "-c", "a.yaml", "--config", "b.yaml", f"--data.path={prepared}", "--data.num_negatives=9"], capsys)
    assert [c["class_path"].rpartition(".")[2] for c in config["trainer"]["callbacks"]] == [
        "DeviceStatsMonitor",
        "LearningRateMonitor",
    ]
    assert config["trainer"]["max_epochs"] == 7
    assert (config["data"]["batch_size"], config["data"]["num_negatives"]) == (5, 9)
    assert config["checkpoint"]["monitor"] == "val/NDCG@10", "base.yaml is applied first"


def test_packaged_recipe_is_found_from_anywhere_but_a_file_here_wins(capsys):
    config = printed(["fit", "-c", "movielens-100k/hstu.yaml"], capsys)
    assert config["data"]["path"] == "data/movielens-100k"
    assert printed(["fit", "--config=recipes/movielens-100k/hstu.yaml"], capsys) == config
    Path("movielens-100k").mkdir()
    Path("movielens-100k/hstu.yaml").write_text("data: {path: mine}")
    assert printed(["fit", "-c", "movielens-100k/hstu.yaml"], capsys)["data"]["path"] == "mine"


def test_unknown_file_names_the_nearest_recipe(capsys):
    code, line = fails(["fit", "-c", "movielens-100k/htsu.yaml"], capsys)
    assert code == 1
    assert "did you mean movielens-100k/hstu.yaml?" in line


def test_backbone_follows_the_length_of_the_data(prepared, capsys):
    config = printed(["fit", f"--data.path={prepared}", "--data.max_length=33", "--model.backbone=SASRec"], capsys)
    assert config["data"]["max_length"] == 33
    code, line = fails(["fit", f"--data.path={prepared}", "--data.max_length=33", "--model.backbone.max_length=34"], capsys)
    assert code == 2
    assert "max_length is 34 and data.max_length is 33" in line


@pytest.mark.parametrize("option", ["--model.backbone.max_length=200", "--model.backbone.init_args.max_length 200"])
def test_backbone_that_asks_for_its_default_length_is_refused_too(option, prepared, capsys):
    code, line = fails(["fit", f"--data.path={prepared}", *SMALL, *option.split()], capsys)
    assert code == 1
    assert "max_length is 200 and data.max_length is 20" in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--model.backbone.num_heads=3"], "dim 16 is not divisible by num_heads 3"),
        (["--model.top_k=[10,41]"], "K = 41 is impossible for a catalogue of 40 items"),
        (["--data.num_negatives=41"], "num_negatives is 41"),
        (["--data.path=absent"], "absent"),
        (["--trainer.accelerator=cuda"], "CUDA"),
        (["--trainer.max_epochs=0"], "not a single training step was done"),
        (["--trainer.precision=64-true"], "use 32-true or bf16-mixed"),
        (["--trainer.precision=bf16-true"], "use 32-true or bf16-mixed"),
        (["--seed_everything=-3"], "seed_everything is -3"),
        (["--model.seed=-1"], "model.seed is -1"),
        (["--trainer.accumulate_grad_batches=0"], "trainer.accumulate_grad_batches is 0"),
        (["--trainer.accelerator=tpu"], "the trainer cannot be built"),
        (["--trainer.strategy=fsdp"], "requires a GPU"),
        (["--trainer.strategy=nonsense"], "invalid strategy"),
        (["--trainer.default_root_dir=afile/run"], "afile is no folder"),
        (["--checkpoint.monitor=val/NDGC@10"], "checkpoint.monitor is val/NDGC@10"),
        (["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val/loss"], "EarlyStopping is val/loss"),
    ],
)
def test_users_error_is_one_line_without_traceback(args, message, prepared, capsys):
    if "--trainer.accelerator=cuda" in args and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    Path("afile").touch()
    with pytest.raises(SystemExit) as stopped:
        main(["fit", f"--data.path={prepared}", *SMALL, *args])
    err = capsys.readouterr().err
    assert stopped.value.code == 1
    assert err.splitlines()[-1].startswith("turbogr fit: error: ")
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("top_k", "monitor"), [("[5,20]", "val/NDCG@5"), ("[20,30]", "val/NDCG@20"), ("[1,10]", "val/NDCG@10")]
)
def test_monitor_follows_top_k(top_k, monitor, prepared):
    built = Built("fit", [f"--data.path={prepared}", *SMALL, f"--model.top_k={top_k}"])
    assert built.config["fit"].checkpoint.monitor == monitor


class Built(TurboGRCLI):
    """Builds everything and runs nothing."""

    def _run_subcommand(self, subcommand):
        pass


# A run and what follows it.


def fit(prepared: Path, *args: str) -> None:
    main(["fit", f"--data.path={prepared}", "--trainer.default_root_dir=run", "--trainer.max_epochs=2", *SMALL, *args])


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
    assert _csv_values(folder / "metrics.csv") == _csv_values_of(metrics)

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


def _csv_values(path: Path) -> list[dict[str, float]]:
    return _csv_values_of(path.read_bytes())


def _csv_values_of(content: bytes) -> list[dict[str, float]]:
    rows = csv.DictReader(content.decode().splitlines())
    return [{k: float(v) for k, v in row.items() if v and k != "train/tokens_per_second"} for row in rows]


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
    validated = [[row for row in _csv_values(Path(folder, "metrics.csv")) if "val/MRR" in row] for folder in ("whole", "parts")]
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
