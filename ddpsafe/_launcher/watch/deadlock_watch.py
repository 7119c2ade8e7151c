"""Proofs of a deadlock, warnings about a long wait, and the answers to ``ddpsafe status``.

A healthy step pays nothing for it. Steps are counted in memory that launcher and rank share, and
``/proc`` shows whether a rank's main thread runs at all. Only ranks whose main threads have slept
for seconds are asked where they are, since they have nothing else to do. If their answers prove a
deadlock, twice in a row, the attempt ends without waiting for a timeout.

If there is no proof, but no step for much longer than ever before in this run, all ranks are asked
once, then less and less often, and a warning names the ranks that wait and what they wait for.

A request for the status also asks all ranks, once. `LiveWatch` does all three, for one attempt.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import psutil

from ddpsafe._launcher.diagnosis.rank_readings import (
    ask_for_stacks,
    find_busy_loader_workers,
    name_awaited_processes,
    read_frames,
    read_new_stack,
)
from ddpsafe._launcher.diagnosis.root_cause import find_root_cause
from ddpsafe._launcher.diagnosis.stragglers import find_stragglers
from ddpsafe._launcher.diagnosis.wait_graph import (
    Deadlock,
    RankView,
    call_lines,
    find_deadlock,
    unchanged,
)
from ddpsafe._launcher.watch.hang_detection import NewCollectives
from ddpsafe._launcher.watch.idleness import IdleWatch
from ddpsafe._launcher.watch.status_socket import Rates, StatusSocket
from ddpsafe._logging import get_logger
from ddpsafe._text import ranks_text
from ddpsafe._wire.messages import Whereabouts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpsafe._launcher.processes.rank_process import RankProcess, RankState
    from ddpsafe._wire.messages import Collective, Frame, RankOutcome

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSettings:
    """The time limits of `LiveWatch`.

    Attributes:
        look_s: How often it looks at step counters and at ``/proc``.
        sleep_s: How long main threads have to sleep before those ranks are asked.
        quiet_s: The shortest time without a step that leads to a warning.
        first_s: The same before the length of a step is known, or while the rank that the others
            wait for is in something known to be slow: a checkpoint, an evaluation, a compilation.
        step_factor: The time without a step also has to be so many times the longest step so far.
        answer_s: How long a rank may take to answer.
        idle_sample_s: How often it measures whether the ranks do anything, while they make no step.
        idle_look_s: How long all ranks have to be idle before they are asked once, without a warning.
    """

    look_s: float = 0.5
    sleep_s: float = 2.0
    quiet_s: float = 30.0
    first_s: float = 300.0
    step_factor: float = 2.0
    answer_s: float = 1.0
    idle_sample_s: float = 5.0
    idle_look_s: float = 8.0


SETTINGS = LiveSettings()
"""What launches of this process use; tests replace it with shorter times."""

_LOOK_FOR_ANSWERS_S: Final = 0.05
# A rank that was asked, and then ran again after all, was in an ordinary wait: from then on main
# threads have to sleep longer than that wait before they are asked, up to a limit.
_ORDINARY_WAIT_FACTOR: Final = 1.5
_LONGEST_SLEEP_S: Final = 15.0
# Shorter stops do not count: a debugger's, or that of a laptop whose lid is shut for a moment.
_STOPPED_S: Final = 3.0
# torch's default timeouts of a collective: NCCL's, and that of all other backends.
_TORCH_TIMEOUTS_S: Final = (600.0, 1800.0)
_PAUSE_FACTOR: Final = 2.0
# From when on the length of a step is taken as known: after so many steps, after so many collectives
# like the newest one, or after so many in all. The first ones include compilation and slow data.
_KNOWN_STEPS: Final = 2
_KNOWN_COLLECTIVES: Final = 3
_MANY_COLLECTIVES: Final = 200
_SHOWN_PLACES: Final = 8
_SLOW_FILES: Final = (
    "/ddpsafe/checkpoint/",
    "/torch/serialization.py",
    "/torch/distributed/checkpoint/",
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/",
    "/torch/utils/cpp_extension.py",
)
"""A call into one of these may take minutes while all is well."""


class Activity(NamedTuple):
    """What ``/proc`` shows of a rank's main thread.

    Attributes:
        state: Its state, as ``ps`` shows it.
        ran: Counters that grow whenever it runs at all; ``None`` if unknown.
    """

    state: str = ""
    ran: tuple[int, ...] | None = None


def read_activity(pid: int | None) -> Activity:
    """Read the activity of a process's main thread, in 20 microseconds; an empty one if unknown."""
    task = f"/proc/{pid}/task/{pid}"
    try:
        with open(f"{task}/stat", "rb") as file:  # noqa: PTH123 - once a second for each rank
            state = file.read().rpartition(b")")[2].split()[0].decode()
        with open(f"{task}/schedstat", "rb") as file:  # noqa: PTH123 - as above
            spent_ns, _, slices = map(int, file.read().split())
    except (OSError, ValueError, IndexError):
        return Activity()
    return Activity(state=state, ran=(spent_ns, slices))


