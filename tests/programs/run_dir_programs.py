"""Ranks whose run directory fails: its disk is full, or it is removed; run by test_run_dir.py."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

from exception_programs import raise_own_error
from hang_programs import sleep
from training_programs import average_gradients, mark

if TYPE_CHECKING:
    from pathlib import Path

    from ddpsafe import RankContext


def print_for_ever(ctx: RankContext, folder: Path) -> None:
    """Print on rank 1 until the disk is full."""
    average_gradients()
    while ctx.rank == 1:
        mark(folder)
        print("x" * 1_000)
    average_gradients()


def fill_and_fail(ctx: RankContext, folder: Path, filler: Path) -> None:
    """Fill the disk of the run directory, and fail."""
    average_gradients()
    if ctx.rank == 1:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"x" * 512):
                pass
        mark(folder)
        raise_own_error(folder)
    average_gradients()


def remove_run_dir(ctx: RankContext, folder: Path, how: str) -> str:
    """Remove the run directory on rank 1, and continue, raise or hang."""
    average_gradients()
    if ctx.rank == 1:
        assert ctx.run_dir is not None
        shutil.rmtree(ctx.run_dir)
        mark(folder)
        if how == "raise":
            raise_own_error(folder)
        if how == "hang":
            sleep(folder)
    print("to whom it may concern")
    average_gradients()
    return "done"
