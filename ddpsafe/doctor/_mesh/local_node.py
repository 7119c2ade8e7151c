"""One node's part in the mesh: its announced address, its listener, and the connections it tries."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import logging
import os
import secrets
import socket
import time
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ddpsafe._clock import Deadline
from ddpsafe._host import (
    Interface,
    boot_id,
    expand_nccl,
    family_of,
    find_address_towards,
    is_loopback,
    list_interfaces,
    look_up,
    look_up_name,
    port_range,
    source_address,
)
from ddpsafe._job.channel import from_json
from ddpsafe.doctor._mesh.findings.observations import is_closed, make_plan
from ddpsafe.doctor._mesh.firewall import find_filter_chains
from ddpsafe.doctor._mesh.probe import Listener, dial
from ddpsafe.doctor._mesh.protocol import (
    Announced,
    Contact,
    Dialled,
    Facts,
    Flaw,
    Node,
    NodeReport,
    Roster,
    Route,
    as_hostname,
    require_unicast,
)
from ddpsafe.doctor._mesh.transport import bounded
from ddpsafe.doctor._subject import VariableSource
from ddpsafe.doctor._system.tcp import find_route

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ddpsafe.doctor._mesh.job import Job


logger = logging.getLogger(__name__)

_USUAL_PORTS: Final = range(32768, 61000)


def machine_id() -> str:
    """Return an ID that two nodes share if they are on one host and in one network namespace."""
    try:
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:  # the parent's ID at least shows that ranks of one launcher share a host
        network = os.getppid()
    return f"{boot_id()} {network}"


_RESOLVE_LIMIT: Final = timedelta(seconds=2)
# The order in which NCCL looks for an interface (findInterfaces in its socket code).
_NCCL_ORDER: Final = ("ib", "^docker,lo,virbr", "docker", "lo")


async def announce(
    *,
    backend: str,
    interface: str | None,
    env: Mapping[str, str],
    towards: Sequence[str],
    places: Mapping[str, VariableSource],
) -> Announced:
    """Find the address that the backend would announce on this host.

    A backend that contains ``nccl`` follows NCCL's rules, all others gloo's. The interface is a name,
    ``"auto"``, or None to leave it to the library, but a variable that the user has set takes precedence.
    `towards` are addresses of the endpoint, and `places` is where variables of the ranks were set.
    """
    host = _Host(interfaces=list_interfaces(), fallback=_plain(find_address_towards(towards) or ""))
    uses_nccl = "nccl" in backend
    variable: Literal["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"] = (
        "NCCL_SOCKET_IFNAME" if uses_nccl else "GLOO_SOCKET_IFNAME"
    )
    if value := env.get(variable):
        names = value.split(",")
        if uses_nccl:
            existing = [interface.name for interface in host.interfaces]
            names = expand_nccl(value, existing) or [value]
        # If the library's own choice is right on this host, the fix is to unset the variable.
        others = {name: value for name, value in env.items() if name != variable}
        otherwise = await announce(
            backend=backend, interface=interface, env=others, towards=towards, places=places
        )
        return replace(
            host.of_names(names, f"{variable}={value}"),
            variable=variable,
            place=places.get(variable, VariableSource()),
            otherwise="" if otherwise.flaw else otherwise.address,
        )
    if interface == "auto" and host.fallback:
        return host.of_address(host.fallback, "the route to the endpoint")
    if interface is not None:
        return host.of_names([interface], f"interface={interface!r}")
    if uses_nccl:
        usable = [
            interface.name
            for interface in host.interfaces
            if interface.addresses and interface.is_running
        ]
        choices = (expand_nccl(prefixes, usable) for prefixes in _NCCL_ORDER)
        return host.of_names(next(filter(None, choices), []), "NCCL's own choice")
    return await host.of_own_name()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """The addresses of this host, and what it announces for a choice among them.

    Attributes:
        fallback: Its address that leads to the endpoint, for an unusable choice; empty if there is none.
    """

    interfaces: Sequence[Interface]
    fallback: str

    def of_names(self, names: Sequence[str], chosen_by: str) -> Announced:
        """Announce the first address of the first of these interfaces."""
        name = (names[0] if names else "") or "any interface"
        for interface in self.interfaces:
            if interface.name == name and interface.addresses:
                return self.of_address(interface.addresses[0], chosen_by)
        return self._instead("absent-interface", name, chosen_by)

    def of_address(self, address: str, chosen_by: str) -> Announced:
        """Announce an address, unless no other host could reach it."""
        if address and is_loopback(address) and self.fallback:
            return self._instead("loopback", address, chosen_by)
        if address and not _plain(address):
            return self._instead("link-local", address, chosen_by)
        owner = self._find_owner(address)
        is_stopped = owner is not None and not owner.is_running
        name = "" if owner is None else owner.name
        return Announced(
            address=address,
            interface=name,
            chosen_by=chosen_by,
            flaw="not-running" if is_stopped else "",
            wanted=name if is_stopped else "",
        )

    async def of_own_name(self) -> Announced:
        """Choose like gloo: the first address of the host's name that this host can bind."""
        hostname = socket.gethostname()
        chosen_by = f"the host's name {hostname}"
        flaw: Flaw = "unresolved"
        resolved: list[str] = []
        try:
            resolved = await bounded(
                lambda: look_up(hostname, 0),
                deadline=Deadline.after(_RESOLVE_LIMIT),
                name="ddpsafe-own-name",
            )
        except TimeoutError:
            flaw = "silent-resolver"
        except (OSError, UnicodeError):
            pass
        for address in resolved:
            try:
                socket.create_server((address, 0), family=family_of(address)).close()
            except OSError:
                continue
            return self.of_address(address, chosen_by)
        # torch uses loopback if the host's name does not resolve.
        return self._instead(flaw, "127.0.0.1", chosen_by)

    def _instead(self, flaw: Flaw, wanted: str, chosen_by: str) -> Announced:
        owner = self._find_owner(self.fallback)
        return Announced(
            address=self.fallback,
            interface="" if owner is None else owner.name,
            chosen_by=chosen_by,
            flaw=flaw,
            wanted=wanted,
        )

    def _find_owner(self, address: str) -> Interface | None:
        return next((owner for owner in self.interfaces if address in owner.addresses), None)


