"""Every finding of the mesh has a page, and the page shows the doctor's current output; the picture of a matrix."""

from __future__ import annotations

import ipaddress
import itertools
import socket
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import pytest
from browser import Browser
from mesh_kit import healthy_node as node

from ddpsafe._host import Interface
from ddpsafe.doctor import Direction, Finding, Matrix, Report
from ddpsafe.doctor._findings import DialResult, to_copy
from ddpsafe.doctor._mesh.findings import attendance
from ddpsafe.doctor._mesh.findings.assemble import make_findings
from ddpsafe.doctor._mesh.findings.attendance import (
    cannot_serve,
    coordinator_lost,
    describe_obstacle,
    garbled,
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


def hosts(*ranks: int) -> dict[int, Node]:
    """Return healthy hosts."""
    return {rank: node(rank) for rank in ranks}


def results(
    ways: Mapping[tuple[int, int], Dialled] | None = None, size: int = 3, **changed: Any
) -> Callable[[], list[Finding]]:
    """Return a function that makes the findings of hosts that all reach each other but for `ways`."""
    nodes: Mapping[int, Node] = changed.pop("nodes", hosts(*range(size)))
    told: Mapping[int, dict[str, Any]] = changed.pop("told", {})

    def dialled(here: int) -> tuple[Dialled, ...]:
        others = (there for there in nodes if there != here)
        return tuple((ways or {}).get((here, there), Dialled(there, "open")) for there in others)

    reports = {
        rank: NodeReport(dialled=dialled(rank), **{"chains_known": True, **told.get(rank, {})})
        for rank in nodes
    }
    known = {"nnodes": size, "backend": "gloo", "host": "h0", "port": 29400, "waited_s": 60.0}
    found = Results(**{**known, "nodes": nodes, "reports": reports, **changed})
    return lambda: make_findings(found)


def obstacle(trouble: Any, **changed: Any) -> Callable[[], list[Finding]]:
    """Return a function that makes the findings of a node that did not reach node rank 0."""
    known = {"said": "", "addresses": ("10.77.0.1",), "waited_s": 60.0, **changed}
    found = Obstacle(trouble=trouble, **known)
    return lambda: [describe_obstacle(found, host="h0", port=29400, node_rank=1, nnodes=4)]


def dropped() -> dict[tuple[int, int], Dialled]:
    """Return three hosts between which all packets are dropped."""
    return {
        (here, there): Dialled(there, "dropped")
        for here, there in itertools.permutations(range(3), 2)
    }


def greeting_of(rank: int, nnodes: int) -> Greeting:
    """Return the greeting of another node."""
    return Greeting(version=3, nnodes=nnodes, node_rank=rank, hostname="h2", pid=311, job="")


def announcing(rank: int, **announced: Any) -> Node:
    """Return a node whose library announces something else."""
    known = {"address": f"10.77.0.{rank + 1}", "interface": "eth0", "chosen_by": "the host's name"}
    return node(rank, announced=Announced(**{**known, **announced}))


def with_facts(name: str, *facts: Any) -> dict[int, Node]:
    """Return nodes of which each has its own value of a fact."""
    return {rank: node(rank, facts=Facts(**{name: each})) for rank, each in enumerate(facts)}


INPUT: Final = {"chains": (FilterChain("inet", "filter", "input"),)}
BOTH: Final = {
    rank: {"eth0": {f"fd00:77::{rank + 1}": "fd00:77::/64", f"10.77.0.{rank + 1}": "10.77.0.0/24"}}
    for rank in range(3)
}
TORCH: Final = {"ddpsafe": "0.1.0", "torch": "2.13.0+cpu"}

ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}

ACTIVE: Final = dict.fromkeys(("mlx5_0:1", "mlx5_1:1"), "ACTIVE InfiniBand 400 Gb/sec (4X NDR)")

