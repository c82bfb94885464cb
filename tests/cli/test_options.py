"""Commands, options, configuration files: what is accepted, and how errors read."""

import importlib.util
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401 (so that its log handlers exist before the first test)
import pytest
import torch
from torch import distributed as dist

from tests.cli.support import SMALL, Built, child, fails, printed
from turbogr.cli import main
from turbogr.cli_checks import model_differences
from turbogr.data.balance import CostModel
from turbogr.data.sharing import Sharing
from turbogr.data.stochastic_length import StochasticLength

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
        (["--data.tokens_per_batch=automatic"], "data.tokens_per_batch"),
        (["--data.balance=token"], "data.balance"),
        (["--data.balance_method=slices"], "data.balance_method"),
        (["--data.balance=attention", "--data.balance_cost.quadradic=1"], "quadradic"),
        (["--data.stochastic_length.alfa=1"], "alfa"),
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
        (["--model.combine=avg"], "model.combine: 'avg' is not accepted, expected sum or concat"),
        (["--data.balance=token"], "expected off, tokens or attention; did you mean tokens?"),
        (["--model.top_k=10"], "model.top_k: '10' is not accepted, expected list"),
        (["--lr=1"], "there is no option --lr; did you mean --model.optimizer.lr?"),
        (["--epochs=1"], "there is no option --epochs; did you mean --trainer.max_epochs?"),
        (["--trainer.batch_size=1"], "there is no option --trainer.batch_size; did you mean --data.batch_size?"),
        (["--data.sampler=uniform"], "there is no option --data.sampler; valid here: balance, "),
        (["movielens-100k/hstu.yaml"], "belongs to no option; did you mean -c movielens-100k/hstu.yaml?"),
        (["--trainer.callbacks=EarlyStoping"], "trainer.callbacks: EarlyStoping is neither"),
        (["--trainer.logger=TensorBord"], "the name of a known class; did you mean TensorBoardLogger?"),
        (
            ["--trainer.callbacks+=NegativeQuantization", "--trainer.callbacks.dtype=fp8"],
            "trainer.callbacks, dtype of NegativeQuantization: 'fp8' is not accepted, expected fp16 or bf16",
        ),
        (
            ["--trainer.strategy", "turbogr", "--trainer.strategy.mode", "semi_async"],
            "trainer.strategy.mode: options need the strategy's class, and turbogr is none: set trainer.strategy to one, such "
            "as TurboGRStrategy or DDPStrategy",
        ),
        (["--trainer.strategy=TurboGRStrategy", "--trainer.strategy.mod=sync"], "has no option mod; did you mean mode?"),
        (
            ["--trainer.strategy=TurboGRStrategy", "--trainer.strategy.mode=semi"],
            "trainer.strategy.init_args.mode: 'semi' is not accepted, expected sync or semi_async; did you mean semi_async?",
        ),
    ],
)
def test_wrong_option_on_the_command_line(args, message, prepared, capsys):
    code, line = fails(["fit", f"--data.path={prepared}", *args], capsys)
    assert code == 2
    assert message in line
    assert line.startswith("turbogr fit: error: ")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data.tokens_per_batch=0"], 'tokens_per_batch is 0; it must be 1 or more, or "auto"'),
        (["--data.balance=attention"], 'balance "attention" needs balance_cost'),
        (["--data.balance=attention", "--data.balance_cost.linear=-1"], "both coefficients must be 0 or more"),
        (["--data.balance=tokens", "--data.balance_cost.linear=1"], 'balance_cost is the cost of balance "attention"'),
        (["--data.max_tokens_per_rank=100"], 'max_tokens_per_rank needs balance "tokens" or "attention"'),
        (["--data.stochastic_length.alpha=3"], "stochastic_length.alpha is 3.0; it must lie above 0 and be 2 or less"),
    ],
)
def test_impossible_balancing(args, message, prepared, capsys):
    code, line = fails(["fit", f"--data.path={prepared}", *args], capsys)
    assert code == 1
    assert message in line


def test_options_of_balancing(prepared):
    args = ["--data.tokens_per_batch=auto", "--data.balance=attention", "--data.balance_method=karmarkar_karp"]
    args += ["--data.balance_cost={linear: 2.0, quadratic: 0.5}", "--data.max_tokens_per_rank=5000"]
    data = Built("fit", [f"--data.path={prepared}", *SMALL, *args, "--data.stochastic_length.gamma=1.5"]).datamodule
    assert data.tokens_per_batch == "auto"
    assert data.sharing == Sharing("karmarkar_karp", CostModel(2.0, 0.5), 5000)
    assert data.stochastic_length == StochasticLength(alpha=1.7, gamma=1.5)


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
            "trainer: {callbacks: [{class_path: NegativeQuantization, init_args: {dtype: fp8}}]}",
            "trainer.callbacks, dtype of NegativeQuantization: 'fp8' is not accepted, expected fp16 or bf16; did you mean fp16",
        ),
        (
            "trainer: {callbacks: {class_path: NegativeOffload, init_args: {mode: sometimes}}}",
            "trainer.callbacks, mode of NegativeOffload: 'sometimes' is not accepted, expected auto, offload or fused",
        ),
        (
            "trainer: {callbacks+: [LogitSharring]}",
            "trainer.callbacks: LogitSharring is neither a class path nor the name of a known class; did you mean LogitShar",
        ),
        (
            "trainer: {strategy: {class_path: turbogr, init_args: {mode: sync}}}",
            "trainer.strategy: options need the strategy's class, and turbogr is none: set trainer.strategy to one",
        ),
        (
            "trainer: {strategy: {mode: sync}}",
            "trainer.strategy: options need the strategy's class: set trainer.strategy to one",
        ),
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


