"""NegativeQuantization: negatives are looked up in half precision (TurboGR, section 4.3.2)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from lightning.pytorch import LightningModule, Trainer

from turbogr.callbacks.negative_path import NegativeCallback, keep_apart, keep_together, negative_path
from turbogr.errors import ConfigurationError
from turbogr.losses import refuse_without_products

HalfPrecision = Literal["fp16", "bf16"]
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class NegativeQuantization(NegativeCallback):
    """The rows that negatives look up are rounded to 16 bits; positives and histories see the same table in float32.

    Products, loss and gradients are computed in float32 from the rounded rows, and the gradient of the rounding is 1: the table
    stays in float32. Under TurboGRStrategy a row that only negatives look up travels in 16 bits, half as wide.

    float16 keeps 10 bits of a value's mantissa down to 6e-5 and fewer below, bfloat16 7 of any. Rows start at 0.02 and larger.

    Args:
        dtype: "fp16" or "bf16".

    Raises:
        ConfigurationError: the type is unknown, the trainer has another such callback, or the module has features of items or a
            loss without `of_products`.
    """

    def __init__(self, dtype: HalfPrecision = "fp16") -> None:
        if dtype not in get_args(HalfPrecision):
            raise ConfigurationError(f"NegativeQuantization: dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}")
        self.dtype = dtype

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Switches it on."""
        _, model = negative_path(pl_module, "NegativeQuantization")
        self.refuse_another(trainer)
        if stage == "fit":
            refuse_without_products(model.loss, "NegativeQuantization")
            keep_apart(model, "NegativeQuantization", dtype=_DTYPES[self.dtype])

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Switches it off, for whoever trains the model again without."""
        keep_together(negative_path(pl_module, "NegativeQuantization")[1], "dtype")
