"""The network of the simulation: hosts, and the channel between launchers as `_job.channel` promises it.

Messages arrive in order and once. A connection that breaks is dialled again, and nothing is missing then. How it
broke decides how long a node may stay away. `tests/nodes/test_messages.py` and `tests/nodes/test_security.py` hold the
real channel to the same, over sockets.
"""

from __future__ import annotations

import errno
import itertools
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import virtual_time

from ddpsafe._job import channel as real
from ddpsafe._limits import LOSS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from virtual_time import Kernel

_DELAY_S = (0.0002, 0.02)
_NOTICED_S = (LOSS_S, LOSS_S + 1.5)
_RESET_S = real._RESET_S
_handles = itertools.count(1_000_000)


@dataclass(eq=False)
class Host:
    """A machine."""

    name: str
    address: str
    monotonic_ahead_s: float = 0.0
    wall_ahead_s: float = 0.0
    is_up: bool = True
    has_mount: bool = True
    boots: int = 0


@dataclass(eq=False)
class Launcher:
    """A launcher's process."""

    name: str
    host: Host
    is_dead: bool = False
    is_paused: bool = False
    reads_within_s: float = 0.0
    inbox: Any = None
    channel: Channel | None = None
    failures: list[Any] = field(default_factory=list)

    @property
    def monotonic_ahead_s(self) -> float:
        """Of its host."""
        return self.host.monotonic_ahead_s

    @property
    def wall_ahead_s(self) -> float:
        """Of its host."""
        return self.host.wall_ahead_s


class Network:
    """Which hosts reach each other, and who listens where."""

    def __init__(self, kernel: Kernel) -> None:
        """Begin with no hosts."""
        self.kernel = kernel
        self.hosts: dict[str, Host] = {}
        self.listeners: dict[tuple[str, int], Channel] = {}
        self.links: list[Link] = []
        self.note_sent: Callable[[object], None] = id
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._was_up_s: dict[frozenset[str], float] = {}

    def add(self, host: Host) -> None:
        """Connect a host."""
        self.hosts[host.address] = host

    def travels(self, sender: Host, to: Host) -> bool:
        """Return whether packets travel from one host to another."""
        return sender.is_up and to.is_up and not self._cuts[sender.address, to.address]

    def is_open(self, one: Host, other: Host) -> bool:
        """Return whether packets travel between two hosts, in both directions."""
        return self.travels(one, other) and self.travels(other, one)

    def unheard_s(self, one: Host, other: Host) -> float:
        """Return for how long the kernel of a host has heard nothing of another one."""
        if self.is_open(one, other):
            return 0.0
        pair = frozenset((one.address, other.address))
        return self.kernel.now_s - self._was_up_s.get(pair, 0.0)

    def _links_between(self, one: Host, other: Host) -> list[Link]:
        return [
            link for link in self.links if {one, other} == {end.launcher.host for end in link.ends}
        ]

    def cut(self, sender: Host, to: Host, how: str) -> None:
        """Stop all packets from one host to another, without an answer or with a reset."""
        if self.is_open(sender, to):
            self._was_up_s[frozenset((sender.address, to.address))] = self.kernel.now_s
        self._cuts[sender.address, to.address] += 1
        for link in self._links_between(sender, to):
            link.lose_packets(how)

    def repair(self, sender: Host, to: Host) -> None:
        """Let them travel again."""
        self._cuts[sender.address, to.address] -= 1
        if self.is_open(sender, to):
            for link in self._links_between(sender, to):
                link.find_packets()

    def stop_host(self, host: Host) -> None:
        """Take its power away."""
        for other in self.hosts.values():
            if other is not host and self.is_open(host, other):
                self._was_up_s[frozenset((host.address, other.address))] = self.kernel.now_s
        host.is_up = False
        for link in self.links:
            if host in {end.launcher.host for end in link.ends}:
                link.lose_packets("drop")

    def start_host(self, host: Host) -> None:
        """Give it power again: whatever ran there is gone."""
        host.is_up = True
        host.boots += 1
        for link in self.links:
            if host in {end.launcher.host for end in link.ends}:
                link.find_packets()


