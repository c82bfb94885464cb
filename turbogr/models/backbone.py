"""Backbone: what every sequence model shares, and what the retriever asks of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from turbogr.batch import JaggedBatch
from turbogr.errors import ConfigurationError
from turbogr.ops.add_positions import jagged_add_positions
from turbogr.ops.backend import Backend, check_backend
from turbogr.ops.dropout import Dropout
from turbogr.ops.masks import CAUSAL, backend_for_mask

KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "turbogr::jagged_hstu_attention",
        "turbogr::jagged_fuxi_attention",
        "turbogr::jagged_softmax_attention",
    }
)
"""Operators whose results a rematerialised block keeps: what is dear to compute. Everything else is computed again."""

SIZES: Mapping[str, Mapping[str, int]] = {
    "tiny": {"dim": 128, "num_blocks": 2, "num_heads": 8, "max_length": 2048},
    "small": {"dim": 256, "num_blocks": 4, "num_heads": 8, "max_length": 2048},
    "medium": {"dim": 512, "num_blocks": 8, "num_heads": 8, "max_length": 2048},
    "large": {"dim": 1024, "num_blocks": 16, "num_heads": 8, "max_length": 2048},
    "long": {"dim": 1024, "num_blocks": 16, "num_heads": 8, "max_length": 4096},
}
"""The size ladder of the TurboGR paper (arXiv 2605.13433); heads are dim / num_heads wide, 16, 32, 64 and 128."""


class Backbone(nn.Module):
    """Turns a batch's token embeddings into outputs, one a token, on the jagged layout.

    The input is Dropout(sqrt(D) * E[id] + P[position]) with a learned P, truncated normal of deviation sqrt(1 / D). A subclass
    implements `encode`, which takes its blocks through `run`.

    Args:
        dim: D, width of item embeddings and tokens.
        max_length: longest history that positions are learned for.
        dropout: dropout of the input, and of the blocks where they say so.
        backend: implementation of the operators: auto takes the C++ kernel where it serves (float32, for many operators also
            bfloat16, on a CPU with a compiler) and PyTorch elsewhere; cpp, torch and reference (float64, slow) take that one
            or fail.
        rematerialise: keep only the results of matrix products and attention for backward, and compute norms, activations,
            gates and dropout again there. Same gradients; HSTU's blocks keep 0.6 of the memory, FuXi's 0.55, SASRec's 0.8,
            and a step takes a tenth longer.
        mask: who attends to whom: causal, or the name or import path of a mask that forbids more (`turbogr.ops.masks`), which
            PyTorch computes.

    Raises:
        ConfigurationError: if an option is out of range, the mask is unknown, or `backend` is cpp and the mask not causal.
    """

    PRESET: ClassVar[Mapping[str, Any]] = {}
    """Options, beside the sizes, in which every preset of a class differs from its defaults."""

    def __init__(
        self,
        dim: int,
        max_length: int,
        dropout: float,
        backend: Backend = "auto",
        rematerialise: bool = False,
        mask: str = CAUSAL,
    ) -> None:
        super().__init__()
        positive(self, dim=dim, max_length=max_length)
        check_backend(type(self).__name__, backend)
        backend_for_mask(type(self).__name__, backend, mask)  # a wrong one shows here, not after the data was read
        if not 0.0 <= dropout < 1.0:
            raise ConfigurationError(f"{type(self).__name__}: dropout must lie in [0, 1), got {dropout}")
        self.dim, self.max_length = dim, max_length
        self.backend: Backend = backend
        self.rematerialise, self.mask = rematerialise, mask
        std = dim**-0.5
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(max_length, dim), std=std, a=-2 * std, b=2 * std))
        self.dropout = Dropout(dropout, backend)

    @classmethod
    def preset(cls, size: str, **options: Any) -> Self:
        """A backbone of the paper's size ladder.

        Args:
            size: tiny, small, medium, large or long (large with twice the length).
            options: of the constructor; they win over the preset's.

        Raises:
            ConfigurationError: if there is no such size, or an option is out of range.
        """
        if size not in SIZES:
            raise ConfigurationError(f"{cls.__name__}.preset: there is no size {size!r}; there are {', '.join(SIZES)}")
        return cls(**{**SIZES[size], **cls.PRESET, **options})

    def forward(self, tokens: Tensor, batch: JaggedBatch) -> Tensor:
        """Outputs float [T, D] of token embeddings float [T, D]; they depend on a token's own past only.

        Raises:
            ConfigurationError: if the batch allows longer histories than this backbone.
        """
        if batch.max_length > self.max_length:
            raise ConfigurationError(
                f"{type(self).__name__} was built for histories of {self.max_length} tokens, the data gives up to "
                f"{batch.max_length}: set the backbone's max_length and the data's max_length to the same value"
            )
        x = jagged_add_positions(
            tokens, self.positions, batch.offsets, scale=self.dim**0.5, p=self.dropout.active, backend=self.backend
        )
        return self.encode(x, batch)

    @abstractmethod
    def encode(self, x: Tensor, batch: JaggedBatch) -> Tensor:
        """The blocks: float [T, D] to float [T, D]."""

    def run(self, block: nn.Module, x: Tensor, *context: object) -> Tensor:
        """`block(x, *context)`, rematerialised in backward if that is asked for: float [T, D] to float [T, D]."""
        if not (self.rematerialise and torch.is_grad_enabled()):
            return block(x, *context)
        # Dropout draws its seed from PyTorch's generator, whose state `checkpoint` brings back for the second computation.
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(block, x, *context, use_reentrant=False, context_fn=contexts)


def _policy(context: object, operator: torch._ops.OpOverload, *args: object, **options: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator.name() in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def positive(owner: nn.Module, **options: int) -> None:
    """Raises ConfigurationError naming the first option that is not at least 1."""
    for name, value in options.items():
        if value < 1:
            raise ConfigurationError(f"{type(owner).__name__}: {name} must be at least 1, got {value}")


def head_width(owner: nn.Module, dim: int, num_heads: int) -> int:
    """dim / num_heads; raises ConfigurationError if that is not a whole number."""
    if dim % num_heads:
        raise ConfigurationError(f"{type(owner).__name__}: dim {dim} is not divisible by num_heads {num_heads}")
    return dim // num_heads
