"""Whether a running job makes progress: proofs of a deadlock, and warnings of a long wait.

Nothing here costs a healthy step anything. Steps are counted in memory that launcher and rank map,
and whether a rank's main thread runs at all is read from ``/proc``. Only where main threads sleep
for seconds are those ranks asked where they are: they do nothing else meanwhile. If that proves a
deadlock, twice in a row, nothing is waited for any more.

Where there is no proof, and no step for much longer than ever before in this run, all ranks are
asked once, then ever more rarely, and a warning says who waits for whom.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psutil

from ddpsafe._errors import ranks_text
from ddpsafe._launcher.diagnosis.readings import (
    ask_for_stacks,
    find_busy_loader_workers,
    name_awaited_loader_workers,
    read_frames,
    read_new_stack,
)
from ddpsafe._launcher.diagnosis.root_cause import find_root_cause
from ddpsafe._launcher.diagnosis.stragglers import find_stragglers
from ddpsafe._launcher.diagnosis.wait_graph import Deadlock, RankView, find_deadlock, unchanged
from ddpsafe._launcher.watch.hang_detection import NewCollectives
from ddpsafe._launcher.watch.status_socket import Rates, StatusSocket
from ddpsafe._logging import get_logger
from ddpsafe._wire.messages import Whereabouts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpsafe._launcher.processes.rank_process import RankState, Worker
    from ddpsafe._wire.messages import Collective, Frame, RankOutcome

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """How patient the live watch is.

    Attributes:
        look_s: How often it looks at counters and at ``/proc``.
        sleep_s: How long main threads have to sleep before those ranks are asked.
        quiet_s: The least time without a step before a warning.
        first_s: That time before steps are known, and where the rank that is waited for is known to
            be at something slow: a checkpoint, an evaluation, a compilation.
        longer: By which factor it has to exceed the longest time between steps so far.
        answer_s: How long an answer may take.
    """

    look_s: float = 0.5
    sleep_s: float = 2.0
    quiet_s: float = 30.0
    first_s: float = 300.0
    longer: float = 2.0
    answer_s: float = 1.0


SETTINGS = LiveSettings()
"""What launches of this process use; tests replace it to take seconds."""

_ROUND_S: Final = 0.05
_MOST_PATIENT_S: Final = 15.0
_INNOCENT: Final = 1.5
_STOPPED_S: Final = 3.0
_TORCHS_TIMEOUTS_S: Final = (600.0, 1800.0)
_RARER: Final = 2.0
_KNOWN_STEPS: Final = 2
_KNOWN_COLLECTIVES: Final = 3
_MANY_COLLECTIVES: Final = 200
_BUSY_SHARE: Final = 0.5
_SHOWN_RANKS: Final = 4
_SLOW: Final = (
    "/ddpsafe/checkpoint/",
    "/torch/serialization.py",
    "/torch/distributed/checkpoint/",
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/",
    "/torch/utils/cpp_extension.py",
)
"""Files of which a call may be on the stack for minutes while all is well."""


class Activity(NamedTuple):
    """What the system says of a rank's main thread.

    Attributes:
        state: Its state, as ``ps`` shows it.
        ran: What grows whenever it runs at all; ``None`` where the system does not say.
        cpu_s: How long it has run.
    """

    state: str = ""
    ran: tuple[int, ...] | None = None
    cpu_s: float = 0.0


def read_activity(pid: int | None) -> Activity:
    """Read it, in 20 microseconds; an empty one where the system does not say."""
    task = f"/proc/{pid}/task/{pid}"
    try:
        with open(f"{task}/stat", "rb") as file:  # noqa: PTH123 - once a second for each rank
            state = file.read().rpartition(b")")[2].split()[0].decode()
        with open(f"{task}/schedstat", "rb") as file:  # noqa: PTH123 - as above
            spent_ns, _, slices = map(int, file.read().split())
    except (OSError, ValueError, IndexError):
        return Activity()
    return Activity(state=state, ran=(spent_ns, slices), cpu_s=spent_ns / 1e9)


class _Sleeper:
    """How long the main thread of one rank has slept, or been stopped."""

    def __init__(self, worker: Worker, now_s: float) -> None:
        self.worker = worker
        self.now = Activity()
        self.since_s = now_s
        self.stopped_since_s: float | None = None
        self.busy = 0.0
        self._looked_s = now_s

    def look(self, now_s: float) -> float:
        """Look again; return how long it had slept before it ran again, else 0."""
        before, self.now = self.now, read_activity(self.worker.pid)
        slept_s = 0.0
        if self.now.ran is None or self.now.ran != before.ran or self.now.state not in ("S", "D"):
            slept_s, self.since_s = now_s - self.since_s, now_s
        if now_s > self._looked_s:
            share = (self.now.cpu_s - before.cpu_s) / (now_s - self._looked_s)
            self.busy, self._looked_s = share, now_s
        if self.now.state != "T":
            self.stopped_since_s = None
        elif self.stopped_since_s is None:
            self.stopped_since_s = now_s
        return slept_s

    def is_stopped(self, now_s: float) -> bool:
        """Tell whether it has been stopped for long enough to be meant."""
        return self.stopped_since_s is not None and now_s - self.stopped_since_s >= _STOPPED_S


class _Inquiry:
    """One question to some ranks, and their answers."""

    def __init__(self, workers: Sequence[RankState], *, ends_s: float) -> None:
        self._known = {worker.rank: worker.whereabouts for worker in workers}
        self.workers = list(workers)
        self.ends_s = ends_s
        for worker in workers:
            worker.ask_whereabouts()

    def answers(self) -> dict[int, Whereabouts]:
        """Return the answers that have come."""
        return {
            worker.rank: worker.whereabouts
            for worker in self.workers
            if worker.whereabouts is not None and worker.whereabouts is not self._known[worker.rank]
        }

    def is_over(self, now_s: float) -> bool:
        """Tell whether all have answered, or the time is up."""
        return len(self.answers()) == len(self.workers) or now_s >= self.ends_s


class DeadlockWatch:
    """Notices a deadlock that no time can end; see `wait_graph`."""

    def __init__(self, workers: Sequence[Worker], settings: LiveSettings, *, now_s: float) -> None:
        """Ask no rank before main threads sleep."""
        self._settings = settings
        self._sleepers = {worker.rank: _Sleeper(worker, now_s) for worker in workers}
        self._sleep_s = settings.sleep_s
        self._asked: set[int] = set()
        self._next_s = 0.0
        self._pause_s = settings.sleep_s
        self._first: dict[int, Whereabouts] | None = None
        self._ran: dict[int, tuple[int, ...] | None] = {}
        self._inquiry: _Inquiry | None = None

    @property
    def is_asking(self) -> bool:
        """Whether answers are awaited."""
        return self._inquiry is not None

    def activity(self, rank: int) -> _Sleeper:
        """Return what is known of a rank's main thread."""
        return self._sleepers[rank]

    def read_states(self, now_s: float) -> None:
        """Read whether the ranks sleep or are stopped, where no proof is looked for."""
        for sleeper in self._sleepers.values():
            sleeper.look(now_s)

    def look(self, now_s: float) -> Deadlock | None:
        """Go on with the question that is asked, or ask one if it is time; return a proof."""
        if self._inquiry is not None:
            if not self._inquiry.is_over(now_s):
                return None
            answers, self._inquiry = self._inquiry.answers(), None
            if self._first is None:
                if find_deadlock(self._views(answers, now_s)) is not None:
                    self._first = answers
                    self._ask([self._sleepers[rank].worker for rank in answers], now_s)
                return None
            first, self._first = self._first, None
            same = {rank: unchanged(first.get(rank), now) for rank, now in answers.items()}
            return find_deadlock(
                self._views({rank: at for rank, at in same.items() if at is not None}, now_s)
            )
        for rank, sleeper in self._sleepers.items():
            slept_s = sleeper.look(now_s)
            if slept_s > self._sleep_s and rank in self._asked:  # it was a wait like any other
                self._sleep_s = min(_MOST_PATIENT_S, slept_s * _INNOCENT)
            if slept_s:
                self._asked.discard(rank)
        asleep = [
            each.worker
            for each in self._sleepers.values()
            if each.worker.alive
            and each.worker.joined
            and each.worker.returned is None
            and now_s - each.since_s >= self._sleep_s
        ]
        gone = [
            each
            for each in self._sleepers.values()
            if each.worker.returned is not None or each.is_stopped(now_s)
        ]
        if not asleep or len(asleep) + len(gone) < 2:  # noqa: PLR2004 - one waits for another
            return None
        ranks = {worker.rank for worker in asleep}
        if ranks <= self._asked and now_s < self._next_s:
            return None
        self._pause_s = self._settings.sleep_s if ranks - self._asked else self._pause_s * _RARER
        self._next_s = now_s + self._pause_s
        self._asked = ranks
        self._ask(asleep, now_s)
        return None

    def _ask(self, workers: Sequence[Worker], now_s: float) -> None:
        self._ran = {each.rank: self._sleepers[each.rank].now.ran for each in workers}
        self._inquiry = _Inquiry(workers, ends_s=now_s + self._settings.answer_s)

    def _views(self, answers: dict[int, Whereabouts], now_s: float) -> dict[int, RankView]:
        # Where the user has said how long a collective may take, a stop may be meant.
        defaults = {0.0, *_TORCHS_TIMEOUTS_S}
        timeouts = next(iter(self._sleepers.values())).worker.spec.timeouts
        if "collective" not in timeouts.chosen:
            defaults.add(timeouts.collective.total_seconds())
        is_bounded = any(
            each.timeout_s not in defaults
            for at in answers.values()
            for each in at.position.collectives
            if not each.done
        )
        views = {}
        for rank, sleeper in self._sleepers.items():
            worker, at = sleeper.worker, answers.get(rank)
            if worker.returned is not None:
                at = Whereabouts(position=worker.returned.position)
            sleeper.look(now_s)
            views[rank] = RankView(
                rank=rank,
                at=at,
                is_asleep=rank in self._ran and sleeper.now.ran == self._ran[rank],
                has_left=worker.returned is not None,
                is_stopped=sleeper.is_stopped(now_s) and not is_bounded,
            )
        return views


