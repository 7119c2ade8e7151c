"""Whether ranks get on: hangs that can be told before any collective times out."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import Deadline
from ddpsafe._launcher.causes import MAIN_GROUP

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from ddpsafe._launcher.worker import Worker
    from ddpsafe._wire.outcome import Collective, Position

_ASK_EVERY_S: Final = 0.5
_ASK_IN_FLIGHT_S: Final = 0.25
_REPEATS: Final = 2
_NEVER_S: Final = 3600.0


class SequenceWatch:
    """Notices that a rank has returned while another waits in a collective that needs it.

    A rank that has returned will enter no further collective; another rank that stays in a later
    one of the group of all ranks waits for ever, so there is no timeout to wait for.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        """Ask nobody until a rank has returned."""
        self._workers = workers
        self._next_s = 0.0
        self._waiting: dict[int, Collective] = {}

    def interval_s(self) -> float:
        """Return how often to look, in seconds."""
        return _ASK_EVERY_S if self._is_needed() else _NEVER_S

    def somebody_left(self) -> bool:
        """Tell whether a rank waits, for the second time in a row, for one that has returned."""
        if not self._is_needed() or time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + _ASK_EVERY_S
        waiting = self._who_waits()
        same = {rank for rank, last in waiting.items() if self._waiting.get(rank) == last}
        self._waiting = waiting
        for worker in self._workers:
            if worker.alive and worker.returned is None:
                worker.ask_position()
        return bool(same)

    def _is_needed(self) -> bool:
        returned = [worker.returned is not None for worker in self._workers]
        return any(returned) and not all(returned)

    def _who_waits(self) -> dict[int, Collective]:
        ends = [
            _number(worker.returned.position)
            for worker in self._workers
            if worker.returned is not None
        ]
        return {
            worker.rank: last
            for worker in self._workers
            if worker.returned is None
            and worker.position is not None
            and (last := worker.position.in_group(MAIN_GROUP)) is not None
            and not last.done
            and last.number > min(ends)
        }


def _number(position: Position) -> int:
    last = _last(position)
    return 0 if last is None else last.number


class FlightWatch:
    """Notices that a rank with an exception in flight waits for ranks that wait for it elsewhere.

    Neither ``except: dist.barrier()`` nor the all-reduce that the others are in would end before
    its timeout, though everything is known.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        """Ask nobody until an exception has been seen in flight."""
        self._workers = workers
        self._next_s = 0.0
        self._answers: dict[int, Position | None] = {}
        self._repeats: Counter[int] = Counter()
        self._failing: set[int] = set()

    def interval_s(self) -> float:
        """Return how often to look, in seconds."""
        return _ASK_IN_FLIGHT_S if any(map(_has_exception_in_flight, self._workers)) else _NEVER_S

    def stuck(self) -> bool:
        """Tell whether such a rank and one that waits for it stay where they are."""
        failing = {worker.rank for worker in self._workers if _has_exception_in_flight(worker)}
        if not failing or time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + _ASK_IN_FLIGHT_S
        for worker in self._workers:
            if worker.alive and worker.returned is None:
                self._compare(worker, is_new=worker.rank in failing - self._failing)
                worker.ask_position()
        self._failing = failing
        staying = {rank for rank, repeats in self._repeats.items() if repeats >= _REPEATS}
        lasts = {rank: _last(self._answers[rank]) for rank in staying}
        return any(
            _wait_for_each_other(lasts[mine], theirs)
            for mine in failing & staying
            for theirs in lasts.values()
        )

    def _compare(self, worker: Worker, *, is_new: bool) -> None:
        """Count how often a rank has answered that it is where it was."""
        before, now = self._answers.get(worker.rank), worker.position
        if is_new or _last(before) != _last(now):
            self._repeats[worker.rank] = 0
        elif now is not before:  # not merely the answer that we know
            self._repeats[worker.rank] += 1
        self._answers[worker.rank] = now


def _has_exception_in_flight(worker: Worker) -> bool:
    return worker.alive and worker.raised is not None and not worker.failed


def _wait_for_each_other(mine: Collective | None, theirs: Collective | None) -> bool:
    """Tell whether another rank waits in a collective that this one is not in."""
    if theirs is None or theirs.done:
        return False
    if mine is None or mine.number < theirs.number:
        return True
    others = (mine.name, mine.sizes) != (theirs.name, theirs.sizes)
    return mine.number == theirs.number and not mine.done and others


def _last(position: Position | None) -> Collective | None:
    return None if position is None else position.in_group(MAIN_GROUP)


class ProgressWatch:
    """Notices that no rank has made a step, or entered a collective, for too long."""

    def __init__(self, workers: Sequence[Worker], longest: timedelta | None) -> None:
        """Start the clock; ``None`` never stalls."""
        self._workers = workers
        self._longest = longest
        self._deadline = Deadline.after(longest)
        self._seen: object = None
        self._next_s = 0.0

    def interval_s(self) -> float:
        """Return how often to look, in seconds."""
        return _NEVER_S if self._longest is None else min(1.0, self._deadline.remaining_s() + 0.01)

    def stalled(self) -> bool:
        """Tell whether the deadline passed without a sign of headway."""
        if self._longest is None:
            return False
        self._ask()
        seen = [(w.phase, w.steps(), w.position, w.returned is None) for w in self._workers]
        starting = not all(worker.joined for worker in self._workers)  # under a deadline of its own
        if starting or seen != self._seen:
            self._seen = seen
            self._deadline = Deadline.after(self._longest)
        return self._deadline.expired()

    def _ask(self) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + 1.0
        for worker in self._workers:
            if worker.alive and worker.joined:
                worker.ask_position()
