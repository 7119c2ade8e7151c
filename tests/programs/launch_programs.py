"""Functions of ranks; run by test_launch.py and test_console.py."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, NoReturn

import scripts
import torch
import torch.distributed as dist

import ddpsafe
from ddpsafe import RankContext


def describe(ctx: RankContext, *args: object, **kwargs: object) -> dict[str, object]:
    """Return what a rank knows about itself, with a sum over all ranks."""
    ranks = torch.tensor([ctx.rank + 1.0])
    dist.all_reduce(ranks)
    names = ("rank", "local_rank", "node_rank", "world_size", "local_world_size", "nnodes")
    return {
        **{name: getattr(ctx, name) for name in names},
        "mains": (ctx.is_main, ctx.is_local_main),
        "device": str(ctx.device),
        "backend": (ctx.backend, dist.get_backend()),
        "attempt": ctx.attempt,
        "sum": ranks.item(),
        "args": args,
        "kwargs": kwargs,
        "pid": os.getpid(),
        # Collections run; in a fork they leave torch out, whose pages it shares.
        "collects": (gc.isenabled(), gc.get_freeze_count() > 100_000),
    }


def surroundings(ctx: RankContext, *names: str) -> dict[str, object]:
    """Return the rank's environment: directory, threads, some variables."""
    return {
        "rank": ctx.rank,
        "cwd": str(Path.cwd()),
        "threads": torch.get_num_threads(),
        "env": {name: os.environ.get(name) for name in names},
    }


def add_up(ctx: RankContext, number: int) -> float:
    """Return the sum of the numbers of all ranks."""
    total = torch.tensor([float(number)])
    dist.all_reduce(total)
    return total.item() + ctx.rank


def meet_another_launch(ctx: RankContext, folder: Path, mine: str, theirs: str) -> float:
    """Run while another launch runs, and sum over this launch alone."""
    (folder / f"{mine}-{ctx.rank}").touch()
    scripts.wait_until((folder / f"{theirs}-{ctx.rank}").exists)
    return add_up(ctx, 100 if mine == "first" else 1)


def launch_again(ctx: RankContext) -> tuple[int, dict[int, int], float, str]:
    """Launch inside the rank, and use the group afterwards."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inner = ddpsafe.launch(pid_of, nproc_per_node=7)
        ddpsafe.launch(pid_of, nproc_per_node=ctx.world_size)
    (warned,) = [str(each.message) for each in caught if each.filename == __file__]
    return os.getpid(), inner.values, add_up(ctx, 1), warned


def pid_of(_ctx: RankContext) -> int:
    """Return the process id."""
    return os.getpid()


def give(_ctx: RankContext, value: object) -> object:
    """Return the argument."""
    return value


def where_it_runs(ctx: RankContext) -> Path | None:
    """Return the run directory."""
    return ctx.run_dir


def write_everywhere(ctx: RankContext, word: str) -> None:
    """Write to both descriptors from Python, from the system and from C."""
    print(f"python {word} {ctx.rank}")
    print(f"python error {word} {ctx.rank}", file=sys.stderr)
    os.write(1, f"system {word} {ctx.rank}\n".encode())
    os.write(2, f"system error {word} {ctx.rank}\n".encode())
    ctypes.CDLL(None).puts(f"libc {word} {ctx.rank}".encode())


def give_a_lock(ctx: RankContext, journal: Path) -> dict[str, object]:
    """Return an object that cannot be pickled, and record each attempt."""
    with journal.open("a") as file:
        file.write("tried\n")
    ctx.barrier()  # the first rank to return ends the attempt
    return {"loss": 0.5, "model": {"lock": threading.Lock()}}


def load_in_process(pid: int) -> int:
    """Rebuild an object, but only in the process that made it."""
    if os.getpid() != pid:
        msg = "only in its rank"
        raise LookupError(msg)
    return pid


class BoundToItsProcess:
    """An object that can be pickled, but loaded only in the process that made it."""

    def __reduce__(self) -> tuple[object, ...]:
        return (load_in_process, (os.getpid(),))


def give_what_only_the_rank_can_load(ctx: RankContext) -> object:
    """Return such an object on rank 1, and an ordinary one on rank 0."""
    return BoundToItsProcess() if ctx.rank == 1 else "plain"


class PlainError(Exception):
    """An exception with a fact."""

    def __init__(self, message: str, fact: int) -> None:
        super().__init__(message, fact)
        self.fact = fact


class SilentError(Exception):
    """An exception that cannot even be shown."""

    def __str__(self) -> str:
        msg = "never show me"
        raise RuntimeError(msg)


def raise_plain() -> NoReturn:
    """Raise with a fact and a note."""
    error = PlainError("plain text", 42)
    if sys.version_info >= (3, 11):
        error.add_note("a note from the rank")
    raise error


def raise_silent() -> NoReturn:
    """Raise an error without a text."""
    raise SilentError


def fail_on_rank_one(ctx: RankContext, fail: Any) -> None:
    """Let rank 1 fail, while rank 0 waits for it."""
    if ctx.rank == 1:
        fail()
    ctx.barrier("the other one")
