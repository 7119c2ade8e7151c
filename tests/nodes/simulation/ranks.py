"""The ranks of the simulation: they join, make steps together, and fail or return as ranks do.

What launchers see of a rank is `RankState`, the same as of a real one; only its process is simulated.
"""

from __future__ import annotations

import itertools
import signal
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import virtual_time

from ddpsafe._launcher.processes.rank_process import Activity, RankState
from ddpsafe._wire import payload
from ddpsafe._wire.messages import (
    MAIN_GROUP,
    AcceptsStop,
    CheckpointFolder,
    Collective,
    Entered,
    Position,
    Raised,
    RankOutcome,
    Returned,
    StopPromise,
    Stops,
)
from ddpsafe._wire.rank_pipe import ASK_POSITION, ASK_STOP, CALL_NUMBER, STOP_AT, Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from network import Host, Launcher, Network
    from virtual_time import Kernel

STEP_S: Final = 1.0
_NOTICE: Final = 0.8
"""How many of the ranks notice that another one has ended."""

_LOST: Final = "Connection closed by peer"
_handles = itertools.count(2_000_000)
_VALUE = bytes(payload.dumps_result(None))


class Rank(RankState):
    """One rank, as its launcher sees it."""

    broke_late = False
    full_log = None
    living_threads = None
    pid = None

    def __init__(self, training: Training, world: Any, launcher: Launcher) -> None:
        """Start it."""
        with training.kernel.at(launcher):
            super().__init__(self.send)
        self.training, self.world, self.launcher = training, world, launcher
        self.boot = launcher.host.boots
        self.exitcode: int | None = None
        self.is_being_ended = False
        self.result: bytes | None = None
        self.relay: Callable[[Any], None] | None = None
        self.runs = True  # its process
        self.is_broken = False  # it has raised, has lost a peer, or has returned
        self.hangs = False
        self.asked_to_stop = False
        self.stops_at: int | None = None
        self.steps = self.questions = 0
        self._reports: list[Any] = []
        self._end, self._news = next(_handles), next(_handles)
        self.receiver = SimpleNamespace(fileno=lambda: self._news, closed=False)
        virtual_time.ready_handles[self._end] = lambda: not self.runs and self.ended_ns is None
        virtual_time.ready_handles[self._news] = lambda: bool(self._reports)
        self.spec = SimpleNamespace(run_dir="/nowhere", world=world, style="launch")

    @property
    def rank(self) -> int:
        """Its rank."""
        return int(self.world.rank)

    @property
    def is_there(self) -> bool:
        """Whether its process runs, on a host that does."""
        host = self.launcher.host
        return self.runs and host.is_up and host.boots == self.boot

    def end_handle(self) -> int:
        """Return the handle of its end."""
        return self._end

    # What the launcher does.

    def take_reports(self) -> None:
        """Read what it has sent."""
        while self._reports:
            message = self._reports.pop(0)
            self.take(message)
            if isinstance(message, Returned):
                self.result = message.payload
            if self.relay is not None:
                self.relay(message)

    def note_end(self, seen_ns: int) -> None:
        """Note its end."""
        if self.ended_ns is None:
            self.take_reports()
            self.ended_ns = seen_ns

    def send(self, data: bytes) -> None:
        """Take a request of the launcher."""
        if data == ASK_POSITION:
            self.questions += 1
            self.report(self.where())
        elif data == ASK_STOP:
            self.asked_to_stop = True
            self.report(StopPromise(call=self.steps + 1))
        elif data.startswith(STOP_AT):
            self.stops_at = CALL_NUMBER.unpack(data[len(STOP_AT) :])[0]

    def progress(self) -> Progress:
        """Return its progress."""
        return Progress(steps=self.steps, last_ns=1 if self.steps else 0)

    def activity(self) -> Activity:
        """It always runs: proofs of deadlocks are not simulated."""
        return Activity("R", (int(self.training.kernel.now_s * 1000),))

    def error_text(self) -> str:
        """It prints nothing."""
        return ""

    def outcome(self) -> RankOutcome:
        """Return what became of it."""
        status = "running"
        was_killed = (
            not self.alive
            and (self.exitcode or 0) < 0
            and not self.is_being_ended
            and not self.failed
        )
        if self.returned is not None:
            status = "returned"
        elif self.raised is not None and not was_killed:
            status = "raised"
        elif self.is_being_ended:
            status = "stopped"
        elif self.exitcode is not None and not self.alive:
            status = "killed" if self.exitcode < 0 else "exited"
        return RankOutcome(
            rank=self.rank,
            local_rank=self.world.local_rank,
            pid=None,
            hostname=self.launcher.host.name,
            status=status,
            phase=self.raised.phase if self.raised else self.phase,
            exit_code=self.exitcode,
            raised=None if status == "killed" else self.raised,
            ended_ns=self.ended_ns,
            node_rank=self.world.node_rank,
            position=self.position,
            progress=self.progress(),
        )

    # What the process does.

    def report(self, message: Any) -> None:
        """Send something to the launcher."""
        if self.is_there:
            self._reports.append(message)
            self.training.kernel.news(self.launcher)

    def where(self) -> Position:
        """Return where it is: in the all-reduce of the next step, with which all ranks begin it."""
        waits = self.training.has_joined and not (self.is_broken or self.hangs)
        waits = waits and not self.training.is_over
        call = Collective(
            group=MAIN_GROUP,
            number=self.steps + waits,
            name="gloo:all_reduce",
            sizes="[[8]]",
            state="started" if waits else "completed",
            entered_ns=0,
        )
        return Position(collectives=(call,) if call.number else ())

    def exit(self, code: int) -> None:
        """End the process."""
        if self.runs:
            self.runs, self.exitcode = False, code
            self.training.kernel.news(self.launcher)
            self.training.note_end_of(self)

    def raise_(self, message: str, origin: str = "own") -> None:
        """Raise an exception, which ends the process soon."""
        if self.is_broken or not self.is_there or self.returned is not None:
            return
        position = self.where()
        self.is_broken = True
        with self.training.kernel.at(self.launcher):
            at_ns = int(virtual_time.monotonic_s() * 1e9)
        raised = Raised(
            type_name="ValueError" if origin == "own" else "RuntimeError",
            message=message,
            traceback="",
            payload=None,
            phase="running",
            where="train.py:1",
            position=position,
            at_ns=at_ns,
            origin=origin,
        )
        self.report(raised)
        self.training.later(0.02, 0.6, lambda: self.exit(1))

    def finish(self) -> None:
        """Return, unless it has raised meanwhile."""
        if self.is_broken:
            return
        self.is_broken = True
        self.report(Returned(payload=_VALUE, position=self.where(), stop_calls=self.steps))
        self.training.later(0.02, 0.6, lambda: self.exit(0))


