"""Ending ranks and all that they started: SIGTERM, grace, SIGKILL, reaped within bounded time."""

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
from ddpsafe._launcher.processes.descendants import (
    CLEAN_UP_S,
    describe_program,
    is_in_kernel,
    kill_members,
    reap_orphans,
)
from ddpsafe._logging import get_logger
from ddpsafe._stdlib_private import helpers_folder
from ddpsafe._text import ranks_text
from ddpsafe._wire.spec import semaphore_prefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpsafe._launcher.processes.rank_process import RankProcess


logger = get_logger(__name__)

_HELPERS: Final = ("multiprocessing.", "/torch/_inductor/", *CLEAN_UP_S)
"""Parts of the command lines of processes that libraries start for themselves, and end late."""
_SHOWN_PROGRAMS: Final = 4

_SEMAPHORES: Final = Path("/dev/shm")  # noqa: S108 - where glibc keeps them, on Linux


def remove_semaphores(launch_id: str) -> None:
    """Remove the named semaphores of a launch whose ranks have all ended; on Linux only.

    The queues and events of a DataLoader use them. A rank that is killed leaves them to Python's
    resource tracker, which removes them only when the launcher's process ends: too late for a
    process that launches again and again.
    """
    for name in unlink_semaphores(launch_id):
        # Else the tracker would warn about them, and try to remove them, when this process ends.
        with contextlib.suppress(OSError):
            resource_tracker.unregister(name, "semaphore")


def unlink_semaphores(launch_id: str) -> list[str]:
    """Remove the files of a launch's semaphores; return their names."""
    removed = []
    prefix = semaphore_prefix(launch_id)
    for path in _SEMAPHORES.glob(f"sem.{prefix.removeprefix('/')}-*"):
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append("/" + path.name.removeprefix("sem."))
    return removed


def remove_helpers_folder() -> None:
    """Remove the fork server's folder, which Python does not do in a process that a signal ends."""
    folder = helpers_folder()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


_KILL_WAIT = timedelta(seconds=5)
# The driver frees memory while the process ends, which takes long if kernels spin, and for pinned and
# shared memory.
_KILL_WAIT_ON_GPU = timedelta(seconds=60)
_MEMORY_WAIT = timedelta(seconds=30)
_LOOK = timedelta(seconds=1)
_LEFTOVERS_S = 1.0
_LONGEST_WAIT_S = 60.0  # poll() accepts at most 24 days, and a deadline may be infinite


def end_processes(processes: Sequence[RankProcess], *, grace: timedelta, launch_id: str) -> None:
    """End the ranks that still run, and everything that any rank has started.

    `grace` is how long a rank may take to end after SIGTERM.
    """
    if processes and all(process.is_swept for process in processes):
        return
    started_ns = time.monotonic_ns()
    for process in processes:
        process.note_teardown(started_ns)
    _end(processes, signal.SIGTERM, Deadline.after(grace / 2))
    for process in processes:
        if process.alive and process.failed:  # its threads or exit functions still run
            process.ask_threads()
    await_ends(processes, Deadline.after(grace / 2))
    stubborn = [process for process in processes if process.alive]
    if stubborn:
        for process in stubborn:
            process.take_reports()
        work = [
            f"; rank {process.rank} waits for {process.living_threads}"
            for process in stubborn
            if process.failed and process.living_threads is not None
        ]
        logger.warning(
            "%s still %s %.1f s after SIGTERM (timeouts.grace)%s; sending SIGKILL",
            ranks_text([process.rank for process in stubborn]),
            "runs" if len(stubborn) == 1 else "run",
            grace.total_seconds(),
            "".join(work),
        )
    _kill(processes)
    immortal = [process for process in processes if process.alive]
    for process in immortal:
        logger.error(
            "rank %d (pid %s) did not end after SIGKILL: it is waiting inside the kernel for a disk "
            "or a device",
            process.rank,
            process.pid,
        )
        process.abandon()
    identities = [process.identity for process in processes if process.identity is not None]
    leftovers = kill_members(identities, launch_id, within_s=_LEFTOVERS_S)
    if leftovers:
        logger.info("ended %d processes that ranks had left behind", len(leftovers))
    programs = [
        describe_program(process.pid, command)
        for process, command in leftovers.items()
        if command and not any(part in command for part in _HELPERS)
    ]
    if programs and all(process.returned is not None for process in processes):
        logger.warning(
            "all ranks have returned, so what they had left running was ended: %s; wait for it in the rank "
            "that has started it",
            ", ".join(programs[:_SHOWN_PROGRAMS]),
        )
    # The driver may free the GPU memory of ranks that were ended only some time afterwards.
    pids = [
        process.pid
        for process in processes
        if process.spec.device != "cpu" and process.exitcode != 0
    ]
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
    reap_orphans()
    for process in processes:
        process.note_swept()


def _end(processes: Sequence[RankProcess], signum: signal.Signals, deadline: Deadline) -> None:
    note_ends(processes)
    for process in processes:
        process.end(signum)
    await_ends(processes, deadline)


def note_ends(processes: Sequence[RankProcess]) -> None:
    """Record which ranks have ended; before the launcher ends ranks, each of those is evidence."""
    seen_ns = time.monotonic_ns()
    for process in processes:
        if process.alive and wait([process.end_handle()], 0):
            process.note_end(seen_ns)


def _kill(processes: Sequence[RankProcess]) -> None:
    """Send SIGKILL; wait long for ranks on GPUs, but not for ranks that wait for a disk or a device."""
    on_gpu = any(process.alive and process.spec.device != "cpu" for process in processes)
    deadline = Deadline.after(_KILL_WAIT_ON_GPU if on_gpu else _KILL_WAIT)
    _end(processes, signal.SIGKILL, Deadline.after(_LOOK))
    # A rank that already waited for a disk or a device when it was asked, and still does, will not
    # end soon.
    if not all(
        process.reading is not None
        and process.reading.state == psutil.STATUS_DISK_SLEEP
        and is_in_kernel(process.pid)
        for process in processes
        if process.alive
    ):
        await_ends(processes, deadline)


def await_ends(processes: Sequence[RankProcess], deadline: Deadline) -> None:
    """Wait until all have ended or the deadline has passed, and read their reports meanwhile."""
    while alive := [process for process in processes if process.alive]:
        handles = [process.end_handle() for process in alive]
        handles += [process.receiver.fileno() for process in alive if not process.receiver.closed]
        wait(handles, min(deadline.remaining_s(), _LONGEST_WAIT_S))
        for process in alive:
            process.take_reports()
        note_ends(alive)
        if deadline.expired():
            return
