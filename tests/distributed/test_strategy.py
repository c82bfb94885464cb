"""TurboGRStrategy on several ranks equals one process, through the public API: weights, dense and sparse optimizer state."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch

from tests.distributed.launch import launch_checks
from tests.distributed.resume_worker import ON_FOUR
from tests.distributed.strategy_cases import (
    FOUR,
    POPULARITY,
    QUIET,
    TWO,
    build,
    fit,
    make_folder,
    relative,
    shared_folder,
)
from turbogr.strategies import TurboGRStrategy

WORKER = "tests.distributed.strategy_worker"
TOLERANCE = 1e-5
MODES = pytest.mark.parametrize("mode", ["sync", "semi_async"])
DTYPES = ("int64", "float32", "float16")
MISTAKES = ("exchange dropped", "factor 1/I left in", "unweighted")


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("prepared") / "p", shared_folder())


@pytest.fixture(scope="session")
def one(folder, tmp_path_factory):
    """Checkpoint of one process under strategy="auto", or in the mode that is asked for, by what is trained."""
    out, made = tmp_path_factory.mktemp("one"), {}

    def trained(mode: str = "auto", sparse_clip_norm: float | None = None, **training) -> Path:
        name = ", ".join(f"{key} {value}" for key, value in {"mode": mode, **training}.items())
        if name not in made:
            made[name] = out / f"{name}.ckpt"
            strategy = "auto" if mode == "auto" else TurboGRStrategy(mode=mode, sparse_clip_norm=sparse_clip_norm)
            fit(folder, 1, strategy, **training).save_checkpoint(made[name])
        return made[name]

    return trained


def launched(what: str, ranks: int, folder: Path, out: Path, **options):
    return launch_checks(WORKER, ranks, out, what, str(ranks), str(folder), str(out), timeout=300, **options)


@pytest.fixture(scope="session")
def four_out(tmp_path_factory):
    return tmp_path_factory.mktemp("four-strategy")


@pytest.fixture(scope="session")
def four(folder, four_out):
    return launched("equal", 4, folder, four_out, nodes=2)


@pytest.fixture(scope="session")
def two_out(tmp_path_factory):
    return tmp_path_factory.mktemp("two-strategy")


@pytest.fixture(scope="session")
def two(folder, two_out):
    return launched("equal", 2, folder, two_out)


@pytest.fixture(scope="session")
def rest_out(tmp_path_factory):
    return tmp_path_factory.mktemp("rest-strategy")


@pytest.fixture(scope="session")
def rest(folder, rest_out):
    return launched("rest", 2, folder, rest_out)


def copies_agree(reports) -> None:
    for member in {report["member"] for report in reports}:
        assert len({report["digest"] for report in reports if report["member"] == member}) == 1


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_equal_one_process(four, four_out, one, name):
    """On two nodes, as far as torchrun is concerned."""
    copies_agree(four[name])
    differences = relative(four_out / f"{name}.ckpt", one(**alone(*FOUR[name])))
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_equal_one_process(two, two_out, one, name):
    copies_agree(two[name])
    differences = relative(two_out / f"{name}.ckpt", one(**alone(*TWO[name])))
    if "bf16" in name:
        assert differences["embeddings.weight"] <= 0.02
    else:
        assert max(differences.values()) <= TOLERANCE, differences


def test_log_q_is_seen(two, two_out, one):
    """Negative control: what two ranks train with the correction is not what one process trains without."""
    two["log q"]
    differences = relative(two_out / "log q.ckpt", one(**POPULARITY, corrected=False))
    assert max(differences.values()) > 100 * TOLERANCE, differences


def test_rows_that_negatives_alone_look_up_travel_half_as_wide(two):
    """Nothing else does: ids are as many, and gradients as wide."""
    sent = {
        name: {dtype: sum(report[name]["sent"].get(dtype, 0) for report in two["on the wire"]) for dtype in DTYPES}
        for name in ("fp32", "fp16")
    }
    added = {name: sum(report[name]["added"] for report in two["on the wire"]) for name in sent}
    assert added["fp32"] == added["fp16"] > 0
    rows = sent["fp32"]["float32"] // 2  # and as much for their gradients
    assert sent["fp32"] == {"int64": sent["fp16"]["int64"], "float32": 2 * rows, "float16": 0}
    assert sent["fp16"]["float32"] == rows
    assert sent["fp16"]["float16"] == rows - added["fp16"] * 8 * 2, "8 values of a row, 2 bytes less each"


def test_tokens_borrow_within_their_rank_whatever_the_groups(two, two_out):
    """The seed of what is shared is the only thing in which the third training differs."""
    first, second, control = (two_out / f"shared, {name}.ckpt" for name in ("one group", "two groups", "another seed"))
    for name in ("shared, one group", "shared, two groups"):
        copies_agree(two[name])
    assert max(relative(first, second).values()) <= TOLERANCE
    assert max(relative(control, second).values()) > 100 * TOLERANCE


def alone(options, training):
    """What one process trains in the place of several ranks."""
    return {**{name: options[name] for name in ("mode", "sparse_clip_norm") if name in options}, **training}


def test_the_delay_is_seen(one):
    """Negative control: what is compared in mode semi_async is not what one process trains without a delay."""
    for training in ({"rows": "lazy_adam", "max_epochs": 2}, {"rows": "lazy_adam", "val_check_interval": 2}):
        differences = relative(one(mode="semi_async", **training), one(**training))
        assert max(differences.values()) > 100 * TOLERANCE, differences


@pytest.mark.parametrize("which", ["sync", "gathered", "distributed"])
def test_four_ranks_are_resumed_bit_for_bit(four, which):
    """In mode sync, and in mode semi_async from both forms of a checkpoint."""
    for report in four[f"resumed, {which}"]:
        resumed, whole = report["ends"]
        assert resumed == whole
        assert resumed["digest"] != report["stopped"]


@MODES
@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_are_resumed_whatever_loads_their_batches(four, name, mode):
    """With loaders' workers behind a validation; with loaders of unknown length within an epoch and at its end."""
    for found in four[f"resumed, {name}, {mode}"]:
        assert len(found) == 1 + len(ON_FOUR[name].stops)
        assert all(resumed == found["whole"] for resumed in found.values())


