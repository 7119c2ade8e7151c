"""What a job of several nodes does can be seen on each of them: its status, and its events."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import scripts
from nodes_kit import Case, Launcher, await_ranks, finish_job, start_job

from ddpsafe._launcher.watch.status_socket import ask

if TYPE_CHECKING:
    from pathlib import Path

    from hosts import Network

pytestmark = pytest.mark.root


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
    """Each with its host and line; processes have a pid on their own host only."""
    case = Case(name="job", what="held", fields={"nnodes": 2})
    launchers = start_job(network, [case], tmp_path, nproc=(2, 1))
    await_ranks(tmp_path, "job-1", 3, launchers)
    for node, own in enumerate(({0, 1}, {2})):
        (socket,) = tmp_path.glob(f"run-job-{node}/**/status.sock")
        for stacks in (False, True):
            facts = status_in_the_script(socket.parent, stacks=stacks)
            assert facts["run_dir"] == str(socket.parent)
            assert facts["world_size"] == 3
            hosts = [each["hostname"] for each in facts["ranks"]]
            assert hosts == ["h0", "h0", "h1"]
            known = {each["rank"] for each in facts["ranks"] if each["pid"] is not None}
            assert known == own
            assert [bool(each["threads"]) for each in facts["ranks"]] == [stacks] * 3
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
