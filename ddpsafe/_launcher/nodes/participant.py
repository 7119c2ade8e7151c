"""A node other than node 0: passes on what its ranks report, and does as node 0 says."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import Deadline
from ddpsafe._errors import DDPSafeError, LaunchError, PreflightError
from ddpsafe._launcher import attempt
from ddpsafe._launcher.diagnosis import errors, evidence
from ddpsafe._launcher.diagnosis.errors import original_of
from ddpsafe._launcher.nodes.channel import Lost
from ddpsafe._launcher.nodes.coordinator import SILENCE_S, lost_node_error, own_outcomes
from ddpsafe._launcher.nodes.messages import (
    Collect,
    Leave,
    NodeOutcomes,
    NodeProgress,
    RankComplaint,
    RankEnded,
    RanksEnded,
    RanksNotStarted,
    RanksStarted,
    RankWord,
    SignalReceived,
    Verdict,
    error_of,
    rank_report,
)
from ddpsafe._launcher.watch.console import open_console
from ddpsafe._launcher.watch.hang_detection import StderrWatch
from ddpsafe._launcher.watch.supervisor import Ending
from ddpsafe._logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpsafe._config import RetryPolicy
    from ddpsafe._launcher.nodes.channel import Channel
    from ddpsafe._launcher.nodes.messages import RoundPlan
    from ddpsafe._launcher.plan import LaunchPlan
    from ddpsafe._launcher.processes.rank_process import Worker
    from ddpsafe._launcher.processes.start import CallFile, RunRank
    from ddpsafe._launcher.run_directory import RunDirectory
    from ddpsafe._launcher.watch.signals import Interrupted, SignalInbox
    from ddpsafe._wire.messages import RankOutcome

logger = get_logger(__name__)

_PROGRESS_S: Final = 1.0
_MOST_SAID: Final = 64 << 10
_MOST_TRACEBACK: Final = 8 << 10
_OWN_NETWORK: Final = (
    "If the other nodes name this one instead, the network of this node is the cause.",
)
_DECISION: Final = timedelta(minutes=2)
"""From the end of the ranks to node 0's decision on another attempt; its retry policy takes no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Obeyed:
    """How an attempt ended on this node.

    Attributes:
        values: What its ranks returned; ``None`` where the attempt did not end well.
        error: Why not.
        is_again: Whether node 0 wants another attempt.
    """

    values: dict[int, object] | None
    error: DDPSafeError | Interrupted | None
    is_again: bool


