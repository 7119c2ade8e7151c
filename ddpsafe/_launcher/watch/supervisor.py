"""Watches the ranks of one attempt until it ends, with a deadline for every wait."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import AwakeClock, Deadline
from ddpsafe._launcher.diagnosis.attempt_error import Ending
from ddpsafe._launcher.processes.descendants import reap_orphans
from ddpsafe._launcher.watch.deadlock_watch import LiveWatch
from ddpsafe._launcher.watch.hang_detection import (
    FlightWatch,
    LearnedGaps,
    ProgressWatch,
    SequenceWatch,
    StderrWatch,
)
from ddpsafe._launcher.watch.preemption import StopRequest
from ddpsafe._logging import get_logger
from ddpsafe._text import signal_name
from ddpsafe._wire.messages import is_peer_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from signal import Signals

    from ddpsafe._config import Timeouts
    from ddpsafe._launcher.diagnosis.attempt_error import EndedAttempt, EndReason
    from ddpsafe._launcher.processes.rank_process import RankProcess, RankState
    from ddpsafe._launcher.watch.signals import SignalInbox
    from ddpsafe._launcher.watch.status_socket import StatusRequests
    from ddpsafe._wire.messages import RankOutcome


logger = get_logger(__name__)

# Waits are short so that `AwakeClock` can tell: one that takes much longer means a suspended launcher.
_LONGEST_WAIT_S: Final = 1.0
# How many times as long as a look at all ranks the watch then waits at least, so that looks take a
# quarter of a core at most: one takes 0.1 ms with 8 ranks, and 40 ms with 8,192, as they all report.
_REST: Final = 3
# How long the end of a failed rank may take before the others are ended: its exit functions run.
_END_OF_A_RANK: Final = timedelta(seconds=5)
# How long to wait for more evidence after that: the rank that broke often reports
# after the ranks that failed because of it. Wait longer while only such ranks have reported.
_SETTLE: Final = timedelta(seconds=0.3)
_SETTLE_PEER_ERRORS: Final = timedelta(seconds=1)
LEAVE: Final = timedelta(seconds=30)  # to leave the process group, which takes NCCL seconds at most
# Ranks that have returned but do not exit are asked, after the first time and then again and again,
# which threads keep them alive; the warning comes once they have had the time to answer.
_ASK_THREADS_AFTER: Final = timedelta(seconds=3)
_ASK_THREADS_AGAIN_AFTER: Final = timedelta(seconds=30)
_THREADS_ANSWER: Final = timedelta(seconds=0.5)
_THREADS_ANSWER_ON_A_BUSY_MACHINE: Final = timedelta(seconds=5)


class Peers:
    """The ranks of other nodes, as node 0's launcher sees them; here for a job of one node, without any.

    `OtherNodes` is for several.
    """

    @property
    def retried(self) -> Collection[int]:
        """Return the ranks whose exception is of a type that is retried."""
        return ()

    @property
    def ranks(self) -> Sequence[RankState]:
        """Return the ranks of all other nodes."""
        return ()

    # During the attempt.

    def find_leaving(self) -> Mapping[str, Signals]:
        """Return the nodes that leave the job, without the others, and the signal to the launcher of each."""
        return {}

    def handles(self) -> list[int]:
        """Return descriptors that are readable when their launchers have sent something."""
        return []

    def take_news(self) -> None:
        """Read what their launchers have sent."""

    def tell(self, text: str) -> None:
        """Show a warning on all other nodes."""

    def status_requests(self) -> Sequence[StatusRequests]:
        """Return the requests for the status that their launchers pass on."""
        return ()

    def has_lost_node(self) -> bool:
        """Return whether a node is lost, or could not start its ranks."""
        return False

    def let_leave(self) -> None:
        """Notify their launchers that all ranks have returned."""

    def let_run(self, limit: timedelta) -> None:
        """Notify their launchers that a rank has failed, and that the others may run for so long."""

    # At its end, in this order.

    def gather_evidence(
        self,
        ending: Ending,
        processes: Sequence[RankProcess],
        ask_where: Callable[[Sequence[RankProcess]], None],
    ) -> Ending:
        """Have the ranks of all nodes asked where they are; return why the attempt ended."""
        if ending.reason not in ("done", "signal"):
            ask_where(processes)
        return ending

    def longest_grace_s(self, own_s: float | None) -> float | None:
        """Return the longest ``join(grace_period=…)`` of any node; ``None`` if no node asks for one."""
        return own_s

    def outcomes(self) -> dict[int, RankOutcome]:
        """Return what became of their ranks."""
        return {}

    def oom_kills(self) -> int:
        """Return how many processes their kernels have killed for memory during the attempt."""
        return 0

    def silent_nodes(self) -> list[str]:
        """Return a line for each launcher that sends nothing although it is connected."""
        return []

    def require_all_nodes(self, ended: EndedAttempt) -> None:
        """Raise the error of a node that is lost or has failed, if that is what ended the attempt."""

    def announce(self, exc: BaseException, ended: EndedAttempt) -> BaseException:
        """Send their launchers the error of the attempt; return it in the form that all nodes raise."""
        del ended
        return exc

    def await_ends(
        self, ended: EndedAttempt, error: BaseException | None, grace: timedelta
    ) -> BaseException | None:
        """Wait until their ranks have ended; return the error, which that may bring."""
        del ended, grace
        return error


class AttemptWatch:
    """Watches the ranks of one attempt, on all its nodes, until it has ended."""

    def __init__(
        self,
        processes: Sequence[RankProcess],
        *,
        timeouts: Timeouts,
        inbox: SignalInbox,
        peers: Peers | None = None,
        learned: LearnedGaps | None = None,
    ) -> None:
        self._processes = processes
        self._peers = Peers() if peers is None else peers
        ranks = self._ranks = [*processes, *self._peers.ranks]
        self._timeouts = timeouts
        self._inbox = inbox
        self._clock = AwakeClock()
        self._start = Deadline.after(timeouts.start, clock=self._clock)
        # By the monotonic clock: this one limits the user's own time, a suspended launcher's included.
        self._attempt = Deadline.after(timeouts.attempt)
        self.stop_request = StopRequest(
            ranks,
            inbox,
            limit=timeouts.stop,
            clock=self._clock,
            find_leaving=self._peers.find_leaving,
            tell=self._peers.tell,
        )
        self._sequence = SequenceWatch(ranks)
        self._flight = FlightWatch(ranks)
        self._stderr = StderrWatch(processes)
        self._has_full_logs = False
        self._progress = ProgressWatch(ranks, timeouts.progress, learned=learned)
        self._live = LiveWatch(
            processes,
            clock=self._clock,
            others=self._peers.ranks,
            tell=self._peers.tell,
            requests=self._peers.status_requests(),
        )

    def until_end(self) -> Ending:
        """Wait until the attempt has ended, successfully or not.

        Ranks may still be running when it returns; the caller ends them.
        """
        watches = (self._sequence, self._flight, self._progress, self._stderr, self._live)
        try:
            while True:
                before_s = time.thread_time()
                if (reason := self._find_reason()) is not None:
                    break
                deadlines = [self._attempt, self.stop_request.deadline]
                if not self._have_all_joined():
                    deadlines.append(self._start)
                limits_s = [
                    deadline.remaining_s() for deadline in deadlines if deadline is not None
                ]
                limit_s = min(*limits_s, *(watch.interval_s() for watch in watches))
                took = timedelta(seconds=time.thread_time() - before_s)
                rest = Deadline.after(_REST * took, clock=self._clock)
                self._wait(limit_s)
                while not rest.expired():
                    self._wait(rest.remaining_s())
        finally:
            self._live.close()
        unfinished: dict[int, str] = {}
        if reason == "failed":
            self._let_errors_spread()
        elif reason == "done":
            self._peers.let_leave()
            must_stop = False

            def is_over() -> bool:
                nonlocal must_stop  # asked once: `must_end` logs what it decides
                stop = self.stop_request
                must_stop = must_stop or stop.must_end() or stop.is_overdue()
                return must_stop

            unfinished = let_ranks_leave(
                self._processes, self._timeouts, clock=self._clock, wait=self._wait, is_over=is_over
            )
            warn_of_late_ends(self._processes)
            if unfinished and self.stop_request.is_overdue():
                reason = "stop-timeout"
            elif unfinished and not must_stop:
                reason = "finish-timeout"
            elif not must_stop and any(process.broke_late for process in self._processes):
                reason = "failed"
        return Ending(
            reason=reason,
            unfinished=unfinished,
            waited_s=self._attempt.waited_s(),
            proof=self._live.proof,
            progress=self._progress.limit,
        )

    def _let_errors_spread(self) -> None:
        """Let the other ranks report what they raise because one has failed, before they are ended."""
        # They notice it by its connections, which last until its process ends.
        closing = Deadline.after(_END_OF_A_RANK, clock=self._clock)
        self._look_while(
            lambda: all(rank.alive for rank in self._failed()) and not self.stop_request.must_end(),
            lambda: closing,
        )
        settle = Deadline.after(_SETTLE, clock=self._clock)
        longer = Deadline.after(_SETTLE_PEER_ERRORS, clock=self._clock)
        self._look_while(
            lambda: any(rank.alive for rank in self._ranks),
            lambda: longer if all(map(_blames_a_peer, self._failed())) else settle,
        )

    def _look_while(self, goes_on: Callable[[], bool], limit: Callable[[], Deadline]) -> None:
        while goes_on() and not (deadline := limit()).expired():
            self._stderr.look()
            self._wait(min(deadline.remaining_s(), self._stderr.interval_s()))

    def _failed(self) -> list[RankState]:
        return [rank for rank in self._ranks if has_failed(rank)]

    def let_ranks_run(self, limit: timedelta) -> bool:
        """Let the ranks end by themselves after one has failed, for up to `limit`.

        Returns:
            Whether they had that time; False if a signal to end the job, or the loss of a node, cut it
            short.
        """
        deadline = Deadline.after(limit, clock=self._clock)
        self._peers.let_run(limit)
        while any(rank.alive for rank in self._ranks) and not deadline.expired():
            if self.stop_request.must_end() or self._peers.has_lost_node():
                return False
            self._wait(deadline.remaining_s())
        return True

    def _find_reason(self) -> EndReason | None:
        """Return the first reason to end the watch, in the order of `EndReason`, if there is one."""
        self._stderr.look()
        # Not all of these only look. When they are called, `must_end` passes a request to stop on to the
        # ranks; `is_stuck`, `has_rank_left`, `is_deadlocked` and `stalled` ask the ranks where they are,
        # if it is time to. So a reason that holds keeps those below it from asking.
        reasons: tuple[tuple[EndReason, Callable[[], bool]], ...] = (
            ("signal", self.stop_request.must_end),
            ("failed", lambda: any(map(has_failed, self._ranks))),
            (
                "node-lost",
                lambda: self._peers.has_lost_node() or self.stop_request.has_nothing_to_save,
            ),
            ("done", lambda: all(rank.returned is not None for rank in self._ranks)),
            ("stuck-with-error", self._flight.is_stuck),
            ("left", self._sequence.has_rank_left),
            ("deadlock", self._live.is_deadlocked),
            ("stop-timeout", self.stop_request.is_overdue),
            ("attempt-timeout", self._attempt.expired),
            ("no-progress", self._progress.stalled),
            ("start-timeout", lambda: self._start.expired() and not self._have_all_joined()),
        )
        return next((reason for reason, holds in reasons if holds()), None)

    def _have_all_joined(self) -> bool:
        return all(rank.joined for rank in self._ranks)

    def _wait(self, limit_s: float) -> None:
        """Wait up to `limit_s` seconds for a rank's report or end, or a signal, and take note of it."""
        alive = [process for process in self._processes if process.alive]
        handles = [self._inbox.fileno(), *(process.end_handle() for process in alive)]
        handles += self._live.handles()
        handles += [process.receiver.fileno() for process in alive if not process.receiver.closed]
        handles += self._peers.handles()
        limit_s = min(limit_s, _LONGEST_WAIT_S)
        ready = wait(handles, limit_s)
        if self._clock.note_wait(limit_s):
            # This process was suspended: what it knows of the ranks is old.
            self._progress.restart()
            ready = wait(handles, 0)
        seen_ns = time.monotonic_ns()
        if self._inbox.fileno() in ready:
            os.read(self._inbox.fileno(), 1)
        for process in alive:
            process.take_reports()
            if process.end_handle() in ready:
                process.note_end(seen_ns)
        self._warn_of_full_logs()
        reap_orphans()
        self._peers.take_news()

    def _warn_of_full_logs(self) -> None:
        """Warn once that ranks write to memory in place of their logs."""
        full = [process for process in self._processes if process.full_log is not None]
        if full and not self._has_full_logs and full[0].full_log is not None:
            self._has_full_logs = True
            path, reason = full[0].full_log
            logger.warning(
                "rank %d cannot write to its log %s: %s. The ranks go on, and the console shows what they "
                "write, but it is in no log: free some space there, or pass run_dir= with a directory "
                "that has more",
                full[0].rank,
                path,
                reason,
            )


