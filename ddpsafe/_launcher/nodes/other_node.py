"""A node other than node 0: relays what its ranks report, and follows node 0's decisions."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe._clock import Deadline
from ddpsafe._errors import DDPSafeError, LaunchError
from ddpsafe._job.channel import Away, Back, Lost, SilenceWatch
from ddpsafe._launcher import attempt
from ddpsafe._launcher.diagnosis import rank_readings
from ddpsafe._launcher.diagnosis.attempt_error import (
    EndedAttempt,
    first_line,
    make_error,
    original_of,
    set_cause,
)
from ddpsafe._launcher.diagnosis.root_cause import CONNECTION_KINDS, is_own_fault, kind_of
from ddpsafe._launcher.nodes.node_messages import (
    LetRanksExit,
    LetRanksRunOn,
    NodeFailed,
    NodeOutcomes,
    NodeProgress,
    RankEnded,
    RankNativeError,
    RankRequest,
    RanksEnded,
    ReportOutcomes,
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
from ddpsafe._launcher.nodes.node_zero import (
    REDIAL,
    broke_by_itself,
    lost_node_error,
    name_failed_node,
    note_loss,
    warn_of_outage,
)
from ddpsafe._launcher.processes.descendants import reap_orphans
from ddpsafe._launcher.watch import deadlock_watch
from ddpsafe._launcher.watch.console import open_console
from ddpsafe._launcher.watch.hang_detection import StderrWatch
from ddpsafe._launcher.watch.idleness import IdleWatch
from ddpsafe._launcher.watch.signals import NONE_LEFT_HERE, Interrupted
from ddpsafe._launcher.watch.status_socket import StatusSocket
from ddpsafe._launcher.watch.supervisor import (
    LEAVE,
    Ending,
    EndReason,
    has_failed,
    let_ranks_leave,
    warn_of_late_ends,
)
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

_NO_ANSWER_S: Final = 3.0
"""A launcher that runs sends something every 2 s: after so long this node may end without node 0."""

_NO_STATUS: Final = timedelta(seconds=6)
"""Node 0 gives the ranks 5 s to answer, and `ddpsafe status` waits for 10 s."""

_MAX_LOG_CHARS: Final = 64 << 10
_MAX_TRACEBACK_CHARS: Final = 8 << 10
_OWN_NETWORK: Final = (
    "If the other nodes name this one instead, the network of this node is the cause.",
)
_DECISION: Final = timedelta(minutes=2)
"""How long node 0 may take from the end of all ranks to its decision on another attempt.

Its retry policy decides at once. It may take as long to act on a Ctrl-C, whatever holds it up.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResult:
    """How an attempt ended on this node.

    Attributes:
        values: What its ranks returned; ``None`` if the attempt failed.
        error: Why it failed.
        is_another_to_follow: Whether node 0 begins another attempt.
        is_alone: Whether node 0 was lost before it could decide that.
    """

    values: dict[int, object] | None
    error: DDPSafeError | Interrupted | None
    is_another_to_follow: bool
    is_alone: bool = False


