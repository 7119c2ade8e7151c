"""Outcomes to one error: its class, its words, its facts, its cause."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import (
    AttemptTimeoutError,
    CollectiveTimeoutError,
    LaunchError,
    ProgressTimeoutError,
    RankExitedError,
    RankKilledError,
    RankLeftEarlyError,
    RankRaisedError,
    RendezvousTimeoutError,
    explain,
)
from ddpsafe._launcher import advice
from ddpsafe._launcher.causes import Cause, find_cause, is_own_fault, last_collective
from ddpsafe._launcher.symptoms import find_symptom, kind_of
from ddpsafe._wire import payload

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpsafe._launcher.supervisor import Ending
    from ddpsafe._wire.outcome import Raised, RankOutcome

_TAIL_LINES: Final = 12
_SHOWN_RANKS: Final = 16
_DOING: Final = {
    "starting": "starting (importing the script)",
    "loading": "loading the function and its arguments",
    "joining": "joining the process group",
    "running": "running",
    "leaving": "leaving",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is known about a failed attempt.

    Attributes:
        outcomes: What became of each rank, by rank.
        ending: Why the watch ended.
        attempt: The attempt, counted from 1.
        attempts: How many the policy allows.
        run_dir: Where the logs are.
    """

    outcomes: Mapping[int, RankOutcome]
    ending: Ending
    attempt: int
    attempts: int
    run_dir: Path

    @property
    def when(self) -> str:
        """Say at which attempt and after how long it ended."""
        return f"attempt {self.attempt} of {self.attempts}, after {self.ending.waited_s:.1f} s"

    def name(self, outcome: RankOutcome) -> str:
        """Name a rank with the number of ranks."""
        return f"rank {outcome.rank} (world_size {len(self.outcomes)})"

    def place(self, outcome: RankOutcome) -> str:
        """Say where a rank was, what it did, and when it was over."""
        return f"on {outcome.hostname} while {_DOING[outcome.phase]}, {self.when}"

    def facts(self) -> dict[str, Any]:
        """Return what every `LaunchError` carries."""
        return {
            "attempt": self.attempt,
            "attempts": self.attempts,
            "outcomes": self.outcomes,
            "run_dir": self.run_dir,
        }

    def rank_facts(self, root: RankOutcome) -> dict[str, Any]:
        """Return what every `RankFailedError` carries."""
        return {
            **self.facts(),
            "rank": root.rank,
            "local_rank": root.local_rank,
            "hostname": root.hostname,
            "pid": root.pid,
            "log_path": Path(root.stderr) if root.stderr else None,
        }

    def timeout_facts(self, missing: Iterable[RankOutcome], waited_s: float) -> dict[str, Any]:
        """Return what every `LaunchTimeoutError` carries."""
        stacks = {rank: where(outcome) for rank, outcome in self.outcomes.items()}
        return {
            **self.facts(),
            "waited_s": waited_s,
            "missing_ranks": [outcome.rank for outcome in missing],
            "stacks": {rank: text for rank, text in stacks.items() if text},
        }


class RemoteTraceback(Exception):  # noqa: N818 - shown as text above the error it belongs to
    """The traceback of another process, as text."""

    def __str__(self) -> str:
        """Show it as Python shows a traceback."""
        return f"\n{self.args[0]}"


def conclude(case: Case) -> LaunchError:
    """Turn a failed attempt into the error to raise, with its cause attached."""
    if case.ending.verdict == "rendezvous":
        return _not_all_joined(case)
    cause = find_cause(case.outcomes)
    if case.ending.verdict in ("attempt", "progress"):
        return _too_long(case, cause)
    if cause.sort == "left":
        return _left(case, cause)
    if cause.sort != "broke" and (cause.sort != "unknown" or _timed_out(cause)):
        return _hung(case, cause)
    return _broke(case, cause)


def _broke(case: Case, cause: Cause) -> LaunchError:
    if cause.root.status == "killed":
        return _killed(case, cause)
    if cause.root.raised is not None and cause.root.raised.exit_code is None:
        return _raised(case, cause, cause.root.raised)
    return _exited(case, cause)


def where(outcome: RankOutcome) -> str:
    """Say where a rank was: the line that raised, or the line it was at when it was asked."""
    return outcome.raised.where if outcome.raised is not None else outcome.stack


