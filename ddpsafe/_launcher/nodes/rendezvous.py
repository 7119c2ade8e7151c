"""How nodes find each other: TorchElastic's rendezvous, on a store bound to one address.

The stock rendezvous keeps its state as a pickle in an open store: whoever reaches the port runs code
in every launcher. Here each value in the store is sealed with the job's secret, and the seal is
checked before anything is read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import inspect
import io
import json
import os
import pickle
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import tenacity

from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._errors import (
    ConfigError,
    DDPSafeError,
    Explanation,
    PreflightError,
    RendezvousTimeoutError,
)
from ddpsafe._host import (
    find_address_towards,
    find_interface_of,
    is_loopback,
    list_interfaces,
    open_tcp_store,
)
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
from ddpsafe._launcher.watch.signals import Interrupted
from ddpsafe._logging import get_logger
from ddpsafe._secrets import JOB_SECRET, find_own_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import Store, TCPStore

    from ddpsafe._config import LaunchConfig
    from ddpsafe._host import Interface
    from ddpsafe._launcher.watch.signals import SignalInbox

T = TypeVar("T")
logger = get_logger(__name__)

_ELASTIC: Final = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_STATE_CLASSES: Final = frozenset(
    {
        (_ELASTIC, "_RendezvousState"),
        (_ELASTIC, "_NodeDesc"),
        ("datetime", "datetime"),
        ("datetime", "timezone"),
        ("datetime", "timedelta"),
        ("builtins", "set"),
        ("builtins", "object"),
        ("copyreg", "_reconstructor"),
    }
)
"""All that a state of torch's rendezvous is made of, in torch 2.6 to 2.15."""

_UNSHARED: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Keeps torch's handler from opening a second store, on all interfaces, which ends with a round."""

_MAC_BYTES: Final = hashlib.sha256().digest_size
_ANSWER: Final = timedelta(seconds=5)
_CLOSE: Final = timedelta(seconds=3)
_LOOK_S: Final = 0.05
_PROBE_S: Final = 4.0  # a kernel takes 3 s to find that no host has an address
_BACKLOG: Final = 1024
_NAME_WAIT_S: Final = 10.0
_FORGET_S: Final = 2.5
"""Nodes that wait to join look once a second; so long the store stays for them to read its end."""

_LOOK_AROUND_S: Final = 0.5
_SAY_WHO_CAME_S: Final = 10.0
_SAY_AGAIN_S: Final = 60.0
_SAY_NO_ANSWER_S: Final = 5.0
_HANDSHAKE: Final = timedelta(seconds=10)
_READ: Final = timedelta(seconds=3)
_NEVER: Final = timedelta(days=365)
_MOST_UNKNOWN: Final = 8

_HOST, _CAME = "ddpsafe/host", "ddpsafe/came"
_OBJECTION, _OVER, _HEARD = "ddpsafe/objection", "ddpsafe/over", "ddpsafe/over/heard"
_UNKNOWN = "ddpsafe/unknown"
"""Keys of the endpoint's store: who serves it, who has come, and why there is no round."""


class _CheckedUnpickler(pickle.Unpickler):
    """Loads a rendezvous state and nothing else: the second lock, behind the seal."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _STATE_CLASSES:
            msg = f"{module}.{name} is not part of a rendezvous state"
            raise pickle.UnpicklingError(msg)
        return super().find_class(module, name)


class Seal:
    """Signs what this job writes to its store, and refuses what others have written there."""

    def __init__(self, secret: bytes, job: str) -> None:
        """Use the secret for the values of one job."""
        self._secret, self._job = secret, job.encode()

    def close(self, key: str, value: bytes) -> bytes:
        """Return a value with the job's seal, for one key."""
        return self._mac(key, value) + value

    def open(self, key: str, sealed: bytes) -> bytes | None:
        """Return the value under a seal; ``None`` where it is not this job's."""
        value = sealed[_MAC_BYTES:]
        return value if hmac.compare_digest(sealed[:_MAC_BYTES], self._mac(key, value)) else None

    def _mac(self, key: str, value: bytes) -> bytes:
        # Length first: no pair of job and key may read as another one.
        head = b"%d:%s%d:%s" % (len(self._job), self._job, len(key), key.encode())
        return hmac.new(self._secret, head + value, hashlib.sha256).digest()


_Member = tuple[str, int]
"""Label and pid of a node in a state of the rendezvous."""


