"""One connection between two hosts, both ends: what answers, and whether 64 KiB arrive."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from ddpsafe._host import family_of
from ddpsafe._job.channel import from_json, oldest_of_busiest_host, prove
from ddpsafe._job.secret import key_of_secret
from ddpsafe.doctor._mesh.protocol import Contact, Dialled, Hex, Rank
from ddpsafe.doctor._system.tcp import find_tcp_state, is_silent_neighbour

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddpsafe.doctor._findings import DialResult
    from ddpsafe.doctor._mesh.protocol import Reason
    from ddpsafe.doctor._mesh.transport import Json


BULK_BYTES: Final = 64 << 10
"""What each dialler sends: more than any packet, less than any buffer."""

_LONGEST_LINE_BYTES: Final = 512
_CALL_LIMIT_S: Final = 15.0
# Connections of unknown programs, beside two of each node. Includes the extra connections with which
# diallers measure loss and packet sizes.
_MAX_UNKNOWN: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The first message of a dialler.

    Attributes:
        challenge: A nonce that only the dialled node can answer.
    """

    source: Rank
    challenge: Hex


def encode(message: Mapping[str, Json]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _proof(call: Call, token: str, secret: str) -> str:
    """Return the answer to a call, which takes knowledge of the node's token and of the secret."""
    return prove(key_of_secret(secret + token), "listener", "", call.source, call.challenge)


class Listener:
    """Answers the other nodes on one ephemeral port.

    The token proves the identity of this node. The secret is empty if the nodes have none.
    """

    def __init__(self, *, token: str, secret: str, nnodes: int) -> None:
        self.received_bytes: dict[int, int] = {}
        self._token = token
        self._secret = secret
        self._nnodes = nnodes
        self._unknown: dict[asyncio.Task[None], str] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self, address: str) -> int:
        """Listen on an address and a port that the system chooses; return the port.

        Raises:
            OSError: This host does not have the address.
        """
        listening = socket.create_server((address, 0), family=family_of(address), backlog=1024)
        self._server = await asyncio.start_server(
            self._receive, sock=listening, limit=_LONGEST_LINE_BYTES
        )
        return int(listening.getsockname()[1])

    async def close(self) -> None:
        """Stop listening and end all calls."""
        if self._server is not None:
            self._server.close()
        for call in self._calls:
            call.cancel()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs every connection as a task
        self._calls.add(task)
        self._unknown[task] = str((writer.get_extra_info("peername") or ("",))[0])
        # A flood of calls that say nothing must not keep the nodes out.
        if len(self._unknown) > self._nnodes * 2 + _MAX_UNKNOWN:
            oldest = oldest_of_busiest_host(self._unknown)
            del self._unknown[oldest]
            oldest.cancel()
        try:
            await asyncio.wait_for(self._answer(reader, writer, task), _CALL_LIMIT_S)
        except (OSError, ValueError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:  # by close() or to make room; Python < 3.12 would report it
            pass
        finally:
            self._calls.discard(task)
            self._unknown.pop(task, None)
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> None:
        # An endless line and an invalid call both raise ValueError.
        call = from_json(Call, json.loads(await reader.readline() or "null"))
        self._unknown.pop(task, None)
        if call.source >= self._nnodes:
            return
        self.received_bytes.setdefault(call.source, 0)
        writer.write(encode({"answer": _proof(call, self._token, self._secret)}))
        received = 0
        while received < BULK_BYTES:
            chunk = await reader.read(BULK_BYTES)
            if not chunk:
                return
            received += len(chunk)
            # A node dials more than once, to measure loss and packet sizes.
            self.received_bytes[call.source] = max(received, self.received_bytes[call.source])
        writer.write(encode({"bytes": received}))
        with contextlib.suppress(OSError):
            await writer.drain()
        await reader.read(1)  # the dialler closes first, so TIME_WAIT is on its side


CONNECT_S: Final = 2.5
"""Covers three attempts of the kernel: at once, after 1 s and after 2 s (3 s before Linux 6.5)."""

ANSWER_S: Final = 3.0
"""The other kernel accepts at once, but its process may wait for a CPU. If that takes even longer,
its report still lists this call (`NodeReport.heard`)."""

SMALLEST_MTU_BYTES: Final = {4: 576, 6: 1280}
"""What every host, and for IPv6 every link, has to support (RFC 791, RFC 8200)."""

_BULK_S: Final = 2.5
# If the host's own link drops large packets, the kernel counts no retransmissions, and every search
# takes all of this: the mesh took 5.4 s with 2.5 s, and 4.4 s with 1.5 s.
_SEARCH_S: Final = 1.5
# The limit while packets still arrive: a slow link or a long round trip is not a broken one.
_SLOW_BULK_S: Final = 7.0
_POLL_S: Final = 0.1
_LOST_AFTER: Final = 3  # consecutive retransmissions without an acknowledgement: 1.4 s
# With 5 % loss, 96 of 100 connections lose at least one of these packets; with 12 %, all do.
_SMALL_WRITES: Final = 64
# Beyond its initial window of 10 packets the kernel merges writes into fewer packets: with 32 writes
# at once, 31 of 34 lossy directions were seen under load; with 64, eight at a time, 56 of 56.
_SMALL_AT_ONCE: Final = 8
# The total time to wait for their acknowledgements.
_SMALL_S: Final = 1.0
_SMALL_BYTES: Final = 64
_BEYOND_SMALL_BYTES: Final = 512
_EXTRA_CONNECTS: Final = 2
_EXTRA_CONNECTS_AFTER_S: Final = 1.0
_LOSS_CALLS: Final = 8
# Many at a time, because each search waits for packets that do not arrive.
_SIZES_PER_SEARCH: Final = 32
_MTU_PRECISION_BYTES: Final = 8
_USUAL_MTU_BYTES: Final = 1500
_SEARCHES: Final = 4
# IP and TCP without options, which the kernel subtracts from TCP_MAXSEG itself.
_HEADERS_BYTES: Final = {4: 40, 6: 60}


async def dial(
    source: int, contact: Contact, *, secret: str = "", mtu_bytes: int = 1500
) -> Dialled:
    """Open a connection to a node as a rank of this host would, and return the outcome.

    The MTU is that of the interface that the connection leaves by; the secret is empty if the nodes have
    none.
    """
    started_s = time.monotonic()
    if not contact.address or not contact.port:
        return Dialled(contact.node_rank, "no-route", reason="no-address")
    call = _Dial(source=source, contact=contact, secret=secret)
    outcome = await call.make(mss_bytes=0)
    if outcome.result == "large-lost":
        outcome = await _find_passing_mtu(call, outcome, mtu_bytes)
    if outcome.result == "open" and outcome.resent:
        # Measure again with more connections: a single lost packet proves nothing.
        more = await asyncio.gather(*(call.make(mss_bytes=0) for _ in range(_LOSS_CALLS)))
        outcome = outcome._replace(
            packets=outcome.packets + sum(other.packets for other in more),
            resent=outcome.resent + sum(other.resent for other in more),
        )
    if outcome.result == "open" and outcome.path_mtu_bytes >= mtu_bytes:
        outcome = outcome._replace(path_mtu_bytes=0)
    return outcome._replace(took_s=round(time.monotonic() - started_s, 3))


async def _find_passing_mtu(call: _Dial, lost: Dialled, mtu_bytes: int) -> Dialled:
    """Find the largest packet size that arrives; all sizes do if the first try lost packets by chance."""
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
        # 1500 is the advice even if more would pass.
        if passing in (0, _USUAL_MTU_BYTES) or failing - passing <= _MTU_PRECISION_BYTES:
            break
        step = max(1, (failing - passing) // (_SIZES_PER_SEARCH + 1))
        sizes = {passing + step * number for number in range(1, _SIZES_PER_SEARCH + 1)}
    return lost._replace(passing_mtu_bytes=passing)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dial:
    source: int
    contact: Contact
    secret: str

    async def make(self, *, mss_bytes: int) -> Dialled:
        """Connect and exchange data; if the connection does not open soon, try more in parallel."""
        first = asyncio.ensure_future(self._connect(mss_bytes, CONNECT_S))
        done, _ = await asyncio.wait({first}, timeout=_EXTRA_CONNECTS_AFTER_S)
        calls = {first}
        if not done:
            # The kernel resends a lost SYN only after 1 s and 3 s. On a lossy network one connection
            # in twenty would look as if a firewall dropped it.
            left_s = CONNECT_S - _EXTRA_CONNECTS_AFTER_S
            again = (self._connect(mss_bytes, left_s) for _ in range(_EXTRA_CONNECTS))
            calls |= set(map(asyncio.ensure_future, again))
        connected, failed = await _first_connected(calls)
        if connected is None:
            assert failed is not None  # noqa: S101 - one of them has ended
            return failed
        try:
            outcome = await self._exchange(
                connected, lost_after=_LOST_AFTER if not mss_bytes else 2
            )
        except OSError as exc:
            return self._failed(exc)
        else:
            state = find_tcp_state(connected)
            if state is None:
                return outcome
            # The burst was sent in full packets: a router that carries less has said so by now.
            return outcome._replace(
                packets=state.packets, resent=state.resent, path_mtu_bytes=state.path_mtu_bytes
            )
        finally:
            connected.close()

    async def _connect(self, mss_bytes: int, limit_s: float) -> socket.socket | Dialled:
        connection = socket.socket(family_of(self.contact.address))
        connection.settimeout(0)
        loop = asyncio.get_running_loop()
        try:
            if mss_bytes:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, mss_bytes)
            # Otherwise the kernel joins the small writes that measure loss.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.wait_for(loop.sock_connect(connection, self.contact[1:3]), limit_s)
        except (asyncio.TimeoutError, TimeoutError):
            connection.close()
            if is_silent_neighbour(self.contact.address):
                return self._outcome("no-route", reason="no-arp")
            return self._outcome("dropped")
        except OSError as exc:
            connection.close()
            return self._failed(exc)
        except BaseException:
            connection.close()
            raise
        return connection

    def _failed(self, exc: OSError) -> Dialled:
        refused = exc.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE)
        outcome = self._outcome("refused" if refused else "no-route")
        return outcome._replace(error=errno.errorcode.get(exc.errno or 0, ""))

    async def _exchange(self, connection: socket.socket, *, lost_after: int) -> Dialled:
        loop = asyncio.get_running_loop()
        call = Call(source=self.source, challenge=secrets.token_hex(8))
        await loop.sock_sendall(connection, encode(asdict(call)))
        answer = await _read_line(connection, ANSWER_S)
        if answer is None:
            return self._outcome("wrong-peer", reason="silent")
        if answer != encode({"answer": _proof(call, self.contact.token, self.secret)}):
            # Do not report its bytes: a node must not disclose to others what a third host's port sends.
            return self._outcome("wrong-peer", reason="other-answer" if answer else "hung-up")
        state = find_tcp_state(connection)
        latency_s = state.round_trip_s if state is not None else None
        started_s = time.monotonic()
        if await _send_bulk(connection, lost_after):
            took_s = max(1e-6, time.monotonic() - started_s - (latency_s or 0.0))
            state = find_tcp_state(connection)
            arrived = BULK_BYTES if state is None else min(BULK_BYTES, state.acknowledged_bytes)
            measured = state.rate_bytes_per_s if state is not None else None
            return self._outcome("open")._replace(
                latency_s=latency_s,
                bandwidth_bytes_per_s=max(round(arrived / took_s), measured or 0),
            )
        lost = self._outcome("large-lost")._replace(latency_s=latency_s)
        state = find_tcp_state(connection)
        if state is None:
            return lost
        return lost._replace(
            retransmits=state.retransmits,
            segment_bytes=state.segment_bytes,
            path_mtu_bytes=state.path_mtu_bytes,
        )

    def _outcome(self, result: DialResult, *, reason: Reason = "") -> Dialled:
        return Dialled(self.contact.node_rank, result, reason=reason)


