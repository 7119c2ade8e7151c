"""Which rank is blamed, as a table: the outcome of each rank -> rank, rule, error class and kind.

Each row lists the ranks of a job in order. Its exceptions are really raised and read as a rank reads
them; their texts are those of torch, gloo and the system in real runs.
"""

from __future__ import annotations

import errno
import multiprocessing.synchronize
import pickle
import re
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

import ddpsafe
from ddpsafe._config import RetryPolicy, Timeouts
from ddpsafe._errors import DDPSafeError, Explanation, FailureKind, MismatchError
from ddpsafe._launcher.diagnosis.attempt_error import (
    EndedAttempt,
    Ending,
    EndReason,
    handled_errors,
    make_error,
    original_of,
)
from ddpsafe._launcher.diagnosis.rank_readings import (
    is_endless_recursion,
    read_crash,
    read_rpc,
    read_stack,
    with_printed_end,
)
from ddpsafe._launcher.diagnosis.root_cause import CONCLUSIONS, RULES, find_root_cause
from ddpsafe._launcher.diagnosis.wait_graph import Deadlock, Wait
from ddpsafe._launcher.processes.rank_process import StackReading
from ddpsafe._wire import payload
from ddpsafe._wire.exception_facts import PointToPoint, note_wait
from ddpsafe._wire.foreign_texts import find_printed_error
from ddpsafe._wire.messages import Collective, NativeError, Position, Raised, RankOutcome
from ddpsafe._wire.payload import CannotTravelError
from ddpsafe.checkpoint.errors import NoSpaceError
from ddpsafe.data.errors import WorkerDiedError

Facts = dict[str, Any]
Raiser = Callable[[], None]

_MS: Final = 1_000_000
_STARTED_NS: Final = 1_790_000_000_000_000_000


# ---- exceptions that ranks raise ----


class DownloadError(RuntimeError):
    """An error of a library that the user calls."""


class OddError(Exception):
    """An error whose class uses `__cause__` for a text."""

    __cause__ = "quota"  # type: ignore[assignment]


def caught(raiser: Raiser) -> BaseException:
    """Return what a function raises, with its traceback."""
    try:
        raiser()
    except BaseException as exc:  # noqa: BLE001 - SystemExit too
        return exc
    pytest.fail("it raised nothing")


def own() -> None:
    """Raise an error of the user's code."""
    message = "label 7 is out of range"
    raise ValueError(message)


def other() -> None:
    """Raise another error in another place."""
    raise KeyError("label")


def lost_a_peer() -> None:
    """Raise gloo's error for a closed connection."""
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] "
    raise RuntimeError(text + "Connection closed by peer [127.0.0.1]:35341")


def timed_out() -> None:
    """Raise gloo's error for a timeout."""
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] "
    raise RuntimeError(text + "Timed out waiting 1500ms for recv operation to complete")


def closed_by_timeout() -> None:
    """Raise gloo's error for a connection that the timeout of another operation closed."""
    text = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
    raise RuntimeError(text + "Application timeout caused pair closure")


def differs(rank: int, call: str, theirs: str = "SequenceNumber=0OpType=REDUCE") -> Raiser:
    """Return a function that raises torch's error for a call that another rank does not make."""
    text = (
        f"Detected mismatch between collectives on ranks. Rank {rank} is running collective: "
        f"CollectiveFingerPrint({call}), but Rank 1 is running collective: CollectiveFingerPrint({theirs})."
    )
    return raising(RuntimeError(text))


ALL_REDUCE: Final = "SequenceNumber=3, OpType=ALLREDUCE, TensorShape=[5], TensorDtypes=Float"
A_BARRIER: Final = "SequenceNumber=3OpType=BARRIER"


IN_BARRIER: Final = (
    "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
    "Please check rank 0 logs for faulty rank.\n Original exception: "
)


def in_monitored_barrier(rank: int, *missed: int, lost: bool = False) -> Raiser:
    """Return a function that raises the error of torch's monitored barrier in a rank of its group."""
    text = IN_BARRIER.replace("Rank 1", f"Rank {rank}")
    if missed:
        named = f"Rank{'s' if len(missed) > 1 else ''} {', '.join(map(str, missed))}"
        text = (
            f"[Rank 0]: {named} failed to pass monitoredBarrier in 6000 ms\n Original exception: "
        )
    how = "Connection closed by peer [::1]:9" if lost else "Timed out waiting 6000ms for recv"
    code = "def monitored_barrier(group=None):\n    raise RuntimeError(text)\n"
    scope: dict[str, Any] = {"text": f"{text}\n[/gloo/pair.cc:553] {how}"}
    exec(compile(code, "/x/torch/distributed/distributed_c10d.py", "exec"), scope)
    return lambda: scope["monitored_barrier"](None)


def timed_out_in(call: str, peer: int) -> Raiser:
    """Return a function that raises a timeout from torch's send or receive."""
    name = {"recv": "src", "send": "dst"}[call]
    code = f"def {call}(tensor, {name}):\n    raised()\n"
    scope: dict[str, Any] = {"raised": timed_out}
    exec(compile(code, "/x/torch/distributed/distributed_c10d.py", "exec"), scope)
    return lambda: scope[call](None, peer)


def waits_for_a_file() -> None:
    """Raise the timeout of a file store while a group is made."""
    code = "def new_group():\n    raise RuntimeError('Wait timeout')\n"
    scope: dict[str, Any] = {}
    exec(compile(code, "/x/torch/distributed/distributed_c10d.py", "exec"), scope)
    scope["new_group"]()


def rpc_eof() -> None:
    """Raise RPC's error for a callee whose process ended."""
    place = "tensorpipe/transport/shm/connection_impl.cc:259"
    raise RuntimeError(f"eof (this error originated at {place})")


def rpc_timed_out() -> None:
    """Raise RPC's error for a callee that does not answer."""
    text = (
        "RPCErr:1:RPC ran for more than set timeout (4000 ms) and will now be marked with an error"
    )
    raise RuntimeError(text)


def raising(error: BaseException) -> Raiser:
    """Return a function that raises exactly this error."""

    def raiser() -> None:
        raise error

    return raiser


def wrapping(inner: Raiser, outer: Raiser) -> Raiser:
    """Return a function that raises `outer` from what `inner` raises."""

    def raiser() -> None:
        try:
            inner()
        except BaseException as exc:
            raise caught(outer) from exc

    return raiser


def hiding(inner: Raiser, outer: Raiser) -> Raiser:
    """Return a function whose `finally` raises on top of what `inner` raises."""

    def raiser() -> None:
        try:
            inner()
        finally:
            outer()

    return raiser


def exiting(code: object) -> Raiser:
    """Return a function that calls ``sys.exit``."""
    return lambda: sys.exit(code)  # type: ignore[arg-type]


def grouped(*raisers: Raiser) -> Raiser:
    """Return a function that raises a group of exceptions, as a TaskGroup does."""
    return lambda: raise_group([caught(each) for each in raisers])


def raise_group(errors: list[BaseException]) -> None:
    """Raise a group of exceptions."""
    raise BaseExceptionGroup("tasks failed", errors)  # type: ignore[name-defined] # noqa: F821


def barrier_timed_out(missing: list[int], name: str = "evaluated") -> Raiser:
    """Return a function that raises the timeout of ``ctx.barrier``."""

    def raiser() -> None:
        explanation = Explanation(
            f"rank 0 of 3 waited 1.5 s at the barrier {name!r}: ranks did not reach it.",
            cause="a rank is slower, hangs, or took another branch.",
            fix="let every rank call the same barriers.",
        )
        raise ddpsafe.LaunchTimeoutError(
            explanation, setting="barrier", waited_s=1.5, missing_ranks=missing
        )

    return raiser


def rendezvous_timed_out() -> None:
    """Raise the error of a rank whose peers have not joined its rendezvous."""
    explanation = Explanation("rank 0 of 2 waited 5.0 s for rank 1.", cause="slow", fix="wait")
    raise ddpsafe.RendezvousTimeoutError(explanation, waited_s=5, missing_ranks=[1])


def mismatch() -> None:
    """Raise the error of ``ctx.reduce_mean`` for different keys."""
    what = "reduce_mean: the ranks passed different keys or shapes; this one has one number."
    raise MismatchError(Explanation(what, cause="different metrics", fix="pass the same"))


def failed_after_rank_zero() -> None:
    """Raise the error of ``rank_zero_first`` in ranks that run after a failed one."""
    error = ddpsafe.RankRaisedError(
        Explanation("rank 0 failed in rank_zero_first", cause="see rank 0", fix="see rank 0"),
        rank=0,
        local_rank=0,
        hostname="",
    )
    error.origin = "peer-lost"
    raise error


def worker_died(exitcode: int) -> Raiser:
    """Return a function that raises the error of ddpsafe's loader for a dead worker."""

    def raiser() -> None:
        explanation = Explanation("a worker died", cause="out of memory", fix="lower num_workers")
        raise WorkerDiedError(explanation, rank=0, worker=1, pid=7, exitcode=exitcode, index=3)

    return raiser


def resembling() -> None:
    """Raise an error of ddpsafe whose text resembles every text of torch, gloo and the system."""
    words = "CUDA out of memory, Connection closed by peer [1], /gloo/, EADDRINUSE, Xid"
    raise DDPSafeError(Explanation(words, cause="Timed out waiting 5ms for recv", fix="none"))


def worker_exits() -> None:
    """Raise the error of torch's loader when a worker calls ``os._exit(5)``."""
    first = "DataLoader worker (pid 12) exited unexpectedly with exit code 5. Details are lost"
    msg = "DataLoader worker (pid(s) 12) exited unexpectedly"
    raise RuntimeError(msg) from RuntimeError(first)


def no_room_for_a_lock() -> None:
    """Raise the error of a lock of `multiprocessing` while /dev/shm is full."""
    source = f"raise OSError({errno.ENOSPC}, 'No space left on device')"
    exec(compile(source, multiprocessing.synchronize.__file__, "exec"))


def no_space() -> None:
    """Raise the error of a checkpoint on a full disk."""
    raise NoSpaceError(
        Explanation("the disk is full", cause="No route to host", fix="make room"),
        step=1,
        needed_bytes=2,
        free_bytes=1,
    )


