"""What the callbacks on negatives share: the module's negatives, and how their rows are kept apart."""

from __future__ import annotations

import inspect
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from turbogr.errors import ConfigurationError
from turbogr.models.negatives import NegativePath
from turbogr.models.retriever import GenerativeRetriever
from turbogr.models.tokens import NEGATIVES
from turbogr.sparse.apart import Apart


class NegativeCallback(Callback):
    """Whose `teardown` switches off what it has switched on: not only where training ends, but also where it is cut short."""

    def refuse_another(self, trainer: Trainer) -> None:
        """Raises ConfigurationError if the trainer has another callback of this kind: one would undo the other."""
        # Lightning's Trainer has the attribute, whatever it says of its type.
        alike = [each for each in trainer.callbacks if isinstance(each, type(self))]  # type: ignore[attr-defined]
        if len(alike) > 1:
            raise ConfigurationError(
                f"the trainer has {len(alike)} callbacks {type(self).__name__}, {' and '.join(map(str, alike))}, "
                "of which each would undo the other: leave one of them in trainer.callbacks"
            )

    def __str__(self) -> str:
        # By their names: Lightning gives callbacks attributes of its own.
        options = ", ".join(f"{name}={getattr(self, name, '...')!r}" for name in inspect.signature(type(self)).parameters)
        return f"{type(self).__name__}({options})"

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Switches it off: Lightning calls no `teardown` after an exception or Ctrl-C."""
        if isinstance(pl_module, GenerativeRetriever):
            self.teardown(trainer, pl_module, "fit")


def negative_path(module: LightningModule, callback: str) -> tuple[NegativePath, GenerativeRetriever]:
    """The negatives of a module, and the module.

    Raises:
        ConfigurationError: it is not a GenerativeRetriever.
    """
    if not isinstance(module, GenerativeRetriever):
        raise ConfigurationError(
            f"{callback} changes how a GenerativeRetriever (turbogr.models.retriever) uses its negatives; "
            f"{type(module).__name__} is none: derive it from that class, or leave the callback out"
        )
    return module.negatives, module


def keep_apart(model: GenerativeRetriever, callback: str, **options: Any) -> None:
    """Keeps the rows of negatives apart in one respect more, `dtype` or `on_host`, whatever else has been asked for.

    Raises:
        ConfigurationError: if items have features: an item's vector is then made of several rows.
    """
    if model.tokens.names["item"] and options:
        raise ConfigurationError(
            f"{callback} keeps the rows of negatives apart, which features of items do not allow, as an item's vector is then "
            f"made of several rows: leave it out, or train without {', '.join(model.tokens.names['item'])} (data.features)"
        )
    apart = model.embeddings.apart
    apart[NEGATIVES] = apart.get(NEGATIVES, Apart())._replace(**options)


def keep_together(model: GenerativeRetriever, *options: str) -> None:
    """Takes back what `keep_apart` did for these options."""
    apart, default = model.embeddings.apart, Apart()
    if NEGATIVES in apart:
        apart[NEGATIVES] = apart[NEGATIVES]._replace(**{name: getattr(default, name) for name in options})
        if apart[NEGATIVES] == default:
            del apart[NEGATIVES]
