"""The process that takes this host's part in an all-reduce."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._interfaces import interface_variables
from ddpsafe.doctor._mesh._messages import Reduced, read

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from ddpsafe._clock import Deadline
    from ddpsafe.doctor._mesh._job import Job
    from ddpsafe.doctor._mesh._messages import Node

_PROGRAM: Final = "ddpsafe.doctor._mesh._all_reduce_program"


class Reducer:
    """Owns the process: when the block is left, it is gone.

    Args:
        job: What is examined.
        own: This node.
        endpoint: host:port of the store; empty for the one that serves it.
    """

    def __init__(self, job: Job, own: Node, *, endpoint: str) -> None:
        """Start nothing yet."""
        self._asked = {
            "rank": job.node_rank,
            "world_size": job.nnodes,
            "address": own.announced.address,
            "endpoint": endpoint,
            "backend": job.backend,
        }
        self._env = job.env()
        if job.interface is not None:
            for name, value in interface_variables(own.announced.interface).items():
                self._env.setdefault(name, value)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        """Start the process, in a session of its own, so that what it starts ends with it."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _PROGRAM,
            json.dumps(self._asked),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=self._env,
            start_new_session=True,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it."""
        assert self._process is not None  # noqa: S101 - entered
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def find_endpoint(self, deadline: Deadline) -> str:
        """Wait for the store that the process serves; empty if it does not come to that."""
        told = await self._read(deadline)
        return str(told.get("endpoint", "")) if told else ""

    async def finish(self, deadline: Deadline) -> Reduced:
        """Wait for the result."""
        while (told := await self._read(deadline)) is not None:
            if "took_s" in told or "error" in told:
                return read(Reduced, told)
        if deadline.expired():
            return Reduced(error=f"no result within {deadline.waited_s():.0f} s")
        assert self._process is not None  # noqa: S101 - entered
        code = await self._process.wait()
        return Reduced(error=f"the process ended with status {code} and without a result")

    async def _read(self, deadline: Deadline) -> dict[str, Any] | None:
        assert self._process is not None  # noqa: S101 - entered
        assert self._process.stdout is not None  # noqa: S101 - a pipe
        try:
            line = await asyncio.wait_for(
                self._process.stdout.readline(), max(0.0, deadline.remaining_s())
            )
            told = json.loads(line) if line else None
        except (asyncio.TimeoutError, TimeoutError):
            return None
        except ValueError:  # a library printed something
            return {}
        return told if isinstance(told, dict) else None
