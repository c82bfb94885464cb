"""Checkpoints of sharded tables: from 2 x 2 ranks to every other layout and to one process; refusals, failures, kills."""

import shutil
import subprocess
import sys

import pytest
import torch
from torch import distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.distributed.checkpoint_cases import DIM, TABLES, Small, build, fill, spoil, wrong
from tests.distributed.launch import launch_checks
from turbogr import checkpoints
from turbogr.checkpoints import ROWS_KEY, TABLES_KEY, CheckpointFiles, OtherCatalogueError
from turbogr.errors import ConfigurationError
from turbogr.sparse.topology import HSPTopology
from turbogr.strategies import checkpoint as sharded

ROWS = ["embeddings.weight", "embeddings.optimizer.exp_avg", "embeddings.optimizer.exp_avg_sq"]
SAVED = [f"{kind}-{form}.ckpt" for kind in ("row_wise", "table_wise") for form in ("directory", "file")]
EVERY = [f"{groups} {kind}" for groups in (2, 4, 1) for kind in ("row_wise", "table_wise")]


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="session")
def four(tmp_path_factory, shared):
    return launch_checks("tests.distributed.checkpoint_worker", 4, tmp_path_factory.mktemp("four"), "four", str(shared))


@pytest.fixture(scope="session")
def two(tmp_path_factory, shared, four):
    return launch_checks("tests.distributed.checkpoint_worker", 2, tmp_path_factory.mktemp("two"), "two", str(shared))


def load_alone(path, **options):
    """As Lightning does under strategy="auto"."""
    module = Small(**options)
    spoil(module)
    content = CheckpointFiles().load_checkpoint(path, weights_only=True)
    module.on_load_checkpoint(content)
    module.load_state_dict(content["state_dict"])
    return module, content


@pytest.mark.parametrize("name", SAVED)
def test_four_ranks_load_it_in_every_layout(four, name):
    for found in four["load"]:
        assert found[name] == {layout: [] for layout in EVERY}


@pytest.mark.parametrize("name", SAVED)
def test_two_ranks_load_what_four_saved(two, name):
    for found in two["load"]:
        assert found[name] == {layout: [] for layout in EVERY if not layout.startswith("4")}


@pytest.mark.parametrize("name", SAVED)
def test_one_process_loads_it(four, shared, name):
    module, content = load_alone(shared / name)
    assert wrong(module, None) == []
    assert torch.equal(content["optimizer_states"][0]["state"][0]["exp_avg"], torch.arange(6.0))
    assert content["turbogr_config"] == "seed: 1\n"


