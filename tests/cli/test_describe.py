"""`turbogr describe`: what it prints and writes, and how its errors read."""

import json
import sys
from pathlib import Path

import pytest

from tests.cli.support import SMALL, fails, printed
from turbogr.cli import main

OWN = """
import torch
from torch import nn
from turbogr.models.backbone import Backbone

class Mean(Backbone):
    def __init__(self, dim: int = 16, max_length: int = 64, eager: bool = False, reads: bool = False):
        super().__init__(dim, max_length, 0.1)
        self.linear, self.reads = nn.Linear(dim, dim, bias=False), reads
        if eager and float(self.linear.weight.abs().max()) > 1:
            raise ValueError("too large")

    def encode(self, x, batch):
        if self.reads and float(x.detach().max()) > 9:
            raise ValueError("too large")
        return self.linear(x)
"""


def describe(prepared: Path, *args: str) -> None:
    small = [option for option in SMALL if "backbone" not in option]
    main(["describe", f"--data.path={prepared}", *small, *args])


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's own backbone on the path of modules."""
    (tmp_path / "own_backbone.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_backbone.Mean"
    sys.modules.pop("own_backbone", None)


def test_help_lists_the_command(capsys):
    main(["--help"])
    assert "describe " in capsys.readouterr().out


def test_tables_and_json(prepared, capsys):
    main(["describe", f"--data.path={prepared}", *SMALL, "--json=out/plan.json", "--trainer.default_root_dir=run"])
    out = capsys.readouterr().out
    found = json.loads(Path("out/plan.json").read_text())
    dense = sum(found["model"]["dense"].values())
    # positions; uvqk, out with bias, and tables of 39 distances and 129 buckets of times
    assert dense == 20 * 16 + 16 * 64 + 16 * 16 + 16 + 39 + 129
    for text in ("Parameters of HSTU", f"{dense:,}", "40 rows x 16", "An epoch: ", "causal pairs of a step", "attention"):
        assert text in out
    for text in ("if padded", "state of AdamW", "state of LazyAdam", "on the device", "negatives", "written to out/plan.json"):
        assert text in out
    for text in ("Negatives on the device", "gathered", "offload, fp16", "sharing k = 2", "mode auto offloads"):
        assert text in out
    assert set(found) == {"turbogr", "data", "model", "steps", "precision", "notes", "sums"}
    assert set(found["steps"]) == {"p50", "p99"}
    for name, step in found["steps"].items():
        assert step["tokens"] * 16 * 64 * 2 + step["tokens"] * 16 * 16 * 2 == step["forward"]["products"]
        assert step["pairs"] * 2 * 32 == step["forward"]["attention"]
        assert step["negative_choices"]["gathered"]["rows"] == step["tokens"] * 8 * 16 * 4
        assert step["offload_below"] == 0
        assert found["sums"][name]["operations"] == sum(step["forward"].values()) + sum(step["backward"].values())
    assert sorted(path.name for path in Path().iterdir()) == ["out"], "no run folder, nothing half written"


def test_configuration_is_that_of_fit(prepared, capsys):
    args = ["-c", "movielens-100k/fuxi.yaml", f"--data.path={prepared}", "--data.num_negatives=7", "--model.top_k=[1]"]
    configurations = [printed([command, *args], capsys) for command in ("fit", "describe")]
    for name in ("trainer", "model", "data"):
        assert configurations[0][name] == configurations[1][name]
    main(["describe", *args, "--trainer.accelerator=cuda", "--trainer.accumulate_grad_batches=4"])
    out = capsys.readouterr().out
    assert "Parameters of FuXi" in out
    assert "backbone.time_encoder" in out
    assert "take a step after 4 such batches" in out


def test_rematerialise_and_precision_are_heeded(prepared):
    kept = []
    for option in ("--trainer.precision=32-true", "--model.backbone.rematerialise=true", "--trainer.precision=bf16-mixed"):
        main(["describe", f"--data.path={prepared}", *SMALL, option, "--json=plan.json"])
        kept.append(json.loads(Path("plan.json").read_text())["steps"]["p99"]["kept"]["backbone"])
    assert kept[1] < kept[0]
    assert kept[2] < kept[0]


def test_own_backbone(own, prepared, capsys):
    describe(prepared, f"--model.backbone={own}", "--model.backbone.dim=16", "--json=plan.json")
    assert "Parameters of Mean" in capsys.readouterr().out
    for step in json.loads(Path("plan.json").read_text())["steps"].values():
        assert step["forward"]["products"] == 2 * step["tokens"] * 16 * 16


def test_a_step_that_reads_activations_is_left_out_with_a_note(own, prepared, capsys):
    describe(prepared, f"--model.backbone={own}", "--model.backbone.dim=16", "--model.backbone.reads=true")
    out = capsys.readouterr().out
    assert "Parameters of Mean" in out
    assert "An epoch: " in out
    assert "note: operations and activations are not counted" in out
    assert "FLOPs of a step" not in out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--data.path=absent"], 1, "absent: no such prepared folder; make the folder with `turbogr data prepare"),
        (["--data.batchsize=3"], 2, "there is no option --data.batchsize; did you mean --data.batch_size?"),
        (["--model.backbone=HTSU"], 2, "did you mean HSTU?"),
        (["--model.backbone.num_heads=3"], 1, "dim 16 is not divisible by num_heads 3"),
        (["--model.backbone.max_length=21"], 2, "max_length is 21 and data.max_length is 20"),
        (["--json=."], 1, "--json .: is a folder; name a file in it"),
        (["--json=afile/plan.json"], 1, "--json afile/plan.json: cannot be written"),
        (["-c", "absent.yaml"], 1, "there is no configuration file absent.yaml"),
    ],
)
def test_errors_are_one_line(args, code, message, prepared, capsys):
    Path("afile").touch()
    found, line = fails(["describe", f"--data.path={prepared}", *SMALL, *args], capsys)
    assert found == code
    assert line.startswith("turbogr describe: error: ")
    assert message in line


def test_a_constructor_that_reads_values_is_named(own, prepared, capsys):
    small = [option for option in SMALL if "backbone" not in option]
    args = ["describe", f"--data.path={prepared}", *small, f"--model.backbone={own}", "--model.backbone.eager=true"]
    code, line = fails(args, capsys)
    assert code == 1
    assert "turbogr describe: error: the model cannot be described" in line
