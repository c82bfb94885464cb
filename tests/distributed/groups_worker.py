"""Measures links and settles the number of groups, on every rank."""

from __future__ import annotations

import sys
import warnings
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch

from tests.distributed.launch import report_checks
from tests.distributed.strategy_cases import fit
from turbogr.errors import ConfigurationError
from turbogr.sparse.groups import Links, tables_of
from turbogr.sparse.links import measure_links
from turbogr.sparse.optimizers import AdaGrad
from turbogr.sparse.table import EmbeddingTable
from turbogr.strategies import TurboGRStrategy
from turbogr.strategies.group_choice import Means, settle_groups

CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=60)
SLOW = Links(ranks_per_node=2, local=1e9, network=1e4, latency=0.0)


def settle(groups, ids, links, memory=10**9):
    table = EmbeddingTable(AdaGrad())
    table.allocate(1000, 8)
    try:
        cost, why = settle_groups(groups, tables_of(table), ids, 0, Means(memory, links, 2, CPU, TIMEOUT))
    except ConfigurationError as error:
        return str(error)
    return {**asdict(cost), "why": why}


def measured():
    return {str(n): asdict(measure_links(n, CPU, TIMEOUT)) for n in (1, 2, 4)}


def shared():
    return settle(None, torch.arange(100), SLOW)


def alone():
    rank = torch.distributed.get_rank()
    return settle(None, torch.arange(100) + 100 * rank, SLOW)


def unknown():
    return settle(None, None, None)


def too_large():
    # one rank has less memory than the others
    least = torch.distributed.get_rank() == 2
    return [settle(groups, torch.arange(100), SLOW, 30_000 if least else 10**9) for groups in (4, 2, 1, None)]


def trained():
    """The number that the strategy's option leads to, and that training then works with it."""
    strategy = TurboGRStrategy(groups="auto", memory_per_rank="1GB", local_bandwidth="1GB", network_bandwidth="10kB")
    trainer = fit(Path(sys.argv[1]), 4, strategy)
    trainer.save_checkpoint(Path(sys.argv[1]) / "trained.ckpt")
    return {"groups": strategy.topology.groups, "steps": trainer.global_step}


def taken_up():
    """What is said where a run goes on and links have become others, and where they are as they were."""
    found = {}
    for name, links in {"others": ("10kB", "1GB"), "the same": ("1GB", "10kB")}.items():
        strategy = TurboGRStrategy("auto", memory_per_rank="1GB", local_bandwidth=links[0], network_bandwidth=links[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = fit(Path(sys.argv[1]), 4, strategy, ckpt_path=Path(sys.argv[1]) / "trained.ckpt", max_epochs=2)
            in_training = len(caught)
            trainer.validate(trainer.lightning_module, trainer.datamodule, ckpt_path=Path(sys.argv[1]) / "trained.ckpt")
        said = [
            [str(warning.message) for warning in part if "groups =" in str(warning.message)]
            for part in (caught[:in_training], caught[in_training:])
        ]
        found[name] = {"groups": strategy.topology.groups, "said": said[0], "evaluating": said[1]}
    return found


def refused():
    """Tables that do not fit; on all ranks before anything is trained."""
    try:
        fit(Path(sys.argv[1]), 4, TurboGRStrategy(groups=4, memory_per_rank="1kB"))
    except ConfigurationError as error:
        return str(error)
    return "trained"


if __name__ == "__main__":
    report_checks(
        {check.__name__: check for check in (measured, shared, alone, unknown, too_large, trained, taken_up, refused)}
    )
