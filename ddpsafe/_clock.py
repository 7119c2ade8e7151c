"""Deadlines, the clocks that they use, and calls with a time limit."""

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
_PAUSE_GROWTH: Final = 1.5
_SUSPENDED_S: Final = 1.0
"""If a wait takes this much longer than requested, the process was suspended."""


class AwakeClock:
    """Monotonic time, minus the time for which this process was suspended.

    Ctrl-Z, SIGSTOP and a frozen virtual machine stop a process, but not the clock. The process did not
    see what others did in that time, so it must not count towards their deadlines.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._suspended_s = 0.0
        self._last_s = now()
        self._was_suspended = False

    def __call__(self) -> float:
        """Return a reading in seconds, for `Deadline`."""
        self._advance(0)  # the process may have been suspended after its last wait
        return self._last_s - self._suspended_s

    def note_wait(self, asked_s: float) -> bool:
        """Note the end of a wait; return whether this process was suspended since the previous one.

        `asked_s` is the longest time that the wait could have taken, in seconds.
        """
        self._advance(asked_s)
        was_suspended, self._was_suspended = self._was_suspended, False
        return was_suspended

    def _advance(self, asked_s: float) -> None:
        now_s = self._now()
        late_s = now_s - self._last_s - asked_s
        self._last_s = now_s
        if late_s >= _SUSPENDED_S:
            self._suspended_s += late_s
            self._was_suspended = True


class HeldClock:
    """A clock that stands still until it is released: time before that counts for no deadline."""

    def __init__(self) -> None:
        self._released_s: float | None = None

    def release(self) -> None:
        """Start the clock; only the first call counts."""
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
        """Seconds left, never negative; infinity if this never expires."""
        return max(0.0, self.ends_s - self.clock())

    def waited_s(self) -> float:
        """Seconds since the deadline was made."""
        return self.clock() - self.started_s

    def expired(self) -> bool:
        """Return whether the deadline has passed."""
        return self.clock() >= self.ends_s

    def earlier(self, other: Deadline) -> Deadline:
        """Return whichever expires first."""
        return self if self.ends_s <= other.ends_s else other

    def pauses_s(self) -> Iterator[float]:
        """Yield how long to sleep before the next poll, longer each time, until this expires.

        The last pause is 0, for a final poll when the time is up.
        """
        # Short at first, to notice a quick result at once. In a long wait each poll costs the peers
        # time.
        pause_s = _FIRST_PAUSE_S
        while not self.expired():
            yield min(pause_s, self.remaining_s())
            pause_s = min(pause_s * _PAUSE_GROWTH, _LONGEST_PAUSE_S)
        yield 0.0


T = TypeVar("T")


class BoundedCall(Generic[T]):
    """A call in its own daemon thread, so that the caller can stop waiting for it.

    ``stat`` on a dead network mount and ``getaddrinfo`` without a name server cannot be interrupted. The
    caller continues, and the thread stays with the call until that returns. The process does not wait for the
    thread at exit. The function must do no harm after the caller has given up; the name is for stack dumps.
    """

    def __init__(self, function: Callable[[], T], *, name: str) -> None:
        self._function = function
        self._outcome: list[T] = []
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._dispose: Callable[[T], None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            outcome = self._function()
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._error = error
            return
        with self._lock:
            self._outcome.append(outcome)
            dispose = self._dispose
        if dispose is not None:
            dispose(outcome)

    def abandon(self, dispose: Callable[[T], None]) -> None:
        """Give up on the call: what it returns, or has returned, is given to `dispose`."""
        with self._lock:
            self._dispose = dispose
            outcomes = self._outcome.copy()
        for outcome in outcomes:
            dispose(outcome)

    def wait(self, limit_s: float) -> bool:
        """Wait for at most `limit_s` seconds; return whether the call has ended."""
        limit_s = min(limit_s, threading.TIMEOUT_MAX)
        clock = AwakeClock()
        self._thread.join(limit_s)
        while self._thread.is_alive() and clock.note_wait(limit_s):
            self._thread.join(limit_s)  # the call was suspended too
        return not self._thread.is_alive()

    def result(self) -> T:
        """Return what the call returned, or raise what it raised; valid once it has ended."""
        if self._error is not None:
            raise self._error
        return self._outcome[0]
