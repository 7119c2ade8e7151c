"""One connection between two hosts, both ends: who answers, and whether 64 KiB arrive."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import secrets
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpsafe.doctor._mesh.connection import (
    UnknownPeers,
    encode,
    prove,
)
from ddpsafe.doctor._mesh.protocol import Contact, Dialled, Hex, Rank, read
from ddpsafe.doctor._system.tcp import find_tcp_state, is_silent_neighbour

if TYPE_CHECKING:
    from ddpsafe.doctor._findings import DialResult
    from ddpsafe.doctor._mesh.protocol import Reason


BULK_BYTES: Final = 64 << 10
"""What each dialler sends: more than any packet, less than any buffer."""

_LONGEST_LINE_BYTES: Final = 512
_CONVERSATION_S: Final = 15.0
_UNKNOWN_PEERS: Final = 256
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
        """Start with no node heard."""
        self.received_bytes: dict[int, int] = {}
        self._token, self._secret = token, secret
        self._expected = range(nnodes)
        self._unknown_peers = UnknownPeers(
            most=nnodes * 2 + _UNKNOWN_PEERS, per_address=nnodes * 2 + _UNKNOWN_PEERS
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
        self._unknown_peers.admit(task, str((writer.get_extra_info("peername") or ("",))[0]))
        try:
            await asyncio.wait_for(self._converse(reader, writer), _CONVERSATION_S)
        except (OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:  # by close() or to make room; Python < 3.12 would report it
            pass
        finally:
            self._conversations.discard(task)
            self._unknown_peers.forget(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A line without an end is a ValueError, and so is what is not a call.
        call = read(Call, json.loads(await reader.readline() or "null"))
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - as above
        self._unknown_peers.forget(task)
        if call.source not in self._expected:
            return
        self.received_bytes.setdefault(call.source, 0)
        proof = prove(call.challenge, self._secret + self._token)
        writer.write(encode({"answer": proof}))
        received = 0
        while received < BULK_BYTES:
            chunk = await reader.read(BULK_BYTES)
            if not chunk:
                return
            received += len(chunk)
            self.received_bytes[call.source] = max(received, self.received_bytes[call.source])
        writer.write(encode({"bytes": received}))
        with contextlib.suppress(OSError):
            await writer.drain()
        await reader.read(1)  # the dialler closes first, so that its port does the waiting


CONNECT_S: Final = 2.5
"""Covers three attempts of the kernel: at once, after 1 s and after 2 s (3 s before Linux 6.5)."""

ANSWER_S: Final = 3.0
"""The kernel on the other side accepts at once; its process may wait for a CPU. Should it come
later still, it says itself that it was dialled."""

SMALLEST_MTU_BYTES: Final = {4: 576, 6: 1280}
"""What every host, and with IPv6 every link, has to take (RFC 791, RFC 8200)."""

_BULK_S: Final = 2.5
_SEARCH_S: Final = 1.5
_SLOW_BULK_S: Final = 7.0
"""As long as packets arrive: a slow link or one with a long round trip is not a broken one."""
_LOOK_S: Final = 0.1
_LOST_AFTER: Final = 3  # retransmissions in a row without a sign of life: 1.4 s
_SMALL_WRITES: Final = 64
"""Of 100 connections 96 lose at least one packet with 5 % of loss, all with 12 %."""
_SMALL_AT_ONCE: Final = 8
"""Beyond its first window of 10 packets the kernel puts writes together into fewer packets."""
_SMALL_S: Final = 1.0
"""What waiting for their acknowledgements may take in all."""
_SMALL_BYTES: Final = 64
_BEYOND_SMALL_BYTES: Final = 512
_SECOND_CALLS: Final = 2
_SECOND_AFTER_S: Final = 1.0
_LOSS_CALLS: Final = 8
_STEPS: Final = 32
_EXACT_BYTES: Final = 8
_USUAL_MTU_BYTES: Final = 1500
_SEARCHES: Final = 4
_HEADERS_BYTES: Final = {4: 40, 6: 60}
"""IP and TCP. Options of TCP are not added: the kernel takes them out of TCP_MAXSEG itself."""


async def dial(
    source: int, contact: Contact, *, secret: str = "", mtu_bytes: int = 1500
) -> Dialled:
    """Open a connection to a node as a rank of this host would, and say what became of it.

    Args:
        source: Node rank of this host.
        contact: The other node.
        secret: What all nodes know; empty where there is none.
        mtu_bytes: Of the interface that the connection leaves by.
    """
    started_s = time.monotonic()
    if not contact.address or not contact.port:
        return Dialled(contact.node_rank, "no-route", reason="no-address")
    call = _Dial(source=source, contact=contact, secret=secret)
    found = await call.make(mss_bytes=0)
    if found.result == "large-lost":
        found = await _find_passing_mtu(call, found, mtu_bytes)
    if found.result == "open" and found.resent:
        # More where something was lost: one packet may have been bad luck.
        more = await asyncio.gather(*(call.make(mss_bytes=0) for _ in range(_LOSS_CALLS)))
        found = found._replace(
            packets=found.packets + sum(each.packets for each in more),
            resent=found.resent + sum(each.resent for each in more),
        )
    return found._replace(took_s=round(time.monotonic() - started_s, 3))


async def _find_passing_mtu(call: _Dial, lost: Dialled, mtu_bytes: int) -> Dialled:
    """Find the largest packets that arrive; or that it was mere loss, and large ones do arrive."""
    family = 6 if ":" in call.contact.address else 4
    largest = max(mtu_bytes, lost.segment_bytes + _HEADERS_BYTES[family])
    passing, failing = 0, largest + 1
    sizes = {largest, min(largest, _USUAL_MTU_BYTES), 1400, SMALLEST_MTU_BYTES[family]}
    for _ in range(_SEARCHES):
        tries = sorted(size for size in sizes if passing < size < failing)
        calls = [call.make(mss_bytes=size - _HEADERS_BYTES[family]) for size in tries]
        for size, again in zip(tries, await asyncio.gather(*calls), strict=True):
            if again.result == "open":
                passing = max(passing, size)
                if size == largest:
                    return again
            else:
                failing = min(failing, size)
        # Every round waits for packets that do not come. 1500 is the advice whatever else would pass.
        if passing in (0, _USUAL_MTU_BYTES) or failing - passing <= _EXACT_BYTES:
            break
        step = max(1, (failing - passing) // (_STEPS + 1))
        sizes = {passing + step * number for number in range(1, _STEPS + 1)}
    return lost._replace(passing_mtu_bytes=passing)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dial:
    source: int
    contact: Contact
    secret: str

    async def make(self, *, mss_bytes: int) -> Dialled:
        """Connect and talk; where no answer comes at once, knock again beside it.

        A lost packet is asked for again after 1 s and 3 s only: on a lossy network one connection
        in twenty would look like one that a firewall drops.
        """
        first = asyncio.ensure_future(self._connect(mss_bytes, CONNECT_S))
        done, _ = await asyncio.wait({first}, timeout=_SECOND_AFTER_S)
        calls = {first}
        if not done:
            left_s = CONNECT_S - _SECOND_AFTER_S
            again = (self._connect(mss_bytes, left_s) for _ in range(_SECOND_CALLS))
            calls |= set(map(asyncio.ensure_future, again))
        connected, failed = await _first_connected(calls)
        if connected is None:
            assert failed is not None  # noqa: S101 - one of them has ended
            return failed
        try:
            found = await self._talk(connected, lost_after=_LOST_AFTER if not mss_bytes else 2)
        except OSError as exc:
            return self._failed(exc)
        else:
            state = find_tcp_state(connected)
            if state is None:
                return found
            return found._replace(packets=state.packets, resent=state.resent)
        finally:
            connected.close()

    async def _connect(self, mss_bytes: int, limit_s: float) -> socket.socket | Dialled:
        family = socket.AF_INET6 if ":" in self.contact.address else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(0)
        loop = asyncio.get_running_loop()
        try:
            if mss_bytes:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, mss_bytes)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.wait_for(loop.sock_connect(connection, self.contact[1:3]), limit_s)
        except (asyncio.TimeoutError, TimeoutError):
            connection.close()
            if is_silent_neighbour(self.contact.address):
                return self._found("no-route", reason="no-arp")
            return self._found("dropped")
        except OSError as exc:
            connection.close()
            return self._failed(exc)
        except BaseException:
            connection.close()
            raise
        return connection

    def _failed(self, exc: OSError) -> Dialled:
        refused = exc.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)
        found = self._found("refused" if refused else "no-route")
        return found._replace(error=errno.errorcode.get(exc.errno or 0, ""))

    async def _talk(self, connection: socket.socket, *, lost_after: int) -> Dialled:
        loop = asyncio.get_running_loop()
        challenge = secrets.token_hex(8)
        greeting = encode({"source": self.source, "challenge": challenge})
        await loop.sock_sendall(connection, greeting)
        answer = await _read_line(connection, ANSWER_S)
        if answer is None:
            return self._found("wrong-peer", reason="silent")
        proof = prove(challenge, self.secret + self.contact.token)
        if answer != encode({"answer": proof}):
            # What it is stays unsaid: a node must not read to others what a port of a third says.
            return self._found("wrong-peer", reason="other-answer" if answer else "hung-up")
        state = find_tcp_state(connection)
        latency_s = state.round_trip_s if state is not None else None
        started_s = time.monotonic()
        if await _send_bulk(connection, lost_after):
            took_s = max(1e-6, time.monotonic() - started_s - (latency_s or 0.0))
            state = find_tcp_state(connection)
            arrived = BULK_BYTES if state is None else min(BULK_BYTES, state.acknowledged_bytes)
            measured = state.rate_bytes_per_s if state is not None else None
            return self._found("open")._replace(
                latency_s=latency_s,
                bandwidth_bytes_per_s=max(round(arrived / took_s), measured or 0),
            )
        return self._large_lost(connection)._replace(latency_s=latency_s)

    def _large_lost(self, connection: socket.socket) -> Dialled:
        state = find_tcp_state(connection)
        if state is None:
            return self._found("large-lost")
        return self._found("large-lost")._replace(
            retransmits=state.retransmits,
            segment_bytes=state.segment_bytes,
            path_mtu_bytes=state.path_mtu_bytes,
        )

    def _found(self, result: DialResult, *, reason: Reason = "") -> Dialled:
        return Dialled(self.contact.node_rank, result, reason=reason)


async def _first_connected(
    calls: set[asyncio.Task[socket.socket | Dialled]],
) -> tuple[socket.socket | None, Dialled | None]:
    """Wait for the first connection that opens, else for what became of the others."""
    connected: socket.socket | None = None
    failed: Dialled | None = None
    pending = calls
    while pending and connected is None:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            result = each.result()
            if isinstance(result, Dialled):
                # What says more than silence counts.
                failed = result if failed is None or failed.result == "dropped" else failed
            elif connected is None:
                connected = result
            else:
                result.close()
    for each in pending:
        each.cancel()
    return connected, failed


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


async def _send_bulk(connection: socket.socket, lost_after: int) -> bool:
    """Send more than a packet holds; tell whether large packets arrive."""
    before = find_tcp_state(connection)
    # Where a size is searched, packets of another size have been lost already: nothing has to be proved.
    is_search = lost_after != _LOST_AFTER
    small_bytes = 0 if is_search else _SMALL_WRITES * _SMALL_BYTES
    # Acknowledged beyond this, something has arrived that was larger than the small writes.
    large_bytes = small_bytes + _BEYOND_SMALL_BYTES
    large_bytes += before.acknowledged_bytes if before is not None else 0
    if not is_search:
        await _send_small(connection)
    acknowledged = asyncio.ensure_future(_exchange_bulk(connection, BULK_BYTES - small_bytes))
    started_s = time.monotonic()
    limit_s = _SEARCH_S if is_search else _BULK_S
    ends_s, arrived = started_s + limit_s, 0
    while time.monotonic() < ends_s:
        done, _ = await asyncio.wait({acknowledged}, timeout=_LOOK_S)
        if done:
            return acknowledged.result()
        state = find_tcp_state(connection)
        if state is None:
            continue
        if state.retransmits >= lost_after and state.acknowledged_bytes < large_bytes:
            break
        if state.acknowledged_bytes >= max(large_bytes, arrived + 1):
            arrived = state.acknowledged_bytes
            ends_s = min(time.monotonic() + _BULK_S, started_s + _SLOW_BULK_S)
    acknowledged.cancel()
    with contextlib.suppress(asyncio.CancelledError, OSError):
        await acknowledged
    # The other kernel has it all, and only the process there has not had its turn; or it is slow.
    state = find_tcp_state(connection)
    if state is None:
        return False
    is_delivered = not state.retransmits and not state.unacknowledged
    return is_delivered or state.acknowledged_bytes >= large_bytes


async def _send_small(connection: socket.socket) -> None:
    """Send packets of their own, so that loss shows; of more bytes the kernel makes a few large ones."""
    loop = asyncio.get_running_loop()
    ends_s = time.monotonic() + _SMALL_S
    for number in range(_SMALL_WRITES):
        state = find_tcp_state(connection) if number % _SMALL_AT_ONCE == 0 else None
        while state is not None and state.unacknowledged and time.monotonic() < ends_s:
            await asyncio.sleep(0.001)
            state = find_tcp_state(connection)
        await loop.sock_sendall(connection, bytes(_SMALL_BYTES))


async def _exchange_bulk(connection: socket.socket, size: int) -> bool:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, bytes(size))
    return await _read_line(connection, _SLOW_BULK_S) == encode({"bytes": BULK_BYTES})
