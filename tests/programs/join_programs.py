"""Ranks that join late or not at all: an argument does not load, or a port is taken."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exception_programs import raise_own_error
from hang_programs import FOREVER_S, sleep
from training_programs import Fault, average_gradients, cleanup, mark, setup

from ddpsafe import RankContext
from ddpsafe._clock import Deadline


class FailsToLoad:
    """An argument that rank 1 cannot unpickle: it raises, or is killed."""

    def __init__(self, folder: Path, fault: Fault = raise_own_error) -> None:
        self.folder, self.fault = folder, fault

    def __reduce__(self) -> tuple[object, ...]:
        return (load_badly, (self.folder, self.fault))


def load_badly(folder: Path, fault: Fault) -> str:
    """Unpickle; meet the fault on rank 1."""
    if os.environ.get("RANK") == "1":
        mark(folder)
        fault(folder)
    return "loaded"


class SlowToLoad:
    """An argument that rank 1 unpickles slowly, so that it is stuck before the function runs."""

    def __init__(self, folder: Path, delay_s: float = FOREVER_S) -> None:
        self.folder = folder
        self.delay_s = delay_s

    def __reduce__(self) -> tuple[object, ...]:
        return (load_slowly, (self.folder, self.delay_s))


def load_slowly(folder: Path, delay_s: float) -> str:
    """Unpickle, on rank 1 with a delay, but without one in the caller."""
    if os.environ.get("RANK") == "1":
        mark(folder)
        time.sleep(delay_s)  # stuck here
    return "loaded"


def join_never(rank: int, world_size: int, folder: Path, timeout_s: float = 60) -> None:
    """Hang before `setup`."""
    if rank == 1:
        mark(folder)
        sleep(folder)
    setup(rank, world_size, timeout_s=timeout_s)


def note_limits(rank: int, folder: Path, timeout_s: float | None) -> None:
    """Make a group as scripts do; record its timeout, and how long it would wait for ranks."""
    from ddpsafe._worker import process_group

    waited: list[float] = []
    wait = process_group.wait_for_everyone

    def note(control: Any, world: Any, *, deadline: Deadline) -> None:
        waited.append(round(deadline.remaining_s()))
        wait(control, world, deadline=deadline)

    process_group.wait_for_everyone = note
    named = {} if timeout_s is None else {"timeout": timedelta(seconds=timeout_s)}
    dist.init_process_group(
        "gloo", init_method="tcp://localhost:1", rank=rank, world_size=1, **named
    )
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    (folder / "limits").write_text(f"{backend.options._timeout.total_seconds()} {float(waited[0])}")
    dist.destroy_process_group()


def join_late(rank: int, world_size: int, folder: Path, delay_s: float) -> None:
    """Call `setup` after the others have waited for some time."""
    if rank == 1:
        time.sleep(delay_s)
    setup(rank, world_size)
    average_gradients()
    (folder / f"done-{rank}").touch()
    cleanup()


def listen_on(ctx: RankContext, folder: Path, port: int) -> None:
    """Open a hard-coded port on rank 1."""
    average_gradients()
    if ctx.rank == 1:
        mark(folder)
        socket.create_server(("127.0.0.1", port))
    average_gradients()


def count_ranks_by_hand(rank: int, world_size: int, folder: Path) -> None:
    """Add up one for each rank, on a hard-coded port."""
    setup(rank, world_size)
    ones = torch.ones(1)
    dist.all_reduce(ones)
    (folder / f"count-{rank}").write_text(str(ones.item()))
    cleanup()
