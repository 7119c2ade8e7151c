"""Node 0 of a round: one watch over the ranks of all nodes, one result for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final, Literal

import psutil

from ddpsafe._clock import Deadline
from ddpsafe._errors import (
    DDPSafeError,
    Explanation,
    NodeLostError,
    PreemptedError,
    PreflightError,
)
from ddpsafe._job.channel import (
    BEAT_S,
    LOSS_S,
    Alive,
    Away,
    Back,
    ClockOffset,
    EndOfConnection,
    GarbledError,
    Goodbye,
    Hello,
    Lost,
    SilenceWatch,
)
from ddpsafe._launcher.attempt import CAUSE_OF_STOP, outcomes_of, run_attempt
from ddpsafe._launcher.diagnosis.root_cause import is_own_fault
from ddpsafe._launcher.nodes.links import find_broken_link, link_error
from ddpsafe._launcher.nodes.lobby import leaves_alone
from ddpsafe._launcher.nodes.node_messages import (
    LetRanksExit,
    LetRanksRunOn,
    NodeFailed,
    NodeOutcomes,
    NodeProgress,
    RankEnded,
    RankNativeError,
    RankReport,
    RankRequest,
    RanksEnded,
    ReportOutcomes,
    SignalReceived,
    StatusAnswer,
    StatusRequest,
    Warned,
    as_error,
    error_of,
    read_rank_report,
    round_result_of,
    shift,
    shift_outcome,
    shift_progress,
)
from ddpsafe._launcher.processes.rank_process import Activity, RankState
from ddpsafe._launcher.watch.console import note_event
from ddpsafe._launcher.watch.signals import NONE_LEFT, NONE_LEFT_HERE, Interrupted, is_order
from ddpsafe._launcher.watch.supervisor import LEAVE, Peers
from ddpsafe._logging import get_logger
from ddpsafe._text import listed, ranks_text
from ddpsafe._wire.messages import RankOutcome, Whereabouts
from ddpsafe._wire.rank_pipe import Progress
from ddpsafe._world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ddpsafe._launcher.diagnosis.attempt_error import EndedAttempt
    from ddpsafe._launcher.launch_parts import LaunchParts
    from ddpsafe._launcher.nodes.lobby import RoundChannel
    from ddpsafe._launcher.nodes.node_messages import NodeMessage, RoundPlan
    from ddpsafe._launcher.processes.rank_process import RankProcess
    from ddpsafe._launcher.watch.signals import SignalInbox
    from ddpsafe._launcher.watch.status_socket import StatusRequests
    from ddpsafe._launcher.watch.supervisor import Ending
    from ddpsafe._wire.messages import Message

logger = get_logger(__name__)

_EVIDENCE: Final = timedelta(seconds=3)
_LATE_EVIDENCE: Final = timedelta(seconds=12)
"""Both together are the 15 s after which a silent launcher is named, see `SilenceWatch`."""

_OTHER_LOSSES: Final = timedelta(seconds=2 * BEAT_S)
"""A network failure ends connections up to a beat apart: each once its next packet is not acknowledged."""

REDIAL: Final = timedelta(seconds=0.7)
"""A reset connection, as by a firewall, is dialled again at once: so long a rank that fails waits for that."""

_LATE_REPORTS: Final = 4
"""What is known of a node is old if so many reports of its progress would have fitted in since."""

_OTHERS_CONTINUE: Final = "The other nodes continue (rendezvous.signal_scope)."

_CLOCK_MARGIN_NS: Final = 100_000_000
"""How well the clocks of two hosts are compared, at worst."""

_AFTER_GRACE: Final = timedelta(seconds=10)
"""After the grace period come SIGKILL and the removal of what the ranks left behind."""


class RemoteRank(RankState):
    """A rank of another node, as far as its launcher's messages describe it.

    Attributes:
        world: Its place.
        hostname: Its host.
        exit_code: Exit status of its process, once that has ended.
        idle_s: For how long all ranks of its node had been idle at the last report.
    """

    def __init__(
        self, world: World, plan: RoundPlan, channel: RoundChannel, everyone: tuple[int, ...]
    ) -> None:
        """Know nothing yet; what is sent to the rank goes through its launcher.

        Args:
            world: Its place.
            plan: The round.
            channel: The control channel.
            everyone: All ranks of the job: one tuple for all of them.
        """

        def send(request: bytes) -> None:
            message = RankRequest(rank=world.rank, request=request.hex())
            channel.send(message, to=world.node_rank)

        super().__init__(send)
        self.world = world
        self.hostname = plan.nodes[world.node_rank].hostname
        self.exit_code: int | None = None
        self._progress = Progress()
        self._activity = Activity()
        self._is_seen_since_answer = False
        self._everyone = everyone
        self.reports_every_s = plan.progress_every_s
        self._known_ns = time.monotonic_ns()

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.world.rank

    def take(self, message: Message) -> None:
        """Record a message from the rank."""
        if isinstance(message, Whereabouts):
            self._is_seen_since_answer = False
            # Its launcher sends a group of all ranks as an empty one.
            groups = {name: ranks or self._everyone for name, ranks in message.groups.items()}
            message = replace(message, groups=groups)
        super().take(message)

    def note_report(self, report: NodeProgress, offset: ClockOffset) -> None:
        """Record what its launcher reports."""
        self._progress = shift_progress(report.ranks[self.rank], offset)
        self._activity = report.activity.get(self.rank, Activity())
        self.idle_s = report.idle_s
        self.unanswered = report.unanswered.get(self.rank, ())
        # What the launcher has relayed before is older: it looks at its ranks after that.
        self._is_seen_since_answer = True
        # At the earliest: a proof must not take an old look for one that followed a rank's answer.
        self._known_ns = report.at_ns + offset.mono_ns - _CLOCK_MARGIN_NS

    @property
    def is_seen_since_answer(self) -> bool:
        """Whether its launcher has reported since its last answer."""
        return self._is_seen_since_answer

    @property
    def known_ns(self) -> int:
        """Of which moment its launcher's last report is."""
        return self._known_ns

    @property
    def is_heard(self) -> bool:
        """Whether its launcher has reported lately."""
        age_s = (time.monotonic_ns() - self._known_ns) / 1e9
        return age_s < _LATE_REPORTS * self.reports_every_s

    def progress(self) -> Progress:
        """Return its progress, according to its launcher's last report."""
        return self._progress

    def activity(self) -> Activity:
        """Return what its main thread did at its launcher's last report, if that is recent."""
        # A node that is late, paused or cut off must not be part of a proof.
        return self._activity if self.is_heard else Activity()

    def outcome(self) -> RankOutcome:
        """Return what is known of it without asking its launcher, which may be lost."""
        status = "returned" if self.returned is not None else "stopped"
        if self.raised is not None and self.returned is None:
            status = "raised"
        elif self.returned is None and self.ended_ns is not None:
            status = "killed" if (self.exit_code or 0) < 0 else "exited"
        return RankOutcome(
            rank=self.rank,
            local_rank=self.world.local_rank,
            node_rank=self.world.node_rank,
            pid=None,
            hostname=self.hostname,
            status=status,  # type: ignore[arg-type]  # one of those above
            phase=self.raised.phase if self.raised else self.phase,
            exit_code=self.exit_code,
            raised=self.raised,
            native=self.native,
            ended_ns=self.ended_ns,
            position=self.position,
            progress=self._progress,
            unanswered=self.unanswered,
            state=psutil.STATUS_STOPPED if self._activity.state == "T" and self.alive else "",
            said="",
        )


