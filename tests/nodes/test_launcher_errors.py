"""An error in one launcher rather than in a rank: all nodes end within seconds with the same error."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import scripts
from hosts import Host, Network
from machine import require_in_time
from nodes_kit import (
    Case,
    Launcher,
    finish_job,
    require_nothing_left,
    require_the_same,
    retrying,
    run_job,
    start_job,
)

pytestmark = pytest.mark.root

RETRY: Final = retrying(3, "killed")

TAKE_PORTS: Final = """
import socket
taken = [socket.create_server(("", port)) for port in (50000, 50001)]
print("taken", flush=True)
input()
"""


def require_one_error(said: list[dict[str, Any]], error: str, *words: str) -> None:
    """Fail unless all nodes ended with the same error at nearly the same time."""
    require_the_same(said)
    assert said[0]["error"] == error, said[0]
    for word in words:
        assert all(word in each["whole"] for each in said), said
    ends = [each["at"] for each in said]
    require_in_time(max(ends) - min(ends), 5.0, "all nodes have ended")


@contextlib.contextmanager
def no_free_port(host: Host) -> Iterator[None]:
    """Occupy every ephemeral port of a host."""
    where = "/proc/sys/net/ipv4/ip_local_port_range"
    before = host.run("cat", where)
    taken = host.start([sys.executable, "-c", TAKE_PORTS])
    assert taken.stdout is not None
    assert taken.stdout.readline() == "taken\n"
    host.shell(f"echo 50000 50001 > {where}")
    try:
        yield
    finally:
        host.shell(f"echo {before.strip()} > {where}")
        taken.kill()


@pytest.mark.full
def test_a_port_that_node_0_cannot_open_is_reported_on_all_nodes(
    network: Network, tmp_path: Path
) -> None:
    """The next stores and channels need ports: the error comes from the system or torch, not from ddpsafe."""
    case = Case(name="ports", after={1: "no-port", 2: "no-port"})
    port = 28900
    launchers = start_job(network, [case], tmp_path, nproc=(1, 1, 1), port=port)
    scripts.wait_until(
        lambda: f":{port}" in network[0].run("ss", "-Hltn"), otherwise=lambda: launchers[0].err
    )
    with no_free_port(network[0]):
        (tmp_path / "no-port").touch()
        said = [each["ports"] for each in finish_job(network, [case], launchers)]
    require_one_error(said, "PreflightError", "node 0 ('h0') could not open the round: ")
    assert said[0]["cause"] in ("OSError", "DistNetworkError")


def connections_opened(host: Host) -> int:
    """Return how many TCP connections the processes of a host have begun to open."""
    names, numbers = (
        line.split() for line in host.shell("cat /proc/net/snmp").splitlines() if line[:4] == "Tcp:"
    )
    return int(numbers[names.index("ActiveOpens")])


@pytest.mark.full(but=["1"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_that_takes_no_more_logs_is_reported_on_all_nodes(
    network: Network, tmp_path: Path, victim: int
) -> None:
    """The node that cannot start its ranks is named with the reason, and no rank of the others is left."""
    host, disk = network[victim], tmp_path / "disk"
    disk.mkdir()
    host.shell(f"mount -t tmpfs disk {disk}")
    case = Case(
        name="disk",
        of_node={victim: {"run_dir": str(disk / "run")}},
        after={1 - victim: "is-read-only"},
    )
    before = connections_opened(host)
    launchers = start_job(network, [case], tmp_path, nproc=(1, 1))
    scripts.wait_until(  # for the other node, with the run directory made and tried
        lambda: (
            connections_opened(host) > before
            or "the secret of this job" in launchers[victim].err  # as node 0, it opens none
        ),
        otherwise=lambda: launchers[victim].err,
    )
    host.shell(f"mount -o remount,ro {disk}")
    try:
        (tmp_path / "is-read-only").touch()
        said = [each["disk"] for each in finish_job(network, [case], launchers)]
    finally:
        host.shell(f"umount -l {disk}")
    require_one_error(
        said,
        "PreflightError",
        f"node {victim} ('h{victim}') could not start its ranks",
        "Read-only file system",
    )


@pytest.mark.full(but=["1"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_that_raises_ends_all_launchers(
    network: Network, tmp_path: Path, victim: int
) -> None:
    """A result that cannot be unpickled, missing folders, an ``on_retry`` that raises."""
    missing = str(tmp_path / "there")
    (tmp_path / "there").mkdir()
    network[victim].shell(f"mount -t tmpfs other {missing}")
    for host in (network[0], network[1]):
        host.shell(f"mkdir {missing}/data; echo 1 > {missing}/data/numbers")
    data = {"train": {"path": f"{missing}/data", "marker": "numbers"}}
    here = {"data_paths": data, "retry": RETRY}
    cases = [
        Case(name="unloadable", what="unloadable", rank=2 * victim + 1),
        Case(name="missing", what="lose-data", rank=2 * victim + 1, fields=here),
        Case(
            name="on_retry",
            what="kill-until-2",
            rank=0,
            fields={"retry": RETRY},
            env={victim: {"REFUSES_RETRY": "1"}},
        ),
        Case(name="healthy"),
    ]
    try:
        nodes = run_job(network, cases, tmp_path, nproc=(2, 2))
    finally:
        network[victim].shell(f"umount -l {missing}")
    said = [each["unloadable"] for each in nodes]
    require_one_error(said, "RankFailedError", f"rank {2 * victim + 1} ")
    assert [each["cause"] for each in said][victim] == "ValueError"
    said = [each["missing"] for each in nodes]
    words = f"data path 'train' is not ready on h{victim} after"
    require_one_error(said, "PreflightError", words, f"{missing}/data/numbers does not exist")
    (other,) = (each["on_retry"] for index, each in enumerate(nodes) if index != victim)
    assert other["error"] == "PreflightError"
    words = f"node {victim} ('h{victim}') could not begin another attempt: ValueError: bad batch"
    assert words in other["text"]
    assert nodes[victim]["on_retry"]["error"] == "ValueError"
    assert abs(other["at"] - nodes[victim]["on_retry"]["at"]) < 10
    assert [list(each["healthy"]["values"]) for each in nodes] == [["0", "1"], ["2", "3"]]


@pytest.mark.parametrize("how", ["drop", "reset"])
def test_a_node_that_reaches_only_the_endpoint_is_reported_on_all_nodes(
    network: Network, tmp_path: Path, how: str
) -> None:
    """Only the port of the endpoint is open; the node behind the firewall knows the cause best."""
    case = Case(name="closed", fields={"timeouts": {"start": 4}})
    port = 28950
    network[0].open_only(port, otherwise=how)
    try:
        launchers = start_job(network, [case], tmp_path, nproc=(1, 1), port=port)
        said = [each["closed"] for each in finish_job(network, [case], launchers)]
    finally:
        network[0].run("nft", "flush", "ruleset")
    require_one_error(said, "PreflightError", "h1 reached no store of the ranks on node 0, at")


def require_interrupted(launchers: list[Launcher], signum: signal.Signals) -> None:
    """Fail unless every launcher ends as that signal requires."""
    assert [each.end() for each in launchers] == [-signum] * len(launchers), [
        each.err[-800:] for each in launchers
    ]


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_node_0_while_it_waits_ends_all_launchers(
    network: Network, tmp_path: Path, signum: signal.Signals
) -> None:
    """Both while nodes are missing and in the pause before another attempt."""
    case = Case(name="never", fields={"nnodes": 3})
    launchers = start_job(network, [case], tmp_path, nproc=(1, 1))
    for launcher in launchers:
        launcher.await_said("2 of 3 nodes reached")
    os.kill(launchers[0].pid, signum)
    require_interrupted(launchers, signum)

    retry = {**RETRY, "backoff_initial": 300, "backoff_max": 300}
    case = Case(name="pause", what="kill-until-9", rank=1, fields={"retry": retry})
    launchers = start_job(network, [case], tmp_path, nproc=(1, 1))
    launchers[0].await_said("trying again in")
    launchers[1].await_said("attempt 1 failed")
    os.kill(launchers[0].pid, signum)
    require_interrupted(launchers, signum)
    assert f"{signum.name} on node 0 ('h0'); no rank is left running" in launchers[1].err
    require_nothing_left(network)


WHILE_IT_OPENS: Final = """
    import os
    import signal
    import sys

    import ddpsafe

    told = []

    def tell(event, arguments):
        if event == "socket.bind" and arguments[1][1] == 28900 and not told:
            told.append(os.kill(os.getpid(), signal.SIGTERM))

    if __name__ == "__main__":
        sys.addaudithook(tell)
        meets = {"endpoint": "h0:28900"}
        ddpsafe.launch(print, nnodes=2, nproc_per_node=1, backend="gloo", rendezvous=meets)
"""


def test_a_signal_to_node_0_while_it_opens_the_endpoint_is_not_lost(
    network: Network, tmp_path: Path
) -> None:
    """Node 0 acts on it as soon as it waits for the others, which may take ten minutes to join."""
    launcher = Launcher(network[0], [str(scripts.write(tmp_path, "opens.py", WHILE_IT_OPENS))], {})
    assert launcher.end() == -signal.SIGTERM, launcher.err
    assert "SIGTERM; no rank is left running" in launcher.err
    require_nothing_left(network)
