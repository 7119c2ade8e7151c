"""How nodes find each other: over one connection each, at the endpoint.

Who decides what: TorchElastic's rendezvous decides who is in a round, which node 0 begins only if all of them are
there and fit; node 0's `rounds.NodeLaunch` decides the ranks (in the order of the `Label`s) and with its retry policy
whether there is another attempt, and `decisions.NodeZero` the result of an attempt, for all nodes; what another node
concludes counts for that node alone, and only once node 0 is lost or does not answer.

Node 0 serves its end of the channel at the endpoint, and every other launcher dials it there: whatever launchers
have to say goes over that connection, the state of torch's rendezvous included.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import threading
import time
from dataclasses import replace
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._errors import (
    ConfigError,
    DDPSafeError,
    Explanation,
    PreflightError,
    RendezvousTimeoutError,
)
from ddpsafe._host import list_interfaces
from ddpsafe._job.channel import Away, Back, Channel, Hello, Lost, RefusedError
from ddpsafe._job.endpoint import NO_ANSWER_WARNING_S, JobEndpoint
from ddpsafe._launcher.nodes import limits
from ddpsafe._launcher.nodes.decisions import Send, Warn
from ddpsafe._launcher.nodes.lobby import (
    Lobby,
    Membership,
    differences,
    require_same_settings,
    same_rank,
)
from ddpsafe._launcher.nodes.node_messages import (
    CODEC,
    Answered,
    Ask,
    CannotTakePart,
    Introduction,
    NodeFacts,
    NodeMessage,
    error_of,
    prepare,
    round_result_of,
)
from ddpsafe._launcher.nodes.torchs_rendezvous import Arrivals, SharedState, TorchsPart
from ddpsafe._launcher.watch.signals import NONE_LEFT_HERE, Interrupted
from ddpsafe._logging import get_logger
from ddpsafe._secrets import JOB_SECRET
from ddpsafe._text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from ddpsafe._config import LaunchConfig
    from ddpsafe._job.channel import ClockOffset, Event
    from ddpsafe._launcher.nodes.decisions import Action
    from ddpsafe._launcher.nodes.node_messages import RoundPlan
    from ddpsafe._launcher.watch.signals import SignalInbox

logger = get_logger(__name__)

_POLL_S: Final = 0.05
_LOOK_S: Final = 0.5
_SPARE_S: Final = 0.5
"""How much later a spare node joins than those of the last round, which keep their places."""

_FIRST_WARNING_S: Final = 10.0
_NEXT_WARNINGS_S: Final = 60.0
_MAX_REFUSED_NAMES: Final = 8
"""Anyone who reaches the endpoint can give a name: they must not fill the log."""


class Label(NamedTuple):
    """What torch knows of a node: it sorts them by this text, and makes the first one node 0.

    That is the node that serves the endpoint, and the others keep their order from round to round.
    """

    order: str
    hostname: str
    address: str
    # A restarted container may have the name, address and pid of its predecessor, but is not in its
    # round.
    launcher: str

    @classmethod
    def of(cls, facts: NodeFacts) -> Label:
        """Return that of a node; those without a node rank come after node 0, in order of their names."""
        # Padded: torch compares labels as texts, and "10" would stand before "2".
        order = "000001?" if facts.node_rank is None else f"{facts.node_rank:06d}"
        return cls(order, facts.hostname, facts.address, facts.launcher)

    @classmethod
    def read(cls, text: str) -> Label:
        """Return the one that a text is."""
        return cls(*text.split("\t"))

    @property
    def node_rank(self) -> int | None:
        """The node rank that it was given, if any."""
        return None if self.order.endswith("?") else int(self.order)

    def __str__(self) -> str:
        """Return it as torch gets it."""
        return "\t".join(self)


class Questions:
    """Asks node 0 over the channel, from any thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, Answered | None] = {}
        self._news = threading.Condition()

    def take(self, _: Channel[int, NodeMessage], __: int, answer: Answered) -> None:
        """Take in an answer, in the channel's thread."""
        with self._news:
            if answer.number in self._open:
                self._open[answer.number] = answer
                self._news.notify_all()

    def ask(
        self, channel: Channel[int, NodeMessage], question: Ask, is_over: Callable[[], bool]
    ) -> Answered | None:
        """Wait for the answer; return ``None`` if node 0 is lost, or `is_over` says so."""
        question = replace(question, number=next(self._numbers))
        with self._news:
            self._open[question.number] = None
        channel.send(question)
        with self._news:
            while (
                (found := self._open[question.number]) is None
                and channel.connected()
                and not is_over()
            ):
                self._news.wait(_LOOK_S)
            del self._open[question.number]
        return found


