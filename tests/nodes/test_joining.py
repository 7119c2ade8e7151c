"""Nodes join late, never, in surplus or with wrong settings, and every node reports it."""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import scripts
from cut_wire import Wire
from hosts import Network, names_as_debian, require
from machine import require_in_time
from nodes_kit import (
    Case,
    Launcher,
    await_files,
    finish_job,
    require_the_same,
    retrying,
    run_job,
    start_job,
    start_node,
)

from ddpsafe import _host
from ddpsafe._clock import BoundedCall, Deadline
from ddpsafe._config import LaunchConfig
from ddpsafe._errors import ConfigError, PreflightError, RendezvousTimeoutError
from ddpsafe._job import endpoint as endpoint_module
from ddpsafe._job.channel import Channel
from ddpsafe._job.endpoint import JobEndpoint
from ddpsafe._launcher.nodes.lobby import require_same_settings
from ddpsafe._launcher.nodes.node_messages import NodeFacts, RoundPlan
from ddpsafe._launcher.nodes.rendezvous import Label, NodeRendezvous
from ddpsafe._launcher.watch.signals import Interrupted, open_inbox
from ddpsafe._secrets import JOB_SECRET

needs_hosts = pytest.mark.root

CONFIG: Final = 78
"""Exit code where a retry cannot help: EX_CONFIG."""

TAKEN: Final = """
import socket
silent = socket.create_server(("", 28001))
chatty = socket.create_server(("", 28002))
print("up", flush=True)
while True:
    taken = chatty.accept()[0]
    taken.sendall(b"HTTP/1.1 400 Bad Request\\r\\n\\r\\n")
    taken.close()
"""


