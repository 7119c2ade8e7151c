"""How nodes find each other: TorchElastic's rendezvous, on a store bound to one address.

Each value in the store is signed with the job's secret, and the signature is checked before the value
is parsed. `torchs_rendezvous` has the state of torch's rendezvous.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Final, TypeVar

import tenacity

from ddpsafe._advice import ADVICE, COMMANDS
from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._config.interfaces import NCCL
from ddpsafe._errors import (
    ConfigError,
    DDPSafeError,
    Explanation,
    PreflightError,
    RendezvousTimeoutError,
)
from ddpsafe._host import (
    NAME_LOOKUP_LIMIT,
    find_address_towards,
    find_interface_of,
    interface_variables,
    is_loopback,
    list_interfaces,
    open_tcp_store,
    without_cpp_warnings,
)
from ddpsafe._job.secret import Signer, find_job_secret
from ddpsafe._launcher.nodes.node_messages import (
    GarbledError,
    NodeFacts,
    Objection,
    RoundResult,
    error_of,
    from_json,
    prepare,
    round_result_of,
    to_json,
)
from ddpsafe._launcher.nodes.torchs_rendezvous import make_signed_backend
from ddpsafe._launcher.watch.signals import Interrupted
from ddpsafe._logging import get_logger
from ddpsafe._secrets import JOB_SECRET, find_own_secret
from ddpsafe._text import listed
from ddpsafe._wire.exception_facts import clip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store, TCPStore

    from ddpsafe._config import LaunchConfig
    from ddpsafe._host import Interface
    from ddpsafe._launcher.nodes.torchs_rendezvous import Member
    from ddpsafe._launcher.watch.signals import SignalInbox

T = TypeVar("T")
logger = get_logger(__name__)

_DISABLE_SHARED_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Keeps torch's handler from opening a second store on all interfaces, which it reuses in later rounds."""

_POLL_S: Final = 0.05
_STORE_CALL: Final = timedelta(seconds=5)
_SHUTDOWN_S: Final = 3.0
_OWN_SHUTDOWN_S: Final = 60.0  # it takes milliseconds, unless this process gets no core
_CONNECT_S: Final = 4.0  # longer than the 3 s in which a kernel finds that no host has an address
_HANDSHAKE: Final = timedelta(seconds=10)
_BACKLOG: Final = 1024
_DNS_RETRY_S: Final = 10.0
_CLOSED_STATE_READ_S: Final = 2.5
"""How long the store outlives the job for nodes that wait to join: torch polls the state every second."""

_CHECK_NODES_S: Final = 0.5
_DISMISSAL_READ: Final = timedelta(seconds=3)
_FIRST_WARNING_S: Final = 10.0
_NEXT_WARNINGS_S: Final = 60.0
_NO_ANSWER_WARNING_S: Final = 5.0
_MAX_DIFFERENCES: Final = 8
_MAX_VALUE: Final = 200
_MAX_REFUSED_NAMES: Final = 8
"""Anyone who reaches the store can write a name: they must not fill the log."""

# Keys of the endpoint's store that belong to no round.
_HOST: Final = "ddpsafe/host"  # the node that serves the endpoint
_ARRIVALS: Final = "ddpsafe/came"  # how many nodes have connected, and below it each node's facts
_OBJECTION: Final = "ddpsafe/objection"  # why a node cannot take part
_OVER: Final = "ddpsafe/over"  # why there is no round
_OVER_READS: Final = "ddpsafe/over/heard"  # how many nodes have read it
_REFUSED_NAME: Final = "ddpsafe/unknown"  # the host of a launcher without the secret; not signed


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """This node's place in a round, as the rendezvous assigned it.

    Attributes:
        node_rank: This node's rank in the round.
        nnodes: How many nodes the round has.
        board: The round's own keys in the store.
    """

    node_rank: int
    nnodes: int
    board: Board


class Board:
    """Signed values in the store, under keys that no other round uses."""

    def __init__(self, store: Store, signer: Signer, rendezvous: NodeRendezvous) -> None:
        self.store = store
        self._signer = signer
        self._rendezvous = rendezvous

    def put(self, key: str, value: object) -> None:
        """Set a key to a dataclass."""
        data = self._signer.sign(key, json.dumps(to_json(value)).encode())
        self._rendezvous.call(lambda: self.store.set(key, data.decode()), _STORE_CALL)

    def has(self, key: str) -> bool:
        """Return whether a key is set, whoever has set it."""
        return self._rendezvous.call(lambda: bool(self.store.check([key])), _STORE_CALL)

    def count(self, key: str, more: int = 0) -> int:
        """Add to a counter that starts at 0, and return it."""
        return self._rendezvous.call(lambda: int(self.store.add(key, more)), _STORE_CALL)

    def forget(self, key: str) -> None:
        """Remove a key."""
        self._rendezvous.call(lambda: self.store.delete_key(key), _STORE_CALL)

    def put_plain(self, key: str, text: str) -> None:
        """Set a key to an unsigned text: the two ends may have different secrets."""
        self._rendezvous.call(lambda: self.store.set(key, text), _STORE_CALL)

    def find_plain(self, key: str, longest: int) -> str | None:
        """Return the start of a text that anyone who reaches the store may have written."""
        if not self.has(key):
            return None
        text = self._rendezvous.call(lambda: self.store.get(key), _STORE_CALL)
        return ascii(text[:longest].decode(errors="replace"))

    def find(self, key: str, cls: type[T]) -> T | None:
        """Return the value of a key; ``None`` if it is not set, or this job did not sign it."""

        def read() -> bytes | None:
            return self.store.get(key) if self.store.check([key]) else None

        text = self._rendezvous.call(read, _STORE_CALL)
        if text is None:
            return None
        with contextlib.suppress(ValueError, GarbledError):
            data = self._signer.verified(key, text)
            return None if data is None else from_json(cls, json.loads(data))
        return None

    def wait_for(self, key: str, cls: type[T], deadline: Deadline) -> T | None:
        """Return the value of a key once it is set; ``None`` after the deadline."""
        for pause_s in deadline.pauses_s():
            if (found := self.find(key, cls)) is not None:
                return found
            self._rendezvous.require_no_signal()
            time.sleep(pause_s)
        return None


