"""What nodes tell each other: each field is checked on arrival, and all of it is data, not text.

Every node renders what it prints from this data itself. A node that is wrong, or hostile, can lie
about addresses and numbers; it cannot put a command, a control character or a page of its own into
what another node prints.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, Field, Strict, TypeAdapter

from ddpsafe.doctor._findings import (
    DialResult,
    printable,
)
from ddpsafe.doctor._subject import PlaceKind, VariableSource

# pydantic reads annotations when a message is first validated: these must exist at run time.
from ddpsafe.doctor._system.tcp import MAIN_TABLE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpsafe.doctor._mesh.transport import Json

T = TypeVar("T")

MOST_NODES: Final = 100_000
LOWEST_PORT: Final = 1024
"""What nodes listen on for each other is handed out by the system: no service's port is dialled."""


def _is_interface(name: str) -> str:
    # What the kernel's dev_valid_name() takes, of printable characters; a line to copy quotes it.
    if name and (not name.isprintable() or any(each in "/: " for each in name) or name[0] == "."):
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
        ValueError: It is a name, or an address of a group, of nothing, or of the local link
            (169.254.169.254 is where clouds keep their secrets).
    """
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address) and (address.scope_id or address.ipv4_mapped):
        raise ValueError("an address with a zone, or IPv4 in IPv6, is not announced")
    if address.is_multicast or address.is_unspecified or address.is_link_local:
        raise ValueError("no host announces an address of this kind")
    if address == ipaddress.IPv4Address("255.255.255.255"):
        raise ValueError("no host announces the broadcast address")
    return address


def _of_pattern(pattern: str) -> Any:
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise ValueError(f"this does not match {pattern}")
        return text

    return AfterValidator(check)


Hostname = Annotated[str, Strict(), _of_pattern(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")]
EndpointHost = Annotated[str, Strict(), _of_pattern(r"[A-Za-z0-9_:][A-Za-z0-9._:-]{0,252}")]
InterfaceName = Annotated[str, Strict(), Field(max_length=15), AfterValidator(_is_interface)]
Address = Annotated[str, Strict(), Field(max_length=45), AfterValidator(_is_address)]
NetworkText = Annotated[str, Strict(), Field(max_length=49), AfterValidator(_is_network)]
Rank = Annotated[int, Field(ge=0, lt=MOST_NODES)]  # not strict: as a key of JSON it is a text
Count = Annotated[int, Strict(), Field(ge=0, le=1 << 40)]
AnyPort = Annotated[int, Strict(), Field(ge=0, le=65535)]
Seconds = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=-1e10, le=1e10)]
Rate = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=0, le=1e15)]
Hex = Annotated[str, Strict(), _of_pattern(r"[0-9a-f]{0,64}")]
Text = Annotated[str, Strict(), Field(max_length=500), AfterValidator(printable)]
Long = Annotated[str, Strict(), Field(max_length=8192), AfterValidator(printable)]
Name = Annotated[str, Strict(), _of_pattern(r"[A-Za-z0-9_.-]{1,128}")]
ErrorName = Annotated[str, Strict(), _of_pattern(r"[A-Z0-9]{0,32}")]
ChainName = Annotated[str, Strict(), _of_pattern(r"[A-Za-z0-9_./-]{1,128}")]
Plain = bool | int | float | Long | None

Flaw = Literal[
    "",
    "absent-interface",
    "loopback",
    "link-local",
    "unresolved",
    "silent-resolver",
    "not-running",
]
Topic = Literal[
    "hello", "mesh", "imported", "reduced", "roster", "progress", "all-reduce", "results"
]

_checkers: dict[Any, TypeAdapter[Any]] = {}
"""Made when they are first needed: making one takes milliseconds."""


def read(kind: type[T], value: object) -> T:
    """Read a message of a kind.

    Raises:
        ValueError: It is none.
    """
    checker: TypeAdapter[T] | None = _checkers.get(kind)
    if checker is None:
        checker = _checkers[kind] = TypeAdapter(kind)
    return checker.validate_python(value)


def write(message: Any) -> Json:
    """Return a message, a dataclass of this module or one that is made of such, as plain data."""
    assert dataclasses.is_dataclass(message)  # noqa: S101 - every message is one
    table: Json = asdict(message)  # type: ignore[arg-type]
    return table


def as_hostname(name: str) -> str:
    """Return the name of this host as others accept it: the kernel takes any bytes for one."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:253].lstrip(".-") or "unnamed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """How a node introduces itself at the endpoint.

    Attributes:
        version: Of the protocol; doctors of different versions do not talk.
        nnodes: Nodes of its job.
        node_rank: Which it says it is.
        hostname: Its name.
        pid: Of its doctor, to tell two of them on one host apart.
        job: What its launcher calls the job; empty where nothing does.
        challenge: What the answer has to be signed with.
    """

    version: Count
    nnodes: Annotated[int, Strict(), Field(ge=1, le=MOST_NODES)]
    node_rank: Annotated[int, Strict(), Field(ge=-MOST_NODES, le=MOST_NODES)]
    hostname: Hostname
    pid: Count
    job: Text
    challenge: Hex


