"""Blocked connections between hosts are reported by pair, direction and cause; healthy ones are not."""

from __future__ import annotations

import itertools
import sys

import pytest
from hosts import Network, names_as_debian, names_of_all
from mesh_kit import (
    PROGRAM,
    MakeHosts,
    agree,
    examine,
    healthy_node,
    read_one,
    start_one,
    wait_for_line,
)

from ddpsafe._job.channel import from_json
from ddpsafe.doctor._mesh.findings.differences import check_facts
from ddpsafe.doctor._mesh.findings.observations import Results
from ddpsafe.doctor._mesh.protocol import Dialled, Facts, NodeReport

PORT = 29500

pytestmark = pytest.mark.root


def all_directions(count: int) -> set[tuple[int, int]]:
    """Return every direction between this many hosts."""
    return set(itertools.permutations(range(count), 2))


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "limit_s"), [(2, 5), (4, 5), pytest.param(16, 10, marks=pytest.mark.soak)]
)
def test_healthy_hosts_have_no_findings(make_hosts: MakeHosts, size: int, limit_s: float) -> None:
    """With any number of hosts, and without a default route."""
    report = agree(examine(make_hosts(size), timeout_s=20), within_s=limit_s)
    assert report.codes() == []
    assert report.codes("ok") == ["DS-MESH-030", "DS-MESH-051"]
    assert report.ways("open") == all_directions(size)


def test_hosts_without_ipv6_have_no_findings(make_hosts: MakeHosts) -> None:
    """A disabled IPv6 is not reported."""
    network = make_hosts(2)
    for host in network:
        host.shell("echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")
    assert agree(examine(network)).codes() == []


def test_hosts_with_only_ipv6_are_examined_too(make_hosts: MakeHosts) -> None:
    """Addresses, ports and firewall rules are then those of IPv6."""

    def names(network: Network, _: int) -> str:
        return "\n".join(f"fd00:77::{each + 1} {name}" for each, name in enumerate(network.names))

    network = make_hosts(3, hosts_file=names)
    for host in network:
        host.shell(f"""
            ip addr flush dev eth0 scope global
            ip -6 addr add fd00:77::{host.index + 1}/64 dev eth0 nodad
        """)
    network[1].firewall(f"ip6 saddr fd00:77::3 ct state new tcp dport != {PORT} reject")
    report = agree(examine(network, endpoint=f"[fd00:77::1]:{PORT}"))
    assert report.ways("refused") == {(2, 1)}
    assert "ip6 saddr fd00:77::/64 tcp dport" in report.only("DS-MESH-032")["fix"]


def test_hosts_with_a_broken_default_route_have_no_findings(make_hosts: MakeHosts) -> None:
    """A route that no packet of the job takes is not reported."""
    assert agree(examine(make_hosts(2, routed=True))).codes() == []


@pytest.mark.full(but=["drop-dropped"])
@pytest.mark.parametrize(
    ("otherwise", "result"),
    [
        ("drop", "dropped"),
        ("reset", "refused"),
        ("port-unreachable", "refused"),
        ("prohibited", "no-route"),
        ("host-unreachable", "no-route"),
    ],
)
def test_an_endpoint_that_is_the_only_open_port_is_one_finding(
    make_hosts: MakeHosts, otherwise: str, result: str
) -> None:
    """If only MASTER_PORT is open, gloo hangs for five times its timeout and names no host."""
    network = make_hosts(2)
    for host in network:
        host.open_only(PORT, otherwise=otherwise)
    report = agree(examine(network), within_s=5)
    assert report.ways(result) == all_directions(2)
    finding = report.only("DS-MESH-036")
    assert "No host can open a connection" in finding["fact"]
    assert "firewall" in finding["cause"] or str(PORT) in finding["cause"]
    assert "tcp dport 32768-60999 accept    # on h1" in finding["fix"]


@pytest.mark.full(but=["drop-DS-MESH-031-dropped"])
@pytest.mark.parametrize(
    ("how", "code", "result"),
    [
        ("drop", "DS-MESH-031", "dropped"),
        ("reset", "DS-MESH-032", "refused"),
        ("prohibited", "DS-MESH-033", "no-route"),
    ],
)
def test_one_blocked_direction_among_four_hosts_is_named(
    make_hosts: MakeHosts, how: str, code: str, result: str
) -> None:
    """With gloo, detection would depend on which of the two has the greater address."""
    network = make_hosts(4)
    network[1].refuse_from(network[2], how=how)
    report = agree(examine(network), within_s=5)
    finding = report.only(code)
    assert finding["hosts"] == ["h1", "h2"]
    assert "h2 (node rank 2) cannot open a connection to h1 (node rank 1)" in finding["fact"]
    assert "the other direction works" in finding["fact"]
    assert report.ways(result) == {(2, 1)}
    assert report.ways("open") == all_directions(4) - {(2, 1)}


