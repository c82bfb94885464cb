"""Collisions against a brute force over all pairs of samples."""

import itertools
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule, Trainer

from tests.callbacks.test_report import batches
from tests.data.make import write_prepared
from turbogr.batch import JaggedBatch
from turbogr.callbacks.collisions import Collisions, StepRows, collisions, rows_of_samples
from turbogr.callbacks.report import MetricsLogger, read_metrics
from turbogr.data.datamodule import SequenceDataModule
from turbogr.errors import ConfigurationError
from turbogr.models.hstu import HSTU
from turbogr.models.retriever import GenerativeRetriever
from turbogr.sparse.table import ItemFeature, SparseFeature
from turbogr.strategies import TurboGRStrategy

Samples = list[set[int]]


def step_of(samples: Samples, follows: bool = True) -> StepRows:
    rows = np.array([row for sample in samples for row in sorted(sample)], dtype=np.int32)
    return StepRows([rows], [np.array([len(sample) for sample in samples], dtype=np.int64)], follows)


def brute(steps: list[Samples], follows: list[bool]) -> dict[str, float]:
    """Every definition word for word."""
    samples = [(index, sample) for index, step in enumerate(steps) for sample in step]
    every = set().union(*(sample for _, sample in samples))
    share = {row: sum(row in sample for _, sample in samples) / len(samples) for row in every}
    pairs = [(a, b) for (s, a), (t, b) in itertools.product(samples, samples) if s != t]
    unions = [set().union(*step) for step in steps]
    later = [index for index in range(1, len(steps)) if follows[index]]
    looked_up = sum(len(unions[s]) for s in later)
    return {
        "samples": len(samples),
        "rows": len(every),
        "alpha": max(share.values(), default=0.0),
        "row": min((row for row in every if share[row] == max(share.values())), default=0),
        "shared": sum(bool(a & b) for a, b in pairs) / len(pairs) if pairs else math.nan,
        "repeated": sum(len(unions[s] & unions[s - 1]) for s in later) / looked_up if looked_up else math.nan,
    }


def check(steps: list[Samples], follows: list[bool]) -> None:
    figures = collisions([step_of(*each) for each in zip(steps, follows, strict=True)])
    assert figures.steps == len(steps)
    for name, value in brute(steps, follows).items():
        assert getattr(figures, name) == pytest.approx(value, abs=1e-12, nan_ok=True), name


SAMPLE = st.sets(st.integers(0, 30), max_size=5)
STEPS = st.lists(st.tuples(st.lists(SAMPLE, max_size=5), st.booleans()), min_size=1, max_size=6)


@given(STEPS.filter(lambda steps: any(samples for samples, _ in steps)))
def test_equals_a_brute_force_over_pairs(steps):
    check([samples for samples, _ in steps], [follows for _, follows in steps])


