"""A launcher or host of several is lost: the others name it, end their ranks, and exit with 75. An outage ends nothing."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import scripts
from hosts import Host, Network, find_obstacle, require
from machine import require_in_time
from nodes_kit import (
    Case,
    Launcher,
    await_files,
    finish_job,
    require_nothing_left,
    require_the_same,
    retrying,
    start_job,
)

from ddpsafe._limits import LOSS_S

pytestmark = pytest.mark.root

AGAIN: Final = 75
"""Exit code that asks for another start: EX_TEMPFAIL."""

NODE_LOSS_S: Final = 6
"""How long a node may be away in the tests of losses; 30 s by default."""

FAULT_LASTS_S: Final = 2
FAULT_BREAKS_STORE_S: Final = 12
"""torch's rendezvous asks its store every 5 s, and waits 5 s for the answer."""

FAULT_FOLLOWS_S: Final = 1.2
"""A second SIGTERM within a second counts as the same one."""


LONG: Final = Case(
    name="long",
    what="long",
    fields={"timeouts": {"collective": 60, "grace": 3, "node_loss": NODE_LOSS_S}},
)


def start_training(network: Network, folder: Path) -> list[Launcher]:
    """Start a long training with two ranks on each of two hosts; wait until all of them train."""
    launchers = start_job(network, [LONG], folder, nproc=[2, 2])
    await_files(launchers, folder, "running-long-1-*", 4)
    return launchers


def require_named(said: dict[str, Any], *, node: int, from_s: float, within_s: float) -> None:
    """Fail unless a launcher has named a lost node in time."""
    ranks = {0: "ranks 0 and 1", 1: "ranks 2 and 3"}[node]
    assert (said["error"], said["code"], said["kind"]) == ("NodeLostError", AGAIN, "peer-lost")
    assert f"node {node} ('h{node}', {ranks} of world_size 4) was lost" in said["text"]
    require_in_time(said["at"] - from_s, within_s, "the loss is named")


