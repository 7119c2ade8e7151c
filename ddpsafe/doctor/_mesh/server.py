"""Both ends of the transport over a socket: node rank 0's server, and the others' connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Final, get_args

from ddpsafe.doctor._mesh import protocol
from ddpsafe.doctor._mesh.messages import Answer, Greeting, Rejected, Topic
from ddpsafe.doctor._mesh.transport import BoardGarbledError, BoardLostError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from ddpsafe.doctor._mesh.messages import Refusal
    from ddpsafe.doctor._mesh.transport import Json


_TOPICS: Final = frozenset(get_args(Topic))


class Guest:
    """The board as a node other than node rank 0 sees it.

    Args:
        link: A connection on which node rank 0 has welcomed this node.
        hub_hostname: What the host of node rank 0 calls itself.
    """

    def __init__(self, link: protocol.Link, *, hub_hostname: str) -> None:
        """Start to listen."""
        self.hub_hostname = hub_hostname
        self.hub_address = link.peer.removeprefix("::ffff:")
        self._link = link
        self._heard: dict[str, Json] = {}
        self._lost: BoardLostError | None = None
        self._listening = asyncio.ensure_future(self._listen())

    async def put(self, topic: str, value: Json) -> None:
        """Say something to node rank 0."""
        if self._lost is not None:
            raise self._lost
        self._link.send({"topic": topic, "value": value})

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return what node rank 0 has said."""
        if topic in self._heard:
            return {0: self._heard[topic]}
        if self._lost is not None:
            raise self._lost
        return {}

    def gone(self) -> Collection[int]:
        """Return nothing: that node rank 0 has gone is an error instead."""
        return ()

    async def close(self) -> None:
        """Leave, and let node rank 0 see it."""
        self._listening.cancel()
        self._link.close()

    async def _listen(self) -> None:
        try:
            while (
                message := await self._link.receive(protocol.LONGEST_FROM_HUB_BYTES)
            ) is not None:
                topic = message.get("topic")
                if isinstance(topic, str) and topic in _TOPICS:
                    self._heard[topic] = message.get("value")
            self._lost = BoardLostError("it closed the connection")
        except OSError as exc:
            self._lost = BoardLostError(exc.strerror or str(exc))
        except protocol.StrangerError as exc:
            self._lost = BoardGarbledError(str(exc))


_BACKLOG: Final = 1024
_FROM_NODES: Final = ("hello", "mesh", "imported", "reduced")
_STRANGERS: Final = 256
_STRANGERS_OF_ONE_ADDRESS: Final = 32
_MOST_REJECTED: Final = 256
_GREETING_S: Final = 5.0
_FAREWELL_S: Final = 2.0