def let_ranks_leave(
    processes: Sequence[RankProcess],
    timeouts: Timeouts,
    *,
    wait: Callable[[float], object],
    is_over: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, str]:
    """Give ranks that have returned the time to exit by themselves.

    A rank that hangs while it leaves its process group is waited for no longer than `LEAVE`: its result
    stands. What the script itself still does is part of the job, so it gets the time it needs, or
    ``timeouts.finish``. A warning names it from time to time.

    `is_over` returns whether the ranks have to be ended now.

    Returns:
        What ranks had not finished when their time was over, by rank.
    """
    leaving = Deadline.after(LEAVE, clock=clock)
    finish: dict[int, Deadline] = {}  # of each rank, from when only the script's own code runs
    next_step = Deadline.after(_ASK_THREADS_AFTER, clock=clock)
    has_asked = False
    answer = next_step
    stuck: set[int] = set()
    while True:
        alive = [process for process in processes if process.alive]
        if leaving.expired():
            for process in alive:
                if not process.is_finishing and process.rank not in stuck:
                    stuck.add(process.rank)
                    logger.warning(
                        "rank %d has returned, but did not leave its process group within %g s, so "
                        "it will be ended; that does not count as a failure",
                        process.rank,
                        LEAVE.total_seconds(),
                    )
        waited_for = [process for process in alive if process.rank not in stuck]
        if not waited_for:
            return {}
        for process in waited_for:
            if process.is_finishing:
                finish.setdefault(process.rank, Deadline.after(timeouts.finish, clock=clock))
        finishing = [process for process in waited_for if process.rank in finish]
        if is_over() or any(finish[process.rank].expired() for process in finishing):
            return {process.rank: _what_runs(process) for process in finishing}
        has_all = all(process.living_threads is not None for process in waited_for)
        if next_step.expired() and has_asked and not has_all and not answer.expired():
            next_step = Deadline.after(_THREADS_ANSWER, clock=clock)
        elif next_step.expired():
            for process in waited_for:
                if has_asked:
                    logger.warning(
                        "rank %d has returned, but its process (pid %s) has not exited after %.0f s: it "
                        "waits for %s%s",
                        process.rank,
                        process.pid,
                        leaving.waited_s(),
                        _what_runs(process),
                        _what_then(process, timeouts),
                    )
                else:
                    process.ask_threads()
            answer = Deadline.after(_THREADS_ANSWER_ON_A_BUSY_MACHINE, clock=clock)
            pause = _ASK_THREADS_AGAIN_AFTER if has_asked else _THREADS_ANSWER
            next_step = Deadline.after(pause, clock=clock)
            has_asked = not has_asked
        limit = next_step if leaving.expired() else next_step.earlier(leaving)
        for process in finishing:
            limit = limit.earlier(finish[process.rank])
        wait(limit.remaining_s())


