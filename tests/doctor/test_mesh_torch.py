"""The mesh check with torch: its store, its all-reduce, its interface."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import scripts
from doctor_kit import write_torch
from hosts import Network, names_as_debian
from mesh_kit import PROGRAM, MakeHosts, agree, examine, read_one, start_one
from warm_python import Forked

pytestmark = pytest.mark.root


@pytest.mark.full
def test_the_examination_ends_with_an_all_reduce(make_hosts: MakeHosts) -> None:
    """If nothing has failed, every host takes part in a real one."""
    report = agree(examine(make_hosts(2), collective="run", timeout_s=20))
    assert report.codes() == []
    assert "An all-reduce over 2 hosts is correct (gloo" in report.one("DS-MESH-050")["fact"]


@pytest.mark.full
def test_all_reduce_that_cannot_work_fails_in_time(make_hosts: MakeHosts) -> None:
    """A broken library is found by using it: here gloo has an invalid transport."""
    network = make_hosts(2)
    broken = {1: {"env": {"GLOO_DEVICE_TRANSPORT": "NONE"}}}
    report = agree(examine(network, collective="run", timeout_s=20, each=broken))
    assert report.only("DS-MESH-050")["hosts"] == ["h1"]


@pytest.mark.full
def test_ranks_of_torchrun_are_examined_over_their_store(make_hosts: MakeHosts) -> None:
    """The store of torchrun's agent already occupies the endpoint, so the check uses that store."""
    network = make_hosts(3)
    network[1].refuse_from(network[2], how="reset")
    started = [start_one(host, network, program="examine_at_store") for host in network]
    report = agree([read_one(each) for each in started])
    assert report.codes() == ["DS-MESH-032"]
    assert report.ways("refused") == {(2, 1)}


def start_ranks(
    network: Network,
    per_host: int,
    *program: str,
    by_node: bool = False,
    shadow: Path | None = None,
) -> list[Forked]:
    """Start ranks, by default of a launch with the full preflight, as srun or mpirun --map-by node would.

    `shadow` is a folder with a stand-in for torch, for child processes of the doctor.
    """
    variables = {}
    if shadow is not None:
        write_torch(shadow)
        variables["PYTHONPATH"] = str(shadow)
    return [
        host.fork(
            [PROGRAM, *(program or ("launch_fully_examined",))],
            env={
                "RANK": str(
                    local_rank * len(network) + host.index
                    if by_node
                    else host.index * per_host + local_rank
                ),
                "WORLD_SIZE": str(len(network) * per_host),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(per_host),
                "MASTER_ADDR": "h0",
                "MASTER_PORT": "29500",
                **variables,
            },
        )
        for host in network
        for local_rank in range(per_host)
    ]


@pytest.mark.full
def test_ranks_join_after_a_full_preflight_of_healthy_nodes(make_hosts: MakeHosts) -> None:
    """The preflight uses only the port of the job, which the job then uses itself."""
    for rank, process in enumerate(start_ranks(make_hosts(2), 2)):
        out, err = process.communicate(timeout=scripts.LIMIT_S)
        assert process.returncode == 0, err
        assert json.loads(out) == {str(rank): 10.0}


@pytest.mark.full
def test_full_preflight_reports_a_firewall_that_opens_only_the_port_of_the_job(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """Every rank ends at once: the first of each node has the findings, the others refer to it."""
    network = make_hosts(2)
    for host in network:
        host.open_only(29500)
    for rank, process in enumerate(start_ranks(network, 2, shadow=tmp_path)):
        _, err = process.communicate(timeout=scripts.LIMIT_S)
        assert process.returncode == 78, err
        assert "the nodes of this job are not ready for this launch: 1 problem; no process" in err
        if rank % 2:
            assert f"(raised on rank {rank - 1}, seen by rank {rank} " in err
        else:
            assert "DS-MESH-036 (h0, h1): No host can open a connection" in err
            assert "tcp dport 32768-60999 accept    # on h1" in err


@pytest.mark.full
def test_full_preflight_reports_ranks_that_are_not_consecutive_on_a_node(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    """Without NODE_RANK it is derived, here wrongly: two ranks would act for one node."""
    started = start_ranks(make_hosts(2), 2, by_node=True, shadow=tmp_path)
    first_ones = (started[0], started[2])  # one per host; the other host connects second
    scripts.wait_until(lambda: any(each.poll() is not None for each in first_ones))
    ended = next(each for each in first_ones if each.poll() is not None)
    _, err = ended.communicate(timeout=scripts.LIMIT_S)
    assert ended.returncode == 78, err
    assert "is not the only rank that considers itself the first of node 0" in err


def test_automatic_interface_works_where_hostnames_lead_to_loopback(make_hosts: MakeHosts) -> None:
    """With Debian's /etc/hosts gloo fails; ``interface="auto"`` is enough to fix it."""
    network = make_hosts(2, hosts_file=names_as_debian)
    asked = json.dumps({"rendezvous": {"interface": "auto"}, "timeouts": {"start": 30}})
    for process in start_ranks(network, 1, "join_and_reduce", asked):
        out, err = process.communicate(timeout=scripts.LIMIT_S)
        assert process.returncode == 0, err
        assert json.loads(out) == [3.0, "eth0"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("interface", "env", "expected"),
    [
        ("auto", {}, {"GLOO": "ib0", "NCCL": "=ib0", "TP": "ib0"}),
        ("auto", {"NCCL_SOCKET_IFNAME": "eth"}, {"GLOO": "ib0", "NCCL": "eth", "TP": "ib0"}),
        ("eth0", {}, {"GLOO": "eth0", "NCCL": "=eth0", "TP": "eth0"}),
        (None, {}, {}),
    ],
)
def test_automatic_interface_is_the_one_that_leads_to_rank_0(
    make_hosts: MakeHosts, interface: str | None, env: dict[str, str], expected: dict[str, str]
) -> None:
    """The kernel's route decides; each library gets its own spelling, and the user's choice stays."""
    network = make_hosts(2, nics={"eth0": "10.77.0", "ib0": "10.88.0"})
    asked = json.dumps({"interface": interface, "host": "10.88.0.1"})
    for host in network:
        started = host.start([sys.executable, PROGRAM, "choose_interface", asked], env=env)
        out, err = started.communicate(timeout=scripts.LIMIT_S)
        assert started.returncode == 0, err
        variables = {f"{library}_SOCKET_IFNAME": value for library, value in expected.items()}
        assert json.loads(out) == variables
