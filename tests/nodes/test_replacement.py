"""A node is lost or added: which nodes continue, with which ranks, and from which checkpoint."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import scripts
from hosts import Network
from machine import require_in_time
from nodes_kit import (
    Case,
    Launcher,
    await_files,
    await_ranks,
    finish_job,
    require_nothing_left,
    require_the_same,
    retrying,
    run_job,
    start_job,
    start_node,
)

pytestmark = pytest.mark.root

AGAIN: Final = 75
RETRY: Final = retrying(3, "peer-lost", "killed")
ENDPOINT: Final = "h0:28700"


@pytest.mark.parametrize("name", ["two", "memory"])
def test_a_replacement_resumes_where_the_lost_node_was(
    own_network: Network, tmp_path: Path, name: str
) -> None:
    """All resume from the same checkpoint; what only memory had, another node sends."""
    case = Case(name=name, what="resume", fields={"nnodes": 2, "retry": RETRY})
    launchers = [
        start_node(own_network, node, [case], tmp_path, (1, 1), ENDPOINT) for node in (0, 1)
    ]
    await_ranks(tmp_path, f"{name}-1", 2, launchers)
    own_network[1].power_off()
    off_s = time.time()
    third = start_node(own_network, 2, [case], tmp_path, (1, 1, 1), ENDPOINT)
    await_ranks(tmp_path, f"{name}-2", 2, [launchers[0], third])
    require_in_time(time.time() - off_s, 25.0, "the next attempt trains")
    (first,), (other,) = (
        each[name]["values"].values()
        for each in finish_job(own_network, [case], [launchers[0], third], besides=[1])
    )
    assert first == other
    assert (first["attempt"], first["of"]) == (2, 2)
    assert first["first"] >= 3


@pytest.mark.full
def test_a_node_whose_memory_is_damaged_gets_the_state_of_another(
    own_network: Network, tmp_path: Path
) -> None:
    """Its checksums tell; no step is lost, though nothing is in the directory."""
    case = Case(name="memory-damaged", what="resume", fields={"nnodes": 2, "retry": RETRY})
    launchers = start_job(own_network, [case], tmp_path, nproc=(1, 1), port=28700)
    await_ranks(tmp_path, "memory-damaged-1", 2, launchers)
    pid = int((tmp_path / "running-memory-damaged-1-1").read_text())
    own_network[1].shell(f"kill -KILL {pid}")
    found = [each["memory-damaged"] for each in finish_job(own_network, [case], launchers)]
    for (value,) in (each["values"].values() for each in found):
        assert (value["attempt"], value["of"]) == (2, 2)
        assert value["first"] >= 3
    assert "a state in the memory of h1 is damaged and is skipped" in launchers[1].err


@pytest.mark.full
def test_memory_refuses_parts_that_a_lost_node_would_take_with_it(
    network: Network, tmp_path: Path
) -> None:
    """Of a sharded model or optimizer, no other node has a copy, which one sentence says on all ranks."""
    case = Case(name="parts", what="resume", fields={"nnodes": 2})
    launchers = start_job(network, [case], tmp_path, nproc=(1, 1), port=28700)
    for found in finish_job(network, [case], launchers):
        assert found["parts"]["values"], found
        for errors in found["parts"]["values"].values():
            assert "a node that is lost, there is no copy" in errors["FSDP"], errors
            assert "of 'optimizer', only the node of rank 0" in errors["ZeRO"], errors


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "name"),
    [("cable", "two"), ("cable and rank", "two"), ("killed", "two"), ("killed", "memory")],
)
def test_a_node_that_has_lost_node_0_joins_again(
    own_network: Network, tmp_path: Path, how: str, name: str
) -> None:
    """Node 0 may have lost it, too, or be started again, and one of its own ranks may have failed."""
    timeouts = {"collective": 60, "grace": 3, "node_loss": 3}
    fields = {"nnodes": 2, "retry": RETRY, "timeouts": timeouts}
    case = Case(name=name, what="resume", fields=fields)
    launchers = start_job(own_network, [case], tmp_path, nproc=(1, 1), port=28700)
    await_ranks(tmp_path, f"{name}-1", 2, launchers)
    first, second = launchers
    lost = "node 0 ('h0', rank 0 of world_size 2) was lost"
    if how == "cable and rank":
        lost = "rank 1 (node 1 'h1', local rank 0, world_size 2) was killed by SIGKILL"

    def has_left() -> bool:
        return lost in second.err and "Joining again" in second.err

    if how != "killed":
        own_network[1].unplug()
        if "rank" in how:
            pid = int((tmp_path / "running-two-1-1").read_text())
            own_network[1].shell(f"kill -KILL {pid}")
        scripts.wait_until(has_left, otherwise=lambda: second.err)
        first.await_said("trying again")
        own_network[1].plug_in()
        attempt = 2
    else:
        os.kill(first.pid, signal.SIGKILL)
        scripts.wait_until(has_left, otherwise=lambda: second.err)
        for each in tmp_path.glob(f"running-{name}-1-*"):
            each.unlink()
        again = replace(case, fields={**fields, "run_dir": str(tmp_path / "again")})
        first = start_node(own_network, 0, [again], tmp_path, (1, 1), ENDPOINT)
        attempt = 1
    found = [each[name] for each in finish_job(own_network, [case], [first, second])]
    assert [each.get("whole") for each in found] == [None, None], (first.err, second.err)
    for (value,) in (each["values"].values() for each in found):
        assert (value["attempt"], value["of"]) == (attempt, 2)
        assert value["first"] > 0  # the step of the kill may not be saved


@pytest.mark.full
@pytest.mark.parametrize("attempts", [1, 3])
def test_a_node_that_has_lost_node_0_before_the_first_attempt_joins_again(
    own_network: Network, tmp_path: Path, attempts: int
) -> None:
    """With restarts; without them, its exit code asks the scheduler for another start."""
    case = Case(name="three", fields={"nnodes": 3, "retry": {**RETRY, "attempts": attempts}})

    def start(node: int) -> Launcher:
        return start_node(own_network, node, [case], tmp_path, (1, 1, 1), ENDPOINT)

    first, second = start(0), start(1)
    first.await_said("2 of 3 nodes reached")
    os.kill(first.pid, signal.SIGKILL)
    # A kernel resets the connection if something was unread.
    why = r"(its launcher has ended|Connection reset by peer)\."
    lost = rf"node 0 \('h0'\) was lost, before attempt 1: {why}"
    if attempts == 1:
        (result,) = finish_job(own_network, [case], [second])
        assert re.fullmatch(lost, result["three"]["text"]), result
        assert result["three"]["code"] == AGAIN
        return
    again = re.compile(f"{lost} Joining again")
    scripts.wait_until(lambda: again.search(second.err), otherwise=lambda: second.err)
    launchers = [start(0), second, start(2)]
    for result in finish_job(own_network, [case], launchers):
        assert "error" not in result["three"], result


@pytest.mark.full
def test_an_unfit_replacement_is_refused_and_the_others_wait_for_another(
    network: Network, tmp_path: Path
) -> None:
    """Each unfit one is refused by name before its ranks start; the first fit one resumes the job.

    One of them has the host and pid of the lost launcher, as a restarted container would.
    """
    data, checkpoints = tmp_path / "mounted" / "data", tmp_path / "checkpoints-two"
    data.mkdir(parents=True)
    fields = {"nnodes": 2, "retry": RETRY, "data_paths": {"train": str(data)}}
    case = Case(name="two", what="resume", fields=fields)
    host = network[1]

    def start(node: int, case: Case = case) -> Launcher:
        return start_node(network, node, [case], tmp_path, (1, 1), ENDPOINT)

    def refused(case: Case = case) -> dict[str, Any]:
        newcomer = start(1, case)
        assert newcomer.end() == 0, newcomer.err
        return newcomer.results()["two"]

    def require_told(words: str) -> None:
        scripts.wait_until(
            lambda: words in first.err, otherwise=lambda: first.err[-500:], within_s=60
        )

    first, second = start(0), start(1)
    await_ranks(tmp_path, "two-1", 2, [first, second])
    numbers = Path(f"/proc/{second.pid}/status").read_text().partition("NSpid:")[2].split()
    pid = int(numbers[1])  # its pid on its host
    os.kill(second.pid, signal.SIGKILL)
    second.wait_for_end()
    require_nothing_left(network, besides=[0])
    require_told("node 1 ('h1', rank 1 of world_size 2) was lost")

    host.shell(f"mount -t tmpfs elsewhere {data.parent}")
    said = refused()
    assert (said["error"], said["kind"]) == ("PreflightError", "mount"), said
    assert "data path 'train' is not ready on h1" in said["text"]
    require_told("h1 (10.77.0.2), which came to replace a node, is refused: data path 'train'")
    host.shell(f"umount -l {data.parent}")

    said = refused(replace(case, of_node={1: {"seed": 5}}))
    assert (said["error"], said["code"]) == ("ConfigError", 78), said
    words = "is refused: the nodes of this job do not agree: seed"
    require_told(f"h1 (10.77.0.2), which came to replace a node, {words}")

    refused(replace(case, leaves={1: "stays"}))
    words = (
        "node 1 ('h1') has not reported within 10 s whether it sees the checkpoints of this job:"
    )
    require_told(f"{words} {checkpoints}")

    host.shell(f"mount -t tmpfs elsewhere {checkpoints}")
    host.shell(f"echo {pid - 1} > /proc/sys/kernel/ns_last_pid")
    blind = start(1)
    assert f"\t{pid}\n" in Path(f"/proc/{blind.pid}/status").read_text()
    assert blind.end() == 0, blind.err
    said = blind.results()["two"]
    words = (
        f"{checkpoints} is missing on node 1 ('h1'), or is not the same storage as on node 0 ('h0')"
    )
    assert (said["error"], said["kind"]) == ("PreflightError", "mount"), said
    assert words in said["text"]
    require_told(words)
    host.shell(f"umount -l {checkpoints}")

    assert not list(tmp_path.glob("running-two-2-*"))
    assert not [path.name for path in checkpoints.iterdir() if path.name.startswith(".ddpsafe-")]
    for (value,) in (
        each["two"]["values"].values() for each in finish_job(network, [case], [first, start(1)])
    ):
        assert (value["attempt"], value["of"]) == (2, 2)
        assert value["first"] > 0  # the step of the kill may not be saved


@pytest.mark.full
def test_a_replacement_that_cannot_reach_node_0_costs_no_attempt(
    own_network: Network, tmp_path: Path
) -> None:
    """It reaches only the endpoint and reports that; the next replacement resumes the job."""
    case = Case(name="two", what="resume", fields={"nnodes": 2, "retry": RETRY})

    def start(node: int) -> Launcher:
        return start_node(own_network, node, [case], tmp_path, (1, 1, 1), "h0:29500")

    first, second = start(0), start(1)
    await_ranks(tmp_path, "two-1", 2, [first, second])
    own_network[0].refuse_from(own_network[2], how="reset")
    own_network[1].power_off()
    third = start(2)
    assert third.end() == 0, third.err
    said = third.results()["two"]
    assert (said["error"], said["kind"]) == ("PreflightError", "startup-network"), said
    assert "h2 reached no store of the ranks on node 0" in said["text"]
    own_network[0].run("nft", "flush", "ruleset")
    found = finish_job(own_network, [case], [first, start(2)], besides=[1])
    words = (
        "h2 (10.77.0.3), which came to replace a node, is refused: h2 reached no store of the ranks"
    )
    assert words in first.err, first.err
    for (value,) in (each["two"]["values"].values() for each in found):
        assert (value["attempt"], value["of"]) == (2, 2)


@pytest.mark.full
@pytest.mark.parametrize("name", ["more", "memory"])
def test_the_others_continue_without_a_lost_node_and_accept_a_new_one(
    network: Network, tmp_path: Path, name: str
) -> None:
    """With ``min_nodes`` two of three continue; a node that arrives while they train waits for a failure."""
    rendezvous = {"min_nodes": 2, "last_call": 3}
    fields = {"nnodes": 3, "retry": RETRY, "rendezvous": rendezvous}
    case = Case(name=name, what="resume", fields=fields)
    nproc = (1, 1, 1)
    launchers = [start_node(network, node, [case], tmp_path, nproc, ENDPOINT) for node in (0, 1)]
    await_ranks(tmp_path, f"{name}-1", 2, launchers)
    launchers.append(start_node(network, 2, [case], tmp_path, nproc, ENDPOINT))
    launchers[2].await_said("h2 waits, and joins at the next failure")
    assert not list(tmp_path.glob(f"running-{name}-2-*"))
    os.kill(launchers.pop(1).pid, signal.SIGKILL)
    killed_s = time.time()
    await_ranks(tmp_path, f"{name}-2", 2, launchers)
    # torch's rendezvous alone would wait for the lost node's heartbeat, 10 to 15 s.
    require_in_time(time.time() - killed_s, 9.0, "the next attempt trains")
    found = finish_job(network, [case], launchers)
    for (value,) in (each[name]["values"].values() for each in found):
        assert (value["attempt"], value["of"]) == (2, 2)
        assert value["first"] > 0  # the step of the kill may not be saved


@pytest.mark.full
def test_a_spare_node_ends_well_with_the_job(network: Network, tmp_path: Path) -> None:
    """It never had a rank: its launch returns no values and raises nothing."""
    fields = {"nnodes": 2, "retry": RETRY}
    case = Case(name="spare", what="held", fields=fields, after={2: "running-spare-1-1"})
    launchers = start_job(network, [case], tmp_path, nproc=(1, 1, 1))
    launchers[2].await_said("h2 waits, and joins")
    (tmp_path / "release-spare").touch()
    found = finish_job(network, [case], launchers)
    assert [each["spare"]["values"] for each in found] == [{"0": 0}, {"1": 1}, {}]


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_preempted_launcher_stops_all_ranks_at_the_same_step(
    network: Network, tmp_path: Path, victim: int
) -> None:
    """SIGTERM to any launcher: every rank saves that step, and the next start continues from it."""
    fields = {"timeouts": {"collective": 60, "grace": 3}}
    cases = [Case(name="job", what="resume", fields=fields)]
    launchers = start_job(network, cases, tmp_path, nproc=(2, 2))
    await_ranks(tmp_path, "job-1", 4, launchers)
    os.kill(launchers[victim].pid, signal.SIGTERM)
    sent_s = time.time()
    said = [each["job"] for each in finish_job(network, cases, launchers)]
    require_the_same(said)
    assert (said[0]["error"], said[0]["code"]) == ("PreemptedError", AGAIN)
    for each in said:
        require_in_time(each["at"] - sent_s, 5.0, "all have stopped")
    values = {rank: value for each in said for rank, value in each["values"].items()}
    assert sorted(values) == ["0", "1", "2", "3"]
    (stopped,) = {value["last"] for value in values.values()}

    launchers = start_job(network, cases, tmp_path, nproc=(2, 2))
    for each in finish_job(network, cases, launchers):
        assert each["job"].get("error") is None, each
        for value in each["job"]["values"].values():
            assert value["first"] == stopped
    require_nothing_left(network)


SCRIPT: Final = """
    from pathlib import Path
    import ddpsafe
    import stop_programs as programs

    if __name__ == "__main__":
        ddpsafe.launch(programs.train_in_step, (Path({folder!r}),))
        print("the code after launch has run")