class RelayedRequests:
    """Requests for the status that were made on other nodes.

    Args:
        channel: The control channel.
    """

    def __init__(self, channel: RoundChannel) -> None:
        """Begin without any."""
        self._channel = channel
        self._new: list[bool] = []
        self._asking: set[int] = set()

    def note(self, node: int, request: StatusRequest) -> None:
        """Note one."""
        self._new.append(request.stacks)
        self._asking.add(node)

    @property
    def is_asked(self) -> bool:
        """Whether a node waits for an answer."""
        return bool(self._asking)

    def accept(self) -> bool | None:
        """Return whether a new one asks for stacks, or ``None`` if there are none."""
        new, self._new = self._new, []
        return any(new) if new else None

    def answer(self, facts: dict[str, Any]) -> None:
        """Send the facts to the nodes that have asked."""
        answer = StatusAnswer(facts=json.dumps(facts))
        for node in self._asking:
            self._channel.send(answer, to=node)
        self._asking.clear()


class OtherNodes(Peers):
    """All nodes except node 0, as seen through the control channel.

    Attributes:
        lost: Nodes whose connection has ended, and how.
        failed: Nodes that have reported a failure of their own, and which.
        reported: What became of the ranks of a node, once it has reported that.
        phase: Whether the attempt has begun on node 0; see `as_error`.
        ended: Nodes of which no rank is left.
        insisted: Nodes whose sender of a signal does not want to wait for the ranks.
        leaving: Nodes that leave without the others, and the signal to the launcher of each.
    """

    def __init__(
        self, channel: RoundChannel, plan: RoundPlan, inbox: SignalInbox, parts: LaunchParts
    ) -> None:
        """Watch the nodes of a round; a signal to one of their launchers counts for all."""
        self._channel = channel
        self._plan = plan
        self._inbox = inbox
        self._directory = parts.directory
        self._config = parts.plan.config
        self._timeouts = parts.plan.config.timeouts
        self._error: BaseException | None = None
        self._has_asked = False
        self.phase: Literal["start", "attempt"] = "start"
        everyone = tuple(range(plan.world_size))
        self._by_rank = {
            rank: RemoteRank(world_of(plan, rank), plan, channel, everyone)
            for node in range(1, len(plan.nodes))
            for rank in plan.ranks_of(node)
        }
        self._requests = RelayedRequests(channel)
        self._silence = SilenceWatch(
            {node: plan.name_of(node) for node in range(1, len(plan.nodes))}
        )
        self.lost: dict[int, Lost] = {}
        self.failed: dict[int, NodeFailed] = {}
        self.reported: dict[int, NodeOutcomes] = {}
        self._oom_kills: dict[int, int] = {}
        self.ended: set[int] = set()
        self.retried: set[int] = set()
        self.insisted: set[int] = set()
        self.leaving: dict[int, signal.Signals] = {}
        self._reset: set[int] = set()  # away after a reset; mostly back within `REDIAL`

    @property
    def ranks(self) -> Sequence[RemoteRank]:
        """The ranks of all other nodes."""
        return list(self._by_rank.values())

    def handles(self) -> list[int]:
        """Return the descriptor that is readable when there is news."""
        return [self._channel.fileno()]

    def take_news(self) -> None:
        """Take in the messages that have arrived."""
        for node, event in self._channel.events():
            if isinstance(event, Lost):
                self.lost.setdefault(node, event)
                note_loss(self._plan, node, event)
            elif isinstance(event, (Away, Back)):
                warn_of_outage(self._plan, node, event)
                self._reset -= {node}
                self._reset |= {node} if isinstance(event, Away) and event.how == "reset" else set()
            else:
                self._silence.heard(node)
                if not isinstance(event, Alive):
                    self._take(node, event)
        self._silence.look(self._channel.connected() - self._channel.away())

    def _take(self, node: int, message: NodeMessage | Hello | Goodbye) -> None:
        offset = self._channel.offset_of(node)
        if isinstance(message, (RankReport, RankEnded, RankNativeError)):
            if isinstance(message, RankEnded):
                self._oom_kills[node] = message.oom_kills
            if message.rank in self._plan.ranks_of(node):
                self._take_of_rank(self._by_rank[message.rank], message, offset)
        elif isinstance(message, NodeProgress):
            for rank in set(self._plan.ranks_of(node)) & message.ranks.keys():
                self._by_rank[rank].note_report(message, offset)
        elif isinstance(message, NodeOutcomes):
            shifted = tuple(shift_outcome(outcome, offset) for outcome in message.outcomes)
            self.reported[node] = replace(message, outcomes=shifted)
            self._oom_kills[node] = message.oom_kills
            self.retried |= set(message.retried)
        elif isinstance(message, StatusRequest):
            self._requests.note(node, message)
        elif isinstance(message, NodeFailed):
            self.failed[node] = message
        elif isinstance(message, RanksEnded):
            self.ended.add(node)
        elif isinstance(message, SignalReceived):
            is_of_node = self._leaves_alone(node, message)
            if message.insists:
                self.insisted.add(node)
                self._inbox.insists |= not is_of_node
            if is_of_node:
                self.leaving[node] = signal.Signals(message.number)
            # Two signals in the inbox count as impatience; whether one is meant so, its own
            # launcher knows.
            elif message.insists or not is_order(self._inbox.received):
                self._inbox.put(message.number, None, self._plan.name_of(node))

    @staticmethod
    def _take_of_rank(
        rank: RemoteRank, message: RankReport | RankEnded | RankNativeError, offset: ClockOffset
    ) -> None:
        if isinstance(message, RankReport):
            with contextlib.suppress(GarbledError):  # of a kind that is not handled here
                rank.take(shift(read_rank_report(message), offset))
        elif isinstance(message, RankEnded):
            rank.exit_code, rank.ended_ns = message.exit_code, message.ended_ns + offset.mono_ns
        else:
            rank.note_native(message.native)

    def _leaves_alone(self, node: int, message: SignalReceived) -> bool:
        """Return whether a signal to a node's launcher lets that node leave, and the job continue."""
        staying = len(self._plan.nodes) - len({node, *self.leaving, *self.lost})
        return self._inbox.received is None and leaves_alone(
            self._config, message.number, staying=staying, attempt=self._plan.attempt
        )

    def find_leaving(self) -> dict[str, signal.Signals]:
        """Return the nodes that leave the job, without the others, and the signal to the launcher of each."""
        return {self._plan.name_of(node): self.leaving[node] for node in sorted(self.leaving)}

    def silent_nodes(self) -> list[str]:
        """Return a line for each launcher that sends nothing although it is connected."""
        return [
            f"{self._plan.name_of(node)}: its launcher does not respond (stopped, starved of CPU?)"
            for node in sorted(self._silence.silent)
        ]

    def has_lost_node(self) -> bool:
        """Return whether a node is lost, has failed by itself, or leaves at once."""
        return bool(self.lost or self.failed or self.leaving.keys() & self.insisted)

    def is_known_who_is_cut_off(self, connected: set[int]) -> bool:
        """Return whether it is clear which side of a silent connection is cut off.

        If another node still sends, the silent node is; if all nodes are silent, this one is.
        """
        # Every node's kernel answers each second, and it is lost after `LOSS_S` seconds of silence.
        return not connected or self._channel.has_heard(within_s=LOSS_S - BEAT_S)

    def give_up_away(self) -> None:
        """Take the nodes that cannot be reached now as lost: something has failed without them."""
        # A firewall that resets connections makes ranks fail at the same moment. Once the node is
        # connected again, node 0 decides for all; without this wait, each node named another one.
        self.wait_until(lambda connected: not connected & self._reset, Deadline.after(REDIAL))
        self._channel.give_up_away()
        self.take_news()

    def let_leave(self) -> None:
        """Let the ranks of all nodes end: all of them have returned."""
        self._channel.send(LetRanksExit())

    def let_run(self, limit: timedelta) -> None:
        """Let the ranks of all nodes run on for so long, although one has failed."""
        self._channel.send(LetRanksRunOn(grace_s=limit.total_seconds()))

    def longest_grace_s(self, own_s: float | None) -> float | None:
        """Return the longest ``join(grace_period=…)`` of any node; ``None`` if no node asks for one."""
        wanted_s = [own_s, *(node.grace_s for node in self.reported.values())]
        return max((grace_s for grace_s in wanted_s if grace_s is not None), default=None)

    def status_requests(self) -> Sequence[StatusRequests]:
        """Return the requests for the status that were made on other nodes."""
        return [self._requests]

    def tell(self, text: str) -> None:
        """Show a warning on all other nodes."""
        self.send(Warned(text=text))

    def send(self, message: NodeMessage) -> None:
        """Send to all nodes."""
        self._channel.send(message)

    def wait_until(self, condition: Callable[[set[int]], bool], deadline: Deadline) -> bool:
        """Take in messages until a condition holds for the set of connected nodes."""
        self.take_news()
        while not condition(self._channel.connected()):
            if deadline.expired():
                return False
            handles = [self._channel.fileno(), self._inbox.fileno()]
            if self._inbox.fileno() in wait(handles, min(deadline.remaining_s(), BEAT_S)):
                os.read(self._inbox.fileno(), 1)
            self.take_news()
        return True

    def wait_for_outcomes(self, limit: timedelta) -> bool:
        """Wait until all connected nodes have reported what became of their ranks.

        Returns:
            Whether a new signal that ends the job has cut the wait short.
        """
        before = (self._inbox.received, self._inbox.insists)

        def is_interrupted() -> bool:
            now = (self._inbox.received, self._inbox.insists)
            return now != before and is_order(self._inbox.received)

        self.wait_until(
            lambda connected: (
                connected - self._channel.away() <= self.reported.keys() or is_interrupted()
            ),
            Deadline.after(limit),
        )
        self.give_up_away()  # a kernel may have noticed only now
        return is_interrupted()

    def gather_evidence(
        self,
        ending: Ending,
        processes: Sequence[RankProcess],
        ask_where: Callable[[Sequence[RankProcess]], None],
    ) -> Ending:
        """Have the ranks of all nodes asked where they are; wait until the cause can be known."""
        if ending.reason not in ("done", "signal"):
            # A rank may give up before a kernel notices that another host is away. Node 0 would
            # wait up to 15 s for what that node knows, and could blame a rank that was left.
            self.give_up_away()
        if any(lost.is_silent for lost in self.lost.values()):
            self.wait_until(self.is_known_who_is_cut_off, Deadline.after(_OTHER_LOSSES))
        if ending.reason in ("done", "signal", "node-lost") or self.has_lost_node():
            return ending
        self._has_asked = True
        self.send(ReportOutcomes())
        ask_where(processes)
        is_interrupted = self.wait_for_outcomes(_EVIDENCE)
        own = outcomes_of(processes).values()
        if not any(map(broke_by_itself, (*own, *self._described()))):
            # So far only peer errors are known: a launcher that is late may have the cause.
            is_interrupted = is_interrupted or self.wait_for_outcomes(_LATE_EVIDENCE)
        if is_interrupted and not any(map(broke_by_itself, (*own, *self.outcomes().values()))):
            return replace(ending, reason="signal")  # the root cause can no longer become known
        return ending

    def _described(self) -> list[RankOutcome]:
        """Return what is known of the ranks without what their launchers found out at the end."""
        return [rank.outcome() for rank in self.ranks]

    def outcomes(self) -> dict[int, RankOutcome]:
        """Return what became of the ranks of all other nodes."""
        outcomes = {outcome.rank: outcome for outcome in self._described()}
        for node in self.reported.values() if self._has_asked else ():
            for outcome in node.outcomes:
                rank = self._by_rank.get(outcome.rank)
                # It may have returned since its launcher asked it where it is.
                is_late = outcome.status == "stopped" and outcome.before is None
                if is_late and rank is not None and rank.returned is not None:
                    outcomes[outcome.rank] = replace(outcome, status="returned")
                else:
                    outcomes[outcome.rank] = outcome
        return outcomes

    def oom_kills(self) -> int:
        """Return how many processes their kernels have killed for memory during the attempt."""
        return sum(self._oom_kills.values())

    def require_all_nodes(self, ended: EndedAttempt) -> None:
        """Raise the error of a node that has failed, or of lost ones if no rank broke by itself."""
        if self.failed:
            raise self._first_failed(ended)
        if not self.lost and self.leaving and ended.ending.reason == "node-lost":
            raise Interrupted(next(iter(self.leaving.values())))
        if not self.lost and ended.ending.reason not in ("done", "signal"):
            link = find_broken_link(self._plan, ended.outcomes)
            if link is not None:
                self._directory.holds_failure = True
                raise link_error(ended, self._plan, link)
        if not self.lost or any(map(broke_by_itself, ended.outcomes.values())):
            return
        # A node that got an insistent signal while this launcher was stopped has ended on its own.
        lost = {node: why for node, why in self.lost.items() if node not in self.insisted}
        if not lost and is_order(self._inbox.received):
            raise Interrupted(self._inbox.received)
        self._directory.holds_failure = True
        error: DDPSafeError = node_lost(ended, self._plan, lost)
        raise error

    def _first_failed(self, ended: EndedAttempt) -> DDPSafeError | Interrupted:
        failed = next(iter(self.failed.values()))
        return error_of(failed.result, outcomes=ended.outcomes, run_dir=ended.run_dir)

    def announce(self, exc: BaseException, ended: EndedAttempt) -> BaseException:
        """Send all nodes the error of the attempt; return it in the form that all nodes raise."""
        error = as_error(exc, self._plan.name_of(0), "could not end the attempt", phase="attempt")
        is_stop = isinstance(error, (Interrupted, PreemptedError))
        if is_stop and self.leaving and self._inbox.received is None:
            if isinstance(error, PreemptedError):
                error.add_details(_OTHERS_CONTINUE)
            for node, received in self.leaving.items():
                own = error
                if isinstance(error, Interrupted):
                    own = Interrupted(received, self._plan.name_of(node), NONE_LEFT_HERE)
                self._channel.send(round_result_of(own, is_final=True), to=node)
            error = self._left_error(ended, has_saved=isinstance(error, PreemptedError))
        elif isinstance(error, Interrupted):
            error.where = self._inbox.where
            error.left = self._who_is_left()
        self._announce(error)
        return error

    def _who_is_left(self) -> str:
        """Return which ranks are left running after a stop, as a sentence."""
        unreachable = self._channel.away() | self.lost.keys()
        if not unreachable - self.ended:
            return NONE_LEFT
        names = listed([self._plan.name_of(node) for node in sorted(unreachable - self.ended)])
        limit_s = self._timeouts.node_loss.total_seconds()
        return (
            f"{NONE_LEFT}, but those of {names}, which cannot be reached, may be for up to {limit_s:g} s "
            "(timeouts.node_loss)"
        )

    def _left_error(self, ended: EndedAttempt, *, has_saved: bool) -> NodeLostError:
        """Return the error of an attempt that ended because nodes leave the job."""
        names = [
            self._plan.name_of(node, ranks_text(self._plan.ranks_of(node)))
            for node in sorted(self.leaving)
        ]
        signals = listed(sorted({received.name for received in self.leaving.values()}))
        leave, whose = (
            ("leaves", "its launcher") if len(names) == 1 else ("leave", "their launchers")
        )
        why = f"{whose} received {signals}"
        saved = ", and all ranks have stopped at one step" if has_saved else ""
        node = min(self.leaving)
        return NodeLostError(
            Explanation(
                f"{listed(names)} {leave} the job, {ended.when('peer-lost')}: {why}{saved}.",
                cause=CAUSE_OF_STOP,
                fix="nothing: the other nodes start another attempt, with a replacement if one joins. Set "
                'rendezvous.signal_scope to "job" to stop all nodes instead.',
                logs=ended.logs,
            ),
            node_rank=node,
            hostname=self._plan.nodes[node].hostname,
            ranks=list(self._plan.ranks_of(node)),
            why=why,
            **ended.facts(),
        )

    def _announce(self, error: DDPSafeError | Interrupted) -> None:
        self._error = error
        self.send(round_result_of(error))

    def await_ends(
        self, ended: EndedAttempt, error: BaseException | None, grace: timedelta
    ) -> BaseException | None:
        """Wait until the ranks of all nodes have ended; return the error, which that may bring."""
        # The store ends with the attempt, and the other nodes' ranks use it to the end.
        limit = grace + _AFTER_GRACE
        if ended.ending.reason == "done":
            limit += LEAVE
        longest: timedelta | None = limit
        # Whoever stops the job does not wait for a node that cannot be reached.
        is_stop = isinstance(error, Interrupted)
        is_good = ended.ending.reason == "done" and error is None
        if is_good:
            # What the ranks of other nodes still do is part of the job.
            finish = self._timeouts.finish
            longest = None if finish is None else limit + finish
        self.wait_until(
            lambda connected: (
                self.ended.issuperset(connected - (self._channel.away() if is_stop else set()))
                or (is_good and is_order(self._inbox.received))
            ),
            Deadline.after(longest),
        )
        if self.failed and (error is None or isinstance(error, PreemptedError)):
            # That node cannot load what one of its ranks returned.
            self._directory.holds_failure = True
            self._announce(self._first_failed(ended))
        elif error is None and is_order(self._inbox.received):
            # It arrived while the ranks ended; a launch on one node raises it then, too.
            self._announce(Interrupted(self._inbox.received, self._inbox.where))
        return self._error

    def announce_failure(self, exc: Exception) -> Exception:
        """Send all nodes what node 0 could not do, unless they know; return what node 0 raises."""
        if exc is self._error:
            return exc
        who = self._plan.name_of(0)
        failure = "could not start its ranks"
        if self.phase == "attempt":
            failure = "could not continue the attempt"
        shared = as_error(exc, who, failure, phase=self.phase)
        if shared is exc:
            name_failed_node(shared, who, failure)
        self.send(round_result_of(shared))
        return shared  # type: ignore[return-value]  # only an Exception has been caught


