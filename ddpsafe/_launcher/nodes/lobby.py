"""What launchers exchange outside of attempts: who is there, who cannot take part, what node 0 decides.

Every launcher connects to node 0 as soon as it has reached the endpoint, and stays connected from round to
round. Node 0 has a `Lobby`, every other node a `Membership`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._job.channel import Away, Back, Lost
from ddpsafe._launcher.nodes.node_messages import (
    CannotTakePart,
    FolderCheck,
    FoldersSeen,
    Joining,
    NodeFacts,
    Ready,
    RoundPlan,
    RoundResult,
    RunsWithout,
    round_result_of,
)
from ddpsafe._launcher.watch.signals import Interrupted
from ddpsafe._logging import get_logger
from ddpsafe._wire.exception_facts import clip

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from ddpsafe._clock import Deadline
    from ddpsafe._errors import DDPSafeError
    from ddpsafe._job.channel import Channel, ClockOffset, Event
    from ddpsafe._launcher.nodes.node_messages import NodeMessage

logger = get_logger(__name__)

SCRIPT: Final = "the name of the script"
"""A setting: two jobs with one endpoint mostly differ in it."""

_MAX_DIFFERENCES: Final = 8
_MAX_VALUE: Final = 200


class Lobby:
    """Node 0's side: all launchers that are connected, in an attempt or not.

    Args:
        channel: The control channel; the other nodes are known by their launchers.
        own: This node.
        forget: Called with a node that has left, or is refused: the next round begins without it.
        check: Called again and again while one waits; what it raises ends the wait.

    Attributes:
        channel: The control channel.
        nodes: The other nodes, by launcher, in the order in which they came.
        settled: The launchers of the last round that began. Any other launcher is new: the job
            refuses it if it is unfit, and waits for another one.
        seen: Which folders with checkpoints new nodes have found, by launcher.
        ready: The launchers that have read the plan of the round.
        unable: Why nodes cannot take part, by launcher.
        losses: How the connections of those that have left have ended, by launcher.
    """

    def __init__(
        self,
        channel: Channel[str, NodeMessage],
        own: NodeFacts,
        forget: Callable[[NodeFacts], None],
        check: Callable[[], None],
    ) -> None:
        """Begin without any other node."""
        self.channel = channel
        self._own, self._forget, self._check = own, forget, check
        self._round_id = ""
        self._running: RunsWithout | None = None
        self._early: list[tuple[str, Event[NodeMessage]]] = []
        self.nodes: dict[str, NodeFacts] = {}
        self.settled: set[str] = set()
        self.seen: dict[str, FoldersSeen] = {}
        self.ready: set[str] = set()
        self.unable: dict[str, CannotTakePart] = {}
        self.losses: dict[str, Lost] = {}

    def is_new(self, launcher: str) -> bool:
        """Return whether a launcher has come to replace one of the last round."""
        return bool(self.settled) and launcher not in self.settled

    @property
    def present(self) -> set[str]:
        """The launchers that are ready for the round, and have not left since."""
        return self.ready - self.losses.keys()

    def has_come_or_left(self, launcher: str) -> bool:
        """Return whether a launcher has introduced itself, or is lost."""
        return not launcher or launcher in self.nodes or launcher in self.losses

    def wait_until(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        """Take in what arrives until a condition holds; return whether it does before the deadline."""
        for pause_s in deadline.pauses_s():
            self.look()
            if condition():
                return True
            self._check()
            time.sleep(pause_s)
        return False

    def look(self) -> None:
        """Take in what has arrived."""
        for launcher, event in self.channel.events():
            self.take(launcher, event)

    def take(self, launcher: str, event: Event[NodeMessage]) -> None:
        """Take in what a launcher outside of an attempt has sent."""
        if isinstance(event, Joining):
            self._admit(launcher, event.node)
        elif isinstance(event, CannotTakePart):
            # A refusal may arrive after its round was given up.
            if event.round_id in ("", self._round_id):
                self.unable[launcher] = event
        elif isinstance(event, FoldersSeen):
            self.seen[launcher] = event
        elif isinstance(event, Ready):
            if event.round_id == self._round_id:
                self.ready.add(launcher)
        elif isinstance(event, (Away, Back)) and launcher not in self.ready:
            # Until it is back, torch's rendezvous does not count it.
            if launcher in self.nodes:
                _warn_of_outage(self.nodes[launcher], event)
        elif isinstance(event, Lost):
            self.losses[launcher] = event
            self.drop(launcher)
        elif launcher in self.ready:
            # Its ranks have started before those of node 0: `RoundChannel` hands this out at `begin`.
            self._early.append((launcher, event))

    def drop(self, launcher: str) -> None:
        """Let the next round begin without a launcher."""
        node = self.nodes.pop(launcher, None)
        if node is not None:
            self._forget(node)

    def plan(self, round_plan: RoundPlan) -> RoundChannel:
        """Send the plan of a round to its nodes; return the channel to them."""
        launchers = [node.launcher for node in round_plan.nodes]
        self.end_round()
        self._round_id = round_plan.round_id
        self.send(round_plan, launchers[1:])
        return RoundChannel(self, launchers)

    def begin(self, round_plan: RoundPlan) -> None:
        """Begin the attempt of a round; its channel then has what its nodes have sent meanwhile."""
        self.settled = {node.launcher for node in round_plan.nodes}
        self._running = RunsWithout(hosts=tuple(node.hostname for node in round_plan.nodes))
        self.send(self._running, self.nodes.keys() - self.settled)
        self.channel.put_back(self._early)

    def end_round(self) -> None:
        """Note that there is no round now: what nodes say of the last one no longer counts."""
        self._round_id, self.ready, self._early = "", set(), []
        self.unable = {k: v for k, v in self.unable.items() if not v.round_id}
        if self._running is not None:
            self._running = None
            self.send(RunsWithout(hosts=()), self.nodes.keys() - self.settled)

    def give_up_round(self, launchers: Collection[str]) -> None:
        """Have the nodes of a round that does not begin join again."""
        self.end_round()
        self.send(RoundResult(is_final=False), launchers)

    def send(self, message: NodeMessage, launchers: Collection[str] | None = None) -> None:
        """Send to some launchers, or to all of them."""
        # Packed once: the plan of a large job takes milliseconds.
        self.channel.send(message, to=launchers)

    def refuse(self, launcher: str, error: DDPSafeError | Interrupted) -> None:
        """Let one launcher end with an error, and the job go on without it."""
        refusal = self.unable.pop(launcher, None)
        node = self.nodes.get(launcher) if refusal is None else refusal.node
        if not isinstance(error, Interrupted):
            logger.warning(
                "%s, which came to replace a node, is refused: %s", node, error.explanation
            )
        self.send(round_result_of(error, is_final=True), [launcher])
        self.drop(launcher)

    def _admit(self, launcher: str, node: NodeFacts) -> None:
        """Take in a new node; one that was started again on its host replaces its predecessor."""
        known = [self._own, *self.nodes.values()]
        for other in known:
            is_waiting = other.launcher not in self.settled and not self._round_id
            is_same_rank = node.node_rank is not None and other.node_rank == node.node_rank
            if is_same_rank and is_waiting and other is not self._own:
                if not other.is_on_host_of(node):
                    self._object(launcher, node, same_rank(other, node))
                    continue
                what = f"node rank {node.node_rank} was started again on {node.hostname}."
                cause = "the command ran twice; the second start replaces this one."
                error = ConfigError(Explanation(what, cause=cause, fix="start it once."))
                logger.warning("%s: the second start replaces the first", what.rstrip("."))
                self.send(round_result_of(error, is_final=True), [other.launcher])
                self.drop(other.launcher)
            elif self._comes_twice(node, other):
                self._object(launcher, node, _same_host(other, node))
        self.nodes[launcher] = node
        if self._running is not None:
            self.send(self._running, [launcher])
        warn_of_differences(self._own, node)

    def _comes_twice(self, node: NodeFacts, other: NodeFacts) -> bool:
        """Return whether two launchers of one host meet that are hardly meant to be in one job."""
        is_meant = node.is_named or None not in (node.node_rank, other.node_rank)
        is_away = other.launcher in self.channel.away()  # the host has started again
        return not (is_meant or is_away or self._running) and other.is_on_host_of(node)

    def _object(self, launcher: str, node: NodeFacts, error: ConfigError) -> None:
        result = round_result_of(error, is_final=True)
        self.unable[launcher] = CannotTakePart(node=node, result=result)


class RoundChannel:
    """The channel to the nodes of one round, by node rank. What others send goes to the lobby.

    Args:
        lobby: All launchers.
        launchers: Those of the round, by node rank.
    """

    def __init__(self, lobby: Lobby, launchers: Sequence[str]) -> None:
        """Keep the launchers."""
        self._lobby, self._channel = lobby, lobby.channel
        self._launchers = launchers
        self._ranks = {launcher: node for node, launcher in enumerate(launchers) if node}

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are events, other than those of routine."""
        return self._channel.fileno()

    def events(self) -> Iterator[tuple[int, Event[NodeMessage]]]:
        """Yield what has arrived from the nodes of the round since the last call."""
        for launcher, event in self._channel.events():
            node = self._ranks.get(launcher)
            if node is None or isinstance(event, (Lost, CannotTakePart)):
                self._lobby.take(launcher, event)
            if node is not None:
                yield node, event

    def send(self, message: NodeMessage, *, to: int | None = None) -> None:
        """Send to a node of the round, or to all of them; see `Channel.send`."""
        self._lobby.send(message, [*self._ranks] if to is None else [self._launchers[to]])

    def connected(self) -> set[int]:
        """Return the nodes that are not lost; some of them may be away."""
        return {
            self._ranks[launcher] for launcher in self._channel.connected() & self._ranks.keys()
        }

    def away(self) -> set[int]:
        """Return the nodes that are away, and may come back."""
        return {self._ranks[launcher] for launcher in self._channel.away() & self._ranks.keys()}

    def give_up_away(self) -> None:
        """Take the nodes that are away as lost."""
        self._channel.give_up_away(self._ranks)

    def offset_of(self, node: int) -> ClockOffset:
        """Return what to add to the times of a node, also of one that has been lost."""
        return self._channel.offset_of(self._launchers[node])

    def has_heard(self, *, within_s: float) -> bool:
        """Return whether the kernel of a connected node has sent anything in the last seconds."""
        return self._channel.has_heard(within_s=within_s)