def _timed_out(cause: Cause) -> bool:
    if cause.root.raised is None:
        return False
    symptom = find_symptom(cause.root.raised)
    return symptom is not None and symptom.sort == "timeout"


def _raised(case: Case, cause: Cause, raised: Raised) -> LaunchError:
    root, kind = cause.root, kind_of(raised)
    likely, fix = advice.BY_KIND.get(kind, advice.BY_KIND["user-error"])
    at = [f"at {raised.where}"] if raised.where else []
    message = explain(
        f"{case.name(root)} raised {raised.type_name} {case.place(root)}: {raised.message}",
        cause=likely,
        fix=fix,
        details=[*at, *_others(case, cause)],
        logs=root.stderr,
    )
    error = RankRaisedError(message, **case.rank_facts(root), kind=kind)
    error.__cause__ = _original(raised)
    return error


def _original(raised: Raised) -> BaseException:
    """Return the rank's own exception where it could travel, its traceback above it."""
    remote = RemoteTraceback(raised.traceback)
    if raised.payload is None:
        return remote
    try:
        exc = payload.loads(raised.payload)
    except Exception:  # noqa: BLE001 - a user's exception may refuse to be built here
        return remote
    if not isinstance(exc, BaseException):
        return remote
    exc.__cause__ = remote
    return exc


def _killed(case: Case, cause: Cause) -> LaunchError:
    root = cause.root
    number = -(root.exit_code or 0)
    likely, fix = advice.BY_SIGNAL.get(number, advice.OTHER_SIGNAL)
    message = explain(
        f"{case.name(root)} was killed by {root.signal_name} {case.place(root)}.",
        cause=likely,
        fix=fix.format(host=root.hostname),
        details=[*_last_words(root), *_others(case, cause)],
        logs=root.stderr,
    )
    return RankKilledError(message, **case.rank_facts(root), exit_code=128 + number, kind="killed")


def _exited(case: Case, cause: Cause) -> LaunchError:
    root, raised = cause.root, cause.root.raised
    code = root.exit_code or 0
    called = "sys.exit() or os._exit() was called in the rank"
    if raised is not None and raised.exit_code is not None:
        code = raised.exit_code
        called = f"{raised.type_name} was raised at {raised.where or 'an unknown line'}"
    elif root.phase == "starting":
        called = "the script failed while the new process imported it; its output stands above"
    message = explain(
        f"{case.name(root)} exited with code {code} before its function returned, "
        f"{case.place(root)}.",
        cause=f"{called}.",
        fix="return from the function to end a rank well; raise an exception to end it badly.",
        details=[*_last_words(root), *_others(case, cause)],
        logs=root.stderr,
    )
    cls = RankLeftEarlyError if code == 0 else RankExitedError
    return cls(message, **case.rank_facts(root), exit_code=code or 1)


def _left(case: Case, cause: Cause) -> LaunchError:
    root = cause.root
    waiting = [outcome.rank for outcome in case.outcomes.values() if outcome.status != "returned"]
    likely, fix = advice.BY_SORT["left"]
    message = explain(
        f"{case.name(root)} returned early on {root.hostname}, {case.when}: "
        f"rank {_listed(waiting)} still waited for it.",
        cause=likely,
        fix=fix,
        details=_positions(case),
        logs=case.run_dir,
    )
    return RankLeftEarlyError(message, **case.rank_facts(root), kind="user-error")


def _hung(case: Case, cause: Cause) -> LaunchError:
    root = cause.root
    likely, fix = advice.BY_SORT[cause.sort]
    how = {
        "stopped": "is stopped",
        "behind": "is behind the others",
        "elsewhere": "did not take part in the collective that the others waited in",
        "mismatch": "entered another collective than the others",
    }.get(cause.sort, "timed out in a collective")
    message = explain(
        f"{case.name(root)} {how}, {case.place(root)}.",
        cause=likely,
        fix=fix.format(host=root.hostname, pid=root.pid),
        details=_positions(case),
        logs=case.run_dir,
    )
    missing = [] if cause.sort == "unknown" else [root]
    return CollectiveTimeoutError(message, **case.timeout_facts(missing, case.ending.waited_s))


