"""A rank of a job on several nodes fails: every node names it with the same message, and shows where the ranks are."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any, Final

import pytest
import scripts
from fault_kit import memory_group
from hosts import Network
from machine import require_in_time
from nodes_kit import (
    Case,
    Launcher,
    await_ranks,
    fault_s,
    finish_job,
    require_the_same,
    run_job,
    start_job,
)
from scripts import wait_until

from ddpsafe._launcher.watch.status_socket import ask

pytestmark = pytest.mark.root

COLLECTIVE_S: Final = 6
FAULTS: Final = [
    # fault, error, exit code, promised seconds
    ("raise", "RankRaisedError", 1, 2.0),
    ("kill", "RankKilledError", 137, 2.0),
    ("segfault", "RankKilledError", 139, 2.0),
    ("exit-0", "RankLeftEarlyError", 1, 2.0),
    ("exit-3", "RankExitedError", 3, 2.0),
    ("return", "RankLeftEarlyError", 1, 3.0),
    ("barrier", "RankRaisedError", 1, 3.0),
    ("skip", "RankLeftEarlyError", 1, COLLECTIVE_S + 3.0),
    ("other", "LaunchTimeoutError", 1, COLLECTIVE_S + 3.0),
    ("sleep", "LaunchTimeoutError", 1, COLLECTIVE_S + 3.0),
    ("gil", "LaunchTimeoutError", 1, COLLECTIVE_S + 3.0),
    ("stop", "LaunchTimeoutError", 1, COLLECTIVE_S + 3.0),
]


ON_NODE_0: Final = ("raise", "kill", "return", "barrier", "skip", "other", "stop")
"""One fault for each way in which node 0 detects it; a rank of node 1 has all of them."""


@pytest.mark.full
@pytest.mark.recorder
@pytest.mark.parametrize(
    ("nproc", "culprit", "whats"),
    [
        ((2, 2), 3, None),
        pytest.param((2, 2), 1, None, marks=pytest.mark.soak),
        ((1, 3), 0, ON_NODE_0),
        pytest.param((1, 3), 0, None, marks=pytest.mark.soak),
    ],
)
def test_every_node_names_the_rank_that_failed(
    network: Network,
    tmp_path: Path,
    nproc: tuple[int, ...],
    culprit: int,
    whats: tuple[str, ...] | None,
) -> None:
    """The same error with the same message and exit code on all nodes, in time, and nothing is left."""
    faults = [each for each in FAULTS if whats is None or each[0] in whats]
    cases = [
        Case(name="healthy"),
        *(Case(name=what, what=what, rank=culprit) for what, *_ in faults),
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
    for what, error, code, within_s in faults:
        said = [results[what] for results in nodes]
        require_the_same(said)
        assert (said[0]["error"], said[0]["code"]) == (error, code), said[0]
        assert who in said[0]["text"]
        for each in said:
            require_in_time(each["at"] - fault_s(tmp_path, what), within_s, what)
        logs = next(line for line in said[0]["whole"].splitlines() if line.startswith("  Logs: "))
        assert logs.startswith((f"  Logs: h0:{tmp_path}", f"  Logs: h{node}:{tmp_path}")), logs
    causes = [results["raise"]["cause"] for results in nodes]
    assert causes[node] == "ValueError"
    assert causes[1 - node] != "ValueError"


@pytest.mark.full
@pytest.mark.recorder
@pytest.mark.parametrize("culprit", [0, 1])
def test_of_two_ranks_in_different_collectives_both_are_named(
    network: Network, tmp_path: Path, culprit: int
) -> None:
    """There is no majority, so either may be wrong; each with its node, on every node."""
    case = Case(name="other", what="other", rank=culprit)
    said = [results["other"] for results in run_job(network, [case], tmp_path, nproc=(1, 1))]
    require_the_same(said)
    for rank in (0, 1):
        did = "broadcast" if rank == culprit else "all_reduce"
        who = f"rank {rank} (node {rank} 'h{rank}', local rank 0, world_size 2)"
        assert f"{who} entered {did} number 4 at " in said[0]["text"], said[0]["text"]


@pytest.mark.full
@pytest.mark.parametrize("first", [0, 1])
def test_the_first_of_two_failures_is_named_on_every_node(
    network: Network, tmp_path: Path, first: int
) -> None:
    """The other rank fails 0.2 s later, by the clock of the other host."""
    case = Case(name="both", what="both", rank=first)
    said = [results["both"] for results in run_job(network, [case], tmp_path, nproc=(1, 1))]
    require_the_same(said)
    assert (said[0]["error"], said[0]["rank"]) == ("RankRaisedError", first), said[0]["whole"]


@pytest.mark.full
@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_an_out_of_memory_kill_is_reported_with_its_node(
    network: Network, tmp_path: Path, victim: int
) -> None:
    """Memory runs out on one host: all nodes report that, not a kill by a user."""
    # Filling a gigabyte takes a while, and a fork server may be older than the limit.
    case = Case(
        name="fill",
        what="fill",
        rank=victim,
        fields={"timeouts": {"collective": 60}},
        of_node={victim: {"start_method": "spawn"}},
        after={victim: "is-limited"},
    )
    with memory_group() as group:
        if group is None:
            pytest.skip("needs a writable memory control group")
        # A host's own /sys has no control groups yet.
        where = "/sys/fs/cgroup"
        if group.parent.name == "memory":
            network[victim].shell(f"mount -t tmpfs cgroup {where}; mkdir -p {where}/memory")
            network[victim].shell(f"mount -t cgroup -o memory cgroup {where}/memory")
        else:
            network[victim].shell(f"mount -t cgroup2 cgroup {where}")
        launchers = start_job(network, [case], tmp_path, nproc=(1, 1))
        (group / "cgroup.procs").write_text(str(launchers[victim].pid))
        (tmp_path / "is-limited").touch()
        said = [each["fill"] for each in finish_job(network, [case], launchers)]
    require_the_same(said)
    found = [said[0][key] for key in ("error", "rank", "code", "kind")]
    assert found == ["RankKilledError", victim, 137, "out-of-memory"], said[0]
    assert f"(node {victim} 'h{victim}', local rank 0, world_size 2)" in said[0]["text"]


def test_the_endpoint_may_be_an_ipv6_address_in_brackets(network: Network, tmp_path: Path) -> None:
    """All other tools spell it like that."""
    for host in network:
        host.shell(f"ip -6 addr add fd00:77::{host.index + 1}/64 dev eth0 nodad")
    nodes = run_job(network, [Case(name="healthy")], tmp_path, nproc=(1, 1), at="[fd00:77::1]")
    assert [node["healthy"]["values"] for node in nodes] == [{"0": 0}, {"1": 1}]


DEFAULTS: Final[dict[str, Any]] = {"timeouts": {"grace": 3}}
"""No timeout of collectives, so that only a proof ends a hang."""

TIMEOUT: Final = "LaunchTimeoutError"
PROVED_S: Final = 5.0
QUIET: Final = {node: {"QUIET_S": "3"} for node in range(2)}


def told(launchers: list[Launcher], start: str) -> list[list[str]]:
    """Return the warnings of each launcher that begin like that."""
    return [re.findall(rf"^.*?({start}.*)$", each.err, flags=re.MULTILINE) for each in launchers]


def run_until_told(network: Network, folder: Path, what: str, start: str) -> list[str]:
    """Run a job whose ranks wait until all launchers have warned; return the warning of each."""
    case = Case(name=what, what=what, rank=2, fields=DEFAULTS, env=QUIET)
    os.mkfifo(folder / f"wait-{what}")
    launchers = start_job(network, [case], folder, nproc=(2, 1))
    wait_until(
        lambda: all(told(launchers, start)) or any(each.ended_s for each in launchers),
        otherwise=lambda: [each.err for each in launchers],
    )
    found = [each[0] for each in told(launchers, start)]
    writer = os.open(folder / f"wait-{what}", os.O_RDWR)
    for results in finish_job(network, [case], launchers):
        assert "values" in results[what], results
    os.close(writer)
    return found


@pytest.mark.recorder
def test_a_long_wait_is_told_on_every_node(network: Network, tmp_path: Path) -> None:
    """With the rank that the others wait for, its node and its line."""
    warnings = run_until_told(network, tmp_path, "wait", "ranks 0 and 1 have waited")
    for warning in warnings:
        assert re.fullmatch(
            r"ranks 0 and 1 have waited \d+ s for rank 2 in all_reduce number 4 of shape \[1\]; "
            r"rank 2 is at .*node_programs\.py:\d+ in wait_for.*, on node 1 \(h1\)",
            warning,
        ), warning


@pytest.mark.recorder
def test_ranks_that_all_do_nothing_are_told_on_every_node(network: Network, tmp_path: Path) -> None:
    """Each launcher measures its own ranks; a step that has not been made may take long otherwise."""
    warnings = run_until_told(network, tmp_path, "all-wait", "no rank has made a step")
    for warning in warnings:
        assert "and none does anything" in warning
        assert "ranks 0 and 1 are at" in warning or "rank 1 is at" in warning  # two lines of a loop
        assert ", on node 0 (h0)" in warning
        assert "rank 2 is at" in warning
        assert ", on node 1 (h1)" in warning


@pytest.mark.parametrize(
    ("what", "culprit", "error", "proof"),
    [
        ("other", 2, TIMEOUT, "the ranks can never continue"),
        pytest.param("meet", 2, TIMEOUT, "| rank 2 is in barrier 'epoch'", marks=pytest.mark.full),
        pytest.param("crossed", 2, TIMEOUT, "none of them can continue", marks=pytest.mark.full),
        pytest.param("skip", 2, "RankLeftEarlyError", "has returned", marks=pytest.mark.full),
        pytest.param("stop", 2, TIMEOUT, "is stopped", marks=pytest.mark.full),
        pytest.param("stop", 0, TIMEOUT, "is stopped", marks=pytest.mark.full),
    ],
)
@pytest.mark.recorder
def test_a_deadlock_across_nodes_is_proved(
    network: Network, tmp_path: Path, what: str, culprit: int, error: str, proof: str
) -> None:
    """It ends within seconds, although no timeout is set, with the same message on every node."""
    case = Case(name=what, what=what, rank=culprit, fields=DEFAULTS)
    said = [results[what] for results in run_job(network, [case], tmp_path, nproc=(2, 1))]
    require_the_same(said)
    for each in said:
        assert proof in each["whole"], each["whole"]
        assert each["error"] == error, each
        require_in_time(each["at"] - fault_s(tmp_path, what), PROVED_S, what)


# What is seen of a job on each of its nodes.


def status_in_the_script(run_dir: Path, *, stacks: bool) -> dict[str, Any]:
    """Return the status at a moment when every rank is in a line of the script.

    A rank that looks for the test's file is in a function of the library for a moment.
    """
    facts: dict[str, Any] = {}

    def is_there() -> bool:
        facts.update(ask(run_dir, stacks=stacks))
        return all("node_programs.py" in str(each["where"]) for each in facts["ranks"])

    scripts.wait_until(is_there, otherwise=lambda: facts)
    return facts


def test_the_status_on_any_node_shows_the_ranks_of_all(network: Network, tmp_path: Path) -> None:
    """Each with its host, line and state; processes have a pid on their own host only."""
    case = Case(name="job", what="held", fields={"nnodes": 2})
    launchers = start_job(network, [case], tmp_path, nproc=(2, 1))
    await_ranks(tmp_path, "job-1", 3, launchers)
    for node, own in enumerate(({0, 1}, {2})):
        (socket,) = tmp_path.glob(f"run-job-{node}/**/status.sock")
        for stacks in (False, True):
            facts = status_in_the_script(socket.parent, stacks=stacks)
            assert facts["run_dir"] == str(socket.parent.parent)
            assert facts["world_size"] == 3
            hosts = [each["hostname"] for each in facts["ranks"]]
            assert hosts == ["h0", "h0", "h1"]
            known = {each["rank"] for each in facts["ranks"] if each["pid"] is not None}
            assert known == own
            assert [bool(each["threads"]) for each in facts["ranks"]] == [stacks] * 3
    stopped = (tmp_path / "running-job-1-2").read_text()
    network[1].shell(f"kill -STOP {stopped}")
    (socket,) = tmp_path.glob("run-job-0/**/status.sock")
    wait_until(lambda: ask(socket.parent)["ranks"][2]["state"] == "stopped")
    network[1].shell(f"kill -CONT {stopped}")
    (tmp_path / "release-job").touch()
    finish_job(network, [case], launchers)


@pytest.mark.full
@pytest.mark.parametrize("how", ["cable", "stopped"])
def test_the_status_on_a_node_that_node_0_does_not_answer_shows_its_own_ranks(
    own_network: Network, tmp_path: Path, how: str
) -> None:
    """With their lines, and who does not answer; once node 0 answers again, it shows all."""
    fields = {"nnodes": 2, "timeouts": {"collective": 60}}  # longer than the outage lasts
    case = Case(name="job", what="held", fields=fields)
    launchers = start_job(own_network, [case], tmp_path, nproc=(1, 1))
    await_ranks(tmp_path, "job-1", 2, launchers)
    (socket,) = tmp_path.glob("run-job-1/**/status.sock")
    if how == "cable":
        own_network[1].unplug()
        launchers[1].await_said("cannot be reached")
    else:
        os.kill(launchers[0].pid, signal.SIGSTOP)
    facts = ask(socket.parent, stacks=True)
    (said,) = facts["unanswered"]
    assert said == "node 0 ('h0') does not answer, so only the ranks of this node are shown"
    assert facts["world_size"] == 2
    (rank,) = facts["ranks"]
    assert (rank["rank"], rank["hostname"], bool(rank["pid"])) == (1, "h1", True)
    assert rank["answered"]
    assert "node_programs.py" in str(rank["threads"])
    if how == "cable":
        own_network[1].plug_in()
        launchers[1].await_said("can be reached again")
    else:
        os.kill(launchers[0].pid, signal.SIGCONT)
    scripts.wait_until(lambda: len(ask(socket.parent)["ranks"]) == 2)
    (tmp_path / "release-job").touch()
    finish_job(own_network, [case], launchers)


def events(launcher: Launcher) -> list[dict[str, Any]]:
    """Return the events that a launcher has written."""
    lines = [json.loads(line) for line in launcher.err.splitlines() if line.startswith("{")]
    return [line for line in lines if "event" in line]


@pytest.mark.full
def test_each_node_writes_what_happens_as_events(network: Network, tmp_path: Path) -> None:
    """With its own number in each; the loss of a node says which."""
    fields = {"nnodes": 2, "console": "json"}
    case = Case(name="job", what="held", fields=fields)
    launchers = start_job(network, [case], tmp_path, nproc=(1, 1))
    await_ranks(tmp_path, "job-1", 2, launchers)
    (tmp_path / "release-job").touch()
    finish_job(network, [case], launchers)
    for node, launcher in enumerate(launchers):
        found = [(each["event"], each["node"]) for each in events(launcher)]
        assert found == [("attempt", node), ("ended", node)], launcher.err

    (tmp_path / "release-job").unlink()
    for each in tmp_path.glob("running-job-*"):
        each.unlink()
    launchers = start_job(network, [case], tmp_path, nproc=(1, 1))
    await_ranks(tmp_path, "job-1", 2, launchers)
    os.kill(launchers[1].pid, signal.SIGKILL)
    launchers[0].end()
    # A kernel resets the connection of a process that ends with something unread: away, then lost.
    found = [event for event in events(launchers[0]) if event["event"] != "away"]
    assert [event["event"] for event in found] == ["attempt", "lost"], launchers[0].err
    assert (found[1]["node"], found[1]["of_node"]) == (0, 1)
