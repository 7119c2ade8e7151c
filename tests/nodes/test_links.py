"""A broken link between two nodes is named as that, and no rank is blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
import scripts
from nodes_kit import Case, finish_job, require_the_same, start_job

from ddpsafe._launcher.nodes.links import find_broken_link
from ddpsafe._launcher.nodes.node_messages import NodeFacts, RoundPlan
from ddpsafe._wire.messages import Position, Raised, RankOutcome

if TYPE_CHECKING:
    from pathlib import Path

    from hosts import Network

PLAN: Final = RoundPlan(
    round_id="",
    attempt=1,
    nodes=tuple(
        NodeFacts(hostname=f"h{node}", pid=1, address=f"10.0.0.{node + 1}", nproc=2, settings={})
        for node in range(3)
    ),
    store_port=0,
    master_port=0,
)
GLOO: Final = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] "
TIMED_OUT: Final = GLOO + "Read error [10.0.0.{}]:4123: Connection timed out"
CLOSED: Final = GLOO + "Connection closed by peer [10.0.0.{}]:4123"
BUG: Final = "bad batch"
OWN: Final = "the database [10.0.0.{}] does not answer: Connection timed out"


def outcome(rank: int, message: str | None, **changes: Any) -> RankOutcome:
    """Return what became of a rank that raised this, or nothing."""
    raised = None
    if message is not None:
        raised = Raised(
            type_name="RuntimeError",
            message=message,
            traceback="",
            payload=None,
            phase="running",
            where="train.py:3",
            position=Position(collectives=()),
            at_ns=5,
        )
    found = RankOutcome(
        rank=rank,
        local_rank=rank % 2,
        node_rank=rank // 2,
        pid=1,
        hostname=f"h{rank // 2}",
        status="stopped" if raised is None else "raised",
        phase="running",
        exit_code=None,
        raised=raised,
    )
    return replace(found, **changes)


@pytest.mark.parametrize(
    ("said", "link"),
    [
        pytest.param({2: (TIMED_OUT, 3), 4: (TIMED_OUT, 2)}, (2, 4), id="both time out"),
        pytest.param({3: (TIMED_OUT, 3), 4: (CLOSED, 2)}, (3, 4), id="one has ended first"),
        pytest.param(
            {0: (CLOSED, 2), 2: (TIMED_OUT, 3), 5: (CLOSED, 2)}, (2, 5), id="others follow"
        ),
        pytest.param({0: (TIMED_OUT, 2), 2: (TIMED_OUT, 1)}, (0, 2), id="with node 0"),
        pytest.param({2: (CLOSED, 3), 4: (CLOSED, 2)}, None, id="processes have ended"),
        pytest.param({2: (TIMED_OUT, 3)}, (2, 4), id="one side only"),
        pytest.param(
            {0: (CLOSED, 2), 2: (TIMED_OUT, 3), 4: (CLOSED, 1)}, (2, 4), id="no mirror image"
        ),
        pytest.param({5: (TIMED_OUT, 2), 2: (CLOSED, 3)}, (2, 5), id="the other side"),
        pytest.param({2: (TIMED_OUT, 3), 3: (TIMED_OUT, 2)}, None, id="one node"),
        pytest.param(
            {2: (TIMED_OUT, 3), 4: (TIMED_OUT, 2), 0: (BUG, 0)}, None, id="and an error of a rank"
        ),
        pytest.param({}, None, id="nothing"),
        pytest.param({2: (OWN, 3)}, None, id="a connection of the script"),
    ],
)
def test_a_link_is_broken_if_a_kernel_gives_up_a_connection(
    said: dict[int, tuple[str, int]], link: tuple[int, int] | None
) -> None:
    """Its launchers are connected; other ranks may have failed because of it, and in another order."""
    messages = {rank: text.format(host) for rank, (text, host) in said.items()}
    outcomes = {rank: outcome(rank, messages.get(rank)) for rank in range(6)}
    found = find_broken_link(PLAN, outcomes)
    assert (found and (found.first.rank, found.second.rank)) == link


@pytest.mark.parametrize("status", ["killed", "exited"])
def test_a_rank_that_has_ended_explains_the_loss_of_connections(status: str) -> None:
    """Its node is the cause, and not the link."""
    outcomes = {2: outcome(2, TIMED_OUT.format(3)), 4: outcome(4, TIMED_OUT.format(2))}
    outcomes[5] = outcome(5, None, status=status)
    assert find_broken_link(PLAN, outcomes) is None


@pytest.mark.full
@pytest.mark.root
def test_a_broken_link_between_two_other_nodes_is_named(
    own_network: Network, tmp_path: Path
) -> None:
    """Node 0 reaches both; every node shows the same, and another start may help."""
    case = Case(name="held", what="held", fields={"timeouts": {"collective": 300}})
    launchers = start_job(own_network, [case], tmp_path, nproc=(1, 1, 1))
    scripts.wait_until(
        lambda: len(list(tmp_path.glob("running-held-1-*"))) == 3,
        otherwise=lambda: [each.err for each in launchers],
    )
    for one, other in ((1, 2), (2, 1)):
        own_network[one].shell("echo 3 > /proc/sys/net/ipv4/tcp_retries2")
        own_network[one].drop_all_from(own_network[other])
    said = [each["held"] for each in finish_job(own_network, [case], launchers)]
    require_the_same(said)
    assert (said[0]["error"], said[0]["code"], said[0]["kind"]) == (
        "NodeLostError",
        75,
        "peer-lost",
    ), said[0]["whole"]
    words = "between node 1 ('h1', 10.77.0.2) and node 2 ('h2', 10.77.0.3) is broken"
    assert words in said[0]["text"], said[0]["whole"]
