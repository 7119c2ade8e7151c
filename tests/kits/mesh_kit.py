"""Runs the mesh check on hosts made of namespaces, and reads the report of every host."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import machine
from hosts import Host, Network
from warm_python import Forked

from ddpsafe.doctor._mesh.protocol import Announced, Node

PROGRAM: Final = str(Path(__file__).parents[1] / "programs" / "mesh_programs.py")
_LIMIT_S: Final = machine.hang_limit(60)
FORKED: Final = {"examine": ("ddpsafe.doctor._mesh", "mesh_programs")}
"""Programs that are forked without torch, and what they need imported."""


class MakeHosts(Protocol):
    """Makes hosts that end with the test."""

    def __call__(self, size: int, **kinds: object) -> Network:
        """Make `size` hosts; see `Network`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The report of one host, as tables, and the lines printed during the examination."""

    findings: list[dict[str, Any]]
    matrix: dict[str, Any]
    took_s: float
    progress: list[str]

    def codes(self, *severities: str) -> list[str]:
        """Return the codes of its findings of some severities, by default those that are not ok."""
        wanted = severities or ("failed", "warning")
        return [each["code"] for each in self.findings if each["severity"] in wanted]

    def one(self, code: str) -> dict[str, Any]:
        """Return the only finding with a code."""
        (found,) = [each for each in self.findings if each["code"] == code]
        return found

    def only(self, code: str) -> dict[str, Any]:
        """Return the finding with a code, beside which all others are ok."""
        assert self.codes() == [code], [each["fact"] for each in self.findings]
        return self.one(code)

    def ways(self, *results: str) -> set[tuple[int, int]]:
        """Return the directions with one of some results."""
        return {
            (each["source"], each["target"])
            for each in self.matrix["directions"]
            if each["result"] in results
        }


def start_one(
    host: Host, network: Network, *, program: str = "examine", **asked: object
) -> subprocess.Popen[str] | Forked:
    """Start the check on one host; defaults depend on the host's index."""
    known = {"nnodes": len(network), "node_rank": host.index, **asked}
    env = known.pop("env", {})
    assert isinstance(env, dict)
    argv = [PROGRAM, program, json.dumps(known)]
    return host.fork(argv, env=env, modules=FORKED.get(program))


def read_one(started: subprocess.Popen[str] | Forked) -> Told:
    """Wait for a host's report."""
    out, err = started.communicate(timeout=_LIMIT_S)
    assert started.returncode == 0, f"{out}\n{err}"
    assert "Traceback" not in err, err
    return Told(**json.loads(out), progress=err.splitlines())


def examine(
    network: Network,
    *,
    hosts: Collection[int] | None = None,
    each: Mapping[int, Mapping[str, object]] | None = None,
    **asked: object,
) -> list[Told]:
    """Run the check on all or some hosts at once, with `each` for one host only; return their reports."""
    chosen = [host for host in network if hosts is None or host.index in hosts]
    own = each or {}
    started = [
        start_one(host, network, **{**asked, **own.get(host.index, {})})  # type: ignore[arg-type]
        for host in chosen
    ]
    return [read_one(process) for process in started]


def agree(told: Sequence[Told], *, within_s: float | None = None) -> Told:
    """Return the report of all hosts; fail unless they are the same, and came in time."""
    if within_s is not None:
        require_told_in_time(told, within_s)
    first = told[0]
    for each in told[1:]:
        assert each.findings == first.findings
        assert each.matrix == first.matrix
    return first


def require_told_in_time(told: Sequence[Told], limit_s: float) -> None:
    """Fail if an examination took too long."""
    machine.require_in_time(max(each.took_s for each in told), limit_s)


def wait_for_line(started: subprocess.Popen[str] | Forked, text: str) -> None:
    """Wait until a program has written a text to stderr."""
    assert started.stderr is not None
    for line in started.stderr:
        if text in line:
            return
    raise AssertionError(f"{text!r} was never said")


def healthy_node(rank: int, **changed: Any) -> Node:
    """Return the message of a healthy node."""
    known = {
        "node_rank": rank,
        "hostname": f"h{rank}",
        "machine": f"m{rank}",
        "announced": Announced(
            address=f"10.77.0.{rank + 1}", interface="eth0", chosen_by="the host's name"
        ),
        "port": 40000,
        "token": "ab",
        "mtu_bytes": 1500,
        "interfaces": {"eth0": {f"10.77.0.{rank + 1}": "10.77.0.0/24"}},
        "port_range": (32768, 60999),
        "has_torch": False,
    }
    return Node(**{**known, **changed})
