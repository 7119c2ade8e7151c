"""One job of several nodes in virtual time: its faults, its launchers, and what has to hold at its end."""

from __future__ import annotations

import logging
import random
import signal
import sys
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import network as net
import ranks
import virtual_time

from ddpsafe import DDPSafeError
from ddpsafe._config import LaunchConfig
from ddpsafe._launcher.launch_parts import LaunchParts
from ddpsafe._launcher.nodes.rounds import NodeLaunch
from ddpsafe._launcher.plan import make_plan
from ddpsafe._launcher.watch.signals import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpsafe._launcher.plan import LaunchPlan

PORT = 29400
_SLOW_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to a job.

    Attributes:
        kind: See `Job`: each kind is a method there.
        at_s: When; or
        after: After which step of which attempt; or
        on: When a message of this name is sent so many times.
        host: Where.
        late_s: How much later than that.
        for_s: How long.
        how: In which way.
    """

    kind: str
    host: int
    at_s: float | None = None
    after: tuple[int, int] | None = None
    on: tuple[str, int] | None = None
    late_s: float = 0.0
    for_s: float = 0.0
    how: str = ""

    def __str__(self) -> str:
        """Return it for a report."""
        if self.at_s is not None:
            when = f"at {self.at_s + self.late_s:.2f} s"
        elif self.after is not None:
            when = f"{self.late_s:.2f} s after step {self.after[1]} of attempt {self.after[0]}"
        else:
            assert self.on is not None
            when = f"{self.late_s:.2f} s after {self.on[0]} number {self.on[1]}"
        span = f" for {self.for_s:.2f} s" if self.for_s else ""
        return f"{self.kind} {self.how} on h{self.host} {when}{span}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job, and what happens to it.

    Attributes:
        seed: Decides all times.
        nnodes: How many nodes it wants.
        nproc: How many ranks each has.
        attempts: How many attempts it may make.
        steps: How many steps it makes.
        min_nodes: With how many it can run; 0 for all.
        spares: How many further launchers wait.
        saves: Whether the script stops when it is asked to.
        faults: What happens.
    """

    seed: int
    nnodes: int
    nproc: int
    attempts: int
    steps: int
    min_nodes: int = 0
    spares: int = 0
    saves: bool = False
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        """Return it for a report."""
        size = f"{self.min_nodes}:{self.nnodes}" if self.min_nodes else str(self.nnodes)
        lines = [
            f"{size} nodes of {self.nproc}, {self.spares} spares, {self.attempts} attempts",
            f"  {self.steps} steps{', saves' if self.saves else ''}",
            *(f"  {fault}" for fault in self.faults),
        ]
        return "\n".join(lines)


@dataclass(eq=False)
class End:
    """How a launcher has ended."""

    launcher: net.Launcher
    task: virtual_time.Task
    at_s: float = 0.0

    @property
    def error(self) -> BaseException | None:
        """What it raised."""
        return self.task.error

    def __str__(self) -> str:
        """Return it in one line."""
        if not self.task.is_done:
            return "was killed" if self.launcher.is_dead else "has not ended"
        if self.error is None:
            return "good"
        if isinstance(self.error, DDPSafeError):
            return f"{type(self.error).__name__}: {self.error.explanation.what}"
        if isinstance(self.error, Interrupted):
            return f"Interrupted by {self.error.signum.name} on {self.error.where!r}"
        return repr(self.error)