# ---- outcomes of ranks ----


def at(
    *calls: tuple[int, str], done: bool = False, group: str = "default_pg", ms: int = 0, **how: Any
) -> Position:
    """Return a position: numbers and names of collectives in one group, the newest one last."""
    return Position(
        collectives=tuple(
            Collective(
                group=group,
                number=number,
                name=f"gloo:{name}",
                sizes="[[8]]",
                state="completed" if done or number < calls[-1][0] else "started",
                entered_ns=_STARTED_NS + number * _MS + ms * _MS,
                **how,
            )
            for number, name in calls
        )
    )


def number(last: int, name: str = "all_reduce", **how: Any) -> Position:
    """Return the position of a rank whose last collective in the main group has that number."""
    earlier = [(each, "all_reduce") for each in range(max(1, last - 2), last)]
    return at(*earlier, (last, name), **how)


def queued(
    completed: int, last: int, name: str = "all_reduce", at: int = 0, **how: Any
) -> Position:
    """Return a position under NCCL: completed up to one number, queued up to another.

    Args:
        completed: The last that has ended.
        last: The last that is queued.
        name: What the one numbered `at` is, by default the first that has not ended.
        at: Which one has that name.
        **how: Fields of all.
    """
    usual: dict[str, Any] = {"group": "default_pg", "sizes": "[[8]]"}
    return Position(
        collectives=tuple(
            Collective(
                **usual | how,
                number=each,
                name=f"nccl:{name if each == (at or completed + 1) else 'all_reduce'}",
                state="completed" if each <= completed else "queued",
                entered_ns=_STARTED_NS + each * _MS,
            )
            for each in range(max(1, completed - 2), last + 1)
        )
    )


WATCHDOG: Final = NativeError(origin="timeout", text="Watchdog caught collective operation …")


def both(*positions: Position) -> Position:
    """Merge positions in several groups."""
    return Position(collectives=tuple(each for one in positions for each in one.collectives))


NOWHERE: Final = Position(collectives=())


def raises(
    raiser: Raiser,
    position: Position = NOWHERE,
    *,
    ms: int = 0,
    final: bool = True,
    phase: str = "running",
    met: int = 0,
    is_caught: bool = False,
    wall_ms: int = 0,
) -> Facts:
    """Return the facts of a rank that raised, or is handling, an exception."""

    def facts() -> Facts:
        exc = caught(raiser)
        for _ in range(met):
            note_wait(exc.__context__ or exc)
        raised = Raised.from_exception(
            exc,
            phase=phase,  # type: ignore[arg-type]
            pickled=lambda _: None,
            position=position,
            at_ns=ms * _MS,
            wall_ns=_STARTED_NS + wall_ms * _MS if wall_ms else 0,
            final=final,
        )
        raised = replace(raised, is_caught=is_caught)
        return {"status": "raised", "raised": raised, "position": position, "phase": phase}

    return {"make": facts}


def handles(raiser: Raiser, position: Position = NOWHERE, **how: Any) -> Facts:
    """Return the facts of a rank that handles an exception while it waits for the others."""
    return raises(raiser, position, final=False, **how) | {"in_collective": True}


def hangs_with(raiser: Raiser, position: Position = NOWHERE) -> Facts:
    """Return the facts of a rank that hangs in the user's code with an exception in flight."""
    return raises(raiser, position, final=False) | {
        "in_collective": False,
        "stack": "t.py:9 in upload",
    }


def killed(
    by: int = signal.SIGKILL,
    position: Position | None = None,
    *,
    ms: int = 0,
    inside: bool | None = None,
    **facts: Any,
) -> Facts:
    """Return the facts of a rank that a signal ended."""
    return {
        "status": "killed",
        "exit_code": -by,
        "ended_ns": ms * _MS,
        "in_collective": inside,
        "position": position,
        **facts,
    }


def exited(code: int, *, ms: int = 0, phase: str = "running") -> Facts:
    """Return the facts of a rank that exited without a report."""
    return {"status": "exited", "exit_code": code, "ended_ns": ms * _MS, "phase": phase}


def returned(position: Position = NOWHERE) -> Facts:
    """Return the facts of a rank whose function returned."""
    return {"status": "returned", "phase": "leaving", "position": position, "exit_code": 0}


def waits(position: Position | None = NOWHERE) -> Facts:
    """Return the facts of a rank that was in a collective when it was stopped."""
    return {
        "status": "stopped",
        "in_collective": True,
        "position": position,
        "stack": "t.py:1 in f",
    }


def receives(peer: int, position: Position) -> Facts:
    """Return the facts of a rank that was receiving from another one when it was stopped."""
    call = PointToPoint("recv", peer)
    return waits(replace(position, point_to_point=call)) | {"point_to_point": "recv"}


def works(position: Position | None = NOWHERE, *, phase: str = "running") -> Facts:
    """Return the facts of a rank that was in the user's code when it was stopped."""
    return {
        "status": "stopped",
        "in_collective": False,
        "position": position,
        "stack": "t.py:9 in load",
        "phase": phase,
    }


def silent(phase: str = "running") -> Facts:
    """Return the facts of a rank that reported nothing before it was stopped."""
    return {"status": "stopped", "phase": phase}


def suspended(position: Position | None = NOWHERE) -> Facts:
    """Return the facts of a rank that was stopped by SIGSTOP when it was asked."""
    return {**works(position), "state": "stopped"}


def outcome_of(rank: int, facts: Facts) -> RankOutcome:
    """Return the outcome of a rank with these facts."""
    usual: Facts = {
        "local_rank": rank,
        "pid": 100 + rank,
        "hostname": "here",
        "phase": "running",
        "exit_code": 1,
    }
    made = facts.get("make", dict)()
    rest = {name: value for name, value in facts.items() if name != "make"}
    return RankOutcome(rank=rank, **{**usual, **made, **rest})


# ---- the table ----


@dataclass(frozen=True, kw_only=True)
class Row:
    """The outcomes of a job's ranks, and the expected conclusion.

    Attributes:
        name: What happened.
        ranks: The facts of each rank, in order.
        rank: The rank to blame.
        rule: The name of the rule that finds it.
        error: The class of the error.
        kind: The kind of the failure.
        reason: Why the launcher ended the attempt.
        oom_kills: How often the kernel killed for memory.
        facts: Further attributes of the error.
        says: Parts of its message.
        says_not: A text that is not in its message.
    """

    name: str
    ranks: list[Facts]
    rank: int
    rule: str
    error: type[ddpsafe.LaunchError]
    kind: FailureKind
    reason: EndReason = "failed"
    oom_kills: int = 0
    says: tuple[str, ...] = ()
    says_not: str = "\0"
    facts: tuple[tuple[str, object], ...] = ()


def row(
    name: str,
    ranks: list[Facts],
    rank: int,
    rule: str,
    error: type[ddpsafe.LaunchError],
    kind: FailureKind,
    **more: Any,
) -> Row:
    """Return a row."""
    return Row(name=name, ranks=ranks, rank=rank, rule=rule, error=error, kind=kind, **more)


RAISED: Final = ddpsafe.RankRaisedError
EXITED: Final = ddpsafe.RankExitedError
KILLED: Final = ddpsafe.RankKilledError
LEFT: Final = ddpsafe.RankLeftEarlyError
HUNG: Final = "collective"
BARRIER: Final = "barrier"
LATE: Final = ddpsafe.RendezvousTimeoutError

