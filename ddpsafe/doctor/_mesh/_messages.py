"""What nodes tell each other, as it is judged when it comes in: never more than plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from pydantic import TypeAdapter

# pydantic reads annotations when a message is first judged: these must exist at run time.
from ddpsafe.doctor._matrix import Verdict  # noqa: TC001

if TYPE_CHECKING:
    from ddpsafe.doctor._mesh._board import Json

T = TypeVar("T")

Flaw = Literal["", "absent-interface", "loopback", "unresolved", "silent-resolver", "not-running"]


_judges: dict[Any, TypeAdapter[Any]] = {}
"""Made when they are first needed: making one takes milliseconds."""


def read(kind: type[T], value: Json) -> T:
    """Read a message of a kind.

    Raises:
        ValueError: It is none.
    """
    judge: TypeAdapter[T] | None = _judges.get(kind)
    if judge is None:
        judge = _judges[kind] = TypeAdapter(kind)
    return judge.validate_python(value)


def write(message: Announced | Node | Roster | Testimony | Report | Reduced) -> Json:
    """Return a message as plain data."""
    return asdict(message)


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
    """

    address: str
    interface: str
    chosen_by: str
    flaw: Flaw = ""
    wanted: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What one node says at the roll-call.

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
        facts: Its fingerprint; compared with the others'.
    """

    node_rank: int
    hostname: str
    machine: str
    announced: Announced
    port: int
    token: str
    mtu_bytes: int
    interfaces: dict[str, dict[str, str]]
    port_range: tuple[int, int]
    has_torch: bool
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def network(self) -> str:
        """The network of its address, e.g. ``10.77.0.0/24``; empty where it has none."""
        return self.interfaces.get(self.announced.interface, {}).get(self.announced.address, "")

    def contact(self) -> Contact:
        """Return what the others need to dial it."""
        return Contact(self.node_rank, self.announced.address, self.port, self.token, self.network)

    def __str__(self) -> str:
        """Name it as messages do."""
        return f"{self.hostname} (node rank {self.node_rank})"


class Contact(NamedTuple):
    """How to dial a node; the attributes are a `Node`'s."""

    node_rank: int
    address: str
    port: int
    token: str
    network: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who came, as node rank 0 tells all of them; whom each one dials follows from it.

    Attributes:
        nnodes: How many were to come.
        contacts: Those who came, by node rank.
        seed: Decides what the plan leaves to chance.
        clock_s: What the clock of node rank 0 showed, in seconds since 1970.
    """

    nnodes: int
    contacts: tuple[Contact, ...]
    seed: int
    clock_s: float


class Gate(NamedTuple):
    """A chain of a host's own packet filter through which everything comes in.

    Attributes:
        family: ``inet``, ``ip`` or ``ip6``.
        table: Its table.
        chain: Its name.
    """

    family: str
    table: str
    chain: str


class Dialled(NamedTuple):
    """What became of one connection.

    Attributes:
        target: Whom it was to reach.
        verdict: What became of it.
        latency_s: Round trip of a small packet.
        bandwidth_bytes_per_s: Rough, of one burst.
        said: What the system said.
        took_s: Until the verdict was clear.
        segment_bytes: The most the kernel put into one packet, where large ones were lost.
        passing_mtu_bytes: An MTU with which the same came through, where large ones were lost.
    """

    target: int
    verdict: Verdict
    latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None
    said: str = ""
    took_s: float = 0.0
    segment_bytes: int = 0
    passing_mtu_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Testimony:
    """What one node says after the mesh.

    Attributes:
        dialled: What became of its connections.
        heard: Who dialled it and was answered, in time or not.
        gates: Its packet filter's chains for what comes in, where somebody did not come in.
        clock_ahead_s: How much its clock is ahead of node rank 0's.
        resolver_silent_s: How long it waited in vain for the name of node rank 0's address; 0 if
            there was an answer.
    """

    dialled: tuple[Dialled, ...]
    heard: tuple[int, ...] = ()
    gates: tuple[Gate, ...] = ()
    clock_ahead_s: float = 0.0
    resolver_silent_s: float = 0.0


class Way(NamedTuple):
    """One direction of the matrix; the attributes are a `Direction`'s."""

    source: int
    target: int
    verdict: Verdict
    latency_s: float | None
    bandwidth_bytes_per_s: float | None
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The verdict, as node rank 0 tells all nodes; the attributes are a `Matrix`'s.

    Attributes:
        findings: As tables.
        hostnames: By node rank.
        addresses: By node rank.
        directions: Those of the matrix.
    """

    findings: tuple[dict[str, Any], ...]
    hostnames: tuple[str, ...]
    addresses: tuple[str, ...]
    directions: tuple[Way, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """What became of one node's part in the all-reduce.

    Attributes:
        error: What torch said; empty if all was well.
        took_s: How long it took with the start of the process group.
        backends: Which backends were tried.
    """

    error: str = ""
    took_s: float = 0.0
    backends: tuple[str, ...] = ()
