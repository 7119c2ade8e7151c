"""Turns "DataLoader worker exited unexpectedly" into which worker, where, why and what to do."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
import traceback
import weakref
from datetime import timedelta
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from ddpsafe._advice import ADVICE
from ddpsafe._clock import Deadline
from ddpsafe._errors import Explanation
from ddpsafe._host import read_limits
from ddpsafe._text import signal_name
from ddpsafe._torch_private import (
    dataset_behind,
    end_of_workers,
    find_awaited_worker,
    keeps_workers,
    worker_limit_s,
    workers_of,
)
from ddpsafe._wire.exception_facts import read_last_error
from ddpsafe.data._loader.machine_limits import SHARED_MEMORY, note_limits, shared_memory_bytes
from ddpsafe.data._replica import current_replica
from ddpsafe.data.errors import WorkerDiedError, WorkerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.process import BaseProcess
    from types import FrameType

    from ddpsafe.data._loader.reading import SharedProgress


_watched: weakref.WeakSet[Any] = weakref.WeakSet()


class _ExplainingHandler:
    """A SIGCHLD handler that explains what torch's handler raises."""

    def __init__(self, inner: Callable[[int, FrameType | None], object]) -> None:
        self._inner = inner

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._inner(number, frame)
        except RuntimeError as error:
            for iterator in list(_watched):
                explanation = iterator.explain(error)
                if explanation is not None and iterator.has_explained:
                    return  # torch's handler raises again whenever any child process ends
                if explanation is not None:
                    iterator.has_explained = True
                    raise explanation from (explanation.__cause__ or error)
            raise


def watch_workers(iterator: Any, inner: Any) -> None:
    """Explain the death of an iterator's workers, and end them when the iterator is dropped.

    ddpsafe's iterator makes the error for a dead worker with its ``explain(error)``; torch's (`inner`) owns
    the worker processes.
    """
    if not workers_of(inner):
        return
    _watched.add(iterator)
    if not keeps_workers(inner):
        # A traceback keeps the iterator in a reference cycle. The garbage collector would close
        # the workers' queues before the iterator, which then waits 5 s for each dead worker.
        util.Finalize(iterator, end_of_workers(inner))
    handler = signal.getsignal(signal.SIGCHLD)
    on_main_thread = threading.current_thread() is threading.main_thread()
    if on_main_thread and callable(handler) and not isinstance(handler, _ExplainingHandler):
        signal.signal(signal.SIGCHLD, _ExplainingHandler(handler))


# The sockets of a dying worker close before its exit code is known: how long to wait for that.
_EXIT_WAIT: Final = timedelta(seconds=1)

_CGROUP: Final = Path("/sys/fs/cgroup")


def explain_worker_error(
    error: Exception, iterator: object, progress: SharedProgress | None
) -> Exception | None:
    """Return what explains an error that a dead or timed-out worker caused; else ``None``."""
    if note_limits(error):
        return None
    workers = workers_of(iterator)
    kinds = (RuntimeError, OSError, EOFError)
    if progress is None or not workers or not isinstance(error, kinds):
        return None
    # torch prefixes an error that a worker raised: "Caught … in DataLoader worker process".
    if isinstance(error, WorkerDiedError) or str(error).startswith("Caught "):
        return None
    *_, (raising, _) = traceback.walk_tb(error.__traceback__)
    package = raising.f_globals.get("__name__", "").partition(".")[0]
    if not isinstance(error, RuntimeError) and package in {"multiprocessing", "torch"}:
        # torch fetches a batch's tensors through a socket of the worker. If that failed because
        # the worker is dying, its exit code is known shortly.
        for pause_s in Deadline.after(_EXIT_WAIT).pauses_s():
            if any(process.exitcode for process in workers):
                break
            time.sleep(pause_s)
    if isinstance(error.__cause__, WorkerDiedError):
        return error.__cause__
    dataset = dataset_behind(iterator)
    for worker, process in enumerate(workers):
        if process.exitcode not in {None, 0}:
            return _died(worker, process, progress, dataset)
    if str(error).startswith("DataLoader timed out after"):
        return _timed_out(iterator, progress, dataset)
    return None


