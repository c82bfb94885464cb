"""BalancedBatchSampler in a plain torch DataLoader, without anything else of turbogr."""

from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from turbogr.data.balance import CostModel
from turbogr.data.batch_sampler import BalancedBatchSampler
from turbogr.errors import ConfigurationError

LENGTHS = np.random.default_rng(0).integers(1, 100, 203)


class Texts(Dataset):
    """Sample i is a sequence of LENGTHS[i] tokens i."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((int(LENGTHS[index]),), index)

    def __len__(self) -> int:
        return len(LENGTHS)


def joined(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *samples])


def loaders(ranks: int = 1, workers: int = 0, **options: Any) -> list[DataLoader]:
    settings = {"batch_size": 4, "tokens_per_batch": "auto", "seed": 5} | options
    samplers = [BalancedBatchSampler(LENGTHS, **settings, rank=rank, ranks=ranks) for rank in range(ranks)]
    return [DataLoader(Texts(), batch_sampler=s, collate_fn=joined, num_workers=workers) for s in samplers]


def epoch_of(loader: DataLoader) -> list[list[int]]:
    return [batch.unique().tolist() for batch in loader]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("options", [{}, {"tokens_per_batch": 300}, {"tokens_per_batch": None}, {"balance": "off"}])
def test_every_sample_once_an_epoch(ranks: int, options: dict):
    every = loaders(ranks, **options)
    orders = []
    for epoch in range(2):
        for loader in every:
            loader.batch_sampler.set_epoch(epoch)
        found = [epoch_of(loader) for loader in every]
        assert {len(batches) for batches in found} == {len(every[0])}
        assert sorted(i for batches in found for batch in batches for i in batch) == list(range(203))
        orders.append(found)
    assert orders[0] != orders[1]
    for loader in every:
        loader.batch_sampler.set_epoch(0)
    assert [epoch_of(loader) for loader in every] == orders[0]


def test_ranks_have_equally_many_tokens():
    def difference(balance: str) -> int:
        steps = zip(*loaders(3, batch_size=12, balance=balance), strict=True)
        return max(max(map(len, step)) - min(map(len, step)) for step in steps)

    assert difference("tokens") <= 5
    assert difference("off") > 100


def test_workers_change_nothing():
    (alone,), (helped,) = loaders(), loaders(workers=2)
    for _ in range(2):
        assert epoch_of(alone) == epoch_of(helped)


def test_a_restored_position_goes_on_within_its_epoch():
    (whole,) = loaders()
    expected = [epoch_of(whole) for _ in range(3)]
    (first,) = loaders()
    epoch_of(first)
    assert [batch.unique().tolist() for batch in islice(first, 10)] == expected[1][:10]
    (second,) = loaders()
    second.batch_sampler.load_state_dict(first.batch_sampler.state_dict())
    second.batch_sampler.set_epoch(1)  # as every loop over epochs does
    assert epoch_of(second) == expected[1][10:]
    second.batch_sampler.set_epoch(2)
    assert epoch_of(second) == expected[2]
    # What was not restored starts at the start.
    second.batch_sampler.set_epoch(1)
    assert epoch_of(second) == expected[1]
    # With workers, who draw ahead, by one's own count.
    (third,) = loaders(workers=2)
    third.batch_sampler.load_state_dict({"batches": len(third) + 10})
    assert epoch_of(third) == expected[1][10:]


def test_a_share_may_be_empty():
    sampler = BalancedBatchSampler([5, 5, 5], 1, balance="tokens", rank=3, ranks=4)
    assert list(sampler) == [[]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "ranks": 2}, "rank is 2, ranks is 2"),
        ({"balance": "token"}, "balance is 'token'; choose one of off, tokens, attention"),
        ({"balance": "attention"}, "needs balance_cost"),
        ({"balance_cost": CostModel()}, 'balance_cost is the cost of balance "attention", but balance is "tokens"'),
        ({"balance_method": "fast"}, "balance_method is 'fast'"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank is 0"),
        ({"balance": "off", "max_tokens_per_rank": 5}, "needs balance"),
        ({"balance": "off", "balance_method": "karmarkar_karp"}, 'balance_method "karmarkar_karp" needs balance'),
        ({"max_tokens_per_rank": 50}, "max_tokens_per_rank is 50, but the longest history has 99 tokens"),
        ({"tokens_per_batch": 0}, "tokens_per_batch is 0"),
        ({"tokens_per_batch": "automatic"}, "tokens_per_batch is 'automatic'"),
        ({"lengths": [3, 0]}, "sample 1 has 0 tokens"),
        ({"lengths": []}, "0 training users has no batch"),
    ],
)
def test_impossible_options_are_refused(options: dict, message: str):
    with pytest.raises(ConfigurationError, match=message):
        BalancedBatchSampler(**({"lengths": LENGTHS, "batch_size": 4} | options))


class Tokens(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches: list[list[int]] = []

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.batches.append(batch.unique().tolist())
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_under_lightning():
    """Epochs follow each other, whoever calls `set_epoch`."""
    (loader,), (again,) = loaders(), loaders()
    model = Tokens()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(model, loader)
    assert model.batches == epoch_of(again) + epoch_of(again)