# fmt: off
ENDED: Final = [
    row("raises", [waits(), raises(own)], 1, "ended-by-itself", RAISED, "user-error"),
    row("raises, and the others report the lost connection first",
        [raises(lost_a_peer, ms=1), raises(own, ms=9), raises(lost_a_peer, ms=2)],
        1, "ended-by-itself", RAISED, "user-error"),
    row("two ranks raise, and the first one is blamed", [raises(own, ms=5), raises(other, ms=3)],
        1, "ended-by-itself", RAISED, "user-error", says=("rank 0 ", "ValueError")),
    row("raises while another rank hangs", [raises(own), works(number(1)), waits(number(2))],
        0, "ended-by-itself", RAISED, "user-error"),
    row("is killed", [waits(), killed()], 1, "ended-by-itself", KILLED, "killed"),
    row("is killed for memory", [waits(), killed()],
        1, "ended-by-itself", KILLED, "out-of-memory", oom_kills=1),
    row("is killed at its limit of processor time, and not for memory", [waits(), killed(cpu_limit_s=5)],
        1, "ended-by-itself", KILLED, "killed", oom_kills=1, says=("the 5 s of processor time", "ulimit -t")),
    row("is ended by a limit of processor time that it has set itself", [waits(), killed(signal.SIGXCPU)],
        1, "ended-by-itself", KILLED, "killed", says=("ulimit -t",), says_not="find the sender"),
    row("executes an instruction that the processor lacks", [waits(), killed(signal.SIGILL)],
        1, "ended-by-itself", KILLED, "killed", says=("for another processor", "build for h"),
        says_not="find the sender"),
    row("divides by zero in native code", [waits(), killed(signal.SIGFPE)],
        1, "ended-by-itself", KILLED, "killed", says=("divided an integer by zero",)),
    row("traps in native code", [waits(), killed(signal.SIGTRAP)],
        1, "ended-by-itself", KILLED, "killed", says=("a failed check",)),
    *(row(f"is ended by a timer of its own, by {timer.name}", [waits(), killed(timer)],
        1, "ended-by-itself", KILLED, "killed", says=("signal.alarm()",), says_not="find the sender")
      for timer in (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)),
    row("crashes while the kernel has counted a kill for memory", [waits(), killed(signal.SIGSEGV)],
        1, "ended-by-itself", KILLED, "killed", oom_kills=1),
    row("is killed, and the others report the lost connection",
        [raises(lost_a_peer, ms=1), killed(ms=9), raises(lost_a_peer, ms=2)],
        1, "ended-by-itself", KILLED, "killed"),
    row("is killed, and the other one exits without a report 30 ms before that is seen",
        [exited(1, ms=10), killed(ms=40)], 1, "ended-by-itself", KILLED, "killed"),
    row("is killed, which a busy machine shows 900 ms after the other one has exited",
        [exited(1, ms=10), killed(ms=910)], 1, "ended-by-itself", KILLED, "killed"),
    row("exits 300 ms before another rank aborts", [exited(1, ms=10), killed(signal.SIGABRT, ms=310)], 0,
        "ended-by-itself", EXITED, "user-error"),
    row("is killed in a collective, after which the other one exits",
        [exited(1, ms=10), killed(ms=40, inside=True)], 1, "ended-by-itself", KILLED, "killed"),
    row("exits before another rank crashes in a collective",
        [exited(1, ms=10), killed(signal.SIGSEGV, ms=40, inside=True)],
        0, "ended-by-itself", EXITED, "user-error"),
    row("is killed while it handles an error", [waits(number(2)), killed(position=number(1))],
        1, "ended-by-itself", KILLED, "killed"),
    row("exits without a report", [waits(), exited(3)], 1, "ended-by-itself", EXITED, "user-error"),
    row("exits with 0 without a report", [waits(), exited(0)], 1, "ended-by-itself", LEFT, "user-error"),
    row("exits while the script is imported", [waits(), exited(1, phase="starting")],
        1, "ended-by-itself", EXITED, "user-error", says=("imported",)),
    row("ends in a way that the launcher cannot see", [waits(), {"status": "exited", "exit_code": None}], 1,
        "ended-by-itself", EXITED, "user-error", says=("SIGCHLD",)),
    row("calls sys.exit(3)", [waits(), raises(exiting(3))],
        1, "ended-by-itself", EXITED, "user-error", facts=(("exit_code", 3),)),
    row("exits with the status that os.system() has returned", [waits(), raises(exiting(256))],
        1, "ended-by-itself", EXITED, "user-error", facts=(("exit_code", 1),),
        says=("exited with code 1 ", ": 256, which the system would make 0", "os.waitstatus_to_exitcode")),
    row("exits with a code that the system shortens", [waits(), raises(exiting(259))],
        1, "ended-by-itself", EXITED, "user-error", facts=(("exit_code", 3),),
        says=("exited with code 3 ", ": 259"), says_not="os.waitstatus"),
    row("calls sys.exit(0)", [waits(), raises(exiting(0))],
        1, "ended-by-itself", LEFT, "user-error", says=("SystemExit was raised at",)),
    row("calls sys.exit with a text", [waits(), raises(exiting("no data"))],
        1, "ended-by-itself", EXITED, "user-error", says=("no data",)),
    row("is interrupted", [waits(), raises(raising(KeyboardInterrupt()))],
        1, "ended-by-itself", EXITED, "user-error", facts=(("exit_code", 130),),
        says=("SIGINT was sent to this rank only", "process 101 on here")),
    row("is killed while another rank's exception was seen in flight", [handles(own, ms=5), killed(ms=9)],
        1, "ended-by-itself", KILLED, "killed"),
    row("crashes in the user's own code while another rank handles an error",
        [handles(own, ms=5), killed(signal.SIGSEGV, ms=9, inside=False)],
        1, "ended-by-itself", KILLED, "killed"),
    row("is aborted by gloo in a collective, alone",
        [waits(number(2)), killed(signal.SIGABRT, number(2), inside=True)],
        1, "ended-by-itself", KILLED, "killed", says=("compare the shapes",)),
    row("raises from inside a collective, after another rank's own error",
        [raises(own, ms=9), raises(lost_a_peer, ms=1), returned()],
        0, "ended-by-itself", RAISED, "user-error"),
    row("all exit, and the first one is blamed", [exited(2, ms=7), exited(1, ms=3)],
        1, "ended-by-itself", EXITED, "user-error", says=("rank 0 also failed: exited with code 2\n",)),
    row("all exit while the script is imported",
        [exited(1, ms=7, phase="starting") | {"said": 'Traceback (most recent call last):\n  File "/t.py", line 1, '
        "in <module>\nKeyError: 'data'\n"}, exited(1, ms=3, phase="starting")], 1, "ended-by-itself", EXITED,
        "user-error", says=("rank 0 also failed: exited with code 1: KeyError: 'data'\n",)),
]
# fmt: on

# fmt: off
WRAPPED: Final = [
    row("all wrap the failure of one that raised and wraps its own error",
        [raises(wrapping(lost_a_peer, other)), raises(wrapping(own, other))],
        1, "ended-by-itself", RAISED, "user-error", says=("KeyError",)),
    row("all exit with 1 after the failure of one that exits on its own error",
        [raises(wrapping(lost_a_peer, exiting(1)), ms=1), raises(wrapping(own, exiting(1)), ms=5)],
        1, "ended-by-itself", EXITED, "user-error", says=("while it handled ValueError", "label 7")),
    row("hangs, and the others wrap the timeout", [raises(wrapping(timed_out, other), number(2)),
        works(number(1)), raises(wrapping(timed_out, other), number(2))], 1, "behind", HUNG, "hang"),
    row("hangs, and the only other one exits on the timeout",
        [raises(wrapping(timed_out, exiting(1)), number(2)), works(number(1))], 1, "behind", HUNG, "hang"),
    row("has an error of its own beneath the timeout of a collective in finally",
        [raises(timed_out, number(3)), raises(hiding(own, timed_out), number(3, "all_gather"))],
        1, "error-out-of-place", RAISED, "user-error",
        says=("on top of it, in an except or a finally: RuntimeError", "label 7")),
    row("has an error of its own beneath the loss of a peer, behind the others",
        [raises(timed_out, number(3)), raises(hiding(own, lost_a_peer), number(2))],
        1, "error-out-of-place", RAISED, "user-error"),
    row("has an error of its own beneath a mismatch that it caused",
        [raises(mismatch, ms=1), raises(hiding(own, mismatch), ms=2)],
        1, "error-out-of-place", RAISED, "user-error", says=("label 7",)),
    row("an error raised from None hides the one beneath",
        [waits(), raises(lambda: raise_from_none(own, timed_out))],
        1, "timed-out", HUNG, "hang", facts=(("missing_ranks", ()),)),
    row("raises its own error after losing a peer that no rank explains",
        [raises(wrapping(lost_a_peer, other), number(1)), waits(number(2))],
        0, "error-after-peer-error", RAISED, "user-error", says=("KeyError",)),
    row("all wrap a mismatch of collectives", [raises(wrapping(timed_out, other), number(1, "all_gather")),
        raises(wrapping(timed_out, other), number(1, "broadcast")),
        raises(wrapping(timed_out, other), number(1, "broadcast"))], 0, "mismatch", HUNG, "hang"),
    pytest.param(row("hangs, and the others raise groups of peer errors",
        [raises(grouped(timed_out, lost_a_peer), number(2)), works(number(1)),
        raises(grouped(timed_out), number(2))], 1, "behind", HUNG, "hang"),
        marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="no exception groups")),
    pytest.param(row("raises a group with one error of its own",
        [raises(lost_a_peer, ms=1), raises(grouped(lost_a_peer, own), ms=5)], 1, "ended-by-itself", RAISED,
        "user-error"), marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="no exception groups")),
    row("follows a rank that failed in rank_zero_first",
        [raises(own, ms=9), raises(failed_after_rank_zero, ms=1)],
        0, "ended-by-itself", RAISED, "user-error"),
]
# fmt: on


def raise_from_none(inner: Raiser, outer: Raiser) -> None:
    """Raise `outer` from None, so that its context is hidden."""
    try:
        inner()
    except BaseException:  # noqa: BLE001 - SystemExit too
        raise caught(outer) from None


# fmt: off
IN_FLIGHT: Final = [
    row("waits in its finally for ranks that wait elsewhere",
        [waits(number(3)), handles(own, number(3, "barrier"))],
        1, "stuck-with-error", RAISED, "user-error", reason="stuck-with-error"),
    row("handles an error and is behind", [raises(timed_out, number(3)), handles(own, number(2))],
        1, "error-out-of-place", RAISED, "user-error"),
    row("handles an error in a different collective than most",
        [raises(timed_out, number(2)), handles(own, number(2, "barrier")), waits(number(2))],
        1, "error-out-of-place", RAISED, "user-error"),
    row("handles an error, and the positions of the ranks are unknown",
        [raises(lost_a_peer, ms=1), handles(own, ms=5)], 1, "error-out-of-place", RAISED, "user-error"),
    row("handles an error but is not the one that is behind",
        [handles(own, number(3)), works(number(2)), raises(timed_out, number(3))],
        1, "behind", HUNG, "hang"),
    row("all handle the same error in the same place, and one hangs",
        [raises(hiding(own, timed_out), number(3)), handles(own, number(2)), handles(own, number(3))], 1,
        "behind", HUNG, "hang"),
    row("all handle the same error in the same place and get out of step",
        [raises(hiding(own, timed_out), number(2)), raises(hiding(own, timed_out), number(2, "broadcast")),
        raises(hiding(own, timed_out), number(2))], 1, "mismatch", HUNG, "hang",
        says=("was handling ValueError",)),
    row("most failed and wait in their finally, the healthy one waits elsewhere",
        [waits(number(2, "all_gather")), handles(own, number(2), ms=3), handles(other, number(2))],
        2, "errors-of-all-others", RAISED, "user-error"),
    row("crashes in a collective that another rank's finally does not fit",
        [handles(own, number(3), ms=5), killed(signal.SIGSEGV, number(2), inside=True, ms=1)],
        0, "error-beside-crash", RAISED, "user-error"),
    row("is aborted by gloo behind a rank that waits in its finally",
        [killed(signal.SIGABRT, number(2), inside=True, ms=1), handles(own, number(3), ms=5)],
        1, "error-beside-crash", RAISED, "user-error"),
    row("is killed by SIGKILL in a collective, which no process does to itself",
        [handles(own, ms=5), killed(ms=9, inside=None)], 1, "ended-by-itself", KILLED, "killed"),
    row("hangs in its finally, behind the others", [raises(timed_out, number(3)),
        hangs_with(own, number(2))], 1, "error-out-of-place", RAISED, "user-error",
        says=("label 7", "was still handling it at t.py:9 in upload")),
    row("hangs in its finally, and the recorder is off",
        [raises(timed_out), hangs_with(own), raises(timed_out)],
        1, "error-out-of-place", RAISED, "user-error"),
    row("hangs in its finally until the attempt's deadline", [waits(number(3)), hangs_with(own, number(2))],
        1, "error-out-of-place", "attempt", "hang", reason="attempt-timeout",
        says=("label 7", "was handling ValueError")),
    row("works in an except block that continues, behind the others", [raises(timed_out, number(3)),
        works(replace(number(2), handling="FileNotFoundError: cache"))],
        1, "behind", HUNG, "hang", says=("was handling FileNotFoundError: cache",)),
    row("returned early, and the other one waits in an except block that continues",
        [returned(number(2, done=True)), handles(own, number(3), is_caught=True)],
        0, "returned-behind", LEFT, "user-error"),
    row("returned before another one failed, which waits in its finally",
        [returned(number(2, done=True)), handles(own, number(3))],
        1, "errors-of-all-others", RAISED, "user-error"),
    row("is suspended, and the other one waits in an except block that continues",
        [suspended(number(2)), handles(own, number(3), is_caught=True)], 0, "suspended", HUNG, "hang"),
    row("has an error of its own beneath an error of ddpsafe raised from None",
        [raises(timed_out, number(3)), raises(lambda: raise_from_none(own, mismatch), number(2))],
        1, "error-out-of-place", RAISED, "user-error", says=("label 7",)),
    row("exits after an error that it had handled: only the exit counts",
        [waits(), raises(hiding(own, exiting(1)), met=3)], 1, "ended-by-itself", EXITED, "user-error"),
]
# fmt: on

