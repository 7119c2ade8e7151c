"""Outcomes and evidence to one cause, the ranks that only lost it, and a message."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ddpsafe._errors import (
    AttemptTimeoutError,
    FailureKind,
    LaunchError,
    RankExitedError,
    RankFailedError,
    RankKilledError,
    RankLeftEarlyError,
    RankRaisedError,
    RendezvousTimeoutError,
    explain,
)
from ddpsafe._launcher.symptoms import find_symptom, kind_of
from ddpsafe._wire import payload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddpsafe._launcher.supervisor import Ending
    from ddpsafe._wire.outcome import Raised, RankOutcome

_TAIL_LINES: Final = 12


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
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.outcomes)

    @property
    def when(self) -> str:
        """Say at which attempt and after how long it ended."""
        return f"attempt {self.attempt} of {self.attempts}, after {self.ending.waited_s:.1f} s"

    def facts(self) -> dict[str, Any]:
        """Return what every `LaunchError` carries."""
        return {
            "attempt": self.attempt,
            "attempts": self.attempts,
            "outcomes": self.outcomes,
            "run_dir": self.run_dir,
        }


class RemoteTraceback(Exception):  # noqa: N818 - shown as text above the error it belongs to
    """The traceback of another process, as text."""

    def __init__(self, text: str) -> None:
        """Keep the text."""
        super().__init__(text)

    def __str__(self) -> str:
        """Show it as Python shows a traceback."""
        return f"\n{self.args[0]}"


def find_root_cause(
    outcomes: Mapping[int, RankOutcome],
) -> tuple[RankOutcome, list[RankOutcome]]:
    """Tell the rank that broke from those that only lost it.

    Evidence is ranked by what it can mean, and by time only within one rank of it: the ranks that
    lost a peer often complain before the one that broke has said anything.

    Args:
        outcomes: At least one of them a failure.

    Returns:
        The rank that broke, and the other failed ranks, by rank.
    """
    failed = [outcome for outcome in outcomes.values() if _weight(outcome) is not None]
    root = min(failed, key=lambda outcome: (_weight(outcome), _time(outcome), outcome.rank))
    if root.raised is not None and find_symptom(root.raised) is not None:
        early = _left_early(outcomes)
        if early is not None:
            return early, failed
    return root, [outcome for outcome in failed if outcome.rank != root.rank]


def _weight(outcome: RankOutcome) -> int | None:
    """Order the evidence: 0 can only be a cause, 2 is an echo, ``None`` is no failure."""
    if outcome.status in ("killed", "exited"):
        return 0
    if outcome.status == "raised" and outcome.raised is not None:
        symptom = find_symptom(outcome.raised)
        if symptom is None:
            return 0
        return 1 if symptom.sort == "peer-lost" else 2
    return None


def _time(outcome: RankOutcome) -> int:
    if outcome.raised is not None:
        return outcome.raised.at_ns
    return outcome.ended_ns or 0


def _left_early(outcomes: Mapping[int, RankOutcome]) -> RankOutcome | None:
    """Find a rank that returned while the others waited for it in a collective."""
    gone = [outcome for outcome in outcomes.values() if outcome.status == "returned"]
    return min(gone, key=lambda outcome: (_time(outcome), outcome.rank), default=None)


def conclude(case: Case) -> LaunchError:
    """Turn a failed attempt into the error to raise, with its cause attached."""
    if case.ending.verdict == "rendezvous":
        return _not_all_joined(case)
    if case.ending.verdict == "attempt":
        return _too_long(case)
    root, collateral = find_root_cause(case.outcomes)
    if root.status == "returned":
        return _left_error(case, root, collateral)
    if root.status == "killed":
        return _killed_error(case, root, collateral)
    if root.raised is not None and root.raised.exit_code is None:
        return _raised_error(case, root, root.raised, collateral)
    return _exited_error(case, root, collateral)


def _facts_of(case: Case, root: RankOutcome) -> dict[str, Any]:
    return {
        **case.facts(),
        "rank": root.rank,
        "local_rank": root.local_rank,
        "hostname": root.hostname,
        "pid": root.pid,
        "log_path": Path(root.stderr) if root.stderr else None,
    }


def _named(case: Case, root: RankOutcome) -> str:
    return f"rank {root.rank} (world_size {case.world_size})"


def _where(case: Case, root: RankOutcome) -> str:
    return f"on {root.hostname} while {_DOING[root.phase]}, {case.when}"


_DOING: Final = {
    "starting": "starting (importing the script)",
    "loading": "loading the function and its arguments",
    "joining": "joining the process group",
    "running": "running",
    "leaving": "leaving",
}


def _raised_error(
    case: Case, root: RankOutcome, raised: Raised, collateral: Sequence[RankOutcome]
) -> RankFailedError:
    kind = kind_of(raised)
    cause, fix = _ADVICE.get(kind, _ADVICE["user-error"])
    message = explain(
        f"{_named(case, root)} raised {raised.type_name} {_where(case, root)}: {raised.message}",
        cause=cause,
        fix=fix,
        details=_collateral_lines(case, collateral),
        logs=root.stderr,
    )
    error = RankRaisedError(message, **_facts_of(case, root), kind=kind)
    error.__cause__ = _original(raised)
    return error


_ADVICE: Final[dict[FailureKind, tuple[str, str]]] = {
    "user-error": (
        "the error above, at the last line of its traceback.",
        "mend what the traceback points to; the other ranks were stopped and need no change.",
    ),
    "out-of-memory": (
        "the rank asked for more memory than there was.",
        "lower the batch size, num_workers or prefetch_factor, or raise the memory limit.",
    ),
    "network": (
        "a connection of this rank's own broke; that may pass.",
        'see which address it talked to; RetryPolicy(on={"network"}) tries again.',
    ),
    "startup-network": (
        "the ranks could not be connected.",
        "check the interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) and the firewall.",
    ),
    "port": (
        "another program holds the port the script asks for.",
        "drop the hard-coded port: the launcher brings its own; or end that program.",
    ),
    "peer-lost": (
        "a peer vanished, and no rank of this launch reported why.",
        "look at the logs of all ranks, and at dmesg for the out-of-memory killer.",
    ),
    "hang": (
        "a collective timed out: a rank did not take part in it, or took part in another one.",
        "compare where the ranks are; call the same collectives, in the same order, everywhere.",
    ),
    "unpicklable": (
        "the value cannot be sent to another process.",
        "return plain data: numbers, strings, tensors; keep open files and locks in the rank.",
    ),
    "hardware": (
        "the device itself reported an error.",
        "take the host out of service and run elsewhere; trying again here will not help.",
    ),
}


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


def _killed_error(
    case: Case, root: RankOutcome, collateral: Sequence[RankOutcome]
) -> RankFailedError:
    number = -(root.exit_code or 0)
    cause, fix = _SIGNAL_ADVICE.get(number, _OTHER_SIGNAL)
    message = explain(
        f"{_named(case, root)} was killed by {root.signal_name} {_where(case, root)}.",
        cause=cause,
        fix=fix.replace("HOST", root.hostname),
        details=_tail(root) + _collateral_lines(case, collateral),
        logs=root.stderr,
    )
    return RankKilledError(message, **_facts_of(case, root), exit_code=128 + number, kind="killed")


_SIGNAL_ADVICE: Final = {
    int(signal.SIGKILL): (
        "the kernel's out-of-memory killer, a container's memory limit, or somebody's kill -9.",
        "see dmesg on HOST; lower num_workers or the batch size, or raise the memory limit.",
    ),
    int(signal.SIGSEGV): (
        "a bug in native code: an extension, a driver, mixed library versions.",
        "the Python stack at the crash is in the log below; check versions of CUDA and torch.",
    ),
    int(signal.SIGBUS): (
        "shared memory or a mapped file ran out: /dev/shm is 64 MB in most containers.",
        "enlarge it (docker run --shm-size=8g, or an emptyDir of medium Memory) or lower "
        "num_workers.",
    ),
    int(signal.SIGABRT): (
        "native code gave up: a failed assertion, or an exception nobody caught in C++.",
        "its last words are in the log below.",
    ),
}
_OTHER_SIGNAL: Final = (
    "somebody or something sent it: a scheduler, another user, the script itself.",
    "find the sender on HOST; ranks are ended by their launcher alone.",
)


def _exited_error(
    case: Case, root: RankOutcome, collateral: Sequence[RankOutcome]
) -> RankFailedError:
    code = root.exit_code or 0
    if root.raised is not None and root.raised.exit_code is not None:
        code = root.raised.exit_code
    how = "with code 0" if code == 0 else f"with code {code}"
    called = "sys.exit() or os._exit() was called in the rank"
    if root.raised is not None and root.raised.type_name == "KeyboardInterrupt":
        called = "KeyboardInterrupt was raised in the rank alone"
    if root.phase == "starting":
        called = "the script failed while the new process imported it; see its output above"
    message = explain(
        f"{_named(case, root)} exited {how} before its function returned, {_where(case, root)}.",
        cause=f"{called}.",
        fix="return from the function to end a rank well; raise an exception to end it badly.",
        details=_tail(root) + _collateral_lines(case, collateral),
        logs=root.stderr,
    )
    cls = RankLeftEarlyError if code == 0 else RankExitedError
    return cls(message, **_facts_of(case, root), exit_code=code or 1)


def _left_error(
    case: Case, root: RankOutcome, collateral: Sequence[RankOutcome]
) -> RankFailedError:
    names = ", ".join(str(outcome.rank) for outcome in collateral)
    message = explain(
        f"{_named(case, root)} returned early on {root.hostname}, {case.when}: "
        f"rank {names} still waited for it.",
        cause="the ranks had different numbers of batches or took different branches.",
        fix="give every rank the same number of steps (drop_last, DistributedSampler, "
        "torch's Join), or let all of them leave the loop together.",
        details=_collateral_lines(case, collateral),
        logs=root.stderr,
    )
    return RankLeftEarlyError(message, **_facts_of(case, root))


def _not_all_joined(case: Case) -> LaunchError:
    missing = [
        outcome for outcome in case.outcomes.values() if outcome.phase not in ("running", "leaving")
    ]
    names = ", ".join(str(outcome.rank) for outcome in missing)
    where = [f"rank {outcome.rank} was {_DOING[outcome.phase]}" for outcome in missing]
    message = explain(
        f"rank {names} (world_size {case.world_size}) did not join in time, {case.when}.",
        cause="slow imports, work at the top of the script, or a rank that hangs before it joins.",
        fix="move heavy work below the main guard or into the function, or raise "
        "timeouts.rendezvous.",
        details=[*where, *_stack_lines(missing)],
        logs=case.run_dir,
    )
    return RendezvousTimeoutError(
        message,
        **case.facts(),
        waited_s=case.ending.waited_s,
        missing_ranks=[outcome.rank for outcome in missing],
        stacks={outcome.rank: outcome.stack for outcome in case.outcomes.values()},
        kind="startup-network",
    )


def _too_long(case: Case) -> LaunchError:
    running = [
        outcome for outcome in case.outcomes.values() if outcome.status in ("running", "stopped")
    ]
    names = ", ".join(str(outcome.rank) for outcome in running)
    message = explain(
        f"rank {names} (world_size {case.world_size}) still ran at the end of "
        f"timeouts.attempt, {case.when}.",
        cause="the work takes longer than the deadline, or a rank hangs.",
        fix="raise timeouts.attempt if the ranks were at work; else look where they were.",
        details=_stack_lines(running),
        logs=case.run_dir,
    )
    return AttemptTimeoutError(
        message,
        **case.facts(),
        waited_s=case.ending.waited_s,
        missing_ranks=[outcome.rank for outcome in running],
        stacks={outcome.rank: outcome.stack for outcome in case.outcomes.values()},
    )


def _collateral_lines(case: Case, collateral: Sequence[RankOutcome]) -> list[str]:
    lines = []
    for outcome in collateral:
        raised = outcome.raised
        how = outcome.status if raised is None else f"{raised.type_name}: {raised.message}"
        lines.append(f"rank {outcome.rank} only lost it: {how.splitlines()[0][:160]}")
    stopped = [outcome for outcome in case.outcomes.values() if outcome.status == "stopped"]
    if stopped:
        names = ", ".join(str(outcome.rank) for outcome in stopped)
        lines.append(f"rank {names}: stopped by the launcher, nothing wrong there")
    return lines


def _stack_lines(outcomes: Sequence[RankOutcome]) -> list[str]:
    return [f"rank {outcome.rank} was at {outcome.stack}" for outcome in outcomes if outcome.stack]


def _tail(root: RankOutcome) -> list[str]:
    """Show the last lines a rank wrote to stderr, when nothing else says why it ended."""
    if root.stderr is None:
        return []
    try:
        text = Path(root.stderr).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    lines = text.splitlines()[-_TAIL_LINES:]
    return ["last lines of its stderr:", *(f"| {line[:200]}" for line in lines)] if lines else []
