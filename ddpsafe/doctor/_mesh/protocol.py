"""The messages between nodes. Each field is validated on arrival, and all of them are data, not text.

Every node renders its own output from this data. A broken or hostile node can lie about addresses and
numbers, but cannot put a command, a control character or a page of its own into another node's output.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, Field, Strict

from ddpsafe._host import is_loopback
from ddpsafe._text import printable
from ddpsafe.doctor._findings import DialResult  # noqa: TC001 - pydantic reads it
from ddpsafe.doctor._subject import Text, VariableSource

# pydantic reads annotations when a message is first validated: these must exist at run time.
from ddpsafe.doctor._system.tcp import MAIN_TABLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpsafe.doctor._mesh.transport import Json

T = TypeVar("T")

VERSION: Final = 6
"""The protocol version; doctors of different versions refuse each other."""

MOST_NODES: Final = 100_000
LOWEST_PORT: Final = 1024
"""Nodes listen for each other on ephemeral ports, so the port of a service is never dialled."""


def _is_interface(name: str) -> str:
    # What the kernel's dev_valid_name() accepts, if printable; lines to copy quote it.
    if name and (
        not name.isprintable() or any(character in "/: " for character in name) or name[0] == "."
    ):
        raise ValueError("this cannot be the name of an interface")
    return name


def _is_address(text: str) -> str:
    if text:
        require_unicast(text)
    return text


def _is_network(text: str) -> str:
    return text and str(ipaddress.ip_network(text))


def require_unicast(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address that a host may have and announce.

    Raises:
        ValueError: It is a name, or a multicast, unspecified or link-local address.
    """
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address) and (address.scope_id or address.ipv4_mapped):
        raise ValueError("an address with a zone, or IPv4 in IPv6, is not announced")
    # Of the link-local ones, 169.254.169.254 is where clouds serve credentials.
    if address.is_multicast or address.is_unspecified or address.is_link_local:
        raise ValueError("no host announces an address of this kind")
    if address == ipaddress.IPv4Address("255.255.255.255"):
        raise ValueError("no host announces the broadcast address")
    return address


Hostname = Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,252}$")]
EndpointHost = Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9_:][A-Za-z0-9._:-]{0,252}$")]
InterfaceName = Annotated[str, Strict(), Field(max_length=15), AfterValidator(_is_interface)]
Address = Annotated[str, Strict(), Field(max_length=45), AfterValidator(_is_address)]
NetworkText = Annotated[str, Strict(), Field(max_length=49), AfterValidator(_is_network)]
Rank = Annotated[int, Field(ge=0, lt=MOST_NODES)]  # not strict, because JSON keys are strings
Count = Annotated[int, Strict(), Field(ge=0, le=1 << 40)]
AnyPort = Annotated[int, Strict(), Field(ge=0, le=65535)]
Seconds = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=-1e10, le=1e10)]
Rate = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=0, le=1e15)]
Hex = Annotated[str, Strict(), Field(pattern=r"^[0-9a-f]{0,64}$")]
Long = Annotated[str, Strict(), Field(max_length=8192), AfterValidator(printable)]
Name = Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
# It may name one for each device: "cpu:gloo,cuda:nccl".
Backend = Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9_.:,-]{1,128}$")]
PortName = Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9_.-]{1,64}:[0-9]{1,3}$")]
ErrorName = Annotated[str, Strict(), Field(pattern=r"^[A-Z0-9]{0,32}$")]
ChainName = Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9_./-]{1,128}$")]
Plain = bool | int | float | Long | None

Flaw = Literal[
    "", "absent-interface", "loopback", "link-local", "unresolved", "silent-resolver", "not-running"
]


def write(message: Any) -> Json:
    """Return a message (a dataclass of this module, or one composed of them) as plain data."""
    assert dataclasses.is_dataclass(message)  # noqa: S101 - every message is one
    table: Json = asdict(message)  # type: ignore[arg-type]
    return table


