"""The endpoint as node rank 0 keeps it: open during the roll-call, and does it lead here?"""

from __future__ import annotations

import asyncio
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._clock import Deadline
from ddpsafe.doctor._mesh._endpoint import Obstacle, find_hub_answer
from ddpsafe.doctor._mesh._hub import Hub

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpsafe.doctor._mesh._job import Job
    from ddpsafe.doctor._mesh._messages import Answer, Rejected

_LOOK: Final = timedelta(seconds=4)
_PAUSE_S: Final = 0.5


class Entrance:
    """Node rank 0's door.

    Args:
        job: What is examined.
    """

    def __init__(self, job: Job) -> None:
        """Keep it shut."""
        self._job = job
        self._greeting = job.greeting()
        self.hub = Hub(self._greeting, secret=job.secret)
        self._leads_to: Answer | Obstacle | None = None
        self._looking: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen, and see whether the endpoint leads here.

        Raises:
            OSError: The port cannot be had.
        """
        await self.hub.open(self._job.port)
        self._looking = asyncio.create_task(self._look())

    def rejected(self) -> Sequence[Rejected]:
        """Return who was sent away."""
        return self.hub.rejected

    def close_roll(self) -> None:
        """Let nobody in from now on."""
        self.hub.close_roll()

    def leads_to(self) -> tuple[Obstacle | None, str]:
        """Return where the endpoint leads if not here: what is there, or which other node rank 0."""
        found = self._leads_to
        if found is None:  # a name server that does not answer; DS-MESH-046 says so
            return None, ""
        if isinstance(found, Obstacle):
            return found, ""
        return None, found.hostname if found.nonce != self.hub.nonce else ""

    async def _look(self) -> None:
        """Look until somebody answers: the host that the endpoint names may be late."""
        job = self._job
        while True:
            deadline = Deadline.after(_LOOK)
            self._leads_to = await find_hub_answer(
                job.host, job.port, self._greeting, secret=job.secret, deadline=deadline
            )
            if not isinstance(self._leads_to, Obstacle):
                return
            await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        """Let everybody read what was said, then stop."""
        if self._looking is not None:
            self._looking.cancel()
        await self.hub.close()


def owner_of(port: int) -> str:
    """Name the process that listens on a port, where this one may see it."""
    try:
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local and local.port == port:
                name = psutil.Process(connection.pid).name() if connection.pid else "?"
                return f"; {name} (pid {connection.pid}) on {socket.gethostname()} has it"
    except psutil.Error:
        pass
    return ""
