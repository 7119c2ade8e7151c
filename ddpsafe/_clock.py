"""Deadlines, and calls that end with one."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta


_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.1
_SUSPENDED_S: Final = 1.0
"""A wait that takes so much longer than asked for was not all a wait: this process was stopped."""


class AwakeClock:
    """Monotonic time without that in which this process was suspended.

    Ctrl-Z, SIGSTOP and a frozen virtual machine stop a process and not the clock. What others did
    meanwhile has not been seen, so none of that time may be held against them.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start with the monotonic clock's reading."""
        self._now = now
        self._suspended_s = 0.0
        self._last_s = now()
        self._was_suspended = False

    def __call__(self) -> float:
        """Return a reading in seconds, for `Deadline`.

        A process can be stopped between two waits as well, just before it looks at its deadlines.
        """
        self._look(0)
        return self._last_s - self._suspended_s

    def note_wait(self, asked_s: float) -> bool:
        """Note the end of a wait; tell whether this process was suspended since the one before.

        Args:
            asked_s: How long the wait might have taken, in seconds.
        """
        self._look(asked_s)
        was_suspended, self._was_suspended = self._was_suspended, False
        return was_suspended

    def _look(self, asked_s: float) -> None:
        now_s = self._now()
        late_s = now_s - self._last_s - asked_s
        self._last_s = now_s
        if late_s >= _SUSPENDED_S:
            self._suspended_s += late_s
            self._was_suspended = True


class HeldClock:
    """Time that does not begin before it is released: what others have to do first counts against no one."""

    def __init__(self) -> None:
        """Stand still."""
        self._released_s: float | None = None

    def release(self) -> None:
        """Let time begin; only the first call counts."""
        if self._released_s is None:
            self._released_s = time.monotonic()

    def __call__(self) -> float:
        """Return a reading in seconds, for `Deadline`."""
        return 0.0 if self._released_s is None else time.monotonic() - self._released_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A point in monotonic time after which waiting is over.

    Attributes:
        started_s: Clock reading when the deadline was made, in seconds.
        ends_s: Clock reading at which it expires; infinity for never.
        clock: Where the readings come from.
    """

    started_s: float
    ends_s: float
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(
        cls, wait: timedelta | None, *, clock: Callable[[], float] = time.monotonic
    ) -> Deadline:
        """Make the deadline that expires `wait` from now; ``None`` never expires."""
        now = clock()
        ends = math.inf if wait is None else now + wait.total_seconds()
        return cls(started_s=now, ends_s=ends, clock=clock)

    def remaining_s(self) -> float:
        """Seconds left, never negative; infinity where there is no end."""
        return max(0.0, self.ends_s - self.clock())

    def waited_s(self) -> float:
        """Seconds since the deadline was made."""
        return self.clock() - self.started_s

    def expired(self) -> bool:
        """Tell whether waiting is over."""
        return self.clock() >= self.ends_s

    def earlier(self, other: Deadline) -> Deadline:
        """Return whichever expires first."""
        return self if self.ends_s <= other.ends_s else other

    def pauses_s(self) -> Iterator[float]:
        """Yield how long to sleep before the next look, longer each time, until this expires.

        The last is 0: there is always a look when the time is up.

        What comes soon is seen soon, and a long wait costs its peers little.
        """
        pause_s = _FIRST_PAUSE_S
        while not self.expired():
            yield min(pause_s, self.remaining_s())
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        yield 0.0


T = TypeVar("T")


class BoundedCall(Generic[T]):
    """One call in a daemon thread of its own, waited for no longer than the caller likes.

    ``stat`` on a dead network mount and ``getaddrinfo`` without a name server cannot be
    interrupted. The thread stays with such a call; the caller goes on. It ends with the call, and
    a process does not wait for it at exit.
    """

    def __init__(self, function: Callable[[], T], *, name: str) -> None:
        """Start the call.

        Args:
            function: What to call; it must be harmless after the wait for it was given up.
            name: Name of the thread, for stack dumps.
        """
        self._function = function
        self._outcome: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._function())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self._error = error

    def wait(self, limit_s: float) -> bool:
        """Wait for the end of the call, at most `limit_s` seconds; tell whether it came."""
        limit_s = min(limit_s, threading.TIMEOUT_MAX)
        clock = AwakeClock()
        self._thread.join(limit_s)
        while self._thread.is_alive() and clock.note_wait(limit_s):
            self._thread.join(limit_s)  # it was suspended with this one
        return not self._thread.is_alive()

    def result(self) -> T:
        """Return what the call returned, or raise what it raised; only once it has ended."""
        if self._error is not None:
            raise self._error
        return self._outcome[0]
