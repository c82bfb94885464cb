"""Worker of test_launch.py: `checks` reports, `hang` and `fail` do what they say on rank 1."""

import os
import sys
import time

import torch
from torch import distributed as dist

from tests.distributed.launch import report_checks


def total() -> list[float]:
    rank = torch.tensor([float(dist.get_rank()), 1.0])
    dist.all_reduce(rank)
    return rank.tolist()


def broken() -> None:
    # The first rank to end takes its node's others with it: not before they have reported what came before.
    dist.barrier()
    raise ValueError(f"rank {dist.get_rank()} is broken")


def main(what: str) -> None:
    rank = int(os.environ["RANK"])
    print(f"hello from {rank} of {os.environ['WORLD_SIZE']}, node {os.environ['GROUP_RANK']}", flush=True)
    if what == "checks":
        report_checks({"total": total, "broken": broken, "after": total})
    elif rank == 1:
        if what == "hang":
            time.sleep(600)
        sys.exit("rank 1 gives up")


if __name__ == "__main__":
    main(sys.argv[1])
