"""Features as the host reads them, where modules lie on a device."""

from __future__ import annotations

from torch import Tensor

from turbogr.sparse.table import Features, ItemFeature


class HostFeatures:
    """Brings properties of items to the host: they lie with the module, do not change, and are copied once.

    Ids of a batch must be on the host already: they are asked of the batch that the loader gave.
    """

    def __init__(self) -> None:
        self._copies: dict[str, tuple[Tensor, int, Tensor]] = {}

    def of(self, features: Features) -> Features:
        """The same features; themselves, where all are on the host."""
        away = {
            name: ItemFeature(feature.table, self._copy(name, feature.rows))
            for name, feature in features.items()
            if isinstance(feature, ItemFeature) and feature.rows.device.type != "cpu"
        }
        return {name: away.get(name, feature) for name, feature in features.items()} if away else features

    def _copy(self, name: str, rows: Tensor) -> Tensor:
        known, version, copy = self._copies.get(name, (None, 0, rows))
        if known is not rows or version != rows._version:
            copy = rows.cpu()
            self._copies[name] = (rows, rows._version, copy)
        return copy
