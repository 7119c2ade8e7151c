"""Ranks and child processes that would stay behind if the launcher did not end them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scripts
import torch
import torch.distributed as dist
from exception_programs import LostSampleError, raise_own_error, vanish_badly
from hang_programs import FOREVER_S, hold_the_gil, sleep
from leftovers import SHARED_MEMORY
from torch.utils.data import DataLoader
from training_programs import average_gradients, mark

from ddpsafe import RankContext

# Ranks that do not exit.


def ignore_terminate(ctx: RankContext, folder: Path) -> None:
    """Let rank 0 ignore SIGTERM, and rank 1 fail."""
    if ctx.rank != 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        average_gradients()
        sleep(folder)
    average_gradients()
    mark(folder)
    raise_own_error(folder)


def wait_for_go(ctx: RankContext, folder: Path) -> str:
    """Wait for a file that the test makes."""
    (folder / f"ready-{ctx.rank}").touch()
    wait_for(folder / "go")
    return "went"


def hold_a_semaphore(ctx: RankContext, folder: Path) -> None:
    """Wait while holding a named semaphore, as locks for spawned processes are."""
    lock = multiprocessing.get_context("spawn").Lock()
    (folder / f"ready-{ctx.rank}").touch()
    with lock:
        wait_for(folder / "go")


def become_another_user(ctx: RankContext, folder: Path) -> None:
    """Give up root's privileges, with a child that ignores signals, and hold the GIL."""
    child = os.fork()
    if not child:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        os.setuid(65534)
        time.sleep(FOREVER_S)
    (folder / f"pids-{ctx.rank}").write_text(f"{os.getpid()} {child}")
    (folder / f"ready-{ctx.rank}").touch()
    os.setuid(65534)
    hold_the_gil(folder)


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    scripts.wait_until(path.exists, within_s=120)


# Processes that ranks start.

_STUBBORN = (
    "import signal, sys, time\n"
    "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):\n"
    "    signal.signal(number, signal.SIG_IGN)\n"
    "print('up', flush=True)\n"
    f"time.sleep({FOREVER_S})\n"
)


def start_stubborn(*, own_session: bool) -> int:
    """Start a process that ignores every signal that can be ignored; return its pid."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _STUBBORN],
        stdout=subprocess.PIPE,
        start_new_session=own_session,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process.pid


def leave_children_and_fail(ctx: RankContext, folder: Path) -> None:
    """Start two stubborn processes on each rank, then let rank 1 fail."""
    pids = [start_stubborn(own_session=own) for own in (False, True)]
    (folder / f"children-{ctx.rank}").write_text(" ".join(map(str, pids)))
    ctx.barrier("all have children")
    if ctx.rank == 1:
        mark(folder)
        raise_own_error(folder)
    average_gradients()


def leave_children_and_return(ctx: RankContext, _folder: Path) -> list[int]:
    """Start two stubborn processes on each rank, and return their pids."""
    ctx.barrier("all are there")
    return [start_stubborn(own_session=own) for own in (False, True)]


class Numbers:
    """A dataset whose worker is killed at one sample."""

    def __init__(self, folder: Path, deadly: int | None) -> None:
        self.folder = folder
        self.deadly = deadly

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        """Return the index; at the deadly one, kill the process that asks."""
        if index == self.deadly:
            mark(self.folder)
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def lose_a_loader_worker(ctx: RankContext, folder: Path) -> None:
    """Read through a DataLoader whose worker dies on rank 1."""
    numbers: Any = Numbers(folder, 40 if ctx.rank == 1 else None)
    for _ in DataLoader(numbers, batch_size=8, num_workers=1):
        average_gradients()


class Ones:
    """A dataset of tensors, which a DataLoader's worker sends to its rank in shared memory."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a tensor."""
        return torch.ones(1000)


