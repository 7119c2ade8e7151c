"""How nodes find each other: TorchElastic's rendezvous brings them together, round by round.

What else they have to say goes over the control channel, which every launcher opens once it has reached
the endpoint. The store there has three keys of its own, besides torch's state.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._errors import (
    ConfigError,
    DDPSafeError,
    Explanation,
    PreflightError,
    RendezvousTimeoutError,
    describes,
)
from ddpsafe._host import list_interfaces, without_cpp_warnings
from ddpsafe._job.channel import (
    Channel,
    GarbledError,
    Hello,
    Lost,
    RefusedError,
    from_json,
    to_json,
)
from ddpsafe._job.endpoint import NO_ANSWER_WARNING_S, STORE_CALL, JobEndpoint, trouble_of
from ddpsafe._launcher.nodes.lobby import (
    Lobby,
    Membership,
    require_same_settings,
    warn_of_differences,
)
from ddpsafe._launcher.nodes.node_messages import (
    CODEC,
    CannotTakePart,
    ControlAddress,
    Joining,
    NodeFacts,
    NodeMessage,
    error_of,
    prepare,
    round_result_of,
)
from ddpsafe._launcher.nodes.torchs_rendezvous import make_signed_backend, use_store
from ddpsafe._launcher.watch.signals import Interrupted
from ddpsafe._logging import get_logger
from ddpsafe._secrets import JOB_SECRET
from ddpsafe._text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store, TCPStore

    from ddpsafe._config import LaunchConfig
    from ddpsafe._launcher.watch.signals import SignalInbox

T = TypeVar("T")
logger = get_logger(__name__)

_DISABLE_SHARED_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Keeps torch's handler from opening a second store on all interfaces, which it reuses in later rounds."""

_POLL_S: Final = 0.05
_SHUTDOWN_S: Final = 3.0
_OWN_SHUTDOWN_S: Final = 60.0  # it takes milliseconds, unless this process gets no core
_CHECK_STORE_S: Final = 0.5
_REOPEN_S: Final = 0.2
_CONTROL_OPENS: Final = timedelta(seconds=10)
"""Node 0 publishes its control channel milliseconds after the endpoint, unless it gets no core."""

_DISMISSAL_READ: Final = timedelta(seconds=3)
_FIRST_WARNING_S: Final = 10.0
_NEXT_WARNINGS_S: Final = 60.0
_MAX_REFUSED_NAMES: Final = 8
"""Anyone who reaches the store can write a name: they must not fill the log."""

# Keys of the endpoint's store, besides those of torch's rendezvous.
_CONTROL: Final = "ddpsafe/control"  # where the control channel is
_UNCONNECTED: Final = "ddpsafe/unconnected"  # how many nodes cannot reach that, and below it why
_REFUSED_NAME: Final = "ddpsafe/refused"  # the host of a launcher without the secret; not signed


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


class Round(NamedTuple):
    """A round that torch's rendezvous has brought together.

    Attributes:
        node_rank: This node's rank in it.
        launchers: The launchers of its nodes, by node rank; empty for one that has left meanwhile.
    """

    node_rank: int
    launchers: tuple[str, ...]


