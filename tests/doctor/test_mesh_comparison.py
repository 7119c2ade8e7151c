"""Differences between hosts are reported with the host that differs; harmless ones are not."""

from __future__ import annotations

import pytest
from mesh_kit import MakeHosts, agree, examine, healthy_node

from ddpsafe._job.channel import from_json
from ddpsafe.doctor._mesh.findings.differences import check_facts
from ddpsafe.doctor._mesh.findings.observations import Results
from ddpsafe.doctor._mesh.protocol import Dialled, Facts, NodeReport

pytestmark = pytest.mark.root

FACTS = {
    "versions": {"torch": "2.13.0", "python": "3.11.7"},
    "env": {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "0", "NCCL_SOCKET_IFNAME": "eth0"},
    "driver": "550.54.14",
    "data_paths": {"train": {"state": "directory", "entries": 10}},
    "config": {"backend": "gloo"},
}


def test_differences_are_reported_with_the_host_that_differs(make_hosts: MakeHosts) -> None:
    """One host has another torch, driver, variable and backend, and an empty data folder."""
    odd = {
        "versions": {"torch": "2.12.1", "python": "3.11.7"},
        "env": {"NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "1", "NCCL_SOCKET_IFNAME": "eth1"},
        "driver": "535.1",
        "data_paths": {"train": {"state": "directory", "entries": 0}},
        "config": {"backend": "nccl"},
    }
    report = agree(examine(make_hosts(3), local=FACTS, each={1: {"local": odd}}), within_s=5)
    assert report.codes() == ["DS-MESH-040", "DS-MESH-041", "DS-MESH-044", "DS-MESH-045"]
    versions = report.one("DS-MESH-040")
    assert versions["severity"] == "failed"
    assert versions["hosts"] == ["h1"]
    assert "torch is 2.13.0, h1 has 2.12.1" in versions["fact"]
    assert "pip install torch==2.13.0" in versions["fix"]
    assert versions["details"]["table"] == {
        "torch": {"usual": "2.13.0", "odd": {"h1": "2.12.1"}},
        "driver": {"usual": "550.54.14", "odd": {"h1": "535.1"}},
    }
    assert report.one("DS-MESH-041")["details"]["table"] == {
        "NCCL_DEBUG": {"usual": "WARN", "odd": {"h1": "INFO"}}
    }
    assert report.one("DS-MESH-044")["hosts"] == ["h1"]
    assert report.one("DS-MESH-045")["hosts"] == ["h1"]
    assert report.ways("open") == {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}


def test_equal_hosts_have_no_findings(make_hosts: MakeHosts) -> None:
    """Equal facts are not reported, nor are those that naturally differ between hosts."""
    own = {**FACTS, "hostname": "h1", "env": {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "3"}}
    assert agree(examine(make_hosts(2), local=FACTS, each={1: {"local": own}})).codes() == []


def test_silent_name_server_is_found_where_everything_else_works(make_hosts: MakeHosts) -> None:
    """The store of torch resolves each client's address: 10 to 20 s on every start, without an error."""
    network = make_hosts(2, name_server="10.77.0.1")
    network[0].firewall("udp dport 53 drop")
    report = agree(examine(network), within_s=5)
    assert report.codes() == ["DS-MESH-046"]
    assert report.one("DS-MESH-046")["severity"] == "warning"
    assert "h1" in report.one("DS-MESH-046")["hosts"]
    assert report.ways("open") == {(0, 1), (1, 0)}


def test_different_mtus_are_a_warning(make_hosts: MakeHosts) -> None:
    """TCP copes with 9000 on one end and 1500 on the other, so connections are open."""
    network = make_hosts(3, mtu=9000)
    network[2].shell("ip link set eth0 mtu 1500")
    report = agree(examine(network))
    assert report.codes() == ["DS-MESH-042"]
    assert report.one("DS-MESH-042")["hosts"] == ["h2"]
    assert report.ways("open") == {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)}


def test_a_path_that_carries_less_than_the_interfaces_is_a_warning(make_hosts: MakeHosts) -> None:
    """A router on the way says so, TCP adapts, and nothing else would show it."""
    network = make_hosts(3)
    port = network[2].port("eth0")
    network.switch.shell(f"""
        ip link set {port} nomaster
        echo 1 > /proc/sys/net/ipv4/ip_forward
        echo 1 > /proc/sys/net/ipv4/conf/br-eth0/proxy_arp
        echo 1 > /proc/sys/net/ipv4/conf/{port}/proxy_arp
        ip addr add 10.77.0.254/32 dev br-eth0
        ip route add 10.77.0.0/24 dev br-eth0 mtu lock 1400
        ip route add {network[2].address()} dev {port} mtu lock 1400
    """)
    report = agree(examine(network), within_s=5)
    # A direction in which the answer came too late was not measured.
    assert set(report.codes("warning")) == set(report.codes()) == {"DS-MESH-039"}
    for finding in report.findings:
        assert finding["code"] != "DS-MESH-039" or "more than 1400 bytes" in finding["fact"]
    assert report.ways("open") == {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)}


ACTIVE = {"infiniband": {"mlx5_0:1": "ACTIVE InfiniBand 400 Gb/sec (4X NDR)"}}
DOWN = {"infiniband": {"mlx5_0:1": "DOWN"}}


@pytest.mark.parametrize(
    ("backend", "odd", "severity"),
    [("nccl", DOWN, "failed"), ("nccl", {}, "failed"), ("gloo", DOWN, "warning")],
)
def test_infiniband_ports_that_differ_are_reported(
    backend: str, odd: dict[str, object], severity: str
) -> None:
    """NCCL of a host without an active port uses TCP, and does not meet the others."""
    nodes = {
        rank: healthy_node(rank, facts=from_json(Facts, odd if rank == 1 else ACTIVE))
        for rank in (0, 1, 2)
    }
    reports = {
        rank: NodeReport(dialled=tuple(Dialled(other, "open") for other in nodes if other != rank))
        for rank in nodes
    }
    results = Results(
        nnodes=3, backend=backend, host="h0", port=29400, nodes=nodes, reports=reports
    )
    (finding,) = check_facts(results)
    assert (finding.code, finding.severity, finding.hosts) == ("DS-MESH-047", severity, ("h1",))
    assert "ibstat mlx5_0 1" in finding.fix


def test_a_clock_that_is_off_is_reported(make_hosts: MakeHosts) -> None:
    """Logs and file times of that host would not compare; nothing else breaks."""
    report = agree(examine(make_hosts(3), each={1: {"clock_ahead_s": 600}}))
    clocks = report.only("DS-MESH-043")
    assert (clocks["severity"], clocks["hosts"]) == ("warning", ["h1"])
    assert "by +600 s" in clocks["fact"]
