"""Outcomes to one error: its class, its words, its facts, its cause."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddpsafe._errors import (
    Explanation,
    LaunchError,
    RankExitedError,
    RankFailedError,
    RankKilledError,
    RankLeftEarlyError,
    RankRaisedError,
)
from ddpsafe._launcher import advice, hangs
from ddpsafe._launcher.causes import Cause, find_cause
from ddpsafe._launcher.logs import read_log
from ddpsafe._launcher.originals import original_of
from ddpsafe._launcher.symptoms import kind_of, wants_busy_port
from ddpsafe._launcher.wording import last_words, others, positions
from ddpsafe._wire.channel import PIPE_LOST
from ddpsafe._wire.exceptions import clip

if TYPE_CHECKING:
    from ddpsafe._errors import FailureKind
    from ddpsafe._launcher.case import Case
    from ddpsafe._wire.outcome import Raised

_MAX_MESSAGE: Final = 1_000
_UNKNOWN_CODE: Final = 255
"""What `multiprocessing` says of a process whose fork server has gone."""


def conclude(case: Case) -> LaunchError:
    """Turn a failed attempt into the error to raise, with its cause attached."""
    if case.ending.verdict == "rendezvous":
        return hangs.not_all_joined(case)
    cause = find_cause(case.outcomes, is_failing=case.ending.verdict == "failing")
    if case.ending.verdict in ("attempt", "progress"):
        return hangs.too_long(case, cause)
    if cause.sort in ("elsewhere", "unknown") and hangs.find_early(case):
        return hangs.not_all_joined(case)  # a rank's own clock ran out a moment before ours
    if cause.sort == "left":
        return hangs.left(case, cause)
    if cause.sort != "broke" and (cause.sort != "unknown" or _timed_out(cause)):
        return hangs.hung(case, cause)
    return _broke(case, cause)


def unloadable(case: Case, rank: int, exc: Exception) -> RankFailedError:
    """Return the error of an attempt that ended well, but for a value that cannot be loaded."""
    root = case.outcomes[rank]
    message = Explanation(
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
        raised = cause.root.raised
        # Nobody hangs: that an echo led to an exception of the rank's own is no matter any more.
        return _raised(case, cause, replace(raised, origin="own") if raised.is_wrapped else raised)
    return _exited(case, cause)


def _timed_out(cause: Cause) -> bool:
    return cause.root.raised is not None and cause.root.raised.origin == "timeout"


def _raised(case: Case, cause: Cause, raised: Raised) -> LaunchError:
    root, kind = cause.root, kind_of(raised)
    topic: FailureKind = "port" if wants_busy_port(raised) else kind
    likely, fix = advice.BY_KIND.get(topic, advice.BY_KIND["user-error"])
    text = raised.message
    if raised.explanation is not None:  # an error of ddpsafe's own brings its advice along
        text = "\n".join([raised.explanation.what, *raised.explanation.details])
        likely, fix = raised.explanation.cause or likely, raised.explanation.fix or fix
    at = [f"at {raised.where}"] if raised.where else []
    at += [f"held: {raised.held}"] if raised.held else []
    at += (
        [f"on top of it, in an except or a finally: {raised.hidden_by}"] if raised.hidden_by else []
    )
    said = f": {clip(text, _MAX_MESSAGE)}" if text else "."
    message = Explanation(
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
    message = Explanation(
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
    fix = "return from the function to end a rank well; raise an exception to end it badly."
    if raised is not None and raised.exit_code is not None:
        code = raised.exit_code
        called = f"{raised.type_name} was raised at {raised.where or 'an unknown line'}"
        if not raised.message.isdigit() and raised.message:
            called += f": {clip(raised.message, _MAX_MESSAGE)}"
        if raised.handled:
            called += f", while it handled {raised.handled}"
            fix = "mend that line; let the exception through, and its traceback is shown."
    elif root.exit_code is None:
        return _vanished(case, cause)
    elif root.phase == "starting":
        called = "the script failed while the new process imported it; its output stands above"
    elif root.stderr is not None and PIPE_LOST in read_log(root.stderr):
        what = "the error below" if code else "the function returned"
        called = f"{what}; the script had closed the pipe on which it is reported (os.closerange?)"
        fix = "close only what the script has opened; mend the line of the error, if there is one."
    elif code == _UNKNOWN_CODE:
        called += ", or Python's fork server, which alone knows how its ranks end, was killed"
    message = Explanation(
        f"{case.name(root)} exited with code {code} before its function returned, "
        f"{case.place(root)}.",
        cause=f"{called}.",
        fix=fix,
        details=[*last_words(root), *others(case.outcomes.values(), cause)],
        logs=case.log_of(root),
    )
    cls = RankLeftEarlyError if code == 0 else RankExitedError
    error = cls(message, **case.rank_facts(root), exit_code=code or 1)
    if raised is not None and raised.handled:
        error.__cause__ = original_of(raised)
    return error


def _vanished(case: Case, cause: Cause) -> LaunchError:
    root = cause.root
    message = Explanation(
        f"{case.name(root)} ended before its function returned, {case.place(root)}; nobody knows how.",
        cause="another part of the launching program, a handler of SIGCHLD or os.wait(), took its "
        "exit status.",
        fix="let that part wait for its own children only: os.waitpid(pid, …).",
        details=[*last_words(root), *others(case.outcomes.values(), cause)],
        logs=case.log_of(root),
    )
    return RankExitedError(message, **case.rank_facts(root), exit_code=1)
