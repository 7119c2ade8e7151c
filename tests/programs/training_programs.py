"""An ordinary training in which one rank meets a fault, used by every program of faults/.

Every fault records the time at which it occurs (`mark`). The line on which a rank is stuck is
marked "# stuck here", so that a test can compare it with the line that the launcher names.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpsafe import RankContext

Fault = Callable[[Path], object]

STEPS = 5
FAULT_STEP = 2


def mark(folder: Path) -> None:
    """Record the time of the fault, on the clock that all processes share."""
    temporary = folder / f"fault-{os.getpid()}"
    temporary.write_text(repr(time.monotonic()))
    temporary.rename(folder / "fault")


def since(moment: float) -> float:
    """Return the seconds since a time on that clock."""
    return time.monotonic() - moment


def train(ctx: RankContext, folder: Path, fault: Fault, culprit: int = 1) -> int:
    """Train; rank `culprit` meets the fault in the third step, and the others wait for it."""
    for step in range(STEPS):
        if step == FAULT_STEP and ctx.rank == culprit:
            mark(folder)
            fault(folder)
        average_gradients()
    return ctx.rank


def average_gradients() -> None:
    """Make one all-reduce, as a step of DDP does."""
    dist.all_reduce(torch.ones(8))  # stuck here


def setup(rank: int, world_size: int, *, timeout_s: float | None = 60) -> None:
    """Make the group as the tutorials do, on a hard-coded port; most of them name no timeout."""
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = "12355"
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timeout)


def cleanup() -> None:
    """Destroy the group as the tutorials do."""
    dist.destroy_process_group()


def train_by_hand(
    rank: int,
    world_size: int,
    folder: Path,
    fault: Fault,
    culprit: int = 1,
    timeout_s: float | None = 60,
) -> None:
    """Run a tutorial's script: `setup`, `train`, and `cleanup` only after success."""
    setup(rank, world_size, timeout_s=timeout_s)
    for step in range(STEPS):
        if step == FAULT_STEP and rank == culprit:
            mark(folder)
            fault(folder)
        average_gradients()
    cleanup()


def do_nothing_about_it(_folder: Path) -> None:
    """Do nothing: there is no fault."""


class Optimizer:
    """An argument that becomes a parameter with its optimizer in the rank.

    torch imports its compiler with the first optimizer, which takes longer than the timeouts of
    these tests; so the optimizer is made while the argument is loaded.
    """

    def __reduce__(self) -> tuple[object, ...]:
        return (make_optimizer, ())


def make_optimizer() -> Any:
    """Return an optimizer of one parameter."""
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)


def return_rank(ctx: RankContext, *_arguments: object) -> int:
    """Do nothing, whatever the arguments are, and return the rank."""
    return ctx.rank