def _died(
    worker: int, process: BaseProcess, progress: SharedProgress, dataset: object
) -> WorkerDiedError:
    replica = current_replica()
    exitcode = process.exitcode or 0
    sample = progress.describe(worker, dataset)
    reading = f" while it read {sample}" if sample else ""
    if not progress.has_begun(worker):
        reading = " before it read anything in this epoch"
    how = f"exited with code {exitcode}"
    if exitcode < 0:
        how = f"was killed by {signal_name(-exitcode)}"
    cause, fix, details = _why(exitcode)
    return WorkerDiedError(
        Explanation(
            f"DataLoader worker {worker} (pid {process.pid}) of rank {replica.rank} "
            f"(world_size {replica.num_replicas}) {how}{reading}.",
            cause=cause,
            fix=fix,
            details=details,
        ),
        rank=replica.rank,
        worker=worker,
        pid=process.pid,
        exitcode=exitcode,
        index=progress.reading(worker),
    )


def _timed_out(iterator: Any, progress: SharedProgress, dataset: object) -> WorkerTimeoutError:
    replica = current_replica()
    worker = find_awaited_worker(iterator)
    waited_s = worker_limit_s(iterator)
    late, sample = "a worker", ""
    if worker is not None:
        late = f"worker {worker} (pid {workers_of(iterator)[worker].pid})"
        sample = progress.describe(worker, dataset)
    reading = f" and is reading {sample}" if sample else ""
    return WorkerTimeoutError(
        Explanation(
            f"Rank {replica.rank} (world_size {replica.num_replicas}) received no batch within "
            f"timeout={waited_s:g} s: {late} has not delivered it{reading}.",
            cause="reading that sample hangs or is slow (a stalled mount, a lock held at the fork), "
            "or collating is.",
            fix="read that index alone with num_workers=0; raise timeout= if it is merely slow.",
        ),
        rank=replica.rank,
        worker=worker,
        index=None if worker is None else progress.reading(worker),
        timeout_s=waited_s,
    )


def _why(exitcode: int) -> tuple[str, str, list[str]]:
    """Return the likely cause, what to do, and how much of the exhausted resource is left."""
    if exitcode == -signal.SIGKILL:
        cause, fix = ADVICE["DS-END-sigkill"]
        fix = f"{fix.format(host=socket.gethostname())} Keep metadata in a PackedList."
        return cause, fix, [describe_memory()]
    if exitcode == -signal.SIGBUS:
        cause, fix = ADVICE["DS-MEM-shm"]
        cause = f"a mapped file was shortened, or {cause}"
        free, total = shared_memory_bytes()
        if free is None or total is None:
            return cause, fix, [f"{SHARED_MEMORY} does not exist."]
        sizes = f"{free / 2**20:.0f} MiB free of {total / 2**20:.0f} MiB"
        return cause, fix, [f"{SHARED_MEMORY} has {sizes}."]
    if -exitcode in {signal.SIGTERM, signal.SIGUSR1}:
        cause = (
            "another process sent it that signal; to end a job, schedulers send SIGTERM to all of its "
            "processes."
        )
        fix = "ask the job to stop instead: send the signal to the launcher, see ddpsafe.current().stop_requested()."
        return cause, fix, []
    if exitcode < 0:
        cause = "native code crashed; often a library or a handle that does not survive fork."
        fix = (
            "open resources in a ddpsafe.data.PerProcess, or multiprocessing_context='forkserver'."
        )
        return cause, fix, []
    cause = (
        "code in the worker called sys.exit() or os._exit(), or it could not start (with "
        "spawn or forkserver: a missing `if __name__ == '__main__':` guard)."
    )
    last_error = read_last_error()
    details = [last_error] if last_error else []
    return cause, "read the worker's own output above this error.", details


def describe_memory(*, cgroup: Path = _CGROUP) -> str:
    """Describe how much memory the machine has left, the container's limit, and the OOM killer's work.

    `cgroup` is the root of the processes' cgroups; in a container, the container's own.
    """
    parts = [f"the machine has {psutil.virtual_memory().available / 2**20:.0f} MiB available"]
    limit = read_limits().memory_bytes
    if limit is not None:
        parts.append(f"the container's limit is {limit / 2**20:.0f} MiB")
    # The machine's own root cgroup has no such file, so the count is always that of a cgroup.
    kills = 0
    with contextlib.suppress(OSError):
        events = (cgroup / "memory.events").read_text(encoding="ascii")
        kills = int(dict(line.split() for line in events.splitlines()).get("oom_kill", 0))
    if kills:
        processes = "1 process" if kills == 1 else f"{kills} processes"
        parts.append(f"the OOM killer has ended {processes} of this cgroup so far")
    return f"Memory: {'; '.join(parts)}."