def test_copied_rule_repairs_the_connection(make_hosts: MakeHosts) -> None:
    """The lines of the finding, pasted on the hosts they name, open the connection."""
    network = make_hosts(2)
    for host in network:
        host.open_only(PORT, otherwise="reset")
    fix = agree(examine(network)).one("DS-MESH-036")["fix"]
    lines = [line for line in fix.splitlines() if line.startswith("    ")]
    assert len(lines) == 2
    for line in lines:
        (host,) = [each for each in network if line.endswith(f"# on {each.name}")]
        host.shell(line)
    assert agree(examine(network)).codes() == []


@pytest.mark.full(but=["accept_everything"])
@pytest.mark.parametrize("program", ["accept_everything", "listen_and_close"])
def test_proxy_that_answers_for_a_host_is_found(make_hosts: MakeHosts, program: str) -> None:
    """A transparent proxy accepts every connection; only the nonce reveals it."""
    network = make_hosts(3)
    proxy = network[1].start([sys.executable, PROGRAM, program, "9999"])
    wait_for_line(proxy, "listening")
    network[1].shell("""
        nft add table ip proxy
        nft 'add chain ip proxy in { type nat hook prerouting priority -100; }'
        nft add rule ip proxy in tcp dport != 29500 redirect to :9999
    """)
    report = agree(examine(network), within_s=5)
    assert report.ways("wrong-peer") == {(0, 1), (2, 1)}
    assert report.ways("open") == all_directions(3) - {(0, 1), (2, 1)}
    assert "No host can reach the doctor ON h1" in report.only("DS-MESH-034")["fact"]


def test_lost_large_packets_are_found(make_hosts: MakeHosts) -> None:
    """Connections open and small messages pass, but full-size packets vanish without ICMP."""
    network = make_hosts(3, mtu=9000)
    for host in network:
        # With segmentation offload the switch would pass packets that a wire does not.
        host.shell("ip link set eth0 gso_max_segs 1")
    network.switch.shell(f"ip link set {network[2].port('eth0')} mtu 1500")
    report = agree(examine(network), within_s=5)
    finding = report.only("DS-MESH-035")
    assert finding["hosts"] == ["h2"]
    assert "in packets of 1500 bytes it passes" in finding["fact"]
    assert "ip link set dev eth0 mtu 1500    # on h2" in finding["fix"]
    assert report.ways("large-lost") == {(0, 2), (1, 2), (2, 0), (2, 1)}
    assert report.ways("open") == {(0, 1), (1, 0)}


def test_dead_switch_port_is_distinguished_from_a_firewall(make_hosts: MakeHosts) -> None:
    """The carrier stays and packets vanish, as with a firewall, but ARP gets no answer either."""
    network = make_hosts(3, nics={"eth0": "10.77.0", "ib0": "10.88.0"})
    network[2].cut_off("ib0")
    report = agree(examine(network, env={"GLOO_SOCKET_IFNAME": "ib0"}), within_s=5)
    finding = report.only("DS-MESH-033")
    assert finding["hosts"] == ["h2"]
    assert "answer ARP" in finding["cause"]
    assert "ip neigh show 10.88.0.3    # on h0" in finding["fix"]
    assert report.ways("open") == {(0, 1), (1, 0)}


def test_unplugged_host_is_distinguished_from_a_firewall(make_hosts: MakeHosts) -> None:
    """A host that does not answer ARP is not one whose firewall drops packets."""
    network = make_hosts(3, nics={"eth0": "10.77.0", "ib0": "10.88.0"})
    network[2].unplug("ib0")
    report = agree(examine(network, env={"GLOO_SOCKET_IFNAME": "ib0"}), within_s=5)
    assert report.only("DS-MESH-022")["hosts"] == ["h2"]
    assert "ib0" in report.one("DS-MESH-022")["fact"]
    assert report.ways("open") == {(0, 1), (1, 0)}


# Addresses and interfaces.


TWO_CARDS = {"eth0": "10.77.0", "ib0": "10.88.0"}


@pytest.mark.full(but=["{'env': {'GLOO_SOCKET_IFNAME': 'eth0'}}", "{'backend': 'nccl'}"])
@pytest.mark.parametrize(
    "asked",
    [
        {"env": {"GLOO_SOCKET_IFNAME": "eth0"}},
        {"local": {"env": {"GLOO_SOCKET_IFNAME": "eth0"}}},
        {"interface": "auto"},
        {"interface": "eth0"},
        {"backend": "nccl"},
    ],
    ids=str,
)
def test_chosen_interface_is_tried(make_hosts: MakeHosts, asked: dict[str, object]) -> None:
    """With an interface, or with NCCL, which does not resolve the hostname, 127.0.1.1 is harmless."""
    report = agree(examine(make_hosts(2, hosts_file=names_as_debian), **asked))
    assert report.codes() == []
    assert report.matrix["addresses"] == ["10.77.0.1", "10.77.0.2"]


