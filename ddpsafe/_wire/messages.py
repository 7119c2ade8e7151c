"""The messages that a rank sends to its launcher, and the outcome that the launcher makes from them."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping  # noqa: TC003 - pydantic reads it for messages between nodes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias

from ddpsafe._errors import DDPSafeError, Explanation, FailureKind, LaunchTimeoutError, Origin
from ddpsafe._text import MAY_DIFFER_IN_SIZE, signal_name
from ddpsafe._wire.exception_facts import (
    MAX_MESSAGE,
    PointToPoint,
    clip,
    dead_worker_of,
    exit_code_of,
    has_continued,
    line_of,
    missed_barrier_of,
    point_to_point_of,
    read_chain,
    signal_that_ended_a_child,
    text_of,
    traceback_of,
    type_name_of,
    where_of,
)
from ddpsafe._wire.foreign_texts import NativeError as NativeError  # noqa: PLC0414, TC001 - one of the messages between nodes
from ddpsafe._wire.rank_pipe import Progress
from ddpsafe._wire.spec import read_log

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingThreads:
    """The answer to `ASK_THREADS`.

    Attributes:
        places: Each thread that keeps the process alive, and where it is; empty if only the main
            thread is left, which then runs what is registered with `atexit`.
        main: The line that the main thread is at then, the user's if it is in the user's code.
        queue: Whether it waits for the thread that sends the items of a `multiprocessing.Queue`.
        children: The processes of `multiprocessing` that it waits for, with their names and pids.
    """

    places: tuple[str, ...]
    main: str = ""
    queue: bool = False
    children: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.places:
            return ", ".join(self.places)
        if self.queue:
            return "a process that reads the items of a multiprocessing.Queue (thread 'QueueFeederThread')"
        if self.children:
            return f"the end of {', '.join(self.children)}"
        return "exit handlers (atexit)" + (f" at {self.main}" if self.main else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finishing:
    """The rank has left the group. What it still does is the script's: threads and exit functions.

    Attributes:
        has_threads: Whether it waits for threads; false once only exit functions are left.
    """

    has_threads: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFolder:
    """The rank keeps checkpoints in a folder that the ranks of all nodes must be able to see."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFull:
    """A log of the rank takes no more, and what the rank writes goes to memory from now on.

    Attributes:
        fd: The rank's descriptor of that memory; ``None`` if nothing shows it.
        reason: Why the log takes no more, such as "No space left on device".
    """

    name: Literal["stdout", "stderr"]
    fd: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptsStop:
    """The user's function has called `stop_requested`, so a request to stop will have an effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedToStop:
    """The rank itself has received a signal that asks it to stop."""

    signal_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopPromise:
    """The rank answers no call of `stop_requested` from this number on until it knows the agreed step."""

    call: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """A call of `stop_requested` has returned True."""


StopMessage = AcceptsStop | AskedToStop | StopPromise | Stops

Phase = Literal["starting", "loading", "joining", "running", "leaving"]
"""In order: process started, unpickling, rendezvous, the user's function, after its report."""

CollectiveState = Literal["queued", "started", "completed"]
"""``queued``: the call has returned, but the GPU has not started it. ``started``: it runs or waits for
other ranks. A collective of gloo is ``started`` as soon as it is entered."""

UNKNOWN_COLLECTIVE: Final = "nccl:collective"
"""The name of a collective that is known only from NCCL's counters, which have no names."""

OWN_WAIT: Final = "ddpsafe"
"""The backend in the name of a wait of ddpsafe's own, which is in one graph with the collectives."""

CHECKPOINTS: Final = "checkpoint"
"""The beginning of the `Collective.group` of such a wait in a method of `Checkpointer`."""

DDP_FORWARD: Final = "the forward of the DDP model"
DDP_EVALUATION: Final = f"{DDP_FORWARD}, which is in eval() mode"
"""The `Collective.caller` where DDP copies buffers."""

