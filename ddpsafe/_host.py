"""Facts of this machine: interfaces and their addresses, cores, mounts, the boot; stores on its ports."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import shlex
import socket
import stat
from collections import defaultdict
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.distributed import TCPStore


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


def boot_id() -> str:
    """Return what the kernel drew when it started; the host's name where it does not say."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def count_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def port_range() -> range | None:
    """Return the ports that this system hands out to whoever asks for any; None if it is unknown."""
    with contextlib.suppress(OSError, ValueError):
        first, last = map(int, PORT_RANGE.read_text(encoding="ascii").split())
        return range(first, last + 1)
    return None


_MOUNTS: Final = Path("/proc/self/mountinfo")
_MOUNT_POINT_FIELD: Final = 4
_ESCAPE: Final = re.compile(rb"\\([0-7]{3})")


def list_mount_points() -> set[Path] | None:
    """Return the mount points that this process sees, or None where the system does not tell.

    It tells a mount from the empty directory that it belongs on.

    Reads the kernel's table rather than comparing device numbers, as `os.path.ismount` does: a
    bind mount, as containers use for data, has the device number of what it was bound from.
    """
    try:
        lines = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return None
    fields = (line.split()[_MOUNT_POINT_FIELD] for line in lines if line.strip())
    # proc(5): blanks, tabs, newlines and backslashes in a path are written as \ooo.
    unescaped = (_ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), field) for field in fields)
    return {Path(os.fsdecode(field)) for field in unescaped}


def find_mount_point(path: Path) -> Path:
    """Return the mount point of the file system that `path` lies on, links followed."""
    real = path.resolve()
    points = list_mount_points()
    for candidate in (real, *real.parents):
        if candidate in points if points is not None else candidate.is_mount():
            return candidate
    return Path(real.anchor)


def is_directory_gone() -> bool:
    """Tell whether the current directory of this process has been removed."""
    try:
        os.getcwd()  # noqa: PTH109 - asked for its error only
    except FileNotFoundError:
        return True
    return False


def is_directory_foreign() -> bool:
    """Tell whether another user may have put files into the current directory.

    The rule is git's, of ``safe.directory`` (CVE-2022-24765): owner and mode decide. Python puts
    the current directory first on the path of `python -c`, which is how `multiprocessing` starts
    its processes. Where there is none, nothing may be looked for in it either.
    """
    try:
        found = Path().stat()
    except OSError:
        return True
    return not is_owner_trusted(found) or others_may_write(found)


def is_owner_trusted(status: os.stat_result) -> bool:
    """Tell whether a file is of this user or of root."""
    return not hasattr(os, "geteuid") or status.st_uid in {0, os.geteuid()}


def others_may_write(status: os.stat_result) -> bool:
    """Tell whether its mode lets other users write to a file, or into a directory."""
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not hasattr(os, "geteuid"):  # Windows
        return False
    if others != stat.S_IWGRP:
        return bool(others)
    # Most distributions make a group for each user alone; under their umask of 002 every file may
    # be written by its group.
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(status.st_gid)
    except KeyError:
        return True
    is_private = user.pw_uid != 0 and user.pw_gid == group.gr_gid and group.gr_name == user.pw_name
    return not is_private or not set(group.gr_mem) <= {user.pw_name}


LIBRARY_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""What gloo, NCCL and TensorPipe read the name of their interface from."""

_DISCARD_PORT: Final = 9
_SOMEWHERE: Final = "198.51.100.1"
"""An address that RFC 5737 reserves for documentation; only the route to it is asked for."""


_TO_CONTAINERS: Final = re.compile(
    "docker|veth|virbr|cni|flannel|cali|podman|lxc|lxd|nerdctl|vmnet|vboxnet|weave|cilium|kube-"
    "|antrea|nodelocaldns|br-[0-9a-f]{12}$"
)
"""Starts of the names of interfaces that lead to containers or guests of this host only; Docker names
the bridges of its networks br- and twelve figures, where other bridges may be the host's own network."""
_OVERLAYS: Final = ("tun", "tap", "wg", "tailscale", "zt", "ppp")
"""Starts of the names of tunnels: they join hosts, slower than the network below them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface.

    Attributes:
        name: As ``ip link`` shows it.
        networks: Its addresses with their networks, in the kernel's order; link-local ones are
            left out: other hosts cannot connect to them by name.
        mtu_bytes: The largest packet it sends.
        is_running: Whether it is up and has a carrier.
    """

    name: str
    networks: tuple[ipaddress.IPv4Interface | ipaddress.IPv6Interface, ...]
    mtu_bytes: int
    is_running: bool

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its addresses, IPv4 first."""
        return tuple(str(each.ip) for each in self.networks)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The network of each address, e.g. ``10.77.0.0/24``."""
        return tuple(str(each.network) for each in self.networks)

    @property
    def is_loopback(self) -> bool:
        """Tell whether it leads to this host alone."""
        return self.name == "lo" or any(each.ip.is_loopback for each in self.networks)

    @property
    def is_candidate(self) -> bool:
        """Tell whether ranks of several hosts could talk on it."""
        usable = self.is_running and bool(self.networks) and not self.is_loopback
        return usable and not leads_to_containers(self.name)