Refusal = Literal["", "duplicate", "other-job", "late", "secret", "version"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What node rank 0 answers to a greeting.

    Attributes:
        nonce: Of this run of node rank 0.
        session: Of this connection; the lines after it are signed with it.
        hostname: Of node rank 0.
        nnodes: Nodes of its job.
        job: Its job.
        version: Of the protocol that it speaks.
        refusal: Why the node is not let in; empty where it is.
        holder: The host that has the place, where that is the reason.
        holder_pid: The process there.
    """

    nonce: Hex
    session: Hex
    hostname: Hostname
    nnodes: Count
    job: Text
    version: Count
    refusal: Refusal = ""
    holder: Annotated[str, Strict(), _of_pattern(r"[A-Za-z0-9._-]{0,253}")] = ""
    holder_pid: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A node that came and was sent away.

    Attributes:
        reason: Why.
        greeting: What it said.
        holder: Who has its place, where that is the reason.
        holder_pid: The process there.
    """

    reason: Refusal
    greeting: Greeting
    holder: Annotated[str, Strict(), _of_pattern(r"[A-Za-z0-9._-]{0,253}")] = ""
    holder_pid: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Announced:
    """Where the ranks of a host would listen.

    Attributes:
        address: As numbers; where the library's choice is of no use, the one that leads to the
            endpoint, so that the rest can be checked all the same. Empty if there is none.
        interface: The interface that has it.
        chosen_by: Why this one: a variable with its value, or the host's name.
        flaw: What is wrong with the library's choice, or nothing.
        wanted: What the library would have taken: a name of an interface, or an address.
        variable: The variable that decided; empty where none did.
        place: Where it was set.
        place_where: The variable or the file that set it.
        otherwise: The address that would be announced without the variable.
    """

    address: Address
    interface: InterfaceName
    chosen_by: Text
    flaw: Flaw = ""
    wanted: Text = ""
    variable: Literal["", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"] = ""
    place: PlaceKind = "shell"
    place_where: Text = ""
    otherwise: Address = ""

    def place_of_variable(self) -> VariableSource:
        """Return where the variable was set, or is to be."""
        return VariableSource(kind=self.place, where=self.place_where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What should be the same on all hosts; of a fingerprint, the sections that are compared.

    Attributes:
        versions: Of packages, by name.
        env: Variables of the ranks, secrets hidden.
        driver: Version of the NVIDIA driver.
        data_paths: What each path of ``data_paths`` shows, by its name in the configuration.
        config: The arguments that all nodes have to have in common.
    """

    versions: Annotated[dict[Name, Text], Field(max_length=256)] = field(default_factory=dict)
    env: Annotated[dict[Name, Long], Field(max_length=1024)] = field(default_factory=dict)
    driver: Text | None = None
    data_paths: Annotated[dict[Text, dict[Name, Plain]], Field(max_length=256)] = field(
        default_factory=dict
    )
    config: Annotated[dict[Name, Plain], Field(max_length=64)] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one node says when it registers.

    Attributes:
        node_rank: Its rank.
        hostname: Its name.
        machine: The same for two nodes that share one network, loopback included.
        announced: The address its ranks would listen at, and why that one.
        port: Where it listens now, on that address; 0 where it cannot.
        token: Who can answer with it is this node.
        mtu_bytes: Of the interface.
        interfaces: Of every running interface but loopback, its addresses with their networks.
        port_range: First and last of the ports that its system gives to those who ask for any.
        has_torch: Whether torch is installed there.
        source: The own address from which it reaches the endpoint.
        endpoint: The address of the endpoint that it dialled or, as node rank 0, that its name has.
        facts: What is compared with the others'.
    """

    node_rank: Rank
    hostname: Hostname
    machine: Annotated[str, Strict(), _of_pattern(r"[ -~]{0,128}")]
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
        """Hold the parts against each other.

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
        elsewhere = ipaddress.ip_address(own).is_loopback if own else True
        # An interface that is down is not among those that run.
        if not elsewhere and own not in known and self.announced.flaw != "not-running":
            raise ValueError(f"{own} is announced and on none of the interfaces")

    @property
    def network(self) -> str:
        """The network of its address, e.g. ``10.77.0.0/24``; empty where it has none."""
        return self.interfaces.get(self.announced.interface, {}).get(self.announced.address, "")

    def contact(self) -> Contact:
        """Return what the others need to dial it."""
        return Contact(
            self.node_rank,
            self.announced.address,
            self.port,
            self.token,
            self.network,
            self.machine,
        )

    def __str__(self) -> str:
        """Name it as messages do."""
        return f"{self.hostname} (node rank {self.node_rank})"


def _require_high_port(port: int) -> None:
    if 0 < port < LOWEST_PORT:
        raise ValueError(f"port {port} belongs to a service of the system")


class Contact(NamedTuple):
    """How to dial a node; the attributes are a `Node`'s."""

    node_rank: Rank
    address: Address
    port: AnyPort
    token: Hex
    network: NetworkText
    machine: Annotated[str, Strict(), _of_pattern(r"[ -~]{0,128}")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who came, as node rank 0 tells all of them; whom each one dials follows from it.

    Attributes:
        nnodes: How many were to come.
        contacts: Those who came, by node rank.
        seed: Decides what the plan leaves to chance.
        clock_s: What the clock of node rank 0 showed, in seconds since 1970.
    """

    nnodes: Annotated[int, Strict(), Field(ge=1, le=MOST_NODES)]
    contacts: Annotated[tuple[Contact, ...], Field(min_length=1, max_length=MOST_NODES)]
    seed: Annotated[int, Strict(), Field(ge=0, lt=1 << 64)]
    clock_s: Seconds

    def __post_init__(self) -> None:
        """Hold the parts against each other.

        Raises:
            ValueError: A node is beyond the number of nodes or there twice, or node rank 0 is missing.
        """
        ranks = [contact.node_rank for contact in self.contacts]
        require_ranks(ranks, self.nnodes)
        if len(set(ranks)) != len(ranks) or 0 not in ranks:
            raise ValueError("a node is there twice, or node rank 0 is not")
        for contact in self.contacts:
            _require_high_port(contact.port)


def require_ranks(ranks: Iterable[int], nnodes: int) -> None:
    """Let ranks below the number of nodes pass.

    Raises:
        ValueError: One is not.
    """
    if any(rank >= nnodes for rank in ranks):
        raise ValueError(f"a node rank is beyond the {nnodes} nodes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """Who is waited for, as node rank 0 tells all nodes now and then.

    Attributes:
        came: How many have come.
        nnodes: How many were to come.
        missing: Some of those who have not.
        names: Their names, where something tells them.
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
        """Say it in a line."""
        named = ", ".join(self.names.get(rank) or str(rank) for rank in self.missing)
        return (
            f"{self.came} of {self.nnodes} nodes have come; waiting for node rank {named}, "
            f"{self.waited_s:.0f} of {self.total_s:.0f} s"
        )


class FilterChain(NamedTuple):
    """A chain of a host's own packet filter that keeps some packets out, or in.

    Attributes:
        family: ``inet``, ``ip`` or ``ip6``.
        table: Its table.
        name: Its own.
        hook: Whether it filters what comes in, or what goes out.
    """

    family: Literal["inet", "ip", "ip6"]
    table: ChainName
    name: ChainName
    hook: Literal["input", "output"] = "input"


class Route(NamedTuple):
    """The way that packets to another node take, where it is not by the announced interface.

    Attributes:
        target: That node.
        interface: By which they leave; empty where a route or rule of the host refuses them.
        prefix: The network or address that the route is for; empty where it is not known.
        table: The routing table that it is in.
    """

    target: Rank
    interface: InterfaceName
    prefix: NetworkText
    table: Count = MAIN_TABLE


Reason = Literal["", "no-address", "no-arp", "silent", "late", "hung-up", "other-answer"]
"""What is known of a direction besides the error of the system.

``silent``: the connection opened and nothing was said; ``late``: so it seemed, and the other side
did answer.
"""


class Dialled(NamedTuple):
    """What became of one connection.

    Attributes:
        target: Whom it was to reach.
        result: What became of it.
        latency_s: Round trip of a small packet.
        bandwidth_bytes_per_s: Rough, of one burst.
        reason: What is known besides.
        error: Name of the system's error, e.g. ``ECONNREFUSED``.
        took_s: Until the result was clear.
        retransmits: How often in a row the last packet was sent, where large ones were lost.
        segment_bytes: The most the kernel put into one packet, where large ones were lost.
        path_mtu_bytes: What the kernel took the path's MTU for, where large ones were lost.
        passing_mtu_bytes: The largest MTU with which the same came through, where large ones were
            lost; 0 where none did.
        packets: How many were sent, each counted once.
        resent: How many had to be sent again.
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
        """What the system said, for a reader who knows it."""
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
    "silent": "accepted, then silent",
    "late": "answered late",
    "hung-up": "closed the connection",
    "other-answer": "answered something else",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one node says after the mesh.

    Attributes:
        dialled: What became of its connections.
        heard: Who dialled it and was answered, in time or not.
        chains: Chains of its packet filter that keep packets out or in, where a direction is closed.
        chains_known: Whether its packet filter could be read: without chains, it filters nothing.
        routes: Ways to others that leave by another interface than the announced one.
        clock_ahead_s: How much its clock is ahead of node rank 0's.
        resolver_silent_s: How long it waited for the name of node rank 0's address and got no
            answer; 0 if there was one.
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
    """What became of one node's part in the all-reduce.

    Attributes:
        error: What torch said; empty if all was well.
        took_s: How long it took with the start of the process group.
        backends: Which backends were tried.
    """

    error: Text = ""
    took_s: Rate = 0.0
    backends: tuple[Name, ...] = ()
