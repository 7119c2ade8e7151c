"""Network interfaces: loopback, the names in variables, and the state of those chosen."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from ddpsafe._config.interfaces import (
    GLOO,
    NCCL,
    check_interface,
    check_interfaces,
)
from ddpsafe._config.problems import find_near
from ddpsafe._host import expand_nccl, interface_variables, list_interfaces
from ddpsafe.doctor._context import find_place
from ddpsafe.doctor._report import Finding, failed, ok, to_copy, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe._host import Interface
    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._context import Subject

_LOOPBACK: Final = "127.0.0.1"
_PATIENCE_S: Final = 1.0


def check_loopback(subject: Subject) -> Iterator[Finding]:
    """Connect to ourselves: the ranks of one node meet on loopback."""
    del subject
    try:
        with (
            socket.create_server((_LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_PATIENCE_S),
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


def check_names(subject: Subject) -> Iterator[Finding]:
    """Judge the interface variables by the rules of the library that reads each."""
    problems = list(check_interfaces(subject.env))
    wanted = subject.config.rendezvous.interface
    own = check_interface(wanted) if wanted not in (None, "auto") else None
    problems += [own] if own else []
    for problem in problems:
        what, _, _ = " ".join(problem.split()).partition(" Write ")
        variable = what.partition(":")[0]
        if not _may_matter(subject, variable):
            continue
        make = failed if _matters(subject, variable) else warning
        yield make(
            "DS-NET-001",
            what,
            cause="names of interfaces differ between hosts; the value may come from another one.",
            fix=to_copy(
                f"Name one that this host has{_may_also_be_given(variable)}:",
                *_exports(subject, variable),
            ),
        )
    if not problems:
        chosen = [f"{name}={subject.env[name]}" for name in (GLOO, NCCL) if subject.env.get(name)]
        yield ok("DS-NET-001", f"{' and '.join(chosen) or 'No interface'} is asked for.")


def _may_matter(subject: Subject, variable: str) -> bool:
    """Tell whether the library that reads the variable may be used at all."""
    # Groups of gloo are made beside nccl too, for objects and checkpoints.
    return variable != NCCL or "nccl" in subject.backend or subject.config.backend == "auto"


def _matters(subject: Subject, variable: str) -> bool:
    """Tell whether the job certainly breaks without it."""
    library = {GLOO: "gloo", NCCL: "nccl"}.get(variable)
    return library is None or library in subject.backend


def _may_also_be_given(variable: str) -> str:
    return "" if variable in {GLOO, NCCL} else ", so or as --interface"


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


def check_state(subject: Subject) -> Iterator[Finding]:
    """Look whether the interfaces that were chosen can carry anything."""
    interfaces = {each.name: each for each in list_interfaces()}
    for name, variables in chosen_names(subject, list(interfaces)).items():
        interface = interfaces.get(name)
        if interface is None:  # DS-NET-001 says so
            continue
        yield _judge(interface, " and ".join(variables))


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


def _judge(interface: Interface, asked_by: str) -> Finding:
    name = interface.name
    if not interface.is_running:
        return failed(
            "DS-NET-002",
            f"The interface {name}, asked for by {asked_by}, is down.",
            cause="it was never brought up on this host, or its cable is out.",
            fix=to_copy("Bring it up, or name another one:", f"ip link set dev {name} up"),
        )
    if not interface.networks:
        return failed(
            "DS-NET-002",
            f"The interface {name}, asked for by {asked_by}, has no address.",
            cause="DHCP has not answered, or it is a part of a bond or bridge that has the address.",
            fix=to_copy("Give it an address, or name the one that has it:", "ip -brief address"),
        )
    return ok("DS-NET-002", f"{name} is up with {', '.join(interface.addresses)}.")


CHECKS: Final[tuple[Check, ...]] = (check_loopback, check_names, check_state)