class Membership:
    """Another node's side: what node 0 has decided for it.

    Args:
        channel: The control channel to node 0.
        node_0: Node 0.

    Attributes:
        channel: The control channel.
        node_0: Node 0.
        plan: The plan of the round that this node is in.
        planned_ns: When it was read, by the monotonic clock.
        check: The folders that this node has to see before that.
        running: The round that has begun without this node.
        joins_again: Whether the round does not begin, and its nodes join again.
        result: Why there is no further round.
        lost: How the connection to node 0 has ended.
    """

    def __init__(self, channel: Channel[int, NodeMessage], node_0: NodeFacts) -> None:
        """Know nothing yet."""
        self.channel, self.node_0 = channel, node_0
        self.running: RunsWithout | None = None
        self.result: RoundResult | None = None
        self.lost: Lost | None = None
        self.leave_round()

    def leave_round(self) -> None:
        """Forget the round that this node was in."""
        self.plan: RoundPlan | None = None
        self.planned_ns = 0
        self.check: FolderCheck | None = None
        self.joins_again = False

    def look(self) -> None:
        """Take in what has arrived."""
        for _, event in self.channel.events():
            if isinstance(event, Lost):
                self.lost = event
            elif isinstance(event, (Away, Back)):
                _warn_of_outage(self.node_0, event)
            elif isinstance(event, RoundPlan):
                self.plan, self.running, self.joins_again = event, None, False
                self.planned_ns = time.monotonic_ns()
            elif isinstance(event, RunsWithout):
                self.running = event if event.hosts else None
            elif isinstance(event, FolderCheck):
                self.check, self.joins_again = event, False
            elif isinstance(event, RoundResult) and event.is_final is False:
                self.leave_round()
                self.joins_again = True
            elif isinstance(event, RoundResult) and event.is_final:
                self.result = event


