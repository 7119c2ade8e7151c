"""One node's part in the mesh: listen, dial whom the plan names, and tell what became of it."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import Deadline
from ddpsafe._interfaces import find_interface_of, list_interfaces
from ddpsafe.doctor._mesh._advice import find_gates, read_gates
from ddpsafe.doctor._mesh._announce import announce
from ddpsafe.doctor._mesh._board import bounded
from ddpsafe.doctor._mesh._case import Testimony
from ddpsafe.doctor._mesh._dial import Dialled, dial
from ddpsafe.doctor._mesh._listener import Listener
from ddpsafe.doctor._mesh._node import Node, find_port_range, machine_id, make_token

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from ddpsafe.doctor._mesh._board import Json
    from ddpsafe.doctor._mesh._job import Job

_AT_A_TIME: Final = 256
_RESOLVER: Final = timedelta(seconds=2)
_SPARE: Final = 64


class Member:
    """This node's part.

    Args:
        job: What is examined.
        env: The environment that the ranks will have.
    """

    def __init__(self, job: Job, env: Mapping[str, str] | os._Environ[str]) -> None:
        """Listen nowhere yet."""
        self._job, self._env = job, env
        self._token = make_token()
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
            port = await self._listener.open(announced.address)
        interface = find_interface_of(announced.address)
        return Node(
            node_rank=job.node_rank,
            hostname=socket.gethostname(),
            machine=machine_id(),
            announced=announced,
            port=port,
            token=self._token,
            mtu_bytes=interface.mtu_bytes if interface else 0,
            interfaces={
                each.name: dict(zip(each.addresses, each.prefixes, strict=True))
                for each in list_interfaces()
                if each.is_running and each.addresses and not each.is_loopback
            },
            port_range=find_port_range(),
            has_torch=importlib.util.find_spec("torch") is not None,
            facts=job.facts,
        )

    async def testify(
        self, nodes: Mapping[int, Node], targets: Sequence[int], *, hub_clock_s: float
    ) -> Json:
        """Dial the others; return what became of it, as a message."""
        clock_ahead_s = time.time() - hub_clock_s
        looking_up = asyncio.ensure_future(_wait_for_resolver(nodes[0].announced.address))
        slots = asyncio.Semaphore(_AT_A_TIME)

        async def dial_one(target: int) -> Dialled:
            node = nodes[target]
            async with slots:
                return await dial(
                    source=self._job.node_rank,
                    target=target,
                    address=node.announced.address,
                    port=node.port,
                    token=node.token,
                )

        known = [target for target in targets if target in nodes]
        dialled = await asyncio.gather(*map(dial_one, known))
        resolver_silent_s = await looking_up
        # Asked only where somebody failed: it costs a process, and says where to open the firewall.
        is_troubled = any(each.verdict != "open" for each in dialled) or not all(
            self._listener.received_bytes.get(rank) for rank in known
        )
        gates = await asyncio.to_thread(find_gates) if is_troubled else []
        return {
            "dialled": [each.to_json() for each in dialled],
            "received": {str(rank): n for rank, n in self._listener.received_bytes.items()},
            "gates": [list(gate) for gate in gates],
            "clock_ahead_s": clock_ahead_s,
            "resolver_silent_s": resolver_silent_s,
        }

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


def read_testimony(value: Json) -> Testimony:
    """Read what a node said after the mesh.

    Raises:
        ValueError: It is not that.
    """
    if not isinstance(value, dict):
        raise TypeError("no table")
    dialled, received = value.get("dialled"), value.get("received")
    if not isinstance(dialled, list) or not isinstance(received, dict):
        raise TypeError("no rows")
    return Testimony(
        dialled=tuple(map(Dialled.from_json, dialled)),
        received_bytes={int(rank): int(str(count)) for rank, count in received.items()},
        gates=tuple(read_gates(value.get("gates"))),
        clock_ahead_s=float(str(value.get("clock_ahead_s") or 0.0)),
        resolver_silent_s=float(str(value.get("resolver_silent_s") or 0.0)),
    )
