"""Missing nodes are named, and causes that keep a node from the endpoint are distinguished."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import scripts
from hosts import Network, names_of_all
from mesh_kit import (
    PROGRAM,
    MakeHosts,
    agree,
    examine,
    read_one,
    require_told_in_time,
    start_one,
    wait_for_line,
)

PORT = 29500

pytestmark = pytest.mark.root


def test_a_missing_node_is_named_and_the_others_are_examined(make_hosts: MakeHosts) -> None:
    """The wait for nodes ends in time, and problems between the others are still found."""
    network = make_hosts(4)
    network[0].refuse_from(network[3])
    slurm = {"SLURM_STEP_NODELIST": "h[0-3]"}
    endpoint = f"{network[0].address()}:{PORT}"
    told = examine(network, hosts=[0, 1, 3], timeout_s=1.5, env=slurm, endpoint=endpoint)
    report = agree(told)
    assert report.codes() == ["DS-MESH-001", "DS-MESH-031"]
    missing = report.one("DS-MESH-001")
    assert missing["details"]["missing_node_ranks"] == [2]
    assert missing["hosts"] == ["h2"]
    assert "h2 (node rank 2)" in missing["fact"]
    assert f"--node-rank 2 --rdzv-endpoint {endpoint}" in missing["fix"]
    assert report.ways("dropped") == {(3, 0)}
    assert report.ways("open") == {(0, 1), (1, 0), (1, 3), (3, 1), (0, 3)}
    require_told_in_time(told, 5)
    assert any("waiting for node rank h2" in line for line in told[1].progress)


def test_a_node_that_dies_during_the_check_is_named(make_hosts: MakeHosts) -> None:
    """The other nodes finish, and its pairs are not blamed."""
    network = make_hosts(3)
    dying = start_one(network[2], network, die_at="trying")
    report = agree(examine(network, hosts=[0, 1]), within_s=5)
    dying.communicate(timeout=scripts.LIMIT_S)
    assert report.only("DS-MESH-010")["hosts"] == ["h2"]
    assert report.ways("open") == {(0, 1), (1, 0)}


def test_a_host_that_loses_power_during_the_check_is_named(make_hosts: MakeHosts) -> None:
    """It just stops sending; the kernel's keep-alive probes notice within 6 s."""
    network = make_hosts(3)
    started = [start_one(network[index], network) for index in (0, 1)]
    vanishing = start_one(network[2], network, hang_at="trying")
    wait_for_line(vanishing, "trying")
    network[2].power_off()
    told = [read_one(each) for each in started]
    report = agree(told)
    assert report.only("DS-MESH-010")["hosts"] == ["h2"]
    assert report.ways("open") == {(0, 1), (1, 0)}
    require_told_in_time(told, 9)


@pytest.mark.full(but=["killed"])
@pytest.mark.parametrize("end", ["killed", "power"])
def test_the_others_end_in_time_when_node_rank_0_is_lost(make_hosts: MakeHosts, end: str) -> None:
    """Each node that waits for node rank 0 reports its loss and its host."""
    network = make_hosts(3)
    coordinator = start_one(network[0], network, hang_at="trying", timeout_s=20)
    others = [start_one(network[index], network, timeout_s=20) for index in (1, 2)]
    wait_for_line(coordinator, "trying")
    if end == "killed":
        coordinator.kill()
    else:
        network[0].power_off()
    told = [read_one(each) for each in others]
    for report in told:
        assert report.only("DS-MESH-011")["hosts"] == ["h0"]
    require_told_in_time(told, 9)


