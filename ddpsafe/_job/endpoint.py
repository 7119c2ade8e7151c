"""The endpoint of a job: one node serves the channel there, the others dial it, and why they do not reach it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import tenacity

from ddpsafe._advice import ADVICE, COMMANDS
from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._config.interfaces import NCCL
from ddpsafe._errors import ConfigError, Explanation, PreflightError, RendezvousTimeoutError
from ddpsafe._host import (
    bind_in,
    find_address_towards,
    find_interface_of,
    interface_variables,
    is_loopback,
    list_interfaces,
    look_up,
    open_server,
    open_tcp_store,
)
from ddpsafe._job.channel import RefusedError
from ddpsafe._job.secret import find_job_secret, key_of_secret
from ddpsafe._logging import get_logger
from ddpsafe._secrets import JOB_SECRET, find_own_secret
from ddpsafe._text import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddpsafe._config import LaunchConfig
    from ddpsafe._host import Interface
    from ddpsafe._job.channel import Channel

T = TypeVar("T")
logger = get_logger(__name__)

_CALL: Final = timedelta(seconds=5)
_POLL_S: Final = 0.05
_FIND_S: Final = 4.0  # longer than the 3 s in which a kernel finds that no host has an address
_REFUSALS: Final = 2
"""After so many dials what answers is another program, and not a launcher that starts or ends just now."""

_HANDSHAKE: Final = timedelta(seconds=10)
_DNS_RETRY_S: Final = 10.0
NO_ANSWER_WARNING_S: Final = 5.0

_CANNOT_SERVE: Final = {
    errno.EADDRINUSE: (
        f"{ADVICE['DS-PORT-taken'][0].removesuffix('.')}; or a launcher of this job with the same node rank.",
        f"give each launcher its own node rank; else {ADVICE['DS-PORT-taken'][1]}",
    ),
    errno.EADDRNOTAVAIL: (
        "this host does not have that address.",
        "give node rank 0 to the host of the endpoint, or name this host in the endpoint.",
    ),
    errno.EACCES: ("ports below 1024 need root.", "choose a port above 1023 for this job."),
    0: (
        "this host does not allow a program to listen there.",
        "choose another port or address for this job.",
    ),
}
"""Why listening on a port failed and what to do, by errno; 0 stands for any other."""


Unreached: TypeAlias = Literal[
    "dropped",
    "refused",
    "no-route",
    "unresolved",
    "silent-resolver",
    "other-program",
    "secret",
    "version",
]
"""Why node 0 is not reached."""


def trouble_of(exc: Exception) -> tuple[Unreached, str]:
    """Tell from what was raised on the way to node 0 why it is not reached, also as a clause."""
    clause = getattr(exc, "strerror", None) or str(exc)
    if isinstance(exc, RefusedError):
        return exc.refusal, clause
    if isinstance(exc, (socket.gaierror, UnicodeError)):
        # EAI_AGAIN is not a "no such name": no name server answers, or there is none.
        is_silent = getattr(exc, "errno", None) == socket.EAI_AGAIN
        return "silent-resolver" if is_silent else "unresolved", clause
    if isinstance(exc, TimeoutError):
        return "dropped", "nothing answers: a firewall drops packets, or the host is down"
    name = errno.errorcode.get(getattr(exc, "errno", None) or 0)
    clause = clause if name is None else f"{clause} ({name})"
    return "refused" if isinstance(exc, ConnectionError) else "no-route", clause


class JobEndpoint:
    """The endpoint of a job, and the channel there: served by node 0, dialled by the others.

    Args:
        check: Called again and again while one waits; what it raises ends the wait.
        listen: Opens node 0's end of the channel at an address and port.
        dial: Opens another node's end, to an address and port.
        may_serve: Whether this node may serve the endpoint; not if it has joined the job before.

    Attributes:
        serves: Whether this node serves the endpoint, which makes it node 0.
        is_elsewhere: Whether it serves it at an address that the endpoint may not lead to.
        address: Where the other nodes reach this one.
    """

    def __init__(
        self,
        config: LaunchConfig,
        check: Callable[[], None],
        *,
        listen: Callable[[str, int], Channel[Any, Any]],
        dial: Callable[[str, int], Channel[Any, Any]],
        may_serve: bool = True,
    ) -> None:
        parsed = config.rendezvous.parsed()
        assert parsed is not None, "the config requires one with more than one node"  # noqa: S101
        self._config, self._check, self._endpoint = config, check, parsed
        self._listen, self._dial, self._may_serve = listen, dial, may_serve
        self._host = parsed.host
        self._unserved: list[str] = []
        self.job = config.rendezvous.id or "default"
        self.secret = hmac.digest(key_of(config), f"ddpsafe {self.job}".encode(), "sha256")
        self.serves = self.is_elsewhere = self._has_met = False
        self.address = ""

    @property
    def is_named(self) -> bool:
        """Whether no other job can use it by accident: this one has an id, or it is on each host itself."""
        return self._config.rendezvous.id is not None or self._endpoint.is_loopback

    def __str__(self) -> str:
        return str(self._endpoint)

    def call(
        self,
        function: Callable[[], T],
        limit: timedelta | None = _CALL,
        dispose: Callable[[T], None] = lambda _: None,
    ) -> T:
        """Make a call that may hang forever, as a look-up of a name does.

        `dispose` gets what it returns after this wait was left.

        Raises:
            RendezvousTimeoutError: The call has not returned in time.
        """
        deadline = Deadline.after(limit)
        # In a thread, which can be left: a call to a host that has vanished cannot be interrupted.
        call = BoundedCall(function, name="ddpsafe-rendezvous")
        try:
            self._await(call, deadline)
        except BaseException:
            call.abandon(dispose)
            raise
        return call.result()

    def _await(self, call: BoundedCall[T], deadline: Deadline) -> None:
        while not call.wait(_POLL_S):
            self._check()
            if deadline.expired():
                raise self.lost("it does not answer", deadline)

    def open(self) -> Channel[Any, Any]:
        """Serve the endpoint if it is on this host and this node may, else dial it; return the channel.

        Raises:
            ConfigError: This host has no such interface, or it has no effect.
            PreflightError: The endpoint's name does not resolve, its port is taken, or another job has it.
            RendezvousTimeoutError: No node serves it in time.
        """
        may_serve = self._may_serve
        deadline = Deadline.after(self._config.rendezvous.join)
        resolved = self._resolve(deadline)
        # /etc/hosts may map the host's own name to 127.0.1.1, as Debian's installer writes it.
        addresses = _without_loopback(resolved)
        interfaces = list_interfaces()
        if self._endpoint.is_loopback:  # as in torchrun's examples: all nodes are on this host
            if self._interface_name not in (None, "lo"):
                what = (
                    f"rendezvous.interface={self._interface_name!r} has no effect with the endpoint "
                    f"{self._endpoint}, which is a loopback address."
                )
                fix = (
                    "use an address of that interface as the endpoint, or leave the interface out."
                )
                raise ConfigError(Explanation(what, fix=fix))
            addresses = resolved
            self.address = resolved[0]
            logger.warning(
                "the endpoint %s is a loopback address: nodes on other hosts cannot join this job",
                self._endpoint,
            )
        else:
            self.address = self._own_address(addresses, interfaces)
        own = {address: interface for interface in interfaces for address in interface.addresses}
        node_rank, interface_name = self._config.node_rank, self._interface_name
        here = [address for address in addresses if address in own or self._endpoint.is_loopback]
        # A resolver may return every address of this host, and the other nodes reach only some:
        # first the interface that was asked for, then networks before containers, IPv4 before IPv6.
        here.sort(
            key=lambda address: (
                address in own and own[address].name != interface_name,
                address in own and not own[address].is_candidate,
                ":" in address,
            )
        )
        self._unserved = here[1:]
        if not addresses:  # the name leads to loopback alone
            self._require_own_name(resolved)
            here, self._host = [self.address], self.address
        may_serve &= node_rank == 0 or (node_rank is None and bool(here))
        bound = here[0] if here else self.address
        channel = self._serve_or_find(deadline, resolved, bound if may_serve else None, here)
        self._has_met = True
        if self.serves:
            self.address, self.is_elsewhere = bound, not here
            if self._config.rendezvous.secret_file is None and not find_own_secret(JOB_SECRET):
                logger.warning(
                    "the secret of this job is derived from its endpoint and id: anyone who knows "
                    "them can join. Set %s or rendezvous.secret_file to keep others out.",
                    JOB_SECRET,
                )
            is_unsure = (
                sum(interface.is_candidate for interface in interfaces) > 1
                or not self._has_own_name
            )
            if not addresses and interface_name is None and is_unsure:
                logger.warning(
                    "%s is %s here (/etc/hosts), so node 0 listens at %s; if the other nodes reach it at "
                    "another address, set rendezvous.interface (--interface) on this node",
                    self._endpoint.host,
                    resolved[0],
                    self.address,
                )
        return channel

    def dial_where_it_leads(self) -> Channel[Any, Any]:
        """Dial the channel where the endpoint leads, which may be another node's.

        Raises:
            OSError: Nothing answers there.
            RefusedError: What answers is not a launcher of this job.
            RendezvousTimeoutError: It does not answer in time.
        """
        return self.call(
            lambda: self._dial(self._host, self._endpoint.port),
            _HANDSHAKE,
            lambda channel: channel.close(),
        )

    def _resolve(self, deadline: Deadline) -> list[str]:
        retrying = tenacity.Retrying(  # a pod's name may appear in DNS later than the pod
            stop=lambda _: deadline.expired() or deadline.waited_s() > _DNS_RETRY_S,
            wait=tenacity.wait_fixed(0.5),
            retry=tenacity.retry_if_exception_type(OSError),
            reraise=True,
        )
        try:
            return self.call(lambda: retrying(self._look_up), timedelta(seconds=2 * _DNS_RETRY_S))
        except (OSError, UnicodeError) as exc:
            here, host = socket.gethostname(), self._endpoint.host
            what = f"{here} cannot resolve {host}, the host of the endpoint: {exc}."
            cause, fix = ADVICE["DS-NAME-unresolved"]
            explanation = Explanation(
                what, cause=cause.format(given="the name"), fix=fix.format(name=host, here=here)
            )
            raise PreflightError(explanation, kind="startup-network") from exc

    def _look_up(self) -> list[str]:
        return look_up(self._host, self._endpoint.port)

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
        name = self._interface_name
        if name is not None:
            chosen = next((interface for interface in interfaces if interface.name == name), None)
            if chosen is None or not chosen.addresses:
                existing = ", ".join(interface.name for interface in interfaces)
                what = (
                    f"rendezvous.interface={name!r}: {socket.gethostname()} has no such interface "
                    "with an address."
                )
                cause = "interface names differ from host to host."
                fix = f'set interface="auto", or one of {existing}.'
                raise ConfigError(Explanation(what, cause=cause, fix=fix))
            return chosen.addresses[0]
        address = find_address_towards(endpoint)
        if address is None:
            what = f"{socket.gethostname()} has no address that other nodes could reach."
            cause = "no interface except loopback is up."
            raise PreflightError(
                Explanation(what, cause=cause, fix="check  ip addr  there."), kind="startup-network"
            )
        return address

    @property
    def _interface_name(self) -> str | None:
        """The interface that the user has named, if any."""
        name = self._config.rendezvous.interface
        return None if name == "auto" else name

    def interface_settings(self) -> dict[str, str]:
        """Return the variables that keep the ranks' libraries on an interface, if one was asked for."""
        name = self._interface_name
        if name is None:
            interface = find_interface_of(self.address)
            name = None if interface is None else interface.name
        if name is None:
            return {}
        variables = interface_variables(name)
        if self._config.rendezvous.interface is None and not self._endpoint.is_loopback:
            # NCCL chooses its network by itself, which may be faster than the one that leads to
            # node 0. gloo and TensorPipe use the one that this host's name leads to: if that is
            # loopback, as after Debian's installer, no other host reaches it.
            del variables[NCCL]
            return variables if self._is_own_name_loopback() else {}
        return variables

    def _is_own_name_loopback(self) -> bool:
        """Return whether this host's name leads to loopback first, or nowhere."""
        try:
            own = self.call(lambda: look_up(socket.gethostname(), 0), _HANDSHAKE)
        except (OSError, UnicodeError, RendezvousTimeoutError):
            return True
        return is_loopback(own[0])

    def _serve(self, address: str) -> Channel[Any, Any] | None:
        """Serve the channel at one address, if the port is free."""
        try:
            channel = self._listen(address, self._endpoint.port)
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE and self._config.node_rank != 0:
                return None  # likely node 0 of this job, on this host; otherwise dialling it reports it
            raise self._not_served(exc.errno or 0) from exc
        self.serves = True
        return channel

    def _serve_or_find(
        self, deadline: Deadline, resolved: list[str], bound: str | None, here: Sequence[str]
    ) -> Channel[Any, Any]:
        """Serve the endpoint once its port is free, or wait for the launcher that serves it.

        `bound` is where to serve it, if this node may, and `here` what of its addresses belongs to this host.
        """
        port, why = self._endpoint.port, ""
        has_warned = False
        name = self._endpoint.host
        leads_to = "" if resolved == [name] else f" ({name} is {_listed(resolved)} here)"

        refused_at: list[str] = []

        def find() -> Channel[Any, Any]:
            # A name may have several addresses. A program that listens on loopback is not the one that the
            # other nodes reach.
            failed: Exception = OSError(errno.EADDRNOTAVAIL, "it has no address")
            for address in _without_loopback(self._look_up()) or [self.address]:
                try:
                    return self._dial(address, port)
                except (OSError, RefusedError) as exc:  # noqa: PERF203 - each is tried
                    refused_at.extend([address] * isinstance(exc, RefusedError))
                    failed = exc
            raise failed

        for pause_s in deadline.pauses_s():
            channel = None if bound is None else self._serve(bound)
            if channel is not None:
                return channel
            limit_s = max(_FIND_S, deadline.remaining_s())
            try:
                return self.call(find, timedelta(seconds=limit_s), lambda late: late.close())
            except RendezvousTimeoutError:
                why = why or f"neither the name server nor the host answers{leads_to}"
            except (OSError, RefusedError) as exc:
                refusal, why = trouble_of(exc)
                why += leads_to
                if isinstance(exc, RefusedError) and (
                    refusal != "other-program" or len(refused_at) >= _REFUSALS
                ):
                    raise self._refused(exc, refused_at[-1], here) from None
            if deadline.waited_s() > NO_ANSWER_WARNING_S and not has_warned:
                has_warned, own, node_rank = True, socket.gethostname(), self._config.node_rank
                hint = ""
                if bound is not None:
                    hint = f". Another program holds port {port} of this host: ss -tanp 'sport = :{port}'"
                elif here:
                    hint = (
                        f". The address belongs to this host, which has node rank {node_rank}: the host of "
                        "the endpoint needs node rank 0"
                    )
                elif node_rank is None and self._may_serve:
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
            self._check()  # a host that refuses the connection at once keeps no call waiting
            time.sleep(pause_s)
        if bound is not None:
            raise self._not_served(errno.EADDRINUSE)
        raise self.lost(why, deadline)

    def _not_served(self, number: int) -> PreflightError:
        here, why = socket.gethostname(), os.strerror(number)
        cause, fix = _CANNOT_SERVE.get(number, _CANNOT_SERVE[0])
        what = f"{here} cannot serve the endpoint {self._endpoint}: {why}."
        return PreflightError(Explanation(what, cause=cause, fix=fix), kind="port")

    def _refused(self, exc: RefusedError, address: str, here: Sequence[str]) -> PreflightError:
        """Return the error for what answers at the endpoint, but not as a launcher of this job."""
        port, own = self._endpoint.port, socket.gethostname()
        if exc.refusal == "other-program":
            place = str(self._endpoint)
            place += f" ({address})" if address != self._endpoint.host else ""
            what = f"the program that {own} reached at {place} is not a launcher: {exc}."
            holder = "this host" if address in here else self._endpoint.host
            cause = f"another program is using port {port} on {holder}."
            look = COMMANDS["DS-PORT-taken"][0].format(port=port)
            fix = f"{ADVICE['DS-PORT-taken'][1]} On that host, this shows it:  {look}"
            return PreflightError(Explanation(what, cause=cause, fix=fix), kind="port")
        what = f"{own} cannot join the job at {self}: "
        if exc.refusal == "version":
            what += f"another version of ddpsafe serves it ({exc})."
            cause = "the nodes have different installations."
            fix = "install the same version of ddpsafe on every node."
        else:
            what += "it does not have this job's secret and id."
            cause = "the nodes have different job secrets or ids, or another job uses the same endpoint."
            fix = (
                f"give every node the same {JOB_SECRET}, secret_file and --rdzv-id, and every job its "
                "own endpoint."
            )
        return PreflightError(Explanation(what, cause=cause, fix=fix), kind="config")

    def lost(self, why: str, deadline: Deadline) -> RendezvousTimeoutError:
        """Return the error for an endpoint that does not answer, or no longer does."""
        here, waited_s = socket.gethostname(), deadline.waited_s()
        what = f"{here} found no launcher of this job at {self._endpoint} within {waited_s:.1f} s: {why}."
        cause = "the launcher on the host of the endpoint has not started, or has ended."
        if self._has_met:
            what = f"{here} has lost the launcher of node 0 at {self._endpoint}: {why}."
            cause = "the launcher of node 0 has ended, or its host has lost power or network."
        host, port = self._host, self._endpoint.port
        fix = f"check the log of that node; then, on {here}:  nc -vz {host} {port}"
        return RendezvousTimeoutError(
            Explanation(what, cause=cause, fix=fix), waited_s=waited_s, kind="startup-network"
        )

    def where_node_0_listens(self) -> str:
        """Return a clause about the address that this node serves, if the endpoint's name does not tell."""
        if not self.serves or self.address == self._endpoint.host:
            return ""
        others = _listed(self._unserved)
        here = f"; node 0 listens at {self.address}"
        return here + (f", not at {others}, where that name leads too" if self._unserved else "")


@contextlib.contextmanager
def rank_store(address: str, ports: str | None = None) -> Iterator[int]:
    """Serve a fresh store for the ranks of one round, at one address; yield its port."""
    listening = listen_at(address, ports)
    port = int(listening.getsockname()[1])
    store = open_tcp_store(address, port, listening=listening)
    try:
        yield port
    finally:
        del store  # torch closes the port with the last reference


def listen_at(address: str, ports: str | None) -> socket.socket:
    """Listen at one address, on a free port of a range, or on any if there is none."""
    return bind_in(ports, lambda port: open_server(address, port))


def key_of(config: LaunchConfig) -> bytes:
    """Return the key of the job's signatures: its secret, or derived from what all nodes know.

    Raises:
        ConfigError: The secret cannot be read, or can be guessed.
    """
    secret = find_job_secret(config.rendezvous.secret_file)
    if secret:
        return key_of_secret(secret)
    facts = (str(config.rendezvous.endpoint), config.rendezvous.id or "")
    return hashlib.sha256("\0".join(("derived", *facts)).encode()).digest()


def _without_loopback(addresses: Sequence[str]) -> list[str]:
    return [address for address in addresses if not is_loopback(address)]


def _listed(names: Sequence[str]) -> str:
    return listed(names) or "none"
