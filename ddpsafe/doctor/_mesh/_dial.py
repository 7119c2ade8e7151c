"""The dialling half of the mesh: one connection, from the first packet to the last of 64 KiB."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpsafe.doctor._mesh import _lines
from ddpsafe.doctor._mesh._kernel import find_tcp_state, is_silent_neighbour
from ddpsafe.doctor._mesh._listener import BULK_BYTES
from ddpsafe.doctor._mesh._messages import Contact, Dialled

if TYPE_CHECKING:
    from ddpsafe.doctor._matrix import Verdict
    from ddpsafe.doctor._mesh._messages import Reason

CONNECT_S: Final = 2.5
"""Covers three attempts of the kernel: at once, after 1 s and after 2 s (3 s before Linux 6.5)."""

ANSWER_S: Final = 3.0
"""The kernel on the other side accepts at once; its process may wait for a CPU. Should it come
later still, it says itself that it was dialled."""

_BULK_S: Final = 2.5
_LOOK_S: Final = 0.1
_LOST_AFTER: Final = 3  # retransmissions in a row without a sign of life: 1.4 s
SMALLER_MTUS_BYTES: Final = (1500, 1400)
_HEADERS_BYTES: Final = 52  # IPv4, TCP and its timestamps


async def dial(source: int, contact: Contact, *, secret: str = "") -> Dialled:
    """Open a connection to a node as a rank of this host would, and say what became of it."""
    started_s = time.monotonic()
    if not contact.address or not contact.port:
        return Dialled(contact.node_rank, "no-route", reason="no-address")
    call = _Call(source=source, contact=contact, secret=secret)
    found = await call.make(mss_bytes=0)
    if found.verdict == "large-lost":
        for mtu_bytes in SMALLER_MTUS_BYTES:
            if mtu_bytes >= found.segment_bytes + _HEADERS_BYTES:
                continue
            again = await call.make(mss_bytes=mtu_bytes - _HEADERS_BYTES)
            if again.verdict == "open":
                found = found._replace(passing_mtu_bytes=mtu_bytes)
                break
    return found._replace(took_s=round(time.monotonic() - started_s, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    source: int
    contact: Contact
    secret: str

    async def make(self, *, mss_bytes: int) -> Dialled:
        family = socket.AF_INET6 if ":" in self.contact.address else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(0)
        try:
            if mss_bytes:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, mss_bytes)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return await self._connect_and_talk(connection)
        finally:
            connection.close()

    async def _connect_and_talk(self, connection: socket.socket) -> Dialled:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(loop.sock_connect(connection, self.contact[1:3]), CONNECT_S)
        except (asyncio.TimeoutError, TimeoutError):
            return self._unanswered()
        except OSError as exc:
            return self._failed(exc)
        try:
            return await self._talk(connection)
        except OSError as exc:
            return self._failed(exc)

    def _unanswered(self) -> Dialled:
        if is_silent_neighbour(self.contact.address):
            return self._verdict("no-route", reason="no-arp")
        return self._verdict("dropped")

    def _failed(self, exc: OSError) -> Dialled:
        refused = exc.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)
        found = self._verdict("refused" if refused else "no-route")
        return found._replace(error=errno.errorcode.get(exc.errno or 0, ""))

    async def _talk(self, connection: socket.socket) -> Dialled:
        loop = asyncio.get_running_loop()
        challenge = secrets.token_hex(8)
        greeting = _lines.encode({"source": self.source, "challenge": challenge})
        await loop.sock_sendall(connection, greeting)
        answer = await _read_line(connection, ANSWER_S)
        if answer is None:
            return self._verdict("wrong-peer", reason="silent")
        proof = _lines.prove(challenge, self.secret + self.contact.token)
        if answer != _lines.encode({"answer": proof}):
            # What it is stays unsaid: a node must not read to others what a port of a third says.
            return self._verdict("wrong-peer", reason="other-answer" if answer else "hung-up")
        state = find_tcp_state(connection)
        latency_s = state.round_trip_s if state is not None else None
        started_s = time.monotonic()
        if await _send_bulk(connection):
            took_s = max(1e-6, time.monotonic() - started_s - (latency_s or 0.0))
            return self._verdict("open")._replace(
                latency_s=latency_s, bandwidth_bytes_per_s=round(BULK_BYTES / took_s)
            )
        return self._large_lost(connection)._replace(latency_s=latency_s)

    def _large_lost(self, connection: socket.socket) -> Dialled:
        state = find_tcp_state(connection)
        if state is None:
            return self._verdict("large-lost")
        return self._verdict("large-lost")._replace(
            retransmits=state.retransmits,
            segment_bytes=state.segment_bytes,
            path_mtu_bytes=state.path_mtu_bytes,
        )

    def _verdict(self, verdict: Verdict, *, reason: Reason = "") -> Dialled:
        return Dialled(self.contact.node_rank, verdict, reason=reason)


async def _read_line(connection: socket.socket, limit_s: float) -> bytes | None:
    """Read up to the end of a line or of the connection; None if neither comes."""
    loop = asyncio.get_running_loop()
    line = b""
    with contextlib.suppress(ConnectionResetError):
        while not line.endswith(b"\n"):
            try:
                chunk = await asyncio.wait_for(loop.sock_recv(connection, 512), limit_s)
            except (asyncio.TimeoutError, TimeoutError):
                return None
            line += chunk
            if not chunk or len(line) > 512:  # noqa: PLR2004 - as much as was asked for
                break
    return line


async def _send_bulk(connection: socket.socket) -> bool:
    """Send more than a packet holds; tell whether the other side got all of it."""
    loop = asyncio.get_running_loop()
    acknowledged = asyncio.ensure_future(_exchange_bulk(loop, connection))
    ends_s = time.monotonic() + _BULK_S
    while time.monotonic() < ends_s:
        done, _ = await asyncio.wait({acknowledged}, timeout=_LOOK_S)
        if done:
            return acknowledged.result()
        state = find_tcp_state(connection)
        if state is not None and state.retransmits >= _LOST_AFTER:
            break
    acknowledged.cancel()
    with contextlib.suppress(asyncio.CancelledError, OSError):
        await acknowledged
    # The other kernel has it all: only the process there has not had its turn yet.
    state = find_tcp_state(connection)
    return state is not None and not state.retransmits and not state.unacknowledged


async def _exchange_bulk(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bool:
    await loop.sock_sendall(connection, bytes(BULK_BYTES))
    return await _read_line(connection, _BULK_S) == _lines.encode({"bytes": BULK_BYTES})
