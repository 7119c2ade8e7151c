"""Faults of ranks that another launcher has started; run by test_process_group.py."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import scripts
from exception_programs import raise_own_error
from training_programs import average_gradients, mark, since

import ddpsafe
from ddpsafe import RankContext


def fail_attached(folder: Path, style: str) -> None:
    """Fail on rank 1, inside the context manager or between `setup` and `cleanup`."""

    def work(ctx: RankContext) -> None:
        average_gradients()
        if ctx.rank == 1:
            mark(folder)
            raise_own_error(folder)
        average_gradients()

    with _timed(folder):
        if style == "with":
            with ddpsafe.process_group("gloo") as ctx:
                work(ctx)
        else:
            ctx = ddpsafe.setup(backend="gloo")
            try:
                work(ctx)
            finally:
                ddpsafe.cleanup()


def miss_a_barrier_attached(folder: Path, timeout_s: float) -> str:
    """Return on rank 1 while the others wait at a barrier."""
    with _timed(folder), ddpsafe.process_group("gloo", timeouts={"barrier": timeout_s}) as ctx:
        average_gradients()
        if ctx.rank != 1:
            ctx.barrier("evaluated")
        mark(folder)
        scripts.wait_until(lambda: len(list(folder.glob("over-*"))) == ctx.world_size - 1)
        return "left alone"


def fail_beside_others(folder: Path, failing: int, others: str) -> str:
    """Fail on one rank, while the others train with it or have returned already."""

    def work(ctx: RankContext) -> str:
        average_gradients()
        if ctx.rank == failing:
            scripts.wait_until(lambda: others == "train" or len(list(folder.glob("done-*"))) > 0)
            msg = "bad batch"
            raise ValueError(msg)
        if others == "train":
            average_gradients()
        (folder / f"done-{ctx.rank}").touch()
        return "done"

    return str(ddpsafe.launch(work, backend="gloo", timeouts={"barrier": 20}).values)


def say_the_attempt(_folder: Path, counts: list[str]) -> list[int]:
    """Join with the restart count of this rank's host; return the attempt of each rank."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = counts[int(os.environ["RANK"])]
    with ddpsafe.process_group("gloo") as ctx:
        return [ctx.attempt, ddpsafe.current().attempt, *ctx.all_gather(ctx.attempt)]


@contextlib.contextmanager
def _timed(folder: Path) -> Iterator[None]:
    """Record how long after the fault the block was left."""
    entered = time.monotonic()
    try:
        yield
    finally:
        fault = folder / "fault"
        struck = float(fault.read_text()) if fault.exists() else entered
        (folder / f"over-{os.environ['RANK']}").write_text(repr(since(struck)))
