"""The doctor tries the address that gloo or NCCL would announce, and reports its pitfalls."""

from __future__ import annotations

import pytest
from hosts import Network, names_as_debian, names_of_all
from mesh_kit import (
    MakeHosts,
    agree,
    examine,
    read_one,
    start_one,
)

TWO_CARDS = {"eth0": "10.77.0", "ib0": "10.88.0"}

pytestmark = pytest.mark.root


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
    assert report.codes() == ["DS-MESH-020"]
    assert report.one("DS-MESH-020")["hosts"] == ["h1"]
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
