"""No delay, pause, outage or clock makes node 0 prove a deadlock that is none: random jobs on simulated nodes.

The nodes and their network are simulated, in virtual time; what node 0 concludes from their messages is
the real thing. `tests/nodes/test_faults.py` has real deadlocks on real hosts.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from typing import Any, Final

import pytest
from random_jobs import Job, random_job

from ddpsafe._job.channel import ClockOffset
from ddpsafe._launcher.diagnosis.wait_graph import Deadlock
from ddpsafe._launcher.nodes.node_messages import NodeFacts, NodeProgress, RankRequest, RoundPlan
from ddpsafe._launcher.nodes.node_zero import RemoteRank, world_of
from ddpsafe._launcher.processes.rank_process import Activity
from ddpsafe._launcher.watch.deadlock_watch import DeadlockWatch, LiveSettings
from ddpsafe._wire.messages import Entered, Returned
from ddpsafe._wire.rank_pipe import Progress

JOBS: Final = 1_000
AT_ONCE: Final = 125
"""How many of them one test tries: on a machine that is busy, each may take a second."""

SEEDS: Final = pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(50), id="50"),
        *(
            pytest.param(range(first, first + AT_ONCE), marks=pytest.mark.full, id=f"from {first}")
            for first in range(0, JOBS, AT_ONCE)
        ),
    ],
)
TICK_S: Final = 0.2
RUNS_S: Final = 90.0
QUIET_AFTER_S: Final = 30.0
"""From then on no node is paused or cut off, so that a deadlock must be found."""

REPORT_S: Final = 1.0
CLOCK_ERROR_NS: Final = 50_000_000


class Clock:
    """The time of node 0."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def ns(self) -> int:
        """Return it in nanoseconds."""
        return int(self.now_s * 1e9)


class Wire:
    """One direction of a connection: it delays, keeps the order, and may be cut for a while."""

    def __init__(self, choose: random.Random, clock: Clock) -> None:
        """Delay by up to some limit."""
        self._choose, self._clock = choose, clock
        self._longest_s = choose.choice([0.0, 0.05, 0.4, 1.5])
        self._queue: deque[tuple[float, Any]] = deque()
        self._last_s = 0.0
        self.cut_until_s = 0.0

    def put(self, message: Any) -> None:
        """Send a message, or what is lost while the wire is cut."""
        due_s = self._clock.now_s + self._choose.random() * self._longest_s
        if isinstance(message, NodeProgress) and self.cut_until_s > self._clock.now_s:
            return  # routine, which is not sent again
        self._last_s = max(self._last_s, due_s, self.cut_until_s)
        self._queue.append((self._last_s, message))

    def take(self) -> list[Any]:
        """Return what has arrived."""
        arrived = []
        while self._queue and self._queue[0][0] <= self._clock.now_s:
            arrived.append(self._queue.popleft()[1])
        return arrived


class Node:
    """A node: a launcher that relays and reports, and ranks of a simulated job."""

    def __init__(self, number: int, job: Job, choose: random.Random, clock: Clock) -> None:
        self.number, self._job, self._clock = number, job, clock
        self._choose = choose
        self.to_node, self.to_zero = Wire(choose, clock), Wire(choose, clock)
        self.ahead_ns = choose.randrange(-(10**12), 10**12)
        self.frozen_until_s = 0.0
        self.is_host_frozen = False
        self._returned: set[int] = set()
        self._next_report_s = 0.0
        self._pending: list[RankRequest] = []
        self._stopped_until_s: dict[int, float] = {}
        self.ranks: range = range(0)

    def send(self, message: RankRequest, *, to: tuple[int, ...]) -> None:
        """Take a request of node 0; a stand-in for `Channel.send`."""
        assert to == (self.number,)
        self.to_node.put(message)

    def work(self) -> None:
        """Relay and report, unless it is paused."""
        if self._clock.now_s < self.frozen_until_s:
            return
        self.is_host_frozen = False
        for rank in self.ranks:
            if self._job.ranks[rank].has_left and rank not in self._returned:
                self._returned.add(rank)
                at = self._job.look(rank).position
                self.to_zero.put((rank, Returned(payload=None, position=at)))
        requests, self._pending = self._pending + self.to_node.take(), []
        for request in requests:
            if self.is_stopped(request.rank):
                self._pending.append(request)
            elif not self._job.ranks[request.rank].has_left:
                self.to_zero.put((request.rank, self._job.look(request.rank)))
                self._next_report_s = 0.0
        if self._clock.now_s >= self._next_report_s:
            self._next_report_s = self._clock.now_s + REPORT_S
            self.to_zero.put(self._report())

    def _report(self) -> NodeProgress:
        moves = {rank: self._job.ranks[rank].threads[0].moves for rank in self.ranks}
        return NodeProgress(
            at_ns=self._clock.ns() + self.ahead_ns,
            ranks=dict.fromkeys(self.ranks, Progress()),
            activity={
                rank: Activity("T" if self.is_stopped(rank) else "S", (count,))
                for rank, count in moves.items()
            },
        )

    def is_stopped(self, rank: int) -> bool:
        """Return whether a signal has stopped a rank: for too short to count."""
        return self._clock.now_s < self._stopped_until_s.get(rank, 0.0)

    def stop_a_rank(self) -> None:
        """Stop a rank for a moment."""
        rank = self._choose.choice(self.ranks)
        self._stopped_until_s[rank] = self._clock.now_s + self._choose.uniform(0.1, 2.5)

    def meet_trouble(self) -> None:
        """Pause the launcher or the whole host, or cut one direction or both, for some seconds."""
        ends_s = self._clock.now_s + self._choose.uniform(0.5, 8.0)
        what = self._choose.choice(["launcher", "host", "to", "from", "both"])
        if what in ("launcher", "host"):
            self.frozen_until_s, self.is_host_frozen = ends_s, what == "host"
        if what in ("to", "both"):
            self.to_node.cut_until_s = ends_s
        if what in ("from", "both"):
            self.to_zero.cut_until_s = ends_s


