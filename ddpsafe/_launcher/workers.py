"""The processes of one attempt: all of them or none, owned until they are reaped."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpsafe._errors import PreflightError, explain
from ddpsafe._launcher.descendants import RankProcess
from ddpsafe._wire.channel import InheritedFd, Receiver
from ddpsafe._wire.outcome import Entered, Phase, Raised, RankOutcome, Returned
from ddpsafe._worker.entrypoint import run_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.process import BaseProcess

    from ddpsafe._launcher.guard import Guard
    from ddpsafe._wire.spec import RankSpec

# What `multiprocessing` gives a worker that raised before our first line ran.
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledCall:
    """The user's function and arguments, pickled before anything starts.

    Attributes:
        data: The bytes.
        handles: What has to be inherited beside them.
    """

    data: bytes
    handles: tuple[object, ...]


class Worker:
    """One rank as the launcher sees it.

    Attributes:
        spec: What it was told.
        phase: The last phase it reported.
        returned: Its report of success, if it came.
        raised: Its report of an exception, the first one if there are several.
        ended_ns: When its end was seen (monotonic).
        stopped: Whether the launcher has asked it to end.
        stack: Where it was when it was asked, as text.
    """

    def __init__(self, spec: RankSpec, process: BaseProcess, report_fd: int) -> None:
        """Own the process and the read end of its report."""
        self.spec = spec
        self.receiver = Receiver(report_fd)
        self.phase: Phase = "starting"
        self.returned: Returned | None = None
        self.raised: Raised | None = None
        self.ended_ns: int | None = None
        self.stopped = False
        self.stack = ""
        self._process = process
        self._pidfd = _open_pidfd(process.pid)
        self.identity = RankProcess.of(process.pid) if process.pid is not None else None

    @property
    def rank(self) -> int:
        """Its rank."""
        return self.spec.world.rank

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return self._process.pid

    @property
    def process(self) -> BaseProcess:
        """The `multiprocessing` process behind it."""
        return self._process

    @property
    def exitcode(self) -> int | None:
        """Exit status as `multiprocessing` gives it; ``None`` while it runs."""
        return self._process.exitcode

    @property
    def alive(self) -> bool:
        """Whether its end has not been seen yet."""
        return self.ended_ns is None

    @property
    def joined(self) -> bool:
        """Whether it got as far as the user's function."""
        return self.phase in ("running", "leaving")

    def end_handle(self) -> int:
        """Return a descriptor that becomes readable when the process ends.

        The sentinel of `multiprocessing` is a pipe, which a forked DataLoader worker keeps open
        beyond the rank's death; a pidfd is not fooled.
        """
        return self._process.sentinel if self._pidfd is None else self._pidfd

    def take_reports(self) -> None:
        """Read what the rank has sent."""
        for message in self.receiver.receive():
            if isinstance(message, Entered):
                self.phase = message.phase
            elif isinstance(message, Returned):
                self.returned, self.phase = message, "leaving"
            elif self.raised is None or message.final:
                self.raised = message

    def note_end(self) -> None:
        """Record that the process has ended, with the last it had to say."""
        self._process.join(_POLL_S)
        self.take_reports()
        self.ended_ns = time.monotonic_ns()

    def outcome(self) -> RankOutcome:
        """Say what became of it."""
        logs = self.spec.logs
        return RankOutcome(
            rank=self.rank,
            local_rank=self.spec.world.local_rank,
            pid=self.pid,
            hostname=socket.gethostname(),
            status=self._status(),
            phase=self.raised.phase if self.raised else self.phase,
            exit_code=self.exitcode,
            raised=self.raised,
            ended_ns=self.ended_ns,
            stdout=logs.stdout if logs else None,
            stderr=logs.stderr if logs else None,
            stack=self.stack,
        )

    def _status(self) -> Any:
        if self.returned is not None:
            return "returned"
        if self.raised is not None:
            return "raised"
        if self.stopped:
            return "stopped"
        if self.alive:
            return "running"
        return "killed" if (self.exitcode or 0) < 0 else "exited"

    def signal(self, signum: int) -> None:
        """Send a signal, if the process has not been reaped."""
        if self.pid is not None and self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def close(self) -> None:
        """Release descriptors; the process must have ended."""
        self.receiver.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        with contextlib.suppress(ValueError):  # still running, in spite of SIGKILL
            self._process.close()


