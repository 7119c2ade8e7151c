"""What this host has: addresses and interfaces, and the way to another host."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._bounded import BoundedCall
from ddpsafe._config.endpoint import find_address, resolve_host

if TYPE_CHECKING:
    from collections.abc import Iterable

_FAMILIES: Final = {socket.AF_INET, socket.AF_INET6}
_VIRTUAL: Final = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "podman", "lxc")
"""Starts of the names of interfaces that lead to containers of this host only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface.

    Attributes:
        name: As the system calls it.
        is_up: Whether it is up and has a carrier.
        mtu: Largest packet in bytes.
        networks: Its addresses with their networks, link-local ones left out.
        is_loopback: Whether it leads to this host only.
    """

    name: str
    is_up: bool
    mtu: int
    networks: tuple[ipaddress.IPv4Interface | ipaddress.IPv6Interface, ...]
    is_loopback: bool

    @property
    def is_candidate(self) -> bool:
        """Whether ranks of several hosts could talk on it."""
        usable = self.is_up and bool(self.networks) and not self.is_loopback
        return usable and not self.name.startswith(_VIRTUAL)

    def addresses(self) -> list[str]:
        """Return its addresses as text."""
        return [str(network.ip) for network in self.networks]


def list_interfaces() -> list[Interface]:
    """Return the interfaces of this host."""
    stats = psutil.net_if_stats()
    addresses = psutil.net_if_addrs()
    found = []
    for _, name in socket.if_nameindex():
        state = stats.get(name)
        networks = tuple(_networks(addresses.get(name, [])))
        found.append(
            Interface(
                name=name,
                is_up=state is not None and state.isup,
                mtu=0 if state is None else state.mtu,
                networks=networks,
                is_loopback=name.startswith("lo")
                and all(network.ip.is_loopback for network in networks),
            )
        )
    return found


def _networks(
    addresses: Iterable[object],
) -> Iterable[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    for address in addresses:
        if getattr(address, "family", None) not in _FAMILIES:
            continue
        text = str(getattr(address, "address", "")).partition("%")[0]
        mask = str(getattr(address, "netmask", None) or "")
        # IPv6 masks come as ffff:ffff::, which ipaddress does not read.
        prefix = (
            sum(part.bit_count() for part in ipaddress.ip_address(mask).packed) if mask else None
        )
        network = ipaddress.ip_interface(text if prefix is None else f"{text}/{prefix}")
        if not network.ip.is_link_local:
            yield network


def addresses_of(host: str, port: int, *, limit_s: float) -> list[str]:
    """Resolve a host, waiting no longer than `limit_s`.

    Raises:
        OSError: When it does not resolve.
        TimeoutError: When the resolver has not answered by then.
    """
    if find_address(host) is not None:
        return [host]
    call = BoundedCall(lambda: resolve_host(host, port), name="ddpsafe-resolve")
    if not call.wait(limit_s):
        msg = f"no answer within {limit_s:.1f} s"
        raise TimeoutError(msg)
    return call.result()


def source_address(target: str, port: int) -> str:
    """Return the own address from which packets to `target` leave; nothing is sent.

    Raises:
        OSError: When there is no route to it.
    """
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, port))
        return str(probe.getsockname()[0])


def interface_of(address: str, interfaces: Iterable[Interface]) -> Interface | None:
    """Return the interface that carries an own address."""
    for interface in interfaces:
        if address in interface.addresses():
            return interface
    return None