class LiveWatch:
    """All of it for one attempt.

    Args:
        workers: The ranks of this host.
        clock: What says how late it is.
        others: The ranks of other hosts: they are shown in the status. What proves a deadlock is
            read from ``/proc``, and what ranks of one host know proves nothing of a job on several.

    Attributes:
        proof: The deadlock that was found.
        longest_s: The longest time between two steps of this run so far.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        clock: Callable[[], float],
        others: Sequence[RankState] = (),
    ) -> None:
        """Start the clocks."""
        self._workers, self._others = workers, others
        self._clock = clock
        self._settings = SETTINGS
        self._deadlocks = DeadlockWatch(workers, self._settings, now_s=clock())
        self._inquiry: _Inquiry | None = None
        self._signalled: dict[int, int] | None = None
        self._is_to_warn = False
        self._seen: object = None
        self._moved_s = clock()
        self._next_look_s = 0.0
        self._pause_s = self._settings.quiet_s
        self._next_warning_s = 0.0
        self._collectives = NewCollectives()
        self.proof: Deadlock | None = None
        self.longest_s = 0.0
        self._rates = Rates(clock)
        self._socket = StatusSocket(Path(workers[0].spec.run_dir)) if workers else None
        self._wants_stacks = False

    def handles(self) -> list[int]:
        """Return what becomes readable when another process asks for the status."""
        return [] if self._socket is None else self._socket.handles()

    def close(self) -> None:
        """Answer no process any more."""
        if self._socket is not None:
            self._socket.close()

    def interval_s(self) -> float:
        """Return how often to look, in seconds."""
        if not self._workers:
            return math.inf  # it never looks
        if self._deadlocks.is_asking or self._inquiry is not None:
            return _ROUND_S
        return max(0.0, self._next_look_s - self._clock())

    def is_deadlocked(self) -> bool:
        """Look if it is time to; tell whether the ranks are proved to wait for ever."""
        now_s = self._clock()
        if not self._workers:
            return False
        # Who asks for the status has the ranks asked; more than one get the same answer.
        wants_stacks = None if self._socket is None else self._socket.accept()
        if wants_stacks is not None:
            self._wants_stacks |= wants_stacks
            if self._inquiry is None:
                self._is_to_warn = False
                self._start_inquiry(now_s)
        if now_s < self._next_look_s and not self._deadlocks.is_asking and self._inquiry is None:
            return False
        self._next_look_s = now_s + self._settings.look_s
        all_ranks = [*self._workers, *self._others]
        self._rates.note({each.rank: each.progress().steps for each in all_ranks})
        if len(self._workers) > 1 and not self._others:
            self.proof = self._deadlocks.look(now_s)
        else:
            self._deadlocks.read_states(now_s)
        progress = [worker.progress() for worker in self._workers]
        seen = [
            (worker.phase, worker.returned is None, made.steps, made.saves)
            for worker, made in zip(self._workers, progress, strict=True)
        ]
        if seen != self._seen:
            self._seen = seen
            self._move(now_s)
        self.longest_s = max(self.longest_s, *(made.longest_s for made in progress))
        if self._inquiry is not None:
            self._end_inquiry(self._inquiry, now_s)
        elif not self._deadlocks.is_asking and self._is_late(now_s):
            self._ask(now_s)
        return self.proof is not None

    def _move(self, moved_s: float) -> None:
        self._moved_s = moved_s
        self._pause_s = self._settings.quiet_s
        self._next_warning_s = 0.0

    def _limit_s(self, *, is_slow: bool) -> float:
        least_s = self._settings.first_s if is_slow else self._settings.quiet_s
        return max(least_s, self._settings.longer * self.longest_s)

    def _is_late(self, now_s: float) -> bool:
        if self._others or now_s < self._next_warning_s:
            return False
        if all(worker.returned is not None for worker in self._workers):
            return False
        # Imports and the preparation of data take what they take: before all have joined it is patient.
        has_joined = all(worker.joined for worker in self._workers)
        return now_s - self._moved_s >= self._limit_s(is_slow=not has_joined)

    def _ask(self, now_s: float) -> None:
        self._next_warning_s = now_s + self._pause_s
        self._pause_s *= _RARER
        self._is_to_warn = True
        self._start_inquiry(now_s)

    def _start_inquiry(self, now_s: float) -> None:
        asked: list[RankState] = [each for each in self._workers if each.alive]
        asked += [each for each in self._others if each.joined and each.ended_ns is None]
        asked = [each for each in asked if each.returned is None]
        self._signalled = None
        self._inquiry = _Inquiry(asked, ends_s=now_s + self._settings.answer_s)

    def _end_inquiry(self, inquiry: _Inquiry, now_s: float) -> None:
        """Warn once the answers are there; who does not answer is asked for its stack by a signal.

        That works while the GIL is held. A rank that answers is not signalled: a call that it waits
        in might end early.
        """
        if not inquiry.is_over(now_s):
            return
        answers = inquiry.answers()
        asked = {each.rank for each in inquiry.workers}
        own = [each for each in self._workers if each.rank in asked]
        silent = [each for each in own if each.rank not in answers]
        if silent and self._signalled is None:
            self._signalled = {each.rank: ask_for_stacks(each) for each in silent}
            inquiry.ends_s = now_s + self._settings.answer_s / 2
            return
        self._inquiry = None
        stacks = {
            each.rank: read_new_stack(each, (self._signalled or {}).get(each.rank, 0))
            for each in silent
        }
        if self._socket is not None and self._socket.is_asked:
            self._socket.answer(self._facts(answers, stacks))
            self._wants_stacks = False
        if self._is_to_warn:
            self._warn(answers, stacks, now_s)

    def _facts(
        self, answers: dict[int, Whereabouts], stacks: dict[int, list[Frame]]
    ) -> dict[str, Any]:
        spec = self._workers[0].spec
        facts: dict[str, Any] = {
            "schema": 1,
            "pid": os.getpid(),
            "run_dir": spec.run_dir,
            "attempt": spec.attempt,
            "world_size": spec.world.world_size,
            "longest_step_s": round(self.longest_s, 3),
            "stragglers": [
                each.as_json()
                for each in find_stragglers(
                    {rank: at.position.arrivals for rank, at in answers.items()},
                    {
                        **{worker.rank: worker.spec.world.node_rank for worker in self._workers},
                        **{other.rank: other.outcome().node_rank for other in self._others},
                    },
                )
            ],
            "ranks": [
                self._facts_of(worker, answers.get(worker.rank), stacks.get(worker.rank))
                for worker in self._workers
            ],
        }
        for other in self._others:
            at = answers.get(other.rank)
            reading = read_frames(at.threads[0].frames if at is not None and at.threads else ())
            outcome = replace(
                other.outcome(), stack=reading.stack, in_collective=reading.in_collective
            )
            facts["ranks"].append(self._shared_facts(other, outcome, at))
        facts["ranks"].sort(key=lambda each: each["rank"])
        return facts

    def _facts_of(
        self, worker: Worker, at: Whereabouts | None, stack: list[Frame] | None
    ) -> dict[str, object]:
        """Return what is known of a rank of this host: more than of another one's."""
        made = worker.progress()
        frames = at.threads[0].frames if at is not None and at.threads else stack or ()
        outcome = self._outcome(worker, at, frames)
        threads = [] if at is None else [(each.name, each.frames) for each in at.threads]
        loader_workers = (
            find_busy_loader_workers(worker) if self._wants_stacks and worker.alive else []
        )
        return {
            **self._shared_facts(worker, outcome, at),
            "pid": worker.pid,
            "state": outcome.state or self._deadlocks.activity(worker.rank).now.state,
            "last_step_s": round((time.monotonic_ns() - made.last_ns) / 1e9, 3)
            if made.last_ns
            else None,
            "threads": _told_threads(threads or [("MainThread", tuple(stack or ()))])
            if self._wants_stacks
            else [],
            "loader_workers": _told_threads(
                [(f"{each.name} (pid {each.pid})", each.frames) for each in loader_workers]
            ),
        }

    def _shared_facts(
        self, rank: RankState, outcome: RankOutcome, at: Whereabouts | None
    ) -> dict[str, object]:
        """Return what is known of a rank of any host."""
        made = rank.progress()
        threads = [] if at is None else at.threads
        return {
            "rank": rank.rank,
            "local_rank": outcome.local_rank,
            "hostname": outcome.hostname,
            "pid": None,
            "phase": "returned" if rank.returned is not None else rank.phase,
            "state": outcome.state,
            "answered": at is not None,
            "steps": made.steps,
            "steps_per_s": round(self._rates.of(rank.rank), 3),
            "saves": made.saves,
            "last_step_s": None,  # of another host it is told on that one's clock
            "collective": _collective_of(at),
            "where": outcome.stack,
            "in_collective": outcome.in_collective,
            "threads": _told_threads([(each.name, each.frames) for each in threads])
            if self._wants_stacks
            else [],
            "loader_workers": [],
        }

    def _warn(
        self, answers: dict[int, Whereabouts], stacks: dict[int, list[Frame]], now_s: float
    ) -> None:
        frames: dict[int, Sequence[Frame]] = {
            rank: at.threads[0].frames if at.threads else () for rank, at in answers.items()
        }
        frames.update(stacks)
        outcomes = {
            worker.rank: self._outcome(
                worker, answers.get(worker.rank), frames.get(worker.rank, ())
            )
            for worker in self._workers
        }
        # Collectives show progress where steps are not counted. Only one that is new does: on the
        # clock of this launcher the same one is entered at another time at each look.
        last_ns = self._collectives.last_entered_ns(each.position for each in outcomes.values())
        if last_ns:
            entered_s = now_s - max(0.0, time.time_ns() - last_ns) / 1e9
            if entered_s > self._moved_s:
                self._move(entered_s)
        cause = find_root_cause(outcomes)
        waiting, goal = cause.evidence.find_who_waited(cause.root)
        culprits = [cause.root.rank] if goal is not None else list(frames)
        is_slow = not self._has_begun(answers, goal) or any(
            (rank in answers and answers[rank].is_evaluating)
            or any(part in frame.file for frame in frames.get(rank, ()) for part in _SLOW)
            for rank in culprits
        )
        if now_s - self._moved_s < self._limit_s(is_slow=is_slow):
            return
        workers = {worker.rank: worker for worker in self._workers}

        def place_of(outcome: RankOutcome) -> str:
            seen = frames.get(outcome.rank, ())
            return _place_of(outcome) + name_awaited_loader_workers(workers[outcome.rank], seen)

        longest = f" (longest step so far: {self.longest_s:.1f} s)" if self.longest_s else ""
        if goal is not None:
            entered_ns = []
            for rank in waiting:
                at = outcomes[rank].position
                entered = None if at is None else at.numbered(goal.group, goal.number)
                entered_ns.append((entered or goal).entered_ns)
            waited_s = max(0.0, time.time_ns() - max(entered_ns)) / 1e9
            have = "has" if len(waiting) == 1 else "have"
            logger.warning(
                "%s %s waited %.0f s for rank %d in %s%s; rank %d is %s",
                ranks_text(waiting),
                have,
                waited_s,
                cause.root.rank,
                goal,
                longest,
                cause.root.rank,
                place_of(cause.root),
            )
            return
        shown = list(outcomes.values())[:_SHOWN_RANKS]
        logger.warning(
            "no rank has made a step for %.0f s%s; %s",
            now_s - self._moved_s,
            longest,
            ", ".join(f"rank {each.rank} is {place_of(each)}" for each in shown),
        )

    def _outcome(
        self, worker: Worker, at: Whereabouts | None, frames: Sequence[Frame]
    ) -> RankOutcome:
        """Return what the diagnosis would be told of the rank if the attempt ended now."""
        reading = read_frames(frames)
        outcome = worker.outcome()
        if outcome.status == "returned":
            return outcome
        is_stopped = self._deadlocks.activity(worker.rank).now.state == "T"
        return replace(
            outcome,
            position=None if at is None else at.position,
            stack=reading.stack,
            in_collective=reading.in_collective,
            point_to_point=reading.point_to_point,
            state=psutil.STATUS_STOPPED if is_stopped else "",
        )

    def _has_begun(self, answers: dict[int, Whereabouts], goal: Collective | None) -> bool:
        """Tell whether steps are known, or what the ranks wait in has been done before."""
        if any(worker.progress().steps >= _KNOWN_STEPS for worker in self._workers):
            return True
        if goal is not None and goal.number > _MANY_COLLECTIVES:
            return True
        return any(at.completed >= _KNOWN_COLLECTIVES for at in answers.values())


def _collective_of(at: Whereabouts | None) -> dict[str, object] | None:
    last = None if at is None else at.position.newest()
    if last is None:
        return None
    return {
        "group": last.group,
        "number": last.number,
        "name": last.name.partition(":")[2],
        "done": last.done,
        "text": str(last),
    }


def _told_threads(threads: Sequence[tuple[str, Sequence[Frame]]]) -> list[dict[str, object]]:
    return [{"name": name, "frames": [list(frame) for frame in calls]} for name, calls in threads]


def _place_of(outcome: RankOutcome) -> str:
    if outcome.status == "returned":
        return "done: its function has returned"
    stopped = "stopped" if outcome.state == psutil.STATUS_STOPPED else ""
    if not outcome.stack:
        return stopped or "silent: it holds the GIL, or is not running Python"
    return f"{stopped} at {outcome.stack}".lstrip()