class Cluster:
    """A job on several nodes, and node 0's watch over it."""

    def __init__(self, job: Job, choose: random.Random, clock: Clock) -> None:
        """Spread the ranks over the nodes; node 0 has none, which no proof depends on."""
        self.job, self._choose, self._clock = job, choose, clock
        count = choose.randint(1, len(job.ranks))
        firsts = [0, *sorted(choose.sample(range(1, len(job.ranks)), count - 1)), len(job.ranks)]
        sizes = [0, *(after - before for before, after in itertools.pairwise(firsts))]
        facts = [
            NodeFacts(hostname="h", pid=1, address="h", nproc=size, settings={}) for size in sizes
        ]
        plan = RoundPlan(round_id="", attempt=1, nodes=tuple(facts), store_port=0, master_port=0)
        self.nodes = {number: Node(number, job, choose, clock) for number in range(1, len(sizes))}
        self.ranks: dict[int, RemoteRank] = {}
        for number, node in self.nodes.items():
            node.ranks = plan.ranks_of(number)
            for rank in node.ranks:
                self.ranks[rank] = RemoteRank(
                    world_of(plan, rank),
                    plan,
                    node,  # type: ignore[arg-type]
                    tuple(range(plan.world_size)),
                )
                self.ranks[rank].take(Entered(phase="running"))
        self._speed = {rank: choose.choice([0.1, 0.2, 0.6]) for rank in self.ranks}
        settings = LiveSettings(
            look_s=TICK_S,
            sleep_s=choose.choice([0.3, 1.0, 2.0]),
            remote_answer_s=choose.choice([0.5, 2.0, 5.0]),
        )
        self._watch = DeadlockWatch([*self.ranks.values()], settings, now_s=clock.now_s, limit=None)

    def run(self) -> Deadlock | None:
        """Run until node 0 has a proof or the time is over."""
        ends_s = self._clock.now_s + RUNS_S
        quiet_s = self._clock.now_s + QUIET_AFTER_S
        while self._clock.now_s < ends_s:
            self._clock.now_s += TICK_S
            for node in self.nodes.values():
                if self._clock.now_s < quiet_s and self._choose.random() < TICK_S / 10:
                    node.meet_trouble()
                if self._choose.random() < TICK_S / 10:
                    node.stop_a_rank()
                if not (node.is_host_frozen and self._clock.now_s < node.frozen_until_s):
                    for rank in node.ranks:
                        if self._choose.random() < self._speed[rank] and not node.is_stopped(rank):
                            self.job.step(rank, self._choose.randrange(2))
                node.work()
                self._receive(node)
            proof = self._watch.look(self._clock.now_s)
            if proof is not None:
                return proof
        return None

    def _receive(self, node: Node) -> None:
        error_ns = self._choose.randint(-CLOCK_ERROR_NS, CLOCK_ERROR_NS)
        for message in node.to_zero.take():
            if isinstance(message, NodeProgress):
                for rank in node.ranks:
                    offset = ClockOffset(mono_ns=error_ns - node.ahead_ns)
                    self.ranks[rank].note_report(message, offset)
            else:
                self.ranks[message[0]].take(message[1])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the monotonic clock by virtual time."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic_ns", clock.ns)
    return clock


@SEEDS
def test_a_healthy_job_is_never_a_deadlock(clock: Clock, seeds: range) -> None:
    """Its ranks may sleep as long as they like; its nodes stop, and their network comes and goes."""
    for seed in seeds:
        choose = random.Random(seed)
        found = Cluster(random_job(choose, is_broken=False), choose, clock).run()
        assert found is None, f"seed {seed}: {found}"


@SEEDS
def test_ranks_in_a_proof_never_continue(clock: Clock, seeds: range) -> None:
    """A proof holds, and once the network is well most jobs that are stuck have one."""
    proofs = stuck = 0
    for seed in seeds:
        choose = random.Random(seed)
        job = random_job(choose, is_broken=True)
        found = Cluster(job, choose, clock).run()
        if found is not None:
            proofs += 1
            job.require_held(found, seed)
        job.run_to_the_end()
        stuck += not all(rank.has_left for rank in job.ranks)
    assert proofs > stuck * 0.5, f"{proofs} proofs for {stuck} jobs that do not end"
    assert stuck > len(seeds) / 4