def asked(endpoint: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of a launch with another endpoint."""
    return {"nnodes": 2, "rendezvous": {"endpoint": endpoint, **fields}}


CASES: Final = [
    Case(name="healthy"),
    Case(
        name="seeds", of_node={0: {"seed": 1}, 1: {"seed": 2}}, fields={"nnodes": 2}, nodes=(0, 1)
    ),
    Case(name="more nodes", of_node={0: {"nnodes": 2}, 1: {"nnodes": 3}}, nodes=(0, 1)),
    Case(name="fewer nodes", of_node={0: {"nnodes": 3}, 1: {"nnodes": 2}}, nodes=(0, 1)),
    Case(name="a rank twice", of_node={1: {"node_rank": 1}, 2: {"node_rank": 1}}),
    Case(
        name="two first nodes",
        fields={"nnodes": 2},
        of_node={0: {"node_rank": 0}, 1: {"node_rank": 0}},
        nodes=(0, 1),
    ),
    Case(
        name="another secret",
        fields={"nnodes": 2},
        env={1: {"DDPSAFE_JOB_SECRET": "another secret than theirs"}},
        after={2: "refused"},
        touches={1: "refused"},
    ),
    Case(
        name="one too many",
        what="held",
        fields={"nnodes": 2},
        after={2: "running-one too many-1-1"},
        touches={2: "release-one too many"},
    ),
    Case(
        name="never",
        fields={"rendezvous": {"join": 12}},
        of_node={0: {"node_rank": 0}, 1: {"node_rank": 1}},
        nodes=(0, 1),
    ),
    Case(name="no such name", fields=asked("nowhere.invalid:29400"), nodes=(0, 1)),
    Case(name="address without a host", fields=asked("10.77.0.99:29400", join=9), nodes=(0, 1)),
    Case(
        name="address without a host, and a first node",
        fields=asked("10.77.0.99:29400", join=9),
        of_node={0: {"node_rank": 0}},
        nodes=(0,),
    ),
    Case(name="a silent program has the port", fields=asked("h0:28001"), nodes=(0, 1)),
    Case(name="a chatty program has the port", fields=asked("h0:28002"), nodes=(0, 1)),
    Case(name="late", fields={"nnodes": 2}, nodes=(0, 1), after={1: "has-said-who-came"}),
]


@pytest.mark.full
@needs_hosts
def test_problems_with_the_nodes_are_reported_on_each_of_them(
    network: Network, tmp_path: Path
) -> None:
    """Within seconds and by name; where the others can do without that node, their job continues."""
    listening = network[0].start([sys.executable, "-c", TAKEN])
    assert listening.stdout is not None
    assert listening.stdout.readline() == "up\n"
    launchers = start_job(network, CASES, tmp_path, nproc=(1, 1, 1))
    scripts.wait_until(
        lambda: "late" in str(launchers[1].results()) or "1 of 2 nodes reached" in launchers[0].err,
        otherwise=lambda: [each.err[-800:] for each in launchers],
    )
    (tmp_path / "has-said-who-came").touch()
    said = finish_job(network, CASES, launchers)
    listening.kill()
    for check in (_disagreements, _refusals, _absences, _endpoints):
        check(said, [each.err for each in launchers])


def _require(
    said: list[dict[str, Any]], nodes: tuple[int, ...], case: str, error: str, *words: str
) -> list[dict[str, Any]]:
    """Fail unless these nodes ended a case with this error, whose text has these words."""
    found = [said[node][case] for node in nodes]
    for each in found:
        assert each.get("error") == error, each
        for word in words:
            assert word in each["text"], each
    return found


def _disagreements(said: list[dict[str, Any]], _: list[str]) -> None:
    """Different configurations are reported with both values and both nodes before any rank starts."""
    for case, nodes, words in (
        ("seeds", (0, 1), "seed: 1 on node 0 (h0), 2 on node 1 (h1)"),
        ("more nodes", (0, 1), "nnodes: 2 on node 0 (h0), 3 on node 1 (h1)"),
        ("fewer nodes", (0, 1), "nnodes: 3 on node 0 (h0), 2 on node 1 (h1)"),
        ("a rank twice", (0, 1, 2), "two nodes have node rank 1: "),
        (
            "two first nodes",
            (0, 1),
            "two nodes have node rank 0: h0 (10.77.0.1) and h1 (10.77.0.2)",
        ),
    ):
        found = _require(said, nodes, case, "ConfigError", words)
        require_the_same(found)
        assert found[0]["code"] == CONFIG
        took_s = max(each["at"] for each in found) - max(each["began"] for each in found)
        require_in_time(took_s, 5.0, case)


def _refusals(said: list[dict[str, Any]], errors: list[str]) -> None:
    """The refused node ends, and the job of the others continues."""
    (sender,) = _require(
        said, (1,), "another secret", "PreflightError", "does not have this job's secret and id"
    )
    require_in_time(sender["at"] - sender["began"], 5.0, "another secret")
    assert said[0]["another secret"]["values"] == {"0": 0}
    assert said[2]["another secret"]["values"] == {"1": 1}
    assert "calls its host 'h1' was refused" in errors[0]
    assert "the secret of this job is derived from its endpoint and id" in errors[0]
    surplus = "has its 2 nodes already: h0 and h1; h2 is one more"
    (third,) = _require(said, (2,), "one too many", "PreflightError", surplus)
    require_in_time(third["at"] - third["began"], 5.0, "one too many")
    assert said[0]["one too many"]["values"] == {"0": 0}
    assert said[1]["one too many"]["values"] == {"1": 1}


def _absences(said: list[dict[str, Any]], errors: list[str]) -> None:
    """The nodes that have joined are named during the wait and in the error."""
    came = "2 of 3 nodes reached h0:"
    names = ": h0 and h1; node rank 2 did not; node 0 listens at 10.77.0.1"
    found = _require(said, (0, 1), "never", "RendezvousTimeoutError", came, names, "within 12 s")
    require_the_same(found)
    assert found[0]["kind"] == "startup-network"
    for each in errors[:2]:
        assert came in each.partition("waiting for the others")[0]
    assert said[0]["late"]["values"] == {"0": 0}
    assert said[1]["late"]["values"] == {"1": 1}


def _endpoints(said: list[dict[str, Any]], errors: list[str]) -> None:
    """An endpoint that cannot be reached, or that belongs to another program."""
    case = "no such name"
    for each in _require(said, (0, 1), case, "PreflightError", "cannot resolve nowhere.invalid"):
        require_in_time(each["at"] - each["began"], 15.0, case)
    case = "address without a host"
    _require(said, (0, 1), case, "RendezvousTimeoutError", "10.77.0.99:29400", "No route to host")
    assert all("finds no launcher at 10.77.0.99:29400 yet: No route" in each for each in errors[:2])
    assert "If h1 is the host of the endpoint, start it with --node-rank 0" in errors[1]
    case = "address without a host, and a first node"
    _require(said, (0,), case, "RendezvousTimeoutError", "1 of 2 nodes reached 10.77.0.99:29400")
    assert "is not an address of this host (h0)" in errors[0]
    for case in ("a silent program has the port", "a chatty program has the port"):
        for each in _require(said, (0, 1), case, "PreflightError", "is not a launcher"):
            assert each["kind"] == "port"
            require_in_time(each["at"] - each["began"], 12.0, case)


@pytest.mark.full
@needs_hosts
def test_the_host_of_the_endpoint_may_be_the_last_to_join(network: Network, tmp_path: Path) -> None:
    """The others report that nothing answers yet, and join as soon as it does."""
    case = Case(name="late first", after={0: "others-wait"})
    launchers = start_job(network, [case], tmp_path, nproc=(1, 1, 1))
    for launcher in launchers[1:]:
        launcher.await_said("finds no launcher at h0:")
    (tmp_path / "others-wait").touch()
    came_s = time.time()
    said = [each["late first"] for each in finish_job(network, [case], launchers)]
    assert [each["values"] for each in said] == [{"0": 0}, {"1": 1}, {"2": 2}]
    require_in_time(said[0]["at"] - came_s, 15.0, "all have met and trained")


@pytest.mark.full
@needs_hosts
def test_the_endpoint_may_resolve_to_loopback_only_on_its_own_host(tmp_path: Path) -> None:
    """Debian's installer maps the hostname to 127.0.1.1; a copy of that file is wrong elsewhere."""

    def hosts_file(network: Network, index: int) -> str:
        return names_as_debian(network, 0 if index == 2 else index)

    two = {"nnodes": 2, "rendezvous": {"id": "two may be on one host"}}
    case = Case(name="own name", fields=two)
    copy = Case(name="a copy", fields=two)
    again = replace(case, fields={**two, "run_dir": str(tmp_path / "again")})
    with Network(3, hosts_file=hosts_file) as network:
        nodes = [start_node(network, each, [case], tmp_path, (1, 1), "h0:28651") for each in (0, 1)]
        wrong = start_node(network, 2, [copy], tmp_path, (1, 1, 1), "h0:28651")
        two_hosts = finish_job(network, [case], nodes, besides=[2])
        (refused,) = finish_job(network, [copy], [wrong])
        nodes = [
            start_node(network, 0, [each], tmp_path, (1, 1), "h0:28652") for each in (case, again)
        ]
        one_host = finish_job(network, [case], nodes)
    assert [each["own name"]["values"] for each in two_hosts] == [{"0": 0}, {"1": 1}]
    values = [each["own name"]["values"] for each in one_host]
    assert sorted(values, key=str) == [{"0": 0}, {"1": 1}]
    words = "h0, the host of the endpoint, resolves to 127.0.1.1 on h2"
    (found,) = _require([refused], (0,), "a copy", "PreflightError", words)
    require_in_time(found["at"] - found["began"], 5.0, "a copy")


@pytest.mark.full
@needs_hosts
@pytest.mark.parametrize(
    ("asked_for", "is_debian", "chosen"),
    [
        pytest.param(None, False, [None, None], id="none"),
        pytest.param(None, True, ["eth0", None], id="none, and own names are loopback"),
        pytest.param("auto", False, ["eth0", "=eth0"], id="auto"),
    ],
)
def test_the_network_of_the_ranks_is_chosen_only_where_that_was_asked_for(
    tmp_path: Path, asked_for: str | None, *, is_debian: bool, chosen: list[str | None]
) -> None:
    """NCCL may know a faster one than the one that leads to node 0. gloo's own choice has to be reachable."""
    case = Case(name="job", what="interface", fields=asked("h0:28661", interface=asked_for))
    names = {"hosts_file": names_as_debian} if is_debian else {}
    with Network(2, nics={"eth0": "10.77.0", "eth1": "10.78.0"}, **names) as network:
        said = run_job(network, [case], tmp_path, nproc=(1, 1))
    assert [each["job"]["values"] for each in said] == [{"0": chosen}, {"1": chosen}]


@pytest.mark.full
@needs_hosts
def test_the_name_of_the_endpoint_may_have_several_addresses(tmp_path: Path) -> None:
    """Node 0 serves only one, preferably IPv4 and not of a container network; the others find it.

    The ranks use the requested interface, also on the host of the endpoint.
    """

    def hosts_file(_: Network, index: int) -> str:
        ways = ["fd00::1", "172.17.0.1", "10.77.0.1"] if index == 0 else ["10.77.0.51", "10.77.0.1"]
        return "127.0.0.1 localhost\n" + "".join(f"{each} many\n" for each in ways)

    case = Case(name="many", what="interface", fields=asked("many:28651", interface="eth1"))
    alone = Case(name="alone", fields=asked("many:28652", join=1), nodes=(0,))
    nics = {"eth0": "10.77.0", "eth1": "10.78.0"}
    with Network(2, nics=nics, hosts_file=hosts_file) as network:
        network[0].add_bridge("docker0", "172.17.0.1/16")
        network[0].shell("""
            ip addr add fd00::1/64 dev eth0 nodad
            ip addr add 10.77.0.51/24 dev eth0
        """)
        network[0].firewall("ip daddr 10.77.0.51 drop")
        said = run_job(network, [case, alone], tmp_path, nproc=(1, 1))
    assert [each["many"]["values"] for each in said] == [
        {"0": ["eth1", "=eth1"]},
        {"1": ["eth1", "=eth1"]},
    ]
    words = "node 0 listens at 10.77.0.1, not at fd00::1 and 172.17.0.1, where that name leads too"
    _require(said, (0,), "alone", "RendezvousTimeoutError", words)


@pytest.mark.full(but=["1"])
@needs_hosts
@pytest.mark.parametrize("twice", [0, 1])
def test_a_node_that_is_started_twice_is_refused_the_second_time(
    network: Network, tmp_path: Path, twice: int
) -> None:
    """By name and within seconds, and the first job continues."""
    first = Case(name="job", what="held", fields={"nnodes": 2})
    second = replace(first, fields={"nnodes": 2, "run_dir": str(tmp_path / "again")})
    endpoint = "h0:28650"
    launchers = [start_node(network, node, [first], tmp_path, (1, 1), endpoint) for node in (0, 1)]
    await_files(launchers, tmp_path, "running-job-1-*", 2)
    again = start_node(network, twice, [second], tmp_path, (1, 1), endpoint)
    assert again.end() == 0, again.err
    said = again.results()["job"]
    assert said["error"] == "PreflightError", said
    assert f"has its 2 nodes already: h0 and h1; h{twice} is one more" in said["text"]
    require_in_time(said["at"] - said["began"], 5.0, "the second is refused")
    (tmp_path / "release-job").touch()
    found = [each["job"]["values"] for each in finish_job(network, [first], launchers)]
    assert found == [{"0": 0}, {"1": 1}]


@needs_hosts
def test_a_launcher_that_exits_before_it_starts_ranks_is_named_at_once(
    network: Network, tmp_path: Path
) -> None:
    """The others name it, and those that wait for a plan name node 0."""
    cases = [
        Case(name="another node", leaves={2: "begun"}),
        Case(name="node 0", fields={"nnodes": 2}, leaves={0: "joined"}, nodes=(0, 1)),
    ]
    said = finish_job(network, cases, start_job(network, cases, tmp_path, nproc=(1, 1, 1)))
    words = "node 2 ('h2', rank 2 of world_size 3) was lost, attempt 1: "
    found = _require(said, (0, 1), "another node", "NodeLostError", words)
    require_the_same(found)
    # A kernel resets the connection of a process that ends with something unread.
    why = found[0]["text"].partition(words)[2]
    assert why in ("its launcher has ended.", "Connection reset by peer.")
    _require(said, (1,), "node 0", "NodeLostError", "node 0 ('h0') was lost, before attempt 1: ")


@pytest.mark.full
@needs_hosts
@pytest.mark.parametrize("how", ["exit", "power"])
def test_a_launcher_that_leaves_while_it_waits_frees_its_place(
    own_network: Network, tmp_path: Path, how: str
) -> None:
    """Started again, it joins, and no node is one too many."""
    case = Case(name="job", fields={"nnodes": 3, "rendezvous": {"id": "two may be on one host"}})
    leaving = replace(case, leaves={1: "waiting"})
    again = replace(case, fields={**case.fields, "run_dir": str(tmp_path / "again")})

    def start(node: int, case: Case = case) -> Launcher:
        return start_node(own_network, node, [case], tmp_path, (1, 1, 1), "h0:28655")

    if how == "exit":
        first, second = start(0), start(1, leaving)
        assert second.end() == 0, second.err
        launchers = [first, start(2), start(1)]
    else:
        first, second = start(0), start(1)
        second.await_said("2 of 3 nodes reached")
        own_network[1].power_off()
        first.await_said("h1 (10.77.0.2) cannot be reached")
        launchers = [first, start(2), start(2, again)]
    found = finish_job(own_network, [case], launchers, besides=[1] if how == "power" else [])
    values = [each["job"].get("values") for each in found]
    assert sorted(values, key=str) == [{str(rank): rank} for rank in range(3)], found


CLOCK: Final = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += 3600;
    return result;
}
"""


@needs_hosts
@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_clocks_may_be_an_hour_apart(network: Network, tmp_path: Path, ahead: int) -> None:
    """The nodes join several rounds in a row; torch alone would consider one of them dead."""
    require(None if shutil.which("gcc") else "a C compiler is needed to shift a clock")
    (tmp_path / "clock.c").write_text(CLOCK)
    library = tmp_path / "clock.so"
    command = ["gcc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "clock.c"), "-ldl"]
    subprocess.run(command, check=True)
    retry = retrying(3, "killed")
    cases = [Case(name="kills", what="kill-until-2", rank=1, fields={"retry": retry})]
    preload = {"LD_PRELOAD": str(library)}
    launchers = [
        start_node(
            network,
            node,
            cases,
            tmp_path,
            (1, 1),
            f"h0:{28500 + ahead}",
            preload if node == ahead else {},
        )
        for node in (0, 1)
    ]
    said = finish_job(network, cases, launchers)
    for node in (0, 1):
        assert said[node]["kills"]["values"] == {str(node): node}
        assert said[node]["kills"]["attempts"] == 2


@pytest.mark.full
def test_differences_of_script_arguments_and_variables_are_shown_on_both_nodes(
    network: Network, tmp_path: Path
) -> None:
    """The job runs: they may be meant. Each with both values."""
    launchers = []
    given: list[tuple[str, dict[str, str]]] = [("0.1", {}), ("0.2", {"NCCL_DEBUG": "WARN"})]
    for node, (lr, variables) in enumerate(given):
        (tmp_path / str(node)).mkdir()
        script = scripts.write(tmp_path / str(node), "train.py", f"number = {node}")
        options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", "h0:29388"]
        command = ["-m", "ddpsafe", "run", *options, str(script), "--lr", lr]
        launchers.append(Launcher(network[node], command, variables))
    for launcher in launchers:
        assert launcher.end() == 0, launcher.err
        differs = "the nodes of this job differ: "
        assert f"{differs}NCCL_DEBUG: not set on h0, WARN on h1" in launcher.err
        assert f"{differs}its arguments: --lr 0.1 on h0, --lr 0.2 on h1" in launcher.err
        assert re.search(rf"{differs}the script: train.py \(sha256 .* on h0, ", launcher.err)
        assert launcher.err.count(differs) == 3, launcher.err


@pytest.mark.full
@pytest.mark.parametrize("what", ["script", "logs"])
def test_what_fails_on_a_node_before_it_joins_is_told_to_node_0(
    network: Network, tmp_path: Path, what: str
) -> None:
    """All end at once, instead of waiting for it until ``rendezvous.join``."""
    script = scripts.write(tmp_path, "train.py", "")
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", "h0:29389"]
    command = ["-m", "ddpsafe", "run", *options]
    first = Launcher(network[0], [*command, str(script)], {})
    first.await_said("the secret of this job")  # it serves the endpoint
    if what == "script":
        second = Launcher(network[1], [*command, str(tmp_path / "none.py")], {})
        words = "h1 does not join: There is no script"
    else:
        folder = "/proc/logs"
        second = Launcher(network[1], [*command, "--run-dir", folder, str(script)], {})
        words = "h1 does not join: "
    assert second.end() == (2 if what == "script" else 78), second.err
    assert first.end() == 78, first.err
    assert words in first.err, first.err


def facts(**changes: Any) -> NodeFacts:
    """Return a node with default facts except for these settings."""
    settings = {"nnodes": "2", "backend": "gloo", "torch": "2.13.0", "Python": "3.11", "seed": "1"}
    settings["the name of the script"] = "train.py"
    rank, launcher = changes.pop("node_rank", None), changes.pop("launcher", "")
    return NodeFacts(
        hostname=changes.pop("hostname", "h1"),
        pid=1,
        address="10.0.0.2",
        nproc=1,
        settings={**settings, **changes},
        node_rank=rank,
        launcher=launcher,
    )


DISAGREEMENTS: Final = [
    ({"torch": "2.6.0"}, "torch: 2.13.0 on node 0 (h0), 2.6.0 on node 1 (h1)"),
    ({"backend": "nccl"}, "backend: gloo on node 0 (h0), nccl on node 1 (h1)"),
    ({"Python": "3.12"}, "Python: 3.11 on node 0 (h0), 3.12 on node 1 (h1)"),
    (
        {"the name of the script": "eval.py"},
        "the name of the script: train.py on node 0 (h0), eval.py on node 1 (h1)",
    ),
    ({"node_rank": 0}, "two nodes have node rank 0: h0 (10.0.0.2) and h1 (10.0.0.2)"),
    ({"seed": "2", "node_rank": 3}, "seed: 1 on node 0 (h0), 2 on node 3 (h1)"),
]


@pytest.mark.parametrize(("changes", "words"), DISAGREEMENTS)
def test_a_disagreement_is_reported_with_both_values_and_both_nodes(
    changes: dict[str, Any], words: str
) -> None:
    """This applies to every setting that has to be the same on all nodes."""
    with pytest.raises(ConfigError) as caught:
        require_same_settings(facts(hostname="h0", node_rank=0), facts(**changes))
    assert words in caught.value.explanation.what


def test_nodes_may_differ_in_their_own_settings() -> None:
    """Host, number of ranks, and a node rank that only some of them have been given."""
    for other in (facts(node_rank=2), facts()):
        require_same_settings(facts(hostname="h0", node_rank=0), other)


def test_a_restarted_container_is_not_mistaken_for_a_member_of_the_last_round() -> None:
    """With the same name, address and pid, torch's rendezvous would give it the previous one's place."""
    ranks = (0, 1, 2)
    nodes = [facts(node_rank=rank, launcher=each) for rank in ranks for each in "ab"]
    labels = [str(Label.of(each)) for each in nodes]
    assert len(set(labels)) == len(labels)
    assert labels == sorted(labels)  # the nodes keep their order
    assert [Label.read(each).node_rank for each in labels[::2]] == list(ranks)
    unranked = Label.of(facts())
    assert labels[0] < str(unranked)
    assert Label.read(str(unranked)) == unranked
    assert unranked.node_rank is None


LOCAL: Final = "127.0.0.1"


@pytest.fixture
def held_port() -> Iterator[socket.socket]:
    """Bind a port without listening on it: it can be neither connected to nor served."""
    with socket.socket() as held:
        held.bind((LOCAL, 0))
        yield held


@pytest.fixture
def node(held_port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeRendezvous]:
    """Return the rendezvous of a node on this host, whose endpoint has that port."""
    import torch  # noqa: F401 - loaded before any launch; else the thread of a call would still load it

    port = held_port.getsockname()[1]
    config = LaunchConfig(
        nnodes=2, nproc_per_node=1, backend="gloo", rendezvous={"endpoint": f"h0:{port}"}
    )
    monkeypatch.setattr(endpoint_module, "_FIND_S", 0.5)
    with open_inbox() as inbox:
        opened = NodeRendezvous(config, inbox)
        opened.endpoint._host = opened.endpoint.address = LOCAL
        yield opened
    opened.close()


@pytest.fixture
def endpoint(node: NodeRendezvous) -> JobEndpoint:
    """Return its endpoint."""
    return node.endpoint


def serve_or_find(endpoint: JobEndpoint, limit_s: float, *, bound: str | None = LOCAL) -> Channel:
    """Serve the endpoint, or find the node that does."""
    limit = Deadline.after(timedelta(seconds=limit_s))
    return endpoint._serve_or_find(limit, [LOCAL], bound, [LOCAL])


def test_a_program_that_holds_the_port_of_the_endpoint_is_reported(endpoint: JobEndpoint) -> None:
    """Even if it does not listen; the error is not a missing node."""
    with pytest.raises(PreflightError, match="another program holds the port") as raised:
        serve_or_find(endpoint, 0.1)
    assert raised.value.kind == "port"


def test_the_wait_for_an_endpoint_that_refuses_connections_can_be_left(
    endpoint: JobEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C, or because node 0 has ended: no call is under way that would notice it."""

    def leave() -> None:
        raise Interrupted(signal.SIGINT)

    monkeypatch.setattr(endpoint, "_check", leave)
    with pytest.raises(Interrupted):
        serve_or_find(endpoint, scripts.LIMIT_S, bound=None)


