"""What node rank 0 collected, as it is sent to every node: each computes the findings from it."""

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
from ddpsafe._job.channel import from_json
from ddpsafe.doctor._mesh.pairs import plan_targets
from ddpsafe.doctor._mesh.protocol import (
    MOST_NODES,
    Address,
    AnyPort,
    Backend,
    Contact,
    Dialled,
    EndpointHost,
    Hostname,
    Node,
    NodeReport,
    Rank,
    Rate,
    Reduced,
    Rejected,
    require_ranks,
    write,
)
from ddpsafe.doctor._mesh.reach_node_zero import Obstacle  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpsafe.doctor._findings import DialResult
    from ddpsafe.doctor._mesh.transport import Json

# The most that results may unpack to, because node rank 0 may be hostile; a thousand nodes need 4 MB.
_LONGEST_BYTES: Final = 256 << 20


Way = tuple[int, int]
"""One direction: the node rank that dials, and the one that listens."""

Skipped = Literal["", "not-asked", "failures", "no-torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """The outcome of the all-reduce at the end.

    Attributes:
        skipped: Why it was skipped; empty if it was tried.
        late: Nodes that did not import torch in time.
        stuck: Nodes that did import it but have no result.
    """

    skipped: Skipped = ""
    said: dict[Rank, Reduced] = field(default_factory=dict)
    late: tuple[Rank, ...] = ()
    stuck: tuple[Rank, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Where a node connected from.

    Attributes:
        address: Its address as node rank 0 sees it.
    """

    hostname: Hostname
    address: Address = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What node rank 0 knows once every node has reported.

    Attributes:
        nnodes: How many nodes were expected.
        backend: The backend whose rules the addresses follow.
        names: Host names by node rank, if Slurm provides them.
        peers: Where every accepted node connected from, by node rank.
        garbled: Nodes that sent an invalid message, with its topic.
        seed: Determines, with the nodes, which node dialled which.
        only_closed: Whether the reports omit open directions, because there are too many of them.
        waited_s: How long node rank 0 waited for the nodes.
        obstacle: What answers at the endpoint, if that is not node rank 0.
        other_coordinator: Another host that is node rank 0 and that the endpoint leads to.
        at_store: Whether the nodes exchange messages over the job's store, not at the endpoint.
    """

    nnodes: Annotated[int, Strict(), Field(ge=1, le=MOST_NODES)]
    backend: Backend
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
        """Check that the parts are consistent.

        Raises:
            ValueError: A report is from a node that did not join or is beyond the number of nodes.
        """
        # Checked as a whole, so that no later look-up in them can fail.
        if 0 not in self.nodes or any(rank != node.node_rank for rank, node in self.nodes.items()):
            raise ValueError("node rank 0 is missing, or a node has two ranks")
        require_ranks([*self.nodes, *self.names, *self.peers, *self.garbled], self.nnodes)
        if (
            self.reports.keys() | self.all_reduce.said.keys() | {*self.all_reduce.late}
        ) - self.nodes.keys():
            raise ValueError("a report is from a node that did not join")

    def plan(self) -> dict[int, list[int]]:
        """Return which nodes each node had to dial, by node rank."""
        contacts = tuple(node.contact() for node in self.nodes.values())
        return make_plan(contacts, nnodes=self.nnodes, seed=self.seed)

    def is_translated(self) -> bool:
        """Return whether nodes reach node rank 0 at an address that none of its interfaces has."""
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
        """Return announced addresses that several hosts have, with the node ranks of all of them."""
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
        """Return nodes that joined and were lost at once, with the node that has the same address."""
        # Packets to such an address reach either of the two hosts.
        return {
            rank: node.node_rank
            for rank, peer in self.peers.items()
            if rank not in self.nodes
            for node in self.nodes.values()
            if node.announced.address == peer.address and node.hostname != peer.hostname
        }

    def connections(self) -> dict[Way, Dialled]:
        """Return every direction between two hosts that both reported."""
        outcomes = {}
        for source, report in self.reports.items():
            for dialled in report.dialled:
                target = dialled.target
                if target not in self.reports or target == source:
                    continue
                # The target reports the call, so it was slow and no other program answered for it.
                is_late = dialled.reason == "silent" and source in self.reports[target].heard
                outcomes[source, target] = (
                    dialled._replace(result="open", reason="late") if is_late else dialled
                )
        if not self.only_closed:
            return outcomes
        opened = {
            (source, target): Dialled(target, "open")
            for source, targets in self.plan().items()
            for target in targets
            if {source, target} <= self.reports.keys()
        }
        return {**opened, **outcomes}

    def hostnames(self, node_ranks: Iterable[int]) -> tuple[str, ...]:
        """Return the names of nodes, in the order of their ranks."""
        return tuple(self.name_of(node) for node in sorted(set(node_ranks)))

    def name_of(self, node_rank: int) -> str:
        """Return the host name of a node, or "node rank N" if it is unknown."""
        return self._known_name(node_rank) or f"node rank {node_rank}"

    def label(self, node_rank: int) -> str:
        """Return the name of a node with its rank."""
        name = self._known_name(node_rank)
        return f"{name} (node rank {node_rank})" if name else f"node rank {node_rank}"

    def _known_name(self, node_rank: int) -> str:
        node = self.nodes.get(node_rank)
        if node is not None:
            return node.hostname
        peer = self.peers.get(node_rank)
        return peer.hostname if peer is not None else self.names.get(node_rank, "")


def make_plan(contacts: Iterable[Contact], *, nnodes: int, seed: int) -> dict[int, list[int]]:
    """Return which nodes each joined node dials; the result is the same on every node."""
    networks = {contact.node_rank: contact.network for contact in contacts}
    by_rank = [networks.get(rank, "") for rank in range(nnodes)]
    plan = plan_targets(by_rank, seed=seed)
    return {rank: plan[rank] for rank in networks}


def pack(results: Results) -> str:
    """Return results as a message."""
    # It goes to every node, and what similar hosts report compresses well.
    text = json.dumps(write(results), separators=(",", ":"), default=str)
    return base64.b64encode(zlib.compress(text.encode())).decode()


def unpack(packed: str) -> Results:
    """Read results.

    Raises:
        ValueError: They are not valid results.
    """
    try:
        unzip = zlib.decompressobj()
        text = unzip.decompress(base64.b64decode(packed), _LONGEST_BYTES)
        return from_json(Results, json.loads(text))
    except (zlib.error, binascii.Error, RecursionError) as exc:
        raise ValueError("these are not results") from exc


def as_details(dialled: Mapping[Way, Dialled]) -> list[dict[str, Json]]:
    """Return directions as the details of a finding."""
    return [
        {"source": source, "target": target, "result": outcome.result, "said": outcome.said}
        for (source, target), outcome in sorted(dialled.items())
    ]


def is_closed(result: DialResult) -> bool:
    """Return whether the result means that the connection never opened."""
    return result in ("dropped", "refused", "no-route")