class _MainThread:
    """How long the main thread of one rank has been asleep or stopped."""

    def __init__(self, process: RankProcess, now_s: float) -> None:
        self.process = process
        self.activity = Activity()
        self.since_s = now_s
        self.stopped_since_s: float | None = None
        self._steps = 0

    def look(self, now_s: float) -> float:
        """Look again; if it has run since, return how long it had slept before that, else 0."""
        before, steps_before = self.activity, self._steps
        self._steps = self.process.progress().steps
        # A rank that has made a step has run. Most looks find that, and reading /proc for each of many
        # ranks would be most of what they cost.
        has_stepped = self._steps != steps_before
        self.activity = Activity() if has_stepped else read_activity(self.process.pid)
        slept_s = 0.0
        if (
            self.activity.ran is None
            or (before.ran is not None and self.activity.ran != before.ran)
            or self.activity.state not in ("S", "D")
        ):
            slept_s, self.since_s = now_s - self.since_s, now_s
        if self.activity.state != "T":
            self.stopped_since_s = None
        elif self.stopped_since_s is None:
            self.stopped_since_s = now_s
        return slept_s

    def is_stopped(self, now_s: float) -> bool:
        """Return whether it has been stopped for at least `_STOPPED_S`."""
        return self.stopped_since_s is not None and now_s - self.stopped_since_s >= _STOPPED_S


class _Inquiry:
    """Asks some ranks where they are, once, and collects their answers."""

    def __init__(self, processes: Sequence[RankState], *, ends_s: float) -> None:
        self._known = {process.rank: process.whereabouts for process in processes}
        self.processes = list(processes)
        self.ends_s = ends_s
        for process in processes:
            process.ask_whereabouts()

    def answers(self) -> dict[int, Whereabouts]:
        """Return the answers received so far, by rank."""
        return {
            process.rank: process.whereabouts
            for process in self.processes
            if process.whereabouts is not None
            and process.whereabouts is not self._known[process.rank]
        }

    def is_over(self, now_s: float) -> bool:
        """Return whether all have answered, or the time is up."""
        return len(self.answers()) == len(self.processes) or now_s >= self.ends_s