def world_of(plan: RoundPlan, rank: int) -> World:
    """Return the place of a rank in a round."""
    node = plan.node_of(rank)
    ranks = plan.ranks_of(node)
    return World(
        rank=rank,
        world_size=plan.world_size,
        local_rank=rank - ranks.start,
        local_world_size=len(ranks),
        node_rank=node,
        nnodes=len(plan.nodes),
        started_by="ddpsafe",
    )


def run_as_node_0(
    number: int,
    parts: LaunchParts,
    *,
    round_plan: RoundPlan,
    channel: RoundChannel,
    inbox: SignalInbox,
    checkpoint_folders: set[str],
) -> dict[int, object]:
    """Run one attempt as node 0; add the ranks' checkpoint folders to `checkpoint_folders`.

    Returns:
        What the ranks of this node returned, by rank.

    Raises:
        LaunchError: As `run_attempt` raises it, the same on all nodes.
        PreemptedError: The ranks have stopped because a launcher was asked to stop them.
        PreflightError: A node could not start its ranks.
        Interrupted: A signal told a launcher to end; all ranks have ended.
    """
    inbox.here = round_plan.name_of(0)
    if inbox.received is not None:
        inbox.where = inbox.where or inbox.here
    nodes = OtherNodes(channel, round_plan, inbox, parts)
    ranks: list[RankState] = list(nodes.ranks)

    def on_start(processes: Sequence[RankProcess], inbox: SignalInbox) -> None:
        nodes.phase = "attempt"
        ranks.extend(processes)
        if parts.on_start is not None:
            parts.on_start(processes, inbox)

    try:
        values = run_attempt(number, replace(parts, on_start=on_start), inbox=inbox, peers=nodes)
    except Exception as exc:
        shared = nodes.announce_failure(exc)
        if shared is exc:
            raise
        raise shared from exc
    finally:  # after a failure above all: a node that replaces another one has to see them
        for rank in ranks:
            checkpoint_folders |= rank.checkpoint_folders
    return values


