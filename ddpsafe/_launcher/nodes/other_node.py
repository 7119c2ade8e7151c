"""A node other than node 0: relays what its ranks report, and follows node 0's decisions."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from dataclasses import replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe._clock import Deadline
from ddpsafe._errors import DDPSafeError, LaunchError
from ddpsafe._job.channel import Away, Back, Lost, SilenceWatch
from ddpsafe._launcher import attempt
from ddpsafe._launcher.diagnosis import rank_readings
from ddpsafe._launcher.diagnosis.attempt_error import (
    EndedAttempt,
    Ending,
    EndReason,
    first_line,
    make_error,
    original_of,
    set_cause,
)
from ddpsafe._launcher.diagnosis.root_cause import CONNECTION_KINDS, is_own_fault, kind_of
from ddpsafe._launcher.nodes import limits
from ddpsafe._launcher.nodes.decisions import Do, Follower, Looked, Send, Warn, broke_by_itself
from ddpsafe._launcher.nodes.node_messages import (
    NodeFailed,
    NodeOutcomes,
    NodeProgress,
    RankEnded,
    RankRequest,
    RanksEnded,
    RoundResult,
    SignalReceived,
    StatusAnswer,
    StatusRequest,
    Warned,
    as_error,
    error_of,
    rank_report,
    round_result_of,
)
from ddpsafe._launcher.nodes.texts import lost_node_error, tell_of_connection
from ddpsafe._launcher.processes.descendants import reap_orphans
from ddpsafe._launcher.watch import deadlock_watch
from ddpsafe._launcher.watch.console import open_console
from ddpsafe._launcher.watch.hang_detection import StderrWatch
from ddpsafe._launcher.watch.idleness import IdleWatch
from ddpsafe._launcher.watch.signals import NONE_LEFT_HERE, Interrupted
from ddpsafe._launcher.watch.status_socket import StatusSocket
from ddpsafe._launcher.watch.supervisor import has_failed, let_ranks_leave, warn_of_late_ends
from ddpsafe._logging import get_logger
from ddpsafe._wire.messages import Whereabouts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpsafe._config import RetryPolicy
    from ddpsafe._job.channel import Channel
    from ddpsafe._launcher.launch_parts import LaunchParts
    from ddpsafe._launcher.nodes.node_messages import NodeMessage, RoundPlan
    from ddpsafe._launcher.processes.rank_process import RankProcess
    from ddpsafe._launcher.watch.signals import SignalInbox
    from ddpsafe._wire.messages import Message, RankOutcome

logger = get_logger(__name__)

_LOOK_S: Final = 1.0
_AFTER_ANSWER_S: Final = 0.05
"""How soon a report follows the answer of a rank; the others mostly answer meanwhile."""

_MAX_LOG_CHARS: Final = 64 << 10
_MAX_TRACEBACK_CHARS: Final = 8 << 10
_OWN_NETWORK: Final = (
    "If the other nodes name this one instead, the network of this node is the cause.",
)


class Participant:
    """One attempt of this node. Node 0 decides for all nodes, on a grace period, too."""

    def __init__(
        self,
        number: int,
        parts: LaunchParts,
        *,
        round_plan: RoundPlan,
        channel: Channel[int, NodeMessage],
        inbox: SignalInbox,
    ) -> None:
        self._number = number
        self._parts = parts
        self._plan = plan = parts.plan
        self._directory = parts.directory
        self._round = round_plan
        self._channel = channel
        self._inbox = inbox
        self._node_0 = round_plan.name_of(0)
        self.core = Follower(self._node_0, plan.config.timeouts)
        self._processes: Sequence[RankProcess] = ()
        self._failure: DDPSafeError | Interrupted | None = None
        self._native_sent: set[int] = set()
        self._values: dict[int, object] = {}
        self._next_progress_s = 0.0
        self._status: StatusSocket | None = None
        self._asked: deadlock_watch.StatusOfNode | None = None
        self._silence = SilenceWatch({0: self._node_0})
        self._started = Deadline.after(None)
        self._oom_kills = rank_readings.count_oom_kills()

    def run(self) -> dict[int, object] | DDPSafeError | Interrupted:
        """Run the ranks until node 0 has reported how the attempt ended, and whether there is another.

        Returns what the ranks of this node returned, by rank, or why the attempt failed.
        """
        plan = self._plan
        processes: Sequence[RankProcess] = []
        outcomes: dict[int, RankOutcome] = {}
        failure = "could not start its ranks"
        phase: Literal["start", "attempt"] = "start"
        try:
            with attempt.started_ranks(self._number, self._parts, self._inbox) as (
                processes,
                end_ranks,
            ):
                failure, phase = "could not continue the attempt", "attempt"
                self._processes, self._stderr = processes, StderrWatch(processes)
                for process in processes:
                    process.relay = functools.partial(self._relay, process.rank)
                limit = plan.config.timeouts.attempt
                with (
                    open_console(processes, plan.console, inbox=self._inbox, limit=limit),
                    contextlib.closing(StatusSocket(self._directory.logs_below)) as self._status,
                ):
                    self._watch(processes)
                    unfinished: dict[int, str] = {}
                    if self.core.may_leave and self.core.result is None:
                        unfinished = let_ranks_leave(
                            processes,
                            plan.config.timeouts,
                            wait=lambda limit_s: self._wait(min(_LOOK_S, limit_s)),
                            is_over=lambda: self.core.must_end,
                        )
                        warn_of_late_ends(processes)
                    has_broken = any(process.broke_late for process in processes)
                    for process in processes:
                        process.relay = None
                    end_ranks(processes, grace=self.core.grace)
                outcomes = {process.rank: process.outcome() for process in processes}
            if (unfinished or has_broken) and not self.core.must_end:
                ended = self._ended(outcomes)
                reason: EndReason = "finish-timeout" if unfinished else "failed"
                ending = replace(ended.ending, reason=reason, unfinished=unfinished)
                raise make_error(replace(ended, ending=ending))  # noqa: TRY301 - reported like any other
            failure = "could not load what its ranks returned"
            result = self.core.result
            if self.core.may_leave or (result is not None and result.is_preempted):
                self._values = attempt.values_of(processes, self._ended(outcomes), self._directory)
        except Exception as exc:  # noqa: BLE001 - all nodes end with it
            self._report_failure(exc, failure, phase)
        self._processes = ()
        self._take(RanksEnded())
        self._await_decision()
        return self._conclude(processes, outcomes)

    def _report_failure(
        self, exc: Exception, failure: str, phase: Literal["start", "attempt"]
    ) -> None:
        """Report to node 0 that this node has failed, so that all nodes end with the same error."""
        node = self._plan.worlds[0].node_rank
        who = self._round.name_of(node)
        self._failure = as_error(exc, who, failure, phase=phase, names_node=True)
        self._take(NodeFailed(result=round_result_of(self._failure, failed_node=node)))

    def _take(self, event: object) -> None:
        """Give the core an event, and do what it says."""
        for action in self.core.take(event, time.monotonic()):
            match action:
                case Send():
                    self._channel.send(action.message)
                case Warn():
                    logger.warning("%s", action.text)
                case Do.GIVE_UP_AWAY:
                    self._channel.give_up_away()
                case Do.ASK_RANKS:
                    self._report_outcomes()
                case Do.LET_RANKS_RUN:
                    rank_readings.continue_suspended(self._processes)
                case _:
                    raise TypeError(action)

    def _watch(self, processes: Sequence[RankProcess]) -> None:
        """Relay what the ranks report, until the attempt is over."""
        idle = IdleWatch(processes, sample_s=deadlock_watch.SETTINGS.idle_sample_s)
        failures_logged: set[int] = set()
        while not self.core.is_over and not self.core.may_leave:
            now_s = time.monotonic()
            until_report_s = max(0.0, self._next_progress_s - now_s)
            until_look_s = self.core.until_look_s(now_s)
            self._wait(min(_LOOK_S, self._stderr.interval_s(), until_report_s, until_look_s))
            self._report_native_errors()
            if self._silence.silent:
                # Else nothing would say so here: node 0, which reports failures, does not respond.
                failed = [
                    process
                    for process in processes
                    if has_failed(process) and process.rank not in failures_logged
                ]
                failures_logged |= {process.rank for process in failed}
                outcomes = [process.outcome() for process in failed]
                for outcome in sorted(outcomes, key=is_own_fault, reverse=True):
                    logger.warning(
                        "rank %d has failed%s: %s; %s decides what follows once it responds again",
                        outcome.rank,
                        "" if is_own_fault(outcome) else " because of another one",
                        first_line(outcome),
                        self._node_0,
                    )
            if time.monotonic() >= self._next_progress_s:
                self._report_progress(processes, idle)

    def _report_native_errors(self) -> None:
        self._stderr.look()
        for process in self._processes:
            if process.native is not None and process.rank not in self._native_sent:
                self._native_sent.add(process.rank)
                self._channel.send(rank_report(process.rank, process.native))

    def _report_outcomes(self) -> None:
        """Ask the ranks where they are, and report what became of them."""
        processes, policy = self._processes, self._plan.config.retry
        if processes:
            self._report_native_errors()
            attempt.ask_where(processes)
        retried = [rank.rank for rank in processes if has_raised_retried_type(rank, policy)]
        self._channel.send(
            NodeOutcomes(
                outcomes=tuple(map(_for_others, attempt.outcomes_of(processes).values())),
                oom_kills=rank_readings.count_oom_kills() - self._oom_kills,
                retried=tuple(retried),
                grace_s=self._parts.grace_period(),
            )
        )

    def _relay(self, rank: int, message: Message) -> None:
        """Pass on what a rank reports."""
        if isinstance(message, Whereabouts):
            size = self._round.world_size
            # A group of all ranks is sent as an empty one: thousands of ranks would send thousands each.
            groups = {
                name: () if len(ranks) == size else ranks for name, ranks in message.groups.items()
            }
            message = replace(message, groups=groups)
            # For a proof, an answer counts only with a report of what the rank has done since.
            self._next_progress_s = min(self._next_progress_s, time.monotonic() + _AFTER_ANSWER_S)
        self._channel.send(rank_report(rank, message))

    def _report_progress(self, processes: Sequence[RankProcess], idle: IdleWatch) -> None:
        at_ns, now_s = time.monotonic_ns(), time.monotonic()
        self._next_progress_s = now_s + self._round.progress_every_s
        activity = {process.rank: process.activity() for process in processes}
        idle.look(
            now_s, is_running=any(rank_activity.state == "R" for rank_activity in activity.values())
        )
        # A stopped launcher does not read: once its buffer is full, the kernel would report its host as
        # lost.
        if not self._silence.silent:
            self._channel.send(
                NodeProgress(
                    at_ns=at_ns,
                    ranks={process.rank: process.progress() for process in processes},
                    activity=activity,
                    idle_s=idle.idle_s(),
                    unanswered={
                        process.rank: process.unanswered
                        for process in processes
                        if process.unanswered
                    },
                )
            )

    def _wait(self, longest_s: float) -> None:
        """Wait for news of the ranks of this node, of node 0 or of a signal, and take them in."""
        alive = [process for process in self._processes if process.alive]
        handles = [self._inbox.fileno(), self._channel.fileno()]
        handles += [] if self._status is None else self._status.handles()
        handles += [process.end_handle() for process in alive]
        handles += [process.receiver.fileno() for process in alive if not process.receiver.closed]
        ready = wait(handles, longest_s)
        seen_ns = time.monotonic_ns()
        if self._inbox.fileno() in ready:
            os.read(self._inbox.fileno(), 1)
        self._take_signal()
        if self._status is not None:
            self._serve_status(self._status)
        for process in alive:
            process.take_reports()
            if process.end_handle() in ready:
                process.note_end(seen_ns)
                self._channel.send(
                    RankEnded(
                        rank=process.rank,
                        exit_code=process.exitcode,
                        ended_ns=seen_ns,
                        oom_kills=rank_readings.count_oom_kills() - self._oom_kills,
                    )
                )
        reap_orphans()
        self._take_messages()

    def _take_signal(self) -> None:
        received = self._inbox.received
        if received is not None:
            self._take(SignalReceived(number=int(received), insists=self._inbox.insists))

    def _take_messages(self) -> None:
        by_rank = {process.rank: process for process in self._processes}
        for _, event in self._channel.events():
            if isinstance(event, (Lost, Away, Back)):
                tell_of_connection(self._round, 0, event)
            else:
                self._silence.heard(0)
            if isinstance(event, RankRequest) and event.rank in by_rank:
                with contextlib.suppress(ValueError, OSError):
                    by_rank[event.rank].send(bytes.fromhex(event.request))
            elif isinstance(event, Warned):
                logger.warning("%s", event.text)
            elif isinstance(event, StatusAnswer) and self._status is not None:
                self._answer(self._status, event, by_rank)
            self._take(event)
            if isinstance(event, RoundResult) and event.is_final is not None:
                break  # what follows is about the next round
        self._silence.look(self._channel.connected() - self._channel.away())
        failed = any(map(has_failed, self._processes))
        self._take(Looked(has_failed=failed, silent_s=self._silence.silent_s(0)))

    def _serve_status(self, socket: StatusSocket) -> None:
        """Have node 0 answer, which knows all ranks; if it does not, answer for those of this node."""
        wants_stacks = socket.accept()
        if wants_stacks is not None:
            self._channel.send(StatusRequest(stacks=wants_stacks))
            self._asked = deadlock_watch.StatusOfNode(
                self._processes, wants_stacks=wants_stacks, limit=limits.STATUS
            )
        if self._asked is None or not socket.is_asked:
            return
        is_cut_off = bool(self._channel.away()) or bool(self._silence.silent)
        own = self._asked.find_own(is_cut_off=is_cut_off)
        if own is not None:
            why = f"{self._node_0} does not answer, so only the ranks of this node are shown"
            socket.answer({**own, "unanswered": [why]})

    def _answer(
        self, socket: StatusSocket, answer: StatusAnswer, processes: Mapping[int, RankProcess]
    ) -> None:
        """Pass on the status of the job: pids are known where their processes are."""
        facts = json.loads(answer.facts)
        facts |= {"pid": os.getpid(), "run_dir": str(self._directory.path)}
        for rank in facts["ranks"]:
            process = processes.get(rank["rank"])
            rank["pid"] = None if process is None else process.pid
        socket.answer(facts)

    def _await_decision(self) -> None:
        """Wait until node 0 has decided whether there is another attempt, or is lost."""
        while self.core.waits_for_decision(time.monotonic()):
            wait([self._channel.fileno()], _LOOK_S)
            self._take_signal()
            self._take_messages()

    def _conclude(
        self, processes: Sequence[RankProcess], outcomes: dict[int, RankOutcome]
    ) -> dict[int, object] | DDPSafeError | Interrupted:
        result = self.core.result
        is_stopping = any(process.stop.is_stopping for process in processes)
        conclusion = self.core.conclude(is_stopping=is_stopping)
        error: DDPSafeError | Interrupted | None = None
        if conclusion == "own-failure":
            error = self._failure
        elif conclusion == "interrupted" and self.core.ends_alone_by is not None:
            where = self._round.name_of(self._plan.worlds[0].node_rank)
            error = Interrupted(self.core.ends_alone_by, where, NONE_LEFT_HERE)
        elif conclusion == "node-0-lost":
            error = self._without_node_0(self._ended(outcomes))
        elif conclusion == "decided" and result is not None:
            error = self._error_of(result, processes, outcomes)
        return self._values if error is None else error

    def _error_of(
        self,
        result: RoundResult,
        processes: Sequence[RankProcess],
        outcomes: dict[int, RankOutcome],
    ) -> DDPSafeError | Interrupted:
        """Return the error that node 0 has sent, with what this node knows of it."""
        error = error_of(
            result, outcomes=outcomes, run_dir=self._directory.path, values=self._values
        )
        if result.failed_node == self._plan.worlds[0].node_rank:
            # It is this node's own error, which went to node 0 and back.
            error.__cause__ = None if self._failure is None else self._failure.__cause__
        elif isinstance(error, LaunchError) and not result.is_preempted:
            self._directory.note_tracebacks(outcomes.values())
            self._directory.report(self._number, error)
            raised = next(
                (w.raised for w in processes if w.rank == getattr(error, "rank", None)), None
            )
            if raised is not None:
                set_cause(error, raised)
        return error

    def _ended(self, outcomes: dict[int, RankOutcome]) -> EndedAttempt:
        return EndedAttempt(
            outcomes=outcomes,
            ending=Ending(reason="node-lost", waited_s=self._started.waited_s()),
            attempt=self._number,
            retry=self._plan.config.retry,
            run_dir=self._directory.path,
            oom_kills=rank_readings.count_oom_kills() - self._oom_kills,
            timeouts=self._plan.config.timeouts,
            nnodes=len(self._round.nodes),
            unknown_ranks=self._round.world_size - len(self._plan.worlds),
            is_script=self._plan.style == "run",
        )

    def _without_node_0(self, ended: EndedAttempt) -> LaunchError:
        """Return what its own ranks raised, which another start would not change, else that node 0 is lost."""
        lost = self.core.lost or Lost(
            how="ended", why="it has not reported how the attempt ended", seen_ns=0
        )
        error: LaunchError = lost_node_error(
            self._round,
            0,
            lost,
            when=ended.when("peer-lost"),
            details=_OWN_NETWORK if lost.is_silent and len(self._round.nodes) > 2 else (),  # noqa: PLR2004 - of two nodes, each names the other
            **ended.facts(),
        )
        own = [outcome for outcome in ended.outcomes.values() if broke_by_itself(outcome)]
        # A connection that a rank had opened itself may have broken because node 0 is lost.
        if any(
            outcome.raised is None or kind_of(outcome.raised) not in CONNECTION_KINDS
            for outcome in own
        ):
            what = error.explanation.what
            error = make_error(ended)
            error.add_details(what)
        else:
            error.add_details(
                *(f"rank {outcome.rank} has failed, too: {first_line(outcome)}" for outcome in own)
            )
        self._directory.note_tracebacks(ended.outcomes.values())
        self._directory.report(self._number, error)
        return error


def has_raised_retried_type(process: RankProcess, policy: RetryPolicy) -> bool:
    """Return whether a rank raised an exception of a retried type: the exception itself is not sent."""
    types = tuple(entry for entry in policy.on if isinstance(entry, type))
    return (
        bool(types)
        and process.raised is not None
        and isinstance(original_of(process.raised), types)
    )


def _for_others(outcome: RankOutcome) -> RankOutcome:
    """Return an outcome without its pickle, and with the end of the log, which only this host has."""
    log_end = outcome.error_text()[-_MAX_LOG_CHARS:] if outcome.status != "stopped" else ""
    raised = outcome.raised
    if raised is not None:
        short = raised.traceback[-_MAX_TRACEBACK_CHARS:]
        # No node unpickles what comes from the network.
        raised = replace(raised, payload=None, traceback=short)
    return replace(outcome, raised=raised, said=log_end)