def leads_to_containers(name: str) -> bool:
    """Tell by its name whether an interface leads to containers of this host only."""
    return _TO_CONTAINERS.match(name) is not None


def is_overlay(name: str) -> bool:
    """Tell by its name whether an interface is a tunnel over another network."""
    return name.startswith(_OVERLAYS)


def is_loopback(address: str) -> bool:
    """Tell whether an address, as numbers, belongs to this host and to no other."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def look_up_name(address: str) -> str:
    """Return the name that an address has, as torch's store looks it up for every client.

    Raises:
        OSError: It has none, or there is no such family of addresses.
    """
    return socket.gethostbyaddr(address)[0]  # getnameinfo would hold the GIL of Python 3.10


def plain_host(text: str) -> str:
    """Return a host as sockets take it: without the brackets that endpoints put an IPv6 address in."""
    inner = text[1:-1]
    return inner if text[:1] == "[" and text[-1:] == "]" and ":" in inner else text


def show_endpoint(host: str, port: int | str) -> str:
    """Return host and port as one text; brackets keep the port of an IPv6 address apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def list_names() -> list[str]:
    """Return the names of this host's interfaces, in the order of the kernel's numbers."""
    return [name for _, name in socket.if_nameindex()]


def list_interfaces() -> list[Interface]:
    """Return the interfaces of this host, in the order of the kernel's numbers."""
    import psutil

    states = psutil.net_if_stats()
    addresses: defaultdict[str, list[Any]] = defaultdict(list)
    for label, entries in psutil.net_if_addrs().items():
        addresses[label.partition(":")[0]] += entries  # the address of an alias, as in eth0:1
    found = []
    for name in list_names():
        own = [
            _with_prefix(each.address, each.netmask)
            for each in addresses[name]
            if each.family in (socket.AF_INET, socket.AF_INET6) and "%" not in each.address
        ]
        state = states.get(name)
        found.append(
            Interface(
                name=name,
                networks=tuple(each for each in own if not each.ip.is_link_local),
                mtu_bytes=state.mtu if state else 0,
                is_running=bool(state and state.isup),
            )
        )
    return found


def _with_prefix(
    address: str, netmask: str | None
) -> ipaddress.IPv4Interface | ipaddress.IPv6Interface:
    if netmask is None:
        return ipaddress.ip_interface(address)
    bits = int(ipaddress.ip_address(netmask)).bit_count()
    return ipaddress.ip_interface(f"{address}/{bits}")


def expand_nccl(value: str, names: Iterable[str]) -> list[str]:
    """Return the interfaces that a value of ``NCCL_SOCKET_IFNAME`` selects out of `names`."""
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
    """Return the own address from which this host would talk to the first reachable of others.

    Nothing is sent: connecting a UDP socket only asks the kernel for the route.

    Args:
        addresses: Addresses of the other host, as numbers. One of this host's own, or none with
            a route, stands for "anywhere": then the default route decides, else the first
            interface that is up, those of containers last.

    Returns:
        The address as numbers, never loopback; None where this host has no other.
    """
    for address in (*addresses, _SOMEWHERE):
        with contextlib.suppress(OSError):  # no route, or no such family here
            own = source_address(address)
            if not is_loopback(own):
                return own
    running = [each for each in list_interfaces() if each.is_running and not each.is_loopback]
    running.sort(key=lambda each: not each.is_candidate)
    return next((address for each in running for address in each.addresses), None)