@pytest.mark.parametrize("form", ["gathered", "distributed"])
def test_one_rank_goes_on_from_four(four, four_out, folder, tmp_path, form):
    """Within an epoch: delayed rows of all members find their way, and are missed where they are left out."""
    four[f"resumed, {form}"]
    expected = four_out / "whole-semi_async-2-gathered-2.ckpt"
    last, largest = four_out / f"last-semi_async-2-{form}-2.ckpt", []
    for left_out in (False, True):
        with patch("turbogr.strategies.turbogr.own_delayed", lambda *_: None) if left_out else nullcontext():
            trainer = fit(folder, 1, TurboGRStrategy(), ckpt_path=last, max_epochs=2, val_check_interval=3)
        trainer.save_checkpoint(tmp_path / "end.ckpt")
        largest.append(max(relative(tmp_path / "end.ckpt", expected).values()))
    assert largest[0] <= TOLERANCE
    assert largest[1] > 100 * TOLERANCE


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(four, four_out, one, name):
    four[name]
    differences = relative(four_out / f"{name}.ckpt", one(rows="adagrad"))
    assert max(differences.values()) > 100 * TOLERANCE, differences


@MODES
@pytest.mark.parametrize("loader", ["sized", "unsized"])
def test_ranks_with_more_batches_stop_with_the_others(rest, loader, mode):
    """Rank 0 has 5 batches an epoch, rank 1 has 8."""
    reports = rest[f"uneven, {loader}, {mode}"]
    for report in reports:
        assert (report["steps"], report["epochs"]) == (15, 3)
    assert reports[0]["dense"] == reports[1]["dense"]


@pytest.mark.parametrize("loader", ["sized", "unsized"])
def test_uneven_validation_is_refused_on_all_ranks(rest, loader):
    for text in rest[f"uneven validation, {loader}"]:
        assert "different numbers of batches (rank 0 has 2, rank 1 has" in text


@MODES
def test_a_run_resumed_from_a_directory_equals_an_uninterrupted_one(rest, mode):
    """With dropout and validations, bit for bit; from files, in test_resume.py."""
    for report in rest[f"resumed from a directory, {mode}"]:
        resumed, whole = report["ends"]
        assert resumed == whole
        assert resumed["digest"] != report["stopped"]  # it did train on