"""


@pytest.mark.full(but=["0"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_warning_to_one_launcher_of_run_stops_the_ranks_of_all_nodes(
    network: Network, tmp_path: Path, victim: int
) -> None:
    """Schedulers send SIGUSR1 before they end a job; the script calls `launch` in each rank."""
    script = scripts.write(tmp_path, "script.py", SCRIPT.format(folder=str(tmp_path)))
    options = ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-endpoint=h0:{28670 + victim}"]
    command = ["-m", "ddpsafe", "run", *options, f"--run-dir={tmp_path}/run", str(script)]
    launchers = [Launcher(network[node], command, scripts.FORKING) for node in (0, 1)]
    await_files(launchers, tmp_path, "ready-*", 2)
    os.kill(launchers[victim].pid, signal.SIGUSR1)
    assert [each.end() for each in launchers] == [AGAIN, AGAIN], [each.err for each in launchers]
    saved = [path.read_text() for path in tmp_path.glob("saved-*")]
    assert len(saved) == 2
    assert len(set(saved)) == 1
    assert not [line for each in launchers for _, line in each.lines if "after launch" in line]
    require_nothing_left(network)


# Many attempts.


TWELVE: Final = retrying(12, "killed", "ValueError", no_progress=None)


@pytest.mark.full
@pytest.mark.parametrize(
    ("what", "culprit", "start_method", "good"),
    [
        pytest.param("kill", 0, "forkserver", 11, marks=pytest.mark.soak),
        pytest.param("kill", 1, "forkserver", 11, marks=pytest.mark.soak),
        ("raise", 1, "forkserver", 11),
        pytest.param("kill", 1, "spawn", 4, marks=pytest.mark.soak),
        pytest.param("raise", 0, "spawn", 4, marks=pytest.mark.soak),
    ],
)
def test_ten_failed_attempts_are_followed_by_a_successful_one(
    network: Network, tmp_path: Path, what: str, culprit: int, start_method: str, good: int
) -> None:
    """With gloo, whichever node's rank is killed or raises; all ranks know the number of the attempt."""
    fields = {"retry": TWELVE, "start_method": start_method}
    case = Case(name="kills", what=f"{what}-until-{good}", rank=culprit, fields=fields)
    nodes = run_job(network, [case], tmp_path, nproc=(1, 1))
    for node, results in enumerate(nodes):
        assert results["kills"]["values"] == {str(node): node}
        assert results["kills"]["attempts"] == good
    assert len(list(tmp_path.glob("fault-kills-*"))) == good


# A node is taken back, and the others go on without it.


FAULT_FOLLOWS_S: Final = 1.2
"""A second SIGTERM within a second counts as the same one."""

ELASTIC: Final[dict[str, Any]] = {
    "nnodes": 3,
    "rendezvous": {"min_nodes": 2, "last_call": 5},
    "retry": retrying(3, "peer-lost"),
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
