"""What ranks do that may be asked to stop; run by tests/faults/test_preempted.py and tests/slurm."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import ddpsafe

if TYPE_CHECKING:
    from ddpsafe import RankContext


def train_until_asked(ctx: RankContext, folder: Path, *, pace_s: float = 0.005) -> int:
    """Train until asked to stop, each rank at its own speed, and save; return the steps made."""
    step = 0
    while not ctx.stop_requested():
        step += 1
        if step == 3:
            (folder / f"ready-{ctx.rank}").touch()
        time.sleep(pace_s * (1 + ctx.rank))
    (folder / f"saved-{ctx.rank}").write_text(str(step))
    return step


def train_in_step(ctx: RankContext, folder: Path) -> int:
    """Do the same with a collective in every step, as DistributedDataParallel does."""
    step = 0
    while not ctx.stop_requested():
        step = round(ctx.reduce_mean(float(step + 1)))
        if step == 3:
            (folder / f"ready-{ctx.rank}").touch()
    (folder / f"saved-{ctx.rank}").write_text(str(step))
    return step


def finish_early(ctx: RankContext, folder: Path, steps: int) -> int:
    """Train a number of steps at very different speeds; the request comes when rank 0 is done."""
    for step in range(steps):
        if ctx.stop_requested():
            return step
        if ctx.rank == 1 and step == steps // 2:
            (folder / "ready-0").touch()
            (folder / "ready-1").touch()
            time.sleep(1.0)
        time.sleep(0.002 * ctx.rank)
    return steps


def never_ask(ctx: RankContext, folder: Path) -> None:
    """Train without a thought of stopping."""
    (folder / f"ready-{ctx.rank}").touch()
    time.sleep(600)


def ask_and_go_on(ctx: RankContext, folder: Path) -> None:
    """Ask, and take no notice of the answer."""
    ctx.stop_requested()
    (folder / f"ready-{ctx.rank}").touch()
    while True:
        ctx.stop_requested()
        time.sleep(0.01)


def fail_to_save(ctx: RankContext, folder: Path) -> None:
    """Stop when asked, but let rank 1 find the disk full."""
    train_in_step(ctx, folder)
    if ctx.rank == 1:
        raise OSError(28, "No space left on device")
    ctx.barrier("saved")


def ask_all_and_stop_ranks(ctx: RankContext, folder: Path) -> int:
    """Be told with the whole control group, as systemd and ``scancel --full`` do it."""
    step = train_in_step(ctx, folder)
    return step


def wait_in_gloo(ctx: RankContext, folder: Path) -> None:
    """Ask once; then rank 1 fails while rank 0 is in a collective with it."""
    ctx.stop_requested()
    (folder / f"ready-{ctx.rank}").touch()
    if ctx.rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def try_again(ctx: RankContext, folder: Path) -> str:
    """Be asked to stop in the first attempt only, rank 1 alone; the launcher is not asked."""
    for step in range(200):
        if ctx.stop_requested():
            return f"stopped at {step}"
        if ctx.attempt == 1 and ctx.rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.005 if ctx.attempt == 1 else 0)
    (folder / f"finished-{ctx.rank}").touch()
    return f"finished attempt {ctx.attempt}"


def main(folder: str) -> None:
    """Be the function of a rank that somebody else has started."""
    with ddpsafe.process_group() as ctx:
        train_in_step(ctx, Path(folder))