def _not_all_joined(case: Case) -> LaunchError:
    early = [out for out in case.outcomes.values() if out.phase in ("starting", "loading")]
    # Ranks that have come wait in "joining" for the others: they are not the missing ones.
    missing = early or [out for out in case.outcomes.values() if out.phase == "joining"]
    names = _listed(outcome.rank for outcome in missing)
    message = explain(
        f"rank {names} (world_size {len(case.outcomes)}) did not join in time, {case.when}.",
        cause="slow imports, work at the top of the script, or a rank that hangs before it joins.",
        fix="move heavy work below the main guard or into the function, or raise "
        "timeouts.rendezvous.",
        details=[f"rank {out.rank} was {_DOING[out.phase]} {where(out)}" for out in missing],
        logs=case.run_dir,
    )
    facts = case.timeout_facts(missing, case.ending.waited_s)
    return RendezvousTimeoutError(message, **facts, kind="startup-network")


def _too_long(case: Case, cause: Cause) -> LaunchError:
    running = [
        outcome for outcome in case.outcomes.values() if outcome.status in ("running", "stopped")
    ]
    accused = cause.root if cause.sort in ("stopped", "behind", "elsewhere", "left") else None
    missing = [accused] if accused is not None else running
    names = _listed(outcome.rank for outcome in missing)
    setting, limit = {
        "attempt": ("timeouts.attempt", "still ran at the end of timeouts.attempt"),
        "progress": ("timeouts.progress", "made no step within timeouts.progress"),
    }[case.ending.verdict]
    likely, fix = (
        advice.BY_SORT[cause.sort]
        if accused
        else (
            "the work takes longer than the deadline, or a rank hangs.",
            f"see where the ranks were; raise {setting} if they were at work.",
        )
    )
    message = explain(
        f"rank {names} (world_size {len(case.outcomes)}) {limit}, {case.when}.",
        cause=likely,
        fix=fix.format(host=missing[0].hostname, pid=missing[0].pid),
        details=_positions(case),
        logs=case.run_dir,
    )
    cls = AttemptTimeoutError if case.ending.verdict == "attempt" else ProgressTimeoutError
    return cls(message, **case.timeout_facts(missing, case.ending.waited_s))


def _others(case: Case, cause: Cause) -> list[str]:
    """Name the ranks that only lost the one that broke."""
    lines = [
        f"rank {out.rank} {'also failed' if is_own_fault(out) else 'only lost it'}: "
        f"{_first_line(out)}"
        for out in cause.collateral[:_SHOWN_RANKS]
    ]
    stopped = [outcome for outcome in case.outcomes.values() if outcome.status == "stopped"]
    for outcome in stopped[:_SHOWN_RANKS]:
        at = f" at {outcome.stack}" if outcome.stack else ""
        lines.append(f"rank {outcome.rank} was stopped by the launcher{at}")
    return lines


def _first_line(outcome: RankOutcome) -> str:
    raised = outcome.raised
    if raised is None:
        return outcome.status if outcome.signal_name is None else f"killed by {outcome.signal_name}"
    text = f"{raised.type_name}: {raised.message}".splitlines()[0]
    return text if len(text) <= 100 else text[:99] + "…"  # noqa: PLR2004 - one line of a screen


def _positions(case: Case) -> list[str]:
    """Say of each rank where it was, in the code and in the sequence of collectives."""
    lines = []
    for outcome in list(case.outcomes.values())[:_SHOWN_RANKS]:
        last = last_collective(outcome)
        parts = [f"rank {outcome.rank}"]
        if outcome.state == "stopped":
            parts.append("is stopped (SIGSTOP)")
        elif outcome.status == "returned":
            parts.append("has returned")
        if text := where(outcome):
            parts.append(f"at {text}")
        if last is not None:
            parts.append(f"{'after' if last.done else 'in'} {last}")
        lines.append(", ".join(parts))
    return lines


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def _last_words(root: RankOutcome) -> list[str]:
    """Show the last lines a rank wrote to stderr, when nothing else says why it ended."""
    if root.stderr is None:
        return []
    try:
        text = Path(root.stderr).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = text.splitlines()[-_TAIL_LINES:]
    return ["last lines of its stderr:", *(f"| {line[:160]}" for line in lines)] if lines else []
