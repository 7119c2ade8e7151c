"""Rank functions that break what the launcher relies on, and ranks that do not exit."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, NoReturn

from exception_programs import raise_own_error
from hang_programs import sleep
from torch.utils.data import DataLoader
from training_programs import mark

import ddpsafe
from ddpsafe import RankContext


def become_another_program(_folder: Path) -> NoReturn:
    """Replace Python, and every signal handler with it."""
    os.execv("/bin/sleep", ["sleep", "300"])


def reset_signals_and_sleep(folder: Path) -> None:
    """Set all signals to their defaults, as code that prepares an exec does."""
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(signum) is not signal.SIG_DFL or signum > signal.SIGRTMIN:
            signal.signal(signum, signal.SIG_DFL)
    sleep(folder)


def fail_before_the_group(
    rank: int, _world_size: int, folder: Path, fault: Callable[[Path], None]
) -> None:
    """Meet the fault in rank 1 before there is a group, because gloo aborts without descriptors."""
    if rank == 1:
        mark(folder)
        fault(folder)
    sleep(folder)


def fail_without_descriptors(folder: Path) -> None:
    """Close all descriptors, as code that makes a daemon does, and raise."""
    os.closerange(3, 1000)
    raise_own_error(folder)


def fail_with_files_for_pipes(folder: Path) -> None:
    """Close every pipe, and open files that get their numbers."""
    pipes = [fd for fd in range(1000) if _is_pipe(fd)]
    for number, fd in enumerate(pipes):
        own = os.open(folder / f"own-{number}", os.O_RDWR | os.O_CREAT, 0o600)
        os.dup2(own, fd)
    raise_own_error(folder)


def _is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False


class SlowlyToldError(ValueError):
    """An error that takes so long to describe that a signal arrives."""

    def __str__(self) -> str:
        """Start the alarms, and return the text."""
        signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
        return super().__str__()


def fail_under_alarms(_folder: Path) -> None:
    """Raise an error that is reported under signals whose handler raises, every 0.1 ms."""

    def interrupt(*_: object) -> None:
        msg = "raised by a signal handler"
        raise RuntimeError(msg)

    signal.signal(signal.SIGALRM, interrupt)
    msg = "bad batch"
    raise SlowlyToldError(msg)


def leave(ctx: RankContext, folder: Path, what: str) -> int:
    """Return in rank 1 with a thread that sleeps, or a function for the exit that takes long or aborts."""
    if ctx.rank == 1:
        mark(folder)
        if what == "a thread":
            threading.Thread(target=_work_on, name="uploader").start()
        elif what == "an exit handler":
            atexit.register(time.sleep, 300)
        else:  # as the end of a native library may
            atexit.register(os.abort)
    return ctx.rank


class Slow:
    """A dataset that hangs after its first sample."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        time.sleep(600 if index else 0)
        return index


def leave_loader_in_cycle(_ctx: RankContext, _folder: Path) -> None:
    """Leave an iterator that only the garbage collector ends, which takes torch 5 s for such a worker."""
    batches: Any = iter(DataLoader(Slow(), num_workers=1))
    next(batches)
    batches.own = batches


def leave_work(ctx: RankContext, folder: Path, queue: Queue[bytes]) -> int:
    """Return in rank 1 while a thread, an executor, an exit function, a process and a queue have work."""
    if ctx.rank == 1:
        threading.Thread(target=_save_later, args=[folder / "thread"], name="uploader").start()
        ThreadPoolExecutor(1).submit(_save_later, folder / "executor")
        atexit.register(_save_later, folder / "exit")
        multiprocessing.get_context("fork").Process(
            target=_save_later, args=[folder / "process"]
        ).start()
        queue.put(b"x" * 1_000_000)
    return ctx.rank


def _save_later(path: Path) -> None:
    time.sleep(2)
    path.touch()


def leave_a_queue(rank: int, _world_size: int, folder: Path, queue: Queue[bytes]) -> None:
    """Return while the caller has not read the queue, which holds more than a pipe does."""
    mark(folder)
    queue.put(bytes([rank]) * 1_000_000)


def die_with_sockets(ctx: RankContext) -> None:
    """Kill rank 1 while it and its helper have sockets of `multiprocessing`."""
    with multiprocessing.get_context("spawn").Manager() as manager:
        assert manager.list([1])[0] == 1
        if ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)


def hang_in_teardown(ctx: RankContext, folder: Path) -> int:
    """Return, and then hang in rank 1 while the process group is destroyed."""
    if ctx.rank == 1:
        import torch.distributed as dist

        dist.destroy_process_group = lambda *_: time.sleep(600)
        mark(folder)
    return ctx.rank


def _work_on() -> None:
    time.sleep(300)  # still here


def meet_in_time(ctx: RankContext) -> int:
    """Enter barriers with timeouts written in every way."""
    ctx.barrier(timeout=30)
    ctx.barrier("half", 30.5)
    ctx.barrier("text", "2min")
    ddpsafe.current().barrier(timeout=timedelta(seconds=30))
    return ctx.rank


def meet_too_soon(ctx: RankContext, folder: Path) -> None:
    """Let rank 1 miss a barrier with a timeout of half a second."""
    if ctx.rank == 1:
        mark(folder)
        sleep(folder)
    ctx.barrier("soon", timeout="500ms")


class Exiting:
    """A value that ends the process that loads it."""

    def __setstate__(self, state: object) -> None:
        sys.exit(3)

    def __getstate__(self) -> object:
        return {"any": "thing"}


def return_exiting(_ctx: RankContext) -> Exiting:
    """Return a value that ends the process that loads it."""
    return Exiting()


def die_later(ctx: RankContext, folder: Path, where: str, how: str) -> int:
    """Return; rank 1 then dies in a thread, or in an exit function, that still works."""

    def work() -> None:
        (folder / "fault").write_text(repr(time.monotonic()))
        if how == "_exit":
            os._exit(9)
        os.kill(os.getpid(), getattr(signal, how))

    def work_at_the_end() -> None:
        threading.main_thread().join()  # it waits for this thread by now
        work()

    if ctx.rank == 1 and where == "thread":
        threading.Thread(target=work_at_the_end).start()
    elif ctx.rank == 1:
        atexit.register(work)
    return ctx.rank