def test_one_rank_loads_and_saves_it(four, shared, tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name in SAVED:
            module, engine = build(HSPTopology.build(1))
            spoil(module)
            sharded.load_state(module, engine, CheckpointFiles().load_checkpoint(shared / name))
            assert wrong(module, engine) == []
        content = {"state_dict": sharded.dense_state(module, engine)}
        sharded.save_directory(content, tmp_path / "one.ckpt", module, engine)
        engine.close()
    finally:
        dist.destroy_process_group()
    assert wrong(load_alone(tmp_path / "one.ckpt")[0], None) == []


def test_gathered_file_is_the_one_that_one_process_writes(four, shared):
    assert four["save"] == [{"rows": ROWS}, {"rows": []}, {"rows": []}, {"rows": []}], "rank 0 alone holds all rows"
    content = torch.load(shared / "row_wise-file.ckpt", weights_only=True)
    whole = Small()
    fill(whole, None)
    assert list(content["state_dict"]) == list(whole.state_dict())
    for name, tensor in whole.state_dict().items():
        assert torch.equal(content["state_dict"][name], tensor)
        assert content["state_dict"][name].dtype == tensor.dtype
    assert content[TABLES_KEY] == {"rows": TABLES, "width": DIM}


@pytest.mark.parametrize("kind", ["row_wise", "table_wise"])
def test_directory_holds_every_row_once_written_by_all_ranks(four, shared, kind):
    folder = checkpoints.read(shared / f"{kind}-directory.ckpt")[ROWS_KEY]
    metadata = FileSystemReader(folder).read_metadata()
    assert sorted(metadata.state_dict_metadata) == sorted(ROWS)
    for key in ROWS:
        saved = metadata.state_dict_metadata[key]
        rows = [row for c in saved.chunks for row in range(c.offsets[0], c.offsets[0] + c.sizes[0])]
        assert sorted(rows) == list(range(sum(TABLES.values()))), "each once"
    writers = {info.relative_path for info in metadata.storage_data.values()}
    assert len(writers) == 4, "groups share the writing"


def test_directory_is_read_by_pytorchs_own_tools(four, shared, tmp_path):
    dcp_to_torch_save(checkpoints.read(shared / "row_wise-directory.ckpt")[ROWS_KEY], tmp_path / "rows.pt")
    whole = Small()
    fill(whole, None)
    rows = torch.load(tmp_path / "rows.pt", weights_only=True)
    assert set(rows) == set(ROWS)
    assert all(torch.equal(rows[key], whole.state_dict()[key]) for key in ROWS)


def test_negative_control_wrong_order_of_rows_is_noticed(four):
    for found in four["disorder"]:
        assert found["directory"] == found["file"] == ROWS
        assert "cannot be written" in found["left out"], "rows that nobody saves are noticed while saving"


REASONS = {
    "rows": "its table 'items' has 61 rows, the model's has 60",
    "missing": "it has a table 'tags' of 3 rows, which the model has not",
    "extra": "the model has a table 'shops' of 4 rows, which it has not",
    "order": "its tables come in the order items, tags, users, the model's in the order items, users, tags",
    "width": "its rows have width 4, the model's have width 8",
}


@pytest.mark.parametrize("form", ["file", "directory"])
@pytest.mark.parametrize("which", REASONS)
def test_another_catalogue_is_refused_with_the_numbers_before_anything_is_loaded(four, which, form):
    for found in four["other_catalogue"]:
        said, untouched = found[f"{which} {form}"]
        assert said.startswith("OtherCatalogueError: the checkpoint belongs to another catalogue: ")
        assert REASONS[which] in said
        assert untouched == "True"


@pytest.mark.parametrize("form", ["file", "directory"])
@pytest.mark.parametrize("which", ["optimizer", "state"])
def test_another_row_optimizer_is_refused_by_name(four, which, form):
    for found in four["other_catalogue"]:
        assert "embeddings.optimizer.sum" in found[f"{which} {form}"][0]


@pytest.mark.parametrize("form", ["file", "directory"])
def test_another_catalogue_is_refused_by_one_process_too(four, shared, form):
    path = shared / f"row_wise-{form}.ckpt"
    with pytest.raises(OtherCatalogueError, match="its table 'items' has 61 rows, the model's has 60"):
        load_alone(path, tables={**TABLES, "items": 60})


def test_another_catalogue_is_refused_where_no_tables_were_noted(four, shared):
    content = checkpoints.read(shared / "row_wise-file.ckpt")
    del content[TABLES_KEY]
    Small().on_load_checkpoint(content)
    with pytest.raises(OtherCatalogueError, match="its tables have 74 rows of width 4, the model's 73 of width 4"):
        Small(tables={**TABLES, "items": 60}).on_load_checkpoint(content)


def test_failure_of_one_rank_is_told_by_all_and_leaves_the_checkpoint_before(four):
    for found in four["failures"]:
        for case, (said, missing, _) in found.items():
            form, rank = case.split()
            assert said.startswith(f"ConfigurationError: the checkpoint {said.split()[3]} cannot be written: rank {rank}: "), (
                said
            )
            assert f"failing/{form}.ckpt" in said
            assert "No space left on device" in said
            assert missing == []
        assert found["file 0"][2] == ["directory.ckpt", "file.ckpt"], "nothing else is left behind"


@pytest.mark.parametrize("what", ["rows", "contents"])
def test_rows_that_one_rank_cannot_read_are_an_error_of_all(four, what):
    for found in four["damaged"]:
        said, untouched = found[what]
        assert said.startswith("ConfigurationError: the rows in "), said
        assert "cannot be read: rank 3: OSError: " in said
        assert untouched == "True"


@pytest.mark.parametrize("what", ["rows", "contents"])
def test_damaged_rows_are_an_error_of_one_process(four, shared, tmp_path, what):
    path = shutil.copytree(shared / "row_wise-directory.ckpt", tmp_path / "damaged.ckpt")
    for file in path.glob("rows-*/*.distcp") if what == "rows" else path.glob("rows-*/.metadata"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigurationError, match=r"the rows in .*damaged\.ckpt/rows-\w+ cannot be read: "):
        load_alone(path)


def test_each_form_replaces_each(four):
    for found in four["replaced"]:
        for number, (epoch, missing, names, folders) in found.items():
            assert epoch == int(number)
            assert missing == []
            assert names == ["last.ckpt"]
            assert folders == (0 if number in ("2", "3") else 1)


def test_rank_killed_while_it_saves_leaves_the_checkpoint_before(two, shared):
    assert two["outlives"] == [None, None]
    assert two.finished.code != 0
    path = shared / "killed" / "directory.ckpt"
    assert len(list(path.glob("rows-*"))) == 2, "it was killed in the middle"
    assert wrong(load_alone(path)[0], None) == []


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from turbogr.checkpoints import CheckpointFiles

files, path = CheckpointFiles(), Path(sys.argv[1])
files.save_checkpoint({"state_dict": {"a": torch.arange(5)}}, path)

def killed(content, file):
    file.write(b"the first part")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

torch.save = killed
files.save_checkpoint({"state_dict": {"a": torch.zeros(5)}}, path)
"""


def test_process_killed_while_it_writes_a_file_leaves_the_file_before(tmp_path):
    path = tmp_path / "last.ckpt"
    ended = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    assert (tmp_path / ".last.ckpt.partial").is_file(), "it was killed in the middle"
    assert torch.equal(checkpoints.read(path)["state_dict"]["a"], torch.arange(5))
    CheckpointFiles().save_checkpoint({"state_dict": {}}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"], "the next one clears up"
