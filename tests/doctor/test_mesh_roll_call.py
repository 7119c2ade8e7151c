"""Who has not come is named, and what keeps a node from the endpoint is told apart."""

from __future__ import annotations

import sys

import pytest
from hosts import Network, names_of_all
from mesh_kit import (
    PROGRAM,
    MakeHosts,
    agree,
    examine,
    read_one,
    require_in_time,
    start_one,
    wait_for_line,
)

PORT = 29500

pytestmark = pytest.mark.root


def test_node_that_never_comes_is_named_and_the_others_are_examined(make_hosts: MakeHosts) -> None:
    """The roll-call ends in time, and what is wrong between those who came is found as well."""
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
    require_in_time(told, 5)
    assert any("waiting for node rank h2" in line for line in told[1].progress)


def test_node_that_dies_during_the_check_is_named(make_hosts: MakeHosts) -> None:
    """A process that is killed takes no other node with it, and its pairs are not blamed."""
    network = make_hosts(3)
    dying = start_one(network[2], network, die_at="trying")
    told = examine(network, hosts=[0, 1])
    dying.communicate(timeout=20)
    report = agree(told)
    assert report.codes() == ["DS-MESH-010"]
    assert report.one("DS-MESH-010")["hosts"] == ["h2"]
    assert report.ways("open") == {(0, 1), (1, 0)}
    require_in_time(told, 5)


def test_host_that_loses_power_during_the_check_is_named(make_hosts: MakeHosts) -> None:
    """It has stopped sending: the kernel's probes notice within 3 s."""
    network = make_hosts(3)
    started = [start_one(network[index], network) for index in (0, 1)]
    vanishing = start_one(network[2], network, hang_at="trying")
    wait_for_line(vanishing, "trying")
    network[2].power_off()
    told = [read_one(each) for each in started]
    report = agree(told)
    assert report.codes() == ["DS-MESH-010"]
    assert report.one("DS-MESH-010")["hosts"] == ["h2"]
    assert report.ways("open") == {(0, 1), (1, 0)}
    require_in_time(told, 6)


@pytest.mark.parametrize("end", ["killed", "power"])
def test_others_end_in_time_when_node_rank_zero_is_lost(make_hosts: MakeHosts, end: str) -> None:
    """Whoever waits for node rank 0 says that it is gone, and which host it was on."""
    network = make_hosts(3)
    chair = start_one(network[0], network, hang_at="trying", timeout_s=20)
    others = [start_one(network[index], network, timeout_s=20) for index in (1, 2)]
    wait_for_line(chair, "trying")
    if end == "killed":
        chair.kill()
    else:
        network[0].power_off()
    told = [read_one(each) for each in others]
    for report in told:
        assert report.codes() == ["DS-MESH-011"]
        assert report.one("DS-MESH-011")["hosts"] == ["h0"]
    require_in_time(told, 6)


def test_doubled_node_rank_is_named_with_both_hosts(make_hosts: MakeHosts) -> None:
    """It is the one who is missing: all end soon after it was sent away, not at the timeout."""
    network = make_hosts(3)
    first = [start_one(network[index], network, timeout_s=50) for index in (0, 1)]
    wait_for_line(first[0], "2 of 3 nodes have come")
    (sent_away,) = examine(network, hosts=[2], each={2: {"node_rank": 1}})
    assert sent_away.codes() == ["DS-MESH-002"]
    assert "h1 (pid" in sent_away.one("DS-MESH-002")["fact"]
    told = [read_one(each) for each in first]
    report = agree(told)
    assert report.codes() == ["DS-MESH-002"]
    assert report.one("DS-MESH-002")["hosts"] == ["h2", "h1"]
    assert max(each.took_s for each in told) < 40


def test_second_node_rank_zero_is_told_where_the_first_is(make_hosts: MakeHosts) -> None:
    """It listens on a host that no node comes to: it looks where the endpoint leads."""
    network = make_hosts(2)
    first, second = examine(network, timeout_s=50, each={1: {"node_rank": 0}})
    assert second.codes() == ["DS-MESH-002"]
    assert "so is h0" in second.one("DS-MESH-002")["fact"]
    assert first.codes() == ["DS-MESH-002"]
    assert max(first.took_s, second.took_s) < 40
    assert first.one("DS-MESH-002")["hosts"] == ["h1", "h0"]


