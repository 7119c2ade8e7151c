"""The errors of ranks that waited in vain: for one that hangs, has left, or never came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._errors import (
    AttemptTimeoutError,
    BarrierTimeoutError,
    CollectiveTimeoutError,
    Explanation,
    LaunchError,
    LaunchTimeoutError,
    ProgressTimeoutError,
    RankLeftEarlyError,
    RendezvousTimeoutError,
)
from ddpsafe._launcher import advice
from ddpsafe._launcher.case import DOING, Case
from ddpsafe._launcher.waits import find_who_waited
from ddpsafe._launcher.wording import last_complaint, listed, positions, where

if TYPE_CHECKING:
    from ddpsafe._errors import FailureKind
    from ddpsafe._launcher.causes import Cause, Sort
    from ddpsafe._wire.outcome import RankOutcome


def left(case: Case, cause: Cause) -> LaunchError:
    """Return the error of a rank that returned while others waited for it."""
    root = cause.root
    waiting = [outcome.rank for outcome in case.outcomes.values() if outcome.status != "returned"]
    likely, fix = advice.BY_SORT["left"]
    message = Explanation(
        f"{case.name(root)} returned early on {root.hostname}, {case.when}: "
        f"rank {listed(waiting)} still waited for it.",
        cause=likely,
        fix=fix,
        details=positions(case.outcomes.values()),
        logs=case.run_dir,
    )
    return RankLeftEarlyError(message, **case.rank_facts(root), kind="user-error")


def hung(case: Case, cause: Cause) -> LaunchError:
    """Return the error of a wait that timed out, or will: it names whom the others waited for."""
    cls = _class_of_wait(case)
    if cause.sort == "unknown" and (told := _words_of_barriers(case)):
        return _not_all_came(case, told)
    root = cause.root
    likely, fix = _advice_on_hang(cause)
    at = f" at {where(root)}" if where(root) else ""
    waiting, goal = find_who_waited(case.outcomes.values(), root)
    awaited = "" if goal is None else f"; rank {listed(waiting)} waited for it in {goal}"
    message = Explanation(
        f"{case.name(root)} {_HUNG[cause.sort]}{at}, on {root.hostname}, {case.when}{awaited}.",
        cause=likely.format(host=root.hostname),
        fix=fix.format(host=root.hostname, pid=root.pid, setting=cls.setting),
        details=[*positions(case.outcomes.values()), *last_complaint(root)],
        logs=case.run_dir,
    )
    missing = [] if cause.sort == "unknown" else [root]
    kind: FailureKind = "startup-network" if cls is RendezvousTimeoutError else "hang"
    facts = case.timeout_facts(missing, case.ending.waited_s)
    return cls(message, **facts, kind=kind)


def _words_of_barriers(case: Case) -> list[Explanation]:
    """Return what the ranks say that waited at one of ddpsafe's barriers without success."""
    waited = [out.raised for out in case.outcomes.values() if _raised(out, BarrierTimeoutError)]
    return [raised.explanation for raised in waited if raised and raised.explanation]


def _not_all_came(case: Case, told: list[Explanation]) -> LaunchError:
    """Say at which barriers the ranks waited; none of them is known to hang."""
    first, *others = told
    message = Explanation(
        f"{first.what} ({case.when})",
        cause=first.cause,
        fix=first.fix,
        details=[
            *(each.what for each in others),
            *positions(case.outcomes.values()),
        ],
        logs=case.run_dir,
    )
    away = [out for out in case.outcomes.values() if not _raised(out, BarrierTimeoutError)]
    facts = case.timeout_facts(away, case.ending.waited_s)
    return BarrierTimeoutError(message, **facts, kind="hang")


def _raised(outcome: RankOutcome, cls: type[LaunchTimeoutError]) -> bool:
    """Tell whether a rank raised that error of ours."""
    return outcome.raised is not None and outcome.raised.setting == cls.setting


def _advice_on_hang(cause: Cause) -> advice.Advice:
    root = cause.root
    outlived_sigkill = root.status == "stopped" and root.ended_ns is None
    in_kernel = root.state == psutil.STATUS_DISK_SLEEP and outlived_sigkill
    return advice.IN_KERNEL if in_kernel else advice.BY_SORT[cause.sort]


def _class_of_wait(case: Case) -> type[LaunchTimeoutError]:
    """Return the class of the wait that timed out: a barrier and a rendezvous have their own."""
    for cls in (RendezvousTimeoutError, BarrierTimeoutError):
        if any(_raised(outcome, cls) for outcome in case.outcomes.values()):
            return cls
    return CollectiveTimeoutError


_HUNG: Final[dict[Sort, str]] = {
    "suspended": "is stopped",
    "behind": "is behind",
    "elsewhere": "was elsewhere",
    "mismatch": "entered another collective than the others",
    "unknown": "timed out in a collective",
}


def not_all_joined(case: Case) -> LaunchError:
    """Return the error of ranks that never joined."""
    early = find_early(case)
    # Ranks that have come wait in "joining" for the others: they are not the missing ones.
    missing = early or [out for out in case.outcomes.values() if out.phase == "joining"]
    names = listed(outcome.rank for outcome in missing)
    message = Explanation(
        f"rank {names} (world_size {len(case.outcomes)}) did not join within "
        f"{case.limit('rendezvous')}, {case.when}.",
        cause="slow imports, work at the top of the script, or a rank that hangs before it joins.",
        fix="move heavy work below the main guard or into the function, or raise "
        "timeouts.rendezvous.",
        details=[f"rank {out.rank} was {DOING[out.phase]} {where(out)}" for out in missing],
        logs=case.run_dir,
    )
    facts = case.timeout_facts(missing, case.ending.waited_s)
    return RendezvousTimeoutError(message, **facts, kind="startup-network")


def find_early(case: Case) -> list[RankOutcome]:
    """Return the ranks that had not come as far as to join."""
    return [out for out in case.outcomes.values() if out.phase in ("starting", "loading")]


def too_long(case: Case, cause: Cause) -> LaunchError:
    """Return the error of an attempt that took too long, or made no step for too long."""
    running = [
        outcome for outcome in case.outcomes.values() if outcome.status in ("running", "stopped")
    ]
    accused = cause.root if cause.sort in ("suspended", "behind", "elsewhere", "left") else None
    missing = [accused] if accused is not None else (running or [cause.root])
    names = listed(outcome.rank for outcome in missing)
    setting = case.ending.verdict
    did = {"attempt": "still ran at the end of", "progress": "made no step within"}[setting]
    likely, fix = (
        _advice_on_hang(cause)
        if accused
        else (
            "the work takes longer than the deadline, or a rank hangs.",
            f"see where the ranks were; raise timeouts.{setting} if they were at work.",
        )
    )
    message = Explanation(
        f"rank {names} (world_size {len(case.outcomes)}) {did} {case.limit(setting)}, {case.when}.",
        cause=likely.format(host=missing[0].hostname),
        fix=fix.format(host=missing[0].hostname, pid=missing[0].pid, setting=setting),
        details=positions(case.outcomes.values()),
        logs=case.run_dir,
    )
    cls = AttemptTimeoutError if setting == "attempt" else ProgressTimeoutError
    return cls(message, **case.timeout_facts(missing, case.ending.waited_s))