class End:
    """One end of a link: what one launcher knows of its connection to another."""

    def __init__(self, channel: Channel, name: Any) -> None:
        """Begin connected."""
        self.channel, self.name = channel, name
        self.launcher = channel.launcher
        self.outbox: deque[Any] = deque()
        self.away: real.Lost | None = None  # what it counts as if it does not come back
        self.away_since_s = self.limit_s = 0.0
        self.is_gone = False
        self.heard_s = 0.0
        self.is_sending = False

    @property
    def is_connected(self) -> bool:
        """Whether it takes itself for connected."""
        return self.away is None and not self.is_gone


class Link:
    """The connection between a launcher and node 0's, over all its sockets."""

    def __init__(self, network: Network, node_0: End, other: End) -> None:
        """Begin connected."""
        self._network, self._kernel = network, network.kernel
        self.ends = (node_0, other)
        self.node_0, self.other = node_0, other
        self._socket = 0
        self._leaving: End | None = None
        network.links.append(self)

    def opposite(self, end: End) -> End:
        """Return the other end."""
        return self.other if end is self.node_0 else self.node_0

    def _is_open(self) -> bool:
        return self._network.is_open(self.node_0.launcher.host, self.other.launcher.host)

    def _carries(self, end: End) -> bool:
        """Return whether what an end sends arrives."""
        travels = self._network.travels(end.launcher.host, self.opposite(end).launcher.host)
        return travels and self.node_0.is_connected and self.other.is_connected

    # Messages.

    def send(self, end: End, message: Any) -> None:
        """Send from an end."""
        is_routine = isinstance(message, end.channel.routine)
        if end.is_gone or (is_routine and not end.is_connected):
            return
        end.outbox.append(message)
        self._pump(end)

    def _pump(self, end: End) -> None:
        if end.outbox and not end.is_sending and self._carries(end):
            end.is_sending = True
            delay_s = self._kernel.random.uniform(*_DELAY_S)
            reads_within_s = self.opposite(end).launcher.reads_within_s
            delay_s += self._kernel.random.uniform(0, reads_within_s) if reads_within_s else 0.0
            self._kernel.after(delay_s, lambda: self._deliver(end))

    def _deliver(self, end: End) -> None:
        end.is_sending = False
        to = self.opposite(end)
        if not self._carries(end) or to.launcher.is_dead:
            return
        if to.launcher.is_paused:
            self._kernel.deferred.append((to.launcher, lambda: self._pump(end)))
            return
        while end.outbox:
            to.channel.take(to, end.outbox.popleft())

    # Outages.

    def lose_packets(self, how: str) -> None:
        """Note that packets no longer travel."""
        socket = self._socket
        for end in self.ends:
            if how == "reset":
                self._kernel.after(
                    self._kernel.random.uniform(*_DELAY_S),
                    lambda end=end: self._break(end, "reset", socket),
                )
            else:
                self._kernel.after(
                    self._kernel.random.uniform(*_NOTICED_S),
                    lambda end=end: self._notice(end, socket),
                )

    def _notice(self, end: End, socket: int) -> None:
        if (
            self._is_open()
            or socket != self._socket
            or not end.is_connected
            or end.launcher.is_dead
        ):
            return
        if end is self._leaving:
            return
        if end.launcher.is_paused:
            self._kernel.deferred.append((end.launcher, lambda: self._notice(end, socket)))
            return
        unheard_s = self._network.unheard_s(*(each.launcher.host for each in self.ends))
        if unheard_s < LOSS_S:
            left_s = LOSS_S - unheard_s + 0.1
            self._kernel.after(left_s, lambda: self._notice(end, socket))
            return
        self._break(end, "silence", socket)

    def find_packets(self) -> None:
        """Note that packets travel again."""
        socket = self._socket
        for end in self.ends:
            other = self.opposite(end)
            if end.is_connected and not other.is_connected:
                # Its next packet is answered with a reset.
                self._kernel.after(0.5, lambda end=end: self._break(end, "reset", socket))
            self._pump(end)
        if self._leaving is not None:
            self.leave(self._leaving)

    def _break(self, end: End, how: str, socket: int) -> None:
        if socket != self._socket or not end.is_connected or end.launcher.is_dead:
            return
        if end.launcher.is_paused:
            self._kernel.deferred.append((end.launcher, lambda: self._break(end, how, socket)))
            return
        limit_s = end.channel.node_loss_s
        if how == "reset":
            limit_s = min(limit_s, _RESET_S)
        code = errno.ETIMEDOUT if how == "silence" else errno.ECONNRESET
        why = "Connection timed out" if code == errno.ETIMEDOUT else "Connection reset by peer"
        self._set_away(end, how, why, limit_s)
        self._dial_soon()
        if how == "silence" or not self._is_open():
            return
        other = self.opposite(end)
        self._kernel.after(0.5, lambda: self._break(other, "reset", socket))

    def _set_away(self, end: End, how: Any, why: str, limit_s: float) -> None:
        with self._kernel.at(end.launcher):
            seen_ns = int(virtual_time.monotonic_s() * 1e9)
        silent_s = LOSS_S if how == "silence" else 0.0
        end.away = real.Lost(how=how, why=why, silent_s=silent_s, seen_ns=seen_ns)
        end.away_since_s, end.limit_s = self._kernel.now_s, limit_s
        if limit_s <= 0:
            self.give_up(end)
            return
        end.channel.put(end.name, real.Away(how=how, why=why, limit_s=limit_s))
        self._expire_later(end)

    def _expire_later(self, end: End) -> None:
        away = end.away
        left_s = end.away_since_s + end.limit_s - self._kernel.now_s

        def expire() -> None:
            if end.away is not away or end.is_gone:
                return
            if end.launcher.is_paused:
                self._kernel.deferred.append((end.launcher, expire))
            elif not end.launcher.is_dead:
                self.give_up(end)

        self._kernel.after(max(0.0, left_s), expire)

    def give_up(self, end: End) -> None:
        """Take the other end for lost."""
        if end.away is not None and not end.is_gone:
            end.is_gone = True
            silent_s = end.away.silent_s + self._kernel.now_s - end.away_since_s
            end.channel.put(end.name, replace(end.away, silent_s=silent_s))

    def _dial_soon(self) -> None:
        self._kernel.after(self._kernel.random.uniform(0.01, real.BEAT_S), self._dial)

    def _dial(self) -> None:
        """Dial again, as the launcher that is not node 0 does every second."""
        node_0, other = self.node_0, self.other
        if other.is_connected or other.is_gone or other.launcher.is_dead:
            return
        if other.launcher.is_paused or not self._is_open() or node_0.launcher.is_paused:
            self._kernel.after(real.BEAT_S, self._dial)
            return
        listening = self._network.listeners.get(other.channel.dialled)
        if listening is None:
            self._refused(other)
        elif listening is not node_0.channel:
            self.give_up(other)  # another launcher serves the endpoint by now
        elif node_0.is_gone:
            self._kernel.after(real.BEAT_S, self._dial)
        else:
            self._connect_again()

    def _refused(self, other: End) -> None:
        """The host answers, and no launcher listens there."""
        if other.away is not None and other.away.how == "silence":
            waited_s = self._kernel.now_s - other.away_since_s
            other.away = replace(other.away, how="reset", why="Connection refused")
            other.limit_s = min(other.limit_s, waited_s + _RESET_S)
            self._expire_later(other)
        self._kernel.after(real.BEAT_S, self._dial)

    def _connect_again(self) -> None:
        self._socket += 1
        for end in self.ends:
            away, end.away = end.away, None
            end.heard_s = self._kernel.now_s
            if away is not None:
                away_s = away.silent_s + self._kernel.now_s - end.away_since_s
                end.channel.put(end.name, real.Back(away_s=away_s))
        for end in self.ends:
            self._pump(end)

    # Ends of launchers.

    def leave(self, end: End) -> None:
        """A launcher takes leave, after what it has sent before."""
        other = self.opposite(end)
        if end.is_connected and not self._is_open():
            self._leaving = end  # its kernel sends what is left once it can
            return
        if not self._carries(end):
            self.vanish(end)
            return

        def arrive() -> None:
            if other.launcher.is_paused:
                self._kernel.deferred.append((other.launcher, arrive))
            elif other.is_connected and not other.launcher.is_dead:
                while end.outbox:
                    other.channel.take(other, end.outbox.popleft())
                self._set_away(other, "goodbye", "its launcher has ended", 0.0)
            end.is_gone = True

        self._kernel.after(_DELAY_S[1], arrive)

    def vanish(self, end: End) -> None:
        """The process of a launcher ends, or its host does."""
        other = self.opposite(end)
        end.is_gone = True
        end.outbox.clear()
        if not other.is_connected or not end.launcher.host.is_up:
            if other.is_connected:
                self.lose_packets("drop")
            return
        if not self._network.travels(end.launcher.host, other.launcher.host):
            return  # it is noticed by what the host answers, once it is reached
        how = self._kernel.random.choice(["ended", "reset"])
        socket = self._socket

        def arrive() -> None:
            if other.launcher.is_paused:
                self._kernel.deferred.append((other.launcher, arrive))
            elif how == "reset":
                self._break(other, "reset", socket)
            elif other.is_connected and not other.launcher.is_dead:
                self._set_away(other, "ended", "its launcher has ended", 0.0)

        self._kernel.after(self._kernel.random.uniform(*_DELAY_S), arrive)


