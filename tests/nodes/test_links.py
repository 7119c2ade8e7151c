"""A broken link between two nodes is named as that, and no rank is blamed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from hosts import Network
from nodes_kit import Case, await_files, finish_job, require_the_same, start_job

from ddpsafe._launcher.nodes.links import find_broken_link
from ddpsafe._launcher.nodes.node_messages import NodeFacts, RoundPlan
from ddpsafe._launcher.watch.deadlock_watch import describe_unanswered
from ddpsafe._launcher.watch.idleness import find_unanswered
from ddpsafe._wire.messages import Position, Raised, RankOutcome, Unanswered

PLAN: Final = RoundPlan(
    round_id="",
    attempt=1,
    nodes=tuple(
        NodeFacts(
            hostname=f"h{node}",
            pid=1,
            address=f"10.0.0.{node + 1}",
            nproc=2,
            settings={},
            addresses=(f"10.0.0.{node + 1}", f"192.168.0.{node + 1}", "172.17.0.1"),
        )
        for node in range(3)
    ),
    store_port=0,
    master_port=0,
)
GLOO: Final = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] "
TIMED_OUT: Final = GLOO + "Read error [10.0.0.{}]:4123: Connection timed out"
RESET: Final = GLOO + "Read error [10.0.0.{}]:4123: Connection reset by peer"
CLOSED: Final = GLOO + "Connection closed by peer [10.0.0.{}]:4123"
ON_OTHER_NETWORK: Final = TIMED_OUT.replace("10.0.0", "192.168.0")
OF_CONTAINERS: Final = TIMED_OUT.replace("10.0.0.{}", "172.17.0.1")
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
        pytest.param({2: (ON_OTHER_NETWORK, 3)}, (2, 4), id="the ranks' own network"),
        pytest.param({2: (OF_CONTAINERS, 3)}, None, id="an address of all hosts"),
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


LIMIT: Final = GLOO + "Timed out waiting 20000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("peers", "said", "link", "also"),
    [
        pytest.param({2: ["10.0.0.3"]}, {}, (2, 4), [], id="a limit of the launcher"),
        pytest.param(
            {2: ["10.0.0.3"], 4: ["10.0.0.2"]}, {0: LIMIT}, (2, 4), [], id="a timeout elsewhere"
        ),
        pytest.param({5: ["192.168.0.2"]}, {2: LIMIT}, (2, 5), [], id="the ranks' own network"),
        pytest.param(
            {0: ["10.0.0.3"], 2: ["10.0.0.3"]}, {2: LIMIT}, (2, 4), [{0, 2}], id="two links"
        ),
        pytest.param({2: ["172.17.0.1"]}, {2: LIMIT}, None, [], id="an address of all nodes"),
        pytest.param({2: ["10.9.9.9"]}, {2: LIMIT}, None, [], id="no node"),
        pytest.param({2: ["10.0.0.3"]}, {5: BUG}, None, [], id="and an error of a rank"),
        pytest.param({2: ["10.0.0.3"]}, {2: BUG}, None, [], id="and an error of that rank"),
    ],
)
def test_a_link_is_broken_if_a_kernel_sends_the_same_again_and_again(
    peers: dict[int, list[str]],
    said: dict[int, str],
    link: tuple[int, int] | None,
    also: list[set[int]],
) -> None:
    """Long before it gives up; the ranks may only know that they have waited too long."""
    outcomes = {}
    for rank in range(6):
        connections = tuple(Unanswered("10.0.0.9", peer) for peer in peers.get(rank, ()))
        outcomes[rank] = outcome(rank, said.get(rank), unanswered=connections)
        raised = outcomes[rank].raised
        if raised is not None and raised.message == LIMIT:
            outcomes[rank] = replace(outcomes[rank], raised=replace(raised, origin="timeout"))
    found = find_broken_link(PLAN, outcomes)
    assert (found and (found.first.rank, found.second.rank)) == link
    assert ([] if found is None else sorted(map(set, found.also))) == also


def test_the_warning_of_a_long_wait_has_the_addresses_that_do_not_answer() -> None:
    """Each once, however many connections there are."""
    to_h2 = Unanswered("10.0.0.2", "10.0.0.3")
    outcomes = [outcome(2, None, unanswered=(to_h2, to_h2)), outcome(3, None)]
    assert describe_unanswered(outcomes) == (
        "; what rank 2 sends to 10.0.0.3 is not answered: the network, or that host, is down"
    )
    assert not describe_unanswered([outcome(3, None)])


TABLE: Final = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 02004D0A:A0F0 03004D0A:1F90 01 00004000:00000000 01:00000A7B 00000005     0        0 101 2 0 20 4 30 10 -1
   1: 02004D0A:A0F1 03004D0A:1F90 01 00004000:00000000 01:00000A7B 00000004     0        0 102 2 0 20 4 30 10 -1
   2: 02004D0A:A0F2 03004D0A:1F90 01 00004000:00000000 04:00000A7B 00000009     0        0 103 2 0 20 4 30 10 -1
   3: 02004D0A:A0F3 03004D0A:1F90 02 00000001:00000000 01:00000A7B 00000005     0        0 104 2 0 20 4 30 10 -1
   4: 0100007F:A0F4 0100007F:1F90 01 00004000:00000000 01:00000A7B 00000005     0        0 105 2 0 20 4 30 10 -1
"""
TABLE_6: Final = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0000000000000000FFFF000002004D0A:A0F0 0000000000000000FFFF000003004D0A:1F90 01 00004000:00000000 01:00000A7B 0000000A     0        0 201 2 0 20 4 30 10 -1
   1: 7700FD00000000000000000001000000:A0F0 7700FD00000000000000000002000000:1F90 01 00004000:00000000 01:00000A7B 00000006     0        0 202 2 0 20 4 30 10 -1
