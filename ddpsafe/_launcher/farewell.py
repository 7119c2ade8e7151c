"""What is said of ranks that have returned, and whose processes do not end."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpsafe._launcher.worker import Worker

logger = logging.getLogger(__name__)

_FIRST: Final = timedelta(seconds=3)
_LATER: Final = timedelta(seconds=30)
_ANSWER: Final = timedelta(seconds=0.5)


class Farewell:
    """Names the ranks that are waited for, and what keeps them, every now and then.

    Attributes:
        next_look: When there is something to do again.
    """

    def __init__(self, workers: Sequence[Worker], limit: timedelta) -> None:
        """Say nothing in the first seconds: most ranks have something to clear away.

        Args:
            workers: The ranks; all have returned.
            limit: How long they may take.
        """
        self._workers = workers
        self._limit = limit
        self._end = Deadline.after(limit)
        self._has_asked = False
        self.next_look = Deadline.after(_FIRST)

    def remind(self) -> None:
        """Ask what keeps them, and a moment later say so, if it is time for it."""
        if not self.next_look.expired():
            return
        for worker in self._alive():
            if self._has_asked:
                self._say_who_is_awaited(worker)
            else:
                worker.ask_threads()
        self.next_look = Deadline.after(_LATER if self._has_asked else _ANSWER)
        self._has_asked = not self._has_asked

    def give_up(self) -> None:
        """Say which ranks are ended now."""
        for worker in self._alive():
            logger.warning(
                "rank %d has returned, but its process did not end within %s (timeouts.shutdown), "
                "so it is ended now%s; what it returned stands",
                worker.rank,
                f"{self._limit.total_seconds():g} s",
                _kept_by(worker),
            )

    def _alive(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.alive]

    def _say_who_is_awaited(self, worker: Worker) -> None:
        logger.warning(
            "rank %d has returned, but its process (pid %s) has not ended after %.0f s%s; "
            "it is ended in %.0f s (timeouts.shutdown)",
            worker.rank,
            worker.pid,
            self._end.waited_s(),
            _kept_by(worker),
            self._end.remaining_s(),
        )


def _kept_by(worker: Worker) -> str:
    living = worker.living_threads
    if living is None:
        return ""
    if living.places:
        return f": it waits for {', '.join(living.places)}"
    return (
        f": it is still running exit handlers (atexit){f' at {living.main}' if living.main else ''}"
    )
