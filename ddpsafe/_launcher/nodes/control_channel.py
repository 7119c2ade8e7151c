"""The control channel of a round: one TCP connection from each participant to node 0.

The store cannot tell that a launcher has died, and its calls have no deadline once its host has
vanished. Here the kernel tells: the end of a connection within milliseconds, a host without power
or network after three keep-alives, without any clock or heartbeat that a busy processor delays.

A thread reads and writes, so that neither waits for a peer; `Channel.events` hands over what came.
It also says each second that this launcher runs, which is then silent only where it is stopped or
starved: not while it waits for the ends of ranks, say.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import math
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from ddpsafe._clock import Deadline
from ddpsafe._launcher.nodes.node_messages import (
    Alive,
    GarbledError,
    NodeMessage,
    NodeProgress,
    pack,
    unpack,
)
from ddpsafe._logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

logger = get_logger(__name__)

LOSS_S: Final = 3.5
"""After so many seconds without an answer of its kernel a host is lost.

A packet is sent again 0.2, 0.6, 1.4 and 3.0 s after the first time: the last of them still reaches
a network that is back by then.
"""

_MAX_LINE: Final = 16 << 20
_MAX_GREETING: Final = 4096
_GREETING_S: Final = 5.0
_MOST_UNKNOWN: Final = 128
_CHUNK: Final = 1 << 16
BEAT_S: Final = 1.0
_BEAT: Final = timedelta(seconds=BEAT_S)
_MOST_UNANSWERED: Final = 100
"""More beats than that would fill the buffer of a launcher that is stopped: its host would pass for lost."""

_FLUSH_S: Final = 1.0
_VERSION: Final = "ddpsafe-nodes-1"
_TCP_INFO_BYTES: Final = 60
_LAST_RECEIVED: Final = 52
"""Where ``tcpi_last_data_recv`` and ``tcpi_last_ack_recv`` are in ``struct tcp_info``, milliseconds both."""

_ROUTINE: Final = (Alive, NodeProgress)
"""What comes every second from every node, and wakes no watch."""


_SILENCE_S: Final = 15.0
_STOPPED_S: Final = 3.0
"""Who has not looked for so long was stopped itself, or starved: it looks every second."""


class SilenceWatch:
    """Names a launcher that says nothing while its connection stands; its ranks may go on.

    Attributes:
        silent: The nodes that are named now.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        """Take all of `names` as heard of just now."""
        self._names = names
        self._looked_s = time.monotonic()
        self._heard_s = dict.fromkeys(names, self._looked_s)
        self.silent: set[int] = set()

    def heard(self, node: int) -> None:
        """Note that a launcher has said something."""
        self._heard_s[node] = time.monotonic()
        if node in self.silent:
            self.silent.discard(node)
            logger.warning("%s: its launcher responds again", self._names[node])

    def unanswered_s(self, node: int, since_s: float) -> float:
        """Return for how long a launcher has said nothing since a moment (monotonic), in seconds."""
        return time.monotonic() - max(since_s, self._heard_s[node])

    def look(self, connected: Collection[int]) -> None:
        """Warn, once, of each connected launcher that has said nothing for long."""
        before_s, self._looked_s = self._looked_s, time.monotonic()
        if self._looked_s - before_s > _STOPPED_S:
            self._heard_s = dict.fromkeys(self._names, self._looked_s)
        for node in sorted(set(connected) & self._names.keys() - self.silent):
            if self._looked_s - self._heard_s[node] > _SILENCE_S:
                self.silent.add(node)
                logger.warning(
                    "%s: its launcher has said nothing for %.0f s (stopped, starved of CPU?); "
                    "its ranks may go on",
                    self._names[node],
                    _SILENCE_S,
                )


