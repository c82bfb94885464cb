"""`turbogr plan`: the costs of each number of groups on the recipe's own data, and the choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.cli.support import SMALL, fails
from turbogr.cli import main
from turbogr.data.datamodule import SequenceDataModule
from turbogr.units import in_bytes


def plan(prepared: Path, *args: str) -> dict:
    main(["plan", f"--data.path={prepared}", *SMALL, "--json=out/groups.json", *args])
    return json.loads(Path("out/groups.json").read_text())


def test_tables_and_json(prepared, capsys):
    found = plan(prepared, "--devices=4", "--devices_per_node=2", "--data.batch_size=4")
    out = capsys.readouterr().out
    assert [(cost["groups"], cost["group_size"]) for cost in found["costs"]] == [(1, 4), (2, 2), (4, 1)]
    # 40 items x (a row of 16, two moments of 16), float32
    assert [cost["table_bytes"] for cost in found["costs"]] == [rows * 3 * 16 * 4 for rows in (10, 20, 40)]
    # activations and dense parameters, and rows under way, of which a rank with a copy of its own keeps the most
    beside = [cost["step_bytes"] for cost in found["costs"]]
    assert 0 < beside[0] < beside[1] < beside[2]
    assert all(f"{in_bytes(cost['step_bytes'])} in {cost['groups']} x " in out for cost in found["costs"])
    chosen = min(found["costs"], key=lambda cost: cost["seconds"])["groups"]
    assert found["chosen"] == chosen
    for text in ("Groups of 4 ranks", "1 x 4", "4 x 1", "chosen", f"groups = {chosen}: least", "written to out/groups.json"):
        assert text in out


def test_distinct_rows_are_those_of_real_batches(prepared):
    found = plan(prepared, "--devices=2", "--data.batch_size=4")
    data = SequenceDataModule(prepared, batch_size=4, max_length=20, num_negatives=8, num_workers=0, seed=42)
    loader = data.train_dataloader()
    batches = [loader.dataset[key] for key, _ in zip(loader.batches.stream(0), range(2), strict=False)]
    ids = [torch.cat([b.values, b.targets, b.negatives.flatten()]).unique() for b in batches]
    assert found["rows"]["counts"]["1"] == sum(map(len, ids)) / 2
    assert found["rows"]["counts"]["2"] == len(torch.cat(ids).unique())


def test_what_does_not_fit_is_said(prepared, capsys):
    found = plan(prepared, "--devices=2", "--memory_per_rank=10kB")
    assert found["chosen"] is None
    out = capsys.readouterr().out
    assert "groups = 1 needs" in out
    assert "more than a rank's memory of 10.0 kB: use more ranks" in out
    assert not any(cost["fits"] for cost in found["costs"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--devices=0"], "--devices is 0; it must be 1 or more"),
        (["--memory_per_rank=much"], "--memory_per_rank is 'much', which is no number of bytes"),
        (["--network_bandwidth=fast"], "--network_bandwidth is 'fast', which is no number of bytes"),
    ],
)
def test_errors(prepared, capsys, args, message):
    code, line = fails(["plan", f"--data.path={prepared}", *SMALL, *args], capsys)
    assert (code, message in line) == (1, True), line


def test_help_lists_the_command(capsys):
    main(["--help"])
    assert "\n  plan " in capsys.readouterr().out
