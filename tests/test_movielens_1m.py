"""From a `ratings.dat` to the published protocol, with the recipes of MovieLens-1M: numbers that compare with papers."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from turbogr.cli import main
from turbogr.data.datamodule import SequenceDataModule
from turbogr.resources import recipes_dir

RECIPES = sorted(path.name for path in (recipes_dir() / "movielens-1m").glob("*.yaml"))
USERS, MOVIES = 40, 220  # more movies than the largest K
PUBLISHED = {
    "hstu.yaml": (2, 1, ".3097 / .1720"),
    "hstu-large.yaml": (8, 2, ".3294 / .1893"),
    "sasrec.yaml": (2, 1, ".2853 / .1603"),
    "fuxi.yaml": (2, 1, ".3254 / .1835"),
}
"""Blocks, heads, and HR@10 / NDCG@10 in the papers."""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")


@pytest.fixture(scope="module")
def last_movies(tmp_path_factory) -> tuple[Path, dict[int, int]]:
    """A file in MovieLens-1M's layout, in no order, and the movie that each user rated last."""
    random = np.random.default_rng(0)
    lines, last = [], {}
    for user in range(1, USERS + 1):
        movies = random.permutation(MOVIES)[: random.integers(20, 31)] + 1
        if user == 1:
            movies = np.arange(1, MOVIES + 1)  # so that every movie is there
        lines += [f"{user}::{movie}::{random.integers(1, 6)}::{978_300_000 + 60 * t}" for t, movie in enumerate(movies)]
        last[user] = int(movies[-1])
    file = tmp_path_factory.mktemp("ml-1m") / "ratings.dat"
    file.write_text("\n".join(random.permutation(lines)) + "\n", encoding="latin-1")
    return file, last


def targets(loader) -> list[int]:
    """The held-out item row of every user."""
    return [int(row) for batch in loader for row in batch.targets[batch.last]]


def prepare(file: Path, *options: str) -> SequenceDataModule:
    assert not main(["data", "prepare", "movielens", str(file), "--out", "data/movielens-1m", *options])
    return SequenceDataModule("data/movielens-1m", num_workers=0)


def test_published_protocol_evaluates_the_last_item(last_movies):
    file, last = last_movies
    data = prepare(file, "--protocol", "published")
    data.setup("fit")
    data.setup("test")
    validated, tested = targets(data.val_dataloader()), targets(data.test_dataloader())
    users = data.prepared.user_ids(np.arange(USERS)).to_pylist()
    assert data.prepared.item_ids(np.array(validated)).to_pylist() == [last[user] for user in users]
    assert validated == tested
    trained = [batch.num_tokens for batch in data.train_dataloader()]
    # the last event is held out, and the first has nobody to predict it; of user 1 the newest 200 tokens are taken
    lengths = np.diff(data.prepared.offsets)
    assert sum(trained) == np.minimum(lengths - 2, 200).sum()


def test_negative_control_three_ways(last_movies):
    file, _ = last_movies
    data = prepare(file)
    data.setup("fit")
    data.setup("test")
    assert targets(data.val_dataloader()) != targets(data.test_dataloader())


@pytest.mark.parametrize("recipe", RECIPES)
def test_published_settings(recipe):
    blocks, heads, figures = PUBLISHED[recipe]
    text = (recipes_dir() / "movielens-1m" / recipe).read_text()
    assert figures in text
    assert "--protocol published" in text
    base = yaml.safe_load((recipes_dir() / "base.yaml").read_text())
    config = yaml.safe_load(text)
    assert config["trainer"]["max_epochs"] == 101
    assert config["data"] == {"path": "data/movielens-1m", "max_length": 200, "batch_size": 128}
    assert base["data"]["num_negatives"] == 128
    assert base["model"]["loss"]["init_args"]["temperature"] == 0.05
    for optimizer in (base["model"]["optimizer"], base["model"]["embeddings"]["init_args"]["optimizer"]):
        assert (optimizer["init_args"]["lr"], optimizer["init_args"]["betas"]) == (1e-3, [0.9, 0.98])
    options = config["model"]["backbone"]["init_args"]
    assert (options["dim"], options["num_blocks"], options["num_heads"], options["dropout"]) == (50, blocks, heads, 0.2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_under_the_published_protocol(recipe, last_movies):
    file, _ = last_movies
    prepare(file, "--protocol", "published")
    options = ["-c", f"movielens-1m/{recipe}", "--trainer.accelerator=cpu", "--trainer.default_root_dir=run"]
    torch.manual_seed(0)
    assert not main(["fit", *options, "--trainer.max_epochs=2"])
    assert not main(["test", *options])
    tested = json.loads(Path("run/test.json").read_text())
    with open("run/metrics.csv", newline="") as lines:
        validated = next(row for row in csv.DictReader(lines) if row["val/HR@10"] and int(row["epoch"]) == tested["epoch"])
    for metric, value in tested["metrics"]["model"].items():
        assert float(validated[f"val/{metric}"]) == pytest.approx(value, abs=1e-9), "one item is validation and test"
