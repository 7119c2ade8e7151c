"""Hang detection: hangs that can be seen before any collective times out."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe._clock import Deadline
from ddpsafe._wire.foreign_texts import find_native_error, says_that_it_ends
from ddpsafe._wire.messages import MAIN_GROUP, last_in_main

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpsafe._launcher.processes.rank_process import RankProcess, RankState
    from ddpsafe._wire.messages import Collective, Position
    from ddpsafe._wire.rank_pipe import Progress

_FIRST_PAUSE_RETURNED_S: Final = 0.5
_FIRST_PAUSE_IN_FLIGHT_S: Final = 0.25
_PAUSE_FACTOR: Final = 1.25
_LONGEST_PAUSE_S: Final = 5.0
_SHORTEST_INTERVAL_S: Final = 0.01
_LOOK_S: Final = 1.0
_LAST_QUESTION_S: Final = 0.5  # with less time than this left, the ranks are not asked again
_REPEATS: Final = 2
_STDERR_S: Final = 0.5
_OVERLAP_BYTES: Final = 4096  # read again, since the last look may have cut a message in two
_NEVER_S: Final = 3600.0


class _AskSchedule:
    """When to ask the ranks where they are: soon at first, then less and less often.

    To answer, a rank reads all of torch's flight recorder, which may stop its training for a third
    of a second.
    """

    def __init__(self, first_pause_s: float) -> None:
        self._first_pause_s = self._pause_s = first_pause_s
        self._asked_s = self._next_s = -math.inf

    def restart(self) -> None:
        """Ask at the next look, or soon after the last one."""
        # Not at each look: of many ranks that return one after another, all would be asked each time.
        self._next_s = self._asked_s + self._first_pause_s
        self._pause_s = self._first_pause_s

    def is_due(self) -> bool:
        """Return whether to ask now; if so, schedule the next time."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        self._asked_s, self._next_s = now_s, now_s + self._pause_s
        self._pause_s = min(self._pause_s * _PAUSE_FACTOR, _LONGEST_PAUSE_S)
        return True

    def interval_s(self) -> float:
        """Return how many seconds remain until it is due."""
        return max(_SHORTEST_INTERVAL_S, self._next_s - time.monotonic())


class SequenceWatch:
    """Notices that a rank has returned while another waits in a collective that needs it.

    A rank that has returned enters no further collective. Another rank that stays in a later one of
    the group of all ranks waits for ever, so there is no need to wait for a timeout.
    """

    def __init__(self, processes: Sequence[RankState]) -> None:
        self._processes = processes
        self._schedule = _AskSchedule(_FIRST_PAUSE_RETURNED_S)
        self._returned = 0
        self._waiting: dict[int, Collective] = {}
        self._answers: dict[int, Position | None] = {}

    def interval_s(self) -> float:
        """Return how often to look, in seconds."""
        return self._schedule.interval_s() if self._is_needed() else _NEVER_S

    def has_rank_left(self) -> bool:
        """Return whether two answers in a row show that a rank waits for one that has returned."""
        if not self._is_needed():
            return False
        returned = sum(process.returned is not None for process in self._processes)
        if returned != self._returned:
            self._returned = returned
            self._schedule.restart()
        if not self._schedule.is_due():
            return False
        ends = [
            0 if (last := last_in_main(left.position)) is None else last.number
            for process in self._processes
            if (left := process.left) is not None and left.is_reported
        ]
        waiting = {
            process.rank: last
            for process in self._processes
            if process.returned is None
            and (last := last_in_main(process.position)) is not None
            and not last.done
            and last.number > min(ends, default=last.number)
        }
        answers = {process.rank: process.position for process in self._processes}
        # The same answer as at the last look is not a second one.
        fresh = {rank for rank in waiting if answers[rank] is not self._answers.get(rank)}
        same = {rank for rank in fresh if self._waiting.get(rank) == waiting[rank]}
        self._waiting, self._answers = waiting, answers
        for process in self._processes:
            if process.alive and process.returned is None:
                process.ask_position()
        return bool(same)

    def _is_needed(self) -> bool:
        returned = [process.returned is not None for process in self._processes]
        return any(returned) and not all(returned)