def _warn_of_outage(node: NodeFacts, event: Away | Back) -> None:
    """Tell of an outage between attempts; `node_zero.warn_of_outage` does so during one."""
    if isinstance(event, Back):
        what, facts = f"can be reached again after {event.away_s:.0f} s", {"event": "back"}
    else:
        what, facts = f"cannot be reached ({event.why})", {"event": "away"}
    logger.warning("%s %s", node, what, extra=facts)


def same_rank(
    first: NodeFacts,
    second: NodeFacts,
    cause: str = "the same --node-rank, or DDPSAFE_NODE_RANK, was given to both.",
) -> ConfigError:
    """Return the error for two nodes with one node rank."""
    what = f"two nodes have node rank {first.node_rank}: {first} and {second}."
    fix = "give each node its own rank, or give none to any: the order does not matter."
    return ConfigError(Explanation(what, cause=cause, fix=fix))


def _same_host(first: NodeFacts, second: NodeFacts) -> ConfigError:
    pids = f"pids {first.pid} and {second.pid}"
    what = f"{second} comes twice to this job: {pids}."
    cause = "the command ran twice there, or two jobs use the same endpoint."
    fix = (
        "start it once on each host, and give every job its own endpoint or --rdzv-id; if two nodes on one "
        "host are meant, give each its --node-rank."
    )
    return ConfigError(Explanation(what, cause=cause, fix=fix))


