import numpy as np
import pytest
import torch

from turbogr.baselines import EvaluationData, evaluate_baselines
from turbogr.batch import NO_TARGET, JaggedBatch
from turbogr.errors import DataError


class Prepared:
    def __init__(self, counts):
        self.counts, self.asked = np.asarray(counts, dtype=np.int64), []

    def training_counts(self, protocol):
        self.asked.append(protocol)
        return self.counts


class Data:
    """Hand-made: every user's history is `seen`, one batch every `size` users."""

    protocol = "three_way"

    def __init__(self, counts, users, size=2):
        self.prepared, self.users, self.size = Prepared(counts), users, size

    @property
    def num_items(self):
        return len(self.prepared.counts)

    def test_dataloader(self):
        for start in range(0, len(self.users), self.size):
            part = self.users[start : start + self.size]
            values = torch.tensor([item for history, _ in part for item in history])
            offsets = torch.tensor([0, *np.cumsum([len(history) for history, _ in part]).tolist()])
            targets = torch.full_like(values, NO_TARGET)
            targets[offsets[1:] - 1] = torch.tensor([target for _, target in part])
            times = torch.zeros_like(values)
            users = torch.arange(start, start + len(part))
            yield JaggedBatch(values, offsets, times, targets, times, users, 50, seen=values, seen_offsets=offsets)


def test_popularity_by_hand():
    # By popularity: 3 (9 events), 0 and 4 (5 each, tie: row 0 first), 1, 2.
    data = Data([5, 2, 1, 9, 5], [([3], 0), ([1, 2], 4), ([0, 3, 4], 2), ([0, 4, 0], 0)])
    assert isinstance(data, EvaluationData)
    # Ranks: 0 (3 is seen), 2 (3 and 0 before), 1 (1 before), 1 (3 before; the target is seen and stays, 4 is filtered).
    row = evaluate_baselines(data, [1, 2])["popularity"]
    ndcg = (1 + 2 / np.log2(3)) / 4
    assert row == pytest.approx({"HR@1": 1 / 4, "HR@2": 3 / 4, "NDCG@1": 1 / 4, "NDCG@2": ndcg, "MRR": (1 + 1 / 3 + 1) / 4})
    assert data.prepared.asked == ["three_way"]


def test_random_scores_k_of_the_unseen():
    generator = np.random.default_rng(0)
    users = [(generator.choice(200, 20, replace=False).tolist(), int(generator.integers(200))) for _ in range(3000)]
    data = Data(generator.integers(1, 100, 200), users, size=100)
    rows = evaluate_baselines(data, [10])
    expected = 10 / 180
    error = (expected / 3000) ** 0.5
    assert abs(rows["random"]["HR@10"] - expected) < 4 * error
    assert abs(rows["popularity"]["HR@10"] - expected) < 4 * error, "targets unrelated to counts: no better than random"


def test_seed_decides():
    data = Data([1] * 50, [([1], 2), ([3], 40), ([5], 20)])
    first, again, other = (evaluate_baselines(data, [10], seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first["random"] != other["random"]
    assert first["popularity"] == other["popularity"]


def test_batches_without_held_out_item():
    with pytest.raises(DataError, match="user row 1 of the test batches has no held-out item"):
        evaluate_baselines(Data([1, 1], [([0], 1), ([1], NO_TARGET)]))
