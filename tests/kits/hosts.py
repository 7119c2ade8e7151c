"""Hosts on one machine: Linux namespaces joined by a switch, each with its own name and firewall.

A `Network` is a switch and a number of hosts. A host has its own network, host name, mounts and
processes; only the file system is shared. The namespaces have no names in the system: each set lives
as long as one process, which ends when a pipe of this process closes. Whatever ends the tests, even
SIGKILL, therefore ends the hosts, every process in them, and their cables and rules.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import machine
import pytest
import scripts
from warm_python import Forked, WarmPython, piped

if TYPE_CHECKING:
    from typing_extensions import Self

_CLONE_NEWPID: Final = 0x20000000
_TOOLS: Final = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "nft": "nftables",
    "ping": "iputils-ping",
}
_TRIAL: Final = """
mount -t tmpfs trial /dev/shm
ip link add name trial0 type bridge
ip link add trial1 type veth peer name trial2
nft 'add table inet trial { chain input { type filter hook input priority 0; }; }'
nft 'add rule inet trial input ct state established accept'
"""
_FLUSH: Final = """
import socket, struct
with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as kernel:  # NETLINK_NETFILTER
    delete, request_and_ack = 1 << 8 | 2, 1 | 4  # IPCTNL_MSG_CT_DELETE without a filter
    kernel.sendto(struct.pack("=IHHIIBBH", 20, delete, request_and_ack, 1, 0, 0, 0, 0), (0, 0))
    (error,) = struct.unpack_from("=i", kernel.recv(4096), 16)
    assert not error, error
"""
_LIMIT_S: Final = machine.hang_limit(60)

REJECTIONS: Final = {
    "drop": "drop",
    "reset": "reject with tcp reset",
    "port-unreachable": "reject with icmpx type port-unreachable",
    "prohibited": "reject with icmpx type admin-prohibited",
    "host-unreachable": "reject with icmpx type host-unreachable",
}
"""How a firewall rejects packets, as nft statements."""


@functools.cache
def find_obstacle() -> str | None:
    """Return why no hosts can be made here, or None if they can."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = {package for tool, package in _TOOLS.items() if not shutil.which(tool, path=path)}
    if absent:
        return f"hosts need {' '.join(sorted(absent))} (apt-get install)"
    command = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "sh", "-ec", _TRIAL]
    trial = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    return f"no namespaces here: {trial.stderr.strip()[-200:]}" if trial.returncode else None


def require(obstacle: str | None) -> None:
    """Skip a test because of an obstacle; fail it if CI requires hosts."""
    if obstacle and os.environ.get("DDPSAFE_REQUIRE_HOSTS") == "1":
        pytest.fail(obstacle, pytrace=False)
    if obstacle:
        pytest.skip(obstacle)


_servers: dict[tuple[str, ...], WarmPython] = {}


@contextlib.contextmanager
def serving_forks(modules: tuple[str, ...]) -> Iterator[None]:
    """Keep the interpreter that has imported these modules while the context is open."""
    folders = os.pathsep.join(filter(None, sys.path))
    _servers[modules] = WarmPython(modules, {**os.environ, "PYTHONPATH": folders})
    try:
        yield
    finally:
        _servers.pop(modules).close()


class Namespaces:
    """One set of namespaces, and the processes started in it."""

    def __init__(self, name: str, prepare: str = "") -> None:
        self.name = name
        self._started: list[subprocess.Popen[str] | Forked] = []
        # The last command is process 1 of the host: children it ignores leave no zombies.
        script = f"""
            hostname {name}; mount -t proc proc /proc; mount -t sysfs sysfs /sys
            mount -t tmpfs shm /dev/shm; ip link set lo up
            {prepare}
            echo up; exec env --ignore-signal=CHLD cat >/dev/null"""
        namespaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child"]
        self._keeper = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-ec", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None
        assert self._keeper.stderr is not None
        if self._keeper.stdout.readline() != "up\n":
            raise RuntimeError(f"host {name}: {self._keeper.stderr.read()}")
        children = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        """Start a program inside; the pid is the program's own, so signals reach it."""
        inside = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--"]
        with _children_in(self.pid):
            started = subprocess.Popen(
                [*inside, *command],
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **(env or {})},
            )
        self._started.append(started)
        return started

    def fork(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        modules: Sequence[str] | None = None,
    ) -> Forked:
        """Start a script inside, in a fork of an interpreter with these modules, by default what launches need."""
        environment = {**os.environ, **(env or {})}
        launches = modules is None
        server = scripts.warm_python() if modules is None else _servers[tuple(modules)]
        with piped() as (theirs, ours):
            started = server.start(
                argv, environment=environment, streams=theirs, host=self.pid, launches=launches
            )
        started.stdout, started.stderr = ours
        self._started.append(started)
        return started

    def run(self, *command: str, given: str | None = None) -> str:
        """Run a program inside to its end; return its output."""
        stdin = subprocess.DEVNULL if given is None else subprocess.PIPE
        started = self.start(command, stdin=stdin)
        out, err = started.communicate(given, timeout=_LIMIT_S)
        if started.returncode:
            raise RuntimeError(f"{self.name}: {command} exits {started.returncode}: {err}")
        return out

    def shell(self, script: str) -> str:
        """Run a script inside; the first command that fails ends it."""
        return self.run("sh", "-ec", script)

    def rewire(self, script: str) -> None:
        """Run a script in this network only: pids of hosts are valid outside only."""
        inside = ["nsenter", "--target", str(self.pid), "--net", "--"]
        subprocess.run([*inside, "sh", "-ec", script], check=True, timeout=_LIMIT_S)

    def close(self) -> None:
        """End every process inside, and with them the namespaces."""
        for started in self._started:
            if started.poll() is None:
                started.kill()
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        # Process 1 ends only after this process's children inside have been reaped.
        for started in self._started:
            started.wait(_LIMIT_S)
            for stream in (started.stdin, started.stdout, started.stderr):
                if stream is not None:
                    stream.close()
        self._keeper.wait(_LIMIT_S)
        for stream in (self._keeper.stdout, self._keeper.stderr):
            assert stream is not None
            stream.close()

    def kill(self) -> None:
        """Kill every process inside at once."""
        self._keeper.kill()
        self._keeper.wait(_LIMIT_S)


