"""Who may attend to whom: masks of the jagged attention operators by name, and how a user brings an own one.

A mask is a function of positions, which count from 0 within a sequence:

    mask(query_position int64 [n, 1], key_position int64 [1, m]) -> bool, broadcastable to [n, m], True: attention is allowed

It is always intersected with causality (key position <= query position): no mask can see the future. It must be a pure function
of its two arguments, because operators call it block by block, in forward and again in backward. A token that may attend to
nothing gets a zero output.

An own mask needs no change of this package. Either its import path is the name:

    # my_masks.py, on the Python path
    def window(query_position, key_position):
        return query_position - key_position < 100

    jagged_hstu_attention(..., mask="my_masks.window")

or it is registered under a short name: `register_mask("window", window)`. Masks other than `causal` are computed by PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from turbogr.errors import ConfigurationError
from turbogr.ops.backend import Backend

Mask = Callable[[Tensor, Tensor], Tensor]

CAUSAL = "causal"

_registered: dict[str, Mask] = {}


def register_mask(name: str, function: Mask) -> None:
    """Makes `function` known to all attention operators of this process as `mask=name`.

    Args:
        name: without dots, which are left to import paths.
        function: see the module's docstring.

    Raises:
        ConfigurationError: if the name holds a dot, is empty or stands for another function already.
    """
    if not name or "." in name:
        raise ConfigurationError(f"register_mask: a name has no dots and is not empty, got {name!r}")
    if name == CAUSAL or _registered.setdefault(name, function) is not function:
        raise ConfigurationError(f"register_mask: there is a mask named {name!r} already")


def known_masks() -> list[str]:
    """Names that need no import path, sorted."""
    return sorted([CAUSAL, *_registered])


@torch.compiler.assume_constant_result  # checked while it is traced: imports cannot be part of a graph
def check_mask(owner: str, mask: str) -> None:
    """Raises ConfigurationError, which names `owner` and what is known, if there is no mask of this name or import path."""
    if mask != CAUSAL:
        _find(owner, mask)


def backend_for_mask(operator: str, backend: Backend, mask: str) -> Backend:
    """The back end that computes `mask`: `backend` itself for causal attention, else PyTorch (or the reference).

    Raises:
        ConfigurationError: if the mask is unknown, or is not causal and `backend` is `cpp`.
    """
    if mask == CAUSAL:
        return backend
    check_mask(operator, mask)
    if backend == "cpp":
        raise ConfigurationError(
            f"{operator}: backend cpp computes mask {CAUSAL} only, got {mask!r}; backend auto takes PyTorch for that"
        )
    return "torch" if backend == "auto" else backend


def forbidden(operator: str, mask: str, first: int, end: int, device: torch.device) -> Tensor:
    """Where rows first..end of a sequence must not attend to keys 0..end.

    Args:
        operator: name for messages.
        mask: name or import path.
        first: position of the first row.
        end: position behind the last row.
        device: where the result lives.

    Returns:
        bool [end - first, end]; True above the diagonal whatever the mask says.

    Raises:
        ConfigurationError: if the mask is unknown or returns something else than documented.
    """
    queries = torch.arange(first, end, device=device)[:, None]
    keys = torch.arange(end, device=device)[None]
    future = keys > queries
    if mask == CAUSAL:
        return future
    allowed = _find(operator, mask)(queries, keys)
    if not (isinstance(allowed, Tensor) and allowed.dtype == torch.bool and _broadcastable(allowed, future)):
        found = f"{allowed.dtype} {list(allowed.shape)}" if isinstance(allowed, Tensor) else f"{type(allowed).__name__}"
        raise ConfigurationError(
            f"{operator}: mask {mask!r} must return bool, broadcastable to {list(future.shape)}; it returned {found}"
        )
    return future | ~allowed


def forbid(operator: str, mask: str, block: Tensor, first: int) -> None:
    """Sets to zero what rows first..end of `block` [.., end - first, end] hold for keys that they must not attend to."""
    if mask == CAUSAL:
        block[..., first:].tril_()
    else:
        block.masked_fill_(forbidden(operator, mask, first, block.shape[-1], block.device), 0.0)


def _broadcastable(allowed: Tensor, block: Tensor) -> bool:
    return allowed.dim() <= block.dim() and all(
        a in (1, b) for a, b in zip(allowed.shape[::-1], block.shape[::-1], strict=False)
    )


def _find(owner: str, mask: str) -> Mask:
    known = _registered.get(mask)
    if known is not None:
        return known
    module, _, name = mask.rpartition(".")
    if not module or mask.startswith("."):
        raise ConfigurationError(
            f"{owner}: there is no mask {mask!r}; known are {', '.join(known_masks())}, "
            "and a function of a module by its import path (my_masks.window)"
        )
    try:
        found = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{owner}: mask {mask!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigurationError(f"{owner}: mask {mask!r}: module {module} has no function {name}")
    return found