class _LocalTimes:
    """Shows the times in a state of the rendezvous on this host's clock.

    torch compares the wall clocks of different hosts: a node whose clock is ahead takes all others
    for dead and starts a round alone. Whatever a clock says, a heartbeat is as old as it has not
    changed, which each node can see for itself.

    Args:
        last_call: How far ahead the end of the last call is when it is written.
    """

    def __init__(self, last_call: timedelta) -> None:
        self._last_call = last_call
        self._beats: dict[_Member, tuple[datetime, datetime]] = {}
        self._deadline: tuple[datetime, datetime] | None = None
        self._gone: dict[_Member, datetime | None] = {}

    def forget(self, member: _Member) -> None:
        """Show a node as one that was not heard of for long: it is known to be gone.

        A container that starts again has the name, the address and often the pid of the last one:
        a heartbeat that comes later is its own.
        """
        self._gone[member] = None

    def show(self, state: Any) -> Any:
        """Replace the times that others wrote by those at which they were first seen."""
        now = datetime.now(timezone.utc)
        beats = {(node.addr, node.pid): beat for node, beat in state.last_heartbeats.items()}
        for member, beat in beats.items():
            if self._beats.get(member, (None,))[0] != beat:
                self._beats[member] = (beat, now)
        for node in state.last_heartbeats:
            member = (node.addr, node.pid)
            beat, seen = self._beats[member]
            if member in self._gone:
                # Its last heartbeat is the one that is there at the first look after the loss.
                last = self._gone[member] = self._gone[member] or beat
                if last != beat:
                    del self._gone[member]
            state.last_heartbeats[node] = _LONG_AGO if member in self._gone else seen
        if state.deadline is not None:
            if self._deadline is None or self._deadline[0] != state.deadline:
                self._deadline = (state.deadline, now + self._last_call)
            state.deadline = self._deadline[1]
        return state

    def written(self, state: Any) -> Any:
        """Put the times of others back as they wrote them."""
        for node, beat in state.last_heartbeats.items():
            wrote, shown = self._beats.get((node.addr, node.pid), (None, None))
            if beat == shown:
                state.last_heartbeats[node] = wrote
        if self._deadline is not None and state.deadline == self._deadline[1]:
            state.deadline = self._deadline[0]
        return state


_LONG_AGO: Final = datetime(2000, 1, 1, tzinfo=timezone.utc)


def make_sealed_backend(
    store: Store, job: str, seal: Seal, last_call: timedelta = timedelta(seconds=10)
) -> Any:
    """Return torch's rendezvous backend behind a seal.

    Its `cancelled` attribute, once set, ends a wait of the handler at its next look; `state` is the
    one that the handler saw last.
    """
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousStateError
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

    times = _LocalTimes(last_call)

    def opened(sealed: bytes) -> Any:
        state = seal.open("state", sealed)
        if state is None:
            raise RendezvousStateError(
                "another job, or a program without its secret, writes to the store"
            )
        try:
            return times.show(_CheckedUnpickler(io.BytesIO(state)).load())
        except Exception as exc:
            raise RendezvousStateError(str(exc)) from exc

    class SealedBackend(RendezvousBackend):
        cancelled = False
        state: Any = None
        forget = staticmethod(times.forget)

        def __init__(self, inner: C10dRendezvousBackend) -> None:
            # Here, not in a closure: a class that is made here is garbage in a circle, and what its
            # methods hold would keep the port of the store until a collection.
            self._inner = inner

        @property
        def name(self) -> str:
            return "ddpsafe"

        def get_state(self) -> Any:
            if self.cancelled and self.state is not None:
                self.state.closed = True  # to this node: torch's own threads end with it
                return pickle.dumps(self.state), None
            self._require_not_cancelled()
            found = self._inner.get_state()
            return None if found is None else (self._see(found[0]), found[1])

        def set_state(self, state: bytes, token: Any = None) -> Any:
            if self.cancelled and self.state is not None:
                return *self.get_state(), False
            self._require_not_cancelled()
            written = times.written(_CheckedUnpickler(io.BytesIO(state)).load())
            found = self._inner.set_state(seal.close("state", pickle.dumps(written)), token)
            return None if found is None else (self._see(found[0]), found[1], found[2])

        def _see(self, sealed: bytes) -> bytes:
            self.state = opened(sealed)
            return pickle.dumps(self.state)

        def _require_not_cancelled(self) -> None:
            if self.cancelled:
                raise RendezvousClosedError

    return SealedBackend(C10dRendezvousBackend(store, job))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """This node's place in a round, as the rendezvous gave it.

    Attributes:
        node_rank: This node among those of the round.
        nnodes: How many there are.
        board: The round's own keys in the store.
    """

    node_rank: int
    nnodes: int
    board: Board


class Board:
    """Sealed values under keys that no other round uses."""

    def __init__(self, store: Store, seal: Seal, rendezvous: NodeRendezvous) -> None:
        self.store, self._seal, self._rendezvous = store, seal, rendezvous

    def put(self, key: str, value: object) -> None:
        """Set a key to a dataclass."""
        data = self._seal.close(key, json.dumps(to_json(value)).encode())
        self._rendezvous.call(lambda: self.store.set(key, data.hex()), _ANSWER)

    def has(self, key: str) -> bool:
        """Tell whether a key is set, by whomever."""
        return self._rendezvous.call(lambda: bool(self.store.check([key])), _ANSWER)

    def count(self, key: str, more: int = 0) -> int:
        """Add to a number that begins with 0; return it."""
        return self._rendezvous.call(lambda: int(self.store.add(key, more)), _ANSWER)

    def forget(self, key: str) -> None:
        """Remove a key."""
        self._rendezvous.call(lambda: self.store.delete_key(key), _ANSWER)

    def put_plain(self, key: str, text: str) -> None:
        """Set a key to a text without a seal: the other side may not know the secret."""
        self._rendezvous.call(lambda: self.store.set(key, text), _ANSWER)

    def find_plain(self, key: str, longest: int) -> str | None:
        """Return the start of a text that whoever reaches the store may have written."""
        if not self.has(key):
            return None
        text = self._rendezvous.call(lambda: self.store.get(key), _ANSWER)
        return ascii(text[:longest].decode(errors="replace"))

    def find(self, key: str, cls: type[T]) -> T | None:
        """Return the value of a key, ``None`` where it is not set, or not by this job."""

        def read() -> bytes | None:
            return self.store.get(key) if self.store.check([key]) else None

        text = self._rendezvous.call(read, _ANSWER)
        if text is None:
            return None
        with contextlib.suppress(ValueError, GarbledError):
            data = self._seal.open(key, bytes.fromhex(text.decode()))
            return None if data is None else from_json(cls, json.loads(data))
        return None

    def wait_for(self, key: str, cls: type[T], deadline: Deadline) -> T | None:
        """Return the value of a key once it is set; ``None`` if it is not by then."""
        for pause_s in deadline.pauses_s():
            if (found := self.find(key, cls)) is not None:
                return found
            self._rendezvous.require_no_signal()
            time.sleep(pause_s)
        return None