MAIN_GROUP: Final = "default_pg"
"""What torch calls the group of all ranks."""

_MAX_TRACEBACK: Final = 64_000
_MAX_LINE: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A collective that a rank has entered in a process group.

    Attributes:
        group: ``default_pg``, or the name of another group, which is the same on all its ranks.
        number: Its number in that group, from 1; ranks count the same collective with the same number.
        name: Backend and operation, e.g. ``gloo:all_reduce``.
        sizes: Shapes of its inputs, e.g. ``[[3, 4]]`` for one.
        dtypes: Their dtypes, e.g. ``float32``; empty if unknown.
        state: How far it is. NCCL's calls return as soon as they are queued for the GPU, so a rank
            may have queued many behind one that waits.
        entered_ns: When it was entered, on the wall clock; torch records no other.
        numel: Number of elements of its inputs; 0 if unknown.
        timeout_s: Its timeout; 0 if unknown.
        root: The source or destination that the rank named, in the group of all ranks; ``None`` if unknown.
        caller: What has called it in torch or ddpsafe, such as `DDP_FORWARD`, if that is known.
        thread: The name and the line of the thread that entered it; empty for the main thread, or if unknown.
    """

    group: str
    number: int
    name: str
    sizes: str
    state: CollectiveState
    entered_ns: int
    dtypes: str = ""
    numel: int = 0
    timeout_s: float = 0.0
    thread_id: int = 0
    root: int | None = None
    caller: str = field(default="", compare=False)
    thread: str = field(default="", compare=False)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.state == "completed"

    @property
    def has_one_size(self) -> bool:
        """Whether every rank has to pass the same shapes, the source of a scatter included."""
        return MAY_DIFFER_IN_SIZE.search(self.name) is None

    @property
    def required_size(self) -> int | None:
        """How many elements every rank has to pass; ``None`` if that may differ or is unknown."""
        is_known = self.sizes not in ("", "[]")
        return self.numel if self.has_one_size and is_known else None

    @property
    def is_queued_ahead(self) -> bool:
        """Whether the call returns before the collective ends, so that a rank may be ahead of its GPU."""
        return self.name.startswith("nccl:")

    @property
    def is_own_wait(self) -> bool:
        """Whether it is a wait in ddpsafe's store, such as a barrier or a save, and no collective."""
        return self.name.startswith(f"{OWN_WAIT}:")

    @property
    def is_of_watchdog(self) -> bool:
        """Whether the name is from NCCL's watchdog, which writes ALLREDUCE, not all_reduce."""
        return self.name.partition(":")[2].isupper()

    @property
    def shapes(self) -> str:
        """The shapes of its inputs, for a message: ``shape [3, 4]``; empty if unknown."""
        shapes = self.sizes[1:-1]  # without the outer brackets
        return f"shape{'s' * (shapes.count('[') > 1)} {shapes}" if shapes else ""

    @property
    def inputs(self) -> str:
        """The same with their dtypes: ``shape [3, 4] of float32``."""
        return f"{self.shapes} of {self.dtypes}" if self.dtypes else self.shapes

    def may_pair_with(self, other: Collective) -> bool:
        """Return whether two ranks may have made the same call, as far as both calls are known."""
        if UNKNOWN_COLLECTIVE in (self.name, other.name):
            return True
        if self.is_of_watchdog != other.is_of_watchdog:  # their names cannot be compared
            return True
        are_other = self.sizes != other.sizes or len({self.dtypes, other.dtypes} - {""}) > 1
        return self.name == other.name and not (are_other and self.has_one_size)

    def __str__(self) -> str:
        origin = ", ".join(filter(None, (self.caller and f"in {self.caller}", self.thread)))
        by = f" ({origin})" if origin else ""
        if self.is_own_wait:
            return f"{self.name.partition(':')[2]}{by}"
        of = f" of {self.shapes}" if self.shapes else ""
        group = "" if self.group == MAIN_GROUP else f" of group {self.group!r}"
        root = "" if self.root is None else f" with rank {self.root} as its root"
        name = self.name.partition(":")[2] or self.name
        return f"{name} number {self.number}{group}{of}{root}{by}"


