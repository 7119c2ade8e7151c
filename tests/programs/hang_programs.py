"""Ranks that hang in different ways, and ranks that are only slow."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from training_programs import average_gradients, mark

from ddpsafe import RankContext

FOREVER_S = 600
"""Longer than any test: a rank that waits this long must be ended."""


def stop(_folder: Path) -> None:
    """Be frozen, as by a debugger or Ctrl-Z."""
    os.kill(os.getpid(), signal.SIGSTOP)  # stuck here


def sleep(_folder: Path) -> None:
    """Sleep in Python."""
    time.sleep(FOREVER_S)  # stuck here


def be_busy(_folder: Path) -> None:
    """Compute in Python forever."""
    ends = time.monotonic() + FOREVER_S
    while time.monotonic() < ends:  # stuck here
        pass  # stuck here


def hold_the_gil(_folder: Path) -> None:
    """Compute in C without ever letting another Python thread run.

    A sleep would not do: the signal that asks for the stacks interrupts it.
    """
    digits = 9**400_000
    pow(digits, digits, 9**400_001 + 2)  # stuck here


def read_from_nobody(folder: Path) -> None:
    """Read from a FIFO that has no writer, as from a mount that hangs."""
    fifo = folder / f"fifo-{os.getpid()}"
    os.mkfifo(fifo)
    fifo.read_bytes()  # stuck here


DISK: Final = "disk"


def write_to_a_frozen_disk(folder: Path) -> None:
    """Write to a frozen disk, which blocks in the kernel until it is thawed, as on a dead server."""
    (folder / DISK / f"file-{os.getpid()}").write_bytes(b"x")  # stuck here


def wait_for_each_other(_folder: Path) -> None:
    """Acquire two locks in opposite orders in two threads."""
    first, second = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            first.acquire()

    threading.Thread(target=other, daemon=True).start()
    with first:
        both.wait()
        second.acquire()  # stuck here


def hold_a_lock_in_a_collective(ctx: RankContext, folder: Path, then: str) -> None:
    """Hold a lock on rank 0 while it waits for rank 1, which waits for the lock and continues with it."""
    average_gradients()
    with (folder / "lock").open("w") as file:
        if ctx.rank == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
            ctx.barrier()
            mark(folder)
            average_gradients()
        else:
            ctx.barrier()
            fcntl.flock(file, fcntl.LOCK_EX)  # stuck here
    if ctx.rank == 1 and then == "enters the collective":
        average_gradients()
    elif ctx.rank == 1 and then == "enters another one":
        dist.barrier()


def sleep_before_a_barrier(ctx: RankContext, folder: Path) -> None:
    """Let rank 1 sleep while the others wait for it at a barrier of ddpsafe."""
    if ctx.rank == 1:
        mark(folder)
        sleep(folder)
    ctx.barrier("after the epoch")


def sleep_everywhere(ctx: RankContext, folder: Path) -> None:
    """Let all ranks sleep, so that no collective can time out."""
    average_gradients()
    if ctx.is_main:
        mark(folder)
    sleep(folder)


# Slow ranks.


def step_slowly(
    ctx: RankContext, _folder: Path, how: str, takes_s: float, optimizer: Any = None
) -> str:
    """Make steps of a third of a second for some time."""
    ends = time.monotonic() + takes_s
    while time.monotonic() < ends:
        if how == "optimizer":
            optimizer.step()
        elif how == "collective" and ctx.is_main:
            average_gradients()
        time.sleep(0.3)
    return "done"


def count_reads(doing: Callable[[], object]) -> int:
    """Return how often torch's flight recorder is read during a call, which interrupts training."""
    import torch._C._distributed_c10d as c10d  # there is no public way

    reads = 0
    dump = c10d._dump_fr_trace_json

    def count(*args: Any, **options: Any) -> Any:
        nonlocal reads
        reads += "backend" not in options  # else of another recorder, which is empty
        return dump(*args, **options)

    c10d._dump_fr_trace_json = count
    doing()
    return reads


def count_reads_in_training(ctx: RankContext, folder: Path, takes_s: float, optimizer: Any) -> int:
    """Make steps for some time; return how often the rank was asked for its position."""
    return count_reads(lambda: step_slowly(ctx, folder, "optimizer", takes_s, optimizer))


def step_then_stay(ctx: RankContext, folder: Path, optimizer: Any) -> None:
    """Make steps for some time and then hang; in a second attempt, hang before the first step."""
    until = time.monotonic() + 4
    while ctx.attempt == 1 and time.monotonic() < until:
        optimizer.step()
        time.sleep(0.2)
    if ctx.attempt == 1 and (folder / "fails").exists():
        raise ConnectionError
    mark(folder)
    time.sleep(FOREVER_S)  # stuck here
