"""The wire format: one JSON object per line, of bounded length, signed if there is a secret.

A `Link` is one connection that carries such lines. `UnknownPeers` bounds the connections that have not
identified themselves, so that they cannot keep nodes out.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
from collections import Counter
from typing import TYPE_CHECKING, Final, TypeVar

from ddpsafe.doctor._mesh.protocol import read, write

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from ddpsafe.doctor._mesh.transport import Json

T = TypeVar("T")

VERSION: Final = 3
"""The protocol version; doctors of different versions refuse each other."""

LONGEST_GREETING_BYTES: Final = 16 << 10
LONGEST_FROM_NODE_BYTES: Final = 4 << 20
LONGEST_FROM_COORDINATOR_BYTES: Final = 64 << 20

_CHUNK_BYTES: Final = 64 << 10
_SMALL_SEGMENT_BYTES: Final = 1160
"""With the headers of IPv6 and TCP, less than the 1280 bytes that every IPv6 link has to carry."""

_PROBE_INTERVAL_S: Final = 1
_LOST_AFTER_S: Final = 6


class NotADoctorError(Exception):
    """What was read is not a message of a doctor."""


class BadSignatureError(NotADoctorError):
    """The message is not signed with this node's secret.

    Attributes:
        message: The message, if it is of the expected kind.
    """

    def __init__(self, message: object = None) -> None:
        """Keep the message."""
        super().__init__("it does not have the secret of this node, or has another one")
        self.message = message


def make_nonce() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_hex(16)


def prove(challenge: str, secret: str) -> str:
    """Return the answer to a challenge, which takes knowledge of the secret."""
    return _sign(f"challenge {challenge}".encode(), secret)


def _sign(content: bytes, secret: str) -> str:
    return hmac.new(f"ddpsafe {secret}".encode(), content, hashlib.sha256).hexdigest()


def encode(message: Mapping[str, Json]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":"), default=str).encode() + b"\n"


def decode(line: bytes) -> dict[str, Json]:
    """Return the message of a line.

    Raises:
        NotADoctorError: It is not a JSON object.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise NotADoctorError("what it sent is not JSON") from exc
    if not isinstance(message, dict):
        raise NotADoctorError("what it sent is not a JSON object")
    return message


