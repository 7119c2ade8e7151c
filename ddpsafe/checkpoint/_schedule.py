"""When to save, the same on all ranks: on disk, and in memory."""

from __future__ import annotations

import functools
import math
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from ddpsafe._job.agreement import Message
from ddpsafe.checkpoint.errors import SaveError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpsafe.checkpoint._ranks import Ranks

_SHARE: Final = 0.008
"""The share of the time that states in memory are to take with ``"auto"``; less than the promised 1 %, since
the next save may take longer than the last."""
_FIRST_STEPS: Final = 10
"""Steps to the second save: it reports what the first one took, and what a step takes, which one step alone does not
show (the first steps after a save are slower)."""


class Costs(NamedTuple):
    """What one rank has measured of its saves to memory."""

    last_s: float  # what the last one took
    spent_s: float  # what all of them took
    passed_s: float  # since the first one began
    step_s: float  # what a step took since the last one, on average


def steps_between(costs: Iterable[Costs]) -> int:
    """Return how many steps later to save again, so that this takes `_SHARE` of the time on each rank.

    The save that follows those of `costs` counts as one like the last.
    """
    most = 1.0
    for each in costs:
        # The first saves come soon, to be measured: what they took above the share is made up for.
        owed_s = (each.spent_s + each.last_s) / _SHARE - each.passed_s
        most = max(most, max(each.last_s / _SHARE, owed_s) / max(each.step_s, 1e-6))
    return math.ceil(most)


def highest(costs: Iterable[Costs]) -> Costs | None:
    """Return those of the rank that has to wait longest for its next save; ``None`` if none has measured."""
    return max(costs, key=lambda each: steps_between([each]), default=None)


class StepInterval:
    """Due once the steps have passed a multiple of a number since the last save."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._saved: int | None = None
        self._asked: int | None = None

    def begin(self, step: int, _now_s: float) -> None:
        """Begin a save: it counts, whether it succeeds or is still being written."""
        self._saved = step

    def is_due(self, step: int, newest: int | None) -> bool:
        """Return whether it is time; `newest` is the newest step that is saved."""
        before = newest if newest is not None else self._asked
        if self._saved is not None and (newest is None or self._saved > newest):
            before = self._saved
        self._asked = step
        # No step to count from: due at a multiple only.
        if before is None or before >= step:
            return step % self._every == 0 and before != step
        return step // self._every > before // self._every


class TimeInterval:
    """Due about once per duration, by the clock of one rank.

    Attributes:
        next_step: The step at which to look at the clock again: to ask the other ranks at each would cost too much.
    """

    def __init__(self, every: timedelta, now_s: float, waited_s: float) -> None:
        self.next_step = 0
        self._every_s = every.total_seconds()
        self._saved_s = now_s - waited_s
        self._first: tuple[int, float] | None = None  # the first step that was asked for, and when

    def begin(self, _step: int, now_s: float) -> None:
        """Begin a save: the next one is due an interval later, also if this one fails."""
        self._saved_s = now_s

    def decide(self, step: int, now_s: float) -> dict[str, Any]:
        """Decide whether it is time, and at which step to look again."""
        if self._first is None or step < self._first[0]:
            self._first = (step, now_s)
        steps, passed_s = step - self._first[0], now_s - self._first[1]
        left_s = self._every_s - (now_s - self._saved_s)
        due = left_s <= 0
        speed = steps / passed_s if passed_s > 0 else 0.0
        wait_steps = math.floor((self._every_s if due else left_s) * speed)
        # Skip no more steps than were measured: the first ones are slow, so the speed is a guess.
        return {"due": due, "next": step + max(1, min(wait_steps, steps))}


class CostShare:
    """Due as seldom as a share of the time demands, by what the saves before have cost."""

    def __init__(self) -> None:
        self._next_step = 0
        self._began: tuple[int, float] | None = None  # the newest save: its step, and when it began
        self._ended_s = self._first_s = self._spent_s = 0.0

    def begin(self, step: int, now_s: float) -> Costs | None:
        """Begin a save, and return what was measured before it; ``None`` if that was nothing."""
        before, self._began = self._began, (step, now_s)
        before_s, self._ended_s = self._ended_s, now_s
        self._next_step = step + _FIRST_STEPS
        if before is None:
            self._first_s = now_s
            return None
        step_s = (now_s - before_s) / max(1, step - before[0])
        return Costs(before_s - before[1], self._spent_s, now_s - self._first_s, step_s)

    def end(self, now_s: float, costs: Costs | None) -> None:
        """Choose when the next save is due; `costs` is the `highest` of what `begin` has returned on the ranks."""
        assert self._began is not None  # noqa: S101 - what ends has begun
        step, began_s = self._began
        self._ended_s = now_s
        self._spent_s += now_s - began_s
        self._next_step = step + (steps_between([costs]) if costs else _FIRST_STEPS)

    def resume(self, step: int, costs: Costs, now_s: float) -> None:
        """Continue after the save of a step, as if these costs of an earlier attempt were this one's."""
        self._began, self._ended_s = (step, now_s - costs.last_s), now_s
        self._first_s, self._spent_s = now_s - costs.passed_s, costs.spent_s
        self._next_step = step + steps_between([costs])

    def is_due(self, step: int, _newest: int | None) -> bool:
        """Return whether it is time."""
        return step >= self._next_step


def schedule_of(
    every: int | timedelta | Literal["auto"], now_s: float, waited_s: float = 0.0
) -> StepInterval | TimeInterval | CostShare:
    """Make the schedule that `every` asks for; the last save was `waited_s` ago."""
    if isinstance(every, timedelta):
        return TimeInterval(every, now_s, waited_s)
    return CostShare() if every == "auto" else StepInterval(every)


def is_due(
    schedule: StepInterval | TimeInterval | CostShare, step: int, newest: int | None, ranks: Ranks
) -> bool:
    """Return whether it is time, the same on all ranks: a clock is that of rank 0."""
    if not isinstance(schedule, TimeInterval):
        return schedule.is_due(step, newest)
    if step < schedule.next_step:
        return False
    # If each rank looked at its own clock, only some of them might save.
    exchange = ranks.begin("is_due()")
    exchange.send(Message(facts={}))
    absence_error = ranks.absence_error(
        functools.partial(SaveError, step=step),
        f"decide whether a save is due at step {step}",
        cause="did not call is_due(), hangs, or is much slower.",
        fix="call is_due() on every rank with the same steps.",
    )
    if ranks.leads:
        answer = exchange.lead(lambda: schedule.decide(step, time.monotonic()))
    else:
        answer = exchange.receive(ranks.deadline(), absence_error)
    schedule.next_step = answer["next"]
    return bool(answer["due"])