class NodeRendezvous:
    """This node's part in the rendezvous: serves or finds the endpoint, then joins round by round.

    Args:
        config: The configuration of the launch.
        inbox: Signals to this launcher, which end every wait.
        settings: What has to be the same on all nodes, by name.
        setup: What should be the same on all nodes, by name.
        nproc: How many ranks this node starts.
        examine: Called on node 0 (with 0) and on a node that does not reach its channel (with 1), with a
            store that both share: raises the error that says what closes the way.
        may_serve: Whether this node may serve the endpoint; not if it has joined the job before.

    Attributes:
        endpoint: The endpoint.
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
        examine: Callable[[Store, int], None] = lambda *_: None,
        may_serve: bool = True,
    ) -> None:
        """Read the configuration; nothing is opened yet."""
        # While there are descriptors: pydantic imports modules when it makes an adapter.
        prepare()
        self._config, self.inbox = config, inbox
        self._settings, self._setup, self._nproc = settings or {}, setup or {}, nproc
        self._examine = examine
        self.endpoint = JobEndpoint(config, self._check)
        self._may_serve = may_serve
        self._launcher = make_random_id()
        # Read here, and not in `facts`, which is made for every message that introduces this node.
        self._addresses = tuple(
            address
            for interface in list_interfaces()
            if interface.is_candidate
            for address in interface.addresses
        )
        self._channel: Channel[Any, NodeMessage] | None = None
        self._handler: Any = None
        self._backend: Any = None
        self._refused_names: set[str] = set()
        self._unconnected = 0
        self._last_round: int | None = None
        self._is_reopening = False
        self._join_by = Deadline.after(None)
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
        )

    def _check(self) -> None:
        """Leave a wait for the endpoint; a node that reopens its store also hears what node 0 says."""
        self.require_no_signal()
        if self._is_reopening:
            self.require_member()

    def require_no_signal(self) -> None:
        """Leave a wait when this launcher has received a signal.

        Raises:
            Interrupted: A signal has arrived.
        """
        if self.inbox.received is not None:
            if self._backend is not None:
                self._backend.cancelled = True  # else torch's thread would go on polling the store
            raise Interrupted(self.inbox.received)

    def open(self, *, joins: bool = True) -> None:
        """Serve the endpoint if it is on this host, else connect to it and to node 0.

        Args:
            joins: Whether this node is to take part in the job.

        Raises:
            ConfigError: This node's settings differ from those of node 0.
            PreflightError: The endpoint cannot be served, or belongs to another job, or node 0's control
                channel cannot be reached.
            RendezvousTimeoutError: No node serves it in time.
        """
        self.endpoint.open(may_serve=self._may_serve)
        if not self.serves:
            self._connect_to_node_0()
            if joins:
                self._become_member()
            return
        self._channel = channel = Channel[str, NodeMessage].listen(
            self.endpoint.address,
            secret=self.endpoint.secret,
            scope=self._launcher,
            codec=CODEC,
            nnodes=self._config.nnodes,
            node_loss=self._config.timeouts.node_loss,
        )
        self.lobby = Lobby(channel, self.facts, self._forget, self.require_no_signal)
        self._put(_CONTROL, ControlAddress(node=self.facts, port=channel.port))

    def _connect_to_node_0(self) -> None:
        control = self._find_control()
        self._channel = channel = self._dial(control.node, control.port)
        self.membership = Membership(channel, control.node)

    def _become_member(self) -> None:
        """Tell node 0 who this is, and compare the settings."""
        node_0 = self.membership.node_0
        self.membership.channel.send(Joining(node=self.facts))
        try:
            require_same_settings(node_0, self.facts)
        except ConfigError as exc:
            self.report_cannot_take_part(exc)
            raise
        warn_of_differences(node_0, self.facts)

    def _find_control(self) -> ControlAddress:
        for pause_s in Deadline.after(_CONTROL_OPENS).pauses_s():
            if self.endpoint.has(_CONTROL):
                control = self._find(_CONTROL, ControlAddress)
                if control is not None:
                    return control
                # Not signed, since the two ends have different secrets: node 0 warns of this host
                # by name.
                self.endpoint.put_plain(_REFUSED_NAME, socket.gethostname())
                break
            self.require_no_signal()
            time.sleep(pause_s)
        raise self._not_this_job()

    def _dial(self, node_0: NodeFacts, port: int) -> Channel[int, NodeMessage]:
        limit = self._config.timeouts.rendezvous
        deadline = Deadline.after(limit)
        is_abandoned = threading.Event()

        def dial() -> Channel[int, NodeMessage]:
            channel = Channel.dial(
                (node_0.address, port),
                secret=self.endpoint.secret,
                scope=node_0.launcher,
                codec=CODEC,
                node=self._launcher,
                hello=lambda: Hello(mono_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
                deadline=deadline,
                node_loss=self._config.timeouts.node_loss,
            )
            # A signal or the limit ends the wait, but not this thread.
            if is_abandoned.is_set():
                channel.close()
            return channel

        try:
            return self.endpoint.call(dial, limit + STORE_CALL)
        except (OSError, RefusedError) as exc:
            here, (_, why) = socket.gethostname(), trouble_of(exc)
            what = f"{here} reached no control channel of node 0 at {node_0.address}:{port}: {why}."
            cause = (
                "a firewall allows only the port of the endpoint, or node 0's launcher has ended."
            )
            fix = f"open all TCP ports between the nodes; on {here}:  nc -vz {node_0.address} 22"
            error = PreflightError(Explanation(what, cause=cause, fix=fix), kind="startup-network")
            # If node 0 has ended meanwhile, this node still knows best what it did not reach.
            with contextlib.suppress(RendezvousTimeoutError, RuntimeError):
                self._object_in_store(error, self.endpoint.require_store())
                self._examine(self.endpoint.store_below(self._launcher), 1)
            raise error from exc
        finally:
            is_abandoned.set()

    def report_cannot_take_part(
        self, error: DDPSafeError | Interrupted, round_id: str = ""
    ) -> None:
        """Tell node 0 why this node cannot take part, in a round or at all."""
        self.membership.channel.send(self._cannot_take_part(error, round_id))

    def _cannot_take_part(
        self, error: DDPSafeError | Interrupted, round_id: str = ""
    ) -> CannotTakePart:
        result = round_result_of(error, is_final=True)
        return CannotTakePart(node=self.facts, result=result, round_id=round_id)

    def _object_in_store(self, error: DDPSafeError, store: TCPStore) -> None:
        """Say at an endpoint why this node cannot take part; only for what the channel cannot say."""
        number = self.endpoint.call(lambda: store.add(_UNCONNECTED, 1))
        self._put(f"{_UNCONNECTED}/{number}", self._cannot_take_part(error), store)

    def _put(self, key: str, value: object, store: Any = None) -> None:
        self.endpoint.put(key, json.dumps(to_json(value)).encode(), store)

    def _find(self, key: str, cls: type[T], store: Any = None) -> T | None:
        data = self.endpoint.find(key, store)
        with contextlib.suppress(ValueError, GarbledError):
            return None if data is None else from_json(cls, json.loads(data))
        return None

    def _not_this_job(self) -> PreflightError:
        here = socket.gethostname()
        what = (
            f"{here} cannot join the job at {self.endpoint}: the data in its store is not signed "
            "with this job's secret and id."
        )
        cause = (
            "the nodes have different job secrets or ids, another job uses the same endpoint, or a "
            "program without the secret writes to the store."
        )
        fix = (
            f"give every node the same {JOB_SECRET}, secret_file and --rdzv-id, and every job its "
            "own endpoint."
        )
        return PreflightError(Explanation(what, cause=cause, fix=fix), kind="config")

    def join(self) -> Round | None:
        """Wait for the other nodes, and join the next round.

        Returns:
            The round; ``None`` if the job ended while this node waited to replace another.

        Raises:
            ConfigError: A node's settings differ from node 0's.
            RendezvousTimeoutError: Too few nodes joined, or node 0 was lost.
            PreflightError: The job is over, has all its nodes already, or is another job.
        """
        from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousStateError

        self._join_by = Deadline.after(self._config.rendezvous.join)
        if self._handler is None:
            self._handler = self._make_handler()
        while True:
            # Set in this thread: that of the rendezvous may outlive an abandoned wait, and would
            # then change the environment while others read it.
            with _without_shared_store(), without_cpp_warnings():
                call = BoundedCall(self._handler.next_rendezvous, name="ddpsafe-rendezvous")
                if not self._await_round(call):
                    return None
            if not call.wait(0):
                # torch would have this node wait for the next round. Another handler joins that one.
                self._backend.cancelled = True
                self._handler = None
                plan = self.membership.plan
                assert plan is not None  # noqa: S101 - see `_is_left_out`
                return self._round([node.launcher for node in plan.nodes])
            try:
                node_rank = call.result().rank
            except (RendezvousError, RuntimeError) as exc:
                # After the round is complete, torch reads an address from the store, which may be out of reach.
                # Read once, here: torch's thread may read a newer state, without this node, any time.
                new_round = self._find_new_round()
                error = None if new_round else self._not_joined(exc, self._join_by)
                is_unreadable = isinstance(exc, RendezvousStateError)
                is_decided = (is_unreadable or self._backend.is_closed) and not self._backend.lost
                if self._has_ended_well():
                    return None
                if error is not None and (is_decided or self._must_give_up()):
                    raise error from exc
            else:
                if self.serves:  # one may have been refused since the last look
                    self._warn_of_refused_names()
                return self._round(self._launchers(), node_rank)
            # The store, or the connection to it, has not survived an outage; that to node 0 has.
            self._reopen_store()
            new_round = new_round or self._find_new_round()
            if new_round is not None:  # torch would leave this round, and join the next one
                return new_round

    def _reopen_store(self) -> None:
        """Connect to the endpoint's store again, and read torch's state there.

        Raises:
            DDPSafeError: Node 0 has ended the job with an error or is lost, or the limit has passed.
        """
        is_first = True
        while not self._has_ended_well():
            self.require_no_signal()
            time.sleep(_REOPEN_S)  # torch's call may fail at once, again and again
            self.endpoint.close()
            self._is_reopening = True
            try:
                self.endpoint.open(may_serve=False)
                use_store(self._handler, self._backend, self.endpoint.require_store())
                self.endpoint.call(self._backend.read)
            except (PreflightError, RendezvousTimeoutError) as exc:
                if self._must_give_up():
                    raise
                if is_first:
                    logger.warning("%s Connecting again.", exc.explanation.what)
                is_first = False
            else:
                return
            finally:
                self._is_reopening = False

    def _must_give_up(self) -> bool:
        """Return whether a broken connection to the store ends the wait for a round."""
        if self.serves or not self._is_member():
            return True
        return self._join_by.expired() and self.membership.running is None

    def _has_ended_well(self) -> bool:
        """Return whether the job is over while this node waited to replace another."""
        result = None if self.serves else self.membership.result
        return result is not None and result.is_good

    def _round(self, launchers: Sequence[str], node_rank: int | None = None) -> Round:
        self._last_round = self._backend.state.round
        own = launchers.index(self._launcher) if node_rank is None else node_rank
        return Round(node_rank=own, launchers=tuple(launchers))

    def _find_new_round(self) -> Round | None:
        """Return a round that torch has completed with this node, if node 0 can still be reached."""
        state = self._backend.state
        is_new = state is not None and state.complete and state.round != self._last_round
        if self.serves or not self._is_member() or not is_new:
            return None
        launchers = self._launchers()
        return self._round(launchers) if self._launcher in launchers else None

    def _is_left_out(self) -> bool:
        """Return whether torch's rendezvous has completed without this node the round that it is in."""
        membership, backend = self.membership, self._backend
        # A state that was read before node 0 planned the round may be that of the round before.
        is_new = membership.plan is not None and backend.asked_ns > membership.planned_ns
        # Node 0 decides who is in a round. torch gives up the place of a node whose host is away
        # just then.
        return is_new and backend.state.complete and self._launcher not in self._launchers()

    def _await_round(self, call: BoundedCall[Any]) -> bool:
        """Wait until torch's call returns; warn of missing nodes, and leave if there can be no round.

        Returns:
            Whether there is a round; if not, the job has ended, and this node was a spare one.
        """
        next_look_s, next_warning_s = 0.0, _FIRST_WARNING_S
        is_spare = False
        while not call.wait(_POLL_S):
            self.require_no_signal()
            if self.serves:
                self.lobby.look()
                self._end_or_refuse()
            else:
                try:
                    if not self.require_member():
                        return False
                except DDPSafeError:
                    if is_spare and self.membership.result is not None:
                        return False  # the job has failed, and not for want of this node
                    raise
                running = self.membership.running
                if running is not None and not is_spare:
                    self._require_use_for_spare(running.hosts)
                elif running is None and is_spare:
                    self._join_by = Deadline.after(self._config.rendezvous.join)
                is_spare = running is not None
                if self._is_left_out():
                    return True
            deadline = self._join_by
            if deadline.expired() and not is_spare:
                self._require_more_time(deadline)
            if self.serves and deadline.waited_s() >= next_look_s:
                next_look_s = deadline.waited_s() + _CHECK_STORE_S
                self._look_into_store(deadline.waited_s())
            if deadline.waited_s() >= next_warning_s and not is_spare:
                next_warning_s = deadline.waited_s() + _NEXT_WARNINGS_S
                self._warn_of_missing_nodes(deadline)
        return True

    def _warn_of_missing_nodes(self, deadline: Deadline) -> None:
        state = self._backend.state
        if state is None or state.complete:
            return
        left_s, setting = deadline.remaining_s(), "rendezvous.join"
        if state.deadline is not None:  # min_nodes nodes have come
            last_call = state.deadline - datetime.now(timezone.utc)
            left_s, setting = max(0.0, last_call.total_seconds()), "rendezvous.last_call"
        logger.warning(
            "%s; waiting for the others for %.0f s more (%s)",
            self._arrivals_text(),
            left_s,
            setting,
        )

    def require_member(self) -> bool:
        """Look what node 0 has decided; return whether the job continues.

        Raises:
            DDPSafeError: The job ends with an error, or node 0 is lost.
            Interrupted: A signal ends the job.
        """
        membership = self.membership
        membership.look()
        if membership.result is not None and not membership.result.is_good:
            raise error_of(membership.result)
        # After a result, node 0 leaves: that is not a loss.
        if membership.lost is not None and membership.result is None:
            raise self.endpoint.lost(membership.lost.why, Deadline.after(None))
        return membership.result is None

    def _is_member(self) -> bool:
        """Return whether node 0 may still be reached, and has not said anything else."""
        return self.membership.lost is None and self.membership.result is None

    def how_node_0_was_lost(self) -> Lost | None:
        """Return how the connection to node 0 has ended, or that to its store, which may break alone."""
        self.membership.look()
        store = "" if self._backend is None else self._backend.lost
        if self.membership.lost is None and store:
            return Lost(how="ended", why=store, seen_ns=time.monotonic_ns())
        return self.membership.lost

    def _require_more_time(self, deadline: Deadline) -> None:
        """Give up once the limit has passed; node 0 first, so that all nodes raise its error.

        Raises:
            RendezvousTimeoutError: The limit has passed.
        """
        limit = self._config.rendezvous.join
        if not self.serves and deadline.waited_s() < (limit + _DISMISSAL_READ).total_seconds():
            return
        what = f"{self._arrivals_text()}, within {limit.total_seconds():g} s (rendezvous.join)."
        cause = "a node has not started its launcher, or cannot reach the endpoint."
        fix = "check the logs of the missing nodes."
        if self._refused_names:
            hosts = listed(sorted(self._refused_names))
            cause = (
                f"the launcher on {hosts} was refused: it has another job secret or id."
                if len(self._refused_names) == 1
                else f"the launchers on {hosts} were refused: they have another job secret or id."
            )
            fix = f"give every node the same {JOB_SECRET}, secret_file and --rdzv-id."
        raise RendezvousTimeoutError(
            Explanation(what, cause=cause, fix=fix),
            waited_s=deadline.waited_s(),
            kind="startup-network",
        )

    def _end_or_refuse(self) -> None:
        """End the job if one of its nodes cannot continue; a new node is refused, and another awaited.

        Raises:
            DDPSafeError: The node's error, if the job ends.
            Interrupted: The node's launcher has received a signal.
        """
        for launcher, refusal in [*self.lobby.unable.items()]:  # a copy: `refuse` removes entries
            error = error_of(refusal.result)
            if not self.lobby.is_new(launcher):
                raise error
            self.lobby.refuse(launcher, error)

    def _look_into_store(self, waited_s: float) -> None:
        """Note what nodes say that have no channel.

        Raises:
            ConfigError: Two nodes have node rank 0.
            DDPSafeError: A node cannot reach the control channel, and the job ends with its error.
        """
        unconnected = self._find(f"{_UNCONNECTED}/{self._unconnected + 1}", CannotTakePart)
        if unconnected is not None:
            self._unconnected += 1
            try:
                if describes(unconnected.result.error, PreflightError):
                    self._examine(self.endpoint.store_below(unconnected.node.launcher), 0)
            except PreflightError as exc:
                # What was examined from both sides says more than the node's dial that failed.
                unconnected = replace(unconnected, result=round_result_of(exc, is_final=True))
            self.lobby.unable[unconnected.node.launcher] = unconnected
            self._end_or_refuse()
        self._warn_of_refused_names()
        if self.endpoint.is_elsewhere:
            self._require_only_node_0(waited_s)

    def _warn_of_refused_names(self) -> None:
        """Warn once of each host whose launcher does not know the secret, by the name that it gives."""
        name = self.endpoint.take_plain(_REFUSED_NAME, 64)
        is_known = name is None or name in self._refused_names
        if not is_known and len(self._refused_names) < _MAX_REFUSED_NAMES:
            self._refused_names.add(name)  # type: ignore[arg-type]  # it is not None
            logger.warning(
                "a launcher that calls its host %s was refused: it has another job secret or id",
                name,
            )

    def _launchers(self) -> tuple[str, ...]:
        """Return the launchers of the complete round by rank; empty for one that has left meanwhile."""
        places = self._backend.state.participants.items()
        launchers = {rank: Label.read(node.addr).launcher for node, rank in places}
        return tuple(launchers.get(rank, "") for rank in range(max(launchers, default=-1) + 1))

    def _present(self) -> list[Label]:
        """Return the nodes that have joined, in their order."""
        state = None if self._backend is None else self._backend.state
        return [] if state is None else sorted(Label.read(node.addr) for node in state.participants)

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
        what = f"the job at {self.endpoint} has its {self._config.nnodes} nodes already: {present}; {here} is one more."
        cause = "the command was started on one host too many, or twice on one host."
        fix = (
            f"start it on {self._config.nnodes} hosts; to let one more replace a lost node, set "
            'retry={"attempts": 2, "on": ["peer-lost"]} on all of them.'
        )
        raise PreflightError(Explanation(what, cause=cause, fix=fix), kind="config")

    def _require_only_node_0(self, waited_s: float) -> None:
        """Check that no other node serves the endpoint, whose address is not one of this host.

        Raises:
            ConfigError: Two nodes have node rank 0.
        """
        try:
            store = self.endpoint.store_where_it_leads()
            other = self._find(_CONTROL, ControlAddress, store)
        except (OSError, RendezvousTimeoutError) as exc:
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
        if other is None:
            return  # that node serves the store, but has not introduced itself yet
        if other.node.launcher == self._launcher:
            self.endpoint.is_elsewhere = False  # the endpoint leads to this node itself
            return
        what = f"two nodes have node rank 0: {other.node} and {self.facts}."
        cause = f"{self.endpoint} leads to the first of them."
        error = ConfigError(Explanation(what, cause=cause, fix="give each node its own node rank."))
        self._object_in_store(error, store)
        raise error

    def _arrivals_text(self) -> str:
        """Describe which nodes have reached the endpoint, and which node ranks are missing."""
        nnodes = self._config.nnodes
        present = self._present()
        names = listed([node.hostname for node in present]) or "none"
        ranks = {node.node_rank for node in present}
        text = f"{len(present)} of {nnodes} nodes reached {self.endpoint}: {names}"
        if present and None not in ranks:
            missing = [str(rank) for rank in range(nnodes) if rank not in ranks]
            plural = "node rank" if len(missing) == 1 else "node ranks"
            text += f"; {plural} {listed(missing)} did not" if missing else ""
        return text + self.endpoint.where_node_0_listens()

    def _forget(self, facts: NodeFacts) -> None:
        """Let the next round begin without a node that is known to have left."""
        if self._backend is not None:
            self._backend.forget((str(Label.of(facts)), facts.pid))

    def _make_handler(self) -> Any:
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
            DynamicRendezvousHandler,
            RendezvousTimeout,
        )

        store = self.endpoint.require_store()
        rendezvous = self._config.rendezvous
        self._backend = make_signed_backend(
            store, self.endpoint.job, self.endpoint.signer, rendezvous.last_call
        )
        options: dict[str, Any] = {}
        if (
            "keep_alive_interval"
            in inspect.signature(DynamicRendezvousHandler.from_backend).parameters
        ):  # torch 2.6 has no keyword for it, and the same values
            options = {"keep_alive_interval": 5, "keep_alive_max_attempt": 3}
        return DynamicRendezvousHandler.from_backend(
            run_id=self.endpoint.job,
            store=store,
            backend=self._backend,
            min_nodes=rendezvous.min_nodes or self._config.nnodes,
            max_nodes=self._config.nnodes,
            local_addr=str(Label.of(self.facts)),
            timeout=RendezvousTimeout(
                # Never: `_require_more_time` ends the wait, and torch's error names no node.
                join=rendezvous.join + timedelta(days=365),
                last_call=rendezvous.last_call,
                close=STORE_CALL,
                heartbeat=STORE_CALL,
            ),
            **options,
        )

    def _not_joined(self, exc: Exception, deadline: Deadline) -> DDPSafeError | Interrupted:
        from torch.distributed.elastic.rendezvous import (
            RendezvousClosedError,
            RendezvousStateError,
        )

        here = socket.gethostname()
        if not self.serves:
            # Node 0 may have told why before its store ended.
            for pause_s in Deadline.after(_DISMISSAL_READ).pauses_s():
                self.membership.look()
                if self.membership.result is not None and not self.membership.result.is_good:
                    return error_of(self.membership.result)
                if self.membership.lost is not None or not self._backend.lost:
                    break
                time.sleep(pause_s)
        if self._backend.lost:
            return self.endpoint.lost(self._backend.lost, deadline)
        if isinstance(exc, RendezvousClosedError):
            what = f"the job at {self.endpoint} has ended; {here} was too late to join it."
            fix = "start the job again on all nodes if it is to run again."
            return PreflightError(Explanation(what, fix=fix), kind="peer-lost")
        if isinstance(exc, RendezvousStateError):
            return self._not_this_job()
        return self.endpoint.lost(
            str(exc).splitlines()[0] if str(exc) else type(exc).__name__, deadline
        )

    def close(self, *, may_answer: bool = True) -> None:
        """Leave: the other nodes hear at once that this one has ended.

        Args:
            may_answer: Whether the host of the store may still answer; if not, nothing waits for it.
        """
        channel, self._channel = self._channel, None
        if channel is not None:
            if self.serves:  # whoever comes now must not take the channel for one that is blocked
                with contextlib.suppress(DDPSafeError, Interrupted):
                    self.endpoint.drop(_CONTROL)
            channel.close()
        handler, backend = self._handler, self._backend
        if handler is not None:
            # `shutdown` closes the rendezvous for all nodes, which is up to node 0. For another
            # node the backend reaches no store any more, so that only its own threads end.
            backend.cancelled = not self.serves
            call = BoundedCall(handler.shutdown, name="ddpsafe-rendezvous")
            if self.serves:
                # The port is free only when this thread no longer holds the store, which is here and answers.
                call.wait(_OWN_SHUTDOWN_S)
            elif may_answer:
                call.wait(_SHUTDOWN_S)
            # Else nothing waits: torch's heartbeat may hang in the store of a host that is gone, and
            # the loss of node 0 was named 3 s late in half of the runs.
            backend.cancelled = True
        # An error on its way out would keep a reference to the store, as its traceback keeps this object.
        self._handler = self._backend = None
        self.endpoint.close()


_shared_store_lock = threading.Lock()
_shared_store_before: list[str | None] = []
"""The variable as each waiting launch found it: the first one found the user's value, the others "1"."""


@contextlib.contextmanager
def _without_shared_store() -> Iterator[None]:
    """Set `_DISABLE_SHARED_STORE` while any launch waits for torch's rendezvous."""
    with _shared_store_lock:
        _shared_store_before.append(os.environ.get(_DISABLE_SHARED_STORE))
        os.environ[_DISABLE_SHARED_STORE] = "1"
    try:
        yield
    finally:
        with _shared_store_lock:
            before = _shared_store_before.pop()  # the last launch to leave gets the user's value
            if before is None:
                os.environ.pop(_DISABLE_SHARED_STORE, None)
            else:
                os.environ[_DISABLE_SHARED_STORE] = before


def make_random_id() -> str:
    """Return a name that cannot be guessed, for a round, a launcher or a file."""
    return secrets.token_hex(16)
