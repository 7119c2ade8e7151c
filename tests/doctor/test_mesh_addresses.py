"""The address that gloo or NCCL would announce is the one that is tried, and its traps are named."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hosts import Network, names_as_debian, names_of_all
from mesh_kit import agree, examine, read_one, require_in_time, start_one

if TYPE_CHECKING:
    from mesh_kit import MakeHosts

TWO_CARDS = {"eth0": "10.77.0", "ib0": "10.88.0"}

pytestmark = pytest.mark.root


def test_own_name_on_loopback_is_found_on_every_host(make_hosts: MakeHosts) -> None:
    """Debian's installer writes 127.0.1.1 for the host's own name, and gloo announces it."""
    report = agree(examine(make_hosts(2, hosts_file=names_as_debian)))
    assert report.codes() == ["DS-MESH-020"]
    finding = report.one("DS-MESH-020")
    assert finding["hosts"] == ["h0", "h1"]
    assert "127.0.1.1" in finding["fact"]
    assert "export GLOO_SOCKET_IFNAME=eth0    # on every host" in finding["fix"]
    assert report.ways("open") == {(0, 1), (1, 0)}


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
def test_interface_that_was_chosen_is_tried(
    make_hosts: MakeHosts, asked: dict[str, object]
) -> None:
    """With an interface, or with NCCL, which never asks for the name, 127.0.1.1 does no harm."""
    report = agree(examine(make_hosts(2, hosts_file=names_as_debian), **asked))
    assert report.codes() == []
    assert report.matrix["addresses"] == ["10.77.0.1", "10.77.0.2"]


def test_own_name_without_address_is_found(make_hosts: MakeHosts) -> None:
    """Then gloo takes loopback, with a warning that is easily missed."""

    def without_own(network: Network, index: int) -> str:
        lines = names_of_all(network, index).splitlines(keepends=True)
        return "".join(line for line in lines if not line.endswith(f" h{index}\n") or index == 0)

    report = agree(examine(make_hosts(2, hosts_file=without_own)))
    assert report.codes() == ["DS-MESH-020"]
    assert report.one("DS-MESH-020")["hosts"] == ["h1"]
    assert "does not resolve" in report.one("DS-MESH-020")["cause"]


@pytest.mark.parametrize(
    "asked",
    [
        {"env": {"GLOO_SOCKET_IFNAME": "ib0"}},
        {"env": {"NCCL_SOCKET_IFNAME": "=ib0"}, "backend": "nccl"},
        {"interface": "ib0"},
    ],
    ids=str,
)
def test_absent_interface_is_named_with_those_that_are_there(
    make_hosts: MakeHosts, asked: dict[str, object]
) -> None:
    """One host lacks the card: it is named, its pairs are not, and the line to copy fits all."""
    network = make_hosts(3, nics=TWO_CARDS, without={"ib0": [2]})
    told = examine(network, **asked)
    report = agree(told)
    assert report.codes() == ["DS-MESH-021"]
    finding = report.one("DS-MESH-021")
    assert finding["hosts"] == ["h2"]
    assert "ib0" in finding["fact"]
    assert "it has eth0 (10.77.0.3)" in finding["fact"]
    line = "NCCL_SOCKET_IFNAME='=eth0'" if asked.get("backend") else "GLOO_SOCKET_IFNAME=eth0"
    assert f"export {line}    # on every host" in finding["fix"]
    assert report.ways("open") >= {(0, 1), (1, 0)}
    require_in_time(told, 5)


def test_nccl_takes_the_card_that_only_some_hosts_have(make_hosts: MakeHosts) -> None:
    """Left to itself NCCL prefers ib0; the host without it announces another network."""
    network = make_hosts(3, nics=TWO_CARDS, without={"ib0": [2]})
    report = agree(examine(network, backend="nccl"))
    assert report.codes() == ["DS-MESH-023"]
    finding = report.one("DS-MESH-023")
    assert finding["hosts"] == ["h2"]
    assert "h2 (node rank 2) 10.77.0.3 on eth0" in finding["fact"]
    assert "export NCCL_SOCKET_IFNAME='=eth0'    # on every host" in finding["fix"]
    assert report.ways("open") >= {(0, 1), (1, 0)}


@pytest.mark.parametrize("subnet", ["10.66.0", "10.88.0"], ids=["lower", "higher"])
def test_name_that_leads_to_a_card_of_one_host_only_is_found(
    make_hosts: MakeHosts, subnet: str
) -> None:
    """Whether gloo survives it depends on which address is greater; the doctor finds it anyway."""

    def own_card(network: Network, index: int) -> str:
        text = names_of_all(network, index)
        return text.replace("10.77.0.3 h2", f"{subnet}.3 h2") if index == 2 else text

    network = make_hosts(
        3, nics={"eth0": "10.77.0", "own0": subnet}, without={"own0": [0, 1]}, hosts_file=own_card
    )
    report = agree(examine(network))
    assert report.codes() == ["DS-MESH-023"]
    finding = report.one("DS-MESH-023")
    assert finding["hosts"] == ["h2"]
    assert "export GLOO_SOCKET_IFNAME=eth0    # on every host" in finding["fix"]
    assert {way for way in report.ways("open") if 2 not in way} == {(0, 1), (1, 0)}


def test_two_nodes_of_one_host_may_talk_over_loopback(make_hosts: MakeHosts) -> None:
    """Trying it out on one machine raises no alarm, whatever its name leads to."""
    network = make_hosts(1, hosts_file=names_as_debian)
    asked = {"nnodes": 2, "endpoint": "localhost:29500", "timeout_s": 10}
    started = [start_one(network[0], network, **{**asked, "node_rank": rank}) for rank in (0, 1)]
    report = agree([read_one(each) for each in started])
    assert report.codes() == []
