"""The channel of a job: one TCP connection from each other node to node 0.

The store does not notice that a launcher has died, and its calls have no deadline once its host has
vanished. Here the kernel notices: a closed connection within milliseconds, a host without power or
network after three keep-alives of the kernel, which a busy CPU does not delay.

A connection that breaks is not yet a lost node: the participant dials again, both ends say how much has
arrived, and what the other has missed is sent again, in order and once. How the connection has ended
decides for how long the node may stay away until it is lost: not at all after a goodbye or the end of its
process, 5 s after a reset, ``timeouts.node_loss`` after silence. A launcher whose ranks fail meanwhile
calls `Channel.give_up_away`, and the node is lost at once.

Both ends prove that they know the secret of the job, and sign every line that they send. Nothing is
encrypted. What the messages are is known to the user of the channel, which gives it a `Codec`.

A thread reads and writes, so that the launcher never waits for a peer; `Channel.events` hands over
what arrived. Node 0's thread also sends `Alive` every second (in a large job, every other), and that of a
participant answers it, so a launcher is silent only if it is stopped or starved of CPU, and not because it
waits for ranks to end.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import itertools
import json
import math
import os
import re
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeAlias, TypeVar, cast, get_args

import tenacity
from pydantic import TypeAdapter, ValidationError

from ddpsafe._clock import Deadline
from ddpsafe._host import end_when_silent, open_server
from ddpsafe._limits import LAUNCHER_SILENCE_S, LOSS_S
from ddpsafe._logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping


T = TypeVar("T")
NameT = TypeVar("NameT", bound="int | str")
MessageT = TypeVar("MessageT")
logger = get_logger(__name__)

BEAT_S: Final = 1.0
_BEAT: Final = timedelta(seconds=BEAT_S)
_MANY_PEERS: Final = 256
"""Node 0 sends to more than so many every other beat only: most of what its channel costs is one call of the
kernel for each peer."""
_MAX_UNANSWERED_BEATS: Final = 100
"""More would fill the buffer of a stopped launcher, and the kernel would report its host as lost."""

_PIECE_BYTES: Final = 256 << 10
_MAX_LINE_BYTES: Final = 2 * _PIECE_BYTES
"""A message of any size is sent as lines of at most a piece each, so a longer one is none of ddpsafe's."""

_MORE: Final = b"+"
_LAST: Final = b"."
"""Each line begins with one of these: whether the message continues in the next one."""

_MAX_GREETING_BYTES: Final = 16 << 10
_GREETING_S: Final = 5.0
_MAX_UNGREETED: Final = 128
"""How many connections may be of programs that are not nodes, beside one of each node."""

_CONNECT_S: Final = 5.0
"""The kernel of a host that is up answers at once; the first packet is sent three times meanwhile."""

_DIALS: Final = 5
_DIAL_PAUSE_S: Final = 0.2
"""After a dial that node 0 refused; twice as long after the second one, and so on: 2 s in all."""

_CHUNK_BYTES: Final = 1 << 16
_FLUSH_S: Final = 1.0
_DIAL_S: Final = 1.0
"""One try to connect again; the next one follows a beat later."""
_RESET_S: Final = 5.0
"""How long a host that answers, but has closed the connection, may take to dial or to listen again.

A launcher that was killed with unread messages ends its connection in the same way as a firewall.
"""
_ANY_VERSION: Final = re.compile(r"ddpsafe-[0-9A-Za-z.]{1,16}")
_VERSION: Final = "ddpsafe-4"
_REFUSED: Final = "refused"
_MAX_REFUSED: Final = 256
_MAX_OTHER_PROGRAMS: Final = 8
"""Of so many programs that are not nodes node 0 warns: they must not fill the log."""

_OTHER_PROGRAMS: Final = (
    (re.compile(rb"\x00\xce\xf7\x85\x3c"), "a client of torch's TCPStore, such as torchrun"),
    (re.compile(rb"[A-Z]{3,8} [^\r\n]* HTTP/"), "an HTTP client"),
    (re.compile(rb"PRI \* HTTP/2"), "an HTTP client"),
    (re.compile(rb"\x16\x03"), "a TLS client"),
    (re.compile(rb"SSH-"), "an SSH client"),
    (re.compile(rb"\Z"), "a port scanner or a health check: it sent nothing"),
    (re.compile(rb""), "a program that does not speak ddpsafe's protocol"),
)
"""What a program that is not a node seems to be, by how it begins; the first that fits."""

_SMALL_SEGMENT_BYTES: Final = 1160
"""With the headers of IPv6 and TCP, less than the 1280 bytes that every IPv6 link has to carry."""

_TCP_INFO_BYTES: Final = 60
_UNACKED: Final = 24
"""Offset of ``tcpi_unacked``, the packets that are sent and not acknowledged, in ``struct tcp_info``."""

_LAST_RECEIVED: Final = 52
"""Offset of ``tcpi_last_data_recv`` and ``tcpi_last_ack_recv`` (ms) in ``struct tcp_info``."""

_OWN_GAP_S: Final = 3.0
"""`SilenceWatch.look` is called every second: after a longer gap, this launcher itself was stopped or starved."""


class GarbledError(ValueError):
    """Something arrived that is not a message of ddpsafe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first message of a participant: its clocks, to compare times of different hosts."""

    mono_ns: int
    wall_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """The launcher runs. Two of these, one in each direction, compare the clocks of two hosts.

    Attributes:
        sent_ns: The sender's monotonic clock.
        epoch_ns: Its wall clock minus its monotonic one.
        heard_sent_ns: `sent_ns` of the last one that the sender has received; 0 before the first.
        heard_at_ns: When that one arrived, on the sender's monotonic clock.
        received: How many messages have arrived at the sender, apart from those of routine.
    """

    sent_ns: int
    epoch_ns: int
    heard_sent_ns: int = 0
    heard_at_ns: int = 0
    received: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """The launcher leaves the channel; the end of the connection that follows is not a failure."""


if TYPE_CHECKING:
    Sent: TypeAlias = MessageT | Hello | Alive | Goodbye