class FlightWatch:
    """Notices that a rank with an exception in flight and another rank wait for each other.

    An example is ``except: dist.barrier()`` while the others are in an all-reduce: neither would end
    before its timeout, and there is nothing left to learn from waiting for it.
    """

    def __init__(self, processes: Sequence[RankState]) -> None:
        self._processes = processes
        self._schedule = _AskSchedule(_FIRST_PAUSE_IN_FLIGHT_S)
        self._answers: dict[int, Position | None] = {}
        self._repeats: Counter[int] = Counter()
        self._failing: set[int] = set()
        self._new: set[int] = set()  # of those, since the ranks were last asked

    def interval_s(self) -> float:
        """Return how often to look, in seconds."""
        return self._schedule.interval_s() if self._failing else _NEVER_S

    def is_stuck(self) -> bool:
        """Return whether such a rank and one that waits for it stay where they are."""
        failing = {process.rank for process in self._processes if _has_exception_in_flight(process)}
        new, self._failing = failing - self._failing, failing
        if new:
            self._schedule.restart()
        self._new = (self._new | new) & failing
        if not failing or not self._schedule.is_due():
            return False
        for process in self._processes:
            if process.alive and process.returned is None:
                self._compare(process, is_new=process.rank in self._new)
                process.ask_position()
        self._new = set()
        staying = {rank for rank, repeats in self._repeats.items() if repeats >= _REPEATS}
        places = {rank: self._answers[rank] for rank in staying}
        for rank in failing & staying:
            position = places[rank]
            newest = None if position is None else position.newest()
            of_all = newest is None or newest.group == MAIN_GROUP or newest.is_own_wait
            if newest is not None and not of_all and not newest.done:
                continue  # it waits for some of the ranks only, which may still join it
            last = last_in_main(position)
            if any(_wait_for_each_other(last, last_in_main(other)) for other in places.values()):
                return True
        return False

    def _compare(self, process: RankState, *, is_new: bool) -> None:
        """Count how many answers in a row show the rank in the same place."""
        before, now = self._answers.get(process.rank), process.position
        if is_new or last_in_main(before) != last_in_main(now):
            self._repeats[process.rank] = 0
        elif now is not before:  # the rank has answered again
            self._repeats[process.rank] += 1
        self._answers[process.rank] = now


def _has_exception_in_flight(process: RankState) -> bool:
    if process.raised is None or process.failed:  # the first, as most ranks have raised nothing
        return False
    return process.alive and process.returned is None


def _wait_for_each_other(mine: Collective | None, theirs: Collective | None) -> bool:
    """Return whether another rank waits in a collective that this one is not in."""
    if theirs is None or theirs.done:
        return False
    if mine is None or mine.number < theirs.number:
        return True
    return mine.number == theirs.number and not mine.done and not mine.may_pair_with(theirs)


class StderrWatch:
    """Notices that NCCL's watchdog has announced in a rank's stderr that it will end the process.

    Before the abort it waits up to a minute for the dump of the flight recorder. In that time all
    ranks are alive, and can still be asked where they are.
    """

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        self._watched = []
        for process in processes:
            # With other settings the watchdog does not end the process: the script handles NCCL errors.
            env = {**(process.spec.inherited_env or os.environ), **process.spec.env}
            tears_down = env.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") in ("1", "3")
            raises = env.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("0", "")
            if tears_down and not raises:
                self._watched.append(process)
        self._read: dict[int, int] = {}

    def interval_s(self) -> float:
        """Return how often to look, in seconds; a look costs a ``stat`` for each rank."""
        return _STDERR_S if any(map(_may_announce, self._watched)) else _NEVER_S

    def look(self) -> None:
        """Read what ranks have written since the last look; keep the watchdog's message."""
        for process in filter(_may_announce, self._watched):
            path, read = process.spec.logs.stderr, self._read.get(process.rank, 0)
            with contextlib.suppress(OSError):
                size = os.stat(path).st_size  # noqa: PTH116 - twice a second for each rank
                if size > read:
                    with Path(path).open("rb") as file:
                        file.seek(max(0, read - _OVERLAP_BYTES))
                        is_announced = says_that_it_ends(file.read())
                    self._read[process.rank] = size
                    if is_announced:
                        process.note_native(find_native_error(process.error_text()))


def _may_announce(process: RankProcess) -> bool:
    return process.alive and process.returned is None and process.native is None


class LearnedGaps:
    """How long this launch goes without a sign of progress while all is well.

    A gap is the time between two signs of progress. `FACTOR` times the longest gap so far is too
    long. Later attempts of the launch use what earlier ones have learned.

    Attributes:
        first_s: The gap from when all ranks have joined to the first step of any rank.
        step_s: The longest gap after that, without those in which a `Checkpointer` saved.
        save_s: The longest gap in which a `Checkpointer` saved.
    """

    FACTOR: Final = 5.0  # as in NVIDIA's resiliency extension
    LEAST_S = 60.0  # no limit is shorter than this,
    LEAST_SLOW_S = 300.0  # and none for first steps and saves than this
    KNOWN: Final = 3  # so many gaps between steps have to be seen before there is a limit

    def __init__(self) -> None:
        self._seen = 0
        self.first_s: float | None = None
        self.step_s = 0.0
        self.save_s: float | None = None

    def note(self, gap_s: float, *, is_first: bool, is_save: bool) -> None:
        """Learn from a gap that has ended with a sign of progress."""
        if is_first:
            self.first_s = max(self.first_s or 0.0, gap_s)
        elif is_save:
            self.save_s = max(self.save_s or 0.0, gap_s)
        else:
            self._seen += 1
            self.step_s = max(self.step_s, gap_s)

    def limit(self, *, is_first: bool, is_save: bool) -> timedelta | None:
        """Return the longest gap to allow now; ``None`` if that is not known yet."""
        if is_first:
            known_s, least_s = self.first_s, self.LEAST_SLOW_S
        elif is_save:
            known_s, least_s = self.save_s, self.LEAST_SLOW_S
        else:
            known_s, least_s = self.step_s if self._seen >= self.KNOWN else None, self.LEAST_S
        if known_s is None:
            return None
        return timedelta(seconds=max(least_s, self.FACTOR * known_s))