_CANNOT_SERVE: Final = {
    errno.EADDRINUSE: (
        "another program has the port.",
        "choose another port for this job, or end what holds it: ss -tanp.",
    ),
    errno.EADDRNOTAVAIL: (
        "the address is not one of this host.",
        "give node rank 0 to the host of the endpoint, or name this host in the endpoint.",
    ),
    errno.EACCES: (
        "ports below 1024 need root.",
        "choose a port above 1023 for this job.",
    ),
    0: (
        "this host does not let a program listen there.",
        "choose another port or address for this job.",
    ),
}
"""Why a port cannot be listened on, and what to do, by errno; 0 for any other."""


class NodeRendezvous:
    """Where the nodes of one job meet, round by round.

    Args:
        config: What was asked for.
        inbox: Signals to this launcher, which end every wait.
        settings: What has to be the same on all nodes, by name.
        nproc: How many ranks this node starts.

    Attributes:
        launchers: Those of the last round that node 0 has opened. Any other is new: the job does
            without it where it is not fit, and waits for the next.
    """

    def __init__(
        self,
        config: LaunchConfig,
        inbox: SignalInbox,
        *,
        settings: dict[str, str] | None = None,
        nproc: int = 1,
    ) -> None:
        """Read where and as whom; nothing is opened yet."""
        prepare()
        endpoint = config.rendezvous.parsed()
        assert endpoint is not None, "the config requires one with more than one node"  # noqa: S101
        self._config, self.inbox, self._endpoint = config, inbox, endpoint
        self._settings, self._nproc = settings or {}, nproc
        self.job = config.rendezvous.id or "default"
        self.secret = find_secret(config)
        self._seal = Seal(self.secret, self.job)
        self._host = self._endpoint.host
        self._launcher = make_round_id()
        self._store: TCPStore | None = None
        self._handler: Any = None
        self._backend: Any = None
        self._joined = 0
        self._present: list[NodeFacts] = []
        self._unknown: set[str] = set()
        self._refused: set[str] = set()
        self.launchers: set[str] = set()
        self._is_elsewhere = self._has_said_elsewhere = False
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
            node_rank=0 if self.serves else self._config.node_rank,
            launcher=self._launcher,
        )

    @property
    def _root(self) -> Board:
        """The keys of the endpoint's store that belong to no round."""
        assert self._store is not None, "open() comes first"  # noqa: S101
        return Board(self._store, self._seal, self)

    def call(self, function: Callable[[], T], limit: timedelta | None) -> T:
        """Make a call to the store, which may hang for ever once the host of the store is gone.

        Raises:
            Interrupted: A signal came meanwhile.
            RendezvousTimeoutError: It has not come back in time.
        """
        deadline = Deadline.after(limit)
        call = BoundedCall(function, name="ddpsafe-rendezvous")
        while not call.wait(_LOOK_S):
            self.require_no_signal()
            if deadline.expired():
                raise self.lost("it does not answer", deadline)
        try:
            return call.result()
        except RuntimeError as exc:  # torch's, of a store whose host has gone
            raise self.lost(str(exc).splitlines()[0], deadline) from exc

    def require_no_signal(self) -> None:
        """Leave a wait when this launcher has been told to go.

        Raises:
            Interrupted: A signal has come.
        """
        if self.inbox.received is not None and self.takes_signals:
            if self._backend is not None:
                self._backend.cancelled = True
            raise Interrupted(self.inbox.received)

    def open(self) -> None:
        """Serve the endpoint where it is this host's, else connect to it.

        Raises:
            ConfigError: This node does not agree with the one that serves the endpoint.
            PreflightError: The endpoint's name leads nowhere, its port is taken, or another job
                is there.
            RendezvousTimeoutError: No node serves it in time.
        """
        deadline = Deadline.after(self._config.rendezvous.join)
        resolved = self._resolve(deadline)
        # A host file may lead the host's own name to 127.0.1.1, as Debian's installer has it.
        addresses = _without_loopback(resolved)
        interfaces = list_interfaces()
        self.address = self._own_address(addresses, interfaces)
        own = {address: each for each in interfaces for address in each.addresses}
        node_rank, asked = self._config.node_rank, self._asked_interface
        here = [address for address in addresses if address in own]
        # A resolver may give all addresses of this host, of which the others know only one.
        here.sort(
            key=lambda each: (own[each].name != asked, not own[each].is_candidate, ":" in each)
        )
        self._unserved = here[1:]
        if not addresses:
            self._require_own_name(resolved)
            here, self._host = [self.address], self.address
        may_serve = node_rank == 0 or (node_rank is None and bool(here))
        bound = here[0] if here else self.address
        answers = self._serve_or_find(deadline, resolved, bound if may_serve else None, here)
        if answers is not None:
            self._connect(answers, here)
            self._require_same_job()
        else:
            self.address, self.serves, self._is_elsewhere = bound, True, not here
            if has_derived_secret(self._config):
                logger.warning(
                    "the secret of this job is derived from its endpoint and id: whoever knows "
                    "them can join. Set %s or rendezvous.secret_file to keep others out.",
                    JOB_SECRET,
                )
            is_unsure = sum(each.is_candidate for each in interfaces) > 1 or not self._has_own_name
            if not addresses and asked is None and is_unsure:
                logger.warning(
                    "%s is %s here (/etc/hosts), so node 0 listens at %s; if the others know it by "
                    "another address, set rendezvous.interface (--interface) here",
                    self._endpoint.host,
                    resolved[0],
                    self.address,
                )
            self._root.put(_HOST, self.facts)
        self._root.put(f"{_CAME}/{self._root.count(_CAME, 1)}", self.facts)

    def _require_same_job(self) -> None:
        """Compare this node with the one that serves the endpoint, before it joins anything.

        Raises:
            ConfigError: They do not agree.
            PreflightError: It is not a node of this job.
        """
        for pause_s in Deadline.after(_ANSWER).pauses_s():
            if self._root.has(_HOST):
                break
            self.require_no_signal()
            time.sleep(pause_s)
        first = self._root.find(_HOST, NodeFacts)
        if first is None:
            self._root.put_plain(_UNKNOWN, socket.gethostname())
            raise self._not_this_job()
        try:
            require_same_settings([first, self.facts])
        except ConfigError as exc:
            self._root.put(_OBJECTION, self._objection(exc))
            raise

    def _objection(self, error: DDPSafeError | Interrupted) -> Objection:
        return Objection(node=self.facts, result=round_result_of(error, is_final=True))

    def _not_this_job(self) -> PreflightError:
        here = socket.gethostname()
        what = (
            f"{here} cannot join the job at {self._endpoint}: what is written there is not "
            "signed with this job's secret and id."
        )
        cause = (
            "the nodes have different secrets or ids of the job, another job has the same "
            "endpoint, or a program without the secret writes there."
        )
        fix = (
            f"give every node the same {JOB_SECRET}, secret_file and --rdzv-id, and every job an "
            "endpoint of its own."
        )
        return PreflightError(Explanation(what, cause=cause, fix=fix), kind="config")

    def _resolve(self, deadline: Deadline) -> list[str]:
        def look_up() -> list[str]:
            retrying = tenacity.Retrying(  # a pod's name may appear in DNS later than the pod
                stop=lambda _: deadline.expired() or deadline.waited_s() > _NAME_WAIT_S,
                wait=tenacity.wait_fixed(0.5),
                retry=tenacity.retry_if_exception_type(OSError),
                reraise=True,
            )
            return retrying(self._look_up)

        try:
            return self.call(look_up, timedelta(seconds=2 * _NAME_WAIT_S))
        except (OSError, UnicodeError) as exc:
            here, host = socket.gethostname(), self._endpoint.host
            what = f"{here} cannot resolve {host}, the host of the endpoint: {exc}."
            cause = "the name is misspelled, or this host's DNS and /etc/hosts do not know it."
            fix = f"check with  getent hosts {host}  on {here}; an IP address works, too."
            raise PreflightError(
                Explanation(what, cause=cause, fix=fix), kind="startup-network"
            ) from exc

    def _look_up(self) -> list[str]:
        host, port = self._host, self._endpoint.port
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))

    @property
    def _has_own_name(self) -> bool:
        """Whether the endpoint is named as this host is."""
        names = (self._endpoint.host, socket.gethostname())
        return len({name.partition(".")[0].casefold() for name in names}) == 1

    def _require_own_name(self, addresses: Sequence[str]) -> None:
        """Let a name lead to loopback only on the host that has it: elsewhere the host file is wrong.

        Raises:
            PreflightError: It is another host's.
        """
        if self._has_own_name or self._config.node_rank == 0:
            return
        here, host = socket.gethostname(), self._endpoint.host
        what = (
            f"{host}, the host of the endpoint, is {addresses[0]} on {here}: that is {here} itself."
        )
        cause = "/etc/hosts was copied from the host of the endpoint, or has that name for its own."
        fix = (
            f"give {host} its address in the cluster's network in /etc/hosts of {here}, or write that "
            f"address as the endpoint; if {here} is meant, start it there with --node-rank 0."
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
                cause = "names of interfaces differ from host to host."
                fix = f'write interface="auto", or one of {existing}.'
                raise ConfigError(Explanation(what, cause=cause, fix=fix))
            return chosen.addresses[0]
        found = find_address_towards(endpoint)
        if found is None:
            what = f"{socket.gethostname()} has no address that other nodes could reach."
            cause = "no interface besides loopback is up."
            raise PreflightError(
                Explanation(what, cause=cause, fix="see  ip addr  on it."), kind="startup-network"
            )
        return found

    @property
    def _asked_interface(self) -> str | None:
        asked = self._config.rendezvous.interface
        return None if asked == "auto" else asked

    @property
    def interface(self) -> str | None:
        """Name of the interface for the ranks: the one asked for, else that of this node's address."""
        if self._asked_interface is not None:
            return self._asked_interface
        found = find_interface_of(self.address)
        return None if found is None else found.name

    def _serve(self, address: str) -> bool:
        """Open the store at one address; tell whether the port was free."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        port = self._endpoint.port
        try:
            listening = socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE and self._config.node_rank != 0:
                return False  # by another launcher of this job on this host; else it is found out
            raise self._not_served(exc.errno or 0) from exc
        self._store = self.call(
            lambda: open_tcp_store(address, port, listening=listening), timedelta(seconds=30)
        )
        return True

    def _serve_or_find(
        self, deadline: Deadline, resolved: list[str], bound: str | None, here: Sequence[str]
    ) -> str | None:
        """Serve the endpoint once its port is free, or wait for the launcher that does.

        Args:
            deadline: When to give up.
            resolved: Where the name of the endpoint led.
            bound: The address to serve it at, where this node may.
            here: The addresses of the endpoint that are this host's.

        Returns:
            The address that answers; ``None`` if this node serves.
        """
        port, why = self._endpoint.port, ""
        has_said = False
        name = self._endpoint.host
        leads_to = "" if resolved == [name] else f" ({name} is {_listed(resolved)} here)"

        def find() -> str:
            # Of several addresses behind a name, the one that answers: torch stays at the first. What
            # listens on loopback is not what the other nodes reach.
            failed = OSError(errno.EADDRNOTAVAIL, "it has no address")
            for address in _without_loopback(self._look_up()) or [self.address]:
                try:
                    socket.create_connection((address, port), _PROBE_S).close()
                except OSError as exc:  # noqa: PERF203 - each is tried
                    failed = exc
                else:
                    return address
            raise failed

        for pause_s in deadline.pauses_s():
            if bound is not None and self._serve(bound):
                return None
            limit_s = max(_PROBE_S, deadline.remaining_s())
            try:
                return self.call(find, timedelta(seconds=limit_s))
            except RendezvousTimeoutError:
                why = why or f"neither the name server nor the host answers{leads_to}"
            except TimeoutError:
                why = f"nothing answers: a firewall drops packets, or the host is down{leads_to}"
            except OSError as exc:
                why = f"{exc.strerror or exc}{leads_to}"
            if deadline.waited_s() > _SAY_NO_ANSWER_S and not has_said:
                has_said, own, node_rank = True, socket.gethostname(), self._config.node_rank
                hint = ""
                if bound is not None:
                    hint = f". Another program holds port {port} of this host: ss -tanp 'sport = :{port}'"
                elif here:
                    hint = (
                        f". The address is this host's, and its node rank is {node_rank}: node rank 0 "
                        "has to be here"
                    )
                elif node_rank is None:
                    hint = (
                        f". If {own} is the host of the endpoint, start it with --node-rank 0: that is not an "
                        "address of its own (NAT, or a wrong line in /etc/hosts)"
                    )
                logger.warning(
                    "%s finds no launcher at %s yet: %s%s; it tries for %.0f s (rendezvous.join)",
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
            what = f"what answers {socket.gethostname()} at {at} is not a launcher."
            holder = "this host" if address in here else self._endpoint.host
            cause = f"another program has port {port} on {holder}."
            fix = f"choose another port for this job, or end what holds it; there:  ss -ltnp 'sport = :{port}'"
            raise PreflightError(Explanation(what, cause=cause, fix=fix), kind="port") from exc

    def lost(self, why: str, deadline: Deadline) -> RendezvousTimeoutError:
        """Return the error of an endpoint that does not answer."""
        here, waited_s = socket.gethostname(), deadline.waited_s()
        what = (
            f"{here} found no store of this job at {self._endpoint} within {waited_s:.1f} s: {why}."
        )
        cause = "the node of the endpoint has not started its launcher, or has lost it."
        if self._store is not None:
            what = f"{here} has lost the store of this job at {self._endpoint}: {why}."
            cause = "the launcher of node 0 has ended, or its host has lost power or network."
        host, port = self._host, self._endpoint.port
        fix = f"see the log of that node; then, on {here}:  nc -vz {host} {port}"
        return RendezvousTimeoutError(
            Explanation(what, cause=cause, fix=fix), waited_s=waited_s, kind="startup-network"
        )

    def join(self) -> Seat | None:
        """Wait for the other nodes, and take a place in the next round.

        Returns:
            The place; ``None`` where the job ended well while this node waited to replace another.

        Raises:
            ConfigError: A node does not agree with node 0.
            RendezvousTimeoutError: Too few nodes came.
            PreflightError: The job is over, has its nodes already, or is another one.
        """
        from torch.distributed.elastic.rendezvous import (
            RendezvousError,
            RendezvousGracefulExitError,
        )

        deadline = Deadline.after(self._config.rendezvous.join)
        if self._handler is None:
            self._handler = self._make_handler()
        with _own_store_for_ranks():
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
        if self.serves:  # it may have come since the last look
            self._name_unknown()
        board = Board(info.store, self._seal, self)
        return Seat(node_rank=info.rank, nnodes=info.world_size, board=board)

    def _await_round(self, call: BoundedCall[Any], deadline: Deadline) -> None:
        """Wait for the end of torch's call, and say meanwhile what there is to say."""
        next_look_s, says_at_s = 0.0, _SAY_WHO_CAME_S
        is_spare = False
        while not call.wait(_LOOK_S):
            self.require_no_signal()
            if deadline.expired() and not is_spare:
                self._require_more_time(deadline)
            if deadline.waited_s() >= next_look_s:
                next_look_s = deadline.waited_s() + _LOOK_AROUND_S
                self._look_around(deadline.waited_s())
                state = self._backend.state
                is_member = (label_of(self.facts), os.getpid()) in self._members()
                is_complete = state is not None and state.complete and len(state.participants) > 0
                if is_complete and not (is_spare or is_member or self._joined):
                    is_spare = True  # the nodes of a round are complete, and it never was in one
                    self._require_use_for_spare()
            if deadline.waited_s() >= says_at_s and not is_spare:
                says_at_s = deadline.waited_s() + _SAY_AGAIN_S
                state = self._backend.state
                if state is not None and not state.complete:
                    logger.warning(
                        "%s; waiting for the others for %.0f s more (rendezvous.join)",
                        self._who_came(),
                        deadline.remaining_s(),
                    )

    def _require_more_time(self, deadline: Deadline) -> None:
        """Give up once it is time; node 0 first, so that all nodes say the same.

        Raises:
            RendezvousTimeoutError: It is time.
        """
        limit = self._config.rendezvous.join
        if not self.serves and deadline.waited_s() < (limit + _READ).total_seconds():
            return
        what = f"{self._who_came()}, within {limit.total_seconds():g} s (rendezvous.join)."
        cause = "a node has not started its launcher, or cannot reach the endpoint."
        fix = "see the logs of the nodes that are missing."
        error = RendezvousTimeoutError(
            Explanation(what, cause=cause, fix=fix),
            waited_s=deadline.waited_s(),
            kind="startup-network",
        )
        self.dismiss(error)
        raise error

    def _look_around(self, waited_s: float) -> None:
        """See who is there; leave where another node has found out why there can be no round.

        Raises:
            ConfigError: A node does not agree with node 0.
            DDPSafeError: What node 0 has ended with.
        """
        if self.serves:
            objection = self._root.find(_OBJECTION, Objection)
            if objection is not None:
                self._take_objection(objection)
            self._name_unknown()
            if self._is_elsewhere:
                self._require_only_node_0(waited_s)
        else:
            over = self._root.find(_OVER, RoundResult)
            if over is not None:
                self._root.count(_HEARD, 1)
                raise error_of(over)
        self._note_members()

    def _name_unknown(self) -> None:
        """Name a host that has come without knowing the secret, once, as it calls itself."""
        name = self._root.find_plain(_UNKNOWN, 64)
        if name is not None and name not in self._unknown:
            if len(self._unknown) < _MOST_UNKNOWN:
                self._unknown.add(name)
                logger.warning(
                    "a launcher that calls its host %s was refused: it has another secret or id of "
                    "the job",
                    name,
                )
            self._root.forget(_UNKNOWN)

    def _take_objection(self, objection: Objection) -> None:
        """End the job where one of its nodes cannot go on; do without a new one, and wait for the next.

        Raises:
            DDPSafeError: What the node has found.
        """
        node, error = objection.node, error_of(objection.result)
        is_new = bool(self.launchers) and node.launcher not in self.launchers
        if not is_new or isinstance(error, Interrupted):
            self.dismiss(error)
            raise error
        self._root.forget(_OBJECTION)
        if node.launcher not in self._refused:
            self._refused.add(node.launcher)
            say_refused(node, error)

    def _note_members(self) -> None:
        members = self._members()
        if members != {(label_of(each), each.pid) for each in self._present}:
            came = [
                facts
                for number in range(1, self._root.count(_CAME) + 1)
                if (facts := self._root.find(f"{_CAME}/{number}", NodeFacts)) is not None
            ]
            present = [facts for facts in came if (label_of(facts), facts.pid) in members]
            self._present = sorted(present, key=label_of)  # as the round has them, not as they came

    def _members(self) -> set[_Member]:
        """Return the nodes that take part in the round, as torch's state has them."""
        state = None if self._backend is None else self._backend.state
        return (
            {(node.addr, node.pid) for node in state.participants} if state is not None else set()
        )

    def _require_use_for_spare(self) -> None:
        """Let a node beyond those that were asked for wait where it may replace one.

        Raises:
            PreflightError: The job never takes another node.
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
        cause = "the command was started on one host too many, or twice on one."
        fix = (
            f"start it on {self._config.nnodes} hosts; a node that is to replace a lost one needs "
            'retry={"attempts": 2, "on": ["peer-lost"]} on all of them.'
        )
        raise PreflightError(Explanation(what, cause=cause, fix=fix), kind="config")

    def _require_only_node_0(self, waited_s: float) -> None:
        """Find out whether another node serves the endpoint, whose address is not this host's.

        Raises:
            ConfigError: Two nodes have node rank 0.
        """
        host, port = self._host, self._endpoint.port

        def look() -> NodeFacts | None:
            store = open_tcp_store(host, port)
            if not store.check([_HOST]):
                return None
            data = self._seal.open(_HOST, bytes.fromhex(store.get(_HOST).decode()))
            return None if data is None else from_json(NodeFacts, json.loads(data))

        try:
            socket.create_connection((host, port), _LOOK_AROUND_S).close()
            other = self.call(look, _ANSWER)
        except (OSError, ValueError, RendezvousTimeoutError) as exc:
            # A pod's service may come later than the pod.
            if waited_s > _SAY_NO_ANSWER_S and not self._has_said_elsewhere:
                self._has_said_elsewhere = True
                logger.warning(
                    "node rank 0 listens at %s, but the endpoint %s is not an address of this host (%s), and "
                    "nothing answers there yet. Set the endpoint to an address of this host: %s",
                    self.address,
                    self._endpoint,
                    socket.gethostname(),
                    getattr(exc, "strerror", None) or exc,
                )
            return
        if other is None:
            return  # it has opened its store, and not introduced itself yet
        if other.launcher == self._launcher:
            self._is_elsewhere = False
            return
        what = f"two nodes have node rank 0: {other} and {self.facts}."
        cause = f"{self._endpoint} leads to the first of them."
        error = ConfigError(Explanation(what, cause=cause, fix="give each node a rank of its own."))
        self.dismiss(error)
        store = self.call(lambda: open_tcp_store(host, port), _ANSWER)
        Board(store, self._seal, self).put(_OBJECTION, self._objection(error))
        raise error

    def _who_came(self) -> str:
        """Say which nodes have come to the endpoint, and which ranks are missing."""
        nnodes = self._config.nnodes
        present = sorted(self._present, key=lambda node: (node.node_rank is None, node.node_rank))
        names = _listed([each.hostname for each in present])
        ranks = {each.node_rank for each in present}
        said = f"{len(present)} of {nnodes} nodes came to {self._endpoint}: {names}"
        if present and None not in ranks:
            missing = [str(rank) for rank in range(nnodes) if rank not in ranks]
            plural = "node rank" if len(missing) == 1 else "node ranks"
            said += f"; {plural} {_listed(missing)} did not" if missing else ""
        if self.serves and self.address != self._endpoint.host:
            said += f"; node 0 listens at {self.address}"
            others = _listed(self._unserved)
            said += f", not at {others}, where that name leads, too" if self._unserved else ""
        return said

    def object(self, error: DDPSafeError | Interrupted, limit: timedelta | None) -> None:
        """Tell node 0 before a round that this node can take no part in it; stay until it ends the job.

        It does not where this node is new, and the job is waiting for one to replace another.
        """
        deadline = Deadline.after(limit)
        with contextlib.suppress(DDPSafeError):  # node 0 has ended, for whatever reason
            while self._root.find(_OVER, RoundResult) is None and not deadline.expired():
                # Again, since that of a new node may have taken its place.
                self._root.put(_OBJECTION, self._objection(error))
                time.sleep(_LOOK_AROUND_S)
            self._root.count(_HEARD, 1)

    def dismiss(self, error: DDPSafeError | Interrupted) -> None:
        """Tell the nodes that wait to join why there is no round; stay until they have read it."""
        state = None if self._backend is None else self._backend.state
        if not self.serves or state is None:
            return
        self.takes_signals = False  # the others are told of the signal, too
        waiting = {*state.participants, *state.wait_list, *state.redundancy_list}
        heard = self._root.count(_HEARD)
        self._root.put(_OVER, round_result_of(error, is_final=True))
        for pause_s in Deadline.after(_READ).pauses_s():
            if self._root.count(_HEARD) - heard >= len(waiting) - 1:
                return
            time.sleep(pause_s)

    def forget(self, facts: NodeFacts) -> None:
        """Let the next round begin without a node that is known to be gone."""
        self._backend.forget((label_of(facts), facts.pid))

    def _make_handler(self) -> Any:
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
            DynamicRendezvousHandler,
            RendezvousTimeout,
        )

        assert self._store is not None, "open() comes first"  # noqa: S101
        rendezvous = self._config.rendezvous
        self._backend = make_sealed_backend(self._store, self.job, self._seal, rendezvous.last_call)
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
                join=rendezvous.join + _NEVER,  # `join` sees to it
                last_call=rendezvous.last_call,
                close=_ANSWER,
                heartbeat=_ANSWER,
            ),
            **options,
        )

    def _not_joined(self, exc: Exception, deadline: Deadline) -> Exception:
        from torch.distributed.elastic.rendezvous import (
            RendezvousClosedError,
            RendezvousStateError,
        )

        here = socket.gethostname()
        if isinstance(exc, RendezvousClosedError):
            what = f"the job at {self._endpoint} has ended; {here} came too late for it."
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
                what = f"{who} joined, and then said nothing more."
                cause = "its launcher has ended or is stopped, or its host has lost the network."
                raise RendezvousTimeoutError(
                    Explanation(what, cause=cause),
                    waited_s=deadline.waited_s(),
                    kind="startup-network",
                )
            nodes.append(found)
        return nodes

    def close(self, *, may_answer: bool = True) -> None:
        """Leave; as the host of the store, tell late nodes that the job is over, and go last.

        Args:
            may_answer: Whether the host of the store is there; else nothing is waited for.
        """
        handler, backend = self._handler, self._backend
        if handler is not None:
            backend.cancelled = not self.serves
            call = BoundedCall(handler.shutdown, name="ddpsafe-rendezvous")
            call.wait(_CLOSE.total_seconds() if may_answer else 0)
            state = backend.state
            if self.serves and state is not None and (state.wait_list or state.redundancy_list):
                time.sleep(_FORGET_S)
            backend.cancelled = True
        # torch closes the port with the last reference; an error on its way out keeps this object.
        self._handler = self._backend = self._store = None


_unshared_lock = threading.Lock()
_unshared_users: list[str | None] = []


@contextlib.contextmanager
def _own_store_for_ranks() -> Iterator[None]:
    """Set the variable of `_UNSHARED` while any launch waits for torch's rendezvous.

    In the thread of the launch: the one that is in the rendezvous may go on when the wait was given
    up, and would change the environment while others read it.
    """
    with _unshared_lock:
        if not _unshared_users:
            _unshared_users.append(os.environ.get(_UNSHARED))
        _unshared_users.append(None)
        os.environ[_UNSHARED] = "1"
    try:
        yield
    finally:
        with _unshared_lock:
            _unshared_users.pop()
            if len(_unshared_users) == 1:
                before = _unshared_users.pop()
                if before is None:
                    os.environ.pop(_UNSHARED, None)
                else:
                    os.environ[_UNSHARED] = before


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
        del store


def find_secret(config: LaunchConfig) -> bytes:
    """Return the job's secret: of a file, of a variable, or derived from what all nodes know.

    Raises:
        ConfigError: The file cannot be read, or is empty.
    """
    path = config.rendezvous.secret_file
    if path is not None:
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as exc:
            what = f"rendezvous.secret_file {path} cannot be read: {exc.strerror}."
            raise ConfigError(Explanation(what, fix="make it readable on every node.")) from exc
        if not secret:
            fix = (
                f"write one:  head -c 32 /dev/urandom | base64 > {path}  and copy that file to "
                "every node."
            )
            raise ConfigError(Explanation(f"rendezvous.secret_file {path} is empty.", fix=fix))
        return hashlib.sha256(b"file\0" + secret).digest()
    told = find_own_secret(JOB_SECRET)
    if told:
        return hashlib.sha256(b"variable\0" + told.encode()).digest()
    known = (str(config.rendezvous.endpoint), config.rendezvous.id or "")
    return hashlib.sha256("\0".join(("derived", *known)).encode()).digest()


def say_refused(node: NodeFacts, error: DDPSafeError) -> None:
    """Warn that a new node takes no part, and why."""
    logger.warning("%s, which came to replace a node, is refused: %s", node, error.explanation)


def _without_loopback(addresses: Sequence[str]) -> list[str]:
    return [address for address in addresses if not is_loopback(address)]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else "none"


def has_derived_secret(config: LaunchConfig) -> bool:
    """Tell whether the job's secret is one that whoever knows endpoint and id can derive, too."""
    return config.rendezvous.secret_file is None and not find_own_secret(JOB_SECRET)


def label_of(facts: NodeFacts) -> str:
    """Return the text that torch orders the nodes by.

    Node 0 is the one that serves the endpoint, and nodes keep their order from round to round. A
    container that starts again has name, address and pid of the last one, and is not in its round.
    """
    order = facts.node_rank if facts.node_rank is not None else 1
    return f"{order:06d} {facts.hostname} {facts.address} {facts.launcher}"


def require_same_settings(nodes: Sequence[NodeFacts]) -> None:
    """Compare what has to be the same with node 0's, and what has to differ.

    Raises:
        ConfigError: Something is not as it has to be.
    """
    first, *others = nodes
    lines = [
        f"{name}: {first.settings.get(name)} on node 0 ({first.hostname}), "
        f"{other.settings.get(name)} on {_place(other, number)} ({other.hostname})"
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
            fix = "give each node a rank of its own; or none to any: the order does not matter."
            raise ConfigError(Explanation(what, cause=cause, fix=fix))


def _place(node: NodeFacts, number: int) -> str:
    return f"node {number if node.node_rank is None else node.node_rank}"


def make_round_id() -> str:
    """Return a name for a round that cannot be guessed."""
    return secrets.token_hex(16)