_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(cls: Any) -> TypeAdapter[Any]:
    """Return the adapter that reads and writes a class."""
    # Kept, as making it takes milliseconds.
    if cls not in _adapters:
        _adapters[cls] = TypeAdapter(cls)
    return _adapters[cls]


def to_json(value: object) -> Any:
    """Return a dataclass as plain JSON values, without those that are the default anyway."""
    return _adapter(type(value)).dump_python(value, mode="json", exclude_defaults=True)


def from_json(cls: type[T], value: object) -> T:
    """Return the dataclass that plain JSON values describe.

    Raises:
        GarbledError: They do not fit the class.
    """
    try:
        instance: T = _adapter(cls).validate_python(value)
    except (ValidationError, RecursionError) as exc:
        raise GarbledError(f"not a {cls.__name__}") from exc
    return instance


class Codec(Generic[MessageT]):
    """The messages of a channel, as lines of JSON: the channel's own, and those that its user gives it.

    Args:
        *messages: Frozen dataclasses.
        routine: Those among them that arrive every second from every node: they wake no watch, and are
            not sent again to a node that was away.
    """

    def __init__(self, *messages: type, routine: tuple[type, ...] = ()) -> None:
        self._classes = {cls.__name__: cls for cls in (Hello, Alive, Goodbye, *messages)}
        self.routine = (Alive, *routine)

    def prepare(self, *others: type) -> None:
        """Make the adapters of all messages, and of other classes, now instead of at their first use."""
        for cls in (*self._classes.values(), *others):
            _adapter(cls)

    def pack(self, message: Sent[MessageT]) -> bytes:
        """Return a message as bytes, none of which ends a line."""
        return json.dumps([type(message).__name__, to_json(message)]).encode()

    def unpack(self, packed: bytes) -> Sent[MessageT]:
        """Return the message that these bytes are.

        Raises:
            GarbledError: They are none.
        """
        try:
            name, body = json.loads(packed)
            cls = self._classes[name]
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise GarbledError("not a message") from exc
        message: Sent[MessageT] = from_json(cls, body)
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """What to add to the times of another host to convert them to this host's clocks."""

    mono_ns: int = 0
    wall_ns: int = 0


_SAMPLES: Final = 60
"""A minute of beats: in an hour, two clocks may drift apart by a third of a second."""


class ClockComparison:
    """Compares this host's clocks with those of another one, as NTP does (RFC 5905, section 8)."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)
        self._epochs_ns = 0
        self.heard_sent_ns, self.heard_at_ns = 0, 0

    def note_hello(self, hello: Hello, at_ns: int) -> None:
        """Take in the first message, which has made one way only; `at_ns` is when it arrived here."""
        self._note(math.inf, at_ns - hello.mono_ns, hello.wall_ns - hello.mono_ns)

    def note_alive(self, alive: Alive, at_ns: int) -> None:
        """Take in a beat and when it arrived here."""
        self.heard_sent_ns, self.heard_at_ns = alive.sent_ns, at_ns
        if alive.heard_sent_ns:
            there_ns = alive.sent_ns - alive.heard_at_ns
            round_trip_ns = at_ns - alive.heard_sent_ns - there_ns
            ahead_ns = (alive.heard_sent_ns - alive.heard_at_ns + at_ns - alive.sent_ns) // 2
            if round_trip_ns >= 0:
                self._note(round_trip_ns, ahead_ns, alive.epoch_ns)

    def answer(self) -> Alive:
        """Return the next beat to send."""
        return Alive(
            sent_ns=time.monotonic_ns(),
            epoch_ns=_epoch_ns(),
            heard_sent_ns=self.heard_sent_ns,
            heard_at_ns=self.heard_at_ns,
        )

    def offset(self) -> ClockOffset:
        """Return what to add to the other host's times."""
        if not self._samples:
            return ClockOffset()
        # The difference is uncertain by half a round trip, so that of the shortest round trip
        # counts.
        ahead_ns = min(self._samples)[1]
        return ClockOffset(mono_ns=ahead_ns, wall_ns=ahead_ns + self._epochs_ns)

    def _note(self, round_trip_ns: float, ahead_ns: int, epoch_ns: int) -> None:
        self._samples.append((round_trip_ns, ahead_ns))
        self._epochs_ns = _epoch_ns() - epoch_ns


def _epoch_ns() -> int:
    return time.time_ns() - time.monotonic_ns()