class RefusedError(Exception):
    """The other end of a control channel is not a node of this job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The connection to a node has ended.

    Attributes:
        why: What the kernel says, as a clause.
        is_silent: Whether its host has vanished; else its launcher has ended.
        seen_ns: When it was seen (monotonic).
    """

    why: str
    is_silent: bool
    seen_ns: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Connection:
    """One connection: what is left to read and to write; `node` is ``None`` as long as the sender is unknown.

    `unanswered` counts the beats since something came from it.
    """

    socket: socket.socket
    node: int | None = None
    challenge: str = ""
    unanswered: int = 0
    since_s: float = field(default_factory=time.monotonic)
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)


def prove(secret: bytes, side: str, round_id: str, node: int, challenge: str) -> str:
    """Return what only a node of this job can answer to a challenge."""
    text = "\0".join((_VERSION, side, round_id, str(node), challenge))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


class Channel:
    """One node's end of the control channel.

    Args:
        secret: The job's.
        round_id: The round's.
    """

    def __init__(self, secret: bytes, round_id: str) -> None:
        """Start without any connection."""
        self._secret, self._round_id = secret, round_id
        self._events: deque[tuple[int, NodeMessage | Lost]] = deque()
        self._nodes: dict[int, _Connection] = {}
        self._unknown: dict[_Connection, None] = {}  # in the order in which they came
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._news_read, self._news_write = os.pipe()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._news_read, self._news_write, self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._listening: socket.socket | None = None
        self._nnodes = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="ddpsafe-channel", daemon=True)

    @classmethod
    def listen(cls, address: str, *, secret: bytes, round_id: str, nnodes: int) -> Channel:
        """Be node 0's end, at one address only.

        Raises:
            OSError: No port can be taken there.
        """
        channel = cls(secret, round_id)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        channel._listening = socket.create_server((address, 0), family=family, backlog=1024)
        channel._listening.settimeout(0)
        channel._nnodes = nnodes
        channel._selector.register(channel._listening, selectors.EVENT_READ)
        channel._thread.start()
        return channel

    @classmethod
    def dial(
        cls,
        address: tuple[str, int],
        *,
        secret: bytes,
        round_id: str,
        node: int,
        hello: NodeMessage,
        deadline: Deadline,
    ) -> Channel:
        """Be a participant's end; both sides prove that they know the secret.

        Raises:
            OSError: Node 0 cannot be reached, or has gone.
            RefusedError: It is not node 0 of this job.
        """
        connection = socket.create_connection(address, timeout=max(0.1, deadline.remaining_s()))
        try:
            _greet(connection, secret, round_id, node, hello, deadline)
        except BaseException:
            connection.close()
            raise
        channel = cls(secret, round_id)
        connection.settimeout(0)
        channel._nodes[0] = _Connection(socket=connection, node=0)
        channel._selector.register(connection, selectors.EVENT_READ, channel._nodes[0])
        channel._thread.start()
        return channel

    @property
    def port(self) -> int:
        """The port that node 0 listens on."""
        assert self._listening is not None, "only node 0 listens"  # noqa: S101
        return int(self._listening.getsockname()[1])

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are events that cannot wait a second."""
        return self._news_read

    def events(self) -> Iterator[tuple[int, NodeMessage | Lost]]:
        """Yield what has come since the last call, each with its node."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._news_read, _CHUNK)
        while self._events:
            yield self._events.popleft()

    def send(self, message: NodeMessage, *, to: int | None = None) -> None:
        """Send to a node, or to all of them; never waits. What a lost node was told is dropped."""
        data = pack(message)
        with self._lock:
            nodes = list(self._nodes.values()) if to is None else [self._nodes.get(to)]
            for connection in nodes:
                if connection is not None:
                    connection.to_send += data
        self._wake()

    def connected(self) -> set[int]:
        """Return the nodes whose connection stands."""
        with self._lock:
            return set(self._nodes)

    def has_heard(self, *, within_s: float) -> bool:
        """Tell whether anything has come from the kernel of a connected node in the last seconds."""
        with self._lock:
            return any(_silent_s(each.socket) < within_s for each in self._nodes.values())

    def close(self) -> None:
        """Send what is left, for a moment, and close."""
        ends_s = time.monotonic() + _FLUSH_S
        while time.monotonic() < ends_s:
            with self._lock:
                if not any(each.to_send for each in self._nodes.values()):
                    break
            time.sleep(0.005)
        self._is_closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        for connection in (*self._nodes.values(), *self._unknown):
            connection.socket.close()
        if self._listening is not None:
            self._listening.close()
        self._selector.close()
        for fd in (self._news_read, self._news_write, self._wake_read, self._wake_write):
            os.close(fd)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def _tell(self, node: int, event: NodeMessage | Lost) -> None:
        self._events.append((node, event))
        if isinstance(event, _ROUTINE):
            return  # each look at the ranks of 64 nodes takes milliseconds, and this can wait
        with contextlib.suppress(BlockingIOError):
            os.write(self._news_write, b"!")

    def _serve(self) -> None:
        next_beat = Deadline.after(_BEAT)
        while not self._is_closing:
            for key, ready in self._selector.select(next_beat.remaining_s()):
                if key.fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, _CHUNK)
                elif key.fileobj is self._listening:
                    self._accept()
                elif ready & selectors.EVENT_READ:
                    self._read(key.data)
            if next_beat.expired():
                next_beat = Deadline.after(_BEAT)
                self._say_alive()
                if self._listening is not None and self._listening not in self._selector.get_map():
                    self._selector.register(self._listening, selectors.EVENT_READ)
            with self._lock:
                waiting = [each for each in self._nodes.values() if each.to_send]
            for connection in waiting:
                self._write(connection)
            # A flood of connections that do not say who they are must not keep the nodes out.
            latest_s = time.monotonic() - _GREETING_S
            surplus = len(self._unknown) - _MOST_UNKNOWN
            for number, connection in enumerate(list(self._unknown)):
                if number < surplus or connection.since_s < latest_s:
                    self._forget(connection)

    def _say_alive(self) -> None:
        alive = pack(Alive())
        with self._lock:
            for connection in self._nodes.values():
                if connection.unanswered < _MOST_UNANSWERED:
                    connection.unanswered += 1
                    connection.to_send += alive

    def _accept(self) -> None:
        assert self._listening is not None  # noqa: S101 - registered with it
        try:
            accepted, _ = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:  # out of descriptors: still readable, so it is left until the next beat
            self._selector.unregister(self._listening)
            return
        with contextlib.suppress(OSError):
            accepted.settimeout(0)
            challenge = secrets.token_hex(16)
            connection = _Connection(socket=accepted, challenge=challenge)
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._unknown[connection] = None
            _notice_loss(accepted)
            accepted.send(f"{_VERSION} {challenge}\n".encode())  # an empty buffer takes it whole

    def _forget(self, connection: _Connection) -> None:
        self._unknown.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()

    def _read(self, connection: _Connection) -> None:
        if connection.socket.fileno() < 0:
            return  # closed at an earlier event of the same look
        try:
            data = connection.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as exc:
            self._lose(connection, exc)
            return
        if not data:
            self._lose(connection, None)
            return
        connection.unanswered = 0
        connection.received += data
        try:
            self._take_lines(connection)
        except GarbledError as exc:
            self._lose(connection, OSError(f"it has sent what is not a message ({exc})"))

    def _take_lines(self, connection: _Connection) -> None:
        limit = _MAX_GREETING if connection.node is None else _MAX_LINE
        while (end := connection.received.find(b"\n")) >= 0:
            line = bytes(connection.received[:end])
            del connection.received[: end + 1]
            if connection.node is not None:
                self._tell(connection.node, unpack(line))
            elif not self._is_node(connection, line):
                self._forget(connection)
                return
        if len(connection.received) > limit:
            raise GarbledError("a line without an end")

    def _is_node(self, connection: _Connection, line: bytes) -> bool:
        """Check a greeting; make the sender a node if it knows the secret."""
        try:
            said = json.loads(line)  # not checked yet: numbers may be infinite, texts not Unicode
            node, challenge = int(said["node"]), str(said["challenge"])
            proof = str(said["proof"]).encode()
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return False
        wanted = prove(self._secret, "participant", self._round_id, node, connection.challenge)
        if not hmac.compare_digest(proof, wanted.encode()):
            return False
        with self._lock:
            if not 0 < node < self._nnodes or node in self._nodes:
                return False
            connection.node = node
            self._unknown.pop(connection, None)
            answer = prove(self._secret, "coordinator", self._round_id, node, challenge)
            connection.to_send += answer.encode() + b"\n"
            self._nodes[node] = connection
        return True

    def _write(self, connection: _Connection) -> None:
        with self._lock:
            data = bytes(connection.to_send[: 4 * _CHUNK])
        try:
            sent = connection.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as exc:
            self._lose(connection, exc)
            return
        with self._lock:
            del connection.to_send[:sent]
            is_left = bool(connection.to_send)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_left else 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(connection.socket, events, connection)

    def _lose(self, connection: _Connection, exc: OSError | None) -> None:
        """Note the end of a connection, after all that came before it."""
        node = connection.node
        self._forget(connection)
        if node is None:
            return
        with self._lock:
            self._nodes.pop(node, None)
        is_silent = exc is not None and not isinstance(exc, ConnectionError)
        why = (
            str(exc.strerror or exc) if is_silent and exc is not None else "its launcher has ended"
        )
        self._tell(node, Lost(why=why, is_silent=is_silent, seen_ns=time.monotonic_ns()))


