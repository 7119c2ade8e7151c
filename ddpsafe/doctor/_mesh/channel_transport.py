"""Both ends of the transport over the job's channel: node rank 0's server, and the other nodes' clients.

The channel (`_job/channel.py`) has the connections, the secret, and how a loss is noticed. Here is
which nodes take part: each greets node rank 0, which accepts or refuses it, and both know why.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._clock import Deadline
from ddpsafe._job.channel import Channel, Codec, Hello, Lost, from_json
from ddpsafe._job.secret import key_of_secret
from ddpsafe.doctor._mesh.protocol import Answer, Greeting, Rejected, write
from ddpsafe.doctor._mesh.transport import (
    RESULTS,
    Transport,
    TransportClosedError,
    TransportGarbledError,
    TransportLostError,
    bounded,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ddpsafe._job.channel import EndOfConnection
    from ddpsafe.doctor._mesh.transport import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A value under a topic. Whoever needs the value checks it, with `from_json`."""

    topic: str
    value: Any


CODEC: Final[Codec[Said]] = Codec(Said)
# With the 3.5 s after which a connection ends, a host without power is lost after 6 s. Until then the
# node connects again: a network that loses one packet in eight sometimes loses several in a row.
_NODE_LOSS: Final = timedelta(seconds=2.5)

GREETING: Final = "greeting"
ANSWER: Final = "answer"
_FROM_NODES: Final = ("hello", "mesh", "imported", "reduced")
_FROM_COORDINATOR: Final = (ANSWER, "progress", "roster", "all-reduce", RESULTS)
_ERRORS: Final[dict[EndOfConnection, type[TransportLostError]]] = {
    "silence": TransportLostError,
    "garbled": TransportGarbledError,
}
_MOST_REJECTED: Final = 256
_CLOSE_LIMIT: Final = timedelta(seconds=2)


async def _close(channel: Channel[Any, Said]) -> None:
    # Not with asyncio.to_thread: a cancelled call that has no thread yet would never close it.
    await bounded(channel.close, deadline=Deadline.after(None), name="ddpsafe-close")


