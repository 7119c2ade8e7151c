"""Outcomes to one error: its class, its words, its facts, its cause."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe._errors import (
    AttemptTimeoutError,
    BarrierTimeoutError,
    CollectiveTimeoutError,
    LaunchError,
    LaunchTimeoutError,
    ProgressTimeoutError,
    RankExitedError,
    RankFailedError,
    RankKilledError,
    RankLeftEarlyError,
    RankRaisedError,
    RendezvousTimeoutError,
    explain,
)
from ddpsafe._launcher import advice
from ddpsafe._launcher.case import DOING, Case
from ddpsafe._launcher.causes import Cause, find_cause, furthest_collective
from ddpsafe._launcher.originals import original_of
from ddpsafe._launcher.symptoms import find_symptom, kind_of, wants_busy_port
from ddpsafe._launcher.wording import last_words, listed, others, positions, where
from ddpsafe._wire.outcome import clip
from ddpsafe._wording import take_apart

if TYPE_CHECKING:
    from ddpsafe._kinds import FailureKind
    from ddpsafe._launcher.causes import Sort
    from ddpsafe._wire.outcome import Raised, RankOutcome

_MAX_MESSAGE: Final = 1_000


def conclude(case: Case) -> LaunchError:
    """Turn a failed attempt into the error to raise, with its cause attached."""
    if case.ending.verdict == "rendezvous":
        return _not_all_joined(case)
    cause = find_cause(case.outcomes)
    if case.ending.verdict in ("attempt", "progress"):
        return _too_long(case, cause)
    if cause.sort in ("elsewhere", "unknown") and _early(case):
        return _not_all_joined(case)  # a rank's own clock ran out a moment before ours
    if cause.sort == "left":
        return _left(case, cause)
    if cause.sort != "broke" and (cause.sort != "unknown" or _timed_out(cause)):
        return _hung(case, cause)
    return _broke(case, cause)


def unloadable(case: Case, rank: int, exc: Exception) -> RankFailedError:
    """Return the error of an attempt that ended well, but for a value that cannot be loaded."""
    root = case.outcomes[rank]
    message = explain(
        f"what {case.name(root)} returned on {root.hostname}, {case.when}, cannot be loaded here: "
        f"{type(exc).__name__}: {clip(str(exc), _MAX_MESSAGE)}",
        cause="it was made of something that exists in the rank only, such as a process group.",
        fix="return plain data: numbers, strings, tensors, state dicts.",
        logs=case.run_dir,
    )
    return RankFailedError(message, **case.rank_facts(root), kind="unpicklable")


def _broke(case: Case, cause: Cause) -> LaunchError:
    if cause.root.status == "killed":
        return _killed(case, cause)
    if cause.root.raised is not None and cause.root.raised.exit_code is None:
        return _raised(case, cause, cause.root.raised)
    return _exited(case, cause)


def _timed_out(cause: Cause) -> bool:
    if cause.root.raised is None:
        return False
    symptom = find_symptom(cause.root.raised)
    return symptom is not None and symptom.sort == "timeout"


def _raised(case: Case, cause: Cause, raised: Raised) -> LaunchError:
    root, kind = cause.root, kind_of(raised)
    topic: FailureKind = "port" if wants_busy_port(raised) else kind
    likely, fix = advice.BY_KIND.get(topic, advice.BY_KIND["user-error"])
    text = raised.message
    if own := take_apart(text):  # an error of ddpsafe's own brings its advice along
        text, likely, fix = own
    at = [f"at {raised.where}"] if raised.where else []
    at += [f"held: {raised.held}"] if raised.held else []
    said = f": {clip(text, _MAX_MESSAGE)}" if text else "."
    message = explain(
        f"{case.name(root)} raised {raised.type_name} {case.place(root)}{said}",
        cause=likely,
        fix=fix,
        details=[*at, *others(case.outcomes.values(), cause)],
        logs=case.log_of(root),
    )
    error = RankRaisedError(message, **case.rank_facts(root), kind=kind)
    error.__cause__ = original_of(raised)
    return error


def _killed(case: Case, cause: Cause) -> LaunchError:
    root = cause.root
    number = -(root.exit_code or 0)
    kind: FailureKind = "killed"
    likely, fix = advice.BY_SIGNAL.get(number, advice.OTHER_SIGNAL)
    if number == signal.SIGKILL and case.oom_kills:
        kind, (likely, fix) = "out-of-memory", advice.KILLED_FOR_MEMORY
    message = explain(
        f"{case.name(root)} was killed by {root.signal_name} {case.place(root)}.",
        cause=likely,
        fix=fix.format(host=root.hostname),
        details=[*last_words(root), *others(case.outcomes.values(), cause), *_shapes(case, number)],
        logs=case.log_of(root),
    )
    return RankKilledError(message, **case.rank_facts(root), exit_code=128 + number, kind=kind)


def _shapes(case: Case, signum: int) -> list[str]:
    """Show the collectives of the others where gloo may have aborted over their shapes."""
    if signum != signal.SIGABRT:
        return []
    return positions([out for out in case.outcomes.values() if out.position is not None])


def _exited(case: Case, cause: Cause) -> LaunchError:
    root, raised = cause.root, cause.root.raised
    code = root.exit_code or 0
    called = "sys.exit() or os._exit() was called in the rank"
    if raised is not None and raised.exit_code is not None:
        code = raised.exit_code
        called = f"{raised.type_name} was raised at {raised.where or 'an unknown line'}"
        if not raised.message.isdigit() and raised.message:
            called += f": {clip(raised.message, _MAX_MESSAGE)}"
    elif root.exit_code is None:
        return _vanished(case, cause)
    elif root.phase == "starting":
        called = "the script failed while the new process imported it; its output stands above"
    elif code == _UNKNOWN_CODE:
        called += ", or Python's fork server, which alone knows how its ranks end, was killed"
    message = explain(
        f"{case.name(root)} exited with code {code} before its function returned, "
        f"{case.place(root)}.",
        cause=f"{called}.",
        fix="return from the function to end a rank well; raise an exception to end it badly.",
        details=[*last_words(root), *others(case.outcomes.values(), cause)],
        logs=case.log_of(root),
    )
    cls = RankLeftEarlyError if code == 0 else RankExitedError
    return cls(message, **case.rank_facts(root), exit_code=code or 1)


def _vanished(case: Case, cause: Cause) -> LaunchError:
    root = cause.root
    message = explain(
        f"{case.name(root)} ended before its function returned, {case.place(root)}; nobody knows how.",
        cause="another part of the launching program, a handler of SIGCHLD or os.wait(), took its "
        "exit status.",
        fix="let that part wait for its own children only: os.waitpid(pid, …).",
        details=[*last_words(root), *others(case.outcomes.values(), cause)],
        logs=case.log_of(root),
    )
    return RankExitedError(message, **case.rank_facts(root), exit_code=1)


def _left(case: Case, cause: Cause) -> LaunchError:
    root = cause.root
    waiting = [outcome.rank for outcome in case.outcomes.values() if outcome.status != "returned"]
    likely, fix = advice.BY_SORT["left"]
    message = explain(
        f"{case.name(root)} returned early on {root.hostname}, {case.when}: "
        f"rank {listed(waiting)} still waited for it.",
        cause=likely,
        fix=fix,
        details=positions(case.outcomes.values()),
        logs=case.run_dir,
    )
    return RankLeftEarlyError(message, **case.rank_facts(root), kind="user-error")


def _hung(case: Case, cause: Cause) -> LaunchError:
    root = cause.root
    likely, fix = _advice_on_hang(cause)
    at = f" at {where(root)}" if where(root) else ""
    waiting = [out.rank for out in case.outcomes.values() if out.rank != root.rank]
    goal = furthest_collective(case.outcomes.values())
    cls = _class_of_wait(case)
    awaited = "" if goal is None else f"; rank {listed(waiting)} waited for it in {goal}"
    message = explain(
        f"{case.name(root)} {_HUNG[cause.sort]}{at}, on {root.hostname}, {case.when}{awaited}.",
        cause=likely.format(host=root.hostname),
        fix=fix.format(host=root.hostname, pid=root.pid, setting=_setting_of(cls)),
        details=positions(case.outcomes.values()),
        logs=case.run_dir,
    )
    missing = [] if cause.sort == "unknown" else [root]
    kind: FailureKind = "startup-network" if cls is RendezvousTimeoutError else "hang"
    facts = case.timeout_facts(missing, case.ending.waited_s)
    return cls(message, **facts, kind=kind)


def _advice_on_hang(cause: Cause) -> advice.Advice:
    root = cause.root
    outlived_sigkill = root.status == "stopped" and root.ended_ns is None
    in_kernel = root.state == psutil.STATUS_DISK_SLEEP and outlived_sigkill
    return advice.IN_KERNEL if in_kernel else advice.BY_SORT[cause.sort]


def _class_of_wait(case: Case) -> type[LaunchTimeoutError]:
    """Return the class of the wait that timed out: a barrier and a rendezvous have their own."""
    names = [
        out.raised.type_name.rpartition(".")[2] for out in case.outcomes.values() if out.raised
    ]
    ours = {cls.__name__: cls for cls in (RendezvousTimeoutError, BarrierTimeoutError)}
    return next((ours[name] for name in names if name in ours), CollectiveTimeoutError)


def _setting_of(cls: type[LaunchTimeoutError]) -> str:
    """Name the timeout that made the error: ``BarrierTimeoutError`` comes of ``timeouts.barrier``."""
    return cls.__name__.removesuffix("TimeoutError").lower()


_UNKNOWN_CODE: Final = 255
"""What `multiprocessing` says of a process whose fork server has gone."""

_HUNG: Final[dict[Sort, str]] = {
    "suspended": "is stopped",
    "behind": "is behind",
    "elsewhere": "was elsewhere",
    "mismatch": "entered another collective than the others",
    "unknown": "timed out in a collective",
}


def _not_all_joined(case: Case) -> LaunchError:
    early = _early(case)
    # Ranks that have come wait in "joining" for the others: they are not the missing ones.
    missing = early or [out for out in case.outcomes.values() if out.phase == "joining"]
    names = listed(outcome.rank for outcome in missing)
    message = explain(
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


def _early(case: Case) -> list[RankOutcome]:
    """Return the ranks that had not come as far as to join."""
    return [out for out in case.outcomes.values() if out.phase in ("starting", "loading")]


def _too_long(case: Case, cause: Cause) -> LaunchError:
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
    message = explain(
        f"rank {names} (world_size {len(case.outcomes)}) {did} {case.limit(setting)}, {case.when}.",
        cause=likely.format(host=missing[0].hostname),
        fix=fix.format(host=missing[0].hostname, pid=missing[0].pid, setting=setting),
        details=positions(case.outcomes.values()),
        logs=case.run_dir,
    )
    cls = AttemptTimeoutError if setting == "attempt" else ProgressTimeoutError
    return cls(message, **case.timeout_facts(missing, case.ending.waited_s))