def require_same_settings(first: NodeFacts, other: NodeFacts) -> None:
    """Compare the settings of a node with node 0's, and its node rank.

    Raises:
        ConfigError: Settings differ, or it has node rank 0, too.
    """
    number = "1" if other.node_rank is None else other.node_rank
    lines = [
        f"{name}: {first.settings.get(name)} on node 0 ({first.hostname}), "
        f"{other.settings[name]} on node {number} ({other.hostname})"
        for name in other.settings
        if other.settings[name] != first.settings.get(name, other.settings[name])
    ]
    if lines:
        what = f"the nodes of this job do not agree: {lines[0]}."
        fix = "give every node the same arguments, variables, configuration file and versions."
        cause = "another command, pyproject.toml, DDPSAFE_* variable or installation on one node."
        if lines[0].startswith(SCRIPT):
            cause = "two jobs use the same endpoint, or another command was given to one node."
            fix = (
                "give every job its own endpoint or --rdzv-id; nodes of one job with an id may run different "
                "scripts."
            )
        raise ConfigError(Explanation(what, cause=cause, fix=fix, details=lines[1:]))
    if other.node_rank == 0:
        raise same_rank(first, other)


def warn_of_differences(first: NodeFacts, other: NodeFacts) -> None:
    """Warn where the script, its arguments or variables of two nodes differ."""
    if not (first.setup and other.setup):
        return  # it has not come as far as to know
    lines = [
        f"{name}: {_clipped(first, name)} on {first.hostname}, {_clipped(other, name)} on {other.hostname}"
        for name in sorted({*first.setup, *other.setup})
        if first.setup.get(name) != other.setup.get(name)
    ]
    # They may be meant, so a difference is not an error.
    for line in lines[:_MAX_DIFFERENCES]:
        logger.warning("the nodes of this job differ: %s", line)
    if len(lines) > _MAX_DIFFERENCES:
        logger.warning("... and in %d more values", len(lines) - _MAX_DIFFERENCES)


def _clipped(node: NodeFacts, name: str) -> str:
    return clip(node.setup[name], _MAX_VALUE) if name in node.setup else "not set"
