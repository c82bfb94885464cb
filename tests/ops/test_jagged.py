"""What all operators on jagged tensors ask of their inputs."""

import pytest
import torch

from turbogr.ops.jagged import check_devices


def test_tensors_on_different_devices_are_refused():
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    check_devices("turbogr::x", q=here, k=None, v=here)
    check_devices("turbogr::x", q=None, k=there, v=there)
    check_devices("turbogr::x")
    with pytest.raises(ValueError, match="turbogr::x: offsets is on meta, but q on cpu"):
        check_devices("turbogr::x", q=here, k=None, offsets=there)
