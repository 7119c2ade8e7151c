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


class Schedule:
    """Every so many steps, about once per duration, or as seldom as a share of the time demands.

    Args:
        every: The steps or the duration; ``"auto"`` for what `note_saved` is told.
        waited_s: How long ago the last save was, in seconds.
    """

    def __init__(self, every: int | timedelta | Literal["auto"], waited_s: float = 0.0) -> None:
        self._every = every
        # With "auto":
        self._next_step = 0
        self._saving: tuple[int, float] | None = None
        self._first_s = self._spent_s = 0.0
        self._saved_s = self._written_s = time.monotonic() - waited_s
        self._first: tuple[int, float] | None = None
        self._next_check = 0
        self._last_step: int | None = None

    def after_restore(self, waited_s: float = 0.0) -> Schedule:
        """Return one that has chosen no step yet: the training continues from another one."""
        return Schedule(self._every, waited_s)

    def waited_s(self) -> float:
        """Return how long ago the last save began that has been written, in seconds."""
        return time.monotonic() - self._written_s

    def note_written(self) -> None:
        """Note that the save that began last has been written."""
        if self._saving is not None:
            self._written_s = self._saving[1]

    def begin(self, step: int) -> Costs | None:
        """Begin a save, and return what was measured before it; ``None`` if that was nothing.

        The next one is due an interval later, whether this one succeeds or is still being written.
        """
        now_s = time.monotonic()
        before, self._saving = self._saving, (step, now_s)
        before_s, self._saved_s = self._saved_s, now_s
        self._next_step = step + _FIRST_STEPS
        if before is None:
            self._first_s = now_s
            return None
        step_s = (now_s - before_s) / max(1, step - before[0])
        return Costs(before_s - before[1], self._spent_s, now_s - self._first_s, step_s)

    def note_saved(self, costs: Costs | None = None) -> None:
        """Measure from now; with ``"auto"``, choose when the next save is due, the same on all ranks.

        `costs` is the `highest` of what `begin` has returned on the ranks.
        """
        self._saved_s = time.monotonic()
        if self._saving is not None:
            step, began_s = self._saving
            self._spent_s += self._saved_s - began_s
            self._next_step = step + (steps_between([costs]) if costs else _FIRST_STEPS)

    def resume(self, step: int, costs: Costs) -> None:
        """Continue after the save of a step, as if these costs of an earlier attempt were this one's."""
        self._saved_s = time.monotonic()
        self._saving = step, self._saved_s - costs.last_s
        self._first_s = self._saved_s - costs.passed_s
        self._spent_s = costs.spent_s
        self._next_step = step + steps_between([costs])

    def is_due(self, step: int, newest: int | None, ranks: Ranks) -> bool:
        """Return whether it is time."""
        if self._every == "auto":
            return step >= self._next_step
        if isinstance(self._every, int):
            before = newest if newest is not None else self._last_step
            if self._saving is not None and (newest is None or self._saving[0] > newest):
                before = self._saving[0]
            self._last_step = step
            # No step to count from: due at a multiple only.
            if before is None or before >= step:
                return step % self._every == 0 and before != step
            return step // self._every > before // self._every
        # Rank 0 has chosen that step for all ranks: an exchange at each step would cost too much.
        if step < self._next_check:
            return False
        # By the clock of rank 0: if each rank looked at its own, only some of them might save.
        exchange = ranks.begin("is_due()")
        exchange.send(Message(facts={}))
        absence_error = ranks.absence_error(
            functools.partial(SaveError, step=step),
            f"decide whether a save is due at step {step}",
            cause="did not call is_due(), hangs, or is much slower.",
            fix="call is_due() on every rank with the same steps.",
        )
        assert isinstance(self._every, timedelta)  # noqa: S101 - the others are done
        every_s = self._every.total_seconds()
        if ranks.leads:
            answer = exchange.lead(lambda: self._decide(step, every_s))
        else:
            answer = exchange.receive(ranks.deadline(), absence_error)
        self._next_check = answer["next"]
        return bool(answer["due"])

    def _decide(self, step: int, every_s: float) -> dict[str, Any]:
        """Decide on rank 0 whether it is time, and at which step to check again."""
        now = time.monotonic()
        if self._first is None or step < self._first[0]:
            self._first = (step, now)
        steps, passed_s = step - self._first[0], now - self._first[1]
        left_s = every_s - (now - self._saved_s)
        due = left_s <= 0
        speed = steps / passed_s if passed_s > 0 else 0.0
        wait_steps = math.floor((every_s if due else left_s) * speed)
        # Skip no more steps than were measured: the first ones are slow, so the speed is a guess.
        return {"due": due, "next": step + max(1, min(wait_steps, steps))}