class SilenceWatch:
    """Warns of launchers that send nothing although they are connected; their ranks may still run."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """Begin as if every node in `names` had just sent something."""
        self._names = names
        self._looked_s = time.monotonic()
        self._heard_s = dict.fromkeys(names, self._looked_s)
        self.silent: set[int] = set()

    def heard(self, node: int) -> None:
        """Note that a launcher has sent something."""
        self._heard_s[node] = time.monotonic()
        if node in self.silent:
            self.silent.discard(node)
            logger.warning(
                "%s: its launcher responds again",
                self._names[node],
                extra={"event": "back", "of_node": node},
            )

    def silent_s(self, node: int) -> float:
        """Return how long a launcher has sent nothing, in seconds."""
        return time.monotonic() - self._heard_s[node]

    def look(self, connected: Collection[int]) -> None:
        """Warn once of each connected launcher that has been silent for too long."""
        before_s, self._looked_s = self._looked_s, time.monotonic()
        # What the others have sent meanwhile may still be unread.
        if self._looked_s - before_s > _OWN_GAP_S:
            self._heard_s = dict.fromkeys(self._names, self._looked_s)
        for node in sorted(set(connected) & self._names.keys() - self.silent):
            if self._looked_s - self._heard_s[node] > LAUNCHER_SILENCE_S:
                self.silent.add(node)
                logger.warning(
                    "%s: its launcher has not responded for %.0f s (stopped, starved of CPU?); "
                    "its ranks may still run",
                    self._names[node],
                    LAUNCHER_SILENCE_S,
                    extra={"event": "silent", "of_node": node},
                )


Refusal: TypeAlias = Literal["other-program", "secret", "version"]


class RefusedError(Exception):
    """What answers is not the other end of this channel.

    Attributes:
        refusal: It speaks no protocol of ddpsafe, does not know the secret, or has another version.
    """

    def __init__(self, refusal: Refusal, why: str) -> None:
        """Say what it is, and how that was noticed, as a clause."""
        super().__init__(why)
        self.refusal: Refusal = refusal


class _SuccessorError(RefusedError):
    """Another process serves the address now, so that which this node was connected to has ended."""


class _HungUpError(RefusedError):
    """It has closed the connection: node 0 does so in a flood of connections, other programs always."""


EndOfConnection = Literal["goodbye", "ended", "reset", "garbled", "silence"]
"""How a connection has ended: the launcher took leave of it, or ended without that, or its host has
closed it although the launcher may still run, or something else has come over it, or its host no longer
answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A node is lost for good.

    Attributes:
        why: What the kernel reported, as a clause.
        seen_ns: When its last connection ended (monotonic).
    """

    how: EndOfConnection
    why: str
    silent_s: float = 0.0
    seen_ns: int

    @property
    def is_silent(self) -> bool:
        """Whether its host has vanished; if not, its launcher has ended."""
        return self.how == "silence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Away:
    """A connection has broken; the node may come back.

    Attributes:
        why: What the kernel reported, as a clause.
        limit_s: After how many seconds it is lost.
    """

    how: EndOfConnection
    why: str
    limit_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Back:
    """A node is connected again, and nothing is missing.

    Attributes:
        away_s: For how long nothing had arrived from it, in seconds.
    """

    away_s: float


if TYPE_CHECKING:
    Event: TypeAlias = Lost | Away | Back | Sent[MessageT]


@dataclass(slots=True, kw_only=True, eq=False)
class _Connection(Generic[NameT]):
    """One connection, with the bytes that are left to parse and to send.

    Attributes:
        peer: The node; ``None`` until the other side has proved that it is one.
        challenge: What the other side has to sign for that.
        unanswered: Beats sent since something arrived.
        unacked_s: Since when something that was sent is not acknowledged (monotonic), as far as was looked.
        pieces: Those of a message that has not arrived to its end.
        since_s: When it was opened (monotonic).
    """

    socket: socket.socket
    host: str = ""
    peer: _Peer[NameT] | None = None
    challenge: str = ""
    unanswered: int = 0
    since_s: float = field(default_factory=time.monotonic)
    unacked_s: float | None = None
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    sending: _LineSigner | None = None
    receiving: _LineSigner | None = None
    pieces: bytearray = field(default_factory=bytearray)

    def begin(self, secret: bytes, scope: str, nonces: str, *, is_node_0: bool) -> None:
        """Sign all lines from now on: for this connection, its direction, and its number in that."""
        signers = (
            _LineSigner(secret, scope, "participant", nonces),
            _LineSigner(secret, scope, "coordinator", nonces),
        )
        self.receiving, self.sending = signers if is_node_0 else signers[::-1]

    def put(self, message: bytes) -> None:
        """Have a message sent, as one line or several."""
        assert self.sending is not None  # noqa: S101 - it has begun
        for start in range(0, len(message), _PIECE_BYTES):
            end = start + _PIECE_BYTES
            line = (_LAST if end >= len(message) else _MORE) + message[start:end] + b"\n"
            self.to_send += self.sending.sign(line) + line

    def joined(self, line: bytes) -> bytes | None:
        """Return the message that ends with a line that has arrived; ``None`` if it continues.

        Raises:
            GarbledError: The other end has not sent it.
        """
        assert self.receiving is not None  # noqa: S101 - it has begun
        signature, line = line[: _LineSigner.CHARS], line[_LineSigner.CHARS :]
        if not hmac.compare_digest(signature, self.receiving.sign(line + b"\n")):
            raise GarbledError("it is not signed")
        self.pieces += line[1:]
        if line[:1] == _MORE:
            return None
        message, self.pieces = bytes(self.pieces), bytearray()
        return message


@dataclass(slots=True, kw_only=True, eq=False)
class _Peer(Generic[NameT]):
    """A node at the other end, over all its connections.

    Attributes:
        connection: The connection in use; ``None`` while the node is away.
        received: How many messages have arrived, apart from those of routine.
        unconfirmed: Messages sent to it that may not have arrived, the oldest first.
        confirmed: How many have arrived, according to the node.
        token: What identifies this launcher among all that may take themselves for the node.
        scope: Which end of the channel node 0 has; empty before the first greeting.
        has_said_goodbye: Whether it has taken leave.
        if_not_back: How it is lost if it does not come back; ``None`` while it is connected.
    """

    node: NameT
    connection: _Connection[NameT] | None = None
    clocks: ClockComparison = field(default_factory=ClockComparison)
    received: int = 0
    unconfirmed: deque[bytes] = field(default_factory=deque)
    confirmed: int = 0
    token: str = ""
    scope: str = ""
    has_said_goodbye: bool = False
    if_not_back: Lost | None = None
    away_since_s: float = 0.0
    limit_s: float = 0.0
    next_dial_s: float = 0.0

    def confirm(self, received: int) -> None:
        """Forget the messages that the node has received."""
        for _ in range(min(received - self.confirmed, len(self.unconfirmed))):
            self.unconfirmed.popleft()
            self.confirmed += 1

    def away_s(self) -> float:
        """Return how long it has been away, in seconds."""
        return time.monotonic() - self.away_since_s


class _LineSigner:
    """Signs the lines of one direction of one connection, so that no program on the way can add one."""

    CHARS: Final = 32

    def __init__(self, secret: bytes, scope: str, side: str, nonces: str) -> None:
        text = f"{_VERSION}\0lines\0{side}\0{scope}\0{nonces}"
        key = hmac.digest(secret, text.encode(), "sha256")
        self._keyed = hmac.new(key, digestmod="sha256")  # a copy costs half as much as a new one
        self._number = 0

    def sign(self, line: bytes) -> bytes:
        """Return the signature of the next line."""
        self._number += 1
        signature = self._keyed.copy()
        signature.update(self._number.to_bytes(8, "big") + line)
        return signature.hexdigest()[: self.CHARS].encode()


def prove(secret: bytes, side: str, scope: str, node: int | str, challenge: str) -> str:
    """Return the answer to a challenge that only a node of this job can compute."""
    text = "\0".join((_VERSION, side, scope, str(node), challenge))
    return hmac.new(secret, text.encode(), hashlib.sha256).hexdigest()


def oldest_of_busiest_host(hosts: Mapping[T, str]) -> T:
    """Return which connection to drop of too many unknown ones, given their hosts, the oldest first."""
    # A node opens a few at most, so the host that has opened the most is hardly a node's. One that is
    # dropped nevertheless, as of many nodes behind one address, dials again.
    ((busiest, _),) = Counter(hosts.values()).most_common(1)
    return next(connection for connection, host in hosts.items() if host == busiest)


class Channel(Generic[NameT, MessageT]):
    """One node's end of the control channel; the nodes at the other ends are known by name.

    Args:
        scope: Identifies node 0's end: random, so that no connection is made again to its successor.
        node_loss: How long a node may be away before it is lost.

    Attributes:
        refused: Why node 0 has refused nodes, each with what it said about itself: anyone can have said that.
    """

    def __init__(
        self, secret: bytes, scope: str, codec: Codec[MessageT], node_loss: timedelta
    ) -> None:
        self._secret, self.scope = secret, scope
        self._codec = codec
        self.refused: list[tuple[Refusal, Any]] = []
        self._node_loss_s = node_loss.total_seconds()
        self._events: deque[tuple[NameT, Event[MessageT]]] = deque()
        self._peers: dict[NameT, _Peer[NameT]] = {}
        self._lost_clocks: dict[NameT, ClockComparison] = {}
        self._dial_again: Callable[[_Peer[NameT]], tuple[_Connection[NameT], int]] | None = None
        # A dict, as an ordered set: oldest first.
        self._ungreeted: dict[_Connection[NameT], None] = {}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._news_read, self._news_write = os.pipe()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._news_read, self._news_write, self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._listening: socket.socket | None = None
        self._nnodes = 0
        self._first: list[bytes] = []
        self._at_once: dict[type, Callable[[Channel[NameT, MessageT], NameT, Any], None]] = {}
        self._warned_of: set[str] | None = None
        # Whether to look for these: a message of one of many nodes costs no look at all of them.
        self._has_output = self._has_away = False
        self._is_closing = False
        self._looked_s, self._next_look_s = time.monotonic(), math.inf
        self._thread = threading.Thread(target=self._serve, name="ddpsafe-channel", daemon=True)

    @classmethod
    def listen(  # noqa: PLR0913 - the facts of one end, all by name
        cls,
        address: str,
        *,
        port: int = 0,
        secret: bytes,
        scope: str,
        codec: Codec[MessageT],
        nnodes: int,
        node_loss: timedelta = timedelta(0),
        first: MessageT | None = None,
        at_once: Mapping[type, Callable[[Channel[NameT, MessageT], NameT, Any], None]]
        | None = None,
        warns: bool = False,
    ) -> Channel[NameT, MessageT]:
        """Open node 0's end; about `nnodes` nodes may dial at once.

        It is at one address, or at all of this host if that is empty.

        Each node is sent `first` at first. What is in `at_once` the channel's thread calls with the channel, the
        node and a message of that class, which is not among the events. It must not wait. With `warns` it warns of
        programs that are not nodes.

        Raises:
            OSError: The port, or any port, cannot be opened there.
        """
        listening = open_server(address, port)  # first: if it fails, no other descriptor is open
        _keep_packets_small(listening)
        channel = cls(secret, scope, codec, node_loss)
        channel._listening = listening
        channel._listening.settimeout(0)
        channel._nnodes = nnodes
        channel._first = [] if first is None else [codec.pack(first)]
        channel._at_once = dict(at_once or {})
        channel._warned_of = set() if warns else None
        channel._selector.register(channel._listening, selectors.EVENT_READ)
        channel._thread.start()
        return channel

    @classmethod
    def dial(  # noqa: PLR0913 - the facts of one connection, all by name
        cls,
        address: tuple[str, int],
        *,
        secret: bytes,
        scope: str = "",
        codec: Codec[MessageT],
        node: int | str,
        hello: Callable[[], Hello],
        deadline: Deadline,
        node_loss: timedelta = timedelta(0),
        about: object = None,
        at_once: Mapping[type, Callable[[Channel[int, MessageT], int, Any], None]] | None = None,
    ) -> Channel[int, MessageT]:
        """Open another node's end, to node 0; both sides prove that they know the secret.

        An empty scope is that of whichever node 0 is at the address. `about` is what node 0 may know of
        this node even if it refuses it, as JSON values. For `at_once` see `listen`.

        Raises:
            OSError: Node 0 cannot be reached.
            RefusedError: What answers is not node 0 of this job, or refuses this node.
        """

        def connect(peer: _Peer[int], deadline: Deadline) -> tuple[_Connection[int], int]:
            connection: _Connection[int] = _Connection(
                socket=_open_connection(address, deadline), host=address[0]
            )
            try:
                connection.peer = peer
                hello_line = codec.pack(hello())
                heard = _greet(connection, secret, node, hello_line, about, deadline)
            except BaseException:
                # Node 0 may have accepted the greeting already: a plain end would be a lost node.
                _reset_at_close(connection.socket)
                connection.socket.close()
                raise
            return connection, heard

        peer = _Peer(node=0, token=secrets.token_hex(16), scope=scope)
        # Node 0 drops connections in a flood, such as one of all nodes that dial at once.
        connection, _ = tenacity.Retrying(
            stop=lambda state: state.attempt_number == _DIALS or deadline.expired(),
            wait=tenacity.wait_incrementing(_DIAL_PAUSE_S, _DIAL_PAUSE_S),
            retry=tenacity.retry_if_exception_type((ConnectionResetError, _HungUpError)),
            reraise=True,
        )(connect, peer, deadline)
        channel: Channel[int, MessageT] = Channel(secret, peer.scope, codec, node_loss)
        channel._dial_again = lambda peer: connect(peer, Deadline.after(timedelta(seconds=_DIAL_S)))
        channel._peers[0] = peer
        channel._at_once = dict(at_once or {})
        channel._attach(peer, connection, 0)
        channel._thread.start()
        return channel

    @property
    def port(self) -> int:
        """The port that node 0 listens on."""
        assert self._listening is not None, "only node 0 listens"  # noqa: S101
        return int(self._listening.getsockname()[1])

    def fileno(self) -> int:
        """Return a descriptor that is readable when there are events, other than those of routine."""
        return self._news_read

    def events(self) -> Iterator[tuple[NameT, Event[MessageT]]]:
        """Yield what has arrived since the last call, each with its node."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._news_read, _CHUNK_BYTES)
        while self._events:
            yield self._events.popleft()

    def put_back(self, events: Iterable[tuple[NameT, Event[MessageT]]]) -> None:
        """Have events come again, before all others."""
        with self._lock:
            self._events.extendleft(reversed(list(events)))
        with contextlib.suppress(BlockingIOError):
            os.write(self._news_write, b"!")

    def send(self, message: Sent[MessageT], *, to: NameT | Collection[NameT] | None = None) -> None:
        """Send to a node, to some, or to all, without waiting. Messages to a lost node are dropped.

        A node that is away gets them when it is back, except for those of routine.
        """
        data = self._codec.pack(message)
        with self._lock:
            names: Collection[Any] = [to] if isinstance(to, (int, str)) else to or ()
            for peer in self._peers.values() if to is None else map(self._peers.get, names):
                if peer is None:
                    continue
                if not isinstance(message, self._codec.routine):
                    peer.unconfirmed.append(data)
                if peer.connection is not None:
                    peer.connection.put(data)
        self._wake()

    def connected(self) -> set[NameT]:
        """Return the nodes that are not lost; some of them may be away."""
        with self._lock:
            return set(self._peers)

    def away(self) -> set[NameT]:
        """Return the nodes that are away, and may come back."""
        with self._lock:
            return {node for node, peer in self._peers.items() if peer.connection is None}

    def give_up_away(self, nodes: Collection[NameT] | None = None) -> None:
        """Take nodes that are away as lost: all of them, or those among `nodes`."""
        with self._lock:
            for peer in [peer for peer in self._peers.values() if peer.connection is None]:
                if nodes is None or peer.node in nodes:
                    self._give_up(peer)

    def host_of(self, node: NameT) -> str:
        """Return the address that a node has dialled from; empty while it is away, or lost."""
        with self._lock:
            peer = self._peers.get(node)
            return "" if peer is None or peer.connection is None else peer.connection.host

    def offset_of(self, node: NameT) -> ClockOffset:
        """Return what to add to the times of a node, also of one that has been lost."""
        with self._lock:
            peer = self._peers.get(node)
            clocks = self._lost_clocks.get(node) if peer is None else peer.clocks
            return ClockOffset() if clocks is None else clocks.offset()

    def has_heard(self, *, within_s: float) -> bool:
        """Return whether the kernel of a connected node has sent anything in the last seconds."""
        with self._lock:
            return any(_traffic(each.socket)[1] < within_s for each in self._connections())

    def carries(self) -> bool:
        """Return whether packets pass in both directions now, on all connections."""
        with self._lock:
            found = [_traffic(each.socket) for each in self._connections()]
        return bool(found) and all(not is_unacked and s < BEAT_S for is_unacked, s in found)

    def close(self) -> None:
        """Take leave, send what is left, for at most `_FLUSH_S`, and close."""
        self.send(Goodbye())
        ends_s = time.monotonic() + _FLUSH_S
        while time.monotonic() < ends_s:
            with self._lock:
                if not any(connection.to_send for connection in self._connections()):
                    break
            time.sleep(0.005)
        self._is_closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        for connection in (*self._connections(), *self._ungreeted):
            connection.socket.close()
        if self._listening is not None:
            self._listening.close()
        self._selector.close()
        for fd in (self._news_read, self._news_write, self._wake_read, self._wake_write):
            os.close(fd)

    def _connections(self) -> list[_Connection[NameT]]:
        peers = self._peers.values()
        return [peer.connection for peer in peers if peer.connection is not None]

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"!")

    def _queue_event(self, node: NameT, event: Event[MessageT]) -> None:
        self._events.append((node, event))
        if isinstance(event, self._codec.routine):
            return  # node 0 would look at all ranks each time: milliseconds, with 64 nodes
        with contextlib.suppress(BlockingIOError):
            os.write(self._news_write, b"!")

    def _serve(self) -> None:
        next_beat = Deadline.after(_BEAT)
        while not self._is_closing:
            look_in_s = max(0.0, self._next_look_s - time.monotonic())
            for key, ready in self._selector.select(min(next_beat.remaining_s(), look_in_s)):
                if key.fd == self._wake_read or ready & selectors.EVENT_WRITE:
                    self._has_output = True
                if key.fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, _CHUNK_BYTES)
                elif key.fileobj is self._listening:
                    self._accept()
                elif ready & selectors.EVENT_READ:
                    self._read(key.data)
            if next_beat.expired() or time.monotonic() >= self._next_look_s:
                self._end_silent()
            if next_beat.expired():
                next_beat = Deadline.after(_BEAT if len(self._peers) <= _MANY_PEERS else 2 * _BEAT)
                if self._listening is not None:
                    self._send_alive()
                    if self._listening not in self._selector.get_map():
                        self._selector.register(self._listening, selectors.EVENT_READ)
            if self._has_away:
                with self._lock:
                    away = [peer for peer in self._peers.values() if peer.connection is None]
                    self._has_away = bool(away)
                for peer in away:
                    self._await(peer)
            if self._has_output:
                with self._lock:
                    waiting = [
                        connection for connection in self._connections() if connection.to_send
                    ]
                    self._has_output = False
                for connection in waiting:
                    self._write(connection)
            self._drop_ungreeted()

    def _end_silent(self) -> None:
        """End the connections with hosts that do not answer to what was sent."""
        # Not TCP_USER_TIMEOUT, which a stopped launcher runs into, whose host answers that its buffer is full.
        before_s, self._looked_s = self._looked_s, time.monotonic()
        self._next_look_s = math.inf
        with self._lock:
            connections = self._connections()
        for connection in connections:
            is_unacked, silent_s = _traffic(connection.socket)
            if not is_unacked:
                connection.unacked_s = None
                continue
            if connection.unacked_s is None:  # it was sent after the last look
                connection.unacked_s = before_s
            left_s = LOSS_S - min(self._looked_s - connection.unacked_s, silent_s)
            if left_s > 0:
                self._next_look_s = min(self._next_look_s, self._looked_s + left_s)
            else:
                # The other host may not have noticed yet. Once the network is back, its kernel would
                # take a plain end, which this one repeats until then, for the end of this process.
                _reset_at_close(connection.socket)
                timed_out = OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
                self._note_end_of(connection, timed_out)

    def _drop_ungreeted(self) -> None:
        """Drop connections that send no greeting."""
        # A flood of them must not keep the nodes out.
        opened_after_s = time.monotonic() - _GREETING_S
        late = itertools.takewhile(
            lambda connection: connection.since_s < opened_after_s, self._ungreeted
        )
        for connection in list(late):
            self._warn_of_program(connection, bytes(connection.received))
            self._drop(connection)
        # All nodes dial at once, and may wait for the answer for as long as a packet travels.
        while len(self._ungreeted) > self._nnodes + _MAX_UNGREETED:
            hosts = {connection: connection.host for connection in self._ungreeted}
            self._drop(oldest_of_busiest_host(hosts))

    def _warn_of_program(self, connection: _Connection[NameT], said: bytes) -> None:
        """Warn of a program that is not a node, once for each host."""
        if self._warned_of is None or len(self._warned_of) >= _MAX_OTHER_PROGRAMS:
            return
        is_cut = not said or said.startswith(b"{")  # perhaps a greeting that the network has cut
        with self._lock:
            is_of_node = connection.host in {each.host for each in self._connections()}
        if connection.host in self._warned_of or (is_cut and is_of_node):
            return
        self._warned_of.add(connection.host)
        kind = next(name for start, name in _OTHER_PROGRAMS if start.match(said))
        logger.warning(
            "a program on %s reached the endpoint of this job, port %d, and is not a node of it: it seems to be "
            "%s; its connection was closed",
            connection.host,
            self.port,
            kind,
        )

    def _send_alive(self) -> None:
        """Have each participant answer, except those that have not done so for long."""
        # Launchers answer this beat instead of sending their own by their own clocks: for 512 nodes
        # of 8 ranks, that and cheaper signatures brought node 0's share of a core from 8 % to 4 or
        # 5 %.
        with self._lock:
            for peer in self._peers.values():
                connection = peer.connection
                if connection is not None and connection.unanswered < _MAX_UNANSWERED_BEATS:
                    connection.unanswered += 1
                    connection.put(self._beat(peer))
        self._has_output = True

    def _beat(self, peer: _Peer[NameT]) -> bytes:
        """Return the next beat to a peer, which confirms what has arrived."""
        return self._codec.pack(replace(peer.clocks.answer(), received=peer.received))

    def _note(self, peer: _Peer[NameT], message: Sent[MessageT], at_ns: int) -> None:
        """Note what a message says about the connection, whenever it will be read."""
        with self._lock:
            if not isinstance(message, (*self._codec.routine, Hello)):
                peer.received += 1
            if isinstance(message, Hello):
                peer.clocks.note_hello(message, at_ns)
            elif isinstance(message, Goodbye):
                peer.has_said_goodbye = True
            elif isinstance(message, Alive):
                # Node 0 answers the first one too, so that the clocks are known before its next beat.
                is_answered = self._listening is None or not peer.clocks.heard_at_ns
                peer.clocks.note_alive(message, at_ns)
                peer.confirm(message.received)
                if is_answered and peer.connection is not None:
                    peer.connection.put(self._beat(peer))
                    self._has_output = True

    def _attach(self, peer: _Peer[NameT], connection: _Connection[NameT], received: int) -> None:
        """Go on with a participant's new connection, after `received` messages of this end."""
        connection.socket.settimeout(0)
        peer.connection = connection
        self._resume(peer, received)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _resume(self, peer: _Peer[NameT], received: int) -> None:
        assert peer.connection is not None  # noqa: S101 - just set
        peer.confirm(received)
        for line in peer.unconfirmed:
            peer.connection.put(line)
        self._has_output = True
        if peer.if_not_back is not None:
            self._queue_event(peer.node, Back(away_s=peer.if_not_back.silent_s + peer.away_s()))
            peer.if_not_back = None

    def _await(self, peer: _Peer[NameT]) -> None:
        """Dial a node that is away, or let it dial, until its time is over."""
        if peer.away_s() >= peer.limit_s:
            self._give_up_if_away(peer)
        elif self._dial_again is not None and time.monotonic() >= peer.next_dial_s:
            peer.next_dial_s = time.monotonic() + BEAT_S
            try:
                connection, received = self._dial_again(peer)
            except ConnectionRefusedError as exc:
                # The host answers, and no launcher listens there.
                if peer.if_not_back is not None and peer.if_not_back.how == "silence":
                    peer.if_not_back = replace(peer.if_not_back, how="reset", why=str(exc.strerror))
                    peer.limit_s = min(peer.limit_s, peer.away_s() + _RESET_S)
            except _SuccessorError:
                self._give_up_if_away(peer)
            except (OSError, RefusedError):
                pass
            else:
                with self._lock:
                    is_given_up = self._peers.get(peer.node) is not peer
                    if not is_given_up:
                        self._attach(peer, connection, received)
                if is_given_up:  # by the launcher, while this thread dialled
                    connection.socket.close()

    def _give_up_if_away(self, peer: _Peer[NameT]) -> None:
        with self._lock:
            if self._peers.get(peer.node) is peer and peer.connection is None:
                self._give_up(peer)

    def _give_up(self, peer: _Peer[NameT]) -> None:
        assert peer.if_not_back is not None  # noqa: S101 - it is away
        self._lost_clocks[peer.node] = self._peers.pop(peer.node).clocks
        silent_s = peer.if_not_back.silent_s + peer.away_s()
        self._queue_event(peer.node, replace(peer.if_not_back, silent_s=silent_s))

    def _accept(self) -> None:
        assert self._listening is not None  # noqa: S101 - registered with it
        try:
            accepted, address = self._listening.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            # Out of descriptors. The socket stays readable, so polling it would use up the CPU: pause
            # until the next beat.
            self._selector.unregister(self._listening)
            return
        with contextlib.suppress(OSError):
            accepted.settimeout(0)
            challenge = secrets.token_hex(16)
            connection: _Connection[NameT] = _Connection(
                socket=accepted,
                host=address[0].removeprefix("::ffff:"),  # IPv4, at a socket for both versions
                challenge=challenge,
            )
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._ungreeted[connection] = None
            _notice_loss(accepted)
            greeting = f"{_VERSION} {challenge} {self.scope}\n"
            accepted.send(greeting.encode())  # it fits into the empty buffer

    def _drop(self, connection: _Connection[NameT]) -> None:
        self._ungreeted.pop(connection, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()

    def _read(self, connection: _Connection[NameT]) -> None:
        if connection.socket.fileno() < 0:
            return  # closed by an earlier event of the same select
        try:
            data = connection.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as exc:
            self._note_end_of(connection, exc)
            return
        if not data:
            self._note_end_of(connection, None)
            return
        # Here, and not where the launcher reads the message: it may be seconds later, while it
        # starts its ranks.
        at_ns = time.monotonic_ns()
        connection.unanswered = 0
        connection.received += data
        try:
            self._take_lines(connection, at_ns)
        except GarbledError as exc:
            why = f"it has sent something that is not a message ({exc})"
            self._note_end_of(connection, OSError(why), how="garbled")

    def _take_lines(self, connection: _Connection[NameT], at_ns: int) -> None:
        limit = _MAX_GREETING_BYTES if connection.peer is None else _MAX_LINE_BYTES
        while (end := connection.received.find(b"\n")) >= 0:
            line = bytes(connection.received[:end])
            del connection.received[: end + 1]
            if connection.peer is not None:
                packed = connection.joined(line)
                if packed is not None:
                    self._take(connection.peer, self._codec.unpack(packed), at_ns)
            elif not self._accept_greeting(connection, line):
                self._drop(connection)
                return
        if len(connection.received) > limit:
            raise GarbledError("a line without an end")

    def _take(self, peer: _Peer[NameT], message: Sent[MessageT], at_ns: int) -> None:
        """Hand a message over: at once, in this thread, if that was asked for."""
        self._note(peer, message, at_ns)
        handle = self._at_once.get(type(message))
        if handle is not None:
            handle(self, peer.node, message)
        elif not isinstance(message, Goodbye):
            self._queue_event(peer.node, message)

    def _accept_greeting(self, connection: _Connection[NameT], line: bytes) -> bool:
        """Connect the sender of a greeting as a node; return False if it does not know the secret."""
        try:
            greeting = json.loads(line)  # by anyone: numbers may be infinite, texts not Unicode
            node: Any = greeting["node"]
            challenge = str(greeting["challenge"])
            proof, received = str(greeting["proof"]).encode(), int(greeting["received"])
            token, version = str(greeting["token"]), str(greeting["version"])
            text = f"{connection.challenge} {received} {token}"
            expected = prove(self._secret, "participant", self.scope, node, text)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self._warn_of_program(connection, line + b"\n")
            return False
        if version != _VERSION:
            return self._refuse(connection, "version", greeting)
        if not hmac.compare_digest(proof, expected.encode()) or type(node) not in (int, str):
            return self._refuse(connection, "secret", greeting)
        with self._lock:
            if node in self._lost_clocks:  # it has been lost, and the launcher acts on that
                return False
            peer = self._peers.setdefault(
                node, _Peer(node=node, token=token, unconfirmed=deque(self._first))
            )
            if peer.token != token:
                return False  # another launcher takes itself for this node
            if peer.connection is not None:
                # The node has noticed before this host that its connection is broken. A plain end
                # would look like the end of this process.
                _reset_at_close(peer.connection.socket)
                self._drop(peer.connection)
            self._ungreeted.pop(connection, None)
            connection.peer, peer.connection = peer, connection
            answer = prove(
                self._secret, "coordinator", self.scope, node, f"{challenge} {peer.received}"
            )
            connection.to_send += f"{answer} {peer.received}\n".encode()
            nonces = f"{connection.challenge} {challenge}"
            connection.begin(self._secret, self.scope, nonces, is_node_0=True)
            connection.put(self._beat(peer))
            self._resume(peer, received)
        return True

    def _refuse(
        self, connection: _Connection[NameT], refusal: Refusal, greeting: dict[str, Any]
    ) -> bool:
        """Tell a node why it is refused."""
        if greeting.get("about") is not None and len(self.refused) < _MAX_REFUSED:
            self.refused.append((refusal, greeting["about"]))
        # Not signed, so the node cannot know that node 0 says so; but it need not try again.
        with contextlib.suppress(OSError):
            connection.socket.send(f"{_REFUSED} {refusal}\n".encode())  # into the empty buffer
        return False

    def _write(self, connection: _Connection[NameT]) -> None:
        with self._lock:
            data = bytes(connection.to_send[: 4 * _CHUNK_BYTES])
        try:
            sent = connection.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError as exc:
            self._note_end_of(connection, exc)
            return
        with self._lock:
            del connection.to_send[:sent]
            is_left = bool(connection.to_send)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_left else 0)
        with contextlib.suppress(KeyError, ValueError):
            if self._selector.get_key(connection.socket).events != events:
                self._selector.modify(connection.socket, events, connection)

    def _note_end_of(
        self,
        connection: _Connection[NameT],
        exc: OSError | None,
        *,
        how: EndOfConnection = "silence",
    ) -> None:
        """Report the end of a connection, after everything that arrived before."""
        peer, now_s = connection.peer, time.monotonic()
        if peer is None:
            self._warn_of_program(connection, bytes(connection.received))
        self._drop(connection)
        if peer is None or peer.connection is not connection:
            return
        why, limit_s = "its launcher has ended", 0.0
        if peer.has_said_goodbye:
            how = "goodbye"  # also if the kernel resets it, as it had not read the last beat
        elif exc is None:
            how = "ended"
        elif how == "garbled":
            why = str(exc)
        else:
            why, limit_s = str(exc.strerror or exc), self._node_loss_s
            # The host answers: its launcher has ended, or a firewall rejects the connection.
            if isinstance(exc, ConnectionError):
                how, limit_s = "reset", min(_RESET_S, limit_s)
        with self._lock:
            peer.connection, peer.away_since_s, peer.limit_s = None, now_s, limit_s
            self._has_away = True
            silent_s = LOSS_S if how == "silence" else 0.0
            peer.if_not_back = Lost(
                how=how, why=why, silent_s=silent_s, seen_ns=time.monotonic_ns()
            )
            if limit_s > 0:
                self._queue_event(peer.node, Away(how=how, why=why, limit_s=limit_s))
            else:
                self._give_up(peer)


