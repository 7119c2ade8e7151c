"""Draws jobs from seeds, runs them in virtual time, and judges how each has ended."""

from __future__ import annotations

import argparse
import gc
import logging
import random
import sys
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import jobs
import stand_ins
import virtual_time
from jobs import Fault, Interrupted, Job, Scenario

from ddpsafe import (
    DDPSafeError,
    LaunchError,
    LaunchTimeoutError,
    NodeLostError,
    PreemptedError,
    PreflightError,
    RankExitedError,
    RankFailedError,
    RankKilledError,
    RankLeftEarlyError,
    RankRaisedError,
    RendezvousTimeoutError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

NODE_LOSS_S: Final = 20.0
LIMIT_S: Final = 700.0
_BRIEF_S: Final = NODE_LOSS_S - 6.0
_BRIEF_RESET_S: Final = 3.0
_RANK_ERRORS: Final = {
    "raises": RankRaisedError,
    "killed": RankKilledError,
    "exits": RankExitedError,
    "hangs": LaunchTimeoutError,
    "returns": RankLeftEarlyError,
}
_MOST_QUESTIONS: Final = 3
"""In the half second in which all ranks of a job return."""

_MOMENTS: Final = (
    "Introduction", "Answered", "RoundPlan", "Ready", "RankReport", "RankEnded", "ReportOutcomes",
    "NodeOutcomes", "LetRanksExit", "RoundResult", "RanksEnded", "SignalReceived", "FoldersSeen",
)  # fmt: skip
"""Messages on which faults happen: from the first meeting to the end of the job."""

_KINDS: Final = (
    *("rank", "rank", "rank", "launcher", "power", "signal", "signal", "pause", "slow"),
    *("outage", "outage", "outage", "outage", "freeze", "clock", "unmount"),
)
_CUTS: Final = ("pause", "freeze", "outage")
_PASSING: Final = ("slow", "clock", "unmount")
_TOO_LATE: Final = (PreflightError, RendezvousTimeoutError)
"""How a node ends that comes when an elastic job runs without it, or has ended."""


def draw(seed: int) -> Scenario:
    """Return the job of a seed."""
    pick = random.Random(seed)
    nnodes = pick.choice([2, 2, 3, 3, 4, 6])
    steps = pick.randint(3, 12)
    attempts = pick.choice([1, 1, 2, 3, 4])
    scenario = Scenario(
        seed=seed,
        nnodes=nnodes,
        nproc=pick.choice([1, 1, 2]),
        attempts=attempts,
        steps=steps,
        min_nodes=pick.choice([0, 0, 1, nnodes - 1]),
        spares=pick.choice([0, 0, 0, 1, 2]) if attempts > 1 else 0,
        saves=pick.random() < 0.5,
    )
    count = pick.choice([0, 1, 1, 1, 2, 2, 3])
    faults = [_draw_fault(pick, scenario) for _ in range(count)]
    if faults and pick.random() < 0.6:
        first = faults[0]
        is_one_host = pick.random() < 0.4
        faults[1:] = [
            replace(
                fault,
                host=first.host if is_one_host else fault.host,
                at_s=first.at_s,
                after=first.after,
                on=first.on,
                late_s=first.late_s + pick.uniform(0, 8),
            )
            for fault in faults[1:]
        ]
    return replace(scenario, faults=tuple(faults))


def _draw_fault(pick: random.Random, scenario: Scenario) -> Fault:
    kind = pick.choice(_KINDS)
    for_s, how = 0.0, ""
    if kind == "rank":
        how = pick.choice(list(_RANK_ERRORS))
    elif kind in ("launcher", "power"):
        for_s = pick.choice([0.0, pick.uniform(1, 40)])
    elif kind == "signal":
        how = pick.choice(["SIGINT", "SIGTERM", "SIGTERM", "SIGUSR1"])
        if pick.random() < 0.4:
            how, for_s = f"{how} {pick.choice(['SIGINT', 'SIGTERM'])}", pick.uniform(0.2, 8)
    elif kind in ("pause", "freeze", "slow"):
        how = "drop to all" if kind == "freeze" else ""
        for_s = pick.choice([pick.uniform(0.5, _BRIEF_S), pick.uniform(0.5, 40)])
    elif kind == "outage":
        how = pick.choice(["drop", "drop", "drop-in", "drop-out", "reset", "reset"])
        how += pick.choice([" to all", " to node-0"])
        longest_s = (
            pick.choice([1.0, _BRIEF_S, 60.0])
            if how.startswith("drop")
            else pick.choice([3.0, 20.0])
        )
        for_s = pick.uniform(0.1, longest_s)
    fault = Fault(
        kind=kind,
        host=pick.randrange(scenario.nnodes + scenario.spares),
        late_s=pick.choice([0.0, pick.uniform(0, 6)]),
        for_s=for_s,
        how=how,
    )
    when = pick.random()
    if when < 0.2:
        return replace(fault, at_s=pick.uniform(0, 25))
    if when < 0.6:
        step = (pick.choice([1, 1, 1, 2]), pick.randint(1, scenario.steps))
        return replace(fault, after=step)
    # Each message is a moment of its own: what happens between it and the next one differs.
    name, count = pick.choice(_MOMENTS), pick.randint(1, 2 * scenario.nnodes)
    return replace(fault, on=(name, count), late_s=fault.late_s * pick.choice([0.0, 0.01, 1.0]))


# What has to hold.


def is_harmless(fault: Fault) -> bool:
    """Return whether a fault must not end any attempt."""
    if fault.kind == "outage":
        return fault.for_s <= (_BRIEF_S if fault.how.startswith("drop") else _BRIEF_RESET_S)
    # A launcher that is stopped does not dial again.
    is_brief = fault.kind in ("pause", "freeze") and fault.for_s <= _BRIEF_S
    return is_brief or fault.kind in _PASSING


def _harmful(scenario: Scenario) -> list[Fault]:
    """Return the faults that may end an attempt."""
    kinds = {fault.how[:4] for fault in scenario.faults if fault.kind in _CUTS}
    # A reset in an outage makes that one count as a launcher that has ended.
    mixed = _CUTS if len(kinds) > 1 else ()
    return [fault for fault in scenario.faults if fault.kind in mixed or not is_harmless(fault)]


def judge(job: Job) -> Iterator[str]:
    """Yield what is wrong with how a job has ended."""
    for end in job.ends:
        if not end.task.is_done and not end.launcher.is_dead:
            yield f"{end.launcher.name} has not ended after {LIMIT_S:g} s"
        elif end.error is not None and not isinstance(end.error, (DDPSafeError, Interrupted)):
            yield f"{end.launcher.name} raised\n{''.join(traceback.format_exception(end.error))}"
    done = {end.launcher for end in job.ends if end.task.is_done}
    for training in job.trainings.values():
        for rank in training.ranks.values():
            if rank.is_there and rank.launcher in done:
                yield f"rank {rank.rank} of attempt {training.attempt} is left on {rank.launcher.name}"
    yield from _judge_healthy(job)
    yield from _judge_cause(job)
    yield from _judge_blame(job)
    yield from _judge_count(job)
    yield from _judge_same(job)
    yield from _judge_retries(job)


def _is_spare(job: Job, end: jobs.End) -> bool:
    """Return whether a launcher is one too many: it may come when all is over."""
    is_surplus = job.hosts.index(end.launcher.host) >= job.scenario.nnodes
    return is_surplus or end not in job.ends[: len(job.hosts)]


def _judge_healthy(job: Job) -> Iterator[str]:
    """A job that only meets what passes ends well, in its first attempt."""
    if _harmful(job.scenario):
        return
    for end in job.ends:
        is_late = isinstance(end.error, _TOO_LATE) or _is_of(end.error, 0)
        is_excused = _is_spare(job, end) or (job.scenario.min_nodes and is_late)
        if end.error is not None and not is_excused:
            yield f"healthy, but {end.launcher.name} ended: {end}"
    ranks = [rank for training in job.trainings.values() for rank in training.ranks.values()]
    if not job.scenario.faults and any(rank.questions > _MOST_QUESTIONS for rank in ranks):
        yield "ranks were asked where they are at each return of another one"
    if any(training.attempt > 1 for training in job.trainings.values()):
        yield "healthy, but there was another attempt"


def _judge_cause(job: Job) -> Iterator[str]:
    """Of one fault in the first attempt, every launcher that can know it names the cause."""
    scenario = job.scenario
    harmful = _harmful(scenario)
    if len(harmful) != 1 or any(fault.kind in ("outage", "freeze") for fault in scenario.faults):
        return
    (fault,) = harmful
    # The ranks may have returned by then, or the node 0 that pauses does not look.
    is_in_training = fault.after is not None and fault.after[0] == 1
    if (
        fault.after is None
        or not is_in_training
        or fault.after[1] + fault.late_s >= scenario.steps - 1
    ):
        return
    errors = [
        (end, error)
        for end in job.ends
        for error in end.launcher.failures
        if _is_of(error, 1) and end.launcher.host is not job.hosts[fault.host]
    ]
    for end, error in errors:
        if fault.kind == "rank":
            named = getattr(error, "missing_ranks", ()) or (getattr(error, "rank", -1),)
            is_right = isinstance(error, _RANK_ERRORS[fault.how])
            is_right = is_right and {rank // scenario.nproc for rank in named} == {fault.host}
        elif fault.kind in ("launcher", "power"):
            is_right = isinstance(error, NodeLostError) and error.hostname == f"h{fault.host}"
        else:
            continue
        if not is_right:
            yield f"{fault}, but {end.launcher.name} saw: {error.explanation.what}"
    if fault.kind != "signal" or "USR1" in fault.how or fault.host >= scenario.nnodes:
        return
    first, *more = fault.how.split()
    leaves = first == "SIGTERM" and 0 < scenario.min_nodes < scenario.nnodes and fault.host
    if leaves and "SIGINT" in more:
        return  # it may have left by then
    expected: Any = PreemptedError if scenario.saves and first == "SIGTERM" else Interrupted
    expected = (Interrupted, PreemptedError) if more else expected
    for end in job.ends:
        has_signal = end.launcher.host is job.hosts[fault.host]
        if _is_spare(job, end):
            continue
        if leaves and scenario.attempts > 1 and not has_signal:
            if end.error is not None:
                yield f"{fault} lets a node leave, but {end.launcher.name} ended: {end}"
        elif not isinstance(end.error, expected):
            yield f"{fault}, but {end.launcher.name} ended: {end}"


def _judge_blame(job: Job) -> Iterator[str]:
    """No launcher names a rank that has only failed because of another one, or has done nothing."""
    culprits = {(rank.training.attempt, rank.rank) for rank in job.culprits}
    for end in job.ends:
        for error in end.launcher.failures:
            if isinstance(error, RankFailedError) and (error.attempt, error.rank) not in culprits:
                yield f"{end.launcher.name} blames a rank that did nothing: {error.explanation.what}"


def _judge_count(job: Job) -> Iterator[str]:
    """Each fault ends at most one attempt."""
    faults = len(_harmful(job.scenario))
    if (attempts := len({training.attempt for training in job.trainings.values()})) > 1 + faults:
        yield f"{attempts} attempts for {faults} faults"


def _judge_same(job: Job) -> Iterator[str]:
    """Where nothing is cut off or lost, all launchers end with one result."""
    scenario = job.scenario
    kinds = {fault.kind for fault in scenario.faults} - {"clock", "unmount"}
    if kinds <= {"rank", "signal", "launcher", "power"} and all(
        fault.host for fault in scenario.faults if fault.kind in ("launcher", "power")
    ):
        yield from _judge_attempts(job)
    if kinds - {"rank", "signal"} or scenario.min_nodes or scenario.spares:
        return
    if any(fault.kind == "signal" and fault.after is None for fault in scenario.faults):
        return  # it may arrive before the launchers know of each other
    if len({str(end) for end in job.ends}) > 1:
        yield "the launchers end differently"


def _is_of(error: BaseException | None, attempt: int) -> bool:
    """Return whether an error is what ended an attempt."""
    is_one = isinstance(error, LaunchError) and not isinstance(error, RendezvousTimeoutError)
    return is_one and error.attempt == attempt


def _judge_attempts(job: Job) -> Iterator[str]:
    """Where node 0 stays, all launchers say the same of each attempt."""
    for attempt in range(1, job.scenario.attempts + 1):
        said = {
            error.explanation.what
            for end in job.ends
            if not end.launcher.is_dead
            for error in end.launcher.failures
            if _is_of(error, attempt)
            and not isinstance(error, PreemptedError)  # of a node that leaves
        }
        if len(said) > 1:
            yield f"different errors of attempt {attempt}: {said}"


def _judge_retries(job: Job) -> Iterator[str]:
    """A job with enough attempts, whose nodes come back, ends well."""
    scenario = job.scenario
    harmful = _harmful(scenario)
    comes_back = all(
        (fault.kind == "rank" and fault.how == "killed")
        or (fault.kind not in ("rank", "signal") and fault.for_s)
        for fault in harmful
    )
    if not comes_back or len(harmful) >= scenario.attempts:
        return
    living = [end for end in job.ends if not end.launcher.is_dead and not _is_spare(job, end)]
    if scenario.min_nodes or scenario.spares:
        # Some of the nodes may have trained without the others to the end.
        if living and not any(end.error is None for end in job.ends):
            yield "all faults can be retried, but no launcher ended well"
        return
    # All ranks have returned, and node 0 has ended, while a node was cut off: it cannot learn the result.
    has_ended = any(end.error is None for end in living)
    cut_off = {job.hosts[fault.host % len(job.hosts)] for fault in harmful if fault.kind in _CUTS}
    for end in living:
        may_miss_it = has_ended and not cut_off.isdisjoint((end.launcher.host, job.hosts[0]))
        if end.error is not None and not (may_miss_it and isinstance(end.error, NodeLostError)):
            yield f"all faults can be retried, but {end.launcher.name} ended: {end}"


# Running them.


def run(scenario: Scenario) -> tuple[list[str], Job]:
    """Run one job; return what is wrong with it."""
    job = Job(scenario)
    try:
        job.run(LIMIT_S)
        problems = list(judge(job))
    finally:
        job.close()
    return problems, job


def shrink(scenario: Scenario) -> Scenario:
    """Return a smaller job that fails, too."""
    while True:
        for smaller in _smaller(scenario):
            if run(smaller)[0]:
                scenario = smaller
                break
        else:
            return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    faults = scenario.faults
    for number in range(len(faults)):
        yield replace(scenario, faults=faults[:number] + faults[number + 1 :])
    most = max((fault.host for fault in faults), default=0)
    if scenario.spares:
        yield replace(scenario, spares=scenario.spares - 1)
    if scenario.nnodes > max(2, most + 1):
        yield replace(scenario, nnodes=scenario.nnodes - 1, min_nodes=0)
    if scenario.nproc > 1:
        yield replace(scenario, nproc=1)
    if scenario.min_nodes:
        yield replace(scenario, min_nodes=0)
    if scenario.saves:
        yield replace(scenario, saves=False)
    if scenario.attempts > 1:
        yield replace(scenario, attempts=scenario.attempts - 1)


def report(problems: list[str], job: Job) -> None:
    """Show what is wrong."""
    print(job.scenario)
    for end in job.ends:
        print(f"  {end.at_s:8.2f} s {end.launcher.name}: {end}")
    for problem in problems:
        print(f"  WRONG: {problem}")


def main() -> None:
    """Run what the command line asks for; exit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="how many jobs to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one, and show what happens")
    parser.add_argument("--shrink", action="store_true", help="find a smaller job that fails, too")
    parser.add_argument(
        "-x", "--exitfirst", action="store_true", help="stop at the first that fails"
    )
    options = parser.parse_args()
    logger = logging.getLogger("ddpsafe")
    logger.propagate, logger.handlers = False, [jobs.Handler()]
    stand_ins.install()
    if options.seed is not None:
        scenario = draw(options.seed)
        if options.shrink:
            scenario = shrink(scenario)
        jobs.show()
        print(scenario)
        problems, job = run(scenario)
        report(problems, job)
        sys.exit(bool(problems))
    logger.setLevel(logging.CRITICAL)
    failed = []
    sys.stdout.reconfigure(line_buffering=True)
    began_s = virtual_time.REAL_TIME_S()
    for seed in range(options.first, options.first + options.seeds):
        problems, job = run(draw(seed))
        if problems:
            failed.append(seed)
            print(f"seed {seed}: ", end="")
            report(problems, job)
            if options.exitfirst:
                break
        if seed % 50 == 0:
            gc.collect()
    took_s = virtual_time.REAL_TIME_S() - began_s
    print(f"{options.seeds} jobs in {took_s:.1f} s, {len(failed)} failed: {failed}")
    if failed:
        print(f"One again: python tests/nodes/simulation --seed {failed[0]} [--shrink]")
    sys.exit(bool(failed))
