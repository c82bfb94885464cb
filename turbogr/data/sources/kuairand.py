"""KuaiRand (Pure, 1K, 27K) in its official layout: one or many ``log_*.csv`` parts of 19 columns.

The standard and the random logs hold different events of the same users; they are concatenated, never joined.
Source: the data set's README ("KuaiRand", Gao et al., CIKM 2022, arXiv:2208.08696).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from turbogr.data.sources.common import Clock, Intake, Kind, expand
from turbogr.data.sources.text import Layout, TextLog
from turbogr.errors import ConfigurationError, DataError

SIGNALS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "long_view")
"""The six signals of which one makes an event positive, as the paper's retrieval protocol counts them."""

_OTHER_SIGNALS = ("is_profile_enter", "is_rand")
ACTIONS = (*SIGNALS, "is_hate", "is_profile_enter")
"""What a user may do with a video: the signals in ``actions``, bit 0 first."""

FEATURES = (*ACTIONS, "is_rand", "hourmin", "tab", "actions")
"""The log's categorical columns, and ``actions``: the sum of 2^bit of the signals that are 1, so that every combination of
them is one category."""

_HATED, _WITHOUT_SIGNAL = 1, 2


class KuaiRand:
    """KuaiRand's logs.

    Attributes:
        filters: the protocol's filters: hated events go, events without a positive signal go.
        files: the logs, in reading order.
        text_ids: False; ids are int64.
        features: the chosen ones of ``FEATURES``.
        time_unit: ``"ms"``.
    """

    text_ids = False
    time_unit = "ms"

    def __init__(
        self,
        paths: Sequence[Path],
        signals: Sequence[str] = SIGNALS,
        keep_hated: bool = False,
        features: Sequence[str] = (),
    ) -> None:
        """Find the logs.

        Args:
            paths: log files, or folders that hold ``log_*.csv`` themselves or in ``data/``.
            signals: the columns of which at least one must be 1; none at all keeps every event.
            keep_hated: keep events with ``is_hate`` 1.
            features: categorical columns, or ``"actions"``, that become features of the events.

        Raises:
            DataError: a path cannot be read, or a folder holds no log.
            ConfigurationError: a signal is no column of 0 and 1, or there is no such feature.
        """
        known = SIGNALS + _OTHER_SIGNALS
        for signal in signals:
            if signal not in known:
                raise ConfigurationError(f"--signals: {signal!r} is no signal of KuaiRand; choose from {', '.join(known)}")
        for feature in features:
            if feature not in FEATURES:
                raise ConfigurationError(
                    f"--features: {feature!r} is no categorical column of KuaiRand's logs; choose from {', '.join(FEATURES)} "
                    "(columns of video_features_basic_*.csv are given with --item-features)"
                )
        self.features = tuple(features)
        self._signals = list(dict.fromkeys(signals))
        self._keep_hated = keep_hated
        self.filters = ["hated: kept" if keep_hated else "not hated", "positive" if self._signals else "positive: not asked"]
        self.files = expand(paths, _logs_of)

    def tables(self, intake: Intake) -> Iterator[pa.Table]:
        """Give all events in reading order (:meth:`turbogr.data.sources.common.Source.tables`)."""
        wanted = {"user_id": Kind.ID, "video_id": Kind.ID, "time_ms": Kind.TIME}
        wanted |= dict.fromkeys([*self._signals, *([] if self._keep_hated else ["is_hate"])], Kind.FLAG)
        flags = [name for name in self.features if name.startswith("is_") or name in SIGNALS]
        wanted |= dict.fromkeys([*flags, *(ACTIONS if "actions" in self.features else ())], Kind.FLAG)
        wanted |= {name: Kind.ID for name in ("hourmin", "tab") if name in self.features}
        clock = Clock("ms")
        for file in self.files:
            for table in TextLog(file, Layout(wanted), clock).tables(intake):
                dropped = np.zeros(len(table), dtype=np.uint8)
                if self._signals:
                    positive = np.zeros(len(table), dtype=np.uint8)
                    for name in self._signals:
                        positive |= table[name].to_numpy()
                    dropped[positive == 0] = _WITHOUT_SIGNAL
                if not self._keep_hated:
                    dropped[table["is_hate"].to_numpy() == 1] = _HATED
                columns = [table["user_id"], table["video_id"], table["time_ms"], pa.array(dropped)]
                columns += [_actions(table) if name == "actions" else table[name].cast(pa.int64()) for name in self.features]
                yield pa.table(columns, names=["user", "item", "time", "dropped", *self.features])


def _actions(table: pa.Table) -> pa.Array:
    actions = np.zeros(len(table), dtype=np.int64)
    for bit, name in enumerate(ACTIONS):
        actions |= table[name].to_numpy().astype(np.int64) << bit
    return pa.array(actions)


def _logs_of(folder: Path) -> list[Path]:
    for place in (folder, folder / "data"):
        logs = sorted((file for file in place.glob("log_*.csv") if file.is_file()), key=lambda file: file.name)
        if logs:
            return logs
    raise DataError(f"{folder}: holds no KuaiRand log: neither it nor its sub-folder data/ has a file log_*.csv")