REFUSED = {
    "a node rank twice": (3, {2: {"node_rank": 1}}, ["DS-MESH-002"]),
    "node rank 0 twice": (2, {1: {"node_rank": 0}}, ["DS-MESH-002"]),
    "a third node where two were asked for": (2, {1: {"nnodes": 3}}, ["DS-MESH-013"]),
    "a node rank that there is not": (2, {1: {"node_rank": 7}}, ["DS-MESH-013"]),
    "other jobs": (
        3,
        {1: {"nnodes": 5}, 2: {"env": {"SLURM_JOB_ID": "8"}}},
        ["DS-MESH-013", "DS-MESH-013"],
    ),
    "another version": (2, {1: {"protocol": 99}}, ["DS-MESH-040"]),
}
"""What is wrong: the hosts, the options of some of them, and the codes that all of them report."""


@pytest.mark.full(but=["a node rank twice"])
@pytest.mark.parametrize("wrong", REFUSED)
def test_all_nodes_end_at_once_with_the_same_findings_when_one_does_not_fit(
    make_hosts: MakeHosts, wrong: str
) -> None:
    """The refused nodes as well: nothing waits for an answer that is already known."""
    size, each, codes = REFUSED[wrong]
    told = examine(make_hosts(size), timeout_s=50, each=each)
    assert agree(told).codes() == codes
    require_told_in_time(told, 12)
    facts = "; ".join(finding["fact"] for finding in told[0].findings)
    assert all(f"h{index}" in facts for index in each)


def test_a_surplus_node_does_not_delay_the_others(make_hosts: MakeHosts) -> None:
    """It joins while a direction is still being tried, and gets the same findings as the others."""
    network = make_hosts(3)
    network[1].refuse_from(network[0])
    asked = {index: {"nnodes": 2} for index in (0, 1)}
    told = examine(network, timeout_s=20, each=asked)
    report = agree(told)
    assert report.codes() == ["DS-MESH-013", "DS-MESH-031"]
    assert report.one("DS-MESH-013")["hosts"] == ["h2"]


