"""Lightning strategies of turbogr; importing this makes `Trainer(strategy="turbogr")` known."""

from lightning.pytorch.strategies import StrategyRegistry

from turbogr.strategies.turbogr import TurboGRStrategy

__all__ = ["TurboGRStrategy"]

if "turbogr" not in StrategyRegistry:
    StrategyRegistry.register(
        "turbogr", TurboGRStrategy, description="Sharded tables, sparse exchange between groups, weighted gradients"
    )