@pytest.mark.parametrize("users", [63, 64, 65, 200])
def test_across_words_of_64_samples(users):
    draw = np.random.default_rng(users)
    samples = [set(draw.integers(0, 400, draw.integers(0, 9)).tolist()) for _ in range(users)]
    cuts = [0, users // 3, users // 3 + 1, users]
    check([samples[a:b] for a, b in itertools.pairwise(cuts)], [True] * 3)


def test_the_ends_that_the_paper_names():
    """alpha = 1 / N_emb if all features are equally likely, 1 if one feature is in every sample."""
    uniform = collisions([step_of([{row} for row in range(40)]) for _ in range(5)])
    assert uniform.alpha == uniform.shared == 1 / 40
    dense = collisions([step_of([{0, 1 + 10 * step + user} for user in range(10)]) for step in range(5)])
    assert (dense.alpha, dense.row, dense.shared) == (1.0, 0, 1.0)


def test_what_does_not_count():
    """Negative control: pairs of one step, and the first step of an epoch, which sees all updates."""
    alike = [{1}, {1}]
    other = [{2}, {2}]
    assert collisions([step_of(alike), step_of(other)]).shared == 0
    assert collisions([step_of(alike), step_of(alike)]).shared == 1
    steps = [step_of(alike), step_of(alike), step_of(other)]
    assert collisions(steps).repeated == 0.5
    steps[1].follows = False
    assert collisions(steps).repeated == 0
    assert math.isnan(collisions(steps[:1]).shared)
    assert math.isnan(collisions(steps[:1]).repeated)


@given(STEPS.filter(lambda steps: any(samples for samples, _ in steps)), st.integers(2, 4))
def test_ranks_together_are_one_process(steps, ranks):
    """As they are merged at the window's end, some of them with no sample in a step."""
    own = [[step_of(samples[rank::ranks], follows) for samples, follows in steps] for rank in range(ranks)]
    merged = collisions([first.together(others) for first, *others in zip(*own, strict=True)])
    one = collisions([step_of(samples, follows) for samples, follows in steps])
    assert asdict(merged) == pytest.approx(asdict(one), abs=0, nan_ok=True)


def test_rows_of_samples_with_features():
    """Tables lie one after the other; a property of an item belongs to whoever holds the item, in any feature of items."""
    spans = {"items": range(10), "tab": range(10, 13), "author": range(13, 17)}
    author = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3, 3])
    features = {
        "values": torch.tensor([1, 1, 4]),
        "negatives": torch.tensor([[9, 1], [1, 1], [5, 4]]),
        "tab": SparseFeature("tab", torch.tensor([2, 2, 0])),
        "author": ItemFeature("author", author),
    }
    rows, counts = rows_of_samples(features, torch.tensor([0, 0, 2]), 3, spans)
    assert counts.tolist() == [5, 0, 4]
    assert rows.tolist() == [1, 9, 12, 13, 16, 4, 5, 10, 15]
    assert rows.dtype == np.int32
    far = rows_of_samples(features, torch.tensor([0, 0, 2]), 3, {**spans, "more": range(17, 2**31 + 1)})[0]
    assert (far.dtype, far.tolist()) == (np.int64, rows.tolist())
    del features["negatives"]
    assert rows_of_samples(features, torch.tensor([0, 0, 2]), 3, spans)[1].tolist() == [3, 0, 3]


# In training.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_prepared(tmp_path_factory.mktemp("prepared") / "p", num_users=50, num_items=60, max_len=9, seed=1)


def fit(folder, callback, out=None, batch_size=8, **options):
    data = SequenceDataModule(folder, batch_size, 20, 4, num_workers=0, seed=3)
    model = GenerativeRetriever(data.num_items, HSTU(dim=8, num_blocks=1, max_length=20), top_k=(1,), predict_k=1)
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "limit_val_batches": 0, "enable_checkpointing": False}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}
    logger = MetricsLogger(out) if out else False
    trainer = Trainer(**{**settings, **quiet, "logger": logger, "callbacks": [callback], **options})
    trainer.fit(model, datamodule=data)
    return trainer


def expected(folder, window, without=(), batch_size=8, accumulated=1):
    """Brute force over the first steps of training."""
    data = SequenceDataModule(folder, batch_size, 20, 4, num_workers=0, seed=3)
    steps, follows = [], []
    loader = data.train_dataloader()
    for _epoch in range(2):
        for index, batch in enumerate(loader):
            samples = []
            for start, end in itertools.pairwise(batch.offsets.tolist()):
                parts = {"values": batch.values, "targets": batch.targets, "negatives": batch.negatives}
                held = [part[start:end].flatten().tolist() for name, part in parts.items() if name not in without]
                samples.append(set(itertools.chain(*held)))
            if index % accumulated:
                steps[-1] += samples
            else:
                steps.append(samples)
                follows.append(index > 0)
    return brute(steps[:window], follows[:window])


@pytest.mark.parametrize(
    ("window", "without", "accumulated"), [(5, (), 1), (9, ("negatives",), 1), (3, ("negatives", "targets"), 2)]
)
def test_window_of_a_training(folder, window, without, accumulated):
    """Nine steps go over the end of an epoch of six."""
    callback = Collisions(window, without)
    fit(folder, callback, accumulate_grad_batches=accumulated)
    found = expected(folder, window, without, accumulated=accumulated)
    for name, value in found.items():
        assert getattr(callback.figures, name) == pytest.approx(value, abs=1e-12), name
    assert 0 < callback.figures.shared <= 1
    if without:  # negative control
        assert found != expected(folder, window, (), accumulated=accumulated)