async def _first_connected(
    calls: set[asyncio.Task[socket.socket | Dialled]],
) -> tuple[socket.socket | None, Dialled | None]:
    """Return the first connection that opens, or else the most informative failure."""
    connected: socket.socket | None = None
    failed: Dialled | None = None
    pending = calls
    while pending and connected is None:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for call in done:
            result = call.result()
            if isinstance(result, Dialled):
                # Any other error is more informative than no answer.
                failed = result if failed is None or failed.result == "dropped" else failed
            elif connected is None:
                connected = result
            else:
                result.close()
    for call in pending:
        call.cancel()
    return connected, failed


async def _read_line(connection: socket.socket, limit_s: float) -> bytes | None:
    """Read up to the end of a line or of the connection; None on a timeout."""
    loop = asyncio.get_running_loop()
    line = b""
    with contextlib.suppress(ConnectionResetError):
        while not line.endswith(b"\n"):
            try:
                chunk = await asyncio.wait_for(loop.sock_recv(connection, 512), limit_s)
            except (asyncio.TimeoutError, TimeoutError):
                return None
            line += chunk
            if not chunk or len(line) > 512:  # noqa: PLR2004 - as in the call above
                break
    return line


async def _send_bulk(connection: socket.socket, lost_after: int) -> bool:
    """Send more than fits into a packet; return whether large packets arrive."""
    before = find_tcp_state(connection)
    # A search follows a loss of large packets, so it need not tell loss from size with small ones.
    # Waiting for their acknowledgements left it too little time: at 12 % loss, 8 of 60 connections
    # were taken for an MTU black hole, and 3 of 60 without them.
    is_search = lost_after != _LOST_AFTER
    small_bytes = 0 if is_search else _SMALL_WRITES * _SMALL_BYTES
    # More acknowledged bytes than this mean that a packet larger than the small writes has arrived.
    large_bytes = small_bytes + _BEYOND_SMALL_BYTES
    large_bytes += before.acknowledged_bytes if before is not None else 0
    if not is_search:
        await _send_small(connection)
    acknowledged = asyncio.ensure_future(_exchange_bulk(connection, BULK_BYTES - small_bytes))
    started_s = time.monotonic()
    limit_s = _SEARCH_S if is_search else _BULK_S
    ends_s, arrived = started_s + limit_s, 0
    while time.monotonic() < ends_s:
        done, _ = await asyncio.wait({acknowledged}, timeout=_POLL_S)
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
    # The other kernel may have all of it while its process waits for a CPU; or the link is slow.
    state = find_tcp_state(connection)
    if state is None:
        return False
    is_delivered = not state.retransmits and not state.unacknowledged
    return is_delivered or state.acknowledged_bytes >= large_bytes


async def _send_small(connection: socket.socket) -> None:
    """Send many small packets, so that loss shows: the kernel sends bulk data in a few large ones."""
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
