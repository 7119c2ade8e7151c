"""This machine: its cores, mounts, file ownership and network interfaces, torch's TCP store on it, and its limits."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import ipaddress
import math
import os
import re
import shlex
import signal
import socket
import stat
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    import psutil
    from torch.distributed import TCPStore


_BY_SIGNAL: Final = 128
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


class ProcessStat(NamedTuple):
    """What ``/proc/PID/stat`` shows of a process; see proc(5).

    Attributes:
        state: Its state, as ``ps`` shows it: ``Z`` for a zombie, ``D`` for one that waits for a disk.
        parent: The pid of its parent.
        session: The pid of the leader of its session.
        major_faults: How many pages it has read from a disk.
        started: When it started, in clock ticks since boot. With the pid it identifies a process even
            after the kernel has given the pid to another one.
        resident_pages: How many pages of memory it uses.
        user_ticks: How much processor time all its threads have used, in clock ticks.
        system_ticks: How much the kernel has used for it.
    """

    state: str
    parent: int
    session: int
    major_faults: int
    started: int
    resident_pages: int
    user_ticks: int
    system_ticks: int


def read_stat(name: int | str) -> ProcessStat:
    """Read the stat of a process, or of a task (``PID/task/TID``), in some ten microseconds; on Linux only.

    Raises:
        OSError: It has ended.
    """
    with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123 - often called, for many processes
        # The command's name, in parentheses, may contain anything, parentheses too. After it comes
        # field 3 of proc(5).
        fields = file.read().rpartition(b")")[2].split()
    numbers = (int(fields[field - 3]) for field in (4, 6, 12, 22, 24, 14, 15))
    return ProcessStat(fields[0].decode(), *numbers)


def boot_id() -> str:
    """Return the kernel's random id of this boot, or the host name if there is none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def is_handled_in_c(signum: int) -> bool:
    """Return whether code outside of Python handles a signal of which Python says that it has its default.

    `faulthandler.register` does, for example. Python could replace such a handler, but not restore it.
    """
    if signal.getsignal(signum) != signal.SIG_DFL:
        return False
    with contextlib.suppress(OSError, StopIteration):  # only Linux tells
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)
    return False


def end_by_signal(signum: int) -> NoReturn:
    """End this process as the signal does; where that has no effect, with the exit code that a shell shows.

    It unblocks the signal.

    Raises:
        SystemExit: The script has a handler for the signal, which has run and not ended the process.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signum])
    signal.raise_signal(signum)
    if callable(signal.getsignal(signum)):
        raise SystemExit(_BY_SIGNAL + signum)
    # The default action of a signal that was sent from inside the container has no effect on the
    # container's first process, and an ignored signal has none anywhere.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its reader has exited
            stream.flush()
    os._exit(_BY_SIGNAL + signum)


def act_by_default(signum: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal as the kernel does by default, in the first process of a container too."""
    del frame
    signal.signal(signum, signal.SIG_DFL)
    end_by_signal(signum)


def is_locked(folder: Path) -> bool:
    """Return whether another process holds a lock on a directory, or that cannot be found out."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(fd)
    except OSError:
        return True
    return False


def usable_cores(limits: Limits | None = None) -> int:
    """Return how many cores this process may keep busy: a container's quota of CPU time hides none."""
    share = (read_limits() if limits is None else limits).cores
    return count_cores() if share is None else min(count_cores(), whole_cores(share))


def count_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def port_range() -> range | None:
    """Return the range of ports that the system assigns by itself, or None if it is unknown."""
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, PORT_RANGE.read_text(encoding="ascii").split())
        return range(first, last + 1)
    return None


# ---- mounts ----

_MOUNTS: Final = Path("/proc/self/mountinfo")
_MOUNT_POINT_FIELD: Final = 4
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")


def list_mount_points() -> set[Path] | None:
    """Return the mount points that this process sees, or None if the system does not list them.

    They distinguish a mounted file system from its mount point's empty directory.
    """
    # From the kernel's table: `os.path.ismount` compares device numbers, and a bind mount, which
    # containers use for data, has the number of its source.
    try:
        lines = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return None
    fields = (line.split()[_MOUNT_POINT_FIELD] for line in lines if line.strip())
    # proc(5): blanks, tabs, newlines and backslashes in a path are written as \ooo.
    unescaped = (_ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field) for field in fields)
    return {Path(os.fsdecode(field)) for field in unescaped}