def test_stands_beside_the_loss(folder, tmp_path, capsys):
    callback = Collisions(4, ["negatives"])
    fit(folder, callback, tmp_path)
    rows = read_metrics(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows if "train/alpha_tau" in row] == list(range(3, 12)), "from the window's last step on"
    assert all(row["train/alpha_tau"] == 0 and "train/loss" in row for row in rows if "train/alpha_tau" in row)
    assert rows[-1]["train/alpha"] == pytest.approx(callback.figures.alpha)
    said = capsys.readouterr().err
    assert (
        f"collisions of {callback.figures.samples} samples in 4 steps, without negatives: alpha * tau = 0, train/loss" in said
    )
    assert f"alpha = {callback.figures.alpha:.4g}: that share of the samples holds row {callback.figures.row} of items" in said


@pytest.mark.parametrize(("strategy", "tau"), [("auto", 0), ("sync", 0), ("semi_async", 1)])
def test_tau_is_the_mode_s(folder, tmp_path, capsys, strategy, tau):
    callback = Collisions(4)
    trained = "auto" if strategy == "auto" else TurboGRStrategy(mode=strategy)
    fit(folder, callback, tmp_path, strategy=trained)
    assert callback.tau == tau
    assert f"alpha * tau = {callback.figures.alpha * tau:.4g}" in capsys.readouterr().err
    logged = [row["train/alpha_tau"] for row in read_metrics(tmp_path / "metrics.csv") if "train/alpha_tau" in row]
    assert logged == [pytest.approx(callback.figures.alpha * tau)] * len(logged)
    found = expected(folder, 4)
    assert {name: getattr(callback.figures, name) for name in found} == pytest.approx(found)


def test_shorter_training_counts_what_there_was(folder):
    callback = Collisions(50)
    fit(folder, callback, max_steps=3)
    assert callback.figures.steps == 3
    assert callback.figures.alpha == expected(folder, 3)["alpha"]


def test_says_what_is_missing(folder, tmp_path, capsys):
    """In a single step, and in steps of which each is an epoch; nan is neither said nor logged."""
    fit(folder, Collisions(), max_steps=1)
    assert "all of them in one step: there are no two steps to compare, train for 2 or more" in (one := capsys.readouterr().err)
    fit(folder, Collisions(2), tmp_path, limit_train_batches=1)
    assert "no step came behind another of its epoch" in (apart := capsys.readouterr().err)
    logged = [row for row in read_metrics(tmp_path / "metrics.csv") if "train/alpha" in row]
    assert logged
    assert all("train/shared" in row and "train/repeated" not in row for row in logged)
    fit(folder, Collisions(2), max_steps=2)
    assert "of a step's rows were in the step before" in (both := capsys.readouterr().err)  # negative control
    assert "nan" not in one + apart + both


def test_refuses(folder):
    with pytest.raises(ConfigurationError, match="at least 2 steps, got 1"):
        Collisions(1)
    with pytest.raises(ConfigurationError, match="'negative'; GenerativeRetriever has values, targets, negatives"):
        fit(folder, Collisions(without=["negative"]))
    with pytest.raises(ConfigurationError, match="there are none"):
        fit(folder, Collisions(without=["values", "targets", "negatives"]))


class Plain(LightningDataModule):
    def train_dataloader(self):
        return batches([torch.tensor([[0, 1], [1, 1]]), torch.tensor([[1, 5], [7, 6]])])


class PlainModule(GenerativeRetriever):
    """Batches that are no JaggedBatch: the first dimension counts the samples."""

    def sparse_features(self, batch):
        return {"ids": batch}

    def sample_count(self, batch):
        return len(batch)

    def training_step(self, batch, batch_idx):
        return self.embeddings(self.sparse_features(batch)).rows.square().sum() + sum(
            p.sum() for p in self.backbone.parameters()
        )


def test_batches_of_any_kind():
    callback = Collisions(2)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, callbacks=[callback], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(PlainModule(8, HSTU(dim=8, num_blocks=1), top_k=(1,), predict_k=1), datamodule=Plain())
    assert (callback.figures.samples, callback.figures.alpha, callback.figures.row) == (4, 0.75, 1)
    assert (callback.figures.shared, callback.figures.repeated) == (0.5, 0.25)


def test_names_are_those_of_a_jagged_batch(folder):
    """The test's brute force takes a batch apart by itself; `sparse_features` must say the same."""
    data = SequenceDataModule(folder, 8, 20, 4, num_workers=0, seed=3)
    batch = next(iter(data.train_dataloader()))
    assert isinstance(batch, JaggedBatch)
    features = GenerativeRetriever(data.num_items, HSTU(dim=8, num_blocks=1), top_k=(1,), predict_k=1).sparse_features(batch)
    assert list(features) == ["values", "targets", "negatives"]
