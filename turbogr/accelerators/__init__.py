"""Accelerators that Lightning does not bring; importing this makes `Trainer(accelerator="npu")` known."""

from lightning.pytorch.accelerators import AcceleratorRegistry

from turbogr.accelerators.npu import NPUAccelerator

__all__ = ["NPUAccelerator"]

if NPUAccelerator.name() not in AcceleratorRegistry.available_accelerators():
    NPUAccelerator.register_accelerators(AcceleratorRegistry)
