"""DDPOnNPU: Lightning's DDP without what it does for CUDA alone."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy
from torch import distributed

from turbogr.accelerators.npu import BACKEND, NPU


class DDPOnNPU(DDPStrategy):
    """DDP that trains on NPUs too: the base of TurboGRStrategy. On other devices it is DDPStrategy."""

    def determine_ddp_device_ids(self) -> list[int] | None:
        """None on an NPU: for a device with a number, Lightning makes DDP inside a CUDA stream."""
        return None if self.root_device.type == NPU else super().determine_ddp_device_ids()

    def _get_process_group_backend(self) -> str:
        if self._process_group_backend is None and self.root_device.type == NPU:
            return BACKEND
        return super()._get_process_group_backend()

    def setup_distributed(self) -> None:
        """As in DDPStrategy; on an NPU the process group is not bound to the device."""
        super().setup_distributed()
        if self.root_device.type == NPU:
            # A bound device must be served by every group that is made later, and gloo, which speaks for the host, serves none.
            default = distributed.distributed_c10d._get_default_group()
            default.bound_device_id = None