Arrival: TypeAlias = tuple[int, int]
"""The number of a collective, and when the rank entered it, in ns on the wall clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank is in the sequence of collectives; sent when asked and at its end.

    Attributes:
        collectives: The last few of each group, in the order in which they were entered.
        handling: The exception, in one line, that the main thread handles in an ``except`` block after
            which the program continues.
        arrivals: When it entered the last collectives of the group of all ranks.
        done: How often it has done what other ranks wait for in ddpsafe's store, by the `Collective.group` of
            such a wait; ``None`` if unknown.
        in_store: The wait of ddpsafe's own that the main thread is in, such as a barrier; ``None`` outside of one.
    """

    collectives: tuple[Collective, ...]
    handling: str = ""
    point_to_point: PointToPoint | None = None
    arrivals: tuple[Arrival, ...] = field(default=(), compare=False, repr=False)
    done: Mapping[str, int] | None = field(default=None, repr=False)
    in_store: Collective | None = None

    def in_group(self, group: str) -> Collective | None:
        """Return the last collective in that group."""
        return max(
            (call for call in self.collectives if call.group == group),
            key=lambda call: call.number,
            default=None,
        )

    def reached(self, group: str) -> Collective | None:
        """Return the collective in that group that the rank is in, or the last that it entered.

        Under NCCL that is the first that has not ended.
        """
        # The GPU waits in it, and has not started those queued behind it.
        first, last = self.first_incomplete(group), self.in_group(group)
        return first if first is not None and first.is_queued_ahead else last

    def newest(self) -> Collective | None:
        """Return the collective that the rank is in, or the last that it entered, in any group.

        If the GPU waits in collectives, that is the oldest of these. A wait of ddpsafe's own is one, too.
        """
        groups = {call.group for call in self.collectives}
        waiting = [
            call
            for group in groups
            if (call := self.first_incomplete(group)) is not None and call.is_queued_ahead
        ]
        if waiting:
            return min(waiting, key=lambda call: (call.entered_ns, call.group != MAIN_GROUP))
        if self.in_store is not None:
            return self.in_store
        # Old versions of torch do not record the time; then prefer the group of all ranks.
        return max(
            self.collectives,
            key=lambda call: (call.entered_ns, call.group == MAIN_GROUP, call.number),
            default=None,
        )

    def current(self) -> Collective | None:
        """Return the collective to name in a message: `newest`, or the first of several under way in its group.

        DDP enters one broadcast for each type of buffer, for example, and the first keeps the rank there.
        """
        last = self.newest()
        return last if last is None or last.done else self.first_incomplete(last.group)

    def first_incomplete(self, group: str) -> Collective | None:
        """Return the first collective in that group that has not ended: the one the GPU is in."""
        return min(
            (call for call in self.collectives if call.group == group and not call.done),
            key=lambda call: call.number,
            default=None,
        )

    def numbered(self, group: str, number: int) -> Collective | None:
        """Return the collective with that number in that group, if it is among the last few."""
        key = (group, number)
        return next((call for call in self.collectives if (call.group, call.number) == key), None)