def broke_by_itself(outcome: RankOutcome) -> bool:
    """Return whether a rank failed, and not because of another one, as far as it knew."""
    failed = outcome.status in ("raised", "killed", "exited") or outcome.native is not None
    return failed and is_own_fault(outcome)


def name_failed_node(error: DDPSafeError | Interrupted, who: str, failure: str) -> None:
    """Add the node to an error that is about a machine without naming it."""
    if isinstance(error, PreflightError):
        what = f"{who} {failure}: {error.explanation.what}"
        error.explanation = replace(error.explanation, what=what)


def node_lost(ended: EndedAttempt, plan: RoundPlan, lost: dict[int, Lost]) -> NodeLostError:
    """Return the error for lost nodes, named after the first one."""
    node, first = min(lost.items(), key=lambda item: item[1].seen_ns)
    others = [other for other in lost if other != node]
    details = [
        f"{plan.name_of(other, ranks_text(plan.ranks_of(other)))} was lost, too: {lost[other].why}"
        for other in others
    ]
    if others and len(lost) == len(plan.nodes) - 1:
        details.append("All other nodes at once: the network of this one is the likely cause.")
    return lost_node_error(
        plan,
        node,
        first,
        when=ended.when("peer-lost"),
        details=details,
        attempt=ended.attempt,
        attempts=ended.retry.attempts,
        outcomes=ended.outcomes,
        run_dir=ended.run_dir,
    )


