"""The listening half of the mesh: proves who it is, swallows what is sent, and says how much."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Final

from ddpsafe.doctor._mesh import _lines

BULK_BYTES: Final = 64 << 10
"""What each dialler sends: more than any packet, less than any buffer."""

_LONGEST_LINE_BYTES: Final = 512
_CONVERSATION_S: Final = 15.0


class Listener:
    """Answers the other nodes on one ephemeral port.

    Args:
        token: What proves that it is this node.
        capacity: How many connections it serves at a time.
    """

    def __init__(self, *, token: str, capacity: int) -> None:
        """Start with nobody heard."""
        self.received_bytes: dict[int, int] = {}
        self._token = token
        self._capacity = capacity
        self._conversations: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self, address: str) -> int:
        """Listen on an address, on a port the system chooses; return it.

        Raises:
            OSError: The address is not this host's.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family, backlog=1024)
        self._server = await asyncio.start_server(
            self._receive, sock=listening, limit=_LONGEST_LINE_BYTES
        )
        return int(listening.getsockname()[1])

    async def close(self) -> None:
        """Stop."""
        if self._server is not None:
            self._server.close()
        for conversation in self._conversations:
            conversation.cancel()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs every connection as a task
        self._conversations.add(task)
        try:
            if len(self._conversations) <= self._capacity:
                await asyncio.wait_for(self._converse(reader, writer), _CONVERSATION_S)
        except (OSError, _lines.StrangerError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:  # by close(); Python before 3.12 would report it
            pass
        finally:
            self._conversations.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        message = await _lines.read(reader)
        if message is None:
            return
        source, challenge = int(str(message.get("from"))), str(message.get("challenge"))
        self.received_bytes[source] = 0
        writer.write(_lines.encode({"answer": _lines.answer_to(challenge, self._token)}))
        while self.received_bytes[source] < BULK_BYTES:
            chunk = await reader.read(BULK_BYTES)
            if not chunk:
                return
            self.received_bytes[source] += len(chunk)
        writer.write(_lines.encode({"bytes": self.received_bytes[source]}))
        with contextlib.suppress(OSError):
            await writer.drain()
        await reader.read(1)  # the dialler closes first, so that its port does the waiting
