"""One rank as the launcher sees it: its process, what it has reported, how it ended."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import signal
import socket
import time
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, NamedTuple

from ddpsafe._host import read_stat
from ddpsafe._launcher.processes.descendants import RankIdentity, open_pidfd
from ddpsafe._logging import get_logger
from ddpsafe._stdlib_private import forget_child
from ddpsafe._wire import payload
from ddpsafe._wire.exception_facts import crashed_in_users_exit
from ddpsafe._wire.log_overflow import OverflowReader
from ddpsafe._wire.messages import (
    AcceptsStop,
    AskedToStop,
    BeforeFirstEnd,
    CheckpointFolder,
    Entered,
    Finishing,
    LivingThreads,
    LogFull,
    NativeError,
    Phase,
    Position,
    Raised,
    RankOutcome,
    Recovered,
    Returned,
    StopMessage,
    StopPromise,
    Whereabouts,
)
from ddpsafe._wire.rank_pipe import (
    ALL_STARTED,
    ASK_POSITION,
    ASK_STACKS,
    ASK_STOP,
    ASK_THREADS,
    ASK_WHEREABOUTS,
    CALL_NUMBER,
    END_NOW,
    RESULT_OFFSET,
    STOP_AT,
    Receiver,
    StepCounter,
)
from ddpsafe._wire.spec import read_log

if TYPE_CHECKING:
    from collections.abc import Callable
    from mmap import mmap
    from multiprocessing.process import BaseProcess

    from ddpsafe._wire.foreign_texts import PrintedError
    from ddpsafe._wire.messages import Message, Status, Unanswered
    from ddpsafe._wire.rank_pipe import Progress
    from ddpsafe._wire.spec import RankSpec


logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackReading:
    """Where a rank is in the code, read from a dump of its stacks.

    Attributes:
        stack: The user's innermost line (``path:line in function``); empty if unknown.
        in_collective: Whether the thread waits in a collective; ``None`` if unknown.
        point_to_point: The send, receive or monitored barrier that it waits in.
        in_rpc: Whether the line is of a thread that executes a call from another rank (RPC).
    """

    stack: str = ""
    in_collective: bool | None = None
    point_to_point: str = ""
    in_rpc: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReading:
    """What was found out about a rank, by asking it or from what it wrote at a crash.

    Attributes:
        state: The state of its process, as psutil names it.
        position: Where it is in the sequence of collectives; ``None`` if it has not answered.
        native: What native code wrote before it ended the process.
        printed: The error that it had printed by then, if it may be a program that cannot report one.
    """

    state: str = ""
    place: StackReading = StackReading()
    position: Position | None = None
    native: NativeError | None = None
    printed: PrintedError | None = None


class Sighting(NamedTuple):
    """An answer of a rank that was asked where it is.

    Attributes:
        since_ns: When the first answer in a row from the same place was received (monotonic).
        at_ns: When this one was received (monotonic).
    """

    answer: Whereabouts
    since_ns: int
    at_ns: int

    def then(self, answer: Whereabouts, now_ns: int) -> Sighting:
        """Return the sighting of a later answer."""
        is_same = (
            answer.position == self.answer.position
            and answer.main_frames == self.answer.main_frames
        )
        return Sighting(answer, self.since_ns if is_same else now_ns, now_ns)


class StopState:
    """The launcher's side of the agreement to stop, for one rank.

    Attributes:
        accepts: Whether the rank accepts a request to stop: its function calls `stop_requested`.
        asked_by: The signal that asked the rank itself to stop.
        is_stopping: Whether `stop_requested` has returned true in its function.
        promise: The first call of `stop_requested` that it has not answered; ``None`` if not known yet.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        """Use `send` for messages to the rank; it drops them if the rank has exited."""
        self._send = send
        self._has_returned = False
        self.accepts = False
        self.asked_by: str | None = None
        self.is_stopping = False
        self.promise: int | None = None

    def note(self, message: StopMessage) -> None:
        """Record a message from the rank."""
        if isinstance(message, AcceptsStop):
            self.accepts = True
        elif isinstance(message, AskedToStop):
            self.asked_by = message.signal_name
        elif not isinstance(message, StopPromise):
            self.is_stopping = True
        elif not self._has_returned:
            self.promise = message.call

    def note_return(self, calls: int) -> None:
        """Record that its function has returned after so many calls: it makes no more of them."""
        self._has_returned = True
        self.promise = calls + 1

    def ask(self) -> None:
        """Notify it that the job has been asked to stop; see `RankContext.stop_requested`."""
        self._send(ASK_STOP)

    def stop_at(self, call: int) -> None:
        """Send it the number of the call from which on `stop_requested` returns true."""
        self._send(STOP_AT + CALL_NUMBER.pack(call))

    def announce_end(self) -> None:
        """Notify it that the next SIGTERM is not a request to stop at a step."""
        self._send(END_NOW)