class Participant:
    """One attempt of this node.

    Args:
        number: The attempt, counted from 1.
        parts: What to start, and how. Node 0 decides for all nodes, on a grace period, too.
        round_plan: What node 0 has decided.
        channel: The control channel to node 0.
        inbox: Signals to this launcher.
    """

    def __init__(
        self,
        number: int,
        parts: LaunchParts,
        *,
        round_plan: RoundPlan,
        channel: Channel[int, NodeMessage],
        inbox: SignalInbox,
    ) -> None:
        """Keep the arguments; `run` starts the ranks."""
        self._number = number
        self._parts = parts
        self._plan = plan = parts.plan
        self._directory = parts.directory
        self._round = round_plan
        self._channel = channel
        self._inbox = inbox
        self._grace = plan.config.timeouts.grace
        self._may_run_on = False
        self._result: RoundResult | None = None
        self._values: dict[int, object] = {}
        self._failed: DDPSafeError | Interrupted | None = None
        self._lost: Lost | None = None
        # Once this has passed and a rank here has failed, node 0 counts as lost, although it may come
        # back.
        self._gives_up = Deadline.after(None)
        self._may_leave = False
        self._wants_evidence = False
        self._reported: SignalReceived | None = None
        self._reported_s = 0.0
        self._has_warned_of_silence = False
        self._next_progress_s = 0.0
        self._ends_alone_by: signal.Signals | None = None
        self._node_0 = round_plan.name_of(0)
        self._status: StatusSocket | None = None
        self._asked: deadlock_watch.StatusOfNode | None = None
        self._silence = SilenceWatch({0: self._node_0})
        self._started = Deadline.after(None)
        self._oom_kills = rank_readings.count_oom_kills()

    def run(self) -> NodeResult:
        """Run the ranks until node 0 has reported how the attempt ended, and whether there is another."""
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
                for process in processes:
                    process.relay = functools.partial(self._relay, process.rank)
                limit = plan.config.timeouts.attempt
                with (
                    open_console(processes, plan.console, inbox=self._inbox, limit=limit),
                    contextlib.closing(StatusSocket(self._directory.path)) as self._status,
                ):
                    self._watch(processes)
                    unfinished: dict[int, str] = {}
                    if self._may_leave and self._result is None:
                        unfinished = let_ranks_leave(
                            processes,
                            plan.config.timeouts,
                            wait=lambda limit_s: self._wait(processes, min(_LOOK_S, limit_s)),
                            is_over=self._must_end,
                        )
                        warn_of_late_ends(processes)
                    has_broken = any(process.broke_late for process in processes)
                    for process in processes:
                        process.relay = None
                    end_ranks(processes, grace=self._grace)
                outcomes = {process.rank: process.outcome() for process in processes}
            if (unfinished or has_broken) and not self._must_end():
                ended = self._ended(outcomes)
                reason: EndReason = "finish-timeout" if unfinished else "failed"
                ending = replace(ended.ending, reason=reason, unfinished=unfinished)
                raise make_error(replace(ended, ending=ending))  # noqa: TRY301 - reported like any other
            failure = "could not load what its ranks returned"
            if self._may_leave or (self._result is not None and self._result.is_preempted):
                self._values = attempt.values_of(processes, self._ended(outcomes), self._directory)
        except Exception as exc:  # noqa: BLE001 - all nodes end with it
            self._report_failure(exc, failure, phase)
        self._channel.send(RanksEnded())
        self._await_decision()
        return self._conclude(processes, outcomes)

    def _report_failure(
        self, exc: Exception, failure: str, phase: Literal["start", "attempt"]
    ) -> None:
        """Report to node 0 that this node has failed, so that all nodes end with the same error."""
        node = self._plan.worlds[0].node_rank
        who = self._round.name_of(node)
        error = as_error(exc, who, failure, phase=phase)
        if error is exc:
            name_failed_node(error, who, failure)
        self._failed = error
        self._channel.send(NodeFailed(result=round_result_of(error, failed_node=node)))

    def _watch(self, processes: Sequence[RankProcess]) -> None:
        """Relay what the ranks report, until the attempt is over."""
        stderr = StderrWatch(processes)
        idle = IdleWatch(processes, sample_s=deadlock_watch.SETTINGS.idle_sample_s)
        native_sent: set[int] = set()
        failures_logged: set[int] = set()
        while not self._is_over() and not self._may_leave:
            until_report_s = max(0.0, self._next_progress_s - time.monotonic())
            until_given_up_s = self._gives_up.remaining_s() or _LOOK_S
            longest_s = min(_LOOK_S, stderr.interval_s(), until_report_s, until_given_up_s)
            self._wait(processes, longest_s)
            stderr.look()
            if self._gives_up.expired() and any(map(has_failed, processes)):
                self._channel.give_up_away()  # node 0 cannot decide what follows
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
            for process in processes:
                if process.native is not None and process.rank not in native_sent:
                    native_sent.add(process.rank)
                    self._channel.send(RankNativeError(rank=process.rank, native=process.native))
            if time.monotonic() >= self._next_progress_s:
                self._report_progress(processes, idle)
            if self._wants_evidence:
                self._wants_evidence = False
                attempt.ask_where(processes)
                policy = self._plan.config.retry
                self._channel.send(
                    NodeOutcomes(
                        outcomes=tuple(map(_for_others, attempt.outcomes_of(processes).values())),
                        oom_kills=rank_readings.count_oom_kills() - self._oom_kills,
                        retried=tuple(
                            process.rank
                            for process in processes
                            if has_raised_retried_type(process, policy)
                        ),
                        grace_s=self._parts.grace_period(),
                    )
                )
            if self._may_run_on:
                self._may_run_on = False
                rank_readings.continue_suspended(processes)

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

    def _wait(self, processes: Sequence[RankProcess], longest_s: float) -> None:
        alive = [process for process in processes if process.alive]
        handles = [self._inbox.fileno(), self._channel.fileno()]
        handles += [] if self._status is None else self._status.handles()
        handles += [process.end_handle() for process in alive]
        handles += [process.receiver.fileno() for process in alive if not process.receiver.closed]
        ready = wait(handles, longest_s)
        seen_ns = time.monotonic_ns()
        if self._inbox.fileno() in ready:
            os.read(self._inbox.fileno(), 1)
        self._report_signal()
        if self._status is not None:
            self._serve_status(self._status, processes)
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
        self._take_messages(processes)

    def _report_signal(self) -> None:
        if self._inbox.received is None:
            return
        message = SignalReceived(number=int(self._inbox.received), insists=self._inbox.insists)
        if message != self._reported:
            self._reported, self._reported_s = message, time.monotonic()
            self._has_warned_of_silence = False
            self._channel.send(message)

    def _take_messages(self, processes: Sequence[RankProcess]) -> None:
        by_rank = {process.rank: process for process in processes}
        for _, event in self._channel.events():
            if isinstance(event, Lost):
                self._lost = event
                note_loss(self._round, 0, event)
                if self._may_leave and self._result is None:
                    text = "%s was lost after all ranks of the job had returned: %s"
                    logger.warning(text, self._node_0, event.why)
                continue
            if isinstance(event, (Away, Back)):
                warn_of_outage(self._round, 0, event)
                if isinstance(event, Back):
                    self._gives_up = Deadline.after(None)
                else:
                    self._gives_up = Deadline.after(
                        REDIAL if event.how == "reset" else timedelta(0)
                    )
                continue
            self._silence.heard(0)
            if isinstance(event, RankRequest) and event.rank in by_rank:
                with contextlib.suppress(ValueError, OSError):
                    by_rank[event.rank].send(bytes.fromhex(event.request))
            elif isinstance(event, ReportOutcomes):
                self._wants_evidence = True
            elif isinstance(event, LetRanksRunOn):
                self._may_run_on = True
                self._grace = timedelta(seconds=event.grace_s)
            elif isinstance(event, Warned):
                logger.warning("%s", event.text)
            elif isinstance(event, StatusAnswer) and self._status is not None:
                self._answer(self._status, event, by_rank)
            elif isinstance(event, LetRanksExit):
                self._may_leave = True
            elif isinstance(event, RoundResult):
                self._result = event
                if event.is_final is not None:
                    break  # what follows is about the next round
        self._silence.look(self._channel.connected() - self._channel.away())
        self._check_answer()

    def _serve_status(self, socket: StatusSocket, processes: Sequence[RankProcess]) -> None:
        """Have node 0 answer, which knows all ranks; if it does not, answer for those of this node."""
        wants_stacks = socket.accept()
        if wants_stacks is not None:
            self._channel.send(StatusRequest(stacks=wants_stacks))
            self._asked = deadlock_watch.StatusOfNode(
                processes, wants_stacks=wants_stacks, limit=_NO_STATUS
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

    def _check_answer(self) -> None:
        """End alone if a signal insists, and node 0, which decides for all nodes, does not act on it."""
        reported = self._reported
        if reported is None or self._ends_alone_by is not None:
            return
        is_running = self._silence.unanswered_s(0, self._reported_s) < _NO_ANSWER_S
        is_in_time = time.monotonic() - self._reported_s < _DECISION.total_seconds()
        if is_running and (is_in_time or self._result is not None):
            return  # once node 0 has answered, its ranks have their grace period to end
        received = signal.Signals(reported.number)
        if reported.insists or self._lost is not None:
            self._ends_alone_by = received
            logger.warning(
                "%s: %s does not answer, so this node ends without it", received.name, self._node_0
            )
        elif not is_running and not self._has_warned_of_silence:
            self._has_warned_of_silence = True
            logger.warning(
                "%s: waiting for %s, which decides for all nodes and does not answer (stopped, starved "
                "of CPU?); Ctrl-C (SIGINT) ends the ranks of this node without it",
                received.name,
                self._node_0,
            )

    def _is_over(self) -> bool:
        """Return whether node 0 has ended the attempt or is lost, or this node ends without it."""
        return self._must_end() or self._lost is not None

    def _must_end(self) -> bool:
        """Return whether ranks have to end that have returned: not because node 0 is lost by then."""
        return self._result is not None or self._ends_alone_by is not None

    def _await_decision(self) -> None:
        """Wait until node 0 has decided whether there is another attempt, or is lost."""
        timeouts = self._plan.config.timeouts  # node 0's own ranks may take all of that to end
        limit = _DECISION + timeouts.grace + LEAVE
        deadline = Deadline.after(limit)
        if self._may_leave:  # node 0 waits for what its own ranks still do
            finish = timeouts.finish
            deadline = Deadline.after(None if finish is None else limit + finish)
        while self._lost is None and (self._result is None or self._result.is_final is None):
            if deadline.expired() or self._ends_alone_by is not None:
                return
            wait([self._channel.fileno()], min(1.0, deadline.remaining_s()))
            self._report_signal()
            self._take_messages(())

    def _conclude(
        self, processes: Sequence[RankProcess], outcomes: dict[int, RankOutcome]
    ) -> NodeResult:
        result = self._result
        ended = self._ended(outcomes)
        is_good = result is not None and result.is_good
        if self._failed is not None and (result is None or is_good):
            # Node 0 is lost, or had ended the round before it learned of this failure.
            return NodeResult(
                values=None,
                error=self._failed,
                is_another_to_follow=False,
                is_alone=result is None,
            )
        if result is None and self._ends_alone_by is not None:
            where = self._round.name_of(self._plan.worlds[0].node_rank)
            interrupted = Interrupted(self._ends_alone_by, where, NONE_LEFT_HERE)
            return NodeResult(values=None, error=interrupted, is_another_to_follow=False)
        is_stop = any(process.stop.is_stopping for process in processes)
        if result is None and (is_stop or not self._may_leave or self._lost is None):
            return self._without_node_0(ended)
        # Without a result all ranks of the job have returned, and those of this node ended well.
        if result is None or is_good:
            return NodeResult(values=self._values, error=None, is_another_to_follow=False)
        error = error_of(
            result, outcomes=outcomes, run_dir=self._directory.path, values=self._values
        )
        if result.failed_node == self._plan.worlds[0].node_rank:
            # It is this node's own error, which went to node 0 and back.
            error.__cause__ = None if self._failed is None else self._failed.__cause__
        elif isinstance(error, LaunchError) and not result.is_preempted:
            self._directory.note_tracebacks(outcomes.values())
            self._directory.report(self._number, error)
            raised = next(
                (w.raised for w in processes if w.rank == getattr(error, "rank", None)), None
            )
            if raised is not None:
                set_cause(error, raised)
        return NodeResult(
            values=None,
            error=error,
            is_another_to_follow=result.is_final is False,
            is_alone=result.is_final is None and self._lost is not None,
        )

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

    def _without_node_0(self, ended: EndedAttempt) -> NodeResult:
        """Return what its own ranks raised, which another start would not change, else that node 0 is lost."""
        lost = self._lost or Lost(
            how="ended", why="it has not reported how the attempt ended", seen_ns=0
        )
        error: LaunchError = lost_node_error(
            self._round,
            0,
            lost,
            when=ended.when("peer-lost"),
            details=_OWN_NETWORK if lost.is_silent and len(self._round.nodes) > 2 else (),  # noqa: PLR2004 - of two nodes, each names the other
            attempt=self._number,
            attempts=ended.retry.attempts,
            outcomes=ended.outcomes,
            run_dir=ended.run_dir,
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
        return NodeResult(values=None, error=error, is_another_to_follow=False, is_alone=True)


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