def _notice_loss(connection: socket.socket) -> None:
    """Let the kernel end a connection whose other host does not answer, within `LOSS_S`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", int(LOSS_S)),
        (
            "TCP_USER_TIMEOUT",
            int(LOSS_S * 1000),
        ),  # where something is unacknowledged no probe is sent
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _silent_s(connection: socket.socket) -> float:
    """Return for how long neither data nor an acknowledgement has come, in seconds."""
    if not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:  # it has just been closed
        return math.inf
    silent_ms: tuple[int, int] = struct.unpack_from("=II", info, _LAST_RECEIVED)
    return min(silent_ms) / 1000


def _greet(
    connection: socket.socket,
    secret: bytes,
    round_id: str,
    node: int,
    hello: NodeMessage,
    deadline: Deadline,
) -> None:
    """Prove to node 0 that this is a node of the job, and have it prove the same."""
    _notice_loss(connection)
    challenge = secrets.token_hex(16)
    version, _, theirs = _read_line(connection, deadline).partition(" ")
    if version != _VERSION:
        raise RefusedError("it speaks another protocol")
    answer = {
        "node": node,
        "challenge": challenge,
        "proof": prove(secret, "participant", round_id, node, theirs),
    }
    connection.sendall(json.dumps(answer).encode() + b"\n" + pack(hello))
    proof = _read_line(connection, deadline)
    wanted = prove(secret, "coordinator", round_id, node, challenge)
    if not hmac.compare_digest(proof.encode(), wanted.encode()):
        raise RefusedError("it does not know the secret of this job")


def _read_line(connection: socket.socket, deadline: Deadline) -> str:
    """Read one short line, byte by byte: what follows it is not this function's."""
    line = bytearray()
    for _ in itertools.repeat(None, _MAX_GREETING):
        connection.settimeout(max(0.1, min(deadline.remaining_s(), _GREETING_S)))
        byte = connection.recv(1)
        if not byte:
            raise ConnectionResetError("it has closed the connection")
        if byte == b"\n":
            return line.decode(errors="replace")
        line += byte
    raise RefusedError("it speaks another protocol")
