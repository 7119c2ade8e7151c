"""Ranks that raise an error of the user, or one that is hard to pickle."""

from __future__ import annotations

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