class Directory:
    """A run directory that keeps nothing."""

    path = None
    holds_failure = is_kept = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Do nothing."""
        return lambda *_, **__: None


class Job(ranks.Cluster):
    """One job in virtual time."""

    current: Job

    def __init__(self, scenario: Scenario) -> None:
        """Make the hosts."""
        self.scenario = scenario
        self.kernel = virtual_time.Kernel(scenario.seed)
        virtual_time.running = self.kernel
        random.seed(scenario.seed)  # torch and tenacity use it
        virtual_time.ready_handles.clear()
        self.network = net.Network(self.kernel)
        net.Channel.network = self.network
        self.trainings = {}
        self.ends: list[End] = []
        Job.current = self
        pick = self.kernel.random
        self.hosts = [
            net.Host(
                name=f"h{number}",
                address=f"10.0.0.{number + 1}",
                monotonic_ahead_s=pick.uniform(0, 1e5),
                wall_ahead_s=pick.uniform(-3600, 3600),
            )
            for number in range(scenario.nnodes + scenario.spares)
        ]
        for host in self.hosts:
            self.network.add(host)
        self._due = list(scenario.faults)
        self._sent: Counter[str] = Counter()
        self.network.note_sent = self._note_sent
        self.culprits: set[ranks.Rank] = set()
        self._plan = _plan_of(scenario)
        self._open_faults = 0

    # The launchers.

    def start(self, host: net.Host) -> None:
        """Start a launcher."""
        launcher = net.Launcher(name=f"{host.name}.{len(self.ends)}", host=host)
        task = self.kernel.spawn(launcher, lambda: self._launch(launcher))
        self.ends.append(End(launcher, task))

    def _launch(self, launcher: net.Launcher) -> dict[int, object]:
        nothing: Any = None
        calls: Any = _Calls(launcher)
        parts = LaunchParts(
            plan=self._plan,
            calls=calls,
            run_rank=nothing,
            examine_nodes=nothing,
            directory=Directory(),
            cancelled=virtual_time.Event(),
        )
        try:
            return NodeLaunch(parts).run()
        except DDPSafeError as error:
            launcher.failures.append(error)
            raise
        finally:
            for end in self.ends:
                if end.launcher is launcher:
                    end.at_s = self.kernel.now_s

    # What happens to it.

    def note_step(self, training: ranks.Training) -> None:
        """Let the faults of this step happen."""
        for fault in [*self._due]:
            if fault.after == (training.attempt, training.steps):
                self._due.remove(fault)
                self.kernel.after(fault.late_s, lambda fault=fault: self._happen(fault))

    def _note_sent(self, message: object) -> None:
        """Let the faults of this message happen."""
        name = type(message).__name__
        self._sent[name] += 1
        for fault in [*self._due]:
            if fault.on == (name, self._sent[name]):
                self._due.remove(fault)
                self.kernel.after(fault.late_s, lambda fault=fault: self._happen(fault))

    def _happen(self, fault: Fault) -> None:
        host = self.hosts[fault.host % len(self.hosts)]
        log(f"--- {fault}")
        getattr(self, fault.kind)(fault, host)

    def _end_later(self, fault: Fault, act: Callable[[], None]) -> None:
        self._open_faults += 1

        def end() -> None:
            self._open_faults -= 1
            log(f"--- over: {fault}")
            act()

        self.kernel.after(fault.for_s, end)

    def _launcher_on(self, host: net.Host) -> net.Launcher | None:
        for end in reversed(self.ends):
            if end.launcher.host is host and not end.launcher.is_dead and not end.task.is_done:
                return end.launcher
        return None

    def rank(self, fault: Fault, host: net.Host) -> None:
        """A rank raises, is killed, exits, hangs, or returns before the others."""
        found = ranks.of_host(self, host)
        if not found:
            return
        rank = found[-1]
        self.culprits.add(rank)
        if fault.how == "raises":
            rank.raise_("a bug")
        elif fault.how == "hangs":
            rank.hangs = True
        elif fault.how == "returns":
            rank.finish()
        else:
            rank.exit(-signal.SIGKILL if fault.how == "killed" else 3)

    def launcher(self, fault: Fault, host: net.Host) -> None:
        """A launcher is killed; its ranks end with it. It is started again later."""
        launcher = self._launcher_on(host)
        if launcher is not None:
            self._kill(launcher)
            if fault.for_s:
                self._end_later(fault, lambda: self.start(host))

    def _kill(self, launcher: net.Launcher) -> None:
        launcher.is_dead = True
        if launcher.channel is not None:
            launcher.channel.vanish()
        for rank in ranks.of_host(self, launcher.host):
            if rank.launcher is launcher:
                self.culprits.add(rank)
                delay_s = self.kernel.random.uniform(0.01, 1.0)
                self.kernel.after(delay_s, lambda rank=rank: rank.exit(-signal.SIGKILL))

    def power(self, fault: Fault, host: net.Host) -> None:
        """A host loses power, and perhaps starts again with a new launcher."""
        launcher = self._launcher_on(host)
        self.network.stop_host(host)
        if launcher is not None:
            launcher.is_dead = True
            if launcher.channel is not None:
                launcher.channel.vanish()
        for rank in ranks.of_host(self, host):
            self.culprits.add(rank)
            rank.runs = False
        if fault.for_s:

            def restart() -> None:
                self.network.start_host(host)
                self.start(host)

            self._end_later(fault, restart)

    def signal(self, fault: Fault, host: net.Host) -> None:
        """A launcher receives a signal, and perhaps another one after it."""
        launcher, (name, *more) = self._launcher_on(host), fault.how.split()
        if launcher is not None and launcher.inbox is not None:
            with self.kernel.at(launcher):
                launcher.inbox.put(signal.Signals[name], None)
            self.kernel.news(launcher)
        if more:
            self._end_later(fault, lambda: self.signal(replace(fault, how=more[0]), host))

    def pause(self, fault: Fault, host: net.Host) -> None:
        """A launcher is stopped for a while; its kernel answers for it."""
        launcher = self._launcher_on(host)
        if launcher is None or launcher.is_paused:
            return
        launcher.is_paused = True

        def resume() -> None:
            launcher.is_paused = False
            self.kernel.resume(launcher)

        self._end_later(fault, resume)

    def slow(self, fault: Fault, host: net.Host) -> None:
        """A launcher reads late for a while; its kernel answers for it."""
        launcher = self._launcher_on(host)
        if launcher is not None:
            launcher.reads_within_s = _SLOW_S
            self._end_later(fault, lambda: setattr(launcher, "reads_within_s", 0.0))

    def outage(self, fault: Fault, host: net.Host) -> None:
        """A host is cut off from all others, or from node 0's, for a while: in both directions, or in one."""
        others = [other for other in self.hosts if other is not host]
        if fault.how.endswith("node-0"):
            others = [self.hosts[0]] if host is not self.hosts[0] else []
        how, _, way = fault.how.partition(" ")[0].partition("-")
        ways = [(host, other) for other in others if way != "in"]
        ways += [(other, host) for other in others if way != "out"]
        for sender, to in ways:
            self.network.cut(sender, to, how)

        def repair() -> None:
            for sender, to in ways:
                self.network.repair(sender, to)

        self._end_later(fault, repair)

    def freeze(self, fault: Fault, host: net.Host) -> None:
        """A host stops for a while, its kernel included, as a virtual machine that is moved."""
        self.outage(fault, host)
        self.pause(fault, host)

    def clock(self, _: Fault, host: net.Host) -> None:
        """The wall clock of a host is set."""
        host.wall_ahead_s += self.kernel.random.uniform(-7200, 7200)

    def unmount(self, *_: object) -> None:
        """The last spare host does not have the folder of the checkpoints."""
        self.hosts[-1].has_mount = not self.scenario.spares

    # The whole.

    def run(self, limit_s: float = 3600.0) -> None:
        """Run it to its end, or so long."""
        for host in self.hosts[: self.scenario.nnodes]:
            delay_s = self.kernel.random.uniform(0, 5)
            self.kernel.after(delay_s, lambda host=host: self.start(host))
        for host in self.hosts[self.scenario.nnodes :]:
            delay_s = self.kernel.random.uniform(8, 15)
            self.kernel.after(delay_s, lambda host=host: self.start(host))
        for fault in [*self._due]:
            if fault.at_s is not None:
                self._due.remove(fault)
                self.kernel.after(
                    fault.at_s + fault.late_s, lambda fault=fault: self._happen(fault)
                )
        count = len(self.hosts)

        def is_over() -> bool:
            started = len(self.ends) >= count and not self._open_faults
            return started and all(end.task.is_done or end.launcher.is_dead for end in self.ends)

        self.kernel.run(is_over, limit_s)

    def close(self) -> None:
        """Free everything."""
        self.kernel.is_over = True
        self.kernel.close()
        virtual_time.running = None