def warn_of_late_ends(processes: Sequence[RankProcess]) -> None:
    """Warn of ranks that broke after their function had returned: no failure, but something to know."""
    for process in processes:
        code = process.exitcode
        is_late = process.returned is not None and not process.is_being_ended
        if is_late and code and not process.broke_late:
            logger.warning(
                "rank %d %s after it had returned, in an exit function or in the end of a library; "
                "that does not count as a failure (with run_dir=, its log is kept)",
                process.rank,
                f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}",
            )


def _what_runs(process: RankProcess) -> str:
    """Return what keeps the process of a rank that has returned alive, if the rank has answered."""
    if not process.is_finishing:
        return "its process group to end"
    return "its own code" if process.living_threads is None else str(process.living_threads)


def _what_then(process: RankProcess, timeouts: Timeouts) -> str:
    if not process.is_finishing:
        return f"; it will be ended after {LEAVE.total_seconds():g} s"
    limit = "" if timeouts.finish is None else f", at most {timeouts.finish.total_seconds():g} s"
    advice = "the launch ends when that is done"
    if process.living_threads is not None and process.living_threads.queue:
        advice = "read the queue before you wait for the ranks; if the caller of spawn() reads it, use join=False"
    return f"; {advice}{limit} (timeouts.finish)"


def has_failed(process: RankState) -> bool:
    """Return whether a rank has reported a failure, or ended without any report."""
    if process.returned is not None:
        return False
    return process.failed or process.native is not None or not process.alive


def _blames_a_peer(process: RankState) -> bool:
    """Return whether a failed rank has so far reported only that another rank failed."""
    if process.raised is not None:
        return process.raised.is_peer_error
    return process.native is not None and is_peer_origin(process.native.origin)