class DeadlockWatch:
    """Notices ranks that are proved to wait for ever; see `wait_graph`."""

    def __init__(
        self, processes: Sequence[RankProcess], settings: LiveSettings, *, now_s: float
    ) -> None:
        """Take every main thread as awake."""
        self._settings = settings
        self._threads = {process.rank: _MainThread(process, now_s) for process in processes}
        self._sleep_s = settings.sleep_s
        self._asked: set[int] = set()
        self._next_s = 0.0
        self._pause_s = settings.sleep_s
        self._first_answers: dict[int, Whereabouts] | None = None
        self._ran_when_asked: dict[int, tuple[int, ...] | None] = {}
        self._inquiry: _Inquiry | None = None

    @property
    def is_asking(self) -> bool:
        """Whether ranks have been asked and may still answer."""
        return self._inquiry is not None

    def state(self, rank: int) -> str:
        """Return the state of a rank's main thread now, as ``ps`` shows it."""
        return read_activity(self._threads[rank].process.pid).state

    def is_running(self) -> bool:
        """Return whether a main thread was running, or ready to run, at the last look."""
        return any(each.activity.state == "R" for each in self._threads.values())

    def read_states(self, now_s: float) -> None:
        """Look at the main threads only, without a search for a proof."""
        for thread in self._threads.values():
            thread.look(now_s)

    def look(self, now_s: float) -> Deadlock | None:
        """Continue with the ranks that were asked, or ask if it is time to; return a proof if found."""
        if self._inquiry is not None:
            if not self._inquiry.is_over(now_s):
                return None
            answers, self._inquiry = self._inquiry.answers(), None
            if self._first_answers is None:
                if find_deadlock(self._views(answers, now_s)) is not None:
                    self._first_answers = answers
                    self._ask([self._threads[rank].process for rank in answers], now_s)
                return None
            # A rank with the same answer twice was there at the instant between all first and all second
            # answers, at which the proof has to hold; see `unchanged`.
            first, self._first_answers = self._first_answers, None
            same = {rank: unchanged(first.get(rank), now) for rank, now in answers.items()}
            return find_deadlock(
                self._views({rank: at for rank, at in same.items() if at is not None}, now_s)
            )
        for rank, thread in self._threads.items():
            slept_s = thread.look(now_s)
            if slept_s > self._sleep_s and rank in self._asked:  # it was an ordinary wait
                self._sleep_s = min(_LONGEST_SLEEP_S, slept_s * _ORDINARY_WAIT_FACTOR)
            if slept_s:
                self._asked.discard(rank)
        asleep = [
            each.process
            for each in self._threads.values()
            if each.process.alive
            and each.process.joined
            and each.process.returned is None
            and now_s - each.since_s >= self._sleep_s
        ]
        out_of_action = [
            each
            for each in self._threads.values()
            if each.process.returned is not None or each.is_stopped(now_s)
        ]
        if not asleep or len(asleep) + len(out_of_action) < 2:  # noqa: PLR2004 - one waits for another
            return None
        ranks = {process.rank for process in asleep}
        if ranks <= self._asked and now_s < self._next_s:
            return None
        is_new = bool(ranks - self._asked)
        self._pause_s = self._settings.sleep_s if is_new else self._pause_s * _PAUSE_FACTOR
        self._next_s = now_s + self._pause_s
        self._asked = ranks
        self._ask(asleep, now_s)
        return None

    def _ask(self, processes: Sequence[RankProcess], now_s: float) -> None:
        self._ran_when_asked = {
            each.rank: self._threads[each.rank].activity.ran for each in processes
        }
        self._inquiry = _Inquiry(processes, ends_s=now_s + self._settings.answer_s)

    def _views(self, answers: dict[int, Whereabouts], now_s: float) -> dict[int, RankView]:
        # If the user has set a timeout for collectives, a stopped rank gets that time to be continued.
        defaults = {0.0, *_TORCH_TIMEOUTS_S}
        timeouts = next(iter(self._threads.values())).process.spec.timeouts
        if "collective" not in timeouts.chosen:
            defaults.add(timeouts.collective.total_seconds())
        is_bounded = any(
            each.timeout_s not in defaults
            for at in answers.values()
            for each in at.position.collectives
            if not each.done
        )
        views = {}
        for rank, thread in self._threads.items():
            process, at = thread.process, answers.get(rank)
            if process.returned is not None:
                at = Whereabouts(position=process.returned.position)
            thread.look(now_s)
            views[rank] = RankView(
                rank=rank,
                at=at,
                is_asleep=rank in self._ran_when_asked
                and thread.activity.ran == self._ran_when_asked[rank],
                has_left=process.returned is not None,
                is_stopped=thread.is_stopped(now_s) and not is_bounded,
            )
        return views


