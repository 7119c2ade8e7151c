"""Runs launchers on several hosts of a network, reads their output, and checks for leftovers."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import machine
import scripts
from hosts import Host, Network
from warm_python import Forked

from ddpsafe._launcher.launch_parts import LaunchParts
from ddpsafe._launcher.plan import LaunchPlan

PROGRAM: Final = Path(__file__).parents[1] / "programs" / "node_programs.py"
LIMIT_S: Final = machine.hang_limit(180)

FIELDS: Final[dict[str, Any]] = {
    "start_method": "forkserver",
    "backend": "gloo",
    "preflight": "off",
    "console": "all",
    "timeouts": {"collective": 6, "grace": 3},
}
"""Fields of every launch, unless a case says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch on all hosts.

    Attributes:
        name: Name for messages, and of the file with the time of the fault.
        what: The fault; see `node_programs.break_down`.
        rank: The rank that meets it.
        fields: Fields of `LaunchConfig` beside `FIELDS`.
        of_node: Further fields for single nodes.
        env: Variables of single nodes.
        nodes: The nodes that take part; by default all.
        after: Files in the folder of the test that single nodes wait for before they launch.
        touches: Files there that single nodes make when their launch has ended.
        leaves: When the launchers of single nodes end early, see `node_programs.leave`; the last
            case of such a node.
    """

    name: str
    what: str = "none"
    rank: int = -1
    fields: dict[str, Any] = field(default_factory=dict)
    of_node: dict[int, dict[str, Any]] = field(default_factory=dict)
    env: dict[int, dict[str, str]] = field(default_factory=dict)
    nodes: tuple[int, ...] | None = None
    after: dict[int, str] = field(default_factory=dict)
    touches: dict[int, str] = field(default_factory=dict)
    leaves: dict[int, str] = field(default_factory=dict)

    def as_json(self, folder: Path, node: int, nproc: Sequence[int]) -> dict[str, Any]:
        """Return it for the program on a node."""
        run_dir = str(folder / f"run-{self.name}-{node}")
        fields = {"nnodes": len(nproc), "nproc_per_node": nproc[node], "run_dir": run_dir}
        fields = {**FIELDS, **fields, **self.fields, **self.of_node.get(node, {})}
        return {
            "name": self.name,
            "what": self.what,
            "rank": self.rank,
            "fields": fields,
            "env": self.env.get(node, {}),
            "is_in": self.nodes is None or node in self.nodes,
            "after": self.after.get(node),
            "touches": self.touches.get(node),
            "leaves": self.leaves.get(node),
        }


class Launcher:
    """A program on a host, with its output so far."""

    started: ClassVar[list[Launcher]] = []
    """All launchers of a test, which are ended with it."""

    def __init__(self, host: Host, arguments: Sequence[str], env: dict[str, str]) -> None:
        self.host = host
        Launcher.started.append(self)
        environment = {**scripts.clean_environment(), **env}
        self._process: subprocess.Popen[str] | Forked
        if scripts.can_be_forked(arguments, environment):
            self._process = host.fork(arguments, env=environment)
        else:
            self._process = host.start([sys.executable, *arguments], env=environment)
        self.lines: list[tuple[float, str]] = []
        self.errors: list[str] = []
        self.ended_s: float | None = None
        self._threads = [
            threading.Thread(target=self._read_out),
            threading.Thread(target=self._read_err),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """The process id outside of the host."""
        return self._process.pid

    def _read_out(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append((time.time(), line.rstrip("\n")))
        self.ended_s = time.time()

    def _read_err(self) -> None:
        assert self._process.stderr is not None
        self.errors.extend(self._process.stderr)

    @property
    def err(self) -> str:
        """What the program has written to stderr."""
        return "".join(self.errors)

    def await_said(self, text: str) -> None:
        """Wait until the program has written a text to stderr."""
        scripts.wait_until(lambda: text in self.err, otherwise=lambda: (self.err, self.lines))

    def end(self, within_s: float = LIMIT_S) -> int:
        """Wait until the program exits; return its exit code."""
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise AssertionError(
                f"{self.host.name} did not end: {self.lines[-10:]} {self.err[-3000:]}"
            ) from None
        for thread in self._threads:
            thread.join(LIMIT_S)
        return code

    def kill(self) -> None:
        """Kill the program if it is still running."""
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()

    def wait_for_end(self) -> float:
        """Wait until the program has ended; return when that was."""
        self.end()
        assert self.ended_s is not None
        return self.ended_s

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the result of each case, by name."""
        found = [json.loads(line) for _, line in self.lines if line.startswith("{")]
        return {each["name"]: each for each in found}


