"""Attempt after attempt on several nodes: one decision for all, and nodes that do not agree."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Final

import pytest
from hosts import Network, find_obstacle, require
from nodes_kit import Case, run_job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.root

_ports = itertools.count(29400, 50)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two hosts."""
    require(find_obstacle())
    with Network(2) as hosts:
        yield hosts


RETRY: Final[dict[str, Any]] = {
    "attempts": 12,
    "on": ["killed", "ValueError"],
    "backoff_initial": 0,
    "jitter": 0,
    "no_progress": None,
}


@pytest.mark.parametrize("culprit", [0, 1])
def test_ten_failed_attempts_in_a_row_are_followed_by_a_good_one(
    network: Network, tmp_path: Path, culprit: int
) -> None:
    """With gloo, on whichever node the rank is killed; all ranks know which attempt it is."""
    case = Case(name="kills", what="kill-until-11", rank=culprit, fields={"retry": RETRY})
    nodes = run_job(network, [case], tmp_path, nproc=(1, 1), port=next(_ports))
    for node, results in enumerate(nodes):
        assert results["kills"]["values"] == {str(node): node}
        assert results["kills"]["attempts"] == 11
    assert len(list(tmp_path.glob("fault-kills-*"))) == 11


def test_an_exception_of_a_type_that_is_retried_is_so_from_any_node(
    network: Network, tmp_path: Path
) -> None:
    """Its type is judged where it was raised: it does not travel."""
    case = Case(name="raises", what="raise-until-2", rank=1, fields={"retry": RETRY})
    nodes = run_job(network, [case], tmp_path, nproc=(1, 1), port=next(_ports))
    assert [results["raises"]["attempts"] for results in nodes] == [2, 2]


def test_nodes_that_do_not_agree_are_refused_on_all_of_them(
    network: Network, tmp_path: Path
) -> None:
    """A different configuration is named with both values and both nodes, before any rank starts."""
    cases = [
        Case(name="seeds", of_node={0: {"seed": 1}, 1: {"seed": 2}}),
        Case(name="healthy"),
    ]
    nodes = run_job(network, cases, tmp_path, nproc=(1, 1), port=next(_ports))
    for results in nodes:
        said = results["seeds"]
        assert (said["error"], said["code"]) == ("ConfigError", 78)
        assert "seed: 1 on node 0 (h0), 2 on node 1 (h1)" in said["text"]
        assert "values" in results["healthy"]
