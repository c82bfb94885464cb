"""The seed that an option `seed: None` stands for."""

from __future__ import annotations

import os


def global_seed() -> int:
    """What `lightning.seed_everything` was called with (it leaves it in the environment), else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
