"""Ranks whose run directory fails: its disk is full, or it is removed; run by test_run_dir.py."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from exception_programs import raise_own_error
from hang_programs import sleep
from scripts import wait_until
from torch.utils.data import DataLoader, Dataset
from training_programs import average_gradients, mark

from ddpsafe import RankContext
from ddpsafe._worker.rank import this_rank
from ddpsafe.checkpoint import Checkpointer

LINES: Final = 1_500
"""How many lines of 100 bytes `write_much` writes: more than the disk has room for."""


class PrintedItems(Dataset[int]):
    """A dataset whose workers print."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index >= len(self):
            raise IndexError
        print(f"worker {index}")
        return index


def write_much(ctx: RankContext, folder: Path) -> int:
    """Fill the disk of the log, then write in every way that programs do; train before, between and after."""
    average_gradients()
    for number in range(LINES):
        print(f"{number:099d}")
    ctx.barrier()
    mark(folder)
    subprocess.run(["sh", "-c", "echo of a program; echo of a program >&2"], check=True)
    sys.stdout.buffer.write(b"of a buffer\n")
    sys.stdout.flush()
    os.write(1, b"of the system\n")
    logging.getLogger("own").warning("of a logger")
    ctypes.CDLL(None).puts(b"of C")
    ctypes.CDLL(None).fflush(None)
    for method in ("fork", "spawn"):
        loader = DataLoader(PrintedItems(), num_workers=1, multiprocessing_context=method)
        assert len(list(loader)) == len(PrintedItems())
    ctx.barrier()
    average_gradients()
    print("the last line")
    return ctx.rank


def exceed_file_size(ctx: RankContext, folder: Path) -> int:
    """Write more than the limit of a file's size allows, as ``ulimit -f`` sets it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (50 * LINES, resource.RLIM_INFINITY))
    for number in range(LINES):
        print(f"{number:099d}")
    mark(folder)
    average_gradients()
    return ctx.rank


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


def use_after_cleaning(ctx: RankContext, folder: Path) -> dict[str, object]:
    """Remove everything of the launch that has a name, as a cleaner does; then use all of ddpsafe's parts."""
    spec = this_rank.spec
    assert spec is not None
    average_gradients()
    # A cleaner removes what is old, so the launcher has the logs open by then.
    files = Path(f"/proc/{spec.launcher_pid}/fd")
    log = os.path.realpath(spec.logs.stdout)
    wait_until(lambda: log in map(os.path.realpath, files.iterdir()))
    ctx.barrier()
    if ctx.rank == 1:
        shutil.rmtree(spec.run_dir)
        shutil.rmtree(spec.store_dir)
        (folder / "cleaned").touch()
    wait_until((folder / "cleaned").exists)
    ctx.barrier("after")
    dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
    with Checkpointer(folder / "checkpoints") as checkpointer:
        checkpointer.save({"rank": torch.ones(1)}, 1)
    with ctx.rank_zero_first():
        pass
    loader = DataLoader(PrintedItems(), num_workers=1)
    print("to the end")
    return {"items": len(list(loader)), "stop": ctx.stop_requested()}


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
