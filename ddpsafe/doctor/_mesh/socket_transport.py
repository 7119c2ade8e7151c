"""Both ends of the transport over a socket: node rank 0's server, and the other nodes' clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Final, get_args

from ddpsafe.doctor._mesh.link import (
    LONGEST_FROM_COORDINATOR_BYTES,
    LONGEST_FROM_NODE_BYTES,
    LONGEST_GREETING_BYTES,
    BadSignatureError,
    Link,
    NotADoctorError,
    UnknownPeers,
    keep_packets_small,
    make_nonce,
    notice_loss,
)
from ddpsafe.doctor._mesh.protocol import Answer, Greeting, Rejected, Topic
from ddpsafe.doctor._mesh.transport import (
    RESULTS,
    TransportClosedError,
    TransportGarbledError,
    TransportLostError,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ddpsafe.doctor._mesh.protocol import Refusal
    from ddpsafe.doctor._mesh.transport import Json


_TOPICS: Final = frozenset(get_args(Topic))


class Client:
    """The transport of every node except node rank 0.

    Args:
        link: A connection on which node rank 0 has answered this node's greeting.
        coordinator_hostname: The host name of node rank 0.
    """

    def __init__(self, link: Link, *, coordinator_hostname: str) -> None:
        """Start to receive."""
        self.coordinator_hostname = coordinator_hostname
        self.coordinator_address = link.peer.removeprefix("::ffff:")
        self._link = link
        self._received: dict[str, Json] = {}
        self._lost: TransportLostError | None = None
        self._receiving = asyncio.ensure_future(self._receive())

    async def put(self, topic: str, value: Json) -> None:
        """Send a value to node rank 0."""
        if self._lost is not None:
            raise self._lost
        self._link.send({"topic": topic, "value": value})

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return what node rank 0 has sent."""
        if topic in self._received:
            return {0: self._received[topic]}
        if self._lost is not None:
            raise self._lost
        return {}

    def disconnected(self) -> Collection[int]:
        """Return nothing: the loss of node rank 0 is an error instead."""
        return ()

    async def close(self) -> None:
        """Close the connection, which node rank 0 notices."""
        self._receiving.cancel()
        self._link.close()

    async def _receive(self) -> None:
        try:
            while (message := await self._link.receive(LONGEST_FROM_COORDINATOR_BYTES)) is not None:
                topic = message.get("topic")
                if isinstance(topic, str) and topic in _TOPICS:
                    self._received[topic] = message.get("value")
            self._lost = TransportClosedError("it closed the connection")
        except ConnectionResetError as exc:
            self._lost = TransportClosedError(exc.strerror or str(exc))
        except OSError as exc:
            self._lost = TransportLostError(exc.strerror or str(exc))
        except NotADoctorError as exc:
            self._lost = TransportGarbledError(str(exc))


_BACKLOG: Final = 1024
_FROM_NODES: Final = ("hello", "mesh", "imported", "reduced")
_UNKNOWN_PEERS: Final = 256
_UNKNOWN_PEERS_OF_ONE_ADDRESS: Final = 32
_MOST_REJECTED: Final = 256
_GREETING_LIMIT_S: Final = 5.0
_CLOSE_LIMIT_S: Final = 2.0