_CANNOT_SERVE: Final = {
    errno.EADDRINUSE: ADVICE["DS-PORT-taken"],
    errno.EADDRNOTAVAIL: (
        "this host does not have that address.",
        "give node rank 0 to the host of the endpoint, or name this host in the endpoint.",
    ),
    errno.EACCES: (
        "ports below 1024 need root.",
        "choose a port above 1023 for this job.",
    ),
    0: (
        "this host does not allow a program to listen there.",
        "choose another port or address for this job.",
    ),
}
"""Why listening on a port failed and what to do, by errno; 0 stands for any other."""


class NodeRendezvous:
    """This node's part in the rendezvous: serves or finds the endpoint, then joins round by round.

    Args:
        config: The configuration of the launch.
        inbox: Signals to this launcher, which end every wait.
        settings: What has to be the same on all nodes, by name.
        setup: What should be the same on all nodes, by name.
        nproc: How many ranks this node starts.

    Attributes:
        launchers: Those of the last round that node 0 has opened. Any other launcher is new: the job
            refuses it if it is unfit, and waits for another one.
        serves: Whether this node serves the endpoint, which makes it node 0.
        takes_signals: Whether a signal ends waits; not while the other nodes are informed of one.
        address: Where the other nodes reach this one.
    """

    def __init__(
        self,
        config: LaunchConfig,
        inbox: SignalInbox,
        *,
        settings: dict[str, str] | None = None,
        setup: dict[str, str] | None = None,
        nproc: int = 1,
    ) -> None:
        """Read endpoint, job id and secret; nothing is opened yet."""
        prepare()
        endpoint = config.rendezvous.parsed()
        assert endpoint is not None, "the config requires one with more than one node"  # noqa: S101
        self._config, self.inbox, self._endpoint = config, inbox, endpoint
        self._settings, self._nproc = settings or {}, nproc
        self._setup = setup or {}
        self.job = config.rendezvous.id or "default"
        self.secret = key_of(config)
        self._signer = Signer(self.secret, self.job)
        self._host = self._endpoint.host
        self._launcher = make_random_id()
        self._store: TCPStore | None = None
        self._handler: Any = None
        self._backend: Any = None
        self._joined = 0
        self._arrived: dict[int, NodeFacts] = {}
        self._present: list[NodeFacts] = []
        self._refused_names: set[str] = set()
        self._refused_launchers: set[str] = set()
        self.launchers: set[str] = set()
        self._endpoint_is_elsewhere = self._has_warned_of_endpoint = False
        self.serves = False
        self.takes_signals = True
        self.address = ""
        self._unserved: list[str] = []

    @property
    def facts(self) -> NodeFacts:
        """This node, as it introduces itself."""
        return NodeFacts(
            hostname=socket.gethostname(),
            pid=os.getpid(),
            address=self.address,
            nproc=self._nproc,
            settings=self._settings,
            setup=self._setup,
            node_rank=0 if self.serves else self._config.node_rank,
            launcher=self._launcher,
        )

    @property
    def _root(self) -> Board:
        """The keys of the endpoint's store that belong to no round."""
        assert self._store is not None, "open() comes first"  # noqa: S101
        return Board(self._store, self._signer, self)

    def call(self, function: Callable[[], T], limit: timedelta | None) -> T:
        """Make a call that may hang forever, as the store's do once its host has vanished.

        Raises:
            Interrupted: A signal arrived during the call.
            RendezvousTimeoutError: The call has not returned in time, or the store's host has ended.
        """

        def make() -> T:
            with without_cpp_warnings():
                return function()

        deadline = Deadline.after(limit)
        call = BoundedCall(make, name="ddpsafe-rendezvous")
        while not call.wait(_POLL_S):
            self.require_no_signal()
            if deadline.expired():
                raise self.lost("it does not answer", deadline)
        try:
            return call.result()
        except RuntimeError as exc:  # torch raises it when the store's host has ended
            raise self.lost(str(exc).splitlines()[0], deadline) from exc

    def require_no_signal(self) -> None:
        """Leave a wait when this launcher has received a signal.

        Raises:
            Interrupted: A signal has arrived.
        """
        if self.inbox.received is not None and self.takes_signals:
            if self._backend is not None:
                self._backend.cancelled = True
            raise Interrupted(self.inbox.received)

    def open(self) -> None:
        """Serve the endpoint if it is on this host, else connect to it.

        Raises:
            ConfigError: This node's settings differ from those of the node that serves the endpoint.
            PreflightError: The endpoint's name does not resolve, its port is taken, or it belongs to
                another job.
            RendezvousTimeoutError: No node serves it in time.
        """
        deadline = Deadline.after(self._config.rendezvous.join)
        resolved = self._resolve(deadline)
        # /etc/hosts may map the host's own name to 127.0.1.1, as Debian's installer writes it.
        addresses = _without_loopback(resolved)
        interfaces = list_interfaces()
        if self._endpoint.is_loopback:  # as in torchrun's examples: all nodes are on this host
            if self._asked_interface not in (None, "lo"):
                what = (
                    f"rendezvous.interface={self._asked_interface!r} has no effect with the endpoint "
                    f"{self._endpoint}, which is on each host itself."
                )
                fix = (
                    "use an address of that interface as the endpoint, or leave the interface out."
                )
                raise ConfigError(Explanation(what, fix=fix))
            addresses = resolved
            self.address = resolved[0]
            logger.warning(
                "the endpoint %s is on each host itself: nodes on other hosts cannot join this job",
                self._endpoint,
            )
        else:
            self.address = self._own_address(addresses, interfaces)
        own = {address: each for each in interfaces for address in each.addresses}
        node_rank, asked = self._config.node_rank, self._asked_interface
        here = [each for each in addresses if each in own or self._endpoint.is_loopback]
        # A resolver may return every address of this host, and the other nodes reach only some:
        # first the interface that was asked for, then networks before containers, IPv4 before IPv6.
        here.sort(
            key=lambda each: (
                each in own and own[each].name != asked,
                each in own and not own[each].is_candidate,
                ":" in each,
            )
        )
        self._unserved = here[1:]
        if not addresses:
            self._require_own_name(resolved)
            here, self._host = [self.address], self.address
        may_serve = node_rank == 0 or (node_rank is None and bool(here))
        bound = here[0] if here else self.address
        server = self._serve_or_find(deadline, resolved, bound if may_serve else None, here)
        if server is not None:
            self._connect(server, here)
            self._require_same_job()
        else:
            self.address, self._endpoint_is_elsewhere = bound, not here
            if self._config.rendezvous.secret_file is None and not find_own_secret(JOB_SECRET):
                logger.warning(
                    "the secret of this job is derived from its endpoint and id: anyone who knows "
                    "them can join. Set %s or rendezvous.secret_file to keep others out.",
                    JOB_SECRET,
                )
            is_unsure = sum(each.is_candidate for each in interfaces) > 1 or not self._has_own_name
            if not addresses and asked is None and is_unsure:
                logger.warning(
                    "%s is %s here (/etc/hosts), so node 0 listens at %s; if the other nodes reach it at "
                    "another address, set rendezvous.interface (--interface) on this node",
                    self._endpoint.host,
                    resolved[0],
                    self.address,
                )
            self._root.put(_HOST, self.facts)
        facts = replace(self.facts, settings={}, setup={})  # every node reads those of all
        self._root.put(f"{_ARRIVALS}/{self._root.count(_ARRIVALS, 1)}", facts)

    def _require_same_job(self) -> None:
        """Compare this node with the one that serves the endpoint, before joining a round.

        Raises:
            ConfigError: Their settings differ.
            PreflightError: The other one is not a node of this job.
        """
        for pause_s in Deadline.after(_STORE_CALL).pauses_s():
            if self._root.has(_HOST):
                break
            self.require_no_signal()
            time.sleep(pause_s)
        first = self._root.find(_HOST, NodeFacts)
        if first is None:
            self._root.put_plain(_REFUSED_NAME, socket.gethostname())
            raise self._not_this_job()
        try:
            require_same_settings([first, self.facts])
        except ConfigError as exc:
            self._root.put(_OBJECTION, self._objection(exc))
            raise
        warn_of_differences([first, self.facts])

    def _objection(self, error: DDPSafeError | Interrupted) -> Objection:
        return Objection(node=self.facts, result=round_result_of(error, is_final=True))

    def _not_this_job(self) -> PreflightError:
        here = socket.gethostname()
        what = (
            f"{here} cannot join the job at {self._endpoint}: the data in its store is not signed "
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

    def _resolve(self, deadline: Deadline) -> list[str]:
        def look_up() -> list[str]:
            retrying = tenacity.Retrying(  # a pod's name may appear in DNS later than the pod
                stop=lambda _: deadline.expired() or deadline.waited_s() > _DNS_RETRY_S,
                wait=tenacity.wait_fixed(0.5),
                retry=tenacity.retry_if_exception_type(OSError),
                reraise=True,
            )
            return retrying(self._look_up)

        try:
            return self.call(look_up, timedelta(seconds=2 * _DNS_RETRY_S))
        except (OSError, UnicodeError) as exc:
            here, host = socket.gethostname(), self._endpoint.host
            what = f"{here} cannot resolve {host}, the host of the endpoint: {exc}."
            cause, fix = ADVICE["DS-NAME-unresolved"]
            explanation = Explanation(
                what, cause=cause.format(given="the name"), fix=fix.format(name=host, here=here)
            )
            raise PreflightError(explanation, kind="startup-network") from exc

    def _look_up(self) -> list[str]:
        host, port = self._host, self._endpoint.port
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    @property
    def _has_own_name(self) -> bool:
        """Whether the endpoint's host has the name of this host, without the domain."""
        names = (self._endpoint.host, socket.gethostname())
        return len({name.partition(".")[0].casefold() for name in names}) == 1

    def _require_own_name(self, addresses: Sequence[str]) -> None:
        """Refuse a name that resolves to loopback, unless it is this host's own.

        Raises:
            PreflightError: It is another host's name, so /etc/hosts is wrong here.
        """
        if self._has_own_name or self._config.node_rank == 0:
            return
        here, host = socket.gethostname(), self._endpoint.host
        what = (
            f"{host}, the host of the endpoint, resolves to {addresses[0]} on {here}, which is {here} "
            "itself."
        )
        cause = (
            f"/etc/hosts was copied from the host of the endpoint, or gives that name to {here}."
        )
        fix = (
            f"give {host} its address in the cluster's network in /etc/hosts of {here}, or use that "
            f"address as the endpoint; if {here} is meant, start it with --node-rank 0."
        )
        raise PreflightError(Explanation(what, cause=cause, fix=fix), kind="startup-network")

    def _own_address(self, endpoint: Sequence[str], interfaces: Sequence[Interface]) -> str:
        asked = self._asked_interface
        if asked is not None:
            chosen = next((each for each in interfaces if each.name == asked), None)
            if chosen is None or not chosen.addresses:
                existing = ", ".join(each.name for each in interfaces)
                what = (
                    f"rendezvous.interface={asked!r}: {socket.gethostname()} has no such interface "
                    "with an address."
                )
                cause = "interface names differ from host to host."
                fix = f'set interface="auto", or one of {existing}.'
                raise ConfigError(Explanation(what, cause=cause, fix=fix))
            return chosen.addresses[0]
        found = find_address_towards(endpoint)
        if found is None:
            what = f"{socket.gethostname()} has no address that other nodes could reach."
            cause = "no interface except loopback is up."
            raise PreflightError(
                Explanation(what, cause=cause, fix="check  ip addr  there."), kind="startup-network"
            )
        return found

    @property
    def _asked_interface(self) -> str | None:
        asked = self._config.rendezvous.interface
        return None if asked == "auto" else asked

    def interface_settings(self) -> dict[str, str]:
        """Return the variables that keep the ranks' libraries on an interface, if one was asked for.

        NCCL chooses its network by itself, which may be faster than the one that leads to node 0. The others
        use the one that this host's name leads to: if that is loopback, as after Debian's installer, no other
        host reaches it.
        """
        name = self._asked_interface
        if name is None:
            found = find_interface_of(self.address)
            name = None if found is None else found.name
        if name is None:
            return {}
        variables = interface_variables(name)
        if self._config.rendezvous.interface is None and not self._endpoint.is_loopback:
            del variables[NCCL]
            return variables if self._is_own_name_loopback() else {}
        return variables

    def _is_own_name_loopback(self) -> bool:
        """Return whether this host's name leads to loopback first, or nowhere."""
        try:
            found = self.call(lambda: socket.getaddrinfo(socket.gethostname(), 0), _HANDSHAKE)
        except (OSError, UnicodeError, RendezvousTimeoutError):
            return True
        return is_loopback(str(found[0][4][0]))

    def _serve(self, address: str) -> bool:
        """Serve the store at one address; return whether the port was free."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        port = self._endpoint.port
        try:
            listening = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE and self._config.node_rank != 0:
                return (
                    False  # likely node 0 of this job, on this host; otherwise _connect reports it
                )
            raise self._not_served(exc.errno or 0) from exc
        self._store = self.call(
            lambda: open_tcp_store(address, port, listening=listening), NAME_LOOKUP_LIMIT
        )
        self.serves = True
        return True

    def _serve_or_find(
        self, deadline: Deadline, resolved: list[str], bound: str | None, here: Sequence[str]
    ) -> str | None:
        """Serve the endpoint once its port is free, or wait for the launcher that serves it.

        Args:
            deadline: When to give up.
            resolved: The addresses of the endpoint.
            bound: The address to serve it at, if this node may.
            here: Those addresses of the endpoint that belong to this host.

        Returns:
            The address that answers; ``None`` if this node serves.
        """
        port, why = self._endpoint.port, ""
        has_warned = False
        name = self._endpoint.host
        leads_to = "" if resolved == [name] else f" ({name} is {_listed(resolved)} here)"

        def find() -> str:
            # A name may have several addresses, of which torch tries only the first. A program that
            # listens on loopback is not the one that the other nodes reach.
            failed = OSError(errno.EADDRNOTAVAIL, "it has no address")
            for address in _without_loopback(self._look_up()) or [self.address]:
                try:
                    socket.create_connection((address, port), _CONNECT_S).close()
                except OSError as exc:  # noqa: PERF203 - each is tried
                    failed = exc
                else:
                    return address
            raise failed

        for pause_s in deadline.pauses_s():
            if bound is not None and self._serve(bound):
                return None
            limit_s = max(_CONNECT_S, deadline.remaining_s())
            try:
                return self.call(find, timedelta(seconds=limit_s))
            except RendezvousTimeoutError:
                why = why or f"neither the name server nor the host answers{leads_to}"
            except TimeoutError:
                why = f"nothing answers: a firewall drops packets, or the host is down{leads_to}"
            except OSError as exc:
                why = f"{exc.strerror or exc}{leads_to}"
            if deadline.waited_s() > _NO_ANSWER_WARNING_S and not has_warned:
                has_warned, own, node_rank = True, socket.gethostname(), self._config.node_rank
                hint = ""
                if bound is not None:
                    hint = f". Another program holds port {port} of this host: ss -tanp 'sport = :{port}'"
                elif here:
                    hint = (
                        f". The address belongs to this host, which has node rank {node_rank}: the host of "
                        "the endpoint needs node rank 0"
                    )
                elif node_rank is None:
                    hint = (
                        f". If {own} is the host of the endpoint, start it with --node-rank 0: it does not "
                        "have that address itself (NAT, or a wrong line in /etc/hosts)"
                    )
                logger.warning(
                    "%s finds no launcher at %s yet: %s%s; retrying for %.0f s (rendezvous.join)",
                    own,
                    self._endpoint,
                    why,
                    hint,
                    deadline.remaining_s(),
                )
            time.sleep(pause_s)
        if bound is not None:
            raise self._not_served(errno.EADDRINUSE)
        raise self.lost(why, deadline)

    def _not_served(self, number: int) -> PreflightError:
        here, why = socket.gethostname(), os.strerror(number)
        cause, fix = _CANNOT_SERVE.get(number, _CANNOT_SERVE[0])
        what = f"{here} cannot serve the endpoint {self._endpoint}: {why}."
        return PreflightError(Explanation(what, cause=cause, fix=fix), kind="port")

    def _connect(self, address: str, here: Sequence[str]) -> None:
        port = self._endpoint.port
        try:
            self._store = self.call(lambda: open_tcp_store(address, port), _HANDSHAKE)
        except RendezvousTimeoutError as exc:
            at = f"{self._endpoint}" + (f" ({address})" if address != self._endpoint.host else "")
            what = f"the program that {socket.gethostname()} reached at {at} is not a launcher."
            holder = "this host" if address in here else self._endpoint.host
            cause = f"another program is using port {port} on {holder}."
            look = COMMANDS["DS-PORT-taken"][0].format(port=port)
            fix = f"{ADVICE['DS-PORT-taken'][1]} On that host, this shows it:  {look}"
            raise PreflightError(Explanation(what, cause=cause, fix=fix), kind="port") from exc

    def lost(self, why: str, deadline: Deadline) -> RendezvousTimeoutError:
        """Return the error for an endpoint that does not answer, or no longer does."""
        here, waited_s = socket.gethostname(), deadline.waited_s()
        what = (
            f"{here} found no store of this job at {self._endpoint} within {waited_s:.1f} s: {why}."
        )
        cause = "the launcher on the host of the endpoint has not started, or has ended."
        if self._store is not None:
            what = f"{here} has lost the store of this job at {self._endpoint}: {why}."
            cause = "the launcher of node 0 has ended, or its host has lost power or network."
        host, port = self._host, self._endpoint.port
        fix = f"check the log of that node; then, on {here}:  nc -vz {host} {port}"
        return RendezvousTimeoutError(
            Explanation(what, cause=cause, fix=fix), waited_s=waited_s, kind="startup-network"
        )

    def join(self) -> Seat | None:
        """Wait for the other nodes, and join the next round.

        Returns:
            This node's place; ``None`` if the job ended while this node waited to replace another.

        Raises:
            ConfigError: A node's settings differ from node 0's.
            RendezvousTimeoutError: Too few nodes joined.
            PreflightError: The job is over, has all its nodes already, or is another job.
        """
        from torch.distributed.elastic.rendezvous import (
            RendezvousError,
            RendezvousGracefulExitError,
        )

        deadline = Deadline.after(self._config.rendezvous.join)
        if self._handler is None:
            self._handler = self._make_handler()
        with _without_shared_store():
            call = BoundedCall(self._handler.next_rendezvous, name="ddpsafe-rendezvous")
            self._await_round(call, deadline)
        try:
            info = call.result()
        except RendezvousGracefulExitError:
            logger.warning(
                "the job at %s has ended; no node of it had to be replaced", self._endpoint
            )
            return None
        except (RendezvousError, RuntimeError) as exc:
            error = self._not_joined(exc, deadline)
            if self.serves and isinstance(error, DDPSafeError):
                self.dismiss(error)
            raise error from exc
        self._joined += 1
        self._note_members()
        if self.serves:  # one may have been refused since the last check
            self._warn_of_refused_names()
        board = Board(info.store, self._signer, self)
        return Seat(node_rank=info.rank, nnodes=info.world_size, board=board)

    def _await_round(self, call: BoundedCall[Any], deadline: Deadline) -> None:
        """Wait until torch's call returns; warn of missing nodes, and leave if there can be no round."""
        next_check_s, next_warning_s = 0.0, _FIRST_WARNING_S
        is_spare = False
        while not call.wait(_POLL_S):
            self.require_no_signal()
            if deadline.expired() and not is_spare:
                self._require_more_time(deadline)
            if deadline.waited_s() >= next_check_s:
                next_check_s = deadline.waited_s() + _CHECK_NODES_S
                self._check_nodes(deadline.waited_s())
                state = self._backend.state
                is_member = (label_of(self.facts), os.getpid()) in self._members()
                is_complete = state is not None and state.complete and len(state.participants) > 0
                if is_complete and not (is_spare or is_member or self._joined):
                    is_spare = True  # the round is complete, and this node was never in one
                    self._require_use_for_spare()
            if deadline.waited_s() >= next_warning_s and not is_spare:
                next_warning_s = deadline.waited_s() + _NEXT_WARNINGS_S
                state = self._backend.state
                if state is not None and not state.complete:
                    left_s, setting = deadline.remaining_s(), "rendezvous.join"
                    if state.deadline is not None:  # min_nodes nodes have come
                        last_call = state.deadline - datetime.now(timezone.utc)
                        left_s, setting = (
                            max(0.0, last_call.total_seconds()),
                            "rendezvous.last_call",
                        )
                    logger.warning(
                        "%s; waiting for the others for %.0f s more (%s)",
                        self._arrivals_text(),
                        left_s,
                        setting,
                    )

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
            hosts = _listed(sorted(self._refused_names))
            cause = (
                f"the launcher on {hosts} was refused: it has another job secret or id."
                if len(self._refused_names) == 1
                else f"the launchers on {hosts} were refused: they have another job secret or id."
            )
            fix = f"give every node the same {JOB_SECRET}, secret_file and --rdzv-id."
        error = RendezvousTimeoutError(
            Explanation(what, cause=cause, fix=fix),
            waited_s=deadline.waited_s(),
            kind="startup-network",
        )
        self.dismiss(error)
        raise error

    def _check_nodes(self, waited_s: float) -> None:
        """Note which nodes are present; leave if one has reported why there can be no round.

        Raises:
            ConfigError: Two nodes have node rank 0.
            DDPSafeError: The error that the job ends with.
        """
        if self.serves:
            objection = self._root.find(_OBJECTION, Objection)
            if objection is not None:
                self._take_objection(objection)
            self._warn_of_refused_names()
            if self._endpoint_is_elsewhere:
                self._require_only_node_0(waited_s)
        else:
            over = self._root.find(_OVER, RoundResult)
            if over is not None:
                self._root.count(_OVER_READS, 1)
                raise error_of(over)
        self._note_members()

    def _warn_of_refused_names(self) -> None:
        """Warn once of each host whose launcher does not know the secret, by the name that it gives."""
        name = self._root.find_plain(_REFUSED_NAME, 64)
        if name is not None and name not in self._refused_names:
            if len(self._refused_names) < _MAX_REFUSED_NAMES:
                self._refused_names.add(name)
                logger.warning(
                    "a launcher that calls its host %s was refused: it has another job secret or id",
                    name,
                )
            self._root.forget(_REFUSED_NAME)

    def _take_objection(self, objection: Objection) -> None:
        """End the job if one of its nodes cannot continue; a new node is refused, and another awaited.

        Raises:
            DDPSafeError: The node's error, if the job ends.
        """
        node, error = objection.node, error_of(objection.result)
        is_new = bool(self.launchers) and node.launcher not in self.launchers
        if not is_new or isinstance(error, Interrupted):
            self.dismiss(error)
            raise error
        self._root.forget(_OBJECTION)
        if node.launcher not in self._refused_launchers:
            self._refused_launchers.add(node.launcher)
            warn_of_refused_node(node, error)

    def _note_members(self) -> None:
        members = self._members()
        if members != {(label_of(each), each.pid) for each in self._present}:
            # Each is read once: with many nodes this happens once for each of them.
            for number in {*range(1, self._root.count(_ARRIVALS) + 1)} - self._arrived.keys():
                if (facts := self._root.find(f"{_ARRIVALS}/{number}", NodeFacts)) is not None:
                    self._arrived[number] = facts
            present = [
                each for each in self._arrived.values() if (label_of(each), each.pid) in members
            ]
            self._present = sorted(present, key=label_of)  # the round's order, not that of arrival

    def _members(self) -> set[Member]:
        """Return the nodes that take part in the round, according to torch's state."""
        state = None if self._backend is None else self._backend.state
        return (
            {(node.addr, node.pid) for node in state.participants} if state is not None else set()
        )

    def _require_use_for_spare(self) -> None:
        """Let a surplus node wait if it may replace another one later.

        Raises:
            PreflightError: The job never replaces a node.
        """
        present = _listed([each.hostname for each in self._present])
        rendezvous, retry = self._config.rendezvous, self._config.retry
        here = socket.gethostname()
        if retry.attempts > 1 and ("peer-lost" in retry.on or rendezvous.min_nodes is not None):
            logger.warning(
                "the job at %s runs on %s; %s waits, and joins at the next failure",
                self._endpoint,
                present,
                here,
            )
            return
        what = f"the job at {self._endpoint} has its {self._config.nnodes} nodes already: {present}; {here} is one more."
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
        host, port = self._host, self._endpoint.port

        def look() -> NodeFacts | None:
            store = open_tcp_store(host, port)
            if not store.check([_HOST]):
                return None
            data = self._signer.verified(_HOST, store.get(_HOST))
            return None if data is None else from_json(NodeFacts, json.loads(data))

        try:
            socket.create_connection((host, port), _CHECK_NODES_S).close()
            other = self.call(look, _HANDSHAKE)
        except (OSError, ValueError, RendezvousTimeoutError) as exc:
            # A pod's service may appear later than the pod.
            if waited_s > _NO_ANSWER_WARNING_S and not self._has_warned_of_endpoint:
                self._has_warned_of_endpoint = True
                logger.warning(
                    "node rank 0 listens at %s, but the endpoint %s is not an address of this host (%s), and "
                    "nothing answers there yet (%s). Set the endpoint to an address of this host.",
                    self.address,
                    self._endpoint,
                    socket.gethostname(),
                    getattr(exc, "strerror", None) or exc,
                )
            return
        if other is None:
            return  # that node serves the store, but has not introduced itself yet
        if other.launcher == self._launcher:
            self._endpoint_is_elsewhere = False  # the endpoint leads to this node itself
            return
        what = f"two nodes have node rank 0: {other} and {self.facts}."
        cause = f"{self._endpoint} leads to the first of them."
        error = ConfigError(Explanation(what, cause=cause, fix="give each node its own node rank."))
        self.dismiss(error)
        store = self.call(lambda: open_tcp_store(host, port), _HANDSHAKE)
        Board(store, self._signer, self).put(_OBJECTION, self._objection(error))
        raise error

    def _arrivals_text(self) -> str:
        """Describe which nodes have reached the endpoint, and which node ranks are missing."""
        nnodes = self._config.nnodes
        present = sorted(self._present, key=lambda node: (node.node_rank is None, node.node_rank))
        names = _listed([each.hostname for each in present])
        ranks = {each.node_rank for each in present}
        text = f"{len(present)} of {nnodes} nodes reached {self._endpoint}: {names}"
        if present and None not in ranks:
            missing = [str(rank) for rank in range(nnodes) if rank not in ranks]
            plural = "node rank" if len(missing) == 1 else "node ranks"
            text += f"; {plural} {_listed(missing)} did not" if missing else ""
        if self.serves and self.address != self._endpoint.host:
            text += f"; node 0 listens at {self.address}"
            others = _listed(self._unserved)
            text += f", not at {others}, where that name leads too" if self._unserved else ""
        return text

    def object(self, error: DDPSafeError | Interrupted, limit: timedelta | None) -> None:
        """Report to node 0, before a round, that this node cannot take part; wait until the job ends.

        The job does not end if this node is new and was to replace another one.
        """
        deadline = Deadline.after(limit)
        with contextlib.suppress(DDPSafeError):  # node 0 has ended, for whatever reason
            while self._root.find(_OVER, RoundResult) is None and not deadline.expired():
                # Write it every time: an objection of a new node may have replaced it.
                self._root.put(_OBJECTION, self._objection(error))
                time.sleep(_CHECK_NODES_S)
            self._root.count(_OVER_READS, 1)

    def dismiss(self, error: DDPSafeError | Interrupted) -> None:
        """Report to the nodes that wait to join why there is no round; wait until they have read it."""
        state = None if self._backend is None else self._backend.state
        if not self.serves or state is None:
            return
        self.takes_signals = False  # a signal must not cut this short: the others end with it too
        waiting = {*state.participants, *state.wait_list, *state.redundancy_list}
        reads_before = self._root.count(_OVER_READS)
        self._root.put(_OVER, round_result_of(error, is_final=True))
        for pause_s in Deadline.after(_DISMISSAL_READ).pauses_s():
            if self._root.count(_OVER_READS) - reads_before >= len(waiting) - 1:
                return
            time.sleep(pause_s)

    def forget(self, facts: NodeFacts) -> None:
        """Let the next round begin without a node that is known to have left."""
        self._backend.forget((label_of(facts), facts.pid))

    def _make_handler(self) -> Any:
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
            DynamicRendezvousHandler,
            RendezvousTimeout,
        )

        assert self._store is not None, "open() comes first"  # noqa: S101
        rendezvous = self._config.rendezvous
        self._backend = make_signed_backend(
            self._store, self.job, self._signer, rendezvous.last_call
        )
        options: dict[str, Any] = {}
        if (
            "keep_alive_interval"
            in inspect.signature(DynamicRendezvousHandler.from_backend).parameters
        ):  # torch 2.6 has no keyword for it, and the same values
            options = {"keep_alive_interval": 5, "keep_alive_max_attempt": 3}
        return DynamicRendezvousHandler.from_backend(
            run_id=self.job,
            store=self._store,
            backend=self._backend,
            min_nodes=rendezvous.min_nodes or self._config.nnodes,
            max_nodes=self._config.nnodes,
            local_addr=label_of(self.facts),
            timeout=RendezvousTimeout(
                # Never: `_require_more_time` ends the wait, and torch's error names no node.
                join=rendezvous.join + timedelta(days=365),
                last_call=rendezvous.last_call,
                close=_STORE_CALL,
                heartbeat=_STORE_CALL,
            ),
            **options,
        )

    def _not_joined(self, exc: Exception, deadline: Deadline) -> Exception:
        from torch.distributed.elastic.rendezvous import (
            RendezvousClosedError,
            RendezvousStateError,
        )

        here = socket.gethostname()
        if self._backend.lost:
            return self.lost(self._backend.lost, deadline)
        if isinstance(exc, RendezvousClosedError):
            what = f"the job at {self._endpoint} has ended; {here} was too late to join it."
            fix = "start the job again on all nodes if it is to run again."
            return PreflightError(Explanation(what, fix=fix), kind="peer-lost")
        if isinstance(exc, RendezvousStateError):
            return self._not_this_job()
        return self.lost(str(exc).splitlines()[0] if str(exc) else type(exc).__name__, deadline)

    def introduce(self, seat: Seat, deadline: Deadline) -> list[NodeFacts]:
        """Introduce this node; as node 0, return all nodes once they have done so, too.

        Raises:
            RendezvousTimeoutError: A node has not.
        """
        seat.board.put(f"ddpsafe/node/{seat.node_rank}", self.facts)
        if seat.node_rank != 0:
            return []
        nodes = []
        for node in range(seat.nnodes):
            found = seat.board.wait_for(f"ddpsafe/node/{node}", NodeFacts, deadline)
            if found is None:
                places = self._backend.state.participants.items()
                members = {(each.addr, each.pid) for each, rank in places if rank == node}
                names = [
                    each.hostname for each in self._present if (label_of(each), each.pid) in members
                ]
                who = f"node {node} of {seat.nnodes}" + (f" ({names[0]!r})" if names else "")
                what = f"{who} joined, and then did not introduce itself."
                cause = "its launcher has ended or is stopped, or its host has lost the network."
                raise RendezvousTimeoutError(
                    Explanation(what, cause=cause),
                    waited_s=deadline.waited_s(),
                    kind="startup-network",
                )
            nodes.append(found)
        return nodes

    def close(self, *, may_answer: bool = True) -> None:
        """Leave; the host of the store marks the job as over for late nodes, and leaves last.

        Args:
            may_answer: Whether the host of the store may still answer; if not, nothing waits for it.
        """
        handler, backend = self._handler, self._backend
        if handler is not None:
            backend.cancelled = not self.serves
            call = BoundedCall(handler.shutdown, name="ddpsafe-rendezvous")
            if self.serves:
                # The port is free only when this thread no longer holds the store, which is here and answers.
                call.wait(_OWN_SHUTDOWN_S)
            elif may_answer:
                call.wait(_SHUTDOWN_S)
            state = backend.state
            if self.serves and state is not None and (state.wait_list or state.redundancy_list):
                time.sleep(_CLOSED_STATE_READ_S)
            backend.cancelled = True
        # torch closes the port with the last reference to the store; an error on its way out would
        # keep that reference, as its traceback keeps this object.
        self._handler = self._backend = self._store = None