_LOSSES: Final[dict[EndOfConnection, tuple[str, str]]] = {
    "silence": (
        "its host has lost power or network, or its kernel hangs.",
        "ping {host}; check what the scheduler reports about the node.",
    ),
    "reset": (
        "its launcher has ended, its host has started again, or a firewall rejects the connection.",
        "check uptime, dmesg and the launcher's log on {host}.",
    ),
    "garbled": (
        "another program, on that host or on the way, has taken over the connection, or a bug in ddpsafe.",
        "check the launcher's log on {host}, and what stands between the nodes (a proxy, a VPN).",
    ),
    "ended": (
        "its launcher has ended without a word: it was killed or has crashed, or its job step was ended.",
        "check dmesg (out of memory?) and the launcher's log on {host}; its ranks ended with it.",
    ),
    "goodbye": (
        "its launcher has left the job.",
        "see what it wrote on {host} before it ended.",
    ),
}
"""The likely cause and the fix, by how the last connection to a node has ended."""


_OUTAGES: Final[dict[EndOfConnection, tuple[str, str]]] = {
    "silence": ("its host or the network does not answer", " (timeouts.node_loss)"),
    "reset": ("its launcher has ended, or a firewall rejects the connection", ""),
}
"""What may have broken a connection to a node that may come back, and what limits the wait for it."""


