"""Blocked connections between hosts are reported by pair, direction and cause; healthy ones are not."""

from __future__ import annotations

import itertools
import sys

import pytest
from hosts import Network
from mesh_kit import (
    PROGRAM,
    MakeHosts,
    agree,
    examine,
    wait_for_line,
)

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
    assert report.codes() == ["DS-MESH-032"]
    assert report.ways("refused") == {(2, 1)}
    assert "ip6 saddr fd00:77::/64 tcp dport" in report.one("DS-MESH-032")["fix"]


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
    assert report.codes() == ["DS-MESH-036"]
    assert report.ways(result) == all_directions(2)
    finding = report.one("DS-MESH-036")
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
    assert report.codes() == ["DS-MESH-034"]
    assert report.ways("wrong-peer") == {(0, 1), (2, 1)}
    assert report.ways("open") == all_directions(3) - {(0, 1), (2, 1)}
    assert "No host can reach the doctor ON h1" in report.one("DS-MESH-034")["fact"]


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
    assert report.codes() == ["DS-MESH-022"]
    assert report.one("DS-MESH-022")["hosts"] == ["h2"]
    assert "ib0" in report.one("DS-MESH-022")["fact"]
    assert report.ways("open") == {(0, 1), (1, 0)}