# fmt: off
NCCL: Final = [
    row("NCCL: all have queued what does not end, and one that calls .item() is not ahead",
        [waits(queued(117, 121)), *(waits(queued(117, 160)) for _ in range(3))],
        0, "stuck-on-gpu", HUNG, "hang", facts=(("missing_ranks", ()),),
        says=("ranks 0, 1, 2 and 3 (world_size 4) all wait in all_reduce number 118", "NVLink")),
    row("NCCL: all have queued what does not end, and have entered a subgroup's since",
        [waits(Position(collectives=(*queued(117, 118).collectives, *subgroup))) for subgroup in [at((9,
        "barrier"), done=True, group="2", ms=500).collectives] * 2], 0, "stuck-on-gpu", HUNG, "hang",
        facts=(("missing_ranks", ()),),
        says=("ranks 0 and 1 (world_size 2) all wait in all_reduce number 118",)),
    row("NCCL: one has not queued the collective that all wait in, others are far ahead",
        [waits(queued(117, 121)), waits(queued(117, 160)), works(queued(117, 117))],
        2, "behind", HUNG, "hang", says=("waiting for it in all_reduce number 118",)),
    row("NCCL: one has queued another collective, 42 before its last",
        [waits(queued(117, 160)), waits(queued(117, 160, "broadcast")), waits(queued(117, 121))],
        1, "mismatch", HUNG, "hang"),
    row("NCCL: the watchdogs of two abort, the third reads from a dead mount",
        [killed(signal.SIGABRT, queued(117, 160), native=WATCHDOG), works(queued(117, 117)),
        killed(signal.SIGABRT, queued(117, 121), ms=3, native=WATCHDOG)], 1, "behind", HUNG, "hang"),
    row("NCCL: the watchdogs of two have reported, and all were ended before the abort",
        [{**waits(queued(117, 160)), "native": WATCHDOG}, works(queued(117, 117)),
        {**waits(queued(117, 121)), "native": WATCHDOG}], 1, "behind", HUNG, "hang"),
    row("NCCL: a watchdog aborts, the others' collectives are unknown",
        [killed(signal.SIGABRT, native=WATCHDOG, inside=True), works()], 1, "elsewhere", HUNG, "hang"),
    row("NCCL: all watchdogs abort, in one collective",
        [killed(signal.SIGABRT, queued(5, 9), native=WATCHDOG, inside=False) for _ in range(2)],
        0, "stuck-on-gpu", HUNG, "hang", facts=(("missing_ranks", ()),)),
    row("NCCL: a counter without a name is not a different collective",
        [waits(queued(117, 118)), waits(queued(117, 118, "collective")), works(queued(117, 117))],
        2, "behind", HUNG, "hang"),
    row("NCCL: the watchdog's name means the same collective as the recorder's",
        [waits(queued(117, 118)), killed(signal.SIGABRT, queued(117, 118, "ALLREDUCE"), native=WATCHDOG),
        works(queued(117, 117))], 2, "behind", HUNG, "hang"),
    row("NCCL: two watchdogs name different collectives",
        [killed(signal.SIGABRT, queued(117, 118, "ALLREDUCE"), native=WATCHDOG),
        killed(signal.SIGABRT, queued(117, 118, "BROADCAST"), native=WATCHDOG),
        killed(signal.SIGABRT, queued(117, 118, "ALLREDUCE"), native=WATCHDOG)],
        1, "mismatch", HUNG, "hang"),
    row("NCCL: one has returned, the other's GPU waits", [waits(queued(9, 12)), returned(queued(9, 9))], 1,
        "returned-behind", LEFT, "user-error", reason="left"),
    row("NCCL: a rank raises while the others' GPUs wait for it",
        [waits(queued(9, 50)), raises(own, queued(9, 9))], 1, "ended-by-itself", RAISED, "user-error"),
    row("NCCL: a rank is killed while the others' watchdogs see its connection close",
        [killed(signal.SIGABRT, queued(9, 50), native=NativeError(origin="peer-lost", text="x")),
        killed(ms=50)], 1, "ended-by-itself", KILLED, "killed"),
    row("NCCL: a subgroup waits for a rank that all wait for",
        [waits(both(queued(4, 4), queued(6, 9, group="tp"))),
        works(both(queued(4, 4), queued(6, 6, group="tp"))), waits(queued(4, 5))],
        1, "behind", HUNG, "hang"),
    row("NCCL: a GPU has an uncorrectable ECC error, which its watchdog sees first",
        [killed(signal.SIGABRT, queued(9, 50), native=NativeError(origin="own", text="uncorrectable ECC",
        kind="hardware")), killed(signal.SIGABRT, queued(9, 50), ms=-5, native=WATCHDOG)], 0,
        "ended-by-itself", KILLED, "hardware", says=("take the host out of service",)),
    row("NCCL: no interface for its sockets, which the watchdog reports",
        [killed(signal.SIGABRT, queued(9, 50), native=NativeError(origin="own", text="no socket interface found",
        kind="network")), killed(signal.SIGABRT, queued(9, 50), ms=50, native=WATCHDOG)], 0,
        "ended-by-itself", KILLED, "network", says=("see which address it connected to",)),
    row("NCCL: an index out of range, which the watchdog sees first",
        [waits(queued(9, 50)), {**waits(queued(9, 50)),
        "native": NativeError(origin="own", text="device-side assert triggered", kind="user-error")}], 1,
        "ended-by-itself", KILLED, "user-error", says=("device-side assert triggered",
        "CUDA_LAUNCH_BLOCKING=1")),
]
# fmt: on