def find_mount_point(path: Path) -> Path:
    """Return the mount point of the file system of `path`, after resolving links."""
    real = path.resolve()
    points = list_mount_points()
    for candidate in (real, *real.parents):
        if candidate in points if points is not None else candidate.is_mount():
            return candidate
    return Path(real.anchor)


# ---- the current directory, and who owns and may write files ----


def is_directory_gone() -> bool:
    """Return whether this process's current directory has been removed."""
    try:
        os.getcwd()  # noqa: PTH109 - called for its error only
    except FileNotFoundError:
        return True
    return False


def is_directory_foreign() -> bool:
    """Return whether another user may have put files into the current directory.

    It matters because `multiprocessing` starts processes with `python -c`, which imports from the current
    directory first.
    """
    try:
        status = Path().stat()
    except OSError:
        return True  # the directory was removed: do not import from it either
    # Owner and mode decide, as for git's `safe.directory` (CVE-2022-24765).
    return not is_owner_trusted(status) or others_may_write(status)


def is_owner_trusted(status: os.stat_result) -> bool:
    """Return whether a file belongs to this user or to root."""
    return not hasattr(os, "geteuid") or status.st_uid in {0, os.geteuid()}


def others_may_write(status: os.stat_result) -> bool:
    """Return whether the mode of a file or directory lets other users write to it."""
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not hasattr(os, "geteuid"):  # Windows
        return False
    if others != stat.S_IWGRP:
        return bool(others)
    # Most distributions give each user a private group. With their umask of 002, every file is writable
    # for its group.
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    is_private = user.pw_uid != 0 and user.pw_gid == group.gr_gid and group.gr_name == user.pw_name
    return not is_private or not set(group.gr_mem) <= {user.pw_name}


# ---- network interfaces and addresses ----

LIBRARY_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""The variables from which gloo, NCCL and TensorPipe read the name of their interface."""

_DISCARD_PORT: Final = 9
_ANY_REMOTE: Final = "198.51.100.1"
"""An address that RFC 5737 reserves for documentation; only the route to it is looked up."""


_TO_CONTAINERS: Final = re.compile(
    "docker|veth|virbr|cni|flannel|cali|podman|lxc|lxd|nerdctl|vmnet|vboxnet|weave|cilium|kube-"
    "|antrea|nodelocaldns|br-[0-9a-f]{12}$"
)
"""How the names of interfaces begin that lead only to containers or guests of this host. Docker names
the bridges of its networks br- and twelve hex digits; other bridges may be the host's own network."""
_OVERLAYS: Final = ("tun", "tap", "wg", "tailscale", "zt", "ppp")
"""How the names of tunnels begin: they connect hosts, but slower than the network below them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface.

    Attributes:
        name: As ``ip link`` shows it.
        networks: Its addresses with their networks, in the kernel's order, without link-local ones.
        mtu_bytes: Size of the largest packet that it sends.
        is_running: Whether it is up and has a carrier.
    """

    name: str
    networks: tuple[ipaddress.IPv4Interface | ipaddress.IPv6Interface, ...]
    mtu_bytes: int
    is_running: bool

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its addresses, IPv4 first."""
        return tuple(str(network.ip) for network in self.networks)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The network of each address, e.g. ``10.77.0.0/24``."""
        return tuple(str(network.network) for network in self.networks)

    @property
    def is_loopback(self) -> bool:
        """Whether it leads only to this host."""
        return self.name == "lo" or any(network.ip.is_loopback for network in self.networks)

    @property
    def is_candidate(self) -> bool:
        """Whether ranks on several hosts could communicate through it."""
        usable = self.is_running and bool(self.networks) and not self.is_loopback
        return usable and not leads_to_containers(self.name)


def leads_to_containers(name: str) -> bool:
    """Return whether an interface, by its name, leads only to containers of this host."""
    return _TO_CONTAINERS.match(name) is not None


def is_overlay(name: str) -> bool:
    """Return whether an interface, by its name, is a tunnel over another network."""
    return name.startswith(_OVERLAYS)


def is_loopback(host: str) -> bool:
    """Return whether a host always means the local machine: a name, or an address, also as IPv6 spells IPv4's."""
    name = host.rstrip(".").casefold()
    if name in ("localhost", "ip6-localhost") or name.endswith(".localhost"):
        return True
    try:
        numeric = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(numeric, "ipv4_mapped", None) or numeric).is_loopback