class LiveWatch:
    """Proves deadlocks, warns of long waits, and answers ``ddpsafe status``, for one attempt.

    All three ask the ranks where they are, and `is_deadlocked` does the next step of each.

    Args:
        processes: The ranks of this host.
        clock: Returns the time in seconds.
        others: The ranks of other hosts. They appear in the status only: a proof needs ``/proc``, and
            the ranks of one host prove nothing about a job on several.

    Attributes:
        proof: The deadlock, once one has been found.
        longest_s: The longest time between two steps in this run so far.
    """

    def __init__(
        self,
        processes: Sequence[RankProcess],
        *,
        clock: Callable[[], float],
        others: Sequence[RankState] = (),
    ) -> None:
        """Start the clocks."""
        self._processes, self._others = processes, others
        self._clock = clock
        self._settings = SETTINGS
        self._deadlocks = DeadlockWatch(processes, self._settings, now_s=clock())
        self._idle = IdleWatch(processes, sample_s=self._settings.idle_sample_s)
        self._has_looked = False
        self._inquiry: _Inquiry | None = None
        self._signalled: dict[int, int] | None = None
        self._is_to_warn = False
        self._seen: object = None
        self._last_progress_s = clock()
        self._next_look_s = 0.0
        self._pause_s = self._settings.quiet_s
        self._next_warning_s = 0.0
        self._was_slow = False  # the start, when the ranks were last asked: no warning was due
        self._collectives = NewCollectives()
        self.proof: Deadlock | None = None
        self.longest_s = 0.0
        self._rates = Rates(clock)
        self._socket = StatusSocket(Path(processes[0].spec.run_dir)) if processes else None
        self._wants_stacks = False

    def handles(self) -> list[int]:
        """Return the descriptors that become readable when another process asks for the status."""
        return [] if self._socket is None else self._socket.handles()

    def close(self) -> None:
        """Stop answering other processes."""
        if self._socket is not None:
            self._socket.close()

    def interval_s(self) -> float:
        """Return how often to look, in seconds."""
        if not self._processes:
            return math.inf
        if self._deadlocks.is_asking or self._inquiry is not None:
            return _LOOK_FOR_ANSWERS_S
        return max(0.0, self._next_look_s - self._clock())

    def is_deadlocked(self) -> bool:
        """Look if it is time to; return whether the ranks are proved to wait for ever."""
        now_s = self._clock()
        if not self._processes:
            return False
        # A request for the status asks the ranks, too; requests that come before the answer share it.
        wants_stacks = None if self._socket is None else self._socket.accept()
        if wants_stacks is not None:
            self._wants_stacks |= wants_stacks
            if self._inquiry is None:
                self._is_to_warn = False
                self._start_inquiry(now_s)
        if now_s < self._next_look_s and not self._deadlocks.is_asking and self._inquiry is None:
            return False
        self._next_look_s = now_s + self._settings.look_s
        progress = {each.rank: each.progress() for each in (*self._processes, *self._others)}
        self._rates.note({rank: made.steps for rank, made in progress.items()})
        if len(self._processes) > 1 and not self._others:
            self.proof = self._deadlocks.look(now_s)
        else:
            self._deadlocks.read_states(now_s)
        own = [(process, progress[process.rank]) for process in self._processes]
        seen = [
            (process.phase, process.returned is None, made.steps, made.saves)
            for process, made in own
        ]
        if seen != self._seen:
            self._seen = seen
            self._note_progress(now_s)
        self._look_at_idleness(now_s)
        self.longest_s = max(self.longest_s, *(made.longest_s for _, made in own))
        if self._inquiry is not None:
            self._end_inquiry(self._inquiry, now_s)
        elif not self._deadlocks.is_asking and self._is_late(now_s):
            self._next_warning_s = now_s + self._pause_s
            self._pause_s *= _PAUSE_FACTOR
            self._was_slow = False
            self._is_to_warn = True
            self._start_inquiry(now_s)
        elif self._is_to_look():
            self._is_to_warn = False
            self._start_inquiry(now_s)
        return self.proof is not None

    def _look_at_idleness(self, now_s: float) -> None:
        """Measure whether the ranks do anything, unless they make steps or a main thread is running."""
        is_quiet = now_s - self._last_progress_s >= self._settings.idle_sample_s
        if not is_quiet or self._others:
            self._idle.reset()
            self._has_looked = False
        elif not self._deadlocks.is_running():
            self._idle.look(now_s)

    def _is_idle(self) -> bool:
        """Return whether all ranks have been idle for so long that no slow start explains it."""
        longest_s = self._idle.idle_s()
        return 0 < longest_s >= self._settings.quiet_s - self._settings.idle_sample_s

    def _is_to_look(self) -> bool:
        """Return whether to ask the ranks once where they are, for what they may do later.

        A rank that polls a lock is never asleep for long, so that the search for a proof does not ask it.
        """
        if self._has_looked or self._deadlocks.is_asking:
            return False
        self._has_looked = self._idle.idle_s() >= self._settings.idle_look_s
        return self._has_looked

    def _note_progress(self, at_s: float) -> None:
        self._last_progress_s = at_s
        self._pause_s = self._settings.quiet_s
        self._next_warning_s = 0.0

    def _limit_s(self, *, is_slow: bool) -> float:
        least_s = self._settings.first_s if is_slow else self._settings.quiet_s
        return max(least_s, self._settings.step_factor * self.longest_s)

    def _is_late(self, now_s: float) -> bool:
        if self._others or (
            now_s < self._next_warning_s and not (self._was_slow and self._is_idle())
        ):
            return False
        if all(process.returned is not None for process in self._processes):
            return False
        # Imports and the preparation of data may take minutes.
        is_slow = not all(process.joined for process in self._processes) and not self._is_idle()
        return now_s - self._last_progress_s >= self._limit_s(is_slow=is_slow)

    def _start_inquiry(self, now_s: float) -> None:
        asked: list[RankState] = [each for each in self._processes if each.alive]
        asked += [each for each in self._others if each.joined and each.ended_ns is None]
        asked = [each for each in asked if each.returned is None]
        self._signalled = None
        self._inquiry = _Inquiry(asked, ends_s=now_s + self._settings.answer_s)

    def _end_inquiry(self, inquiry: _Inquiry, now_s: float) -> None:
        """Warn once the answers are in; first get the stack of each rank that did not answer.

        A signal asks for a stack, which works while the GIL is held. A rank that answers gets no
        signal, since that might end the call that it waits in early.
        """
        if not inquiry.is_over(now_s):
            return
        answers = inquiry.answers()
        asked = {each.rank for each in inquiry.processes}
        own = [each for each in self._processes if each.rank in asked]
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
        spec = self._processes[0].spec
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
                        **{
                            process.rank: process.spec.world.node_rank
                            for process in self._processes
                        },
                        **{other.rank: other.outcome().node_rank for other in self._others},
                    },
                )
            ],
            "ranks": [
                self._facts_of(process, answers.get(process.rank), stacks.get(process.rank))
                for process in self._processes
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
        self, process: RankProcess, at: Whereabouts | None, stack: list[Frame] | None
    ) -> dict[str, object]:
        """Return what is known about a rank of this host: `_shared_facts` and more."""
        made = process.progress()
        frames = at.threads[0].frames if at is not None and at.threads else stack or ()
        outcome = self._outcome(process, at, frames)
        threads = [] if at is None else [(each.name, each.frames) for each in at.threads]
        loader_workers = (
            find_busy_loader_workers(process) if self._wants_stacks and process.alive else []
        )
        return {
            **self._shared_facts(process, outcome, at),
            "pid": process.pid,
            "state": outcome.state or self._deadlocks.state(process.rank),
            "last_step_s": round((time.monotonic_ns() - made.last_ns) / 1e9, 3)
            if made.last_ns
            else None,
            "threads": _threads_as_json(threads or [("MainThread", tuple(stack or ()))])
            if self._wants_stacks
            else [],
            "loader_workers": _threads_as_json(
                [(f"{each.name} (pid {each.pid})", each.frames) for each in loader_workers]
            ),
        }

    def _shared_facts(
        self, rank: RankState, outcome: RankOutcome, at: Whereabouts | None
    ) -> dict[str, object]:
        """Return what is known about a rank of any host."""
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
            "last_step_s": None,  # for a rank of another host it is on that host's clock
            "collective": _collective_of(at),
            "where": outcome.stack,
            "in_collective": outcome.in_collective,
            "threads": _threads_as_json([(each.name, each.frames) for each in threads])
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
            process.rank: self._outcome(
                process, answers.get(process.rank), frames.get(process.rank, ())
            )
            for process in self._processes
        }
        # Collectives show progress where steps are not counted. Only new ones count: converted from the
        # wall clock, the time at which the same one was entered differs a little at each look.
        last_ns = self._collectives.last_entered_ns(each.position for each in outcomes.values())
        if last_ns:
            entered_s = now_s - max(0.0, time.time_ns() - last_ns) / 1e9
            if entered_s > self._last_progress_s:
                self._note_progress(entered_s)
        cause = find_root_cause(outcomes)
        waiting, goal = cause.evidence.find_who_waited(cause.root)
        culprits = [cause.root.rank] if goal is not None else list(frames)
        # Ranks that have called one number differently wait for no work of another rank.
        differ = cause.rule.name == "mismatch"
        is_idle = self._is_idle()
        is_slow = not (differ or is_idle) and (
            not self._has_begun(answers, goal)
            or any(
                (rank in answers and answers[rank].is_evaluating)
                or any(part in frame.file for frame in frames.get(rank, ()) for part in _SLOW_FILES)
                for rank in culprits
            )
        )
        if now_s - self._last_progress_s < self._limit_s(is_slow=is_slow):
            self._was_slow = is_slow
            return
        processes = {process.rank: process for process in self._processes}

        def place_of(outcome: RankOutcome) -> str:
            seen = frames.get(outcome.rank, ())
            return _place_of(outcome) + name_awaited_processes(processes[outcome.rank], seen)

        if differ:
            calls = [(out.rank, each) for out, each in cause.evidence.calls]
            logger.warning(
                "no rank has made a step for %.0f s, and the ranks differ in a collective: %s; rank %d is %s",
                now_s - self._last_progress_s,
                "; ".join(call_lines(calls)),
                cause.root.rank,
                place_of(cause.root),
            )
            return
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
        places: dict[str, list[int]] = {}
        for outcome in outcomes.values():
            places.setdefault(place_of(outcome), []).append(outcome.rank)
        idle = ", and none does anything (no processor time, no input or output)" if is_idle else ""
        logger.warning(
            "no rank has made a step for %.0f s%s%s; %s",
            now_s - self._last_progress_s,
            longest,
            idle,
            ", ".join(
                f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}"
                for place, ranks in list(places.items())[:_SHOWN_PLACES]
            ),
        )

    def _outcome(
        self, process: RankProcess, at: Whereabouts | None, frames: Sequence[Frame]
    ) -> RankOutcome:
        """Return the outcome that the diagnosis would get if the attempt ended now."""
        reading = read_frames(frames)
        outcome = process.outcome()
        if outcome.status == "returned":
            return outcome
        is_stopped = self._deadlocks.state(process.rank) == "T"
        return replace(
            outcome,
            position=None if at is None else at.position,
            stack=reading.stack,
            in_collective=reading.in_collective,
            point_to_point=reading.point_to_point,
            state=psutil.STATUS_STOPPED if is_stopped else "",
        )

    def _has_begun(self, answers: dict[int, Whereabouts], goal: Collective | None) -> bool:
        """Return whether the length of a step is known, or of the collective that the ranks wait in."""
        if any(process.progress().steps >= _KNOWN_STEPS for process in self._processes):
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


def _threads_as_json(threads: Sequence[tuple[str, Sequence[Frame]]]) -> list[dict[str, object]]:
    return [{"name": name, "frames": [list(frame) for frame in calls]} for name, calls in threads]


def _place_of(outcome: RankOutcome) -> str:
    if outcome.status == "returned":
        return "done: its function has returned"
    stopped = "stopped" if outcome.state == psutil.STATUS_STOPPED else ""
    if not outcome.stack:
        return stopped or "not answering: it holds the GIL, or is not running Python"
    return f"{stopped} at {outcome.stack}".lstrip()
