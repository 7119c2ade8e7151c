"""``preflight="full"``: the launchers check the connections between them before any rank starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts import Network
from machine import require_in_time
from nodes_kit import (
    Case,
    Launcher,
    await_files,
    finish_job,
    require_the_same,
    retrying,
    start_job,
    start_node,
)

pytestmark = pytest.mark.root


@pytest.mark.full
@pytest.mark.parametrize("closed", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_closed_port_range_is_reported_on_both_nodes_with_the_lines_to_paste(
    network: Network, tmp_path: Path, closed: int
) -> None:
    """Within seconds, with the direction, and before any rank starts."""
    case = Case(name="closed", what="long", fields={"preflight": "full"})
    port = 28800
    network[closed].open_only(port, otherwise="drop")
    try:
        said = finish_job(
            network, [case], start_job(network, [case], tmp_path, nproc=(1, 1), port=port)
        )
    finally:
        network[closed].run("nft", "flush", "ruleset")
    assert not list(tmp_path.glob("running-*"))
    for results in said:
        found = results["closed"]
        assert (found["error"], found["code"]) == ("PreflightError", 78), found
        closed_way = f"h{1 - closed} (node rank {1 - closed}) cannot open a connection to h{closed}"
        assert closed_way in found["whole"], found["whole"]
        assert "nft" in found["whole"], found["whole"]
        require_in_time(found["at"] - found["began"], 15.0, "the closed ports are named")


@pytest.mark.full
@pytest.mark.parametrize("preflight", ["full", "local"])
def test_a_closed_direction_between_two_other_nodes_is_named(
    network: Network, tmp_path: Path, preflight: str
) -> None:
    """Node 0 reaches both: ``"full"`` names the direction, ``"local"`` the ranks that did not join."""
    fields = {"preflight": preflight, "timeouts": {"start": 8}}
    case = Case(name="pair", fields=fields)
    network[2].refuse_from(network[1])
    if preflight == "local":  # otherwise gloo would use the other direction
        network[1].refuse_from(network[2])
    try:
        launchers = start_job(network, [case], tmp_path, nproc=(1, 1, 1))
        said = [each["pair"] for each in finish_job(network, [case], launchers)]
    finally:
        for host in network:
            host.run("nft", "flush", "ruleset")
    require_the_same(said)
    if preflight == "full":
        assert (said[0]["error"], said[0]["code"]) == ("PreflightError", 78), said[0]
        way = "h1 (node rank 1) cannot open a connection to h2 (node rank 2)"
        assert all(way in each["whole"] for each in said), said[0]["whole"]
    else:
        assert said[0]["error"] == "RendezvousTimeoutError"
        assert "ranks 1 and 2 (world_size 3) did not join" in said[0]["text"]
    for each in said:
        require_in_time(each["at"] - each["began"], 15.0, "the pair is named")


@pytest.mark.full
def test_a_node_that_replaces_another_is_examined_before_its_ranks_start(
    own_network: Network, tmp_path: Path
) -> None:
    """Both nodes report its firewall; the node is refused, and the next one replaces it."""
    retry = retrying(3, "peer-lost")
    case = Case(
        name="job", what="resume", fields={"nnodes": 2, "preflight": "full", "retry": retry}
    )
    endpoint = "h0:28750"

    def start(node: int) -> Launcher:
        return start_node(own_network, node, [case], tmp_path, (1, 1, 1), endpoint)

    first, second = start(0), start(1)
    await_files((first, second), tmp_path, "running-job-1-*", 2)
    own_network[2].open_only()
    own_network[1].power_off()
    third = start(2)
    assert third.end() == 0, third.err
    said = third.results()["job"]
    assert (said["error"], said["code"]) == ("PreflightError", 78), said
    way = "h0 (node rank 0) cannot open a connection to h2 (node rank 1)"
    assert way in said["whole"], said["whole"]
    assert "h2 (10.77.0.3), which came to replace a node, is refused: " in first.err
    assert way in first.err
    assert not list(tmp_path.glob("running-job-2-*"))
    own_network[2].run("nft", "flush", "ruleset")
    found = finish_job(own_network, [case], [first, start(2)], besides=[1])
    for (value,) in (each["job"]["values"].values() for each in found):
        assert (value["attempt"], value["of"]) == (2, 2)
