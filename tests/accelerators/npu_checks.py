"""What NPUAccelerator does beside the stand-in; prints a JSON object of name -> what came of it. A process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import distributed, nn

from tests.accelerators import fake_npu
from turbogr.accelerators import NPUAccelerator
from turbogr.ops import npu_plugin
from turbogr.strategies.npu import DDPOnNPU
from turbogr.strategies.turbogr import TurboGRStrategy


def said(act: Callable[[], Any]) -> str:
    """The class and message of what `act` raises, or what it returns."""
    try:
        return str(act())
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def trainer(**options: Any) -> pl.Trainer:
    """On NPUs, without files."""
    return pl.Trainer(accelerator="npu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **options)


def set_up(**options: Any) -> str:
    """The device of mixed precision after the accelerator's setup."""
    made = trainer(**options)
    made.accelerator.setup(made)
    return str(getattr(made.precision_plugin, "device", "none"))


def autocasts(dtype: torch.dtype) -> bool:
    """Whether bf16-mixed casts on NPUs, inside the plug-in's own context."""
    made = trainer(devices=2, strategy=TurboGRStrategy(), precision="bf16-mixed")
    made.accelerator.setup(made)
    with made.precision_plugin.forward_context():
        return torch.is_autocast_enabled("npu") and torch.get_autocast_dtype("npu") == dtype


def wrap(strategy: DDPStrategy) -> str:
    """The class of a module that the strategy wraps on its NPU."""
    strategy.parallel_devices = [torch.device("npu", 0)]
    return type(strategy._setup_model(nn.Linear(2, 2))).__name__


def main() -> None:
    fake_npu.install()
    npu_plugin.load_or_tell = lambda: fake_npu.told.append("plugin")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    made = trainer(devices=2, strategy=TurboGRStrategy())
    strategy = made.strategy
    assert isinstance(strategy, TurboGRStrategy)
    found: dict[str, Any] = {
        "registered": isinstance(AcceleratorRegistry.get("npu"), NPUAccelerator),
        "available": NPUAccelerator.is_available(),
        "count": NPUAccelerator.auto_device_count(),
        "devices": {text: said(lambda d=d: NPUAccelerator.parse_devices(d)) for text, d in DEVICES.items()},
        "parallel": [str(device) for device in strategy.parallel_devices or []],
        "root": str(strategy.root_device),
        "backend": strategy._get_process_group_backend(),
        "own backend": TurboGRStrategy(process_group_backend="gloo").process_group_backend,
        "stats": NPUAccelerator().get_device_stats("npu:0"),
        "auto": said(trainer(devices=1).strategy.setup_environment),
        "single": said(trainer(devices=1, strategy=SingleDeviceStrategy("npu:0")).strategy.setup_environment),
        "turbogr on one": said(lambda: str(trainer(devices=1, strategy="turbogr").strategy.root_device)),
        "before setup": trainer(devices=2, strategy=TurboGRStrategy(), precision="bf16-mixed").precision_plugin.device,
        "bf16-mixed": said(lambda: set_up(devices=2, strategy=TurboGRStrategy(), precision="bf16-mixed")),
        "bf16-mixed single": said(lambda: set_up(devices=1, strategy=SingleDeviceStrategy("npu:0"), precision="bf16-mixed")),
        "16-mixed": said(lambda: set_up(devices=2, strategy=TurboGRStrategy(), precision="16-mixed")),
        "32-true": said(lambda: set_up(devices=2, strategy=TurboGRStrategy())),
        "autocast": said(lambda: autocasts(torch.bfloat16)),
        "ddp": said(lambda: set_up(devices=2, strategy="ddp")),
        "auto of two": said(lambda: set_up(devices=2)),
        "wrap": said(lambda: wrap(DDPOnNPU())),
        "wrap by Lightning": said(lambda: wrap(DDPStrategy())),
    }
    made.accelerator.teardown()
    found["told"] = fake_npu.told
    print(json.dumps(found))
    distributed.destroy_process_group()


DEVICES: dict[str, int | str | list[int]] = {
    "2": 2,
    "'2'": "2",
    "-1": -1,
    "'-1'": "-1",
    "[1, 3]": [1, 3],
    "'1,3'": "1,3",
    "5": 5,
    "[4]": [4],
    "[1, 1]": [1, 1],
    "-2": -2,
    "'two'": "two",
}

if __name__ == "__main__":
    main()
