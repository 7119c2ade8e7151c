"""What launchers exchange outside of attempts: who is there, who cannot take part, what node 0 decides.

Every launcher connects to node 0 as soon as it has reached the endpoint, and stays connected from round to
round. Node 0 has a `Lobby`, every other node a `Membership`; `NodeRendezvous` gives them what arrives, and does what
they say.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import ConfigError, Explanation
from ddpsafe._job.channel import Away, Back, Lost
from ddpsafe._launcher.nodes.decisions import Send, Warn, leaves_alone
from ddpsafe._launcher.nodes.node_messages import (
    CannotTakePart,
    FolderCheck,
    FoldersSeen,
    Introduction,
    NodeFacts,
    Ready,
    RoundPlan,
    RoundResult,
    RunsWithout,
    error_of,
    round_result_of,
)
from ddpsafe._launcher.nodes.texts import outage_text
from ddpsafe._launcher.watch.signals import Interrupted
from ddpsafe._wire.exception_facts import clip

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ddpsafe._config import LaunchConfig
    from ddpsafe._errors import DDPSafeError
    from ddpsafe._job.channel import Event
    from ddpsafe._launcher.nodes.decisions import Action
    from ddpsafe._launcher.nodes.node_messages import NodeMessage

SCRIPT: Final = "the name of the script"
"""A setting: two jobs with one endpoint mostly differ in it."""

_MAX_DIFFERENCES: Final = 8
_MAX_VALUE: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """What node 0 knows of another launcher.

    Attributes:
        node: Its node, once it has introduced itself.
        is_away: Whether it cannot be reached now.
        is_ready: Whether it has read the plan of the round.
        seen: Which folders with checkpoints it has found.
    """

    node: NodeFacts | None = None
    is_away: bool = False
    is_ready: bool = False
    seen: FoldersSeen | None = None
    unable: CannotTakePart | None = None
    lost: Lost | None = None


_UNKNOWN: Final = Caller()


class Lobby:
    """Node 0's side: all launchers, in an attempt or not. A core, as those of `decisions`.

    Attributes:
        callers: The other launchers, in the order in which they came; those that cannot take part last.
        settled: The launchers of the last round that began. Any other launcher is new: the job
            refuses it if it is unfit, and waits for another one.
        out: Those that have left or are refused: rounds begin without them.
        early: What nodes of the round have sent before it began here.
    """

    def __init__(self, own: NodeFacts) -> None:
        self._own = own
        self._round_id = self._checked_file = ""
        self._running: RunsWithout | None = None
        self.callers: dict[str, Caller] = {}
        self.settled: frozenset[str] = frozenset()
        self.out: frozenset[str] = frozenset()  # read by the channel's thread
        self.early: list[tuple[str, Event[NodeMessage]]] = []

    def _note(self, launcher: str, **facts: object) -> None:
        known = self.callers.get(launcher, _UNKNOWN)
        self.callers[launcher] = replace(known, **facts)  # type: ignore[arg-type]  # its fields

    def of(self, launcher: str) -> Caller:
        """Return what is known of a launcher."""
        return self.callers.get(launcher, _UNKNOWN)

    @property
    def nodes(self) -> dict[str, NodeFacts]:
        """The other nodes that rounds may begin with, by launcher."""
        return {
            launcher: caller.node
            for launcher, caller in self.callers.items()
            if caller.node is not None and launcher not in self.out
        }

    @property
    def unable(self) -> dict[str, CannotTakePart]:
        """Why nodes cannot take part, by launcher."""
        found = {launcher: caller.unable for launcher, caller in self.callers.items()}
        return {launcher: why for launcher, why in found.items() if why is not None}

    def is_new(self, launcher: str) -> bool:
        """Return whether a launcher has come to replace one of the last round."""
        return bool(self.settled) and launcher not in self.settled

    def has_come_or_left(self, launcher: str) -> bool:
        """Return whether a launcher has introduced itself, or is lost."""
        caller = self.of(launcher)
        return caller.node is not None or caller.lost is not None

    def has_answered(self, launcher: str) -> bool:
        """Return whether a launcher has read the plan of the round, cannot take part, or is lost."""
        caller = self.of(launcher)
        return caller.is_ready or caller.unable is not None or caller.lost is not None

    def is_present(self, launcher: str) -> bool:
        """Return whether a launcher is ready for the round, and has not left since."""
        caller = self.of(launcher)
        return caller.is_ready and caller.lost is None

    def take(self, launcher: str, event: Event[NodeMessage]) -> Iterator[Action]:
        """Take in what a launcher has sent, or what has happened to it."""
        caller = self.of(launcher)
        is_in_attempt = self._running is not None and launcher in self.settled
        if isinstance(event, (Away, Back)):
            self._note(launcher, is_away=isinstance(event, Away))
        if isinstance(event, Introduction):
            yield from self._admit(launcher, event.node)
        elif isinstance(event, CannotTakePart):
            # A refusal may arrive after its round was given up.
            if event.round_id in ("", self._round_id):
                # The first refusal counts.
                self.callers[launcher] = self.callers.pop(launcher, _UNKNOWN)
                self._note(launcher, unable=event)
        elif isinstance(event, FoldersSeen):
            # The answer to an earlier check may arrive after an outage.
            if event.file == self._checked_file:
                self._note(launcher, seen=event)
        elif isinstance(event, Ready):
            if event.round_id == self._round_id:
                self._note(launcher, is_ready=True)
        elif isinstance(event, Lost):
            self._note(launcher, lost=event)
            self.out |= {launcher}
        elif is_in_attempt:
            return
        elif caller.is_ready:
            # Its ranks have started before those of node 0, which reads this once the round begins.
            self.early.append((launcher, event))
        elif isinstance(event, (Away, Back)) and caller.node and launcher not in self.out:
            # Until it is back, torch's rendezvous does not count it.
            yield outage_of(caller.node, event)

    def plan(self, round_plan: RoundPlan) -> Iterator[Action]:
        """Send the plan of a round to its nodes."""
        yield from self.end_round()
        self._round_id = round_plan.round_id
        yield Send(round_plan, tuple(node.launcher for node in round_plan.nodes[1:]))

    def begin(self, round_plan: RoundPlan) -> Iterator[Action]:
        """Begin the attempt of a round, and tell all others of it."""
        self.settled = frozenset(node.launcher for node in round_plan.nodes)
        self._running = RunsWithout(hosts=tuple(node.hostname for node in round_plan.nodes))
        yield Send(self._running, self._others())

    def end_round(self) -> Iterator[Action]:
        """Note that there is no round now: what nodes say of the last one no longer counts."""
        self._round_id, self.early = "", []
        for launcher, caller in [*self.callers.items()]:
            unable = None if caller.unable is None or caller.unable.round_id else caller.unable
            self._note(launcher, is_ready=False, unable=unable)
        if self._running is not None:
            self._running = None
            yield Send(RunsWithout(hosts=()), self._others())

    def give_up_round(self, launchers: Collection[str]) -> Iterator[Action]:
        """Have the nodes of a round that does not begin join again."""
        yield from self.end_round()
        there = tuple(launcher for launcher in launchers if launcher not in self.out)
        yield Send(RoundResult(is_final=False), there)

    def check(self, check: FolderCheck, launchers: Collection[str]) -> Iterator[Action]:
        """Have new nodes look at what they have to see."""
        self._checked_file = check.file
        for launcher in launchers:
            self._note(launcher, seen=None)
        yield Send(check, tuple(launchers))

    def refuse(self, launcher: str, error: DDPSafeError | Interrupted) -> Iterator[Action]:
        """Let one launcher end with an error, and the job go on without it."""
        caller = self.of(launcher)
        node = caller.node if caller.unable is None else caller.unable.node
        if not isinstance(error, Interrupted):
            yield Warn(f"{node}, which came to replace a node, is refused: {error.explanation}")
        yield Send(round_result_of(error, is_final=True), (launcher,))
        self._note(launcher, unable=None)
        self.out |= {launcher}

    def refuse_unable(
        self, config: LaunchConfig, round_plan: RoundPlan | None = None
    ) -> Iterator[Action]:
        """Refuse new nodes that cannot take part, and let nodes leave that have received a signal.

        The configuration is that of node 0. `round_plan` is the round that does not begin because of its
        nodes; ``None`` while nodes join.

        Raises:
            DDPSafeError: The error of a node that is not new.
            Interrupted: Its launcher has received a signal that is for the job.
        """
        nodes = None if round_plan is None else {node.launcher for node in round_plan.nodes}
        attempt = None if round_plan is None else round_plan.attempt
        for launcher, refusal in self.unable.items():
            if nodes is not None and launcher not in nodes:
                continue
            error = error_of(refusal.result)
            staying = 1 + len(self.nodes.keys() - {launcher})
            leaves = isinstance(error, Interrupted) and leaves_alone(
                config, error.signum, staying=staying, attempt=attempt
            )
            if not leaves and not self.is_new(launcher):
                raise error
            yield from self.refuse(launcher, error)

    def _others(self) -> tuple[str, ...]:
        return tuple(launcher for launcher in self.nodes if launcher not in self.settled)

    def _admit(self, launcher: str, node: NodeFacts) -> Iterator[Action]:
        """Take in a new node; one that was started again on its host replaces its predecessor."""
        for other in [self._own, *self.nodes.values()]:
            is_waiting = other.launcher not in self.settled and not self._round_id
            is_same_rank = node.node_rank is not None and other.node_rank == node.node_rank
            if is_same_rank and is_waiting and other is not self._own:
                if not other.is_on_host_of(node):
                    self._object(launcher, node, same_rank(other, node))
                    continue
                what = f"node rank {node.node_rank} was started again on {node.hostname}."
                cause = "the command ran twice; the second start replaces this one."
                error = ConfigError(Explanation(what, cause=cause, fix="start it once."))
                yield Warn(f"{what.rstrip('.')}: the second start replaces the first")
                yield Send(round_result_of(error, is_final=True), (other.launcher,))
                self.out |= {other.launcher}
            elif self._comes_twice(node, other):
                self._object(launcher, node, _same_host(other, node))
        self._note(launcher, node=node)
        if self._running is not None:
            yield Send(self._running, (launcher,))
        yield from differences(self._own, node)

    def _comes_twice(self, node: NodeFacts, other: NodeFacts) -> bool:
        """Return whether two launchers of one host meet that are hardly meant to be in one job."""
        is_meant = node.is_named or None not in (node.node_rank, other.node_rank)
        is_away = self.of(other.launcher).is_away  # the host has started again
        return not (is_meant or is_away or self._running) and other.is_on_host_of(node)

    def _object(self, launcher: str, node: NodeFacts, error: ConfigError) -> None:
        result = round_result_of(error, is_final=True)
        self._note(launcher, unable=CannotTakePart(node=node, result=result))


class Membership:
    """Another node's side: what node 0 has decided for it. A core, as those of `decisions`.

    Attributes:
        plan: The plan of the round that this node is in.
        check: The folders that this node has to see before that.
        running: The round that has begun without this node.
        joins_again: Whether the round does not begin, and its nodes join again.
        result: Why there is no further round.
    """

    def __init__(self, node_0: NodeFacts) -> None:
        self.node_0 = node_0
        self.running: RunsWithout | None = None
        self.result: RoundResult | None = None
        self.lost: Lost | None = None
        self.leave_round()

    def leave_round(self) -> None:
        """Forget the round that this node was in."""
        self.plan: RoundPlan | None = None
        self.check: FolderCheck | None = None
        self.joins_again = False

    @property
    def is_told(self) -> bool:
        """Whether node 0 has decided what follows, or is lost."""
        return self.joins_again or self.result is not None or self.lost is not None

    def take(self, event: Event[NodeMessage]) -> Iterator[Action]:
        """Take in what has arrived."""
        if isinstance(event, Lost):
            self.lost = event
        elif isinstance(event, (Away, Back)):
            yield outage_of(self.node_0, event)
        elif isinstance(event, RoundPlan):
            self.plan, self.running, self.joins_again = event, None, False
        elif isinstance(event, RunsWithout):
            self.running = event if event.hosts else None
        elif isinstance(event, FolderCheck):
            self.check, self.joins_again = event, False
        elif isinstance(event, RoundResult) and event.is_final is False:
            self.leave_round()
            self.joins_again = True
        elif isinstance(event, RoundResult) and event.is_final:
            self.result = event


def outage_of(node: NodeFacts, event: Away | Back) -> Warn:
    """Return the warning of an outage between attempts."""
    return Warn(outage_text(str(node), event), "back" if isinstance(event, Back) else "away")


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


def differences(first: NodeFacts, other: NodeFacts) -> Iterator[Warn]:
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
        yield Warn(f"the nodes of this job differ: {line}")
    if len(lines) > _MAX_DIFFERENCES:
        yield Warn(f"... and in {len(lines) - _MAX_DIFFERENCES} more values")


def _clipped(node: NodeFacts, name: str) -> str:
    return clip(node.setup[name], _MAX_VALUE) if name in node.setup else "not set"