class Client(Transport):
    """The transport of every node except node rank 0; it receives from the start.

    Attributes:
        coordinator_hostname: The host name of node rank 0, once it has answered.
    """

    def __init__(self, channel: Channel[int, Said], address: str) -> None:
        self.coordinator_hostname = ""
        self.coordinator_address = address
        self._channel = channel
        self._received: dict[str, Json] = {}
        self._lost: TransportLostError | None = None
        asyncio.get_running_loop().add_reader(channel.fileno(), self._look)

    @classmethod
    async def dial(
        cls, address: str, port: int, greeting: Greeting, *, secret: str, deadline: Deadline
    ) -> Client:
        """Connect to node rank 0 and greet it.

        Raises:
            OSError: Nothing accepts the connection.
            RefusedError: What does is not node rank 0, or refuses this node.
        """

        def connect() -> Channel[int, Said]:
            return Channel.dial(
                (address, port),
                secret=key_of_secret(secret),
                codec=CODEC,
                # Not its rank: a second doctor with it is a duplicate, not the first one come back.
                node=secrets.token_hex(16),
                hello=lambda: Hello(mono_ns=time.monotonic_ns(), wall_ns=time.time_ns()),
                deadline=deadline,
                node_loss=_NODE_LOSS,
                # If the channel refuses the node (no secret), this is all that node rank 0 knows of it.
                about=write(greeting),
            )

        never = Deadline.after(None)  # it has a deadline itself
        name = "ddpsafe-dial"
        channel = await bounded(connect, deadline=never, name=name, dispose=Channel.close)
        client = cls(channel, address)
        await client.put(GREETING, write(greeting))
        return client

    async def put(self, topic: str, value: Json) -> None:
        """Send a value to node rank 0."""
        if self._lost is not None:
            raise self._lost
        self._channel.send(Said(topic=topic, value=value))

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return what node rank 0 has sent."""
        # Messages that arrived before node rank 0 was lost stay readable.
        if topic in self._received:
            return {0: self._received[topic]}
        if self._lost is not None:
            raise self._lost
        return {}

    async def close(self) -> None:
        """Leave the channel, which node rank 0 notices."""
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        await _close(self._channel)

    def _look(self) -> None:
        for _, event in self._channel.events():
            if isinstance(event, Said) and event.topic in _FROM_COORDINATOR:
                self._received[event.topic] = event.value
            elif isinstance(event, Lost):
                has_closed = event.how in ("goodbye", "ended")
                error = _ERRORS.get(event.how, TransportClosedError)
                self._lost = error("it closed the connection" if has_closed else event.why)


class Server(Transport):
    """The transport of node rank 0.

    Attributes:
        nonce: Identifies this run of node rank 0.
        peers: Host name and address of every accepted node, by node rank.
    """

    _channel: Channel[str, Said]

    def __init__(self, own: Greeting, *, secret: str = "") -> None:
        self.nonce = secrets.token_hex(16)
        self.peers: dict[int, tuple[str, str]] = {}
        self._own = own
        self._secret = secret
        self._accepts = True
        self._sent: dict[str, Json] = {}
        self._received: dict[str, dict[int, Json]] = {}
        self._nodes: dict[int, tuple[str, Greeting]] = {}
        self._ranks: dict[str, int] = {}
        self._rejected: list[Rejected] = []
        self._refused: set[str] = set()
        self._is_open = False

    async def open(self, port: int) -> None:
        """Listen on a port, on every interface.

        Raises:
            OSError: The port is not available.
        """
        self._channel = Channel[str, Said].listen(
            "",
            port=port,
            secret=key_of_secret(self._secret),
            scope=self.nonce,  # no node connects again to a successor of this process
            codec=CODEC,
            nnodes=self._own.nnodes,
            node_loss=_NODE_LOSS,
        )
        self._is_open = True
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._look)

    @property
    def rejected(self) -> list[Rejected]:
        """The nodes that were refused: here, or by the channel because they do not know the secret."""
        rejected = self._rejected.copy()
        for reason, about in self._channel.refused.copy():
            with contextlib.suppress(ValueError):  # anyone can have sent it
                rejected.append(from_json(Rejected, {"reason": reason, "greeting": about}))
        return rejected

    async def put(self, topic: str, value: Json) -> None:
        """Send a value to every node."""
        self._sent[topic] = value
        self._received.setdefault(topic, {})[0] = value
        # The refused ones stay connected for the results, so that all end with the same findings.
        self._send(topic, value, [*self._ranks, *(self._refused if topic == RESULTS else ())])

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return what the nodes have sent."""
        return self._received.get(topic, {})

    def disconnected(self) -> Collection[int]:
        """Return the nodes that joined and whose connection has ended."""
        return self.peers.keys() - self._nodes.keys()

    def close_registration(self) -> None:
        """Refuse all nodes from now on."""
        self._accepts = False

    async def close(self) -> None:
        """Wait until the nodes have read everything and disconnected, then stop listening."""
        if not self._is_open:
            return
        deadline = Deadline.after(_CLOSE_LIMIT)
        try:
            while self._channel.connected() and not deadline.expired():  # noqa: ASYNC110 - two may end it
                await asyncio.sleep(0.01)
        finally:  # a cancelled wait too
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            await _close(self._channel)

    def _look(self) -> None:
        for name, event in self._channel.events():
            if isinstance(event, Lost):
                self._forget(name)
            elif isinstance(event, Said) and name in self._ranks:
                if event.topic in _FROM_NODES:  # arbitrary topics must not fill the memory
                    self._received.setdefault(event.topic, {})[self._ranks[name]] = event.value
            elif isinstance(event, Said) and event.topic == GREETING:
                with contextlib.suppress(ValueError):
                    self._receive_greeting(name, from_json(Greeting, event.value))

    def _receive_greeting(self, name: str, greeting: Greeting) -> None:
        rejected = self._find_refusal(greeting)
        answer = Answer(nonce=self.nonce, greeting=self._own, rejected=rejected)
        self._send(ANSWER, write(answer), name)
        if rejected is not None:
            # Node rank 0 greets its own endpoint to check where it leads; that is not a refused node.
            if greeting != self._own and len(self._rejected) < _MOST_REJECTED:
                self._rejected.append(rejected)
            self._refused.add(name)
            if RESULTS in self._sent:
                self._send(RESULTS, self._sent[RESULTS], name)
            return
        rank = greeting.node_rank
        for values in self._received.values():
            values.pop(rank, None)  # sent by an earlier doctor there, before it was restarted
        self._nodes[rank], self._ranks[name] = (name, greeting), rank
        self.peers[rank] = (greeting.hostname, self._channel.host_of(name))
        # A node that joins late needs what the others have received already.
        for topic, value in self._sent.items():
            self._send(topic, value, name)

    def _find_refusal(self, greeting: Greeting) -> Rejected | None:
        own, rank = self._own, greeting.node_rank
        if greeting.version != own.version:
            return Rejected(reason="version", greeting=greeting)
        if (greeting.nnodes, greeting.job) != (own.nnodes, own.job) or not 0 <= rank < own.nnodes:
            return Rejected(reason="other-job", greeting=greeting)
        name, holder = self._nodes.get(rank, ("", own if rank == 0 else None))
        if name in self._channel.away():  # it was started again, and its first connection was reset
            self._channel.give_up_away([name])
            self._forget(name)
            holder = None
        if holder is not None:
            return Rejected(
                reason="duplicate", greeting=greeting, holder=holder.hostname, holder_pid=holder.pid
            )
        return None if self._accepts else Rejected(reason="late", greeting=greeting)

    def _forget(self, name: str) -> None:
        self._refused.discard(name)
        rank = self._ranks.pop(name, None)
        if rank is not None:
            del self._nodes[rank]

    def _send(self, topic: str, value: Json, names: str | Collection[str]) -> None:
        self._channel.send(Said(topic=topic, value=value), to=names)