def test_node_of_another_job_is_told_so(make_hosts: MakeHosts) -> None:
    """Two jobs on one port never mix: neither by size nor by what the launcher calls them."""
    network = make_hosts(3)
    others = {1: {"nnodes": 5}, 2: {"env": {"SLURM_JOB_ID": "8"}}}
    host, *strangers = examine(network, timeout_s=50, each=others)
    assert host.took_s < 40
    for stranger in strangers:
        assert stranger.codes() == ["DS-MESH-013"]
        assert "on h0" in stranger.one("DS-MESH-013")["fact"]
    assert host.codes() == ["DS-MESH-013", "DS-MESH-013"]


def test_taken_port_is_named_with_its_owner(make_hosts: MakeHosts) -> None:
    """Node rank 0 names what listens there; the others find no doctor there."""
    network = make_hosts(2)
    squatter = network[0].start([sys.executable, PROGRAM, "listen_and_close", str(PORT)])
    wait_for_line(squatter, "listening")
    host, guest = examine(network, timeout_s=1)
    assert host.codes() == ["DS-MESH-009"]
    assert "python" in host.one("DS-MESH-009")["fact"]
    assert guest.codes() == ["DS-MESH-003"]
    require_in_time([guest], 5)


@pytest.mark.parametrize(
    ("otherwise", "code"),
    [("drop", "DS-MESH-004"), ("reset", "DS-MESH-005"), ("prohibited", "DS-MESH-006")],
)
def test_closed_endpoint_is_told_by_the_node_that_cannot_come(
    make_hosts: MakeHosts, otherwise: str, code: str
) -> None:
    """Both sides end in time: who cannot come says why, node rank 0 says who did not."""
    network = make_hosts(2)
    network[0].open_only(22, otherwise=otherwise)
    host, guest = examine(network, timeout_s=2)
    assert guest.codes() == [code]
    assert f"h0:{PORT} (10.77.0.1)" in guest.one(code)["fact"]
    require_in_time([guest], 5)
    assert host.codes() == ["DS-MESH-001"]
    require_in_time([host], 5)


def test_host_in_another_network_has_no_way_to_the_endpoint(make_hosts: MakeHosts) -> None:
    """A host that has only the other card cannot even come."""
    network = make_hosts(
        2, nics={"eth0": "10.77.0", "ib0": "10.88.0"}, without={"eth0": [1], "ib0": [0]}
    )
    _, guest = examine(network, timeout_s=1)
    assert guest.codes() == ["DS-MESH-006"]
    assert "ENETUNREACH" in guest.one("DS-MESH-006")["fact"]


def test_unknown_name_of_the_endpoint_is_told(make_hosts: MakeHosts) -> None:
    """A name that neither the file nor a server knows."""
    network = make_hosts(2)
    (guest,) = examine(network, hosts=[1], timeout_s=1, endpoint=f"nowhere:{PORT}")
    assert guest.codes() == ["DS-MESH-007"]
    assert "getent hosts nowhere" in guest.one("DS-MESH-007")["fix"]


def test_silent_name_server_is_told_from_an_unknown_name(make_hosts: MakeHosts) -> None:
    """The look-up itself would hang for longer than the deadline."""
    network = make_hosts(2, name_server="10.77.0.1")
    network[0].firewall("udp dport 53 drop")
    (guest,) = examine(network, hosts=[1], timeout_s=1, endpoint=f"nowhere:{PORT}")
    assert guest.codes() == ["DS-MESH-007"]
    assert guest.one("DS-MESH-007")["details"]["trouble"] == "silent-resolver"
    require_in_time([guest], 5)


def test_name_of_the_endpoint_that_leads_to_the_node_itself_is_told(make_hosts: MakeHosts) -> None:
    """An /etc/hosts that was copied from node rank 0, where the name is 127.0.1.1."""

    def copied(network: Network, index: int) -> str:
        return names_of_all(network, index).replace("10.77.0.1 h0", "127.0.1.1 h0")

    (guest,) = examine(make_hosts(2, hosts_file=copied), hosts=[1], timeout_s=20)
    assert guest.codes() == ["DS-MESH-008"]
    assert "127.0.1.1" in guest.one("DS-MESH-008")["fact"]
    require_in_time([guest], 5)


def test_a_node_that_comes_after_the_roll_call_is_told_so(make_hosts: MakeHosts) -> None:
    """The others are past it, held up by a connection that vanishes; it learns that it was late."""
    network = make_hosts(3)
    network[1].refuse_from(network[0])
    told = examine(network, timeout_s=2, each={2: {"comes_after_s": 3}})
    assert "DS-MESH-001" in told[0].codes()
    assert told[2].codes() == ["DS-MESH-012"]
    assert "the others had stopped waiting" in told[2].one("DS-MESH-012")["fact"]