class Training:
    """All ranks of one attempt."""

    def __init__(self, cluster: Cluster, attempt: int, world_size: int) -> None:
        """Begin without ranks."""
        self.cluster, self.kernel, self.attempt = cluster, cluster.kernel, attempt
        self.world_size = world_size
        self.ranks: dict[int, Rank] = {}
        self.has_joined = self.is_over = False
        self.steps = 0
        self._done: set[tuple[int, int]] = set()
        self.kernel.after(STEP_S, self._step)

    def later(self, least_s: float, most_s: float, act: Callable[[], None]) -> None:
        """Do something after a random time."""
        self.kernel.after(self.kernel.random.uniform(least_s, most_s), act)

    def _all_reach_each_other(self) -> bool:
        hosts = list({rank.launcher.host for rank in self.ranks.values()})
        network = self.cluster.network
        return all(network.is_open(one, other) for one, other in itertools.combinations(hosts, 2))

    def _step(self) -> None:
        """Make a step, if all ranks are there; or join."""
        ranks = [self.ranks[number] for number in sorted(self.ranks)]
        if len(ranks) == self.world_size and not any(rank.is_there for rank in ranks):
            return
        whole = len(ranks) == self.world_size and all(
            rank.is_there and not (rank.is_broken or rank.hangs) for rank in ranks
        )
        if whole and self._all_reach_each_other():
            if not self.has_joined:
                self.has_joined = True
                for rank in ranks:
                    rank.report(Entered(phase="running"))
                    if self.cluster.scenario.saves:
                        rank.report(AcceptsStop())
                        rank.report(CheckpointFolder(path="/checkpoints"))
            else:
                self._train(ranks)
        self.kernel.after(STEP_S, self._step)

    def _train(self, ranks: Sequence[Rank]) -> None:
        self.steps += 1
        for rank in ranks:
            rank.steps = self.steps
        stops = [
            rank for rank in ranks if rank.stops_at is not None and self.steps >= rank.stops_at
        ]
        if len(stops) == len(ranks):
            self.is_over = True
            for rank in ranks:
                rank.report(Stops())
                self.later(0.0, 0.3, rank.finish)
        elif self.steps >= self.cluster.scenario.steps:
            self.is_over = True
            for rank in ranks:
                self.later(0.0, 0.3, rank.finish)
        self.cluster.note_step(self)

    def note_end_of(self, ended: Rank) -> None:
        """Let the others notice that a rank has ended."""
        if ended.is_being_ended or ended.exitcode == 0:
            return
        host = ended.launcher.host
        for rank in self.ranks.values():
            is_connected = self.cluster.network.travels(host, rank.launcher.host)
            # The others wait for ever.
            if rank is not ended and is_connected and self.kernel.random.random() < _NOTICE:
                self.later(0.001, 0.4, lambda rank=rank: rank.raise_(_LOST, "peer-lost"))


