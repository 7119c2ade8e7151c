"""Watches the ranks of one attempt: first failure wins, every wait has an end."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Final, Literal, Protocol

from ddpsafe._clock import AwakeClock, Deadline
from ddpsafe._launcher.watch.hang_detection import (
    FlightWatch,
    LearnedGaps,
    ProgressWatch,
    SequenceWatch,
    StderrWatch,
)
from ddpsafe._launcher.watch.live import LiveWatch
from ddpsafe._launcher.watch.preemption import StopRequest
from ddpsafe._logging import get_logger
from ddpsafe._wire.messages import is_peer_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpsafe._config import Timeouts
    from ddpsafe._launcher.diagnosis.wait_graph import Deadlock
    from ddpsafe._launcher.processes.rank_process import RankState, Worker
    from ddpsafe._launcher.watch.signals import SignalInbox


logger = get_logger(__name__)

_IDLE_S: Final = 1.0
"""How long to wait at most: what a wait takes beyond that is time in which it was suspended."""
# How long evidence may take to arrive after the first failure: the rank that broke often
# reports after the ranks that failed because of it. Longer while only such ranks have reported.
_SETTLE: Final = timedelta(seconds=0.3)
_SETTLE_SECONDARY: Final = timedelta(seconds=1)
# When ranks that have returned and do not end are asked what they wait for, and how soon it is said.
_FIRST_QUESTION: Final = timedelta(seconds=3)
_ANSWER: Final = timedelta(seconds=0.5)
_NEXT_QUESTION: Final = timedelta(seconds=30)


class Peers(Protocol):
    """The ranks of other nodes, as node 0's launcher watches them."""

    @property
    def ranks(self) -> Sequence[RankState]:
        """Return the ranks of all other nodes."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is news of them."""

    def take_news(self) -> None:
        """Read the news."""

    def has_lost_node(self) -> bool:
        """Tell whether a node is gone, or could not start its ranks."""

    def let_leave(self) -> None:
        """Tell their launchers that all ranks have returned."""


EndReason = Literal[
    "done",
    "failed",
    "stuck-with-error",
    "left",
    "deadlock",
    "overdue",
    "progress",
    "rendezvous",
    "attempt",
    "signal",
    "lost",
]
"""``deadlock``: ranks are proved to wait for ever. ``lost``: one of several nodes is gone.
``overdue``: asked to stop, and not all ranks have. ``left``: a rank has returned and the others are in a collective that needs it.
``stuck-with-error``: a rank waits for the others while its exception is on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Why the watch ended.

    Attributes:
        reason: See `EndReason`.
        waited_s: How long the attempt had taken, in seconds.
        proof: Why the ranks wait for ever, where that is the reason.
        progress: How long they were allowed to make no step by then.
    """

    reason: EndReason
    waited_s: float
    proof: Deadlock | None = None
    progress: timedelta | None = None


