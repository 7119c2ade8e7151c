"""At which call of `stop_requested` all ranks say yes: one number, agreed on without a collective.

Ranks may be many calls apart when a request comes, and a call that has said no cannot be taken
back. So each rank first promises: "my call number n is the next that I can answer, and I do not
answer it before I know more." The highest of all promises is a call that nobody has passed yet;
every rank says no before it and yes from it on.

Promises are made by a thread, so they do not wait for the training, and the training waits only
between its promise and the agreement: a round trip, once in a job.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ddpsafe._clock import Deadline

if TYPE_CHECKING:
    from datetime import timedelta


class NoAgreementError(Exception):
    """Other ranks have promised nothing in time.

    Attributes:
        deadline: How long it was waited for them.
    """

    def __init__(self, deadline: Deadline) -> None:
        """Keep the deadline."""
        super().__init__(deadline)
        self.deadline = deadline


class StopCalls:
    """Counts this rank's calls, and knows which one is the first to be answered with yes."""

    def __init__(self) -> None:
        """Start before the first call; nobody has asked anybody to stop."""
        self._lock = threading.Lock()
        self._count = 0
        self._promise: int | None = None
        self._agreed: int | None = None
        self._is_known = threading.Event()

    @property
    def count(self) -> int:
        """How many calls there have been."""
        return self._count

    def promise(self) -> int:
        """Return the number of the first call, from 1, that waits for `agree`; always the same."""
        with self._lock:
            if self._promise is None:
                self._promise = self._count + 1
            return self._promise

    def agree(self, call: int) -> None:
        """Say yes from that call on."""
        self._agreed = call
        self._is_known.set()

    def give_up(self) -> None:
        """Wait no more: there will be no agreement."""
        self._is_known.set()

    def answer(self, limit: timedelta | None) -> bool:
        """Count a call and answer it.

        Args:
            limit: How long to wait for the others' promises; ``None`` where somebody else ends
                this process if they do not come.

        Raises:
            NoAgreementError: The limit passed before the others had promised, or they cannot.
        """
        with self._lock:
            self._count += 1
            call, promise = self._count, self._promise
        if promise is None or call < promise:
            return False
        if self._agreed is None:
            self._await_agreement(Deadline.after(limit))
        assert self._agreed is not None  # noqa: S101 - known by now
        return call >= self._agreed

    def _await_agreement(self, deadline: Deadline) -> None:
        self._is_known.wait(min(deadline.remaining_s(), threading.TIMEOUT_MAX))
        if self._agreed is None:
            raise NoAgreementError(deadline)