class RoundChannel:
    """Node 0's channel to the nodes of one round, by node rank. What others send goes to the lobby."""

    def __init__(self, rendezvous: NodeRendezvous, launchers: Sequence[str]) -> None:
        self._rendezvous, self._channel = rendezvous, rendezvous.channel
        self._launchers = launchers
        self._ranks = {launcher: node for node, launcher in enumerate(launchers) if node}

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are events, other than those of routine."""
        return self._channel.fileno()

    def events(self) -> Iterator[tuple[int, Event[NodeMessage]]]:
        """Yield what has arrived from the nodes of the round since the last call."""
        for launcher, event in self._channel.events():
            node = self._ranks.get(launcher)
            if node is None or isinstance(event, (Lost, Away, Back, CannotTakePart)):
                self._rendezvous.take(launcher, event)
            if node is not None:
                yield node, event

    def send(self, message: NodeMessage, *, to: Sequence[int | str] | None = None) -> None:
        """Send to nodes of the round, by node rank, or to all of them; see `Channel.send`."""
        nodes = self._ranks.values() if to is None else to
        # Packed once: the plan of a large job takes milliseconds.
        self._channel.send(message, to=[self._launchers[int(node)] for node in nodes])

    def give_up_away(self) -> None:
        """Take the nodes that are away as lost."""
        self._channel.give_up_away(self._ranks)

    def offset_of(self, node: int) -> ClockOffset:
        """Return what to add to the times of a node, also of one that has been lost."""
        return self._channel.offset_of(self._launchers[node])

    def has_heard(self, *, within_s: float) -> bool:
        """Return whether the kernel of a connected node has sent anything in the last seconds."""
        return self._channel.has_heard(within_s=within_s)


class SharedKeys:
    """Keys for one purpose that node 0 keeps and all nodes read and set; see `store_keys.Keys`."""

    def __init__(self, prefix: str, ask: Callable[[Ask], Answered | None]) -> None:
        self._prefix, self._ask = prefix, ask

    def set(self, key: str, value: str, /) -> None:
        """Set a key."""
        self._value(key, value)

    def get(self, key: str, /) -> bytes:
        """Return the value of a key that is set."""
        return (self._value(key) or "").encode()

    def check(self, keys: Sequence[str], /) -> bool:
        """Return whether all the keys are set."""
        return all(self._value(key) is not None for key in keys)

    def _value(self, key: str, value: str | None = None) -> str | None:
        answer = self._ask(Ask(number=0, key=f"{self._prefix}/{key}", value=value))
        if answer is None:
            msg = "the connection to node 0 is lost"
            raise RuntimeError(msg)
        return answer.value


class NodeRendezvous:
    """This node's part in the rendezvous: serves or dials the endpoint, then joins round by round.

    Every wait ends with a signal to this launcher. The settings have to be the same on all nodes, and what
    `setup` has should be. A node that has joined the job before may not serve the endpoint. Nothing is opened
    before `open`.

    Attributes:
        lobby: The other nodes, if this is node 0.
        membership: What node 0 has decided, if this is another node.
    """

    lobby: Lobby
    membership: Membership

    def __init__(
        self,
        config: LaunchConfig,
        inbox: SignalInbox,
        *,
        settings: dict[str, str] | None = None,
        setup: dict[str, str] | None = None,
        nproc: int = 1,
        may_serve: bool = True,
    ) -> None:
        # While there are descriptors: pydantic imports modules when it makes an adapter.
        prepare()
        self._config, self.inbox = config, inbox
        self._settings, self._setup, self._nproc = settings or {}, setup or {}, nproc
        self._launcher = make_random_id()
        self.endpoint = JobEndpoint(
            config,
            self.require_no_signal,
            listen=self._listen,
            dial=self._dial,
            may_serve=may_serve,
        )
        # Read here, and not in `facts`, which is made for every message that introduces this node.
        self._addresses = tuple(
            address
            for interface in list_interfaces()
            if interface.is_candidate
            for address in interface.addresses
        )
        self._channel: Channel[Any, NodeMessage] | None = None
        self._shared = SharedState(self._launcher, config.rendezvous.last_call, self._there)
        self._keys: dict[str, str] = {}
        self._questions = Questions()
        self._part: TorchsPart | None = None
        self._call: BoundedCall[None] | None = None
        self._is_member = False
        self._refused: dict[str, str] = {}
        self._join_by, self._next_warning_s = Deadline.after(None), _FIRST_WARNING_S
        self._has_warned_of_endpoint = False

    @property
    def serves(self) -> bool:
        """Whether this node serves the endpoint, which makes it node 0."""
        return self.endpoint.serves

    @property
    def facts(self) -> NodeFacts:
        """This node, as it introduces itself."""
        return NodeFacts(
            hostname=socket.gethostname(),
            pid=os.getpid(),
            address=self.endpoint.address,
            nproc=self._nproc,
            settings=self._settings,
            setup=self._setup,
            node_rank=0 if self.serves else self._config.node_rank,
            launcher=self._launcher,
            addresses=self._addresses,
            is_named=self.endpoint.is_named,
        )

    def require_no_signal(self) -> None:
        """Leave a wait when this launcher has received a signal.

        Raises:
            Interrupted: A signal has arrived.
        """
        if self.inbox.received is not None:
            raise Interrupted(self.inbox.received, left="" if self.serves else NONE_LEFT_HERE)

    def open(self, *, joins: bool = True) -> None:
        """Serve the endpoint if it is on this host, else dial node 0 there.

        Raises:
            ConfigError: This node's settings differ from those of node 0.
            PreflightError: The endpoint cannot be served, or belongs to another job or program.
            RendezvousTimeoutError: No node serves it in time.
        """
        channel = self.endpoint.open()
        if self.serves:
            self.lobby = Lobby(self.facts)
        self._channel = channel  # from here on, the channel's thread asks the lobby
        if not self.serves:
            self.membership = Membership(self._welcomed(channel))
            if joins:
                self._become_member()

    # What arrives goes to the core, and what that says is done.

    @property
    def channel(self) -> Channel[Any, NodeMessage]:
        """The channel to all other launchers, or to node 0."""
        assert self._channel is not None  # noqa: S101 - `open` opens it
        return self._channel

    def look(self) -> None:
        """Take in what has arrived."""
        for name, event in self.channel.events():
            self.take(name, event)

    def take(self, name: Any, event: Event[NodeMessage]) -> None:
        """Take in what a launcher has sent."""
        self.perform(self.lobby.take(name, event) if self.serves else self.membership.take(event))

    def perform(self, actions: Iterable[Action]) -> None:
        """Do what a core says."""
        for action in actions:
            if isinstance(action, Send):
                self.channel.send(action.message, to=action.to)
            else:
                assert isinstance(action, Warn), action  # noqa: S101 - a lobby says nothing else
                extra = {"event": action.event} if action.event else {}
                logger.warning("%s", action.text, extra=extra)

    def wait_until(
        self, holds: Callable[[], bool], limit: Deadline, *, heeds_signals: bool = True
    ) -> None:
        """Take in what arrives until a condition holds, or the time is over.

        Raises:
            Interrupted: A signal has arrived.
        """
        while True:
            self.look()
            if holds():
                return
            if heeds_signals:
                self.require_no_signal()
            if limit.expired():
                return
            wait([self.channel.fileno()], min(_POLL_S, limit.remaining_s()))

    def send_plan(self, plan: RoundPlan) -> RoundChannel:
        """Send the plan of a round to its nodes; return the channel to them."""
        self.perform(self.lobby.plan(plan))
        return RoundChannel(self, [node.launcher for node in plan.nodes])

    def begin(self, plan: RoundPlan) -> None:
        """Begin the attempt of a round; its channel then has what its nodes have sent meanwhile."""
        self.perform(self.lobby.begin(plan))
        self.channel.put_back(self.lobby.early)

    def _listen(self, address: str, port: int) -> Channel[str, NodeMessage]:
        """Open node 0's end of the channel."""
        return Channel[str, NodeMessage].listen(
            address,
            port=port,
            secret=self.endpoint.secret,
            scope=self._launcher,
            codec=CODEC,
            nnodes=self._config.nnodes,
            node_loss=self._config.timeouts.node_loss,
            first=Introduction(node=replace(self.facts, address=address, node_rank=0)),
            at_once={Ask: self._answer},
            warns=True,
        )

    def _dial(self, address: str, port: int) -> Channel[int, NodeMessage]:
        """Open another node's end of the channel."""
        return Channel.dial(
            (address, port),
            secret=self.endpoint.secret,
            codec=CODEC,
            node=self._launcher,
            hello=lambda: Hello(mono_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
            deadline=Deadline.after(limits.DIAL),
            node_loss=self._config.timeouts.node_loss,
            about={"hostname": socket.gethostname()},
            at_once={Answered: self._questions.take},
        )

    def _welcomed(self, channel: Channel[int, NodeMessage]) -> NodeFacts:
        """Return who node 0 is, which is what it sends first.

        Raises:
            RendezvousTimeoutError: It is lost before that.
        """
        deadline, why = Deadline.after(self._config.timeouts.start), "it sent nothing"
        while not deadline.expired():
            for _, event in channel.events():
                if isinstance(event, Introduction):
                    return event.node
                if isinstance(event, Lost):
                    raise self.endpoint.lost(event.why, deadline)
            self.require_no_signal()
            wait([channel.fileno()], _POLL_S)
        raise self.endpoint.lost(why, deadline)

    def _become_member(self) -> None:
        """Tell node 0 who this is, and compare the settings."""
        node_0 = self.membership.node_0
        self.channel.send(Introduction(node=self.facts))
        try:
            require_same_settings(node_0, self.facts)
        except ConfigError as exc:
            self.report_cannot_take_part(exc)
            raise
        self.perform(differences(node_0, self.facts))

    def report_cannot_take_part(
        self,
        error: DDPSafeError | Interrupted,
        *,
        round_id: str = "",
        to: Channel[int, NodeMessage] | None = None,
    ) -> None:
        """Tell node 0 why this node cannot take part, in a round or at all."""
        result = round_result_of(error, is_final=True)
        refusal = CannotTakePart(node=self.facts, result=result, round_id=round_id)
        (to or self.channel).send(refusal)

    def keys_of(self, prefix: str) -> SharedKeys:
        """Return keys that all nodes share, for one purpose."""
        return SharedKeys(prefix, self._ask)

    def _ask(self, question: Ask, is_over: Callable[[], bool] = lambda: False) -> Answered | None:
        """Ask node 0, which may be this one."""
        channel = self._channel
        if channel is None:  # this node has left
            return None
        if not self.serves:
            return self._questions.ask(
                channel, question, lambda: self._channel is None or is_over()
            )
        answers: list[Answered] = []
        self._answer_to(self._launcher, question, answers.append)
        return answers[0]

    def _answer(self, channel: Channel[str, NodeMessage], launcher: str, question: Ask) -> None:
        """Answer another node, in the channel's thread."""
        self._answer_to(launcher, question, lambda answer: channel.send(answer, to=launcher))

    def _answer_to(self, launcher: str, question: Ask, answer: Callable[[Answered], None]) -> None:
        if not question.key:
            self._shared.take(launcher, question, answer)
            return
        if question.value is not None:
            self._keys[question.key] = question.value
        answer(Answered(number=question.number, value=self._keys.get(question.key)))

    def _there(self, launchers: Collection[str]) -> set[str]:
        """Return which of some launchers can be reached, and have not been refused."""
        channel = self._channel
        if channel is None:
            return set(launchers)
        there = channel.connected() - channel.away() - self.lobby.out | {self._launcher}
        return there.intersection(launchers)

    def meet_again(self) -> None:
        """Have the next round begin: as node 0, before the others are told to join it."""
        self._shared.restart()
        self._keys.clear()

    def join(self) -> tuple[str, ...] | None:
        """Wait for the other nodes, and join the next round.

        On node 0 this returns the launchers of the round, by node rank. On another node it returns nothing:
        the plan that node 0 sends has them. ``None`` if the job ended while this node waited to replace
        another.

        Raises:
            ConfigError: A node's settings differ from node 0's.
            RendezvousTimeoutError: Too few nodes joined, or node 0 was lost.
            PreflightError: The job is over, or has all its nodes already.
        """
        self._begin_to_wait()
        try:
            return self._gather() if self.serves else self._take_part()
        finally:
            self._leave()

    def _begin_to_wait(self) -> None:
        self._join_by = Deadline.after(self._config.rendezvous.join)
        self._next_warning_s = _FIRST_WARNING_S

    def _gather(self) -> tuple[str, ...]:
        """Wait as node 0."""
        self._meet()
        next_look_s = 0.0
        while not self._shared.completed.wait(_POLL_S):
            self.require_no_signal()
            self.look()
            self.perform(self.lobby.refuse_unable(self._config))
            waited_s = self._join_by.waited_s()
            if waited_s >= next_look_s:
                next_look_s = waited_s + _LOOK_S
                self._warn_of_refused()
                if self.endpoint.is_elsewhere:
                    self._require_only_node_0(waited_s)
            self._go_on_waiting()
        self._warn_of_refused()  # one may have come since the last look
        return self._shared.complete_round()

    def _take_part(self) -> tuple[str, ...] | None:
        """Wait as another node, until node 0 says what follows."""
        membership, is_spare = self.membership, False
        joins_s: float | None = time.monotonic()
        pause_s = 0.0
        while True:
            wait([self.channel.fileno()], pause_s)
            pause_s = _POLL_S
            self.require_no_signal()
            try:
                if not self.require_member():
                    return None
            except DDPSafeError:
                if is_spare and membership.result is not None:
                    return None  # the job has failed, and not for want of this node
                raise
            if membership.plan is not None or membership.check is not None:
                return ()
            membership.joins_again = False  # it does
            if membership.running is not None:
                if not is_spare:
                    self._require_use_for_spare(membership.running.hosts)
                    self._leave()
                is_spare, joins_s = True, None
                continue
            if is_spare:
                is_spare, joins_s = False, time.monotonic() + _SPARE_S
                self._begin_to_wait()
            if joins_s is not None and time.monotonic() >= joins_s:
                joins_s = None
                self._meet()
            if self._part is not None and self._part.is_complete:
                self._is_member = True
                return ()
            self._go_on_waiting()

    def _meet(self) -> None:
        """Begin to take part in torch's rendezvous, in a thread."""
        if self._call is not None and not self._call.wait(0):
            # It sleeps for up to a second before it notices that this node has left.
            self._part = None
        if self._part is None:
            rendezvous, most = self._config.rendezvous, self._config.nnodes
            self._part = TorchsPart(
                str(Label.of(self.facts)),
                self.endpoint.job,
                (rendezvous.min_nodes or most, most),
                rendezvous.last_call,
                self._ask,
            )
        self._part.begin()
        self._call = BoundedCall(self._part.join, name="ddpsafe-rendezvous")

    def _leave(self) -> None:
        if self._part is not None:
            self._part.is_over = True

    def _go_on_waiting(self) -> None:
        """Warn of missing nodes if it is time to.

        Raises:
            RendezvousTimeoutError: torch's rendezvous has failed, or the limit has passed.
        """
        if self._call is not None and self._call.wait(0):
            try:
                self._call.result()
            except Exception as exc:
                why = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
                raise self.endpoint.lost(why, self._join_by) from exc
        self._require_more_time()
        waited_s = self._join_by.waited_s()
        if waited_s < self._next_warning_s:
            return
        self._next_warning_s = waited_s + _NEXT_WARNINGS_S
        left_s, setting = self._join_by.remaining_s(), "rendezvous.join"
        last_call_s = self._arrivals().left_s
        if last_call_s is not None:  # min_nodes nodes have come
            left_s, setting = max(0.0, last_call_s), "rendezvous.last_call"
        waits = f"; waiting for the others for {left_s:.0f} s more ({setting})"
        logger.warning("%s%s", self._arrivals_text(), waits if round(left_s) else "")

    def _arrivals(self) -> Arrivals:
        if self.serves:
            return self._shared.arrivals()
        return Arrivals() if self._part is None else self._part.arrivals

    def _present(self) -> list[Label]:
        """Return the nodes that have joined, in their order."""
        return [Label.read(text) for text in self._arrivals().labels]

    def require_member(self) -> bool:
        """Look what node 0 has decided; return whether the job continues.

        Raises:
            DDPSafeError: The job ends with an error, or node 0 is lost.
            Interrupted: A signal ends the job.
        """
        membership = self.membership
        self.look()
        if membership.result is not None and not membership.result.is_good:
            raise error_of(membership.result)
        # After a result, node 0 leaves: that is not a loss.
        if membership.lost is not None and membership.result is None:
            if membership.lost.how == "goodbye" and not self._is_member:
                here = socket.gethostname()
                what = f"the job at {self.endpoint} has ended; {here} was too late to join it."
                fix = "start the job again on all nodes if it is to run again."
                raise PreflightError(Explanation(what, fix=fix), kind="peer-lost")
            raise self.endpoint.lost(membership.lost.why, Deadline.after(None))
        self._is_member |= membership.plan is not None
        return membership.result is None

    def _require_more_time(self) -> None:
        """Give up once the limit has passed; node 0 first, so that all nodes raise its error.

        Raises:
            RendezvousTimeoutError: The limit has passed.
        """
        limit, deadline = self._config.rendezvous.join, self._join_by
        is_first = self.serves or deadline.waited_s() >= (limit + limits.READ).total_seconds()
        if not (deadline.expired() and is_first):
            return
        what = f"{self._arrivals_text()}, within {limit.total_seconds():g} s (rendezvous.join)."
        cause = "a node has not started its launcher, or cannot reach the endpoint."
        fix = "check the logs of the missing nodes."
        if self._refused:
            hosts = listed(sorted(self._refused))
            whys = " or ".join(dict.fromkeys(self._refused.values()))
            cause = (
                f"the launcher on {hosts} was refused: it has another {whys}."
                if len(self._refused) == 1
                else f"the launchers on {hosts} were refused: they have another {whys}."
            )
            fix = f"give every node the same {JOB_SECRET}, secret_file, --rdzv-id and version of ddpsafe."
        raise RendezvousTimeoutError(
            Explanation(what, cause=cause, fix=fix),
            waited_s=deadline.waited_s(),
            kind="startup-network",
        )

    def _warn_of_refused(self) -> None:
        """Warn once of each host whose launcher was refused, by the name that it gives."""
        for refusal, about in self.channel.refused:
            name = ascii(str(about.get("hostname"))[:64]) if isinstance(about, dict) else "?"
            if name not in self._refused and len(self._refused) < _MAX_REFUSED_NAMES:
                why = "version of ddpsafe" if refusal == "version" else "job secret or id"
                self._refused[name] = why
                text = "a launcher that calls its host %s was refused: it has another %s"
                logger.warning(text, name, why)

    def _require_use_for_spare(self, hosts: Sequence[str]) -> None:
        """Let a surplus node wait if it may replace another one later.

        Raises:
            PreflightError: The job never replaces a node.
        """
        present = listed(hosts)
        rendezvous, retry = self._config.rendezvous, self._config.retry
        here = socket.gethostname()
        if retry.attempts > 1 and ("peer-lost" in retry.on or rendezvous.min_nodes is not None):
            logger.warning(
                "the job at %s runs on %s; %s waits, and joins at the next failure",
                self.endpoint,
                present,
                here,
            )
            return
        nnodes = self._config.nnodes
        what = f"the job at {self.endpoint} has its {nnodes} nodes already: {present}; {here} is one more."
        cause = "the command was started on one host too many, or twice on one host."
        fix = f"start it on {nnodes} hosts"
        if len(hosts) < nnodes:
            what = f"the job at {self.endpoint} runs on {present} already; {here} was too late to join it."
            cause = f"min_nodes nodes wait only {rendezvous.last_call.total_seconds():g} s for more (rendezvous.last_call)."
            fix = "raise rendezvous.last_call"
        fix += (
            '; to let one more replace a lost node, set retry={"attempts": 2, "on": ["peer-lost"]} on all of '
            "them."
        )
        raise PreflightError(Explanation(what, cause=cause, fix=fix), kind="config")

    def _require_only_node_0(self, waited_s: float) -> None:
        """Check that no other node serves the endpoint, whose address is not one of this host.

        Raises:
            ConfigError: Two nodes have node rank 0.
        """
        try:
            channel = self.endpoint.dial_where_it_leads()
        except (OSError, RefusedError, RendezvousTimeoutError) as exc:
            # A pod's service may appear later than the pod.
            if waited_s > NO_ANSWER_WARNING_S and not self._has_warned_of_endpoint:
                self._has_warned_of_endpoint = True
                logger.warning(
                    "node rank 0 listens at %s, but the endpoint %s is not an address of this host (%s), and "
                    "nothing answers there yet (%s). Set the endpoint to an address of this host.",
                    self.endpoint.address,
                    self.endpoint,
                    socket.gethostname(),
                    getattr(exc, "strerror", None) or exc,
                )
            return
        with contextlib.closing(channel):
            self.endpoint.is_elsewhere = False  # it leads to this node itself, or this is an error
            if channel.scope == self._launcher:
                return
            error = same_rank(
                self._welcomed(channel), self.facts, f"{self.endpoint} leads to the first of them."
            )
            self.report_cannot_take_part(error, to=channel)
        raise error

    def _arrivals_text(self) -> str:
        """Describe which nodes have reached the endpoint, and which node ranks are missing."""
        nnodes = self._config.nnodes
        present = self._present()
        if not present:  # this node joins again, and node 0 does not yet
            known = (self.facts,) if self.serves else (self.membership.node_0, self.facts)
            present = [Label.of(facts) for facts in known]
        names = listed([node.hostname for node in present]) or "none"
        ranks = {node.node_rank for node in present}
        text = f"{len(present)} of {nnodes} nodes reached {self.endpoint}: {names}"
        if present and None not in ranks:
            missing = [str(rank) for rank in range(nnodes) if rank not in ranks]
            plural = "node rank" if len(missing) == 1 else "node ranks"
            text += f"; {plural} {listed(missing)} did not" if missing else ""
        return text + self.endpoint.where_node_0_listens()

    def close(self) -> None:
        """Leave: the other nodes hear at once that this one has ended."""
        self._leave()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def make_random_id() -> str:
    """Return a name that cannot be guessed, for a round, a launcher or a file."""
    return secrets.token_hex(16)
