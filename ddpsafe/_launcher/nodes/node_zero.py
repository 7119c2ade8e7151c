"""Node 0 of a round: one watch over the ranks of all nodes, one result for all of them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import psutil

from ddpsafe._clock import Deadline
from ddpsafe._errors import DDPSafeError, NodeLostError
from ddpsafe._job.channel import BEAT_S, Away, Back, ClockOffset, GarbledError, Lost, SilenceWatch
from ddpsafe._launcher.attempt import outcomes_of, run_attempt
from ddpsafe._launcher.nodes.decisions import Do, NodeZero, PutSignal, Send, Until
from ddpsafe._launcher.nodes.node_messages import (
    LetRanksExit,
    LetRanksRunOn,
    NodeProgress,
    RankEnded,
    RankReport,
    RankRequest,
    StatusAnswer,
    StatusRequest,
    Warned,
    as_error,
    read_rank_report,
    shift,
    shift_outcome,
    shift_progress,
)
from ddpsafe._launcher.nodes.texts import tell_of_connection
from ddpsafe._launcher.processes.rank_process import Activity, RankState
from ddpsafe._launcher.watch.supervisor import Peers
from ddpsafe._limits import LOSS_S
from ddpsafe._wire.messages import NativeError, RankOutcome, Whereabouts
from ddpsafe._wire.rank_pipe import Progress
from ddpsafe._world import World

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Generator, Iterable, Sequence
    from datetime import timedelta

    from ddpsafe._launcher.diagnosis.attempt_error import EndedAttempt, Ending
    from ddpsafe._launcher.launch_parts import LaunchParts
    from ddpsafe._launcher.nodes.decisions import Action
    from ddpsafe._launcher.nodes.node_messages import RoundPlan
    from ddpsafe._launcher.nodes.rendezvous import RoundChannel
    from ddpsafe._launcher.processes.rank_process import RankProcess
    from ddpsafe._launcher.watch.signals import SignalInbox
    from ddpsafe._launcher.watch.status_socket import StatusRequests
    from ddpsafe._wire.messages import Message

T = TypeVar("T")

_LATE_REPORTS: Final = 4
"""What is known of a node is old if so many reports of its progress would have fitted in since."""

_CLOCK_MARGIN_NS: Final = 100_000_000
"""How well the clocks of two hosts are compared, at worst."""


class RemoteRank(RankState):
    """A rank of another node, as far as its launcher's messages describe it.

    What is sent to the rank goes through its launcher. `everyone` is one tuple for all ranks of the job.

    Attributes:
        idle_s: For how long all ranks of its node had been idle at the last report.
        is_seen_since_answer: Whether its launcher has reported since its last answer.
        known_ns: Of which moment its launcher's last report is.
    """

    is_seen_since_answer = False
    known_ns = 0

    def __init__(
        self, world: World, plan: RoundPlan, channel: RoundChannel, everyone: tuple[int, ...]
    ) -> None:
        def send(request: bytes) -> None:
            message = RankRequest(rank=world.rank, request=request.hex())
            channel.send(message, to=(world.node_rank,))

        super().__init__(send)
        self.world = world
        self.hostname = plan.nodes[world.node_rank].hostname
        self.exit_code: int | None = None
        self._progress = Progress()
        self._activity = Activity()
        self._everyone = everyone
        self.reports_every_s = plan.progress_every_s
        self.known_ns = time.monotonic_ns()

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.world.rank

    def take(self, message: Message) -> None:
        """Record a message from the rank."""
        if isinstance(message, Whereabouts):
            self.is_seen_since_answer = False
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
        self.is_seen_since_answer = True
        # At the earliest: a proof must not take an old look for one that followed a rank's answer.
        self.known_ns = report.at_ns + offset.mono_ns - _CLOCK_MARGIN_NS

    @property
    def is_heard(self) -> bool:
        """Whether its launcher has reported lately."""
        age_s = (time.monotonic_ns() - self.known_ns) / 1e9
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
    """Requests for the status that were made on other nodes."""

    def __init__(self, channel: RoundChannel) -> None:
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
        self._channel.send(StatusAnswer(facts=json.dumps(facts)), to=tuple(self._asking))
        self._asking.clear()


class OtherNodes(Peers):
    """All nodes except node 0, as seen through the control channel: the shell of `decisions.NodeZero`.

    A signal to the launcher of one of them counts for all.

    Attributes:
        phase: Whether the attempt has begun on node 0; see `as_error`.
    """

    def __init__(
        self, channel: RoundChannel, plan: RoundPlan, inbox: SignalInbox, parts: LaunchParts
    ) -> None:
        self._channel = channel
        self._plan = plan
        self._inbox = inbox
        self._directory = parts.directory
        self.core = NodeZero(plan, parts.plan.config, inbox)
        self.phase: Literal["start", "attempt"] = "start"
        everyone = tuple(range(plan.world_size))
        self._by_rank = {
            rank: RemoteRank(world_of(plan, rank), plan, channel, everyone)
            for node in range(1, len(plan.nodes))
            for rank in plan.ranks_of(node)
        }
        self._requests = RelayedRequests(channel)
        self._silence = SilenceWatch({node: plan.name_of(node) for node in self.core.nodes})

    # During the attempt.

    @property
    def ranks(self) -> Sequence[RemoteRank]:
        """The ranks of all other nodes."""
        return list(self._by_rank.values())

    def handles(self) -> list[int]:
        """Return the descriptor that is readable when there is news."""
        return [self._channel.fileno()]

    def status_requests(self) -> Sequence[StatusRequests]:
        """Return the requests for the status that were made on other nodes."""
        return [self._requests]

    def tell(self, text: str) -> None:
        """Show a warning on all other nodes."""
        self._channel.send(Warned(text=text))

    def has_lost_node(self) -> bool:
        """Return whether a node is lost, has failed by itself, or leaves at once."""
        return self.core.has_lost_node

    def find_leaving(self) -> dict[str, signal.Signals]:
        """Return the nodes that leave the job, without the others, and the signal to the launcher of each."""
        return {self._plan.name_of(node): received for node, received in self.core.leaving.items()}

    @property
    def retried(self) -> set[int]:
        """Ranks whose exception is of a type that is retried."""
        return {rank for node in self.core.reported.values() for rank in node.retried}

    def silent_nodes(self) -> list[str]:
        """Return a line for each launcher that sends nothing although it is connected."""
        return [
            f"{self._plan.name_of(node)}: its launcher does not respond (stopped, starved of CPU?)"
            for node in sorted(self._silence.silent)
        ]

    def let_leave(self) -> None:
        """Let the ranks of all nodes end: all of them have returned."""
        self._channel.send(LetRanksExit())

    def let_run(self, limit: timedelta) -> None:
        """Let the ranks of all nodes run on for so long, although one has failed."""
        self._channel.send(LetRanksRunOn(grace_s=limit.total_seconds()))

    def take_news(self) -> None:
        """Take in the messages that have arrived."""
        for node, event in self._channel.events():
            if isinstance(event, (Lost, Away, Back)):
                tell_of_connection(self._plan, node, event)
            else:
                self._silence.heard(node)
                self._take(node, event, self._channel.offset_of(node))
            self._perform(self.core.take(node, event))
        self._silence.look(self.core.reachable)

    def _take(self, node: int, message: object, offset: ClockOffset) -> None:
        """Take in what a node says of its ranks, or asks."""
        if isinstance(message, (RankReport, RankEnded)):
            if message.rank in self._plan.ranks_of(node):
                self._take_of_rank(self._by_rank[message.rank], message, offset)
        elif isinstance(message, NodeProgress):
            for rank in set(self._plan.ranks_of(node)) & message.ranks.keys():
                self._by_rank[rank].note_report(message, offset)
        elif isinstance(message, StatusRequest):
            self._requests.note(node, message)

    @staticmethod
    def _take_of_rank(
        rank: RemoteRank, message: RankReport | RankEnded, offset: ClockOffset
    ) -> None:
        if isinstance(message, RankEnded):
            rank.exit_code, rank.ended_ns = message.exit_code, message.ended_ns + offset.mono_ns
            return
        with contextlib.suppress(GarbledError):  # of a kind that is not handled here
            reported = read_rank_report(message)
            if isinstance(reported, NativeError):
                rank.note_native(reported)
            else:
                rank.take(shift(reported, offset))

    # What the core says.

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._channel.send(action.message, to=action.to)
                case Until():
                    self._wait_until(action.holds, Deadline.after(action.limit))
                case Do.GIVE_UP_AWAY:
                    self._channel.give_up_away()
                    self.take_news()
                case PutSignal():
                    self._inbox.insists |= action.signal.insists
                    self._inbox.put(action.signal.number, None, self._plan.name_of(action.node))
                case _:
                    raise TypeError(action)

    def _decide(
        self, decision: Generator[Action, None, T], ask_ranks: Callable[[], object] = tuple
    ) -> T:
        """Perform the actions of a decision, one by one; return it."""
        while True:
            try:
                action = next(decision)
            except StopIteration as end:
                decided: T = end.value
                return decided
            if action is Do.ASK_RANKS:
                ask_ranks()
            else:
                self._perform([action])

    def _wait_until(self, holds: Callable[[], bool], deadline: Deadline) -> None:
        self.take_news()
        while not holds() and not deadline.expired():
            handles = [self._channel.fileno(), self._inbox.fileno()]
            if self._inbox.fileno() in wait(handles, min(deadline.remaining_s(), BEAT_S)):
                os.read(self._inbox.fileno(), 1)
            self.take_news()

    # At the end of the attempt, in this order.

    def gather_evidence(
        self,
        ending: Ending,
        processes: Sequence[RankProcess],
        ask_where: Callable[[Sequence[RankProcess]], None],
    ) -> Ending:
        """Have the ranks of all nodes asked where they are; wait until the cause can be known."""
        decision = self.core.gather_evidence(
            ending.reason,
            hears=lambda: self._channel.has_heard(within_s=LOSS_S - BEAT_S),
            outcomes=lambda: (*outcomes_of(processes).values(), *self.outcomes().values()),
        )
        return replace(ending, reason=self._decide(decision, lambda: ask_where(processes)))

    def longest_grace_s(self, own_s: float | None) -> float | None:
        """Return the longest ``join(grace_period=…)`` of any node; ``None`` if no node asks for one."""
        wanted_s = [own_s, *(node.grace_s for node in self.core.reported.values())]
        return max((grace_s for grace_s in wanted_s if grace_s is not None), default=None)

    def outcomes(self) -> dict[int, RankOutcome]:
        """Return what became of the ranks of all other nodes."""
        outcomes = {rank.rank: rank.outcome() for rank in self.ranks}
        for node, reported in self.core.reported.items():
            offset = self._channel.offset_of(node)
            for outcome in reported.outcomes:
                rank = self._by_rank.get(outcome.rank)
                shifted = shift_outcome(outcome, offset)
                # It may have returned since its launcher asked it where it is.
                is_late = outcome.status == "stopped" and outcome.before is None
                if is_late and rank is not None and rank.returned is not None:
                    shifted = replace(shifted, status="returned")
                outcomes[outcome.rank] = shifted
        return outcomes

    def oom_kills(self) -> int:
        """Return how many processes their kernels have killed for memory during the attempt."""
        return self.core.oom_kills

    def require_all_nodes(self, ended: EndedAttempt) -> None:
        """Raise the error of a node that has failed, or of lost ones if no rank broke by itself."""
        error = self.core.find_error(ended)
        if error is not None:
            self._directory.holds_failure |= isinstance(error, NodeLostError)
            raise error

    def announce(self, exc: BaseException, ended: EndedAttempt) -> BaseException:
        """Send all nodes the error of the attempt; return it in the form that all nodes raise."""
        error = as_error(exc, self._plan.name_of(0), "could not end the attempt", phase="attempt")
        return self._decide(self.core.announce(error, ended))

    def await_ends(
        self, ended: EndedAttempt, error: BaseException | None, grace: timedelta
    ) -> BaseException | None:
        """Wait until the ranks of all nodes have ended; return the error, which that may bring."""
        final = self._decide(self.core.await_ends(ended, error, grace))
        # A node cannot load what one of its ranks returned.
        self._directory.holds_failure |= final is not error and isinstance(final, DDPSafeError)
        return final

    def announce_failure(self, exc: Exception) -> Exception:
        """Send all nodes what node 0 could not do, unless they know; return what node 0 raises."""
        if exc is self.core.error:
            return exc
        failure = "could not start its ranks"
        if self.phase == "attempt":
            failure = "could not continue the attempt"
        who = self._plan.name_of(0)
        shared = as_error(exc, who, failure, phase=self.phase, names_node=True)
        self._perform(self.core.send_error(shared))
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
    """Run one attempt as node 0; return what the ranks of this node returned, by rank.

    The ranks' checkpoint folders are added to `checkpoint_folders`.

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