class Link:
    """One connection between two doctors.

    Args:
        reader: The connection's reader.
        writer: The connection's writer.
        secret: The secret of both sides; empty if there is none.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: str
    ) -> None:
        """Start with the greetings, which belong to no session."""
        self._reader, self._writer, self._secret = reader, writer, secret
        self._buffer = bytearray()
        self.begin_session("", is_node=True)

    @property
    def peer(self) -> str:
        """The address of the other side."""
        return str((self._writer.get_extra_info("peername") or ("",))[0])

    def begin_session(self, nonces: str, *, is_node: bool) -> None:
        """Bind the following signatures to this connection, the direction and the message number.

        Args:
            nonces: The nonces of both sides.
            is_node: Whether this side is the node, and the other one node rank 0.
        """
        self._session = nonces
        self._direction = ("node", "coordinator") if is_node else ("coordinator", "node")
        self._sent = self._received = 0

    def send(self, message: Mapping[str, Json]) -> None:
        """Send a message."""
        line = encode(message)
        if self._secret:
            proof = self._prove(self._direction[0], self._sent, line[:-1])
            line = line[:-1] + b"\t" + proof.encode() + b"\n"
        self._sent += 1
        self._writer.write(line)

    def send_greeting(self, message: object, *, context: str = "") -> None:
        """Send one of the first two messages, which are signed even without a secret.

        Args:
            message: A `Greeting` or an `Answer`.
            context: For an answer, the challenge of the greeting.
        """
        table = write(message)
        assert isinstance(table, dict)  # noqa: S101 - written from a dataclass
        self._writer.write(encode({**table, "proof": self._proof_of(table, context)}))

    async def receive_greeting(self, kind: type[T], *, context: str = "") -> T:
        """Read one of the first two messages.

        Raises:
            NotADoctorError: It is not a valid message of this version.
            BadSignatureError: It is signed with another secret.
            OSError: The connection broke.
        """
        line = await self._read_line(LONGEST_GREETING_BYTES)
        if line is None:
            raise NotADoctorError("it closed the connection")
        table = decode(line)
        proof = table.pop("proof", None)
        try:
            message = read(kind, table)
        except ValueError as exc:
            raise NotADoctorError("what it sent is not a message of this version") from exc
        expected = self._proof_of(table, context).encode()
        # JSON can contain lone surrogates, which cannot be encoded, so they are replaced.
        if not isinstance(proof, str) or not hmac.compare_digest(
            proof.encode(errors="replace"), expected
        ):
            raise BadSignatureError(message)
        return message

    async def receive(self, limit_bytes: int) -> dict[str, Json] | None:
        """Read the next message; None at the end of the connection.

        Raises:
            NotADoctorError: The line is too long, not a JSON object, or not properly signed.
            OSError: The connection broke.
        """
        line = await self._read_line(limit_bytes)
        if line is None:
            return None
        if self._secret:
            line, _, proof = line.rpartition(b"\t")
            expected = self._prove(self._direction[1], self._received, line)
            if not hmac.compare_digest(proof, expected.encode()):
                raise BadSignatureError
        self._received += 1
        return decode(line)

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

    def _proof_of(self, table: Mapping[str, Json], context: str) -> str:
        content = json.dumps([context, table], sort_keys=True, default=str)
        return _sign(content.encode(), self._secret)

    def _prove(self, direction: str, number: int, line: bytes) -> str:
        head = f"{self._session} {direction} {number} ".encode()
        return _sign(head + line, self._secret)

    async def _read_line(self, limit_bytes: int) -> bytes | None:
        """Read up to the end of a line; None at the end of the connection."""
        searched = 0
        while True:
            end = self._buffer.find(b"\n", searched)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                return line
            searched = len(self._buffer)
            if searched > limit_bytes:
                raise NotADoctorError("it sent a line without end")
            chunk = await self._reader.read(_CHUNK_BYTES)
            if not chunk:
                return None
            self._buffer += chunk


class UnknownPeers:
    """Connections whose other side has not identified itself yet.

    If there are too many, the oldest one of the address that has most of them is ended. Silent peers
    make room in this way, and one address cannot use up the places of the others.

    Args:
        most: How many there may be in total.
        per_address: How many one address may have.
    """

    def __init__(self, *, most: int, per_address: int) -> None:
        """Start without any connection."""
        self._most, self._per_address = most, per_address
        self._waiting: dict[asyncio.Task[None], str] = {}

    def admit(self, task: asyncio.Task[None], address: str) -> None:
        """Add a connection, and end another one if there are too many."""
        self._waiting[task] = address
        counts = Counter(self._waiting.values())
        crowded = len(self._waiting) > self._most
        if crowded or counts[address] > self._per_address:
            busiest = counts.most_common(1)[0][0] if crowded else address
            oldest = next(each for each, where in self._waiting.items() if where == busiest)
            self.forget(oldest)
            oldest.cancel()

    def forget(self, task: asyncio.Task[None]) -> None:
        """Remove a connection that is known now, or has ended."""
        self._waiting.pop(task, None)


def keep_packets_small(connection: socket.socket) -> None:
    """Make both sides send small packets; call it before connecting, or on a listening socket.

    The report on a network that loses large packets must itself get through.
    """
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_SEGMENT_BYTES)


def notice_loss(connection: socket.socket) -> None:
    """Make the kernel detect within 6 s that the other host is lost.

    It sends keep-alive probes on an idle connection. Unlike a heartbeat of ddpsafe's own, they
    continue while this process waits for a busy CPU. Five have to be lost: a network that loses one
    packet in eight sometimes loses two in a row.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with contextlib.suppress(AttributeError, OSError):  # not all systems have these options
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_INTERVAL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_INTERVAL_S)
        probes = _LOST_AFTER_S // _PROBE_INTERVAL_S - 1
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _LOST_AFTER_S * 1000)
