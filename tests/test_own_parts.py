"""A user's own backbone, loss and mask, in files as the documentation shows them, run from recipes by their class paths."""

from __future__ import annotations

import importlib
import sys
from itertools import pairwise

import pytest
import torch

from tests.data.make import write_prepared
from tests.documented import turbogr, write_examples
from tests.models.make import random_batch
from turbogr.cli import main

SMALL = ["--data.num_workers=0", "--data.batch_size=4", "--trainer.max_epochs=1", "--trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    assert {"my_models.py", "mine.yaml"} == write_examples("models.md", folder)
    assert {"my_masks.py", "windowed.yaml"} <= write_examples("kernels.md", folder)
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return write_prepared(tmp_path_factory.mktemp("prepared"), num_users=12, num_items=210, min_len=115, max_len=130)


@pytest.fixture
def my_models(examples, monkeypatch):
    """The module of the documented backbone and loss."""
    monkeypatch.syspath_prepend(str(examples))
    yield importlib.import_module("my_models")
    del sys.modules["my_models"]


def checkpoint(folder, run):
    return torch.load(folder / run / "checkpoints" / "last.ckpt", weights_only=True)


@pytest.mark.slow
def test_a_recipe_names_an_own_backbone_loss_and_mask(examples, prepared, tmp_path):
    fit = ["fit", "-c", str(examples / "mine.yaml"), f"--data.path={prepared}", *SMALL]
    run = turbogr(*fit, "--trainer.default_root_dir=run", path=[examples], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "OneLook: " in run.stderr, "the first lines name the model"
    stored = checkpoint(tmp_path, "run")
    assert {"backbone.project.weight", "backbone.positions", "embeddings.weight"} <= set(stored["state_dict"])
    for named in ("my_models.OneLook", "my_models.Hinge", "my_models.newest", "margin: 0.2"):
        assert named in stored["turbogr_config"]
    assert "temperature" not in stored["turbogr_config"], "an option of the loss that base.yaml names"
    tested = turbogr("test", "-c", "run/config.yaml", path=[examples], cwd=tmp_path)
    assert tested.returncode == 0, tested.stderr
    lost = turbogr("test", "-c", "run/config.yaml", path=[], cwd=tmp_path)
    assert lost.returncode != 0
    assert "my_models" in lost.stderr.splitlines()[-1]
    assert "Traceback" not in lost.stderr


def test_the_own_backbone_is_what_it_says(my_models):
    torch.manual_seed(0)
    backbone = my_models.OneLook(dim=8, max_length=32, dropout=0.0, mask="my_models.newest").double()
    batch = random_batch([9, 1, 30])
    tokens = torch.randn(40, 8, dtype=torch.float64)
    parts = []
    for start, end in pairwise(batch.offsets.tolist()):
        x = 8**0.5 * tokens[start:end] + backbone.positions[: end - start]
        q, k, v = (x @ backbone.project.weight.T).chunk(3, 1)
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        weights = (q @ k.T / 8**0.5).masked_fill((distance < 0) | (distance >= 20), -torch.inf).softmax(1)
        parts.append(x + weights @ v)
    torch.testing.assert_close(backbone(tokens, batch), torch.cat(parts))


def test_the_own_loss_is_what_it_says(my_models):
    torch.manual_seed(0)
    output, items = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    targets, negatives = torch.randint(9, (5,)), torch.randint(9, (5, 3))
    loss = my_models.Hinge(margin=0.3)(output, items, targets, negatives)
    positive = (output * items[targets]).sum(1)
    expected = (0.3 - positive[:, None] + (output[:, None] * items[negatives]).sum(2)).clamp(min=0).mean()
    for actual, wanted in zip(
        (loss, *torch.autograd.grad(loss, [output, items])),
        (expected, *torch.autograd.grad(expected, [output, items])),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted)


def test_a_recipe_gives_one_of_ours_an_own_mask(examples, prepared, tmp_path, monkeypatch):
    fit = ["fit", "-c", "movielens-100k/sasrec.yaml", f"--data.path={prepared}", *SMALL]
    windowed = ["-c", str(examples / "windowed.yaml"), "--trainer.default_root_dir=windowed"]
    run = turbogr(*fit, *windowed, path=[examples], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    main([*fit, "--trainer.default_root_dir=causal"])
    causal, masked = (checkpoint(tmp_path, name) for name in ("causal", "windowed"))
    assert "mask: my_masks.window" in masked["turbogr_config"]
    query = "backbone.blocks.0.query.weight"
    difference = (causal["state_dict"][query] - masked["state_dict"][query]).abs().max()
    assert difference > 1e-5, "the mask has been at work"
