"""Clocks know the time in which the process was suspended, and calls can be abandoned."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from ddpsafe._clock import AwakeClock, BoundedCall


@dataclass
class ManualClock:
    """A clock that is set by hand."""

    now_s: float = 100.0

    def __call__(self) -> float:
        """Return the time that was set."""
        return self.now_s


@pytest.mark.parametrize(
    ("before_s", "in_wait_s", "asked_s", "counted_s"),
    [
        (0.0, 0.5, 1.0, 0.5),
        (0.0, 1.9, 1.0, 1.9),
        (0.0, 9.5, 1.0, 1.0),
        (0.9, 0.5, 0.5, 1.4),
        (9.5, 0.5, 1.0, 0.5),
        (9.5, 7.5, 0.5, 0.5),
    ],
    ids=[
        "awake",
        "busy",
        "suspended in a wait",
        "busy before it",
        "suspended before it",
        "suspended twice",
    ],
)
def test_time_in_which_the_process_was_suspended_does_not_count(
    before_s: float, in_wait_s: float, asked_s: float, counted_s: float
) -> None:
    """It counts neither in a wait nor towards a deadline, and the next wait reports it."""
    now = ManualClock()
    clock = AwakeClock(now)
    started_s = clock()
    now.now_s += before_s
    assert clock() - started_s == pytest.approx(before_s if before_s < 1 else 0)
    now.now_s += in_wait_s
    assert clock.note_wait(asked_s) == (before_s > 1 or in_wait_s - asked_s > 1)
    assert clock() - started_s == pytest.approx(counted_s)
    assert not clock.note_wait(asked_s)


@pytest.mark.parametrize("has_ended", [False, True])
def test_what_an_abandoned_call_returns_is_disposed_of_once(*, has_ended: bool) -> None:
    """Whether it returns before or after that: otherwise its connection would stay open."""
    may_end, disposed = threading.Event(), list[bool]()
    call = BoundedCall(lambda: may_end.wait(60), name="abandoned")
    if has_ended:
        may_end.set()
        assert call.wait(60)
    call.abandon(disposed.append)
    may_end.set()
    assert call.wait(60)
    assert disposed == [True]
