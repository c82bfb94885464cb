"""NPUAccelerator: Huawei Ascend NPUs under Lightning, through torch_npu.

Lightning knows nothing of NPUs, and falls into three traps with one:

    strategy="auto" on one device    would train on the CPU                    refused by `setup_device`
    mixed precision                  would autocast on "cuda"                  mended by `setup`
    DDP                              would open a CUDA stream                  mended by `DDPOnNPU`, else refused by `setup`

Nothing here has run on an NPU: tests rename PyTorch's PrivateUse1 device to "npu".
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from turbogr.errors import ConfigurationError, MissingDependencyError
from turbogr.ops import npu_plugin

NPU = "npu"
"""Name of the accelerator and of the device type."""
BACKEND = "hccl"
"""Back end of process groups on NPUs, registered by torch_npu."""


def _npu() -> Any:
    """The module torch.npu: the one place where torch_npu is imported.

    Raises:
        MissingDependencyError: it is not installed, or cannot be loaded.
    """
    if find_spec("torch_npu") is None:
        raise MissingDependencyError(
            "accelerator npu needs torch_npu, which is not installed: pip install 'turbogr[npu]' on a machine with Ascend NPUs "
            "and CANN, or choose another accelerator"
        )
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError(
            f"accelerator npu needs torch_npu, which cannot be loaded ({error}): it needs CANN, whose set_env.sh must be "
            "sourced in the shell; see `turbogr doctor`"
        ) from error
    return torch.npu  # type: ignore[attr-defined]


class NPUAccelerator(Accelerator):
    """Ascend NPUs: `Trainer(accelerator="npu", devices=8, strategy="turbogr")`.

    Raises:
        MissingDependencyError: torch_npu is not installed, or cannot be loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        _npu()

    def setup_device(self, device: torch.device) -> None:
        """Makes `device` the process's NPU, and loads the plugin with kernels for it where that has been built.

        Raises:
            ConfigurationError: if it is none, which is what strategy="auto" chooses for one device.
        """
        if device.type != NPU:
            raise ConfigurationError(
                f"accelerator npu: the strategy would train on {device}, as Lightning's strategy auto does where there is one "
                "NPU; set trainer.strategy to turbogr, or pass strategy=SingleDeviceStrategy('npu:0')"
            )
        _npu().set_device(device)
        npu_plugin.load_or_tell()

    def setup(self, trainer: Trainer) -> None:
        """Lets mixed precision run on the NPU.

        Raises:
            ConfigurationError: for DDP strategies that do not know NPUs, and for 16-mixed.
        """
        from turbogr.strategies.npu import DDPOnNPU

        if isinstance(trainer.strategy, DDPStrategy) and not isinstance(trainer.strategy, DDPOnNPU):
            raise ConfigurationError(
                "accelerator npu: Lightning's DDP opens a CUDA stream; set trainer.strategy to turbogr, which trains on NPUs"
            )
        precision = trainer.strategy.precision_plugin
        if isinstance(precision, MixedPrecision):
            if precision.scaler is not None:
                raise ConfigurationError(
                    "accelerator npu: precision 16-mixed scales the loss by Lightning's scaler, which is CUDA's; set "
                    "trainer.precision to bf16-mixed or 32-true"
                )
            precision.device = NPU  # Lightning took "cuda" for what is neither a CPU nor a Mac

    def teardown(self) -> None:
        """Gives cached memory back."""
        _npu().empty_cache()

    def get_device_stats(self, device: torch.device | str | int) -> dict[str, Any]:
        """What torch.npu counts of the device's memory, in bytes."""
        return _npu().memory_stats(device)

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """Numbers of the NPUs that `Trainer(devices=...)` means.

        Args:
            devices: how many (-1 for all), as a number or text; or which, as a list or as text with commas.

        Raises:
            ConfigurationError: if there are not so many, or not these.
        """
        visible = NPUAccelerator.auto_device_count()
        try:
            if isinstance(devices, str):
                devices = [int(part) for part in devices.split(",") if part.strip()] if "," in devices else int(devices)
            numbers = list(range(visible if devices == -1 else devices)) if isinstance(devices, int) else list(devices)
        except ValueError as error:
            raise ConfigurationError(f"devices: {devices!r} names no NPUs; give a number, or a list such as 0,1") from error
        if not numbers or len(set(numbers)) != len(numbers) or any(not 0 <= number < visible for number in numbers):
            raise ConfigurationError(f"devices: {devices!r} asks for NPUs that are not there; {visible} are visible")
        return numbers

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """As torch.device."""
        return [torch.device(NPU, number) for number in devices]

    @staticmethod
    def auto_device_count() -> int:
        """How many NPUs are visible."""
        return _npu().device_count()

    @staticmethod
    def is_available() -> bool:
        """Whether there is an NPU that torch_npu can use."""
        try:
            return bool(_npu().is_available())
        except MissingDependencyError:
            return False

    @staticmethod
    def name() -> str:
        """npu."""
        return NPU

    @classmethod
    def register_accelerators(cls, accelerator_registry: Any) -> None:
        """Makes the name known to Lightning."""
        accelerator_registry.register(cls.name(), cls, description="Huawei Ascend NPU, through torch_npu")