def look_up(host: str, port: int) -> list[str]:
    """Return the addresses of a host, each once; this may hang if no name server answers.

    Raises:
        OSError: It has none.
        UnicodeError: It cannot be a name.
    """
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def family_of(address: str) -> socket.AddressFamily:
    """Return whether an address is of IPv4 or of IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def open_server(address: str, port: int) -> socket.socket:
    """Listen at one address, or at all of this host if that is empty."""
    is_dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else family_of(address)
    place = (address, port)
    return socket.create_server(place, family=family, backlog=1024, dualstack_ipv6=is_dual)


def find_listener(port: int) -> psutil.Process | None:
    """Return the process that listens on a port, if this user may see it."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            at_port = connection.laddr and connection.laddr.port == port
            if at_port and connection.status == psutil.CONN_LISTEN and connection.pid:
                return psutil.Process(connection.pid)
    return None


def listener_text(port: int) -> str:
    """Return the process that listens on a port for a message; empty if this user may not see it."""
    process = find_listener(port)
    with contextlib.suppress(Exception):  # it may have ended
        return "" if process is None else f"{process.name()} (pid {process.pid})"
    return ""


def look_up_name(address: str) -> str:
    """Return the name of an address; torch's store does the same lookup for every client.

    Raises:
        OSError: The address has no name, or its family is not supported.
    """
    return socket.gethostbyaddr(address)[0]  # getnameinfo holds the GIL in Python 3.10


def plain_host(text: str) -> str:
    """Return a host as sockets expect it: without an endpoint's brackets around an IPv6 address."""
    inner = text[1:-1]
    return inner if text[:1] == "[" and text[-1:] == "]" and ":" in inner else text


def show_endpoint(host: str, port: int | str) -> str:
    """Return host and port as one text, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def list_names() -> list[str]:
    """Return the names of this host's interfaces, ordered by the kernel's index."""
    return [name for _, name in socket.if_nameindex()]


def list_interfaces() -> list[Interface]:
    """Return the interfaces of this host, ordered by the kernel's index."""
    import psutil

    states = psutil.net_if_stats()
    addresses: defaultdict[str, list[Any]] = defaultdict(list)
    for label, entries in psutil.net_if_addrs().items():
        addresses[label.partition(":")[0]] += entries  # the address of an alias, as in eth0:1
    interfaces = []
    for name in list_names():
        own = [
            _with_prefix(entry.address, entry.netmask)
            for entry in addresses[name]
            if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
        ]
        state = states.get(name)
        interfaces.append(
            Interface(
                name=name,
                # Other hosts cannot connect to a link-local address by name.
                networks=tuple(network for network in own if not network.ip.is_link_local),
                mtu_bytes=state.mtu if state else 0,
                is_running=bool(state and state.isup),
            )
        )
    return interfaces


def _with_prefix(
    address: str, netmask: str | None
) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    if netmask is None:
        return ipaddress.ip_interface(address)
    bits = int(ipaddress.ip_address(netmask)).bit_count()
    return ipaddress.ip_interface(f"{address}/{bits}")


def expand_nccl(value: str, names: Iterable[str]) -> list[str]:
    """Return those of `names` that a value of ``NCCL_SOCKET_IFNAME`` selects."""
    excluded = value.startswith("^")
    value = value.removeprefix("^")
    exact = value.startswith("=")
    items = tuple(value.removeprefix("=").split(","))
    return [
        name
        for name in names
        if (name in items if exact else name.startswith(items)) is not excluded
    ]


def find_address_towards(addresses: Iterable[str]) -> str | None:
    """Return this host's address from which it would connect to another host.

    Args:
        addresses: Numeric addresses of the other host. The first one with a route that does not end on
            loopback decides, else the default route, else the first interface that is up, those of
            containers last.

    Returns:
        The numeric address, never loopback; None if this host has no other.
    """
    for address in (*addresses, _ANY_REMOTE):
        with contextlib.suppress(OSError):  # no route, or no such family here
            own = source_address(address)
            if not is_loopback(own):
                return own
    running = [
        interface
        for interface in list_interfaces()
        if interface.is_running and not interface.is_loopback
    ]
    running.sort(key=lambda interface: not interface.is_candidate)
    return next((address for interface in running for address in interface.addresses), None)


def source_address(target: str, port: int = _DISCARD_PORT) -> str:
    """Return this host's address from which packets to `target` are sent.

    Raises:
        OSError: There is no route to it.
    """
    with socket.socket(family_of(target), socket.SOCK_DGRAM) as probe:
        probe.connect((target, port))  # sends nothing: UDP only looks up the route
        return str(probe.getsockname()[0])


def find_interface_of(address: str) -> Interface | None:
    """Return the interface that has an address."""
    return next(
        (interface for interface in list_interfaces() if address in interface.addresses), None
    )