"""


@pytest.mark.skipif(
    sys.byteorder != "little", reason="the words of the tables are of such a machine"
)
def test_a_table_of_the_kernel_shows_connections_without_a_reply() -> None:
    """Not those of a peer that reads slowly (timer 4), to this host, or that only begin."""
    between = Unanswered("10.77.0.2", "10.77.0.3")
    assert find_unanswered(TABLE) == {"socket:[101]": between}
    assert find_unanswered(TABLE_6) == {
        "socket:[201]": between,
        "socket:[202]": Unanswered("fd:77::1", "fd:77::2"),
    }


@pytest.mark.parametrize(
    ("fourth", "link"),
    [
        pytest.param({"in_collective": True}, (2, 4), id="waits"),
        pytest.param({"in_collective": False}, None, id="works"),
        pytest.param({}, None, id="unknown"),
        pytest.param({"in_collective": True, "status": "returned"}, None, id="has returned"),
        pytest.param({"in_collective": True, "status": "killed"}, None, id="was killed"),
    ],
)
@pytest.mark.parametrize("reports", [RESET, CLOSED])
def test_a_reset_connection_is_the_network_if_no_rank_can_have_closed_it(
    reports: str, fourth: dict[str, Any], link: tuple[int, int] | None
) -> None:
    """A rank that works, has returned or has ended may have."""
    outcomes = {rank: outcome(rank, None, in_collective=True) for rank in range(6)}
    outcomes |= {2: outcome(2, reports.format(3)), 3: outcome(3, CLOSED.format(3))}
    outcomes[4] = outcome(4, None, **fourth)
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
@pytest.mark.parametrize(
    ("retries", "collective_s", "words"),
    [
        pytest.param(3, 300, "", id="a kernel gives up"),
        pytest.param(15, 20, "sends is not answered, although both launchers", id="only it knows"),
    ],
)
def test_a_broken_link_between_two_other_nodes_is_named(
    own_network: Network, tmp_path: Path, retries: int, collective_s: int, words: str
) -> None:
    """Node 0 reaches both; every node shows the same, and another start may help."""
    case = Case(name="held", what="held", fields={"timeouts": {"collective": collective_s}})
    launchers = start_job(own_network, [case], tmp_path, nproc=(1, 1, 1))
    await_files(launchers, tmp_path, "running-held-1-*", 3)
    for one, other in ((1, 2), (2, 1)):
        own_network[one].shell(f"echo {retries} > /proc/sys/net/ipv4/tcp_retries2")
        own_network[one].drop_all_from(own_network[other])
    said = [each["held"] for each in finish_job(own_network, [case], launchers)]
    require_the_same(said)
    assert (said[0]["error"], said[0]["code"], said[0]["kind"]) == (
        "NodeLostError",
        75,
        "peer-lost",
    ), said[0]["whole"]
    link = "between node 1 ('h1', 10.77.0.2) and node 2 ('h2', 10.77.0.3) is broken"
    assert link in said[0]["text"], said[0]["whole"]
    assert words in said[0]["text"], said[0]["whole"]
