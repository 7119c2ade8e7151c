"""The network that the ranks use: loopback, interface variables, the way to the other hosts, and MTU."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Final

from ddpsafe._config.interfaces import (
    GLOO,
    NCCL,
    check_interface,
    check_interfaces,
)
from ddpsafe._config.problems import find_near
from ddpsafe._host import (
    as_setting,
    expand_nccl,
    find_interface_of,
    interface_variables,
    list_interfaces,
    list_names,
    source_address,
)
from ddpsafe.doctor._findings import Finding, failed, ok, to_copy, warning
from ddpsafe.doctor._subject import find_place
from ddpsafe.doctor._system.tcp import addresses_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe._host import Interface
    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._subject import Subject

_LOOPBACK: Final = "127.0.0.1"
_LOOPBACK_S: Final = 1.0


def check_loopback(subject: Subject) -> Iterator[Finding]:
    """Connect to ourselves: the ranks of one node meet on loopback."""
    del subject
    try:
        with (
            socket.create_server((_LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_S),
        ):
            pass
    except OSError as error:
        yield failed(
            "DS-NET-007",
            f"Nothing can be reached on {_LOOPBACK} ({error}); the ranks of a node meet there.",
            cause="the loopback interface is down, as in a new network namespace, or a firewall or "
            "sandbox forbids it.",
            fix=to_copy("Bring it up:", "ip link set dev lo up"),
        )
        return
    yield ok("DS-NET-007", "Loopback works.")


def check_interface_variables(subject: Subject) -> Iterator[Finding]:
    """Check the interface variables by the rules of the library that reads each."""
    problems = list(check_interfaces(subject.env))
    wanted = subject.config.rendezvous.interface
    own = check_interface(wanted) if wanted not in (None, "auto") else None
    problems += [own] if own else []
    for problem in problems:
        variable = problem.field
        # Groups of gloo are made beside nccl too, for objects and checkpoints.
        may_be_nccl = "nccl" in subject.backend or subject.config.backend == "auto"
        if variable == NCCL and not may_be_nccl:
            continue
        library = {GLOO: "gloo", NCCL: "nccl"}.get(variable)
        breaks = library is None or library in subject.backend
        or_so = ", so or as --interface" if library is None else ""
        yield (failed if breaks else warning)(
            "DS-NET-001",
            f"{variable}: got {problem.given}: {problem.why}.",
            cause="names of interfaces differ between hosts; the value may come from another one.",
            fix=to_copy(
                f"Name one that this host has{or_so}:",
                *_exports(subject, variable),
            ),
        )
    if not problems:
        chosen = [f"{name}={subject.env[name]}" for name in (GLOO, NCCL) if subject.env.get(name)]
        yield ok("DS-NET-001", f"{' and '.join(chosen) or 'No interface'} is asked for.")


def _exports(subject: Subject, variable: str) -> list[str]:
    """Return the line that names an interface of this host, the one that was meant if possible."""
    names = [each.name for each in list_interfaces() if each.is_candidate]
    usable = names or [each.name for each in list_interfaces() if each.is_running]
    setting = variable if variable in {GLOO, NCCL} else "DDPSAFE_RENDEZVOUS__INTERFACE"
    place = find_place(subject.config, setting)
    if not usable:
        return [place.unset_line(setting)]
    wrong = subject.env.get(variable) or subject.config.rendezvous.interface or ""
    near = find_near(wrong.lstrip("^=").partition(",")[0], usable)
    name = near or usable[0]
    return [place.set_line(setting, interface_variables(name).get(setting, name))]


def check_interface_state(subject: Subject) -> Iterator[Finding]:
    """Look whether the interfaces that were chosen can carry anything."""
    interfaces = {each.name: each for each in list_interfaces()}
    for name, variables in chosen_names(subject, list(interfaces)).items():
        interface = interfaces.get(name)
        if interface is None:  # DS-NET-001 says so
            continue
        asked_by = " and ".join(variables)
        if not interface.is_running:
            yield failed(
                "DS-NET-002",
                f"The interface {name}, asked for by {asked_by}, is down.",
                cause="it was never brought up on this host, or its cable is out.",
                fix=to_copy("Bring it up, or name another one:", f"ip link set dev {name} up"),
            )
        elif not interface.networks:
            yield failed(
                "DS-NET-002",
                f"The interface {name}, asked for by {asked_by}, has no address.",
                cause="DHCP has not answered, or it is a part of a bond or bridge that has the address.",
                fix=to_copy(
                    "Give it an address, or name the one that has it:", "ip -brief address"
                ),
            )
        else:
            yield ok("DS-NET-002", f"{name} is up with {', '.join(interface.addresses)}.")


def chosen_names(subject: Subject, existing: list[str]) -> dict[str, list[str]]:
    """Return the interfaces that were asked for, each with the variables that name it."""
    asked: dict[str, list[str]] = {}
    for name in filter(None, subject.env.get(GLOO, "").split(",")):
        asked.setdefault(name, []).append(GLOO)
    if subject.env.get(NCCL):
        names = expand_nccl(subject.env[NCCL], existing)
        # NCCL leaves out what it cannot use when the value says which ones not to take.
        for name in names if not subject.env[NCCL].startswith("^") else ():
            asked.setdefault(name, []).append(NCCL)
    wanted = subject.config.rendezvous.interface
    if wanted not in (None, "auto"):
        asked.setdefault(str(wanted), []).append("rendezvous.interface")
    return asked


_PATIENCE_S: Final = 2.0
_SMALLEST_MTU: Final = 1280
"""What IPv6 needs at least; below, something on the way is odd."""


def check_route(subject: Subject) -> Iterator[Finding]:
    """Compare the interface that leads to the rendezvous endpoint with the one asked for."""
    endpoint = subject.endpoint
    if endpoint is None or subject.nnodes == 1:
        return
    with contextlib.suppress(OSError, UnicodeError):  # DS-NAME-002 says so
        target = addresses_of(endpoint.host, endpoint.port, limit_s=_PATIENCE_S)[0]
        try:
            source = source_address(target, endpoint.port)
        except OSError as error:
            yield failed(
                "DS-NET-003",
                f"There is no route from this host to the rendezvous endpoint {target} ({error.strerror}).",
                cause="the interface of that network is down here, or this host is in another network.",
                fix=to_copy(
                    "Look at the interfaces and routes:",
                    "ip -brief address",
                    f"ip route get {target}",
                ),
            )
            return
        yield _compare(subject, target, find_interface_of(source))


def _compare(subject: Subject, target: str, way: Interface | None) -> Finding:
    if way is None or way.is_loopback:
        return ok("DS-NET-003", f"The rendezvous endpoint {target} is this host.")
    asked = chosen_names(subject, list_names())
    others = {name: by for name, by in asked.items() if name != way.name}
    if not asked or way.name in asked:
        return ok("DS-NET-003", f"{way.name} leads to the rendezvous endpoint {target}.")
    name, by = next(iter(others.items()))
    settings = interface_variables(way.name)
    return warning(
        "DS-NET-003",
        f"{way.name} leads to the rendezvous endpoint {target}, but {' and '.join(by)} asks for {name}.",
        cause="a second network, which all hosts need to share, or a name copied from another host.",
        fix=to_copy(
            f"Unless every host has {name} in one network:",
            *(
                find_place(subject.config, name).set_line(name, value)
                for name, value in settings.items()
                if name in by
            ),
            *([f"--interface {way.name}"] if "rendezvous.interface" in by else []),
        ),
        route_interface=way.name,
    )


def check_mtu(subject: Subject) -> Iterator[Finding]:
    """Look at the largest packet of the interfaces that the ranks might use."""
    del subject
    interfaces = [each for each in list_interfaces() if each.is_candidate]
    small = [each for each in interfaces if 0 < each.mtu_bytes < _SMALLEST_MTU]
    for each in small:
        yield warning(
            "DS-NET-004",
            f"The MTU of {each.name} is {each.mtu_bytes}: packets are cut into small pieces.",
            cause="a tunnel in a tunnel, or a value set by hand.",
            fix=to_copy("If the network takes it:", f"ip link set dev {each.name} mtu 1500"),
            mtu_bytes=each.mtu_bytes,
        )
    if interfaces and not small:
        shown = ", ".join(f"{each.name} {each.mtu_bytes}" for each in interfaces)
        yield ok(
            "DS-NET-004",
            f"MTU: {shown}.",
            mtu_bytes={each.name: each.mtu_bytes for each in interfaces},
        )


def check_choice(subject: Subject) -> Iterator[Finding]:
    """Look whether gloo and NCCL have to guess, and whether there is a network at all."""
    candidates = [each for each in list_interfaces() if each.is_candidate]
    if not candidates and subject.nnodes == 1:
        yield ok("DS-NET-006", "There is no network besides loopback; one node does without.")
        return
    if not candidates:
        yield failed(
            "DS-NET-006",
            f"No interface besides loopback is up with an address, and {subject.nnodes} nodes have to meet.",
            cause="the container has no network, or its interface is down.",
            fix=to_copy(
                "Look at the interfaces; a container gets the host's with --network=host:",
                "ip -brief address",
            ),
        )
        return
    shown = ", ".join(f"{each.name} ({each.addresses[0]})" for each in candidates)
    yield ok("DS-NET-006", f"Networks: {shown}.")
    asked = chosen_names(subject, list_names())
    found_out = subject.config.rendezvous.interface == "auto"
    if len(candidates) == 1 or subject.nnodes == 1 or asked or found_out:
        yield ok("DS-NET-005", "There is one interface, or a choice has been made.")
        return
    # The one that leads to the endpoint, where that is known.
    endpoint, name = subject.endpoint, candidates[0].name
    if endpoint is not None:
        with contextlib.suppress(OSError, UnicodeError):
            target = addresses_of(endpoint.host, endpoint.port, limit_s=_PATIENCE_S)[0]
            way = find_interface_of(source_address(target, endpoint.port))
            if way is not None and not way.is_loopback:
                name = way.name
    settings = interface_variables(name)
    yield warning(
        "DS-NET-005",
        f"This host has several networks ({shown}), and nothing says which one the ranks use; "
        "gloo takes the one of the host's name, NCCL the first.",
        cause="neither GLOO_SOCKET_IFNAME nor NCCL_SOCKET_IFNAME is set.",
        fix=to_copy(
            "Say so on every host, by its own name for the network:",
            " ".join(["export", *(as_setting(each, settings[each]) for each in (GLOO, NCCL))]),
        ),
        interfaces=[each.name for each in candidates],
    )


CHECKS: Final[tuple[Check, ...]] = (
    check_loopback,
    check_interface_variables,
    check_interface_state,
    check_route,
    check_mtu,
    check_choice,
)
