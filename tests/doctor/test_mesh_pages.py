"""Every finding of the mesh has a page, and the page shows the doctor's current output."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from mesh_kit import healthy_node as node

from ddpsafe._host import Interface
from ddpsafe.doctor import Finding
from ddpsafe.doctor._mesh.findings import attendance
from ddpsafe.doctor._mesh.findings.assemble import make_findings
from ddpsafe.doctor._mesh.findings.attendance import (
    cannot_serve,
    coordinator_garbled,
    coordinator_lost,
    describe_obstacle,
)
from ddpsafe.doctor._mesh.findings.observations import AllReduce, Results
from ddpsafe.doctor._mesh.protocol import (
    Announced,
    Dialled,
    Facts,
    FilterChain,
    Greeting,
    Node,
    NodeReport,
    Reduced,
    Rejected,
    Route,
)
from ddpsafe.doctor._mesh.reach_node_zero import Obstacle

PAGES: Final = Path(__file__).parents[2] / "docs" / "findings"


def results_of(ways: Mapping[tuple[int, int], Dialled], size: int = 3, **changed: Any) -> Results:
    """Return the results of hosts that all reach each other, except for some directions."""
    nodes: Mapping[int, Node] = changed.pop("nodes", {rank: node(rank) for rank in range(size)})
    told: Mapping[int, dict[str, Any]] = changed.pop("told", {})
    reports = {
        rank: NodeReport(
            dialled=tuple(
                ways.get((rank, other), Dialled(other, "open")) for other in nodes if other != rank
            ),
            **{"chains_known": True, **told.get(rank, {})},
        )
        for rank in nodes
    }
    known = {
        "nnodes": size,
        "backend": "gloo",
        "host": "h0",
        "port": 29400,
        "nodes": nodes,
        "reports": reports,
        "waited_s": 60.0,
        **changed,
    }
    return Results(**known)


def findings_of_obstacle(trouble: Any, **changed: Any) -> Callable[[], list[Finding]]:
    """Return a function that makes the findings of a node that did not reach node rank 0."""
    said = {"dropped": "no answer within 3.0 s", "no-route": "ENETUNREACH"}.get(trouble, "")
    known = {"said": said, "addresses": ("10.77.0.1",), "waited_s": 60.0, **changed}
    obstacle = Obstacle(trouble=trouble, **known)
    return lambda: [describe_obstacle(obstacle, host="h0", port=29400, node_rank=1, nnodes=4)]


def findings_of(results: Results) -> Callable[[], list[Finding]]:
    """Return a function that makes the findings of collected results."""
    return lambda: make_findings(results)


def all_directions(
    dialled: Callable[[int], Dialled], size: int = 3
) -> dict[tuple[int, int], Dialled]:
    """Return the same result for every direction."""
    return {
        (here, there): dialled(there)
        for here in range(size)
        for there in range(size)
        if here != there
    }


def greeting_of(rank: int, nnodes: int, job: str = "") -> Greeting:
    """Return the greeting of another node."""
    return Greeting(version=3, nnodes=nnodes, node_rank=rank, hostname="h2", pid=311, job=job)


def announcing(rank: int, **announced: Any) -> Node:
    """Return a node whose library announces something else."""
    known = {
        "address": f"10.77.0.{rank + 1}",
        "interface": "eth0",
        "chosen_by": "the host's name",
        **announced,
    }
    return node(rank, announced=Announced(**known))


def with_facts(rank: int, **facts: Any) -> Node:
    """Return a node with these facts."""
    return node(rank, facts=Facts(**facts))


INPUT: Final = {"chains": (FilterChain("inet", "filter", "input"),)}
BOTH: Final = {
    rank: {"eth0": {f"fd00:77::{rank + 1}": "fd00:77::/64", f"10.77.0.{rank + 1}": "10.77.0.0/24"}}
    for rank in range(3)
}
TORCH: Final = {"ddpsafe": "0.1.0", "torch": "2.13.0+cpu"}

ACTIVE: Final = dict.fromkeys(("mlx5_0:1", "mlx5_1:1"), "ACTIVE InfiniBand 400 Gb/sec (4X NDR)")

PRINTED: Final[dict[str, Callable[[], list[Finding]]]] = {
    "DS-MESH-001": findings_of(
        results_of({}, size=4, nodes={rank: node(rank) for rank in (0, 1, 3)})
    ),
    "DS-MESH-002": findings_of(
        results_of(
            {},
            size=4,
            nodes={rank: node(rank) for rank in (0, 1, 3)},
            rejected=(
                Rejected(
                    reason="duplicate", greeting=greeting_of(1, 4), holder="h1", holder_pid=207
                ),
            ),
        )
    ),
    "DS-MESH-003": findings_of_obstacle("other-program", said="it sent nothing for 5.0 s"),
    "DS-MESH-004": findings_of_obstacle("dropped"),
    "DS-MESH-005": findings_of_obstacle("refused"),
    "DS-MESH-006": findings_of_obstacle("no-route"),
    "DS-MESH-007": findings_of_obstacle(
        "unresolved", said="Name or service not known", addresses=()
    ),
    "DS-MESH-008": findings_of_obstacle("loopback", addresses=("127.0.1.1",)),
    "DS-MESH-009": lambda: [
        cannot_serve(
            OSError(98, "Address already in use"),
            port=29400,
            owner="; python (pid 207) on h0 uses it",
        )
    ],
    "DS-MESH-010": findings_of(
        results_of(
            {}, reports={rank: NodeReport(dialled=(Dialled(1 - rank, "open"),)) for rank in (0, 1)}
        )
    ),
    "DS-MESH-011": lambda: [coordinator_lost("h0", "it closed the connection", at_store=False)],
    "DS-MESH-012": findings_of_obstacle("late"),
    "DS-MESH-013": findings_of(
        results_of({}, size=2, rejected=(Rejected(reason="other-job", greeting=greeting_of(1, 3)),))
    ),
    "DS-MESH-014": lambda: [coordinator_garbled("h0", "a number is out of range")],
    "DS-MESH-015": findings_of_obstacle("secret"),
    "DS-MESH-020": findings_of(
        results_of(
            {},
            nodes={
                0: node(0),
                1: node(1),
                2: announcing(2, flaw="loopback", wanted="127.0.1.1"),
            },
        )
    ),
    "DS-MESH-021": findings_of(
        results_of(
            {},
            nodes={
                0: node(0),
                1: node(1),
                2: announcing(
                    2,
                    flaw="absent-interface",
                    wanted="ib7",
                    variable="GLOO_SOCKET_IFNAME",
                    chosen_by="GLOO_SOCKET_IFNAME=ib7",
                    otherwise="10.77.0.3",
                ),
            },
        )
    ),
    "DS-MESH-024": findings_of(
        results_of(
            {(1, 2): Dialled(2, "refused", error="ECONNREFUSED")},
            nodes={
                0: node(0),
                1: node(1),
                2: node(
                    2,
                    announced=node(1).announced,
                    interfaces={"eth0": {"10.77.0.2": "10.77.0.0/24"}},
                ),
            },
        )
    ),
    "DS-MESH-027": findings_of(
        results_of(
            {
                (here, there): Dialled(there, "dropped")
                for here in range(3)
                for there in range(3)
                if here != there
            },
            nodes={
                rank: node(
                    rank,
                    announced=Announced(
                        address=f"fd00:77::{rank + 1}",
                        interface="eth0",
                        chosen_by="the host's name",
                    ),
                    interfaces=BOTH[rank],
                    endpoint="10.77.0.1",
                )
                for rank in range(3)
            },
        )
    ),
    "DS-MESH-031": findings_of(
        results_of({(0, 1): Dialled(1, "dropped"), (2, 1): Dialled(1, "dropped")}, told={1: INPUT})
    ),
    "DS-MESH-032": findings_of(
        results_of({(2, 1): Dialled(1, "refused", error="ECONNREFUSED")}, told={1: INPUT})
    ),
    "DS-MESH-033": findings_of(
        results_of(
            {
                (0, 2): Dialled(2, "no-route", reason="no-arp", error="EHOSTUNREACH"),
                (2, 0): Dialled(0, "no-route", reason="no-arp", error="EHOSTUNREACH"),
            }
        )
    ),
    "DS-MESH-036": findings_of(results_of(all_directions(lambda there: Dialled(there, "dropped")))),
    "DS-MESH-038": findings_of(
        results_of(
            {(2, 1): Dialled(1, "dropped"), (1, 2): Dialled(2, "dropped")},
            told={2: {"routes": (Route(1, "eth1", "10.77.0.2/32"),)}},
        )
    ),
    "DS-MESH-039": findings_of(
        results_of(
            {
                (0, 2): Dialled(2, "open", path_mtu_bytes=1400),
                (1, 2): Dialled(2, "open", path_mtu_bytes=1400),
            },
        )
    ),
    "DS-MESH-040": findings_of(
        results_of(
            {},
            nodes={
                0: with_facts(0, versions=TORCH),
                1: with_facts(1, versions=TORCH),
                2: with_facts(2, versions={**TORCH, "torch": "2.12.0+cpu"}),
            },
        )
    ),
    "DS-MESH-041": findings_of(
        results_of(
            {},
            nodes={
                0: with_facts(0, env={"OMP_NUM_THREADS": "1"}),
                1: with_facts(1, env={"OMP_NUM_THREADS": "1"}),
                2: with_facts(2, env={"OMP_NUM_THREADS": "1", "NCCL_DEBUG": "INFO"}),
            },
        )
    ),
    "DS-MESH-047": findings_of(
        results_of(
            {},
            backend="nccl",
            nodes={
                0: with_facts(0, infiniband=ACTIVE),
                1: with_facts(1, infiniband=ACTIVE),
                2: with_facts(2, infiniband={**ACTIVE, "mlx5_0:1": "DOWN"}),
            },
        )
    ),
    "DS-MESH-050": findings_of(
        results_of(
            {},
            all_reduce=AllReduce(said={0: Reduced(error="RuntimeError: Connection reset by peer")}),
        )
    ),
}
"""What makes the findings of each code; test_pasted.py provokes the other codes for real."""


@pytest.mark.parametrize("code", PRINTED)
def test_page_shows_the_output_of_the_doctor(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts, cause and lines to paste: a text cannot change without its page."""
    monkeypatch.setattr(socket, "gethostname", lambda: "h1")
    address = ipaddress.ip_interface("10.77.0.2/24")
    eth0 = Interface(name="eth0", networks=(address,), mtu_bytes=1500, is_running=True)
    monkeypatch.setattr(attendance, "source_address", lambda _: str(address.ip))
    monkeypatch.setattr(attendance, "find_interface_of", lambda _: eth0)
    (found,) = (each for each in PRINTED[code]() if each.severity in ("failed", "warning"))
    assert found.code == code
    block = f"```text\n{found.as_text()}\n```"
    page = (PAGES / f"{code}.md").read_text(encoding="utf-8")
    assert block in page, f"{code}.md has to show:\n{block}"
