"""What several nodes decide in an attempt: no thread, socket, process or clock is in here.

A core takes an event, changes its own state, and yields what is to be done, as plain data. Its shell, `node_zero` or
`other_node`, reads the channel, the signals and the ranks, and does what it says. A decision that takes several
events is a generator of such actions, `Until` among them. Times are monotonic, in seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Enum
from signal import SIGINT, Signals
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from ddpsafe._errors import PreemptedError
from ddpsafe._job.channel import Away, Back, Lost
from ddpsafe._launcher.diagnosis.root_cause import is_own_fault
from ddpsafe._launcher.nodes import limits
from ddpsafe._launcher.nodes.links import find_broken_link, link_error
from ddpsafe._launcher.nodes.node_messages import (
    LetRanksExit,
    LetRanksRunOn,
    NodeFailed,
    NodeOutcomes,
    RankEnded,
    RanksEnded,
    ReportOutcomes,
    RoundResult,
    SignalReceived,
    error_of,
    round_result_of,
)
from ddpsafe._launcher.nodes.texts import OTHERS_CONTINUE, left_error, lost_nodes_error, who_is_left
from ddpsafe._launcher.watch.signals import NONE_LEFT_HERE, Interrupted, is_order
from ddpsafe._launcher.watch.supervisor import LEAVE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from ddpsafe._config import LaunchConfig, Timeouts
    from ddpsafe._errors import DDPSafeError
    from ddpsafe._launcher.diagnosis.attempt_error import EndedAttempt, EndReason
    from ddpsafe._launcher.nodes.node_messages import NodeMessage, RoundPlan
    from ddpsafe._launcher.watch.signals import SignalInbox
    from ddpsafe._wire.messages import RankOutcome

# What a shell does.


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message.

    Attributes:
        to: Nodes by rank in an attempt, launchers outside; ``None`` for all, or for node 0 from another node.
    """

    message: NodeMessage
    to: tuple[int | str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Until:
    """Take in events until a condition holds, or the limit, if there is one, is over."""

    holds: Callable[[], bool]
    limit: timedelta | None


class Do(Enum):
    """What needs no further facts."""

    GIVE_UP_AWAY = "take the nodes that cannot be reached now as lost"
    ASK_RANKS = "ask the ranks of this node where they are; another node sends the answers"
    LET_RANKS_RUN = "let ranks of this node that are suspended run on"


@dataclass(frozen=True, slots=True)
class PutSignal:
    """Treat a signal to the launcher of another node as one to this one."""

    signal: SignalReceived
    node: int


@dataclass(frozen=True, slots=True)
class Warn:
    """Write a warning.

    Attributes:
        event: What `note_event` names it, if anything.
    """

    text: str
    event: str = ""


Action: TypeAlias = Send | Until | Do | PutSignal | Warn


def broke_by_itself(outcome: RankOutcome) -> bool:
    """Return whether a rank failed, and not because of another one, as far as it knew."""
    failed = outcome.status in ("raised", "killed", "exited") or outcome.native is not None
    return failed and is_own_fault(outcome)


def leaves_alone(
    config: LaunchConfig, signum: int, *, staying: int, attempt: int | None = None
) -> bool:
    """Return whether a signal to the launcher of one node lets it leave, and the job continue.

    The configuration is that of node 0. `staying` is how many nodes stay, and `attempt` the attempt that this
    ends; ``None`` between two attempts.
    """
    retry = config.retry
    if attempt is not None and (attempt >= retry.attempts or "peer-lost" not in retry.on):
        return False
    scope = config.rendezvous.signal_scope
    if scope == "auto":
        least = config.rendezvous.min_nodes or config.nnodes
        scope = "node" if staying >= least else "job"
    # A Ctrl-C is of a person, who would not expect the job to continue.
    return scope == "node" and signum != SIGINT


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """What node 0 knows of another node.

    Attributes:
        lost: How its connection has ended for good.
        away: Why it cannot be reached now.
        oom_kills: How many processes its kernel has killed for memory during the attempt.
        has_ended: Whether no rank of it is left.
        leaves_by: The signal to its launcher for which it leaves without the others.
        insists: Whether the sender of a signal to it does not want to wait for the ranks.
    """

    lost: Lost | None = None
    away: Away | None = None
    failed: NodeFailed | None = None
    reported: NodeOutcomes | None = None
    oom_kills: int = 0
    has_ended: bool = False
    leaves_by: Signals | None = None
    insists: bool = False


class NodeZero:
    """Node 0 in an attempt: what is known of all other nodes, and the one result for all of them.

    The configuration is that of node 0, which counts for all nodes.

    Attributes:
        failed: The first failure that a node has reported of itself.
        error: The error that all nodes have been sent.
    """

    def __init__(self, plan: RoundPlan, config: LaunchConfig, inbox: SignalInbox) -> None:
        self._plan, self._config, self._inbox = plan, config, inbox
        self.nodes = {node: NodeView() for node in range(1, len(plan.nodes))}
        self.failed: NodeFailed | None = None
        self.error: BaseException | None = None

    def _which(self, field: str) -> dict[int, Any]:
        """Return a field of the nodes where it is set."""
        found = {node: getattr(view, field) for node, view in self.nodes.items()}
        return {node: value for node, value in found.items() if value}

    @property
    def lost(self) -> dict[int, Lost]:
        """The nodes that are lost, and how."""
        return self._which("lost")

    @property
    def leaving(self) -> dict[int, Signals]:
        """The nodes that leave without the others, and the signal to the launcher of each."""
        return self._which("leaves_by")

    @property
    def reported(self) -> dict[int, NodeOutcomes]:
        """What became of the ranks of the nodes that have reported that."""
        return self._which("reported")

    @property
    def oom_kills(self) -> int:
        """How many processes the nodes' kernels have killed for memory during the attempt."""
        return sum(self._which("oom_kills").values())

    @property
    def connected(self) -> set[int]:
        """The nodes that are not lost; some of them may be away."""
        return {node for node, view in self.nodes.items() if not view.lost}

    @property
    def reachable(self) -> set[int]:
        """The nodes that are neither lost nor away."""
        return {node for node, view in self.nodes.items() if not (view.lost or view.away)}

    @property
    def has_lost_node(self) -> bool:
        """Whether a node is lost, has failed by itself, or leaves at once."""
        return any(
            view.lost or view.failed or (view.leaves_by and view.insists)
            for view in self.nodes.values()
        )

    def take(self, node: int, event: object) -> Iterator[Action]:
        """Take in what has arrived from a node, or has happened to it."""
        match event:
            case Lost():
                self._note(node, lost=self.nodes[node].lost or event, away=None)
            case Away():
                self._note(node, away=event)
            case Back():
                self._note(node, away=None)
            case RankEnded():
                self._note(node, oom_kills=event.oom_kills)
            case NodeOutcomes():
                self._note(node, reported=event, oom_kills=event.oom_kills)
            case NodeFailed():
                self.failed = self.failed or event
                self._note(node, failed=event)
            case RanksEnded():
                self._note(node, has_ended=True)
            case SignalReceived():
                yield from self._take_signal(node, event)

    def _note(self, node: int, **facts: object) -> None:
        self.nodes[node] = replace(self.nodes[node], **facts)  # type: ignore[arg-type]  # its fields

    def _take_signal(self, node: int, event: SignalReceived) -> Iterator[Action]:
        staying = len(self._plan.nodes) - len({node, *self.leaving, *self.lost})
        leaves = self._inbox.received is None and leaves_alone(
            self._config, event.number, staying=staying, attempt=self._plan.attempt
        )
        insists = event.insists or self.nodes[node].insists
        self._note(node, insists=insists)
        if leaves:
            self._note(node, leaves_by=Signals(event.number))
        # Two signals in the inbox count as impatience; whether one is meant so, its own launcher knows.
        elif event.insists or not is_order(self._inbox.received):
            yield PutSignal(event, node)

    # At the end of the attempt, in this order.

    def gather_evidence(
        self,
        reason: EndReason,
        *,
        hears: Callable[[], bool],
        outcomes: Callable[[], Iterable[RankOutcome]],
    ) -> Generator[Action, None, EndReason]:
        """Have all ranks asked where they are, until the cause can be known; return why the attempt ended.

        `hears` returns whether the kernel of a connected node has sent anything in the last seconds,
        `outcomes` what is known of the ranks of all nodes.
        """
        if reason not in ("done", "signal"):
            # A rank may give up before a kernel notices that another host is away. Node 0 would
            # wait up to 15 s for what that node knows, and could blame a rank that was left.
            yield from self._give_up_away()
        if any(lost.is_silent for lost in self.lost.values()):
            # If another node still sends, the silent node is cut off; if all nodes are silent, this one is.
            yield Until(lambda: not self.connected or hears(), limits.OTHER_LOSSES)
        if reason in ("done", "signal", "node-lost") or self.has_lost_node:
            return reason
        yield Send(ReportOutcomes())
        yield Do.ASK_RANKS
        for limit in (limits.EVIDENCE, limits.LATE_EVIDENCE):
            is_cut_short = yield from self._await_outcomes(limit)
            # If so far only peer errors are known, a launcher that is late may have the cause.
            if any(map(broke_by_itself, outcomes())):
                return reason
            if is_cut_short:
                return "signal"  # the root cause can no longer become known
        return reason

    def _await_outcomes(self, limit: timedelta) -> Generator[Action, None, bool]:
        """Wait for what became of all ranks; return whether another signal, which ends the job, came first."""
        inbox = self._inbox
        before = (inbox.received, inbox.insists)

        def is_cut_short() -> bool:
            return (inbox.received, inbox.insists) != before and is_order(inbox.received)

        yield Until(lambda: self.reachable <= self.reported.keys() or is_cut_short(), limit)
        yield from self._give_up_away()  # a kernel may have noticed only now
        return is_cut_short()

    def _give_up_away(self) -> Iterator[Action]:
        # A firewall that resets connections makes ranks fail at the same moment. Once the node is
        # connected again, node 0 decides for all; without this wait, each node named another one.
        yield Until(
            lambda: not any(away.how == "reset" for away in self._which("away").values()),
            limits.REDIAL,
        )
        yield Do.GIVE_UP_AWAY

    def find_error(self, ended: EndedAttempt) -> DDPSafeError | Interrupted | None:
        """Return the error of a node that has failed, or of lost ones if no rank broke by itself."""
        reason, lost = ended.ending.reason, self.lost
        if self.failed is not None:
            return self._own_error(self.failed, ended)
        if not lost and self.leaving and reason == "node-lost":
            return Interrupted(next(iter(self.leaving.values())))
        if not lost and reason not in ("done", "signal"):
            link = find_broken_link(self._plan, ended.outcomes)
            if link is not None:
                return link_error(ended, self._plan, link)
        if not lost or any(map(broke_by_itself, ended.outcomes.values())):
            return None
        # A node that got an insistent signal while this launcher was stopped has ended on its own.
        lost = {node: why for node, why in lost.items() if not self.nodes[node].insists}
        if lost:
            return lost_nodes_error(ended, self._plan, lost)
        order = self._inbox.received
        return Interrupted(order if is_order(order) else next(iter(self.leaving.values())))

    @staticmethod
    def _own_error(failed: NodeFailed, ended: EndedAttempt) -> DDPSafeError | Interrupted:
        return error_of(failed.result, outcomes=ended.outcomes, run_dir=ended.run_dir)

    def announce(
        self, error: DDPSafeError | Interrupted, ended: EndedAttempt
    ) -> Generator[Action, None, BaseException]:
        """Send all nodes the error of the attempt; return it in the form that all nodes raise."""
        is_stop = isinstance(error, (Interrupted, PreemptedError))
        if is_stop and self.leaving and self._inbox.received is None:
            if isinstance(error, PreemptedError):
                error.add_details(OTHERS_CONTINUE)
            for node, received in self.leaving.items():
                own = error
                if isinstance(error, Interrupted):
                    own = Interrupted(received, self._plan.name_of(node), NONE_LEFT_HERE)
                yield Send(round_result_of(own, is_final=True), (node,))
            has_saved = isinstance(error, PreemptedError)
            error = left_error(ended, self._plan, self.leaving, has_saved=has_saved)
        elif isinstance(error, Interrupted):
            error.where = self._inbox.where
            left = self.nodes.keys() - self.reachable - self._which("has_ended").keys()
            error.left = who_is_left(self._plan, left, self._config.timeouts.node_loss)
        yield from self.send_error(error)
        return error

    def send_error(self, error: DDPSafeError | Interrupted) -> Iterator[Action]:
        """Send all nodes an error, and remember that they know it."""
        self.error = error
        yield Send(round_result_of(error))

    def await_ends(
        self, ended: EndedAttempt, error: BaseException | None, grace: timedelta
    ) -> Generator[Action, None, BaseException | None]:
        """Wait until the ranks of all nodes have ended; return the error, which that may bring."""
        # The store ends with the attempt, and the other nodes' ranks use it to the end.
        is_done, finish = ended.ending.reason == "done", self._config.timeouts.finish
        is_good = is_done and error is None
        limit: timedelta | None = grace + limits.AFTER_GRACE + (LEAVE if is_done else timedelta(0))
        if is_good and limit is not None:
            # What the ranks of other nodes still do is part of the job.
            limit = None if finish is None else limit + finish

        def is_over() -> bool:
            # Whoever stops the job does not wait for a node that cannot be reached.
            awaited = self.reachable if isinstance(error, Interrupted) else self.connected
            has_all = all(self.nodes[node].has_ended for node in awaited)
            return has_all or (is_good and is_order(self._inbox.received))

        yield Until(is_over, limit)
        if self.failed is not None and (error is None or isinstance(error, PreemptedError)):
            # That node cannot load what one of its ranks returned.
            yield from self.send_error(self._own_error(self.failed, ended))
        elif error is None and is_order(self._inbox.received):
            # It arrived while the ranks ended; a launch on one node raises it then, too.
            yield from self.send_error(Interrupted(self._inbox.received, self._inbox.where))
        return self.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What the launcher of another node sees, about once a second.

    Attributes:
        silent_s: For how long node 0's launcher has sent nothing, in seconds.
    """

    has_failed: bool = False
    silent_s: float = 0.0


class _Reported(NamedTuple):
    """A signal that node 0 has been sent.

    Attributes:
        has_warned: Whether the user knows that node 0 does not answer.
    """

    signal: SignalReceived
    at_s: float
    has_warned: bool = False


Conclusion: TypeAlias = Literal["own-failure", "decided", "interrupted", "node-0-lost", "returned"]
"""How an attempt ends on another node.

- ``own-failure``: this node has failed, and node 0 is lost, or had ended the round before it learned of that.
- ``decided``: with the error that node 0 has sent.
- ``interrupted``: by a signal to this launcher, on which node 0 does not act.
- ``node-0-lost``: node 0 cannot say how it ended.
- ``returned``: all ranks of the job have returned, and those of this node ended well.
"""


class Follower:
    """Another node in an attempt: it follows node 0, and decides for itself only what node 0 no longer can.

    `timeouts` are the limits of this launcher.

    Attributes:
        result: What node 0 has decided, as far as it has.
        ends_alone_by: The signal for which this node ends without node 0.
        grace: How long ranks have after SIGTERM.
    """

    def __init__(self, node_0: str, timeouts: Timeouts) -> None:
        self._node_0, self._timeouts, self.grace = node_0, timeouts, timeouts.grace
        self.lost: Lost | None = None
        self.result: RoundResult | None = None
        self.may_leave = False
        self.has_failed = False
        self.ends_alone_by: Signals | None = None
        self._reported: _Reported | None = None
        # Once this has passed and a rank here has failed, node 0 counts as lost, although it may come back.
        self._gives_up_s = math.inf
        self._decides_by_s = math.inf

    @property
    def must_end(self) -> bool:
        """Whether ranks have to end that have returned: not because node 0 is lost by then."""
        return self.result is not None or self.ends_alone_by is not None

    @property
    def is_over(self) -> bool:
        """Whether node 0 has ended the attempt or is lost, or this node ends without it."""
        return self.must_end or self.lost is not None

    @property
    def is_another_to_follow(self) -> bool:
        """Whether node 0 begins another attempt."""
        return self.result is not None and self.result.is_final is False

    @property
    def is_alone(self) -> bool:
        """Whether node 0 was lost before it could decide if there is another attempt."""
        is_lost = self.lost is not None and self.result is not None and self.result.is_final is None
        return self.result is None or is_lost

    def waits_for_decision(self, now_s: float) -> bool:
        """Return whether node 0 may still decide if there is another attempt."""
        is_decided = self.result is not None and self.result.is_final is not None
        is_alone = self.lost is not None or self.ends_alone_by is not None
        return not (is_decided or is_alone or now_s >= self._decides_by_s)

    def until_look_s(self, now_s: float) -> float:
        """Return after how many seconds a look may change something, if nothing happens."""
        left_s = self._gives_up_s - now_s
        return left_s if left_s > 0 else math.inf

    def take(self, event: object, now_s: float) -> Iterator[Action]:
        """Take in what has arrived from node 0, or has happened here."""
        match event:
            case Lost():
                self.lost = event
                if self.may_leave and self.result is None:
                    returned = "was lost after all ranks of the job had returned"
                    yield Warn(f"{self._node_0} {returned}: {event.why}")
            case Away():
                self._gives_up_s = now_s + limits.REDIAL.total_seconds() * (event.how == "reset")
            case Back():
                self._gives_up_s = math.inf
            case ReportOutcomes():
                yield Do.ASK_RANKS
            case LetRanksRunOn():
                self.grace = timedelta(seconds=event.grace_s)
                yield Do.LET_RANKS_RUN
            case LetRanksExit():
                self.may_leave = True
            case RoundResult():
                self.result = event
            case SignalReceived() if self._reported is None or event != self._reported.signal:
                self._reported = _Reported(event, now_s)
                yield Send(event)
            case RanksEnded():
                self._note_ends(now_s)
                yield Send(event)
            case NodeFailed():
                self.has_failed = True
                yield Send(event)
            case Looked():
                yield from self._look(event, now_s)

    def _note_ends(self, now_s: float) -> None:
        limit: timedelta | None = limits.DECISION + self._timeouts.grace + LEAVE
        if self.may_leave and limit is not None:  # node 0 waits for what its own ranks still do
            finish = self._timeouts.finish
            limit = None if finish is None else limit + finish
        self._decides_by_s = math.inf if limit is None else now_s + limit.total_seconds()

    def _look(self, looked: Looked, now_s: float) -> Iterator[Action]:
        """Give up an outage if a rank has failed, and a node 0 that does not act on a signal."""
        if looked.has_failed and now_s >= self._gives_up_s:
            yield Do.GIVE_UP_AWAY  # node 0 cannot decide what follows
        if self._reported is None or self.ends_alone_by is not None:
            return
        reported, at_s, has_warned = self._reported
        is_running = min(looked.silent_s, now_s - at_s) < limits.NO_ANSWER.total_seconds()
        is_in_time = now_s - at_s < limits.DECISION.total_seconds()
        if is_running and (is_in_time or self.result is not None):
            return  # once node 0 has answered, its ranks have their grace period to end
        received = Signals(reported.number)
        if reported.insists or self.lost is not None:
            self.ends_alone_by = received
            does_not = f"{self._node_0} does not answer, so this node ends without it"
            yield Warn(f"{received.name}: {does_not}")
        elif not is_running and not has_warned:
            self._reported = self._reported._replace(has_warned=True)
            yield Warn(
                f"{received.name}: waiting for {self._node_0}, which decides for all nodes and does not answer "
                "(stopped, starved of CPU?); Ctrl-C (SIGINT) ends the ranks of this node without it"
            )

    def conclude(self, *, is_stopping: bool) -> Conclusion:
        """Return how the attempt ends on this node.

        If `is_stopping`, a rank of this node has agreed to stop, so its return is not the end of the job.
        """
        is_good = self.result is not None and self.result.is_good
        if self.has_failed and (self.result is None or is_good):
            return "own-failure"
        if self.result is not None:
            return "returned" if is_good else "decided"
        if self.ends_alone_by is not None:
            return "interrupted"
        has_all_values = self.may_leave and self.lost is not None and not is_stopping
        return "returned" if has_all_values else "node-0-lost"