@pytest.mark.parametrize(("mode", "name"), [("sync", "SIGTERM"), ("semi_async", "SIGINT")])
def test_a_signal_on_one_rank_stops_all(rest, mode, name):
    reports = rest[f"signalled, {mode}"]
    assert reports[0] == reports[1]
    assert reports[0]["said"].startswith(f"interrupted by {name}; resume from")
    assert 3 <= reports[0]["step"] <= 5
    assert rest["terminated"] == ["SIGTERMException"] * 2


def test_early_stopping(rest):
    """The second validation is no better by 1.0."""
    assert rest["early stopped"] == [4, 4]


def test_evaluation_equals_one_process(rest, folder, one):
    model, data = build(folder, 1)
    trainer = pl.Trainer(**QUIET, max_epochs=1, limit_train_batches=4, devices=1, enable_checkpointing=False)
    trainer.fit(model, data)
    expected = {**trainer.validate(model, data, verbose=False)[0], **trainer.test(model, data, verbose=False)[0]}
    users, items, _ = zip(*trainer.predict(model, data), strict=True)
    best = dict(zip(torch.cat(users).tolist(), torch.cat(items).tolist(), strict=True))
    for results in zip(*(report["results"] for report in rest["evaluated"]), strict=True):
        for result in results:
            assert {name: result[name] for name in expected} == pytest.approx(expected, abs=2e-3)
        predicted = {u: i for r in results for u, i in zip(r["users"], r["items"], strict=True)}
        assert sum(len(r["users"]) for r in results) == len(predicted)
        assert predicted.keys() == best.keys()  # every user once
        assert sum(predicted[user] == best[user] for user in best) >= 0.98 * len(best)  # ranks round differently
    same_weights = rest["evaluated"][0]["results"]
    metrics = [{k: v for k, v in result.items() if "/" in k} for result in same_weights]
    assert metrics[0] == metrics[1]  # however they are sharded


def test_rows_follow_the_schedule_and_are_clipped_if_asked(rest, rest_out, one):
    rest["options of rows"]
    expected = one(rows="adagrad", scheduled=True)
    weight = {
        name: relative(rest_out / f"rows-{name}.ckpt", expected)["embeddings.weight"] for name in ("plain", "follow", "clipped")
    }
    assert weight["plain"] <= TOLERANCE
    assert weight["follow"] > 100 * TOLERANCE
    # AdaGrad does not care for the size of gradients that are all clipped to one norm, but its state does.
    state = torch.load(rest_out / "rows-clipped.ckpt", weights_only=True)["state_dict"]["embeddings.optimizer.sum"]
    assert 0 < float(state.sum().sqrt()) <= 4 * 1e-6 * 1.001


@MODES
def test_checkpoints_within_epochs_and_workers_change_nothing(rest, rest_out, mode):
    """Batches are in flight while every step of two epochs is saved, in both forms; nor does it matter how many there are."""
    for report in rest[f"neutral, {mode}"]:
        assert len(set(report.values())) == 1, report
    assert rest["neutral, sync"] != rest["neutral, semi_async"]
    for form in ("gathered", "distributed"):
        assert len(list((rest_out / f"neutral-{mode}-{form}").glob("*.ckpt"))) == 8


def test_mixed_precision(rest, rest_out, one):
    """Copies agree bit for bit, and the training is that of one process as far as bfloat16 can tell."""
    copies_agree(rest["mixed"])
    expected = one(rows="adagrad", precision="bf16-mixed")
    rows = ("embeddings.weight", "embeddings.optimizer.sum")
    for name, difference in relative(rest_out / "mixed.ckpt", expected).items():
        assert name not in rows or difference <= 0.02, (name, difference)
    plain = relative(one(rows="adagrad"), expected)
    assert plain["embeddings.optimizer.sum"] > 0, "it does compute in bfloat16"


def test_tables_that_another_trainer_divided_are_refused(rest):
    for text in rest["divided otherwise"]:
        assert "already been divided" in text


def test_what_is_in_flight_is_ids_not_rows(rest):
    """Six batches in flight keep at most four batches' embeddings more than sync does; so do two and eight."""
    for found in rest["live tensors"]:
        most = found["sync, 6"] + 4 * found["batch"]
        assert found["batch"] <= found["sync, 6"]
        assert max(found[f"semi_async, {number}"] for number in (2, 6, 8)) <= most, found
        assert found["hoarded"] > most, found
