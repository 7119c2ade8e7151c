"""The error of a failed attempt: its class, its explanation, its facts, its cause."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from ddpsafe import _gpus
from ddpsafe._config.durations import show_duration
from ddpsafe._errors import (
    AttemptTimeoutError,
    BarrierTimeoutError,
    CollectiveTimeoutError,
    Explanation,
    LaunchError,
    LaunchTimeoutError,
    ProgressTimeoutError,
    RankExitedError,
    RankFailedError,
    RankKilledError,
    RankLeftEarlyError,
    RankRaisedError,
    RendezvousTimeoutError,
    name_cells,
    ranks_text,
)
from ddpsafe._launcher.diagnosis import messages
from ddpsafe._launcher.diagnosis.evidence import is_endless_recursion
from ddpsafe._launcher.diagnosis.failure_kind import find_topic, kind_of
from ddpsafe._launcher.diagnosis.messages import (
    last_output,
    last_traceback,
    others,
    positions,
    where,
)
from ddpsafe._launcher.diagnosis.root_cause import (
    find_root_cause,
    find_stuck_on_gpu,
    newest_collective,
)
from ddpsafe._wire import payload
from ddpsafe._wire.exceptions import clip
from ddpsafe._wire.spec import unreported_mark

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpsafe._config import RetryPolicy, Timeouts
    from ddpsafe._errors import FailureKind
    from ddpsafe._launcher.diagnosis.root_cause import RootCause, RuleName
    from ddpsafe._launcher.diagnosis.wait_graph import Deadlock
    from ddpsafe._launcher.watch.supervisor import Ending
    from ddpsafe._wire.messages import Raised, RankOutcome

_MAX_MESSAGE: Final = 1_000
_LOG_MARGIN_S: Final = 60.0
"""The kernel's log is read from so long before the attempt: a GPU may fail before a rank notices."""
_MAX_LINE: Final = 400
_UNKNOWN_CODE: Final = 255
"""What `multiprocessing` says of a process whose fork server has gone."""

_HUNG: Final[dict[RuleName, str]] = {
    "suspended": "is stopped",
    "behind": "is behind",
    "elsewhere": "was not in the collective of the others",
    "mismatch": "entered another collective than the others",
    "in-rpc": "was executing a call of another rank",
    "unknown": "timed out in a collective",
    "stuck-on-gpu": "waits like all other ranks",
}