class Hub:
    """The board as node rank 0 sees it.

    Args:
        own: How node rank 0 would introduce itself.
        secret: What all nodes know; empty where there is none.
    """

    def __init__(self, own: Greeting, *, secret: str = "") -> None:
        """Start with nothing said."""
        self.nonce = protocol.make_nonce()
        self.rejected: list[Rejected] = []
        self._own, self._secret = own, secret
        self._is_open = True
        self._said: dict[str, Json] = {}
        self._heard: dict[str, dict[int, Json]] = {}
        self._nodes: dict[int, tuple[Greeting, protocol.Link]] = {}
        self._came = {0}
        self._tasks: set[asyncio.Task[None]] = set()
        self._visitors = protocol.Visitors(
            most=own.nnodes + _STRANGERS, per_address=own.nnodes + _STRANGERS_OF_ONE_ADDRESS
        )
        self._server: asyncio.Server | None = None

    async def open(self, port: int) -> None:
        """Listen on a port, on every interface.

        Raises:
            OSError: The port cannot be had.
        """
        # So much is kept of what a stranger sends; more is read when it has said who it is.
        self._server = await asyncio.start_server(
            self._receive, sock=_listen(port), limit=protocol.LONGEST_GREETING_BYTES
        )

    async def put(self, topic: str, value: Json) -> None:
        """Say something to every node."""
        self._said[topic] = value
        for _, link in self._nodes.values():
            link.send({"topic": topic, "value": value})
        self._heard.setdefault(topic, {})[0] = value

    async def get(self, topic: str) -> Mapping[int, Json]:
        """Return what the nodes have said."""
        return self._heard.get(topic, {})

    def gone(self) -> Collection[int]:
        """Return the nodes that came and whose connection has ended."""
        return self._came - self._nodes.keys() - {0}

    def close_roll(self) -> None:
        """Let no further node in."""
        self._is_open = False

    async def close(self) -> None:
        """Wait until the nodes have read what was said and left, then stop listening."""
        if self._server is not None:
            self._server.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_FAREWELL_S)
        for task in self._tasks:
            task.cancel()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - asyncio runs every connection as a task
        self._tasks.add(task)
        link = protocol.Link(reader, writer, self._secret)
        self._visitors.admit(task, link.peer)
        try:
            protocol.notice_loss(writer.get_extra_info("socket"))
            await self._converse(link)
        except (OSError, protocol.StrangerError, asyncio.TimeoutError):
            pass
        except asyncio.CancelledError:  # by close() or to make room; Python < 3.12 would report it
            pass
        finally:
            self._tasks.discard(task)
            self._visitors.forget(task)
            link.close()

    async def _converse(self, link: protocol.Link) -> None:
        try:
            greeting = await asyncio.wait_for(link.receive_greeting(Greeting), _GREETING_S)
        except protocol.ForgedError as exc:
            if isinstance(exc.message, Greeting):  # it cannot verify this, and says so
                stranger = Rejected(reason="secret", greeting=exc.message)
                link.send_greeting(self._answer(stranger), context=exc.message.challenge)
                self._remember(stranger)
            return
        if greeting.version != protocol.VERSION:
            return
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - as above
        self._visitors.forget(task)
        rejected = self._judge(greeting)
        answer = self._answer(rejected)
        link.send_greeting(answer, context=greeting.challenge)
        if rejected is not None:
            self._remember(rejected)
            return
        link.begin_session(greeting.challenge + answer.session, is_node=False)
        node = greeting.node_rank
        for sayings in self._heard.values():
            sayings.pop(node, None)  # of a doctor there that was ended and started again
        self._nodes[node] = (greeting, link)
        self._came.add(node)
        try:
            for topic, value in self._said.items():
                link.send({"topic": topic, "value": value})
            await self._listen_to(node, link)
        finally:
            del self._nodes[node]

    def _remember(self, rejected: Rejected) -> None:
        # Node rank 0 looks whether the endpoint leads to itself; another one may come as well.
        if rejected.greeting != self._own and len(self.rejected) < _MOST_REJECTED:
            self.rejected.append(rejected)

    async def _listen_to(self, node: int, link: protocol.Link) -> None:
        while (message := await link.receive(protocol.LONGEST_FROM_NODE_BYTES)) is not None:
            topic = message.get("topic")
            if topic in _FROM_NODES:  # what a stranger calls a topic must not fill the memory
                self._heard.setdefault(str(topic), {})[node] = message.get("value")

    def _judge(self, greeting: Greeting) -> Rejected | None:
        own, rank = self._own, greeting.node_rank
        if (greeting.nnodes, greeting.job) != (own.nnodes, own.job) or not 0 <= rank < own.nnodes:
            return Rejected(reason="other-job", greeting=greeting)
        holder = own if rank == 0 else self._nodes[rank][0] if rank in self._nodes else None
        if holder is not None:
            return Rejected(
                reason="doubled", greeting=greeting, holder=holder.hostname, holder_pid=holder.pid
            )
        return None if self._is_open else Rejected(reason="late", greeting=greeting)

    def _answer(self, rejected: Rejected | None) -> Answer:
        refusal: Refusal = rejected.reason if rejected is not None else ""
        return Answer(
            nonce=self.nonce,
            session=protocol.make_nonce(),
            hostname=self._own.hostname,
            nnodes=self._own.nnodes,
            job=self._own.job,
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
    protocol.keep_packets_small(listening)
    return listening