def retrying(attempts: int, *on: str, **more: Any) -> dict[str, Any]:
    """Return the fields of a retry policy without pauses."""
    return {"attempts": attempts, "on": [*on], "backoff_initial": 0, "jitter": 0, **more}


_ports = itertools.count(29400, 50)


def start_job(
    network: Network,
    cases: Sequence[Case],
    folder: Path,
    *,
    nproc: Sequence[int],
    port: int = 0,
    at: str = "h0",
) -> list[Launcher]:
    """Start the launchers of a job on the first hosts of a network, with one endpoint."""
    port = port or next(_ports)
    return [
        start_node(network, each, cases, folder, nproc, f"{at}:{port}")
        for each in range(len(nproc))
    ]


def start_node(
    network: Network,
    index: int,
    cases: Sequence[Case],
    folder: Path,
    nproc: Sequence[int],
    endpoint: str,
    env: dict[str, str] | None = None,
) -> Launcher:
    """Start the launcher of one node."""
    as_json = [case.as_json(folder, index, nproc) for case in cases]
    arguments = [str(PROGRAM), str(folder), endpoint, json.dumps(as_json)]
    return Launcher(network[index], arguments, env or {})


def run_job(
    network: Network, cases: Sequence[Case], folder: Path, *, nproc: Sequence[int], at: str = "h0"
) -> list[dict[str, dict[str, Any]]]:
    """Run the cases on the first hosts; return the results of each node."""
    return finish_job(network, cases, start_job(network, cases, folder, nproc=nproc, at=at))


def finish_job(
    network: Network,
    cases: Sequence[Case],
    launchers: Sequence[Launcher],
    *,
    besides: Sequence[int] = (),
) -> list[dict[str, dict[str, Any]]]:
    """Wait until the launchers have run all cases and exited; return their results."""
    for launcher in launchers:
        assert launcher.end() == 0, launcher.err[-4000:]
    require_nothing_left(network, besides=besides)
    found = [launcher.results() for launcher in launchers]
    for results, launcher in zip(found, launchers, strict=True):
        expected = [case.name for case in cases]
        left = [case.name for case in cases if launcher.host.index in case.leaves]
        if left:
            expected = expected[: expected.index(left[0]) + 1]
        assert list(results) == expected, launcher.err[-4000:]
    return found


def await_ranks(folder: Path, name: str, ranks: int, launchers: list[Launcher]) -> None:
    """Wait until this many ranks train; none of these launchers may end before."""

    def train() -> bool:
        ended = [each.lines[-1:] for each in launchers if each.ended_s is not None]
        assert not ended, ended
        return len(list(folder.glob(f"running-{name}-*"))) >= ranks

    scripts.wait_until(
        train, otherwise=lambda: [launcher.err[-1500:] for launcher in launchers], within_s=120
    )


def await_files(launchers: list[Launcher], folder: Path, pattern: str, count: int) -> None:
    """Wait until ranks have made so many files, each one."""
    scripts.wait_until(
        lambda: len(list(folder.glob(pattern))) == count,
        otherwise=lambda: [launcher.err for launcher in launchers],
    )


def parts_of(plan: LaunchPlan, **parts: Any) -> LaunchParts:
    """Return the parts of a launch that starts no ranks."""
    nothing: Any = SimpleNamespace()
    without: dict[str, Any] = {
        "calls": SimpleNamespace(current=None),
        "run_rank": nothing,
        "examine_nodes": nothing,
        "directory": SimpleNamespace(path=None, report=lambda *_: None, holds_failure=False),
    }
    return LaunchParts(plan=plan, **{**without, **parts})


def require_the_same(said: Sequence[dict[str, Any]]) -> None:
    """Fail unless all nodes reported the same error."""
    for key in ("error", "text", "code", "kind", "rank", "attempt"):
        assert len({str(each.get(key)) for each in said}) == 1, (key, said)


def fault_s(folder: Path, case: str) -> float:
    """Return the time of a case's fault."""
    return float((folder / f"fault-{case}").read_text())


def require_nothing_left(network: Network, *, besides: Sequence[int] = ()) -> None:
    """Fail unless no process of a launch is left on any host."""

    def left() -> list[str]:
        lines = [
            f"{host.name}: {line}"
            for host in network
            if host.index not in besides
            for line in host.run("ps", "-eo", "pid,args").splitlines()
            if "multiprocessing" in line or "ddpsafe" in line or "node_programs" in line
        ]
        return [line for line in lines if "ps -eo" not in line]

    scripts.wait_until(lambda: not left(), otherwise=left)