def test_hostname_without_an_address_is_found(make_hosts: MakeHosts) -> None:
    """In that case gloo falls back to loopback, with a warning that is easily missed."""

    def without_own(network: Network, index: int) -> str:
        lines = names_of_all(network, index).splitlines(keepends=True)
        return "".join(line for line in lines if not line.endswith(f" h{index}\n") or index == 0)

    report = agree(examine(make_hosts(2, hosts_file=without_own)))
    assert report.only("DS-MESH-020")["hosts"] == ["h1"]
    assert "does not resolve" in report.one("DS-MESH-020")["cause"]


@pytest.mark.full(but=["{'env': {'GLOO_SOCKET_IFNAME': 'ib0'}}"])
@pytest.mark.parametrize(
    "asked",
    [
        {"env": {"GLOO_SOCKET_IFNAME": "ib0"}},
        {"env": {"NCCL_SOCKET_IFNAME": "=ib0"}, "backend": "nccl"},
        {"interface": "ib0"},
    ],
    ids=str,
)
def test_missing_interface_is_reported_with_those_that_exist(
    make_hosts: MakeHosts, asked: dict[str, object]
) -> None:
    """The host without the card is named instead of its pairs, and the line to copy works on all hosts."""
    network = make_hosts(3, nics=TWO_CARDS, without={"ib0": [2]})
    report = agree(examine(network, **asked), within_s=5)
    finding = report.only("DS-MESH-021")
    assert finding["hosts"] == ["h2"]
    assert "ib0" in finding["fact"]
    assert "it has eth0 (10.77.0.3)" in finding["fact"]
    line = "NCCL_SOCKET_IFNAME='=eth0'" if asked.get("backend") else "GLOO_SOCKET_IFNAME=eth0"
    assert f"export {line}    # on every host" in finding["fix"]
    assert report.ways("open") >= {(0, 1), (1, 0)}


def test_card_that_only_some_hosts_have_is_reported_with_nccl(make_hosts: MakeHosts) -> None:
    """NCCL prefers ib0; the host without it announces another network."""
    network = make_hosts(3, nics=TWO_CARDS, without={"ib0": [2]})
    report = agree(examine(network, backend="nccl"))
    finding = report.only("DS-MESH-023")
    assert finding["hosts"] == ["h2"]
    assert "h2 (node rank 2) 10.77.0.3 on eth0" in finding["fact"]
    assert "export NCCL_SOCKET_IFNAME='=eth0'    # on every host" in finding["fix"]
    assert report.ways("open") >= {(0, 1), (1, 0)}


@pytest.mark.full(but=["lower"])
@pytest.mark.parametrize("subnet", ["10.66.0", "10.88.0"], ids=["lower", "higher"])
def test_hostname_that_leads_to_a_card_of_one_host_only_is_found(
    make_hosts: MakeHosts, subnet: str
) -> None:
    """Whether gloo works depends on which address is greater; the doctor reports it either way."""

    def own_card(network: Network, index: int) -> str:
        text = names_of_all(network, index)
        return text.replace("10.77.0.3 h2", f"{subnet}.3 h2") if index == 2 else text

    network = make_hosts(
        3, nics={"eth0": "10.77.0", "own0": subnet}, without={"own0": [0, 1]}, hosts_file=own_card
    )
    report = agree(examine(network))
    finding = report.only("DS-MESH-023")
    assert finding["hosts"] == ["h2"]
    assert "export GLOO_SOCKET_IFNAME=eth0    # on every host" in finding["fix"]
    assert {way for way in report.ways("open") if 2 not in way} == {(0, 1), (1, 0)}


def test_two_nodes_of_one_host_may_use_loopback(make_hosts: MakeHosts) -> None:
    """A trial on one machine has no findings, whatever its hostname resolves to."""
    network = make_hosts(1, hosts_file=names_as_debian)
    asked = {"nnodes": 2, "endpoint": "localhost:29500", "timeout_s": 10}
    started = [start_one(network[0], network, **{**asked, "node_rank": rank}) for rank in (0, 1)]
    report = agree([read_one(each) for each in started])
    assert report.codes() == []


# Facts that differ between hosts.


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
    assert report.only("DS-MESH-046")["severity"] == "warning"
    assert "h1" in report.one("DS-MESH-046")["hosts"]
    assert report.ways("open") == {(0, 1), (1, 0)}


def test_different_mtus_are_a_warning(make_hosts: MakeHosts) -> None:
    """TCP copes with 9000 on one end and 1500 on the other, so connections are open."""
    network = make_hosts(3, mtu=9000)
    network[2].shell("ip link set eth0 mtu 1500")
    report = agree(examine(network))
    assert report.only("DS-MESH-042")["hosts"] == ["h2"]
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