# fmt: off
PRINTED: Final[dict[str, Callable[[], list[Finding]]]] = {
    "DS-MESH-001": results(size=4, nodes=hosts(0, 1, 3)),
    "DS-MESH-002": results(size=4, nodes=hosts(0, 1, 3), rejected=(
        Rejected(reason="duplicate", greeting=greeting_of(1, 4), holder="h1", holder_pid=207),)),
    "DS-MESH-003": obstacle("other-program", said="it sent nothing for 5.0 s"),
    "DS-MESH-004": obstacle("dropped", said="no answer within 3.0 s"),
    "DS-MESH-005": obstacle("refused"),
    "DS-MESH-006": obstacle("no-route", said="ENETUNREACH"),
    "DS-MESH-007": obstacle("unresolved", said="Name or service not known", addresses=()),
    "DS-MESH-008": obstacle("loopback", addresses=("127.0.1.1",)),
    "DS-MESH-009": lambda: [cannot_serve(
        OSError(98, "Address already in use"), port=29400, owner="; python (pid 207) on h0 uses it")],
    "DS-MESH-010": results(reports={rank: NodeReport(dialled=(Dialled(1 - rank, "open"),)) for rank in (0, 1)}),
    "DS-MESH-011": lambda: [coordinator_lost("h0", "it closed the connection", at_store=False)],
    "DS-MESH-012": obstacle("late"),
    "DS-MESH-013": results(size=2, rejected=(Rejected(reason="other-job", greeting=greeting_of(1, 3)),)),
    "DS-MESH-014": lambda: [garbled("h0 (node rank 0)", "a number is out of range", ("h0",))],
    "DS-MESH-015": obstacle("secret"),
    "DS-MESH-020": results(nodes=hosts(0, 1) | {2: announcing(2, flaw="loopback", wanted="127.0.1.1")}),
    "DS-MESH-021": results(nodes=hosts(0, 1) | {2: announcing(
        2, flaw="absent-interface", wanted="ib7", variable="GLOO_SOCKET_IFNAME",
        chosen_by="GLOO_SOCKET_IFNAME=ib7", otherwise="10.77.0.3")}),
    "DS-MESH-024": results({(1, 2): Dialled(2, "refused", error="ECONNREFUSED")}, nodes=hosts(0, 1) | {
        2: node(2, announced=node(1).announced, interfaces={"eth0": {"10.77.0.2": "10.77.0.0/24"}})}),
    "DS-MESH-027": results(dropped(), nodes={rank: node(
        rank, interfaces=BOTH[rank], endpoint="10.77.0.1",
        announced=Announced(address=f"fd00:77::{rank + 1}", interface="eth0", chosen_by="the host's name"))
        for rank in range(3)}),
    "DS-MESH-031": results({(0, 1): Dialled(1, "dropped"), (2, 1): Dialled(1, "dropped")}, told={1: INPUT}),
    "DS-MESH-032": results({(2, 1): Dialled(1, "refused", error="ECONNREFUSED")}, told={1: INPUT}),
    "DS-MESH-033": results({way: Dialled(way[1], "no-route", reason="no-arp", error="EHOSTUNREACH") for way in ((0, 2), (2, 0))}),
    "DS-MESH-036": results(dropped()),
    "DS-MESH-038": results({(2, 1): Dialled(1, "dropped"), (1, 2): Dialled(2, "dropped")},
                           told={2: {"routes": (Route(1, "eth1", "10.77.0.2/32"),)}}),
    "DS-MESH-039": results({(here, 2): Dialled(2, "open", path_mtu_bytes=1400) for here in (0, 1)}),
    "DS-MESH-040": results(nodes=with_facts("versions", TORCH, TORCH, {**TORCH, "torch": "2.12.0+cpu"})),
    "DS-MESH-041": results(nodes=with_facts("env", ONE_THREAD, ONE_THREAD, {**ONE_THREAD, "NCCL_DEBUG": "INFO"})),
    "DS-MESH-047": results(backend="nccl", nodes=with_facts("infiniband", ACTIVE, ACTIVE, {**ACTIVE, "mlx5_0:1": "DOWN"})),
    "DS-MESH-050": results(all_reduce=AllReduce(said={0: Reduced(error="RuntimeError: Connection reset by peer")})),
}
# fmt: on
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