DOING: Final = {
    "starting": "starting (importing the script)",
    "loading": "loading the function and its arguments",
    "joining": "joining the process group",
    "running": "running",
    "leaving": "leaving",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """What is known about an attempt that did not end well, in the forms that errors need.

    Attributes:
        outcomes: What became of each rank, by rank.
        ending: Why the watch ended.
        attempt: The attempt, counted from 1.
        retry: Which failures get another attempt, and how many.
        run_dir: Where the logs are.
        oom_kills: Processes that the kernel killed for memory during the attempt.
        timeouts: The deadlines it had.
        nnodes: Number of nodes.
    """

    outcomes: Mapping[int, RankOutcome]
    ending: Ending
    attempt: int
    retry: RetryPolicy
    run_dir: Path
    oom_kills: int
    timeouts: Timeouts
    nnodes: int = 1

    def when(self, kind: FailureKind) -> str:
        """Say at which attempt and after how long it ended.

        The number of attempts is told only where a failure of that kind gets more than one: of one
        that is never retried, "attempt 1 of 3" reads as if two more came.
        """
        counts = self.retry.attempts > 1 and (self.attempt > 1 or kind in self.retry.on)
        number = f"attempt {self.attempt}" + (f" of {self.retry.attempts}" if counts else "")
        return f"{number}, after {self.ending.waited_s:.1f} s"

    def limit(self, field: str) -> str:
        """Name a timeout with its value, as it is written in a configuration."""
        value = getattr(self.timeouts, field)
        if value == "auto":
            longest = self.ending.progress
            known = "" if longest is None else f": {show_duration(_rounded(longest))}, as learned"
            return f"timeouts.{field} (auto{known})"
        return f"timeouts.{field} ({show_duration(value)})"

    def name(self, outcome: RankOutcome) -> str:
        """Name a rank with the number of ranks, and with its node if there are several."""
        size = f"world_size {len(self.outcomes)}"
        if self.nnodes == 1:
            return f"rank {outcome.rank} ({size})"
        at = f"node {outcome.node_rank} {outcome.hostname!r}, local rank {outcome.local_rank}"
        return f"rank {outcome.rank} ({at}, {size})"

    def place(self, outcome: RankOutcome, kind: FailureKind) -> str:
        """Say where a rank was, what it did, and when it was over."""
        return f"on {outcome.hostname} while {DOING[outcome.phase]}, {self.when(kind)}"

    def log_of(self, outcome: RankOutcome) -> Path | str:
        """Return where to read on: what the rank wrote, or the report on all ranks if it is silent."""
        if outcome.said is not None:  # on another host
            return f"{outcome.hostname}:{outcome.stderr or self.run_dir}"
        log = Path(outcome.stderr) if outcome.stderr else None
        return log if log is not None and log.exists() and log.stat().st_size else self.run_dir

    def facts(self) -> dict[str, Any]:
        """Return what every `LaunchError` carries."""
        return {
            "attempt": self.attempt,
            "attempts": self.retry.attempts,
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


def conclude(ended: EndedAttempt) -> LaunchError:
    """Turn a failed attempt into the error to raise, with its cause attached."""
    if ended.ending.reason == "rendezvous":
        return _not_all_joined(ended)
    cause = find_root_cause(ended.outcomes, is_failing=ended.ending.reason == "failing")
    if ended.ending.reason in ("attempt", "progress"):
        return _too_long(ended, cause)
    if cause.rule.name in ("elsewhere", "unknown") and _find_early(ended):
        return _not_all_joined(ended)  # a rank's own clock ran out a moment before ours
    proof = ended.ending.proof
    if proof is not None and cause.rule.blames != "end":
        return _proved(ended, cause, proof)
    if cause.rule.blames == "wait" and not _lost_a_peer_only(cause):
        return _kept_waiting(ended, cause)
    return _returned(ended, cause) if cause.rule.blames == "return" else _broke(ended, cause)


def unloadable(ended: EndedAttempt, rank: int, exc: Exception) -> RankFailedError:
    """Return the error of an attempt that ended well, but for a value that cannot be loaded."""
    root = ended.outcomes[rank]
    message = Explanation(
        f"what {ended.name(root)} returned on {root.hostname}, {ended.when('unpicklable')}, "
        "cannot be loaded here: "
        f"{type(exc).__name__}: {clip(str(exc), _MAX_MESSAGE)}",
        cause="it holds something that exists in the rank only, such as a process group.",
        fix="return plain data: numbers, strings, tensors, state dicts.",
        logs=ended.run_dir,
    )
    return RankFailedError(message, **ended.rank_facts(root), kind="unpicklable")


def _broke(ended: EndedAttempt, cause: RootCause) -> LaunchError:
    if cause.root.status == "killed" or cause.root.native is not None:
        return _killed(ended, cause)
    if cause.root.raised is not None and cause.root.raised.exit_code is None:
        raised = cause.root.raised
        # No rank is hanging, so this exception counts even though a peer's failure triggered it.
        return _raised(ended, cause, replace(raised, origin="own") if raised.is_wrapped else raised)
    return _exited(ended, cause)


def _lost_a_peer_only(cause: RootCause) -> bool:
    """Tell whether all that is known is that a peer vanished; a timeout tells more."""
    return cause.rule.name == "unknown" and cause.root.origin != "timeout"


def _raised(ended: EndedAttempt, cause: RootCause, raised: Raised) -> LaunchError:
    root, kind = cause.root, kind_of(raised)
    topic = find_topic(raised)
    likely, fix = messages.BY_KIND.get(kind, messages.BY_KIND["user-error"])
    if topic is not None:
        likely, fix = messages.BY_TOPIC[topic]
    text = raised.message
    if raised.explanation is not None:  # an error of ddpsafe's own brings its advice along
        text = "\n".join([raised.explanation.what, *raised.explanation.details])
        likely, fix = raised.explanation.cause or likely, raised.explanation.fix or fix
    at = [f"at {raised.where}"] if raised.where else []
    if not raised.final and root.stack and root.in_collective is False:
        at.append(f"still handled it at {root.stack}, in an except or a finally")
    at += [raised.dead_worker] if raised.dead_worker else []
    at += [f"held: {raised.held}"] if raised.held else []
    at += _gpus.read_errors(ended.ending.waited_s + _LOG_MARGIN_S) if kind == "hardware" else []
    at += (
        [f"on top of it, in an except or a finally: {raised.hidden_by}"] if raised.hidden_by else []
    )
    said = f": {clip(text, _MAX_MESSAGE)}" if text else "."
    message = Explanation(
        f"{ended.name(root)} raised {raised.type_name} {ended.place(root, kind)}{said}",
        cause=likely,
        fix=fix,
        details=[*at, *others(ended.outcomes.values(), cause)],
        logs=ended.log_of(root),
    )
    error = RankRaisedError(message, **ended.rank_facts(root), kind=kind)
    error.__cause__ = original_of(raised)
    return error


def _killed(ended: EndedAttempt, cause: RootCause) -> LaunchError:
    root = cause.root
    number = -(root.exit_code or 0)
    kind: FailureKind = "killed"
    likely, fix = messages.BY_SIGNAL.get(number, messages.OTHER_SIGNAL)
    if number == signal.SIGKILL and ended.oom_kills:
        kind, (likely, fix) = "out-of-memory", messages.KILLED_FOR_MEMORY
    if is_endless_recursion(root.error_text()):
        likely, fix = messages.RECURSION
    how = f"killed by {root.signal_name}"
    if root.native is not None:
        how, number = f"ended by native code ({root.native.text[:_MAX_LINE]})", signal.SIGABRT
        if root.native.kind is not None:
            kind = root.native.kind
            likely, fix = messages.BY_KIND[kind]
            if kind == "user-error":
                likely, fix = messages.ON_THE_GPU
    message = Explanation(
        f"{ended.name(root)} was {how} {ended.place(root, kind)}.",
        cause=likely,
        fix=fix.format(host=root.hostname),
        details=[
            *last_output(root),
            *others(ended.outcomes.values(), cause),
            *_shapes(ended, number),
        ],
        logs=ended.log_of(root),
    )
    return RankKilledError(message, **ended.rank_facts(root), exit_code=128 + number, kind=kind)


def _shapes(ended: EndedAttempt, signum: int) -> list[str]:
    """Show the collectives of the others where gloo may have aborted over their shapes."""
    if signum != signal.SIGABRT:
        return []
    return positions([out for out in ended.outcomes.values() if out.position is not None])


def _exited(ended: EndedAttempt, cause: RootCause) -> LaunchError:
    root, raised = cause.root, cause.root.raised
    code = root.exit_code or 0
    called = "sys.exit() or os._exit() was called in the rank"
    fix = "return from the function to end a rank with success; raise an exception to report a failure."
    if raised is not None and raised.exit_code is not None:
        code = raised.exit_code
        called = f"{raised.type_name} was raised at {raised.where or 'an unknown line'}"
        if not raised.message.isdigit() and raised.message:
            called += f": {clip(raised.message, _MAX_MESSAGE)}"
        if raised.handled:
            called += f", while it handled {raised.handled}"
            fix = "fix that line; let the exception through, and its traceback is shown."
    elif root.exit_code is None:
        return _vanished(ended, cause)
    elif root.phase == "starting":
        called = "the script failed while the new process imported it; its output stands above"
        fix = "fix what the traceback above says; a rank imports the script from its first line."
    elif root.stderr is not None and unreported_mark(root.stderr).exists():
        what = "the error below" if code else "the function returned"
        called = f"{what}; the script had closed the pipe on which it is reported (os.closerange?)"
        fix = (
            "close only what the script has opened, and fix the line of the error if there is one."
        )
    elif code == _UNKNOWN_CODE:
        called += ", or Python's fork server was killed, and with it the exit status of its ranks"
    likely = f"{called}."
    if code == 128 + signal.SIGINT and raised is not None and not raised.handled:
        likely, fix = messages.INTERRUPTED
        at = f" at {raised.where}" if raised.where else ""
        likely, fix = likely.format(at=at), fix.format(pid=root.pid, host=root.hostname)
    message = Explanation(
        f"{ended.name(root)} exited with code {code} before its function returned, "
        f"{ended.place(root, 'user-error')}.",
        cause=likely,
        fix=fix,
        details=[*last_output(root), *others(ended.outcomes.values(), cause)],
        logs=ended.log_of(root),
    )
    cls = RankLeftEarlyError if code == 0 else RankExitedError
    error = cls(message, **ended.rank_facts(root), exit_code=code or 1)
    if raised is not None and raised.handled:
        error.__cause__ = original_of(raised)
    return error


def _vanished(ended: EndedAttempt, cause: RootCause) -> LaunchError:
    root = cause.root
    message = Explanation(
        f"{ended.name(root)} ended before its function returned, {ended.place(root, 'user-error')}; "
        "its exit status is unknown.",
        cause="another part of the launching program, a handler of SIGCHLD or os.wait(), took its "
        "exit status.",
        fix="let that part wait for its own children only: os.waitpid(pid, …).",
        details=[*last_output(root), *others(ended.outcomes.values(), cause)],
        logs=ended.log_of(root),
    )
    return RankExitedError(message, **ended.rank_facts(root), exit_code=1)


def _returned(ended: EndedAttempt, cause: RootCause) -> LaunchError:
    """Return the error of a rank that returned while others waited for it."""
    root = cause.root
    waiting = [outcome.rank for outcome in ended.outcomes.values() if outcome.status != "returned"]
    likely, fix = messages.BY_RULE[cause.rule.name]
    if root.exited_at:
        likely = f"sys.exit(0) was called at {root.exited_at} while the other ranks had work left."
    message = Explanation(
        f"{ended.name(root)} returned early on {root.hostname}, {ended.when('user-error')}: "
        f"{ranks_text(waiting)} {_were(waiting)} still waiting for it.",
        cause=likely,
        fix=fix,
        details=positions(ended.outcomes.values()),
        logs=ended.run_dir,
    )
    return RankLeftEarlyError(message, **ended.rank_facts(root), kind="user-error")


def _kept_waiting(ended: EndedAttempt, cause: RootCause) -> LaunchError:
    """Return the error of a wait that timed out, or will: it names whom the others waited for."""
    cls = _class_of_wait(ended)
    if cause.rule.name == "unknown" and (told := _barrier_explanations(ended)):
        return _not_all_came(ended, told)
    root = cause.root
    likely, fix = _advice_on_hang(cause)
    if cause.rule.name == "stuck-on-gpu":
        return _stuck_on_gpu(ended, cause, cls)
    at = f" at {where(root)}" if where(root) else ""
    waiting, goal = cause.evidence.find_who_waited(root)
    did = _HUNG.get(cause.rule.name, "")
    if cause.rule.name == "unknown" and root.sends_or_receives:
        did = f"timed out in {root.sends_or_receives}"
    if cause.rule.name == "late":
        delay_s = next(delay_s for out, delay_s in cause.evidence.late if out is root)
        did = f"came {delay_s:.1f} s after the others to {newest_collective(root)}"
    awaited = ""
    if goal is not None:
        awaited = f"; {ranks_text(waiting)} {_were(waiting)} waiting for it in {goal}"
    kind: FailureKind = _kind_of_join(ended) if cls is RendezvousTimeoutError else "hang"
    message = Explanation(
        f"{ended.name(root)} {did}{at}, on {root.hostname}, {ended.when(kind)}{awaited}.",
        cause=likely.format(host=root.hostname),
        fix=fix.format(host=root.hostname, pid=root.pid, setting=cls.setting),
        details=[*positions(ended.outcomes.values()), *last_traceback(root)],
        logs=ended.run_dir,
    )
    missing = [] if cause.rule.name == "unknown" else [root]
    facts = ended.timeout_facts(missing, ended.ending.waited_s)
    return cls(message, **facts, kind=kind)


def _proved(ended: EndedAttempt, cause: RootCause, proof: Deadlock) -> LaunchError:
    """Return the error of ranks that wait for ever: the proof stands before where the ranks were."""
    if proof.reason != "cycle":
        conclude_wait = _returned if cause.rule.blames == "return" else _kept_waiting
        error = conclude_wait(ended, cause)
        told = error.explanation
        error.explanation = replace(told, details=(*_told(proof), *told.details))
        return error
    likely, fix = messages.IN_A_CYCLE
    message = Explanation(
        f"{ranks_text(proof.ranks)} (world_size {len(ended.outcomes)}) wait for each other in "
        f"collectives of different groups, {ended.when('hang')}.",
        cause=likely,
        fix=fix,
        details=[*_told(proof), *positions(ended.outcomes.values())],
        logs=ended.run_dir,
    )
    missing = [ended.outcomes[rank] for rank in proof.ranks]
    facts = ended.timeout_facts(missing, ended.ending.waited_s)
    return CollectiveTimeoutError(message, **facts, kind="hang")


def _told(proof: Deadlock) -> list[str]:
    return [
        "this is a deadlock, so ddpsafe did not wait for a timeout:",
        *(f"| {each}" for each in proof.lines()),
    ]


def _were(ranks: list[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _stuck_on_gpu(
    ended: EndedAttempt, cause: RootCause, cls: type[LaunchTimeoutError]
) -> LaunchError:
    """Return the error of a collective that all its ranks have queued, and that does not end."""
    stuck = find_stuck_on_gpu(cause.evidence)
    at = {out.rank: each for out, each in stuck}  # they may have queued another group's since
    started = [rank for rank, each in at.items() if each.state == "started"]
    queued = [rank for rank in at if rank not in started]
    details = [
        *positions(ended.outcomes.values()),
        *_gpus.read_errors(ended.ending.waited_s + _LOG_MARGIN_S),
    ]
    if started and queued:  # told with TORCH_NCCL_ENABLE_TIMING=1 only
        details = [f"on the GPU of {ranks_text(queued)} it has not even started", *details]
    likely, fix = messages.BY_RULE["stuck-on-gpu"]
    message = Explanation(
        f"{ranks_text(at)} (world_size {len(ended.outcomes)}) all wait in {stuck[0][1]}, which does not end, "
        f"{ended.when('hang')}.",
        cause=likely,
        fix=fix.format(host=stuck[0][0].hostname),
        details=details,
        logs=ended.run_dir,
    )
    return cls(message, **ended.timeout_facts([], ended.ending.waited_s), kind="hang")


def _barrier_explanations(ended: EndedAttempt) -> list[Explanation]:
    """Return what the ranks report that waited at one of ddpsafe's barriers without success."""
    waited = [
        out.raised for out in ended.outcomes.values() if _has_timed_out(out, BarrierTimeoutError)
    ]
    return [raised.explanation for raised in waited if raised and raised.explanation]


def _not_all_came(ended: EndedAttempt, told: list[Explanation]) -> LaunchError:
    """Say at which barriers the ranks waited; none of them is known to hang."""
    first, *others = told
    message = Explanation(
        f"{first.what} ({ended.when('hang')})",
        cause=first.cause,
        fix=first.fix,
        details=[
            *(each.what for each in others),
            *positions(ended.outcomes.values()),
        ],
        logs=ended.run_dir,
    )
    away = [out for out in ended.outcomes.values() if not _has_timed_out(out, BarrierTimeoutError)]
    facts = ended.timeout_facts(away, ended.ending.waited_s)
    return BarrierTimeoutError(message, **facts, kind="hang")


def _has_timed_out(outcome: RankOutcome, cls: type[LaunchTimeoutError]) -> bool:
    """Tell whether a rank raised that error of ddpsafe's."""
    return outcome.raised is not None and outcome.raised.setting == cls.setting


def _advice_on_hang(cause: RootCause) -> messages.Advice:
    root, rule = cause.root, cause.rule.name
    outlived_sigkill = root.status == "stopped" and root.ended_ns is None
    in_kernel = root.state == psutil.STATUS_DISK_SLEEP and outlived_sigkill
    return messages.IN_KERNEL if in_kernel else messages.BY_RULE.get(rule, messages.HANDLING)


def _class_of_wait(ended: EndedAttempt) -> type[LaunchTimeoutError]:
    """Return the class of the wait that timed out: a barrier and a rendezvous have their own."""
    for cls in (RendezvousTimeoutError, BarrierTimeoutError):
        if any(_has_timed_out(outcome, cls) for outcome in ended.outcomes.values()):
            return cls
    return CollectiveTimeoutError


def _not_all_joined(ended: EndedAttempt) -> LaunchError:
    """Return the error of ranks that never joined."""
    early = _find_early(ended)
    # Ranks that have come wait in "joining" for the others: they are not the missing ones.
    missing = early or [out for out in ended.outcomes.values() if out.phase == "joining"]
    names = ranks_text(outcome.rank for outcome in missing)
    message = Explanation(
        f"{names} (world_size {len(ended.outcomes)}) did not join within "
        f"{ended.limit('rendezvous')}, {ended.when(_kind_of_join(ended))}.",
        cause="slow imports, work at the top of the script, or a rank that hangs before it joins.",
        fix="move heavy work below the main guard or into the function, or raise "
        "timeouts.rendezvous.",
        details=[f"rank {out.rank} was {DOING[out.phase]} {where(out)}" for out in missing],
        logs=ended.run_dir,
    )
    facts = ended.timeout_facts(missing, ended.ending.waited_s)
    return RendezvousTimeoutError(message, **facts, kind=_kind_of_join(ended))


def _kind_of_join(ended: EndedAttempt) -> FailureKind:
    """Tell a start that failed from a function that has begun, which must not run twice unasked."""
    begun = any(outcome.phase in ("running", "leaving") for outcome in ended.outcomes.values())
    return "hang" if begun else "startup-network"


def _find_early(ended: EndedAttempt) -> list[RankOutcome]:
    """Return the ranks that had not come as far as to join."""
    return [out for out in ended.outcomes.values() if out.phase in ("starting", "loading")]


def _too_long(ended: EndedAttempt, cause: RootCause) -> LaunchError:
    """Return the error of an attempt that took too long, or made no step for too long."""
    running = [
        outcome for outcome in ended.outcomes.values() if outcome.status in ("running", "stopped")
    ]
    blames_one = cause.rule.name not in ("mismatch", "unknown", "stuck-on-gpu")
    accused = cause.root if blames_one else None
    missing = [accused] if accused is not None else (running or [cause.root])
    names = ranks_text(outcome.rank for outcome in missing)
    setting = ended.ending.reason
    did = {"attempt": "did not end within", "progress": "made no step within"}[setting]
    likely, fix = (
        _advice_on_hang(cause)
        if accused
        else (
            "the work takes longer than the deadline, or a rank hangs.",
            f"see where the ranks were; raise timeouts.{setting} if they were at work.",
        )
    )
    message = Explanation(
        f"{names} (world_size {len(ended.outcomes)}) {did} {ended.limit(setting)}, "
        f"{ended.when('hang')}.",
        cause=likely.format(host=missing[0].hostname),
        fix=fix.format(host=missing[0].hostname, pid=missing[0].pid, setting=setting),
        details=positions(ended.outcomes.values()),
        logs=ended.run_dir,
    )
    cls = AttemptTimeoutError if setting == "attempt" else ProgressTimeoutError
    return cls(message, **ended.timeout_facts(missing, ended.ending.waited_s))


def _rounded(value: timedelta) -> timedelta:
    return timedelta(seconds=round(value.total_seconds(), 1))


class RemoteTraceback(Exception):  # noqa: N818 - shown as text above the error it belongs to
    """The traceback of another process, as text."""

    __module__ = "ddpsafe"

    def __str__(self) -> str:
        """Show it as Python shows a traceback."""
        return name_cells(f"\n{self.args[0]}")


def original_of(raised: Raised) -> BaseException:
    """Return the rank's own exception where it could travel, its traceback above it."""
    remote = RemoteTraceback(raised.traceback)
    if raised.payload is None:
        return remote
    try:
        exc = payload.loads(raised.payload)
    except BaseException:  # noqa: BLE001 - a user's __reduce__ may raise anything, SystemExit too
        return remote
    if not isinstance(exc, BaseException):
        return remote
    exc.__cause__ = remote
    return exc