# fmt: off
PLACES: Final = [
    row("is stopped by SIGSTOP", [raises(timed_out, number(3)), suspended(number(2))],
        1, "suspended", HUNG, "hang", says=("kill -CONT 101",)),
    row("is stopped by SIGSTOP in the same collective",
        [raises(timed_out, number(3)), suspended(number(3))], 1, "suspended", HUNG, "hang"),
    row("returned early, found without a timeout", [waits(number(6)), returned(number(4, done=True))], 1,
        "returned-behind", LEFT, "user-error", reason="left", says=("returned early",)),
    row("returned early, found at a timeout", [raises(timed_out, number(6)), returned(number(4, done=True)),
        waits(number(6))], 1, "returned-behind", LEFT, "user-error"),
    row("two returned early, and the one with fewer collectives is blamed",
        [waits(number(6)), returned(number(5, done=True)), returned(number(4, done=True))],
        2, "returned-behind", LEFT, "user-error", reason="left"),
    row("returned, and the recorder has nothing", [raises(timed_out), returned()],
        1, "returned", LEFT, "user-error"),
    row("returned after the others' error had been its own", [raises(own), returned(number(4, done=True))],
        0, "ended-by-itself", RAISED, "user-error"),
    row("is in another collective, in a world of two, and either may be wrong",
        [raises(timed_out, number(2)), raises(timed_out, number(2, "all_gather"))],
        1, "mismatch", HUNG, "hang", says=("rank 1 (world_size 2) entered all_gather number 2 at",
        ", but rank 0 (world_size 2) entered all_reduce number 2 at"), says_not="than the others",
        facts=(("missing_ranks", (1, 0)),)),
    row("passes another dtype than most", [waits(number(2, dtypes="float32")),
        raises(timed_out, number(2, dtypes="float64")), waits(number(2, dtypes="float32"))], 1, "mismatch",
        HUNG, "hang", says=("unlike the others, passed shape [8] of float64 to all_reduce number 2",
        "different dtypes")),
    row("passes another dtype, as another one does, and a third one passes yet another",
        [waits(number(2, dtypes=dtype)) for dtype in ("int8", "int8", "int64", "int32", "int32", "int32")],
        2, "mismatch", HUNG, "hang", says=("rank 2 (world_size 6), unlike the others, passed shape [8] of int64",
        ", and ranks 0 and 1 (world_size 6) passed shape [8] of int8 to"),
        facts=(("missing_ranks", (2, 0, 1)),)),
    row("pass five dtypes, and none more often", [waits(number(2, dtypes=f"int{rank}")) for rank in range(5)],
        4, "mismatch", HUNG, "hang", says=(", rank 0 (world_size 5) passed shape [8] of int0 to",
        ", rank 1 (world_size 5) passed", ", and 2 more ranks differ from these"),
        says_not="unlike the others", facts=(("missing_ranks", (4, 0, 1, 2, 3)),)),
    row("is aborted by gloo, as two ranks pass different dtypes",
        [killed(signal.SIGABRT, None, inside=True), raises(lost_a_peer, number(2, done=True, dtypes="float32")),
        raises(lost_a_peer, number(2, done=True, dtypes="float64"))], 0, "ended-by-itself", KILLED, "killed",
        says=("different dtypes", "rank 2 passed shape [8] of float64")),
    row("is in a different collective than most", [waits(number(2)), raises(timed_out, number(2)),
        raises(timed_out, number(2, "all_gather")), waits(number(2))], 2, "mismatch", HUNG, "hang",
        says=("entered a different collective than the others", "all_gather number 2")),
    row("got out of step earlier: the number of the last rank decides",
        [raises(timed_out, at((2, "all_reduce"), (3, "all_reduce"))),
        raises(timed_out, at((2, "all_gather"))), waits(at((2, "all_reduce"), (3, "all_reduce")))],
        1, "mismatch", HUNG, "hang"),
    row("hangs in the user's code", [raises(timed_out, number(5)), works(number(4, done=True))],
        1, "behind", HUNG, "hang",
        says=("rank 0 was waiting for it in all_reduce number 5", "t.py:9 in load")),
    row("hangs before its first collective", [raises(timed_out, number(1)), works(NOWHERE)],
        1, "behind", HUNG, "hang"),
    row("two are behind, and the one further behind is blamed",
        [works(number(3, done=True)), works(number(2, done=True)), raises(timed_out, number(4))],
        1, "behind", HUNG, "hang"),
    row("hangs before a collective of a smaller group, where another one waits for it",
        [waits(both(number(3), at((4, "all_reduce"), group="tp", ms=9))),
        works(both(number(3, done=True), at((3, "all_reduce"), group="tp", done=True))),
        raises(timed_out, number(4))], 1, "behind", HUNG, "hang"),
    row("works outside of a collective, and the recorder is off",
        [raises(timed_out), works(None), silent()], 1, "elsewhere", HUNG, "hang"),
    row("works while the others are in the collective that it was in last",
        [raises(timed_out, number(3)), works(number(3, done=True))], 1, "elsewhere", HUNG, "hang"),
    row("works while another one makes a group, after the collective that both were in last",
        [waits(number(1, done=True)), works(number(1, done=True))], 1, "elsewhere", HUNG, "hang",
        says_not="waiting for it in"),
    row("makes a group alone, at a store of files", [raises(waits_for_a_file, number(1, done=True)),
        raises(timed_out, number(2)), raises(timed_out, number(2))],
        0, "behind", HUNG, "hang",
        says=("ranks 1 and 2 were waiting for it in all_reduce number 2",)),
    row("hangs in the kernel, where not even SIGKILL ends it",
        [raises(timed_out, number(3)), {**works(number(2)), "state": "disk-sleep"}],
        1, "behind", HUNG, "hang", says=("not even SIGKILL",)),
    row("all lost a peer and none reports why", [raises(lost_a_peer, ms=5), raises(lost_a_peer, ms=2)], 1,
        "unknown", RAISED, "peer-lost"),
    row("all timed out and none reports why", [raises(timed_out, ms=5), raises(closed_by_timeout, ms=7)], 0,
        "timed-out", HUNG, "hang", facts=(("missing_ranks", ()),)),
    row("sees a connection closed by another rank's timeout before that rank reports it",
        [raises(timed_out, ms=9), raises(lost_a_peer, ms=2)],
        0, "timed-out", HUNG, "hang", facts=(("missing_ranks", ()),)),
    row("lost a peer before the function ran", [raises(lost_a_peer, phase="joining"),
        raises(lost_a_peer, phase="joining", ms=2)], 0, "unknown", RAISED, "startup-network"),
    row("NCCL's watchdog ended a rank that waited for one that hangs",
        [killed(signal.SIGABRT, number(5), native=NativeError(origin="timeout",
        text="Watchdog caught collective …")), works(number(4, done=True))], 1, "behind", HUNG, "hang"),
    row("NCCL's watchdog ended all ranks, which are in different collectives",
        [killed(signal.SIGABRT, position, native=NativeError(origin="timeout",
        text="Watchdog caught collective …")) for position in (number(5), number(5, "all_gather"),
        number(5))], 1, "mismatch", HUNG, "hang"),
    row("NCCL's watchdog ended a rank after another one was killed",
        [killed(signal.SIGABRT, number(5), ms=1, native=NativeError(origin="peer-lost",
        text="ncclRemoteError")), killed(ms=30)], 1, "ended-by-itself", KILLED, "killed"),
]
# fmt: on

# fmt: off
LATE_RANKS: Final = [
    row("enters after the others have given up", [raises(timed_out, number(2), wall_ms=1502),
        raises(lost_a_peer, number(2, ms=1900), wall_ms=1903), raises(timed_out, number(2), wall_ms=1503)],
        1, "late", HUNG, "hang", says=("entered all_reduce number 2 of shape [8] 1.9 s after the others",)),
    row("enters after the others have given up and still waits there",
        [raises(timed_out, number(2), wall_ms=1502), waits(number(2, ms=1600))], 1, "late", HUNG, "hang"),
    row("two enter late, and the last one is blamed", [raises(timed_out, number(2), wall_ms=1502),
        waits(number(2, ms=1100)), waits(number(2, ms=1600))],
        2, "late", HUNG, "hang",
        says=("entered all_reduce number 2 of shape [8] 1.6 s after the first rank",
        "; rank 1 entered it 1.1 s after the first rank"), facts=(("missing_ranks", (2, 1)),)),
    row("enters a little later, as ranks always do",
        [raises(timed_out, number(2), wall_ms=1502), waits(number(2, ms=300))],
        0, "timed-out", HUNG, "hang", facts=(("missing_ranks", ()),)),
    row("enters late while another rank has not entered at all",
        [raises(timed_out, number(2), wall_ms=1502), waits(number(2, ms=1400)),
        works(number(1, done=True))], 2, "behind", HUNG, "hang"),
    row("enters the collective of a smaller group late",
        [raises(timed_out, at((3, "all_reduce"), group="tp"), wall_ms=1502),
        waits(at((3, "all_reduce"), group="tp", ms=1600)), works(NOWHERE)], 1, "late", HUNG, "hang"),
]
# fmt: on

# fmt: off
POINT_TO_POINT: Final = [
    row("two ranks receive from each other", [raises(timed_out_in("recv", 1), number(7, done=True), ms=1),
        raises(timed_out_in("recv", 0), number(7, done=True), ms=2)], 0, "timed-out", HUNG, "hang",
        facts=(("missing_ranks", ()),), says=("timed out in recv from rank 1", "after all_reduce number 7"),
        says_not="timed out in all_reduce"),
    row("hangs while others send to it and receive from it",
        [raises(timed_out_in("recv", 1), number(7, done=True)), works(number(7, done=True)),
        raises(timed_out_in("send", 1), number(7, done=True))], 1, "elsewhere", HUNG, "hang",
        says=("rank 2, at", "timed out in send to rank 1"), says_not="waiting for it in all_reduce"),
    row("does not send to a rank that the others wait for",
        [receives(1, number(7, done=True)), works(number(8)), raises(timed_out, number(8))], 1, "behind",
        HUNG, "hang", says=("rank 0, at t.py:1 in f, in recv from rank 1, after all_reduce number 7",)),
    row("does not send at the end of a chain of receives", [raises(timed_out, number(8)),
        receives(2, number(7, done=True)), raises(timed_out_in("recv", 3), number(8, done=True)),
        works(number(8, done=True))],
        3, "behind", HUNG, "hang", says=("in recv from rank 2", "timed out in recv from rank 3")),
    row("is in a receive from one of the others, which are in the next collective",
        [receives(1, number(7, done=True)), raises(timed_out, number(8))], 0, "behind", HUNG, "hang",
        says=("rank 0, at t.py:1 in f, in recv from rank 1, after all_reduce number 7",)),
    row("is in a receive from a rank that receives from it, while another one is ahead",
        [receives(1, number(7, done=True)), receives(0, number(7, done=True)),
        raises(timed_out, number(8))],
        0, "behind", HUNG, "hang", says=("in recv from rank 1", "in recv from rank 0")),
    row("handles an error instead of sending to a rank that waits",
        [receives(1, number(7, done=True)), hangs_with(raising(KeyError("weight")), number(8)),
        raises(timed_out, number(8))], 1, "error-out-of-place", RAISED, "user-error"),
    row("is in a receive while the others are in the next collective",
        [{**waits(number(7, done=True)), "point_to_point": "recv"}, raises(timed_out, number(8))], 0,
        "behind", HUNG, "hang", says=("rank 0, at t.py:1 in f, in recv, after all_reduce number 7",)),
    row("is killed while another one calls it by RPC", [raises(rpc_eof, ms=1), killed(ms=40)], 1,
        "ended-by-itself", KILLED, "killed", says=("rank 0 failed because of rank 1: RuntimeError: eof",)),
    row("hangs in a call of another rank", [raises(rpc_timed_out, number(3, done=True)),
        {**works(number(3, done=True)), "in_rpc": True}], 1, "in-rpc", HUNG, "hang",
        says=("was executing an RPC call from another rank at t.py:9 in load",)),
    row("is killed after a connection of the script's own to it broke",
        [raises(raising(ConnectionResetError(104, "reset by peer")), ms=1), killed(ms=900)],
        1, "ended-by-itself", KILLED, "killed"),
    row("loses a connection of its own while another rank crashes in a collective",
        [raises(raising(ConnectionResetError(104, "reset by peer")), ms=1),
        killed(signal.SIGSEGV, number(2), inside=True, ms=30)], 0, "ended-by-itself", RAISED, "network"),
    row("skips torch's monitored barrier and waits in the next collective",
        [raises(in_monitored_barrier(0, 1), number(3, done=True)), raises(lost_a_peer, number(4)),
        raises(in_monitored_barrier(2, lost=True), number(3, done=True))],
        1, "missed-barrier", HUNG, "hang", facts=(("missing_ranks", (1,)),),
        says=("rank 0 raised RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 6000 ms",
        "timed out in monitored_barrier, after all_reduce number 3", "call monitored_barrier"),
        says_not="timed out in all_reduce"),
    row("works while torch's monitored barrier waits for it",
        [raises(in_monitored_barrier(0, 1), number(3, done=True)), works(number(3, done=True))],
        1, "missed-barrier", HUNG, "hang", says=("in time and was at t.py:9 in load, on here",)),
    row("reaches torch's monitored barrier too late, and has printed the error of several lines that ended it",
        [raises(in_monitored_barrier(0, 1)),
        raises(in_monitored_barrier(1, lost=True)) | {"said": f"skipping a batch\nERROR {IN_BARRIER}"},
        raises(in_monitored_barrier(2, lost=True))], 1, "missed-barrier", HUNG, "hang",
        says=("rank 1 has written about an error, and continued:\n  | skipping a batch\n  rank 0, ",)),
    row("works while others wrap the error of torch's monitored barrier",
        [raises(wrapping(in_monitored_barrier(0, 1), own)), works(number(3, done=True))],
        1, "missed-barrier", HUNG, "hang",
        says=("rank 0 raised RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 6000 ms\n",)),
    row("two skip torch's monitored barrier, which waits for all ranks",
        [raises(in_monitored_barrier(0, 1, 3), number(3, done=True)), raises(lost_a_peer, number(4)),
        raises(in_monitored_barrier(2, lost=True)), raises(lost_a_peer, number(4))],
        1, "missed-barrier", HUNG, "hang", facts=(("missing_ranks", (1, 3)),),
        says=("ranks 1 and 3 (world_size 4) did not reach torch's monitored barrier in time, attempt 1",)),
    row("is the first rank and skips the monitored barrier of the others", [raises(timed_out, number(4)),
        raises(in_monitored_barrier(1), number(3, done=True)),
        raises(in_monitored_barrier(2, lost=True), number(3, done=True))],
        0, "missed-barrier", HUNG, "hang"),
    row("does not send to a rank that torch's monitored barrier misses",
        [raises(in_monitored_barrier(0, 1)), receives(2, NOWHERE), works()],
        2, "missed-barrier", HUNG, "hang"),
    row("works in a smaller group, whose other rank torch's monitored barrier misses",
        [raises(in_monitored_barrier(0, 1)), waits(at((3, "all_reduce"), group="tp")),
        works(at((2, "all_reduce"), group="tp", done=True))], 2, "behind", HUNG, "hang"),
    row("is killed before torch's monitored barrier",
        [raises(in_monitored_barrier(0, 1, lost=True), ms=1), killed(ms=40)],
        1, "ended-by-itself", KILLED, "killed"),
    row("returns while the others wait in torch's monitored barrier",
        [raises(in_monitored_barrier(0, 1), number(3, done=True)), returned(number(4))],
        1, "returned-behind", LEFT, "user-error"),
    row("called sys.exit(0) under ddpsafe run while others wait",
        [waits(number(6)), {**returned(number(4, done=True)), "exited_at": "train.py:7 in main"}],
        1, "returned-behind", LEFT, "user-error", reason="left",
        says=("sys.exit(0) was called at train.py:7 in main",)),
]
# fmt: on

