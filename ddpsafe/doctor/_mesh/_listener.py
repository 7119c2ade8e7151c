"""The listening half of the mesh: proves who it is, swallows what is sent, and says how much."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from dataclasses import dataclass
from typing import Final

from ddpsafe.doctor._mesh import _lines
from ddpsafe.doctor._mesh._messages import Hex, Rank, read

BULK_BYTES: Final = 64 << 10
"""What each dialler sends: more than any packet, less than any buffer."""

_LONGEST_LINE_BYTES: Final = 512
_CONVERSATION_S: Final = 15.0
_STRANGERS: Final = 256
"""Also for the connections by which a dialler measures loss and the size of packets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What who dials says first.

    Attributes:
        source: Its node rank.
        challenge: What only the node that was dialled can answer.
    """

    source: Rank
    challenge: Hex


class Listener:
    """Answers the other nodes on one ephemeral port.

    Args:
        token: What proves that it is this node.
        secret: What all nodes know; empty where there is none.
        nnodes: How many nodes there are.
    """

    def __init__(self, *, token: str, secret: str, nnodes: int) -> None:
        """Start with nobody heard."""
        self.received_bytes: dict[int, int] = {}
        self._token, self._secret = token, secret
        self._expected = range(nnodes)
        self._visitors = _lines.Visitors(
            most=nnodes * 2 + _STRANGERS, per_address=nnodes * 2 + _STRANGERS
        )
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
        self._visitors.admit(task, str((writer.get_extra_info("peername") or ("",))[0]))
        try:
            await asyncio.wait_for(self._converse(reader, writer), _CONVERSATION_S)
        except (OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:  # by close() or to make room; Python < 3.12 would report it
            pass
        finally:
            self._conversations.discard(task)
            self._visitors.forget(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A line without end is a ValueError, what is no call is one too.
        call = read(Call, json.loads(await reader.readline() or "null"))
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - as above
        self._visitors.forget(task)
        if call.source not in self._expected:
            return
        self.received_bytes.setdefault(call.source, 0)
        proof = _lines.prove(call.challenge, self._secret + self._token)
        writer.write(_lines.encode({"answer": proof}))
        received = 0
        while received < BULK_BYTES:
            chunk = await reader.read(BULK_BYTES)
            if not chunk:
                return
            received += len(chunk)
            self.received_bytes[call.source] = max(received, self.received_bytes[call.source])
        writer.write(_lines.encode({"bytes": received}))
        with contextlib.suppress(OSError):
            await writer.drain()
        await reader.read(1)  # the dialler closes first, so that its port does the waiting
