"""Runs that stop within an epoch and go on under another strategy, on other ranks, from checkpoints of either form."""

import shutil

import pytest
import torch

from tests.data.make import write_prepared
from tests.distributed.checkpoint_fit_worker import END, STOP, fit
from tests.distributed.launch import launch_checks
from turbogr.callbacks.run_start import ReplaceEarlierRun
from turbogr.checkpoints import OtherCatalogueError, is_directory, read
from turbogr.errors import ConfigurationError
from turbogr.run_folder import Checkpoint, RunFolder

RUNS = ["directory", "file", "from the directory", "from the file", "from one process"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fit")
    write_prepared(path / "data", num_users=48, num_items=60, min_len=4, max_len=24, seed=5)
    fit(path, 16, STOP, None, path / "auto.ckpt")
    return path


@pytest.fixture(scope="session")
def ranks(tmp_path_factory, folder):
    module = "tests.distributed.checkpoint_fit_worker"
    return launch_checks(module, 2, tmp_path_factory.mktemp("ranks"), str(folder), timeout=240.0)


def assert_equal(actual, expected, tolerance=0.0):
    """All of two checkpoints' tensors: weights, rows, row state, dense optimizer state."""
    assert actual["global_step"] == expected["global_step"] == END
    assert actual["state_dict"].keys() == expected["state_dict"].keys()
    pairs = [(name, actual["state_dict"][name], tensor) for name, tensor in expected["state_dict"].items()]
    for mine, theirs in zip(actual["optimizer_states"], expected["optimizer_states"], strict=True):
        assert mine["state"].keys() == theirs["state"].keys()
        for number, state in theirs["state"].items():
            pairs += [(f"{number} {name}", mine["state"][number][name], value) for name, value in state.items()]
    for name, mine, theirs in pairs:
        scale = float(theirs.abs().max()) + 1e-30
        difference = float((mine.double() - theirs.double()).abs().max()) / scale
        assert difference <= tolerance, f"{name}: {difference}"
    assert actual["lr_schedulers"] == expected["lr_schedulers"]


def test_same_ranks_go_on_bit_for_bit_from_a_directory(ranks, folder):
    assert ranks["from the directory"] == ranks["uninterrupted"]
    assert is_directory(folder / "directory.ckpt")
    assert_equal(read(folder / "from_directory.ckpt"), read(folder / "whole.ckpt"))


@pytest.mark.parametrize("name", ["from_file", "from_auto"])
def test_other_layouts_go_on_from_a_file(ranks, folder, name):
    assert ranks["from the file"] == ranks["from one process"] == ranks["uninterrupted"]
    assert_equal(read(folder / f"{name}.ckpt"), read(folder / "whole.ckpt"), 2e-5)


@pytest.mark.parametrize("name", ["directory", "file"])
def test_one_process_goes_on_where_ranks_stopped(ranks, folder, name):
    assert len(set(ranks[name])) == 1
    fit(folder, 16, END, folder / f"{name}.ckpt", folder / f"alone_from_{name}.ckpt")
    assert_equal(read(folder / f"alone_from_{name}.ckpt"), read(folder / "whole.ckpt"), 2e-5)


def test_negative_control_another_state_is_noticed(ranks, folder):
    spoiled = read(folder / "whole.ckpt")
    spoiled["state_dict"]["embeddings.optimizer.sum"] = spoiled["state_dict"]["embeddings.optimizer.sum"].flip(0)
    with pytest.raises(AssertionError, match=r"embeddings\.optimizer\.sum"):
        assert_equal(spoiled, read(folder / "whole.ckpt"), 2e-5)


def test_another_catalogue_is_refused_through_the_trainer(ranks, folder, tmp_path):
    write_prepared(tmp_path / "data", num_users=48, num_items=61, min_len=4, max_len=24, seed=5)
    for name in ("directory", "file"):
        path = folder / f"{name}.ckpt"
        with pytest.raises(OtherCatalogueError, match=r"its table 'items' has \d+ rows, the model's has \d+") as refused:
            fit(tmp_path, 16, END, path, tmp_path / "none.ckpt")
        assert str(refused.value).startswith(f"{path} belongs to another catalogue")


def test_run_folder_knows_directories(ranks, folder, tmp_path):
    run = RunFolder(tmp_path)
    shutil.copytree(folder / "directory.ckpt", run.checkpoint("last"))
    assert run.resolve("last") == run.checkpoint("last")
    described = Checkpoint(run.checkpoint("last"))
    assert described.describe() == f"{run.checkpoint('last')} (epoch 2, step {STOP})"
    assert described.config is None
    with pytest.raises(ConfigurationError, match=r"last\.ckpt"):
        run.resolve("best")
    with pytest.raises(ConfigurationError, match="holds an earlier run"):
        run.refuse_earlier_run()
    assert run.files_to_replace() == [run.checkpoint("last")]

    class Zero:
        is_global_zero = True

    ReplaceEarlierRun(run.files_to_replace()).on_train_start(Zero(), None)
    assert list(run.checkpoints.iterdir()) == []
    run.refuse_earlier_run()


def test_directory_without_its_header_is_no_checkpoint(ranks, folder, tmp_path):
    shutil.copytree(folder / "directory.ckpt", tmp_path / "half.ckpt")
    (tmp_path / "half.ckpt" / "checkpoint.pt").unlink()
    with pytest.raises(ConfigurationError, match=r"half\.ckpt is a folder but no checkpoint: it holds no checkpoint\.pt"):
        RunFolder(tmp_path).resolve(str(tmp_path / "half.ckpt"))


def test_files_of_ranks_load_safely(ranks, folder):
    content = torch.load(folder / "file.ckpt", weights_only=True)
    assert content["state_dict"]["embeddings.weight"].shape[0] == 60
    assert content["turbogr_tables"]["rows"]["items"] == 60
