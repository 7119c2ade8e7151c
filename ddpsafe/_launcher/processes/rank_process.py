"""One rank as the launcher sees it: its process, its reports, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from dataclasses import replace
from typing import IO, TYPE_CHECKING

from ddpsafe._launcher.processes.descendants import RankIdentity, open_pidfd
from ddpsafe._logging import get_logger
from ddpsafe._stdlib_private import forget_child
from ddpsafe._wire import payload
from ddpsafe._wire.messages import (
    AcceptsStop,
    AskedToStop,
    CheckpointFolder,
    Entered,
    LivingThreads,
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

    from ddpsafe._launcher.diagnosis.readings import RankReading
    from ddpsafe._wire.messages import Message, Status
    from ddpsafe._wire.rank_pipe import Progress
    from ddpsafe._wire.spec import RankSpec


logger = get_logger(__name__)


class StopState:
    """The launcher's side of it, for one rank.

    Attributes:
        accepts: Whether the rank accepts a request to stop: its function calls `stop_requested`.
        asked_by: The signal that asked the rank itself to stop.
        is_stopping: Whether its function has been told to stop.
        promise: The first call of `stop_requested` that it has not answered; ``None`` if unknown yet.
    """

    def __init__(self, say: Callable[[bytes], None]) -> None:
        """Talk through `say`, which drops the bytes if the rank has gone."""
        self._say = say
        self._has_returned = False
        self.accepts = False
        self.asked_by: str | None = None
        self.is_stopping = False
        self.promise: int | None = None

    def note(self, message: StopMessage) -> None:
        """Take a message of the rank."""
        if isinstance(message, AcceptsStop):
            self.accepts = True
        elif isinstance(message, AskedToStop):
            self.asked_by = message.signal_name
        elif not isinstance(message, StopPromise):
            self.is_stopping = True
        elif not self._has_returned:
            self.promise = message.call

    def note_return(self, calls: int) -> None:
        """Take note that its function has returned, after so many calls: there will be no more."""
        self._has_returned = True
        self.promise = calls + 1

    def ask(self) -> None:
        """Tell it that the job has been asked to stop; see `RankContext.stop_requested`."""
        self._say(ASK_STOP)

    def stop_at(self, call: int) -> None:
        """Tell it the call of `stop_requested` from which on the answer is yes."""
        self._say(STOP_AT + CALL_NUMBER.pack(call))

    def announce_end(self) -> None:
        """Tell it that the SIGTERM to come is not a request to stop at a step."""
        self._say(END_NOW)


_POLL_S = 0.5
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


class RankState:
    """What is known of one rank: what it has reported, and what was found out about it.

    The rank may be a process of this launcher (`Worker`) or of another node's.

    Attributes:
        phase: The last phase it reported.
        began_ns: When each phase began, as far as it was reported (monotonic).
        returned: Its report of success, if it came.
        raised: Its report of an exception, in flight or final.
        failed: Whether an exception ended its function.
        ended_ns: When its end was seen (monotonic).
        position: The last it said about where it is in the sequence of collectives.
        whereabouts: The last it said about where it is while the others go on.
        reading: What was found out about it when the ranks were asked where they are.
        native: What native code wrote before it ended the process.
        living_threads: What keeps its process alive, when it was asked.
        stop: What is said about stopping by itself.
    """

    def __init__(self, say: Callable[[bytes], None]) -> None:
        """Know nothing yet; `say` sends the rank what it is asked, and drops it if the rank has gone."""
        self._say = say
        self.phase: Phase = "starting"
        self.began_ns: dict[Phase, int] = {"starting": time.monotonic_ns()}
        self.returned: Returned | None = None
        self.raised: Raised | None = None
        self.failed = False
        self.ended_ns: int | None = None
        self._teardown_ns: int | None = None
        self.position: Position | None = None
        self.whereabouts: Whereabouts | None = None
        self.reading: RankReading | None = None
        self.native: NativeError | None = None
        self.living_threads: LivingThreads | None = None
        self.checkpoint_folders: set[str] = set()
        self.stop = StopState(say)

    @property
    def rank(self) -> int:
        """Its rank."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """Whether its end has not been seen yet, and is still waited for."""
        return self.ended_ns is None

    @property
    def joined(self) -> bool:
        """Whether it got as far as the user's function."""
        return self.phase in ("running", "leaving")

    def progress(self) -> Progress:
        """Return how far it has come."""
        raise NotImplementedError

    def outcome(self) -> RankOutcome:
        """Return what is known of it now."""
        raise NotImplementedError

    def take(self, message: Message) -> None:
        """Take note of what the rank has sent."""
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
        elif isinstance(message, LivingThreads):
            self.living_threads = message
        elif isinstance(message, CheckpointFolder):
            self.checkpoint_folders.add(message.path)
        elif isinstance(message, Recovered):
            self.raised = self.raised if self.failed else None
        elif not isinstance(message, Raised):
            self.stop.note(message)
        # Once ranks were being ended, all that is lost is our doing.
        elif self._teardown_ns is None or message.at_ns <= self._teardown_ns:
            # The first one counts, or the one that ended the rank, unless that is only a peer error.
            self.failed = self.failed or message.final
            earlier = self.raised
            hides = earlier is not None and not earlier.is_peer_error and message.is_peer_error
            if earlier is None or (message.final and not hides):
                self.raised, self.position = message, message.position

    def note_reading(self, reading: RankReading | None) -> None:
        """Take note of what was found out when it was asked; ``None`` for nothing."""
        if reading is not None:
            self.reading = reading
            self.position, self.native = reading.position, reading.native

    def note_native(self, found: NativeError | None) -> None:
        """Take note of what native code wrote before it ended the process."""
        self.native = found

    def tell_all_started(self) -> None:
        """Tell it that the others have been started, and can be waited for."""
        self._say(ALL_STARTED)

    def ask_position(self) -> None:
        """Ask where it is; the answer is a report. A rank that holds the GIL cannot answer."""
        self._say(ASK_POSITION)

    def ask_whereabouts(self) -> None:
        """Ask where it is and what its threads do, while it goes on; the answer is a report."""
        self._say(ASK_WHEREABOUTS)

    def ask_stacks(self) -> None:
        """Ask it to write down what all its threads do, and then where it is."""
        self._say(ASK_STACKS)

    def ask_threads(self) -> None:
        """Ask what keeps its process alive; the answer is a report."""
        self._say(ASK_THREADS)