_MOST_AT_ONCE: Final = 256


class LocalNode:
    """This node's part in an examination; it does not listen at first."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._token = secrets.token_hex(16)
        self._listener = Listener(token=self._token, secret=job.secret, nnodes=job.nnodes)
        self._machine = machine_id()
        self._own: Node | None = None

    async def introduce(self, towards: Sequence[str]) -> Node:
        """Start to listen where the ranks would, and describe this node.

        `towards` are addresses of the endpoint.
        """
        job = self._job
        announced = await announce(
            backend=job.backend,
            interface=job.interface,
            env=job.env(),
            towards=towards,
            places=job.places,
        )
        port = 0
        if announced.address:
            with contextlib.suppress(OSError):  # the address was removed a moment ago
                port = await self._listener.open(announced.address)
        interfaces = list_interfaces()
        mtus = [
            interface.mtu_bytes for interface in interfaces if interface.name == announced.interface
        ]
        ports = port_range() or _USUAL_PORTS
        source = ""
        with contextlib.suppress(OSError):
            source = _plain(source_address(towards[0])) if towards else ""
        self._own = Node(
            node_rank=job.node_rank,
            hostname=as_hostname(socket.gethostname()),
            machine=self._machine,
            announced=announced,
            port=port,
            token=self._token,
            mtu_bytes=mtus[0] if mtus else 0,
            interfaces={
                interface.name: dict(zip(interface.addresses, interface.prefixes, strict=True))
                for interface in interfaces
                if interface.is_running and interface.addresses and not interface.is_loopback
            },
            port_range=(ports[0], ports[-1]),
            has_torch=importlib.util.find_spec("torch") is not None,
            source=source,
            endpoint=_plain(towards[0]) if towards else "",
            facts=_as_facts(job.facts),
        )
        return self._own

    async def probe(self, roster: Roster) -> NodeReport:
        """Dial the nodes that the plan names, and report the outcome."""
        clock_ahead_s = time.time() - roster.clock_s
        contacts = {contact.node_rank: contact for contact in roster.contacts}
        looking_up = asyncio.ensure_future(_wait_for_resolver(contacts[0].address))
        slots = asyncio.Semaphore(_MOST_AT_ONCE)

        async def dial_one(contact: Contact) -> Dialled:
            # Services on loopback trust this host, so no other node may make it dial them.
            if (
                not contact.address
                or contact.node_rank == self._job.node_rank
                or (is_loopback(contact.address) and contact.machine != self._machine)
            ):
                return Dialled(contact.node_rank, "no-route", reason="no-address")
            async with slots:
                try:
                    own = self._own
                    return await dial(
                        self._job.node_rank,
                        contact,
                        secret=self._job.secret,
                        mtu_bytes=own.mtu_bytes if own is not None and own.mtu_bytes else 1500,
                    )
                except Exception:  # an unexpected error in one direction must not end the others
                    logger.exception("dialling %s", contact.address)
                    return Dialled(contact.node_rank, "no-route")

        plan = make_plan(roster.contacts, nnodes=roster.nnodes, seed=roster.seed)
        targets = [contacts[rank] for rank in plan[self._job.node_rank] if rank in contacts]
        dialled = tuple(await asyncio.gather(*map(dial_one, targets)))
        expected = {rank for rank, others in plan.items() if self._job.node_rank in others}
        received = self._listener.received_bytes
        arrived = {rank for rank, count in received.items() if count}
        closed = {direction.target for direction in dialled if is_closed(direction.result)}
        closed |= expected - arrived
        # Read the packet filter only if something failed, because it takes a process.
        failed = closed or len(contacts) < roster.nnodes
        chains = await asyncio.to_thread(find_filter_chains) if failed else None
        return NodeReport(
            dialled=dialled,
            heard=tuple(sorted(received)),
            chains=tuple(chains or ()),
            chains_known=chains is not None,
            routes=tuple(
                self._other_routes(contacts[rank] for rank in sorted(closed & {*contacts}))
            ),
            clock_ahead_s=clock_ahead_s,
            resolver_silent_s=await looking_up,
        )

    def _other_routes(self, contacts: Iterable[Contact]) -> Iterator[Route]:
        """Yield routes to neighbours that do not leave by the announced interface."""
        own = self._own
        if own is None or not own.network:
            return
        network = ipaddress.ip_network(own.network)
        for contact in contacts:
            # Beyond the announced network, a router decides.
            near = contact.address and ipaddress.ip_address(contact.address) in network
            route = find_route(contact.address, own.announced.address) if near else None
            if route is not None and route.interface not in (own.announced.interface, "lo"):
                yield Route(contact.node_rank, *route)

    async def close(self) -> None:
        """Stop listening."""
        await self._listener.close()


def _plain(address: str) -> str:
    """Return an address in the form that other nodes accept; empty if they would not."""
    try:
        return str(require_unicast(address.removeprefix("::ffff:")))
    except ValueError:
        return ""


def _as_facts(fingerprint: Mapping[str, object]) -> Facts:
    """Return the sections of a fingerprint that nodes compare, without those they would refuse."""
    sections: dict[str, object] = {}
    for section in fields(Facts):
        value = fingerprint.get(section.name)
        if value is not None:
            try:
                from_json(Facts, {section.name: value})
            except ValueError:
                logger.warning(
                    "this host's %r is not compared with that of other nodes: its format is unknown",
                    section.name,
                )
            else:
                sections[section.name] = value
    return from_json(Facts, sections)


async def _wait_for_resolver(address: str) -> float:
    """Look up an address like torch's store does; return how long there was no answer."""
    # The store listens on both IP versions, so it sees an IPv4 client at a mapped address.
    mapped = address if ":" in address else f"::ffff:{address}"
    deadline = Deadline.after(_RESOLVE_LIMIT)
    try:
        await bounded(lambda: look_up_name(mapped), deadline=deadline, name="ddpsafe-reverse")
    except TimeoutError:
        return deadline.waited_s()
    except OSError:  # no such family, or the address has no name: that is an answer too
        return 0.0
    return 0.0