class Frame(NamedTuple):
    """One call on a thread's stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """The stack of one thread of a rank, the innermost call first."""

    name: str
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """The answer to `ASK_WHEREABOUTS`: where a rank is, while it continues to run.

    Attributes:
        position: Where it is in the sequence of collectives, as far as this is known without NCCL.
        groups: The ranks of each process group that it is in, by the name as in `Collective.group`.
        threads: The stacks of its threads, the main thread first; ddpsafe's own are left out.
        waits: The collectives, and the waits of ddpsafe's own, that its threads are certainly in until these
            end; the main thread's first.
        is_held: Whether the rank does nothing for another one before one of `waits` ends: no other thread of
            it that can call anything is elsewhere.
        ran: Counters of the threads in `waits`, which differ once one of them has run in between.
        completed: How many collectives with the operation and the shapes of the newest one had ended.
        is_evaluating: Whether the code around it runs a module in ``eval()`` mode.
    """

    position: Position
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    threads: tuple[ThreadStack, ...] = ()
    waits: tuple[Collective, ...] = ()
    is_held: bool = False
    ran: tuple[int, ...] = ()
    completed: int = 0
    is_evaluating: bool = False

    @property
    def main_frames(self) -> tuple[Frame, ...]:
        """The stack of its main thread, the innermost call first; empty if unknown."""
        return self.threads[0].frames if self.threads else ()


def last_in_main(position: Position | None) -> Collective | None:
    """Return the last collective in the group of all ranks, if known."""
    return None if position is None else position.in_group(MAIN_GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """The rank entered a phase."""

    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """The user's function returned; sent before any teardown.

    Attributes:
        payload: The pickled value; ``None`` if it is large: see `Inheritance.shared`.
        exited_at: The line of the ``sys.exit(0)`` that ended a script under ``ddpsafe run``.
        has_callers: Whether other threads of the rank were still running that call collectives, barriers and the
            like: it may enter further ones.
        is_reported: Whether the rank has reported it; else the launcher concludes it from exit code 0 of a
            script that has called ``os._exit(0)`` or become another program, and `position` is an old one.
    """

    payload: bytes | None
    position: Position
    stop_calls: int = 0
    exited_at: str = ""
    has_callers: bool = False
    is_reported: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptExit:
    """What a rank's function returns for a script that called ``sys.exit(0)``, at that line."""

    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """An exception left the user's function, or is about to; sent before any teardown.

    Attributes:
        message: ``str()`` of the exception, shortened.
        traceback: The formatted traceback with its chain, shortened.
        payload: The pickled exception, or ``None`` if it cannot be pickled.
        where: File, line and function of the innermost frame in the user's code.
        at_ns: When, on the host's monotonic clock, which its ranks share.
        wall_ns: The same moment on the wall clock, as `Collective.entered_ns`; 0 if unknown.
        exit_code: The exit code, if the exception was a request to exit.
        final: False if the exception was only seen in flight: at a teardown, at a barrier, or when
            the rank was asked where it is.
        is_caught: Whether it was then in an ``except`` block after which the program continues.
        held: What the rank's memory contained, if it ran out of memory.
        explanation: What it says, as data, if it is an error of ddpsafe.
        kind: The kind of failure, if the exception's class shows it.
        setting: The field of `Timeouts` that ran out, if it is a `LaunchTimeoutError`.
        hidden_by: The peer error, in one line, that was raised on top of it and left the function.
        handled: The exception, in one line, that was being handled when the rank asked to exit.
        dead_worker: Which worker of torch's DataLoader it comes from, and how that worker ended.
        child_signal: The signal that ended a process of the rank, if the exception comes from that; else 0.
        missed_barrier: The ranks that did not reach torch's monitored barrier in time, if it says so.
    """

    type_name: str
    message: str
    traceback: str
    payload: bytes | None
    phase: Phase
    where: str
    position: Position
    at_ns: int
    wall_ns: int = 0
    exit_code: int | None = None
    final: bool = True
    is_caught: bool = False
    held: str = ""
    origin: Origin = "own"
    explanation: Explanation | None = None
    kind: FailureKind | None = None
    setting: str = ""
    wraps_peer_error: bool = False
    point_to_point: PointToPoint | None = None
    hidden_by: str = ""
    handled: str = ""
    dead_worker: str = ""
    child_signal: int = 0
    missed_barrier: tuple[int, ...] = ()

    @property
    def is_peer_error(self) -> bool:
        """Whether the rank failed because it lost another one or waited for it too long."""
        return is_peer_origin(self.origin)

    @property
    def is_certain(self) -> bool:
        """Whether it certainly ended the rank, by the rank's own fault or by the loss of a peer."""
        # An exception that was seen in flight may have been handled. One raised in a wait for ranks
        # that were elsewhere may be their fault.
        return self.final and not self.hidden_by and self.origin != "mismatch"

    @classmethod
    def from_exception(
        cls,
        exc: BaseException,
        *,
        phase: Phase,
        pickled: Callable[[BaseException], bytes | None],
        position: Position,
        at_ns: int,
        wall_ns: int = 0,
        final: bool = True,
        held: str = "",
    ) -> Raised:
        """Describe an exception as plain data; never raises."""
        facts = read_chain(exc)
        error = facts.shown
        name, message = type_name_of(error), clip(text_of(error), MAX_MESSAGE)
        code = exit_code_of(error)
        handled = None if code is None else error.__cause__
        waited = error if facts.hidden_by is None else facts.hidden_by
        dead_worker, child_signal = "", 0
        # They read private names of torch, and the user's attributes.
        with contextlib.suppress(Exception):
            dead_worker = dead_worker_of(error)  # first, as it waits for the end of the worker
            child_signal = signal_that_ended_a_child(error)
        if code is not None and not error.__suppress_context__:
            handled = error.__context__
        # The rank has worked on since, so that it did not exit because of that exception.
        if handled is not None and has_continued(handled):
            handled = None
        return cls(
            type_name=name,
            message=message,
            traceback=clip(traceback_of(exc), _MAX_TRACEBACK),
            payload=pickled(error),
            phase=phase,
            where=where_of(error.__traceback__),
            position=position,
            at_ns=at_ns,
            wall_ns=wall_ns,
            exit_code=code,
            final=final,
            held=held,
            origin=facts.origin,
            explanation=error.explanation if isinstance(error, DDPSafeError) else None,
            kind=_kind_of(error),
            setting=error.setting if isinstance(error, LaunchTimeoutError) else "",
            wraps_peer_error=facts.wraps_peer_error,
            point_to_point=point_to_point_of(waited.__traceback__),
            missed_barrier=missed_barrier_of(waited),
            hidden_by="" if facts.hidden_by is None else in_a_line(facts.hidden_by),
            handled="" if handled is None else in_a_line(handled),
            dead_worker=dead_worker,
            child_signal=child_signal,
        )