def _plan_of(scenario: Scenario) -> LaunchPlan:
    """Return what every launcher is asked for."""
    asked: dict[str, Any] = {
        "nnodes": scenario.nnodes,
        "nproc_per_node": scenario.nproc,
        "backend": "gloo",
        "preflight": "off",
        "rendezvous": {"endpoint": f"h0:{PORT}", "join": 120, "last_call": 8, "id": "job"},
        "timeouts": {"start": 60, "node_loss": 20, "stop": 30, "progress": 60},
        "retry": {
            "attempts": scenario.attempts,
            "on": ["startup-network", "port", "peer-lost", "killed", ValueError],
            "no_progress": None,
        },
    }
    if scenario.min_nodes:
        asked["rendezvous"]["min_nodes"] = scenario.min_nodes
    return make_plan(LaunchConfig.resolve(**asked), style="launch")


class _Calls:
    """The call of the ranks, which nothing changes; it hears of each failure that is retried."""

    current = None
    command = ("train.py",)

    def __init__(self, launcher: net.Launcher) -> None:
        self._launcher = launcher

    def change(self, failure: DDPSafeError) -> bool:
        self._launcher.failures.append(failure)
        return False


shows = [False]


def log(text: str) -> None:
    """Show a line of the simulation."""
    if shows[0]:
        kernel = virtual_time.running
        now_s = 0.0 if kernel is None else kernel.now_s
        print(f"{now_s:9.3f} {text}")


class Handler(logging.Handler):
    """Shows what launchers log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show a line."""
        kernel = virtual_time.running
        place = None if kernel is None else kernel.place
        log(f"{place.name if place else '-':6} {record.getMessage()}")


def show() -> None:
    """Show everything from now on."""
    shows[0] = True
    sys.stdout.reconfigure(line_buffering=True)