def test_a_node_joins_again_when_node_rank_0_is_restarted(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """Nothing had been examined yet, so the other nodes need no restart."""
    network = make_hosts(3)
    first = start_one(network[0], network, timeout_s=20)
    other = start_one(network[1], network, timeout_s=20)
    again = start_one(network[0], network, timeout_s=3, comes_with=str(tmp_path / "go"))
    wait_for_line(again, "waiting for the file")
    wait_for_line(first, "2 of 3 nodes have joined")
    first.kill()
    first.wait(scripts.LIMIT_S)
    (tmp_path / "go").touch()
    told = [read_one(each) for each in (again, other)]
    report = agree(told)
    assert report.only("DS-MESH-001")["hosts"] == ["node rank 2"]


def test_a_taken_port_is_reported_with_its_owner(make_hosts: MakeHosts) -> None:
    """Node rank 0 names the program that listens there; the others report another program."""
    network = make_hosts(2)
    squatter = network[0].start([sys.executable, PROGRAM, "listen_and_close", str(PORT)])
    wait_for_line(squatter, "listening")
    host, visitor = examine(network, timeout_s=50)
    assert "python" in host.only("DS-MESH-009")["fact"]
    assert visitor.codes() == ["DS-MESH-003"]
    require_told_in_time([visitor], 12)


@pytest.mark.full(but=["drop-DS-MESH-004"])
@pytest.mark.parametrize(
    ("otherwise", "code"),
    [("drop", "DS-MESH-004"), ("reset", "DS-MESH-005"), ("prohibited", "DS-MESH-006")],
)
def test_a_closed_endpoint_is_reported_by_the_node_that_cannot_connect(
    make_hosts: MakeHosts, otherwise: str, code: str
) -> None:
    """Both sides end in time: that node reports why, and node rank 0 reports which node is missing."""
    network = make_hosts(2)
    network[0].open_only(22, otherwise=otherwise)
    host, visitor = examine(network, timeout_s=2)
    assert visitor.codes() == [code]
    assert f"h0:{PORT} (10.77.0.1)" in visitor.one(code)["fact"]
    assert ("-I eth0 10.77.0.2    # on h1" in visitor.one(code)["fix"]) == (otherwise == "drop")
    require_told_in_time([visitor], 5)
    assert host.codes() == ["DS-MESH-001"]
    require_told_in_time([host], 5)


def test_swapped_node_ranks_are_reported_on_the_host_of_the_endpoint(make_hosts: MakeHosts) -> None:
    """The doctor does run there: "not running yet" would make the reader suspect a firewall."""
    swapped = {0: {"node_rank": 1}, 1: {"node_rank": 0}}
    visitor, _ = examine(make_hosts(2), timeout_s=1, each=swapped)
    found = visitor.only("DS-MESH-005")
    assert "which is h0 itself" in found["fact"]
    assert "Give --node-rank 0 to h0" in found["fix"]
    assert "iptables" not in found["fix"]


def test_closed_ipv6_endpoint_is_opened_with_ip6tables(make_hosts: MakeHosts) -> None:
    """The lines to paste are for the packet filter that drops the connection."""
    network = make_hosts(2)
    for host in network:
        host.shell(f"ip -6 addr add fd00:77::{host.index + 1}/64 dev eth0 nodad")
    endpoint = f"[fd00:77::1]:{PORT}"
    (visitor,) = examine(network, hosts=[1], timeout_s=1, endpoint=endpoint)
    found = visitor.one("DS-MESH-005")
    assert f"is refused by {endpoint} (fd00:77::1)" in found["fact"]
    assert f"ip6tables -I INPUT -p tcp --dport {PORT} -j ACCEPT" in found["fix"]


def test_host_in_another_network_has_no_route_to_the_endpoint(make_hosts: MakeHosts) -> None:
    """A host that has only the other card cannot connect at all."""
    network = make_hosts(
        2, nics={"eth0": "10.77.0", "ib0": "10.88.0"}, without={"eth0": [1], "ib0": [0]}
    )
    _, visitor = examine(network, timeout_s=1)
    assert "ENETUNREACH" in visitor.only("DS-MESH-006")["fact"]


def test_unknown_name_of_the_endpoint_is_reported(make_hosts: MakeHosts) -> None:
    """Neither the hosts file nor a name server knows it."""
    network = make_hosts(2)
    (visitor,) = examine(network, hosts=[1], timeout_s=1, endpoint=f"nowhere:{PORT}")
    assert "getent hosts nowhere" in visitor.only("DS-MESH-007")["fix"]


def test_silent_name_server_is_distinguished_from_an_unknown_name(make_hosts: MakeHosts) -> None:
    """The look-up itself would block for longer than the deadline."""
    network = make_hosts(2, name_server="10.77.0.1")
    network[0].firewall("udp dport 53 drop")
    (visitor,) = examine(network, hosts=[1], timeout_s=1, endpoint=f"nowhere:{PORT}")
    assert visitor.only("DS-MESH-007")["details"]["trouble"] == "silent-resolver"
    require_told_in_time([visitor], 5)


def test_endpoint_name_that_resolves_to_the_node_itself_is_reported(make_hosts: MakeHosts) -> None:
    """As with an /etc/hosts copied from node rank 0, where the name is 127.0.1.1."""

    def copied(network: Network, index: int) -> str:
        return names_of_all(network, index).replace("10.77.0.1 h0", "127.0.1.1 h0")

    (visitor,) = examine(make_hosts(2, hosts_file=copied), hosts=[1], timeout_s=20)
    assert "127.0.1.1" in visitor.only("DS-MESH-008")["fact"]
    require_told_in_time([visitor], 5)


def test_a_late_node_is_reported_as_late(make_hosts: MakeHosts) -> None:
    """The others are already examining, delayed by a connection that gets no answer."""
    network = make_hosts(3)
    network[1].refuse_from(network[0])
    told = examine(network, timeout_s=2, each={2: {"comes_after_s": 3}})
    assert "DS-MESH-001" in told[0].codes()
    assert "DS-MESH-012" in told[2].codes()
    assert "the others had stopped waiting" in told[2].one("DS-MESH-012")["fact"]