def as_setting(variable: str, value: str) -> str:
    """Return an assignment to paste into a shell."""
    quoted = shlex.quote(value)
    # zsh expands a leading "=".
    quoted = f"'{value}'" if value.startswith("=") and quoted == value else quoted
    return f"{variable}={quoted}"


def interface_variables(name: str) -> dict[str, str]:
    """Return the variables that keep gloo, NCCL and TensorPipe on one interface."""
    # NCCL matches prefixes: without "=", eth1 would select eth10 too.
    return dict(zip(LIBRARY_VARIABLES, (name, f"={name}", name), strict=True))


# ---- torch's TCP store ----


NAME_LOOKUP_LIMIT: Final = timedelta(seconds=30)
"""How long connecting to a store may take even on a host that is near.

torch asks for the name of each address that it connects to, loopback included, and the time counts as its
connect timeout. One lost packet to a name server costs 5 s, none that answers 10 s each (resolv.conf(5)).
"""


_ERRORS_ONLY: Final = 2
_cpp_log_lock = threading.Lock()
_cpp_log_before: list[int] = []
"""torch's C++ log level as each caller that wants quiet found it."""


@contextlib.contextmanager
def without_cpp_warnings() -> Iterator[None]:
    """Keep torch's C++ code from writing warnings to stderr, where the user has set no level for it."""
    # When a store's host has ended, each call writes 20 lines of C++ frames, and each client whose
    # address has no name writes that (`formatSockAddr` in torch's socket.cpp). The exception, or
    # success, says it all. The level belongs to the process; torch has no function to set it.
    level = None if "TORCH_CPP_LOG_LEVEL" in os.environ else _find_cpp_log_level()
    if level is None:
        yield
        return
    with _cpp_log_lock:
        _cpp_log_before.append(level.value)
        level.value = max(level.value, _ERRORS_ONLY)
    try:
        yield
    finally:
        with _cpp_log_lock:  # the last one to leave restores what the first one found
            level.value = _cpp_log_before.pop()


@functools.cache
def _find_cpp_log_level() -> ctypes.c_int | None:
    """Return the variable that ``TORCH_CPP_LOG_LEVEL`` sets; ``None`` where torch has none."""
    import torch

    library = Path(torch.__file__).parent / "lib" / "libc10.so"
    try:
        return ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None


def bind_in(ports: str | None, bind: Callable[[int], socket.socket]) -> socket.socket:
    """Return a socket that `bind` has bound to a free port of the range ``first-last``, or to any port.

    Raises:
        OSError: No port of the range is free.
    """
    if ports is None:
        return bind(0)
    first, _, last = ports.partition("-")
    for port in range(int(first), int(last) + 1):
        try:
            return bind(port)
        except OSError as exc:  # noqa: PERF203 - each is tried
            if exc.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"no port of rendezvous.ports={ports!r} is free on this host")


def open_tcp_store(
    host: str,
    port: int,
    *,
    listening: socket.socket | None = None,
    connect_timeout: timedelta = NAME_LOOKUP_LIMIT,
    timeout: timedelta = timedelta(seconds=5),
) -> TCPStore:
    """Open torch's TCP store: a server on a socket that already listens, or a client.

    torch closes the server's socket; if the server fails, at some later time. `connect_timeout` is how long
    connecting may take, `timeout` how long each call of the store may.
    """
    from torch.distributed import TCPStore

    with without_cpp_warnings():
        store = TCPStore(
            host,
            port,
            is_master=listening is not None,
            wait_for_workers=False,
            timeout=connect_timeout,
            master_listen_fd=None if listening is None else listening.detach(),
            use_libuv=serves_by_libuv(),
        )
    store.set_timeout(timeout)
    return store


