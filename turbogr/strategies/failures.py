"""What becomes of the other ranks when one fails: they learn which, at what step and why, and end."""

from __future__ import annotations

import threading
import time

from torch import distributed as dist

from turbogr.errors import TurboGRError

_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_FOR_OTHERS = 3.0  # to learn of a failure, before the failing rank takes its connections (and maybe the store) along
_SIGNS_OF_LOSS = ("remote worker", "connection closed", "connection reset", "broken pipe")


class RankFailedError(TurboGRError):
    """Another rank has failed, and training cannot go on without it; the message names rank, step and cause."""


def lost_connection(error: BaseException) -> bool:
    """Whether an error only says that another process is gone, in gloo's words or the system's."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS_OF_LOSS)


class FailureBoard:
    """A place in the process group's store where the first rank that fails says so, and where the others look.

    A rank that raises ends with its process, and its connections with it: whoever waits for it then raises at once, but would
    only say that a peer is gone. So the failing rank leaves a note first, and waits a moment until the others, each by a thread
    of its own, have read it.

    Args:
        rank: this one.
        world_size: W.
        store: of the process group.
        run: number of the run; the same on all ranks.

    Attributes:
        failure: what the first rank that failed says; None while all is well.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store, run: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.failure: str | None = None
        self._failed_here = False
        # A connection of its own: the thread shall not stand in line behind a main thread that waits in the store.
        self._store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self._key = f"turbogr/failure/{run}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="turbogr-failures", daemon=True)
        self._thread.start()

    @property
    def failed_elsewhere(self) -> str | None:
        """What another rank said when it failed, as far as that is known by now."""
        if self.failure is None and not self._failed_here:
            self._look()
        return None if self._failed_here else self.failure

    def report(self, text: str) -> str:
        """Notes that this rank has failed, unless another was first, and waits a moment for the others to learn of it.

        Args:
            text: which rank, when and why.

        Returns:
            What the first rank to fail said.
        """
        self._over.set()
        try:
            first = self._store.compare_set(self._key, "", text).decode()
            self._failed_here = first == text
            if self._failed_here:
                end = time.monotonic() + _SECONDS_FOR_OTHERS
                while self._store.add(f"{self._key}/read", 0) < self.world_size - 1 and time.monotonic() < end:
                    time.sleep(0.05)
            else:
                self._store.add(f"{self._key}/read", 1)
        except RuntimeError:  # the store has ended with the rank that held it
            first = text
        self.failure = first
        return first

    def blame(self, exception: BaseException, where: str) -> None:
        """Makes an exception say which rank failed first, and tells the others if it was this one.

        Args:
            exception: raised on this rank; its text becomes the first failure's, with its own behind.
            where: stage and step.
        """
        cause = f"{type(exception).__name__}: {str(exception).strip()}"
        lost = lost_connection(exception)
        did = "lost the connection to a rank that said nothing (was it killed?)" if lost else "failed"
        own = f"rank {self.rank} {did} in {where}: {cause}"
        first = self.failed_elsewhere or self.report(own)
        if first == own and lost:
            exception.args = (own,)
        elif not first.endswith(cause):
            exception.args = (f"{first}\n(rank {self.rank} ends with it: {cause})",)

    def close(self) -> None:
        """Ends the thread."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SECONDS_BETWEEN_LOOKS) and self.failure is None:
            if not self._look():
                return

    def _look(self) -> bool:
        """Whether the store still answers."""
        try:
            if self._store.check([self._key]):
                self.failure = self._store.get(self._key).decode()
                self._store.add(f"{self._key}/read", 1)
        except RuntimeError:
            return False
        return True
