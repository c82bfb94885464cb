import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from torchmetrics.retrieval import RetrievalHitRate, RetrievalMRR, RetrievalNormalizedDCG

from turbogr.errors import ConfigurationError
from turbogr.metrics import MRR, NDCG, HitRate, retrieval_metrics
from turbogr.ops.catalogue import target_ranks

RANKS = torch.tensor([0, 1, 9, 10, 4999, 0])


def test_known_values():
    assert {k: float(v) for k, v in HitRate([1, 10])(RANKS).items()} == pytest.approx({"HR@1": 2 / 6, "HR@10": 4 / 6})
    ndcg = (1 + 1 + 1 / math.log2(3) + 1 / math.log2(11)) / 6
    assert {k: float(v) for k, v in NDCG([1, 10])(RANKS).items()} == pytest.approx({"NDCG@1": 2 / 6, "NDCG@10": ndcg})
    assert float(MRR()(RANKS)["MRR"]) == pytest.approx((2 + 1 / 2 + 1 / 10 + 1 / 11 + 1 / 5000) / 6)


@pytest.mark.parametrize("k", [1, 5, 10, 50, 200])
def test_equal_torchmetrics_on_explicit_scores(k):
    generator = torch.Generator().manual_seed(k)
    queries, table = torch.randn(40, 6, generator=generator), torch.randn(200, 6, generator=generator)
    targets = torch.randint(200, (40,), generator=generator)
    scores = queries @ table.T
    relevant = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, targets[:, None], True)
    users = torch.arange(40)[:, None].expand_as(scores)
    scores = scores.double() - float(scores.min()) + 1  # torchmetrics' MRR takes a score <= 0 for not retrieved
    flat = scores.flatten(), relevant.flatten(), users.flatten()
    ours = retrieval_metrics([k])(target_ranks(queries, table, targets))
    assert float(ours[f"HR@{k}"]) == pytest.approx(float(RetrievalHitRate(top_k=k)(*flat[:2], indexes=flat[2])))
    assert float(ours[f"NDCG@{k}"]) == pytest.approx(float(RetrievalNormalizedDCG(top_k=k)(*flat[:2], indexes=flat[2])))
    assert float(ours["MRR"]) == pytest.approx(float(RetrievalMRR()(*flat[:2], indexes=flat[2])))
    wrong = retrieval_metrics([k])(target_ranks(queries, table, targets).flip(0) + 1)
    assert float(ours["MRR"]) != pytest.approx(float(wrong["MRR"])), "negative control"


@settings(max_examples=30, deadline=None)
@given(ranks=st.lists(st.integers(0, 3000), min_size=2, max_size=40), data=st.data())
def test_batches_and_merged_states_equal_one_update(ranks, data):
    cut = data.draw(st.integers(0, len(ranks)))
    ranks = torch.tensor(ranks)
    whole, batches = retrieval_metrics([1, 10, 2000]), retrieval_metrics([1, 10, 2000])
    whole.update(ranks)
    left, right = copy.deepcopy(batches), copy.deepcopy(batches)
    for part, rank in ((ranks[:cut], left), (ranks[cut:], right)):
        batches.update(part)
        rank.update(part)
    want = {name: float(value) for name, value in whole.compute().items()}
    assert {name: float(value) for name, value in batches.compute().items()} == pytest.approx(want, rel=1e-6)
    for name, metric in left.items(keep_base=True, copy_state=True):
        other = right[name]
        for state, reduction in metric._reductions.items():  # what the sync over processes does
            setattr(metric, state, reduction(torch.stack([getattr(metric, state), getattr(other, state)])))
        metric._computed = None
        for key, value in metric.compute().items():
            assert float(value) == pytest.approx(want[key], rel=1e-6)
            if key != "MRR":
                assert float(value) == want[key], "whole numbers: not even rounding differs"