class Channel:
    """`ddpsafe._job.channel.Channel` over the network of the simulation."""

    network: Network

    def __class_getitem__(cls, _: object) -> type[Channel]:
        """Return the class, whatever its messages are."""
        return cls

    def __init__(self, launcher: Launcher, scope: str, codec: Any, node_loss_s: float) -> None:
        """Begin without any connection."""
        self.launcher, self.scope = launcher, scope
        self.node_loss_s, self.routine = node_loss_s, codec.routine
        self.refused: list[Any] = []
        self.dialled: tuple[str, int] = ("", 0)
        self._first: Any = None
        self._at_once: dict[type, Callable[..., None]] = {}
        self._links: dict[Any, tuple[Link, End]] = {}
        self._events: deque[tuple[Any, Any]] = deque()
        self._has_news = False
        self._is_closed = False
        self._handle = next(_handles)
        self._port: tuple[str, int] | None = None
        virtual_time.ready_handles[self._handle] = lambda: self._has_news
        launcher.channel = self

    @classmethod
    def listen(
        cls, address: str, *, port: int, scope: str, codec: Any, node_loss: Any, **options: Any
    ) -> Channel:
        """Listen as node 0."""
        network, launcher = cls.network, cls._launcher()
        if (address, port) in network.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        channel = cls(launcher, scope, codec, node_loss.total_seconds())
        channel._first, channel._at_once = options["first"], dict(options["at_once"])
        channel._port = (address, port)
        network.listeners[address, port] = channel
        return channel

    @classmethod
    def _launcher(cls) -> Launcher:
        place = virtual_time.running.place if virtual_time.running else None
        assert isinstance(place, Launcher)
        return place

    @classmethod
    def dial(
        cls,
        address: tuple[str, int],
        *,
        codec: Any,
        node: str,
        hello: Any,
        deadline: Any,
        node_loss: Any,
        **options: Any,
    ) -> Channel:
        """Connect to node 0."""
        del hello
        network, launcher = cls.network, cls._launcher()
        host = network.hosts[address[0]]
        kernel = network.kernel
        assert kernel.task is not None
        kernel.task.pause(kernel.random.uniform(*_DELAY_S))
        if not network.is_open(launcher.host, host):
            kernel.task.pause(min(5.0, deadline.remaining_s()))
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        listening = network.listeners.get(address)
        if listening is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        if listening.launcher.is_paused:
            kernel.task.pause(deadline.remaining_s())
            raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")
        channel = cls(launcher, listening.scope, codec, node_loss.total_seconds())
        channel.dialled = address
        channel._at_once = dict(options.get("at_once") or {})
        node_0, other = End(listening, node), End(channel, 0)
        link = Link(network, node_0, other)
        listening._links[node] = (link, node_0)
        channel._links[0] = (link, other)
        if listening._first is not None:
            link.send(node_0, listening._first)
        return channel

    @property
    def port(self) -> int:
        """The port of the endpoint."""
        return 0 if self._port is None else self._port[1]

    def fileno(self) -> int:
        """Return the handle to wait for."""
        return self._handle

    def events(self) -> Iterator[tuple[Any, Any]]:
        """Yield what has arrived."""
        self._has_news = False
        now_s = self.network.kernel.now_s
        for name, (link, end) in self._links.items():
            other = link.opposite(end)
            runs = not (other.launcher.is_paused or other.launcher.is_dead)
            if runs and link._carries(other) and now_s - end.heard_s >= real.BEAT_S:
                end.heard_s = now_s
                self._events.append((name, real.Alive(sent_ns=0, epoch_ns=0)))
        while self._events:
            yield self._events.popleft()

    def put_back(self, events: Any) -> None:
        """Have events come again."""
        self._events.extendleft(reversed(list(events)))
        self._note_news()

    def put(self, name: Any, event: Any) -> None:
        """Note an event."""
        if self._is_closed or self.launcher.is_dead:
            return
        self._events.append((name, event))
        if not isinstance(event, self.routine):
            self._note_news()

    def _note_news(self) -> None:
        self._has_news = True
        self.network.kernel.news(self.launcher)

    def take(self, end: End, message: Any) -> None:
        """Take in a message, in the channel's thread."""
        end.heard_s = self.network.kernel.now_s
        handler = self._at_once.get(type(message))
        if self._is_closed:
            return
        if handler is None:
            self.put(end.name, message)
        else:
            with self.network.kernel.at(self.launcher):
                handler(self, end.name, message)

    def send(self, message: Any, *, to: Any = None) -> None:
        """Send to one, some or all."""
        if self._is_closed or self.launcher.is_dead:
            return
        self.network.note_sent(message)
        names = [*self._links] if to is None else [to] if isinstance(to, (int, str)) else list(to)
        for name in names:
            if name in self._links:
                link, end = self._links[name]
                link.send(end, message)

    def connected(self) -> set[Any]:
        """Return who is not lost."""
        return {name for name, (_, end) in self._links.items() if not end.is_gone}

    def away(self) -> set[Any]:
        """Return who is away."""
        return {
            name
            for name, (_, end) in self._links.items()
            if end.away is not None and not end.is_gone
        }

    def give_up_away(self, nodes: Collection[Any] | None = None) -> None:
        """Take those that are away for lost."""
        for name in self.away():
            if nodes is None or name in nodes:
                link, end = self._links[name]
                link.give_up(end)

    def offset_of(self, node: Any) -> real.ClockOffset:
        """Return what to add to times of a node."""
        if node not in self._links:
            return real.ClockOffset()
        link, end = self._links[node]
        there = link.opposite(end).launcher
        error_s = 0.001
        mono_s = self.launcher.monotonic_ahead_s - there.monotonic_ahead_s + error_s
        wall_s = self.launcher.wall_ahead_s - there.wall_ahead_s + error_s
        return real.ClockOffset(mono_ns=int(mono_s * 1e9), wall_ns=int(wall_s * 1e9))

    def has_heard(self, *, within_s: float) -> bool:
        """Return whether the kernel of any connected node was heard of lately."""
        here = self.launcher.host
        return any(
            self.network.travels(host, here) or self.network.unheard_s(host, here) < within_s
            for link, end in self._links.values()
            if end.is_connected and (host := link.opposite(end).launcher.host)
        )

    def carries(self) -> bool:
        """Return whether packets pass in both directions now, on all connections."""
        here = self.launcher.host
        hosts = [
            link.opposite(end).launcher.host
            for link, end in self._links.values()
            if end.is_connected
        ]
        return bool(hosts) and all(self.network.is_open(host, here) for host in hosts)

    def _stop(self) -> None:
        self._is_closed = True
        if self._port is not None and self.network.listeners.get(self._port) is self:
            del self.network.listeners[self._port]

    def close(self) -> None:
        """Take leave."""
        if self._is_closed:
            return
        for link, end in self._links.values():
            if not end.is_gone:
                link.leave(end)
        self._stop()
        virtual_time.ready_handles.pop(self._handle, None)

    def vanish(self) -> None:
        """End with the process."""
        if self._is_closed:
            return
        for link, end in self._links.values():
            link.vanish(end)
        self._stop()
