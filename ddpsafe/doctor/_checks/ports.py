"""Ports: whether the rendezvous endpoint's is free, and whether there are enough ephemeral ones."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._advice import ADVICE, COMMANDS
from ddpsafe._host import PORT_RANGE, find_listener, list_interfaces, port_range, show_endpoint
from ddpsafe.doctor._findings import Finding, failed, ok, to_copy, warning
from ddpsafe.doctor._system.tcp import addresses_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._subject import Subject

_LOOK_UP_LIMIT_S: Final = 2.0
_PORTS_PER_RANK: Final = 64  # a rank listens on a few and connects to every other rank
_FEWEST_PORTS: Final = 1000


def check_free(subject: Subject) -> Iterator[Finding]:
    """Try to listen on the port of the job's store, if the endpoint is this host."""
    endpoint = subject.endpoint
    if endpoint is None or endpoint.port == 0:
        return
    is_here = False
    with contextlib.suppress(OSError, UnicodeError):
        own = {address for interface in list_interfaces() for address in interface.addresses}
        is_here = bool(
            own & set(addresses_of(endpoint.host, endpoint.port, limit_s=_LOOK_UP_LIMIT_S))
        )
    if not is_here:
        return
    # Ranks of torchrun share the store of its agent, which already listens on MASTER_PORT.
    by_agent = subject.env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if by_agent and subject.env.get("MASTER_PORT") == str(endpoint.port):
        yield ok("DS-PORT-001", f"Port {endpoint.port} is served by torchrun, as it should be.")
        return
    taken = [
        family
        for family in [socket.AF_INET, *([socket.AF_INET6] if socket.has_ipv6 else [])]
        if _is_taken(family, endpoint.port)
    ]
    if not taken:
        yield ok("DS-PORT-001", f"Port {endpoint.port} is free on this host.")
        return
    owner, pid = _owner(endpoint.port)
    stop = (
        [f"kill {pid}   # if it is yours"]
        if pid is not None
        else [COMMANDS["DS-PORT-taken"][0].format(port=endpoint.port)]
    )
    yield failed(
        "DS-PORT-001",
        f"Port {endpoint.port} of the rendezvous endpoint is taken on this host by {owner}.",
        cause=ADVICE["DS-PORT-taken"][0],
        fix=to_copy(
            "Use another port on all nodes, or end the process if it is yours:",
            f"export MASTER_PORT={endpoint.port + 1}   # or --rdzv-endpoint {show_endpoint(endpoint.host, endpoint.port + 1)}",
            *stop,
        ),
        port=endpoint.port,
        pid=pid,
    )


def _is_taken(family: socket.AddressFamily, port: int) -> bool:
    try:
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # no IPv6 here
        return False
    with listener:
        # As torch's store does: connections in TIME_WAIT of a job that has just ended do not count.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind(("", port))
            listener.listen(1)
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _owner(port: int) -> tuple[str, int | None]:
    """Return the process that listens on a port, as far as this user may see it."""
    process = find_listener(port)
    with contextlib.suppress(psutil.Error, OSError):  # it may have ended
        if process is not None:
            command = " ".join(process.cmdline()) or process.name()
            mine = " (this process)" if process.pid == os.getpid() else ""
            described = f"process {process.pid} of {process.username()}{mine}: {command:.120}"
            return described, process.pid
    return "a process that this user may not see", None


def check_handed_out(subject: Subject) -> Iterator[Finding]:
    """Check whether the rendezvous endpoint's port is ephemeral, so that any connection may take it."""
    endpoint, ports = subject.endpoint, port_range()
    if endpoint is None or ports is None or endpoint.port == 0:
        return
    if endpoint.port not in ports:
        yield ok(
            "DS-PORT-002",
            f"Port {endpoint.port} is outside the ephemeral range, {ports[0]} to {ports[-1]}.",
        )
        return
    yield warning(
        "DS-PORT-002",
        f"Port {endpoint.port} is ephemeral ({ports[0]} to {ports[-1]}): the system gives such ports "
        "to outgoing connections, so it is sometimes taken.",
        cause="the port was chosen at random, or by asking for a free one.",
        fix=to_copy("Use a port below that range on all nodes:", "export MASTER_PORT=29500"),
    )


def check_enough(subject: Subject) -> Iterator[Finding]:
    """Count the ephemeral ports, which ranks need for listening and connecting."""
    ports = port_range()
    if ports is None:
        return
    wanted = max(_FEWEST_PORTS, _PORTS_PER_RANK * subject.nproc)
    if len(ports) >= wanted:
        yield ok("DS-PORT-003", f"There are {len(ports)} ephemeral ports.", ports=len(ports))
        return
    yield warning(
        "DS-PORT-003",
        f"There are only {len(ports)} ephemeral ports ({ports[0]} to {ports[-1]}); every "
        "connection between ranks needs one.",
        cause="the range was narrowed, for example to open it in a firewall.",
        fix=to_copy("Widen it:", f"echo 32768 60999 > {PORT_RANGE}"),
        ports=len(ports),
    )


CHECKS: Final[tuple[Check, ...]] = (check_free, check_handed_out, check_enough)
