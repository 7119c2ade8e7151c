"""One node's part in the mesh: listen, dial whom the plan names, and tell what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import logging
import socket
import time
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import Deadline
from ddpsafe._host import is_loopback, list_interfaces, source_address
from ddpsafe.doctor._mesh._advice import find_gates
from ddpsafe.doctor._mesh._announce import announce
from ddpsafe.doctor._mesh._board import bounded
from ddpsafe.doctor._mesh._case import is_closed, make_plan
from ddpsafe.doctor._mesh._dial import dial
from ddpsafe.doctor._mesh._host import find_port_range, machine_id
from ddpsafe.doctor._mesh._kernel import find_route
from ddpsafe.doctor._mesh._lines import make_nonce
from ddpsafe.doctor._mesh._listener import Listener
from ddpsafe.doctor._mesh._messages import (
    Contact,
    Dialled,
    Facts,
    Node,
    NodeReport,
    Roster,
    Route,
    as_hostname,
    read,
    require_unicast,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ddpsafe.doctor._mesh._board import Json
    from ddpsafe.doctor._mesh._job import Job

logger = logging.getLogger(__name__)

_AT_A_TIME: Final = 256
_RESOLVER: Final = timedelta(seconds=2)


class Member:
    """This node's part.

    Args:
        job: What is examined.
        env: The environment that the ranks will have.
    """

    def __init__(self, job: Job, env: Mapping[str, str]) -> None:
        """Listen nowhere yet."""
        self._job, self._env = job, env
        self._token = make_nonce()
        self._listener = Listener(token=self._token, secret=job.secret, nnodes=job.nnodes)
        self._machine = machine_id()
        self._own: Node | None = None

    async def introduce(self, towards: Sequence[str]) -> Node:
        """Start to listen where the ranks would; describe this node.

        Args:
            towards: Addresses of the endpoint.
        """
        job = self._job
        announced = await announce(
            backend=job.backend,
            interface=job.interface,
            env=self._env,
            towards=towards,
            places=job.places,
        )
        port = 0
        if announced.address:
            with contextlib.suppress(OSError):  # the address went in this very moment
                port = await self._listener.open(announced.address)
        interfaces = list_interfaces()
        mtus = [each.mtu_bytes for each in interfaces if each.name == announced.interface]
        self._own = Node(
            node_rank=job.node_rank,
            hostname=as_hostname(socket.gethostname()),
            machine=self._machine,
            announced=announced,
            port=port,
            token=self._token,
            mtu_bytes=mtus[0] if mtus else 0,
            interfaces={
                each.name: dict(zip(each.addresses, each.prefixes, strict=True))
                for each in interfaces
                if each.is_running and each.addresses and not each.is_loopback
            },
            port_range=find_port_range(),
            has_torch=importlib.util.find_spec("torch") is not None,
            source=_source_towards(towards),
            endpoint=_plain(towards[0]) if towards else "",
            facts=_as_facts(job.facts),
        )
        return self._own

    async def probe(self, roster: Roster) -> NodeReport:
        """Dial those whom the plan names; return what became of it."""
        clock_ahead_s = time.time() - roster.clock_s
        contacts = {contact.node_rank: contact for contact in roster.contacts}
        looking_up = asyncio.ensure_future(_wait_for_resolver(contacts[0].address))
        slots = asyncio.Semaphore(_AT_A_TIME)

        async def dial_one(contact: Contact) -> Dialled:
            if not self._may_dial(contact):
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
                except Exception:  # a direction that fails otherwise must not end the others
                    logger.exception("dialling %s", contact.address)
                    return Dialled(contact.node_rank, "no-route")

        plan = make_plan(roster.contacts, nnodes=roster.nnodes, seed=roster.seed)
        targets = [contacts[rank] for rank in plan[self._job.node_rank] if rank in contacts]
        dialled = tuple(await asyncio.gather(*map(dial_one, targets)))
        due = {rank for rank, others in plan.items() if self._job.node_rank in others}
        heard = self._listener.received_bytes
        came = {rank for rank, count in heard.items() if count}
        closed = {each.target for each in dialled if is_closed(each.verdict)} | (due - came)
        # Asked only where somebody failed: it costs a process, and says where to open the firewall.
        gates = await asyncio.to_thread(find_gates) if closed else None
        return NodeReport(
            dialled=dialled,
            heard=tuple(sorted(heard)),
            gates=tuple(gates or ()),
            gates_known=gates is not None,
            routes=tuple(
                self._other_routes(contacts[rank] for rank in sorted(closed & {*contacts}))
            ),
            clock_ahead_s=clock_ahead_s,
            resolver_silent_s=await looking_up,
        )

    def _other_routes(self, contacts: Iterable[Contact]) -> Iterator[Route]:
        """Yield ways to neighbours that leave by another interface than the announced one.

        Neighbours are in the announced network: beyond it, a router decides.
        """
        own = self._own
        if own is None or not own.network:
            return
        network = ipaddress.ip_network(own.network)
        for contact in contacts:
            near = contact.address and ipaddress.ip_address(contact.address) in network
            found = find_route(contact.address) if near else None
            if found is not None and found[0] not in (own.announced.interface, "lo"):
                yield Route(contact.node_rank, *found)

    def _may_dial(self, contact: Contact) -> bool:
        """Tell whether an address is one that a node at another place may have.

        A service that listens on loopback trusts this host, and may not be dialled for others.
        """
        if not contact.address or contact.node_rank == self._job.node_rank:
            return False
        return not is_loopback(contact.address) or contact.machine == self._machine

    async def close(self) -> None:
        """Stop listening."""
        await self._listener.close()


def _source_towards(towards: Sequence[str]) -> str:
    with contextlib.suppress(OSError):
        return _plain(source_address(towards[0])) if towards else ""
    return ""


def _plain(address: str) -> str:
    """Return an address as others accept it, empty where they would not."""
    try:
        return str(require_unicast(address.removeprefix("::ffff:")))
    except ValueError:
        return ""


def _as_facts(fingerprint: Mapping[str, Json]) -> Facts:
    """Return the sections of a fingerprint that nodes compare; what others would refuse is left out."""
    sections: dict[str, object] = {}
    for section in fields(Facts):
        value = fingerprint.get(section.name)
        if value is not None:
            try:
                read(Facts, {section.name: value})
            except ValueError:
                logger.warning("The %s of this host are not compared.", section.name)
            else:
                sections[section.name] = value
    return read(Facts, sections)


async def _wait_for_resolver(address: str) -> float:
    """Look an address up as torch's store does for every client; return how long in vain."""
    mapped = address if ":" in address else f"::ffff:{address}"
    deadline = Deadline.after(_RESOLVER)
    try:
        await bounded(
            lambda: socket.getnameinfo((mapped, 0, 0, 0), socket.NI_NUMERICSERV),
            deadline=deadline,
            name="ddpsafe-reverse",
        )
    except TimeoutError:
        return deadline.waited_s()
    except OSError:  # no such family, or the server says that there is no name: an answer too
        return 0.0
    return 0.0