@contextlib.contextmanager
def _children_in(pid: int) -> Iterator[None]:
    """Start this thread's next children in another PID namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.ExitStack() as stack:
        own, other = (
            stack.enter_context(Path(f"/proc/{each}/ns/pid").open("rb"))
            for each in ("thread-self", pid)
        )
        _set_namespace(libc, other.fileno())
        try:
            yield
        finally:
            _set_namespace(libc, own.fileno())


def _set_namespace(libc: ctypes.CDLL, fd: int) -> None:
    if libc.setns(fd, _CLONE_NEWPID) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class Host(Namespaces):
    """One host of a network."""

    def __init__(self, network: Network, index: int) -> None:
        hosts_file = network.folder / f"hosts.{index}"
        hosts_file.write_text(network.hosts_file(network, index))
        resolver = network.folder / "resolv.conf"
        mounts = f"mount --bind {hosts_file} /etc/hosts; mount --bind {resolver} /etc/resolv.conf"
        super().__init__(network.names[index], mounts)
        self.network, self.index = network, index

    def address(self, nic: str = "eth0") -> str:
        """Return the host's address on that card."""
        return f"{self.network.nics[nic]}.{self.index + 1}"

    def port(self, nic: str) -> str:
        """Return the name of the switch's port that the card is plugged into."""
        return f"p{self.index}{nic}"

    def firewall(self, *rules: str, otherwise: str = "accept") -> None:
        """Accept packets of connections, ICMP, local packets, and those that the rules accept."""
        self.run(
            "nft",
            "-f",
            "-",
            given=f"""
            flush ruleset
            table inet filter {{
            chain input {{
                type filter hook input priority 0; policy accept;
                iif lo accept
                ct state established,related accept
                meta l4proto {{ icmp, ipv6-icmp }} accept
                {chr(10).join(rules)}
                meta l4proto tcp {REJECTIONS.get(otherwise, otherwise)}
            }}
            }}
            """,
        )

    def forget_connections(self) -> None:
        """Empty the firewall's table of connections: packets of those that are open are then invalid."""
        self.run("sysctl", "-qw", "net.netfilter.nf_conntrack_tcp_loose=0")
        self.run(sys.executable, "-c", _FLUSH)

    def open_only(self, *ports: int, otherwise: str = "drop") -> None:
        """Accept connections to these ports only."""
        self.firewall(*(f"tcp dport {port} accept" for port in ports), otherwise=otherwise)

    def refuse_from(self, other: Host, *, how: str = "drop", nic: str = "eth0") -> None:
        """Refuse connections that another host opens, except to the endpoint."""
        rejection = REJECTIONS[how]
        source = f"ip saddr {other.address(nic)} ct state new tcp dport != 29500"
        self.firewall(f"{source} {rejection}")

    def drop_all_from(self, other: Host) -> None:
        """Drop all packets from another host, also of open connections; the other direction stays open."""
        self.run(
            "nft",
            "-f",
            "-",
            given=f"""
            table inet one_way {{
            chain input {{
                type filter hook input priority -10
                ip saddr {other.address()} drop
            }}
            }}
            """,
        )

    def add_bridge(self, name: str, address: str) -> None:
        """Add a bridge to the host's containers, one of which runs."""
        self.shell(f"""
            ip link add {name} type bridge
            ip addr add {address} dev {name}
            ip link add v{name} type veth peer name c{name}
            ip link set v{name} master {name} up
            ip link set c{name} up
            ip link set {name} up
            {wait_for_state(name, "up")}
        """)

    def unplug(self, nic: str = "eth0") -> None:
        """Pull the cable: the host sees no carrier, but keeps its address."""
        self.network.switch.run("ip", "link", "set", self.port(nic), "down")
        self.shell(wait_for_state(nic, "down"))

    def plug_in(self, nic: str = "eth0") -> None:
        """Put the cable back in."""
        self.network.switch.run("ip", "link", "set", self.port(nic), "up")
        self.shell(wait_for_state(nic, "up"))

    def power_off(self) -> None:
        """Power the host off: first no packet leaves it, then every process is killed."""
        self.cut_off("eth0")
        self.kill()

    def cut_off(self, nic: str) -> None:
        """Let the switch drop every packet, which the host cannot see."""
        port = self.port(nic)
        given = f"""
            table bridge off{self.index} {{
            chain forward {{
                type filter hook forward priority 0
                iifname {port} drop
                oifname {port} drop
            }}
            }}
            """
        self.network.switch.run("nft", "-f", "-", given=given)