class Participant:
    """One attempt of this node.

    Args:
        number: The attempt, counted from 1.
        plan: What to start.
        round_plan: What node 0 has decided.
        channel: The way to node 0.
        inbox: Signals to this launcher.
        directory: Where the logs go.
    """

    def __init__(
        self,
        number: int,
        *,
        plan: LaunchPlan,
        round_plan: RoundPlan,
        channel: Channel,
        inbox: SignalInbox,
        directory: RunDirectory,
    ) -> None:
        """Keep what is given."""
        self._number, self._plan, self._round = number, plan, round_plan
        self._channel, self._inbox, self._directory = channel, inbox, directory
        self._verdict: Verdict | None = None
        self._lost: Lost | None = None
        self._may_leave = False
        self._wants_evidence = False
        self._told: tuple[object, bool] = (None, False)
        self._heard_s = time.monotonic()
        self._is_node_0_silent = False
        self._started = Deadline.after(None)
        self._oom_kills = evidence.count_oom_kills()

    def run(self, call: CallFile, run_rank: RunRank) -> Obeyed:
        """Run the ranks until node 0 has said how the attempt ended, and whether there is another."""
        plan = self._plan
        try:
            with attempt.started_ranks(
                self._number,
                plan=plan,
                call=call,
                run_rank=run_rank,
                directory=self._directory,
            ) as (workers, end):
                for worker in workers:
                    worker.relay = self._passing_on(worker.rank)
                self._channel.send(RanksStarted())
                limit = plan.config.timeouts.attempt
                with open_console(workers, plan.console, inbox=self._inbox, limit=limit):
                    self._watch(workers)
                    if self._may_leave and self._verdict is None:
                        self._let_leave(workers)
                    for worker in workers:
                        worker.relay = None
                    end(workers)
                outcomes = {worker.rank: worker.outcome() for worker in workers}
        except PreflightError as exc:
            self._channel.send(RanksNotStarted(explanation=exc.explanation, kind=exc.kind))
            workers, outcomes = [], {}
        self._channel.send(RanksEnded())
        self._await_decision()
        return self._conclude(workers, outcomes)

    def _passing_on(self, rank: int) -> Callable[[object], None]:
        return lambda message: self._channel.send(rank_report(rank, message))  # type: ignore[arg-type]

    def _watch(self, workers: Sequence[Worker]) -> None:
        """Pass on, until the attempt is over."""
        stderr, next_progress_s = StderrWatch(workers), 0.0
        complained: set[int] = set()
        while self._verdict is None and self._lost is None and not self._may_leave:
            self._wait(workers, min(_PROGRESS_S, stderr.interval_s()))
            stderr.look()
            for worker in workers:
                if worker.native is not None and worker.rank not in complained:
                    complained.add(worker.rank)
                    self._channel.send(RankComplaint(rank=worker.rank, native=worker.native))
            if (now_s := time.monotonic()) >= next_progress_s:
                if now_s - next_progress_s > SILENCE_S:
                    self._heard_s = now_s  # this launcher was the one that was stopped
                next_progress_s = now_s + _PROGRESS_S
                # Node 0 says nothing, which is said once: its ranks, and these, may train on.
                if now_s - self._heard_s > SILENCE_S and not self._is_node_0_silent:
                    self._is_node_0_silent = True
                    logger.warning(
                        "node 0 (%r): its launcher has said nothing for %.0f s (stopped, starved of CPU?); "
                        "its ranks may go on",
                        self._round.nodes[0].hostname,
                        SILENCE_S,
                    )
                # To a launcher that is stopped, nothing that could fill its buffer: the kernel
                # would take it for a host that is gone.
                if not self._is_node_0_silent:
                    progress = {worker.rank: worker.progress() for worker in workers}
                    self._channel.send(NodeProgress(ranks=progress))
            if self._wants_evidence:
                self._wants_evidence = False
                evidence.collect(workers)
                policy = self._plan.config.retry
                self._channel.send(
                    NodeOutcomes(
                        outcomes=tuple(map(_for_others, own_outcomes(workers).values())),
                        oom_kills=evidence.count_oom_kills() - self._oom_kills,
                        retried=tuple(each.rank for each in workers if is_retried(each, policy)),
                    )
                )

    def _wait(self, workers: Sequence[Worker], longest_s: float) -> None:
        alive = [worker for worker in workers if worker.alive]
        handles = [self._inbox.fileno(), self._channel.fileno()]
        handles += [worker.end_handle() for worker in alive]
        handles += [worker.receiver.fileno() for worker in alive if not worker.receiver.closed]
        ready = wait(handles, longest_s)
        seen_ns = time.monotonic_ns()
        if self._inbox.fileno() in ready:
            os.read(self._inbox.fileno(), 1)
        self._tell_signal()
        for worker in alive:
            worker.take_reports()
            if worker.end_handle() in ready:
                worker.note_end(seen_ns)
                self._channel.send(
                    RankEnded(rank=worker.rank, exit_code=worker.exitcode, ended_ns=seen_ns)
                )
        self._hear(workers)

    def _tell_signal(self) -> None:
        received, insists = self._inbox.received, self._inbox.insists
        if received is not None and (received, insists) != self._told:
            self._told = (received, insists)
            self._channel.send(SignalReceived(number=int(received), insists=insists))

    def _hear(self, workers: Sequence[Worker]) -> None:
        by_rank = {worker.rank: worker for worker in workers}
        for _, event in self._channel.events():
            self._heard_s = time.monotonic()
            if self._is_node_0_silent:
                self._is_node_0_silent = False
                logger.warning(
                    "node 0 (%r): its launcher responds again", self._round.nodes[0].hostname
                )
            if isinstance(event, Lost):
                self._lost = event
            elif isinstance(event, RankWord) and event.rank in by_rank:
                with contextlib.suppress(ValueError, OSError):
                    by_rank[event.rank].say(bytes.fromhex(event.word))
            elif isinstance(event, Collect):
                self._wants_evidence = True
            elif isinstance(event, Leave):
                self._may_leave = True
            elif isinstance(event, Verdict):
                self._verdict = event

    def _let_leave(self, workers: Sequence[Worker]) -> None:
        """Give ranks that have returned the time to end by themselves."""
        limit = self._plan.config.timeouts.shutdown
        deadline = Deadline.after(limit)
        while (alive := [each for each in workers if each.alive]) and not deadline.expired():
            if self._verdict is not None or self._lost is not None:
                return
            self._wait(workers, min(_PROGRESS_S, deadline.remaining_s()))
        for worker in alive:
            logger.warning(
                "rank %d has returned, but its process did not end within %g s (timeouts.shutdown), "
                "so it is ended now; what it returned stands",
                worker.rank,
                limit.total_seconds(),
            )

    def _await_decision(self) -> None:
        """Wait until node 0 has said whether there is another attempt; its end is an answer, too."""
        deadline = Deadline.after(_DECISION)
        while self._lost is None and (self._verdict is None or self._verdict.is_final is None):
            if deadline.expired():
                return
            wait([self._channel.fileno()], min(1.0, deadline.remaining_s()))
            self._tell_signal()
            self._hear(())

    def _conclude(self, workers: Sequence[Worker], outcomes: dict[int, RankOutcome]) -> Obeyed:
        verdict = self._verdict
        ended = errors.EndedAttempt(
            outcomes=outcomes,
            ending=Ending(reason="lost", waited_s=self._started.waited_s()),
            attempt=self._number,
            retry=self._plan.config.retry,
            run_dir=self._directory.path,
            oom_kills=0,
            timeouts=self._plan.config.timeouts,
            nnodes=len(self._round.nodes),
        )
        if verdict is None:
            return self._lost_node_0(ended)
        if not verdict.name and verdict.signal is None:
            values = attempt.values_of(workers, ended, self._directory)
            return Obeyed(values=values, error=None, is_again=False)
        values = {}
        if verdict.name == "PreemptedError":
            values = attempt.values_of(workers, ended, self._directory)
        error = error_of(verdict, outcomes=outcomes, run_dir=self._directory.path, values=values)
        if isinstance(error, LaunchError) and verdict.name != "PreemptedError":
            self._directory.note_tracebacks(outcomes.values())
            self._directory.report(self._number, error)
            self._directory.holds_failure = True
            raised = next(
                (w.raised for w in workers if w.rank == getattr(error, "rank", None)), None
            )
            if raised is not None:
                error.__cause__ = original_of(raised)
        return Obeyed(values=None, error=error, is_again=verdict.is_final is False)

    def _lost_node_0(self, ended: errors.EndedAttempt) -> Obeyed:
        lost = self._lost or Lost(
            why="it has not said how the attempt ended", is_silent=False, seen_ns=0
        )
        error = lost_node_error(
            self._round,
            0,
            lost,
            when=ended.when("peer-lost"),
            details=_OWN_NETWORK if lost.is_silent and len(self._round.nodes) > 2 else (),  # noqa: PLR2004 - else the other node is all there is
            attempt=self._number,
            attempts=ended.retry.attempts,
            outcomes=ended.outcomes,
            run_dir=ended.run_dir,
        )
        self._directory.report(self._number, error)
        self._directory.holds_failure = True
        return Obeyed(values=None, error=error, is_again=False)


def is_retried(worker: Worker, policy: RetryPolicy) -> bool:
    """Tell whether a rank raised an exception of a type that is retried: it cannot travel itself."""
    types = tuple(entry for entry in policy.on if isinstance(entry, type))
    return (
        bool(types) and worker.raised is not None and isinstance(original_of(worker.raised), types)
    )


def _for_others(outcome: RankOutcome) -> RankOutcome:
    """Return an outcome without a pickle, and with the end of its log, which is on this host."""
    said = outcome.error_text()[-_MOST_SAID:] if outcome.status != "stopped" else ""
    raised = outcome.raised
    if raised is not None:
        short = raised.traceback[-_MOST_TRACEBACK:]
        raised = replace(raised, payload=None, traceback=short)
    return replace(outcome, raised=raised, said=said)
