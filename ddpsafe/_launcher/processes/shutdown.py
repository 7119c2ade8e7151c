"""Ending ranks: SIGTERM, grace, SIGKILL, the whole tree, always reaped, always bounded."""

from __future__ import annotations

import contextlib
import logging
import shutil
import signal
import time
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from ddpsafe import _gpus
from ddpsafe._clock import Deadline
from ddpsafe._errors import ranks_text
from ddpsafe._launcher.processes.descendants import is_in_kernel, kill_members
from ddpsafe._logging import get_logger
from ddpsafe._stdlib_private import helpers_folder
from ddpsafe._wire.spec import semaphore_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpsafe._launcher.processes.rank_process import Worker


logger = get_logger(__name__)

_SEMAPHORES: Final = Path("/dev/shm")  # noqa: S108 - where glibc keeps them, on Linux


def remove_semaphores(launch_id: str) -> None:
    """Remove the named semaphores of a launch whose ranks have all ended; on Linux only.

    Queues and events of a DataLoader are such semaphores. A rank that is killed leaves them to the
    resource tracker, which lives as long as the launcher's process: too long for one that launches
    again and again.
    """
    for name in unlink_semaphores(launch_id):
        # Or it would warn of them, and try to remove them, when this process ends.
        with contextlib.suppress(OSError):
            resource_tracker.unregister(name, "semaphore")


def unlink_semaphores(launch_id: str) -> list[str]:
    """Remove the files of a launch's semaphores; return the names they had."""
    removed = []
    prefix = semaphore_prefix(launch_id)
    for path in _SEMAPHORES.glob(f"sem.{prefix.removeprefix('/')}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append("/" + path.name.removeprefix("sem."))
    return removed


def remove_helpers_folder() -> None:
    """Remove the fork server's folder: a process that is ended by a signal does not do so itself."""
    folder = helpers_folder()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


_KILL_WAIT = timedelta(seconds=5)
# The driver gives memory back as the process ends: kernels that spin, pinned and shared memory.
_KILL_WAIT_ON_GPU = timedelta(seconds=60)
_MEMORY_WAIT = timedelta(seconds=30)
_LOOK = timedelta(seconds=1)
_LEFTOVERS_S = 1.0
_LONGEST_WAIT_S = 60.0  # poll takes at most 24 days, a deadline may be never


def end_workers(workers: Sequence[Worker], *, grace: timedelta, launch_id: str) -> None:
    """End the ranks that are left and everything they started.

    Args:
        workers: The ranks of the attempt.
        grace: How long a rank may take to end by SIGTERM.
        launch_id: Marks the processes of this launch.
    """
    if workers and all(worker.is_swept for worker in workers):
        return
    started_ns = time.monotonic_ns()
    for worker in workers:
        worker.note_teardown(started_ns)
    _end(workers, signal.SIGTERM, Deadline.after(grace))
    stubborn = [worker.rank for worker in workers if worker.alive]
    if stubborn:
        logger.warning(
            "%s ignored SIGTERM for %.1f s; sending SIGKILL",
            ranks_text(stubborn),
            grace.total_seconds(),
        )
    _kill(workers)
    immortal = [worker for worker in workers if worker.alive]
    for worker in immortal:
        logger.error(
            "rank %d (pid %s) did not end after SIGKILL: it is waiting inside the kernel for a disk "
            "or a device",
            worker.rank,
            worker.pid,
        )
        worker.abandon()
    identities = [worker.identity for worker in workers if worker.identity is not None]
    leftovers = kill_members(identities, launch_id, within_s=_LEFTOVERS_S)
    if leftovers:
        logger.info("ended %d processes that ranks had left behind", len(leftovers))
    # The driver takes its time to give back what ranks that were ended had on their GPUs.
    pids = [each.pid for each in workers if each.spec.device != "cpu" and each.exitcode != 0]
    waiting = Deadline.after(_MEMORY_WAIT)
    is_free = _gpus.wait_for_memory([pid for pid in pids if pid is not None], waiting)
    if not is_free or waiting.waited_s() > _LOOK.total_seconds():
        logger.log(
            logging.INFO if is_free else logging.WARNING,
            "%.1f s after the ranks ended, the memory of their GPUs is %s",
            waiting.waited_s(),
            "free" if is_free else "still in use; the next attempt may run out of it (nvidia-smi)",
        )
    remove_semaphores(launch_id)
    for worker in workers:
        worker.note_swept()


def _end(workers: Sequence[Worker], signum: signal.Signals, deadline: Deadline) -> None:
    note_ends(workers)
    for worker in workers:
        worker.end(signum)
    await_ends(workers, deadline)


def note_ends(workers: Sequence[Worker]) -> None:
    """Take note of those that have ended by themselves: that is evidence, and not our doing."""
    seen_ns = time.monotonic_ns()
    for worker in workers:
        if worker.alive and wait([worker.end_handle()], 0):
            worker.note_end(seen_ns)


def _kill(workers: Sequence[Worker]) -> None:
    """Send SIGKILL; wait long for those that have much memory to give back, not for a disk."""
    on_gpu = any(worker.alive and worker.spec.device != "cpu" for worker in workers)
    deadline = Deadline.after(_KILL_WAIT_ON_GPU if on_gpu else _KILL_WAIT)
    _end(workers, signal.SIGKILL, Deadline.after(_LOOK))
    # Who waits for a disk or a device, as when its state was asked, does not end yet.
    if not all(
        worker.reading is not None
        and worker.reading.state == psutil.STATUS_DISK_SLEEP
        and is_in_kernel(worker.pid)
        for worker in workers
        if worker.alive
    ):
        await_ends(workers, deadline)


def await_ends(workers: Sequence[Worker], deadline: Deadline) -> None:
    """Wait until all have ended or the deadline has passed, draining their reports."""
    while alive := [worker for worker in workers if worker.alive]:
        handles = [worker.end_handle() for worker in alive]
        handles += [worker.receiver.fileno() for worker in alive if not worker.receiver.closed]
        wait(handles, min(deadline.remaining_s(), _LONGEST_WAIT_S))
        for worker in alive:
            worker.take_reports()
        note_ends(alive)
        if deadline.expired():
            return