def source_address(target: str, port: int = _DISCARD_PORT) -> str:
    """Return the own address from which packets to `target` leave; nothing is sent.

    Raises:
        OSError: There is no route to it.
    """
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((target, port))
        return str(probe.getsockname()[0])


def find_interface_of(address: str) -> Interface | None:
    """Return the interface that has an address."""
    return next((each for each in list_interfaces() if address in each.addresses), None)


def as_setting(variable: str, value: str) -> str:
    """Return the assignment to copy into a shell; zsh would expand a ``=`` that begins a value."""
    quoted = shlex.quote(value)
    quoted = f"'{value}'" if value.startswith("=") and quoted == value else quoted
    return f"{variable}={quoted}"


def interface_variables(name: str) -> dict[str, str]:
    """Return the variables that keep gloo, NCCL and TensorPipe on one interface.

    NCCL takes prefixes: without ``=``, eth1 would stand for eth10 as well.
    """
    return dict(zip(LIBRARY_VARIABLES, (name, f"={name}", name), strict=True))


def open_tcp_store(
    host: str,
    port: int,
    *,
    listening: socket.socket | None = None,
    timeout: timedelta = timedelta(seconds=5),
) -> TCPStore:
    """Open a store of torch: its server at a socket that listens already, or a client.

    Args:
        host: Where it is.
        port: Its port.
        listening: The server's socket; torch closes it, sooner or later where it fails.
        timeout: How long each of its calls may take.
    """
    from torch.distributed import TCPStore

    return TCPStore(
        host,
        port,
        is_master=listening is not None,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=None if listening is None else listening.detach(),
        use_libuv=serves_by_libuv(),
    )


def serves_by_libuv() -> bool:
    """Tell whether a store's server is libuv's, torch's default; up to 2.7 that takes no socket."""
    import torch
    from torch.torch_version import TorchVersion

    return bool(TorchVersion(torch.__version__) >= "2.8")


# Limits that a container or a scheduler sets through control groups, version 1 and 2.

_GROUPS_OF_PROCESS: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page."""
_MEMBERSHIP_FIELDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The tightest limits on this process, of its own group and those above.

    Attributes:
        memory_bytes: Limit of memory; ``None`` where there is none.
        memory_left_bytes: What is left of the tightest one, page cache counted as left.
        cores: Cores' worth of time; ``None`` where there is no limit.
        processes_left: Processes and threads that may still be started; ``None`` for no limit.
    """

    memory_bytes: int | None = None
    memory_left_bytes: int | None = None
    cores: float | None = None
    processes_left: int | None = None


def read_limits(*, membership: Path = _GROUPS_OF_PROCESS, root: Path = _CGROUPS) -> Limits:
    """Read the limits of this process; what cannot be read counts as no limit.

    Args:
        membership: Where the kernel lists the groups of the process.
        root: Where the hierarchies are mounted.
    """
    groups: list[tuple[str, str]] = []  # controllers, which version 2 does not name, and path
    with contextlib.suppress(OSError):
        for line in membership.read_text(encoding="utf-8", errors="replace").splitlines():
            parts = line.split(":", 2)
            if len(parts) == _MEMBERSHIP_FIELDS:
                groups.append((parts[1], parts[2]))
    memory = [found for each in _levels(groups, "memory", root) if (found := _memory_of(each))]
    cores = [share for each in _levels(groups, "cpu", root) if (share := _cores_of(each))]
    processes = [
        max(0, most - (_number_in(each / "pids.current") or 0))
        for each in _levels(groups, "pids", root)
        if (most := _number_in(each / "pids.max")) is not None
    ]
    return Limits(
        memory_bytes=min((limit for limit, _ in memory), default=None),
        memory_left_bytes=min((left for _, left in memory), default=None),
        cores=min(cores, default=None),
        processes_left=min(processes, default=None),
    )


def _levels(groups: list[tuple[str, str]], controller: str, root: Path) -> Iterator[Path]:
    """Yield the directories of a controller that bind this process, its own first."""
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
        # In a container the path is the host's, and what is mounted is already the own group.
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
    """Return how many threads such a share can keep busy."""
    return max(1, math.floor(cores))
