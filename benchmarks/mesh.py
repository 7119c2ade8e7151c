"""What torch alone and the doctor report about a broken network, and when.

Every condition is real, between hosts made from Linux namespaces (as root). In each, the hosts first
do what a script without ddpsafe does, ``init_process_group("gloo")`` and one all-reduce with a stated
timeout, then check the mesh. The times are those of the slowest host, from the call to its end, with
torch already imported.

Run ``python benchmarks/mesh.py``, with ``--timeout`` for torch's timeout in seconds, ``--json`` for
numbers or ``--save FILE`` for a page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from hosts import Network

# The tests have the code that makes hosts.
KITS: Final = Path(__file__).parents[1] / "tests" / "kits"
PORT: Final = 29500
LONGEST_SAID: Final = 160


class Condition(NamedTuple):
    """One thing that goes wrong.

    Attributes:
        title: Its name in the table.
        make: Makes the network, a context manager that the caller enters.
        spoil: Breaks it.
        env: Environment variables of every host.
        absent: Hosts that never join.
    """

    title: str
    make: Callable[[], Network]
    spoil: Callable[[Network], object] = lambda _: None
    env: dict[str, str] = {}  # noqa: RUF012 - never changed
    absent: tuple[int, ...] = ()


def conditions() -> list[Condition]:
    """Return the conditions to measure."""
    from hosts import Network, names_as_debian

    two_cards = {"eth0": "10.77.0", "ib0": "10.88.0"}
    return [
        Condition("nothing", lambda: Network(2)),
        Condition("only MASTER_PORT open, others dropped", lambda: Network(2), _only_endpoint),
        Condition(
            "only MASTER_PORT open, others rejected",
            lambda: Network(2),
            lambda net: [host.open_only(PORT, otherwise="reset") for host in net],
        ),
        Condition(
            "one direction of one pair of four dropped",
            lambda: Network(4),
            lambda net: net[1].refuse_from(net[2]),
        ),
        Condition(
            "the same, the other way round",
            lambda: Network(4),
            lambda net: net[2].refuse_from(net[1]),
        ),
        Condition("MASTER_PORT dropped", lambda: Network(2), lambda net: net[0].open_only(22)),
        Condition("own names on 127.0.1.1", lambda: Network(2, hosts_file=names_as_debian)),
        Condition(
            "GLOO_SOCKET_IFNAME missing on one of three",
            lambda: Network(3, nics=two_cards, without={"ib0": [2]}),
            env={"GLOO_SOCKET_IFNAME": "ib0"},
        ),
        Condition(
            "cable of one of three out",
            lambda: Network(3, nics=two_cards),
            lambda net: net[2].unplug("ib0"),
            env={"GLOO_SOCKET_IFNAME": "ib0"},
        ),
        Condition("a proxy in place of a host", lambda: Network(2), _proxy),
        Condition("large packets lost", lambda: Network(2, mtu=9000), _lossy),
        Condition("one of three never comes", lambda: Network(3), absent=(2,)),
        Condition(
            "name server silent",
            lambda: Network(2, name_server="10.77.0.1"),
            lambda net: net[0].firewall("udp dport 53 drop"),
        ),
    ]


def _only_endpoint(network: Network) -> None:
    for host in network:
        host.open_only(PORT)


def _proxy(network: Network) -> None:
    from mesh_kit import PROGRAM, wait_for_line

    proxy = network[0].start([sys.executable, PROGRAM, "accept_everything", "9999"])
    wait_for_line(proxy, "listening")
    network[0].shell(f"""
        nft add table ip proxy
        nft 'add chain ip proxy in {{ type nat hook prerouting priority -100; }}'
        nft add rule ip proxy in tcp dport != {PORT} redirect to :9999
    """)


def _lossy(network: Network) -> None:
    for host in network:
        host.shell("ip link set eth0 gso_max_segs 1")
    network.switch.shell(f"ip link set {network[1].port('eth0')} mtu 1500")


def be_a_rank(rank: int, world_size: int, timeout_s: float) -> None:
    """Do what a script without ddpsafe does, and print the result."""
    import torch
    import torch.distributed as dist

    began_s = time.monotonic()
    phase = "init_process_group"
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://h0:{PORT}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        phase = "all_reduce"
        # Larger than a packet, as gradients are.
        dist.all_reduce(torch.ones(100_000))
        said = ""
    except Exception as exc:  # noqa: BLE001 - the error is what is measured
        said = f"{phase}: {str(exc).splitlines()[0]}"
    print(json.dumps({"said": said, "took_s": time.monotonic() - began_s}), flush=True)
    os._exit(0)  # the teardown of a broken group is not measured


def run_torch(network: Network, condition: Condition, timeout_s: float) -> list[dict[str, Any]]:
    """Run the script on every host."""
    started = [
        host.start(
            [sys.executable, __file__, "--be-a-rank", f"{host.index},{len(network)},{timeout_s}"],
            env={**condition.env, "TORCH_CPP_LOG_LEVEL": "FATAL"},
        )
        for host in network
        if host.index not in condition.absent
    ]
    limit_s = 60 + 15 * timeout_s
    return [json.loads(process.communicate(timeout=limit_s)[0]) for process in started]


def run_doctor(network: Network, condition: Condition) -> list[dict[str, Any]]:
    """Run the mesh check on every host."""
    from mesh_kit import read_one, start_one

    started = [
        start_one(host, network, env=condition.env, timeout_s=3)
        for host in network
        if host.index not in condition.absent
    ]
    return [
        {
            "said": [each for each in told.findings if each["severity"] != "ok"],
            "took_s": told.took_s,
        }
        for told in map(read_one, started)
    ]


def measure(condition: Condition, timeout_s: float) -> dict[str, Any]:
    """Measure both in one condition; the second gets a new network."""
    results = {}
    for name in ("torch", "doctor"):
        with condition.make() as network:
            condition.spoil(network)
            if name == "torch":
                results[name] = run_torch(network, condition, timeout_s)
            else:
                results[name] = run_doctor(network, condition)
    return {"condition": condition.title, **results}


def show(measured: list[dict[str, Any]]) -> list[str]:
    """Return a section for each condition: a table with whole messages would be too wide to read."""
    lines: list[str] = []
    for each in measured:
        torch_s, doctor_s = (
            max(host["took_s"] for host in each[name]) for name in ("torch", "doctor")
        )
        lines += [
            f"## {each['condition'][0].upper()}{each['condition'][1:]}",
            "",
            f"torch, after {torch_s:.1f} s:",
            "",
            *_torch_said(each["torch"]),
            "",
            f"The doctor, after {doctor_s:.1f} s:",
            "",
            *_doctor_said(each["doctor"]),
            "",
        ]
    return lines[:-1]


def _torch_said(hosts: list[dict[str, Any]]) -> list[str]:
    said = dict.fromkeys(
        _shorten(host["said"]) if host["said"] else "nothing: it works" for host in hosts
    )
    return [f"- {each}" for each in said]


def _shorten(text: str) -> str:
    # Paths of the build machine are useless to the reader.
    words = [word for word in text.split() if "/third_party/" not in word]
    text = " ".join(words)
    return f"`{text[:LONGEST_SAID]}{'…' if len(text) > LONGEST_SAID else ''}`"


def _doctor_said(hosts: list[dict[str, Any]]) -> list[str]:
    said = {f"{each['code']}: {each['fact']}": None for host in hosts for each in host["said"]}
    return [f"- {each}" for each in said] or ["- nothing: all is open"]


def page(measured: list[dict[str, Any]], timeout_s: float) -> str:
    """Return the page."""
    when = datetime.now(timezone.utc).date().isoformat()
    facts = (
        f"Measured on {when} with torch {version('torch')}, Python {platform.python_version()}, "
        f"Linux {platform.release().split('-')[0]}, {os.cpu_count()} cores, by `python benchmarks/mesh.py --timeout {timeout_s:g}`."
    )
    intro = f"""# What you read about a broken network