@contextlib.contextmanager
def ending_when_silent(port: int, limit_s: int) -> Iterator[None]:
    """Have the kernel end the connections that are opened here if the other host does not answer."""
    # torch sets no such limit, and does not show its sockets: they are found by the port.
    before = _open_sockets().keys()
    yield
    for name, fd in _open_sockets().items():
        with contextlib.suppress(OSError):  # another thread's, and closed
            if name in before:
                continue
            # A default timeout of Python's sockets would make torch's socket non-blocking.
            is_blocking = os.get_blocking(fd)
            with socket.socket(fileno=os.dup(fd)) as connection:
                os.set_blocking(fd, is_blocking)
                is_inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_inet and connection.getpeername()[1] == port:
                    end_when_silent(connection, limit_s, idle_s=limit_s // 2)


def _open_sockets() -> dict[str, int]:
    """Return the descriptors of this process's sockets, by inode."""
    # The number of a descriptor is used again once that is closed.
    numbers = {}
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            numbers[str(link.readlink())] = int(link.name)
    return {name: fd for name, fd in numbers.items() if name.startswith("socket:")}


def end_when_silent(
    connection: socket.socket, limit_s: float, *, idle_s: int, ends_window: bool = True
) -> None:
    """Have the kernel end a connection whose other host's kernel does not answer for so long.

    The kernel begins to ask each second after `idle_s` without any data. With `ends_window`, data that is not
    acknowledged for so long ends the connection, too. That also ends one whose other host answers that its
    buffer is full, since a program there is stopped.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", idle_s),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", math.ceil(limit_s - idle_s)),
        # The kernel sends no keep-alive while data is unacknowledged: this limits those waits.
        ("TCP_USER_TIMEOUT", int(limit_s * 1000) if ends_window else 0),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def serves_by_libuv() -> bool:
    """Return whether stores use libuv, torch's default, which accepts a socket since torch 2.8."""
    import torch
    from torch.torch_version import TorchVersion

    return bool(TorchVersion(torch.__version__) >= "2.8")


# ---- limits that a container or scheduler sets through control groups, versions 1 and 2 ----

_GROUPS_OF_PROCESS: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60
"""For "no limit", version 1 shows the largest multiple of the page size."""
_MEMBERSHIP_FIELDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The tightest limits on this process, from its own group and all groups above.

    Attributes:
        memory_bytes: Memory limit; ``None`` for no limit.
        memory_left_bytes: Least memory left under any of these limits; page cache counts as left.
        cores: Limit of CPU time, in cores; ``None`` for no limit.
        processes_left: Processes and threads that may still be started; ``None`` for no limit.
    """

    memory_bytes: int | None = None
    memory_left_bytes: int | None = None
    cores: float | None = None
    processes_left: int | None = None


def read_limits(*, membership: Path = _GROUPS_OF_PROCESS, root: Path = _CGROUPS) -> Limits:
    """Read the limits of this process; an unreadable limit counts as none.

    `membership` is the file in which the kernel lists the groups of the process; the hierarchies are mounted
    at `root`.
    """
    groups: list[tuple[str, str]] = []  # controllers (empty in version 2) and path
    with contextlib.suppress(OSError):
        for line in membership.read_text(encoding="utf-8", errors="replace").splitlines():
            parts = line.split(":", 2)
            if len(parts) == _MEMBERSHIP_FIELDS:
                groups.append((parts[1], parts[2]))
    memory = [limit for group in _levels(groups, "memory", root) if (limit := _memory_of(group))]
    cores = [share for group in _levels(groups, "cpu", root) if (share := _cores_of(group))]
    processes = [
        max(0, most - (_number_in(group / "pids.current") or 0))
        for group in _levels(groups, "pids", root)
        if (most := _number_in(group / "pids.max")) is not None
    ]
    return Limits(
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_left_bytes=min((left for _, left in memory), default=None),
        cores=min(cores, default=None),
        processes_left=min(processes, default=None),
    )


def _levels(groups: list[tuple[str, str]], controller: str, root: Path) -> Iterator[Path]:
    """Yield the directories of a controller that limit this process, its own group first."""
    for controllers, path in groups:
        if not controllers:
            base = root if (root / "cgroup.controllers").exists() else root / "unified"
        elif controller in controllers.split(","):
            base = next(
                (root / name for name in (controllers, controller) if (root / name).exists()), root
            )
        else:
            continue
        own = base / path.lstrip("/")
        # In a container the path may be the host's, while the root is already the container's group.
        own = own if own.exists() and ".." not in path else base
        yield from (level for level in (own, *own.parents) if level.is_relative_to(base))


def _number_in(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        number = int(path.read_text(encoding="ascii"))
        return number if 0 <= number < _UNLIMITED else None
    return None


def _memory_of(group: Path) -> tuple[int, int] | None:
    for limit_name, usage_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _number_in(group / limit_name)
        if limit is not None:
            usage = _number_in(group / usage_name) or 0
            with contextlib.suppress(OSError, ValueError):
                for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
                    name, _, value = line.partition(" ")
                    usage -= int(value) if name == cache_key else 0
            return limit, max(0, limit - max(0, usage))
    return None


def _cores_of(group: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us = _number_in(group / "cpu.cfs_quota_us")
    period_us = _number_in(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us else None


def whole_cores(cores: float) -> int:
    """Return how many threads this much CPU time can keep busy."""
    return max(1, math.floor(cores))
