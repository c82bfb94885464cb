"""Features of events and items from the command line: trained, tested, predicted, described, compared with a run without."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.cli.support import SMALL, Built, fails
from tests.data.make import write_prepared
from turbogr.cli import main

FEATURES = {"author": ("item", 9), "tab": ("event", 4)}


@pytest.fixture(scope="module")
def featured(tmp_path_factory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("featured"), num_users=60, num_items=40, min_len=5, features=FEATURES)


def fit(path: Path, run: str, *args: str) -> None:
    main(["fit", f"--data.path={path}", f"--trainer.default_root_dir={run}", "--trainer.max_epochs=1", *SMALL, *args])


@pytest.mark.parametrize("combine", ["sum", "concat"])
def test_all_commands(featured, combine, capsys):
    fit(featured, "run", f"--model.combine={combine}", "--trainer.enable_model_summary=null")
    assert "dense parameters; tables of items, author, tab of 53 rows x 16" in capsys.readouterr().err
    weights = torch.load("run/checkpoints/best.ckpt", weights_only=True)["state_dict"]
    assert weights["embeddings.weight"].shape == (40 + 9 + 4, 16)
    assert ("tokens.item_weight" in weights) == (combine == "concat")
    for command in ("validate", "test", "predict"):
        main([command, "-c", "run/config.yaml"])
    predicted = pq.read_table("run/predictions.parquet")
    assert predicted.num_rows == 60
    assert all(len(items) == 10 for items in predicted["item_ids"].to_pylist())
    main(["fit", "-c", "run/config.yaml", "--ckpt_path=last", "--trainer.max_epochs=2"])
    capsys.readouterr()
    main(["describe", "-c", "run/config.yaml", "--json=plan.json"])
    out = capsys.readouterr().out
    assert "table of author, 9 rows x 16" in out
    assert "table of tab, 4 rows x 16" in out
    assert json.loads(Path("plan.json").read_text())["model"]["tables"] == {"items": 40, "author": 9, "tab": 4}


def test_features_are_chosen_and_left_out_by_an_option(featured, capsys):
    for option, tables in (("all", ["items", "author", "tab"]), ("[tab]", ["items", "tab"]), ("[]", ["items"])):
        built = Built("fit", [f"--data.path={featured}", f"--data.features={option}", *SMALL])
        assert list(built.model.tokens.tables) == tables
    fit(featured, "with")
    fit(featured, "without", "--data.features=[]")
    keys = [set(torch.load(f"{run}/checkpoints/best.ckpt", weights_only=True)["state_dict"]) for run in ("with", "without")]
    assert keys[0] - keys[1] == {"tokens.fingerprints"}
    capsys.readouterr()

    # a checkpoint belongs to its features
    with pytest.raises(SystemExit) as stopped:
        main(["test", "-c", "with/config.yaml", "--data.features=[]"])
    assert stopped.value.code == 1
    assert "data.features was 'all' and is []" in capsys.readouterr().err.splitlines()[-1]
    code, line = fails(["fit", "-c", "with/config.yaml", "--ckpt_path=last", "--data.features=[tab]"], capsys)
    assert code == 1
    assert "cannot be resumed: data.features was 'all' and is ['tab']" in line
    code, line = fails(["fit", f"--data.path={featured}", "--data.features=[tabs]", *SMALL], capsys)
    assert code == 1
    assert "'tabs'" in line
    assert "author, tab" in line


def test_other_features_of_items_are_refused(featured, tmp_path, capsys):
    """The same catalogue with other authors: rows of the table would mean other ones."""
    fit(featured, "run")
    other = write_prepared(tmp_path / "other", num_users=60, num_items=40, min_len=5, features=FEATURES)
    authors = np.load(other / "features" / "author.npy")
    authors[5] = (authors[5] + 1) % 9
    np.save(other / "features" / "author.npy", authors)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["predict", "-c", "run/config.yaml", f"--data.path={other}"])
    assert stopped.value.code == 1
    assert "trained with other features than these: author differ" in capsys.readouterr().err.splitlines()[-1]