class Server:
    """The transport of node rank 0.

    Args:
        own: The greeting of node rank 0 itself.
        secret: The secret of all nodes; empty if there is none.
    """

    def __init__(self, own: Greeting, *, secret: str = "") -> None:
        """Start without any value."""
        self.nonce = make_nonce()
        self.rejected: list[Rejected] = []
        self._own, self._secret = own, secret
        self._is_open = True
        self._sent: dict[str, Json] = {}
        self._received: dict[str, dict[int, Json]] = {}
        self._nodes: dict[int, tuple[Greeting, Link]] = {}
        self._refused: set[Link] = set()
        self._joined = {0}
        self.peers: dict[int, tuple[str, str]] = {}
        """Host name and address of every accepted node, by node rank."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._unknown_peers = UnknownPeers(
            most=own.nnodes + _UNKNOWN_PEERS, per_address=own.nnodes + _UNKNOWN_PEERS_OF_ONE_ADDRESS
        )
        self._server: asyncio.Server | None = None

    async def open(self, port: int) -> None:
        """Listen on a port, on every interface.

        Raises:
            OSError: The port is not available.
        """
        # The limit bounds the memory for unknown peers; more is read once a peer is known.
        self._server = await asyncio.start_server(
            self._receive, sock=_listen(port), limit=LONGEST_GREETING_BYTES
        )

    async def put(self, topic: str, value: Json) -> None:
        """Send a value to every node."""
        self._sent[topic] = value
        links = [link for _, link in self._nodes.values()]
        for link in [*links, *self._refused] if topic == RESULTS else links:
            link.send({"topic": topic, "value": value})
        self._received.setdefault(topic, {})[0] = value

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return what the nodes have sent."""
        return self._received.get(topic, {})

    def disconnected(self) -> Collection[int]:
        """Return the nodes that joined and whose connection has ended."""
        return self._joined - self._nodes.keys() - {0}

    def close_registration(self) -> None:
        """Refuse all nodes from now on."""
        self._is_open = False

    async def close(self) -> None:
        """Wait until the nodes have read everything and disconnected, then stop listening."""
        if self._server is not None:
            self._server.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_LIMIT_S)
        for task in self._tasks:
            task.cancel()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs every connection as a task
        self._tasks.add(task)
        link = Link(reader, writer, self._secret)
        self._unknown_peers.admit(task, link.peer)
        try:
            notice_loss(writer.get_extra_info("socket"))
            await self._serve(link)
        except (OSError, NotADoctorError, asyncio.TimeoutError):
            pass
        except asyncio.CancelledError:  # by close() or to make room; Python < 3.12 would report it
            pass
        finally:
            self._tasks.discard(task)
            self._unknown_peers.forget(task)
            link.close()

    async def _serve(self, link: Link) -> None:
        try:
            greeting = await asyncio.wait_for(link.receive_greeting(Greeting), _GREETING_LIMIT_S)
        except BadSignatureError as exc:
            if isinstance(exc.message, Greeting):  # it cannot verify the answer, and reports that
                rejected = Rejected(reason="secret", greeting=exc.message)
                link.send_greeting(self._answer(rejected), context=exc.message.challenge)
                self._remember(rejected)
            return
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - as above
        self._unknown_peers.forget(task)
        refusal = self._find_refusal(greeting)
        answer = self._answer(refusal)
        link.send_greeting(answer, context=greeting.challenge)
        link.begin_session(greeting.challenge + answer.session, is_node=False)
        if refusal is not None:
            self._remember(refusal)
            # A refused node stays connected for the results, so that all nodes end with the same findings.
            self._refused.add(link)
            try:
                if RESULTS in self._sent:
                    link.send({"topic": RESULTS, "value": self._sent[RESULTS]})
                await link.receive(LONGEST_GREETING_BYTES)  # it sends nothing until it disconnects
            finally:
                self._refused.discard(link)
            return
        node = greeting.node_rank
        for values in self._received.values():
            values.pop(node, None)  # sent by an earlier doctor there, before it was restarted
        self._nodes[node] = (greeting, link)
        self._joined.add(node)
        self.peers[node] = (greeting.hostname, link.peer.removeprefix("::ffff:"))
        try:
            for topic, value in self._sent.items():
                link.send({"topic": topic, "value": value})
            while (message := await link.receive(LONGEST_FROM_NODE_BYTES)) is not None:
                # Arbitrary topics must not fill the memory.
                if (sent := message.get("topic")) in _FROM_NODES:
                    self._received.setdefault(str(sent), {})[node] = message.get("value")
        finally:
            del self._nodes[node]

    def _remember(self, rejected: Rejected) -> None:
        # Node rank 0 greets its own endpoint to check where it leads; that is not a rejected node.
        if rejected.greeting != self._own and len(self.rejected) < _MOST_REJECTED:
            self.rejected.append(rejected)

    def _find_refusal(self, greeting: Greeting) -> Rejected | None:
        own, rank = self._own, greeting.node_rank
        if greeting.version != own.version:
            return Rejected(reason="version", greeting=greeting)
        if (greeting.nnodes, greeting.job) != (own.nnodes, own.job) or not 0 <= rank < own.nnodes:
            return Rejected(reason="other-job", greeting=greeting)
        holder = own if rank == 0 else self._nodes[rank][0] if rank in self._nodes else None
        if holder is not None:
            return Rejected(
                reason="duplicate", greeting=greeting, holder=holder.hostname, holder_pid=holder.pid
            )
        return None if self._is_open else Rejected(reason="late", greeting=greeting)

    def _answer(self, rejected: Rejected | None) -> Answer:
        refusal: Refusal = rejected.reason if rejected is not None else ""
        return Answer(
            nonce=self.nonce,
            session=make_nonce(),
            hostname=self._own.hostname,
            nnodes=self._own.nnodes,
            job=self._own.job,
            version=self._own.version,
            refusal=refusal,
            holder=rejected.holder if rejected is not None else "",
            holder_pid=rejected.holder_pid if rejected is not None else 0,
        )


def _listen(port: int) -> socket.socket:
    listening = None
    with contextlib.suppress(OSError):
        if socket.has_dualstack_ipv6():
            listening = socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
            )
    if listening is None:
        listening = socket.create_server(("", port), backlog=_BACKLOG)
    keep_packets_small(listening)
    return listening