_REAP_S = 0.5
_LIMIT_MARGIN_S = 1.0  # the kernel compares whole seconds
# Signals that a program's own fault raises, as distinct from those that another process sends.
_CRASHES = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
}


class Activity(NamedTuple):
    """What ``/proc`` shows of a rank's main thread.

    Attributes:
        state: Its state, as ``ps`` shows it; empty if unknown.
        ran: Counters that grow whenever it runs at all; ``None`` if unknown.
    """

    state: str = ""
    ran: tuple[int, ...] | None = None


def read_activity(pid: int | None) -> Activity:
    """Read the activity of a process's main thread, in 20 microseconds; an empty one if unknown."""
    task = f"{pid}/task/{pid}"
    try:
        state = read_stat(task).state
        with open(f"/proc/{task}/schedstat", "rb") as file:  # noqa: PTH123 - once a second for each rank
            spent_ns, _, slices = map(int, file.read().split())
    except (OSError, ValueError, IndexError):
        return Activity()
    return Activity(state=state, ran=(spent_ns, slices))


def _read_cpu_s(rank: RankIdentity) -> float | None:
    """Return the processor time that a rank which has ended had used; ``None`` once it has been reaped."""
    with contextlib.suppress(OSError):
        stat = read_stat(rank.pid)
        if stat.started == rank.started:
            return (stat.user_ticks + stat.system_ticks) / os.sysconf("SC_CLK_TCK")
    return None