def share_as_files(ctx: RankContext, folder: Path, temporary: str, how: str) -> None:
    """Share tensors, also from a DataLoader's worker, as files of `/dev/shm`; then end in some way, or wait."""
    os.environ["TMPDIR"] = temporary  # of torch's process that is to remove the files, too
    torch.multiprocessing.set_sharing_strategy("file_system")
    ones: Any = Ones()
    loader = iter(DataLoader(ones, batch_size=8, num_workers=1, multiprocessing_context="fork"))
    kept = [next(loader), torch.ones(1000).share_memory_()]
    pids = [os.getpid(), *(worker.pid for worker in loader._workers)]
    files = [" ".join(each.name for each in SHARED_MEMORY.glob(f"torch_{pid}_*")) for pid in pids]
    assert all(files), files
    (folder / f"shared-{os.getpid()}").write_text(" ".join(files))
    (folder / f"pids-{ctx.rank}").write_text(" ".join(map(str, pids)))
    ctx.barrier("all have shared tensors")
    (folder / f"ready-{ctx.rank}").touch()
    if how == "wait":
        sleep(folder)
    if ctx.rank == 1 and how != "return":
        mark(folder)
        raise_own_error(folder) if how == "raise" else os.kill(os.getpid(), signal.SIGKILL)
    if how != "return":
        average_gradients()
    assert kept


def work_with_everything(ctx: RankContext, folder: Path, how: str) -> None:
    """Hold a DataLoader's worker and stubborn children, then wait in Python, in gloo or in C."""
    numbers: Any = Numbers(folder, None)
    # Forked, it is there at once; a rank's own start method would import torch once more.
    loader = iter(DataLoader(numbers, batch_size=8, num_workers=1, multiprocessing_context="fork"))
    next(loader)
    pids = [os.getpid(), *(start_stubborn(own_session=own) for own in (False, True))]
    pids += [worker.pid for worker in loader._workers]
    (folder / f"pids-{ctx.rank}.tmp").write_text(" ".join(map(str, pids)))
    (folder / f"pids-{ctx.rank}.tmp").rename(folder / f"pids-{ctx.rank}")
    ctx.barrier("all have children")
    wait_somewhere(ctx, folder, how)


def wait_somewhere(ctx: RankContext, folder: Path, how: str) -> None:
    """Wait in Python, in gloo, in C with the GIL held, or ignoring signals."""
    if how == "deaf":
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
    (folder / f"ready-{ctx.rank}").touch()
    if how == "gil":
        hold_the_gil(folder)
    if how != "gloo" or ctx.rank == 1:
        sleep(folder)
    average_gradients()


# Helpers that `multiprocessing` forks, which inherit the rank's pipes.


WORK_S = 2.0
"""How long the rank works while the others wait for it in a collective."""

IMPORT_S = 3.0
"""How long torch may take to create its first optimizer."""


def go_on_without_the_helper(ctx: RankContext, _folder: Path) -> int:
    """Let an optional helper fail in rank 1, which then continues and finishes."""
    if ctx.rank == 1:
        _run_helper(_fail_and_destroy)
        time.sleep(WORK_S)
    average_gradients()
    return ctx.rank


def vanish_after_the_helper(folder: Path) -> None:
    """Exit without a report; the only exception was a helper's."""
    _run_helper(_fail_and_destroy)
    vanish_badly(folder)


def fail_while_the_helper_trains(folder: Path) -> None:
    """Exit without a report while handling an exception, and while a forked helper makes steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # takes a second
    try:
        raise_own_error(folder)
    except LostSampleError:
        dist.destroy_process_group()
    _run_helper(optimizer.step)
    os._exit(7)


def _run_helper(work: Callable[[], object]) -> None:
    helper = multiprocessing.get_context("fork").Process(target=work)
    helper.start()
    helper.join()


def _fail_and_destroy() -> None:
    try:
        Path("/nope/eval.json").read_text(encoding="utf-8")
    except OSError:
        with contextlib.suppress(Exception):  # torch decides whether a fork may destroy it
            dist.destroy_process_group()
        raise