def test_two_thousand_and_order():
    metric = HitRate([2000, 10, 1])
    assert list(metric(torch.tensor([1999, 2000]))) == ["HR@1", "HR@10", "HR@2000"]
    assert [float(value) for value in metric.compute().values()] == [0, 0, 0.5]
    assert set(retrieval_metrics([5, 10], prefix="val/")(RANKS)) == {
        "val/HR@5", "val/HR@10", "val/NDCG@5", "val/NDCG@10", "val/MRR"
    }  # fmt: skip


def test_state_does_not_grow_with_users():
    metrics = retrieval_metrics([10])
    for _ in range(5):
        metrics.update(torch.arange(1000))
    sizes = [state.numel() for metric in metrics.values() for state in metric.metric_state.values()]
    assert sorted(sizes) == [1, 2, 11, 11]


def test_any_way_of_sharing_users_gives_the_same_bits():
    ranks = torch.randint(0, 10**6, (5000,), generator=torch.Generator().manual_seed(0)).pow(2) // 10**6
    whole = retrieval_metrics([1, 10, 200])
    whole.update(ranks)
    expected = whole.compute()
    assert float(expected["MRR"]) == pytest.approx(float((1 / (ranks.double() + 1)).mean()), rel=1e-7)
    for parts in (2, 3, 7, 6000):  # of 6000 parts some are empty
        shared = [retrieval_metrics([1, 10, 200]) for _ in range(3)]
        for number, part in enumerate(ranks.tensor_split(parts)):
            shared[number % 3].update(part)
        # What torchmetrics does with the states of several processes.
        for name, metric in shared[0].items():
            for state in metric.metric_state:
                setattr(metric, state, sum(getattr(each[name], state) for each in shared))
        assert {name: float(value) for name, value in shared[0].compute().items()} == {
            name: float(value) for name, value in expected.items()
        }
    halves = [float((1 / (part.double() + 1)).sum()) for part in ranks.tensor_split(7)]
    assert sum(halves) != float((1 / (ranks.double() + 1)).sum()), "negative control: sums of float64 depend on it"


def test_without_users_is_zero_with_a_warning():
    for metric in (HitRate([10]), NDCG([10]), MRR()):
        with pytest.warns(UserWarning, match="before the ``update`` method"):
            assert [float(value) for value in metric.compute().values()] == [0]


@pytest.mark.parametrize("top_k", [[], [0], [-5, 10], [10, 10], [2.5], [True], ["10"]])
@pytest.mark.parametrize("metric", [HitRate, NDCG, retrieval_metrics])
def test_impossible_top_k(metric, top_k):
    with pytest.raises(ConfigurationError, match="top_k"):
        metric(top_k)


@pytest.mark.parametrize("ranks", [torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64)])
@pytest.mark.parametrize("metric", [HitRate(), NDCG(), MRR()])
def test_wrong_ranks(metric, ranks):
    with pytest.raises(ValueError, match="ranks are"):
        metric.update(ranks)


class Evaluated(LightningModule):
    def __init__(self, step_wise):
        super().__init__()
        self.step_wise, self.metrics = step_wise, retrieval_metrics([10], prefix="val/")

    def validation_step(self, batch, _):
        if self.step_wise:
            self.log_dict(self.metrics(batch), batch_size=len(batch), on_step=False, on_epoch=True)
        else:
            self.metrics.update(batch)

    def on_validation_epoch_end(self):
        if not self.step_wise:
            self.log_dict(self.metrics.compute())
        self.metrics.reset()


@pytest.mark.parametrize("step_wise", [True, False])
def test_under_lightning(step_wise, tmp_path):
    trainer = Trainer(
        logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu", default_root_dir=tmp_path
    )
    loader = DataLoader(RANKS, batch_size=4)
    for _ in range(2):  # the second run starts from zero again
        [logged] = trainer.validate(Evaluated(step_wise), loader, verbose=False)
        want = retrieval_metrics([10], prefix="val/")(RANKS)
        assert logged == pytest.approx({name: float(value) for name, value in want.items()})


def test_reset_in_inference_mode():
    metrics = retrieval_metrics([10])
    with torch.inference_mode():
        metrics.update(RANKS)
        metrics.reset()
    metrics.update(RANKS)
    assert float(metrics.compute()["HR@10"]) == pytest.approx(4 / 6)
