"""Ranks that die: they exit, are killed, or run out of memory."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from typing import NoReturn

import torch

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
