"""Watches the ranks of one attempt: first failure wins, every wait has an end."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe._clock import Deadline
from ddpsafe._launcher.watch.hang_detection import (
    FlightWatch,
    ProgressWatch,
    SequenceWatch,
    StderrWatch,
)
from ddpsafe._launcher.watch.preemption import StopRequest
from ddpsafe._wire.messages import is_peer_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpsafe._config import Timeouts
    from ddpsafe._launcher.processes.rank_process import Worker
    from ddpsafe._launcher.watch.signals import SignalInbox


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


Verdict = Literal[
    "done", "failed", "failing", "left", "overdue", "progress", "rendezvous", "attempt", "signal"
]
"""``overdue``: asked to stop, and not all ranks have. ``left``: a rank has returned and the others are in a collective that needs it.
``failing``: a rank waits for the others while its exception is on the way."""

_IDLE_S: Final = 5.0
# How long evidence may take to arrive after the first failure: the rank that broke often
# reports after the ranks that failed because of it. Longer while only such ranks have reported.
_SETTLE: Final = timedelta(seconds=0.3)
_SETTLE_SECONDARY: Final = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why the watch ended.

    Attributes:
        verdict: In a word.
        waited_s: How long the attempt had taken, in seconds.
    """

    verdict: Verdict
    waited_s: float


class Watch:
    """One attempt under watch.

    Args:
        workers: The ranks.
        timeouts: The launcher's deadlines.
        inbox: Signals to the launcher.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        timeouts: Timeouts,
        inbox: SignalInbox,
    ) -> None:
        """Start the clocks."""
        self._workers = workers
        self._timeouts = timeouts
        self._inbox = inbox
        self._rendezvous = Deadline.after(timeouts.rendezvous)
        self._attempt = Deadline.after(timeouts.attempt)
        self.stop_request = StopRequest(workers, inbox, limit=timeouts.stop)
        self._sequence = SequenceWatch(workers)
        self._flight = FlightWatch(workers)
        self._stderr = StderrWatch(workers)
        self._progress = ProgressWatch(workers, timeouts.progress)

    def until_end(self) -> Ending:
        """Wait until the attempt has ended, well or not.

        Ranks may still run when it returns; ending them is the caller's.
        """
        while (verdict := self._verdict()) is None:
            self._wait(self._next_deadline())
        if verdict == "failed":
            self._settle()
        elif verdict == "done":
            self._let_leave()
        return Ending(verdict=verdict, waited_s=self._attempt.waited_s())

    def _verdict(self) -> Verdict | None:
        """Return the first reason to end the watch, the most telling one first."""
        workers = self._workers
        self._stderr.look()
        reasons: tuple[tuple[Verdict, Callable[[], bool]], ...] = (
            ("signal", self.stop_request.must_end),
            ("failed", lambda: any(map(has_failed, workers))),
            ("done", lambda: all(worker.returned is not None for worker in workers)),
            ("failing", self._flight.stuck),
            ("left", self._sequence.somebody_left),
            ("overdue", self.stop_request.is_overdue),
            ("attempt", self._attempt.expired),
            ("progress", self._progress.stalled),
            ("rendezvous", self._late),
        )
        return next((verdict for verdict, holds in reasons if holds()), None)

    def _late(self) -> bool:
        return self._rendezvous.expired() and not all(worker.joined for worker in self._workers)

    def _next_deadline(self) -> Deadline:
        deadline = self._attempt.earlier(self.stop_request.deadline or self._attempt)
        if all(worker.joined for worker in self._workers):
            return deadline
        return self._rendezvous.earlier(deadline)

    def _settle(self) -> None:
        settle, longer = Deadline.after(_SETTLE), Deadline.after(_SETTLE_SECONDARY)
        while any(worker.alive for worker in self._workers):
            deadline = longer if self._only_peer_errors() else settle
            if deadline.expired():
                return
            self._stderr.look()
            self._wait(deadline)

    def _only_peer_errors(self) -> bool:
        failed = [worker for worker in self._workers if has_failed(worker)]
        return all(map(_blames_a_peer, failed))

    def _let_leave(self) -> None:
        """Give ranks that have returned the time to end by themselves; the result stands."""
        deadline = Deadline.after(self._timeouts.shutdown)
        farewell = Farewell(self._workers, self._timeouts.shutdown)
        while any(worker.alive for worker in self._workers) and not deadline.expired():
            if self.stop_request.must_end() or self.stop_request.is_overdue():
                return
            farewell.remind()
            self._wait(deadline.earlier(farewell.next_look))
        farewell.give_up()

    def _wait(self, deadline: Deadline) -> None:
        alive = [worker for worker in self._workers if worker.alive]
        handles = [self._inbox.fileno(), *(worker.end_handle() for worker in alive)]
        handles += [worker.receiver.fileno() for worker in alive if not worker.receiver.closed]
        ready = wait(handles, min(deadline.remaining_s(), self._longest_s()))
        seen_ns = time.monotonic_ns()
        if self._inbox.fileno() in ready:
            os.read(self._inbox.fileno(), 1)
        for worker in alive:
            worker.take_reports()
            if worker.end_handle() in ready:
                worker.note_end(seen_ns)

    def _longest_s(self) -> float:
        watches = (self._sequence, self._flight, self._progress, self._stderr)
        return min(_IDLE_S, *(watch.interval_s() for watch in watches))


def has_failed(worker: Worker) -> bool:
    """Tell whether a rank has reported a failure, or ended without any report."""
    if worker.returned is not None:
        return False
    return worker.failed or worker.native is not None or not worker.alive


def _blames_a_peer(worker: Worker) -> bool:
    """Tell whether all that a failed rank has said so far is that another one failed."""
    if worker.raised is not None:
        return worker.raised.is_peer_error
    return worker.native is not None and is_peer_origin(worker.native.origin)