def as_hostname(name: str) -> str:
    """Return a host name in the form that other nodes accept; the kernel allows any bytes."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:253].lstrip(".-") or "unnamed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """How a node introduces itself at the endpoint.

    Attributes:
        version: The protocol version; doctors of different versions refuse each other.
        pid: The process ID of its doctor, which distinguishes two on one host.
        job: The launcher's variables that identify the job; empty if there are none.
    """

    version: Count
    nnodes: Annotated[int, Strict(), Field(ge=1, le=MOST_NODES)]
    node_rank: Annotated[int, Strict(), Field(ge=-MOST_NODES, le=MOST_NODES)]
    hostname: Hostname
    pid: Count
    job: Text


Refusal = Literal["duplicate", "other-job", "late", "secret", "version"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A node that was refused.

    Attributes:
        holder: The host that already has its node rank, if that is the reason.
        holder_pid: The process there.
    """

    reason: Refusal
    greeting: Greeting
    holder: Annotated[str, Strict(), Field(pattern=r"^[A-Za-z0-9._-]{0,253}$")] = ""
    holder_pid: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Node rank 0's answer to a greeting.

    Attributes:
        nonce: Identifies this run of node rank 0.
        greeting: Its own greeting.
        rejected: Why the node is refused; ``None`` if it is accepted.
    """

    nonce: Hex
    greeting: Greeting
    rejected: Rejected | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """Where the ranks of a host would listen.

    Attributes:
        address: The numeric address. If the library's choice is unusable, the one that leads to the
            endpoint, so that everything else can still be checked. Empty if there is none.
        interface: The interface that has it.
        chosen_by: What chose it: a variable with its value, or the host's name.
        flaw: What is wrong with the library's choice; empty if nothing is.
        wanted: What the library would have used: an interface name or an address.
        variable: The variable that chose it; empty if none did.
        place: Where that variable was set, or should be.
        otherwise: The address that would be announced without the variable.
    """

    address: Address
    interface: InterfaceName
    chosen_by: Text
    flaw: Flaw = ""
    wanted: Text = ""
    variable: Literal["", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"] = ""
    place: VariableSource = field(default_factory=VariableSource)
    otherwise: Address = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What should be the same on all hosts: the sections of a fingerprint that are compared.

    Attributes:
        env: Variables of the ranks, with secrets hidden.
        infiniband: State, rate and kind of each InfiniBand port, by device and number.
        data_paths: A summary of each of ``data_paths``, by its name in the configuration.
        config: The settings that have to be the same on all nodes.
    """

    versions: Annotated[dict[Name, Text], Field(max_length=256)] = field(default_factory=dict)
    env: Annotated[dict[Name, Long], Field(max_length=1024)] = field(default_factory=dict)
    driver: Text | None = None
    infiniband: Annotated[dict[PortName, Text], Field(max_length=256)] = field(default_factory=dict)
    data_paths: Annotated[dict[Text, dict[Name, Plain]], Field(max_length=256)] = field(
        default_factory=dict
    )
    config: Annotated[dict[Name, Plain], Field(max_length=64)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The registration of one node.

    Attributes:
        machine: The same for nodes on one host and in one network namespace.
        announced: The address its ranks would listen on, and what chose it.
        port: Where it listens now on that address; 0 if it cannot.
        token: Proves its identity to nodes that dial it.
        interfaces: The addresses of every running interface except loopback, with their networks.
        port_range: The first and last ephemeral port of its system.
        source: Its own address from which it reaches the endpoint.
        endpoint: The endpoint's address that it dialled or, on node rank 0, resolved.
        facts: What is compared with the other nodes.
    """

    node_rank: Rank
    hostname: Hostname
    machine: Annotated[str, Strict(), Field(pattern=r"^[ -~]{0,128}$")]
    announced: Announced
    port: AnyPort
    token: Hex
    mtu_bytes: Annotated[int, Strict(), Field(ge=0, le=1 << 24)]
    interfaces: Annotated[dict[InterfaceName, dict[Address, NetworkText]], Field(max_length=1024)]
    port_range: tuple[AnyPort, AnyPort]
    has_torch: bool
    source: Address = ""
    endpoint: Address = ""
    facts: Facts = field(default_factory=Facts)

    def __post_init__(self) -> None:
        """Check that the parts are consistent.

        Raises:
            ValueError: It listens on a port of a service, or an address is not in its network.
        """
        _require_high_port(self.port)
        for table in self.interfaces.values():
            for address, network in table.items():
                if ipaddress.ip_address(address) not in ipaddress.ip_network(network):
                    raise ValueError(f"{address} is not in {network}")
        known = {address for table in self.interfaces.values() for address in table}
        own = self.announced.address
        elsewhere = not own or is_loopback(own)
        # An interface that is down is not among the running ones.
        if not elsewhere and own not in known and self.announced.flaw != "not-running":
            raise ValueError(f"{own} is announced but none of the interfaces has it")

    @property
    def network(self) -> str:
        """The network of its address, e.g. ``10.77.0.0/24``; empty if it has none."""
        return self.interfaces.get(self.announced.interface, {}).get(self.announced.address, "")

    def contact(self) -> Contact:
        """Return what other nodes need to dial it."""
        return Contact(
            self.node_rank,
            self.announced.address,
            self.port,
            self.token,
            self.network,
            self.machine,
        )

    def __str__(self) -> str:
        return f"{self.hostname} (node rank {self.node_rank})"


def _require_high_port(port: int) -> None:
    if 0 < port < LOWEST_PORT:
        raise ValueError(f"port {port} may belong to a system service")


class Contact(NamedTuple):
    """How to dial a node; the attributes are those of `Node`."""

    node_rank: Rank
    address: Address
    port: AnyPort
    token: Hex
    network: NetworkText
    machine: Annotated[str, Strict(), Field(pattern=r"^[ -~]{0,128}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """The nodes that joined, as node rank 0 sends them to all; it determines which node dials which.

    Attributes:
        contacts: The nodes that joined, by node rank.
        seed: Determines the random part of the plan.
        clock_s: The clock of node rank 0, in seconds since 1970.
    """

    nnodes: Annotated[int, Strict(), Field(ge=1, le=MOST_NODES)]
    contacts: Annotated[tuple[Contact, ...], Field(min_length=1, max_length=MOST_NODES)]
    seed: Annotated[int, Strict(), Field(ge=0, lt=1 << 64)]
    clock_s: Seconds

    def __post_init__(self) -> None:
        """Check that the parts are consistent.

        Raises:
            ValueError: A node rank is too large or occurs twice, or node rank 0 is missing.
        """
        ranks = [contact.node_rank for contact in self.contacts]
        require_ranks(ranks, self.nnodes)
        if len(set(ranks)) != len(ranks) or 0 not in ranks:
            raise ValueError("a node rank occurs twice, or node rank 0 is missing")
        for contact in self.contacts:
            _require_high_port(contact.port)


def require_ranks(ranks: Iterable[int], nnodes: int) -> None:
    """Require that all node ranks are below the number of nodes.

    Raises:
        ValueError: One is not.
    """
    if any(rank >= nnodes for rank in ranks):
        raise ValueError(f"a node rank is beyond the {nnodes} nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """The nodes that node rank 0 waits for, sent to all nodes from time to time.

    Attributes:
        came: How many nodes have joined.
        missing: Some of the missing nodes.
        names: Their host names, if Slurm provides them.
        waited_s: How long it has waited.
        total_s: How long it waits at most.
    """

    came: Count
    nnodes: Count
    missing: Annotated[tuple[Rank, ...], Field(max_length=64)]
    names: dict[Rank, Hostname]
    waited_s: Seconds
    total_s: Seconds

    def __str__(self) -> str:
        named = ", ".join(self.names.get(rank) or str(rank) for rank in self.missing)
        return (
            f"{self.came} of {self.nnodes} nodes have joined; waiting for node rank {named}, "
            f"{self.waited_s:.0f} of {self.total_s:.0f} s"
        )


class FilterChain(NamedTuple):
    """A chain of a host's own packet filter that blocks some packets.

    Attributes:
        hook: Whether it filters incoming or outgoing packets.
    """

    family: Literal["inet", "ip", "ip6"]
    table: ChainName
    name: ChainName
    hook: Literal["input", "output"] = "input"


class Route(NamedTuple):
    """The route of packets to another node that do not leave by the announced interface.

    Attributes:
        interface: Where they leave; empty if a route or rule of the host rejects them.
        prefix: The destination of the route; empty if unknown.
    """

    target: Rank
    interface: InterfaceName
    prefix: NetworkText
    table: Count = MAIN_TABLE


Reason = Literal["", "no-address", "no-arp", "silent", "late", "hung-up", "other-answer"]
"""What is known about a direction besides the system's error.

``silent``: the connection opened but nothing was received; ``late``: the same, but the other side
reports that it did answer.
"""


class Dialled(NamedTuple):
    """The outcome of one connection.

    Attributes:
        latency_s: Round trip of a small packet.
        bandwidth_bytes_per_s: A rough value from one burst.
        error: Name of the system's error, e.g. ``ECONNREFUSED``.
        took_s: Time until the outcome was known.
        retransmits: Consecutive retransmissions of the last packet, if large ones were lost.
        segment_bytes: The most data the kernel put into one packet, if large ones were lost.
        path_mtu_bytes: The kernel's estimate of the path's MTU, if large packets were lost, or if it is
            smaller than that of the interface; else 0.
        passing_mtu_bytes: The largest MTU with which the data got through, if large packets were
            lost; 0 if none did.
        packets: Packets sent, without retransmissions.
        resent: Packets that were lost and sent again.
    """

    target: Rank
    result: DialResult
    latency_s: Rate | None = None
    bandwidth_bytes_per_s: Rate | None = None
    reason: Reason = ""
    error: ErrorName = ""
    took_s: Rate = 0.0
    retransmits: Count = 0
    segment_bytes: Count = 0
    path_mtu_bytes: Count = 0
    passing_mtu_bytes: Count = 0
    packets: Count = 0
    resent: Count = 0

    @property
    def said(self) -> str:
        """What the system reported, for readers who know its terms."""
        if self.result == "large-lost" and self.segment_bytes:
            return (
                f"{self.retransmits} retransmissions, segments of {self.segment_bytes} bytes, "
                f"path MTU {self.path_mtu_bytes} bytes"
            )
        if self.result == "dropped":
            return "no answer"
        return self.error or _REASONS[self.reason]


_REASONS: Final[dict[Reason, str]] = {
    "": "",
    "no-address": "it has no address",
    "no-arp": "no answer to ARP",
    "silent": "accepted, then no answer",
    "late": "answered late",
    "hung-up": "closed the connection",
    "other-answer": "answered something else",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One node's report on its connections.

    Attributes:
        dialled: The outcome of each connection it tried.
        heard: The nodes that dialled it and were answered, in time or not.
        chains: Chains of its packet filter that block packets, if a direction is closed.
        chains_known: Whether its packet filter could be read; if so, no chains means no filtering.
        routes: Routes to other nodes that do not leave by the announced interface.
        clock_ahead_s: How far its clock is ahead of node rank 0's.
        resolver_silent_s: How long the reverse look-up of node rank 0's address got no answer; 0 if
            it was answered.
    """

    dialled: Annotated[tuple[Dialled, ...], Field(max_length=MOST_NODES)]
    heard: Annotated[tuple[Rank, ...], Field(max_length=MOST_NODES)] = ()
    chains: Annotated[tuple[FilterChain, ...], Field(max_length=256)] = ()
    chains_known: bool = False
    routes: Annotated[tuple[Route, ...], Field(max_length=MOST_NODES)] = ()
    clock_ahead_s: Seconds = 0.0
    resolver_silent_s: Rate = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The result of one node's all-reduce.

    Attributes:
        error: The error of torch; empty if it succeeded.
        took_s: How long it took, including the start of the process group.
    """

    error: Text = ""
    took_s: Rate = 0.0
    backends: tuple[Name, ...] = ()
