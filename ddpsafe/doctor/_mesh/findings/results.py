"""Everything that came in, as it travels to every node: each makes the findings from it itself."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final, Literal

from pydantic import Field, Strict

# pydantic reads annotations when a message is first validated: these must exist at run time.
from ddpsafe._host import is_loopback
from ddpsafe.doctor._mesh.pairs import plan_targets
from ddpsafe.doctor._mesh.protocol import (
    MOST_NODES,
    Address,
    AnyPort,
    Contact,
    Dialled,
    EndpointHost,
    Hostname,
    Name,
    Node,
    NodeReport,
    Rank,
    Rate,
    Reduced,
    Rejected,
    read,
    require_ranks,
    write,
)
from ddpsafe.doctor._mesh.reach_node_zero import Obstacle  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpsafe.doctor._findings import DialResult
    from ddpsafe.doctor._mesh.findings.connections import Way
    from ddpsafe.doctor._mesh.transport import Json

_LONGEST_BYTES: Final = 256 << 20
"""Of results when it is unpacked: a thousand nodes need 4 MB."""


Skipped = Literal["", "not-asked", "failures", "no-torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """What became of the all-reduce at the end.

    Attributes:
        skipped: Why there was none; empty where there was.
        said: What became of each node's part, by node rank.
        late: Who had not imported torch by the end.
        stuck: Who had, and has no result.
    """

    skipped: Skipped = ""
    said: dict[Rank, Reduced] = field(default_factory=dict)
    late: tuple[Rank, ...] = ()
    stuck: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where a node came from.

    Attributes:
        hostname: What it calls itself.
        address: That node rank 0 sees it at.
    """

    hostname: Hostname
    address: Address = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What node rank 0 knows when every node has spoken.

    Attributes:
        nnodes: How many were to come.
        backend: Whose rules the addresses follow.
        host: Of the endpoint, as it was given.
        port: Of the endpoint.
        nodes: Who came, by node rank.
        reports: Who came back from the mesh, by node rank.
        names: Names of nodes that did not come, where something tells them.
        peers: Where every node that was let in came from, by node rank.
        garbled: Who said something that makes no sense, with what it was about.
        seed: Decides, with the nodes, who dialled whom.
        only_closed: Whether the reports leave out what is open, because there is so much of it.
        waited_s: How long node rank 0 waited for the nodes.
        rejected: Who came and was sent away.
        obstacle: What is at the endpoint, where it does not lead to node rank 0.
        other_coordinator: Another host that is node rank 0 and that the endpoint leads to.
        at_store: Whether ranks of the job have met at its store, and not doctors at the endpoint.
        all_reduce: What became of it.
    """

    nnodes: Annotated[int, Strict(), Field(ge=1, le=MOST_NODES)]
    backend: Name
    host: EndpointHost
    port: AnyPort
    nodes: dict[Rank, Node]
    reports: dict[Rank, NodeReport]
    names: dict[Rank, Hostname] = field(default_factory=dict)
    peers: dict[Rank, Peer] = field(default_factory=dict)
    garbled: dict[Rank, Literal["hello", "mesh", "reduced"]] = field(default_factory=dict)
    seed: Annotated[int, Strict(), Field(ge=0, lt=1 << 64)] = 0
    only_closed: bool = False
    waited_s: Rate = 0.0
    rejected: Annotated[tuple[Rejected, ...], Field(max_length=1024)] = ()
    obstacle: Obstacle | None = None
    other_coordinator: Annotated[str, Strict(), Field(max_length=253)] = ""
    at_store: bool = False
    all_reduce: AllReduce = field(default_factory=AllReduce)

    def __post_init__(self) -> None:
        """Hold the parts against each other.

        Raises:
            ValueError: A node speaks that did not come, or that is beyond the number of nodes.
        """
        if 0 not in self.nodes or any(rank != each.node_rank for rank, each in self.nodes.items()):
            raise ValueError("node rank 0 is missing, or a node has two ranks")
        require_ranks([*self.nodes, *self.names, *self.peers, *self.garbled], self.nnodes)
        if (
            self.reports.keys() | self.all_reduce.said.keys() | {*self.all_reduce.late}
        ) - self.nodes.keys():
            raise ValueError("a node speaks that did not come")

    def plan(self) -> dict[int, list[int]]:
        """Return whom each node was to dial, by node rank."""
        contacts = tuple(node.contact() for node in self.nodes.values())
        return make_plan(contacts, nnodes=self.nnodes, seed=self.seed)

    def is_translated(self) -> bool:
        """Tell whether nodes reach node rank 0 at an address that it does not have itself."""
        coordinator = self.nodes[0]
        own = {address for table in coordinator.interfaces.values() for address in table}
        return any(
            node.endpoint not in own
            for node in self.nodes.values()
            if node.endpoint
            and node.machine != coordinator.machine
            and not is_loopback(node.endpoint)
        )

    def find_duplicates(self) -> dict[str, list[int]]:
        """Return announced addresses that another host has too, with the node ranks of all who do."""
        holders: dict[str, set[int]] = defaultdict(set)
        for rank, node in self.nodes.items():
            for table in node.interfaces.values():
                for address in table:
                    holders[address].add(rank)
        announced = {node.announced.address for node in self.nodes.values()} - {""}
        return {
            address: sorted(holders[address])
            for address in sorted(announced)
            if len({self.nodes[rank].machine for rank in holders[address]}) > 1
        }

    def find_shadowed(self) -> dict[int, int]:
        """Return nodes that came and were lost at once, with another one that has their address.

        What is sent to such an address finds the one host or the other.
        """
        return {
            rank: node.node_rank
            for rank, peer in self.peers.items()
            if rank not in self.nodes
            for node in self.nodes.values()
            if node.announced.address == peer.address and node.hostname != peer.hostname
        }

    def connections(self) -> dict[Way, Dialled]:
        """Return every direction between two hosts that both came back."""
        found = {}
        for source, report in self.reports.items():
            for dialled in report.dialled:
                target = dialled.target
                if target not in self.reports or target == source:
                    continue
                # Believe the host that says it was dialled: it was slow, and nothing took its place.
                is_late = dialled.reason == "silent" and source in self.reports[target].heard
                found[source, target] = (
                    dialled._replace(result="open", reason="late") if is_late else dialled
                )
        if not self.only_closed:
            return found
        opened = {
            (source, target): Dialled(target, "open")
            for source, targets in self.plan().items()
            for target in targets
            if {source, target} <= self.reports.keys()
        }
        return {**opened, **found}

    def hostnames(self, node_ranks: Iterable[int]) -> tuple[str, ...]:
        """Return names of nodes, in order."""
        return tuple(self.name_of(node) for node in sorted(set(node_ranks)))

    def name_of(self, node_rank: int) -> str:
        """Return the name of a node, or its rank in words where it has none."""
        return self._known_name(node_rank) or f"node rank {node_rank}"

    def label(self, node_rank: int) -> str:
        """Name a node with its rank."""
        name = self._known_name(node_rank)
        return f"{name} (node rank {node_rank})" if name else f"node rank {node_rank}"

    def _known_name(self, node_rank: int) -> str:
        node = self.nodes.get(node_rank)
        if node is not None:
            return node.hostname
        peer = self.peers.get(node_rank)
        return peer.hostname if peer is not None else self.names.get(node_rank, "")


def make_plan(contacts: Iterable[Contact], *, nnodes: int, seed: int) -> dict[int, list[int]]:
    """Return whom each node that came dials, the same on every node."""
    networks = {contact.node_rank: contact.network for contact in contacts}
    by_rank = [networks.get(rank, "") for rank in range(nnodes)]
    plan = plan_targets(by_rank, seed=seed)
    return {rank: plan[rank] for rank in networks}


def pack(results: Results) -> str:
    """Return results as a message: small, as it goes to every node and hosts are much alike."""
    text = json.dumps(write(results), separators=(",", ":"), default=str)
    return base64.b64encode(zlib.compress(text.encode())).decode()


def unpack(packed: str) -> Results:
    """Read results.

    Raises:
        ValueError: It is none.
    """
    try:
        unzip = zlib.decompressobj()
        text = unzip.decompress(base64.b64decode(packed), _LONGEST_BYTES)
        return read(Results, json.loads(text))
    except (zlib.error, binascii.Error, RecursionError) as exc:
        raise ValueError("these are not results") from exc


def as_details(dialled: Mapping[Way, Dialled]) -> list[dict[str, Json]]:
    """Return directions as the details of a finding."""
    return [
        {"source": source, "target": target, "result": each.result, "said": each.said}
        for (source, target), each in sorted(dialled.items())
    ]


def is_closed(result: DialResult) -> bool:
    """Tell whether a connection never opened."""
    return result in ("dropped", "refused", "no-route")