@pytest.mark.full(but=["1"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_launcher_is_named_at_once(network: Network, tmp_path: Path, victim: int) -> None:
    """The other launcher names its node within a second, and no rank of either is left."""
    launchers = start_training(network, tmp_path)
    os.kill(launchers[victim].pid, signal.SIGKILL)
    killed_s = launchers[victim].wait_for_end()
    launchers[1 - victim].end()
    said = launchers[1 - victim].results()["long"]
    require_named(said, node=victim, from_s=killed_s, within_s=1.0)
    # The kernel resets the connection of a process that has not read all of it.
    assert said["text"].endswith(("its launcher has ended.", "Connection reset by peer.")), said
    require_nothing_left(network)


LOSSES: Final[dict[str, Callable[[Network, int], None]]] = {
    "power": lambda network, victim: network[victim].power_off(),
    "cable": lambda network, victim: network[victim].unplug(),
    "one way": lambda network, victim: network[victim].drop_all_from(network[1 - victim]),
}


@pytest.mark.full(but=["power-0"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", LOSSES)
def test_a_host_that_vanishes_is_named_within_seconds(
    own_network: Network, tmp_path: Path, how: str, victim: int
) -> None:
    """No packet announces it: each side that still runs warns of the other within 5 s, and then ends."""
    launchers = start_training(own_network, tmp_path)
    before_s = time.time()
    LOSSES[how](own_network, victim)
    there = [1 - victim] if how == "power" else [0, 1]
    for node in there:
        launchers[node].await_said(f"node {1 - node} ('h{1 - node}') cannot be reached")
        require_in_time(time.time() - before_s, 5.0, "the other node is warned of")
    for node in there:
        launchers[node].end()
        said = launchers[node].results()["long"]
        require_named(said, node=1 - node, from_s=before_s, within_s=NODE_LOSS_S + 5.0)
    require_nothing_left(own_network, besides=[victim] if how == "power" else [])


@pytest.mark.full
def test_node_0_may_be_lost_once_all_ranks_have_returned(
    own_network: Network, tmp_path: Path
) -> None:
    """What is left is the work of one script on its own node: it has its time, and its result stands."""
    case = Case(name="job", what="upload", rank=1)
    os.mkfifo(tmp_path / "wait-job")
    launchers = start_job(own_network, [case], tmp_path, nproc=[1, 1])

    launchers[1].await_said("rank 1 has returned, but its process")
    os.kill(launchers[0].pid, signal.SIGKILL)
    launchers[1].await_said("node 0 ('h0') was lost after all ranks of the job had returned")
    (tmp_path / "wait-job").open("w").close()
    launchers[1].end()
    assert launchers[1].results()["job"]["values"] == {"1": 1}, launchers[1].err
    require_nothing_left(own_network)


HELD: Final = Case(name="held", what="held", fields={"timeouts": {"collective": 60}})
"""A training that continues until the test creates a file."""


@pytest.mark.full
def test_a_launcher_that_ends_while_its_host_is_away_is_lost_once_that_answers(
    own_network: Network, tmp_path: Path
) -> None:
    """The ranks do not communicate meanwhile: a refused dial shows it, long before node_loss."""
    case = Case(name="job", what="stubborn", fields={"timeouts": {"grace": 3}})
    launchers = start_job(own_network, [case], tmp_path, nproc=[1, 1])
    await_files(launchers, tmp_path, "running-job-1-*", 2)

    def end_node_0() -> None:
        launchers[1].await_said("node 0 ('h0') cannot be reached")
        os.kill(launchers[0].pid, signal.SIGKILL)
        launchers[0].wait_for_end()

    cut(own_network, 0, until=end_node_0)
    back_s = time.time()
    launchers[1].end()
    said = launchers[1].results()["job"]
    assert (said["error"], said["code"]) == ("NodeLostError", AGAIN)
    assert said["text"].endswith("Connection refused."), said["text"]
    require_in_time(said["at"] - back_s, 8.0, "the loss is named")
    require_nothing_left(own_network)


def start_held_training(network: Network, folder: Path) -> tuple[list[Case], list[Launcher]]:
    """Start it on two hosts."""
    launchers = start_job(network, [HELD], folder, nproc=[2, 2])
    await_files(launchers, folder, "running-held-1-*", 4)
    return [HELD], launchers


def require_no_failure(
    network: Network, folder: Path, cases: list[Case], launchers: list[Launcher]
) -> None:
    """Let a training end; fail unless it succeeded in the first attempt."""
    (folder / "release-held").touch()
    for results in finish_job(network, cases, launchers):
        assert results["held"].get("attempts") == 1, results


def cut(network: Network, node: int, *, until: Callable[[], object]) -> None:
    """Let no packet pass to or from a node, until something holds."""
    network[node].cut_off("eth0")
    until()
    network.switch.run("nft", "delete", "table", "bridge", f"off{node}")


def await_said(launchers: list[Launcher], what: str) -> None:
    """Wait until each of two launchers has said something about the node of the other."""
    for node, launcher in enumerate(launchers):
        launcher.await_said(f"node {1 - node} ('h{1 - node}') {what}")


@pytest.mark.full(but=["0"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_longer_network_outage_is_not_a_loss(
    network: Network, tmp_path: Path, victim: int
) -> None:
    """Both launchers warn, and again when they reach each other; training continues."""
    cases, launchers = start_held_training(network, tmp_path)
    cut(network, victim, until=lambda: await_said(launchers, "cannot be reached"))
    await_said(launchers, "can be reached again")
    for launcher in launchers:
        assert "its host or the network does not answer" in launcher.err
        away_s = re.findall(r"can be reached again after (\d+) s", launcher.err)
        assert [float(each) > LOSS_S for each in away_s] == [True], launcher.err
    require_no_failure(network, tmp_path, cases, launchers)


@pytest.mark.full
def test_an_attempt_after_an_outage_takes_place(network: Network, tmp_path: Path) -> None:
    """What else connects the launchers does not survive it, and is connected again."""
    retry = retrying(2, "killed")
    fields = {"timeouts": {"collective": 60}, "retry": retry}
    case = Case(name="held", what="held", fields=fields)
    launchers = start_job(network, [case], tmp_path, nproc=[1, 1])
    await_files(launchers, tmp_path, "running-held-1-*", 2)
    cut(network, 1, until=lambda: time.sleep(FAULT_BREAKS_STORE_S))
    await_said(launchers, "can be reached again")
    network[0].shell(f"kill -KILL {int((tmp_path / 'running-held-1-0').read_text())}")
    await_files(launchers, tmp_path, "running-held-2-*", 2)
    (tmp_path / "release-held").touch()
    for results in finish_job(network, [case], launchers):
        assert results["held"].get("attempts") == 2, results


def queued_bytes(host: Host, port: int) -> dict[str, int]:
    """Return what each open connection of a host with that port, of either side, has not delivered."""
    words = map(str.split, host.run("ss", "-Htn", "state", "established").splitlines())
    return {
        f"{own} {other}": int(queued)
        for _, queued, own, other in words
        if f"{port}" in {own.rpartition(":")[2], other.rpartition(":")[2]}
    }


@pytest.mark.full
@pytest.mark.parametrize("unaware", [0, 1])
def test_a_node_that_has_not_seen_an_outage_does_not_take_it_for_the_end_of_the_other(
    own_network: Network, tmp_path: Path, unaware: int
) -> None:
    """The other has ended its side of the connection meanwhile, which must not look like its own end."""
    port = 29777
    launchers = start_job(own_network, [HELD], tmp_path, nproc=[1, 1], port=port)
    await_files(launchers, tmp_path, "running-held-1-*", 2)
    (before,) = queued_bytes(own_network[unaware], port)
    own_network[1].unplug()
    scripts.wait_until(lambda: queued_bytes(own_network[unaware], port).get(before, 1), every_s=0.1)
    os.kill(launchers[unaware].pid, signal.SIGSTOP)
    try:
        aware = launchers[1 - unaware]
        aware.await_said("cannot be reached (Connection timed out)")
        own_network[1].plug_in()
        # Its kernel knows by now what it will tell the launcher.
        scripts.wait_until(
            lambda: before not in queued_bytes(own_network[unaware], port), every_s=0.1
        )
    finally:
        os.kill(launchers[unaware].pid, signal.SIGCONT)
    aware.await_said("can be reached again")
    require_no_failure(own_network, tmp_path, [HELD], launchers)


@pytest.mark.full
@pytest.mark.parametrize("then", ["drop", "reset"])
def test_training_ends_as_usual_after_a_firewall_has_forgotten_its_connections(
    tmp_path: Path, then: str
) -> None:
    """The launchers' and those to the ranks' store; gloo has a network of its own."""
    require(find_obstacle())
    opens = "tcp flags & (fin|syn|rst|ack) == syn accept"
    with Network(2, nics={"eth0": "10.77.0", "eth1": "10.78.0"}) as network:
        network[0].firewall("iifname eth1 accept", opens, otherwise=then)
        on_eth1 = {"GLOO_SOCKET_IFNAME": "eth1"}
        case = replace(HELD, env={0: on_eth1, 1: on_eth1})
        launchers = start_job(network, [case], tmp_path, nproc=[1, 1])
        await_files(launchers, tmp_path, "running-held-1-*", 2)
        network[0].forget_connections()
        launchers[1].await_said("node 0 ('h0') can be reached again")
        require_no_failure(network, tmp_path, [case], launchers)
    for text in ("Traceback", "had returned"):
        assert text not in launchers[1].err


@pytest.mark.full
@pytest.mark.parametrize("culprit", [1, 3])
def test_a_rank_that_fails_during_an_outage_ends_the_job_at_once(
    own_network: Network, tmp_path: Path, culprit: int
) -> None:
    """Its node does not wait for the network, and shows how the rank has ended."""
    _, launchers = start_held_training(own_network, tmp_path)
    node = culprit // 2
    own_network[1].unplug()
    launchers[node].await_said(f"node {1 - node} ('h{1 - node}') cannot be reached")
    pid = int((tmp_path / f"running-held-1-{culprit}").read_text())
    failed_s = time.time()
    own_network[node].shell(f"kill -KILL {pid}")
    launchers[node].end()
    said = launchers[node].results()["held"]
    require_in_time(said["at"] - failed_s, 5.0 + 3.0, "the failure ends the job")
    assert (said["error"], said["rank"]) == ("RankKilledError", culprit), said


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_launcher_causes_a_warning_and_is_not_lost(
    network: Network, tmp_path: Path, victim: int
) -> None:
    """Its ranks keep training; the log names it after 15 s, and again when it resumes."""
    cases, launchers = start_held_training(network, tmp_path)
    other = launchers[1 - victim]
    os.kill(launchers[victim].pid, signal.SIGSTOP)
    try:
        other.await_said(f"node {victim} ('h{victim}'): its launcher has not responded for 15 s")
    finally:
        os.kill(launchers[victim].pid, signal.SIGCONT)
    other.await_said(f"node {victim} ('h{victim}'): its launcher responds again")
    assert "has not responded" not in launchers[victim].err
    require_no_failure(network, tmp_path, cases, launchers)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_under_a_stopped_launcher_is_named_when_the_launcher_resumes(
    network: Network, tmp_path: Path, victim: int
) -> None:
    """Only that launcher knows how its rank ended, and no other rank is blamed."""
    cases, launchers = start_held_training(network, tmp_path)
    culprit = 2 * victim + 1
    pid = int((tmp_path / f"running-held-1-{culprit}").read_text())
    os.kill(launchers[victim].pid, signal.SIGSTOP)
    network[victim].shell(f"kill -KILL {pid}")
    time.sleep(FAULT_LASTS_S)
    os.kill(launchers[victim].pid, signal.SIGCONT)
    said = [each["held"] for each in finish_job(network, cases, launchers)]
    require_the_same(said)
    assert (said[0]["error"], said[0]["rank"], said[0]["code"]) == ("RankKilledError", culprit, 137)


@pytest.mark.full
@pytest.mark.parametrize("fails", [False, True])
def test_a_node_can_be_ended_while_the_launcher_of_node_0_is_stopped(
    network: Network, tmp_path: Path, *, fails: bool
) -> None:
    """It logs what it knows and which node it waits for; Ctrl-C ends it at once, and node 0 later."""
    _, launchers = start_held_training(network, tmp_path)
    stopped, other = launchers
    os.kill(stopped.pid, signal.SIGSTOP)

    try:
        if fails:
            (tmp_path / "fail-held-3").touch()
            other.await_said("rank 3 has failed: ValueError: bad batch; node 0 ('h0') decides what")
        os.kill(other.pid, signal.SIGTERM)
        other.await_said("SIGTERM: waiting for node 0 ('h0'), which decides for all nodes")
        sent_s = time.time()
        os.kill(other.pid, signal.SIGINT)
        os.kill(other.pid, signal.SIGINT)
        assert other.end() == -signal.SIGINT
        require_in_time(time.time() - sent_s, 10, "the node has ended")
        assert "SIGINT on node 1 ('h1'); no rank of this node is left running" in other.err
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    code = stopped.end()
    # Its launcher may act on the first message before it reads the others.
    if fails and code == 0:
        said = stopped.results()["held"]
        assert (said["error"], said["rank"]) == ("RankRaisedError", 3), said
    else:
        assert code in (-signal.SIGTERM, -signal.SIGINT), stopped.lines
        name = signal.Signals(-code).name
        assert f"{name} on node 1 ('h1'); no rank is left running" in stopped.err
    require_nothing_left(network)


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_each_of_three_nodes_reports_whose_network_probably_failed(
    own_network: Network, tmp_path: Path, victim: int
) -> None:
    """The others name the node that is cut off, and that node reports its own network as the likely cause."""
    launchers = start_job(own_network, [LONG], tmp_path, nproc=[1, 1, 1])
    await_files(launchers, tmp_path, "running-long-1-*", 3)
    before_s = time.time()
    own_network[victim].unplug()
    said = [each["long"] for each in finish_job(own_network, [LONG], launchers)]
    for node, each in enumerate(said):
        assert (each["error"], each["code"]) == ("NodeLostError", AGAIN), each
        limit_s = NODE_LOSS_S + (5.0 if node != victim else 15.0)
        require_in_time(each["at"] - before_s, limit_s, "the loss is named")
        if node != victim:
            assert (
                f"node {victim} ('h{victim}', rank {victim} of world_size 3) was lost"
                in each["text"]
            )
    own = "the network of this one" if victim == 0 else "the network of this node is the cause"
    assert own in said[victim]["whole"], said[victim]["whole"]


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_second_request_to_stop_ends_ranks_that_still_save(
    network: Network, tmp_path: Path, victim: int
) -> None:
    """The first SIGTERM lets them save; a second one on any node means not to wait for that."""
    cases = [Case(name="job", what="stubborn")]
    launchers = start_job(network, cases, tmp_path, nproc=[2, 2])

    await_files(launchers, tmp_path, "running-job-1-*", 4)
    os.kill(launchers[victim].pid, signal.SIGTERM)
    await_files(launchers, tmp_path, "stopping-job-*", 4)
    time.sleep(FAULT_FOLLOWS_S)
    sent_s = time.time()
    os.kill(launchers[victim].pid, signal.SIGTERM)
    assert [launcher.end() for launcher in launchers] == [-signal.SIGTERM, -signal.SIGTERM]
    require_in_time(time.time() - sent_s, 3 + 3, "all ranks have ended")
    require_nothing_left(network)


@pytest.mark.full
@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_signal_to_one_launcher_ends_all_launchers(
    network: Network, tmp_path: Path, signum: int, code: int
) -> None:
    """As on one node: the ranks of all nodes end, then each launcher ends as the signal requires."""
    launchers = start_training(network, tmp_path)
    os.kill(launchers[1].pid, signum)
    assert [launcher.end() for launcher in launchers] == [code, code]
    for launcher in launchers:
        name = signal.Signals(signum).name
        assert f"{name} on node 1 ('h1'); no rank is left running" in launcher.err
    require_nothing_left(network)


@pytest.mark.full
def test_a_signal_while_ranks_are_ending_takes_effect_on_all_nodes(
    network: Network, tmp_path: Path
) -> None:
    """As on one node: a rank that has returned but still has a thread is ended, and its result is dropped."""
    fields = {"timeouts": {"grace": 4}}
    launchers = start_job(
        network, [Case(name="job", what="linger", rank=0, fields=fields)], tmp_path, nproc=[1, 1]
    )
    launchers[0].await_said("rank 0 has returned, but its process")
    os.kill(launchers[1].pid, signal.SIGINT)
    assert [launcher.end() for launcher in launchers] == [-signal.SIGINT, -signal.SIGINT]
    for launcher in launchers:
        assert "SIGINT on node 1 ('h1'); no rank is left running" in launcher.err
    require_nothing_left(network)


@pytest.mark.full
@pytest.mark.parametrize("how", ["cable", "killed"])
def test_a_node_that_loses_node_0_reports_what_its_own_rank_raised(
    own_network: Network, tmp_path: Path, how: str
) -> None:
    """Its exit code is the error's: another start would end with the same one."""
    _, launchers = start_held_training(own_network, tmp_path)
    first, other = launchers
    if how == "cable":
        own_network[1].unplug()
    else:
        os.kill(first.pid, signal.SIGSTOP)
    (tmp_path / "fail-held-3").touch()
    if how == "killed":
        other.await_said("rank 3 has failed: ValueError: bad batch")
        os.kill(first.pid, signal.SIGKILL)
    other.end()
    said = other.results()["held"]
    assert [said[key] for key in ("error", "rank", "code", "cause")] == [
        "RankRaisedError",
        3,
        1,
        "ValueError",
    ], said["whole"]
    lost = "node 0 ('h0', ranks 0 and 1 of world_size 4) was lost"
    assert any(lost in line for line in said["details"]), said["whole"]
    first.end()
    if how == "cable":  # it does not know of that error, and waits for timeouts.node_loss
        require_named(first.results()["held"], node=1, from_s=said["at"], within_s=30.0 + 10.0)
    require_nothing_left(own_network)


def terminate(*launchers: Launcher) -> None:
    """Send SIGTERM to every process of each launcher, and to the launcher itself last."""
    for launcher in launchers:
        for process in psutil.Process(launcher.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # ended with the previous one
                process.terminate()
        os.kill(launcher.pid, signal.SIGTERM)


@pytest.mark.full(but=["0"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_sigterm_to_every_process_of_a_job_counts_as_one_to_the_launchers(
    network: Network, tmp_path: Path, first: int
) -> None:
    """A scheduler or a cgroup sends it so: ranks die before their launchers react, and are not blamed."""
    launchers = start_training(network, tmp_path)
    terminate(launchers[first], launchers[1 - first])
    ends = [launcher.end() for launcher in launchers]
    assert ends == [-signal.SIGTERM, -signal.SIGTERM], [each.lines[-1:] for each in launchers]
    for launcher in launchers:
        assert "no rank is left running" in launcher.err
    require_nothing_left(network)


@pytest.mark.full
def test_a_sigterm_to_every_process_of_a_job_that_saves_preempts_it(
    network: Network, tmp_path: Path
) -> None:
    """Ranks that call `stop_requested` survive it and stop at one step, as if only launchers received it."""
    case = Case(name="job", what="resume", fields={"timeouts": {"collective": 60, "grace": 3}})
    launchers = start_job(network, [case], tmp_path, nproc=[2, 2])
    await_files(launchers, tmp_path, "running-job-1-*", 4)
    terminate(*reversed(launchers))
    said = [each["job"] for each in finish_job(network, [case], launchers)]
    require_the_same(said)
    assert (said[0]["error"], said[0]["code"]) == ("PreemptedError", AGAIN), said[0]
    values = {rank: value for each in said for rank, value in each["values"].items()}
    assert len({value["last"] for value in values.values()}) == 1


LAUNCHERS: Final = "eth0"
RANKS: Final = "eth1"
FAULT_TENTH_S: Final = 0.1
RETRY: Final = retrying(5, "peer-lost", "killed", "network", "startup-network", no_progress=None)
CASE: Final = Case(
    name="any",
    what="kill-until-2",
    rank=1,
    fields={
        "nnodes": 3,
        "retry": RETRY,
        "env": {"GLOO_SOCKET_IFNAME": RANKS},
        "timeouts": {"collective": 60, "grace": 3},
    },
)
"""Rank 1 is killed once, so that the nodes join twice."""


@contextlib.contextmanager
def filtered(host: Host, directions: list[str], *, verdict: str) -> Iterator[None]:
    """Treat packets of the launchers' network so, in one direction or in both."""
    rules = "".join(
        f"chain {hook} {{ type filter hook {hook} priority 0; {way} {LAUNCHERS} {verdict}; }}\n"
        for hook, way in zip(("input", "output"), ("iifname", "oifname"), strict=True)
        if hook in directions
    )
    host.run("nft", "-f", "-", given=f"table inet outage {{\n{rules}}}\n")
    try:
        yield
    finally:
        host.run("nft", "delete", "table", "inet", "outage")


@contextlib.contextmanager
def paused(host: Host, directions: list[str]) -> Iterator[None]:
    """Stop all processes of a host, whose kernel still answers."""
    del directions
    host.shell("kill -STOP -1")
    try:
        yield
    finally:
        host.shell("kill -CONT -1")


def pass_time(parts: int) -> None:
    """Let so many tenths of a second pass."""
    for _ in range(parts):
        time.sleep(FAULT_TENTH_S)


OUTAGES: Final = {
    "away": partial(filtered, verdict="drop"),
    "reset": partial(filtered, verdict="meta l4proto tcp reject with tcp reset"),
    "lossy": partial(filtered, verdict="numgen random mod 100 < 40 drop"),
    "paused": paused,
}


@pytest.mark.full
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 40))]
)
@pytest.mark.parametrize("outage", OUTAGES)
def test_an_outage_at_any_moment_ends_nothing(tmp_path: Path, outage: str, seed: int) -> None:
    """While nodes join, train, and join again; of any host, in both directions or one."""
    require(find_obstacle())
    chance = random.Random(seed)
    directions = ["input", "output"]
    if chance.random() < 2 / 3:
        directions.remove(chance.choice(directions))
    after, lasts = chance.randrange(3, 60), chance.randrange(20, 70)
    with Network(3, nics={LAUNCHERS: "10.77.0", RANKS: "10.78.0"}) as network:
        launchers = start_job(network, [CASE], tmp_path, nproc=(1, 1, 1))
        pass_time(after)
        with OUTAGES[outage](network[chance.randrange(3)], directions):
            pass_time(lasts)
        results = [result["any"] for result in finish_job(network, [CASE], launchers)]
    said = "\n".join(f"{launcher.host.name}: {launcher.err}" for launcher in launchers)
    assert ["error" not in result for result in results] == [True] * 3, f"{results}\n{said}"