class Worker(RankState):
    """One rank as its launcher sees it.

    Attributes:
        spec: What it was told.
        told_to_end: Whether the launcher has begun to end it.
        was_stopped: Whether it was found stopped: what it does once it is continued to be asked where it
            is, is our doing.
        is_swept: Whether it has been ended with everything it started.
        result: What its function returned, pickled, once it has; ``None`` if it cannot be read.
        relay: Told each message of the rank, where another node's launcher watches it.
    """

    def __init__(
        self,
        spec: RankSpec,
        process: BaseProcess,
        *,
        report_fd: int,
        lifeline_fd: int,
        shared: IO[bytes],
        protect: Callable[[RankIdentity], None],
    ) -> None:
        """Own the process, both pipes' ends and the shared memory; see `Inheritance`.

        `protect` is told how the process can be recognised, when it starts and when it has ended.
        """
        super().__init__(self.say)
        self.spec = spec
        self._shared = shared
        self._steps = StepCounter(shared.fileno())
        self._lifeline_fd = lifeline_fd
        os.set_blocking(lifeline_fd, False)
        self.receiver = Receiver(report_fd)
        self.told_to_end = False
        self.was_stopped = False
        self.is_swept = False
        self.result: bytes | mmap | None = None
        self.relay: Callable[[Message], None] | None = None
        self._process = process
        self._is_lent = False
        self._is_abandoned = False
        self._pidfd = open_pidfd(process.pid)
        self.identity = RankIdentity.of(process.pid) if process.pid is not None else None
        self._protect = protect
        if self.identity is not None:
            protect(self.identity)

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.spec.world.rank

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._process.pid

    def lend_process(self) -> BaseProcess:
        """Return the `multiprocessing` process, whose exit status can be read ever after."""
        self._is_lent = True
        return self._process

    @property
    def exitcode(self) -> int | None:
        """Exit status as `multiprocessing` gives it; ``None`` while it runs."""
        return self._process.exitcode

    @property
    def alive(self) -> bool:
        """Whether its end has not been seen yet, and is still waited for."""
        return self.ended_ns is None and not self._is_abandoned

    def end_handle(self) -> int:
        """Return a descriptor that becomes readable when the process ends.

        The sentinel of `multiprocessing` is a pipe, which a forked DataLoader worker keeps open
        beyond the rank's death; a pidfd is not fooled.
        """
        return self._process.sentinel if self._pidfd is None else self._pidfd

    def take_reports(self) -> None:
        """Read what the rank has sent."""
        for message in self.receiver.receive():
            if self.was_stopped and isinstance(message, (Returned, Raised)):
                continue
            self.take(message)
            if isinstance(message, Returned):
                # What it returned is in the message, or mapped where it is large.
                if message.payload is not None:
                    self.result = message.payload
                else:
                    with contextlib.suppress(OSError, ValueError):
                        self.result = payload.map_file(self._shared.fileno(), RESULT_OFFSET)
            if self.relay is not None:
                self.relay(message)

    def note_teardown(self, at_ns: int) -> None:
        """Record that ranks are being ended from now on (monotonic)."""
        self.take_reports()
        self._teardown_ns = at_ns

    @property
    def crashed(self) -> bool:
        """Whether a signal that a program brings upon itself ended it."""
        return self.exitcode is not None and -self.exitcode in _CRASHES

    def error_text(self) -> str:
        """Return what it wrote to stderr."""
        return read_log(self.spec.logs.stderr)

    def progress(self) -> Progress:
        """Return how far it has come."""
        return self._steps.read()

    def say(self, word: bytes) -> None:
        """Send the rank a word of `_wire.rank_pipe`, unless it does not listen any more."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._lifeline_fd, word)

    def note_end(self, seen_ns: int) -> None:
        """Record that the process has ended, with the last it had to say.

        Args:
            seen_ns: When that was seen (monotonic): the same for all that was seen at one look.
        """
        if self.identity is not None and self.ended_ns is None:
            self.identity = self.identity.ended()  # before it is reaped, and its pid used again
            self._protect(self.identity)
        self._process.join(_POLL_S)
        self.take_reports()
        self.ended_ns = seen_ns

    def abandon(self) -> None:
        """Wait no more for a process that nothing ends; nor may the interpreter when it exits."""
        self._is_abandoned = True
        forget_child(self._process)

    def outcome(self) -> RankOutcome:
        """Say what became of it."""
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
            exited_at="" if self.returned is None else self.returned.exited_at,
        )
        if self.reading is None:
            return outcome
        place = self.reading.place
        return replace(
            outcome,
            state=self.reading.state,
            stack=place.stack,
            in_collective=place.in_collective,
            point_to_point=place.point_to_point,
            in_rpc=place.in_rpc,
        )

    def _status(self) -> Status:
        if self.returned is not None:
            return "returned"
        # It may have been killed while an exception was in flight, which may be handled.
        by_a_signal = self.exitcode is not None and self.exitcode < 0 and not self.crashed
        was_killed = by_a_signal and not self.failed and not self.told_to_end
        if self.raised is not None and not was_killed:
            return "raised"
        # Of what ends a process, SIGKILL alone does so while it is suspended.
        if self.told_to_end or (self.was_stopped and self.exitcode != -signal.SIGKILL):
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
                else:  # what a fork server has reaped leaves its pid to another process
                    signal.pidfd_send_signal(self._pidfd, signum)
            except ProcessLookupError:
                pass
            except PermissionError:  # it has become another user's by exec; the others still end
                logger.warning(
                    "no permission to signal rank %d (pid %d): it is another user's process by now, and "
                    "may go on",
                    self.rank,
                    self.pid,
                )

    def end(self, signum: int) -> None:
        """Send the signal that is to end it, if its end has not been seen."""
        if self.alive:
            self.told_to_end = True
            if self.stop.accepts and signum == signal.SIGTERM:
                self.stop.announce_end()
            self.signal(signum)
            self.signal(signal.SIGCONT)  # a suspended process takes nothing but SIGKILL

    def note_swept(self) -> None:
        """Record that it has been ended with everything it started."""
        self.is_swept = True

    def close(self) -> None:
        """Release descriptors; the process must have ended."""
        self.receiver.close()
        self._steps.close()
        self._shared.close()
        os.close(self._lifeline_fd)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if not self._is_lent:
            with contextlib.suppress(ValueError):  # still running, in spite of SIGKILL
                self._process.close()