class Watch:
    """One attempt under watch.

    Its limits are measured by an `AwakeClock`, `timeouts.attempt` excepted: that one bounds what the
    attempt may take of the user's own time.

    Args:
        workers: The ranks of this node.
        timeouts: The launcher's deadlines.
        inbox: Signals to the launcher.
        peers: The ranks of other nodes, if there are any.
        learned: What attempts before have learned, for ``timeouts.progress="auto"``.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        timeouts: Timeouts,
        inbox: SignalInbox,
        peers: Peers | None = None,
        learned: LearnedGaps | None = None,
    ) -> None:
        """Start the clocks."""
        self._own, self._peers = workers, peers
        ranks: Sequence[RankState] = [*workers, *(() if peers is None else peers.ranks)]
        self._workers = ranks
        self._timeouts = timeouts
        self._inbox = inbox
        self._clock = AwakeClock()
        self._rendezvous = Deadline.after(timeouts.rendezvous, clock=self._clock)
        self._attempt = Deadline.after(timeouts.attempt)
        self.stop_request = StopRequest(ranks, inbox, limit=timeouts.stop, clock=self._clock)
        self._sequence = SequenceWatch(ranks)
        self._flight = FlightWatch(ranks)
        self._stderr = StderrWatch(workers)
        self._progress = ProgressWatch(ranks, timeouts.progress, learned=learned)
        others = () if peers is None else peers.ranks
        self._live = LiveWatch(workers, clock=self._clock, others=others)

    def until_end(self) -> Ending:
        """Wait until the attempt has ended, well or not.

        Ranks may still run when it returns; ending them is the caller's.
        """
        watches = (self._sequence, self._flight, self._progress, self._stderr, self._live)
        try:
            while (reason := self._find_reason()) is None:
                deadlines = [self._attempt, self.stop_request.deadline]
                if not self._have_all_joined():
                    deadlines.append(self._rendezvous)
                limits_s = [each.remaining_s() for each in deadlines if each is not None]
                self._wait(min(*limits_s, *(watch.interval_s() for watch in watches)))
        finally:
            self._live.close()
        if reason == "failed":
            # Wait a moment for the reports of other ranks: what is blamed may come second.
            settle = Deadline.after(_SETTLE, clock=self._clock)
            longer = Deadline.after(_SETTLE_SECONDARY, clock=self._clock)
            while any(worker.alive for worker in self._workers):
                failed = [worker for worker in self._workers if has_failed(worker)]
                deadline = longer if all(map(_blames_a_peer, failed)) else settle
                if deadline.expired():
                    break
                self._stderr.look()
                self._wait(min(deadline.remaining_s(), self._stderr.interval_s()))
        elif reason == "done":
            if self._peers is not None:
                self._peers.let_leave()
            let_ranks_leave(
                self._own,
                self._timeouts.shutdown,
                clock=self._clock,
                wait=self._wait,
                is_over=lambda: self.stop_request.must_end() or self.stop_request.is_overdue(),
            )
        return Ending(
            reason=reason,
            waited_s=self._attempt.waited_s(),
            proof=self._live.proof,
            progress=self._progress.limit,
        )

    def _find_reason(self) -> EndReason | None:
        """Return the first reason to end the watch, the most telling one first."""
        workers = self._workers
        self._stderr.look()
        reasons: tuple[tuple[EndReason, Callable[[], bool]], ...] = (
            ("signal", self.stop_request.must_end),
            ("failed", lambda: any(map(has_failed, workers))),
            ("lost", lambda: self._peers is not None and self._peers.has_lost_node()),
            ("done", lambda: all(worker.returned is not None for worker in workers)),
            ("stuck-with-error", self._flight.stuck),
            ("left", self._sequence.somebody_left),
            ("deadlock", self._live.is_deadlocked),
            ("overdue", self.stop_request.is_overdue),
            ("attempt", self._attempt.expired),
            ("progress", self._progress.stalled),
            ("rendezvous", lambda: self._rendezvous.expired() and not self._have_all_joined()),
        )
        return next((reason for reason, holds in reasons if holds()), None)

    def _have_all_joined(self) -> bool:
        return all(worker.joined for worker in self._workers)

    def _wait(self, limit_s: float) -> None:
        """Wait for news of a rank or a signal, and take it; at most `limit_s` seconds."""
        alive = [worker for worker in self._own if worker.alive]
        handles = [self._inbox.fileno(), *(worker.end_handle() for worker in alive)]
        handles += self._live.handles()
        handles += [worker.receiver.fileno() for worker in alive if not worker.receiver.closed]
        handles += [] if self._peers is None else [self._peers.fileno()]
        limit_s = min(limit_s, _IDLE_S)
        ready = wait(handles, limit_s)
        if self._clock.note_wait(limit_s):
            self._progress.restart()
            ready = wait(handles, 0)
        seen_ns = time.monotonic_ns()
        if self._inbox.fileno() in ready:
            os.read(self._inbox.fileno(), 1)
        for worker in alive:
            worker.take_reports()
            if worker.end_handle() in ready:
                worker.note_end(seen_ns)
        if self._peers is not None:
            self._peers.take_news()


def let_ranks_leave(
    workers: Sequence[Worker],
    shutdown: timedelta,
    *,
    wait: Callable[[float], object],
    is_over: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Give ranks that have returned the time to end by themselves; the result stands.

    They are named every now and then, with what keeps them.

    Args:
        workers: The ranks of this node.
        shutdown: ``timeouts.shutdown``.
        wait: Waits for news of the ranks, at most so many seconds, and takes it.
        is_over: Tells whether they have to be ended now.
        clock: What the limit is measured by.
    """
    limit = Deadline.after(shutdown, clock=clock)
    next_look = Deadline.after(_FIRST_QUESTION, clock=clock)
    has_asked = False
    while (alive := [each for each in workers if each.alive]) and not limit.expired():
        if is_over():
            return
        if next_look.expired():
            for worker in alive:
                if has_asked:
                    logger.warning(
                        "rank %d has returned, but its process (pid %s) has not ended after "
                        "%.0f s%s; it is ended in %.0f s (timeouts.shutdown)",
                        worker.rank,
                        worker.pid,
                        limit.waited_s(),
                        _kept_by(worker),
                        limit.remaining_s(),
                    )
                else:
                    worker.ask_threads()
            next_look = Deadline.after(_NEXT_QUESTION if has_asked else _ANSWER, clock=clock)
            has_asked = not has_asked
        wait(limit.earlier(next_look).remaining_s())
    for worker in alive:
        logger.warning(
            "rank %d has returned, but its process did not end within %g s (timeouts.shutdown), "
            "so it is ended now%s; what it returned stands",
            worker.rank,
            shutdown.total_seconds(),
            _kept_by(worker),
        )


def _kept_by(worker: Worker) -> str:
    """Say what a rank that has returned waits for, as far as it has answered."""
    living = worker.living_threads
    if living is None:
        return ""
    if living.places:
        return f": it waits for {', '.join(living.places)}"
    at = f" at {living.main}" if living.main else ""
    return f": it is still running exit handlers (atexit){at}"


def has_failed(worker: RankState) -> bool:
    """Tell whether a rank has reported a failure, or ended without any report."""
    if worker.returned is not None:
        return False
    return worker.failed or worker.native is not None or not worker.alive


def _blames_a_peer(worker: RankState) -> bool:
    """Tell whether all that a failed rank has said so far is that another one failed."""
    if worker.raised is not None:
        return worker.raised.is_peer_error
    return worker.native is not None and is_peer_origin(worker.native.origin)