def _notice_loss(connection: socket.socket) -> None:
    # Nagle's algorithm would hold a short message back until the one before is acknowledged.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Where the kernel cannot be asked, it has to end the connection by itself: see `_end_silent`.
    end_when_silent(connection, LOSS_S, idle_s=1, ends_window=not hasattr(socket, "TCP_INFO"))


def _traffic(connection: socket.socket) -> tuple[bool, float]:
    """Return whether something sent is not acknowledged, and for how many seconds nothing has arrived."""
    if not hasattr(socket, "TCP_INFO"):
        return False, 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:  # just closed
        return False, math.inf
    (unacked,) = struct.unpack_from("=I", info, _UNACKED)
    silent_ms: tuple[int, int] = struct.unpack_from("=II", info, _LAST_RECEIVED)
    return bool(unacked), min(silent_ms) / 1000


def _open_connection(address: tuple[str, int], deadline: Deadline) -> socket.socket:
    entries = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    family, kind, _, _, where = entries[0]  # with the zone of a link-local address
    connection = socket.socket(family, kind)
    try:
        _keep_packets_small(connection)
        _notice_loss(connection)
        connection.settimeout(max(0.1, min(_CONNECT_S, deadline.remaining_s())))
        connection.connect(where)
    except BaseException:
        connection.close()
        raise
    return connection


