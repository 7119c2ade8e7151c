"""A rank of several nodes breaks: every node names it, in the same words, and nothing is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from nodes_kit import Case, fault_s, require_in_time, require_the_same, run_job

if TYPE_CHECKING:
    from pathlib import Path

    from hosts import Network

pytestmark = pytest.mark.root

COLLECTIVE_S: Final = 6
FAULTS: Final = [
    # what, error, exit code, promised seconds
    ("raise", "RankRaisedError", 1, 2.0),
    ("kill", "RankKilledError", 137, 2.0),
    ("segfault", "RankKilledError", 139, 2.0),
    ("exit-0", "RankLeftEarlyError", 1, 2.0),
    ("exit-3", "RankExitedError", 3, 2.0),
    ("return", "RankLeftEarlyError", 1, 3.0),
    ("barrier", "RankRaisedError", 1, 3.0),
    ("sleep", "CollectiveTimeoutError", 1, COLLECTIVE_S + 3.0),
    ("gil", "CollectiveTimeoutError", 1, COLLECTIVE_S + 3.0),
    ("stop", "CollectiveTimeoutError", 1, COLLECTIVE_S + 3.0),
]


@pytest.mark.parametrize(("nproc", "culprit"), [((2, 2), 3), ((2, 2), 1), ((1, 3), 0)])
def test_every_node_names_the_rank_that_broke(
    network: Network, tmp_path: Path, nproc: tuple[int, ...], culprit: int
) -> None:
    """Whatever a rank dies of, all nodes raise the same error with the same words and exit code.

    It names the rank with its node and its local rank; the exception itself is there where it was
    raised. All that within the promised seconds from the fault, and nothing is left on any host.
    """
    cases = [
        Case(name="healthy"),
        *(Case(name=what, what=what, rank=culprit) for what, *_ in FAULTS),
        Case(name="healthy again"),
    ]
    nodes = run_job(network, cases, tmp_path, nproc=nproc)

    first = [sum(nproc[:node]) for node in range(len(nproc))]
    for name in ("healthy", "healthy again"):
        for node, ranks in enumerate(nproc):
            own = range(first[node], first[node] + ranks)
            assert nodes[node][name]["values"] == {str(rank): rank for rank in own}
    node = max(index for index, rank in enumerate(first) if rank <= culprit)
    who = (
        f"rank {culprit} (node {node} 'h{node}', local rank {culprit - first[node]}, "
        f"world_size {sum(nproc)})"
    )
    for what, error, code, within_s in FAULTS:
        said = [results[what] for results in nodes]
        require_the_same(said)
        assert (said[0]["error"], said[0]["code"]) == (error, code), said[0]
        assert who in said[0]["text"]
        for each in said:
            require_in_time(each["at"] - fault_s(tmp_path, what), within_s, what)
    causes = [results["raise"]["cause"] for results in nodes]
    assert causes[node] == "ValueError"
    assert causes[1 - node] != "ValueError"


def test_nodes_meet_at_an_ipv6_address_in_brackets(network: Network, tmp_path: Path) -> None:
    """The endpoint as every other tool spells it."""
    for host in network:
        host.shell(f"ip -6 addr add fd00:77::{host.index + 1}/64 dev eth0 nodad")
    nodes = run_job(network, [Case(name="healthy")], tmp_path, nproc=(1, 1), at="[fd00:77::1]")
    assert [node["healthy"]["values"] for node in nodes] == [{"0": 0}, {"1": 1}]
