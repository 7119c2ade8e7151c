"""Deadlines: made once where a wait begins, passed down to everything that waits."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.1


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
