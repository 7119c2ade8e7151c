"""The address at which a rank of this host would listen: the one that gloo or NCCL announces."""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe._clock import Deadline
from ddpsafe._host import Interface, expand_nccl, find_address_towards, is_loopback, list_interfaces
from ddpsafe.doctor._mesh._board import bounded
from ddpsafe.doctor._mesh._messages import Announced, Flaw
from ddpsafe.doctor._subject import Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_RESOLVE: Final = timedelta(seconds=2)
_NCCL_ORDER: Final = ("ib", "^docker,lo,virbr", "docker", "lo")
"""In which order NCCL looks for an interface of its own (findInterfaces in its socket code)."""


async def announce(
    *,
    backend: str,
    interface: str | None,
    env: Mapping[str, str],
    towards: Sequence[str],
    places: Mapping[str, Place],
) -> Announced:
    """Find the address that the backend would announce on this host.

    Args:
        backend: For torch; what contains ``nccl`` follows NCCL's rules, all else gloo's.
        interface: ``Rendezvous.interface``: a name, ``"auto"``, or None to leave it to the library.
        env: The environment of the ranks; a variable that the user has set wins.
        towards: Addresses of the endpoint.
        places: Where variables of the ranks were set.
    """
    interfaces = list_interfaces()
    fallback = find_address_towards(towards) or ""
    library = "NCCL" if "nccl" in backend else "GLOO"
    variable: Literal["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"] = (
        "NCCL_SOCKET_IFNAME" if library == "NCCL" else "GLOO_SOCKET_IFNAME"
    )
    if env.get(variable):
        names = _named(library, env[variable], interfaces)
        named = _of_interfaces(names, interfaces, f"{variable}={env[variable]}", fallback)
        others = {name: value for name, value in env.items() if name != variable}
        otherwise = await announce(
            backend=backend, interface=interface, env=others, towards=towards, places=places
        )
        place = places.get(variable, Place())
        return replace(
            named,
            variable=variable,
            place=place.kind,
            place_where=place.where,
            otherwise="" if otherwise.flaw else otherwise.address,
        )
    if interface is not None and (interface != "auto" or not fallback):
        return _of_interfaces([interface], interfaces, f"interface={interface!r}", fallback)
    if interface is not None:
        return _of_address(fallback, interfaces, "the route to the endpoint", fallback)
    if library == "NCCL":
        names = _nccl_choice(interfaces)
        return _of_interfaces(names, interfaces, "NCCL's own choice", fallback)
    return await _of_hostname(interfaces, fallback)


def _named(library: str, value: str, interfaces: Sequence[Interface]) -> list[str]:
    if library == "GLOO":
        return value.split(",")
    return expand_nccl(value, [each.name for each in interfaces]) or [value]


def _nccl_choice(interfaces: Sequence[Interface]) -> list[str]:
    usable = [each.name for each in interfaces if each.addresses and each.is_running]
    for value in _NCCL_ORDER:
        names = expand_nccl(value, usable)
        if names:
            return names
    return []


def _of_interfaces(
    names: Sequence[str], interfaces: Sequence[Interface], chosen_by: str, fallback: str
) -> Announced:
    by_name = {each.name: each for each in interfaces}
    name = names[0] if names else ""
    found = by_name.get(name)
    if found is None or not found.addresses:
        flawed = _of_address(fallback, interfaces, chosen_by, fallback)
        return Announced(
            address=fallback,
            interface=flawed.interface,
            chosen_by=chosen_by,
            flaw="absent-interface",
            wanted=name or "any interface",
        )
    return _of_address(found.addresses[0], interfaces, chosen_by, fallback)


def _of_address(
    address: str, interfaces: Sequence[Interface], chosen_by: str, fallback: str
) -> Announced:
    owner = _owner(interfaces, address)
    if address and is_loopback(address) and fallback:
        usable = _owner_name(interfaces, fallback)
        return Announced(
            address=fallback, interface=usable, chosen_by=chosen_by, flaw="loopback", wanted=address
        )
    stopped = owner is not None and not owner.is_running
    return Announced(
        address=address,
        interface=owner.name if owner else "",
        chosen_by=chosen_by,
        flaw="not-running" if stopped else "",
        wanted=owner.name if owner is not None and stopped else "",
    )


async def _of_hostname(interfaces: Sequence[Interface], fallback: str) -> Announced:
    """Do as gloo does: the first address of the host's own name that this host can bind."""
    hostname = socket.gethostname()
    chosen_by = f"the host's name {hostname}"
    flaw: Flaw = "unresolved"
    try:
        found = await bounded(
            lambda: socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM),
            deadline=Deadline.after(_RESOLVE),
            name="ddpsafe-own-name",
        )
    except TimeoutError:
        found, flaw = [], "silent-resolver"
    except (OSError, UnicodeError):
        found = []
    for family, _, _, _, address in found:
        if _can_bind(family, str(address[0])):
            return _of_address(str(address[0]), interfaces, chosen_by, fallback)
    usable = _owner_name(interfaces, fallback)
    return Announced(
        address=fallback, interface=usable, chosen_by=chosen_by, flaw=flaw, wanted="127.0.0.1"
    )


def _owner(interfaces: Sequence[Interface], address: str) -> Interface | None:
    return next((each for each in interfaces if address in each.addresses), None)


def _owner_name(interfaces: Sequence[Interface], address: str) -> str:
    owner = _owner(interfaces, address)
    return "" if owner is None else owner.name


def _can_bind(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
    except OSError:
        return False
    return True
