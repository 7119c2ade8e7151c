"""Ranks whose launcher is suspended; run by tests/faults/test_launcher_suspended.py."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

import torch
import torch.distributed as dist
from orphan_programs import wait_for
from stop_programs import STEP_S
from training_programs import average_gradients

from ddpsafe import RankContext


class Loading:
    """An argument that loads until the test makes a file."""

    def __init__(self, folder: Path) -> None:
        """Load at once in the caller."""
        self.folder = folder

    def __setstate__(self, state: dict[str, Path]) -> None:
        """Wait for the test's file."""
        self.__dict__.update(state)
        (self.folder / f"ready-{os.getpid()}").touch()
        wait_for(self.folder / "go")

    def __call__(self) -> None:
        """Do nothing more."""


class StopBetweenStarts:
    """Stands for stdout in the launcher, which flushes it before it starts each rank."""

    def __init__(self, stream: TextIO) -> None:
        """Stop nothing yet."""
        self._stream = stream
        self._has_stopped = False

    def flush(self) -> None:
        """Suspend this process after it has started one rank, before the next one."""
        self._stream.flush()
        if len(multiprocessing.active_children()) == 1 and not self._has_stopped:
            self._has_stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)

    def __getattr__(self, name: str) -> object:
        """Behave as the stream otherwise."""
        return getattr(self._stream, name)


class Talking:
    """Make collectives, but no optimizer step, until the test makes a file."""

    def __init__(self, folder: Path) -> None:
        """Keep the folder."""
        self.folder = folder

    def __call__(self) -> None:
        """Let the ranks agree on the end, so that none is left in a collective."""
        has_ended = torch.zeros(1)
        while not has_ended:
            time.sleep(STEP_S)
            average_gradients()
            (self.folder / f"ready-{os.getpid()}").touch()
            has_ended += (self.folder / "go").exists()
            dist.all_reduce(has_ended)


class Leaving:
    """Return at once, with a thread that runs until the test makes a file."""

    def __init__(self, folder: Path) -> None:
        """Keep the folder."""
        self.folder = folder

    def __call__(self) -> None:
        """Start the thread, which reports that the main one has returned."""
        threading.Thread(target=self._last).start()

    def _last(self) -> None:
        (self.folder / f"ready-{os.getpid()}").touch()
        wait_for(self.folder / "go")


CALLS: Final[dict[str, Callable[[Path], Callable[[], None]]]] = {
    "start": Loading,
    "progress": Talking,
    "finish": Leaving,
}


def run(_ctx: RankContext, call: Callable[[], None]) -> str:
    """Call the argument."""
    call()
    return "went"


def save_slowly(ctx: RankContext, folder: Path) -> None:
    """Stop when asked to, and save until the test makes a file."""
    while not ctx.stop_requested():
        time.sleep(STEP_S)
        (folder / f"ready-{ctx.rank}").touch()
    wait_for(folder / "go")
