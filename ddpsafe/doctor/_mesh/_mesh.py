"""One node's part in the mesh: listen, dial whom the plan names, and tell what became of it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import Deadline
from ddpsafe._interfaces import list_interfaces
from ddpsafe.doctor._mesh._advice import find_gates
from ddpsafe.doctor._mesh._announce import announce
from ddpsafe.doctor._mesh._board import bounded
from ddpsafe.doctor._mesh._dial import dial
from ddpsafe.doctor._mesh._host import find_port_range, machine_id
from ddpsafe.doctor._mesh._lines import make_secret
from ddpsafe.doctor._mesh._listener import Listener
from ddpsafe.doctor._mesh._messages import Contact, Dialled, Node, Roster, Testimony
from ddpsafe.doctor._mesh._plan import plan_targets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpsafe.doctor._mesh._job import Job

_AT_A_TIME: Final = 256
_RESOLVER: Final = timedelta(seconds=2)
_SPARE: Final = 64


def make_plan(roster: Roster) -> dict[int, list[int]]:
    """Return whom each node that came dials, the same on every node."""
    networks = {contact.node_rank: contact.network for contact in roster.contacts}
    by_rank = [networks.get(rank, "") for rank in range(roster.nnodes)]
    plan = plan_targets(by_rank, seed=roster.seed)
    return {rank: plan[rank] for rank in networks}


class Member:
    """This node's part.

    Args:
        job: What is examined.
        env: The environment that the ranks will have.
    """

    def __init__(self, job: Job, env: Mapping[str, str]) -> None:
        """Listen nowhere yet."""
        self._job, self._env = job, env
        self._token = make_secret()
        self._listener = Listener(token=self._token, capacity=job.nnodes * 2 + _SPARE)

    async def introduce(self, towards: Sequence[str]) -> Node:
        """Start to listen where the ranks would; describe this node.

        Args:
            towards: Addresses of the endpoint.
        """
        job = self._job
        announced = await announce(
            backend=job.backend, interface=job.interface, env=self._env, towards=towards
        )
        port = 0
        if announced.address:
            with contextlib.suppress(OSError):  # the address went in this very moment
                port = await self._listener.open(announced.address)
        interfaces = list_interfaces()
        mtus = [each.mtu_bytes for each in interfaces if each.name == announced.interface]
        return Node(
            node_rank=job.node_rank,
            hostname=socket.gethostname(),
            machine=machine_id(),
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
            facts=dict(job.facts),
        )

    async def testify(self, roster: Roster) -> Testimony:
        """Dial those whom the plan names; return what became of it."""
        clock_ahead_s = time.time() - roster.clock_s
        contacts = {contact.node_rank: contact for contact in roster.contacts}
        looking_up = asyncio.ensure_future(_wait_for_resolver(contacts[0].address))
        slots = asyncio.Semaphore(_AT_A_TIME)

        async def dial_one(contact: Contact) -> Dialled:
            async with slots:
                return await dial(self._job.node_rank, contact)

        plan = make_plan(roster)
        targets = [contacts[rank] for rank in plan[self._job.node_rank] if rank in contacts]
        dialled = tuple(await asyncio.gather(*map(dial_one, targets)))
        # Asked only where somebody failed: it costs a process, and says where to open the firewall.
        due = {rank for rank, others in plan.items() if self._job.node_rank in others}
        heard = self._listener.received_bytes
        came = {rank for rank, count in heard.items() if count}
        return Testimony(
            dialled=dialled,
            heard=tuple(sorted(heard)),
            gates=tuple(await asyncio.to_thread(find_gates)) if due - came else (),
            clock_ahead_s=clock_ahead_s,
            resolver_silent_s=await looking_up,
        )

    async def close(self) -> None:
        """Stop listening."""
        await self._listener.close()


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
