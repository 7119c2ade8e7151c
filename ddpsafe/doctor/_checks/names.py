"""Names: this host's, the rendezvous endpoint's, and how fast the name server answers."""

from __future__ import annotations

import re
import shlex
import socket
import time
from typing import TYPE_CHECKING, Final

from ddpsafe._advice import ADVICE
from ddpsafe._clock import BoundedCall
from ddpsafe._config.endpoint import find_address
from ddpsafe._host import as_setting, is_loopback, list_interfaces, look_up_name
from ddpsafe.doctor._findings import Finding, failed, ok, to_copy, warning
from ddpsafe.doctor._system.tcp import addresses_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._subject import Subject

# The resolver itself gives up only after 10 s or more.
_LOOK_UP_LIMIT_S: Final = 3.0
_SLOW_S: Final = 1.0


def check_own_name(subject: Subject) -> Iterator[Finding]:
    """Look up this host's own name, which gloo advertises to the other hosts."""
    name = socket.gethostname()
    try:
        addresses = addresses_of(name, 0, limit_s=_LOOK_UP_LIMIT_S)
    except (OSError, UnicodeError) as error:
        yield _own_name(subject, name, f"does not resolve here ({error})", ())
        return
    outside = [address for address in addresses if not is_loopback(address)]
    if outside:
        yield ok("DS-NAME-001", f"{name} is {', '.join(outside)}.", addresses=addresses)
    else:
        yield _own_name(
            subject, name, f"resolves to {', '.join(addresses)}, which is loopback", addresses
        )


def _own_name(subject: Subject, name: str, what: str, loopback: Sequence[str]) -> Finding:
    if subject.nnodes == 1:
        return ok(
            "DS-NAME-001", f"This host's name {name} {what}; a job on one node does not need it."
        )
    if subject.env.get("GLOO_SOCKET_IFNAME") or subject.config.rendezvous.interface:
        return ok(
            "DS-NAME-001",
            f"This host's name {name} {what}; the interface that is set takes precedence.",
        )
    choices = [interface for interface in list_interfaces() if interface.is_candidate]
    fix = "Bring up an interface that leads to the other hosts; `ip -br addr` shows all."
    if choices:
        # The command removes the name from loopback and gives it to the first candidate's address.
        blank = "[[:space:]]"
        edits = " ".join(
            f"-e '/^{re.escape(address)}{blank}/s/{blank}{re.escape(name)}\\({blank}\\|$\\)/ /g'"
            for address in loopback
        )
        kept = f"sed {edits} /etc/hosts" if edits else "cat /etc/hosts"
        named = f"{choices[0].addresses[0]} {name}"
        fix = to_copy(
            "Name the interface on this host, or correct /etc/hosts:",
            f"export {as_setting('GLOO_SOCKET_IFNAME', choices[0].name)}",
            f"hosts=$({kept}) && printf '%s\\n' \"$hosts\" '{named}' > /etc/hosts",
        )
    # NCCL does not use the name, but gloo groups beside it do.
    make = warning if subject.backend == "nccl" else failed
    return make(
        "DS-NAME-001",
        f"This host's name {name} {what}; gloo gives that address to the other hosts, "
        "which then connect to themselves.",
        cause=ADVICE["DS-RDZV-loopback"][0].format(given=name)
        if loopback
        else ADVICE["DS-NAME-unresolved"][0].format(given=name),
        fix=fix,
    )


def check_endpoint(subject: Subject) -> Iterator[Finding]:
    """Resolve the host of the rendezvous endpoint."""
    endpoint = subject.endpoint
    if endpoint is None:
        return
    try:
        addresses = addresses_of(endpoint.host, endpoint.port, limit_s=_LOOK_UP_LIMIT_S)
    except (OSError, UnicodeError) as error:
        yield failed(
            "DS-NAME-002",
            f"The name of the rendezvous endpoint, {endpoint.host}, does not resolve here ({error}).",
            cause="a typo, a name that only other hosts know, or a service that does not "
            "exist yet.",
            fix=to_copy(
                "Use its address instead of its name; this prints it on that host:", "hostname -I"
            ),
        )
        return
    # On the host that the endpoint names, /etc/hosts may map the name to 127.0.1.1 as Debian's
    # installer does; that is DS-NAME-001.
    if (
        subject.nnodes > 1
        and all(map(is_loopback, addresses))
        and endpoint.host.casefold().split(".")[0] != socket.gethostname().casefold().split(".")[0]
    ):
        yield failed(
            "DS-NAME-002",
            f"The rendezvous endpoint {endpoint.host} resolves to {', '.join(addresses)} here: this node would "
            "wait for itself.",
            cause="a line of /etc/hosts on this node.",
            fix=to_copy(
                "Find the line and correct the address:",
                f"grep -n {shlex.quote(endpoint.host)} /etc/hosts",
            ),
        )
        return
    yield ok(
        "DS-NAME-002",
        f"The rendezvous endpoint {endpoint.host} resolves to {', '.join(addresses)}.",
    )


def check_name_server(subject: Subject) -> Iterator[Finding]:
    """Time a reverse look-up, which torch's store does for every client."""
    # An address that the ranks will use: the rendezvous endpoint's, else this host's.
    endpoint = subject.endpoint
    if endpoint is not None and find_address(endpoint.host) is not None:
        address = endpoint.host
    else:
        candidates = [interface for interface in list_interfaces() if interface.is_candidate]
        address = candidates[0].addresses[0] if candidates and subject.nnodes > 1 else "127.0.0.1"
    began_s = time.monotonic()
    call = BoundedCall(lambda: look_up_name(address), name="ddpsafe-reverse")
    answered = call.wait(_LOOK_UP_LIMIT_S)
    took_s = time.monotonic() - began_s
    if answered and took_s < _SLOW_S:
        yield ok("DS-NAME-003", f"A reverse look-up takes {took_s * 1000:.0f} ms.", took_s=took_s)
        return
    how = f"took {took_s:.1f} s" if answered else f"has no answer after {took_s:.1f} s"
    yield warning(
        "DS-NAME-003",
        f"The reverse look-up of {address} {how}; torch looks up every rank that joins, "
        "which adds 10 to 20 s to every start.",
        cause="a name server in /etc/resolv.conf that does not answer.",
        fix=to_copy(
            "Add the hosts to /etc/hosts, or remove the server that does not answer:",
            "grep nameserver /etc/resolv.conf",
            f"echo '{address} {socket.gethostname()}' >> /etc/hosts",
        ),
        took_s=took_s,
    )


CHECKS: Final[tuple[Check, ...]] = (check_own_name, check_endpoint, check_name_server)