def is_peer_origin(origin: Origin) -> bool:
    """Return whether a failure of that origin follows from another rank's failure."""
    return origin in ("peer-lost", "timeout")


def _kind_of(exc: BaseException) -> FailureKind | None:
    """Return the kind that the class of an exception shows; texts are matched by the launcher."""
    if isinstance(exc, pickle.PicklingError):
        return "unpicklable"
    if not isinstance(exc, DDPSafeError):
        return None
    # "config" means that nothing was started, which is never true in a rank.
    return "user-error" if exc.kind == "config" else exc.kind


def in_a_line(exc: BaseException) -> str:
    """Return an exception's type, text and place in one line."""
    where = where_of(exc.__traceback__)
    return " ".join(line_of(exc, _MAX_LINE).split()) + (f" at {where}" if where else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The exception that was last seen in flight did not end the rank."""


Message = (
    Entered
    | Position
    | Whereabouts
    | Returned
    | Raised
    | Recovered
    | StopMessage
    | Finishing
    | LivingThreads
    | CheckpointFolder
    | LogFull
)


Status = Literal["returned", "raised", "exited", "killed", "stopped", "running"]
"""``stopped``: ended by the launcher, so it shows nothing about the rank itself. `RankOutcome.state` shows
whether a rank was suspended by SIGSTOP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeFirstEnd:
    """Where a rank was until another one gave up waiting, after which it went on.

    What it did then is a consequence: the other rank may have released what this one waited for.

    Attributes:
        stack: The user's innermost line that it was seen at.
        waited_s: For how long it had been seen there when the other rank gave up, in seconds.
        then: What it did after that, for a message.
    """

    stack: str
    waited_s: float
    position: Position
    then: str


class Unanswered(NamedTuple):
    """A connection of a rank to which the other host has not replied for a while."""

    own: str
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """What became of one rank.

    Attributes:
        local_rank: Its index on its host.
        pid: Its process id; ``None`` if it never started.
        status: How it ended.
        phase: The last phase that it entered.
        exit_code: Exit code as `multiprocessing` gives it (negative: a signal).
        raised: What it raised, if anything.
        native: What native code wrote before it ended the process, if anything.
        ended_ns: When the launcher saw its end (monotonic).
        position: Where it was in the sequence of collectives, if known.
        state: The process state before it was ended, as psutil names it: ``stopped`` means suspended
            (SIGSTOP), unlike the `status` of that name.
        stack: The user's innermost line that its main thread was at before it was ended.
        in_collective: Whether that line waited in a collective; ``None`` if unknown.
        point_to_point: Which call, of those of `PointToPoint`, it waited in, e.g. ``recv``.
        in_rpc: Whether `stack` is of a thread that executes a call from another rank (RPC).
        began_ns: When each phase began (monotonic), for its launcher's report.
        exited_at: The line of the ``sys.exit(0)`` that ended it, if one did.
        stdout: Its log of file descriptor 1.
        stderr: Its log of file descriptor 2.
        said: The end of its stderr, if that log is on another host; else ``None``.
        before: Where it was before, if it went on only when another rank had given up waiting; then
            `position` and `stack` are those from before, too.
        unanswered: Its connections without a reply from the other host, before anything ended.
        cpu_limit_s: The limit of processor time that it has reached, if that has ended it.
    """

    rank: int
    local_rank: int
    pid: int | None
    hostname: str
    status: Status
    phase: Phase
    exit_code: int | None
    raised: Raised | None = None
    native: NativeError | None = None
    ended_ns: int | None = None
    position: Position | None = None
    state: str = ""
    stack: str = ""
    in_collective: bool | None = None
    progress: Progress = field(default=Progress())
    point_to_point: str = ""
    in_rpc: bool = False
    began_ns: Mapping[Phase, int] = field(default_factory=dict)
    exited_at: str = ""
    stdout: str | None = None
    stderr: str | None = None
    node_rank: int = 0
    said: str | None = None
    before: BeforeFirstEnd | None = None
    unanswered: tuple[Unanswered, ...] = ()
    cpu_limit_s: int | None = None

    def error_text(self) -> str:
        """Return what it wrote to stderr, or the last part of it."""
        if self.said is not None:
            return self.said
        return "" if self.stderr is None else read_log(self.stderr)

    @property
    def origin(self) -> Origin:
        """Where its failure comes from, as far as the rank itself knew."""
        if self.raised is not None:
            return self.raised.origin
        return "own" if self.native is None else self.native.origin

    @property
    def steps(self) -> int:
        """How many optimizer steps it had made."""
        return self.progress.steps

    @property
    def sends_or_receives(self) -> str:
        """Which send, receive or monitored barrier it was in when it was asked, or failed in; empty if none."""
        reported = self._reported_point_to_point
        if reported is not None:
            return str(reported)
        return self.point_to_point if self.raised is None else ""

    @property
    def awaited_sender(self) -> int | None:
        """The rank that it was receiving from when it was asked, or failed to receive from, if known."""
        reported = self._reported_point_to_point
        return None if reported is None else reported.sender

    @property
    def _reported_point_to_point(self) -> PointToPoint | None:
        if self.raised is not None:
            return self.raised.point_to_point
        return None if self.position is None else self.position.point_to_point

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended it, e.g. ``SIGKILL``."""
        if self.exit_code is None or self.exit_code >= 0:
            return None
        return signal_name(-self.exit_code)
