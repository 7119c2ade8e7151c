"""A node is taken back with a signal: it saves and leaves, and the others continue; or the whole job stops."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any, Final

import pytest
import scripts
from machine import require_in_time
from nodes_kit import Case, Launcher, await_ranks, require_nothing_left, start_job

if TYPE_CHECKING:
    from pathlib import Path

    from hosts import Network

pytestmark = pytest.mark.root

AGAIN: Final = 75
FAULT_FOLLOWS_S: Final = 1.2
"""A second SIGTERM within a second counts as the same one."""

ELASTIC: Final[dict[str, Any]] = {
    "nnodes": 3,
    "rendezvous": {"min_nodes": 2, "last_call": 5},
    "retry": {"attempts": 3, "on": ["peer-lost"], "backoff_initial": 0, "jitter": 0},
    "timeouts": {"collective": 60, "grace": 3},
}


def start(network: Network, folder: Path, what: str, **fields: Any) -> list[Launcher]:
    """Start three nodes, and wait until their ranks train."""
    case = Case(name="job", what=what, fields={**ELASTIC, **fields})
    launchers = start_job(network, [case], folder, nproc=[1, 1, 1])
    await_ranks(folder, "job-1", 3, launchers)
    return launchers


@pytest.mark.full(but=["save"])
@pytest.mark.parametrize("how", ["save", "no save", "warning", "twice"])
def test_the_others_go_on_without_a_node_that_is_taken_back(
    network: Network, tmp_path: Path, how: str
) -> None:
    """As after its loss, but from the step at which all ranks have stopped, if the script asks for it."""
    what = {"no save": "long", "twice": "stubborn"}.get(how, "resume")
    launchers = start(network, tmp_path, what)
    signum = signal.SIGUSR1 if how == "warning" else signal.SIGTERM
    os.kill(launchers[1].pid, signum)
    if how == "twice":
        scripts.wait_until(lambda: len(list(tmp_path.glob("stopping-*"))) == 3)
        time.sleep(FAULT_FOLLOWS_S)
        os.kill(launchers[1].pid, signum)
    saves = what == "resume"
    assert launchers[1].end() == (0 if saves else -signum), launchers[1].err
    name = "node 1 ('h1', rank 1) leaves the job, attempt 1"
    if saves:
        left = launchers[1].results()["job"]
        assert (left["error"], left["code"]) == ("PreemptedError", AGAIN), left
        asked = f"{signum.name} to the launcher of node 1 ('h1')"
        assert asked in left["text"]
        assert all(f"{asked}: the ranks are asked to save" in each.err for each in launchers)
        assert "The other nodes continue (rendezvous.signal_scope)" in left["whole"]
    else:
        assert "SIGTERM on node 1 ('h1'); no rank of this node is left running" in launchers[1].err
    await_ranks(tmp_path, "job-2", 2, [launchers[0], launchers[2]])
    for other in (launchers[0], launchers[2]):
        assert name in other.err, other.err
    if not saves:
        for other in (launchers[0], launchers[2]):
            os.kill(other.pid, signal.SIGINT)
            other.end()
    else:
        for other in (launchers[0], launchers[2]):
            assert other.end() == 0
            (value,) = other.results()["job"]["values"].values()
            assert (value["attempt"], value["of"]) == (2, 2)
            assert value["first"] == next(iter(left["values"].values()))["last"]
    require_nothing_left(network)


@pytest.mark.full
def test_all_nodes_that_leave_are_named(network: Network, tmp_path: Path) -> None:
    """In the one line about the attempt; the error of each says once that the others continue."""
    rendezvous = {**ELASTIC["rendezvous"], "min_nodes": 1}
    launchers = start(network, tmp_path, "resume", rendezvous=rendezvous)
    for node in (1, 2):
        os.kill(launchers[node].pid, signal.SIGTERM)
    for node in (1, 2):
        assert launchers[node].end() == 0
        said = launchers[node].results()["job"]
        assert said["error"] == "PreemptedError", said
        assert said["whole"].count("The other nodes continue") == 1
    assert launchers[0].end() == 0
    (value,) = launchers[0].results()["job"]["values"].values()
    leaves = "node 1 ('h1', rank 1) and node 2 ('h2', rank 2) leave the job"
    assert value["of"] == 1
    assert leaves in launchers[0].err or value["attempt"] == 3, launchers[0].err
    require_nothing_left(network)


@pytest.mark.full
def test_a_node_that_is_taken_back_between_two_attempts_leaves_too(
    network: Network, tmp_path: Path
) -> None:
    """The others do not wait for it."""
    retry = {**ELASTIC["retry"], "on": ["peer-lost", "killed"], "backoff_initial": 4}
    launchers = start(network, tmp_path, "resume", retry=retry)
    network[0].shell(f"kill -KILL {(tmp_path / 'running-job-1-0').read_text()}")
    scripts.wait_until(lambda: "attempt 1 failed" in launchers[1].err)
    os.kill(launchers[1].pid, signal.SIGTERM)
    assert launchers[1].end() == -signal.SIGTERM
    for other in (launchers[0], launchers[2]):
        assert other.end() == 0
        (value,) = other.results()["job"]["values"].values()
        assert (value["attempt"], value["of"]) == (2, 2)
    require_nothing_left(network)


@pytest.mark.full
@pytest.mark.parametrize(
    ("victims", "fields"),
    [
        pytest.param(
            [1], {"rendezvous": {**ELASTIC["rendezvous"], "signal_scope": "job"}}, id="job"
        ),
        pytest.param([0], {}, id="node 0"),
        pytest.param([1, 2], {}, id="too few"),
        pytest.param([2, 1, 0], {}, id="all"),
        pytest.param([1], {"retry": {**ELASTIC["retry"], "attempts": 1}}, id="no retry"),
    ],
)
def test_all_nodes_stop_where_the_signal_is_for_the_job(
    network: Network, tmp_path: Path, victims: list[int], fields: dict[str, Any]
) -> None:
    """Or where too few would stay: all ranks save at one step, and each node names the node with the signal."""
    launchers = start(network, tmp_path, "resume", **fields)
    for victim in victims:
        os.kill(launchers[victim].pid, signal.SIGTERM)
    for launcher in launchers:
        assert launcher.end() == 0, launcher.err
        said = launcher.results()["job"]
        assert (said["error"], said["code"]) == ("PreemptedError", AGAIN), said
        places = [f"to the launcher of node {victim} ('h{victim}')" for victim in victims]
        assert any(place in said["text"] for place in places), said
    require_nothing_left(network)


@pytest.mark.full
def test_a_stop_does_not_wait_for_a_node_that_is_away(own_network: Network, tmp_path: Path) -> None:
    """Its ranks may still run, which the last line says."""
    launchers = start(own_network, tmp_path, "long")
    own_network[2].unplug()
    launchers[0].await_said("cannot be reached")
    sent_s = time.time()
    os.kill(launchers[0].pid, signal.SIGINT)
    left = "no rank is left running, but those of node 2 ('h2'), which cannot be reached, may be for up to 30 s"
    for launcher in launchers[:2]:
        assert launcher.end() == -signal.SIGINT
        assert f"SIGINT on node 0 ('h0'); {left}" in launcher.err, launcher.err
    require_in_time(time.time() - sent_s, 5.0, "the nodes that can be reached end")
    own_network[2].plug_in()
    scripts.wait_until(lambda: "Joining again" in launchers[2].err)
    os.kill(launchers[2].pid, signal.SIGINT)
    launchers[2].end()
    require_nothing_left(own_network)
