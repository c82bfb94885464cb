"""SequenceDataModule: a prepared folder as batches for training, validation, test and prediction."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from turbogr.batch import JaggedBatch
from turbogr.data.balance import CostModel
from turbogr.data.distributions import (
    POPULARITY_EXPONENT,
    Float64Array,
    NegativeSampling,
    check_sampling,
    negative_sampler,
    probabilities,
)
from turbogr.data.features import FeatureTable, chosen
from turbogr.data.histories import HELD_OUT, EvaluationHistories, Protocol, Stage, TrainingHistories, target_counts
from turbogr.data.negatives import check_seed
from turbogr.data.prepared import PreparedData
from turbogr.data.resuming import differences, settle_progress
from turbogr.data.samplers import EpochBatches, EvaluationBatches, EvaluationLoader, TrainingLoader
from turbogr.data.sharing import Balance, BalanceMethod, Sharing, TokensPerBatch, check_tokens_per_batch
from turbogr.data.stochastic_length import StochasticLength
from turbogr.errors import ConfigurationError, DataError
from turbogr.seeds import global_seed


class SequenceDataModule(LightningDataModule):
    """Loads a prepared folder as `JaggedBatch`es.

    Training: one history a user, its newest `max_length` tokens, each with `num_negatives` draws from the catalogue.
    The order of users depends on (seed, epoch) and the draws on (seed, epoch, user, position), never on workers or on where a
    run was interrupted: `Trainer.fit(ckpt_path=…)` trains exactly the batches that were not yet trained.

    Under a trainer with W ranks, batch n of training is the batch n that one process with W times `batch_size` would train on,
    and each rank takes its share of it: a slice, or what `balance` gives it. The batches of evaluation are shared in slices.
    Nothing is dropped or repeated, all ranks have equally many batches, and a rank's share of a batch with few users may be
    empty. The trainer's `use_distributed_sampler` changes nothing. A run may be resumed with another number of ranks if W times
    `batch_size` (or `tokens_per_batch`) stays, and with other options of balancing.

    Balancing (TurboGR, section 4.1.3): `tokens_per_batch` makes the steps equally long, `balance` makes the ranks of a step
    equal. The first changes what a step trains, the second only where. Gradients are those of the whole step either way under
    TurboGRStrategy, which weights each rank by its tokens; other strategies average ranks as if they had equally many.
    `stochastic_length` also makes the ranks equal, but by leaving tokens out.

    Evaluation: one history a user, its last token's target is the held-out item, `seen` the items to filter (see
    `EvaluationHistories`). Validation, test and prediction keep the order of user rows and never drop a user.

    Args:
        path: folder written by `turbogr data prepare`.
        batch_size: users per training batch, on each rank; without effect on training where `tokens_per_batch` is a number.
        max_length: most tokens of a history; of longer ones the newest are used.
        num_negatives: negatives drawn for each training token.
        negative_sampling: what they are drawn from: the catalogue, "uniform", by "log_uniform" of the rank in popularity, or by
            "popularity"; or "in_batch", the targets of the batch's other tokens, which no longer depends on (seed, epoch,
            user, position) alone. Popularity is how often an item is a target of training. The model's loss corrects its
            logits by `log_q`; see `turbogr.data.distributions.probabilities`.
        popularity_exponent: for "popularity", a power of the popularity: 1 is in proportion, 0 uniform.
        protocol: "three_way" (last event test, the one before validation) or "published" (last event both); None is the
            prepared folder's own.
        eval_batch_size: users per batch of validation, test and prediction, on each rank; None is `batch_size`.
        num_workers: processes that build batches; "auto" is none on two cores or fewer (building takes a few milliseconds, the
            model wants the cores), else half the cores up to 4.
        seed: of order and negatives; None is Lightning's global seed (`seed_everything`), or 0 where none is set.
        drop_last: drop an epoch's last training batch where it is smaller than the others.
        query_time: in prediction, when the recommendation is asked for, in the unit of the data; None is the time of each
            user's last event.
        features: which of the prepared folder's features the model gets: "all", or a list of names ([] is none).
        tokens_per_batch: tokens per training batch, on each rank and in the mean: batches have as many users as make up so many
            tokens. "auto" is `batch_size` times the mean tokens of a user. An epoch has the same number of batches whatever its
            order, and they differ by about half a history. None counts users.
        balance: what the ranks of a step are to have equally much of: "tokens", or "attention", the cost of `balance_cost`;
            "off" gives each equally many users.
        balance_cost: for balance "attention", what a history of n tokens costs, linear n + quadratic n^2. Measured
            (`CostModel.fitted`), or counted: an HSTU of width D has linear 1 and quadratic 1 / (5 D).
        balance_method: "greedy", longest first, or "karmarkar_karp", by largest differences; see `turbogr.data.balance.assign`.
        max_tokens_per_rank: with `balance`, most tokens that a rank may have in a step (its memory), counted before
            `stochastic_length` leaves some out; None is no limit.
        stochastic_length: thin long histories at random, so that the ranks of a step have equal loads. This changes what is
            trained on; None trains on all tokens. See `turbogr.data.stochastic_length`.

    Raises:
        ConfigurationError: an option is out of range.
        DataError: the folder cannot be used.
    """

    def __init__(
        self,
        path: str | Path,
        batch_size: int = 128,
        max_length: int = 200,
        num_negatives: int = 128,
        *,
        protocol: Literal["three_way", "published"] | None = None,
        eval_batch_size: int | None = None,
        num_workers: int | Literal["auto"] = "auto",
        seed: int | None = None,
        drop_last: bool = False,
        query_time: int | None = None,
        features: Literal["all"] | list[str] = "all",
        tokens_per_batch: TokensPerBatch = None,
        balance: Balance = "off",
        balance_cost: CostModel | None = None,
        balance_method: BalanceMethod = "greedy",
        max_tokens_per_rank: int | None = None,
        stochastic_length: StochasticLength | None = None,
        negative_sampling: NegativeSampling = "uniform",
        popularity_exponent: float = POPULARITY_EXPONENT,
    ) -> None:
        super().__init__()
        _at_least_one(batch_size=batch_size, max_length=max_length, num_negatives=num_negatives)
        check_sampling(negative_sampling, popularity_exponent)
        self.sharing = Sharing.of(balance, balance_cost, balance_method, max_tokens_per_rank)
        check_tokens_per_batch(tokens_per_batch, drop_last)
        if eval_batch_size is not None:
            _at_least_one(eval_batch_size=eval_batch_size)
        if protocol is not None and protocol not in HELD_OUT:
            raise ConfigurationError(f"protocol is {protocol!r}; choose one of {', '.join(HELD_OUT)}")
        if seed is not None:
            check_seed(seed)
        self.prepared = PreparedData.open(path)
        if num_negatives > self.num_items:
            raise ConfigurationError(
                f"num_negatives is {num_negatives}, but the catalogue of {path} has only {self.num_items} items"
            )
        if query_time is not None and self.prepared.time_unit == "none":
            raise ConfigurationError(f"query_time is {query_time}, but {path} was prepared from data without times")
        self.batch_size = batch_size
        self.max_length = max_length
        self.num_negatives = num_negatives
        self.negative_sampling, self.popularity_exponent = negative_sampling, popularity_exponent
        self.protocol: Protocol = protocol or ("published" if self.prepared.protocol == "published" else "three_way")
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = resolve_workers(num_workers)
        self.drop_last = drop_last
        self.tokens_per_batch = tokens_per_batch
        self.balance, self.balance_cost, self.balance_method = balance, balance_cost, balance_method
        self.max_tokens_per_rank = max_tokens_per_rank
        self.stochastic_length = stochastic_length
        self.query_time = query_time
        self._seed = seed
        self._features = chosen(self.prepared.features, features, path)
        self._said_too_short = False

    @property
    def num_items(self) -> int:
        """V, size of the catalogue."""
        return self.prepared.num_items

    @property
    def num_users(self) -> int:
        """U, users of the prepared folder."""
        return self.prepared.num_users

    @property
    def features(self) -> tuple[FeatureTable, ...]:
        """The chosen features of events and items beside the item id, in their order; batches carry those of events."""
        return self._features

    @property
    def log_q(self) -> npt.NDArray[np.float32] | None:
        """float32 [V], logarithm of each item's probability to be a given draw, finite everywhere; None if all are equal."""
        return None if self._chances is None else np.log(self._chances).astype(np.float32)

    @cached_property
    def _chances(self) -> Float64Array | None:
        if self.negative_sampling == "uniform":
            return None  # and the events need not be read
        counts = target_counts(self.prepared, self.protocol, self.max_length)
        return probabilities(self.negative_sampling, counts, self.popularity_exponent)

    @property
    def num_training_tokens(self) -> int:
        """T of an epoch: the newest `max_length` tokens of every user who has two training events or more."""
        events = np.diff(np.asarray(self.prepared.offsets)) - HELD_OUT[self.protocol]["validation"]
        return int(np.clip(events - 1, 0, self.max_length).sum())

    @property
    def step_size(self) -> tuple[int, str]:
        """What a training step has on each rank, in the mean: a number, and of what, "users" or "tokens"."""
        if isinstance(self.tokens_per_batch, int):
            return self.tokens_per_batch, "tokens"
        return self.batch_size, "users"

    @property
    def seed(self) -> int:
        """The seed in use: the option, else Lightning's global seed, else 0."""
        return self._seed if self._seed is not None else global_seed()

    def train_dataloader(self) -> TrainingLoader:
        """One epoch of training batches each time it is iterated; in `fit`, from where the trainer stands.

        With `limit_train_batches` each of the trainer's epochs takes the next batches of the sequence; with `overfit_batches`
        there is no shuffling and the same users return in every epoch.

        Raises:
            DataError: no user has two training events.
            ConfigurationError: an epoch would have no batch, or `overfit_batches` is a share.
        """
        negatives = negative_sampler(self.negative_sampling, self._chances, self.num_items, self.num_negatives, self.seed)
        histories = TrainingHistories(
            self.prepared, self.protocol, self.max_length, negatives, self._event_features(), self.seed
        )
        users = histories.users()
        if not len(users):
            raise DataError(
                f"{self.prepared.path}: no user has two training events under the protocol {self.protocol!r}, so there is "
                "nothing to train on; prepare the folder with longer histories"
            )
        if not self._said_too_short and len(users) < self.num_users:
            rank_zero_info(
                f"{self.num_users - len(users)} of {self.num_users} users have fewer than two training events: they are "
                "evaluated, but not trained on"
            )
            self._said_too_short = True
        overfit = _overfit_batches(self.trainer)
        rank, ranks = self._ranks()
        tokens_per_batch: TokensPerBatch | float = self.tokens_per_batch
        if overfit and isinstance(tokens_per_batch, int):
            before = np.cumsum(histories.lengths(users))
            users = users[: np.searchsorted(before, overfit * tokens_per_batch * ranks) + 1]
            # So that they make up so many batches; no smaller ones where all users together are less.
            tokens_per_batch = max(tokens_per_batch, before[len(users) - 1] / (overfit * ranks))
        elif overfit:
            users = users[: overfit * self.batch_size * ranks]
        batches = EpochBatches(
            users,
            self.batch_size,
            self.seed,
            not overfit,
            self.drop_last,
            rank,
            ranks,
            lengths=histories.lengths(users),
            tokens_per_batch=tokens_per_batch,
            sharing=self.sharing,
            stochastic_length=self.stochastic_length,
        )
        trained = partial(settle_progress, self.trainer) if self.trainer is not None and _fitting(self.trainer) else None
        return TrainingLoader(histories, batches, trained, **self._loader_options())

    def val_dataloader(self) -> EvaluationLoader:
        """Every user once, in the order of rows; the target is the validation item."""
        return self._evaluation_loader("validation")

    def test_dataloader(self) -> EvaluationLoader:
        """Every user once, in the order of rows; the target is the test item."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> EvaluationLoader:
        """Every user once, in the order of rows, with all their events.

        Raises:
            ConfigurationError: `query_time` lies before a user's last event.
        """
        if self.query_time is not None:
            last = np.asarray(self.prepared.times)[np.asarray(self.prepared.offsets)[1:] - 1]
            late = np.flatnonzero(last > self.query_time)
            if len(late):
                user = self.prepared.user_ids(late[:1])[0].as_py()
                raise ConfigurationError(
                    f"query_time {self.query_time} lies before the last event of {len(late)} users (user {user!r}: "
                    f"{last[late[0]]}); times of {self.prepared.path} are in {self.prepared.time_unit}"
                )
        return self._evaluation_loader("predict")

    def transfer_batch_to_device(self, batch: JaggedBatch, device: torch.device, dataloader_idx: int) -> JaggedBatch:
        """Move a batch; from pinned memory without waiting for the copy."""
        return batch.to(device, non_blocking=device.type not in ("cpu", "mps"))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must agree on; saved with every checkpoint."""
        return {
            "content_hash": self.prepared.manifest["content_hash"],
            "vocabulary": self.prepared.vocabulary,
            "protocol": self.protocol,
            "batch_size": self.batch_size,
            "ranks": self._ranks()[1],
            "max_length": self.max_length,
            "num_negatives": self.num_negatives,
            "negative_sampling": self.negative_sampling,
            "popularity_exponent": self.popularity_exponent,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "tokens_per_batch": self.tokens_per_batch,
            "balance": self.balance,
            "balance_cost": self.balance_cost and asdict(self.balance_cost),
            "balance_method": self.balance_method,
            "max_tokens_per_rank": self.max_tokens_per_rank,
            "stochastic_length": self.stochastic_length and asdict(self.stochastic_length),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compare a checkpoint's data and options with ours.

        Raises:
            ConfigurationError: training would be resumed on other data or in another order. Evaluation and prediction may
                differ; other data is then only warned about.
        """
        ours = self.state_dict()
        if self.trainer is not None and _fitting(self.trainer):
            if found := differences(state_dict, ours):
                raise ConfigurationError(
                    f"the checkpoint cannot be resumed with {self.prepared.path}: {'; '.join(found)}. Resuming trains "
                    "the batches that were not yet trained, which needs the same data and options; restore them, or start a "
                    "new run"
                )
        elif state_dict.get("vocabulary", state_dict.get("content_hash")) != ours["vocabulary"]:
            rank_zero_warn(
                f"the checkpoint was trained on other data than {self.prepared.path} (content_hash differs): its item rows "
                "must mean the same items, and those of features the same values (new logs are prepared for a model with "
                "--vocabulary-of)"
            )

    def _evaluation_loader(self, stage: Stage) -> EvaluationLoader:
        _overfit_batches(self.trainer)
        query_time = self.query_time if stage == "predict" else None
        histories = EvaluationHistories(
            self.prepared, self.protocol, stage, self.max_length, query_time, self._event_features()
        )
        batches = EvaluationBatches(self.num_users, self.eval_batch_size, *self._ranks())
        return EvaluationLoader(histories, batches, **self._loader_options())

    def _ranks(self) -> tuple[int, int]:
        """Our rank, and how many there are."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _event_features(self) -> list[str]:
        return [table.name for table in self._features if table.side == "event"]

    def _loader_options(self) -> dict[str, Any]:
        device = "cpu" if self.trainer is None else self.trainer.strategy.root_device.type
        return {
            "num_workers": self.num_workers,
            # Without workers DataLoader accepts neither this nor prefetch_factor.
            "persistent_workers": self.num_workers > 0,
            "pin_memory": device not in ("cpu", "mps"),
            "worker_init_fn": _ignore_interrupt,
        }


def resolve_workers(num_workers: int | Literal["auto"]) -> int:
    """The number of worker processes for this machine.

    Raises:
        ConfigurationError: neither "auto" nor 0 or more.
    """
    if num_workers == "auto":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return 0 if cores <= 2 else min(4, cores // 2)
    if isinstance(num_workers, str) or num_workers < 0:
        raise ConfigurationError(f'num_workers is {num_workers!r}; it must be 0 or more, or "auto"')
    return num_workers


def _fitting(trainer: Trainer) -> bool:
    return trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING


def _overfit_batches(trainer: Trainer | None) -> int:
    overfit = getattr(trainer, "overfit_batches", 0)  # set by Trainer's constructor behind the type checker's back
    if isinstance(overfit, float) and overfit:
        raise ConfigurationError(f"overfit_batches is {overfit}, a share; give the number of batches as an integer")
    return int(overfit)


def _ignore_interrupt(worker: int) -> None:
    # A terminal sends Ctrl-C to every process. Only the trainer acts on it: it may still want batches until it has stopped.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _at_least_one(**options: int) -> None:
    for name, value in options.items():
        if value < 1:
            raise ConfigurationError(f"{name} is {value}; it must be 1 or more")