class Cluster:
    """What the ranks know of the simulation around them."""

    kernel: Kernel
    network: Network
    scenario: Any
    trainings: dict[str, Training]

    def note_step(self, training: Training) -> None:
        """Called after each step that is not the last one."""


def end_processes(processes: Sequence[Rank], kernel: Kernel, *, grace: timedelta) -> None:
    """End ranks, as `shutdown.end_processes` does."""
    del grace
    for rank in processes:
        if rank.runs:
            rank.is_being_ended = True
            delay_s = kernel.random.uniform(0.01, 0.5)
            kernel.after(delay_s, lambda rank=rank: rank.exit(-signal.SIGTERM))
    while any(rank.runs for rank in processes):
        kernel.pause(0.05)
    for rank in processes:
        with_ns = int(virtual_time.monotonic_s() * 1e9)
        rank.note_end(with_ns)


def ask_where(processes: Sequence[Rank]) -> None:
    """Ask ranks where they are before they are ended, as `attempt.ask_where` does."""
    for rank in processes:
        if rank.is_there and rank.alive:
            rank.position = rank.where()


@contextmanager
def started_ranks(cluster: Cluster, launcher: Launcher, number: int, parts: Any) -> Iterator[Any]:
    """Start the ranks of one node."""
    plan, kernel = parts.plan, cluster.kernel
    kernel.pause(kernel.random.uniform(0.05, 1.5))
    key = plan.place.store.key
    world_size = plan.worlds[0].world_size
    training = cluster.trainings.setdefault(key, Training(cluster, number, world_size))
    processes = [Rank(training, world, launcher) for world in plan.worlds]
    training.ranks.update({rank.rank: rank for rank in processes})

    def end_ranks(processes: Sequence[Rank], *, grace: timedelta = timedelta(0)) -> None:
        end_processes(processes, kernel, grace=grace)

    try:
        yield processes, end_ranks
    finally:
        if not kernel.is_over:
            end_processes(processes, kernel, grace=timedelta(0))


def of_host(cluster: Cluster, host: Host) -> list[Rank]:
    """Return the ranks that run on a host."""
    return [
        rank
        for training in cluster.trainings.values()
        for rank in training.ranks.values()
        if rank.launcher.host is host and rank.is_there
    ]
