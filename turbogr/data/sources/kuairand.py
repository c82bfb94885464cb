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
_HATED, _WITHOUT_SIGNAL = 1, 2


class KuaiRand:
    """KuaiRand's logs.

    Attributes:
        filters: the protocol's filters: hated events go, events without a positive signal go.
        files: the logs, in reading order.
        text_ids: False; ids are int64.
        time_unit: ``"ms"``.
    """

    text_ids = False
    time_unit = "ms"

    def __init__(self, paths: Sequence[Path], signals: Sequence[str] = SIGNALS, keep_hated: bool = False) -> None:
        """Find the logs.

        Args:
            paths: log files, or folders that hold ``log_*.csv`` themselves or in ``data/``.
            signals: the columns of which at least one must be 1; none at all keeps every event.
            keep_hated: keep events with ``is_hate`` 1.

        Raises:
            DataError: a path cannot be read, or a folder holds no log.
            ConfigurationError: a signal is no column of 0 and 1.
        """
        known = SIGNALS + _OTHER_SIGNALS
        for signal in signals:
            if signal not in known:
                raise ConfigurationError(f"--signals: {signal!r} is no signal of KuaiRand; choose from {', '.join(known)}")
        self._signals = list(dict.fromkeys(signals))
        self._keep_hated = keep_hated
        self.filters = ["hated: kept" if keep_hated else "not hated", "positive" if self._signals else "positive: not asked"]
        self.files = expand(paths, _logs_of)

    def tables(self, intake: Intake) -> Iterator[pa.Table]:
        """Give all events in reading order (:meth:`turbogr.data.sources.common.Source.tables`)."""
        wanted = {"user_id": Kind.ID, "video_id": Kind.ID, "time_ms": Kind.TIME}
        wanted |= dict.fromkeys([*self._signals, *([] if self._keep_hated else ["is_hate"])], Kind.FLAG)
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
                yield pa.table(columns, names=["user", "item", "time", "dropped"])


def _logs_of(folder: Path) -> list[Path]:
    for place in (folder, folder / "data"):
        logs = sorted((file for file in place.glob("log_*.csv") if file.is_file()), key=lambda file: file.name)
        if logs:
            return logs
    raise DataError(f"{folder}: holds no KuaiRand log: neither it nor its sub-folder data/ has a file log_*.csv")