class NewCollectives:
    """Finds the collectives that ranks have entered since the last look.

    It compares their numbers, not their times: after the wall clock was set back, times from before
    would lie in the future for long.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], int] = {}

    def last_entered_ns(self, positions: Iterable[Position | None]) -> int:
        """Return when the last new one was entered, on the wall clock; 0 if there is none.

        `positions` are those of the same ranks, in the same order, at each call.
        """
        last_ns = 0
        for place, position in enumerate(positions):
            if position is None:
                continue
            for group in {call.group for call in position.collectives}:
                last = position.in_group(group)
                if last is not None and self._known.get((place, group)) != last.number:
                    self._known[place, group] = last.number
                    last_ns = max(last_ns, last.entered_ns)
        return last_ns


class ProgressWatch:
    """Notices that no rank has made a step or entered a collective for too long.

    Steps are seen without asking. The ranks are asked for their last collective only after half of
    the limit has passed without a step, again after half of the remaining time, and so on.
    """

    def __init__(
        self,
        processes: Sequence[RankState],
        limit: timedelta | Literal["auto"] | None,
        *,
        learned: LearnedGaps | None = None,
    ) -> None:
        """Start to measure; with ``None`` nothing is too long."""
        self._processes = processes
        self._is_auto = limit == "auto"
        self._learned = learned or LearnedGaps()
        self._limit = limit if isinstance(limit, timedelta) else None
        self._seen: object = None
        self._since_s = time.monotonic()
        self._was_saving = self._is_interrupted = False
        self._is_first = self._was_starting = True
        self._collectives = NewCollectives()
        self._ask_at_s = 0.0
        self._renew(self._limit)

    @property
    def limit(self) -> timedelta | None:
        """How long the ranks may now go without a sign of progress."""
        return self._limit

    def interval_s(self) -> float:
        """Return how often to look, in seconds."""
        if self._limit is None:
            return _LOOK_S if self._is_auto else _NEVER_S
        until_question_s = self._deadline.remaining_s() - self._ask_at_s
        return min(_LOOK_S, max(0.0, until_question_s) + _SHORTEST_INTERVAL_S)

    def stalled(self) -> bool:
        """Return whether the deadline has passed without a sign of progress."""
        if self._limit is None and not self._is_auto:
            return False
        progress = [process.progress() for process in self._processes]
        seen = [
            (process.phase, rank_progress, process.returned is None)
            for process, rank_progress in zip(self._processes, progress, strict=True)
        ]
        # `timeouts.start` limits the time until all have joined.
        starting = not all(process.joined for process in self._processes)
        if starting or seen != self._seen:
            self._learn(progress, starting=starting)
            self._seen = seen
            self._renew(self._limit)
        if self._limit is None:
            return False
        # A collective is a sign of progress, too: measure from the last one that a rank has entered.
        entered_ns = self._collectives.last_entered_ns(
            process.position for process in self._processes
        )
        if entered_ns:
            ago = timedelta(seconds=max(0, time.time_ns() - entered_ns) / 1e9)
            if self._limit - ago > timedelta(seconds=self._deadline.remaining_s()):
                self._renew(self._limit - ago)
        left_s = self._deadline.remaining_s()
        if left_s <= self._ask_at_s:
            self._ask_at_s = left_s / 2 if left_s > _LAST_QUESTION_S else 0.0
            for process in self._processes:
                if process.alive and process.joined:
                    process.ask_position()
        return self._deadline.expired()

    def restart(self) -> None:
        """Measure from now on: the launcher was suspended, so what it knows of the ranks is old."""
        self._is_interrupted = True
        self._renew(self._limit)

    def _learn(self, progress: Sequence[Progress], *, starting: bool) -> None:
        """With "auto": learn from the gap that ends now, and set the limit for the next one."""
        if not self._is_auto:
            return
        now_s = time.monotonic()
        is_saving = any(rank_progress.saving for rank_progress in progress)
        has_stepped = any(rank_progress.steps for rank_progress in progress)
        # At the first look after all have joined, the first step may already have been made: it took no
        # longer than the time since the look before. The first gap ends with that step only.
        if has_stepped and not starting and not self._is_interrupted:
            gap_s = now_s - self._since_s
            self._learned.note(gap_s, is_first=self._is_first, is_save=self._was_saving)
        if has_stepped or starting or self._was_starting:
            self._since_s, self._is_interrupted = now_s, False
        self._was_starting, self._was_saving = starting, is_saving
        # A step may be seen in shared memory before the rank's report that it has joined is read.
        self._is_first = starting or not has_stepped
        leaves = any(process.returned is not None for process in self._processes)
        self._limit = (
            None
            if starting or leaves  # how long the end takes after the last step was never learned
            else self._learned.limit(is_first=self._is_first, is_save=is_saving)
        )

    def _renew(self, wait: timedelta | None) -> None:
        self._deadline = Deadline.after(wait)
        self._ask_at_s = self._deadline.remaining_s() / 2
