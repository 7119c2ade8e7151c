"""Node rank 0's end of the board: a small server at the endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpsafe.doctor._mesh import _lines

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ddpsafe.doctor._mesh._board import Json

_BACKLOG: Final = 1024
_FROM_NODES: Final = ("hello", "mesh", "reduced")
_STRANGERS: Final = 256
_GREETING_S: Final = 5.0
_FAREWELL_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A node that came and was sent away.

    Attributes:
        reason: ``"doubled"``, ``"other-job"`` or ``"late"``.
        greeting: What it said.
        holder: Who has its place, where that is the reason.
    """

    reason: str
    greeting: _lines.Greeting
    holder: str = ""


class Hub:
    """The board as node rank 0 sees it.

    Args:
        own: How node rank 0 would introduce itself.
    """

    def __init__(self, own: _lines.Greeting) -> None:
        """Start with nothing said."""
        self.nonce = _lines.make_secret()
        self.rejected: list[Rejected] = []
        self._own = own
        self._is_open = True
        self._said: dict[str, Json] = {}
        self._heard: dict[str, dict[int, Json]] = {}
        self._nodes: dict[int, tuple[_lines.Greeting, asyncio.StreamWriter]] = {}
        self._came = {0}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self, port: int) -> None:
        """Listen on a port, on every interface.

        Raises:
            OSError: The port cannot be had.
        """
        self._server = await asyncio.start_server(
            self._receive, sock=_listen(port), limit=_lines.LONGEST_FROM_NODE_BYTES
        )

    async def put(self, topic: str, value: Json) -> None:
        """Say something to every node."""
        self._said[topic] = value
        line = _lines.encode({"topic": topic, "value": value})
        for _, writer in self._nodes.values():
            writer.write(line)
        self._heard.setdefault(topic, {})[0] = value

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return what the nodes have said."""
        return self._heard.get(topic, {})

    def gone(self) -> Collection[int]:
        """Return the nodes that came and whose connection has ended."""
        return self._came - self._nodes.keys() - {0}

    def close_roll(self) -> None:
        """Let nobody in from now on."""
        self._is_open = False

    async def close(self) -> None:
        """Wait until the nodes have read what was said and left, then stop listening."""
        if self._server is not None:
            self._server.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_FAREWELL_S)
        for task in self._tasks:
            task.cancel()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs every connection as a task
        self._tasks.add(task)
        try:
            # A crowd of strangers must not eat the descriptors of this process.
            if len(self._tasks) < self._own.nnodes + _STRANGERS:
                await self._converse(reader, writer)
        except (OSError, _lines.StrangerError, asyncio.TimeoutError):
            pass
        except asyncio.CancelledError:  # by close(); Python before 3.12 would report it
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _lines.notice_loss(writer.get_extra_info("socket"))
        message = await asyncio.wait_for(_lines.read(reader), _GREETING_S)
        greeting = _lines.Greeting.from_json(message or {})
        rejected = self._judge(greeting)
        writer.write(_lines.encode(self._reply(greeting, rejected)))
        if rejected is not None:
            # Node rank 0 looks whether the endpoint leads to itself; another one may come as well.
            if (greeting.hostname, greeting.pid) != (self._own.hostname, self._own.pid):
                self.rejected.append(rejected)
            return
        node = greeting.node_rank
        for sayings in self._heard.values():
            sayings.pop(node, None)  # of a doctor there that was ended and started again
        self._nodes[node] = (greeting, writer)
        self._came.add(node)
        try:
            for topic, value in self._said.items():
                writer.write(_lines.encode({"topic": topic, "value": value}))
            await self._listen_to(node, reader)
        finally:
            del self._nodes[node]

    async def _listen_to(self, node: int, reader: asyncio.StreamReader) -> None:
        while (message := await _lines.read(reader)) is not None:
            topic = message.get("topic")
            if topic in _FROM_NODES:  # what a stranger calls a topic must not fill the memory
                self._heard.setdefault(str(topic), {})[node] = message.get("value")

    def _judge(self, greeting: _lines.Greeting) -> Rejected | None:
        own = self._own
        if (greeting.nnodes, greeting.job) != (own.nnodes, own.job):
            return Rejected(reason="other-job", greeting=greeting)
        if not 0 <= greeting.node_rank < own.nnodes:
            return Rejected(reason="other-job", greeting=greeting)
        if greeting.node_rank == 0:
            holder = f"{own.hostname} (pid {own.pid})"
            return Rejected(reason="doubled", greeting=greeting, holder=holder)
        if greeting.node_rank in self._nodes:
            known, _ = self._nodes[greeting.node_rank]
            holder = f"{known.hostname} (pid {known.pid})"
            return Rejected(reason="doubled", greeting=greeting, holder=holder)
        return None if self._is_open else Rejected(reason="late", greeting=greeting)

    def _reply(self, greeting: _lines.Greeting, rejected: Rejected | None) -> dict[str, Json]:
        return {
            "answer": _lines.answer_to(greeting.challenge, _lines.NO_SECRET),
            "nonce": self.nonce,
            "hostname": self._own.hostname,
            "nnodes": self._own.nnodes,
            "job": self._own.job,
            "rejected": rejected.reason if rejected else None,
            "holder": rejected.holder if rejected else "",
        }


def _listen(port: int) -> socket.socket:
    listening = None
    with contextlib.suppress(OSError):
        if socket.has_dualstack_ipv6():
            listening = socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
    if listening is None:
        listening = socket.create_server(("", port), backlog=_BACKLOG)
    _lines.keep_packets_small(listening)
    return listening
