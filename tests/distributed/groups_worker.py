"""Measures links and settles the number of groups, on every rank."""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta

import torch

from tests.distributed.launch import report_checks
from turbogr.errors import ConfigurationError
from turbogr.sparse.groups import Links
from turbogr.sparse.links import measure_links
from turbogr.sparse.optimizers import AdaGrad
from turbogr.sparse.table import EmbeddingTable
from turbogr.strategies.group_choice import settle_groups

CPU, TIMEOUT = torch.device("cpu"), timedelta(seconds=60)
SLOW = Links(ranks_per_node=2, local=1e9, network=1e4, latency=0.0)


def settle(groups, ids, links, memory=10**9):
    table = EmbeddingTable(AdaGrad())
    table.allocate(1000, 8)
    try:
        cost, why = settle_groups(groups, table, ids, links, memory, 0, 2, CPU, TIMEOUT)
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


if __name__ == "__main__":
    report_checks({check.__name__: check for check in (measured, shared, alone, unknown, too_large)})
