"""The network that the ranks use: loopback, interface variables, the route to the endpoint, and MTU."""

from __future__ import annotations

import contextlib
import shlex
import socket
from typing import TYPE_CHECKING, Final

from ddpsafe._config.interfaces import GLOO, NCCL, check_interface, check_interfaces
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
from ddpsafe.doctor._system.infiniband import list_ports
from ddpsafe.doctor._system.tcp import addresses_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpsafe._host import Interface
    from ddpsafe.doctor._checks import Check
    from ddpsafe.doctor._subject import Subject

_LOOPBACK: Final = "127.0.0.1"
_LOOPBACK_LIMIT_S: Final = 1.0


def check_loopback(subject: Subject) -> Iterator[Finding]:
    """Connect over loopback, as the ranks of one node do."""
    del subject
    try:
        with (
            socket.create_server((_LOOPBACK, 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_LIMIT_S),
        ):
            pass
    except OSError as error:
        yield failed(
            "DS-NET-007",
            f"Nothing can be reached on {_LOOPBACK} ({error}), where the ranks of a node connect.",
            cause="the loopback interface is down, as in a new network namespace, or a firewall or "
            "sandbox blocks it.",
            fix=to_copy("Bring it up:", "ip link set dev lo up"),
        )
        return
    yield ok("DS-NET-007", "Loopback works.")


def check_interface_variables(subject: Subject) -> Iterator[Finding]:
    """Check each interface variable by the rules of the library that reads it."""
    problems = list(check_interfaces(subject.env))
    configured = subject.config.rendezvous.interface
    own = check_interface(configured) if configured not in (None, "auto") else None
    problems += [own] if own else []
    for problem in problems:
        variable = problem.field
        # gloo's variable always counts: beside nccl, gloo groups serve objects and checkpoints.
        may_be_nccl = "nccl" in subject.backend or subject.config.backend == "auto"
        # A cluster's profile may set it although only gloo runs.
        if variable == NCCL and not may_be_nccl:
            continue
        library = {GLOO: "gloo", NCCL: "nccl"}.get(variable)
        breaks = library is None or library in subject.backend
        or_option = ", this way or with --interface" if library is None else ""
        yield (failed if breaks else warning)(
            "DS-NET-001",
            f"{variable}: got {problem.given}: {problem.why}.",
            cause="names of interfaces differ between hosts; the value may come from another one.",
            fix=to_copy(f"Name one that this host has{or_option}:", *_exports(subject, variable)),
        )
    if not problems:
        chosen = [f"{name}={subject.env[name]}" for name in (GLOO, NCCL) if subject.env.get(name)]
        yield ok("DS-NET-001", f"{' and '.join(chosen) or 'No interface'} is set.")


def _exports(subject: Subject, variable: str) -> list[str]:
    """Return the line that names an interface of this host, if possible the one that was meant."""
    names = [interface.name for interface in list_interfaces() if interface.is_candidate]
    usable = names or [interface.name for interface in list_interfaces() if interface.is_running]
    setting = variable if variable in {GLOO, NCCL} else "DDPSAFE_RENDEZVOUS__INTERFACE"
    place = find_place(subject.config, setting)
    if not usable:
        return [place.unset_line(setting)]
    wrong = subject.env.get(variable) or subject.config.rendezvous.interface or ""
    # NCCL's spelling: "^" excludes, "=" asks for the exact name, "," separates several.
    near = find_near(wrong.lstrip("^=").partition(",")[0], usable)
    name = near or usable[0]
    return [place.set_line(setting, interface_variables(name).get(setting, name))]


def check_interface_state(subject: Subject) -> Iterator[Finding]:
    """Check whether the chosen interfaces are up and have an address."""
    interfaces = {interface.name: interface for interface in list_interfaces()}
    for name, variables in chosen_names(subject, list(interfaces)).items():
        interface = interfaces.get(name)
        if interface is None:  # reported by DS-NET-001
            continue
        chosen_by = " and ".join(variables)
        if not interface.is_running:
            yield failed(
                "DS-NET-002",
                f"The interface {name}, chosen by {chosen_by}, is down.",
                cause="it was never brought up on this host, or its cable is unplugged.",
                fix=to_copy(
                    "Bring it up, or name another one:", f"ip link set dev {shlex.quote(name)} up"
                ),
            )
        elif not interface.networks:
            yield failed(
                "DS-NET-002",
                f"The interface {name}, chosen by {chosen_by}, has no address.",
                cause="DHCP has not answered, or it is part of a bond or bridge that has the address.",
                fix=to_copy(
                    "Give it an address, or name the one that has it:", "ip -brief address"
                ),
            )
        else:
            yield ok("DS-NET-002", f"{name} is up with {', '.join(interface.addresses)}.")


def chosen_names(subject: Subject, existing: list[str]) -> dict[str, list[str]]:
    """Return the chosen interfaces, each with the settings that name it."""
    chosen: dict[str, list[str]] = {}
    for name in filter(None, subject.env.get(GLOO, "").split(",")):
        chosen.setdefault(name, []).append(GLOO)
    # "^" only excludes: of the other interfaces NCCL skips those that it cannot use.
    if subject.env.get(NCCL) and not subject.env[NCCL].startswith("^"):
        for name in expand_nccl(subject.env[NCCL], existing):
            chosen.setdefault(name, []).append(NCCL)
    configured = subject.config.rendezvous.interface
    if configured not in (None, "auto"):
        chosen.setdefault(str(configured), []).append("rendezvous.interface")
    return chosen


_LOOK_UP_LIMIT_S: Final = 2.0
# The minimum that IPv6 requires of every link (RFC 8200).
_SMALLEST_MTU_BYTES: Final = 1280


def check_route(subject: Subject) -> Iterator[Finding]:
    """Compare the interface that leads to the rendezvous endpoint with the chosen one."""
    endpoint = subject.endpoint
    if endpoint is None or subject.nnodes == 1:
        return
    with contextlib.suppress(OSError, UnicodeError):  # reported by DS-NAME-002
        target = addresses_of(endpoint.host, endpoint.port, limit_s=_LOOK_UP_LIMIT_S)[0]
        try:
            source = source_address(target, endpoint.port)
        except OSError as error:
            yield failed(
                "DS-NET-003",
                f"There is no route from this host to the rendezvous endpoint {target} ({error.strerror}).",
                cause="the interface of that network is down here, or this host is in another network.",
                fix=to_copy(
                    "Check the interfaces and routes:",
                    "ip -brief address",
                    f"ip route get {target}",
                ),
            )
            return
        yield _compare(subject, target, find_interface_of(source))


def _compare(subject: Subject, target: str, leading: Interface | None) -> Finding:
    if leading is None or leading.is_loopback:
        return ok("DS-NET-003", f"The rendezvous endpoint {target} is this host.")
    chosen = chosen_names(subject, list_names())
    if not chosen or leading.name in chosen:
        return ok("DS-NET-003", f"{leading.name} leads to the rendezvous endpoint {target}.")
    name, by = next(iter(chosen.items()))
    settings = interface_variables(leading.name)
    # A second network is fine if all hosts share it, which one host cannot know.
    return warning(
        "DS-NET-003",
        f"{leading.name} leads to the rendezvous endpoint {target}, but {' and '.join(by)} chooses {name}.",
        cause="a second network, which all hosts need to share, or a name copied from another host.",
        fix=to_copy(
            f"Unless all hosts share the network of {name}:",
            *(
                find_place(subject.config, name).set_line(name, value)
                for name, value in settings.items()
                if name in by
            ),
            *([f"--interface {leading.name}"] if "rendezvous.interface" in by else []),
        ),
        route_interface=leading.name,
    )


def check_mtu(subject: Subject) -> Iterator[Finding]:
    """Check the MTU of the interfaces that the ranks might use."""
    del subject
    interfaces = [interface for interface in list_interfaces() if interface.is_candidate]
    small = [interface for interface in interfaces if 0 < interface.mtu_bytes < _SMALLEST_MTU_BYTES]
    for interface in small:
        yield warning(
            "DS-NET-004",
            f"The MTU of {interface.name} is {interface.mtu_bytes} bytes: data is cut into small packets.",
            cause="a tunnel in a tunnel, or a value set by hand.",
            fix=to_copy(
                "If the network supports it:",
                f"ip link set dev {shlex.quote(interface.name)} mtu 1500",
            ),
            mtu_bytes=interface.mtu_bytes,
        )
    if interfaces and not small:
        mtus = ", ".join(f"{interface.name} {interface.mtu_bytes}" for interface in interfaces)
        yield ok(
            "DS-NET-004",
            f"MTU: {mtus}.",
            mtu_bytes={interface.name: interface.mtu_bytes for interface in interfaces},
        )


def check_choice(subject: Subject) -> Iterator[Finding]:
    """Check whether gloo and NCCL have to guess the interface, and whether there is a network."""
    candidates = [interface for interface in list_interfaces() if interface.is_candidate]
    if not candidates and subject.nnodes == 1:
        yield ok("DS-NET-006", "There is no network besides loopback; one node does not need one.")
        return
    if not candidates:
        yield failed(
            "DS-NET-006",
            f"No interface besides loopback is up with an address, and the job has {subject.nnodes} nodes.",
            cause="the container has no network, or its interface is down.",
            fix=to_copy(
                "Check the interfaces; a container gets the host's with --network=host:",
                "ip -brief address",
            ),
        )
        return
    networks = ", ".join(f"{interface.name} ({interface.addresses[0]})" for interface in candidates)
    yield ok("DS-NET-006", f"Networks: {networks}.")
    is_chosen = bool(chosen_names(subject, list_names()))
    is_automatic = subject.config.rendezvous.interface == "auto"
    if len(candidates) == 1 or subject.nnodes == 1 or is_chosen or is_automatic:
        yield ok("DS-NET-005", "There is one interface, or one has been chosen.")
        return
    # Suggest the interface that leads to the endpoint, if that is known.
    endpoint, name = subject.endpoint, candidates[0].name
    if endpoint is not None:
        with contextlib.suppress(OSError, UnicodeError):
            target = addresses_of(endpoint.host, endpoint.port, limit_s=_LOOK_UP_LIMIT_S)[0]
            leading = find_interface_of(source_address(target, endpoint.port))
            if leading is not None and not leading.is_loopback:
                name = leading.name
    settings = interface_variables(name)
    yield warning(
        "DS-NET-005",
        f"This host has several networks ({networks}), and no setting chooses the one for the ranks; "
        "gloo takes the one that the host's name resolves to, NCCL the first.",
        cause="neither GLOO_SOCKET_IFNAME nor NCCL_SOCKET_IFNAME is set.",
        fix=to_copy(
            "Choose one on every host, by its name there:",
            " ".join(
                ["export", *(as_setting(variable, settings[variable]) for variable in (GLOO, NCCL))]
            ),
        ),
        interfaces=[interface.name for interface in candidates],
    )


def check_infiniband(subject: Subject) -> Iterator[Finding]:
    """Check whether the InfiniBand and RoCE devices that NCCL would use have an active port."""
    ports = list_ports().values()
    if not ports or "nccl" not in subject.backend or subject.env.get("NCCL_IB_DISABLE") == "1":
        return
    devices = sorted({port.device for port in ports})
    if wanted := subject.env.get("NCCL_IB_HCA"):
        # An entry may end with the number of a port, as in "mlx5_0:1".
        named = ",".join(entry.partition(":")[0] for entry in wanted.split(","))
        devices = expand_nccl(named, devices)
    active = {port.device for port in ports if port.is_active}
    unusable = [device for device in devices if device not in active]
    if not unusable and devices:
        yield ok("DS-NET-008", f"InfiniBand: {', '.join(devices)} active.")
        return
    states = ", ".join(
        f"{name} is {port.state}" for name, port in list_ports().items() if port.device in unusable
    )
    yield warning(
        "DS-NET-008",
        f"{states}: NCCL does not use {'it' if len(unusable) == 1 else 'them'}."
        if unusable
        else f"NCCL_IB_HCA={wanted} names no device of this host: NCCL uses TCP.",
        cause="a cable or switch port is down, or the subnet manager has not configured the port (INIT)."
        if unusable
        else "names of devices differ between hosts; the value may come from another one.",
        fix=to_copy("Look at the ports:", *(f"ibstat {device}" for device in unusable or [""])),
        devices=unusable,
    )


CHECKS: Final[tuple[Check, ...]] = (
    check_loopback,
    check_interface_variables,
    check_interface_state,
    check_route,
    check_mtu,
    check_choice,
    check_infiniband,
)
