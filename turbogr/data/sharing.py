"""The options of load balancing, checked, and what they come to: how the ranks of a step share its batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from turbogr.data.balance import CostModel, Method, assign
from turbogr.data.negatives import Int64Array
from turbogr.errors import ConfigurationError

Balance = Literal["off", "tokens", "attention"]
"""What the ranks of a step have equally much of: users; tokens; or cost, which grows faster than tokens."""
BalanceMethod = Literal["greedy", "karmarkar_karp"]
TokensPerBatch = int | Literal["auto"] | None


@dataclass(frozen=True)
class Sharing:
    """How ranks share a batch: who trains which history. What a step trains stays the same.

    Attributes:
        method: "slices" gives each rank equally many histories, one after the other; "greedy" and "karmarkar_karp" give each
            rank an equal cost; see `turbogr.data.balance.assign`.
        cost: of a history, by its tokens.
        max_tokens: no rank may have more in one batch; None is no limit.
    """

    method: Method = "slices"
    cost: CostModel = field(default_factory=CostModel)
    max_tokens: int | None = None

    @classmethod
    def of(
        cls,
        balance: Balance = "off",
        balance_cost: CostModel | None = None,
        balance_method: BalanceMethod = "greedy",
        max_tokens_per_rank: int | None = None,
    ) -> Sharing:
        """From the options of the data module, which explains them.

        Raises:
            ConfigurationError: one of them has an impossible value, or no effect beside the others.
        """
        if balance not in get_args(Balance):
            raise ConfigurationError(f"balance is {balance!r}; choose one of {', '.join(get_args(Balance))}")
        if balance_method not in get_args(BalanceMethod):
            raise ConfigurationError(
                f"balance_method is {balance_method!r}; choose one of {', '.join(get_args(BalanceMethod))}"
            )
        if max_tokens_per_rank is not None and max_tokens_per_rank < 1:
            raise ConfigurationError(f"max_tokens_per_rank is {max_tokens_per_rank}; it must be 1 or more")
        if balance_cost is not None and balance != "attention":
            raise ConfigurationError(
                f'balance_cost is the cost of balance "attention", but balance is "{balance}"; leave one of them out'
            )
        if balance == "off":
            if max_tokens_per_rank is not None:
                raise ConfigurationError('max_tokens_per_rank needs balance "tokens" or "attention"; it is "off"')
            if balance_method != "greedy":
                raise ConfigurationError(
                    f'balance_method "{balance_method}" needs balance "tokens" or "attention"; it is "off"'
                )
            return cls()
        if balance == "attention" and balance_cost is None:
            raise ConfigurationError(
                'balance "attention" needs balance_cost, the cost of a history of n tokens: linear n + quadratic n^2. Measure '
                "it (turbogr.data.balance.CostModel.fitted), or count operations: those of an HSTU of width D are linear 1, "
                "quadratic 1 / (5 D)"
            )
        return cls(balance_method, balance_cost or CostModel(), max_tokens_per_rank)

    @property
    def by_tokens(self) -> bool:
        """Whether it matters how long histories are."""
        return self.method != "slices" or self.max_tokens is not None

    def __call__(self, tokens: Int64Array, ranks: int, batch: str = "a batch") -> list[Int64Array]:
        """Share out a batch.

        Args:
            tokens: int64 [B], of each history.
            ranks: how many share it.
            batch: what to call it in an error.

        Returns:
            For each rank int64 [b], ascending indices into `tokens`, possibly none; every index once.

        Raises:
            ConfigurationError: some rank would have more than `max_tokens`.
        """
        return assign(self.cost(tokens), ranks, self.method, tokens, self.max_tokens, batch)


def check_tokens_per_batch(tokens_per_batch: TokensPerBatch | float, drop_last: bool) -> None:
    """Refuse impossible values.

    Raises:
        ConfigurationError: neither None, "auto" nor 1 or more; or together with `drop_last`.
    """
    if tokens_per_batch is None:
        return
    if drop_last:
        raise ConfigurationError(
            "drop_last has no meaning with tokens_per_batch, whose batches are all of one size; leave it out"
        )
    if tokens_per_batch != "auto" and (isinstance(tokens_per_batch, str) or not tokens_per_batch >= 1):
        raise ConfigurationError(f'tokens_per_batch is {tokens_per_batch!r}; it must be 1 or more, or "auto"')
