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
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from ddpsafe._clock import Deadline
from ddpsafe._launcher.diagnosis.rank_readings import (
    ask_for_stacks,
    find_busy_loader_workers,
    is_in_rpc,
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
from ddpsafe._launcher.processes.rank_process import Activity, RankProcess
from ddpsafe._launcher.watch.hang_detection import NewCollectives
from ddpsafe._launcher.watch.idleness import IdleWatch
from ddpsafe._launcher.watch.status_socket import StatusRequests, StatusSocket
from ddpsafe._logging import get_logger
from ddpsafe._text import ranks_text
from ddpsafe._wire.messages import ThreadStack, Whereabouts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

    from ddpsafe._launcher.processes.rank_process import RankState
    from ddpsafe._wire.messages import Collective, Frame, RankOutcome
    from ddpsafe._wire.spec import RankSpec

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
        remote_answer_s: The same for a rank of another node, which its launcher asks.
        idle_sample_s: How often it measures whether the ranks do anything, while they make no step.
        idle_look_s: How long all ranks have to be idle before they are asked once, without a warning.
    """

    look_s: float = 0.5
    sleep_s: float = 2.0
    quiet_s: float = 30.0
    first_s: float = 300.0
    step_factor: float = 2.0
    answer_s: float = 1.0
    remote_answer_s: float = 5.0
    idle_sample_s: float = 5.0
    idle_look_s: float = 8.0


SETTINGS = LiveSettings()
"""What launches of this process use; tests replace it with shorter times."""

_SLEEP_REPORTS: Final = 2
_ANSWER_REPORTS: Final = 3
"""How many reports of a node, which come less often where there are many, such a limit has to span."""


def _fit(settings: LiveSettings, reports_every_s: float) -> LiveSettings:
    """Return the settings for a job whose other nodes report that often."""
    return replace(
        settings,
        look_s=max(settings.look_s, reports_every_s / 2),
        sleep_s=max(settings.sleep_s, _SLEEP_REPORTS * reports_every_s),
        remote_answer_s=max(settings.remote_answer_s, _ANSWER_REPORTS * reports_every_s),
    )


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
_RATE_LOOKS: Final = 17
_SLOW_FILES: Final = (
    "/ddpsafe/checkpoint/",
    "/torch/serialization.py",
    "/torch/distributed/checkpoint/",
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/",
    "/torch/utils/cpp_extension.py",
)
"""A call into one of these may take minutes while all is well."""


class _MainThread:
    """How long the main thread of one rank has been asleep or stopped."""

    def __init__(self, rank: RankState, now_s: float) -> None:
        self.rank = rank
        self.activity = Activity()
        self.since_s = now_s
        self.stopped_since_s: float | None = None
        self._steps = 0

    def look(self, now_s: float) -> float:
        """Look again; if it has run since, return how long it had slept before that, else 0."""
        before, steps_before = self.activity, self._steps
        made = self.rank.progress()
        self._steps = made.steps
        # A rank that has made a step has run. Most looks find that, and reading /proc for each of many
        # ranks would be most of what they cost.
        has_stepped = self._steps != steps_before
        self.activity = Activity() if has_stepped else self.rank.activity()
        if made.waits_ns and self.activity.state in ("R", "S", "D"):
            # It polls ddpsafe's store for other ranks, and does nothing else until that wait ends.
            self.activity = Activity(state="S", ran=(made.waits_ns,))
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

    def __init__(
        self,
        ranks: Sequence[RankState],
        settings: LiveSettings,
        *,
        now_s: float,
        stopped: Sequence[RankState] = (),
    ) -> None:
        self._known = {rank.rank: rank.whereabouts for rank in ranks}
        self.ranks = list(ranks)
        self._stopped = stopped
        self.asked_ns = time.monotonic_ns()
        is_local = all(isinstance(rank, RankProcess) for rank in (*ranks, *stopped))
        self.ends_s = now_s + (settings.answer_s if is_local else settings.remote_answer_s)
        for rank in ranks:
            rank.ask_whereabouts()

    def answers(self) -> dict[int, Whereabouts]:
        """Return the answers received so far, by rank."""
        return {
            rank.rank: rank.whereabouts
            for rank in self.ranks
            if rank.whereabouts is not None
            and rank.whereabouts is not self._known[rank.rank]
            and rank.has_answered
        }

    def is_over(self, now_s: float) -> bool:
        """Return whether all have answered, and been seen since, or the time is up."""
        if now_s >= self.ends_s:
            return True
        return (
            len(self.answers()) == len(self.ranks)
            and all(rank.is_seen_since_answer for rank in self.ranks)
            and all(rank.known_ns >= self.asked_ns for rank in self._stopped)
        )


class DeadlockWatch:
    """Notices ranks that are proved to wait for ever; see `wait_graph`."""

    def __init__(
        self,
        ranks: Sequence[RankState],
        settings: LiveSettings,
        *,
        now_s: float,
        limit: timedelta | None,
    ) -> None:
        """Take every main thread as awake; `limit` is ddpsafe's for collectives, if the user set none."""
        self._settings = settings
        self._limit = limit
        self._threads = {rank.rank: _MainThread(rank, now_s) for rank in ranks}
        self._sleep_s = settings.sleep_s
        self._asked: set[int] = set()
        self._next_s = 0.0
        self._pause_s = settings.sleep_s
        self._first_answers: dict[int, Whereabouts] | None = None
        self._ran_when_asked: dict[int, tuple[int, ...] | None] = {}
        self._asked_ns = 0
        self._inquiry: _Inquiry | None = None

    @property
    def is_asking(self) -> bool:
        """Whether ranks have been asked and may still answer."""
        return self._inquiry is not None

    def is_running(self) -> bool:
        """Return whether a main thread was running, or ready to run, at the last look."""
        return any(thread.activity.state == "R" for thread in self._threads.values())

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
                    self._ask([self._threads[rank].rank for rank in answers], now_s)
                return None
            # A rank with the same answer twice was there at the instant between all first and all second
            # answers, at which the proof has to hold; see `unchanged`.
            first, self._first_answers = self._first_answers, None
            same = {rank: unchanged(first.get(rank), now) for rank, now in answers.items()}
            return find_deadlock(
                self._views(
                    {rank: answer for rank, answer in same.items() if answer is not None}, now_s
                )
            )
        for rank, thread in self._threads.items():
            slept_s = thread.look(now_s)
            if slept_s > self._sleep_s and rank in self._asked:  # it was an ordinary wait
                self._sleep_s = min(_LONGEST_SLEEP_S, slept_s * _ORDINARY_WAIT_FACTOR)
            if slept_s:
                self._asked.discard(rank)
        asleep = [
            thread.rank
            for thread in self._threads.values()
            if thread.rank.alive
            and thread.rank.joined
            and thread.rank.returned is None
            and now_s - thread.since_s >= self._sleep_s
        ]
        out_of_action = [
            thread
            for thread in self._threads.values()
            if thread.rank.returned is not None or thread.is_stopped(now_s)
        ]
        if not asleep or len(asleep) + len(out_of_action) < 2:  # noqa: PLR2004 - one waits for another
            return None
        ranks = {rank.rank for rank in asleep}
        if ranks <= self._asked and now_s < self._next_s:
            return None
        is_new = bool(ranks - self._asked)
        self._pause_s = self._settings.sleep_s if is_new else self._pause_s * _PAUSE_FACTOR
        self._next_s = now_s + self._pause_s
        self._asked = ranks
        self._ran_when_asked = {rank.rank: self._threads[rank.rank].activity.ran for rank in asleep}
        self._ask(asleep, now_s)
        return None

    def _ask(self, ranks: Sequence[RankState], now_s: float) -> None:
        stopped = [thread.rank for thread in self._threads.values() if thread.is_stopped(now_s)]
        self._inquiry = _Inquiry(ranks, self._settings, now_s=now_s, stopped=stopped)
        self._asked_ns = self._inquiry.asked_ns

    def _views(self, answers: dict[int, Whereabouts], now_s: float) -> dict[int, RankView]:
        # If the user has set a timeout for collectives, a stopped rank gets that time to be continued.
        defaults = {0.0, *_TORCH_TIMEOUTS_S}
        if self._limit is not None:
            defaults.add(self._limit.total_seconds())
        is_bounded = any(
            collective.timeout_s not in defaults
            for answer in answers.values()
            for collective in answer.position.collectives
            if not collective.done
        )
        views = {}
        for number, thread in self._threads.items():
            rank, answer = thread.rank, answers.get(number)
            left = rank.left
            if left is not None:
                answer = Whereabouts(position=left.position)
            thread.look(now_s)
            ran = thread.activity.ran
            views[number] = RankView(
                rank=number,
                answer=answer,
                # Both answers describe one moment of a thread that has not run from before the first
                # question until after the second answer.
                is_asleep=ran is not None
                and ran == self._ran_when_asked.get(number)
                and rank.is_seen_since_answer,
                has_left=left is not None,
                is_stopped=thread.is_stopped(now_s)
                and rank.known_ns >= self._asked_ns
                and not is_bounded,
            )
        return views


class LiveWatch:
    """Proves deadlocks, warns of long waits, and answers ``ddpsafe status``, for one attempt.

    All three ask the ranks where they are, and `is_deadlocked` does the next step of each.

    Args:
        others: The ranks of other nodes, whose launchers report what ``/proc`` shows there.
        tell: Shows a warning on the other nodes, too.
        requests: Requests for the status from other nodes.

    Attributes:
        longest_s: The longest time between two steps in this run so far.
    """

    def __init__(
        self,
        processes: Sequence[RankProcess],
        *,
        clock: Callable[[], float],
        others: Sequence[RankState] = (),
        tell: Callable[[str], None] = lambda _: None,
        requests: Sequence[StatusRequests] = (),
    ) -> None:
        self._processes, self._others = processes, others
        self._ranks: Sequence[RankState] = [*processes, *others]
        self._tell = tell
        self._clock = clock
        self._settings = _fit(SETTINGS, max((rank.reports_every_s for rank in others), default=0.0))
        limit = None
        if processes and "collective" not in processes[0].spec.timeouts.chosen:
            limit = processes[0].spec.timeouts.collective
        self._deadlocks = DeadlockWatch(self._ranks, self._settings, now_s=clock(), limit=limit)
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
        # Of the last looks: when, and how many steps each rank had made.
        self._steps: deque[tuple[float, dict[int, int]]] = deque(maxlen=_RATE_LOOKS)
        # Beside the attempts of this launcher: the nodes of a job may share the run directory.
        log = Path(processes[0].spec.logs.stderr) if processes else None
        self._socket = None if log is None else StatusSocket(log.parent.parent)
        self._requests = [*requests, *([] if self._socket is None else [self._socket])]
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
        accepted = [requests.accept() for requests in self._requests]
        if any(wants_stacks is not None for wants_stacks in accepted):
            self._wants_stacks |= any(accepted)
            if self._inquiry is None:
                self._is_to_warn = False
                self._start_inquiry(now_s)
        if now_s < self._next_look_s and not self._deadlocks.is_asking and self._inquiry is None:
            return False
        self._next_look_s = now_s + self._settings.look_s
        progress = {rank.rank: rank.progress() for rank in self._ranks}
        self._steps.append((now_s, {rank: made.steps for rank, made in progress.items()}))
        if len(self._ranks) > 1:
            self.proof = self._deadlocks.look(now_s)
        else:
            self._deadlocks.read_states(now_s)
        seen = [
            (rank.phase, rank.returned is None, made.steps, made.saves)
            for rank, made in zip(self._ranks, progress.values(), strict=True)
        ]
        if seen != self._seen:
            self._seen = seen
            self._note_progress(now_s)
        # Unless they make steps or a main thread is running, measure whether the ranks do anything.
        if not self._idle.look(now_s, is_running=self._deadlocks.is_running()):
            self._has_looked = False
        self.longest_s = max(self.longest_s, *(made.longest_s for made in progress.values()))
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

    def _idle_s(self) -> float:
        """Return for how long all ranks of all nodes have been idle."""
        return min(self._idle.idle_s(), *(rank.idle_s for rank in self._others), math.inf)

    def _is_idle(self) -> bool:
        """Return whether all ranks have been idle for so long that no slow start explains it."""
        longest_s = self._idle_s()
        return 0 < longest_s >= self._settings.quiet_s - self._settings.idle_sample_s

    def _is_to_look(self) -> bool:
        """Return whether to ask the ranks once where they are, for what they may do later.

        A rank that polls a lock is never asleep for long, so that the search for a proof does not ask it.
        """
        if self._has_looked or self._deadlocks.is_asking:
            return False
        self._has_looked = self._idle_s() >= self._settings.idle_look_s
        return self._has_looked

    def _note_progress(self, at_s: float) -> None:
        self._last_progress_s = at_s
        self._pause_s = self._settings.quiet_s
        self._next_warning_s = 0.0

    def _limit_s(self, *, is_slow: bool) -> float:
        least_s = self._settings.first_s if is_slow else self._settings.quiet_s
        return max(least_s, self._settings.step_factor * self.longest_s)

    def _is_late(self, now_s: float) -> bool:
        if now_s < self._next_warning_s and not (self._was_slow and self._is_idle()):
            return False
        if all(rank.returned is not None for rank in self._ranks):
            return False
        if not all(rank.is_heard for rank in self._ranks):  # another warning says which node is not
            return False
        # Imports and the preparation of data may take minutes.
        is_slow = not all(rank.joined for rank in self._ranks) and not self._is_idle()
        return now_s - self._last_progress_s >= self._limit_s(is_slow=is_slow)

    def _start_inquiry(self, now_s: float) -> None:
        running = [
            rank for rank in self._ranks if rank.alive and rank.is_heard and rank.returned is None
        ]
        self._signalled = None
        self._inquiry = _Inquiry(running, self._settings, now_s=now_s)

    def _end_inquiry(self, inquiry: _Inquiry, now_s: float) -> None:
        """Warn once the answers are in; first get the stack of each rank that did not answer.

        A signal asks for a stack, which works while the GIL is held. A rank that answers gets no
        signal, since that might end the call that it waits in early.
        """
        if not inquiry.is_over(now_s):
            return
        answers = inquiry.answers()
        unanswered = {rank.rank for rank in inquiry.ranks} - answers.keys()
        silent = [process for process in self._processes if process.rank in unanswered]
        if silent and self._signalled is None:
            self._signalled = {process.rank: ask_for_stacks(process) for process in silent}
            inquiry.ends_s = now_s + self._settings.answer_s / 2
            return
        self._inquiry = None
        stacks = {
            process.rank: read_new_stack(process, (self._signalled or {}).get(process.rank, 0))
            for process in silent
        }
        if asking := [requests for requests in self._requests if requests.is_asked]:
            facts = self._facts(answers, stacks)
            for requests in asking:
                requests.answer(facts)
            self._wants_stacks = False
        if self._is_to_warn:
            self._warn(answers, stacks, now_s)

    def _facts(
        self, answers: dict[int, Whereabouts], stacks: dict[int, list[Frame]]
    ) -> dict[str, Any]:
        outcomes = {rank.rank: rank.outcome() for rank in self._ranks}
        nodes = {rank: outcome.node_rank for rank, outcome in outcomes.items()}
        arrivals = {rank: answer.position.arrivals for rank, answer in answers.items()}
        return {
            **facts_of_launch(self._processes[0].spec),
            "longest_step_s": round(self.longest_s, 3),
            "stragglers": [straggler.as_json() for straggler in find_stragglers(arrivals, nodes)],
            "ranks": [
                facts_of_rank(
                    rank,
                    outcomes[rank.rank],
                    answers.get(rank.rank),
                    stacks.get(rank.rank, ()),
                    wants_stacks=self._wants_stacks,
                    steps_per_s=self._steps_per_s(rank.rank),
                )
                for rank in sorted(self._ranks, key=lambda rank: rank.rank)
            ],
        }

    def _steps_per_s(self, rank: int) -> float:
        (first_s, first), (last_s, last) = self._steps[0], self._steps[-1]
        return (last[rank] - first[rank]) / (last_s - first_s) if last_s > first_s else 0.0

    def _warn(
        self, answers: dict[int, Whereabouts], stacks: dict[int, list[Frame]], now_s: float
    ) -> None:
        frames: dict[int, Sequence[Frame]] = {
            **{rank: answer.main_frames for rank, answer in answers.items()},
            **stacks,
        }
        outcomes = {
            rank.rank: outcome_of(
                rank, rank.outcome(), answers.get(rank.rank), frames.get(rank.rank, ())
            )
            for rank in self._ranks
        }
        # Collectives show progress where steps are not counted. Only new ones count: converted from the
        # wall clock, the time at which the same one was entered differs a little at each look.
        last_ns = self._collectives.last_entered_ns(
            outcome.position for outcome in outcomes.values()
        )
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
        # The end of RPC, whose threads poll, waits for all ranks, and nothing there fails.
        working = [out.rank for out in outcomes.values() if out.status != "returned"]
        wait_for_returned = len(working) < len(outcomes) and all(
            is_in_rpc(frames.get(rank, ())) for rank in working
        )
        is_slow = not (differ or is_idle or wait_for_returned) and (
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
            place = _place_of(outcome)
            if outcome.rank in processes:
                seen = frames.get(outcome.rank, ())
                place += name_awaited_processes(processes[outcome.rank], seen)
            if self._others:
                place += f", on node {outcome.node_rank} ({outcome.hostname})"
            return place

        since = f"no rank has made a step for {now_s - self._last_progress_s:.0f} s"
        longest = f" (longest step so far: {self.longest_s:.1f} s)" if self.longest_s else ""
        root = cause.root
        if differ:
            calls = [(outcome.rank, call) for outcome, call in cause.evidence.calls]
            text = (
                f"{since}, and the ranks differ in a collective: {'; '.join(call_lines(calls))}; "
                f"rank {root.rank} is {place_of(root)}"
            )
        elif goal is not None:
            positions = [outcomes[rank].position for rank in waiting]
            entered = [each and each.numbered(goal.group, goal.number) for each in positions]
            last_ns = max((call or goal).entered_ns for call in entered)
            waited_s = max(0.0, time.time_ns() - last_ns) / 1e9
            text = (
                f"{ranks_text(waiting)} {'has' if len(waiting) == 1 else 'have'} waited {waited_s:.0f} s "
                f"for rank {root.rank} in {goal}{longest}; rank {root.rank} is {place_of(root)}"
            )
        else:
            places: dict[str, list[int]] = {}
            for outcome in outcomes.values():
                places.setdefault(place_of(outcome), []).append(outcome.rank)
            idle = ", and none does anything (no processor time, no input or output)"
            where = ", ".join(
                f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} {place}"
                for place, ranks in list(places.items())[:_SHOWN_PLACES]
            )
            text = f"{since}{longest}{idle if is_idle else ''}; {where}"
        text += describe_unanswered(outcomes.values())
        logger.warning("%s", text)
        self._tell(text)

    def _has_begun(self, answers: dict[int, Whereabouts], goal: Collective | None) -> bool:
        """Return whether the length of a step is known, or of the collective that the ranks wait in."""
        if any(rank.progress().steps >= _KNOWN_STEPS for rank in self._ranks):
            return True
        if goal is not None and goal.number > _MANY_COLLECTIVES:
            return True
        return any(answer.completed >= _KNOWN_COLLECTIVES for answer in answers.values())


def describe_unanswered(outcomes: Iterable[RankOutcome]) -> str:
    """Return which connections of the ranks get no reply, as the end of a warning; empty if all do."""
    without_reply = {
        (outcome.rank, connection.peer) for outcome in outcomes for connection in outcome.unanswered
    }
    return "".join(
        f"; what rank {rank} sends to {peer} is not answered: the network, or that host, is down"
        for rank, peer in sorted(without_reply)[:_SHOWN_PLACES]
    )


def _collective_of(answer: Whereabouts | None) -> dict[str, object] | None:
    last = None if answer is None else answer.position.current()
    if last is None:
        return None
    return {
        "group": last.group,
        "number": last.number,
        "name": last.name.partition(":")[2],
        "done": last.done,
        "text": str(last),
    }


def _threads_as_json(threads: Iterable[ThreadStack]) -> list[dict[str, object]]:
    return [
        {"name": each.name, "frames": [list(frame) for frame in each.frames]} for each in threads
    ]


def _place_of(outcome: RankOutcome) -> str:
    if outcome.status == "returned":
        return "done: the code has ended"
    stopped = "stopped" if outcome.state == psutil.STATUS_STOPPED else ""
    if not outcome.stack:
        return stopped or "not answering: it holds the GIL, or is not running Python"
    return f"{stopped} at {outcome.stack}".lstrip()


def facts_of_launch(spec: RankSpec) -> dict[str, Any]:
    """Return what is known of a launch without its ranks, for ``ddpsafe status``."""
    return {
        "schema": 1,
        "pid": os.getpid(),
        "run_dir": spec.run_dir,
        "attempt": spec.attempt,
        "world_size": spec.world.world_size,
        "longest_step_s": 0.0,
        "stragglers": [],
        "unanswered": [],
    }


def facts_of_rank(
    rank: RankState,
    outcome: RankOutcome,
    answer: Whereabouts | None,
    stack: Sequence[Frame] = (),
    *,
    wants_stacks: bool,
    steps_per_s: float = 0.0,
) -> dict[str, object]:
    """Return what is known about a rank, for ``ddpsafe status``; of one on another host, that is less.

    `stack` is that of its main thread, if it does not answer.
    """
    made = rank.progress()
    frames = (() if answer is None else answer.main_frames) or stack
    outcome = outcome_of(rank, outcome, answer, frames)
    threads = answer.threads if answer else ()
    facts: dict[str, object] = {
        "rank": rank.rank,
        "local_rank": outcome.local_rank,
        "hostname": outcome.hostname,
        "pid": None,
        "phase": "returned" if rank.returned is not None else rank.phase,
        "state": outcome.state,
        "answered": answer is not None,
        "steps": made.steps,
        "steps_per_s": round(steps_per_s, 3),
        "saves": made.saves,
        "resumed_from": made.resumed_from,
        "last_step_s": None,  # for a rank of another host it is on that host's clock
        "collective": _collective_of(answer),
        "where": outcome.stack,
        "in_collective": outcome.in_collective,
        "threads": [],
        "loader_workers": [],
    }
    workers: Sequence[ThreadStack] = ()
    if isinstance(rank, RankProcess):
        facts |= {"pid": rank.pid, "state": outcome.state or rank.activity().state}
        if made.last_ns:
            facts["last_step_s"] = round((time.monotonic_ns() - made.last_ns) / 1e9, 3)
        threads = threads or (ThreadStack(name="MainThread", frames=tuple(stack)),)
        if wants_stacks and rank.alive:
            workers = find_busy_loader_workers(rank)
    if wants_stacks:
        facts |= {"threads": _threads_as_json(threads), "loader_workers": _threads_as_json(workers)}
    return facts


def outcome_of(
    rank: RankState, outcome: RankOutcome, answer: Whereabouts | None, frames: Sequence[Frame]
) -> RankOutcome:
    """Return the outcome that the diagnosis would get if the attempt ended now."""
    reading = read_frames(frames)
    if outcome.status == "returned":
        return outcome
    return replace(
        outcome,
        position=None if answer is None else answer.position,
        stack=reading.stack,
        in_collective=reading.in_collective
        or (answer is not None and answer.position.in_store is not None),
        point_to_point=reading.point_to_point,
        state=psutil.STATUS_STOPPED if rank.activity().state == "T" else "",
    )


class StatusOfNode:
    """A request for the status that node 0, which knows all ranks, is to answer within `limit`.

    If it does not, the ranks of this node are asked.
    """

    def __init__(
        self, processes: Sequence[RankProcess], *, wants_stacks: bool, limit: timedelta
    ) -> None:
        self._processes, self._wants_stacks = processes, wants_stacks
        self._deadline = Deadline.after(limit)
        self._inquiry: _Inquiry | None = None

    def find_own(self, *, is_cut_off: bool) -> dict[str, Any] | None:
        """Return the facts about the ranks of this node, once node 0 has not answered and they have."""
        now_s = time.monotonic()
        if self._inquiry is None and (is_cut_off or self._deadline.expired()):
            running = [rank for rank in self._processes if rank.alive and rank.returned is None]
            self._inquiry = _Inquiry(running, SETTINGS, now_s=now_s)
        if self._inquiry is None or not self._inquiry.is_over(now_s):
            return None
        answers = self._inquiry.answers()
        return {
            **facts_of_launch(self._processes[0].spec),
            "ranks": [
                facts_of_rank(
                    rank, rank.outcome(), answers.get(rank.rank), wants_stacks=self._wants_stacks
                )
                for rank in self._processes
            ],
        }