class RankState:
    """What is known about one rank: what it has reported, and what the launcher has found out.

    The rank may be a process of this launcher (`RankProcess`) or of another node's.

    Attributes:
        began_ns: When each reported phase began (monotonic).
        returned: Its report of success, once received.
        raised: Its report of an exception, in flight or final.
        failed: Whether an exception ended its function.
        ended_ns: When its end was seen (monotonic).
        position: Its last report of where it is in the sequence of collectives.
        whereabouts: Its last answer to `ask_whereabouts`.
        sightings: Its last two answers to that, with their times.
        before: Where it was before another rank gave up waiting, if it went on after that.
        reading: What was found out about it when the attempt ended and the ranks were asked.
        native: What native code wrote before it ended the process.
        is_finishing: Whether all that still runs in it is the script's own.
        has_threads: Whether threads of the script may be part of that, or only exit functions.
        living_threads: Its last answer to `ask_threads`.
        unanswered: Its connections without a reply from the other host, while it makes no step.
        checkpoint_folders: Its checkpoint folders, which the ranks of all nodes have to see.
        stop: The state of a request to stop.
        idle_s: For how long all ranks of its node have been idle, if another launcher reports that.
        reports_every_s: How often that launcher does; 0 if it is this one.
    """

    idle_s = 0.0
    reports_every_s = 0.0

    def __init__(self, send: Callable[[bytes], None]) -> None:
        """Know nothing yet; `send` sends bytes to the rank, and drops them if it has exited."""
        self._send = send
        self._questions = 0
        self.phase: Phase = "starting"
        self.began_ns: dict[Phase, int] = {"starting": time.monotonic_ns()}
        self.returned: Returned | None = None
        self.raised: Raised | None = None
        self.failed = False
        self.ended_ns: int | None = None
        self._teardown_ns: int | None = None
        self.position: Position | None = None
        self.whereabouts: Whereabouts | None = None
        self.sightings: tuple[Sighting, ...] = ()
        self.before: BeforeFirstEnd | None = None
        self.reading: RankReading | None = None
        self.native: NativeError | None = None
        self.is_finishing, self.has_threads = False, True
        self.living_threads: LivingThreads | None = None
        self.unanswered: tuple[Unanswered, ...] = ()
        self.checkpoint_folders: set[str] = set()
        self.stop = StopState(send)

    @property
    def rank(self) -> int:
        """Its rank."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """Whether the launcher still waits for its end."""
        return self.ended_ns is None

    @property
    def joined(self) -> bool:
        """Whether it has reached the user's function."""
        return self.phase in ("running", "leaving")

    @property
    def left(self) -> Returned | None:
        """Its report that it has returned, if no other thread of it calls anything any more; else ``None``."""
        is_over = self.returned is not None and not self.returned.has_callers
        return self.returned if is_over else None

    @property
    def has_answered(self) -> bool:
        """Whether it has answered `ask_whereabouts` as often as it was asked.

        Otherwise its last answer may be to an earlier question, and describe an earlier moment.
        """
        return self._questions == 0

    @property
    def is_seen_since_answer(self) -> bool:
        """Whether `activity` is newer than its last answer."""
        return True

    @property
    def known_ns(self) -> int:
        """Of which moment `activity` is (monotonic)."""
        return time.monotonic_ns()

    @property
    def is_heard(self) -> bool:
        """Whether what is known of it is recent: its launcher can be reached, and responds."""
        return True

    def progress(self) -> Progress:
        """Return its progress so far."""
        raise NotImplementedError

    def activity(self) -> Activity:
        """Return what its main thread does; an empty one if that is unknown."""
        raise NotImplementedError

    def outcome(self) -> RankOutcome:
        """Return its outcome as it is known now."""
        raise NotImplementedError

    def take(self, message: Message) -> None:
        """Record a message from the rank."""
        if isinstance(message, Entered):
            self.phase = message.phase
            self.began_ns[message.phase] = time.monotonic_ns()
        elif isinstance(message, Returned):
            self.returned, self.phase = message, "leaving"
            self.began_ns["leaving"] = time.monotonic_ns()
            self.position = message.position
            self.stop.note_return(message.stop_calls)
        elif isinstance(message, Position):
            self.position = message
        elif isinstance(message, Whereabouts):
            self.whereabouts = message
            self._questions = max(0, self._questions - 1)
            now_ns = time.monotonic_ns()
            last = self.sightings[-1:]
            new = last[0].then(message, now_ns) if last else Sighting(message, now_ns, now_ns)
            self.sightings = (*last, new)
        elif isinstance(message, Finishing):
            self.is_finishing, self.has_threads = True, message.has_threads
        elif isinstance(message, LivingThreads):
            self.living_threads = message
        elif isinstance(message, CheckpointFolder):
            self.checkpoint_folders.add(message.path)
        elif isinstance(message, Recovered):
            self.raised = self.raised if self.failed else None
        elif not isinstance(message, (Raised, LogFull)):
            self.stop.note(message)
        # Later errors are the launcher's doing: it was ending the ranks by then.
        elif isinstance(message, Raised) and (
            self._teardown_ns is None or message.at_ns <= self._teardown_ns
        ):
            # Keep the first exception. The one that ended the rank replaces it, unless it is only a
            # peer error and the first is not.
            self.failed = self.failed or message.final
            earlier = self.raised
            hides = earlier is not None and not earlier.is_peer_error and message.is_peer_error
            if earlier is None or (message.final and not hides):
                self.raised, self.position = message, message.position

    def note_reading(self, reading: RankReading | None) -> None:
        """Record what was found out when the rank was asked; ``None`` for nothing."""
        if reading is not None:
            self.reading = reading
            self.position, self.native = reading.position, reading.native

    def note_before(self, before: BeforeFirstEnd | None) -> None:
        """Record where it was before another rank gave up waiting, if it went on after that."""
        self.before = before

    def note_native(self, native: NativeError | None) -> None:
        """Record what native code wrote before it ended the process."""
        self.native = native

    def announce_all_started(self) -> None:
        """Notify it that all other ranks have been started, so it can wait for them."""
        self._send(ALL_STARTED)

    # A rank answers each of these with a report; one that holds the GIL cannot answer.

    def ask_position(self) -> None:
        """Ask where it is in the sequence of collectives."""
        self._send(ASK_POSITION)

    def ask_whereabouts(self) -> None:
        """Ask where it is and what its threads do, while it continues to run."""
        self._questions += 1
        self._send(ASK_WHEREABOUTS)

    def ask_stacks(self) -> None:
        """Ask it to write the stacks of all its threads to a file, and then where it is."""
        self._send(ASK_STACKS)

    def ask_threads(self) -> None:
        """Ask which threads keep its process alive."""
        self._send(ASK_THREADS)