# fmt: off
DEADLINES: Final = [
    row("does not join", [silent("joining"), silent("starting")],
        1, "unknown", LATE, "startup-network", reason="start-timeout"),
    row("does not join, and the other one's timeout ends first",
        [raises(rendezvous_timed_out, phase="joining"), silent("loading")],
        1, "timed-out", LATE, "startup-network"),
    row("hangs before the script's own rendezvous", [raises(rendezvous_timed_out), works(None)],
        1, "elsewhere", LATE, "hang"),
    row("does not reach a barrier", [raises(barrier_timed_out([1])), works(None)],
        1, "elsewhere", BARRIER, "hang", says=("waited 1.5 s at the barrier 'evaluated'",)),
    row("reach barriers of different names", [raises(barrier_timed_out([1], "trained")),
        raises(barrier_timed_out([0, 2], "evaluated"), ms=2),
        raises(barrier_timed_out([1], "trained"), ms=3)],
        0, "timed-out", BARRIER, "hang", facts=(("missing_ranks", ()),)),
    row("makes no progress, one rank behind", [waits(number(5)), works(number(4))],
        1, "behind", "progress", "hang", reason="no-progress"),
    row("takes too long while all work", [works(None), works(None)],
        0, "unknown", "attempt", "hang", reason="attempt-timeout",
        facts=(("missing_ranks", (0, 1)),)),
    row("takes too long while two work at one line, and another waits",
        [waits(number(4)), works(number(3, done=True)), works(number(3, done=True))],
        1, "behind", "attempt", "hang", reason="attempt-timeout",
        facts=(("missing_ranks", (1, 2)),), says=("ranks 1 and 2 (world_size 3) did not end within",)),
    row("takes too long while one is suspended", [waits(number(5)), suspended(number(5))],
        1, "suspended", "attempt", "hang", reason="attempt-timeout",
        facts=(("missing_ranks", (1,)),)),
]
# fmt: on


def of_kind(
    name: str, raiser: Raiser, kind: FailureKind, phase: str = "running", *says: str
) -> Row:
    """Return the row of a job whose rank 1 raises."""
    ranks = [waits(), raises(raiser, phase=phase)]
    return row(name, ranks, 1, "ended-by-itself", RAISED, kind, says=says)


def timed_out_like(text: str, cls: type[OSError] = TimeoutError) -> Raiser:
    """Return a function that raises a TimeoutError."""
    return raising(cls(text))