def _open_pidfd(pid: int | None) -> int | None:
    if pid is None or not hasattr(os, "pidfd_open"):
        return None
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None


@contextlib.contextmanager
def started_workers(
    specs: Sequence[RankSpec],
    call: PickledCall,
    *,
    start_method: str,
    daemon: bool,
    guard: Guard,
    stop: Callable[[Sequence[Worker]], None],
) -> Iterator[list[Worker]]:
    """Start one process for each spec; leaving ends and reaps every one that is left.

    `torch.multiprocessing.start_processes` gives every rank the same arguments, so each would hold
    the others' pipes, and it forgets those it started when a later start fails. So each process
    is started by itself here, through the same `multiprocessing` context.

    Args:
        specs: The ranks, by rank.
        call: What they run.
        start_method: ``spawn`` or ``forkserver``.
        daemon: See `LaunchPlan`.
        guard: Ends them should this process be killed.
        stop: Ends and reaps workers.

    Raises:
        PreflightError: The system would not start another process.
    """
    context = _context(start_method)
    workers: list[Worker] = []
    with contextlib.ExitStack() as stack:
        lifeline_read, lifeline_write = os.pipe()
        stack.callback(os.close, lifeline_write)
        stack.callback(lambda: _close_all(workers))
        stack.callback(lambda: stop(workers))
        try:
            call_file = stack.enter_context(_unnamed_file(call.data))
            for spec in specs:
                workers.append(
                    _start(context, spec, lifeline_read, call_file, call.handles, daemon=daemon)
                )
                _protect(guard, workers[-1])
        except OSError as exc:
            raise _not_started(len(workers), len(specs), exc) from exc
        finally:
            os.close(lifeline_read)
        yield workers


def _context(start_method: str) -> Any:
    """Return the context; the forkserver loads torch once, for all ranks it will ever fork."""
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["torch", "ddpsafe._worker.preload"])
    return context


def _start(
    context: Any,
    spec: RankSpec,
    lifeline_read: int,
    call_file: int,
    handles: tuple[object, ...],
    *,
    daemon: bool,
) -> Worker:
    report_read, report_write = os.pipe()
    try:
        process = context.Process(
            target=run_rank,
            args=(
                spec,
                InheritedFd(report_write),
                InheritedFd(lifeline_read),
                InheritedFd(call_file),
                handles,
            ),
            name=f"ddpsafe-rank-{spec.world.rank}",
            daemon=daemon,
        )
        process.start()
    except BaseException:
        os.close(report_read)
        raise
    finally:
        os.close(report_write)
    return Worker(spec, process, report_read)


def _protect(guard: Guard, worker: Worker) -> None:
    if worker.identity is not None:
        guard.protect(worker.identity)


@contextlib.contextmanager
def _unnamed_file(data: bytes) -> Iterator[int]:
    """Hold the call in a file without a name.

    Through the process' own pipe it would go rank by rank, each start waiting until that rank has
    imported the script.
    """
    with tempfile.TemporaryFile(prefix="ddpsafe-") as file:
        file.write(data)
        file.flush()
        yield file.fileno()


def _close_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.close()


def _not_started(started: int, wanted: int, exc: OSError) -> PreflightError:
    what = f"rank {started} of {wanted} (counted from 0) could not be started: {exc}."
    cause = "a limit of this machine: processes (ulimit -u), open files (ulimit -n), memory, disk."
    fix = "raise the limit, or start fewer ranks. The ranks started before were ended."
    return PreflightError(explain(what, cause=cause, fix=fix))