class RankProcess(RankState):
    """One rank that is a process of this launcher.

    Attributes:
        was_stopped: Whether it was found stopped. The launcher continues such a rank to ask where it
            is, so what it does from then on is the launcher's doing.
        is_swept: Whether it has been ended with everything it started.
        result: The pickled return value of its function; ``None`` before it has returned, or if the
            value cannot be read.
        relay: Called with each message of the rank if another node's launcher watches it.
        full_log: The first log that took no more, and why; ``None`` if there is none.
        overflow: Where the rank's output goes instead, by ``stdout`` and ``stderr``.
    """

    def __init__(
        self,
        spec: RankSpec,
        process: BaseProcess,
        *,
        report_fd: int,
        lifeline_fd: int,
        shared: IO[bytes],
        track: Callable[[RankIdentity], None],
    ) -> None:
        """Own the process, the launcher's ends of both pipes, and the shared memory; see `Inheritance`.

        `track` is called with the identity of the process when it starts and when it has ended.
        """
        super().__init__(self.send)
        self.spec = spec
        self._shared = shared
        self._steps = StepCounter(shared.fileno())
        self._lifeline_fd = lifeline_fd
        os.set_blocking(lifeline_fd, False)
        self.receiver = Receiver(report_fd)
        self.is_being_ended = False
        self.was_stopped = False
        self.is_swept = False
        self.result: bytes | mmap | None = None
        self.relay: Callable[[Message], None] | None = None
        self.full_log: tuple[str, str] | None = None
        self.overflow: dict[str, OverflowReader] = {}
        self._process = process
        self._is_lent = False
        self._is_abandoned = False
        self._pidfd = open_pidfd(process.pid)
        self._cpu_s: float | None = None
        self.identity = RankIdentity.of(process.pid) if process.pid is not None else None
        self._track = track
        if self.identity is not None:
            track(self.identity)

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.spec.world.rank

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._process.pid

    def lend_process(self) -> BaseProcess:
        """Return the `multiprocessing` process; `close` then leaves it open, for its exit status."""
        self._is_lent = True
        return self._process

    @property
    def exitcode(self) -> int | None:
        """Exit status as `multiprocessing` gives it; ``None`` while it runs."""
        return self._process.exitcode

    @property
    def alive(self) -> bool:
        """Whether the launcher still waits for its end."""
        return self.ended_ns is None and not self._is_abandoned

    def end_handle(self) -> int:
        """Return a descriptor that becomes readable when the process ends."""
        # The sentinel of `multiprocessing` is a pipe, which a forked DataLoader worker keeps open
        # after the rank has died. A pidfd depends on the rank's own process only.
        return self._process.sentinel if self._pidfd is None else self._pidfd

    def take_reports(self) -> None:
        """Read what the rank has sent."""
        for message in self.receiver.receive():
            if self.was_stopped and isinstance(message, (Returned, Raised)):
                continue
            if isinstance(message, LogFull):
                self._note_full_log(message)
                continue
            self.take(message)
            if isinstance(message, Returned):
                # A large value is not in the message but in the shared memory.
                if message.payload is not None:
                    self.result = message.payload
                else:
                    with contextlib.suppress(OSError, ValueError):
                        self.result = payload.map_file(self._shared.fileno(), RESULT_OFFSET)
            if self.relay is not None:
                self.relay(message)

    def _note_full_log(self, message: LogFull) -> None:
        if self.full_log is None:
            logs = self.spec.logs
            self.full_log = logs.stdout if message.name == "stdout" else logs.stderr, message.reason
        if message.fd is not None and self.pid is not None:
            with contextlib.suppress(OSError):  # the rank has ended
                self.overflow[message.name] = OverflowReader(self.pid, message.fd)

    def note_teardown(self, at_ns: int) -> None:
        """Record that the launcher ends the ranks from `at_ns` on (monotonic)."""
        self.take_reports()
        self._teardown_ns = at_ns

    @property
    def crashed(self) -> bool:
        """Whether one of `_CRASHES` ended it."""
        return self.exitcode is not None and -self.exitcode in _CRASHES

    @property
    def broke_late(self) -> bool:
        """Whether it died in what its function had left running, which is part of the job.

        A crash in exit functions is left out if none of them is the user's: a library takes itself down.
        """
        died = bool(self.exitcode) and self.is_finishing and not self.is_being_ended
        return died and (self.has_threads or not self.crashed or self._is_users_crash)

    @functools.cached_property
    def _is_users_crash(self) -> bool:
        return crashed_in_users_exit(self.error_text())

    def error_text(self) -> str:
        """Return what it wrote to stderr."""
        return read_log(self.spec.logs.stderr)

    def progress(self) -> Progress:
        """Return its progress so far."""
        return self._steps.read()

    def activity(self) -> Activity:
        """Return what its main thread does."""
        return read_activity(self.pid)

    def send(self, data: bytes) -> None:
        """Send the rank one of the messages of `_wire.rank_pipe`, unless it no longer reads them."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._lifeline_fd, data)

    def note_end(self, seen_ns: int) -> None:
        """Record that the process has ended, and read its last reports.

        `seen_ns` (monotonic) is the same for all ends seen at one look.
        """
        if self.identity is not None and self.ended_ns is None:
            # Before it is reaped: after that another process may get its pid.
            self._cpu_s = _read_cpu_s(self.identity)
            self.identity = self.identity.ended()
            self._track(self.identity)
        self._process.join(_REAP_S)
        self.take_reports()
        if self.spec.style == "run" and self.exitcode == 0 and not self.is_being_ended:
            self._take_exit_code_0()
        self.ended_ns = seen_ns

    @property
    def _cpu_limit_s(self) -> int | None:
        """The limit of processor time that has ended it, which it has inherited; see `RankOutcome`."""
        soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
        # The kernel compares in this order. With ``ulimit -t`` both limits are the same.
        limits = {-signal.SIGKILL: hard, -signal.SIGXCPU: soft}
        limit = limits.get(self.exitcode or 0, resource.RLIM_INFINITY)
        # A fork server reaps its ranks at once, so of those it is not known.
        if limit == resource.RLIM_INFINITY or self._cpu_s is None:
            return None
        return limit if self._cpu_s > limit - _LIMIT_MARGIN_S else None

    def _take_exit_code_0(self) -> None:
        """Take exit code 0 of a script for its success, as torchrun does, although it reported nothing."""
        if self.returned is None and not self.failed:
            self.result = bytes(payload.dumps_result(None))
            message = Returned(
                payload=self.result,
                # An old one: since then, it may have done what others wait for.
                position=replace(self.position or Position(collectives=()), done=None),
                is_reported=False,
            )
            self.take(message)
            if self.relay is not None:
                self.relay(message)

    def abandon(self) -> None:
        """Stop waiting for a process that nothing ends; nor does the interpreter wait for it at exit."""
        self._is_abandoned = True
        forget_child(self._process)

    def outcome(self) -> RankOutcome:
        """Return its outcome as it is known now."""
        logs = self.spec.logs
        status = self._status()
        outcome = RankOutcome(
            rank=self.rank,
            local_rank=self.spec.world.local_rank,
            pid=self.pid,
            hostname=socket.gethostname(),
            status=status,
            phase=self.raised.phase if self.raised else self.phase,
            exit_code=self.exitcode,
            raised=None if status == "killed" else self.raised,
            native=self.native,
            ended_ns=self.ended_ns,
            node_rank=self.spec.world.node_rank,
            stdout=logs.stdout,
            stderr=logs.stderr,
            position=self.position,
            progress=self.progress(),
            began_ns=self.began_ns,
            unanswered=self.unanswered,
            exited_at="" if self.returned is None else self.returned.exited_at,
            cpu_limit_s=self._cpu_limit_s,
        )
        if self.reading is not None:
            outcome = self._with_reading(outcome, self.reading)
        if self.before is None:
            return outcome
        return replace(
            outcome,
            # Had it not gone on, the launcher would have ended it.
            status="stopped" if status == "returned" else status,
            position=self.before.position,
            stack=self.before.stack,
            in_collective=False,
            point_to_point="",
            before=self.before,
        )

    @staticmethod
    def _with_reading(outcome: RankOutcome, reading: RankReading) -> RankOutcome:
        place = reading.place
        return replace(
            outcome,
            state=reading.state,
            stack=place.stack,
            in_collective=place.in_collective,
            point_to_point=place.point_to_point,
            in_rpc=place.in_rpc,
        )

    def _status(self) -> Status:
        if self.broke_late:
            return "killed" if (self.exitcode or 0) < 0 else "exited"
        if self.returned is not None:
            return "returned"
        # A rank may be killed while it handles an exception that would not have ended it.
        by_a_signal = self.exitcode is not None and self.exitcode < 0 and not self.crashed
        was_killed = by_a_signal and not self.failed and not self.is_being_ended
        if self.raised is not None and not was_killed:
            return "raised"
        # Only SIGKILL ends a suspended process. The launcher sets `is_being_ended` before it sends that,
        # so here another process, or the kernel when it ran out of memory, has sent it.
        if self.is_being_ended or (self.was_stopped and self.exitcode != -signal.SIGKILL):
            return "stopped"
        if self.alive:
            return "running"
        return "killed" if (self.exitcode or 0) < 0 else "exited"

    def signal(self, signum: int) -> None:
        """Send a signal, if the process has not been reaped."""
        if self.pid is not None and self.exitcode is None:
            try:
                if self._pidfd is None:
                    os.kill(self.pid, signum)
                else:  # once a fork server has reaped the rank, its pid may be another process's
                    signal.pidfd_send_signal(self._pidfd, signum)
            except ProcessLookupError:
                pass
            except PermissionError:  # it has exec'd a program of another user; still end the others
                logger.warning(
                    "no permission to signal rank %d (pid %d): it now runs as another user, and may "
                    "keep running",
                    self.rank,
                    self.pid,
                )

    def end(self, signum: int) -> None:
        """Send the signal that is to end it, unless its end has been seen."""
        if self.alive:
            self.is_being_ended = True
            if self.stop.accepts and signum == signal.SIGTERM:
                self.stop.announce_end()
            self.signal(signum)
            self.signal(signal.SIGCONT)  # a suspended process reacts to nothing but SIGKILL

    def note_swept(self) -> None:
        """Record that it has been ended with everything it started."""
        self.is_swept = True

    def close(self) -> None:
        """Release descriptors; the process must have ended."""
        self.receiver.close()
        self._steps.close()
        self._shared.close()
        for reader in self.overflow.values():
            reader.close()
        os.close(self._lifeline_fd)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if not self._is_lent:
            with contextlib.suppress(ValueError):  # still running, despite SIGKILL
                self._process.close()