class Network:
    """A switch per card, and hosts plugged into it: ``with Network(3) as hosts: hosts[0].start(…)``.

    Args:
        size: Number of hosts.
        nics: The first three numbers of the addresses behind each card.
        without: Hosts that lack a card.
        hosts_file: Makes the text of a host's /etc/hosts.
        mtu: Of every card and port.
        name_server: Address of the one in every host's /etc/resolv.conf; by default there is none.
        routed: Whether the hosts have a default route, to nowhere.
    """

    def __init__(
        self,
        size: int,
        *,
        nics: Mapping[str, str] | None = None,
        without: Mapping[str, Collection[int]] | None = None,
        hosts_file: Callable[[Network, int], str] | None = None,
        mtu: int = 1500,
        name_server: str = "",
        routed: bool = False,
    ) -> None:
        self.nics = dict(nics or {"eth0": "10.77.0"})
        self.names = [f"h{index}" for index in range(size)]
        self.hosts_file = hosts_file or names_of_all
        self.hosts: list[Host] = []
        self._without = without or {}
        self._mtu = mtu
        self._name_server = name_server
        self._routed = routed

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="hosts-"))
        resolver = f"nameserver {self._name_server}\n" if self._name_server else ""
        (self.folder / "resolv.conf").write_text(resolver)
        self.switch = Namespaces("switch")
        try:
            self.hosts = [Host(self, index) for index in range(len(self.names))]
            self.switch.rewire("\n".join(self._cabling()))
            for host in self.hosts:
                host.shell("\n".join(self._configuring(host)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.close()
        self.switch.close()
        shutil.rmtree(self.folder)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __len__(self) -> int:
        return len(self.hosts)

    def has(self, index: int, nic: str) -> bool:
        """Return whether a host has that card."""
        return index not in self._without.get(nic, ())

    def first_address(self, index: int) -> str:
        """Return the address of a host's first card."""
        nic = next(nic for nic in self.nics if self.has(index, nic))
        return f"{self.nics[nic]}.{index + 1}"

    def _cards(self, host: Host) -> list[str]:
        return [nic for nic in self.nics if self.has(host.index, nic)]

    def _cabling(self) -> Iterator[str]:
        for nic in self.nics:
            yield f"ip link add br-{nic} mtu {self._mtu} type bridge"
            yield f"ip link set br-{nic} up"
        for host in self.hosts:
            for nic in self._cards(host):
                port, mtu = host.port(nic), f"mtu {self._mtu}"
                yield f"ip link add {port} {mtu} type veth peer name {nic} {mtu} netns {host.pid}"
                yield f"ip link set {port} master br-{nic} up"

    def _configuring(self, host: Host) -> Iterator[str]:
        for nic in self._cards(host):
            yield f"ip addr add {host.address(nic)}/24 brd + dev {nic}"
            yield f"ip link set {nic} up"
        for nic in self._cards(host):
            yield wait_for_state(nic, "up")
        if self._routed:
            yield f"ip route add default via {self.first_address(host.index).rpartition('.')[0]}.254"


def wait_for_state(interface: str, state: Literal["up", "down"]) -> str:
    """Return a command that waits, because a kernel notices a change of carrier up to 1 s later."""
    where = f"/sys/class/net/{interface}/operstate"
    return f"timeout 10 sh -c 'until grep -q {state} {where}; do sleep 0.02; done'"


def names_of_all(network: Network, _: int) -> str:
    """Return a correct /etc/hosts: every name resolves to the first card."""
    lines = [f"{network.first_address(each)} {name}" for each, name in enumerate(network.names)]
    return "\n".join(["127.0.0.1 localhost", *lines, ""])


def names_as_debian(network: Network, index: int) -> str:
    """Return the /etc/hosts of Debian's installer: a host's own name resolves to 127.0.1.1."""
    own = network.first_address(index)
    return names_of_all(network, index).replace(f"{own} ", "127.0.1.1 ")