@pytest.mark.full
def test_the_endpoint_is_served_as_soon_as_its_port_is_free(
    endpoint: JobEndpoint, held_port: socket.socket
) -> None:
    """The program that held the port exits during the wait."""
    threading.Timer(0.3, held_port.close).start()
    serve_or_find(endpoint, 20).close()
    assert endpoint.serves


def test_the_port_of_the_endpoint_is_free_without_a_garbage_collection(
    node: NodeRendezvous, held_port: socket.socket
) -> None:
    """The next launch of a script may need it at once."""
    import torch  # noqa: F401 - loaded before any launch; an import in the call keeps the call's frames

    address = held_port.getsockname()
    held_port.close()
    gc.disable()
    try:
        node._channel = serve_or_find(node.endpoint, 20)
        node._meet()
        with pytest.raises(OSError, match="in use"):
            socket.create_server(address)
        node.close()
        socket.create_server(address).close()
    finally:
        gc.enable()


@pytest.fixture
def free_port(held_port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return a port that is free now, for nodes that have a secret."""
    monkeypatch.setenv(JOB_SECRET, "x" * 64)
    port: int = held_port.getsockname()[1]
    held_port.close()
    return port


def plan_of(nodes: list[NodeRendezvous]) -> RoundPlan:
    """Return the plan of a round of these nodes."""
    facts = tuple(node.facts for node in nodes)
    return RoundPlan(round_id="1", attempt=1, nodes=facts, store_port=1, master_port=1)


def open_two(stack: contextlib.ExitStack, *ports: int, **meets: float) -> list[NodeRendezvous]:
    """Open two nodes on this host, each of which finds the endpoint at its port."""
    inbox = stack.enter_context(open_inbox())
    nodes = []
    for node_rank, port in enumerate(ports):
        config = LaunchConfig(
            nnodes=2,
            node_rank=node_rank,
            nproc_per_node=1,
            backend="gloo",
            rendezvous={"endpoint": f"{LOCAL}:{port}", **meets},
        )
        nodes.append(NodeRendezvous(config, inbox))
        stack.callback(nodes[-1].close)
        nodes[-1].open()
    return nodes


def test_what_torchs_rendezvous_raises_ends_the_wait_for_a_round(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and with its text, although node 0 can be reached."""
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    def fail(_: object) -> None:
        raise RuntimeError("it is out of order")

    monkeypatch.setattr(DynamicRendezvousHandler, "next_rendezvous", fail)
    with contextlib.ExitStack() as stack:
        nodes = open_two(stack, free_port, free_port)
        with pytest.raises(RendezvousTimeoutError, match="it is out of order"):
            nodes[1].join()


def test_a_node_whose_connection_is_reset_while_it_waits_takes_part(free_port: int) -> None:
    """What it asked node 0 is answered over the next connection."""
    with contextlib.ExitStack() as stack:
        wire = stack.enter_context(contextlib.closing(Wire(free_port)))
        nodes = open_two(stack, free_port, wire.port)
        joining = BoundedCall(nodes[1].join, name="join")
        lobby = nodes[0].lobby
        scripts.wait_until(lambda: nodes[0].look() or lobby.nodes)
        for _ in range(3):
            wire.cut()
            # Node 0 may take the next connection before it notices the end of this one.
            scripts.wait_until(lambda: nodes[0].look() or wire._ends)
        assert not joining.wait(0), joining.result()
        launchers = nodes[0].join()
        assert launchers == tuple(node.facts.launcher for node in nodes)
        nodes[0].send_plan(plan_of(nodes))
        assert joining.wait(scripts.LIMIT_S)
        assert joining.result() == ()


def test_an_earlier_join_of_a_launcher_does_not_take_a_place(free_port: int) -> None:
    """Node 0 gives a round up while another node's handler sleeps: the node joins with another one."""
    with contextlib.ExitStack() as stack:
        nodes = open_two(stack, free_port, free_port)
        for _ in range(3):
            joining = BoundedCall(nodes[1].join, name="join")
            launchers = nodes[0].join()
            assert launchers == tuple(node.facts.launcher for node in nodes)
            nodes[0].meet_again()
            nodes[0].send_plan(plan_of(nodes))
            assert joining.wait(scripts.LIMIT_S)
            joining.result()
            # It may have joined before the plan came, which would end the next join at once.
            scripts.wait_until(lambda: nodes[1].look() or nodes[1].membership.plan)
            nodes[1].membership.leave_round()


def test_a_program_on_loopback_is_not_mistaken_for_the_endpoint_of_another_host(
    endpoint: JobEndpoint, held_port: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hosts file maps that name to loopback and to its address, where nothing answers."""
    held_port.listen()
    monkeypatch.setattr(endpoint_module, "is_loopback", lambda address: address == LOCAL)
    monkeypatch.setattr(endpoint, "_look_up", lambda: [LOCAL, "127.0.0.2"])
    with pytest.raises(RendezvousTimeoutError, match="Connection refused"):
        serve_or_find(endpoint, 0.1, bound=None)


def test_a_name_server_that_does_not_answer_is_waited_for_until_the_deadline(
    endpoint: JobEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every look-up of the endpoint asks it again."""
    stopped = threading.Event()
    monkeypatch.setattr(endpoint, "_look_up", lambda: stopped.wait(30))
    with pytest.raises(RendezvousTimeoutError, match="neither the name server nor the host"):
        serve_or_find(endpoint, 0.1, bound=None)
    stopped.set()


@pytest.mark.parametrize(
    ("name", "networks", "node_rank", "says"),
    [("h0", 2, 0, True), ("h0", 2, 1, False), ("h0", 1, 0, False), ("h1", 1, 0, True)],
)
def test_a_node_with_an_endpoint_on_loopback_logs_its_address_if_that_is_ambiguous(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    name: str,
    networks: int,
    node_rank: int,
    says: bool,
) -> None:
    """The host has several networks, or another name. Node 1 may be on that host too, and logs nothing."""
    ways = [
        _host.Interface(
            name=f"eth{number}",
            networks=(ipaddress.ip_interface(f"10.{number}.0.1/24"),),
            mtu_bytes=1500,
            is_running=True,
        )
        for number in range(networks)
    ]
    monkeypatch.setattr(endpoint_module, "list_interfaces", lambda: ways)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    config = LaunchConfig(
        nnodes=2,
        nproc_per_node=1,
        node_rank=node_rank,
        backend="gloo",
        rendezvous={"endpoint": "h0:29400"},
    )
    channel: Any = SimpleNamespace()
    opened = JobEndpoint(config, lambda: None, listen=lambda *_: channel, dial=lambda *_: channel)
    monkeypatch.setattr(opened, "_resolve", lambda _: ["127.0.1.1"])
    monkeypatch.setattr(opened, "_own_address", lambda *_: "10.0.0.1")
    opened.open()
    assert ("so node 0 listens at 10.0.0.1" in caplog.text) is says
