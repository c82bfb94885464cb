"""Evaluation shared by ranks: sharded catalogue, metrics, data and callbacks give what one process gives."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.data.make import write_prepared
from tests.distributed import evaluation_worker as worker
from tests.distributed.launch import Checks, launch_checks

USERS = 83  # of 16 a batch, the last has 3: of 4 ranks one has none of them


class Run(NamedTuple):
    """What the ranks and one process did."""

    ranks: int
    checks: Checks
    one: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data") / "prepared", USERS, worker.ITEMS, min_len=4, max_len=20, seed=1)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, prepared: Path) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one")
    return folder, worker.evaluate(folder, prepared, "auto", 16)


@pytest.fixture(scope="module", params=[2, 4])
def run(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    prepared: Path,
    one_process: tuple[Path, dict[str, Any]],
) -> Run:
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    arguments = (str(prepared), str(folder))
    checks = launch_checks("tests.distributed.evaluation_worker", request.param, folder / "launch", *arguments, timeout=240.0)
    return Run(request.param, checks, one_process[1], folder)


@pytest.mark.parametrize("sharding", ["row_wise", "table_wise", "uneven"])
def test_a_sharded_catalogue_gives_the_bits_of_one_process(run: Run, sharding: str):
    assert run.checks[sharding] == [[]] * run.ranks


def test_without_the_part_of_one_rank_the_results_differ(run: Run):
    for found in run.checks["without_a_part"]:
        assert len(found) == run.ranks
    for silent in range(run.ranks):
        wrong = [what for found in run.checks["without_a_part"] for what in found[f"without rank {silent}"]]
        assert {"filtered ranks", "unfiltered ranks", "filtered items", "filtered scores"} <= set(wrong)


def test_nan_on_one_rank(run: Run):
    for found in run.checks["damaged"]:
        assert found == {"wrong": [], "ranks": [299] * 12}


def test_a_batch_without_any_user(run: Run):
    assert run.checks["nobody"] == [[[0], [0, 4], [0, 4]]] * run.ranks


def test_a_row_that_is_none_is_refused_by_all_ranks(run: Run):
    for found in run.checks["refused"]:
        assert found["wrong"] == []
        target, seen = found["said"]
        assert target.endswith("is outside the catalogue's rows 0..49")
        assert seen == "seen item -3 is outside the catalogue's rows 0..49"


def test_collectives_do_not_depend_on_where_the_users_are(run: Run):
    for found in run.checks["collectives"]:
        assert found["ranks 40 spread"] == found["ranks 40 one"] == ["all_gather"] * 4 + ["all_reduce"] * 2
        assert found["top 40 spread"] == found["top 40 one"] == ["all_gather"] * 4 + ["all_to_all_single"]
        assert found == run.checks["collectives"][0]


def test_memory_is_a_chunk(run: Run):
    # int64 keys are twice the scores; a rank's part alone has 60,000 / ranks x 8 floats, nobody's copies of it are counted.
    for largest in run.checks["largest_tensor"]:
        assert largest <= 2 * 1.25 * 2**16 < 60_000 // run.ranks * 8 * 4


def test_metrics_of_several_ranks_are_those_of_one_process(run: Run):
    for found in run.checks["metrics"]:
        expected = found["one process"]
        assert 0 < expected["MRR"] < expected["HR@200"]
        for name, values in found.items():
            assert values == expected, name


def test_validation_and_test_through_the_trainer(run: Run):
    for found in run.checks["evaluate"]:
        assert found["val"] == run.one["val"]
        assert found["test"] == run.one["test"]
    assert run.one["val"] != {name.replace("test/", "val/"): value for name, value in run.one["test"].items()}


def test_no_rank_is_told_what_it_should_have_done(run: Run):
    for found in run.checks["evaluate"]:
        assert [text for text in found["warnings"] if "sync_dist" in text or "batch indices" in text or "sampler" in text] == []


def test_the_report_of_a_test_is_written_once_and_over_all_users(run: Run, one_process: tuple[Path, dict[str, Any]]):
    found, expected = (json.loads((folder / "test.json").read_text()) for folder in (run.folder / "run", one_process[0]))
    assert found == expected
    assert set(found["metrics"]) == {"model", "popularity", "random"}
    assert (run.folder / "run" / "test.png").is_file()
    printed = [text.count("Test of weights in memory") for text in run.checks.finished.outputs]
    assert printed == [1] + [0] * (run.ranks - 1)


def test_predictions_are_one_file(run: Run, one_process: tuple[Path, dict[str, Any]]):
    folder = run.folder / "run"
    assert sorted(path.name for path in folder.iterdir()) == ["predictions.parquet", "test.json", "test.png"]
    found, expected = (pq.read_table(path / "predictions.parquet") for path in (folder, one_process[0]))
    assert found.schema == expected.schema
    assert len(found) == USERS
    assert found["user_id"].equals(expected["user_id"])
    assert found["item_ids"].to_pylist() == expected["item_ids"].to_pylist()
    # The queries come from products of other shapes.
    scores = [table["scores"].combine_chunks().flatten().to_numpy() for table in (found, expected)]
    np.testing.assert_allclose(*scores, rtol=1e-5, atol=1e-6)
    printed = [text.count(f"Predictions for {USERS} users") for text in run.checks.finished.outputs]
    assert printed == [1] + [0] * (run.ranks - 1)


def test_throughput_is_summed_at_logged_steps_only(run: Run, prepared: Path):
    tokens = sum(batch.num_tokens for _ in range(2) for batch in worker.data(prepared, 16).train_dataloader())
    for found in run.checks["train"]:
        assert found["tokens"] == tokens
        assert found["average"] > 0
        assert found["steps"] == 12
        assert set(found["sums"]) <= {0, 3, 6, 9, 12}


def test_every_line_is_printed_once(run: Run):
    outputs = run.checks.finished.outputs
    lines = ["epoch 1/2, step 6", "epoch 2/2, step 12", "Training finished", "dense parameters", f"{run.ranks} ranks: a step"]
    for line in lines:
        assert [text.count(line) for text in outputs] == [1] + [0] * (run.ranks - 1), line
    owned = worker.ITEMS // (2 if run.ranks == 4 else run.ranks)
    assert f"item table of {worker.ITEMS} rows x 16, of them {owned} on rank 0" in outputs[0]
    assert [found["stale"] for found in run.checks["train"]] == [False] * run.ranks
    metrics = (run.folder / "trained" / "metrics.csv").read_text()
    assert "train/tokens_per_second" in metrics.splitlines()[0]


def test_a_rank_that_fails_in_prediction_ends_all_and_leaves_nothing_behind(run: Run):
    results = run.checks["failing"]
    for found in results:
        assert "out of memory" in found["error"]
        assert found["own"] == []
        assert found["seconds"] < 30, "the others did not wait for the timeout"
    # The file of the prediction before is still there, untouched: see test_predictions_are_one_file.