def _reset_at_close(connection: socket.socket) -> None:
    """Have the end of a connection look like a fault of the network, after which one dials again."""
    # Without that it looks like the end of the process, which is a lost node at once.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _keep_packets_small(connection: socket.socket) -> None:
    """Have both sides send small packets; call it before connecting, or on a listening socket."""
    # A network that loses large packets must not keep nodes from saying so.
    with contextlib.suppress(AttributeError, OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_SEGMENT_BYTES)


def _greet(
    connection: _Connection[int],
    secret: bytes,
    node: int | str,
    hello: bytes,
    about: object,
    deadline: Deadline,
) -> int:
    """Prove to node 0 that this is a node of the job, and have it prove the same.

    `about` is what node 0 may know of this node even if it refuses it. Returns how many messages of this node
    have arrived at node 0.
    """
    peer, challenge = connection.peer, secrets.token_hex(16)
    assert peer is not None  # noqa: S101 - node 0
    waited = Deadline.after(None)
    try:
        version, _, more = _read_line(connection.socket, deadline).partition(" ")
        theirs, _, scope = more.partition(" ")
        if not _ANY_VERSION.fullmatch(version):
            raise RefusedError("other-program", "what it sent is not a message of ddpsafe")
        if version == _VERSION and scope != (peer.scope or scope):
            raise _SuccessorError("other-program", "another process of ddpsafe serves this address")
        answer = {
            "version": _VERSION,
            "node": node,
            "challenge": challenge,
            "received": peer.received,
            "token": peer.token,
            "proof": prove(
                secret, "participant", scope, node, f"{theirs} {peer.received} {peer.token}"
            ),
            "about": about,
        }
        connection.begin(secret, scope, f"{theirs} {challenge}", is_node_0=False)
        connection.put(hello)
        connection.socket.sendall(json.dumps(answer).encode() + b"\n" + connection.to_send)
        connection.to_send.clear()
        # Only after the answer, so that node 0 knows which node has another version.
        if version != _VERSION:
            raise RefusedError("version", f"it speaks {version}, and this node {_VERSION}")
        proof, _, heard = _read_line(connection.socket, deadline).partition(" ")
    except TimeoutError as exc:
        raise RefusedError(
            "other-program", f"it sent nothing for {waited.waited_s():.1f} s"
        ) from exc
    except OSError as exc:
        raise _HungUpError("other-program", "it closed the connection") from exc
    if proof == _REFUSED and heard in get_args(Refusal):
        raise RefusedError(cast("Refusal", heard), f"it refuses this node: {heard}")
    expected = prove(secret, "coordinator", scope, node, f"{challenge} {heard}")
    if not hmac.compare_digest(proof.encode(), expected.encode()) or not heard.isdecimal():
        raise RefusedError("secret", "it does not know the secret of this job")
    peer.scope = scope
    return int(heard)


def _read_line(connection: socket.socket, deadline: Deadline) -> str:
    """Read one short line."""
    line = bytearray()
    for _ in itertools.repeat(None, _MAX_GREETING_BYTES):
        if line and deadline.expired():
            raise TimeoutError
        connection.settimeout(max(0.1, min(deadline.remaining_s(), _GREETING_S)))
        byte = connection.recv(1)  # what follows the line is for the thread of the channel
        if not byte:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        if byte == b"\n":
            return line.decode(errors="replace")
        line += byte
    raise RefusedError("other-program", "it sent a line without an end")
