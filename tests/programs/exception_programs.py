"""Ranks that raise, exit, are killed, or run out of memory."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import scripts
import torch
import torch.distributed as dist
from torch import nn
from training_programs import FAULT_STEP, STEPS, average_gradients, mark, setup

from ddpsafe import RankContext


class LostSampleError(Exception):
    """An error of the user, with an attribute that has to be kept."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message, index)
        self.index = index


def raise_own_error(_folder: Path) -> NoReturn:
    """Raise as a broken sample does."""
    msg = "sample is broken"
    raise LostSampleError(msg, 17)  # stuck here


def raise_before_the_group(rank: int, world_size: int, folder: Path) -> None:
    """Fail while the others already wait in `setup`."""
    if rank == 1:
        mark(folder)
        raise_own_error(folder)
    setup(rank, world_size)


def raise_in_finally(ctx: RankContext, folder: Path) -> None:
    """Fail in the block that should clean up."""
    try:
        average_gradients()
    finally:
        if ctx.rank == 1:
            mark(folder)
            raise_own_error(folder)
    average_gradients()


def raise_while_saving(ctx: RankContext, folder: Path) -> None:
    """Let rank 0 save to a missing directory while the others wait at a barrier."""
    average_gradients()
    if ctx.is_main:
        mark(folder)
        torch.save({"step": 1}, folder / "missing" / "model.pt")
    dist.barrier()


def raise_on_all(ctx: RankContext, folder: Path) -> None:
    """Fail on every rank, rank 1 first."""
    average_gradients()
    if ctx.rank != 1:
        scripts.wait_until((folder / "fault").exists)
        time.sleep(0.15)  # until rank 1 has raised, on a busy machine
    else:
        mark(folder)
    raise_own_error(folder)


