"""`turbogr plan`: how many groups N ranks should form, from the recipe's own data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text
from torch import Tensor

import turbogr
from turbogr.data.datamodule import SequenceDataModule
from turbogr.data.histories import TrainingHistories
from turbogr.describe_cli import DescribeCLI
from turbogr.errors import ConfigurationError
from turbogr.models.retriever import GenerativeRetriever
from turbogr.planning import plan
from turbogr.planning_tables import write_json
from turbogr.sparse.groups import DistinctRows, GroupCost, Links, choose_groups, count_rows, group_costs, reason, tables_of
from turbogr.trainer_cli import run as run_with
from turbogr.units import in_bytes, parse_bytes

DRAWN_RANKS = 64
"""Ranks whose batches are drawn; what more ranks share is estimated from how fast the distinct rows of these grow."""


def run(args: list[str]) -> int:
    """Runs `turbogr plan`; as `turbogr.trainer_cli.run`."""
    return run_with("plan", args, PlanCLI)


class _Options(Trainer):
    """Never built: LightningCLI takes a command's own options from the trainer's method of that name."""

    def plan(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        devices: int = 1,
        devices_per_node: int = 8,
        memory_per_rank: str | None = None,
        local_bandwidth: str = "50GB",
        network_bandwidth: str = "12.5GB",
        latency: float = 20e-6,
        json: Path | None = None,
    ) -> None:
        """Bytes and memory of every number of groups, and the one that `groups: auto` would take.

        Args:
            model: what is planned.
            datamodule: what it would be trained on; data.batch_size is per rank.
            devices: N, all ranks together.
            devices_per_node: ranks of a node.
            memory_per_rank: What a rank may use, like 64GB; without it everything fits.
            local_bandwidth: What a rank sends in a second to ranks of its node, like 50GB.
            network_bandwidth: What a rank sends in a second to ranks of other nodes.
            latency: Seconds that a message takes beyond its bytes.
            json: Also write the numbers to this file.
        """


@dataclass(frozen=True)
class GroupPlan:
    """What `turbogr plan` found.

    Attributes:
        devices: N.
        links: that were assumed.
        rows: distinct rows of a step.
        costs: of every M that divides N.
        chosen: the M that the rule takes; None if none fits.
        reason: why, or why none fits.
    """

    devices: int
    links: Links
    rows: DistinctRows
    costs: list[GroupCost]
    chosen: int | None
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"turbogr": turbogr.__version__, **asdict(self)}


class PlanCLI(DescribeCLI):
    """Builds the data, and the model without memory; counts and chooses."""

    trainer_type = _Options

    def _run_subcommand(self, subcommand: str) -> None:
        config = self.config_init[subcommand]
        for name in ("devices", "devices_per_node"):
            if config[name] < 1:
                raise ConfigurationError(f"--{name} is {config[name]}; it must be 1 or more")
        links = Links(
            config.devices_per_node,
            parse_bytes("--local_bandwidth", config.local_bandwidth),
            parse_bytes("--network_bandwidth", config.network_bandwidth),
            config.latency,
        )
        memory = None if config.memory_per_rank is None else parse_bytes("--memory_per_rank", config.memory_per_rank)
        found = plan_groups(self.model, self.datamodule, config.devices, links, memory, str(config.trainer.precision or 32))
        print_groups(found)
        if config.json is not None:
            write_json(found.as_dict(), config.json)
            Console(highlight=False, markup=False, soft_wrap=True).print(f"written to {config.json}")


def plan_groups(
    model: GenerativeRetriever,
    data: SequenceDataModule,
    devices: int,
    links: Links,
    memory: int | None = None,
    precision: str = "32-true",
) -> GroupPlan:
    """Costs of every number of groups.

    Args:
        model: built on the device `meta`; cannot be trained afterwards.
        data: what it is to be trained on; its batch size is a rank's.
        devices: N.
        links: between ranks.
        memory: bytes that a rank may use; None fits everything.
        precision: the trainer's.

    Raises:
        DataError: if there is nothing to train on.
    """
    ids = track(
        _requests(model, data),
        f"Drawing the batches of {min(devices, DRAWN_RANKS)} ranks",
        total=min(devices, DRAWN_RANKS),
        console=Console(stderr=True),
        transient=True,
    )
    rows = count_rows(list(islice(ids, min(devices, DRAWN_RANKS))), model.embeddings.num_rows)
    described = plan(model, data, precision)
    resident = described.model.dense_bytes + described.model.optimizer_bytes
    step = max((step.batch_bytes + step.most_bytes for step in described.steps.values()), default=0)
    costs = group_costs(devices, tables_of(model.embeddings), rows, links, resident + step, memory)
    try:
        chosen = choose_groups(costs)
    except ConfigurationError as error:
        return GroupPlan(devices, links, rows, costs, None, str(error))
    return GroupPlan(devices, links, rows, costs, chosen.groups, reason(chosen, costs))


def _requests(model: GenerativeRetriever, data: SequenceDataModule) -> Iterator[Tensor]:
    """The distinct rows of one rank's batch after another."""
    loader = data.train_dataloader()
    assert isinstance(loader.dataset, TrainingHistories)
    for key in loader.batches.stream(0):
        yield model.embeddings.request(model.sparse_features(loader.dataset[key])).ids


def print_groups(found: GroupPlan, console: Console | None = None) -> None:
    """Prints the table and the choice.

    Args:
        found: by `plan_groups`.
        console: where to; None takes standard output.
    """
    console = console or Console(highlight=False)
    table = Table(title=Text(f"Groups of {found.devices} ranks"), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.caption_justify, table.pad_edge, table.collapse_padding = "left", False, True
    for column in ("M x I", "tables", "inside", "between", "off node", "exchange", "ms", ""):
        table.add_column(Text(column), justify="left" if column in ("M x I", "exchange", "") else "right", no_wrap=True)
    for cost in found.costs:
        table.add_row(
            f"{cost.groups} x {cost.group_size}",
            *(in_bytes(x) for x in (cost.table_bytes, cost.inside, cost.between, cost.off_node)),
            cost.exchange,
            f"{cost.seconds * 1e3:.3g}",
            "chosen" if cost.groups == found.chosen else "" if cost.fits else "too large",
        )
    table.caption = Text(
        "tables: a rank's memory for them and their optimizer state; inside, between, off node: bytes that a rank sends in a "
        "step inside its group, to other groups, and of both to other nodes; ms: to send them one after the other"
    )
    console.print(table)
    one, all_ranks = found.rows.of(1), found.rows.of(found.devices)
    beside = ", ".join(f"{in_bytes(cost.step_bytes)} in {cost.groups} x {cost.group_size}" for cost in found.costs)
    text = f"a rank's memory beside its tables (dense parameters, activations, rows under way) at a step's peak: {beside}"
    console.print(text, markup=False, soft_wrap=True)
    console.print(f"distinct rows of a step: {one:,.0f} of a rank, {all_ranks:,.0f} of all", markup=False)
    console.print(found.reason, markup=False, soft_wrap=True)
