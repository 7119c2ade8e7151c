"""What the launchers find in place of the machine: the simulated network, processes, signals and threads."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
from datetime import datetime
from typing import TYPE_CHECKING, Any

import network as net
import ranks
import virtual_time
from jobs import Job
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from ddpsafe import _clock
from ddpsafe._host import Interface
from ddpsafe._job import endpoint
from ddpsafe._launcher import attempt, retry
from ddpsafe._launcher.nodes import (
    node_zero,
    other_node,
    rendezvous,
    rounds,
    texts,
    torchs_rendezvous,
)
from ddpsafe._launcher.nodes.node_messages import FolderCheck, FoldersSeen
from ddpsafe._launcher.watch import idleness, signals, supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def install() -> None:
    """Put them in place."""
    _hosts()
    _threads()
    _signals()
    _ports()
    _folders()
    _processes()
    _torch()


def _here() -> net.Launcher:
    place = None if virtual_time.running is None else virtual_time.running.place
    assert isinstance(place, net.Launcher)
    return place


def _kernel() -> virtual_time.Kernel:
    assert virtual_time.running is not None
    return virtual_time.running


def _hosts() -> None:
    def interfaces() -> list[Interface]:
        address = ipaddress.IPv4Interface(f"{_here().host.address}/24")
        return [Interface(name="eth0", networks=(address,), mtu_bytes=1500, is_running=True)]

    def random_id(count: int = 16) -> str:
        return f"{_kernel().random.getrandbits(8 * count):0{2 * count}x}"

    socket.gethostname = lambda: _here().host.name
    secrets.token_hex = random_id
    endpoint.look_up = lambda host, _: [
        each.address for each in Job.current.hosts if each.name == host
    ]
    endpoint.list_interfaces = rendezvous.list_interfaces = interfaces
    endpoint.find_address_towards = lambda _: _here().host.address
    endpoint.find_interface_of = lambda _: None
    rendezvous.Channel = net.Channel


def _threads() -> None:
    def begin(self: Any, function: Callable[[], object], *, name: str) -> None:
        del name
        self._function, self._outcome, self._error, self._dispose = function, [], None, None
        self._lock = contextlib.nullcontext()
        self._task = _kernel().spawn(_here(), self._run)

    def wait(self: Any, limit_s: float) -> bool:
        if not self._task.is_done and limit_s > 0:
            _kernel().wait_for(self._task, min(limit_s, virtual_time.NEVER_S))
        return bool(self._task.is_done)

    _clock.BoundedCall.__init__, _clock.BoundedCall.wait = begin, wait
    rendezvous.threading = torchs_rendezvous.threading = virtual_time.Threading


class _Inbox(signals.SignalInbox):
    """The signals to one launcher, without a pipe."""

    def __init__(self) -> None:
        super().__init__(0, 0)
        self.has_news = False
        virtual_time.ready_handles[id(self)] = lambda: self.has_news

    def fileno(self) -> int:
        return id(self)


class _Os:
    """`os`, with the pipes of inboxes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @staticmethod
    def write(*_: object) -> None:
        _here().inbox.has_news = True
        _kernel().news(_here())

    @staticmethod
    def read(*_: object) -> None:
        _here().inbox.has_news = False


def _signals() -> None:
    @contextlib.contextmanager
    def open_inbox(earlier: Any = None) -> Iterator[_Inbox]:
        launcher, inbox = _here(), _Inbox()
        before, launcher.inbox = launcher.inbox, inbox
        if earlier is not None and earlier.received is not None:
            inbox.put(earlier.received, None, earlier.where)
        yield inbox
        launcher.inbox = before or inbox

    for module in (signals, supervisor, node_zero, other_node):
        module.os = _Os()
    rounds.open_inbox = retry.open_inbox = open_inbox


def _ports() -> None:
    @contextlib.contextmanager
    def port(*_: object) -> Iterator[int]:
        yield 12345

    class Listening:
        def getsockname(self) -> tuple[str, int]:
            return ("", 12345)

    def unreached(address: str, _: int, limit: Any) -> str:
        network = Job.current.network
        for pause_s in (limit.total_seconds(), 0.0):
            if network.is_open(_here().host, network.hosts[address]):
                return ""
            _kernel().pause(pause_s)
        return f"{_here().host.name} reached no store at {address}."

    rounds.rank_store = rounds.reserved_port = port
    rounds.listen_at = lambda *_: contextlib.nullcontext(Listening())
    rounds._unreached = unreached


def _folders() -> None:
    def look_at(check: FolderCheck) -> FoldersSeen:
        missing = () if _here().host.has_mount else check.folders
        _kernel().pause(5.0 if missing else 0.1)
        return FoldersSeen(file=check.file, missing=missing)

    rounds._file_in = lambda folders: contextlib.nullcontext(
        (rounds.make_random_id(), tuple(sorted(folders)))
    )
    rounds._look_at = look_at


class _NoWatch:
    """A watch that sees nothing: deadlocks, texts on stderr and ``ddpsafe status`` are not simulated."""

    proof = None
    is_asked = False

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def handles(self) -> list[int]:
        return []

    def accept(self) -> None:
        pass

    def interval_s(self) -> float:
        return virtual_time.NEVER_S

    def is_deadlocked(self) -> bool:
        return False

    def look(self) -> None:
        pass

    def close(self) -> None:
        pass


def _nothing(*_: object, **__: object) -> None:
    pass


def _processes() -> None:
    attempt.started_ranks = lambda number, parts, _: ranks.started_ranks(
        Job.current, _here(), number, parts
    )
    attempt.open_console = other_node.open_console = lambda *_, **__: contextlib.nullcontext()
    attempt.rank_readings.count_oom_kills = lambda: 0
    supervisor.StderrWatch = other_node.StderrWatch = _NoWatch
    supervisor.LiveWatch = other_node.StatusSocket = _NoWatch
    attempt.ask_where, attempt.log_stragglers = ranks.ask_where, _nothing
    attempt.rank_readings.continue_suspended = _nothing
    supervisor.reap_orphans = other_node.reap_orphans = _nothing
    rounds.note_event = texts.note_event = rounds.note_attempt = _nothing
    idleness.read_unanswered = lambda *_: {}
    rounds.version = lambda _: "1"


def _torch() -> None:
    class Datetime(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.fromtimestamp(virtual_time.wall_s(), tz)

    dynamic_rendezvous.datetime = torchs_rendezvous.datetime = Datetime
    # Its events carry the stack, which takes longer than all else.
    dynamic_rendezvous.construct_and_record_rdzv_event = _nothing
    dynamic_rendezvous.get_method_name = lambda *_: ""