def note_loss(plan: RoundPlan, node: int, lost: Lost) -> None:
    """Write the event that a node is lost; what follows from that comes later."""
    note_event("lost", f"{plan.name_of(node)} was lost: {lost.why}", of_node=node)


def warn_of_outage(plan: RoundPlan, node: int, event: Away | Back) -> None:
    """Tell that a node cannot be reached, or can be again; training continues meanwhile."""
    name = plan.name_of(node)
    facts = {"event": "back" if isinstance(event, Back) else "away", "of_node": node}
    if isinstance(event, Back):
        logger.warning(
            "%s can be reached again after %.0f s, and nothing is missing",
            name,
            event.away_s,
            extra=facts,
        )
    else:
        why, limit = _OUTAGES[event.how]
        logger.warning(
            "%s cannot be reached (%s): %s; its ranks may still run. It counts as lost in %.0f s%s",
            name,
            event.why,
            why,
            event.limit_s,
            limit,
            extra=facts,
        )


def lost_node_error(
    plan: RoundPlan,
    node: int,
    lost: Lost,
    *,
    when: str,
    explained: Explanation | None = None,
    details: Iterable[str] = (),
    **facts: object,
) -> NodeLostError:
    """Return the error for a lost node.

    Args:
        plan: The round.
        node: The node.
        lost: How its connection ended.
        when: In which attempt, and after how long.
        explained: What the node itself has reported, if it could.
        details: Further lines.
        **facts: See `LaunchError`.
    """
    who, ranks = plan.nodes[node], plan.ranks_of(node)
    why = lost.why
    if explained is not None:
        cause, fix = explained.cause, explained.fix
    else:
        cause, fix = (text.format(host=who.hostname) for text in _LOSSES[lost.how])
    if lost.is_silent:
        why = f"nothing has arrived from {who.address} for {lost.silent_s:.1f} s ({lost.why})"
    place = [f"{ranks_text(ranks)} of world_size {plan.world_size}"] if ranks else []
    name = plan.name_of(node, *place)
    what = f"{name} was lost, {when}: {why}."
    return NodeLostError(
        Explanation(what, cause=cause, fix=fix, details=tuple(details)),
        node_rank=node,
        hostname=who.hostname,
        ranks=list(ranks),
        why=why,
        **facts,  # type: ignore[arg-type]  # those of LaunchError
    )