def train_a_model(ctx: RankContext, folder: Path, culprit: int) -> float:
    """Train with DistributedDataParallel; rank `culprit` fails in its third step."""
    model = ctx.wrap(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if step == FAULT_STEP and ctx.rank == culprit:
            mark(folder)
            raise_own_error(folder)
        optimizer.zero_grad()
        loss = model(torch.ones(8, 4)).sum()
        loss.backward()
        optimizer.step()
    return float(loss)


# Errors that are hard to pickle.


class LockedError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class KeywordError(Exception):
    """An exception that can be pickled but not loaded."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"keyword code {code}")


class BombError(Exception):
    """An exception that ends the process that loads it."""

    def __reduce__(self) -> tuple[object, ...]:
        """Exit the process that unpickles it."""
        return (sys.exit, (99,))


class RudeError(BaseException):
    """Not an `Exception`: ``except Exception`` does not catch it."""


def raise_locked(_folder: Path) -> NoReturn:
    """Raise an error that cannot be pickled."""
    msg = "locked text"
    raise LockedError(msg)


def raise_keyword(_folder: Path) -> NoReturn:
    """Raise an error that cannot be loaded."""
    raise KeywordError(code=7)


def raise_bomb(_folder: Path) -> NoReturn:
    """Raise an error that ends the process that loads it."""
    msg = "bomb text"
    raise BombError(msg)


def raise_large(_folder: Path) -> NoReturn:
    """Raise 50 MB of text."""
    msg = "large text " + "x" * 50_000_000 + " end of text"
    raise ValueError(msg)


def raise_rude(_folder: Path) -> NoReturn:
    """Raise a bare `BaseException`."""
    msg = "rude text"
    raise RudeError(msg)


class NamelessClass(type):
    """A class of classes that have no name."""

    __name__ = property(lambda _: 1 // 0)  # type: ignore[assignment]


class NamelessError(Exception, metaclass=NamelessClass):
    """An error whose class has no name."""


class SealedError(Exception):
    """An error of which no attribute can be read."""

    def __getattribute__(self, name: str) -> object:
        raise KeyError(name)


class UntracedError(Exception):
    """An error that takes no traceback."""

    def with_traceback(self, tb: object) -> NoReturn:
        """Raise, which no exception of Python's does."""
        raise KeyError(tb)


class SealedExit(SystemExit):
    """An exit of which no attribute can be read."""

    def __getattribute__(self, name: str) -> object:
        raise KeyError(name)


def raise_untraced(_folder: Path) -> NoReturn:
    """Raise an error that takes no traceback."""
    msg = "untraced text"
    raise UntracedError(msg)


def exit_sealed(_folder: Path) -> NoReturn:
    """Exit with an exception of which no attribute can be read."""
    raise SealedExit(7)


def raise_nameless(_folder: Path) -> NoReturn:
    """Raise an error whose class has no name."""
    raise NamelessError


def raise_sealed(_folder: Path) -> NoReturn:
    """Raise an error of which no attribute can be read."""
    raise SealedError


def raise_chained(_folder: Path) -> NoReturn:
    """Raise one error from another."""
    try:
        _ = {}["key of the first"]
    except KeyError as exc:
        msg = "second text"
        raise ValueError(msg) from exc


def raise_group(_folder: Path) -> NoReturn:
    """Raise several errors at once."""
    parts = [ValueError("left part"), TypeError("right part")]
    raise ExceptionGroup("both parts", parts)  # noqa: F821 - Python 3.11 has it


# Ranks that die.


# A rank exits.


def exit_well(_folder: Path) -> NoReturn:
    """Ask for exit code 0 in the middle of the work."""
    sys.exit(0)


def exit_badly(_folder: Path) -> NoReturn:
    """Ask for exit code 3."""
    sys.exit(3)


def exit_as_os_system(_folder: Path) -> NoReturn:
    """Exit with a wait status, of which the system keeps eight bits: those of a success."""
    sys.exit(os.system("exit 1"))


def exit_below_zero(_folder: Path) -> NoReturn:
    """Ask for exit code -1, which the system makes 255."""
    sys.exit(-1)


def vanish_well(_folder: Path) -> NoReturn:
    """Exit without a report, with code 0."""
    os._exit(0)


def vanish_badly(_folder: Path) -> NoReturn:
    """Exit without a report, with code 7."""
    os._exit(7)


def be_interrupted(_folder: Path) -> NoReturn:
    """Raise KeyboardInterrupt, as a Ctrl-C that reaches one rank does."""
    raise KeyboardInterrupt


# A rank is killed.


def die_by_kill(_folder: Path) -> None:
    """Be killed by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_by_terminate(_folder: Path) -> None:
    """Be ended by SIGTERM, as by a `kill` from outside."""
    os.kill(os.getpid(), signal.SIGTERM)


def die_by_null_pointer(_folder: Path) -> None:
    """Read unmapped memory: a real SIGSEGV."""
    ctypes.string_at(0)  # stuck here


def use_the_processor(ctx: RankContext) -> None:
    """Compute in rank 1 until a limit of processor time ends it; the other ranks wait."""
    while ctx.rank == 1:
        pass
    average_gradients()


def die_by_short_mapping(folder: Path) -> None:
    """Read beyond the end of a mapped file: a real SIGBUS, as with a full /dev/shm."""
    import mmap

    with (folder / "mapped").open("w+b") as file:
        file.truncate(2 * mmap.PAGESIZE)
        memory = mmap.mmap(file.fileno(), 2 * mmap.PAGESIZE)
        file.truncate(0)
        _ = memory[mmap.PAGESIZE]


def die_by_abort(_folder: Path) -> None:
    """Abort as a failed assertion in C does: a real SIGABRT."""
    ctypes.CDLL(None).abort()


# Memory runs out.


def outgrow_the_process(_folder: Path) -> None:
    """Request more memory than the process may have: Python's MemoryError."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20), hard))
    hoard: list[bytearray] = []
    while True:
        hoard.append(bytearray(64 << 20))


def outgrow_torch(_folder: Path) -> None:
    """Request too much memory from torch: a RuntimeError of its allocator."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (256 << 20), hard))
    torch.ones(1 << 30)


def outgrow_the_machine(_folder: Path) -> None:
    """Fill all the memory of a control group, until the kernel kills the rank.

    The amount is more than the group has, but safe for a machine without the group.
    """
    hoard = [bytearray(os.urandom(1) * (8 << 20)) for _ in range(256)]
    msg = f"{len(hoard)} times 8 MB were there"
    raise RuntimeError(msg)