Each section is a network of hosts (Linux namespaces with their own firewalls, network cards and `/etc/hosts`) with one thing broken, or none.
torch's side is `init_process_group("gloo", timeout={timeout_s:g} s)` and one all-reduce of 400 kB on every host; if the hosts print different messages, all of them are listed.
Its timeout is {timeout_s:g} s here so that the page can be made in minutes; torch's default is 30 minutes, and gloo's connect phase takes five times the timeout.
The doctor's side is its mesh check, without the all-reduce; it waits 3 s for missing hosts.
The times are those of the slowest host.
"""
    return "\n".join([intro, facts, "", *show(measured), ""])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=4.0, help="torch's timeout in seconds")
    parser.add_argument("--json", action="store_true", help="print numbers")
    parser.add_argument("--save", metavar="FILE", help="write a page")
    parser.add_argument("--be-a-rank", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.be_a_rank:
        rank, world_size, timeout_s = asked.be_a_rank.split(",")
        be_a_rank(int(rank), int(world_size), float(timeout_s))
    sys.path.insert(0, str(KITS))
    sys.path.insert(0, str(KITS.parent / "programs"))
    os.environ["PYTHONPATH"] = str(
        KITS.parent / "programs"
    )  # of the processes that hosts fork from
    from hosts import find_obstacle, serving_forks
    from mesh_kit import FORKED

    obstacle = find_obstacle()
    if obstacle:
        print(f"nothing measured: {obstacle}")
        return
    measured = []
    with serving_forks(FORKED["examine"]):
        for condition in conditions():
            print(f"{condition.title} …", file=sys.stderr)
            measured.append(measure(condition, asked.timeout))
    print(json.dumps(measured, indent=2) if asked.json else "\n".join(show(measured)))
    if asked.save:
        Path(asked.save).write_text(page(measured, asked.timeout), encoding="utf-8")


if __name__ == "__main__":
    main()