_shared_store_lock = threading.Lock()
_shared_store_before: list[str | None] = []
"""The variable as each waiting launch found it: the first one found the user's value, the others "1"."""


@contextlib.contextmanager
def _without_shared_store() -> Iterator[None]:
    """Set `_DISABLE_SHARED_STORE` while any launch waits for torch's rendezvous.

    The launch's own thread does it: the thread that is in the rendezvous may outlive an abandoned
    wait, and would then change the environment while others read it.
    """
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


@contextlib.contextmanager
def rank_store(address: str) -> Iterator[int]:
    """Serve a fresh store for the ranks of one round, at one address; yield its port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    port = int(listening.getsockname()[1])
    store = open_tcp_store(address, port, listening=listening)
    try:
        yield port
    finally:
        del store  # torch closes the port with the last reference


def key_of(config: LaunchConfig) -> bytes:
    """Return the key of the job's signatures: its secret, or derived from what all nodes know.

    Raises:
        ConfigError: The secret cannot be read, or can be guessed.
    """
    secret = find_job_secret(config.rendezvous.secret_file)
    if secret:
        return hashlib.sha256(b"secret\0" + secret.encode()).digest()
    known = (str(config.rendezvous.endpoint), config.rendezvous.id or "")
    return hashlib.sha256("\0".join(("derived", *known)).encode()).digest()


def warn_of_refused_node(node: NodeFacts, error: DDPSafeError) -> None:
    """Warn that a new node takes no part, and why."""
    logger.warning("%s, which came to replace a node, is refused: %s", node, error.explanation)


def _without_loopback(addresses: Sequence[str]) -> list[str]:
    return [address for address in addresses if not is_loopback(address)]


def _listed(names: Sequence[str]) -> str:
    return listed(names) or "none"


def label_of(facts: NodeFacts) -> str:
    """Return the text by which torch sorts the nodes: it makes the first one node 0.

    That is the node that serves the endpoint, and the others keep their order from round to round.
    The launcher is part of it because a restarted container may have the name, address and pid of
    its predecessor, but is not in its round.
    """
    order = facts.node_rank if facts.node_rank is not None else 1
    return f"{order:06d} {facts.hostname} {facts.address} {facts.launcher}"


def require_same_settings(nodes: Sequence[NodeFacts]) -> None:
    """Compare the settings of all nodes with node 0's, and their node ranks with each other.

    Raises:
        ConfigError: Settings differ, or node ranks do not.
    """
    first, *others = nodes
    lines = [
        f"{name}: {first.settings.get(name)} on node 0 ({first.hostname}), "
        f"{other.settings.get(name)} on node {number if other.node_rank is None else other.node_rank} "
        f"({other.hostname})"
        for number, other in enumerate(others, 1)
        for name in first.settings
        if other.settings.get(name) != first.settings[name]
    ]
    if lines:
        what = f"the nodes of this job do not agree: {lines[0]}."
        fix = "give every node the same arguments, variables, configuration file and versions."
        cause = "another command, pyproject.toml, DDPSAFE_* variable or installation on one node."
        raise ConfigError(Explanation(what, cause=cause, fix=fix, details=lines[1:]))
    by_rank: dict[int, NodeFacts] = {}
    for node in nodes:
        if node.node_rank is None:
            continue
        other = by_rank.setdefault(node.node_rank, node)
        if other is not node:
            what = f"two nodes have node rank {node.node_rank}: {other} and {node}."
            cause = "the same --node-rank, or DDPSAFE_NODE_RANK, was given to both."
            fix = "give each node its own rank, or give none to any: the order does not matter."
            raise ConfigError(Explanation(what, cause=cause, fix=fix))


def warn_of_differences(nodes: Sequence[NodeFacts]) -> None:
    """Warn where the script, its arguments or variables of nodes differ from those of the first one."""
    first, *others = nodes
    lines = [
        f"{name}: {_clipped(first, name)} on {first.hostname}, {_clipped(other, name)} on {other.hostname}"
        for other in others
        for name in sorted({*first.setup, *other.setup})
        if first.setup.get(name) != other.setup.get(name)
    ]
    for line in lines[:_MAX_DIFFERENCES]:
        logger.warning("the nodes of this job differ: %s", line)
    if len(lines) > _MAX_DIFFERENCES:
        logger.warning("... and in %d more values", len(lines) - _MAX_DIFFERENCES)


def _clipped(node: NodeFacts, name: str) -> str:
    return clip(node.setup[name], _MAX_VALUE) if name in node.setup else "not set"


def make_random_id() -> str:
    """Return a name that cannot be guessed, for a round, a launcher or a file."""
    return secrets.token_hex(16)