def page(count: int, closed: dict[tuple[int, int], DialResult]) -> str:
    """Return the page of a matrix in which some directions are closed."""
    directions = tuple(
        Direction(source=a, target=b, result=closed.get((a, b), "open"), latency_s=0.0002)
        for a, b in permutations(range(count), 2)
    )
    names = tuple(f"gpu-<{node:02d}>" for node in range(count))
    matrix = Matrix(hostnames=names, addresses=("",) * count, directions=directions)
    return Report(findings=(), hostname="gpu", matrix=matrix).to_html()


def cells(text: str) -> dict[str, tuple[int, int, str]]:
    """Return the cells by their tooltips: column, row and letter."""
    table = ET.fromstring(text[text.index("<table") : text.index("</table>") + len("</table>")])
    return {
        title: (column, row, cell.text or "")
        for row, line in enumerate(table.iter("tr"))
        for column, cell in enumerate(line.iter("td"))
        if (title := cell.get("title"))
    }


def test_closed_direction_is_in_the_row_of_the_host_that_dials() -> None:
    """Only one of a pair's two directions may be closed."""
    found = cells(page(3, {(2, 0): "dropped"}))
    assert len(found) == 6
    (closed,) = [each for title, each in found.items() if "dropped" in title]
    (other,) = [each for title, each in found.items() if title.startswith("gpu-<00> → gpu-<02>")]
    assert closed[2] == "D"
    assert (other[2], closed[0] < other[0], closed[1] > other[1]) == ("", True, True)


def test_hosts_without_a_known_direction_are_left_out() -> None:
    """Of a thousand hosts, the reports have only closed directions."""
    direction = Direction(source=700, target=3, result="dropped")
    names = tuple(f"gpu-{node}" for node in range(1000))
    matrix = Matrix(hostnames=names, addresses=("",) * 1000, directions=(direction,))
    text = Report(findings=(), hostname="gpu", matrix=matrix).to_html()
    assert [*cells(text).values()] == [(0, 2, "D")]
    assert text.count("<th>") == 5


def test_legend_explains_only_results_that_occur() -> None:
    """The six other results would be noise."""
    text = page(2, {(0, 1): "large-lost"})
    assert "an MTU black hole" in text
    assert "a proxy" not in text


def a_report(count: int) -> Report:
    """Return a report with a matrix, a finding with lines to paste, and a long name."""
    directions = tuple(
        Direction(
            source=a,
            target=b,
            result="dropped" if b == 1 else "large-lost" if a == 0 else "open",
            latency_s=0.0002,
        )
        for a, b in permutations(range(count), 2)
    )
    names = tuple(f"gpu-{node:02d}.rack-7.cluster.example.org" for node in range(count))
    matrix = Matrix(hostnames=names, addresses=("",) * count, directions=directions)
    closed = Finding(
        code="DS-MESH-031",
        severity="failed",
        fact=f"No host can open a connection TO {names[1]}: dropped (no answer).",
        cause="the packet filter of the host drops what is not on its list.",
        fix=to_copy(
            "Let the packets of the job through, as root:",
            f"nft insert rule inet filter input ip saddr 10.77.0.0/24 tcp dport 32768-60999 accept    # on {names[1]}",
        ),
        hosts=names[1:2],
    )
    well = Finding(code="DS-ENV-001", severity="ok", fact="No launcher's variables are set.")
    return Report(findings=(closed, well), hostname="gpu-00", matrix=matrix, took_s=3.1)


@pytest.mark.full(but=["3-light"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("count", [3, 64])
def test_page_is_readable_in_a_browser(tmp_path: Path, count: int, *, dark: bool) -> None:
    """Nothing is cut off, all text contrasts with its background, and the browser blocks nothing."""
    file = tmp_path / "report.html"
    file.write_text(a_report(count).to_html(), encoding="utf-8")
    with Browser() as browser:
        page = browser.open(file, width=1000, dark=dark)
        assert page.overflow() == []
        assert page.poor_contrast() == []
        assert page.complaints() == []
        assert "No host can open a connection TO gpu-01" in page.text()
        assert page.screenshot(tmp_path / "page.png").stat().st_size > 10_000
