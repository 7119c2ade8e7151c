"""The dialling half of the mesh: one connection, from the first packet to the last of 64 KiB."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ddpsafe.doctor._mesh import _lines
from ddpsafe.doctor._mesh._kernel import find_tcp_state, is_silent_neighbour
from ddpsafe.doctor._mesh._listener import BULK_BYTES

if TYPE_CHECKING:
    from ddpsafe.doctor._matrix import Verdict
    from ddpsafe.doctor._mesh._board import Json

CONNECT_S: Final = 2.5
"""Covers three attempts of the kernel: at once, after 1 s and after 2 s (3 s before Linux 6.5)."""

ANSWER_S: Final = 4.0
"""The process on the other side may wait for its CPU; its kernel has long accepted."""

_BULK_S: Final = 2.5
_LOOK_S: Final = 0.1
_LOST_AFTER: Final = 3  # retransmissions in a row without a sign of life: 1.4 s
SMALLER_MTUS_BYTES: Final = (1500, 1400)
_HEADERS_BYTES: Final = 52  # IPv4, TCP and its timestamps


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialled:
    """What became of one connection.

    Attributes:
        target: Whom it was to reach.
        verdict: What became of it.
        latency_s: Round trip of a small packet.
        bandwidth_bytes_per_s: Rough, of one burst.
        said: What the system said.
        took_s: Until the verdict was clear.
        segment_bytes: The most the kernel put into one packet, where large ones were lost.
        passing_mtu_bytes: An MTU with which the same came through, where large ones were lost.
    """

    target: int
    verdict: Verdict
    latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    said: str = ""
    took_s: float = 0.0
    segment_bytes: int = 0
    passing_mtu_bytes: int = 0

    def to_json(self) -> Json:
        """Return it as a short row."""
        latency = None if self.latency_s is None else round(self.latency_s, 7)
        bandwidth = self.bandwidth_bytes_per_s
        return [
            self.target,
            self.verdict,
            latency,
            None if bandwidth is None else round(bandwidth),
            self.said,
            round(self.took_s, 3),
            self.segment_bytes,
            self.passing_mtu_bytes,
        ]

    @classmethod
    def from_json(cls, row: Json) -> Dialled:
        """Read it from a row.

        Raises:
            ValueError: It is no such row.
        """
        try:
            target, verdict, latency, bandwidth, said, took_s, segment, passing = row  # type: ignore[misc, union-attr]
        except TypeError as exc:
            raise ValueError(f"{row!r} is no row") from exc
        return cls(
            target=int(str(target)),
            verdict=verdict,  # type: ignore[arg-type]
            latency_s=None if latency is None else float(str(latency)),
            bandwidth_bytes_per_s=None if bandwidth is None else float(str(bandwidth)),
            said=str(said)[:200],
            took_s=float(str(took_s)),
            segment_bytes=int(str(segment)),
            passing_mtu_bytes=int(str(passing)),
        )


async def dial(
    *, source: int, target: int, address: str, port: int, token: str
) -> Dialled:
    """Open a connection to a node as a rank of this host would, and say what became of it."""
    started_s = time.monotonic()
    call = _Call(source=source, target=target, token=token, to=(address, port))
    found = await call.make(mss_bytes=0)
    if found.verdict == "large-lost":
        for mtu_bytes in SMALLER_MTUS_BYTES:
            if mtu_bytes >= found.segment_bytes + _HEADERS_BYTES:
                continue
            again = await call.make(mss_bytes=mtu_bytes - _HEADERS_BYTES)
            if again.verdict == "open":
                found = replace(found, passing_mtu_bytes=mtu_bytes)
                break
    return replace(found, took_s=time.monotonic() - started_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    source: int
    target: int
    token: str
    to: tuple[str, int]

    async def make(self, *, mss_bytes: int) -> Dialled:
        family = socket.AF_INET6 if ":" in self.to[0] else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
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
            await asyncio.wait_for(loop.sock_connect(connection, self.to), CONNECT_S)
        except (asyncio.TimeoutError, TimeoutError):
            return self._unanswered()
        except OSError as exc:
            return self._failed(exc)
        try:
            return await self._talk(connection)
        except OSError as exc:
            return self._failed(exc)

    def _unanswered(self) -> Dialled:
        if is_silent_neighbour(self.to[0]):
            return self._verdict("no-route", said="no answer to ARP")
        return self._verdict("dropped", said=f"no answer within {CONNECT_S} s")

    def _failed(self, exc: OSError) -> Dialled:
        said = errno.errorcode.get(exc.errno or 0, str(exc))
        refused = exc.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)
        return self._verdict("refused" if refused else "no-route", said=said)

    async def _talk(self, connection: socket.socket) -> Dialled:
        loop = asyncio.get_running_loop()
        challenge = secrets.token_hex(8)
        greeting = _lines.encode({"from": self.source, "challenge": challenge})
        await loop.sock_sendall(connection, greeting)
        answer = await _read_line(connection, ANSWER_S)
        if answer is None:
            return self._verdict("wrong-peer", said=f"accepted, then silent for {ANSWER_S} s")
        if answer != _lines.encode({"answer": _lines.answer_to(challenge, self.token)}):
            said = "closed the connection" if not answer else f"answered {answer[:40]!r}"
            return self._verdict("wrong-peer", said=said)
        state = find_tcp_state(connection)
        latency_s = state.round_trip_s if state is not None else None
        started_s = time.monotonic()
        if await _send_bulk(connection):
            took_s = max(1e-6, time.monotonic() - started_s - (latency_s or 0.0))
            return replace(
                self._verdict("open"), latency_s=latency_s, bandwidth_bytes_per_s=BULK_BYTES / took_s
            )
        return replace(self._large_lost(connection), latency_s=latency_s)

    def _large_lost(self, connection: socket.socket) -> Dialled:
        state = find_tcp_state(connection)
        if state is None:
            return self._verdict("large-lost")
        said = (
            f"{state.retransmits} retransmissions, segments of {state.segment_bytes} bytes, "
            f"path MTU {state.path_mtu_bytes} bytes"
        )
        found = self._verdict("large-lost", said=said)
        return replace(found, segment_bytes=state.segment_bytes)

    def _verdict(self, verdict: Verdict, *, said: str = "") -> Dialled:
        return Dialled(target=self.target, verdict=verdict, said=said)


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