KINDS: Final = [
    of_kind("an index", raising(IndexError("list index out of range")), "user-error"),
    of_kind("a CUDA allocation", raising(RuntimeError("CUDA out of memory. Tried")), "out-of-memory"),
    of_kind("MemoryError", raising(MemoryError()), "out-of-memory"),
    of_kind("the allocator of the CPU",
        raising(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")),
        "out-of-memory"),
    of_kind("no memory to fork", raising(OSError(12, "Cannot allocate memory")), "out-of-memory"),
    of_kind("ECC", raising(RuntimeError("CUDA error: uncorrectable ECC error")), "hardware"),
    of_kind("an Xid", raising(RuntimeError("NVRM: Xid 79, GPU has fallen")), "hardware"),
    of_kind("a pickle", raising(pickle.PicklingError("Can't pickle it")), "unpicklable"),
    of_kind("a result", raising(CannotTravelError("a generator")), "unpicklable"),
    of_kind("a port", raising(OSError(98, "Address already in use")), "network"),
    of_kind("a port at the start", raising(OSError(98, "Address already in use")), "port", "loading"),
    of_kind("a refusal", raising(ConnectionRefusedError(111, "refused")), "network"),
    of_kind("a refusal at the start", raising(ConnectionRefusedError()), "startup-network", "joining"),
    of_kind("a connection that a setting forbids",
        raising(ConnectionError("Cannot reach https://hub: offline mode is enabled (HF_HUB_OFFLINE=1)")),
        "user-error"),
    of_kind("a name", raising(socket.gaierror(-2, "Name or service not known")), "network"),
    of_kind("a route", raising(OSError(113, "No route to host")), "network"),
    of_kind("a stale mount", raising(OSError(116, "Stale file handle")), "network"),
    of_kind("a pipe of its own", raising(BrokenPipeError(32, "Broken pipe")), "network", "running",
        "a program that this rank had started"),
    of_kind("a socket", timed_out_like("timed out"), "network"),
    of_kind("a read", timed_out_like("The read operation timed out"), "network"),
    of_kind("a future", timed_out_like(""), "user-error"),
    of_kind("a full disk in torch.save",
        raising(RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")),
        "user-error", "running", "no room to write"),
    of_kind("a full disk in a file of the script's",
        raising(OSError(errno.ENOSPC, "No space left on device")), "user-error", "running",
        "no room to write"),
    of_kind("a read-only file system in torch.save",
        raising(RuntimeError("[enforce fail at inline_container.cc:747] . open file failed with strerror: "
        "Read-only file system")), "user-error", "running", "after a disk error", "dmesg"),
    of_kind("a read-only file system in a file of the script's, or of numpy's",
        raising(OSError(errno.EROFS, "Read-only file system", "/outputs/last.npy")), "user-error", "running",
        "after a disk error", "dmesg"),
    of_kind("a full /dev/shm in torch's allocator",
        raising(RuntimeError("unable to allocate shared memory(shm) for file </torch_6947_4020290523_0>: "
        "No space left on device (28)")), "user-error", "running", "--shm-size"),
    of_kind("a full /dev/shm in a worker of torch's loader",
        raising(RuntimeError("Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback "
        "(most recent call last):\nRuntimeError: unable to write to file </torch_9_1>: No space left on device"
        " (28)")), "user-error", "running", "--shm-size"),
    of_kind("a full /dev/shm in a lock of multiprocessing", no_room_for_a_lock, "user-error", "running",
        "--shm-size"),
    of_kind("a full /dev/shm in a file of the script's",
        raising(OSError(errno.ENOSPC, "No space left on device", "/dev/shm/cache")), "user-error", "running",
        "--shm-size"),
    of_kind("too many files", raising(OSError(errno.EMFILE, "Too many open files", "/data/x")),
        "user-error", "running", "ulimit -n 65536"),
    of_kind("too many files for a DataLoader",
        raising(RuntimeError("Too many open files. Communication with the workers is no longer possible.")),
        "user-error", "running", "ulimit -n 65536"),
    of_kind("too many files to take one from a worker", raising(RuntimeError("received 0 items of ancdata")),
        "user-error", "running", "ulimit -n 65536"),
    of_kind("a download that breaks in gloo's words",
        raising(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")), "network"),
    of_kind("a pipe in gloo's words", raising(RuntimeError("send to worker 3 failed: Broken pipe")),
        "user-error"),
    of_kind("an error of a library's in gloo's words",
        raising(DownloadError("https://data/7.tar: Connection reset by peer")), "user-error"),
    of_kind("an error with a text for a cause", raising(OddError("quota")), "user-error"),
    of_kind("a feature server in the store's words",
        raising(RuntimeError("feature server [10.0.0.5]:443: Socket Timeout")), "user-error"),
    of_kind("a worker of torch's loader",
        raising(RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed.")), "killed"),
    of_kind("a worker of torch's loader that is late",
        raising(RuntimeError("DataLoader timed out after 5 seconds")), "user-error", "running", "raise timeout="),
    of_kind("a worker of torch's loader that exits", worker_exits, "user-error", "running", "os._exit()"),
    of_kind("a worker of ddpsafe's loader", worker_died(-signal.SIGBUS), "killed"),
    of_kind("such a worker that was killed", worker_died(-signal.SIGKILL), "out-of-memory"),
    of_kind("ddpsafe's error in the words of others", resembling, "user-error"),
    of_kind("a full disk", no_space, "user-error"),
    row("raises a long text that would change the terminal",
        [raises(raising(ValueError("one\ntwo\x1b[31m\x07\x00" + 9_000 * "x" + "\u202eend"))), raises(lost_a_peer)], 0,
        "ended-by-itself", RAISED, "user-error",
        says=(r": one" + "\n" + r"two\x07\x00x", r"x\u202eend" + "\n"), says_not=600 * "x"),
    row("raises a text of a language and a terminal's colours",
        [raises(raising(ValueError("\x1b[1;31m\u0641\u200c\u0631 \U0001f468\u200d\U0001f469\r\nend\x1b[0m"))),
        raises(lost_a_peer)], 0, "ended-by-itself", RAISED, "user-error",
        says=(": \u0641\u200c\u0631 \U0001f468\u200d\U0001f469\nend\n",), says_not="x1b"),
    row("a mismatch that no rank explains", [raises(mismatch, ms=2), raises(mismatch, ms=1)], 1,
        "error-out-of-place", RAISED, "user-error"),
]  # fmt: skip

# fmt: off
OF_TORCH: Final = [
    row("differs from the others, as torch has found on all ranks",
        [raises(differs(0, ALL_REDUCE), ms=1), raises(differs(1, A_BARRIER), ms=3),
        raises(differs(2, ALL_REDUCE), ms=2)], 0, "ended-by-itself", HUNG, "hang",
        facts=(("missing_ranks", (1,)),),
        says=("rank 1 (world_size 3) entered a different collective than the others",
        "| ranks 0 and 2 are in all_reduce number 4 of shape [5]", "| rank 1 is in barrier number 4")),
    row("passes another shape than the others, as torch has found on two of three ranks",
        [raises(differs(0, ALL_REDUCE), ms=1), raises(differs(1, ALL_REDUCE.replace("5", "9")), ms=3),
        waits()], 0, "ended-by-itself", HUNG, "hang", facts=(("missing_ranks", (0, 1)),),
        says=("rank 0 (world_size 3) passed shape [5] to all_reduce number 4 at ",
        ", but rank 1 (world_size 3) passed shape [9] to all_reduce number 4 at ",
        "all_reduce number 4 of shape [5]", "all_reduce number 4 of shape [9]")),
    row("differs from another rank, of which torch alone knows the call",
        [raises(differs(0, ALL_REDUCE), ms=1), killed(signal.SIGTERM, ms=200)], 0, "ended-by-itself",
        RAISED, "user-error", says=("Detected mismatch between collectives on ranks",)),
    row("raises an error of its own, while others have found a mismatch",
        [raises(differs(0, ALL_REDUCE), ms=9), raises(own, ms=1), raises(differs(2, A_BARRIER), ms=9)], 1,
        "ended-by-itself", RAISED, "user-error", says=("label 7",)),
]
# fmt: on

ROWS: Final[list[Any]] = [
    *ENDED, *OF_TORCH, *WRAPPED, *IN_FLIGHT, *NCCL, *PLACES, *LATE_RANKS, *POINT_TO_POINT,
    *DEADLINES, *KINDS,
]  # fmt: skip


def require_conclusion(row: Row, folder: Path, *, is_script: bool = False) -> ddpsafe.LaunchError:
    """Fail unless the conclusion from a row's outcomes is the expected one."""
    outcomes = {rank: outcome_of(rank, facts) for rank, facts in enumerate(row.ranks)}
    ended = EndedAttempt(
        outcomes=outcomes,
        ending=Ending(reason=row.reason, waited_s=9.5),
        attempt=1,
        retry=RetryPolicy(attempts=3),
        run_dir=folder,
        oom_kills=row.oom_kills,
        timeouts=Timeouts(progress=9, attempt=9),
        is_script=is_script,
    )
    if row.reason != "start-timeout":  # no rank is asked then
        cause = find_root_cause(outcomes, is_stuck_with_error=row.reason == "stuck-with-error")
        if row.error is not LATE:
            assert cause.root.rank == row.rank, cause.rule.name
        assert cause.rule.name == row.rule
    error = make_error(ended)
    if isinstance(row.error, str):
        assert (type(error), error.setting) == (ddpsafe.LaunchTimeoutError, row.error), error
    else:
        assert type(error) is row.error, error
    assert error.kind == row.kind
    if isinstance(error, ddpsafe.RankFailedError):
        assert error.rank == row.rank
    for name, value in row.facts:
        assert getattr(error, name) == value
    if isinstance(error, ddpsafe.LaunchTimeoutError) and not row.facts:
        assert error.missing_ranks == (row.rank,)
    return error


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: re.sub(r"\W+", "-", row.name) if isinstance(row, Row) else None
)
def test_the_root_cause_of_each_row_is_found(row: Row, tmp_path: Path) -> None:
    """The rank, the rule, the error class, the kind and parts of the message are as in the row."""
    text = str(require_conclusion(row, tmp_path))
    for part in row.says:
        assert part in text
    assert row.says_not not in text
    of_a_script = str(require_conclusion(row, tmp_path, is_script=True))
    assert not re.search(r"\bfunction\b(?! in the log)|\bctx\b", of_a_script)


def test_a_short_text_hides_no_other_error_that_was_handled(tmp_path: Path) -> None:
    """The text of `KeyError(1)` is "1", in which many lines end; its own line is left out."""
    said = "step 3: ignoring bad batch 1\nERROR: caught exception: 1"
    outcome = outcome_of(0, raises(raising(KeyError(1))) | {"said": said})
    ended = EndedAttempt(
        outcomes={0: outcome},
        ending=Ending(reason="failed", waited_s=9.5),
        attempt=1,
        retry=RetryPolicy(),
        run_dir=tmp_path,
        oom_kills=0,
        timeouts=Timeouts(),
    )
    assert handled_errors(outcome, ended)[1:] == ["| step 3: ignoring bad batch 1"]


def test_a_rank_is_in_one_collective_in_all_lines_of_a_message(tmp_path: Path) -> None:
    """DDP enters a broadcast for each type of buffer, the second before the first has ended."""
    first, second = (
        replace(call, state="started")
        for call in at((19, "broadcast"), (20, "broadcast")).collectives
    )
    alone = Position(collectives=(*number(18, done=True).collectives, first, second))
    outcomes = {
        rank: outcome_of(rank, waits(position))
        for rank, position in enumerate((alone, number(19), number(19)))
    }
    calls = {rank: out.position.numbered("default_pg", 19) for rank, out in outcomes.items()}  # type: ignore[union-attr]
    cases = {
        "mismatch": Deadlock(reason="mismatch", ranks=(0,), calls=tuple(calls.items())),  # type: ignore[arg-type]
        "cycle": Deadlock(reason="cycle", ranks=(0, 1), waits=(Wait(0, second, (1,)),)),
        "none": None,
    }
    for name, proof in cases.items():
        ended = EndedAttempt(
            outcomes=outcomes,
            ending=Ending(
                reason="deadlock" if proof else "attempt-timeout", waited_s=9.5, proof=proof
            ),
            attempt=1,
            retry=RetryPolicy(),
            run_dir=tmp_path,
            oom_kills=0,
            timeouts=Timeouts(attempt=9),
        )
        text = str(make_error(ended))
        of_rank_0 = {line for line in text.splitlines() if re.search("rank 0.*broadcast", line)}
        assert len(of_rank_0) > (proof is not None)
        numbers = {*re.findall(r"broadcast number (\d+)", "\n".join(of_rank_0))}
        assert numbers == {"20" if name == "cycle" else "19"}, text
        assert "and is now" not in text


def test_conclusions_do_not_depend_on_ddpsafes_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every explanation in capitals, all rows have the same conclusion."""
    stock = Explanation.__init__

    def loud(self: Explanation, *parts: Any, **named: Any) -> None:
        parts = tuple(each.upper() if isinstance(each, str) else each for each in parts)
        named |= {key: text.upper() for key, text in named.items() if isinstance(text, str)}
        stock(self, *parts, **named)

    monkeypatch.setattr(Explanation, "__init__", loud)
    rows = [each.values[0] if not isinstance(each, Row) else each for each in ROWS]
    if sys.version_info < (3, 11):
        rows = [each for each in rows if "group" not in each.name]
    for each in rows:
        assert "LIKELY CAUSE" not in str(require_conclusion(each, tmp_path))
    assert "LABEL 7" in str(require_conclusion(rows[0], tmp_path))


def test_the_documented_table_of_rules_is_that_of_the_code() -> None:
    """It is in docs/explanation/how-a-launch-works.md."""
    lines = ["| rule | the rank … | why it is the root cause |", "|---|---|---|"]
    lines += [f"| `{rule.name}` | {rule.sign} | {rule.why} |" for rule in RULES]
    page = Path(__file__).parents[2] / "docs" / "explanation" / "how-a-launch-works.md"
    assert "\n".join(lines) in page.read_text(encoding="utf-8"), "\n".join(lines)


def test_every_rule_has_rows() -> None:
    """A rule without a row would be untested; each rule also has a conclusion."""
    rows = [each.values[0] if not isinstance(each, Row) else each for each in ROWS]
    assert {each.rule for each in rows} == {rule.name for rule in RULES} == set(CONCLUSIONS)
    assert len(rows) >= 80


def test_a_larger_job_has_the_same_conclusion() -> None:
    """Ranks that are not involved, here 511, do not change which rank is blamed."""
    waiting = {rank: outcome_of(rank, waits(number(7))) for rank in range(512)}
    behind = outcome_of(200, works(number(6)))
    cause = find_root_cause({**waiting, 200: behind})
    assert (cause.root.rank, cause.rule.name) == (200, "behind")
    ranks, goal = cause.evidence.find_who_waited(behind)
    assert len(ranks) == 511
    assert goal is not None
    assert goal.number == 7


def test_different_sizes_are_a_mismatch_except_in_a_gather() -> None:
    """Ranks usually contribute different shapes to a gather, but never to an all-reduce."""
    here, there = (number(2, "all_reduce"), number(2, "all_reduce"))
    sizes = replace(there.collectives[-1], sizes="[[9]]")
    there = Position(collectives=(*there.collectives[:-1], sizes))
    worlds = [outcome_of(0, waits(here)), outcome_of(1, waits(there))]
    assert find_root_cause(dict(enumerate(worlds))).rule.name == "mismatch"
    gathers = [
        replace(
            each,
            position=Position(
                collectives=tuple(
                    replace(one, name="gloo:gather") for one in each.position.collectives
                )
            ),
        )
        for each in worlds
        if each.position is not None
    ]
    assert find_root_cause(dict(enumerate(gathers))).rule.name == "unknown"


CRASHED_IN_GLOO: Final = """\
starting
Fatal Python error: Segmentation fault

Thread 0x00007f (most recent call first):
  File "/x/site-packages/tqdm/_monitor.py", line 60 in run

Current thread 0x00007e (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3000 in all_reduce
  File "/home/me/train.py", line 31 in train
  File "/x/site-packages/ddpsafe/_worker/entrypoint.py", line 140 in run_rank
"""


@pytest.mark.parametrize(
    ("dump", "place"),
    [
        (CRASHED_IN_GLOO, StackReading(stack="/home/me/train.py:31 in train", in_collective=True)),
        (CRASHED_IN_GLOO.replace("distributed_c10d.py", "nn.py"),
            StackReading(stack="/home/me/train.py:31 in train", in_collective=False)),
        (CRASHED_IN_GLOO.replace("in all_reduce", "in recv"),
            StackReading(stack="/home/me/train.py:31 in train", in_collective=True, point_to_point="recv")),
        ("starting\nno crash at all\n", StackReading()),
    ],
)  # fmt: skip
def test_a_crash_dump_shows_the_line_and_whether_it_is_in_a_collective(
    dump: str, place: StackReading
) -> None:
    """A peer may cause a crash inside a collective, but not one in the user's own code."""
    assert read_crash(dump) == place


ENTRYPOINT: Final = (
    '  File "/x/site-packages/ddpsafe/_worker/entrypoint.py", line 140 in run_rank\n'
)

SERVES_RPC: Final = f"""\
Thread 0x00007f (most recent call first):
  File "/home/me/train.py", line 9 in slow_call
  File "/x/site-packages/torch/distributed/rpc/internal.py", line 231 in _run_function

Thread 0x00007e (most recent call first):
  File "/x/site-packages/torch/distributed/rpc/api.py", line 96 in shutdown
  File "/home/me/train.py", line 31 in train
{ENTRYPOINT}"""


def test_a_hanging_rpc_call_is_read_from_its_own_thread() -> None:
    """The main thread only waits for all calls to end; the thread of the call hangs."""
    assert read_rpc(SERVES_RPC) == StackReading(
        stack="/home/me/train.py:9 in slow_call", in_collective=False, in_rpc=True
    )
    assert read_rpc(SERVES_RPC.replace("rpc/api.py", "nn.py")) is None


@pytest.mark.parametrize("place", ["/home/me", "/x/site-packages/project", "/x/dist-packages"])
def test_lines_of_an_installed_project_are_shown(place: str) -> None:
    """The project is in site-packages beside the libraries, whose lines are not shown."""
    dump = CRASHED_IN_GLOO.partition("error:")[2].replace("/home/me", place)
    assert read_stack(dump).stack == f"{place}/train.py:31 in train"
    found = read_rpc(SERVES_RPC.replace("/home/me", place))
    assert found is not None
    assert found.stack == f"{place}/train.py:9 in slow_call"


def test_endless_recursion_is_distinguished_from_a_crash_of_native_code() -> None:
    """Both end in SIGSEGV, but a recursion's hundred frames are of one or a few functions."""
    frame = '  File "/home/me/train.py", line 3 in again\n'
    crash = (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00 (most recent call first):\n"
    )
    assert is_endless_recursion(crash + frame * 100 + "  ...\n")
    assert not is_endless_recursion(CRASHED_IN_GLOO)
    assert not is_endless_recursion(
        crash + "".join(frame.replace("again", f"f{number}") for number in range(100))
    )


def test_a_crash_in_ddps_constructor_is_recognised(tmp_path: Path) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL that is torch's own fault, and the advice is another level."""
    log = tmp_path / "rank-0.err"
    ddp = "/x/site-packages/torch/nn/parallel/distributed.py"
    log.write_text(
        f'Fatal Python error: Segmentation fault\n\n  File "{ddp}", line 1473 in _ddp_init_helper\n'
    )
    crash = row(
        "crashes in DDP",
        [killed(signal.SIGSEGV) | {"stderr": str(log)}, waits()],
        0,
        "ended-by-itself",
        KILLED,
        "killed",
    )
    assert "TORCH_DISTRIBUTED_DEBUG=DETAIL" in str(require_conclusion(crash, tmp_path))
    log.write_text(log.read_text().replace("_ddp_init_helper", "forward"))
    assert "TORCH_DISTRIBUTED_DEBUG" not in str(require_conclusion(crash, tmp_path))


def test_a_backward_pass_may_or_may_not_be_in_a_collective() -> None:
    """It computes or waits for a bucket of gradients; the innermost frame does not show which."""
    dump = CRASHED_IN_GLOO.partition("error:")[2].replace(
        "torch/distributed/distributed_c10d.py", "torch/autograd/graph.py"
    )
    assert read_stack(dump) == StackReading(stack="/home/me/train.py:31 in train")


BROKE: Final = """\
Traceback (most recent call last):
  File "/home/me/t.py", line 9, in <module>
    check(sample)
ValueError: no label
"""
LOST: Final = BROKE.replace("ValueError: no label", "RuntimeError: Connection closed by peer [::1]")
BY_TORCH: Final = "".join(f"[rank1]: {line}\n" for line in [*BROKE.splitlines(), "for sample 17"])
IN_LOADER: Final = """\
Timeout (0:00:05)!
Thread 0x00007f53dc3ff6c0 (most recent call first):
  File "/x/threading.py", line 982 in run

Thread 0x00007f53ddbfbb80 (most recent call first):
  File "/home/me/t.py", line 9 in load
  File "/home/me/t.py", line 12 in <module>
"""
IN_REDUCE: Final = IN_LOADER.replace(
    '  File "/home/me/t.py", line 9 in load',
    '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3 in all_reduce',
)
PROGRAM: Final = exited(1) | {
    "status": "raised",
    "raised": Raised(
        type_name="SystemExit",
        message="1",
        traceback="",
        payload=None,
        phase="running",
        where="",
        position=NOWHERE,
        at_ns=0,
        exit_code=1,
    ),
}


OF_THIS: Final = ("ValueError", "no label\nfor sample 17", "own")
LOST_BY_TORCH: Final = "".join(f"[rank1]: {line}\n" for line in LOST.splitlines())


@pytest.mark.parametrize(
    ("facts", "said", "found"),
    [
        (exited(1), BY_TORCH, OF_THIS),
        (exited(1), f"{BY_TORCH}[W711] a line of torch's log\n", OF_THIS),
        (
            exited(1),
            BROKE + LOST_BY_TORCH,
            ("RuntimeError", "Connection closed by peer [::1]", "peer-lost"),
        ),
        (exited(1), BROKE, None),  # it may have been handled long ago
        (exited(1), LOST, None),
        (exited(1), "nothing", None),
        (exited(1), "[rank1]: Traceback (most recent call last):\n[rank1]:   File", None),
        (exited(3), BY_TORCH, None),
        (killed(), BY_TORCH, None),
        (PROGRAM, BY_TORCH, OF_THIS),
        (PROGRAM, "nothing", ("SystemExit", "1", "own")),
        (works(), BY_TORCH, OF_THIS),
        (works(), f"{BY_TORCH}wandb: waiting", OF_THIS),
        (works(), BROKE, None),
        (
            works(),
            BY_TORCH.replace("[rank1]", "[rank0]"),
            None,
        ),  # of another job, which it has started
        (exited(1), IN_LOADER, ("Timeout", "of faulthandler at /home/me/t.py:9 in load", "own")),
        (
            exited(1),
            IN_REDUCE,
            ("Timeout", "of faulthandler at /home/me/t.py:12 in <module>", "timeout"),
        ),
        (exited(1), f"{IN_LOADER}Killed\n", None),  # as with repeat=True
        (works(), IN_LOADER, None),
        (raises(own), LOST_BY_TORCH, ("ValueError", "label 7 is out of range", "own")),
    ],
)
def test_a_printed_end_counts_where_a_rank_cannot_report_it(
    facts: Facts, said: str, found: tuple[str, ...] | None
) -> None:
    """A program in the rank's place reports nothing: torch's ``sys.excepthook`` shows what has ended it."""
    before = replace(outcome_of(1, facts), said=said)
    outcome = with_printed_end(before, find_printed_error(said))
    raised = outcome.raised
    assert (raised and (raised.type_name, raised.message, raised.origin)) == found
    if raised is not None and raised is not before.raised:
        assert outcome.status == "raised"
        assert raised.where.startswith("/home/me/t.py:")


def test_what_a_program_prints_as_it_is_ended_does_not_count() -> None:
    """Its handler of SIGTERM may raise KeyboardInterrupt; it is a stopped rank, of which nothing was seen before."""
    before = replace(outcome_of(1, works()), said=BY_TORCH)
    assert with_printed_end(before, None) is before


def test_the_line_that_cannot_be_compiled_is_shown_once() -> None:
    """Python shows it with the exception."""

    def compiles() -> None:
        compile("x = (", "train.py", "exec")

    raised = replace(
        outcome_of(0, raises(compiles)).raised,  # type: ignore[type-var]  # it has raised
        payload=bytes(payload.dumps_result(caught(compiles))),
    )
    shown = "".join(traceback.format_exception(original_of(raised)))  # type: ignore[arg-type]  # as above
    assert shown.count("\n    x = (") == 1
    assert "in compiles" in shown
