"""How much memory an operator takes, seen from its tensors."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operator returned, views of the inputs aside."""

    def __init__(self, *inputs):
        super().__init__()
        self.bytes, self.inputs = 0, {tensor.untyped_storage().data_ptr() for tensor in inputs}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.inputs:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result