@pytest.mark.parametrize(
    ("name", "module", "option"),
    [("Timeline", "timeline", {"steps": 4}), ("LoadBalance", "load_balance", {"path": "a.png"})],
)
def test_callbacks_have_short_names(name, module, option, capsys):
    given = [f"--trainer.callbacks.{key}={value}" for key, value in option.items()]
    config = printed(["fit", "-c", "movielens-100k/hstu.yaml", f"--trainer.callbacks+={name}", *given], capsys)
    [callback] = config["trainer"]["callbacks"]
    assert callback["class_path"] == f"turbogr.callbacks.{module}.{name}"
    assert callback["init_args"].items() >= option.items()


def test_packaged_recipe_is_found_from_anywhere_but_a_file_here_wins(capsys):
    config = printed(["fit", "-c", "movielens-100k/hstu.yaml"], capsys)
    assert config["data"]["path"] == "data/movielens-100k"
    assert printed(["fit", "--config=recipes/movielens-100k/hstu.yaml"], capsys) == config
    Path("movielens-100k").mkdir()
    Path("movielens-100k/hstu.yaml").write_text("data: {path: mine}")
    assert printed(["fit", "-c", "movielens-100k/hstu.yaml"], capsys)["data"]["path"] == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("movielens-100k/htsu.yaml", "did you mean movielens-100k/hstu.yaml?"),
        ("hstu.yaml", "did you mean movielens-100k/hstu.yaml or movielens-1m/hstu.yaml?"),
        ("balanse.yaml", "did you mean switches/balance.yaml?"),
        ("nothing.yaml", "recipes that come with turbogr: base.yaml, "),
        (".", ". is a folder; name a configuration file in it"),
    ],
)
def test_unknown_file_names_the_nearest_recipe(name, message, capsys):
    code, line = fails(["fit", "-c", name], capsys)
    assert code == 1
    assert message in line


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
        (
            ["--trainer.strategy=nonsense"],
            "trainer.strategy is nonsense, which is the name of no strategy; names are auto",
        ),
        (["--trainer.strategy=TurboGRStrategy"], "which is the name of no strategy; did you mean turbogr?"),
        (["--trainer.devices=two"], "the trainer cannot be built: `devices`"),
        (["--trainer.max_epochs=-5"], "trainer.max_epochs is -5; it must be 0 or more, or -1 for no limit"),
        (["--trainer.check_val_every_n_epoch=0"], "trainer.check_val_every_n_epoch is 0; it must be 1 or more"),
        (["--trainer.val_check_interval=0.0"], "trainer.val_check_interval is 0; it must be a number of batches"),
        (["--trainer.gradient_clip_val=-1"], "trainer.gradient_clip_val is -1; it must be 0 or more"),
        (["--checkpoint.mode=maximum"], "checkpoint.mode is maximum; it must be min or max"),
        (["--data.batch_size=0"], "batch_size is 0; it must be 1 or more"),
        (
            ["--model.optimizer.lr=-1"],
            "has an impossible option: Invalid learning rate: -1.0",
        ),
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


def test_another_class_is_one_difference():
    then = "{data: {features: all}, model: {seed: 1, backbone: {class_path: m.A, init_args: {dim: 3, heads: 2}}}}"
    same_class = then.replace("dim: 3", "dim: 4")
    assert model_differences(then, same_class) == ["model.backbone.init_args.dim was 3 and is 4"]
    other_class = then.replace("m.A", "m.B").replace("heads", "width").replace("seed: 1", "seed: 2")
    assert model_differences(then, other_class) == [
        "model.backbone.class_path was 'm.A' and is 'm.B'",
        "model.seed was 1 and is 2",
    ]


def test_package_that_a_class_needs_is_named(prepared, capsys):
    if importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    with pytest.raises(SystemExit):
        main(["fit", f"--data.path={prepared}", *SMALL, "--trainer.logger=WandbLogger"])
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("turbogr fit: error: lightning.pytorch.loggers.WandbLogger: Requirement 'wandb")


def test_groups_that_the_ranks_cannot_form(prepared, capsys):
    """The strategy refuses them, and Lightning fails once more while it clears up."""
    strategy = ["--trainer.strategy=TurboGRStrategy", "--trainer.strategy.groups=2"]
    try:
        with pytest.raises(SystemExit):
            main(["fit", f"--data.path={prepared}", *SMALL, *strategy])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "turbogr fit: error: groups must divide the number of ranks: 1 ranks can form 1 groups, not 2"


@pytest.mark.parametrize(
    ("top_k", "monitor"), [("[5,20]", "val/NDCG@5"), ("[20,30]", "val/NDCG@20"), ("[1,10]", "val/NDCG@10")]
)
def test_monitor_follows_top_k(top_k, monitor, prepared):
    built = Built("fit", [f"--data.path={prepared}", *SMALL, f"--model.top_k={top_k}"])
    assert built.config["fit"].checkpoint.monitor == monitor
